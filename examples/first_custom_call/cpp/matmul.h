// Shared by the CPU and the CUDA handler of matmul: the argument check.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

XLA_FFI_DECLARE_HANDLER_SYMBOL(MatmulCpu);
XLA_FFI_DECLARE_HANDLER_SYMBOL(MatmulCuda);

namespace first_custom_call {

namespace ffi = xla::ffi;

// A typed buffer: XLA rejects any other dtype or rank before it calls the handler.
using Matrix = ffi::Buffer<ffi::DataType::F32, 2>;

inline ffi::Error CheckMatmul(Matrix a, Matrix b, Matrix out) {
  const auto a_dims = a.dimensions(), b_dims = b.dimensions();
  const auto out_dims = out.dimensions();
  if (a_dims[1] != b_dims[0]) {
    return ffi::Error::InvalidArgument(
        "matmul: b must have as many rows as a has columns.");
  }
  if (out_dims[0] != a_dims[0] || out_dims[1] != b_dims[1]) {
    return ffi::Error::InvalidArgument(
        "matmul: the result must have the rows of a and the columns of b.");
  }
  return ffi::Error::Success();
}

}  // namespace first_custom_call
