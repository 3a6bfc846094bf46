// The bias [T, S] of one head, added to a warp's 16 rows of scores.
//
// A 16-bit bias with aligned rows is staged through shared memory where a kernel has room: start_bias_copy
// loads it, and add_staged_bias adds it a block later. add_bias reads any other bias in place, whatever its
// strides.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "accumulator.cuh"
#include "pairs/head.cuh"
#include "ptx/memory.h"
#include "softmax.cuh"

namespace jax_flash::cuda {

// ---- Through shared memory ----

// A warp's staging buffer: the bias [kQueries, 8 kPieces keys] of 16 rows and kColumns columns of scores, in
// pieces of 16 bytes (8 keys of one query). Pieces are permuted such that neither the copy nor load_matrix
// has bank conflicts, and each address a lane uses differs from its first one by a constant.
template <bool kTransposed, int kColumns>
struct BiasBuffer {
  static constexpr int kQueries = kTransposed ? kColumns : 16, kPieces = kTransposed ? 2 : kColumns / 8;
  static constexpr int kBytes = kQueries * kPieces * 16;
  static constexpr int kQueriesAtOnce = 32 / kPieces;  // queries a warp copies with one instruction
  uint32_t shared;                                     // aligned to 128 bytes

  // The address of a piece.
  __device__ __forceinline__ uint32_t address(int query, int piece) const {
    static_assert(kPieces == (kTransposed ? 2 : 8));
    return shared + (query * kPieces + (piece ^ (kTransposed ? query / 4 % 2 : query % 8))) * 16;
  }
  // The address of the i-th piece that a lane copies, kQueriesAtOnce queries after the one before.
  __device__ __forceinline__ uint32_t copy_address(int i) const {
    const uint32_t first = address(lane_id() / kPieces, lane_id() % kPieces);
    return (kTransposed ? first : first ^ i % 2 * 64) + i * 512;
  }
  // The address that a lane hands to load_matrix, which reads the upper and lower rows of column tiles nt and
  // nt + 1.
  __device__ __forceinline__ uint32_t matrix_address(int nt) const {
    if constexpr (kTransposed)
      return address(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2) + nt * 256;
    return address(lane_id() % 16, lane_id() / 16) ^ nt * 16;
  }
};

// The first piece of 16 rows that a lane copies, for column 0.
struct BiasSource {
  const char* from;
  int query, key;
};

template <int kColumns, class Pairs>
__device__ __forceinline__ BiasSource bias_source(const Pairs& pairs, int row0) {
  constexpr bool kTransposed = Pairs::kTransposed;
  constexpr int kPieces = BiasBuffer<kTransposed, kColumns>::kPieces;
  const int query = (kTransposed ? 0 : row0) + lane_id() / kPieces,
            key = (kTransposed ? row0 : 0) + lane_id() % kPieces * 8;
  return {pairs.head.bias + (query * pairs.params.bias.row_stride + key) * 2, query, key};
}

// Starts to copy the columns from `column0` on; pieces beyond the ends become zeros. The warp must have
// finished reading the buffer.
template <class Pairs, int kColumns>
__device__ __forceinline__ void start_bias_copy(const BiasBuffer<Pairs::kTransposed, kColumns>& buffer,
                                                const Pairs& pairs, const BiasSource& source, int column0) {
  using Buffer = BiasBuffer<Pairs::kTransposed, kColumns>;
  constexpr bool kTransposed = Pairs::kTransposed;
  const AttentionParams& params = pairs.params;
  const int query = source.query + (kTransposed ? column0 : 0),
            key = source.key + (kTransposed ? 0 : column0);
  const int queries =
      key < static_cast<int>(params.seqlen_kv) ? static_cast<int>(params.seqlen_q) - query : 0;
  const char* from = source.from + column0 * (kTransposed ? params.bias.row_stride : 1) * 2;
  const int64_t step = Buffer::kQueriesAtOnce * params.bias.row_stride * 2;
#pragma unroll
  for (int i = 0; i * Buffer::kQueriesAtOnce < Buffer::kQueries; ++i) {
    ptx::copy_async<16>(buffer.copy_address(i), from, i * Buffer::kQueriesAtOnce < queries);
    from += step;
  }
  ptx::copy_async_commit();
}
template <class Pairs, int kColumns>
__device__ __forceinline__ void start_bias_copy(const BiasBuffer<Pairs::kTransposed, kColumns>& buffer,
                                                const Pairs& pairs, int row0, int column0) {
  start_bias_copy(buffer, pairs, bias_source<kColumns>(pairs, row0), column0);
}

// x = score * multiplier + bias * bias_multiplier. Waits for the copy started last.
template <class Pairs, int kNTiles>
__device__ __forceinline__ void add_staged_bias(float (&scores)[kNTiles][4], const Pairs& pairs,
                                                const BiasBuffer<Pairs::kTransposed, 8 * kNTiles>& buffer,
                                                const LogitScale& logit) {
  ptx::copy_async_wait<0>();
  __syncwarp();
  auto add = [&](auto to_float) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; nt += 2) {
      uint32_t r[4];  // four 8 x 8 matrices
      if constexpr (Pairs::kTransposed) {
        ptx::load_matrix_x4_transposed(r, buffer.matrix_address(nt));
      } else {
        ptx::load_matrix_x4(r, buffer.matrix_address(nt));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = scores[nt + i / 4][i % 4];
        x = fmaf(x, logit.multiplier, to_float(r[i / 2], i % 2) * logit.bias_multiplier);
      }
    }
  };
  if (pairs.options.is_half) {
    add([](uint32_t two, int i) {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(two >> 16 * i)));
    });
  } else {
    add([](uint32_t two, int i) { return __uint_as_float(i == 0 ? two << 16 : two & 0xffff0000); });
  }
  __syncwarp();
}

