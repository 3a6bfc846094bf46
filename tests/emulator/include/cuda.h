// The driver's tensor maps.
#pragma once

#include <cstdint>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_64B, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Boxes of [box[3], ..., box[0]] elements of 16 bits, whose rows are as long as the swizzle is wide.
struct alignas(64) CUtensorMap {
  char* tensor;
  int64_t sizes[4], strides[4];  // strides in bytes
  int box[4];
};

inline CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* tensor,
                                  const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                                  const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                                  CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const cuuint32_t row_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
  if (rank != 4 || reinterpret_cast<uintptr_t>(tensor) % 16 != 0 || 2 * box[0] != row_bytes)
    return CUDA_ERROR_INVALID_VALUE;
  map->tensor = static_cast<char*>(tensor);
  for (int i = 0; i < 4; ++i) {
    map->sizes[i] = static_cast<int64_t>(sizes[i]);
    map->strides[i] = i == 0 ? 2 : static_cast<int64_t>(strides[i - 1]);
    map->box[i] = static_cast<int>(box[i]);
    const bool is_stride_valid = i == 0 || (map->strides[i] % 16 == 0 && map->strides[i] < int64_t{1} << 40);
    if (sizes[i] == 0 || box[i] == 0 || box[i] > 256 || !is_stride_valid) return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
