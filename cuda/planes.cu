#include "planes.cuh"

#include <algorithm>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "delta.cuh"
#include "mask.cuh"
#include "ptx/grid.h"
#include "ptx/memory.h"
#include "softmax.cuh"

namespace jax_flash::cuda {
namespace {

inline constexpr int kThreads = 256, kWarps = kThreads / 32;
inline constexpr int kMaxColumns = 256;  // Hopper's kernels for float32 have no more
inline constexpr int kSteps = 8;         // rows of a block that a thread has a part of
// Of a block: what its threads have read, 32 KB.
inline constexpr int kSharedBytes = kSteps * kThreads * 16;
inline constexpr int kBlocksPerSm = 6;
inline constexpr int kSurelyPerSm = 4;  // also where another kernel leaves less shared memory
inline constexpr int kGroupRows = 32;   // about so many does PlaneScales::hold look at together, if one plane
inline constexpr int kMaxGroups = 2 * kSteps * kWarps;  // of a block
inline constexpr int32_t kMagnitudeBits = 0x7fffffff;

// Sums of columns do not depend on the order of blocks: they are of integers, in units in which the largest
// of a few rows has kSumBits bits. Values may be 2^kMostAboveSample times as large, and the most rows of a
// block are 2^10, so 32 bits hold its sums.
inline constexpr int kSampleRows = 8, kSumBits = 14, kMostAboveSample = 6;
// A mean counts if it is this part of its column's largest magnitude: that of numbers with random signs is
// not, even of a hundred. It is made a little smaller, so that no difference from it is twice that magnitude,
// which float16 would not hold.
inline constexpr float kLeastMean = 0x1p-2f, kOfMean = 1 - 0x1p-10f;
// No row may lie more binades than this below those few: its difference from the mean would lose its digits.
// Rows are looked at one by one from 128 columns on, narrower ones by up to 128 numbers.
inline constexpr int kMostBelowSample = 3;

// What rows of the backward pass may have.
inline constexpr float kSmallestSize = 0x1p-6f;  // the sum of |dout|, in units of its plane: each about 2^-12
inline constexpr float kSmallestFineSize = 0x1p4f;  // with two planes: each about 2^-2
inline constexpr float kMostOfNeighbors = 0x1p20f;  // between two bounds of ds, if one plane
inline constexpr float kSmallestBound = 0x1p-30f, kLargestBound = 0x1p50f;  // of ds, unless it is 0
// Up to here the error of scores and lse does not make p 2: of sums of products that are rounded to 11 bits,
// and of those of two planes, which are the forward pass's to the bit.
inline constexpr float kLargestLse = 0x1p9f, kLargestFineLse = 0x1p16f;

// Bits that have the order of magnitudes; those of infinity and NaN come last.
__device__ __forceinline__ int32_t magnitude(float x) { return __float_as_int(x) & kMagnitudeBits; }

// An array [B, length, heads, columns], of query or key heads.
struct PlaneSource {
  const float* data;
  uint16_t* plane;
  int64_t low;  // where the second plane begins; 0: there is none
  int length, heads, columns;
  int group;           // heads of a key head
  int step;            // rows that a block takes at a time
  int blocks_of_head;  // of a key head
  int num_blocks;      // of the array; 0 if there is no such array
};

struct PlaneSources {
  PlaneSource arrays[PlaneScales::kArrays];
  AttentionParams params;
};

// What a block makes: maxima in one launch and planes in the next, which reads the array again; or both.
enum class PlanePass { kMaxima, kPlanes, kBoth };

// The rows of a head that a block takes. One thread computes them, because integer divisions are slow.
struct BlockOfRows {
  PlaneScales::Array array;
  int batch, kv_head;
  int first_row, head_rows;  // of those within the lengths
  int64_t head_offset;       // where the head begins

