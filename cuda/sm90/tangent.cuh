// Forward mode on Hopper: tout and tlse in one direction, where q, k and v all have tangents and no pair has
// options of its own. cuda/sm80/tangent.cuh has the formulas and serves all other calls.
//
// A thread block owns one tile, 64 rows for each of its consumers, and walks the blocks of keys from the last
// to the first. It issues the scores of a block and their tangent together with the products with the values
// of the block before. Since lse is known, p follows from the scores alone: exp runs beside the other four
// products.
//
//   warp 0      loads q and tq, then keys and their tangents
//   warp 1      loads values and their tangents
//   warps 4...  consumers
//
// Timeline of one consumer: the last blocks of keys 1 and 0. S issues q k^T, T issues tq k^T + q tk^T, V
// issues (p ts) v + p tv. The other consumers do the same without waiting for this one.
//
//   warps 0, 1     k0 tk0, v0 tv0
//   tensor cores   S1 T1           S0 T0 V1                V0
//   other units       p1, p ts 1      p0    p ts 0, pack       | tlse out is subtracted, and tout leaves by
//                                                                way of the place of q
//
// Barriers. A ring has "full" and "empty" for each of its stages (ring.cuh). With TMA, a phase of "full" also
// waits for the bytes; "bar" is a hardware barrier.
//
//   barrier      arrivals a phase               one phase        who waits   what it protects
//   q_full       2: warp 0, with TMA            the only one     consumers   q and tq
//   k full       2: warp 0, with TMA            block of keys    consumers   keys and their tangents
//   k empty      kConsumers: a thread of each   block of keys    warp 0      the same, until ts is done
//   v full       2: warp 1, with TMA            block of keys    consumers   values and their tangents
//   v empty      kConsumers: a thread of each   block of keys    warp 1      the same, until tout += ... is
//                                                                            done
//   tail         1: warp 0 or 1, with TMA       block with rows  that warp   rows that it then fills with
//                                               that do not                  zeros, before it arrives at
//                                               count                        full itself
//   bar 1 + c    128: consumer c                the only one     consumer c  q, which a product reads for
//                                                                            all four warps, from tout
#pragma once

#include <cuda.h>

#include <cmath>
#include <cstdint>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "ptx/barrier.h"
#include "ptx/math.h"
#include "ptx/memory.h"
#include "ptx/tensor_copy.h"
#include "ptx/wgmma.h"
#include "sm90/output.cuh"
#include "sm90/product.cuh"
#include "sm90/ring.cuh"
#include "sm90/tensor_map.h"
#include "sm90/tile_loader.cuh"
#include "softmax.cuh"
#include "tiles.h"

namespace jax_flash::cuda {
using tangent_params = TangentParams;  // by the direction's name, for kernel.cu.in and dispatch.cu
}

namespace jax_flash::cuda::sm90 {

struct TangentArguments {
  CUtensorMap q_map, tq_map;                 // [B, T, N, H], [D * B, T, N, H] in boxes of kBlockM rows
  CUtensorMap k_map, tk_map, v_map, tv_map;  // [B or D * B, S, K, H or Hv] in boxes of kBlockN rows
  CUtensorMap tout_map;                      // [D * B, T, N, Hv] in boxes of 16 rows: a warp's
  TangentParams params;
  LogitScale logit;
};

template <class Arithmetic_, int kHeadDim_, TangentTile kTile>
struct TangentConfig {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kConsumers = kTile.consumers, kThreads = 128 * (1 + kConsumers);
  static constexpr int kBlockM = 64 * kConsumers, kBlockN = kTile.block_n, kStages = kTile.stages;
  static constexpr int kProducerRegisters = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;

