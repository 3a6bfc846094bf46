#include "cpu_attention.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "cpu_kernels.h"

namespace jax_flash::cpu {
namespace {

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

const Kernels& KernelsOf([[maybe_unused]] InstructionSet set) {
#if defined(__x86_64__)
  if (set == InstructionSet::kAvx512) return kAvx512Kernels;
  if (set == InstructionSet::kAvx2) return kAvx2Kernels;
#endif
  return kBaselineKernels;
}

}  // namespace

InstructionSet BestInstructionSet() {
  static const InstructionSet best = DetectInstructionSet();
  return best;
}

bool Forward(const ForwardParams& params, ThreadPool& pool, InstructionSet set) {
  return KernelsOf(set).forward(params, pool);
}

bool Backward(const BackwardParams& params, ThreadPool& pool, InstructionSet set) {
  return KernelsOf(set).backward(params, pool);
}

bool BackwardBias(const BackwardParams& params, ThreadPool& pool, InstructionSet set) {
  return KernelsOf(set).backward_bias(params, pool);
}

bool Tangent(const TangentParams& params, ThreadPool& pool, InstructionSet set) {
  return KernelsOf(set).tangent(params, pool);
}

bool BackwardTangent(const BackwardTangentParams& params, ThreadPool& pool, InstructionSet set) {
  return KernelsOf(set).backward_tangent(params, pool);
}

}  // namespace jax_flash::cpu
