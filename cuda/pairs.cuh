// What depends on the single pair of query and key and is read from an array or drawn: bias, mask, segments,
// dropout; and the factor of the scale, which is in an array, too. Only the general instantiation of a kernel
// has it.
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
         params.dropout_seeds || params.scale_factor;
}

// Does anything but a positive scale stand between scores and probabilities?
inline bool is_general(const AttentionParams& params) {
  return has_pairs(params) || LogitScale(params).transform != LogitScale::kNone;
}

// What a kernel's loop over blocks asks of a tile: an operand that may be there costs a test in every block,
// and tests and addresses take as long as the softmax. So what is most common can have loops of its own.
enum class Use { kNever, kMaybe, kAlways };

struct PairLoop {
  Use lists;    // blocks from lists, with mask and segments
  Use pieces;   // a bias in pieces
  bool others;  // other biases, soft cap, dropout
};

inline constexpr PairLoop kPlainLoop{Use::kNever, Use::kNever, false};
inline constexpr PairLoop kListsLoop{Use::kAlways, Use::kNever, false};
inline constexpr PairLoop kPiecesLoop{Use::kNever, Use::kAlways, false};
inline constexpr PairLoop kAnyLoop{Use::kMaybe, Use::kMaybe, true};

// What of it is known before the launch.
struct PairOptions {
  BiasFormat bias_format;
  bool only_lists, only_pieces;  // the loops that suffice
  bool is_half;                  // is the bias float16?
  bool has_alibi, may_drop;
  uint32_t drop_threshold;
  float kept_factor;  // what kept probabilities are multiplied by

