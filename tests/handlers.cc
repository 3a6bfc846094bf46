// What cpp/ffi_call.h does that no call from Python can reach. Prints a line for each failure and then exits
// with 1.
#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>

#include "ffi_call.h"

namespace {

using jax_flash::CallReader;
using jax_flash::Platform;
using xla::ffi::DataType;
using xla::ffi::Error;
using xla::ffi::ErrorCode;

int failures = 0;

void expect(bool ok, const std::string& what) {
  if (!ok) std::printf("%s\n", what.c_str());
  failures += !ok;
}

// Reads a float16 array at `data`, as an argument or as a result.
Error read(Platform platform, bool is_result, void* data, int64_t size) {
  XLA_FFI_Buffer buffer = {};
  buffer.struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
  buffer.dtype = XLA_FFI_DataType_F16;
  buffer.data = data;
  buffer.rank = 1;
  buffer.dims = &size;
  void* buffers[] = {&buffer};
  XLA_FFI_ArgType arg_type = XLA_FFI_ArgType_BUFFER;
  XLA_FFI_RetType result_type = XLA_FFI_RetType_BUFFER;
  XLA_FFI_Args args = {};
  XLA_FFI_Rets results = {};
  if (is_result) {
    results = {.struct_size = XLA_FFI_Rets_STRUCT_SIZE,
               .extension_start = nullptr,
               .size = 1,
               .types = &result_type,
               .rets = buffers};
  } else {
    args = {.struct_size = XLA_FFI_Args_STRUCT_SIZE,
            .extension_start = nullptr,
            .size = 1,
            .types = &arg_type,
            .args = buffers};
  }
  CallReader call(platform, {&args, 0}, {&results, 0});
  if (is_result) {
    void* to = nullptr;
    return call.TakeResult("dq", DataType::F16, {size}, &to);
  }
  const void* from = nullptr;
  return call.TakeArg("query", DataType::F16, {size}, &from);
}

void test_alignment() {
  alignas(16) static char memory[64];
  for (bool is_result : {false, true}) {
    const std::string name = is_result ? "dq" : "query";
    for (int offset = 0; offset < 16; ++offset) {
      for (auto [platform, alignment] : {std::pair{Platform::kCuda, 16}, {Platform::kCpu, 2}}) {
        const Error error = read(platform, is_result, memory + offset, 4);
        const std::string what = name + " at offset " + std::to_string(offset) + ": " + error.message();
        expect(error.failure() == (offset % alignment != 0), what);
        if (!error.failure()) continue;
        expect(error.errc() == ErrorCode::kInvalidArgument, what);
        expect(error.message().find(name + " must be aligned to " + std::to_string(alignment)) !=
                   std::string::npos,
               what);
      }
    }
    expect(read(Platform::kCuda, is_result, memory + 1, 0).success(), "an empty array may have any address");
    expect(read(Platform::kCuda, is_result, nullptr, 0).success(), "an empty array may have no memory");
  }
}

Error handler(int kind) {
  if (kind == 1) throw std::bad_alloc();
  if (kind == 2) throw std::runtime_error("what went wrong");
  if (kind == 3) throw 3;
  return kind == 4 ? Error::InvalidArgument("its own") : Error::Success();
}

void test_exceptions() {
  const auto guarded = jax_flash::kGuarded<handler>;
  expect(guarded(0).success(), "a handler that succeeds");
  expect(guarded(1).errc() == ErrorCode::kResourceExhausted, "bad_alloc: " + guarded(1).message());
  expect(guarded(2).errc() == ErrorCode::kInternal, "an exception: " + guarded(2).message());
  expect(guarded(2).message() == "jax_flash: what went wrong", "an exception: " + guarded(2).message());
  expect(guarded(3).errc() == ErrorCode::kInternal, "an int that was thrown: " + guarded(3).message());
  expect(guarded(4).message() == "its own", "an error of the handler: " + guarded(4).message());
}

}  // namespace

int main() {
  test_alignment();
  test_exceptions();
  return failures > 0;
}
