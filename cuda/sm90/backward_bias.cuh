// The gradient of a bias that has queries and keys, on Hopper: ds, summed over the batch elements and heads
// that share the bias, without additions to global memory. Other shapes of bias are left to the portable
// kernel.
//
// A thread block stays for the whole launch and computes tiles of 128 queries by 128 keys of the sums. The
// items of a tile, batch elements and heads, come through the rings one after the other. Each of two consumer
// warpgroups keeps the sums of 64 queries in registers, and computes scores and dp of 64 keys, a part, at a
// time.
//
//   warp 0      draws the next tile; loads q and dout
//   warp 1      loads keys and values
//   warps 4...  two consumers
//
// Timeline of one consumer: an item of a tile t, its last one, and the first item of the next tile u, with
// parts 0 and 1 of the keys. S issues q k^T, D issues dout v^T: while p and ds of part 0 are computed, the
// scores of part 1 are formed. The other consumer does the same without waiting for this one.
//
//   warp 0                                  q(u), dout(u)
//   warp 1                                  k0, v0(u)            k1, v1(u)
//   tensor cores   S0 D0 S1                 D1                                     S0 D0 S1(u)
//   other units          p0, sums += ds0       p1, sums += ds1 | sums out              p0, sums += ds0
//                                                              ^ tile boundary
//
// Barriers. A ring has "full" and "empty" for each of its stages (ring.cuh). With TMA, a phase of "full" also
// waits for the bytes.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   q full, in   1: warp 0, with TMA            item             consumers   q; dout
//   two parts
//   q empty, in  2: a thread of each consumer   item             warp 0      the same, until S1; D1 are done
//   two parts
//   kv full, in  1: warp 1, with TMA            part of the      consumers   keys; values
//   two parts                                   keys
//   kv empty,    2: a thread of each consumer   part of the      warp 1      the same, until S; D are done
//   in two                                      keys
//   parts
//   tail         1: warp 0 or 1, with TMA       block with rows  that warp   rows that it then fills with
//                                               that do not                  zeros, before it arrives at
//                                               count                        full itself
//   item full    1: warp 0                      tile             warp 1,     the number of a tile
//                                                                consumers   (item_ring.cuh)
//   item empty   9: a lane of warp 1 and of     tile             warp 0      the same, until all have read
//                each consumer warp                                          it
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "bias_sums.cuh"
#include "delta.cuh"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "ptx/barrier.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "ptx/wgmma.h"
#include "sm90/item_ring.cuh"
#include "sm90/product.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda {
using backward_bias_params = BackwardParams;  // by the direction's name, for kernel.cu.in and dispatch.cu
}

namespace jax_flash::cuda::sm90 {

struct BackwardBiasArguments {
  CUtensorMap q_map, dout_map;  // [B, T, N, H], [B, T, N, Hv] in boxes of kBlockM rows
  CUtensorMap k_map, v_map;     // [B, S, K, H], [B, S, K, Hv] in boxes of kPartN rows
  BackwardParams params;
  LogitScale logit;
  PairOptions pairs;
  bool sees_all;     // does every query see every key?
  bool shares_bias;  // do all items of a tile have the same bias?
  int num_tiles;
  int* counter;  // of tiles handed out; null: there are as many blocks as tiles
};

template <class Arithmetic_, int kHeadDim_>
struct BackwardBiasConfig {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr PairPolicy kPolicy = kAnyPairs;
  static constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
  static constexpr int kBlockM = 64 * kConsumers, kParts = 2, kPartN = 64, kBlockN = kParts * kPartN;
  static_assert(kKeyUnit % kBlockN == 0);
  static constexpr int kQStages = kHeadDim <= 64 ? 3 : 2;   // buffers of queries and dout
  static constexpr int kKvStages = kHeadDim <= 64 ? 4 : 2;  // buffers of keys and values
  static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
  using Tile = BiasSumsTile<kBlockM, kBlockN>;
  using WarpBias = BiasBuffer</*kTransposed=*/false, kPartN>;

