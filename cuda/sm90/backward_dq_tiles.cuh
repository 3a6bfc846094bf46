// Which tiles of queries there are for dq on Hopper, what is known of each, and what probabilities its scores
// become. For backward_dq.cuh and wide_backward_dq.cuh, whose Config says how large a tile is; shared_dq.cuh
// has the same tiles.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "accumulator.cuh"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "ptx/math.h"

namespace jax_flash::cuda::sm90 {

struct BackwardDqArguments {
  CUtensorMap q_map, dout_map;  // [B, T, N, H], [B, T, N, Hv] in boxes of kBlockM rows
  CUtensorMap k_map, v_map;     // [B, S, K, H], [B, S, K, Hv] in boxes of kBlockN rows
  CUtensorMap dq_map;           // [B, T, N, H] in boxes of 16 rows: a warp's
  BackwardParams params;
  LogitScale logit;
  PairOptions pairs;
};

// A tile: the last rows first, which see the most keys when causal.
template <class Config>
struct BackwardDqWork {
  int m_start, head, kv_head, batch;
  Mask mask;
  KeyBlocks blocks;  // if no list says which
  typename Config::Keys keys;
  int seqlen_q, seqlen_kv;

  __device__ __forceinline__ BackwardDqWork(const BackwardParams& params, unsigned index)
      : batch(index / num_tiles(params)), mask(params, batch), keys(params, 0, 0, 0, 0, 0) {
    seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
    const unsigned in_batch = index - batch * num_tiles(params), m_blocks = num_m_blocks(params);
    head = in_batch / m_blocks;
    m_start = (m_blocks - 1 - (in_batch - head * m_blocks)) * Config::kBlockM;
    kv_head = head / (static_cast<int>(params.num_heads) / static_cast<int>(params.num_kv_heads));
    blocks = mask.template key_blocks<Config::kBlockN>(m_start, min(Config::kBlockM, seqlen_q - m_start));
    keys = {params, batch, head, m_start, blocks.begin, blocks.end};
  }

 private:
  __device__ static unsigned num_m_blocks(const BackwardParams& params) {
    return (static_cast<unsigned>(params.seqlen_q) + Config::kBlockM - 1) / Config::kBlockM;
  }
  __device__ static unsigned num_tiles(const BackwardParams& params) {  // of one batch element
    return num_m_blocks(params) * static_cast<unsigned>(params.num_heads);
  }
};

// The pairs of a warp's 16 queries and a block of keys. Made while scores are formed: reads what depends on
// the single pair.
template <class Config>
struct DqPairs {
  static constexpr PairPolicy kPolicy = Config::kPolicy;
  static constexpr int kBlockN = Config::kBlockN, kTiles = kBlockN / 8;

  const BackwardDqArguments& arguments;
  const BackwardDqWork<Config>& work;
  int n, row0, column0;  // block n
  Pairs<false> pairs{arguments.params, arguments.pairs, work.batch, work.head};
  PairBits<kTiles> visible[1]{}, kept[1]{};
  BiasAhead<kTiles> bias{};

  __device__ __forceinline__ DqPairs(const BackwardDqArguments& arguments, const BackwardDqWork<Config>& work,
                                     int n, int row0)
      : arguments(arguments), work(work), n(n), row0(row0), column0(work.keys.start(n)) {
    if constexpr (kPolicy.may_have_mask()) {
      if (!work.keys.is_whole(n)) load_visible(visible, pairs, row0, column0);
    }
    if constexpr (kPolicy.others) {
      if (pairs.has_dropout()) draw_kept(kept, pairs, row0, column0);
      bias.read(pairs, row0, column0);
    }
  }

  // From scores to p = exp(s - lse), for the soft cap p (1 - tanh^2).
  __device__ __forceinline__ void weigh(float (&scores)[1][kTiles][4], const LogitScale& logit,
                                        const float (&lse_log2)[2]) const {
    if constexpr (kPolicy.others) {
      transform_scores(scores[0], pairs, /*bias_is_added=*/false, logit, row0, column0, bias);
    }
    for_each_accumulator(scores, [&](int, int h, int nt, int c) {
      float& x = scores[0][nt][2 * h + c];
      const float p = ptx::exp2_approx(fmaf(x, logit.scale_log2, -lse_log2[h]));
      x = kPolicy.others && logit.transform == LogitTransform::kSoftCap ? p * soft_cap_slope(x) : p;
    });
    if constexpr (kPolicy.may_have_mask()) {
      if (!work.mask.covers(row0, 16, column0, kBlockN)) fill_hidden(scores, work.mask, row0, column0, 0);
      if (!work.keys.is_whole(n)) fill_unset(scores, visible, 0);
    } else if (!work.blocks.is_whole(column0 / kBlockN)) {
      fill_hidden(scores, work.mask, row0, column0, 0);
    }
  }

  // Of tile nt, from dp to ds = p * (dp - delta); of planes times the factors of the rows.
  __device__ __forceinline__ void make_ds(float (&dp)[4], const float (&p)[4], int nt,
                                          const float (&delta)[2], const float* ds_factor = nullptr) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kPolicy.others && pairs.has_dropout()) {
        dp[i] = kept[0].test(nt, i) ? dp[i] * arguments.pairs.kept_factor : 0;
      }
      dp[i] = p[i] * (dp[i] - delta[i / 2]);
      if constexpr (Config::kPlanes) dp[i] *= ds_factor[i / 2];
    }
  }
};

}  // namespace jax_flash::cuda::sm90
