// Forward attention of short sequences: the portable kernel, with one tile for all rows and keys that such a
// call may have.
#pragma once

#include "sm80/forward.cuh"

namespace jax_flash::cuda {
using short_forward_params = ForwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Arithmetic, int kHeadDim>
Status short_forward(const ForwardParams& params, const LaunchContext& context) {
  constexpr ForwardTile kGeneral = short_forward_tile(kHeadDim, true),
                        kPlain = short_forward_tile(kHeadDim, false);
  return has_pair_options(params)
             ? launch_forward<ForwardConfig<Arithmetic, kHeadDim, kGeneral, kAnyPairsUnstaged>>(params,
                                                                                                context)
             : launch_forward<ForwardConfig<Arithmetic, kHeadDim, kPlain, kNoPairs>>(params, context);
}

}  // namespace jax_flash::cuda::sm80
