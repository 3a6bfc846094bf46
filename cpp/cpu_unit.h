// The translation unit of one instruction set (no include guard), which defines before it includes this:
//   TARGET           the set, as the compiler calls it; not defined: what it compiles for anyway
//   VECTOR_BYTES, VECTOR_REGISTERS
//   KERNELS          the name of the table that is defined here
// The compiler is told the set by pragmas around the kernels alone: with a flag for the whole unit, inline
// functions of the standard library would be compiled for it, too, and the linker might take those for every
// machine.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <new>
#include <thread>
#include <type_traits>

#include "cpu_kernels.h"
#include "cpu_mask.h"
#include "cpu_parallel.h"
#include "cpu_types.h"
#include "dropout.h"
#include "params.h"

// Before and after a worker hands a part of dq to the next one; tests/sanitize_cpu has it yield at random.
#if !defined(HAND_OVER)
#define HAND_OVER() ((void)0)
#endif
#define INLINE inline __attribute__((always_inline))
#define PRAGMA(text) _Pragma(#text)
#if !defined(TARGET)
#define BEGIN_TARGET(set)
#define END_TARGET
#elif defined(__clang__)
#define BEGIN_TARGET(set) PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define END_TARGET PRAGMA(clang attribute pop)
#else
#define BEGIN_TARGET(set) PRAGMA(GCC push_options) PRAGMA(GCC target(set))
#define END_TARGET PRAGMA(GCC pop_options)
#endif

namespace jax_flash::cpu {
namespace {

constexpr int kVectorBytes = VECTOR_BYTES;
constexpr int kVectorRegisters = VECTOR_REGISTERS;

int64_t DivideUp(int64_t x, int64_t step) { return (x + step - 1) / step; }

// Query heads per key head.
int64_t GroupSize(const AttentionParams& params) {
  return params.num_kv_heads ? params.num_heads / params.num_kv_heads : 0;
}

BEGIN_TARGET(TARGET)
// clang-format off: each needs those before it
#include "cpu_vector.h"
#include "cpu_tiles.h"
#include "cpu_pairs.h"
#include "cpu_forward.h"
#include "cpu_backward.h"
#include "cpu_backward_bias.h"
// clang-format on
END_TARGET

#define DISPATCH_DTYPE(function)               \
  switch (params.dtype) {                      \
    case DType::kFloat16:                      \
      return function<Half>(params, pool);     \
    case DType::kBFloat16:                     \
      return function<BFloat16>(params, pool); \
    case DType::kFloat32:                      \
      return function<float>(params, pool);    \
    case DType::kFloat64:                      \
      return function<double>(params, pool);   \
    case DType::kBool:                         \
      break;                                   \
  }                                            \
  return false;

bool Forward(const ForwardParams& params, ThreadPool& pool) { DISPATCH_DTYPE(ForwardAs) }
bool Backward(const BackwardParams& params, ThreadPool& pool) { DISPATCH_DTYPE(BackwardAs) }
bool BackwardBias(const BackwardParams& params, ThreadPool& pool) { DISPATCH_DTYPE(BackwardBiasAs) }

}  // namespace

const Kernels KERNELS = {Forward, Backward, BackwardBias};

}  // namespace jax_flash::cpu
