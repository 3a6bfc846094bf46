// Forward mode with mma.sync and cp.async: tout and tlse, the derivatives of out and lse in some directions.
//
//   p = exp(s - lse), ts = scale (tq k^T + q tk^T) + ...,    tlse = rowsum(p ts)
//   tout = (p ts) v + p tv - tlse out
//
// (p ts) v and tlse out cancel where few keys count. So each row's ts are taken relative to a number c, their
// mean in the first block of keys with a good part of the row's weight, if no other with any came before.
// Since out = p v,
//
//   tout = (p (ts - c)) v + p tv - (tlse - c) out,    tlse = rowsum(p (ts - c)) + c rowsum(p)
//
// where tlse - c has p (ts - c) as rounded for the product, so that errors cancel, too. Where the weight is
// spread over many blocks, c is 0, and the errors of many terms average out. A bias or slopes may move logits
// much further apart: then p (ts - c) is split into two operands, with one product more.
//
// Built like the forward kernel: a block owns kBlockM rows for one head and walks the visible blocks of keys.
// Since lse is known, nothing is rescaled. p and ts stay in a warp's registers, where they are first operands
// of the products with the values. A block of the grid computes `directions` directions, one after the other;
// where all keys are one block, p serves them all.
#pragma once

#include <algorithm>
#include <type_traits>

#include "arithmetic.h"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "sm80/product.cuh"
#include "sm80/score_tangents.cuh"
#include "sm80/scores.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using tangent_params = TangentParams;
}

