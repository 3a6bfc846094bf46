// Barriers between the warps of a thread block: mbarriers in shared memory, which copies can complete, and
// the hardware's named barriers. Also setmaxnreg, by which warpgroups hand registers to each other.
#pragma once

#include <cstdint>

namespace jax_flash::cuda::ptx {

// An mbarrier completes a phase after `arrivals` arrivals, when all expected bytes have been copied. A waiter
// names the parity of the phase that it waits for. On a fresh barrier, a wait for parity 1 returns at once.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes barriers that this thread has initialized visible to TMA. The threads that use them must synchronize
// with it.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and makes the phase wait for `bytes` of copies as well.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// How long the hardware may suspend a waiting thread, which a completed phase wakes, before it asks again.
inline constexpr uint32_t kSuspendNanoseconds = 10'000'000;

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@!done bra wait_%=;\n"
      "}" ::"r"(barrier),
      "r"(parity), "r"(kSuspendNanoseconds)
      : "memory");
}

// True in one lane of a converged warp. The compiler then knows that a single lane runs what follows.
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

// Named barrier `id` (1 to 15; __syncthreads has 0) completes when `threads` threads have arrived or are
// waiting.
__device__ __forceinline__ void named_barrier_wait(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Returns registers of this warpgroup to the thread block's pool, or takes some and waits until there are
// enough.
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
