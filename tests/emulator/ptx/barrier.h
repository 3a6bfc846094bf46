// cuda/ptx/barrier.h for the host.
#pragma once

#include "hopper.h"

namespace jax_flash::cuda::ptx {

inline void barrier_init(uint32_t barrier, int arrivals) { emulator::init_barrier(barrier, arrivals); }
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) { emulator::arrive(barrier, 0); }
inline void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) { emulator::arrive(barrier, bytes); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulator::wait_for_phase(barrier, parity); }

// Not lane 0: which lane it is, is the hardware's choice.
inline bool elect_one() {
  __syncwarp();
  return threadIdx.x % 32 == 5;
}

inline void named_barrier_wait(int id, int threads) {
  emulator::arrive_at_named(id, threads, /*waits=*/true);
}
inline void named_barrier_arrive(int id, int threads) {
  emulator::arrive_at_named(id, threads, /*waits=*/false);
}

template <int kRegisters>
void release_registers() {}
template <int kRegisters>
void acquire_registers() {}

}  // namespace jax_flash::cuda::ptx
