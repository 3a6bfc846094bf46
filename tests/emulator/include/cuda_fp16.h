#pragma once

#include <cstdint>

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float x) : value(static_cast<_Float16>(x)) {}
  explicit operator float() const { return static_cast<float>(value); }
};
inline float __half2float(__half x) { return static_cast<float>(x); }
inline __half __ushort_as_half(uint16_t bits) { return __builtin_bit_cast(__half, bits); }
inline __half __float2half(float x) { return __half(x); }