  // Shared memory: tiles of kChunks times [rows, 64] elements, swizzled.
  static_assert(kHeadDim % kChunkColumns == 0, "rows must be whole chunks");
  static constexpr int kChunks = kHeadDim / kChunkColumns;
  static constexpr int kQChunkBytes = kBlockM * kChunkRowBytes, kKvChunkBytes = kPartN * kChunkRowBytes;
  static constexpr int kQBytes = kChunks * kQChunkBytes, kKvBytes = kChunks * kKvChunkBytes;
  static constexpr int kDout = kQStages * kQBytes, kK = 2 * kDout, kV = kK + kKvStages * kKvBytes;
  static constexpr int kBias = kV + kKvStages * kKvBytes;
  static constexpr int kBarriers = kBias + 4 * kConsumers * kParts * WarpBias::kBytes;
  static constexpr int kNumBarriers = 4 * (kQStages + kKvStages) + 2;
  static constexpr int kItems = kBarriers + 8 * kNumBarriers, kSharedBytes = kItems + ItemRing::kBytes;
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory.
template <class Config>
struct BackwardBiasShared {
  uint32_t base;

  __device__ uint32_t sQ(int stage, int row) const {
    return base + stage * Config::kQBytes + row * kChunkRowBytes;
  }
  __device__ uint32_t sDout(int stage, int row) const { return sQ(stage, row) + Config::kDout; }
  __device__ uint32_t sK(int stage) const { return base + Config::kK + stage * Config::kKvBytes; }
  __device__ uint32_t sV(int stage) const { return base + Config::kV + stage * Config::kKvBytes; }
  __device__ typename Config::WarpBias bias(int warp, int part) const {
    return {base + Config::kBias + (warp * Config::kParts + part) * Config::WarpBias::kBytes};
  }

  using QRing = Ring<Config::kQStages, /*kFullParts=*/2, /*kEmptyParts=*/2>;
  using KvRing = Ring<Config::kKvStages, /*kFullParts=*/2, /*kEmptyParts=*/2>;
  static constexpr int kQueries = 0, kDout = 1, kKeys = 0, kValues = 1;  // parts of these
  __device__ QRing q_ring() const { return {barrier(0)}; }
  __device__ KvRing kv_ring() const { return {barrier(QRing::kNumBarriers)}; }
  __device__ uint32_t tail(int warp) const {
    return barrier(QRing::kNumBarriers + KvRing::kNumBarriers + warp);
  }
  __device__ ItemRing items() const { return {base + Config::kItems}; }

 private:
  __device__ uint32_t barrier(int index) const { return base + Config::kBarriers + 8 * index; }
};

// ---- The producer: a warp for queries and dout, one for keys and values ----

template <class Config>
struct BackwardBiasLoader {
  using Item = typename Config::Tile::Item;

  const BackwardBiasArguments& arguments;
  BackwardBiasShared<Config> shared;
  typename BackwardBiasShared<Config>::QRing q_ring = shared.q_ring();
  typename BackwardBiasShared<Config>::KvRing kv_ring = shared.kv_ring();
  uint32_t tail_parity = 0;

