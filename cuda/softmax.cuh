// Online softmax: from scores q k^T to probabilities, one tile of keys at a time (Milakov and Gimelshein,
// arXiv:1805.02867; Dao et al., arXiv:2205.14135). It works in powers of two, exp(x) = exp2(x log2(e)), since
// log2(e) can be part of a factor that is there anyway.
//
// A warp's scores lie in its accumulators (accumulator.cuh). The 4 lanes of a quad share a row.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>
#include <type_traits>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "params.h"
#include "ptx/math.h"

namespace jax_flash::cuda {

template <class Number>
inline constexpr Number kLog2eOf = static_cast<Number>(1.4426950408889634074);
template <class Number>
inline constexpr Number kLn2Of = static_cast<Number>(0.69314718055994530942);
inline constexpr float kLog2e = kLog2eOf<float>;

// In float32 with an error of two last bits, in float64 of one.
__device__ __forceinline__ float exp2_of(float x) { return ptx::exp2_approx(x); }
__device__ __forceinline__ double exp2_of(double x) { return exp2(x); }
__device__ __forceinline__ float reciprocal_of(float x) { return ptx::reciprocal_approx(x); }
__device__ __forceinline__ double reciprocal_of(double x) { return 1 / x; }

// lse in powers of two, with the same bits wherever it is needed: p_factor makes up for their rounding.
template <class Number>
__device__ __forceinline__ Number lse_in_log2(Number lse) {
  return ptx::rounded_product(lse, kLog2eOf<Number>);
}

// How a score becomes a logit: logit * log2(e) = scale_log2 * transform(score), scale_log2 >= 0.
enum class LogitTransform { kNone, kMultiply, kSoftCap };
template <class Number>
struct LogitScaleOf {
  // kMultiply: x = score * multiplier + bias * bias_multiplier; kSoftCap: tanh(x / cap).
  LogitTransform transform;
  Number multiplier, bias_multiplier;
  Number two_log2e_per_cap;
  Number scale_log2;
  Number scale;  // d logit / d score, but for the soft cap's 1 - tanh^2

  explicit LogitScaleOf(const AttentionParams& params) {
    const Options& options = params.options;
    const bool has_bias = params.has_bias() || params.scale_factor;  // an array of scales works like a bias
    constexpr double log2e = kLog2eOf<double>;
    scale = static_cast<Number>(options.scale);
    two_log2e_per_cap = 0;
    if (options.logits_soft_cap > 0) {
      transform = LogitTransform::kSoftCap;
      multiplier = scale;
      bias_multiplier = 1;
      two_log2e_per_cap = static_cast<Number>(2 * log2e / options.logits_soft_cap);
      scale_log2 = static_cast<Number>(options.logits_soft_cap * log2e);
    } else if (options.scale * log2e >= std::numeric_limits<Number>::min() && !has_bias) {
      transform = LogitTransform::kNone;
      multiplier = bias_multiplier = 1;
      scale_log2 = static_cast<Number>(options.scale * log2e);
    } else {
      // The largest score must give the largest logit, and a masked score must stay -inf: so a negative or
      // vanishing factor is applied first. It is also applied before a bias, together with log2(e): then a
      // large bias of a whole row, such as -1e9, cancels to the bit.
      transform = LogitTransform::kMultiply;
      multiplier = static_cast<Number>(options.scale * log2e);
      bias_multiplier = kLog2eOf<Number>;
      scale_log2 = 1;
    }
  }

  // The same for scores that are to be multiplied by 2^exponent first.
  __device__ __forceinline__ LogitScaleOf times_power(int exponent) const {
    static_assert(std::is_same_v<Number, float>);
    LogitScaleOf scaled = *this;
    // A masked score must stay -inf, and one of 0 must stay 0.
    const auto times = [&](float x) { return fminf(ldexpf(x, exponent), FLT_MAX); };
    scaled.scale_log2 = transform == LogitTransform::kNone ? fmaxf(times(scale_log2), FLT_MIN) : scale_log2;
    scaled.multiplier = transform == LogitTransform::kNone ? multiplier : times(multiplier);
    return scaled;
  }
};
using LogitScale = LogitScaleOf<float>;

// tanh(x / cap) = 1 - 2 / (exp(2 x / cap) + 1), with an absolute error of 2e-7 and exact at infinity. The
// error of tanh.approx, 5e-4, would change a probability by 2.5 % at a cap of 50.
__device__ __forceinline__ float soft_cap(float x, const LogitScaleOf<float>& logit) {
  return 1 - 2 * reciprocal_of(exp2_of(x * logit.two_log2e_per_cap) + 1);
}
__device__ __forceinline__ double soft_cap(double x, const LogitScaleOf<double>& logit) {
  return tanh(x * (logit.two_log2e_per_cap * (kLn2Of<double> / 2)));
}

// The derivative of tanh at t = tanh(x). 0 for NaN: a hidden pair, whose p is 0, may have a NaN bias.
template <class Number>
__device__ __forceinline__ Number soft_cap_slope(Number t) {
  return fmax(fma(-t, t, Number{1}), Number{0});
}

template <class Number, int kMTiles, int kNTiles>
__device__ __forceinline__ void transform_scores(Number (&scores)[kMTiles][kNTiles][4],
                                                 const LogitScaleOf<Number>& logit) {
  if (logit.transform == LogitTransform::kNone) return;
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    Number& x = scores[mt][nt][2 * h + c];
    x *= logit.multiplier;
    if (logit.transform == LogitTransform::kSoftCap) x = soft_cap(x, logit);
  });
}

