// Dropout: which probabilities are kept (dropout.h says by which bits).
#pragma once

#include "accumulator.cuh"
#include "dropout.h"
#include "pairs/bits.cuh"
#include "pairs/head.cuh"

namespace jax_flash::cuda {

// Of 16 rows from `row0` on and 8 kNTiles columns from `column0` on, both multiples of 16. One draw decides
// about queries r, r + 8 and keys c, c + 1, c + 8, c + 9: a lane's part of a 16 x 16 tile. Of a transposed
// tile a lane has other pairs, and needs two draws, half of each.
template <int kNTiles, class Pairs>
__device__ __forceinline__ PairBits<kNTiles> kept_bits(const Pairs& pairs, int row0, int column0) {
  static_assert(kNTiles % 2 == 0 && kNTiles <= 8);
  const Dropout dropout{{__ldg(pairs.head.seeds), __ldg(pairs.head.seeds + 1)},
                        __ldg(pairs.head.seeds + 2),
                        pairs.options.drop_threshold};
  PairBits<kNTiles> result{0};
  const int row = row0 + accumulator_row(0, 0);
#pragma unroll
  for (int nt = 0; nt < kNTiles; nt += 2) {
    const int column = column0 + accumulator_column(nt, 0);
    if constexpr (Pairs::kTransposed) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const Dropout::Bits bits = dropout.bits(column + c, row);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          result.set(nt + i / 2, i % 2 * 2 + c, dropout.keeps(bits.decision(i / 2, i % 2, row % 2)));
        }
      }
    } else {
      const Dropout::Bits bits = dropout.bits(row, column);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        result.set(nt + i / 4, i % 4, dropout.keeps(bits.decision(i % 4 / 2, i / 4, i % 2)));
      }
    }
  }
  return result;
}

// The same of all of a warp's rows.
template <class Pairs, int kMTiles, int kNTiles>
__device__ __forceinline__ void draw_kept(PairBits<kNTiles> (&bits)[kMTiles], const Pairs& pairs, int row0,
                                          int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) bits[mt] = kept_bits<kNTiles>(pairs, row0 + 16 * mt, column0);
}

}  // namespace jax_flash::cuda
