"""Attention in plain jax.numpy: the definition of what every kernel computes, and `implementation="xla"`.

It materializes the score matrix, so its memory grows as T * S. JAX differentiates it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _dropout
from ._operands import sum_dtype
from ._options import AttentionOptions

_INT32 = jnp.iinfo(jnp.int32)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    operands: dict[str, jax.Array],
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention with every operand and option. Takes and returns what `_primitives.forward` does.

    Products are taken in the inputs' dtype and accumulated in float32 (float64 for float64), in which everything
    between the products is computed.

    Args:
      query: [B, T, N, H].
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      operands: the arrays of OPERANDS that the call has, by name.
      options: the static options.

    Returns:
      out [B, T, N, Hv] in query's dtype, lse [B, T, N] in float32 (float64 for float64).
    """
    precision = lax.Precision(options.precision)
    batch, seqlen_q, num_heads, head_dim = query.shape
    seqlen_kv, num_kv_heads = key.shape[1:3]
    groups = (num_kv_heads, num_heads // max(num_kv_heads, 1))
    dtype = sum_dtype(query.dtype)

    row = jnp.arange(seqlen_q, dtype=jnp.int32)[None, None, :, None]  # [1, 1, T, 1]
    column = jnp.arange(seqlen_kv, dtype=jnp.int32)[None, None, None]  # [1, 1, 1, S]
    row_exists, column_exists = existing(row, column, operands)
    # Rows beyond the lengths may hold anything. They are replaced here, as 0 * NaN is NaN, forward and backward.
    query = jnp.where(_per_row(row_exists), query, 0)
    key, value = (jnp.where(_per_row(column_exists.mT), x, 0) for x in (key, value))
    visible = visible_pairs(row, column, operands, options)

    query = query.reshape(batch, seqlen_q, *groups, head_dim)
    logits = jnp.einsum("btkgd,bskd->bkgts", query, key, precision=precision, preferred_element_type=dtype)
    logits = options.scale * logits.reshape(batch, num_heads, seqlen_q, seqlen_kv)
    if "scale_factor" in operands:
        logits *= _per_batch(operands["scale_factor"])
    if "bias" in operands:
        logits += operands["bias"].astype(dtype)
    if "alibi_slopes" in operands:
        logits -= _per_head(operands["alibi_slopes"]) * distances(row, column, operands, dtype)
    if options.logits_soft_cap:
        logits = jnp.where(visible, logits, 0)  # a bias may be NaN here, and so would be the slope of tanh
        logits = options.logits_soft_cap * jnp.tanh(logits / options.logits_soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)

    # A fully masked row has the maximum -inf and the sum 0: each is replaced before it can make a NaN.
    maximum = jnp.max(logits, axis=-1, initial=-jnp.inf, keepdims=True)  # [B, N, T, 1]
    sinks = _per_head(operands["sinks"]) if "sinks" in operands else None
    if sinks is not None:
        maximum = jnp.maximum(maximum, sinks)
    maximum = lax.stop_gradient(jnp.where(maximum == -jnp.inf, 0, maximum))
    # Where no key is visible, a sink may be NaN or infinite, and neither out nor gradients show it.
    weights = jnp.exp(jnp.where(visible, logits - maximum, -jnp.inf))
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        is_alone = ~jnp.any(visible, -1, keepdims=True)
        total += jnp.exp(jnp.where(is_alone & (sinks == jnp.inf), 0, sinks - maximum))
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, maximum + jnp.log(safe_total))

    probabilities = jnp.where(visible, weights / safe_total, 0)
    if options.dropout_rate:
        keep = _dropout.keep(operands["dropout_seeds"], options.dropout_rate, seqlen_q, seqlen_kv)
        probabilities = jnp.where(keep, probabilities / (1 - options.dropout_rate), 0)
    probabilities = probabilities.reshape(batch, *groups, seqlen_q, seqlen_kv).astype(value.dtype)
    out = jnp.einsum(
        "bkgts,bske->btkge", probabilities, value, precision=precision, preferred_element_type=dtype
    )
    out = out.reshape(batch, seqlen_q, num_heads, value.shape[-1]).astype(query.dtype)
    out = jnp.where(_per_row(row_exists), out, 0)  # so that a NaN in the cotangent of such a row stays there
    return out, jnp.swapaxes(lse[..., 0], 1, 2)


def existing(
    row: jax.Array, column: jax.Array, operands: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Which rows [..., T, 1] and columns [..., S] lie within the lengths: [B or 1, 1, T, 1], [B or 1, 1, 1, S]."""
    lengths = operands.get("query_seq_lengths"), operands.get("key_value_seq_lengths")
    return _below(row, lengths[0]), _below(column, lengths[1])


def visible_pairs(
    row: jax.Array, column: jax.Array, operands: dict[str, jax.Array], options: AttentionOptions
) -> jax.Array:
    """Which of the columns [..., S] the rows [..., T, 1] see, broadcastable to [B, N, T, S].

    Rows and columns may be a part of all; segment ids and mask are then those of this part.
    """
    row_exists, column_exists = existing(row, column, operands)
    visible = row_exists & column_exists
    distance = column - row  # [..., T, S]
    offset = _per_batch(operands.get("query_offset", 0))
    # Any int32 is an offset, and a window may be as wide: their sums must not wrap around.
    if options.is_causal:
        visible &= distance <= offset
    if options.window_left >= 0:
        visible &= distance >= jnp.maximum(offset, _INT32.min + options.window_left) - options.window_left
    if options.window_right >= 0:
        visible &= distance <= jnp.minimum(offset, _INT32.max - options.window_right) + options.window_right
    if "query_segment_ids" in operands:
        of_query, of_key = operands["query_segment_ids"], operands["key_value_segment_ids"]
        visible &= (of_query[:, :, None] == of_key[:, None, :])[:, None]
    if "mask" in operands:
        visible &= operands["mask"]
    return visible


def distances(row: jax.Array, column: jax.Array, operands: dict[str, jax.Array], dtype: Any) -> jax.Array:
    """The distances |i + query_offset - j| of rows [..., T, 1] and columns [..., S]: [B or 1, 1, T, S]."""
    offset = _per_batch(operands.get("query_offset", 0))
    # In the logits' dtype, as any int32 is an offset.
    return jnp.abs(row.astype(dtype) + (offset.astype(dtype) - column.astype(dtype)))


def _per_batch(x: jax.Array | int) -> jax.Array:
    """A number, or [B], to meet arrays [B, N, T, S]."""
    return jnp.reshape(x, (-1, 1, 1, 1))


def _per_head(x: jax.Array) -> jax.Array:
    """[B, N], to meet arrays [B, N, T, S]."""
    return x[:, :, None, None]


def _below(index: jax.Array, lengths: jax.Array | None) -> jax.Array:
    return index < _per_batch(_INT32.max if lengths is None else lengths)


def _per_row(exists: jax.Array) -> jax.Array:
    """[B, 1, L, 1], to meet arrays [B, L, N, H]."""
    return exists[:, 0, :, :, None]
