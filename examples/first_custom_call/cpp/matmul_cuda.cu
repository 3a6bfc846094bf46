// The CUDA kernel of matmul and its handler. Each block computes one tile of the
// result, each thread one element.
#include <cuda_runtime.h>

#include "matmul.h"

namespace first_custom_call {
namespace {

constexpr int kTile = 32;

// A block walks along k. In each step its threads copy a tile of a and a tile of b to
// shared memory, one element of each per thread. Then each thread reads a row of one
// tile and a column of the other, so each element loaded from global memory is used
// kTile times.
__global__ void __launch_bounds__(kTile* kTile)
    MatmulKernel(const float* a, const float* b, float* out, int64_t m, int64_t k,
                 int64_t n) {
  __shared__ float a_tile[kTile][kTile];
  __shared__ float b_tile[kTile][kTile];
  const int64_t row = int64_t{blockIdx.y} * kTile + threadIdx.y;
  const int64_t column = int64_t{blockIdx.x} * kTile + threadIdx.x;
  float sum = 0.0f;
  for (int64_t start = 0; start < k; start += kTile) {
    const int64_t a_column = start + threadIdx.x, b_row = start + threadIdx.y;
    // Elements outside the matrices are 0, which adds nothing.
    const bool in_a = row < m && a_column < k, in_b = b_row < k && column < n;
    a_tile[threadIdx.y][threadIdx.x] = in_a ? a[row * k + a_column] : 0.0f;
    b_tile[threadIdx.y][threadIdx.x] = in_b ? b[b_row * n + column] : 0.0f;
    __syncthreads();  // the tiles are complete
    for (int i = 0; i < kTile; ++i) {
      sum += a_tile[threadIdx.y][i] * b_tile[i][threadIdx.x];
    }
    __syncthreads();  // no thread reads them any more
  }
  // A thread outside the result must not return earlier: it copies elements, too, and
  // all threads must reach __syncthreads.
  if (row < m && column < n) out[row * n + column] = sum;
}

ffi::Error Matmul(cudaStream_t stream, Matrix a, Matrix b, ffi::Result<Matrix> out) {
  if (ffi::Error error = CheckMatmul(a, b, *out); error.failure()) return error;
  const int64_t m = a.dimensions()[0], k = a.dimensions()[1], n = b.dimensions()[1];
  if (m == 0 || n == 0) return ffi::Error::Success();  // CUDA rejects an empty grid
  const dim3 block(kTile, kTile);
  const dim3 grid((n + kTile - 1) / kTile, (m + kTile - 1) / kTile);
  MatmulKernel<<<grid, block, 0, stream>>>(a.typed_data(), b.typed_data(),
                                           out->typed_data(), m, k, n);
  const cudaError_t error = cudaGetLastError();  // say, the grid is too large
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace first_custom_call

// The trait lets XLA record the call in a CUDA graph: it only launches a kernel on the
// stream.
XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulCuda, first_custom_call::Matmul,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<first_custom_call::Matrix>()   // a [m, k]
                                  .Arg<first_custom_call::Matrix>()   // b [k, n]
                                  .Ret<first_custom_call::Matrix>(),  // out [m, n]
                              {xla::ffi::Traits::kCmdBufferCompatible});
