// The gradient of a bias: which tile of its sums a block works on, which batch elements and heads add to it,
// and how it leaves.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "accumulator.cuh"
#include "launch.h"
#include "mask.cuh"
#include "pairs/alibi.cuh"
#include "pairs/head.cuh"
#include "params.h"

namespace jax_flash::cuda {

template <int kBlockM, int kBlockN>
struct BiasSumsTile {
  // A batch element and a head that add to the tile.
  struct Item {
    int batch, head;
  };

  const BackwardParams& params;
  bool sees_all;                       // does every query see every key?
  int m_start, n_start, m_end, n_end;  // ends within the lengths
  int64_t index;                       // into the [B', N'] of the sums (BackwardParams::dbias)
  int first_batch, end_batch, first_head, end_head;

  __device__ __forceinline__ BiasSumsTile(const BackwardParams& params, unsigned tile, bool sees_all = false)
      : params(params), sees_all(sees_all) {
    const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
    const unsigned m_blocks = (seqlen_q + kBlockM - 1) / kBlockM,
                   n_blocks = (seqlen_kv + kBlockN - 1) / kBlockN;
    n_start = tile % n_blocks * kBlockN;
    m_start = tile / n_blocks % m_blocks * kBlockM;
    m_end = min(m_start + kBlockM, seqlen_q);
    n_end = min(n_start + kBlockN, seqlen_kv);
    const unsigned sums = tile / n_blocks / m_blocks;
    const unsigned sums_heads = params.dbias_num_heads;
    const int heads = static_cast<int>(params.num_heads) / static_cast<int>(sums_heads);
    const int batches = static_cast<int>(params.batch) / static_cast<int>(params.dbias_batch);
    index = sums;
    first_batch = static_cast<int>(sums / sums_heads) * batches;
    end_batch = heads > 0 ? first_batch + batches : first_batch;
    first_head = static_cast<int>(sums % sums_heads) * heads;
    end_head = first_head + heads;
  }

  static int64_t count(const BackwardParams& params) {
    return ceil_div(params.seqlen_q, kBlockM) * ceil_div(params.seqlen_kv, kBlockN) * params.dbias_batch *
           params.dbias_num_heads;
  }

  // Iterates over the items that have a visible pair in the tile; exists() is false after the last one.
  __device__ __forceinline__ Item first() const { return visible_from({first_batch, first_head}); }
  __device__ __forceinline__ Item next(const Item& item) const { return visible_from(successor(item)); }
  __device__ __forceinline__ bool exists(const Item& item) const { return item.batch < end_batch; }

  // Are all of its pairs in the tensors, and visible in each item?
  __device__ __forceinline__ bool is_whole() const {
    return sees_all && m_end - m_start == kBlockM && n_end - n_start == kBlockN;
  }

 private:
  __device__ __forceinline__ Item successor(const Item& item) const {
    return item.head + 1 < end_head ? Item{item.batch, item.head + 1} : Item{item.batch + 1, first_head};
  }

  __device__ __forceinline__ Item visible_from(Item item) const {
    if (sees_all) return item;
    while (exists(item) && is_hidden(item)) item = successor(item);
    return item;
  }

