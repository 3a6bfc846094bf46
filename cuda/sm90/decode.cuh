// Forward attention for few queries over many keys, as in decoding, on Hopper: up to 16 rows of a key head.
// It is bound by the memory that keys and values come from.
//
// A thread block takes a part of the keys of a key head, a group of parts, or all of them (few_queries.cuh).
// Of each block of 128 keys a warp has 32, and a ring of its own, into which TMA copies them and their
// values: only at the end of a part do the warps wait for each other. Products are transposed, [keys, rows]
// and [columns, rows], so that 8 rows fill an instruction:
//
//   a block  wait | k q^T | refill | mask, softmax | wait | v^T p | refill
//   a part   its blocks | leave sums in shared memory | barrier | merge own columns, with the parts before
//
//   barrier   arrivals     completes when
//   full      1 and bytes  TMA has filled this buffer; by warp and buffer
//
// The warp that waits for a buffer also refills it, so no barrier says that it is empty.
#pragma once

#include <cmath>
#include <cstdint>
#include <numeric>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "few_queries.cuh"
#include "group_rows.cuh"
#include "key_parts.cuh"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pages.cuh"
#include "pairs/options.cuh"
#include "params.h"
#include "ptx/barrier.h"
#include "ptx/grid.h"
#include "ptx/math.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "sm80/product.cuh"
#include "sm80/shared_tile.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda::sm90 {

struct DecodeArguments {
  ForwardParams params;
  CUtensorMap k_map, v_map;  // [B, S, K, H], or pages; boxes of 64 columns
  int box_rows;              // 32 keys or, of pages, the largest number that divides both
  LogitScale logit;
  UnitPlan plan;
};

template <class Arithmetic_, int kHeadDim_, int kRowTiles_>
struct DecodeConfig {
  using Arithmetic = Arithmetic_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / kChunkColumns;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps;
  static constexpr int kBlockN = 128, kWarpKeys = kBlockN / kWarps, kKeyTiles = kWarpKeys / 16;
  static constexpr int kGroupKeys = (1 << 17) / kHeadDim;  // a group of parts takes 512 KB
  static constexpr int kRowTiles = kRowTiles_, kRows = 8 * kRowTiles;
  static constexpr int kTiles = kHeadDim / 16;       // of out, 16 columns each
  static constexpr int kOwnTiles = kTiles / kWarps;  // that a warp merges
  // Two thread blocks, whose starts and ends overlap, if their sums fit beside rings of 96 KB.
  static constexpr int kBlocksPerSm = kRowTiles == 1 ? 2 : 1;
  static constexpr bool kTakesFull = kRowTiles == 1;  // else the sums of other groups would spill
  static constexpr int kChunkBytes = kWarpKeys * kChunkRowBytes, kItemBytes = kChunks * kChunkBytes;
  static constexpr int kItems = 12 / kChunks / kBlocksPerSm;  // of a warp's ring
};

// Keys or values of a warp, [32, kHeadDim], as TMA writes them: chunks of 64 columns, one behind the other.
template <class Config>
struct DecodeItem : sm80::SharedTile<typename Config::Arithmetic, Config::kWarpKeys, kChunkColumns> {
  using Chunk = sm80::SharedTile<typename Config::Arithmetic, Config::kWarpKeys, kChunkColumns>;

  __device__ __forceinline__ explicit DecodeItem(uint32_t base) : Chunk{base} {}

  __device__ __forceinline__ static uint32_t moved(uint32_t lane_base, int row, int chunk) {
    return Chunk::moved(lane_base, row, chunk % 8) + chunk / 8 * Config::kChunkBytes;
  }
};

// Merged rows of one part or of several, [columns, rows] of a warp's columns.
template <int kRowTiles, int kTiles>
struct MergedPart {
  RowPart ends[kRowTiles][2];
  float out[kTiles][kRowTiles][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int nt = 0; nt < kRowTiles; ++nt) ends[nt][0] = ends[nt][1] = {-INFINITY, 0};
    cuda::clear(out);
  }

  // Merges another, on the left, with this.
  __device__ __forceinline__ void merge_left(const MergedPart& left) {
#pragma unroll
    for (int nt = 0; nt < kRowTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const PartMerge merge(left.ends[nt][c], ends[nt][c]);
        ends[nt][c] = merge.total;
#pragma unroll
        for (int mt = 0; mt < kTiles; ++mt) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& sum = out[mt][nt][2 * h + c];
            sum = merge(left.out[mt][nt][2 * h + c], sum);
          }
        }
      }
    }
  }
};

