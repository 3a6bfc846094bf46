"""Attention by the fused kernels: two links from the forward pass to its derivatives.

The default is `jax.custom_vjp`, public API that every transformation knows; it has reverse mode, and whatever
differentiates the gradient. With `forward_mode` JAX meets the primitives themselves, whose rules have both modes.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from . import _derivatives, _kernel_choice
from ._operands import DIFFERENTIABLE, OPERANDS


def attention(query, key, value, operands, options, *, forward_mode: bool, with_lse: bool):
    """Takes and returns what `_primitives.forward` does, and is differentiable; None for lse without `with_lse`."""
    if forward_mode:
        out, lse = _with_both_modes(query, key, value, operands, options)
        return out, lse if with_lse else None
    return (_with_reverse_mode if with_lse else _without_lse)(query, key, value, operands, options)


def _in_planes(query, operands, options, *, is_differentiated=True):
    """The options with which exact float32 products may be of planes: where all that follows recomputes their scores.

    The gradient of a bias does not. Nor do second derivatives: see `_derivatives.py`.
    """
    has_bias = is_differentiated and not operands.keys().isdisjoint(_derivatives.BIASES)
    is_exact = query.dtype == jnp.float32 and options.precision > 0
    in_planes = is_exact and not has_bias and _kernel_choice.has_hopper()
    return dataclasses.replace(options, in_planes=True) if in_planes else options


# Inside a jit, the gradient of an eager call is one program, too, and XLA drops passes whose results nobody uses.
# (symbolic_zeros would tell custom_vjp which, but eager shard_map does not support them.)
@functools.partial(jax.jit, static_argnums=4)
def _with_both_modes(query, key, value, operands, options):
    return _derivatives.forward(dict(q=query, k=key, v=value) | operands, options)


@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _with_reverse_mode(query, key, value, operands, options):
    options = _in_planes(query, operands, options, is_differentiated=False)
    return _derivatives.forward(dict(q=query, k=key, v=value) | operands, options)


@functools.partial(jax.jit, static_argnums=4)
@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _without_lse(query, key, value, operands, options):
    """None for the log-sum-exp, which has no cotangent then: one array less for the backward pass."""
    options = _in_planes(query, operands, options, is_differentiated=False)
    return _derivatives.forward(dict(q=query, k=key, v=value) | operands, options)[0], None


def _forward(query, key, value, operands, options):
    arrays = dict(q=query, k=key, v=value) | operands
    found = _derivatives.named_residuals(arrays, _in_planes(query, operands, options))
    return (found["out"], found["lse"]), arrays | found


def _forward_without_lse(*args):
    (out, _), residuals = _forward(*args)
    return (out, None), residuals


def _backward(options, residuals, cotangents):
    dout, dlse = cotangents
    arrays = residuals | {"dout": dout} | ({} if dlse is None else {"dlse": dlse})
    wanted = [name for name in DIFFERENTIABLE if name in arrays]
    found = _derivatives.gradients(arrays, wanted, _in_planes(arrays["q"], arrays, options))
    operands = {x.name: found.get(x.name) for x in OPERANDS if x.name in residuals}
    return found["q"], found["k"], found["v"], operands


_with_reverse_mode.__wrapped__.defvjp(_forward, _backward)
_without_lse.__wrapped__.defvjp(_forward_without_lse, _backward)
