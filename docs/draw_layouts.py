"""Draws the pictures of long_context.md: who computes what of a sequence over four devices.

    python docs/draw_layouts.py     # needs matplotlib; writes docs/layouts/*.png

Colors are devices. Which pairs of chunks meet in which step, and which keys move, is what the package plans; which
pairs are visible is what plain JAX computes.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import matplotlib as mpl
import numpy as np
from draw_options import EDGE, EMPTY, visible

from jax_flash import _halo, _ring
from jax_flash._options import AttentionOptions

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

FOLDER = pathlib.Path(__file__).parent / "layouts"
NUMBER = 4  # devices
LENGTH = 96  # tokens
WINDOW = 14
WIDTH, DOTS_PER_INCH = 3.6, 200  # inches: long_context.md shows 720 pixels as 340
COLORS = ("#c2410c", "#0f766e", "#6d28d9", "#b7791f")
MOVED = 0.45  # how much of its color a pair has whose keys come from another device
LABEL_POINTS, STEP_POINTS = 11, 10
INSET = 0.6  # tokens, of a dashed line from the edge of a pair of chunks


def draw(
    axes: Axes, device_of: list[int], texts: dict[tuple[int, int], str], **options: Any
) -> None:
    """Visible pairs in the color of the device that computes them.

    Args:
      axes: where to draw.
      device_of: of each chunk of the sequence the device that holds its queries and keys.
      texts: what to write on a pair of chunks, one of queries and one of keys.
      options: of attention.
    """
    chunk = LENGTH // len(device_of)
    device = np.repeat(device_of, chunk)
    colors = np.array([to_rgb(color) for color in COLORS])[device][:, None]
    is_own = (device[:, None] == device)[..., None]
    pale = MOVED * colors + (1 - MOVED) * np.ones(3)
    seen = visible(LENGTH, LENGTH, **options)[..., None]
    axes.imshow(
        np.where(seen, np.where(is_own, colors, pale), to_rgb(EMPTY)),
        extent=(0, LENGTH, LENGTH, 0),
    )
    for bound in range(0, LENGTH + 1, chunk):
        axes.axhline(bound, color=EDGE, linewidth=1.2)
        axes.axvline(bound, color=EDGE, linewidth=1.2)
    for (row, column), text in texts.items():
        # Of a pair on the diagonal one half is visible.
        x, y = (0.3, 0.7) if row == column else (0.5, 0.5)
        color = "white" if device_of[row] == device_of[column] else "black"
        axes.text(
            (column + x) * chunk,
            (row + y) * chunk,
            text,
            ha="center",
            va="center",
            size=STEP_POINTS,
            color=color,
        )
    places = [(i + 0.5) * chunk for i in range(len(device_of))]
    axes.set_xticks(places, device_of)
    axes.set_yticks(places, device_of)
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.set_xlabel("keys of device")
    axes.set_ylabel("queries of device")
    axes.spines[:].set_visible(False)


def of_ring(num_chunks: int) -> Callable[[Axes], None]:
    """A causal ring, with the number of the step on each pair of chunks."""
    chunk = LENGTH // (NUMBER * num_chunks)
    options = AttentionOptions.resolve(8, is_causal=True)
    plan = _ring._Ring.of("", NUMBER, num_chunks, chunk, chunk, options, 0)
    device_of = {
        plan.chunk(device, i): device
        for device in range(NUMBER)
        for i in range(num_chunks)
    }
    texts = {
        (plan.chunk(device, i), plan.chunk((device - step.shift) % NUMBER, j)): str(
            step.shift
        )
        for step in plan.steps
        for device, pairs in enumerate(step.pairs)
        for i, j in pairs
    }
    in_order = [device_of[place] for place in range(NUMBER * num_chunks)]
    return lambda axes: draw(axes, in_order, texts, is_causal=True)


def of_gather(axes: Axes) -> None:
    """Causal under sharded jit."""
    draw(axes, [*range(NUMBER)], {}, is_causal=True)


def of_heads(axes: Axes) -> None:
    """Causal, divided by heads: each device has all pairs of its heads."""
    axes.set_axis_off()
    seen = visible(LENGTH, LENGTH, is_causal=True)[..., None]
    for device, color in enumerate(COLORS):
        row, column = divmod(device, 2)
        part = axes.inset_axes((0.54 * column, 0.54 * (1 - row), 0.46, 0.41))
        colors = MOVED * np.array(to_rgb(color)) + (1 - MOVED) * np.ones(
            (LENGTH, LENGTH, 3)
        )
        own = slice(device * LENGTH // NUMBER, (device + 1) * LENGTH // NUMBER)
        colors[own, own] = to_rgb(color)
        part.imshow(np.where(seen, colors, to_rgb(EMPTY)), extent=(0, 1, 1, 0))
        part.set_title(f"heads of device {device}", size=STEP_POINTS)
        part.set_xticks([])
        part.set_yticks([])
        part.spines[:].set_visible(False)


def of_window(axes: Axes) -> None:
    """A window under sharded jit, with the keys that move between dashed lines."""
    window = (WINDOW, 0)
    size = LENGTH // NUMBER
    draw(axes, [*range(NUMBER)], {}, local_window_size=window)
    for transfer in _halo.Halo("", NUMBER, size, window)._transfers():
        for device in range(NUMBER - transfer.distance):
            begin, end = (device * size + x for x in (transfer.begin, transfer.end))
            row = (device + transfer.distance) * size
            axes.add_patch(
                plt.Rectangle(
                    (begin, row + INSET),
                    end - begin - INSET,
                    size - 2 * INSET,
                    fill=False,
                    linestyle="--",
                    linewidth=1.2,
                    color=COLORS[device + transfer.distance],
                    zorder=3,
                )
            )


PICTURES: dict[str, Callable[[Axes], None]] = {
    "contiguous": of_ring(1),
    "zigzag": of_ring(2),
    "heads": of_heads,
    "gathered": of_gather,
    "window": of_window,
}


def main() -> None:
    """Draws every picture."""
    jax.config.update("jax_platforms", "cpu")
    FOLDER.mkdir(exist_ok=True)
    for name, draw_picture in PICTURES.items():
        figure, axes = plt.subplots(figsize=(WIDTH, WIDTH), layout="constrained")
        draw_picture(axes)
        axes.tick_params(length=0, labelsize=LABEL_POINTS)
        axes.xaxis.label.set_size(LABEL_POINTS)
        axes.yaxis.label.set_size(LABEL_POINTS)
        figure.savefig(
            FOLDER / f"{name}.png", dpi=DOTS_PER_INCH, metadata={"Software": None}
        )
        plt.close(figure)


if __name__ == "__main__":
    main()
