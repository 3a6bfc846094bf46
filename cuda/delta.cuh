// Before and after the backward products: per-row statistics (lse and delta), and dq from its float32 sum.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "launch.h"
#include "mask.cuh"
#include "params.h"
#include "softmax.cuh"

namespace jax_flash::cuda {

// The number of rows of statistics of one head.
__host__ __device__ constexpr int64_t stats_length(int64_t seqlen_q) {
  return ceil_div(seqlen_q, kStatsRows) * kStatsRows;
}

// 8 bytes of elements as floats.
template <class Element>
struct Vector {
  static constexpr int kCount = 8 / sizeof(Element);
  alignas(8) Element elements[kCount];
};

// The sum of a[i] * b[i] over a row, by one warp.
template <class Element>
__device__ __forceinline__ float dot(const Element* a, const Element* b, int length, int lane) {
  using V = Vector<Element>;
  float sum = 0;
  if (length % V::kCount == 0) {  // rows start at multiples of their length
    for (int i = lane; i < length / V::kCount; i += 32) {
      const V va = reinterpret_cast<const V*>(a)[i], vb = reinterpret_cast<const V*>(b)[i];
#pragma unroll
      for (int j = 0; j < V::kCount; ++j) {
        sum = fmaf(static_cast<float>(va.elements[j]), static_cast<float>(vb.elements[j]), sum);
      }
    }
  } else {
    for (int i = lane; i < length; i += 32)
      sum = fmaf(static_cast<float>(a[i]), static_cast<float>(b[i]), sum);
  }
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffff, sum, offset);
  return sum;
}

// delta [B, N, length] = rowsum(dout * out) - dlse and lse_log2 [B, N, length] = lse * log2(e), one row per
// warp. Also clears the counter of tiles and `count` floats at `to_clear`, `share` of them per warp. A fully
// masked row, or one beyond the end, gets delta = 0 and lse_log2 = +inf: its probabilities become 0.
//
// Index counts rows, in 32 bits where they suffice: three 64-bit divisions take longer than reading the row.
template <class Element, class Index>
__global__ void __launch_bounds__(256)
    delta_kernel(const __grid_constant__ BackwardParams params, float* to_clear, int share, int64_t count) {
  const int lane = threadIdx.x % 32;
  const Index length = static_cast<Index>(stats_length(params.seqlen_q)),
              num_heads = static_cast<Index>(params.num_heads);
  // In [B, length, N]. The last rows come first: those with which the backward kernels begin are then in L2.
  const Index row = Index{gridDim.x - 1 - blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= static_cast<Index>(params.batch) * length * num_heads) return;
  const Index token = row / num_heads, batch = token / length;
  const Index head = row - token * num_heads, position = token - batch * length;

  if (row == 0 && lane == 0 && params.tile_counter) *params.tile_counter = 0;
  const int64_t first = static_cast<int64_t>(row) * share;
  const int end = static_cast<int>(min(int64_t{share}, count - first));
  for (int i = lane; i < end; i += 32) to_clear[first + i] = 0;
  float delta = 0, lse_log2 = INFINITY;
  if (static_cast<int>(position) < Mask(params, static_cast<int>(batch)).q_length) {
    const int64_t out_token = static_cast<int64_t>(batch) * params.seqlen_q + static_cast<int64_t>(position);
    const int64_t out_row = out_token * params.num_heads + static_cast<int64_t>(head);
    const float lse = static_cast<const float*>(params.lse)[out_row];
    if (lse != -INFINITY) {
      const int head_dim_v = static_cast<int>(params.head_dim_v);
      delta = dot(static_cast<const Element*>(params.dout) + out_row * head_dim_v,
                  static_cast<const Element*>(params.out) + out_row * head_dim_v, head_dim_v, lane);
      if (params.dlse && lse != INFINITY) delta -= static_cast<const float*>(params.dlse)[out_row];
      lse_log2 = lse * kLog2e;
    }
  }
  if (lane == 0) {
    const Index stats_row = (batch * num_heads + head) * length + position;
    params.delta[stats_row] = delta;
    params.lse_log2[stats_row] = lse_log2;
  }
}

// Runs before the backward kernels. Clears `count` floats at `to_clear`, where dq is to be summed.
template <class Element>
Status launch_delta(const BackwardParams& params, float* to_clear, int64_t count,
                    const LaunchContext& context) {
  constexpr int kThreads = 256, kRows = kThreads / 32;
  const int64_t rows = params.batch * stats_length(params.seqlen_q) * params.num_heads;
  const bool is_small = rows + kRows <= std::numeric_limits<uint32_t>::max();
  return launch(is_small ? delta_kernel<Element, uint32_t> : delta_kernel<Element, uint64_t>,
                ceil_div(rows, kRows), kThreads, 0, context, params, to_clear,
                static_cast<int>(ceil_div(count, std::max<int64_t>(rows, 1))), count);
}

// dq = scale * dq_accum, `count` elements.
template <class Element>
__global__ void __launch_bounds__(256)
    convert_kernel(const float* dq_accum, Element* dq, float scale, int64_t count) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4;
  if (first + 4 <= count) {
    const float4 x = *reinterpret_cast<const float4*>(dq_accum + first);
    *reinterpret_cast<Vector<Element>*>(dq + first) = {
        static_cast<Element>(scale * x.x), static_cast<Element>(scale * x.y),
        static_cast<Element>(scale * x.z), static_cast<Element>(scale * x.w)};
  } else {
    for (int64_t i = first; i < count; ++i) dq[i] = static_cast<Element>(scale * dq_accum[i]);
  }
}

template <class Element>
Status launch_convert(const BackwardParams& params, const LaunchContext& context) {
  constexpr int kThreads = 256;
  const int64_t count = params.batch * params.seqlen_q * params.num_heads * params.head_dim;
  return launch(convert_kernel<Element>, ceil_div(count, 4 * kThreads), kThreads, 0, context,
                static_cast<const float*>(params.dq_accum), static_cast<Element*>(params.dq),
                static_cast<float>(params.options.scale), count);
}

}  // namespace jax_flash::cuda
