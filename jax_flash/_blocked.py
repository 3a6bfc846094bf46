"""Derivatives of attention in plain JAX, block by block of the score matrix: the passes that have no kernel.

Each function computes what that of the same name in `_primitives` does, on one device: arrays have one batch axis, and
tangents [D, ...] an axis of directions before it. In the formulas `p` are the probabilities, `s` the logits and `t(x)`
is the derivative of x in direction t.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from . import _dropout, _reference
from ._operands import AXES, OPERANDS, Arrays, is_directed
from ._options import AttentionOptions

_SCORES = 2**22  # of one block, for all batch elements, heads and directions
_SMALLEST_BLOCK, _LARGEST_BLOCK = 64, 512
_BROADCAST_OPERANDS = tuple(operand.name for operand in OPERANDS if operand.is_broadcastable)
_FAR = 2**29  # no sequence is longer


def tangent(arrays: Arrays, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Computes tlse = rowsum(p t(s)) and tout = (p t(s)) v + p tv - tlse out; dropout affects the products alone."""

    def parts(block: _Block) -> Arrays:
        weighted = block.p * block.logits_in("t")
        tout = block.times_keys(block.kept(weighted), block.keys("v"))
        if "tv" in arrays:
            tout += block.times_keys(block.kept(block.p), block.keys("tv"))
        return {"tout": tout, "tlse": _sum_of_row(weighted)}

    results = {"tout": "tne", "tlse": "tn"}
    sums = _sum_over_blocks(parts, results, arrays, options)
    tlse = sums["tlse"]
    tout = sums["tout"] - tlse[..., None] * arrays["out"].astype(tlse.dtype)
    return tout.astype(arrays["out"].dtype), tlse


