#include "ffi_call.h"

#include <algorithm>

namespace jax_flash {
namespace {

// 1 for bool and for dtypes that no call has.
int ElementBytes(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F16:
    case ffi::DataType::BF16:
      return 2;
    case ffi::DataType::F32:
    case ffi::DataType::S32:
    case ffi::DataType::U32:
      return 4;
    case ffi::DataType::F64:
      return 8;
    default:
      return 1;
  }
}

ffi::Error Missing(const char* kind, std::string_view name) {
  return ffi::Error::InvalidArgument("jax_flash: the call has no " + std::string(kind) + " for " +
                                     std::string(name) + ".");
}

std::string Join(const std::vector<std::string>& parts, const char* separator) {
  std::string joined;
  for (size_t i = 0; i < parts.size(); ++i) joined += (i ? separator : "") + parts[i];
  return joined;
}

// The first `exact` sizes of the buffer must be those of `dims`; the others may be 1.
ffi::Error CheckBroadcastable(std::string_view name, ffi::AnyBuffer buffer, const DTypes& dtypes,
                              const Dims& dims, size_t exact) {
  const ffi::DataType dtype = buffer.element_type();
  const Dims got = DimsOf(buffer);
  bool fits = got.size() == dims.size();
  for (size_t i = 0; fits && i < dims.size(); ++i) fits = got[i] == dims[i] || (i >= exact && got[i] == 1);
  const bool is_allowed =
      std::find(dtypes.allowed.begin(), dtypes.allowed.end(), dtype) != dtypes.allowed.end();
  if (fits && is_allowed) return ffi::Error::Success();
  std::vector<std::string> allowed;
  for (ffi::DataType one : dtypes.allowed) allowed.push_back(ToString(one));
  return ffi::Error::InvalidArgument("jax_flash: " + std::string(name) + " must be broadcastable to " +
                                     ToString(dims) + " and have dtype " + Join(allowed, " or ") + ", got " +
                                     ToString(dtype) + " of shape " + ToString(got) + ".");
}

// `got`: the four sizes of the array.
PairArray ToPairArray(const void* data, ffi::DataType dtype, const Dims& got) {
  const auto stride = [&](int axis) {
    int64_t elements = got[axis] == 1 ? 0 : 1;
    for (size_t i = axis + 1; i < got.size(); ++i) elements *= std::max<int64_t>(got[i], 1);
    return elements;
  };
  return {data, *ToDType(dtype), stride(0), stride(1), stride(2), stride(3)};
}

}  // namespace

std::string ToString(const Dims& dims) {
  std::vector<std::string> sizes;
  for (int64_t size : dims) sizes.push_back(std::to_string(size));
  return '[' + Join(sizes, ", ") + ']';
}

std::string ToString(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F16:
      return "float16";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::F64:
      return "float64";
    case ffi::DataType::S32:
      return "int32";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::U32:
      return "uint32";
    case ffi::DataType::PRED:
      return "bool";
    default:
      return "dtype " + std::to_string(static_cast<int>(dtype));
  }
}

std::optional<DType> ToDType(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::F16:
      return DType::kFloat16;
    case ffi::DataType::BF16:
      return DType::kBFloat16;
    case ffi::DataType::F32:
      return DType::kFloat32;
    case ffi::DataType::F64:
      return DType::kFloat64;
    case ffi::DataType::PRED:
      return DType::kBool;
    default:
      return std::nullopt;
  }
}

Dims DimsOf(ffi::AnyBuffer buffer) { return Dims(buffer.dimensions().begin(), buffer.dimensions().end()); }

ffi::Error CheckBuffer(std::string_view name, ffi::AnyBuffer buffer, ffi::DataType dtype, const Dims& dims) {
  const Dims got = DimsOf(buffer);
  if (buffer.element_type() == dtype && got == dims) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jax_flash: " + std::string(name) + " must be " + ToString(dtype) +
                                     " of shape " + ToString(dims) + ", got " +
                                     ToString(buffer.element_type()) + " of shape " + ToString(got) + ".");
}

