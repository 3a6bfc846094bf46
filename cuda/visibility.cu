#include "visibility.cuh"

#include <cstdint>

#include "launch.h"
#include "mask.cuh"
#include "params.h"

namespace jax_flash::cuda {
namespace {

enum Visibility : uint8_t { kHidden, kPartly, kWhole };

// The lower 16 bits at the even places.
__device__ __forceinline__ uint32_t spread(uint32_t x) {
  x = (x | x << 8) & 0x00ff00ff;
  x = (x | x << 4) & 0x0f0f0f0f;
  x = (x | x << 2) & 0x33333333;
  return (x | x << 1) & 0x55555555;
}

// Visibility of each block of 64 queries and 64 keys, by mask and segments alone; a warp a block.
__global__ void __launch_bounds__(256) visibility_kernel(const __grid_constant__ AttentionParams params) {
  const VisibilityWorkspace& visible = params.visible;
  constexpr int kBlock = kVisibilityBlock;
  const int lane = threadIdx.x % 32;
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int m_blocks = (seqlen_q + kBlock - 1) / kBlock, n_blocks = (seqlen_kv + kBlock - 1) / kBlock;
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (index >= params.batch * visible.num_heads * m_blocks * n_blocks) return;
  const int n_start = static_cast<int>(index % n_blocks) * kBlock;
  const int m_start = static_cast<int>(index / n_blocks % m_blocks) * kBlock;
  const int64_t batch_and_head = index / n_blocks / m_blocks;
  const int64_t batch = batch_and_head / visible.num_heads, head = batch_and_head % visible.num_heads;
  const int rows = min(kBlock, seqlen_q - m_start), keys = min(kBlock, seqlen_kv - n_start);

  bool any = true, all = true;
  if (params.query_segment_ids) {
    // A lane that has no row or key repeats the first one.
    int lowest[2], highest[2];
    auto find = [&](const int32_t* ids, int count, int which) {
      const int a = ids[lane < count ? lane : 0], b = ids[lane + 32 < count ? lane + 32 : 0];
      lowest[which] = __reduce_min_sync(0xffffffff, min(a, b));
      highest[which] = __reduce_max_sync(0xffffffff, max(a, b));
    };
    find(params.query_segment_ids + batch * seqlen_q + m_start, rows, 0);
    find(params.key_value_segment_ids + batch * seqlen_kv + n_start, keys, 1);
    any = highest[0] >= lowest[1] && highest[1] >= lowest[0];
    all = lowest[0] == highest[0] && lowest[1] == highest[1] && lowest[0] == lowest[1];
  }
  if (params.mask.data) {
    // Also where segments hide all: another batch element may share this part of the mask.
    // A lane looks at two keys, row by row: a ballot is 32 keys' bits of a query, and what a lane has seen is
    // 64 queries' bits of its keys. Neighbours, where two bytes can be read at once, else l and l + 32.
    const PairArray& mask = params.mask;
    const bool* from = static_cast<const bool*>(mask.data) + batch * mask.batch_stride +
                       head * mask.head_stride + m_start * mask.row_stride + n_start * mask.key_stride;
    const bool by_twos =
        mask.key_stride == 1 && (reinterpret_cast<uintptr_t>(from) | seqlen_kv | mask.row_stride) % 2 == 0;
    const int first_key = by_twos ? 2 * lane : lane, key_step = by_twos ? 1 : 32;
    uint32_t of_row[2][2] = {}, of_key[2][2] = {};  // of rows lane and lane + 32; of the lane's keys
    constexpr int kRowsAtOnce = 16;                 // on their way from memory
#pragma unroll
    for (int first_row = 0; first_row < kBlock; first_row += kRowsAtOnce) {
      uint32_t two[kRowsAtOnce];  // keys' bytes
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        two[i] = 0;
        if (first_row + i >= rows) continue;
        const bool* from_row = from + (first_row + i) * mask.row_stride;
        if (by_twos) {
          if (first_key < keys) two[i] = *reinterpret_cast<const uint16_t*>(from_row + first_key);
        } else {
          if (lane < keys) two[i] = from_row[lane * mask.key_stride];
          if (lane + 32 < keys) two[i] |= from_row[(lane + 32) * mask.key_stride] << 8;
        }
      }
#pragma unroll
      for (int i = 0; i < kRowsAtOnce; ++i) {
        const int row = first_row + i;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool seen = two[i] >> 8 * j & 0xff;
          const uint32_t seen_keys = __ballot_sync(0xffffffff, seen);
          if (lane == row % 32) of_row[row / 32][j] = seen_keys;
          of_key[j][row / 32] |= uint32_t{seen} << row % 32;
        }
      }
    }
    if (by_twos) {
#pragma unroll
      for (auto& words : of_row) {  // the bits of even keys and those of odd keys
        const uint32_t even = words[0], odd = words[1];
        words[0] = spread(even & 0xffff) | spread(odd & 0xffff) << 1;
        words[1] = spread(even >> 16) | spread(odd >> 16) << 1;
      }
    }
    const uint32_t row_keys[2] = {keys < 32 ? (1u << keys) - 1 : ~0u,
                                  keys < 64 ? (1u << max(keys - 32, 0)) - 1 : ~0u};
    bool any_seen = false, all_seen = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane + 32 * i >= rows) continue;
      any_seen |= (of_row[i][0] | of_row[i][1]) != 0;
      all_seen &= of_row[i][0] == row_keys[0] && of_row[i][1] == row_keys[1];
    }
    any = any && __any_sync(0xffffffff, any_seen);
    all &= __all_sync(0xffffffff, all_seen);

    // An axis of size 1 has one row, or one block whose bits are all alike.
    auto write = [&](const VisibilityWorkspace::Bits& bits, uint32_t (&words)[2][2], int start, int count,
                     int block, int first, int step) {
      if (!bits.words) return;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = first + step * i;
        if (row >= count || (bits.row_stride == 0 && row > 0)) continue;
        uint32_t* to = bits.words + batch * bits.batch_stride + head * bits.head_stride +
                       (start + row) * bits.row_stride + 2 * block * bits.word_step;
        for (int j = 0; j < 2; ++j) to[j] = bits.word_step ? words[i][j] : words[i][0] != 0 ? ~0u : 0;
      }
    };
    write(visible.of_queries, of_row, m_start, rows, n_start / kBlock, lane, 32);
    write(visible.of_keys, of_key, n_start, keys, m_start / kBlock, first_key, key_step);
  }
  if (lane == 0) visible.visibility[index] = !any ? kHidden : all ? kWhole : kPartly;
}

