// Which pair options a call has, worked out once on the host and passed to the kernels as an argument.
//
// A pair option is one whose effect differs from pair to pair of a query and a key, and that is read from an
// array or drawn: bias, ALiBi, mask, segments, dropout. (What causal, window and lengths hide are intervals:
// mask.cuh.) The factor of an array of scales counts as one, too.
#pragma once

#include <cstdint>

#include "dropout.h"
#include "params.h"
#include "softmax.cuh"

namespace jax_flash::cuda {

// How the bias is read: staged through shared memory, in pieces of 16 bytes, by kernels that have room for
// it; two neighbouring columns of 16 bits at once; or one element at a time.
enum class BiasFormat { kNone, kStaged, kTwo16Bit, kOne16Bit, kOne32Bit };

inline bool has_pair_options(const AttentionParams& params) {
  return params.bias || params.mask || params.query_segment_ids || params.alibi_slopes ||
         params.dropout_seeds || params.scale_factor;
}

// Does anything but a positive scale stand between scores and probabilities?
inline bool is_general(const AttentionParams& params) {
  return has_pair_options(params) || LogitScale(params).transform != LogitScale::kNone;
}

struct PairOptions {
  BiasFormat bias_format;
  bool mask_only, staged_bias_only;  // may the loops kMaskOnly, kStagedBiasOnly (policy.cuh) serve this call?
  bool is_half;                      // is the bias float16, or else bfloat16?
  bool has_alibi, has_dropout;
  uint32_t drop_threshold;
  float kept_factor;  // 1 / (1 - dropout_rate), by which kept probabilities are multiplied

  explicit PairOptions(const AttentionParams& params) {
    const PairArray& bias = params.bias;
    auto by = [&](int count) { return bias.key_stride == 1 && params.seqlen_kv % count == 0; };
    is_half = bias.dtype == DType::kFloat16;
    bias_format = !bias                           ? BiasFormat::kNone
                  : bias.dtype == DType::kFloat32 ? BiasFormat::kOne32Bit
                  : by(8) && !params.scale_factor ? BiasFormat::kStaged  // it is added before the factor
                  : by(2)                         ? BiasFormat::kTwo16Bit
                                                  : BiasFormat::kOne16Bit;
    const LogitScale::Transform transform = LogitScale(params).transform;
    const bool has_mask = params.mask || params.query_segment_ids;
    mask_only = has_mask && transform == LogitScale::kNone && !params.dropout_seeds;
    staged_bias_only = bias_format == BiasFormat::kStaged && transform == LogitScale::kMultiply &&
                       !has_mask && !params.dropout_seeds;
    has_alibi = params.alibi_slopes;
    has_dropout = params.dropout_seeds;
    drop_threshold = Dropout::threshold_of(params.options.dropout_rate);
    kept_factor = static_cast<float>(1 / (1 - params.options.dropout_rate));
  }
};

}  // namespace jax_flash::cuda
