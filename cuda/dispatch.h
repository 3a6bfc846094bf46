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

// For tests, to run here what runs elsewhere: sets what the environment variables JAX_FLASH_KERNELS,
// JAX_FLASH_TILE and JAX_FLASH_SHARED_MEMORY_PER_BLOCK said when the library was loaded, which a null pointer
// takes back.
void set_test_settings(const char* kernels, const char* tile, const char* shared_memory_per_block);

// "forward sm80 bfloat16 128", ...: one line a compiled kernel.
std::vector<std::string> kernel_names();

}  // namespace jax_flash::cuda
