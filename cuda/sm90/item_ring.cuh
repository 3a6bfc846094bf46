// Which item of work is next, in kernels whose thread blocks stay for the whole launch: one warp of a thread
// block draws numbers from a counter in global memory and passes them to the others through shared memory.
//
// The thread block that is free first takes the next item. If items were assigned in advance, those of a
// thread block that cannot start, because another kernel occupies its multiprocessor, would begin when all
// others have ended. The result does not depend on which thread block computes an item.
#pragma once

#include <cstdint>

#include "accumulator.cuh"
#include "ptx/barrier.h"
#include "ptx/memory.h"
#include "sm90/ring.cuh"

namespace jax_flash::cuda::sm90 {

// The numbers in shared memory: two, so that the warp that draws may be an item ahead.
struct ItemRing {
  static constexpr int kStages = 2, kBytes = kStages * (8 + 8 + 4);
  uint32_t base;  // aligned to 8 bytes

  // The ring at the use of number `count`.
  __device__ Ring<kStages> ring(int count = 0) const {
    return {base, count % kStages, static_cast<uint32_t>(count / kStages % 2)};
  }
  __device__ uint32_t item(int stage) const { return base + 8 * Ring<kStages>::kNumBarriers + 4 * stage; }

  // By one thread; `readers` are warps.
  __device__ __forceinline__ void init(int readers) const { ring().init(1, readers); }
};

// One warp's place in the ring.
struct ItemReader {
  ItemRing items;
  int count = 0;  // of numbers so far, in place of stage and parity: a register more would be spilled

  // The next number, for all readers: drawn by a warp when it has begun to load the last of its item, so that
  // the others need not wait for it.
  __device__ __forceinline__ int draw(int* counter) {
    const auto ring = items.ring(count++);
    ring.wait_empty();
    __syncwarp();
    int item = 0;
    if (lane_id() == 0) {
      item = atomicAdd(counter, 1);
      ptx::store_shared(items.item(ring.stage), item);
      ptx::barrier_arrive(ring.full());
    }
    return uniform(item);
  }

  __device__ __forceinline__ int read() {
    const auto ring = items.ring(count++);
    ring.wait_full();
    const int item = ptx::load_shared(items.item(ring.stage));
    ring.release_by_warp();
    return uniform(item);
  }
};

// f(item) for each item that the block takes: without a counter, `item` alone. By a warp; kDraws: by the one
// that draws for the others.
template <bool kDraws, class F>
__device__ __forceinline__ void for_each_item(const ItemRing& ring, int* counter, int item, int num_items,
                                              F f) {
  ItemReader reader{ring};
#pragma unroll 1
  do {
    if (counter) item = kDraws ? reader.draw(counter) : reader.read();
    if (item >= num_items) break;
    f(item);
  } while (counter);
}

}  // namespace jax_flash::cuda::sm90
