"""The forward and the backward pass as JAX primitives: shapes, batching, partitioning, lowering.

Each pass is two primitives. The outer one stands in jaxprs. Its arrays may have any number of leading batch axes, so
that `vmap` adds one and moves nothing; its lowering partitions the call over the batch axes and the heads. The inner
one is the call of the kernel on one device, with the batch axes folded into one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import _support
from ._options import AttentionOptions

try:
    # jit gives a lowering rule the devices, which custom_partitioning needs, only for the primitives in this set.
    from jax._src.dispatch import prim_requires_devices_during_lowering as _needs_devices
except ImportError:
    _needs_devices = None
    warnings.warn(
        f"jax_flash cannot partition its kernels with jax {jax.__version__}: sharded inputs of attention will be "
        "gathered on every device. A newer jax_flash may know this version of jax.",
        stacklevel=2,
    )

# The optional operands of the kernels, in the order of their arguments.
OPERANDS = ("query_seq_lengths", "key_value_seq_lengths", "query_offset", "sinks")

# The axes behind the batch axes: t query rows, s keys, n query heads, k key heads, d head dim, e values' head dim.
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
    "query_seq_lengths": "",
    "key_value_seq_lengths": "",
    "query_offset": "",
    "sinks": "n",
}


@dataclasses.dataclass(frozen=True)
class _Pass:
    target: str  # of the FFI call
    args: tuple[str, ...]  # which the optional operands follow
    results: tuple[str, ...]

    def arg_axes(self, operands: Sequence[str]) -> list[str]:
        return [_AXES[name] for name in (*self.args, *operands)]

    def result_axes(self) -> list[str]:
        return [_AXES[name] for name in self.results]


_FORWARD = _Pass("jax_flash_forward", ("q", "k", "v"), ("out", "lse"))
_BACKWARD = _Pass("jax_flash_backward", ("q", "k", "v", "out", "lse", "dout"), ("dq", "dk", "dv"))


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: dict[str, jax.Array], options: AttentionOptions
) -> tuple[jax.Array, jax.Array]:
    """The output and the log-sum-exp.

    Args:
      q: query, [B, T, N, H]; k: key, [B, S, K, H]; v: value, [B, S, K, Hv]; of one dtype.
      operands: those of OPERANDS that are used: int32 [B], and sinks [B, N] in lse's dtype.
      options: the static options.

    Returns:
      out [B, T, N, Hv] in q's dtype, lse [B, T, N] in float32 (float64 for float64).
    """
    names = tuple(name for name in OPERANDS if name in operands)
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

    The sinks are not needed again: they are part of lse.
    """
    operands = operands if dlse is None else {"dlse": dlse, **operands}
    names = tuple(name for name in ("dlse", *OPERANDS) if name in operands and name != "sinks")
    arrays = (q, k, v, out, lse, dout, *(operands[name] for name in names))
    return tuple(_backward_p.bind(*arrays, operands=names, options=options))


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


# Batching


def _batch(primitive: Primitive, args, dims, **params):
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    args = [
        jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    results = primitive.bind(*args, **params)
    return results, [0] * len(results)


# Differentiation


def _differentiate(primals, tangents, **params):
    _support.refuse_second_derivative()  # the first is custom_vjp's, which never comes here


# Partitioning


def _call_partitioned(inner: Primitive, call: _Pass, *args: jax.Array, **params):
    arg_axes, result_axes = call.arg_axes(params["operands"]), call.result_axes()
    local_call = functools.partial(inner.bind, **params)
    if _needs_devices is None:
        return local_call(*args)

    num_batch_axes = args[0].ndim - len(_AXES["q"])
    num_heads, num_kv_heads = args[0].shape[-2], args[1].shape[-2]

    def partition(mesh, arg_infos, result_infos):
        *batch, _, heads, _ = _divisible_spec(mesh, arg_infos[0])
        if num_kv_heads % _num_parts(mesh, heads):
            heads = None  # a group of query heads and its key head stay on one device

        def sharding(axes: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*batch, *(heads if a in "nk" else None for a in axes)))

        return mesh, local_call, list(map(sharding, result_axes)), tuple(map(sharding, arg_axes))

    def factors(axes: str) -> str:
        # Query and key heads are one factor where they correspond one to one.
        names = axes.replace("k", "n") if num_heads == num_kv_heads else axes
        return " ".join([*(f"b{i}" for i in range(num_batch_axes)), *names])

    partitioned = custom_partitioning(lambda *args: local_call(*args))
    partitioned.def_partition(
        partition,
        sharding_rule=f"{', '.join(map(factors, arg_axes))} -> {', '.join(map(factors, result_axes))}",
        need_replication_factors=("t", "d", "s", "e"),  # Shardy wants them in order of appearance
    )
    return partitioned(*args)