  __device__ __forceinline__ bool is_hidden(const Item& item) const {
    const Mask mask(params, item.batch);
    if (mask.hides(m_start, m_end - m_start, n_start, n_end - n_start)) return true;
    const VisibilityWorkspace& visible = params.visible;
    if (!visible.visibility) return false;
    constexpr int kBlock = kVisibilityBlock;
    const int64_t m_blocks = (params.seqlen_q + kBlock - 1) / kBlock,
                  n_blocks = (params.seqlen_kv + kBlock - 1) / kBlock;
    const int64_t head = visible.num_heads > 1 ? item.head : 0;
    const uint8_t* blocks =
        visible.visibility + (item.batch * visible.num_heads + head) * m_blocks * n_blocks;
    bool any = false;
    for (int m = m_start / kBlock; m * kBlock < m_end; ++m) {
      for (int n = n_start / kBlock; n * kBlock < n_end; ++n) any |= __ldg(blocks + m * n_blocks + n) != 0;
    }
    return !any;
  }
};

// sums += ds, or for slopes -distance * ds, for a warp's rows row0.. and columns column0...
template <class Sum, int kMTiles, int kNTiles>
__device__ __forceinline__ void add_to_bias_sums(Sum (&sums)[kMTiles][kNTiles][4],
                                                 const Sum (&ds)[kMTiles][kNTiles][4],
                                                 const QueryPairs<Sum>& pairs, int row0, int column0) {
  for_each_accumulator(sums, [&](int mt, int h, int nt, int c) {
    Sum weight = 1;
    if (pairs.params.alibi_slopes) {
      weight = -fabs(alibi_distance(pairs, row0 + 16 * mt, column0) +
                     alibi_distance_step<QueryPairs<Sum>>(nt, 2 * h + c));
    }
    sums[mt][nt][2 * h + c] += weight * ds[mt][nt][2 * h + c];
  });
}

// Stores a sum in the dtype that was asked for.
template <class Sum>
__device__ __forceinline__ void store_bias_sum(const BackwardParams& params, int64_t index, Sum sum) {
  if (params.dbias_dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(params.dbias)[index] = __float2bfloat16(static_cast<float>(sum));
  } else if (params.dbias_dtype == DType::kFloat16) {
    static_cast<__half*>(params.dbias)[index] = __float2half(static_cast<float>(sum));
  } else {
    static_cast<Sum*>(params.dbias)[index] = sum;
  }
}

// What write_bias_sums needs for a tile of which a warp has so many rows and columns: sums of a warp's rows,
// or of its columns.
template <class Sum>
constexpr int bias_sums_bytes(int block_m, int block_n, int warp_rows, int warp_columns) {
  const int of_rows = block_m / warp_rows * block_n, of_columns = block_m * (block_n / warp_columns);
  return (of_rows > of_columns ? of_rows : of_columns) * static_cast<int>(sizeof(Sum));
}

// Writes a tile's sums, of which a warp holds those from (row, column) of the tile on. By a block of
// kThreads, whose shared memory, of bias_sums_bytes, may be overwritten once all threads are here.
template <int kThreads, class Sum, int kBlockM, int kBlockN, int kMTiles, int kNTiles>
__device__ __forceinline__ void write_bias_sums(const BiasSumsTile<kBlockM, kBlockN>& tile,
                                                const Sum (&sums)[kMTiles][kNTiles][4], int row, int column,
                                                void* shared) {
  const BackwardParams& params = tile.params;
  const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
  const int sum_rows = static_cast<int>(params.dbias_rows), sum_keys = static_cast<int>(params.dbias_keys);

  // ---- One sum for each pair ----
  if (sum_rows == 1 && sum_keys == 1) {
    for_each_accumulator(sums, [&](int mt, int h, int nt, int c) {
      const int query = tile.m_start + row + accumulator_row(mt, h),
                key = tile.n_start + column + accumulator_column(nt, c);
      if (query < seqlen_q && key < seqlen_kv) {
        store_bias_sum(params, (tile.index * seqlen_q + query) * seqlen_kv + key, sums[mt][nt][2 * h + c]);
      }
    });
    return;
  }

  // ---- Or those of blocks of queries, of keys or of both: first of each warp's rows, columns or both ----
  constexpr int kRows = 16 * kMTiles, kColumns = 8 * kNTiles;
  static_assert(kVisibilityBlock % kRows == 0 && kVisibilityBlock % kColumns == 0);
  const int warp_rows = sum_rows > 1 ? kRows : 1, warp_keys = sum_keys > 1 ? kColumns : 1;
  const int pitch = kBlockN / warp_keys;
  __syncthreads();
  Sum* const sSums = static_cast<Sum*>(shared);  // [kBlockM / warp_rows, kBlockN / warp_keys]
  const auto keep = [&](int r, int c, Sum sum) {
    sSums[(row + r) / warp_rows * pitch + (column + c) / warp_keys] = sum;
  };
  if (sum_keys > 1) {
    Sum all = 0;
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Sum of_row = 0;
#pragma unroll
        for (int nt = 0; nt < kNTiles; ++nt) of_row += sums[mt][nt][2 * h] + sums[mt][nt][2 * h + 1];
        all += of_row;
        if (sum_rows > 1) continue;
        of_row = row_sum(of_row);
        if (lane_id() % 4 == 0) keep(accumulator_row(mt, h), 0, of_row);
      }
    }
    if (sum_rows > 1) {
      all = sum_lanes<32>(all);
      if (lane_id() == 0) keep(0, 0, all);
    }
  } else {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        Sum of_column = 0;
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) of_column += sums[mt][nt][c] + sums[mt][nt][2 + c];
        of_column = column_sum(of_column);
        if (lane_id() < 4) keep(0, accumulator_column(nt, c), of_column);
      }
    }
  }
  __syncthreads();

  // ---- Then of a block's warps ----
  const int rows_out = (seqlen_q + sum_rows - 1) / sum_rows, keys_out = (seqlen_kv + sum_keys - 1) / sum_keys;
  Sum* gSums = static_cast<Sum*>(params.dbias) + tile.index * rows_out * keys_out;
  const int own_rows = (tile.m_end - tile.m_start + sum_rows - 1) / sum_rows,
            own_keys = (tile.n_end - tile.n_start + sum_keys - 1) / sum_keys;
  const int rows_of_sum = sum_rows / warp_rows, keys_of_sum = sum_keys / warp_keys;
  for (int i = threadIdx.x; i < own_rows * own_keys; i += kThreads) {
    const int own_row = i / own_keys, own_key = i - own_row * own_keys;
    Sum sum = 0;
    for (int r = 0; r < rows_of_sum; ++r) {
      for (int c = 0; c < keys_of_sum; ++c) {
        sum += sSums[(own_row * rows_of_sum + r) * pitch + own_key * keys_of_sum + c];
      }
    }
    gSums[int64_t{tile.m_start / sum_rows + own_row} * keys_out + tile.n_start / sum_keys + own_key] = sum;
  }
}

}  // namespace jax_flash::cuda
