// cuda/ptx/tensor_copy.h for the host.
#pragma once

#include <cuda.h>

#include "hopper.h"

namespace jax_flash::cuda::ptx {

inline constexpr uint64_t kEvictFirst = 0, kEvictLast = 0;

inline void tensor_load(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x0, int x1, int x2,
                        int x3, uint64_t) {
  emulator::load_box(shared, map, barrier, {x0, x1, x2, x3});
}
inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint64_t = 0) {
  emulator::load_bytes(shared, global, bytes, barrier);
}
inline void tensor_store(const CUtensorMap& map, uint32_t shared, int x0, int x1, int x2, int x3) {
  emulator::store_box(map, shared, {x0, x1, x2, x3});
}
inline void bulk_store(float* global, uint32_t shared, uint32_t bytes) {
  emulator::store_floats(global, shared, bytes);
}
inline void bulk_reduce_add(float* global, uint32_t shared, uint32_t bytes) {
  emulator::add_floats(global, shared, bytes);
}
inline void tensor_store_commit() { emulator::commit_stores(); }
template <int kPending = 0>
inline void tensor_store_wait_read() {
  emulator::wait_for_stores(kPending);
}
inline void tensor_store_wait() {
  emulator::wait_for_stores(0);
  emulator::note_stores_are_done();
}
inline void async_proxy_fence() {}
inline void global_proxy_fence() {}

}  // namespace jax_flash::cuda::ptx
