// Backward attention for Hopper (compute capability 9.0a): wgmma products, TMA copies, specialized warps, in
// the order of Shah et al., FlashAttention-3, arXiv:2407.08608.
//
// dK/dV split over keys: a thread block owns 128 rows of k and v of one key head (64 from head dim
// 256 on) and keeps the float32 sums dk and dv in registers. It walks the blocks of queries that may see
// them, in every query head of the group, recomputes the probabilities from lse and adds
//
//   dv += p^T dout        ds = p * (dout v^T - delta)        dk += ds^T q        dq += ds k
//
// Scores are transposed, 64 keys in each of two consumer warpgroups, so that p^T and ds^T are operands as
// they lie in registers. Only dq needs ds of both consumers: it goes through shared memory. From head
// dim 256 on, dk and dv of that many keys do not fit in registers. There both consumers share 64 keys,
// compute the scores of half of the queries each, and own half of the columns of dk and dv, so that p^T and
// ds^T go through shared memory.
//
// Where there are too few tiles for all multiprocessors, or too few long causal ones to hand out one by one,
// the query heads of a key head are divided into parts, each with tiles of its own, whose dk and dv are added
// up afterwards, in a fixed order (num_head_parts in jax_flash/_kernel_choice.py chooses how many).
//
// dq, which other blocks share, is added to dq_accum by TMA (kWithDq), when deterministic in
// turns, or left to another kernel: to backward_dq.cuh, or with ds, which leaves through memory, to
// shared_dq.cuh. Python chooses by speed (sums_dq and num_shared_heads in jax_flash/_kernel_choice.py). Where
// one block has all keys, it writes dq there.
//
//   warp 0      draws the next item; loads k, then q
//   warp 1      loads v, then dout
//   warp 2      loads lse and delta; where ds leaves for shared_dq.cuh, fills up its tiles with zeros
//   warp 3      with dq: adds it to dq_accum, 64 rows at once, or writes it there; copies ds to memory, if
//               that is wanted
//   warps 4...  two consumers
//
// Timeline of one consumer, with dq: the last blocks of queries 1 and 2 of a tile t, and the first block 0 of
// the next tile u. S issues q k^T, D issues dout v^T, dV, dQ and dK the three products above; "|" is bar 1,
// where the consumers meet.
//
//   warps 0-2      q2, dout2, lse2, delta2         k(u), v(u)           q0, dout0, ...
//   tensor cores   S1 D1           dV1   dQ1 dK1   S2 D2           dV2   dQ2 dK2                     S0 D0
//   other units        p1   ds1        |     store dq1 p2   ds2        |     store dq2 | dk, dv out      p0
//   warp 3                                         add dq1                         add dq2
//                                                                                      ^ tile boundary
//
// With one stage of keys and values, k(u) and v(u) load behind the tile boundary.
//
// Above head dim 256 wide_backward.cuh takes the place of this kernel.
//
// Barriers. A ring has "full" and "empty" for each of its stages (ring.cuh). With TMA, a phase of "full" also
// waits for the bytes; "bar" is a hardware barrier.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   q full       2: warp 0 and warp 2, with     block of         consumers   q; its lse and delta
//                TMA                            queries
//   q empty      with dq 2: a thread of each    block of         warps 0, 2  the same, until dk += ds^T q is
//                consumer, after bar 1; else    queries                      done and all consumer threads
//                256: each consumer thread                                   have read lse and delta
//   dout full    1: warp 1, with TMA            block of         consumers   dout
//                                               queries
//   dout empty   2: a thread of each consumer   block of         warp 1      the same, until dv += p^T dout
//                                               queries                      is done
//   kv full, in  1: warp 0 for k, warp 1 for    tile             consumers   k; v
//   two parts    v, with TMA; without where no
//                query sees them
//   kv empty     with dq 2: a thread of each    tile             warps 0, 1  k and v, until their products
//                consumer; else 8: a lane of                                 are done and, without dq, until
//                each consumer warp                                          dk and dv have left from their
//                                                                            place
//   dq full, of  4 or 8: a lane of each warp    block of         warp 3      dq in shared memory, until
//   64 rows      that writes them               queries                      TMA has read it: dv may
//   dq empty,    1: warp 3                      block of         those       leave from its place, but for
//   likewise                                    queries          warps       kDvInDs; ds, if it is kept,
//                                                                            until it has been copied
//   tail         1: warp 0 or 1, with TMA       block with rows  that warp   rows that it then fills with
//                                               that do not                  zeros, before it arrives at
//                                               count                        full itself
//   item full    1: warp 0                      item             warps 1-3,  the number of an item
//                                                                consumers   (item_ring.cuh)
//   item empty   11, without dq 10: a lane of   item             warp 0      the same, until all have read
//                each warp that reads it                                     it
//   bar 1        256: both consumers            block of         both        ds, and p^T where it is shared,
//                                               queries, but                 until both have written it; at
//                                               for kByKeys                  a tile's end, what dk and dv
//                                               without dq;                  overwrite
//                                               tile
//   bar 2        256: both consumers            tile, with dq,   both        dk and dv, which leave from the
//                                               not planes                   places of ds and dq, until the
//                                                                            next tile writes there
//   turn, in     1: warp 3, of each block of    64 rows of dq    warp 3      dq_accum when deterministic,
//   memory       keys that adds to them                                      until later keys are added
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "delta.cuh"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "planes.cuh"
#include "ptx/barrier.h"
#include "ptx/grid.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "ptx/wgmma.h"
#include "sm80/backward.cuh"
#include "sm90/backward_tiles.cuh"
#include "sm90/cluster.cuh"
#include "sm90/fine_backward.cuh"
#include "sm90/fragments.cuh"
#include "sm90/item_ring.cuh"
#include "sm90/output.cuh"
#include "sm90/product.cuh"
#include "sm90/ring.cuh"
#include "sm90/shared_dq.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "sm90/wide_backward.cuh"
#include "sm90/wide_heads.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using backward_params = BackwardParams;  // by the direction's name, for kernel.cu.in and dispatch.cu
}

namespace jax_flash::cuda::sm90 {

template <class Arithmetic_, int kHeadDim_, PairPolicy kPolicy_, bool kWithDq_>
struct BackwardConfig {
  // float32 comes as planes; dk and dv leave the registers as float32.
  static constexpr bool kPlanes = !kIs16Bit<Arithmetic_>;
  using Arithmetic = std::conditional_t<kPlanes, float16, Arithmetic_>;  // of the products
  using Element = typename Arithmetic::Element;
  static constexpr int kClusterBlocks = 1;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr PairPolicy kPolicy = kPolicy_;  // the pair options that the kernel handles
  static constexpr bool kWithDq = kWithDq_;        // or dk and dv only
  static constexpr BackwardTile kTile = backward_tile(kHeadDim, kPolicy.is_general());
  static constexpr int kBlockM = kTile.block_m, kStages = kTile.stages, kKvStages = kTile.kv_stages;
  static constexpr int kHeadDimV = backward_head_dim_v(kHeadDim);  // the columns of v and dout
  // Does a consumer own 64 keys, or half of the columns?
  static constexpr bool kByKeys = backward_is_by_keys(kHeadDim);
  static constexpr int kBlockN = kByKeys ? 128 : 64;
  static_assert(kKeyUnit % kBlockN == 0);
  // Does one thread of each consumer release the statistics for all, after bar 1? racecheck does not follow
  // that and is given a build in which every thread does so for itself.
#ifdef JAX_FLASH_ALL_ARRIVE
  static constexpr bool kReleasesTogether = false;
#else
  static constexpr bool kReleasesTogether = kWithDq;
#endif
  using Queries = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/false, kBlockN, kBlockM>;
  static constexpr int kQueries = kByKeys ? kBlockM : kBlockM / 2;       // of a consumer's scores
  static constexpr int kColumns = kByKeys ? kHeadDim : kHeadDim / 2;     // of a consumer's dk
  static constexpr int kColumnsV = kByKeys ? kHeadDimV : kHeadDimV / 2;  // of its dv
  static_assert(kByKeys || (kColumns % kChunkColumns == 0 && kColumnsV == kColumns),
                "where two consumers divide columns of dk and dv, they must get whole chunks");
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  // Is dout v^T issued only when the scores are transformed? Until then it needs no registers.
  static constexpr bool kIssuesDsLate = kPolicy.is_general() && kColumns + kColumnsV > 256;
  // Do a mask alone and a staged bias alone have loops of their own? Above 128 columns they gained nothing;
  // with planes of 128 columns, which have two operands of ds, they would keep 40 values in memory.
  static constexpr bool kHasLoops = kPolicy.may_stage_bias() && !(kPlanes && kColumns + kColumnsV == 256);
  // setmaxnreg redistributes the 168 registers a thread that the block was launched with. With 24, producers
  // keep some values in memory; small head dims leave them more.
  static constexpr int kProducerRegisters = kHeadDim <= 32 ? 40 : 24;
  static constexpr int kConsumerRegisters = kHeadDim <= 32 ? 232 : 240;
  // A consumer's part of dq [kBlockM, kHeadDim] is 64 rows: the upper or lower ones, or the left or right
  // half.
  static constexpr bool kDqByRows = kBlockM == 128;
  static_assert(kByKeys || !kWithDq);
  // May ds leave from shared memory, where it is for dq?
  static constexpr bool kMayKeepDs = kWithDq && !kPlanes && kPolicy.is_general();
  // May ds^T leave for shared_dq.cuh?
  static constexpr bool kMayShareDs = backward_is_split(kHeadDim) && !kPlanes;
  static constexpr int kDqColumns = kDqByRows ? kHeadDim : kHeadDim / 2;
  static constexpr int kDqParts = kWithDq ? kBlockM / 64 : 1;  // of 64 rows, which are added together

