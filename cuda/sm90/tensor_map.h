// Tensor maps (CUtensorMap), by which TMA addresses a tensor. Host side.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

#include "launch.h"
#include "params.h"

namespace jax_flash::cuda::sm90 {

// A row in shared memory has 64 elements of 16 bits, 128 bytes, the widest that TMA swizzles. A
// tile with wider rows is split into several tiles, chunks of its columns. Rows of small head dims have 32
// elements, 64 bytes, swizzled by as many.
inline constexpr int kChunkColumns = 64;
inline constexpr int kChunkRowBytes = 128;
__host__ __device__ constexpr int chunk_columns(int head_dim) { return head_dim <= 32 ? 32 : kChunkColumns; }

// The driver's function, looked up at run time because the library must load without a driver.
inline PFN_cuTensorMapEncodeTiled_v12000 tensor_map_encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
  }();
  return encoder;
}

// Can TMA read and write such a tensor? Sizes must not be 0, strides must be multiples of 16
// bytes and below 2^40.
inline bool has_tensor_map(int64_t batch, int64_t seqlen, int64_t num_heads, int64_t head_dim) {
  return batch > 0 && seqlen > 0 && num_heads > 0 && head_dim > 0 && head_dim % 8 == 0 &&
         2 * seqlen * num_heads * head_dim < int64_t{1} << 40;
}

// The first two axes of k and v: batch elements and keys, or pages and their keys.
struct KeyAxes {
  int64_t outer, rows;

  explicit KeyAxes(const AttentionParams& params)
      : outer(params.page_indices ? params.num_pages : params.batch),
        rows(params.page_indices ? params.page_size : params.seqlen_kv) {}
};

// Do the kernels in cuda/sm90 run on this card, with such tensors?
inline bool is_served(const AttentionParams& params, const LaunchContext& context) {
  if (context.compute_capability != 90 || params.seqlen_kv == 0) return false;
  const KeyAxes keys(params);
  for (int64_t head_dim : {params.head_dim, params.head_dim_v}) {
    if (!has_tensor_map(params.batch, params.seqlen_q, params.num_heads, head_dim) ||
        !has_tensor_map(keys.outer, keys.rows, params.num_kv_heads, head_dim)) {
      return false;
    }
  }
  return true;
}

// Boxes of `box_rows` rows of `box_heads` heads, which come one after the other, and kColumns columns, a
// chunk's, of a dense [batch, seqlen, num_heads, head_dim]. Coordinates are (column, head, row, batch). False
// if the driver refuses.
template <class Element, int kColumns = kChunkColumns>
bool make_tensor_map(const void* tensor, int64_t batch, int64_t seqlen, int64_t num_heads, int64_t head_dim,
                     int box_rows, CUtensorMap* map, int box_heads = 1,
                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_256B) {
  static_assert(sizeof(Element) == 2 && (kColumns == 32 || kColumns == 64));
  constexpr CUtensorMapSwizzle kSwizzle =
      kColumns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B;
  constexpr CUtensorMapDataType kType = std::is_same_v<Element, __nv_bfloat16>
                                            ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const auto encode = tensor_map_encoder();
  if (!encode) return false;
  const cuuint64_t sizes[] = {cuuint64_t(head_dim), cuuint64_t(num_heads), cuuint64_t(seqlen),
                              cuuint64_t(batch)};
  const cuuint64_t row_bytes = 2 * head_dim;
  const cuuint64_t strides[] = {row_bytes, row_bytes * num_heads, row_bytes * num_heads * seqlen};
  const cuuint32_t box[] = {kColumns, cuuint32_t(box_heads), cuuint32_t(box_rows), 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  return encode(map, kType, 4, const_cast<void*>(tensor), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, kSwizzle, promotion,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace jax_flash::cuda::sm90
