// cuda/ptx/cluster.h for the host. An address in the other block is the same number here: the functions know.
#pragma once

#include "hopper.h"

namespace jax_flash::cuda::ptx {

inline int cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_wait() { emulator::wait_for_cluster(); }
inline uint32_t peer_address(uint32_t shared) { return shared; }
inline void store_to_peer(uint32_t address, const float (&r)[4], uint32_t barrier) {
  emulator::store_to_peer(address, {r[0], r[1], r[2], r[3]}, barrier);
}
inline void arrive_at_peer(uint32_t barrier) { emulator::arrive(barrier, 0, /*at_peer=*/true); }
inline void barrier_wait_for_peer(uint32_t barrier, uint32_t parity) {
  emulator::wait_for_phase(barrier, parity);
}

}  // namespace jax_flash::cuda::ptx
