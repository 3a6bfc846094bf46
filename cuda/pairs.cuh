// What depends on the single pair of query and key and is read from an array or drawn: bias, mask, segments,
// dropout. Only the general instantiation of a kernel has it.
//
// A tile of scores lies in the accumulators (accumulator.cuh) with queries in rows and keys in columns or,
// transposed, the other way round.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "accumulator.cuh"
#include "dropout.h"
#include "params.h"
#include "softmax.cuh"

namespace jax_flash::cuda {

// How a lane reads the bias: two neighbouring columns of 16 bits at once, or one at a time.
enum class BiasFormat { kNone, kTwoOf16Bits, kOneOf16Bits, kOneOf32Bits };

inline bool has_pairs(const AttentionParams& params) {
  return params.bias || params.mask || params.query_segment_ids || params.alibi_slopes ||
         params.dropout_seeds;
}

// Does anything but a positive scale stand between scores and probabilities?
inline bool is_general(const AttentionParams& params) {
  return has_pairs(params) || LogitScale(params).transform != LogitScale::kNone;
}

// What of it is known before the launch.
struct PairOptions {
  BiasFormat bias_format;
  bool mask_by_twos;  // are two neighbouring keys' bytes of the mask read at once?
  bool is_half;       // is the bias float16?
  uint32_t drop_threshold;
  float kept_factor;  // what kept probabilities are multiplied by

  explicit PairOptions(const AttentionParams& params) {
    auto by_twos = [&](const PairArray& array, int bytes) {
      return array.key_stride == 1 && params.seqlen_kv % 2 == 0 &&
             (reinterpret_cast<uintptr_t>(array.data) % (2 * bytes) == 0);
    };
    is_half = params.bias.dtype == DType::kFloat16;
    bias_format = !params.bias                           ? BiasFormat::kNone
                  : params.bias.dtype == DType::kFloat32 ? BiasFormat::kOneOf32Bits
                  : by_twos(params.bias, 2)              ? BiasFormat::kTwoOf16Bits
                                                         : BiasFormat::kOneOf16Bits;
    mask_by_twos = params.mask && by_twos(params.mask, 1);
    drop_threshold = Dropout::threshold_of(params.options.dropout_rate);
    kept_factor = static_cast<float>(1 / (1 - params.options.dropout_rate));
  }
};

// One bit for each accumulator of 16 rows and 8 kNTiles columns.
template <int kNTiles>
struct PairBits {
  uint32_t bits;

  __device__ __forceinline__ bool test(int nt, int i) const { return bits >> (4 * nt + i) & 1; }
  __device__ __forceinline__ void set(int nt, int i, uint32_t bit) { bits |= bit << (4 * nt + i); }
};

// A lane's part of a bias, as read; of two neighbouring columns of 16 bits both are in the first.
template <int kNTiles>
struct BiasTile {
  uint32_t raw[kNTiles][4];
};

// The pairs of one batch element and query head.
template <bool kTransposed>
struct Pairs {
  const AttentionParams& params;
  const PairOptions& options;
  int batch, head;

  __device__ __forceinline__ bool may_hide() const { return params.mask.data || params.query_segment_ids; }
  __device__ __forceinline__ bool may_drop() const { return params.dropout_seeds; }

  // ---- Bias: functions of 16 rows from `row0` on and of 8 kNTiles columns from `column0` on ----

  template <int kNTiles>
  __device__ __forceinline__ void load_bias(BiasTile<kNTiles>& tile, int row0, int column0) const {
    switch (options.bias_format) {
      case BiasFormat::kNone:
        return;
      case BiasFormat::kTwoOf16Bits:
        if constexpr (!kTransposed) return load_twos(tile, row0, column0);
        return load_ones<uint16_t>(tile, row0, column0);
      case BiasFormat::kOneOf16Bits:
        return load_ones<uint16_t>(tile, row0, column0);
      case BiasFormat::kOneOf32Bits:
        return load_ones<uint32_t>(tile, row0, column0);
    }
  }

