// Backward pass: dq, dk and dv, with the probabilities recomputed from lse. A work item is one tile of keys;
// it walks the query rows that see the tile, block by block. Included once for each instruction set, without
// an include guard, inside its namespace: see cpu_unit.h.

// The keys of a tile that each row of a block sees; mask and segments are not considered.
struct SeenKeys {
  int64_t *first, *end;  // [M]: relative to the tile's first key
  bool* sees;            // [M]: whether the row sees any

  SeenKeys() = default;
  SeenKeys(int64_t rows, Arena& arena)
      : first(arena.Take<int64_t>(rows)), end(arena.Take<int64_t>(rows)), sees(arena.Take<bool>(rows)) {}

  // Finds those of `rows` rows from `first_row` on (in GroupRows's numbering). Returns whether any row sees
  // less than the whole tile.
  bool Find(const Mask& mask, int64_t group, int64_t first_row, int64_t rows, Range tile) const {
    const int64_t keys = tile.end - tile.first;
    bool any = false;
    for (int64_t row = 0; row < rows; ++row) {
      const Range of_row = mask.KeysOf((first_row + row) / group);
      first[row] = std::clamp<int64_t>(of_row.first - tile.first, 0, keys);
      end[row] = std::clamp<int64_t>(of_row.end - tile.first, first[row], keys);
      sees[row] = first[row] < end[row];
      any |= end[row] - first[row] < keys;
    }
    return any;
  }
};

// Sets x, of `keys` keys, to 0 outside of [first, end) and where `visible`, unless it is null, is false.
template <typename T>
void HidePairs(int64_t first, int64_t end, const bool* visible, int64_t keys, T* x) {
  Zero(x, first);
  Zero(x + end, keys - end);
  if (!visible) return;
  for (int64_t key = first; key < end; ++key) {
    if (!visible[key]) x[key] = 0;
  }
}

template <typename T>
struct BackwardScratch {
  T *k, *k_t;       // [N, head_dim rounded up], [head_dim, N]
  T *v, *v_t;       // [N, head_dim_v], [head_dim_v, N]
  T *q, *dout;      // [M, head_dim rounded up], [M, head_dim_v rounded up]
  T *p, *ds;        // [M, N]: initially the scores and dout v^T
  T *dq, *dk, *dv;  // [M, ...], [N, ...], [N, ...], the last axis as above
  SeenKeys seen;    // of M rows
  bool* visible;    // [M, N]: pairs that mask and segments leave visible

  BackwardScratch(const AttentionParams& params, Arena& arena) {
    const int64_t width = RoundUp(params.head_dim, kLanes<T>),
                  width_v = RoundUp(params.head_dim_v, kLanes<T>);
    k = arena.Take<T>(kBackwardN * width);
    k_t = arena.Take<T>(kBackwardN * params.head_dim);
    v = arena.Take<T>(kBackwardN * params.head_dim_v);
    v_t = arena.Take<T>(kBackwardN * params.head_dim_v);
    q = arena.Take<T>(kBackwardM * width);
    dout = arena.Take<T>(kBackwardM * width_v);
    p = arena.Take<T>(kBackwardM * kBackwardN);
    ds = arena.Take<T>(kBackwardM * kBackwardN);
    dq = arena.Take<T>(kBackwardM * width);
    dk = arena.Take<T>(kBackwardN * width);
    dv = arena.Take<T>(kBackwardN * width_v);
    seen = SeenKeys(kBackwardM, arena);
    visible = arena.Take<bool>(kBackwardM * kBackwardN);
  }
};

constexpr int64_t kAllBlocks = std::numeric_limits<int64_t>::max();

// The turns in which the tiles of keys of one head add to dq. A tile adds to a block of query rows after all
// tiles before it, so the order of summation is fixed.
class Turns {
 public:
  // blocks_done: for each tile the number of blocks that it has finished, whether or not it added to their
  // dq.
  Turns(std::atomic<int64_t>* blocks_done, int64_t tile) : blocks_done_(blocks_done), tile_(tile) {}

  // Waits until all tiles before this one have finished `block`. It is not enough to wait for the previous
  // tile, which may have skipped the block without waiting itself.
  void Wait(int64_t block) {
    for (int64_t before = first_unfinished_; before < tile_; ++before) {
      int64_t done;
      while ((done = blocks_done_[before].load(std::memory_order_acquire)) <= block)
        std::this_thread::yield();
      if (before == first_unfinished_ && done == kAllBlocks) ++first_unfinished_;
    }
  }
  void Finish(int64_t blocks) {
    HAND_OVER();
    blocks_done_[tile_].store(blocks, std::memory_order_release);
    HAND_OVER();
  }

