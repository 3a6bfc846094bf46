// Loads tiles of a tensor to shared memory. By a warp.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "accumulator.cuh"
#include "ptx/barrier.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "sm90/tensor_map.h"

namespace jax_flash::cuda::sm90 {

// Overwrites rows from `first` on of a tile that TMA has written with zeros, for products to read. By a warp.
template <int kChunks, int kRows, int kRowBytes>
__device__ __forceinline__ void clear_tail(uint32_t tile, int first) {
  const uint32_t zeros[4] = {0, 0, 0, 0};
  constexpr int kPieces = kRowBytes / 16;  // of a row
#pragma unroll 1
  for (int i = first * kPieces + lane_id(); i < kRows * kPieces; i += 32) {
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ptx::store_shared_x4(tile + chunk * kRows * kRowBytes + i * 16, zeros);
    }
  }
  ptx::async_proxy_fence();
  __syncwarp();
}

// Loads swizzled tiles, kChunks chunks with rows of kRowBytes, of one sequence of a tensor; the first begins
// at first_column, each other one kColumns after the one before. Only the first `length` of `seqlen` rows
// count. The others may be NaN, and 0 * NaN is NaN: in a tile they become zeros, so that p = 0 is enough to
// mask a pair.
template <int kChunks, int kRowBytes = kChunkRowBytes, int kColumns = kRowBytes / 2>
struct TileLoader {
  const CUtensorMap& map;
  int batch, length, seqlen;
  uint64_t policy;
  uint32_t tail_barrier;  // of this warp alone
  uint32_t tail_parity = 0;
  int first_column = 0;

  // Does the tile that begins at `row` have rows that are in the tensor but do not count?
  template <int kRows>
  __device__ __forceinline__ bool has_tail(int row) const {
    return length < seqlen && length - row < kRows;
  }

  // Loads a tile without such rows and completes a phase of `full`. By one thread.
  template <int kRows>
  __device__ __forceinline__ void load_whole(uint32_t tile, uint32_t full, int head, int row) const {
    ptx::barrier_arrive_expect(full, kChunks * kRows * kRowBytes);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      ptx::tensor_load(tile + chunk * kRows * kRowBytes, map, full, first_column + chunk * kColumns, head,
                       row, batch, policy);
    }
  }

  // Loads any tile. By a warp.
  template <int kRows>
  __device__ __forceinline__ void load(uint32_t tile, uint32_t full, int head, int row) {
    if (!has_tail<kRows>(row)) {
      if (ptx::elect_one()) load_whole<kRows>(tile, full, head, row);
      return;
    }
    if (ptx::elect_one()) load_whole<kRows>(tile, tail_barrier, head, row);
    ptx::barrier_wait(tail_barrier, tail_parity);
    tail_parity ^= 1;
    clear_tail<kChunks, kRows, kRowBytes>(tile, max(length - row, 0));
    if (ptx::elect_one()) ptx::barrier_arrive(full);
  }
};

}  // namespace jax_flash::cuda::sm90
