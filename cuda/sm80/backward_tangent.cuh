// Second order with mma.sync and cp.async: tdq, tdk and tdv, the derivatives of dq, dk and dv in some
// directions.
//
//   tp = p (ts - tlse)
//   tds = tp (dp - delta) + p (tdp - tdelta)
//   tdv += tp^T dout + p^T tdout,    tdk += tds^T q + ds^T tq,    tdq += tds k + ds tk
//
// With a soft cap ds and tds have more factors: score_tangents.cuh.
//
// Two kernels, built like those for dk and dv and for dq alone: one keeps keys and walks the queries, the
// other keeps queries and walks the keys. Both compute the scores, 18 products instead of 12; in return there
// are no atomic additions, no sums in memory, and one order of summation. A block serves one direction: what
// directions share is 2 of the 12.
#pragma once

#include <algorithm>

#include "arithmetic.h"
#include "delta.cuh"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "sm80/backward.cuh"
#include "sm80/product.cuh"
#include "sm80/score_tangents.cuh"
#include "sm80/scores.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using backward_tangent_params = BackwardTangentParams;
}

namespace jax_flash::cuda::sm80 {

template <class Sum>
struct BackwardTangentArguments {
  BackwardTangentParams params;
  LogitScaleOf<Sum> logit;
  PairOptionsOf<Sum> pairs;
  HeadRows q, k, v, dout;      // [B * T, N, H], [B * S, K, H], [B * S, K, Hv], [B * T, N, Hv]
  HeadRows tq, tk, tv, tdout;  // the same with D * B; data is null where the tangent is zero
  Sum bend;                    // -2 / cap
};

// ---- tdelta and tlse of each row ----

// The sum of a[i] * b[i] over a row, by one warp.
template <class Element>
__device__ __forceinline__ SumOf<Element> dot(const Element* a, const Element* b, int length, int lane) {
  using V = Vector<Element, 8>;
  using Sum = SumOf<Element>;
  Sum sum = 0;
  if (length % V::kCount == 0) {  // rows start at multiples of their length
    for (int i = lane; i < length / V::kCount; i += 32) {
      sum = reinterpret_cast<const V*>(a)[i].dot(reinterpret_cast<const V*>(b)[i], sum);
    }
  } else {
    for (int i = lane; i < length; i += 32) {
      sum = fma(static_cast<Sum>(a[i]), static_cast<Sum>(b[i]), sum);
    }
  }
  return sum_lanes<32>(sum);
}

// row_tangents [2, D, B, N, length] = tlse and rowsum(dout tout + tdout out) - tdlse, one row per warp; 0 for
// a fully masked row and for one beyond the end.
template <class Element>
__global__ void __launch_bounds__(256)
    row_tangents_kernel(const __grid_constant__ BackwardTangentParams params) {
  using Sum = SumOf<Element>;
  const int lane = threadIdx.x % 32;
  const int64_t length = stats_length(params.seqlen_q);
  const int64_t rows = params.num_directions * params.batch * params.num_heads * length;
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;  // in [D, B, length, N]
  if (row >= rows) return;
  const int64_t head = row % params.num_heads, position = row / params.num_heads % length;
  const int64_t element = row / params.num_heads / length;  // in [D, B]
  const int64_t batch = element % params.batch;
  Sum tlse = 0, tdelta = 0;
  if (position < Mask(params, static_cast<int>(batch)).q_length) {
    const int64_t primal_row = (batch * params.seqlen_q + position) * params.num_heads + head;
    const int64_t tangent_row = (element * params.seqlen_q + position) * params.num_heads + head;
    const Sum lse = static_cast<const Sum*>(params.lse)[primal_row];
    if (lse != -INFINITY) {
      const int width = static_cast<int>(params.head_dim_v);
      const auto at = [&](const void* tensor, int64_t index) {
        return static_cast<const Element*>(tensor) + index * width;
      };
      tlse = static_cast<const Sum*>(params.tlse)[tangent_row];
      tdelta = dot(at(params.dout, primal_row), at(params.tout, tangent_row), width, lane);
      if (params.tdout) tdelta += dot(at(params.tdout, tangent_row), at(params.out, primal_row), width, lane);
      if (params.tdlse && lse != INFINITY) tdelta -= static_cast<const Sum*>(params.tdlse)[tangent_row];
    }
  }
  if (lane == 0) {
    Sum* to = statistics<Sum>(params.row_tangents) + (element * params.num_heads + head) * length + position;
    to[0] = tlse;
    to[rows] = tdelta;
  }
}

// The statistics of rows row.. of a warp.
template <class Sum, int kMTiles>
__device__ __forceinline__ void load_row_tangents(RowTangents<Sum, kMTiles>& rows,
                                                  const BackwardTangentParams& params, int direction,
                                                  int batch, int head, int row) {
  const int64_t length = stats_length(params.seqlen_q), heads = params.batch * params.num_heads;
  const int64_t primal = (batch * params.num_heads + head) * length + row;
  const int64_t tangent = direction * heads * length + primal;
  const Sum* row_tangents = statistics<Sum>(params.row_tangents);
  load_row_stats(rows.lse_log2, statistics<Sum>(params.lse_log2) + primal);
  load_row_stats(rows.delta, statistics<Sum>(params.delta) + primal);
  load_row_stats(rows.tlse, row_tangents + tangent);
  load_row_stats(rows.tdelta, row_tangents + params.num_directions * heads * length + tangent);
}

// Calls f for each tile. A loop over their addresses would put them into local memory.
template <class F, class... Tiles>
__device__ __forceinline__ void for_each_tile(F f, Tiles&... tiles) {
  (f(tiles), ...);
}

// Turns a warp's products, the scores in p, dp in ds, ts in tds and tdp in tp, into p, ds, tds and tp, with 0
// for hidden pairs. p and tp lack the pairs that dropout removed, as they multiply values. `is_whole`: do
// mask and segments leave all pairs visible?
template <class Config, class Sum, int kMTiles, int kNTiles>
__device__ __forceinline__ void score_tangents(Sum (&p)[kMTiles][kNTiles][4], Sum (&ds)[kMTiles][kNTiles][4],
                                               Sum (&tds)[kMTiles][kNTiles][4],
                                               Sum (&tp)[kMTiles][kNTiles][4],
                                               const BackwardTangentArguments<Sum>& arguments,
                                               const QueryPairs<Sum>& pairs, const Mask& mask,
                                               const RowTangents<Sum, kMTiles>& rows, int direction,
                                               int batch, int head, int row0, int column0, bool is_whole) {
  constexpr bool kMayHaveMask = Config::kPolicy.may_have_mask(), kMayHaveOthers = Config::kPolicy.others;
  const LogitScaleOf<Sum>& logit = arguments.logit;
  for_each_accumulator(tds, [&](int mt, int h, int nt, int c) { tds[mt][nt][2 * h + c] *= logit.scale; });
  if constexpr (kMayHaveOthers) {
    add_operand_tangents(tds, p, arguments.params, arguments.params, pairs, direction, batch, head,
                         logit.scale, row0, column0);
    transform_scores(p, pairs, logit, row0, column0);
  } else {
    transform_scores(p, logit);
  }
  [[maybe_unused]] PairBits<kNTiles> bits[kMTiles];
  const bool has_dropout = kMayHaveOthers && pairs.has_dropout();
  if (has_dropout) {
    draw_kept(bits, pairs, row0, column0);
    for_each_tile(
        [&](auto& x) {
          for_each_accumulator(
              x, [&](int mt, int h, int nt, int c) { x[mt][nt][2 * h + c] *= arguments.pairs.kept_factor; });
          fill_unset(x, bits, 0);
        },
        ds, tp);
  }
  gradient_tangents(p, ds, tds, tp, logit, arguments.bend, rows);
  if (has_dropout) {
    fill_unset(p, bits, 0);
    fill_unset(tp, bits, 0);
  }
  const bool is_covered = mask.covers(row0, 16 * kMTiles, column0, 8 * kNTiles);
  if (kMayHaveMask && !is_whole) load_visible(bits, pairs, row0, column0);
  for_each_tile(
      [&](auto& x) {
        if (!is_covered) fill_hidden(x, mask, row0, column0, 0);
        if (kMayHaveMask && !is_whole) fill_unset(x, bits, 0);
      },
      p, ds, tds, tp);
}

// q, dout and their tangents, or k, v and theirs, one after the other in shared memory.
template <class Tile, int kThreads>
struct FourTiles {
  Tile x, y, tx, ty;
  static constexpr int kBytes = 4 * Tile::kBytes;

