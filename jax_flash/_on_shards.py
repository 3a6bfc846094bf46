"""Calls of a pass on the devices of a mesh: each for its part of the batch, the heads and the query rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _dropout, _halo, _head_exchange, _partitioning, _sharding, _subsequence
from ._operands import AXES, POOLED, first_batch_axis, has_keys, is_broadcastable
from ._options import AttentionOptions
from ._passes import Pass, bind, whole_keys


def bind_on_shards(call: Pass, inner: Primitive, whole_mesh: Mesh | None, *args: jax.Array, **params):
    """Calls `inner` on each device, for the device's part of the batch, the heads and the query rows."""
    batch_shape = args[0].shape[: -len(AXES["q"])]
    wanted_shapes = [x.shape for x in jax.eval_shape(functools.partial(inner.bind, **params), *args)]
    arrays = {
        name: _expand_mixed_batch_axes(name, x, batch_shape)
        for name, x in call.by_name(args, params["operands"]).items()
    }
    local_call = functools.partial(bind, call, inner, options=params["options"])
    if _partitioning.CAN_PARTITION:
        local_call = _partitioned(call, local_call, whole_mesh, arrays, params["options"])
    results = local_call(arrays)
    # Where the bias was expanded, the last batch axis of dbias was too: it is summed over.
    return [
        x if x.shape == shape else jnp.sum(x, first_batch_axis(name) + len(batch_shape) - 1, keepdims=True)
        for name, x, shape in zip(call.results, results, wanted_shapes, strict=True)
    ]


