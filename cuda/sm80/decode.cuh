// Forward attention for few queries over many keys, as in decoding, with mma.sync and cp.async, for compute
// capability 8.0 and up. It is bound by the memory that keys and values come from.
//
// The rows of a tile are those of all query heads of a key head, for every query (group_rows.cuh), or kRows
// of them, so a tile reads keys once for all of them. A thread block takes a part of a tile's keys, a group
// of parts, or the whole tile (few_queries.cuh). The warps of a thread block share a ring of buffers with
// keys and values in the order k, v, k, v, .... Where there are several warps along the keys, their sums are
// merged at the end of each part, through the buffer that was read last, while keys of the next part are on
// their way.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arithmetic.h"
#include "few_queries.cuh"
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

namespace jax_flash::cuda::sm80 {

struct DecodeArguments {
  ForwardParams params;
  LogitScale logit;
  PairOptions pairs;
  HeadRows q, k, v;  // [B * T, N, H], [B * S, K, H], [B * S, K, Hv]; k and v may be pages
  int row_tiles;     // of a key head
  UnitPlan plan;
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
  static constexpr int kMaxPartBlocks = 32;  // a bit each in a word
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
  static constexpr int kGroupRows = 8, kGroupKeys = 1024;
  static_assert(kGroupKeys / kBlockN <= kMaxPartBlocks);
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

  // ---- Unit ----
  // Tiles of the same keys run side by side, so that all but one can find them in L2.
  const unsigned row_tiles = Config::kManyRows ? arguments.row_tiles : 1, index = blockIdx.x / row_tiles;
  const int row_tile = blockIdx.x % row_tiles;
  const KeyUnit<kBlockN> unit(params, arguments.plan, index, Config::kMayTakeTiles);
  if (unit.is_left_out) return;
  const int batch = unit.batch, kv_head = unit.kv_head, num_blocks = unit.num_blocks;
  const Mask& queries = unit.queries;
  const GroupRows rows(params);
  const int first_head = kv_head * rows.group, first_tile_row = row_tile * Config::kRows;
  BlockSet<kMayHaveMask> blocks(num_blocks);
  [[maybe_unused]] uint32_t whole_blocks = ~0u;
  if constexpr (kMayHaveMask) {
    if (params.hides_pairs()) {
      find_blocks<kBlockN>(params, batch, first_head, rows, unit.first_block, num_blocks, blocks.bits,
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
  auto row_of_block = [&](int block) { return (unit.first_block + block) * kBlockN; };
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
    part_end += unit.part_blocks;
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
    if (is_last && arguments.plan.num_units > 1) ptx::let_next_grid_start();
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
      const int group_parts = unit.takes_tile ? arguments.plan.group_parts : arguments.plan.unit_parts;
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
    if (!unit.takes_tile) {
      parts.store<Arithmetic>(unit.index, index, ends[h], out, h);
      continue;
    }
#pragma unroll
    for (auto& tile : out[0]) add_zero(tile[2 * h]), add_zero(tile[2 * h + 1]);
    write_row<Arithmetic>(params, batch, head, index, ends[h], out, h);
    if (arguments.plan.num_units > 1 && lane_id() % 4 == 0) parts.set_merged(index);
  }
}

// ---- Launch ----

template <class Config>
Status launch_decode(const ForwardParams& params, const LaunchContext& context) {
  using Element = typename Config::Element;
  const int64_t rows = number_of_rows(params), row_tiles = ceil_div(rows, Config::kRows);
  const bool may_merge = Config::kMayHaveGroups && rows <= Config::kGroupRows;
  const auto part_groups =
      PartGroups::of<Config::kHeadDim>(params, Config::kBlockN, may_merge ? Config::kGroupKeys : 0);
  if (params.num_key_parts > part_groups.num_blocks || part_groups.part_blocks > Config::kMaxPartBlocks) {
    return Status::not_served();
  }
  const int64_t tiles = params.batch * params.num_kv_heads * row_tiles;
  const int fit = blocks_that_fit(Config::kBlocksPerSm, Config::kSharedBytes + Config::kHalfBytes, context);
  const UnitPlan plan = plan_units(params, context, part_groups,
                                   {.tiles = tiles,
                                    .side_by_side = int64_t{std::max(fit, 1)} * context.multiprocessors,
                                    .compares_lengths = may_merge && Config::kMayTakeTiles &&
                                                        Config::kKeptBytes <= context.shared_memory_per_block,
                                    .takes_full = false});

  const DecodeArguments arguments{params,
                                  LogitScale(params),
                                  PairOptions(params),
                                  head_rows<Element>(params.q, params.num_heads, params.head_dim),
                                  head_rows<Element>(params.k, params.num_kv_heads, params.head_dim),
                                  head_rows<Element>(params.v, params.num_kv_heads, params.head_dim_v),
                                  static_cast<int>(row_tiles),
                                  plan};
  const Status status = launch(decode_kernel<Config>, plan.num_units * tiles, Config::kThreads,
                               plan.whole_tiles > 0  ? Config::kKeptBytes
                               : plan.unit_parts > 1 ? Config::kSharedBytes + Config::kHalfBytes
                                                     : Config::kSharedBytes,
                               context, arguments);
  if (status.failed() || plan.num_units == 1) return status;
  return combine_units<typename Config::Arithmetic, Config::kHeadDim>(params, context, plan);
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
