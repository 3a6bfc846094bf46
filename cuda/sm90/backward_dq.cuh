// dq alone, without additions to global memory, on Hopper: above head dim 128, and wherever backward.cuh does
// not sum it (sums_dq in jax_flash/_kernel_choice.py). Where ds is in memory, shared_dq.cuh takes its place.
//
// A thread block owns one tile, 64 rows of dq of one head for each of its two consumers, and walks the
// visible blocks of keys from the last to the first. p, dp and ds stay in a warp's registers, and ds is the
// first operand of dq += ds k as it lies there. Above head dim 128 ds may also go to memory
// (BackwardParams::ds).
//
//   warp 0      loads q, then keys
//   warp 1      loads dout, then values
//   warps 4...  two consumers
//
// Timeline of one consumer: the last blocks of keys 1 and 0, and the end of the tile, where the hardware
// starts the next thread block. S issues q k^T, D issues dout v^T, dQ issues dq += ds k. The other consumer
// does the same without waiting for this one.
//
//   warps 0, 1     k0, v0
//   tensor cores   S1 D1           dQ1   S0 D0           dQ0
//   other units        p1     ds1            p0     ds0       | dq to the place of q, and out
//                                                             ^ end of the tile
//
// Above head dim 256 wide_backward_dq.cuh takes the place of this kernel.
//
// Barriers. A ring has "full" and "empty" for each of its stages (ring.cuh). With TMA, a phase of "full" also
// waits for the bytes; "bar" is a hardware barrier.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   q_full       1: warp 0, with TMA            the only one     consumers   q
//   dout_full    1: warp 1, with TMA            the only one     consumers   dout
//   k full       1: warp 0, with TMA            block of keys    consumers   keys
//   k empty      2: a thread of each consumer   block of keys    warp 0      the same, until dq += ds k is
//                                                                            done
//   v full       1: warp 1, with TMA            block of keys    consumers   values
//   v empty      2: a thread of each consumer   block of keys    warp 1      the same, until dout v^T is
//                                                                            done
//   tail         1: warp 0 or 1, with TMA       block with rows  that warp   rows that it then fills with
//                                               that do not                  zeros, before it arrives at
//                                               count                        full itself
//   bar 1 + c    128: consumer c                the only one,    consumer c  q, which a product reads for
//                                               not planes                   all four warps, from dq
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "delta.cuh"
#include "launch.h"
#include "mask.cuh"
#include "pairs.cuh"
#include "params.h"
#include "planes.cuh"
#include "ptx/barrier.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "ptx/wgmma.h"
#include "sm80/backward_dq.cuh"
#include "sm90/backward_dq_tiles.cuh"
#include "sm90/cluster.cuh"
#include "sm90/output.cuh"
#include "sm90/product.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "sm90/wide_backward_dq.cuh"
#include "sm90/wide_heads.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using backward_dq_params = BackwardParams;  // by the direction's name, for kernel.cu.in and dispatch.cu
}

namespace jax_flash::cuda::sm90 {

template <class Arithmetic_, int kHeadDim_, PairPolicy kPolicy_>
struct BackwardDqConfig {
  // float32 comes as planes; dq leaves the registers as float32.
  static constexpr bool kPlanes = !kIs16Bit<Arithmetic_>;
  using Arithmetic = std::conditional_t<kPlanes, float16, Arithmetic_>;  // of the products
  using Element = typename Arithmetic::Element;
  static constexpr int kClusterBlocks = 1;
  static constexpr int kHeadDim = kHeadDim_, kHeadDimV = backward_head_dim_v(kHeadDim);
  static constexpr PairPolicy kPolicy = kPolicy_;  // the pair options that the kernel handles
  static constexpr BackwardDqTile kTile = backward_dq_tile(kHeadDim, kPolicy.is_general());
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kBlockM = 64 * kConsumers, kBlockN = kTile.block_n, kStages = kTile.stages;
  using Keys = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/true, kBlockM, kBlockN>;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr bool kMayKeepDs = dq_kernel_may_keep_ds(kHeadDim) && !kPlanes && kPolicy.is_general();

