"""`python -m jax_flash`: what was found here, and attention forward and backward, checked and timed on it."""

from __future__ import annotations

import functools
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_flash

from . import _ffi, _reference

# dtype, batch, length, heads, head dim.
_SHAPES = {"cpu": (jnp.float32, 1, 4096, 4, 64), "gpu": (jnp.bfloat16, 4, 4096, 16, 128)}
_TENSORS = ("out", "dq", "dk", "dv")


class _Progress:
    """A bar on a terminal, lines elsewhere; on stderr, so that what is printed stays clean."""

    def __init__(self, total: int):
        self._total = total
        self._done = 0

    def __call__(self, what: str) -> None:
        if sys.stderr.isatty():
            bar = "#" * (30 * self._done // self._total)
            print(f"\r[{bar:30}] {self._done}/{self._total} {what:40}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{self._done}/{self._total} {what}", file=sys.stderr, flush=True)
        self._done += 1

    def clear(self) -> None:
        if sys.stderr.isatty():
            print(f"\r{'':80}\r", end="", file=sys.stderr, flush=True)


def _best_device() -> jax.Device:
    device = jax.devices()[0]
    if device.platform == "gpu":
        try:
            _ffi.check_gpu_kernels()
        except NotImplementedError as error:
            print(f"Not on {device.device_kind}: {error}\n")
        else:
            return device
    return jax.devices("cpu")[0]


def _describe(device: jax.Device) -> str:
    info = jax_flash.build_info()
    is_cpu = device.platform == "cpu"
    kind = f"{os.cpu_count()} CPU cores, {platform.machine()}" if is_cpu else device.device_kind
    cuda = "without CUDA kernels"
    if info["cuda"]:
        archs = info["archs"].replace(";", ", ")
        cuda = f"CUDA kernels for {archs} and newer, by nvcc {info['cuda']} ({info['nvcc']})"
    return "\n".join(
        [
            f"jax_flash  {jax_flash.__version__}, on jax {jax.__version__}, Python {platform.python_version()}",
            f"device     {kind}",
            f"library    XLA FFI {info['ffi_version']} (jaxlib {info['jaxlib']}), {cuda}",
            f"kernels    cpu{_summarise(info['kernels'])}",
        ]
    )


def _summarise(kernels: list[str]) -> str:
    """The values of each word of the kernels' names, which are alike: direction, arch, arithmetic, head dim."""
    columns = zip(*(name.split() for name in kernels), strict=True)
    words = "; ".join(", ".join(dict.fromkeys(column)) for column in columns)
    return f", and {len(kernels)} for CUDA: {words}" if kernels else ""


@functools.partial(jax.jit, static_argnames="is_causal")
def _exact(q, k, v, dout, is_causal):
    """The output and the gradients, in float64, one head at a time: that writes no more than [T, T] scores."""

    def one_head(arrays):
        q, k, v, dout = (x.astype(jnp.float64)[:, None] for x in arrays)  # [T, 1, H]
        out, vjp = jax.vjp(functools.partial(_reference.attention, is_causal=is_causal), q, k, v)
        return tuple(x[:, 0] for x in (out, *vjp(dout)))

    batch, length, heads, head_dim = q.shape
    by_head = [jnp.swapaxes(x, 1, 2).reshape(-1, length, head_dim) for x in (q, k, v, dout)]
    results = jax.lax.map(one_head, by_head)
    return tuple(jnp.swapaxes(x.reshape(batch, heads, length, head_dim), 1, 2) for x in results)


def _forward(attention: Callable, q, k, v, dout):
    return (attention(q, k, v),)


def _forward_and_backward(attention: Callable, q, k, v, dout):
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(dout)


def _run(function: Callable, arrays: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], float, int]:
    """Returns the results, the median time of a call in seconds, and the bytes that the program needs."""
    compiled = jax.jit(function).lower(*arrays).compile()
    memory = compiled.memory_analysis()
    size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    results = jax.block_until_ready(compiled(*arrays))
    seconds: list[float] = []
    while sum(seconds) < 0.5 and len(seconds) < 50:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        seconds.append(time.perf_counter() - start)
    return results, statistics.median(seconds), size


