"""Draws what attention.py measured: speed against sequence length, and memory.

python benchmarks/plot.py benchmarks/results/h200.json
"""

import argparse
import json
import pathlib
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

Json = dict[str, Any]

NAMES = {"jax_flash": "jax_flash", "cudnn": "cuDNN (jax.nn)", "xla": "XLA (jax.nn)"}
COLORS = {"jax_flash": "#c2410c", "cudnn": "#2563eb", "xla": "#6b7280"}
# Inches. The first page shows the picture 740 pixels wide, at which 10 points are 11 pixels.
WIDTH, ROW_HEIGHT, LEGEND_HEIGHT = 9.2, 1.8, 0.7
FONTS = {"font.size": 10, "axes.titlesize": 10, "figure.titlesize": 11}


@mpl.rc_context(FONTS)
def draw(figures: pathlib.Path) -> pathlib.Path:
    """Draws the figures of a JSON file into a PNG beside it and returns that file's path."""
    report = json.loads(figures.read_text())
    facts = report["environment"]
    standard = [cell for cell in report["cells"] if cell["section"] == "standard"]
    float32 = [c for c in report["cells"] if c["section"] == "float32" and not c["is_causal"]]
    head_dims = sorted({cell["head_dim"] for cell in standard})
    measured = report["cells"] + report["memory"]
    names = [name for name in NAMES if any(name in cell["results"] for cell in measured)]

    # A row for each direction and one for the rest; a single head dim fits into one row.
    rows: list[list[Any]] = [[(direction, dim) for dim in head_dims] for direction in ("forward", "backward")]
    rows.append(["memory", "float32"] if float32 else ["memory"])
    if len(head_dims) <= 1:
        rows = [[panel for row in rows for panel in row]]
    figure = plt.figure(figsize=(WIDTH, ROW_HEIGHT * len(rows) + LEGEND_HEIGHT), layout="constrained")
    grid = figure.add_gridspec(len(rows), 1)
    for row, panels in enumerate(rows):
        places = grid[row].subgridspec(1, len(panels))
        speeds = []
        for column, panel in enumerate(panels):
            axes = figure.add_subplot(places[column])
            if panel == "memory":
                _memory(axes, report["memory"], names)
            elif panel == "float32":
                _bars(axes, float32, names)
            else:
                direction, dim = panel
                cells = [c for c in standard if c["head_dim"] == dim and c["direction"] == direction]
                _speed(axes, cells, names, on_gpu=facts["platform"] == "gpu")
                axes.set_title(f"{direction}, H = {dim}, {cells[0]['dtype'] if cells else ''}")
                speeds.append(axes)
        top = max((axes.get_ylim()[1] for axes in speeds), default=1)
        for axes in speeds:
            axes.set_ylim(0, top)

    handles = [Line2D([], [], color=COLORS[name], marker="o", label=NAMES[name]) for name in names]
    handles += [
        Line2D([], [], color="black", linestyle=style, label=label) for style, label in _STYLES.values()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    versions = [f"{name} {facts[name]}" for name in ("jax", "cuda", "cudnn", "driver") if facts.get(name)]
    figure.suptitle(f"{facts['device']} ({', '.join(versions)}, {facts['date'][:10]})")
    image = figures.with_suffix(".png")
    figure.savefig(image, dpi=200)
    plt.close(figure)
    return image


_STYLES = {False: ("-", "full"), True: ("--", "causal")}


def _speed(axes: Axes, cells: list[Json], names: list[str], *, on_gpu: bool) -> None:
    """TFLOP/s (GFLOP/s on a CPU) against the sequence length."""
    for name in names:
        for causal, (style, _) in _STYLES.items():
            points = sorted(
                (cell["seq_len"], cell["results"][name]["tflops"] * (1 if on_gpu else 1000))
                for cell in cells
                if cell["is_causal"] == causal and "tflops" in cell["results"].get(name, {})
            )
            if points:
                line = {"color": COLORS[name], "linestyle": style, "marker": "o", "markersize": 4}
                axes.plot(*zip(*points, strict=True), **line)
    _length_axis(axes, sorted({cell["seq_len"] for cell in cells}))
    axes.set_ylabel("TFLOP/s" if on_gpu else "GFLOP/s")


def _memory(axes: Axes, shapes: list[Json], names: list[str]) -> None:
    """Memory of one program of forward and backward against the sequence length."""
    for width, name in zip(
        (5, 2, 2), names, strict=False
    ):  # a wide line is seen under another of the same values
        points = sorted(
            (shape["seq_len"], shape["results"][name]["bytes"] / 2**20)
            for shape in shapes
            if shape["results"].get(name, {}).get("bytes") is not None
        )
        if points:
            axes.plot(
                *zip(*points, strict=True),
                color=COLORS[name],
                marker="o",
                markersize=3 + width,
                linewidth=width,
            )
    if shapes:
        shape = shapes[0]
        size = f"{shape['batch']} x T x {shape['num_heads']} x {shape['head_dim']}"
        axes.set_title(f"memory, {size}, {shape['dtype']}")
        axes.set_ylabel("both passes")
    _length_axis(axes, sorted({shape["seq_len"] for shape in shapes}))
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_locator(LogLocator(base=8))
    axes.yaxis.set_major_formatter(lambda mib, _: f"{mib:g} MiB" if mib < 1024 else f"{mib / 1024:g} GiB")
    axes.minorticks_off()


def _bars(axes: Axes, cells: list[Json], names: list[str]) -> None:
    """float32 at the longest length and the largest head dim measured, for each precision and direction."""
    largest, longest = max((cell["head_dim"], cell["seq_len"]) for cell in cells)
    cells = [cell for cell in cells if (cell["head_dim"], cell["seq_len"]) == (largest, longest)]
    names = [name for name in names if any("tflops" in cell["results"].get(name, {}) for cell in cells)]
    width = 0.8 / max(len(names), 1)
    for position, cell in enumerate(cells):
        for offset, name in enumerate(names):
            speed = cell["results"].get(name, {}).get("tflops", 0)
            axes.bar(position + (offset + 0.5) * width - 0.4, speed, width, color=COLORS[name])
    axes.set_xticks(range(len(cells)), [f"{c['precision']}\n{c['direction']}" for c in cells])
    axes.set_title(f"float32, T = {_length(longest)}, H = {largest}, full")
    axes.set_ylabel("TFLOP/s")
    axes.grid(axis="y", alpha=0.3)


def _length_axis(axes: Axes, lengths: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [_length(n) for n in lengths])
    axes.minorticks_off()
    axes.set_xlabel("T = S")
    axes.grid(alpha=0.3)


def _length(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("figures", type=pathlib.Path, nargs="+", help="JSON files that attention.py wrote")
    for path in parser.parse_args().figures:
        print(draw(path))