def _expand_mixed_batch_axes(name: str, x: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array:
    """Expands the batch axes of a broadcastable array if only some have size 1, so that they fold into one."""
    if not is_broadcastable(name):
        return x
    first = first_batch_axis(name)
    end = first + len(batch_shape)
    before, own, rest = x.shape[:first], x.shape[first:end], x.shape[end:]
    return x if math.prod(own) == 1 else jnp.broadcast_to(x, (*before, *batch_shape, *rest))


def _partitioned(
    call: Pass,
    local_call: Callable,
    whole_mesh: Mesh | None,
    arrays: dict[str, jax.Array],
    options: AttentionOptions,
) -> Callable:
    """Makes `local_call` one that XLA partitions over batch axes, heads and query rows, not over keys or head dims.

    A device has the rows of a part of the sequence, and all keys or those that its rows see in a window. It adds a part
    to the gradients that are sums over rows. Or it exchanges its rows for all rows of some heads.
    """
    *batch_shape, seqlen_q, num_heads, _ = arrays["q"].shape
    seqlen_kv, num_kv_heads, _ = whole_keys(arrays)[0].shape[-3:]
    results = zip(call.results, jax.eval_shape(local_call, arrays), strict=True)
    result_shapes = {name: x.shape for name, x in results}

    def factors(name: str, shape: tuple[int, ...]) -> list[str]:
        """Names the axes of an array for the sharding rule, in which equal names are sharded alike."""
        # Query and key heads are one factor where they correspond one to one.
        axes = AXES[name].replace("k", "n") if num_heads == num_kv_heads else AXES[name]
        if name in POOLED:
            return list(axes)
        axes = [*(f"b{i}" for i in range(len(batch_shape))), *axes]
        directions = ["directions"] * first_batch_axis(name)
        if not is_broadcastable(name):
            return directions + axes
        # An axis that is broadcast, or in blocks, has a factor of its own.
        sizes = (*batch_shape, num_heads, seqlen_q, seqlen_kv)
        shape = shape[len(directions) :]
        return directions + [
            axis if size == full else f"x{name}{i}"
            for i, (axis, size, full) in enumerate(zip(axes, shape, sizes, strict=True))
        ]

    is_aligned = seqlen_q == seqlen_kv and "query_offset" not in arrays  # query i is where key i is
    is_uneven = options.reach != (-1, -1) or "query_segment_ids" in arrays  # do some rows see fewer keys?
    arg_factors = {name: factors(name, x.shape) for name, x in arrays.items()}
    has_pair_rows = any(is_broadcastable(name) and "t" in own for name, own in arg_factors.items())
    result_factors = {name: factors(name, shape) for name, shape in result_shapes.items()}
    by_query_heads = {name: ["n" if x == "k" else x for x in own] for name, own in result_factors.items()}

    def partition(mesh, arg_infos, result_infos):
        *batch, rows, heads, _ = _divisible_spec(mesh, arg_infos[0])
        if num_kv_heads % _sharding.num_parts(mesh, heads):
            heads = None  # a group of query heads and its key head stay on one device
        num_rows = seqlen_q // _sharding.num_parts(mesh, rows)
        if num_rows == seqlen_q or ("dropout_seeds" in arrays and num_rows % _dropout.UNIT):
            rows = None
        mesh_axes = {f"b{i}": axes for i, axes in enumerate(batch)} | {"t": rows, "n": heads}
        if whole_mesh and sum(size > 1 for size in mesh.shape.values()) > 1:
            # Beside manual axes XLA does not say which of several axes partition an array: those named here may be
            # others of the same sizes. So a device neither asks for its place along them nor adds up parts of others.
            summed_over = {
                factor for own in by_query_heads.values() for factor in mesh_axes if factor not in own
            }
            mesh_axes |= dict.fromkeys(summed_over | {"t"})
            rows, heads = mesh_axes["t"], mesh_axes["n"]
        halo = exchange = None
        of_keys = [
            _divisible_spec(mesh, x)[-3] for name, x in zip(arrays, arg_infos, strict=True) if has_keys(name)
        ]
        if rows and of_keys and all(_sharding.as_tuple(axes) == _sharding.as_tuple(rows) for axes in of_keys):
            halo = _halo.of(rows, mesh, seqlen_q, options) if is_aligned else None
            if not halo and not has_pair_rows:
                parts = _sharding.num_parts(mesh, heads)
                exchange = _head_exchange.of(
                    rows, mesh, num_heads // parts, num_kv_heads // parts, is_uneven=is_uneven
                )
        # The device has the keys beside its queries before the call, and their gradients after it.
        has_own_keys = bool(halo or exchange)

        # A result that lacks an axis is a sum over it, of which each device has a part. Over query heads that share a
        # key head the kernel sums. A sum may be scattered along the keys.
        summed, scattered = {}, {}
        for (name, own), info in zip(by_query_heads.items(), result_infos, strict=True):
            missing = {factor: axes for factor, axes in mesh_axes.items() if axes and factor not in own}
            if exchange:
                missing.pop("t", None)  # a device has all rows
            summed[name] = [axis for axes in missing.values() for axis in _sharding.as_tuple(axes)]
            keys = _sharding.as_tuple(dict(zip(own, _divisible_spec(mesh, info), strict=True)).get("s") or ())
            are_parts = {*keys} <= {*summed[name]} and not (has_own_keys and has_keys(name))
            scattered[name] = keys if are_parts else ()

        def sharding(name: str, own: list[str]) -> NamedSharding:
            keys = rows if has_own_keys and has_keys(name) else scattered.get(name) or None
            return NamedSharding(mesh, PartitionSpec(*map((mesh_axes | {"k": heads, "s": keys}).get, own)))

        arg_shardings, result_shardings = (
            {name: sharding(name, own) for name, own in group.items()}
            for group in (arg_factors, result_factors)
        )

        def call_and_sum(*args: jax.Array) -> list[jax.Array]:
            part = dict(zip(arrays, args, strict=True))
            with no_mesh():
                if exchange:
                    part = {
                        name: exchange.to_heads(x, arg_factors[name], _rows(name)) for name, x in part.items()
                    }
                elif rows:
                    row = jax.lax.axis_index(rows) * num_rows
                    needs_offset = _subsequence.needs_offset(part, options)
                    part = _subsequence.at(part, row, 0, with_offset=needs_offset)
                if halo:
                    part |= {name: halo.gather(x) for name, x in part.items() if has_keys(name)}
                results = dict(zip(call.results, local_call(part), strict=True))
                if exchange:
                    results = {
                        name: exchange.to_rows(x, result_factors[name], _rows(name))
                        for name, x in results.items()
                    }
                return [sum_of_parts(name, x) for name, x in results.items()]

        def sum_of_parts(name: str, x: jax.Array) -> jax.Array:
            if not summed[name]:
                return x
            if halo and has_keys(name):
                return halo.sum_parts(x)
            if is_broadcastable(name) and rows and "t" not in result_factors[name]:
                x = jnp.sum(x, -2, keepdims=True)  # the blocks of the device's rows
            keys = result_factors[name].index("s") if scattered[name] else None
            x = sum_over_devices(x, summed[name], scattered[name], keys)
            # dbias: the caller sums over the axes that lack elements, so zeros do not matter.
            shape = result_shardings[name].shard_shape(result_shapes[name])
            return jnp.pad(x, [(0, whole - own) for whole, own in zip(shape, x.shape, strict=True)])

        return whole_mesh or mesh, call_and_sum, [*result_shardings.values()], tuple(arg_shardings.values())

    rule = [[*group.values()] for group in (arg_factors, result_factors)]
    in_order = dict.fromkeys(factor for group in rule for axes in group for factor in axes)
    partitioned = custom_partitioning(lambda *args: local_call(dict(zip(arrays, args, strict=True))))
    partitioned.def_partition(
        partition,
        sharding_rule=" -> ".join(", ".join(map(" ".join, group)) for group in rule),
        need_replication_factors=tuple(x for x in in_order if x[0] not in "btnk"),  # in order of appearance
    )
    return lambda arrays: partitioned(*arrays.values())


def _rows(name: str) -> str:
    """The axis along which an array is sharded with the sequence, if it has that axis."""
    return "s" if has_keys(name) else "t"


def sum_over_devices(x: jax.Array, axes: list, scattered: tuple, axis: int | None) -> jax.Array:
    """Adds up the parts of devices along mesh axes; along those in `scattered`, each keeps a part of `axis` of the sum.

    The parts have the array's dtype, and their sum is rounded to it once.
    """
    total = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if scattered:
        total = jax.lax.psum_scatter(total, scattered, scatter_dimension=axis, tiled=True)
    if others := [axis for axis in axes if axis not in scattered]:
        total = jax.lax.psum(total, others)
    return total.astype(x.dtype)


def no_mesh():
    """A context for the code of one device: under explicit sharding JAX would put shardings into it."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _divisible_spec(mesh, array) -> list:
    """The mesh axes that partition each axis of `array`; None where the parts would differ in size."""
    spec = getattr(array.sharding, "spec", (None,) * len(array.shape))
    partition = zip(array.shape, spec, strict=True)
    return [None if size % _sharding.num_parts(mesh, axes) else axes for size, axes in partition]