 private:
  std::atomic<int64_t>* blocks_done_;
  int64_t tile_;
  int64_t first_unfinished_ = 0;  // all tiles before it, which only grows, have finished every block
};

// Memory that all work items share.
template <typename T>
struct BackwardShared {
  T* delta;                           // [B, T, N]: rowsum(dout * out) - dlse
  T* dq_accum;                        // [B, T, N, H]: dq, summed over the tiles of keys
  std::atomic<int64_t>* blocks_done;  // [B, K, tiles of keys]: see Turns

  BackwardShared(const BackwardParams& params, Arena& arena) {
    const int64_t rows = params.batch * params.seqlen_q * params.num_heads;
    delta = arena.Take<T>(rows);
    dq_accum = static_cast<T*>(params.dq);
    if (!IsComputeType<T>(params.dtype)) dq_accum = arena.Take<T>(rows * params.head_dim);
    const int64_t tiles = params.batch * params.num_kv_heads * DivideUp(params.seqlen_kv, kBackwardN);
    blocks_done = arena.Take<std::atomic<int64_t>>(tiles);
  }
};

// The product of two rows of the same dtype.
template <typename T>
T RowProduct(Stored<const void> a, Stored<const void> b, int64_t width) {
  T sums[kLanes<T>] = {};
  Visit<T>(a, [&]<typename Storage>(const Storage* a_row) {
    const Storage* b_row = static_cast<const Storage*>(b.data);
    for (int64_t column = 0; column < width; column += kLanes<T>) {
      const int64_t lanes = std::min(kLanes<T>, width - column);
      for (int64_t lane = 0; lane < lanes; ++lane) {
        sums[lane] += ToCompute(a_row[column + lane]) * ToCompute(b_row[column + lane]);
      }
    }
  });
  T product = 0;
  for (T sum : sums) product += sum;
  return product;
}

// rowsum(dout * out) - dlse for one row of [B, T, N]. The cotangent of an infinite lse is ignored.
template <typename T>
T Delta(const BackwardParams& params, int64_t row) {
  const auto at = [&](const void* tensor) { return Stored{tensor, params.dtype} + row * params.head_dim_v; };
  const T delta = RowProduct<T>(at(params.dout), at(params.out), params.head_dim_v);
  const bool counts = params.dlse && !std::isinf(static_cast<const T*>(params.lse)[row]);
  return counts ? delta - static_cast<const T*>(params.dlse)[row] : delta;
}

// Computes delta of the rows [first, end) of [B, T, N] and sets their dq_accum to 0.
template <typename T>
void PrepareRows(const BackwardParams& params, int64_t first, int64_t end, const BackwardShared<T>& shared) {
  for (int64_t row = first; row < end; ++row) shared.delta[row] = Delta<T>(params, row);
  Zero(shared.dq_accum + first * params.head_dim, (end - first) * params.head_dim);
}

// Turns the scores and dp of one row into p and ds, for `keys` keys.
template <bool kCapped, typename T>
void Probabilities(T* p, T* ds, int64_t keys, T scale, T cap, T lse, T delta) {
  for (int64_t key = 0; key < keys; key += kLanes<T>) {
    const Vec<T> x = Logits<T>(Load(p + key), scale, kCapped ? cap : T(0));
    const Vec<T> probability = Exp<T>(x - lse);
    Vec<T> gradient = probability * (Load(ds + key) - delta);
    if constexpr (kCapped) {
      const Vec<T> tanh = x / cap;
      gradient *= T(1) - tanh * tanh;
    }
    Store(p + key, probability);
    Store(ds + key, gradient);
  }
}

// One row of a tile, as RowGradients needs it.
template <typename T>
struct RowOfPairs {
  int64_t row;          // in GroupRows's numbering
  int64_t first_key;    // the tile's first key
  int64_t first, end;   // keys that the row sees, relative to first_key; mask and segments not considered
  const bool* visible;  // keys of the tile that mask and segments leave visible
  T lse, delta;
};

// Turns the scores and dp of one row into ds and the p that multiplies v, for up to a tile of `keys` keys.
template <typename T>
void RowGradients(const Pairs<T>& pairs, const RowOfPairs<T>& row, int64_t keys, T scale, T cap, T* p,
                  T* ds) {
  if (row.lse == -std::numeric_limits<T>::infinity()) {  // fully masked row
    Zero(p, keys);
    Zero(ds, keys);
    return;
  }
  if (pairs.has_bias()) {
    T bias[kBackwardN];
    pairs.LoadBias(row.row, row.first_key, keys, bias);
    for (int64_t key = 0; key < keys; ++key) p[key] = scale * p[key] + bias[key];
    scale = 1;
  }
  bool kept[kBackwardN];
  if (pairs.may_drop()) {
    pairs.LoadKept(row.row, row.first_key, keys, kept);
    for (int64_t key = 0; key < keys; ++key) ds[key] = kept[key] ? ds[key] * pairs.kept_factor() : T(0);
  }
  if (cap > 0) {
    Probabilities<true>(p, ds, keys, scale, cap, row.lse, row.delta);
  } else {
    Probabilities<false>(p, ds, keys, scale, cap, row.lse, row.delta);
  }
  if (pairs.may_drop()) {
    for (int64_t key = 0; key < keys; ++key) p[key] = kept[key] ? p[key] * pairs.kept_factor() : T(0);
  }
  const bool* visible = pairs.may_hide() ? row.visible : nullptr;
  for (T* x : {p, ds}) HidePairs(row.first, row.end, visible, keys, x);
}