  // Shared memory: tiles of kChunks times [rows, 64] elements, swizzled; a tangent follows its primal.
  static_assert(kHeadDim % kChunkColumns == 0, "rows must be whole chunks");
  static constexpr int kChunks = kHeadDim / kChunkColumns;
  static constexpr int kQChunkBytes = kBlockM * kChunkRowBytes, kKvChunkBytes = kBlockN * kChunkRowBytes;
  static constexpr int kQBytes = kChunks * kQChunkBytes, kKvBytes = kChunks * kKvChunkBytes;
  static constexpr int kK = 2 * kQBytes, kV = kK + 2 * kStages * kKvBytes;
  static constexpr int kBarriers = kV + 2 * kStages * kKvBytes, kNumBarriers = 4 * kStages + 3;
  static constexpr int kSharedBytes = kBarriers + 8 * kNumBarriers;
  static_assert(kKvChunkBytes % 1024 == 0, "wgmma wants tiles aligned to 1024 bytes");
  static_assert(kSharedBytes <= 227 * 1024);
};

// Addresses in shared memory.
template <class Config>
struct TangentShared {
  uint32_t base;

  __device__ uint32_t sQ(int row) const { return base + row * kChunkRowBytes; }
  __device__ uint32_t sTq(int row) const { return sQ(row) + Config::kQBytes; }
  __device__ uint32_t sK(int stage) const { return base + Config::kK + stage * 2 * Config::kKvBytes; }
  __device__ uint32_t sTk(int stage) const { return sK(stage) + Config::kKvBytes; }
  __device__ uint32_t sV(int stage) const { return base + Config::kV + stage * 2 * Config::kKvBytes; }
  __device__ uint32_t sTv(int stage) const { return sV(stage) + Config::kKvBytes; }

  using KvRing = Ring<Config::kStages>;
  __device__ KvRing k_ring() const { return {barrier(0)}; }
  __device__ KvRing v_ring() const { return {barrier(KvRing::kNumBarriers)}; }
  __device__ uint32_t q_full() const { return barrier(4 * Config::kStages); }
  __device__ uint32_t tail(int warp) const { return barrier(4 * Config::kStages + 1 + warp); }

 private:
  __device__ uint32_t barrier(int index) const { return base + Config::kBarriers + 8 * index; }
};

// ---- Which tile: the last rows first, which see the most keys when causal ----

template <class Config>
struct TangentWork {
  int m_start, head, kv_head;
  int batch, batch_element;  // in [B], [D * B]
  Mask mask;
  KeyBlocks blocks;
  int seqlen_q, seqlen_kv;

  __device__ __forceinline__ TangentWork(const TangentParams& params, unsigned index)
      : batch(index / num_tiles(params) % static_cast<unsigned>(params.batch)),
        batch_element(index / num_tiles(params)),
        mask(params, batch) {
    seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
    const unsigned in_batch = index - batch_element * num_tiles(params), m_blocks = num_m_blocks(params);
    head = in_batch / m_blocks;
    m_start = (m_blocks - 1 - (in_batch - head * m_blocks)) * Config::kBlockM;
    kv_head = head / (static_cast<int>(params.num_heads) / static_cast<int>(params.num_kv_heads));
    blocks = mask.template key_blocks<Config::kBlockN>(m_start, min(Config::kBlockM, seqlen_q - m_start));
  }

