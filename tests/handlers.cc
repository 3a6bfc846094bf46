// Tests the decoding of calls where no call from Python can reach it, or only one on a GPU. Prints a line for
// each failure; if there are any, the exit code is 1.
#include <cstdint>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "ffi_call.h"
#include "ffi_workspace.h"

namespace {

using jax_flash::AttentionParams;
using jax_flash::CallReader;
using jax_flash::Dims;
using jax_flash::Pass;
using jax_flash::Platform;
using jax_flash::Workspace;
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

struct Type {
  DataType dtype;
  Dims dims;
};

// Takes the workspace of a call that has results of these types and no others.
Error take_workspace(Platform platform, Pass pass, const AttentionParams& params, std::vector<Type> types,
                     Workspace* workspace) {
  alignas(16) static char memory[16];
  std::vector<XLA_FFI_Buffer> buffers(types.size());
  std::vector<void*> pointers;
  for (size_t i = 0; i < types.size(); ++i) {
    buffers[i] = {};
    buffers[i].struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    buffers[i].dtype = static_cast<XLA_FFI_DataType>(types[i].dtype);
    buffers[i].data = memory;
    buffers[i].rank = static_cast<int64_t>(types[i].dims.size());
    buffers[i].dims = types[i].dims.data();
    pointers.push_back(&buffers[i]);
  }
  std::vector<XLA_FFI_RetType> result_types(types.size(), XLA_FFI_RetType_BUFFER);
  XLA_FFI_Args args = {};
  XLA_FFI_Rets results = {.struct_size = XLA_FFI_Rets_STRUCT_SIZE,
                          .extension_start = nullptr,
                          .size = static_cast<int64_t>(types.size()),
                          .types = result_types.data(),
                          .rets = pointers.data()};
  CallReader call(platform, {&args, 0}, {&results, 0});
  *workspace = {};
  const Error error = TakeWorkspace(call, pass, params, /*num_directions=*/1, workspace);
  return error.failure() ? error : call.CheckAllTaken();
}

void test_workspace() {
  AttentionParams params = {};
  params.dtype = jax_flash::DType::kBFloat16;
  params.batch = 2, params.seqlen_q = 70, params.seqlen_kv = 5;
  params.num_heads = 6, params.num_kv_heads = 3, params.head_dim = params.head_dim_v = 8;
  Workspace workspace;
  const Type counter = {DataType::S32, {1}}, statistics = {DataType::F32, {2, 6, 128}};
  const Type no_key_parts = {DataType::F32, {0, 2, 70, 6, 12}},
             key_parts = {DataType::F32, {3, 2, 70, 6, 12}};
  const auto take = [&](Pass pass, const std::vector<Type>& types) {
    return take_workspace(Platform::kCuda, pass, params, types, &workspace);
  };
  const auto parts = [](int64_t number) { return Type{DataType::F32, {2, number, 16, 8}}; };
  const auto ds = [](int64_t heads) { return Type{DataType::U16, {2, heads, 70, 5}}; };
  const auto shared_ds = [](int64_t heads) { return Type{DataType::U16, {heads, 128, 128}}; };
  const Type no_shared_ds = shared_ds(0);
  const auto take_sums = [&](int64_t dq_rows, int64_t dk_parts, int64_t ds_heads = 0) {
    const Type dq = {DataType::F32, {2, dq_rows, 6, 8}};
    return take(Pass::kBackward, {ds(ds_heads), no_shared_ds, counter, statistics, statistics, dq,
                                  parts(dk_parts), parts(dk_parts)});
  };

  expect(take_workspace(Platform::kCpu, Pass::kBackward, params, {}, &workspace).success(),
         "the CPU has no workspace");
  expect(take(Pass::kForward, {counter, no_key_parts}).success() && workspace.tile_counter.data, "forward");
  expect(take(Pass::kForward, {counter, key_parts}).success() && workspace.key_parts.dims[0] == 3,
         "forward in parts");
  expect(take(Pass::kForward, {counter, {DataType::F32, {3, 2, 70, 6, 8}}}).failure(), "parts without sums");
  expect(take(Pass::kForward, {counter}).failure(), "forward without an array of parts");
  expect(take(Pass::kBackwardBias, {counter, statistics, statistics}).success(), "gradient of the bias");
  expect(take_sums(80, 0).success() && !workspace.leaves_dq, "sums of dq");
  expect(take_sums(0, 0).success() && workspace.leaves_dq, "no sums of dq");
  expect(take_sums(80, 6).success() && workspace.dv_parts.dims[1] == 6, "parts of the query heads");
  expect(take_sums(80, 0, 6).success() && workspace.ds.dims[1] == 6, "gradients of the logits");
  expect(take_sums(80, 0, 3).message().find("of shape [2, 0, 70, 5]") != std::string::npos,
         "gradients of some logits");
  const auto take_shared = [&](int64_t heads) {
    return take(Pass::kBackward, {ds(0),
                                  shared_ds(heads),
                                  counter,
                                  statistics,
                                  statistics,
                                  {DataType::F32, {2, 0, 6, 8}},
                                  parts(0),
                                  parts(0)});
  };
  expect(take_shared(4).success() && workspace.shared_ds.dims[0] == 4, "ds of some heads for dq");
  expect(take_shared(3).message().find("of shape [0, 128, 128]") != std::string::npos,
         "ds of a part of a group");
  params.seqlen_q = 150;
  const Type more_statistics = {DataType::F32, {2, 6, 256}};
  expect(take(Pass::kBackward, {{DataType::U16, {2, 0, 150, 5}},
                                {DataType::U16, {4, 128, 256}},
                                counter,
                                more_statistics,
                                more_statistics,
                                {DataType::F32, {2, 0, 6, 8}},
                                parts(0),
                                parts(0)})
             .success(),
         "ds of some heads, keys first");
  params.seqlen_q = 70;
  for (const int64_t number : {2, 4, 12}) {
    const std::string message = take_sums(80, number).message();
    expect(message.find("dk_parts must be float32 of shape [2, 0, 16, 8]") != std::string::npos,
           "parts that do not divide the query heads of each key head: " + message);
  }
  const std::string message = take_sums(16, 0).message();
  expect(message.find("dq_accum must be float32 of shape [2, 80, 6, 8]") != std::string::npos,
         "sums of some rows of dq: " + message);
  AttentionParams no_heads = params;
  no_heads.num_heads = no_heads.num_kv_heads = 0;
  const std::string no_heads_message = take_workspace(Platform::kCuda, Pass::kBackward, no_heads,
                                                      {ds(0),
                                                       no_shared_ds,
                                                       counter,
                                                       {DataType::F32, {2, 0, 128}},
                                                       {DataType::F32, {2, 0, 128}},
                                                       {DataType::F32, {2, 80, 0, 8}},
                                                       parts(3),
                                                       parts(3)},
                                                      &workspace)
                                           .message();
  expect(no_heads_message.find("dk_parts must be float32 of shape [2, 0, 16, 8]") != std::string::npos,
         "parts of no heads: " + no_heads_message);
  params.options.deterministic = true;
  expect(take_sums(80, 0).success() && !workspace.leaves_dq, "sums of dq in an order");

  // A mask [N, 1, S]. 70 queries are 2 blocks, 5 keys are 1.
  params.mask = {&params, jax_flash::DType::kBool, 0, 5, 0, 1};
  const Type visibility = {DataType::U8, {2, 6, 2, 1}}, lists = {DataType::U32, {2, 6, 2 * 1 + 2 + 1}};
  const Type of_queries = {DataType::U32, {1, 6, 1, 2}}, of_keys = {DataType::U32, {1, 6, 5, 2}};
  expect(take(Pass::kForward, {counter, no_key_parts, visibility, lists, of_queries}).success(),
         "mask, forward");
  const Type no_dq = {DataType::F32, {2, 0, 6, 8}};
  expect(take(Pass::kBackward, {ds(0), no_shared_ds, counter, statistics, statistics, no_dq, parts(0),
                                parts(0), visibility, lists, of_queries, of_keys})
             .success(),
         "mask, backward");
  expect(take(Pass::kForward, {counter, no_key_parts, visibility, lists}).failure(),
         "a mask without its bits");
}

void test_workspace_of_planes() {
  AttentionParams params = {};
  params.dtype = jax_flash::DType::kFloat32;
  params.batch = 2, params.seqlen_q = 70, params.seqlen_kv = 5;
  params.num_heads = 6, params.num_kv_heads = 3, params.head_dim = params.head_dim_v = 8;
  Workspace workspace;
  const auto take_backward = [&](int64_t planes, int64_t dq_rows) {
    const Type statistics = {DataType::F32, {2, 6, 128}}, parts = {DataType::F32, {2, 0, 16, 8}};
    return take_workspace(Platform::kCuda, Pass::kBackward, params,
                          {{DataType::S32, {planes, 2, 3, jax_flash::kPlaneScales + 6 * 8}},
                           {DataType::U16, {2 * planes, 70, 6, 8}},
                           {DataType::U16, {2 * planes, 5, 3, 8}},
                           {DataType::U16, {2 * planes, 5, 3, 8}},
                           {DataType::U16, {2 * planes, 70, 6, 8}},
                           {DataType::F32, {3 * planes, 2, 6, 128}},
                           {DataType::F32, {2 * planes, dq_rows, 6, 8}},
                           {DataType::S32, {1}},
                           {DataType::S32, {1}},
                           statistics,
                           statistics,
                           parts,
                           parts},
                          &workspace);
  };
  expect(take_backward(0, 80).success() && !workspace.leaves_dq, "no planes");
  expect(take_backward(1, 80).success() && !workspace.leaves_dq, "planes with sums of dq");
  expect(take_backward(1, 0).success() && workspace.leaves_dq, "planes without sums of dq");
  expect(take_backward(1, 16).failure(), "planes with sums of some rows of dq");

  params.options.precision = 2;
  const auto take_forward = [&](int64_t planes) {
    return take_workspace(Platform::kCuda, Pass::kForward, params,
                          {{DataType::S32, {planes, 2, 3, jax_flash::kPlaneScales + 6 * 8}},
                           {DataType::U16, {2 * planes, 70, 6, 8}},
                           {DataType::U16, {2 * planes, 5, 3, 8}},
                           {DataType::U16, {2 * planes, 5, 3, 8}},
                           {DataType::F32, {0, 2, 70, 6, 12}}},
                          &workspace);
  };
  expect(take_forward(0).success(), "no planes at \"highest\"");
  expect(take_forward(2).success(), "two planes");
  expect(take_forward(1).failure(), "one plane at \"highest\"");
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
  test_workspace();
  test_workspace_of_planes();
  test_exceptions();
  return failures > 0;
}
