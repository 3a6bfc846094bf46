"""The forward and the backward passes as JAX primitives: shapes, batching, partitioning, lowering.

Each pass is two primitives. The outer one stands in jaxprs. Its arrays may have any number of leading batch axes, so
that `vmap` adds one and moves nothing; its lowering partitions the call over the batch axes and the heads. The inner
one is the call of the kernel on one device, with the batch axes folded into one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _ffi, _partitioning, _support
from ._operands import OPERANDS
from ._options import AttentionOptions

# The axes behind the batch axes: t query rows, s keys, n query heads, k key heads, d head dim, e values' head dim,
# w words of a seed.
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
# Any axis of these may have size 1 and then stands for all; batch axes, too.
_BROADCASTABLE = ("dbias", *(operand.name for operand in OPERANDS if operand.is_broadcastable))
_SUM_BLOCK = 64  # rows and keys of one sum of dbias where it has none for each pair


@dataclasses.dataclass(frozen=True)
class _Pass:
    target: str  # of the FFI call
    args: tuple[str, ...]  # which the optional operands follow
    results: tuple[str, ...]

    def arg_names(self, operands: Sequence[str]) -> tuple[str, ...]:
        return *self.args, *operands


_FORWARD = _Pass("jax_flash_forward", ("q", "k", "v"), ("out", "lse"))
_BACKWARD = _Pass("jax_flash_backward", ("q", "k", "v", "out", "lse", "dout"), ("dq", "dk", "dv"))
_BACKWARD_BIAS = _Pass("jax_flash_backward_bias", _BACKWARD.args, ("dbias",))


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: dict[str, jax.Array], options: AttentionOptions
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp.

    Args:
      q: query, [B, T, N, H]; k: key, [B, S, K, H]; v: value, [B, S, K, Hv]; of one dtype.
      operands: those of OPERANDS that are used: lengths, offsets int32 [B]; scale_factor [B], sinks, alibi_slopes
        [B, N] in lse's dtype; segment ids int32 [B, T] and [B, S]; mask and bias [B, N, T, S], of whose axes any may
        have size 1; dropout_seeds uint32 [B, N, 3].
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
    """The gradients dq, dk, dv, from what `forward` took and gave and the cotangents (dlse None: zero).

    Those of q and k lack the scale_factor: so the sum of q dq is the gradient of the latter, even where it is 0. The
    sinks are not needed again: they are part of lse.
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
    """Sums of the gradient of the bias, which are to be summed over what the bias is broadcast over.

    Takes what `backward` takes; operands have a bias or alibi_slopes.

    Returns:
      In lse's dtype: [B or 1, N or 1, T, S] for a bias that has both T and S, with 1 where it has 1; else
      [B, N, T or its blocks of 64, S or its blocks of 64], with blocks where it has 1, and for both with alibi_slopes.
    """
    return _bind_backward(_backward_bias_p, q, k, v, out, lse, dout, dlse, operands, options)[0]


def _bind_backward(primitive, q, k, v, out, lse, dout, dlse, operands, options):
    operands = operands if dlse is None else {"dlse": dlse, **operands}
    known = ("dlse", *(operand.name for operand in OPERANDS))
    names = tuple(name for name in known if name in operands and name != "sinks")
    arrays = (q, k, v, out, lse, dout, *(operands[name] for name in names))
    return primitive.bind(*arrays, operands=names, options=options)


# Shapes


