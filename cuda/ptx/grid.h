// Two grids that follow each other on a stream, of which the second may start before the first has ended
// (launch_early of launch.h). On cards before 9.0 it does not, and these do nothing.
#pragma once

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

}  // namespace jax_flash::cuda::ptx
