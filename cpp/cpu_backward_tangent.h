// Second order: tdq, tdk and tdv, the derivatives of the gradients in some directions. A work item is one
// direction and one tile of keys; it walks the query rows that see the tile, as the backward pass does.
// Directions share nothing: what they have in common, scores and dout v^T, is 2 of 12 products. Included once
// for each instruction set, without an include guard, inside its namespace: see cpu_unit.h.
//
//   tdq = tdS k + dS tk,  tdk = tdS^T q + dS^T tq  (both times scale),  tdv = tP^T dout + P^T tdout
//
// with P and dS as in cpu_backward.h, tS as in cpu_tangent.h, and without a soft cap
//
//   tP = P (tS - tlse),  tdS = tP (dP - delta) + P (tdP - tdelta)

constexpr int64_t kBackwardTangentM = 48, kBackwardTangentN = 96;
static_assert(kBackwardTangentM % kRowStep == 0 && kBackwardTangentN % kRowStep == 0);
static_assert(kBackwardTangentN % (kColumnStep * kLanes<float>) == 0);
static_assert(kBackwardTangentN <= kTangentN);  // LogitTangent's limit

template <typename T>
struct BackwardTangentScratch {
  T *k, *tk;             // [N, head_dim rounded up]
  T *k_t, *tk_t;         // [head_dim, N]
  T* v;                  // [N, head_dim_v]: v, then tv
  T *v_t, *tv_t;         // [head_dim_v, N]
  T *q, *tq;             // [M, head_dim rounded up]
  T *dout, *tdout;       // [M, head_dim_v rounded up]
  T *p, *ds, *tds, *tp;  // [M, N]: initially the scores, dout v^T, and the derivatives of both, in this order
  T *tdq, *tdk, *tdv;    // [M, ...], [N, ...], [N, ...], the last axis as above
  SeenKeys seen;         // of M rows
  bool* visible;         // [M, N]: pairs that mask and segments leave visible

  BackwardTangentScratch(const AttentionParams& params, Arena& arena) {
    const int64_t width = RoundUp(params.head_dim, kLanes<T>),
                  width_v = RoundUp(params.head_dim_v, kLanes<T>);
    for (T** keys : {&k, &tk, &tdk}) *keys = arena.Take<T>(kBackwardTangentN * width);
    for (T** keys : {&k_t, &tk_t}) *keys = arena.Take<T>(kBackwardTangentN * params.head_dim);
    for (T** keys : {&v, &v_t, &tv_t}) *keys = arena.Take<T>(kBackwardTangentN * params.head_dim_v);
    tdv = arena.Take<T>(kBackwardTangentN * width_v);
    for (T** rows : {&q, &tq, &tdq}) *rows = arena.Take<T>(kBackwardTangentM * width);
    for (T** rows : {&dout, &tdout}) *rows = arena.Take<T>(kBackwardTangentM * width_v);
    for (T** pairs : {&p, &ds, &tds, &tp}) *pairs = arena.Take<T>(kBackwardTangentM * kBackwardTangentN);
    seen = SeenKeys(kBackwardTangentM, arena);
    visible = arena.Take<bool>(kBackwardTangentM * kBackwardTangentN);
  }
};

// Memory that all work items share.
template <typename T>
struct BackwardTangentShared {
  T* delta;                           // [B, T, N]: rowsum(dout out) - dlse
  T* tdelta;                          // [D, B, T, N]: its derivative
  T* tdq_accum;                       // [D, B, T, N, H]: tdq, summed over the tiles of keys
  std::atomic<int64_t>* blocks_done;  // [D, B, K, tiles of keys]: see Turns

  BackwardTangentShared(const BackwardTangentParams& params, Arena& arena) {
    const int64_t rows = params.batch * params.seqlen_q * params.num_heads,
                  directions = params.num_directions;
    delta = arena.Take<T>(rows);
    tdelta = arena.Take<T>(directions * rows);
    tdq_accum = static_cast<T*>(params.tdq);
    if (!IsComputeType<T>(params.dtype)) tdq_accum = arena.Take<T>(directions * rows * params.head_dim);
    const int64_t heads = directions * params.batch * params.num_kv_heads;
    blocks_done = arena.Take<std::atomic<int64_t>>(heads * DivideUp(params.seqlen_kv, kBackwardTangentN));
  }
};

