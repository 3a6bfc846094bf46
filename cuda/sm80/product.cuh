// Products of tiles on tensor cores: acc += a b by one warp, with a and b in shared memory or registers.
//
// An operand is "k-major" if the summed index runs along the rows of its tile in memory, else "mn-major". The
// combinations and the element types differ only in how the lanes get a fragment, 32 bytes of the summed
// index (16 elements of 16 bits, 8 of 32 bits; of float64 8, too, in 64 bytes). Throughout, g = lane / 4 and
// t = lane % 4.
//
// There is no transposing load for float32 and float64. So their mn-major operands are read as they lie, 16
// bytes per lane, which changes the order of rows and columns:
//   - the summed index k = 2t, 2t + 1 takes the place of the instruction's t, t + 4, in both operands;
//   - W = 4 (of float64 2) neighboring 8-column tiles are interleaved: column 8 nt + x of the instruction is
//     column 8 W (nt / W) + W x + nt % W of the array. for_each_run and mn_major_accumulator_row undo this.
// k-major float64 operands are read in the same way: a lane's 16 bytes are k = 2t, 2t + 1.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "accumulator.cuh"
#include "arithmetic.h"
#include "ptx/math.h"
#include "ptx/memory.h"
#include "ptx/mma.h"
#include "runs.cuh"
#include "sm80/shared_tile.cuh"

