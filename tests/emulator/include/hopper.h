// Hopper's asynchronous hardware: barriers in shared memory, TMA, products of a warpgroup. What
// is asynchronous happens at once or as late as it may, at random: a kernel that depends on either fails.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

namespace emulator {

// An mbarrier. A phase ends after its arrivals, when all expected bytes have come.
void init_barrier(uint32_t barrier, int arrivals);
void arrive(uint32_t barrier, uint32_t expected_bytes, bool at_peer = false);
void wait_for_phase(uint32_t barrier, uint32_t parity);

// The hardware's barriers 1 to 15.
void arrive_at_named(int id, int threads, bool waits);

// Copies of the box that begins at an element, to or from swizzled rows.
using Element = std::array<int, 4>;
void load_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, Element first);
void store_box(const CUtensorMap& map, uint32_t shared, Element first);
void load_bytes(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier);
// To the other block of a cluster, whose addresses these are.
void store_to_peer(uint32_t address, std::array<uint32_t, 4> values, uint32_t barrier);
void store_floats(float* global, uint32_t shared, uint32_t bytes);
void add_floats(float* global, uint32_t shared, uint32_t bytes);
void commit_stores();
void wait_for_stores(int pending_groups);  // until all but the last groups have read shared memory
void note_stores_are_done();               // the thread has waited for all of them to end, too

// d [64, n] = or += a [64, 16] b [16, n], as a lane sees it: d is [n / 8, 4].
struct Product {
  float* d;
  int n;
  bool accumulate;
  const uint32_t* a_registers;  // [4]; null: a_tile describes a
  uint64_t a_tile, b_tile;
  bool is_a_along_m, is_b_along_n;
  bool is_half;
};
void multiply(const Product& product);
void commit_products();
void wait_for_products(int pending_groups);

}  // namespace emulator
