// The one table of tile sizes.
#pragma once

#include <cstdint>

// Each row of this part was chosen for three limits. Registers: 255 a thread, of which the accumulators of a
// warp must leave about 60 for operands and addresses. Shared memory: 99 KB fits every card from compute
// capability 8.0 on, and leaves room for two blocks on an A100 or H100, which hide each other's barriers;
// where a row needs more, its line says so. Warp tiles: 32 rows a warp where registers allow, so that each
// operand fragment read from shared memory feeds two products; shared memory, at 128 bytes a clock, is what
// bounds mma.sync kernels.
namespace jax_flash::cuda::sm80 {

struct ForwardTile {
  int block_m;        // query rows
  int block_n;        // key rows
  int warps;          // block_m / warps rows each
  int stages;         // buffers of block_n rows that keys and values take in turn
  int blocks_per_sm;  // what the registers are budgeted for
};

constexpr ForwardTile forward_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {128, 64, 4, 4, 2};   // 48 KB
    if (head_dim <= 128) return {128, 64, 4, 4, 2};  // 96 KB
    return {64, 32, 4, 4, 2};  // 96 KB; 16 rows a warp: 32 would take 256 registers for out
  }
  if (head_dim <= 64) return {128, 64, 4, 4, 2};   // 96 KB
  if (head_dim <= 128) return {128, 32, 4, 2, 2};  // 96 KB
  return {64, 16, 4, 2, 2};                        // 96 KB
}

struct BackwardTile {
  int block_m;        // query rows
  int block_n;        // key rows
  int warps;          // in a grid of (rows, columns):
  int score_warps_m;  //   scores [block_m, block_n]: so many along block_m
  int dkv_warps_n;    //   dk and dv [block_n, head_dim]: so many along block_n
  int dq_warps_m;     //   dq [block_m, head_dim]: so many along block_m
  int blocks_per_sm;  // what the registers are budgeted for
};

// The more keys a block keeps, the less often it adds to dq in global memory, at 4 bytes an element.
constexpr BackwardTile backward_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {128, 128, 8, 4, 4, 4, 1};  // 128 KB, 160 KB with two stages
    if (head_dim <= 128) return {64, 128, 8, 2, 4, 2, 1};  // 128 KB, 160 KB with two stages
    return {64, 64, 8, 2, 2, 2, 1};                        // 144 KB
  }
  if (head_dim <= 64) return {64, 64, 4, 2, 2, 2, 2};   // 96 KB
  if (head_dim <= 128) return {32, 64, 4, 2, 2, 1, 2};  // 112 KB
  return {32, 32, 4, 2, 1, 2, 1};                       // 136 KB
}

// For cards with 99 KB of shared memory, where the tiles above do not fit. float32 fits them at head dim 64
// as it is, and not at all above 128.
constexpr bool has_compact_backward_tile(int element_bytes, int head_dim) {
  return element_bytes == 2 || (head_dim > 64 && head_dim <= 128);
}
constexpr BackwardTile compact_backward_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {64, 64, 4, 2, 2, 2, 2};   // 48 KB, 64 KB with two stages
    if (head_dim <= 128) return {64, 64, 4, 2, 2, 2, 1};  // 80 KB
    return {32, 32, 4, 2, 1, 2, 1};                       // 72 KB
  }
  return {32, 32, 4, 2, 1, 2, 1};  // 72 KB
}

struct BackwardDqTile {
  int block_m;        // query rows
  int block_n;        // key rows
  int warps;          // block_m / warps rows each
  int stages;         // buffers of block_n keys and values
  int blocks_per_sm;  // what the registers are budgeted for
};

constexpr BackwardDqTile backward_dq_tile(int element_bytes, int head_dim) {
  if (element_bytes == 2) {
    if (head_dim <= 64) return {128, 64, 4, 2, 2};   // 64 KB
    if (head_dim <= 128) return {128, 32, 4, 2, 2};  // 96 KB
    return {64, 16, 4, 2, 2};                        // 96 KB
  }
  if (head_dim <= 64) return {128, 32, 4, 2, 2};  // 96 KB
  if (head_dim <= 128) return {64, 16, 4, 2, 2};  // 96 KB
  return {32, 16, 2, 1, 2};                       // 96 KB
}

struct BackwardBiasTile {
  int block_m, block_n;  // query rows, key rows
  int piece;             // columns of the head dim at a time
  int warps;             // in a grid of (rows, columns):
  int warps_m;           //   so many along block_m
  int blocks_per_sm;     // what the registers are budgeted for
};

