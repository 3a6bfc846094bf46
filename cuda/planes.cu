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

inline constexpr int kThreads = 256;
inline constexpr int kMaxColumns = 256;  // Hopper's kernels for float32 have no more
inline constexpr int kSteps = 8;         // rows of a block that a thread has a part of
// Of a block: what its threads have read, 32 KB.
inline constexpr int kSharedBytes = kSteps * kThreads * 16;
inline constexpr int kBlocksPerSm = 6;
inline constexpr int kSurelyPerSm = 4;  // also where another kernel leaves less shared memory
inline constexpr int kGroupRows = 32;   // about so many does PlaneScales::hold look at together, if one plane
inline constexpr int kMaxGroups = kSteps * (kThreads / 32);  // of a block
inline constexpr int32_t kMagnitudeBits = 0x7fffffff;

// What rows of the backward pass may have.
inline constexpr float kSmallestSize = 0x1p-6f;  // the sum of |dout|, in units of its plane: each about 2^-12
inline constexpr float kSmallestFineSize = 0x1p4f;  // with two planes: each about 2^-2
inline constexpr float kMostOfNeighbors = 0x1p20f;  // between two bounds of ds, if one plane
inline constexpr float kSmallestBound = 0x1p-30f, kLargestBound = 0x1p50f;  // of ds, unless it is 0
// Up to here the error of scores and lse does not make p 2: of sums of products that are rounded to 11 bits,
// and of those of two planes, which are the forward pass's to the bit.
inline constexpr float kLargestLse = 0x1p9f, kLargestFineLse = 0x1p16f;

// An array [B, length, K * group, columns]. An item is a row of a query head (or key head).
struct PlaneSource {
  const float* data;
  uint16_t* plane;
  int64_t low;  // where the second plane begins; 0: there is none
  int length, group, columns;
  int blocks_of_head;  // of a key head
  int num_blocks;      // of the array; 0 if there is no such array
};

struct PlaneSources {
  PlaneSource arrays[PlaneScales::kArrays];
  AttentionParams params;
};

// What a block makes: maxima in one launch and planes in the next, which reads the array again; or both.
enum class PlanePass { kMaxima, kPlanes, kBoth };

// A block's items of a key head, and the four columns of each that this thread takes.
struct BlockOfRows {
  const PlaneSource& source;
  PlaneScales::Array array;
  int batch, kv_head;
  int num_kv_heads, first, items;  // the first item, and the number of all items
  int step;                        // items that the block takes at a time
  int item, column;                // this thread's in the first step
  bool is_used;                    // does this thread have one?

  __device__ __forceinline__ static BlockOfRows make(const PlaneSources& sources, int block) {
    int array = 0;
    while (block >= sources.arrays[array].num_blocks) block -= sources.arrays[array++].num_blocks;
    return {sources, block, static_cast<PlaneScales::Array>(array)};
  }

  // Calls f(i, offset, exists) for each of this thread's items: where its columns begin.
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) const {
    const int group = source.group, columns = source.columns;
    const int64_t row_elements = int64_t{num_kv_heads} * group * columns;
    const int begin = first + item, row = begin / group;
    int head = begin - row * group;
    const int more_rows = step / group, more_heads = step - more_rows * group;
    int64_t offset = (int64_t{batch} * source.length + row) * row_elements +
                     (int64_t{kv_head} * group + head) * columns + column;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      f(i, offset, is_used && begin + i * step < items);
      offset += more_rows * row_elements + more_heads * columns;
      head += more_heads;
      if (head >= group) {
        head -= group;
        offset += row_elements - group * columns;
      }
    }
  }

 private:
  __device__ __forceinline__ BlockOfRows(const PlaneSources& sources, int block, PlaneScales::Array array)
      : source(sources.arrays[array]), array(array) {
    num_kv_heads = static_cast<int>(sources.params.num_kv_heads);
    const int key_head = block / source.blocks_of_head;
    batch = key_head / num_kv_heads, kv_head = key_head - batch * num_kv_heads;
    const Mask mask(sources.params, batch);
    const bool is_of_queries = array == PlaneScales::kQ || array == PlaneScales::kDout;
    items = min(is_of_queries ? mask.q_length : mask.kv_length, source.length) * source.group;
    const int pieces = source.columns / 4, thread = static_cast<int>(threadIdx.x);
    step = kThreads / pieces;
    first = (block - key_head * source.blocks_of_head) * kSteps * step;
    item = thread / pieces, column = 4 * (thread - item * pieces);
    is_used = item < step;
  }
};

