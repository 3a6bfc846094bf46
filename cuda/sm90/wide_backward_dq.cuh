// dq alone above head dim 256, on Hopper. Two thread blocks, a cluster, share a tile of 128 queries: one has
// all columns of q and forms scores, the other has those of dout. Each has half of the columns of dq:
//
//   scores block   s = q k^T      p = exp(s - lse)    ds = p * (dp - delta)    dq_low += ds k_low
//   values block   dp = dout v^T                                               dq_high += ds k_high
//
// dp goes to the scores block in float32, ds comes from there in 16 bits. Both lie in registers as products
// have left them, so a lane sends what the same lane of the other block needs.
//
//   warp 0      loads q or dout, then the upper columns of keys
//   warp 1      loads the lower columns of keys, or values
//   warps 4...  two consumers, of 64 queries each
//
// Timeline of one consumer of each block: the last blocks of keys 1 and 0. S, D and Q are the three products.
// The other consumer does the same without waiting for this one.
//
//   scores block   S1  p1  ds1   Q1  S0  p0  ds0   Q0
//   values block   D1  D0               Q1            Q0
//
// Barriers. A ring has "full" and "empty" for each of its stages (ring.cuh). With TMA, a phase of "full" also
// waits for the bytes; "bar" is a hardware barrier. "Warp" is a consumer's, and the one of the same number in
// the other block.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   rows full    1: warp 0, with TMA            the only one     consumers   q or dout
//   upper full   1: warp 0, with TMA            block of keys    consumers   the upper columns of keys
//   upper empty  2: a thread of each consumer   block of keys    warp 0      the same, until scores or dq are
//                                                                            done
//   lower full   1: warp 1, with TMA            block of keys    consumers   the lower columns of keys, in
//                                                                            the scores block
//   lower empty  2: a thread of each consumer   block of keys    warp 1      the same, until dq is done
//   quarter      1: warp 1, with TMA            a quarter of a   consumers   a quarter of the columns of
//   full                                        block of keys                values, in the values block
//   quarter      2: a thread of each consumer   likewise         warp 1      the same, until its part of dp
//   empty                                                                    is done
//   came         1: a lane of this warp, with   block of keys    this warp   dp, or ds
//                the bytes
//   free         1: a lane of the other         block of keys    this warp   in the other block, the place
//                block's warp                                                of ds or dp, until it is read
//   tail         1: warp 0 or 1, with TMA       block with rows  that warp   rows that it then fills with
//                                               that do not                  zeros, before it arrives at
//                                               count                        full itself
//   bar 1 + c    128: consumer c                the only one     consumer c  q or dout, which a product reads
//                                                                            for all four warps, from dq
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "mask.cuh"
#include "pairs.cuh"
#include "params.h"
#include "ptx/barrier.h"
#include "ptx/cluster.h"
#include "ptx/memory.h"
#include "ptx/wgmma.h"
#include "sm90/backward_dq_tiles.cuh"
#include "sm90/cluster.cuh"
#include "sm90/output.cuh"
#include "sm90/product.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "sm90/wide_heads.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda::sm90 {

template <class Arithmetic_, int kHeadDim_, PairPolicy kPolicy_>
struct WideBackwardDqConfig {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr bool kPlanes = false;
  static constexpr int kClusterBlocks = 2;
  static constexpr int kHeadDim = kHeadDim_, kColumns = kHeadDim / 2;  // of dq in a block
  static constexpr PairPolicy kPolicy = kPolicy_;  // the pair options that the kernel handles
  static constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers, kThreads = 128 * (1 + kConsumers);
  // With 48 keys, scores are formed at 6/7 of the rate of 64, for whose parts there is no room. Blocks of
  // lists are divided by 32.
  static constexpr int kBlockM = 64 * kConsumers,
                       kBlockN = backward_dq_tile(kHeadDim, kPolicy.is_general()).block_n;
  static_assert(kKeyUnit % kBlockN == 0);
  using Keys = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/true, kBlockM, kBlockN>;
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

