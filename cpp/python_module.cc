// The Python module jax_flash._native: libjax_flash.so's description of itself, as Python objects.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "library.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Row = nb::typed<nb::dict, nb::str, nb::str>;  // the names of the columns, and their text

const jax_flash::Library& library() { return *JaxFlashLibrary(); }

nb::typed<nb::dict, nb::str, nb::typed<nb::dict, nb::str, nb::capsule>> registrations() {
  nb::dict platforms;
  for (const auto& [platform, target, function] : library().handlers) {
    if (!platforms.contains(platform)) platforms[platform] = nb::dict();
    platforms[platform][target] = nb::capsule(function);
  }
  return platforms;
}

Row options() {
  nb::dict types;
  for (const auto& [name, type] : library().options) types[name] = type;
  return types;
}

std::vector<Row> operands() {
  std::vector<Row> rows;
  for (const auto& [name, type, dtype, shape] : library().operands) {
    nb::dict row;
    row["name"] = name;
    row["type"] = type;
    row["dtype"] = dtype;
    row["shape"] = shape;
    rows.push_back(row);
  }
  return rows;
}

std::vector<Row> workspace() {
  std::vector<Row> rows;
  for (const auto& [name, dtype, condition, shape] : library().workspace) {
    nb::dict row;
    row["name"] = name;
    row["dtype"] = dtype;
    row["condition"] = condition;
    row["shape"] = shape;
    rows.push_back(row);
  }
  return rows;
}

nb::typed<nb::dict, nb::str, nb::int_> constants() {
  nb::dict values;
  for (const auto& [name, value] : library().constants) values[name] = value;
  return values;
}

nb::typed<nb::dict, nb::str, nb::object> build_info() {
  const jax_flash::BuildInfo& build = library().build;
  const auto& [major, minor] = build.ffi_version;
  nb::list kernels;
  for (const char* name : build.kernels) kernels.append(name);
  nb::dict info;
  info["version"] = build.version;
  info["ffi_version"] = std::to_string(major) + "." + std::to_string(minor);
  info["jaxlib"] = build.jaxlib;
  info["cuda"] = build.cuda;
  info["nvcc"] = build.nvcc;
  info["archs"] = build.archs;
  info["kernels"] = kernels;
  return info;
}

void set_test_settings(const std::optional<std::string>& kernels, const std::optional<std::string>& tile,
                       const std::optional<std::string>& shared_memory_per_block) {
  const auto text = [](const std::optional<std::string>& setting) {
    return setting ? setting->c_str() : nullptr;
  };
  if (!library().set_test_settings) throw nb::value_error("The library was built without CUDA.");
  library().set_test_settings(text(kernels), text(tile), text(shared_memory_per_block));
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "libjax_flash.so's FFI handlers, and its description of itself.";
  m.def("registrations", registrations,
        "The FFI handlers as jax.ffi.register_ffi_target takes them: {platform: {target: capsule}}.");
  m.def("options", options, "The op's options and their C++ types, in the order of options.def.");
  m.def("operands", operands,
        "The rows of operands.def, in order: name, C++ type, dtype and shape, as text.");
  m.def("workspace", workspace,
        "The rows of workspace.def, in order: name, dtype, condition and shape, as text.");
  m.def("constants", constants, "The constants of the C++ code that Python needs, too.");
  m.def("build_info", build_info, "What the library was built with and for.");
  m.def("set_test_settings", set_test_settings, "kernels"_a = nb::none(), "tile"_a = nb::none(),
        "shared_memory_per_block"_a = nb::none(),
        "Sets what the environment variables of docs/testing.md do; None: as the environment has it.");
}
