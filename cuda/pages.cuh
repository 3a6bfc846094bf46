// Keys and values in pages: which page has a key. The array page_indices is read where a key counts, and
// nowhere else: beyond a length it may hold anything.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash::cuda {

// The pages of one sequence.
struct SequencePages {
  const AttentionParams& params;
  const int32_t* indices;  // null: keys and values are not in pages

  __device__ __forceinline__ SequencePages(const AttentionParams& params, int batch)
      : params(params), indices(params.page_indices) {
    if (indices) indices += batch * params.pages_per_sequence;
  }

  __device__ __forceinline__ explicit operator bool() const { return indices != nullptr; }

  __device__ __forceinline__ int size() const { return static_cast<int>(params.page_size); }

  // The place of a key in the sequence's pages, and in its page. Unsigned numbers are divided faster.
  __device__ __forceinline__ int index_of(int key) const { return unsigned(key) / unsigned(size()); }
  __device__ __forceinline__ int row_of(int key) const { return unsigned(key) % unsigned(size()); }

  __device__ __forceinline__ int32_t entry(int index) const { return __ldg(indices + index); }
  __device__ __forceinline__ int32_t page_of(int32_t number) const { return params.page(number); }
  __device__ __forceinline__ int32_t page(int index) const { return page_of(entry(index)); }
};

}  // namespace jax_flash::cuda
