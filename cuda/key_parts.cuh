// Splitting the keys of a sequence over thread blocks: each leaves its part of every row in workspace, and a
// second kernel merges the parts. Python decides how many there are (num_key_parts in
// jax_flash/_kernel_choice.py).
//
// Short parts make enough blocks for a single sequence, but in a large batch they take time: each is written
// and read. So a block of the decoding kernel may take a group of up to kGroupParts neighbors, or a whole
// row, and merge them itself. A row has the same bits either way: its parts are merged from left to right
// within each group, and the groups likewise.
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

// Two neighboring parts of a row as one. Sums of p v of an empty part must be 0. Wherever parts are merged,
// the operations are the same: compilers do not fuse a product into the addend of an explicit fmaf.
struct PartMerge {
  RowPart total;
  float left, right;  // factors

  __device__ __forceinline__ PartMerge(const RowPart& a, const RowPart& b) {
    total.max_log2 = fmaxf(a.sum == 0 ? -INFINITY : a.max_log2, b.sum == 0 ? -INFINITY : b.max_log2);
    left = a.factor(total.max_log2), right = b.factor(total.max_log2);
    total.sum = (*this)(a.sum, b.sum);
  }

  __device__ __forceinline__ float operator()(float a, float b) const { return fmaf(b, right, a * left); }
};

// The workspace [parts, B, T, N, columns + 4]: of each part of a row its sum of p v, then its RowPart in a
// vector of 16 bytes.
struct PartRows {
  static constexpr float kMergedSum = -1;

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

  __device__ __forceinline__ void set_end(int64_t part, int64_t row, const RowPart& end) const {
    *reinterpret_cast<float4*>(this->row(part, row) + columns) = make_float4(end.max_log2, end.sum, 0, 0);
  }

  // Leaves a row out of the merging: what has all of its parts has written it out.
  __device__ __forceinline__ void set_merged(int64_t row) const {
    *reinterpret_cast<float4*>(this->row(0, row) + columns) = make_float4(0, kMergedSum, 0, 0);
  }
  __device__ __forceinline__ bool is_merged(int64_t row) const {
    return this->row(0, row)[columns + 1] == kMergedSum;
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
    if (first_column == 0 && lane_id() % 4 == 0) set_end(part, row, end);
  }
};

// Writes a row of out, and its lse, from a warp's accumulators [16, 8 * kTiles] that have all of its sum. By
// the quad of lanes that has it, as its half h of 8 rows; the first of its columns is first_column.
template <class Arithmetic, int kTiles>
__device__ __forceinline__ void write_row(const ForwardParams& params, int batch, int head, int64_t row,
                                          const RowPart& all, const float (&acc)[1][kTiles][4], int h,
                                          int first_column = 0) {
  const RowEnd end = finish_row(all.max_log2, all.sum, sink_log2(params, batch, head));
  const int head_dim_v = static_cast<int>(params.head_dim_v);
  auto* to = static_cast<typename Arithmetic::Element*>(params.out) + row * head_dim_v;
  for_each_run<Arithmetic>(acc, 0, h, [&](int column, const auto& values) {
    store_run<Arithmetic>(to, first_column + column, head_dim_v, !end.is_empty, end.normalizer, values);
  });
  if (first_column == 0 && lane_id() % 4 == 0) end.template store_lse<Arithmetic>(params, row);
}

// ---- Merging the parts ----

inline constexpr int64_t kGroupParts = 4;

// To the sum of a row before it is written out: which zeros are negative depends on who merges the parts.
__device__ __forceinline__ void add_zero(float& sum) { sum += 0.f; }

// A team of threads has a row's columns, four each. Up to kTeams of them, `slices`, share a row: each merges
// `run` neighboring parts from left to right, and the first one what the teams have, likewise.
template <int kHeadDim_>
struct CombineConfig {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kThreads = 512, kVectors = kHeadDim / 4, kTeams = kThreads / kVectors;
  static constexpr int kAtOnce = 8;  // parts that a team loads before it merges them
};

