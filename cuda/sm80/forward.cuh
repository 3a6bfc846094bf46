// Forward attention with mma.sync and cp.async, for compute capability 8.0 and up (Dao, arXiv:2307.08691).
//
// A block computes kBlockM rows of out for one head, kWarpRows for each warp. It walks the visible blocks of
// keys from the last to the first, so that a causal row meets its diagonal, and most likely its largest
// score, first. Keys and values come through one ring of buffers in the order k, v, k, v, ...
#pragma once

#include <type_traits>

#include "arithmetic.h"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "planes.cuh"
#include "ptx/grid.h"
#include "sm80/product.cuh"
#include "sm80/scores.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using forward_params = ForwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Sum>
struct ForwardArguments {
  ForwardParams params;
  LogitScaleOf<Sum> logit;
  PairOptionsOf<Sum> pairs;
  HeadRows q, k, v;  // [B * T, N, H], [B * S, K, H], [B * S, K, Hv]; k and v may be pages
};

template <class Arithmetic_, int kHeadDim_, ForwardTile kTile_, PairPolicy kPolicy_>
struct ForwardConfig {
  using Arithmetic = Arithmetic_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr ForwardTile kTile = kTile_;
  static constexpr PairPolicy kPolicy = kPolicy_;
  using Element = typename Arithmetic::Element;
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kThreads = 32 * kTile.warps;
  static constexpr int kWarpRows = kBlockM / kTile.warps;
  static_assert(kStages % 2 == 0, "kStages - 1 items after keys come values");
  using QTile = SharedTile<Arithmetic, kBlockM, kHeadDim, /*kRounded=*/true>;
  using KvTile = SharedTile<Arithmetic, kBlockN, kHeadDim>;
  static constexpr int kSharedBytes = QTile::kBytes + kStages * KvTile::kBytes;
  // The plain form of three products has no registers left for pages: it would spill 704 bytes, which costs
  // 13 % of its speed.
  static constexpr bool kMayHavePages = kPolicy.is_general() || !std::is_same_v<Arithmetic, tf32x3>;
  using Keys = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/true, kBlockM, kBlockN>;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    forward_kernel(const __grid_constant__ ForwardArguments<typename Config::Arithmetic::Sum> arguments) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Config::Element;
  using Sum = typename Arithmetic::Sum;
  using Products = sm80::Products<Arithmetic>;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  constexpr bool kMayHaveMask = Config::kPolicy.may_have_mask(), kMayHaveOthers = Config::kPolicy.others;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kStages = Config::kStages;
  constexpr int kThreads = Config::kThreads, kWarpRows = Config::kWarpRows;
  constexpr int kMTiles = kWarpRows / 16, kNTiles = kBlockN / 8, kOutTiles = kHeadDim / 8;
  const ForwardParams& params = arguments.params;

  // ---- Tile: the last rows come first; with a causal mask they see the most keys ----
  const int seqlen_q = static_cast<int>(params.seqlen_q), num_heads = static_cast<int>(params.num_heads);
  const int num_m_blocks = (seqlen_q + kBlockM - 1) / kBlockM;
  const int m_block = num_m_blocks - 1 - blockIdx.x % num_m_blocks;
  const int head = blockIdx.x / num_m_blocks % num_heads;
  const int batch = blockIdx.x / num_m_blocks / num_heads;
  const int kv_head = head / (num_heads / static_cast<int>(params.num_kv_heads));
  const int m_start = m_block * kBlockM;
  if constexpr (!kIs16Bit<Arithmetic>) {
    if (planes_hold(params, batch, kv_head)) {
      // Known before the kernel for planes has ended, which waited for the scales before it let this one
      // start. One block waits: else this grid could end before that one.
      if (blockIdx.x == gridDim.x - 1) ptx::wait_for_grid_before();
      return;
    }
    ptx::wait_for_grid_before();  // it writes the same rows
  }

  const Mask mask(params, batch);
  const KeyBlocks seen = mask.key_blocks<kBlockN>(m_start, kBlockM);
  const typename Config::Keys keys(params, batch, head, m_start, seen.begin, seen.end);
  const QueryPairs<Sum> pairs{params, arguments.pairs, batch, head};

