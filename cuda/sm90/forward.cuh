// Forward attention for Hopper (compute capability 9.0a): wgmma products, TMA copies, specialized warps (Shah
// et al., FlashAttention-3, arXiv:2407.08608).
//
// A thread block stays for the whole launch and computes one tile of query rows after the other
// (schedule.cuh). A warpgroup of producers loads; each of kConsumers warpgroups computes 64 rows of the tile:
//
//   warp 0      scheduler: draws the next tile and loads its queries
//   warps 1, 2  load keys; load values
//   warps 4...  consumers: scores, softmax, out
//
// The rows are of one head, or of two (ForwardTile::heads): then each has half of the consumers, and a stage
// has keys or values of both.
//
// A consumer walks the tile's blocks of keys from the last to the first. It issues the scores of a block
// together with p v of the block before, and computes the softmax while p v still runs. Two more overlaps
// keep the tensor cores busy: ping-pong between consumers, and overlap across tiles (end_tile).
//
// Timeline: two consumers, the last blocks of keys 1 and 0 of a tile t, and the first blocks 3 and 2 of the
// next tile u. S1 issues the scores of block 1, V2 issues p v of block 2; ping-pong hands over between
// columns.
//
//   warp 0                   q(u)
//   warp 1                   k0                        k3(u)                     k2(u)
//   warp 2                   v1                        v0                        v3(u)
//   consumer 0  S1, V2       softmax 1    S0, V1       softmax 0    S3(u), V0    out, soft 3  S2(u), V3(u)
//   consumer 1               S1, V2       softmax 1    S0, V1       softmax 0    S3(u), V0    out, soft 3
//                                                                   ^ consumer 0 crosses the tile boundary
//
// Above head dim 256 two thread blocks share a tile, with half of the columns each, and add each other's part
// of the scores before the softmax (head_halves.cuh). They leave with their tile.
//
// Barriers. A ring has "full" and "empty" for each of its stages (ring.cuh). With TMA, a phase of "full" also
// waits for the bytes; "bar" is a hardware barrier.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   tile full    1: scheduler                   tile             warps 1,    the description of a tile
//                                                                2,          (WorkTile)
//                                                                consumers
//   tile empty   2 + 4 kConsumers: a lane of    tile             scheduler   the same, until all have read
//                warps 1 and 2 and of each                                   it
//                consumer warp
//   q full       1: scheduler, with TMA         tile, for each   that        a consumer's 64 rows of q
//                                               consumer         consumer
//   q empty      4: a lane of each of the       tile, for each   scheduler   the same, and out where it
//                consumer's warps               consumer                     takes their place
//   k full       1: warp 1, with TMA            block of keys    consumers   keys
//   k empty      kConsumers: a thread of each   block of keys    warp 1      the same, until the scores are
//                                                                            done
//   v full       1: warp 2, with TMA, or after  block of keys    consumers   values
//                it has filled a tail with
//                zeros
//   v empty      kConsumers: a thread of each   block of keys    warp 2      the same, until p v is done
//   v_tail       1: warp 2, with TMA            block with keys  warp 2      values that it then fills with
//                                               that do not                  zeros, before it arrives at v
//                                               count                        full
//   tile_wanted  1: warp 1, some blocks before  tile             scheduler   nothing: the next tile's
//                the tile's end                                              number, so that it is not drawn
//                                                                            too early
//   bar 1 + c    256: consumer c waits, the     block of keys    consumer c  the order in which consumers
//                one before it arrives                                       issue products (kPingPong)
//   bar 1 +      128: consumer c waits          skipped block;   consumer c  a late warp from missing a
//   kConsumers                                  tile without a               phase; q, which a product reads
//   + c                                         buffer for out,              for all four warps, from out
//                                               but for planes
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <type_traits>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "group_rows.cuh"
#include "key_parts.cuh"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pages.cuh"
#include "pairs.cuh"
#include "params.h"
#include "planes.cuh"
#include "ptx/barrier.h"
#include "ptx/grid.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "ptx/wgmma.h"
#include "sm90/cluster.cuh"
#include "sm90/head_halves.cuh"
#include "sm90/output.cuh"
#include "sm90/product.cuh"
#include "sm90/ring.cuh"
#include "sm90/schedule.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "sm90/wide_heads.cuh"
#include "softmax.cuh"
#include "tiles.h"
#include "visibility.cuh"

namespace jax_flash::cuda {
using forward_params = ForwardParams;  // by the direction's name, for kernel.cu.in and dispatch.cu
}

namespace jax_flash::cuda::sm90 {

struct ForwardArguments {
  CUtensorMap q_map;    // [B, T, N, H] in boxes of 64 rows: a consumer's, of box_heads heads
  CUtensorMap k_map;    // [B, S, K, H] in boxes of kBlockN rows; pages in boxes of box_rows
  CUtensorMap v_map;    // [B, S, K, Hv], likewise
  CUtensorMap out_map;  // [B, T, N, Hv] in boxes of 16 rows: a warp's
  ForwardParams params;
  LogitScale logit;
  PairOptions pairs;
  Schedule schedule;
  int box_rows;  // kBlockN, or what divides it and a page
};

template <class Arithmetic_, int kHeadDim_, ForwardTile kTile_, PairPolicy kPolicy_, bool kIsSplit_ = false>
struct ForwardConfig {
  // float32 comes as planes; out leaves the registers as float32.
  static constexpr bool kPlanes = !kIs16Bit<Arithmetic_>;
  using CallArithmetic = Arithmetic_;
  using Arithmetic = std::conditional_t<kPlanes, float16, Arithmetic_>;  // of the products
  static constexpr int kNumPlanes = std::is_same_v<Arithmetic_, tf32x3> ? 2 : 1;
  using Element = typename Arithmetic::Element;
  static constexpr bool kHasHalves = is_wide(kHeadDim_);  // does a block have half of the columns?
  static constexpr int kClusterBlocks = kHasHalves ? 2 : 1;
  static constexpr int kHeadDim = block_columns(kHeadDim_);  // the columns of a block
  static constexpr ForwardTile kTile = kTile_;
  static constexpr PairPolicy kPolicy = kPolicy_;  // the pair options that the kernel handles
  static constexpr bool kIsSplit = kIsSplit_;      // are keys split over tiles? (key_parts.cuh)
  static constexpr int kConsumers = kTile.consumers, kBlockM = 64 * kConsumers, kBlockN = kTile.block_n;
  static constexpr int kStages = kTile.stages, kQStages = kTile.q_stages;
  // Each head has the rows of kHeadConsumers consumers, and keys and values of its own.
  static constexpr int kHeads = kTile.heads, kHeadConsumers = kConsumers / kHeads,
                       kHeadRows = 64 * kHeadConsumers;
  static_assert(kConsumers % kHeads == 0 && (kHeads == 1 || (!kPolicy.is_general() && !kIsSplit)));
  static constexpr bool kPingPong = kTile.ping_pong;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  // setmaxnreg redistributes the 168, 128 or 96 registers a thread that the block was launched with.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
  // out cannot be rescaled while p v runs. A small out is rescaled as soon as p v has ended, a large one
  // while the next scores are computed.
  static constexpr bool kRescaleLate = kHeadDim > 128;

  // Of probabilities in float16, those of planes must be as exact as in TF32.
  static constexpr int kHeadroom = kPlanes ? 7 : 0;

  using Keys = BlockList<kPolicy.may_have_mask(), /*kOfQueries=*/true, kBlockM, kBlockN>;
  using Tile = WorkTile<Keys, kConsumers, kPlanes>;

