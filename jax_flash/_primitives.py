"""The passes over the score matrix as JAX primitives: shapes, partitioning, lowering.

Each pass is two primitives. The arrays of the outer one may have any number of batch axes; its lowering partitions the
call over them, the heads and the query rows. The inner one calls the kernel on one device; its lowering folds the batch
axes into one. Where a platform has no kernel for a pass, the inner one is plain JAX (`_blocked`).

Tangents have an axis of directions D before the batch axes: [D, B, T, N, H] beside a primal [B, T, N, H]. Each
direction is then an array like the primal, and a kernel may compute scores once for several of them.
`is_directed` says which arrays have it, by name.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.sharding import Mesh, PartitionSpec

from . import (
    _bias_sums,
    _blocked,
    _checks,
    _kernel_choice,
    _on_shards,
    _partitioning,
    _row_parts,
    _workspace,
)
from ._operands import AXES, POOLED, first_batch_axis, is_directed, sum_dtype
from ._options import AttentionOptions
from ._passes import (
    BACKWARD,
    BACKWARD_BIAS,
    BACKWARD_BIAS_TANGENT,
    BACKWARD_TANGENT,
    BACKWARD_WITH_BIAS,
    BACKWARD_WITH_DS,
    BACKWARDS,
    FORWARD,
    FORWARD_WITH_FACTOR,
    FORWARDS,
    PAGED_FORWARD,
    SECOND_TANGENT,
    TANGENT,
    Pass,
    bind,
    whole_keys,
)


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
    return tuple(bind(FORWARD, _forward_p, {"q": q, "k": k, "v": v} | operands, options))


def forward_with_factor(
    q: jax.Array, k: jax.Array, v: jax.Array, operands: dict[str, jax.Array], options: AttentionOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes the results of `forward`, and a factor of the probabilities that follow from lse.

    lse is rounded: with logits of a thousand, by up to 3e-5 in float32, and as much do all probabilities of a row
    differ from those of the forward pass. The factor, [B, T, N] in lse's dtype, makes up for that.
    """
    arrays = {"q": q, "k": k, "v": v} | operands
    return tuple(bind(FORWARD_WITH_FACTOR, _forward_with_factor_p, arrays, options))


