// Forward, above head dim 256: two thread blocks, a cluster, compute a tile together. Each has half of the
// columns of every array, as in a kernel for half the head dim: neither shared memory nor registers have room
// for more. Scores are sums over all columns, so each block adds the other's part to its own. Then both know
// all scores, and each has its columns of the result. (Gradients divide products, not columns:
// wide_backward.cuh, wide_backward_dq.cuh.)
//
//   block 0   s0 = q0 k0^T        s0 + s1   softmax   p v0
//                           crossed
//   block 1   s1 = q1 k1^T        s1 + s0   softmax   p v1
//
// A lane sends its part, in float32, to the lane of the other block that holds the same scores. Each of the
// two computes the softmax: if they divided it, too, they would have to wait for each other a second time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "accumulator.cuh"
#include "ptx/barrier.h"
#include "ptx/cluster.h"
#include "ptx/memory.h"
#include "sm90/cluster.cuh"
#include "sm90/ring.cuh"
#include "sm90/wide_heads.cuh"

namespace jax_flash::cuda::sm90 {

// The columns of a thread block.
constexpr int block_columns(int head_dim) { return is_wide(head_dim) ? head_dim / 2 : head_dim; }

// Which of a tensor's columns is this block's first.
template <class Config>
__device__ __forceinline__ int first_column() {
  return Config::kHasHalves ? Config::kHeadDim * ptx::cluster_rank() : 0;
}

// A warp's way to the scores [16, 8 * kTiles] of the other half, with room for kBuffers of its parts; 0:
// there is no other half.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   full         1: a lane of this warp, with   part             this warp   the other half's part
//                the bytes
//   empty        1: a lane of the other         part             this warp   the part that it has sent, until
//                half's warp                                                 that has been read
template <int kTiles, int kBuffers>
struct OtherHalf {
  using Parts = Ring<std::max(kBuffers, 1)>;
  static constexpr int kPartBytes = kTiles * kPieceBytes;
  static constexpr int kBytes = kBuffers * kPartBytes, kNumBarriers = kBuffers > 0 ? Parts::kNumBarriers : 0;

  uint32_t buffers;
  Parts ring;

  // By one thread.
  __device__ __forceinline__ void init() const {
    if constexpr (kBuffers > 0) ring.init(1, 1);
  }

  __device__ __forceinline__ void add_to(float (&scores)[kTiles][4]) {
    if constexpr (kBuffers > 0) {
      const uint32_t part = buffers + ring.stage * kPartBytes + 16 * lane_id();
      const uint32_t to = ptx::peer_address(part), full = ptx::peer_address(ring.full());
      if (lane_id() == 0) ptx::barrier_arrive_expect(ring.full(), kPartBytes);
      ptx::barrier_wait(ring.empty(), ring.parity ^ 1);
#pragma unroll
      for (int nt = 0; nt < kTiles; ++nt) ptx::store_to_peer(to + nt * kPieceBytes, scores[nt], full);
      ptx::barrier_wait(ring.full(), ring.parity);
#pragma unroll
      for (int nt = 0; nt < kTiles; ++nt) {
        float theirs[4];
        ptx::load_shared_x4(theirs, part + nt * kPieceBytes);
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[nt][i] += theirs[i];
      }
      free_for_peer(ring.empty());
      ring.advance();
    }
  }
};

}  // namespace jax_flash::cuda::sm90
