#include "emulator.h"

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <random>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {
namespace {

constexpr int kWarp = 32, kStackBytes = 1 << 18, kMaxShared = 227 * 1024;
constexpr uint32_t kFirstAddress = 1024;  // so that address 0 is an error
constexpr int kRankShift = 24;

struct Copy {
  uint32_t to;
  const void* from;
  int bytes;
  bool valid;
};

// Threads that wait for each other: a block or a warp.
struct Barrier {
  int members = 0, arrived = 0;
  int64_t phase = 0;
};

struct Warp {
  Barrier barrier;
  // A lane is at most one exchange ahead of another, so two buffers suffice.
  alignas(64) std::byte values[2][kWarp][kExchangeStride];
};

struct Thread {
  ucontext_t start;  // on a stack of its own
  jmp_buf place;     // where it waits: swapcontext would make a system call
  bool has_started, is_done;
  const char* what;  // it waits for
  int64_t which;
  std::vector<Copy> copies;              // not yet committed
  std::deque<std::vector<Copy>> groups;  // committed
};

struct Machine {
  std::mutex mutex;  // one grid at a time
  // Of all blocks of a cluster, one block after the other.
  Thread threads[kMaxCluster * kMaxThreads];
  Warp warps[kMaxCluster * kMaxThreads / kWarp];
  Barrier blocks[kMaxCluster], cluster;
  std::byte* stacks = nullptr;
  alignas(1024) uint8_t shared[kMaxCluster][kMaxShared];
  int shared_bytes, block_threads, num_threads, current;
  unsigned first_block;   // of the cluster
  int step = 1;           // from a thread to the next one that runs
  int late_warp;          // which runs when no other thread gets on; some blocks have none
  int64_t idle_switches;  // since a thread last got on
  std::minstd_rand random;
  const std::function<void()>* kernel;
  ucontext_t caller;
};
Machine machine;

// `before`: the thread that will come back here; -1 if it has ended.
void switch_to(int next, int before) {
  machine.current = next;
  threadIdx.x = static_cast<unsigned>(next % machine.block_threads);
  blockIdx.x = machine.first_block + static_cast<unsigned>(cluster_rank());
  if (before >= 0 && _setjmp(machine.threads[before].place) != 0) return;
  Thread& thread = machine.threads[next];
  if (thread.has_started) _longjmp(thread.place, 1);
  thread.has_started = true;
  setcontext(&thread.start);
}

[[noreturn]] void report_deadlock() {
  for (int i = 0; i < machine.num_threads; ++i) {
    const Thread& thread = machine.threads[i];
    if (thread.is_done) continue;
    std::fprintf(stderr, "thread %d waits for %s %lld\n", i, thread.what,
                 static_cast<long long>(thread.which));
  }
  fail("all threads wait for one another");
}

// Lets the other threads of the block get on.
void yield() {
  if (++machine.idle_switches > int64_t{4} * kMaxCluster * kMaxThreads) report_deadlock();
  int next = machine.current;
  const bool waits_for_late =
      machine.current / kWarp == machine.late_warp || machine.idle_switches > machine.num_threads;
  do {
    next = (next + machine.step + machine.num_threads) % machine.num_threads;
  } while (next != machine.current &&
           (machine.threads[next].is_done || (next / kWarp == machine.late_warp && !waits_for_late)));
  if (next != machine.current) switch_to(next, machine.current);
}

void wait(Barrier& barrier) {
  const int64_t phase = barrier.phase;
  if (++barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.phase;
    note_progress();
  }
  while (barrier.phase == phase) yield();
}

// A thread that has ended is waited for no more.
void leave(Barrier& barrier) {
  if (--barrier.members > 0 && barrier.arrived == barrier.members) {
    barrier.arrived = 0;
    ++barrier.phase;
  }
}

void run_thread() {
  (*machine.kernel)();
  Thread& thread = machine.threads[machine.current];
  thread.is_done = true;
  leave(machine.blocks[cluster_rank()]);
  leave(machine.cluster);
  leave(machine.warps[machine.current / kWarp].barrier);
  note_progress();
  int next = machine.current;
  for (int i = 0; i < machine.num_threads; ++i) {
    next = (next + 1) % machine.num_threads;
    if (!machine.threads[next].is_done) switch_to(next, -1);
  }
  setcontext(&machine.caller);
}

void run_cluster() {
  machine.cluster = {.members = machine.num_threads};
  for (Barrier& block : machine.blocks) block = {.members = machine.block_threads};
  // Shared memory holds anything: here NaN in every type.
  std::memset(machine.shared, 0xff, sizeof(machine.shared));
  for (int i = 0; i < machine.num_threads; ++i) {
    Thread& thread = machine.threads[i];
    thread.has_started = thread.is_done = false;
    thread.what = "the block or the warp";
    thread.copies.clear();
    thread.groups.clear();
    if (i % kWarp == 0) machine.warps[i / kWarp].barrier = {.members = kWarp};
    getcontext(&thread.start);
    thread.start.uc_stack.ss_sp = machine.stacks + int64_t{i} * kStackBytes;
    thread.start.uc_stack.ss_size = kStackBytes;
    makecontext(&thread.start, run_thread, 0);
  }
  const int blocks = machine.num_threads / machine.block_threads;
  for (int rank = 0; rank < blocks; ++rank) begin_hopper_block(rank);
  machine.late_warp = static_cast<int>(machine.random() % (2 * machine.num_threads / kWarp));
  machine.current = 0;
  note_progress();
  threadIdx.x = 0;
  blockIdx.x = machine.first_block;
  machine.threads[0].has_started = true;
  swapcontext(&machine.caller, &machine.threads[0].start);
  for (int rank = 0; rank < blocks; ++rank) end_hopper_block(rank);
}

}  // namespace

void launch(int64_t blocks, int threads, int shared_bytes, const std::function<void()>& kernel, int cluster) {
  const std::lock_guard lock(machine.mutex);
  if (threads > kMaxThreads || threads % kWarp != 0 || shared_bytes > kMaxShared) fail("launch is too large");
  if (blocks % cluster != 0) fail("a grid is not of whole clusters");
  if (!machine.stacks) {
    void* memory = mmap(nullptr, int64_t{kMaxCluster} * kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for stacks");
    machine.stacks = static_cast<std::byte*>(memory);
  }
  machine.kernel = &kernel;
  machine.shared_bytes = shared_bytes;
  machine.block_threads = threads;
  machine.num_threads = cluster * threads;
  gridDim.x = static_cast<unsigned>(blocks);
  blockDim.x = static_cast<unsigned>(threads);
  for (int64_t block = 0; block < blocks; block += cluster) {
    machine.first_block = static_cast<unsigned>(block);
    run_cluster();
  }
}

[[noreturn]] void fail(const char* message) {
  std::fprintf(stderr, "emulator: %s (block %u, thread %u)\n", message, blockIdx.x, threadIdx.x);
  std::abort();
}

void note_progress() { machine.idle_switches = 0; }

void let_others_run() {
  machine.step = -machine.step;
  yield();
}

void wait_until(const std::function<bool()>& condition, const char* what, int64_t which) {
  Thread& thread = machine.threads[machine.current];
  thread.what = what;
  thread.which = which;
  while (!condition()) yield();
  thread.what = "the block or the warp";
}

int cluster_rank() { return machine.current / machine.block_threads; }

uint8_t* dynamic_shared() { return machine.shared[cluster_rank()]; }

uint32_t shared_address(const void* pointer) {
  const auto offset = static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - dynamic_shared());
  return shared_address_of(cluster_rank(), kFirstAddress + offset);
}

uint32_t shared_address_of(int rank, uint32_t address) {
  return (address & ((1u << kRankShift) - 1)) | static_cast<uint32_t>(rank) << kRankShift;
}

void* at_shared_address(uint32_t address, int bytes, int rank) {
  if (rank * machine.block_threads >= machine.num_threads) fail("a block alone has no peer");
  const auto of = static_cast<int>(address >> kRankShift);
  if (of != 0 && of != rank) fail("an address is of the other block");
  const int64_t offset = int64_t{shared_address_of(0, address)} - kFirstAddress;
  if (offset < 0 || offset + bytes > machine.shared_bytes) fail("shared memory is accessed beyond its end");
  if (address % bytes != 0) fail("an address in shared memory is misaligned");
  return machine.shared[rank] + offset;
}

void wait_for_block() { wait(machine.blocks[cluster_rank()]); }
void wait_for_cluster() { wait(machine.cluster); }

const std::byte* exchange(const void* mine, int bytes) {
  Warp& warp = machine.warps[machine.current / kWarp];
  auto& values = warp.values[warp.barrier.phase % 2];
  std::memcpy(values[machine.current % kWarp], mine, bytes);
  wait(warp.barrier);
  return values[0];
}

void copy_later(uint32_t to, const void* from, int bytes, bool valid) {
  if (valid && reinterpret_cast<uintptr_t>(from) % bytes != 0)
    fail("an address in global memory is misaligned");
  machine.threads[machine.current].copies.push_back({to, from, bytes, valid});
}

void commit_copies() {
  Thread& thread = machine.threads[machine.current];
  thread.groups.push_back(std::move(thread.copies));
  thread.copies.clear();
}

void wait_for_copies(int pending) {
  auto& groups = machine.threads[machine.current].groups;
  for (; static_cast<int>(groups.size()) > pending; groups.pop_front()) {
    for (const Copy& copy : groups.front()) {
      void* to = at_shared_address(copy.to, copy.bytes);
      if (copy.valid) {
        std::memcpy(to, copy.from, copy.bytes);
      } else {
        std::memset(to, 0, copy.bytes);
      }
    }
  }
}

}  // namespace emulator
