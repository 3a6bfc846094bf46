#include "cpu_attention.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <string_view>
#include <thread>
#include <type_traits>

#include "cpu_mask.h"
#include "cpu_types.h"
#include "dropout.h"

namespace jax_flash::cpu {
namespace {

#define INLINE inline __attribute__((always_inline))

int64_t DivideUp(int64_t x, int64_t step) { return (x + step - 1) / step; }

// Query heads per key head.
int64_t GroupSize(const AttentionParams& params) {
  return params.num_kv_heads ? params.num_heads / params.num_kv_heads : 0;
}

// The kernels are compiled once for each instruction set, as one binary serves every machine: the compiler is
// told the set for the code in between, and its vectors are as wide as that set's registers. (An attribute on
// each function would do the same, at each function.)
#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define BEGIN_TARGET(set) PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(set) PRAGMA(GCC push_options) PRAGMA(GCC target(set))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

namespace baseline {
constexpr int kVectorBytes = 16;
#if defined(__aarch64__)
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorRegisters = 16;
#endif
#include "cpu_kernels.h"
}  // namespace baseline

#if defined(__x86_64__)
BEGIN_TARGET("avx2,fma")
namespace avx2 {
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#include "cpu_kernels.h"
}  // namespace avx2
END_TARGET

BEGIN_TARGET("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl")
namespace avx512 {
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#include "cpu_kernels.h"
}  // namespace avx512
END_TARGET
#endif

InstructionSet DetectInstructionSet() {
  InstructionSet best = InstructionSet::kBaseline;
#if defined(__x86_64__)
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vl");
  best = has_avx512 ? InstructionSet::kAvx512 : has_avx2 ? InstructionSet::kAvx2 : InstructionSet::kBaseline;
#endif
  const char* variable = std::getenv("JAX_FLASH_INSTRUCTION_SET");
  const std::string_view wish = variable ? variable : "";
  if (wish == "baseline") return InstructionSet::kBaseline;
  if (wish == "avx2") return std::min(best, InstructionSet::kAvx2);
  return best;
}

}  // namespace

InstructionSet BestInstructionSet() {
  static const InstructionSet best = DetectInstructionSet();
  return best;
}

// Calls `function<element type>` of the set's namespace.
#define DISPATCH_DTYPE(set, function)               \
  switch (params.dtype) {                           \
    case DType::kFloat16:                           \
      return set::function<Half>(params, pool);     \
    case DType::kBFloat16:                          \
      return set::function<BFloat16>(params, pool); \
    case DType::kFloat32:                           \
      return set::function<float>(params, pool);    \
    case DType::kFloat64:                           \
      return set::function<double>(params, pool);   \
    case DType::kBool:                              \
      break;                                        \
  }

#if defined(__x86_64__)
#define DISPATCH(function)                                             \
  if (set == InstructionSet::kAvx512) DISPATCH_DTYPE(avx512, function) \
  if (set == InstructionSet::kAvx2) DISPATCH_DTYPE(avx2, function)     \
  DISPATCH_DTYPE(baseline, function)
#else
#define DISPATCH(function) DISPATCH_DTYPE(baseline, function)
#endif

bool Forward(const ForwardParams& params, ThreadPool& pool, [[maybe_unused]] InstructionSet set) {
  DISPATCH(ForwardAs)
  return false;
}

bool Backward(const BackwardParams& params, ThreadPool& pool, [[maybe_unused]] InstructionSet set) {
  DISPATCH(BackwardAs)
  return false;
}

bool BackwardBias(const BackwardParams& params, ThreadPool& pool, [[maybe_unused]] InstructionSet set) {
  DISPATCH(BackwardBiasAs)
  return false;
}

}  // namespace jax_flash::cpu