  // From scores to logits / scale_log2, but for what is hidden.
  template <int kNTiles>
  __device__ __forceinline__ void transform(float (&scores)[kNTiles][4], const BiasTile<kNTiles>& tile,
                                            const LogitScale& logit, int row0, int column0) const {
    if (logit.transform == LogitScale::kNone) return;
    for_each(scores, [&](float& x, int, int) { x *= logit.multiplier; });
    const float factor = logit.bias_multiplier;
    auto add = [&](auto value) {
      for_each(scores, [&](float& x, int nt, int i) { x = fmaf(value(nt, i), factor, x); });
    };
    if (options.bias_format == BiasFormat::kOneOf32Bits) {
      add([&](int nt, int i) { return __uint_as_float(tile.raw[nt][i]); });
    } else if (options.bias_format != BiasFormat::kNone) {
      const bool twos = !kTransposed && options.bias_format == BiasFormat::kTwoOf16Bits;
      auto bits = [&](int nt, int i) {
        return twos && i % 2 ? tile.raw[nt][i - 1] >> 16 : tile.raw[nt][i] & 0xffff;
      };
      if (options.is_half) {
        add([&](int nt, int i) {
          return __half2float(__ushort_as_half(static_cast<uint16_t>(bits(nt, i))));
        });
      } else {
        add([&](int nt, int i) { return __uint_as_float(bits(nt, i) << 16); });
      }
    }
    if (params.alibi_slopes) {
      const float slope = -slope_of_head() * factor;
      const int offset = position_offset();
      for_each(scores, [&](float& x, int nt, int i) {
        x = fmaf(slope,
                 distance(row0 + accumulator_row(0, i / 2), column0 + accumulator_column(nt, i % 2), offset),
                 x);
      });
    }
    if (logit.transform == LogitScale::kSoftCap) {
      for_each(scores, [&](float& x, int, int) { x = tanh_from_exp2(x); });
    }
  }

  // |i + query_offset - j|, of a row and a column.
  __device__ __forceinline__ float distance(int row, int column, int offset) const {
    const int query = kTransposed ? column : row, key = kTransposed ? row : column;
    return fabsf(static_cast<float>(query + offset - key));
  }
  __device__ __forceinline__ int position_offset() const {
    constexpr int kFar = 1 << 30;  // far from overflow
    return params.query_offset ? max(-kFar, min(params.query_offset[batch], kFar)) : 0;
  }

  // ---- Which pairs mask and segments leave visible ----

  template <int kNTiles>
  __device__ __forceinline__ PairBits<kNTiles> visible(int row0, int column0) const {
    static_assert(kNTiles <= 8);
    PairBits<kNTiles> result{params.mask.data ? 0 : ~0u};
    if (params.mask.data) load_mask(result, row0, column0);
    if (params.query_segment_ids) compare_segments(result, row0, column0);
    return result;
  }

  // ---- Which pairs dropout keeps ----

