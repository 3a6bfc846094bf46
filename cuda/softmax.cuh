// From scores q k^T to probabilities, one tile of keys at a time (Milakov and Gimelshein, arXiv:1805.02867;
// Dao et al., arXiv:2205.14135), in powers of two: exp(x) = exp2(x log2(e)), and log2(e) is part of a factor
// that is there anyway.
//
// Scores of a warp lie in the accumulators of its products, as accumulator.cuh says. A row belongs to the 4
// lanes of a quad.
#pragma once

#include <cfloat>
#include <cmath>
#include <type_traits>

#include "accumulator.cuh"
#include "params.h"
#include "ptx/math.h"

namespace jax_flash::cuda {

inline constexpr float kLog2e = 1.4426950408889634f;
inline constexpr float kLn2 = 0.6931471805599453f;

// How a score becomes a logit: logit * log2(e) = scale_log2 * transform(score), scale_log2 >= 0.
struct LogitScale {
  // kMultiply: x = score * multiplier + bias * bias_multiplier; kSoftCap: tanh(x / cap).
  enum Transform { kNone, kMultiply, kSoftCap } transform;
  float multiplier, bias_multiplier;
  float two_log2e_per_cap;
  float scale_log2;
  float scale;  // d logit / d score, but for the soft cap's 1 - tanh^2

  explicit LogitScale(const AttentionParams& params) {
    const Options& options = params.options;
    const bool has_bias =
        params.bias || params.alibi_slopes || params.scale_factor;  // or what works like one
    const double log2e = 1.4426950408889634074;
    scale = static_cast<float>(options.scale);
    two_log2e_per_cap = 0;
    if (options.logits_soft_cap > 0) {
      transform = kSoftCap;
      multiplier = scale;
      bias_multiplier = 1;
      two_log2e_per_cap = static_cast<float>(2 * log2e / options.logits_soft_cap);
      scale_log2 = static_cast<float>(options.logits_soft_cap * log2e);
    } else if (options.scale * log2e >= FLT_MIN && !has_bias) {
      transform = kNone;
      multiplier = bias_multiplier = 1;
      scale_log2 = static_cast<float>(options.scale * log2e);
    } else {
      // The largest logit must belong to the largest score, and a masked score of -inf must stay so: a factor
      // that is negative or vanishes goes in first. So it does before a bias, and log2(e) with it: a large
      // bias that a whole row has, such as -1e9, then cancels to the bit.
      transform = kMultiply;
      multiplier = static_cast<float>(options.scale * log2e);
      bias_multiplier = kLog2e;
      scale_log2 = 1;
    }
  }
};

// tanh(x / cap) = 1 - 2 / (exp(2 x / cap) + 1): absolute error 2e-7, exact at infinity. tanh.approx is off by
// 5e-4, which a cap of 50 would turn into 2.5 % of a probability.
__device__ __forceinline__ float soft_cap(float x, const LogitScale& logit) {
  return 1 - 2 * ptx::reciprocal_approx(ptx::exp2_approx(x * logit.two_log2e_per_cap) + 1);
}

// Of t = tanh(x): its derivative; 0 for NaN, which a hidden pair's bias may be, and whose p is 0.
__device__ __forceinline__ float soft_cap_slope(float t) { return fmaxf(fmaf(-t, t, 1), 0); }

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void transform_scores(float (&scores)[kMTiles][kNTiles][4],
                                                 const LogitScale& logit) {
  if (logit.transform == LogitScale::kNone) return;
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    float& x = scores[mt][nt][2 * h + c];
    x *= logit.multiplier;
    if (logit.transform == LogitScale::kSoftCap) x = soft_cap(x, logit);
  });
}

// The sink of a head times log2(e); -inf where it has none.
__device__ __forceinline__ float sink_log2(const AttentionParams& params, int batch, int head) {
  const float* sinks = static_cast<const float*>(params.sinks);  // [B, N]
  return sinks ? sinks[int64_t{batch} * params.num_heads + head] * kLog2e : -INFINITY;
}

// What is known of a row when all its keys have been seen.
struct RowEnd {
  float lse;
  float normalizer;  // what the row's sum of p v is to be multiplied by
  bool is_empty;     // it has seen no key
};

// The running maximum and sum of each row that a lane holds a part of.
template <int kMTiles>
struct OnlineSoftmax {
  // A new maximum is taken over only when it is 2^8 times the old one or more: until then probabilities up to
  // 2^8 are summed against the old one, exactly as well, and out need not be rescaled (FlashAttention-4's
  // conditional rescale).
  static constexpr float kRescaleThreshold = 8;

  float max_log2[kMTiles][2];  // of scale_log2 * score; -inf before the first visible key
  float sum[kMTiles][2];       // this lane's columns only, until finish()
  bool is_low;                 // is any maximum of the warp below -kRescaleThreshold?

