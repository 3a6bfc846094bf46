"""Attention for flax's layers.

```python
flax.linen.MultiHeadDotProductAttention(num_heads=8, attention_fn=jax_flash.flax.attention_fn)
flax.nnx.MultiHeadAttention(num_heads=8, ..., attention_fn=jax_flash.flax.attention_fn)
```
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from ._attention import flash_attention


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
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
) -> jax.Array:
    """The `attention_fn` of `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`.

    Every parameter that flax knows is named, because linen silently drops those that are not; what the kernels do
    not support is refused.

    A causal layer needs no mask: give linen `functools.partial(attention_fn, is_causal=True)`, and call an nnx layer
    with `is_causal=True`. In versions of flax whose nnx layer does not take `is_causal`, give it the partial too; in
    those whose layer does, it always passes `is_causal` on, and so silently overrides that of a partial.

    Args:
      query: [..., T, N, H], with any batch axes.
      key: [..., S, K, H].
      value: [..., S, K, Hv].
      bias: not supported.
      mask: not supported.
      broadcast_dropout: without effect.
      dropout_rng: without effect.
      dropout_rate: must be 0 unless deterministic.
      deterministic: whether dropout is off, as in flax. (Not the option of `flash_attention`.)
      dtype: the dtype to compute in; None: the one that query, key and value promote to.
      precision: as of `flash_attention`.
      module: not supported: the attention weights that it would record are never written.
      is_causal: whether query i sees only the keys j <= i.
      force_fp32_for_softmax: without effect: the softmax is always computed in at least float32.
      qk_attn_weights_einsum: not supported.
      attn_weights_value_einsum: not supported.
      input_positions: not supported.

    Returns:
      [..., T, N, Hv].

    Raises:
      NotImplementedError: an argument that is not supported was given.
      TypeError, ValueError: as `flash_attention`.
    """
    refusals = {
        "mask": "the kernels take no mask array. For causal attention pass no mask, and is_causal=True instead",
        "bias": "the kernels take no bias",
        "module": "the attention weights are never written, so sow_weights cannot record them",
        "qk_attn_weights_einsum": "the kernels have their own products",
        "attn_weights_value_einsum": "the kernels have their own products",
        "input_positions": "the kernels apply no position embedding",
    }
    given = locals()
    for name, reason in refusals.items():
        if given[name] is not None:
            raise NotImplementedError(f"jax_flash.flax.attention_fn does not support {name}: {reason}.")
    if dropout_rate and not deterministic:
        raise NotImplementedError(
            "jax_flash.flax.attention_fn does not support dropout of attention weights: the kernels have none. Set "
            f"the layer's dropout_rate to 0 (it is {dropout_rate}) or call it with deterministic=True."
        )

    dtype = jnp.result_type(query, key, value) if dtype is None else dtype
    query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    *batch, seqlen_q, num_heads, _ = query.shape
    query, key, value = (x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:]) for x in (query, key, value))
    out = flash_attention(query, key, value, is_causal=is_causal, precision=precision)
    return out.reshape(*batch, seqlen_q, num_heads, out.shape[-1])
