// The backward pass between two products: from scores to probabilities to their gradients, in a warp's
// accumulators.
#pragma once

#include "accumulator.cuh"
#include "ptx/math.h"
#include "softmax.cuh"

namespace jax_flash::cuda::sm80 {

// Loads this lane's rows of an array with one float per row.
template <int kMTiles>
__device__ __forceinline__ void load_row_stats(float (&values)[kMTiles][2], const float* rows_of_warp) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) values[mt][h] = rows_of_warp[accumulator_row(mt, h)];
  }
}

// Turns logits / scale_log2 (from transform_scores) into p = exp(logit - lse), calls use(p), and leaves p in
// place; with a soft cap p (1 - tanh^2), which includes the cap's derivative.
template <int kMTiles, int kNTiles, class Use>
__device__ __forceinline__ void recompute_probabilities(float (&scores)[kMTiles][kNTiles][4],
                                                        const LogitScale& logit,
                                                        const float (&lse_log2)[kMTiles][2], Use use) {
  auto exponentiate = [&] {
    for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
      float& x = scores[mt][nt][2 * h + c];
      x = ptx::exp2_approx(fmaf(x, logit.scale_log2, -lse_log2[mt][h]));
    });
  };
  if (logit.transform != LogitScale::kSoftCap) {
    exponentiate();
    use(scores);
    return;
  }
  float slope[kMTiles][kNTiles][4];
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    const float capped = scores[mt][nt][2 * h + c];
    slope[mt][nt][2 * h + c] = soft_cap_slope(capped);
  });
  exponentiate();
  use(scores);
  for_each_accumulator(
      scores, [&](int mt, int h, int nt, int c) { scores[mt][nt][2 * h + c] *= slope[mt][nt][2 * h + c]; });
}

// ds = p * (dp - delta) * scale, in place of dp.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void score_gradients(float (&dp)[kMTiles][kNTiles][4],
                                                const float (&p)[kMTiles][kNTiles][4],
                                                const float (&delta)[kMTiles][2], float scale) {
  for_each_accumulator(dp, [&](int mt, int h, int nt, int c) {
    float& x = dp[mt][nt][2 * h + c];
    x = p[mt][nt][2 * h + c] * fmaf(x, scale, -delta[mt][h] * scale);
  });
}

}  // namespace jax_flash::cuda::sm80
