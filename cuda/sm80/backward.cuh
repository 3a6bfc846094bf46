// Backward attention with mma.sync and cp.async, compute capability 8.0 and up (Dao, arXiv:2307.08691,
// algorithm 2).
//
// A block keeps kBlockN rows of k and v of one key head, and the float32 sums of their gradients in
// registers; it walks the blocks of queries that may see them, in every query head of the group, recomputes
// the probabilities from lse and adds
//   dv += p^T dout        ds = p * (dout v^T - delta)        dk += ds^T q        dq += ds k
// dq, which other blocks share, goes to dq_accum by atomic float32 additions; when deterministic that product
// is left to backward_dq.cuh. One head dim serves q, k and v: the smaller one's columns are zeros.
#pragma once

#include "arithmetic.h"
#include "launch.h"
#include "mask.cuh"
#include "params.h"
#include "sm80/product.cuh"
#include "sm80/scores.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"

namespace jax_flash::cuda {
using backward_params = BackwardParams;
}

namespace jax_flash::cuda::sm80 {

struct BackwardArguments {
  BackwardParams params;
  LogitScale logit;
  int q_copy_bytes, k_copy_bytes, v_copy_bytes, dout_copy_bytes;
  float* dq_accum;  // [B, T, N, H]; null when deterministic
  int stages;       // buffers for queries and dout: 2, or 1 where a second would keep a second block off the
                    // processor
};

template <class Arithmetic, int kHeadDim>
struct BackwardConfig {
  using Element = typename Arithmetic::Element;
  static constexpr BackwardTile kTile = backward_tile(sizeof(Element), kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = 32 * kTile.warps;
  using QTile = SharedTile<Arithmetic, kBlockM, kHeadDim>;
  using KvTile = SharedTile<Arithmetic, kBlockN, kHeadDim>;
  using ScoreTile = SharedTile<Arithmetic, kBlockM, kBlockN>;
  static constexpr int shared_bytes(int stages) {
    return 2 * KvTile::kBytes + 2 * stages * QTile::kBytes + 2 * ScoreTile::kBytes;
  }
};

template <class Arithmetic, int kHeadDim>
__global__ void __launch_bounds__(BackwardConfig<Arithmetic, kHeadDim>::kThreads,
                                  BackwardConfig<Arithmetic, kHeadDim>::kTile.blocks_per_sm)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  using Config = BackwardConfig<Arithmetic, kHeadDim>;
  using Element = typename Config::Element;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  using ScoreTile = typename Config::ScoreTile;
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kThreads = Config::kThreads;
  // A warp's part of the scores, of dk and dv, and of dq.
  constexpr int kScoreRows = kBlockM / kTile.score_warps_m;
  constexpr int kScoreColumns = kBlockN / (kTile.warps / kTile.score_warps_m);
  constexpr int kDkvRows = kBlockN / kTile.dkv_warps_n;
  constexpr int kDkvColumns = kHeadDim / (kTile.warps / kTile.dkv_warps_n);
  constexpr int kDqRows = kBlockM / kTile.dq_warps_m;
  constexpr int kDqColumns = kHeadDim / (kTile.warps / kTile.dq_warps_m);
  const BackwardParams& params = arguments.params;
  const int warp = threadIdx.x / 32;
  const int score_row = warp % kTile.score_warps_m * kScoreRows;
  const int score_column = warp / kTile.score_warps_m * kScoreColumns;
  const int dkv_row = warp % kTile.dkv_warps_n * kDkvRows,
            dkv_column = warp / kTile.dkv_warps_n * kDkvColumns;
  const int dq_row = warp % kTile.dq_warps_m * kDqRows, dq_column = warp / kTile.dq_warps_m * kDqColumns;

  // ---- Which tile: the first keys first, which the most rows see when causal ----
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int num_heads = static_cast<int>(params.num_heads),
            num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int num_n_blocks = (seqlen_kv + kBlockN - 1) / kBlockN;
  const int n_start = blockIdx.x % num_n_blocks * kBlockN;
  const int kv_head = blockIdx.x / num_n_blocks % num_kv_heads;
  const int batch = blockIdx.x / num_n_blocks / num_kv_heads;
  const int group = num_heads / num_kv_heads;  // query heads of this key head

  const Mask mask(params, batch);
  const int n_last = min(n_start + kBlockN, mask.kv_length) - 1;
  const int last_query = n_last < n_start ? -1 : mask.last_query(n_last);
  const int m_begin = mask.first_query(n_start) / kBlockM;
  const int m_blocks = max(last_query / kBlockM + 1 - m_begin, 0) * (last_query >= 0);

