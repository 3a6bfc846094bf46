// Splitting the keys of a sequence over thread blocks: each leaves its part of every row in workspace, and a
// second kernel merges the parts. Python decides how many there are (num_key_parts in
// jax_flash/_kernel_choice.py).
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "launch.h"
#include "params.h"
#include "ptx/grid.h"
#include "ptx/math.h"
#include "runs.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda {

// ---- Parts of a row ----

// A row's maximum and sum over some of its keys, as in OnlineSoftmax. Where the sum is 0, the row sees none
// of them, and its sum of p v is not to be used: other rows may have left 0 * NaN in it.
struct alignas(8) RowPart {
  float max_log2, sum;

  // The factor of this part in a sum that is relative to another maximum.
  __device__ __forceinline__ float factor(float new_max_log2) const {
    return sum == 0 ? 0 : ptx::exp2_approx(max_log2 - new_max_log2);
  }
};

// The workspace [parts, B, T, N, columns + 4]: of each part of a row its sum of p v, then its RowPart in a
// vector of 16 bytes.
struct PartRows {
  float* data;
  int64_t num_rows;  // B * T * N
  int columns;       // of the sum of p v: whole vectors of 16 bytes

  __host__ __device__ explicit PartRows(const ForwardParams& params)
      : data(params.key_parts),
        num_rows(params.batch * params.seqlen_q * params.num_heads),
        columns(static_cast<int>(ceil_div(params.head_dim_v, 4) * 4)) {}

  __device__ __forceinline__ float* row(int64_t part, int64_t row) const {
    return data + (part * num_rows + row) * (columns + 4);
  }

  // Writes a part of row `row` from a warp's accumulators [16, 8 * kTiles]. By the quad of lanes that has it,
  // as its half h of 8 rows; the first of its columns is first_column.
  template <class Arithmetic, int kTiles>
  __device__ __forceinline__ void store(int64_t part, int64_t row, const RowPart& end,
                                        const float (&acc)[1][kTiles][4], int h, int first_column = 0) const {
    float* to = this->row(part, row);
    for_each_run<Arithmetic>(acc, 0, h, [&](int own_column, const auto& values) {
      const int column = first_column + own_column;
      if (column >= columns || end.sum == 0) return;
      if constexpr (kRunColumns<Arithmetic> == 2) {
        *reinterpret_cast<float2*>(to + column) = make_float2(values[0], values[1]);
      } else {
        *reinterpret_cast<float4*>(to + column) = make_float4(values[0], values[1], values[2], values[3]);
      }
    });
    if (first_column == 0 && lane_id() % 4 == 0) {
      *reinterpret_cast<float4*>(to + columns) = make_float4(end.max_log2, end.sum, 0, 0);
    }
  }
};

// ---- Merging the parts ----

// A group of threads has a row's columns, four each. Up to kGroups of them share a row: each takes every
// `slices`-th part.
template <int kHeadDim>
struct CombineConfig {
  static constexpr int kThreads = 512, kVectors = kHeadDim / 4, kGroups = kThreads / kVectors;
  static constexpr int kAtOnce = 8;  // parts that a group loads before it adds them
  static int slices(int64_t num_parts) {
    int slices = 1;
    while (slices < kGroups && slices * kAtOnce < num_parts) slices *= 2;
    return slices;
  }
};

