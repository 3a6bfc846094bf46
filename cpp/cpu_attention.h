// Attention on the CPU, for any head dims. float16, bfloat16 and float32 are computed in float32, float64 in
// float64. The algorithm is that of the CUDA kernels, vectorized for the instruction set found at run time.
// Results do not depend on the number of threads. Includes no XLA headers.
#pragma once

#include "cpu_parallel.h"
#include "params.h"

namespace jax_flash::cpu {

// The instruction sets that the kernels are compiled for.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };  // baseline: SSE2 on x86-64, NEON on arm64

// The widest instruction set of this machine. The environment variable JAX_FLASH_INSTRUCTION_SET (baseline,
// avx2, avx512) lowers it.
InstructionSet BestInstructionSet();

// Each returns false and writes no results if scratch memory cannot be allocated.
bool Forward(const ForwardParams& params, ThreadPool& pool, InstructionSet set = BestInstructionSet());
bool Backward(const BackwardParams& params, ThreadPool& pool, InstructionSet set = BestInstructionSet());
bool BackwardBias(const BackwardParams& params, ThreadPool& pool, InstructionSet set = BestInstructionSet());
bool Tangent(const TangentParams& params, ThreadPool& pool, InstructionSet set = BestInstructionSet());
bool BackwardTangent(const BackwardTangentParams& params, ThreadPool& pool,
                     InstructionSet set = BestInstructionSet());

}  // namespace jax_flash::cpu
