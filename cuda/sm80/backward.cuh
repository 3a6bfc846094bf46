// Backward attention with mma.sync and cp.async, for compute capability 8.0 and up (Dao, arXiv:2307.08691,
// algorithm 2).
//
// A block keeps kBlockN rows of k and v of one key head, and the sums of their gradients (in float32; in
// float64 for float64) in registers. It walks the blocks of queries that may see these keys, in every query
// head of the group, recomputes the probabilities from lse and adds
//   dv += p^T dout        ds = p * (dout v^T - delta)        dk += ds^T q        dq += ds k
// Other blocks add to the same dq, so it goes to dq_accum by atomic additions; dq_accum is dq itself where
// that has the type of the sums. In the deterministic case, and where there is no dq_accum, backward_dq.cuh
// computes it instead. One kHeadDim serves q, k and v: missing columns are zeros.
#pragma once

#include <algorithm>
#include <type_traits>

#include "arithmetic.h"
#include "delta.cuh"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "planes.cuh"
#include "sm80/gradient_arguments.cuh"
#include "sm80/product.cuh"
#include "sm80/scores.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using backward_params = BackwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Sum>
struct BackwardArguments : GradientArguments<Sum> {
  Sum* dq_accum;  // [B, T, N, H]; null where another kernel computes dq
  int stages;     // buffers for queries and dout: 1 where 2 would leave room for fewer blocks, else 2
};

template <class Arithmetic_, int kHeadDim_, BackwardTile kTile_, PairPolicy kPolicy_>
struct BackwardConfig {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr BackwardTile kTile = kTile_;
  static constexpr PairPolicy kPolicy = kPolicy_;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = 32 * kTile.warps;
  using QTile = SharedTile<Arithmetic, kBlockM, kHeadDim>;
  using KvTile = SharedTile<Arithmetic, kBlockN, kHeadDim, /*kRounded=*/true>;
  // With rows of at least 128 bytes.
  using ScoreTile =
      SharedTile<Arithmetic, kBlockM, std::max(kBlockN, 128 / int{sizeof(typename QTile::Element)}),
                 /*kRounded=*/true>;
  // Of planes: what ds of each warp is to be multiplied by.
  static constexpr int kDsFactorBytes = kHasTwoPlanes<Arithmetic> ? 4 * kTile.warps : 0;
  static constexpr int shared_bytes(int stages) {
    return 2 * KvTile::kBytes + 2 * stages * QTile::kBytes + 2 * ScoreTile::kBytes + kDsFactorBytes;
  }
};

// Walks the blocks of queries of a tile of keys: those of the group's first head, then of its second, ...
template <class Config>
class QueryWalk {
 public:
  using Queries =
      BlockList<Config::kPolicy.may_have_mask(), /*kOfQueries=*/false, Config::kBlockN, Config::kBlockM>;

  int head, m_start;  // of the current block
  int blocks = 0;     // left, including the current one

  __device__ __forceinline__ QueryWalk(const BackwardParams& params, int batch, int n_start, int first_head,
                                       int group, const QueryBlocks& seen_by)
      : params_(params),
        batch_(batch),
        n_start_(n_start),
        first_(seen_by.start / Config::kBlockM),
        m_blocks_(seen_by.count),
        queries_(of_head(first_head)) {
    head = first_head;
    if constexpr (Queries::kMayBeListed) {
#pragma unroll 1
      for (int i = 0; i < group; ++i) blocks += of_head(first_head + i).count;
    } else {
      blocks = m_blocks_ * group;
    }
    seek();
  }

  // Moves to the next block, if there is one.
  __device__ __forceinline__ void advance() {
    --blocks;
    ++index_;
    seek();
  }

  __device__ __forceinline__ bool is_whole() const { return queries_.is_whole(index_); }

 private:
  __device__ __forceinline__ Queries of_head(int head) const {
    return {params_, batch_, head, n_start_, first_, first_ + m_blocks_};
  }

  __device__ __forceinline__ void seek() {
    if (blocks == 0) return;
    while (index_ == queries_.count) {
      ++head;
      index_ = 0;
      if constexpr (Queries::kMayBeListed) queries_ = of_head(head);
    }
    m_start = queries_.start(index_);
  }

