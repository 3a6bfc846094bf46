// The 16-bit types, converted with integer arithmetic. Compilers vectorize it on every machine, and they need
// not support the types.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

namespace jax_flash::cpu {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type in which a tensor of type T is computed.
template <typename T>
using ComputeType = std::conditional_t<std::is_same_v<T, double>, double, float>;

inline double ToCompute(double x) { return x; }
inline float ToCompute(float x) { return x; }
inline float ToCompute(BFloat16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float ToCompute(Half x) {
  const uint32_t sign = uint32_t{x.bits} >> 15 << 31;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Rebiases the exponent from 15 to 127. Infinity and NaN get there by overflow.
  const float normal = std::bit_cast<float>((magnitude << 13) + (0xe0u << 23)) * 0x1p-112f;
  const float subnormal = std::bit_cast<float>(magnitude | (126u << 23)) - 0.5f;
  const float value = magnitude < 0x400u ? subnormal : normal;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) | sign);
}

// Rounds to nearest even; a NaN stays a NaN.
template <typename T>
T FromCompute(ComputeType<T> x) {
  return x;
}
template <>
inline BFloat16 FromCompute<BFloat16>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(x != x ? 0x7fc0u : rounded)};
}
template <>
inline Half FromCompute<Half>(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = bits >> 31 << 15;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Adding a power of two that is 2^13 units of x's last place in float16 away rounds it there.
  const float overflowed = std::bit_cast<float>(magnitude) * 0x1p112f * 0x1p-110f;
  const uint32_t exponent = magnitude & 0x7f800000u;
  const uint32_t bias = (exponent < 0x38800000u ? 0x38800000u : exponent) + 0x07800000u;
  const uint32_t base = std::bit_cast<uint32_t>(overflowed + std::bit_cast<float>(bias));
  const uint32_t rounded = ((base >> 13) & 0x7c00u) + (base & 0x0fffu);
  return {static_cast<uint16_t>(sign | (x != x ? 0x7e00u : rounded))};
}

}  // namespace jax_flash::cpu
