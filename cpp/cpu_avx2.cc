// The CPU kernels for AVX2.
#if defined(__x86_64__)
#define TARGET "avx2,fma"
#define VECTOR_BYTES 32
#define VECTOR_REGISTERS 16
#define KERNELS kAvx2Kernels
#include "cpu_unit.h"
#endif