namespace jax_flash::cuda::sm80 {

// What is loaded of a block of keys, in this order.
enum TangentItem { kKeys, kTangentKeys, kValues, kTangentValues, kNumTangentItems };

template <class Sum>
struct TangentArguments {
  TangentParams params;
  LogitScaleOf<Sum> logit;
  PairOptionsOf<Sum> pairs;
  HeadRows q, tq;                    // [B * T, N, H], [D * B * T, N, H]
  HeadRows items[kNumTangentItems];  // [B * S, K, H or Hv]; of tangents [D * B * S, K, H or Hv]
  int directions;                    // of a block of the grid
};

template <class Arithmetic_, int kHeadDim_, PairPolicy kPolicy_>
struct TangentConfig {
  using Arithmetic = Arithmetic_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr PairPolicy kPolicy = kPolicy_;
  using Element = typename Arithmetic::Element;
  static constexpr TangentTile kTile = tangent_tile(sizeof(Element), kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kWarpRows = kBlockM / kTile.warps;
  // All warps read each tile of keys and values: rounding it to TF32 once was measured to save 9 %.
  using QTile = SharedTile<Arithmetic, kBlockM, kHeadDim, /*kRounded=*/true>;
  using KvTile = SharedTile<Arithmetic, kBlockN, kHeadDim, /*kRounded=*/true>;
  static constexpr int kSharedBytes = 2 * QTile::kBytes + kStages * KvTile::kBytes;
  using Keys = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/true, kBlockM, kBlockN>;
  static constexpr bool kSplitsOperand =
      kPolicy.others && !std::is_same_v<Arithmetic, tf32x3> && !kIs64Bit<Arithmetic>;
};

// As the operand of a product.
template <class Arithmetic>
__device__ __forceinline__ typename Arithmetic::Sum rounded(typename Arithmetic::Sum x) {
  if constexpr (kIs16Bit<Arithmetic>) {
    return static_cast<float>(static_cast<typename Arithmetic::Element>(x));
  } else if constexpr (std::is_same_v<Arithmetic, tf32>) {
    return __uint_as_float(ptx::round_to_tf32(__float_as_uint(x)) & 0xffffe000);
  } else {
    return x;
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    tangent_kernel(const __grid_constant__ TangentArguments<typename Config::Arithmetic::Sum> arguments) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Config::Element;
  using Sum = typename Arithmetic::Sum;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  constexpr bool kMayHaveMask = Config::kPolicy.may_have_mask(), kMayHaveOthers = Config::kPolicy.others;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kStages = Config::kStages;
  constexpr int kThreads = Config::kThreads, kWarpRows = Config::kWarpRows;
  constexpr int kMTiles = kWarpRows / 16, kNTiles = kBlockN / 8;
  constexpr int kScoreSteps = kHeadDim / kStepK<Arithmetic>, kValueSteps = kBlockN / kStepK<Arithmetic>;
  const TangentParams& params = arguments.params;
  const bool moves_logits = params.moves_logits();
  const bool is_split = Config::kSplitsOperand && (params.tbias || params.talibi_slopes);

  // ---- Tile: the last rows come first; with a causal mask they see the most keys ----
  const int seqlen_q = static_cast<int>(params.seqlen_q), num_heads = static_cast<int>(params.num_heads);
  const int num_m_blocks = (seqlen_q + kBlockM - 1) / kBlockM;
  const int m_start = (num_m_blocks - 1 - blockIdx.x % num_m_blocks) * kBlockM;
  const int head = blockIdx.x / num_m_blocks % num_heads;
  const int batch_and_part = blockIdx.x / num_m_blocks / num_heads;
  const int batch = batch_and_part % static_cast<int>(params.batch);
  const int kv_head = head / (num_heads / static_cast<int>(params.num_kv_heads));
  const int first_direction = batch_and_part / static_cast<int>(params.batch) * arguments.directions;
  const int end_direction =
      min(first_direction + arguments.directions, static_cast<int>(params.num_directions));

  const Mask mask(params, batch);
  const KeyBlocks seen = mask.key_blocks<kBlockN>(m_start, kBlockM);
  const typename Config::Keys keys(params, batch, head, m_start, seen.begin, seen.end);
  const QueryPairs<Sum> pairs{params, arguments.pairs, batch, head};

  extern __shared__ __align__(128) uint8_t shared[];
  const QTile sQ{ptx::shared_address(shared)};  // [kBlockM, kHeadDim]
  const QTile sTq{sQ.base + QTile::kBytes};     // [kBlockM, kHeadDim]
  auto sKv = [&](int stage) {                   // [kBlockN, kHeadDim], kStages times
    return KvTile{sTq.base + QTile::kBytes + stage * KvTile::kBytes};
  };

  // ---- Items: the tiles of a block of keys that the call has ----
  int items = 0, items_per_block = 0;  // two bits for each
  for (int item = 0; item < kNumTangentItems; ++item) {
    if (item == kValues ? moves_logits : arguments.items[item].data != nullptr) {
      items |= item << 2 * items_per_block++;
    }
  }
  auto block_start = [&](int i) { return keys.start(keys.count - 1 - i); };
  using KvLoader = TileLoader<kThreads, KvTile>;
  using QLoader = TileLoader<kThreads, QTile>;
  int load_block = 0, load_item = 0, load_stage = 0, use_stage = 0;
  int64_t direction_row = 0;  // of the tangents' keys
  auto load_next = [&] {
    if (load_block < keys.count) {
      const int item = items >> 2 * load_item & 3, row = block_start(load_block);
      const bool is_tangent = item == kTangentKeys || item == kTangentValues;
      const int64_t row0 = (is_tangent ? direction_row : 0) + batch * params.seqlen_kv;
      KvLoader(arguments.items[item], row0 + row, kv_head).load(sKv(load_stage), row, mask.kv_length);
      if (++load_item == items_per_block) load_item = 0, ++load_block;
      if (++load_stage == kStages) load_stage = 0;
    }
    ptx::copy_async_commit();  // empty groups count, too
  };
  // The oldest item, which all threads see; they have released the buffer of the one before it.
  auto next_tile = [&] {
    const KvTile tile = sKv(use_stage);
    ptx::copy_async_wait<kStages - 2>();
    KvLoader::round(tile);
    __syncthreads();
    load_next();
    if (++use_stage == kStages) use_stage = 0;
    return tile;
  };

  const int warp_row = threadIdx.x / 32 * kWarpRows;
  const int warp_m = m_start + warp_row;
  const KMajorA<Arithmetic, QTile, kMTiles> q(sQ, warp_row), tq(sTq, warp_row);
  const int64_t row0 = int64_t{batch} * seqlen_q;
  Sum lse_log2[kMTiles][2];
  for_each_accumulator_row(lse_log2, [&](int mt, int h) {
    const int row = min(warp_m + accumulator_row(mt, h), seqlen_q - 1);
    const Sum lse = static_cast<const Sum*>(params.lse)[(row0 + row) * num_heads + head];
    lse_log2[mt][h] = lse == -INFINITY ? INFINITY : lse_in_log2(lse);
  });
  // exp2 of a soft cap's argument and q k^T are gone once p is there.
  const bool keeps_p =
      keys.count == 1 && arguments.logit.transform != LogitTransform::kSoftCap && !params.tscale_factor;
  Sum p[kMTiles][kNTiles][4];  // [kWarpRows, kBlockN]

#pragma unroll 1
  for (int direction = first_direction; direction < end_direction; ++direction) {
    const int64_t batch_element = direction * params.batch + batch;
    load_block = load_item = load_stage = use_stage = 0;
    direction_row = direction * params.batch * params.seqlen_kv;
    __syncthreads();  // all have finished with the direction before
    if (keys.count > 0) {
      if (direction == first_direction)
        QLoader(arguments.q, row0 + m_start, head).load(sQ, m_start, mask.q_length);
      if (params.tq) {
        QLoader(arguments.tq, batch_element * seqlen_q + m_start, head).load(sTq, m_start, mask.q_length);
      }
    }
#pragma unroll
    for (int item = 0; item < kStages - 1; ++item) load_next();
    if (keys.count > 0) {
      ptx::copy_async_wait<kStages - 2>();
      if (direction == first_direction) QLoader::round(sQ);
      if (params.tq) QLoader::round(sTq);
    }
    Sum tout[kMTiles][kHeadDim / 8][4];  // [kWarpRows, kHeadDim]
    clear(tout);
    bool is_settled = false;                                 // is c known for all rows of the warp?
    Sum center[kMTiles][2] = {};                             // c
    Sum weight[kMTiles][2] = {};                             // rowsum(p)
    Sum sum[kMTiles][2] = {}, rounded_sum[kMTiles][2] = {};  // rowsum(p (ts - c))

#pragma unroll 1
    for (int block = 0; block < keys.count; ++block) {
      const int n_start = block_start(block);
      const bool hidden = mask.hides(warp_m, kWarpRows, n_start, kBlockN);
      const bool has_p = keeps_p && direction > first_direction;
      Sum ts[kMTiles][kNTiles][4];  // [kWarpRows, kBlockN]
      clear(ts);

      // ---- s = q k^T, ts = tq k^T + q tk^T ----
      const KvTile sK = next_tile();
      if (!hidden) {
        const KMajorB<Arithmetic, KvTile> k(sK, 0);
        if (!has_p) {
          clear(p);
          multiply_add<Arithmetic, kScoreSteps>(p, q, k);
        }
        if (params.tq) multiply_add<Arithmetic, kScoreSteps>(ts, tq, k);
      }
      if (params.tk) {
        const KvTile sTk = next_tile();
        if (!hidden) multiply_add<Arithmetic, kScoreSteps>(ts, q, KMajorB<Arithmetic, KvTile>(sTk, 0));
      }

      // ---- p = exp(s - lse), ts = p ts; hidden pairs are 0 ----
      [[maybe_unused]] PairBits<kNTiles> bits[kMTiles];
      if (!hidden) {
        for_each_accumulator(
            ts, [&](int mt, int h, int nt, int c) { ts[mt][nt][2 * h + c] *= arguments.logit.scale; });
        if constexpr (kMayHaveOthers) {
          add_operand_tangents(ts, p, params, params, pairs, direction, batch, head, arguments.logit.scale,
                               warp_m, n_start);
        }
        if (!has_p) {
          if constexpr (kMayHaveOthers) {
            transform_scores(p, pairs, arguments.logit, warp_m, n_start);
          } else {
            transform_scores(p, arguments.logit);
          }
          if (arguments.logit.transform == LogitTransform::kSoftCap) {
            for_each_accumulator(ts, [&](int mt, int h, int nt, int c) {
              ts[mt][nt][2 * h + c] *= soft_cap_slope(p[mt][nt][2 * h + c]);
            });
          }
          for_each_accumulator(p, [&](int mt, int h, int nt, int c) {
            Sum& x = p[mt][nt][2 * h + c];
            x = exp2_of(fma(x, arguments.logit.scale_log2, -lse_log2[mt][h]));
          });
        }
        const bool is_covered = mask.covers(warp_m, kWarpRows, n_start, kBlockN);
        const bool is_whole = !kMayHaveMask || keys.is_whole(keys.count - 1 - block);
        if (!is_whole) load_visible(bits, pairs, warp_m, n_start);
        auto hide = [&](Sum(&x)[kMTiles][kNTiles][4]) {
          if (!is_covered) fill_hidden(x, mask, warp_m, n_start, 0);
          if (!is_whole) fill_unset(x, bits, 0);
        };
        hide(p);
        Sum block_weight[kMTiles][2] = {};
        for_each_accumulator(
            p, [&](int mt, int h, int nt, int c) { block_weight[mt][h] += p[mt][nt][2 * h + c]; });
        if (!is_settled) {
          Sum block_sum[kMTiles][2] = {};
          for_each_accumulator(ts, [&](int mt, int h, int nt, int c) {
            const Sum x = p[mt][nt][2 * h + c];
            if (x > 0) block_sum[mt][h] = fma(x, ts[mt][nt][2 * h + c], block_sum[mt][h]);
          });
          bool rows_settled = true;
          for_each_accumulator_row(center, [&](int mt, int h) {
            // What came before is not taken relative to c: below the error of the products.
            constexpr Sum kNoWeight = kIs64Bit<Arithmetic>                 ? 0x1p-58
                                      : std::is_same_v<Arithmetic, tf32x3> ? 0x1p-28
                                                                           : 0x1p-16;
            constexpr Sum kGoodPart = 0x1p-4;
            const Sum before = row_sum(weight[mt][h]), here = row_sum(block_weight[mt][h]);
            const Sum mean = row_sum(block_sum[mt][h]) / here;
            if (before < kNoWeight && here >= kGoodPart && fabs(mean) < INFINITY) center[mt][h] = mean;
            rows_settled &= before + here >= kNoWeight || lse_log2[mt][h] == INFINITY;
          });
          is_settled = __all_sync(0xffffffff, rows_settled);
        }
        for_each_accumulator_row(weight, [&](int mt, int h) { weight[mt][h] += block_weight[mt][h]; });
        for_each_accumulator(ts, [&](int mt, int h, int nt, int c) {
          Sum& x = ts[mt][nt][2 * h + c];
          x = p[mt][nt][2 * h + c] * (x - center[mt][h]);
        });
        hide(ts);
        for_each_accumulator(ts, [&](int mt, int h, int nt, int c) {
          Sum& x = ts[mt][nt][2 * h + c];
          sum[mt][h] += x;
          if (!is_split) x = rounded<Arithmetic>(x);
          rounded_sum[mt][h] += x;
        });
        if (kMayHaveOthers && pairs.has_dropout()) draw_kept(bits, pairs, warp_m, n_start);
      }

      // ---- tout += ts v + p tv ----
      RegisterA<Arithmetic, kMTiles, kNTiles> operand;
      if (moves_logits) {
        const KvTile sV = next_tile();
        if (!hidden) {
          if (kMayHaveOthers && pairs.has_dropout()) fill_unset(ts, bits, 0);
          auto add_product = [&] {
            operand.set(ts);
            multiply_add<Arithmetic, kValueSteps, /*kLongSum=*/true>(tout, operand,
                                                                     MnMajorB<Arithmetic, KvTile>(sV, 0));
          };
          add_product();
          if (is_split) {
            for_each_accumulator(ts, [&](int mt, int h, int nt, int c) {
              Sum& x = ts[mt][nt][2 * h + c];
              x -= rounded<Arithmetic>(x);
            });
            add_product();
          }
        }
      }
      if (params.tv) {
        const KvTile sTv = next_tile();
        if (!hidden) {
          if (kMayHaveOthers && pairs.has_dropout()) {
            Sum kept[kMTiles][kNTiles][4];  // p may be needed again
            for_each_accumulator(
                kept, [&](int mt, int h, int nt, int c) { kept[mt][nt][2 * h + c] = p[mt][nt][2 * h + c]; });
            fill_unset(kept, bits, 0);
            operand.set(kept);
          } else {
            operand.set(p);
          }
          multiply_add<Arithmetic, kValueSteps, /*kLongSum=*/true>(tout, operand,
                                                                   MnMajorB<Arithmetic, KvTile>(sTv, 0));
        }
      }
    }

    // ---- Write tout and tlse; zeros for fully masked rows ----
    const int head_dim_v = arguments.items[kValues].head_dim;
    const Sum kept_factor = kMayHaveOthers ? arguments.pairs.kept_factor : 1;
    for_each_accumulator_row(sum, [&](int mt, int h) {
      const Sum c = center[mt][h], shares = row_sum(weight[mt][h]);  // sinks have the rest of 1
      const Sum tlse = row_sum(sum[mt][h]) + c * shares;
      const Sum out_factor = row_sum(rounded_sum[mt][h]) + c * (shares - 1);
      const int row = warp_m + accumulator_row(mt, h);
      if (row >= seqlen_q) return;
      const bool seeing = mask.first_key(row) <= mask.last_key(row) && lse_log2[mt][h] != INFINITY;
      const int64_t out_row = (row0 + row) * num_heads + head;
      const int64_t tout_row = (batch_element * seqlen_q + row) * num_heads + head;
      const Element* gOut = static_cast<const Element*>(params.out) + out_row * head_dim_v;
      Element* gTout = static_cast<Element*>(params.tout) + tout_row * head_dim_v;
      for_each_run<Arithmetic>(tout, mt, h, [&](int column, const auto& values) {
        Sum results[kRunColumns<Arithmetic>];
#pragma unroll
        for (int i = 0; i < kRunColumns<Arithmetic>; ++i) {
          const Sum out = column + i < head_dim_v ? static_cast<Sum>(gOut[column + i]) : 0;
          results[i] = fma(values[i], kept_factor, -out_factor * out);
        }
        store_run<Arithmetic>(gTout, column, head_dim_v, seeing, 1, results);
      });
      if (lane_id() % 4 == 0) static_cast<Sum*>(params.tlse)[tout_row] = seeing ? tlse : 0;
    });
  }
}

template <class Config>
Status launch_tangent(const TangentParams& params, const LaunchContext& context) {
  using Element = typename Config::Element;
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim, Hv = params.head_dim_v;
  const int64_t tiles = ceil_div(params.seqlen_q, Config::kBlockM) * N * params.batch;
  if (tiles == 0 || params.num_directions == 0) return cudaSuccess;
  if (const Status status = launch_lists(params, Config::Keys::shape(), context); status.failed()) {
    return status;
  }
  // Directions share a block where they share p, but no further than until each multiprocessor has some
  // blocks.
  const int64_t wanted_parts = ceil_div(8 * context.multiprocessors, tiles);
  const int64_t directions =
      params.seqlen_kv <= Config::kBlockN
          ? ceil_div(params.num_directions, std::min(wanted_parts, params.num_directions))
          : 1;
  using Sum = typename Config::Arithmetic::Sum;
  const TangentArguments<Sum> arguments{
      params,
      LogitScaleOf<Sum>(params),
      PairOptionsOf<Sum>(params),
      head_rows<Element>(params.q, N, H),
      head_rows<Element>(params.tq, N, H),
      {head_rows<Element>(params.k, K, H), head_rows<Element>(params.tk, K, H),
       head_rows<Element>(params.v, K, Hv), head_rows<Element>(params.tv, K, Hv)},
      static_cast<int>(directions)};
  return launch(tangent_kernel<Config>, tiles * ceil_div(params.num_directions, directions), Config::kThreads,
                Config::kSharedBytes, context, arguments);
}

template <class Arithmetic, int kHeadDim>
Status tangent(const TangentParams& params, const LaunchContext& context) {
  if constexpr (kHasPlainForm<Arithmetic>) {
    if (!has_pair_options(params)) {
      return launch_tangent<TangentConfig<Arithmetic, kHeadDim, kNoPairs>>(params, context);
    }
  }
  return launch_tangent<TangentConfig<Arithmetic, kHeadDim, kAnyPairsUnstaged>>(params, context);
}

}  // namespace jax_flash::cuda::sm80
