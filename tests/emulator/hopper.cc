#include "hopper.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "emulator.h"

namespace emulator {
namespace {

struct Mbarrier {
  int arrivals, pending;
  int64_t bytes;
  int64_t phase;
};

struct Load {
  uint32_t barrier;
  int64_t bytes;
  std::function<void()> copy;
};

struct NamedBarrier {
  int arrived;
  int64_t phase;
};

struct Stores {
  std::vector<std::function<void()>> uncommitted;
  std::deque<std::vector<std::function<void()>>> committed;  // groups
  bool are_done = true;                                      // as far as the thread knows
};

// The products of a warpgroup. Those of a group end for all of its threads at once, when all have issued
// them.
struct Warpgroup {
  std::deque<std::array<std::vector<Product>, 128>> groups;  // that have not ended
  int64_t ended = 0;
  int64_t committed[128] = {};  // groups of each thread

  bool all_have_committed(int64_t count) const {
    return std::ranges::all_of(committed, [=](int64_t mine) { return mine >= count; });
  }
};

struct Block {
  std::map<uint32_t, Mbarrier> barriers;
  std::vector<Load> loads;
  NamedBarrier named[16];
  Stores stores[kMaxThreads];
  Warpgroup warpgroups[kMaxThreads / 128];
};
Block blocks[kMaxCluster];
uint64_t random_state = 1;

Block& this_block() { return blocks[cluster_rank()]; }
Block& other_block() { return blocks[cluster_rank() ^ 1]; }

bool coin() {
  random_state = random_state * 6364136223846793005 + 1442695040888963407;
  return random_state >> 63;
}

Mbarrier& barrier_at(uint32_t address, Block& block = this_block()) {
  at_shared_address(address, 8, static_cast<int>(&block - blocks));
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end()) fail("a barrier is used before it was initialized");
  return found->second;
}

void end_phase_if_complete(Mbarrier& barrier) {
  if (barrier.pending > 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
}

void land(const Load& load, Block& block) {
  load.copy();
  Mbarrier& barrier = barrier_at(load.barrier, block);
  barrier.bytes -= load.bytes;
  end_phase_if_complete(barrier);
  note_progress();
}

void land_loads_of(uint32_t barrier) {
  Block& block = this_block();
  for (size_t i = 0; i < block.loads.size();) {
    if (block.loads[i].barrier == barrier) {
      const Load load = std::move(block.loads[i]);
      block.loads.erase(block.loads.begin() + static_cast<int64_t>(i));
      land(load, block);
    } else {
      ++i;
    }
  }
}

// To the block that waits for it.
void begin_load(Load load, Block& block = this_block()) {
  if (coin()) {
    land(load, block);
  } else {
    block.loads.push_back(std::move(load));
  }
}

// The address of a byte in swizzled rows: of 128 bytes, bits 4 to 6 are changed by bits 7 to 9; of 64 bytes,
// bits 4 and 5 by bits 7 and 8.
uint32_t swizzle(uint32_t address, uint32_t row_bytes) {
  return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}

// f(address in shared memory, element of the tensor; null if outside) for each element of a box.
template <class F>
void for_each_in_box(uint32_t shared, const CUtensorMap& map, const Element& first, F f) {
  const uint32_t row_bytes = 2 * static_cast<uint32_t>(map.box[0]);
  // Boxes of fewer rows than the swizzle's pattern lie one behind the other in a tile.
  const bool is_small = map.box[1] * map.box[2] % 8 != 0;
  if (shared % ((is_small ? 1 : 8) * row_bytes) != 0) fail("a box in shared memory is misaligned");
  uint32_t row = 0;
  for (int i3 = 0; i3 < map.box[3]; ++i3) {
    for (int i2 = 0; i2 < map.box[2]; ++i2) {
      for (int i1 = 0; i1 < map.box[1]; ++i1, ++row) {
        const int64_t x[4] = {first[0], first[1] + i1, first[2] + i2, first[3] + i3};
        bool is_row_inside = true;
        char* from = map.tensor;
        for (int d = 1; d < 4; ++d) {
          is_row_inside &= x[d] >= 0 && x[d] < map.sizes[d];
          from += x[d] * map.strides[d];
        }
        for (int i0 = 0; i0 < map.box[0]; ++i0) {
          const bool is_inside = is_row_inside && x[0] + i0 >= 0 && x[0] + i0 < map.sizes[0];
          f(swizzle(shared + row_bytes * row + 2 * static_cast<uint32_t>(i0), row_bytes),
            is_inside ? from + 2 * (x[0] + i0) : nullptr);
        }
      }
    }
  }
}

void begin_store(std::function<void()> store) {
  if (coin()) {
    store();
    store = [] {};
  }
  this_block().stores[threadIdx.x].uncommitted.push_back(std::move(store));
  this_block().stores[threadIdx.x].are_done = false;
}

float to_float(const void* element, bool is_half) {
  uint16_t bits;
  std::memcpy(&bits, element, 2);
  return is_half ? static_cast<float>(std::bit_cast<__half>(bits))
                 : static_cast<float>(std::bit_cast<__nv_bfloat16>(bits));
}

// Element (row, depth) of a tile whose rows lie along the depth, or (column, depth) of one whose rows lie
// along the columns.
float element_of(uint64_t tile, int row, int depth, bool is_along_rows, bool is_half) {
  const uint32_t start = static_cast<uint32_t>(tile & 0x3fff) * 16;
  const uint32_t pitch = static_cast<uint32_t>(tile >> 16 & 0x3fff) * 16;
  const uint32_t eight_rows = static_cast<uint32_t>(tile >> 32 & 0x3fff) * 16;
  if (tile >> 61 == 0 && is_along_rows) {
    const uint32_t matrix = start + row / 8 * eight_rows + depth / 8 * pitch;
    const auto place = static_cast<uint32_t>(depth % 8 * 16 + row % 8 * 2);
    return to_float(at_shared_address(matrix + place, 2), is_half);
  }
  if (tile >> 61 != 2 && tile >> 61 != 4) fail("a tile of a product is not swizzled by 128 or 64 bytes");
  const int row_bytes = tile >> 62 == 1 ? 128 : 64, columns = row_bytes / 2;
  const auto address = [&](int line, int column) {
    return start + line / 8 * eight_rows + line % 8 * row_bytes + 2 * static_cast<uint32_t>(column);
  };
  const uint32_t place =
      is_along_rows ? address(depth, row % columns) + row / columns * pitch : address(row, depth);
  return to_float(at_shared_address(swizzle(place, row_bytes), 2), is_half);
}

// Product `index` of a group, which all threads of a warpgroup have issued.
void run_product(const std::array<std::vector<Product>, 128>& group, size_t index) {
  const Product& product = group[0][index];
  float a[64][16], b[256][16];
  for (int row = 0; row < 64; ++row) {
    for (int k = 0; k < 16; ++k) {
      if (product.a_registers) {
        const int lane = row % 8 * 4 + k % 8 / 2, place = row / 8 % 2 + k / 8 * 2;
        const Product& of_lane = group[static_cast<size_t>(row / 16 * 32 + lane)][index];
        const auto* two = reinterpret_cast<const uint16_t*>(of_lane.a_registers + place);
        a[row][k] = to_float(two + k % 2, product.is_half);
      } else {
        a[row][k] = element_of(product.a_tile, row, k, product.is_a_along_m, product.is_half);
      }
    }
  }
  for (int column = 0; column < product.n; ++column) {
    for (int k = 0; k < 16; ++k) {
      b[column][k] = element_of(product.b_tile, column, k, product.is_b_along_n, product.is_half);
    }
  }
  for (int thread = 0; thread < 128; ++thread) {
    const Product& mine = group[static_cast<size_t>(thread)][index];
    if (mine.b_tile != product.b_tile || mine.a_tile != product.a_tile || mine.n != product.n) {
      fail("the threads of a warpgroup issue different products");
    }
    for (int i = 0; i < product.n / 2; ++i) {
      const int row = thread / 32 * 16 + i / 2 % 2 * 8 + thread % 32 / 4;
      const int column = i / 4 * 8 + thread % 4 * 2 + i % 2;
      double terms[17] = {product.accumulate ? mine.d[i] : 0};
      for (int k = 0; k < 16; ++k) terms[1 + k] = double{a[row][k]} * b[column][k];
      mine.d[i] = sum_of_products<float>(terms);
    }
  }
}

void run_products(Warpgroup& warpgroup, int64_t count) {
  for (; warpgroup.ended < count; ++warpgroup.ended) {
    const auto group = std::move(warpgroup.groups.front());
    warpgroup.groups.pop_front();
    for (const auto& products : group) {
      if (products.size() != group[0].size()) fail("the threads of a warpgroup issue different products");
    }
    for (size_t i = 0; i < group[0].size(); ++i) run_product(group, i);
  }
}

Warpgroup& my_warpgroup() { return this_block().warpgroups[threadIdx.x / 128]; }

// This thread's products of the group that it has not committed yet.
std::vector<Product>& open_group(Warpgroup& warpgroup) {
  const int thread = threadIdx.x % 128;
  const auto group = static_cast<size_t>(warpgroup.committed[thread] - warpgroup.ended);
  if (group == warpgroup.groups.size()) warpgroup.groups.emplace_back();
  return warpgroup.groups[group][static_cast<size_t>(thread)];
}

}  // namespace

void begin_hopper_block(int rank) { blocks[rank] = {}; }

void end_hopper_block(int rank) {
  const Block& block = blocks[rank];
  if (!block.loads.empty()) fail("a load has not been waited for");
  for (int i = 0; i < kMaxThreads; ++i) {
    threadIdx.x = static_cast<unsigned>(i);
    if (!block.stores[i].uncommitted.empty()) fail("a store has not been committed");
    if (!block.stores[i].committed.empty()) fail("a store may read shared memory after the block's end");
  }
  for (const Warpgroup& warpgroup : block.warpgroups) {
    if (!warpgroup.groups.empty()) fail("a product has not been waited for");
  }
}

void init_barrier(uint32_t barrier, int arrivals) {
  at_shared_address(barrier, 8);
  this_block().barriers[barrier] = {arrivals, arrivals, 0, 0};
}

void arrive(uint32_t address, uint32_t expected_bytes, bool at_peer) {
  Mbarrier& barrier = barrier_at(address, at_peer ? other_block() : this_block());
  if (barrier.pending == 0) fail("more threads have arrived at a barrier than it counts");
  --barrier.pending;
  barrier.bytes += expected_bytes;
  end_phase_if_complete(barrier);
  note_progress();
  if (coin()) let_others_run();  // who has arrived too early is overtaken
}

void wait_for_phase(uint32_t address, uint32_t parity) {
  const Mbarrier& barrier = barrier_at(address);
  wait_until(
      [&] {
        if (barrier.phase % 2 == parity) land_loads_of(address);
        return barrier.phase % 2 != parity;
      },
      "barrier", address);
}

void arrive_at_named(int id, int threads, bool waits) {
  NamedBarrier& barrier = this_block().named[id];
  const int64_t phase = barrier.phase;
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
  note_progress();
  if (waits) wait_until([&] { return barrier.phase != phase; }, "hardware barrier", id);
}

void load_box(uint32_t shared, const CUtensorMap& map, uint32_t barrier, Element first) {
  const int64_t elements = int64_t{map.box[0]} * map.box[1] * map.box[2] * map.box[3];
  begin_load({barrier, 2 * elements, [=] {
                for_each_in_box(shared, map, first, [](uint32_t to, const char* from) {
                  if (from) {
                    std::memcpy(at_shared_address(to, 2), from, 2);
                  } else {
                    std::memset(at_shared_address(to, 2), 0, 2);
                  }
                });
              }});
}

void load_bytes(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) fail("a load is misaligned");
  begin_load({barrier, bytes, [=] {
                for (uint32_t i = 0; i < bytes; i += 16) {
                  std::memcpy(at_shared_address(shared + i, 16), static_cast<const char*>(global) + i, 16);
                }
              }});
}

