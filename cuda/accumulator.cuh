// Where a lane's part of a product lies: float d[kMTiles][kNTiles][4], element 2h + c of tile (mt, nt) being
// row accumulator_row(mt, h), column accumulator_column(nt, c) of the warp's part. mma.sync has it so, and so
// has each warp of a wgmma, whose rows are 16 (kMTiles = 1).
#pragma once

#include "mask.cuh"

namespace jax_flash::cuda {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

__device__ __forceinline__ int accumulator_row(int mt, int h) { return 16 * mt + 8 * h + lane_id() / 4; }

__device__ __forceinline__ int accumulator_column(int nt, int c) { return 8 * nt + 2 * (lane_id() % 4) + c; }

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void clear(float (&acc)[kMTiles][kNTiles][4]) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[mt][nt][i] = 0;
    }
  }
}

// Calls f(mt, h, nt, c) for each accumulator 2h + c of tile (mt, nt), row by row.
template <int kMTiles, int kNTiles, class F>
__device__ __forceinline__ void for_each_accumulator(const float (&)[kMTiles][kNTiles][4], F f) {
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

// Replaces in `scores`, of rows m_start.. and keys n_start.., the keys before those that a row sees.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void fill_before(float (&scores)[kMTiles][kNTiles][4], const Mask& mask,
                                            int m_start, int n_start, float value) {
  int first[kMTiles][2];  // less this lane's first column, so that each element compares with a constant
  for_each_accumulator_row(first, [&](int mt, int h) {
    first[mt][h] = mask.first_key(m_start + accumulator_row(mt, h)) - n_start - accumulator_column(0, 0);
  });
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    if (8 * nt + c < first[mt][h]) scores[mt][nt][2 * h + c] = value;
  });
}

// The same for the keys behind those that a row sees.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void fill_behind(float (&scores)[kMTiles][kNTiles][4], const Mask& mask,
                                            int m_start, int n_start, float value) {
  int last[kMTiles][2];
  for_each_accumulator_row(last, [&](int mt, int h) {
    last[mt][h] = mask.last_key(m_start + accumulator_row(mt, h)) - n_start - accumulator_column(0, 0);
  });
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    if (8 * nt + c > last[mt][h]) scores[mt][nt][2 * h + c] = value;
  });
}

template <int kMTiles, int kNTiles>
__device__ __forceinline__ void fill_hidden(float (&scores)[kMTiles][kNTiles][4], const Mask& mask,
                                            int m_start, int n_start, float value) {
  fill_before(scores, mask, m_start, n_start, value);
  fill_behind(scores, mask, m_start, n_start, value);
}

}  // namespace jax_flash::cuda
