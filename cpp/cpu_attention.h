// Attention on the CPU, for any head dims: float16, bfloat16 and float32 computed in float32, float64 in
// float64. The algorithm of the CUDA kernels, tile by tile, vectorised for the instruction set found at run
// time. The results do not depend on the number of threads. Includes no XLA headers.
#pragma once

#include "cpu_parallel.h"
#include "params.h"

namespace jax_flash::cpu {

// The vector instructions that the kernels are compiled for.
enum class InstructionSet { kBaseline, kAvx2, kAvx512 };  // the baseline: SSE2 on x86-64, NEON on arm64

// The widest of this machine. The environment variable JAX_FLASH_INSTRUCTION_SET (baseline, avx2, avx512)
// lowers it.
InstructionSet BestInstructionSet();

// They return false, with the results unwritten, if there is no memory for the scratch.
bool Forward(const ForwardParams& params, ThreadPool& pool, InstructionSet set = BestInstructionSet());
bool Backward(const BackwardParams& params, ThreadPool& pool, InstructionSet set = BestInstructionSet());
bool BackwardBias(const BackwardParams& params, ThreadPool& pool, InstructionSet set = BestInstructionSet());

}  // namespace jax_flash::cpu
