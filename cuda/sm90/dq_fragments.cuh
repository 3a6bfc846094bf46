// dq while it is summed in float32: in the order in which a product's accumulators lie in a warp, so that
// what a warp adds is contiguous (rows of 128 bytes apart were measured to cost 5 % of the backward pass).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "accumulator.cuh"
#include "launch.h"
#include "params.h"

namespace jax_flash::cuda::sm90 {

// [B, N, ceil(T / 16), H / 8] tiles of 16 rows and 8 columns, each [32, 4]: what the lanes hold.
struct DqFragments {
  static constexpr int kTileRows = 16, kTileColumns = 8, kTileBytes = 4 * kTileRows * kTileColumns;
  static_assert(kDqRows % kTileRows == 0, "dq_accum must have room for whole tiles (workspace.def)");

  float* tiles;
  int num_heads;
  int row_tiles;
  int column_tiles;

  explicit DqFragments(const BackwardParams& params)
      : tiles(params.dq_accum),
        num_heads(static_cast<int>(params.num_heads)),
        row_tiles(static_cast<int>(ceil_div(params.seqlen_q, kTileRows))),
        column_tiles(static_cast<int>(params.head_dim / kTileColumns)) {}

  // Of the whole, in floats.
  static int64_t size(const BackwardParams& params) {
    return params.batch * params.num_heads * ceil_div(params.seqlen_q, kTileRows) * kTileRows *
           params.head_dim;
  }

  // The tile that begins at (row, column); those to its right follow.
  __device__ float* tile(int batch, int head, int row, int column) const {
    return tiles + (((int64_t{batch} * num_heads + head) * row_tiles + row / kTileRows) * column_tiles +
                    column / kTileColumns) *
                       (kTileBytes / 4);
  }

  // From row 0 of a head to this row, in floats.
  __device__ int64_t row_offset(int row) const {
    return int64_t{row / kTileRows} * column_tiles * (kTileBytes / 4);
  }
};

// dq = scale * dq_accum. A warp turns 16 rows and 32 columns: of each row, a quad of lanes holds 2 columns of
// every tile and ends with 8 columns of one.
template <class Element>
__global__ void __launch_bounds__(256)
    convert_fragments_kernel(const DqFragments accum, Element* dq, int batch, int seqlen_q, float scale) {
  const int groups = (accum.column_tiles + 3) / 4;
  // The last ones first: they have just been summed and are in L2.
  const int64_t index = int64_t{gridDim.x - 1 - blockIdx.x} * 8 + threadIdx.x / 32;
  const int group = static_cast<int>(index % groups),
            row_tile = static_cast<int>(index / groups % accum.row_tiles);
  const int64_t batch_and_head = index / groups / accum.row_tiles;
  if (batch_and_head >= int64_t{batch} * accum.num_heads) return;
  const int tiles = min(4, accum.column_tiles - 4 * group), lane = lane_id(), part = lane % 4;

  const float* from =
      accum.tiles + ((batch_and_head * accum.row_tiles + row_tile) * accum.column_tiles + 4 * group) *
                        (DqFragments::kTileBytes / 4);
  float4 values[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[i] = i < tiles ? __ldcs(reinterpret_cast<const float4*>(from) + 32 * i + lane) : float4{};
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // In step s lanes s apart swap: each gets its own tile's columns from the other.
    alignas(16) Element row[8];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int other = part ^ s;
      float low = 0, high = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i == other) low = h ? values[i].z : values[i].x, high = h ? values[i].w : values[i].y;
      }
      low = scale * __shfl_xor_sync(0xffffffff, low, s), high = scale * __shfl_xor_sync(0xffffffff, high, s);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (i == other) row[2 * i] = static_cast<Element>(low), row[2 * i + 1] = static_cast<Element>(high);
      }
    }
    const int position = DqFragments::kTileRows * row_tile + accumulator_row(0, h);
    if (part < tiles && position < seqlen_q) {
      const int64_t token = batch_and_head / accum.num_heads * seqlen_q + position;
      const int64_t head = batch_and_head % accum.num_heads;
      Element* to = dq + ((token * accum.num_heads + head) * accum.column_tiles + 4 * group + part) * 8;
      *reinterpret_cast<int4*>(to) = *reinterpret_cast<const int4*>(row);
    }
  }
}

template <class Element>
Status launch_convert_fragments(const BackwardParams& params, const LaunchContext& context) {
  const DqFragments accum(params);
  const int64_t warps = params.batch * params.num_heads * accum.row_tiles * ceil_div(accum.column_tiles, 4);
  return launch(convert_fragments_kernel<Element>, ceil_div(warps, 8), 256, 0, context, accum,
                static_cast<Element*>(params.dq), static_cast<int>(params.batch),
                static_cast<int>(params.seqlen_q), static_cast<float>(params.options.scale));
}

}  // namespace jax_flash::cuda::sm90