namespace jax_flash::cuda::sm80 {

// Elements of the summed index in one instruction's 32 bytes.
template <class Arithmetic>
inline constexpr int kStepK = kMultiplies16Bit<Arithmetic> ? 16 : 8;

// Is an operand split into two, and multiplied in three products?
template <class Arithmetic>
inline constexpr bool kIsSplit = std::is_same_v<Arithmetic, tf32x3> ||
                                 std::is_same_v<Arithmetic, tf32x3_infinity> || kHasTwoPlanes<Arithmetic>;

// What forms the products of a kernel, where infinite inputs must give what they give in float32.
template <class Arithmetic>
using Products = std::conditional_t<std::is_same_v<Arithmetic, tf32x3>, tf32x3_infinity, Arithmetic>;

// ---- Fragments: one instruction's registers of an operand ----

// kRegisters: 4 for a (16 rows), 2 for b (8 columns), each with two elements of 16 bits or one float32.
template <class Arithmetic, int kRegisters>
struct Fragment {
  uint32_t value[kRegisters];
};

template <int kRegisters>
struct Fragment<float64, kRegisters> {
  double value[kRegisters];
};

template <int kRegisters>
struct Fragment<tf32x3, kRegisters> {
  uint32_t high[kRegisters];  // the 11 leading bits, rounded
  uint32_t low[kRegisters];   // the exact remainder; the product uses 11 of its 12 bits
};

template <int kRegisters>
struct Fragment<float16x3, kRegisters> {
  uint32_t high[kRegisters];
  uint32_t low[kRegisters];
};

template <int kRegisters>
struct Fragment<tf32x3_infinity, kRegisters> {
  uint32_t high[kRegisters];
  uint32_t low[kRegisters];     // 0 for infinity and NaN
  uint32_t finite[kRegisters];  // high, but 0 for infinity and NaN
};

// Sets register i to what was loaded. kRounded: that is rounded to TF32 already.
template <bool kRounded, class Arithmetic, int kRegisters>
__device__ __forceinline__ void set(Fragment<Arithmetic, kRegisters>& fragment, int i, uint32_t loaded) {
  if constexpr (kIs16Bit<Arithmetic>) {
    fragment.value[i] = loaded;
  } else if constexpr (std::is_same_v<Arithmetic, tf32>) {
    fragment.value[i] = kRounded ? loaded : ptx::round_to_tf32(loaded);
  } else {
    // The error may be twice that of rounding to nearest, but 11 bits remain, which is all that a split
    // needs. This takes one instruction besides the mask, and an infinity stays one.
    fragment.high[i] = __float_as_uint(__uint_as_float(loaded) * (1 + 0.7f / 2048)) & 0xffffe000;
    fragment.low[i] = __float_as_uint(__uint_as_float(loaded) - __uint_as_float(fragment.high[i]));
    if constexpr (std::is_same_v<Arithmetic, tf32x3_infinity>) {
      const bool is_finite = fabsf(__uint_as_float(fragment.high[i])) < INFINITY;
      fragment.finite[i] = is_finite ? fragment.high[i] : 0;
      fragment.low[i] = is_finite ? fragment.low[i] : 0;
    }
  }
}

__device__ __forceinline__ void mma(float (&d)[4], const Fragment<bfloat16, 4>& a,
                                    const Fragment<bfloat16, 2>& b) {
  ptx::mma_bf16(d, a.value, b.value);
}
__device__ __forceinline__ void mma(float (&d)[4], const Fragment<float16, 4>& a,
                                    const Fragment<float16, 2>& b) {
  ptx::mma_f16(d, a.value, b.value);
}
__device__ __forceinline__ void mma(float (&d)[4], const Fragment<tf32, 4>& a, const Fragment<tf32, 2>& b) {
  ptx::mma_tf32(d, a.value, b.value);
}
__device__ __forceinline__ void mma(double (&d)[4], const Fragment<float64, 4>& a,
                                    const Fragment<float64, 2>& b) {
  ptx::mma_f64(d, a.value, b.value);
}
// Small terms first, for they would lose bits in a large sum. low * low is below float32's precision.
__device__ __forceinline__ void mma(float (&d)[4], const Fragment<tf32x3, 4>& a,
                                    const Fragment<tf32x3, 2>& b) {
  ptx::mma_tf32(d, a.low, b.high);
  ptx::mma_tf32(d, a.high, b.low);
  ptx::mma_tf32(d, a.high, b.high);
}
__device__ __forceinline__ void mma(float (&d)[4], const Fragment<float16x3, 4>& a,
                                    const Fragment<float16x3, 2>& b) {
  ptx::mma_f16(d, a.low, b.high);
  ptx::mma_f16(d, a.high, b.low);
  ptx::mma_f16(d, a.high, b.high);
}
// An infinity is multiplied only by the other operand's high part: infinity * low may be NaN or have the
// wrong sign.
__device__ __forceinline__ void mma(float (&d)[4], const Fragment<tf32x3_infinity, 4>& a,
                                    const Fragment<tf32x3_infinity, 2>& b) {
  ptx::mma_tf32(d, a.low, b.finite);
  ptx::mma_tf32(d, a.finite, b.low);
  ptx::mma_tf32(d, a.high, b.high);
}

// ---- Operand a: rows of the product ----

// a[row][k], k along the rows of the tile.
template <class Arithmetic, class Tile, int kMTiles>
struct KMajorA {
  uint32_t lane_base;

  __device__ __forceinline__ KMajorA(Tile tile, int row)
      : lane_base(Tile::moved(kIs64Bit<Arithmetic> ? tile.lane_base(lane_id() / 4, lane_id() % 4)
                                                   : tile.lane_base(lane_id() % 16, lane_id() / 16),
                              row, 0)) {}

  __device__ __forceinline__ void load(Fragment<Arithmetic, 4> (&a)[kMTiles], int step) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
      if constexpr (kIs64Bit<Arithmetic>) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          double two[2];
          ptx::load_shared_x2(two, Tile::moved(lane_base, 16 * mt + 8 * h, 4 * step));
          a[mt].value[h] = two[0];
          a[mt].value[h + 2] = two[1];
        }
      } else if constexpr (kHasTwoPlanes<Arithmetic>) {
        const uint32_t high = Tile::moved(lane_base, 16 * mt, 2 * step);
        ptx::load_matrix_x4(a[mt].high, high);
        ptx::load_matrix_x4(a[mt].low, high + Tile::kPlaneBytes);
      } else {
        uint32_t r[4];
        ptx::load_matrix_x4(r, Tile::moved(lane_base, 16 * mt, 2 * step));
#pragma unroll
        for (int i = 0; i < 4; ++i) set<Tile::kRounded>(a[mt], i, r[i]);
      }
    }
  }
};

