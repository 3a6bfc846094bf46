// cuda/ptx/memory.h for the host.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace jax_flash::cuda::ptx {

inline uint32_t shared_address(const void* pointer) { return emulator::shared_address(pointer); }
inline void make_opaque(uint32_t&) {}

template <int kBytes>
void copy_async(uint32_t shared, const void* global, bool valid) {
  emulator::copy_later(shared, global, kBytes, valid);
}
inline void copy_async_commit() { emulator::commit_copies(); }
template <int kPending>
void copy_async_wait() {
  emulator::wait_for_copies(kPending);
}

inline void store_global_if(bool holds, void* global, uint32_t value) {
  if (holds) std::memcpy(global, &value, sizeof value);
}

inline void load_matrix_x4(uint32_t (&r)[4], uint32_t shared) {
  const auto rows = emulator::from_all_lanes(shared);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const void* row = emulator::at_shared_address(rows[8 * i + lane / 4], 16);
    std::memcpy(&r[i], static_cast<const std::byte*>(row) + lane % 4 * 4, 4);
  }
}

inline void store_matrix_x4(uint32_t shared, const uint32_t (&r)[4]) {
  const auto rows = emulator::from_all_lanes(shared);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    void* row = emulator::at_shared_address(rows[8 * i + lane / 4], 16);
    std::memcpy(static_cast<std::byte*>(row) + lane % 4 * 4, &r[i], 4);
  }
}

inline void store_matrix_x4_transposed(uint32_t shared, const uint32_t (&r)[4]) {
  const auto rows = emulator::from_all_lanes(shared);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 2; ++j) {
      const uint16_t element = static_cast<uint16_t>(r[i] >> 16 * j);
      void* row = emulator::at_shared_address(rows[8 * i + lane % 4 * 2 + j], 16);
      std::memcpy(static_cast<std::byte*>(row) + lane / 4 * 2, &element, 2);
    }
  }
}

inline void load_matrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
  const auto rows = emulator::from_all_lanes(shared);
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    uint16_t two[2];
    for (int j = 0; j < 2; ++j) {
      const void* row = emulator::at_shared_address(rows[8 * i + lane % 4 * 2 + j], 16);
      std::memcpy(&two[j], static_cast<const std::byte*>(row) + lane / 4 * 2, 2);
    }
    r[i] = two[0] | uint32_t{two[1]} << 16;
  }
}

inline uint32_t transpose_matrix(uint32_t two) {
  const auto all = emulator::from_all_lanes(two);
  const int lane = threadIdx.x % 32, column = lane / 4;  // of what becomes this lane's row
  uint32_t transposed = 0;
  for (int j = 0; j < 2; ++j) {
    const int row = lane % 4 * 2 + j;
    transposed |= (all[4 * row + column / 2] >> 16 * (column % 2) & 0xffff) << 16 * j;
  }
  return transposed;
}

template <class T>
void load_from_shared(T& to, uint32_t shared) {
  std::memcpy(&to, emulator::at_shared_address(shared, sizeof(T)), sizeof(T));
}
template <class T>
void store_to_shared(uint32_t shared, const T& from) {
  std::memcpy(emulator::at_shared_address(shared, sizeof(T)), &from, sizeof(T));
}
inline void load_shared_x4(uint32_t (&r)[4], uint32_t shared) { load_from_shared(r, shared); }
inline void load_shared_x4(float (&r)[4], uint32_t shared) { load_from_shared(r, shared); }
inline void store_shared_x4(uint32_t shared, const uint32_t (&r)[4]) { store_to_shared(shared, r); }
inline void load_shared_x2(float (&r)[2], uint32_t shared) { load_from_shared(r, shared); }
inline void store_shared_x4(uint32_t shared, const float (&r)[4]) { store_to_shared(shared, r); }
inline void store_shared_x2(uint32_t shared, const float (&r)[2]) { store_to_shared(shared, r); }
inline void load_shared_x2(double (&r)[2], uint32_t shared) { load_from_shared(r, shared); }
inline void store_shared_x2(uint32_t shared, const double (&r)[2]) { store_to_shared(shared, r); }
inline void store_shared(uint32_t shared, uint32_t value) { store_to_shared(shared, value); }
inline uint32_t load_shared(uint32_t shared) {
  uint32_t value;
  load_from_shared(value, shared);
  return value;
}

template <class Number, int kCount>
void reduce_add(Number* global, const Number (&value)[kCount]) {
  for (int i = 0; i < kCount; ++i) global[i] += value[i];
}

}  // namespace jax_flash::cuda::ptx
