// Pair options: bias, ALiBi, mask, segments and dropout, which differ from pair to pair. Included once for
// each instruction set, without an include guard, inside its namespace: see cpu_unit.h.

// The pair options of the query rows of one batch element and key head, numbered as in GroupRows.
template <typename T>
class Pairs {
 public:
  Pairs(const AttentionParams& params, int64_t batch, int64_t kv_head, int64_t group)
      : params_(params), batch_(batch), first_head_(kv_head * group), group_(group) {}

  bool has_bias() const { return params_.has_bias(); }
  bool may_hide() const { return params_.hides_pairs(); }
  bool may_drop() const { return params_.dropout_seeds; }
  bool any() const { return has_bias() || may_hide() || may_drop(); }
  T kept_factor() const { return T(1 / (1 - params_.options.dropout_rate)); }

  // Writes which pairs the mask and the segments leave visible. Returns whether any pair is.
  NOINLINE bool LoadVisible(int64_t first_row, int64_t rows, int64_t first_key, int64_t keys, bool* visible,
                            int64_t stride) const {
    bool any = false;
    for (int64_t i = 0; i < rows; ++i) {
      const auto [query, head] = At(first_row + i);
      bool* row = visible + i * stride;
      for (int64_t j = 0; j < keys; ++j) row[j] = true;
      if (params_.has_segments()) {
        const int32_t id = params_.query_segment_ids[batch_ * params_.seqlen_q + query];
        const int32_t* ids = params_.key_value_segment_ids + batch_ * params_.seqlen_kv + first_key;
        for (int64_t j = 0; j < keys; ++j) row[j] = ids[j] == id;
      }
      if (const PairArray& mask = params_.mask) {
        const bool* from =
            static_cast<const bool*>(mask.data) + Offset(mask, query, head) + first_key * mask.key_stride;
        for (int64_t j = 0; j < keys; ++j) row[j] &= from[j * mask.key_stride];
      }
      for (int64_t j = 0; j < keys; ++j) any |= row[j];
    }
    return any;
  }

  void LoadBias(int64_t row, int64_t first_key, int64_t keys, T* to) const {
    LoadBias(params_.bias, static_cast<const T*>(params_.alibi_slopes), row, first_key, keys, to);
  }
  // The same of any bias, or slopes [B, N]; both may be null.
  NOINLINE void LoadBias(const PairArray& bias, const T* slopes, int64_t row, int64_t first_key, int64_t keys,
                         T* to) const {
    const auto [query, head] = At(row);
    for (int64_t j = 0; j < keys; ++j) to[j] = 0;
    if (bias) {
      const int64_t offset = Offset(bias, query, head) + first_key * bias.key_stride;
      switch (bias.dtype) {
        case DType::kFloat16:
          return Copy(static_cast<const Half*>(bias.data) + offset, bias.key_stride, keys, to);
        case DType::kBFloat16:
          return Copy(static_cast<const BFloat16*>(bias.data) + offset, bias.key_stride, keys, to);
        case DType::kFloat32:
          return Copy(static_cast<const float*>(bias.data) + offset, bias.key_stride, keys, to);
        default:
          return Copy(static_cast<const double*>(bias.data) + offset, bias.key_stride, keys, to);
      }
    }
    if (slopes) {
      const T slope = slopes[batch_ * params_.num_heads + head];
      for (int64_t j = 0; j < keys; ++j) to[j] = -slope * Distance(row, first_key + j);
    }
  }

  // |i + query_offset - j|, the distance that ALiBi multiplies by the slope.
  T Distance(int64_t row, int64_t key) const {
    const int64_t offset = params_.query_offset ? params_.query_offset[batch_] : 0;
    return T(std::abs(At(row).query + offset - key));
  }

  NOINLINE void LoadKept(int64_t row, int64_t first_key, int64_t keys, bool* to) const {
    const auto [query, head] = At(row);
    const uint32_t* seeds = params_.dropout_seeds + (batch_ * params_.num_heads + head) * kSeedWords;
    const Dropout dropout{{seeds[0], seeds[1]},
                          seeds[2],
                          seeds[3],
                          seeds[4],
                          Dropout::threshold_of(params_.options.dropout_rate)};
    for (int64_t tile = first_key / 16 * 16; tile < first_key + keys; tile += 16) {
      for (int64_t column = 0; column < 8; column += 2) {
        const Dropout::Bits bits = dropout.bits(query, tile + column);
        for (int i = 0; i < 4; ++i) {
          const int64_t j = tile + column + 8 * (i / 2) + i % 2 - first_key;
          if (j >= 0 && j < keys) to[j] = dropout.keeps(bits.decision(query % 16 / 8, i / 2, i % 2));
        }
      }
    }
  }

 private:
  struct QueryAndHead {
    int64_t query, head;
  };
  QueryAndHead At(int64_t row) const { return {row / group_, first_head_ + row % group_}; }

  int64_t Offset(const PairArray& array, int64_t query, int64_t head) const {
    return batch_ * array.batch_stride + head * array.head_stride + query * array.row_stride;
  }

  template <typename Storage>
  static void Copy(const Storage* from, int64_t stride, int64_t keys, T* to) {
    for (int64_t j = 0; j < keys; ++j) to[j] = T(ToCompute(from[j * stride]));
  }

  const AttentionParams& params_;
  int64_t batch_, first_head_, group_;
};