def paged_forward(arrays: dict[str, jax.Array], options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Computes out and lse from keys and values in pages.

    Args:
      arrays: q and operands of `forward`; k_pages [pages, keys of a page, K, H] and v_pages [pages, keys of a page, K,
        Hv], without batch axes; page_indices int32 [B, P]. S is P times the keys of a page.
      options: the static options.
    """
    return tuple(bind(PAGED_FORWARD, paged_forward_p, arrays, options))


def backward(
    arrays: dict[str, jax.Array], options: AttentionOptions
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes dq, dk and dv.

    Args:
      arrays: the arguments and results of `forward`; dout, and dlse unless it is zero.
      options: the static options.

    dq and dk are not multiplied by scale_factor, so that the sum of q dq is the gradient of scale_factor even where
    that is 0. The kernels do not take operands that are PART_OF_LSE.
    """
    return tuple(bind(BACKWARD, _backward_p, arrays, options))


def backward_bias(arrays: dict[str, jax.Array], options: AttentionOptions) -> jax.Array:
    """Computes sums of the gradient of the bias; the caller sums them over the axes that the bias is broadcast over.

    The arguments are those of `backward`, with bias or alibi_slopes among the operands.

    Returns:
      For a bias with both T and S: [B or 1, N or 1, T, S], with 1 where the bias has 1. Otherwise [B, N, T or 1, S or
      1]. alibi_slopes have neither T nor S. In lse's dtype; in the bias's where the caller has nothing left to sum.
    """
    return bind(BACKWARD_BIAS, _backward_bias_p, arrays, options)[0]


def backward_with_bias(
    arrays: dict[str, jax.Array], options: AttentionOptions
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes the results of `backward` and of `backward_bias`, by one kernel where there is one for both."""
    return tuple(bind(BACKWARD_WITH_BIAS, _backward_with_bias_p, arrays, options))


def tangent(arrays: dict[str, jax.Array], options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Computes tout and tlse, the derivatives of the results of `forward` in some directions.

    Args:
      arrays: q, k, v, operands, out and lse of `forward`; and the tangents [D, ...] of those inputs that have one,
        under the names "tq", "tk", "tv", "tscale_factor", "tbias", "talibi_slopes". Those of sinks are the caller's.
      options: the static options.

    Returns:
      tout [D, B, T, N, Hv], tlse [D, B, T, N]; 0 in a fully masked row.
    """
    return tuple(bind(TANGENT, _tangent_p, arrays, options))


def second_tangent(arrays: dict[str, jax.Array], options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Computes tuout and tulse, the derivatives in directions u of the results of `tangent` in directions t.

    Args:
      arrays: those of `tangent`, and tlse; ulse and the tangents "uq", ... of u; the derivatives "tuq", ... of t.
      options: the static options.
    """
    return tuple(bind(SECOND_TANGENT, _second_tangent_p, arrays, options))


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
    return tuple(bind(BACKWARD_TANGENT, _backward_tangent_p, arrays, options))


def backward_bias_tangent(arrays: dict[str, jax.Array], options: AttentionOptions) -> jax.Array:
    """Computes sums of the derivative of the gradient of the bias, like `backward_bias`.

    The arguments are those of `backward_tangent`.

    Returns:
      In lse's dtype. For a bias with both T and S: [D, B or 1, N or 1, T, S], with 1 where the bias has 1. Otherwise
      [D, B, N, T or 1, S or 1].
    """
    return bind(BACKWARD_BIAS_TANGENT, _backward_bias_tangent_p, arrays, options)[0]


# Shapes


def forward_avals(q, k, v, *_, **params):
    spec = q.sharding.spec  # all None except under explicit sharding
    lse_dtype = sum_dtype(q.dtype)
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


def forward_with_factor_avals(*args, **params):
    out, lse = forward_avals(*args, **params)
    return out, lse, lse


def _backward_avals(q, k, v, *_, **params):
    return tuple(x.update(weak_type=False) for x in (q, k, v))


def _backward_bias_avals(num_sums: Callable, *args, operands, options):
    named = BACKWARD_BIAS.by_name(args, operands)
    sums, q, bias = _bias_sums_aval(named, num_sums), named["q"], named.get("bias")
    is_gradient = bias is not None and bias.shape == sums.shape and q.ndim == len(AXES["q"]) + 1
    has_pairs = is_gradient and bias.shape[-2:] == (q.shape[-3], named["k"].shape[-3])
    if has_pairs and options.rounds_sums and bias.dtype == q.dtype:
        # Rounded by the kernel, they are not written in float32 and then read.
        sums = sums.update(dtype=q.dtype)
    return (sums,)


def _backward_with_bias_avals(*args, **params):
    return *_backward_avals(*args, **params), *_backward_bias_avals(lambda size: 1, *args, **params)


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
    named = BACKWARD_TANGENT.by_name(args, operands)
    return tuple(with_directions(named[name], named["tlse"].shape[0]) for name in "qkv")


def _backward_bias_tangent_avals(*args, operands, **params):
    named = BACKWARD_BIAS_TANGENT.by_name(args, operands)
    return (with_directions(_bias_sums_aval(named, lambda size: 1), named["tlse"].shape[0]),)


# Lowering


def _lower_cpu(call: Pass, ctx, *args, **params):
    return _lower_ffi(call, ctx, args, [], **params)


def _lower_cuda(call: Pass, ctx, *args, **params):
    q, _, v = ctx.avals_in[:3]
    page_size = v.shape[1] if call is PAGED_FORWARD else None
    head_dims = q.shape[-1], v.shape[-1]
    _checks.check_cuda(q.dtype, head_dims, is_gradient=call in BACKWARDS, page_size=page_size)
    results = _lower_ffi(call, ctx, args, _workspace_avals(call, ctx.avals_in, **params), **params)
    # XLA may run the kernel twice if a scan stacks a result that the layer also uses, once straight into the stack (its
    # dynamic-slice fusion). It does not do so across a barrier.
    return list(stablehlo.OptimizationBarrierOp(results).results)


def _workspace_avals(call: Pass, avals, *, operands: tuple[str, ...], options: AttentionOptions):
    """The arrays that the CUDA kernels need for themselves. XLA allocates them, as further results of the call."""
    named = call.by_name(avals, operands)
    q, (k, v) = named["q"], whole_keys(named)
    page_size = named["v_pages"].shape[1] if call is PAGED_FORWARD else None
    batch, seqlen_q, num_heads, head_dim = _fold(q, "q").shape
    mask_shape = _fold(named["mask"], "mask").shape if "mask" in named else (1, 1, 1, 1)

    def num_planes() -> int:
        return _kernel_choice.num_planes(call, q, k, v, options)

    def folded() -> Iterator[jax.core.ShapedArray]:
        return (_fold(x, name) for x, name in zip((q, k, v), "qkv", strict=True))

    @functools.cache
    def num_head_parts() -> int:
        if q.dtype.itemsize > 2 and num_planes() != 1:
            return 0
        return _kernel_choice.num_head_parts(*folded(), options.is_causal)

    arrays = _workspace.arrays(
        _workspace.Call(
            is_forward=call in FORWARDS,
            is_gradient=call in (*BACKWARDS, BACKWARD_BIAS, BACKWARD_TANGENT),
            is_backward=call in BACKWARDS,
            is_backward_tangent=call is BACKWARD_TANGENT,
            is_16_bit=q.dtype.itemsize == 2,
            sum_words=2 if q.dtype == jnp.float64 else 1,
            may_have_planes=q.dtype == jnp.float32 and call in (*FORWARDS, BACKWARD),
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
            num_key_parts=lambda: _kernel_choice.num_key_parts(q, k, v, operands, options, page_size),
            keeps_ds=lambda: call is BACKWARD_WITH_DS,
            num_shared_heads=lambda: _kernel_choice.num_shared_heads(
                *folded(),
                is_causal=options.is_causal,
                keeps_ds=call is BACKWARD_WITH_DS,
                num_head_parts=num_head_parts(),
            ),
            sums_dq=lambda: _kernel_choice.sums_dq(
                q,
                k,
                v,
                num_head_parts=num_head_parts(),
                is_deterministic=options.deterministic,
                hides_pairs=_hides_pairs(operands),
            ),
            num_head_parts=num_head_parts,
        )
    )
    # ds comes first, and is a result.
    return itertools.islice(arrays, int(call is BACKWARD_WITH_DS), None)


def _hides_pairs(operands: tuple[str, ...]) -> bool:
    return not {"mask", "query_segment_ids"}.isdisjoint(operands)


def _lower_ffi(
    call: Pass,
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
        **options.attributes(),
    )
    # `strict=False` drops the workspace.
    return [_reshape(ctx, *x) for x in zip(results, avals_out, ctx.avals_out, strict=False)]


def _fold(aval, name: str) -> jax.core.ShapedArray:
    """The type of an array with its batch axes folded into one."""
    first, end = first_batch_axis(name), len(aval.shape) - len(AXES[name])
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


def _lower_blocked(compute: Callable, call: Pass, ctx, *args, operands, options):
    """Lowers a pass without a kernel to `compute` of `_blocked`."""

    def on_one_device(*args):
        if any(math.prod(x.shape) == 0 for x in args):
            return [jnp.zeros(x.shape, x.dtype) for x in ctx.avals_out]
        named = call.by_name(args, operands)
        folded = {name: x.reshape(_fold(x, name).shape) for name, x in named.items()}
        results = zip(compute(folded, options), ctx.avals_out, strict=True)
        return [x.reshape(aval.shape) for x, aval in results]

    return _lower_on_one_device(on_one_device, ctx, *args)


def _lower_on_one_device(function: Callable, ctx, *args):
    """Lowers a function of arrays without the rest of their types, such as the mesh axes that one varies over."""

    def run(*args):
        with _on_shards.no_mesh(), jax.numpy_rank_promotion("allow"):
            return function(*args)

    types = [
        [jax.core.ShapedArray(x.shape, x.dtype) for x in avals] for avals in (ctx.avals_in, ctx.avals_out)
    ]
    return mlir.lower_fun(run)(ctx.replace(avals_in=types[0], avals_out=types[1]), *args)


def _lower_backward_bias(call: Pass, ctx, *args, operands, options):
    def on_one_device(*args):
        return _row_parts.sum_of_blocks(_sums_of_blocks_p, call.by_name(args, operands), options)

    return _lower_on_one_device(on_one_device, ctx, *args)


def _lower_backward_with_bias(call: Pass, ctx, *args, operands, options):
    def on_one_device(*args):
        named = call.by_name(args, operands)
        return [
            *bind(BACKWARD, _backward_call_p, named, options),
            *_row_parts.sum_of_blocks(_sums_of_blocks_p, named, options),
        ]

    return _lower_on_one_device(on_one_device, ctx, *args)


def _lower_backward_with_bias_cuda(call: Pass, ctx, *args, operands, options):
    params = dict(operands=operands, options=options)
    *gradients, dbias = ctx.avals_out
    named = {name: _fold(aval, name) for name, aval in call.by_name(ctx.avals_in, operands).items()}
    if not _kernel_choice.keeps_ds(
        *(named[name] for name in "qkv"),
        _fold(dbias, "dbias"),
        options,
        hides_pairs=_hides_pairs(operands),
        has_offset="query_offset" in operands,
    ):
        return _lower_backward_with_bias(call, ctx, *args, **params)
    batch, seqlen_q, num_heads, _ = named["q"].shape
    ds = jax.core.ShapedArray((batch, num_heads, seqlen_q, named["k"].shape[1]), jnp.uint16)
    *gradients, ds_value = _lower_cuda(
        BACKWARD_WITH_DS, ctx.replace(avals_out=[*gradients, ds]), *args, **params
    )

    def total(ds, *args):
        arrays = {name: x.reshape(named[name].shape) for name, x in call.by_name(args, operands).items()}
        return [_bias_sums.of_ds(ds, arrays, dbias, options)]

    types = ctx.replace(avals_in=[ds, *ctx.avals_in], avals_out=[dbias])
    return [*gradients, *_lower_on_one_device(total, types, ds_value, *args)]


def _lower_sums_of_blocks_cuda(call: Pass, ctx, *args, **params):
    """Parts of the batch are summed by different thread blocks, and then added in a fixed order."""
    (dbias,) = ctx.avals_out
    q, k = (_fold(aval, name) for name, aval in zip("qk", ctx.avals_in[:2], strict=True))
    parts = _kernel_choice.num_bias_parts(q, k, _fold(dbias, "dbias"))
    if parts == 1:
        return _lower_cuda(call, ctx, *args, **params)
    of_parts = jax.core.ShapedArray((parts, *dbias.shape[-3:]), sum_dtype(dbias.dtype))
    sums = _lower_cuda(call, ctx.replace(avals_out=[of_parts]), *args, **params)
    total = jax.core.ShapedArray(dbias.shape, dbias.dtype)
    add = mlir.lower_fun(
        lambda x: jnp.sum(x, 0).reshape(total.shape).astype(total.dtype), multiple_results=False
    )
    return add(ctx.replace(avals_in=[of_parts], avals_out=[total]), *sums)


def _lower_backward_tangent_cuda(call: Pass, ctx, *args, **params):
    # The backward pass, which runs beside it, refuses what no kernel serves.
    if _kernel_choice.backward_tangent_fits(*ctx.avals_in[:3]):
        return _lower_cuda(call, ctx, *args, **params)
    return _lower_blocked(_blocked.backward_tangent, call, ctx, *args, **params)


def _lower_backward_bias_tangent(call: Pass, ctx, *args, **params):
    (tdbias,) = ctx.avals_out
    # A bias may have outer batch axes, of vmap's, that are not summed over.
    batch = math.prod(tdbias.shape[1:-3])
    compute = functools.partial(_blocked.backward_bias_tangent, batch=batch)
    return _lower_blocked(compute, call, ctx, *args, **params)


def _lower_tangent_cuda(call: Pass, ctx, *args, **params):
    # The forward pass, which runs before it, refuses what no kernel serves.
    if _kernel_choice.has_tangent_kernel(*ctx.avals_in[:3]):
        return _lower_cuda(call, ctx, *args, **params)
    return _lower_blocked(_blocked.tangent, call, ctx, *args, **params)


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
        def program(*args):
            return primitive.bind(*args, **dict(params))

        program.__name__ = program.__qualname__ = name
        # As JAX marks the programs of its own primitives: with jax_debug_nans it does not run them again, one operation
        # after the other, where a NaN comes out.
        program._apply_primitive = True
        return jax.jit(program)

    @primitive.def_impl
    def run(*args, **params):
        with jax.disable_jit(False):  # otherwise the call would come back here
            return compiled(tuple(params.items()))(*args)

    return primitive


def _define_pass(
    call: Pass, abstract_eval: Callable, *, name: str | None = None, **lowerings: Callable
) -> Primitive:
    name = name or call.target
    inner = _define_call(call, abstract_eval, name=f"{name}_call", **lowerings)
    return _define_outer(call, abstract_eval, inner, name)


def _define_outer(call: Pass, abstract_eval: Callable, inner: Primitive, name: str) -> Primitive:
    outer = define(f"{name}_pass", abstract_eval)
    _partitioning.register_lowering(outer, functools.partial(_on_shards.bind_on_shards, call, inner))
    return outer


def _define_call(call: Pass, abstract_eval: Callable, *, name: str, **lowerings: Callable) -> Primitive:
    primitive = define(name, abstract_eval)
    mlir.register_lowering(primitive, _lower_elsewhere)
    for platform, lower in lowerings.items():
        mlir.register_lowering(primitive, functools.partial(lower, call), platform=platform)
    return primitive


_KERNELS = dict(cpu=_lower_cpu, cuda=_lower_cuda)


_forward_p = _define_pass(FORWARD, forward_avals, **_KERNELS)
_forward_with_factor_p = _define_pass(FORWARD_WITH_FACTOR, forward_with_factor_avals, **_KERNELS)
paged_forward_p = _define_pass(PAGED_FORWARD, forward_avals, name="jax_flash_paged_forward", **_KERNELS)
_backward_call_p = _define_call(BACKWARD, _backward_avals, name=f"{BACKWARD.target}_call", **_KERNELS)
_backward_p = _define_outer(BACKWARD, _backward_avals, _backward_call_p, BACKWARD.target)
_sums_of_blocks_p = _define_call(
    BACKWARD_BIAS,
    functools.partial(_backward_bias_avals, _workspace.blocks),
    name="jax_flash_sums_of_blocks",
    cpu=_lower_cpu,
    cuda=_lower_sums_of_blocks_cuda,
)
_backward_bias_p = _define_pass(
    BACKWARD_BIAS,
    functools.partial(_backward_bias_avals, lambda size: 1),
    **dict.fromkeys(_KERNELS, _lower_backward_bias),
)
_backward_with_bias_call_p = _define_call(
    BACKWARD_WITH_BIAS,
    _backward_with_bias_avals,
    name="jax_flash_backward_with_bias_call",
    cpu=_lower_backward_with_bias,
    cuda=_lower_backward_with_bias_cuda,
)


def _bind_backward_with_bias(whole_mesh: Mesh | None, *args: jax.Array, **params):
    if whole_mesh is None:
        inner = _backward_with_bias_call_p
        return _on_shards.bind_on_shards(BACKWARD_WITH_BIAS, inner, whole_mesh, *args, **params)
    # There, what is not partitioned for the sake of one result is not for any of a call.
    return [*_backward_p.bind(*args, **params), *_backward_bias_p.bind(*args, **params)]


_backward_with_bias_p = define("jax_flash_backward_with_bias_pass", _backward_with_bias_avals)
_partitioning.register_lowering(_backward_with_bias_p, _bind_backward_with_bias)
_tangent_p = _define_pass(
    TANGENT, functools.partial(_tangent_avals, TANGENT), cpu=_lower_cpu, cuda=_lower_tangent_cuda
)
_second_tangent_p = _define_pass(
    SECOND_TANGENT,
    functools.partial(_tangent_avals, SECOND_TANGENT),
    **dict.fromkeys(_KERNELS, functools.partial(_lower_blocked, _blocked.second_tangent)),
)
_backward_tangent_p = _define_pass(
    BACKWARD_TANGENT,
    _backward_tangent_avals,
    cpu=_lower_cpu,
    cuda=_lower_backward_tangent_cuda,
)
_backward_bias_tangent_p = _define_pass(
    BACKWARD_BIAS_TANGENT,
    _backward_bias_tangent_avals,
    **dict.fromkeys(_KERNELS, _lower_backward_bias_tangent),
)
