"""Tools for benchmarks: timing, inputs, memory, a float64 reference, verdicts, facts about the machine."""

import contextlib
import datetime as dt
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Json = dict[str, Any]

OURS = "jax_flash"  # among the names of results; the others are alternatives
SOMETHING_ELSE = 0.1  # a larger relative error is not one of rounding


# ---- Time -------------------------------------------------------------------------------------------------


def _loop(call: Callable[[], Any], count: int, asynchronous: bool) -> float:
    """Seconds per call of `count` calls in a row."""
    start = time.perf_counter()
    for _ in range(count):
        result = call()
        if not asynchronous:
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return (time.perf_counter() - start) / count


def time_interleaved(
    calls: dict[str, Callable[[], Any]], *, rounds: int, warmup: float, duration: float, asynchronous: bool
) -> dict[str, Json]:
    """Times several programs in turn.

    The speed of a GPU at its power limit depends on what ran before. So the programs take turns, and each timed
    slice of `duration` seconds follows `warmup` seconds of the same program. On a GPU many calls are in flight at
    a time, which hides the host's overhead. On a CPU they would run side by side, so each call is waited for.

    Args:
      calls: a function without arguments for each name.
      rounds: number of slices of each program.
      warmup: seconds of untimed calls before each slice.
      duration: seconds of timed calls in each slice (at least one call).
      asynchronous: whether calls are launched without waiting for the previous one.

    Returns:
      For each name the median of the slices in milliseconds and their spread, or the error.
    """
    slices: dict[str, list[float]] = {name: [] for name in calls}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for name, call in calls.items():
            if name in errors:
                continue
            try:
                once = _loop(call, 1, asynchronous)
                if once < warmup:
                    once = _loop(call, math.ceil(warmup / once), asynchronous)
                if asynchronous or once < duration:
                    once = _loop(call, math.ceil(duration / once), asynchronous)
                slices[name].append(once)
            except Exception as error:  # of any kind; continue with the other programs
                errors[name] = reason(error)
    timings: dict[str, Json] = {}
    for name, seconds in slices.items():
        if name in errors:
            timings[name] = {"error": errors[name]}
        else:
            median = statistics.median(seconds)
            timings[name] = {"ms": 1e3 * median, "spread": (max(seconds) - min(seconds)) / median}
    return timings


def reason(error: Exception) -> str:
    """The beginning of an error message, in one line."""
    text = " ".join(str(error).split()) or "no message"
    return f"{type(error).__name__}: {text}"[:240]


def attempts(
    cases: Iterable[Any],
    describe: Callable[[Any], str],
    run: Callable[[Any], Any],
    left_out: list[str],
    is_over: Callable[[], bool] = lambda: False,
) -> Iterator[Any]:
    """What `run` returns for each case. Cases that fail, or come when time is over, are named in `left_out`."""
    for case in cases:
        if is_over():
            left_out.append(f"{describe(case)}: out of time")
            continue
        try:
            result = run(case)
        except Exception as error:  # a failing case must not stop the others
            left_out.append(f"{describe(case)}: {reason(error)}")
            continue
        yield result


# ---- Inputs -----------------------------------------------------------------------------------------------


def random_lengths(total: int, count: int) -> tuple[int, ...]:
    """Lengths of the parts of a row cut at random places; the same lengths at every call."""
    cuts = np.sort(np.random.default_rng(0).choice(total - 1, min(count, total) - 1, replace=False)) + 1
    return tuple(np.diff([0, *cuts, total]).tolist())