// ---- In place ----

// The address of a lane's first column in row half h, for elements of `bytes` bytes. Rows beyond the end
// repeat the last row; their results are never used.
template <class Pairs>
__device__ __forceinline__ const char* bias_row(const Pairs& pairs, int bytes, int row0, int column0, int h) {
  const PairArray& bias = pairs.params.bias;
  const int row = min(row0 + accumulator_row(0, h), pairs.row_limit() - 1),
            column = column0 + accumulator_column(0, 0);
  const int query = Pairs::kTransposed ? column : row, key = Pairs::kTransposed ? row : column;
  return pairs.head.bias + (query * bias.row_stride + key * bias.key_stride) * bytes;
}

// Calls f(nt, i, element) for each accumulator. Keys beyond the end repeat the last key: they get hidden
// later. Queries beyond the end are skipped: they are hidden, too, or their lse makes their probabilities 0.
template <class Element, int kNTiles, class Pairs, class F>
__device__ __forceinline__ void for_each_bias(const Pairs& pairs, int row0, int column0, F f) {
  const int64_t step = Pairs::kTransposed ? pairs.params.bias.row_stride : pairs.params.bias.key_stride;
  const int columns = pairs.column_limit() - column0 - accumulator_column(0, 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const Element* row = reinterpret_cast<const Element*>(bias_row(pairs, sizeof(Element), row0, column0, h));
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if constexpr (Pairs::kTransposed) {
          if (8 * nt + c < columns) f(nt, 2 * h + c, __ldg(row + (8 * nt + c) * step));
        } else {
          f(nt, 2 * h + c, __ldg(row + min(8 * nt + c, columns - 1) * step));
        }
      }
    }
  }
}

// Calls f(nt, i, elements) for each two neighboring accumulators i, i + 1, with elements of 16 bits.
template <int kNTiles, class Pairs, class F>
__device__ __forceinline__ void for_each_two_biases(const Pairs& pairs, int row0, int column0, F f) {
  const int columns = pairs.column_limit() - column0 - accumulator_column(0, 0);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t* row = reinterpret_cast<const uint32_t*>(bias_row(pairs, 2, row0, column0, h));
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
      if (8 * nt < columns) f(nt, 2 * h, __ldg(row + 4 * nt));
    }
  }
}

