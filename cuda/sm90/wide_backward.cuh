// dk and dv above head dim 256, on Hopper: neither registers nor shared memory of a thread block have room
// for 64 keys of both. Two thread blocks, a cluster, share a tile of 64 keys, each with all columns of two of
// the four products:
//
//   scores block   s^T = k q^T       p = exp(s - lse)    ds = p * (dp - delta)    dk += ds^T q
//   values block   dp^T = v dout^T                                                dv += p^T dout
//
// p goes to the values block in 16 bits, dp comes from there in float32. Both lie in registers as products
// have left them, so a lane sends what the same lane of the other block needs, and p and ds are operands in
// registers of their next product.
//
//   warp 0      loads k or v, then q or dout
//   warp 1      of the scores block loads lse and delta
//   warps 4...  two consumers
//
// Consumers take the blocks of 64 queries in turn: each forms s and p, or dp, of all 64 keys for every other
// one. It has half of the columns of dk or dv, which it adds up for all of them, with p or ds of both.
//
// Timeline of the first two blocks of queries. S, D, V and K are the products above for s, dp, dv and dk, of
// which those after the comma are of half of the columns.
//
//   scores block   consumer 0   S0   p0  ds0       K0   K1
//                  consumer 1   S1        p1  ds1  K0   K1
//   values block   consumer 0   D0       V0   V1
//                  consumer 1   D1       V0   V1
//
// Barriers. "Warp" is a warp and the one of the same number in the other block.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   rows full    1: warp 0, with TMA            tile             consumers   k or v
//   rows empty   8: a lane of each consumer     tile             warp 0      the same, until dk or dv, which
//                warp                                                        leave from its place, have left
//   x full, in   1: warp 0, with TMA            block of         consumers   q or dout
//   parts                                       queries
//   x full, the  1: warp 1, with TMA            block of         the one     lse and delta; only in the
//   last part                                   queries          whose it is scores block
//   x empty      256: each consumer thread      block of         warps 0, 1  all of these, until dk or dv
//                                               queries                      has been added to and all
//                                                                            threads have read lse, delta
//   came         1: a lane of this warp, with   block of         this warp;  dp, or p
//                the bytes                      queries          p: both
//                                                                consumers'
//   ds ready     32: this warp's lanes          block of         both        ds, which takes the place of dp;
//                                               queries          consumers'  only in the scores block
//   free         2: a lane of the other         block of         this warp   in the other block, the place
//                block's warp in each consumer  queries                      for p or dp, until p or ds has
//                                                                            been read there
//   tail         1: warp 0, with TMA            block with rows  warp 0      rows that it then fills with
//                                               that do not                  zeros, before it arrives at
//                                               count                        full itself
//   bar 1        256: both consumers            tile             both        k or v, which both have read
//                                                                            before dk or dv takes its place
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "ptx/barrier.h"
#include "ptx/cluster.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "ptx/wgmma.h"
#include "sm90/backward_tiles.cuh"
#include "sm90/cluster.cuh"
#include "sm90/fragments.cuh"
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
struct WideBackwardConfig {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr bool kPlanes = false, kWithDq = false, kMayShareDs = true;
  static constexpr int kClusterBlocks = 2;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr PairPolicy kPolicy = kPolicy_;  // the pair options that the kernel handles
  static constexpr BackwardTile kTile = backward_tile(kHeadDim, kPolicy.is_general());
  static constexpr int kBlockM = kTile.block_m, kBlockN = 64, kStages = kTile.stages;
  static_assert(kBlockM == 64 && kStages == 2 && kKeyUnit % kBlockN == 0);
  using Queries = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/false, kBlockN, kBlockM>;
  static constexpr int kConsumers = 2, kConsumerWarps = 4 * kConsumers, kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kColumns = kHeadDim / kConsumers;  // of a consumer's dk or dv

