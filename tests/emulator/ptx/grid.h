// cuda/ptx/grid.h for the host, where a grid starts after the one before it, and a block too.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace jax_flash::cuda::ptx {

inline void let_next_grid_start() {}
inline void wait_for_grid_before() {}

inline constexpr bool kBlocksRunSideBySide = false;
inline void arrive(int32_t* arrived) {
  emulator::note_arrival();
  ++*arrived;
}
// Blocks come one after the other, so their turns must, too.
inline void wait_for_arrivals(const int32_t* arrived, int32_t count) {
  if (*arrived != count) emulator::fail("a block would wait for one that has not begun, or comes too late");
}
inline void arrive_and_wait(int32_t*, int32_t) { std::abort(); }

}  // namespace jax_flash::cuda::ptx