 private:
  __device__ static unsigned num_m_blocks(const TangentParams& params) {
    return (static_cast<unsigned>(params.seqlen_q) + Config::kBlockM - 1) / Config::kBlockM;
  }
  __device__ static unsigned num_tiles(const TangentParams& params) {  // of one batch element
    return num_m_blocks(params) * static_cast<unsigned>(params.num_heads);
  }
};

// ---- The producer: a warp for q and keys, one for values, each with their tangents ----

template <class Config, bool kIsKeys>
__device__ __forceinline__ void load_for_tangent(const TangentArguments& arguments,
                                                 TangentShared<Config> shared,
                                                 const TangentWork<Config>& work) {
  constexpr int kBlockN = Config::kBlockN;
  using Loader = TileLoader<Config::kChunks>;
  if (work.blocks.is_empty()) return;
  const uint32_t tail = shared.tail(kIsKeys ? 0 : 1);
  uint32_t tail_parity = 0;
  if constexpr (kIsKeys) {
    Loader rows{arguments.q_map, work.batch, work.mask.q_length, work.seqlen_q, ptx::kEvictFirst, tail};
    rows.template load<Config::kBlockM>(shared.sQ(0), shared.q_full(), work.head, work.m_start);
    Loader tangents{arguments.tq_map, work.batch_element, work.mask.q_length,
                    work.seqlen_q,    ptx::kEvictFirst,   tail,
                    rows.tail_parity};
    tangents.template load<Config::kBlockM>(shared.sTq(0), shared.q_full(), work.head, work.m_start);
    tail_parity = tangents.tail_parity;
  }
  Loader keys{kIsKeys ? arguments.k_map : arguments.v_map,
              work.batch,
              work.mask.kv_length,
              work.seqlen_kv,
              ptx::kEvictLast,
              tail,
              tail_parity};
  Loader tangents{kIsKeys ? arguments.tk_map : arguments.tv_map,
                  work.batch_element,
                  work.mask.kv_length,
                  work.seqlen_kv,
                  ptx::kEvictLast,
                  tail};
  auto ring = kIsKeys ? shared.k_ring() : shared.v_ring();
  auto tile = [&](int stage) { return kIsKeys ? shared.sK(stage) : shared.sV(stage); };
  // The last block of keys comes first: it alone may have a tail, and all buffers are empty.
  int n = work.blocks.end - 1;
  keys.template load<kBlockN>(tile(0), ring.full(), work.kv_head, n * kBlockN);
  tangents.tail_parity = keys.tail_parity;
  tangents.template load<kBlockN>(tile(0) + Config::kKvBytes, ring.full(), work.kv_head, n * kBlockN);
  if (ptx::elect_one()) {
#pragma unroll 1
    for (--n; n >= work.blocks.begin; --n) {
      ring.advance();
      ring.wait_empty();
      keys.template load_whole<kBlockN>(tile(ring.stage), ring.full(), work.kv_head, n * kBlockN);
      tangents.template load_whole<kBlockN>(tile(ring.stage) + Config::kKvBytes, ring.full(), work.kv_head,
                                            n * kBlockN);
    }
  }
}

// ---- A consumer: a warpgroup ----

template <class Config>
struct TangentConsumer {
  using Arithmetic = typename Config::Arithmetic;
  static constexpr int kHeadDim = Config::kHeadDim, kBlockN = Config::kBlockN;
  using Scores = float[1][kBlockN / 8][4];    // [64 queries, kBlockN keys]
  using Operand = uint32_t[kBlockN / 16][4];  // the same, as first operand

  const TangentArguments& arguments;
  TangentShared<Config> shared;
  TangentWork<Config> work;
  int consumer;
  int warp_row = 64 * consumer + 16 * uniform(threadIdx.x / 32 % 4);
  typename TangentShared<Config>::KvRing k_ring = shared.k_ring();  // v's advances with it
  float tout[1][kHeadDim / 8][4];
  Operand p, p_ts;  // of the block before, p (ts - center)
  float lse_log2[2];
  bool is_settled = false;                 // is the center known for all rows of the warp?
  float center[2] = {};                    // c in cuda/sm80/tangent.cuh
  float weight[2] = {};                    // rowsum(p)
  float sum[2] = {}, rounded_sum[2] = {};  // rowsum(p (ts - c)), exact and as products have it

  __device__ __forceinline__ TangentConsumer(const TangentArguments& arguments, TangentShared<Config> shared,
                                             const TangentWork<Config>& work, int consumer)
      : arguments(arguments), shared(shared), work(work), consumer(consumer) {}

  __device__ __forceinline__ void run() {
    clear(tout);
    load_lse();
    if (!work.blocks.is_empty()) {
      ptx::barrier_wait(shared.q_full(), 0);
      first_block(work.blocks.end - 1);
#pragma unroll 1
      for (int n = work.blocks.end - 2; n >= work.blocks.begin; --n) next_block(n);
      last_values();
    }
    write_out();
  }

