// Lists of visible blocks, for calls with a mask or segments: which blocks of keys a tile of queries goes
// through, and which blocks of queries a tile of keys does. They are made before the launch, so that the
// attention kernels neither load nor multiply other blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "mask.cuh"
#include "params.h"

namespace jax_flash::cuda {

// Of a block of queries and keys: do mask and segments hide no pair of it, some, or all?
enum Visibility : uint8_t { kHidden, kPartly, kWhole };

// The lists of one head: for each tile of `tile` queries its blocks of `unit` keys, or the other way round.
struct ListShape {
  bool of_queries;  // are the tiles of queries?
  int tile, unit;   // multiples of kVisibilityBlock

  __host__ __device__ int64_t lists(const AttentionParams& params) const {  // of one head
    return ceil_div(of_queries ? params.seqlen_q : params.seqlen_kv, tile);
  }
  __host__ __device__ int64_t length(const AttentionParams& params) const {
    return 1 + ceil_div(of_queries ? params.seqlen_kv : params.seqlen_q, unit);
  }
};

// An entry of a list: a visible block, with flags for the block and for each part of 64 rows of the tile, of
// which there are at most 4. Blocks that causality, window or lengths hide are not visible; "whole" only
// means that mask and segments hide no pair.
struct ListEntry {
  static constexpr int kMaxParts = 4, kPartBits = 1 + 2 * kMaxParts;  // the rest is the block's number
  static constexpr int kMaxUnitBlocks = 2;                            // of 64 rows, in a listed block
  uint32_t bits;

  __host__ __device__ static constexpr uint32_t make(int unit, bool is_whole) {
    return static_cast<uint32_t>(unit) << kPartBits | is_whole;
  }
  __host__ __device__ static constexpr uint32_t part(int index, bool is_visible, bool is_whole) {
    return (is_visible | is_whole << 1) << (1 + 2 * index);
  }

  // A block in which mask and segments hide no pair.
  __host__ __device__ static constexpr ListEntry whole(int unit) {
    return {make(unit, true) | ((1u << kPartBits) - 1)};
  }

  __host__ __device__ constexpr int unit() const { return static_cast<int>(bits >> kPartBits); }
  __host__ __device__ constexpr bool is_whole() const { return bits & 1; }
  __host__ __device__ constexpr bool is_visible(int part) const { return bits >> (1 + 2 * part) & 1; }
  __host__ __device__ constexpr bool is_whole(int part) const { return bits >> (2 + 2 * part) & 1; }
};

// The number of the last block of the longest array fits, and does not overlap the flags.
inline constexpr int kLastUnit = (kMaxSize - 1) / kVisibilityBlock;
static_assert(ListEntry::whole(kLastUnit).unit() == kLastUnit);
static_assert(ListEntry{ListEntry::make(kLastUnit, false) | ListEntry::part(3, true, false)}.unit() ==
              kLastUnit);
static_assert(ListEntry{ListEntry::make(kLastUnit, false) | ListEntry::part(3, true, false)}.is_visible(3));
static_assert(!ListEntry{ListEntry::make(kLastUnit, false)}.is_whole());

// Fills params.visible, except for the lists. Like launch_lists, does nothing without a mask and segments.
Status launch_visibility(const AttentionParams& params, const LaunchContext& context);

// After launch_visibility: fills the lists, for a kernel that follows on the stream.
Status launch_lists(const AttentionParams& params, const ListShape& shape, const LaunchContext& context);

// The blocks, of kBlock rows of the other side, that a tile of kTile rows goes through, in ascending order.
// kMayBeListed is false in kernels that handle neither mask nor segments.
template <bool kMayBeListed_, bool kOfQueries, int kTile, int kBlock>
struct BlockList {
  static constexpr bool kMayBeListed = kMayBeListed_;
  static constexpr int kListTile = std::max<int>(kTile, kVisibilityBlock);
  static constexpr int kUnit = std::max<int>(kBlock, kVisibilityBlock), kBlocksInUnit = kUnit / kBlock;
  static_assert(!kMayBeListed ||
                (kListTile % kVisibilityBlock == 0 && kListTile / kVisibilityBlock <= ListEntry::kMaxParts &&
                 kUnit % kVisibilityBlock == 0 && kUnit % kBlock == 0 &&
                 kUnit / kVisibilityBlock <= ListEntry::kMaxUnitBlocks));
  __host__ __device__ static constexpr ListShape shape() { return {kOfQueries, kListTile, kUnit}; }

  const uint32_t* entries;  // null: all blocks from `first` on
  int first, count;

  // For the tile that begins at `start`. Without lists: blocks [begin, end).
  __device__ __forceinline__ BlockList(const AttentionParams& params, int batch, int head, int start,
                                       int begin, int end)
      : entries(nullptr), first(begin), count(max(end - begin, 0)) {
    const VisibilityWorkspace& visible = params.visible;
    if (!kMayBeListed || !visible.lists) return;
    const int64_t batch_and_head = batch * visible.num_heads + (visible.num_heads > 1 ? head : 0);
    const uint32_t* list =
        visible.lists + (batch_and_head * shape().lists(params) + start / kListTile) * shape().length(params);
    first = 0;
    count = static_cast<int>(__ldg(list)) * kBlocksInUnit;
    entries = list + 1;
  }

  __device__ __forceinline__ bool is_listed() const { return kMayBeListed && entries; }

  __device__ __forceinline__ ListEntry entry(int i) const { return {__ldg(entries + i / kBlocksInUnit)}; }

  // The first row of block i.
  __device__ __forceinline__ int start(int i) const {
    if (!is_listed()) return (first + i) * kBlock;
    return entry(i).unit() * kUnit + i % kBlocksInUnit * kBlock;
  }
  // Do mask and segments leave every pair of the tile and block i visible?
  __device__ __forceinline__ bool is_whole(int i) const { return !is_listed() || entry(i).is_whole(); }
};

}  // namespace jax_flash::cuda