  // Shared memory: tiles of kChunks times [rows, kRowColumns] elements, swizzled.
  static constexpr int kRowColumns = chunk_columns(kHeadDim), kRowBytes = 2 * kRowColumns;
  static constexpr int kChunks = ceil_div(kHeadDim, kRowColumns), kChunksV = ceil_div(kHeadDimV, kRowColumns);
  static constexpr int kQChunkBytes = kBlockM * kRowBytes, kKvChunkBytes = kBlockN * kRowBytes;
  static constexpr int kQBytes = kChunks * kQChunkBytes, kDoutBytes = kChunksV * kQChunkBytes;
  static constexpr int kKBytes = kChunks * kKvChunkBytes, kVBytes = kChunksV * kKvChunkBytes;
  static constexpr int kDout = kQBytes, kK = kDout + kDoutBytes, kV = kK + kStages * kKBytes;
  static constexpr int kBarriers = kV + kStages * kVBytes, kNumBarriers = 4 * kStages + 4;
  static constexpr int kSharedBytes = kBarriers + 8 * kNumBarriers;
  static_assert(kKvChunkBytes % 1024 == 0, "wgmma wants tiles aligned to 1024 bytes");
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory.
template <class Config>
struct BackwardDqShared {
  uint32_t base;

  __device__ uint32_t sQ(int row) const { return base + row * Config::kRowBytes; }
  __device__ uint32_t sDout(int row) const { return base + Config::kDout + row * Config::kRowBytes; }
  __device__ uint32_t sK(int stage) const { return base + Config::kK + stage * Config::kKBytes; }
  __device__ uint32_t sV(int stage) const { return base + Config::kV + stage * Config::kVBytes; }

  using KvRing = Ring<Config::kStages>;
  __device__ KvRing k_ring() const { return {barrier(0)}; }
  __device__ KvRing v_ring() const { return {barrier(KvRing::kNumBarriers)}; }
  __device__ uint32_t q_full() const { return barrier(4 * Config::kStages); }
  __device__ uint32_t dout_full() const { return barrier(4 * Config::kStages + 1); }
  __device__ uint32_t tail(int warp) const { return barrier(4 * Config::kStages + 2 + warp); }

 private:
  __device__ uint32_t barrier(int index) const { return base + Config::kBarriers + 8 * index; }
};

// ---- The producer: a warp for q and k, one for dout and v ----

template <class Config, bool kIsKeys>
__device__ __forceinline__ void load_for_dq(const BackwardDqArguments& arguments,
                                            BackwardDqShared<Config> shared,
                                            const BackwardDqWork<Config>& work) {
  constexpr int kBlockN = Config::kBlockN;
  using Loader = TileLoader<kIsKeys ? Config::kChunks : Config::kChunksV, Config::kRowBytes>;
  if (work.keys.count == 0) return;
  const uint32_t tail = shared.tail(kIsKeys ? 0 : 1);
  Loader rows{kIsKeys ? arguments.q_map : arguments.dout_map,
              work.batch,
              work.mask.q_length,
              work.seqlen_q,
              ptx::kEvictFirst,
              tail};
  rows.template load<Config::kBlockM>(kIsKeys ? shared.sQ(0) : shared.sDout(0),
                                      kIsKeys ? shared.q_full() : shared.dout_full(), work.head,
                                      work.m_start);
  // The last block of keys comes first: all buffers are empty.
  Loader keys{kIsKeys ? arguments.k_map : arguments.v_map,
              work.batch,
              work.mask.kv_length,
              work.seqlen_kv,
              ptx::kEvictLast,
              tail,
              rows.tail_parity};
  auto ring = kIsKeys ? shared.k_ring() : shared.v_ring();
  auto tile = [&](int stage) { return kIsKeys ? shared.sK(stage) : shared.sV(stage); };
  keys.template load<kBlockN>(tile(0), ring.full(), work.kv_head, work.keys.start(work.keys.count - 1));
  if constexpr (Config::kBlockN < kVisibilityBlock) {
    // More than one block of a list may have a tail, so the whole warp loads.
#pragma unroll 1
    for (int n = work.keys.count - 2; n >= 0; --n) {
      ring.advance();
      ring.wait_empty();
      __syncwarp();
      keys.template load<kBlockN>(tile(ring.stage), ring.full(), work.kv_head, work.keys.start(n));
    }
  } else if (ptx::elect_one()) {
#pragma unroll 1
    for (int n = work.keys.count - 2; n >= 0; --n) {
      ring.advance();
      ring.wait_empty();
      keys.template load_whole<kBlockN>(tile(ring.stage), ring.full(), work.kv_head, work.keys.start(n));
    }
  }
}

// ---- A consumer: a warpgroup ----

template <class Config>
struct BackwardDqConsumer {
  using Arithmetic = typename Config::Arithmetic;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  using Scores = float[1][kBlockN / 8][4];  // [64 queries, kBlockN keys]