// Shared memory: the warps' rings, then what they leave at the end of a part, then barriers. An item is the
// keys of a warp or their values.
template <class Config>
struct DecodeShared {
  static constexpr int kSums = Config::kWarps * Config::kItems * Config::kItemBytes;
  static constexpr int kEnds = kSums + Config::kWarps * Config::kRowTiles * Config::kTiles * 512;
  static constexpr int kFull = kEnds + Config::kWarps * Config::kRowTiles * 64;
  static constexpr int kBytes = kFull + Config::kWarps * Config::kItems * 8;
  static_assert(Config::kBlocksPerSm * (kBytes + kSystemBytes) <= 228 * 1024);

  uint32_t base;

  __device__ __forceinline__ uint32_t item(int warp, int slot) const {
    return base + (warp * Config::kItems + slot) * Config::kItemBytes;
  }
  __device__ __forceinline__ uint32_t full(int warp, int slot) const {
    return base + kFull + (warp * Config::kItems + slot) * 8;
  }

  // A warp's sums: of each lane 16 bytes for each tile. Rows' maxima and sums: 16 bytes for two.
  __device__ __forceinline__ uint32_t sums(int warp, int mt, int nt) const {
    return base + kSums + ((warp * Config::kRowTiles + nt) * Config::kTiles + mt) * 512 + 16 * lane_id();
  }
  __device__ __forceinline__ uint32_t ends(int warp, int nt) const {
    return base + kEnds + (warp * Config::kRowTiles + nt) * 64 + 16 * (lane_id() % 4);
  }
};

// ---- Loads ----

// Copies a warp's items, in the order k, v, k, v, .... By a converged warp.
template <class Config>
struct DecodeLoader {
  const DecodeArguments& arguments;
  DecodeShared<Config> shared;
  int warp, batch, kv_head, kv_length;
  int block, end_block;
  bool is_value;  // is the block's next item its values?
  SequencePages pages;
  int32_t page_entry;  // of the next block, as it was read, a block ahead

  __device__ __forceinline__ DecodeLoader(const DecodeArguments& arguments,
                                          const DecodeShared<Config>& shared, int warp,
                                          const KeyUnit<Config::kBlockN>& unit)
      : arguments(arguments),
        shared(shared),
        warp(warp),
        batch(unit.batch),
        kv_head(unit.kv_head),
        kv_length(unit.queries.kv_length),
        block(unit.first_block),
        end_block(unit.first_block + unit.num_blocks),
        is_value(false),
        pages(arguments.params, unit.batch),
        page_entry(0) {
    find_page();
  }

  // Loads the next item, if there is one, into `slot`, of which nothing reads the one before any more.
  __device__ __forceinline__ void load_next(int slot) {
    if (block >= end_block) return;
    const uint32_t item = shared.item(warp, slot), full = shared.full(warp, slot);
    const int box_rows = arguments.box_rows, rows = min(kv_length - first_key(), Config::kWarpKeys);
    if (box_rows == Config::kWarpKeys) {
      if (ptx::elect_one()) {
        ptx::barrier_arrive_expect(full, rows > 0 ? Config::kItemBytes : 0);
        if (rows > 0) load_box(item, full, first_key());
      }
    } else {
      // Of small pages a lane for each box.
      constexpr int kRowBytes = Config::kItemBytes / Config::kWarpKeys;
      const int to = lane_id() * box_rows;
      if (ptx::elect_one()) {
        ptx::barrier_arrive_expect(full, (max(rows, 0) + box_rows - 1) / box_rows * box_rows * kRowBytes);
      }
      __syncwarp();
      if (to < rows) load_box(item + to * kChunkRowBytes, full, first_key() + to);
    }
    __syncwarp();
    if (is_value) {
      ++block;
      find_page();
    }
    is_value = !is_value;
  }

 private:
  __device__ __forceinline__ int first_key() const {
    return block * Config::kBlockN + warp * Config::kWarpKeys;
  }

