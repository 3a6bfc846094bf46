// Masking: overwrites the hidden pairs of a warp's tile (accumulator.cuh), scores with -infinity and
// probabilities and gradients with 0.
//
// fill_before, fill_behind and fill_hidden apply each row's interval of keys, of a Mask (mask.cuh) or a
// GroupMask (group_rows.cuh), fill_unseen of a transposed tile; fill_unset applies a bit for each pair
// (pairs/bits.cuh).
#pragma once

#include <type_traits>

#include "accumulator.cuh"
#include "pairs/bits.cuh"

namespace jax_flash::cuda {

// Fills the keys before the first one that a row sees, in a tile of rows m_start.. and keys n_start...
template <class RowMask, class Number, int kMTiles, int kNTiles>
__device__ __forceinline__ void fill_before(Number (&scores)[kMTiles][kNTiles][4], const RowMask& mask,
                                            int m_start, int n_start, std::type_identity_t<Number> value) {
  // Relative to this lane's first column, so that each element compares with a constant.
  int first[kMTiles][2];
  for_each_accumulator_row(first, [&](int mt, int h) {
    first[mt][h] = mask.first_key(m_start + accumulator_row(mt, h)) - n_start - accumulator_column(0, 0);
  });
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    if (8 * nt + c < first[mt][h]) scores[mt][nt][2 * h + c] = value;
  });
}

// Fills the keys behind the last one that a row sees.
template <class RowMask, class Number, int kMTiles, int kNTiles>
__device__ __forceinline__ void fill_behind(Number (&scores)[kMTiles][kNTiles][4], const RowMask& mask,
                                            int m_start, int n_start, std::type_identity_t<Number> value) {
  int last[kMTiles][2];  // relative to this lane's first column
  for_each_accumulator_row(last, [&](int mt, int h) {
    last[mt][h] = mask.last_key(m_start + accumulator_row(mt, h)) - n_start - accumulator_column(0, 0);
  });
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    if (8 * nt + c > last[mt][h]) scores[mt][nt][2 * h + c] = value;
  });
}

// Fills the keys on both sides.
template <class RowMask, class Number, int kMTiles, int kNTiles>
__device__ __forceinline__ void fill_hidden(Number (&scores)[kMTiles][kNTiles][4], const RowMask& mask,
                                            int m_start, int n_start, std::type_identity_t<Number> value) {
  fill_before(scores, mask, m_start, n_start, value);
  fill_behind(scores, mask, m_start, n_start, value);
}

// Of a transposed tile, [keys, queries], fills what 8 queries do not see: in tile `nt` of those from m_start
// on, with a warp's keys from n_start on.
template <class RowMask>
__device__ __forceinline__ void fill_unseen(float (&tile)[4], int nt, const RowMask& mask, int n_start,
                                            int m_start, float value) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int key = n_start + accumulator_row(0, h);
    const int first = mask.first_query(key), last = key < mask.kv_length ? mask.last_query(key) : -1;
    // Less this lane's first column, so that each element compares with a constant.
    const int column0 = m_start + accumulator_column(0, 0);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      if (8 * nt + c < first - column0 || 8 * nt + c > last - column0) tile[2 * h + c] = value;
    }
  }
}

// Fills the pairs whose bit is not set.
template <class Number, int kMTiles, int kNTiles>
__device__ __forceinline__ void fill_unset(Number (&scores)[kMTiles][kNTiles][4],
                                           const PairBits<kNTiles> (&bits)[kMTiles],
                                           std::type_identity_t<Number> value) {
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    if (!bits[mt].test(nt, 2 * h + c)) scores[mt][nt][2 * h + c] = value;
  });
}

}  // namespace jax_flash::cuda