 private:
  __device__ __forceinline__ void load_lse() {
    const TangentParams& params = arguments.params;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(work.m_start + warp_row + accumulator_row(0, h), work.seqlen_q - 1);
      const float lse = static_cast<const float*>(
          params.lse)[(int64_t{work.batch} * work.seqlen_q + row) * params.num_heads + work.head];
      lse_log2[h] = lse == -INFINITY ? INFINITY : lse_in_log2(lse);
    }
  }

  // ---- Products ----

  // Three groups: s = q k^T; ts = tq k^T + q tk^T.
  __device__ __forceinline__ void issue_scores(Scores& s, Scores& ts, int stage) {
    const uint32_t sQ = uniform(shared.sQ(64 * consumer)), sTq = uniform(shared.sTq(64 * consumer));
    const uint32_t sK = shared.sK(stage), sTk = shared.sTk(stage);
    constexpr int kQ = Config::kQChunkBytes, kKv = Config::kKvChunkBytes;
    sm90::issue_scores<Arithmetic, kHeadDim>(s, sQ, kQ, sK, kKv);
    sm90::issue_scores<Arithmetic, kHeadDim>(ts, sTq, kQ, sK, kKv);
    sm90::issue_scores<Arithmetic, kHeadDim, /*kAccumulate=*/true>(ts, sQ, kQ, sTk, kKv);
  }

  // Two groups: tout += (p ts) v + p tv.
  __device__ __forceinline__ void issue_values(int stage) {
    issue_sum<Arithmetic>(tout, p_ts, shared.sV(stage), Config::kKvChunkBytes);
    issue_sum<Arithmetic>(tout, p, shared.sTv(stage), Config::kKvChunkBytes);
  }

  // ---- Blocks of keys ----

  __device__ __forceinline__ void first_block(int n) {
    Scores s, ts;
    k_ring.wait_full();
    issue_scores(s, ts, uniform(k_ring.stage));
    ptx::wgmma_wait<2>();
    ptx::keep_in_place(s[0]);
    probabilities(s, n);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(ts[0]);
    k_ring.release_by_warpgroup();
    weigh(s, ts, n);
    keep(s, ts);
  }

  // The scores of block n, and the products with the values of block n + 1.
  __device__ __forceinline__ void next_block(int n) {
    const auto v_ring = shared.v_ring().at(k_ring).uniform();
    k_ring.advance();
    Scores s, ts;
    k_ring.wait_full();
    issue_scores(s, ts, uniform(k_ring.stage));
    v_ring.wait_full();
    issue_values(v_ring.stage);
    ptx::wgmma_wait<4>();
    ptx::keep_in_place(s[0]);
    probabilities(s, n);
    ptx::wgmma_wait<2>();
    ptx::keep_in_place(ts[0]);
    k_ring.release_by_warpgroup();
    weigh(s, ts, n);
    ptx::keep_in_place(s[0]);
    ptx::keep_in_place(ts[0]);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(tout[0]);
    v_ring.release_by_warpgroup();
    keep(s, ts);
  }

  __device__ __forceinline__ void last_values() {
    const auto v_ring = shared.v_ring().at(k_ring).uniform();
    v_ring.wait_full();
    issue_values(v_ring.stage);
    ptx::wgmma_wait<0>();
    ptx::keep_in_place(tout[0]);
  }

  // ---- p = exp(s - lse); hidden pairs are 0 ----

  __device__ __forceinline__ void hide(Scores& x, int n) {
    if (!work.blocks.is_whole(n)) {
      fill_hidden(x, work.mask, work.m_start + warp_row, n * kBlockN, 0);
    }
  }

  __device__ __forceinline__ void probabilities(Scores& s, int n) {
    for_each_accumulator(s, [&](int, int h, int nt, int c) {
      float& x = s[0][nt][2 * h + c];
      x = ptx::exp2_approx(fmaf(x, arguments.logit.scale_log2, -lse_log2[h]));
    });
    hide(s, n);
  }

