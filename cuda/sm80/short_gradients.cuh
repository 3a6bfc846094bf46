// The gradients of short sequences, with mma.sync and cp.async: what both of their kernels do. A block of
// threads has all queries and all keys of a head, so it knows whole rows of p and of dp = dout v^T, and with
// them
//   delta = rowsum(p dp) - dlse,
// which is rowsum(dout out) - dlse (Dao et al., arXiv:2205.14135, equation 4). No kernel runs before, out is
// not read, and sums over keys need no memory.
#pragma once

#include <cmath>

#include "arithmetic.h"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "sm80/product.cuh"
#include "sm80/scores.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"

namespace jax_flash::cuda::sm80 {

struct ShortGradientsArguments {
  BackwardParams params;
  LogitScale logit;
  PairOptions pairs;
  HeadRows q, k, v, dout;  // [B * T, N, H], [B * S, K, H], [B * S, K, Hv], [B * T, N, Hv]
};

template <class Element>
ShortGradientsArguments short_gradients_arguments(const BackwardParams& params) {
  return {params,
          LogitScale(params),
          PairOptions(params),
          head_rows<Element>(params.q, params.num_heads, params.head_dim),
          head_rows<Element>(params.k, params.num_kv_heads, params.head_dim),
          head_rows<Element>(params.v, params.num_kv_heads, params.head_dim_v),
          head_rows<Element>(params.dout, params.num_heads, params.head_dim_v)};
}

template <class Arithmetic_, int kHeadDim_, PairPolicy kPolicy_>
struct ShortGradientsConfig {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr PairPolicy kPolicy = kPolicy_;
  static constexpr int kRows = kShortRows, kWarpRows = 16, kThreads = kRows / kWarpRows * 32;
  using Tile = SharedTile<Arithmetic, kRows, kHeadDim>;
  using Loader = TileLoader<kThreads, Tile>;
};

// q and dout, or k and v, of a head: two tiles, side by side.
template <class Config>
__device__ __forceinline__ void load_short_rows(const HeadRows& first, const HeadRows& second, int64_t row0,
                                                int head, int length, uint32_t shared) {
  using Tile = typename Config::Tile;
  using Loader = typename Config::Loader;
  Loader(first, row0, head).load(Tile{shared}, 0, length);
  Loader(second, row0, head).load(Tile{shared + Tile::kBytes}, 0, length);
}

// Of a warp's 16 queries, from `row0` on, and all keys: the gradient of the logits, without the scale. Calls
// use(probabilities) with what the queries weigh the values by, before the scaling by kept_factor.
template <class Config, class Use>
__device__ __forceinline__ void short_score_gradients(const ShortGradientsArguments& arguments, int batch,
                                                      int head, const Mask& mask, int row0,
                                                      uint32_t q_and_dout, uint32_t k_and_v,
                                                      float (&ds)[1][kShortRows / 8][4], Use use) {
  using Arithmetic = typename Config::Arithmetic;
  using Tile = typename Config::Tile;
  constexpr bool kMayHaveMask = Config::kPolicy.may_have_mask(), kMayHaveOthers = Config::kPolicy.others;
  constexpr int kNTiles = kShortRows / 8, kSteps = Config::kHeadDim / kStepK<Arithmetic>;
  const BackwardParams& params = arguments.params;
  const Pairs<false> pairs{params, arguments.pairs, batch, head};

  // A row that sees no key, or that is beyond the end, has p = 0.
  float lse_log2[1][2], delta[1][2];
  for_each_accumulator_row(lse_log2, [&](int mt, int h) {
    const int row = row0 + accumulator_row(mt, h);
    const int64_t index = (int64_t{batch} * params.seqlen_q + row) * params.num_heads + head;
    const float lse = row < mask.q_length ? static_cast<const float*>(params.lse)[index] : -INFINITY;
    lse_log2[mt][h] = lse == -INFINITY ? INFINITY : lse * kLog2e;
    delta[mt][h] = params.dlse && fabsf(lse) < INFINITY ? -static_cast<const float*>(params.dlse)[index] : 0;
  });

  // ---- q k^T and dp = dout v^T ----
  float p[1][kNTiles][4];
  clear(p);
  clear(ds);
  multiply_add<Arithmetic, kSteps>(p, KMajorA<Arithmetic, Tile, 1>(Tile{q_and_dout}, row0),
                                   KMajorB<Arithmetic, Tile>(Tile{k_and_v}, 0));
  multiply_add<Arithmetic, kSteps>(ds, KMajorA<Arithmetic, Tile, 1>(Tile{q_and_dout + Tile::kBytes}, row0),
                                   KMajorB<Arithmetic, Tile>(Tile{k_and_v + Tile::kBytes}, 0));

  // ---- p = exp(q k^T - lse) ----
  if constexpr (kMayHaveOthers) {
    transform_scores(p, pairs, arguments.logit, row0, 0);
  } else {
    transform_scores(p, arguments.logit);
  }
  const bool covered = mask.covers(row0, Config::kWarpRows, 0, kShortRows);
  [[maybe_unused]] PairBits<kNTiles> visible[1], kept[1];
  if constexpr (kMayHaveMask) {
    if (params.hides_pairs()) load_visible(visible, pairs, row0, 0);
  }
  auto hide = [&](auto& x) {
    if (!covered) fill_hidden(x, mask, row0, 0, 0);
    if constexpr (kMayHaveMask) {
      if (params.hides_pairs()) fill_unset(x, visible, 0);
    }
  };
  if (kMayHaveOthers && pairs.has_dropout()) {
    draw_kept(kept, pairs, row0, 0);
    for_each_accumulator(
        ds, [&](int mt, int h, int nt, int c) { ds[mt][nt][2 * h + c] *= arguments.pairs.kept_factor; });
    fill_unset(ds, kept, 0);
  }
  hide(ds);
  recompute_probabilities(p, arguments.logit, lse_log2, [&](auto& probabilities) {
    hide(probabilities);
    float sum[1][2] = {};
    for_each_accumulator(ds, [&](int mt, int h, int nt, int c) {
      sum[mt][h] = fmaf(probabilities[mt][nt][2 * h + c], ds[mt][nt][2 * h + c], sum[mt][h]);
    });
    for_each_accumulator_row(delta, [&](int mt, int h) { delta[mt][h] += row_sum(sum[mt][h]); });
    if (kMayHaveOthers && pairs.has_dropout()) {
      float kept_probabilities[1][kNTiles][4];
      for_each_accumulator(ds, [&](int mt, int h, int nt, int c) {
        kept_probabilities[mt][nt][2 * h + c] = probabilities[mt][nt][2 * h + c];
      });
      fill_unset(kept_probabilities, kept, 0);
      use(kept_probabilities);
    } else {
      use(probabilities);
    }
  });

  // ---- ds = p * (dp - delta) ----
  score_gradients(ds, p, delta, 1);
  hide(ds);  // delta may be infinite
}

}  // namespace jax_flash::cuda::sm80