  // Shared memory, in this order: q [kQStages, kBlockM, kHeadDim], k and v [kStages, kHeads, kBlockN,
  // kHeadDim], out [kBlockM, out_columns], bias, scores of the other half, WorkTiles, barriers. A tile [rows,
  // kHeadDim] is kChunks tiles [rows, kRowColumns], swizzled.
  static constexpr int kRowColumns = chunk_columns(kHeadDim), kRowBytes = 2 * kRowColumns;
  static constexpr int kChunks = ceil_div(kHeadDim, kRowColumns);
  static constexpr int kQChunkBytes = kBlockM * kRowBytes, kKvChunkBytes = kBlockN * kRowBytes;
  static constexpr int kQPlaneBytes = kChunks * kQChunkBytes, kKvPlaneBytes = kChunks * kKvChunkBytes;
  static constexpr int kQBytes = kNumPlanes * kQPlaneBytes, kHeadKvBytes = kNumPlanes * kKvPlaneBytes,
                       kKvBytes = kHeads * kHeadKvBytes;
  static constexpr int kK = kQStages * kQBytes, kV = kK + kStages * kKvBytes, kOut = kV + kStages * kKvBytes;
  // out leaves kOutColumns at a time, from its own buffer or from the place of q; if planes, by itself.
  static constexpr bool kOutInQ = !kPlanes && kTile.out_columns == 0;
  static constexpr int kBufferColumns = kPlanes ? 0 : kTile.out_columns;
  static constexpr int kOutColumns = kBufferColumns > 0 ? std::min(kBufferColumns, kHeadDim) : kHeadDim;
  static constexpr int kBias = kOut + kQChunkBytes * ceil_div(kBufferColumns, kRowColumns);
  using WarpBias = BiasBuffer</*kTransposed=*/false, kBlockN>;
  using OtherHalf = sm90::OtherHalf<kBlockN / 8, kHasHalves ? 1 : 0>;
  static constexpr int kOtherScores =
      kBias + (kPolicy.may_stage_bias() ? 4 * kConsumers * WarpBias::kBytes : 0);
  static constexpr int kTiles = kOtherScores + 4 * kConsumers * OtherHalf::kBytes;
  static_assert(kHeadDim % kOutColumns == 0 && (!kHasHalves || kHeadDim % kRowColumns == 0));
  static constexpr int kTileStages = 2;
  static constexpr int kBarriers = kTiles + kTileStages * int{sizeof(Tile)};
  static constexpr int kOwnBarriers = 2 * (kQStages * kConsumers + 2 * kStages + kTileStages) + 2;
  static constexpr int kNumBarriers = kOwnBarriers + 4 * kConsumers * OtherHalf::kNumBarriers;
  static constexpr int kSharedBytes = kBarriers + 8 * kNumBarriers;
  static_assert(kQChunkBytes % 1024 == 0 && kKvChunkBytes % 1024 == 0,
                "wgmma wants tiles aligned to 1024 bytes");
  static_assert(sizeof(Tile) % 4 == 0 && kTileStages * sizeof(Tile) % 8 == 0);
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory.
template <class Config>
struct ForwardShared {
  using Tile = typename Config::Tile;

  uint8_t* start;
  uint32_t base = ptx::shared_address(start);

  __device__ uint32_t sQ(int stage, int row) const {
    return base + stage * Config::kQBytes + row * Config::kRowBytes;
  }
  __device__ uint32_t sK(int stage, int head) const {
    return base + Config::kK + stage * Config::kKvBytes + head * Config::kHeadKvBytes;
  }
  __device__ uint32_t sV(int stage, int head) const { return sK(stage, head) + Config::kV - Config::kK; }
  // out [kBlockM, kOutColumns] has a buffer of its own or takes the place of q.
  __device__ uint32_t sOut(int q_stage, int row) const {
    return Config::kOutInQ ? sQ(q_stage, row) : base + Config::kOut + row * Config::kRowBytes;
  }
  __device__ typename Config::WarpBias bias(int warp) const {
    return {base + Config::kBias + warp * Config::WarpBias::kBytes};
  }
  __device__ Tile& tile(int stage) const { return reinterpret_cast<Tile*>(start + Config::kTiles)[stage]; }

  using TileRing = Ring<Config::kTileStages>;
  using KvRing = Ring<Config::kStages>;
  using QRing = Ring<Config::kQStages, Config::kConsumers, Config::kConsumers>;  // 64 rows for each
  __device__ TileRing tile_ring() const { return {barrier(0)}; }
  __device__ KvRing k_ring() const { return {barrier(TileRing::kNumBarriers)}; }
  __device__ KvRing v_ring() const { return {barrier(TileRing::kNumBarriers + KvRing::kNumBarriers)}; }
  __device__ QRing q_ring() const { return {barrier(TileRing::kNumBarriers + 2 * KvRing::kNumBarriers)}; }
  __device__ uint32_t v_tail() const { return barrier(Config::kOwnBarriers - 1); }
  __device__ uint32_t tile_wanted() const { return barrier(Config::kOwnBarriers - 2); }
  // By consumer warp.
  using OtherHalf = typename Config::OtherHalf;
  __device__ OtherHalf other_half(int warp) const {
    return {base + Config::kOtherScores + warp * OtherHalf::kBytes,
            {barrier(Config::kOwnBarriers + warp * OtherHalf::kNumBarriers)}};
  }

 private:
  __device__ uint32_t barrier(int index) const { return base + Config::kBarriers + 8 * index; }
};

// ---- The producer's first warp: which tile is next, and its queries ----

template <class Config>
struct ForwardScheduler {
  const ForwardArguments& arguments;
  ForwardShared<Config> shared;
  typename ForwardShared<Config>::QRing q_ring = shared.q_ring();
  typename ForwardShared<Config>::TileRing tile_ring = shared.tile_ring();

  // By one thread.
  __device__ __forceinline__ void run() {
    const Schedule& schedule = arguments.schedule;
    uint32_t parity = 0;
    auto draw = [&](int without_counter) {
      return schedule.counter ? atomicAdd(schedule.counter, 1) : without_counter;
    };
    for (int index = draw(first_item<Config>());;) {
      typename Config::Tile& tile = shared.tile(tile_ring.stage);
      tile_ring.wait_empty();
      write_tile<Config::kBlockN, Config::kIsSplit, Config::kHeads>(schedule, arguments.params, index, tile);
      ptx::barrier_arrive(tile_ring.full());
      if (index >= schedule.num_tiles) return;
      load_q(tile);
      tile_ring.advance();

      ptx::barrier_wait(shared.tile_wanted(), parity);
      parity ^= 1;
      index = draw(schedule.num_tiles);
    }
  }

 private:
  __device__ __forceinline__ void load_q(const typename Config::Tile& tile) {
    constexpr int kChunks = Config::kNumPlanes * Config::kChunks;
    constexpr int kBytes = kChunks * 64 * Config::kRowBytes;
    const int box_heads = Config::kIsSplit ? arguments.schedule.tile_heads : 1;
#pragma unroll 1
    for (int consumer = 0; consumer < Config::kConsumers; ++consumer) {
      const uint32_t full = q_ring.full(consumer);
      q_ring.wait_empty(consumer);
      ptx::barrier_arrive_expect(full, kBytes);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const int plane = chunk / Config::kChunks * static_cast<int>(arguments.params.batch);
        ptx::tensor_load(shared.sQ(q_ring.stage, 64 * consumer) + chunk * Config::kQChunkBytes,
                         arguments.q_map, full,
                         first_column<Config>() + chunk % Config::kChunks * Config::kRowColumns,
                         tile.head + consumer / Config::kHeadConsumers,
                         (tile.m_start + 64 * (consumer % Config::kHeadConsumers)) / box_heads,
                         plane + tile.batch, ptx::kEvictFirst);
      }
    }
    q_ring.advance();
  }
};

// ---- The producer's second and third warp: keys, values ----

inline constexpr int kMinBoxRows = 8;  // the swizzle repeats every 8 rows

template <class Config, bool kIsKeys>
struct ForwardLoader {
  static constexpr int kBlockN = Config::kBlockN;
  static constexpr int kHeadChunks = Config::kNumPlanes * Config::kChunks;  // of a head in a stage

