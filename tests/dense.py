"""Attention with the whole score matrix, in float64: its derivatives are the exact ones.

`complex_step` computes the first along a direction in NumPy, where nothing is compiled, and that of the oracle's
gradient, too; JAX computes the others. It shares no code with the package. With `rounding` it is the naive computation
in another type, the baseline of the closeness rule: each result, and each derivative of it, is rounded.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle

Rounding = Callable[[Any], Any]
STEP = 2.0**-200  # its square vanishes beside any result, and no derivative underflows


def complex_step(f: Callable, x: Any, t: Any) -> Any:
    """The derivative of f at x along t, exact but for rounding: Im f(x + i h t) / h (Squire and Trapp, 1998)."""
    assert all(isinstance(part, np.ndarray) for part in jax.tree.leaves(x))  # JAX has float32 by default
    moved = jax.tree.map(lambda x, t: x + 1j * STEP * t, x, t)
    return jax.tree.map(lambda y: y.imag / STEP, f(*moved))


def rounding_of(kind: str) -> tuple[Rounding, Rounding]:
    """How naive arithmetic in this type rounds results, and operands of products."""
    bits = {"float16": (5, 10), "bfloat16": (8, 7), "tfloat32": (8, 10)}[kind]
    result, operand = oracle.arithmetic_of(kind)
    in_numpy = operand if kind == "tfloat32" else result

    def rounded(x):
        if isinstance(x, np.ndarray):  # of a complex step
            return in_numpy(x.real) + 1j * STEP * in_numpy(x.imag / STEP)
        return jax.lax.reduce_precision(x, *bits)

    return ((lambda x: x), rounded) if kind == "tfloat32" else (rounded, rounded)


EXACT = ((lambda x: x), (lambda x: x))


def attention(
    q: Any,
    k: Any,
    v: Any,
    differentiable: dict[str, Any],
    *,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    keep: np.ndarray | None = None,
    rounding: tuple[Rounding, Rounding] = EXACT,
    precision: Any = None,
    deterministic: bool = False,
    **mask_options: Any,
) -> tuple[Any, Any]:
    """Computes out and lse, with lse 0 where it is -inf and has no derivative. Takes arrays of JAX or of NumPy.

    `differentiable` may have bias, alibi (the slopes), sinks and scale.
    """
    del precision, deterministic  # these do not change the exact result
    xp = np if isinstance(q, np.ndarray) else jnp
    rounded, operand = rounding
    group = q.shape[2] // max(k.shape[2], 1)
    q, k, v = (xp.swapaxes(x, 1, 2) for x in (q, k, v))  # [B, heads, length, dim]
    k, v = (xp.repeat(x, group, axis=1) for x in (k, v))
    seen = oracle.visible(q.shape[0], q.shape[2], k.shape[2], **mask_options)
    scale = differentiable.get("scale", q.shape[-1] ** -0.5 if scale is None else scale)

    s = rounded(scale * rounded(operand(q) @ xp.swapaxes(operand(k), -1, -2)))
    if "bias" in differentiable:
        s = rounded(s + differentiable["bias"])
    if "alibi" in differentiable:
        offset = np.asarray(mask_options.get("query_offset", 0), np.float64).reshape(-1, 1, 1, 1)
        distance = np.abs(np.arange(q.shape[2])[:, None] + offset - np.arange(k.shape[2]))
        s = rounded(s - differentiable["alibi"].reshape(-1, 1, 1) * distance)
    s = xp.where(seen, s, 0.0)
    if logits_soft_cap is not None:
        s = rounded(logits_soft_cap * xp.tanh(s / logits_soft_cap))
    logits = xp.where(seen, s, -np.inf)
    if "sinks" in differentiable:  # keys without a value
        sinks = xp.broadcast_to(differentiable["sinks"].reshape(-1, 1, 1), (*s.shape[:-1], 1))
        logits = xp.concatenate([logits, sinks], -1)
    top = jax.lax.stop_gradient(logits.real.max(-1, keepdims=True, initial=-np.inf))
    is_empty = top == -np.inf
    total = xp.exp(logits - xp.where(is_empty, 0.0, top)).sum(-1, keepdims=True)
    lse = xp.where(is_empty, 0.0, top + xp.log(xp.where(is_empty, 1.0, total)))
    p = xp.where(seen & ~is_empty, rounded(xp.exp(xp.where(seen, s, 0.0) - lse)), 0.0)
    if keep is not None:
        p = rounded(xp.where(keep, p / (1 - dropout_rate), 0.0))
    out = rounded(operand(p) @ operand(v))
    return xp.swapaxes(out, 1, 2), xp.swapaxes(lse[..., 0], 1, 2)
