// backward.cuh with smaller tiles, for cards whose blocks get 99 KB of shared memory.
#pragma once

#include "sm80/backward.cuh"

namespace jax_flash::cuda {
using backward_compact_params = BackwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Arithmetic, int kHeadDim>
Status backward_compact(const BackwardParams& params, const LaunchContext& context) {
  return launch_backward_form<Arithmetic, kHeadDim, /*kCompact=*/true>(params, context);
}

}  // namespace jax_flash::cuda::sm80
