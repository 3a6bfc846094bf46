// ALiBi: a bias of -slope |i + query_offset - j| that is computed, not read.
#pragma once

#include "accumulator.cuh"
#include "pairs/head.cuh"
#include "ptx/memory.h"
#include "softmax.cuh"

namespace jax_flash::cuda {

// i + query_offset - j for a lane's first accumulator: an integer, exact in float32 up to 2^24.
template <class Pairs>
__device__ __forceinline__ typename Pairs::Number alibi_distance(const Pairs& pairs, int row0, int column0) {
  uint32_t first_row = row0 + accumulator_row(0, 0), first_column = column0 + accumulator_column(0, 0);
  // Rather computed again for each block than spilled.
  ptx::make_opaque(first_row);
  ptx::make_opaque(first_column);
  const int row = static_cast<int>(first_row), column = static_cast<int>(first_column);
  return static_cast<typename Pairs::Number>((Pairs::kTransposed ? column - row : row - column) +
                                             pairs.head.query_offset);
}

// What to add to that for accumulator i of tile nt.
template <class Pairs>
__device__ constexpr typename Pairs::Number alibi_distance_step(int nt, int i) {
  const int row = 8 * (i / 2), column = 8 * nt + i % 2;
  return static_cast<typename Pairs::Number>(Pairs::kTransposed ? column - row : row - column);
}

// x = score * multiplier + bias * bias_multiplier.
template <class Number, int kNTiles, class Pairs>
__device__ __forceinline__ void add_alibi(Number (&scores)[kNTiles][4], const Pairs& pairs,
                                          const LogitScaleOf<Number>& logit, int row0, int column0) {
  const Number distance = alibi_distance(pairs, row0, column0),
               factor = pairs.head.slope * logit.bias_multiplier;
#pragma unroll
  for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[nt][i] =
          fma(scores[nt][i], logit.multiplier, factor * fabs(distance + alibi_distance_step<Pairs>(nt, i)));
    }
  }
}

}  // namespace jax_flash::cuda
