// What a kernel is told: sizes, options, and pointers with their shapes. Shared by the CPU and the CUDA
// kernels, so it includes neither XLA nor CUDA headers.
//
// Letters: B batch, T query length, S key length, N query heads, K key heads, H head dim, Hv value head dim.
// Every array is dense and row-major.
#pragma once

#include <cstdint>

namespace jax_flash {

// Every dimension is below this: positions and differences of positions are ints in the kernels.
inline constexpr int64_t kMaxSize = int64_t{1} << 29;

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64, kBool };

struct Options {
#define OPTION(type, name) type name;
#include "options.def"
#undef OPTION
};

// An array [B, N, T, S]. An axis that has size 1, and stands for all, has stride 0.
struct PairArray {
  const void* data;  // null when absent
  DType dtype;
  int64_t batch_stride, head_stride, row_stride, key_stride;  // in elements

  explicit operator bool() const { return data != nullptr; }
};

// Blocks of this many rows or keys are the units in which a mask or segments are looked at.
inline constexpr int64_t kVisibilityBlock = 64;

// Of the CUDA kernels, where there is a mask or there are segments; N' is N where the mask differs between
// heads, else 1; M and U are T and S in blocks.
struct VisibilityWorkspace {
  int64_t num_heads;    // N'
  uint8_t* visibility;  // [B, N', M, U]
  uint32_t* lists;      // [B, N', M * U + M + U]: the visible blocks of each row or of each column

  // The mask as bits, 64 keys of a query, or 64 queries of a key, in two words.
  struct Bits {
    uint32_t* words;  // [B, N, T, 2 U], of the keys [B, N, S, 2 M]; axes of size 1 as of the mask, with one
                      // block for an axis that has size 1; null: there are none
    int64_t batch_stride, head_stride, row_stride;
    int word_step;  // 0 where the mask has size 1 along a row
  } of_queries, of_keys;
};

struct AttentionParams {
  DType dtype;  // of q, k, v, out and their gradients
  int64_t batch;
  int64_t seqlen_q;
  int64_t seqlen_kv;
  int64_t num_heads;
  int64_t num_kv_heads;  // divides num_heads: query head n reads key head n / (num_heads / num_kv_heads)
  int64_t head_dim;
  int64_t head_dim_v;
  Options options;

  const void* q;  // [B, T, N, H]
  const void* k;  // [B, S, K, H]
  const void* v;  // [B, S, K, Hv]

  // Optional operands: null when absent.
#define OPERAND(type, name, ...) type name;
#include "operands.def"
#undef OPERAND

  // Workspace of the CUDA kernels.
  VisibilityWorkspace visible;
  int32_t* tile_counter;  // [1], for 16-bit dtypes; null: there is none
};

struct ForwardParams : AttentionParams {
  void* out;  // [B, T, N, Hv]
  void* lse;  // [B, T, N], float32 (float64 for float64), natural log; -inf for a row that sees no key
};

// Statistics of queries have T rounded up to this many rows: whole blocks of every CUDA kernel.
inline constexpr int64_t kStatsRows = 128;

struct BackwardParams : AttentionParams {
  const void* out;   // [B, T, N, Hv]
  const void* lse;   // [B, T, N], as the forward kernel wrote it
  const void* dout;  // [B, T, N, Hv]
  const void* dlse;  // [B, T, N], lse's dtype; null: zero

  void* dq;  // [B, T, N, H]
  void* dk;  // [B, S, K, H]
  void* dv;  // [B, S, K, Hv]

  // Instead of these three, of the pass that gives it: sums of the gradient of bias or alibi_slopes, in lse's
  // dtype. [B', N', T, S], each the sum over B / B' batch elements and N / N' heads; or, where the bias has
  // no T or no S, [B, N, T / rows, S / keys] rounded up, with blocks of 64 of what it does not have.
  void* dbias;
  int64_t dbias_batch, dbias_num_heads;  // B', N'
  int64_t dbias_rows, dbias_keys;

  // Workspace of the CUDA kernels.
  float* delta;     // [B, N, T rounded up to kStatsRows]: rowsum(dout * out) - dlse
  float* lse_log2;  // the same: lse * log2(e), made safe for exp2
  float* dq_accum;  // [B, T', N, H], T' = T rounded up to 16: room for 16-bit dq's sums, in the order that
                    // suits the kernel; null where there is none

  // Is dq left to a kernel of its own, which needs no sums in memory? When deterministic, and where there is
  // no room for them.
  bool leaves_dq;
};

}  // namespace jax_flash
