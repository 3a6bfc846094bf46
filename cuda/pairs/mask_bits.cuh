// The mask [B, N, T, S], read as bits: words of 32 columns, which visibility.cu has written.
#pragma once

#include <cstdint>

#include "accumulator.cuh"
#include "pairs/bits.cuh"
#include "pairs/head.cuh"
#include "params.h"

namespace jax_flash::cuda {

// The words that cover 8 kNTiles columns of a lane's two rows.
template <int kNTiles>
struct MaskWords {
  static constexpr int kWords = (kNTiles + 3) / 4;
  uint32_t words[2][kWords];
};

// Where the words of the h-th of a lane's two rows begin; rows beyond the end repeat the last row. Only if
// there is a mask.
template <class Pairs>
__device__ __forceinline__ const uint32_t* mask_row(const Pairs& pairs, int row0, int h) {
  const int row = min(row0 + accumulator_row(0, h), pairs.row_limit() - 1);
  return pairs.head.mask_words + row * pairs.mask().row_stride;
}

// Loads those of a row's words that cover columns column0...
template <class Pairs, int kWords>
__device__ __forceinline__ void load_words(uint32_t (&words)[kWords], const Pairs& pairs, const uint32_t* row,
                                           int column0) {
  const int step = pairs.mask().word_step;
  row += column0 / 32 * step;
#pragma unroll
  for (int i = 0; i < kWords; ++i) words[i] = __ldg(row + i * step);
}

// The same for both rows of a lane.
template <int kNTiles, class Pairs>
__device__ __forceinline__ void load_mask_words(MaskWords<kNTiles>& mask, const Pairs& pairs, int row0,
                                                int column0) {
#pragma unroll
  for (int h = 0; h < 2; ++h) load_words(mask.words[h], pairs, mask_row(pairs, row0, h), column0);
}

// The pairs that the mask leaves visible.
template <int kNTiles>
__device__ __forceinline__ PairBits<kNTiles> mask_bits(const MaskWords<kNTiles>& mask, int column0) {
  static_assert(kNTiles <= 8);
  constexpr uint32_t kOfLane = 0x03030303;  // of the lanes that hold columns 0 and 1 of each tile
  const int shift = column0 % 32 + accumulator_column(0, 0);
  PairBits<kNTiles> result{0};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < MaskWords<kNTiles>::kWords; ++i) {
      result.bits |= (mask.words[h][i] >> shift & kOfLane) << (4 * h + 2 * i);
    }
  }
  return result;
}

}  // namespace jax_flash::cuda
