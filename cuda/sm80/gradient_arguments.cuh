// What the kernels of a gradient get from the host.
#pragma once

#include "arithmetic.h"
#include "pairs.cuh"
#include "params.h"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda::sm80 {

template <class Sum>
struct GradientArguments {
  BackwardParams params;
  LogitScaleOf<Sum> logit;
  PairOptionsOf<Sum> pairs;
  HeadRows q, k, v, dout;  // [B * T, N, H], [B * S, K, H], [B * S, K, Hv], [B * T, N, Hv]
};

template <class Element>
GradientArguments<SumOf<Element>> gradient_arguments(const BackwardParams& params) {
  return {params,
          LogitScaleOf<SumOf<Element>>(params),
          PairOptionsOf<SumOf<Element>>(params),
          head_rows<Element>(params.q, params.num_heads, params.head_dim),
          head_rows<Element>(params.k, params.num_kv_heads, params.head_dim),
          head_rows<Element>(params.v, params.num_kv_heads, params.head_dim_v),
          head_rows<Element>(params.dout, params.num_heads, params.head_dim_v)};
}

}  // namespace jax_flash::cuda::sm80