  // Shared memory: tiles of kChunks times [rows, kRowColumns] elements, swizzled.
  static constexpr int kRowColumns = chunk_columns(kHeadDim), kRowBytes = 2 * kRowColumns;
  static constexpr int kChunks = ceil_div(kHeadDim, kRowColumns);
  static constexpr int kChunksV = ceil_div(kHeadDimV, kRowColumns);
  static constexpr int kQChunkBytes = kBlockM * kRowBytes, kKvChunkBytes = kBlockN * kRowBytes;
  static constexpr int kQBytes = kChunks * kQChunkBytes, kDoutBytes = kChunksV * kQChunkBytes;
  static constexpr int kKBytes = kChunks * kKvChunkBytes, kVBytes = kChunksV * kKvChunkBytes;
  // From one chunk of k to the next. A product for dq must not begin amid one chunk and end in the next.
  static constexpr int kKColumns = kWithDq && kRowColumns % kDqColumns != 0 ? kDqColumns : kRowColumns;
  static_assert(kKColumns % 16 == 0 && kChunks * kKColumns >= kHeadDim);
  // ds [kBlockM, kBlockN], or p^T and ds^T [kBlockN, kBlockM]; two buffers: one is written while slower warps
  // still read the other.
  static constexpr int kDsChunkBytes = kBlockM * kChunkRowBytes;  // 64 keys of ds
  static constexpr int kDsBytes = kBlockM * kBlockN * 2;
  static constexpr int kDsStages = kWithDq || !kByKeys ? 2 : 0;
  static constexpr int kPStages = kByKeys ? 0 : kDsStages;
  static constexpr int kOutChunks = ceil_div(kColumns, kRowColumns);
  static constexpr int kOutBytes = kOutChunks * 16 * kRowBytes;  // of a warp's dk, and at most of its dv
  static constexpr int kDqWarpBytes = kWithDq ? 16 * kDqColumns * 4 : 0;
  static constexpr int kOutPitch = kWithDq ? 16 * kRowBytes : kKvChunkBytes;
  // With dq, dk leaves from the place of ds; dv, too, if both fit, else from that of dq.
  static constexpr int kConsumerWarps = 4 * kConsumers;
  static_assert(!kWithDq || kConsumerWarps * kOutBytes <= kDsStages * kDsBytes);
  static constexpr bool kDvInDs = kWithDq && 2 * kConsumerWarps * kOutBytes <= kDsStages * kDsBytes;
  static_assert(!kWithDq || kDvInDs || kDqParts == 1,
                "dv must not take the place of a part still being added");
  static constexpr int kDqBytes =
      kWithDq ? kConsumerWarps * std::max(kDqWarpBytes, kDvInDs ? 0 : kOutBytes) : 0;
  static constexpr int kV = kKvStages * kKBytes, kQ = kV + kKvStages * kVBytes;
  static constexpr int kDout = kQ + kStages * kQBytes;
  static constexpr int kDs = kDout + kStages * kDoutBytes, kP = kDs + kDsStages * kDsBytes;
  static constexpr int kDq = kP + kPStages * kDsBytes;
  using WarpBias = BiasBuffer</*kTransposed=*/true, kQueries>;
  static_assert(kByKeys || !kPolicy.may_stage_bias());
  static constexpr int kBias = kDq + kDqBytes;
  static constexpr int kLse = kBias + (kPolicy.may_stage_bias() ? kConsumerWarps * WarpBias::kBytes : 0),
                       kDelta = kLse + kStages * kBlockM * 4;
  static constexpr int kDsFactor = kDelta + kStages * kBlockM * 4;
  static constexpr int kBarriers = kDsFactor + (kPlanes ? kStages * kBlockM * 2 : 0),
                       kNumBarriers = 4 * kStages + 3 * kKvStages + (kWithDq ? 2 * kDqParts : 0) + 2;
  static constexpr int kItems = kBarriers + 8 * kNumBarriers, kSharedBytes = kItems + ItemRing::kBytes;
  static_assert(kQChunkBytes % 1024 == 0 && kKvChunkBytes % 1024 == 0,
                "wgmma wants tiles aligned to 1024 bytes");
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory.
template <class Config>
struct BackwardShared {
  uint32_t base;

  __device__ uint32_t sK(int stage, int row) const {
    return base + stage * Config::kKBytes + row * Config::kRowBytes;
  }
  __device__ uint32_t sV(int stage, int row) const {
    return base + Config::kV + stage * Config::kVBytes + row * Config::kRowBytes;
  }
  __device__ uint32_t sQ(int stage) const { return base + Config::kQ + stage * Config::kQBytes; }
  __device__ uint32_t sDout(int stage) const { return base + Config::kDout + stage * Config::kDoutBytes; }
  // In chunks of 64 columns: keys of ds, queries of p^T and ds^T.
  __device__ uint32_t sDs(int stage) const { return base + Config::kDs + stage * Config::kDsBytes; }
  __device__ uint32_t sP(int stage) const { return base + Config::kP + stage * Config::kDsBytes; }
  // Of dq, the columns of 16 rows that a warp writes: float32, as they lie in dq_accum.
  __device__ uint32_t sDq(int consumer, int warp) const {
    return base + Config::kDq +
           (Config::kDqByRows ? 4 * consumer + warp : 2 * warp + consumer) * Config::kDqWarpBytes;
  }
  // A warp's rows of dk and dv on their way out, in chunks of columns kOutPitch bytes apart: in the place of
  // ds and dq, so that the next keys and values can come, or of k and v where there is no dq.
  __device__ uint32_t sDk(int kv_stage, int consumer, int warp) const {
    return Config::kWithDq ? sDs(0) + (4 * consumer + warp) * Config::kOutBytes
                           : sK(kv_stage, out_row(consumer, warp)) + out_chunk(consumer);
  }
  __device__ uint32_t sDv(int kv_stage, int consumer, int warp) const {
    if (Config::kDvInDs) return sDk(kv_stage, Config::kConsumers + consumer, warp);
    return Config::kWithDq ? base + Config::kDq + (4 * consumer + warp) * Config::kOutBytes
                           : sV(kv_stage, out_row(consumer, warp)) + out_chunk(consumer);
  }
  __device__ typename Config::WarpBias bias(int warp) const {
    return {base + Config::kBias + warp * Config::WarpBias::kBytes};
  }
  __device__ uint32_t sLse(int stage) const { return base + Config::kLse + stage * Config::kBlockM * 4; }
  __device__ uint32_t sDelta(int stage) const { return base + Config::kDelta + stage * Config::kBlockM * 4; }
  __device__ uint32_t sDsFactor(int stage) const {
    return base + Config::kDsFactor + stage * Config::kBlockM * 2;
  }

  using QRing = Ring<Config::kStages>;
  using KvRing = Ring<Config::kKvStages, /*kFullParts=*/2>;
  using DqRing = Ring<1, /*kFullParts=*/Config::kDqParts, /*kEmptyParts=*/Config::kDqParts>;
  static constexpr int kKeys = 0, kValues = 1;              // parts of KvRing
  __device__ QRing q_ring() const { return {barrier(0)}; }  // lse and delta come and go with q
  __device__ QRing dout_ring() const { return {barrier(QRing::kNumBarriers)}; }
  __device__ KvRing kv_ring() const { return {barrier(2 * QRing::kNumBarriers)}; }
  __device__ uint32_t tail(int warp) const {
    return barrier(2 * QRing::kNumBarriers + KvRing::kNumBarriers + warp);
  }
  // Only with dq.
  __device__ DqRing dq_ring() const { return {barrier(2 * QRing::kNumBarriers + KvRing::kNumBarriers + 2)}; }
  __device__ ItemRing items() const { return {base + Config::kItems}; }

 private:
  __device__ uint32_t barrier(int index) const { return base + Config::kBarriers + 8 * index; }
  __device__ int out_row(int consumer, int warp) const {
    return (Config::kByKeys ? 64 * consumer : 0) + 16 * warp;
  }
  __device__ int out_chunk(int consumer) const {
    return Config::kByKeys ? 0 : consumer * (Config::kChunks / 2) * Config::kKvChunkBytes;
  }
};

// ---- The producer: a warp for k and q, one for v and dout, one for lse and delta, one for sums of dq ----

template <class Config>
struct BackwardLoader {
  const BackwardArguments& arguments;
  BackwardShared<Config> shared;
  typename BackwardShared<Config>::QRing q_ring = shared.q_ring();  // of queries or dout: they advance alike
  typename BackwardShared<Config>::KvRing kv_ring = shared.kv_ring();
  typename BackwardShared<Config>::DqRing dq_ring = shared.dq_ring();
  uint32_t tail_parity = 0;
  int ds_stage = 0;

