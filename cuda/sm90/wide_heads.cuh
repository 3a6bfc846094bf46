// Head dims above 256: what their forward pass (head_halves.cuh) and gradients (wide_backward.cuh,
// wide_backward_dq.cuh) have in common. Clusters of two thread blocks compute both.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "params.h"
#include "ptx/cluster.h"

namespace jax_flash::cuda::sm90 {

constexpr bool is_wide(int head_dim) { return head_dim > 256; }

// For gradients above head dim 256, what a block of a cluster of two does: it forms scores, of q and k, or
// their gradients, of dout and v.
enum class BlockRole { kScores, kValues };

__device__ __forceinline__ BlockRole block_role() {
  return ptx::cluster_rank() == 0 ? BlockRole::kScores : BlockRole::kValues;
}

// Wide heads without a single pair of a query and a key: no portable kernel serves these.
inline bool is_wide_without_pairs(const AttentionParams& params) {
  return is_wide(std::max(params.head_dim, params.head_dim_v)) &&
         params.batch * params.num_heads * params.seqlen_q * params.seqlen_kv == 0;
}

inline Status clear_gradients(const BackwardParams& params, const LaunchContext& context) {
  const int64_t queries = params.batch * params.seqlen_q * params.num_heads,
                keys = params.batch * params.seqlen_kv * params.num_kv_heads;
  auto clear = [&](void* gradient, int64_t bytes) {
    return bytes == 0 ? cudaSuccess : cudaMemsetAsync(gradient, 0, bytes, context.stream);
  };
  cudaError_t error = clear(params.dq, 2 * queries * params.head_dim);
  if (error == cudaSuccess) error = clear(params.dk, 2 * keys * params.head_dim);
  if (error == cudaSuccess) error = clear(params.dv, 2 * keys * params.head_dim_v);
  return error;
}

}  // namespace jax_flash::cuda::sm90