  // Of a key that does not exist nothing is loaded: its page might not, either.
  __device__ __forceinline__ void load_box(uint32_t to, uint32_t full, int key) const {
    const CUtensorMap& map = is_value ? arguments.v_map : arguments.k_map;
    const int outer = pages ? pages.page_of(page_entry) : batch, row = pages ? pages.place_of(key).row : key;
#pragma unroll
    for (int chunk = 0; chunk < Config::kChunks; ++chunk) {
      ptx::tensor_load(to + chunk * Config::kChunkBytes, map, full, chunk * kChunkColumns, kv_head, row,
                       outer, ptx::kEvictFirst);
    }
  }

  // Reads where the next keys are: of each box, or of the only one.
  __device__ __forceinline__ void find_page() {
    if (!pages || block >= end_block) return;
    const int box_rows = arguments.box_rows, to = box_rows < Config::kWarpKeys ? lane_id() * box_rows : 0;
    const int key = first_key() + to;
    if (to < Config::kWarpKeys && key < kv_length) page_entry = pages.entry(pages.place_of(key).index);
  }
};

// ---- Softmax of [keys, rows] ----

// As OnlineSoftmax, of scores [16 kKeyTiles keys, 8 kRowTiles rows] of a warp: lanes with the same
// lane_id() % 4 share rows.
template <int kRowTiles>
struct ColumnSoftmax {
  static constexpr float kRescaleThreshold = OnlineSoftmax<1>::kRescaleThreshold;

  float max_log2[kRowTiles][2];
  float sum[kRowTiles][2];  // of this lane's keys

  __device__ __forceinline__ ColumnSoftmax() {
#pragma unroll
    for (int nt = 0; nt < kRowTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) max_log2[nt][c] = -INFINITY, sum[nt][c] = 0;
    }
  }

  template <int kKeyTiles, int kTiles>
  __device__ __forceinline__ void update(float (&scores)[kKeyTiles][kRowTiles][4],
                                         float (&out)[kTiles][kRowTiles][4], float scale_log2) {
    float largest[kRowTiles][2];
    bool moved = false;
#pragma unroll
    for (int nt = 0; nt < kRowTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        largest[nt][c] = fmaxf(scores[0][nt][c], scores[0][nt][2 + c]);
#pragma unroll
        for (int kt = 1; kt < kKeyTiles; ++kt) {
          largest[nt][c] = fmaxf(largest[nt][c], fmaxf(scores[kt][nt][c], scores[kt][nt][2 + c]));
        }
        moved |= fmaf(largest[nt][c], scale_log2, -max_log2[nt][c]) > kRescaleThreshold;
      }
    }
    if (__any_sync(0xffffffff, moved)) raise_maximum(largest, out, scale_log2);
#pragma unroll
    for (int nt = 0; nt < kRowTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float shift = max_log2[nt][c] == -INFINITY ? 0 : max_log2[nt][c];
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; ++kt) {
          float &upper = scores[kt][nt][c], &lower = scores[kt][nt][2 + c];
          upper = ptx::exp2_approx(fmaf(upper, scale_log2, -shift));
          lower = ptx::exp2_approx(fmaf(lower, scale_log2, -shift));
          sum[nt][c] += upper + lower;
        }
      }
    }
  }

 private:
  template <int kTiles>
  __device__ __forceinline__ void raise_maximum(const float (&largest)[kRowTiles][2],
                                                float (&out)[kTiles][kRowTiles][4], float scale_log2) {
#pragma unroll
    for (int nt = 0; nt < kRowTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float row_max = largest[nt][c];
#pragma unroll
        for (int offset = 4; offset < 32; offset *= 2) {
          row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, offset));
        }
        // scale_log2 may be 0, and 0 * -inf is NaN.
        const float new_max = row_max == -INFINITY ? -INFINITY : row_max * scale_log2;
        // exp2(-inf) = 0 before the first visible key, when sum and out are 0.
        const bool is_raised = new_max > max_log2[nt][c];
        const float factor = is_raised ? ptx::exp2_approx(max_log2[nt][c] - new_max) : 1;
        if (is_raised) max_log2[nt][c] = new_max;
        sum[nt][c] *= factor;
#pragma unroll
        for (int mt = 0; mt < kTiles; ++mt) out[mt][nt][c] *= factor, out[mt][nt][2 + c] *= factor;
      }
    }
  }
};