  template <bool kIsQueries>
  __device__ __forceinline__ void load_rows(const BackwardTileWork<Config>& work) {
    constexpr int kBlockM = Config::kBlockM;
    constexpr int kChunks = kIsQueries ? Config::kChunks : Config::kChunksV;
    using KeyLoader =
        TileLoader<kChunks, Config::kRowBytes, kIsQueries ? Config::kKColumns : Config::kRowColumns>;
    using RowLoader = TileLoader<kChunks, Config::kRowBytes>;
    const BackwardParams& params = arguments.params;
    const int kv_stage = kv_ring.stage;
    const uint32_t full_kv = kv_ring.full(kIsQueries ? shared.kKeys : shared.kValues);
    kv_ring.wait_empty();
    kv_ring.advance();
    __syncwarp();
    if (work.all_blocks == 0) {
      // Consumers wait all the same: one that did not could release k and v twice before this warp looks.
      if (ptx::elect_one()) ptx::barrier_arrive(full_kv);
      return;
    }
    const uint32_t tail = shared.tail(kIsQueries ? 0 : 1);
    KeyLoader keys{kIsQueries ? arguments.k_map : arguments.v_map,
                   work.batch,
                   work.mask.kv_length,
                   static_cast<int>(params.seqlen_kv),
                   ptx::kEvictFirst,
                   tail,
                   tail_parity};
    keys.template load<Config::kBlockN>(kIsQueries ? shared.sK(kv_stage, 0) : shared.sV(kv_stage, 0), full_kv,
                                        work.kv_head(params), work.n_start);
    RowLoader rows{kIsQueries ? arguments.q_map : arguments.dout_map,
                   work.batch,
                   work.mask.q_length,
                   static_cast<int>(params.seqlen_q),
                   ptx::kEvictLast,
                   tail,
                   keys.tail_parity};
    const int part_heads = arguments.part_heads;
    auto ring = kIsQueries ? q_ring : shared.dout_ring().at(q_ring);
#pragma unroll 1
    for (int head = work.part * part_heads; head < (work.part + 1) * part_heads; ++head) {
      const typename Config::Queries queries = work.queries(params, head);
      // Small blocks of a list: those of its last entry may all have a tail.
      constexpr int kMaxTails = Config::Queries::kBlocksInUnit;
      int whole = queries.count;
#pragma unroll
      for (int i = 0; i < kMaxTails; ++i) {
        if (whole > 0 && rows.template has_tail<kBlockM>(queries.start(whole - 1))) --whole;
      }
      if (ptx::elect_one()) {
        auto at = ring;
#pragma unroll 1
        for (int i = 0; i < whole; ++i) {
          at.wait_empty();
          rows.template load_whole<kBlockM>(tile<kIsQueries>(at.stage), at.full(), head, queries.start(i));
          at.advance();
        }
      }
      __syncwarp();
      ring.advance(whole);
#pragma unroll 1
      for (int i = whole; i < queries.count; ++i) {
        ring.wait_empty();
        __syncwarp();
        rows.template load<kBlockM>(tile<kIsQueries>(ring.stage), ring.full(), head, queries.start(i));
        ring.advance();
      }
    }
    q_ring = q_ring.at(ring);
    tail_parity = rows.tail_parity;
  }

  __device__ __forceinline__ void load_stats(const BackwardTileWork<Config>& work) {
    constexpr int kBytes = 4 * Config::kBlockM;
    const BackwardParams& params = arguments.params;
    const int part_heads = arguments.part_heads;
    if (ptx::elect_one()) {
      auto at = q_ring;
#pragma unroll 1
      for (int i = 0; i < part_heads; ++i) {
        const int head = work.part * part_heads + i;
        const int64_t row = (int64_t{work.batch} * params.num_heads + head) * stats_length(params.seqlen_q);
        const typename Config::Queries queries = work.queries(params, head);
#pragma unroll 1
        for (int block = 0; block < queries.count; ++block) {
          const int start = queries.start(block);
          at.wait_empty();
          int bytes = kBytes;
          if constexpr (kStatsRows % Config::kBlockM != 0) {
            // A block may end after the last row that has statistics.
            const int rows = min(Config::kBlockM, static_cast<int>(stats_length(params.seqlen_q)) - start);
            bytes = 4 * rows;
            const float infinities[4] = {INFINITY, INFINITY, INFINITY, INFINITY}, zeros[4] = {};
            for (int beyond = rows; beyond < Config::kBlockM; beyond += 4) {
              ptx::store_shared_x4(shared.sLse(at.stage) + 4 * beyond, infinities);
              ptx::store_shared_x4(shared.sDelta(at.stage) + 4 * beyond, zeros);
              if constexpr (Config::kPlanes) {
                ptx::store_shared(shared.sDsFactor(at.stage) + 2 * beyond, kNoGradientFactors);
                ptx::store_shared(shared.sDsFactor(at.stage) + 2 * beyond + 4, kNoGradientFactors);
              }
            }
            if (rows < Config::kBlockM) ptx::async_proxy_fence();  // the stage's next copies write there, too
          }
          if constexpr (Config::kPlanes) {
            const PlaneRows rows(params, stats_length(params.seqlen_q));
            ptx::barrier_arrive_expect(at.full(), 2 * bytes + bytes / 2);
            ptx::bulk_load(shared.sLse(at.stage), rows.lse_log2 + row + start, bytes, at.full());
            ptx::bulk_load(shared.sDelta(at.stage), rows.delta + row + start, bytes, at.full());
            ptx::bulk_load(shared.sDsFactor(at.stage), rows.ds_factor + row + start, bytes / 2, at.full());
          } else {
            ptx::barrier_arrive_expect(at.full(), 2 * bytes);
            ptx::bulk_load(shared.sLse(at.stage), params.lse_log2 + row + start, bytes, at.full());
            ptx::bulk_load(shared.sDelta(at.stage), params.delta + row + start, bytes, at.full());
          }
          at.advance();
        }
      }
    }
    __syncwarp();
    q_ring.advance(work.all_blocks);
  }

  // The kernel for dq takes whole tiles of ds: zeros for what is before the first block of queries and behind
  // the last.
  __device__ __forceinline__ void clear_beside_ds(const BackwardTileWork<Config>& work) const {
    constexpr int kTile = SharedDs::kTile;
    if constexpr (Config::kMayShareDs && Config::kBlockM % kTile != 0) {
      const BackwardParams& params = arguments.params;
      const bool is_listed = Config::Queries::kMayBeListed && params.visible.lists;  // of whole tiles
      if (!arguments.shares_ds || is_listed || work.m_blocks == 0) return;
      const SharedDs shared_ds(params);
      const int begin = work.m_begin, end = begin + Config::kBlockM * work.m_blocks;
#pragma unroll 1
      for (int i = 0; i < arguments.part_heads; ++i) {
        const int head = work.batch * static_cast<int>(params.num_heads) + work.part * arguments.part_heads +
                         i - arguments.first_shared_head;
        shared_ds.clear(head, work.n_start, Config::kBlockN, begin / kTile * kTile, begin);
        shared_ds.clear(head, work.n_start, Config::kBlockN, end, (end + kTile - 1) / kTile * kTile);
      }
    }
  }

  // Adds what the consumers leave of dq, behind bar 1: ds is complete, too. Few large additions: with eight
  // of 4 KB by this warp, the kernel was 8 % slower.
  __device__ __forceinline__ void add_dq(const BackwardTileWork<Config>& work) {
    const int part_heads = arguments.part_heads;
    if (ptx::elect_one()) {
      auto at = dq_ring;
      int stage = ds_stage;
#pragma unroll 1
      for (int head = work.part * part_heads; head < (work.part + 1) * part_heads; ++head) {
        const typename Config::Queries queries = work.queries(arguments.params, head);
#pragma unroll 1
        for (int block = 0; block < queries.count; ++block) {
          const int start = queries.start(block);
          int32_t* const turn = turn_of(work.batch, head, start);
          if (turn) {
            ptx::wait_for_arrivals(turn, tiles_before(work, start));
            ptx::global_proxy_fence();
          }
#pragma unroll
          for (int part = 0; part < Config::kDqParts; ++part) {
            at.wait_full(part);
            if (part == 0) store_ds(work, head, start, stage);
            add_rows(work.batch, head, start, part);
            ptx::tensor_store_commit();
            if (part > 0) {
              ptx::tensor_store_wait_read<1>();
              at.release(part - 1);
            }
          }
          ptx::tensor_store_wait_read();
          at.release(Config::kDqParts - 1);
          at.advance();
          stage ^= 1;
          if (turn) {
            ptx::tensor_store_wait();
            ptx::global_proxy_fence();
            ptx::arrive(turn);
          }
        }
      }
    }
    __syncwarp();
    dq_ring.advance(work.all_blocks);
    ds_stage ^= work.all_blocks % 2;
  }