  const ForwardArguments& arguments;
  ForwardShared<Config> shared;
  typename ForwardShared<Config>::KvRing ring = kIsKeys ? shared.k_ring() : shared.v_ring();
  typename ForwardShared<Config>::TileRing tile_ring = shared.tile_ring();
  uint32_t tail_parity = 0;
  int kv_heads[Config::kHeads], batch, kv_length;  // of the tile at hand

  __device__ __forceinline__ void run() {
    const ForwardParams& params = arguments.params;
    const int group = static_cast<int>(params.num_heads) / static_cast<int>(params.num_kv_heads);
    const int seqlen_kv = static_cast<int>(params.seqlen_kv);
    while (true) {
      tile_ring.wait_full();
      const typename Config::Tile& tile = shared.tile(tile_ring.stage);
      if (uniform(tile.m_start) < 0) return;
#pragma unroll
      for (int i = 0; i < Config::kHeads; ++i) kv_heads[i] = (uniform(tile.head) + i) / group;
      batch = uniform(tile.batch);
      kv_length = uniform(tile.mask.kv_length);
      const int n_begin = uniform(tile.blocks.begin), n_last = uniform(tile.blocks.end) - 1;
      const typename Config::Keys keys(params, batch, uniform(tile.head), uniform(tile.m_start), 0, 0);
      if (ptx::elect_one()) tile_ring.release();
      tile_ring.advance();

      // Asks for the next tile three blocks before the end of this one, so that the tile and its queries
      // arrive in time. All thread blocks do so, hence in the order in which they will be free.
      const int n_ask = max(min(n_begin + 3, n_last), n_begin - 1);
      int n = n_last;
      if (!kIsKeys && n >= n_begin) {
        const int rows = kv_length - keys.start(n);
        if (rows < kBlockN && kv_length < seqlen_kv) {
          load_tail(keys.start(n), rows);
          --n;
        }
      }
      const bool by_warp = loads_by_warp();
      if (by_warp || ptx::elect_one()) {
        auto ask = [&] {
          if (!by_warp || lane_id() == 0) ptx::barrier_arrive(shared.tile_wanted());
        };
        if (kIsKeys && n_ask < n_begin) ask();
        auto at = ring;
#pragma unroll 1
        for (int i = n; i >= n_begin; --i) {
          if (kIsKeys && i == n_ask) ask();
          const Box box = find_box(keys.start(i));  // a lookup takes long, and this buffer may not be empty
          at.wait_empty();
          load(at.stage, at.full(), box);
          at.advance();
        }
      }
      __syncwarp();
      ring.advance(max(n + 1 - n_begin, 0));
    }
  }

 private:
  __device__ __forceinline__ uint32_t sKv(int stage) const {
    return kIsKeys ? shared.sK(stage, 0) : shared.sV(stage, 0);
  }

  // A block in pages is loaded by as many lanes as it has boxes, so that they look up pages at the same time;
  // another one by one thread.
  __device__ __forceinline__ bool loads_by_warp() const { return arguments.params.page_indices; }

  // A thread's part of a block.
  struct Box {
    int to;          // the first key's place in the block
    int outer, row;  // from
  };

  __device__ __forceinline__ Box find_box(int row) const {
    if (!loads_by_warp()) return {0, batch, row};
    const int to = lane_id() * arguments.box_rows, key = row + to;
    // Behind the keys that count come zeros, from a page that does not exist.
    const int no_page = static_cast<int>(arguments.params.num_pages);
    const SequencePages pages(arguments.params, batch);
    const PagePlace place = pages.place_of(key);
    return {to, to < kBlockN && key < kv_length ? pages.page(place.index) : no_page, place.row};
  }

  __device__ __forceinline__ void load(int stage, uint32_t barrier, const Box& box) {
    static_assert(kBlockN <= 32 * kMinBoxRows);
    if (box.to == 0) ptx::barrier_arrive_expect(barrier, Config::kKvBytes);
    if (loads_by_warp()) __syncwarp();
    if (box.to >= kBlockN) return;
#pragma unroll
    for (int chunk = 0; chunk < Config::kHeads * kHeadChunks; ++chunk) {
      const int plane = chunk % kHeadChunks / Config::kChunks * static_cast<int>(arguments.params.batch);
      ptx::tensor_load(sKv(stage) + chunk * Config::kKvChunkBytes + box.to * Config::kRowBytes,
                       kIsKeys ? arguments.k_map : arguments.v_map, barrier,
                       first_column<Config>() + chunk % Config::kChunks * Config::kRowColumns,
                       kv_heads[chunk / kHeadChunks], box.row, plane + box.outer, ptx::kEvictLast);
    }
  }

  // The values of a block of which only the first `rows` count. The others are in the tensor and may be NaN,
  // and 0 * NaN is NaN: they become zeros.
  __device__ __forceinline__ void load_tail(int row, int rows) {
    ring.wait_empty();
    __syncwarp();
    if (loads_by_warp() || ptx::elect_one()) load(ring.stage, shared.v_tail(), find_box(row));
    ptx::barrier_wait(shared.v_tail(), tail_parity);
    tail_parity ^= 1;
    static_assert(Config::kKvChunkBytes == kBlockN * Config::kRowBytes);
    clear_tail<Config::kHeads * kHeadChunks, kBlockN, Config::kRowBytes>(sKv(ring.stage), rows);
    if (ptx::elect_one()) ptx::barrier_arrive(ring.full());
    ring.advance();
  }
};

// ---- A consumer: a warpgroup ----

// kPolicy is that of the loop, which may be narrower than the kernel's.
template <class Config, PairPolicy kPolicy>
struct ForwardConsumer {
  using Arithmetic = typename Config::Arithmetic;
  using Tile = typename Config::Tile;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN,
                       kConsumers = Config::kConsumers;
  static constexpr int kKvSteps = kBlockN / 16;
  static constexpr bool kIsFine = Config::kNumPlanes == 2;

  const ForwardArguments& arguments;
  ForwardShared<Config> shared;
  int consumer;  // which one of kConsumers
  // Values share the stage of keys, which saves registers: shared.v_ring().at(k_ring).
  typename ForwardShared<Config>::KvRing k_ring = shared.k_ring();
  typename ForwardShared<Config>::QRing q_ring = shared.q_ring();
  typename ForwardShared<Config>::TileRing tile_ring = shared.tile_ring();

  // This tile's rows, and the probabilities of the last block of keys, which p v has yet to use.
  OnlineSoftmax<1, Config::kHeadroom> softmax;
  float out[1][kHeadDim / 8][4];                // [64 rows, kHeadDim], float32
  uint32_t p[Config::kNumPlanes][kKvSteps][4];  // [64 rows, kBlockN], as the first operand of p v
  // p v of one block, which is added to out: tensor cores cut off long sums. Only if kIsFine.
  float of_block[1][kIsFine ? kHeadDim / 8 : 1][4];
  float factor[1][2];  // of a thread's two rows, by which out is to be rescaled
  bool rescale = false;
  bool has_tile;
  uint32_t sQ;       // of this consumer's rows; see q_rows
  KeyBlocks blocks;  // that this consumer's rows see
  std::conditional_t<Config::kPlanes, LogitScale, const LogitScale&> logit;  // of this tile's scores
  BiasSource bias_from;  // of this warp's rows; only where every bias is staged
  typename Config::OtherHalf other_half = shared.other_half(uniform(threadIdx.x / 32) - 4);

