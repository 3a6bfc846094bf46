// From an XLA FFI call to ForwardParams and BackwardParams, with every rank, dtype, dimension and option
// checked: the sizes of a deserialised program are not to be trusted. Shared by the CPU and the CUDA
// handlers.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "params.h"
#include "xla/ffi/api/ffi.h"

namespace jax_flash {

namespace ffi = xla::ffi;

#define RETURN_IF_ERROR(expression)                                               \
  do {                                                                            \
    if (::xla::ffi::Error error_ = (expression); error_.failure()) return error_; \
  } while (false)

// An exception that left a handler would end the process: what `handler` throws becomes an error.
template <auto handler>
inline constexpr auto kGuarded = nullptr;
template <typename... Args, ffi::Error (*handler)(Args...)>
inline constexpr auto kGuarded<handler> = [](Args... args) -> ffi::Error {
  try {
    return handler(args...);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jax_flash: the host has no memory left.");
  } catch (const std::exception& exception) {
    return ffi::Error::Internal(std::string("jax_flash: ") + exception.what());
  } catch (...) {
    return ffi::Error::Internal("jax_flash: an exception of an unknown type.");
  }
};

using Dims = std::vector<int64_t>;

// The dtypes that an operand may have.
struct DTypes {
  std::vector<ffi::DataType> allowed;

  DTypes(ffi::DataType only) : allowed{only} {}
  DTypes(std::initializer_list<ffi::DataType> allowed) : allowed(allowed) {}
};

inline std::string ToString(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) text += (i ? ", " : "") + std::to_string(dims[i]);
  return text + "]";
}

inline std::string ToString(ffi::DataType dtype) {
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
    case ffi::DataType::U32:
      return "uint32";
    case ffi::DataType::PRED:
      return "bool";
    default:
      return "dtype " + std::to_string(static_cast<int>(dtype));
  }
}

// Of the dtypes that a call may have; 1 for bool and all others.
inline int ElementBytes(ffi::DataType dtype) {
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

inline Dims DimsOf(ffi::AnyBuffer buffer) {
  return Dims(buffer.dimensions().begin(), buffer.dimensions().end());
}

inline ffi::Error CheckBuffer(std::string_view name, ffi::AnyBuffer buffer, ffi::DataType dtype,
                              const Dims& dims) {
  const Dims got = DimsOf(buffer);
  if (buffer.element_type() == dtype && got == dims) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jax_flash: " + std::string(name) + " must be " + ToString(dtype) +
                                     " of shape " + ToString(dims) + ", got " +
                                     ToString(buffer.element_type()) + " of shape " + ToString(got) + ".");
}

