// Before and after the backward products: per-row statistics (lse and delta), and dq from its float32 sum.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "launch.h"
#include "mask.cuh"
#include "params.h"
#include "planes.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda {

// The number of rows of statistics of one head.
__host__ __device__ constexpr int64_t stats_length(int64_t seqlen_q) {
  return ceil_div(seqlen_q, kStatsRows) * kStatsRows;
}

// Statistics, which are float64 where the sums are.
template <class Sum>
__host__ __device__ Sum* statistics(float* workspace) {
  return reinterpret_cast<Sum*>(workspace);
}

// Elements that one instruction moves.
template <class Element, int kBytes>
struct Vector {
  static constexpr int kCount = kBytes / sizeof(Element);
  alignas(kBytes) Element elements[kCount];

  using Sum = SumOf<Element>;

  __device__ __forceinline__ Sum dot(const Vector& other, Sum sum) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum = fma(static_cast<Sum>(elements[i]), static_cast<Sum>(other.elements[i]), sum);
    }
    return sum;
  }
};

inline constexpr int kDeltaThreads = 256, kDeltaRows = 64;  // of a block
static_assert(kStatsRows % kDeltaRows == 0);

// delta [B, N, length] = rowsum(dout * out) - dlse and lse_log2 [B, N, length] = lse * log2(e), kDeltaRows
// rows of a head per block. Also clears the counter of tiles, has_nan and `turns` [B, N, ceil(T /
// kDeltaRows)], unless they are null, and `count` floats at `to_clear`, which is aligned to 16 bytes: `share`
// of them, a multiple of 4, per block. A row whose lse is -inf, or one beyond the end, gets delta = 0 and
// lse_log2 = +inf: its probabilities become 0. Behind planes that hold all key heads it does nothing.
//
// kLanes lanes share a row, which is a whole number of vectors of kBytes.
template <class Element, int kLanes, int kBytes>
__global__ void __launch_bounds__(kDeltaThreads)
    delta_kernel(const __grid_constant__ BackwardParams params, int32_t* turns, float* to_clear,
                 int64_t share, int64_t count) {
  using V = Vector<Element, kBytes>;
  using Sum = SumOf<Element>;
  constexpr int kGroups = kDeltaThreads / kLanes, kRowsOfGroup = kDeltaRows / kGroups;
  constexpr int kInFlight = 2;  // rows that a lane begins to read before it uses one
  static_assert(kRowsOfGroup % kInFlight == 0);
  if constexpr (sizeof(Element) == 4) {
    if (params.planes && planes_hold_all(params)) return;  // the kernels behind have nothing to do
  }
  const int length = static_cast<int>(stats_length(params.seqlen_q));
  const int num_heads = static_cast<int>(params.num_heads);
  // Neighboring blocks take neighboring heads of the same rows, which lie side by side in out and dout. The
  // last rows come first: those with which the backward kernels begin are then in L2.
  const unsigned index = gridDim.x - 1 - blockIdx.x, rows = index / num_heads;
  const int head = static_cast<int>(index - rows * num_heads);
  const int batch = static_cast<int>(rows / (length / kDeltaRows));
  const int row0 = (static_cast<int>(rows) - batch * (length / kDeltaRows)) * kDeltaRows;

  if (index == 0 && threadIdx.x == 0) {
    if (params.tile_counter) *params.tile_counter = 0;
    if (params.has_nan) *params.has_nan = 0;
  }
  if (turns && threadIdx.x == 0 && row0 < params.seqlen_q) {
    const int64_t blocks = ceil_div(params.seqlen_q, kDeltaRows);
    turns[(int64_t{batch} * num_heads + head) * blocks + row0 / kDeltaRows] = 0;
  }
  const int64_t end = min((index + int64_t{1}) * share, count);
  for (int64_t i = index * share + 4 * threadIdx.x; i < end; i += 4 * kDeltaThreads) {
    if (i + 4 <= end) {
      *reinterpret_cast<float4*>(to_clear + i) = {};
    } else {
      for (int64_t j = i; j < end; ++j) to_clear[j] = 0;
    }
  }

  if constexpr (sizeof(Element) == 4) {
    if (planes_hold(params, batch, head / (num_heads / static_cast<int>(params.num_kv_heads)))) return;
  }
  const int group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int vectors = static_cast<int>(params.head_dim_v) / V::kCount;  // of a row
  const int q_length = Mask(params, batch).q_length;
  auto out_row = [&](int row) { return (int64_t{batch} * params.seqlen_q + row) * num_heads + head; };
#pragma unroll 1
  for (int first = 0; first < kRowsOfGroup; first += kInFlight) {
    V out[kInFlight], dout[kInFlight];
    Sum lse[kInFlight], dlse[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int row = row0 + (first + i) * kGroups + group;
      out[i] = dout[i] = {};
      lse[i] = -INFINITY, dlse[i] = 0;
      if (row >= q_length) continue;
      lse[i] = static_cast<const Sum*>(params.lse)[out_row(row)];
      if (params.dlse) dlse[i] = static_cast<const Sum*>(params.dlse)[out_row(row)];
      if (lane < vectors) {
        out[i] = static_cast<const V*>(params.out)[out_row(row) * vectors + lane];
        dout[i] = static_cast<const V*>(params.dout)[out_row(row) * vectors + lane];
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int row = row0 + (first + i) * kGroups + group;
      Sum delta = out[i].dot(dout[i], 0);
      if (row < q_length) {
        for (int j = lane + kLanes; j < vectors; j += kLanes) {
          const int64_t vector = out_row(row) * vectors + j;
          delta = static_cast<const V*>(params.out)[vector].dot(static_cast<const V*>(params.dout)[vector],
                                                                delta);
        }
      }
      delta = sum_lanes<kLanes>(delta);
      if (lane == 0) {
        const bool sees_keys = lse[i] != -INFINITY;
        const int64_t stats_row = (int64_t{batch} * num_heads + head) * length + row;
        statistics<Sum>(params.delta)[stats_row] = sees_keys ? delta - (lse[i] != INFINITY ? dlse[i] : 0) : 0;
        statistics<Sum>(params.lse_log2)[stats_row] = sees_keys ? lse_in_log2(lse[i]) : INFINITY;
      }
    }
  }
}

// Runs before the backward kernels. Clears `count` floats at `to_clear`, where dq is to be summed, and
// `turns`.
template <class Element>
Status launch_delta(const BackwardParams& params, float* to_clear, int64_t count,
                    const LaunchContext& context, int32_t* turns = nullptr) {
  const int64_t blocks = params.batch * params.num_heads * (stats_length(params.seqlen_q) / kDeltaRows);
  const int64_t share = ceil_div(ceil_div(count, std::max<int64_t>(blocks, 1)), 4) * 4;
  auto launch_form = [&]<int kLanes, int kBytes>() {
    return launch(delta_kernel<Element, kLanes, kBytes>, blocks, kDeltaThreads, 0, context, params, turns,
                  to_clear, share, count);
  };
  const int64_t row_bytes = params.head_dim_v * sizeof(Element);
  if (row_bytes % 16 == 0) {
    if (row_bytes <= 128) return launch_form.template operator()<8, 16>();
    if (row_bytes <= 256) return launch_form.template operator()<16, 16>();
    return launch_form.template operator()<32, 16>();
  }
  if (row_bytes % 8 == 0) return launch_form.template operator()<32, 8>();
  return launch_form.template operator()<32, sizeof(Element)>();
}

// dq = scale * dq_accum, `count` elements.
template <class Element>
__global__ void __launch_bounds__(256)
    convert_kernel(const float* dq_accum, Element* dq, float scale, int64_t count) {
  const int64_t first = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * 4;
  if (first + 4 <= count) {
    const float4 x = *reinterpret_cast<const float4*>(dq_accum + first);
    *reinterpret_cast<Vector<Element, 4 * sizeof(Element)>*>(dq + first) = {
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