  // Both row0 and column0 are multiples of 16.
  template <int kNTiles>
  __device__ __forceinline__ PairBits<kNTiles> kept(int row0, int column0) const {
    static_assert(kNTiles % 2 == 0 && kNTiles <= 8);
    const uint32_t* seeds = params.dropout_seeds + (int64_t{batch} * params.num_heads + head) * 3;
    const Dropout dropout{{seeds[0], seeds[1]}, seeds[2], options.drop_threshold};
    PairBits<kNTiles> result{0};
    const int row = row0 + accumulator_row(0, 0);
#pragma unroll
    for (int nt = 0; nt < kNTiles; nt += 2) {
      const int column = column0 + accumulator_column(nt, 0);
      if constexpr (kTransposed) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const Dropout::Bits bits = dropout.bits(column + c, row);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            result.set(nt + i / 2, i % 2 * 2 + c, dropout.keeps(bits.decision(i / 2, i % 2, row % 2)));
          }
        }
      } else {
        const Dropout::Bits bits = dropout.bits(row, column);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          result.set(nt + i / 4, i % 4, dropout.keeps(bits.decision(i % 4 / 2, i / 4, i % 2)));
        }
      }
    }
    return result;
  }

  __device__ __forceinline__ float slope_of_head() const {
    return static_cast<const float*>(params.alibi_slopes)[int64_t{batch} * params.num_heads + head];
  }

 private:
  // f(x, nt, i) for each accumulator.
  template <int kNTiles, class F>
  __device__ static __forceinline__ void for_each(float (&scores)[kNTiles][4], F f) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(scores[nt][i], nt, i);
    }
  }

  __device__ __forceinline__ int row_limit() const {
    return static_cast<int>(kTransposed ? params.seqlen_kv : params.seqlen_q);
  }
  __device__ __forceinline__ int column_limit() const {
    return static_cast<int>(kTransposed ? params.seqlen_q : params.seqlen_kv);
  }

  // Where a lane's first column of row half h lies, for an element of `bytes` bytes. Rows beyond the end are
  // the last one again; what they make does not count.
  __device__ __forceinline__ const char* lane_row(const PairArray& array, int bytes, int row0, int column0,
                                                  int h) const {
    const int row = min(row0 + accumulator_row(0, h), row_limit() - 1),
              column = column0 + accumulator_column(0, 0);
    const int query = kTransposed ? column : row, key = kTransposed ? row : column;
    return static_cast<const char*>(array.data) + (batch * array.batch_stride + head * array.head_stride +
                                                   query * array.row_stride + key * array.key_stride) *
                                                      bytes;
  }

  // f(nt, i, element) for each accumulator's element of the array; columns beyond the end are left out.
  template <class Element, int kNTiles, class F>
  __device__ __forceinline__ void for_each_element(const PairArray& array, int row0, int column0, F f) const {
    const int64_t step = kTransposed ? array.row_stride : array.key_stride;
    const int columns = column_limit() - column0 - accumulator_column(0, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Element* row =
          reinterpret_cast<const Element*>(lane_row(array, sizeof(Element), row0, column0, h));
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (8 * nt + c < columns) f(nt, 2 * h + c, __ldg(row + (8 * nt + c) * step));
        }
      }
    }
  }

  template <class Element, int kNTiles>
  __device__ __forceinline__ void load_ones(BiasTile<kNTiles>& tile, int row0, int column0) const {
    for_each_element<Element, kNTiles>(params.bias, row0, column0,
                                       [&](int nt, int i, Element x) { tile.raw[nt][i] = x; });
  }

  template <int kNTiles>
  __device__ __forceinline__ void load_twos(BiasTile<kNTiles>& tile, int row0, int column0) const {
    const int columns = column_limit() - column0 - accumulator_column(0, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* row = reinterpret_cast<const uint32_t*>(lane_row(params.bias, 2, row0, column0, h));
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
        if (8 * nt < columns) tile.raw[nt][2 * h] = __ldg(row + 4 * nt);
      }
    }
  }

  template <int kNTiles>
  __device__ __forceinline__ void load_mask(PairBits<kNTiles>& result, int row0, int column0) const {
    if (kTransposed || !options.mask_by_twos) {
      for_each_element<uint8_t, kNTiles>(params.mask, row0, column0,
                                         [&](int nt, int i, uint32_t x) { result.set(nt, i, x); });
      return;
    }
    const int columns = column_limit() - column0 - accumulator_column(0, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint16_t* row = reinterpret_cast<const uint16_t*>(lane_row(params.mask, 1, row0, column0, h));
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
        if (8 * nt >= columns) continue;
        const uint32_t two = __ldg(row + 4 * nt);
        result.set(nt, 2 * h, (two | two >> 7) & 3);
      }
    }
  }

  template <int kNTiles>
  __device__ __forceinline__ void compare_segments(PairBits<kNTiles>& result, int row0, int column0) const {
    const int32_t* query_ids = params.query_segment_ids + batch * params.seqlen_q;
    const int32_t* key_ids = params.key_value_segment_ids + batch * params.seqlen_kv;
    const int32_t* row_ids = kTransposed ? key_ids : query_ids;
    const int32_t* column_ids = (kTransposed ? query_ids : key_ids) + column0 + accumulator_column(0, 0);
    const int columns = column_limit() - column0 - accumulator_column(0, 0);
    int32_t row_id[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_id[h] = __ldg(row_ids + min(row0 + accumulator_row(0, h), row_limit() - 1));
    }
    uint32_t equal = 0;
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t id = 8 * nt + c < columns ? __ldg(column_ids + 8 * nt + c) : 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) equal |= uint32_t{id == row_id[h]} << (4 * nt + 2 * h + c);
      }
    }
    result.bits &= equal;
  }
};

// ---- Of a warp's tile of scores, rows `row0`.. and columns `column0`.. ----

// From scores to logits / scale_log2.
template <bool kTransposed, int kMTiles, int kNTiles>
__device__ __forceinline__ void transform_scores(float (&scores)[kMTiles][kNTiles][4],
                                                 const Pairs<kTransposed>& pairs, const LogitScale& logit,
                                                 int row0, int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
    BiasTile<kNTiles> bias;
    pairs.load_bias(bias, row0 + 16 * mt, column0);
    pairs.transform(scores[mt], bias, logit, row0 + 16 * mt, column0);
  }
}

// Replaces what is not set in `bits`.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void fill_unset(float (&scores)[kMTiles][kNTiles][4],
                                           const PairBits<kNTiles> (&bits)[kMTiles], float value) {
  for_each_accumulator(scores, [&](int mt, int h, int nt, int c) {
    if (!bits[mt].test(nt, 2 * h + c)) scores[mt][nt][2 * h + c] = value;
  });
}

template <bool kTransposed, int kMTiles, int kNTiles>
__device__ __forceinline__ void load_visible(PairBits<kNTiles> (&bits)[kMTiles],
                                             const Pairs<kTransposed>& pairs, int row0, int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
    bits[mt] = pairs.template visible<kNTiles>(row0 + 16 * mt, column0);
  }
}

template <bool kTransposed, int kMTiles, int kNTiles>
__device__ __forceinline__ void draw_kept(PairBits<kNTiles> (&bits)[kMTiles], const Pairs<kTransposed>& pairs,
                                          int row0, int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) bits[mt] = pairs.template kept<kNTiles>(row0 + 16 * mt, column0);
}

}  // namespace jax_flash::cuda
