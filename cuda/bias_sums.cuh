// Which tile of the sums of dbias a block works on, and which batch elements and heads add to it.
#pragma once

#include <cstdint>

#include "launch.h"
#include "mask.cuh"
#include "params.h"

namespace jax_flash::cuda {

template <int kBlockM, int kBlockN>
struct BiasSumsTile {
  const BackwardParams& params;
  int m_start, n_start, m_end, n_end;  // ends within the lengths
  int64_t index;                       // of the sums' batch element and head
  int heads, num_items;                // item i is batch element first_batch + i / heads, head ...
  int first_batch, first_head;

  __device__ __forceinline__ BiasSumsTile(const BackwardParams& params, unsigned tile) : params(params) {
    const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
    const unsigned m_blocks = (seqlen_q + kBlockM - 1) / kBlockM,
                   n_blocks = (seqlen_kv + kBlockN - 1) / kBlockN;
    n_start = tile % n_blocks * kBlockN;
    m_start = tile / n_blocks % m_blocks * kBlockM;
    m_end = min(m_start + kBlockM, seqlen_q);
    n_end = min(n_start + kBlockN, seqlen_kv);
    index = tile / n_blocks / m_blocks;
    heads = static_cast<int>(params.dbias_heads);
    num_items = static_cast<int>(params.dbias_batches) * heads;
    const int heads_of_sums = static_cast<int>(params.num_heads) / heads;
    first_batch = static_cast<int>(index) / heads_of_sums * static_cast<int>(params.dbias_batches);
    first_head = static_cast<int>(index) % heads_of_sums * heads;
  }

  static int64_t count(const BackwardParams& params) {
    return ceil_div(params.seqlen_q, kBlockM) * ceil_div(params.seqlen_kv, kBlockN) *
           (params.batch / params.dbias_batches) * (params.num_heads / params.dbias_heads);
  }

  __device__ __forceinline__ int batch(int item) const { return first_batch + item / heads; }
  __device__ __forceinline__ int head(int item) const { return first_head + item % heads; }

  // The first item from `item` on that has a visible pair in the tile, or num_items.
  __device__ __forceinline__ int visible_from(int item) const {
    while (item < num_items && is_hidden(item)) ++item;
    return item;
  }

 private:
  __device__ __forceinline__ bool is_hidden(int item) const {
    const Mask mask(params, batch(item));
    if (mask.hides(m_start, m_end - m_start, n_start, n_end - n_start)) return true;
    const VisibilityWorkspace& visible = params.visible;
    if (!visible.visibility) return false;
    constexpr int kBlock = kVisibilityBlock;
    const int64_t m_blocks = (params.seqlen_q + kBlock - 1) / kBlock,
                  n_blocks = (params.seqlen_kv + kBlock - 1) / kBlock;
    const int64_t head = visible.num_heads > 1 ? this->head(item) : 0;
    const uint8_t* blocks =
        visible.visibility + (batch(item) * visible.num_heads + head) * m_blocks * n_blocks;
    bool any = false;
    for (int m = m_start / kBlock; m * kBlock < m_end; ++m) {
      for (int n = n_start / kBlock; n * kBlock < n_end; ++n) any |= __ldg(blocks + m * n_blocks + n) != 0;
    }
    return !any;
  }
};

}  // namespace jax_flash::cuda
