// The library's description of itself, in plain types: what python_module.cc hands on to Python.
#pragma once

#include <cstdint>
#include <span>

namespace jax_flash {

struct Handler {
  const char *platform, *target;  // as jax.ffi.register_ffi_target takes them
  void* function;
};

// The rows of the .def files, as text.
struct OptionRow {
  const char *name, *type;
};
struct OperandRow {
  const char *name, *type, *dtype, *shape;
};
struct WorkspaceRow {
  const char *name, *dtype, *condition, *shape;
};

// A constant of params.h that Python needs, too.
struct Constant {
  const char* name;
  int64_t value;
};

struct BuildInfo {
  const char* version;
  int ffi_version[2];                    // of the XLA FFI's headers: major, minor
  const char* jaxlib;                    // the version that the headers come from
  const char *cuda, *nvcc;               // version and path of the CUDA compiler; empty without one
  const char* archs;                     // compute capabilities times 10, with semicolons
  std::span<const char* const> kernels;  // the rows of kernels.cmake, such as "forward sm80 bfloat16 128"
};

struct Library {
  BuildInfo build;
  std::span<const Handler> handlers;
  std::span<const OptionRow> options;
  std::span<const OperandRow> operands;
  std::span<const WorkspaceRow> workspace;
  std::span<const Constant> constants;
  // For tests: see set_test_settings of dispatch.h. Null without CUDA.
  void (*set_test_settings)(const char* kernels, const char* tile, const char* shared_memory_per_block);
};

}  // namespace jax_flash

// The only symbol that the library exports.
extern "C" const jax_flash::Library* JaxFlashLibrary();
