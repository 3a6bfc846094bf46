// Forward attention for few queries over many keys, as in decoding, with mma.sync and cp.async, for compute
// capability 8.0 and up. It is bound by the memory that keys and values come from.
//
// The rows of a tile are those of all query heads of a key head, for every query (group_rows.cuh), or kRows
// of them, so a tile reads keys once for all of them. The blocks of keys of a sequence, from the first to the
// last that any row sees, are split evenly into parts, so that a cache that is not full yet occupies as many
// multiprocessors as a full one. The warps of a thread block share a ring of buffers with keys and values in
// the order k, v, k, v, .... Where there are several warps along the keys, their sums are merged at the end
// of each part, through the buffer that was read last, while keys of the next part are on their way.
//
// What a thread block takes depends on the batch: a part of a tile's keys; in a large one a group of
// neighboring parts, which it merges; or a whole tile. Whole tiles come in full rounds of thread blocks, and
// only if sequences are about equally long; the tiles beyond are taken in groups or parts. What a block
// leaves in workspace is merged by a second kernel (key_parts.cuh).
//
// How many parts there are, and in which order they are merged, depends on the shapes of a sequence, and not
// on the batch or the number of key heads: so a sequence has the same bits alone and in a batch, on one
// device and with heads on several.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arithmetic.h"
#include "group_rows.cuh"
#include "key_parts.cuh"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "ptx/grid.h"
#include "ptx/memory.h"
#include "sm80/product.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using decode_params = ForwardParams;
}

namespace jax_flash::cuda::sm80 {

struct DecodeArguments {
  ForwardParams params;
  LogitScale logit;
  PairOptions pairs;
  HeadRows q, k, v;  // [B * T, N, H], [B * S, K, H], [B * S, K, Hv]; k and v may be pages
  int row_tiles;     // of a key head
  int group_parts;   // neighboring parts that are merged first
  int unit_parts;    // parts of a unit, which a block takes: a group, or one
  int num_units;     // of a tile; 1: a block takes a tile
  int whole_tiles;   // so many tiles, the first ones, are taken whole if sequences are about equally long
};

// ---- Merging rows in shared memory ----

// Upper (h = 0) or lower rows of a warp's accumulators in shared memory: of each lane 8 bytes for its row's
// maximum and sum, and as much for each tile.
template <int kTiles>
struct SharedRows {
  static constexpr int kLanes = 32 * 8, kBytes = (1 + kTiles) * kLanes;
  uint32_t base;

  __device__ __forceinline__ uint32_t pair(int i) const { return base + i * kLanes + 8 * lane_id(); }

  __device__ __forceinline__ void store(const RowPart& end, const float (&acc)[1][kTiles][4], int h) const {
    const float values[2] = {end.max_log2, end.sum};
    ptx::store_shared_x2(pair(0), values);
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      const float x[2] = {acc[0][nt][2 * h], acc[0][nt][2 * h + 1]};
      ptx::store_shared_x2(pair(1 + nt), x);
    }
  }

  __device__ __forceinline__ RowPart end() const {
    float values[2];
    ptx::load_shared_x2(values, pair(0));
    return {values[0], values[1]};
  }

  // Merges these rows, on the left, with the warp's.
  __device__ __forceinline__ void merge_into(RowPart& end, float (&acc)[1][kTiles][4], int h) const {
    const PartMerge merge(this->end(), end);
    end = merge.total;
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      float x[2];
      ptx::load_shared_x2(x, pair(1 + nt));
#pragma unroll
      for (int c = 0; c < 2; ++c) acc[0][nt][2 * h + c] = merge(x[c], acc[0][nt][2 * h + c]);
    }
  }
};

// ---- A part of the keys, or a group of parts ----

// Do three thread blocks fit into the 228 KB of a multiprocessor?
constexpr bool three_fit(int shared_bytes) { return 3 * (shared_bytes + kSystemBytes) <= 228 * 1024; }

