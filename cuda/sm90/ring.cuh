// A pipeline through shared memory: a ring of buffers that some warps fill and others empty.
#pragma once

#include <cstdint>

#include "accumulator.cuh"
#include "ptx/barrier.h"

namespace jax_flash::cuda::sm90 {

// The same value, known to the compiler to be the same in all lanes: what depends on it stays in uniform
// registers.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// A ring of kStages buffers, as one of its users sees it: the stage that the user has come to, and the
// barriers, for each buffer one "full" and one "empty". Every user has a Ring of its own, and all advance
// alike.
//
// Use n of a buffer (n = 0, 1, ...) completes phase n of "full" when the buffer is filled and phase n of
// "empty" when all readers have released it. The producer of use n waits for phase n - 1 of "empty", which a
// fresh barrier counts as complete. A wait names a phase by its parity alone, n % 2, so a thread that falls
// two phases behind may wait forever. Therefore a reader releases a buffer only when all threads that it
// speaks for have passed wait_full(), and a producer's warp waits through one elected lane, or its lanes meet
// after each wait.
//
// Parts of a buffer may be filled, or released, one by one: each part has its own barrier.
template <int kStages, int kFullParts = 1, int kEmptyParts = 1>
struct Ring {
  uint32_t barriers;  // full[kFullParts][kStages], empty[kEmptyParts][kStages], 8 bytes each
  int stage = 0;
  uint32_t parity = 0;

  static constexpr int kNumBarriers = kStages * (kFullParts + kEmptyParts);

  __device__ __forceinline__ uint32_t full(int part = 0) const {
    return barriers + 8 * (part * kStages + stage);
  }
  __device__ __forceinline__ uint32_t empty(int part = 0) const {
    return barriers + 8 * ((kFullParts + part) * kStages + stage);
  }

  // By one thread of the block: how many arrivals complete a phase.
  __device__ __forceinline__ void init(int full_arrivals, int empty_arrivals) const {
    for (int i = 0; i < kNumBarriers; ++i) {
      ptx::barrier_init(barriers + 8 * i, i < kStages * kFullParts ? full_arrivals : empty_arrivals);
    }
  }

  __device__ __forceinline__ void wait_full(int part = 0) const { ptx::barrier_wait(full(part), parity); }
  __device__ __forceinline__ void wait_empty(int part = 0) const {
    ptx::barrier_wait(empty(part), parity ^ 1);
  }

  // This thread arrives at "empty".
  __device__ __forceinline__ void release(int part = 0) const { ptx::barrier_arrive(empty(part)); }
  // One lane arrives for its warp.
  __device__ __forceinline__ void release_by_warp(int part = 0) const {
    __syncwarp();
    if (lane_id() == 0) release(part);
  }
  // One thread arrives for its warpgroup. Only after a wait for products, which end for all its warps at
  // once, or after a barrier among them.
  __device__ __forceinline__ void release_by_warpgroup(int part = 0) const {
    if (threadIdx.x % 128 == 0) release(part);
  }

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

  // This ring at the stage of one that advances with it, so that one stage is kept for both: keys and values.
  __device__ __forceinline__ Ring at(const Ring& other) const {
    return {barriers, other.stage, other.parity};
  }

  // The same ring, with a stage that the compiler knows to be uniform.
  __device__ __forceinline__ Ring uniform() const { return {barriers, sm90::uniform(stage), parity}; }
};

}  // namespace jax_flash::cuda::sm90
