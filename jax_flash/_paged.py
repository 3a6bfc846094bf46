"""Attention to keys and values in pages, for inference (Kwon et al., https://arxiv.org/abs/2309.06180)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching

from . import _checks, _primitives, _reference, _sharding
from ._operands import POOLED, is_broadcastable
from ._options import AttentionOptions


@functools.partial(jax.jit, static_argnums=(4, 5))
@functools.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def attention(
    query: jax.Array,
    key_pages: jax.Array,
    value_pages: jax.Array,
    operands: dict[str, jax.Array],
    options: AttentionOptions,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Computes out and lse, by the kernels or by "xla". Not differentiable.

    Args:
      query: [B, T, N, H].
      key_pages: [pages, keys of a page, K, H].
      value_pages: [pages, keys of a page, K, Hv].
      operands: page_indices [B, P], and others of `_primitives.forward`.
    """
    if implementation == "xla":
        others = {name: x for name, x in operands.items() if name != "page_indices"}
        key, value = (_gathered(x, operands["page_indices"]) for x in (key_pages, value_pages))
        return _reference.attention(query, key, value, others, options)
    return _primitives.paged_forward(
        dict(q=query, k_pages=key_pages, v_pages=value_pages) | operands, options
    )


@attention.__wrapped__.defjvp
def _refuse(*args):
    _checks.refuse_derivative_of_pages()


def _gathered(pages: jax.Array, page_indices: jax.Array) -> jax.Array:
    """The keys [B, S, K, H] of all sequences."""
    num_pages, page_size, *head = pages.shape
    batch, pages_per_sequence = page_indices.shape
    whole = _sharding.take_pages(pages, jnp.clip(page_indices, 0, num_pages - 1))
    return whole.reshape(batch, pages_per_sequence * page_size, *head)


def _batch(args: Sequence, dims: Sequence, *, operands: tuple[str, ...], options: AttentionOptions) -> Any:
    """Adds a batch axis in front. Pages have no batch axes: mapped ones become more pages."""
    names = ("q", *POOLED, *operands)
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    is_shared = all(dim is None for name, dim in zip(names, dims, strict=True) if name in POOLED)

    def with_axis(name: str, x: jax.Array, dim: int | None) -> jax.Array:
        if name in POOLED and is_shared:
            return x
        if dim is not None:
            return jnp.moveaxis(x, dim, 0)
        return jax.lax.broadcast(x, (1 if is_broadcastable(name) else size,))

    named = {name: with_axis(name, x, dim) for name, x, dim in zip(names, args, dims, strict=True)}
    if not is_shared:
        num_pages, indices = named["k_pages"].shape[1], named["page_indices"]
        first = num_pages * jnp.arange(size, dtype=indices.dtype)
        first = first.reshape(size, *(1,) * (indices.ndim - 1))
        named["page_indices"] = first + jnp.clip(indices, 0, num_pages - 1)
        for name in POOLED:
            x = named[name]
            named[name] = x.reshape(size * num_pages, *x.shape[2:])
    return _primitives.paged_forward(named, options), [0, 0]


batching.primitive_batchers[_primitives.paged_forward_p] = _batch