  const BackwardParams& params_;
  int batch_, n_start_, first_, m_blocks_;
  Queries queries_;
  int index_ = 0;
};

// The tiles of keys of all key heads.
template <class Config>
__host__ __device__ constexpr int64_t key_tiles(const BackwardParams& params) {
  return ceil_div(params.seqlen_kv, Config::kBlockN) * params.num_kv_heads * params.batch;
}

template <class Config>
__device__ __forceinline__ void compute_key_tile(
    const BackwardArguments<typename Config::Arithmetic::Sum>& arguments, unsigned tile) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Config::Element;
  using Sum = typename Arithmetic::Sum;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  using ScoreTile = typename Config::ScoreTile;
  constexpr bool kPlanes = kHasTwoPlanes<Arithmetic>;
  constexpr BackwardTile kTile = Config::kTile;
  constexpr bool kMayHaveMask = Config::kPolicy.may_have_mask(), kMayHaveOthers = Config::kPolicy.others;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kThreads = Config::kThreads;
  // A warp's parts: scores [kScoreRows, kScoreColumns], dk and dv [kDkvRows, kDkvColumns], dq [kWarpDqRows,
  // kWarpDqColumns].
  constexpr int kScoreRows = kBlockM / kTile.score_warps_m;
  constexpr int kScoreColumns = kBlockN / (kTile.warps / kTile.score_warps_m);
  static_assert(!kPlanes || kDsRows % kScoreRows == 0);
  constexpr int kDkvRows = kBlockN / kTile.dkv_warps_n;
  constexpr int kDkvColumns = kHeadDim / (kTile.warps / kTile.dkv_warps_n);
  constexpr int kWarpDqRows = kBlockM / kTile.dq_warps_m;
  constexpr int kWarpDqColumns = kHeadDim / (kTile.warps / kTile.dq_warps_m);
  // Steps of the summed index that have the same factor of ds, if it has one.
  constexpr int kRowSteps = kPlanes && kScoreRows >= 32 ? 2 : 1;
  constexpr int kColumnSteps = kPlanes && kScoreColumns >= 32 ? 2 : 1;
  const BackwardParams& params = arguments.params;
  const int warp = threadIdx.x / 32;
  const int score_row = warp % kTile.score_warps_m * kScoreRows;
  const int score_column = warp / kTile.score_warps_m * kScoreColumns;
  const int dkv_row = warp % kTile.dkv_warps_n * kDkvRows,
            dkv_column = warp / kTile.dkv_warps_n * kDkvColumns;
  const int dq_row = warp % kTile.dq_warps_m * kWarpDqRows,
            dq_column = warp / kTile.dq_warps_m * kWarpDqColumns;

  // ---- Tile: the first keys come first; with a causal mask the most rows see them ----
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int num_heads = static_cast<int>(params.num_heads),
            num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int num_n_blocks = (seqlen_kv + kBlockN - 1) / kBlockN;
  const int n_start = tile % num_n_blocks * kBlockN;
  const int kv_head = tile / num_n_blocks % num_kv_heads;
  const int batch = tile / num_n_blocks / num_kv_heads;
  const int group = num_heads / num_kv_heads;  // query heads of this key head
  if (is_of_others<Arithmetic>(params, batch, kv_head)) return;

  const Mask mask(params, batch);
  const QueryBlocks seen_by = mask.query_blocks<kBlockM>(n_start, kBlockN);

  const int first_head = kv_head * group, head_dim = arguments.q.head_dim;
  const int64_t kv_row0 = int64_t{batch} * seqlen_kv, q_row0 = int64_t{batch} * seqlen_q;
  extern __shared__ __align__(128) uint8_t shared[];
  const KvTile sK{ptx::shared_address(shared)};        // [kBlockN, kHeadDim]
  const KvTile sV{sK.base + KvTile::kBytes};           // [kBlockN, kHeadDim]
  const ScoreTile sP{sV.base + KvTile::kBytes};        // [kBlockM, kBlockN]
  const ScoreTile sDs{sP.base + ScoreTile::kBytes};    // [kBlockM, kBlockN]
  const uint32_t ring = sDs.base + ScoreTile::kBytes;  // [stages, 2, kBlockM, kHeadDim]: q, dout
  const uint32_t sDsFactor =
      ring + 2 * arguments.stages * QTile::kBytes;  // [warps along keys, along queries]
  const uint32_t stage_step = arguments.stages == 2 ? 2 * QTile::kBytes : 0;

  using Walk = QueryWalk<Config>;
  Walk walk(params, batch, n_start, first_head, group, seen_by), to_load = walk;
  using KvLoader = TileLoader<kThreads, KvTile>;
  using QLoader = TileLoader<kThreads, QTile>;
  QLoader q_loader(arguments.q, q_row0, first_head);
  QLoader dout_loader(arguments.dout, q_row0, first_head);
  int loader_m = 0, loader_head = first_head;
  uint32_t load_stage = 0;
  auto load_next = [&] {
    if (to_load.blocks > 0) {
      const QTile sQ{ring + load_stage}, sDout{sQ.base + QTile::kBytes};
      for (QLoader* loader : {&q_loader, &dout_loader}) {
        loader->move_rows(to_load.m_start - loader_m);
        loader->move_heads(to_load.head - loader_head);
      }
      loader_m = to_load.m_start;
      loader_head = to_load.head;
      q_loader.load(sQ, loader_m, mask.q_length);
      dout_loader.load(sDout, loader_m, mask.q_length);
      load_stage ^= stage_step;
      to_load.advance();
    }
    ptx::copy_async_commit();
  };

  Sum dk[kDkvRows / 16][kDkvColumns / 8][4], dv[kDkvRows / 16][kDkvColumns / 8][4];
  clear(dk);
  clear(dv);
  if (walk.blocks > 0) {
    KvLoader(arguments.k, kv_row0 + n_start, kv_head).load(sK, n_start, mask.kv_length);
    KvLoader(arguments.v, kv_row0 + n_start, kv_head).load(sV, n_start, mask.kv_length);
    load_next();
    ptx::copy_async_wait<0>();
    KvLoader::round(sK);
    KvLoader::round(sV);
  }

  // float32 and float64 dq are summed in place, so ds has its scale. 16-bit ds would lose small values by
  // that; there the scale is applied when dq_accum is converted. Sums of products of planes get it with their
  // units.
  const Sum ds_scale = kMultiplies16Bit<Arithmetic> ? 1 : arguments.logit.scale;
  decltype(auto) logit = logit_of<Arithmetic>(arguments, batch, kv_head);
  // Of planes, ds of each warp has a factor. Here it is by the row and column in the block.
  [[maybe_unused]] float of_dq = 1;
  if constexpr (kPlanes) {
    const int exponent = PlaneScales(params, batch, kv_head).of_dq() - (kPlaneTop + 1);
    of_dq = ldexpf(arguments.logit.scale, exponent);
  }
  auto ds_factor = [&](int row, int column) {
    const int of_warp = row / kScoreRows + column / kScoreColumns * kTile.score_warps_m;
    return __uint_as_float(ptx::load_shared(sDsFactor + 4 * of_warp));
  };
  auto of_ds = [](auto factor) {
    if constexpr (kPlanes) {
      return factor;
    } else {
      return NoFactor();
    }
  };
  const int64_t stats_stride = stats_length(seqlen_q);
  const int64_t stats_row = (int64_t{batch} * num_heads + first_head) * stats_stride + score_row;
  const int64_t dq_stride = int64_t{num_heads} * head_dim;
  Sum* gDq0 = arguments.dq_accum + (q_row0 + dq_row + lane_id() / 4) * dq_stride +
              int64_t{first_head} * head_dim + dq_column;
  // Does every run of this warp's columns lie within head_dim, aligned?
  const bool dq_columns_whole =
      dq_column + kWarpDqColumns <= head_dim && head_dim % kRunColumns<Arithmetic> == 0;
  uint32_t stage = 0;
