// Which tile of rows a block works on next.
//
// Thread blocks stay for the whole launch, one on each multiprocessor. Tiles are handed out longest first (a
// causal tile is longer the later its rows are), so that short ones are left for the end, but only within a
// section of heads whose keys and values fit in L2 together. The thread block that is free first takes the
// next tile off a counter: the device alone knows the lengths and offsets that make tiles long or short, and
// a thread block may start late because another kernel occupies its multiprocessor. The result does not
// depend on which thread block computes a tile.
//
// Where a few rows see many keys, a tile is a part of the keys of its rows, so that there are enough tiles.
// These rows are of several query heads of a key head (group_rows.cuh), so that few rows of a tile are lost;
// here they count as rows of one head. So do those of a tile of two heads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "group_rows.cuh"
#include "launch.h"
#include "mask.cuh"
#include "pairs.cuh"
#include "params.h"
#include "planes.cuh"
#include "visibility.cuh"

namespace jax_flash::cuda::sm90 {

struct Schedule {
  int num_m_blocks;   // blocks of rows of one head
  int num_parts;      // of the keys: as many tiles have the same rows
  int tile_heads;     // whose rows a tile has, and which count as one head below
  int num_heads;      // of one batch element
  int total_heads;    // of all batch elements
  int section_heads;  // of one section but the last
  int num_tiles;
  int* counter;  // of tiles handed out; null: there are as many thread blocks as tiles
};

// False if there are too many tiles to number.
inline bool make_schedule(const ForwardParams& params, int block_m, int64_t num_parts, int64_t tile_heads,
                          int* counter, const LaunchContext& context, Schedule* schedule) {
  constexpr int64_t kSectionBytes = 18 << 20;  // of keys and values: 9 and 33 MB were slower on 50 MB of L2
  const int64_t num_heads = ceil_div(params.num_heads, tile_heads), total_heads = params.batch * num_heads;
  const int64_t num_m_blocks = ceil_div(params.seqlen_q * tile_heads, block_m);
  const int64_t num_tiles = total_heads * num_m_blocks * num_parts;
  if (num_tiles > std::numeric_limits<int32_t>::max() - context.multiprocessors) return false;
  const int64_t group = std::max<int64_t>(num_heads / params.num_kv_heads, 1);
  const int64_t head_bytes = 2 * params.seqlen_kv * (params.head_dim + params.head_dim_v);
  const int64_t num_sections = ceil_div(params.batch * params.num_kv_heads * head_bytes, kSectionBytes);
  const int64_t section_heads =
      group * ceil_div(ceil_div(total_heads, group), std::max<int64_t>(num_sections, 1));
  *schedule = {static_cast<int>(num_m_blocks), static_cast<int>(num_parts),
               static_cast<int>(tile_heads),   static_cast<int>(num_heads),
               static_cast<int>(total_heads),  static_cast<int>(section_heads),
               static_cast<int>(num_tiles),    num_tiles > context.multiprocessors ? counter : nullptr};
  return true;
}

template <class T>
struct Without {};
template <bool kHas, class T>
using If = std::conditional_t<kHas, T, Without<T>>;

// What the general form adds to a tile: kept in shared memory to save registers.
template <class Keys>
struct PairTile {
  Keys keys;
  PairHead<false> pairs;
};

// What planes add: exponents of the factors of scores and of out, and whether out lacks the centers of v.
struct PlaneTile {
  int score_exponent, out_exponent;
  bool is_centered;
};

// A tile of rows, and what its rows see, or see of a part of the keys.
template <class Keys, int kConsumers, bool kPlanes = false>
struct WorkTile : If<Keys::kMayBeListed, PairTile<Keys>>, If<kPlanes, PlaneTile> {
  int m_start;  // -1: there are no more tiles
  int head;     // the first one
  int batch;
  int part;                    // where kIsSplit
  KeyBlocks blocks;            // of all rows
  KeyBlocks rows[kConsumers];  // of 64 rows each; begin = end = blocks.begin where they see nothing
  Mask mask;
};

// Fills in tile number `index`, field by field because the thread has few registers. Where a list gives the
// visible blocks (Keys), blocks are counted along the list.
template <int kBlockN, bool kIsSplit, int kHeads, class Keys, int kConsumers, bool kPlanes>
__device__ __forceinline__ void write_tile(const Schedule& schedule, const ForwardParams& params, int index,
                                           WorkTile<Keys, kConsumers, kPlanes>& tile) {
  constexpr int kHeadConsumers = kConsumers / kHeads;
  if (index >= schedule.num_tiles) {
    tile.m_start = -1;
    return;
  }
  const int num_parts = kIsSplit ? schedule.num_parts : 1;
  const int section_tiles = schedule.section_heads * schedule.num_m_blocks * num_parts;
  const int section = index / section_tiles;
  const int in_section = index - section * section_tiles;
  const int first_head = section * schedule.section_heads;
  const int heads = min(schedule.section_heads, schedule.total_heads - first_head);
  const int from_last = in_section / heads, part = from_last % num_parts;
  const int m_start = (schedule.num_m_blocks - 1 - from_last / num_parts) * 64 * kHeadConsumers;
  const int head_and_batch = first_head + in_section - from_last * heads;
  const int batch = head_and_batch / schedule.num_heads;
  const Mask mask(params, batch);
  tile.m_start = m_start;
  tile.head = (head_and_batch - batch * schedule.num_heads) * schedule.tile_heads;
  tile.batch = batch;
  tile.mask = mask;
  // Of rows from m_start + row on. Those beyond the end of out are neither masked nor written.
  auto key_blocks = [&](int row, int rows) {
    if constexpr (kIsSplit) {
      const GroupRows own(params, schedule.tile_heads);
      return mask.key_blocks<kBlockN>(own.query(m_start + row), own.num_queries(m_start + row, rows));
    } else {
      return mask.key_blocks<kBlockN>(m_start + row,
                                      min(rows, static_cast<int>(params.seqlen_q) - m_start - row));
    }
  };
  KeyBlocks blocks = key_blocks(0, 64 * kHeadConsumers);
  // The parts divide evenly what the tile sees; fewer keys would take less time than starting.
  constexpr int kMinPartBlocks = 512 / kBlockN;
  const int part_blocks = max((blocks.end - blocks.begin + num_parts - 1) / num_parts, kMinPartBlocks);
  const int part_begin = blocks.begin + part * part_blocks;
  auto of_part = [&](KeyBlocks blocks) {
    if constexpr (kIsSplit) {
      const int part_end = part_begin + part_blocks;
      blocks.begin = max(blocks.begin, part_begin);
      blocks.end = max(min(blocks.end, part_end), blocks.begin);
      blocks.whole_begin = max(blocks.whole_begin, part_begin);  // where the consumers' inner loop ends
      blocks.whole_end = min(blocks.whole_end, part_end);
    }
    return blocks;
  };
  blocks = of_part(blocks);
  const Keys keys(params, batch, tile.head, m_start, 0, 0);
  if (keys.is_listed()) blocks = {0, keys.count, 0, 0};
  if constexpr (Keys::kMayBeListed) {
    tile.keys = keys;
    tile.pairs = PairHead<false>(params, batch, tile.head);
  }
  if constexpr (kIsSplit) tile.part = part;
  if constexpr (kPlanes) {
    const int group = static_cast<int>(params.num_heads) / static_cast<int>(params.num_kv_heads);
    const PlaneScales scales(params, batch, tile.head / group);
    tile.score_exponent = scales.of_scores();
    tile.out_exponent = scales.of_out();
    tile.is_centered = *scales.is_centered() != 0;
  }
  tile.blocks = blocks;
#pragma unroll 1
  for (int i = 0; i < kConsumers; ++i) {
    if (keys.is_listed()) {
      // From the first to the last block that these rows see.
      KeyBlocks rows = blocks;
      while (rows.begin < rows.end && !keys.entry(rows.begin).is_visible(i)) ++rows.begin;
      while (rows.begin < rows.end && !keys.entry(rows.end - 1).is_visible(i)) --rows.end;
      if (rows.is_empty()) rows.begin = rows.end = blocks.begin;
      tile.rows[i] = rows;
      continue;
    }
    KeyBlocks rows = of_part(key_blocks(64 * (i % kHeadConsumers), 64));
    if (rows.is_empty()) rows.begin = rows.end = blocks.begin;
    tile.rows[i] = rows;
  }
}

}  // namespace jax_flash::cuda::sm90
