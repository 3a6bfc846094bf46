"""The gradient of a bias as the sum of the gradients of the logits, where the backward kernel keeps those."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from . import _reference
from ._operands import Arrays, sum_dtype
from ._options import AttentionOptions

# The kernel leaves out what these hide.
_LENGTHS = ("query_seq_lengths", "key_value_seq_lengths")
# With a causal mask, rows are summed in at most so many blocks, of at least so many rows. Each block is summed over the
# keys that its last row sees.
_ROW_BLOCKS, _MIN_ROWS = 8, 128


def of_ds(ds: jax.Array, arrays: Arrays, dbias: jax.core.ShapedArray, options: AttentionOptions) -> jax.Array:
    """Sums of the gradients of the logits, of the shape and dtype of `dbias`.

    Args:
      ds: uint16 [B, N, T, S], the bits of numbers in q's dtype; anything where a row does not see a key.
      arrays: the arguments of the pass on one device, with one batch axis; none is a mask or segment ids.
      dbias: [B or 1, N or 1, T, S], with any number of batch axes.
      options: the static options.
    """
    seqlen_q, seqlen_kv = ds.shape[2:]
    if options.reach[1] < 0 or "query_offset" in arrays:
        return _sum_of_rows(ds, 0, arrays, dbias, options)
    step = max(-(-seqlen_q // _ROW_BLOCKS), _MIN_ROWS)
    blocks = []
    for first in range(0, seqlen_q, step):
        num_keys = min(first + step + options.reach[1], seqlen_kv)
        block = _sum_of_rows(ds[:, :, first : first + step, :num_keys], first, arrays, dbias, options)
        blocks.append(jnp.pad(block, [(0, 0)] * (block.ndim - 1) + [(0, seqlen_kv - num_keys)]))
    return jnp.concatenate(blocks, axis=-2)


def _sum_of_rows(
    ds: jax.Array, first: int, arrays: Arrays, dbias: jax.core.ShapedArray, options: AttentionOptions
) -> jax.Array:
    """The sums of uint16 [B, N, rows, keys]: of rows from `first` on and the first keys."""
    ds = jax.lax.bitcast_convert_type(ds, arrays["q"].dtype)
    num_batches, num_heads, num_rows, num_keys = ds.shape
    if max(options.reach) >= 0 or not arrays.keys().isdisjoint(_LENGTHS):
        rows = jnp.arange(first, first + num_rows, dtype=jnp.int32)
        columns = jnp.arange(num_keys, dtype=jnp.int32)
        ds = jnp.where(_reference.visible_pairs(rows[:, None], columns, arrays, options), ds, 0)
    num_sums = math.prod(dbias.shape[:-3]), dbias.shape[-3]
    of_a_sum = num_batches // num_sums[0], num_heads // num_sums[1]
    ds = ds.reshape(num_sums[0], of_a_sum[0], num_sums[1], of_a_sum[1], num_rows, num_keys)
    # One by one: XLA reads a sum over an outer axis in more and smaller pieces.
    terms = (ds[:, i, :, j].astype(sum_dtype(ds.dtype)) for i, j in np.ndindex(of_a_sum))
    total = functools.reduce(operator.add, terms)
    return total.reshape(*dbias.shape[:-2], num_rows, num_keys).astype(dbias.dtype)