  // Shared memory: q or dout [kBlockM, kHeadDim], upper columns of keys [kBlockN, kColumns]; in the scores
  // block lower ones [kLowerStages, kBlockN, kColumns], in the values block quarters of values
  // [kQuarterStages, kBlockN, kQuarterColumns]; what comes from the other block; barriers. A tile is chunks
  // of kRowColumns columns, swizzled.
  static constexpr int kRowColumns = kChunkColumns, kRowBytes = kChunkRowBytes;
  static constexpr int kChunks = kHeadDim / kRowColumns, kHalfChunks = kChunks / 2;
  static constexpr int kQChunkBytes = kBlockM * kRowBytes, kKvChunkBytes = kBlockN * kRowBytes;
  static constexpr int kHalfBytes = kHalfChunks * kKvChunkBytes;
  static constexpr int kQuarters = 4, kQuarterColumns = kHeadDim / kQuarters;
  static constexpr int kQuarterChunks = kChunks / kQuarters, kQuarterBytes = kQuarterChunks * kKvChunkBytes;
  static constexpr int kLowerStages = 2, kQuarterStages = 5;
  static constexpr int kDpBytes = kBlockN / 8 * kPieceBytes, kDsBytes = kDpBytes / 2;  // of a warp
  static constexpr int kUpper = kChunks * kQChunkBytes, kLower = kUpper + kHalfBytes;
  static constexpr int kDp = kLower + kLowerStages * kHalfBytes,
                       kDs = kLower + kQuarterStages * kQuarterBytes;
  static constexpr int kBarriers = std::max(kDp + kConsumerWarps * kDpBytes, kDs + kConsumerWarps * kDsBytes);
  static constexpr int kOwnBarriers = 1 + 2 * (1 + kLowerStages + kQuarterStages) + 2;
  static constexpr int kSharedBytes = kBarriers + 8 * (kOwnBarriers + 2 * kConsumerWarps);
  static_assert(kChunks % kQuarters == 0 && kColumns <= 256);
  static_assert(kKvChunkBytes % 1024 == 0, "wgmma wants tiles aligned to 1024 bytes");
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory.
template <class Config>
struct WideBackwardDqShared {
  uint32_t base;

  __device__ uint32_t rows(int row) const { return base + row * Config::kRowBytes; }
  __device__ uint32_t upper() const { return base + Config::kUpper; }
  __device__ uint32_t lower(int stage) const { return base + Config::kLower + stage * Config::kHalfBytes; }
  __device__ uint32_t quarter(int stage) const {
    return base + Config::kLower + stage * Config::kQuarterBytes;
  }
  // What comes from the other block for a consumer's warp: dp [16, kBlockN] in float32, or ds in 16 bits, in
  // pieces of 16 bytes for each lane.
  __device__ uint32_t dp(int warp) const { return base + Config::kDp + warp * Config::kDpBytes; }
  __device__ uint32_t ds(int warp) const { return base + Config::kDs + warp * Config::kDsBytes; }

  using UpperRing = Ring<1>;
  using LowerRing = Ring<Config::kLowerStages>;
  using QuarterRing = Ring<Config::kQuarterStages>;
  __device__ uint32_t rows_full() const { return barrier(0); }
  __device__ UpperRing upper_ring() const { return {barrier(1)}; }
  __device__ LowerRing lower_ring() const { return {barrier(1 + UpperRing::kNumBarriers)}; }
  __device__ QuarterRing quarter_ring() const {
    return {barrier(1 + UpperRing::kNumBarriers + LowerRing::kNumBarriers)};
  }
  __device__ uint32_t tail(int warp) const { return barrier(Config::kOwnBarriers - 2 + warp); }
  __device__ uint32_t came(int warp) const { return barrier(Config::kOwnBarriers + warp); }
  __device__ uint32_t free(int warp) const { return came(Config::kConsumerWarps + warp); }

  // By one thread.
  __device__ __forceinline__ void init() const {
    ptx::barrier_init(rows_full(), 1);
    upper_ring().init(1, Config::kConsumers);
    lower_ring().init(1, Config::kConsumers);
    quarter_ring().init(1, Config::kConsumers);
    for (int warp = 0; warp < 2; ++warp) ptx::barrier_init(tail(warp), 1);
    for (int i = 0; i < 2 * Config::kConsumerWarps; ++i) ptx::barrier_init(came(i), 1);
    ptx::barrier_init_fence();
  }

 private:
  __device__ uint32_t barrier(int index) const { return base + Config::kBarriers + 8 * index; }
};

// ---- The producer: a warp for rows and upper columns of keys, one for lower ones or values ----

template <class Config>
struct WideBackwardDqLoader {
  using HalfLoader = TileLoader<Config::kHalfChunks>;

  const BackwardDqArguments& arguments;
  WideBackwardDqShared<Config> shared;
  const BackwardDqWork<Config>& work;
  bool is_values;

