// The FFI handlers' entry to the kernels: chooses and launches those of one call. Plain C++.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <vector>

#include "params.h"

namespace jax_flash::cuda {

// Returns an empty string on success, else a sentence that says what is not supported or what CUDA reported.
// The handlers must have checked all sizes. Nothing synchronises.
std::string run_forward(const ForwardParams& params, cudaStream_t stream, int device);
std::string run_backward(const BackwardParams& params, cudaStream_t stream, int device);
std::string run_tangent(const TangentParams& params, cudaStream_t stream, int device);
std::string run_backward_tangent(const BackwardTangentParams& params, cudaStream_t stream, int device);
std::string run_backward_bias(const BackwardParams& params, cudaStream_t stream, int device);

// Lets tests run the kernels of other cards: overrides the environment variables JAX_FLASH_KERNELS,
// JAX_FLASH_TILE and JAX_FLASH_SHARED_MEMORY_PER_BLOCK, which are read when the library is loaded. A null
// pointer restores the environment's value.
void set_test_settings(const char* kernels, const char* tile, const char* shared_memory_per_block);

// The rows of kernels.cmake, such as "forward sm80 bfloat16 128".
std::vector<const char*> kernel_names();

}  // namespace jax_flash::cuda
