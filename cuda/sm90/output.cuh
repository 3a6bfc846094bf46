// Stores a warp's accumulators to shared memory, from which TMA takes them.
#pragma once

#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "ptx/barrier.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "sm90/tensor_map.h"

namespace jax_flash::cuda::sm90 {

// The offset of 16-byte piece `piece` of row `row` in a swizzled tile of rows of kRowBytes (tensor_map.h).
template <int kRowBytes = kChunkRowBytes>
__device__ __forceinline__ uint32_t swizzled(int row, int piece) {
  return row * kRowBytes + (piece ^ row / (128 / kRowBytes) % (kRowBytes / 16)) * 16;
}

// Stores columns [column, column + kColumns) of acc [16, 8 * kTiles], rounded to 16 bits, to chunks with rows
// of kRowBytes that are `pitch` bytes apart. Rows of h are multiplied by factor[h].
template <class Arithmetic, int kRowBytes, int kColumns, int kTiles>
__device__ __forceinline__ void store_rows(const float (&acc)[1][kTiles][4], int column,
                                           const float (&factor)[2], uint32_t shared, int pitch) {
#pragma unroll
  for (int i = 0; i < kColumns / 16; ++i) {
    uint32_t values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float (&tile)[4] = acc[0][column / 8 + 2 * i + j / 2];
      values[j] = pack<Arithmetic>(tile[j % 2 * 2] * factor[j % 2], tile[j % 2 * 2 + 1] * factor[j % 2]);
    }
    constexpr int kSteps = kRowBytes / 32;
    const uint32_t place = swizzled<kRowBytes>(lane_id() % 16, 2 * (i % kSteps) + lane_id() / 16);
    ptx::store_matrix_x4(shared + i / kSteps * pitch + place, values);
  }
}

// All columns.
template <class Arithmetic, int kRowBytes = kChunkRowBytes, int kTiles>
__device__ __forceinline__ void store_rows(const float (&acc)[1][kTiles][4], const float (&factor)[2],
                                           uint32_t shared, int pitch) {
  store_rows<Arithmetic, kRowBytes, 8 * kTiles>(acc, 0, factor, shared, pitch);
}

// A float32 array [batch, length, heads, columns], of columns that are a multiple of 8.
struct Float32Rows {
  float* data;
  int length, heads, columns;

  __device__ __forceinline__ Float32Rows(void* data, int64_t length, int64_t heads, int64_t columns)
      : data(static_cast<float*>(data)),
        length(static_cast<int>(length)),
        heads(static_cast<int>(heads)),
        columns(static_cast<int>(columns)) {}

  // Writes acc [16, 8 * kTiles] to (row, column) of a head, with rows of h multiplied by factor[h]. A quad of
  // lanes fills a sector of 32 bytes.
  template <int kTiles>
  __device__ __forceinline__ void store(const float (&acc)[1][kTiles][4], const float (&factor)[2], int batch,
                                        int head, int row, int column) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own_row = row + accumulator_row(0, h);
      if (own_row >= length) continue;
      float* to = data + ((int64_t{batch} * length + own_row) * heads + head) * columns + column;
#pragma unroll
      for (int nt = 0; nt < kTiles; ++nt) {
        if (column + 8 * nt >= columns) continue;
        const float2 pair = {acc[0][nt][2 * h] * factor[h], acc[0][nt][2 * h + 1] * factor[h]};
        *reinterpret_cast<float2*>(to + accumulator_column(nt, 0)) = pair;
      }
    }
  }

  // The same, with more registers: two lanes exchange halves of two tiles, so that each stores 16 bytes,
  // which gains up to 2 % of the forward kernel.
  template <int kTiles>
  __device__ __forceinline__ void store_exchanged(const float (&acc)[1][kTiles][4], const float (&factor)[2],
                                                  int batch, int head, int row, int column) const {
    static_assert(kTiles % 2 == 0);
    uint32_t lane = lane_id();
    ptx::make_opaque(lane);  // what depends on it is not kept from one tile to the next
    const bool is_odd = lane % 2 == 1;
    const int lane_column = column + 8 * is_odd + static_cast<int>(lane % 4 / 2 * 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own_row = row + accumulator_row(0, h);
      float* to = data + ((int64_t{batch} * length + own_row) * heads + head) * columns + lane_column;
#pragma unroll
      for (int nt = 0; nt < kTiles; nt += 2) {
        const float2 left = {acc[0][nt][2 * h] * factor[h], acc[0][nt][2 * h + 1] * factor[h]},
                     right = {acc[0][nt + 1][2 * h] * factor[h], acc[0][nt + 1][2 * h + 1] * factor[h]};
        const float2 own = is_odd ? right : left, sent = is_odd ? left : right;
        const float2 other = {__shfl_xor_sync(0xffffffff, sent.x, 1), __shfl_xor_sync(0xffffffff, sent.y, 1)};
        if (own_row < length && lane_column + 8 * nt < columns) {
          *reinterpret_cast<float4*>(to + 8 * nt) =
              is_odd ? float4{other.x, other.y, own.x, own.y} : float4{own.x, own.y, other.x, other.y};
        }
      }
    }
  }
};

// Where a warp's 16 rows go: an array [batch, length, heads, columns], from `row` and first_column on.
struct OutputRows {
  const CUtensorMap& map;  // in boxes of 16 rows
  int64_t columns;
  int head, row, length, batch;
  int first_column = 0;
};

// Sends the kChunks chunks of kColumns columns that store_rows() has left, and waits until they have been
// read.
template <int kChunks, int kColumns = kChunkColumns>
__device__ __forceinline__ void send_rows(const OutputRows& to, uint32_t shared, int pitch) {
  ptx::async_proxy_fence();
  __syncwarp();
  if (to.row < to.length && ptx::elect_one()) {
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      const int column = to.first_column + chunk * kColumns;
      if (column < to.columns) {
        ptx::tensor_store(to.map, shared + chunk * pitch, column, to.head, to.row, to.batch);
      }
    }
    ptx::tensor_store_commit();
    ptx::tensor_store_wait_read();
  }
}

}  // namespace jax_flash::cuda::sm90