  explicit PairOptions(const AttentionParams& params) {
    const PairArray& bias = params.bias;
    auto by = [&](int count) { return bias.key_stride == 1 && params.seqlen_kv % count == 0; };
    is_half = bias.dtype == DType::kFloat16;
    bias_format = !bias                           ? BiasFormat::kNone
                  : bias.dtype == DType::kFloat32 ? BiasFormat::kOneOf32Bits
                  : by(8) && !params.scale_factor ? BiasFormat::kPieces  // they are added before the factor
                  : by(2)                         ? BiasFormat::kTwoOf16Bits
                                                  : BiasFormat::kOneOf16Bits;
    const LogitScale::Transform transform = LogitScale(params).transform;
    const bool has_lists = params.mask || params.query_segment_ids;
    only_lists = has_lists && transform == LogitScale::kNone && !params.dropout_seeds;
    only_pieces = bias_format == BiasFormat::kPieces && transform == LogitScale::kMultiply && !has_lists &&
                  !params.dropout_seeds;
    has_alibi = params.alibi_slopes;
    may_drop = params.dropout_seeds;
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
// of scores, as they lie in memory. The piece of 8 keys of a query lies where neither the copy nor
// load_matrix finds bank conflicts; all that a lane touches follows from one address by a constant.
template <bool kTransposed, int kColumns>
struct BiasBuffer {
  static constexpr int kQueries = kTransposed ? kColumns : 16, kPieces = kTransposed ? 2 : kColumns / 8;
  static constexpr int kBytes = kQueries * kPieces * 16;
  static constexpr int kQueriesAtOnce = 32 / kPieces;  // that a warp copies
  uint32_t shared;                                     // aligned to 128 bytes

  __device__ __forceinline__ uint32_t place(int query, int piece) const {
    static_assert(kPieces == (kTransposed ? 2 : 8));
    return shared + (query * kPieces + (piece ^ (kTransposed ? query / 4 % 2 : query % 8))) * 16;
  }
  // Of the piece that a lane copies, kQueriesAtOnce * i queries on.
  __device__ __forceinline__ uint32_t copy_place(int i) const {
    const uint32_t first = place(lane_id() / kPieces, lane_id() % kPieces);
    return (kTransposed ? first : first ^ i % 2 * 64) + i * 512;
  }
  // Of the row that a lane gives load_matrix: of two tiles of columns from nt on, the upper and the lower
  // rows.
  __device__ __forceinline__ uint32_t matrix_place(int nt) const {
    if constexpr (kTransposed) return place(lane_id() % 8 + lane_id() / 16 * 8, lane_id() / 8 % 2) + nt * 256;
    return place(lane_id() % 16, lane_id() / 16) ^ nt * 16;
  }
};

// Where a lane's first piece of a bias lies, of some rows from column 0 on.
struct PieceSource {
  const char* from;
  int query, key;
};

// Where the arrays of one batch element and query head begin, and its numbers. Rows are those of the tiles of
// scores: keys, if transposed.
template <bool kTransposed>
struct PairHead {
  const char* bias;
  const uint32_t* mask_words;           // null: no mask
  const int32_t *row_ids, *column_ids;  // segments; null: none
  const uint32_t* seeds;
  float factor = 1;  // of the scale
  float slope = 0;   // of ALiBi, negative
  int offset = 0;    // of ALiBi's queries

  __device__ __forceinline__ PairHead(const AttentionParams& params, int batch, int head) {
    const PairArray& array = params.bias;
    bias = static_cast<const char*>(array.data) +
           (batch * array.batch_stride + head * array.head_stride) * (array.dtype == DType::kFloat32 ? 4 : 2);
    const VisibilityWorkspace::Bits& bits = kTransposed ? params.visible.of_keys : params.visible.of_queries;
    mask_words =
        params.mask.data ? bits.words + batch * bits.batch_stride + head * bits.head_stride : nullptr;
    const bool has_segments = params.query_segment_ids;
    const int32_t* query_ids = has_segments ? params.query_segment_ids + batch * params.seqlen_q : nullptr;
    const int32_t* key_ids = has_segments ? params.key_value_segment_ids + batch * params.seqlen_kv : nullptr;
    row_ids = kTransposed ? key_ids : query_ids;
    column_ids = kTransposed ? query_ids : key_ids;
    const int64_t index = int64_t{batch} * params.num_heads + head;
    seeds = params.dropout_seeds + 3 * index;
    if (params.scale_factor) factor = static_cast<const float*>(params.scale_factor)[batch];
    if (!params.alibi_slopes) return;
    constexpr int kFar = 1 << 30;  // far from overflow
    slope = -static_cast<const float*>(params.alibi_slopes)[index];
    if (params.query_offset) offset = max(-kFar, min(params.query_offset[batch], kFar));
  }
};

// The pairs of one batch element and query head.
template <bool kTransposed, class Head = PairHead<kTransposed>>
struct Pairs {
  const AttentionParams& params;
  const PairOptions& options;
  Head head;

  __device__ __forceinline__ Pairs(const AttentionParams& params, const PairOptions& options, Head head)
      : params(params), options(options), head(head) {}
  __device__ __forceinline__ Pairs(const AttentionParams& params, const PairOptions& options, int batch,
                                   int head)
      : Pairs(params, options, PairHead<kTransposed>(params, batch, head)) {}

  __device__ __forceinline__ bool may_hide() const { return params.mask.data || params.query_segment_ids; }
  __device__ __forceinline__ bool may_drop() const { return options.may_drop; }

  // ---- Bias: functions of 16 rows from `row0` on and of 8 kNTiles columns from `column0` on ----

  template <int kColumns>
  __device__ __forceinline__ PieceSource piece_source(int row0) const {
    constexpr int kPieces = BiasBuffer<kTransposed, kColumns>::kPieces;
    const int query = (kTransposed ? 0 : row0) + lane_id() / kPieces,
              key = (kTransposed ? row0 : 0) + lane_id() % kPieces * 8;
    return {head.bias + (query * params.bias.row_stride + key) * 2, query, key};
  }

  // Starts to copy pieces; those beyond the ends become zeros. The warp must be done with what is there.
  template <int kColumns>
  __device__ __forceinline__ void start_pieces(const BiasBuffer<kTransposed, kColumns>& buffer,
                                               const PieceSource& source, int column0) const {
    using Buffer = BiasBuffer<kTransposed, kColumns>;
    const int query = source.query + (kTransposed ? column0 : 0),
              key = source.key + (kTransposed ? 0 : column0);
    const int queries =
        key < static_cast<int>(params.seqlen_kv) ? static_cast<int>(params.seqlen_q) - query : 0;
    const char* from = source.from + column0 * (kTransposed ? params.bias.row_stride : 1) * 2;
    const int64_t step = Buffer::kQueriesAtOnce * params.bias.row_stride * 2;
#pragma unroll
    for (int i = 0; i * Buffer::kQueriesAtOnce < Buffer::kQueries; ++i) {
      ptx::copy_async<16>(buffer.copy_place(i), from, i * Buffer::kQueriesAtOnce < queries);
      from += step;
    }
    ptx::copy_async_commit();
  }
  template <int kColumns>
  __device__ __forceinline__ void start_pieces(const BiasBuffer<kTransposed, kColumns>& buffer, int row0,
                                               int column0) const {
    start_pieces(buffer, piece_source<kColumns>(row0), column0);
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
        uint32_t r[4];  // four matrices of 8 x 8
        if constexpr (kTransposed) {
          ptx::load_matrix_x4_transposed(r, buffer.matrix_place(nt));
        } else {
          ptx::load_matrix_x4(r, buffer.matrix_place(nt));
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
    // By itself, not as part of the multiplier: that would take a register from every loop.
    if (params.scale_factor) for_each(scores, [&](float& x, int, int) { x *= head.factor; });
    auto add = [&](float& x, float bias) { x = fmaf(x, logit.multiplier, bias * logit.bias_multiplier); };
    const bool reads_bias = !is_added && options.bias_format != BiasFormat::kNone;
    if (reads_bias && options.bias_format == BiasFormat::kOneOf32Bits) {
      for_each_element<float, kNTiles>(row0, column0,
                                       [&](int nt, int i, float bias) { add(scores[nt][i], bias); });
    } else if (reads_bias && (kTransposed || options.bias_format == BiasFormat::kOneOf16Bits)) {
      for_each_element<uint16_t, kNTiles>(
          row0, column0, [&](int nt, int i, uint16_t bias) { add(scores[nt][i], from_16_bits(bias)); });
    } else if (reads_bias) {
      for_each_two<kNTiles>(row0, column0, [&](int nt, int i, uint32_t two) {
        add(scores[nt][i], from_16_bits(two));
        add(scores[nt][i + 1], from_16_bits(two >> 16));
      });
    } else if (options.has_alibi) {
      const float distance = lane_distance(row0, column0), factor = head.slope * logit.bias_multiplier;
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
    return static_cast<float>((kTransposed ? column - row : row - column) + head.offset);
  }
  __device__ static constexpr float distance_step(int nt, int i) {
    const int row = 8 * (i / 2), column = 8 * nt + i % 2;
    return static_cast<float>(kTransposed ? column - row : row - column);
  }

  // ---- Which pairs mask and segments leave visible ----

  // The words of the mask of a lane's two rows; without a mask nothing.
  template <int kNTiles>
  __device__ __forceinline__ void load_words(MaskWords<kNTiles>& mask, int row0, int column0) const {
    if (!head.mask_words) return;
    const VisibilityWorkspace::Bits& bits = kTransposed ? params.visible.of_keys : params.visible.of_queries;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(row0 + accumulator_row(0, h), row_limit() - 1);
      const uint32_t* words = head.mask_words + row * bits.row_stride + column0 / 32 * bits.word_step;
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
    if (head.mask_words) {
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
    if (head.row_ids) compare_segments(result, row0, column0);
    return result;
  }

  // ---- Which pairs dropout keeps ----

  // Both row0 and column0 are multiples of 16.
  template <int kNTiles>
  __device__ __forceinline__ PairBits<kNTiles> kept(int row0, int column0) const {
    static_assert(kNTiles % 2 == 0 && kNTiles <= 8);
    const Dropout dropout{
        {__ldg(head.seeds), __ldg(head.seeds + 1)}, __ldg(head.seeds + 2), options.drop_threshold};
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
  __device__ __forceinline__ const char* lane_row(int bytes, int row0, int column0, int h) const {
    const int row = min(row0 + accumulator_row(0, h), row_limit() - 1),
              column = column0 + accumulator_column(0, 0);
    const int query = kTransposed ? column : row, key = kTransposed ? row : column;
    return head.bias + (query * params.bias.row_stride + key * params.bias.key_stride) * bytes;
  }

  // f(nt, i, element) for each accumulator's element of the array. Keys beyond the end are the last one
  // again: they will be hidden. Queries beyond the end are left out, for their probabilities come from lse
  // alone.
  template <class Element, int kNTiles, class F>
  __device__ __forceinline__ void for_each_element(int row0, int column0, F f) const {
    const int64_t step = kTransposed ? params.bias.row_stride : params.bias.key_stride;
    const int columns = column_limit() - column0 - accumulator_column(0, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Element* row = reinterpret_cast<const Element*>(lane_row(sizeof(Element), row0, column0, h));
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if constexpr (kTransposed) {
            if (8 * nt + c < columns) f(nt, 2 * h + c, __ldg(row + (8 * nt + c) * step));
          } else {
            f(nt, 2 * h + c, __ldg(row + min(8 * nt + c, columns - 1) * step));
          }
        }
      }
    }
  }

  // f(nt, i, elements of i and i + 1) for each two neighbours, of 16 bits.
  template <int kNTiles, class F>
  __device__ __forceinline__ void for_each_two(int row0, int column0, F f) const {
    const int columns = column_limit() - column0 - accumulator_column(0, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t* row = reinterpret_cast<const uint32_t*>(lane_row(2, row0, column0, h));
#pragma unroll
      for (int nt = 0; nt < kNTiles; ++nt) {
        if (8 * nt < columns) f(nt, 2 * h, __ldg(row + 4 * nt));
      }
    }
  }

  template <int kNTiles>
  __device__ __forceinline__ void compare_segments(PairBits<kNTiles>& result, int row0, int column0) const {
    const int32_t* column_ids = head.column_ids + column0 + accumulator_column(0, 0);
    const int columns = column_limit() - column0 - accumulator_column(0, 0);
    int32_t row_id[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      row_id[h] = __ldg(head.row_ids + min(row0 + accumulator_row(0, h), row_limit() - 1));
    }
    PairBits<kNTiles> equal{0};
    // Four tiles at a time: more identities would not find registers.
#pragma unroll 1
    for (int first = 0; first < kNTiles; first += 4) {
      PairBits<kNTiles> four{0};
#pragma unroll
      for (int nt = 0; nt < min(4, kNTiles); ++nt) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int column = 8 * (first + nt) + c;
          const int32_t id = column < columns ? __ldg(column_ids + column) : 0;
#pragma unroll
          for (int h = 0; h < 2; ++h) four.set(nt, 2 * h + c, id == row_id[h]);
        }
      }
      equal.bits |= four.bits << PairBits<kNTiles>::position(first, 0);
    }
    result.bits &= equal.bits;
  }
};

// ---- Of a warp's tile of scores, rows `row0`.. and columns `column0`.. ----

// From scores to logits / scale_log2.
template <class Pairs, int kMTiles, int kNTiles>
__device__ __forceinline__ void transform_scores(float (&scores)[kMTiles][kNTiles][4], const Pairs& pairs,
                                                 const LogitScale& logit, int row0, int column0) {
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

template <class Pairs, int kMTiles, int kNTiles>
__device__ __forceinline__ void load_visible(PairBits<kNTiles> (&bits)[kMTiles], const Pairs& pairs, int row0,
                                             int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
    MaskWords<kNTiles> words{};  // not left undefined, which costs registers: a loop would carry it on
    pairs.load_words(words, row0 + 16 * mt, column0);
    bits[mt] = pairs.visible(words, row0 + 16 * mt, column0);
  }
}

template <class Pairs, int kMTiles, int kNTiles>
__device__ __forceinline__ void draw_kept(PairBits<kNTiles> (&bits)[kMTiles], const Pairs& pairs, int row0,
                                          int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) bits[mt] = pairs.template kept<kNTiles>(row0 + 16 * mt, column0);
}

}  // namespace jax_flash::cuda