template <class Arithmetic_, int kHeadDim_, bool kManyRows_, PairPolicy kPolicy_>
struct DecodeConfig {
  using Arithmetic = Arithmetic_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kManyRows = kManyRows_;
  static constexpr PairPolicy kPolicy = kPolicy_;
  using Element = typename Arithmetic::Element;
  static constexpr DecodeTile kTile = decode_tile(sizeof(Element), kHeadDim, kManyRows);
  static constexpr int kKeyWarps = kTile.key_warps, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kRows = 16 * kTile.row_warps, kWarpKeys = kBlockN / kKeyWarps;
  static constexpr int kThreads = 32 * kTile.row_warps * kKeyWarps;
  static constexpr int kMaxPartBlocks = 32;             // a bit each in a word
  static constexpr int kMinPartBlocks = 256 / kBlockN;  // fewer keys would take less time than starting
  using QTile = SharedTile<Arithmetic, kRows, kHeadDim, /*kRounded=*/true>;
  using KvTile = SharedTile<Arithmetic, kBlockN, kHeadDim>;
  using WarpKvTile = SharedTile<Arithmetic, kWarpKeys, kHeadDim>;
  static constexpr int kSharedBytes = QTile::kBytes + kStages * KvTile::kBytes;

  // At the end of a part, the warps along the keys leave upper, then lower rows in one buffer.
  using RowHalf = SharedRows<kHeadDim / 8>;
  static constexpr int kHalfBytes = RowHalf::kBytes;
  static_assert(kTile.row_warps * (kKeyWarps - 1) * kHalfBytes <= KvTile::kBytes);

  // Between parts of a group, the first warp keeps what it has merged behind the buffers: upper rows alone,
  // so that three thread blocks fit on a multiprocessor. Between groups it keeps those before behind that.
  static constexpr bool kMayHaveGroups = !kManyRows;
  static constexpr int kKeptBytes = kSharedBytes + 2 * kHalfBytes;
  // Only where no more than two such blocks fit, as tiles_of_rounds assumes. Where three do, at head dim 64,
  // 64 sequences of 8,192 keys took 7 % longer: their 512 tiles are 1.3 rounds of three.
  static constexpr bool kMayTakeTiles = kMayHaveGroups && !kPolicy.may_have_mask() && !three_fit(kKeptBytes);
  static constexpr int kGroupRows = 8, kGroupBlocks = 1024 / kBlockN;
  static_assert(kGroupBlocks <= kMaxPartBlocks);
  static constexpr int kBlocksPerSm = kMayHaveGroups && three_fit(kSharedBytes + kHalfBytes) ? 3 : 2;
};

// The blocks of keys that a thread block still has to take, numbered from its first. Where mask and segments
// may hide some, a bit for each: there are 32 at most.
template <bool kMayHaveMask>
struct BlockSet {
  int next, end;

  __device__ __forceinline__ explicit BlockSet(int count) : next(0), end(count) {}
  __device__ __forceinline__ bool is_empty() const { return next >= end; }
  __device__ __forceinline__ int first() const { return next; }
  __device__ __forceinline__ int take() { return next++; }
};
template <>
struct BlockSet<true> {
  uint32_t bits;

  __device__ __forceinline__ explicit BlockSet(int count) : bits(count == 32 ? ~0u : (1u << count) - 1) {}
  __device__ __forceinline__ bool is_empty() const { return bits == 0; }
  __device__ __forceinline__ int first() const { return __ffs(bits) - 1; }  // if there is one
  __device__ __forceinline__ int take() {
    const int block = first();
    bits &= bits - 1;
    return block;
  }
};

