"""Draws the pictures of options.md, from what the plain JAX implementation computes.

    python docs/draw_options.py     # needs matplotlib; writes docs/options/*.png

With queries and keys of 0 all logits are 0, and with one-hot values the output is the matrix of the weights. What is
not 0 there is visible; its logarithm, less the log-sum-exp, is what a bias or a cap made of the logits.
"""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np

import jax_flash

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, PowerNorm
from matplotlib.ticker import MaxNLocator

FOLDER = pathlib.Path(__file__).parent / "options"
SIZE = 16  # queries and keys, unless a picture says otherwise
WIDTH, DOTS_PER_INCH = (
    3.0,
    240,
)  # inches: options.md shows 720 pixels as about 200, at which 12 points are 11 pixels
HEIGHTS = {
    "query_offset": 1.6,
    "bias": 3.6,
    "alibi": 3.6,
    "sinks": 3.5,
}  # inches, where it is not the width
LABEL_POINTS, TICK_POINTS = 13, 12
COLOR, PALE, EMPTY, EDGE = "#c2410c", "#fcc79b", "#eceef1", "#ffffff"
VISIBLE = ListedColormap([EMPTY, COLOR])
KEPT = ListedColormap([EMPTY, PALE, COLOR])
SHADES = LinearSegmentedColormap.from_list("shades", [EMPTY, COLOR])


