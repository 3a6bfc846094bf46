// What the kernels for few queries (sm80/decode.cuh, sm90/decode.cuh) share: into which units a call is
// divided, and which of them a thread block takes.
//
// A tile is the rows of a key head, or some of them, with all keys of a sequence. Its blocks of keys, from
// the first to the last that any row sees, are split evenly into parts, so that a cache that is not full yet
// occupies as many multiprocessors as a full one. What a thread block takes depends on the batch: a part; in
// a large batch a group of neighboring parts, which it merges; or a whole tile. Whole tiles come in full
// rounds of thread blocks, and only if sequences are about equally long: the portable kernel compares their
// lengths, Hopper's asks for a call in which every query sees all keys. The tiles beyond are taken in groups
// or parts. What a block leaves in workspace is merged by a second kernel (key_parts.cuh).
//
// How many parts there are, and in which order they are merged, depends on the shapes of a sequence, and not
// on the batch or the number of key heads: so a sequence has the same bits alone and in a batch, on one
// device and with heads on several.
#pragma once

#include <algorithm>
#include <cstdint>

#include "accumulator.cuh"
#include "key_parts.cuh"
#include "launch.h"
#include "mask.cuh"
#include "params.h"

namespace jax_flash::cuda {

using decode_params = ForwardParams;

inline constexpr int64_t kMinPartKeys = 256;   // fewer would take less time than starting
inline constexpr int64_t kMostCompared = 256;  // sequences: each block looks at the lengths of all

// Of a key head.
inline int64_t number_of_rows(const ForwardParams& params) {
  return params.num_heads / params.num_kv_heads * params.seqlen_q;
}

// The parts of the longest sequence, in blocks of keys, and how many neighbors form a group. That depends on
// the shape of a sequence alone.
struct PartGroups {
  int64_t num_blocks, part_blocks;
  int64_t group;  // parts that a thread block may merge before it leaves them to the second kernel
  int64_t run;    // parts that are merged from left to right, before these are; at least a group

