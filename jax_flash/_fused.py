"""Attention by the fused kernels: custom_vjp joins the forward to the backward pass."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from . import _primitives, _sharding
from ._operands import OPERANDS

# A call has at most one of these operands.
_BIASES = ("bias", "alibi_slopes")


# Inside a jit, the gradient of an eager call is one program, too, and XLA drops passes whose results nobody uses.
# (symbolic_zeros would tell custom_vjp which, but eager shard_map does not support them.)
@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention(query, key, value, operands, options):
    """Takes and returns what `_primitives.forward` does, and is differentiable."""
    return _primitives.forward(query, key, value, operands, options)


@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def attention_without_lse(query, key, value, operands, options):
    """The same with None for the log-sum-exp, which has no cotangent then: one array less for the backward pass."""
    return _primitives.forward(query, key, value, operands, options)[0], None


def _forward(query, key, value, operands, options):
    out, lse = _primitives.forward(query, key, value, operands, options)
    out = checkpoint_name(out, "flash_attention_out")
    lse = checkpoint_name(lse, "flash_attention_lse")
    return (out, lse), (query, key, value, out, lse, operands)


def _forward_without_lse(*args):
    (out, _), residuals = _forward(*args)
    return (out, None), residuals


def _backward(options, residuals, cotangents):
    query, key, value, out, lse, operands = residuals
    dout, dlse = cotangents
    dq, dk, dv = _primitives.backward(query, key, value, out, lse, dout, dlse, operands, options)
    operand_grads = dict.fromkeys(operands)
    if "scale_factor" in operands:
        operand_grads["scale_factor"] = _scale_gradient(query, dq, operands)
        dq, dk = (_times_factor(x, operands["scale_factor"]) for x in (dq, dk))
    if "sinks" in operands:
        operand_grads["sinks"] = _sinks_gradient(out, lse, dout, dlse, operands)
    for name in _BIASES:
        if name in operands:
            sums = _primitives.backward_bias(query, key, value, out, lse, dout, dlse, operands, options)
            operand_grads[name] = _sum_to(sums, operands[name])
    assert all(
        operand_grads[x.name] is not None for x in OPERANDS if x.is_differentiable and x.name in operands
    )
    return dq, dk, dv, operand_grads


attention.__wrapped__.defvjp(_forward, _backward)
attention_without_lse.__wrapped__.defvjp(_forward_without_lse, _backward)


def _sum_to(sums, like):
    """`sums` with four axes, summed to the shape of `like`: its broadcast dimensions, and the axes it lacks."""
    sums = jnp.sum(sums, tuple(range(like.ndim, sums.ndim)))
    axes = [
        axis for axis, sizes in enumerate(zip(sums.shape, like.shape, strict=True)) if sizes[0] != sizes[1]
    ]
    return jnp.sum(sums, axes, keepdims=True).astype(like.dtype)


def _times_factor(x, factor):
    """A gradient [B, ...] times the factor [B] of the scale, in x's dtype."""
    factor = _sharding.with_batch_like(factor, x)[:, None, None, None]
    return (factor * x.astype(factor.dtype)).astype(x.dtype)


def _scale_gradient(query, dq, operands):
    """The gradient [B] of the scale's factor: the sum of q dq, with dq before it is multiplied by the factor."""
    dtype = operands["scale_factor"].dtype
    products = _zero_beyond_lengths(query, operands).astype(dtype) * dq.astype(dtype)
    return jnp.sum(products, (1, 2, 3))


def _sinks_gradient(out, lse, dout, dlse, operands):
    """The gradient [B, N] of the sinks: that of a logit, p (dp - delta), with dp = 0, since a sink has no value."""
    dout = _zero_beyond_lengths(dout, operands)
    delta = jnp.sum(dout.astype(lse.dtype) * out.astype(lse.dtype), -1)  # [B, T, N]
    if dlse is not None:
        delta -= dlse
    sinks = operands["sinks"][..., None, :]
    # lse is -inf in a fully masked row whose sink is -inf. NaN and +inf come from a sink, and its gradient shows them.
    return -jnp.sum(jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks - lse) * delta), -2)


def _zero_beyond_lengths(x, operands):
    """Sets the rows of x [B, T, ...] beyond the lengths to 0: they may hold anything."""
    if "query_seq_lengths" not in operands:
        return x
    exists = jnp.arange(x.shape[1]) < operands["query_seq_lengths"][:, None]
    return jnp.where(exists.reshape(*exists.shape, *(1,) * (x.ndim - 2)), x, 0)
