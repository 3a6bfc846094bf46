// Pairs whose rows are all query heads of a key head (group_rows.cuh). What differs between heads is found
// for each row: these functions take the place of those for one head.
#pragma once

#include <cstdint>

#include "accumulator.cuh"
#include "group_rows.cuh"
#include "pairs/head.cuh"
#include "pairs/mask_bits.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda {

// `head` is the first query head's. There is no dropout: one draw decides about two queries of a head, which
// are not two rows of a lane here.
struct GroupPairs : Pairs<false> {
  GroupRows rows;

  __device__ __forceinline__ GroupPairs(const AttentionParams& params, const PairOptions& options, int batch,
                                        int kv_head, const GroupRows& rows)
      : Pairs<false>(params, options, batch, kv_head * rows.group), rows(rows) {}

  // Rows beyond the end repeat the last row.
  __device__ __forceinline__ int existing_row(int row) const { return min(row, rows.count - 1); }
};

__device__ __forceinline__ const char* bias_row(const GroupPairs& pairs, int bytes, int row0, int column0,
                                                int h) {
  const PairArray& bias = pairs.params.bias;
  const int row = pairs.existing_row(row0 + accumulator_row(0, h));
  const int64_t key = column0 + accumulator_column(0, 0);
  return pairs.head.bias + (pairs.rows.head(row) * bias.head_stride +
                            pairs.rows.query(row) * bias.row_stride + key * bias.key_stride) *
                               bytes;
}

template <int kNTiles>
__device__ __forceinline__ void add_alibi(float (&scores)[kNTiles][4], const GroupPairs& pairs,
                                          const LogitScale& logit, int row0, int column0) {
  const float* slopes = static_cast<const float*>(pairs.params.alibi_slopes) + pairs.head.index;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = pairs.existing_row(row0 + accumulator_row(0, h));
    const float factor = -__ldg(slopes + pairs.rows.head(row)) * logit.bias_multiplier;
    const float distance = static_cast<float>(pairs.rows.query(row) - column0 - accumulator_column(0, 0) +
                                              pairs.head.query_offset);
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& x = scores[nt][2 * h + c];
        x = fmaf(x, logit.multiplier, factor * fabsf(distance - (8 * nt + c)));
      }
    }
  }
}

__device__ __forceinline__ const uint32_t* mask_row(const GroupPairs& pairs, int row0, int h) {
  const int row = pairs.existing_row(row0 + accumulator_row(0, h));
  return pairs.head.mask_words + pairs.rows.head(row) * pairs.mask().head_stride +
         pairs.rows.query(row) * pairs.mask().row_stride;
}

__device__ __forceinline__ int32_t segment_of_row(const GroupPairs& pairs, int row) {
  return __ldg(pairs.head.row_ids + pairs.rows.query(pairs.existing_row(row)));
}

}  // namespace jax_flash::cuda
