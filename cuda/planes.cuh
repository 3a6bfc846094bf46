// float32 as scaled float16, for Hopper's kernels: a plane.
//
// TF32 and float16 have significands of 11 bits. Multiplied by a power of two, so that the largest magnitude
// of a head is at least 2^14, float32 rounded to float16 is as exact as in TF32 down to 2^-28 of that;
// smaller numbers have the absolute error of one of that size. Tensor cores multiply float16 at twice the
// rate of TF32, of half of the bytes, and can transpose either operand.
//
// Exponents are those of a key head: its query heads have the same, because dk and dv are summed over them.
//
//   q, k, v, dout   2^exponent each, by their largest magnitude
//   p               2^kHeadroom relative to the row's maximum (softmax.cuh) forward, kPlaneTop + 1 backward
//   ds              for dq a factor for each query (PlaneRows), for dk one for each block of queries; with
//                   two planes below
//
// A plane of v holds v less the mean of each column, if that is large (PlaneScales::centers). With columns of
// one sign dp and delta would be large beside their difference. Tensor cores truncate sums, so dp would not
// match out, from which delta is formed.
//
// At "high" and "highest" there are two planes of each array, and p and ds have two parts: float32 rounded to
// float16, and what remains, rounded again. Together they have 22 bits; three products are summed. There ds
// has one factor in each block, or in each warp's part of one, by its largest magnitude.
//
// Where the rows of a key head differ by too many powers of two, or a number is not finite, planes do not
// hold it (PlaneScales::hold), and the portable kernels, launched behind, compute this key head.
#pragma once

#include <cmath>
#include <cstdint>

#include "launch.h"
#include "params.h"

namespace jax_flash::cuda {

// The largest magnitudes are at least 2^kPlaneTop, and below 2^(kPlaneTop + 1): float16 ends at 2^16.
inline constexpr int kPlaneTop = 14;

inline constexpr int32_t kInfinityBits = 0x7f800000;

// 2^exponent, as near as a normal float32 comes.
__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((max(-126, min(exponent, 127)) + 127) << 23);
}

// The binade of x > 0: 0 for those from 1 to 2.
__device__ __forceinline__ int binade(float x) { return static_cast<int>(__float_as_uint(x) >> 23) - 127; }

// The exponent that brings `bound` to the top. 0 where there is none.
__device__ __forceinline__ int plane_exponent(float bound) {
  if (!(bound > 0 && bound < INFINITY)) return 0;
  return kPlaneTop - binade(bound);
}

// The arrays of which products are formed: the planes or the call's own.
struct ProductInputs {
  const void *q, *k, *v, *dout;
};

template <bool kPlanes>
ProductInputs product_inputs(const AttentionParams& params, const void* dout) {
  const PlaneWorkspace& planes = params.planes;
  if (kPlanes) return {planes.q, planes.k, planes.v, planes.dout};
  return {params.q, params.k, params.v, dout};
}

// What scales the planes of a key head.
struct PlaneScales {
  enum Array { kQ, kK, kV, kDout };
  static constexpr int kArrays = 4;

  int32_t* values;

  __host__ __device__ __forceinline__ static int64_t size(const AttentionParams& params) {
    return kPlaneScales + 4 * params.head_dim_v + 2 * params.head_dim;
  }

  __device__ __forceinline__ PlaneScales(const AttentionParams& params, int batch, int kv_head)
      : values(params.planes.scales + (int64_t{batch} * params.num_kv_heads + kv_head) * size(params)) {}