// out and lse.
template <class Arithmetic, int kHeadDim>
__global__ void __launch_bounds__(CombineConfig<kHeadDim>::kThreads, 2)
    combine_kernel(const __grid_constant__ ForwardParams params, int slices) {
  using Config = CombineConfig<kHeadDim>;
  constexpr int kVectors = Config::kVectors, kGroups = Config::kGroups, kAtOnce = Config::kAtOnce;
  const int group = threadIdx.x / kVectors, column = threadIdx.x % kVectors * 4;
  const int slice = group % slices;
  const PartRows rows(params);
  const int64_t row = int64_t{blockIdx.x} * (kGroups / slices) + group / slices;
  const int num_parts = row < rows.num_rows ? static_cast<int>(params.num_key_parts) : 0;
  ptx::wait_for_grid_before();

  RowPart total{-INFINITY, 0};
  float sum[4] = {};  // of p v, relative to total.max_log2
  auto rescale = [&](float maximum) {
    const float factor = total.factor(maximum);
    total = {maximum, total.sum * factor};
#pragma unroll
    for (float& x : sum) x *= factor;
  };
  auto add = [&](const RowPart& part, const float4& x) {
    const float factor = part.factor(total.max_log2);
    total.sum += part.sum * factor;
    sum[0] += x.x * factor, sum[1] += x.y * factor, sum[2] += x.z * factor, sum[3] += x.w * factor;
  };
#pragma unroll 1
  for (int first = slice; first < num_parts; first += kAtOnce * slices) {
    // Loads without a condition, so that the compiler starts them all before it uses the first. Where there
    // is nothing, they repeat something else.
    RowPart parts[kAtOnce];
    float4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int part = first + i * slices;
      parts[i] = *reinterpret_cast<const RowPart*>(rows.row(min(part, num_parts - 1), row) + rows.columns);
      if (part >= num_parts) parts[i].sum = 0;
    }
    float maximum = total.max_log2;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool is_empty = parts[i].sum == 0;
      const int part = min(first + i * slices, num_parts - 1);
      x[i] = *reinterpret_cast<const float4*>(rows.row(part, row) +
                                              (is_empty ? rows.columns : min(column, rows.columns - 4)));
      if (!is_empty) maximum = fmaxf(maximum, parts[i].max_log2);
    }
    rescale(maximum);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (parts[i].sum != 0) add(parts[i], x[i]);
    }
  }

  __shared__ float group_sums[kGroups][kHeadDim];
  __shared__ float group_totals[kGroups][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) group_sums[group][column + i] = sum[i];
  if (column == 0) {
    group_totals[group][0] = total.max_log2;
    group_totals[group][1] = total.sum;
  }
  __syncthreads();
  if (slice > 0 || row >= rows.num_rows) return;
  for (int other = group + 1; other < group + slices; ++other) {
    rescale(fmaxf(total.max_log2, group_totals[other][0]));
    const float* x = &group_sums[other][column];
    add({group_totals[other][0], group_totals[other][1]}, make_float4(x[0], x[1], x[2], x[3]));
  }

  const int64_t rows_of_batch = params.seqlen_q * params.num_heads;
  const int batch = static_cast<int>(row / rows_of_batch), head = static_cast<int>(row % params.num_heads);
  const RowEnd end = finish_row(total.max_log2, total.sum, sink_log2(params, batch, head));
  const int head_dim_v = static_cast<int>(params.head_dim_v);
  auto* to = static_cast<typename Arithmetic::Element*>(params.out) + row * head_dim_v;
  auto store = [&](int at, const auto& values) {
    store_run<Arithmetic>(to, at, head_dim_v, !end.is_empty, end.normalizer, values);
  };
  if constexpr (kRunColumns<Arithmetic> == 2) {
    const float low[2] = {sum[0], sum[1]}, high[2] = {sum[2], sum[3]};
    store(column, low);
    store(column + 2, high);
  } else {
    store(column, sum);
  }
  if (column == 0) static_cast<float*>(params.lse)[row] = end.lse;
}

template <class Arithmetic, int kHeadDim>
Status launch_combine(const ForwardParams& params, const LaunchContext& context) {
  // Its groups of threads share a block evenly only where the head dim is a power of two.
  constexpr int kColumns = std::max(64, static_cast<int>(std::bit_ceil(static_cast<unsigned>(kHeadDim))));
  using Config = CombineConfig<kColumns>;
  const int slices = Config::slices(params.num_key_parts);
  const int64_t blocks = ceil_div(PartRows(params).num_rows, Config::kGroups / slices);
  return launch_early(combine_kernel<Arithmetic, kColumns>, blocks, Config::kThreads, 0, context, params,
                      slices);
}

}  // namespace jax_flash::cuda
