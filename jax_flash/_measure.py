"""What one compiled program costs: its time and its memory, or why it was not run; and a bar that shows progress."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import pathlib
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable

import jax

# Seconds of calls before anything is timed, of calls that are timed, and of one slice of calls that are in flight.
_WARM_UP, _DURATION, _SLICE = 0.2, 0.5, 0.02
_MAX_SLICES = 50


class Status(enum.StrEnum):
    """What became of a program."""

    MEASURED = "measured"
    TOO_LARGE = "too large"  # needs more memory than the device has: compiled, not run
    TOO_SLOW = "too slow"  # predicted to take longer than allowed: compiled, not run
    OUT_OF_MEMORY = "out of memory"  # found while it compiled or ran
    FAILED = "failed"


@dataclasses.dataclass
class Measured:
    """A program's figures, where there are any."""

    status: Status
    bytes: int | None = None  # arguments, results and temporaries
    seconds: float | None = None  # of the median call
    results: tuple[jax.Array, ...] = ()
    reason: str = ""  # the first line of the error

    def __str__(self) -> str:
        """Milliseconds and MiB in two columns, or why there are none; 19 characters wide."""
        if self.status is Status.MEASURED:
            return f"{1e3 * self.seconds:9.2f} {mebibytes(self.bytes):>9}"
        if self.status is Status.TOO_LARGE:
            return f"{'needs ' + gibibytes(self.bytes):>19}"
        return f"{self.status:>19}"


def mebibytes(size: int) -> str:
    """A size in MiB, with more digits where it is small."""
    return f"{size / 2**20:.{0 if size >= 10 * 2**20 else 3}f}"


def gibibytes(size: int) -> str:
    """A size in GiB, with its unit."""
    return f"{size / 2**30:.1f} GiB"


class Progress:
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


def device_name(device: jax.Device) -> str:
    """What a person calls it."""
    if device.platform == "cpu":
        return f"{os.cpu_count()} CPU cores, {platform.machine()}"
    return device.device_kind


def memory_bytes(device: jax.Device) -> float:
    """The memory that programs may use: what JAX may allocate of a GPU's; of a host's, four fifths of what is free."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", math.inf)
    free = float(re.search(r"MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text())[1]) * 1024
    try:  # a container may be allowed less
        limit, used = (pathlib.Path(f"/sys/fs/cgroup/memory.{x}").read_text() for x in ("max", "current"))
        free = min(free, float(limit) - float(used))
    except (OSError, ValueError):  # there is no such file, or it says "max"
        pass
    return int(0.8 * free)


def measure(
    function: Callable[..., tuple[jax.Array, ...]],
    make_operands: Callable[[], tuple[jax.Array, ...]],
    device: jax.Device,
    *,
    predicted_seconds: float = 0.0,
    max_seconds: float = math.inf,
) -> Measured:
    """Compiles a function and, where memory and time allow, runs and times it.

    Args:
      function: takes the operands.
      make_operands: makes them; called only if the program will run.
      device: where it runs.
      predicted_seconds: of one call.
      max_seconds: a call that is predicted to take longer is left out.
    """
    size = None
    try:
        compiled = jax.jit(function).lower(*jax.eval_shape(make_operands)).compile()
        memory = compiled.memory_analysis()
        size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        if size > memory_bytes(device):
            return Measured(Status.TOO_LARGE, size)
        if predicted_seconds > max_seconds:
            return Measured(Status.TOO_SLOW, size)
        operands = make_operands()
        results = jax.block_until_ready(compiled(*operands))
        seconds = _time(lambda: compiled(*operands), in_flight=device.platform != "cpu")
    except Exception as error:  # whatever it is, other programs go on
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        status = Status.OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in reason else Status.FAILED
        return Measured(status, size, reason=reason)
    return Measured(Status.MEASURED, size, seconds, results)


def _time(call: Callable[[], object], in_flight: bool) -> float:
    """Seconds of the median call.

    Calls are waited for one by one, or, with `in_flight`, launched in slices without waiting between: that hides the
    host's part where the device works by itself.
    """

    def seconds_of(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    spent, once = 0.0, math.inf
    while spent < _WARM_UP:
        once = min(once, seconds_of(1))
        spent += once
    count = math.ceil(_SLICE / once) if in_flight else 1
    slices: list[float] = []
    while count * sum(slices) < _DURATION and len(slices) < _MAX_SLICES:
        slices.append(seconds_of(count))
    return statistics.median(slices)