  // Of an array. Magnitudes are the bits of floats, which are ordered like them.
  __device__ __forceinline__ int32_t* maximum(Array array) const { return values + array; }
  // Of the largest magnitudes of groups of rows, the least but for zero: kInfinityBits less its bits, so that
  // an atomic maximum finds it; 0 if there is none.
  __device__ __forceinline__ int32_t* least_maximum(Array array) const { return values + kArrays + array; }
  __device__ __forceinline__ int32_t* blocks_done(Array array) const { return values + 2 * kArrays + array; }
  // Not 0 if a number is not finite, or a row beyond what planes hold.
  __device__ __forceinline__ int32_t* fails() const { return values + 3 * kArrays; }
  // Of all key heads: in the first one.
  __device__ __forceinline__ int32_t* blocks_begun() const { return values + 3 * kArrays + 1; }
  // From which the forward kernel draws its tiles: launch_planes has cleared it.
  static int32_t* tile_counter(const AttentionParams& params) {
    return params.planes.scales + 3 * kArrays + 2;
  }
  // Likewise, once there are PlaneRows: not 0 if planes do not hold a key head.
  __device__ __forceinline__ int32_t* any_fails() const { return values + 3 * kArrays + 3; }
  // Of the sums of the columns of v: their exponent, and not 0 if no centers are to be made of them.
  __device__ __forceinline__ int32_t* sum_exponent() const { return values + 3 * kArrays + 4; }
  __device__ __forceinline__ int32_t* sums_fail() const { return values + 3 * kArrays + 5; }
  // Not 0 if a center is not 0.
  __device__ __forceinline__ int32_t* is_centered() const { return values + 3 * kArrays + 6; }
  // The largest magnitude in each column of v as it was; of q and k only where there are two planes.
  __device__ __forceinline__ int32_t* column_maxima(Array array, const AttentionParams& params) const {
    const int before =
        array == kV ? 0 : static_cast<int>(params.head_dim_v + (array == kK) * params.head_dim);
    return values + kPlaneScales + before;
  }
  // What was subtracted from each column of v: about its mean, or 0; 0 with dropout, since kept probabilities
  // do not add up to 1.
  __device__ __forceinline__ float* centers(const AttentionParams& params) const {
    return reinterpret_cast<float*>(column_maxima(kK, params) + params.head_dim);
  }
  // The sum of each column of v, times 2^sum_exponent.
  __device__ __forceinline__ unsigned long long* column_sums(const AttentionParams& params) const {
    return reinterpret_cast<unsigned long long*>(centers(params) + params.head_dim_v);
  }

  // Where the maximum may just have been written: past this multiprocessor's cache.
  __device__ __forceinline__ int exponent(Array array) const {
    return plane_exponent(__int_as_float(__ldcg(maximum(array))));
  }

  // Exponents of what scores, out, dp, and dv are to be multiplied by, and dq and dk beside what ds has.
  __device__ __forceinline__ int of_scores() const { return -exponent(kQ) - exponent(kK); }
  __device__ __forceinline__ int of_out() const { return -exponent(kV); }
  __device__ __forceinline__ int of_dp() const { return -exponent(kV) - exponent(kDout); }
  __device__ __forceinline__ int of_dq() const { return of_dp() - exponent(kK); }
  __device__ __forceinline__ int of_dk() const { return of_dp() - exponent(kQ); }
  __device__ __forceinline__ int of_dv() const { return -exponent(kDout) - kPlaneTop - 1; }

  // Is this key head as exact as in TF32, or with two planes as in float32? A whole warp asks. It reads past
  // this multiprocessor's cache, because blocks of a grid that starts early may ask before they have waited.
  //
  // A row of which all is less than 2^-28 of the largest magnitude loses bits. Of q, k and v it matters where
  // a query or a key meets such rows alone, which lie side by side: groups of rows are looked at. dq of a row
  // depends on its own row of dout: the kernel that makes PlaneRows looks at each, and sets `fails`. The
  // bound of ds assumes the largest v of each column, so it is about 2^6 times the typical ds, and p may be
  // 1 / S.
  //
  // Two planes have 22 bits of what is above 2^-15 of the largest magnitude. There each row and each column
  // of v has such a number, and the scores of a key head are not all sums of products of large with small
  // numbers.
  __device__ __forceinline__ bool hold(const AttentionParams& params, bool is_backward) const {
    const bool is_fine = params.planes.count == 2;
    const int most_binades = is_fine ? 14 : 24;
    const int of_ds = is_backward && !is_fine ? binade(static_cast<float>(params.seqlen_kv)) : 0;
    const bool holds_rows = max(binades(kQ), max(binades(kK), binades(kV) + of_ds)) <= most_binades &&
                            (!is_fine || max(score_binades(params), value_binades(params)) <= most_binades);
    // Factors must be normal float32 numbers, also times that of ds, which lies within 2^-50 and 2^50.
    const int most = is_backward ? 75 : 100;
    const auto is_moderate = [&](int exponent) { return abs(exponent) <= most; };
    const bool holds_results = is_backward ? is_moderate(of_dp()) && is_moderate(of_dq()) &&
                                                 is_moderate(of_dk()) && is_moderate(of_dv())
                                           : is_moderate(of_out());
    return __ldcg(fails()) == 0 && holds_rows && holds_results;
  }