  // ---- ts = p (ts - center), and the sums of rows ----

  __device__ __forceinline__ void weigh(const Scores& p, Scores& ts, int n) {
    const float scale = arguments.logit.scale;
    float block_weight[2] = {};
    for_each_accumulator(p, [&](int, int h, int nt, int c) { block_weight[h] += p[0][nt][2 * h + c]; });
    if (!is_settled) settle(p, ts, block_weight);
#pragma unroll
    for (int h = 0; h < 2; ++h) weight[h] += block_weight[h];
    for_each_accumulator(ts, [&](int, int h, int nt, int c) {
      float& x = ts[0][nt][2 * h + c];
      x = p[0][nt][2 * h + c] * fmaf(x, scale, -center[h]);
    });
    hide(ts, n);
    for_each_accumulator(ts, [&](int, int h, int nt, int c) { sum[h] += ts[0][nt][2 * h + c]; });
  }

  // A row's center is its mean in the first block with a good part of the row's weight, if no other with any
  // came before.
  __device__ __forceinline__ void settle(const Scores& p, const Scores& ts, const float (&block_weight)[2]) {
    constexpr float kNoWeight = 0x1p-16f;  // below the error of the products
    constexpr float kGoodPart = 0x1p-4f;
    float block_sum[2] = {};
    for_each_accumulator(p, [&](int, int h, int nt, int c) {
      const float x = p[0][nt][2 * h + c];
      if (x > 0) block_sum[h] = fmaf(x, ts[0][nt][2 * h + c], block_sum[h]);
    });
    bool rows_settled = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = row_sum(weight[h]), here = row_sum(block_weight[h]);
      const float mean = row_sum(block_sum[h]) * arguments.logit.scale / here;
      if (before < kNoWeight && here >= kGoodPart && fabsf(mean) < INFINITY) center[h] = mean;
      rows_settled &= before + here >= kNoWeight || lse_log2[h] == INFINITY;
    }
    is_settled = __all_sync(0xffffffff, rows_settled);
  }

  // As operands of the next products. Not before the last ones have ended, which read them.
  __device__ __forceinline__ void keep(const Scores& s, const Scores& ts) {
#pragma unroll
    for (int nt = 0; nt < kBlockN / 8; ++nt) {
      make_operand<Arithmetic>(s[0][nt], nt, p);
      make_operand<Arithmetic>(ts[0][nt], nt, p_ts);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 x = unpack<Arithmetic>(p_ts[nt / 2][nt % 2 * 2 + h]);
        rounded_sum[h] += x.x + x.y;
      }
    }
  }

  // ---- Write tout, by way of the place of q, and tlse; zeros for fully masked rows ----

  __device__ __forceinline__ void write_out() {
    const TangentParams& params = arguments.params;
    const int head_dim_v = static_cast<int>(params.head_dim_v);
    const int row0 = work.m_start + warp_row;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + accumulator_row(0, h);
      const bool seeing = work.mask.first_key(row) <= work.mask.last_key(row) && lse_log2[h] != INFINITY;
      const float shares = row_sum(weight[h]);  // sinks have the rest of 1
      const float tlse = row_sum(sum[h]) + center[h] * shares;
      const float out_factor = row_sum(rounded_sum[h]) + center[h] * (shares - 1);
      const int64_t out_row =
          (int64_t{work.batch} * work.seqlen_q + min(row, work.seqlen_q - 1)) * params.num_heads + work.head;
      const int64_t tout_row =
          (int64_t{work.batch_element} * work.seqlen_q + row) * params.num_heads + work.head;
      if (lane_id() % 4 == 0 && row < work.seqlen_q) {
        static_cast<float*>(params.tlse)[tout_row] = seeing ? tlse : 0;
      }
      const uint32_t* out = reinterpret_cast<const uint32_t*>(
          static_cast<const typename Config::Element*>(params.out) + out_row * head_dim_v);
#pragma unroll
      for (int nt = 0; nt < kHeadDim / 8; ++nt) {
        const int column = accumulator_column(nt, 0);
        const float2 y = column < head_dim_v ? unpack<Arithmetic>(out[column / 2]) : float2{0, 0};
        float (&x)[4] = tout[0][nt];
        x[2 * h] = seeing ? fmaf(-out_factor, y.x, x[2 * h]) : 0;
        x[2 * h + 1] = seeing ? fmaf(-out_factor, y.y, x[2 * h + 1]) : 0;
      }
    }
    ptx::named_barrier_wait(1 + consumer, 128);  // a product reads q for all warps
    const float factor[2] = {1, 1};
    store_rows<Arithmetic>(tout, factor, shared.sQ(warp_row), Config::kQChunkBytes);
    const OutputRows to{arguments.tout_map, head_dim_v, work.head, row0, work.seqlen_q, work.batch_element};
    send_rows<Config::kChunks>(to, shared.sQ(warp_row), Config::kQChunkBytes);
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    tangent_kernel(const __grid_constant__ TangentArguments arguments) {
  extern __shared__ __align__(1024) uint8_t start[];
  const TangentShared<Config> shared{ptx::shared_address(start)};

  if (threadIdx.x == 0) {
    shared.k_ring().init(2, Config::kConsumers);
    shared.v_ring().init(2, Config::kConsumers);
    ptx::barrier_init(shared.q_full(), 2);
    ptx::barrier_init(shared.tail(0), 1);
    ptx::barrier_init(shared.tail(1), 1);
    ptx::barrier_init_fence();
  }
  const TangentWork<Config> work(arguments.params, blockIdx.x);
  __syncthreads();

  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    ptx::release_registers<Config::kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      load_for_tangent<Config, /*kIsKeys=*/true>(arguments, shared, work);
    } else if (warp == 1) {
      load_for_tangent<Config, /*kIsKeys=*/false>(arguments, shared, work);
    }
  } else {
    ptx::acquire_registers<Config::kConsumerRegisters>();
    TangentConsumer<Config>(arguments, shared, work, warpgroup - 1).run();
  }
}