  __device__ __forceinline__ explicit FourTiles(uint32_t base)
      : x{base}, y{base + Tile::kBytes}, tx{base + 2 * Tile::kBytes}, ty{base + 3 * Tile::kBytes} {}

  // Loads rows row.. of one head and waits for this thread's part. `first` and `t_first`: where the sequence
  // begins in the arrays and in the tangents; those that are zero are left out.
  __device__ __forceinline__ void load(const HeadRows& of_x, const HeadRows& of_y, const HeadRows& of_tx,
                                       const HeadRows& of_ty, int64_t first, int64_t t_first, int head,
                                       int row, int row_limit) const {
    auto load_tile = [&](const HeadRows& rows, int64_t begin, Tile tile) {
      if (rows.data) TileLoader<kThreads, Tile>(rows, begin + row, head).load(tile, row, row_limit);
    };
    load_tile(of_x, first, x);
    load_tile(of_y, first, y);
    load_tile(of_tx, t_first, tx);
    load_tile(of_ty, t_first, ty);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
  }
  __device__ __forceinline__ void round() const {
    for_each_tile([](const Tile& tile) { TileLoader<kThreads, Tile>::round(tile); }, x, y, tx, ty);
  }
};

// p = q k^T, ds = dout v^T, tds = tq k^T + q tk^T, tp = dout tv^T + tdout v^T, for rows row.. and keys
// column.. of the tiles.
template <class Config, class RowTiles, class KeyTiles, class Sum, int kMTiles, int kNTiles>
__device__ __forceinline__ void multiply_tiles(Sum (&p)[kMTiles][kNTiles][4], Sum (&ds)[kMTiles][kNTiles][4],
                                               Sum (&tds)[kMTiles][kNTiles][4],
                                               Sum (&tp)[kMTiles][kNTiles][4],
                                               const BackwardTangentParams& params, const RowTiles& rows,
                                               int row, const KeyTiles& keys, int column) {
  using Arithmetic = typename Config::Arithmetic;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  constexpr int kSteps = Config::kHeadDim / kStepK<Arithmetic>;
  auto add_product = [&](Sum(&scores)[kMTiles][kNTiles][4], QTile a, KvTile b) {
    multiply_add<Arithmetic, kSteps>(scores, KMajorA<Arithmetic, QTile, kMTiles>(a, row),
                                     KMajorB<Arithmetic, KvTile>(b, column));
  };
  auto add_dp = [&](Sum(&dp)[kMTiles][kNTiles][4], QTile a, KvTile b) {
    multiply_dp<Arithmetic, kSteps>(dp, KMajorA<Arithmetic, QTile, kMTiles>(a, row),
                                    KMajorB<Arithmetic, KvTile>(b, column));
  };
  for_each_tile([](auto& x) { clear(x); }, p, ds, tds, tp);
  add_product(p, rows.x, keys.x);
  add_dp(ds, rows.y, keys.y);
  if (params.tq) add_product(tds, rows.tx, keys.x);
  if (params.tk) add_product(tds, rows.x, keys.tx);
  if (params.tdout) add_dp(tp, rows.ty, keys.y);
  if (params.tv) add_dp(tp, rows.y, keys.ty);
}

// ---- tdk and tdv ----

template <class Arithmetic_, int kHeadDim_, BackwardTile kTile_, PairPolicy kPolicy_>
struct BackwardTangentConfig {
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
      SharedTile<Arithmetic, kBlockM, std::max(kBlockN, 128 / int{sizeof(Element)}), /*kRounded=*/true>;
  static constexpr int kSharedBytes = 4 * (KvTile::kBytes + QTile::kBytes + ScoreTile::kBytes);
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm) backward_tangent_kernel(
    const __grid_constant__ BackwardTangentArguments<typename Config::Arithmetic::Sum> arguments) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Config::Element;
  using Sum = typename Arithmetic::Sum;
  using QTile = typename Config::QTile;
  using ScoreTile = typename Config::ScoreTile;
  using RowTiles = FourTiles<QTile, Config::kThreads>;
  using KeyTiles = FourTiles<typename Config::KvTile, Config::kThreads>;
  constexpr BackwardTile kTile = Config::kTile;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  // A warp's parts: scores [kScoreRows, kScoreColumns], tdk and tdv [kDkvRows, kDkvColumns].
  constexpr int kScoreRows = kBlockM / kTile.score_warps_m;
  constexpr int kScoreColumns = kBlockN / (kTile.warps / kTile.score_warps_m);
  constexpr int kDkvRows = kBlockN / kTile.dkv_warps_n;
  constexpr int kDkvColumns = kHeadDim / (kTile.warps / kTile.dkv_warps_n);
  constexpr int kRowSteps = kBlockM / kStepK<Arithmetic>;
  constexpr int kMTiles = kScoreRows / 16, kNTiles = kScoreColumns / 8;
  const BackwardTangentParams& params = arguments.params;
  const int warp = threadIdx.x / 32;
  const int score_row = warp % kTile.score_warps_m * kScoreRows;
  const int score_column = warp / kTile.score_warps_m * kScoreColumns;
  const int dkv_row = warp % kTile.dkv_warps_n * kDkvRows,
            dkv_column = warp / kTile.dkv_warps_n * kDkvColumns;

