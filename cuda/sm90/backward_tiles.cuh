// Which tiles of keys there are for dk and dv on Hopper, their order, and what is known of each. For
// backward.cuh and wide_backward.cuh, whose Config says how large a tile is.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "accumulator.cuh"
#include "launch.h"
#include "mask.cuh"
#include "pairs.cuh"
#include "params.h"
#include "ptx/memory.h"
#include "sm90/cluster.cuh"
#include "sm90/fragments.cuh"
#include "sm90/item_ring.cuh"
#include "sm90/ring.cuh"
#include "visibility.cuh"

namespace jax_flash::cuda::sm90 {

// The tiles in the order in which thread blocks take them. An item is a tile, or the first and the last, the
// second and the last but one tile of a part: when causal, such pairs are all equally long. Where items are
// equal, blocks stay on their multiprocessors, and an item's rows load while the one before ends; where they
// are not, there are as many blocks as items, and the hardware starts one where one ends: then causal tiles
// come longest first, the first one of every part of a section, the second one, ... (a part after the other
// would have the last part's long tiles end alone: up to 1.5 times as long). Queries, dout and dq of a
// section fit in L2 together.
//
// Where tiles add dq in turns, all come from a counter, those of the last keys first, which are the first to
// see each block of queries when causal, too. A tile waits only for tiles with lower numbers. Numbers are
// drawn in order, and a block computes its own in order, so the lowest unfinished one waits for nobody.
struct BackwardSchedule {
  int n_blocks;       // of one part of the query heads
  int items;          // of one part: n_blocks, or half as many
  int num_parts;      // of a batch element
  int num_items;      // of all parts of the launch
  int* counter;       // of items handed out; null: there are as many blocks as items
  int num_blocks;     // the grid
  int section_parts;  // of one section but the last; 1: a part after the other
  bool in_turns;      // tiles add dq in turns
  int part0 = 0;      // the first part of the launch

  // `parts`: how many of those of all batch elements.
  BackwardSchedule(const BackwardParams& params, int64_t parts, int block_n, int multiprocessors,
                   bool in_turns)
      : n_blocks(static_cast<int>(ceil_div(params.seqlen_kv, block_n))),
        num_parts(static_cast<int>(params.num_head_parts)),
        in_turns(in_turns) {
    const int64_t pairs = (n_blocks + 1) / 2;
    if (in_turns) {
      items = n_blocks;
      num_items = static_cast<int>(n_blocks * parts);
      counter = params.tile_counter;
      num_blocks = std::min(num_items, multiprocessors);
      section_parts = 1;
      return;
    }
    // A pair is long: its last round must not leave many multiprocessors idle. And the longer and the more
    // tiles are, the less it matters that rows load while the one before ends; but a tile is as many times
    // longer as a part has query heads.
    const bool has_many =
        n_blocks >= 64 && n_blocks * parts >= 6 * multiprocessors * (params.num_heads / num_parts);
    const int64_t rounds = ceil_div(pairs * parts, multiprocessors);
    const bool by_pairs =
        is_triangle(params) && !has_many && pairs * parts * 100 >= rounds * multiprocessors * 85;
    items = by_pairs ? static_cast<int>(pairs) : n_blocks;
    num_items = static_cast<int>(items * parts);
    counter = (by_pairs || is_full(params)) && num_items > multiprocessors ? params.tile_counter : nullptr;
    num_blocks = counter ? multiprocessors : num_items;
    // Few tiles must end together before anything else.
    constexpr int64_t kSectionBytes = 18 << 20;  // of 50 MB of L2: 34 MB took 2 % longer with grouped heads
    // Of a query head: the tiles of a part go through its query heads in step.
    const int64_t head_bytes = params.seqlen_q * (6 * params.head_dim + 2 * params.head_dim_v);
    const int64_t fitting = has_many ? kSectionBytes / std::max<int64_t>(head_bytes, 1) : parts;
    section_parts = static_cast<int>(is_triangle(params) && !by_pairs ? std::max<int64_t>(fitting, 1) : 1);
  }
};

struct BackwardArguments {
  CUtensorMap q_map, dout_map;  // [B, T, N, H], [B, T, N, Hv] in boxes of kBlockM rows
  CUtensorMap k_map, v_map;     // [B, S, K, H], [B, S, K, Hv] in boxes of kBlockN rows
  CUtensorMap dk_map, dv_map;   // [B, S, K, H], [B, S, K, Hv] in boxes of 16 rows: a warp's
  CUtensorMap ds_map;           // [B N, T, S] in boxes of kBlockM rows and 64 keys
  BackwardParams params;
  BackwardSchedule schedule;
  Fragments dq_accum, dk_parts, dv_parts;
  // How many blocks of keys have added to each kDeltaRows rows of dq [B, N, ceil(T / kDeltaRows)], if they
  // add in turns. It lies in dq, which is written last and has 16 bytes a row or more.
  int32_t* turns;
  LogitScale logit;
  PairOptions pairs;
  int part_heads;  // query heads of a part
  bool keeps_ds;   // does ds leave for the gradient of a bias?
  bool writes_dq;  // is there nothing to add to?
  // Does ds leave for shared_dq.cuh? And the head, of all batch elements', whose ds comes first there.
  bool shares_ds = false;
  int first_shared_head = 0;
};

// A block of keys of one key head, and the queries of a part of its query heads that see it.
template <class Config>
struct BackwardTileWork {
  int n_start, part, batch;
  Mask mask;
  int m_begin, m_blocks;  // of each query head, if no list says which
  int all_blocks;         // of all heads of the part

