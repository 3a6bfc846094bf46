// The gradient of bias or alibi_slopes: ds, summed over the broadcast dimensions (params.h says how far). A
// work item owns one tile of the sums and recomputes every term, so the order of summation is fixed. Included
// once for each instruction set, without an include guard, inside its namespace: see cpu_unit.h.

constexpr int64_t kBiasM = 64, kBiasN = 64;  // rows and keys of a tile
static_assert(kBiasM == kVisibilityBlock && kBiasN == kVisibilityBlock,
              "a tile has at most one sum of a block");
static_assert(kBiasN % (kColumnStep * kLanes<float>) == 0 && kBiasN <= kBackwardN);
constexpr int64_t kBiasRows = RoundUp(kBiasM, kRowStep);

template <typename T>
struct BiasScratch {
  T *q, *dout;    // [M, head_dim], [M, head_dim_v]
  T *k, *v;       // [N, head_dim], [N, head_dim_v]
  T *k_t, *v_t;   // [head_dim, N], [head_dim_v, N]
  T *p, *ds;      // [M, N]: initially the scores and dout v^T
  T* sums;        // [M, N]
  bool* visible;  // [M, N]: pairs that mask and segments leave visible

  BiasScratch(const AttentionParams& params, Arena& arena) {
    q = arena.Take<T>(kBiasRows * params.head_dim);
    dout = arena.Take<T>(kBiasRows * params.head_dim_v);
    k = arena.Take<T>(kBiasN * params.head_dim);
    v = arena.Take<T>(kBiasN * params.head_dim_v);
    k_t = arena.Take<T>(kBiasN * params.head_dim);
    v_t = arena.Take<T>(kBiasN * params.head_dim_v);
    p = arena.Take<T>(kBiasRows * kBiasN);
    ds = arena.Take<T>(kBiasRows * kBiasN);
    sums = arena.Take<T>(kBiasM * kBiasN);
    visible = arena.Take<bool>(kBiasM * kBiasN);
  }
};

// The rows of one batch element and query head in q or dout.
struct HeadRows {
  Stored<const void> data;
  int64_t stride, width;
  Stored<const void> Row(int64_t row) const { return data + row * stride; }
};

// Adds one head's ds of the tile to the sums.
template <typename T>
void AddBiasGradient(const BackwardParams& params, int64_t batch, int64_t head, int64_t row0, int64_t key0,
                     const BiasScratch<T>& scratch) {
  const Mask mask(params, batch);
  const int64_t group = GroupSize(params), kv_head = head / group;
  const Pairs<T> pairs(params, batch, kv_head, group);
  const auto group_row = [&](int64_t i) { return (row0 + i) * group + head % group; };
  const int64_t rows = std::min(row0 + kBiasM, mask.q_len()) - row0;
  const int64_t keys = std::min(key0 + kBiasN, mask.kv_len()) - key0;
  if (rows <= 0 || keys <= 0) return;
  if (mask.KeysOf(row0).first >= key0 + keys || mask.KeysOf(row0 + rows - 1).end <= key0) return;
  bool any = !pairs.may_hide();
  for (int64_t i = 0; pairs.may_hide() && i < rows; ++i) {
    any |= pairs.LoadVisible(group_row(i), 1, key0, keys, scratch.visible + i * kBiasN, kBiasN);
  }
  if (!any) return;

  // ---- S = q k^T, dP = dout v^T ----
  const int64_t head_dim = params.head_dim, head_dim_v = params.head_dim_v;
  const int64_t q_row0 = batch * params.seqlen_q * params.num_heads + head;
  const HeadRows q{Stored{params.q, params.dtype} + q_row0 * head_dim, params.num_heads * head_dim, head_dim};
  const HeadRows dout{Stored{params.dout, params.dtype} + q_row0 * head_dim_v, params.num_heads * head_dim_v,
                      head_dim_v};
  const KeyRows k(Stored{params.k, params.dtype}, params, batch, kv_head, head_dim);
  const KeyRows v(Stored{params.v, params.dtype}, params, batch, kv_head, head_dim_v);
  const int64_t tile_rows = RoundUp(rows, kRowStep), lanes_end = RoundUp(keys, kLanes<T>);
  LoadRows(q, row0, row0 + rows, nullptr, scratch.q, head_dim, tile_rows);
  LoadRows(dout, row0, row0 + rows, nullptr, scratch.dout, head_dim_v, tile_rows);
  LoadRows(k, key0, key0 + keys, nullptr, scratch.k, head_dim, lanes_end);
  LoadRows(v, key0, key0 + keys, nullptr, scratch.v, head_dim_v, lanes_end);
  Transpose(scratch.k, head_dim, lanes_end, head_dim, scratch.k_t, kBiasN);
  Transpose(scratch.v, head_dim_v, lanes_end, head_dim_v, scratch.v_t, kBiasN);
  Multiply<Layout::kRowMajor, Into::kOverwrite>(rows, keys, head_dim, scratch.q, head_dim, scratch.k_t,
                                                kBiasN, scratch.p, kBiasN);
  Multiply<Layout::kRowMajor, Into::kOverwrite>(rows, keys, head_dim_v, scratch.dout, head_dim_v, scratch.v_t,
                                                kBiasN, scratch.ds, kBiasN);

  // ---- sums += dS ----
  for (int64_t i = 0; i < rows; ++i) {
    const Range seen = mask.KeysOf(row0 + i);
    const int64_t first = std::clamp<int64_t>(seen.first - key0, 0, keys);
    const int64_t stats_row = q_row0 + (row0 + i) * params.num_heads;
    T* ds = scratch.ds + i * kBiasN;
    RowGradients<T>(pairs,
                    {.row = group_row(i),
                     .first_key = key0,
                     .first = first,
                     .end = std::clamp<int64_t>(seen.end - key0, first, keys),
                     .visible = scratch.visible + i * kBiasN,
                     .lse = static_cast<const T*>(params.lse)[stats_row],
                     .delta = Delta<T>(params, stats_row)},
                    keys, LogitScale<T>(params, batch), LogitCap<T>(params), scratch.p + i * kBiasN, ds);
    for (int64_t j = 0; j < keys; ++j) {
      const T weight = params.alibi_slopes ? -pairs.Distance(group_row(i), key0 + j) : T(1);
      scratch.sums[i * kBiasN + j] += weight * ds[j];
    }
  }
}

