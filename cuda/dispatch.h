// The way in for the FFI handlers: chooses and launches the kernels for one call. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "params.h"

namespace jax_flash::cuda {

// Empty when all went well, else a sentence that says what is not supported or what CUDA reported. Sizes must
// be those that ffi_util.h lets pass; nothing synchronises.
std::string run_forward(const ForwardParams& params, cudaStream_t stream, int device);
std::string run_backward(const BackwardParams& params, cudaStream_t stream, int device);
std::string run_backward_bias(const BackwardParams& params, cudaStream_t stream, int device);

// "forward sm80 bfloat16 128", ...: one line a compiled kernel.
std::vector<std::string> kernel_names();

}  // namespace jax_flash::cuda
