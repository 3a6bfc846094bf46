// The gradient of bias or of alibi_slopes for short sequences (short_gradients.cuh): ds, summed over the
// broadcast dimensions as far as BackwardParams::dbias says (params.h).
//
// A block walks the batch elements and heads that share a sum; while it works on one, the next one loads.
#pragma once

#include "bias_sums.cuh"
#include "sm80/short_gradients.cuh"

namespace jax_flash::cuda {
using short_backward_bias_params = BackwardParams;
}

namespace jax_flash::cuda::sm80 {

template <class Arithmetic, int kHeadDim>
struct ShortBackwardBiasConfig : ShortGradientsConfig<Arithmetic, kHeadDim, kAnyPairsUnstaged> {
  using Base = ShortGradientsConfig<Arithmetic, kHeadDim, kAnyPairsUnstaged>;
  static constexpr int kStageBytes = 4 * Base::Tile::kBytes;
  static constexpr int kSharedBytes = 2 * kStageBytes;
  // Sums that are to be added up further take the place of the tiles, at the end.
  static_assert(bias_sums_bytes<float>(Base::kRows, Base::kRows, Base::kWarpRows, Base::kRows) <=
                kSharedBytes);
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, kShortBackwardBiasBlocks)
    short_backward_bias_kernel(const __grid_constant__ ShortGradientsArguments arguments) {
  using Tile = BiasSumsTile<Config::kRows, Config::kRows>;
  using Item = typename Tile::Item;
  constexpr int kNTiles = Config::kRows / 8;
  const BackwardParams& params = arguments.params;
  const int group = static_cast<int>(params.num_heads) / max(static_cast<int>(params.num_kv_heads), 1);
  const Tile tile(params, blockIdx.x);

  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t ring = ptx::shared_address(shared);  // [2, 4, kRows, kHeadDim]: q, dout, k, v
  auto load = [&](const Item& item, uint32_t stage) {
    const Mask mask(params, item.batch);
    load_short_rows<Config>(arguments.q, arguments.dout, item.batch * params.seqlen_q, item.head,
                            mask.q_length, stage);
    load_short_rows<Config>(arguments.k, arguments.v, item.batch * params.seqlen_kv, item.head / group,
                            mask.kv_length, stage + Config::kStageBytes / 2);
  };

  const int row0 = threadIdx.x / 32 * Config::kWarpRows;
  float sums[1][kNTiles][4];
  clear(sums);
  uint32_t stage = ring;
  Item item = tile.first();
  if (tile.exists(item)) load(item, stage);
  ptx::copy_async_commit();
#pragma unroll 1
  while (tile.exists(item)) {
    const Item next_item = tile.next(item);
    ptx::copy_async_wait<0>();
    __syncthreads();  // all threads see this item and have finished with the one before it
    const uint32_t next_stage = 2 * ring + Config::kStageBytes - stage;
    if (tile.exists(next_item)) load(next_item, next_stage);
    ptx::copy_async_commit();

    float ds[1][kNTiles][4];
    short_score_gradients<Config>(arguments, item.batch, item.head, Mask(params, item.batch), row0, stage,
                                  stage + Config::kStageBytes / 2, ds, [](const auto&) {});
    add_to_bias_sums(sums, ds, Pairs<false>{params, arguments.pairs, item.batch, item.head}, row0, 0);
    item = next_item;
    stage = next_stage;
  }
  ptx::copy_async_wait<0>();
  write_bias_sums<Config::kThreads>(tile, sums, row0, 0, shared);
}

template <class Arithmetic, int kHeadDim>
Status short_backward_bias(const BackwardParams& params, const LaunchContext& context) {
  using Config = ShortBackwardBiasConfig<Arithmetic, kHeadDim>;
  return launch(short_backward_bias_kernel<Config>, BiasSumsTile<Config::kRows, Config::kRows>::count(params),
                Config::kThreads, Config::kSharedBytes, context,
                short_gradients_arguments<typename Config::Arithmetic>(params));
}

}  // namespace jax_flash::cuda::sm80
