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
#include "ptx/memory.h"
#include "softmax.cuh"

namespace jax_flash::cuda {

// How the bias is read: through shared memory, where a kernel has room for it, in pieces of 16 bytes; two
// neighbouring columns of 16 bits at once; or one at a time.
enum class BiasFormat { kNone, kPieces, kTwoOf16Bits, kOneOf16Bits, kOneOf32Bits };

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
  bool is_half;  // is the bias float16?
  uint32_t drop_threshold;
  float kept_factor;  // what kept probabilities are multiplied by

  explicit PairOptions(const AttentionParams& params) {
    const PairArray& bias = params.bias;
    auto by = [&](int count) {
      return bias.key_stride == 1 && params.seqlen_kv % count == 0 &&
             reinterpret_cast<uintptr_t>(bias.data) % (2 * count) == 0;
    };
    is_half = bias.dtype == DType::kFloat16;
    bias_format = !bias                           ? BiasFormat::kNone
                  : bias.dtype == DType::kFloat32 ? BiasFormat::kOneOf32Bits
                  : by(8)                         ? BiasFormat::kPieces
                  : by(2)                         ? BiasFormat::kTwoOf16Bits
                                                  : BiasFormat::kOneOf16Bits;
    drop_threshold = Dropout::threshold_of(params.options.dropout_rate);
    kept_factor = static_cast<float>(1 / (1 - params.options.dropout_rate));
  }
};

// One bit for each accumulator of 16 rows and 8 kNTiles columns. In the order in which words of 32 columns
// give them: a byte for each tile of 8 columns, of which a lane has 2, and 4 such words side by side.
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

// Of the mask as bits, what covers 8 kNTiles columns of a lane's two rows.
template <int kNTiles>
struct MaskWords {
  static constexpr int kWords = (kNTiles + 3) / 4;
  uint32_t words[2][kWords];
};

// A warp's part of shared memory, through which the pieces of a 16-bit bias come: 16 rows by kColumns columns
// of scores, as they lie in memory.
template <bool kTransposed, int kColumns>
struct BiasBuffer {
  static constexpr int kQueries = kTransposed ? kColumns : 16, kPieces = kTransposed ? 2 : kColumns / 8;
  static constexpr int kBytes = kQueries * kPieces * 16;
  uint32_t shared;

  // The piece of 8 keys of a query, at a place where neither this copy nor load_matrix finds bank conflicts.
  __device__ __forceinline__ uint32_t place(int query, int piece) const {
    return shared + (query * kPieces + (piece ^ (kTransposed ? query / 4 % 2 : query % 8))) * 16;
  }
};

// The pairs of one batch element and query head.
template <bool kTransposed>
struct Pairs {
  const AttentionParams& params;
  const PairOptions& options;
  int batch, head;
  int offset = 0;   // of ALiBi's queries
  float slope = 0;  // of ALiBi, negative

  __device__ __forceinline__ Pairs(const AttentionParams& params, const PairOptions& options)
      : params(params), options(options) {}
  __device__ __forceinline__ Pairs(const AttentionParams& params, const PairOptions& options, int batch,
                                   int head)
      : Pairs(params, options) {
    set(batch, head);
  }

  __device__ __forceinline__ void set(int batch_, int head_) {
    batch = batch_, head = head_;
    if (!params.alibi_slopes) return;
    constexpr int kFar = 1 << 30;  // far from overflow
    slope = -static_cast<const float*>(params.alibi_slopes)[int64_t{batch} * params.num_heads + head];
    if (params.query_offset) offset = max(-kFar, min(params.query_offset[batch], kFar));
  }

  __device__ __forceinline__ bool may_hide() const { return params.mask.data || params.query_segment_ids; }
  __device__ __forceinline__ bool may_drop() const { return params.dropout_seeds; }

  // ---- Bias: functions of 16 rows from `row0` on and of 8 kNTiles columns from `column0` on ----