  const BackwardDqArguments& arguments;
  BackwardDqShared<Config> shared;
  BackwardDqWork<Config> work;
  int consumer;
  int warp_row = 64 * consumer + 16 * uniform(threadIdx.x / 32 % 4);
  typename BackwardDqShared<Config>::KvRing k_ring = shared.k_ring();  // v's advances with it
  float dq[1][kHeadDim / 8][4];
  float lse_log2[2], delta[2];
  std::conditional_t<Config::kPlanes, LogitScale, const LogitScale&> logit;
  // Of the rows, where they are of planes: what ds and dq are multiplied by.
  float ds_factor[2], dq_factor[2];

  __device__ __forceinline__ BackwardDqConsumer(const BackwardDqArguments& arguments,
                                                BackwardDqShared<Config> shared,
                                                const BackwardDqWork<Config>& work, int consumer)
      : arguments(arguments), shared(shared), work(work), consumer(consumer), logit(arguments.logit) {}

  __device__ __forceinline__ void run() {
    clear(dq);
    load_stats();
    if (work.keys.count > 0) {
      ptx::barrier_wait(shared.q_full(), 0);
      ptx::barrier_wait(shared.dout_full(), 0);
    }
#pragma unroll 1
    for (int n = work.keys.count - 1; n >= 0; --n) block(n);
    write_out();
  }

 private:
  __device__ __forceinline__ void load_stats() {
    const BackwardParams& params = arguments.params;
    const int64_t row0 = (int64_t{work.batch} * params.num_heads + work.head) * stats_length(work.seqlen_q) +
                         work.m_start + warp_row;
    if constexpr (Config::kPlanes) {
      const PlaneScales scales(params, work.batch, work.kv_head);
      const PlaneRows rows(params, stats_length(work.seqlen_q));
      logit = arguments.logit.times_power(uniform(scales.of_scores()));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t row = row0 + accumulator_row(0, h);
        lse_log2[h] = rows.lse_log2[row];
        delta[h] = rows.delta[row];
        ds_factor[h] = __uint_as_float(uint32_t{rows.ds_factor[row]} << 16);
        dq_factor[h] = ldexpf(logit.scale, uniform(scales.of_dq()) - rows.ds_exponent(row));
      }
    } else {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        lse_log2[h] = params.lse_log2[row0 + accumulator_row(0, h)];
        delta[h] = params.delta[row0 + accumulator_row(0, h)];
      }
    }
  }

