// What the library tells of itself: jax_flash/_library.py reads it. The other exported symbols are the FFI
// handlers.
#include <string>
#include <utility>
#include <vector>

#include "build.h"
#include "xla/ffi/api/c_api.h"

#ifdef JAX_FLASH_WITH_CUDA
#include "dispatch.h"
#endif

namespace {

using Names = std::vector<std::string>;

const Names kOptionNames = {
#define OPTION(type, name) #name,
#include "options.def"
#undef OPTION
};

const Names kOperandNames = {
#define OPERAND(type, name, ...) #name,
#include "operands.def"
#undef OPERAND
};

std::string Json(const std::string& text) { return '"' + text + '"'; }

std::string Json(const Names& names) {
  std::string json;
  for (const std::string& name : names) json += (json.empty() ? "" : ", ") + Json(name);
  return '[' + json + ']';
}

}  // namespace

// A JSON object, owned by the library.
extern "C" const char* JaxFlashDescription() {
  static const std::string description = [] {
    Names platforms = {"cpu"};
    Names kernels;
#ifdef JAX_FLASH_WITH_CUDA
    platforms.push_back("CUDA");
    kernels = jax_flash::cuda::kernel_names();
#endif
    const std::vector<std::pair<std::string, std::string>> fields = {
        {"version", Json(JAX_FLASH_VERSION)},
        {"ffi_version", Json(std::to_string(XLA_FFI_API_MAJOR) + '.' + std::to_string(XLA_FFI_API_MINOR))},
        {"jaxlib", Json(JAX_FLASH_JAXLIB_VERSION)},
        {"cuda", Json(JAX_FLASH_CUDA_VERSION)},
        {"nvcc", Json(JAX_FLASH_NVCC)},
        {"archs", Json(JAX_FLASH_CUDA_ARCHS)},
        {"kernels", Json(kernels)},
        {"platforms", Json(platforms)},
        {"options", Json(kOptionNames)},
        {"operands", Json(kOperandNames)},
    };
    std::string json;
    for (const auto& [name, value] : fields) json += (json.empty() ? "" : ", ") + Json(name) + ": " + value;
    return '{' + json + '}';
  }();
  return description.c_str();
}
