"""`python -m jax_flash`: what was found here, and attention forward and backward, checked and timed on it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import platform
import sys
from collections.abc import Sequence

import jax
import numpy as np

import jax_flash

from . import _demo, _ffi, _sweep
from ._measure import Progress, device_name

_CASES = {
    "cpu": _demo.Case("float32", batch=1, seq_len=4096, heads=4, head_dim=64),
    "gpu": _demo.Case("bfloat16", batch=4, seq_len=4096, heads=16, head_dim=128),
}
_SMALL = {"batch": 1, "seq_len": 8, "heads": 1, "head_dim": 4}  # what a terminal can show
_OUTPUT = pathlib.Path("jax_flash_sweep")
_SIZES = ("batch", "seq_len", "heads", "head_dim")

_DESCRIPTION = """\
Runs attention forward and backward on this machine's best device, checks it against a float64 reference, and shows
its error, time and memory beside those of XLA's own attention. Without arguments it does so for a standard case,
full and causal; options of the case choose another one, --show prints its numbers, --sweep runs many lengths."""

_EPILOG = """\
examples:
  %(prog)s --seq-len 1000 --head-dim 72 --dtype float16 --causal
  %(prog)s --show --init ones
  %(prog)s --init npy qkv.npy
  %(prog)s --sweep --causal --output causal"""


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return seconds


class _Init(argparse.Action):
    """The name of a distribution, or the array of a file, which is read at once."""

    def __call__(self, parser, namespace, values, option_string=None):
        match values:
            case [name] if name in (*_demo.INITS, "ones"):
                init = name
            case ["npy", file]:
                try:
                    init = _demo.load(pathlib.Path(file))
                except (OSError, ValueError) as error:
                    raise argparse.ArgumentError(self, str(error)) from None
            case _:
                got = repr(" ".join(values))
                raise argparse.ArgumentError(self, f"must be normal, uniform, ones or npy FILE, got {got}")
        setattr(namespace, self.dest, init)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", choices=_CASES, help="default: the GPU if there is one that has kernels")

    case = parser.add_argument_group(
        "the case", "Any of these runs that one case; what is left out is as without arguments."
    )
    case.add_argument("--seq-len", type=_positive, metavar="T", help="length of the queries and of the keys")
    case.add_argument("--head-dim", type=_positive, metavar="H")
    case.add_argument("--heads", type=_positive, metavar="N")
    case.add_argument("--batch", type=_positive, metavar="B")
    case.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"))
    case.add_argument("--causal", action="store_true", help="query i sees keys 0 to i only")
    case.add_argument(
        "--init",
        action=_Init,
        nargs="+",
        metavar=("normal|uniform|ones|npy", "FILE"),
        help="Q, K and V: normal (the default), uniform in [0, 1), ones, or npy and a file, where they are stacked "
        "as [3, T, N, H] or, for one head, [3, T, H]; they are converted to the dtype",
    )

    modes = parser.add_argument_group("more to see").add_mutually_exclusive_group()
    modes.add_argument(
        "--show",
        action="store_true",
        help="print Q, K, V and the output, and the first values of dQ, dK and dV beside the reference's; sizes "
        f"that are left out are small: {', '.join(f'{n} {x}' for n, x in _SMALL.items())}".replace("_", "-"),
    )
    modes.add_argument(
        "--sweep",
        action="store_true",
        help=f"lengths from {_sweep.MIN_SEQ_LEN} in powers of two, ours and XLA's attention: a table, a CSV and "
        "two plots of time and memory; the batch that is left out is 1",
    )
    sweep = parser.add_argument_group("of the sweep")
    sweep.add_argument(
        "--max-seq-len",
        type=_positive,
        metavar="T",
        help=f"the longest length (default: {_sweep.MAX_SEQ_LEN})",
    )
    sweep.add_argument(
        "--max-seconds",
        type=_seconds,
        metavar="S",
        help=f"leave out what is predicted to take longer in one call (default: {_sweep.MAX_SECONDS:g})",
    )
    sweep.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help=f"where the files go (default: {_OUTPUT})"
    )
    return parser


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuses options that do not go together, and makes the folder of the sweep."""
    if options.sweep:
        if options.seq_len is not None:
            parser.error("--seq-len does not go with --sweep, which runs many lengths: see --max-seq-len")
        if isinstance(options.init, np.ndarray):
            parser.error("--init npy does not go with --sweep: a file has one length")
        if options.max_seq_len is not None and options.max_seq_len < _sweep.MIN_SEQ_LEN:
            parser.error(f"--max-seq-len must be at least {_sweep.MIN_SEQ_LEN}, got {options.max_seq_len}")
        try:
            (options.output or _OUTPUT).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--output: {error}")
    else:
        for name in ("max_seq_len", "max_seconds", "output"):
            if getattr(options, name) is not None:
                parser.error(f"--{name.replace('_', '-')} goes with --sweep only")
    if isinstance(options.init, np.ndarray):
        for name, size in zip(_SIZES, options.init.shape[1:], strict=True):
            if getattr(options, name) not in (None, size):
                option = name.replace("_", "-")
                parser.error(
                    f"--{option} must be {size}, as in the file of --init, got {getattr(options, name)}"
                )


