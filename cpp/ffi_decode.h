// From an XLA FFI call to what the kernels are told, with every rank, dtype, size and option checked. Shared
// by the CPU and the CUDA handlers.
#pragma once

#include "ffi_call.h"
#include "params.h"

namespace jax_flash {

enum class Pass {
  kForward,          // out, lse
  kBackward,         // dq, dk, dv
  kBackwardBias,     // sums of dbias
  kTangent,          // tout, tlse
  kBackwardTangent,  // tdq, tdk, tdv
};

ffi::Error ReadForward(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes,
                       Platform platform, ForwardParams* params);

ffi::Error ReadTangent(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes,
                       Platform platform, TangentParams* params);

// `pass`: kBackward or kBackwardBias.
ffi::Error ReadBackward(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes,
                        Platform platform, Pass pass, BackwardParams* params);

ffi::Error ReadBackwardTangent(ffi::RemainingArgs args, ffi::RemainingRets results,
                               ffi::Dictionary attributes, Platform platform, BackwardTangentParams* params);

}  // namespace jax_flash