// A head's sink times log2(e); -inf without sinks.
template <class Number = float>
__device__ __forceinline__ Number sink_log2(const AttentionParams& params, int batch, int head) {
  const Number* sinks = static_cast<const Number*>(params.sinks);  // [B, N]
  return sinks ? sinks[int64_t{batch} * params.num_heads + head] * kLog2eOf<Number> : -INFINITY;
}

// A row's results, once all its keys have been seen.
template <class Number>
struct RowEnd {
  Number lse;
  Number p_factor;    // by which exp2(logit * log2(e) - lse_in_log2(lse)) is to be multiplied to give p
  Number normalizer;  // by which the row's sum of p v is to be multiplied
  bool is_empty;      // is the row fully masked?

  // As element `index` of [B, T, N].
  template <class Arithmetic>
  __device__ __forceinline__ void store_lse(const ForwardParams& params, int64_t index) const {
    static_cast<Number*>(params.lse)[index] = lse;
    if constexpr (kIsExact<Arithmetic>) {
      if (params.p_factor) static_cast<Number*>(params.p_factor)[index] = p_factor;
    }
  }
};

// Ends a row with this maximum (of scale_log2 * score) and sum. A sink counts as one more key, whose value is
// 0. Products are fused by hand: the same row may end in one kernel or another, with the same bits. `shift`:
// what the backward kernel subtracts from lse_in_log2(lse), which may round it once more.
template <class Number>
__device__ __forceinline__ RowEnd<Number> finish_row(Number max_log2, Number sum, Number sink_log2,
                                                     int shift = 0) {
  if (sum == 0) return {sink_log2 * kLn2Of<Number>, 1, 0, true};
  Number maximum = max_log2, factor = 1;
  if (sink_log2 != -INFINITY) {
    maximum = fmax(maximum, sink_log2);
    factor = exp2_of(max_log2 - maximum);
    sum = fma(sum, factor, exp2_of(sink_log2 - maximum));
  }
  const Number lse = fma(maximum, kLn2Of<Number>, log(sum)), inverse = reciprocal_of(sum);
  // exp2(lse_log2 - maximum) / sum. What the difference loses, 1e-6 at most, is a factor more.
  const Number lse_log2 = (lse_in_log2(lse) - shift) + shift, above = lse_log2 - maximum;
  const Number lost = (lse_log2 - above) - maximum;
  Number p_factor = exp2_of(above) * inverse * fma(lost, kLn2Of<Number>, Number{1});
  // None beside an infinite lse, or one so large that its last bit is worth more than a factor of 2^32.
  if (!(0x1p-32 < p_factor && p_factor < 0x1p32)) p_factor = 1;
  return {lse, p_factor, factor * inverse, false};
}

// The running maximum and sum of each row of which a lane holds a part.
//
// kHeadroom: probabilities are relative to the maximum less this. In a 16-bit type of a narrow range that
// leaves room for small ones.
template <int kMTiles, int kHeadroom = 0, class Number = float>
struct OnlineSoftmax {
  // A new maximum is adopted only if it exceeds the old one by more than 8: until then probabilities up to
  // 2^8 are summed against the old one, which is as exact, and out need not be rescaled (FlashAttention-4's
  // conditional rescale).
  static constexpr Number kRescaleThreshold = 8 + kHeadroom;

  Number max_log2[kMTiles][2];  // of scale_log2 * score, less kHeadroom; -inf before the first visible key
  Number sum[kMTiles][2];       // this lane's columns only, until finish()
  bool is_low;                  // is any maximum of the warp below -kRescaleThreshold?

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

