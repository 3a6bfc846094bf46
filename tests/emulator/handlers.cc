// The handlers of the CUDA kernels, for the CPU: they take the same arguments and workspace.
#include <string>

#include "dispatch.h"
#include "ffi_decode.h"

namespace {

namespace ffi = xla::ffi;
using jax_flash::Pass, jax_flash::Platform;

ffi::Error status(const std::string& message) {
  return message.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kInternal, message);
}

ffi::Error forward(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes) {
  jax_flash::ForwardParams params;
  RETURN_IF_ERROR(jax_flash::ReadForward(args, results, attributes, Platform::kCuda, &params));
  return status(jax_flash::cuda::run_forward(params, nullptr, 0));
}

ffi::Error backward(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes) {
  jax_flash::BackwardParams params;
  RETURN_IF_ERROR(
      jax_flash::ReadBackward(args, results, attributes, Platform::kCuda, Pass::kBackward, &params));
  return status(jax_flash::cuda::run_backward(params, nullptr, 0));
}

ffi::Error backward_bias(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes) {
  jax_flash::BackwardParams params;
  RETURN_IF_ERROR(
      jax_flash::ReadBackward(args, results, attributes, Platform::kCuda, Pass::kBackwardBias, &params));
  return status(jax_flash::cuda::run_backward_bias(params, nullptr, 0));
}

ffi::Error tangent(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes) {
  jax_flash::TangentParams params;
  RETURN_IF_ERROR(jax_flash::ReadTangent(args, results, attributes, Platform::kCuda, &params));
  return status(jax_flash::cuda::run_tangent(params, nullptr, 0));
}

ffi::Error backward_tangent(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes) {
  jax_flash::BackwardTangentParams params;
  RETURN_IF_ERROR(jax_flash::ReadBackwardTangent(args, results, attributes, Platform::kCuda, &params));
  return status(jax_flash::cuda::run_backward_tangent(params, nullptr, 0));
}

}  // namespace

#define HANDLER(name)                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(name##_emulated, name, \
                                ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs())

HANDLER(forward);
HANDLER(backward);
HANDLER(backward_bias);
HANDLER(tangent);
HANDLER(backward_tangent);

extern "C" void set_test_settings(const char* kernels, const char* tile,
                                  const char* shared_memory_per_block) {
  jax_flash::cuda::set_test_settings(kernels, tile, shared_memory_per_block);
}