  // ---- Tile: the first keys come first; with a causal mask the most rows see them ----
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int num_heads = static_cast<int>(params.num_heads),
            num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int num_n_blocks = (seqlen_kv + kBlockN - 1) / kBlockN;
  const int n_start = blockIdx.x % num_n_blocks * kBlockN;
  const int kv_head = blockIdx.x / num_n_blocks % num_kv_heads;
  const int element = blockIdx.x / num_n_blocks / num_kv_heads;  // in [D, B]
  const int batch = element % static_cast<int>(params.batch);
  const int direction = element / static_cast<int>(params.batch);
  const int group = num_heads / num_kv_heads, first_head = kv_head * group;

  const Mask mask(params, batch);
  QueryWalk<Config> walk(params, batch, n_start, first_head, group,
                         mask.query_blocks<kBlockM>(n_start, kBlockN));

  extern __shared__ __align__(128) uint8_t shared[];
  const KeyTiles keys(ptx::shared_address(shared));     // [4, kBlockN, kHeadDim]: k, v, tk, tv
  const RowTiles rows(keys.x.base + KeyTiles::kBytes);  // [4, kBlockM, kHeadDim]: q, dout, tq, tdout
  const ScoreTile sP{rows.x.base + RowTiles::kBytes};   // [kBlockM, kBlockN], and the next three
  const ScoreTile sTp{sP.base + ScoreTile::kBytes}, sDs{sTp.base + ScoreTile::kBytes},
      sTds{sDs.base + ScoreTile::kBytes};

