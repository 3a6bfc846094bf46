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

// Loads the words for rows row0.. and columns column0... Does nothing without a mask.
template <int kNTiles, class Pairs>
__device__ __forceinline__ void load_mask_words(MaskWords<kNTiles>& mask, const Pairs& pairs, int row0,
                                                int column0) {
  if (!pairs.head.mask_words) return;
  const VisibilityWorkspace& visible = pairs.params.visible;
  const VisibilityWorkspace::Bits& bits = Pairs::kTransposed ? visible.of_keys : visible.of_queries;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = min(row0 + accumulator_row(0, h), pairs.row_limit() - 1);
    const uint32_t* words = pairs.head.mask_words + row * bits.row_stride + column0 / 32 * bits.word_step;
#pragma unroll
    for (int i = 0; i < MaskWords<kNTiles>::kWords; ++i) mask.words[h][i] = __ldg(words + i * bits.word_step);
  }
}

// The pairs that the mask leaves visible; all, without a mask.
template <int kNTiles, class Pairs>
__device__ __forceinline__ PairBits<kNTiles> mask_bits(const MaskWords<kNTiles>& mask, const Pairs& pairs,
                                                       int column0) {
  static_assert(kNTiles <= 8);
  PairBits<kNTiles> result{~0u};
  if (pairs.head.mask_words) {
    constexpr uint32_t kOfLane = 0x03030303;  // of the lanes that hold columns 0 and 1 of each tile
    const int shift = column0 % 32 + accumulator_column(0, 0);
    result.bits = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < MaskWords<kNTiles>::kWords; ++i) {
        result.bits |= (mask.words[h][i] >> shift & kOfLane) << (4 * h + 2 * i);
      }
    }
  }
  return result;
}

}  // namespace jax_flash::cuda