// a[row][k] = tile[k][row], for a tile written by store_accumulators.
template <class Arithmetic, class Tile, int kMTiles>
struct MnMajorA {
  uint32_t lane_base;
  uint32_t lane_base_odd;  // float32 and float64: row k = 2t + 1

  __device__ __forceinline__ MnMajorA(Tile tile, int row) {
    const int lane = lane_id();
    if constexpr (kMultiplies16Bit<Arithmetic>) {
      lane_base = Tile::moved(tile.lane_base(lane % 8 + lane / 16 * 8, lane / 8 % 2), 0, row / 8);
    } else {
      static_assert(kMTiles == 2 || kIs64Bit<Arithmetic>,
                    "four interleaved groups of 8 rows are read at once");
      static_assert(Tile::kRounded || !std::is_same_v<Arithmetic, tf32>, "it is rounded already");
      constexpr int kChunkRows = 16 / sizeof(typename Arithmetic::Element);
      lane_base = Tile::moved(tile.lane_base(2 * (lane % 4), lane / 4), 0, row / kChunkRows);
      lane_base_odd = Tile::moved(tile.lane_base(2 * (lane % 4) + 1, lane / 4), 0, row / kChunkRows);
    }
  }

  __device__ __forceinline__ void load(Fragment<Arithmetic, 4> (&a)[kMTiles], int step) const {
    if constexpr (kIs16Bit<Arithmetic>) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        ptx::load_matrix_x4_transposed(a[mt].value, Tile::moved(lane_base, 16 * step, 2 * mt));
      }
    } else if constexpr (kHasTwoPlanes<Arithmetic>) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        const uint32_t high = Tile::moved(lane_base, 16 * step, 2 * mt);
        ptx::load_matrix_x4_transposed(a[mt].high, high);
        ptx::load_matrix_x4_transposed(a[mt].low, high + Tile::kPlaneBytes);
      }
    } else if constexpr (kIs64Bit<Arithmetic>) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        double even[2], odd[2];
        ptx::load_shared_x2(even, Tile::moved(lane_base, 8 * step, 8 * mt));
        ptx::load_shared_x2(odd, Tile::moved(lane_base_odd, 8 * step, 8 * mt));
        a[mt] = {{even[0], even[1], odd[0], odd[1]}};
      }
    } else {
      uint32_t even[4], odd[4];
      ptx::load_shared_x4(even, Tile::moved(lane_base, 8 * step, 0));
      ptx::load_shared_x4(odd, Tile::moved(lane_base_odd, 8 * step, 0));
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        set<Tile::kRounded>(a[mt], 0, even[2 * mt]);
        set<Tile::kRounded>(a[mt], 1, even[2 * mt + 1]);
        set<Tile::kRounded>(a[mt], 2, odd[2 * mt]);
        set<Tile::kRounded>(a[mt], 3, odd[2 * mt + 1]);
      }
    }
  }
};

// Two float32 in units of their planes, in 16 bits each, and what then remains of them.
struct PlanePair {
  uint32_t high, low;

  __device__ __forceinline__ PlanePair(float x, float y) : high(ptx::pack_f16(x, y)) {
    const float2 rounded = unpack<float16>(high);
    low = ptx::pack_f16(x - rounded.x, y - rounded.y);
  }
};

// Calls f(i, pair) for each register i of an operand a of 16 bits: pair[0] and pair[1] are two columns of
// `step`.
template <int kNTiles, class F>
__device__ __forceinline__ void for_each_pair(const float (&row_tile)[kNTiles][4], int step, F f) {
#pragma unroll
  for (int i = 0; i < 4; ++i) f(i, &row_tile[2 * step + i / 2][2 * (i % 2)]);
}