  const int64_t kv_row0 = int64_t{batch} * seqlen_kv, tkv_row0 = int64_t{element} * seqlen_kv;
  const int64_t q_row0 = int64_t{batch} * seqlen_q, tq_row0 = int64_t{element} * seqlen_q;
  if (walk.blocks > 0) {
    keys.load(arguments.k, arguments.v, arguments.tk, arguments.tv, kv_row0, tkv_row0, kv_head, n_start,
              mask.kv_length);
    keys.round();
  }

  Sum tdk[kDkvRows / 16][kDkvColumns / 8][4], tdv[kDkvRows / 16][kDkvColumns / 8][4];
  clear(tdk);
  clear(tdv);
#pragma unroll 1
  for (; walk.blocks > 0; walk.advance()) {
    const int head = walk.head, row0 = walk.m_start + score_row, column0 = n_start + score_column;
    const QueryPairs<Sum> pairs{params, arguments.pairs, batch, head};
    RowTangents<Sum, kMTiles> stats;
    load_row_tangents(stats, params, direction, batch, head, row0);
    __syncthreads();  // all threads have finished with the rows before
    rows.load(arguments.q, arguments.dout, arguments.tq, arguments.tdout, q_row0, tq_row0, head, walk.m_start,
              mask.q_length);
    __syncthreads();
    Sum p[kMTiles][kNTiles][4], ds[kMTiles][kNTiles][4], tds[kMTiles][kNTiles][4], tp[kMTiles][kNTiles][4];
    multiply_tiles<Config>(p, ds, tds, tp, params, rows, score_row, keys, score_column);

    // ---- p, ds and their derivatives, as operands ----
    score_tangents<Config>(p, ds, tds, tp, arguments, pairs, mask, stats, direction, batch, head, row0,
                           column0, walk.is_whole());
    store_accumulators<Arithmetic>(sP, score_row, score_column, p);
    store_accumulators<Arithmetic>(sTp, score_row, score_column, tp);
    store_accumulators<Arithmetic>(sDs, score_row, score_column, ds);
    store_accumulators<Arithmetic>(sTds, score_row, score_column, tds);
    __syncthreads();

    // ---- tdv += tp^T dout + p^T tdout, tdk += tds^T q + ds^T tq ----
    auto add_to_keys = [&](auto& sums, ScoreTile weights, QTile from) {
      multiply_add<Arithmetic, kRowSteps, /*kLongSum=*/true>(
          sums, MnMajorA<Arithmetic, ScoreTile, kDkvRows / 16>(weights, dkv_row),
          MnMajorB<Arithmetic, QTile>(from, dkv_column));
    };
    add_to_keys(tdv, sTp, rows.y);
    if (params.tdout) add_to_keys(tdv, sP, rows.ty);
    add_to_keys(tdk, sTds, rows.x);
    if (params.tq) add_to_keys(tdk, sDs, rows.tx);
  }

