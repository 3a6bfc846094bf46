"""Measures how much attention slows down while another kernel, such as a collective, holds some multiprocessors.

    python benchmarks/busy_gpu.py                  # hold 16 multiprocessors
    python benchmarks/busy_gpu.py --at-most 1.25   # fail if a call takes more than 1.25 times as long

A kernel that only waits runs on its own stream. Each of its blocks takes so much shared memory that it fills a
multiprocessor. With 16 of an H200's 132 multiprocessors held, dynamically scheduled work takes 132 / 116 = 1.14 times
as long. Statically scheduled work takes up to twice as long, because the share of those 16 starts only when the rest
has ended.
"""

import argparse
import contextlib
import ctypes
import functools
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp

import jax_flash

# How long the waiting kernel runs. It reads only the clock: 16 blocks polling a flag in host memory would slow down the
# timed calls by half.
WAITING_SECONDS = 1.0
TIMED_SECONDS = 0.2
SOURCE = r"""
#include <cuda_runtime.h>

struct Flags {
  int began[1024];  // set by each block when it runs
  int ended;        // set by the first block to end
};

static Flags* flags;  // host memory, mapped into the device
static cudaStream_t stream;

__device__ unsigned long long now() {
  unsigned long long nanoseconds;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(nanoseconds));
  return nanoseconds;
}

__global__ void wait(volatile Flags* flags, unsigned long long duration) {
  const unsigned long long start = now();
  flags->began[blockIdx.x] = 1;
  while (now() - start < duration) __nanosleep(10000);
  flags->ended = 1;
}

#define RETURN_IF_FAILED(call) \
  if (const cudaError_t error = (call)) return cudaGetErrorString(error)

extern "C" const char* start(int blocks, double seconds) {
  int device = 0, bytes = 0;
  if (blocks > 1024) return "too many blocks";
  RETURN_IF_FAILED(cudaGetDevice(&device));
  RETURN_IF_FAILED(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  RETURN_IF_FAILED(cudaFuncSetAttribute(wait, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  if (!flags) {
    RETURN_IF_FAILED(cudaHostAlloc(&flags, sizeof(Flags), cudaHostAllocMapped));
    RETURN_IF_FAILED(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  }
  *flags = {};
  Flags* on_device = nullptr;
  RETURN_IF_FAILED(cudaHostGetDevicePointer(&on_device, flags, 0));
  wait<<<blocks, 1, bytes, stream>>>(on_device, static_cast<unsigned long long>(1e9 * seconds));
  RETURN_IF_FAILED(cudaGetLastError());
  return nullptr;
}

extern "C" int num_running(int blocks) {
  int count = 0;
  for (int i = 0; i < blocks; ++i) count += static_cast<volatile int*>(flags->began)[i];
  return static_cast<volatile int&>(flags->ended) ? 0 : count;
}

extern "C" const char* wait_for_end() {
  if (stream) RETURN_IF_FAILED(cudaStreamSynchronize(stream));
  return nullptr;
}
"""


class Waiter:
    """The kernel that holds `blocks` multiprocessors."""

    def __init__(self, blocks: int, folder: str):
        capability = jax.devices()[0].compute_capability.replace(".", "")
        nvcc = shutil.which("nvcc") or jax_flash.build_info()["nvcc"]
        source, library = pathlib.Path(folder, "wait.cu"), pathlib.Path(folder, "wait.so")
        source.write_text(SOURCE)
        command = [
            nvcc,
            f"-arch=sm_{capability}",
            "-std=c++17",
            "-shared",
            "-Xcompiler=-fPIC",
            source,
            "-o",
            library,
        ]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.start.argtypes = [ctypes.c_int, ctypes.c_double]
        self._library.start.restype = self._library.wait_for_end.restype = ctypes.c_char_p
        self._blocks = blocks

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which all blocks of the kernel run; raises an error if the kernel ended too early."""
        try:
            self._check(self._library.start(self._blocks, WAITING_SECONDS))
            deadline = time.monotonic() + WAITING_SECONDS
            while self._num_running() < self._blocks:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"Only {self._num_running()} of {self._blocks} waiting blocks started."
                    )
            yield
            if self._num_running() < self._blocks:
                raise RuntimeError(
                    f"The waiting kernel ended after {WAITING_SECONDS} s, before the timed calls."
                )
        finally:
            self._check(self._library.wait_for_end())

    def _num_running(self) -> int:
        return self._library.num_running(self._blocks)

    @staticmethod
    def _check(error: bytes | None) -> None:
        if error is not None:
            raise RuntimeError(f"CUDA reported: {error.decode()}")


def seconds_per_call(call: Callable[[], Any]) -> float:
    """The mean over calls in a row, after enough calls to bring the GPU to a steady clock."""

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    once = run(3)
    once = run(math.ceil(TIMED_SECONDS / 3 / once))
    return run(math.ceil(TIMED_SECONDS / once))


def programs(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Compiled calls of attention, with their names."""
    for head_dim in args.head_dim:
        shape = (args.batch, args.seq_len, args.num_heads, head_dim)
        q, k, v, dout = (
            jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)
        )
        for is_causal in (False, True):
            attention = functools.partial(jax_flash.flash_attention, is_causal=is_causal)
            forward = jax.jit(attention)
            _, pullback = jax.jit(functools.partial(jax.vjp, attention))(q, k, v)
            backward = jax.jit(lambda pullback, dout: pullback(dout))
            mask = "causal" if is_causal else "full"
            yield f"head dim {head_dim:3}, {mask:6}, forward", functools.partial(forward, q, k, v)
            yield f"head dim {head_dim:3}, {mask:6}, backward", functools.partial(backward, pullback, dout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=16, help="multiprocessors to hold (default: 16)")
    parser.add_argument("--at-most", type=float, default=math.inf, help="fail if a ratio is larger")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each program, with and without")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--num-heads", type=int, default=16)
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit("This benchmark needs a GPU.")

    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        waiter = Waiter(args.blocks, folder)
        for name, call in programs(args):
            jax.block_until_ready(call())  # compile and load before the GPU is busy
            alone, beside = [], []
            for _ in range(args.rounds):
                alone.append(seconds_per_call(call))
                with waiter.running():
                    beside.append(seconds_per_call(call))
            ratios.append(statistics.median(beside) / statistics.median(alone))
            print(
                f"{name:32} {1e3 * statistics.median(alone):7.3f} ms, with {args.blocks} multiprocessors held "
                f"{1e3 * statistics.median(beside):7.3f} ms: {ratios[-1]:.2f} times",
                flush=True,
            )
    if max(ratios) > args.at_most:
        sys.exit(f"{max(ratios):.2f} times is more than {args.at_most}.")


if __name__ == "__main__":
    main()