template <class Arithmetic, int kHeadDim>
Status tangent(const TangentParams& params, const LaunchContext& context) {
  using Config = TangentConfig<Arithmetic, kHeadDim, tangent_tile(kHeadDim)>;
  using Element = typename Config::Element;
  const bool has_all = params.tq && params.tk && params.tv;
  if (!is_served(params, context) || is_general(params) || !has_all) return Status::not_served();
  TangentArguments arguments{.params = params, .logit = LogitScale(params)};
  const int64_t B = params.batch, T = params.seqlen_q, S = params.seqlen_kv, DB = params.num_directions * B;
  const int64_t N = params.num_heads, K = params.num_kv_heads, H = params.head_dim, Hv = params.head_dim_v;
  constexpr int kM = Config::kBlockM, kN = Config::kBlockN;
  const bool has_maps = make_tensor_map<Element>(params.q, B, T, N, H, kM, &arguments.q_map) &&
                        make_tensor_map<Element>(params.tq, DB, T, N, H, kM, &arguments.tq_map) &&
                        make_tensor_map<Element>(params.k, B, S, K, H, kN, &arguments.k_map) &&
                        make_tensor_map<Element>(params.tk, DB, S, K, H, kN, &arguments.tk_map) &&
                        make_tensor_map<Element>(params.v, B, S, K, Hv, kN, &arguments.v_map) &&
                        make_tensor_map<Element>(params.tv, DB, S, K, Hv, kN, &arguments.tv_map) &&
                        make_tensor_map<Element>(params.tout, DB, T, N, Hv, 16, &arguments.tout_map);
  if (!has_maps) return Status::not_served();
  return launch(tangent_kernel<Config>, ceil_div(T, kM) * N * DB, Config::kThreads, Config::kSharedBytes,
                context, arguments);
}

}  // namespace jax_flash::cuda::sm90