def _max_error(got: jax.Array, exact: jax.Array) -> float:
    """The largest difference; NaN where either is NaN."""
    return float(jnp.max(jnp.abs(got.astype(jnp.float64) - exact)))


def _limit(exact: jax.Array, dtype: np.dtype, peer: float) -> float:
    """The largest error that passes, beside the error of XLA's attention in the same dtype."""
    largest = float(jnp.max(jnp.abs(exact)))
    if dtype == jnp.float32:
        return 2e-6 * math.sqrt(exact.shape[1]) * max(1.0, largest)
    return max(2 * peer, float(jnp.finfo(dtype).eps) * largest) + 1e-6


def _compare(is_causal: bool, arrays: tuple[jax.Array, ...], progress: _Progress) -> tuple[list[str], bool]:
    """Runs one kind of attention; returns the lines of the table and whether every check passed."""
    mask = "causal" if is_causal else "full"
    progress(f"{mask}: reference in float64")
    exact = jax.block_until_ready(_exact(*arrays, is_causal=is_causal))
    ours = functools.partial(jax_flash.flash_attention, is_causal=is_causal)
    xla = functools.partial(jax.nn.dot_product_attention, is_causal=is_causal, implementation="xla")
    lines, passed = [], True
    for name, function in (("forward", _forward), ("forward + backward", _forward_and_backward)):
        progress(f"{mask}: {name}, jax_flash")
        results, seconds, size = _run(functools.partial(function, ours), arrays)
        progress(f"{mask}: {name}, XLA")
        try:
            peers, peer_seconds, peer_size = _run(functools.partial(function, xla), arrays)
            beside = f"{1e3 * peer_seconds:9.2f} {peer_size / 2**20:9.0f}"
        except jax.errors.JaxRuntimeError:  # out of memory
            peers, beside = (math.nan,) * 4, f"{'failed':>9} {'':9}"
        errors = []
        for tensor, got, peer, right in zip(_TENSORS, results, peers, exact, strict=False):
            peer_error = 0.0 if isinstance(peer, float) else _max_error(peer, right)
            error, limit = _max_error(got, right), _limit(right, got.dtype, peer_error)
            ok = error <= limit  # False for NaN
            passed = passed and ok
            errors.append(f"{tensor} {error:.1e}" + ("" if ok else f" FAILED (limit {limit:.1e})"))
        lines.append(
            f"{mask:7} {name:19} {1e3 * seconds:9.2f} {size / 2**20:9.0f} {beside}   {', '.join(errors)}"
        )
    return lines, passed


def main() -> int:
    """Runs the demonstration; returns the exit status."""
    jax.config.update("jax_enable_x64", True)  # for the reference
    device = _best_device()
    print(_describe(device))
    dtype, batch, length, heads, head_dim = _SHAPES[device.platform]
    shape = (batch, length, heads, head_dim)
    print(f"inputs     {jnp.dtype(dtype).name} {list(shape)}: batch, length, heads, head dim\n", flush=True)
    with jax.default_device(device):
        keys = jax.random.split(jax.random.key(0), 4)
        arrays = tuple(jax.random.normal(key, shape, dtype) for key in keys)
        progress = _Progress(2 * 5)
        lines, passed = [], True
        for is_causal in (False, True):
            more, ok = _compare(is_causal, arrays, progress)
            lines += more
            passed = passed and ok
        progress.clear()
    print(f"{'':27} {'jax_flash':>19} {'XLA':>19}")
    print(f"{'':27} {'ms':>9} {'MiB':>9} {'ms':>9} {'MiB':>9}   largest error against float64")
    print("\n".join(lines))
    print("\nMiB: arguments, results and temporaries of the compiled program.")
    print("Every result is as close to the reference as it should be." if passed else "A CHECK FAILED.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
