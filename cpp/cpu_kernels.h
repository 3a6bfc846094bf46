// Tables of the kernels compiled for each instruction set. One binary serves every machine; cpu_attention.cc
// chooses at run time.
#pragma once

#include "cpu_parallel.h"
#include "params.h"

namespace jax_flash::cpu {

struct Kernels {
  bool (*forward)(const ForwardParams& params, ThreadPool& pool);
  bool (*backward)(const BackwardParams& params, ThreadPool& pool);
  bool (*backward_bias)(const BackwardParams& params, ThreadPool& pool);
  bool (*tangent)(const TangentParams& params, ThreadPool& pool);
  bool (*backward_tangent)(const BackwardTangentParams& params, ThreadPool& pool);
};

extern const Kernels kBaselineKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels, kAvx512Kernels;
#endif

}  // namespace jax_flash::cpu
