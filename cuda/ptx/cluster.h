// Clusters of thread blocks, which run side by side and write to each other's shared memory. Compute
// capability 9.0.
#pragma once

#include <cstdint>

namespace jax_flash::cuda::ptx {

// This block's rank in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster that have not ended. By whole warps.
__device__ __forceinline__ void cluster_wait() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// The address, in the cluster, of what lies at `shared` in the other block of a cluster of two.
__device__ __forceinline__ uint32_t peer_address(uint32_t shared) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(cluster_rank() ^ 1));
  return address;
}

// Stores 16 bytes to the other block asynchronously, and counts them on its `barrier`. Both are addresses in
// the cluster.
__device__ __forceinline__ void store_to_peer(uint32_t address, const float (&r)[4], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "f"(r[0]), "f"(r[1]), "f"(r[2]), "f"(r[3]), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void store_to_peer(uint32_t address, const uint32_t (&r)[4], uint32_t barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
          address),
      "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]), "r"(barrier)
      : "memory");
}

// Arrives at a barrier of the other block, when this warp has read what the barrier protects. PTX promises
// that order only for a release in the scope of the cluster, which also waits for all stores to memory, and
// whose acquire empties L1: 1.37 ms instead of 0.99. Here reads and arrival pass through shared memory in
// order.
__device__ __forceinline__ void arrive_at_peer(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

}  // namespace jax_flash::cuda::ptx