  template <bool kIsQueries>
  __device__ __forceinline__ void load(const typename Config::Tile& tile) {
    const BackwardParams& params = arguments.params;
    const int group = static_cast<int>(params.num_heads) / static_cast<int>(params.num_kv_heads);
    const uint32_t tail = shared.tail(kIsQueries ? 0 : 1);
    for (Item item = tile.first(); tile.exists(item); item = tile.next(item)) {
      const int batch = item.batch, head = item.head;
      const Mask mask(params, batch);
      auto load_tile = [&](const CUtensorMap& map, uint32_t to, const auto& ring, int part, int row) {
        ring.wait_empty(part);
        __syncwarp();
        const int length = kIsQueries ? mask.q_length : mask.kv_length;
        const int64_t seqlen = kIsQueries ? params.seqlen_q : params.seqlen_kv;
        TileLoader<Config::kChunks> loader{
            map, batch, length, static_cast<int>(seqlen), ptx::kEvictLast, tail, tail_parity};
        loader.template load<kIsQueries ? Config::kBlockM : Config::kPartN>(
            to, ring.full(part), kIsQueries ? head : head / group, row);
        tail_parity = loader.tail_parity;
      };
      if constexpr (kIsQueries) {
        load_tile(arguments.q_map, shared.sQ(q_ring.stage, 0), q_ring, shared.kQueries, tile.m_start);
        load_tile(arguments.dout_map, shared.sDout(q_ring.stage, 0), q_ring, shared.kDout, tile.m_start);
        q_ring.advance();
      } else {
#pragma unroll 1
        for (int part = 0; part < Config::kParts; ++part) {
          const int row = tile.n_start + part * Config::kPartN;
          load_tile(arguments.k_map, shared.sK(kv_ring.stage), kv_ring, shared.kKeys, row);
          load_tile(arguments.v_map, shared.sV(kv_ring.stage), kv_ring, shared.kValues, row);
          kv_ring.advance();
        }
      }
    }
  }
};

// ---- A consumer: a warpgroup ----

template <class Config>
struct BackwardBiasConsumer {
  using Arithmetic = typename Config::Arithmetic;
  using Tile = typename Config::Tile;
  using Item = typename Tile::Item;
  static constexpr int kHeadDim = Config::kHeadDim, kPartN = Config::kPartN;
  using Scores = float[1][kPartN / 8][4];  // [64 queries, kPartN keys]

  const BackwardBiasArguments& arguments;
  BackwardBiasShared<Config> shared;
  int consumer;
  int warp = uniform(threadIdx.x / 32 % 4), warp_row = 64 * consumer + 16 * warp;
  typename BackwardBiasShared<Config>::QRing q_ring = shared.q_ring();
  typename BackwardBiasShared<Config>::KvRing kv_ring = shared.kv_ring();
  Scores sums[Config::kParts];

  struct Stats {
    float lse_log2[2], delta[2];
  };

  __device__ __forceinline__ BackwardBiasConsumer(const BackwardBiasArguments& arguments,
                                                  BackwardBiasShared<Config> shared, int consumer)
      : arguments(arguments), shared(shared), consumer(consumer) {}

  __device__ __forceinline__ void run(const Tile& tile) {
    if (arguments.pairs.staged_bias_only) {
      run<kStagedBiasOnly>(tile);
    } else {
      run<Config::kPolicy>(tile);
    }
  }

 private:
  template <PairPolicy kPolicy>
  __device__ __forceinline__ void run(const Tile& tile) {
#pragma unroll
    for (Scores& part : sums) clear(part);
    Item item = tile.first();
    if (tile.exists(item)) {
      start_bias<kPolicy>(tile, item, 0);
      if (arguments.shares_bias) start_bias<kPolicy>(tile, item, 1);
    }
    Stats stats = load_stats(tile, item);
#pragma unroll 1
    while (tile.exists(item)) {
      const KvRing kv0 = kv_ring.uniform();
      kv_ring.advance();
      const KvRing kv1 = kv_ring.uniform();
      kv_ring.advance();
      Scores scores0, scores1, ds;
      issue_q_k(scores0, kv0);
      issue_dout_v(ds, kv0);
      issue_q_k(scores1, kv1);
      add_part<kPolicy, /*kIsLast=*/false>(tile, item, stats, 0, kv0, scores0, ds, item, 1);
      issue_dout_v(ds, kv1);
      const Item next_item = tile.next(item);
      const Stats next_stats = load_stats(tile, next_item);
      add_part<kPolicy, /*kIsLast=*/true>(tile, item, stats, 1, kv1, scores1, ds, next_item, 0);
      q_ring.advance();
      item = next_item;
      stats = next_stats;
    }
    write_out(tile);
  }

