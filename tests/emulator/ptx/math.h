// cuda/ptx/math.h for the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <bit>
#include <cmath>
#include <cstdint>

namespace jax_flash::cuda::ptx {

inline float exp2_approx(float x) { return std::exp2(x); }
inline float reciprocal_approx(float x) { return 1 / x; }

inline float rounded_product(float a, float b) { return a * b; }
inline double rounded_product(double a, double b) { return a * b; }

inline float max_of_bits(float a, float b, float c) {
  const auto bits = [](float x) { return std::bit_cast<int32_t>(x); };
  return std::bit_cast<float>(max(max(bits(a), bits(b)), bits(c)));
}

inline uint32_t round_to_tf32(uint32_t x) {
  return std::fabs(__uint_as_float(x)) < INFINITY ? x + 0x1000 : x;
}

template <class Element>
uint32_t pack_two(float low, float high) {
  const auto bits = [](float x) { return uint32_t{std::bit_cast<uint16_t>(static_cast<Element>(x))}; };
  return bits(low) | bits(high) << 16;
}
inline uint32_t pack_bf16(float low, float high) { return pack_two<__nv_bfloat16>(low, high); }
inline uint32_t pack_f16(float low, float high) { return pack_two<__half>(low, high); }

}  // namespace jax_flash::cuda::ptx