constexpr BackwardBiasTile backward_bias_tile(int element_bytes) {
  if (element_bytes == 2) return {128, 128, 64, 8, 4, 1};  // 64 KB
  return {64, 64, 32, 4, 2, 2};                            // 32 KB
}

}  // namespace jax_flash::cuda::sm80

namespace jax_flash::cuda::sm90 {

struct ForwardTile {
  int consumers;    // warpgroups that compute, 64 query rows each
  int block_n;      // key rows
  int stages;       // buffers of block_n keys, and as many of values
  int q_stages;     // buffers of queries; with two, the next tile begins while this one ends
  int out_columns;  // of out's buffer; 0: out takes the place of the queries
  bool ping_pong;   // do consumers issue products in turn?
};

// Registers bound these: 64 rows of out and scores take (head_dim + block_n) / 2 of a thread's 232 (2
// consumers), 160 (3) or 112 (4). And so does shared memory, 227 KB. More rows a tile load fewer keys, and
// more keys a block make fewer steps; but half of a step is lost at each edge of what the rows see. So there
// are two tiles for some head dims.
constexpr ForwardTile forward_tile(int head_dim, bool is_long) {
  if (head_dim <= 64) {
    return is_long ? ForwardTile{3, 128, 3, 2, 64, true}  // 168 KB
                   : ForwardTile{4, 64, 4, 2, 64, true};  // 160 KB
  }
  if (head_dim <= 128) {
    return is_long ? ForwardTile{3, 80, 3, 2, 0, true}    // 216 KB
                   : ForwardTile{3, 64, 4, 2, 0, false};  // 224 KB
  }
  if (head_dim <= 192) return {2, 64, 2, 2, 0, true};  // 192 KB
  return {2, 64, 2, 1, 128, true};                     // 224 KB
}

// Is there room in shared memory to stage a bias, 2 KB a warp?
constexpr bool forward_stages_bias(int head_dim) { return head_dim <= 192; }

// With anything but a scale between scores and softmax: blocks of 64 keys, as in lists of visible blocks, and
// room for the bias where forward_stages_bias.
constexpr ForwardTile general_forward_tile(int head_dim) {
  if (head_dim <= 64) return {3, 64, 4, 2, 64, true};  // 160 KB
  if (head_dim <= 128) return {3, 64, 3, 2, 0, true};  // 216 KB
  return forward_tile(head_dim, false);
}

// Which of the two; measured, with `keys` that a row sees at most.
constexpr bool is_long(int head_dim, int64_t keys, bool is_causal) {
  return keys >= 8192 && (!is_causal || head_dim > 64);
}

struct BackwardTile {
  int block_m;    // query rows
  int stages;     // buffers of queries and dout
  int kv_stages;  // buffers of keys and values; with two, the next tile's come while this one is worked on
};

// Two warpgroups keep 64 keys each: of a thread's 240 registers dk and dv take head_dim, scores and their
// gradients block_m, and the general form some more. Head dims over 128 keep 64 keys in all, and half of
// the columns and of the queries each.
constexpr BackwardTile backward_tile(int head_dim, bool general) {
  if (head_dim <= 64) return general ? BackwardTile{64, 2, 2} : BackwardTile{128, 2, 2};  // 145, 226 KB
  return {64, 2, 1};                                                                      // 193, 225 KB
}

// Is dq a kernel of its own, though that takes 7 products for 5? Measured: at head dim 256 that is 4 to 6 %
// faster. (jax_flash/_primitives.py knows, too: there is then no memory for sums of dq.)
constexpr bool backward_is_split(int head_dim) { return head_dim > 128; }

struct BackwardDqTile {
  int block_n;  // key rows
  int stages;   // buffers of block_n keys, and as many of values
};

// 128 rows of queries and of dout stay. dq takes head_dim / 2 of a thread's registers, scores and their
// gradients block_n.
constexpr BackwardDqTile backward_dq_tile(int head_dim, bool general) {
  if (general) return head_dim <= 128 ? BackwardDqTile{64, 3} : BackwardDqTile{32, 2};  // up to 224, 192 KB
  if (head_dim <= 64) return {128, 3};                                                  // 128 KB
  if (head_dim <= 128) return {128, 2};                                                 // 192 KB
  return {48, 2};                                                                       // 224 KB
}

}  // namespace jax_flash::cuda::sm90
