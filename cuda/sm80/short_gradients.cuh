// The gradients of short sequences, with mma.sync and cp.async: what both of their kernels do. A block of
// threads has all queries and all keys of a head, so sums over keys need no memory, and no kernel runs
// before: a warp computes delta = rowsum(dout out) - dlse of its rows. (rowsum(p dp) would not do: out and
// lse may be those of more keys than the call has, as in ring attention.)
#pragma once

#include <cmath>

#include "arithmetic.h"
#include "launch.h"
#include "mask.cuh"
#include "masking.cuh"
#include "pairs.cuh"
#include "params.h"
#include "sm80/gradient_arguments.cuh"
#include "sm80/product.cuh"
#include "sm80/scores.cuh"
#include "sm80/shared_tile.cuh"
#include "softmax.cuh"
#include "tiles.h"

namespace jax_flash::cuda::sm80 {

struct ShortGradientsArguments : GradientArguments<float> {
  HeadRows out;  // [B * T, N, Hv]
};

template <class Arithmetic>
ShortGradientsArguments short_gradients_arguments(const BackwardParams& params) {
  return {gradient_arguments<Arithmetic>(params),
          head_rows<typename Arithmetic::Element>(params.out, params.num_heads, params.head_dim_v)};
}

template <class Arithmetic_, int kHeadDim_, PairPolicy kPolicy_>
struct ShortGradientsConfig {
  using Arithmetic = Arithmetic_;
  using Element = typename Arithmetic::Element;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr PairPolicy kPolicy = kPolicy_;
  static constexpr int kRows = kShortRows, kWarpRows = 16, kThreads = kRows / kWarpRows * 32;
  using Tile = SharedTile<Arithmetic, kRows, kHeadDim>;
  using Loader = TileLoader<kThreads, Tile>;
};

// q and dout, or k and v, of a head: two tiles, side by side.
template <class Config>
__device__ __forceinline__ void load_short_rows(const HeadRows& first, const HeadRows& second, int64_t row0,
                                                int head, int length, uint32_t shared) {
  using Tile = typename Config::Tile;
  using Loader = typename Config::Loader;
  Loader(first, row0, head).load(Tile{shared}, 0, length);
  Loader(second, row0, head).load(Tile{shared + Tile::kBytes}, 0, length);
}

// A quad's part of the rows of out whose dot products with dout are wanted: of each row 16 bytes of four
// chunks.
template <class Config>
class ShortOutRows {
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  static constexpr int kChunkElements = 16 / sizeof(Element), kChunks = Config::kHeadDim / kChunkElements / 4;

 public:
  // `rows`: out as [B * T, N, Hv]. Begins to read the rows of sequence row `row0` and up to `length`.
  __device__ __forceinline__ ShortOutRows(const HeadRows& rows, int64_t sequence_row0, int head, int row0,
                                          int length) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + accumulator_row(0, h);
      const Element* from = static_cast<const Element*>(rows.data) + (sequence_row0 + row) * rows.stride +
                            int64_t{head} * rows.head_dim;
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const int column = kChunkElements * chunk(i), count = row < length ? rows.head_dim - column : 0;
        uint32_t (&words)[4] = out_[h][i];
        if (rows.copy_bytes == 16) {
          const uint4 x = count > 0 ? *reinterpret_cast<const uint4*>(from + column) : uint4{};
          words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
        } else if constexpr (sizeof(Element) == 4) {
#pragma unroll
          for (int j = 0; j < 4; ++j) words[j] = j < count ? __float_as_uint(from[column + j]) : 0;
        } else {
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(from + column) + 2 * j;
            words[j] = 2 * j < count ? halves[0] : 0;
            if (2 * j + 1 < count) words[j] |= uint32_t{halves[1]} << 16;
          }
        }
      }
    }
  }

  // The dot product of row h with that of dout, whose columns beyond the head dim are zeros.
  __device__ __forceinline__ float dot(int h, Tile dout, int row0) const {
    const int row = row0 + accumulator_row(0, h);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      uint32_t words[4];
      ptx::load_shared_x4(words, dout.base + row * Tile::kRowBytes + Tile::chunk_offset(row, chunk(i)));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (sizeof(Element) == 4) {
          sum = fmaf(__uint_as_float(out_[h][i][j]), __uint_as_float(words[j]), sum);
        } else {
          const float2 x = unpack<typename Config::Arithmetic>(out_[h][i][j]),
                       y = unpack<typename Config::Arithmetic>(words[j]);
          sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
        }
      }
    }
    return row_sum(sum);
  }

 private:
  __device__ __forceinline__ static int chunk(int i) { return lane_id() % 4 + 4 * i; }

  uint32_t out_[2][kChunks][4];
};