// a = the accumulators of another product. An instruction sums over columns that a lane already holds, so
// nothing moves between lanes. 16-bit operands are rounded at once, which halves the registers.
template <class Arithmetic, int kMTiles, int kNTiles>
struct RegisterA {
  static constexpr int kSteps = 8 * kNTiles / kStepK<Arithmetic>;
  using Sum = typename Arithmetic::Sum;
  std::conditional_t<kIs64Bit<Arithmetic>, double, uint32_t> value[kSteps][kMTiles][4];

  __device__ __forceinline__ void set(const Sum (&accumulators)[kMTiles][kNTiles][4]) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        if constexpr (kIs16Bit<Arithmetic>) {
          for_each_pair(accumulators[mt], step, [&](int i, const float* pair) {
            value[step][mt][i] = pack<Arithmetic>(pair[0], pair[1]);
          });
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const Sum x = accumulators[mt][step][i / 2 + 2 * (i % 2)];
            if constexpr (kIs64Bit<Arithmetic>) {
              value[step][mt][i] = x;
            } else {
              value[step][mt][i] = __float_as_uint(x);
            }
          }
        }
      }
    }
  }

  __device__ __forceinline__ void load(Fragment<Arithmetic, 4> (&a)[kMTiles], int step) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kIs64Bit<Arithmetic>) {
          a[mt].value[i] = value[step][mt][i];
        } else {
          sm80::set<false>(a[mt], i, value[step][mt][i]);
        }
      }
    }
  }
};

// The same in two planes, of accumulators times `factor`.
template <int kMTiles, int kNTiles>
struct RegisterA<float16x3, kMTiles, kNTiles> {
  static constexpr int kSteps = kNTiles / 2;
  Fragment<float16x3, 4> value[kSteps][kMTiles];

  __device__ __forceinline__ void set(const float (&accumulators)[kMTiles][kNTiles][4], float factor) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int mt = 0; mt < kMTiles; ++mt) {
        for_each_pair(accumulators[mt], step, [&](int i, const float* pair) {
          const PlanePair planes(factor * pair[0], factor * pair[1]);
          value[step][mt].high[i] = planes.high;
          value[step][mt].low[i] = planes.low;
        });
      }
    }
  }

  __device__ __forceinline__ void load(Fragment<float16x3, 4> (&a)[kMTiles], int step) const {
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) a[mt] = value[step][mt];
  }
};

// ---- Operand b: columns of the product ----

// Two tiles of 8 columns, as they are loaded from two planes.
__device__ __forceinline__ void set_planes(Fragment<float16x3, 2> (&b)[2], const uint32_t (&high)[4],
                                           const uint32_t (&low)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    b[i / 2].high[i % 2] = high[i];
    b[i / 2].low[i % 2] = low[i];
  }
}

// b[k][column] = tile[column][k].
template <class Arithmetic, class Tile>
struct KMajorB {
  static constexpr int kTiles = 2;  // 8-column tiles per load
  uint32_t lane_base;

  __device__ __forceinline__ KMajorB(Tile tile, int column) {
    const int lane = lane_id();
    lane_base = Tile::moved(kIs64Bit<Arithmetic> ? tile.lane_base(lane / 4, lane % 4)
                                                 : tile.lane_base(lane % 8 + lane / 16 * 8, lane / 8 % 2),
                            column, 0);
  }