// Of `count` blocks of kBlockN keys from the block `first` on, those in which mask and segments leave any
// pair of the rows visible stay in `visible`, and those in which they leave all in `whole`.
template <int kBlockN>
__device__ __forceinline__ void find_blocks(const AttentionParams& params, int batch, int first_head,
                                            const GroupRows& rows, int first, int count, uint32_t& visible,
                                            uint32_t& whole) {
  const VisibilityWorkspace& workspace = params.visible;
  bool is_visible = false, is_whole = true;
  if (lane_id() < count) {
    // All queries are in one block of queries.
    const int n_blocks = static_cast<int>(ceil_div(params.seqlen_kv, kVisibilityBlock));
    const bool has_heads = workspace.num_heads > 1;
    const uint8_t* block = workspace.visibility +
                           (batch * workspace.num_heads + (has_heads ? first_head : 0)) * n_blocks +
                           (first + lane_id()) * kBlockN / static_cast<int>(kVisibilityBlock);
    for (int head = 0; head < (has_heads ? rows.group : 1); ++head) {
      const uint8_t visibility = __ldg(block + int64_t{head} * n_blocks);
      is_visible |= visibility != kHidden;
      is_whole &= visibility == kWhole;
    }
  }
  visible = __ballot_sync(0xffffffff, is_visible), whole = __ballot_sync(0xffffffff, is_whole);
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

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeArguments arguments) {
  using Arithmetic = typename Config::Arithmetic;
  using Products = sm80::Products<Arithmetic>;
  using QTile = typename Config::QTile;
  using KvTile = typename Config::KvTile;
  using WarpKvTile = typename Config::WarpKvTile;
  using RowHalf = typename Config::RowHalf;
  constexpr bool kMayHaveMask = Config::kPolicy.may_have_mask(), kMayHaveOthers = Config::kPolicy.others;
  constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN, kStages = Config::kStages;
  constexpr int kThreads = Config::kThreads, kKeyWarps = Config::kKeyWarps, kWarpKeys = Config::kWarpKeys;
  constexpr int kNTiles = kWarpKeys / 8, kOutTiles = kHeadDim / 8;
  const ForwardParams& params = arguments.params;

  // ---- Unit: the first ones come first, for those beyond a sequence's keys have nothing to do ----
  // Tiles of the same keys run side by side, so that all but one can find them in L2.
  const unsigned row_tiles = Config::kManyRows ? arguments.row_tiles : 1, index = blockIdx.x / row_tiles;
  const int row_tile = blockIdx.x % row_tiles;
  const int num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int num_tiles = num_kv_heads * static_cast<int>(params.batch), tile = index % num_tiles;
  const int kv_head = tile % num_kv_heads, batch = tile / num_kv_heads;
  const int first_unit = index / num_tiles;
  bool takes_tile = arguments.num_units == 1;
  if (Config::kMayTakeTiles && tile < arguments.whole_tiles && are_equally_long<kBlockN>(params)) {
    if (first_unit > 0) return;  // unit 0 takes them all, and the second kernel skips these rows
    takes_tile = true;
  }
  const GroupRows rows(params);
  const int first_head = kv_head * rows.group, first_tile_row = row_tile * Config::kRows;

  const Mask queries(params, batch);
  const KeyBlocks seen = queries.key_blocks<kBlockN>(0, static_cast<int>(params.seqlen_q));
  const int num_parts = static_cast<int>(params.num_key_parts);
  const int part_blocks =
      max(Config::kMinPartBlocks, (seen.end - seen.begin + num_parts - 1) / num_parts);  // but for the last
  const int unit_parts = Config::kMayHaveGroups ? arguments.unit_parts : 1;
  const int first_block = seen.begin + first_unit * unit_parts * part_blocks;
  const int num_blocks =
      max(0, takes_tile ? seen.end - first_block : min(seen.end - first_block, unit_parts * part_blocks));
  BlockSet<kMayHaveMask> blocks(num_blocks);
  [[maybe_unused]] uint32_t whole_blocks = ~0u;
  if constexpr (kMayHaveMask) {
    if (params.hides_pairs()) {
      find_blocks<kBlockN>(params, batch, first_head, rows, first_block, num_blocks, blocks.bits,
                           whole_blocks);
    }
  }

  extern __shared__ __align__(128) uint8_t shared[];
  const QTile sQ{ptx::shared_address(shared)};  // [rows, kHeadDim]
  auto sKv = [&](int stage) {                   // [kBlockN, kHeadDim], kStages times
    return KvTile{sQ.base + QTile::kBytes + stage * KvTile::kBytes};
  };

  // ---- Start to load: items 2i and 2i + 1 of the ring are keys and values of the i-th visible block ----
  using KvLoader = TileLoader<kThreads, KvTile>;
  using QLoader = TileLoader<kThreads, QTile>;
  const SequencePages pages(params, batch);
  const int64_t kv_row0 = batch * params.seqlen_kv;
  auto row_of_block = [&](int block) { return (first_block + block) * kBlockN; };
  struct Source {
    KvLoader loader;
    BlockSet<kMayHaveMask> blocks;  // to be loaded
  };
  const bool sees_keys = !blocks.is_empty();
  const int first_row = sees_keys ? row_of_block(blocks.first()) : 0;
  Source k_source{KvLoader(arguments.k, kv_row0 + first_row, kv_head), blocks};
  Source v_source{KvLoader(arguments.v, kv_row0 + first_row, kv_head), blocks};
  // In pages, the next block's rows are found a block ahead, so that the reads of page_indices are not
  // waited for, and settled before the wait for the buffer that its keys go to. Where pages hold whole
  // blocks, a block has the row of its first key alone, and loads like keys in order.
  const bool has_page_of_block = pages && pages.size() % kBlockN == 0;
  typename KvLoader::PageRows page_rows;
  auto find_rows = [&](const BlockSet<kMayHaveMask>& blocks) {
    if (!pages || blocks.is_empty()) return;
    const int row = row_of_block(blocks.first());
    if (has_page_of_block) {
      page_rows.values[0] = pages.entry(pages.place_of(row).index);
    } else {
      KvLoader::find_rows(page_rows, pages, row, queries.kv_length);
    }
  };
  auto settle_rows = [&](const BlockSet<kMayHaveMask>& blocks) {
    if (!pages || blocks.is_empty()) return;
    const int row = row_of_block(blocks.first());
    if (has_page_of_block) {
      page_rows.values[0] = pages.page_of(page_rows.values[0]) * pages.size() + pages.place_of(row).row;
    } else {
      KvLoader::settle_rows(page_rows, pages, row, queries.kv_length);
    }
  };
  find_rows(blocks);
  auto load_item = [&](Source& source, int stage) {
    if (!source.blocks.is_empty()) {
      const int block = source.blocks.take(), row = row_of_block(block);
      if (pages && !has_page_of_block) {
        source.loader.load_pages(sKv(stage), page_rows, pages, kv_head, row, queries.kv_length);
      } else {
        if (pages) source.loader.move_to(page_rows.values[0], kv_head);
        source.loader.load(sKv(stage), row, queries.kv_length);
        if (!pages && !source.blocks.is_empty()) {
          source.loader.move_rows((source.blocks.first() - block) * kBlockN);
        }
      }
      if (&source == &v_source) find_rows(v_source.blocks);
    }
    ptx::copy_async_commit();  // empty groups count, too
  };
  // Waits until all threads see the oldest item and have released the buffer of the one before it.
  auto wait_item = [] {
    ptx::copy_async_wait<kStages - 2>();
    __syncthreads();
  };

  if (sees_keys) {
    QLoader::load_rows(arguments.q, sQ, [&](int tile_row) -> int64_t {
      const int row = first_tile_row + tile_row;
      if (row >= rows.count) return -1;
      const int64_t query = batch * params.seqlen_q + rows.query(row);
      return query * arguments.q.stride + int64_t{first_head + rows.head(row)} * arguments.q.head_dim;
    });
  }
  // Not unrolled: a decoding step is so short that loading the code of a kernel counts.
#pragma unroll 1
  for (int item = 0; item < kStages - 2; item += 2) {
    settle_rows(k_source.blocks);
    load_item(k_source, item);
    load_item(v_source, item + 1);
  }
  if constexpr (kStages % 2 == 0) {
    settle_rows(k_source.blocks);
    load_item(k_source, kStages - 2);
  }
  if (sees_keys) {
    ptx::copy_async_wait<kStages - 2>();
    QLoader::round(sQ);
  }

  const int row_warp = threadIdx.x / 32 / kKeyWarps, key_warp = threadIdx.x / 32 % kKeyWarps;
  const int warp_row = first_tile_row + 16 * row_warp, warp_key = key_warp * kWarpKeys;
  const GroupMask mask(queries, rows, warp_row, 16);
  const GroupPairs pairs(params, arguments.pairs, batch, kv_head, rows);
  const KMajorA<Products, QTile, 1> q(sQ, 16 * row_warp);
  // An item's buffer, and the next one that is free: that of the item before it.
  int stage = 0;
  auto move_stage = [&] { stage = stage + 1 == kStages ? 0 : stage + 1; };
  auto free_stage = [&] { return stage == 0 ? kStages - 1 : stage - 1; };
  auto warp_tile = [&] { return WarpKvTile{sKv(stage).base + warp_key * WarpKvTile::kRowBytes}; };
  Source& later_with_keys = kStages % 2 ? k_source : v_source;  // of item i + kStages - 1, for even i
  Source& later_with_values = kStages % 2 ? v_source : k_source;

  float out[1][kOutTiles][4];  // [16, kHeadDim], the sum over this warp's keys
  RowPart ends[2];
#pragma unroll 1
  for (int part = 0, part_end = 0; part == 0 || (Config::kMayHaveGroups && part_end < num_blocks); ++part) {
    part_end += part_blocks;
    const bool is_last = !Config::kMayHaveGroups || part_end >= num_blocks;
    clear(out);
    OnlineSoftmax<1> softmax;

#pragma unroll 1
    while (!blocks.is_empty() && blocks.first() < part_end) {
      const int block = blocks.take();
      const int n_start = row_of_block(block) + warp_key;
      const bool hidden = mask.hides(n_start, kWarpKeys);
      RegisterA<Products, 1, kNTiles> p;

      // ---- scores = q k^T ----
      if (kStages % 2) settle_rows(k_source.blocks);
      wait_item();
      load_item(later_with_keys, free_stage());
      if (!hidden) {
        float scores[1][kNTiles][4];  // [16, kWarpKeys]
        clear(scores);
        multiply_add<Products, kHeadDim / kStepK<Products>>(scores, q,
                                                            KMajorB<Products, WarpKvTile>(warp_tile(), 0));

        // ---- Mask, softmax ----
        if constexpr (kMayHaveOthers) {
          transform_scores(scores, pairs, arguments.logit, warp_row, n_start);
        } else {
          transform_scores(scores, arguments.logit);
        }
        if constexpr (kMayHaveMask) {
          if (!(whole_blocks >> block & 1)) {
            PairBits<kNTiles> visible[1];
            load_visible(visible, pairs, warp_row, n_start);
            fill_unset(scores, visible, -INFINITY);
          }
        }
        if (!mask.covers(n_start, kWarpKeys)) fill_hidden(scores, mask, warp_row, n_start, -INFINITY);
        softmax.update(scores, out, arguments.logit.scale_log2);
        p.set(scores);
      }
      move_stage();

      // ---- out += p v ----
      if (kStages % 2 == 0) settle_rows(k_source.blocks);
      wait_item();
      load_item(later_with_values, free_stage());
      if (!hidden) {
        multiply_add<Products, kWarpKeys / kStepK<Products>, /*kLongSum=*/true>(
            out, p, MnMajorB<Products, WarpKvTile>(warp_tile(), 0));
      }
      move_stage();
    }
    if (is_last && arguments.num_units > 1) ptx::let_next_grid_start();
#pragma unroll
    for (int h = 0; h < 2; ++h) ends[h] = {softmax.max_log2[0][h], row_sum(softmax.sum[0][h])};

    // ---- Merge the warps along the keys into the first of them ----
    if constexpr (kKeyWarps > 1) {
#pragma unroll
      for (int nt = 0; nt < kOutTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (ends[i / 2].sum == 0) out[0][nt][i] = 0;  // other rows may have left 0 * NaN
        }
      }
      auto rows_of_warp = [&](int warp) {
        const int other = row_warp * (kKeyWarps - 1) + warp - 1;
        return RowHalf{sKv(free_stage()).base + other * Config::kHalfBytes};
      };
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (h == 1 && rows.count <= 8) break;
        __syncthreads();  // all have read what is in the buffer
        if (key_warp > 0) rows_of_warp(key_warp).store(ends[h], out, h);
        __syncthreads();
        if (key_warp > 0) continue;
#pragma unroll 1
        for (int warp = 1; warp < kKeyWarps; ++warp) rows_of_warp(warp).merge_into(ends[h], out, h);
      }
    }

    // ---- Merge the parts of a group, and the groups ----
    if (key_warp > 0) continue;
    if constexpr (Config::kMayHaveGroups) {
      const RowHalf of_group{sQ.base + Config::kSharedBytes},
          before_group{of_group.base + Config::kHalfBytes};
      const int group_parts = takes_tile ? arguments.group_parts : unit_parts;
      const int in_group = part % group_parts;
      if (in_group > 0) of_group.merge_into(ends[0], out, 0);
      if (!is_last && in_group < group_parts - 1) {
        of_group.store(ends[0], out, 0);
        continue;
      }
      if (part > in_group) before_group.merge_into(ends[0], out, 0);
      if (!is_last) before_group.store(ends[0], out, 0);
    }
  }
  if (key_warp > 0) return;

  // ---- Write out: a unit, or out and lse ----
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = warp_row + accumulator_row(0, h);
    if (row >= rows.count) continue;
    const int head = first_head + rows.head(row);
    const int64_t index = (batch * params.seqlen_q + rows.query(row)) * params.num_heads + head;
    const PartRows parts(params);
    if (!takes_tile) {
      parts.store<Arithmetic>(first_unit, index, ends[h], out, h);
      continue;
    }
