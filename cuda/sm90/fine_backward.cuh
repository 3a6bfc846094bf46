// Backward attention for Hopper (compute capability 9.0a) from two planes of each array (planes.cuh): float32
// at "high" and "highest", with nothing but a positive scale between scores and softmax (is_general). Other
// calls run on sm80/backward.cuh with the same planes.
//
// The split is that of backward.cuh: a thread block owns 128 keys of one key head, 64 in each of two
// consumer warpgroups, keeps their dk and dv in registers and walks the blocks of 64 queries that see them.
// Scores are transposed, so that p^T and ds^T are operands as they lie in registers; ds goes through shared
// memory for dq.
//
// Each product is three, of which the one of the high planes comes last: tensor cores cut sums off, and small
// ones first lose least. Sums that go on for long are added outside of the tensor cores: those of a block of
// queries for dk and dv, and of 64 columns for dout v^T, from which delta is subtracted next. Beside dk, dv,
// p and ds, registers have room for sums of 32 columns of dk or dv, so these are computed in parts.
//
// All ds of a block have one factor, by their largest magnitude (planes.cuh), which warps exchange.
//
//   warp 0      loads k, then q, lse and delta
//   warp 1      loads v, then dout
//   warps 4...  two consumers
//
// Timeline of one consumer in a block of queries, at head dim 128. D0 and D1 are dout v^T, S is q k^T; dV and
// dK are the parts of the gradients, dQ those of this consumer's columns. "1" and "2" are bar 1 and 2.
//
//   warps 0, 1                                                                      next dout          next q
//   tensor cores   D0 D1    S           dV            dV  dV  dV   dK     dK  dK  dK   dQ
//   other units          +     p, ds       1 store ds   +   +   +     2     +   +   +     add dq
//
// Barriers. A ring has "full" and "empty" for its only stage (ring.cuh). With TMA, a phase of "full" also
// waits for the bytes; "bar" is a hardware barrier.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   q full       3: warp 0, for each plane and  block of         consumers   q; its lse and delta
//                for lse and delta, with TMA    queries
//   q empty      256: each consumer thread      block of         warp 0      the same, until dk += ds^T q is
//                                               queries                      done; the largest ds of each
//                                                                            warp, until all have read it
//   dout full    2: warp 1, for each plane,     block of         consumers   dout
//                with TMA                       queries
//   dout empty   2: a thread of each consumer   block of         warp 1      the same, until dv += p^T dout
//                                               queries                      is done
//   k full,      2: warp 0 or 1, for each       once             consumers   k; v
//   v full       plane, with TMA
//   tail         1: warp 0 or 1, with TMA       block with rows  that warp   rows that it then fills with
//                                               that do not                  zeros, before it arrives at
//                                               count                        full itself
//   bar 1        256: both consumers            block of         both        the largest ds of each warp; ds
//                                               queries                      of the block before, until its
//                                                                            products are done
//   bar 2        256: both consumers            block of         both        ds, until both have written it
//                                               queries
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "delta.cuh"
#include "launch.h"
#include "mask.cuh"
#include "params.h"
#include "planes.cuh"
#include "ptx/barrier.h"
#include "ptx/math.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "ptx/wgmma.h"
#include "sm80/gradient_arguments.cuh"
#include "sm80/product.cuh"
#include "sm90/output.cuh"
#include "sm90/product.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "softmax.cuh"
#include "tiles.h"

namespace jax_flash::cuda::sm90 {

struct FineBackwardArguments {
  CUtensorMap q_map, dout_map;  // [2 B, T, N, H], [2 B, T, N, Hv] in boxes of kBlockM rows
  CUtensorMap k_map, v_map;     // [2 B, S, K, H], [2 B, S, K, Hv] in boxes of kBlockN rows
  BackwardParams params;
  LogitScale logit;
  float* dq;  // [B, T, N, H], to be added to; null where another kernel computes it
};

template <int kHeadDim_>
struct FineBackwardConfig {
  static constexpr int kHeadDim = kHeadDim_, kPlanes = 2;
  static constexpr BackwardTile kTile = kFineBackwardTile;
  static constexpr int kBlockM = kTile.block_m, kBlockN = 128;
  static_assert(kBlockM == 64 && kTile.stages == 1 && kTile.kv_stages == 1);
  static_assert(kStatsRows % kBlockM == 0 && kDsRows % kBlockM == 0 && kKeyUnit % kBlockN == 0);
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  static constexpr int kPartColumns = kHeadDim == 64 ? 64 : 32,
                       kParts = kHeadDim / kPartColumns;    // of dk and dv
  static constexpr int kDqColumns = kHeadDim / kConsumers;  // a consumer's