// dk and dv of one tile of keys of one batch element and key head, and the tile's part of dq.
template <typename T>
void BackwardTile(const BackwardParams& params, int64_t batch, int64_t kv_head, int64_t tile_index,
                  const BackwardScratch<T>& scratch, const BackwardShared<T>& shared) {
  const int64_t head_dim = params.head_dim, head_dim_v = params.head_dim_v;
  const int64_t width = RoundUp(head_dim, kLanes<T>), width_v = RoundUp(head_dim_v, kLanes<T>);
  const T scale = params.options.scale, logit_scale = LogitScale<T>(params, batch);
  const T cap = LogitCap<T>(params);
  const GroupRows q(Stored{params.q, params.dtype}, params, batch, kv_head, head_dim);
  const KeyRows k(Stored{params.k, params.dtype}, params, batch, kv_head, head_dim);
  const KeyRows v(Stored{params.v, params.dtype}, params, batch, kv_head, head_dim_v);
  const GroupRows dout(Stored{params.dout, params.dtype}, params, batch, kv_head, head_dim_v);
  const GroupRows lse(static_cast<const T*>(params.lse), params, batch, kv_head, 1);
  const GroupRows delta(static_cast<const T*>(shared.delta), params, batch, kv_head, 1);
  const GroupRows dq(shared.dq_accum, params, batch, kv_head, head_dim);
  const KeyRows dk(Stored{params.dk, params.dtype}, params, batch, kv_head, head_dim);
  const KeyRows dv(Stored{params.dv, params.dtype}, params, batch, kv_head, head_dim_v);

  const int64_t tiles = DivideUp(params.seqlen_kv, kBackwardN);
  Turns turns(shared.blocks_done + (batch * params.num_kv_heads + kv_head) * tiles, tile_index);
  const Mask mask(params, batch);
  const Pairs<T> pairs(params, batch, kv_head, q.group);
  const int64_t tile = tile_index * kBackwardN;
  const int64_t tile_end = std::min(tile + kBackwardN, mask.kv_len());
  const int64_t keys = tile_end - tile;  // number of keys; may be negative
  const Range queries = mask.QueriesOf({tile, tile_end});

  if (!queries.empty()) {
    // ---- Load k, v and their transposes ----
    const int64_t lanes_end = RoundUp(keys, kLanes<T>);
    LoadRows(k, tile, tile_end, nullptr, scratch.k, width, lanes_end);
    LoadRows(v, tile, tile_end, nullptr, scratch.v, head_dim_v, lanes_end);
    Transpose(scratch.k, width, lanes_end, head_dim, scratch.k_t, kBackwardN);
    Transpose(scratch.v, head_dim_v, lanes_end, head_dim_v, scratch.v_t, kBackwardN);
    Zero(scratch.dk, RoundUp(keys, kRowStep) * width);
    Zero(scratch.dv, RoundUp(keys, kRowStep) * width_v);

    const int64_t rows_end = queries.end * q.group;
    for (int64_t block = queries.first * q.group / kBackwardM; block * kBackwardM < rows_end; ++block) {
      // ---- Mask; load q and dout ----
      const int64_t block_first = block * kBackwardM;
      const int64_t rows = std::min(kBackwardM, rows_end - block_first);
      if (pairs.may_hide() &&
          !pairs.LoadVisible(block_first, rows, tile, keys, scratch.visible, kBackwardN)) {
        turns.Finish(block + 1);
        continue;
      }
      const bool masked = scratch.seen.Find(mask, q.group, block_first, rows, {tile, tile_end});
      const bool* keep = masked ? scratch.seen.sees : nullptr;
      const int64_t tile_rows = RoundUp(rows, kRowStep);
      LoadRows(q, block_first, block_first + rows, keep, scratch.q, width, tile_rows);
      LoadRows(dout, block_first, block_first + rows, keep, scratch.dout, width_v, tile_rows);

      // ---- S = q k^T, dP = dout v^T ----
      Multiply<Layout::kRowMajor, Into::kOverwrite>(rows, keys, head_dim, scratch.q, width, scratch.k_t,
                                                    kBackwardN, scratch.p, kBackwardN);
      Multiply<Layout::kRowMajor, Into::kOverwrite>(rows, keys, head_dim_v, scratch.dout, width_v,
                                                    scratch.v_t, kBackwardN, scratch.ds, kBackwardN);

      // ---- P = exp(S - lse), dS = P (dP - delta) ----
      for (int64_t row = 0; row < rows; ++row) {
        T *p = scratch.p + row * kBackwardN, *ds = scratch.ds + row * kBackwardN;
        RowGradients<T>(pairs,
                        {.row = block_first + row,
                         .first_key = tile,
                         .first = scratch.seen.first[row],
                         .end = scratch.seen.end[row],
                         .visible = scratch.visible + row * kBackwardN,
                         .lse = *lse.Row(block_first + row),
                         .delta = *delta.Row(block_first + row)},
                        keys, logit_scale, cap, p, ds);
      }

      // ---- dV += P^T dout, dK += dS^T q, dQ = dS k ----
      Multiply<Layout::kTransposed, Into::kAccumulate>(keys, width_v, rows, scratch.p, kBackwardN,
                                                       scratch.dout, width_v, scratch.dv, width_v);
      Multiply<Layout::kTransposed, Into::kAccumulate>(keys, width, rows, scratch.ds, kBackwardN, scratch.q,
                                                       width, scratch.dk, width);
      Multiply<Layout::kRowMajor, Into::kOverwrite>(rows, width, keys, scratch.ds, kBackwardN, scratch.k,
                                                    width, scratch.dq, width);

      // ---- Add to dq, after all tiles before this one ----
      turns.Wait(block);
      for (int64_t row = 0; row < rows; ++row) {
        T* to = dq.Row(block_first + row);
        const T* from = scratch.dq + row * width;
        for (int64_t column = 0; column < head_dim; ++column) to[column] += scale * from[column];
      }
      turns.Finish(block + 1);
    }
  }
  turns.Finish(kAllBlocks);

  // ---- Store dk and dv; keys that no query sees get 0 ----
  for (int64_t key = 0; key < std::min(kBackwardN, params.seqlen_kv - tile); ++key) {
    if (queries.empty() || key >= keys) {
      ZeroRow(dk.Row(tile + key), head_dim);
      ZeroRow(dv.Row(tile + key), head_dim_v);
    } else {
      StoreRow(dk.Row(tile + key), scratch.dk + key * width, scale, head_dim);
      StoreRow(dv.Row(tile + key), scratch.dv + key * width_v, T(1), head_dim_v);
    }
  }
}