  // Is the mask of a block read while the one before is softened, and what does not change from block to
  // block kept? In the loop for masks alone, where registers are left.
  static constexpr bool kReadsMaskAhead = kPolicy.mask == Presence::kAlways && kHeadDim <= 128 && !kIsFine;

  // Is a bias that is not staged, such as one in float32, read while its scores are formed? Elsewhere there
  // are no registers for it.
  static constexpr bool kReadsBiasAhead = kPolicy.others && Config::kPlanes && kHeadDim <= 64;

  // May the last block of keys have few that count?
  static constexpr bool kMayBeNarrow = !kPolicy.is_general() && !Config::kIsSplit;
  static constexpr int kNarrowTiles = 2;

  // What depends on the single pair, of the block whose scores are being formed. General form only.
  struct {
    ListEntry entry;
    PairBits<kBlockN / 8> visible[1];
    BiasAhead<kBlockN / 8> bias;  // if kReadsBiasAhead
    // Read ahead, if kReadsMaskAhead: the next block's.
    ListEntry next_entry;
    MaskWords<kBlockN / 8> next_words;
    // Then, too: lane i has the list's entry of block top - i.
    uint32_t entries;
    int top;
    // And of this warp's rows: their words (null: there are segments alone), and the keys that all of them
    // see but for mask and segments.
    const uint32_t* mask_rows[2];
    KeyRange seen;
  } block;

  __device__ __forceinline__ ForwardConsumer(const ForwardArguments& arguments, ForwardShared<Config> shared,
                                             int consumer)
      : arguments(arguments), shared(shared), consumer(consumer), logit(arguments.logit) {}

  __device__ __forceinline__ void run() {
    if (consumer == kConsumers - 1) ping_pong_arrive();  // the first one begins
    has_tile = read_tile();
    bool is_overlapped = false;  // are the first scores of the tile at hand done?
#pragma unroll 1
    while (has_tile) {
      if (!is_overlapped) {
        begin_rows();
        skip(tile().blocks.end - blocks.end);
        if (!blocks.is_empty()) first_scores();
      }
      // The inner loop takes most of the time: without masking it fits the instruction cache.
#pragma unroll 1
      for (int n = blocks.end - 2; n >= blocks.begin; --n) {
        if constexpr (!kPolicy.is_general()) {
#pragma unroll 1
          for (; blocks.is_whole(n); --n) next_block</*kMasked=*/false>(n);
        }
        if (n >= blocks.begin) next_block</*kMasked=*/true>(n);
      }
      is_overlapped = end_tile();
    }
    if (lane_id() == 0) ptx::tensor_store_wait_read();
  }

 private:
  // ---- Ping-pong ----

  __device__ __forceinline__ void ping_pong_wait() {
    if constexpr (Config::kPingPong) ptx::named_barrier_wait(1 + consumer, 256);
  }
  __device__ __forceinline__ void ping_pong_arrive() {
    if constexpr (Config::kPingPong)
      ptx::named_barrier_arrive(1 + (consumer == kConsumers - 1 ? 0 : consumer + 1), 256);
  }
  __device__ __forceinline__ void wait_group() { ptx::named_barrier_wait(1 + kConsumers + consumer, 128); }

  // The first of this warp's 16 rows, in the tile, and of its head. The producer's four warps come first.
  __device__ __forceinline__ int tile_row() const { return (threadIdx.x / 32 - 4) * 16; }
  __device__ __forceinline__ int warp_row() const {
    return Config::kHeads == 1 ? tile_row() : tile_row() % Config::kHeadRows;
  }
  // Which one of the tile's heads these rows are of.
  __device__ __forceinline__ int tile_head() const {
    return Config::kHeads == 1 ? 0 : consumer / Config::kHeadConsumers;
  }

  // ---- Tiles ----

  __device__ __forceinline__ const Tile& tile() const { return shared.tile(tile_ring.stage); }

  // The first of this warp's rows, of all rows of its head.
  __device__ __forceinline__ int row0() const { return uniform(tile().m_start) + warp_row(); }
  __device__ __forceinline__ Pairs<false, const PairHead<false>&> pairs() const {
    return {arguments.params, arguments.pairs, tile().pairs};
  }

