#include "planes.cuh"

#include <algorithm>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "delta.cuh"
#include "mask.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda {
namespace {

inline constexpr int kThreads = 256;
inline constexpr int kMaxColumns = 256;  // Hopper's kernels have no more
inline constexpr int kChunkItems = 256;  // rows of all heads of a block, at least: 128 KB at head dim 128
inline constexpr int kGroupRows = 32;    // of those that PlaneScales::hold looks at
inline constexpr int kMaxGroups =
    kChunkItems / kGroupRows;  // of a chunk: what is more counts as the last one
inline constexpr int32_t kMagnitudeBits = 0x7fffffff;

// An array [B, length, K * group, columns], of which a block of threads takes `rows` rows of a key head.
struct PlaneSource {
  const float* data;
  uint16_t* plane;
  int length, group, columns, rows;
  int chunks;      // blocks of a key head
  int num_blocks;  // of the array
};

struct PlaneSources {
  PlaneSource arrays[4];  // as in PlaneScales::Array; without blocks if there is no such array
  AttentionParams params;
};

// A block's rows, and the four columns of each that this thread takes.
class PlaneRowsOfThread {
 public:
  const PlaneSource& source;
  PlaneScales::Array array;
  int batch, kv_head, chunk;

  __device__ __forceinline__ static PlaneRowsOfThread of_block(const PlaneSources& sources) {
    int block = static_cast<int>(blockIdx.x), array = 0;
    while (block >= sources.arrays[array].num_blocks) block -= sources.arrays[array++].num_blocks;
    return {sources, block, array};
  }

  __device__ __forceinline__ int column() const { return 4 * column_; }

  // Calls f(offset) for each row and query head: where this thread's columns begin; and for every kGroupRows
  // of them, end(group), in all threads of the block.
  template <class F, class End>
  __device__ __forceinline__ void for_each(const F& f, const End& end) const {
    const int group = source.group, columns = source.columns;
    const int64_t row_elements = int64_t{num_kv_heads_} * group * columns;
    const int row = first_ / group;
    int head = first_ - row * group;
    const int more_rows = step_ / group, more_heads = step_ - more_rows * group;
    const int steps_of_group = max(kGroupRows / step_, 1);
    int64_t offset = (int64_t{batch} * source.length + row0_ + row) * row_elements +
                     (int64_t{kv_head} * group + head) * columns + column();
    int steps = 0, index = 0;
#pragma unroll 4
    for (int first = 0; first < items_; first += step_) {
      if (is_used_ && first + first_ < items_) f(offset);
      offset += more_rows * row_elements + more_heads * columns;
      head += more_heads;
      if (head >= group) {
        head -= group;
        offset += row_elements - group * columns;
      }
      if (++steps == steps_of_group) {
        end(index++);
        steps = 0;
      }
    }
    if (steps > 0) end(index);
  }

 private:
  __device__ __forceinline__ PlaneRowsOfThread(const PlaneSources& sources, int block, int array)
      : source(sources.arrays[array]), array(static_cast<PlaneScales::Array>(array)) {
    num_kv_heads_ = static_cast<int>(sources.params.num_kv_heads);
    const int key_head = block / source.chunks;
    chunk = block - key_head * source.chunks;
    batch = key_head / num_kv_heads_, kv_head = key_head - batch * num_kv_heads_;
    const Mask mask(sources.params, batch);
    const bool is_of_queries = array == PlaneScales::kQ || array == PlaneScales::kDout;
    const int length = min(is_of_queries ? mask.q_length : mask.kv_length, source.length);
    row0_ = chunk * source.rows;
    items_ = max(min(length - row0_, source.rows), 0) * source.group;
    const int pieces = source.columns / 4;
    step_ = kThreads / pieces;
    const int thread = static_cast<int>(threadIdx.x);
    column_ = thread % pieces;
    first_ = thread / pieces;
    is_used_ = first_ < step_;
  }

