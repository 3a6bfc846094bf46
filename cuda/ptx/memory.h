// Moves between global memory, shared memory and registers.
#pragma once

#include <cstdint>

namespace jax_flash::cuda::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// From here on the compiler does not know how the value came about: it cannot split an address that depends
// on it into one for each use, nor compute it far ahead.
__device__ __forceinline__ void make_opaque(uint32_t& value) { asm volatile("" : "+r"(value)); }

// Copies kBytes to shared memory asynchronously. If `valid` is false, writes zeros and reads nothing.
// cp.async bypasses L1 (.cg) only at 16 bytes. Both addresses are aligned to kBytes.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 16);
  const int source_bytes = valid ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(source_bytes)
                 : "memory");
  }
}

__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of this thread's latest copy groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Loads four 8 x 16-byte matrices. Lane l gives the address of row l % 8 of matrix l / 8, aligned to 16
// bytes.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Like load_matrix_x4, with each matrix transposed as 8 x 8 elements of 16 bits.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which each lane has two of row lane / 4, as
// load_matrix_x4 loads them.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t two) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(two));
  return transposed;
}

// Stores four 8 x 16-byte matrices in the layout of load_matrix_x4_transposed. Compute capability 9.0.
__device__ __forceinline__ void store_matrix_x4_transposed(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Stores four 8 x 16-byte matrices in the layout of load_matrix_x4. Compute capability 9.0.
__device__ __forceinline__ void store_matrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Loads 16 bytes from an address aligned to 16 bytes.
__device__ __forceinline__ void load_shared_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Stores 4 bytes if `holds`, without a branch.
__device__ __forceinline__ void store_global_if(bool holds, void* global, uint32_t value) {
  asm volatile(
      "{.reg .pred p;\n"
      "setp.ne.b32 p, %0, 0;\n"
      "@p st.global.b32 [%1], %2;}" ::"r"(static_cast<int>(holds)),
      "l"(global), "r"(value)
      : "memory");
}

// Stores 16 bytes to an address aligned to 16 bytes.
__device__ __forceinline__ void store_shared_x4(uint32_t shared, const uint32_t (&r)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void load_shared_x4(float (&r)[4], uint32_t shared) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(r[0]), "=f"(r[1]), "=f"(r[2]), "=f"(r[3])
               : "r"(shared)
               : "memory");
}

// Loads 8 bytes from an address aligned to 8 bytes.
__device__ __forceinline__ void load_shared_x2(float (&r)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(r[0]), "=f"(r[1]) : "r"(shared) : "memory");
}

// Stores 8 bytes to an address aligned to 8 bytes.
__device__ __forceinline__ void store_shared_x2(uint32_t shared, const float (&r)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(shared), "f"(r[0]), "f"(r[1]) : "memory");
}

// Stores 16 bytes to an address aligned to 16 bytes.
__device__ __forceinline__ void store_shared_x4(uint32_t shared, const float (&r)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(r[0]), "f"(r[1]), "f"(r[2]),
               "f"(r[3])
               : "memory");
}

// The same for two doubles.
__device__ __forceinline__ void load_shared_x2(double (&r)[2], uint32_t shared) {
  asm volatile("ld.shared.v2.f64 {%0, %1}, [%2];" : "=d"(r[0]), "=d"(r[1]) : "r"(shared) : "memory");
}
__device__ __forceinline__ void store_shared_x2(uint32_t shared, const double (&r)[2]) {
  asm volatile("st.shared.v2.f64 [%0], {%1, %2};" ::"r"(shared), "d"(r[0]), "d"(r[1]) : "memory");
}

__device__ __forceinline__ uint32_t load_shared(uint32_t shared) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(shared) : "memory");
  return value;
}

__device__ __forceinline__ void store_shared(uint32_t shared, uint32_t value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared), "r"(value) : "memory");
}

// Adds kCount neighboring floats to global memory without waiting for the result, with one instruction on
// compute capability 9.0. The address is aligned to 4 * kCount bytes.
template <int kCount>
__device__ __forceinline__ void reduce_add(float* global, const float (&value)[kCount]) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4);
#if __CUDA_ARCH__ >= 900
  if constexpr (kCount == 4) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(value[0]), "f"(value[1]),
                 "f"(value[2]), "f"(value[3])
                 : "memory");
  } else if constexpr (kCount == 2) {
    asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(global), "f"(value[0]), "f"(value[1])
                 : "memory");
  } else {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global), "f"(value[0]) : "memory");
  }
#else
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global + i), "f"(value[i]) : "memory");
  }
#endif
}

template <int kCount>
__device__ __forceinline__ void reduce_add(double* global, const double (&value)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    asm volatile("red.global.add.f64 [%0], %1;" ::"l"(global + i), "d"(value[i]) : "memory");
  }
}

}  // namespace jax_flash::cuda::ptx
