"""Exact results in float64, and the largest error that passes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from .._attention import flash_attention
from .._options import AttentionOptions

_MAX_SCORES = 2**24  # held at once: 128 MiB in float64


@functools.partial(jax.jit, static_argnames="is_causal")
def exact(q, k, v, dout, is_causal):
    """Computes TENSORS in float64, and how far a rounded output moves each of them, for a unit roundoff of 1.

    The backward pass computes delta = rowsum(dout * out) from the rounded output. An error in delta changes the
    gradients as a cotangent of the log-sum-exp does. It matters where delta is much larger than dp - delta. Its size
    here is that of a sum of products with independent errors.

    Works on a block of rows of one head at a time, so that the scores of a long sequence fit.
    """
    batch, length, heads, head_dim = q.shape
    rows = min(length, math.ceil(_MAX_SCORES / length))
    blocks = math.ceil(length / rows)

    def one_head(arrays):
        q, k, v, dout = (x.astype(jnp.float64)[:, None] for x in arrays)  # [T, 1, H]
        # Pads to whole blocks. The rows added have no effect on dk and dv, as their dout is 0.
        q, dout = (jnp.pad(x, ((0, blocks * rows - length), (0, 0), (0, 0))) for x in (q, dout))

        def one_block(sums, block):
            start, q, dout = block
            attention = functools.partial(
                flash_attention,
                is_causal=is_causal,
                query_offset=start,
                return_residual=True,
                implementation="xla",
            )
            (out, lse), vjp = jax.vjp(attention, q, k, v)
            dq, dk, dv = vjp((dout, jnp.zeros_like(lse)))
            delta_error = jnp.sqrt(jnp.sum((dout * out) ** 2, axis=-1))
            dq_change, dk_change, dv_change = vjp((jnp.zeros_like(dout), delta_error))
            sums = jax.tree.map(jnp.add, sums, (dk, dv, dk_change, dv_change))
            return sums, (out, dq, dq_change)

        starts = rows * jnp.arange(blocks, dtype=jnp.int32)
        by_block = [x.reshape(blocks, rows, 1, head_dim) for x in (q, dout)]
        sums, by_row = jax.lax.scan(one_block, (jnp.zeros_like(k),) * 4, (starts, *by_block))
        dk, dv, dk_change, dv_change = (x[:, 0] for x in sums)
        out, dq, dq_change = (x.reshape(-1, head_dim)[:length] for x in by_row)
        return (out, dq, dk, dv), (jnp.zeros_like(out), dq_change, dk_change, dv_change)

    by_head = [jnp.swapaxes(x, 1, 2).reshape(-1, length, head_dim) for x in (q, k, v, dout)]
    results, changes = jax.lax.map(one_head, by_head)
    results = (jnp.swapaxes(x.reshape(batch, heads, length, head_dim), 1, 2) for x in results)
    return tuple(results), tuple(jnp.max(jnp.abs(x)) for x in changes)


def max_error(got: jax.Array, right: jax.Array) -> float:
    """Returns the largest difference; NaN if either array has one."""
    return float(jnp.max(jnp.abs(got.astype(jnp.float64) - right)))


def limit(right: jax.Array, change: float, dtype: np.dtype, peer_error: float, platform: str) -> float:
    """Returns the largest error that passes.

    Args:
      right: the exact result.
      change: how far a rounded output moves this result, from `exact`.
      dtype: the dtype of the result that is checked.
      peer_error: the error of XLA's attention in the same dtype.
      platform: where it was computed.
    """
    largest = float(jnp.max(jnp.abs(right)))
    is_tf32 = platform == "gpu" and AttentionOptions.resolve(right.shape[-1]).precision == 0
    if dtype == jnp.float64 or (dtype == jnp.float32 and not is_tf32):
        unit = 1e-14 if dtype == jnp.float64 else 2e-6
        return unit * math.sqrt(right.shape[1]) * max(1.0, largest)
    eps = 2**-10 if dtype == jnp.float32 else float(jnp.finfo(dtype).eps)
    return max(2 * peer_error, eps * float(change), eps * largest) + 1e-6