  int num_kv_heads_, row0_, items_, column_, first_, step_;
  bool is_used_;
};

__global__ void __launch_bounds__(kThreads)
    plane_maxima_kernel(const __grid_constant__ PlaneSources sources) {
  const PlaneRowsOfThread rows = PlaneRowsOfThread::of_block(sources);
  __shared__ int32_t of_columns[kMaxColumns], of_groups[kMaxGroups];
  for (int i = threadIdx.x; i < rows.source.columns; i += kThreads) of_columns[i] = 0;
  for (int i = threadIdx.x; i < kMaxGroups; i += kThreads) of_groups[i] = 0;
  __syncthreads();

  // As integers, magnitudes have the order of floats; what is not finite comes last.
  int32_t maxima[4] = {}, of_group = 0;
  rows.for_each(
      [&](int64_t offset) {
        const int4 x = *reinterpret_cast<const int4*>(rows.source.data + offset);
        const int32_t magnitudes[4] = {x.x & kMagnitudeBits, x.y & kMagnitudeBits, x.z & kMagnitudeBits,
                                       x.w & kMagnitudeBits};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          maxima[i] = max(maxima[i], magnitudes[i]);
          of_group = max(of_group, magnitudes[i]);
        }
      },
      [&](int group) {
        of_group = __reduce_max_sync(0xffffffff, of_group);
        if (lane_id() == 0 && of_group > 0) atomicMax(of_groups + min(group, kMaxGroups - 1), of_group);
        of_group = 0;
      });
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (maxima[i] > 0) atomicMax(of_columns + rows.column() + i, maxima[i]);
  }
  __syncthreads();

  // ---- Of the block, then of all ----
  const PlaneScales scales(sources.params, rows.batch, rows.kv_head);
  int32_t* to = scales.column_maxima(rows.array);
  for (int i = threadIdx.x; i < rows.source.columns; i += kThreads) {
    if (of_columns[i] > 0) atomicMax(to + i, of_columns[i]);
    if (of_columns[i] >= kInfinityBits) *scales.fails() = 1;
  }
  for (int i = threadIdx.x; i < kMaxGroups; i += kThreads) {
    if (of_groups[i] > 0) atomicMax(scales.least_maximum(rows.array), kInfinityBits - of_groups[i]);
  }
}

__global__ void __launch_bounds__(kThreads) plane_kernel(const __grid_constant__ PlaneSources sources) {
  const PlaneRowsOfThread rows = PlaneRowsOfThread::of_block(sources);
  const PlaneScales scales(sources.params, rows.batch, rows.kv_head);
  const int32_t* maxima = scales.column_maxima(rows.array);

  // ---- The exponent ----
  __shared__ int32_t largest_of_warps[kThreads / 32];
  int largest = 0;
  for (int i = threadIdx.x; i < rows.source.columns; i += kThreads) largest = max(largest, maxima[i]);
  largest = __reduce_max_sync(0xffffffff, largest);
  if (lane_id() == 0) largest_of_warps[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int32_t of_warp : largest_of_warps) largest = max(largest, of_warp);
  const int exponent = plane_exponent(__int_as_float(largest));
  if (rows.chunk == 0 && threadIdx.x == 0) scales.values[rows.array] = exponent;

  // ---- The plane ----
  // In two steps: the exponent may be that of a number which float32 cannot hold.
  const float first = power_of_two(exponent / 2), second = power_of_two(exponent - exponent / 2);
  rows.for_each(
      [&](int64_t offset) {
        const float4 x = *reinterpret_cast<const float4*>(rows.source.data + offset);
        const uint2 rounded = {ptx::pack_f16(x.x * first * second, x.y * first * second),
                               ptx::pack_f16(x.z * first * second, x.w * first * second)};
        *reinterpret_cast<uint2*>(rows.source.plane + offset) = rounded;
      },
      [](int) {});
}

