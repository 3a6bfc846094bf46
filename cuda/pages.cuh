// Keys and values in pages: which page has a key. The array page_indices is read where a key counts, and
// nowhere else: beyond a length it may hold anything.
#pragma once

#include <cstdint>

#include "params.h"

namespace jax_flash::cuda {

// Where a key is: the place of its page in the sequence's pages, and its own in its page.
struct PagePlace {
  int index, row;
};

// The pages of one sequence.
struct SequencePages {
  const AttentionParams& params;
  const int32_t* indices;  // null: keys and values are not in pages
  uint32_t reciprocal;     // 2^32 / size, or up to 1 less

  __device__ __forceinline__ SequencePages(const AttentionParams& params, int batch)
      : params(params), indices(params.page_indices), reciprocal(0) {
    if (!indices) return;
    indices += batch * params.pages_per_sequence;
    reciprocal = ~0u / unsigned(size());
  }

  __device__ __forceinline__ explicit operator bool() const { return indices != nullptr; }

  __device__ __forceinline__ int size() const { return static_cast<int>(params.page_size); }

  // A division would take 20 instructions. The product gives its result or, for keys below 2^31, one less.
  __device__ __forceinline__ PagePlace place_of(int key) const {
    const int index = static_cast<int>(__umulhi(key, reciprocal)), row = key - index * size();
    return row < size() ? PagePlace{index, row} : PagePlace{index + 1, row - size()};
  }

  __device__ __forceinline__ int32_t entry(int index) const { return __ldg(indices + index); }
  __device__ __forceinline__ int32_t page_of(int32_t number) const { return params.page(number); }
  __device__ __forceinline__ int32_t page(int index) const { return page_of(entry(index)); }
};

}  // namespace jax_flash::cuda
