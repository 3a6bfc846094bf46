// Approximate functions and conversions of one or two instructions.
#pragma once

#include <cmath>
#include <cstdint>

namespace jax_flash::cuda::ptx {

// 2^x within 2 ulp; exp2(-inf) = 0. exp2f would add a range check around the same instruction.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// a * b, rounded: not a part of a fused multiply-add.
__device__ __forceinline__ float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double rounded_product(double a, double b) { return __dmul_rn(a, b); }

// The largest of three floats, compared as signed integers: one instruction on 9.0.
__device__ __forceinline__ float max_of_bits(float a, float b, float c) {
  return __int_as_float(__vimax3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
}

// Rounds x to TF32, to nearest with ties away from zero. The tensor core ignores the 13 low bits, so they are
// not cleared; cvt.rna.tf32 does the same and clears them, with one instruction more. NaN and infinity keep
// their bits: adding half to a NaN of all ones would carry over to -0.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t x) {
  return fabsf(__uint_as_float(x)) < INFINITY ? x + 0x1000 : x;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

__device__ __forceinline__ uint32_t pack_f16(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

}  // namespace jax_flash::cuda::ptx
