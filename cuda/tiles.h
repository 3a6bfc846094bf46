// Tile sizes, and what limits each; Hopper's kernel for the gradient of a bias has its own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "params.h"

// Three limits shape these rows. Registers: 255 per thread, of which the accumulators must leave about 60 for
// operands and addresses. Shared memory: 99 KB fit every card from compute capability 8.0 on; rows that need
// more say so. Two blocks of a multiprocessor hide each other's barriers: two of 99 KB fit into Hopper's
// 228 KB, not into an A100's 164 KB. Warp tiles: 32 rows per warp where registers allow, so that each operand
// fragment read from shared memory feeds two products: the bandwidth of shared memory, 128 bytes per clock,
// bounds mma.sync kernels.
namespace jax_flash::cuda::sm80 {

struct ForwardTile {
  int block_m;        // query rows
  int block_n;        // key rows
  int warps;          // with block_m / warps rows each
  int stages;         // buffers of block_n rows, which keys and values use alternately
  int blocks_per_sm;  // sets the register budget
};

constexpr ForwardTile forward_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {128, 64, 4, 4, 2};   // 48 KB
    if (head_dim <= 128) return {128, 64, 4, 4, 2};  // 96 KB
    return {64, 32, 4, 4, 2};  // 96 KB; 16 rows a warp: 32 would take 256 registers for out
  }
  if (element_bytes == 8) {
    if (head_dim <= 64) return {64, 32, 4, 2, 2};  // 64 KB
    return {64, 16, 4, 2, 2};                      // 96 KB
  }
  if (head_dim <= 64) return {128, 64, 4, 4, 2};   // 96 KB
  if (head_dim <= 128) return {128, 32, 4, 2, 2};  // 96 KB
  return {64, 16, 4, 2, 2};                        // 96 KB
}

// A kernel that is bound by memory: what counts is how many bytes are on their way.
struct DecodeTile {
  int row_warps;  // warps along the rows, with 16 each
  int key_warps;  // warps along a block's keys, with block_n / key_warps each
  int block_n;    // key rows
  int stages;     // buffers of block_n rows, of which all but one are being filled
};

// `many_rows`: more than 16, for which out takes too many registers of one warp.
constexpr DecodeTile decode_tile(int element_bytes, int head_dim, bool many_rows) {
  const int row_bytes = element_bytes * head_dim;
  if (many_rows) {
    if (row_bytes <= 128) return {4, 1, 64, 8};  // 72 KB
    if (row_bytes <= 256) return {4, 1, 64, 5};  // 96 KB
    if (row_bytes <= 512) return {4, 1, 32, 4};  // 96 KB
    return {2, 1, 32, 2};                        // 96 KB
  }
  if (row_bytes <= 128) return {1, 4, 64, 8};  // 66 KB
  if (row_bytes <= 256) return {1, 4, 64, 4};  // 68 KB: three blocks, whose starts and ends overlap
  if (row_bytes <= 512) return {1, 2, 32, 5};  // 88 KB
  return {1, 2, 32, 2};                        // 80 KB
}

struct BackwardTile {
  int block_m;        // query rows
  int block_n;        // key rows
  int warps;          // in a grid for each product:
  int score_warps_m;  //   scores [block_m, block_n]: warps along block_m
  int dkv_warps_n;    //   dk and dv [block_n, head_dim]: warps along block_n
  int dq_warps_m;     //   dq [block_m, head_dim]: warps along block_m
  int blocks_per_sm;  // sets the register budget
};

// The more keys a block keeps, the fewer additions to dq in global memory, at 4 bytes per element. Two planes
// take as many bytes as float32.
constexpr BackwardTile backward_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {128, 128, 8, 4, 4, 4, 1};  // 128 KB, 160 KB with two stages
    if (head_dim <= 128) return {64, 128, 8, 2, 4, 2, 1};  // 128 KB, 160 KB with two stages
    return {64, 64, 8, 2, 2, 2, 1};                        // 144 KB
  }
  if (element_bytes == 8) return {32, 64, 8, 2, 2, 2, 1};  // 128, 224 KB
  if (head_dim <= 64) return {64, 64, 4, 2, 2, 2, 2};      // 96 KB
  if (head_dim <= 128) return {32, 64, 4, 2, 2, 1, 2};     // 112 KB
  return {32, 32, 4, 2, 1, 2, 1};                          // 136 KB
}

