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
from .comparison import Comparison
from .measure import MEMORY_NOTE
from .progress import Progress
from .sweep import MAX_SECONDS, MAX_SEQ_LEN, sweep

_NEXT = f"""\
In a program, with arrays of [batch, length, heads, head dim]:
  import jax_flash
  out = jax_flash.flash_attention(query, key, value, is_causal=True)
Next:
  python -m jax_flash --sweep   times lengths up to {MAX_SEQ_LEN:,}
  python -m jax_flash --help    lists the options: sizes, dtypes, values
  README.md and docs/           describe what flash_attention can do"""


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
    print(_describe_package(), flush=True)
    try:
        device = devices.choose(options.device)
    except RuntimeError as error:
        parser.error(f"--device {options.device}: {error}")

    cases = arguments.cases(options, device.platform)
    length, mask = ("T", f", {cases[0].mask}") if options.sweep else (cases[0].seq_len, "")
    print(f"device     {devices.describe(device)}")
    print(f"inputs     {cases[0].describe(length)}: batch, length, heads, head dim{mask}\n", flush=True)
    with jax.default_device(device):
        if options.sweep:
            max_seq_len = options.max_seq_len or MAX_SEQ_LEN
            max_seconds = options.max_seconds or MAX_SECONDS
            passed = sweep(cases[0], device, max_seq_len, max_seconds, output)
        else:
            passed = _run_cases(cases, device, options.show)
    if passed and arguments.are_standard(options):
        print(f"\n{_NEXT}")
    return 0 if passed else 1


def _describe_package() -> str:
    info = jax_flash.build_info()
    cuda = "without CUDA kernels"
    if info["cuda"]:
        archs = info["archs"].replace(";", ", ")
        cuda = f"CUDA kernels for {archs} and newer, compiled by nvcc {info['cuda']} ({info['nvcc']})"
    return "\n".join(
        [
            f"jax_flash  {jax_flash.__version__}, on jax {jax.__version__}, Python {platform.python_version()}",
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
    try:
        with Progress(len(cases) * comparison.STEPS) as progress:
            comparisons = [Comparison(case, device, progress) for case in cases]
            for head, stage in comparison.STAGES.items():
                progress.print(head)
                for compared in comparisons:
                    for row in stage(compared):
                        progress.print(row)
                progress.print("")
    except comparison.CaseError as error:
        print(f"Not run: {error}", file=sys.stderr)
        return False
    if show:
        for compared in comparisons:
            print(compared.show())
    print(MEMORY_NOTE)
    for compared in comparisons:
        for note in compared.notes:
            print(note)
    failures = [failure for compared in comparisons for failure in compared.failures]
    for failure in failures:
        print(f"FAILED: {failure}")
    print("A CHECK FAILED." if failures else "All checks passed.")
    return not failures
