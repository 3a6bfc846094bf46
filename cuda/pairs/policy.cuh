// Which pair options a kernel's main loop handles, known at compile time.
//
// An option that may be present costs a test in every block, and tests and addresses take as long as the
// softmax. So the most common options have loops of their own. A kernel's Config carries the policy of all
// that the kernel handles; a kernel with several loops gives each a narrower one. Whether a loop suffices for
// a call is decided at run time, by PairOptions and is_general (options.cuh).
#pragma once

namespace jax_flash::cuda {

// Do calls have an option? Where only some do, the loop asks.
enum class Presence { kNever, kMaybe, kAlways };

struct PairPolicy {
  Presence mask;         // mask or segments: blocks come from lists (visibility.cuh), pairs from bits
  Presence staged_bias;  // a 16-bit bias that comes through shared memory
  bool others;           // any other bias, ALiBi, an array of scales, soft cap, dropout

  __host__ __device__ constexpr bool may_have_mask() const { return mask != Presence::kNever; }
  __host__ __device__ constexpr bool may_stage_bias() const { return staged_bias != Presence::kNever; }

  // Is this the general form, with anything but a positive scale between scores and probabilities?
  __host__ __device__ constexpr bool is_general() const {
    return may_have_mask() || may_stage_bias() || others;
  }
};

inline constexpr PairPolicy kNoPairs{Presence::kNever, Presence::kNever, false};
inline constexpr PairPolicy kMaskOnly{Presence::kAlways, Presence::kNever, false};
inline constexpr PairPolicy kStagedBiasOnly{Presence::kNever, Presence::kAlways, false};
inline constexpr PairPolicy kAnyPairs{Presence::kMaybe, Presence::kMaybe, true};
// In kernels without shared memory to stage a bias in, which read every bias in place.
inline constexpr PairPolicy kAnyPairsUnstaged{Presence::kMaybe, Presence::kNever, true};

// Is an option present? Asks only where that is open at compile time.
template <Presence kPresence, class F>
__device__ __forceinline__ bool is_present(F ask) {
  if constexpr (kPresence == Presence::kMaybe) return ask();
  return kPresence == Presence::kAlways;
}

}  // namespace jax_flash::cuda
