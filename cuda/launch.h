// Launching kernels: what a launcher knows of the device, and how a launch went.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace jax_flash::cuda {

// Which tile tests ask for: that of short or long sequences, or of two heads; in decoding, single parts, or
// as many as a thread block can merge (kLong).
enum class ForcedTile { kNone, kShort, kLong, kTwoHeads };

struct LaunchContext {
  cudaStream_t stream;
  int compute_capability;  // 90 for 9.0
  int multiprocessors;
  int shared_memory_per_sm;     // bytes
  int shared_memory_per_block;  // bytes, with the opt-in
  ForcedTile forced_tile;
};

// How a launch went. not_served: the kernel does not do what is asked, or not on this card, for example
// because it needs more shared memory; another kernel may. That is not a CUDA error.
class [[nodiscard]] Status {
 public:
  Status(cudaError_t error = cudaSuccess) : error_(error) {}
  static Status not_served() {
    Status status;
    status.is_served_ = false;
    return status;
  }

  bool is_served() const { return is_served_; }
  bool failed() const { return !is_served_ || error_ != cudaSuccess; }
  cudaError_t error() const { return error_; }  // where is_served()

 private:
  cudaError_t error_;
  bool is_served_ = true;
};

// Can `kernel` be launched with so many blocks and so much dynamic shared memory? Allows it that much.
template <class... Parameters>
Status allow_launch(void (*kernel)(Parameters...), int64_t blocks, int shared_bytes,
                    const LaunchContext& context) {
  if (shared_bytes > context.shared_memory_per_block) return Status::not_served();
  if (blocks > std::numeric_limits<int32_t>::max()) return cudaErrorInvalidValue;
  if (shared_bytes <= 48 * 1024) return cudaSuccess;
  // Once for each device would do, but needs a table of devices; this takes half a microsecond.
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// Launches `kernel` on a one-dimensional grid (the other dimensions are limited to 65,535) with
// `shared_bytes` of dynamic shared memory, and with an attribute, if not null. An empty grid launches
// nothing.
template <class... Parameters>
Status launch_with(cudaLaunchAttribute* attribute, void (*kernel)(Parameters...), int64_t blocks, int threads,
                   int shared_bytes, const LaunchContext& context, const Parameters&... parameters) {
  if (blocks == 0) return cudaSuccess;
  Status status = allow_launch(kernel, blocks, shared_bytes, context);
  if (!status.failed()) {
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config.stream = context.stream;
    config.attrs = attribute;
    config.numAttrs = attribute ? 1 : 0;
    status = cudaLaunchKernelEx(&config, kernel, parameters...);
  }
  if (status.is_served() && status.failed()) cudaGetLastError();  // or CUDA's next caller would get the error
  return status;
}

template <class... Parameters>
Status launch(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
              const LaunchContext& context, const Parameters&... parameters) {
  return launch_with(nullptr, kernel, blocks, threads, shared_bytes, context, parameters...);
}

// Like launch, but on 9.0 and newer the kernel may start while the one before it on the stream ends. A block
// calls ptx::wait_for_grid_before() before one of its threads reads what that kernel writes, or writes global
// memory. A block that does neither need not wait, but one block must, or this grid, and what follows on the
// stream, might end before that kernel. A kernel that is launched early waits before it lets the next one
// start, which may therefore read what kernels before wrote. Behind a kernel of XLA's that gains nothing:
// those let none start early.
template <class... Parameters>
Status launch_early(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
                    const LaunchContext& context, const Parameters&... parameters) {
  // Code for older cards, which runs on newer ones too, does not wait.
  cudaFuncAttributes compiled;
  if (const cudaError_t error = cudaFuncGetAttributes(&compiled, kernel); error != cudaSuccess) {
    cudaGetLastError();  // as in launch_with
    return error;
  }
  if (context.compute_capability < 90 || compiled.ptxVersion < 90) {
    return launch(kernel, blocks, threads, shared_bytes, context, parameters...);
  }
  cudaLaunchAttribute may_start_early = {};
  may_start_early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  may_start_early.val.programmaticStreamSerializationAllowed = 1;
  return launch_with(&may_start_early, kernel, blocks, threads, shared_bytes, context, parameters...);
}

// Like launch, in clusters of `cluster_blocks` blocks. More than one need compute capability 9.0.
template <class... Parameters>
Status launch_clusters(void (*kernel)(Parameters...), int64_t clusters, int cluster_blocks, int threads,
                       int shared_bytes, const LaunchContext& context, const Parameters&... parameters) {
  cudaLaunchAttribute in_clusters = {};
  in_clusters.id = cudaLaunchAttributeClusterDimension;
  in_clusters.val.clusterDim = {static_cast<unsigned>(cluster_blocks), 1, 1};
  return launch_with(cluster_blocks > 1 ? &in_clusters : nullptr, kernel, cluster_blocks * clusters, threads,
                     shared_bytes, context, parameters...);
}

// Of the shared memory of a multiprocessor, the system takes so much for each thread block.
inline constexpr int kSystemBytes = 1024;

// How many thread blocks of `shared_bytes` fit on a multiprocessor, if registers leave room for `most`.
inline int blocks_that_fit(int most, int shared_bytes, const LaunchContext& context) {
  if (shared_bytes > context.shared_memory_per_block) return 0;
  return std::min(most, context.shared_memory_per_sm / (shared_bytes + kSystemBytes));
}

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace jax_flash::cuda