// ---- The kernel ----

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    decode_kernel(const __grid_constant__ DecodeArguments arguments) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Arithmetic::Element;
  using Item = DecodeItem<Config>;
  constexpr int kHeadDim = Config::kHeadDim, kWarpKeys = Config::kWarpKeys, kItems = Config::kItems;
  constexpr int kRowTiles = Config::kRowTiles, kTiles = Config::kTiles, kOwnTiles = Config::kOwnTiles;
  constexpr int kSteps = kHeadDim / 16, kKeyTiles = Config::kKeyTiles;
  using Merged = MergedPart<kRowTiles, kOwnTiles>;
  const ForwardParams& params = arguments.params;
  const UnitPlan& plan = arguments.plan;
  const int warp = threadIdx.x / 32;

  // ---- Unit ----
  const KeyUnit<Config::kBlockN> unit(params, plan, blockIdx.x, /*compares_lengths=*/false);
  const Mask& queries = unit.queries;
  const GroupRows rows(params);
  const int first_head = unit.kv_head * rows.group;
  auto index_of = [&](int row) {  // in [B, T, N]
    return (unit.batch * params.seqlen_q + rows.query(row)) * params.num_heads + first_head + rows.head(row);
  };
  const PartRows parts(params);
  if (unit.num_blocks == 0 && !unit.takes_tile) {
    const int row = static_cast<int>(threadIdx.x);
    if (row < rows.count) parts.set_end(unit.index, index_of(row), {-INFINITY, 0});
    return;
  }

  // ---- Barriers; start to load ----
  extern __shared__ __align__(1024) uint8_t shared_memory[];
  const DecodeShared<Config> shared{ptx::shared_address(shared_memory)};
  if (lane_id() == 0) {
    for (int slot = 0; slot < kItems; ++slot) ptx::barrier_init(shared.full(warp, slot), 1);
    ptx::barrier_init_fence();
  }
  __syncwarp();
  DecodeLoader<Config> loader(arguments, shared, warp, unit);
#pragma unroll 1
  for (int slot = 0; slot < kItems; ++slot) loader.load_next(slot);
  int slot = 0;
  uint32_t parity = 0;
  auto wait = [&] { ptx::barrier_wait(shared.full(warp, slot), parity); };
  auto move_slot = [&] {
    const int read = slot;
    if (++slot == kItems) slot = 0, parity ^= 1;
    return read;
  };

  // ---- Queries: as the products have them, in registers ----
  const GroupMask mask(queries, rows, 0, Config::kRows);
  const int head_dim = static_cast<int>(params.head_dim);
  sm80::Fragment<Arithmetic, 2> q[kSteps][kRowTiles];
#pragma unroll
  for (int nt = 0; nt < kRowTiles; ++nt) {
    const int row = 8 * nt + lane_id() / 4;
    const bool is_row = row < rows.count;
    const auto* from = static_cast<const Element*>(params.q) + (is_row ? index_of(row) : 0) * head_dim;
#pragma unroll
    for (int i = 0; i < 2 * kSteps; ++i) {
      const int column = 8 * i + 2 * (lane_id() % 4);
      const auto* two = reinterpret_cast<const uint32_t*>(from + column);
      q[i / 2][nt].value[i % 2] = is_row && column < head_dim ? __ldg(two) : 0;
    }
  }

  const int unit_end = unit.first_block + unit.num_blocks;
  const int group_parts = unit.takes_tile ? plan.group_parts : plan.unit_parts;
  const int own_tile = warp * kOwnTiles;
  Merged merged, group, groups_before;  // a part and what is merged with it; the groups before its own
