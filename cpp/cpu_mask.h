// Which (query, key) pairs are visible. Only this file of the CPU kernels masks by causal, window, lengths
// and offset. Each query sees one interval of keys, whose ends never decrease from one query to the next.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

namespace jax_flash::cpu {

struct Range {
  int64_t first, end;
  bool empty() const { return first >= end; }
};

class Mask {
 public:
  Mask(const AttentionParams& params, int64_t batch)
      : q_len_(Length(params.query_seq_lengths, batch, params.seqlen_q)),
        kv_len_(Length(params.key_value_seq_lengths, batch, params.seqlen_kv)),
        offset_(params.query_offset ? params.query_offset[batch] : 0),
        left_(Window(params.options.window_left)),
        right_(params.options.is_causal ? 0 : Window(params.options.window_right)) {}

  int64_t q_len() const { return q_len_; }
  int64_t kv_len() const { return kv_len_; }

  // The keys that `query` (below q_len) sees.
  Range KeysOf(int64_t query) const {
    const int64_t position = query + offset_;
    return {std::max<int64_t>(position - left_, 0), std::min(position + right_ + 1, kv_len_)};
  }
  // The queries that see a key of `keys`.
  Range QueriesOf(Range keys) const {
    if (keys.first >= kv_len_) return {0, 0};
    return {std::max<int64_t>(keys.first - right_ - offset_, 0),
            std::min(std::min(keys.end, kv_len_) - offset_ + left_, q_len_)};
  }

 private:
  static constexpr int64_t kUnlimited = int64_t{1} << 62;  // far from int64's limits: sums cannot overflow

  static int64_t Length(const int32_t* lengths, int64_t batch, int64_t limit) {
    return lengths ? std::clamp<int64_t>(lengths[batch], 0, limit) : limit;
  }
  static int64_t Window(int64_t window) { return window < 0 ? kUnlimited : std::min(window, kUnlimited); }

  int64_t q_len_, kv_len_, offset_, left_, right_;
};

}  // namespace jax_flash::cpu
