// The CUDA kernel of grayscale and its handler. Each thread computes one pixel.
#include <cuda_runtime.h>

#include "grayscale.h"

namespace first_custom_call {
namespace {

// A warp of 32 threads covers part of a row, so its loads and stores are coalesced. 8
// rows make 256 threads.
constexpr int kBlockWidth = 32;
constexpr int kBlockHeight = 8;

template <typename T>
__global__ void ConvertKernel(const T* image, T* gray, int64_t height, int64_t width) {
  const int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= height || column >= width) return;  // outside the image
  const int64_t pixel = row * width + column;
  gray[pixel] = Luma(image[3 * pixel], image[3 * pixel + 1], image[3 * pixel + 2]);
}

// Enqueues the kernel on XLA's stream and does not wait for it. Image and gray are
// device pointers.
template <typename T>
ffi::Error Launch(cudaStream_t stream, const T* image, T* gray, int64_t height,
                  int64_t width) {
  const bool is_empty = height == 0 || width == 0;  // CUDA rejects an empty grid
  if (is_empty) return ffi::Error::Success();
  const dim3 block(kBlockWidth, kBlockHeight);
  const dim3 grid((width + kBlockWidth - 1) / kBlockWidth,
                  (height + kBlockHeight - 1) / kBlockHeight);
  ConvertKernel<<<grid, block, 0, stream>>>(image, gray, height, width);
  const cudaError_t error = cudaGetLastError();  // say, the grid is too large
  if (error != cudaSuccess) return ffi::Error::Internal(cudaGetErrorString(error));
  return ffi::Error::Success();
}

ffi::Error Grayscale(cudaStream_t stream, ffi::AnyBuffer image,
                     ffi::Result<ffi::AnyBuffer> gray) {
  if (ffi::Error error = CheckGrayscale(image, *gray); error.failure()) return error;
  const int64_t height = image.dimensions()[0], width = image.dimensions()[1];
  switch (image.element_type()) {
    case ffi::DataType::U8:
      return Launch(stream, image.typed_data<uint8_t>(), gray->typed_data<uint8_t>(),
                    height, width);
    case ffi::DataType::F32:
      return Launch(stream, image.typed_data<float>(), gray->typed_data<float>(),
                    height, width);
    default:
      return UnknownImageDtype();
  }
}

}  // namespace
}  // namespace first_custom_call

// The trait lets XLA record the call in a CUDA graph: it only launches a kernel on the
// stream.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GrayscaleCuda, first_custom_call::Grayscale,
    xla::ffi::Ffi::Bind()
        .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
        .Arg<xla::ffi::AnyBuffer>()   // image [height, width, 3]
        .Ret<xla::ffi::AnyBuffer>(),  // gray [height, width]
    {xla::ffi::Traits::kCmdBufferCompatible});