// kLanes lanes for each row, four columns each.
template <int kLanes>
__global__ void __launch_bounds__(kThreads) plane_rows_kernel(const __grid_constant__ BackwardParams params) {
  const int length = static_cast<int>(stats_length(params.seqlen_q));
  const int num_heads = static_cast<int>(params.num_heads), columns = static_cast<int>(params.head_dim_v);
  const int group = num_heads / static_cast<int>(params.num_kv_heads);
  const int64_t index = int64_t{blockIdx.x} * (kThreads / kLanes) + threadIdx.x / kLanes;
  if (index == 0 && threadIdx.x == 0) *params.tile_counter = 0;
  const int64_t batch_and_head = index / length;
  const int row = static_cast<int>(index - batch_and_head * length);
  const int batch = static_cast<int>(batch_and_head / num_heads);
  const bool exists = batch < params.batch;  // to the end: all lanes of a warp add up
  const int head = static_cast<int>(batch_and_head - int64_t{batch} * num_heads);
  const PlaneScales scales(params, exists ? batch : 0, exists ? head / group : 0);
  const int v_exponent = scales.exponent(PlaneScales::kV), dp_exponent = -scales.of_dp();

  // delta = rowsum(dout * out) - dlse, and |dp| <= the sum of |dout| times the largest |v| of each column.
  const bool counts = exists && row < Mask(params, batch).q_length;
  const int64_t out_row = (int64_t{batch} * params.seqlen_q + row) * num_heads + head;
  float delta = 0, bound = 0;
  for (int column = 4 * (threadIdx.x % kLanes); counts && column < columns; column += 4 * kLanes) {
    const int64_t offset = out_row * columns + column;
    const float4 out = *reinterpret_cast<const float4*>(static_cast<const float*>(params.out) + offset);
    const uint2 dout = *reinterpret_cast<const uint2*>(params.planes.dout + offset);
    const int4 v = *reinterpret_cast<const int4*>(scales.column_maxima(PlaneScales::kV) + column);
    const float2 low = unpack<float16>(dout.x), high = unpack<float16>(dout.y);
    delta = fmaf(low.x, out.x, fmaf(low.y, out.y, fmaf(high.x, out.z, fmaf(high.y, out.w, delta))));
    bound = fmaf(fabsf(low.x), __int_as_float(v.x), fmaf(fabsf(low.y), __int_as_float(v.y), bound));
    bound = fmaf(fabsf(high.x), __int_as_float(v.z), fmaf(fabsf(high.y), __int_as_float(v.w), bound));
  }
  delta = sum_lanes<kLanes>(delta), bound = sum_lanes<kLanes>(bound);
  if (!exists || threadIdx.x % kLanes != 0) return;

  const float lse = counts ? static_cast<const float*>(params.lse)[out_row] : -INFINITY;
  const bool sees_keys = lse != -INFINITY;
  delta = ldexpf(delta, v_exponent);
  if (counts && params.dlse && lse != INFINITY) {
    delta -= ldexpf(static_cast<const float*>(params.dlse)[out_row], dp_exponent);
  }
  if (!sees_keys) delta = 0;
  const float kept_factor = static_cast<float>(1 / (1 - params.options.dropout_rate));
  bound = ldexpf(bound, v_exponent) * kept_factor + fabsf(delta);

  if (!(bound < INFINITY)) *scales.fails() = 1;
  const PlaneRows rows(params, length);
  rows.lse_log2[index] = sees_keys ? lse * kLog2e - (kPlaneTop + 1) : INFINITY;
  rows.delta[index] = delta;
  // Of a row without gradient the largest that any row has: the smallest of a block counts for dk.
  const float factor =
      bound > 0 ? power_of_two(plane_exponent(bound) - 1 - (kPlaneTop + 1)) : power_of_two(127);
  rows.ds_factor[index] = static_cast<uint16_t>(__float_as_uint(factor) >> 16);
}

}  // namespace

Status launch_planes(const AttentionParams& params, const void* dout, const LaunchContext& context) {
  const PlaneWorkspace& planes = params.planes;
  const int64_t key_heads = params.batch * params.num_kv_heads;
  const int64_t group = params.num_heads / params.num_kv_heads;
  const auto source = [&](const void* data, uint16_t* plane, int64_t length, int64_t heads, int64_t columns) {
    const int64_t rows = std::max<int64_t>(kChunkItems / heads, 1),
                  chunks = data ? ceil_div(length, rows) : 0;
    return PlaneSource{static_cast<const float*>(data), plane,
                       static_cast<int>(length),        static_cast<int>(heads),
                       static_cast<int>(columns),       static_cast<int>(rows),
                       static_cast<int>(chunks),        static_cast<int>(key_heads * chunks)};
  };
  const int64_t T = params.seqlen_q, S = params.seqlen_kv, H = params.head_dim, Hv = params.head_dim_v;
  const PlaneSources sources = {
      {source(params.q, planes.q, T, group, H), source(params.k, planes.k, S, 1, H),
       source(params.v, planes.v, S, 1, Hv), source(dout, planes.dout, T, group, Hv)},
      params};
  int64_t blocks = 0;
  for (const PlaneSource& array : sources.arrays) blocks += array.num_blocks;
  Status status = cudaMemsetAsync(planes.scales, 0, sizeof(int32_t) * key_heads * PlaneScales::size(params),
                                  context.stream);
  if (status.failed()) return status;
  status = launch(plane_maxima_kernel, blocks, kThreads, 0, context, sources);
  if (status.failed()) return status;
  return launch(plane_kernel, blocks, kThreads, 0, context, sources);
}

Status launch_plane_rows(const BackwardParams& params, const LaunchContext& context) {
  const int64_t rows = params.batch * params.num_heads * stats_length(params.seqlen_q);
  auto launch_form = [&]<int kLanes>() {
    return launch(plane_rows_kernel<kLanes>, ceil_div(rows, kThreads / kLanes), kThreads, 0, context, params);
  };
  return params.head_dim_v <= 64 ? launch_form.template operator()<16>()
                                 : launch_form.template operator()<32>();
}

}  // namespace jax_flash::cuda
