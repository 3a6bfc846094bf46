"""The arguments of the command line, their checks, and the cases that they select."""

from __future__ import annotations

import argparse
import dataclasses
import pathlib

import numpy as np

from . import sweep
from .case import INITS, Case, load

STANDARD_CASES = {
    "cpu": Case("float32", batch=1, seq_len=2048, heads=4, head_dim=64),
    "gpu": Case("bfloat16", batch=4, seq_len=4096, heads=16, head_dim=128),
}
DEFAULT_OUTPUT = pathlib.Path("jax_flash_sweep")
_DTYPES = ("bfloat16", "float16", "float32", "float64")
_SIZES = ("batch", "seq_len", "heads", "head_dim")
_SHOW_SIZES = {"batch": 1, "seq_len": 8, "heads": 1, "head_dim": 4}  # fit on a terminal

_DESCRIPTION = """\
Checks attention on this machine's best device against float64 and times it
beside XLA's, for a standard case or yours. Details: docs/command_line.md"""


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
    """Returns the parser; its help fits on a screen of 24 lines."""
    parser = argparse.ArgumentParser(
        prog="python -m jax_flash",
        usage="%(prog)s [options]",
        description=_DESCRIPTION,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=26),
        allow_abbrev=False,
        add_help=False,
    )
    general = parser.add_argument_group()
    general.add_argument("-h", "--help", action="help", help="print this and exit")
    general.add_argument("--device", choices=STANDARD_CASES, help="default: a GPU with kernels, else the CPU")

    case = parser.add_argument_group("a case of yours")
    case.add_argument("--seq-len", type=_positive, metavar="T", help="number of queries and of keys")
    case.add_argument("--head-dim", type=_positive, metavar="H", help="size of a query, key or value")
    case.add_argument("--heads", type=_positive, metavar="N", help="number of heads")
    case.add_argument("--batch", type=_positive, metavar="B", help="number of sequences")
    case.add_argument("--dtype", choices=_DTYPES, metavar="DTYPE", help=", ".join(_DTYPES))
    case.add_argument("--causal", action="store_true", help="query i sees keys 0 to i only")
    case.add_argument(
        "--init", action=_Init, nargs="+", metavar=("NAME", "FILE"), help=f"{', '.join(INITS)}, or npy FILE"
    )

    more = parser.add_argument_group("other modes")
    modes = more.add_mutually_exclusive_group()
    modes.add_argument("--show", action="store_true", help="print Q, K, V and the results of a tiny case")
    modes.add_argument("--sweep", action="store_true", help="print a table, and write a CSV and plots")
    more.add_argument(
        "--max-seq-len", type=_positive, metavar="T", help=f"end of the sweep (default: {sweep.MAX_SEQ_LEN})"
    )
    more.add_argument(
        "--max-seconds",
        type=_seconds,
        metavar="S",
        help=f"skip programs that take longer (default: {sweep.MAX_SECONDS:g})",
    )
    more.add_argument(
        "--output", type=pathlib.Path, metavar="DIR", help=f"folder of its files (default: {DEFAULT_OUTPUT})"
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


def are_standard(options: argparse.Namespace) -> bool:
    """Returns whether the options select no case and no mode."""
    return not (_given(options) or options.causal or options.show or options.sweep)


def cases(options: argparse.Namespace, platform: str) -> list[Case]:
    """Returns the case that the options select, or the standard case, full and causal, if none selects one."""
    case = STANDARD_CASES[platform]
    if are_standard(options):
        return [case, dataclasses.replace(case, is_causal=True)]
    if options.show:
        case = dataclasses.replace(case, **_SHOW_SIZES)
    if options.sweep:
        case = dataclasses.replace(case, batch=1)
    if isinstance(options.init, np.ndarray):
        case = dataclasses.replace(case, **_sizes_of(options.init))
    return [dataclasses.replace(case, **_given(options), is_causal=options.causal)]


def _given(options: argparse.Namespace) -> dict[str, int | str | np.ndarray]:
    """Returns the fields of a case that the options set."""
    fields = {name: getattr(options, name) for name in (*_SIZES, "dtype", "init")}
    return {name: value for name, value in fields.items() if value is not None}


def _sizes_of(qkv: np.ndarray) -> dict[str, int]:
    return dict(zip(_SIZES, qkv.shape[1:], strict=True))