  __device__ __forceinline__ Pairs<false> pairs(const Item& item) const {
    return {arguments.params, arguments.pairs, item.batch, item.head};
  }
  template <PairPolicy kPolicy>
  __device__ __forceinline__ bool has_staged_bias() const {
    return is_present<kPolicy.staged_bias>(
        [&] { return arguments.pairs.bias_format == BiasFormat::kStaged; });
  }

  template <PairPolicy kPolicy>
  __device__ __forceinline__ void start_bias(const Tile& tile, const Item& item, int part) {
    if (has_staged_bias<kPolicy>()) {
      start_bias_copy(shared.bias(4 * consumer + warp, part), pairs(item), tile.m_start + warp_row,
                      tile.n_start + part * kPartN);
    }
  }

  __device__ __forceinline__ Stats load_stats(const Tile& tile, const Item& item) {
    Stats stats = {};
    if (!tile.exists(item)) return stats;
    const BackwardParams& params = arguments.params;
    const int64_t head = int64_t{item.batch} * params.num_heads + item.head;
    const int64_t row0 = head * stats_length(params.seqlen_q) + tile.m_start + warp_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      stats.lse_log2[h] = params.lse_log2[row0 + accumulator_row(0, h)];
      stats.delta[h] = params.delta[row0 + accumulator_row(0, h)];
    }
    return stats;
  }

  using KvRing = typename BackwardBiasShared<Config>::KvRing;

  __device__ __forceinline__ void issue_q_k(Scores& scores, const KvRing& kv) {
    q_ring.wait_full(shared.kQueries);
    kv.wait_full(shared.kKeys);
    issue_scores<Arithmetic, kHeadDim>(scores, uniform(shared.sQ(uniform(q_ring.stage), 64 * consumer)),
                                       Config::kQChunkBytes, shared.sK(kv.stage), Config::kKvChunkBytes);
  }

  __device__ __forceinline__ void issue_dout_v(Scores& dp, const KvRing& kv) {
    q_ring.wait_full(shared.kDout);
    kv.wait_full(shared.kValues);
    issue_scores<Arithmetic, kHeadDim>(dp, uniform(shared.sDout(uniform(q_ring.stage), 64 * consumer)),
                                       Config::kQChunkBytes, shared.sV(kv.stage), Config::kKvChunkBytes);
  }

