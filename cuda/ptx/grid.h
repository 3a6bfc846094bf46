// Blocks and grids that wait for each other.
//
// Two grids that follow each other on a stream, of which the second may start before the first has ended
// (launch_early of launch.h). On cards before 9.0 it does not, and these do nothing.
#pragma once

#include <cstdint>

namespace jax_flash::cuda::ptx {

// The next grid may start once all blocks have called this or ended. It does not mean that results are there.
__device__ __forceinline__ void let_next_grid_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits until the grid before has ended and its results can be read.
__device__ __forceinline__ void wait_for_grid_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Does a block that waits leave others room to run?
inline constexpr bool kBlocksRunSideBySide = true;

// Adds 1 to `arrived`. What this thread has written, and others before a barrier, is then seen by threads
// that have waited for it.
__device__ __forceinline__ void arrive(int32_t* arrived) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(arrived) : "memory");
}

// Waits until `count` have arrived.
__device__ __forceinline__ void wait_for_arrivals(const int32_t* arrived, int32_t count) {
  int32_t value;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(arrived) : "memory");
  } while (value < count);
}

// Counts this block at `arrived`, and waits until `count` blocks have come.
__device__ __forceinline__ void arrive_and_wait(int32_t* arrived, int32_t count) {
  arrive(arrived);
  wait_for_arrivals(arrived, count);
}

}  // namespace jax_flash::cuda::ptx
