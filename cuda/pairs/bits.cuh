// One bit for each pair of a warp's 16 rows of scores: is it visible, or does dropout keep it?
#pragma once

#include <cstdint>

namespace jax_flash::cuda {

// A lane's bits, one for each accumulator of 16 rows and 8 kNTiles columns.
//
// Their order is the one in which mask_bits.cuh can extract them fastest. A mask word covers 32 columns and
// has a byte for each tile of 8, with two bits for each lane. The two words of each of a lane's two rows, for
// columns 0 to 31 and 32 to 63, give four such pairs of bits for each byte.
template <int kNTiles>
struct PairBits {
  uint32_t bits;

  __device__ static constexpr int position(int nt, int i) {
    return 8 * (nt % 4) + 4 * (i / 2) + 2 * (nt / 4) + i % 2;
  }
  __device__ __forceinline__ bool test(int nt, int i) const { return bits >> position(nt, i) & 1; }
  __device__ __forceinline__ void set(int nt, int i, bool value) {
    if (value) bits |= 1u << position(nt, i);
  }
};

}  // namespace jax_flash::cuda