ffi::AnyBuffer NoBuffer() {
  static const XLA_FFI_Buffer buffer = {};
  return ffi::AnyBuffer(&buffer);
}

ffi::Error CallReader::NextArg(std::string_view name, ffi::AnyBuffer* buffer) {
  if (next_arg_ >= args_.size()) return Missing("argument", name);
  auto arg = args_.get<ffi::AnyBuffer>(next_arg_++);
  if (!arg.has_value()) return arg.error();
  *buffer = arg.value();
  return CheckAlignment(name, *buffer);
}

ffi::Error CallReader::NextResult(std::string_view name, ffi::AnyBuffer* buffer) {
  if (next_result_ >= results_.size()) return Missing("result", name);
  auto result = results_.get<ffi::AnyBuffer>(next_result_++);
  if (!result.has_value()) return result.error();
  *buffer = *result.value();
  return CheckAlignment(name, *buffer);
}

ffi::Error CallReader::TakeArg(std::string_view name, DTypes dtypes, const Dims& dims, PairArray* array) {
  ffi::AnyBuffer buffer = NoBuffer();
  RETURN_IF_ERROR(NextArg(name, &buffer));
  RETURN_IF_ERROR(CheckBroadcastable(name, buffer, dtypes, dims, 0));
  *array = ToPairArray(NonNullData(buffer), buffer.element_type(), DimsOf(buffer));
  return ffi::Error::Success();
}

ffi::Error CallReader::TakeArg(std::string_view name, DTypes dtypes, const Dims& dims, PairArrays* arrays) {
  ffi::AnyBuffer buffer = NoBuffer();
  RETURN_IF_ERROR(NextArg(name, &buffer));
  RETURN_IF_ERROR(CheckBroadcastable(name, buffer, dtypes, dims, 1));
  const Dims of_direction(buffer.dimensions().begin() + 1, buffer.dimensions().end());
  arrays->first = ToPairArray(NonNullData(buffer), buffer.element_type(), of_direction);
  arrays->direction_bytes = ElementBytes(buffer.element_type());
  for (int64_t size : of_direction) arrays->direction_bytes *= size;
  return ffi::Error::Success();
}

Dims CallReader::PeekArgDims() const {
  if (next_arg_ >= args_.size()) return {};
  auto arg = args_.get<ffi::AnyBuffer>(next_arg_);
  return arg.has_value() ? DimsOf(arg.value()) : Dims{};
}

Dims CallReader::PeekResultDims() const {
  if (next_result_ >= results_.size()) return {};
  auto result = results_.get<ffi::AnyBuffer>(next_result_);
  return result.has_value() ? DimsOf(*result.value()) : Dims{};
}

ffi::Error CallReader::CheckAllTaken() const {
  if (next_arg_ == args_.size() && next_result_ == results_.size()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(
      "jax_flash: expected " + std::to_string(next_arg_) + " arguments and " + std::to_string(next_result_) +
      " results, got " + std::to_string(args_.size()) + " and " + std::to_string(results_.size()) + ".");
}

const void* CallReader::NonNullData(ffi::AnyBuffer buffer) {
  static const char nothing = 0;
  return buffer.untyped_data() ? buffer.untyped_data() : &nothing;
}

ffi::Error CallReader::CheckAlignment(std::string_view name, ffi::AnyBuffer buffer) const {
  const int alignment = is_for_cuda() ? 16 : ElementBytes(buffer.element_type());
  const auto sizes = buffer.dimensions();
  const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  if (is_empty || reinterpret_cast<uintptr_t>(buffer.untyped_data()) % alignment == 0) {
    return ffi::Error::Success();
  }
  return ffi::Error::InvalidArgument("jax_flash: the memory of " + std::string(name) +
                                     " must be aligned to " + std::to_string(alignment) + " bytes.");
}

}  // namespace jax_flash
