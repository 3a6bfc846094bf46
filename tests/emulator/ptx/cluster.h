// cuda/ptx/cluster.h for the host.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "hopper.h"

namespace jax_flash::cuda::ptx {

inline int cluster_rank() { return emulator::cluster_rank(); }
inline void cluster_wait() { emulator::wait_for_cluster(); }
inline uint32_t peer_address(uint32_t shared) {
  return emulator::shared_address_of(emulator::cluster_rank() ^ 1, shared);
}
inline void store_to_peer(uint32_t address, const uint32_t (&r)[4], uint32_t barrier) {
  emulator::store_to_peer(address, std::to_array(r), barrier);
}
inline void store_to_peer(uint32_t address, const float (&r)[4], uint32_t barrier) {
  emulator::store_to_peer(address, std::bit_cast<std::array<uint32_t, 4>>(r), barrier);
}
inline void arrive_at_peer(uint32_t barrier) { emulator::arrive(barrier, 0, /*at_peer=*/true); }

}  // namespace jax_flash::cuda::ptx
