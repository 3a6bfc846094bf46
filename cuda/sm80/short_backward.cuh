// The backward pass of short sequences, in one launch (short_gradients.cuh).
//
// A block has all queries and keys of one key head, and walks the query heads of its group. The sums over
// queries and heads, dk and dv, stay in registers, of 32 keys in each warp: half of the warps have dv, the
// others dk. Those over keys, dq, are complete after each head. So nothing is added in memory, and every sum
// has one order.
#pragma once

#include "sm80/short_gradients.cuh"

namespace jax_flash::cuda {
using short_backward_params = BackwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Arithmetic, int kHeadDim, PairPolicy kPolicy>
struct ShortBackwardConfig : ShortGradientsConfig<Arithmetic, kHeadDim, kPolicy> {
  using Base = ShortGradientsConfig<Arithmetic, kHeadDim, kPolicy>;
  using ScoreTile = SharedTile<Arithmetic, Base::kRows, Base::kRows, /*kRounded=*/true>;
  static constexpr int kSharedBytes = 4 * Base::Tile::kBytes + 2 * ScoreTile::kBytes;
  static constexpr int kKeyWarps = 2, kWarpKeys = Base::kRows / kKeyWarps;  // of dk and of dv
  static_assert(Base::kThreads == 32 * 2 * kKeyWarps);
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads,
                                  short_backward_blocks(sizeof(typename Config::Element), Config::kHeadDim))
    short_backward_kernel(const __grid_constant__ ShortGradientsArguments arguments) {
  using Arithmetic = typename Config::Arithmetic;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using ScoreTile = typename Config::ScoreTile;
  constexpr int kNTiles = Config::kRows / 8, kColumnTiles = Config::kHeadDim / 8;
  const BackwardParams& params = arguments.params;

  // ---- Tile: neighboring blocks take neighboring heads, which lie side by side in memory ----
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

  const int warp = threadIdx.x / 32, row0 = warp * Config::kWarpRows;  // queries
  const int key0 = warp % Config::kKeyWarps * Config::kWarpKeys;
  const bool has_dk = warp >= Config::kKeyWarps;
  float dkv[Config::kWarpKeys / 16][kColumnTiles][4];  // [kWarpKeys, kHeadDim] of dk or dv
  clear(dkv);
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

    // ---- dk += ds^T q, dv += p^T dout ----
    const Tile rows{has_dk ? q_and_dout : q_and_dout + Tile::kBytes};
    multiply_add<Arithmetic, Config::kRows / kStepK<Arithmetic>>(
        dkv, MnMajorA<Arithmetic, ScoreTile, Config::kWarpKeys / 16>(has_dk ? sDs : sP, key0),
        MnMajorB<Arithmetic, Tile>(rows, 0));
    if (group > 1) __syncthreads();  // all have finished with the tiles of this head
  }

  // ---- Write dk and dv; keys beyond the length get zeros ----
  auto* to = static_cast<Element*>(has_dk ? params.dk : params.dv);
  const int columns = has_dk ? arguments.k.head_dim : arguments.v.head_dim;
  const float factor = has_dk                   ? arguments.logit.scale
                       : Config::kPolicy.others ? arguments.pairs.kept_factor
                                                : 1;
#pragma unroll
  for (int mt = 0; mt < Config::kWarpKeys / 16; ++mt) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = key0 + mn_major_accumulator_row<Arithmetic>(mt, h);
      if (row >= params.seqlen_kv) continue;
      Element* gRow = to + ((kv_row0 + row) * num_kv_heads + kv_head) * columns;
      for_each_run<Arithmetic>(dkv, mt, h, [&](int column, const auto& values) {
        store_run<Arithmetic>(gRow, column, columns, row < mask.kv_length, factor, values);
      });
    }
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
