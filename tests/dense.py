"""Attention in plain JAX with the whole score matrix, in float64: JAX's derivatives of it are the exact ones.

It shares no code with the package. With `rounding` it is the naive computation in another type, the baseline of the
closeness rule: each result, and each derivative of it, is rounded.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

Rounding = Callable[[Any], Any]


def rounding_of(kind: str) -> tuple[Rounding, Rounding]:
    """How naive arithmetic in this type rounds results, and operands of products."""
    bits = {"float16": (5, 10), "bfloat16": (8, 7), "tfloat32": (8, 10)}[kind]

    def rounded(x):
        return jax.lax.reduce_precision(x, *bits)

    return ((lambda x: x), rounded) if kind == "tfloat32" else (rounded, rounded)


EXACT = ((lambda x: x), (lambda x: x))


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    differentiable: dict[str, jax.Array],
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    keep: np.ndarray | None = None,
    rounding: tuple[Rounding, Rounding] = EXACT,
    precision: Any = None,
    deterministic: bool = False,
    **mask_options: Any,
) -> tuple[jax.Array, jax.Array]:
    """Computes out and lse, with lse 0 where it is -inf and has no derivative.

    `differentiable` may have bias, alibi (the slopes), sinks and scale.
    """
    del precision, deterministic  # these do not change the exact result
    rounded, operand = rounding
    group = q.shape[2] // max(k.shape[2], 1)
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    seen = oracle.visible(q.shape[0], q.shape[1], k.shape[1], **mask_options)
    scale = differentiable.get("scale", q.shape[-1] ** -0.5 if scale is None else scale)

    s = rounded(scale * rounded(jnp.einsum("btnd,bsnd->bnts", operand(q), operand(k))))
    if "bias" in differentiable:
        s = rounded(s + differentiable["bias"])
    if "alibi" in differentiable:
        offset = np.asarray(mask_options.get("query_offset", 0), np.float64).reshape(-1, 1, 1, 1)
        distance = np.abs(np.arange(q.shape[1])[:, None] + offset - np.arange(k.shape[1]))
        s = rounded(s - differentiable["alibi"].reshape(-1, 1, 1) * distance)
    s = jnp.where(seen, s, 0.0)
    if logits_soft_cap is not None:
        s = rounded(logits_soft_cap * jnp.tanh(s / logits_soft_cap))
    s = jnp.where(seen, s, -np.inf)
    columns = [s]
    if "sinks" in differentiable:  # keys without a value
        sinks = differentiable["sinks"].reshape(-1, 1, 1)
        columns.append(jnp.broadcast_to(sinks, (*s.shape[:-1], 1)))
    logits = jnp.concatenate(columns, -1)
    is_empty = (logits == -np.inf).all(-1)
    lse = jax.nn.logsumexp(jnp.where(is_empty[..., None], 0.0, logits), -1)
    p = jnp.where(
        seen & ~is_empty[..., None], rounded(jnp.exp(jnp.where(seen, s, 0.0) - lse[..., None])), 0.0
    )
    if keep is not None:
        p = rounded(jnp.where(keep, p / (1 - dropout_rate), 0.0))
    out = rounded(jnp.einsum("bnts,bsne->btne", operand(p), operand(v)))
    return out, jnp.swapaxes(jnp.where(is_empty, 0.0, lse), 1, 2)
