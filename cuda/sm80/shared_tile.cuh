// Tiles of rows in shared memory, and how they are loaded from global memory.
//
// A row of kCols elements takes kRowBytes, 64 or a multiple of 128. Its 16-byte chunks are permuted within
// each 128 bytes: chunk c of row r lies at chunk c ^ (r % 8), in rows of 64 bytes at c ^ (r / 2 % 4). So
// ldmatrix, which reads one chunk of each of eight rows, finds them in different banks. Eight lanes that load
// float64 read four chunks of each of two neighboring rows, or two of each of four rows, every second one:
// there chunk c lies at c ^ (2 (r / 2 % 2) + 4 ((r + r / 4) % 2)).
#pragma once

#include <cstdint>
#include <type_traits>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "pages.cuh"
#include "ptx/math.h"
#include "ptx/memory.h"

namespace jax_flash::cuda::sm80 {

// A tile [kRows, kCols].
//
// kRounded: for products in TF32, whoever writes the tile rounds its elements once, instead of rounding them
// each time they are read.
template <class Arithmetic_, int kRows_, int kCols, bool kRounded_ = false>
struct SharedTile {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kRows = kRows_;
  static constexpr bool kRounded = kRounded_;
  static constexpr int kRowBytes = kCols * int{sizeof(Element)};
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kPermuted = kRowBytes < 128 ? kRowBytes / 16 : 8;  // chunks that change places
  static_assert(kRowBytes == 64 || kRowBytes % 128 == 0);

  uint32_t base;  // aligned to 128 bytes

  // From a row's first byte to its chunk `chunk`.
  __device__ __forceinline__ static uint32_t chunk_offset(int row, int chunk) {
    const int key = sizeof(Element) == 8 ? (row & 2) | (row ^ row >> 2) % 2 << 2
                    : kRowBytes < 128    ? row / 2
                                         : row;
    const int place = (chunk ^ key) & (kPermuted - 1);
    return (chunk & ~(kPermuted - 1)) * 16 + place * 16;
  }

  // The address of this lane's 16 bytes; lanes differ in `lane_row` (mod 8) and `lane_chunk` < kPermuted.
  // `moved` moves it by a multiple of 8 rows, and by a number of chunks that has no bit in common with
  // lane_chunk. In a loop over constant rows and chunks, at most 8 addresses differ by more than an
  // instruction's immediate offset.
  __device__ __forceinline__ uint32_t lane_base(int lane_row, int lane_chunk) const {
    return base + lane_row * kRowBytes + chunk_offset(lane_row, lane_chunk);
  }
  __device__ __forceinline__ static uint32_t moved(uint32_t lane_base, int row, int chunk) {
    return (lane_base ^ ((chunk & (kPermuted - 1)) << 4)) + row * kRowBytes +
           chunk / kPermuted * (16 * kPermuted);
  }
};

// Two planes, one behind the other.
template <int kRows, int kCols, bool kRounded>
struct SharedTile<float16x3, kRows, kCols, kRounded> : SharedTile<float16, kRows, kCols, kRounded> {
  using Arithmetic = float16x3;
  using Plane = SharedTile<float16, kRows, kCols, kRounded>;
  static constexpr int kPlaneBytes = Plane::kBytes;
  static constexpr int kBytes = 2 * kPlaneBytes;
};

// A dense [rows, heads, head_dim] array in global memory. It is part of a kernel's parameters, so it takes no
// registers.
struct HeadRows {
  const void* data;
  int64_t low;     // elements from a plane to the second one; 0 where there are no two planes
  int64_t stride;  // elements from row to row
  int head_dim;
  int copy_bytes;  // bytes per copy, by the alignment of heads: 16, 4 or 2
};

template <class Element>
HeadRows head_rows(const void* data, int64_t heads, int64_t head_dim, int64_t low = 0) {
  const int64_t bytes = head_dim * int64_t{sizeof(Element)};
  // Copies of 16 bytes from pages compute addresses with a stride of 32 bits.
  const bool is_moderate = heads * bytes < int64_t{1} << 32;
  const int copy_bytes = bytes % 16 == 0 && is_moderate ? 16 : bytes % 4 == 0 ? 4 : 2;
  return {data, low, heads * head_dim, static_cast<int>(head_dim), copy_bytes};
}

// Copies tiles of rows of one head, by all kThreads threads. A thread keeps one pointer, which the caller
// moves from tile to tile: computing it anew would take as many instructions as the tile's products.
template <int kThreads, class Tile>
class TileLoader {
  using Element = typename Tile::Element;
  static constexpr int kChunks = Tile::kRowBytes / 16;
  static constexpr int kChunkElements = 16 / sizeof(Element);
  static constexpr int kRowsAtOnce = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && Tile::kRows % kRowsAtOnce == 0);

