// Tensor-core products of a warpgroup (wgmma): d += a b, 64 rows, accumulated in float32. Compute capability
// 9.0a. See PTX ISA, "Asynchronous warpgroup level matrix multiply-accumulate operation".
//
// The products are asynchronous, and the compiler does not know: between wgmma_fence() and the end of
// wgmma_wait(), neither the accumulators nor operands in registers may be touched.
#pragma once

#include <cstdint>

#include "arithmetic.h"

namespace jax_flash::cuda::ptx {

// Call before the first product after writing to registers that it uses.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending of the latest groups are unfinished.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accesses to these registers across this point.
template <int kTiles>
__device__ __forceinline__ void keep_in_place(float (&r)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(r[i][j])::"memory");
  }
}

template <int kTiles>
__device__ __forceinline__ void keep_in_place(uint32_t (&r)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(r[i][j])::"memory");
  }
}

// Describes a tile in shared memory whose rows are 128 or 64 bytes long and swizzled as by TMA:
// 16-byte chunk c of row r lies at chunk c ^ (r % 8), or at c ^ (r / 2 % 4) in rows of 64 bytes. A wider tile
// is several of these side by side, `pitch` bytes apart. `address` is aligned to 8 rows; to reach later rows
// and columns of a tile, add bytes / 16 to the descriptor. See PTX ISA, "Matrix descriptor".
template <int kRowBytes>
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t pitch) {
  static_assert(kRowBytes == 128 || kRowBytes == 64);
  constexpr uint64_t kSwizzle = uint64_t{kRowBytes == 128 ? 1 : 2} << 62;
  constexpr uint64_t kEightRows = uint64_t{8 * kRowBytes / 16} << 32;
  return kSwizzle | kEightRows | uint64_t{pitch / 16} << 16 | address / 16;
}

// Describes an operand [16 or more, 64] that lies transposed in matrices of 8 x 8 elements, 128 bytes each,
// not swizzled: kNextRows bytes from one to the next along its 16 rows, kNextColumns along its columns.
template <int kNextRows, int kNextColumns>
__device__ __forceinline__ uint64_t pieces_descriptor(uint32_t address) {
  return uint64_t{kNextColumns / 16} << 32 | uint64_t{kNextRows / 16} << 16 | address / 16;
}

// m64nNk16: d[nt][2h + c] is row 16 w + 8 h + g, column 8 nt + 2 t + c in warp w, with g = lane / 4, t = lane
// % 4. If `accumulate` is false, d is overwritten.
template <class Arithmetic, int kN>
struct Wgmma;

// The instruction names each register, so its text is assembled from groups of 8 registers, which are 16
// columns.
#define JAX_FLASH_TEXT_0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAX_FLASH_TEXT_1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_FLASH_TEXT_2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define JAX_FLASH_TEXT_3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_FLASH_TEXT_4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define JAX_FLASH_TEXT_5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define JAX_FLASH_TEXT_6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define JAX_FLASH_TEXT_7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_FLASH_TEXT_8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define JAX_FLASH_TEXT_9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define JAX_FLASH_TEXT_10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define JAX_FLASH_TEXT_11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_FLASH_TEXT_12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define JAX_FLASH_TEXT_13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define JAX_FLASH_TEXT_14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define JAX_FLASH_TEXT_15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_FLASH_D(i)                                                                               \
  "+f"(d[2 * i][0]), "+f"(d[2 * i][1]), "+f"(d[2 * i][2]), "+f"(d[2 * i][3]), "+f"(d[2 * i + 1][0]), \
      "+f"(d[2 * i + 1][1]), "+f"(d[2 * i + 1][2]), "+f"(d[2 * i + 1][3])

#define JAX_FLASH_TEXT_N16 JAX_FLASH_TEXT_0
#define JAX_FLASH_TEXT_N32 JAX_FLASH_TEXT_0 ", " JAX_FLASH_TEXT_1
#define JAX_FLASH_TEXT_N48 JAX_FLASH_TEXT_N32 ", " JAX_FLASH_TEXT_2
#define JAX_FLASH_TEXT_N64 JAX_FLASH_TEXT_0 ", " JAX_FLASH_TEXT_1 ", " JAX_FLASH_TEXT_2 ", " JAX_FLASH_TEXT_3
#define JAX_FLASH_TEXT_N80 JAX_FLASH_TEXT_N64 ", " JAX_FLASH_TEXT_4
#define JAX_FLASH_TEXT_N96 JAX_FLASH_TEXT_N80 ", " JAX_FLASH_TEXT_5
#define JAX_FLASH_TEXT_N112 JAX_FLASH_TEXT_N96 ", " JAX_FLASH_TEXT_6
#define JAX_FLASH_TEXT_N128 JAX_FLASH_TEXT_N112 ", " JAX_FLASH_TEXT_7
#define JAX_FLASH_TEXT_N192                                                              \
  JAX_FLASH_TEXT_N128 ", " JAX_FLASH_TEXT_8 ", " JAX_FLASH_TEXT_9 ", " JAX_FLASH_TEXT_10 \
                      ", " JAX_FLASH_TEXT_11
#define JAX_FLASH_TEXT_N256                                                                \
  JAX_FLASH_TEXT_N192 ", " JAX_FLASH_TEXT_12 ", " JAX_FLASH_TEXT_13 ", " JAX_FLASH_TEXT_14 \
                      ", " JAX_FLASH_TEXT_15
