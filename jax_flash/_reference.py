"""Attention in plain jax.numpy: the definition of what every kernel computes, and `implementation="xla"`.

It writes the score matrix, so its memory grows as T * S. JAX differentiates it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _dropout
from ._alibi import Alibi
from ._options import AttentionOptions

_INT32 = jnp.iinfo(jnp.int32)


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | Alibi | None = None,
    mask: jax.Array | None = None,
    *,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    query_offset: jax.Array | int | None = 0,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    sinks: jax.Array | None = None,
    dropout_rng: jax.Array | None = None,
    scale_factor: jax.Array | None = None,
    return_residual: bool = False,
    **options: Any,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax attention with every option of `jax_flash.flash_attention`, of the same names, meanings and shapes.

    Products are taken in the inputs' dtype and summed in float32 (float64 for float64), in which everything
    between the products is computed.

    Args:
      query: [B, T, N, H], or without B, as all that follows.
      key: [B, S, K, H].
      value: [B, S, K, Hv].
      bias: broadcastable to [B, N, T, S], or a slope for each head.
      mask: bool, broadcastable to [B, N, T, S].
      query_seq_lengths: int32 [B].
      key_value_seq_lengths: int32 [B].
      query_offset: int or int32 [B].
      segment_ids: int32 [B, T], or a pair of [B, T] and [B, S].
      sinks: float [N].
      dropout_rng: the key of the dropout.
      scale_factor: a number that multiplies the logits beside the option `scale`.
      return_residual: also return lse.
      **options: the arguments of `AttentionOptions.resolve`.

    Returns:
      out [B, T, N, Hv] in the query's dtype, or a pair of it and lse [B, T, N].
    """
    resolved = AttentionOptions.resolve(query.shape[-1], **options)
    precision = lax.Precision(resolved.precision)
    query, key, value = map(jnp.asarray, (query, key, value))
    is_batched = query.ndim == 4
    if not is_batched:
        query, key, value = query[None], key[None], value[None]
    batch, seqlen_q, num_heads, head_dim = query.shape
    seqlen_kv, num_kv_heads = key.shape[1:3]
    groups = (num_kv_heads, num_heads // max(num_kv_heads, 1))
    dtype = jnp.promote_types(query.dtype, jnp.float32)

    row = jnp.arange(seqlen_q)[:, None]  # [T, 1]
    column = jnp.arange(seqlen_kv)  # [S]
    row_exists = _below(row, query_seq_lengths)  # [B or 1, 1, T, 1]
    column_exists = _below(column, key_value_seq_lengths)  # [B or 1, 1, 1, S]
    # Rows beyond the lengths may hold anything: 0 * NaN is NaN, forward and backward, so they are replaced here.
    query = jnp.where(_per_row(row_exists), query, 0)
    key, value = (jnp.where(_per_row(column_exists.mT), x, 0) for x in (key, value))

    visible = row_exists & column_exists
    distance = column - row  # [T, S]
    offset = _per_batch(0 if query_offset is None else query_offset)
    # Any int32 is an offset and a window may be as wide: their sums must not wrap around.
    if resolved.is_causal:
        visible &= distance <= offset
    if resolved.window_left >= 0:
        visible &= distance >= jnp.maximum(offset, _INT32.min + resolved.window_left) - resolved.window_left
    if resolved.window_right >= 0:
        visible &= distance <= jnp.minimum(offset, _INT32.max - resolved.window_right) + resolved.window_right
    if segment_ids is not None:
        of_query, of_key = segment_ids if isinstance(segment_ids, tuple | list) else [segment_ids] * 2
        visible &= (jnp.atleast_2d(of_query)[:, :, None] == jnp.atleast_2d(of_key)[:, None, :])[:, None]
    if mask is not None:
        visible &= mask

    query = query.reshape(batch, seqlen_q, *groups, head_dim)
    logits = jnp.einsum("btkgd,bskd->bkgts", query, key, precision=precision, preferred_element_type=dtype)
    logits = resolved.scale * logits.reshape(batch, num_heads, seqlen_q, seqlen_kv)
    if scale_factor is not None:
        logits *= scale_factor.astype(dtype)
    if isinstance(bias, Alibi):
        # In the logits' dtype, as any int32 is an offset.
        distances = jnp.abs(row.astype(dtype) + (jnp.asarray(offset).astype(dtype) - column.astype(dtype)))
        logits -= jnp.asarray(bias.slopes).astype(dtype)[:, None, None] * distances
    elif bias is not None:
        logits += jnp.asarray(bias).astype(dtype)
    if resolved.logits_soft_cap:
        logits = jnp.where(visible, logits, 0)  # a bias may be NaN here, and so would be the slope of tanh
        logits = resolved.logits_soft_cap * jnp.tanh(logits / resolved.logits_soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)

    # A row that sees nothing has the maximum -inf and the sum 0: each is replaced before it can make a NaN.
    maximum = jnp.max(logits, axis=-1, initial=-jnp.inf)  # [B, N, T]
    if sinks is not None:
        sinks = jnp.asarray(sinks).astype(dtype)[:, None]  # [N, 1]
        maximum = jnp.maximum(maximum, sinks)
    maximum = lax.stop_gradient(jnp.where(maximum == -jnp.inf, 0, maximum))
    weights = jnp.where(visible, jnp.exp(logits - maximum[..., None]), 0)
    total = weights.sum(-1)
    if sinks is not None:
        total += jnp.exp(sinks - maximum)
    is_empty = total == 0
    safe_total = jnp.where(is_empty, 1, total)
    lse = jnp.where(is_empty, -jnp.inf, maximum + jnp.log(safe_total))

    probabilities = weights / safe_total[..., None]
    if resolved.dropout_rate:
        seeds = _dropout.make_seeds(dropout_rng, batch, num_heads)
        keep = _dropout.keep(seeds, resolved.dropout_rate, seqlen_q, seqlen_kv)
        probabilities = jnp.where(keep, probabilities / (1 - resolved.dropout_rate), 0)
    probabilities = probabilities.reshape(batch, *groups, seqlen_q, seqlen_kv).astype(value.dtype)
    out = jnp.einsum(
        "bkgts,bske->btkge", probabilities, value, precision=precision, preferred_element_type=dtype
    )
    out = out.reshape(batch, seqlen_q, num_heads, value.shape[-1]).astype(query.dtype)
    out = jnp.where(_per_row(row_exists), out, 0)  # so that a NaN in the cotangent of such a row stays there
    lse = jnp.swapaxes(lse, 1, 2)
    if not is_batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_residual else out


def _per_batch(x: jax.Array | int) -> jax.Array:
    """A number, or one per batch element, to meet arrays [B, N, T, S]."""
    return jnp.reshape(x, (-1, 1, 1, 1))


def _below(index: jax.Array, lengths: jax.Array | None) -> jax.Array:
    return index < _per_batch(_INT32.max if lengths is None else lengths)


def _per_row(exists: jax.Array) -> jax.Array:
    """[B, 1, L, 1] to meet arrays [B, L, N, H]."""
    return exists[:, 0, :, :, None]
