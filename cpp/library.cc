// The library's description of itself, which jax_flash/_library.py reads. The other exported symbols are the
// FFI handlers.
#include <string>
#include <utility>
#include <vector>

#include "build.h"
#include "params.h"
#include "xla/ffi/api/c_api.h"

#ifdef JAX_FLASH_WITH_CUDA
#include "dispatch.h"
#endif

namespace {

using Names = std::vector<std::string>;

// The tables as text. Python compares options and operands with its own, and evaluates the workspace's
// conditions and shapes.
struct Option {
  const char *type, *name;
};
const Option kOptions[] = {
#define OPTION(type, name) {#type, #name},
#include "options.def"
#undef OPTION
};

struct Operand {
  const char *type, *name, *dtype, *shape;
};
const Operand kOperands[] = {
#define OPERAND(type, name, dtype, ...) {#type, #name, #dtype, #__VA_ARGS__},
#include "operands.def"
#undef OPERAND
};

struct Workspace {
  const char *name, *dtype, *condition, *shape;
};
const Workspace kWorkspace[] = {
#define WORKSPACE(name, dtype, condition, ...) {#name, #dtype, #condition, #__VA_ARGS__},
#include "workspace.def"
#undef WORKSPACE
};

std::string Json(const std::string& text) { return '"' + text + '"'; }

using Fields = std::vector<std::pair<std::string, std::string>>;  // names, and values in JSON

std::string Join(const std::vector<std::string>& parts) {
  std::string joined;
  for (const std::string& part : parts) joined += (joined.empty() ? "" : ", ") + part;
  return joined;
}

std::string Json(const Names& names) {
  std::vector<std::string> parts;
  for (const std::string& name : names) parts.push_back(Json(name));
  return '[' + Join(parts) + ']';
}

std::string Json(const Fields& fields) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : fields) parts.push_back(Json(name) + ": " + value);
  return '{' + Join(parts) + '}';
}

std::string JsonOfOptions() {
  Fields fields;
  for (const Option& option : kOptions) fields.emplace_back(option.name, Json(std::string(option.type)));
  return Json(fields);
}

std::string JsonOfOperands() {
  std::vector<std::string> parts;
  for (const Operand& operand : kOperands) {
    parts.push_back(Json(Fields{{"name", Json(std::string(operand.name))},
                                {"type", Json(std::string(operand.type))},
                                {"dtype", Json(std::string(operand.dtype))},
                                {"shape", Json(std::string(operand.shape))}}));
  }
  return '[' + Join(parts) + ']';
}

std::string JsonOfWorkspace() {
  std::vector<std::string> parts;
  for (const Workspace& array : kWorkspace) {
    parts.push_back(Json(Fields{{"name", Json(std::string(array.name))},
                                {"dtype", Json(std::string(array.dtype))},
                                {"condition", Json(std::string(array.condition))},
                                {"shape", Json(std::string(array.shape))}}));
  }
  return '[' + Join(parts) + ']';
}

// The constants of params.h that Python needs, too.
std::string JsonOfConstants() {
  return Json(Fields{{"kVisibilityBlock", std::to_string(jax_flash::kVisibilityBlock)},
                     {"kStatsRows", std::to_string(jax_flash::kStatsRows)},
                     {"kDqRows", std::to_string(jax_flash::kDqRows)}});
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
    return Json(Fields{
        {"version", Json(JAX_FLASH_VERSION)},
        {"ffi_version", Json(std::to_string(XLA_FFI_API_MAJOR) + '.' + std::to_string(XLA_FFI_API_MINOR))},
        {"jaxlib", Json(JAX_FLASH_JAXLIB_VERSION)},
        {"cuda", Json(JAX_FLASH_CUDA_VERSION)},
        {"nvcc", Json(JAX_FLASH_NVCC)},
        {"archs", Json(JAX_FLASH_CUDA_ARCHS)},
        {"kernels", Json(kernels)},
        {"platforms", Json(platforms)},
        {"options", JsonOfOptions()},
        {"operands", JsonOfOperands()},
        {"workspace", JsonOfWorkspace()},
        {"constants", JsonOfConstants()},
    });
  }();
  return description.c_str();
}
