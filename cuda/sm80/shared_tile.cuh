// Tiles of rows in shared memory, and their way in from global memory.
//
// A row of kCols elements takes kRowBytes, a multiple of 128. Its 16-byte chunks are permuted within each 128
// bytes: chunk c of row r lies at chunk c ^ (r % 8), so that eight rows' chunks of one column, which is what
// ldmatrix reads, lie in different banks.
#pragma once

#include <cstdint>
#include <type_traits>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "ptx/math.h"
#include "ptx/memory.h"

namespace jax_flash::cuda::sm80 {

//
// kRounded: where products are formed in TF32, the tile's elements have been rounded to it once, by whoever
// wrote them, instead of each time they are read.
template <class Arithmetic_, int kRows_, int kCols, bool kRounded_ = false>
struct SharedTile {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kRows = kRows_;
  static constexpr bool kRounded = kRounded_;
  static constexpr int kRowBytes = kCols * int{sizeof(Element)};
  static constexpr int kBytes = kRows * kRowBytes;
  static_assert(kRowBytes % 128 == 0);

  uint32_t base;  // aligned to 128 bytes

  // The address of this lane's 16 bytes, where lanes differ by `lane_row` (mod 8) and `lane_chunk` < 8;
  // `moved` takes them all along by a multiple of 8 rows, and by chunks whose number has no bit in common
  // with lane_chunk. Over a loop of constant rows and chunks, at most 8 addresses differ by more than what an
  // instruction has room to add.
  __device__ __forceinline__ uint32_t lane_base(int lane_row, int lane_chunk) const {
    return base + lane_row * kRowBytes + ((lane_chunk ^ (lane_row & 7)) << 4);
  }
  __device__ __forceinline__ static uint32_t moved(uint32_t lane_base, int row, int chunk) {
    return (lane_base ^ ((chunk & 7) << 4)) + row * kRowBytes + (chunk >> 3) * 128;
  }
};

// A dense [rows, heads, head_dim] array in global memory. Kernels get it as a parameter, where it takes no
// registers.
struct HeadRows {
  const void* data;
  int64_t stride;  // elements from row to row
  int head_dim;
  int copy_bytes;  // how many bytes one copy may take: 16, 4, or 2 where heads are not aligned to more
};

template <class Element>
HeadRows head_rows(const void* data, int64_t heads, int64_t head_dim) {
  const int64_t bytes = head_dim * int64_t{sizeof(Element)};
  const int copy_bytes = bytes % 16 == 0 ? 16 : bytes % 4 == 0 ? 4 : 2;
  return {data, heads * head_dim, static_cast<int>(head_dim), copy_bytes};
}

// Copies tiles of rows of one head, by all kThreads threads. What a thread knows of a tile's place is one
// pointer, which the caller moves along: finding it anew for each tile would take as many instructions as the
// tile's products.
template <int kThreads, class Tile>
class TileLoader {
  using Element = typename Tile::Element;
  static constexpr int kChunks = Tile::kRowBytes / 16;
  static constexpr int kChunkElements = 16 / sizeof(Element);
  static constexpr int kRowsAtOnce = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && Tile::kRows % kRowsAtOnce == 0);

 public:
  // `rows` must outlive the loader. The first tile is head `head` of the rows from `row` on.
  __device__ __forceinline__ TileLoader(const HeadRows& rows, int64_t row, int head) : rows_(rows) {
    const int r = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    from_ = static_cast<const Element*>(rows.data) + (row + r) * rows.stride + int64_t{head} * rows.head_dim +
            chunk * kChunkElements;
  }

  __device__ __forceinline__ void move_rows(int rows) { from_ += rows * rows_.stride; }
  __device__ __forceinline__ void move_heads(int heads) { from_ += int64_t{heads} * rows_.head_dim; }

  // Starts the copy of the tile at the current place, whose first row is `row`. Rows from row_limit on and
  // columns from head_dim on become zeros, whatever memory holds there: 0 * NaN would not be. Completes with
  // the copy group.
  __device__ __forceinline__ void load(Tile tile, int row, int row_limit) const {
    const int r = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const int valid_rows = chunk * kChunkElements < rows_.head_dim ? row_limit - row - r : 0;
    const uint32_t to = tile.base + r * Tile::kRowBytes + (chunk & ~7) * 16;
    const Element* from = from_;
    if (rows_.copy_bytes == 16) {
#pragma unroll
      for (int i = 0; i < Tile::kRows; i += kRowsAtOnce) {
        ptx::copy_async<16>(to + i * Tile::kRowBytes + (((chunk ^ (r + i)) & 7) << 4), from, i < valid_rows);
        from += kRowsAtOnce * rows_.stride;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < Tile::kRows; i += kRowsAtOnce) {
        copy_unaligned(to + i * Tile::kRowBytes + (((chunk ^ (r + i)) & 7) << 4), from,
                       i < valid_rows ? rows_.head_dim - chunk * kChunkElements : 0);
        from += kRowsAtOnce * rows_.stride;
      }
    }
  }

  // Rounds what this thread has copied, once that has come and before other threads read it.
  __device__ __forceinline__ static void round(Tile tile) {
    static_assert(Tile::kRounded);
    if constexpr (std::is_same_v<typename Tile::Arithmetic, tf32>) {
      const int r = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
      const uint32_t base = tile.base + r * Tile::kRowBytes + (chunk & ~7) * 16;
#pragma unroll 4
      for (int i = 0; i < Tile::kRows; i += kRowsAtOnce) {
        const uint32_t address = base + i * Tile::kRowBytes + (((chunk ^ (r + i)) & 7) << 4);
        uint32_t x[4];
        ptx::load_shared_x4(x, address);
#pragma unroll
        for (uint32_t& y : x) y = ptx::round_to_tf32(y);
        ptx::store_shared_x4(address, x);
      }
    }
  }

 private:
  // 16 bytes in pieces, of which the first `count` elements count: rare, so this is kept small rather than
  // fast.
  __device__ __forceinline__ void copy_unaligned(uint32_t to, const Element* from, int count) const {
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      const int first = word * (kChunkElements / 4);
      if (rows_.copy_bytes == 4) {
        ptx::copy_async<4>(to + 4 * word, from + first, first < count);
      } else {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(from + first);
        uint32_t value = first < count ? halves[0] : 0;
        if (first + 1 < count) value |= uint32_t{halves[1]} << 16;
        ptx::store_shared(to + 4 * word, value);
      }
    }
  }

  const HeadRows& rows_;
  const Element* from_;  // this thread's first chunk of the tile
};

}  // namespace jax_flash::cuda::sm80
