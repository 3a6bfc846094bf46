// Barriers between the warps of a block: mbarriers in shared memory, which copies can complete, and the
// numbered ones of the hardware. And the registers that warpgroups hand to each other.
#pragma once

#include <cstdint>

namespace jax_flash::cuda::ptx {

// An mbarrier completes a phase when `arrivals` have arrived and all bytes expected have come. A waiter names
// the parity of the phase that it waits for; a fresh barrier passes those who wait for parity 1.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes the barriers that this thread has set up known to the copy engine; __syncthreads() must follow.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and has the phase wait for `bytes` of copies, too.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@!done bra wait_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity), "r"(10'000'000)
      : "memory");
}

// True in one lane of a converged warp, of which the compiler then knows that it is alone.
__device__ __forceinline__ bool elect_one() {
  uint32_t is_elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(is_elected));
  return is_elected;
}

// Hardware barrier `id` (1 to 15; 0 is __syncthreads') completes when `threads` have arrived or are waiting.
__device__ __forceinline__ void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Gives registers of this warpgroup back to the block's pool, or takes some, waiting until it has enough.
template <int kRegisters>
__device__ __forceinline__ void release_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void acquire_registers() {
  static_assert(kRegisters % 8 == 0 && kRegisters >= 24 && kRegisters <= 256);
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace jax_flash::cuda::ptx
