"""The forward and the backward passes as JAX primitives: shapes, batching, partitioning, lowering.

Each pass is two primitives. The outer one appears in jaxprs. Its arrays may have any number of leading batch axes, so
`vmap` only adds one; its lowering partitions the call over the batch axes and the heads. The inner one calls the kernel
on one device; its lowering folds the batch axes into one.
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
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _checks, _ffi, _partitioning, _workspace
from ._operands import OPERANDS, PART_OF_LSE
from ._options import AttentionOptions

_T = TypeVar("_T")

# The axes of each array after the batch axes: t query rows, s keys, n query heads, k key heads, d head dim, e head dim
# of the values, w words of a seed.
_AXES = {
    "q": "tnd",
    "k": "skd",
    "v": "ske",
    "out": "tne",
    "lse": "tn",
    "dq": "tnd",
    "dk": "skd",
    "dv": "ske",
    "dout": "tne",
    "dlse": "tn",
    "dbias": "nts",
} | {operand.name: operand.axes for operand in OPERANDS}
# Any axis of these, batch axes included, may have size 1 and is then broadcast.
_BROADCASTABLE = ("dbias", *(operand.name for operand in OPERANDS if operand.is_broadcastable))


@dataclasses.dataclass(frozen=True)
class _Pass:
    target: str  # of the FFI call
    inputs: tuple[str, ...]  # the arguments of every call; optional operands follow
    results: tuple[str, ...]

    def by_name(self, args: Iterable[_T], operands: Iterable[str]) -> dict[str, _T]:
        """Names the arguments of a call, in order; `operands` names those that follow the inputs."""
        return dict(zip((*self.inputs, *operands), args, strict=True))


_FORWARD = _Pass("jax_flash_forward", ("q", "k", "v"), ("out", "lse"))
_BACKWARD = _Pass("jax_flash_backward", ("q", "k", "v", "out", "lse", "dout"), ("dq", "dk", "dv"))
_BACKWARD_BIAS = _Pass("jax_flash_backward_bias", _BACKWARD.inputs, ("dbias",))


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: dict[str, jax.Array], options: AttentionOptions
) -> tuple[jax.Array, jax.Array]:
    """Computes the output and the log-sum-exp.

    Args:
      q: query, [B, T, N, H]; k: key, [B, S, K, H]; v: value, [B, S, K, Hv]; of one dtype.
      operands: the members of OPERANDS that the call has: lengths and offsets int32 [B]; scale_factor [B], sinks and
        alibi_slopes [B, N] in lse's dtype; segment ids int32 [B, T] and [B, S]; mask and bias [B, N, T, S], where any
        axis may have size 1; dropout_seeds uint32 [B, N, 3].
      options: the static options.

    Returns:
      out [B, T, N, Hv] in q's dtype, lse [B, T, N] in float32 (float64 for float64).
    """
    names = tuple(operand.name for operand in OPERANDS if operand.name in operands)
    arrays = (q, k, v, *(operands[name] for name in names))
    return tuple(_forward_p.bind(*arrays, operands=names, options=options))


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
    return tuple(_bind_backward(_backward_p, q, k, v, out, lse, dout, dlse, operands, options))


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
    return _bind_backward(_backward_bias_p, q, k, v, out, lse, dout, dlse, operands, options)[0]


def _bind_backward(primitive, q, k, v, out, lse, dout, dlse, operands, options):
    operands = operands if dlse is None else {"dlse": dlse, **operands}
    known = ("dlse", *(operand.name for operand in OPERANDS))
    names = tuple(name for name in known if name in operands and name not in PART_OF_LSE)
    arrays = (q, k, v, out, lse, dout, *(operands[name] for name in names))
    return primitive.bind(*arrays, operands=names, options=options)


# Shapes


def _forward_avals(q, k, v, *_, **params):
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
    q, k, _, _, lse = args[:5]
    *batch, seqlen_q, num_heads, _ = q.shape
    spec = q.sharding.spec
    sizes, specs = [*batch, num_heads, seqlen_q, k.shape[-3]], [*spec[:-3], spec[-2], None, None]
    bias = _BACKWARD_BIAS.by_name(args, operands).get("bias")
    has_pairs = bias is not None and bias.shape[-2:] == tuple(sizes[-2:])
    for axis in (-4, -3) if has_pairs else (-2, -1):
        if bias is None or bias.shape[axis] == 1:
            sizes[axis] = 1 if has_pairs else _workspace.blocks(sizes[axis])
            specs[axis] = None
    return (
        q.update(
            shape=tuple(sizes),
            dtype=lse.dtype,
            weak_type=False,
            sharding=q.sharding.update(spec=PartitionSpec(*specs)),
        ),
    )


# Batching


def _batch(call: _Pass, primitive: Primitive, args, dims, **params):
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)

    def with_batch_axis(name, x, dim):
        if dim is not None:
            return jnp.moveaxis(x, dim, 0)
        return jnp.broadcast_to(x, (1 if name in _BROADCASTABLE else size, *x.shape))

    named = call.by_name(args, params["operands"])
    args = [with_batch_axis(*named_arg, dim) for named_arg, dim in zip(named.items(), dims, strict=True)]
    results = primitive.bind(*args, **params)
    return results, [0] * len(results)


# Differentiation


def _differentiate(primals, tangents, **params):
    _checks.refuse_second_derivative()  # the first derivative is custom_vjp's and does not come here


# Partitioning


def _call_on_shards(call: _Pass, inner: Primitive, whole_mesh: Mesh | None, *args: jax.Array, **params):
    """Calls `inner` on each device, for the device's part of the batch and of the heads."""
    local_call = functools.partial(inner.bind, **params)
    batch_shape = args[0].shape[: -len(_AXES["q"])]
    wanted_shapes = [x.shape for x in jax.eval_shape(local_call, *args)]
    named_args = {
        name: _expand_mixed_batch_axes(name, x, batch_shape)
        for name, x in call.by_name(args, params["operands"]).items()
    }
    if _partitioning.CAN_PARTITION:
        local_call = _partitioned(call, local_call, whole_mesh, named_args)
    results = local_call(*named_args.values())
    # Where the bias was expanded, the last batch axis of dbias was too: it is summed over.
    return [
        x if x.shape == shape else jnp.sum(x, len(batch_shape) - 1, keepdims=True)
        for x, shape in zip(results, wanted_shapes, strict=True)
    ]


