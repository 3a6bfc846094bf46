"""Runs what the command line asks for."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence

import jax

import jax_flash

from . import arguments, comparison, devices
from .case import Case
from .measure import MEMORY_NOTE
from .progress import Progress
from .sweep import MAX_SECONDS, MAX_SEQ_LEN, sweep


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit status."""
    parser = arguments.make_parser()
    options = parser.parse_args(argv)
    arguments.check(parser, options)
    output = options.output or arguments.DEFAULT_OUTPUT
    if options.sweep:
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output: {error}")
        # Leaves XLA's attention as much memory as possible. Must be set before JAX initializes its devices.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    jax.config.update("jax_enable_x64", True)  # for the reference
    try:
        device = devices.choose(options.device)
    except RuntimeError as error:
        parser.error(f"--device {options.device}: {error}")

    cases = arguments.cases(options, device.platform)
    length, mask = ("T", f", {cases[0].mask}") if options.sweep else (cases[0].seq_len, "")
    print(_describe_package(device))
    print(f"inputs     {cases[0].describe(length)}: batch, length, heads, head dim{mask}\n", flush=True)
    with jax.default_device(device):
        if options.sweep:
            max_seq_len = options.max_seq_len or MAX_SEQ_LEN
            max_seconds = options.max_seconds or MAX_SECONDS
            passed = sweep(cases[0], device, max_seq_len, max_seconds, output)
        else:
            passed = _run_cases(cases, device, options.show)
    return 0 if passed else 1


def _describe_package(device: jax.Device) -> str:
    info = jax_flash.build_info()
    cuda = "without CUDA kernels"
    if info["cuda"]:
        archs = info["archs"].replace(";", ", ")
        cuda = f"CUDA kernels for {archs} and newer, compiled by nvcc {info['cuda']} ({info['nvcc']})"
    return "\n".join(
        [
            f"jax_flash  {jax_flash.__version__}, on jax {jax.__version__}, Python {platform.python_version()}",
            f"device     {devices.describe(device)}",
            f"library    XLA FFI {info['ffi_version']} (jaxlib {info['jaxlib']}), {cuda}",
            f"kernels    cpu{_summarize(info['kernels'])}",
        ]
    )


def _summarize(kernels: list[str]) -> str:
    """Counts the CUDA kernels and lists the values of each word of their names (direction, arch, ..., head dim)."""
    columns = zip(*(name.split() for name in kernels), strict=True)
    words = "; ".join(", ".join(dict.fromkeys(column)) for column in columns)
    return f", and {len(kernels)} for CUDA: {words}" if kernels else ""


def _run_cases(cases: list[Case], device: jax.Device, show: bool) -> bool:
    """Runs and prints cases; returns whether every check passed."""
    progress = Progress(len(cases) * comparison.STEPS)
    try:
        comparisons = [comparison.compare(case, device, progress) for case in cases]
    except comparison.CaseError as error:
        print(f"Not run: {error}", file=sys.stderr)
        return False
    finally:
        progress.clear()
    if show:
        for case, compared in zip(cases, comparisons, strict=True):
            print(comparison.show(case, compared))
    print(comparison.TABLE_HEAD)
    for compared in comparisons:
        print("\n".join(compared.lines))
    print(f"\n{MEMORY_NOTE}")
    for compared in comparisons:
        print("".join(f"{note}\n" for note in compared.notes), end="")
    passed = all(compared.passed for compared in comparisons)
    print("All checks passed." if passed else "A CHECK FAILED.")
    return passed
