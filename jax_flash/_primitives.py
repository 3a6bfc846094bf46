"""The passes over the score matrix as JAX primitives: shapes, partitioning, lowering.

Each pass is two primitives. The arrays of the outer one may have any number of batch axes; its lowering partitions the
call over them, the heads and the query rows. The inner one calls the kernel on one device; its lowering folds the batch
axes into one. Where a platform has no kernel for a pass, the inner one is plain JAX (`_blocked`).

Tangents have an axis of directions D before the batch axes: [D, B, T, N, H] beside a primal [B, T, N, H]. Each
direction is then an array like the primal, and a kernel may compute scores once for several of them.
`is_directed` says which arrays have it, by name.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import (
    _blocked,
    _checks,
    _dropout,
    _ffi,
    _halo,
    _head_exchange,
    _library,
    _partitioning,
    _sharding,
    _subsequence,
    _workspace,
)
from ._operands import AXES, DIRECTIONS, OPERANDS, PART_OF_LSE, POOLED, TANGENTS, is_directed
from ._options import AttentionOptions

_T = TypeVar("_T")

# Any axis of these, batch axes included, may have size 1 and is then broadcast.
_BROADCASTABLE = tuple(
    f"{direction}{name}"
    for direction in ("", *DIRECTIONS)
    for name in ("dbias", *(operand.name for operand in OPERANDS if operand.is_broadcastable))
)
# The arrays that a call may have beside its inputs, in the order in which the kernels take them.
_OPTIONAL = ("dlse", "tdout", "tdlse", *TANGENTS, *(operand.name for operand in OPERANDS))


def is_broadcastable(name: str) -> bool:
    return name in _BROADCASTABLE


_HOPPER_MULTIPROCESSORS = 132  # of H100 and H200

# Compute capabilities with 163 KB of shared memory or more for a block; others have 99 KB.
_LARGE_SHARED_MEMORY = ("8.0", "8.7", "9.0", "10.0", "10.3", "11.0")

# With these, Hopper's forward pass runs in its general form.
_PAIR_OPERANDS = {"mask", "bias", "alibi_slopes", "query_segment_ids", "scale_factor"}

_PART_OF_LSE = tuple(f"{direction}{name}" for direction in ("", *DIRECTIONS) for name in PART_OF_LSE)


@dataclasses.dataclass(frozen=True)
class _Pass:
    target: str  # of the FFI call
    inputs: tuple[str, ...]  # the arguments of every call; optional operands follow
    results: tuple[str, ...]

    def by_name(self, args: Iterable[_T], operands: Iterable[str]) -> dict[str, _T]:
        """Names the arguments of a call, in order; `operands` names those that follow the inputs."""
        return dict(zip((*self.inputs, *operands), args, strict=True))


_FORWARD = _Pass("jax_flash_forward", ("q", "k", "v"), ("out", "lse"))
_PAGED_FORWARD = _Pass(_FORWARD.target, ("q", *POOLED), _FORWARD.results)
_BACKWARD = _Pass("jax_flash_backward", ("q", "k", "v", "out", "lse", "dout"), ("dq", "dk", "dv"))
_BACKWARD_BIAS = _Pass("jax_flash_backward_bias", _BACKWARD.inputs, ("dbias",))
_TANGENT = _Pass("jax_flash_tangent", ("q", "k", "v", "out", "lse"), ("tout", "tlse"))
_SECOND_TANGENT = _Pass("jax_flash_second_tangent", (*_TANGENT.inputs, "tlse", "ulse"), ("tuout", "tulse"))
_BACKWARD_TANGENT = _Pass(
    "jax_flash_backward_tangent", (*_BACKWARD.inputs, "tout", "tlse"), ("tdq", "tdk", "tdv")
)
_BACKWARD_BIAS_TANGENT = _Pass("jax_flash_backward_bias_tangent", _BACKWARD_TANGENT.inputs, ("tdbias",))
_FORWARDS = (_FORWARD, _PAGED_FORWARD)


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: dict[str, jax.Array], options: AttentionOptions
) -> tuple[jax.Array, jax.Array]:
    """Computes the output and the log-sum-exp.

    Args:
      q: query, [B, T, N, H]; k: key, [B, S, K, H]; v: value, [B, S, K, Hv]; of one dtype.
      operands: the members of OPERANDS that the call has: lengths and offsets int32 [B]; scale_factor [B], sinks and
        alibi_slopes [B, N] in lse's dtype; segment ids int32 [B, T] and [B, S]; mask and bias [B, N, T, S], where any
        axis may have size 1; dropout_seeds uint32 [B, N, 5].
      options: the static options.

    Returns:
      out [B, T, N, Hv] in q's dtype, lse [B, T, N] in float32 (float64 for float64).
    """
    return tuple(_bind(_FORWARD, _forward_p, {"q": q, "k": k, "v": v} | operands, options))


def paged_forward(arrays: dict[str, jax.Array], options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Computes out and lse from keys and values in pages.

    Args:
      arrays: q and operands of `forward`; k_pages [pages, keys of a page, K, H] and v_pages [pages, keys of a page, K,
        Hv], without batch axes; page_indices int32 [B, P]. S is P times the keys of a page.
      options: the static options.
    """
    return tuple(_bind(_PAGED_FORWARD, paged_forward_p, arrays, options))


def backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    operands: dict[str, jax.Array],
    options: AttentionOptions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dq, dk and dv from the arguments and results of `forward` and the cotangents (dlse None: zero).

    dq and dk are not multiplied by scale_factor, so that the sum of q dq is the gradient of scale_factor even where
    that is 0. The kernels do not take operands that are PART_OF_LSE.
    """
    arrays = _arrays_of_backward(q, k, v, out, lse, dout, dlse, operands)
    return tuple(_bind(_BACKWARD, _backward_p, arrays, options))


def backward_bias(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array | None,
    operands: dict[str, jax.Array],
    options: AttentionOptions,
) -> jax.Array:
    """Computes sums of the gradient of the bias; the caller sums them over the axes that the bias is broadcast over.

    The arguments are those of `backward`, with bias or alibi_slopes among the operands.

    Returns:
      In lse's dtype. For a bias with both T and S: [B or 1, N or 1, T, S], with 1 where the bias has 1. Otherwise
      [B, N, T or blocks(T), S or blocks(S)], with blocks where the bias has 1. alibi_slopes have neither T nor S.
    """
    arrays = _arrays_of_backward(q, k, v, out, lse, dout, dlse, operands)
    return _bind(_BACKWARD_BIAS, _backward_bias_p, arrays, options)[0]


def tangent(arrays: dict[str, jax.Array], options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Computes tout and tlse, the derivatives of the results of `forward` in some directions.

    Args:
      arrays: q, k, v, operands, out and lse of `forward`; and the tangents [D, ...] of those inputs that have one,
        under the names "tq", "tk", "tv", "tscale_factor", "tbias", "talibi_slopes". Those of sinks are the caller's.
      options: the static options.

    Returns:
      tout [D, B, T, N, Hv], tlse [D, B, T, N]; 0 in a fully masked row.
    """
    return tuple(_bind(_TANGENT, _tangent_p, arrays, options))


def second_tangent(arrays: dict[str, jax.Array], options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Computes tuout and tulse, the derivatives in directions u of the results of `tangent` in directions t.

    Args:
      arrays: those of `tangent`, and tlse; ulse and the tangents "uq", ... of u; the derivatives "tuq", ... of t.
      options: the static options.
    """
    return tuple(_bind(_SECOND_TANGENT, _second_tangent_p, arrays, options))


def backward_tangent(
    arrays: dict[str, jax.Array], options: AttentionOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes tdq, tdk and tdv, the derivatives of the results of `backward` in some directions.

    Args:
      arrays: the arguments of `backward`; those of `tangent`, its results tout and tlse; and tdout and tdlse, the
        tangents of the cotangents, if they have one.
      options: the static options.

    Returns:
      The derivatives [D, ...]. Like dq and dk, tdq and tdk are of dq and dk without scale_factor.
    """
    return tuple(_bind(_BACKWARD_TANGENT, _backward_tangent_p, arrays, options))


def backward_bias_tangent(arrays: dict[str, jax.Array], options: AttentionOptions) -> jax.Array:
    """Computes sums of the derivative of the gradient of the bias, like `backward_bias`.

    The arguments are those of `backward_tangent`.

    Returns:
      In lse's dtype. For a bias with both T and S: [D, B or 1, N or 1, T, S], with 1 where the bias has 1. Otherwise
      [D, B, N, T or 1, S or 1].
    """
    return _bind(_BACKWARD_BIAS_TANGENT, _backward_bias_tangent_p, arrays, options)[0]


def _arrays_of_backward(q, k, v, out, lse, dout, dlse, operands):
    arrays = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout)
    return arrays | ({} if dlse is None else {"dlse": dlse}) | operands


def _bind(
    call: _Pass, primitive: Primitive, arrays: dict[str, jax.Array], options: AttentionOptions
) -> list[jax.Array]:
    unknown = () if call in _FORWARDS else _PART_OF_LSE
    operands = tuple(name for name in _OPTIONAL if name in arrays and name not in (*unknown, *call.inputs))
    args = (arrays[name] for name in (*call.inputs, *operands))
    return primitive.bind(*args, operands=operands, options=options)


# Shapes


def _whole_keys(named: dict[str, Any]) -> tuple[jax.core.ShapedArray, jax.core.ShapedArray]:
    """The types of the keys [..., S, K, H] and values of all sequences, also where they are in pages."""
    if "k_pages" not in named:
        return named["k"], named["v"]
    *batch, pages_per_sequence = named["page_indices"].shape
    return tuple(
        jax.core.ShapedArray((*batch, pages_per_sequence * x.shape[1], *x.shape[2:]), x.dtype)
        for x in (named[name] for name in POOLED)
    )