inline std::optional<DType> ToDType(ffi::DataType dtype) {
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

// Which kernels a call is for. Those of CUDA copy 16 bytes at once, and have results of their own, as
// workspace.
enum class Platform { kCpu, kCuda };

// The arguments and results of one call, taken in order, each checked as it is taken.
class CallReader {
 public:
  CallReader(Platform platform, ffi::RemainingArgs args, ffi::RemainingRets results)
      : platform_(platform), args_(args), results_(results) {}

  bool is_for_cuda() const { return platform_ == Platform::kCuda; }

  ffi::Error NextArg(std::string_view name, ffi::AnyBuffer* buffer) {
    if (next_arg_ >= args_.size()) return Missing("argument", name);
    auto arg = args_.get<ffi::AnyBuffer>(next_arg_++);
    if (!arg.has_value()) return arg.error();
    *buffer = arg.value();
    return CheckAlignment(name, *buffer);
  }

  template <typename T>
  ffi::Error TakeArg(std::string_view name, ffi::DataType dtype, const Dims& dims, const T** data) {
    ffi::AnyBuffer buffer(nullptr_buffer());
    RETURN_IF_ERROR(NextArg(name, &buffer));
    RETURN_IF_ERROR(CheckBuffer(name, buffer, dtype, dims));
    *data = static_cast<const T*>(DataOf(buffer));
    return ffi::Error::Success();
  }

  ffi::Error TakeArg(std::string_view name, DTypes dtypes, const Dims& dims, PairArray* array) {
    ffi::AnyBuffer buffer(nullptr_buffer());
    RETURN_IF_ERROR(NextArg(name, &buffer));
    const Dims got = DimsOf(buffer);
    const auto fits = [](int64_t size, int64_t full) { return size == full || size == 1; };
    if (std::find(dtypes.allowed.begin(), dtypes.allowed.end(), buffer.element_type()) ==
            dtypes.allowed.end() ||
        got.size() != dims.size() || !std::equal(got.begin(), got.end(), dims.begin(), fits)) {
      return ffi::Error::InvalidArgument("jax_flash: " + std::string(name) + " must be broadcastable to " +
                                         ToString(dims) + " and of a dtype that it may have, got " +
                                         ToString(buffer.element_type()) + " of shape " + ToString(got) +
                                         ".");
    }
    const auto stride = [&](int axis) {
      int64_t elements = got[axis] == 1 ? 0 : 1;
      for (size_t i = axis + 1; i < got.size(); ++i) elements *= std::max<int64_t>(got[i], 1);
      return elements;
    };
    *array = {DataOf(buffer), *ToDType(buffer.element_type()), stride(0), stride(1), stride(2), stride(3)};
    return ffi::Error::Success();
  }

  ffi::Error NextResult(std::string_view name, ffi::AnyBuffer* buffer) {
    if (next_result_ >= results_.size()) return Missing("result", name);
    auto result = results_.get<ffi::AnyBuffer>(next_result_++);
    if (!result.has_value()) return result.error();
    *buffer = *result.value();
    return CheckAlignment(name, *buffer);
  }

  template <typename T>
  ffi::Error TakeResult(std::string_view name, ffi::DataType dtype, const Dims& dims, T** data) {
    ffi::AnyBuffer buffer(nullptr_buffer());
    RETURN_IF_ERROR(NextResult(name, &buffer));
    RETURN_IF_ERROR(CheckBuffer(name, buffer, dtype, dims));
    *data = static_cast<T*>(buffer.untyped_data());
    return ffi::Error::Success();
  }

  ffi::Error CheckAllTaken() const {
    if (next_arg_ == args_.size() && next_result_ == results_.size()) return ffi::Error::Success();
    return ffi::Error::InvalidArgument("jax_flash: expected " + std::to_string(next_arg_) +
                                       " arguments and " + std::to_string(next_result_) + " results, got " +
                                       std::to_string(args_.size()) + " and " +
                                       std::to_string(results_.size()) + ".");
  }

  static const XLA_FFI_Buffer* nullptr_buffer() {
    static const XLA_FFI_Buffer buffer = {};
    return &buffer;
  }

 private:
  // Never null, which means that there is no such array: some versions of XLA have no memory for an empty
  // one.
  static const void* DataOf(ffi::AnyBuffer buffer) {
    static const char nothing = 0;
    return buffer.untyped_data() ? buffer.untyped_data() : &nothing;
  }

  ffi::Error CheckAlignment(std::string_view name, ffi::AnyBuffer buffer) const {
    const int alignment = is_for_cuda() ? 16 : ElementBytes(buffer.element_type());
    const auto sizes = buffer.dimensions();
    const bool is_empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
    if (is_empty || reinterpret_cast<uintptr_t>(buffer.untyped_data()) % alignment == 0) {
      return ffi::Error::Success();
    }
    return ffi::Error::InvalidArgument("jax_flash: the memory of " + std::string(name) +
                                       " must be aligned to " + std::to_string(alignment) + " bytes.");
  }

  static ffi::Error Missing(const char* kind, std::string_view name) {
    return ffi::Error::InvalidArgument("jax_flash: the call has no " + std::string(kind) + " for " +
                                       std::string(name) + ".");
  }

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

inline ffi::Error CheckOption(bool ok, std::string_view name, std::string_view expected, double got) {
  if (ok) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jax_flash: option " + std::string(name) + " must be " +
                                     std::string(expected) + ", got " + std::to_string(got) + ".");
}

inline ffi::Error ReadOptions(ffi::Dictionary attributes, Options* options) {
#define OPTION(type, name) RETURN_IF_ERROR(ReadAttribute<type>(attributes, #name, &options->name));
#include "options.def"
#undef OPTION
  const Options& o = *options;
  RETURN_IF_ERROR(CheckOption(std::isfinite(o.scale), "scale", "finite", o.scale));
  RETURN_IF_ERROR(CheckOption(o.window_left >= -1, "window_left", "at least -1", o.window_left));
  RETURN_IF_ERROR(CheckOption(o.window_right >= -1, "window_right", "at least -1", o.window_right));
  RETURN_IF_ERROR(CheckOption(std::isfinite(o.logits_soft_cap) && o.logits_soft_cap >= 0, "logits_soft_cap",
                              "finite and not negative", o.logits_soft_cap));
  RETURN_IF_ERROR(CheckOption(o.dropout_rate >= 0 && o.dropout_rate < 1, "dropout_rate",
                              "at least 0 and below 1", o.dropout_rate));
  return CheckOption(o.precision >= 0 && o.precision <= 2, "precision", "0, 1 or 2", o.precision);
}

// q, k and v: they give every size of the call.
inline ffi::Error ReadOperands(CallReader& call, ffi::DataType* dtype, AttentionParams* params) {
  ffi::AnyBuffer q(CallReader::nullptr_buffer()), k = q, v = q;
  RETURN_IF_ERROR(call.NextArg("q", &q));
  RETURN_IF_ERROR(call.NextArg("k", &k));
  RETURN_IF_ERROR(call.NextArg("v", &v));
  for (auto [name, buffer] : {std::pair{"q", q}, {"k", k}, {"v", v}}) {
    if (buffer.dimensions().size() != 4) {
      return ffi::Error::InvalidArgument("jax_flash: " + std::string(name) + " must have 4 axes, got shape " +
                                         ToString(DimsOf(buffer)) + ".");
    }
  }
  *dtype = q.element_type();
  const std::optional<DType> known = ToDType(*dtype);
  if (!known || *known == DType::kBool) {
    return ffi::Error::InvalidArgument("jax_flash: q must be float16, bfloat16, float32 or float64, got " +
                                       ToString(*dtype) + ".");
  }
  params->dtype = *known;
  const Dims q_dims = DimsOf(q), k_dims = DimsOf(k), v_dims = DimsOf(v);
  params->batch = q_dims[0];
  params->seqlen_q = q_dims[1];
  params->num_heads = q_dims[2];
  params->head_dim = q_dims[3];
  params->seqlen_kv = k_dims[1];
  params->num_kv_heads = k_dims[2];
  params->head_dim_v = v_dims[3];
  RETURN_IF_ERROR(CheckBuffer("k", k, *dtype,
                              {params->batch, params->seqlen_kv, params->num_kv_heads, params->head_dim}));
  RETURN_IF_ERROR(CheckBuffer("v", v, *dtype,
                              {params->batch, params->seqlen_kv, params->num_kv_heads, params->head_dim_v}));
  const bool heads_divide =
      params->num_kv_heads > 0 ? params->num_heads % params->num_kv_heads == 0 : params->num_heads == 0;
  if (!heads_divide) {
    return ffi::Error::InvalidArgument(
        "jax_flash: the heads of q must be a multiple of those of k and v, got " +
        std::to_string(params->num_heads) + " and " + std::to_string(params->num_kv_heads) + ".");
  }
  for (int64_t size : {params->batch, params->seqlen_q, params->seqlen_kv, params->num_heads,
                       params->head_dim, params->head_dim_v}) {
    if (size >= kMaxSize) {
      return ffi::Error::InvalidArgument("jax_flash: a dimension must be below 2^29, got " +
                                         std::to_string(size) + ".");
    }
  }
  params->q = q.untyped_data();
  params->k = k.untyped_data();
  params->v = v.untyped_data();
  return ffi::Error::Success();
}

inline ffi::DataType LseType(ffi::DataType dtype) {
  return dtype == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32;
}

// Takes `name` off the front of the comma-separated `names`, if it stands there.
inline bool TakeName(std::string_view& names, std::string_view name) {
  if (names.substr(0, names.find(',')) != name) return false;
  names.remove_prefix(std::min(names.size(), name.size() + 1));
  return true;
}

// `dtype` is that of q.
inline ffi::Error ReadOptionalOperands(CallReader& call, std::string_view names, ffi::DataType dtype,
                                       AttentionParams* params) {
  using enum ffi::DataType;
  const ffi::DataType LSE = LseType(dtype);
  const DTypes FLOATING = {F16, BF16, F32, F64};
  const int64_t B = params->batch, N = params->num_heads, T = params->seqlen_q, S = params->seqlen_kv;
#define OPERAND(type, name, operand_dtype, ...)                                            \
  params->name = {};                                                                       \
  if (TakeName(names, #name)) {                                                            \
    RETURN_IF_ERROR(call.TakeArg(#name, operand_dtype, Dims(__VA_ARGS__), &params->name)); \
  }
#include "operands.def"
#undef OPERAND
  if (!params->query_segment_ids != !params->key_value_segment_ids) {
    return ffi::Error::InvalidArgument(
        "jax_flash: query_segment_ids and key_value_segment_ids must come together.");
  }
  if (params->options.dropout_rate > 0 && !params->dropout_seeds) {
    return ffi::Error::InvalidArgument("jax_flash: dropout_rate needs dropout_seeds.");
  }
  if (names.empty()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jax_flash: attribute operands has an unknown or misplaced name in \"" +
                                     std::string(names) + "\".");
}

inline bool Is16Bit(const AttentionParams& params) {
  return params.dtype == DType::kFloat16 || params.dtype == DType::kBFloat16;
}

inline ffi::Error TakeTileCounter(CallReader& call, AttentionParams* params) {
  params->tile_counter = nullptr;
  if (!call.is_for_cuda() || !Is16Bit(*params)) return ffi::Error::Success();
  return call.TakeResult("tile_counter", ffi::DataType::S32, {1}, &params->tile_counter);
}

inline ffi::Error TakeVisibilityWorkspace(CallReader& call, bool with_bits_of_keys,
                                          AttentionParams* call_params) {
  const AttentionParams& params = *call_params;
  VisibilityWorkspace* workspace = &call_params->visible;
  *workspace = {};
  if (!call.is_for_cuda() || !(params.mask || params.query_segment_ids)) return ffi::Error::Success();
  const auto blocks = [](int64_t size) { return (size + kVisibilityBlock - 1) / kVisibilityBlock; };
  const int64_t B = params.batch, N = params.mask && params.mask.head_stride ? params.num_heads : 1;
  const int64_t M = blocks(params.seqlen_q), U = blocks(params.seqlen_kv);
  workspace->num_heads = N;
  RETURN_IF_ERROR(call.TakeResult("visibility", ffi::DataType::U8, {B, N, M, U}, &workspace->visibility));
  RETURN_IF_ERROR(call.TakeResult("lists", ffi::DataType::U32, {B, N, M * U + M + U}, &workspace->lists));
  if (!params.mask) return ffi::Error::Success();
  const PairArray& mask = params.mask;
  const int64_t mask_batch = mask.batch_stride ? params.batch : 1, mask_heads = N;
  const auto take = [&](const char* name, int64_t rows, int64_t words, bool is_full,
                        VisibilityWorkspace::Bits* bits) {
    *bits = {.words = nullptr,
             .batch_stride = mask.batch_stride ? mask_heads * rows * words : 0,
             .head_stride = mask.head_stride ? rows * words : 0,
             .row_stride = rows > 1 ? words : 0,
             .word_step = is_full};
    return call.TakeResult(name, ffi::DataType::U32, {mask_batch, mask_heads, rows, words}, &bits->words);
  };
  const int64_t T = mask.row_stride ? params.seqlen_q : 1, S = mask.key_stride ? params.seqlen_kv : 1;
  RETURN_IF_ERROR(
      take("mask bits of queries", T, 2 * blocks(S), mask.key_stride != 0, &workspace->of_queries));
  if (!with_bits_of_keys) return ffi::Error::Success();
  return take("mask bits of keys", S, 2 * blocks(T), mask.row_stride != 0, &workspace->of_keys);
}

inline ffi::Error ReadForward(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes,
                              Platform platform, ForwardParams* params) {
  CallReader call(platform, args, results);
  ffi::DataType dtype;
  std::string_view operands;
  RETURN_IF_ERROR(ReadOptions(attributes, &params->options));
  RETURN_IF_ERROR(ReadAttribute(attributes, "operands", &operands));
  RETURN_IF_ERROR(ReadOperands(call, &dtype, params));
  RETURN_IF_ERROR(ReadOptionalOperands(call, operands, dtype, params));
  const auto [B, T, N] = std::array{params->batch, params->seqlen_q, params->num_heads};
  RETURN_IF_ERROR(call.TakeResult("out", dtype, {B, T, N, params->head_dim_v}, &params->out));
  RETURN_IF_ERROR(call.TakeResult("lse", LseType(dtype), {B, T, N}, &params->lse));
  RETURN_IF_ERROR(TakeTileCounter(call, params));
  RETURN_IF_ERROR(TakeVisibilityWorkspace(call, /*with_bits_of_keys=*/false, params));
  return call.CheckAllTaken();
}

// The sums of dbias say by their shape what each of them is a sum of.
inline ffi::Error TakeBiasGradient(CallReader& call, ffi::DataType dtype, BackwardParams* params) {
  ffi::AnyBuffer buffer(CallReader::nullptr_buffer());
  RETURN_IF_ERROR(call.NextResult("dbias", &buffer));
  const Dims got = DimsOf(buffer);
  const auto blocks = [](int64_t size) { return (size + kVisibilityBlock - 1) / kVisibilityBlock; };
  const auto [B, N, T, S] = std::array{params->batch, params->num_heads, params->seqlen_q, params->seqlen_kv};
  const auto divides = [](int64_t part, int64_t whole) { return part > 0 ? whole % part == 0 : whole == 0; };
  const bool has_rows = got.size() == 4 && got[2] == T, has_keys = got.size() == 4 && got[3] == S;
  const bool has_pairs = has_rows && has_keys;
  if (got.size() != 4 || buffer.element_type() != dtype || !(has_rows || got[2] == blocks(T)) ||
      !(has_keys || got[3] == blocks(S)) || !(has_pairs ? divides(got[0], B) : got[0] == B) ||
      !(has_pairs ? got[1] == N || got[1] == 1 : got[1] == N)) {
    return ffi::Error::InvalidArgument("jax_flash: dbias has a wrong dtype or shape " + ToString(got) + ".");
  }
  params->dbias = buffer.untyped_data();
  params->dbias_batch = got[0];
  params->dbias_num_heads = got[1];
  params->dbias_rows = has_rows ? 1 : kVisibilityBlock;
  params->dbias_keys = has_keys ? 1 : kVisibilityBlock;
  return ffi::Error::Success();
}

// Room for the sums of dq, or none.
inline ffi::Error TakeDqAccum(CallReader& call, BackwardParams* params) {
  ffi::AnyBuffer buffer(CallReader::nullptr_buffer());
  RETURN_IF_ERROR(call.NextResult("dq_accum", &buffer));
  const auto [B, T, N, H] = std::array{params->batch, params->seqlen_q, params->num_heads, params->head_dim};
  const Dims none = {B, 0, N, H}, all = {B, (T + 15) / 16 * 16, N, H};
  params->leaves_dq = DimsOf(buffer) == none;
  RETURN_IF_ERROR(CheckBuffer("dq_accum", buffer, ffi::DataType::F32, params->leaves_dq ? none : all));
  if (!params->leaves_dq) params->dq_accum = static_cast<float*>(buffer.untyped_data());
  return ffi::Error::Success();
}

// `is_of_bias`: the pass that gives the gradient of the bias.
inline ffi::Error ReadBackward(ffi::RemainingArgs args, ffi::RemainingRets results,
                               ffi::Dictionary attributes, Platform platform, bool is_of_bias,
                               BackwardParams* params) {
  CallReader call(platform, args, results);
  ffi::DataType dtype;
  std::string_view operands;
  RETURN_IF_ERROR(ReadOptions(attributes, &params->options));
  RETURN_IF_ERROR(ReadAttribute(attributes, "operands", &operands));
  RETURN_IF_ERROR(ReadOperands(call, &dtype, params));
  const auto [B, T, N, H] = std::array{params->batch, params->seqlen_q, params->num_heads, params->head_dim};
  const auto [S, K, Hv] = std::array{params->seqlen_kv, params->num_kv_heads, params->head_dim_v};
  const ffi::DataType f32 = ffi::DataType::F32;
  RETURN_IF_ERROR(call.TakeArg("out", dtype, {B, T, N, Hv}, &params->out));
  RETURN_IF_ERROR(call.TakeArg("lse", LseType(dtype), {B, T, N}, &params->lse));
  RETURN_IF_ERROR(call.TakeArg("dout", dtype, {B, T, N, Hv}, &params->dout));
  params->dlse = nullptr;
  if (TakeName(operands, "dlse")) {
    RETURN_IF_ERROR(call.TakeArg("dlse", LseType(dtype), {B, T, N}, &params->dlse));
  }
  RETURN_IF_ERROR(ReadOptionalOperands(call, operands, dtype, params));

  params->dq = params->dk = params->dv = params->dbias = nullptr;
  if (is_of_bias) {
    RETURN_IF_ERROR(TakeBiasGradient(call, LseType(dtype), params));
  } else {
    RETURN_IF_ERROR(call.TakeResult("dq", dtype, {B, T, N, H}, &params->dq));
    RETURN_IF_ERROR(call.TakeResult("dk", dtype, {B, S, K, H}, &params->dk));
    RETURN_IF_ERROR(call.TakeResult("dv", dtype, {B, S, K, Hv}, &params->dv));
  }
  RETURN_IF_ERROR(TakeTileCounter(call, params));
  params->delta = params->lse_log2 = params->dq_accum = nullptr;
  params->leaves_dq = params->options.deterministic;
  if (call.is_for_cuda()) {
    const int64_t stats_rows = (T + kStatsRows - 1) / kStatsRows * kStatsRows;
    RETURN_IF_ERROR(call.TakeResult("delta", f32, {B, N, stats_rows}, &params->delta));
    RETURN_IF_ERROR(call.TakeResult("lse_log2", f32, {B, N, stats_rows}, &params->lse_log2));
    if (!is_of_bias && Is16Bit(*params) && !params->options.deterministic) {
      RETURN_IF_ERROR(TakeDqAccum(call, params));
    }
  }
  RETURN_IF_ERROR(TakeVisibilityWorkspace(call, /*with_bits_of_keys=*/!is_of_bias, params));
  return call.CheckAllTaken();
}

}  // namespace jax_flash