  // Shared memory: k or v [kBlockN, kHeadDim], q or dout [kStages, kBlockM, kHeadDim], what comes from the
  // other block, lse and delta [kStages, kBlockM], barriers. A tile [rows, kHeadDim] is kChunks tiles [rows,
  // kRowColumns], swizzled.
  static constexpr int kRowColumns = kChunkColumns, kRowBytes = kChunkRowBytes;
  static constexpr int kChunks = kHeadDim / kRowColumns, kChunkBytes = 64 * kRowBytes;
  static constexpr int kTileBytes = kChunks * kChunkBytes;
  // q and dout come in parts, so that products begin when the first has come.
  static constexpr int kParts = 4, kPartChunks = kChunks / kParts, kPartColumns = kPartChunks * kRowColumns;
  static_assert(kHeadDim % (kParts * kRowColumns) == 0 && kColumns % kRowColumns == 0 && kColumns <= 256);
  static constexpr int kX = kTileBytes, kMessages = kX + kStages * kTileBytes;
  static constexpr int kMessageBytes = kBlockM / 8 * kPieceBytes;  // of a warp's dp
  static constexpr int kLse = kMessages + kConsumerWarps * kMessageBytes,
                       kDelta = kLse + kStages * kBlockM * 4;
  static constexpr int kBarriers = kDelta + kStages * kBlockM * 4;
  static constexpr int kOwnBarriers = 2 + kStages * (kParts + 2) + 1;
  static constexpr int kItems = kBarriers + 8 * (kOwnBarriers + 3 * kConsumerWarps);
  static constexpr int kSharedBytes = kItems + ItemRing::kBytes;
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory.
template <class Config>
struct WideBackwardShared {
  uint32_t base;

  // k or v; q or dout.
  __device__ uint32_t rows() const { return base; }
  __device__ uint32_t x(int stage) const { return base + Config::kX + stage * Config::kTileBytes; }
  // What comes from the other block for warp `warp` of the consumer that takes this block of queries: dp [16,
  // 64] in float32, or p in 16 bits, in pieces of 16 bytes for each lane.
  __device__ uint32_t message(int consumer, int warp) const {
    return base + Config::kMessages + (4 * consumer + warp) * Config::kMessageBytes;
  }
  __device__ uint32_t lse(int stage) const { return base + Config::kLse + stage * Config::kBlockM * 4; }
  __device__ uint32_t delta(int stage) const { return base + Config::kDelta + stage * Config::kBlockM * 4; }

  using RowsRing = Ring<1>;
  // Every tile begins with stage 0.
  using XRing = Ring<Config::kStages, Config::kParts + 1>;
  static constexpr int kStats = Config::kParts;  // a part of XRing
  __device__ RowsRing rows_ring() const { return {barrier(0)}; }
  __device__ XRing x_ring(int stage, uint32_t parity) const { return {barrier(2), stage, parity}; }
  __device__ uint32_t tail() const { return barrier(Config::kOwnBarriers - 1); }
  __device__ uint32_t came(int consumer, int warp) const { return of_warp(0, consumer, warp); }
  __device__ uint32_t ds_ready(int consumer, int warp) const { return of_warp(1, consumer, warp); }
  __device__ uint32_t free(int consumer, int warp) const { return of_warp(2, consumer, warp); }
  __device__ ItemRing items() const { return {base + Config::kItems}; }

  // By one thread.
  __device__ __forceinline__ void init() const {
    rows_ring().init(1, Config::kConsumerWarps);
    x_ring(0, 0).init(1, 32 * Config::kConsumerWarps);
    ptx::barrier_init(tail(), 1);
    for (int warp = 0; warp < Config::kConsumerWarps; ++warp) {
      ptx::barrier_init(came(0, warp), 1);
      ptx::barrier_init(ds_ready(0, warp), 32);
      ptx::barrier_init(free(0, warp), Config::kConsumers);
    }
    ptx::barrier_init_fence();
  }

 private:
  __device__ uint32_t barrier(int index) const { return base + Config::kBarriers + 8 * index; }
  __device__ uint32_t of_warp(int kind, int consumer, int warp) const {
    return barrier(Config::kOwnBarriers + kind * Config::kConsumerWarps + 4 * consumer + warp);
  }
};

// How often each of two stages has been used, modulo 2. A tile of an odd number of blocks uses the first one
// once more.
struct StageParities {
  uint32_t bits = 0;