template <PlanePass kPass>
__global__ void __launch_bounds__(kThreads, kBlocksPerSm)
    plane_kernel(const __grid_constant__ PlaneSources sources) {
  __shared__ int32_t of_groups[kMaxGroups], of_columns[kMaxColumns];
  __shared__ int block;
  ptx::let_next_grid_start();

  // ---- The block's place: where blocks wait for each other, in the order in which they begin ----
  if (kPass == PlanePass::kBoth && threadIdx.x == 0) {
    block = atomicAdd(PlaneScales(sources.params, 0, 0).blocks_begun(), 1);
  }
  for (int i = threadIdx.x; i < kMaxGroups; i += kThreads) of_groups[i] = 0;
  for (int i = threadIdx.x; i < kMaxColumns; i += kThreads) of_columns[i] = 0;
  __syncthreads();
  const BlockOfRows rows =
      BlockOfRows::make(sources, kPass == PlanePass::kBoth ? block : static_cast<int>(blockIdx.x));
  const PlaneScales scales(sources.params, rows.batch, rows.kv_head);

  // By way of shared memory, which has room for more than registers. A thread reads what it has copied.
  extern __shared__ __align__(128) uint8_t shared[];
  auto* const own = reinterpret_cast<float4*>(shared) + threadIdx.x;
  rows.for_each([&](int i, int64_t offset, bool exists) {
    ptx::copy_async<16>(ptx::shared_address(own + i * kThreads), rows.source.data + (exists ? offset : 0),
                        exists);
  });
  ptx::copy_async_commit();
  ptx::copy_async_wait<0>();
  const auto value = [&](int i) { return own[i * kThreads]; };

  // ---- The largest magnitudes: as integers, which have the order of floats; infinity and NaN come last ----
  if constexpr (kPass != PlanePass::kPlanes) {
    // With two planes a group is what a warp has of a step: one row of 128 columns, two of 64.
    const bool is_fine = rows.source.low != 0;
    const int steps_of_group = is_fine ? 1 : max(kGroupRows / rows.step, 1);
    int32_t of_group = 0, of_thread[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const float4 x = value(i);
      const float columns[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t magnitude = __float_as_int(columns[j]) & kMagnitudeBits;
        of_group = max(of_group, magnitude);
        of_thread[j] = max(of_thread[j], magnitude);
      }
      if ((i + 1) % steps_of_group == 0 || i + 1 == kSteps) {
        of_group = __reduce_max_sync(0xffffffff, of_group);
        const int group = is_fine ? i * (kThreads / 32) + threadIdx.x / 32 : i / steps_of_group;
        if (lane_id() == 0 && of_group > 0) atomicMax(of_groups + group, of_group);
        of_group = 0;
      }
    }
    if (rows.array == PlaneScales::kV || is_fine) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (of_thread[j] > 0) atomicMax(of_columns + rows.column + j, of_thread[j]);
      }
    }
    __syncthreads();
    static_assert(kMaxGroups % 32 == 0 && kMaxGroups <= kThreads);
    if (threadIdx.x < kMaxGroups) {
      const int32_t of_own = of_groups[threadIdx.x];
      const int32_t largest = __reduce_max_sync(0xffffffff, of_own);
      const int32_t least = __reduce_max_sync(0xffffffff, of_own > 0 ? kInfinityBits - of_own : 0);
      if (lane_id() == 0 && largest > 0) {
        atomicMax(scales.maximum(rows.array), largest);
        atomicMax(scales.least_maximum(rows.array), least);
        if (largest >= kInfinityBits) *scales.fails() = 1;
      }
    }
    for (int i = threadIdx.x; i < rows.source.columns; i += kThreads) {
      if (of_columns[i] > 0) atomicMax(scales.column_maxima(rows.array, sources.params) + i, of_columns[i]);
    }
  }

  // ---- The planes, once the key head's blocks have its maximum ----
  if constexpr (kPass == PlanePass::kBoth) {
    __syncthreads();
    if (threadIdx.x == 0) {
      ptx::arrive_and_wait(scales.blocks_done(rows.array), rows.source.blocks_of_head);
    }
    __syncthreads();
  }
  if constexpr (kPass != PlanePass::kMaxima) {
    // In two steps: the exponent may be that of a number which float32 cannot hold.
    const int exponent = scales.exponent(rows.array);
    const float first = power_of_two(exponent / 2), second = power_of_two(exponent - exponent / 2);
    // A single plane rounds ties away from zero, like the portable kernels, which recompute its scores where
    // planes do not hold the gradients. NaN and infinity, whose bits this may change, have failed already.
    const bool is_single = rows.source.low == 0;
    const uint32_t half = is_single ? 0x1000 : 0, kept_bits = is_single ? 0xffffe000 : 0xffffffff;
    const auto scaled = [&](float x) {
      return __uint_as_float((__float_as_uint(x) + half) & kept_bits) * first * second;
    };
    rows.for_each([&](int i, int64_t offset, bool exists) {
      if (!exists) return;
      const float4 x = value(i), y = {scaled(x.x), scaled(x.y), scaled(x.z), scaled(x.w)};
      const uint2 rounded = {ptx::pack_f16(y.x, y.y), ptx::pack_f16(y.z, y.w)};
      *reinterpret_cast<uint2*>(rows.source.plane + offset) = rounded;
      if (is_single) return;
      const float2 a = unpack<float16>(rounded.x), b = unpack<float16>(rounded.y);
      const uint2 rest = {ptx::pack_f16(y.x - a.x, y.y - a.y), ptx::pack_f16(y.z - b.x, y.w - b.y)};
      *reinterpret_cast<uint2*>(rows.source.plane + rows.source.low + offset) = rest;
    });
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

// kRows rows a block, kLanes lanes for each, four columns at a time. Of kNeighbors rows the bounds are
// compared.
template <int kRows, int kLanes, int kNeighbors, bool kIsFine>
__global__ void __launch_bounds__(kRows* kLanes)
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

  // ---- rowsum(dout * out), and |dp| <= the sum of |dout| times the largest |v| of each column ----
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
  bound = ldexpf(bound, v_exponent) * kept_factor + fabsf(delta);

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
  const int64_t group = params.num_heads / params.num_kv_heads;
  const auto source = [&](const void* data, uint16_t* plane, int64_t length, int64_t heads, int64_t columns) {
    const int64_t step = kThreads / (columns / 4);
    const int64_t blocks = data ? ceil_div(length * heads, kSteps * step) : 0;
    return PlaneSource{static_cast<const float*>(data),
                       plane,
                       (planes.count - 1) * key_heads * length * heads * columns,
                       static_cast<int>(length),
                       static_cast<int>(heads),
                       static_cast<int>(columns),
                       static_cast<int>(blocks),
                       static_cast<int>(key_heads * blocks)};
  };
  const int64_t T = params.seqlen_q, S = params.seqlen_kv, H = params.head_dim, Hv = params.head_dim_v;
  const PlaneSources sources = {
      {source(params.q, planes.q, T, group, H), source(params.k, planes.k, S, 1, H),
       source(params.v, planes.v, S, 1, Hv), source(dout, planes.dout, T, group, Hv)},
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
