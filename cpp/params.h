// The parameters of a kernel: sizes, options, and pointers with their shapes. CPU and CUDA kernels share
// them, so this file includes neither XLA nor CUDA headers.
//
// B is the batch size, T the query length, S the key length, N and K the numbers of query and key heads, H
// the head dim, Hv the head dim of the values. Every array is dense and row-major.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define JAX_FLASH_INLINE __host__ __device__ __forceinline__
#else
#define JAX_FLASH_INLINE inline
#endif

namespace jax_flash {

// Every dimension is smaller than this, so positions and their differences fit in an int.
inline constexpr int64_t kMaxSize = int64_t{1} << 29;

// Beyond every position. A position plus kFar does not overflow.
inline constexpr int kFar = 1 << 30;

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64, kBool };

struct Options {
#define OPTION(type, name) type name;
#include "options.def"
#undef OPTION
};

// An array broadcast to [B, N, T, S]: a broadcast dimension (size 1) has stride 0.
struct PairArray {
  const void* data;  // null when absent
  DType dtype;
  int64_t batch_stride, head_stride, row_stride, key_stride;  // in elements

  JAX_FLASH_INLINE explicit operator bool() const { return data != nullptr; }
};

// The tangents of a PairArray, one for each direction.
struct PairArrays {
  PairArray first;
  int64_t direction_bytes;  // from one direction to the next

  JAX_FLASH_INLINE explicit operator bool() const { return first.data != nullptr; }
  JAX_FLASH_INLINE PairArray operator[](int64_t direction) const {
    PairArray array = first;
    if (array) array.data = static_cast<const char*>(first.data) + direction * direction_bytes;
    return array;
  }
};

// Masks, segments and sums of dbias are processed in blocks of this many queries and keys.
inline constexpr int64_t kVisibilityBlock = 64;

// Every kernel's blocks of keys divide this many. So if a part of a sequence begins at a multiple, it has the
// blocks of the whole, and rows that see no other keys have the same bits.
inline constexpr int64_t kKeyUnit = 1920;

// The kernel for few queries takes at most this many.
inline constexpr int64_t kDecodeQueries = 16;

// Kernels of their own serve calls with at most this many queries and at most this many keys, and head dims
// up to 64; in float32, at the default precision, up to 32.
inline constexpr int64_t kShortLength = 64;

// Row statistics (delta, lse_log2) have T rounded up to a multiple of this, so every CUDA kernel reads whole
// blocks.
inline constexpr int64_t kStatsRows = 128;

// The float32 sums of gradients have T or S rounded up to a multiple of this, so Hopper's kernel
// writes whole tiles.
inline constexpr int64_t kFragmentRows = 16;

// ds that one kernel leaves for another has T and S rounded up to a multiple of this, likewise.
inline constexpr int64_t kSharedDsUnit = 128;

// Workspace of the CUDA kernels for a mask or segments; all null without them. workspace.def has the shapes.
struct VisibilityWorkspace {
  int64_t num_heads;    // of visibility and lists: N if the mask differs between heads, else 1
  uint8_t* visibility;  // for each block of queries and keys: hidden, partly or fully visible
  uint32_t* lists;      // the visible blocks of each tile of queries or of each tile of keys

  // The mask as bits, in pairs of words: the 64 keys of a block for each query, or the 64 queries for each
  // key. Broadcast dimensions keep size 1; a row that is broadcast along its length is one pair of words.
  struct Bits {
    uint32_t* words;  // null if the call does not have them
    int64_t batch_stride, head_stride, row_stride;
    int word_step;  // 0 if the mask is broadcast within a row, else 1
  } of_queries, of_keys;
};

// Workspace of Hopper's kernels for float32: inputs as scaled float16, and what scales them
// (cuda/planes.cuh). All null where those kernels do not run. workspace.def has the shapes.
struct PlaneWorkspace {
  int32_t* scales;
  uint16_t *q, *k, *v, *dout;
  float* rows;
  int64_t count;  // of planes of each array, one behind the other: 1, or 2 for three products

  JAX_FLASH_INLINE explicit operator bool() const { return scales != nullptr; }
};

// Numbers of a key head in PlaneWorkspace::scales, before those of its columns.
inline constexpr int64_t kPlaneScales = 20;  // a multiple of 4: vectors follow

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
  const void* k;  // [B, S, K, H], or [num_pages, page_size, K, H]
  const void* v;  // [B, S, K, Hv], or [num_pages, page_size, K, Hv]

  // Forward passes with page_indices: key j of a sequence is row j % page_size of a page, the one that
  // element j / page_size of its page_indices names. Those beyond a length may be anything, and are not to be
  // read. All three are 0 without page_indices.
  int64_t num_pages;           // of all sequences; together less than 2^31 keys
  int64_t page_size;           // keys of a page
  int64_t pages_per_sequence;  // P

  // Optional operands: null when absent.