  // Adds ds of one item and one part of the keys; begins to copy the bias of the next one. Of the products in
  // flight, the scores are the oldest; ds came later, and unless this is the last part the next one's scores.
  template <PairPolicy kPolicy, bool kIsLast>
  __device__ __forceinline__ void add_part(const Tile& tile, const Item& item, const Stats& stats, int part,
                                           const KvRing& kv, Scores& scores, Scores& ds,
                                           const Item& next_item, int next_part) {
    constexpr int kInFlight = kIsLast ? 1 : 2;  // besides the scores
    Scores& sum = sums[part];
    const int row0 = tile.m_start + warp_row, column0 = tile.n_start + part * kPartN;
    // ---- p = exp(q k^T - lse), and for the soft cap p (1 - tanh^2) ----
    const Pairs<false> pairs = this->pairs(item);
    PairBits<kPartN / 8> visible[1]{}, kept[1]{};
    const bool has_mask = kPolicy.mask != Presence::kNever && arguments.params.hides_pairs();
    const bool has_dropout = kPolicy.others && pairs.has_dropout();
    if (has_mask) load_visible(visible, pairs, row0, column0);
    if (has_dropout) draw_kept(kept, pairs, row0, column0);
    const auto mask = [&] { return Mask(arguments.params, item.batch); };
    const bool is_whole = tile.is_whole() || mask().covers(row0, 16, column0, kPartN);
    ptx::wgmma_wait<kInFlight>();
    ptx::keep_in_place(scores[0]);
    kv.release_by_warpgroup(shared.kKeys);
    if constexpr (kIsLast) q_ring.release_by_warpgroup(shared.kQueries);
    const LogitScale& logit = arguments.logit;
    if (has_staged_bias<kPolicy>()) {
      add_staged_bias(scores[0], pairs, shared.bias(4 * consumer + warp, part), logit);
      if (!arguments.shares_bias && tile.exists(next_item)) start_bias<kPolicy>(tile, next_item, next_part);
    }
    if constexpr (kPolicy.others) {
      transform_scores(scores[0], pairs, has_staged_bias<kPolicy>(), logit, row0, column0);
    }
    for_each_accumulator(scores, [&](int, int h, int nt, int c) {
      float& x = scores[0][nt][2 * h + c];
      const float p = ptx::exp2_approx(fmaf(x, logit.scale_log2, -stats.lse_log2[h]));
      x = kPolicy.others && logit.transform == LogitTransform::kSoftCap ? p * soft_cap_slope(x) : p;
    });
    if (!is_whole) fill_hidden(scores, mask(), row0, column0, 0);
    if (has_mask) fill_unset(scores, visible, 0);

    // ---- sums += ds = p * (dout v^T - delta) ----
    ptx::wgmma_wait<kInFlight - 1>();
    ptx::keep_in_place(ds[0]);
    kv.release_by_warpgroup(shared.kValues);
    if constexpr (kIsLast) q_ring.release_by_warpgroup(shared.kDout);
    for_each_accumulator(ds, [&](int, int h, int nt, int c) {
      const int i = 2 * h + c;
      float x = ds[0][nt][i];
      if (has_dropout) x = kept[0].test(nt, i) ? x * arguments.pairs.kept_factor : 0;
      sum[0][nt][i] = fmaf(scores[0][nt][i], x - stats.delta[h], sum[0][nt][i]);
    });
  }

  // Calls f(first, key, a, b) for the sums of each two neighboring keys, that are `key` behind the row's
  // first.
  template <class F>
  __device__ __forceinline__ void for_each_two(const Tile& tile, F f) const {
    const int seqlen_kv = static_cast<int>(arguments.params.seqlen_kv);
    const int first_key = tile.n_start + accumulator_column(0, 0), keys = seqlen_kv - first_key;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = tile.m_start + warp_row + accumulator_row(0, h);
      if (row >= tile.m_end) continue;
      const int64_t first = (tile.index * arguments.params.seqlen_q + row) * seqlen_kv + first_key;
#pragma unroll
      for (int part = 0; part < Config::kParts; ++part) {
#pragma unroll
        for (int nt = 0; nt < kPartN / 8; ++nt) {
          const int key = part * kPartN + 8 * nt;
          if (key < keys) f(first, key, sums[part][0][nt][2 * h], sums[part][0][nt][2 * h + 1]);
        }
      }
    }
  }

