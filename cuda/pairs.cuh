// Bias, ALiBi, mask, segments and dropout, applied to a warp's tile of scores.
//
//   pairs/policy.cuh     which of them a main loop handles, at compile time
//   pairs/options.cuh    which of them a call has, at run time
//   pairs/head.cuh       where the arrays of one batch element and query head lie
//   pairs/group.cuh      the same for rows that are all query heads of a key head
//   pairs/bias.cuh       the bias, through shared memory or in place
//   pairs/alibi.cuh      ALiBi
//   pairs/mask_bits.cuh  the mask, as bits
//   pairs/segments.cuh   segment ids
//   pairs/dropout.cuh    which probabilities are kept
//   pairs/bits.cuh       a bit for each pair: the result of the last three, for masking.cuh
//
// A tile of scores lies in the accumulators (accumulator.cuh), with queries in rows and keys in columns or,
// transposed, keys in rows and queries in columns.
#pragma once

#include "accumulator.cuh"
#include "masking.cuh"
#include "pairs/alibi.cuh"
#include "pairs/bias.cuh"
#include "pairs/bits.cuh"
#include "pairs/dropout.cuh"
#include "pairs/group.cuh"
#include "pairs/head.cuh"
#include "pairs/mask_bits.cuh"
#include "pairs/options.cuh"
#include "pairs/policy.cuh"
#include "pairs/segments.cuh"
#include "softmax.cuh"

namespace jax_flash::cuda {

// Turns the scores of rows row0.. and columns column0.. into logits / scale_log2. Hides nothing.
// `bias_is_added`: add_staged_bias has been called. `add_other_bias` adds one that is not staged.
template <class Number, class Pairs, int kNTiles, class AddBias>
__device__ __forceinline__ void transform_scores(Number (&scores)[kNTiles][4], const Pairs& pairs,
                                                 bool bias_is_added, const LogitScaleOf<Number>& logit,
                                                 int row0, int column0, const AddBias& add_other_bias) {
  if (logit.transform == LogitTransform::kNone) return;
  auto for_each = [&](auto f) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) f(scores[nt][i]);
    }
  };
  // Not as part of the multiplier, which would take a register from every loop.
  if (pairs.params.scale_factor) for_each([&](Number& x) { x *= pairs.head.scale_factor; });
  if (!bias_is_added && pairs.options.bias_format != BiasFormat::kNone) {
    add_other_bias();
  } else if (pairs.options.has_alibi) {
    add_alibi(scores, pairs, logit, row0, column0);
  } else if (!bias_is_added) {
    for_each([&](Number& x) { x *= logit.multiplier; });
  }
  if (logit.transform == LogitTransform::kSoftCap) {
    for_each([&](Number& x) { x = soft_cap(x, logit); });
  }
}

template <class Number, class Pairs, int kNTiles>
__device__ __forceinline__ void transform_scores(Number (&scores)[kNTiles][4], const Pairs& pairs,
                                                 bool bias_is_added, const LogitScaleOf<Number>& logit,
                                                 int row0, int column0) {
  transform_scores(scores, pairs, bias_is_added, logit, row0, column0,
                   [&] { add_bias(scores, pairs, logit, row0, column0); });
}

// With a bias that has been read.
template <class Pairs, int kNTiles>
__device__ __forceinline__ void transform_scores(float (&scores)[kNTiles][4], const Pairs& pairs,
                                                 bool bias_is_added, const LogitScale& logit, int row0,
                                                 int column0, const BiasAhead<kNTiles>& bias) {
  transform_scores(scores, pairs, bias_is_added, logit, row0, column0,
                   [&] { bias.add_to(scores, pairs, logit); });
}

// The same for all of a warp's rows, with no bias added yet.
template <class Number, class Pairs, int kMTiles, int kNTiles>
__device__ __forceinline__ void transform_scores(Number (&scores)[kMTiles][kNTiles][4], const Pairs& pairs,
                                                 const LogitScaleOf<Number>& logit, int row0, int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
    transform_scores(scores[mt], pairs, /*bias_is_added=*/false, logit, row0 + 16 * mt, column0);
  }
}

// The pairs that mask and segments leave visible.
template <class Pairs, int kMTiles, int kNTiles>
__device__ __forceinline__ void load_visible(PairBits<kNTiles> (&bits)[kMTiles], const Pairs& pairs, int row0,
                                             int column0) {
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
    MaskWords<kNTiles> words{};  // undefined words would be carried through the loop, in registers
    const bool has_mask = pairs.head.mask_words;
    if (has_mask) load_mask_words(words, pairs, row0 + 16 * mt, column0);
    PairBits<kNTiles> visible{~0u};
    if (has_mask) visible = mask_bits(words, column0);
    clear_other_segments(visible, pairs, row0 + 16 * mt, column0);
    bits[mt] = visible;
  }
}

}  // namespace jax_flash::cuda
