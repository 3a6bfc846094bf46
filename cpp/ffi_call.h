// One XLA FFI call: its arguments, results and attributes, each checked as it is read. A program may come
// from a file, so its ranks, dtypes and sizes are not to be trusted.
#pragma once

#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

namespace ffi = xla::ffi;

#define RETURN_IF_ERROR(expression)                                               \
  do {                                                                            \
    if (::xla::ffi::Error error_ = (expression); error_.failure()) return error_; \
  } while (false)

// `handler` with its exceptions turned into errors: one that left a handler would end the process.
template <auto handler>
inline constexpr auto kGuarded = nullptr;
template <typename... Args, ffi::Error (*handler)(Args...)>
inline constexpr auto kGuarded<handler> = [](Args... args) -> ffi::Error {
  try {
    return handler(args...);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_flash: the host is out of memory.");
  } catch (const std::exception& exception) {
    return ffi::Error::Internal(std::string("jax_flash: ") + exception.what());
  } catch (...) {
    return ffi::Error::Internal("jax_flash: an exception of an unknown type.");
  }
};

// The kernels that a call is for. Those of CUDA copy 16 bytes at a time, and take workspace as extra results.
enum class Platform { kCpu, kCuda };

using Dims = std::vector<int64_t>;

std::string ToString(const Dims& dims);
std::string ToString(ffi::DataType dtype);

// Null for integers: their dtype is fixed, and no kernel asks for it.
std::optional<DType> ToDType(ffi::DataType dtype);

Dims DimsOf(ffi::AnyBuffer buffer);

ffi::Error CheckBuffer(std::string_view name, ffi::AnyBuffer buffer, ffi::DataType dtype, const Dims& dims);

// A buffer to assign to: ffi::AnyBuffer has no default constructor.
ffi::AnyBuffer NoBuffer();

// The dtypes that an array may have.
struct DTypes {
  std::vector<ffi::DataType> allowed;

  DTypes(ffi::DataType only) : allowed{only} {}
  DTypes(std::initializer_list<ffi::DataType> allowed) : allowed(allowed) {}
};

// Reads arguments and results in the order of the call, and checks the alignment of each.
class CallReader {
 public:
  CallReader(Platform platform, ffi::RemainingArgs args, ffi::RemainingRets results)
      : platform_(platform), args_(args), results_(results) {}

  bool is_for_cuda() const { return platform_ == Platform::kCuda; }

  // An array of any dtype and shape.
  ffi::Error NextArg(std::string_view name, ffi::AnyBuffer* buffer);
  ffi::Error NextResult(std::string_view name, ffi::AnyBuffer* buffer);

  // An array of this dtype and shape. An argument's pointer is never null, which would mean that the call
  // does not have it: some versions of XLA have no memory for an empty array.
  template <typename T>
  ffi::Error TakeArg(std::string_view name, ffi::DataType dtype, const Dims& dims, const T** data) {
    ffi::AnyBuffer buffer = NoBuffer();
    RETURN_IF_ERROR(NextArg(name, &buffer));
    RETURN_IF_ERROR(CheckBuffer(name, buffer, dtype, dims));
    *data = static_cast<const T*>(NonNullData(buffer));
    return ffi::Error::Success();
  }
  template <typename T>
  ffi::Error TakeResult(std::string_view name, ffi::DataType dtype, const Dims& dims, T** data) {
    ffi::AnyBuffer buffer = NoBuffer();
    RETURN_IF_ERROR(NextResult(name, &buffer));
    RETURN_IF_ERROR(CheckBuffer(name, buffer, dtype, dims));
    *data = static_cast<T*>(buffer.untyped_data());
    return ffi::Error::Success();
  }

  // An argument broadcastable to the four sizes `dims`.
  ffi::Error TakeArg(std::string_view name, DTypes dtypes, const Dims& dims, PairArray* array);

  // An argument with the first size of `dims`, the number of directions, and broadcastable to the four that
  // follow.
  ffi::Error TakeArg(std::string_view name, DTypes dtypes, const Dims& dims, PairArrays* arrays);

  // The shape of the next argument or result, without taking it; empty if there is none.
  Dims PeekArgDims() const;
  Dims PeekResultDims() const;

  ffi::Error CheckAllTaken() const;

 private:
  static const void* NonNullData(ffi::AnyBuffer buffer);
  ffi::Error CheckAlignment(std::string_view name, ffi::AnyBuffer buffer) const;

  Platform platform_;
  ffi::RemainingArgs args_;
  ffi::RemainingRets results_;
  size_t next_arg_ = 0;
  size_t next_result_ = 0;
};

template <typename T>
ffi::Error ReadAttribute(ffi::Dictionary attributes, std::string_view name, T* value) {
  auto attribute = attributes.get<T>(name);
  if (!attribute.has_value()) {
    return ffi::Error::InvalidArgument("jax_flash: attribute " + std::string(name) +
                                       " is missing or has the wrong type.");
  }
  *value = attribute.value();
  return ffi::Error::Success();
}

}  // namespace jax_flash