  __device__ __forceinline__ uint32_t operator[](int stage) const { return bits >> stage & 1; }
  __device__ __forceinline__ void pass(int stage) { bits ^= 1u << stage; }
};

// The blocks of queries that see a tile, of all query heads of its part, one after the other.
template <class Config>
struct QueryBlockCursor {
  const BackwardTileWork<Config>& work;
  const BackwardParams& params;
  int head, index = 0;  // the block's, among those of its head
  typename Config::Queries queries;

  __device__ __forceinline__ QueryBlockCursor(const BackwardTileWork<Config>& work,
                                              const BackwardParams& params, int part_heads)
      : work(work),
        params(params),
        head(work.part * part_heads),
        queries(work.queries(params, work.part * part_heads)) {}

  // Not beyond the last one.
  __device__ __forceinline__ void advance(int count) {
    index += count;
#pragma unroll 1
    while (index >= queries.count) {
      index -= queries.count;
      queries = work.queries(params, ++head);
    }
  }
  __device__ __forceinline__ int start() const { return queries.start(index); }
};

// ---- The producer: a warp for rows, one for lse and delta ----

template <class Config>
struct WideBackwardLoader {
  const BackwardArguments& arguments;
  WideBackwardShared<Config> shared;
  bool is_values;
  typename WideBackwardShared<Config>::RowsRing rows_ring = shared.rows_ring();
  StageParities parities;
  uint32_t tail_parity = 0;

  __device__ __forceinline__ void load_rows(const BackwardTileWork<Config>& work) {
    const BackwardParams& params = arguments.params;
    rows_ring.wait_empty();
    __syncwarp();
    const uint32_t rows_full = rows_ring.full();
    rows_ring.advance();
    if (work.all_blocks == 0) {
      if (ptx::elect_one()) ptx::barrier_arrive(rows_full);
      return;
    }
    TileLoader<Config::kChunks> keys{is_values ? arguments.v_map : arguments.k_map,
                                     work.batch,
                                     work.mask.kv_length,
                                     static_cast<int>(params.seqlen_kv),
                                     ptx::kEvictFirst,
                                     shared.tail(),
                                     tail_parity};
    keys.template load<Config::kBlockN>(shared.rows(), rows_full, work.kv_head(params), work.n_start);
    TileLoader<Config::kPartChunks> queries{is_values ? arguments.dout_map : arguments.q_map,
                                            work.batch,
                                            work.mask.q_length,
                                            static_cast<int>(params.seqlen_q),
                                            ptx::kEvictLast,
                                            shared.tail(),
                                            keys.tail_parity};
    for_each_block(work, [&](int stage, const QueryBlockCursor<Config>& block) {
      const auto ring = shared.x_ring(stage, parities[stage]);
      ring.wait_empty();
      __syncwarp();
      const int start = block.start();
#pragma unroll 1
      for (int part = 0; part < Config::kParts; ++part) {
        queries.first_column = part * Config::kPartColumns;
        queries.template load<Config::kBlockM>(
            shared.x(stage) + part * Config::kPartChunks * Config::kChunkBytes, ring.full(part), block.head,
            start);
      }
    });
    tail_parity = queries.tail_parity;
  }

  __device__ __forceinline__ void load_stats(const BackwardTileWork<Config>& work) {
    constexpr int kBytes = 4 * Config::kBlockM;
    static_assert(kStatsRows % Config::kBlockM == 0);
    const BackwardParams& params = arguments.params;
    for_each_block(work, [&](int stage, const QueryBlockCursor<Config>& block) {
      const auto ring = shared.x_ring(stage, parities[stage]);
      const int64_t row =
          (int64_t{work.batch} * params.num_heads + block.head) * stats_length(params.seqlen_q) +
          block.start();
      ring.wait_empty();
      __syncwarp();
      if (ptx::elect_one()) {
        const uint32_t full = ring.full(shared.kStats);
        ptx::barrier_arrive_expect(full, 2 * kBytes);
        ptx::bulk_load(shared.lse(stage), params.lse_log2 + row, kBytes, full);
        ptx::bulk_load(shared.delta(stage), params.delta + row, kBytes, full);
      }
    });
  }