def weights(
    seqlen_q: int = SIZE, seqlen_kv: int = SIZE, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """What each query takes of each value, [T, S], and the log-sum-exp, [T]: of one head with logits of 0."""
    out, lse = jax_flash.flash_attention(
        jnp.zeros((1, seqlen_q, 1, 8)),
        jnp.zeros((1, seqlen_kv, 1, 8)),
        jnp.eye(seqlen_kv)[None, :, None],
        return_residual=True,
        implementation="xla",
        **options,
    )
    return np.asarray(out[0, :, 0]), np.asarray(lse[0, :, 0])


def visible(seqlen_q: int = SIZE, seqlen_kv: int = SIZE, **options: Any) -> np.ndarray:
    """Which keys each query sees, [T, S]."""
    return weights(seqlen_q, seqlen_kv, **options)[0] > 0


def logits(seqlen_q: int = SIZE, seqlen_kv: int = SIZE, **options: Any) -> np.ndarray:
    """What the options make of logits of 0, [T, S]."""
    p, lse = weights(seqlen_q, seqlen_kv, **options)
    return np.log(p) + lse[:, None]


def draw_pairs(
    axes: Axes, pairs: np.ndarray, colors: mpl.colors.Colormap = VISIBLE, **mesh: Any
) -> Any:
    """Queries as rows from the top, keys as columns."""
    drawn = axes.pcolormesh(pairs, cmap=colors, edgecolors=EDGE, linewidth=0.8, **mesh)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.set_xlabel("key j")
    axes.set_ylabel("query i")
    for axis, size in ((axes.xaxis, pairs.shape[1]), (axes.yaxis, pairs.shape[0])):
        ticks = range(0, size, 5)
        axis.set_ticks([tick + 0.5 for tick in ticks], [str(tick) for tick in ticks])
    axes.spines[:].set_visible(False)
    return drawn


def draw_scale(axes: Axes, drawn: Any, label: str) -> None:
    """The bar of colors, above the picture: beside it, it would take width."""
    bar = axes.figure.colorbar(drawn, ax=axes, location="top", aspect=16, pad=0.03)
    bar.ax.tick_params(length=0, labelsize=TICK_POINTS)
    bar.ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    bar.set_label(label, size=LABEL_POINTS)
    bar.outline.set_visible(False)


def of_pairs(
    seqlen_q: int = SIZE, seqlen_kv: int = SIZE, **options: Any
) -> Callable[[Axes], None]:
    """A picture of the visible pairs."""
    return lambda axes: draw_pairs(
        axes, visible(seqlen_q, seqlen_kv, **options), vmin=0, vmax=1
    )


def of_logits(**options: Any) -> Callable[[Axes], None]:
    """A picture of what is added to the logits."""

    def draw(axes: Axes) -> None:
        draw_scale(
            axes, draw_pairs(axes, logits(**options), SHADES), "added to the logit"
        )

    return draw


def of_sinks(sink: float) -> Callable[[Axes], None]:
    """A picture of causal weights, and of what is missing to a sum of 1, which the sink has, as a column before."""

    def draw(axes: Axes) -> None:
        p, _ = weights(is_causal=True, sinks=jnp.array([sink]))
        missing = 1 - p.sum(-1, keepdims=True)
        gap = np.full((SIZE, 2), np.nan)
        drawn = draw_pairs(
            axes,
            np.concatenate([missing, gap, p], axis=-1),
            SHADES,
            norm=PowerNorm(0.5),
        )
        ticks = range(0, p.shape[1], 5)
        axes.set_xticks(
            [0.5, *(tick + 3.5 for tick in ticks)], ["sink", *map(str, ticks)]
        )
        draw_scale(axes, drawn, "weight")

    return draw


def of_dropout(rate: float, key: jax.Array, **options: Any) -> Callable[[Axes], None]:
    """A picture of the visible pairs, those that dropout removes pale."""

    def draw(axes: Axes) -> None:
        kept = visible(dropout_rate=rate, dropout_rng=key, **options)
        draw_pairs(axes, visible(**options).astype(int) + kept, KEPT, vmin=0, vmax=2)

    return draw


def of_soft_cap(cap: float) -> Callable[[Axes], None]:
    """A picture of a logit before and after the cap."""

    def draw(axes: Axes) -> None:
        before = np.linspace(-6, 6, 121, dtype=np.float32)
        after = logits(1, before.size, bias=jnp.asarray(before), logits_soft_cap=cap)[0]
        axes.plot(before, before, color="#9ca3af", linestyle=":", linewidth=1.5)
        axes.plot(before, after, color=COLOR, linewidth=2.5)
        axes.set_aspect("equal")
        axes.set_xlabel("logit before")
        axes.set_ylabel("logit after")
        axes.set_xticks([-cap, 0, cap], ["$-c$", "$0$", "$c$"])
        axes.set_yticks([-cap, 0, cap], ["$-c$", "$0$", "$c$"])
        axes.grid(alpha=0.4)
        axes.spines[:].set_visible(False)

    return draw


def pictures() -> dict[str, Callable[[Axes], None]]:
    """What to draw, by the name of the file: these are the calls that options.md shows beside them."""
    segment_ids = jnp.array([[0] * 5 + [1] * 7 + [2] * 4], jnp.int32)
    checkered = (np.indices((SIZE, SIZE)) // 2).sum(0) % 2 == 0
    bias = np.sin(np.arange(SIZE) / 2)[:, None] * np.cos(np.arange(SIZE) / 3)
    return {
        "is_causal": of_pairs(is_causal=True),
        "query_offset": of_pairs(6, SIZE, is_causal=True, query_offset=10),
        "local_window_size": of_pairs(local_window_size=(4, 1)),
        "lengths": of_pairs(
            query_seq_lengths=jnp.array([13], jnp.int32),
            key_value_seq_lengths=jnp.array([11], jnp.int32),
        ),
        "mask": of_pairs(mask=jnp.asarray(checkered)),
        "segment_ids": of_pairs(segment_ids=segment_ids),
        "together": of_pairs(
            is_causal=True,
            local_window_size=(3, 0),
            segment_ids=segment_ids,
            key_value_seq_lengths=jnp.array([14], jnp.int32),
        ),
        "bias": of_logits(bias=jnp.asarray(bias)),
        "alibi": of_logits(bias=jax_flash.Alibi(jnp.array([0.5]))),
        "logits_soft_cap": of_soft_cap(2.0),
        "sinks": of_sinks(1.0),
        "dropout": of_dropout(0.25, jax.random.key(0), is_causal=True),
    }


def main() -> None:
    """Draws every picture."""
    jax.config.update("jax_platforms", "cpu")
    FOLDER.mkdir(exist_ok=True)
    for name, draw in pictures().items():
        figure, axes = plt.subplots(
            figsize=(WIDTH, HEIGHTS.get(name, WIDTH)), layout="constrained"
        )
        draw(axes)
        axes.tick_params(length=0, labelsize=TICK_POINTS)
        axes.xaxis.label.set_size(LABEL_POINTS)
        axes.yaxis.label.set_size(LABEL_POINTS)
        figure.savefig(
            FOLDER / f"{name}.png", dpi=DOTS_PER_INCH, metadata={"Software": None}
        )
        plt.close(figure)


if __name__ == "__main__":
    main()
