// The XLA FFI handlers of the CUDA kernels: each decodes the call and launches its kernels.
#include <cuda_runtime_api.h>

#include <string>

#include "dispatch.h"
#include "ffi_decode.h"

namespace {

namespace ffi = xla::ffi;
using jax_flash::BackwardParams;
using jax_flash::BackwardTangentParams;
using jax_flash::ForwardParams;
using jax_flash::TangentParams;

ffi::Error status(const std::string& message) {
  return message.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, message);
}

ffi::Error forward(cudaStream_t stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  ForwardParams params{};
  RETURN_IF_ERROR(jax_flash::ReadForward(args, results, attributes, jax_flash::Platform::kCuda, &params));
  return status(jax_flash::cuda::run_forward(params, stream, device));
}

ffi::Error backward(cudaStream_t stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets results,
                    ffi::Dictionary attributes) {
  BackwardParams params{};
  RETURN_IF_ERROR(jax_flash::ReadBackward(args, results, attributes, jax_flash::Platform::kCuda,
                                          jax_flash::Pass::kBackward, &params));
  return status(jax_flash::cuda::run_backward(params, stream, device));
}

ffi::Error tangent(cudaStream_t stream, int32_t device, ffi::RemainingArgs args, ffi::RemainingRets results,
                   ffi::Dictionary attributes) {
  TangentParams params{};
  RETURN_IF_ERROR(jax_flash::ReadTangent(args, results, attributes, jax_flash::Platform::kCuda, &params));
  return status(jax_flash::cuda::run_tangent(params, stream, device));
}

ffi::Error backward_tangent(cudaStream_t stream, int32_t device, ffi::RemainingArgs args,
                            ffi::RemainingRets results, ffi::Dictionary attributes) {
  BackwardTangentParams params{};
  RETURN_IF_ERROR(
      jax_flash::ReadBackwardTangent(args, results, attributes, jax_flash::Platform::kCuda, &params));
  return status(jax_flash::cuda::run_backward_tangent(params, stream, device));
}

ffi::Error backward_bias(cudaStream_t stream, int32_t device, ffi::RemainingArgs args,
                         ffi::RemainingRets results, ffi::Dictionary attributes) {
  BackwardParams params{};
  RETURN_IF_ERROR(jax_flash::ReadBackward(args, results, attributes, jax_flash::Platform::kCuda,
                                          jax_flash::Pass::kBackwardBias, &params));
  return status(jax_flash::cuda::run_backward_bias(params, stream, device));
}

}  // namespace

// ffi_decode.cc has the arguments, results and attributes. kCmdBufferCompatible lets XLA capture the call in
// a CUDA graph: a launch depends on its parameters alone, and workspace is among the results.
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashForwardCuda, jax_flash::kGuarded<forward>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashBackwardCuda, jax_flash::kGuarded<backward>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashBackwardBiasCuda, jax_flash::kGuarded<backward_bias>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashTangentCuda, jax_flash::kGuarded<tangent>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashBackwardTangentCuda, jax_flash::kGuarded<backward_tangent>,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets()
                                  .Attrs(),
                              {ffi::Traits::kCmdBufferCompatible});
