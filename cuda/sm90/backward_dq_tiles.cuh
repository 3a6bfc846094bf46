// Which tiles of queries there are for dq on Hopper, and what is known of each. For backward_dq.cuh and
// wide_backward_dq.cuh, whose Config says how large a tile is.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <cstdint>

#include "mask.cuh"
#include "pairs.cuh"
#include "params.h"

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

}  // namespace jax_flash::cuda::sm90