  __device__ __forceinline__ void find(const PlaneSources& sources, int block) {
    int index = 0;
    while (block >= sources.arrays[index].num_blocks) block -= sources.arrays[index++].num_blocks;
    array = static_cast<PlaneScales::Array>(index);
    const PlaneSource& source = sources.arrays[index];
    const int num_kv_heads = static_cast<int>(sources.params.num_kv_heads);
    const int key_head = block / source.blocks_of_head, in_head = block - key_head * source.blocks_of_head;
    batch = key_head / num_kv_heads, kv_head = key_head - batch * num_kv_heads;
    // Neighboring blocks take neighboring heads of the same rows.
    const int rows_before = in_head / source.group, head = in_head - rows_before * source.group;
    first_row = rows_before * kSteps * source.step;
    const Mask mask(sources.params, batch);
    const bool is_of_queries = array == PlaneScales::kQ || array == PlaneScales::kDout;
    head_rows = min(is_of_queries ? mask.q_length : mask.kv_length, source.length);
    head_offset =
        (int64_t{batch} * source.length * source.heads + kv_head * source.group + head) * source.columns;
  }
};

// Four columns of a row in each step: a thread's part of a block.
struct PartOfRows {
  int row, column;  // in the first step
  int pieces;       // of a row: of four columns
  int rows, step;   // from the block's first row on; rows of a step
  int64_t offset;   // in the first step
  int64_t step_elements;
  bool is_used;  // does this thread have a part?

  __device__ __forceinline__ PartOfRows(const PlaneSource& source, const BlockOfRows& block)
      : step(source.step) {
    const int thread = static_cast<int>(threadIdx.x);
    pieces = source.columns / 4;
    row = thread / pieces, column = 4 * (thread - row * pieces);
    is_used = row < step;
    rows = block.head_rows - block.first_row;
    const int64_t row_elements = int64_t{source.heads} * source.columns;
    offset = block.head_offset + (block.first_row + row) * row_elements + column;
    step_elements = step * row_elements;
  }

  __device__ __forceinline__ bool exists(int i) const { return is_used && row + i * step < rows; }
};

// The exponent of the factor by which values become integers that are summed, by the largest magnitude of a
// few rows: all blocks of the key head find the same. kNoSums if there is none.
inline constexpr int kNoSums = 1024;

__device__ __forceinline__ int exponent_of_sums(int32_t magnitude_of_sample) {
  const int exponent = kSumBits - 1 - binade(__int_as_float(magnitude_of_sample));
  return magnitude_of_sample > 0 && abs(exponent) <= 100 ? exponent : kNoSums;
}

// The largest magnitude of a few of the head's rows: this warp's share of it.
__device__ __forceinline__ int32_t sample(const PlaneSource& source, const BlockOfRows& block) {
  const int pieces = source.columns / 4, numbers = block.head_rows > 0 ? kSampleRows * pieces : 0;
  int32_t largest = 0;
  for (int i = threadIdx.x; i < numbers; i += kThreads) {
    const int place = i / pieces, row = static_cast<int>(int64_t{place} * block.head_rows / kSampleRows);
    const int64_t offset = block.head_offset + int64_t{row} * source.heads * source.columns;
    const float4 x = *reinterpret_cast<const float4*>(source.data + offset + 4 * (i - place * pieces));
    largest = max(largest, max(magnitude(x.x), magnitude(x.y)));
    largest = max(largest, max(magnitude(x.z), magnitude(x.w)));
  }
  return __reduce_max_sync(0xffffffff, largest);
}

// What is subtracted from four columns of v, once the sums of the key head are complete. All loads are issued
// before one is used.
__device__ __forceinline__ float4 center_of(int column, int rows, const PlaneScales& scales,
                                            const AttentionParams& params) {
  const int exponent = __ldcg(scales.sum_exponent()), fails = __ldcg(scales.sums_fail());
  const auto* const sums = reinterpret_cast<const longlong2*>(scales.column_sums(params) + column);
  const longlong2 low = __ldcg(sums), high = __ldcg(sums + 1);
  const int4 maxima =
      __ldcg(reinterpret_cast<const int4*>(scales.column_maxima(PlaneScales::kV, params) + column));
  if (exponent == kNoSums || fails != 0) return {};
  const float to_mean = kOfMean / (power_of_two(exponent) * static_cast<float>(rows));
  const auto of_column = [&](long long sum, int32_t maximum) {
    const float mean = static_cast<float>(sum) * to_mean, largest = __int_as_float(maximum);
    // Rounding to integers may inflate the mean of a column whose values are small beside the head's.
    return kLeastMean * largest <= fabsf(mean) && fabsf(mean) <= largest ? mean : 0;
  };
  return {of_column(low.x, maxima.x), of_column(low.y, maxima.y), of_column(high.x, maxima.z),
          of_column(high.y, maxima.w)};
}

// What a block finds in its rows.
struct PlaneFindings {
  int32_t of_groups[kMaxGroups];    // the largest magnitude of each group of rows
  int32_t of_columns[kMaxColumns];  // and of each column, if they are asked for
  int32_t sums[kMaxColumns];        // of columns of v
  int32_t of_sample;
  int32_t sums_fail;
};

// The largest magnitudes of what this thread has copied to `own`; of columns only with two planes and of v.
// Columns of v are also summed, as integers of this exponent, unless it is kNoSums.
template <bool kOfColumns>
__device__ __forceinline__ void find_maxima(const float4* own, const PartOfRows& part, bool is_fine,
                                            int exponent, PlaneFindings& found) {
  // With two planes a group is what a warp has of a step, or half of a warp of 64 columns: one row of either.
  const bool by_halves = is_fine && part.pieces == 16;
  const int lanes = by_halves ? 16 : 32, steps_of_group = is_fine ? 1 : max(kGroupRows / part.step, 1);
  int group = is_fine ? threadIdx.x / lanes : 0, steps = 0;
  const int least_binade = kSumBits - 1 - exponent - kMostBelowSample;
  int32_t of_group = 0, of_thread[4] = {};
  float sums[4] = {};
  bool fails = false;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const float4 x = own[i * kThreads];
    const float columns[4] = {x.x, x.y, x.z, x.w};
    int32_t of_step = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      of_step = max(of_step, magnitude(columns[j]));
      if constexpr (kOfColumns) {
        of_thread[j] = max(of_thread[j], magnitude(columns[j]));
        sums[j] += columns[j];
      }
    }
    if constexpr (kOfColumns) {
      bool exists = part.exists(i);
      if (by_halves) {
        for (int j = 1; j < 16; j *= 2) of_step = max(of_step, __shfl_xor_sync(0xffffffff, of_step, j));
      } else {
        of_step = __reduce_max_sync(0xffffffff, of_step);
        exists = __any_sync(0xffffffff, exists);
      }
      fails |= exists && binade(__int_as_float(of_step)) < least_binade;
    }
    of_group = max(of_group, of_step);
    if (++steps == steps_of_group || i + 1 == kSteps) {
      if constexpr (!kOfColumns) of_group = __reduce_max_sync(0xffffffff, of_group);
      if (threadIdx.x % lanes == 0 && of_group > 0) atomicMax(found.of_groups + group, of_group);
      group += is_fine ? kThreads / lanes : 1;
      of_group = steps = 0;
    }
  }
  if constexpr (kOfColumns) {
    if (!part.is_used) return;
    if (fails) found.sums_fail = 1;
    const float factor = exponent == kNoSums ? 0 : power_of_two(exponent);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (of_thread[j] > 0) atomicMax(found.of_columns + part.column + j, of_thread[j]);
      if (factor > 0) atomicAdd(found.sums + part.column + j, __float2int_rn(sums[j] * factor));
    }
  }
}

