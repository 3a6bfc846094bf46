"""Lengths in powers of two, ours against XLA's attention: a table, a CSV, and a plot each of time and of memory."""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

import jax_flash

from . import _demo
from ._measure import Measured, Progress, Status, device_name, gibibytes, measure, memory_bytes

MIN_SEQ_LEN, MAX_SEQ_LEN = 512, 131072
MAX_SECONDS = 10.0  # of one call
CSV, TIME_PLOT, MEMORY_PLOT = "sweep.csv", "time.png", "memory.png"

_ATTENTIONS = {"jax_flash": _demo.ours, "XLA": _demo.xla}
_COLORS = {"jax_flash": "#c2410c", "XLA": "#6b7280"}
_STYLES = dict(zip(_demo.PASSES, ("--", "-"), strict=True))

Row = dict[str, Any]


def sweep(
    case: _demo.Case, device: jax.Device, max_seq_len: int, max_seconds: float, folder: pathlib.Path
) -> bool:
    """Runs a case at every length, prints the figures and writes them.

    Args:
      case: whose length is replaced.
      device: where it runs.
      max_seq_len: the longest length.
      max_seconds: what would take longer in one call is left out.
      folder: where the files go.

    Returns:
      Whether our attention ran, where memory and time allowed it.
    """
    can_plot = _has_matplotlib()
    if not can_plot:
        print("There is no matplotlib here, so no plots will be drawn: pip install '.[bench]' brings it.\n")
    lengths = [MIN_SEQ_LEN]
    while 2 * lengths[-1] <= max_seq_len:
        lengths.append(2 * lengths[-1])
    progress = Progress(len(lengths) * len(_ATTENTIONS) * len(_demo.PASSES))
    print(_head(), flush=True)
    rows: list[Row] = []
    with (folder / CSV).open("w", newline="") as file:
        for length, measured in _measure_lengths(case, device, lengths, max_seconds, progress):
            more = [_row(case, device, length, *key, one) for key, one in measured.items()]
            if not rows:
                writer = csv.DictWriter(file, more[0])
                writer.writeheader()
            writer.writerows(more)
            file.flush()  # a sweep that is interrupted leaves what it has
            rows += more
            progress.clear()
            print(f"{length:>8,}  " + "  ".join(str(one) for one in measured.values()), flush=True)
    print("\nMiB: arguments, results and temporaries of the compiled program.")
    for line in _ends(rows, max_seconds):
        print(line)
    written = [CSV]
    if can_plot:
        written += [TIME_PLOT, MEMORY_PLOT]
        _plot(rows, case, device, folder)
    print(f"\nWritten to {folder}: {', '.join(written)}")
    return not any(r["status"] == Status.FAILED for r in rows if r["attention"] == "jax_flash")


def _measure_lengths(
    case: _demo.Case, device: jax.Device, lengths: list[int], max_seconds: float, progress: Progress
) -> Iterator[tuple[int, dict[tuple[str, str], Measured]]]:
    """For each length the figures of every pass and attention, by their names."""
    predicted = dict.fromkeys(itertools.product(_demo.PASSES, _ATTENTIONS), 0.0)
    for length in lengths:
        at_length = dataclasses.replace(case, seq_len=length)
        measured = {}
        for name, attention in predicted:
            progress(f"{length:,}: {name}, {attention}")
            one = measure(
                functools.partial(_demo.PASSES[name], _ATTENTIONS[attention](at_length)),
                at_length.operands,
                device,
                predicted_seconds=predicted[name, attention],
                max_seconds=max_seconds,
            )
            one.results = ()  # their memory is needed for the next
            measured[name, attention] = one
            # Twice the length is four times the work.
            predicted[name, attention] = 4 * (one.seconds or predicted[name, attention])
        yield length, measured