#pragma unroll 1
  for (int part = 0, part_end = unit.first_block; part == 0 || part_end < unit_end; ++part) {
    // ---- A part: this warp's keys of each block ----
    float out[kTiles][kRowTiles][4];  // [kHeadDim, rows]
    clear(out);
    ColumnSoftmax<kRowTiles> softmax;
    int block = part_end;
    part_end = min(part_end + unit.part_blocks, unit_end);
    const bool is_empty = block >= part_end, is_last = part_end == unit_end;
#pragma unroll 1
    for (; block < part_end; ++block) {
      const int n_start = block * Config::kBlockN + warp * kWarpKeys;
      const bool hidden = mask.hides(n_start, kWarpKeys);
      float scores[kKeyTiles][kRowTiles][4];  // [32 keys, rows]
      sm80::Fragment<Arithmetic, 2> p[kKeyTiles][kRowTiles];

      // ---- scores = k q^T ----
      wait();
      if (!hidden) {
        const sm80::KMajorA<Arithmetic, Item, kKeyTiles> keys(Item(shared.item(warp, slot)), 0);
        clear(scores);
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          sm80::Fragment<Arithmetic, 4> k[kKeyTiles];
          keys.load(k, step);
#pragma unroll
          for (int kt = 0; kt < kKeyTiles; ++kt) {
#pragma unroll
            for (int nt = 0; nt < kRowTiles; ++nt) mma(scores[kt][nt], k[kt], q[step][nt]);
          }
        }
      }
      __syncwarp();  // all lanes have read the keys
      loader.load_next(move_slot());

      // ---- Mask, softmax ----
      if (!hidden) {
        transform_scores(scores, arguments.logit);
        if (!mask.covers(n_start, kWarpKeys)) {
          for_each_accumulator(scores, [&](int kt, int h, int nt, int c) {
            const int row = accumulator_column(nt, c), key = n_start + accumulator_row(kt, h);
            if (key < mask.first_key(row) || key > mask.last_key(row)) scores[kt][nt][2 * h + c] = -INFINITY;
          });
        }
        softmax.update(scores, out, arguments.logit.scale_log2);
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; ++kt) {
#pragma unroll
          for (int nt = 0; nt < kRowTiles; ++nt) {
            const float (&x)[4] = scores[kt][nt];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              p[kt][nt].value[h] = ptx::transpose_matrix(pack<Arithmetic>(x[2 * h], x[2 * h + 1]));
            }
          }
        }
      }

      // ---- out += v^T p ----
      wait();
      if (!hidden) {
        const uint32_t item = shared.item(warp, slot);
        if (n_start + kWarpKeys > queries.kv_length) {
          // They may be NaN, and 0 * NaN is NaN.
          clear_tail<Config::kChunks, kWarpKeys, kChunkRowBytes>(item, queries.kv_length - n_start);
        }
        const sm80::MnMajorA<Arithmetic, Item, kTiles> values(Item(item), 0);
#pragma unroll
        for (int kt = 0; kt < kKeyTiles; ++kt) {
          sm80::Fragment<Arithmetic, 4> v[kTiles];
          values.load(v, kt);
#pragma unroll
          for (int mt = 0; mt < kTiles; ++mt) {
#pragma unroll
            for (int nt = 0; nt < kRowTiles; ++nt) mma(out[mt][nt], v[mt], p[kt][nt]);
          }
        }
      }
      __syncwarp();  // all lanes have read the values
      loader.load_next(move_slot());
    }
    if (is_last && plan.num_units > 1) ptx::let_next_grid_start();

    // ---- Merge the warps: each merges its columns ----
    if (is_empty) {
      merged.clear();
    } else {
      if (part > 0) __syncthreads();  // all warps have read what was left of the part before
#pragma unroll
      for (int nt = 0; nt < kRowTiles; ++nt) {
        const float sums[2] = {column_sum(softmax.sum[nt][0]), column_sum(softmax.sum[nt][1])};
        if (lane_id() < 4) {
          const float ends[4] = {softmax.max_log2[nt][0], sums[0], softmax.max_log2[nt][1], sums[1]};
          ptx::store_shared_x4(shared.ends(warp, nt), ends);
        }
#pragma unroll
        for (int mt = 0; mt < kTiles; ++mt) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (sums[i % 2] == 0) out[mt][nt][i] = 0;  // other rows may have left 0 * NaN
          }
          ptx::store_shared_x4(shared.sums(warp, mt, nt), out[mt][nt]);
        }
      }
      __syncthreads();
#pragma unroll 1
      for (int from = 0; from < Config::kWarps; ++from) {
        Merged other;
#pragma unroll
        for (int nt = 0; nt < kRowTiles; ++nt) {
          float ends[4];
          ptx::load_shared_x4(ends, shared.ends(from, nt));
          other.ends[nt][0] = {ends[0], ends[1]}, other.ends[nt][1] = {ends[2], ends[3]};
#pragma unroll
          for (int mt = 0; mt < kOwnTiles; ++mt) {
            ptx::load_shared_x4(other.out[mt][nt], shared.sums(from, own_tile + mt, nt));
          }
        }
        if (from > 0) other.merge_left(merged);
        merged = other;
      }
    }

    // ---- Merge the parts of a group, and the groups ----
    const int in_group = part % group_parts;
    if (in_group > 0) merged.merge_left(group);
    if (!is_last && in_group < group_parts - 1) {
      group = merged;
      continue;
    }
    if constexpr (Config::kTakesFull) {
      if (part > in_group) merged.merge_left(groups_before);
      if (!is_last) groups_before = merged;
    }
  }

  // ---- Write out: a unit, or out and lse ----
  const int head_dim_v = static_cast<int>(params.head_dim_v);
  const bool writes_ends = warp == 0 && lane_id() < 4;