  __device__ __forceinline__ void load_rows_and_upper() {
    TileLoader<Config::kChunks> rows{is_values ? arguments.dout_map : arguments.q_map,
                                     work.batch,
                                     work.mask.q_length,
                                     work.seqlen_q,
                                     ptx::kEvictFirst,
                                     shared.tail(0)};
    rows.template load<Config::kBlockM>(shared.rows(0), shared.rows_full(), work.head, work.m_start);
    HalfLoader keys = half_loader(arguments.k_map, shared.tail(0));
    keys.tail_parity = rows.tail_parity;
    keys.first_column = Config::kColumns;
    auto ring = shared.upper_ring();
#pragma unroll 1
    for (int n = work.keys.count - 1; n >= 0; --n) {
      load(keys, shared.upper(), ring, n);
      ring.advance();
    }
  }

  __device__ __forceinline__ void load_lower() {
    HalfLoader keys = half_loader(arguments.k_map, shared.tail(1));
    auto ring = shared.lower_ring();
#pragma unroll 1
    for (int n = work.keys.count - 1; n >= 0; --n) {
      load(keys, shared.lower(ring.stage), ring, n);
      ring.advance();
    }
  }

  __device__ __forceinline__ void load_values() {
    TileLoader<Config::kQuarterChunks> values{arguments.v_map, work.batch,      work.mask.kv_length,
                                              work.seqlen_kv,  ptx::kEvictLast, shared.tail(1)};
    auto ring = shared.quarter_ring();
#pragma unroll 1
    for (int n = work.keys.count - 1; n >= 0; --n) {
#pragma unroll 1
      for (int quarter = 0; quarter < Config::kQuarters; ++quarter) {
        values.first_column = quarter * Config::kQuarterColumns;
        load(values, shared.quarter(ring.stage), ring, n);
        ring.advance();
      }
    }
  }

 private:
  template <class Loader, class Ring>
  __device__ __forceinline__ void load(Loader& loader, uint32_t tile, const Ring& ring, int n) const {
    ring.wait_empty();
    __syncwarp();
    loader.template load<Config::kBlockN>(tile, ring.full(), work.kv_head, work.keys.start(n));
  }

  __device__ __forceinline__ HalfLoader half_loader(const CUtensorMap& map, uint32_t tail) const {
    return {map, work.batch, work.mask.kv_length, work.seqlen_kv, ptx::kEvictLast, tail};
  }
};

// ---- A consumer: a warpgroup ----

template <class Config, BlockRole kRole>
struct WideBackwardDqConsumer {
  using Arithmetic = typename Config::Arithmetic;
  using Shared = WideBackwardDqShared<Config>;
  static constexpr PairPolicy kPolicy = Config::kPolicy;
  static constexpr int kBlockN = Config::kBlockN, kTiles = kBlockN / 8, kSteps = kBlockN / 16;
  static constexpr bool kIsValues = kRole == BlockRole::kValues;
  using Scores = float[1][kTiles][4];   // [64 queries, kBlockN keys], or their gradients
  using Operand = uint32_t[kSteps][4];  // the same in 16 bits

  const BackwardDqArguments& arguments;
  Shared shared;
  const BackwardDqWork<Config>& work;
  int consumer;
  int warp = uniform(threadIdx.x / 32) - 4;  // of both consumers
  typename Shared::UpperRing upper_ring = shared.upper_ring();
  typename Shared::LowerRing lower_ring = shared.lower_ring();        // of the scores block
  typename Shared::QuarterRing quarter_ring = shared.quarter_ring();  // of the values block
  uint32_t came_parity = 0, sent_parity = 0;                          // of messages
  float dq[1][Config::kColumns / 8][4];
  float lse_log2[2], delta[2];

  __device__ __forceinline__ WideBackwardDqConsumer(const BackwardDqArguments& arguments, Shared shared,
                                                    const BackwardDqWork<Config>& work, int consumer)
      : arguments(arguments), shared(shared), work(work), consumer(consumer) {}

  __device__ __forceinline__ void run() {
    clear(dq);
    load_stats();
    ptx::barrier_wait(shared.rows_full(), 0);
    if constexpr (kIsValues) {
      multiply_values();
    } else {
      multiply_scores();
    }
    write_out();
  }

 private:
  __device__ __forceinline__ void load_stats() {
    const BackwardParams& params = arguments.params;
    const int64_t row0 = (int64_t{work.batch} * params.num_heads + work.head) * stats_length(work.seqlen_q) +
                         work.m_start + 16 * warp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      lse_log2[h] = params.lse_log2[row0 + accumulator_row(0, h)];
      delta[h] = params.delta[row0 + accumulator_row(0, h)];
    }
  }