 private:
  template <class F>
  __device__ __forceinline__ void for_each_block(const BackwardTileWork<Config>& work, F f) {
    if (work.all_blocks == 0) return;
    QueryBlockCursor<Config> block(work, arguments.params, arguments.part_heads);
    block.advance(0);
#pragma unroll 1
    for (int i = 0;;) {
      const int stage = i % Config::kStages;
      f(stage, block);
      parities.pass(stage);
      if (++i == work.all_blocks) break;
      block.advance(1);
    }
  }
};

// ---- A consumer: a warpgroup ----

template <class Config, BlockRole kRole>
struct WideBackwardConsumer {
  using Arithmetic = typename Config::Arithmetic;
  using Shared = WideBackwardShared<Config>;
  static constexpr PairPolicy kPolicy = Config::kPolicy;
  static constexpr int kTiles = Config::kBlockM / 8, kSteps = Config::kBlockM / 16;
  static constexpr bool kIsValues = kRole == BlockRole::kValues;
  using Scores = float[1][kTiles][4];   // [64 keys, 64 queries], or their gradients
  using Operand = uint32_t[kSteps][4];  // the same in 16 bits

  const BackwardArguments& arguments;
  Shared shared;
  int consumer;
  int warp = uniform(threadIdx.x / 32 % 4);  // of the consumer
  typename Shared::RowsRing rows_ring = shared.rows_ring();
  StageParities parities;                 // of stages, which are also the consumers that take their queries
  float sum[1][Config::kColumns / 8][4];  // dk or dv [64 keys, kColumns]

  __device__ __forceinline__ WideBackwardConsumer(const BackwardArguments& arguments, Shared shared,
                                                  int consumer)
      : arguments(arguments), shared(shared), consumer(consumer) {}

  __device__ __forceinline__ void run(const BackwardTileWork<Config>& work) {
    clear(sum);
    rows_ring.wait_full();
    if (work.all_blocks > 0) {
      QueryBlockCursor<Config> own(work, arguments.params, arguments.part_heads);
      if (consumer < work.all_blocks) own.advance(consumer);
#pragma unroll 1
      for (int i = 0; i < work.all_blocks; i += 2) {
        if (i + consumer < work.all_blocks) {
          if (i > 0) own.advance(2);
          take_own(work, own);
        }
#pragma unroll 1
        for (int stage = 0; stage < min(2, work.all_blocks - i); ++stage) add(stage);
      }
    }
    write_out(work);
    rows_ring.advance();
  }

 private:
  __device__ __forceinline__ int warp_row() const { return 16 * warp; }
  __device__ __forceinline__ uint32_t own_piece(int i) const {
    return shared.message(consumer, warp) + i * kPieceBytes + 16 * lane_id();
  }

  // ---- A block of queries of this consumer ----

  __device__ __forceinline__ void take_own(const BackwardTileWork<Config>& work,
                                           const QueryBlockCursor<Config>& block) {
    constexpr int kComing = kIsValues ? kSteps : kTiles;  // pieces
    if (lane_id() == 0) {
      ptx::barrier_arrive_expect(shared.came(consumer, warp), kComing * kPieceBytes);
    }
    Scores scores;
    issue_scores(scores);
    if constexpr (kIsValues) {
      ptx::wgmma_wait<0>();
      ptx::keep_in_place(scores[0]);
      send(scores[0]);
    } else {
      weigh(work, block, scores);
    }
  }

  template <class Piece, int kPieces>
  __device__ __forceinline__ void send(const Piece (&pieces)[kPieces][4]) const {
    ptx::barrier_wait(shared.free(consumer, warp), parities[consumer] ^ 1);
    send_to_peer(pieces, own_piece(0), shared.came(consumer, warp));
  }

  // scores [64, 64] = k q^T or v dout^T.
  __device__ __forceinline__ void issue_scores(Scores& scores) {
    const auto ring = shared.x_ring(consumer, parities[consumer]);
    const uint32_t rows = uniform(descriptor_address<Config>(shared.rows())),
                   x = uniform(descriptor_address<Config>(shared.x(consumer)));
    auto issue = [&]<bool kAccumulate>(int part) {
      const int offset = part * Config::kPartChunks * Config::kChunkBytes;
      ring.wait_full(part);
      sm90::issue_scores<Arithmetic, Config::kPartColumns, kAccumulate>(
          scores, rows + offset, Config::kChunkBytes, x + offset, Config::kChunkBytes);
    };
    issue.template operator()<false>(0);
#pragma unroll
    for (int part = 1; part < Config::kParts; ++part) issue.template operator()<true>(part);
  }