// The derivative of delta in one row of [D, B, T, N], which is `primal_row` of [B, T, N].
template <typename T>
T DeltaTangent(const BackwardTangentParams& params, int64_t row, int64_t primal_row) {
  const int64_t width = params.head_dim_v;
  const auto at = [&](const void* tensor, int64_t r) { return Stored{tensor, params.dtype} + r * width; };
  T tdelta = RowProduct<T>(at(params.dout, primal_row), at(params.tout, row), width);
  if (params.tdout) {
    tdelta += RowProduct<T>(at(params.tdout, row), at(params.out, primal_row), width);
  }
  const bool counts = params.tdlse && !std::isinf(static_cast<const T*>(params.lse)[primal_row]);
  return counts ? tdelta - static_cast<const T*>(params.tdlse)[row] : tdelta;
}

// Statistics of one row.
template <typename T>
struct RowTangents {
  T lse, delta, tlse, tdelta;
};

// Turns the scores, dp, ts (before the cap) and tdp of one row into p, ds, tds and tp.
template <bool kCapped, typename T>
void GradientTangents(const RowTangents<T>& row, int64_t keys, T scale, T cap, T* p, T* ds, T* tds, T* tp) {
  for (int64_t key = 0; key < keys; key += kLanes<T>) {
    const Vec<T> x = Logits<T>(Load(p + key), scale, kCapped ? cap : T(0));
    const Vec<T> probability = Exp<T>(x - row.lse), dp = Load(ds + key) - row.delta;
    const Vec<T> tdp = Load(tp + key) - row.tdelta, uncapped = Load(tds + key);
    Vec<T> gradient = probability * dp, ts = uncapped, bend = {};
    if constexpr (kCapped) {
      const Vec<T> tanh = x / cap, slope = T(1) - tanh * tanh;
      ts *= slope;
      bend = gradient * uncapped * (T(-2) / cap) * tanh * slope;  // by the derivative of the slope
      gradient *= slope;
      Store(tds + key, (probability * ((ts - row.tlse) * dp + tdp)) * slope + bend);
    } else {
      Store(tds + key, probability * ((ts - row.tlse) * dp + tdp));
    }
    Store(p + key, probability);
    Store(ds + key, gradient);
    Store(tp + key, probability * (ts - row.tlse));
  }
}

