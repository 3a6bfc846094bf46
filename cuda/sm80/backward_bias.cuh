// The gradient of bias or of alibi_slopes, with mma.sync and cp.async: ds, summed over the broadcast
// dimensions as far as BackwardParams::dbias says (params.h).
//
// A block owns kBlockM queries by kBlockN keys of the sums and walks the batch elements and heads that share
// them, so that each sum has one order. Rows of q, k, dout and v come in pieces of kPiece columns, first for
// q k^T, then for dout v^T. So one kernel serves every head dim.
#pragma once

#include <type_traits>

#include "arithmetic.h"
#include "bias_sums.cuh"
#include "delta.cuh"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "sm80/gradient_arguments.cuh"
#include "sm80/product.cuh"
#include "sm80/scores.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using backward_bias_params = BackwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Arithmetic>
struct BackwardBiasConfig {
  using Element = typename Arithmetic::Element;
  static constexpr BackwardBiasTile kTile =
      backward_bias_tile(sizeof(Element), std::is_same_v<Arithmetic, tf32x3>);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n, kPiece = kTile.piece;
  static constexpr int kThreads = 32 * kTile.warps;
  // A warp's part of the scores: [kRows, kColumns].
  static constexpr int kRows = kBlockM / kTile.warps_m, kColumns = kBlockN / (kTile.warps / kTile.warps_m);
  using QTile = SharedTile<Arithmetic, kBlockM, kPiece>;
  using KvTile = SharedTile<Arithmetic, kBlockN, kPiece>;
  static constexpr int kStages = 2, kStageBytes = QTile::kBytes + KvTile::kBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  // Sums that are to be added up further take the place of the pieces, at the end.
  static_assert(bias_sums_bytes<typename Arithmetic::Sum>(kBlockM, kBlockN, kRows, kColumns) <= kSharedBytes);
};

