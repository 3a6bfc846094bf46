"""Lengths in powers of two, ours against XLA's attention: a table, a CSV, and a plot each of time and of memory."""

from __future__ import annotations

import csv
import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax

import jax_flash

from . import _demo
from ._measure import Measured, Progress, Status, gibibytes, measure, memory_bytes

MIN_SEQ_LEN, MAX_SEQ_LEN = 512, 131072
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
      folder: where the files go; made where there is none.

    Returns:
      Whether our attention ran, where memory and time allowed it.
    """
    folder.mkdir(parents=True, exist_ok=True)
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
    predicted = {(name, attention): 0.0 for name in _demo.PASSES for attention in _ATTENTIONS}
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
        "memory_bytes": int(memory_bytes(device)),
        "dtype": case.dtype,
        "batch": case.batch,
        "heads": case.heads,
        "head_dim": case.head_dim,
        "causal": case.is_causal,
        "device": device.device_kind,
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
    """Where each attention ended before the last length, and why."""
    for name in _demo.PASSES:
        for attention in _ATTENTIONS:
            ended = [
                r for r in rows
                if (r["pass"], r["attention"]) == (name, attention) and r["status"] != Status.MEASURED
            ]  # fmt: skip
            if not ended:
                continue
            row = ended[0]
            why = {
                Status.TOO_LARGE: lambda row: (
                    f"gives up: its program needs {gibibytes(row['bytes'])} and there are "
                    f"{gibibytes(row['memory_bytes'])}"
                ),
                Status.OUT_OF_MEMORY: lambda row: "gives up: out of memory",
                Status.TOO_SLOW: lambda row: (
                    f"is left out: a call would take more than the {max_seconds:g} s of --max-seconds"
                ),
                Status.FAILED: lambda row: f"failed: {row['reason']}",
            }[row["status"]]
            yield f"From {row['seq_len']:,} on, {name}, {attention} {why(row)}."


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
    title = f"{case.describe('T')}, {case.mask}, {device.device_kind}"
    plots = {
        TIME_PLOT: ("milliseconds", "ms", 1.0),
        MEMORY_PLOT: ("bytes", "MiB: arguments, results, temporaries", 2.0**-20),
    }
    for file, (column, label, unit) in plots.items():
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.add_subplot()
        for name in _demo.PASSES:
            for attention in _ATTENTIONS:
                of_both = [r for r in rows if (r["pass"], r["attention"]) == (name, attention)]
                points = [(r["seq_len"], unit * float(r[column])) for r in of_both if r[column] != ""]
                filled = [r["status"] == Status.MEASURED for r in of_both if r[column] != ""]
                if not points:
                    continue
                color = _COLORS[attention]
                axes.plot(
                    *zip(*points, strict=True),
                    color=color,
                    linestyle=_STYLES[name],
                    label=f"{attention}, {name}",
                )
                for point, full in zip(points, filled, strict=True):
                    axes.plot(
                        *point, "o", color=color, markerfacecolor=color if full else "white", markersize=5
                    )
        if column == "bytes":
            axes.axhline(unit * rows[-1]["memory_bytes"], color="black", linewidth=0.8, linestyle=":")
            axes.annotate(
                "memory of the device", (lengths[0], unit * rows[-1]["memory_bytes"]), (0, 3),
                textcoords="offset points", fontsize=8,
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [f"{n // 1024}k" if n >= 1024 else str(n) for n in lengths])
        axes.minorticks_off()
        axes.set_xlabel("length of queries and keys, T")
        axes.set_ylabel(label)
        axes.set_title(title, fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(folder / file, dpi=130)