#define OPERAND(type, name, ...) type name;
#include "operands.def"
#undef OPERAND

  // Workspace of the CUDA kernels: workspace.def has the shapes.
  VisibilityWorkspace visible;
  int32_t* tile_counter;  // persistent blocks draw tiles from it; null but in 16 bits and float32 backward
  PlaneWorkspace planes;

  // The page that an element of page_indices names: a wrong one does no harm.
  JAX_FLASH_INLINE int32_t page(int32_t index) const {
    const auto last = static_cast<int32_t>(num_pages - 1);
    return index < 0 ? 0 : index < last ? index : last;
  }

  JAX_FLASH_INLINE bool has_segments() const { return query_segment_ids != nullptr; }
  // Are single pairs hidden, beyond each row's interval of keys?
  JAX_FLASH_INLINE bool hides_pairs() const { return mask || has_segments(); }
  // Is something added to each pair's logit?
  JAX_FLASH_INLINE bool has_bias() const { return bias || alibi_slopes; }
};

struct ForwardParams : AttentionParams {
  void* out;  // [B, T, N, Hv]
  void* lse;  // [B, T, N], float32 (float64 for float64); -inf or the sink for a fully masked row

  // What a row's probabilities, as the backward pass computes them from lse, are to be multiplied by: 1 but
  // for the rounding of lse. [B, T, N], lse's dtype; null: not wanted.
  void* p_factor;

  // The parts into which a CUDA kernel splits the keys of each sequence, for few queries; 0: into none.
  // Python decides. Workspace of these kernels: workspace.def has the shape.
  int64_t num_key_parts;
  float* key_parts;
};

// D directions, for passes that differentiate in each of them. Their results and arguments that have D hold
// one array for each.
struct Directions {
  int64_t num_directions;  // D

  // The tangents; null: zero. The caller adds what sinks contribute.
#define TANGENT(type, name, ...) type name;
#include "tangents.def"
#undef TANGENT

  // Do the logits move, and not only the values?
  JAX_FLASH_INLINE bool moves_logits() const { return tq || tk || tscale_factor || tbias || talibi_slopes; }
};

// The derivatives of out and lse.
struct TangentParams : AttentionParams, Directions {
  const void* out;  // [B, T, N, Hv]
  const void* lse;  // [B, T, N], as the forward kernel wrote it

  void* tout;  // [D, B, T, N, Hv]
  void* tlse;  // [D, B, T, N], lse's dtype
};

struct BackwardParams : AttentionParams {
  const void* out;   // [B, T, N, Hv]
  const void* lse;   // [B, T, N], as the forward kernel wrote it
  const void* dout;  // [B, T, N, Hv]
  const void* dlse;  // [B, T, N], lse's dtype; null: zero

  void* dq;  // [B, T, N, H]
  void* dk;  // [B, S, K, H]
  void* dv;  // [B, S, K, Hv]

  // The pass for the gradient of bias or alibi_slopes has this instead of dq, dk and dv: partial sums of the
  // gradient, in lse's dtype. A bias with both T and S has [B', N', T, S], each element the sum over B / B'
  // batch elements and N / N' heads; these may have q's dtype. Otherwise the shape is [B, N, T / rows, S /
  // keys], rounded up, each element the sum over kVisibilityBlock rows, keys or both.
  void* dbias;
  DType dbias_dtype;
  int64_t dbias_batch, dbias_num_heads;  // B', N'
  int64_t dbias_rows, dbias_keys;        // 1 or kVisibilityBlock

  // Workspace of the CUDA kernels: workspace.def has the shapes.
  float* delta;     // rowsum(dout * out) - dlse; of float64 it, lse_log2 and row_tangents are doubles
  float* lse_log2;  // lse * log2(e), made safe for exp2
  float* dq_accum;  // sums of dq, in 16 bits or of one plane, in an order that suits the kernel; null if it
                    // needs none
  float* dk_parts;  // sums of dk and dv over parts of the query heads, likewise; null: no parts
  float* dv_parts;
  int64_t num_head_parts;  // of a batch element: a multiple of K that divides N; K where there are no parts
  int32_t* has_nan;        // did gradients come out as NaN? Null but in float32

  // The gradients of the logits [B, N, T, S], in q's dtype, where a row sees a key; elsewhere anything. Null:
  // not wanted.
  void* ds;

  // Whether a separate kernel computes dq, which needs no sums in memory: if the caller gave no room for the
  // sums, and in float32 if deterministic.
  bool leaves_dq;

  // Room for ds of num_shared_heads query heads at a time, S and T rounded up to kSharedDsUnit, in q's dtype,
  // by which dq takes one product more than dk and dv, not three. Null: there is none.
  void* shared_ds;
  int64_t num_shared_heads;  // whole groups
};

// The derivatives of dq, dk and dv. Of BackwardParams it has the arguments, and delta and lse_log2 of the
// workspace.
struct BackwardTangentParams : BackwardParams, Directions {
  const void* tout;   // [D, B, T, N, Hv]: the derivative of out, with what sinks contribute
  const void* tlse;   // [D, B, T, N], lse's dtype
  const void* tdout;  // [D, B, T, N, Hv]; null: zero
  const void* tdlse;  // [D, B, T, N], lse's dtype; null: zero

  void* tdq;  // [D, B, T, N, H]
  void* tdk;  // [D, B, S, K, H]
  void* tdv;  // [D, B, S, K, Hv]

  // Workspace of the CUDA kernels: tlse and the derivative of delta, in delta's order.
  float* row_tangents;
};

}  // namespace jax_flash