// For cards with 99 KB of shared memory, where the tiles above do not fit; of float64 for head dim 128, for
// those with 163 KB. For float32, the tile above for head dim 64 does, and no tile would above head dim 128.
constexpr bool has_compact_backward_tile(int element_bytes, int head_dim) {
  return element_bytes != 4 || (head_dim > 64 && head_dim <= 128);
}
constexpr BackwardTile compact_backward_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {64, 64, 4, 2, 2, 2, 2};   // 48 KB, 64 KB with two stages
    if (head_dim <= 128) return {64, 64, 4, 2, 2, 2, 1};  // 80 KB
    return {32, 32, 4, 2, 1, 2, 1};                       // 72 KB
  }
  if (element_bytes == 8) return {32, 32, 4, 2, 1, 2, head_dim <= 64 ? 2 : 1};  // 80, 144 KB
  return {32, 32, 4, 2, 1, 2, 1};                                               // 72 KB
}

struct BackwardDqTile {
  int block_m;        // query rows
  int block_n;        // key rows
  int warps;          // with block_m / warps rows each
  int stages;         // buffers of block_n keys and values
  int blocks_per_sm;  // sets the register budget
};

constexpr BackwardDqTile backward_dq_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {128, 64, 4, 2, 2};   // 64 KB
    if (head_dim <= 128) return {128, 32, 4, 2, 2};  // 96 KB
    return {64, 16, 4, 2, 2};                        // 96 KB
  }
  if (element_bytes == 8) {
    if (head_dim <= 64) return {64, 16, 4, 2, 2};  // 96 KB
    return {32, 16, 2, 1, 2};                      // 96 KB
  }
  if (head_dim <= 64) return {128, 32, 4, 2, 2};  // 96 KB
  if (head_dim <= 128) return {64, 16, 4, 2, 2};  // 96 KB
  return {32, 16, 2, 1, 2};                       // 96 KB
}

struct TangentTile {
  int block_m;        // query rows
  int block_n;        // key rows
  int warps;          // with block_m / warps rows each: 16, because a row has p, ts and tout
  int stages;         // buffers of block_n rows, which keys, values and their tangents use in turn
  int blocks_per_sm;  // sets the register budget
};

constexpr TangentTile tangent_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {64, 64, 4, 4, 2};   // 48 KB
    if (head_dim <= 128) return {64, 64, 4, 4, 2};  // 96 KB
    return {64, 32, 4, 2, 2};                       // 96 KB
  }
  if (element_bytes == 8) {
    if (head_dim <= 64) return {64, 32, 4, 2, 2};  // 96 KB
    return {32, 16, 2, 2, 2};                      // 96 KB
  }
  if (head_dim <= 64) return {64, 64, 4, 4, 2};   // 96 KB
  if (head_dim <= 128) return {64, 32, 4, 2, 2};  // 96 KB
  return {32, 16, 2, 2, 2};                       // 96 KB
}

// Of the kernel for tdk and tdv. Eight tiles of rows and keys and four of scores: one stage of each, and two
// blocks of a multiprocessor, where they fit, hide each other's loads.
constexpr BackwardTile backward_tangent_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {64, 64, 4, 2, 2, 0, 2};   // 96 KB
    if (head_dim <= 128) return {32, 64, 4, 2, 2, 0, 2};  // 112 KB
    return {32, 32, 4, 2, 1, 0, 1};                       // 144 KB
  }
  if (element_bytes == 8) return {32, 32, 4, 2, 1, 0, 1};  // 160 KB; above head dim 64 no tile fits
  if (head_dim <= 64) return {16, 64, 4, 1, 2, 0, 2};      // 96 KB
  return {32, 32, 4, 2, 1, 0, 1};                          // 144 KB; above head dim 128 no tile fits
}

// For cards with 99 KB of shared memory, where the tile above for these does not fit.
constexpr bool has_compact_backward_tangent_tile(int element_bytes, int head_dim) {
  return element_bytes == 2 && head_dim > 64 && head_dim <= 128;
}
inline constexpr BackwardTile kCompactBackwardTangentTile = {32, 32, 4, 2, 1, 0, 1};  // 80 KB

// Of the kernel for tdq.
constexpr BackwardDqTile backward_tangent_dq_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {64, 64, 4, 1, 2};   // 64 KB
    if (head_dim <= 128) return {64, 32, 4, 1, 2};  // 96 KB
    return {32, 16, 2, 1, 2};                       // 96 KB
  }
  if (element_bytes == 8) return {32, 16, 2, 1, 2};  // 96 KB
  if (head_dim <= 64) return {64, 32, 4, 1, 2};      // 96 KB
  return {32, 16, 2, 1, 2};                          // 96 KB
}

