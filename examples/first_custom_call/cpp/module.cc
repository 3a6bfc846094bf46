// The Python module first_custom_call._native: the addresses of the handlers.
#include <nanobind/nanobind.h>

#include "grayscale.h"
#include "matmul.h"

namespace nb = nanobind;

// jax.ffi.register_ffi_target takes an address in a capsule.
static nb::capsule Capsule(XLA_FFI_Handler* handler) {
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// {XLA's name of the platform: {op: handler}}
static nb::dict Handlers() {
  nb::dict cpu;
  cpu["grayscale"] = Capsule(GrayscaleCpu);
  cpu["matmul"] = Capsule(MatmulCpu);
  nb::dict handlers;
  handlers["cpu"] = cpu;
#ifdef WITH_CUDA
  nb::dict cuda;
  cuda["grayscale"] = Capsule(GrayscaleCuda);
  cuda["matmul"] = Capsule(MatmulCuda);
  handlers["CUDA"] = cuda;
#endif
  return handlers;
}

NB_MODULE(_native, module) { module.def("handlers", &Handlers); }
