"""Attention for flax's layers.

```python
flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_flash.flax.attention_fn)
flax.nnx.MultiHeadAttention(num_heads=8, ..., attention_fn=jax_flash.flax.attention_fn)
```
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ._alibi import Alibi
from ._attention import flash_attention
from ._checks import as_array, broadcasts_to
from ._ring import axis_size, ring_attention


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | Alibi | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: jax.lax.PrecisionLike = None,
    module: Any = None,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    input_positions: jax.Array | None = None,
    forward_mode: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    implementation: Literal["xla"] | None = None,
) -> jax.Array:
    """The `attention_fn` of `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`.

    It computes what flax's own attention computes, in training and in decoding, with two differences:

    - A fully masked row has output 0 and zero gradients. (Flax gives it the mean of all values.)
    - Dropout keeps other weights, since its bits come from another generator, and draws for each batch element and
      head. (Flax draws once for all of them, unless `broadcast_dropout` is False.)

    All parameters that flax's layers pass are listed, because linen silently drops unlisted ones. Those that the
    kernels do not support are refused.

    A causal layer needs no mask, an array of T x S to write and read. Give linen
    `functools.partial(attention_fn, is_causal=True)`, and call an nnx layer with `is_causal=True`. An nnx layer that
    takes `is_causal` always passes it on and silently overrides that of a partial; in versions of flax whose layer does
    not take it, pass the partial. A layer that decodes must have neither: flax masks the unused part of the cache.

    Flax's layers pass no bias; `functools.partial(attention_fn, bias=bias)` adds one.

    `functools.partial(attention_fn, axis_name="sequence")` is for a layer inside `shard_map` whose sequence is sharded
    over that axis: it calls :func:`jax_flash.ring_attention`.

    Args:
      query: [..., T, N, H], with any batch axes.
      key: [..., S, K, H].
      value: [..., S, K, Hv].
      bias: array broadcastable to [..., N, T, S], added to the scaled logits, differentiable; or
        :class:`jax_flash.Alibi`, which takes the first query of each call as position 0, so not for decoding.
      mask: array of any dtype, broadcastable to [..., N, T, S]; nonzero where the key is visible.
      broadcast_dropout: without effect, see above.
      dropout_rng: PRNG key of the dropout; may be None without dropout.
      dropout_rate: as in `flash_attention`; ignored if `deterministic`.
      deterministic: whether dropout is off, as in flax. (Not the option of `flash_attention`.)
      dtype: dtype to compute in; None: the result type of query, key and value.
      precision: as in `flash_attention`.
      module: not supported: it would record the attention weights, which are never materialized.
      is_causal: whether query i sees only keys j <= i, among those that the mask shows.
      force_fp32_for_softmax: without effect: the softmax is always computed in at least float32.
      qk_attn_weights_einsum: not supported.
      attn_weights_value_einsum: not supported.
      input_positions: not supported.
      forward_mode: as in `flash_attention`; `functools.partial(attention_fn, forward_mode=True)` gives it to a layer.
      axis_name: the mesh axis over which the sequence is sharded; None: the device has all of it. With an axis, T
        and S above are the lengths on a device, but a mask and a bias have the device's rows and all keys.
      layout: as in `ring_attention`; without effect if axis_name is None.
      implementation: as in `flash_attention`.

    Returns:
      [..., T, N, Hv].

    Raises:
      NotImplementedError: an argument that is not supported was given; or as for `flash_attention`.
      TypeError: as for `flash_attention`.
      ValueError: as for `flash_attention`, with axis_name as for `ring_attention`; also `is_causal` or an `Alibi` in
        decoding.
    """
    refusals = {
        "module": "the attention weights are never materialized, so sow_weights cannot record them",
        "qk_attn_weights_einsum": "the kernels have their own products",
        "attn_weights_value_einsum": "the kernels have their own products",
        "input_positions": "the kernels apply no position embedding",
    }
    given = locals()
    for name, reason in refusals.items():
        if given[name] is not None:
            raise NotImplementedError(f"jax_flash.flax.attention_fn does not support {name}: {reason}.")

    inputs = [as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    if dtype is None:
        dtype = jnp.result_type(*inputs)
    elif not _is_floating(dtype):
        raise TypeError(f"dtype must be None or a floating-point dtype, got {dtype!r}.")
    query, key, value = (x.astype(dtype) for x in inputs)
    if query.ndim < 3:
        raise ValueError(f"query must have shape [..., T, N, H], got shape {list(query.shape)}.")
    *batch, seqlen_q, num_heads, _ = query.shape
    for name, x in (("key", key), ("value", value)):
        # Checked before they are folded: different batch axes may have the same product.
        if x.shape[:-3] != query.shape[:-3] or x.ndim != query.ndim:
            raise ValueError(
                f"{name} must have query's batch axes {batch}, got shape {list(x.shape)} with query's "
                f"{list(query.shape)}."
            )
    num_shards = 1 if axis_name is None else axis_size(axis_name)
    seqlen_kv = num_shards * key.shape[-3]
    scores = (*batch, num_heads, seqlen_q, seqlen_kv)
    if mask is not None and num_shards * seqlen_q == 1 < seqlen_kv:  # decoding: flax masks the cache
        if is_causal:
            raise ValueError(
                f"is_causal must be False in decoding, got True for one query and {seqlen_kv} keys: the query "
                "would see only the first key. Flax's mask of the cache suffices."
            )
        if isinstance(bias, Alibi):
            raise ValueError(
                f"bias must not be Alibi in decoding, got it for one query and {seqlen_kv} keys: distances would "
                "be those from position 0. Call flash_attention with query_offset."
            )
    if bias is not None and not isinstance(bias, Alibi):
        bias = _fold_batch("bias", as_array("bias", bias), scores)
    if mask is not None:
        mask = _fold_batch("mask", as_array("mask", mask).astype(bool), scores)
    # Flax passes the layer's rate whether dropout is on or not.
    dropout_rate = 0.0 if deterministic else dropout_rate
    query, key, value = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    attention = flash_attention
    if axis_name is not None:
        attention = functools.partial(ring_attention, axis_name=axis_name, layout=layout)
    out = attention(
        query,
        key,
        value,
        bias,
        mask,
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        dropout_rng=dropout_rng,
        precision=precision,
        forward_mode=forward_mode,
        implementation=implementation,
    )
    return out.reshape(*batch, seqlen_q, num_heads, out.shape[-1])


def _is_floating(dtype: Any) -> bool:
    try:
        return jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        return False


def _fold_batch(name: str, x: jax.Array, scores: tuple[int, ...]) -> jax.Array:
    """An array that is broadcastable to [..., N, T, S], with at most one batch axis."""
    if not broadcasts_to(x.shape, scores):
        # Checked before it is folded: flash_attention could not name the shape as passed.
        raise ValueError(
            f"{name} must be broadcastable to [..., N, T, S] = {list(scores)}, got shape {list(x.shape)}."
        )
    batch, own = scores[:-3], x.shape[:-3]
    if math.prod(own) == 1:
        return x.reshape(x.shape[len(own) :])  # the same for the whole batch: not repeated
    if own != batch:
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))  # some batch axes, but not others
    return x.reshape(math.prod(batch), *x.shape[-3:])
