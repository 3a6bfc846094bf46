// The translation unit of one instruction set. It has no include guard; define before including it:
//   TARGET           the compiler's name of the instruction set; undefined: the compiler's default
//   VECTOR_BYTES     size of a vector
//   VECTOR_REGISTERS number of vector registers
//   KERNELS          name of the table that is defined here
// Pragmas around the kernels select the instruction set. A compiler flag would apply to inline functions of
// the standard library, too, and the linker might use those copies on every machine.
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

// Called before and after a worker hands a part of dq to the next one; in tests/sanitize_cpu it yields at
// random.
#if !defined(HAND_OVER)
#define HAND_OVER() ((void)0)
#endif
#define INLINE inline __attribute__((always_inline))
// For what every kernel calls once a row or tile: a copy in each would take half of the time to compile.
#if defined(__clang__)
#define NOINLINE __attribute__((noinline))
#else
#define NOINLINE __attribute__((noinline, noclone))
#endif
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
// clang-format off: each file needs those before it
#include "cpu_vector.h"
#include "cpu_tiles.h"
#include "cpu_pairs.h"
#include "cpu_forward.h"
#include "cpu_backward.h"
#include "cpu_backward_bias.h"
#include "cpu_tangent.h"
#include "cpu_backward_tangent.h"
// clang-format on
END_TARGET

// `function` in the type to compute in: double for float64, float for all others.
#define IN_COMPUTE_TYPE(function) \
  params.dtype == DType::kFloat64 ? function<double>(params, pool) : function<float>(params, pool)

bool Forward(const ForwardParams& params, ThreadPool& pool) { return IN_COMPUTE_TYPE(ForwardIn); }
bool Backward(const BackwardParams& params, ThreadPool& pool) { return IN_COMPUTE_TYPE(BackwardIn); }
bool BackwardBias(const BackwardParams& params, ThreadPool& pool) { return IN_COMPUTE_TYPE(BackwardBiasIn); }
bool Tangent(const TangentParams& params, ThreadPool& pool) { return IN_COMPUTE_TYPE(TangentIn); }
bool BackwardTangent(const BackwardTangentParams& params, ThreadPool& pool) {
  return IN_COMPUTE_TYPE(BackwardTangentIn);
}

}  // namespace

const Kernels KERNELS = {Forward, Backward, BackwardBias, Tangent, BackwardTangent};

}  // namespace jax_flash::cpu