  // Shared memory: tiles of two planes of kChunks chunks [rows, 64], swizzled.
  static constexpr int kChunks = kHeadDim / kChunkColumns;
  static_assert(kHeadDim % kChunkColumns == 0 && kChunkColumns % kPartColumns == 0);
  static constexpr int kQChunkBytes = kBlockM * kChunkRowBytes, kKvChunkBytes = kBlockN * kChunkRowBytes;
  static constexpr int kQPlaneBytes = kChunks * kQChunkBytes, kKvPlaneBytes = kChunks * kKvChunkBytes;
  static constexpr int kDsPlaneBytes = kConsumers * kQChunkBytes;  // [kBlockM, kBlockN]
  static constexpr int kV = kPlanes * kKvPlaneBytes, kQ = kV + kPlanes * kKvPlaneBytes;
  static constexpr int kDout = kQ + kPlanes * kQPlaneBytes, kDs = kDout + kPlanes * kQPlaneBytes;
  static constexpr int kLse = kDs + kPlanes * kDsPlaneBytes, kDelta = kLse + 4 * kBlockM;
  static constexpr int kLargest = kDelta + 4 * kBlockM;  // |ds| of each consumer warp
  static constexpr int kBarriers = kLargest + 4 * 4 * kConsumers;
  static constexpr int kNumBarriers = 2 + 2 + 2 + 2, kSharedBytes = kBarriers + 8 * kNumBarriers;
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory, of the first plane.
template <class Config>
struct FineBackwardShared {
  uint32_t base;

  __device__ uint32_t sK(int row = 0) const { return base + row * kChunkRowBytes; }
  __device__ uint32_t sV(int row = 0) const { return base + Config::kV + row * kChunkRowBytes; }
  __device__ uint32_t sQ() const { return base + Config::kQ; }
  __device__ uint32_t sDout() const { return base + Config::kDout; }
  __device__ uint32_t sDs() const { return base + Config::kDs; }  // in chunks of 64 keys: a consumer's
  __device__ uint32_t sLse() const { return base + Config::kLse; }
  __device__ uint32_t sDelta() const { return base + Config::kDelta; }
  __device__ uint32_t sLargest(int warp) const { return base + Config::kLargest + 4 * warp; }

  __device__ Ring<1> q_ring() const { return {barrier(0)}; }  // lse and delta come and go with q
  __device__ Ring<1> dout_ring() const { return {barrier(2)}; }
  __device__ uint32_t k_full() const { return barrier(4); }
  __device__ uint32_t v_full() const { return barrier(5); }
  __device__ uint32_t tail(int warp) const { return barrier(6 + warp); }

 private:
  __device__ uint32_t barrier(int index) const { return base + Config::kBarriers + 8 * index; }
};

// ---- Which tile ----

// A block of keys of one key head, and the queries that see it.
template <class Config>
struct FineBackwardTile {
  int n_start, kv_head, batch;
  Mask mask;
  int m_begin, m_blocks;  // of each query head

  // The first keys come first: with a causal mask the most rows see them.
  __device__ __forceinline__ FineBackwardTile(const BackwardParams& params, int index)
      : n_start(index % num_n_blocks(params) * Config::kBlockN),
        kv_head(index / num_n_blocks(params) % static_cast<int>(params.num_kv_heads)),
        batch(index / num_n_blocks(params) / static_cast<int>(params.num_kv_heads)),
        mask(params, batch) {
    const QueryBlocks seen_by = mask.query_blocks<Config::kBlockM>(n_start, Config::kBlockN);
    m_begin = seen_by.start, m_blocks = seen_by.count;
  }

  __host__ __device__ static int num_n_blocks(const BackwardParams& params) {
    return static_cast<int>(ceil_div(params.seqlen_kv, Config::kBlockN));
  }