  // Turns a tile's scores into probabilities relative to the running maximum, and rescales `out` where that
  // moved.
  template <int kNTiles, int kOutTiles>
  __device__ __forceinline__ void update(Number (&scores)[kMTiles][kNTiles][4],
                                         Number (&out)[kMTiles][kOutTiles][4], Number scale_log2) {
    Number factor[kMTiles][2];
    if (raise_maximum(scores, scale_log2, factor)) scale_rows(out, factor);
    exponentiate(scores, scale_log2);
  }

  // Adopts a tile's maxima where they are much larger. If any row of the warp does, returns true and sets
  // `factor` to what out is to be multiplied by.
  template <int kNTiles>
  __device__ __forceinline__ bool raise_maximum(const Number (&scores)[kMTiles][kNTiles][4],
                                                Number scale_log2, Number (&factor)[kMTiles][2]) {
    // The lanes' own maxima suffice to tell whether any row does.
    Number lane_max[kMTiles][2];
    if (is_low) {
      lane_maxima</*kByBits=*/false>(scores, lane_max);
    } else {
      lane_maxima</*kByBits=*/std::is_same_v<Number, float>>(scores, lane_max);
    }
    bool moved = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // NaN, from 0 * inf or inf - inf, is not larger.
        moved |= fma(lane_max[mt][h], scale_log2, -max_log2[mt][h]) > kRescaleThreshold;
      }
    }
    if (!__any_sync(0xffffffff, moved)) return false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Number row_max = lane_max[mt][h];
        row_max = fmax(row_max, __shfl_xor_sync(0xffffffff, row_max, 1));
        row_max = fmax(row_max, __shfl_xor_sync(0xffffffff, row_max, 2));
        // scale_log2 may be 0, and 0 * -inf is NaN.
        const Number new_max = row_max == -INFINITY ? -INFINITY : row_max * scale_log2 - kHeadroom;
        factor[mt][h] = 1;
        if (!(new_max > max_log2[mt][h])) continue;
        // exp2(-inf) = 0 before the first visible key, when sum and out are 0.
        factor[mt][h] = exp2_of(max_log2[mt][h] - new_max);
        max_log2[mt][h] = new_max;
        sum[mt][h] *= factor[mt][h];
      }
    }
    set_low();
    return true;
  }

  // Turns scores into probabilities relative to the running maximum, and adds them to the sum.
  template <int kNTiles>
  __device__ __forceinline__ void exponentiate(Number (&scores)[kMTiles][kNTiles][4], Number scale_log2) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Number shift = max_log2[mt][h] == -INFINITY ? 0 : max_log2[mt][h];
        Number tile_sum = 0;
#pragma unroll
        for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            Number& x = scores[mt][nt][2 * h + c];
            x = exp2_of(fma(x, scale_log2, -shift));
            tile_sum += x;
          }
        }
        sum[mt][h] += tile_sum;
      }
    }
  }

  template <int kOutTiles>
  __device__ static __forceinline__ void scale_rows(Number (&out)[kMTiles][kOutTiles][4],
                                                    const Number (&factor)[kMTiles][2]) {
    for_each_accumulator(out, [&](int mt, int h, int nt, int c) { out[mt][nt][2 * h + c] *= factor[mt][h]; });
  }

  // Adds up the lanes' sums.
  __device__ __forceinline__ RowEnd<Number> finish(int mt, int h, Number sink_log2, int shift = 0) {
    return finish_row(max_log2[mt][h], row_sum(sum[mt][h]), sink_log2, shift);
  }

 private:
  // The largest of a lane's scores in each row. kByBits compares their bits as signed integers, three at
  // a time, which is right unless both are negative: if all scores are, it gives the smallest one. That makes
  // no difference where no running maximum is low, since such scores move none.
  template <bool kByBits, int kNTiles>
  __device__ static __forceinline__ void lane_maxima(const Number (&scores)[kMTiles][kNTiles][4],
                                                     Number (&lane_max)[kMTiles][2]) {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Number maximum = scores[mt][0][2 * h];
#pragma unroll
        for (int nt = 0; nt < kNTiles; ++nt) {
          const Number a = scores[mt][nt][2 * h], b = scores[mt][nt][2 * h + 1];
          if constexpr (kByBits) {
            maximum = ptx::max_of_bits(maximum, a, b);
          } else {
            maximum = fmax(maximum, fmax(a, b));
          }
        }
        lane_max[mt][h] = maximum;
      }
    }
  }

  __device__ __forceinline__ void set_low() {
    bool low = false;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) low |= fmin(max_log2[mt][0], max_log2[mt][1]) < -kRescaleThreshold;
    is_low = __any_sync(0xffffffff, low);
  }
};

}  // namespace jax_flash::cuda