  // Starts to copy pieces; those beyond the ends become zeros. The warp must be done with what is there.
  template <int kColumns>
  __device__ __forceinline__ void start_pieces(const BiasBuffer<kTransposed, kColumns>& buffer, int row0,
                                               int column0) const {
    using Buffer = BiasBuffer<kTransposed, kColumns>;
    constexpr int kQueriesAtOnce = 32 / Buffer::kPieces;
    const int lane_query = lane_id() / Buffer::kPieces, piece = lane_id() % Buffer::kPieces;
    const int query0 = (kTransposed ? column0 : row0) + lane_query,
              key = (kTransposed ? row0 : column0) + 8 * piece;
    const int queries =
        key < static_cast<int>(params.seqlen_kv) ? static_cast<int>(params.seqlen_q) - query0 : 0;
    const char* from = static_cast<const char*>(params.bias.data) +
                       (batch * params.bias.batch_stride + head * params.bias.head_stride +
                        query0 * params.bias.row_stride + key) *
                           2;
    const int64_t step = kQueriesAtOnce * params.bias.row_stride * 2;
#pragma unroll
    for (int i = 0; i < Buffer::kQueries; i += kQueriesAtOnce) {
      ptx::copy_async<16>(buffer.place(lane_query + i, piece), from, i < queries);
      from += step;
    }
    ptx::copy_async_commit();
  }

  // x = score * multiplier + bias * bias_multiplier, with the pieces that were started last.
  template <int kNTiles>
  __device__ __forceinline__ void add_pieces(float (&scores)[kNTiles][4],
                                             const BiasBuffer<kTransposed, 8 * kNTiles>& buffer,
                                             const LogitScale& logit) const {
    ptx::copy_async_wait<0>();
    __syncwarp();
    auto add = [&](auto to_float) {
#pragma unroll
      for (int nt = 0; nt < kNTiles; nt += 2) {
        // Four matrices of 8 x 8: of two tiles of columns, the upper and the lower rows.
        uint32_t r[4];
        if constexpr (kTransposed) {
          ptx::load_matrix_x4_transposed(
              r, buffer.place(8 * nt + lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2));
        } else {
          ptx::load_matrix_x4(r, buffer.place(lane_id() % 16, nt ^ lane_id() / 16));
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float& x = scores[nt + i / 4][i % 4];
          x = fmaf(x, logit.multiplier, to_float(r[i / 2], i % 2) * logit.bias_multiplier);
        }
      }
    };
    if (options.is_half) {
      add([](uint32_t two, int i) {
        return __half2float(__ushort_as_half(static_cast<uint16_t>(two >> 16 * i)));
      });
    } else {
      add([](uint32_t two, int i) { return __uint_as_float(i == 0 ? two << 16 : two & 0xffff0000); });
    }
    __syncwarp();
  }

  // From scores to logits / scale_log2, but for what is hidden. `is_added`: the bias has been added.
  template <int kNTiles>
  __device__ __forceinline__ void transform(float (&scores)[kNTiles][4], bool is_added,
                                            const LogitScale& logit, int row0, int column0) const {
    if (logit.transform == LogitScale::kNone) return;
    auto add = [&](float& x, float bias) { x = fmaf(x, logit.multiplier, bias * logit.bias_multiplier); };
    const bool reads_bias = !is_added && options.bias_format != BiasFormat::kNone;
    if (reads_bias && options.bias_format == BiasFormat::kOneOf32Bits) {
      for_each_element<float, kNTiles>(params.bias, row0, column0,
                                       [&](int nt, int i, float bias) { add(scores[nt][i], bias); });
    } else if (reads_bias && (kTransposed || options.bias_format == BiasFormat::kOneOf16Bits)) {
      for_each_element<uint16_t, kNTiles>(params.bias, row0, column0, [&](int nt, int i, uint16_t bias) {
        add(scores[nt][i], from_16_bits(bias));
      });
    } else if (reads_bias) {
      for_each_two<kNTiles>(params.bias, row0, column0, [&](int nt, int i, uint32_t two) {
        add(scores[nt][i], from_16_bits(two));
        add(scores[nt][i + 1], from_16_bits(two >> 16));
      });
    } else if (params.alibi_slopes) {
      const float distance = lane_distance(row0, column0), factor = slope * logit.bias_multiplier;
      for_each(scores, [&](float& x, int nt, int i) {
        x = fmaf(x, logit.multiplier, factor * fabsf(distance + distance_step(nt, i)));
      });
    } else if (!is_added) {
      for_each(scores, [&](float& x, int, int) { x *= logit.multiplier; });
    }
    if (logit.transform == LogitScale::kSoftCap) {
      for_each(scores, [&](float& x, int, int) { x = soft_cap(x, logit); });
    }
  }

