// The CPU handler of grayscale.
#include "grayscale.h"

namespace first_custom_call {
namespace {

template <typename T>
void Convert(const T* image, T* gray, int64_t num_pixels) {
  for (int64_t pixel = 0; pixel < num_pixels; ++pixel) {
    gray[pixel] = Luma(image[3 * pixel], image[3 * pixel + 1], image[3 * pixel + 2]);
  }
}

ffi::Error Grayscale(ffi::AnyBuffer image, ffi::Result<ffi::AnyBuffer> gray) {
  if (ffi::Error error = CheckGrayscale(image, *gray); error.failure()) return error;
  const int64_t num_pixels = gray->element_count();
  switch (image.element_type()) {
    case ffi::DataType::U8:
      Convert(image.typed_data<uint8_t>(), gray->typed_data<uint8_t>(), num_pixels);
      return ffi::Error::Success();
    case ffi::DataType::F32:
      Convert(image.typed_data<float>(), gray->typed_data<float>(), num_pixels);
      return ffi::Error::Success();
    default:
      return UnknownImageDtype();
  }
}

}  // namespace
}  // namespace first_custom_call

// The C function that XLA calls. The binding lists the arguments that XLA passes, in
// the order of Grayscale's parameters.
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    GrayscaleCpu, first_custom_call::Grayscale,
    xla::ffi::Ffi::Bind()
        .Arg<xla::ffi::AnyBuffer>()    // image [height, width, 3]
        .Ret<xla::ffi::AnyBuffer>());  // gray [height, width]
