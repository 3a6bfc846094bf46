#include "dispatch.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <mutex>
#include <string>
#include <string_view>
#include <type_traits>

#include "arithmetic.h"
#include "launch.h"
#include "sm80/backward.cuh"
#include "sm80/backward_bias.cuh"
#include "sm80/backward_dq.cuh"
#include "sm80/backward_tangent.cuh"
#include "sm80/decode.cuh"
#include "sm80/forward.cuh"
#include "sm80/short_backward.cuh"
#include "sm80/short_backward_bias.cuh"
#include "sm80/short_forward.cuh"
#include "sm80/tangent.cuh"
#include "sm90/backward.cuh"
#include "sm90/backward_bias.cuh"
#include "sm90/backward_dq.cuh"
#include "sm90/decode.cuh"
#include "sm90/forward.cuh"
#include "sm90/tangent.cuh"
#include "visibility.cuh"

// Each kernel is compiled in a unit of its own.
#define KERNEL(direction, arch, arithmetic, head_dim)                      \
  extern template jax_flash::cuda::Status                                  \
  jax_flash::cuda::arch::direction<jax_flash::cuda::arithmetic, head_dim>( \
      const jax_flash::cuda::direction##_params&, const jax_flash::cuda::LaunchContext&);
#include "kernels.def"
#undef KERNEL

namespace jax_flash::cuda {
namespace {

enum class Direction {
  forward,
  short_forward,
  decode,
  backward,
  short_backward,
  backward_dq,
  backward_bias,
  short_backward_bias,
  tangent,
  backward_tangent
};
enum class Arithmetic { bfloat16, float16, tf32, tf32x3, tf32x3_infinity, float64 };

struct Kernel {
  Direction direction;
  std::string_view arch;
  Arithmetic arithmetic;
  int64_t head_dim;
  const char* name;
  Status (*run)(const AttentionParams& params, const LaunchContext& context);
};

template <class Params, Status (*kRun)(const Params&, const LaunchContext&)>
Status run(const AttentionParams& params, const LaunchContext& context) {
  return kRun(static_cast<const Params&>(params), context);
}

// In the order of kernels.cmake: for each direction and arithmetic, faster kernels come first, and head dims
// ascend.
const Kernel kKernels[] = {
#define KERNEL(direction_, arch, arithmetic_, head_dim_)  \
  {Direction::direction_,                                 \
   #arch,                                                 \
   Arithmetic::arithmetic_,                               \
   head_dim_,                                             \
   #direction_ " " #arch " " #arithmetic_ " " #head_dim_, \
   run<direction_##_params, arch::direction_<cuda::arithmetic_, head_dim_>>},
#include "kernels.def"
#undef KERNEL
};

Arithmetic arithmetic_of(const AttentionParams& params) {
  switch (params.dtype) {
    case DType::kFloat16:
      return Arithmetic::float16;
    case DType::kBFloat16:
      return Arithmetic::bfloat16;
    case DType::kFloat64:
      return Arithmetic::float64;
    default:
      return params.options.precision == 0 ? Arithmetic::tf32 : Arithmetic::tf32x3;
  }
}

std::string describe(cudaError_t error) {
  return error == cudaSuccess ? ""
                              : std::string("jax_flash: CUDA reported: ") + cudaGetErrorString(error) + ".";
}

// Settings for tests; empty by default. The environment is read once, when the library is loaded: reading it
// in a call would race with threads that change it.
struct TestSettings {
  std::string kernels, tile, shared_memory_per_block;
};

struct NamedTile {
  std::string_view name;
  ForcedTile tile;
};
constexpr NamedTile kForcedTiles[] = {{"", ForcedTile::kNone},
                                      {"short", ForcedTile::kShort},
                                      {"long", ForcedTile::kLong},
                                      {"two_heads", ForcedTile::kTwoHeads}};

const TestSettings kEnvironment = [] {
  const auto read = [](const char* name) -> std::string {
    const char* value = std::getenv(name);
    return value ? value : "";
  };
  return TestSettings{read("JAX_FLASH_KERNELS"), read("JAX_FLASH_TILE"),
                      read("JAX_FLASH_SHARED_MEMORY_PER_BLOCK")};
}();
std::mutex settings_mutex;
TestSettings settings = kEnvironment;  // guarded by settings_mutex

struct Context : LaunchContext {
  std::string only_arch;   // tests restrict the kernels to this one; empty: all
  bool is_behind = false;  // only for what the kernels before have left?
};

Arithmetic arithmetic_of(Direction direction, const AttentionParams& params, const Context& context) {
  const Arithmetic arithmetic = arithmetic_of(params);
  const bool is_gradient = direction == Direction::backward || direction == Direction::backward_dq;
  return context.is_behind && is_gradient && arithmetic == Arithmetic::tf32x3 ? Arithmetic::tf32x3_infinity
                                                                              : arithmetic;
}

// Runs the first kernel of the list that does what is asked on this card, if there is one.
Status try_kernels(Direction direction, const AttentionParams& params, const Context& context) {
  const int64_t head_dim = std::max(params.head_dim, params.head_dim_v);
  const Arithmetic arithmetic = arithmetic_of(direction, params, context);
  for (const Kernel& kernel : kKernels) {
    if (kernel.direction != direction || kernel.arithmetic != arithmetic || head_dim > kernel.head_dim ||
        (!context.only_arch.empty() && kernel.arch != context.only_arch))
      continue;
    if (const Status status = kernel.run(params, context); status.is_served()) return status;
  }
  return Status::not_served();
}

// Do the kernels of short sequences come first? They have no tile without queries or keys.
bool is_short(const AttentionParams& params) {
  return 0 < params.seqlen_q && params.seqlen_q <= kShortLength && 0 < params.seqlen_kv &&
         params.seqlen_kv <= kShortLength;
}

Status try_forward(const ForwardParams& params, const Context& context) {
  return try_kernels(Direction::forward, params, context);
}

Status try_backward(const BackwardParams& params, const Context& context) {
  const Status status = try_kernels(Direction::backward, params, context);
  if (status.failed() || !params.leaves_dq) return status;
  return try_kernels(Direction::backward_dq, params, context);
}

template <class Params>
Status try_hopper(const Params& params, Context context, Status (*run)(const Params&, const Context&)) {
  if (context.only_arch == "sm80") return Status::not_served();
  context.only_arch = "sm90";
  return run(params, context);
}

// Runs Hopper's kernels on the planes of float32, then the portable ones, which compute the key heads that
// planes do not hold.
template <class Params>
Status try_planes(Params params, const Context& context, Status (*run)(const Params&, const Context&)) {
  if (!params.planes) return Status::not_served();
  if (const Status status = try_hopper(params, context, run); status.failed()) return status;
  Context behind = context;
  behind.only_arch = "sm80";
  behind.is_behind = true;
  // Sums of dq in memory would have to begin with 0.
  if constexpr (std::is_same_v<Params, BackwardParams>) params.leaves_dq = true;
  return run(params, behind);
}

template <class Params>
Params without_planes(Params params) {
  params.planes = {};
  return params;
}

// Like try_kernels, with a sentence if no kernel does what is asked.
std::string run_kernel(Direction direction, const AttentionParams& params, const Context& context) {
  const Status status = try_kernels(direction, params, context);
  if (status.is_served()) return describe(status.error());
  const int64_t head_dim = std::max(params.head_dim, params.head_dim_v);
  int64_t largest = 0;
  for (const Kernel& kernel : kKernels) {
    if (kernel.direction == direction && kernel.arithmetic == arithmetic_of(params))
      largest = std::max(largest, kernel.head_dim);
  }
  const std::string refusal =
      head_dim > largest
          ? "the CUDA kernels of this build have head_dim up to " + std::to_string(largest)
          : "no CUDA kernel of this build for this head_dim and dtype runs on this GPU (compute capability " +
                std::to_string(context.compute_capability / 10) + "." +
                std::to_string(context.compute_capability % 10) + ", " +
                std::to_string(context.shared_memory_per_block / 1024) + " KB of shared memory a block)";
  return "jax_flash: " + refusal + ", got head_dim " + std::to_string(head_dim) +
         "; implementation=\"xla\" has no such limit.";
}

std::string run_backward_kernels(const BackwardParams& params, const Context& context) {
  if (std::string message = run_kernel(Direction::backward, params, context); !message.empty())
    return message;
  return params.leaves_dq ? run_kernel(Direction::backward_dq, params, context) : "";
}

std::string compute_backward(const BackwardParams& params, const Context& context) {
  if (is_short(params)) {
    const Status status = try_kernels(Direction::short_backward, params, context);
    if (status.is_served()) return describe(status.error());
  }
  if (const Status status = try_planes(params, context, try_backward); status.is_served())
    return describe(status.error());
  BackwardParams own = without_planes(params);
  if (own.shared_ds) {
    // Of all kernels only Hopper's for dk and dv leaves ds for dq, which follows in the same call.
    BackwardParams with_dq = own;
    with_dq.leaves_dq = false;
    if (const Status status = try_hopper(with_dq, context, try_backward); status.is_served())
      return describe(status.error());
    own.shared_ds = nullptr;
  }
  if (own.options.deterministic && !own.leaves_dq) {
    // Only Hopper's kernel sums dq in memory in a fixed order, and not with a mask or segments.
    if (const Status status = try_hopper(own, context, try_backward); status.is_served())
      return describe(status.error());
    own.leaves_dq = true;
  }
  if (std::string message = run_backward_kernels(own, context); !message.empty()) return message;
  // Three products of TF32 make gradients NaN where there are infinities. Without queries nothing looks for
  // that.
  const bool has_queries = own.batch * own.num_heads * own.seqlen_q > 0;
  if (arithmetic_of(own) != Arithmetic::tf32x3 || !own.has_nan || !has_queries) return "";
  Context behind = context;
  behind.is_behind = true;
  own.leaves_dq = true;  // sums of dq in memory are those of the kernel before
  return run_backward_kernels(own, behind);
}

std::string compute_backward_bias(const BackwardParams& params, const Context& context) {
  if (is_short(params)) {
    const Status status = try_kernels(Direction::short_backward_bias, params, context);
    if (status.is_served()) return describe(status.error());
  }
  return run_kernel(Direction::backward_bias, params, context);
}

// Makes `device` current during its lifetime: the calling thread may have another one.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (cudaGetDevice(&previous_) != cudaSuccess) previous_ = device;
    if (previous_ != device) cudaSetDevice(device);
    current_ = device;
  }
  ~DeviceGuard() {
    if (previous_ != current_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0, current_ = 0;
};

std::string make_context(const AttentionParams& params, cudaStream_t stream, int device, Context* context) {
  if (params.dtype != DType::kFloat64 && params.bias && params.bias.dtype == DType::kFloat64)
    return "jax_flash: a float64 bias beside inputs of another dtype has no CUDA kernel.";
  context->stream = stream;
  cudaError_t error = cudaSuccess;
  auto read = [&](cudaDeviceAttr attribute) {
    int value = 0;
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
    return value;
  };
  context->compute_capability =
      10 * read(cudaDevAttrComputeCapabilityMajor) + read(cudaDevAttrComputeCapabilityMinor);
  context->multiprocessors = read(cudaDevAttrMultiProcessorCount);
  context->shared_memory_per_sm = read(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  context->shared_memory_per_block = read(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const std::lock_guard lock(settings_mutex);
  if (const std::string& limit = settings.shared_memory_per_block; !limit.empty()) {
    context->shared_memory_per_block = std::min(context->shared_memory_per_block, std::atoi(limit.c_str()));
  }
  context->only_arch = settings.kernels;
  const auto tile = std::ranges::find(kForcedTiles, std::string_view(settings.tile), &NamedTile::name);
  if (tile == std::end(kForcedTiles))
    return "jax_flash: JAX_FLASH_TILE must be short, long or two_heads, got " + settings.tile + ".";
  context->forced_tile = tile->tile;
  return describe(error);
}

// Makes `device` current and calls launches(context), once the lists of what mask and segments hide are on
// their way.
template <class F>
std::string run(const AttentionParams& params, cudaStream_t stream, int device, F launches) {
  const DeviceGuard guard(device);
  Context context;
  if (std::string error = make_context(params, stream, device, &context); !error.empty()) return error;
  if (const Status status = launch_visibility(params, context); status.failed())
    return describe(status.error());
  return launches(context);
}

}  // namespace

std::string run_forward(const ForwardParams& params, cudaStream_t stream, int device) {
  return run(params, stream, device, [&](const Context& context) -> std::string {
    if (sm90::takes_few_queries(params)) {
      if (const Status status = try_hopper(params, context, try_forward); status.is_served())
        return describe(status.error());
    }
    if (params.num_key_parts > 0) {
      const Status status = try_kernels(Direction::decode, params, context);
      if (status.is_served()) return describe(status.error());
    }
    if (is_short(params)) {
      const Status status = try_kernels(Direction::short_forward, without_planes(params), context);
      if (status.is_served()) return describe(status.error());
    }
    if (const Status status = try_planes(params, context, try_forward); status.is_served())
      return describe(status.error());
    return run_kernel(Direction::forward, without_planes(params), context);
  });
}

std::string run_backward(const BackwardParams& params, cudaStream_t stream, int device) {
  return run(params, stream, device, [&](const Context& context) -> std::string {
    if (!params.ds) return compute_backward(params, context);
    if (const Status status = try_hopper(params, context, try_backward); status.is_served())
      return describe(status.error());
    // No other kernel writes ds: they are sums of one batch element and one head each.
    BackwardParams of_bias = params, without = params;
    of_bias.dbias = params.ds;
    of_bias.dbias_dtype = params.dtype;
    of_bias.dbias_batch = params.batch;
    of_bias.dbias_num_heads = params.num_heads;
    of_bias.dbias_rows = of_bias.dbias_keys = 1;
    without.ds = nullptr;
    const std::string message = compute_backward_bias(of_bias, context);
    return message.empty() ? compute_backward(without, context) : message;
  });
}

std::string run_tangent(const TangentParams& params, cudaStream_t stream, int device) {
  return run(params, stream, device,
             [&](const Context& context) { return run_kernel(Direction::tangent, params, context); });
}

std::string run_backward_tangent(const BackwardTangentParams& params, cudaStream_t stream, int device) {
  return run(params, stream, device, [&](const Context& context) {
    return run_kernel(Direction::backward_tangent, params, context);
  });
}

std::string run_backward_bias(const BackwardParams& params, cudaStream_t stream, int device) {
  return run(params, stream, device,
             [&](const Context& context) { return compute_backward_bias(params, context); });
}

void set_test_settings(const char* kernels, const char* tile, const char* shared_memory_per_block) {
  const auto or_environment = [](const char* value, const std::string& environment) {
    return value ? value : environment;
  };
  const std::lock_guard lock(settings_mutex);
  settings = {or_environment(kernels, kEnvironment.kernels), or_environment(tile, kEnvironment.tile),
              or_environment(shared_memory_per_block, kEnvironment.shared_memory_per_block)};
}

std::vector<const char*> kernel_names() {
  std::vector<const char*> names;
  for (const Kernel& kernel : kKernels) names.push_back(kernel.name);
  return names;
}

}  // namespace jax_flash::cuda