def forward_avals(q, k, v, *_, **params):
    spec = q.sharding.spec  # all None except under explicit sharding
    lse_dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    # `update` keeps the rest of the type, such as the mesh axes that the array varies over in shard_map.
    out = q.update(
        shape=(*q.shape[:-1], v.shape[-1]),
        weak_type=False,
        sharding=q.sharding.update(spec=PartitionSpec(*spec[:-1], None)),
    )
    lse = q.update(
        shape=q.shape[:-1],
        dtype=jnp.dtype(lse_dtype),
        weak_type=False,
        sharding=q.sharding.update(spec=PartitionSpec(*spec[:-1])),
    )
    return out, lse


def _backward_avals(q, k, v, *_, **params):
    return tuple(x.update(weak_type=False) for x in (q, k, v))


def _backward_bias_avals(*args, operands, **params):
    return (_bias_sums_aval(_BACKWARD_BIAS.by_name(args, operands), _workspace.blocks),)


def _bias_sums_aval(named, num_sums: Callable):
    """The type of sums of the gradient of a bias.

    num_sums: how many there are along an axis of queries or keys, by its size, where the bias has 1.
    """
    q, lse, bias = named["q"], named["lse"], named.get("bias")
    *batch, seqlen_q, num_heads, _ = q.shape
    spec = q.sharding.spec
    sizes, specs = [*batch, num_heads, seqlen_q, named["k"].shape[-3]], [*spec[:-3], spec[-2], spec[-3], None]
    has_pairs = bias is not None and bias.shape[-2:] == tuple(sizes[-2:])
    for axis in (-4, -3) if has_pairs else (-2, -1):
        if bias is None or bias.shape[axis] == 1:
            sizes[axis] = 1 if has_pairs else num_sums(sizes[axis])
            specs[axis] = None
    sharding = q.sharding.update(spec=PartitionSpec(*specs))
    return q.update(shape=tuple(sizes), dtype=lse.dtype, weak_type=False, sharding=sharding)


def with_directions(x, directions):
    """The type of an array like x with an axis of directions."""
    return x.update(
        shape=(directions, *x.shape),
        weak_type=False,
        sharding=x.sharding.update(spec=PartitionSpec(None, *x.sharding.spec)),
    )


def _tangent_avals(call, *args, operands, **params):
    named = call.by_name(args, operands)
    directions = next(x.shape[0] for name, x in named.items() if is_directed(name))
    return tuple(with_directions(named[name], directions) for name in ("out", "lse"))


def _backward_tangent_avals(*args, operands, **params):
    named = _BACKWARD_TANGENT.by_name(args, operands)
    return tuple(with_directions(named[name], named["tlse"].shape[0]) for name in "qkv")


def _backward_bias_tangent_avals(*args, operands, **params):
    named = _BACKWARD_BIAS_TANGENT.by_name(args, operands)
    return (with_directions(_bias_sums_aval(named, lambda size: 1), named["tlse"].shape[0]),)


# Partitioning


def _call_on_shards(call: _Pass, inner: Primitive, whole_mesh: Mesh | None, *args: jax.Array, **params):
    """Calls `inner` on each device, for the device's part of the batch, the heads and the query rows."""
    batch_shape = args[0].shape[: -len(AXES["q"])]
    wanted_shapes = [x.shape for x in jax.eval_shape(functools.partial(inner.bind, **params), *args)]
    arrays = {
        name: _expand_mixed_batch_axes(name, x, batch_shape)
        for name, x in call.by_name(args, params["operands"]).items()
    }
    local_call = functools.partial(_bind, call, inner, options=params["options"])
    if _partitioning.CAN_PARTITION:
        local_call = _partitioned(call, local_call, whole_mesh, arrays, params["options"])
    results = local_call(arrays)
    # Where the bias was expanded, the last batch axis of dbias was too: it is summed over.
    return [
        x if x.shape == shape else jnp.sum(x, _first_batch_axis(name) + len(batch_shape) - 1, keepdims=True)
        for name, x, shape in zip(call.results, results, wanted_shapes, strict=True)
    ]