 public:
  static constexpr int kCopies = Tile::kRows / kRowsAtOnce;  // of a thread, for a tile

  // `rows` must outlive the loader. The first tile is head `head` of the rows from `row` on.
  __device__ __forceinline__ TileLoader(const HeadRows& rows, int64_t row, int head) : rows_(rows) {
    move_to(row, head);
  }

  __device__ __forceinline__ void move_rows(int rows) { from_ += rows * rows_.stride; }
  // To head `head` of the rows from `row` on.
  __device__ __forceinline__ void move_to(int64_t row, int head) {
    const int r = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    from_ = static_cast<const Element*>(rows_.data) + (row + r) * rows_.stride +
            int64_t{head} * rows_.head_dim + chunk * kChunkElements;
  }
  __device__ __forceinline__ void move_heads(int heads) { from_ += int64_t{heads} * rows_.head_dim; }

  // Starts to copy the current tile, whose first row is `row`; completes with the copy group. Rows from
  // row_limit on and columns from head_dim on become zeros, since 0 * NaN would be NaN.
  __device__ __forceinline__ void load(Tile tile, int row, int row_limit) const {
    const int r = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const int valid_rows = chunk * kChunkElements < rows_.head_dim ? row_limit - row - r : 0;
    const uint32_t to = tile.base + r * Tile::kRowBytes;
    const Element* from = from_;
    if (kHasTwoPlanes<typename Tile::Arithmetic> || rows_.copy_bytes == 16) {
#pragma unroll
      for (int i = 0; i < Tile::kRows; i += kRowsAtOnce) {
        const uint32_t to_row = to + i * Tile::kRowBytes + Tile::chunk_offset(r + i, chunk);
        ptx::copy_async<16>(to_row, from, i < valid_rows);
        if constexpr (kHasTwoPlanes<typename Tile::Arithmetic>) {
          ptx::copy_async<16>(to_row + Tile::kPlaneBytes, from + rows_.low, i < valid_rows);
        }
        from += kRowsAtOnce * rows_.stride;
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < Tile::kRows; i += kRowsAtOnce) {
        copy_unaligned(rows_, to + i * Tile::kRowBytes + Tile::chunk_offset(r + i, chunk), from,
                       i < valid_rows ? rows_.head_dim - chunk * kChunkElements : 0);
        from += kRowsAtOnce * rows_.stride;
      }
    }
  }

  // Where the keys in pages are that this thread copies: first their entries of page_indices as they were
  // read, since a computation with one would wait for it, and each read for the one before; then, settled,
  // their rows in the cache, or -1 for those that become zeros.
  struct PageRows {
    int32_t values[kCopies];
  };

  // Reads the entries for the keys from `key` on. Those from key_limit on are not read.
  __device__ __forceinline__ static void find_rows(PageRows& rows, const SequencePages& pages, int key,
                                                   int key_limit) {
    for_each_copy(pages, key, [&](int i, int copied_key, const PagePlace& place) {
      if (copied_key < key_limit) rows.values[i] = pages.entry(place.index);
    });
  }
  __device__ __forceinline__ static void settle_rows(PageRows& rows, const SequencePages& pages, int key,
                                                     int key_limit) {
    for_each_copy(pages, key, [&](int i, int copied_key, const PagePlace& place) {
      rows.values[i] = copied_key < key_limit ? pages.page_of(rows.values[i]) * pages.size() + place.row : -1;
    });
  }

