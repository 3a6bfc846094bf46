// Runs CUDA kernels on the host: one block, or cluster of two, after the other, each thread as a fiber with a
// stack of its own. Fibers switch where threads wait for each other, at barriers of the block and at
// instructions of a whole warp. Included before every source file. See tests/emulated.py.
#pragma once

#include <bit>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

using std::fabs, std::fma, std::fmax, std::fmin, std::log;  // of float, too

struct dim3 {
  unsigned x = 1;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) double2 {
  double x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) longlong2 {
  long long x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

namespace emulator {

// Calls `kernel` in each thread of the grid. As many blocks as a cluster has run side by side, one or two.
inline constexpr int kMaxCluster = 2;
void launch(int64_t blocks, int threads, int shared_bytes, const std::function<void()>& kernel,
            int cluster = 1);

// The block's dynamic shared memory, of which the kernels know addresses of 32 bits.
uint8_t* dynamic_shared();
uint32_t shared_address(const void* pointer);

// Which block of its cluster the current thread's is. An address begins with the rank of its block in 8 bits,
// as it does on Hopper; it may be 0, as in a descriptor.
int cluster_rank();
uint32_t shared_address_of(int rank, uint32_t address);
void* at_shared_address(uint32_t address, int bytes, int rank = cluster_rank());
void wait_for_cluster();

inline constexpr int kMaxThreads = 640;
void wait_for_block();
// Lets the other threads of the block get on until `condition` holds. The report of a deadlock says what
// each thread waits for.
void wait_until(const std::function<bool()>& condition, const char* what, int64_t which);
// Lets them run once, and from now on in the opposite order.
void let_others_run();
// Something has happened for which a thread may wait.
void note_progress();
[[noreturn]] void fail(const char* message);

// Of hopper.h.
void begin_hopper_block(int rank);
void end_hopper_block(int rank);
// A thread tells other blocks that it has come so far. Its stores and additions must have ended.
void note_arrival();

// Publishes a lane's bytes; returns those of all lanes, `stride` bytes apart, once all have come here.
const std::byte* exchange(const void* mine, int bytes);
inline constexpr int kExchangeStride = 64;

// The values of all lanes of the warp, by lane.
template <class T>
struct OfLanes {
  const std::byte* data;
  T operator[](int lane) const {
    T value;
    std::memcpy(&value, data + lane * kExchangeStride, sizeof(T));
    return value;
  }
};
template <class T>
OfLanes<T> from_all_lanes(const T& mine) {
  static_assert(sizeof(T) <= kExchangeStride);
  return {exchange(&mine, sizeof(T))};
}

// The sum that tensor cores compute in an instruction. Those of float32 drop the bits of each term below the
// 26th of the largest term, and of the sum what float32 does not hold; the rounding errors of an H100 agree.
template <class Number, int kTerms>
Number sum_of_products(const double (&terms)[kTerms]) {
  double sum = 0, largest = 0;
  for (const double term : terms) {
    sum += term;
    if (std::fabs(term) > largest) largest = std::fabs(term);
  }
  if (sizeof(Number) == sizeof(double) || largest == 0 || !std::isfinite(sum))
    return static_cast<Number>(sum);
  const auto exponent = std::bit_cast<uint64_t>(largest) >> 52;  // the largest binade, plus 1,023
  const auto scale = std::bit_cast<double>((2 * 1023 + 25 - exponent) << 52);
  int64_t units = 0;
  for (const double term : terms) units += static_cast<int64_t>(term * scale);
  sum = static_cast<double>(units) / scale;
  const auto rounded = static_cast<Number>(sum);
  const bool is_finite = std::isfinite(rounded);
  return is_finite && std::fabs(rounded) > std::fabs(sum) ? std::nextafter(rounded, Number{0}) : rounded;
}

// A copy is made when its thread waits for it, and not before.
void copy_later(uint32_t to, const void* from, int bytes, bool valid);
void commit_copies();
void wait_for_copies(int pending);

}  // namespace emulator

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

template <class T>
constexpr T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}
template <class T>
T __ldcs(const T* pointer) {
  return *pointer;
}
inline int atomicAdd(int* to, int x) { return *to += x, *to - x; }
inline unsigned long long atomicAdd(unsigned long long* to, unsigned long long x) {
  return *to += x, *to - x;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
inline int atomicMax(int* to, int x) { return std::exchange(*to, max(*to, x)); }
inline int atomicMin(int* to, int x) { return std::exchange(*to, min(*to, x)); }
inline int __float2int_rn(float x) {
  constexpr float kLimit = 0x1p31f;  // saturates; 0 for NaN
  if (!(std::abs(x) < kLimit)) return x > 0 ? INT_MAX : x < 0 ? INT_MIN : 0;
  return static_cast<int>(std::nearbyint(x));
}
inline float __uint_as_float(uint32_t x) { return std::bit_cast<float>(x); }
inline uint32_t __float_as_uint(float x) { return std::bit_cast<uint32_t>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline uint32_t __umulhi(uint32_t x, uint32_t y) { return static_cast<uint32_t>(uint64_t{x} * y >> 32); }
inline int __popc(uint32_t x) { return std::popcount(x); }
inline int __ffs(uint32_t x) { return x == 0 ? 0 : 1 + std::countr_zero(x); }

inline void __syncthreads() { emulator::wait_for_block(); }
inline void __syncwarp() { emulator::from_all_lanes(0); }
template <class T>
T __shfl_sync(uint32_t, T x, int lane) {
  return emulator::from_all_lanes(x)[lane % 32];
}
template <class T>
T __shfl_xor_sync(uint32_t, T x, int lanes) {
  return emulator::from_all_lanes(x)[(threadIdx.x % 32) ^ lanes];
}
template <class T, class F>
T reduce_over_lanes(T x, F f) {
  const auto all = emulator::from_all_lanes(x);
  T result = all[0];
  for (int lane = 1; lane < 32; ++lane) result = f(result, all[lane]);
  return result;
}
inline int __reduce_min_sync(uint32_t, int x) { return reduce_over_lanes(x, min<int>); }
inline int __reduce_max_sync(uint32_t, int x) { return reduce_over_lanes(x, max<int>); }
inline int __reduce_add_sync(uint32_t, int x) {
  return reduce_over_lanes(x, [](int a, int b) { return a + b; });
}
inline bool __any_sync(uint32_t, bool x) { return reduce_over_lanes<int>(x, max<int>); }
inline bool __all_sync(uint32_t, bool x) { return reduce_over_lanes<int>(x, min<int>); }
inline uint32_t __ballot_sync(uint32_t, bool x) {
  return reduce_over_lanes<uint32_t>(uint32_t{x} << threadIdx.x % 32,
                                     [](uint32_t a, uint32_t b) { return a | b; });
}
