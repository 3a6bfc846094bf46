// Causality, window, lengths and offset: which (query, key) pairs they leave visible. No other device code
// knows them. (Mask and segments are in pairs.cuh and visibility.cuh.)
//
// Query row i sees the keys first_key(i) <= j <= last_key(i), an interval whose ends never fall as i grows.
// So the first and the last row of a tile give its range of keys. The same holds for the queries that see a
// block of keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace jax_flash::cuda {

// The blocks of keys that a tile of rows sees: in [begin, end) some row sees some key, and in
// [whole_begin, whole_end) every row sees every key.
struct KeyBlocks {
  int begin, end;
  int whole_begin, whole_end;

  __device__ bool is_empty() const { return begin >= end; }
  __device__ bool is_whole(int n_block) const { return n_block >= whole_begin && n_block < whole_end; }
};

// The blocks of queries that see a tile of keys: `count` of them, from row `start` on.
struct QueryBlocks {
  int start, count;
};

// The keys [begin, end).
struct KeyRange {
  int begin, end;

  __device__ bool contains(int key, int keys) const { return begin <= key && key + keys <= end; }
};

// The next four are asked before the launch, to order and choose tiles.

// Does every query see every key?
inline bool is_full(const AttentionParams& params) {
  const Options& options = params.options;
  return !options.is_causal && options.window_left < 0 && options.window_right < 0 &&
         !params.query_seq_lengths && !params.key_value_seq_lengths && !params.hides_pairs();
}

// Does query i see exactly the keys up to i, with as many keys as queries?
inline bool is_triangle(const AttentionParams& params) {
  const Options& options = params.options;
  return options.is_causal && options.window_left < 0 && !params.query_seq_lengths &&
         !params.key_value_seq_lengths && !params.query_offset && params.seqlen_q == params.seqlen_kv &&
         !params.hides_pairs();
}

// The largest number of keys that a query sees, or a bound on it.
inline int64_t most_keys(const AttentionParams& params) {
  const Options& options = params.options;
  const int64_t left = options.window_left, right = options.is_causal ? 0 : options.window_right;
  const int64_t all = params.seqlen_kv;
  return left < 0 || right < 0 ? all : std::min(all, std::min(left, all) + std::min(right, all) + 1);
}

// A bound on the number of keys from the first to the last that any query sees.
inline int64_t key_span(const AttentionParams& params) {
  return std::min(params.seqlen_kv, most_keys(params) + params.seqlen_q - 1);
}

struct Mask {
  int lowest;     // key j is visible to query i only if i + lowest <= j
  int highest;    // and j <= i + highest
  int q_length;   // later rows see nothing
  int kv_length;  // later keys are hidden

  __device__ Mask(const AttentionParams& params, int batch) {
    const Options& options = params.options;
    const int64_t offset = params.query_offset ? params.query_offset[batch] : 0;
    const int64_t left = options.window_left, right = options.is_causal ? 0 : options.window_right;
    lowest = left < 0 ? -kFar : saturate(offset - min(left, int64_t{4} * kFar));
    highest = right < 0 ? kFar : saturate(offset + min(right, int64_t{4} * kFar));
    q_length = length(params.query_seq_lengths, batch, params.seqlen_q);
    kv_length = length(params.key_value_seq_lengths, batch, params.seqlen_kv);
  }

  __device__ int first_key(int row) const { return clamp(row + lowest, 0, kv_length); }

  // Less than first_key(row) where the row sees no key.
  __device__ int last_key(int row) const {
    return row < q_length ? clamp(row + highest, -1, kv_length - 1) : -1;
  }

  // Only rows first_query(n) <= i <= last_query(n') see a key in n..n'.
  __device__ int first_query(int first_key) const { return clamp(first_key - highest, 0, q_length); }
  __device__ int last_query(int last_key) const {
    return last_key < 0 ? -1 : clamp(last_key - lowest, -1, q_length - 1);
  }

  // The blocks of kBlockN keys that rows [row, row + rows) see.
  template <int kBlockN>
  __device__ KeyBlocks key_blocks(int row, int rows) const {
    const int last_row = min(row + rows, q_length) - 1;
    if (last_row < row) return {0, 0, 0, 0};
    KeyBlocks blocks;
    blocks.begin = first_key(row) / kBlockN;
    blocks.end = (last_key(last_row) + kBlockN) / kBlockN;
    blocks.whole_begin = max(blocks.begin, (first_key(row + rows - 1) + kBlockN - 1) / kBlockN);
    blocks.whole_end = row + rows <= q_length ? (last_key(row) + 1) / kBlockN : 0;
    return blocks;
  }

  // The blocks of kBlockM queries that see some of the keys [key, key + keys).
  template <int kBlockM>
  __device__ QueryBlocks query_blocks(int key, int keys) const {
    const int end = min(key + keys, kv_length);
    const int first = first_query(key), last = end <= key ? -1 : last_query(end - 1);
    const int start = first / kBlockM * kBlockM;
    return {start, last < first ? 0 : (last - start) / kBlockM + 1};
  }

  // The keys that every row of [row, row + rows) sees.
  __device__ KeyRange seen_by_all(int row, int rows) const {
    if (row + rows > q_length) return {0, 0};
    return {row + rows - 1 + lowest, min(kv_length, row + highest + 1)};
  }

  // Does every row of [row, row + rows) see every key of [key, key + keys)?
  __device__ bool covers(int row, int rows, int key, int keys) const {
    return row + rows <= q_length && key + keys <= kv_length && row + rows - 1 + lowest <= key &&
           key + keys - 1 <= row + highest;
  }

  // Does no row of [row, row + rows) see a key of [key, key + keys)?
  __device__ bool hides(int row, int rows, int key, int keys) const {
    return row >= q_length || key >= kv_length || key > min(row + rows, q_length) - 1 + highest ||
           key + keys - 1 < row + lowest;
  }

 private:
  __device__ static int clamp(int value, int low, int high) { return max(low, min(value, high)); }
  __device__ static int saturate(int64_t value) {
    return static_cast<int>(max(int64_t{-kFar}, min(value, int64_t{kFar})));
  }
  __device__ static int length(const int32_t* lengths, int batch, int64_t full) {
    return lengths ? clamp(lengths[batch], 0, static_cast<int>(full)) : static_cast<int>(full);
  }
};

}  // namespace jax_flash::cuda