  // p = exp(s - lse), which leaves, and ds = p * (dp - delta), which takes the place of dp; ds also gets the
  // soft cap's factor 1 - tanh^2.
  __device__ __forceinline__ void weigh(const BackwardTileWork<Config>& work,
                                        const QueryBlockCursor<Config>& block, Scores& scores) {
    const LogitScale& logit = arguments.logit;
    const int m_start = block.start(), row0 = work.n_start + warp_row();
    const Pairs<true> pairs{arguments.params, arguments.pairs, work.batch, block.head};
    const bool is_whole = work.mask.covers(m_start, Config::kBlockM, work.n_start, Config::kBlockN);
    PairBits<kTiles> visible[1]{{~0u}}, kept[1]{{~0u}};
    if constexpr (kPolicy.may_have_mask()) {
      const bool is_listed_whole = !block.queries.is_listed() || block.queries.entry(block.index).is_whole(0);
      if (!is_listed_whole) load_visible(visible, pairs, row0, m_start);
    }
    if constexpr (kPolicy.others) {
      if (pairs.has_dropout()) draw_kept(kept, pairs, row0, m_start);
    }
    shared.x_ring(consumer, parities[consumer]).wait_full(shared.kStats);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(scores[0]);
    if constexpr (kPolicy.others) {
      transform_scores(scores[0], pairs, /*is_staged=*/false, logit, row0, m_start);
    }

    Operand p, ds;
    const auto finish = [&](int nt, const float (&slope)[4]) {
      float dp[4], delta[2];
      ptx::load_shared_x4(dp, own_piece(nt));
      ptx::load_shared_x2(delta, shared.delta(consumer) + 4 * accumulator_column(nt, 0));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kPolicy.others) dp[i] = kept[0].test(nt, i) ? dp[i] * arguments.pairs.kept_factor : 0;
        dp[i] = scores[0][nt][i] * (dp[i] - delta[i % 2]) * slope[i];
      }
      make_operand<Arithmetic>(dp, nt, ds);
    };
    const auto wait_for_dp = [&] { ptx::barrier_wait(shared.came(consumer, warp), parities[consumer]); };
    if (kPolicy.others) wait_for_dp();  // no registers for all slopes
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      float (&tile)[4] = scores[0][nt];
      float slope[4] = {1, 1, 1, 1}, dropped[4], lse_log2[2];
      if constexpr (kPolicy.others) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (logit.transform == LogitTransform::kSoftCap) slope[i] = soft_cap_slope(tile[i]);
        }
      }
      ptx::load_shared_x2(lse_log2, shared.lse(consumer) + 4 * accumulator_column(nt, 0));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        tile[i] = ptx::exp2_approx(fmaf(tile[i], logit.scale_log2, -lse_log2[i % 2]));
      }
      if (!is_whole) fill_unseen(tile, nt, work.mask, row0, m_start, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (kPolicy.may_have_mask() && !visible[0].test(nt, i)) tile[i] = 0;
        dropped[i] = !kPolicy.others || kept[0].test(nt, i) ? tile[i] : 0;
      }
      make_operand<Arithmetic>(dropped, nt, p);
      if (kPolicy.others) finish(nt, slope);
    }
    send(p);
    if constexpr (!kPolicy.others) {
      wait_for_dp();
#pragma unroll
      for (int nt = 0; nt < kTiles; ++nt) finish(nt, {1, 1, 1, 1});
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) ptx::store_shared_x4(own_piece(step), ds[step]);
    ptx::barrier_arrive(shared.ds_ready(consumer, warp));
    SharedDs(arguments.params)
        .store(ds, arguments.shares_ds, pairs.head.index - arguments.first_shared_head, row0, m_start);
  }

  // ---- dk += ds^T q or dv += p^T dout, this consumer's columns, for the block of queries in `stage` ----

  __device__ __forceinline__ void add(int stage) {
    const uint32_t parity = parities[stage];
    ptx::barrier_wait(kIsValues ? shared.came(stage, warp) : shared.ds_ready(stage, warp), parity);
    Operand operand;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::load_shared_x4(operand[step], shared.message(stage, warp) + step * kPieceBytes + 16 * lane_id());
    }
    free_for_peer(shared.free(stage, warp));
    const auto ring = shared.x_ring(stage, parity);