  // i + query_offset - j of a lane's first accumulator, and what it is more in another one. Whole numbers,
  // exact in float32 up to 2^24.
  __device__ __forceinline__ float lane_distance(int row0, int column0) const {
    const int row = row0 + accumulator_row(0, 0), column = column0 + accumulator_column(0, 0);
    return static_cast<float>((kTransposed ? column - row : row - column) + offset);
  }
  __device__ static constexpr float distance_step(int nt, int i) {
    const int row = 8 * (i / 2), column = 8 * nt + i % 2;
    return static_cast<float>(kTransposed ? column - row : row - column);
  }

  // ---- Which pairs mask and segments leave visible ----

  // The words of the mask of a lane's two rows; without a mask nothing.
  template <int kNTiles>
  __device__ __forceinline__ void load_words(MaskWords<kNTiles>& mask, int row0, int column0) const {
    if (!params.mask.data) return;
    const VisibilityWorkspace::Bits& bits = kTransposed ? params.visible.of_keys : params.visible.of_queries;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(row0 + accumulator_row(0, h), row_limit() - 1);
      const uint32_t* words = bits.words + batch * bits.batch_stride + head * bits.head_stride +
                              row * bits.row_stride + column0 / 32 * bits.word_step;
#pragma unroll
      for (int i = 0; i < MaskWords<kNTiles>::kWords; ++i)
        mask.words[h][i] = __ldg(words + i * bits.word_step);
    }
  }

  template <int kNTiles>
  __device__ __forceinline__ PairBits<kNTiles> visible(const MaskWords<kNTiles>& mask, int row0,
                                                       int column0) const {
    static_assert(kNTiles <= 8);
    PairBits<kNTiles> result{~0u};
    if (params.mask.data) {
      constexpr uint32_t kOfLane = 0x03030303;  // of 32 columns, if the lane's first is column 0
      const int shift = column0 % 32 + accumulator_column(0, 0);
      result.bits = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int i = 0; i < MaskWords<kNTiles>::kWords; ++i) {
          result.bits |= (mask.words[h][i] >> shift & kOfLane) << (4 * h + 2 * i);
        }
      }
    }
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

  __device__ __forceinline__ float from_16_bits(uint32_t bits) const {  // the lower ones
    return options.is_half ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits)))
                           : __uint_as_float(bits << 16);
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

  // f(nt, i, elements of i and i + 1) for each two neighbours, of 16 bits.
  template <int kNTiles, class F>
  __device__ __forceinline__ void for_each_two(const PairArray& array, int row0, int column0, F f) const {
    const int columns = column_limit() - column0 - accumulator_column(0, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* row = reinterpret_cast<const uint32_t*>(lane_row(array, 2, row0, column0, h));
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
        if (8 * nt < columns) f(nt, 2 * h, __ldg(row + 4 * nt));
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
    PairBits<kNTiles> equal{0};
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int32_t id = 8 * nt + c < columns ? __ldg(column_ids + 8 * nt + c) : 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) equal.set(nt, 2 * h + c, id == row_id[h]);
      }
    }
    result.bits &= equal.bits;
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
    pairs.transform(scores[mt], /*is_added=*/false, logit, row0 + 16 * mt, column0);
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
    MaskWords<kNTiles> words;
    pairs.load_words(words, row0 + 16 * mt, column0);
    bits[mt] = pairs.visible(words, row0 + 16 * mt, column0);
  }
}

template <bool kTransposed, int kMTiles, int kNTiles>
__device__ __forceinline__ void draw_kept(PairBits<kNTiles> (&bits)[kMTiles], const Pairs<kTransposed>& pairs,
                                          int row0, int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) bits[mt] = pairs.template kept<kNTiles>(row0 + 16 * mt, column0);
}

}  // namespace jax_flash::cuda