template <class Arithmetic, class Config = BackwardBiasConfig<Arithmetic>>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm)
    backward_bias_kernel(const __grid_constant__ GradientArguments<typename Arithmetic::Sum> arguments) {
  using Element = typename Config::Element;
  using Sum = typename Arithmetic::Sum;
  using Products = sm80::Products<Arithmetic>;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kPiece = Config::kPiece;
  constexpr int kThreads = Config::kThreads;
  constexpr int kMTiles = Config::kRows / 16, kNTiles = Config::kColumns / 8;
  const BackwardParams& params = arguments.params;

  // ---- Tile of the sums, and the batch elements and heads that add to it ----
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int num_heads = static_cast<int>(params.num_heads);
  const int group = num_heads / max(static_cast<int>(params.num_kv_heads), 1);
  using Tile = BiasSumsTile<kBlockM, kBlockN>;
  using Item = typename Tile::Item;
  const Tile tile(params, blockIdx.x);
  const int m_start = tile.m_start, n_start = tile.n_start;

  // ---- Pieces of an item: those of q and k, then those of dout and v ----
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t ring = ptx::shared_address(shared);
  auto sQ = [&](int stage) { return QTile{ring + stage * Config::kStageBytes}; };
  auto sK = [&](int stage) { return KvTile{ring + stage * Config::kStageBytes + QTile::kBytes}; };
  const int score_pieces = (arguments.q.head_dim + kPiece - 1) / kPiece;
  const int num_pieces = score_pieces + (arguments.v.head_dim + kPiece - 1) / kPiece;
  auto load_piece = [&](const Item& item, int piece, int stage) {
    const int batch = item.batch, head = item.head;
    const Mask mask(params, batch);
    const bool is_scores = piece < score_pieces;
    const int column = (is_scores ? piece : piece - score_pieces) * kPiece;
    auto rows_from = [&](HeadRows rows, int head) {
      rows.data = static_cast<const Element*>(rows.data) + int64_t{head} * rows.head_dim + column;
      rows.head_dim -= column;
      return rows;
    };
    const HeadRows q = rows_from(is_scores ? arguments.q : arguments.dout, head);
    const HeadRows k = rows_from(is_scores ? arguments.k : arguments.v, head / group);
    TileLoader<kThreads, QTile>(q, int64_t{batch} * seqlen_q + m_start, 0)
        .load(sQ(stage), m_start, mask.q_length);
    TileLoader<kThreads, KvTile>(k, int64_t{batch} * seqlen_kv + n_start, 0)
        .load(sK(stage), n_start, mask.kv_length);
  };

  const int warp = threadIdx.x / 32;
  const int row = warp % Config::kTile.warps_m * Config::kRows;
  const int column = warp / Config::kTile.warps_m * Config::kColumns;
  const int row0 = m_start + row, column0 = n_start + column;
  Sum sums[kMTiles][kNTiles][4];
  clear(sums);
  int stage = 0;
  Item item = tile.first();
  if (tile.exists(item)) load_piece(item, 0, stage);
  ptx::copy_async_commit();

#pragma unroll 1
  while (tile.exists(item)) {
    const Item next_item = tile.next(item);
    const int batch = item.batch, head = item.head;
    Sum p[kMTiles][kNTiles][4], ds[kMTiles][kNTiles][4];
    clear(p);
    clear(ds);
    constexpr int kSteps = kPiece / kStepK<Arithmetic>;
    auto multiply_piece = [&](int piece, auto multiply) {
      ptx::copy_async_wait<0>();
      __syncthreads();  // all threads see the piece and have finished with the one before it
      if (piece + 1 < num_pieces) {
        load_piece(item, piece + 1, stage ^ 1);
      } else if (tile.exists(next_item)) {
        load_piece(next_item, 0, stage ^ 1);
      }
      ptx::copy_async_commit();
      multiply(KMajorA<Products, QTile, kMTiles>(sQ(stage), row),
               KMajorB<Products, KvTile>(sK(stage), column));
      stage ^= 1;
    };

    // ---- p = exp(q k^T - lse) ----
#pragma unroll 1
    for (int piece = 0; piece < score_pieces; ++piece) {
      multiply_piece(piece, [&](const auto& a, const auto& b) { multiply_add<Products, kSteps>(p, a, b); });
    }
    const int64_t stats = (int64_t{batch} * num_heads + head) * stats_length(seqlen_q) + row0;
    const QueryPairs<Sum> pairs{params, arguments.pairs, batch, head};
    Sum lse_log2[kMTiles][2];
    load_row_stats(lse_log2, statistics<Sum>(params.lse_log2) + stats);
    transform_scores(p, pairs, arguments.logit, row0, column0);
    recompute_probabilities(p, arguments.logit, lse_log2, [](auto&) {});

    // ---- ds = p * (dout v^T - delta) ----
#pragma unroll 1
    for (int piece = score_pieces; piece < num_pieces; ++piece) {
      multiply_piece(piece, [&](const auto& a, const auto& b) { multiply_dp<Products, kSteps>(ds, a, b); });
    }
    PairBits<kNTiles> bits[kMTiles];
    if (pairs.has_dropout()) {
      draw_kept(bits, pairs, row0, column0);
      for_each_accumulator(ds, [&](int mt, int h, int nt, int c) {
        Sum& x = ds[mt][nt][2 * h + c];
        x = bits[mt].test(nt, 2 * h + c) ? x * arguments.pairs.kept_factor : 0;
      });
    }
    Sum delta[kMTiles][2];
    load_row_stats(delta, statistics<Sum>(params.delta) + stats);
    score_gradients(ds, p, delta, 1);
    const Mask mask(params, batch);
    if (!mask.covers(row0, Config::kRows, column0, Config::kColumns)) fill_hidden(ds, mask, row0, column0, 0);
    if (params.hides_pairs()) {
      load_visible(bits, pairs, row0, column0);
      fill_unset(ds, bits, 0);
    }

    add_to_bias_sums(sums, ds, pairs, row0, column0);
    item = next_item;
  }

  ptx::copy_async_wait<0>();
  write_bias_sums<kThreads>(tile, sums, row, column, shared);
}

// kHeadDim is only the limit in the list of kernels; the kernel does not depend on it.
template <class Arithmetic, int kHeadDim>
Status backward_bias(const BackwardParams& params, const LaunchContext& context) {
  using Config = BackwardBiasConfig<Arithmetic>;
  using Element = typename Config::Element;
  if (const Status status = launch_delta<Element>(params, nullptr, 0, context); status.failed())
    return status;
  const auto arguments = gradient_arguments<Arithmetic>(params);
  return launch(backward_bias_kernel<Arithmetic>,
                BiasSumsTile<Config::kBlockM, Config::kBlockN>::count(params), Config::kThreads,
                Config::kSharedBytes, context, arguments);
}

}  // namespace jax_flash::cuda::sm80