#define JAX_FLASH_D_N16 JAX_FLASH_D(0)
#define JAX_FLASH_D_N32 JAX_FLASH_D(0), JAX_FLASH_D(1)
#define JAX_FLASH_D_N48 JAX_FLASH_D_N32, JAX_FLASH_D(2)
#define JAX_FLASH_D_N64 JAX_FLASH_D(0), JAX_FLASH_D(1), JAX_FLASH_D(2), JAX_FLASH_D(3)
#define JAX_FLASH_D_N80 JAX_FLASH_D_N64, JAX_FLASH_D(4)
#define JAX_FLASH_D_N96 JAX_FLASH_D_N80, JAX_FLASH_D(5)
#define JAX_FLASH_D_N112 JAX_FLASH_D_N96, JAX_FLASH_D(6)
#define JAX_FLASH_D_N128 JAX_FLASH_D_N112, JAX_FLASH_D(7)
#define JAX_FLASH_D_N192 JAX_FLASH_D_N128, JAX_FLASH_D(8), JAX_FLASH_D(9), JAX_FLASH_D(10), JAX_FLASH_D(11)
#define JAX_FLASH_D_N256 JAX_FLASH_D_N192, JAX_FLASH_D(12), JAX_FLASH_D(13), JAX_FLASH_D(14), JAX_FLASH_D(15)

// i0 to i5: the operand numbers after those of d.
#define JAX_FLASH_WGMMA(arithmetic, type, n, i0, i1, i2, i3, i4, i5)                                         \
  template <>                                                                                                \
  struct Wgmma<arithmetic, n> {                                                                              \
    /* a and b in shared memory; a is [64, 16], or [16, 64] with kAAlongM, and b likewise. */                \
    template <bool kBAlongN, bool kAAlongM = false>                                                          \
    static __device__ __forceinline__ void shared(float (&d)[n / 8][4], uint64_t a, uint64_t b,              \
                                                  bool accumulate) {                                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" i2                                                   \
                   ", 0;\n"                                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" JAX_FLASH_TEXT_N##n  \
                   "}, %" i0 ", %" i1 ", p, 1, 1, %" i3 ", %" i4 ";\n}"                                      \
                   : JAX_FLASH_D_N##n                                                                        \
                   : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(int{kAAlongM}),                  \
                     "n"(int{kBAlongN}));                                                                    \
    }                                                                                                        \
    /* a in registers, in the layout of d with two columns packed in one register; b [16, n] in shared       \
     * memory. */                                                                                            \
    static __device__ __forceinline__ void registers(float (&d)[n / 8][4], const uint32_t (&a)[4],           \
                                                     uint64_t b, bool accumulate = true) {                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" i5                                                   \
                   ", 0;\n"                                                                                  \
                   "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" JAX_FLASH_TEXT_N##n  \
                   "}, {%" i0 ", %" i1 ", %" i2 ", %" i3 "}, %" i4 ", p, 1, 1, 1;\n}"                        \
                   : JAX_FLASH_D_N##n                                                                        \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate))); \
    }                                                                                                        \
  };
JAX_FLASH_WGMMA(bfloat16, "bf16", 16, "8", "9", "10", "11", "12", "13")
JAX_FLASH_WGMMA(float16, "f16", 16, "8", "9", "10", "11", "12", "13")
JAX_FLASH_WGMMA(bfloat16, "bf16", 32, "16", "17", "18", "19", "20", "21")
JAX_FLASH_WGMMA(float16, "f16", 32, "16", "17", "18", "19", "20", "21")
JAX_FLASH_WGMMA(bfloat16, "bf16", 48, "24", "25", "26", "27", "28", "29")
JAX_FLASH_WGMMA(float16, "f16", 48, "24", "25", "26", "27", "28", "29")
JAX_FLASH_WGMMA(bfloat16, "bf16", 64, "32", "33", "34", "35", "36", "37")
JAX_FLASH_WGMMA(float16, "f16", 64, "32", "33", "34", "35", "36", "37")
JAX_FLASH_WGMMA(bfloat16, "bf16", 80, "40", "41", "42", "43", "44", "45")
JAX_FLASH_WGMMA(float16, "f16", 80, "40", "41", "42", "43", "44", "45")
JAX_FLASH_WGMMA(bfloat16, "bf16", 96, "48", "49", "50", "51", "52", "53")
JAX_FLASH_WGMMA(float16, "f16", 96, "48", "49", "50", "51", "52", "53")
JAX_FLASH_WGMMA(bfloat16, "bf16", 112, "56", "57", "58", "59", "60", "61")
JAX_FLASH_WGMMA(float16, "f16", 112, "56", "57", "58", "59", "60", "61")
JAX_FLASH_WGMMA(bfloat16, "bf16", 128, "64", "65", "66", "67", "68", "69")
JAX_FLASH_WGMMA(float16, "f16", 128, "64", "65", "66", "67", "68", "69")
JAX_FLASH_WGMMA(bfloat16, "bf16", 192, "96", "97", "98", "99", "100", "101")
JAX_FLASH_WGMMA(float16, "f16", 192, "96", "97", "98", "99", "100", "101")
JAX_FLASH_WGMMA(bfloat16, "bf16", 256, "128", "129", "130", "131", "132", "133")
JAX_FLASH_WGMMA(float16, "f16", 256, "128", "129", "130", "131", "132", "133")

}  // namespace jax_flash::cuda::ptx
