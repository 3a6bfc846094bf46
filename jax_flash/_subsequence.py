"""A call on a part of a longer sequence: where the part begins is an offset of its queries."""

from __future__ import annotations

from collections.abc import Collection

import jax
import jax.numpy as jnp

from . import _dropout
from ._operands import Arrays
from ._options import AttentionOptions

_INT32 = jnp.iinfo(jnp.int32)


def needs_offset(names: Collection[str], options: AttentionOptions) -> bool:
    """Whether it matters to a call with these operands where the queries are among the keys."""
    return options.reach != (-1, -1) or "alibi_slopes" in names


def at(arrays: Arrays, row: jax.Array, column: jax.Array | int, *, with_offset: bool) -> Arrays:
    """The arrays of the part that begins at this row and column, with operands that count from there.

    Args:
      arrays: q, k, v and others of the part; operands of the whole sequence. Lengths of keys are the caller's.
      row: the number of queries before the part, int32.
      column: the number of keys before it.
      with_offset: whether the part has a query_offset even if the whole has none.
    """
    part = dict(arrays)
    if with_offset or "query_offset" in arrays:
        offset = arrays.get("query_offset", jnp.zeros(arrays["q"].shape[:-3], jnp.int32))
        part["query_offset"] = _add(offset, row - column)
    if "query_seq_lengths" in arrays:
        part["query_seq_lengths"] = jnp.maximum(arrays["query_seq_lengths"], 0) - row
    if "dropout_seeds" in arrays:
        part["dropout_seeds"] = _dropout.of_part(arrays["dropout_seeds"], row, column)
    return part


@jax.jit
def _add(x: jax.Array, distance: jax.Array) -> jax.Array:
    """The sum, or the end of int32's range beyond which it lies."""
    total = x + distance
    overflows = (x ^ total) & (distance ^ total) < 0
    return jnp.where(overflows, jnp.where(x < 0, _INT32.min, _INT32.max), total)