  __device__ __forceinline__ BackwardTileWork(const BackwardParams& params, int n_start, int part, int batch)
      : n_start(n_start), part(part), batch(batch), mask(params, batch) {
    const int num_parts = static_cast<int>(params.num_head_parts);
    const QueryBlocks seen_by = mask.query_blocks<Config::kBlockM>(n_start, Config::kBlockN);
    m_begin = seen_by.start, m_blocks = seen_by.count;
    const int part_heads = static_cast<int>(params.num_heads) / num_parts;
    all_blocks = m_blocks * part_heads;
    if constexpr (Config::Queries::kMayBeListed) {
      all_blocks = 0;
#pragma unroll 1
      for (int i = 0; i < part_heads; ++i) all_blocks += queries(params, part * part_heads + i).count;
    }
    for (int* value :
         {&mask.lowest, &mask.highest, &mask.q_length, &mask.kv_length, &m_begin, &m_blocks, &all_blocks}) {
      *value = uniform(*value);
    }
  }

  // Computed where it is needed: there is no register for it.
  __device__ __forceinline__ int kv_head(const BackwardParams& params) const {
    return part / (static_cast<int>(params.num_head_parts) / static_cast<int>(params.num_kv_heads));
  }

  // The blocks of queries of one head.
  __device__ __forceinline__ typename Config::Queries queries(const BackwardParams& params, int head) const {
    const int first = m_begin / Config::kBlockM;
    return {params, batch, head, n_start, first, first + m_blocks};
  }
};

// ds on its way from the kernel for dk and dv to shared_dq.cuh, [heads, tiles of keys, tiles of queries] in
// tiles of 64 x 64 and squares of 16 x 16, keys first. A square is four matrices of 8 keys and 8 queries, one
// for each register of an operand: a warp stores 128 bytes in a row, and the other kernel's products take a
// tile as it is.
struct SharedDs {
  static constexpr int kTile = 64, kTileElements = kTile * kTile;
  static constexpr int kSquareElements = 16 * 16, kMatrixElements = 8 * 8;
  static_assert(kSharedDsUnit % kTile == 0);

  uint16_t* data;
  int key_tiles, query_tiles;  // of a head

  __device__ __forceinline__ explicit SharedDs(const BackwardParams& params)
      : data(static_cast<uint16_t*>(params.shared_ds)),
        key_tiles(num_tiles(params.seqlen_kv)),
        query_tiles(num_tiles(params.seqlen_q)) {}

  // The tile of the key and the query. `head`: of those that have ds here.
  __device__ __forceinline__ uint16_t* tile(int head, int key, int query) const {
    const int64_t row = int64_t{head} * key_tiles + key / kTile;
    return data + (row * query_tiles + query / kTile) * kTileElements;
  }
  // From a tile's begin to the square with the key and the query.
  __device__ __forceinline__ static int square(int key, int query) {
    return (key % kTile / 16 * (kTile / 16) + query % kTile / 16) * kSquareElements;
  }

  // Stores an operand of a warp's 16 keys, steps of 16 queries, if `holds`. Without a branch: products may be
  // under way.
  template <int kSteps>
  __device__ __forceinline__ void store(const uint32_t (&ds)[kSteps][4], bool holds, int head, int key,
                                        int query) const {
    uint32_t lane = lane_id();
    ptx::make_opaque(lane);  // rather computed again for each block than kept in registers
    uint16_t* const row = tile(head, key, 0) + 2 * lane;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = query + 16 * step;
      uint16_t* const to = row + at / kTile * kTileElements + square(key, at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::store_global_if(holds && at < query_tiles * kTile, to + i * kMatrixElements, ds[step][i]);
      }
    }
  }

  // Zeros for so many keys and the queries [begin, end), whole squares. By a warp.
  __device__ __forceinline__ void clear(int head, int key0, int keys, int begin, int end) const {
#pragma unroll 1
    for (int key = key0; key < key0 + keys; key += 16) {
#pragma unroll 1
      for (int query = begin; query < min(end, query_tiles * kTile); query += 16) {
        static_assert(kSquareElements == 32 * 8);
        reinterpret_cast<uint4*>(tile(head, key, query) + square(key, query))[lane_id()] = {};
      }
    }
  }

 private:
  __device__ static int num_tiles(int64_t length) {
    return static_cast<int>((length + kSharedDsUnit - 1) / kSharedDsUnit) * (kSharedDsUnit / kTile);
  }
};

template <class Config, bool kDraws, class F>
__device__ __forceinline__ void for_each_tile(const BackwardSchedule& schedule, const BackwardParams& params,
                                              const ItemRing& ring, F f) {
  for_each_item<kDraws>(ring, schedule.counter, first_item<Config>(), schedule.num_items, [&](int index) {
    const int section_items = schedule.section_parts * schedule.items;
    const int section = static_cast<unsigned>(index) / section_items,
              in_section = index - section * section_items;
    const int first_part = section * schedule.section_parts;
    const int parts = min(schedule.section_parts, schedule.num_items / schedule.items - first_part);
    const int place = static_cast<unsigned>(in_section) / parts;
    const int first = schedule.in_turns ? schedule.n_blocks - 1 - place : place;
    const int last = schedule.n_blocks - 1 - first;
    const int part0 = Config::kMayShareDs ? schedule.part0 : 0;  // other kernels have no register for it
    const int part_of_all = part0 + first_part + in_section - place * parts;
    const int batch = static_cast<unsigned>(part_of_all) / schedule.num_parts;
    const int part = part_of_all - batch * schedule.num_parts;
    const bool is_pair = schedule.items < schedule.n_blocks && first < last;
#pragma unroll 1
    for (int i = 0; i < (is_pair ? 2 : 1); ++i) {
      f(BackwardTileWork<Config>(params, (i == 0 ? first : last) * Config::kBlockN, part, batch));
    }
  });
}

}  // namespace jax_flash::cuda::sm90
