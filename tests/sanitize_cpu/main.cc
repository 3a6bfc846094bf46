// Random calls of the CPU kernels, which need no XLA, for the sanitizers. Every buffer is a heap block of
// exactly its size. Workers yield at random where one waits for another, and several workers must give the
// same bits as one. See `run` in this folder.
//
//   sanitize_cpu [calls] [first seed]
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu_attention.h"
#include "cpu_types.h"
#include "dropout.h"
#include "hand_over.h"

namespace sanitize_cpu {

using jax_flash::AttentionParams;
using jax_flash::BackwardParams;
using jax_flash::BackwardTangentParams;
using jax_flash::Directions;
using jax_flash::DType;
using jax_flash::ForwardParams;
using jax_flash::kSeedWords;
using jax_flash::PairArray;
using jax_flash::TangentParams;
using jax_flash::cpu::InstructionSet;

using Random = std::mt19937_64;

void MaybeYield() {
  thread_local Random random(std::hash<std::thread::id>()(std::this_thread::get_id()));
  const uint64_t choice = random() % 16;
  if (choice < 6) std::this_thread::yield();
  if (choice == 6) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
}

// Runs each task in a thread of its own.
class Threads : public jax_flash::cpu::ThreadPool {
 public:
  explicit Threads(int64_t count) : count_(count) {}
  ~Threads() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t NumThreads() override { return count_; }
  void Schedule(std::function<void()> task) override {
    threads_.emplace_back([task = std::move(task)] {
      MaybeYield();
      task();
    });
  }