// Writes the planes of what this thread has copied to `own`.
template <bool kIsCentered>
__device__ __forceinline__ void write_planes(const PlaneSource& source, const float4* own,
                                             const PartOfRows& part, int exponent, const float4& center) {
  // In two steps: the exponent may be that of a number which float32 cannot hold.
  const float first = power_of_two(exponent / 2), second = power_of_two(exponent - exponent / 2);
  // A single plane rounds ties away from zero, like the portable kernels, which recompute its scores where
  // planes do not hold the gradients. NaN and infinity, whose bits this may change, have failed already.
  const bool is_single = source.low == 0;
  const uint32_t half = is_single ? 0x1000 : 0, kept_bits = is_single ? 0xffffe000 : 0xffffffff;
  const auto scaled = [&](float x, float center) {
    if constexpr (kIsCentered) x -= center;
    return __uint_as_float((__float_as_uint(x) + half) & kept_bits) * first * second;
  };
  uint16_t* to = source.plane + part.offset;
#pragma unroll
  for (int i = 0; i < kSteps; ++i, to += part.step_elements) {
    if (!part.exists(i)) break;
    const float4 x = own[i * kThreads], y = {scaled(x.x, center.x), scaled(x.y, center.y),
                                             scaled(x.z, center.z), scaled(x.w, center.w)};
    const uint2 rounded = {ptx::pack_f16(y.x, y.y), ptx::pack_f16(y.z, y.w)};
    *reinterpret_cast<uint2*>(to) = rounded;
    if (is_single) continue;
    const float2 a = unpack<float16>(rounded.x), b = unpack<float16>(rounded.y);
    const uint2 rest = {ptx::pack_f16(y.x - a.x, y.y - a.y), ptx::pack_f16(y.z - b.x, y.w - b.y)};
    *reinterpret_cast<uint2*>(to + source.low) = rest;
  }
}