struct BackwardBiasTile {
  int block_m, block_n;  // query rows, key rows
  int piece;             // columns of the head dim at a time
  int warps;             // in a grid, of which
  int warps_m;           //   this many along block_m
  int blocks_per_sm;     // sets the register budget
};

// `has_parts`: three products of parts of float32 take more registers.
constexpr BackwardBiasTile backward_bias_tile(int element_bytes, bool has_parts = false) {
  if (element_bytes == 2) return {128, 128, 64, 8, 4, 1};  // 64 KB
  if (element_bytes == 8) return {64, 64, 16, 8, 4, 1};    // 32 KB
  return {64, 64, 32, 4, 2, has_parts ? 2 : 3};            // 32 KB
}

// Of the kernels for short sequences (head dims up to 64, in float32 32): a block has all pairs of a head, 16
// queries for each warp, and several blocks of a multiprocessor hide each other's loads.
inline constexpr int kShortRows = 64;  // the most queries, and the most keys
static_assert(kShortRows == kShortLength);
constexpr ForwardTile short_forward_tile(int head_dim, bool general) {
  return {kShortRows, kShortRows, 4, 4, head_dim <= 32 && !general ? 5 : 4};  // 20, 40 KB; float32 40
}
constexpr int short_backward_blocks(int element_bytes, int head_dim) {
  return element_bytes * head_dim <= 64 ? 4 : 3;  // of 32, 48 KB; float32 64
}
inline constexpr int kShortBackwardBiasBlocks = 3;  // of 32, 64 KB; float32 64

}  // namespace jax_flash::cuda::sm80