  __device__ __forceinline__ void load(Fragment<Arithmetic, 2> (&b)[kTiles], int step, int group) const {
    if constexpr (kIs64Bit<Arithmetic>) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        ptx::load_shared_x2(b[i].value, Tile::moved(lane_base, 16 * group + 8 * i, 4 * step));
      }
    } else if constexpr (kHasTwoPlanes<Arithmetic>) {
      const uint32_t address = Tile::moved(lane_base, 16 * group, 2 * step);
      uint32_t high[4], low[4];
      ptx::load_matrix_x4(high, address);
      ptx::load_matrix_x4(low, address + Tile::kPlaneBytes);
      set_planes(b, high, low);
    } else {
      uint32_t r[4];
      ptx::load_matrix_x4(r, Tile::moved(lane_base, 16 * group, 2 * step));
#pragma unroll
      for (int i = 0; i < 4; ++i) set<Tile::kRounded>(b[i / 2], i % 2, r[i]);
    }
  }
};

// b[k][column] = tile[k][column].
template <class Arithmetic, class Tile>
struct MnMajorB {
  static constexpr int kTiles = kMultiplies16Bit<Arithmetic> || kIs64Bit<Arithmetic> ? 2 : 4;
  uint32_t lane_base;
  uint32_t lane_base_odd;  // float32 and float64: row k = 2t + 1

  __device__ __forceinline__ MnMajorB(Tile tile, int column) {
    const int lane = lane_id();
    if constexpr (kMultiplies16Bit<Arithmetic>) {
      lane_base = Tile::moved(tile.lane_base(lane % 16, lane / 16), 0, column / 8);
    } else {
      constexpr int kChunkColumns = 16 / sizeof(typename Arithmetic::Element);
      lane_base = Tile::moved(tile.lane_base(2 * (lane % 4), lane / 4), 0, column / kChunkColumns);
      lane_base_odd = Tile::moved(tile.lane_base(2 * (lane % 4) + 1, lane / 4), 0, column / kChunkColumns);
    }
  }

  __device__ __forceinline__ void load(Fragment<Arithmetic, 2> (&b)[kTiles], int step, int group) const {
    if constexpr (kIs16Bit<Arithmetic>) {
      uint32_t r[4];
      ptx::load_matrix_x4_transposed(r, Tile::moved(lane_base, 16 * step, 2 * group));
#pragma unroll
      for (int i = 0; i < 4; ++i) b[i / 2].value[i % 2] = r[i];
    } else if constexpr (kHasTwoPlanes<Arithmetic>) {
      const uint32_t address = Tile::moved(lane_base, 16 * step, 2 * group);
      uint32_t high[4], low[4];
      ptx::load_matrix_x4_transposed(high, address);
      ptx::load_matrix_x4_transposed(low, address + Tile::kPlaneBytes);
      set_planes(b, high, low);
    } else if constexpr (kIs64Bit<Arithmetic>) {
      double even[2], odd[2];
      ptx::load_shared_x2(even, Tile::moved(lane_base, 8 * step, 8 * group));
      ptx::load_shared_x2(odd, Tile::moved(lane_base_odd, 8 * step, 8 * group));
#pragma unroll
      for (int i = 0; i < 2; ++i) b[i] = {{even[i], odd[i]}};
    } else {
      uint32_t even[4], odd[4];
      ptx::load_shared_x4(even, Tile::moved(lane_base, 8 * step, 8 * group));
      ptx::load_shared_x4(odd, Tile::moved(lane_base_odd, 8 * step, 8 * group));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        set<Tile::kRounded>(b[i], 0, even[i]);
        set<Tile::kRounded>(b[i], 1, odd[i]);
      }
    }
  }
};

// ---- The product ----

// What sums added outside are to be multiplied by: nothing.
struct NoFactor {
  __device__ __forceinline__ float operator()(int, int) const { return 1; }
};

// acc[16 kMTiles, 8 kNTiles] += a b over kSteps steps of kStepK.
//
// kLongSum: the sum continues over many calls. Tensor cores round it towards zero at each instruction, which
// adds up to a part in 1,000 over 131,072 rows. So where three products are to be as exact as float32, the
// sums of kStepsInside steps each are added outside of them, times factor(mt, step) of the first.
template <class Arithmetic, int kSteps, bool kLongSum = false, int kStepsInside = 1, int kMTiles, int kNTiles,
          class A, class B, class Factor = NoFactor>
