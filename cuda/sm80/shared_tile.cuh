// Tiles of rows in shared memory, and their way in from global memory.
//
// A row of kCols elements takes kRowBytes, a multiple of 128. Its 16-byte chunks are permuted within each 128
// bytes: chunk c of row r lies at chunk c ^ (r % 8), so that eight rows' chunks of one column, which is what
// ldmatrix reads, lie in different banks.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "ptx/memory.h"

namespace jax_flash::cuda::sm80 {

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

template <class Arithmetic, int kRows_, int kCols>
struct SharedTile {
  using Element = typename Arithmetic::Element;
  static constexpr int kRows = kRows_;
  static constexpr int kRowBytes = kCols * int{sizeof(Element)};
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kRowBytes % 128 == 0);

  uint32_t base;  // aligned to 128 bytes

  // The address of this lane's 16 bytes, where lanes differ by `lane_row` < 8 (mod 8) and `lane_chunk` < 8,
  // and all of them are moved by a multiple of 8 rows and by `chunk`, with no bit in common with lane_chunk.
  // A loop over constant rows and chunks then costs one XOR an address at most.
  __device__ __forceinline__ uint32_t lane_base(int lane_row, int lane_chunk) const {
    return base + lane_row * kRowBytes + ((lane_chunk ^ (lane_row & 7)) << 4);
  }
  __device__ __forceinline__ static uint32_t moved(uint32_t lane_base, int row, int chunk) {
    return ((lane_base + row * kRowBytes) ^ ((chunk & 7) << 4)) + (chunk >> 3) * 128;
  }
};

// Rows of a dense [rows, stride] array in global memory, of which the first head_dim columns count.
template <class Element>
struct GlobalRows {
  const Element* data;
  int64_t stride;  // elements
  int head_dim;
  int copy_bytes;  // how many bytes one copy may take: 16, 4, or 2 where rows are not aligned to more
};

template <class Element>
__host__ __device__ inline int copy_bytes(const void* data, int64_t head_dim) {
  const int64_t row_bytes = head_dim * int{sizeof(Element)};
  const uint64_t alignment = reinterpret_cast<uint64_t>(data) | static_cast<uint64_t>(row_bytes);
  return alignment % 16 == 0 ? 16 : alignment % 4 == 0 ? 4 : 2;
}

// Starts the copy of rows [row, row + kRows) into the tile by all kThreads threads. Rows from row_limit on
// and columns from head_dim on become zeros, whatever memory holds there: 0 * NaN would not be. Completes
// with the copy group.
template <int kThreads, class Tile, class Element>
__device__ __forceinline__ void load_tile(Tile tile, const GlobalRows<Element>& source, int row,
                                          int row_limit) {
  constexpr int kChunks = Tile::kRowBytes / 16;
  constexpr int kChunkElements = 16 / sizeof(Element);
  const int thread = threadIdx.x;
  if (source.copy_bytes == 16) {
    constexpr int kRowsAtOnce = kThreads / kChunks, kPasses = Tile::kRows / kRowsAtOnce;
    static_assert(kThreads % kChunks == 0);
    const int r = thread / kChunks, chunk = thread % kChunks;
    const bool column_valid = chunk * kChunkElements < source.head_dim;
    const Element* from = source.data + (row + r) * source.stride + chunk * kChunkElements;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int tile_row = i * kRowsAtOnce + r;
      const uint32_t to =
          tile.base + tile_row * Tile::kRowBytes + (chunk & ~7) * 16 + (((chunk ^ tile_row) & 7) << 4);
      ptx::copy_async<16>(to, from, column_valid && row + tile_row < row_limit);
      from += kRowsAtOnce * source.stride;
    }
    return;
  }
  // Rows that are not aligned to 16 bytes: rare, so this is kept small rather than fast.
#pragma unroll 1
  for (int i = thread; i < Tile::kRows * kChunks; i += kThreads) {
    const int r = i / kChunks, chunk = i % kChunks;
    const uint32_t to = tile.base + r * Tile::kRowBytes + (chunk & ~7) * 16 + (((chunk ^ r) & 7) << 4);
    const Element* from = source.data + (row + r) * source.stride + chunk * kChunkElements;
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      const int column = chunk * kChunkElements + word * (kChunkElements / 4);
      const Element* word_from = from + word * (kChunkElements / 4);
      if (source.copy_bytes == 4) {
        const bool valid = row + r < row_limit && column < source.head_dim;
        ptx::copy_async<4>(to + 4 * word, valid ? word_from : source.data, valid);
      } else {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(word_from);
        uint32_t value = 0;
        if (row + r < row_limit && column < source.head_dim) value = halves[0];
        if (row + r < row_limit && column + 1 < source.head_dim) value |= uint32_t{halves[1]} << 16;
        ptx::store_shared(to + 4 * word, value);
      }
    }
  }
}

}  // namespace jax_flash::cuda::sm80
