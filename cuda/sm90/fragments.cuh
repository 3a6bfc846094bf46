// Gradients while they are summed in float32: in the order in which a product's accumulators lie in a warp,
// so that what a warp writes is contiguous (written as rows of 128 bytes instead, dq's additions made the
// backward pass 5 % slower).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "accumulator.cuh"
#include "delta.cuh"
#include "launch.h"
#include "params.h"
#include "planes.cuh"
#include "ptx/grid.h"

namespace jax_flash::cuda::sm90 {

// A gradient [B, length, heads, columns] as [B, heads, ceil(length / 16), columns / 8] tiles of 16 rows and 8
// columns, each [32, 4]: what the lanes hold.
struct Fragments {
  static constexpr int kTileRows = 16, kTileColumns = 8, kTileBytes = 4 * kTileRows * kTileColumns;
  static_assert(kFragmentRows % kTileRows == 0, "there must be room for whole tiles (workspace.def)");

  float* tiles;  // null: the gradient is not summed in memory
  int batch;
  int num_heads;
  int length;
  int row_tiles;
  int column_tiles;

  Fragments(float* tiles, int64_t batch, int64_t num_heads, int64_t length, int64_t columns)
      : tiles(tiles),
        batch(static_cast<int>(batch)),
        num_heads(static_cast<int>(num_heads)),
        length(static_cast<int>(length)),
        row_tiles(static_cast<int>(ceil_div(length, kTileRows))),
        column_tiles(static_cast<int>(columns / kTileColumns)) {}

  // Of the whole, in floats.
  int64_t size() const { return int64_t{batch} * num_heads * row_tiles * column_tiles * (kTileBytes / 4); }

  // The tile that begins at (row, column); those to its right follow.
  __device__ float* tile(int batch, int head, int row, int column) const {
    return tiles + (((int64_t{batch} * num_heads + head) * row_tiles + row / kTileRows) * column_tiles +
                    column / kTileColumns) *
                       (kTileBytes / 4);
  }
};

// Writes a warp's sums [16, 8 * kTiles] to (row, column) of a head.
template <int kTiles>
__device__ __forceinline__ void write_fragments(const float (&sum)[1][kTiles][4], const Fragments& to,
                                                int batch, int head, int row, int column) {
  const int tiles = to.column_tiles - column / Fragments::kTileColumns;
  float4* tile = reinterpret_cast<float4*>(to.tile(batch, head, row, column)) + lane_id();
#pragma unroll
  for (int nt = 0; nt < kTiles; ++nt) {
    if (nt < tiles) tile[32 * nt] = {sum[0][nt][0], sum[0][nt][1], sum[0][nt][2], sum[0][nt][3]};
  }
}

// The same for every element.
struct UniformFactor {
  float value;

  __device__ __forceinline__ float operator()(int, int, int) const { return value; }
};

// From sums of products of planes (planes.cuh) to dq.
struct DqOfPlanes {
  BackwardParams params;

  __device__ __forceinline__ float operator()(int batch, int head, int position) const {
    const int num_heads = static_cast<int>(params.num_heads);
    const int group = num_heads / static_cast<int>(params.num_kv_heads);
    const PlaneScales scales(params, batch, head / group);
    const int64_t length = stats_length(params.seqlen_q);
    const PlaneRows rows(params, length);
    const int exponent = rows.ds_exponent((int64_t{batch} * num_heads + head) * length + position);
    return ldexpf(static_cast<float>(params.options.scale), scales.of_dq() - exponent);
  }
};

// gradient [B, length, heads / parts, columns] = `factor` of its (batch element, head, row) * the sum over
// every `parts` neighboring heads. A warp turns 16 rows and 32 columns: of each row, a quad of lanes holds 2
// columns of every tile and ends with 8 columns of one.
template <class Element, class Factor>
__global__ void __launch_bounds__(256)
    convert_fragments_kernel(const Fragments sums, int parts, Element* gradient, const Factor factor) {
  const int groups = (sums.column_tiles + 3) / 4, num_heads = sums.num_heads / parts;
  // The last ones first: they have just been summed and are in L2.
  const int64_t index = int64_t{gridDim.x - 1 - blockIdx.x} * 8 + threadIdx.x / 32;
  const int group = static_cast<int>(index % groups),
            row_tile = static_cast<int>(index / groups % sums.row_tiles);
  const int64_t batch_and_head = index / groups / sums.row_tiles;
  if (batch_and_head >= int64_t{sums.batch} * num_heads) return;
  const int tiles = min(4, sums.column_tiles - 4 * group), lane = lane_id(), place = lane % 4;

  ptx::wait_for_grid_before();
  float4 values[4] = {};
#pragma unroll 1
  for (int part = 0; part < parts; ++part) {
    const float* from =
        sums.tiles +
        (((batch_and_head * parts + part) * sums.row_tiles + row_tile) * sums.column_tiles + 4 * group) *
            (Fragments::kTileBytes / 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i >= tiles) continue;
      const float4 term = __ldcs(reinterpret_cast<const float4*>(from) + 32 * i + lane);
      values[i].x += term.x, values[i].y += term.y, values[i].z += term.z, values[i].w += term.w;
    }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int position = Fragments::kTileRows * row_tile + accumulator_row(0, h);
    const int batch = static_cast<int>(batch_and_head / num_heads);
    const int head = static_cast<int>(batch_and_head % num_heads);
    const float scale = position < sums.length ? factor(batch, head, position) : 0;
    // In step s lanes s apart swap: each gets its own tile's columns from the other.
    alignas(16) Element row[8];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      const int other = place ^ s;
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
    if (place < tiles && position < sums.length) {
      const int64_t token = int64_t{batch} * sums.length + position;
      Element* to = gradient + ((token * num_heads + head) * sums.column_tiles + 4 * group + place) * 8;
#pragma unroll
      for (int i = 0; i < static_cast<int>(sizeof(row) / 16); ++i) {
        reinterpret_cast<int4*>(to)[i] = reinterpret_cast<const int4*>(row)[i];
      }
    }
  }
}

template <class Element, class Factor>
Status launch_convert_fragments(const Fragments& sums, int parts, void* gradient, const Factor& factor,
                                const LaunchContext& context) {
  const int64_t warps =
      int64_t{sums.batch} * (sums.num_heads / parts) * sums.row_tiles * ceil_div(sums.column_tiles, 4);
  return launch_early(convert_fragments_kernel<Element, Factor>, ceil_div(warps, 8), 256, 0, context, sums,
                      parts, static_cast<Element*>(gradient), factor);
}

}  // namespace jax_flash::cuda::sm90
