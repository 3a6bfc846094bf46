// Forward mode: tout and tlse of one block of query rows in some directions, tile by tile of keys, with the
// probabilities recomputed from lse. A tile's scores and probabilities serve all directions of the work item.
// Included once for each instruction set, without an include guard, inside its namespace: see cpu_unit.h.
//
//   tlse = rowsum(P tS), tout = (P tS) v + P tv - tlse out, with tS = scale (tq k^T + q tk^T) + ...

constexpr int64_t kTangentM = 48, kTangentN = 96;
static_assert(kTangentM % kRowStep == 0);
static_assert(kTangentN % kRowStep == 0 && kTangentN % (kColumnStep * kLanes<float>) == 0);
static_assert(kTangentN <= kBackwardN);
// The directions of a work item: more share the scores, but need more scratch.
constexpr int64_t kTangentDirections = 8;

template <typename T>
struct TangentScratch {
  T *q, *tq;       // [M, head_dim]
  T *k, *k_t;      // [N, head_dim], [head_dim, N]; k is also tk
  T* tk_t;         // [head_dim, N]
  T *v, *tv;       // [N, head_dim_v rounded up]
  T* s;            // [M, N]: q k^T
  T *p, *p_slope;  // [M, N]: probabilities; those times the slope of the soft cap
  T* ts;           // [M, N]: of one direction
  T* kept;         // [M, N]: dropout's factors
  T* tout;         // [directions, M, head_dim_v rounded up]
  T* tlse;         // [directions, M]
  SeenKeys seen;   // of M rows
  bool* visible;   // [M, N]: pairs that mask and segments leave visible

  TangentScratch(const TangentParams& params, Arena& arena) {
    const int64_t width_v = RoundUp(params.head_dim_v, kLanes<T>);
    q = arena.Take<T>(kTangentM * params.head_dim);
    tq = arena.Take<T>(kTangentM * params.head_dim);
    k = arena.Take<T>(kTangentN * params.head_dim);
    k_t = arena.Take<T>(kTangentN * params.head_dim);
    tk_t = arena.Take<T>(kTangentN * params.head_dim);
    v = arena.Take<T>(kTangentN * width_v);
    tv = arena.Take<T>(kTangentN * width_v);
    s = arena.Take<T>(kTangentM * kTangentN);
    p = arena.Take<T>(kTangentM * kTangentN);
    p_slope = arena.Take<T>(kTangentM * kTangentN);
    ts = arena.Take<T>(kTangentM * kTangentN);
    kept = arena.Take<T>(kTangentM * kTangentN);
    tout = arena.Take<T>(kTangentDirections * kTangentM * width_v);
    tlse = arena.Take<T>(kTangentDirections * kTangentM);
    seen = SeenKeys(kTangentM, arena);
    visible = arena.Take<bool>(kTangentM * kTangentN);
  }
};

// The probabilities of one row, and those times the slope of the cap, from its scores.
template <bool kCapped, typename T>
void RowProbabilities(const T* s, int64_t keys, T scale, T cap, T lse, T* p, T* p_slope) {
  for (int64_t key = 0; key < keys; key += kLanes<T>) {
    const Vec<T> x = Logits<T>(Load(s + key), scale, kCapped ? cap : T(0));
    const Vec<T> probability = Exp<T>(x - lse);
    Store(p + key, probability);
    if constexpr (kCapped) {
      const Vec<T> tanh = x / cap;
      Store(p_slope + key, probability * (T(1) - tanh * tanh));
    } else {
      Store(p_slope + key, probability);
    }
  }
}

// How the logits of one batch element move in one direction, before the cap:
// ts = scale (tq k^T + q tk^T) + tscale q k^T + tbias.
template <typename T>
class LogitTangent {
 public:
  LogitTangent(const AttentionParams& params, const Directions& directions, int64_t direction, int64_t batch)
      : scale_(LogitScale<T>(params, batch)),
        tbias_(directions.tbias[direction]),
        tslopes_(static_cast<const T*>(directions.talibi_slopes)) {
    const T* tfactors = static_cast<const T*>(directions.tscale_factor);
    if (tfactors) tscale_ = static_cast<T>(params.options.scale) * tfactors[direction * params.batch + batch];
    if (tslopes_) tslopes_ += direction * params.batch * params.num_heads;
  }