def _num_parts(mesh, axes) -> int:
    return math.prod(mesh.shape[axis] for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis)


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
    # XLA owns the workspace, as results: a CUDA graph may replay the kernels after the handler has returned.
    workspace = []
    if call is _FORWARD and q.dtype.itemsize == 2:
        workspace += [jax.core.ShapedArray((1,), jnp.dtype(jnp.int32))]  # counts tiles
    if call is _BACKWARD:
        batch, seqlen_q, num_heads, head_dim = _fold(q, _AXES["q"]).shape
        rows = jax.core.ShapedArray((batch, num_heads, -(-seqlen_q // 128) * 128), jnp.dtype(jnp.float32))
        workspace += [rows, rows]  # delta; lse in base 2
        if q.dtype.itemsize == 2 and not options.deterministic:
            shape = (batch, -(-seqlen_q // 16) * 16, num_heads, head_dim)  # dq, summed in blocks of rows
            workspace += [jax.core.ShapedArray(shape, jnp.dtype(jnp.float32))]
    results = _lower_ffi(call, ctx, args, workspace, options=options, **params)
    # A result that a scan stacks and the layer also uses has XLA run the kernel twice, once straight into the stack
    # (its dynamic-slice fusion, seen with jax 0.11). It does not look for one behind a barrier.
    return list(stablehlo.OptimizationBarrierOp(results).results)


def _lower_ffi(call: _Pass, ctx, args, workspace, *, operands: tuple[str, ...], options: AttentionOptions):
    avals_in = list(map(_fold, ctx.avals_in, call.arg_axes(operands)))
    avals_out = list(map(_fold, ctx.avals_out, call.result_axes()))
    avals_out += workspace
    results = jax.ffi.ffi_lowering(call.target)(
        ctx.replace(avals_in=avals_in, avals_out=avals_out),
        *map(_reshape, args, avals_in),
        operands=",".join(operands),
        **dataclasses.asdict(options),
    )
    return list(map(_reshape, results, ctx.avals_out))  # without the workspace


def _fold(aval, axes: str) -> jax.core.ShapedArray:
    """The type of an array with all its batch axes joined into one."""
    split = len(aval.shape) - len(axes)
    return jax.core.ShapedArray((math.prod(aval.shape[:split]), *aval.shape[split:]), aval.dtype)


def _reshape(x: ir.Value, aval) -> ir.Value:
    tensor = ir.RankedTensorType(x.type)
    if tensor.rank == len(aval.shape):
        return x
    return stablehlo.reshape(ir.RankedTensorType.get(aval.shape, tensor.element_type), x)


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
    batching.primitive_batchers[outer] = functools.partial(_batch, outer)
    ad.primitive_jvps[outer] = _differentiate
    mlir.register_lowering(outer, mlir.lower_fun(functools.partial(_call_partitioned, inner, call)))
    if _needs_devices is not None:
        _needs_devices.add(outer)
    return outer


_forward_p = _define_pass(_FORWARD, _forward_avals)
_backward_p = _define_pass(_BACKWARD, _backward_avals)
