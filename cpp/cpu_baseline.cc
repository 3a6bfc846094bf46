// The CPU kernels for the baseline that every machine has: SSE2 on x86-64, NEON on arm64.
#define VECTOR_BYTES 16
#if defined(__aarch64__)
#define VECTOR_REGISTERS 32
#else
#define VECTOR_REGISTERS 16
#endif
#define KERNELS kBaselineKernels
#include "cpu_unit.h"