  // One row: ts holds tq k^T + q tk^T, s has q k^T.
  void Complete(const Pairs<T>& pairs, int64_t row, int64_t first_key, int64_t keys, const T* s,
                T* ts) const {
    for (int64_t key = 0; key < keys; ++key) ts[key] *= scale_;
    if (tscale_ != 0) {
      for (int64_t key = 0; key < keys; ++key) ts[key] += tscale_ * s[key];
    }
    if (tbias_ || tslopes_) {
      T tbias[kTangentN];
      pairs.LoadBias(tbias_, tslopes_, row, first_key, keys, tbias);
      for (int64_t key = 0; key < keys; ++key) ts[key] += tbias[key];
    }
  }

 private:
  T scale_, tscale_ = 0;
  PairArray tbias_;
  const T* tslopes_;
};

// Multiplies ts by the probabilities with the slope, for one row. Returns the sum.
template <typename T>
T WeighRow(const T* p_slope, int64_t keys, T* ts) {
  Vec<T> sums = {};
  for (int64_t key = 0; key < keys; key += kLanes<T>) {
    const Vec<T> weighted = Load(ts + key) * Load(p_slope + key);
    Store(ts + key, weighted);
    sums += weighted;
  }
  T sum = 0;
  for (int64_t lane = 0; lane < kLanes<T>; ++lane) sum += sums[lane];
  return sum;
}

