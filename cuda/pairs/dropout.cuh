// Dropout: which probabilities are kept. dropout.h defines the random bits.
#pragma once

#include "accumulator.cuh"
#include "dropout.h"
#include "pairs/bits.cuh"
#include "pairs/head.cuh"

namespace jax_flash::cuda {

// The kept pairs of rows row0.. and columns column0.., both multiples of 16. One draw decides about queries r
// and r + 8 and keys c, c + 1, c + 8 and c + 9: a lane's part of a 16 x 16 tile. In a transposed tile a lane
// holds other pairs, and uses half of each of two draws.
template <int kNTiles, class Pairs>
__device__ __forceinline__ PairBits<kNTiles> kept_bits(const Pairs& pairs, int row0, int column0) {
  static_assert(kNTiles % 2 == 0 && kNTiles <= 8);
  const uint32_t* seeds = pairs.params.dropout_seeds + int64_t{kSeedWords} * pairs.head.index;
  const Dropout dropout{
      {__ldg(seeds), __ldg(seeds + 1)}, __ldg(seeds + 2), 0, 0, pairs.options.drop_threshold};
  PairBits<kNTiles> result{0};
  // The first row and column of the call are added here: in `dropout` they would take two registers.
  const uint32_t row = row0 + accumulator_row(0, 0) + __ldg(seeds + (Pairs::kTransposed ? 4 : 3));
  const uint32_t first_column = column0 + __ldg(seeds + (Pairs::kTransposed ? 3 : 4));
#pragma unroll
  for (int nt = 0; nt < kNTiles; nt += 2) {
    const uint32_t column = first_column + accumulator_column(nt, 0);
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

// The same for all of a warp's rows.
template <class Pairs, int kMTiles, int kNTiles>
__device__ __forceinline__ void draw_kept(PairBits<kNTiles> (&bits)[kMTiles], const Pairs& pairs, int row0,
                                          int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) bits[mt] = kept_bits<kNTiles>(pairs, row0 + 16 * mt, column0);
}

}  // namespace jax_flash::cuda