  // Calls f(head, m_start) for each block of queries.
  template <class F>
  __device__ __forceinline__ void for_each_block(const BackwardParams& params, const F& f) const {
    const int group = static_cast<int>(params.num_heads) / static_cast<int>(params.num_kv_heads);
#pragma unroll 1
    for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
#pragma unroll 1
      for (int block = 0; block < m_blocks; ++block) f(head, m_begin + block * Config::kBlockM);
    }
  }
};

// ---- The producer ----

// Two planes of kRows rows from `row` on.
template <class Config, int kRows>
__device__ __forceinline__ void load_planes(TileLoader<Config::kChunks>& loader, const BackwardParams& params,
                                            uint32_t tile, uint32_t full, int head, int row) {
  const int batch = loader.batch;
#pragma unroll 1
  for (int plane = 0; plane < Config::kPlanes; ++plane) {
    loader.template load<kRows>(tile + plane * Config::kChunks * kRows * kChunkRowBytes, full, head, row);
    loader.batch += static_cast<int>(params.batch);
  }
  loader.batch = batch;
}

template <class Config, bool kIsQueries>
__device__ __forceinline__ void load_rows(const FineBackwardArguments& arguments,
                                          const FineBackwardShared<Config>& shared,
                                          const FineBackwardTile<Config>& tile) {
  using Loader = TileLoader<Config::kChunks>;
  const BackwardParams& params = arguments.params;
  const uint32_t tail = shared.tail(kIsQueries ? 0 : 1);
  Loader keys{kIsQueries ? arguments.k_map : arguments.v_map,
              tile.batch,
              tile.mask.kv_length,
              static_cast<int>(params.seqlen_kv),
              ptx::kEvictFirst,
              tail};
  load_planes<Config, Config::kBlockN>(keys, params, kIsQueries ? shared.sK() : shared.sV(),
                                       kIsQueries ? shared.k_full() : shared.v_full(), tile.kv_head,
                                       tile.n_start);
  Loader rows{kIsQueries ? arguments.q_map : arguments.dout_map,
              tile.batch,
              tile.mask.q_length,
              static_cast<int>(params.seqlen_q),
              ptx::kEvictLast,
              tail,
              keys.tail_parity};
  const PlaneRows statistics(params, stats_length(params.seqlen_q));
  auto ring = kIsQueries ? shared.q_ring() : shared.dout_ring();
  tile.for_each_block(params, [&](int head, int m_start) {
    ring.wait_empty();
    __syncwarp();
    if (kIsQueries && ptx::elect_one()) {
      constexpr int kBytes = 4 * Config::kBlockM;
      const int64_t row =
          (int64_t{tile.batch} * params.num_heads + head) * stats_length(params.seqlen_q) + m_start;
      ptx::barrier_arrive_expect(ring.full(), 2 * kBytes);
      ptx::bulk_load(shared.sLse(), statistics.lse_log2 + row, kBytes, ring.full());
      ptx::bulk_load(shared.sDelta(), statistics.delta + row, kBytes, ring.full());
    }
    load_planes<Config, Config::kBlockM>(rows, params, kIsQueries ? shared.sQ() : shared.sDout(), ring.full(),
                                         head, m_start);
    ring.advance();
  });
}

// ---- A consumer: a warpgroup ----

template <class Config>
struct FineBackwardConsumer {
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kParts = Config::kParts;
  static constexpr int kTiles = kBlockM / 8, kSteps = kBlockM / 16;
  using Scores = float[1][kTiles][4];                    // [64 keys, kBlockM]
  using Operand = uint32_t[Config::kPlanes][kSteps][4];  // the same in two planes
  using Part = float[1][Config::kPartColumns / 8][4];    // [64 keys, kPartColumns]
  using Dq = float[1][Config::kDqColumns / 8][4];        // [64 queries, kDqColumns]
  // Of as many terms as the forward pass's sums for out, from which delta is made: with fewer, what tensor
  // cores cut off differs, and dq of positive inputs is less exact.
  static constexpr int kDpSteps = 4, kDpSums = kHeadDim / 16 / kDpSteps;  // sums of dout v^T, of 64 columns

  const FineBackwardArguments& arguments;
  const FineBackwardShared<Config>& shared;
  const FineBackwardTile<Config>& tile;
  int consumer;
  int warp = uniform(threadIdx.x / 32 % 4);  // of the consumer
  Ring<1> q_ring = shared.q_ring(), dout_ring = shared.dout_ring();
  float scale_log2;  // from scores of planes to logits * log2(e)
  float of_dq;       // from sums of products of planes to dq, beside the factor of ds
  Part dk[kParts], dv[kParts];

