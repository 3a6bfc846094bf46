// Products of a warpgroup with tiles in shared memory: each is issued and committed as one group, without a
// wait. Wide tiles are chunks of 64 columns, `pitch` bytes apart, swizzled (tensor_map.h). The last one may
// be wider than what is left. Tiles of 32 columns are one narrow chunk.
#pragma once

#include <cstdint>

#include "arithmetic.h"
#include "ptx/wgmma.h"
#include "sm90/tensor_map.h"

namespace jax_flash::cuda::sm90 {

// acc [64, kN] = or += a [64, kDepth] b^T, b [kN, kDepth], of descriptors of their tiles; not committed.
template <class Arithmetic, int kDepth, bool kAccumulate, int kAColumns = chunk_columns(kDepth), int kTiles>
__device__ __forceinline__ void issue_score_steps(float (&acc)[1][kTiles][4], uint64_t a, int a_pitch,
                                                  uint64_t b, int b_pitch) {
  constexpr int kASteps = kAColumns / 16, kBSteps = chunk_columns(kDepth) / 16;
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    ptx::Wgmma<Arithmetic, 8 * kTiles>::template shared</*kBAlongN=*/false>(
        acc[0], a + (step / kASteps * a_pitch + step % kASteps * 32) / 16,
        b + (step / kBSteps * b_pitch + step % kBSteps * 32) / 16, kAccumulate || step > 0);
  }
}

// The same of tiles. A chunk of a begins kAColumns after the one before.
template <class Arithmetic, int kDepth, bool kAccumulate = false, int kAColumns = chunk_columns(kDepth),
          int kTiles>
__device__ __forceinline__ void issue_scores(float (&acc)[1][kTiles][4], uint32_t a_tile, int a_pitch,
                                             uint32_t b_tile, int b_pitch) {
  constexpr int kRowBytes = 2 * chunk_columns(kDepth);
  const uint64_t a = ptx::matrix_descriptor<kRowBytes>(a_tile, 0),
                 b = ptx::matrix_descriptor<kRowBytes>(b_tile, 0);
  ptx::keep_in_place(acc[0]);
  ptx::wgmma_fence();
  issue_score_steps<Arithmetic, kDepth, kAccumulate, kAColumns>(acc, a, a_pitch, b, b_pitch);
  ptx::wgmma_commit();
}

// acc [64, kN] = or += a [64, kDepth] b, b [kDepth, kN] with rows of kBRowBytes in a chunk.
template <class Arithmetic, int kDepth, bool kAccumulate, int kBRowBytes = kChunkRowBytes, int kTiles>
__device__ __forceinline__ void issue_sum(float (&acc)[1][kTiles][4], uint32_t a_tile, int a_pitch,
                                          uint32_t b_tile, int b_pitch) {
  const uint64_t a = ptx::matrix_descriptor<kChunkRowBytes>(a_tile, 0),
                 b = ptx::matrix_descriptor<kBRowBytes>(b_tile, b_pitch);
  ptx::keep_in_place(acc[0]);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    ptx::Wgmma<Arithmetic, 8 * kTiles>::template shared</*kBAlongN=*/true>(
        acc[0], a + (step / 4 * a_pitch + step % 4 * 32) / 16, b + step * 16 * kBRowBytes / 16,
        kAccumulate || step > 0);
  }
  ptx::wgmma_commit();
}

// acc [64, kN] = or += a [64, 16 kSteps] b, a in registers, b [16 kSteps, kN]; not committed.
template <class Arithmetic, int kBRowBytes, int kSteps, int kTiles>
__device__ __forceinline__ void issue_sum_steps(float (&acc)[1][kTiles][4], uint32_t (&a)[kSteps][4],
                                                uint64_t b, bool accumulate = true) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    ptx::Wgmma<Arithmetic, 8 * kTiles>::registers(acc[0], a[step], b + step * 16 * kBRowBytes / 16,
                                                  accumulate || step > 0);
  }
}

// The same of a tile b.
template <class Arithmetic, int kBRowBytes = kChunkRowBytes, int kSteps, int kTiles>
__device__ __forceinline__ void issue_sum(float (&acc)[1][kTiles][4], uint32_t (&a)[kSteps][4],
                                          uint32_t b_tile, int b_pitch) {
  const uint64_t b = ptx::matrix_descriptor<kBRowBytes>(b_tile, b_pitch);
  ptx::keep_in_place(a);
  ptx::keep_in_place(acc[0]);
  ptx::wgmma_fence();
  issue_sum_steps<Arithmetic, kBRowBytes>(acc, a, b);
  ptx::wgmma_commit();
}

// Scores and sums of two planes each, without the product of the low ones: small products first, since the
// sums are cut off, not rounded. Low planes lie a_plane and b_plane bytes behind. The backward kernel has the
// same order in scores (multiply_rows of sm80/product.cuh).
template <class Arithmetic, int kDepth, int kTiles>
__device__ __forceinline__ void issue_scores_of_planes(float (&acc)[1][kTiles][4], uint32_t a_tile,
                                                       int a_pitch, int a_plane, uint32_t b_tile, int b_pitch,
                                                       int b_plane) {
  constexpr int kRowBytes = 2 * chunk_columns(kDepth);
  const uint64_t a = ptx::matrix_descriptor<kRowBytes>(a_tile, 0),
                 b = ptx::matrix_descriptor<kRowBytes>(b_tile, 0);
  ptx::keep_in_place(acc[0]);
  ptx::wgmma_fence();
  issue_score_steps<Arithmetic, kDepth, /*kAccumulate=*/false>(acc, a + a_plane / 16, a_pitch, b, b_pitch);
  issue_score_steps<Arithmetic, kDepth, /*kAccumulate=*/true>(acc, a, a_pitch, b + b_plane / 16, b_pitch);
  issue_score_steps<Arithmetic, kDepth, /*kAccumulate=*/true>(acc, a, a_pitch, b, b_pitch);
  ptx::wgmma_commit();
}

template <class Arithmetic, int kBRowBytes, int kSteps, int kTiles>
__device__ __forceinline__ void issue_sum_of_planes(float (&acc)[1][kTiles][4], uint32_t (&a)[2][kSteps][4],
                                                    uint32_t b_tile, int b_pitch, int b_plane,
                                                    bool accumulate = true) {
  const uint64_t b = ptx::matrix_descriptor<kBRowBytes>(b_tile, b_pitch);
  ptx::keep_in_place(a[0]);
  ptx::keep_in_place(a[1]);
  ptx::keep_in_place(acc[0]);
  ptx::wgmma_fence();
  issue_sum_steps<Arithmetic, kBRowBytes>(acc, a[1], b, accumulate);
  issue_sum_steps<Arithmetic, kBRowBytes>(acc, a[0], b + b_plane / 16);
  issue_sum_steps<Arithmetic, kBRowBytes>(acc, a[0], b);
  ptx::wgmma_commit();
}

// Packs tile nt of a product's accumulators as a part of the first operand of the next product: each lane
// already holds the elements that it needs.
template <class Arithmetic, int kSteps>
__device__ __forceinline__ void make_operand(const float (&tile)[4], int nt, uint32_t (&operand)[kSteps][4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    operand[nt / 2][nt % 2 * 2 + h] = pack<Arithmetic>(tile[2 * h], tile[2 * h + 1]);
}

}  // namespace jax_flash::cuda::sm90
