// What the kernels' launchers need of CUDA's runtime: a device with the limits of an A100 or an H200. Of the
// latter's multiprocessors there are few, so that small calls have more tiles than that.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdlib>
#include <cstring>

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
struct cudaFuncAttributes {
  int ptxVersion;
};
enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum cudaDriverEntryPointFlags { cudaEnableDefault };

inline cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "" : "invalid value";
}
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}
template <class Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, Kernel*) {
  return attributes->ptxVersion = 90, cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               const Parameters&... parameters) {
  const bool in_pairs = config->numAttrs == 1 && config->attrs->id == cudaLaunchAttributeClusterDimension;
  emulator::launch(
      config->gridDim.x, static_cast<int>(config->blockDim.x), static_cast<int>(config->dynamicSmemBytes),
      [&] { kernel(parameters...); }, in_pairs ? 2 : 1);
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  static const char* const capability = std::getenv("JAX_FLASH_EMULATE");
  constexpr int kA100[] = {8, 0, 108, 164 * 1024, 163 * 1024}, kH200[] = {9, 0, 4, 228 * 1024, 227 * 1024};
  const bool is_hopper = capability && std::strcmp(capability, "90") == 0;
  return *value = (is_hopper ? kH200 : kA100)[attribute], cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t) {
  std::memset(to, byte, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned,
                                                    cudaDriverEntryPointFlags,
                                                    cudaDriverEntryPointQueryResult* found) {
  *function = reinterpret_cast<void*>(encode_tensor_map);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