 private:
  // Before dq is released: consumers write to the same stage of ds, or dk to its place, behind that.
  __device__ __forceinline__ void store_ds(const BackwardTileWork<Config>& work, int head, int start,
                                           int stage) const {
    if constexpr (Config::kMayKeepDs) {
      if (!arguments.keeps_ds) return;
      const int batch_head = work.batch * static_cast<int>(arguments.params.num_heads) + head;
#pragma unroll
      for (int chunk = 0; chunk < Config::kBlockN / 64; ++chunk) {
        ptx::tensor_store(arguments.ds_map, shared.sDs(stage) + chunk * Config::kDsChunkBytes,
                          work.n_start + 64 * chunk, 0, start, batch_head);
      }
    }
  }

  // Null where tiles do not add in turns.
  __device__ __forceinline__ int32_t* turn_of(int batch, int head, int start) const {
    static_assert(Config::kBlockM % kDeltaRows == 0);  // two blocks of queries do not share a turn
    if (!arguments.turns) return nullptr;
    const int blocks = ceil_div(static_cast<int>(arguments.params.seqlen_q), kDeltaRows);
    const int64_t row = int64_t{batch} * arguments.params.num_heads + head;
    return arguments.turns + row * blocks + start / kDeltaRows;
  }

  // The tiles of later keys that see a block of queries: they add to it before this one does.
  __device__ __forceinline__ int tiles_before(const BackwardTileWork<Config>& work, int start) const {
    const int last_row = min(start + Config::kBlockM, work.mask.q_length) - 1;
    return (work.mask.last_key(last_row) - work.n_start) / Config::kBlockN;
  }

  // Part `part` of the block of queries that begins at `start`.
  __device__ __forceinline__ void add_rows(int batch, int head, int start, int part) const {
    constexpr int kTileBytes = Fragments::kTileBytes,
                  kWarpTiles = Config::kDqColumns / Fragments::kTileColumns;
    const Fragments& sums = arguments.dq_accum;
    const int row = start + 64 * part, tiles = sums.column_tiles;
    const int row_tiles = min(4, sums.row_tiles - row / Fragments::kTileRows);
    if (row_tiles <= 0) return;
    const auto send = [&](float* to, uint32_t from, int bytes) {
      if (arguments.writes_dq) {
        ptx::bulk_store(to, from, bytes);
      } else {
        ptx::bulk_reduce_add(to, from, bytes);
      }
    };
    float* to = sums.tile(batch, head, row, 0);
    if (tiles == Config::kHeadDim / Fragments::kTileColumns) {
      send(to, shared.sDq(part, 0), row_tiles * tiles * kTileBytes);
      return;
    }
    // Narrower rows leave gaps in shared memory.
#pragma unroll 1
    for (int i = 0; i < row_tiles; ++i) {
#pragma unroll 1
      for (int first = 0; first < tiles; first += kWarpTiles) {
        const uint32_t from = shared.sDq(Config::kDqByRows ? part : first / kWarpTiles, i);
        const int count = min(kWarpTiles, tiles - first);
        send(to, from, count * kTileBytes);
        to += count * (kTileBytes / 4);
      }
    }
  }

  template <bool kIsQueries>
  __device__ __forceinline__ uint32_t tile(int stage) const {
    return kIsQueries ? shared.sQ(stage) : shared.sDout(stage);
  }
};

// ---- A consumer: a warpgroup ----

// kPolicy is that of the loop, which may be narrower than the kernel's.
template <class Config, PairPolicy kPolicy>
struct BackwardConsumer {
  // May anything but a mask or a staged bias stand between scores and probabilities?
  static constexpr bool kIsGeneral = kPolicy.others;
  using Arithmetic = typename Config::Arithmetic;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockM = Config::kBlockM, kBlockN = Config::kBlockN;
  static constexpr int kQueries = Config::kQueries, kTiles = kQueries / 8, kSteps = kQueries / 16;
  // Is a bias that is not staged, such as one in float32, read while its scores are formed? Elsewhere there
  // are no registers for it.
  static constexpr bool kReadsBiasAhead =
      kIsGeneral && (kHeadDim > 128 || (Config::kPlanes && kHeadDim <= 64));
  static constexpr bool kByKeys = Config::kByKeys;
  using Scores = float[1][kTiles][4];   // [64 keys, kQueries]
  using Operand = uint32_t[kSteps][4];  // the same in 16 bits
  // Tiles of scores whose statistics are read early, and whose exponentials are computed before dout v^T is
  // there: 4 of 16, all of 8, as measured to be fastest.
  static constexpr int kEarlyTiles = kTiles > 8 ? 4 : kTiles;
  using RowStats = float[kTiles][2];               // lse or delta of a lane's queries
  using Dk = float[1][Config::kColumns / 8][4];    // [64 keys, kColumns]
  using Dv = float[1][Config::kColumnsV / 8][4];   // [64 keys, kColumnsV]
  using Dq = float[1][Config::kDqColumns / 8][4];  // [64 queries, kDqColumns]

  const BackwardArguments& arguments;
  BackwardShared<Config> shared;
  int consumer;
  int warp = uniform(threadIdx.x / 32 % 4);                         // of the consumer
  typename BackwardShared<Config>::QRing q_ring = shared.q_ring();  // dout's advances with it
  int ds_stage = 0;
  typename BackwardShared<Config>::KvRing kv_ring = shared.kv_ring();
  typename BackwardShared<Config>::DqRing dq_ring = shared.dq_ring();
  bool is_first = false;  // is this the first block after a tile was written out?
  // Where they are of planes: of this tile's scores; and what ds is multiplied by to be an operand for dk.
  std::conditional_t<Config::kPlanes, LogitScale, const LogitScale&> logit;
  float dk_factor = 1;
  Dk dk;
  Dv dv;

  __device__ __forceinline__ BackwardConsumer(const BackwardArguments& arguments,
                                              BackwardShared<Config> shared, int consumer)
      : arguments(arguments), shared(shared), consumer(consumer), logit(arguments.logit) {}

  __device__ __forceinline__ void run(const BackwardTileWork<Config>& work) {
    clear(dk);
    clear(dv);
    if constexpr (Config::kPlanes) {
      const PlaneScales scales(arguments.params, work.batch, work.kv_head(arguments.params));
      logit = arguments.logit.times_power(uniform(scales.of_scores()));
      dk_factor = power_of_two(127);
    }
    kv_ring.wait_full(shared.kKeys);
    kv_ring.wait_full(shared.kValues);
    const int part_heads = arguments.part_heads;
#pragma unroll 1
    for (int head = work.part * part_heads; head < (work.part + 1) * part_heads; ++head) {
      const typename Config::Queries queries = work.queries(arguments.params, head);
      const Pairs<true> pairs{arguments.params, arguments.pairs, work.batch, head};
#pragma unroll 1
      for (int i = 0; i < queries.count; ++i) {
        const int m_start = queries.start(i);
        if (has_staged_bias() && i == 0) start_bias(pairs, work.n_start, m_start);
        // With 64 keys for both consumers, each has half of the queries of the block.
        const bool is_whole = !queries.is_listed() || queries.entry(i).is_whole(kByKeys ? consumer : 0);
        block(work, pairs, m_start, i + 1 < queries.count ? queries.start(i + 1) : -1, is_whole);
      }
    }
    write_out(work);
    kv_ring.advance();
    is_first = true;
  }

 private:
  // Of the block of keys, this consumer's and this warp's first row; of the block of queries, this
  // consumer's.
  __device__ __forceinline__ int key_row() const { return kByKeys ? 64 * consumer : 0; }
  __device__ __forceinline__ int warp_row() const { return key_row() + 16 * warp; }
  __device__ __forceinline__ int query_row() const { return kByKeys ? 0 : kQueries * consumer; }

  // ---- One block of queries ----

  __device__ __forceinline__ bool has_staged_bias() const {
    return is_present<kPolicy.staged_bias>(
        [&] { return arguments.pairs.bias_format == BiasFormat::kStaged; });
  }

  // Begins to copy the bias of the block of queries that begins at m_start.
  __device__ __forceinline__ void start_bias(const Pairs<true>& pairs, int n_start, int m_start) {
    if constexpr (kPolicy.may_stage_bias()) {
      start_bias_copy(shared.bias(4 * consumer + warp), pairs, n_start + warp_row(), m_start + query_row());
    }
  }

  // Adds the staged bias, and begins to copy the next block's.
  __device__ __forceinline__ void take_bias(const BackwardTileWork<Config>& work, const Pairs<true>& pairs,
                                            int next_m_start, Scores& scores) {
    if constexpr (kPolicy.may_stage_bias()) {
      if (has_staged_bias()) {
        add_staged_bias(scores[0], pairs, shared.bias(4 * consumer + warp), logit);
        if (next_m_start >= 0) start_bias(pairs, work.n_start, next_m_start);
      }
    }
  }