// tdk and tdv of one tile of keys of one batch element and key head in one direction, and the tile's part of
// tdq.
template <typename T>
void BackwardTangentTile(const BackwardTangentParams& params, int64_t direction, int64_t batch,
                         int64_t kv_head, int64_t tile_index, const BackwardTangentScratch<T>& scratch,
                         const BackwardTangentShared<T>& shared) {
  constexpr int64_t kM = kBackwardTangentM, kN = kBackwardTangentN;
  const int64_t head_dim = params.head_dim, head_dim_v = params.head_dim_v;
  const int64_t width = RoundUp(head_dim, kLanes<T>), width_v = RoundUp(head_dim_v, kLanes<T>);
  const T scale = params.options.scale, cap = LogitCap<T>(params);
  // The rows of a tensor [B, ...], or of this direction's part of one [D, B, ...].
  const auto group_rows = [&](auto tensor, int64_t d, int64_t row_width) {
    const int64_t size = params.batch * params.seqlen_q * params.num_heads * row_width;
    return GroupRows(tensor + d * size, params, batch, kv_head, row_width);
  };
  const auto key_rows = [&](auto tensor, int64_t d, int64_t row_width) {
    const int64_t size = params.batch * params.seqlen_kv * params.num_kv_heads * row_width;
    return KeyRows(tensor + d * size, params, batch, kv_head, row_width);
  };
  const auto stored = [&](const void* tensor) { return Stored{tensor, params.dtype}; };
  const GroupRows q = group_rows(stored(params.q), 0, head_dim);
  const GroupRows dout = group_rows(stored(params.dout), 0, head_dim_v);
  const GroupRows lse = group_rows(static_cast<const T*>(params.lse), 0, 1);
  const GroupRows tlse = group_rows(static_cast<const T*>(params.tlse), direction, 1);
  const GroupRows delta = group_rows(shared.delta, 0, 1), tdelta = group_rows(shared.tdelta, direction, 1);
  const GroupRows tdq = group_rows(shared.tdq_accum, direction, head_dim);
  const KeyRows tdk = key_rows(Stored{params.tdk, params.dtype}, direction, head_dim);
  const KeyRows tdv = key_rows(Stored{params.tdv, params.dtype}, direction, head_dim_v);

  const int64_t tiles = DivideUp(params.seqlen_kv, kN);
  const int64_t head = (direction * params.batch + batch) * params.num_kv_heads + kv_head;
  Turns turns(shared.blocks_done + head * tiles, tile_index);
  const Mask mask(params, batch);
  const Pairs<T> pairs(params, batch, kv_head, q.group);
  const LogitTangent<T> logit_tangent(params, params, direction, batch);
  const int64_t tile = tile_index * kN, tile_end = std::min(tile + kN, mask.kv_len());
  const int64_t keys = tile_end - tile;  // may be negative
  const Range queries = mask.QueriesOf({tile, tile_end});

  if (!queries.empty()) {
    // ---- Load k, v, their tangents and transposes ----
    const int64_t lanes_end = RoundUp(keys, kLanes<T>);
    const auto load_keys = [&](const void* tensor, int64_t d, T* to, T* transposed) {
      LoadRows(key_rows(stored(tensor), d, head_dim), tile, tile_end, nullptr, to, width, lanes_end);
      Transpose(to, width, lanes_end, head_dim, transposed, kN);
    };
    const auto load_values = [&](const void* tensor, int64_t d, T* transposed) {
      LoadRows(key_rows(stored(tensor), d, head_dim_v), tile, tile_end, nullptr, scratch.v, head_dim_v,
               lanes_end);
      Transpose(scratch.v, head_dim_v, lanes_end, head_dim_v, transposed, kN);
    };
    load_keys(params.k, 0, scratch.k, scratch.k_t);
    load_values(params.v, 0, scratch.v_t);
    if (params.tk) load_keys(params.tk, direction, scratch.tk, scratch.tk_t);
    if (params.tv) load_values(params.tv, direction, scratch.tv_t);
    Zero(scratch.tdk, RoundUp(keys, kRowStep) * width);
    Zero(scratch.tdv, RoundUp(keys, kRowStep) * width_v);

    const int64_t rows_end = queries.end * q.group;
    for (int64_t block = queries.first * q.group / kM; block * kM < rows_end; ++block) {
      // ---- Mask; load q, dout and their tangents ----
      const int64_t block_first = block * kM, rows = std::min(kM, rows_end - block_first);
      if (pairs.may_hide() && !pairs.LoadVisible(block_first, rows, tile, keys, scratch.visible, kN)) {
        turns.Finish(block + 1);
        continue;
      }
      const SeenKeys& seen = scratch.seen;
      const bool masked = seen.Find(mask, q.group, block_first, rows, {tile, tile_end});
      const auto load = [&](const GroupRows<Stored<const void>>& tensor, T* to, int64_t to_width) {
        LoadRows(tensor, block_first, block_first + rows, masked ? seen.sees : nullptr, to, to_width,
                 RoundUp(rows, kRowStep));
      };
      load(q, scratch.q, width);
      load(dout, scratch.dout, width_v);
      if (params.tq) load(group_rows(stored(params.tq), direction, head_dim), scratch.tq, width);
      if (params.tdout) load(group_rows(stored(params.tdout), direction, head_dim_v), scratch.tdout, width_v);

      // ---- S = q k^T, tS = tq k^T + q tk^T, dP = dout v^T, tdP = dout tv^T + tdout v^T ----
      const auto add_scores = [&](const T* a, int64_t depth, int64_t a_width, const T* b, T* to) {
        Multiply<Layout::kRowMajor, Into::kAccumulate>(rows, keys, depth, a, a_width, b, kN, to, kN);
      };
      for (T* scores : {scratch.p, scratch.ds, scratch.tds, scratch.tp}) Zero(scores, kM * kN);
      add_scores(scratch.q, head_dim, width, scratch.k_t, scratch.p);
      add_scores(scratch.dout, head_dim_v, width_v, scratch.v_t, scratch.ds);
      if (params.tq) add_scores(scratch.tq, head_dim, width, scratch.k_t, scratch.tds);
      if (params.tk) add_scores(scratch.q, head_dim, width, scratch.tk_t, scratch.tds);
      if (params.tv) add_scores(scratch.dout, head_dim_v, width_v, scratch.tv_t, scratch.tp);
      if (params.tdout) add_scores(scratch.tdout, head_dim_v, width_v, scratch.v_t, scratch.tp);

      // ---- P, dS and their derivatives ----
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t group_row = block_first + row;
        T *p = scratch.p + row * kN, *ds = scratch.ds + row * kN;
        T *tds = scratch.tds + row * kN, *tp = scratch.tp + row * kN;
        const RowTangents<T> stats = {.lse = *lse.Row(group_row),
                                      .delta = *delta.Row(group_row),
                                      .tlse = *tlse.Row(group_row),
                                      .tdelta = *tdelta.Row(group_row)};
        if (stats.lse == -std::numeric_limits<T>::infinity()) {  // fully masked row
          for (T* x : {p, ds, tds, tp}) Zero(x, keys);
          continue;
        }
        logit_tangent.Complete(pairs, group_row, tile, keys, p, tds);
        T logit_scale = LogitScale<T>(params, batch);
        if (pairs.has_bias()) {
          T bias[kN];
          pairs.LoadBias(group_row, tile, keys, bias);
          for (int64_t key = 0; key < keys; ++key) p[key] = logit_scale * p[key] + bias[key];
          logit_scale = 1;
        }
        T factors[kN];  // dropout's
        if (pairs.may_drop()) {
          bool kept[kN];
          pairs.LoadKept(group_row, tile, keys, kept);
          for (int64_t key = 0; key < keys; ++key) factors[key] = kept[key] ? pairs.kept_factor() : T(0);
          for (T* x : {ds, tp}) {
            for (int64_t key = 0; key < keys; ++key) x[key] *= factors[key];
          }
        }
        if (cap > 0) {
          GradientTangents<true>(stats, keys, logit_scale, cap, p, ds, tds, tp);
        } else {
          GradientTangents<false>(stats, keys, logit_scale, cap, p, ds, tds, tp);
        }
        if (pairs.may_drop()) {
          for (T* x : {p, tp}) {
            for (int64_t key = 0; key < keys; ++key) x[key] *= factors[key];
          }
        }
        const bool* visible = pairs.may_hide() ? scratch.visible + row * kN : nullptr;
        for (T* x : {p, ds, tds, tp}) HidePairs(seen.first[row], seen.end[row], visible, keys, x);
      }

      // ---- tdV += tP^T dout + P^T tdout, tdK += tdS^T q + dS^T tq, tdQ = tdS k + dS tk ----
      const auto add_to_keys = [&](const T* weights, const T* from, int64_t columns, T* to) {
        Multiply<Layout::kTransposed, Into::kAccumulate>(keys, columns, rows, weights, kN, from, columns, to,
                                                         columns);
      };
      add_to_keys(scratch.tp, scratch.dout, width_v, scratch.tdv);
      if (params.tdout) add_to_keys(scratch.p, scratch.tdout, width_v, scratch.tdv);
      add_to_keys(scratch.tds, scratch.q, width, scratch.tdk);
      if (params.tq) add_to_keys(scratch.ds, scratch.tq, width, scratch.tdk);
      Multiply<Layout::kRowMajor, Into::kOverwrite>(rows, width, keys, scratch.tds, kN, scratch.k, width,
                                                    scratch.tdq, width);
      if (params.tk) {
        Multiply<Layout::kRowMajor, Into::kAccumulate>(rows, width, keys, scratch.ds, kN, scratch.tk, width,
                                                       scratch.tdq, width);
      }

      // ---- Add to tdq, after all tiles before this one ----
      turns.Wait(block);
      for (int64_t row = 0; row < rows; ++row) {
        T* to = tdq.Row(block_first + row);
        const T* from = scratch.tdq + row * width;
        for (int64_t column = 0; column < head_dim; ++column) to[column] += scale * from[column];
      }
      turns.Finish(block + 1);
    }
  }
  turns.Finish(kAllBlocks);

  // ---- Store tdk and tdv; keys that no query sees get 0 ----
  for (int64_t key = 0; key < std::min(kN, params.seqlen_kv - tile); ++key) {
    if (queries.empty() || key >= keys) {
      ZeroRow(tdk.Row(tile + key), head_dim);
      ZeroRow(tdv.Row(tile + key), head_dim_v);
    } else {
      StoreRow(tdk.Row(tile + key), scratch.tdk + key * width, scale, head_dim);
      StoreRow(tdv.Row(tile + key), scratch.tdv + key * width_v, T(1), head_dim_v);
    }
  }
}

