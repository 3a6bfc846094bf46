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

using Row = std::vector<std::pair<const char*, const char*>>;  // the names of the columns, and their text
const std::vector<Row> kOperands = {
#define OPERAND(type, name, dtype, ...) \
  {{"name", #name}, {"type", #type}, {"dtype", #dtype}, {"shape", #__VA_ARGS__}},
#include "operands.def"
#undef OPERAND
};
const std::vector<Row> kWorkspace = {
#define WORKSPACE(name, dtype, condition, ...) \
  {{"name", #name}, {"dtype", #dtype}, {"condition", #condition}, {"shape", #__VA_ARGS__}},
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

std::string JsonOfTable(const std::vector<Row>& table) {
  std::vector<std::string> rows;
  for (const Row& row : table) {
    Fields fields;
    for (const auto& [column, text] : row) fields.emplace_back(column, Json(std::string(text)));
    rows.push_back(Json(fields));
  }
  return '[' + Join(rows) + ']';
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
        {"operands", JsonOfTable(kOperands)},
        {"workspace", JsonOfTable(kWorkspace)},
        {"constants", JsonOfConstants()},
    });
  }();
  return description.c_str();
}