def _growing(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    seq_len = shape[-3]
    return jax.random.normal(key, shape) * (2 / seq_len * jnp.arange(1, seq_len + 1))[:, None, None]


def _rows_spanning(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    keys = jax.random.split(key)
    return jax.random.normal(keys[0], shape) * 2 ** jax.random.uniform(
        keys[1], (*shape[:-1], 1), minval=-20, maxval=0
    )


def _columns_spanning(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape) * 2 ** -jnp.linspace(0, 20, shape[-1])


def _huge_key(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape).at[1, :, shape[-3] // 2].multiply(2**10)


def _equal_keys(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = jax.random.normal(key, shape)
    return x.at[1].set(x[1, :, :1])


# Functions of a random key and the shape [4, B, T, N, H] of q, k, v and dout, which have the same lengths and heads.
DISTRIBUTIONS: dict[str, Callable[[jax.Array, tuple[int, ...]], jax.Array]] = {
    "normal": jax.random.normal,
    "uniform": jax.random.uniform,  # all positive, so errors of one sign add up
    "growing": _growing,  # along the sequence
    "rows span 2^20": _rows_spanning,
    "columns span 2^20": _columns_spanning,
    "one huge key": _huge_key,  # about half of the rows see nothing else
    "equal keys": _equal_keys,  # dq is 0 but for rounding, so its relative errors mean nothing
}


# ---- Memory -----------------------------------------------------------------------------------------------


def program_bytes(compiled: jax.stages.Compiled) -> int | None:
    """The peak device memory of a compiled program: arguments, results and temporary buffers."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        return None
    return (
        analysis.argument_size_in_bytes + analysis.output_size_in_bytes + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )  # fmt: skip


def resident_growth(call: Callable[[], Any]) -> int | None:
    """The largest growth of the process during a call, in bytes; None without Linux's counters."""
    try:
        time.sleep(0.2)  # another thread frees the buffers of the previous call
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        before = _status_bytes("VmRSS")
        jax.block_until_ready(call())
        return max(0, _status_bytes("VmHWM") - before)
    except OSError:
        return None


def _status_bytes(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text())
    if match is None:
        raise OSError(f"/proc/self/status has no {field}")
    return 1024 * int(match[1])


# ---- Correctness ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def float64_enabled() -> Iterator[None]:
    """`jax.enable_x64`, wherever this version of JAX has it."""
    if hasattr(jax, "enable_x64"):
        context = jax.enable_x64(True)
    else:
        from jax.experimental import enable_x64

        context = enable_x64(True)
    with context:
        yield


def reference_head(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dout: jax.Array,
    *,
    is_causal: bool,
    window: tuple[int, int] | None,
) -> dict[str, np.ndarray]:
    """Attention of one key head and its gradients in float64, in memory linear in the length.

    Args:
      q: queries of the heads that share the key head, [T, G, H].
      k: keys, [S, H].
      v: values, [S, H].
      dout: cotangent of the output, [T, G, H].
      is_causal: whether query i sees only keys up to i.
      window: how many keys to the left and right of its own position a query sees; None for all.

    Returns:
      out, dq, dk and dv in float64.
    """
    with float64_enabled():
        operands = [jnp.asarray(x, jnp.float64) for x in (q, k, v, dout)]
        out, dq, dk, dv = _reference_head(*operands, is_causal=is_causal, window=window)
        return {"out": np.asarray(out), "dq": np.asarray(dq), "dk": np.asarray(dk), "dv": np.asarray(dv)}


@functools.partial(jax.jit, static_argnames=("is_causal", "window"))
def _reference_head(q, k, v, dout, *, is_causal: bool, window: tuple[int, int] | None):
    seqlen_q, group, head_dim = q.shape
    seqlen_kv = k.shape[0]
    scale = 1 / math.sqrt(head_dim)
    block = min(seqlen_q, max(1, 2**24 // (group * seqlen_kv)))  # rows; each matrix has 128 MB
    while seqlen_q % block:
        block -= 1
    keys = jnp.arange(seqlen_kv)

    def rows(sums, operands):
        dk, dv = sums
        positions, q, dout = operands
        visible = jnp.ones((block, seqlen_kv), bool)
        if is_causal:
            visible &= keys <= positions[:, None]
        if window is not None:
            visible &= (keys >= positions[:, None] - window[0]) & (keys <= positions[:, None] + window[1])
        s = jnp.where(visible[:, None, :], scale * jnp.einsum("tgh,sh->tgs", q, k), -jnp.inf)
        p = jax.nn.softmax(s, axis=-1)
        out = jnp.einsum("tgs,sh->tgh", p, v)
        ds = p * (jnp.einsum("tgh,sh->tgs", dout, v) - jnp.sum(dout * out, axis=-1, keepdims=True))
        dk = dk + scale * jnp.einsum("tgs,tgh->sh", ds, q)
        dv = dv + jnp.einsum("tgs,tgh->sh", p, dout)
        return (dk, dv), (out, scale * jnp.einsum("tgs,sh->tgh", ds, k))

    def blocks(x):
        return x.reshape(seqlen_q // block, block, *x.shape[1:])

    operands = (blocks(jnp.arange(seqlen_q)), blocks(q), blocks(dout))
    (dk, dv), (out, dq) = jax.lax.scan(rows, (jnp.zeros_like(k), jnp.zeros_like(v)), operands)
    return out.reshape(q.shape), dq.reshape(q.shape), dk, dv


def compare(got: jax.Array, expected: np.ndarray) -> Json:
    """Relative errors in the Frobenius norm and of the worst row, and the largest error over max(1, largest value).

    A row is what the last axis has. One that is 0 but for rounding, as dq of a query that sees one key, has no relative
    error and does not count.
    """
    error = np.asarray(got).astype(np.float64) - expected
    rows, rows_of_error = (np.linalg.norm(np.atleast_1d(x), axis=-1) for x in (expected, error))
    counted = rows > 1e-13 * np.max(rows)
    return {
        "relative": float(np.linalg.norm(error) / max(np.linalg.norm(expected), 1e-300)),
        "max": float(np.max(np.abs(error)) / max(1.0, np.max(np.abs(expected)))),
        "worst_row": float(np.max(rows_of_error[counted] / rows[counted], initial=0)),
    }


def tolerance(dtype: str, precision: str | None, seqlen_kv: int) -> tuple[str, float]:
    """The error of `compare` to check and its limit, several times the rounding error of the arithmetic."""
    if dtype == "float64":
        return "max", 1e-14 * math.sqrt(seqlen_kv)
    if dtype == "float32" and precision == "highest":
        return "max", 2e-6 * math.sqrt(seqlen_kv)
    return "relative", {"bfloat16": 8e-3, "float16": 1.5e-3, "float32": 1.5e-3}[dtype]


# ---- Verdicts ---------------------------------------------------------------------------------------------


def fastest_alternative(results: dict[str, Json]) -> tuple[str | None, float | None]:
    """The fastest alternative, and the ratio of its time to that of jax_flash; None for what has no figure.

    An alternative that computes something else does not count.
    """
    times = {
        name: result["ms"]
        for name, result in results.items()
        if name != OURS
        and result.get("ms") is not None
        and all(error["relative"] <= SOMETHING_ELSE for error in result.get("errors", {}).values())
    }
    fastest, own = min(times, key=times.get, default=None), results.get(OURS, {}).get("ms")
    return fastest, times[fastest] / own if own and fastest else None


def shortcomings(cells: Iterable[tuple[str, dict[str, Json]]]) -> list[str]:
    """Of the results of named cells, those in which jax_flash is slower than an alternative or has no figure."""
    lines = []
    for where, results in cells:
        fastest, ratio = fastest_alternative(results)
        if results[OURS].get("ms") is None:
            lines.append(f"no figure: {where}: {results[OURS]['error']}")
        elif ratio is not None and ratio < 1:
            lines.append(f"below 1: {where}: {ratio:.3f} ({fastest})")
    return lines


# ---- Machine and results ----------------------------------------------------------------------------------


def save(figures: Json, output: pathlib.Path | None) -> None:
    """Writes a result file; does nothing without one."""
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(figures, indent=1) + "\n")


def environment() -> Json:
    """The device and all versions that timings depend on; None for unknown facts."""
    device = jax.devices()[0]
    here = str(pathlib.Path(__file__).parent)
    facts: Json = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "git_commit": os.environ.get("GIT_COMMIT") or _output("git", "-C", here, "rev-parse", "HEAD"),
        "platform": device.platform,
        "device": device.device_kind if device.platform == "gpu" else _cpu_name(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
    }
    for package in ("jax", "jaxlib", "jax_flash", "numpy"):
        facts[package] = _package_version(package)
    if device.platform == "gpu":
        facts |= {
            "compute_capability": getattr(device, "compute_capability", None),
            "driver": _nvidia_smi("driver_version"),
            "power_limit_watts": _nvidia_smi("power.limit"),
            "cuda": _library_version("cuda_runtime_get_version", 1000, 10),
            "cudnn": _library_version("cudnn_get_version", 10000, 100),
        }
    return facts


def device_slug(facts: Json) -> str:
    """A short name for files: "h200" for "NVIDIA H200", "cpu" for any CPU."""
    if facts["platform"] != "gpu":
        return facts["platform"]
    words = re.findall(r"[a-z0-9]+", facts["device"].lower())
    return next((word for word in words if any(c.isdigit() for c in word)), "-".join(words))


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _nvidia_smi(query: str) -> str | None:
    lines = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits")
    return lines.splitlines()[0].strip() if lines else None


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", pathlib.Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _library_version(function: str, major: int, minor: int) -> str | None:
    """The version that a library loaded by JAX reports (13000 is CUDA 13.0, 91900 is cuDNN 9.19.0)."""
    try:
        from jax._src.lib import cuda_versions

        number = getattr(cuda_versions, function)()
    except Exception:  # private API of JAX: may be missing or fail without a GPU
        return None
    return f"{number // major}.{number % major // minor}.{number % minor}"
