// dq = ds k on Hopper, from ds that the kernel for dk and dv (backward.cuh, wide_backward.cuh) has left in
// memory: one product, where backward_dq.cuh forms ds again from two others.
//
// A thread block owns one tile, 64 rows and up to 256 columns of dq of one head for each of its consumers,
// and walks the visible blocks of keys from the last to the first.
//
//   warp 0      loads keys
//   warp 1      loads ds
//   warps 4...  consumers
//
// Timeline of the last blocks of keys 1 and 0, and of the end of the tile. Consumers do not wait for each
// other, so the tensor cores have products of one while another waits.
//
//   warps 0, 1     k0, ds0
//   tensor cores   ds1 k1   ds0 k0
//   other units                     | dq to the place of the keys, and out
//
// Barriers. A ring has "full" and "empty" for each of its stages (ring.cuh). With TMA, a phase of "full" also
// waits for the bytes; "bar" is a hardware barrier.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   full, in     1: warp 0 for keys, warp 1     block of keys    consumers   keys; ds
//   two parts    for ds, with TMA
//   empty        a thread of each consumer      block of keys    warps 0, 1  the same, until dq += ds k is
//                                                                            done
//   tail         1: warp 0, with TMA            block with rows  warp 0      rows that it then fills with
//                                               that do not                  zeros, before it arrives at
//                                               count                        full itself
//   bar 1        all consumers                  the only one     consumers   keys, whose place dq takes
//   bar 2, 3     128: a consumer                block of keys    a consumer  "empty", at which one thread
//                                               that it skips                arrives for four warps
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "launch.h"
#include "mask.cuh"
#include "params.h"
#include "ptx/barrier.h"
#include "ptx/grid.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "ptx/wgmma.h"
#include "sm90/backward_dq_tiles.cuh"
#include "sm90/output.cuh"
#include "sm90/product.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda::sm90 {

// `Dkv`: the Config of the kernel for dk and dv.
template <class Dkv>
struct SharedDqConfig {
  using Arithmetic = typename Dkv::Arithmetic;
  using Element = typename Arithmetic::Element;
  static constexpr int kColumns = std::min(Dkv::kHeadDim, 256),
                       kColumnTiles = ceil_div(Dkv::kHeadDim, kColumns);
  static constexpr SharedDqTile kTile = shared_dq_tile(Dkv::kHeadDim);
  static constexpr int kConsumers = kTile.consumers, kThreads = 128 * (1 + kConsumers);
  static constexpr int kBlockM = 64 * kConsumers, kBlockN = kTile.block_n, kStages = kTile.stages;
  using Keys = BlockList<Dkv::kPolicy.may_have_mask(), /*kOfQueries=*/true, kBlockM, kBlockN>;
  // A tile of that kernel has so many keys, and goes through blocks of so many queries.
  static constexpr int kDsKeys = Dkv::kBlockN, kDsQueries = Dkv::kBlockM;
  static_assert(kDsKeys % kBlockN == 0);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static_assert(kConsumers == 2, "a product of 256 columns does not fit into the registers of more threads");

  // Shared memory: kStages times keys [kBlockN, kColumns] in chunks of columns, swizzled, and a tile of ds
  // for each consumer.
  static constexpr int kChunks = ceil_div(kColumns, kChunkColumns), kChunkBytes = kBlockN * kChunkRowBytes;
  static constexpr int kKBytes = kChunks * kChunkBytes, kDsTileBytes = 2 * SharedDs::kTileElements,
                       kDsBytes = kConsumers * kDsTileBytes;
  static_assert(kBlockN == SharedDs::kTile && kBlockM <= kSharedDsUnit);
  static constexpr int kDs = kStages * kKBytes, kBarriers = kDs + kStages * kDsBytes;
  static constexpr int kOutPitch = kBlockM * kChunkRowBytes;
  static_assert(kChunks * kOutPitch <= kDs, "dq leaves from the place of keys");
  static constexpr int kSharedBytes = kBarriers + 8 * (3 * kStages + 1);
  static_assert(kSharedBytes <= 227 * 1024);
};

struct SharedDqArguments {
  CUtensorMap k_map;   // [B, S, K, H] in boxes of kBlockN rows
  CUtensorMap dq_map;  // [B, T, N, H] in boxes of 16 rows: a warp's
  BackwardParams params;
  float scale;
  unsigned first_head, num_heads;  // of all batch elements': those of this launch
  unsigned section_heads;

  // The number, among those of all heads, of a tile of this launch. In a section the last rows of all heads
  // come first: causal tiles would otherwise be long at the end, too.
  __device__ unsigned tile_of_all(unsigned tile, unsigned m_blocks) const {
    const unsigned section = tile / (section_heads * m_blocks);
    const unsigned first = section * section_heads, in_section = tile - first * m_blocks;
    const unsigned heads = min(section_heads, num_heads - first), place = in_section / heads;
    return (first_head + first + in_section - place * heads) * m_blocks + place;
  }
};

