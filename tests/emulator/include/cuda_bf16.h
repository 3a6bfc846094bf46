#pragma once

#include <cmath>
#include <cstdint>

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    const uint32_t full = __builtin_bit_cast(uint32_t, x);
    // To nearest, ties to even; a NaN stays one.
    bits = std::isnan(x) ? 0x7fff : static_cast<uint16_t>((full + 0x7fff + (full >> 16 & 1)) >> 16);
  }
  explicit operator float() const { return __builtin_bit_cast(float, uint32_t{bits} << 16); }
};
inline float __bfloat162float(__nv_bfloat16 x) { return static_cast<float>(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