def second_tangent(arrays: Arrays, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """The derivative of the tangent in direction t: by its inputs in direction u, and by t itself (tu)."""

    def parts(block: _Block) -> Arrays:
        t = block.logits_in("t") - block.stats("tlse")
        u = block.logits_in("u") - block.stats("ulse")
        second = block.p * (t * u + block.logits_in_both())
        tuout = block.times_keys(block.kept(second), block.keys("v"))
        for weights, name in ((block.p * t, "uv"), (block.p * u, "tv"), (block.p, "tuv")):
            if name in arrays:
                tuout += block.times_keys(block.kept(weights), block.keys(name))
        return {"tuout": tuout, "tulse": _sum_of_row(second)}

    results = {"tuout": "tne", "tulse": "tn"}
    sums = _sum_over_blocks(parts, results, arrays, options)
    tulse = sums["tulse"]
    tuout = sums["tuout"] - tulse[..., None] * arrays["out"].astype(tulse.dtype)
    return tuout.astype(arrays["out"].dtype), tulse


def backward_tangent(arrays: Arrays, options: AttentionOptions) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The derivative of dq, dk (both without scale_factor) and dv: ds k and so on, by the product rule."""

    def parts(block: _Block) -> Arrays:
        ds, tds, tp = block.gradients_in_t()
        tdq = block.times_keys(tds, block.keys("k"))
        tdk = block.times_rows(tds, block.rows("q"))
        tdv = block.times_rows(block.kept(tp), block.rows("dout"))
        if "tk" in arrays:
            tdq += block.times_keys(ds, block.keys("tk"))
        if "tq" in arrays:
            tdk += block.times_rows(ds, block.rows("tq"))
        if "tdout" in arrays:
            tdv += block.times_rows(block.kept(block.p), block.rows("tdout"))
        return {"tdq": options.scale * tdq, "tdk": options.scale * tdk, "tdv": tdv}

    sums = _sum_over_blocks(parts, {"tdq": "tnd", "tdk": "skd", "tdv": "ske"}, arrays, options)
    return tuple(sums[name].astype(arrays["q"].dtype) for name in ("tdq", "tdk", "tdv"))


def backward_bias_tangent(arrays: Arrays, options: AttentionOptions, *, batch: int) -> tuple[jax.Array]:
    """The derivative of ds, summed to the shape of the bias; that of the slopes, [D, B, N, 1, 1].

    batch: the batch size of the result. Each of its elements is the sum of equally many neighboring ones.
    """
    bias = arrays.get("bias")
    sizes = arrays["q"].shape[-3], arrays["k"].shape[-3]
    candidates = (-3,) if bias is not None and bias.shape[-2:] == sizes else (-2, -1)
    axes = [axis for axis in candidates if bias is None or bias.shape[axis] == 1]

    def parts(block: _Block) -> Arrays:
        _, tds, _ = block.gradients_in_t()
        if bias is None:
            tds = -tds * block.distances
        neighbors = tds.reshape(*tds.shape[:-4], batch, -1, *tds.shape[-3:])
        return {"tdbias": jnp.sum(jnp.sum(neighbors, -4), axes, keepdims=True)}

    return (_sum_over_blocks(parts, {"tdbias": "nts"}, arrays, options)["tdbias"],)


# ---- Blocks -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Block:
    """The pairs of some rows and columns. Scores are [..., N, t, s], in the dtype of lse."""

    arrays: Arrays
    options: AttentionOptions
    row: jax.Array  # [t, 1]: indices
    column: jax.Array  # [s]
    is_new: jax.Array  # [t, s]: not part of another block, too

    # ---- Parts of the arrays ----

    @functools.cached_property
    def _exists(self) -> tuple[jax.Array, jax.Array]:
        return _reference.existing(self.row, self.column, self.arrays)

    def rows(self, name: str) -> jax.Array:
        """[..., t, N, H], with 0 beyond the lengths: these rows may hold anything, and 0 * NaN is NaN."""
        x = _slice(self.arrays[name], -3, self.row[0, 0], self.row.shape[0])
        return jnp.where(self._exists[0][:, 0, :, :, None], x, 0)

    def keys(self, name: str) -> jax.Array:
        """[..., s, K, H], with 0 beyond the lengths."""
        x = _slice(self.arrays[name], -3, self.column[0], self.column.shape[0])
        return jnp.where(self._exists[1].mT[:, 0, :, :, None], x, 0)

    def stats(self, name: str) -> jax.Array:
        """A number for each row: [..., N, t, 1], with 0 beyond the lengths."""
        x = _slice(self.arrays[name], -2, self.row[0, 0], self.row.shape[0])
        x = jnp.where(self._exists[0][:, 0, :, :], x, 0)
        return jnp.swapaxes(x, -1, -2)[..., None]

    def pairs(self, name: str) -> jax.Array:
        """The part of a broadcastable array."""
        x = self.arrays[name]
        if x.shape[-2] != 1:
            x = _slice(x, -2, self.row[0, 0], self.row.shape[0])
        if x.shape[-1] != 1:
            x = _slice(x, -1, self.column[0], self.column.shape[0])
        return x

    @functools.cached_property
    def _operands(self) -> Arrays:
        """The arrays, with those of pairs cut to this block."""
        named = {name: self.pairs(name) for name in _BROADCAST_OPERANDS if name in self.arrays}
        if "query_segment_ids" in self.arrays:
            parts = {"query_segment_ids": self.row[:, 0], "key_value_segment_ids": self.column}
            named |= {
                name: _slice(self.arrays[name], -1, index[0], index.size) for name, index in parts.items()
            }
        return self.arrays | named

    # ---- Products ----

    def scores(self, rows: jax.Array, keys: jax.Array) -> jax.Array:
        """[..., t, N, H] and [..., s, K, H] to [..., N, t, s]."""
        scores = self._product("...tkgd,...skd->...kgts", _grouped(rows, keys), keys)
        return scores.reshape(*scores.shape[:-4], rows.shape[-2], *scores.shape[-2:])

    def times_keys(self, weights: jax.Array, keys: jax.Array) -> jax.Array:
        """[..., N, t, s] and [..., s, K, H] to [..., t, N, H]."""
        weights = self._grouped_weights(weights.astype(keys.dtype))
        result = self._product("...kgts,...skd->...tkgd", weights, keys)
        return result.reshape(*result.shape[:-3], -1, result.shape[-1])

    def times_rows(self, weights: jax.Array, rows: jax.Array) -> jax.Array:
        """[..., N, t, s] and [..., t, N, H] to [..., s, K, H], summed over the heads of a group."""
        weights = self._grouped_weights(weights.astype(rows.dtype))
        return self._product("...kgts,...tkgd->...skd", weights, _grouped(rows, self.arrays["k"]))

    def _product(self, subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
        precision = lax.Precision(self.options.precision)
        return jnp.einsum(subscripts, a, b, precision=precision, preferred_element_type=self.dtype)

    def _grouped_weights(self, weights: jax.Array) -> jax.Array:
        groups = self.arrays["k"].shape[-2]
        return weights.reshape(*weights.shape[:-3], groups, -1, *weights.shape[-2:])

    # ---- Logits and probabilities ----

    @property
    def dtype(self):
        return self.arrays["lse"].dtype

    @functools.cached_property
    def visible(self) -> jax.Array:
        return self.is_new & _reference.visible_pairs(self.row, self.column, self._operands, self.options)

    @functools.cached_property
    def distances(self) -> jax.Array:
        return _reference.distances(self.row, self.column, self.arrays, self.dtype)

    @functools.cached_property
    def _raw_scores(self) -> jax.Array:
        return self.scores(self.rows("q"), self.keys("k"))

    def _factor(self) -> jax.Array | float:
        return _per_batch(self.arrays["scale_factor"]) if "scale_factor" in self.arrays else 1.0

    @functools.cached_property
    def logits(self) -> jax.Array:
        """Before the cap; 0 where the pair is not visible."""
        logits = self.options.scale * self._factor() * self._raw_scores
        return self._masked(logits + self._bias(""))

    def _bias(self, prefix: str) -> jax.Array | float:
        """The bias, or with a prefix its tangent."""
        bias = 0.0
        if f"{prefix}bias" in self.arrays:
            bias = self.pairs(f"{prefix}bias").astype(self.dtype)
        if f"{prefix}alibi_slopes" in self.arrays:
            bias -= self.arrays[f"{prefix}alibi_slopes"][..., None, None] * self.distances
        return bias

    def _masked(self, x: jax.Array) -> jax.Array:
        return jnp.where(self.visible, x, 0)

    @functools.cached_property
    def _tanh(self) -> jax.Array:
        return jnp.tanh(self.logits / self.options.logits_soft_cap)

    @functools.cached_property
    def slope(self) -> jax.Array | float:
        """The derivative of the cap."""
        return 1 - self._tanh**2 if self.options.logits_soft_cap else 1.0

    @functools.cached_property
    def slope_of_slope(self) -> jax.Array:
        """The second derivative of the cap."""
        return -2 / self.options.logits_soft_cap * self._tanh * self.slope

    @functools.cached_property
    def p(self) -> jax.Array:
        capped = self.options.logits_soft_cap * self._tanh if self.options.logits_soft_cap else self.logits
        lse = self.stats("lse")
        return jnp.where(self.visible & (lse != -jnp.inf), jnp.exp(capped - lse), 0)

    def kept(self, weights: jax.Array) -> jax.Array:
        """The weights of the values, after dropout."""
        rate = self.options.dropout_rate
        return jnp.where(self._keep, weights / (1 - rate), 0) if rate else weights

    @functools.cached_property
    def _keep(self) -> jax.Array:
        rate = self.options.dropout_rate
        return _dropout.keep_pairs(self.arrays["dropout_seeds"], rate, self.row, self.column)

    # ---- Derivatives ----

    def _uncapped_in(self, prefix: str) -> jax.Array | float:
        """The derivative of the logits before the cap; `prefix` is that of the direction's arrays."""
        tangent = self._factor() * self._product_tangent(prefix, "")
        if f"{prefix}scale_factor" in self.arrays:
            tangent += _per_batch(self.arrays[f"{prefix}scale_factor"]) * self._raw_scores
        return self._masked(self.options.scale * tangent + self._bias(prefix))

    def _product_tangent(self, a: str, b: str) -> jax.Array | float:
        """The derivative of q k in both directions, `b` being that of the other factor."""
        tangent = 0.0
        for x, y in ((a, b), (b, a)):
            if f"{x}q" in self.arrays and f"{y}k" in self.arrays:
                tangent += self.scores(self.rows(f"{x}q"), self.keys(f"{y}k"))
        return tangent

    def logits_in(self, prefix: str) -> jax.Array:
        return self.slope * self._uncapped_in(prefix)

    def logits_in_both(self) -> jax.Array:
        """The second derivative of the logits in the directions t and u, with tu the derivative of t itself."""
        second = self._factor() * self._product_tangent("t", "u")
        for a, b in (("t", "u"), ("u", "t")):
            if f"{a}scale_factor" in self.arrays:
                second += _per_batch(self.arrays[f"{a}scale_factor"]) * self._product_tangent(b, "")
        second = self.slope * (self._masked(self.options.scale * second) + self._uncapped_in("tu"))
        if self.options.logits_soft_cap:
            second += self.slope_of_slope * self._uncapped_in("t") * self._uncapped_in("u")
        return second

    def gradients_in_t(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """ds, its derivative, and the derivative of p."""
        dout, out = self.rows("dout"), self.rows("out")
        dp = self.kept(self.scores(dout, self.keys("v")))
        tdp = 0.0
        if "tv" in self.arrays:
            tdp += self.scores(dout, self.keys("tv"))
        delta = _dot(dout, out, self.dtype)
        tdelta = _dot(dout, self.rows("tout"), self.dtype)
        if "tdout" in self.arrays:
            tdp += self.scores(self.rows("tdout"), self.keys("v"))
            tdelta += _dot(self.rows("tdout"), out, self.dtype)
        # The cotangent of an infinite lse is ignored.
        lse = self.stats("lse")
        if "dlse" in self.arrays:
            delta -= jnp.where(jnp.isinf(lse), 0, self.stats("dlse"))
        if "tdlse" in self.arrays:
            tdelta -= jnp.where(jnp.isinf(lse), 0, self.stats("tdlse"))

        t = self._uncapped_in("t")
        tp = self.p * (self.slope * t - self.stats("tlse"))
        ds = self.p * (dp - delta)
        tds = tp * (dp - delta) + self.p * (self.kept(tdp) - tdelta)
        tds *= self.slope
        if self.options.logits_soft_cap:
            tds += ds * self.slope_of_slope * t
        return ds * self.slope, tds, tp


def _slice(x: jax.Array, axis: int, start: jax.Array, size: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _per_batch(x: jax.Array) -> jax.Array:
    return x[..., None, None, None]


def _grouped(rows: jax.Array, keys: jax.Array) -> jax.Array:
    """[..., t, N, H] as [..., t, K, N // K, H]."""
    return rows.reshape(*rows.shape[:-2], keys.shape[-2], -1, rows.shape[-1])


def _dot(x: jax.Array, y: jax.Array, dtype) -> jax.Array:
    """The products of rows [..., t, N, H]: [..., N, t, 1]."""
    return jnp.swapaxes(jnp.sum(x.astype(dtype) * y.astype(dtype), -1), -1, -2)[..., None]


def _sum_of_row(x: jax.Array) -> jax.Array:
    """[..., N, t, s] to [..., t, N]."""
    return jnp.swapaxes(jnp.sum(x, -1), -1, -2)


# ---- The loop over blocks ---------------------------------------------------------------------------------


def _sum_over_blocks(
    parts: Callable[[_Block], Arrays], results: dict[str, str], arrays: Arrays, options: AttentionOptions
) -> Arrays:
    """Adds up the parts of all blocks.

    Args:
      parts: computes the parts of one block.
      results: for each part its axes behind those of directions and batch: t and s are those of the block.
      arrays: the arrays of the call.
      options: its options.

    Returns:
      The sums, in the dtype of lse.
    """
    seqlen_q, seqlen_kv = arrays["q"].shape[-3], arrays["k"].shape[-3]
    directions = next(x.shape[0] for name, x in arrays.items() if is_directed(name))
    heads = directions * arrays["q"].shape[0] * arrays["q"].shape[-2]
    side = _SMALLEST_BLOCK
    if isinstance(heads, int):
        side = min(max(side, 2 ** (max(_SCORES // heads, 1).bit_length() // 2)), _LARGEST_BLOCK)
    if isinstance(seqlen_q, int) and isinstance(seqlen_kv, int):
        num_rows, num_columns = min(side, seqlen_q), min(side, seqlen_kv)
    else:  # symbolic, and perhaps less than a block
        num_rows = num_columns = side
        arrays = _with_more_rows(arrays, side)

    def block(i: jax.Array, j: jax.Array) -> _Block:
        # The last block reaches back into the one before it.
        ends = arrays["q"].shape[-3] - num_rows, arrays["k"].shape[-3] - num_columns
        row = jnp.minimum(i * num_rows, ends[0]) + jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        column = jnp.minimum(j * num_columns, ends[1]) + jnp.arange(num_columns, dtype=jnp.int32)
        is_new = (row >= i * num_rows) & (column >= j * num_columns) & (row < seqlen_q) & (column < seqlen_kv)
        return _Block(arrays, options, row, column, is_new)

    def directed_parts(block: _Block) -> Arrays:
        # A part that is 0 may have been computed without directions.
        return {
            name: jnp.broadcast_to(part, (directions, *part.shape[-len(results[name]) - 1 :]))
            for name, part in parts(block).items()
        }

    def add(i: jax.Array, j: jax.Array, sums: Arrays) -> Arrays:
        this = block(i, j)
        starts = {"t": this.row[0, 0], "s": this.column[0]}
        sums = dict(sums)
        for name, part in directed_parts(this).items():
            axes = results[name]
            zero = jnp.int32(0)
            start = [zero] * (part.ndim - len(axes))
            start += [
                starts[axis] if axis in starts and size != 1 else zero
                for axis, size in zip(axes, sums[name].shape[-len(axes) :], strict=True)
            ]
            old = lax.dynamic_slice(sums[name], start, part.shape)
            sums[name] = lax.dynamic_update_slice(sums[name], old + part, start)
        return sums

    def add_row(i: jax.Array, sums: Arrays) -> Arrays:
        first, end = _columns_seen(i * num_rows, num_rows, arrays, options)
        return lax.fori_loop(first // num_columns, -(-end // num_columns), functools.partial(add, i), sums)

    types = jax.eval_shape(lambda: directed_parts(block(jnp.int32(0), jnp.int32(0))))
    sizes = {"t": arrays["q"].shape[-3], "s": arrays["k"].shape[-3]}

    def zeros(name: str) -> jax.Array:
        axes, shape = results[name], types[name].shape
        own = zip(axes, shape[-len(axes) :], strict=True)
        shape = [*shape[: -len(axes)], *(size if size == 1 else sizes.get(axis, size) for axis, size in own)]
        return jnp.zeros(shape, types[name].dtype)

    rows = jnp.int32(0), jnp.int32(-(-seqlen_q // num_rows))  # of blocks
    sums = lax.fori_loop(*rows, add_row, {name: zeros(name) for name in results})
    for name, axes in results.items():
        for axis, end in (("t", seqlen_q), ("s", seqlen_kv)):
            index = axes.find(axis) - len(axes)
            if axis in axes and sums[name].shape[index] != 1:
                sums[name] = lax.slice_in_dim(sums[name], 0, end, axis=index)
    return sums


def _with_more_rows(arrays: Arrays, more: int) -> Arrays:
    """The arrays with `more` zeros behind each axis of rows or keys."""

    def padded(name: str, x: jax.Array) -> jax.Array:
        is_long = [
            axis in "ts" and size != 1
            for axis, size in zip(AXES[name], x.shape[-len(AXES[name]) :], strict=True)
        ]
        widths = [(0, 0)] * (x.ndim - len(is_long)) + [(0, more if long else 0) for long in is_long]
        return jnp.pad(x, widths)

    return {name: padded(name, x) if AXES[name] else x for name, x in arrays.items()}


def _columns_seen(
    row: jax.Array, rows: int, arrays: Arrays, options: AttentionOptions
) -> tuple[jax.Array, jax.Array]:
    """An interval that holds all columns that the rows from `row` on see; mask and segments are not considered."""
    first, end = jnp.int32(0), jnp.int32(arrays["k"].shape[-3])
    if "key_value_seq_lengths" in arrays:
        end = jnp.clip(jnp.max(arrays["key_value_seq_lengths"]), 0, end)
    offset = arrays.get("query_offset", jnp.zeros(1, jnp.int32))
    # The largest offsets and windows would wrap around.
    lowest, highest = (jnp.clip(limit(offset), -_FAR, _FAR) for limit in (jnp.min, jnp.max))
    left, right = options.reach
    if 0 <= left < _FAR:
        first = jnp.clip(row + lowest - left, 0, end)
    if 0 <= right < _FAR:
        end = jnp.clip(row + rows + highest + right, 0, end)
    if "query_seq_lengths" in arrays:
        end = jnp.where(row < jnp.max(arrays["query_seq_lengths"]), end, 0)
    return first, end