#pragma unroll
  for (int nt = 0; nt < kRowTiles; ++nt) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = accumulator_column(nt, c);
      if (row >= rows.count) continue;
      const int64_t index = index_of(row);
      const RowPart& total = merged.ends[nt][c];
      // f(column, sum) for this lane's columns.
      auto for_each_column = [&](auto f) {
#pragma unroll
        for (int mt = 0; mt < kOwnTiles; ++mt) {
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            f(16 * own_tile + accumulator_row(mt, h), merged.out[mt][nt][2 * h + c]);
          }
        }
      };
      if (!unit.takes_tile) {
        float* to = parts.row(unit.index, index);
        for_each_column([&](int column, float sum) {
          if (column < parts.columns && total.sum != 0) to[column] = sum;
        });
        if (writes_ends) parts.set_end(unit.index, index, total);
        continue;
      }
      const RowEnd end =
          finish_row(total.max_log2, total.sum, sink_log2(params, unit.batch, first_head + rows.head(row)));
      auto* to = static_cast<Element*>(params.out) + index * head_dim_v;
      for_each_column([&](int column, float sum) {
        add_zero(sum);
        if (column < head_dim_v) to[column] = static_cast<Element>(end.is_empty ? 0 : sum * end.normalizer);
      });
      if (writes_ends) end.template store_lse<Arithmetic>(params, index);
    }
  }
}

// ---- Launch ----

template <class Config>
Status launch_decode(const ForwardParams& params, const LaunchContext& context) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Arithmetic::Element;
  const auto part_groups = PartGroups::of<Config::kHeadDim>(params, Config::kBlockN, Config::kGroupKeys);
  const int64_t tiles = params.batch * params.num_kv_heads;
  DecodeArguments arguments{
      .params = params,
      .logit = LogitScale(params),
      .plan = plan_units(params, context, part_groups,
                         {.tiles = tiles,
                          .side_by_side = int64_t{Config::kBlocksPerSm} * context.multiprocessors,
                          .compares_lengths = false,
                          .takes_full = Config::kTakesFull})};
  const KeyAxes keys(params);
  arguments.box_rows =
      params.page_indices ? std::gcd(Config::kWarpKeys, static_cast<int>(keys.rows)) : Config::kWarpKeys;
  auto make_map = [&](const void* tensor, int64_t head_dim, CUtensorMap* map) {
    return make_tensor_map<Element>(tensor, keys.outer, keys.rows, params.num_kv_heads, head_dim,
                                    arguments.box_rows, map, 1, CU_TENSOR_MAP_L2_PROMOTION_NONE);
  };
  if (!make_map(params.k, params.head_dim, &arguments.k_map) ||
      !make_map(params.v, params.head_dim_v, &arguments.v_map)) {
    return Status::not_served();
  }
  const Status status = launch(decode_kernel<Config>, arguments.plan.num_units * tiles, Config::kThreads,
                               DecodeShared<Config>::kBytes, context, arguments);
  if (status.failed() || arguments.plan.num_units == 1) return status;
  return combine_units<Arithmetic, Config::kHeadDim>(params, context, arguments.plan);
}

template <class Arithmetic, int kHeadDim>
Status decode(const ForwardParams& params, const LaunchContext& context) {
  if (params.num_key_parts <= 0 || params.num_kv_heads == 0 || params.head_dim_v == 0 ||
      has_pair_options(params) || !is_served(params, context)) {
    return Status::not_served();
  }
  const int64_t rows = number_of_rows(params);
  if (rows == 0 || rows > 16 || params.seqlen_q > kDecodeQueries) return Status::not_served();
  return rows > 8 ? launch_decode<DecodeConfig<Arithmetic, kHeadDim, 2>>(params, context)
                  : launch_decode<DecodeConfig<Arithmetic, kHeadDim, 1>>(params, context);
}

}  // namespace jax_flash::cuda::sm90