  __device__ OnlineSoftmax() { reset(); }

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        max_log2[mt][h] = -INFINITY;
        sum[mt][h] = 0;
      }
    }
    is_low = true;
  }

  // Turns a tile's scores into probabilities against the running maximum, and rescales `out` where that
  // moved.
  template <int kNTiles, int kOutTiles>
  __device__ __forceinline__ void update(float (&scores)[kMTiles][kNTiles][4],
                                         float (&out)[kMTiles][kOutTiles][4], float scale_log2) {
    float factor[kMTiles][2];
    if (raise_maximum(scores, scale_log2, factor)) scale_rows(out, factor);
    exponentiate(scores, scale_log2);
  }

  // Takes over a tile's maxima where they are much larger. Where any row of the warp does, returns true and
  // sets `factor` to what out is to be multiplied by.
  template <int kNTiles>
  __device__ __forceinline__ bool raise_maximum(const float (&scores)[kMTiles][kNTiles][4], float scale_log2,
                                                float (&factor)[kMTiles][2]) {
    // Whether any does, the lanes' own maxima tell.
    float lane_max[kMTiles][2];
    if (is_low) {
      lane_maxima<float>(scores, lane_max);
    } else {
      lane_maxima<int>(scores, lane_max);
    }
    bool moved = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // NaN, from 0 * inf or inf - inf, is not larger.
        moved |= fmaf(lane_max[mt][h], scale_log2, -max_log2[mt][h]) > kRescaleThreshold;
      }
    }
    if (!__any_sync(0xffffffff, moved)) return false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float row_max = lane_max[mt][h];
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, 1));
        row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, 2));
        // scale_log2 may be 0, and 0 * -inf is NaN.
        const float new_max = row_max == -INFINITY ? -INFINITY : row_max * scale_log2;
        factor[mt][h] = 1;
        if (!(new_max > max_log2[mt][h])) continue;
        // exp2(-inf) = 0 before the first visible key, when sum and out are 0.
        factor[mt][h] = ptx::exp2_approx(max_log2[mt][h] - new_max);
        max_log2[mt][h] = new_max;
        sum[mt][h] *= factor[mt][h];
      }
    }
    set_low();
    return true;
  }

  // Turns scores into probabilities against the running maximum and adds them to the sum.
  template <int kNTiles>
  __device__ __forceinline__ void exponentiate(float (&scores)[kMTiles][kNTiles][4], float scale_log2) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float shift = max_log2[mt][h] == -INFINITY ? 0 : max_log2[mt][h];
        float tile_sum = 0;
#pragma unroll
        for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = scores[mt][nt][2 * h + c];
            x = ptx::exp2_approx(fmaf(x, scale_log2, -shift));
            tile_sum += x;
          }
        }
        sum[mt][h] += tile_sum;
      }
    }
  }

  template <int kOutTiles>
  __device__ static __forceinline__ void scale_rows(float (&out)[kMTiles][kOutTiles][4],
                                                    const float (&factor)[kMTiles][2]) {
    for_each_accumulator(out, [&](int mt, int h, int nt, int c) { out[mt][nt][2 * h + c] *= factor[mt][h]; });
  }

  // Adds up the lanes' sums, and the sink's part: that of one key more, whose value is 0.
  __device__ __forceinline__ RowEnd finish(int mt, int h, float sink_log2) {
    float total = sum[mt][h];
    total += __shfl_xor_sync(0xffffffff, total, 1);
    total += __shfl_xor_sync(0xffffffff, total, 2);
    const bool is_empty = total == 0;
    float maximum = max_log2[mt][h], factor = 1;
    if (sink_log2 != -INFINITY) {
      maximum = fmaxf(maximum, sink_log2);
      factor = ptx::exp2_approx(max_log2[mt][h] - maximum);
      total = total * factor + ptx::exp2_approx(sink_log2 - maximum);
    }
    if (total == 0) return {-INFINITY, 0, is_empty};
    return {maximum * kLn2 + logf(total), factor * ptx::reciprocal_approx(total), is_empty};
  }

 private:
  // The largest of a lane's scores in each row. Bits of floats compare as signed integers do, three at a
  // time, unless both are negative: of scores that all are, Number = int gives the smallest one. Where no
  // maximum so far is low, such scores move none, so that makes no difference.
  template <class Number, int kNTiles>
  __device__ static __forceinline__ void lane_maxima(const float (&scores)[kMTiles][kNTiles][4],
                                                     float (&lane_max)[kMTiles][2]) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float maximum = scores[mt][0][2 * h];
#pragma unroll
        for (int nt = 0; nt < kNTiles; ++nt) {
          const float a = scores[mt][nt][2 * h], b = scores[mt][nt][2 * h + 1];
          if constexpr (std::is_same_v<Number, int>) {
            maximum = ptx::max_of_bits(maximum, a, b);
          } else {
            maximum = fmaxf(maximum, fmaxf(a, b));
          }
        }
        lane_max[mt][h] = maximum;
      }
    }
  }

  __device__ __forceinline__ void set_low() {
    bool low = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) low |= fminf(max_log2[mt][0], max_log2[mt][1]) < -kRescaleThreshold;
    is_low = __any_sync(0xffffffff, low);
  }
};

}  // namespace jax_flash::cuda
