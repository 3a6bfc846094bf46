"""Calls of a pass on the devices of a mesh: each for its part of the batch, the heads and the query rows."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _dropout, _halo, _head_exchange, _partitioning, _sharding, _subsequence
from ._operands import AXES, POOLED, Arrays, first_batch_axis, has_keys, is_broadcastable, sum_dtype
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
    on_one_device = functools.partial(bind, call, inner)
    if _partitioning.CAN_PARTITION:
        results = _ShardedCall(call, on_one_device, whole_mesh, arrays, params["options"]).bind(arrays)
    else:
        results = on_one_device(arrays, params["options"])
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


class _ShardedCall:
    """A call that XLA partitions over batch axes, heads and query rows, not over keys or head dims.

    A device has the rows of a part of the sequence, and all keys or those that its rows see in a window; it adds a part
    to the gradients that are sums over rows. Or, during the call, it has all rows of some heads.
    """

    def __init__(
        self,
        call: Pass,
        on_one_device: Callable[[Arrays, AttentionOptions], list[jax.Array]],
        whole_mesh: Mesh | None,
        arrays: Arrays,
        options: AttentionOptions,
    ):
        self.call, self.on_one_device = call, on_one_device
        self.whole_mesh, self.options = whole_mesh, options
        self.names = tuple(arrays)
        *self.batch_shape, self.seqlen_q, self.num_heads, _ = arrays["q"].shape
        self.seqlen_kv, self.num_kv_heads, _ = whole_keys(arrays)[0].shape[-3:]
        results = jax.eval_shape(functools.partial(on_one_device, options=options), arrays)
        self.results = dict(zip(call.results, results, strict=True))
        # What the axes of each array are. Axes of one name are sharded alike.
        self.arg_axes = {name: self._axes(name, x.shape) for name, x in arrays.items()}
        self.result_axes = {name: self._axes(name, x.shape) for name, x in self.results.items()}

    def _axes(self, name: str, shape: tuple[int, ...]) -> list[str]:
        # Query and key heads are one axis where they correspond one to one.
        axes = AXES[name].replace("k", "n") if self.num_heads == self.num_kv_heads else AXES[name]
        if name in POOLED:
            return list(axes)
        axes = [*(f"b{i}" for i in range(len(self.batch_shape))), *axes]
        directions = ["directions"] * first_batch_axis(name)
        if not is_broadcastable(name):
            return directions + axes
        # An axis that is broadcast, or in blocks, is like no other.
        sizes = (*self.batch_shape, self.num_heads, self.seqlen_q, self.seqlen_kv)
        return directions + [
            axis if size == full else f"x{name}{i}"
            for i, (axis, size, full) in enumerate(zip(axes, shape[len(directions) :], sizes, strict=True))
        ]

    def bind(self, arrays: Arrays) -> list[jax.Array]:
        rule = [[*group.values()] for group in (self.arg_axes, self.result_axes)]
        in_order = dict.fromkeys(axis for group in rule for axes in group for axis in axes)  # of appearance
        partitioned = custom_partitioning(lambda *args: self.on_one_device(self.named(args), self.options))
        partitioned.def_partition(
            self._partition,
            sharding_rule=" -> ".join(", ".join(map(" ".join, group)) for group in rule),
            need_replication_factors=tuple(axis for axis in in_order if axis[0] not in "btnk"),
        )
        return partitioned(*arrays.values())

    def named(self, args: Any) -> dict[str, Any]:
        return dict(zip(self.names, args, strict=True))

    def _partition(self, mesh: Mesh, arg_infos: Any, result_infos: Any):
        results = dict(zip(self.call.results, result_infos, strict=True))
        plan = _Plan(self, mesh, self.named(arg_infos), results)
        shardings = [*plan.result_shardings.values()], tuple(plan.arg_shardings.values())
        return self.whole_mesh or mesh, plan.run, *shardings


class _Plan:
    """What each device of a mesh does with its part of every array of a call."""

    def __init__(self, sharded: _ShardedCall, mesh: Mesh, args: dict[str, Any], results: dict[str, Any]):
        self._sharded = sharded
        mesh_axes = self._mesh_axes(mesh, args)
        self._halo, self._exchange = self._halo_or_exchange(mesh, mesh_axes, args)
        self._xla_exchanges = self._can_xla_exchange(mesh, mesh_axes, args)
        self._num_rows = sharded.seqlen_q // _sharding.num_parts(mesh, mesh_axes["t"])
        if "dropout_seeds" in args and self._num_rows % _dropout.UNIT and not self._exchange:
            mesh_axes["t"] = self._halo = None  # each device has all rows
        self._rows = mesh_axes["t"]

        # A result that lacks an axis is a sum over it, of which each device has a part. Over query heads that share a
        # key head the kernel sums. A sum may be scattered along the keys.
        self._summed, self._scattered = {}, {}
        for name, axes in sharded.result_axes.items():
            lacks = {axis for axis, parts in mesh_axes.items() if parts and axis not in _by_query_head(axes)}
            if self._exchange:
                lacks.discard("t")  # a device has all rows
            self._summed[name] = [
                x for axis in mesh_axes if axis in lacks for x in _sharding.as_tuple(mesh_axes[axis])
            ]
            keys = dict(zip(axes, _divisible_spec(mesh, results[name]), strict=True)).get("s") or ()
            is_sum = {*_sharding.as_tuple(keys)} <= {*self._summed[name]} and not self._has_own_keys(name)
            self._scattered[name] = _sharding.as_tuple(keys) if is_sum else ()

        def sharding(name: str, axes: list[str]) -> NamedSharding:
            if self._exchange and not self._is_exchanged_within(name):
                # Each device gets a part of the heads that its shard has already.
                heads = *_sharding.as_tuple(mesh_axes["n"] or ()), *_sharding.as_tuple(self._rows)
                parts = mesh_axes | {"n": heads, "k": heads, "t": None, "s": None}
            else:
                keys = self._rows if self._has_own_keys(name) else self._scattered.get(name) or None
                parts = mesh_axes | {"k": mesh_axes["n"], "s": keys}
            return NamedSharding(mesh, PartitionSpec(*map(parts.get, axes)))

        self.arg_shardings = {name: sharding(name, axes) for name, axes in sharded.arg_axes.items()}
        self.result_shardings = {name: sharding(name, axes) for name, axes in sharded.result_axes.items()}

    def _mesh_axes(self, mesh: Mesh, args: dict[str, Any]) -> dict[str, Any]:
        """The axes of the mesh that partition batch axes, rows and query heads.

        They are those of the queries. Where queries are whole, they are those of the keys: to take a part of the
        queries is free, and to gather the keys, a cache say, is not.
        """
        sharded = self._sharded
        *batch, rows, heads, _ = _divisible_spec(mesh, args["q"])
        if sharded.num_kv_heads % _sharding.num_parts(mesh, heads):
            heads = None  # a group of query heads and its key head stay on one device
        if sharded.seqlen_q // _sharding.num_parts(mesh, rows) == sharded.seqlen_q:
            rows = None
        *of_keys, _, key_heads, _ = _divisible_spec(mesh, args.get("k", args.get("k_pages")))
        if "k_pages" in args:
            of_keys = [None] * len(batch)  # pages of all sequences
        taken = {axis for axes in (*batch, rows, heads) for axis in _sharding.as_tuple(axes)}
        free = [
            None if taken.intersection(_sharding.as_tuple(axes)) else axes for axes in (*of_keys, key_heads)
        ]
        *batch, heads = (own or other for own, other in zip((*batch, heads), free, strict=True))
        mesh_axes = {f"b{i}": axes for i, axes in enumerate(batch)} | {"t": rows, "n": heads}
        if sharded.whole_mesh and sum(size > 1 for size in mesh.shape.values()) > 1:
            # Beside manual axes XLA may name other axes of the same sizes. So a device neither asks for its place along
            # them nor adds up parts of other devices.
            of_results = map(_by_query_head, sharded.result_axes.values())
            summed_over = {axis for axes in of_results for axis in mesh_axes if axis not in axes}
            mesh_axes |= dict.fromkeys(summed_over | {"t"})
        return mesh_axes

    def _halo_or_exchange(
        self, mesh: Mesh, mesh_axes: dict[str, Any], args: dict[str, Any]
    ) -> tuple[_halo.Halo | None, _head_exchange.HeadExchange | None]:
        """How devices that have keys beside their queries get what else they need, if not by a gather of the keys."""
        sharded, rows = self._sharded, mesh_axes["t"]
        of_keys = {
            _sharding.as_tuple(_divisible_spec(mesh, x)[-3]) for name, x in args.items() if has_keys(name)
        }
        if not rows or of_keys != {_sharding.as_tuple(rows)}:
            return None, None
        lengths = sharded.seqlen_q, sharded.seqlen_kv
        # Query i is where key i is.
        is_aligned = lengths[0] == lengths[1] and "query_offset" not in args
        all_axes = [*sharded.arg_axes.items(), *sharded.result_axes.items()]
        divides_keys = not any(is_broadcastable(name) and "s" in axes for name, axes in all_axes)
        halo = None
        if is_aligned:
            halo = _halo.of(rows, mesh, lengths[0], sharded.options, divides_keys=divides_keys)
        has_pair_rows = any(is_broadcastable(name) and "t" in axes for name, axes in sharded.arg_axes.items())
        if halo or has_pair_rows:
            return halo, None
        parts = _sharding.num_parts(mesh, mesh_axes["n"])
        heads = sharded.num_heads // parts, sharded.num_kv_heads // parts
        uneven_keys = _head_exchange.uneven_keys(lengths[1], sharded.options, "query_segment_ids" in args)
        return None, _head_exchange.of(rows, mesh, lengths, heads, uneven_keys)

    def _can_xla_exchange(self, mesh: Mesh, mesh_axes: dict[str, Any], args: dict[str, Any]) -> bool:
        """Whether XLA would exchange heads by an all-to-all, and not gather whole arrays.

        With jax 0.12 it was seen to gather if an axis of the mesh does not shard the batch, rows or heads of the
        queries.
        """
        *batch, rows, heads, _ = _divisible_spec(mesh, args["q"])
        used = {axis for axes in (*batch, rows, heads) for axis in _sharding.as_tuple(axes)}
        return heads == mesh_axes["n"] and all(axis in used or size == 1 for axis, size in mesh.shape.items())

    def _has_own_keys(self, name: str) -> bool:
        """Whether a device has the array's keys that are beside its queries, before or after the call."""
        return has_keys(name) and bool(self._halo or self._exchange)

    def _is_exchanged_within(self, name: str) -> bool:
        """Whether the call exchanges an array's heads, and not XLA on the way to it, which does so once for all passes.

        The call does if XLA cannot, and for a key head that several devices need, which no sharding expresses.
        """
        if self._exchange is None:
            return False
        return not self._xla_exchanges or (has_keys(name) and self._exchange.copies > 1)

    def run(self, *args: jax.Array) -> list[jax.Array]:
        """The device's part of the results, from its part of the arguments."""
        sharded = self._sharded
        part = sharded.named(args)
        with no_mesh():
            if self._exchange:
                part |= {
                    name: self._exchange.to_heads(x, sharded.arg_axes[name], _rows(name))
                    for name, x in part.items()
                    if self._is_exchanged_within(name)
                }
            elif self._rows:
                row = jax.lax.axis_index(self._rows) * self._num_rows
                column = self._halo.first_key() if self._halo else 0
                needs_offset = _subsequence.needs_offset(part, sharded.options)
                part = _subsequence.at(part, row, column, with_offset=needs_offset)
                if self._halo:
                    part = self._with_halo(part, column)
            options = sharded.options
            if self._summed.get("dbias"):
                options = dataclasses.replace(options, rounds_sums=False)
            results = dict(zip(sharded.call.results, sharded.on_one_device(part, options), strict=True))
            return [self._own_part(name, x) for name, x in results.items()]

    def _with_halo(self, part: Arrays, column: jax.Array | int) -> Arrays:
        """The arrays with keys that begin at `column`."""
        halo = self._halo
        part |= {name: halo.gather(x) for name, x in part.items() if has_keys(name)}
        if "key_value_segment_ids" in part:
            part["key_value_segment_ids"] = halo.take(part["key_value_segment_ids"])
        if "key_value_seq_lengths" in part:
            part["key_value_seq_lengths"] = jnp.maximum(part["key_value_seq_lengths"], 0) - column
        return part

    def _own_part(self, name: str, x: jax.Array) -> jax.Array:
        """The device's part of a result, from what it has computed."""
        axes = self._sharded.result_axes[name]
        if self._halo and has_keys(name):
            return self._halo.sum_parts(x)
        if self._is_exchanged_within(name):
            x = self._exchange.to_rows(x, axes, _rows(name))
        if self._summed[name]:
            keys = axes.index("s") if self._scattered[name] else None
            x = sum_over_devices(x, self._summed[name], self._scattered[name], keys)
        result = self._sharded.results[name]
        x = x.astype(result.dtype)
        shape = self.result_shardings[name].shard_shape(result.shape)
        if x.shape == shape:
            return x
        # dbias, where one row of a bias is a bias with all rows of the shard: it is then summed over batch and heads,
        # and so it will be by the caller.
        return jnp.pad(x, [(0, whole - own) for whole, own in zip(shape, x.shape, strict=True)])


def _rows(name: str) -> str:
    """The letter of an array's rows, which are sharded with the sequence, whether it has rows or not."""
    return "s" if has_keys(name) else "t"


def _by_query_head(axes: list[str]) -> list[str]:
    return ["n" if axis == "k" else axis for axis in axes]


def sum_over_devices(x: jax.Array, axes: list, scattered: tuple, axis: int | None) -> jax.Array:
    """Adds up the parts of devices along mesh axes; along those in `scattered`, each keeps a part of `axis` of the sum.

    The parts have the array's dtype, and their sum is rounded to it once.
    """
    total = x.astype(sum_dtype(x.dtype))
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
