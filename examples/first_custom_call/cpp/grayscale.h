// Shared by the CPU and the CUDA handler of grayscale: the arithmetic of one pixel and
// the argument check.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(GrayscaleCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GrayscaleCuda);

// nvcc compiles a function with these attributes for both CPU and GPU. Other compilers
// do not know them.
#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

namespace first_custom_call {

namespace ffi = xla::ffi;

// The brightness of a pixel, with the weights of Recommendation ITU-R BT.601. Bytes use
// integer arithmetic, so that every platform gives the same result.
HOST_DEVICE inline uint8_t Luma(uint8_t red, uint8_t green, uint8_t blue) {
  return static_cast<uint8_t>((299 * red + 587 * green + 114 * blue + 500) / 1000);
}

HOST_DEVICE inline float Luma(float red, float green, float blue) {
  return 0.299f * red + 0.587f * green + 0.114f * blue;
}

// Python has already checked the arguments, with better messages. The handler checks
// again because a wrong size would access memory out of bounds, and any program can
// call the target.
inline ffi::Error CheckGrayscale(ffi::AnyBuffer image, ffi::AnyBuffer gray) {
  const auto from = image.dimensions(), to = gray.dimensions();
  if (from.size() != 3 || from[2] != 3) {
    return ffi::Error::InvalidArgument(
        "grayscale: image must have shape [height, width, 3].");
  }
  if (to.size() != 2 || to[0] != from[0] || to[1] != from[1]) {
    return ffi::Error::InvalidArgument(
        "grayscale: the result must have shape [height, width].");
  }
  if (gray.element_type() != image.element_type()) {
    return ffi::Error::InvalidArgument(
        "grayscale: image and result must have the same dtype.");
  }
  return ffi::Error::Success();
}

inline ffi::Error UnknownImageDtype() {
  return ffi::Error::InvalidArgument("grayscale: image must be uint8 or float32.");
}

}  // namespace first_custom_call