def _forward_avals(q, k, v, *_, **params):
    spec = q.sharding.spec  # partitioned only under explicit sharding
    lse_dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    # `update` keeps what else belongs to the type of an array, such as the mesh axes it varies over in shard_map.
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
    bias = dict(zip(_BACKWARD_BIAS.arg_names(operands), args, strict=True)).get("bias")
    has_pairs = bias is not None and bias.shape[-2:] == tuple(sizes[-2:])
    for axis in (-4, -3) if has_pairs else (-2, -1):
        if bias is None or bias.shape[axis] == 1:
            sizes[axis] = 1 if has_pairs else -(-sizes[axis] // _SUM_BLOCK)
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

    args = map(with_batch_axis, call.arg_names(params["operands"]), args, dims)
    results = primitive.bind(*args, **params)
    return results, [0] * len(results)


# Differentiation


def _differentiate(primals, tangents, **params):
    _support.refuse_second_derivative()  # the first is custom_vjp's, which never comes here


# Partitioning


def _call_partitioned(call: _Pass, inner: Primitive, whole_mesh: Mesh | None, *args: jax.Array, **params):
    names = call.arg_names(params["operands"])
    num_batch_axes = args[0].ndim - len(_AXES["q"])
    batch_shape = args[0].shape[:num_batch_axes]
    local_call = functools.partial(inner.bind, **params)
    wanted_shapes = [x.shape for x in jax.eval_shape(local_call, *args)]
    args = [_with_alike_batch_axes(name, x, batch_shape) for name, x in zip(names, args, strict=True)]

    def as_wanted(results):
        # The last batch axis of the bias may have been broadcast for the kernel.
        return [
            x if x.shape == shape else jnp.sum(x, num_batch_axes - 1, keepdims=True)
            for x, shape in zip(results, wanted_shapes, strict=True)
        ]

    if not _partitioning.CAN_PARTITION:
        return as_wanted(local_call(*args))

    num_heads, num_kv_heads = args[0].shape[-2], args[1].shape[-2]
    result_shapes = [x.shape for x in jax.eval_shape(local_call, *args)]
    named_shapes = [(name, x.shape) for name, x in zip(names, args, strict=True)]
    named_results = list(zip(call.results, result_shapes, strict=True))

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
            # What the kernel sums over batch elements and heads goes on over the devices that share them.
            parts = zip(result_shapes[0][num_batch_axes - 1 :][:2], (batch[-1], heads), strict=True)
            axes = [axis for size, axes in parts if size == 1 and axes for axis in _as_tuple(axes)]
            # Under explicit sharding JAX would put shardings into the reduction, which XLA cannot compile.
            with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                return [jax.lax.psum(x, axes) if axes else x for x in results]

        result_shardings = [sharding(*named) for named in named_results]
        return (
            whole_mesh or mesh,
            call_and_sum,
            result_shardings,
            tuple(sharding(*named) for named in named_shapes),
        )

    def factors(name: str, shape: tuple[int, ...]) -> list[str]:
        # Query and key heads are one factor where they correspond one to one.
        axes = _AXES[name].replace("k", "n") if num_heads == num_kv_heads else _AXES[name]
        axes = [*(f"b{i}" for i in range(num_batch_axes)), *axes]
        if name not in _BROADCASTABLE:
            return axes
        # An axis of another size than all the rows', say, has a factor of its own.
        sizes = (*batch_shape, num_heads, args[0].shape[-3], args[1].shape[-3])
        return [
            axis if size == full else f"x{name}{i}"
            for i, (axis, size, full) in enumerate(zip(axes, shape, sizes, strict=True))
        ]

    rule = [[factors(*named) for named in group] for group in (named_shapes, named_results)]
    in_order = dict.fromkeys(factor for group in rule for axes in group for factor in axes)
    partitioned = custom_partitioning(lambda *args: local_call(*args))
    partitioned.def_partition(
        partition,
        sharding_rule=" -> ".join(", ".join(map(" ".join, group)) for group in rule),
        need_replication_factors=tuple(x for x in in_order if x[0] not in "bnk"),  # in order of appearance
    )
    return as_wanted(partitioned(*args))


def _with_alike_batch_axes(name: str, x: jax.Array, batch_shape: tuple[int, ...]) -> jax.Array:
    """Of a broadcastable array: either all batch axes have size 1 or none has, so that they fold into one."""
    if name not in _BROADCASTABLE:
        return x
    own, rest = x.shape[: len(batch_shape)], x.shape[len(batch_shape) :]
    return x if math.prod(own) == 1 else jnp.broadcast_to(x, (*batch_shape, *rest))


def _num_parts(mesh, axes) -> int:
    return math.prod(mesh.shape[axis] for axis in _as_tuple(axes) if axis)


def _as_tuple(axes) -> tuple:
    return axes if isinstance(axes, tuple) else (axes,)


def _divisible_spec(mesh, array) -> list:
    """The partition of each axis of `array`; None where the parts would not be of one size."""
    spec = getattr(array.sharding, "spec", (None,) * len(array.shape))
    partition = zip(array.shape, spec, strict=True)
    return [None if size % _num_parts(mesh, axes) else axes for size, axes in partition]


# Lowering


def _lower_cpu(call: _Pass, ctx, *args, **params):
    return _lower_ffi(call, ctx, args, [], **params)


def _lower_cuda(call: _Pass, ctx, *args, options: AttentionOptions, **params):
    q, _, v = ctx.avals_in[:3]
    _support.check_cuda(q.dtype, max(q.shape[-1], v.shape[-1]), is_gradient=call is _BACKWARD)
    workspace = [
        jax.core.ShapedArray(shape, jnp.dtype(dtype))
        for shape, dtype in _workspace(call, ctx.avals_in, options=options, **params)
    ]
    results = _lower_ffi(call, ctx, args, workspace, options=options, **params)
    # A result that a scan stacks and the layer also uses has XLA run the kernel twice, once straight into the stack
    # (its dynamic-slice fusion, seen with jax 0.11). It does not look for one behind a barrier.
    return list(stablehlo.OptimizationBarrierOp(results).results)


def _workspace(call: _Pass, avals, *, operands: tuple[str, ...], options: AttentionOptions):
    """Shape and dtype of each array that the CUDA kernels need for themselves.

    XLA owns them, as results: a CUDA graph may replay the kernels after the handler has returned.
    """
    named = dict(zip(call.arg_names(operands), avals, strict=True))
    q, k = named["q"], named["k"]
    batch, seqlen_q, num_heads, head_dim = _fold(q, "q").shape
    seqlen_kv = k.shape[-3]
    if q.dtype.itemsize == 2:
        yield (1,), jnp.int32  # counts tiles
    if call is not _FORWARD:
        rows = (batch, num_heads, -(-seqlen_q // 128) * 128)
        yield rows, jnp.float32  # delta
        yield rows, jnp.float32  # lse in base 2
    if call is _BACKWARD and q.dtype.itemsize == 2 and not options.deterministic:
        rows = -(-seqlen_q // 16) * 16 if _sums_dq(q, named["v"]) else 0
        yield (batch, rows, num_heads, head_dim), jnp.float32  # dq, summed in blocks of rows
    if "mask" in named or "query_segment_ids" in named:
        # Which blocks of 64 rows and keys are visible, and a list of them for each row and each column of blocks.
        heads = named["mask"].shape[-3] if "mask" in named else 1
        m_blocks, n_blocks = -(-seqlen_q // 64), -(-seqlen_kv // 64)
        yield (batch, heads, m_blocks, n_blocks), jnp.uint8
        longest = m_blocks * n_blocks + m_blocks + n_blocks  # of both, without a comparison of symbolic sizes
        yield (batch, heads, longest), jnp.uint32
    if "mask" in named:
        # The mask as bits, in words of 32 and pairs of words: of each query's keys, and of each key's queries.
        *outer, rows, keys = _fold(named["mask"], "mask").shape
        yield (*outer, rows, 2 * -(-keys // 64)), jnp.uint32
        if call is _BACKWARD:
            yield (*outer, keys, 2 * -(-rows // 64)), jnp.uint32


def _sums_dq(q, v) -> bool:
    """Does the backward kernel sum 16-bit dq in memory? Those of Hopper above head dim 128 leave it to another kernel.

    So do all others without that memory, more slowly: where the program runs on other GPUs than it was lowered for.
    """
    gpus = _ffi.local_gpus()
    is_hopper = gpus and all(gpu.compute_capability == "9.0" for gpu in gpus)
    head_dims = q.shape[-1], v.shape[-1]
    if not is_hopper or any(head_dim % 8 for head_dim in head_dims):
        return True
    names = (name.split() for name in _ffi.build_info()["kernels"])
    compiled = [int(size) for *kind, size in names if kind == ["backward", "sm90", q.dtype.name]]
    return min((size for size in compiled if size >= max(head_dims)), default=0) <= 128


def _lower_ffi(call: _Pass, ctx, args, workspace, *, operands: tuple[str, ...], options: AttentionOptions):
    avals_in = list(map(_fold, ctx.avals_in, call.arg_names(operands)))
    avals_out = list(map(_fold, ctx.avals_out, call.results))
    avals_out += workspace
    results = jax.ffi.ffi_lowering(call.target)(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        *map(functools.partial(_reshape, ctx), args, ctx.avals_in, avals_in),
        operands=",".join(operands),
        **dataclasses.asdict(options),
    )
    # Without the workspace.
    return [_reshape(ctx, *x) for x in zip(results, avals_out, ctx.avals_out, strict=False)]


def _fold(aval, name: str) -> jax.core.ShapedArray:
    """The type of an array with all its batch axes joined into one."""
    split = len(aval.shape) - len(_AXES[name])
    return jax.core.ShapedArray((math.prod(aval.shape[:split]), *aval.shape[split:]), aval.dtype)


def _reshape(ctx, x: ir.Value, old, new) -> ir.Value:
    if len(old.shape) == len(new.shape):
        return x
    # By JAX, which knows how to compute sizes that are symbolic; without what else belongs to the types.
    old, new = (jax.core.ShapedArray(aval.shape, aval.dtype) for aval in (old, new))
    lower = mlir.lower_fun(lambda x: jax.lax.reshape(x, new.shape), multiple_results=False)
    return lower(ctx.replace(avals_in=[old], avals_out=[new]), x)[0]


def _lower_elsewhere(ctx, *args, **params):
    _support.refuse_platform(ctx.platforms or ctx.module_context.platforms)


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
        with jax.disable_jit(False):  # else the call would come back here
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
    _partitioning.register_lowering(outer, functools.partial(_call_partitioned, call, inner))
    return outer


_forward_p = _define_pass(_FORWARD, _forward_avals)
_backward_p = _define_pass(_BACKWARD, _backward_avals)
_backward_bias_p = _define_pass(_BACKWARD_BIAS, _backward_bias_avals)
