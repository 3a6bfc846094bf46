"""The gradient of a bias as the sum of the gradients of the logits, where the backward kernel keeps those."""

from __future__ import annotations

import functools
import math
import operator

import jax
import jax.numpy as jnp
import numpy as np

from . import _reference
from ._operands import sum_dtype
from ._options import AttentionOptions

Arrays = dict[str, jax.Array]

# The kernel leaves out what these hide.
_HIDING = ("mask", "query_segment_ids", "query_seq_lengths", "key_value_seq_lengths")


def of_ds(ds: jax.Array, arrays: Arrays, dbias: jax.core.ShapedArray, options: AttentionOptions) -> jax.Array:
    """Sums of the gradients of the logits, of the shape and dtype of `dbias`.

    Args:
      ds: uint16 [B, N, T, S], the bits of numbers in q's dtype; anything where a row does not see a key.
      arrays: the arguments of the pass on one device, with one batch axis.
      dbias: [B or 1, N or 1, T, S], with any number of batch axes.
      options: the static options.
    """
    ds = jax.lax.bitcast_convert_type(ds, arrays["q"].dtype)
    num_batches, num_heads, seqlen_q, seqlen_kv = ds.shape
    if max(options.reach) >= 0 or not arrays.keys().isdisjoint(_HIDING):
        rows, columns = jnp.arange(seqlen_q, dtype=jnp.int32), jnp.arange(seqlen_kv, dtype=jnp.int32)
        visible = _reference.visible_pairs(rows[:, None], columns, arrays, options)
        ds = jnp.where(visible, ds, 0)
    num_sums = math.prod(dbias.shape[:-3]), dbias.shape[-3]
    of_a_sum = num_batches // num_sums[0], num_heads // num_sums[1]
    ds = ds.reshape(num_sums[0], of_a_sum[0], num_sums[1], of_a_sum[1], seqlen_q, seqlen_kv)
    # One by one: XLA reads a sum over an outer axis in more and smaller pieces.
    terms = (ds[:, i, :, j].astype(sum_dtype(ds.dtype)) for i, j in np.ndindex(of_a_sum))
    return functools.reduce(operator.add, terms).reshape(dbias.shape).astype(dbias.dtype)