template <PlanePass kPass>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    plane_kernel(const __grid_constant__ PlaneSources sources) {
  __shared__ PlaneFindings found;
  __shared__ BlockOfRows block;
  ptx::let_next_grid_start();

  // ---- The block's rows: where blocks wait for each other, in the order in which they begin ----
  if (threadIdx.x == 0) {
    const int index = kPass == PlanePass::kBoth
                          ? atomicAdd(PlaneScales(sources.params, 0, 0).blocks_begun(), 1)
                          : static_cast<int>(blockIdx.x);
    block.find(sources, index);
    found.of_sample = found.sums_fail = 0;
  }
  for (int i = threadIdx.x; i < kMaxGroups; i += kThreads) found.of_groups[i] = 0;
  for (int i = threadIdx.x; i < kMaxColumns; i += kThreads) found.of_columns[i] = found.sums[i] = 0;
  __syncthreads();
  const PlaneSource& source = sources.arrays[block.array];
  const PartOfRows part(source, block);
  const PlaneScales scales(sources.params, block.batch, block.kv_head);

  // By way of shared memory, which has room for more than registers. A thread reads what it has copied.
  extern __shared__ __align__(128) uint8_t shared[];
  auto* const own = reinterpret_cast<float4*>(shared) + threadIdx.x;
  const float* from = source.data + part.offset;
#pragma unroll
  for (int i = 0; i < kSteps; ++i, from += part.step_elements) {
    const bool exists = part.exists(i);
    ptx::copy_async<16>(ptx::shared_address(own + i * kThreads), exists ? from : source.data, exists);
  }
  ptx::copy_async_commit();
  const bool may_center = block.array == PlaneScales::kV && sources.params.options.dropout_rate == 0;
  if (kPass != PlanePass::kPlanes && may_center) {
    const int32_t largest = sample(source, block);
    if (lane_id() == 0) atomicMax(&found.of_sample, largest);
    __syncthreads();
  }
  ptx::copy_async_wait<0>();

  // ---- The largest magnitudes, and the sums of the columns of v ----
  if constexpr (kPass != PlanePass::kPlanes) {
    const bool is_fine = source.low != 0, finds_columns = block.array == PlaneScales::kV || is_fine;
    const int exponent = may_center ? exponent_of_sums(found.of_sample) : kNoSums;
    if (finds_columns) {
      find_maxima</*kOfColumns=*/true>(own, part, is_fine, exponent, found);
    } else {
      find_maxima</*kOfColumns=*/false>(own, part, is_fine, exponent, found);
    }
    __syncthreads();
    static_assert(kMaxGroups % 32 == 0 && kMaxGroups <= kThreads);
    if (threadIdx.x < kMaxGroups) {
      const int32_t of_own = found.of_groups[threadIdx.x];
      const int32_t largest = __reduce_max_sync(0xffffffff, of_own);
      const int32_t least = __reduce_max_sync(0xffffffff, of_own > 0 ? kInfinityBits - of_own : 0);
      if (lane_id() == 0 && largest > 0) {
        atomicMax(scales.maximum(block.array), largest);
        atomicMax(scales.least_maximum(block.array), least);
        if (largest >= kInfinityBits) *scales.fails() = 1;
        const bool is_large = binade(__int_as_float(largest)) >= kSumBits - exponent + kMostAboveSample;
        if (may_center && is_large) *scales.sums_fail() = 1;
      }
    }
    if (finds_columns) {
      for (int i = threadIdx.x; i < source.columns; i += kThreads) {
        const int32_t of_column = found.of_columns[i];
        if (of_column > 0) atomicMax(scales.column_maxima(block.array, sources.params) + i, of_column);
        if (may_center) {
          atomicAdd(scales.column_sums(sources.params) + i,
                    static_cast<unsigned long long>(int64_t{found.sums[i]}));
        }
      }
    }
    if (may_center && threadIdx.x == 0) {
      *scales.sum_exponent() = exponent;
      if (found.sums_fail) *scales.sums_fail() = 1;
    }
  }

  // ---- The planes, once the key head's blocks have its maximum ----
  if constexpr (kPass == PlanePass::kBoth) {
    __syncthreads();
    if (threadIdx.x == 0) ptx::arrive_and_wait(scales.blocks_done(block.array), source.blocks_of_head);
    __syncthreads();
  }
  if constexpr (kPass != PlanePass::kMaxima) {
    const int exponent = scales.exponent(block.array);
    if (may_center) {
      float4 center = {};
      if (part.is_used) center = center_of(part.column, block.head_rows, scales, sources.params);
      if (block.first_row + part.row == 0 && part.is_used) {  // one block writes them
        *reinterpret_cast<float4*>(scales.centers(sources.params) + part.column) = center;
        const bool is_zero = center.x == 0 && center.y == 0 && center.z == 0 && center.w == 0;
        if (!is_zero) *scales.is_centered() = 1;
      }
      write_planes</*kIsCentered=*/true>(source, own, part, exponent, center);
    } else {
      write_planes</*kIsCentered=*/false>(source, own, part, exponent, {});
    }
  }
}