  __device__ __forceinline__ FineBackwardConsumer(const FineBackwardArguments& arguments,
                                                  const FineBackwardShared<Config>& shared,
                                                  const FineBackwardTile<Config>& tile, int consumer)
      : arguments(arguments), shared(shared), tile(tile), consumer(consumer) {
    const PlaneScales scales(arguments.params, tile.batch, tile.kv_head);
    scale_log2 = arguments.logit.times_power(scales.of_scores()).scale_log2;
    of_dq = ldexpf(arguments.logit.scale, scales.of_dq() - (kPlaneTop + 1));
  }

  __device__ __forceinline__ void run() {
#pragma unroll
    for (int part = 0; part < kParts; ++part) clear(dk[part]), clear(dv[part]);
    ptx::barrier_wait(shared.k_full(), 0);
    ptx::barrier_wait(shared.v_full(), 0);
    tile.for_each_block(arguments.params, [&](int head, int m_start) { block(head, m_start); });
    write_out();
  }

 private:
  __device__ __forceinline__ int warp_row() const { return 64 * consumer + 16 * warp; }  // of the keys

  // ---- One block of queries ----

  __device__ __forceinline__ void block(int head, int m_start) {
    // ---- dp = dout v^T, scores = q k^T ----
    Scores scores, ds;
    dout_ring.wait_full();
    issue_dp<0>(ds);
    add_dp<1>(ds, scores);
    q_ring.wait_full();
    issue_scores(scores);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(ds[0]);
    ptx::keep_in_place(scores[0]);

    // ---- p = exp(scores - lse), ds = p * (dp - delta) ----
    Operand p, ds_operand;
    const bool is_whole = tile.mask.covers(m_start, kBlockM, tile.n_start + 64 * consumer, 64);
    const uint32_t statistics = shared.sLse() + 8 * (own_lane() % 4);  // of this lane's first queries
    float largest = 0;
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      float (&weights)[4] = scores[0][nt];
      float lse_log2[2], delta[2];
      ptx::load_shared_x2(lse_log2, statistics + 32 * nt);
      ptx::load_shared_x2(delta, statistics + (Config::kDelta - Config::kLse) + 32 * nt);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        weights[i] = ptx::exp2_approx(fmaf(weights[i], scale_log2, -lse_log2[i % 2]));
      }
      if (!is_whole) hide(weights, nt, m_start);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = ds[0][nt][i];
        x = weights[i] * (x - delta[i % 2]);
        largest = fmaxf(largest, fabsf(x));
      }
      make_planes(weights, nt, p);
    }
    const int32_t bits = __reduce_max_sync(0xffffffff, __float_as_int(largest));
    if (lane_id() == 0) ptx::store_shared(shared.sLargest(4 * consumer + warp), static_cast<uint32_t>(bits));

    // ---- dv += p^T dout ----
    Part part;
    issue_gradient(part, p, shared.sDout(), 0);
    ptx::named_barrier_wait(1, 256);
    const int exponent = ds_exponent();
    const float factor = power_of_two(exponent), inverse = power_of_two(-exponent);
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      const float scaled[4] = {ds[0][nt][0] * factor, ds[0][nt][1] * factor, ds[0][nt][2] * factor,
                               ds[0][nt][3] * factor};
      make_planes(scaled, nt, ds_operand);
    }
    if (arguments.dq) store_ds(ds_operand);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      finish_gradient(dv[i], part, 1);
      if (i + 1 < kParts) issue_gradient(part, p, shared.sDout(), i + 1);
    }
    dout_ring.release_by_warpgroup();
    dout_ring.advance();

    // ---- dk += ds^T q, dq += ds k ----
    issue_gradient(part, ds_operand, shared.sQ(), 0);
    if (arguments.dq) {
      ptx::async_proxy_fence();
      ptx::named_barrier_wait(2, 256);
    }
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      finish_gradient(dk[i], part, inverse);
      if (i + 1 < kParts) issue_gradient(part, ds_operand, shared.sQ(), i + 1);
    }
    q_ring.release();
    q_ring.advance();
    if (arguments.dq) {
      Dq dq;
      issue_dq(dq);
      ptx::wgmma_wait<0>();
      ptx::keep_in_place(dq[0]);
      add_dq(dq, head, m_start, of_dq * inverse);
    }
  }

  // ---- Products ----

  // scores = k q^T.
  __device__ __forceinline__ void issue_scores(Scores& scores) const {
    const uint64_t k = ptx::matrix_descriptor<kChunkRowBytes>(uniform(shared.sK(64 * consumer)), 0);
    const uint64_t q = ptx::matrix_descriptor<kChunkRowBytes>(uniform(shared.sQ()), 0);
    issue_score_planes<0, kHeadDim / 16>(scores, k, q);
  }

  // Sum kSum of dout v^T.
  template <int kSum>
  __device__ __forceinline__ void issue_dp(Scores& sum) const {
    const uint64_t v = ptx::matrix_descriptor<kChunkRowBytes>(uniform(shared.sV(64 * consumer)), 0);
    const uint64_t dout = ptx::matrix_descriptor<kChunkRowBytes>(uniform(shared.sDout()), 0);
    issue_score_planes<kSum * kDpSteps, (kSum + 1) * kDpSteps>(sum, v, dout);
  }

  // The sums from kSum on, to `ds`, which has the first.
  template <int kSum>
  __device__ __forceinline__ void add_dp(Scores& ds, Scores& sum) const {
    if constexpr (kSum < kDpSums) {
      issue_dp<kSum>(sum);
      ptx::wgmma_wait<0>();
      ptx::keep_in_place(ds[0]);
      ptx::keep_in_place(sum[0]);
      for_each_accumulator(ds,
                           [&](int, int h, int nt, int c) { ds[0][nt][2 * h + c] += sum[0][nt][2 * h + c]; });
      add_dp<kSum + 1>(ds, sum);
    }
  }

  // sum [64 keys, kBlockM] = a b^T over steps of 16 columns; a are keys or values. In the order of the
  // forward kernel's scores (issue_scores_of_planes), whose a are queries, for the same bits.
  template <int kBegin, int kEnd>
  __device__ __forceinline__ static void issue_score_planes(Scores& sum, uint64_t a, uint64_t b) {
    ptx::keep_in_place(sum[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; ++product) {
      const bool b_is_low = product == 0, a_is_low = product == 1;
#pragma unroll
      for (int step = kBegin; step < kEnd; ++step) {
        const int a_bytes = a_is_low * Config::kKvPlaneBytes + step / 4 * Config::kKvChunkBytes;
        const int b_bytes = b_is_low * Config::kQPlaneBytes + step / 4 * Config::kQChunkBytes;
        ptx::Wgmma<float16, kBlockM>::template shared</*kBAlongN=*/false>(
            sum[0], a + (a_bytes + step % 4 * 32) / 16, b + (b_bytes + step % 4 * 32) / 16,
            product > 0 || step > kBegin);
      }
    }
    ptx::wgmma_commit();
  }

  // sum = p^T or ds^T times part `part` of the columns of rows, q or dout.
  __device__ __forceinline__ static void issue_gradient(Part& sum, Operand& operand, uint32_t rows,
                                                        int part) {
    const int column = part * Config::kPartColumns;
    // Unknown to the compiler, so that it puts the sum where the one before was: two have no room.
    uint32_t accumulates = 0;
    ptx::make_opaque(accumulates);
    issue_sum_of_planes<float16, kChunkRowBytes>(
        sum, operand,
        uniform(rows + column / kChunkColumns * Config::kQChunkBytes + column % kChunkColumns * 2), 0,
        Config::kQPlaneBytes, accumulates != 0);
  }

  // Adds a finished sum to a gradient.
  __device__ __forceinline__ static void finish_gradient(Part& gradient, Part& sum, float factor) {
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(sum[0]);
    for_each_accumulator(sum, [&](int, int h, int nt, int c) {
      float& x = gradient[0][nt][2 * h + c];
      x = fmaf(sum[0][nt][2 * h + c], factor, x);
    });
  }

  // dq = ds k, of this consumer's columns.
  __device__ __forceinline__ void issue_dq(Dq& dq) const {
    const int column = consumer * Config::kDqColumns;
    const uint64_t ds = ptx::matrix_descriptor<kChunkRowBytes>(uniform(shared.sDs()), 0);
    const uint64_t k = ptx::matrix_descriptor<kChunkRowBytes>(
        uniform(shared.sK() + column / kChunkColumns * Config::kKvChunkBytes + column % kChunkColumns * 2),
        0);
    ptx::keep_in_place(dq[0]);
    ptx::wgmma_fence();
#pragma unroll
    for (int product = 0; product < 3; ++product) {
#pragma unroll
      for (int step = 0; step < Config::kBlockN / 16; ++step) {
        const int ds_bytes = (product == 0) * Config::kDsPlaneBytes + step / 4 * Config::kQChunkBytes;
        const int k_bytes = (product == 1) * Config::kKvPlaneBytes + step * 16 * kChunkRowBytes;
        ptx::Wgmma<float16, Config::kDqColumns>::template shared</*kBAlongN=*/true>(
            dq[0], ds + (ds_bytes + step % 4 * 32) / 16, k + k_bytes / 16, product > 0 || step > 0);
      }
    }
    ptx::wgmma_commit();
  }

  // ---- Between products ----

  // This thread's lane, rather read again than kept in registers, with what follows from it.
  __device__ __forceinline__ static int own_lane() {
    uint32_t lane = lane_id();
    ptx::make_opaque(lane);
    return static_cast<int>(lane);
  }

  // p is 0 where the query does not see the key.
  __device__ __forceinline__ void hide(float (&p)[4], int nt, int m_start) const {
    const Mask& mask = tile.mask;
    const int lane = own_lane();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int key = tile.n_start + warp_row() + lane / 4 + 8 * h;
      const int first = mask.first_query(key), last = key < mask.kv_length ? mask.last_query(key) : -1;
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int query = m_start + 8 * nt + lane % 4 * 2 + c;
        if (query < first || query > last) p[2 * h + c] = 0;
      }
    }
  }

  __device__ __forceinline__ static void make_planes(const float (&values)[4], int nt, Operand& operand) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const sm80::PlanePair planes(values[2 * h], values[2 * h + 1]);
      operand[0][nt / 2][nt % 2 * 2 + h] = planes.high;
      operand[1][nt / 2][nt % 2 * 2 + h] = planes.low;
    }
  }

  // What brings the largest ds of the block to the top.
  __device__ __forceinline__ int ds_exponent() const {
    int32_t largest = 0;
#pragma unroll
    for (int first = 0; first < 4 * Config::kConsumers; first += 4) {
      uint32_t of_warps[4];
      ptx::load_shared_x4(of_warps, shared.sLargest(first));
#pragma unroll
      for (uint32_t of_warp : of_warps) largest = max(largest, static_cast<int32_t>(of_warp));
    }
    return min(plane_exponent(__int_as_float(largest)), sm80::kMostDsExponent);
  }

  // This warp's 16 keys of all queries.
  __device__ __forceinline__ void store_ds(const Operand& ds) const {
    const int lane = own_lane();
    const uint32_t to = shared.sDs() + consumer * Config::kQChunkBytes +
                        swizzled(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
#pragma unroll
    for (int plane = 0; plane < Config::kPlanes; ++plane) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::store_matrix_x4_transposed(to + plane * Config::kDsPlaneBytes + step * 16 * kChunkRowBytes,
                                        ds[plane][step]);
      }
    }
  }

  // ---- Gradients to memory ----

  __device__ __forceinline__ void add_dq(const Dq& dq, int head, int m_start, float factor) const {
    const BackwardParams& params = arguments.params;
    const int columns = static_cast<int>(params.head_dim), column0 = consumer * Config::kDqColumns;
    const int lane = own_lane(), row0 = m_start + 16 * warp + lane / 4;
    const int64_t stride = params.num_heads * params.head_dim;
    float* const to = arguments.dq + (int64_t{tile.batch} * params.seqlen_q + row0) * stride +
                      int64_t{head} * columns + column0 + lane % 4 * 2;
    const auto add = [&](int h, int nt) {
      const float values[2] = {dq[0][nt][2 * h] * factor, dq[0][nt][2 * h + 1] * factor};
      ptx::reduce_add(to + 8 * h * stride + 8 * nt, values);
    };
    // A branch around an addition would wait for earlier additions to leave, so whole tiles have none.
    if (m_start + kBlockM <= tile.mask.q_length && column0 + Config::kDqColumns <= columns) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int nt = 0; nt < Config::kDqColumns / 8; ++nt) add(h, nt);
      }
      return;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int nt = 0; nt < Config::kDqColumns / 8; ++nt) {
        if (row0 + 8 * h < tile.mask.q_length && column0 + 8 * nt < columns) add(h, nt);
      }
    }
  }

  // Keys beyond the length get zeros.
  __device__ __forceinline__ void write_out() const {
    const BackwardParams& params = arguments.params;
    const PlaneScales scales(params, tile.batch, tile.kv_head);
    const int row0 = tile.n_start + warp_row();
    const auto store = [&](const Part(&sums)[kParts], void* gradient, int64_t columns, float factor) {
      const Float32Rows rows(gradient, params.seqlen_kv, params.num_kv_heads, columns);
      float factors[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        factors[h] = row0 + accumulator_row(0, h) < tile.mask.kv_length ? factor : 0;
      }
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        rows.store(sums[part], factors, tile.batch, tile.kv_head, row0, part * Config::kPartColumns);
      }
    };
    store(dk, params.dk, params.head_dim, ldexpf(arguments.logit.scale, scales.of_dk() - (kPlaneTop + 1)));
    store(dv, params.dv, params.head_dim_v, ldexpf(1, scales.of_dv()));
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    fine_backward_kernel(const __grid_constant__ FineBackwardArguments arguments) {
  extern __shared__ __align__(1024) uint8_t start[];
  const FineBackwardShared<Config> shared{ptx::shared_address(start)};
  const FineBackwardTile<Config> tile(arguments.params, blockIdx.x);
  if (!planes_hold(arguments.params, tile.batch, tile.kv_head)) return;  // another kernel's

  if (threadIdx.x == 0) {
    shared.q_ring().init(Config::kPlanes + 1, 128 * Config::kConsumers);
    shared.dout_ring().init(Config::kPlanes, Config::kConsumers);
    ptx::barrier_init(shared.k_full(), Config::kPlanes);
    ptx::barrier_init(shared.v_full(), Config::kPlanes);
    ptx::barrier_init(shared.tail(0), 1);
    ptx::barrier_init(shared.tail(1), 1);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) load_rows<Config, /*kIsQueries=*/true>(arguments, shared, tile);
    if (warp == 1) load_rows<Config, /*kIsQueries=*/false>(arguments, shared, tile);
  } else {
    ptx::acquire_registers<Config::kConsumerRegisters>();
    FineBackwardConsumer<Config>(arguments, shared, tile, warpgroup - 1).run();
  }
}