  // ---- Write tdk and tdv; keys beyond the length get zeros ----
#pragma unroll
  for (int mt = 0; mt < kDkvRows / 16; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = n_start + dkv_row + mn_major_accumulator_row<Arithmetic>(mt, h);
      if (row >= seqlen_kv) continue;
      const int64_t offset = (tkv_row0 + row) * num_kv_heads + kv_head;
      auto write = [&](void* to, int columns, Sum factor, const auto& acc) {
        Element* gRow = static_cast<Element*>(to) + offset * columns;
        for_each_run<Arithmetic>(acc, mt, h, [&](int column, const auto& values) {
          store_run<Arithmetic>(gRow, dkv_column + column, columns, row < mask.kv_length, factor, values);
        });
      };
      write(params.tdk, arguments.k.head_dim, arguments.logit.scale, tdk);
      write(params.tdv, arguments.v.head_dim, Config::kPolicy.others ? arguments.pairs.kept_factor : 1, tdv);
    }
  }
}

// ---- tdq ----

template <class Arithmetic_, int kHeadDim_, PairPolicy kPolicy_>
struct BackwardTangentDqConfig {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr PairPolicy kPolicy = kPolicy_;
  static constexpr BackwardDqTile kTile = backward_tangent_dq_tile(sizeof(Element), kHeadDim);
  static constexpr int kBlockM = kTile.block_m, kBlockN = kTile.block_n;
  static constexpr int kThreads = 32 * kTile.warps, kWarpRows = kBlockM / kTile.warps;
  using QTile = SharedTile<Arithmetic, kBlockM, kHeadDim, /*kRounded=*/true>;
  using KvTile = SharedTile<Arithmetic, kBlockN, kHeadDim>;
  static constexpr int kSharedBytes = 4 * (QTile::kBytes + KvTile::kBytes);
  using Keys = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/true, kBlockM, kBlockN>;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kTile.blocks_per_sm) backward_tangent_dq_kernel(
    const __grid_constant__ BackwardTangentArguments<typename Config::Arithmetic::Sum> arguments) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Config::Element;
  using Sum = typename Arithmetic::Sum;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  using RowTiles = FourTiles<QTile, Config::kThreads>;
  using KeyTiles = FourTiles<KvTile, Config::kThreads>;
  constexpr int kHeadDim = Config::kHeadDim;
  constexpr int kBlockM = Config::kBlockM, kBlockN = Config::kBlockN, kWarpRows = Config::kWarpRows;
  constexpr int kMTiles = kWarpRows / 16, kNTiles = kBlockN / 8;
  constexpr int kKeySteps = kBlockN / kStepK<Arithmetic>;
  const BackwardTangentParams& params = arguments.params;

  // ---- Tile: the last rows come first; with a causal mask they see the most keys ----
  const int seqlen_q = static_cast<int>(params.seqlen_q), num_heads = static_cast<int>(params.num_heads);
  const int seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int num_m_blocks = (seqlen_q + kBlockM - 1) / kBlockM;
  const int m_start = (num_m_blocks - 1 - blockIdx.x % num_m_blocks) * kBlockM;
  const int head = blockIdx.x / num_m_blocks % num_heads;
  const int element = blockIdx.x / num_m_blocks / num_heads;  // in [D, B]
  const int batch = element % static_cast<int>(params.batch);
  const int direction = element / static_cast<int>(params.batch);
  const int kv_head = head / (num_heads / static_cast<int>(params.num_kv_heads));

  const Mask mask(params, batch);
  const KeyBlocks seen = mask.key_blocks<kBlockN>(m_start, kBlockM);
  const typename Config::Keys keys(params, batch, head, m_start, seen.begin, seen.end);
  const QueryPairs<Sum> pairs{params, arguments.pairs, batch, head};

  extern __shared__ __align__(128) uint8_t shared[];
  const RowTiles rows(ptx::shared_address(shared));      // [4, kBlockM, kHeadDim]: q, dout, tq, tdout
  const KeyTiles tiles(rows.x.base + RowTiles::kBytes);  // [4, kBlockN, kHeadDim]: k, v, tk, tv

  const int64_t kv_row0 = int64_t{batch} * seqlen_kv, tkv_row0 = int64_t{element} * seqlen_kv;
  const int64_t q_row0 = int64_t{batch} * seqlen_q, tq_row0 = int64_t{element} * seqlen_q;
  if (keys.count > 0) {
    rows.load(arguments.q, arguments.dout, arguments.tq, arguments.tdout, q_row0, tq_row0, head, m_start,
              mask.q_length);
    rows.round();
  }

  const int warp_row = threadIdx.x / 32 * kWarpRows, warp_m = m_start + warp_row;
  RowTangents<Sum, kMTiles> stats;
  load_row_tangents(stats, params, direction, batch, head, warp_m);
  Sum tdq[kMTiles][kHeadDim / 8][4];  // [kWarpRows, kHeadDim]
  clear(tdq);