  const int head_dim = static_cast<int>(params.head_dim), head_dim_v = static_cast<int>(params.head_dim_v);
  const int64_t kv_row0 = (int64_t{batch} * seqlen_kv) * num_kv_heads + kv_head;
  const int64_t q_row0 =
      (int64_t{batch} * seqlen_q) * num_heads + kv_head * group;  // of the group's first head
  const int64_t stats_row0 = (int64_t{batch} * num_heads + kv_head * group) * seqlen_q;
  const GlobalRows<Element> gK{static_cast<const Element*>(params.k) + kv_row0 * head_dim,
                               int64_t{num_kv_heads} * head_dim, head_dim, arguments.k_copy_bytes};
  const GlobalRows<Element> gV{static_cast<const Element*>(params.v) + kv_row0 * head_dim_v,
                               int64_t{num_kv_heads} * head_dim_v, head_dim_v, arguments.v_copy_bytes};
  const GlobalRows<Element> gQ{static_cast<const Element*>(params.q) + q_row0 * head_dim,
                               int64_t{num_heads} * head_dim, head_dim, arguments.q_copy_bytes};
  const GlobalRows<Element> gDout{static_cast<const Element*>(params.dout) + q_row0 * head_dim_v,
                                  int64_t{num_heads} * head_dim_v, head_dim_v, arguments.dout_copy_bytes};

  extern __shared__ __align__(128) uint8_t shared[];
  const int stages = arguments.stages;
  const KvTile sK{ptx::shared_address(shared)};        // [kBlockN, kHeadDim]
  const KvTile sV{sK.base + KvTile::kBytes};           // [kBlockN, kHeadDim]
  const ScoreTile sP{sV.base + KvTile::kBytes};        // [kBlockM, kBlockN]
  const ScoreTile sDs{sP.base + ScoreTile::kBytes};    // [kBlockM, kBlockN]
  const uint32_t ring = sDs.base + ScoreTile::kBytes;  // [stages, 2, kBlockM, kHeadDim]: q, dout

  // Item i is block m_begin + i % m_blocks of the group's head i / m_blocks.
  const int num_items = m_blocks * group;
  auto load_item = [&](int item) {
    if (item < num_items) {
      const int head = item / m_blocks, row = (m_begin + item % m_blocks) * kBlockM;
      const QTile sQ{ring + item % stages * 2 * QTile::kBytes}, sDout{sQ.base + QTile::kBytes};
      GlobalRows<Element> q = gQ, dout = gDout;
      q.data += head * head_dim;
      dout.data += head * head_dim_v;
      load_tile<kThreads>(sQ, q, row, mask.q_length);
      load_tile<kThreads>(sDout, dout, row, mask.q_length);
    }
    ptx::copy_async_commit();
  };

  float dk[kDkvRows / 16][kDkvColumns / 8][4], dv[kDkvRows / 16][kDkvColumns / 8][4];
  clear(dk);
  clear(dv);
  if (num_items > 0) {
    load_tile<kThreads>(sK, gK, n_start, mask.kv_length);
    load_tile<kThreads>(sV, gV, n_start, mask.kv_length);
    load_item(0);
  }

#pragma unroll 1
  for (int item = 0; item < num_items; ++item) {
    const int head = item / m_blocks, m_start = (m_begin + item % m_blocks) * kBlockM;
    const QTile sQ{ring + item % stages * 2 * QTile::kBytes};  // [kBlockM, kHeadDim]
    const QTile sDout{sQ.base + QTile::kBytes};                // [kBlockM, kHeadDim]

    float lse_log2[kScoreRows / 16][2], delta[kScoreRows / 16][2];
    const int64_t stats_row = stats_row0 + int64_t{head} * seqlen_q + m_start + score_row;
    const int stats_rows = seqlen_q - m_start - score_row;
    load_row_stats(lse_log2, params.lse_log2 + stats_row, stats_rows, INFINITY);
    load_row_stats(delta, params.delta + stats_row, stats_rows, 0);

    // This item has come, to all threads, and all are done with the one before it.
    ptx::copy_async_wait<0>();
    __syncthreads();
    if (stages == 2) load_item(item + 1);

    // ---- p = exp(q k^T - lse) ----
    float p[kScoreRows / 16][kScoreColumns / 8][4];
    clear(p);
    multiply_add<Arithmetic, kHeadDim / kStepK<Arithmetic>>(
        p, KMajorA<Arithmetic, QTile, kScoreRows / 16>(sQ, score_row),
        KMajorB<Arithmetic, KvTile>(sK, score_column));
    const bool covered = mask.covers(m_start + score_row, kScoreRows, n_start + score_column, kScoreColumns);
    recompute_probabilities(p, arguments.logit, lse_log2, [&](auto& probabilities) {
      if (!covered) fill_hidden(probabilities, mask, m_start + score_row, n_start + score_column, 0);
      store_accumulators<Arithmetic>(sP, score_row, score_column, probabilities);
    });

    // ---- ds = p * (dout v^T - delta) ----
    float ds[kScoreRows / 16][kScoreColumns / 8][4];
    clear(ds);
    multiply_add<Arithmetic, kHeadDim / kStepK<Arithmetic>>(
        ds, KMajorA<Arithmetic, QTile, kScoreRows / 16>(sDout, score_row),
        KMajorB<Arithmetic, KvTile>(sV, score_column));
    score_gradients(ds, p, delta);
    if (!covered) fill_hidden(ds, mask, m_start + score_row, n_start + score_column, 0);
    store_accumulators<Arithmetic>(sDs, score_row, score_column, ds);
    __syncthreads();

    // ---- dv += p^T dout ----
    multiply_add<Arithmetic, kBlockM / kStepK<Arithmetic>>(
        dv, MnMajorA<Arithmetic, ScoreTile, kDkvRows / 16>(sP, dkv_row),
        MnMajorB<Arithmetic, QTile>(sDout, dkv_column));

    // ---- dq += ds k ----
    if (arguments.dq_accum) {
      float dq[kDqRows / 16][kDqColumns / 8][4];
      clear(dq);
      multiply_add<Arithmetic, kBlockN / kStepK<Arithmetic>>(
          dq, KMajorA<Arithmetic, ScoreTile, kDqRows / 16>(sDs, dq_row),
          MnMajorB<Arithmetic, KvTile>(sK, dq_column));
#pragma unroll
      for (int mt = 0; mt < kDqRows / 16; ++mt) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = m_start + dq_row + accumulator_row(mt, h);
          if (row >= mask.q_length) continue;
          float* gDq = arguments.dq_accum + (q_row0 + int64_t{row} * num_heads + head) * head_dim;
          for_each_run<Arithmetic>(dq, mt, h, [&](int column, const auto& values) {
            add_run(gDq, dq_column + column, head_dim, arguments.logit.scale, values);
          });
        }
      }
    }

