// The workspace of the CUDA kernels, which a call has as extra results: workspace.def lists it.
#pragma once

#include <cstdint>

#include "ffi_call.h"
#include "ffi_decode.h"
#include "params.h"

namespace jax_flash {

template <ffi::DataType dtype>
struct WorkspaceArray {
  ffi::NativeType<dtype>* data = nullptr;  // null where the call does not have the array
  Dims dims;
};

struct Workspace {
#define WORKSPACE(name, dtype, condition, ...) WorkspaceArray<ffi::DataType::dtype> name;
#include "workspace.def"
#undef WORKSPACE

  // Whether the backward pass leaves dq to another kernel because dq_accum has no rows.
  bool leaves_dq = false;
};

// Takes the workspace of a call, whose own results were taken before. Takes nothing for the CPU.
ffi::Error TakeWorkspace(CallReader& call, Pass pass, const AttentionParams& params, int64_t num_directions,
                         Workspace* workspace);

// `size` rows or keys in blocks of kVisibilityBlock.
inline int64_t NumBlocks(int64_t size) { return (size + kVisibilityBlock - 1) / kVisibilityBlock; }

}  // namespace jax_flash