#pragma unroll 1
  for (int block = 0; block < keys.count; ++block) {
    const int n_start = keys.start(block);
    __syncthreads();  // all threads have finished with the keys before
    tiles.load(arguments.k, arguments.v, arguments.tk, arguments.tv, kv_row0, tkv_row0, kv_head, n_start,
               mask.kv_length);
    __syncthreads();
    if (mask.hides(warp_m, kWarpRows, n_start, kBlockN)) continue;

    using Scores = Sum[kMTiles][kNTiles][4];
    Scores p, ds, tds, tp;
    multiply_tiles<Config>(p, ds, tds, tp, params, rows, warp_row, tiles, 0);
    score_tangents<Config>(p, ds, tds, tp, arguments, pairs, mask, stats, direction, batch, head, warp_m,
                           n_start, keys.is_whole(block));

    // ---- tdq += tds k + ds tk ----
    RegisterA<Arithmetic, kMTiles, kNTiles> operand;
    auto add_to_rows = [&](const Scores& weights, KvTile from) {
      operand.set(weights);
      multiply_add<Arithmetic, kKeySteps, /*kLongSum=*/true>(tdq, operand,
                                                             MnMajorB<Arithmetic, KvTile>(from, 0));
    };
    add_to_rows(tds, tiles.x);
    if (params.tk) add_to_rows(ds, tiles.tx);
  }

  // ---- Write tdq; rows that see no key get zeros ----
  const int head_dim = arguments.q.head_dim;
  for_each_accumulator_row(stats.lse_log2, [&](int mt, int h) {
    const int row = warp_m + accumulator_row(mt, h);
    if (row >= seqlen_q) return;
    // In a fully masked row, other rows of its tile may have left 0 * NaN.
    const bool seeing = mask.first_key(row) <= mask.last_key(row) && stats.lse_log2[mt][h] != INFINITY;
    Element* gTdq = static_cast<Element*>(params.tdq) + ((tq_row0 + row) * num_heads + head) * head_dim;
    for_each_run<Arithmetic>(tdq, mt, h, [&](int column, const auto& values) {
      store_run<Arithmetic>(gTdq, column, head_dim, seeing, arguments.logit.scale, values);
    });
  });
}

