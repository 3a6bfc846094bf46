#include "ffi_workspace.h"

namespace jax_flash {
namespace {

template <ffi::DataType dtype>
ffi::Error Take(CallReader& call, const char* name, const Dims& dims, WorkspaceArray<dtype>* array) {
  array->dims = dims;
  return call.TakeResult(name, dtype, dims, &array->data);
}

}  // namespace

ffi::Error TakeWorkspace(CallReader& call, Pass pass, const AttentionParams& params, int64_t num_directions,
                         Workspace* workspace) {
  if (!call.is_for_cuda()) return ffi::Error::Success();

  // The names of workspace.def. Python has the same: `Call` of jax_flash/_workspace.py.
  const bool is_forward = pass == Pass::kForward;
  const bool is_backward = pass == Pass::kBackward;
  const bool is_backward_tangent = pass == Pass::kBackwardTangent;
  const bool is_gradient = is_backward || pass == Pass::kBackwardBias || is_backward_tangent;
  const bool is_16_bit = params.dtype == DType::kFloat16 || params.dtype == DType::kBFloat16;
  const int64_t sum_words = params.dtype == DType::kFloat64 ? 2 : 1;
  const bool may_have_planes = params.dtype == DType::kFloat32 && (is_forward || is_backward);
  const bool is_deterministic = params.options.deterministic;
  const bool has_mask = !!params.mask, has_segments = params.has_segments();
  const int64_t B = params.batch, N = params.num_heads, K = params.num_kv_heads;
  const int64_t T = params.seqlen_q, S = params.seqlen_kv;
  const int64_t H = params.head_dim, Hv = params.head_dim_v, D = num_directions;
  const PairArray& mask = params.mask;  // with strides of 0 where it is broadcast or absent
  const int64_t B_mask = mask.batch_stride ? B : 1, N_mask = mask.head_stride ? N : 1;
  const int64_t T_mask = mask.row_stride ? T : 1, S_mask = mask.key_stride ? S : 1;
  const auto ceil_div = [](int64_t size, int64_t unit) { return (size + unit - 1) / unit; };
  const auto round_up = [&](int64_t size, int64_t unit) { return ceil_div(size, unit) * unit; };
  const auto blocks = NumBlocks;
  // Python decides about these. The array is the next result when the table asks first.
  int64_t planes = -1;
  const int64_t all_planes = params.options.precision > 0 ? 2 : 1;
  const auto num_planes = [&] {
    const Dims dims = call.PeekResultDims();
    if (planes < 0) planes = dims.size() == 4 && dims[0] != 0 ? all_planes : 0;
    return planes;
  };
  const auto num_key_parts = [&] {
    const Dims dims = call.PeekResultDims();
    return dims.empty() ? 0 : dims[0];
  };
  const auto keeps_ds = [&] {
    const Dims dims = call.PeekResultDims();
    return dims.size() == 4 && N > 0 && dims[1] == N;
  };
  // Only whole groups of query heads, which share a key head.
  const auto num_shared_heads = [&]() -> int64_t {
    const Dims dims = call.PeekResultDims();
    const int64_t heads = dims.size() == 3 ? dims[0] : 0;
    return heads > 0 && K > 0 && N > 0 && heads % (N / K) == 0 ? heads : 0;
  };
  const auto sums_dq = [&] {
    const Dims dims = call.PeekResultDims();
    return dims.size() < 2 || dims[1] != 0;
  };
  // Only a number that divides the query heads of each key head evenly.
  const auto num_head_parts = [&]() -> int64_t {
    const Dims dims = call.PeekResultDims();
    const int64_t parts = dims.size() < 2 ? 0 : dims[1];
    return parts > 0 && K > 0 && parts % K == 0 && N % parts == 0 ? parts : 0;
  };

#define WORKSPACE(name, dtype, condition, ...) \
  if (condition) RETURN_IF_ERROR(Take(call, #name, Dims(__VA_ARGS__), &workspace->name));
#include "workspace.def"
#undef WORKSPACE

  const Dims& dq_dims = planes > 0 ? workspace->plane_dq.dims : workspace->dq_accum.dims;
  workspace->leaves_dq = !dq_dims.empty() && dq_dims[1] == 0;
  return ffi::Error::Success();
}

}  // namespace jax_flash