  // Waits for the next tile; false if there is none.
  __device__ __forceinline__ bool read_tile() {
    tile_ring.wait_full();
    if (uniform(tile().m_start) < 0) return false;
    const KeyBlocks rows = tile().rows[consumer];
    blocks = {uniform(rows.begin), uniform(rows.end), uniform(rows.whole_begin), uniform(rows.whole_end)};
    if constexpr (Config::kPlanes) logit = arguments.logit.times_power(uniform(tile().score_exponent));
    if constexpr (kPolicy.staged_bias == Presence::kAlways) bias_from = bias_source<kBlockN>(pairs(), row0());
    if constexpr (kReadsMaskAhead) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        block.mask_rows[h] = pairs().head.mask_words ? mask_row(pairs(), row0(), h) : nullptr;
      }
      block.seen = tile().mask.seen_by_all(row0(), 16);
    }
    return true;
  }

  __device__ __forceinline__ void begin_rows() {
    softmax.reset();
    clear(out);
    rescale = false;
  }

  // Skips blocks of keys that only other consumers' rows see. A ping-pong turn goes with each.
  __device__ __forceinline__ void skip(int count) {
#pragma unroll 1
    for (int i = uniform(count); i > 0; --i) {
      const auto v_ring = shared.v_ring().at(k_ring);
      k_ring.wait_full();
      ping_pong_wait();
      ping_pong_arrive();
      v_ring.wait_full();
      wait_group();  // no product holds the four warps together here: a late one might miss a phase
      k_ring.release_by_warpgroup();
      v_ring.release_by_warpgroup();
      k_ring.advance();
    }
  }

  // ---- Products ----

  // Recomputed where all options are possible: no uniform register is left to keep it.
  __device__ __forceinline__ uint32_t q_rows() const {
    return kPolicy.others ? uniform(shared.sQ(q_ring.stage, 64 * consumer)) : sQ;
  }

  __device__ __forceinline__ void issue_scores(float (&scores)[1][Config::kBlockN / 8][4], uint32_t sK) {
    if constexpr (kIsFine) {
      issue_scores_of_planes<Arithmetic, kHeadDim>(scores, q_rows(), Config::kQChunkBytes,
                                                   Config::kQPlaneBytes, sK, Config::kKvChunkBytes,
                                                   Config::kKvPlaneBytes);
    } else {
      sm90::issue_scores<Arithmetic, kHeadDim>(scores, descriptor_address<Config>(q_rows()),
                                               Config::kQChunkBytes, descriptor_address<Config>(sK),
                                               Config::kKvChunkBytes);
    }
  }

  __device__ __forceinline__ void issue_values(uint32_t sV) {
    if constexpr (kIsFine) {
      clear(of_block);
      issue_sum_of_planes<Arithmetic, Config::kRowBytes>(of_block, p, sV, Config::kKvChunkBytes,
                                                         Config::kKvPlaneBytes);
    } else {
      issue_sum<Arithmetic, Config::kRowBytes>(out, p[0], descriptor_address<Config>(sV),
                                               Config::kKvChunkBytes);
    }
  }

  // When p v has ended.
  __device__ __forceinline__ void take_values() {
    if constexpr (kIsFine) {
      ptx::keep_in_place(of_block[0]);
      for_each_accumulator(
          out, [&](int, int h, int nt, int c) { out[0][nt][2 * h + c] += of_block[0][nt][2 * h + c]; });
    } else {
      ptx::keep_in_place(out[0]);
    }
  }

  // ---- Softmax ----

  __device__ __forceinline__ bool is_listed() const {
    return is_present<kPolicy.mask>([&] { return tile().keys.is_listed(); });
  }
  __device__ __forceinline__ bool has_staged_bias() const {
    return is_present<kPolicy.staged_bias>(
        [&] { return arguments.pairs.bias_format == BiasFormat::kStaged; });
  }
  __device__ __forceinline__ typename Config::WarpBias warp_bias() const {
    return shared.bias(uniform(threadIdx.x / 32) - 4);
  }

  // Begins to copy the bias of block n.
  __device__ __forceinline__ void start_bias(int n) {
    if constexpr (kPolicy.staged_bias == Presence::kAlways) {
      start_bias_copy(warp_bias(), pairs(), bias_from, n * kBlockN);
    } else if constexpr (kPolicy.may_stage_bias()) {
      if (has_staged_bias()) start_bias_copy(warp_bias(), pairs(), row0(), tile().keys.start(n));
    }
  }

  // Begins to read the mask of block n: the first of a tile, or the one after the last that was begun. After
  // the tile's last one, reads the last one again, so the loop has one branch less.
  __device__ __forceinline__ void read_mask_ahead(int n, bool is_first = false) {
    if constexpr (kReadsMaskAhead) {
      if (is_first || block.top - n == 32) {
        block.top = n;
        block.entries = tile().keys.entry(max(n - lane_id(), blocks.begin)).bits;
      }
      block.next_entry = {__shfl_sync(0xffffffff, block.entries, block.top - n)};
      if (!block.next_entry.is_whole(consumer)) {
        const int first_key = kBlockN * block.next_entry.unit();
        if (block.mask_rows[0]) {
#pragma unroll
          for (int h = 0; h < 2; ++h)
            load_words(block.next_words.words[h], pairs(), block.mask_rows[h], first_key);
        }
      }
    }
  }

  // Reads what depends on the single pair of block n, while its scores are formed.
  __device__ __forceinline__ void prepare_pairs(int n) {
    if constexpr (kReadsMaskAhead) {
      block.entry = block.next_entry;
      if (!block.entry.is_whole(consumer)) {
        block.visible[0] = {~0u};
        if (block.mask_rows[0]) block.visible[0] = mask_bits(block.next_words, first_key(n));
        clear_other_segments(block.visible[0], pairs(), row0(), first_key(n));
      }
    } else if constexpr (kPolicy.may_have_mask()) {
      block.entry = is_listed() ? tile().keys.entry(n) : ListEntry::whole(n);
      if (!block.entry.is_whole(consumer)) load_visible(block.visible, pairs(), row0(), first_key(n));
    }
    if constexpr (kReadsBiasAhead) {
      if (has_staged_bias()) {
        block.bias = {};
      } else {
        block.bias.read(pairs(), row0(), first_key(n));
      }
    }
  }

  // Of block n, after prepare_pairs(n).
  __device__ __forceinline__ int first_key(int n) const {
    return kBlockN * (kPolicy.mask == Presence::kNever ? n : block.entry.unit());
  }

  // From scores of block n to probabilities; true if out must be multiplied by `factor`. kIsFirst: of the
  // tile's first block, which has the last keys that the rows see.
  template <bool kMasked, bool kIsFirst = false>
  __device__ __forceinline__ bool soften(float (&scores)[1][Config::kBlockN / 8][4], int n) {
    other_half.add_to(scores[0]);
    if constexpr (kPolicy.may_stage_bias()) {
      if (has_staged_bias()) {
        add_staged_bias(scores[0], pairs(), warp_bias(), logit);
        if (n > blocks.begin) start_bias(n - 1);
      }
    }
    if constexpr (kReadsBiasAhead) {
      transform_scores(scores[0], pairs(), has_staged_bias(), logit, row0(), first_key(n), block.bias);
    } else if constexpr (kPolicy.others) {
      transform_scores(scores[0], pairs(), has_staged_bias(), logit, row0(), first_key(n));
    }
    if constexpr (kPolicy.may_have_mask()) {
      if (!block.entry.is_whole(consumer)) fill_unset(scores, block.visible, -INFINITY);
      read_mask_ahead(n - 1);
    }
    if constexpr (kIsFirst && kMayBeNarrow) {
      if (uniform(tile().mask.kv_length) - n * kBlockN <= 8 * kNarrowTiles) return soften_narrow(scores, n);
    }
    if constexpr (kMasked) hide(scores, n);
    const bool moved = softmax.raise_maximum(scores, logit.scale_log2, factor);
    softmax.exponentiate(scores, logit.scale_log2);
    return moved;
  }

  // The same where only the first kNarrowTiles count, as with the 197 or 257 tokens of an image: exponentials
  // of the others, a fifth of a row's, would take their time.
  __device__ __forceinline__ bool soften_narrow(float (&scores)[1][Config::kBlockN / 8][4], int n) {
    float first[1][kNarrowTiles][4];
    for_each_accumulator(
        first, [&](int, int h, int nt, int c) { first[0][nt][2 * h + c] = scores[0][nt][2 * h + c]; });
    hide(first, n);
    const bool moved = softmax.raise_maximum(first, logit.scale_log2, factor);
    softmax.exponentiate(first, logit.scale_log2);
    clear(scores);
    for_each_accumulator(
        first, [&](int, int h, int nt, int c) { scores[0][nt][2 * h + c] = first[0][nt][2 * h + c]; });
    return moved;
  }

  // What causality, window and lengths hide of block n.
  template <int kTiles>
  __device__ __forceinline__ void hide(float (&scores)[1][kTiles][4], int n) {
    const int row = row0();
    auto hide_ends = [&](const auto& mask) {
      if (n < blocks.whole_begin) fill_before(scores, mask, row, n * kBlockN, -INFINITY);
      if (n >= blocks.whole_end) fill_behind(scores, mask, row, n * kBlockN, -INFINITY);
    };
    if constexpr (Config::kIsSplit) {
      const GroupRows rows(arguments.params, arguments.schedule.tile_heads);
      hide_ends(GroupMask(tile().mask, rows, row, 16));
    } else if constexpr (!kPolicy.may_have_mask()) {
      hide_ends(tile().mask);
    } else if (kReadsMaskAhead ? !block.seen.contains(first_key(n), kBlockN)
                               : !tile().mask.covers(row, 16, first_key(n), kBlockN)) {
      fill_hidden(scores, tile().mask, row, first_key(n), -INFINITY);
    }
  }

  // From probabilities to the operand of the next p v. Not before the last p v has ended, which reads p.
  __device__ __forceinline__ void keep_probabilities(float (&scores)[1][Config::kBlockN / 8][4], int n) {
    if constexpr (kPolicy.others) {
      if (arguments.pairs.has_dropout) {
        PairBits<kBlockN / 8> kept[1];
        draw_kept(kept, pairs(), row0(), first_key(n));
        fill_unset(scores, kept, 0);
      }
    }
#pragma unroll
    for (int nt = 0; nt < kBlockN / 8; ++nt) {
      make_operand<Arithmetic>(scores[0][nt], nt, p[0]);
      if constexpr (kIsFine) {
        float rest[4];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 rounded = unpack<Arithmetic>(p[0][nt / 2][nt % 2 * 2 + h]);
          rest[2 * h] = scores[0][nt][2 * h] - rounded.x;
          rest[2 * h + 1] = scores[0][nt][2 * h + 1] - rounded.y;
        }
        make_operand<Arithmetic>(rest, nt, p[1]);
      }
    }
  }

  __device__ __forceinline__ void rescale_out() {
    if (rescale) [[unlikely]]
      softmax.scale_rows(out, factor);
  }

  // ---- Blocks of keys ----

  __device__ __forceinline__ void first_scores() {
    float scores[1][Config::kBlockN / 8][4];
    start_bias(blocks.end - 1);
    q_ring.wait_full(consumer);
    k_ring.wait_full();
    sQ = uniform(shared.sQ(q_ring.stage, 64 * consumer));
    const uint32_t sK = shared.sK(uniform(k_ring.stage), tile_head());
    ping_pong_wait();
    issue_scores(scores, sK);
    ping_pong_arrive();
    read_mask_ahead(blocks.end - 1, /*is_first=*/true);
    prepare_pairs(blocks.end - 1);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(scores[0]);
    k_ring.release_by_warpgroup();
    soften</*kMasked=*/true, /*kIsFirst=*/true>(scores, blocks.end - 1);
    keep_probabilities(scores, blocks.end - 1);
  }

  // The scores of block n, and p v of block n + 1.
  template <bool kMasked>
  __device__ __forceinline__ void next_block(int n) {
    const auto v_ring = shared.v_ring().at(k_ring);
    k_ring.advance();
    float scores[1][Config::kBlockN / 8][4];
    const uint32_t sK = shared.sK(uniform(k_ring.stage), tile_head()),
                   sV = shared.sV(uniform(v_ring.stage), tile_head());
    k_ring.wait_full();
    ping_pong_wait();
    issue_scores(scores, sK);
    if constexpr (Config::kRescaleLate) rescale_out();
    v_ring.wait_full();
    issue_values(sV);
    ping_pong_arrive();
    prepare_pairs(n);
    ptx::wgmma_wait<1>();
    ptx::keep_in_place(scores[0]);
    k_ring.release_by_warpgroup();
    rescale = soften<kMasked>(scores, n);
    ptx::keep_in_place(scores[0]);
    ptx::wgmma_wait<0>();
    take_values();
    v_ring.release_by_warpgroup();
    keep_probabilities(scores, n);
    if constexpr (!Config::kRescaleLate) rescale_out();
  }

  // ---- The end of a tile ----

  // True if the next tile's first block is done but for its p v: then that block's scores were issued with
  // this tile's last p v.
  //
  // Between the two, this consumer lets pass the blocks of keys that only other consumers' rows see: to_skip
  // at the end of this tile and next_to_skip at the start of the next one, n in all.
  //
  //   stage    s          s + 1    ...      s + n    s + n + 1
  //   keys     released   skipped  skipped  skipped  the next tile's first scores
  //   values   last p v   skipped  skipped  skipped
  //
  // To skip a block is to wait until its keys and values have come, then to release both. Meanwhile this
  // consumer has released all keys up to stage s, and all values but those of s. The tiles may overlap under
  // three conditions:
  //
  // - n < kStages: the skipped values fill n buffers other than s, so the last values may stay in theirs.
  //   With n = kStages the last skipped values would go to s. This consumer would wait for them before it
  //   releases s, and their producer would wait for s.
  // - to_skip < kStages: the next tile, and so next_to_skip, may be read before the rest of this tile is
  //   skipped. As far as this consumer goes, the keys of that rest find free buffers, so their producer gets
  //   to the point where it asks for the next tile. Otherwise that may depend on blocks which this consumer
  //   has yet to skip.
  // - Two stages of queries: the next tile's must be there while this tile's, or out in their place, still
  //   are.
  //
  // The decision is no function of its own: as one, it made the compiler order the main loop's instructions
  // differently.
  __device__ __forceinline__ bool end_tile() {
    // ---- Leave the tile, but for what is needed to write out ----
    const int m_start = uniform(tile().m_start), head = uniform(tile().head) + tile_head(),
              batch = uniform(tile().batch);
    const int part = Config::kIsSplit ? uniform(tile().part) : 0;
    int out_exponent = 0;
    bool is_centered = false;
    if constexpr (Config::kPlanes) {
      out_exponent = uniform(tile().out_exponent);
      is_centered = tile().is_centered;
    }
    const int to_skip = blocks.begin - uniform(tile().blocks.begin);
    const bool is_empty = blocks.is_empty();
    if (is_empty) q_ring.wait_full(consumer);  // no product waited for q, whose place out may take
    const auto last_q = q_ring;
    q_ring.advance();
    if constexpr (!Config::kOutInQ) last_q.release_by_warp(consumer);
    tile_ring.release_by_warp();
    tile_ring.advance();
    if constexpr (Config::kRescaleLate) rescale_out();

    // ---- Decide ----
    bool is_overlapped = false;
    int next_to_skip = 0;
    const bool reads_ahead = Config::kQStages > 1 && !is_empty && to_skip < Config::kStages;
    if (reads_ahead) {
      has_tile = read_tile();
      next_to_skip = has_tile ? uniform(tile().blocks.end) - blocks.end : 0;
      is_overlapped = has_tile && !blocks.is_empty() && to_skip + next_to_skip < Config::kStages;
    }

    // ---- The last p v, and the blocks to skip ----
    float scores[1][Config::kBlockN / 8][4];
    if (is_overlapped) {
      products_overlapped(scores, to_skip, next_to_skip);
    } else {
      products_apart(is_empty, to_skip);
    }

    // ---- Out ----
    if constexpr (Config::kOutInQ) wait_group();  // out takes the place of q, which a product reads for all
    if constexpr (Config::kIsSplit) {
      write_part(m_start, head, batch, part);
    } else {
      write_out(m_start, head, batch, last_q.stage, out_exponent, is_centered);
    }
    if (is_overlapped) first_probabilities(scores);
    if constexpr (Config::kOutInQ) {
      if (lane_id() == 0) ptx::tensor_store_wait_read();
      last_q.release_by_warp(consumer);
    }
    if (!reads_ahead) has_tile = read_tile();
    return is_overlapped;
  }

  // The next tile's first scores beside this tile's last p v.
  __device__ __forceinline__ void products_overlapped(float (&scores)[1][Config::kBlockN / 8][4], int to_skip,
                                                      int next_to_skip) {
    const auto v_ring = shared.v_ring().at(k_ring);
    k_ring.advance();
    start_bias(blocks.end - 1);
    skip(to_skip + next_to_skip);
    q_ring.wait_full(consumer);
    k_ring.wait_full();
    sQ = uniform(shared.sQ(q_ring.stage, 64 * consumer));
    const uint32_t sK = shared.sK(uniform(k_ring.stage), tile_head()),
                   sV = shared.sV(uniform(v_ring.stage), tile_head());
    ping_pong_wait();
    issue_scores(scores, sK);
    v_ring.wait_full();
    issue_values(sV);
    ping_pong_arrive();
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(scores[0]);
    take_values();
    k_ring.release_by_warpgroup();
    v_ring.release_by_warpgroup();
  }

  // This tile's last p v by itself.
  __device__ __forceinline__ void products_apart(bool is_empty, int to_skip) {
    if (!is_empty) {
      const auto v_ring = shared.v_ring().at(k_ring);
      v_ring.wait_full();
      issue_values(shared.sV(uniform(v_ring.stage), tile_head()));
      ptx::wgmma_wait<0>();
      take_values();
      v_ring.release_by_warpgroup();
      k_ring.advance();
    }
    skip(to_skip);  // now, not after out has left: the other consumers wait for this one's ping-pong
  }

  // After products_overlapped, when out has left its registers.
  __device__ __forceinline__ void first_probabilities(float (&scores)[1][Config::kBlockN / 8][4]) {
    begin_rows();
    read_mask_ahead(blocks.end - 1, /*is_first=*/true);
    prepare_pairs(blocks.end - 1);
    soften</*kMasked=*/true, /*kIsFirst=*/true>(scores, blocks.end - 1);
    keep_probabilities(scores, blocks.end - 1);
  }

  // ---- Write a part of the sums before they are normalized, or out and lse if it is the only one ----

  __device__ __forceinline__ void write_part(int m_start, int head, int batch, int part) {
    const ForwardParams& params = arguments.params;
    const GroupRows rows(params, arguments.schedule.tile_heads);
    const bool is_only = arguments.schedule.num_parts == 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowPart end{softmax.max_log2[0][h], row_sum(softmax.sum[0][h])};
      const int row = m_start + warp_row() + accumulator_row(0, h);
      if (row >= rows.count) continue;
      const int own_head = head + rows.head(row);
      const int64_t query = int64_t{batch} * params.seqlen_q + rows.query(row),
                    index = query * params.num_heads + own_head;
      if (is_only) {
        write_row<Arithmetic>(params, batch, own_head, index, end, out, h, first_column<Config>());
      } else {
        PartRows(params).store<Arithmetic>(part, index, end, out, h, first_column<Config>());
      }
    }
  }

  // ---- Normalize, write out and lse ----

  __device__ __forceinline__ void write_out(int m_start, int head, int batch, int q_stage, int exponent,
                                            bool is_centered) {
    const ForwardParams& params = arguments.params;
    const int seqlen_q = static_cast<int>(params.seqlen_q);
    const int row0 = m_start + warp_row();
    float normalizer[2], weight[2];  // of all keys, without a sink
    bool hidden[2];
    // The last tile of an odd number of heads has a head that does not exist.
    const bool has_head = Config::kHeads == 1 || head < params.num_heads;
    const float sink = sink_log2(params, batch, has_head ? head : 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowEnd end = softmax.finish(0, h, sink, kIsFine ? kPlaneTop + 1 : 0);
      weight[h] = end.is_empty ? 0 : 1;
      if (sink != -INFINITY) weight[h] = row_sum(softmax.sum[0][h]) * end.normalizer;
      normalizer[h] = end.normalizer * (kPolicy.others ? arguments.pairs.kept_factor : 1);
      if constexpr (Config::kPlanes) normalizer[h] = ldexpf(normalizer[h], exponent);
      hidden[h] = end.is_empty;
      const int row = row0 + accumulator_row(0, h);
      if (first_column<Config>() == 0 && lane_id() % 4 == 0 && row < seqlen_q && has_head) {
        end.template store_lse<typename Config::CallArithmetic>(
            params, (int64_t{batch} * seqlen_q + row) * params.num_heads + head);
      }
    }
    if (__any_sync(0xffffffff, hidden[0] || hidden[1])) {
      // A fully masked row: 0 * NaN of a value may be in it.
      for_each_accumulator(out, [&](int, int h, int nt, int c) {
        if (hidden[h]) out[0][nt][2 * h + c] = 0;
      });
    }
    if constexpr (Config::kPlanes) {
      if (is_centered) {
        const int kv_head = head / static_cast<int>(params.num_heads / params.num_kv_heads);
        const float* const centers = PlaneScales(params, batch, kv_head).centers(params);
#pragma unroll
        for (int nt = 0; nt < kHeadDim / 8; ++nt) {
          if (8 * nt >= params.head_dim_v) break;
          const float2 center = *reinterpret_cast<const float2*>(centers + accumulator_column(nt, 0));
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float (&pair)[4] = out[0][nt];
            pair[2 * h] = fmaf(pair[2 * h], normalizer[h], center.x * weight[h]);
            pair[2 * h + 1] = fmaf(pair[2 * h + 1], normalizer[h], center.y * weight[h]);
          }
        }
        normalizer[0] = normalizer[1] = 1;
      }
      const Float32Rows rows(params.out, params.seqlen_q, params.num_heads, params.head_dim_v);
      rows.store_exchanged(out, normalizer, batch, head, row0, 0);
      return;
    }
    const uint32_t sOut = shared.sOut(q_stage, tile_row());
