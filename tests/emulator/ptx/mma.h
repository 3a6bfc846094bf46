// cuda/ptx/mma.h for the host.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <array>
#include <bit>
#include <cstdint>

namespace jax_flash::cuda::ptx {

template <class Register>
struct MmaOperands {
  std::array<Register, 4> a;
  std::array<Register, 2> b;
};

// `element(registers, i)`: of 16 bytes, element i of a lane's registers. Lane l has `kPerLane` neighboring k
// in each register.
template <int kPerLane, class Number, class Register, class F>
void multiply(Number (&d)[4], const Register (&a)[4], const Register (&b)[2], F element) {
  const auto all = emulator::from_all_lanes(MmaOperands<Register>{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  constexpr int kTerms = 1 + 8 * kPerLane;
  double terms[4][kTerms] = {{d[0]}, {d[1]}, {d[2]}, {d[3]}};
  int term = 1;
  for (int half = 0; half < 2; ++half) {  // of the k
    for (int lane = 0; lane < 4; ++lane) {
      const MmaOperands<Register> row = all[4 * g + lane];
      const MmaOperands<Register> columns[2] = {all[4 * (2 * t) + lane], all[4 * (2 * t + 1) + lane]};
      for (int i = 0; i < kPerLane; ++i, ++term) {
        for (int j = 0; j < 4; ++j) {
          terms[j][term] = double{element(row.a[j / 2 + 2 * half], i)} * element(columns[j % 2].b[half], i);
        }
      }
    }
  }
  for (int j = 0; j < 4; ++j) d[j] = emulator::sum_of_products<Number>(terms[j]);
}

template <class Element>
float half_of(uint32_t two, int i) {
  return static_cast<float>(std::bit_cast<Element>(static_cast<uint16_t>(two >> 16 * i)));
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply<2>(d, a, b, half_of<__nv_bfloat16>);
}
inline void mma_f16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply<2>(d, a, b, half_of<__half>);
}
inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply<1>(d, a, b, [](uint32_t x, int) { return std::bit_cast<float>(x & 0xffffe000); });
}

inline void mma_f64(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
  multiply<1>(d, a, b, [](double x, int) { return x; });
}

}  // namespace jax_flash::cuda::ptx