// A bias of 16 bits, of which the lower ones count, as float32.
template <class Pairs>
__device__ __forceinline__ float bias_from_16_bits(const Pairs& pairs, uint32_t bits) {
  return pairs.options.is_half ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits)))
                               : __uint_as_float(bits << 16);
}

// x = score * multiplier + bias * bias_multiplier, for rows row0.. and columns column0...
template <class Number, int kNTiles, class Pairs>
__device__ __forceinline__ void add_bias(Number (&scores)[kNTiles][4], const Pairs& pairs,
                                         const LogitScaleOf<Number>& logit, int row0, int column0) {
  auto add = [&](Number& x, Number bias) { x = fma(x, logit.multiplier, bias * logit.bias_multiplier); };
  auto from_16_bits = [&](uint32_t bits) { return bias_from_16_bits(pairs, bits); };
  if constexpr (std::is_same_v<Number, double>) {
    if (pairs.options.bias_format == BiasFormat::kOne64Bit) {
      for_each_bias<double, kNTiles>(pairs, row0, column0,
                                     [&](int nt, int i, double bias) { add(scores[nt][i], bias); });
      return;
    }
  }
  if (pairs.options.bias_format == BiasFormat::kOne32Bit) {
    for_each_bias<float, kNTiles>(pairs, row0, column0,
                                  [&](int nt, int i, float bias) { add(scores[nt][i], bias); });
  } else if (Pairs::kTransposed || pairs.options.bias_format == BiasFormat::kOne16Bit) {
    for_each_bias<uint16_t, kNTiles>(
        pairs, row0, column0, [&](int nt, int i, uint16_t bias) { add(scores[nt][i], from_16_bits(bias)); });
  } else {
    for_each_two_biases<kNTiles>(pairs, row0, column0, [&](int nt, int i, uint32_t two) {
      add(scores[nt][i], from_16_bits(two));
      add(scores[nt][i + 1], from_16_bits(two >> 16));
    });
  }
}

// The same of a bias that is read before the scores are there, by a kernel with registers for it.
template <int kNTiles>
struct BiasAhead {
  uint32_t bits[kNTiles][4];  // as they lie in memory, two neighbors of 16 bits in one; 0 beyond the end

  // Where there is none, zeros: undefined words would be carried through a loop, in registers.
  template <class Pairs>
  __device__ __forceinline__ void read(const Pairs& pairs, int row0, int column0) {
    const auto keep = [&](int nt, int i, uint32_t x) { bits[nt][i] = x; };
    *this = {};
    if (pairs.options.bias_format == BiasFormat::kNone) return;
    if (pairs.options.bias_format == BiasFormat::kOne32Bit) {
      for_each_bias<uint32_t, kNTiles>(pairs, row0, column0, keep);
    } else if (!has_neighbors(pairs)) {
      for_each_bias<uint16_t, kNTiles>(pairs, row0, column0, keep);
    } else {
      for_each_two_biases<kNTiles>(pairs, row0, column0, keep);
    }
  }

  template <class Pairs>
  __device__ __forceinline__ void add_to(float (&scores)[kNTiles][4], const Pairs& pairs,
                                         const LogitScale& logit) const {
    const auto add = [&](auto bias_of) {
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[nt][i] = fmaf(scores[nt][i], logit.multiplier, bias_of(nt, i) * logit.bias_multiplier);
        }
      }
    };
    if (pairs.options.bias_format == BiasFormat::kOne32Bit) {
      add([&](int nt, int i) { return __uint_as_float(bits[nt][i]); });
    } else if (!has_neighbors(pairs)) {
      add([&](int nt, int i) { return bias_from_16_bits(pairs, bits[nt][i]); });
    } else {
      add([&](int nt, int i) { return bias_from_16_bits(pairs, bits[nt][i / 2 * 2] >> 16 * (i % 2)); });
    }
  }

 private:
  template <class Pairs>
  __device__ static __forceinline__ bool has_neighbors(const Pairs& pairs) {
    return !Pairs::kTransposed && pairs.options.bias_format != BiasFormat::kOne16Bit;
  }
};

}  // namespace jax_flash::cuda