#pragma unroll
    for (int column = 0; column < kHeadDim; column += Config::kOutColumns) {
      if (lane_id() == 0) ptx::tensor_store_wait_read();  // the store before has left the buffer
      __syncwarp();
      store_rows<Arithmetic, Config::kRowBytes, Config::kOutColumns>(out, column, normalizer, sOut,
                                                                     Config::kQChunkBytes);
      ptx::async_proxy_fence();
      __syncwarp();
      if (lane_id() == 0 && row0 < seqlen_q) {
#pragma unroll
        for (int from = 0; from < Config::kOutColumns; from += Config::kRowColumns) {
          const int to = first_column<Config>() + column + from;
          if (to < params.head_dim_v) {
            ptx::tensor_store(arguments.out_map, sOut + from / Config::kRowColumns * Config::kQChunkBytes, to,
                              head, row0, batch);
          }
        }
        ptx::tensor_store_commit();
      }
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    forward_kernel(const __grid_constant__ ForwardArguments arguments) {
  extern __shared__ __align__(1024) uint8_t start[];
  const ForwardShared<Config> shared{start};

  if (threadIdx.x == 0) {
    shared.tile_ring().init(1, 2 + 4 * Config::kConsumers);
    shared.k_ring().init(1, Config::kConsumers);
    shared.v_ring().init(1, Config::kConsumers);
    shared.q_ring().init(1, 4);
    ptx::barrier_init(shared.v_tail(), 1);
    ptx::barrier_init(shared.tile_wanted(), 1);
    for (int warp = 0; warp < 4 * Config::kConsumers; ++warp) shared.other_half(warp).init();
    ptx::barrier_init_fence();
  }
  __syncthreads();
  wait_for_cluster<Config>();
  if constexpr (Config::kPlanes) {
    ptx::wait_for_grid_before();  // for planes
    ptx::let_next_grid_start();   // blocks of the portable kernel, most of which end at once
  }

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      if (ptx::elect_one()) ForwardScheduler<Config>{arguments, shared}.run();
    } else if (warp == 1) {
      ForwardLoader<Config, /*kIsKeys=*/true>{arguments, shared}.run();
    } else if (warp == 2) {
      ForwardLoader<Config, /*kIsKeys=*/false>{arguments, shared}.run();
    }
  } else {
    ptx::acquire_registers<Config::kConsumerRegisters>();
    const int consumer = warpgroup - 1;
    constexpr bool kMayStageBias = Config::kPolicy.may_stage_bias();
    if constexpr (!Config::kPolicy.is_general()) {
      ForwardConsumer<Config, kNoPairs>(arguments, shared, consumer).run();
    } else if (arguments.pairs.mask_only) {
      ForwardConsumer<Config, kMaskOnly>(arguments, shared, consumer).run();
    } else if (kMayStageBias && arguments.pairs.staged_bias_only) {
      ForwardConsumer<Config, kMayStageBias ? kStagedBiasOnly : kAnyPairsUnstaged>(arguments, shared,
                                                                                   consumer)
          .run();
    } else {
      ForwardConsumer<Config, Config::kPolicy>(arguments, shared, consumer).run();
    }
    wait_for_cluster<Config>();
  }
}

