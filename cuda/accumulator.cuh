// The layout of a warp's accumulators.
//
// A lane holds acc[kMTiles][kNTiles][4], of float or double. Element 2h + c of tile (mt, nt) is row
// accumulator_row(mt, h) and column accumulator_column(nt, c) of the warp's part of the product. This is the
// layout of mma.sync, and of each warp of a wgmma, which has 16 rows (kMTiles = 1).
#pragma once

namespace jax_flash::cuda {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

__device__ __forceinline__ int accumulator_row(int mt, int h) { return 16 * mt + 8 * h + lane_id() / 4; }

__device__ __forceinline__ int accumulator_column(int nt, int c) { return 8 * nt + 2 * (lane_id() % 4) + c; }

template <class Number, int kMTiles, int kNTiles>
__device__ __forceinline__ void clear(Number (&acc)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[mt][nt][i] = 0;
    }
  }
}

// Calls f(mt, h, nt, c) for accumulator 2h + c of each tile (mt, nt), row by row.
template <class Number, int kMTiles, int kNTiles, class F>
__device__ __forceinline__ void for_each_accumulator(const Number (&)[kMTiles][kNTiles][4], F f) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) f(mt, h, nt, c);
      }
    }
  }
}

// Calls f(mt, h) for each row.
template <class T, int kMTiles, class F>
__device__ __forceinline__ void for_each_accumulator_row(const T (&)[kMTiles][2], F f) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) f(mt, h);
  }
}

// The sum of `value` over kLanes neighboring lanes.
template <int kLanes, class Number>
__device__ __forceinline__ Number sum_lanes(Number value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, offset);
  }
  return value;
}

// The sum over the four lanes that share a row.
template <class Number>
__device__ __forceinline__ Number row_sum(Number value) {
  return sum_lanes<4>(value);
}

// Adds the values of the lanes that share a column.
template <class Number>
__device__ __forceinline__ Number column_sum(Number value) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
  return value;
}

}  // namespace jax_flash::cuda