// Addresses in shared memory.
template <class Config>
struct SharedDqShared {
  uint32_t base;

  __device__ uint32_t sK(int stage) const { return base + stage * Config::kKBytes; }
  __device__ uint32_t sDs(int stage, int consumer) const {
    return base + Config::kDs + stage * Config::kDsBytes + consumer * Config::kDsTileBytes;
  }
  __device__ uint32_t sDq(int row) const { return base + row * kChunkRowBytes; }

  using KeyRing = Ring<Config::kStages, /*kFullParts=*/2>;
  static constexpr int kKeys = 0, kDs = 1;  // parts of KeyRing
  __device__ KeyRing ring() const { return {base + Config::kBarriers}; }
  __device__ uint32_t tail() const { return base + Config::kBarriers + 8 * KeyRing::kNumBarriers; }
};

// Is ds of block n of keys and this part of the tile, 64 queries, to be looked at? It is 0 if none of them
// sees a key of the block. Where the kernel for dk and dv did not go through any of them, memory has
// anything.
template <class Config>
__device__ __forceinline__ bool has_ds(const BackwardDqWork<Config>& work, int n, int part) {
  if (work.keys.is_listed()) return work.keys.entry(n).is_visible(part);
  const int row = work.m_start + SharedDs::kTile * part;
  if (work.mask.hides(row, SharedDs::kTile, work.keys.start(n), Config::kBlockN)) return false;
  constexpr int kKeys = Config::kDsKeys, kQueries = Config::kDsQueries;
  const int key = work.keys.start(n) / kKeys * kKeys;
  const QueryBlocks seen_by = work.mask.template query_blocks<kQueries>(key, kKeys);
  return seen_by.count > 0 && row + SharedDs::kTile > seen_by.start &&
         row < seen_by.start + kQueries * seen_by.count;
}