def _cases(options: argparse.Namespace, platform: str) -> list[_demo.Case]:
    """The cases to run: one, or the standard ones where no option describes a case."""
    fields = {name: getattr(options, name) for name in (*_SIZES, "dtype", "init")}
    given = {name: value for name, value in fields.items() if value is not None}
    case = _CASES[platform]
    if not (given or options.causal or options.show or options.sweep):
        return [case, dataclasses.replace(case, is_causal=True)]
    if options.show:
        case = dataclasses.replace(case, **_SMALL)
    if options.sweep:
        case = dataclasses.replace(case, batch=1)
    if isinstance(options.init, np.ndarray):
        case = dataclasses.replace(case, **dict(zip(_SIZES, options.init.shape[1:], strict=True)))
    return [dataclasses.replace(case, **given, is_causal=options.causal)]


def _device(name: str | None) -> jax.Device:
    """The device of a name, or the best one.

    Raises:
      RuntimeError: there is none of that name.
      NotImplementedError: there is one, and no kernels for it.
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
            print(f"Not on {device.device_kind}: {error}\n")
        else:
            return device
    return jax.devices("cpu")[0]


def _describe(device: jax.Device) -> str:
    info = jax_flash.build_info()
    cuda = "without CUDA kernels"
    if info["cuda"]:
        archs = info["archs"].replace(";", ", ")
        cuda = f"CUDA kernels for {archs} and newer, by nvcc {info['cuda']} ({info['nvcc']})"
    return "\n".join(
        [
            f"jax_flash  {jax_flash.__version__}, on jax {jax.__version__}, Python {platform.python_version()}",
            f"device     {device_name(device)}",
            f"library    XLA FFI {info['ffi_version']} (jaxlib {info['jaxlib']}), {cuda}",
            f"kernels    cpu{_summarise(info['kernels'])}",
        ]
    )


def _summarise(kernels: list[str]) -> str:
    """The values of each word of the kernels' names, which are alike: direction, arch, arithmetic, head dim."""
    columns = zip(*(name.split() for name in kernels), strict=True)
    words = "; ".join(", ".join(dict.fromkeys(column)) for column in columns)
    return f", and {len(kernels)} for CUDA: {words}" if kernels else ""


def _run_cases(cases: list[_demo.Case], device: jax.Device, show: bool) -> bool:
    """Runs and prints cases; returns whether every check passed."""
    progress = Progress(len(cases) * _demo.STEPS)
    try:
        comparisons = [_demo.compare(case, device, progress) for case in cases]
    except _demo.CaseError as error:
        print(f"Not run: {error}", file=sys.stderr)
        return False
    finally:
        progress.clear()
    if show:
        for case, comparison in zip(cases, comparisons, strict=True):
            print(_demo.show(case, comparison))
    passed = all(comparison.passed for comparison in comparisons)
    print(_demo.TABLE_HEAD)
    print("\n".join(line for comparison in comparisons for line in comparison.lines))
    print("\nMiB: arguments, results and temporaries of the compiled program.")
    for comparison in comparisons:
        print("".join(f"{note}\n" for note in comparison.notes), end="")
    print("Every result is as close to the reference as it should be." if passed else "A CHECK FAILED.")
    return passed


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _check(parser, options)
    jax.config.update("jax_enable_x64", True)  # for the reference
    if options.sweep:
        # XLA's attention gets the memory there is. Read where JAX first finds its devices.
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    try:
        device = _device(options.device)
    except RuntimeError as error:
        parser.error(f"--device {options.device}: {error}")
    cases = _cases(options, device.platform)
    length, of_sweep = ("T", f", {cases[0].mask}") if options.sweep else (cases[0].seq_len, "")
    print(_describe(device))
    print(f"inputs     {cases[0].describe(length)}: batch, length, heads, head dim{of_sweep}\n", flush=True)
    with jax.default_device(device):
        if options.sweep:
            longest = options.max_seq_len or _sweep.MAX_SEQ_LEN
            seconds = options.max_seconds or _sweep.MAX_SECONDS
            passed = _sweep.sweep(cases[0], device, longest, seconds, options.output or _OUTPUT)
        else:
            passed = _run_cases(cases, device, options.show)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
