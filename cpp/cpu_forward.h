// Forward pass: out and lse of one block of query rows, tile by tile of keys, with an online softmax.
// Included once for each instruction set, without an include guard, inside its namespace: see cpu_unit.h.
//
// Scores are kept transposed, [keys, rows]. A vector then holds one key's scores of several rows, so the
// softmax needs no sums across a vector, and both products read their left operand as scalars and their right
// operand as vectors.

template <typename T>
struct ForwardScratch {
  T *k, *v;            // [N, head_dim], [N, head_dim_v rounded up]
  T *q, *q_t;          // [M, head_dim], [head_dim, M]
  T* s;                // [N, M]: scores, then probabilities
  T* out;              // [M, head_dim_v rounded up]
  T *max, *sum;        // [M]: maximum so far; sum of the probabilities relative to it
  T* rescale;          // [M]: factor by which the last tile rescales all before it
  Int<T>*first, *end;  // [M]: the keys that a row sees, relative to the tile's first key
  bool* visible;       // [M, N]: pairs that mask and segments leave visible
  bool* seeing;        // [M]: whether the row has seen a key

  ForwardScratch(const AttentionParams& params, Arena& arena) {
    const int64_t width_v = RoundUp(params.head_dim_v, kLanes<T>);
    k = arena.Take<T>(kForwardN * params.head_dim);
    v = arena.Take<T>(kForwardN * width_v);
    q = arena.Take<T>(kForwardM * params.head_dim);
    q_t = arena.Take<T>(kForwardM * params.head_dim);
    s = arena.Take<T>(kForwardM * kForwardN);
    out = arena.Take<T>(kForwardM * width_v);
    max = arena.Take<T>(kForwardM);
    sum = arena.Take<T>(kForwardM);
    rescale = arena.Take<T>(kForwardM);
    first = arena.Take<Int<T>>(kForwardM);
    end = arena.Take<Int<T>>(kForwardM);
    visible = arena.Take<bool>(kForwardM * kForwardN);
    seeing = arena.Take<bool>(kForwardM);
  }
};

// Turns scores into probabilities relative to the new maximum, for kLanes rows from `row` on, and updates
// max, sum and rescale.
template <bool kMasked, typename T>
INLINE void OnlineSoftmax(const ForwardScratch<T>& scratch, int64_t row, int64_t keys, T scale, T cap) {
  const T infinity = std::numeric_limits<T>::infinity();
  T* s = scratch.s + row;
  Vec<T> max = Load(scratch.max + row);
  for (int64_t key = 0; key < keys; ++key) {
    Vec<T> x = Logits<T>(Load(s + key * kForwardM), scale, cap);
    if constexpr (kMasked) {
      const Vec<Int<T>> first = Load(scratch.first + row), end = Load(scratch.end + row);
      const Int<T> j = key;
      x = ((first <= j) & (end > j)) ? x : Broadcast(-infinity);
    }
    Store(s + key * kForwardM, x);
    max = max > x ? max : x;  // may lose a NaN, which the sum keeps
  }
  // A row that has seen no key keeps the maximum -inf; relative to 0 its probabilities are 0.
  const Vec<T> base = max == -infinity ? Vec<T>{} : max;
  const Vec<T> rescale = Exp<T>(Load(scratch.max + row) - base);
  Vec<T> sum = {};  // of this tile, added as a whole: the error grows with the tiles, not with the keys
  for (int64_t key = 0; key < keys; ++key) {
    const Vec<T> p = Exp<T>(Load(s + key * kForwardM) - base);
    Store(s + key * kForwardM, p);
    sum += p;
  }
  Store(scratch.max + row, max);
  Store(scratch.sum + row, Load(scratch.sum + row) * rescale + sum);
  Store(scratch.rescale + row, rescale);
}

// Turns scores into logits, -inf where mask or segments hide the pair, for one row and `keys` keys.
template <typename T>
void AddPairs(const Pairs<T>& pairs, const ForwardScratch<T>& scratch, int64_t first_row, int64_t row,
              int64_t first_key, int64_t keys, T scale, T cap) {
  T bias[kForwardN] = {};
  if (pairs.has_bias()) pairs.LoadBias(first_row + row, first_key, keys, bias);
  for (int64_t key = 0; key < keys; ++key) {
    T& x = scratch.s[key * kForwardM + row];
    x = scale * x + bias[key];
    if (cap > 0) x = cap * std::tanh(x / cap);
    if (pairs.may_hide() && !scratch.visible[row * kForwardN + key]) x = -std::numeric_limits<T>::infinity();
  }
}