// dq [64, 8 kTiles] += ds k, of a tile of ds and as many keys.
template <class Arithmetic, int kTiles>
__device__ __forceinline__ void issue_dq(float (&dq)[1][kTiles][4], uint32_t sDs, uint32_t sK, int k_pitch) {
  constexpr int kSquareBytes = 2 * SharedDs::kSquareElements, kMatrixBytes = 2 * SharedDs::kMatrixElements;
  const uint64_t ds = ptx::pieces_descriptor</*kNextRows=*/kMatrixBytes, /*kNextColumns=*/2 * kMatrixBytes>(
                     sDs),
                 k = ptx::matrix_descriptor<kChunkRowBytes>(sK, k_pitch);
  ptx::keep_in_place(dq[0]);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < SharedDs::kTile / 16; ++step) {
    ptx::Wgmma<Arithmetic, 8 * kTiles>::template shared</*kBAlongN=*/true, /*kAAlongM=*/true>(
        dq[0], ds + step * (SharedDs::kTile / 16) * kSquareBytes / 16, k + step * 16 * kChunkRowBytes / 16,
        /*accumulate=*/true);
  }
  ptx::wgmma_commit();
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    shared_dq_kernel(const __grid_constant__ SharedDqArguments arguments) {
  using Arithmetic = typename Config::Arithmetic;
  constexpr int kBlockN = Config::kBlockN, kTiles = Config::kColumns / 8;
  extern __shared__ __align__(1024) uint8_t start[];
  const SharedDqShared<Config> shared{ptx::shared_address(start)};
  const BackwardParams& params = arguments.params;

  if (threadIdx.x == 0) {
    shared.ring().init(1, Config::kConsumers);
    ptx::barrier_init(shared.tail(), 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::wait_for_grid_before();

  const unsigned m_blocks = static_cast<unsigned>(ceil_div(params.seqlen_q, Config::kBlockM));
  const unsigned tile = blockIdx.x;  // the column tiles of the same rows run side by side
  const BackwardDqWork<Config> work(params, arguments.tile_of_all(tile / Config::kColumnTiles, m_blocks));
  const int first_column = static_cast<int>(tile % Config::kColumnTiles) * Config::kColumns;
  const int warpgroup = uniform(threadIdx.x / 128), warp = uniform(threadIdx.x / 32);
  auto ring = shared.ring();

  // ---- The producer: a warp for keys, one for ds ----
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    if (warp == 0) {
      TileLoader<Config::kChunks> keys{arguments.k_map, work.batch,      work.mask.kv_length,
                                       work.seqlen_kv,  ptx::kEvictLast, shared.tail()};
      keys.first_column = first_column;
#pragma unroll 1
      for (int n = work.keys.count - 1; n >= 0; --n) {
        ring.wait_empty();
        __syncwarp();
        keys.template load<kBlockN>(shared.sK(ring.stage), ring.full(shared.kKeys), work.kv_head,
                                    work.keys.start(n));
        ring.advance();
      }
    } else if (warp == 1 && ptx::elect_one()) {
      const int head = work.batch * static_cast<int>(params.num_heads) + work.head -
                       static_cast<int>(arguments.first_head);
      const SharedDs shared_ds(params);
#pragma unroll 1
      for (int n = work.keys.count - 1; n >= 0; --n) {
        ring.wait_empty();
        const uint32_t full = ring.full(shared.kDs);
        ptx::barrier_arrive_expect(full, Config::kDsBytes);
        ptx::bulk_load(shared.sDs(ring.stage, 0), shared_ds.tile(head, work.keys.start(n), work.m_start),
                       Config::kDsBytes, full, ptx::kEvictFirst);
        ring.advance();
      }
    }
    return;
  }

  // ---- dq += ds k ----
  ptx::acquire_registers<Config::kConsumerRegisters>();
  const int consumer = warpgroup - 1, tile_row = 64 * consumer + 16 * (warp % 4);
  float dq[1][kTiles][4];
  clear(dq);
#pragma unroll 1
  for (int n = work.keys.count - 1; n >= 0; --n) {
    const auto at = ring.uniform();
    at.wait_full(shared.kKeys);
    at.wait_full(shared.kDs);
    if (has_ds(work, n, consumer)) {
      issue_dq<Arithmetic>(dq, uniform(shared.sDs(at.stage, consumer)), uniform(shared.sK(at.stage)),
                           Config::kChunkBytes);
      ptx::wgmma_wait<0>();
      ptx::keep_in_place(dq[0]);
    } else {
      ptx::named_barrier_wait(2 + consumer, 128);  // no product holds the four warps together
    }
    at.release_by_warpgroup();
    ring.advance();
  }

  // ---- Write dq, by way of the place of keys; fully masked rows get zeros ----
  ptx::named_barrier_wait(1, 128 * Config::kConsumers);
  const int row0 = work.m_start + tile_row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + accumulator_row(0, h);
    bool is_hidden = work.mask.first_key(row) > work.mask.last_key(row);
    if constexpr (Config::Keys::kMayBeListed) {
      const int64_t head = int64_t{work.batch} * params.num_heads + work.head;
      is_hidden |=
          row >= work.seqlen_q || params.lse_log2[head * stats_length(work.seqlen_q) + row] == INFINITY;
    }
    if (!is_hidden) continue;  // else there may be 0 * NaN of a key
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) dq[0][nt][2 * h] = dq[0][nt][2 * h + 1] = 0;
  }
  store_rows<Arithmetic>(dq, {arguments.scale, arguments.scale}, shared.sDq(tile_row), Config::kOutPitch);
  const OutputRows to{arguments.dq_map, params.head_dim, work.head,   row0,
                      work.seqlen_q,    work.batch,      first_column};
  send_rows<Config::kChunks>(to, shared.sDq(tile_row), Config::kOutPitch);
}

// Can ds be left in memory for dq, if there is room for it?
inline bool may_share_ds(const BackwardParams& params) { return params.shared_ds && !params.ds; }

// dq of the num_shared_heads query heads from first_head on, whose ds the kernel before has left.
template <class Config>
Status launch_shared_dq(const BackwardParams& params, int64_t first_head, int64_t heads,
                        const LaunchContext& context) {
  using Element = typename Config::Element;
  const int64_t B = params.batch, T = params.seqlen_q, S = params.seqlen_kv;
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim;
  // A section has about two tiles for each multiprocessor: few heads, of which keys stay in L2.
  const int64_t m_blocks = ceil_div(T, Config::kBlockM);
  const int64_t section = ceil_div(2 * context.multiprocessors, m_blocks * Config::kColumnTiles);
  SharedDqArguments arguments{.params = params,
                              .scale = LogitScale(params).scale,
                              .first_head = static_cast<unsigned>(first_head),
                              .num_heads = static_cast<unsigned>(heads),
                              .section_heads = static_cast<unsigned>(std::min(section, heads))};
  const bool has_maps = make_tensor_map<Element>(params.k, B, S, K, H, Config::kBlockN, &arguments.k_map) &&
                        make_tensor_map<Element>(params.dq, B, T, N, H, 16, &arguments.dq_map);
  if (!has_maps) return Status::not_served();
  if (const Status status = launch_lists(params, Config::Keys::shape(), context); status.failed()) {
    return status;
  }
  return launch_early(shared_dq_kernel<Config>, m_blocks * heads * Config::kColumnTiles, Config::kThreads,
                      Config::kSharedBytes, context, arguments);
}

}  // namespace jax_flash::cuda::sm90