// ---- Launch ----

template <int kHeadDim>
Status launch_fine_backward(const BackwardParams& params, const LaunchContext& context) {
  using Config = FineBackwardConfig<kHeadDim>;
  using Element = float16::Element;
  float* const dq = params.leaves_dq ? nullptr : static_cast<float*>(params.dq);
  FineBackwardArguments arguments{.params = params, .logit = LogitScale(params), .dq = dq};
  const int64_t B = params.batch, T = params.seqlen_q, S = params.seqlen_kv;
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim, Hv = params.head_dim_v;
  const auto [q, k, v, dout] = product_inputs</*kPlanes=*/true>(params, params.dout);
  const bool has_maps =
      make_tensor_map<Element>(q, Config::kPlanes * B, T, N, H, Config::kBlockM, &arguments.q_map) &&
      make_tensor_map<Element>(dout, Config::kPlanes * B, T, N, Hv, Config::kBlockM, &arguments.dout_map) &&
      make_tensor_map<Element>(k, Config::kPlanes * B, S, K, H, Config::kBlockN, &arguments.k_map) &&
      make_tensor_map<Element>(v, Config::kPlanes * B, S, K, Hv, Config::kBlockN, &arguments.v_map);
  if (!has_maps) return Status::not_served();
  Status status;
  if (dq) status = cudaMemsetAsync(dq, 0, sizeof(float) * B * T * N * H, context.stream);
  if (!status.failed()) status = launch_planes(params, params.dout, context);
  if (!status.failed()) status = launch_plane_rows(params, context);
  if (status.failed()) return status;
  return launch(fine_backward_kernel<Config>, FineBackwardTile<Config>::num_n_blocks(params) * K * B,
                Config::kThreads, Config::kSharedBytes, context, arguments);
}

}  // namespace jax_flash::cuda::sm90