template <typename T>
bool BackwardIn(const BackwardParams& params, ThreadPool& pool) {
  const int64_t rows = params.batch * params.seqlen_q * params.num_heads;
  const int64_t row_items = DivideUp(rows, kBackwardM);  // of the loops over rows
  const int64_t heads = params.batch * params.num_kv_heads;
  const int64_t tiles = DivideUp(params.seqlen_kv, kBackwardN);
  const int64_t tile_items = heads * tiles;
  const int64_t workers = NumWorkers(pool, tile_items);
  Arena shared_size(nullptr), size(nullptr);
  BackwardShared<T>(params, shared_size);
  BackwardScratch<T>(params, size);
  const Scratch memory(shared_size.used() + workers * size.used());
  if (!memory.data()) return false;
  Arena shared_arena(memory.data());
  const BackwardShared<T> shared(params, shared_arena);
  for (int64_t i = 0; i < tile_items; ++i) new (shared.blocks_done + i) std::atomic<int64_t>(0);

  ParallelFor(pool, NumWorkers(pool, row_items), row_items, [&](int64_t, int64_t item) {
    PrepareRows<T>(params, item * kBackwardM, std::min((item + 1) * kBackwardM, rows), shared);
  });
  // Items take one tile of every head in turn, so the tiles of a head seldom wait for one another.
  ParallelFor(pool, workers, tile_items, [&](int64_t worker, int64_t item) {
    Arena arena(memory.data() + shared_size.used() + worker * size.used());
    const int64_t head = item % heads;
    BackwardTile<T>(params, head / params.num_kv_heads, head % params.num_kv_heads, item / heads,
                    BackwardScratch<T>(params, arena), shared);
  });
  if (!IsComputeType<T>(params.dtype)) {
    ParallelFor(pool, NumWorkers(pool, row_items), row_items, [&](int64_t, int64_t item) {
      const int64_t first = item * kBackwardM * params.head_dim;
      const int64_t end = std::min((item + 1) * kBackwardM, rows) * params.head_dim;
      StoreRow(Stored{params.dq, params.dtype} + first, shared.dq_accum + first, T(1), end - first);
    });
  }
  return true;
}
