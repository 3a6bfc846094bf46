// Kernels of which Config::kClusterBlocks thread blocks, a cluster, share a tile.
#pragma once

#include <cstdint>

#include "accumulator.cuh"
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

// A warp's messages to the same warp of the other block consist of pieces: of each lane 16 bytes.
inline constexpr int kPieceBytes = 32 * 16;

// Sends this lane's pieces to the other block, where the first goes to what lies at `place` in this one, and
// counts them there, on what is `barrier` here.
template <class Piece, int kPieces>
__device__ __forceinline__ void send_to_peer(const Piece (&pieces)[kPieces][4], uint32_t place,
                                             uint32_t barrier) {
  const uint32_t to = ptx::peer_address(place), there = ptx::peer_address(barrier);
#pragma unroll
  for (int i = 0; i < kPieces; ++i) ptx::store_to_peer(to + i * kPieceBytes, pieces[i], there);
}

// This warp has read what came: its place is free, which `barrier` says in the other block.
__device__ __forceinline__ void free_for_peer(uint32_t barrier) {
  __syncwarp();
  if (lane_id() == 0) ptx::arrive_at_peer(ptx::peer_address(barrier));
}

template <class Config, class... Parameters>
Status launch_tiles(void (*kernel)(Parameters...), int64_t tiles, const LaunchContext& context,
                    const Parameters&... parameters) {
  return launch_clusters(kernel, tiles, Config::kClusterBlocks, Config::kThreads, Config::kSharedBytes,
                         context, parameters...);
}

}  // namespace jax_flash::cuda::sm90