  extern __shared__ __align__(128) uint8_t shared[];
  const QTile sQ{ptx::shared_address(shared)};  // [kBlockM, kHeadDim]
  auto sKv = [&](int stage) {                   // [kBlockN, kHeadDim], kStages times
    return KvTile{sQ.base + QTile::kBytes + stage * KvTile::kBytes};
  };

  // Of the i-th block from the end, item 2i of the ring is the keys and item 2i + 1 the values.
  const int num_items = 2 * keys.count;
  auto block_start = [&](int i) { return keys.start(keys.count - 1 - i); };
  const int last_row = num_items > 0 ? block_start(0) : 0;
  using KvLoader = TileLoader<kThreads, KvTile>;
  using QLoader = TileLoader<kThreads, QTile>;
  const SequencePages pages(params, batch);
  const int64_t kv_row0 = batch * params.seqlen_kv;
  KvLoader k_loader(arguments.k, kv_row0 + last_row, kv_head),
      v_loader(arguments.v, kv_row0 + last_row, kv_head);
  auto load_from_pages = [&](KvLoader& loader, int item, int row) {
    if constexpr (Config::kMayHavePages) {
      if (!pages) return false;
      typename KvLoader::PageRows rows;
      KvLoader::find_rows(rows, pages, row, mask.kv_length);
      KvLoader::settle_rows(rows, pages, row, mask.kv_length);
      loader.load_pages(sKv(item % kStages), rows, pages, kv_head, row, mask.kv_length);
      return true;
    }
    return false;
  };
  auto load_item = [&](int item, KvLoader& loader) {
    if (item < num_items) {
      const int row = block_start(item / 2);
      const bool is_paged = load_from_pages(loader, item, row);
      if (!is_paged) {
        loader.load(sKv(item % kStages), row, mask.kv_length);
        loader.move_rows(kMayHaveMask ? (item + 2 < num_items ? block_start(item / 2 + 1) - row : 0)
                                      : -kBlockN);
      }
    }
    ptx::copy_async_commit();  // empty groups count, too
  };
  // Waits until all threads see the oldest item and have released the buffer of the one before it.
  auto wait_item = [] {
    ptx::copy_async_wait<kStages - 2>();
    __syncthreads();
  };

  if (num_items > 0) {
    QLoader(arguments.q, int64_t{batch} * seqlen_q + m_start, head).load(sQ, m_start, mask.q_length);
  }
#pragma unroll
  for (int item = 0; item < kStages - 1; ++item) load_item(item, item % 2 ? v_loader : k_loader);

  if (num_items > 0) {
    ptx::copy_async_wait<kStages - 2>();
    QLoader::round(sQ);
  }

  const int warp_row = threadIdx.x / 32 * kWarpRows;
  const int warp_m = m_start + warp_row;
  const KMajorA<Products, QTile, kMTiles> q(sQ, warp_row);
  Sum out[kMTiles][kOutTiles][4];  // [kWarpRows, kHeadDim]
  clear(out);
  OnlineSoftmax<kMTiles, /*kHeadroom=*/0, Sum> softmax;

#pragma unroll 1
  for (int item = 0; item < num_items; item += 2) {
    const int n_start = block_start(item / 2);
    const bool hidden = mask.hides(warp_m, kWarpRows, n_start, kBlockN);
    RegisterA<Products, kMTiles, kNTiles> p;

    // ---- scores = q k^T ----
    wait_item();
    load_item(item + kStages - 1, v_loader);
    if (!hidden) {
      Sum scores[kMTiles][kNTiles][4];  // [kWarpRows, kBlockN]
      clear(scores);
      multiply_add<Products, kHeadDim / kStepK<Products>>(scores, q,
                                                          KMajorB<Products, KvTile>(sKv(item % kStages), 0));

      // ---- Mask, softmax ----
      if constexpr (kMayHaveOthers) {
        transform_scores(scores, pairs, arguments.logit, warp_m, n_start);
      } else {
        transform_scores(scores, arguments.logit);
      }
      if constexpr (kMayHaveMask) {
        if (!keys.is_whole(keys.count - 1 - item / 2)) {
          PairBits<kNTiles> visible[kMTiles];
          load_visible(visible, pairs, warp_m, n_start);
          fill_unset(scores, visible, -INFINITY);
        }
      }
      if (!mask.covers(warp_m, kWarpRows, n_start, kBlockN))
        fill_hidden(scores, mask, warp_m, n_start, -INFINITY);
      softmax.update(scores, out, arguments.logit.scale_log2);
      if constexpr (kMayHaveOthers) {
        if (pairs.has_dropout()) {
          PairBits<kNTiles> kept[kMTiles];
          draw_kept(kept, pairs, warp_m, n_start);
          fill_unset(scores, kept, 0);
        }
      }
      p.set(scores);
    }

    // ---- out += p v ----
    wait_item();
    load_item(item + kStages, k_loader);
    if (!hidden) {
      multiply_add<Products, kBlockN / kStepK<Products>, /*kLongSum=*/true>(
          out, p, MnMajorB<Products, KvTile>(sKv((item + 1) % kStages), 0));
    }
  }