// Of a warp's 16 queries, from `row0` on, and all keys: the gradient of the logits, without the scale. Calls
// use(probabilities) with what the queries weigh the values by, before the scaling by kept_factor.
template <class Config, class Use>
__device__ __forceinline__ void short_score_gradients(const ShortGradientsArguments& arguments, int batch,
                                                      int head, const Mask& mask, int row0,
                                                      uint32_t q_and_dout, uint32_t k_and_v,
                                                      float (&ds)[1][kShortRows / 8][4], Use use) {
  using Arithmetic = typename Config::Arithmetic;
  using Tile = typename Config::Tile;
  constexpr bool kMayHaveMask = Config::kPolicy.may_have_mask(), kMayHaveOthers = Config::kPolicy.others;
  constexpr int kNTiles = kShortRows / 8, kSteps = Config::kHeadDim / kStepK<Arithmetic>;
  const BackwardParams& params = arguments.params;
  const Pairs<false> pairs{params, arguments.pairs, batch, head};

  // A row that sees no key, or that is beyond the end, has p = 0.
  float lse_log2[1][2], delta[1][2];
  for_each_accumulator_row(lse_log2, [&](int mt, int h) {
    const int row = row0 + accumulator_row(mt, h);
    const int64_t index = (int64_t{batch} * params.seqlen_q + row) * params.num_heads + head;
    const float lse = row < mask.q_length ? static_cast<const float*>(params.lse)[index] : -INFINITY;
    lse_log2[mt][h] = lse == -INFINITY ? INFINITY : lse_in_log2(lse);
    delta[mt][h] = params.dlse && fabsf(lse) < INFINITY ? -static_cast<const float*>(params.dlse)[index] : 0;
  });
  const ShortOutRows<Config> out(arguments.out, int64_t{batch} * params.seqlen_q, head, row0, mask.q_length);

  // ---- q k^T and dp = dout v^T ----
  float p[1][kNTiles][4];
  clear(p);
  clear(ds);
  multiply_add<Arithmetic, kSteps>(p, KMajorA<Arithmetic, Tile, 1>(Tile{q_and_dout}, row0),
                                   KMajorB<Arithmetic, Tile>(Tile{k_and_v}, 0));
  multiply_dp<Arithmetic, kSteps>(ds, KMajorA<Arithmetic, Tile, 1>(Tile{q_and_dout + Tile::kBytes}, row0),
                                  KMajorB<Arithmetic, Tile>(Tile{k_and_v + Tile::kBytes}, 0));

  for_each_accumulator_row(delta, [&](int mt, int h) {
    const float dot = out.dot(h, Tile{q_and_dout + Tile::kBytes}, row0);
    if (lse_log2[mt][h] != INFINITY) delta[mt][h] += dot;
  });

  // ---- p = exp(q k^T - lse) ----
  if constexpr (kMayHaveOthers) {
    transform_scores(p, pairs, arguments.logit, row0, 0);
  } else {
    transform_scores(p, arguments.logit);
  }
  const bool covered = mask.covers(row0, Config::kWarpRows, 0, kShortRows);
  [[maybe_unused]] PairBits<kNTiles> visible[1], kept[1];
  if constexpr (kMayHaveMask) {
    if (params.hides_pairs()) load_visible(visible, pairs, row0, 0);
  }
  auto hide = [&](auto& x) {
    if (!covered) fill_hidden(x, mask, row0, 0, 0);
    if constexpr (kMayHaveMask) {
      if (params.hides_pairs()) fill_unset(x, visible, 0);
    }
  };
  if (kMayHaveOthers && pairs.has_dropout()) {
    draw_kept(kept, pairs, row0, 0);
    for_each_accumulator(
        ds, [&](int mt, int h, int nt, int c) { ds[mt][nt][2 * h + c] *= arguments.pairs.kept_factor; });
    fill_unset(ds, kept, 0);
  }
  hide(ds);
  recompute_probabilities(p, arguments.logit, lse_log2, [&](auto& probabilities) {
    hide(probabilities);
    if (kMayHaveOthers && pairs.has_dropout()) {
      float kept_probabilities[1][kNTiles][4];
      for_each_accumulator(ds, [&](int mt, int h, int nt, int c) {
        kept_probabilities[mt][nt][2 * h + c] = probabilities[mt][nt][2 * h + c];
      });
      fill_unset(kept_probabilities, kept, 0);
      use(kept_probabilities);
    } else {
      use(probabilities);
    }
  });

  // ---- ds = p * (dp - delta) ----
  score_gradients(ds, p, delta, 1);
  hide(ds);  // delta may be infinite
}

}  // namespace jax_flash::cuda::sm80