namespace jax_flash::cuda::sm90 {

struct ForwardTile {
  int consumers;    // warpgroups that compute, with 64 query rows each
  int block_n;      // key rows
  int stages;       // buffers of block_n keys, and as many of values
  int q_stages;     // buffers of queries; two let the next tile begin while this one ends
  int out_columns;  // of out's buffer; 0: out takes the place of the queries
  bool ping_pong;   // do consumers issue products in turn?
  int heads = 1;    // that have rows in the tile, of as many consumers each
};

// Registers limit these tiles: 64 rows of out and scores take (head_dim + block_n) / 2 of a thread's 232 (2
// consumers), 160 (3) or 112 (4). So does shared memory, 227 KB. More rows per tile load keys less often, and
// more keys per block make fewer steps, but half a step is lost at each edge of what the rows see. So some
// head dims have two tiles.
constexpr ForwardTile forward_tile(int head_dim, bool is_long) {
  if (head_dim <= 32) return {4, 80, 4, 2, 32, true};  // 88 KB
  if (head_dim <= 64) {
    return is_long ? ForwardTile{3, 128, 3, 2, 64, true}  // 168 KB
                   : ForwardTile{4, 64, 4, 2, 64, true};  // 160 KB
  }
  if (head_dim <= 128) {
    return is_long ? ForwardTile{3, 80, 3, 2, 0, true}    // 216 KB
                   : ForwardTile{3, 64, 4, 2, 0, false};  // 224 KB
  }
  if (head_dim <= 192) return {2, 64, 2, 2, 0, true};    // 192 KB
  if (head_dim <= 256) return {2, 64, 2, 1, 128, true};  // 224 KB
  return {2, 64, 2, 1, 0, true};                         // 224 KB, of half of the columns
}

// The tile of short sequences with 128 rows of two heads each, where otherwise consumers would have no rows.
// It has one stage less, for the keys of both heads. Results have the same bits.
constexpr bool has_two_head_forward_tile(int head_dim) { return head_dim <= 64; }
constexpr ForwardTile two_head_forward_tile(int head_dim) {
  const ForwardTile one = forward_tile(head_dim, false);
  return {one.consumers, one.block_n, 3, 2, one.out_columns, true, 2};  // 108, 192 KB
}

// Does it take less time than the tile of one head? As measured on an H200, in hundredths of the time of a
// full tile: up to 128 rows of one head take 70, of two heads 103. A multiprocessor has a tile at a time.
constexpr bool is_faster_by_two_heads(int64_t batch, int64_t queries, int64_t heads,
                                      int64_t multiprocessors) {
  const int64_t rest = queries % 256;
  const int64_t by_one = batch * heads * (100 * (queries / 256) + (rest == 0 ? 0 : rest <= 128 ? 70 : 100));
  const int64_t by_two = batch * ((heads + 1) / 2) * ((queries + 127) / 128) * 103;
  return std::max(by_two, 103 * multiprocessors) < by_one;
}

// For few queries on many keys, which are taken in parts: 128 rows, because those that a tile lacks are lost,
// or 256 where that is faster. At head dim 128, 192 were only 2 % faster where no row was lost.
constexpr ForwardTile split_forward_tile(int head_dim, bool is_wide) {
  if (head_dim <= 32) return {2, 128, 4, 2, 32, true};                   // 88 KB
  if (head_dim <= 64 && !is_wide) return {2, 128, 3, 2, 64, true};       // 144 KB
  if (head_dim > 64 && head_dim <= 128) return {2, 128, 2, 2, 0, true};  // 192 KB
  return forward_tile(head_dim, false);
}

// Are few rows lost in the wide tiles, which are a fifth faster? `rows`: of one head of a schedule.
constexpr bool split_is_wide(int64_t rows) { return (rows + 255) / 256 * 256 <= rows + rows / 8; }

// Is there room in shared memory to stage a bias, 2 KB a warp?
constexpr bool forward_stages_bias(int head_dim) { return head_dim <= 256; }

// With anything but a scale between scores and softmax: blocks of 64 keys, as in lists of visible blocks, and
// room for the bias where forward_stages_bias.
constexpr ForwardTile general_forward_tile(int head_dim) {
  if (head_dim <= 32) return {3, 64, 4, 2, 32, true};  // 92 KB
  if (head_dim <= 64) return {3, 64, 4, 2, 64, true};  // 160 KB
  if (head_dim <= 128) return {3, 64, 3, 2, 0, true};  // 216 KB
  if (head_dim <= 192) return {2, 64, 2, 2, 0, true};  // 208 KB
  return {2, 64, 2, 1, 0, true};                       // 208 KB, above head dim 256 224 KB
}

// For two planes of each array: twice the shared memory, the sums of a block beside out, and probabilities in
// two planes, too.
constexpr ForwardTile fine_forward_tile(int head_dim, bool general) {
  if (head_dim <= 64) return {2, general ? 64 : 96, 3, 2, 0, true};  // 176, 208 KB
  return {2, 64, 2, 1, 0, true};                                     // 192, 208 KB
}

// Which of the two tiles is faster, as measured. `keys`: the most that a row sees.
constexpr bool is_long(int head_dim, int64_t keys, bool is_causal) {
  return keys >= 8192 && (!is_causal || head_dim > 64);
}

struct BackwardTile {
  int block_m;    // query rows
  int stages;     // buffers of queries and dout
  int kv_stages;  // buffers of keys and values; with two, the next tile's are loaded meanwhile
};

// The values that Hopper's gradients for `head_dim` serve. 128 with keys of 192 are what Multi-head Latent
// Attention has; wider values run on the kernels for 256.
constexpr int backward_head_dim_v(int head_dim) { return head_dim == 192 ? 128 : head_dim; }

// Do two warpgroups keep dk and dv of 64 keys each? Else they share 64 keys, with half of the columns of dk
// and dv and half of the queries each.
constexpr bool backward_is_by_keys(int head_dim) { return head_dim + backward_head_dim_v(head_dim) <= 320; }

// Of a thread's 240 registers, dk and dv of 64 keys take half of the columns of both, scores and their
// gradients block_m; the general form takes some more. Its blocks are those of lists (visibility.cuh) or
// divide them.
constexpr BackwardTile backward_tile(int head_dim, bool general) {
  if (head_dim <= 32) return general ? BackwardTile{64, 2, 2} : BackwardTile{128, 2, 2};  // 105, 146 KB
  if (head_dim <= 64) return general ? BackwardTile{64, 2, 2} : BackwardTile{128, 2, 2};  // 161, 226 KB
  if (head_dim <= 128) return {64, 2, 1};                                                 // 193, 209 KB
  if (head_dim <= 192) return {general ? 32 : 48, 2, 2};                                  // 201, 221 KB
  return {64, 2, 1};  // 225 KB, above head dim 256 226 KB (wide_backward.cuh)
}

// For two planes of each array: 128 keys, and one buffer of queries and dout.
inline constexpr BackwardTile kFineBackwardTile = {64, 1, 1};  // 129, 225 KB

// Does dq get a kernel of its own, though that takes 7 products instead of 5, unless it finds ds in memory?
// At head dim 256 it was measured to be 4 to 6 % faster. At 192, one kernel has neither registers nor shared
// memory for 128 keys, and with 64 its operands and sums of dq would pass through shared memory for longer
// than the products of both kernels take. Above 256 there are no registers for it.
// (jax_flash/_kernel_choice.py relies on this: it then gives no memory for sums of dq.)
constexpr bool backward_is_split(int head_dim) { return head_dim > 128; }

// May that kernel keep ds? In 16 bits; up to head dim 128 the other one has it for dq. Above 256 neither
// does.
constexpr bool dq_kernel_may_keep_ds(int head_dim) { return backward_is_split(head_dim) && head_dim <= 256; }

struct BackwardDqTile {
  int block_n;  // key rows
  int stages;   // buffers of block_n keys, and as many of values
};

// A block keeps 128 rows of queries and of dout. dq takes head_dim / 2 of a thread's registers, scores and
// their gradients block_n.
constexpr BackwardDqTile backward_dq_tile(int head_dim, bool general) {
  if (head_dim <= 32) return {general ? 64 : 128, 3};                                    // 40, 64 KB
  if (head_dim <= 64) return {general ? 64 : 128, 3};                                    // 80, 128 KB
  if (head_dim <= 128) return general ? BackwardDqTile{64, 3} : BackwardDqTile{128, 2};  // 160, 192 KB
  if (head_dim <= 192) return general ? BackwardDqTile{32, 4} : BackwardDqTile{96, 2};   // 160, 200 KB
  return {general ? 32 : 48, 2};  // 192, 224 KB, above head dim 256 225 KB (wide_backward_dq.cuh)
}

// Of the kernel for dq that reads ds from memory.
struct SharedDqTile {
  int consumers;  // warpgroups that compute, with 64 query rows each
  int block_n;    // key rows
  int stages;     // buffers of block_n keys and of ds
};
constexpr SharedDqTile shared_dq_tile(int head_dim) {
  return {2, 64, head_dim <= 192 ? 5 : 4};  // 200, 192 KB
}

struct TangentTile {
  int consumers;  // warpgroups that compute, with 64 query rows each
  int block_n;    // key rows
  int stages;     // buffers of block_n keys and of as many values, with their tangents
};

// tout takes head_dim / 2 of a thread's 240 registers (2 consumers) or 160 (3), scores and ts block_n, and as
// operands half as much again.
constexpr TangentTile tangent_tile(int head_dim) {
  if (head_dim <= 64) return {3, 64, 3};  // 144 KB; two consumers, 96 or 112 keys: 8 % slower
  return {2, 64, 2};                      // 192 KB
}

}  // namespace jax_flash::cuda::sm90

