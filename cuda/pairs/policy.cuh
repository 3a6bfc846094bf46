// Which pair options a kernel's main loop handles, known at compile time.
//
// An option that may be present costs a test in every block, and such tests and their addresses take as long
// as the softmax. So the most common options have loops of their own. A kernel's Config carries the policy of
// the kernel; where a kernel has several loops, all but the last have narrower ones. PairOptions and
// is_general (options.cuh) choose among kernels and loops at run time.
#pragma once

#include "arithmetic.h"

namespace jax_flash::cuda {

// Do the calls that a loop serves have an option? kMaybe: the loop tests for it.
enum class Presence { kNever, kMaybe, kAlways };

struct PairPolicy {
  Presence mask;         // mask or segments: blocks come from lists (visibility.cuh), pairs from bits
  Presence staged_bias;  // a 16-bit bias that comes through shared memory
  bool others;           // any other bias, ALiBi, an array of scales, soft cap, dropout

  __host__ __device__ constexpr bool may_have_mask() const { return mask != Presence::kNever; }
  __host__ __device__ constexpr bool may_stage_bias() const { return staged_bias != Presence::kNever; }

  // Is this the general form of a kernel?
  __host__ __device__ constexpr bool is_general() const {
    return may_have_mask() || may_stage_bias() || others;
  }
};

inline constexpr PairPolicy kNoPairs{Presence::kNever, Presence::kNever, false};
inline constexpr PairPolicy kMaskOnly{Presence::kAlways, Presence::kNever, false};
inline constexpr PairPolicy kStagedBiasOnly{Presence::kNever, Presence::kAlways, false};
inline constexpr PairPolicy kAnyPairs{Presence::kMaybe, Presence::kMaybe, true};
// For kernels without shared memory to stage a bias in: they read every bias in place.
inline constexpr PairPolicy kAnyPairsUnstaged{Presence::kMaybe, Presence::kNever, true};

// Do kernels for tangents, and for dq alone, have a form without options? In float64 the general one serves
// all calls: both forms would take a sixth longer to build.
template <class Arithmetic>
inline constexpr bool kHasPlainForm = !kIs64Bit<Arithmetic>;

// Is an option present? Calls ask() only where the policy leaves that open.
template <Presence kPresence, class F>
__device__ __forceinline__ bool is_present(F ask) {
  if constexpr (kPresence == Presence::kMaybe) return ask();
  return kPresence == Presence::kAlways;
}

}  // namespace jax_flash::cuda
