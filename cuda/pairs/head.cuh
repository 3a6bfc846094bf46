// The pair options of one batch element and query head: where its arrays begin, and its numbers.
#pragma once

#include <cstdint>
#include <type_traits>

#include "pairs/options.cuh"
#include "params.h"

namespace jax_flash::cuda {

// Rows are rows of scores: queries, or keys where kTransposed. Number is the scores' type.
template <bool kTransposed, class Number_ = float>
struct PairHead {
  using Number = Number_;
  const char* bias;            // [T, S]; read only where options.bias_format is not kNone
  const uint32_t* mask_words;  // [rows, columns / 32], the mask as bits; null: no mask
  const int32_t* row_ids;      // [rows], segment ids; null: no segments
  const int32_t* column_ids;   // [columns], segment ids
  int index;                   // of the head, in [B, N]
  Number scale_factor = 1;
  Number slope = 0;      // of ALiBi, negated
  int query_offset = 0;  // added to a query's position by ALiBi

  __device__ __forceinline__ PairHead(const AttentionParams& params, int batch, int head) {
    const PairArray& array = params.bias;
    bias = static_cast<const char*>(array.data) +
           (batch * array.batch_stride + head * array.head_stride) * bytes_of(array.dtype);
    const VisibilityWorkspace::Bits& bits = kTransposed ? params.visible.of_keys : params.visible.of_queries;
    mask_words = params.mask ? bits.words + batch * bits.batch_stride + head * bits.head_stride : nullptr;
    const int32_t* query_ids =
        params.has_segments() ? params.query_segment_ids + batch * params.seqlen_q : nullptr;
    const int32_t* key_ids =
        params.has_segments() ? params.key_value_segment_ids + batch * params.seqlen_kv : nullptr;
    row_ids = kTransposed ? key_ids : query_ids;
    column_ids = kTransposed ? query_ids : key_ids;
    index = batch * static_cast<int>(params.num_heads) + head;
    if (params.scale_factor) scale_factor = static_cast<const Number*>(params.scale_factor)[batch];
    if (!params.alibi_slopes) return;
    slope = -static_cast<const Number*>(params.alibi_slopes)[index];
    if (params.query_offset) query_offset = max(-kFar, min(params.query_offset[batch], kFar));
  }

 private:
  // Only where Number is double may a bias be float64.
  __device__ __forceinline__ static int bytes_of(DType dtype) {
    if (std::is_same_v<Number, double> && dtype == DType::kFloat64) return 8;
    return dtype == DType::kFloat32 ? 4 : 2;
  }
};

// What every function on a warp's scores takes: the call's parameters and options, and one batch element and
// query head. `Head` may be a reference to a PairHead in shared memory.
template <bool kTransposed_, class Head = PairHead<kTransposed_>>
struct Pairs {
  static constexpr bool kTransposed = kTransposed_;  // are rows of scores keys?
  using Number = typename std::remove_cvref_t<Head>::Number;

  const AttentionParams& params;
  const PairOptionsOf<Number>& options;
  Head head;

  __device__ __forceinline__ Pairs(const AttentionParams& params, const PairOptionsOf<Number>& options,
                                   Head head)
      : params(params), options(options), head(head) {}
  __device__ __forceinline__ Pairs(const AttentionParams& params, const PairOptionsOf<Number>& options,
                                   int batch, int head)
      : Pairs(params, options, PairHead<kTransposed, Number>(params, batch, head)) {}

  __device__ __forceinline__ bool has_dropout() const { return options.has_dropout; }

  // The mask's bits, in this order of rows and columns.
  __device__ __forceinline__ const VisibilityWorkspace::Bits& mask() const {
    return kTransposed ? params.visible.of_keys : params.visible.of_queries;
  }

  // The numbers of rows and columns of all scores.
  __device__ __forceinline__ int row_limit() const {
    return static_cast<int>(kTransposed ? params.seqlen_kv : params.seqlen_q);
  }
  __device__ __forceinline__ int column_limit() const {
    return static_cast<int>(kTransposed ? params.seqlen_q : params.seqlen_kv);
  }
};

// Those of queries, by the type of their scores.
template <class Number>
using QueryPairs = Pairs<false, PairHead<false, Number>>;

}  // namespace jax_flash::cuda
