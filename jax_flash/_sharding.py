"""Types of arrays on a mesh: explicit axes and the varying axes of shard_map.

A mesh can be part of an array's type. The operands of one primitive need matching types. They get them outside of the
custom_vjp, so that JAX sums the gradients of what it replicates.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

Operands = dict[str, jax.Array]


def per_batch(x: jax.Array, query: jax.Array) -> jax.Array:
    """A scalar as [B], sharded like query [B, T, N, H]."""
    spec = _explicit_spec(query)
    if spec is None:
        return jnp.broadcast_to(x, query.shape[:1])
    return jnp.broadcast_to(_reshard(x, query), query.shape[:1], out_sharding=_like(query, spec[0]))


def per_head(x: jax.Array, query: jax.Array) -> jax.Array:
    """[N] as [B, N], sharded like query [B, T, N, H]: a row for each batch element is mapped like other operands."""
    spec = _explicit_spec(query)
    if spec is None:
        return jnp.broadcast_to(x, (query.shape[0], *x.shape))
    batch, _, heads, _ = spec
    x = _reshard(x, query, heads)
    return jnp.broadcast_to(x, (query.shape[0], *x.shape), out_sharding=_like(query, batch, heads))


def take_pages(pages: jax.Array, indices: jax.Array) -> jax.Array:
    """The pages [B, P, ...] that `indices` [B, P] name; on explicit axes of a mesh, sharded like both."""
    of_pages, of_indices = (jax.typeof(x).sharding for x in (pages, indices))
    mesh = of_indices.mesh  # under vmap its axes may not be in the specs
    if not any((*of_pages.spec, *of_indices.spec)) and (mesh.empty or not mesh.are_all_axes_explicit):
        return pages[indices]
    like = pages if any(of_pages.spec) else indices
    return pages.at[indices].get(out_sharding=_like(like, *of_indices.spec, *of_pages.spec[1:]))


def with_batch_like(x: jax.Array, other: jax.Array) -> jax.Array:
    """Shards x [..., B] like other [..., B, T, N, H]; either may have more axes in front."""
    if _explicit_spec(x) or _explicit_spec(other):
        batch_spec = (*(None,) * x.ndim, *jax.typeof(other).sharding.spec[:-3])
        return _reshard(x, other, *batch_spec[-x.ndim :])
    return x


def with_matching_types(
    query: jax.Array, key: jax.Array, value: jax.Array, operands: Operands, *, more_axes: Iterable[str] = ()
) -> tuple[jax.Array, jax.Array, jax.Array, Operands]:
    """The arguments with the bias sharded as its gradient will be, all varying over the same axes of shard_map.

    These are the axes over which any varies, and `more_axes`.
    """
    spec = _explicit_spec(query)
    if spec is not None and "bias" in operands:
        bias = operands["bias"]
        batch, rows, heads, _ = spec
        wanted = batch, heads, rows, None
        axes = (None if size == 1 else axis for size, axis in zip(bias.shape, wanted, strict=True))
        operands = operands | {"bias": _reshard(bias, query, *axes)}
    return _varying_over_all_axes((query, key, value, operands), more_axes)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The axes of shard_map over which `x` is known to vary; none where shard_map does not check."""
    aval = jax.typeof(x)
    if hasattr(aval, "manual_axis_type"):
        return frozenset(aval.manual_axis_type.varying)
    return aval.vma  # before jax 0.10


def are_in_order(axes: str | tuple[str, ...], mesh: Any) -> bool:
    """Whether the axes are in the order of the mesh, the only one in which `lax.ppermute` can number devices."""
    return [axis for axis in mesh.axis_names if axis in as_tuple(axes)] == [*as_tuple(axes)]


def num_parts(mesh: Any, axes: Any) -> int:
    """Into how many parts these axes of the mesh divide an array."""
    return math.prod(mesh.shape[axis] for axis in as_tuple(axes) if axis)


def as_tuple(axes: Any) -> tuple:
    return axes if isinstance(axes, tuple) else (axes,)


def _explicit_spec(x: jax.Array) -> PartitionSpec | None:
    """The partition of `x` over the explicit axes of a mesh; None without any."""
    sharding = jax.typeof(x).sharding
    return sharding.spec if any(sharding.spec) else None


def _like(x: jax.Array, *spec: Any) -> NamedSharding:
    """A sharding on the mesh of `x`, which need not be the current one."""
    mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.core.Tracer) else x.sharding.mesh
    return NamedSharding(mesh, PartitionSpec(*spec))


def _reshard(x: jax.Array, like: jax.Array, *spec: Any) -> jax.Array:
    sharding = _like(like, *spec)
    if isinstance(x, jax.core.Tracer) or isinstance(like, jax.core.Tracer):
        return jax.sharding.reshard(x, sharding)
    return jax.device_put(x, sharding)  # reshard of jax 0.7 takes no array of one device


def _varying_over_all_axes(arrays: Any, more_axes: Iterable[str]) -> Any:
    axes = {axis for x in jax.tree.leaves(arrays) for axis in varying_axes(x)} | set(more_axes)

    def cast(x: jax.Array) -> jax.Array:
        missing = tuple(axes - varying_axes(x))
        if not missing:
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing, to="varying")
        return jax.lax.pvary(x, missing)  # before jax 0.8

    return jax.tree.map(cast, arrays)
