// The gradient of a bias: which tile of its sums a block works on, and which batch elements and heads add to
// it.
#pragma once

#include <cstdint>

#include "launch.h"
#include "mask.cuh"
#include "params.h"

namespace jax_flash::cuda {

template <int kBlockM, int kBlockN>
struct BiasSumsTile {
  // A batch element and a head that add to the tile.
  struct Item {
    int batch, head;
  };

  const BackwardParams& params;
  int m_start, n_start, m_end, n_end;  // ends within the lengths
  int64_t index;                       // into the [B', N'] of the sums (BackwardParams::dbias)
  int first_batch, end_batch, first_head, end_head;

  __device__ __forceinline__ BiasSumsTile(const BackwardParams& params, unsigned tile) : params(params) {
    const int seqlen_q = static_cast<int>(params.seqlen_q), seqlen_kv = static_cast<int>(params.seqlen_kv);
    const unsigned m_blocks = (seqlen_q + kBlockM - 1) / kBlockM,
                   n_blocks = (seqlen_kv + kBlockN - 1) / kBlockN;
    n_start = tile % n_blocks * kBlockN;
    m_start = tile / n_blocks % m_blocks * kBlockM;
    m_end = min(m_start + kBlockM, seqlen_q);
    n_end = min(n_start + kBlockN, seqlen_kv);
    const unsigned sums = tile / n_blocks / m_blocks;
    const unsigned sums_heads = params.dbias_num_heads;
    const int heads = static_cast<int>(params.num_heads) / static_cast<int>(sums_heads);
    const int batches = static_cast<int>(params.batch) / static_cast<int>(params.dbias_batch);
    index = sums;
    first_batch = static_cast<int>(sums / sums_heads) * batches;
    end_batch = heads > 0 ? first_batch + batches : first_batch;
    first_head = static_cast<int>(sums % sums_heads) * heads;
    end_head = first_head + heads;
  }

  static int64_t count(const BackwardParams& params) {
    return ceil_div(params.seqlen_q, kBlockM) * ceil_div(params.seqlen_kv, kBlockN) * params.dbias_batch *
           params.dbias_num_heads;
  }

  // Iterates over the items that have a visible pair in the tile; exists() is false after the last one.
  __device__ __forceinline__ Item first() const { return visible_from({first_batch, first_head}); }
  __device__ __forceinline__ Item next(const Item& item) const { return visible_from(successor(item)); }
  __device__ __forceinline__ bool exists(const Item& item) const { return item.batch < end_batch; }

 private:
  __device__ __forceinline__ Item successor(const Item& item) const {
    return item.head + 1 < end_head ? Item{item.batch, item.head + 1} : Item{item.batch + 1, first_head};
  }

  __device__ __forceinline__ Item visible_from(Item item) const {
    while (exists(item) && is_hidden(item)) item = successor(item);
    return item;
  }

  __device__ __forceinline__ bool is_hidden(const Item& item) const {
    const Mask mask(params, item.batch);
    if (mask.hides(m_start, m_end - m_start, n_start, n_end - n_start)) return true;
    const VisibilityWorkspace& visible = params.visible;
    if (!visible.visibility) return false;
    constexpr int kBlock = kVisibilityBlock;
    const int64_t m_blocks = (params.seqlen_q + kBlock - 1) / kBlock,
                  n_blocks = (params.seqlen_kv + kBlock - 1) / kBlock;
    const int64_t head = visible.num_heads > 1 ? item.head : 0;
    const uint8_t* blocks =
        visible.visibility + (item.batch * visible.num_heads + head) * m_blocks * n_blocks;
    bool any = false;
    for (int m = m_start / kBlock; m * kBlock < m_end; ++m) {
      for (int n = n_start / kBlock; n * kBlock < n_end; ++n) any |= __ldg(blocks + m * n_blocks + n) != 0;
    }
    return !any;
  }
};

}  // namespace jax_flash::cuda
