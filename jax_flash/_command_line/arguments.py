"""The arguments of the command line, their checks, and the cases that they select."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import numpy as np

from . import sweep
from .case import INITS, Case, load

STANDARD_CASES = {
    "cpu": Case("float32", batch=1, seq_len=4096, heads=4, head_dim=64),
    "gpu": Case("bfloat16", batch=4, seq_len=4096, heads=16, head_dim=128),
}
DEFAULT_OUTPUT = pathlib.Path("jax_flash_sweep")
_SIZES = ("batch", "seq_len", "heads", "head_dim")
_SHOW_SIZES = {"batch": 1, "seq_len": 8, "heads": 1, "head_dim": 4}  # fit on a terminal

_DESCRIPTION = """\
Runs attention forward and backward on this machine's best device, checks it against a
float64 reference, and prints its error, time and memory beside XLA's attention. Without
arguments it runs a standard case, full and causal. Options select another case, print
its numbers (--show) or run many lengths (--sweep)."""

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


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


class _Init(argparse.Action):
    """Stores the name of a distribution, or the array read from a file."""

    def __call__(self, parser, namespace, values, option_string=None):
        match values:
            case [name] if name in INITS:
                init = name
            case ["npy", file]:
                try:
                    init = load(pathlib.Path(file))
                except (OSError, ValueError) as error:
                    raise argparse.ArgumentError(self, str(error)) from None
            case _:
                got = repr(" ".join(values))
                raise argparse.ArgumentError(self, f"must be {', '.join(INITS)} or npy FILE, got {got}")
        setattr(namespace, self.dest, init)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device",
        choices=STANDARD_CASES,
        help="default: a GPU that this build has kernels for, else the CPU",
    )

    case = parser.add_argument_group(
        "case", "Any of these runs a single case. The others default to the standard case."
    )
    case.add_argument("--seq-len", type=_positive, metavar="T", help="number of queries and of keys")
    case.add_argument("--head-dim", type=_positive, metavar="H")
    case.add_argument("--heads", type=_positive, metavar="N")
    case.add_argument("--batch", type=_positive, metavar="B")
    case.add_argument("--dtype", choices=("bfloat16", "float16", "float32", "float64"))
    case.add_argument("--causal", action="store_true", help="query i sees keys 0 to i only")
    case.add_argument(
        "--init",
        action=_Init,
        nargs="+",
        metavar=("|".join([*INITS, "npy"]), "FILE"),
        help="values of Q, K and V: normal (default), uniform in [0, 1), ones, or a .npy file that holds them "
        "stacked, [3, T, N, H] or for one head [3, T, H]; they are converted to the dtype",
    )

    modes = parser.add_argument_group("modes").add_mutually_exclusive_group()
    show_sizes = ", ".join(f"{_option(name)} {size}" for name, size in _SHOW_SIZES.items())
    modes.add_argument(
        "--show",
        action="store_true",
        help="print Q, K, V and the output, and the first values of dQ, dK and dV beside the reference's; "
        f"defaults to {show_sizes}",
    )
    modes.add_argument(
        "--sweep",
        action="store_true",
        help=f"time our attention and XLA's at lengths from {sweep.MIN_SEQ_LEN} in powers of two: a table, a CSV, "
        "and plots of time and memory; defaults to --batch 1",
    )

    sweep_group = parser.add_argument_group("with --sweep")
    sweep_group.add_argument(
        "--max-seq-len", type=_positive, metavar="T", help=f"longest length (default: {sweep.MAX_SEQ_LEN})"
    )
    sweep_group.add_argument(
        "--max-seconds",
        type=_seconds,
        metavar="S",
        help=f"skip a program if one call is predicted to take longer (default: {sweep.MAX_SECONDS:g})",
    )
    sweep_group.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help=f"folder of the files (default: {DEFAULT_OUTPUT})"
    )
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exits with an error if options contradict each other."""
    if options.sweep:
        if options.seq_len is not None:
            parser.error("--seq-len does not go with --sweep, which runs many lengths; use --max-seq-len")
        if isinstance(options.init, np.ndarray):
            parser.error("--init npy does not go with --sweep: a file has one length")
        if options.max_seq_len is not None and options.max_seq_len < sweep.MIN_SEQ_LEN:
            parser.error(f"--max-seq-len must be at least {sweep.MIN_SEQ_LEN}, got {options.max_seq_len}")
    else:
        for name in ("max_seq_len", "max_seconds", "output"):
            if getattr(options, name) is not None:
                parser.error(f"{_option(name)} requires --sweep")
    if isinstance(options.init, np.ndarray):
        for name, size in _sizes_of(options.init).items():
            got = getattr(options, name)
            if got not in (None, size):
                parser.error(f"{_option(name)} must be {size}, as in the file of --init, got {got}")


def cases(options: argparse.Namespace, platform: str) -> list[Case]:
    """Returns the case that the options select, or the standard case, full and causal, if none selects one."""
    fields = {name: getattr(options, name) for name in (*_SIZES, "dtype", "init")}
    given = {name: value for name, value in fields.items() if value is not None}
    case = STANDARD_CASES[platform]
    if not (given or options.causal or options.show or options.sweep):
        return [case, dataclasses.replace(case, is_causal=True)]
    if options.show:
        case = dataclasses.replace(case, **_SHOW_SIZES)
    if options.sweep:
        case = dataclasses.replace(case, batch=1)
    if isinstance(options.init, np.ndarray):
        case = dataclasses.replace(case, **_sizes_of(options.init))
    return [dataclasses.replace(case, **given, is_causal=options.causal)]


def _sizes_of(qkv: np.ndarray) -> dict[str, int]:
    return dict(zip(_SIZES, qkv.shape[1:], strict=True))
