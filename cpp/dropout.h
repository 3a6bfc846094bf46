// Which probabilities dropout keeps: a function of seed, head, row and column alone, the same in every kernel
// and in jax_flash/_dropout.py. The random bits are Philox4x32-10's (Salmon et al., "Parallel random numbers:
// as easy as 1, 2, 3", 2011).
#pragma once

#include <cmath>
#include <cstdint>

#include "params.h"

namespace jax_flash {

inline constexpr int64_t kSeedWords = 5;  // of a head in dropout_seeds: the first members of Dropout

// Dropout of one head. One call of bits() decides on 8 pairs: rows r, r + 8 and columns c, c + 1, c + 8, c +
// 9 of a 16 x 16 tile. A thread of a tensor-core product holds just these; if the product is transposed, it
// holds half of those of two calls.
struct Dropout {
  uint32_t key[2];
  uint32_t head;
  uint32_t first_row, first_column;  // of this call in the whole sequence; multiples of 16
  uint32_t threshold;                // a pair is kept if its 16 bits are at least this

  struct Bits {
    uint32_t words[4];

    // The bits of row r + 8 h and column c + 8 half + odd.
    JAX_FLASH_INLINE uint32_t decision(int h, int half, int odd) const {
      return words[2 * h + half] >> (16 * odd) & 0xffff;
    }
  };

  JAX_FLASH_INLINE Bits bits(uint32_t row, uint32_t column) const {
    row += first_row, column += first_column;
    uint32_t c[4] = {row / 16 * 8 + row % 8, column / 16 * 4 + column % 8 / 2, head, 0};
    uint32_t k[2] = {key[0], key[1]};
    for (int round = 0; round < 10; ++round) {
      const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
      const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0], static_cast<uint32_t>(b),
                                static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1], static_cast<uint32_t>(a)};
      for (int i = 0; i < 4; ++i) c[i] = next[i];
      k[0] += 0x9E3779B9, k[1] += 0xBB67AE85;
    }
    return {{c[0], c[1], c[2], c[3]}};
  }

  JAX_FLASH_INLINE bool keeps(uint32_t decision) const { return decision >= threshold; }

  // The threshold for a dropout rate.
  static uint32_t threshold_of(double rate) { return static_cast<uint32_t>(std::nearbyint(rate * 65536)); }
};

}  // namespace jax_flash