  __device__ __forceinline__ void block(int n) {
    const auto k = k_ring.uniform(), v = shared.v_ring().at(k);
    Scores scores, ds;
    k.wait_full();
    issue_scores<Arithmetic, kHeadDim>(scores, uniform(shared.sQ(64 * consumer)), Config::kQChunkBytes,
                                       shared.sK(k.stage), Config::kKvChunkBytes);
    v.wait_full();
    issue_scores<Arithmetic, Config::kHeadDimV>(ds, uniform(shared.sDout(64 * consumer)),
                                                Config::kQChunkBytes, shared.sV(v.stage),
                                                Config::kKvChunkBytes);

    // ---- p = exp(q k^T - lse) ----
    const DqPairs<Config> pairs(arguments, work, n, work.m_start + warp_row);
    ptx::wgmma_wait<1>();
    ptx::keep_in_place(scores[0]);
    pairs.weigh(scores, logit, lse_log2);

    // ---- ds = p * (dout v^T - delta) ----
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(ds[0]);
    v.release_by_warpgroup();
    uint32_t operand[kBlockN / 16][4];
#pragma unroll
    for (int nt = 0; nt < kBlockN / 8; ++nt) {
      pairs.make_ds(ds[0][nt], scores[0][nt], nt, delta, ds_factor);
      make_operand<Arithmetic>(ds[0][nt], nt, operand);
    }
    if constexpr (Config::kMayKeepDs) {
      if (arguments.params.ds) keep_ds(operand, pairs.column0);
    }

    // ---- dq += ds k ----
    issue_sum<Arithmetic, Config::kRowBytes>(dq, operand, shared.sK(k.stage), Config::kKvChunkBytes);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(dq[0]);
    k.release_by_warpgroup();
    k_ring.advance();
  }

  // Writes ds to [B, N, T, S]: a quad of lanes 16 bytes of a row at a time.
  __device__ __forceinline__ void keep_ds(const uint32_t (&ds)[kBlockN / 16][4], int column0) const {
    const BackwardParams& params = arguments.params;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = work.m_start + warp_row + accumulator_row(0, h);
      if (row >= work.seqlen_q) continue;
      const int64_t index = (int64_t{work.batch} * params.num_heads + work.head) * work.seqlen_q + row;
      auto* const to = static_cast<uint16_t*>(params.ds) + index * work.seqlen_kv;
#pragma unroll
      for (int nt = 0; nt < kBlockN / 8; ++nt) {
        const int column = column0 + accumulator_column(nt, 0);
        if (column < work.seqlen_kv) {
          *reinterpret_cast<uint32_t*>(to + column) = ds[nt / 2][nt % 2 * 2 + h];
        }
      }
    }
  }

  // ---- Write dq, by way of the place of q; fully masked rows get zeros ----

  __device__ __forceinline__ void write_out() {
    if constexpr (!Config::kPlanes) {
      ptx::named_barrier_wait(1 + consumer, 128);  // a product reads q for all warps
    }
    const int row0 = work.m_start + warp_row;
    float factor[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + accumulator_row(0, h);
      factor[h] = Config::kPlanes ? dq_factor[h] : logit.scale;
      // In a fully masked row there may be 0 * NaN of a key.
      const bool is_hidden = Config::Keys::kMayBeListed && lse_log2[h] == INFINITY;
      if (work.mask.first_key(row) <= work.mask.last_key(row) && !is_hidden) continue;
#pragma unroll
      for (int nt = 0; nt < kHeadDim / 8; ++nt) dq[0][nt][2 * h] = dq[0][nt][2 * h + 1] = 0;
    }
    if constexpr (Config::kPlanes) {
      const BackwardParams& params = arguments.params;
      const Float32Rows rows(params.dq, params.seqlen_q, params.num_heads, params.head_dim);
      rows.store(dq, factor, work.batch, work.head, row0, 0);
      return;
    }
    store_rows<Arithmetic, Config::kRowBytes>(dq, factor, shared.sQ(warp_row), Config::kQChunkBytes);
    const OutputRows to{arguments.dq_map, arguments.params.head_dim, work.head, row0, work.seqlen_q,
                        work.batch};
    send_rows<Config::kChunks, Config::kRowColumns>(to, shared.sQ(warp_row), Config::kQChunkBytes);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_dq_kernel(const __grid_constant__ BackwardDqArguments arguments) {
  extern __shared__ __align__(1024) uint8_t start[];
  const BackwardDqShared<Config> shared{ptx::shared_address(start)};

  if (threadIdx.x == 0) {
    shared.k_ring().init(1, Config::kConsumers);
    shared.v_ring().init(1, Config::kConsumers);
    ptx::barrier_init(shared.q_full(), 1);
    ptx::barrier_init(shared.dout_full(), 1);
    ptx::barrier_init(shared.tail(0), 1);
    ptx::barrier_init(shared.tail(1), 1);
    ptx::barrier_init_fence();
  }
  const BackwardDqWork<Config> work(arguments.params, first_item<Config>());
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      load_for_dq<Config, /*kIsKeys=*/true>(arguments, shared, work);
    } else if (warp == 1) {
      load_for_dq<Config, /*kIsKeys=*/false>(arguments, shared, work);
    }
  } else {
    ptx::acquire_registers<Config::kConsumerRegisters>();
    BackwardDqConsumer<Config>(arguments, shared, work, warpgroup - 1).run();
  }
}