__device__ __forceinline__ void multiply_add(typename Arithmetic::Sum (&acc)[kMTiles][kNTiles][4], const A& a,
                                             const B& b, const Factor& factor = {}) {
  static_assert(kNTiles % B::kTiles == 0 && kSteps % kStepsInside == 0);
  constexpr bool kAddOutside = kLongSum && kIsSplit<Arithmetic>;
  static_assert(kAddOutside || (std::is_same_v<Factor, NoFactor> && kStepsInside == 1));
#pragma unroll
  for (int first = 0; first < kSteps; first += kStepsInside) {
    Fragment<Arithmetic, 4> a_fragments[kStepsInside][kMTiles];
#pragma unroll
    for (int i = 0; i < kStepsInside; ++i) a.load(a_fragments[i], first + i);
    [[maybe_unused]] float factors[kMTiles];
#pragma unroll
    for (int mt = 0; mt < kMTiles; ++mt) factors[mt] = factor(mt, first);
#pragma unroll
    for (int group = 0; group < kNTiles / B::kTiles; ++group) {
      [[maybe_unused]] float terms[kMTiles][B::kTiles][4] = {};
      const auto add = [&](const float (&term)[4], int mt, int tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          auto& sum = acc[mt][group * B::kTiles + tile][i];
          sum = std::is_same_v<Factor, NoFactor> ? sum + term[i] : fmaf(term[i], factors[mt], sum);
        }
      };
#pragma unroll
      for (int i = 0; i < kStepsInside; ++i) {
        Fragment<Arithmetic, 2> b_fragment[B::kTiles];
        b.load(b_fragment, first + i, group);
#pragma unroll
        for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
          for (int tile = 0; tile < B::kTiles; ++tile) {
            if constexpr (kAddOutside) {
              float (&term)[4] = terms[mt][tile];
              mma(term, a_fragments[i][mt], b_fragment[tile]);
              if (i == kStepsInside - 1) add(term, mt, tile);
            } else {
              mma(acc[mt][group * B::kTiles + tile], a_fragments[i][mt], b_fragment[tile]);
            }
          }
        }
      }
    }
  }
}

// acc += dout v^T, from which delta is subtracted next: tensor cores cut off up to 2^-17 of the sum of 128
// products of one sign, and the difference may be a hundredth of that sum. So sums of two steps are added
// outside of them where results are to be as exact as float32.
template <class Arithmetic, int kSteps, int kMTiles, int kNTiles, class A, class B>
__device__ __forceinline__ void multiply_dp(typename Arithmetic::Sum (&acc)[kMTiles][kNTiles][4], const A& a,
                                            const B& b) {
  multiply_add<Arithmetic, kSteps, /*kLongSum=*/true, kIsSplit<Arithmetic> ? 2 : 1>(acc, a, b);
}

// acc += a b^T: rows from a_row on of a tile a, rows from b_row on of a tile b, over their kColumns columns.
//
// Of planes in the order of Hopper's forward kernel (issue_scores_of_planes of sm90/product.cuh), for the
// same bits: all steps of low * high, of high * low, and of high * high. So 8 large sums of 128 columns are
// cut off, not 24.
template <class Arithmetic, int kColumns, int kMTiles, int kNTiles, class ATile, class BTile>
__device__ __forceinline__ void multiply_rows(typename Arithmetic::Sum (&acc)[kMTiles][kNTiles][4],
                                              ATile a_tile, int a_row, BTile b_tile, int b_row) {
  constexpr int kSteps = kColumns / kStepK<Arithmetic>;
  if constexpr (kHasTwoPlanes<Arithmetic>) {
    KMajorA<float16, typename ATile::Plane, kMTiles> a({a_tile.base + ATile::kPlaneBytes}, a_row);
    KMajorB<float16, typename BTile::Plane> b({b_tile.base}, b_row);
#pragma unroll
    for (int product = 0; product < 3; ++product) {
      multiply_add<float16, kSteps>(acc, a, b);
      if (product == 0) a.lane_base -= ATile::kPlaneBytes;
      b.lane_base += product == 0 ? BTile::kPlaneBytes : -BTile::kPlaneBytes;
    }
  } else {
    multiply_add<Arithmetic, kSteps>(acc, KMajorA<Arithmetic, ATile, kMTiles>(a_tile, a_row),
                                     KMajorB<Arithmetic, BTile>(b_tile, b_row));
  }
}