#pragma unroll 1
  for (; walk.blocks > 0; walk.advance()) {
    const int m_start = walk.m_start, head = walk.head;
    const int64_t stats = stats_row + (head - first_head) * stats_stride + m_start;
    const QueryPairs<Sum> pairs{params, arguments.pairs, batch, head};
    const QTile sQ{ring + stage};                // [kBlockM, kHeadDim]
    const QTile sDout{sQ.base + QTile::kBytes};  // [kBlockM, kHeadDim]

    Sum lse_log2[kScoreRows / 16][2], delta[kScoreRows / 16][2];
    const RowStatistics<Sum> rows = row_statistics<Arithmetic>(params);
    load_row_stats(lse_log2, rows.lse_log2 + stats);
    load_row_stats(delta, rows.delta + stats);

    // All threads see this block's rows and have finished with those before.
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (stage_step != 0) load_next();

    // ---- p = exp(q k^T - lse) ----
    using Scores = Sum[kScoreRows / 16][kScoreColumns / 8][4];
    Scores p;
    clear(p);
    multiply_rows<Arithmetic, kHeadDim>(p, sQ, score_row, sK, score_column);
    const int row0 = m_start + score_row, column0 = n_start + score_column;
    const bool covered = mask.covers(row0, kScoreRows, column0, kScoreColumns);
    const bool whole = !kMayHaveMask || walk.is_whole();
    [[maybe_unused]] PairBits<kScoreColumns / 8> visible[kScoreRows / 16], kept[kScoreRows / 16];
    if constexpr (kMayHaveOthers) {
      transform_scores(p, pairs, logit, row0, column0);
    } else {
      transform_scores(p, logit);
    }
    if constexpr (kMayHaveMask) {
      if (!whole) load_visible(visible, pairs, row0, column0);
    }
    if constexpr (kMayHaveOthers) {
      if (pairs.has_dropout()) draw_kept(kept, pairs, row0, column0);
    }
    auto hide = [&](auto& x) {
      if (!covered) fill_hidden(x, mask, row0, column0, 0);
      if (!whole) fill_unset(x, visible, 0);
    };
    recompute_probabilities(p, logit, lse_log2, [&](auto& probabilities) {
      hide(probabilities);
      if (kMayHaveOthers && pairs.has_dropout()) {
        Scores kept_probabilities;
        for_each_accumulator(p, [&](int mt, int h, int nt, int c) {
          kept_probabilities[mt][nt][2 * h + c] = probabilities[mt][nt][2 * h + c];
        });
        fill_unset(kept_probabilities, kept, 0);
        store_accumulators<Arithmetic>(sP, score_row, score_column, kept_probabilities);
      } else {
        store_accumulators<Arithmetic>(sP, score_row, score_column, probabilities);
      }
    });

    // ---- ds = p * (dout v^T - delta) ----
    Scores ds;
    clear(ds);
    multiply_dp<Arithmetic, kHeadDim / kStepK<Arithmetic>>(
        ds, KMajorA<Arithmetic, QTile, kScoreRows / 16>(sDout, score_row),
        KMajorB<Arithmetic, KvTile>(sV, score_column));
    if (kMayHaveOthers && pairs.has_dropout()) {
      for_each_accumulator(ds, [&](int mt, int h, int nt, int c) {
        Sum& x = ds[mt][nt][2 * h + c];
        x = kept[mt].test(nt, 2 * h + c) ? x * arguments.pairs.kept_factor : 0;
      });
    }
    score_gradients(ds, p, delta, ds_scale);
    hide(ds);
    if constexpr (kPlanes) {
      const int exponent = ds_exponent(ds);
      store_accumulators<Arithmetic>(sDs, score_row, score_column, ds, power_of_two(exponent));
      if (lane_id() == 0) ptx::store_shared(sDsFactor + 4 * warp, __float_as_uint(power_of_two(-exponent)));
    } else {
      store_accumulators<Arithmetic>(sDs, score_row, score_column, ds);
    }
    __syncthreads();
    // What products with ds are to be multiplied by, for dk and for dq.
    const auto factor_for_dk =
        of_ds([&](int mt, int step) { return ds_factor(16 * step, dkv_row + 16 * mt); });
    const auto factor_for_dq =
        of_ds([&](int mt, int step) { return of_dq * ds_factor(dq_row + 16 * mt, 16 * step); });

    // ---- dv += p^T dout ----
    multiply_add<Arithmetic, kBlockM / kStepK<Arithmetic>, /*kLongSum=*/true, kPlanes ? 2 : 1>(
        dv, MnMajorA<Arithmetic, ScoreTile, kDkvRows / 16>(sP, dkv_row),
        MnMajorB<Arithmetic, QTile>(sDout, dkv_column));

    // ---- dk += ds^T q ----
    multiply_add<Arithmetic, kBlockM / kStepK<Arithmetic>, /*kLongSum=*/true, kRowSteps>(
        dk, MnMajorA<Arithmetic, ScoreTile, kDkvRows / 16>(sDs, dkv_row),
        MnMajorB<Arithmetic, QTile>(sQ, dkv_column), factor_for_dk);

    // ---- dq += ds k ----
    if (arguments.dq_accum) {
      Sum* gDq = gDq0 + m_start * dq_stride + int64_t{head - first_head} * head_dim;
      Sum dq[kWarpDqRows / 16][kWarpDqColumns / 8][4];
      clear(dq);
      multiply_add<Arithmetic, kBlockN / kStepK<Arithmetic>, /*kLongSum=*/kPlanes, kColumnSteps>(
          dq, KMajorA<Arithmetic, ScoreTile, kWarpDqRows / 16>(sDs, dq_row),
          MnMajorB<Arithmetic, KvTile>(sK, dq_column), factor_for_dq);
      // A branch around an addition would wait for earlier additions to leave, so whole tiles have no branch.
      auto add = [&]<bool kWhole>(std::bool_constant<kWhole>) {
#pragma unroll
        for (int mt = 0; mt < kWarpDqRows / 16; ++mt) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const bool row_valid = kWhole || m_start + dq_row + accumulator_row(mt, h) < mask.q_length;
            Sum* gRow = gDq + (16 * mt + 8 * h) * dq_stride;
            for_each_run<Arithmetic>(dq, mt, h, [&](int column, const auto& values) {
              if constexpr (kWhole) {
                ptx::reduce_add(gRow + column, values);
              } else {
#pragma unroll
                for (int i = 0; i < kRunColumns<Arithmetic>; ++i) {
                  const bool valid = row_valid && dq_column + column + i < head_dim;
                  if (valid) ptx::reduce_add(gRow + column + i, {values[i]});
                }
              }
            });
          }
        }
      };
      if (dq_columns_whole && m_start + kBlockM <= mask.q_length) {
        add(std::true_type());
      } else {
        add(std::false_type());
      }
    }

    if (stage_step == 0) {
      __syncthreads();
      load_next();
    }
    stage ^= stage_step;
  }

  // ---- Are there infinities? Their small parts are NaN, and with them dk or dv of keys that meet them ----
  if constexpr (std::is_same_v<Arithmetic, tf32x3>) {
    bool has_nan = false;
    const auto look_at = [&](const auto& acc) {
      for_each_accumulator(acc, [&](int mt, int h, int nt, int c) {
        const Sum x = acc[mt][nt][2 * h + c];
        has_nan |= x != x;
      });
    };
    look_at(dk);
    look_at(dv);
    if (has_nan) *params.has_nan = 1;
  }

  // ---- Write dk and dv; keys beyond the length get zeros ----
  Sum of_dk = kIs16Bit<Arithmetic> ? arguments.logit.scale : 1;
  Sum of_dv = kMayHaveOthers ? arguments.pairs.kept_factor : 1;
  if constexpr (kPlanes) {
    const PlaneScales scales(params, batch, kv_head);
    of_dk = ldexpf(arguments.logit.scale, scales.of_dk() - (kPlaneTop + 1));
    of_dv = ldexpf(of_dv, scales.of_dv());
  }