#pragma unroll
    for (auto& tile : out[0]) add_zero(tile[2 * h]), add_zero(tile[2 * h + 1]);
    write_row<Arithmetic>(params, batch, head, index, ends[h], out, h);
    if (arguments.num_units > 1 && lane_id() % 4 == 0) parts.set_merged(index);
  }
}

// ---- Launch ----

// Of a key head.
inline int64_t number_of_rows(const ForwardParams& params) {
  return params.num_heads / params.num_kv_heads * params.seqlen_q;
}

// Each block of a call looks at the lengths of all sequences, up to so many.
inline constexpr int64_t kMostCompared = 256;

// Of equally long tiles, the first that are taken whole: those of full rounds of two for each multiprocessor,
// and of a last round that is at least 0.8 full. In an emptier one multiprocessors would idle for the time of
// a tile; in units, its tiles end together. Less than a round is taken in units: equally long sequences would
// gain, but others would lose as much, since fewer blocks fit beside each other.
inline int64_t tiles_of_rounds(int64_t tiles, int64_t multiprocessors) {
  const int64_t round = 2 * multiprocessors, last = tiles % round;
  if (tiles < round) return 0;
  return 5 * last < 4 * round ? tiles - last : tiles;
}

template <class Config>
Status launch_decode(const ForwardParams& params, const LaunchContext& context) {
  using Element = typename Config::Element;
  const int64_t span = key_span(params);
  // The first block may begin before the span.
  const int64_t num_blocks =
      std::min(ceil_div(params.seqlen_kv, Config::kBlockN), ceil_div(span - 1, Config::kBlockN) + 1);
  const int64_t num_parts = params.num_key_parts;
  const int64_t part_blocks = std::max<int64_t>(Config::kMinPartBlocks, ceil_div(num_blocks, num_parts));
  if (num_parts > num_blocks || part_blocks > Config::kMaxPartBlocks) return Status::not_served();

  // How many parts a group has depends on the shape of a sequence alone; what a block takes, on the batch,
  // too. With three groups for every four multiprocessors, or more, longer blocks are faster than more of
  // them, unless there are so few more than run side by side that parts save an eighth of the rounds' time.
  // So are whole tiles that are equally long, if there is a round of them: memory is read in fewer, longer
  // streams.
  const int64_t rows = number_of_rows(params), row_tiles = ceil_div(rows, Config::kRows);
  const int64_t tiles = params.batch * params.num_kv_heads * row_tiles;
  const bool may_merge = Config::kMayHaveGroups && rows <= Config::kGroupRows && num_parts > 1;
  int64_t group_parts = 1;
  if (may_merge) {
    group_parts =
        std::clamp<int64_t>(Config::kGroupBlocks / part_blocks, 1, std::min(num_parts, kGroupParts));
    if (ceil_div(num_parts, group_parts) > CombineConfigOf<Config::kHeadDim>::kTeams) group_parts = 1;
  }
  const int64_t groups = ceil_div(num_parts, group_parts) * tiles;
  const bool is_forced = context.forced_tile != ForcedTile::kNone,
             is_long = context.forced_tile == ForcedTile::kLong;
  const int fit = blocks_that_fit(Config::kBlocksPerSm, Config::kSharedBytes + Config::kHalfBytes, context);
  const int64_t side_by_side = int64_t{std::max(fit, 1)} * context.multiprocessors;
  const bool would_idle =
      groups > side_by_side && tiles < 2 * context.multiprocessors &&
      8 * ceil_div(num_parts * tiles, side_by_side) <= 7 * ceil_div(groups, side_by_side) * group_parts;
  const bool are_many = is_forced ? is_long : 4 * groups >= 3 * context.multiprocessors && !would_idle;
  const bool takes_groups = group_parts > 1 && are_many;
  const int64_t unit_parts = takes_groups ? group_parts : 1, num_units = ceil_div(num_parts, unit_parts);
  // As the second kernel merges them.
  if (group_parts == 1) group_parts = combine_run<Config::kHeadDim>(num_parts);
  const bool may_take_tiles = may_merge && Config::kMayTakeTiles && num_units > 1 &&
                              Config::kKeptBytes <= context.shared_memory_per_block &&
                              params.batch <= kMostCompared;
  int64_t whole_tiles = 0;
  if (may_take_tiles) {
    whole_tiles = !is_forced ? tiles_of_rounds(tiles, context.multiprocessors) : is_long ? tiles : 0;
  }

  const DecodeArguments arguments{params,
                                  LogitScale(params),
                                  PairOptions(params),
                                  head_rows<Element>(params.q, params.num_heads, params.head_dim),
                                  head_rows<Element>(params.k, params.num_kv_heads, params.head_dim),
                                  head_rows<Element>(params.v, params.num_kv_heads, params.head_dim_v),
                                  static_cast<int>(row_tiles),
                                  static_cast<int>(group_parts),
                                  static_cast<int>(unit_parts),
                                  static_cast<int>(num_units),
                                  static_cast<int>(whole_tiles)};
  const Status status = launch(decode_kernel<Config>, num_units * tiles, Config::kThreads,
                               whole_tiles > 0  ? Config::kKeptBytes
                               : unit_parts > 1 ? Config::kSharedBytes + Config::kHalfBytes
                                                : Config::kSharedBytes,
                               context, arguments);
  if (status.failed() || num_units == 1) return status;
  ForwardParams of_units = params;
  of_units.num_key_parts = num_units;
  return launch_combine<typename Config::Arithmetic, Config::kHeadDim>(
      of_units, context, unit_parts > 1 ? num_units : group_parts, whole_tiles > 0);
}

template <class Arithmetic, int kHeadDim, bool kManyRows>
Status decode_rows(const ForwardParams& params, const LaunchContext& context) {
  return has_pair_options(params)
             ? launch_decode<DecodeConfig<Arithmetic, kHeadDim, kManyRows, kAnyPairsUnstaged>>(params,
                                                                                               context)
             : launch_decode<DecodeConfig<Arithmetic, kHeadDim, kManyRows, kNoPairs>>(params, context);
}

template <class Arithmetic, int kHeadDim>
Status decode(const ForwardParams& params, const LaunchContext& context) {
  if (params.num_key_parts <= 0 || params.num_kv_heads == 0 || params.head_dim_v == 0 ||
      params.dropout_seeds) {
    return Status::not_served();
  }
  const int64_t rows = number_of_rows(params);
  if (rows == 0 || params.seqlen_q > kDecodeQueries) return Status::not_served();
  return rows > 16 ? decode_rows<Arithmetic, kHeadDim, true>(params, context)
                   : decode_rows<Arithmetic, kHeadDim, false>(params, context);
}

}  // namespace jax_flash::cuda::sm80