// ---- Launch ----

template <class Arithmetic, int kHeadDim, BackwardTile kTile, PairPolicy kPolicy>
Status launch_backward_tangent(const BackwardTangentParams& params, const LaunchContext& context) {
  using Element = typename Arithmetic::Element;
  using KeysConfig = BackwardTangentConfig<Arithmetic, kHeadDim, kTile, kPolicy>;
  using QueriesConfig = BackwardTangentDqConfig<Arithmetic, kHeadDim, kPolicy>;
  if (KeysConfig::kSharedBytes > context.shared_memory_per_block) return Status::not_served();
  if (params.num_directions == 0) return {};
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim, Hv = params.head_dim_v;
  using Sum = typename Arithmetic::Sum;
  const BackwardTangentArguments<Sum> arguments{
      params,
      LogitScaleOf<Sum>(params),
      PairOptionsOf<Sum>(params),
      head_rows<Element>(params.q, N, H),
      head_rows<Element>(params.k, K, H),
      head_rows<Element>(params.v, K, Hv),
      head_rows<Element>(params.dout, N, Hv),
      head_rows<Element>(params.tq, N, H),
      head_rows<Element>(params.tk, K, H),
      head_rows<Element>(params.tv, K, Hv),
      head_rows<Element>(params.tdout, N, Hv),
      params.options.logits_soft_cap > 0 ? static_cast<Sum>(-2 / params.options.logits_soft_cap) : 0};
  const int64_t elements = params.num_directions * params.batch;
  Status status = launch_delta<Element>(params, nullptr, 0, context);
  if (!status.failed()) {
    status = launch(row_tangents_kernel<Element>, ceil_div(elements * N * stats_length(params.seqlen_q), 8),
                    256, 0, context, params);
  }
  if (!status.failed()) status = launch_lists(params, QueryWalk<KeysConfig>::Queries::shape(), context);
  if (!status.failed()) {
    status = launch(backward_tangent_kernel<KeysConfig>,
                    ceil_div(params.seqlen_kv, KeysConfig::kBlockN) * K * elements, KeysConfig::kThreads,
                    KeysConfig::kSharedBytes, context, arguments);
  }
  if (!status.failed()) status = launch_lists(params, QueriesConfig::Keys::shape(), context);
  if (!status.failed()) {
    status = launch(backward_tangent_dq_kernel<QueriesConfig>,
                    ceil_div(params.seqlen_q, QueriesConfig::kBlockM) * N * elements, QueriesConfig::kThreads,
                    QueriesConfig::kSharedBytes, context, arguments);
  }
  return status;
}

template <class Arithmetic, int kHeadDim, BackwardTile kTile>
Status launch_backward_tangent_tile(const BackwardTangentParams& params, const LaunchContext& context) {
  if constexpr (kHasPlainForm<Arithmetic>) {
    if (!has_pair_options(params)) {
      return launch_backward_tangent<Arithmetic, kHeadDim, kTile, kNoPairs>(params, context);
    }
  }
  return launch_backward_tangent<Arithmetic, kHeadDim, kTile, kAnyPairsUnstaged>(params, context);
}

template <class Arithmetic, int kHeadDim>
Status backward_tangent(const BackwardTangentParams& params, const LaunchContext& context) {
  constexpr int kElementBytes = sizeof(typename Arithmetic::Element);
  const Status status =
      launch_backward_tangent_tile<Arithmetic, kHeadDim, backward_tangent_tile(kElementBytes, kHeadDim)>(
          params, context);
  if constexpr (has_compact_backward_tangent_tile(kElementBytes, kHeadDim)) {
    if (!status.is_served()) {
      return launch_backward_tangent_tile<Arithmetic, kHeadDim, kCompactBackwardTangentTile>(params, context);
    }
  }
  return status;
}

}  // namespace jax_flash::cuda::sm80
