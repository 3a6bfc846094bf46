// TMA, the Tensor Memory Accelerator: one thread copies a box of a tensor between global and shared memory.
// Compute capability 9.0.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_flash::cuda::ptx {

// How long copied data should stay in L2. These constants are the policies that createpolicy.fractional makes
// for all of the data; making one for each copy was measured to cost 2 %.
inline constexpr uint64_t kEvictFirst = 0x12F0000000000000, kEvictLast = 0x14F0000000000000;

// Copies the box at (x0, x1, x2, x3) to `shared` and counts its bytes on `barrier`. Elements outside of the
// tensor are zero and count, too.
__device__ __forceinline__ void tensor_load(uint32_t shared, const CUtensorMap& map, uint32_t barrier, int x0,
                                            int x1, int x2, int x3, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(&map), "r"(barrier), "r"(x0), "r"(x1), "r"(x2), "r"(x3), "l"(policy)
      : "memory");
}

// Copies `bytes` of global memory to `shared` and counts them on `barrier`. `bytes` and both addresses are
// multiples of 16.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same; `policy`: see tensor_load.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Copies `shared` to the box at (x0, x1, x2, x3), except elements outside of the tensor.
__device__ __forceinline__ void tensor_store(const CUtensorMap& map, uint32_t shared, int x0, int x1, int x2,
                                             int x3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
      "r"(shared), "r"(x0), "r"(x1), "r"(x2), "r"(x3)
      : "memory");
}

// Copies `bytes` in `shared` to global memory. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_store(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared),
               "r"(bytes)
               : "memory");
}

// Adds `bytes` of float32 in `shared` to global memory. `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_reduce_add(float* global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
               "r"(shared), "r"(bytes)
               : "memory");
}

// Ends a group of stores and reductions.
__device__ __forceinline__ void tensor_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all stores committed by this thread but the last kPending groups have read shared memory.
template <int kPending = 0>
__device__ __forceinline__ void tensor_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Waits until all stores and reductions committed by this thread are done.
__device__ __forceinline__ void tensor_store_wait() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Orders accesses to global memory by this thread, and those that it has waited for, between the copy
// engine's and ordinary ones.
__device__ __forceinline__ void global_proxy_fence() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// Orders this thread's ordinary accesses to shared memory before later ones by TMA and wgmma.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace jax_flash::cuda::ptx