#pragma unroll
  for (int mt = 0; mt < kDkvRows / 16; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = n_start + dkv_row + mn_major_accumulator_row<Arithmetic>(mt, h);
      if (row >= seqlen_kv) continue;
      const int64_t offset = (kv_row0 + row) * num_kv_heads + kv_head;
      auto write = [&](void* to, int columns, Sum factor, const auto& acc) {
        Element* gRow = static_cast<Element*>(to) + offset * columns;
        for_each_run<Arithmetic>(acc, mt, h, [&](int column, const auto& values) {
          store_run<Arithmetic>(gRow, dkv_column + column, columns, row < mask.kv_length, factor, values);
        });
      };
      write(params.dk, head_dim, of_dk, dk);
      write(params.dv, arguments.v.head_dim, of_dv, dv);
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    backward_kernel(const __grid_constant__ BackwardArguments<typename Config::Arithmetic::Sum> arguments) {
  for_each_tile<typename Config::Arithmetic>(
      arguments.params, static_cast<unsigned>(key_tiles<Config>(arguments.params)),
      [&](unsigned tile) { compute_key_tile<Config>(arguments, tile); });
}

template <class Config>
Status launch_backward(const BackwardParams& params, const LaunchContext& context) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Config::Element;
  using Sum = typename Arithmetic::Sum;
  // float32 and float64 gradients are summed in place.
  Sum* dq_accum = nullptr;
  if constexpr (kIs16Bit<Arithmetic>) {
    if (!params.leaves_dq) dq_accum = params.dq_accum;
  } else {
    if (!params.leaves_dq) dq_accum = static_cast<Sum*>(params.dq);
  }
  auto blocks_per_sm = [&](int stages) {
    return blocks_that_fit(Config::kTile.blocks_per_sm, Config::shared_bytes(stages), context);
  };
  if (blocks_per_sm(1) == 0) return Status::not_served();
  const int stages = blocks_per_sm(2) >= blocks_per_sm(1) ? 2 : 1;
  const int64_t dq_size = params.batch * params.seqlen_q * params.num_heads * params.head_dim;
  Status status;
  if constexpr (kHasTwoPlanes<Arithmetic>) {
    if (dq_accum) status = cudaMemsetAsync(dq_accum, 0, sizeof(Sum) * dq_size, context.stream);
    if (!status.failed()) status = launch_planes(params, params.dout, context);
    if (!status.failed()) status = launch_plane_rows(params, context);
  } else if (!std::is_same_v<Arithmetic, tf32x3_infinity> || params.planes) {  // else there are rows already
    status = launch_delta<Element>(params, reinterpret_cast<float*>(dq_accum),
                                   dq_accum ? dq_size * (sizeof(Sum) / 4) : 0, context);
  }
  if (!status.failed()) {
    status = launch_lists(params, QueryWalk<Config>::Queries::shape(), context);
  }
  if (status.failed()) return status;
  const BackwardArguments<Sum> arguments{gradient_arguments<Arithmetic>(params), dq_accum, stages};
  const int64_t blocks =
      num_blocks<Arithmetic>(params, key_tiles<Config>(params), Config::kTile.blocks_per_sm, context);
  status = launch(backward_kernel<Config>, blocks, Config::kThreads, Config::shared_bytes(stages), context,
                  arguments);
  if constexpr (kIs16Bit<Arithmetic>) {
    if (!status.failed() && dq_accum) return launch_convert<Element>(params, context);
  }
  return status;
}