#pragma unroll
    for (int part = 0; part < Config::kParts; ++part) ring.wait_full(part);
    const uint32_t columns =
        shared.x(stage) + consumer * (Config::kChunks / Config::kConsumers) * Config::kChunkBytes;
    issue_sum<Arithmetic, Config::kRowBytes>(sum, operand, uniform(descriptor_address<Config>(columns)),
                                             Config::kChunkBytes);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(operand);
    ptx::keep_in_place(sum[0]);
    ring.release();
    parities.pass(stage);
  }

  // ---- Write dk or dv; keys beyond the length get zeros ----

  __device__ __forceinline__ void write_out(const BackwardTileWork<Config>& work) {
    const BackwardParams& params = arguments.params;
    const int row0 = work.n_start + warp_row(), column0 = consumer * Config::kColumns;
    for_each_accumulator(sum, [&](int, int h, int nt, int c) {
      if (row0 + accumulator_row(0, h) >= work.mask.kv_length) sum[0][nt][2 * h + c] = 0;
    });
    const bool exists = row0 < static_cast<int>(params.seqlen_kv);
    if (arguments.dk_parts.tiles) {
      const Fragments& parts = kIsValues ? arguments.dv_parts : arguments.dk_parts;
      if (exists) write_fragments(sum, parts, work.batch, work.part, row0, column0);
      rows_ring.release_by_warp();
      return;
    }
    const float factor = !kIsValues       ? arguments.logit.scale
                         : kPolicy.others ? arguments.pairs.kept_factor
                                          : 1;
    const CUtensorMap& map = kIsValues ? arguments.dv_map : arguments.dk_map;
    const int64_t columns = kIsValues ? params.head_dim_v : params.head_dim;
    constexpr int kOutChunks = Config::kColumns / Config::kRowColumns;
    const uint32_t from =
        shared.rows() + consumer * kOutChunks * Config::kChunkBytes + warp_row() * Config::kRowBytes;
    ptx::named_barrier_wait(1, 256);
    store_rows<Arithmetic>(sum, {factor, factor}, from, Config::kChunkBytes);
    send_rows<kOutChunks>(
        {map, columns, work.kv_head(params), row0, static_cast<int>(params.seqlen_kv), work.batch, column0},
        from, Config::kChunkBytes);
    rows_ring.release_by_warp();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    wide_backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) uint8_t start[];
  const WideBackwardShared<Config> shared{ptx::shared_address(start)};
  const bool is_values = block_role() == BlockRole::kValues;

  if (threadIdx.x == 0) shared.init();
  __syncthreads();
  wait_for_cluster<Config>();

  auto for_each = [&](auto f) {
    for_each_tile<Config, /*kDraws=*/false>(arguments.schedule, arguments.params, shared.items(), f);
  };
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    WideBackwardLoader<Config> loader{arguments, shared, is_values};
    if (warp == 0) {
      for_each([&](const auto& work) { loader.load_rows(work); });
    } else if (warp == 1 && !is_values) {
      for_each([&](const auto& work) { loader.load_stats(work); });
    }
  } else {
    ptx::acquire_registers<Config::kConsumerRegisters>();
    auto consume = [&]<BlockRole kRole>() {
      WideBackwardConsumer<Config, kRole> consumer(arguments, shared, warpgroup - 1);
      for_each([&](const auto& work) { consumer.run(work); });
    };
    if (is_values) {
      consume.template operator()<BlockRole::kValues>();
    } else {
      consume.template operator()<BlockRole::kScores>();
    }
    wait_for_cluster<Config>();
  }
}

}  // namespace jax_flash::cuda::sm90
