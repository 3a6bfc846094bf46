// What the kernels of a gradient get from the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "arithmetic.h"
#include "delta.cuh"
#include "launch.h"
#include "pairs.cuh"
#include "params.h"
#include "planes.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda::sm80 {

template <class Sum>
struct GradientArguments {
  BackwardParams params;
  LogitScaleOf<Sum> logit;
  PairOptionsOf<Sum> pairs;
  HeadRows q, k, v, dout;  // [B * T, N, H], [B * S, K, H], [B * S, K, Hv], [B * T, N, Hv]
};

template <class Arithmetic>
GradientArguments<typename Arithmetic::Sum> gradient_arguments(const BackwardParams& params) {
  using Sum = typename Arithmetic::Sum;
  constexpr bool kPlanes = kHasTwoPlanes<Arithmetic>;
  using Operand = typename std::conditional_t<kPlanes, float16, Arithmetic>::Element;
  const auto rows = [&](const void* data, int64_t length, int64_t heads, int64_t columns) {
    return head_rows<Operand>(data, heads, columns, kPlanes ? params.batch * length * heads * columns : 0);
  };
  const auto [q, k, v, dout] = product_inputs<kPlanes>(params, params.dout);
  return {params,
          LogitScaleOf<Sum>(params),
          PairOptionsOf<Sum>(params),
          rows(q, params.seqlen_q, params.num_heads, params.head_dim),
          rows(k, params.seqlen_kv, params.num_kv_heads, params.head_dim),
          rows(v, params.seqlen_kv, params.num_kv_heads, params.head_dim_v),
          rows(dout, params.seqlen_q, params.num_heads, params.head_dim_v)};
}

// ---- Tiles: each block has one ----
//
// But behind other kernels there is nothing to do, as a rule: planes hold all key heads, or three products of
// TF32 have made no NaN. So there are no more blocks than run side by side, which take the tiles in turn:
// even blocks that return at once take time.

template <class Arithmetic>
inline constexpr bool kMayBeBehind =
    std::is_same_v<Arithmetic, tf32> || std::is_same_v<Arithmetic, tf32x3_infinity>;

template <class Arithmetic>
__host__ __device__ constexpr bool is_behind(const BackwardParams& params) {
  return kMayBeBehind<Arithmetic> && (params.planes || std::is_same_v<Arithmetic, tf32x3_infinity>);
}

template <class Arithmetic>
int64_t num_blocks(const BackwardParams& params, int64_t tiles, int blocks_per_sm,
                   const LaunchContext& context) {
  return is_behind<Arithmetic>(params) ? std::min<int64_t>(tiles, blocks_per_sm * context.multiprocessors)
                                       : tiles;
}

// Calls f(tile) for those of this block.
template <class Arithmetic, class F>
__device__ __forceinline__ void for_each_tile(const BackwardParams& params, unsigned tiles, const F& f) {
  if constexpr (kMayBeBehind<Arithmetic>) {
    if (is_behind<Arithmetic>(params) && (params.planes ? planes_hold_all(params) : *params.has_nan == 0))
      return;
    // Every second round backwards: a block would else get the same place in each head, which with a causal
    // mask may always be a long one.
    unsigned in_round = blockIdx.x;
#pragma unroll 1
    for (unsigned first = 0; first < tiles; first += gridDim.x) {
      if (first + in_round < tiles) f(first + in_round);
      in_round = gridDim.x - 1 - in_round;
      __syncthreads();  // all threads have finished with shared memory
    }
  } else {
    f(blockIdx.x);
  }
}

// ---- Units: those of planes where products are of planes (planes.cuh), else none ----

// Do other kernels compute this key head?
template <class Arithmetic>
__device__ __forceinline__ bool is_of_others(const BackwardParams& params, int batch, int kv_head) {
  return !kIs16Bit<Arithmetic> && planes_hold(params, batch, kv_head) != kHasTwoPlanes<Arithmetic>;
}

// How a score of this key head becomes a logit.
template <class Arithmetic, class Sum>
__device__ __forceinline__ decltype(auto) logit_of(const GradientArguments<Sum>& arguments, int batch,
                                                   int kv_head) {
  if constexpr (kHasTwoPlanes<Arithmetic>) {
    return arguments.logit.times_power(PlaneScales(arguments.params, batch, kv_head).of_scores());
  } else {
    return (arguments.logit);
  }
}

// Statistics of all rows, [B, N, stats_length(T)] of each. With planes, p has a factor of 2^(kPlaneTop + 1).
template <class Sum>
struct RowStatistics {
  const Sum *lse_log2, *delta;
};

template <class Arithmetic>
__device__ __forceinline__ RowStatistics<typename Arithmetic::Sum> row_statistics(
    const BackwardParams& params) {
  using Sum = typename Arithmetic::Sum;
  if constexpr (kHasTwoPlanes<Arithmetic>) {
    const PlaneRows rows(params, stats_length(params.seqlen_q));
    return {rows.lse_log2, rows.delta};
  } else {
    return {statistics<Sum>(params.lse_log2), statistics<Sum>(params.delta)};
  }
}

// The exponent of what ds is multiplied by is at most this: then the reciprocal is normal, too.
inline constexpr int kMostDsExponent = 126;

// What ds is multiplied by to be an operand: the largest magnitude of a warp comes to the top.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ int ds_exponent(const float (&ds)[kMTiles][kNTiles][4]) {
  int32_t largest = 0;
  for_each_accumulator(ds, [&](int mt, int h, int nt, int c) {
    largest = max(largest, __float_as_int(fabsf(ds[mt][nt][2 * h + c])));
  });
  return min(plane_exponent(__int_as_float(__reduce_max_sync(0xffffffff, largest))), kMostDsExponent);
}

}  // namespace jax_flash::cuda::sm80
