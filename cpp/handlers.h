// The library's XLA FFI handlers, defined in ffi_cpu.cc and ffi_cuda.cc.
#pragma once

#include "xla/ffi/api/c_api.h"

extern "C" {
XLA_FFI_Handler JaxFlashForwardCpu, JaxFlashBackwardCpu, JaxFlashBackwardBiasCpu, JaxFlashTangentCpu,
    JaxFlashBackwardTangentCpu;
XLA_FFI_Handler JaxFlashForwardCuda, JaxFlashBackwardCuda, JaxFlashBackwardBiasCuda, JaxFlashTangentCuda,
    JaxFlashBackwardTangentCuda;
}
