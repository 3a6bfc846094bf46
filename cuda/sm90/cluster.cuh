// Kernels of which Config::kClusterBlocks thread blocks, a cluster, share a tile.
#pragma once

#include <cstdint>

#include "launch.h"
#include "ptx/cluster.h"

namespace jax_flash::cuda::sm90 {

// The number of the first tile of this block or of its cluster.
template <class Config>
__device__ __forceinline__ unsigned first_item() {
  return blockIdx.x / Config::kClusterBlocks;
}

// A tile's address as descriptors of products have it. In a cluster, bits above these say which block's it
// is.
template <class Config>
__device__ __forceinline__ uint32_t descriptor_address(uint32_t address) {
  return Config::kClusterBlocks > 1 ? address & ((1 << 18) - 1) : address;
}

// Before another block is sent anything, and before this one's shared memory is given up. By whole warps.
template <class Config>
__device__ __forceinline__ void wait_for_cluster() {
  if constexpr (Config::kClusterBlocks > 1) {
    __syncwarp();
    ptx::cluster_wait();
  }
}

template <class Config, class... Parameters>
Status launch_tiles(void (*kernel)(Parameters...), int64_t tiles, const LaunchContext& context,
                    const Parameters&... parameters) {
  return launch_clusters(kernel, tiles, Config::kClusterBlocks, Config::kThreads, Config::kSharedBytes,
                         context, parameters...);
}

}  // namespace jax_flash::cuda::sm90