 private:
  // How many powers of two lie between the product of the largest magnitudes of q and k, and the largest
  // product of those of one column.
  __device__ __forceinline__ int score_binades(const AttentionParams& params) const {
    const int32_t *q = column_maxima(kQ, params), *k = column_maxima(kK, params);
    constexpr int kNone = -1024;
    int largest = kNone;
    for (int column = threadIdx.x % 32; column < static_cast<int>(params.head_dim); column += 32) {
      const int32_t of_q = __ldcg(q + column), of_k = __ldcg(k + column);
      if (of_q == 0 || of_k == 0) continue;
      largest = max(largest, binade(__int_as_float(of_q)) + binade(__int_as_float(of_k)));
    }
    largest = __reduce_max_sync(0xffffffff, largest);
    return largest == kNone ? 0 : 2 * kPlaneTop - exponent(kQ) - exponent(kK) - largest;
  }

  // And between the largest magnitude of v and that of its least column that is not 0.
  __device__ __forceinline__ int value_binades(const AttentionParams& params) const {
    const int32_t* v = column_maxima(kV, params);
    int32_t least = 0;  // kInfinityBits less its bits
    for (int column = threadIdx.x % 32; column < static_cast<int>(params.head_dim_v); column += 32) {
      const int32_t of_v = __ldcg(v + column);
      if (of_v > 0) least = max(least, kInfinityBits - of_v);
    }
    return binades_above(kV, __reduce_max_sync(0xffffffff, least));
  }

  // How many powers of two lie between the largest magnitude and that of the least group of rows.
  __device__ __forceinline__ int binades(Array array) const {
    return binades_above(array, __ldcg(least_maximum(array)));
  }
  // `least`: kInfinityBits less the bits of a magnitude; 0: there is none.
  __device__ __forceinline__ int binades_above(Array array, int32_t least) const {
    return least == 0 ? 0 : kPlaneTop - exponent(array) - binade(__int_as_float(kInfinityBits - least));
  }
};

// Do planes hold this key head, so that a portable kernel has nothing to do?
__device__ __forceinline__ bool planes_hold(const AttentionParams& params, int batch, int kv_head) {
  const bool is_backward = params.planes.dout != nullptr;
  return params.planes && PlaneScales(params, batch, kv_head).hold(params, is_backward);
}

// Do they hold all of them? Once there are PlaneRows.
__device__ __forceinline__ bool planes_hold_all(const BackwardParams& params) {
  return *PlaneScales(params, 0, 0).any_fails() == 0;
}

// With two planes, so many queries at most, from a multiple on, share a factor of ds.
inline constexpr int kDsRows = 64;

// Two of PlaneRows::ds_factor, of rows without gradient: 2^127, above that of any other row.
inline constexpr uint32_t kNoGradientFactors = 0x7f007f00;

// What the backward kernel has of each row, [B, N, stats_length(T)] of each. A row's |ds| may be many powers
// of two below that of its head, so with one plane ds as an operand for dq has an exponent of the row.
struct PlaneRows {
  float* lse_log2;      // log2(e) lse - (kPlaneTop + 1), so that p has its factor
  float* delta;         // of out less the centers of v, in units of the planes
  uint16_t* ds_factor;  // what p ds is multiplied by, p with its factor: upper half of a power of two

  __host__ __device__ PlaneRows(const BackwardParams& params, int64_t stats_length) {
    const int64_t count = params.batch * params.num_heads * stats_length;
    lse_log2 = params.planes.rows;
    delta = lse_log2 + count;
    ds_factor = reinterpret_cast<uint16_t*>(delta + count);
  }

  // The exponent of ds of row `index` of all.
  __device__ __forceinline__ int ds_exponent(int64_t index) const {
    return (ds_factor[index] >> 7) - 127 + kPlaneTop + 1;
  }
};

// Makes the planes of q, k and v, and of dout if it is given, with their scales.
Status launch_planes(const AttentionParams& params, const void* dout, const LaunchContext& context);

// Makes the rows, clears the counter of tiles and decides whether planes hold all key heads. After
// launch_planes.
Status launch_plane_rows(const BackwardParams& params, const LaunchContext& context);

}  // namespace jax_flash::cuda