// The visible blocks of each tile in ascending order: their number, then an entry for each. A warp a list.
__global__ void __launch_bounds__(128)
    list_kernel(const __grid_constant__ AttentionParams params, ListShape shape) {
  const VisibilityWorkspace& visible = params.visible;
  constexpr int kBlock = kVisibilityBlock, kMaxUnitBlocks = 2;
  const int lane = threadIdx.x % 32;
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int m_blocks = (seqlen_q + kBlock - 1) / kBlock, n_blocks = (seqlen_kv + kBlock - 1) / kBlock;
  const int64_t index = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t lists = shape.lists(params), length = shape.length(params);
  if (index >= params.batch * visible.num_heads * lists) return;
  const int64_t batch_and_head = index / lists;
  const uint8_t* blocks = visible.visibility + batch_and_head * m_blocks * n_blocks;
  int32_t* list = visible.lists + index * length;
  const Mask mask(params, static_cast<int>(batch_and_head / visible.num_heads));
  const int tile_start = static_cast<int>(index % lists) * shape.tile;

  int count = 0;
  for (int first = 0; first < length - 1; first += 32) {
    const int unit = first + lane, start = unit * shape.unit, end = start + shape.unit;
    bool any = false, all = true;
    int32_t parts = 0;
    // Unrolled, so that all blocks are read at once.
#pragma unroll
    for (int part = 0; part < ListEntry::kMaxParts; ++part) {
      const int part_start = tile_start + part * kBlock, part_end = part_start + kBlock;
      const bool exists = unit < length - 1 && part * kBlock < shape.tile &&
                          part_start < (shape.of_queries ? seqlen_q : seqlen_kv);
      bool is_visible = false, is_whole = true;
#pragma unroll
      for (int i = 0; i < kMaxUnitBlocks; ++i) {
        const int block_start = start + i * kBlock;
        const int m = (shape.of_queries ? part_start : block_start) / kBlock;
        const int n = (shape.of_queries ? block_start : part_start) / kBlock;
        if (!exists || i * kBlock >= shape.unit || m >= m_blocks || n >= n_blocks) continue;
        const uint8_t block = blocks[int64_t{m} * n_blocks + n];
        is_visible |= block != kHidden;
        is_whole &= block == kWhole;
      }
      const int m_start = shape.of_queries ? part_start : start,
                n_start = shape.of_queries ? start : part_start;
      const int m_end = min(shape.of_queries ? part_end : end, seqlen_q);
      const int n_end = min(shape.of_queries ? end : part_end, seqlen_kv);
      is_visible = is_visible && !mask.hides(m_start, m_end - m_start, n_start, n_end - n_start);
      parts |= ListEntry::part(part, is_visible, is_whole);
      any |= is_visible;
      all &= is_whole;
    }
    const uint32_t seen = __ballot_sync(0xffffffff, any);
    if (any) list[1 + count + __popc(seen & ((1u << lane) - 1))] = ListEntry::make(unit, all) | parts;
    count += __popc(seen);
  }
  if (lane == 0) list[0] = count;
}

}  // namespace

cudaError_t launch_visibility(const AttentionParams& params, const LaunchContext& context) {
  if (!has_visibility(params)) return cudaSuccess;
  const int64_t blocks = params.batch * params.visible.num_heads *
                         ceil_div(params.seqlen_q, kVisibilityBlock) *
                         ceil_div(params.seqlen_kv, kVisibilityBlock);
  return launch(visibility_kernel, ceil_div(blocks, 8), 256, 0, context, params);
}

cudaError_t launch_lists(const AttentionParams& params, const ListShape& shape,
                         const LaunchContext& context) {
  if (!has_visibility(params)) return cudaSuccess;
  const int64_t lists = params.batch * params.visible.num_heads * shape.lists(params);
  return launch(list_kernel, ceil_div(lists, 4), 128, 0, context, params, shape);
}

}  // namespace jax_flash::cuda
