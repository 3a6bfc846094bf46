"""The device that runs a case: its choice, name and memory."""

from __future__ import annotations

import math
import os
import pathlib
import platform
import re

import jax

from .. import _ffi


def choose(name: str | None) -> jax.Device:
    """Returns the first device of a platform, or by default the best device that has kernels.

    Raises:
      RuntimeError: this machine has no device of that platform.
      NotImplementedError: it has one, but this build has no kernels for it.
    """
    if name is not None:
        device = jax.devices(name)[0]
        if name == "gpu":
            _ffi.check_gpu_kernels()
        return device
    device = jax.devices()[0]
    if device.platform == "gpu":
        try:
            _ffi.check_gpu_kernels()
        except NotImplementedError as error:
            print(f"not used   {device.device_kind}: {error}")
        else:
            return device
    return jax.devices("cpu")[0]


def describe(device: jax.Device) -> str:
    """Returns a GPU's model, or a CPU's number of cores and architecture."""
    if device.platform == "cpu":
        return f"{os.cpu_count()} CPU cores, {platform.machine()}"
    return device.device_kind


def memory_bytes(device: jax.Device) -> float:
    """Returns the memory available to programs: JAX's limit on a GPU, four fifths of the free memory on a CPU."""
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit", math.inf)
    free = float(re.search(r"MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text())[1]) * 1024
    try:  # a container may have a lower limit
        limit, used = (pathlib.Path(f"/sys/fs/cgroup/memory.{x}").read_text() for x in ("max", "current"))
        free = min(free, float(limit) - float(used))
    except (OSError, ValueError):  # no such file, or it says "max"
        pass
    return int(0.8 * free)