  // ---- Messages ----

  // This lane's pieces of what comes, and of what leaves.
  __device__ __forceinline__ uint32_t piece(int i) const {
    return (kIsValues ? shared.ds(warp) : shared.dp(warp)) + i * kPieceBytes + 16 * lane_id();
  }
  __device__ __forceinline__ uint32_t sent_piece() const {
    return (kIsValues ? shared.dp(warp) : shared.ds(warp)) + 16 * lane_id();
  }
  __device__ __forceinline__ void expect(int pieces) const {
    if (lane_id() == 0) ptx::barrier_arrive_expect(shared.came(warp), pieces * kPieceBytes);
  }
  __device__ __forceinline__ void wait_for_message() {
    ptx::barrier_wait(shared.came(warp), came_parity);
    came_parity ^= 1;
  }
  template <class Piece, int kPieces>
  __device__ __forceinline__ void send(const Piece (&pieces)[kPieces][4]) {
    ptx::barrier_wait(shared.free(warp), sent_parity ^ 1);
    sent_parity ^= 1;
    send_to_peer(pieces, sent_piece(), shared.came(warp));
  }

  // ---- Products ----

  // A part of the sum over columns, kColumns of them from chunk `chunk` on, of this consumer's rows times
  // those of a tile.
  template <int kColumns, bool kAccumulate>
  __device__ __forceinline__ void issue_part(Scores& scores, int chunk, uint32_t tile) const {
    const uint32_t rows = shared.rows(64 * consumer) + chunk * Config::kQChunkBytes;
    issue_scores<Arithmetic, kColumns, kAccumulate>(
        scores, uniform(descriptor_address<Config>(rows)), Config::kQChunkBytes,
        uniform(descriptor_address<Config>(tile)), Config::kKvChunkBytes);
  }

  __device__ __forceinline__ void issue_dq(Operand& ds, uint32_t keys) {
    issue_sum<Arithmetic, Config::kRowBytes>(dq, ds, uniform(descriptor_address<Config>(keys)),
                                             Config::kKvChunkBytes);
  }

  // ---- The scores block ----

  // In two groups: upper columns first, whose place is free as soon as they are done.
  __device__ __forceinline__ void issue_scores_of_block(Scores& scores,
                                                        const typename Shared::LowerRing& lower) {
    upper_ring.wait_full();
    issue_part<Config::kColumns, /*kAccumulate=*/false>(scores, Config::kHalfChunks, shared.upper());
    lower.wait_full();
    issue_part<Config::kColumns, /*kAccumulate=*/true>(scores, 0, shared.lower(lower.stage));
  }

  __device__ __forceinline__ void multiply_scores() {
    if (work.keys.count == 0) return;
    Operand ds;
    {
      Scores scores;
      issue_scores_of_block(scores, lower_ring);
      weigh(work.keys.count - 1, scores, ds);
    }
    // No product is under way where the loop begins again: the compiler would have it end there.
#pragma unroll 1
    for (int n = work.keys.count - 2; n >= 0; --n) {
      const auto lower = lower_ring;
      lower_ring.advance();
      Scores scores;
      issue_dq(ds, shared.lower(lower.stage));
      issue_scores_of_block(scores, lower_ring);
      ptx::wgmma_wait<2>();
      ptx::keep_in_place(ds);
      ptx::keep_in_place(dq[0]);
      lower.release_by_warpgroup();
      weigh(n, scores, ds);
    }
    issue_dq(ds, shared.lower(lower_ring.stage));
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(ds);
    ptx::keep_in_place(dq[0]);
  }