// ---- kKeyUnit ----

namespace jax_flash::cuda {

constexpr bool blocks_divide_key_unit() {
  const auto divide = [](const auto&... tiles) { return ((kKeyUnit % tiles.block_n == 0) && ...); };
  for (int head_dim : {32, 64, 96, 128, 192, 256, 512}) {
    for (bool flag : {false, true}) {
      if (!divide(sm90::forward_tile(head_dim, flag), sm90::split_forward_tile(head_dim, flag),
                  sm90::general_forward_tile(head_dim), sm90::fine_forward_tile(head_dim, flag),
                  sm90::backward_dq_tile(head_dim, flag), sm90::tangent_tile(head_dim))) {
        return false;
      }
    }
    for (int bytes : {2, 4, 8}) {
      if (!divide(sm80::forward_tile(bytes, head_dim), sm80::decode_tile(bytes, head_dim, false),
                  sm80::decode_tile(bytes, head_dim, true), sm80::backward_tile(bytes, head_dim),
                  sm80::compact_backward_tile(bytes, head_dim), sm80::backward_dq_tile(bytes, head_dim),
                  sm80::tangent_tile(bytes, head_dim), sm80::backward_tangent_tile(bytes, head_dim),
                  sm80::backward_tangent_dq_tile(bytes, head_dim), sm80::backward_bias_tile(bytes))) {
        return false;
      }
    }
  }
  return divide(sm80::kCompactBackwardTangentTile);
}
static_assert(blocks_divide_key_unit());

}  // namespace jax_flash::cuda
