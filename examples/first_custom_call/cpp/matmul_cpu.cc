// The CPU handler of matmul.
#include <algorithm>

#include "matmul.h"

namespace first_custom_call {
namespace {

ffi::Error Matmul(Matrix a, Matrix b, ffi::Result<Matrix> out) {
  if (ffi::Error error = CheckMatmul(a, b, *out); error.failure()) return error;
  const int64_t m = a.dimensions()[0], k = a.dimensions()[1], n = b.dimensions()[1];
  const float *a_data = a.typed_data(), *b_data = b.typed_data();
  float* out_data = out->typed_data();
  std::fill_n(out_data, m * n, 0.0f);  // XLA does not clear the result
  for (int64_t row = 0; row < m; ++row) {
    // The innermost loop reads and writes contiguous rows, which the compiler
    // vectorizes.
    for (int64_t i = 0; i < k; ++i) {
      const float a_value = a_data[row * k + i];
      for (int64_t column = 0; column < n; ++column) {
        out_data[row * n + column] += a_value * b_data[i * n + column];
      }
    }
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace first_custom_call

XLA_FFI_DEFINE_HANDLER_SYMBOL(MatmulCpu, first_custom_call::Matmul,
                              xla::ffi::Ffi::Bind()
                                  .Arg<first_custom_call::Matrix>()    // a [m, k]
                                  .Arg<first_custom_call::Matrix>()    // b [k, n]
                                  .Ret<first_custom_call::Matrix>());  // out [m, n]