// Sets the probabilities that dropout drops to 0, for one row.
template <typename T>
void DropPairs(const Pairs<T>& pairs, const ForwardScratch<T>& scratch, int64_t first_row, int64_t row,
               int64_t first_key, int64_t keys) {
  bool kept[kForwardN];
  pairs.LoadKept(first_row + row, first_key, keys, kept);
  for (int64_t key = 0; key < keys; ++key) {
    if (!kept[key]) scratch.s[key * kForwardM + row] = 0;
  }
}

// Forward pass of one block of query rows (see GroupRows) of one batch element and key head.
template <typename T>
void ForwardBlock(const ForwardParams& params, int64_t batch, int64_t kv_head, int64_t block,
                  const ForwardScratch<T>& scratch) {
  const int64_t head_dim = params.head_dim, head_dim_v = params.head_dim_v;
  const int64_t width_v = RoundUp(head_dim_v, kLanes<T>);
  const T scale = LogitScale<T>(params, batch), cap = LogitCap<T>(params);
  const GroupRows q(Stored{params.q, params.dtype}, params, batch, kv_head, head_dim);
  const KeyRows k(Stored{params.k, params.dtype}, params, batch, kv_head, head_dim);
  const KeyRows v(Stored{params.v, params.dtype}, params, batch, kv_head, head_dim_v);
  const GroupRows out(Stored{params.out, params.dtype}, params, batch, kv_head, head_dim_v);
  const GroupRows lse(static_cast<T*>(params.lse), params, batch, kv_head, 1);
  const auto store_lse = [&](int64_t row, T of_row, T p_factor) {
    T* const at = lse.Row(row);
    *at = of_row;
    if (params.p_factor) static_cast<T*>(params.p_factor)[at - static_cast<T*>(params.lse)] = p_factor;
  };
  const T infinity = std::numeric_limits<T>::infinity();
  const T* sinks = static_cast<const T*>(params.sinks);
  const auto sink = [&](int64_t row) {
    const int64_t head = kv_head * q.group + row % q.group;
    return sinks ? sinks[batch * params.num_heads + head] : -infinity;
  };

  const Mask mask(params, batch);
  const Pairs<T> pairs(params, batch, kv_head, q.group);
  const int64_t block_first = block * kForwardM;
  const int64_t block_end = std::min(block_first + kForwardM, params.seqlen_q * q.group);
  const int64_t rows =
      std::min(block_end, mask.q_len() * q.group) - block_first;  // number of rows; may be negative
  const int64_t lanes_end = RoundUp(rows, kLanes<T>);

  if (rows > 0) {
    // ---- Load q and transpose it; find the block's range of keys ----
    LoadRows(q, block_first, block_first + rows, nullptr, scratch.q, head_dim, lanes_end);
    Transpose(scratch.q, head_dim, lanes_end, head_dim, scratch.q_t, kForwardM);
    Zero(scratch.out, RoundUp(rows, kRowStep) * width_v);
    for (int64_t row = 0; row < kForwardM; ++row) {
      // A sink acts as a first key without a value.
      scratch.max[row] = sink(block_first + row);
      scratch.sum[row] = scratch.max[row] == -infinity ? 0 : 1;
      scratch.seeing[row] = false;
    }
    const Range first_keys = mask.KeysOf(block_first / q.group);
    const Range last_keys = mask.KeysOf((block_first + rows - 1) / q.group);

    for (int64_t tile = first_keys.first / kForwardN * kForwardN; tile < last_keys.end; tile += kForwardN) {
      const int64_t tile_end = std::min(tile + kForwardN, mask.kv_len());
      const int64_t keys = tile_end - tile;
      if (pairs.may_hide() && !pairs.LoadVisible(block_first, rows, tile, keys, scratch.visible, kForwardN)) {
        continue;
      }
      LoadRows(k, tile, tile_end, nullptr, scratch.k, head_dim, RoundUp(keys, kRowStep));
      LoadRows(v, tile, tile_end, nullptr, scratch.v, width_v, keys);

      // ---- S = q k^T ----
      Multiply<Layout::kRowMajor, Into::kOverwrite>(keys, lanes_end, head_dim, scratch.k, head_dim,
                                                    scratch.q_t, kForwardM, scratch.s, kForwardM);

      // ---- Mask, online softmax ----
      const bool masked = last_keys.first > tile || first_keys.end < tile_end;
      if (masked) {
        for (int64_t row = 0; row < lanes_end; ++row) {
          const Range seen = mask.KeysOf((block_first + std::min(row, rows - 1)) / q.group);
          scratch.first[row] = std::clamp<int64_t>(seen.first - tile, 0, kForwardN);
          scratch.end[row] = std::clamp<int64_t>(seen.end - tile, 0, kForwardN);
        }
      }
      if (pairs.any()) {
        for (int64_t row = 0; row < rows; ++row) {
          AddPairs<T>(pairs, scratch, block_first, row, tile, keys, scale, cap);
        }
      }
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t first = masked ? scratch.first[row] : 0, end = masked ? scratch.end[row] : keys;
        const bool* visible = scratch.visible + row * kForwardN;
        scratch.seeing[row] |= pairs.may_hide() ? std::find(visible + first, visible + std::max(first, end),
                                                            true) < visible + std::max(first, end)
                                                : first < end;
      }
      const T softmax_scale = pairs.any() ? T(1) : scale, softmax_cap = pairs.any() ? T(0) : cap;
      for (int64_t row = 0; row < lanes_end; row += kLanes<T>) {
        if (masked) {
          OnlineSoftmax<true>(scratch, row, keys, softmax_scale, softmax_cap);
        } else {
          OnlineSoftmax<false>(scratch, row, keys, softmax_scale, softmax_cap);
        }
      }
      if (pairs.may_drop()) {
        for (int64_t row = 0; row < rows; ++row) DropPairs(pairs, scratch, block_first, row, tile, keys);
      }

      // ---- O = rescale O + P v ----
      for (int64_t row = 0; row < rows; ++row) {
        if (scratch.rescale[row] == 1) continue;
        for (int64_t column = 0; column < width_v; ++column) {
          scratch.out[row * width_v + column] *= scratch.rescale[row];
        }
      }
      Multiply<Layout::kTransposed, Into::kAccumulate>(rows, width_v, keys, scratch.s, kForwardM, scratch.v,
                                                       width_v, scratch.out, width_v);
    }
  }

  // ---- Store out, lse and p_factor; fully masked rows get 0, their sink and 1 ----
  for (int64_t row = 0; row < block_end - block_first; ++row) {
    // A row whose logits are all -inf has the sum 0, too.
    if (row >= rows || !scratch.seeing[row] || scratch.sum[row] == 0) {
      ZeroRow(out.Row(block_first + row), head_dim_v);
      store_lse(block_first + row, sink(block_first + row), 1);
    } else {
      StoreRow(out.Row(block_first + row), scratch.out + row * width_v,
               pairs.kept_factor() / scratch.sum[row], head_dim_v);
      const T row_lse = scratch.max[row] + std::log(scratch.sum[row]);
      const T factor = std::exp(row_lse - scratch.max[row]) / scratch.sum[row];
      store_lse(block_first + row, row_lse, std::isfinite(factor) ? factor : 1);
    }
  }
}

template <typename T>
bool ForwardIn(const ForwardParams& params, ThreadPool& pool) {
  const int64_t blocks = DivideUp(params.seqlen_q * GroupSize(params), kForwardM);
  const int64_t items = params.batch * params.num_kv_heads * blocks;
  const int64_t workers = NumWorkers(pool, items);
  Arena size(nullptr);
  ForwardScratch<T>(params, size);
  const Scratch memory(workers * size.used());
  if (!memory.data()) return false;

  ParallelFor(pool, workers, items, [&](int64_t worker, int64_t item) {
    Arena arena(memory.data() + worker * size.used());
    const int64_t block = blocks - 1 - item % blocks;  // last blocks first: causal, they are the longest
    const int64_t head = item / blocks;
    ForwardBlock<T>(params, head / params.num_kv_heads, head % params.num_kv_heads, block,
                    ForwardScratch<T>(params, arena));
  });
  return true;
}
