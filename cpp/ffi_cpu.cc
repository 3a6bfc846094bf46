// The XLA FFI handlers of the CPU kernels: each decodes the call and runs its kernel.
#include <functional>
#include <utility>

#include "cpu_attention.h"
#include "ffi_decode.h"

namespace jax_flash {
namespace {

// XLA's intra-op thread pool.
class XlaThreadPool : public cpu::ThreadPool {
 public:
  explicit XlaThreadPool(ffi::ThreadPool pool) : pool_(pool) {}
  int64_t NumThreads() override { return pool_.num_threads(); }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool pool_;
};

ffi::Error OutOfMemory() {
  return ffi::Error(ffi::ErrorCode::kResourceExhausted,
                    "jax_flash: no memory for the scratch of the CPU kernel.");
}

ffi::Error ForwardCpu(ffi::ThreadPool thread_pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                      ffi::Dictionary attributes) {
  ForwardParams params{};
  RETURN_IF_ERROR(ReadForward(args, results, attributes, Platform::kCpu, &params));
  XlaThreadPool pool(thread_pool);
  return cpu::Forward(params, pool) ? ffi::Error::Success() : OutOfMemory();
}

ffi::Error BackwardCpu(ffi::ThreadPool thread_pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                       ffi::Dictionary attributes) {
  BackwardParams params{};
  RETURN_IF_ERROR(ReadBackward(args, results, attributes, Platform::kCpu, Pass::kBackward, &params));
  XlaThreadPool pool(thread_pool);
  return cpu::Backward(params, pool) ? ffi::Error::Success() : OutOfMemory();
}

ffi::Error BackwardBiasCpu(ffi::ThreadPool thread_pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                           ffi::Dictionary attributes) {
  BackwardParams params{};
  RETURN_IF_ERROR(ReadBackward(args, results, attributes, Platform::kCpu, Pass::kBackwardBias, &params));
  XlaThreadPool pool(thread_pool);
  return cpu::BackwardBias(params, pool) ? ffi::Error::Success() : OutOfMemory();
}

ffi::Error TangentCpu(ffi::ThreadPool thread_pool, ffi::RemainingArgs args, ffi::RemainingRets results,
                      ffi::Dictionary attributes) {
  TangentParams params{};
  RETURN_IF_ERROR(ReadTangent(args, results, attributes, Platform::kCpu, &params));
  XlaThreadPool pool(thread_pool);
  return cpu::Tangent(params, pool) ? ffi::Error::Success() : OutOfMemory();
}

ffi::Error BackwardTangentCpu(ffi::ThreadPool thread_pool, ffi::RemainingArgs args,
                              ffi::RemainingRets results, ffi::Dictionary attributes) {
  BackwardTangentParams params{};
  RETURN_IF_ERROR(ReadBackwardTangent(args, results, attributes, Platform::kCpu, &params));
  XlaThreadPool pool(thread_pool);
  return cpu::BackwardTangent(params, pool) ? ffi::Error::Success() : OutOfMemory();
}

}  // namespace
}  // namespace jax_flash

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashForwardCpu, jax_flash::kGuarded<jax_flash::ForwardCpu>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()  // q, k, v, optional operands
                                  .RemainingRets()  // out, lse
                                  .Attrs());        // the options, and `operands`

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashBackwardCpu, jax_flash::kGuarded<jax_flash::BackwardCpu>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()  // q, k, v, out, lse, dout, dlse, optional operands
                                  .RemainingRets()  // dq, dk, dv
                                  .Attrs());        // the options, and `operands`

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashBackwardBiasCpu, jax_flash::kGuarded<jax_flash::BackwardBiasCpu>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()  // q, k, v, out, lse, dout, dlse, optional operands
                                  .RemainingRets()  // dbias
                                  .Attrs());        // the options, and `operands`

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashTangentCpu, jax_flash::kGuarded<jax_flash::TangentCpu>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()  // q, k, v, out, lse, tangents, optional operands
                                  .RemainingRets()  // tout, tlse
                                  .Attrs());        // the options, and `operands`

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxFlashBackwardTangentCpu, jax_flash::kGuarded<jax_flash::BackwardTangentCpu>,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .RemainingArgs()  // q, k, v, out, lse, dout, tout, tlse, optional operands
                                  .RemainingRets()  // tdq, tdk, tdv
                                  .Attrs());        // the options, and `operands`
