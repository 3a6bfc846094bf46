// cuda/ptx/wgmma.h for the host.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "hopper.h"

namespace jax_flash::cuda::ptx {

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::commit_products(); }
template <int kPending>
void wgmma_wait() {
  emulator::wait_for_products(kPending);
}
template <class Registers>
void keep_in_place(Registers&) {}

template <int kRowBytes>
uint64_t matrix_descriptor(uint32_t address, uint32_t pitch) {
  return uint64_t{kRowBytes == 128 ? 1 : 2} << 62 | uint64_t{8 * kRowBytes / 16} << 32 |
         uint64_t{pitch / 16} << 16 | address / 16;
}

template <int kNextRows, int kNextColumns>
uint64_t pieces_descriptor(uint32_t address) {
  return uint64_t{kNextColumns / 16} << 32 | uint64_t{kNextRows / 16} << 16 | address / 16;
}

template <class Arithmetic, int kN>
struct Wgmma {
  static_assert(kN % 8 == 0 && kN <= 256);
  static constexpr bool kIsHalf = std::is_same_v<Arithmetic, float16>;

  template <bool kBAlongN, bool kAAlongM = false>
  static void shared(float (&d)[kN / 8][4], uint64_t a, uint64_t b, bool accumulate) {
    emulator::multiply({&d[0][0], kN, accumulate, nullptr, a, b, kAAlongM, kBAlongN, kIsHalf});
  }
  static void registers(float (&d)[kN / 8][4], const uint32_t (&a)[4], uint64_t b, bool accumulate = true) {
    emulator::multiply({&d[0][0], kN, accumulate, a, 0, b, false, true, kIsHalf});
  }
};

}  // namespace jax_flash::cuda::ptx
