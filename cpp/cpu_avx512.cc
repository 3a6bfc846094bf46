// The CPU kernels for AVX-512.
#if defined(__x86_64__)
#define TARGET "avx2,fma,avx512f,avx512bw,avx512dq,avx512vl"
#define VECTOR_BYTES 64
#define VECTOR_REGISTERS 32
#define KERNELS kAvx512Kernels
#include "cpu_unit.h"
#endif