// The largest bound of ds among neighboring rows may be this many times the least. With two planes they share
// a factor of ds, and reach 2^-40 of the largest ds. So a row whose p are all 1 / S keeps 18 bits (15 of long
// sequences) beside one of which a single key takes all.
template <bool kIsFine>
__device__ __forceinline__ float most_of_neighbors(const BackwardParams& params) {
  if (!kIsFine) return kMostOfNeighbors;
  return power_of_two(max(22 - binade(static_cast<float>(params.seqlen_kv)), 8));
}

// So many threads of a multiprocessor wait for memory: they have 51 registers each.
inline constexpr int kRowThreads = 1280;

// kRows rows a block, kLanes lanes for each, four columns at a time. Of kNeighbors rows the bounds are
// compared.
template <int kRows, int kLanes, int kNeighbors, bool kIsFine>
__global__ void __launch_bounds__(kRows* kLanes, kRowThreads / (kRows * kLanes))
    plane_rows_kernel(const __grid_constant__ BackwardParams params) {
  static_assert(kStatsRows % kRows == 0, "a block's rows are of one head, and all exist");
  static_assert(kRows % kNeighbors == 0);
  const int length = static_cast<int>(stats_length(params.seqlen_q));
  const int num_heads = static_cast<int>(params.num_heads), columns = static_cast<int>(params.head_dim_v);
  const int group = num_heads / static_cast<int>(params.num_kv_heads);
  // Neighboring blocks take neighboring heads of the same rows, which lie side by side in out and dout.
  const unsigned rows_of_heads = blockIdx.x / num_heads, row_blocks = length / kRows;
  const int head = static_cast<int>(blockIdx.x - rows_of_heads * num_heads);
  const int batch = static_cast<int>(rows_of_heads / row_blocks);
  const int row0 = static_cast<int>(rows_of_heads - batch * row_blocks) * kRows;
  const int row = row0 + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t index = (int64_t{batch} * num_heads + head) * length + row;
  if (blockIdx.x == 0 && threadIdx.x == 0) *params.tile_counter = 0;
  const PlaneScales scales(params, batch, head / group);

  // ---- rowsum(dout * out), and |dp| <= the sum of |dout| times the largest |v| of each column. Less the
  // centers, of which none is larger, |v| is twice that at most ----
  const bool counts = row < Mask(params, batch).q_length;
  const int64_t out_row = (int64_t{batch} * params.seqlen_q + row) * num_heads + head;
  const float lse = counts ? static_cast<const float*>(params.lse)[out_row] : -INFINITY;
  const float dlse = counts && params.dlse ? static_cast<const float*>(params.dlse)[out_row] : 0;
  const int v_exponent = scales.exponent(PlaneScales::kV), dp_exponent = -scales.of_dp();
  const int dout_exponent = scales.exponent(PlaneScales::kDout);
  const float first = power_of_two(dout_exponent / 2),
              second = power_of_two(dout_exponent - dout_exponent / 2);
  using DoutVector = std::conditional_t<kIsFine, float4, uint2>;
  // In units of its plane.
  const auto dout_of = [&](const DoutVector& x) -> float4 {
    if constexpr (kIsFine) {
      return {x.x * first * second, x.y * first * second, x.z * first * second, x.w * first * second};
    } else {
      const float2 low = unpack<float16>(x.x), high = unpack<float16>(x.y);
      return {low.x, low.y, high.x, high.y};
    }
  };
  const auto* out_vectors = reinterpret_cast<const float4*>(static_cast<const float*>(params.out));
  const auto* dout_vectors =
      static_cast<const DoutVector*>(kIsFine ? params.dout : static_cast<const void*>(params.planes.dout));
  const auto* v_vectors = reinterpret_cast<const int4*>(scales.column_maxima(PlaneScales::kV, params));
  const auto* centers = reinterpret_cast<const float4*>(scales.centers(params));
  const bool is_centered = *scales.is_centered() != 0;
  constexpr int kAtOnce = 2;  // vectors that a lane begins to read before it uses one
  const int vectors = columns / 4;
  float delta = 0, bound = 0, size = 0;
#pragma unroll 1
  for (int vector0 = lane; counts && vector0 < vectors; vector0 += kAtOnce * kLanes) {
    float4 out[kAtOnce];
    DoutVector dout[kAtOnce];
    int4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int vector = vector0 + i * kLanes;
      out[i] = {}, dout[i] = {}, v[i] = {};
      if (vector >= vectors) continue;
      out[i] = out_vectors[out_row * vectors + vector];
      dout[i] = dout_vectors[out_row * vectors + vector];
      v[i] = v_vectors[vector];
    }
    if (is_centered) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const float4 x = out[i], center = centers[min(vector0 + i * kLanes, vectors - 1)];
        out[i] = {x.x - center.x, x.y - center.y, x.z - center.z, x.w - center.w};
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float4 x = out[i], y = dout_of(dout[i]);
      delta = fmaf(y.x, x.x, fmaf(y.y, x.y, fmaf(y.z, x.z, fmaf(y.w, x.w, delta))));
      bound = fmaf(fabsf(y.x), __int_as_float(v[i].x), fmaf(fabsf(y.y), __int_as_float(v[i].y), bound));
      bound = fmaf(fabsf(y.z), __int_as_float(v[i].z), fmaf(fabsf(y.w), __int_as_float(v[i].w), bound));
      size += fabsf(y.x) + fabsf(y.y) + fabsf(y.z) + fabsf(y.w);
    }
  }
  delta = sum_lanes<kLanes>(delta), bound = sum_lanes<kLanes>(bound), size = sum_lanes<kLanes>(size);

  // ---- delta, and a bound of |dp - delta| ----
  bool sees_keys = lse != -INFINITY;
  delta = ldexpf(delta, v_exponent);
  if (lse != INFINITY) delta -= ldexpf(dlse, dp_exponent);
  if (!sees_keys) delta = 0;
  const float kept_factor = static_cast<float>(1 / (1 - params.options.dropout_rate));
  bound = ldexpf(bound, v_exponent + is_centered) * kept_factor + fabsf(delta);

  // ---- Do planes hold this row, and this one beside its neighbors? ----
  const auto fail_if = [&](bool fails) {
    if (fails) *scales.fails() = *PlaneScales(params, 0, 0).any_fails() = 1;
  };
  // A key head as a whole: by the first warp of its first rows.
  if (row0 == 0 && head % group == 0 && threadIdx.x < 32) {
    fail_if(!scales.hold(params, /*is_backward=*/true));
  }
  if (counts && size == 0) {  // was there something that is now 0?
    for (int column = lane; column < columns; column += kLanes) {
      fail_if(static_cast<const float*>(params.dout)[out_row * columns + column] != 0);
    }
  }
  __shared__ int32_t largest[kRows / kNeighbors], least[kRows / kNeighbors];
  if (threadIdx.x < kRows / kNeighbors) largest[threadIdx.x] = 0, least[threadIdx.x] = kInfinityBits;
  __syncthreads();
  const int neighbors = (row - row0) / kNeighbors;
  if (lane == 0 && bound > 0) {
    atomicMax(&largest[neighbors], __float_as_int(bound));
    atomicMin(&least[neighbors], __float_as_int(bound));
  }
  __syncthreads();
  if (lane > 0) return;
  fail_if(0 < size && size < (kIsFine ? kSmallestFineSize : kSmallestSize));
  fail_if(!(bound == 0 || (kSmallestBound < bound && bound < kLargestBound)));
  if (row % kNeighbors == 0) {
    fail_if(__int_as_float(largest[neighbors]) >
            most_of_neighbors<kIsFine>(params) * __int_as_float(least[neighbors]));
  }
  if (fabsf(lse) < INFINITY && fabsf(lse) > (kIsFine ? kLargestFineLse : kLargestLse)) {
    fail_if(bound > 0 || size > 0);  // with v = 0 there is a dv
    sees_keys = false;  // as a bias of -1e9 for all keys of a row does it, whose p has no gradient
  }

  const PlaneRows rows(params, length);
  rows.lse_log2[index] = sees_keys ? lse_in_log2(lse) - (kPlaneTop + 1) : INFINITY;
  rows.delta[index] = delta;
  if constexpr (kIsFine) return;
  const float factor = power_of_two(plane_exponent(bound) - 1 - (kPlaneTop + 1));
  rows.ds_factor[index] =
      static_cast<uint16_t>(bound > 0 ? __float_as_uint(factor) >> 16 : kNoGradientFactors & 0xffff);
}

}  // namespace

