// The arithmetics that kernels are compiled for: the element type in memory, how products are formed, and the
// type of their sums and of everything between two products.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ptx/math.h"

namespace jax_flash::cuda {

// bfloat16 operands, float32 sums.
struct bfloat16 {
  using Element = __nv_bfloat16;
  using Sum = float;
};

// float16 operands, float32 sums.
struct float16 {
  using Element = __half;
  using Sum = float;
};

// float32 operands rounded to TF32 for the products: relative error 2^-11 an operand.
struct tf32 {
  using Element = float;
  using Sum = float;
};

// float32 operands, each split into two TF32 numbers and multiplied in three products (Ootomo and Yokota,
// arXiv:2203.03341): relative error 2^-22 an operand, close to float32's own.
struct tf32x3 {
  using Element = float;
  using Sum = float;
};

// tf32x3 with float32's results for infinite operands, and the same bits where all are finite. It forms the
// products of the forward kernels, 20 % slower, and of the gradient of a bias, which takes 1.08 times as
// long. For the gradients of q, k and v it is 27 % slower (on an H100: 41 instead of 56 TFLOP/s at head dim
// 128), and runs behind other kernels: for key heads that planes do not hold, and for calls whose gradients
// tf32x3 has made NaN. With an infinity, tangents and derivatives of the gradient are NaN.
struct tf32x3_infinity {
  using Element = float;
  using Sum = float;
};

// float32 operands as two planes of scaled float16 each (planes.cuh), multiplied in three products: relative
// error 2^-22 an operand, at twice the rate of TF32.
struct float16x3 {
  using Element = float;
  using Sum = float;
};

// float64 operands and sums.
struct float64 {
  using Element = double;
  using Sum = double;
};

// Of row statistics and what else is not of an operand's dtype.
template <class Element>
using SumOf = std::conditional_t<std::is_same_v<Element, double>, double, float>;

template <class Arithmetic>
inline constexpr bool kIs16Bit = sizeof(typename Arithmetic::Element) == 2;
template <class Arithmetic>
inline constexpr bool kIs64Bit = sizeof(typename Arithmetic::Element) == 8;

// Are results as exact as the operands' dtype, so that the rounding of lse shows in gradients?
template <class Arithmetic>
inline constexpr bool kIsExact = !kIs16Bit<Arithmetic> && !std::is_same_v<Arithmetic, tf32>;

// Do products take two planes of each operand?
template <class Arithmetic>
inline constexpr bool kHasTwoPlanes = std::is_same_v<Arithmetic, float16x3>;
// Do tensor cores take operands of 16 bits?
template <class Arithmetic>
inline constexpr bool kMultiplies16Bit = kIs16Bit<Arithmetic> || kHasTwoPlanes<Arithmetic>;

// Two float32 rounded to the 16-bit type.
template <class Arithmetic>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Arithmetic, bfloat16>) {
    return ptx::pack_bf16(low, high);
  } else {
    return ptx::pack_f16(low, high);
  }
}

// The same two as float32.
template <class Arithmetic>
__device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<Arithmetic, bfloat16>) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
  } else {
    return {__half2float(__ushort_as_half(static_cast<uint16_t>(pair))),
            __half2float(__ushort_as_half(static_cast<uint16_t>(pair >> 16)))};
  }
}

}  // namespace jax_flash::cuda