  __device__ __forceinline__ void write_out(const Tile& tile) const {
    const BackwardParams& params = arguments.params;
    if (params.seqlen_kv % 2 != 0) {
      const int end = static_cast<int>(params.seqlen_kv) - tile.n_start - accumulator_column(0, 0);
      for_each_two(tile, [&](int64_t first, int key, float a, float b) {
        store_bias_sum(params, first + key, a);
        if (key + 1 < end) store_bias_sum(params, first + key + 1, b);
      });
    } else if (params.dbias_dtype == DType::kFloat32) {
      for_each_two(tile, [&](int64_t first, int key, float a, float b) {
        (static_cast<float2*>(params.dbias) + first / 2)[key / 2] = make_float2(a, b);
      });
    } else {
      for_each_two(tile, [&](int64_t first, int key, float a, float b) {
        (static_cast<uint32_t*>(params.dbias) + first / 2)[key / 2] = pack<Arithmetic>(a, b);
      });
    }
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    backward_bias_kernel(const __grid_constant__ BackwardBiasArguments arguments) {
  extern __shared__ __align__(1024) uint8_t start[];
  const BackwardBiasShared<Config> shared{ptx::shared_address(start)};

  if (threadIdx.x == 0) {
    shared.q_ring().init(1, Config::kConsumers);
    shared.kv_ring().init(1, Config::kConsumers);
    ptx::barrier_init(shared.tail(0), 1);
    ptx::barrier_init(shared.tail(1), 1);
    shared.items().init(1 + 4 * Config::kConsumers);
    ptx::barrier_init_fence();
  }
  __syncthreads();

  auto for_each_tile = [&]<bool kDraws = false>(auto f, std::bool_constant<kDraws> = {}) {
    for_each_item<kDraws>(shared.items(), arguments.counter, blockIdx.x, arguments.num_tiles, [&](int tile) {
      f(typename Config::Tile(arguments.params, tile, arguments.sees_all));
    });
  };
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    BackwardBiasLoader<Config> loader{arguments, shared};
    if (warp == 0) {
      for_each_tile([&](const auto& tile) { loader.template load</*kIsQueries=*/true>(tile); },
                    /*draws=*/std::true_type());
    } else if (warp == 1) {
      for_each_tile([&](const auto& tile) { loader.template load</*kIsQueries=*/false>(tile); });
    }
  } else {
    ptx::acquire_registers<Config::kConsumerRegisters>();
    BackwardBiasConsumer<Config> consumer(arguments, shared, warpgroup - 1);
    for_each_tile([&](const auto& tile) { consumer.run(tile); });
  }
}

// Do all batch elements and heads that add to a sum have the same bias?
inline bool shares_bias(const BackwardParams& params) {
  const bool one_batch = params.bias.batch_stride == 0 || params.dbias_batch == params.batch;
  return one_batch && (params.bias.head_stride == 0 || params.dbias_num_heads == params.num_heads);
}

template <class Arithmetic, int kHeadDim>
Status backward_bias(const BackwardParams& params, const LaunchContext& context) {
  using Config = BackwardBiasConfig<Arithmetic, kHeadDim>;
  using Element = typename Config::Element;
  const bool has_pairs = params.bias && params.dbias_rows == 1 && params.dbias_keys == 1;
  const bool is_empty = params.batch == 0 || params.num_heads == 0;  // of which there is no tensor map
  if (is_empty || !has_pairs || !is_served(params, context)) return Status::not_served();
  const int64_t tiles = Config::Tile::count(params);
  if (tiles > std::numeric_limits<int32_t>::max() - context.multiprocessors) return Status::not_served();
  if (const Status status = launch_delta<Element>(params, nullptr, 0, context); status.failed())
    return status;
  BackwardBiasArguments arguments{.params = params,
                                  .logit = LogitScale(params),
                                  .pairs = PairOptions(params),
                                  .sees_all = is_full(params),
                                  .shares_bias = shares_bias(params),
                                  .num_tiles = static_cast<int>(tiles),
                                  .counter = tiles > context.multiprocessors ? params.tile_counter : nullptr};
  const int64_t B = params.batch, T = params.seqlen_q, S = params.seqlen_kv;
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim, Hv = params.head_dim_v;
  const bool has_maps =
      make_tensor_map<Element>(params.q, B, T, N, H, Config::kBlockM, &arguments.q_map) &&
      make_tensor_map<Element>(params.dout, B, T, N, Hv, Config::kBlockM, &arguments.dout_map) &&
      make_tensor_map<Element>(params.k, B, S, K, H, Config::kPartN, &arguments.k_map) &&
      make_tensor_map<Element>(params.v, B, S, K, Hv, Config::kPartN, &arguments.v_map);
  if (!has_maps) return Status::not_served();
  return launch(backward_bias_kernel<Config>, arguments.counter ? context.multiprocessors : tiles,
                Config::kThreads, Config::kSharedBytes, context, arguments);
}

}  // namespace jax_flash::cuda::sm90