template <typename T>
bool BackwardTangentIn(const BackwardTangentParams& params, ThreadPool& pool) {
  constexpr int64_t kRows = 64;  // of an item of the loops over rows
  const int64_t rows = params.batch * params.seqlen_q * params.num_heads;  // of one direction
  const int64_t all_rows = params.num_directions * rows;
  const int64_t heads = params.batch * params.num_kv_heads, all_heads = params.num_directions * heads;
  const int64_t tile_items = all_heads * DivideUp(params.seqlen_kv, kBackwardTangentN);
  const int64_t workers = NumWorkers(pool, tile_items);
  Arena shared_size(nullptr), size(nullptr);
  BackwardTangentShared<T>(params, shared_size);
  BackwardTangentScratch<T>(params, size);
  const Scratch memory(shared_size.used() + workers * size.used());
  if (!memory.data()) return false;
  Arena shared_arena(memory.data());
  const BackwardTangentShared<T> shared(params, shared_arena);
  for (int64_t i = 0; i < tile_items; ++i) new (shared.blocks_done + i) std::atomic<int64_t>(0);

  // The loop over rows of [D, B, T, N]; `body` gets the first and the end of some.
  const auto for_rows = [&](const auto& body) {
    const int64_t items = DivideUp(all_rows, kRows);
    ParallelFor(pool, NumWorkers(pool, items), items,
                [&](int64_t, int64_t item) { body(item * kRows, std::min((item + 1) * kRows, all_rows)); });
  };
  for_rows([&](int64_t first, int64_t end) {
    for (int64_t row = first; row < end; ++row) {
      if (row < rows) shared.delta[row] = Delta<T>(params, row);
      shared.tdelta[row] = DeltaTangent<T>(params, row, row % rows);
    }
    Zero(shared.tdq_accum + first * params.head_dim, (end - first) * params.head_dim);
  });
  // Items take one tile of every head in turn, so the tiles of a head seldom wait for one another.
  ParallelFor(pool, workers, tile_items, [&](int64_t worker, int64_t item) {
    Arena arena(memory.data() + shared_size.used() + worker * size.used());
    const int64_t head = item % all_heads;
    BackwardTangentTile<T>(params, head / heads, head % heads / params.num_kv_heads,
                           head % params.num_kv_heads, item / all_heads,
                           BackwardTangentScratch<T>(params, arena), shared);
  });
  if (!IsComputeType<T>(params.dtype)) {
    for_rows([&](int64_t first, int64_t end) {
      StoreRow(Stored{params.tdq, params.dtype} + first * params.head_dim,
               shared.tdq_accum + first * params.head_dim, T(1), (end - first) * params.head_dim);
    });
  }
  return true;
}
