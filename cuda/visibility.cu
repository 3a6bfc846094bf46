#include "visibility.cuh"

#include <cstdint>

#include "launch.h"
#include "mask.cuh"
#include "params.h"

namespace jax_flash::cuda {
namespace {

// Packs 16 bytes, each 0 or 1, into 16 bits. The product moves the lowest bit of byte i to bit 24 + i.
__device__ __forceinline__ uint32_t pack(uint4 bytes) {
  auto four = [](uint32_t x) { return (x & 0x01010101) * 0x01020408 >> 24 & 0xf; };
  return four(bytes.x) | four(bytes.y) << 4 | four(bytes.z) << 8 | four(bytes.w) << 12;
}

// Transposes a warp's 32 x 32 bits: takes row `lane`, returns column `lane`. Swaps the quarters off the
// diagonal, in squares of 32, then 16, ...
__device__ __forceinline__ uint32_t transpose(uint32_t row, int lane) {
  uint32_t low = 0x0000ffff;  // the lower half of each square's columns
#pragma unroll
  for (int step = 16; step > 0; step /= 2, low ^= low << step) {
    const uint32_t other = __shfl_xor_sync(0xffffffff, row, step);
    row = lane & step ? (row & ~low) | (other & ~low) >> step : (row & low) | (other & low) << step;
  }
  return row;
}

// The range of a block's segment ids.
struct SegmentRange {
  int lowest, highest;

  // Of ids [count], 1 <= count <= kVisibilityBlock. Called by a whole warp.
  __device__ __forceinline__ static SegmentRange of(const int32_t* ids, int count) {
    const int lane = threadIdx.x % 32;
    // A lane that has no id repeats the first one.
    const int a = ids[lane < count ? lane : 0], b = ids[lane + 32 < count ? lane + 32 : 0];
    return {__reduce_min_sync(0xffffffff, min(a, b)), __reduce_max_sync(0xffffffff, max(a, b))};
  }

  __device__ __forceinline__ bool may_meet(const SegmentRange& other) const {
    return highest >= other.lowest && other.highest >= lowest;
  }

  __device__ __forceinline__ bool is_same_segment_as(const SegmentRange& other) const {
    return lowest == highest && other.lowest == other.highest && lowest == other.lowest;
  }
};

constexpr int kSegmentBlocksM = 32, kSegmentBlocksN = 128, kSegmentThreads = 256;

// The visibility [B, M, U] of each block of 64 queries and 64 keys by segments alone. A thread block finds
// the ranges of kSegmentBlocksM blocks of queries and kSegmentBlocksN blocks of keys, and compares all pairs.
__global__ void __launch_bounds__(kSegmentThreads)
    segment_visibility_kernel(const __grid_constant__ AttentionParams params) {
  constexpr int kBlock = kVisibilityBlock;
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int64_t m_blocks = ceil_div(seqlen_q, kBlock), n_blocks = ceil_div(seqlen_kv, kBlock);
  const int64_t n_groups = ceil_div(n_blocks, kSegmentBlocksN);
  const int64_t batch_and_m = blockIdx.x / n_groups, m_groups = ceil_div(m_blocks, kSegmentBlocksM);
  const int64_t batch = batch_and_m / m_groups;
  const int first_m = static_cast<int>(batch_and_m % m_groups) * kSegmentBlocksM;
  const int first_n = static_cast<int>(blockIdx.x % n_groups) * kSegmentBlocksN;

  __shared__ SegmentRange of_queries[kSegmentBlocksM], of_keys[kSegmentBlocksN];
  auto find = [&](SegmentRange* ranges, int count, const int32_t* ids, int length, int first) {
    for (int i = threadIdx.x / 32; i < count; i += kSegmentThreads / 32) {
      const int start = (first + i) * kBlock;
      if (start >= length) return;
      const SegmentRange range = SegmentRange::of(ids + start, min(kBlock, length - start));
      if (threadIdx.x % 32 == 0) ranges[i] = range;
    }
  };
  find(of_queries, kSegmentBlocksM, params.query_segment_ids + batch * seqlen_q, seqlen_q, first_m);
  find(of_keys, kSegmentBlocksN, params.key_value_segment_ids + batch * seqlen_kv, seqlen_kv, first_n);
  __syncthreads();

  uint8_t* visibility = params.visible.visibility + batch * m_blocks * n_blocks;
  for (int i = threadIdx.x; i < kSegmentBlocksM * kSegmentBlocksN; i += kSegmentThreads) {
    const int m = first_m + i / kSegmentBlocksN, n = first_n + i % kSegmentBlocksN;
    if (m >= m_blocks || n >= n_blocks) continue;
    const SegmentRange &queries = of_queries[i / kSegmentBlocksN], &keys = of_keys[i % kSegmentBlocksN];
    visibility[m * n_blocks + n] = !queries.may_meet(keys)            ? kHidden
                                   : queries.is_same_segment_as(keys) ? kWhole
                                                                      : kPartly;
  }
}

// The thread blocks of mask_visibility_kernel have a warp for each of 16 blocks of 64 queries and 64 keys: in
// a large mask four by four, so that they write whole sectors of 32 bytes of both kinds of words; in a small
// one of as many heads as have room.
constexpr int kMaskWarps = 16, kMaskThreads = 32 * kMaskWarps;

struct MaskTile {
  int m, n, heads;  // blocks of queries, of keys; of how many of the B * N' heads

