// The backward pass between two products: from scores to probabilities to their gradients, in a warp's
// accumulators.
#pragma once

#include <type_traits>

#include "accumulator.cuh"
#include "ptx/math.h"
#include "softmax.cuh"

namespace jax_flash::cuda::sm80 {

// Loads this lane's rows of an array with one number per row.
template <class Number, int kMTiles>
__device__ __forceinline__ void load_row_stats(Number (&values)[kMTiles][2], const Number* rows_of_warp) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) values[mt][h] = rows_of_warp[accumulator_row(mt, h)];
  }
}

// Turns logits / scale_log2 (from transform_scores) into p = exp(logit - lse), calls use(p), and leaves p in
// place; with a soft cap p (1 - tanh^2), which includes the cap's derivative.
template <class Number, int kMTiles, int kNTiles, class Use>
__device__ __forceinline__ void recompute_probabilities(Number (&scores)[kMTiles][kNTiles][4],
                                                        const LogitScaleOf<Number>& logit,
                                                        const Number (&lse_log2)[kMTiles][2], Use use) {
  auto exponentiate = [&] {
    for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
      Number& x = scores[mt][nt][2 * h + c];
      x = exp2_of(fma(x, logit.scale_log2, -lse_log2[mt][h]));
    });
  };
  if (logit.transform != LogitTransform::kSoftCap) {
    exponentiate();
    use(scores);
    return;
  }
  Number slope[kMTiles][kNTiles][4];
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    const Number capped = scores[mt][nt][2 * h + c];
    slope[mt][nt][2 * h + c] = soft_cap_slope(capped);
  });
  exponentiate();
  use(scores);
  for_each_accumulator(
      scores, [&](int mt, int h, int nt, int c) { scores[mt][nt][2 * h + c] *= slope[mt][nt][2 * h + c]; });
}

// ds = p * (dp - delta) * scale, in place of dp.
template <class Number, int kMTiles, int kNTiles>
__device__ __forceinline__ void score_gradients(Number (&dp)[kMTiles][kNTiles][4],
                                                const Number (&p)[kMTiles][kNTiles][4],
                                                const Number (&delta)[kMTiles][2],
                                                std::type_identity_t<Number> scale) {
  for_each_accumulator(dp, [&](int mt, int h, int nt, int c) {
    Number& x = dp[mt][nt][2 * h + c];
    x = p[mt][nt][2 * h + c] * fma(x, scale, -delta[mt][h] * scale);
  });
}

}  // namespace jax_flash::cuda::sm80