template <typename T>
bool BackwardBiasIn(const BackwardParams& params, ThreadPool& pool) {
  const int64_t heads = params.dbias_num_heads;
  if (!params.dbias_batch || !heads) return true;
  const int64_t batches_a_sum = params.batch / params.dbias_batch, heads_a_sum = params.num_heads / heads;
  const int64_t m_tiles = DivideUp(params.seqlen_q, kBiasM), n_tiles = DivideUp(params.seqlen_kv, kBiasN);
  const int64_t items = params.dbias_batch * heads * m_tiles * n_tiles, workers = NumWorkers(pool, items);
  const int64_t rows_out = DivideUp(params.seqlen_q, params.dbias_rows);
  const int64_t keys_out = DivideUp(params.seqlen_kv, params.dbias_keys);
  Arena size(nullptr);
  BiasScratch<T>(params, size);
  const Scratch memory(workers * size.used());
  if (!memory.data()) return false;

  ParallelFor(pool, workers, items, [&](int64_t worker, int64_t item) {
    Arena arena(memory.data() + worker * size.used());
    const BiasScratch<T> scratch(params, arena);
    const int64_t row0 = item / n_tiles % m_tiles * kBiasM, key0 = item % n_tiles * kBiasN;
    const int64_t batch_and_head = item / n_tiles / m_tiles;
    const int64_t batch = batch_and_head / heads, head = batch_and_head % heads;
    Zero(scratch.sums, kBiasM * kBiasN);
    for (int64_t b = batch * batches_a_sum; b < (batch + 1) * batches_a_sum; ++b) {
      for (int64_t n = head * heads_a_sum; n < (head + 1) * heads_a_sum; ++n) {
        AddBiasGradient<T>(params, b, n, row0, key0, scratch);
      }
    }

    // ---- Store, adding up rows and keys that share a sum ----
    const int64_t rows = std::min(kBiasM, params.seqlen_q - row0),
                  keys = std::min(kBiasN, params.seqlen_kv - key0);
    for (int64_t i = 0; i < rows; i += params.dbias_rows) {
      const int64_t first =
          (batch_and_head * rows_out + (row0 + i) / params.dbias_rows) * keys_out + key0 / params.dbias_keys;
      Visit<T>(Stored{params.dbias, params.dbias_dtype} + first, [&](auto* to) {
        for (int64_t j = 0; j < keys; j += params.dbias_keys) {
          T sum = 0;
          for (int64_t ii = i; ii < std::min(i + params.dbias_rows, rows); ++ii) {
            for (int64_t jj = j; jj < std::min(j + params.dbias_keys, keys); ++jj) {
              sum += scratch.sums[ii * kBiasN + jj];
            }
          }
          to[j / params.dbias_keys] = FromCompute<std::remove_pointer_t<decltype(to)>>(sum);
        }
      });
    }
  });
  return true;
}
