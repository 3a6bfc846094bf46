// Which pair options a call has, worked out once on the host and passed to the kernels as an argument.
//
// A pair option acts on single (query, key) pairs: bias, ALiBi, mask, segments, dropout. An array of scales
// counts as one, too. Causality, window and lengths do not: they leave each row an interval of keys
// (mask.cuh).
#pragma once

#include <cstdint>

#include "dropout.h"
#include "params.h"
#include "softmax.cuh"

namespace jax_flash::cuda {

// How the bias is read: staged through shared memory, in pieces of 16 bytes; two neighboring 16-bit elements
// at once; or one element at a time. Kernels without room to stage a bias read it in place.
enum class BiasFormat { kNone, kStaged, kTwo16Bit, kOne16Bit, kOne32Bit, kOne64Bit };

inline bool has_pair_options(const AttentionParams& params) {
  return params.has_bias() || params.hides_pairs() || params.dropout_seeds || params.scale_factor;
}

// Does anything but a positive scale stand between scores and probabilities?
inline bool is_general(const AttentionParams& params) {
  return has_pair_options(params) || LogitScale(params).transform != LogitTransform::kNone;
}

template <class Number>
struct PairOptionsOf {
  BiasFormat bias_format;
  bool mask_only, staged_bias_only;  // does the loop of that policy (policy.cuh) suffice?
  bool is_half;                      // is a 16-bit bias float16, not bfloat16?
  bool has_alibi, has_dropout;
  uint32_t drop_threshold;
  Number kept_factor;  // 1 / (1 - dropout_rate), by which kept probabilities are multiplied

  explicit PairOptionsOf(const AttentionParams& params) {
    const PairArray& bias = params.bias;
    auto by = [&](int count) { return bias.key_stride == 1 && params.seqlen_kv % count == 0; };
    is_half = bias.dtype == DType::kFloat16;
    bias_format = !bias                           ? BiasFormat::kNone
                  : bias.dtype == DType::kFloat64 ? BiasFormat::kOne64Bit
                  : bias.dtype == DType::kFloat32 ? BiasFormat::kOne32Bit
                  : by(8) && !params.scale_factor
                      ? BiasFormat::kStaged  // staging adds it too early for a factor
                  : by(2) ? BiasFormat::kTwo16Bit
                          : BiasFormat::kOne16Bit;
    const LogitTransform transform = LogitScaleOf<Number>(params).transform;
    mask_only = params.hides_pairs() && transform == LogitTransform::kNone && !params.dropout_seeds;
    staged_bias_only = bias_format == BiasFormat::kStaged && transform == LogitTransform::kMultiply &&
                       !params.hides_pairs() && !params.dropout_seeds;
    has_alibi = params.alibi_slopes;
    has_dropout = params.dropout_seeds;
    drop_threshold = Dropout::threshold_of(params.options.dropout_rate);
    kept_factor = static_cast<Number>(1 / (1 - params.options.dropout_rate));
  }
};
using PairOptions = PairOptionsOf<float>;

}  // namespace jax_flash::cuda