  __host__ __device__ MaskTile(int64_t m_blocks, int64_t n_blocks)
      : m(m_blocks < 8 && m_blocks != 4 ? 1 : 4), n(1) {
    while (n < n_blocks && m * n < kMaskWarps) n *= 2;
    heads = kMaskWarps / (m * n);
  }
};

// The visibility [B, N', M, U] of each block of 64 queries and 64 keys by mask and segments alone, and the
// mask as bits.
__global__ void __launch_bounds__(kMaskThreads)
    mask_visibility_kernel(const __grid_constant__ AttentionParams params) {
  const VisibilityWorkspace& visible = params.visible;
  constexpr int kBlock = kVisibilityBlock;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int m_blocks = (seqlen_q + kBlock - 1) / kBlock, n_blocks = (seqlen_kv + kBlock - 1) / kBlock;
  const MaskTile tile(m_blocks, n_blocks);
  const int m_tiles = (m_blocks + tile.m - 1) / tile.m, n_tiles = (n_blocks + tile.n - 1) / tile.n;
  const int first_m = static_cast<int>(blockIdx.x / n_tiles) % m_tiles * tile.m;
  const int first_n = static_cast<int>(blockIdx.x % n_tiles) * tile.n;
  const int64_t first_head = int64_t{blockIdx.x / n_tiles / m_tiles} * tile.heads;
  const int64_t num_heads = params.batch * visible.num_heads;

  // Of each warp's block: the keys of each query, and the queries of each key.
  __shared__ uint2 of_queries[kMaskWarps][kBlock], of_keys[kMaskWarps][kBlock];

  // ---- Each warp: the bits of its block ----
  const int m = first_m + warp / tile.n % tile.m, n = first_n + warp % tile.n;
  const int64_t batch_and_head = first_head + warp / tile.n / tile.m;
  if (m < m_blocks && n < n_blocks && batch_and_head < num_heads) {
    const int64_t batch = batch_and_head / visible.num_heads, head = batch_and_head % visible.num_heads;
    const int m_start = m * kBlock, n_start = n * kBlock;
    const int rows = min(kBlock, seqlen_q - m_start), keys = min(kBlock, seqlen_kv - n_start);
    bool any = true, all = true;
    if (params.has_segments()) {
      const auto of_q = SegmentRange::of(params.query_segment_ids + batch * seqlen_q + m_start, rows);
      const auto of_k = SegmentRange::of(params.key_value_segment_ids + batch * seqlen_kv + n_start, keys);
      any = of_q.may_meet(of_k);
      all = of_q.is_same_segment_as(of_k);
    }
    // Even where segments hide everything: another batch element may share this part of the mask. Four lanes
    // read a row of the block, 16 keys each, and put it together in shared memory.
    const PairArray& mask = params.mask;
    const uint8_t* from = static_cast<const uint8_t*>(mask.data) + batch * mask.batch_stride +
                          head * mask.head_stride + m_start * mask.row_stride + n_start * mask.key_stride;
    const bool by_sixteen = mask.key_stride == 1 && seqlen_kv % 16 == 0;
    const int first_key = lane % 4 * 16;
    auto row_of = [&](int i) { return 8 * i + lane / 4; };
    uint32_t bits[kBlock / 8];
    if (by_sixteen) {
      uint4 bytes[kBlock / 8];  // all are read before the first is used
#pragma unroll
      for (int i = 0; i < kBlock / 8; ++i) {
        const bool exists = row_of(i) < rows && first_key < keys;
        const uint8_t* from_row = from + (exists ? row_of(i) * mask.row_stride + first_key : 0);
        bytes[i] = exists ? *reinterpret_cast<const uint4*>(from_row) : uint4{};
      }
#pragma unroll
      for (int i = 0; i < kBlock / 8; ++i) bits[i] = pack(bytes[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kBlock / 8; ++i) {
        const uint8_t* from_row = from + row_of(i) * mask.row_stride;
        bits[i] = 0;
#pragma unroll 4
        for (int j = 0; row_of(i) < rows && j < 16 && first_key + j < keys; ++j) {
          bits[i] |= uint32_t{from_row[(first_key + j) * mask.key_stride] != 0} << j;
        }
      }
    }
    auto* quarters = reinterpret_cast<uint16_t (*)[4]>(of_queries[warp]);
#pragma unroll
    for (int i = 0; i < kBlock / 8; ++i) {
      quarters[row_of(i)][lane % 4] = static_cast<uint16_t>(bits[i]);
    }
    __syncwarp();
    const uint2 low = of_queries[warp][lane], high = of_queries[warp][lane + 32];
    if (visible.of_keys.words) {
      of_keys[warp][lane] = {transpose(low.x, lane), transpose(high.x, lane)};
      of_keys[warp][lane + 32] = {transpose(low.y, lane), transpose(high.y, lane)};
    }
    const uint2 all_keys = {keys < 32 ? (1u << keys) - 1 : ~0u,
                            keys < 64 ? (1u << max(keys - 32, 0)) - 1 : ~0u};
    bool any_seen = false, all_seen = true;
    auto look_at = [&](uint2 row_keys, int row) {
      if (row >= rows) return;
      any_seen |= (row_keys.x | row_keys.y) != 0;
      all_seen &= row_keys.x == all_keys.x && row_keys.y == all_keys.y;
    };
    look_at(low, lane);
    look_at(high, lane + 32);
    any = any && __any_sync(0xffffffff, any_seen);
    all &= __all_sync(0xffffffff, all_seen);
    if (lane == 0) {
      visible.visibility[(batch_and_head * m_blocks + m) * n_blocks + n] = !any  ? kHidden
                                                                           : all ? kWhole
                                                                                 : kPartly;
    }
  }

  // ---- All warps: write out, neighboring lanes the neighboring words of a row ----
  __syncthreads();
  auto write = [&](const VisibilityWorkspace::Bits& bits, const uint2(&words)[kMaskWarps][kBlock],
                   bool are_of_keys) {
    if (!bits.words) return;
    const int row0 = kBlock * (are_of_keys ? first_n : first_m), length = are_of_keys ? seqlen_kv : seqlen_q;
    const int block0 = are_of_keys ? first_m : first_n, num_blocks = are_of_keys ? m_blocks : n_blocks;
    const int along = are_of_keys ? tile.m : tile.n, across = are_of_keys ? tile.n : tile.m;
    for (int i = threadIdx.x; i < kMaskWarps * kBlock; i += kMaskThreads) {
      const int block = i % along, row = i / along % kBlock, row_block = i / along / kBlock % across;
      const int tile_head = i / along / kBlock / across;
      const int64_t batch_and_head = first_head + tile_head;
      const int to_row = row0 + row_block * kBlock + row, to_block = block0 + block;
      if (to_row >= length || to_block >= num_blocks || batch_and_head >= num_heads) continue;
      // An axis of size 1 has one row, or one block with equal bits.
      if (bits.row_stride == 0 && row > 0) continue;
      const int place = are_of_keys ? block * tile.n + row_block : row_block * tile.n + block;
      uint2 x = words[tile_head * tile.m * tile.n + place][row];
      if (bits.word_step == 0) x.x = x.y = x.x != 0 ? ~0u : 0;
      uint32_t* to = bits.words + batch_and_head / visible.num_heads * bits.batch_stride +
                     batch_and_head % visible.num_heads * bits.head_stride + to_row * bits.row_stride +
                     2 * to_block * bits.word_step;
      *reinterpret_cast<uint2*>(to) = x;
    }
  };
  write(visible.of_queries, of_queries, false);
  write(visible.of_keys, of_keys, true);
}

constexpr int kListThreads = 256;

// Writes each tile's list: the number of visible blocks, then an entry for each, in ascending order. One
// thread block per list.
__global__ void __launch_bounds__(kListThreads)
    list_kernel(const __grid_constant__ AttentionParams params, ListShape shape) {
  const VisibilityWorkspace& visible = params.visible;
  constexpr int kBlock = kVisibilityBlock;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int m_blocks = (seqlen_q + kBlock - 1) / kBlock, n_blocks = (seqlen_kv + kBlock - 1) / kBlock;
  const int64_t index = blockIdx.x;
  const int64_t lists = shape.lists(params), length = shape.length(params);
  const int64_t batch_and_head = index / lists;
  const uint8_t* blocks = visible.visibility + batch_and_head * m_blocks * n_blocks;
  uint32_t* list = visible.lists + index * length;
  const Mask mask(params, static_cast<int>(batch_and_head / visible.num_heads));
  const int tile_start = static_cast<int>(index % lists) * shape.tile;

  __shared__ int warp_counts[kListThreads / 32];
  int count = 0;
  for (int first = 0; first < length - 1; first += kListThreads) {
    const int unit = first + threadIdx.x, start = unit * shape.unit, end = start + shape.unit;
    bool any = false, all = true;
    uint32_t parts = 0;
    // Unrolled, so that all blocks are read at once.
#pragma unroll
    for (int part = 0; part < ListEntry::kMaxParts; ++part) {
      const int part_start = tile_start + part * kBlock, part_end = part_start + kBlock;
      const bool exists = unit < length - 1 && part * kBlock < shape.tile &&
                          part_start < (shape.of_queries ? seqlen_q : seqlen_kv);
      bool is_visible = false, is_whole = true;
#pragma unroll
      for (int i = 0; i < ListEntry::kMaxUnitBlocks; ++i) {
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
    if (lane == 0) warp_counts[warp] = __popc(seen);
    __syncthreads();
    int place = count + __popc(seen & ((1u << lane) - 1));
    for (int i = 0; i < kListThreads / 32; ++i) {
      if (i < warp) place += warp_counts[i];
      count += warp_counts[i];
    }
    if (any) list[1 + place] = ListEntry::make(unit, all) | parts;
    __syncthreads();  // warp_counts have been read
  }
  if (threadIdx.x == 0) list[0] = count;
}

}  // namespace

Status launch_visibility(const AttentionParams& params, const LaunchContext& context) {
  if (!params.hides_pairs()) return {};
  const int64_t m_blocks = ceil_div(params.seqlen_q, kVisibilityBlock);
  const int64_t n_blocks = ceil_div(params.seqlen_kv, kVisibilityBlock);
  if (!params.mask) {
    const int64_t groups = ceil_div(m_blocks, kSegmentBlocksM) * ceil_div(n_blocks, kSegmentBlocksN);
    return launch(segment_visibility_kernel, params.batch * groups, kSegmentThreads, 0, context, params);
  }
  const MaskTile tile(m_blocks, n_blocks);
  const int64_t tiles = ceil_div(m_blocks, tile.m) * ceil_div(n_blocks, tile.n) *
                        ceil_div(params.batch * params.visible.num_heads, tile.heads);
  return launch(mask_visibility_kernel, tiles, kMaskThreads, 0, context, params);
}

Status launch_lists(const AttentionParams& params, const ListShape& shape, const LaunchContext& context) {
  if (!params.hides_pairs()) return {};
  const int64_t lists = params.batch * params.visible.num_heads * shape.lists(params);
  return launch(list_kernel, lists, kListThreads, 0, context, params, shape);
}

}  // namespace jax_flash::cuda