  // `next_m_start`: of this head, -1 if there is none; `is_listed_whole`: do mask and segments leave every
  // pair visible?
  __device__ __forceinline__ void block(const BackwardTileWork<Config>& work, const Pairs<true>& pairs,
                                        int m_start, int next_m_start, bool is_listed_whole) {
    const auto q = q_ring.uniform(), dout = shared.dout_ring().at(q);
    const int stage = q.stage;
    const uint32_t sQ = shared.sQ(stage), sDout = shared.sDout(stage);
    Scores scores, ds;
    q.wait_full();
    if constexpr (Config::kPlanes) adopt_dk_factor();
    issue_scores<kHeadDim, Config::kKColumns>(scores, uniform(shared.sK(kv_ring.stage, key_row())),
                                              uniform(sQ + query_row() * Config::kRowBytes));
    RowStats lse_log2;
    constexpr bool kReadsStatsEarly = !kIsGeneral && !kPolicy.may_have_mask();
    if constexpr (kReadsStatsEarly) read_stats<0, kEarlyTiles>(lse_log2, shared.sLse(stage));
    auto issue_ds = [&] {
      dout.wait_full();
      issue_scores<Config::kHeadDimV>(ds, uniform(shared.sV(kv_ring.stage, key_row())),
                                      uniform(sDout + query_row() * Config::kRowBytes));
    };
    if (!Config::kIssuesDsLate) issue_ds();

    // ---- p = exp(q k^T - lse), ds = p * (dout v^T - delta) ----
    Operand p, ds_operand;
    const bool is_whole = work.mask.covers(m_start + query_row(), kQueries, work.n_start + key_row(), 64);
    if constexpr (kIsGeneral) {
      weigh_general(work, pairs, m_start, next_m_start, is_whole, is_listed_whole, scores, ds, issue_ds, p,
                    ds_operand);
    } else {
      weigh(work, pairs, m_start, next_m_start, is_whole, is_listed_whole, lse_log2, scores, ds, p,
            ds_operand);
    }

    // ---- dv += p^T dout, dq += ds k, dk += ds^T q ----
    if constexpr (kByKeys) {
      issue_gradient(dv, p, shared.sP(ds_stage), sDout);
      if constexpr (Config::kWithDq) exchange();
    } else {
      store_transposed(p, shared.sP(ds_stage));
      store_transposed(ds_operand, shared.sDs(ds_stage));
      exchange();
      issue_gradient(dv, p, shared.sP(ds_stage), sDout);
    }
    if constexpr (Config::kMayShareDs) {
      SharedDs(arguments.params)
          .store(ds_operand, arguments.shares_ds, pairs.head.index - arguments.first_shared_head,
                 work.n_start + warp_row(), m_start + query_row());
    }
    if constexpr (Config::kWithDq) {
      Dq dq;
      issue_dq(dq);
      issue_gradient(dk, ds_operand, shared.sDs(ds_stage), sQ);
      ptx::wgmma_wait<2>();
      ptx::keep_in_place(dv[0]);
      dout.release_by_warpgroup();
      ptx::wgmma_wait<1>();
      ptx::keep_in_place(dq[0]);
      store_dq(dq);
    } else {
      issue_gradient(dk, ds_operand, shared.sDs(ds_stage), sQ);
      ptx::wgmma_wait<1>();
      ptx::keep_in_place(dv[0]);
      dout.release_by_warpgroup();
    }
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(dk[0]);
    if constexpr (Config::kReleasesTogether) {
      q.release_by_warpgroup();
    } else {
      q.release();  // each thread has read lse and delta by ordinary loads
    }
    q_ring.advance();
    if constexpr (Config::kDsStages > 0) ds_stage ^= 1;
  }

  // The last tile's dk and dv leave from the places of ds and dq: both consumers' must have gone.
  __device__ __forceinline__ void make_room_for_ds() {
    if constexpr (kByKeys && Config::kWithDq && !Config::kPlanes) {
      if (is_first) {
        if (ptx::elect_one()) ptx::tensor_store_wait_read();
        ptx::named_barrier_wait(2, 256);
        is_first = false;
      }
    }
  }

  // With no pair option but a mask or a staged bias. Work that only needs the first product is spread over
  // both sides of the wait for the second: it runs under that product, or mixes with what follows.
  __device__ __forceinline__ void weigh(const BackwardTileWork<Config>& work, const Pairs<true>& pairs,
                                        int m_start, int next_m_start, bool is_whole, bool is_listed_whole,
                                        RowStats& lse_log2, Scores& scores, Scores& ds, Operand& p,
                                        Operand& ds_operand) {
    PairBits<kTiles> visible[1];
    if constexpr (kPolicy.may_have_mask()) {
      if (!is_listed_whole) load_visible(visible, pairs, work.n_start + warp_row(), m_start + query_row());
      read_stats<0, kEarlyTiles>(lse_log2, shared.sLse(q_ring.stage));  // no registers before load_visible
    }
    ptx::wgmma_wait<1>();
    ptx::keep_in_place(scores[0]);
    take_bias(work, pairs, next_m_start, scores);
    read_stats<kEarlyTiles, kTiles>(lse_log2, shared.sLse(q_ring.stage));
    RowStats delta;
    read_stats<0, kEarlyTiles>(delta, shared.sDelta(q_ring.stage));
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      make_log2_p(scores[0][nt], lse_log2[nt]);
      if (nt < kEarlyTiles) exponentiate(scores[0][nt]);
    }
    if (!is_whole) {
#pragma unroll
      for (int nt = 0; nt < kTiles; ++nt) {
        hide(work, scores[0][nt], nt, m_start, nt < kEarlyTiles ? 0 : -INFINITY);  // of p, or of log2(p)
      }
    }
    if constexpr (kPolicy.may_have_mask()) {
      static_assert(kEarlyTiles == kTiles);
      if (!is_listed_whole) fill_unset(scores, visible, 0);
    }
    make_room_for_ds();
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(ds[0]);
    read_stats<kEarlyTiles, kTiles>(delta, shared.sDelta(q_ring.stage));
    uint32_t to = ds_row();
    ptx::make_opaque(to);
    Operand for_dq;  // where it is another one than for dk
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      if (nt >= kEarlyTiles) exponentiate(scores[0][nt]);
      make_operand<Arithmetic>(scores[0][nt], nt, p);
#pragma unroll
      for (int i = 0; i < 4; ++i) ds[0][nt][i] = scores[0][nt][i] * (ds[0][nt][i] - delta[nt][i % 2]);
      round_ds(ds[0][nt], nt, ds_operand, for_dq);
      if constexpr (kByKeys && Config::kWithDq) {
        if (nt % 2 == 1) store_ds(to, Config::kPlanes ? for_dq : ds_operand, nt / 2);
      }
    }
  }

  // The factor for a block's ds is the smallest of its rows', or up to 2^3 less, so that the sums are rarely
  // rescaled.
  __device__ __forceinline__ void adopt_dk_factor() {
    constexpr uint32_t kNoGradient = kNoGradientFactors & 0xffff;
    uint32_t smallest = kNoGradient;  // upper halves of positive floats have the order of floats
#pragma unroll
    for (int i = 0; i < Config::kBlockM; i += 64) {
      const int row = i + 2 * lane_id();
      if (row >= Config::kBlockM) continue;
      const uint32_t pair = ptx::load_shared(shared.sDsFactor(q_ring.stage) + 2 * row);
      smallest = min(smallest, min(pair & 0xffff, pair >> 16));
    }
    smallest = __reduce_min_sync(0xffffffff, smallest);
    const float factor = __uint_as_float(smallest << 16);
    if (factor >= dk_factor && (factor < 16 * dk_factor || smallest == kNoGradient)) return;
    const float change = factor / dk_factor;
    for_each_accumulator(dk, [&](int mt, int h, int nt, int c) { dk[mt][nt][2 * h + c] *= change; });
    dk_factor = factor;
  }

  // Rounds ds of 8 queries to an operand for dk; where they are of planes, also to one for dq.
  __device__ __forceinline__ void round_ds(float (&tile)[4], int nt, Operand& for_dk, Operand& for_dq) {
    if constexpr (Config::kPlanes) {
      if constexpr (Config::kWithDq) {
        const float2 factor = unpack<bfloat16>(
            ptx::load_shared(shared.sDsFactor(q_ring.stage) + 2 * (query_row() + accumulator_column(nt, 0))));
        const float scaled[4] = {tile[0] * factor.x, tile[1] * factor.y, tile[2] * factor.x,
                                 tile[3] * factor.y};
        make_operand<Arithmetic>(scaled, nt, for_dq);
      }
#pragma unroll
      for (float& x : tile) x *= dk_factor;
    }
    make_operand<Arithmetic>(tile, nt, for_dk);
  }

