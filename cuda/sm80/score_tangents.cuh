// How a warp's tile of scores and of their gradients moves in one direction.
#pragma once

#include <type_traits>

#include "accumulator.cuh"
#include "pairs.cuh"
#include "params.h"
#include "ptx/math.h"
#include "softmax.cuh"

namespace jax_flash::cuda::sm80 {

// An element of a bias; only where Number is double may it be float64.
template <class Number>
__device__ __forceinline__ Number bias_element(const PairArray& bias, int64_t index) {
  if constexpr (std::is_same_v<Number, double>) {
    if (bias.dtype == DType::kFloat64) return static_cast<const double*>(bias.data)[index];
  }
  return bias.dtype == DType::kFloat32 ? static_cast<const float*>(bias.data)[index]
         : bias.dtype == DType::kFloat16
             ? __half2float(static_cast<const __half*>(bias.data)[index])
             : __bfloat162float(static_cast<const __nv_bfloat16*>(bias.data)[index]);
}

// Adds to ts, the derivative of the scaled products, that of bias, ALiBi and scale_factor in one direction.
// `scores`: q k^T.
template <class Number, class Pairs, int kMTiles, int kNTiles>
__device__ __forceinline__ void add_operand_tangents(Number (&ts)[kMTiles][kNTiles][4],
                                                     const Number (&scores)[kMTiles][kNTiles][4],
                                                     const AttentionParams& params,
                                                     const Directions& directions, const Pairs& pairs,
                                                     int direction, int batch, int head, Number scale,
                                                     int row0, int column0) {
  if (params.scale_factor) {
    for_each_accumulator(
        ts, [&](int mt, int h, int nt, int c) { ts[mt][nt][2 * h + c] *= pairs.head.scale_factor; });
  }
  const int64_t batch_element = direction * params.batch + batch;
  if (directions.tscale_factor) {
    const Number factor = scale * static_cast<const Number*>(directions.tscale_factor)[batch_element];
    for_each_accumulator(ts, [&](int mt, int h, int nt, int c) {
      ts[mt][nt][2 * h + c] += factor * scores[mt][nt][2 * h + c];
    });
  }
  if (directions.tbias) {
    const PairArray bias = directions.tbias[direction];
    const int last_row = static_cast<int>(params.seqlen_q) - 1,
              last_key = static_cast<int>(params.seqlen_kv) - 1;
    for_each_accumulator(ts, [&](int mt, int h, int nt, int c) {
      const int64_t row = min(row0 + accumulator_row(mt, h), last_row);
      const int64_t key = min(column0 + accumulator_column(nt, c), last_key);
      const int64_t index =
          batch * bias.batch_stride + head * bias.head_stride + row * bias.row_stride + key * bias.key_stride;
      ts[mt][nt][2 * h + c] += bias_element<Number>(bias, index);
    });
  }
  if (directions.talibi_slopes) {
    const Number slope =
        static_cast<const Number*>(directions.talibi_slopes)[batch_element * params.num_heads + head];
    const Number distance = alibi_distance(pairs, row0, column0);
    for_each_accumulator(ts, [&](int mt, int h, int nt, int c) {
      const Number step = 16 * mt + alibi_distance_step<Pairs>(nt, 2 * h + c);
      ts[mt][nt][2 * h + c] -= slope * fabs(distance + step);
    });
  }
}

// This lane's rows: lse times log2(e), delta, and their derivatives.
template <class Number, int kMTiles>
struct RowTangents {
  Number lse_log2[kMTiles][2], delta[kMTiles][2], tlse[kMTiles][2], tdelta[kMTiles][2];
};

// From logits / scale_log2 (of transform_scores) in p, dp in ds, the derivative of the logits before the cap
// in tds, and tdp in tp, to p, ds, tds and tp. `bend`: -2 / cap.
template <class Number, int kMTiles, int kNTiles>
__device__ __forceinline__ void gradient_tangents(Number (&p)[kMTiles][kNTiles][4],
                                                  Number (&ds)[kMTiles][kNTiles][4],
                                                  Number (&tds)[kMTiles][kNTiles][4],
                                                  Number (&tp)[kMTiles][kNTiles][4],
                                                  const LogitScaleOf<Number>& logit, Number bend,
                                                  const RowTangents<Number, kMTiles>& rows) {
  const bool is_capped = logit.transform == LogitTransform::kSoftCap;
  for_each_accumulator(p, [&](int mt, int h, int nt, int c) {
    const int i = 2 * h + c;
    const Number x = p[mt][nt][i], ts = tds[mt][nt][i];
    const Number dp = ds[mt][nt][i] - rows.delta[mt][h], tdp = tp[mt][nt][i] - rows.tdelta[mt][h];
    const Number slope = is_capped ? soft_cap_slope(x) : 1;
    const Number probability = exp2_of(fma(x, logit.scale_log2, -rows.lse_log2[mt][h]));
    const Number moved = probability * fma(slope, ts, -rows.tlse[mt][h]);
    const Number gradient = probability * dp * slope;
    p[mt][nt][i] = probability;
    ds[mt][nt][i] = gradient;
    tds[mt][nt][i] = slope * fma(moved, dp, probability * tdp);
    if (is_capped) tds[mt][nt][i] = fma(gradient * bend * x, ts, tds[mt][nt][i]);
    tp[mt][nt][i] = moved;
  });
}

}  // namespace jax_flash::cuda::sm80