    // ---- dk += ds^T q ----
    multiply_add<Arithmetic, kBlockM / kStepK<Arithmetic>>(
        dk, MnMajorA<Arithmetic, ScoreTile, kDkvRows / 16>(sDs, dkv_row),
        MnMajorB<Arithmetic, QTile>(sQ, dkv_column));
    if (stages == 1) {
      __syncthreads();
      load_item(item + 1);
    }
  }

  // ---- Write dk and dv; keys beyond the length get zeros ----
#pragma unroll
  for (int mt = 0; mt < kDkvRows / 16; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = n_start + dkv_row + mn_major_accumulator_row<Arithmetic>(mt, h);
      if (row >= seqlen_kv) continue;
      const int64_t offset = kv_row0 + int64_t{row} * num_kv_heads;
      auto write = [&](void* to, int columns, float factor, const auto& acc) {
        Element* gRow = static_cast<Element*>(to) + offset * columns;
        for_each_run<Arithmetic>(acc, mt, h, [&](int column, const auto& values) {
          store_run<Arithmetic>(gRow, dkv_column + column, columns, row < mask.kv_length, factor, values);
        });
      };
      write(params.dk, head_dim, arguments.logit.scale, dk);
      write(params.dv, head_dim_v, 1, dv);
    }
  }
}

template <class Arithmetic, int kHeadDim>
cudaError_t backward(const BackwardParams& params, const LaunchContext& context) {
  using Config = BackwardConfig<Arithmetic, kHeadDim>;
  using Element = typename Config::Element;
  // float32 gradients are summed where they are wanted.
  float* dq_accum = params.options.deterministic ? nullptr
                    : kIs16Bit<Arithmetic>       ? params.dq_accum
                                                 : static_cast<float*>(params.dq);
  auto blocks_per_sm = [&](int stages) {
    const int bytes = Config::shared_bytes(stages);
    if (bytes > context.shared_memory_per_block) return 0;
    return std::min(Config::kTile.blocks_per_sm, context.shared_memory_per_sm / (bytes + 1024));
  };
  const int stages = blocks_per_sm(2) >= std::max(blocks_per_sm(1), 1) ? 2 : 1;
  const BackwardArguments arguments{params,
                                    LogitScale(params.options),
                                    copy_bytes<Element>(params.q, params.head_dim),
                                    copy_bytes<Element>(params.k, params.head_dim),
                                    copy_bytes<Element>(params.v, params.head_dim_v),
                                    copy_bytes<Element>(params.dout, params.head_dim_v),
                                    dq_accum,
                                    stages};
  const int64_t blocks = ceil_div(params.seqlen_kv, Config::kBlockN) * params.num_kv_heads * params.batch;
  return launch(backward_kernel<Arithmetic, kHeadDim>, blocks, Config::kThreads, Config::shared_bytes(stages),
                context, arguments);
}

}  // namespace jax_flash::cuda::sm80