// How many query heads of a key head have rows in a tile of a part of the keys: as many as divide both a
// consumer's rows and the heads.
inline int packed_heads(const ForwardParams& params) {
  return static_cast<int>(std::gcd(params.num_heads / params.num_kv_heads, int64_t{64}));
}

// From 128 rows on, products take longer than loading keys, and this kernel is faster than the one for few
// queries (decode.cuh), whose calls it then takes. (num_key_parts in jax_flash/_kernel_choice.py has about
// the same rule. Where the two differ, this kernel takes any number of parts; that one refuses parts of more
// keys than it has bits for, and a slower one takes the call.)
inline bool takes_few_queries(const ForwardParams& params) {
  const bool is_16_bit = params.dtype == DType::kBFloat16 || params.dtype == DType::kFloat16;
  return is_16_bit && params.num_key_parts > 1 && params.num_kv_heads > 0 && !is_general(params) &&
         params.seqlen_q * packed_heads(params) >= 128 && key_span(params) >= 2048 &&
         std::max(params.head_dim, params.head_dim_v) <= 128;
}

template <class Config, int kHeadDim>
Status launch_forward(const ForwardParams& params, const LaunchContext& context) {
  using Element = typename Config::Element;
  ForwardArguments arguments{.params = params, .logit = LogitScale(params), .pairs = PairOptions(params)};
  // A box of queries has whole rows of these heads.
  const int box_heads = Config::kIsSplit ? packed_heads(params) : 1;
  int* const counter = Config::kPlanes ? PlaneScales::tile_counter(params) : params.tile_counter;
  if (!make_schedule(params, Config::kBlockM, Config::kIsSplit ? params.num_key_parts : 1,
                     Config::kIsSplit ? box_heads : Config::kHeads, counter, context, &arguments.schedule)) {
    return Status::not_served();
  }
  // Each block would draw a tile of its own.
  if constexpr (Config::kHasHalves) arguments.schedule.counter = nullptr;
  const int64_t B = params.batch, T = params.seqlen_q;
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim, Hv = params.head_dim_v;
  const auto [outer, rows] = KeyAxes(params);
  const int box_rows = params.page_indices ? std::gcd(Config::kBlockN, rows) : Config::kBlockN;
  if (box_rows % kMinBoxRows != 0) return Status::not_served();
  arguments.box_rows = box_rows;
  constexpr int kColumns = Config::kRowColumns, kPlanes = Config::kNumPlanes;
  const auto [q, k, v, _] = product_inputs<Config::kPlanes>(params, nullptr);
  const bool has_maps =
      make_tensor_map<Element, kColumns>(q, kPlanes * B, T, N, H, 64 / box_heads, &arguments.q_map,
                                         box_heads) &&
      make_tensor_map<Element, kColumns>(k, kPlanes * outer, rows, K, H, box_rows, &arguments.k_map) &&
      make_tensor_map<Element, kColumns>(v, kPlanes * outer, rows, K, Hv, box_rows, &arguments.v_map) &&
      (Config::kPlanes ||
       make_tensor_map<Element, kColumns>(params.out, B, T, N, Hv, 16, &arguments.out_map));
  if (!has_maps) return Status::not_served();
  if (!Config::kPlanes && arguments.schedule.counter) {
    const Status status = cudaMemsetAsync(arguments.schedule.counter, 0, sizeof(int), context.stream);
    if (status.failed()) return status;
  }
  if (const Status status = launch_lists(params, Config::Keys::shape(), context); status.failed()) {
    return status;
  }
  const int blocks = arguments.schedule.counter ? context.multiprocessors : arguments.schedule.num_tiles;
  if constexpr (Config::kPlanes) {
    return launch_early(forward_kernel<Config>, blocks, Config::kThreads, Config::kSharedBytes, context,
                        arguments);
  }
  const Status status = launch_tiles<Config>(forward_kernel<Config>, blocks, context, arguments);
  if constexpr (Config::kIsSplit) {
    if (!status.failed() && params.num_key_parts > 1) {
      return launch_combine<typename Config::Arithmetic, kHeadDim>(
          params, context, combine_run<kHeadDim>(params.num_key_parts));
    }
  }
  return status;
}

