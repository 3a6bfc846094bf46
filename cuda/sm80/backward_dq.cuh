// dq alone, without atomic additions: the second half of a backward pass that does not sum dq in memory, as
// the deterministic one.
//
// Built like the forward kernel: a block owns kBlockM rows of dq for one head and walks the visible blocks of
// keys. p, dp and ds stay in a warp's registers, where ds is the first operand of dq += ds k.
#pragma once

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
using backward_dq_params = BackwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Arithmetic_, int kHeadDim_, PairPolicy kPolicy_>
struct BackwardDqConfig {
  using Arithmetic = Arithmetic_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr PairPolicy kPolicy = kPolicy_;
  using Element = typename Arithmetic::Element;
  static constexpr BackwardDqTile kTile = backward_dq_tile(sizeof(Element), kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kWarpRows = kBlockM / kTile.warps;
  static_assert(!kHasTwoPlanes<Arithmetic> || kDsRows % kWarpRows == 0);
  using QTile = SharedTile<Arithmetic, kBlockM, kHeadDim, /*kRounded=*/true>;
  using KvTile = SharedTile<Arithmetic, kBlockN, kHeadDim>;
  static constexpr int kSharedBytes = 2 * QTile::kBytes + 2 * kStages * KvTile::kBytes;
  using Keys = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/true, kBlockM, kBlockN>;
};

// The tiles of queries of all heads.
template <class Config>
__host__ __device__ constexpr int64_t query_tiles(const BackwardParams& params) {
  return ceil_div(params.seqlen_q, Config::kBlockM) * params.num_heads * params.batch;
}

template <class Config>
__device__ __forceinline__ void compute_query_tile(
    const GradientArguments<typename Config::Arithmetic::Sum>& arguments, unsigned tile) {
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
  const BackwardParams& params = arguments.params;

  // ---- Tile: the last rows come first; with a causal mask they see the most keys ----
  const int seqlen_q = static_cast<int>(params.seqlen_q), num_heads = static_cast<int>(params.num_heads);
  const int seqlen_kv = static_cast<int>(params.seqlen_kv),
            num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int num_m_blocks = (seqlen_q + kBlockM - 1) / kBlockM;
  const int m_start = (num_m_blocks - 1 - tile % num_m_blocks) * kBlockM;
  const int head = tile / num_m_blocks % num_heads;
  const int batch = tile / num_m_blocks / num_heads;
  const int kv_head = head / (num_heads / num_kv_heads);
  if (is_of_others<Arithmetic>(params, batch, kv_head)) return;

  const Mask mask(params, batch);
  const KeyBlocks seen = mask.key_blocks<kBlockN>(m_start, kBlockM);
  const typename Config::Keys keys(params, batch, head, m_start, seen.begin, seen.end);
  const QueryPairs<Sum> pairs{params, arguments.pairs, batch, head};

  extern __shared__ __align__(128) uint8_t shared[];
  const QTile sQ{ptx::shared_address(shared)};       // [kBlockM, kHeadDim]
  const QTile sDout{sQ.base + QTile::kBytes};        // [kBlockM, kHeadDim]
  const uint32_t ring = sDout.base + QTile::kBytes;  // [kStages, 2, kBlockN, kHeadDim]: k, v

  // Item i is the i-th block of keys and values from the end.
  const int num_items = keys.count;
  auto block_start = [&](int i) { return keys.start(num_items - 1 - i); };
  const int last_row = num_items > 0 ? block_start(0) : 0;
  const int64_t kv_row0 = int64_t{batch} * seqlen_kv, q_row0 = int64_t{batch} * seqlen_q;
  using KvLoader = TileLoader<kThreads, KvTile>;
  using QLoader = TileLoader<kThreads, QTile>;
  KvLoader k_loader(arguments.k, kv_row0 + last_row, kv_head),
      v_loader(arguments.v, kv_row0 + last_row, kv_head);
  auto load_item = [&](int item) {
    if (item < num_items) {
      const int row = block_start(item);
      const KvTile sK{ring + item % kStages * 2 * KvTile::kBytes}, sV{sK.base + KvTile::kBytes};
      k_loader.load(sK, row, mask.kv_length);
      v_loader.load(sV, row, mask.kv_length);
      const int step = kMayHaveMask ? (item + 1 < num_items ? block_start(item + 1) - row : 0) : -kBlockN;
      k_loader.move_rows(step);
      v_loader.move_rows(step);
    }
    ptx::copy_async_commit();
  };
  if (num_items > 0) {
    QLoader(arguments.q, q_row0 + m_start, head).load(sQ, m_start, mask.q_length);
    QLoader(arguments.dout, q_row0 + m_start, head).load(sDout, m_start, mask.q_length);
    load_item(0);
    ptx::copy_async_wait<0>();
    QLoader::round(sQ);
    QLoader::round(sDout);
  }

  const int warp_row = threadIdx.x / 32 * kWarpRows;
  const int warp_m = m_start + warp_row;
  const int64_t stats_row = (int64_t{batch} * num_heads + head) * stats_length(seqlen_q) + warp_m;
  Sum lse_log2[kMTiles][2], delta[kMTiles][2];
  const RowStatistics<Sum> rows = row_statistics<Arithmetic>(params);
  load_row_stats(lse_log2, rows.lse_log2 + stats_row);
  load_row_stats(delta, rows.delta + stats_row);
  decltype(auto) logit = logit_of<Arithmetic>(arguments, batch, kv_head);
  Sum dq[kMTiles][kHeadDim / 8][4];  // [kWarpRows, kHeadDim]
  clear(dq);

#pragma unroll 1
  for (int item = 0; item < num_items; ++item) {
    const int n_start = block_start(item);
    const KvTile sK{ring + item % kStages * 2 * KvTile::kBytes};  // [kBlockN, kHeadDim]
    const KvTile sV{sK.base + KvTile::kBytes};                    // [kBlockN, kHeadDim]

    // All threads see this item and have finished with the one before it.
    ptx::copy_async_wait<0>();
    __syncthreads();
    if constexpr (kStages > 1) load_item(item + 1);

    if (!mask.hides(warp_m, kWarpRows, n_start, kBlockN)) {
      // ---- p = exp(q k^T - lse), ds = p * (dout v^T - delta) ----
      const bool covered = mask.covers(warp_m, kWarpRows, n_start, kBlockN);
      Sum p[kMTiles][kNTiles][4], ds[kMTiles][kNTiles][4];  // [kWarpRows, kBlockN]
      clear(p);
      multiply_rows<Arithmetic, kHeadDim>(p, sQ, warp_row, sK, 0);
      if constexpr (kMayHaveOthers) {
        transform_scores(p, pairs, logit, warp_m, n_start);
      } else {
        transform_scores(p, logit);
      }
      recompute_probabilities(p, logit, lse_log2, [](auto&) {});
      clear(ds);
      multiply_dp<Arithmetic, kHeadDim / kStepK<Arithmetic>>(
          ds, KMajorA<Arithmetic, QTile, kMTiles>(sDout, warp_row), KMajorB<Arithmetic, KvTile>(sV, 0));
      [[maybe_unused]] PairBits<kNTiles> bits[kMTiles];
      if (kMayHaveOthers && pairs.has_dropout()) {
        draw_kept(bits, pairs, warp_m, n_start);
        for_each_accumulator(ds, [&](int mt, int h, int nt, int c) {
          Sum& x = ds[mt][nt][2 * h + c];
          x = bits[mt].test(nt, 2 * h + c) ? x * arguments.pairs.kept_factor : 0;
        });
      }
      score_gradients(ds, p, delta, 1);
      if (!covered) fill_hidden(ds, mask, warp_m, n_start, 0);
      if (kMayHaveMask && !keys.is_whole(num_items - 1 - item)) {
        load_visible(bits, pairs, warp_m, n_start);
        fill_unset(ds, bits, 0);
      }

      // ---- dq += ds k ----
      RegisterA<Arithmetic, kMTiles, kNTiles> ds_operand;
      const MnMajorB<Arithmetic, KvTile> k_columns(sK, 0);
      if constexpr (kHasTwoPlanes<Arithmetic>) {
        const int exponent = ds_exponent(ds);
        ds_operand.set(ds, power_of_two(exponent));
        const float factor = power_of_two(-exponent);
        multiply_add<Arithmetic, kBlockN / 16, /*kLongSum=*/true>(dq, ds_operand, k_columns,
                                                                  [&](int, int) { return factor; });
      } else {
        ds_operand.set(ds);
        multiply_add<Arithmetic, kBlockN / kStepK<Arithmetic>, /*kLongSum=*/true>(dq, ds_operand, k_columns);
      }
    }
    if constexpr (kStages == 1) {
      __syncthreads();
      load_item(item + 1);
    }
  }

  // ---- Write dq; rows beyond the length get zeros ----
  Sum of_dq = arguments.logit.scale;
  if constexpr (kHasTwoPlanes<Arithmetic>) {
    of_dq = ldexpf(of_dq, PlaneScales(params, batch, kv_head).of_dq() - (kPlaneTop + 1));
  }
  const int head_dim = arguments.q.head_dim;
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_m + accumulator_row(mt, h);
      if (row >= seqlen_q) continue;
      // In a fully masked row, other rows of its tile may have left 0 * NaN.
      const bool seeing = mask.first_key(row) <= mask.last_key(row) &&
                          (!kMayHaveMask || rows.lse_log2[stats_row + accumulator_row(mt, h)] != INFINITY);
      Element* gDq = static_cast<Element*>(params.dq) + ((q_row0 + row) * num_heads + head) * head_dim;
      for_each_run<Arithmetic>(dq, mt, h, [&](int column, const auto& values) {
        store_run<Arithmetic>(gDq, column, head_dim, seeing, of_dq, values);
      });
    }
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm) backward_dq_kernel(
    const __grid_constant__ GradientArguments<typename Config::Arithmetic::Sum> arguments) {
  for_each_tile<typename Config::Arithmetic>(
      arguments.params, static_cast<unsigned>(query_tiles<Config>(arguments.params)),
      [&](unsigned tile) { compute_query_tile<Config>(arguments, tile); });
}

template <class Config>
Status launch_backward_dq(const BackwardParams& params, const LaunchContext& context) {
  using Arithmetic = typename Config::Arithmetic;
  const auto arguments = gradient_arguments<Arithmetic>(params);
  if (const Status status = launch_lists(params, Config::Keys::shape(), context); status.failed()) {
    return status;
  }
  const int64_t blocks =
      num_blocks<Arithmetic>(params, query_tiles<Config>(params), Config::kTile.blocks_per_sm, context);
  return launch(backward_dq_kernel<Config>, blocks, Config::kThreads, Config::kSharedBytes, context,
                arguments);
}

template <class Arithmetic, int kHeadDim>
Status backward_dq(const BackwardParams& params, const LaunchContext& context) {
  if constexpr (kHasPlainForm<Arithmetic>) {
    if (!has_pair_options(params)) {
      return launch_backward_dq<BackwardDqConfig<Arithmetic, kHeadDim, kNoPairs>>(params, context);
    }
  }
  return launch_backward_dq<BackwardDqConfig<Arithmetic, kHeadDim, kAnyPairsUnstaged>>(params, context);
}

}  // namespace jax_flash::cuda::sm80
