// Segments: a query sees only keys with its own segment id.
#pragma once

#include <cstdint>

#include "accumulator.cuh"
#include "pairs/bits.cuh"
#include "pairs/head.cuh"

namespace jax_flash::cuda {

// The segment id of a row; rows beyond the end repeat the last row.
template <class Pairs>
__device__ __forceinline__ int32_t segment_of_row(const Pairs& pairs, int row) {
  return __ldg(pairs.head.row_ids + min(row, pairs.row_limit() - 1));
}

// Clears the bits of pairs whose segment ids differ, in rows row0.. and columns column0... Does nothing
// without segments.
template <int kNTiles, class Pairs>
__device__ __forceinline__ void clear_other_segments(PairBits<kNTiles>& bits, const Pairs& pairs, int row0,
                                                     int column0) {
  if (!pairs.head.row_ids) return;
  const int32_t* column_ids = pairs.head.column_ids + column0 + accumulator_column(0, 0);
  const int columns = pairs.column_limit() - column0 - accumulator_column(0, 0);
  int32_t row_id[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) row_id[h] = segment_of_row(pairs, row0 + accumulator_row(0, h));
  PairBits<kNTiles> equal{0};
  // Four tiles at a time: there are no registers for more ids.
#pragma unroll 1
  for (int first = 0; first < kNTiles; first += 4) {
    PairBits<kNTiles> four{0};
#pragma unroll
    for (int nt = 0; nt < min(4, kNTiles); ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int column = 8 * (first + nt) + c;
        const int32_t id = column < columns ? __ldg(column_ids + column) : 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) four.set(nt, 2 * h + c, id == row_id[h]);
      }
    }
    equal.bits |= four.bits << PairBits<kNTiles>::position(first, 0);
  }
  bits.bits &= equal.bits;
}

}  // namespace jax_flash::cuda