Status launch_planes(const AttentionParams& params, const void* dout, const LaunchContext& context) {
  const PlaneWorkspace& planes = params.planes;
  const int64_t key_heads = params.batch * params.num_kv_heads;
  const auto source = [&](const void* data, uint16_t* plane, int64_t length, int64_t heads, int64_t columns) {
    const int64_t group = heads / params.num_kv_heads, step = kThreads / (columns / 4);
    const int64_t blocks = data ? ceil_div(length, kSteps * step) * group : 0;
    return PlaneSource{static_cast<const float*>(data),
                       plane,
                       (planes.count - 1) * params.batch * length * heads * columns,
                       static_cast<int>(length),
                       static_cast<int>(heads),
                       static_cast<int>(columns),
                       static_cast<int>(group),
                       static_cast<int>(step),
                       static_cast<int>(blocks),
                       static_cast<int>(key_heads * blocks)};
  };
  const int64_t T = params.seqlen_q, S = params.seqlen_kv, H = params.head_dim, Hv = params.head_dim_v;
  const int64_t N = params.num_heads, K = params.num_kv_heads;
  const PlaneSources sources = {{source(params.q, planes.q, T, N, H), source(params.k, planes.k, S, K, H),
                                 source(params.v, planes.v, S, K, Hv), source(dout, planes.dout, T, N, Hv)},
                                params};
  int64_t blocks = 0;
  int most_of_head = 0;
  for (const PlaneSource& array : sources.arrays) {
    blocks += array.num_blocks;
    most_of_head = std::max(most_of_head, array.blocks_of_head);
  }
  Status status = cudaMemsetAsync(planes.scales, 0, sizeof(int32_t) * key_heads * PlaneScales::size(params),
                                  context.stream);
  if (status.failed()) return status;
  // Blocks of a key head wait for each other, so all of them must fit on the GPU, also beside those of seven
  // other calls. Longer arrays are read twice, which their kernels make up for.
  if (ptx::kBlocksRunSideBySide && most_of_head <= kSurelyPerSm * context.multiprocessors / 8) {
    return launch(plane_kernel<PlanePass::kBoth>, blocks, kThreads, kSharedBytes, context, sources);
  }
  status = launch(plane_kernel<PlanePass::kMaxima>, blocks, kThreads, kSharedBytes, context, sources);
  if (status.failed()) return status;
  return launch(plane_kernel<PlanePass::kPlanes>, blocks, kThreads, kSharedBytes, context, sources);
}

Status launch_plane_rows(const BackwardParams& params, const LaunchContext& context) {
  const int64_t rows = params.batch * params.num_heads * stats_length(params.seqlen_q);
  const auto launch_form = [&]<int kRows, int kLanes, int kNeighbors, bool kIsFine>() {
    return launch(plane_rows_kernel<kRows, kLanes, kNeighbors, kIsFine>, ceil_div(rows, kRows),
                  kRows * kLanes, 0, context, params);
  };
  // With two planes those are neighbors that may share a factor of ds.
  if (params.planes.count == 2) return launch_form.template operator()<kDsRows, 8, kDsRows, true>();
  if (params.head_dim_v <= 64) return launch_form.template operator()<32, 8, 16, false>();
  return launch_form.template operator()<16, 16, 16, false>();
}

}  // namespace jax_flash::cuda