template <class Arithmetic, int kHeadDim, bool kIsWide>
Status launch_parts(const ForwardParams& params, const LaunchContext& context) {
  constexpr ForwardTile kTile = split_forward_tile(kHeadDim, kIsWide);
  return launch_forward<ForwardConfig<Arithmetic, kHeadDim, kTile, kNoPairs, /*kIsSplit=*/true>, kHeadDim>(
      params, context);
}

template <class Arithmetic, int kHeadDim>
Status forward(const ForwardParams& params, const LaunchContext& context) {
  if constexpr (is_wide(kHeadDim)) {
    if (context.compute_capability == 90 && is_wide_without_pairs(params)) {
      ForwardParams without_parts = params;
      without_parts.num_key_parts = 0;
      return launch_combine<Arithmetic, kHeadDim>(without_parts, context, 0);
    }
  }
  if (!is_served(params, context)) return Status::not_served();
  if constexpr (!kIs16Bit<Arithmetic>) {
    if (!params.planes) return Status::not_served();
    if (const Status status = launch_planes(params, nullptr, context); status.failed()) return status;
  }
  constexpr bool kIsFine = std::is_same_v<Arithmetic, tf32x3>;
  constexpr ForwardTile kShort = kIsFine ? fine_forward_tile(kHeadDim, false) : forward_tile(kHeadDim, false),
                        kLong = kIsFine ? kShort : forward_tile(kHeadDim, true);
  if (is_general(params)) {
    constexpr ForwardTile kGeneral =
        kIsFine ? fine_forward_tile(kHeadDim, true) : general_forward_tile(kHeadDim);
    constexpr PairPolicy kPolicy = forward_stages_bias(kHeadDim) ? kAnyPairs : kAnyPairsUnstaged;
    return launch_forward<ForwardConfig<Arithmetic, kHeadDim, kGeneral, kPolicy>, kHeadDim>(params, context);
  }
  if constexpr (kIs16Bit<Arithmetic>) {
    if (params.num_key_parts > 0) {
      const bool is_wide = context.forced_tile == ForcedTile::kNone
                               ? split_is_wide(params.seqlen_q * packed_heads(params))
                               : context.forced_tile == ForcedTile::kLong;
      return is_wide ? launch_parts<Arithmetic, kHeadDim, true>(params, context)
                     : launch_parts<Arithmetic, kHeadDim, false>(params, context);
    }
  }
  const bool use_long = context.forced_tile == ForcedTile::kNone
                            ? is_long(kHeadDim, most_keys(params), params.options.is_causal)
                            : context.forced_tile == ForcedTile::kLong;
  if constexpr (kIs16Bit<Arithmetic> && has_two_head_forward_tile(kHeadDim)) {
    const bool use_two_heads =
        context.forced_tile == ForcedTile::kNone
            ? !use_long && is_faster_by_two_heads(params.batch, params.seqlen_q, params.num_heads,
                                                  context.multiprocessors)
            : context.forced_tile == ForcedTile::kTwoHeads;
    if (use_two_heads) {
      constexpr ForwardTile kTwoHeads = two_head_forward_tile(kHeadDim);
      return launch_forward<ForwardConfig<Arithmetic, kHeadDim, kTwoHeads, kNoPairs>, kHeadDim>(params,
                                                                                                context);
    }
  }
  return use_long
             ? launch_forward<ForwardConfig<Arithmetic, kHeadDim, kLong, kNoPairs>, kHeadDim>(params, context)
             : launch_forward<ForwardConfig<Arithmetic, kHeadDim, kShort, kNoPairs>, kHeadDim>(params,
                                                                                               context);
}

}  // namespace jax_flash::cuda::sm90