 private:
  int64_t count_;
  std::vector<std::thread> threads_;
};

int64_t SizeOf(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return 1;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

// A heap block of exactly `bytes`.
struct Buffer {
  explicit Buffer(int64_t bytes, int fill = 0) : bytes(bytes), data(new std::byte[bytes]) {
    std::memset(data.get(), fill, bytes);
  }
  int64_t bytes;
  std::unique_ptr<std::byte[]> data;
};

// Makes and owns the arrays of a call.
class Arrays {
 public:
  explicit Arrays(Random& random) : random_(random) {}

  const void* Normal(DType dtype, int64_t count) {
    std::normal_distribution<double> normal;
    Buffer& buffer = buffers_.emplace_back(count * SizeOf(dtype));
    for (int64_t i = 0; i < count; ++i) {
      std::byte* to = buffer.data.get() + i * SizeOf(dtype);
      const double x = normal(random_);
      if (dtype == DType::kFloat64) Write(to, x);
      if (dtype == DType::kFloat32) Write(to, static_cast<float>(x));
      if (dtype == DType::kFloat16) Write(to, jax_flash::cpu::FromCompute<jax_flash::cpu::Half>(x));
      if (dtype == DType::kBFloat16) Write(to, jax_flash::cpu::FromCompute<jax_flash::cpu::BFloat16>(x));
    }
    return buffer.data.get();
  }

  template <typename T>
  const T* Integers(int64_t count, const std::function<int64_t(int64_t)>& element) {
    Buffer& buffer = buffers_.emplace_back(count * sizeof(T));
    for (int64_t i = 0; i < count; ++i) Write(buffer.data.get() + i * sizeof(T), static_cast<T>(element(i)));
    return reinterpret_cast<const T*>(buffer.data.get());
  }

  // An array [B, N, T, S] in which some dimensions are broadcast.
  PairArray Pairs(const AttentionParams& params, DType dtype,
                  const std::function<int64_t(int64_t)>& element) {
    int64_t sizes[] = {params.batch, params.num_heads, params.seqlen_q, params.seqlen_kv}, strides[4];
    int64_t count = 1;
    for (int axis = 3; axis >= 0; --axis) {
      if (random_() % 4 == 0) sizes[axis] = 1;
      strides[axis] = sizes[axis] == 1 ? 0 : count;
      count *= sizes[axis];
    }
    last_sizes_.assign(sizes, sizes + 4);
    const void* data = dtype == DType::kBool ? Integers<bool>(count, element) : Normal(dtype, count);
    return {data, dtype, strides[0], strides[1], strides[2], strides[3]};
  }
  const std::vector<int64_t>& last_sizes() const { return last_sizes_; }

 private:
  template <typename T>
  static void Write(std::byte* to, T x) {
    std::memcpy(to, &x, sizeof(x));
  }

  Random& random_;
  std::vector<Buffer> buffers_;
  std::vector<int64_t> last_sizes_;
};

struct Results {
  std::vector<Buffer> buffers;
  void* Add(int64_t bytes, int fill) { return buffers.emplace_back(bytes, fill).data.get(); }
  bool operator==(const Results& other) const {
    return std::equal(buffers.begin(), buffers.end(), other.buffers.begin(), other.buffers.end(),
                      [](const Buffer& a, const Buffer& b) {
                        return a.bytes == b.bytes && !std::memcmp(a.data.get(), b.data.get(), a.bytes);
                      });
  }
};

// One random call: draws its parameters and runs the kernels.
class Call {
 public:
  explicit Call(uint64_t seed) : random_(seed), arrays_(random_) {
    constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
    AttentionParams& p = params_;
    p = {};
    p.dtype = kDTypes[random_() % 4];
    p.batch = 1 + random_() % 2;
    p.num_kv_heads = 1 + random_() % 2;
    p.num_heads = p.num_kv_heads * (1 + random_() % 3);
    p.seqlen_q = 1 + random_() % 150;
    p.seqlen_kv = 1 + random_() % 1500;  // several tiles of 192 keys
    p.head_dim = 1 + random_() % 40;
    p.head_dim_v = 1 + random_() % 40;
    p.options = {.scale = 0.3,
                 .is_causal = Chance(3),
                 .window_left = Chance(4) ? Below(p.seqlen_kv) : -1,
                 .window_right = Chance(4) ? Below(p.seqlen_kv) : -1,
                 .logits_soft_cap = Chance(4) ? 2.0 : 0.0,
                 .dropout_rate = Chance(4) ? 0.25 : 0.0,
                 .precision = 0,
                 .deterministic = true};
    const int64_t b = p.batch, n = p.num_heads, t = p.seqlen_q, s = p.seqlen_kv, k = p.num_kv_heads;
    p.q = arrays_.Normal(p.dtype, b * t * n * p.head_dim);
    p.k = arrays_.Normal(p.dtype, b * s * k * p.head_dim);
    p.v = arrays_.Normal(p.dtype, b * s * k * p.head_dim_v);
    // Some lengths are negative or exceed the arrays'; the kernels must clamp them.
    if (Chance(3))
      p.query_seq_lengths = arrays_.Integers<int32_t>(b, [&](int64_t) { return Below(t + 20) - 5; });
    if (Chance(3))
      p.key_value_seq_lengths = arrays_.Integers<int32_t>(b, [&](int64_t) { return Below(s + 20) - 5; });
    if (Chance(2)) p.query_offset = arrays_.Integers<int32_t>(b, [&](int64_t) { return Below(s); });
    if (Chance(4)) p.scale_factor = arrays_.Normal(stats_dtype(), b);
    if (Chance(4)) p.sinks = arrays_.Normal(stats_dtype(), b * n);
    const int64_t run = 1 + Below(400);  // keys with one id, or hidden together; may span whole tiles
    if (Chance(2)) {
      const auto id = [run](int64_t i) { return i / run % 3; };
      p.query_segment_ids = arrays_.Integers<int32_t>(b * t, id);
      p.key_value_segment_ids = arrays_.Integers<int32_t>(b * s, id);
    }
    if (Chance(2)) {
      p.mask =
          arrays_.Pairs(p, DType::kBool, [&](int64_t i) { return i / run % 2 == 0 || random_() % 50 == 0; });
    }
    const uint64_t bias = random_() % 4;
    if (bias == 0) {
      p.bias = arrays_.Pairs(p, kDTypes[random_() % (p.dtype == DType::kFloat64 ? 4 : 3)], nullptr);
      bias_sizes_ = arrays_.last_sizes();
    }
    if (bias == 1) p.alibi_slopes = arrays_.Normal(stats_dtype(), b * n);
    if (p.options.dropout_rate > 0) {
      const auto seed = [](int64_t i) { return i % kSeedWords < 3 ? i : 16 * (i % 7); };
      p.dropout_seeds = arrays_.Integers<uint32_t>(b * n * kSeedWords, seed);
    }
    dout_ = arrays_.Normal(p.dtype, b * t * n * p.head_dim_v);
    dlse_ = Chance(2) ? arrays_.Normal(stats_dtype(), b * t * n) : nullptr;

    // A work item of the tangent has up to eight. Most calls have few: what many take is most of the time.
    const int64_t d = directions_.num_directions = 1 + random_() % (Chance(4) ? 10 : 2);
    if (Chance(2)) tdout_ = arrays_.Normal(p.dtype, d * b * t * n * p.head_dim_v);
    if (Chance(2)) tdlse_ = arrays_.Normal(stats_dtype(), d * b * t * n);
    if (Chance(2)) directions_.tq = arrays_.Normal(p.dtype, d * b * t * n * p.head_dim);
    if (Chance(2)) directions_.tk = arrays_.Normal(p.dtype, d * b * s * k * p.head_dim);
    if (Chance(2)) directions_.tv = arrays_.Normal(p.dtype, d * b * s * k * p.head_dim_v);
    if (p.scale_factor) directions_.tscale_factor = arrays_.Normal(stats_dtype(), d * b);
    if (p.alibi_slopes) directions_.talibi_slopes = arrays_.Normal(stats_dtype(), d * b * n);
    if (p.bias) {
      int64_t elements = 1;
      for (int64_t size : bias_sizes_) elements *= size;
      directions_.tbias = {p.bias, elements * SizeOf(p.bias.dtype)};
      directions_.tbias.first.data = arrays_.Normal(p.bias.dtype, d * elements);
    }
  }

  // Returns all results of the kernels; `fill` is their content before they are written.
  Results Run(int64_t threads, InstructionSet set, int fill) const {
    const AttentionParams& p = params_;
    const int64_t rows = p.batch * p.seqlen_q * p.num_heads, keys = p.batch * p.seqlen_kv * p.num_kv_heads;
    const int64_t size = SizeOf(p.dtype), stats_size = SizeOf(stats_dtype());
    Results results;
    results.buffers.reserve(11);
    ForwardParams forward = {};
    static_cast<AttentionParams&>(forward) = p;
    forward.out = results.Add(rows * p.head_dim_v * size, fill);
    forward.lse = results.Add(rows * stats_size, fill);
    Threads pool(threads);
    Check(jax_flash::cpu::Forward(forward, pool, set));

    TangentParams tangent = {};
    static_cast<AttentionParams&>(tangent) = p;
    static_cast<Directions&>(tangent) = directions_;
    tangent.out = forward.out;
    tangent.lse = forward.lse;
    tangent.tout = results.Add(tangent.num_directions * rows * p.head_dim_v * size, fill);
    tangent.tlse = results.Add(tangent.num_directions * rows * stats_size, fill);
    Check(jax_flash::cpu::Tangent(tangent, pool, set));

    BackwardParams backward = {};
    static_cast<AttentionParams&>(backward) = p;
    backward.out = forward.out;
    backward.lse = forward.lse;
    backward.dout = dout_;
    backward.dlse = dlse_;
    backward.dq = results.Add(rows * p.head_dim * size, fill);
    backward.dk = results.Add(keys * p.head_dim * size, fill);
    backward.dv = results.Add(keys * p.head_dim_v * size, fill);
    Check(jax_flash::cpu::Backward(backward, pool, set));

    BackwardTangentParams backward_tangent = {};
    static_cast<AttentionParams&>(backward_tangent) = p;
    static_cast<Directions&>(backward_tangent) = directions_;
    const int64_t directions = directions_.num_directions;
    backward_tangent.out = forward.out;
    backward_tangent.lse = forward.lse;
    backward_tangent.dout = dout_;
    backward_tangent.dlse = dlse_;
    backward_tangent.tout = tangent.tout;
    backward_tangent.tlse = tangent.tlse;
    backward_tangent.tdout = tdout_;
    backward_tangent.tdlse = tdlse_;
    backward_tangent.tdq = results.Add(directions * rows * p.head_dim * size, fill);
    backward_tangent.tdk = results.Add(directions * keys * p.head_dim * size, fill);
    backward_tangent.tdv = results.Add(directions * keys * p.head_dim_v * size, fill);
    Check(jax_flash::cpu::BackwardTangent(backward_tangent, pool, set));

    if (!p.bias && !p.alibi_slopes) return results;
    const bool has_pairs = p.bias && bias_sizes_[2] == p.seqlen_q && bias_sizes_[3] == p.seqlen_kv;
    constexpr int64_t kBlock = jax_flash::kVisibilityBlock;
    backward.dbias_dtype = has_pairs && p.bias.dtype == p.dtype ? p.dtype : stats_dtype();
    backward.dbias_batch = has_pairs ? bias_sizes_[0] : p.batch;
    backward.dbias_num_heads = has_pairs ? bias_sizes_[1] : p.num_heads;
    backward.dbias_rows = has_pairs || (p.bias && bias_sizes_[2] == p.seqlen_q) ? 1 : kBlock;
    backward.dbias_keys = has_pairs || (p.bias && bias_sizes_[3] == p.seqlen_kv) ? 1 : kBlock;
    const auto sums = [](int64_t length, int64_t block) { return (length + block - 1) / block; };
    backward.dbias =
        results.Add(backward.dbias_batch * backward.dbias_num_heads * sums(p.seqlen_q, backward.dbias_rows) *
                        sums(p.seqlen_kv, backward.dbias_keys) * SizeOf(backward.dbias_dtype),
                    fill);
    Check(jax_flash::cpu::BackwardBias(backward, pool, set));
    return results;
  }

 private:
  bool Chance(uint64_t one_in) { return random_() % one_in == 0; }
  int64_t Below(int64_t limit) { return static_cast<int64_t>(random_() % limit); }
  DType stats_dtype() const { return params_.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32; }
  static void Check(bool has_memory) {
    if (!has_memory) std::abort();
  }

  Random random_;
  Arrays arrays_;
  AttentionParams params_;
  Directions directions_ = {};
  std::vector<int64_t> bias_sizes_;
  const void* dout_;
  const void* dlse_;
  const void* tdout_ = nullptr;
  const void* tdlse_ = nullptr;
};

}  // namespace sanitize_cpu

int main(int argc, char** argv) {
  using sanitize_cpu::Call, sanitize_cpu::InstructionSet, sanitize_cpu::Results;
  const int64_t calls = argc > 1 ? std::atoll(argv[1]) : 100;
  const int64_t first_seed = argc > 2 ? std::atoll(argv[2]) : 0;
  int failures = 0;
  for (int64_t seed = first_seed; seed < first_seed + calls; ++seed) {
    const Call call(seed);
    const auto set =
        static_cast<InstructionSet>(seed % (static_cast<int>(jax_flash::cpu::BestInstructionSet()) + 1));
    const Results want = call.Run(/*threads=*/1, set, /*fill=*/0);
    for (int64_t threads : {2, 4}) {
      if (call.Run(threads, set, /*fill=*/0xff) == want) continue;
      std::printf("FAILED: %lld threads differ from one: sanitize_cpu 1 %lld\n",
                  static_cast<long long>(threads), static_cast<long long>(seed));
      ++failures;
    }
  }
  std::printf("%lld calls, %d differences\n", static_cast<long long>(calls), failures);
  return failures != 0;
}