def _row(
    case: _demo.Case, device: jax.Device, length: int, name: str, attention: str, measured: Measured
) -> Row:
    """One line of the CSV."""
    return {
        "seq_len": length,
        "pass": name,
        "attention": attention,
        "status": str(measured.status),
        "milliseconds": "" if measured.seconds is None else f"{1e3 * measured.seconds:.6g}",
        "bytes": "" if measured.bytes is None else measured.bytes,
        "memory_bytes": memory_bytes(device),
        "dtype": case.dtype,
        "batch": case.batch,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "causal": case.is_causal,
        "device": device_name(device),
        "jax": jax.__version__,
        "jax_flash": jax_flash.__version__,
        "reason": measured.reason,
    }


def _head() -> str:
    """Three lines: pass, attention, unit; each column as wide as a `Measured` is."""
    passes = [f"{name:>{19 * len(_ATTENTIONS) + 2}}" for name in _demo.PASSES]
    attentions = [f"{attention:>19}" for attention in _ATTENTIONS] * len(passes)
    units = [f"{'ms':>9} {'MiB':>9}"] * len(attentions)
    lines = ("", passes), ("", attentions), ("length", units)
    return "\n".join("  ".join([f"{first:>8}", *columns]) for first, columns in lines)


def _ends(rows: list[Row], max_seconds: float) -> Iterator[str]:
    """From which length on each attention was not measured, and why."""
    for name, attention in itertools.product(_demo.PASSES, _ATTENTIONS):
        first: dict[str, Row] = {}  # of each status
        for row in rows:
            if (row["pass"], row["attention"]) == (name, attention):
                first.setdefault(row["status"], row)
        for status, row in first.items():
            if status != Status.MEASURED:
                yield f"{name}, {attention}, from {row['seq_len']:,} on: {_why(row, max_seconds)}."


def _why(row: Row, max_seconds: float) -> str:
    match row["status"]:
        case Status.TOO_LARGE:
            there_are = gibibytes(row["memory_bytes"])
            return f"not run, as it needs {gibibytes(row['bytes'])} of memory and there are {there_are}"
        case Status.TOO_SLOW:
            return (
                f"not run, as a call is predicted to take longer than the {max_seconds:g} s of --max-seconds"
            )
        case status:
            return f"{status} ({row['reason']})"


def _has_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def _plot(rows: list[Row], case: _demo.Case, device: jax.Device, folder: pathlib.Path) -> None:
    """Draws time and memory against length; hollow points are of programs that were compiled but not run."""
    from matplotlib.figure import Figure

    lengths = sorted({row["seq_len"] for row in rows})
    plots = [
        (TIME_PLOT, "milliseconds", 1.0, "ms"),
        (MEMORY_PLOT, "bytes", 2.0**-20, "MiB of arguments, results and temporaries"),
    ]
    for file, column, unit, label in plots:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for name, attention in itertools.product(_demo.PASSES, _ATTENTIONS):
            line = [r for r in rows if (r["pass"], r["attention"]) == (name, attention) and r[column] != ""]
            points = [(r["seq_len"], unit * float(r[column])) for r in line]
            style = {"color": _COLORS[attention], "linestyle": _STYLES[name], "label": f"{attention}, {name}"}
            axes.plot([x for x, _ in points], [y for _, y in points], **style)
            for point, row in zip(points, line, strict=True):
                face = _COLORS[attention] if row["status"] == Status.MEASURED else "white"
                axes.plot(*point, "o", color=_COLORS[attention], markerfacecolor=face, markersize=5)
        if column == "bytes" and math.isfinite(rows[-1]["memory_bytes"]):
            limit = unit * rows[-1]["memory_bytes"]
            axes.axhline(limit, color="black", linewidth=0.8, linestyle=":")
            place = {"textcoords": "offset points", "ha": "right", "va": "top"}
            axes.annotate("what may be used", (lengths[-1], limit), (0, -4), fontsize=8, **place)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel("length of queries and keys, T")
        axes.set_ylabel(label)
        axes.set_title(f"{case.describe('T')}, {case.mask}, {device_name(device)}", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(folder / file, dpi=130)