void store_to_peer(uint32_t address, std::array<uint32_t, 4> values, uint32_t barrier) {
  void* const to = at_shared_address(address, sizeof(values), cluster_rank() ^ 1);
  begin_load({barrier, sizeof(values), [=] { std::memcpy(to, values.data(), sizeof(values)); }},
             other_block());
}

void store_box(const CUtensorMap& map, uint32_t shared, Element first) {
  begin_store([=] {
    for_each_in_box(shared, map, first, [](uint32_t from, char* to) {
      if (to) std::memcpy(to, at_shared_address(from, 2), 2);
    });
  });
}

// f(to, from) for each float.
template <class F>
void begin_store_of_floats(float* global, uint32_t shared, uint32_t bytes, F f) {
  if (bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) fail("a bulk copy is misaligned");
  begin_store([=] {
    for (uint32_t i = 0; i < bytes; i += 4) {
      float value;
      std::memcpy(&value, at_shared_address(shared + i, 4), 4);
      f(global[i / 4], value);
    }
  });
}

void store_floats(float* global, uint32_t shared, uint32_t bytes) {
  begin_store_of_floats(global, shared, bytes, [](float& to, float from) { to = from; });
}

void add_floats(float* global, uint32_t shared, uint32_t bytes) {
  begin_store_of_floats(global, shared, bytes, [](float& to, float from) { to += from; });
}