def _expand_mixed_batch_axes(name: str, x: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array:
    """Expands the batch axes of a broadcastable array if only some have size 1, so that they fold into one."""
    if name not in _BROADCASTABLE:
        return x
    own, rest = x.shape[: len(batch_shape)], x.shape[len(batch_shape) :]
    return x if math.prod(own) == 1 else jnp.broadcast_to(x, (*batch_shape, *rest))


def _partitioned(
    call: _Pass, local_call: Callable, whole_mesh: Mesh | None, named_args: dict[str, jax.Array]
) -> Callable:
    """Makes `local_call` one that XLA partitions over batch axes and heads, but not over sequences or head dims."""
    *batch_shape, seqlen_q, num_heads, _ = named_args["q"].shape
    seqlen_kv, num_kv_heads, _ = named_args["k"].shape[-3:]
    arg_shapes = [(name, x.shape) for name, x in named_args.items()]
    results = jax.eval_shape(local_call, *named_args.values())
    result_shapes = [(name, x.shape) for name, x in zip(call.results, results, strict=True)]

    def partition(mesh, arg_infos, result_infos):
        *batch, _, heads, _ = _divisible_spec(mesh, arg_infos[0])
        if num_kv_heads % _num_parts(mesh, heads):
            heads = None  # a group of query heads and its key head stay on one device

        def sharding(name: str, shape: tuple[int, ...]) -> NamedSharding:
            spec = [*batch, *(heads if axis in "nk" else None for axis in _AXES[name])]
            if name in _BROADCASTABLE:
                spec = [None if size == 1 else axes for size, axes in zip(shape, spec, strict=True)]
            return NamedSharding(mesh, PartitionSpec(*spec))

        def call_and_sum(*args):
            results = local_call(*args)
            if call is not _BACKWARD_BIAS:
                return results
            # The kernel sums over its own batch elements and heads; psum adds those of the other devices.
            last_batch_axis = len(batch_shape) - 1
            sizes = result_shapes[0][1][last_batch_axis : last_batch_axis + 2]
            parts = zip(sizes, (batch[-1], heads), strict=True)
            axes = [axis for size, axes in parts if size == 1 and axes for axis in _as_tuple(axes)]
            # Under explicit sharding JAX would put shardings into the reduction, which XLA cannot compile.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return [jax.lax.psum(x, axes) if axes else x for x in results]

        result_shardings = [sharding(*named) for named in result_shapes]
        arg_shardings = tuple(sharding(*named) for named in arg_shapes)
        return whole_mesh or mesh, call_and_sum, result_shardings, arg_shardings

    def factors(name: str, shape: tuple[int, ...]) -> list[str]:
        """Names the axes of an array for the sharding rule, in which equal names are sharded alike."""
        # Query and key heads are one factor where they correspond one to one.
        axes = _AXES[name].replace("k", "n") if num_heads == num_kv_heads else _AXES[name]
        axes = [*(f"b{i}" for i in range(len(batch_shape))), *axes]
        if name not in _BROADCASTABLE:
            return axes
        # An axis that is broadcast, or in blocks, has a factor of its own.
        sizes = (*batch_shape, num_heads, seqlen_q, seqlen_kv)
        return [
            axis if size == full else f"x{name}{i}"
            for i, (axis, size, full) in enumerate(zip(axes, shape, sizes, strict=True))
        ]

    rule = [[factors(*named) for named in group] for group in (arg_shapes, result_shapes)]
    in_order = dict.fromkeys(factor for group in rule for axes in group for factor in axes)
    partitioned = custom_partitioning(lambda *args: local_call(*args))
    partitioned.def_partition(
        partition,
        sharding_rule=" -> ".join(", ".join(map(" ".join, group)) for group in rule),
        need_replication_factors=tuple(x for x in in_order if x[0] not in "bnk"),  # in order of appearance
    )
    return partitioned


def _num_parts(mesh, axes) -> int:
    return math.prod(mesh.shape[axis] for axis in _as_tuple(axes) if axis)


def _as_tuple(axes) -> tuple:
    return axes if isinstance(axes, tuple) else (axes,)


def _divisible_spec(mesh, array) -> list:
    """The mesh axes that partition each axis of `array`; None where the parts would differ in size."""
    spec = getattr(array.sharding, "spec", (None,) * len(array.shape))
    partition = zip(array.shape, spec, strict=True)
    return [None if size % _num_parts(mesh, axes) else axes for size, axes in partition]


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
    q, k, v = (named[name] for name in "qkv")
    batch, seqlen_q, num_heads, head_dim = _fold(q, "q").shape
    mask_shape = _fold(named["mask"], "mask").shape if "mask" in named else (1, 1, 1, 1)
    return _workspace.arrays(
        _workspace.Call(
            is_forward=call is _FORWARD,
            is_backward=call is _BACKWARD,
            is_16_bit=q.dtype.itemsize == 2,
            is_deterministic=options.deterministic,
            has_mask="mask" in named,
            has_segments="query_segment_ids" in named,
            B=batch,
            N=num_heads,
            T=seqlen_q,
            S=k.shape[-3],
            H=head_dim,
            B_mask=mask_shape[0],
            N_mask=mask_shape[1],
            T_mask=mask_shape[2],
            S_mask=mask_shape[3],
            sums_dq=lambda: _sums_dq(q, v),
        )
    )


def _sums_dq(q, v) -> bool:
    """Whether the backward kernel sums 16-bit dq in memory.

    Hopper's kernels above head dim 128 leave dq to another kernel, which is faster. Where the program runs on other
    GPUs than it was lowered for, their kernels do so too without that memory, at some cost in speed.
    """
    gpus = _ffi.local_gpus()
    is_hopper = gpus and all(gpu.compute_capability == "9.0" for gpu in gpus)
    head_dims = q.shape[-1], v.shape[-1]
    if not is_hopper or any(head_dim % 8 for head_dim in head_dims):
        return True
    names = (name.split() for name in _ffi.build_info()["kernels"])
    compiled = [int(size) for *kind, size in names if kind == ["backward", "sm90", q.dtype.name]]
    return min((size for size in compiled if size >= max(head_dims)), default=0) <= 128


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
    split = len(aval.shape) - len(_AXES[name])
    return jax.core.ShapedArray((math.prod(aval.shape[:split]), *aval.shape[split:]), aval.dtype)


def _reshape(ctx, x: ir.Value, old, new) -> ir.Value:
    if len(old.shape) == len(new.shape):
        return x
    # JAX lowers the reshape, as it can compute symbolic sizes. The rest of the types is not wanted here.
    old, new = (jax.core.ShapedArray(aval.shape, aval.dtype) for aval in (old, new))
    lower = mlir.lower_fun(lambda x: jax.lax.reshape(x, new.shape), multiple_results=False)
    return lower(ctx.replace(avals_in=[old], avals_out=[new]), x)[0]


def _lower_elsewhere(ctx, *args, **params):
    _checks.refuse_platform(ctx.platforms or ctx.module_context.platforms)


# Definition


def _define(name: str, abstract_eval: Callable) -> Primitive:
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


def _define_pass(call: _Pass, abstract_eval: Callable) -> Primitive:
    inner = _define(f"{call.target}_call", abstract_eval)
    mlir.register_lowering(inner, _lower_elsewhere)
    mlir.register_lowering(inner, functools.partial(_lower_cpu, call), platform="cpu")
    mlir.register_lowering(inner, functools.partial(_lower_cuda, call), platform="cuda")

    outer = _define(call.target, abstract_eval)
    batching.primitive_batchers[outer] = functools.partial(_batch, call, outer)
    ad.primitive_jvps[outer] = _differentiate
    _partitioning.register_lowering(outer, functools.partial(_call_on_shards, call, inner))
    return outer


_forward_p = _define_pass(_FORWARD, _forward_avals)
_backward_p = _define_pass(_BACKWARD, _backward_avals)
_backward_bias_p = _define_pass(_BACKWARD_BIAS, _backward_bias_avals)