  // Starts to copy a tile of these keys, from `key` on, of head `head`. The rest as in load.
  __device__ __forceinline__ void load_pages(Tile tile, const PageRows& rows, const SequencePages& pages,
                                             int head, int key, int key_limit) const {
    if (rows_.copy_bytes != 16) {
      load_rows(rows_, tile, [&](int i) -> int64_t {
        if (key + i >= key_limit) return -1;
        const PagePlace place = pages.place_of(key + i);
        const int64_t row = pages.page(place.index) * int64_t{pages.size()} + place.row;
        return row * rows_.stride + int64_t{head} * rows_.head_dim;
      });
      return;
    }
    const int r = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const bool is_column = chunk * kChunkElements < rows_.head_dim;
    const uint32_t to = tile.base + r * Tile::kRowBytes;
    const char* first = static_cast<const char*>(rows_.data) +
                        (int64_t{head} * rows_.head_dim + chunk * kChunkElements) * int64_t{sizeof(Element)};
    // A product of 32 bits is one instruction, of 64 bits five.
    const auto row_bytes = static_cast<uint32_t>(rows_.stride * int64_t{sizeof(Element)});
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int tile_row = i * kRowsAtOnce;
      const auto row = static_cast<uint32_t>(max(rows.values[i], 0));
      ptx::copy_async<16>(to + tile_row * Tile::kRowBytes + Tile::chunk_offset(r + tile_row, chunk),
                          first + uint64_t{row} * row_bytes, is_column && rows.values[i] >= 0);
    }
  }

  // Starts to copy a tile whose rows lie anywhere in `rows`: row i begins at element begin(i); where that is
  // negative, it becomes zeros. The code is small rather than fast.
  template <class F>
  __device__ __forceinline__ static void load_rows(const HeadRows& rows, Tile tile, F begin) {
    const int r = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const uint32_t to = tile.base + r * Tile::kRowBytes;
#pragma unroll 1
    for (int i = 0; i < Tile::kRows; i += kRowsAtOnce) {
      const int64_t first = begin(r + i);
      // Aligned where there is no row, too.
      const Element* from =
          static_cast<const Element*>(rows.data) + (first < 0 ? 0 : first) + chunk * kChunkElements;
      const int count = first < 0 ? 0 : rows.head_dim - chunk * kChunkElements;
      const uint32_t to_row = to + i * Tile::kRowBytes + Tile::chunk_offset(r + i, chunk);
      if (rows.copy_bytes == 16) {
        ptx::copy_async<16>(to_row, from, count > 0);
      } else {
        copy_unaligned(rows, to_row, from, count);
      }
    }
  }

  // Rounds what this thread has copied: after the copy has arrived, and before other threads read it.
  __device__ __forceinline__ static void round(Tile tile) {
    static_assert(Tile::kRounded);
    if constexpr (std::is_same_v<typename Tile::Arithmetic, tf32>) {
      const int r = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
      const uint32_t base = tile.base + r * Tile::kRowBytes;
#pragma unroll 4
      for (int i = 0; i < Tile::kRows; i += kRowsAtOnce) {
        const uint32_t address = base + i * Tile::kRowBytes + Tile::chunk_offset(r + i, chunk);
        uint32_t x[4];
        ptx::load_shared_x4(x, address);
#pragma unroll
        for (uint32_t& y : x) y = ptx::round_to_tf32(y);
        ptx::store_shared_x4(address, x);
      }
    }
  }

 private:
  // f(i, key, place) for each key that this thread copies, of those from `key` on.
  template <class F>
  __device__ __forceinline__ static void for_each_copy(const SequencePages& pages, int key, F f) {
    const int first = key + threadIdx.x / kChunks, size = pages.size();
    const PagePlace step = pages.place_of(kRowsAtOnce);
    PagePlace place = pages.place_of(first);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      f(i, first + i * kRowsAtOnce, place);
      place.index += step.index;
      place.row += step.row;
      if (place.row >= size) {
        place.row -= size;
        ++place.index;
      }
    }
  }

  // Copies 16 bytes in pieces, with zeros after the first `count` elements. Rare, so the code is small rather
  // than fast.
  __device__ __forceinline__ static void copy_unaligned(const HeadRows& rows, uint32_t to,
                                                        const Element* from, int count) {
#pragma unroll 1
    for (int word = 0; word < 4; ++word) {
      const int first = word * kChunkElements / 4;
      if (rows.copy_bytes == 4) {
        ptx::copy_async<4>(to + 4 * word, reinterpret_cast<const char*>(from) + 4 * word, first < count);
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
