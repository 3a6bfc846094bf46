"""Time and memory of one compiled program, or the reason why it was not run."""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
import time
from collections.abc import Callable

import jax

from . import devices

# In seconds: untimed calls, timed calls, and one slice of calls that are launched without waiting between them.
_WARM_UP, _DURATION, _SLICE = 0.2, 0.5, 0.02
_MAX_SLICES = 50
MEMORY_NOTE = "MiB: arguments, results and temporaries of the compiled program."  # goes below a table


class Status(enum.StrEnum):
    """How a measurement ended."""

    MEASURED = "measured"
    TOO_LARGE = "too large"  # needs more memory than is available: compiled, not run
    TOO_SLOW = "too slow"  # predicted to exceed the time limit: compiled, not run
    OUT_OF_MEMORY = "out of memory"  # while it was compiled or run
    FAILED = "failed"


@dataclasses.dataclass
class Measurement:
    """The figures of a program, as far as they are known."""

    status: Status
    bytes: int | None = None  # arguments, results and temporaries
    seconds: float | None = None  # median of the calls
    results: tuple[jax.Array, ...] = ()
    reason: str = ""  # first line of the error

    def __str__(self) -> str:
        """Two columns, milliseconds and MiB, or the status; 19 characters wide."""
        if self.status is Status.MEASURED:
            return f"{1e3 * self.seconds:9.2f} {mebibytes(self.bytes):>9}"
        if self.status is Status.TOO_LARGE:
            return f"{'needs ' + gibibytes(self.bytes):>19}"
        return f"{self.status:>19}"


def mebibytes(size: int) -> str:
    """Returns a size in MiB without its unit, to three decimals if it is below 10."""
    return f"{size / 2**20:.{0 if size >= 10 * 2**20 else 3}f}"


def gibibytes(size: int) -> str:
    """Returns a size in GiB with its unit."""
    return f"{size / 2**30:.1f} GiB"


def measure(
    function: Callable[..., tuple[jax.Array, ...]],
    make_operands: Callable[[], tuple[jax.Array, ...]],
    device: jax.Device,
    *,
    predicted_seconds: float = 0.0,
    max_seconds: float = math.inf,
) -> Measurement:
    """Compiles a function, and runs and times it if memory and time allow.

    Args:
      function: takes the operands.
      make_operands: makes the operands; only called if the program is run.
      device: where it runs.
      predicted_seconds: the expected time of one call.
      max_seconds: the program is not run if the expected time exceeds this.
    """
    size = None
    try:
        compiled = jax.jit(function).lower(*jax.eval_shape(make_operands)).compile()
        memory = compiled.memory_analysis()
        size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        if size > devices.memory_bytes(device):
            return Measurement(Status.TOO_LARGE, size)
        if predicted_seconds > max_seconds:
            return Measurement(Status.TOO_SLOW, size)
        operands = make_operands()
        results = jax.block_until_ready(compiled(*operands))
        seconds = _seconds_per_call(lambda: compiled(*operands), asynchronous=device.platform != "cpu")
    except Exception as error:  # whatever it is, the other programs still run
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        status = Status.OUT_OF_MEMORY if "RESOURCE_EXHAUSTED" in reason else Status.FAILED
        return Measurement(status, size, reason=reason)
    return Measurement(Status.MEASURED, size, seconds, results)


def _seconds_per_call(call: Callable[[], object], asynchronous: bool) -> float:
    """Returns the median time of a call.

    Waits for each call, or with `asynchronous` for each slice of several calls: launching them back to back hides the
    host's share of the time.
    """

    def average_seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            result = call()
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / count

    spent, fastest = 0.0, math.inf
    while spent < _WARM_UP:
        seconds = average_seconds(1)
        fastest = min(fastest, seconds)
        spent += seconds
    count = math.ceil(_SLICE / fastest) if asynchronous else 1
    slices: list[float] = []
    while count * sum(slices) < _DURATION and len(slices) < _MAX_SLICES:
        slices.append(average_seconds(count))
    return statistics.median(slices)
