// The CUDA kernel of matmul and its handler. A block computes one tile of the result, each of its threads one
// element.
#include <cuda_runtime.h>

#include "matmul.h"

namespace first_custom_call {
namespace {

constexpr int kTile = 32;

// The block walks along k. In each step its threads copy a tile of a and a tile of b to shared memory, one
// element of each per thread; then each thread reads a row of the one and a column of the other there. So
// each element that is read from global memory is used kTile times.
__global__ void __launch_bounds__(kTile* kTile)
    MatmulKernel(const float* a, const float* b, float* out, int64_t m, int64_t k, int64_t n) {
  __shared__ float a_tile[kTile][kTile];
  __shared__ float b_tile[kTile][kTile];
  const int64_t row = int64_t{blockIdx.y} * kTile + threadIdx.y;
  const int64_t column = int64_t{blockIdx.x} * kTile + threadIdx.x;
  float sum = 0.0f;
  for (int64_t start = 0; start < k; start += kTile) {
    const int64_t a_column = start + threadIdx.x, b_row = start + threadIdx.y;
    // What lies outside the matrices counts as 0, which adds nothing.
    a_tile[threadIdx.y][threadIdx.x] = row < m && a_column < k ? a[row * k + a_column] : 0.0f;
    b_tile[threadIdx.y][threadIdx.x] = b_row < k && column < n ? b[b_row * n + column] : 0.0f;
    __syncthreads();  // the tiles are complete
    for (int i = 0; i < kTile; ++i) sum += a_tile[threadIdx.y][i] * b_tile[i][threadIdx.x];
    __syncthreads();  // nobody reads them any more
  }
  // Not earlier: a thread outside the result also copies elements, and all threads must meet at
  // __syncthreads.
  if (row < m && column < n) out[row * n + column] = sum;
}

ffi::Error Matmul(cudaStream_t stream, Matrix a, Matrix b, ffi::Result<Matrix> out) {
  if (ffi::Error error = CheckMatmul(a, b, *out); error.failure()) return error;
  const int64_t m = a.dimensions()[0], k = a.dimensions()[1], n = b.dimensions()[1];
  if (m == 0 || n == 0) return ffi::Error::Success();  // CUDA refuses a grid without blocks
  const dim3 block(kTile, kTile);
  const dim3 grid((n + kTile - 1) / kTile, (m + kTile - 1) / kTile);
  MatmulKernel<<<grid, block, 0, stream>>>(a.typed_data(), b.typed_data(), out->typed_data(), m, k, n);
  const cudaError_t error = cudaGetLastError();  // of the launch: a grid that is too large, say
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace first_custom_call

// The trait lets XLA record the call in a CUDA graph: it does nothing but launch a kernel on the stream.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulCuda, first_custom_call::Matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<first_custom_call::Matrix>()   // a [m, k]
                                  .Arg<first_custom_call::Matrix>()   // b [k, n]
                                  .Ret<first_custom_call::Matrix>(),  // out [m, n]
                              {xla::ffi::Traits::kCmdBufferCompatible});