// The directions [first_direction, first_direction + directions) of one block of query rows (see GroupRows).
template <typename T>
void TangentBlock(const TangentParams& params, int64_t batch, int64_t kv_head, int64_t block,
                  int64_t first_direction, int64_t directions, const TangentScratch<T>& scratch) {
  const int64_t head_dim = params.head_dim, head_dim_v = params.head_dim_v;
  const int64_t width_v = RoundUp(head_dim_v, kLanes<T>);
  const T logit_scale = LogitScale<T>(params, batch);
  const T cap = params.options.logits_soft_cap;
  const T infinity = std::numeric_limits<T>::infinity();
  // The rows of direction d in a tensor [D, ...] whose directions have `size` elements.
  const auto group_rows = [&](auto tensor, int64_t d, int64_t width) {
    const int64_t size = params.batch * params.seqlen_q * params.num_heads * width;
    return GroupRows(tensor + d * size, params, batch, kv_head, width);
  };
  const auto key_rows = [&](const void* tensor, int64_t d, int64_t width) {
    const int64_t size = params.batch * params.seqlen_kv * params.num_kv_heads * width;
    return KeyRows(Stored{tensor, params.dtype} + d * size, params, batch, kv_head, width);
  };
  const GroupRows q = group_rows(Stored{params.q, params.dtype}, 0, head_dim);
  const KeyRows k = key_rows(params.k, 0, head_dim);
  const KeyRows v = key_rows(params.v, 0, head_dim_v);
  const GroupRows out = group_rows(Stored{params.out, params.dtype}, 0, head_dim_v);
  const GroupRows lse = group_rows(static_cast<const T*>(params.lse), 0, 1);

  const Mask mask(params, batch);
  const Pairs<T> pairs(params, batch, kv_head, q.group);
  const int64_t block_first = block * kTangentM;
  const int64_t block_end = std::min(block_first + kTangentM, params.seqlen_q * q.group);
  const int64_t rows =
      std::min(block_end, mask.q_len() * q.group) - block_first;  // number of rows; may be negative
  const int64_t tile_rows = RoundUp(rows, kRowStep);
  Zero(scratch.tout, kTangentDirections * kTangentM * width_v);
  Zero(scratch.tlse, kTangentDirections * kTangentM);

  if (rows > 0) {
    LoadRows(q, block_first, block_first + rows, nullptr, scratch.q, head_dim, tile_rows);
    const Range first_keys = mask.KeysOf(block_first / q.group);
    const Range last_keys = mask.KeysOf((block_first + rows - 1) / q.group);

    for (int64_t tile = first_keys.first / kTangentN * kTangentN; tile < last_keys.end; tile += kTangentN) {
      const int64_t tile_end = std::min(tile + kTangentN, mask.kv_len());
      const int64_t keys = tile_end - tile, lanes_end = RoundUp(keys, kLanes<T>);
      if (pairs.may_hide() && !pairs.LoadVisible(block_first, rows, tile, keys, scratch.visible, kTangentN)) {
        continue;
      }
      const SeenKeys& seen = scratch.seen;
      seen.Find(mask, q.group, block_first, rows, {tile, tile_end});
      for (int64_t row = 0; row < rows; ++row) {
        if (*lse.Row(block_first + row) == -infinity) seen.end[row] = seen.first[row];
      }

      const auto hide = [&](int64_t row, T* x) {
        const bool* visible = pairs.may_hide() ? scratch.visible + row * kTangentN : nullptr;
        HidePairs(seen.first[row], seen.end[row], visible, lanes_end, x);
      };

      // ---- S = q k^T, P = exp(S - lse) ----
      LoadRows(k, tile, tile_end, nullptr, scratch.k, head_dim, lanes_end);
      Transpose(scratch.k, head_dim, lanes_end, head_dim, scratch.k_t, kTangentN);
      LoadRows(v, tile, tile_end, nullptr, scratch.v, width_v, keys);
      Multiply<Layout::kRowMajor, Into::kOverwrite>(rows, keys, head_dim, scratch.q, head_dim, scratch.k_t,
                                                    kTangentN, scratch.s, kTangentN);
      for (int64_t row = 0; row < rows; ++row) {
        T logits[kTangentN];
        const T* s = scratch.s + row * kTangentN;
        T *p = scratch.p + row * kTangentN, *p_slope = scratch.p_slope + row * kTangentN;
        T row_scale = logit_scale;
        if (pairs.has_bias()) {
          pairs.LoadBias(block_first + row, tile, keys, logits);
          for (int64_t key = 0; key < keys; ++key) logits[key] += logit_scale * s[key];
          std::fill(logits + keys, logits + lanes_end, T(0));
          s = logits;
          row_scale = 1;
        }
        const T row_lse = *lse.Row(block_first + row);
        if (cap > 0) {
          RowProbabilities<true>(s, keys, row_scale, cap, row_lse, p, p_slope);
        } else {
          RowProbabilities<false>(s, keys, row_scale, cap, row_lse, p, p_slope);
        }
        for (T* x : {p, p_slope}) hide(row, x);
        if (pairs.may_drop()) {
          bool kept[kTangentN];
          pairs.LoadKept(block_first + row, tile, keys, kept);
          T* factors = scratch.kept + row * kTangentN;
          for (int64_t key = 0; key < keys; ++key) {
            factors[key] = kept[key] ? pairs.kept_factor() : T(0);
            p[key] *= factors[key];
          }
        }
      }

      for (int64_t i = 0; i < directions; ++i) {
        const int64_t d = first_direction + i;
        T* tout = scratch.tout + i * kTangentM * width_v;
        if (params.tv) {  // ---- tO += P tv ----
          LoadRows(key_rows(params.tv, d, head_dim_v), tile, tile_end, nullptr, scratch.tv, width_v, keys);
          Multiply<Layout::kRowMajor, Into::kAccumulate>(rows, width_v, keys, scratch.p, kTangentN,
                                                         scratch.tv, width_v, tout, width_v);
        }
        if (!params.moves_logits()) continue;

        // ---- tS = tq k^T + q tk^T ----
        Zero(scratch.ts, kTangentM * kTangentN);
        if (params.tq) {
          LoadRows(group_rows(Stored{params.tq, params.dtype}, d, head_dim), block_first, block_first + rows,
                   nullptr, scratch.tq, head_dim, tile_rows);
          Multiply<Layout::kRowMajor, Into::kAccumulate>(rows, keys, head_dim, scratch.tq, head_dim,
                                                         scratch.k_t, kTangentN, scratch.ts, kTangentN);
        }
        if (params.tk) {
          LoadRows(key_rows(params.tk, d, head_dim), tile, tile_end, nullptr, scratch.k, head_dim, lanes_end);
          Transpose(scratch.k, head_dim, lanes_end, head_dim, scratch.tk_t, kTangentN);
          Multiply<Layout::kRowMajor, Into::kAccumulate>(rows, keys, head_dim, scratch.q, head_dim,
                                                         scratch.tk_t, kTangentN, scratch.ts, kTangentN);
        }

        // ---- P tS ----
        const LogitTangent<T> logit_tangent(params, params, d, batch);
        for (int64_t row = 0; row < rows; ++row) {
          T* ts = scratch.ts + row * kTangentN;
          logit_tangent.Complete(pairs, block_first + row, tile, keys, scratch.s + row * kTangentN, ts);
          hide(row, ts);
          scratch.tlse[i * kTangentM + row] += WeighRow(scratch.p_slope + row * kTangentN, keys, ts);
          if (pairs.may_drop()) {
            const T* factors = scratch.kept + row * kTangentN;
            for (int64_t key = 0; key < keys; ++key) ts[key] *= factors[key];
          }
        }

        // ---- tO += (P tS) v ----
        Multiply<Layout::kRowMajor, Into::kAccumulate>(rows, width_v, keys, scratch.ts, kTangentN, scratch.v,
                                                       width_v, tout, width_v);
      }
    }
  }

  // ---- Store tout and tlse; fully masked rows get 0 ----
  for (int64_t i = 0; i < directions; ++i) {
    const GroupRows tout = group_rows(Stored{params.tout, params.dtype}, first_direction + i, head_dim_v);
    const GroupRows tlse = group_rows(static_cast<T*>(params.tlse), first_direction + i, 1);
    for (int64_t row = 0; row < block_end - block_first; ++row) {
      *tlse.Row(block_first + row) = row < rows ? scratch.tlse[i * kTangentM + row] : T(0);
      if (row >= rows || *lse.Row(block_first + row) == -infinity) {
        ZeroRow(tout.Row(block_first + row), head_dim_v);
        continue;
      }
      const T moved = scratch.tlse[i * kTangentM + row];
      T* moved_out = scratch.tout + (i * kTangentM + row) * width_v;
      Visit<T>(out.Row(block_first + row), [&](const auto* result) {
        for (int64_t column = 0; column < head_dim_v; ++column) {
          moved_out[column] -= moved * ToCompute(result[column]);
        }
      });
      StoreRow(tout.Row(block_first + row), moved_out, T(1), head_dim_v);
    }
  }
}

template <typename T>
bool TangentIn(const TangentParams& params, ThreadPool& pool) {
  const int64_t blocks = DivideUp(params.seqlen_q * GroupSize(params), kTangentM);
  const int64_t parts = DivideUp(params.num_directions, kTangentDirections);
  const int64_t items = params.batch * params.num_kv_heads * blocks * parts;
  const int64_t workers = NumWorkers(pool, items);
  Arena size(nullptr);
  TangentScratch<T>(params, size);
  const Scratch memory(workers * size.used());
  if (!memory.data()) return false;

  ParallelFor(pool, workers, items, [&](int64_t worker, int64_t item) {
    Arena arena(memory.data() + worker * size.used());
    const int64_t first = item % parts * kTangentDirections;
    const int64_t block =
        blocks - 1 - item / parts % blocks;  // last blocks first: causal, they are the longest
    const int64_t head = item / parts / blocks;
    TangentBlock<T>(params, head / params.num_kv_heads, head % params.num_kv_heads, block, first,
                    std::min(kTangentDirections, params.num_directions - first),
                    TangentScratch<T>(params, arena));
  });
  return true;
}
