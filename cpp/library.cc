#include "library.h"

#include <vector>

#include "build.h"
#include "handlers.h"
#include "params.h"
#include "xla/ffi/api/c_api.h"

#ifdef JAX_FLASH_WITH_CUDA
#include "dispatch.h"
#endif

namespace jax_flash {
namespace {

const Handler kHandlers[] = {
    {"cpu", "jax_flash_forward", reinterpret_cast<void*>(JaxFlashForwardCpu)},
    {"cpu", "jax_flash_backward", reinterpret_cast<void*>(JaxFlashBackwardCpu)},
    {"cpu", "jax_flash_backward_bias", reinterpret_cast<void*>(JaxFlashBackwardBiasCpu)},
    {"cpu", "jax_flash_tangent", reinterpret_cast<void*>(JaxFlashTangentCpu)},
    {"cpu", "jax_flash_backward_tangent", reinterpret_cast<void*>(JaxFlashBackwardTangentCpu)},
#ifdef JAX_FLASH_WITH_CUDA
    {"CUDA", "jax_flash_forward", reinterpret_cast<void*>(JaxFlashForwardCuda)},
    {"CUDA", "jax_flash_backward", reinterpret_cast<void*>(JaxFlashBackwardCuda)},
    {"CUDA", "jax_flash_backward_bias", reinterpret_cast<void*>(JaxFlashBackwardBiasCuda)},
    {"CUDA", "jax_flash_tangent", reinterpret_cast<void*>(JaxFlashTangentCuda)},
    {"CUDA", "jax_flash_backward_tangent", reinterpret_cast<void*>(JaxFlashBackwardTangentCuda)},
#endif
};

const OptionRow kOptions[] = {
#define OPTION(type, name) {#name, #type},
#include "options.def"
#undef OPTION
};

const OperandRow kOperands[] = {
#define OPERAND(type, name, dtype, ...) {#name, #type, #dtype, #__VA_ARGS__},
#include "operands.def"
#undef OPERAND
};

const WorkspaceRow kWorkspace[] = {
#define WORKSPACE(name, dtype, condition, ...) {#name, #dtype, #condition, #__VA_ARGS__},
#include "workspace.def"
#undef WORKSPACE
};

const Constant kConstants[] = {
    {"kVisibilityBlock", kVisibilityBlock}, {"kKeyUnit", kKeyUnit},
    {"kDecodeQueries", kDecodeQueries},     {"kStatsRows", kStatsRows},
    {"kFragmentRows", kFragmentRows},       {"kShortLength", kShortLength},
    {"kPlaneScales", kPlaneScales},         {"kSharedDsUnit", kSharedDsUnit},
};

Library describe() {
#ifdef JAX_FLASH_WITH_CUDA
  static const std::vector<const char*> kernels = cuda::kernel_names();
  const auto set_test_settings = cuda::set_test_settings;
#else
  static const std::vector<const char*> kernels;
  const auto set_test_settings = nullptr;
#endif
  return {
      .build = {.version = JAX_FLASH_VERSION,
                .ffi_version = {XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR},
                .jaxlib = JAX_FLASH_JAXLIB_VERSION,
                .cuda = JAX_FLASH_CUDA_VERSION,
                .nvcc = JAX_FLASH_NVCC,
                .archs = JAX_FLASH_CUDA_ARCHS,
                .kernels = kernels},
      .handlers = kHandlers,
      .options = kOptions,
      .operands = kOperands,
      .workspace = kWorkspace,
      .constants = kConstants,
      .set_test_settings = set_test_settings,
  };
}

}  // namespace
}  // namespace jax_flash

const jax_flash::Library* JaxFlashLibrary() {
  static const jax_flash::Library library = jax_flash::describe();
  return &library;
}
