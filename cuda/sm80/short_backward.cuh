// The backward pass of short sequences, in one launch (short_gradients.cuh).
//
// A block has all queries and keys of one key head, and walks the query heads of its group. The sums over
// queries and heads, dk and dv, stay in registers; those over keys, dq, are complete after each head. So
// nothing is added in memory, and every sum has one order.
#pragma once

#include "sm80/short_gradients.cuh"

namespace jax_flash::cuda {
using short_backward_params = BackwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Arithmetic, int kHeadDim, PairPolicy kPolicy>
struct ShortBackwardConfig : ShortGradientsConfig<Arithmetic, kHeadDim, kPolicy> {
  using Base = ShortGradientsConfig<Arithmetic, kHeadDim, kPolicy>;
  using ScoreTile = SharedTile<Arithmetic, Base::kRows, Base::kRows>;
  static constexpr int kSharedBytes = 4 * Base::Tile::kBytes + 2 * ScoreTile::kBytes;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, short_backward_blocks(Config::kHeadDim))
    short_backward_kernel(const __grid_constant__ ShortGradientsArguments arguments) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using ScoreTile = typename Config::ScoreTile;
  constexpr int kNTiles = Config::kRows / 8, kColumnTiles = Config::kHeadDim / 8;
  const BackwardParams& params = arguments.params;

  // ---- Tile: neighbouring blocks take neighbouring heads, which lie side by side in memory ----
  const int num_heads = static_cast<int>(params.num_heads),
            num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int kv_head = blockIdx.x % num_kv_heads, batch = blockIdx.x / num_kv_heads;
  const int group = num_heads / num_kv_heads;
  const Mask mask(params, batch);
  const int64_t q_row0 = batch * params.seqlen_q, kv_row0 = batch * params.seqlen_kv;

  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t q_and_dout = ptx::shared_address(shared);  // [2, kRows, kHeadDim]
  const uint32_t k_and_v = q_and_dout + 2 * Tile::kBytes;   // [2, kRows, kHeadDim]
  const ScoreTile sP{k_and_v + 2 * Tile::kBytes};           // [kRows, kRows]
  const ScoreTile sDs{sP.base + ScoreTile::kBytes};         // [kRows, kRows]
  load_short_rows<Config>(arguments.k, arguments.v, kv_row0, kv_head, mask.kv_length, k_and_v);

  const int row0 = threadIdx.x / 32 * Config::kWarpRows;  // of the warp: queries, and in dk and dv keys
  float dk[1][kColumnTiles][4], dv[1][kColumnTiles][4];
  clear(dk);
  clear(dv);
#pragma unroll 1
  for (int head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    load_short_rows<Config>(arguments.q, arguments.dout, q_row0, head, mask.q_length, q_and_dout);
    ptx::copy_async_commit();
    ptx::copy_async_wait<0>();
    __syncthreads();

    // ---- p and ds ----
    float ds[1][kNTiles][4];
    short_score_gradients<Config>(
        arguments, batch, head, mask, row0, q_and_dout, k_and_v, ds,
        [&](const auto& probabilities) { store_accumulators<Arithmetic>(sP, row0, 0, probabilities); });
    store_accumulators<Arithmetic>(sDs, row0, 0, ds);

    // ---- dq = ds k ----
    RegisterA<Arithmetic, 1, kNTiles> ds_operand;
    ds_operand.set(ds);
    float dq[1][kColumnTiles][4];
    clear(dq);
    multiply_add<Arithmetic, Config::kRows / kStepK<Arithmetic>>(
        dq, ds_operand, MnMajorB<Arithmetic, Tile>(Tile{k_and_v}, 0));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + accumulator_row(0, h), columns = arguments.q.head_dim;
      if (row >= params.seqlen_q) continue;
      Element* gRow = static_cast<Element*>(params.dq) + ((q_row0 + row) * num_heads + head) * columns;
      for_each_run<Arithmetic>(dq, 0, h, [&](int column, const auto& values) {
        store_run<Arithmetic>(gRow, column, columns, row < mask.q_length, arguments.logit.scale, values);
      });
    }
    __syncthreads();

    // ---- dv += p^T dout, dk += ds^T q ----
    multiply_add<Arithmetic, Config::kRows / kStepK<Arithmetic>>(
        dv, MnMajorA<Arithmetic, ScoreTile, 1>(sP, row0),
        MnMajorB<Arithmetic, Tile>(Tile{q_and_dout + Tile::kBytes}, 0));
    multiply_add<Arithmetic, Config::kRows / kStepK<Arithmetic>>(
        dk, MnMajorA<Arithmetic, ScoreTile, 1>(sDs, row0), MnMajorB<Arithmetic, Tile>(Tile{q_and_dout}, 0));
    if (group > 1) __syncthreads();  // all have finished with the tiles of this head
  }

  // ---- Write dk and dv; keys beyond the length get zeros ----
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + accumulator_row(0, h);
    if (row >= params.seqlen_kv) continue;
    const int64_t index = (kv_row0 + row) * num_kv_heads + kv_head;
    auto write = [&](void* to, int columns, float factor, const auto& acc) {
      Element* gRow = static_cast<Element*>(to) + index * columns;
      for_each_run<Arithmetic>(acc, 0, h, [&](int column, const auto& values) {
        store_run<Arithmetic>(gRow, column, columns, row < mask.kv_length, factor, values);
      });
    };
    write(params.dk, arguments.k.head_dim, arguments.logit.scale, dk);
    write(params.dv, arguments.v.head_dim, Config::kPolicy.others ? arguments.pairs.kept_factor : 1, dv);
  }
}

template <class Arithmetic, int kHeadDim, PairPolicy kPolicy>
Status launch_short_backward(const BackwardParams& params, const LaunchContext& context) {
  using Config = ShortBackwardConfig<Arithmetic, kHeadDim, kPolicy>;
  return launch(short_backward_kernel<Config>, params.batch * params.num_kv_heads, Config::kThreads,
                Config::kSharedBytes, context,
                short_gradients_arguments<typename Config::Arithmetic>(params));
}

template <class Arithmetic, int kHeadDim>
Status short_backward(const BackwardParams& params, const LaunchContext& context) {
  // Python has divided the query heads of a key head over several blocks, to keep the card busy.
  if (params.dk_parts) return Status::not_served();
  return has_pair_options(params)
             ? launch_short_backward<Arithmetic, kHeadDim, kAnyPairsUnstaged>(params, context)
             : launch_short_backward<Arithmetic, kHeadDim, kNoPairs>(params, context);
}

}  // namespace jax_flash::cuda::sm80
