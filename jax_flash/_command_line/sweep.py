"""Time and memory of our attention and XLA's at lengths in powers of two: a table, a CSV and two plots."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

import jax_flash

from . import devices
from .case import ATTENTIONS, PASSES, Case
from .measure import MEMORY_NOTE, Measurement, Status, gibibytes, measure
from .progress import Progress

MIN_SEQ_LEN, MAX_SEQ_LEN = 512, 131072
MAX_SECONDS = 10.0  # for one call
CSV, TIME_PLOT, MEMORY_PLOT = "sweep.csv", "time.png", "memory.png"

_PROGRAMS = list(itertools.product(PASSES, ATTENTIONS))
_COLORS = {"jax_flash": "#c2410c", "XLA": "#6b7280"}
_LINE_STYLES = dict(zip(PASSES, ("--", "-"), strict=True))

Row = dict[str, Any]


def sweep(case: Case, device: jax.Device, max_seq_len: int, max_seconds: float, folder: pathlib.Path) -> bool:
    """Measures a case at every length, prints the figures and writes the files.

    Args:
      case: its length is replaced.
      device: where it runs.
      max_seq_len: the longest length.
      max_seconds: programs are skipped if a call is predicted to take longer.
      folder: where the files are written.

    Returns:
      Whether our attention ran wherever memory and time allowed.
    """
    can_plot = _has_matplotlib()
    if not can_plot:
        print("matplotlib is not installed, so no plots will be drawn: pip install '.[bench]' installs it.\n")
    lengths = [MIN_SEQ_LEN]
    while 2 * lengths[-1] <= max_seq_len:
        lengths.append(2 * lengths[-1])
    print(_table_head(), flush=True)
    rows: list[Row] = []
    with (folder / CSV).open("w", newline="") as file, Progress(len(lengths) * len(_PROGRAMS)) as progress:
        for length, measurements in _measure_lengths(case, device, lengths, max_seconds, progress):
            new_rows = [_row(case, device, length, *key, one) for key, one in measurements.items()]
            if not rows:
                writer = csv.DictWriter(file, new_rows[0])
                writer.writeheader()
            writer.writerows(new_rows)
            file.flush()  # an interrupted sweep keeps its rows
            rows += new_rows
            progress.print(f"{length:>8,}  " + "  ".join(map(str, measurements.values())))
    print(f"\n{MEMORY_NOTE}")
    for line in _reasons(rows, max_seconds):
        print(line)
    written = [CSV]
    if can_plot:
        written += [TIME_PLOT, MEMORY_PLOT]
        plot(rows, f"{case.describe('T')}, {case.mask}, {devices.describe(device)}", folder)
    print(f"\nWritten to {folder}: {', '.join(written)}")
    return not any(row["status"] == Status.FAILED for row in rows if row["attention"] == "jax_flash")


def _measure_lengths(
    case: Case, device: jax.Device, lengths: list[int], max_seconds: float, progress: Progress
) -> Iterator[tuple[int, dict[tuple[str, str], Measurement]]]:
    """Yields each length and the measurements of its programs."""
    predicted = dict.fromkeys(_PROGRAMS, 0.0)
    for length in lengths:
        case = dataclasses.replace(case, seq_len=length)
        measurements = {}
        for name, attention in _PROGRAMS:
            progress(f"{length:,}: {name}, {attention}")
            measured = measure(
                case.program(name, attention),
                case.operands,
                device,
                predicted_seconds=predicted[name, attention],
                max_seconds=max_seconds,
            )
            measured.results = ()  # frees their memory for the next program
            measurements[name, attention] = measured
            # Twice the length is four times the work.
            predicted[name, attention] = 4 * (measured.seconds or predicted[name, attention])
        yield length, measurements


def _row(
    case: Case, device: jax.Device, length: int, name: str, attention: str, measured: Measurement
) -> Row:
    """Returns one row of the CSV."""
    return {
        "seq_len": length,
        "pass": name,
        "attention": attention,
        "status": str(measured.status),
        "milliseconds": "" if measured.seconds is None else f"{1e3 * measured.seconds:.6g}",
        "bytes": "" if measured.bytes is None else measured.bytes,
        "memory_bytes": devices.memory_bytes(device),
        "dtype": case.dtype,
        "batch": case.batch,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "causal": case.is_causal,
        "device": devices.describe(device),
        "jax": jax.__version__,
        "jax_flash": jax_flash.__version__,
        "reason": measured.reason,
    }


def _table_head() -> str:
    """Returns three lines: pass, attention, unit. Each column is as wide as a `Measurement`."""
    passes = [f"{name:>{19 * len(ATTENTIONS) + 2}}" for name in PASSES]
    attentions = [f"{attention:>19}" for attention in ATTENTIONS] * len(PASSES)
    units = [f"{'ms':>9} {'MiB':>9}"] * len(attentions)
    lines = ("", passes), ("", attentions), ("length", units)
    return "\n".join("  ".join([f"{first:>8}", *columns]) for first, columns in lines)


def _reasons(rows: list[Row], max_seconds: float) -> Iterator[str]:
    """Yields the length from which a program has no time, and the reason."""
    for program in _PROGRAMS:
        first: dict[str, Row] = {}  # by status
        for row in rows:
            if (row["pass"], row["attention"]) == program:
                first.setdefault(row["status"], row)
        for status, row in first.items():
            if status != Status.MEASURED:
                yield f"{', '.join(program)}, from {row['seq_len']:,} on: {_reason(row, max_seconds)}."


def _reason(row: Row, max_seconds: float) -> str:
    match row["status"]:
        case Status.TOO_LARGE:
            needed, available = gibibytes(row["bytes"]), gibibytes(row["memory_bytes"])
            return f"not run, as it needs {needed} of memory and {available} are available"
        case Status.TOO_SLOW:
            return f"not run, as one call is predicted to take more than {max_seconds:g} s (--max-seconds)"
        case status:
            return f"{status} ({row['reason']})"


def _has_matplotlib() -> bool:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def plot(rows: list[Row], title: str, folder: pathlib.Path) -> None:
    """Plots time and memory over the length; a hollow marker is a program that was compiled but not run."""
    from matplotlib.figure import Figure

    lengths = sorted({row["seq_len"] for row in rows})
    plots = [
        (TIME_PLOT, "milliseconds", 1.0, "ms"),
        (MEMORY_PLOT, "bytes", 2.0**-20, "MiB of arguments, results and temporaries"),
    ]
    for file, column, unit, label in plots:
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for name, attention in _PROGRAMS:
            line = [r for r in rows if (r["pass"], r["attention"]) == (name, attention) and r[column] != ""]
            points = [(row["seq_len"], unit * float(row[column])) for row in line]
            color = _COLORS[attention]
            style = {"color": color, "linestyle": _LINE_STYLES[name], "label": f"{attention}, {name}"}
            axes.plot([x for x, _ in points], [y for _, y in points], **style)
            for point, row in zip(points, line, strict=True):
                face = color if row["status"] == Status.MEASURED else "white"
                axes.plot(*point, "o", color=color, markerfacecolor=face, markersize=5)
        if column == "bytes" and math.isfinite(rows[-1]["memory_bytes"]):
            limit = unit * rows[-1]["memory_bytes"]
            axes.axhline(limit, color="black", linewidth=0.8, linestyle=":")
            place = {"textcoords": "offset points", "ha": "right", "va": "top"}
            axes.annotate("available memory", (lengths[-1], limit), (0, -4), fontsize=8, **place)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel("sequence length, T")
        axes.set_ylabel(label)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(folder / file, dpi=130)