  // With any pair options; ds also gets the soft cap's factor 1 - tanh^2.
  template <class IssueDs>
  __device__ __forceinline__ void weigh_general(const BackwardTileWork<Config>& work,
                                                const Pairs<true>& pairs, int m_start, int next_m_start,
                                                bool is_whole, bool is_listed_whole, Scores& scores,
                                                Scores& ds, const IssueDs& issue_ds, Operand& p,
                                                Operand& ds_operand) {
    const int stage = q_ring.stage, row0 = work.n_start + warp_row(), column0 = m_start + query_row();
    PairBits<kTiles> visible[1]{{~0u}}, kept[1]{{~0u}};
    if constexpr (kPolicy.may_have_mask()) {
      if (!is_listed_whole) load_visible(visible, pairs, row0, column0);
    }
    if constexpr (kPolicy.others) {
      if (pairs.has_dropout()) draw_kept(kept, pairs, row0, column0);
    }
    BiasAhead<kTiles> bias{};
    if constexpr (kReadsBiasAhead) {
      if (!has_staged_bias()) bias.read(pairs, row0, column0);
    }
    ptx::wgmma_wait<Config::kIssuesDsLate ? 0 : 1>();
    ptx::keep_in_place(scores[0]);
    take_bias(work, pairs, next_m_start, scores);
    if constexpr (kReadsBiasAhead) {
      transform_scores(scores[0], pairs, has_staged_bias(), logit, row0, column0, bias);
    } else {
      transform_scores(scores[0], pairs, has_staged_bias(), logit, row0, column0);
    }
    if (Config::kIssuesDsLate) issue_ds();
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(ds[0]);
    Operand for_dq;
#pragma unroll
    for (int nt = 0; nt < kTiles; ++nt) {
      float (&tile)[4] = scores[0][nt];
      float slope[4], dropped[4], lse_log2[2], delta[2];
      // Only now: there are no registers for all slopes.
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        slope[i] = logit.transform == LogitTransform::kSoftCap ? soft_cap_slope(tile[i]) : 1;
      }
      read_stats(lse_log2, shared.sLse(stage), nt);
      make_log2_p(tile, lse_log2);
      exponentiate(tile);
      if (!is_whole) hide(work, tile, nt, m_start, 0);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (!visible[0].test(nt, i)) tile[i] = 0;
        dropped[i] = kept[0].test(nt, i) ? tile[i] : 0;
      }
      make_operand<Arithmetic>(dropped, nt, p);
      read_stats(delta, shared.sDelta(stage), nt);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& x = ds[0][nt][i];
        if constexpr (kPolicy.others) x = kept[0].test(nt, i) ? x * arguments.pairs.kept_factor : 0;
        x = tile[i] * (x - delta[i % 2]);
        if constexpr (kPolicy.others) x *= slope[i];
      }
      round_ds(ds[0][nt], nt, ds_operand, for_dq);
    }
    if constexpr (kByKeys && Config::kWithDq) {
      make_room_for_ds();
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        store_ds(ds_row(), Config::kPlanes ? for_dq : ds_operand, step);
      }
    }
  }

  // Makes what both consumers have written to shared memory visible to the products of both.
  __device__ __forceinline__ void exchange() {
    ptx::async_proxy_fence();
    ptx::named_barrier_wait(1, 256);
  }

  // scores [64, kQueries] = a [64, kDepth] b^T, b [kQueries, kDepth].
  template <int kDepth, int kAColumns = Config::kRowColumns>
  __device__ __forceinline__ void issue_scores(Scores& scores, uint32_t a_tile, uint32_t b_tile) {
    sm90::issue_scores<Arithmetic, kDepth, /*kAccumulate=*/false, kAColumns>(
        scores, a_tile, Config::kKvChunkBytes, b_tile, Config::kQChunkBytes);
  }

  // sum, dk or dv, += p^T or ds^T [64, kBlockM] times this consumer's columns of rows, q or dout.
  template <class Sum>
  __device__ __forceinline__ void issue_gradient(Sum& sum, Operand& operand, uint32_t tile, uint32_t rows) {
    if constexpr (kByKeys) {
      issue_sum<Arithmetic, Config::kRowBytes>(sum, operand, rows, Config::kQChunkBytes);
    } else {
      const uint32_t columns = uniform(rows + consumer * (Config::kChunks / 2) * Config::kQChunkBytes);
      issue_sum<Arithmetic, kBlockM, /*kAccumulate=*/true, Config::kRowBytes>(sum, tile, Config::kQChunkBytes,
                                                                              columns, Config::kQChunkBytes);
    }
  }

  __device__ __forceinline__ void hide(const BackwardTileWork<Config>& work, float (&tile)[4], int nt,
                                       int m_start, float hidden) {
    fill_unseen(tile, nt, work.mask, work.n_start + warp_row(), m_start + query_row(), hidden);
  }

  // From 8 queries' scores to log2(p), and to p.
  __device__ __forceinline__ void make_log2_p(float (&tile)[4], const float (&lse_log2)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[i] = fmaf(tile[i], logit.scale_log2, -lse_log2[i % 2]);
  }
  __device__ __forceinline__ void exponentiate(float (&tile)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[i] = ptx::exp2_approx(tile[i]);
  }

  // Reads lse or delta of a lane's two queries in tile `nt`; in the tiles from kBegin to kEnd - 1.
  __device__ __forceinline__ void read_stats(float (&stats)[2], uint32_t from, int nt) {
    ptx::load_shared_x2(stats, from + 4 * (query_row() + accumulator_column(nt, 0)));
  }
  template <int kBegin, int kEnd>
  __device__ __forceinline__ void read_stats(RowStats& stats, uint32_t from) {
    uint32_t first = from + 4 * (query_row() + accumulator_column(0, 0));
    ptx::make_opaque(first);  // one register, not one for each tile
#pragma unroll
    for (int nt = kBegin; nt < kEnd; ++nt) ptx::load_shared_x2(stats[nt], first + 32 * nt);
  }

  // p^T or ds^T of this warp's 16 keys.
  __device__ __forceinline__ void store_transposed(const Operand& operand, uint32_t tile) {
    const uint32_t rows = tile + 16 * warp * kChunkRowBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int piece = query_row() / 8 + 2 * step + lane_id() / 16;
      ptx::store_matrix_x4(rows + swizzled(lane_id() % 16, piece), operand[step]);
    }
  }

  // ---- dq ----

  // Where this lane's row of ds^T of the warp's 16 keys goes, of the first 16 queries.
  __device__ __forceinline__ uint32_t ds_row() const {
    const uint32_t sDs = shared.sDs(ds_stage) + consumer * Config::kDsChunkBytes;
    uint32_t lane = lane_id();
    ptx::make_opaque(lane);  // rather computed again than kept in two registers
    return sDs + swizzled(lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
  }
  // A step of 16 queries.
  __device__ __forceinline__ void store_ds(uint32_t to, const Operand& ds, int step) const {
    ptx::store_matrix_x4_transposed(to + step * 16 * kChunkRowBytes, ds[step]);
  }

  __device__ __forceinline__ void issue_dq(Dq& dq) {
    const int row = Config::kDqByRows ? 64 * consumer : 0;
    const int column = Config::kDqByRows ? 0 : consumer * Config::kDqColumns;
    const uint32_t sDs = uniform(shared.sDs(ds_stage) + row * kChunkRowBytes);
    const uint32_t sK =
        uniform(shared.sK(kv_ring.stage, 0) + column / Config::kKColumns * Config::kKvChunkBytes +
                column % Config::kKColumns * 2);
    issue_sum<Arithmetic, kBlockN, /*kAccumulate=*/false, Config::kRowBytes>(dq, sDs, Config::kDsChunkBytes,
                                                                             sK, Config::kKvChunkBytes);
  }

  // Where this consumer's rows are.
  __device__ __forceinline__ int dq_part() const { return Config::kDqByRows ? consumer : 0; }

  __device__ __forceinline__ void store_dq(const Dq& dq) {
    const uint32_t sDq = shared.sDq(consumer, warp);
    dq_ring.wait_empty(dq_part());
#pragma unroll
    for (int nt = 0; nt < Config::kDqColumns / 8; ++nt) {
      ptx::store_shared_x4(sDq + nt * Fragments::kTileBytes + 16 * lane_id(), dq[0][nt]);
    }
    ptx::async_proxy_fence();
    __syncwarp();
    if (ptx::elect_one()) ptx::barrier_arrive(dq_ring.full(dq_part()));
    dq_ring.advance();
  }

  // ---- Write dk and dv; keys beyond the length get zeros ----

  __device__ __forceinline__ void write_out(const BackwardTileWork<Config>& work) {
    ptx::named_barrier_wait(1, 256);  // both consumers' products have read what dk and dv overwrite
    if (Config::kWithDq) kv_ring.release_by_warpgroup();
    const BackwardParams& params = arguments.params;
    const int row0 = work.n_start + warp_row();
    auto hide_keys = [&](auto& sum) {
      for_each_accumulator(sum, [&](int, int h, int nt, int c) {
        if (row0 + accumulator_row(0, h) >= work.mask.kv_length) sum[0][nt][2 * h + c] = 0;
      });
    };
    hide_keys(dk);
    hide_keys(dv);
    const int chunk0 = kByKeys ? 0 : consumer * (Config::kChunks / 2);
    if (arguments.dk_parts.tiles) {
      if (row0 < static_cast<int>(params.seqlen_kv)) {
        if constexpr (Config::kPlanes) scale_gradients(work);
        write_fragments(dk, arguments.dk_parts, work.batch, work.part, row0, chunk0 * Config::kRowColumns);
        write_fragments(dv, arguments.dv_parts, work.batch, work.part, row0, chunk0 * Config::kRowColumns);
      }
      __syncwarp();
      if (!Config::kWithDq && ptx::elect_one()) kv_ring.release();
      return;
    }
    if constexpr (Config::kPlanes) {
      write_float32(work, row0);
      return;
    }
    const uint32_t sDk = shared.sDk(kv_ring.stage, consumer, warp),
                   sDv = shared.sDv(kv_ring.stage, consumer, warp);
    if (Config::kWithDq && ptx::elect_one()) ptx::tensor_store_wait_read();  // the last tile's have left
    const bool keeps_ds = Config::kMayKeepDs && arguments.keeps_ds;
    if (Config::kWithDq && (!Config::kDvInDs || keeps_ds)) dq_ring.wait_empty(dq_part());
    __syncwarp();
    store_rows<Arithmetic, Config::kRowBytes>(dk, {arguments.logit.scale, arguments.logit.scale}, sDk,
                                              Config::kOutPitch);
    const float kept_factor = kPolicy.others ? arguments.pairs.kept_factor : 1;
    store_rows<Arithmetic, Config::kRowBytes>(dv, {kept_factor, kept_factor}, sDv, Config::kOutPitch);
    ptx::async_proxy_fence();
    __syncwarp();
    if (row0 < static_cast<int>(params.seqlen_kv) && ptx::elect_one()) {
#pragma unroll
      for (int chunk = 0; chunk < Config::kOutChunks; ++chunk) {
        const int column = (chunk0 + chunk) * Config::kRowColumns;
        const int offset = chunk * Config::kOutPitch;
        if (column < params.head_dim) {
          ptx::tensor_store(arguments.dk_map, sDk + offset, column, work.kv_head(params), row0, work.batch);
        }
        if (column < params.head_dim_v) {
          ptx::tensor_store(arguments.dv_map, sDv + offset, column, work.kv_head(params), row0, work.batch);
        }
      }
      ptx::tensor_store_commit();
    }
    if (!Config::kWithDq && ptx::elect_one()) {
      ptx::tensor_store_wait_read();
      kv_ring.release();
    }
  }

  // From sums of products of planes to gradients.
  __device__ __forceinline__ void scale_gradients(const BackwardTileWork<Config>& work) {
    const PlaneScales scales(arguments.params, work.batch, work.kv_head(arguments.params));
    const int ds_exponent = binade(dk_factor) + kPlaneTop + 1;
    const float kept_factor = kPolicy.others ? arguments.pairs.kept_factor : 1;
    const float of_dk = ldexpf(arguments.logit.scale, scales.of_dk() - ds_exponent),
                of_dv = ldexpf(kept_factor, scales.of_dv());
    for_each_accumulator(dk, [&](int mt, int h, int nt, int c) { dk[mt][nt][2 * h + c] *= of_dk; });
    for_each_accumulator(dv, [&](int mt, int h, int nt, int c) { dv[mt][nt][2 * h + c] *= of_dv; });
  }

  // Straight from the registers.
  __device__ __forceinline__ void write_float32(const BackwardTileWork<Config>& work, int row0) {
    const BackwardParams& params = arguments.params;
    auto store = [&](const auto& sum, void* gradient, int64_t columns, int column) {
      const Float32Rows rows(gradient, params.seqlen_kv, params.num_kv_heads, columns);
      rows.store(sum, {1, 1}, work.batch, work.kv_head(params), row0, column);
    };
    scale_gradients(work);
    store(dk, params.dk, params.head_dim, kByKeys ? 0 : consumer * Config::kColumns);
    store(dv, params.dv, params.head_dim_v, kByKeys ? 0 : consumer * Config::kColumnsV);
    __syncwarp();
    if (!Config::kWithDq && ptx::elect_one()) kv_ring.release();
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_kernel(const __grid_constant__ BackwardArguments arguments) {
  extern __shared__ __align__(1024) uint8_t start[];
  const BackwardShared<Config> shared{ptx::shared_address(start)};

  if (threadIdx.x == 0) {
    // q; lse and delta.
    shared.q_ring().init(2, (Config::kReleasesTogether ? 1 : 128) * Config::kConsumers);
    shared.dout_ring().init(1, Config::kConsumers);
    shared.kv_ring().init(1, (Config::kWithDq ? 1 : 4) * Config::kConsumers);
    ptx::barrier_init(shared.tail(0), 1);
    ptx::barrier_init(shared.tail(1), 1);
    if constexpr (Config::kWithDq) shared.dq_ring().init(Config::kConsumerWarps / Config::kDqParts, 1);
    shared.items().init((Config::kWithDq ? 3 : 2) + Config::kConsumerWarps);
    ptx::barrier_init_fence();
  }
  __syncthreads();
  ptx::wait_for_grid_before();

  auto for_each = [&]<bool kDraws = false>(auto f, std::bool_constant<kDraws> = {}) {
    for_each_tile<Config, kDraws>(arguments.schedule, arguments.params, shared.items(), f);
  };
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    BackwardLoader<Config> loader{arguments, shared};
    if (warp == 0) {
      for_each([&](const auto& work) { loader.template load_rows</*kIsQueries=*/true>(work); },
               /*draws=*/std::true_type());
    } else if (warp == 1) {
      for_each([&](const auto& work) { loader.template load_rows</*kIsQueries=*/false>(work); });
    } else if (warp == 2) {
      for_each([&](const auto& work) {
        loader.load_stats(work);
        loader.clear_beside_ds(work);
      });
    } else {
      if constexpr (Config::kWithDq) for_each([&](const auto& work) { loader.add_dq(work); });
    }
  } else {
    ptx::acquire_registers<Config::kConsumerRegisters>();
    auto consume = [&]<PairPolicy kPolicy>() {
      BackwardConsumer<Config, kPolicy> consumer(arguments, shared, warpgroup - 1);
      for_each([&](const auto& work) { consumer.run(work); });
    };
    constexpr bool kHasLoops = Config::kHasLoops;
    if (kHasLoops && arguments.pairs.mask_only) {
      consume.template operator()<kHasLoops ? kMaskOnly : Config::kPolicy>();
    } else if (kHasLoops && arguments.pairs.staged_bias_only) {
      consume.template operator()<kHasLoops ? kStagedBiasOnly : Config::kPolicy>();
    } else {
      consume.template operator()<Config::kPolicy>();
    }
    if (ptx::elect_one()) ptx::tensor_store_wait_read();
  }
}

inline Fragments dq_sums(const BackwardParams& params) {
  return {params.dq_accum, params.batch, params.num_heads, params.seqlen_q, params.head_dim};
}
// Does a single block have all keys, and does it go through every block of queries?
inline bool has_one_block(const BackwardParams& params, int block_n) {
  return params.seqlen_kv <= block_n && (is_full(params) || is_triangle(params));
}
// Where a kernel that adds dq does so in turns; null: in any order.
inline int32_t* turns(const BackwardParams& params) {
  return params.options.deterministic ? static_cast<int32_t*>(params.dq) : nullptr;
}
inline Fragments dk_parts(const BackwardParams& params) {
  return {params.dk_parts, params.batch, params.num_head_parts, params.seqlen_kv, params.head_dim};
}
inline Fragments dv_parts(const BackwardParams& params) {
  return {params.dv_parts, params.batch, params.num_head_parts, params.seqlen_kv, params.head_dim_v};
}

// Can ds be written, by TMA up to head dim 128, and does the kernel's general form run?
inline bool may_keep_ds(const BackwardParams& params) {
  return params.bias && has_tensor_map(params.batch * params.num_heads, params.seqlen_q, 1, params.seqlen_kv);
}

// dk and dv.
template <class Config>
Status launch_tiles_of_keys(BackwardArguments& arguments, const LaunchContext& context) {
  if constexpr (Config::kClusterBlocks > 1) {
    // Each block would draw an item of its own.
    arguments.schedule.counter = nullptr;
    return launch_tiles<Config>(wide_backward_kernel<Config>, arguments.schedule.num_items, context,
                                arguments);
  } else {
    return launch_early(backward_kernel<Config>, arguments.schedule.num_blocks, Config::kThreads,
                        Config::kSharedBytes, context, arguments);
  }
}

// dk, dv and dq of all key heads, as many at a time as shared_ds has room for.
template <class Config>
Status launch_slices(BackwardArguments& arguments, const LaunchContext& context) {
  using DqConfig = SharedDqConfig<Config>;
  const BackwardParams& params = arguments.params;
  const int64_t all_heads = params.batch * params.num_heads, heads = params.num_shared_heads;
  arguments.shares_ds = true;
  for (int64_t first = 0; first < all_heads; first += heads) {
    const int64_t count = std::min(heads, all_heads - first);
    arguments.first_shared_head = static_cast<int>(first);
    arguments.schedule = {params, count / arguments.part_heads, Config::kBlockN,
                          context.multiprocessors / Config::kClusterBlocks, /*in_turns=*/false};
    arguments.schedule.part0 = static_cast<int>(first / arguments.part_heads);
    Status status;
    if (first > 0) {
      status = launch_lists(params, Config::Queries::shape(), context);
      if (!status.failed() && arguments.schedule.counter) {  // as the first slice has left it
        status = cudaMemsetAsync(params.tile_counter, 0, sizeof(int32_t), context.stream);
      }
      if (status.failed()) return status;
    }
    status = launch_tiles_of_keys<Config>(arguments, context);
    if (!status.failed()) status = launch_shared_dq<DqConfig>(params, first, count, context);
    if (status.failed()) return status;
  }
  return {};
}

template <class Config>
Status launch_backward(const BackwardParams& params, const LaunchContext& context) {
  using Element = typename Config::Element;
  const int64_t tiles = ceil_div(params.seqlen_kv, Config::kBlockN) * params.num_head_parts * params.batch;
  if (tiles > std::numeric_limits<int32_t>::max() - context.multiprocessors) return Status::not_served();
  int32_t* const in_turns = Config::kWithDq ? turns(params) : nullptr;
  BackwardArguments arguments{
      .params = params,
      .schedule{params, params.batch * params.num_head_parts, Config::kBlockN,
                context.multiprocessors / Config::kClusterBlocks, in_turns != nullptr},
      .dq_accum = dq_sums(params),
      .dk_parts = dk_parts(params),
      .dv_parts = dv_parts(params),
      .turns = in_turns,
      .logit = LogitScale(params),
      .pairs = PairOptions(params),
      .part_heads = static_cast<int>(params.num_heads / params.num_head_parts),
      .keeps_ds = Config::kWithDq && params.ds,
      .writes_dq = has_one_block(params, Config::kBlockN)};
  const int64_t B = params.batch, T = params.seqlen_q, S = params.seqlen_kv;
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim, Hv = params.head_dim_v;
  constexpr int kColumns = Config::kRowColumns;
  const auto [q, k, v, dout] = product_inputs<Config::kPlanes>(params, params.dout);
  const bool has_maps =
      make_tensor_map<Element, kColumns>(q, B, T, N, H, Config::kBlockM, &arguments.q_map) &&
      make_tensor_map<Element, kColumns>(dout, B, T, N, Hv, Config::kBlockM, &arguments.dout_map) &&
      make_tensor_map<Element, kColumns>(k, B, S, K, H, Config::kBlockN, &arguments.k_map) &&
      make_tensor_map<Element, kColumns>(v, B, S, K, Hv, Config::kBlockN, &arguments.v_map) &&
      (Config::kPlanes ||
       (make_tensor_map<Element, kColumns>(params.dk, B, S, K, H, 16, &arguments.dk_map) &&
        make_tensor_map<Element, kColumns>(params.dv, B, S, K, Hv, 16, &arguments.dv_map))) &&
      (!arguments.keeps_ds ||
       make_tensor_map<Element>(params.ds, B * N, T, 1, S, Config::kBlockM, &arguments.ds_map));
  if (!has_maps) return Status::not_served();
  if (const Status status = launch_lists(params, Config::Queries::shape(), context); status.failed()) {
    return status;
  }
  if constexpr (Config::kMayShareDs) {
    if (may_share_ds(params)) return launch_slices<Config>(arguments, context);
  }
  const Status status = launch_tiles_of_keys<Config>(arguments, context);
  if constexpr (Config::kWithDq) {
    if (status.failed()) return status;
    if constexpr (Config::kPlanes) {
      return launch_convert_fragments<float>(arguments.dq_accum, 1, params.dq, DqOfPlanes{params}, context);
    } else {
      const UniformFactor scale{arguments.logit.scale};
      return launch_convert_fragments<Element>(arguments.dq_accum, 1, params.dq, scale, context);
    }
  }
  return status;
}

template <class Arithmetic, int kHeadDim, PairPolicy kPolicy, bool kWithDq>
using BackwardConfigOf =
    std::conditional_t<is_wide(kHeadDim), WideBackwardConfig<Arithmetic, kHeadDim, kPolicy>,
                       BackwardConfig<Arithmetic, kHeadDim, kPolicy, kWithDq>>;

// Of backward_dq.cuh, compiled in units of its own.
template <class Arithmetic, int kHeadDim>
Status backward_dq(const BackwardParams& params, const LaunchContext& context);

template <class Arithmetic, int kHeadDim>
Status backward_by_warpgroups(const BackwardParams& params, const LaunchContext& context) {
  using Element = typename Arithmetic::Element;
  constexpr bool kPlanes = !kIs16Bit<Arithmetic>;
  if constexpr (is_wide(kHeadDim)) {
    if (context.compute_capability == 90 && is_wide_without_pairs(params))
      return clear_gradients(params, context);
  }
  if (!is_served(params, context) || params.head_dim_v > backward_head_dim_v(kHeadDim))
    return Status::not_served();
  if (kPlanes && !params.planes) return Status::not_served();
  const bool with_dq = !backward_is_split(kHeadDim) && !params.leaves_dq;
  if (params.ds && (!(with_dq || dq_kernel_may_keep_ds(kHeadDim)) || !may_keep_ds(params)))
    return Status::not_served();
  // Lists do not say how many tiles add to a block of queries, and nobody clears the turns of planes.
  if (with_dq && turns(params) && (kPlanes || params.hides_pairs())) return Status::not_served();
  auto launch_form = [&]<bool kWithDq>() {
    constexpr PairPolicy kGeneral = kHeadDim <= 128 ? kAnyPairs : kAnyPairsUnstaged;
    return is_general(params)
               ? launch_backward<BackwardConfigOf<Arithmetic, kHeadDim, kGeneral, kWithDq>>(params, context)
               : launch_backward<BackwardConfigOf<Arithmetic, kHeadDim, kNoPairs, kWithDq>>(params, context);
  };
  constexpr int kBlockN = BackwardConfigOf<Arithmetic, kHeadDim, kNoPairs, /*kWithDq=*/false>::kBlockN;
  const int64_t cleared = with_dq && !has_one_block(params, kBlockN) ? dq_sums(params).size() : 0;
  Status status;
  if constexpr (kPlanes) {
    if (cleared > 0) status = cudaMemsetAsync(params.dq_accum, 0, sizeof(float) * cleared, context.stream);
    if (status.failed()) return status;
    status = launch_planes(params, params.dout, context);
    if (status.failed()) return status;
    status = launch_plane_rows(params, context);
  } else {
    status =
        launch_delta<Element>(params, params.dq_accum, cleared, context, with_dq ? turns(params) : nullptr);
  }
  if (status.failed()) return status;
  if constexpr (!backward_is_split(kHeadDim)) {
    if (with_dq) status = launch_form.template operator()<true>();
  }
  if (!with_dq) status = launch_form.template operator()<false>();
  if (status.failed()) return status;

  if (params.dk_parts) {
    const int parts = static_cast<int>(params.num_head_parts / params.num_kv_heads);
    const UniformFactor dk_factor{kPlanes ? 1 : static_cast<float>(params.options.scale)};
    const UniformFactor dv_factor{kPlanes ? 1 : PairOptions(params).kept_factor};
    status = launch_convert_fragments<Element>(dk_parts(params), parts, params.dk, dk_factor, context);
    if (status.failed()) return status;
    status = launch_convert_fragments<Element>(dv_parts(params), parts, params.dv, dv_factor, context);
    if (status.failed()) return status;
  }
  if constexpr (backward_is_split(kHeadDim)) {
    constexpr bool kMayShareDs = BackwardConfigOf<Arithmetic, kHeadDim, kNoPairs, false>::kMayShareDs;
    const bool has_dq = kMayShareDs && may_share_ds(params);
    if (!params.leaves_dq && !has_dq) return backward_dq<Arithmetic, kHeadDim>(params, context);
  }
  return {};
}

// Where params.leaves_dq, dq is left to the caller.
template <class Arithmetic, int kHeadDim>
Status backward(const BackwardParams& params, const LaunchContext& context) {
  if constexpr (std::is_same_v<Arithmetic, tf32x3>) {
    if (!params.planes || !is_served(params, context)) return Status::not_served();
    return is_general(params) ? sm80::backward<float16x3, kHeadDim>(params, context)
                              : launch_fine_backward<kHeadDim>(params, context);
  } else {
    return backward_by_warpgroups<Arithmetic, kHeadDim>(params, context);
  }
}

}  // namespace jax_flash::cuda::sm90