  // ---- Normalize; write out and lse ----
  const int64_t q_row0 = int64_t{batch} * seqlen_q * num_heads + head;
  const int head_dim_v = arguments.v.head_dim;
  Element* gOut = static_cast<Element*>(params.out) + q_row0 * head_dim_v;
  const Sum sink = sink_log2<Sum>(params, batch, head);
  const Sum kept_factor = kMayHaveOthers ? arguments.pairs.kept_factor : 1;
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowEnd<Sum> end = softmax.finish(mt, h, sink);
      const int row = warp_m + accumulator_row(mt, h);
      if (row >= seqlen_q) continue;
      // Zeros for a fully masked row: other rows of its tile may have left 0 * NaN in it.
      Element* row_out = gOut + int64_t{row} * num_heads * head_dim_v;
      for_each_run<Arithmetic>(out, mt, h, [&](int column, const auto& values) {
        store_run<Arithmetic>(row_out, column, head_dim_v, !end.is_empty, end.normalizer * kept_factor,
                              values);
      });
      if (lane_id() % 4 == 0) {
        end.template store_lse<Arithmetic>(params, q_row0 + int64_t{row} * num_heads);
      }
    }
  }
}

template <class Config>
Status launch_forward(const ForwardParams& params, const LaunchContext& context) {
  using Element = typename Config::Element;
  using Sum = typename Config::Arithmetic::Sum;
  const ForwardArguments<Sum> arguments{params,
                                        LogitScaleOf<Sum>(params),
                                        PairOptionsOf<Sum>(params),
                                        head_rows<Element>(params.q, params.num_heads, params.head_dim),
                                        head_rows<Element>(params.k, params.num_kv_heads, params.head_dim),
                                        head_rows<Element>(params.v, params.num_kv_heads, params.head_dim_v)};
  if (const Status status = launch_lists(params, Config::Keys::shape(), context); status.failed()) {
    return status;
  }
  const int64_t blocks = ceil_div(params.seqlen_q, Config::kBlockM) * params.num_heads * params.batch;
  const auto launch_behind =
      params.planes ? launch_early<ForwardArguments<Sum>> : launch<ForwardArguments<Sum>>;
  return launch_behind(forward_kernel<Config>, blocks, Config::kThreads, Config::kSharedBytes, context,
                       arguments);
}

template <class Arithmetic, int kHeadDim>
Status forward(const ForwardParams& params, const LaunchContext& context) {
  constexpr ForwardTile kTile = forward_tile(sizeof(typename Arithmetic::Element), kHeadDim);
  using Plain = ForwardConfig<Arithmetic, kHeadDim, kTile, kNoPairs>;
  using General = ForwardConfig<Arithmetic, kHeadDim, kTile, kAnyPairsUnstaged>;
  const bool is_general = has_pair_options(params) || (params.num_pages > 0 && !Plain::kMayHavePages);
  return is_general ? launch_forward<General>(params, context) : launch_forward<Plain>(params, context);
}

}  // namespace jax_flash::cuda::sm80