template <class Arithmetic, int kHeadDim, BackwardTile kTile>
Status launch_backward_tile(const BackwardParams& params, const LaunchContext& context) {
  return has_pair_options(params)
             ? launch_backward<BackwardConfig<Arithmetic, kHeadDim, kTile, kAnyPairsUnstaged>>(params,
                                                                                               context)
             : launch_backward<BackwardConfig<Arithmetic, kHeadDim, kTile, kNoPairs>>(params, context);
}

template <class Arithmetic, int kHeadDim>
Status backward(const BackwardParams& params, const LaunchContext& context) {
  constexpr int kElementBytes = sizeof(typename Arithmetic::Element);
  constexpr BackwardTile kTile = backward_tile(kElementBytes, kHeadDim);
  const Status status = launch_backward_tile<Arithmetic, kHeadDim, kTile>(params, context);
  if constexpr (!kHasTwoPlanes<Arithmetic> && has_compact_backward_tile(kElementBytes, kHeadDim)) {
    if (!status.is_served()) {
      constexpr BackwardTile kCompact = compact_backward_tile(kElementBytes, kHeadDim);
      return launch_backward_tile<Arithmetic, kHeadDim, kCompact>(params, context);
    }
  }
  return status;
}

}  // namespace jax_flash::cuda::sm80
