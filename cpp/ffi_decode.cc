#include "ffi_decode.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "ffi_workspace.h"

namespace jax_flash {
namespace {

ffi::DataType LseType(ffi::DataType dtype) {
  return dtype == ffi::DataType::F64 ? ffi::DataType::F64 : ffi::DataType::F32;
}

// What q and a bias may have.
const DTypes& FloatingTypes() {
  using enum ffi::DataType;
  static const DTypes types = {F16, BF16, F32, F64};
  return types;
}

ffi::Error CheckOption(bool ok, std::string_view name, std::string_view expected, double got) {
  if (ok) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jax_flash: option " + std::string(name) + " must be " +
                                     std::string(expected) + ", got " + std::to_string(got) + ".");
}

ffi::Error ReadOptions(ffi::Dictionary attributes, Options* options) {
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

// q, k and v, which give every size of the call; with the shape of page_indices, which follow if `is_paged`.
ffi::Error ReadInputs(CallReader& call, bool is_paged, ffi::DataType* dtype, AttentionParams* params) {
  ffi::AnyBuffer q = NoBuffer(), k = q, v = q;
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
  params->num_pages = params->page_size = params->pages_per_sequence = 0;
  Dims rows = {params->batch, params->seqlen_kv};
  if (is_paged) {
    const Dims indices = call.PeekArgDims();
    params->num_pages = k_dims[0];
    params->page_size = k_dims[1];
    params->pages_per_sequence = indices.size() == 2 ? indices[1] : 0;
    if (params->num_pages <= 0 || params->page_size <= 0 || params->num_pages >= kMaxSize ||
        params->page_size >= kMaxSize || params->num_pages * params->page_size >= int64_t{1} << 31) {
      return ffi::Error::InvalidArgument(
          "jax_flash: pages must be at least one, of at least one key, below 2^29, and of less than 2^31 "
          "keys in all, got shape " +
          ToString(k_dims) + ".");
    }
    if (params->pages_per_sequence > (kMaxSize - 1) / params->page_size) {
      return ffi::Error::InvalidArgument("jax_flash: page_indices must be of less than 2^29 keys, got " +
                                         std::to_string(params->pages_per_sequence) + " pages of " +
                                         std::to_string(params->page_size) + " keys.");
    }
    rows = {params->num_pages, params->page_size};
    params->seqlen_kv = params->pages_per_sequence * params->page_size;
  }
  RETURN_IF_ERROR(CheckBuffer("k", k, *dtype, {rows[0], rows[1], params->num_kv_heads, params->head_dim}));
  RETURN_IF_ERROR(CheckBuffer("v", v, *dtype, {rows[0], rows[1], params->num_kv_heads, params->head_dim_v}));
  const bool heads_divide =
      params->num_kv_heads > 0 ? params->num_heads % params->num_kv_heads == 0 : params->num_heads == 0;
  if (!heads_divide) {
    return ffi::Error::InvalidArgument(
        "jax_flash: the number of heads of q must be a multiple of that of k and v, got " +
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

// Removes `name` from the front of the comma-separated `names` if it is there.
bool TakeName(std::string_view& names, std::string_view name) {
  if (names.substr(0, names.find(',')) != name) return false;
  names.remove_prefix(std::min(names.size(), name.size() + 1));
  return true;
}

// `dtype`: of q.
ffi::Error ReadOptionalOperands(CallReader& call, std::string_view names, ffi::DataType dtype,
                                AttentionParams* params) {
  using enum ffi::DataType;
  const ffi::DataType LSE = LseType(dtype);
  const DTypes& FLOATING = FloatingTypes();
  const int64_t B = params->batch, N = params->num_heads, T = params->seqlen_q, S = params->seqlen_kv;
  const int64_t P = params->pages_per_sequence;
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

// The first axis of the first result.
ffi::Error ReadNumDirections(CallReader& call, Directions* directions) {
  const Dims dims = call.PeekResultDims();
  directions->num_directions = dims.empty() ? 0 : dims[0];
  if (directions->num_directions < kMaxSize) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jax_flash: the number of directions must be below 2^29, got " +
                                     std::to_string(directions->num_directions) + ".");
}

// `dtype`: of q.
ffi::Error ReadTangents(CallReader& call, std::string_view& names, ffi::DataType dtype,
                        const AttentionParams& params, Directions* directions) {
  const ffi::DataType Q = dtype, LSE = LseType(dtype);
  const DTypes& FLOATING = FloatingTypes();
  const auto [B, T, N, H] = std::array{params.batch, params.seqlen_q, params.num_heads, params.head_dim};
  const auto [S, K, Hv] = std::array{params.seqlen_kv, params.num_kv_heads, params.head_dim_v};
  const int64_t D = directions->num_directions;
#define TANGENT(type, name, tangent_dtype, ...)                                                \
  directions->name = {};                                                                       \
  if (TakeName(names, #name)) {                                                                \
    RETURN_IF_ERROR(call.TakeArg(#name, tangent_dtype, Dims(__VA_ARGS__), &directions->name)); \
  }
#include "tangents.def"
#undef TANGENT
  return ffi::Error::Success();
}

// The sums of dbias: their shape says what each of them is a sum of. `dtype`: of q.
ffi::Error TakeBiasGradient(CallReader& call, ffi::DataType dtype, BackwardParams* params) {
  ffi::AnyBuffer buffer = NoBuffer();
  RETURN_IF_ERROR(call.NextResult("dbias", &buffer));
  const Dims got = DimsOf(buffer);
  const auto [B, N, T, S] = std::array{params->batch, params->num_heads, params->seqlen_q, params->seqlen_kv};
  const auto divides = [](int64_t part, int64_t whole) { return part > 0 ? whole % part == 0 : whole == 0; };
  const bool has_rows = got.size() == 4 && got[2] == T, has_keys = got.size() == 4 && got[3] == S;
  const bool has_pairs = has_rows && has_keys;
  const bool has_dtype =
      buffer.element_type() == LseType(dtype) || (has_pairs && buffer.element_type() == dtype);
  if (got.size() != 4 || !has_dtype || !(has_rows || got[2] == NumBlocks(T)) ||
      !(has_keys || got[3] == NumBlocks(S)) || !(has_pairs ? divides(got[0], B) : got[0] == B) ||
      !(has_pairs ? got[1] == N || got[1] == 1 : got[1] == N)) {
    return ffi::Error::InvalidArgument("jax_flash: dbias must be " + ToString(LseType(dtype)) + " of shape " +
                                       ToString({B, N, T, S}) +
                                       ", with a part of the batch or 1 head where it is summed over them, "
                                       "or of q's dtype, or with blocks of " +
                                       std::to_string(kVisibilityBlock) + " for the last two, got " +
                                       ToString(buffer.element_type()) + " of shape " + ToString(got) + ".");
  }
  params->dbias = buffer.untyped_data();
  params->dbias_dtype = *ToDType(buffer.element_type());
  params->dbias_batch = got[0];
  params->dbias_num_heads = got[1];
  params->dbias_rows = has_rows ? 1 : kVisibilityBlock;
  params->dbias_keys = has_keys ? 1 : kVisibilityBlock;
  return ffi::Error::Success();
}

// `word_step`: 0 if the mask has size 1 along a row of bits, else 1.
VisibilityWorkspace::Bits BitsOf(const WorkspaceArray<ffi::DataType::U32>& array, int word_step) {
  if (array.dims.empty()) return {};
  const auto [batch, heads, rows, words] =
      std::array{array.dims[0], array.dims[1], array.dims[2], array.dims[3]};
  return {.words = array.data,
          .batch_stride = batch != 1 ? heads * rows * words : 0,
          .head_stride = heads != 1 ? rows * words : 0,
          .row_stride = rows > 1 ? words : 0,
          .word_step = word_step};
}

VisibilityWorkspace VisibilityOf(const Workspace& workspace, const PairArray& mask) {
  if (workspace.visibility.dims.empty()) return {};
  return {.num_heads = workspace.visibility.dims[1],
          .visibility = workspace.visibility.data,
          .lists = workspace.lists.data,
          .of_queries = BitsOf(workspace.mask_bits_of_queries, mask.key_stride != 0),
          .of_keys = BitsOf(workspace.mask_bits_of_keys, mask.row_stride != 0)};
}

PlaneWorkspace PlanesOf(const Workspace& workspace) {
  const Dims& dims = workspace.plane_scales.dims;
  if (dims.empty() || dims[0] == 0) return {};
  return {.scales = workspace.plane_scales.data,
          .q = workspace.q_plane.data,
          .k = workspace.k_plane.data,
          .v = workspace.v_plane.data,
          .dout = workspace.dout_plane.data,
          .rows = workspace.plane_rows.data,
          .count = dims[0]};
}

// What every call begins with: options, the names of its operands, and q, k and v.
ffi::Error ReadStart(CallReader& call, ffi::Dictionary attributes, Pass pass, std::string_view* operands,
                     ffi::DataType* dtype, AttentionParams* params) {
  RETURN_IF_ERROR(ReadOptions(attributes, &params->options));
  RETURN_IF_ERROR(ReadAttribute(attributes, "operands", operands));
  const bool is_paged = operands->find("page_indices") != std::string_view::npos;
  if (is_paged && pass != Pass::kForward) {
    return ffi::Error::InvalidArgument("jax_flash: page_indices are for the forward pass only.");
  }
  return ReadInputs(call, is_paged, dtype, params);
}

}  // namespace

ffi::Error ReadForward(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes,
                       Platform platform, ForwardParams* params) {
  CallReader call(platform, args, results);
  ffi::DataType dtype;
  std::string_view operands;
  RETURN_IF_ERROR(ReadStart(call, attributes, Pass::kForward, &operands, &dtype, params));
  RETURN_IF_ERROR(ReadOptionalOperands(call, operands, dtype, params));

  const auto [B, T, N] = std::array{params->batch, params->seqlen_q, params->num_heads};
  RETURN_IF_ERROR(call.TakeResult("out", dtype, {B, T, N, params->head_dim_v}, &params->out));
  RETURN_IF_ERROR(call.TakeResult("lse", LseType(dtype), {B, T, N}, &params->lse));
  params->p_factor = nullptr;
  const bool may_have_factor =
      params->dtype == DType::kFloat64 || (params->dtype == DType::kFloat32 && params->options.precision > 0);
  if (may_have_factor && call.PeekResultDims().size() == 3) {  // workspace begins with arrays of other ranks
    RETURN_IF_ERROR(call.TakeResult("p_factor", LseType(dtype), {B, T, N}, &params->p_factor));
  }

  Workspace workspace;
  RETURN_IF_ERROR(TakeWorkspace(call, Pass::kForward, *params, /*num_directions=*/1, &workspace));
  params->tile_counter = workspace.tile_counter.data;
  params->planes =
      params->num_pages ? PlaneWorkspace{} : PlanesOf(workspace);  // they are made of rows in order
  params->num_key_parts = workspace.key_parts.dims.empty() ? 0 : workspace.key_parts.dims[0];
  params->key_parts = workspace.key_parts.data;
  params->visible = VisibilityOf(workspace, params->mask);
  return call.CheckAllTaken();
}

ffi::Error ReadTangent(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes,
                       Platform platform, TangentParams* params) {
  CallReader call(platform, args, results);
  ffi::DataType Q;
  std::string_view operands;
  RETURN_IF_ERROR(ReadStart(call, attributes, Pass::kTangent, &operands, &Q, params));
  const auto [B, T, N, H] = std::array{params->batch, params->seqlen_q, params->num_heads, params->head_dim};
  const auto [S, K, Hv] = std::array{params->seqlen_kv, params->num_kv_heads, params->head_dim_v};
  const ffi::DataType LSE = LseType(Q);
  RETURN_IF_ERROR(call.TakeArg("out", Q, {B, T, N, Hv}, &params->out));
  RETURN_IF_ERROR(call.TakeArg("lse", LSE, {B, T, N}, &params->lse));

  RETURN_IF_ERROR(ReadNumDirections(call, params));
  RETURN_IF_ERROR(ReadTangents(call, operands, Q, *params, params));
  RETURN_IF_ERROR(ReadOptionalOperands(call, operands, Q, params));

  const int64_t D = params->num_directions;
  RETURN_IF_ERROR(call.TakeResult("tout", Q, {D, B, T, N, Hv}, &params->tout));
  RETURN_IF_ERROR(call.TakeResult("tlse", LSE, {D, B, T, N}, &params->tlse));

  Workspace workspace;
  RETURN_IF_ERROR(TakeWorkspace(call, Pass::kTangent, *params, D, &workspace));
  params->visible = VisibilityOf(workspace, params->mask);
  return call.CheckAllTaken();
}

ffi::Error ReadBackward(ffi::RemainingArgs args, ffi::RemainingRets results, ffi::Dictionary attributes,
                        Platform platform, Pass pass, BackwardParams* params) {
  CallReader call(platform, args, results);
  ffi::DataType dtype;
  std::string_view operands;
  RETURN_IF_ERROR(ReadStart(call, attributes, pass, &operands, &dtype, params));
  const auto [B, T, N, H] = std::array{params->batch, params->seqlen_q, params->num_heads, params->head_dim};
  const auto [S, K, Hv] = std::array{params->seqlen_kv, params->num_kv_heads, params->head_dim_v};
  RETURN_IF_ERROR(call.TakeArg("out", dtype, {B, T, N, Hv}, &params->out));
  RETURN_IF_ERROR(call.TakeArg("lse", LseType(dtype), {B, T, N}, &params->lse));
  RETURN_IF_ERROR(call.TakeArg("dout", dtype, {B, T, N, Hv}, &params->dout));
  params->dlse = nullptr;
  if (TakeName(operands, "dlse")) {
    RETURN_IF_ERROR(call.TakeArg("dlse", LseType(dtype), {B, T, N}, &params->dlse));
  }
  RETURN_IF_ERROR(ReadOptionalOperands(call, operands, dtype, params));

  params->dq = params->dk = params->dv = params->dbias = nullptr;
  if (pass == Pass::kBackwardBias) {
    RETURN_IF_ERROR(TakeBiasGradient(call, dtype, params));
  } else {
    RETURN_IF_ERROR(call.TakeResult("dq", dtype, {B, T, N, H}, &params->dq));
    RETURN_IF_ERROR(call.TakeResult("dk", dtype, {B, S, K, H}, &params->dk));
    RETURN_IF_ERROR(call.TakeResult("dv", dtype, {B, S, K, Hv}, &params->dv));
  }

  Workspace workspace;
  RETURN_IF_ERROR(TakeWorkspace(call, pass, *params, /*num_directions=*/1, &workspace));
  params->tile_counter = workspace.tile_counter.data;
  params->planes = PlanesOf(workspace);
  params->has_nan = workspace.has_nan.data;
  params->visible = VisibilityOf(workspace, params->mask);
  params->delta = workspace.delta.data;
  params->lse_log2 = workspace.lse_log2.data;
  const bool is_16_bit = dtype == ffi::F16 || dtype == ffi::BF16;
  params->ds = !workspace.ds.dims.empty() && workspace.ds.dims[1] != 0 ? workspace.ds.data : nullptr;
  params->num_shared_heads = workspace.shared_ds.dims.empty() ? 0 : workspace.shared_ds.dims[0];
  params->shared_ds = params->num_shared_heads > 0 ? workspace.shared_ds.data : nullptr;
  params->leaves_dq = workspace.leaves_dq || (params->options.deterministic && !is_16_bit);
  params->dq_accum = params->planes        ? workspace.plane_dq.data
                     : workspace.leaves_dq ? nullptr
                                           : workspace.dq_accum.data;
  const Dims& parts = workspace.dk_parts.dims;
  const bool has_parts = !parts.empty() && parts[1] != 0 && workspace.dv_parts.dims[1] == parts[1];
  params->dk_parts = has_parts ? workspace.dk_parts.data : nullptr;
  params->dv_parts = has_parts ? workspace.dv_parts.data : nullptr;
  params->num_head_parts = has_parts ? parts[1] : K;
  return call.CheckAllTaken();
}

ffi::Error ReadBackwardTangent(ffi::RemainingArgs args, ffi::RemainingRets results,
                               ffi::Dictionary attributes, Platform platform, BackwardTangentParams* params) {
  CallReader call(platform, args, results);
  ffi::DataType Q;
  std::string_view operands;
  RETURN_IF_ERROR(ReadStart(call, attributes, Pass::kBackwardTangent, &operands, &Q, params));
  RETURN_IF_ERROR(ReadNumDirections(call, params));
  const auto [B, T, N, H] = std::array{params->batch, params->seqlen_q, params->num_heads, params->head_dim};
  const auto [S, K, Hv] = std::array{params->seqlen_kv, params->num_kv_heads, params->head_dim_v};
  const int64_t D = params->num_directions;
  const ffi::DataType LSE = LseType(Q);
  RETURN_IF_ERROR(call.TakeArg("out", Q, {B, T, N, Hv}, &params->out));
  RETURN_IF_ERROR(call.TakeArg("lse", LSE, {B, T, N}, &params->lse));
  RETURN_IF_ERROR(call.TakeArg("dout", Q, {B, T, N, Hv}, &params->dout));
  RETURN_IF_ERROR(call.TakeArg("tout", Q, {D, B, T, N, Hv}, &params->tout));
  RETURN_IF_ERROR(call.TakeArg("tlse", LSE, {D, B, T, N}, &params->tlse));
  params->dlse = params->tdout = params->tdlse = nullptr;
  if (TakeName(operands, "dlse")) RETURN_IF_ERROR(call.TakeArg("dlse", LSE, {B, T, N}, &params->dlse));
  if (TakeName(operands, "tdout")) {
    RETURN_IF_ERROR(call.TakeArg("tdout", Q, {D, B, T, N, Hv}, &params->tdout));
  }
  if (TakeName(operands, "tdlse")) RETURN_IF_ERROR(call.TakeArg("tdlse", LSE, {D, B, T, N}, &params->tdlse));
  RETURN_IF_ERROR(ReadTangents(call, operands, Q, *params, params));
  RETURN_IF_ERROR(ReadOptionalOperands(call, operands, Q, params));

  RETURN_IF_ERROR(call.TakeResult("tdq", Q, {D, B, T, N, H}, &params->tdq));
  RETURN_IF_ERROR(call.TakeResult("tdk", Q, {D, B, S, K, H}, &params->tdk));
  RETURN_IF_ERROR(call.TakeResult("tdv", Q, {D, B, S, K, Hv}, &params->tdv));

  Workspace workspace;
  RETURN_IF_ERROR(TakeWorkspace(call, Pass::kBackwardTangent, *params, D, &workspace));
  params->tile_counter = nullptr;
  params->planes = {};
  params->visible = VisibilityOf(workspace, params->mask);
  params->delta = workspace.delta.data;
  params->lse_log2 = workspace.lse_log2.data;
  params->row_tangents = workspace.row_tangents.data;
  return call.CheckAllTaken();
}

}  // namespace jax_flash