template <class Config>
Status launch_backward_dq(const BackwardParams& params, const LaunchContext& context) {
  using Element = typename Config::Element;
  BackwardDqArguments arguments{.params = params, .logit = LogitScale(params), .pairs = PairOptions(params)};
  const int64_t B = params.batch, T = params.seqlen_q, S = params.seqlen_kv;
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim, Hv = params.head_dim_v;
  constexpr int kColumns = Config::kRowColumns;
  const auto [q, k, v, dout] = product_inputs<Config::kPlanes>(params, params.dout);
  const bool has_maps =
      make_tensor_map<Element, kColumns>(q, B, T, N, H, Config::kBlockM, &arguments.q_map) &&
      make_tensor_map<Element, kColumns>(dout, B, T, N, Hv, Config::kBlockM, &arguments.dout_map) &&
      make_tensor_map<Element, kColumns>(k, B, S, K, H, Config::kBlockN, &arguments.k_map) &&
      make_tensor_map<Element, kColumns>(v, B, S, K, Hv, Config::kBlockN, &arguments.v_map) &&
      (Config::kPlanes || make_tensor_map<Element, kColumns>(params.dq, B, T, N, H, 16, &arguments.dq_map));
  if (!has_maps) return Status::not_served();
  if (const Status status = launch_lists(params, Config::Keys::shape(), context); status.failed()) {
    return status;
  }
  const int64_t tiles = ceil_div(T, Config::kBlockM) * N * B;
  if constexpr (Config::kClusterBlocks > 1) {
    return launch_tiles<Config>(wide_backward_dq_kernel<Config>, tiles, context, arguments);
  } else {
    return launch_tiles<Config>(backward_dq_kernel<Config>, tiles, context, arguments);
  }
}

template <class Arithmetic, int kHeadDim, PairPolicy kPolicy>
using BackwardDqConfigOf =
    std::conditional_t<is_wide(kHeadDim), WideBackwardDqConfig<Arithmetic, kHeadDim, kPolicy>,
                       BackwardDqConfig<Arithmetic, kHeadDim, kPolicy>>;

template <class Arithmetic, int kHeadDim>
Status backward_dq_by_warpgroups(const BackwardParams& params, const LaunchContext& context) {
  if constexpr (is_wide(kHeadDim)) {
    if (context.compute_capability == 90 && is_wide_without_pairs(params))
      return {};  // backward() has cleared dq
  }
  if (!is_served(params, context) || params.head_dim_v > backward_head_dim_v(kHeadDim))
    return Status::not_served();
  if (!kIs16Bit<Arithmetic> && !params.planes) return Status::not_served();
  if (params.ds && !dq_kernel_may_keep_ds(kHeadDim)) return Status::not_served();
  return is_general(params)
             ? launch_backward_dq<BackwardDqConfigOf<Arithmetic, kHeadDim, kAnyPairsUnstaged>>(params,
                                                                                               context)
             : launch_backward_dq<BackwardDqConfigOf<Arithmetic, kHeadDim, kNoPairs>>(params, context);
}

template <class Arithmetic, int kHeadDim>
Status backward_dq(const BackwardParams& params, const LaunchContext& context) {
  if constexpr (std::is_same_v<Arithmetic, tf32x3>) {
    return params.planes && is_served(params, context)
               ? sm80::backward_dq<float16x3, kHeadDim>(params, context)
               : Status::not_served();
  } else {
    return backward_dq_by_warpgroups<Arithmetic, kHeadDim>(params, context);
  }
}

}  // namespace jax_flash::cuda::sm90