  // p = exp(s - lse), with the soft cap's factor 1 - tanh^2, and ds = p * (dp - delta), which leaves, too.
  __device__ __forceinline__ void weigh(int n, Scores& scores, Operand& ds) {
    expect(kTiles);
    const DqPairs<Config> pairs(arguments, work, n, work.m_start + 16 * warp);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(scores[0]);
    upper_ring.release_by_warpgroup();
    upper_ring.advance();
    pairs.weigh(scores, arguments.logit, lse_log2);
    wait_for_message();
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      float dp[4];
      ptx::load_shared_x4(dp, piece(nt));
      pairs.make_ds(dp, scores[0][nt], nt, delta);
      make_operand<Arithmetic>(dp, nt, ds);
    }
    free_for_peer(shared.free(warp));
    send(ds);
  }

  // ---- The values block ----

  // By quarters, whose places become free one after the other; the last one's with send_dp.
  __device__ __forceinline__ void issue_dp(Scores& dp) {
    issue_quarter</*kAccumulate=*/false>(dp, 0);
#pragma unroll
    for (int quarter = 1; quarter < Config::kQuarters; ++quarter) {
      const auto before = quarter_ring;
      quarter_ring.advance();
      issue_quarter</*kAccumulate=*/true>(dp, quarter);
      ptx::wgmma_wait<1>();
      before.release_by_warpgroup();
    }
  }
  template <bool kAccumulate>
  __device__ __forceinline__ void issue_quarter(Scores& dp, int quarter) const {
    quarter_ring.wait_full();
    issue_part<Config::kQuarterColumns, kAccumulate>(dp, quarter * Config::kQuarterChunks,
                                                     shared.quarter(quarter_ring.stage));
  }

  // Once its products are done.
  __device__ __forceinline__ void send_dp(Scores& dp) {
    ptx::keep_in_place(dp[0]);
    quarter_ring.release_by_warpgroup();
    quarter_ring.advance();
    send(dp[0]);
  }

  // dq += ds k, when ds has come.
  __device__ __forceinline__ void issue_dq_of_block(Operand& ds) {
    wait_for_message();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::load_shared_x4(ds[step], piece(step));
    free_for_peer(shared.free(warp));
    upper_ring.wait_full();
    issue_dq(ds, shared.upper());
  }

  __device__ __forceinline__ void multiply_values() {
    if (work.keys.count == 0) return;
    {
      Scores dp;
      issue_dp(dp);
      ptx::wgmma_wait<0>();
      send_dp(dp);
    }
#pragma unroll 1
    for (int n = work.keys.count - 2; n >= 0; --n) {
      Scores dp;
      Operand ds;
      expect(kSteps);
      issue_dp(dp);
      issue_dq_of_block(ds);
      ptx::wgmma_wait<1>();
      send_dp(dp);
      ptx::wgmma_wait<0>();
      ptx::keep_in_place(ds);
      ptx::keep_in_place(dq[0]);
      upper_ring.release_by_warpgroup();
      upper_ring.advance();
    }
    Operand ds;
    expect(kSteps);
    issue_dq_of_block(ds);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(ds);
    ptx::keep_in_place(dq[0]);
  }

  // ---- Write dq, by way of the place of q or dout; fully masked rows get zeros ----

  __device__ __forceinline__ void write_out() {
    ptx::named_barrier_wait(1 + consumer, 128);
    const int row0 = work.m_start + 16 * warp;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + accumulator_row(0, h);
      // In a fully masked row there may be 0 * NaN of a key.
      const bool is_hidden = Config::Keys::kMayBeListed && lse_log2[h] == INFINITY;
      if (work.mask.first_key(row) <= work.mask.last_key(row) && !is_hidden) continue;
#pragma unroll
      for (int nt = 0; nt < Config::kColumns / 8; ++nt) dq[0][nt][2 * h] = dq[0][nt][2 * h + 1] = 0;
    }
    const float scale = arguments.logit.scale;
    store_rows<Arithmetic>(dq, {scale, scale}, shared.rows(16 * warp), Config::kQChunkBytes);
    send_rows<Config::kHalfChunks>({arguments.dq_map, arguments.params.head_dim, work.head, row0,
                                    work.seqlen_q, work.batch, kIsValues ? Config::kColumns : 0},
                                   shared.rows(16 * warp), Config::kQChunkBytes);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_backward_dq_kernel(const __grid_constant__ BackwardDqArguments arguments) {
  extern __shared__ __align__(1024) uint8_t start[];
  const WideBackwardDqShared<Config> shared{ptx::shared_address(start)};
  const bool is_values = block_role() == BlockRole::kValues;

  if (threadIdx.x == 0) shared.init();
  const BackwardDqWork<Config> work(arguments.params, first_item<Config>());
  __syncthreads();
  wait_for_cluster<Config>();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    WideBackwardDqLoader<Config> loader{arguments, shared, work, is_values};
    if (warp == 0) {
      loader.load_rows_and_upper();
    } else if (warp == 1) {
      is_values ? loader.load_values() : loader.load_lower();
    }
  } else {
    ptx::acquire_registers<Config::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    if (is_values) {
      WideBackwardDqConsumer<Config, BlockRole::kValues>(arguments, shared, work, consumer).run();
    } else {
      WideBackwardDqConsumer<Config, BlockRole::kScores>(arguments, shared, work, consumer).run();
    }
    wait_for_cluster<Config>();
  }
}

}  // namespace jax_flash::cuda::sm90
