// Rings of buffers that one warp fills and others empty.
#pragma once

#include <cstdint>

namespace jax_flash::cuda::sm90 {

// The same value, known to the compiler to be the same in all lanes: what depends on it stays in uniform
// registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// A place in a ring of buffers, and the parity of the pass through the ring.
template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void advance(int count) {
    const int passed = stage + count;
    stage = passed % kStages;
    parity ^= passed / kStages % 2;
  }
};

}  // namespace jax_flash::cuda::sm90