def _expand_mixed_batch_axes(name: str, x: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array:
    """Expands the batch axes of a broadcastable array if only some have size 1, so that they fold into one."""
    if name not in _BROADCASTABLE:
        return x
    first = _first_batch_axis(name)
    end = first + len(batch_shape)
    before, own, rest = x.shape[:first], x.shape[first:end], x.shape[end:]
    return x if math.prod(own) == 1 else jnp.broadcast_to(x, (*before, *batch_shape, *rest))


def _first_batch_axis(name: str) -> int:
    return 1 if is_directed(name) else 0


def _partitioned(
    call: _Pass,
    local_call: Callable,
    whole_mesh: Mesh | None,
    arrays: dict[str, jax.Array],
    options: AttentionOptions,
) -> Callable:
    """Makes `local_call` one that XLA partitions over batch axes, heads and query rows, not over keys or head dims.

    A device has the rows of a part of the sequence, and all keys or those that its rows see in a window. It adds a part
    to the gradients that are sums over rows.
    """
    *batch_shape, seqlen_q, num_heads, _ = arrays["q"].shape
    seqlen_kv, num_kv_heads, _ = _whole_keys(arrays)[0].shape[-3:]
    results = zip(call.results, jax.eval_shape(local_call, arrays), strict=True)
    result_shapes = {name: x.shape for name, x in results}

    def factors(name: str, shape: tuple[int, ...]) -> list[str]:
        """Names the axes of an array for the sharding rule, in which equal names are sharded alike."""
        # Query and key heads are one factor where they correspond one to one.
        axes = AXES[name].replace("k", "n") if num_heads == num_kv_heads else AXES[name]
        if name in POOLED:
            return list(axes)
        axes = [*(f"b{i}" for i in range(len(batch_shape))), *axes]
        directions = ["directions"] * _first_batch_axis(name)
        if name not in _BROADCASTABLE:
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
    has_pair_rows = any(name in _BROADCASTABLE and "t" in own for name, own in arg_factors.items())
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
            _divisible_spec(mesh, x)[-3] for name, x in zip(arrays, arg_infos, strict=True) if _has_keys(name)
        ]
        if rows and of_keys and all(_sharding.as_tuple(axes) == _sharding.as_tuple(rows) for axes in of_keys):
            halo = _halo.of(rows, mesh, seqlen_q, options) if is_aligned else None
            if not halo and not has_pair_rows:
                parts = _sharding.num_parts(mesh, heads)
                exchange = _head_exchange.of(rows, mesh, num_heads // parts, num_kv_heads // parts, is_uneven)
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
            are_parts = {*keys} <= {*summed[name]} and not (has_own_keys and _has_keys(name))
            scattered[name] = keys if are_parts else ()

        def sharding(name: str, own: list[str]) -> NamedSharding:
            keys = rows if has_own_keys and _has_keys(name) else scattered.get(name) or None
            return NamedSharding(mesh, PartitionSpec(*map((mesh_axes | {"k": heads, "s": keys}).get, own)))

        arg_shardings, result_shardings = (
            {name: sharding(name, own) for name, own in group.items()}
            for group in (arg_factors, result_factors)
        )

        def call_and_sum(*args: jax.Array) -> list[jax.Array]:
            part = dict(zip(arrays, args, strict=True))
            with _no_mesh():
                if exchange:
                    part = {
                        name: exchange.to_heads(x, arg_factors[name], _rows(name)) for name, x in part.items()
                    }
                elif rows:
                    row = jax.lax.axis_index(rows) * num_rows
                    needs_offset = _subsequence.needs_offset(part, options)
                    part = _subsequence.at(part, row, 0, with_offset=needs_offset)
                if halo:
                    part |= {name: halo.gather(x) for name, x in part.items() if _has_keys(name)}
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
            if halo and _has_keys(name):
                return halo.sum_parts(x)
            if name in _BROADCASTABLE and rows and "t" not in result_factors[name]:
                x = jnp.sum(x, -2, keepdims=True)  # the blocks of the device's rows
            keys = result_factors[name].index("s") if scattered[name] else None
            x = _sum_over_devices(x, summed[name], scattered[name], keys)
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


def _has_keys(name: str) -> bool:
    """Whether the array has rows for keys, like k, v and their derivatives."""
    return AXES[name].startswith("sk")


def _rows(name: str) -> str:
    """The axis along which an array is sharded with the sequence, if it has that axis."""
    return "s" if _has_keys(name) else "t"


def _sum_over_devices(x: jax.Array, axes: list, scattered: tuple, axis: int | None) -> jax.Array:
    """Adds up the parts of devices along mesh axes; along those in `scattered`, each keeps a part of `axis` of the sum.

    The parts have the array's dtype, and their sum is rounded to it once.
    """
    total = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if scattered:
        total = jax.lax.psum_scatter(total, scattered, scatter_dimension=axis, tiled=True)
    if others := [axis for axis in axes if axis not in scattered]:
        total = jax.lax.psum(total, others)
    return total.astype(x.dtype)


def _no_mesh():
    """A context for the code of one device: under explicit sharding JAX would put shardings into it."""
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def _divisible_spec(mesh, array) -> list:
    """The mesh axes that partition each axis of `array`; None where the parts would differ in size."""
    spec = getattr(array.sharding, "spec", (None,) * len(array.shape))
    partition = zip(array.shape, spec, strict=True)
    return [None if size % _sharding.num_parts(mesh, axes) else axes for size, axes in partition]


# Lowering


def _lower_cpu(call: _Pass, ctx, *args, **params):
    return _lower_ffi(call, ctx, args, [], **params)


def _lower_cuda(call: _Pass, ctx, *args, **params):
    q, _, v = ctx.avals_in[:3]
    _checks.check_cuda(q.dtype, max(q.shape[-1], v.shape[-1]), is_gradient=call is _BACKWARD)
    results = _lower_ffi(call, ctx, args, _workspace_avals(call, ctx.avals_in, **params), **params)
    # XLA may run the kernel twice if a scan stacks a result that the layer also uses, once straight into the stack (its
    # dynamic-slice fusion, seen with jax 0.11). It does not do so across a barrier.
    return list(stablehlo.OptimizationBarrierOp(results).results)


def _workspace_avals(call: _Pass, avals, *, operands: tuple[str, ...], options: AttentionOptions):
    """The arrays that the CUDA kernels need for themselves. XLA allocates them, as further results of the call."""
    named = call.by_name(avals, operands)
    q, (k, v) = named["q"], _whole_keys(named)
    batch, seqlen_q, num_heads, head_dim = _fold(q, "q").shape
    mask_shape = _fold(named["mask"], "mask").shape if "mask" in named else (1, 1, 1, 1)

    def num_planes() -> int:
        return _num_planes(call, q, k, v, options)

    @functools.cache
    def num_head_parts() -> int:
        if q.dtype.itemsize > 2 and not num_planes():
            return 0
        folded = (_fold(x, name) for x, name in zip((q, k, v), "qkv", strict=True))
        return _num_head_parts(*folded, options.is_causal)

    return _workspace.arrays(
        _workspace.Call(
            is_forward=call in _FORWARDS,
            is_gradient=call in (_BACKWARD, _BACKWARD_BIAS, _BACKWARD_TANGENT),
            is_backward=call is _BACKWARD,
            is_backward_tangent=call is _BACKWARD_TANGENT,
            is_16_bit=q.dtype.itemsize == 2,
            may_have_planes=q.dtype == jnp.float32 and call in (*_FORWARDS, _BACKWARD),
            is_deterministic=options.deterministic,
            has_mask="mask" in named,
            has_segments="query_segment_ids" in named,
            D=next((x.shape[0] for name, x in named.items() if is_directed(name)), 1),
            B=batch,
            N=num_heads,
            K=k.shape[-2],
            T=seqlen_q,
            S=k.shape[-3],
            H=head_dim,
            Hv=v.shape[-1],
            B_mask=mask_shape[0],
            N_mask=mask_shape[1],
            T_mask=mask_shape[2],
            S_mask=mask_shape[3],
            num_planes=num_planes,
            num_key_parts=lambda: _num_key_parts(q, k, v, operands, options),
            sums_dq=lambda: _sums_dq(
                q,
                k,
                v,
                num_head_parts=num_head_parts(),
                is_deterministic=options.deterministic,
                hides_pairs=not named.keys().isdisjoint(("mask", "query_segment_ids")),
            ),
            num_head_parts=num_head_parts,
        )
    )


def _num_planes(call: _Pass, q, k, v, options: AttentionOptions) -> int:
    """Whether Hopper's kernels compute float32 as scaled float16 (cuda/planes.cuh): 1 or 0."""
    direction = {_FORWARD: "forward", _BACKWARD: "backward"}.get(call)
    if direction is None or q.dtype != jnp.float32 or options.precision:
        return 0
    shortest = _library.constants()["kShortLength"] + 1
    sizes = (*q.shape[-3:-1], *k.shape[-3:-1])
    is_long = all(isinstance(size, int) for size in sizes) and min(q.shape[-3], k.shape[-3]) >= shortest
    is_served = is_long and _hopper_head_dim(direction, q, v) > 0
    return int(is_served and _planes_pay(direction, q, k, options))


def _planes_pay(direction: str, q, k, options: AttentionOptions) -> bool:
    """Whether planes gain more than it takes to make them.

    Times are in pairs of a query and a key: measured on an H100, a row of planes takes as long as the products of so
    many pairs become shorter. Neither the batch nor the number of key heads counts, so that a sequence has the same
    bits alone and in a batch.
    """
    (seqlen_q, num_heads, head_dim), (seqlen_kv, num_kv_heads) = q.shape[-3:], k.shape[-3:-1]
    group = num_heads // max(num_kv_heads, 1)
    keys = seqlen_kv // 2 if options.is_causal and seqlen_q >= seqlen_kv else seqlen_kv
    if min(options.reach) >= 0:
        keys = min(keys, sum(options.reach) + 1)
    pairs = seqlen_q * group * keys * (2 if head_dim <= 32 else 1)  # portable kernels fill 64 columns
    of_query, of_key = (165, 330) if direction == "forward" else (170, 95)
    return pairs >= of_query * seqlen_q * group + of_key * seqlen_kv


def _num_key_parts(q, k, v, operands: tuple[str, ...], options: AttentionOptions) -> int:
    """Into how many parts a forward kernel splits the keys; 0: it does not, or there is no such kernel.

    It depends neither on the batch nor on the number of heads: a sequence has the same bits alone and in a batch, and
    with heads on several devices.
    """
    (seqlen_q, num_heads), (seqlen_kv, num_kv_heads) = q.shape[-3:-1], k.shape[-3:-1]
    sizes = (seqlen_q, num_heads, seqlen_kv, num_kv_heads)
    if not all(isinstance(size, int) and size > 0 for size in sizes) or "dropout_seeds" in operands:
        return 0
    keys = seqlen_kv
    if min(options.reach) >= 0:  # the first block of keys may begin before the first that a query sees
        keys = min(keys, sum(options.reach) + seqlen_q + _library.constants()["kVisibilityBlock"])
    if _is_decoding(q, k, v):
        # A part writes 4 bytes for each row and column, so longer sequences have longer parts; of 1,024 keys at most,
        # so that a long sequence alone has parts for all multiprocessors of a GPU.
        part = 256 if keys <= 4096 else 512 if keys < 8192 else 1024
        return -(-keys // part)
    # Hopper's tiles have up to 256 rows, so a few hundred queries are too few tiles. These parts are of all keys: a
    # window would leave most of them empty. They are long enough, and few enough, for what they write.
    has_kernel = q.dtype.itemsize == 2 and _hopper_head_dim("forward", q, v) > 0
    is_general = options.logits_soft_cap > 0 or options.scale <= 0 or not _PAIR_OPERANDS.isdisjoint(operands)
    if not has_kernel or is_general or keys < seqlen_kv or seqlen_q > 1024 or seqlen_kv < 16 * seqlen_q:
        return 0
    most, shortest = (16, 2048) if seqlen_q <= 64 else (8, 4096) if seqlen_q <= 256 else (4, 4096)
    parts = min(most, keys // shortest)
    return parts if parts > 1 else 0


def _is_decoding(q, k, v) -> bool:
    """Whether the forward kernel for few queries serves a call without dropout."""
    (seqlen_q, num_heads), num_kv_heads = q.shape[-3:-1], k.shape[-2]
    head_dim = _kernel_head_dim("decode sm80", q.dtype, max(q.shape[-1], v.shape[-1]))
    most_rows = 64 if q.dtype.itemsize * head_dim <= 512 else 32  # of a key head: decode_tile in cuda/tiles.h
    is_short = seqlen_q <= _library.constants()["kDecodeQueries"]
    return head_dim > 0 and is_short and seqlen_q * (num_heads // num_kv_heads) <= most_rows


def _sums_dq(
    q, k, v, *, num_head_parts: int, is_deterministic: bool = False, hides_pairs: bool = False
) -> bool:
    """Whether the backward kernel sums 16-bit dq in memory.

    The kernel for short sequences, which does not divide query heads into parts, has no need to. Hopper's kernels above
    head dim 128 leave dq to another kernel, which is faster. Only Hopper's kernels sum in a fixed order, unless a mask
    or segments hide pairs; above head dim 64 that is slower than another kernel. Where the program runs on other GPUs
    than it was lowered for, their kernels leave dq to another one without that memory, at some cost in speed.
    """
    longest = _library.constants()["kShortLength"]
    is_short = all(isinstance(x.shape[-3], int) and x.shape[-3] <= longest for x in (q, k))
    if (
        is_short
        and not num_head_parts
        and _kernel_head_dim("short_backward sm80", q.dtype, max(q.shape[-1], v.shape[-1]))
    ):
        return False
    head_dim = _hopper_head_dim("backward", q, v)
    if is_deterministic:
        return 0 < head_dim <= 64 and not hides_pairs
    return head_dim <= 128


def _num_head_parts(q, k, v, is_causal: bool) -> int:
    """Into how many parts Hopper's backward kernel divides the query heads of all key heads; 0: it does not.

    A tile has 128 keys (64 at head dim 256) of one part, and all multiprocessors should have about as many. So with
    few key heads, or long causal tiles, a part is less than a key head's group. The sums of dk and dv of each part are
    written and read in float32. Lengths, masks and windows, which change the tiles, are not looked at.
    """
    (B, T, N, _), (_, S, K, _) = q.shape, k.shape
    head_dim = _hopper_head_dim("backward", q, v)
    if not head_dim or not all(isinstance(size, int) for size in (B, T, N, S, K)) or N in (0, K):
        return 0
    group, blocks = N // K, -(-S // (128 if head_dim < 256 else 64))
    is_triangle = is_causal and T == S
    items = B * K * ((blocks + 1) // 2 if is_triangle else blocks)  # causal tiles are taken in pairs

    def busy(parts: int) -> float:
        """The share of the multiprocessors that is busy on the average."""
        rounds = -(-items * parts // _HOPPER_MULTIPROCESSORS)
        return items * parts / (rounds * _HOPPER_MULTIPROCESSORS) if rounds else 1

    def are_many(parts: int) -> bool:
        """Whether long causal tiles are taken one by one, which is faster (`has_many` of BackwardSchedule)."""
        tiles = B * K * parts * blocks
        return is_triangle and blocks >= 64 and tiles >= 6 * _HOPPER_MULTIPROCESSORS * group // parts

    # A tile that goes through few queries would take longer to write than to compute.
    divisors = [x for x in range(1, group + 1) if group % x == 0 and (x == 1 or T * group // x >= 1024)]
    enough = [x for x in divisors if are_many(x)] or [x for x in divisors if busy(x) >= 0.85]
    best = enough[0] if enough else max(divisors, key=busy)
    return K * best if best > 1 else 0


def _hopper_head_dim(direction: str, q, v) -> int:
    """The head dim of Hopper's kernel that is certain to run; 0 if none is."""
    gpus = _ffi.local_gpus()
    is_hopper = gpus and all(gpu.compute_capability == "9.0" for gpu in gpus)
    head_dims = q.shape[-1], v.shape[-1]
    if not is_hopper or any(head_dim % 8 for head_dim in head_dims):
        return 0
    # The gradient's kernel for 192 takes values of up to 128 (backward_head_dim_v in cuda/tiles.h).
    smallest = 193 if direction == "backward" and v.shape[-1] > 128 else 1
    return _kernel_head_dim(f"{direction} sm90", q.dtype, max(*head_dims, smallest))


def _kernel_head_dim(kind: str, dtype, head_dim: int) -> int:
    """The head dim of the compiled kernel that serves this one; 0 if there is none. kind: such as "forward sm80"."""
    arithmetic = dtype.name if dtype.itemsize == 2 else "tf32"  # tf32x3 has the same head dims
    names = (name.rsplit(" ", 1) for name in _ffi.build_info()["kernels"])
    compiled = (int(size) for name, size in names if name == f"{kind} {arithmetic}")
    return min((size for size in compiled if size >= head_dim), default=0)


def _lower_ffi(
    call: _Pass,
    ctx,
    args,
    workspace: Iterable[jax.core.ShapedArray],
    *,
    operands: tuple[str, ...],
    options: AttentionOptions,
):
    avals_in = [_fold(aval, name) for name, aval in call.by_name(ctx.avals_in, operands).items()]
    avals_out = [*map(_fold, ctx.avals_out, call.results), *workspace]
    results = jax.ffi.ffi_lowering(call.target)(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        *map(functools.partial(_reshape, ctx), args, ctx.avals_in, avals_in),
        operands=",".join(operands),
        **dataclasses.asdict(options),
    )
    # `strict=False` drops the workspace.
    return [_reshape(ctx, *x) for x in zip(results, avals_out, ctx.avals_out, strict=False)]


def _fold(aval, name: str) -> jax.core.ShapedArray:
    """The type of an array with its batch axes folded into one."""
    first, end = _first_batch_axis(name), len(aval.shape) - len(AXES[name])
    shape = aval.shape
    if name in POOLED:
        return jax.core.ShapedArray(shape, aval.dtype)
    return jax.core.ShapedArray((*shape[:first], math.prod(shape[first:end]), *shape[end:]), aval.dtype)


def _reshape(ctx, x: ir.Value, old, new) -> ir.Value:
    if len(old.shape) == len(new.shape):
        return x
    # JAX lowers the reshape, as it can compute symbolic sizes. The rest of the types is not wanted here.
    old, new = (jax.core.ShapedArray(aval.shape, aval.dtype) for aval in (old, new))
    lower = mlir.lower_fun(lambda x: jax.lax.reshape(x, new.shape), multiple_results=False)
    return lower(ctx.replace(avals_in=[old], avals_out=[new]), x)[0]


def _lower_blocked(compute: Callable, call: _Pass, ctx, *args, operands, options):
    """Lowers a pass without a kernel to `compute` of `_blocked`."""

    def on_one_device(*args):
        if any(math.prod(x.shape) == 0 for x in args):
            return [jnp.zeros(x.shape, x.dtype) for x in ctx.avals_out]
        named = call.by_name(args, operands)
        folded = {name: x.reshape(_fold(x, name).shape) for name, x in named.items()}
        with _no_mesh():
            results = zip(compute(folded, options), ctx.avals_out, strict=True)
        return [x.reshape(aval.shape) for x, aval in results]

    # The rest of the types, such as the mesh axes that an array varies over, is not wanted here.
    types = [
        [jax.core.ShapedArray(x.shape, x.dtype) for x in avals] for avals in (ctx.avals_in, ctx.avals_out)
    ]
    return mlir.lower_fun(on_one_device)(ctx.replace(avals_in=types[0], avals_out=types[1]), *args)


def _lower_backward_bias_cuda(call: _Pass, ctx, *args, **params):
    """Parts of the batch are summed by different thread blocks, and then added in a fixed order."""
    (dbias,) = ctx.avals_out
    q, k = (_fold(aval, name) for name, aval in zip("qk", ctx.avals_in[:2], strict=True))
    parts = _num_bias_parts(q, k, _fold(dbias, "dbias"))
    if parts == 1:
        return _lower_cuda(call, ctx, *args, **params)
    of_parts = jax.core.ShapedArray((parts, *dbias.shape[-3:]), dbias.dtype)
    sums = _lower_cuda(call, ctx.replace(avals_out=[of_parts]), *args, **params)
    total = jax.core.ShapedArray(dbias.shape, dbias.dtype)
    add = mlir.lower_fun(lambda x: jnp.sum(x, 0).reshape(total.shape), multiple_results=False)
    return add(ctx.replace(avals_in=[of_parts], avals_out=[total]), *sums)


def _num_bias_parts(q, k, dbias) -> int:
    """Into how many parts the sum of dbias over the batch is divided, so that all multiprocessors have some tiles."""
    (B, T, N, H), S = q.shape, k.shape[1]
    if not all(isinstance(size, int) for size in (B, T, N, S)):
        return 1
    if dbias.shape[0] != 1 or dbias.shape[2:] != (T, S):
        return 1  # there is no such sum, or it is in blocks
    heads, parts = dbias.shape[1], 1
    tiles = heads * -(-T // 128) * -(-S // 128)
    for divisor in (x for x in range(1, B + 1) if B % x == 0):
        if divisor * heads * S > B * N * H:
            break  # more memory than q takes in float32
        parts = divisor
        if parts * tiles >= 4 * _HOPPER_MULTIPROCESSORS:
            break
    return parts


def _lower_backward_tangent_cuda(call: _Pass, ctx, *args, **params):
    # The backward pass, which runs beside it, refuses what no kernel serves.
    if _backward_tangent_fits(*ctx.avals_in[:3]):
        return _lower_cuda(call, ctx, *args, **params)
    return _lower_blocked(_blocked.backward_tangent, call, ctx, *args, **params)


def _backward_tangent_fits(q, k, v) -> bool:
    """Whether there is a CUDA kernel whose tiles fit into the shared memory of the GPUs: see cuda/tiles.h."""
    gpus = _ffi.local_gpus()
    has_room = gpus and all(gpu.compute_capability in _LARGE_SHARED_MEMORY for gpu in gpus)
    largest = (256 if has_room else 128) if q.dtype.itemsize == 2 else (128 if has_room else 64)
    return 0 < _kernel_head_dim("backward_tangent sm80", q.dtype, max(q.shape[-1], v.shape[-1])) <= largest


def _lower_elsewhere(ctx, *args, **params):
    _checks.refuse_platform(ctx.platforms or ctx.module_context.platforms)


# Definition


def define(name: str, abstract_eval: Callable) -> Primitive:
    """A primitive with several results that runs by itself as a program of its own."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract_eval)

    @functools.cache
    def compiled(params: tuple[tuple[str, Any], ...]) -> Callable:
        return jax.jit(functools.partial(primitive.bind, **dict(params)))

    @primitive.def_impl
    def run(*args, **params):
        with jax.disable_jit(False):  # otherwise the call would come back here
            return compiled(tuple(params.items()))(*args)

    return primitive


def _define_pass(
    call: _Pass, abstract_eval: Callable, *, name: str | None = None, **lowerings: Callable
) -> Primitive:
    name = name or call.target
    inner = define(f"{name}_call", abstract_eval)
    mlir.register_lowering(inner, _lower_elsewhere)
    for platform, lower in lowerings.items():
        mlir.register_lowering(inner, functools.partial(lower, call), platform=platform)

    outer = define(f"{name}_pass", abstract_eval)
    _partitioning.register_lowering(outer, functools.partial(_call_on_shards, call, inner))
    return outer


_KERNELS = dict(cpu=_lower_cpu, cuda=_lower_cuda)


def _without_kernels(compute: Callable) -> dict[str, Callable]:
    return dict.fromkeys(_KERNELS, functools.partial(_lower_blocked, compute))


_forward_p = _define_pass(_FORWARD, forward_avals, **_KERNELS)
paged_forward_p = _define_pass(_PAGED_FORWARD, forward_avals, name="jax_flash_paged_forward", **_KERNELS)
_backward_p = _define_pass(_BACKWARD, _backward_avals, **_KERNELS)
_backward_bias_p = _define_pass(
    _BACKWARD_BIAS,
    _backward_bias_avals,
    cpu=_lower_cpu,
    cuda=_lower_backward_bias_cuda,
)
_tangent_p = _define_pass(_TANGENT, functools.partial(_tangent_avals, _TANGENT), **_KERNELS)
_second_tangent_p = _define_pass(
    _SECOND_TANGENT,
    functools.partial(_tangent_avals, _SECOND_TANGENT),
    **_without_kernels(_blocked.second_tangent),
)
_backward_tangent_p = _define_pass(
    _BACKWARD_TANGENT,
    _backward_tangent_avals,
    cpu=_lower_cpu,
    cuda=_lower_backward_tangent_cuda,
)
_backward_bias_tangent_p = _define_pass(
    _BACKWARD_BIAS_TANGENT,
    _backward_bias_tangent_avals,
    **_without_kernels(_blocked.backward_bias_tangent),
)