void commit_stores() {
  Stores& stores = this_block().stores[threadIdx.x];
  stores.committed.push_back(std::move(stores.uncommitted));
  stores.uncommitted.clear();
}

void wait_for_stores(int pending_groups) {
  auto& groups = this_block().stores[threadIdx.x].committed;
  while (static_cast<int>(groups.size()) > pending_groups) {
    for (const auto& store : groups.front()) store();
    groups.pop_front();
  }
}

void note_stores_are_done() { this_block().stores[threadIdx.x].are_done = true; }

int64_t arrivals = 0;
void note_arrival() {
  if (!this_block().stores[threadIdx.x].are_done) fail("a block goes on while its stores may be underway");
  ++arrivals;
}

void multiply(const Product& product) { open_group(my_warpgroup()).push_back(product); }

void commit_products() {
  Warpgroup& warpgroup = my_warpgroup();
  open_group(warpgroup);  // it may be empty
  const int64_t count = ++warpgroup.committed[threadIdx.x % 128];
  note_progress();
  if (warpgroup.all_have_committed(count) && coin()) run_products(warpgroup, count);
}

void wait_for_products(int pending_groups) {
  Warpgroup& warpgroup = my_warpgroup();
  const int64_t count = warpgroup.committed[threadIdx.x % 128] - pending_groups;
  wait_until([&] { return warpgroup.all_have_committed(count); }, "products of its warpgroup", count);
  run_products(warpgroup, count);
}

}  // namespace emulator

// How often threads have told other blocks that they have come so far, in all calls.
extern "C" int64_t num_arrivals() { return emulator::arrivals; }