// out and lse.
template <class Arithmetic, int kHeadDim>
__global__ void __launch_bounds__(CombineConfig<kHeadDim>::kThreads, 2)
    combine_kernel(const __grid_constant__ ForwardParams params, int slices, int run, bool may_be_merged) {
  using Config = CombineConfig<kHeadDim>;
  constexpr int kVectors = Config::kVectors, kTeams = Config::kTeams, kAtOnce = Config::kAtOnce;
  const int team = threadIdx.x / kVectors, column = threadIdx.x % kVectors * 4;
  const int slice = team % slices;
  const PartRows rows(params);
  const int64_t row = int64_t{blockIdx.x} * (kTeams / slices) + team / slices;
  ptx::wait_for_grid_before();
  const bool is_here = row < rows.num_rows && !(may_be_merged && rows.is_merged(row));
  const int num_parts = is_here ? static_cast<int>(params.num_key_parts) : 0;

  RowPart total{-INFINITY, 0};
  float sum[4] = {};  // of p v, relative to total.max_log2
  auto merge = [&](const RowPart& part, const float4& x) {
    const PartMerge merge(total, part);
    total = merge.total;
    sum[0] = merge(sum[0], x.x), sum[1] = merge(sum[1], x.y);
    sum[2] = merge(sum[2], x.z), sum[3] = merge(sum[3], x.w);
  };
  const int run_end = min(num_parts, (slice + 1) * run);
  const float* const part0 = rows.row(0, row);
  const int64_t stride = rows.row(1, 0) - rows.row(0, 0);
#pragma unroll 1
  for (int first = slice * run; first < run_end; first += kAtOnce) {
    // Loads without a condition, so that the compiler starts them all before it uses the first. Where there
    // is nothing, they repeat something else.
    auto part_row = [&](int i) { return part0 + min(first + i, run_end - 1) * stride; };
    RowPart parts[kAtOnce];
    float4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      parts[i] = *reinterpret_cast<const RowPart*>(part_row(i) + rows.columns);
      if (first + i >= run_end) parts[i].sum = 0;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool is_empty = parts[i].sum == 0;
      const int from = is_empty ? rows.columns : min(column, rows.columns - 4);
      x[i] = *reinterpret_cast<const float4*>(part_row(i) + from);
      if (is_empty) x[i] = make_float4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) merge(parts[i], x[i]);
  }

  __shared__ float team_sums[kTeams][kHeadDim];
  __shared__ float team_totals[kTeams][2];
#pragma unroll
  for (int i = 0; i < 4; ++i) team_sums[team][column + i] = sum[i];
  if (column == 0) {
    team_totals[team][0] = total.max_log2;
    team_totals[team][1] = total.sum;
  }
  __syncthreads();
  if (slice > 0 || !is_here) return;
  for (int other = team + 1; other < team + slices; ++other) {
    const float* x = &team_sums[other][column];
    merge({team_totals[other][0], team_totals[other][1]}, make_float4(x[0], x[1], x[2], x[3]));
  }

#pragma unroll
  for (float& x : sum) add_zero(x);
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
  if (column == 0) end.template store_lse<Arithmetic>(params, row);
}

// Teams of threads share a block evenly only where the head dim is a power of two.
template <int kHeadDim>
using CombineConfigOf =
    CombineConfig<std::max(64, static_cast<int>(std::bit_ceil(static_cast<unsigned>(kHeadDim))))>;

// How many neighboring parts a team merges, unless these are to be a group.
template <int kHeadDim>
int64_t combine_run(int64_t num_parts) {
  using Config = CombineConfigOf<kHeadDim>;
  int64_t slices = 1;
  while (slices < Config::kTeams && slices * Config::kAtOnce < num_parts) slices *= 2;
  return ceil_div(num_parts, slices);
}

// `run`: how many parts a team merges. kTeams runs must hold all parts. `may_be_merged`: may some rows be
// (PartRows::set_merged)?
template <class Arithmetic, int kHeadDim>
Status launch_combine(const ForwardParams& params, const LaunchContext& context, int64_t run,
                      bool may_be_merged = false) {
  using Config = CombineConfigOf<kHeadDim>;
  int64_t slices = 1;
  while (slices < Config::kTeams && slices * run < params.num_key_parts) slices *= 2;
  const int64_t blocks = ceil_div(PartRows(params).num_rows, Config::kTeams / slices);
  return launch_early(combine_kernel<Arithmetic, Config::kHeadDim>, blocks, Config::kThreads, 0, context,
                      params, static_cast<int>(slices), static_cast<int>(run), may_be_merged);
}

}  // namespace jax_flash::cuda
