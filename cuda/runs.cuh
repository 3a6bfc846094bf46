// From a warp's accumulators to rows in global memory: runs of neighboring columns.
#pragma once

#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"

namespace jax_flash::cuda {

// The number of neighboring columns that a lane holds in a row of a product whose b is an MnMajorB.
template <class Arithmetic>
inline constexpr int kRunColumns = kMultiplies16Bit<Arithmetic> ? 2 : 4;

// Calls f(column, values) for each such run in row half (mt, h).
template <class Arithmetic, int kMTiles, int kNTiles, class F>
__device__ __forceinline__ void for_each_run(const typename Arithmetic::Sum (&acc)[kMTiles][kNTiles][4],
                                             int mt, int h, F f) {
  const int t = lane_id() % 4;
  if constexpr (kMultiplies16Bit<Arithmetic>) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
      const float values[kRunColumns<Arithmetic>] = {acc[mt][nt][2 * h], acc[mt][nt][2 * h + 1]};
      f(8 * nt + 2 * t, values);
    }
  } else if constexpr (kIs64Bit<Arithmetic>) {
#pragma unroll
    for (int group = 0; group < kNTiles / 2; ++group) {
      const double values[kRunColumns<Arithmetic>] = {
          acc[mt][2 * group][2 * h], acc[mt][2 * group + 1][2 * h], acc[mt][2 * group][2 * h + 1],
          acc[mt][2 * group + 1][2 * h + 1]};
      f(16 * group + 4 * t, values);
    }
  } else {
#pragma unroll
    for (int group = 0; group < kNTiles / 4; ++group) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float values[kRunColumns<Arithmetic>] = {
            acc[mt][4 * group][2 * h + c], acc[mt][4 * group + 1][2 * h + c],
            acc[mt][4 * group + 2][2 * h + c], acc[mt][4 * group + 3][2 * h + c]};
        f(32 * group + 8 * t + 4 * c, values);
      }
    }
  }
}

// Writes factor * values, or zeros unless the row `counts`, to neighboring columns of a row, as far as they
// are below head_dim.
template <class Arithmetic, int kCount>
__device__ __forceinline__ void store_run(typename Arithmetic::Element* row, int column, int head_dim,
                                          bool counts, typename Arithmetic::Sum factor,
                                          const typename Arithmetic::Sum (&values)[kCount]) {
  using Element = typename Arithmetic::Element;
  typename Arithmetic::Sum scaled[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) scaled[i] = counts ? values[i] * factor : 0;
  // Rows start at multiples of head_dim.
  if (head_dim % kCount == 0) {
    if (column >= head_dim) return;
    if constexpr (kIs16Bit<Arithmetic>) {
      *reinterpret_cast<uint32_t*>(row + column) = pack<Arithmetic>(scaled[0], scaled[1]);
    } else if constexpr (kIs64Bit<Arithmetic>) {
#pragma unroll
      for (int i = 0; i < kCount; i += 2) {
        *reinterpret_cast<double2*>(row + column + i) = make_double2(scaled[i], scaled[i + 1]);
      }
    } else if constexpr (kCount == 2) {
      *reinterpret_cast<float2*>(row + column) = make_float2(scaled[0], scaled[1]);
    } else {
      *reinterpret_cast<float4*>(row + column) = make_float4(scaled[0], scaled[1], scaled[2], scaled[3]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (column + i < head_dim) row[column + i] = static_cast<Element>(scaled[i]);
  }
}

}  // namespace jax_flash::cuda