// ---- Rows and columns of accumulators ----

// The row of an accumulator of a product whose a is an MnMajorA; for other operands it is accumulator_row. In
// float32 rows are columns of store_accumulators' tile, interleaved by four; in float64 they are by two.
template <class Arithmetic>
__device__ __forceinline__ int mn_major_accumulator_row(int mt, int h) {
  if constexpr (kMultiplies16Bit<Arithmetic>) {
    return accumulator_row(mt, h);
  } else if constexpr (kIs64Bit<Arithmetic>) {
    return 16 * mt + lane_id() / 4 * 2 + h;
  } else {
    const int g = lane_id() / 4;
    return 8 * (g / 2) + 2 * (2 * mt + h) + g % 2;
  }
}

// ---- Storing accumulators ----

// Writes a warp's accumulators to rows `row`.. and columns `column`.. of a tile, to be read as the operand a.
// float32 columns 2t, 2t + 1 go to t, t + 4: a k-major fragment then has the summed index in the order of
// MnMajorB. To two planes they go times `factor`.
template <class Arithmetic, class Tile, int kMTiles, int kNTiles>
__device__ __forceinline__ void store_accumulators(Tile tile, int row, int column,
                                                   const typename Arithmetic::Sum (&acc)[kMTiles][kNTiles][4],
                                                   [[maybe_unused]] float factor = 1) {
  constexpr int kChunkElements = 16 / sizeof(typename Tile::Element);
  const uint32_t first =
      kIs64Bit<Arithmetic> ? tile.lane_base(lane_id() / 4, lane_id() % 4) : tile.lane_base(lane_id() / 4, 0);
  const uint32_t lane_base =
      Tile::moved(first, row, column / kChunkElements) + (kIs64Bit<Arithmetic> ? 0 : 4 * (lane_id() % 4));
#pragma unroll
  for (int mt = 0; mt < kMTiles; ++mt) {
#pragma unroll
    for (int nt = 0; nt < kNTiles; ++nt) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto* pair = &acc[mt][nt][2 * h];
        if constexpr (kIs64Bit<Arithmetic>) {
          ptx::store_shared_x2(Tile::moved(lane_base, 16 * mt + 8 * h, 4 * nt), {pair[0], pair[1]});
        } else if constexpr (kIs16Bit<Arithmetic>) {
          ptx::store_shared(Tile::moved(lane_base, 16 * mt + 8 * h, nt), pack<Arithmetic>(pair[0], pair[1]));
        } else if constexpr (kHasTwoPlanes<Arithmetic>) {
          const PlanePair planes(factor * pair[0], factor * pair[1]);
          const uint32_t high = Tile::moved(lane_base, 16 * mt + 8 * h, nt);
          ptx::store_shared(high, planes.high);
          ptx::store_shared(high + Tile::kPlaneBytes, planes.low);
        } else {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const uint32_t x = __float_as_uint(pair[c]);
            ptx::store_shared(Tile::moved(lane_base, 16 * mt + 8 * h, 2 * nt + c),
                              std::is_same_v<Arithmetic, tf32> ? ptx::round_to_tf32(x) : x);
          }
        }
      }
    }
  }
}

}  // namespace jax_flash::cuda::sm80
