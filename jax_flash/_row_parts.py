"""The gradient of a bias that has no axis of queries or of keys, from one part of the query rows after the other.

The kernel gives a sum for each block of rows or keys, and of all rows these would take memory that grows as T * S.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from . import _library, _subsequence
from ._operands import AXES, Arrays, is_broadcastable
from ._options import AttentionOptions
from ._passes import BACKWARD_BIAS, bind


def sum_of_blocks(kernel: Primitive, arrays: Arrays, options: AttentionOptions) -> list[jax.Array]:
    """Sums of the gradient of the bias: [B, N, T or 1, S or 1] as it has these axes, [B or 1, N or 1, T, S] with both.

    Args:
      kernel: the primitive of the pass BACKWARD_BIAS, which gives [B, N, T or blocks(T), S or blocks(S)].
      arrays: the arguments of the pass on one device.
      options: the static options.
    """
    *batch, seqlen_q, num_heads, _ = arrays["q"].shape
    seqlen_kv = arrays["k"].shape[-3]
    bias_shape = arrays["bias"].shape if "bias" in arrays else (1, 1, 1, 1)
    if bias_shape[-2:] == (seqlen_q, seqlen_kv):
        return bind(BACKWARD_BIAS, kernel, arrays, options)
    lacks = [axis for axis in (-2, -1) if bias_shape[axis] == 1]
    with_offset = _subsequence.needs_offset(arrays, options)

    def sums_of(part: Arrays) -> jax.Array:
        return jnp.sum(bind(BACKWARD_BIAS, kernel, part, options)[0], lacks, keepdims=True)

    def add_rows(first: jax.Array | int, length: int, total: jax.Array) -> jax.Array:
        part = {name: _part_of(name, x, seqlen_q, first, length) for name, x in arrays.items()}
        sums = sums_of(_subsequence.at(part, jnp.int32(first), 0, with_offset=with_offset))
        return total + sums if -2 in lacks else lax.dynamic_update_slice_in_dim(total, sums, first, -2)

    length = _part_length(arrays, len(lacks))
    if length is None:
        return [sums_of(arrays)]
    sizes = (1 if axis in lacks else size for axis, size in ((-2, seqlen_q), (-1, seqlen_kv)))
    total = jnp.zeros((*batch, num_heads, *sizes), arrays["lse"].dtype)
    # The last part has two rows or more: beside a single row, a bias without T would be one with both axes.
    num_parts = (seqlen_q - 2) // length
    total = lax.fori_loop(0, num_parts, lambda i, total: add_rows(i * length, length, total), total)
    return [add_rows(num_parts * length, seqlen_q - num_parts * length, total)]


def _part_length(arrays: Arrays, num_lacking: int) -> int | None:
    """How many rows a part has, whose sums take about the memory of q in float32, or of as many keys; None: all."""
    (seqlen_q, _, head_dim), seqlen_kv = arrays["q"].shape[-3:], arrays["k"].shape[-3]
    if not all(isinstance(size, int) and size > 0 for size in (seqlen_q, seqlen_kv)):
        return None
    block = _library.constants()["kVisibilityBlock"]
    length = head_dim * max(seqlen_q, seqlen_kv) * block**num_lacking // seqlen_kv // block * block
    return length if length < seqlen_q else None


def _part_of(name: str, x: jax.Array, seqlen_q: int, first: jax.Array | int, length: int) -> jax.Array:
    """The rows of an array that has rows."""
    axis = AXES[name].find("t") - len(AXES[name])
    has_rows = "t" in AXES[name] and not (is_broadcastable(name) and x.shape[axis] != seqlen_q)
    return lax.dynamic_slice_in_dim(x, first, length, axis) if has_rows else x