  // `group_keys`: of a group. 0: parts form none.
  template <int kHeadDim>
  static PartGroups of(const ForwardParams& params, int block_n, int64_t group_keys) {
    PartGroups groups;
    const int64_t num_parts = params.num_key_parts, span = key_span(params);
    // The first block may begin before the span.
    groups.num_blocks = std::min(ceil_div(params.seqlen_kv, block_n), ceil_div(span - 1, block_n) + 1);
    groups.part_blocks = std::max(kMinPartKeys / block_n, ceil_div(groups.num_blocks, num_parts));
    groups.group = 1;
    if (group_keys > 0 && num_parts > 1) {
      groups.group =
          std::clamp<int64_t>(group_keys / block_n / groups.part_blocks, 1, std::min(num_parts, kGroupParts));
      if (ceil_div(num_parts, groups.group) > CombineConfigOf<kHeadDim>::kTeams) groups.group = 1;
    }
    groups.run = groups.group > 1 ? groups.group : combine_run<kHeadDim>(num_parts);
    return groups;
  }
};

// Which thread blocks run: num_units for each tile, unit by unit, since those beyond a sequence's keys have
// nothing to do.
struct UnitPlan {
  int group_parts;  // neighboring parts that are merged first
  int unit_parts;   // parts of a unit: a group, or one
  int num_units;    // of a tile; 1: a block takes a tile
  int whole_tiles;  // so many tiles, the first ones, are taken whole if sequences are about equally long
};

// How a kernel's blocks run.
struct UnitRules {
  int64_t tiles;
  int64_t side_by_side;   // blocks, on all multiprocessors
  bool compares_lengths;  // may a block compare lengths, and take a whole tile if they are about equal?
  bool takes_full;        // does it take whole tiles if the host knows that each query sees all keys?
};

// Of equally long tiles, the first that are taken whole: those of full rounds of two for each multiprocessor,
// and of a last round that is at least 0.8 full. In an emptier one multiprocessors would idle for the time of
// a tile; in units, its tiles end together.
inline int64_t tiles_of_rounds(int64_t tiles, int64_t multiprocessors) {
  const int64_t round = 2 * multiprocessors, last = tiles % round;
  return 5 * last < 4 * round ? tiles - last : tiles;
}

// Do whole tiles fill their rounds: a last one of two for each multiprocessor to 0.8, or of one to 0.9?
inline bool fill_rounds(int64_t tiles, int64_t multiprocessors) {
  const int64_t last = tiles % (2 * multiprocessors);
  return tiles_of_rounds(tiles, multiprocessors) == tiles ||
         (10 * last >= 9 * multiprocessors && last <= multiprocessors);
}

// With three groups for every four multiprocessors, or more, longer blocks are faster than more of them,
// unless there are so few more than run side by side that parts save an eighth of the rounds' time. So are
// whole tiles that are equally long, if there is a round of them: memory is read in fewer, longer streams.
inline UnitPlan plan_units(const ForwardParams& params, const LaunchContext& context,
                           const PartGroups& part_groups, const UnitRules& rules) {
  const int64_t num_parts = params.num_key_parts, group_parts = part_groups.group, tiles = rules.tiles;
  const int64_t groups = ceil_div(num_parts, group_parts) * tiles;
  const bool is_forced = context.forced_tile != ForcedTile::kNone,
             is_long = context.forced_tile == ForcedTile::kLong;
  const bool would_idle = groups > rules.side_by_side && tiles < 2 * context.multiprocessors &&
                          8 * ceil_div(num_parts * tiles, rules.side_by_side) <=
                              7 * ceil_div(groups, rules.side_by_side) * group_parts;
  const bool are_many = is_forced ? is_long : 4 * groups >= 3 * context.multiprocessors && !would_idle;
  const bool takes_groups = group_parts > 1 && are_many;
  const int64_t unit_parts = takes_groups ? group_parts : 1, num_units = ceil_div(num_parts, unit_parts);
  UnitPlan plan{static_cast<int>(part_groups.run), static_cast<int>(unit_parts), static_cast<int>(num_units),
                /*whole_tiles=*/0};
  if (rules.takes_full &&
      (is_forced ? is_long : is_full(params) && fill_rounds(tiles, context.multiprocessors))) {
    plan.num_units = 1;
  } else if (rules.compares_lengths && num_units > 1 && params.batch <= kMostCompared) {
    // Less than a round is taken in units: equally long sequences would gain, but others would lose as much,
    // since fewer blocks fit beside each other.
    const bool has_round = tiles >= 2 * context.multiprocessors;
    const int64_t of_rounds = has_round ? tiles_of_rounds(tiles, context.multiprocessors) : 0;
    plan.whole_tiles = static_cast<int>(!is_forced ? of_rounds : is_long ? tiles : 0);
  }
  return plan;
}

// Merges what the blocks have left.
template <class Arithmetic, int kHeadDim>
Status combine_units(const ForwardParams& params, const LaunchContext& context, const UnitPlan& plan) {
  ForwardParams of_units = params;
  of_units.num_key_parts = plan.num_units;
  return launch_combine<Arithmetic, kHeadDim>(of_units, context,
                                              plan.unit_parts > 1 ? plan.num_units : plan.group_parts,
                                              /*may_be_merged=*/plan.whole_tiles > 0);
}

// Do the rows of no sequence see more than a tenth more blocks of keys than the mean? By a warp: a lane looks
// at a sequence.
template <int kBlockN>
__device__ __forceinline__ bool are_equally_long(const AttentionParams& params) {
  int longest = 0, all = 0;
#pragma unroll 1
  for (int batch = lane_id(); batch < static_cast<int>(params.batch); batch += 32) {
    const KeyBlocks seen = Mask(params, batch).key_blocks<kBlockN>(0, static_cast<int>(params.seqlen_q));
    longest = max(longest, seen.end - seen.begin);
    all += seen.end - seen.begin;
  }
  longest = __reduce_max_sync(0xffffffff, longest), all = __reduce_add_sync(0xffffffff, all);
  return 10 * int64_t{longest} * params.batch <= 11 * int64_t{all};
}

// What a thread block takes of a key head of a sequence: blocks of kBlockN keys.
template <int kBlockN>
struct KeyUnit {
  int kv_head, batch, index;
  Mask queries;
  bool takes_tile;
  bool is_left_out;  // another block takes the whole tile
  int part_blocks;   // of each part but the last
  int first_block, num_blocks;

  // `block`: which of the thread blocks for the same rows of a key head.
  __device__ __forceinline__ KeyUnit(const ForwardParams& params, const UnitPlan& plan, unsigned block,
                                     bool compares_lengths)
      : kv_head(block % static_cast<unsigned>(params.num_kv_heads)),
        batch(block / static_cast<unsigned>(params.num_kv_heads) % static_cast<unsigned>(params.batch)),
        index(block / static_cast<unsigned>(params.num_kv_heads * params.batch)),
        queries(params, batch),
        takes_tile(plan.num_units == 1),
        is_left_out(false) {
    const int tile = batch * static_cast<int>(params.num_kv_heads) + kv_head;
    if (compares_lengths && tile < plan.whole_tiles && are_equally_long<kBlockN>(params)) {
      takes_tile = true;
      is_left_out = index > 0;
    }
    const KeyBlocks seen = queries.template key_blocks<kBlockN>(0, static_cast<int>(params.seqlen_q));
    const int num_parts = static_cast<int>(params.num_key_parts);
    part_blocks =
        max(static_cast<int>(kMinPartKeys) / kBlockN, (seen.end - seen.begin + num_parts - 1) / num_parts);
    first_block = seen.begin + index * plan.unit_parts * part_blocks;
    const int left = seen.end - first_block;
    num_blocks = max(0, takes_tile ? left : min(left, plan.unit_parts * part_blocks));
  }
};

}  // namespace jax_flash::cuda
