// The parts of cuda/ that are plain arithmetic, compiled for the host: masks and tile sizes, compared with
// their definitions pair by pair. Prints the first failures and returns 1 if there are any. See
// test_cuda_on_host.py.
#include <cstdint>
#include <cstdio>
#include <random>

#define __device__
#define __host__
#define __forceinline__ inline

namespace jax_flash::cuda {
template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
}  // namespace jax_flash::cuda

#include "group_rows.cuh"
#include "mask.cuh"
#include "tiles.h"

namespace {

int failures = 0;

// EXPECT(condition, format, numbers that say where...)
#define EXPECT(condition, ...)                   \
  do {                                           \
    if (!(condition) && ++failures <= 10) {      \
      std::printf("not true: %s: ", #condition); \
      std::printf(__VA_ARGS__);                  \
      std::printf("\n");                         \
    }                                            \
  } while (false)

using jax_flash::cuda::GroupMask;
using jax_flash::cuda::GroupRows;
using jax_flash::cuda::KeyBlocks;
using jax_flash::cuda::Mask;
using jax_flash::cuda::QueryBlocks;

constexpr int kBlock = 4;

// A random mask of few rows and keys, with its definition.
struct Case {
  jax_flash::AttentionParams params = {};
  int32_t q_length, kv_length, offset;

  explicit Case(std::mt19937& random) {
    const auto below = [&](int limit) { return static_cast<int>(random() % limit); };
    params.batch = 1, params.num_heads = 3, params.num_kv_heads = 1;
    params.seqlen_q = 1 + below(20), params.seqlen_kv = 1 + below(24);
    params.options.is_causal = below(2);
    params.options.window_left = below(3) ? -1 : below(12);
    params.options.window_right = below(3) ? -1 : below(12);
    if (below(10) == 0) params.options.window_left = (int64_t{1} << 31) - 1;
    q_length = below(30) - 4, kv_length = below(34) - 4, offset = below(60) - 30;
    if (below(10) == 0) offset = below(2) ? INT32_MAX : INT32_MIN;
    if (below(2)) params.query_seq_lengths = &q_length;
    if (below(2)) params.key_value_seq_lengths = &kv_length;
    if (below(2)) params.query_offset = &offset;
  }
  Case(const Case&) = delete;

  bool sees(int64_t row, int64_t key) const {
    const int64_t left = params.options.window_left, right = params.options.window_right;
    const int64_t distance = key - row - (params.query_offset ? offset : 0);
    return 0 <= row && row < params.seqlen_q && 0 <= key && key < params.seqlen_kv &&
           (!params.query_seq_lengths || row < q_length) &&
           (!params.key_value_seq_lengths || key < kv_length) &&
           (!params.options.is_causal || distance <= 0) && (left < 0 || -left <= distance) &&
           (right < 0 || distance <= right);
  }
  // The number of visible pairs of these rows and keys.
  int count(int row, int rows, int key, int keys) const {
    int pairs = 0;
    for (int i = row; i < row + rows; ++i) {
      for (int j = key; j < key + keys; ++j) pairs += sees(i, j);
    }
    return pairs;
  }
};

void check_mask(const Case& one) {
  const Mask mask(one.params, 0);
  const int T = static_cast<int>(one.params.seqlen_q), S = static_cast<int>(one.params.seqlen_kv);
  int64_t most = 0;
  for (int row = 0; row < T; ++row) {
    for (int key = 0; key < S; ++key) {
      const bool sees = one.sees(row, key);
      EXPECT(sees == (mask.first_key(row) <= key && key <= mask.last_key(row)), "row %d, key %d", row, key);
      if (key < mask.kv_length) {
        EXPECT(sees == (mask.first_query(key) <= row && row <= mask.last_query(key)), "row %d, key %d", row,
               key);
      }
    }
    most = std::max<int64_t>(most, one.count(row, 1, 0, S));
  }
  EXPECT(most <= jax_flash::cuda::most_keys(one.params), "%d", static_cast<int>(most));
  if (jax_flash::cuda::is_full(one.params)) EXPECT(one.count(0, T, 0, S) == T * S, "%d, %d", T, S);
  if (jax_flash::cuda::is_triangle(one.params)) EXPECT(T == S && most == S && one.sees(0, 0), "%d, %d", T, S);

  for (int key = 0; key < S; key += 3) {
    for (int keys : {1, 3, 8}) {
      const QueryBlocks blocks = mask.query_blocks<kBlock>(key, keys);
      int begin = 0, end = 0;  // of the blocks with a visible pair
      for (int block = 0; block * kBlock < T; ++block) {
        if (!one.count(block * kBlock, kBlock, key, keys)) continue;
        if (end == 0) begin = block;
        end = block + 1;
      }
      EXPECT(blocks.count == end - begin, "keys %d + %d", key, keys);
      if (end > 0) EXPECT(blocks.start == begin * kBlock, "keys %d + %d", key, keys);
    }
  }
  for (int row = 0; row < T; row += 3) {
    for (int rows : {1, 3, 8}) {
      const KeyBlocks blocks = mask.key_blocks<kBlock>(row, rows);
      int begin = -1, end = -1;  // of the blocks with a visible pair
      for (int block = 0; block * kBlock < S + kBlock; ++block) {
        const int pairs = one.count(row, rows, block * kBlock, kBlock);
        if (pairs && begin < 0) begin = block;
        if (pairs) end = block + 1;
        EXPECT(blocks.is_whole(block) == (pairs == rows * kBlock), "rows %d + %d, block %d", row, rows,
               block);
        EXPECT(mask.covers(row, rows, block * kBlock, kBlock) == (pairs == rows * kBlock), "rows %d + %d",
               row, rows);
        const bool hides = mask.hides(row, rows, block * kBlock, kBlock);
        EXPECT(!hides || !pairs, "rows %d + %d, block %d", row, rows, block);
        // Only if the whole block is within the lengths.
        if (row + rows <= mask.q_length && (block + 1) * kBlock <= mask.kv_length) {
          EXPECT(hides || pairs, "rows %d + %d, block %d", row, rows, block);
        }
      }
      if (end >= 0) EXPECT(blocks.begin == begin && blocks.end == end, "rows %d + %d", row, rows);
    }
  }
}

// Rows of three heads that share keys.
void check_group(const Case& one) {
  const int S = static_cast<int>(one.params.seqlen_kv);
  const Mask mask(one.params, 0);
  const GroupRows rows(one.params);
  int first = S, last = -1;  // of the keys that any row sees
  for (int start = 0; start < rows.count + 4; start += 2) {
    for (int count : {1, 4, 16}) {
      const GroupMask group(mask, rows, start, count);
      const int end = std::min(start + count, rows.count);
      for (int block = 0; block * kBlock < S + kBlock; ++block) {
        int pairs = 0;
        for (int row = start; row < end; ++row) {
          pairs += one.count(rows.query(row), 1, block * kBlock, kBlock);
        }
        if (end > start) {
          EXPECT(group.covers(block * kBlock, kBlock) == (pairs == (end - start) * kBlock), "rows %d to %d",
                 start, end);
        }
        EXPECT(!group.hides(block * kBlock, kBlock) || !pairs, "rows %d to %d", start, end);
      }
    }
    for (int key = 0; start < rows.count && key < S; ++key) {
      if (!one.sees(rows.query(start), key)) continue;
      first = std::min(first, key), last = std::max(last, key);
      const GroupMask group(mask, rows, start, 1);
      EXPECT(group.first_key(start) <= key && key <= group.last_key(start), "row %d", start);
    }
  }
  EXPECT(last - first + 1 <= jax_flash::cuda::key_span(one.params), "%d to %d", first, last);
}

void check_tiles() {
  namespace sm80 = jax_flash::cuda::sm80;
  namespace sm90 = jax_flash::cuda::sm90;
  for (int head_dim : {64, 128, 256}) {
    for (int bytes : {2, 4}) {
      const sm80::ForwardTile forward = sm80::forward_tile(bytes, head_dim);
      EXPECT((forward.block_m + forward.stages * forward.block_n) * head_dim * bytes <= 99 * 1024, "%d, %d",
             bytes, head_dim);
      EXPECT(forward.block_m % (16 * forward.warps) == 0, "%d, %d", bytes, head_dim);
      for (const auto& tile :
           {sm80::backward_tile(bytes, head_dim), sm80::compact_backward_tile(bytes, head_dim)}) {
        EXPECT(tile.block_m % (16 * tile.score_warps_m) == 0 && tile.block_n % (16 * tile.dkv_warps_n) == 0 &&
                   tile.block_m % (16 * tile.dq_warps_m) == 0,
               "%d, %d", bytes, head_dim);
      }
      // One of the two fits small cards: of float32 only up to head dim 128.
      const auto fits = [&](const sm80::BackwardTile& tile) {
        const int rows = 2 * (tile.block_m + tile.block_n);  // of q, dout, k, v; then p and ds
        return rows * head_dim * bytes + 2 * tile.block_m * std::max(tile.block_n * bytes, 128) <= 99 * 1024;
      };
      const bool any_fits =
          fits(sm80::backward_tile(bytes, head_dim)) || (sm80::has_compact_backward_tile(bytes, head_dim) &&
                                                         fits(sm80::compact_backward_tile(bytes, head_dim)));
      EXPECT(any_fits == (bytes == 2 || head_dim <= 128), "%d, %d", bytes, head_dim);
      const sm80::BackwardDqTile dq = sm80::backward_dq_tile(bytes, head_dim);
      EXPECT((2 * dq.block_m + 2 * dq.stages * dq.block_n) * head_dim * bytes <= 99 * 1024, "%d, %d", bytes,
             head_dim);
      for (bool many_rows : {false, true}) {
        const sm80::DecodeTile decode = sm80::decode_tile(bytes, head_dim, many_rows);
        EXPECT((16 * decode.row_warps + decode.stages * decode.block_n) * head_dim * bytes <= 99 * 1024,
               "%d, %d", bytes, head_dim);
        EXPECT(decode.block_n % (16 * decode.key_warps) == 0 && decode.stages >= 2, "%d, %d", bytes,
               head_dim);
        // The threads load whole rows, and mask bits are in blocks of 64 keys.
        EXPECT(32 * decode.row_warps * decode.key_warps * 16 % (head_dim * bytes) == 0, "%d, %d", bytes,
               head_dim);
        EXPECT(64 % decode.block_n == 0, "%d, %d", bytes, head_dim);
      }
      const sm80::TangentTile tangent = sm80::tangent_tile(bytes, head_dim);
      EXPECT((2 * tangent.block_m + tangent.stages * tangent.block_n) * head_dim * bytes <= 99 * 1024,
             "%d, %d", bytes, head_dim);
      EXPECT(tangent.block_m % (16 * tangent.warps) == 0, "%d, %d", bytes, head_dim);
    }
  }
  for (int head_dim : {32, 64}) {
    for (bool general : {false, true}) {
      const sm80::ForwardTile tile = sm80::short_forward_tile(head_dim, general);
      EXPECT(tile.block_m == sm80::kShortRows && tile.block_n == sm80::kShortRows, "%d", head_dim);
      // Several blocks fit into the multiprocessor of an A100.
      EXPECT((tile.block_m + tile.stages * tile.block_n) * head_dim * 2 * tile.blocks_per_sm <= 163 * 1024,
             "%d", head_dim);
    }
  }
  for (int head_dim : {32, 64, 128, 256}) {
    // Lists of visible blocks have blocks of 64 keys.
    EXPECT(sm90::general_forward_tile(head_dim).block_n == 64, "%d", head_dim);
    for (int64_t keys : {64, 8191, 8192, 1 << 20}) {
      EXPECT(!sm90::is_long(head_dim, keys, false) || keys >= 8192, "%d", head_dim);
    }
    for (const sm90::ForwardTile tile :
         {sm90::forward_tile(head_dim, false), sm90::forward_tile(head_dim, true),
          sm90::split_forward_tile(head_dim, false), sm90::split_forward_tile(head_dim, true),
          sm90::has_two_head_forward_tile(head_dim) ? sm90::two_head_forward_tile(head_dim)
                                                    : sm90::forward_tile(head_dim, false)}) {
      const int columns = tile.out_columns;
      EXPECT(
          (64 * tile.consumers * tile.q_stages + 2 * tile.stages * tile.heads * tile.block_n) * head_dim * 2 +
                  64 * tile.consumers * columns * 2 <=
              227 * 1024,
          "%d", head_dim);
      EXPECT(tile.block_n % 16 == 0 && (columns == 0 || head_dim % columns == 0), "%d", head_dim);
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(0);
  for (int i = 0; i < 3000; ++i) {
    const Case one(random);
    check_mask(one);
    check_group(one);
  }
  check_tiles();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
