// Loops over independent work items on a thread pool, and scratch memory for the workers.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>

namespace jax_flash::cpu {

class ThreadPool {
 public:
  virtual ~ThreadPool() = default;
  virtual int64_t NumThreads() = 0;
  virtual void Schedule(std::function<void()> task) = 0;
};

inline int64_t NumWorkers(ThreadPool& pool, int64_t items) {
  return std::clamp<int64_t>(pool.NumThreads(), 1, std::max<int64_t>(items, 1));
}

// Calls body(worker, item) once for each item in [0, items), with worker in [0, workers). Items start in
// ascending order, so an item may wait for a smaller one. The caller is a worker, too, and waits only for
// items that another worker has started, so the loop ends even if the pool never runs a task.
template <typename Body>
void ParallelFor(ThreadPool& pool, int64_t workers, int64_t items, const Body& body) {
  // Shared, because a task may start after the loop has ended; it then finds no item left and does not touch
  // the body.
  struct State {
    std::atomic<int64_t> next_item{0}, next_worker{0}, items_left;
    std::mutex mutex;
    std::condition_variable done;
  };
  const auto state = std::make_shared<State>();
  state->items_left = items;
  auto work = [state, items, &body] {
    int64_t item = state->next_item++;
    if (item >= items) return;
    const int64_t worker = state->next_worker++;
    for (; item < items; item = state->next_item++) {
      body(worker, item);
      if (--state->items_left == 0) {
        std::lock_guard lock(state->mutex);
        state->done.notify_one();
      }
    }
  };
  try {
    for (int64_t i = 1; i < workers; ++i) pool.Schedule(work);
  } catch (...) {
    // Continue with the workers scheduled so far. They use `body`, so this call must not end before they do.
  }
  work();
  std::unique_lock lock(state->mutex);
  state->done.wait(lock, [&] { return state->items_left == 0; });
}

// One aligned block of uninitialized memory. data() is null if the allocation failed.
class Scratch {
 public:
  static constexpr size_t kAlignment = 64;  // a cache line and the widest vector

  explicit Scratch(size_t bytes)
      : data_(std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment)) {}
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_;
};

// Hands out aligned arrays from a block. With a null block it only measures the size.
class Arena {
 public:
  explicit Arena(std::byte* data) : data_(data) {}
  template <typename T>
  T* Take(int64_t count) {
    T* taken = reinterpret_cast<T*>(data_ ? data_ + used_ : nullptr);
    used_ += (count * sizeof(T) + Scratch::kAlignment - 1) / Scratch::kAlignment * Scratch::kAlignment;
    return taken;
  }
  size_t used() const { return used_; }

 private:
  std::byte* data_;
  size_t used_ = 0;
};

}  // namespace jax_flash::cpu
