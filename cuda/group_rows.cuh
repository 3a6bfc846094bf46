// Tiles of rows that hold several query heads of a key head, all of them or a part: row i is query i / group
// of the group's head i % group. A key that has been loaded serves all of them. The interval of keys of a row
// never falls as i grows, as in mask.cuh.
#pragma once

#include "mask.cuh"
#include "params.h"

namespace jax_flash::cuda {

struct GroupRows {
  int group;  // query heads
  int count;  // rows: query heads times queries

  __device__ __forceinline__ GroupRows(const AttentionParams& params, int group)
      : group(group), count(group * static_cast<int>(params.seqlen_q)) {}
  __device__ __forceinline__ explicit GroupRows(const AttentionParams& params)
      : GroupRows(params, static_cast<int>(params.num_heads) / static_cast<int>(params.num_kv_heads)) {}

  __device__ __forceinline__ int query(int row) const { return row / group; }
  __device__ __forceinline__ int head(int row) const { return row % group; }

  // Of the rows [row, row + rows) that exist, the queries from query(row) on.
  __device__ __forceinline__ int num_queries(int row, int rows) const {
    return row < count ? query(min(row + rows, count) - 1) - query(row) + 1 : 0;
  }
};

// What Mask says of queries, of a warp's rows.
struct GroupMask {
  const Mask& queries;
  const GroupRows& rows;
  int first_query, num_queries;  // of the rows that exist; dividing for each block of keys would take long

  __device__ __forceinline__ GroupMask(const Mask& queries, const GroupRows& rows, int row, int count)
      : queries(queries),
        rows(rows),
        first_query(rows.query(row)),
        num_queries(rows.num_queries(row, count)) {}

  __device__ int first_key(int row) const { return queries.first_key(rows.query(row)); }
  __device__ int last_key(int row) const { return queries.last_key(rows.query(row)); }

  // Does every one of the rows see every key of [key, key + keys)?
  __device__ bool covers(int key, int keys) const {
    return queries.covers(first_query, num_queries, key, keys);
  }
  // Does none of them see any?
  __device__ bool hides(int key, int keys) const {
    return num_queries == 0 || queries.hides(first_query, num_queries, key, keys);
  }
};

}  // namespace jax_flash::cuda
