"""Attention and its derivatives as differentiable JAX primitives: the rules of differentiation and of batching.

Write x for q, k, v and the differentiable operands, and F(x) for out and lse. The primitives are

    forward          F(x)
    tangent          F'(x) t            the derivative in a direction t
    backward         F'(x)^T c          the gradient for cotangents c = (dout, dlse)
    second_tangent   F''(x)[t, u] + F'(x) tu              the derivative of the tangent in a direction u
    backward_tangent (F''(x)[t, .])^T c + F'(x)^T tc      the derivative of the gradient in a direction t

Each derivative of second order is symmetric in its directions, so transposing leads to no others:

    tangent^T           backward
    backward^T          tangent
    second_tangent^T    backward and backward_tangent
    backward_tangent^T  tangent and backward_tangent

The results out and lse of `forward` are arguments of the others, as are tout and tlse of those that have them as an
intermediate result. They follow from x and t, so rules count derivatives by x and t only, and in full. The gradient of
the bias is a pass and therefore a primitive of its own, or one with `backward`, of which JAX leaves out what is not
used; that of the sinks is plain JAX, from results of the others.

Arrays go by name. A primitive has the names of its arguments as a parameter.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, partial_eval

from . import _checks, _partitioning, _primitives, _sharding
from ._operands import DIFFERENTIABLE, OPERANDS, Arrays, is_broadcastable, is_directed
from ._options import AttentionOptions

_PRIMALS = ("q", "k", "v", *(operand.name for operand in OPERANDS))
_RESULTS = ("out", "lse")
_P_FACTOR = "p_factor"  # of `_primitives.forward_with_factor`: a constant, 1 but for rounding
_COTANGENTS = ("dout", "dlse")
# A call has at most one of these operands.
BIASES = ("bias", "alibi_slopes")


def forward(arrays: Arrays, options: AttentionOptions) -> tuple[jax.Array, jax.Array]:
    """Computes out and lse from q, k, v and the operands. Differentiable in both modes, twice."""
    found = residuals(arrays, options)
    return found["out"], found["lse"]


def residuals(arrays: Arrays, options: AttentionOptions) -> Arrays:
    """What first derivatives need of the forward pass: out, lse, and p_factor if results are as exact as the dtype.

    Calls that are not differentiated have it, too, so that XLA merges them with equal ones that are.
    """
    dtype = arrays["q"].dtype
    if dtype == jnp.float64 or (dtype == jnp.float32 and options.precision > 0):
        found = _bind(_forward_with_factor_p, arrays, options)
        return dict(zip((*_RESULTS, _P_FACTOR), found, strict=True))
    return dict(zip(_RESULTS, _bind(_forward_p, arrays, options), strict=True))


def named_residuals(arrays: Arrays, options: AttentionOptions) -> Arrays:
    """The `residuals`, named for policies of `jax.checkpoint`."""
    return {
        name: checkpoint_name(x, f"flash_attention_{'out' if name == 'out' else 'lse'}")
        for name, x in residuals(arrays, options).items()
    }


def gradients(arrays: Arrays, wanted: Sequence[str], options: AttentionOptions) -> Arrays:
    """Computes gradients.

    Args:
      arrays: q, k, v, operands, `residuals`, dout, and dlse unless it is zero.
      wanted: names of DIFFERENTIABLE.
      options: the static options.
    """
    found = {}
    wants_backward, wants_bias = set(wanted) & {*"qkv", "scale_factor"}, set(wanted) & set(BIASES)
    if wants_backward and wants_bias and _has_16_bit_pairs(arrays):
        found |= zip(_names_of_both(arrays), _bind(_backward_with_bias_p, arrays, options), strict=True)
    else:
        if wants_backward:
            found |= zip(_names_of_backward(arrays), _bind(_backward_p, arrays, options), strict=True)
        if wants_bias:
            found[_bias_of(arrays)] = _bind(_backward_bias_p, arrays, options)[0]
    if "sinks" in wanted:
        found["sinks"] = _of_any_ranks(_sinks_gradient)(arrays)
    return {name: found[name] for name in wanted}


def _gradient_tangents(arrays: Arrays, wanted: Sequence[str], options: AttentionOptions) -> Arrays:
    """The derivatives [D, ...] of gradients. `arrays` also has tout, tlse and the tangents that are not zero."""
    arrays, options = _not_in_planes(arrays, options)
    found = {}
    if set(wanted) & {*"qkv", "scale_factor"}:
        found |= zip(_names_of_backward(arrays), _bind(_backward_tangent_p, arrays, options), strict=True)
    if set(wanted) & set(BIASES):
        found[_bias_of(arrays)] = _bind(_backward_bias_tangent_p, arrays, options)[0]
    if "sinks" in wanted:
        found["sinks"] = _of_any_ranks(_sinks_gradient_tangent)(arrays)
    return {name: found[name] for name in wanted}


def _tangents(arrays: Arrays, options: AttentionOptions) -> Arrays:
    """The derivatives tout and tlse [D, ...] in the directions tq, tk, ... of `arrays`."""
    arrays, options = _not_in_planes(arrays, options)
    return dict(zip(("tout", "tlse"), _bind(_tangent_p, arrays, options), strict=True))


def _not_in_planes(arrays: Arrays, options: AttentionOptions) -> tuple[Arrays, AttentionOptions]:
    """The same with out and lse by the kernels whose scores those of tangents and second derivatives recompute."""
    if not options.in_planes:
        return arrays, options
    options = dataclasses.replace(options, in_planes=False)
    return arrays | residuals(arrays, options), options


def _bind(primitive: Primitive, arrays: Arrays, options: AttentionOptions) -> list[jax.Array]:
    named = {name: arrays[name] for name in _ARGUMENTS[primitive] if name in arrays}
    return primitive.bind(*named.values(), names=tuple(named), options=options)


def _of_any_ranks(function: Callable) -> Callable:
    """The function, which may broadcast arrays [B, ...] against [D, B, ...] whatever the user's configuration."""

    @functools.wraps(function)
    def run(*args):
        with jax.numpy_rank_promotion("allow"):
            return function(*args)

    return run


def _names_of_backward(names: Any) -> tuple[str, ...]:
    """What the primitive `backward` gives the gradients of."""
    return (*"qkv", *(name for name in ("scale_factor",) if name in names))


def _bias_of(names: Any) -> str:
    return next(name for name in BIASES if name in names)


def _names_of_both(names: Any) -> tuple[str, ...]:
    return (*_names_of_backward(names), _bias_of(names))


def _has_16_bit_pairs(arrays: Arrays) -> bool:
    """Whether there is a bias of each pair, in 16 bits as the queries: a kernel may compute all gradients at once."""
    if "bias" not in arrays:
        return False
    q, k, bias = (arrays[name] for name in ("q", "k", "bias"))
    has_pairs = bias.shape[-2:] == (q.shape[-3], k.shape[-3])
    return has_pairs and q.dtype.itemsize == 2 and bias.dtype == q.dtype


# ---- What the primitives compute, by passes -----------------------------------------------------------------


def _compute_forward(arrays: Arrays, options: AttentionOptions):
    return _primitives.forward(*_inputs_and_operands(arrays), options)


def _compute_forward_with_factor(arrays: Arrays, options: AttentionOptions):
    return _primitives.forward_with_factor(*_inputs_and_operands(arrays), options)


def _inputs_and_operands(arrays: Arrays):
    return *(arrays[name] for name in "qkv"), _without(arrays, lambda name: name in tuple("qkv"))


def _compute_tangent(arrays: Arrays, options: AttentionOptions):
    if "tsinks" not in arrays:
        return _tangent_of_keys(arrays, options)
    if any(is_directed(name) for name in arrays.keys() - {"tsinks"}):
        tout, tlse = _tangent_of_keys(arrays, options)
    else:  # no logit of a key moves
        tout, tlse = (jnp.zeros((), arrays[name].dtype) for name in _RESULTS)
    return _add_to_lse(tout, tlse, _sinks_share(arrays) * arrays["tsinks"][..., None, :], arrays)


def _tangent_of_keys(arrays: Arrays, options: AttentionOptions):
    tout, tlse = _primitives.tangent(arrays, options)
    return _times_p_factor(tout, "out", arrays), _times_p_factor(tlse, "lse", arrays)


def _compute_second_tangent(arrays: Arrays, options: AttentionOptions):
    tuout, tulse = _primitives.second_tangent(arrays, options)
    if "sinks" not in arrays:
        return tuout, tulse
    tsinks, usinks, tusinks = (
        arrays[name][..., None, :] if name in arrays else 0 for name in ("tsinks", "usinks", "tusinks")
    )
    second = (tsinks - arrays["tlse"]) * (usinks - arrays["ulse"]) + tusinks
    return _add_to_lse(tuout, tulse, _sinks_share(arrays) * second, arrays)


def _times_p_factor(x: jax.Array, name: str, arrays: Arrays) -> jax.Array:
    """A tangent or cotangent of the result `name`, times p_factor: tangents are linear in a row's probabilities."""
    if _P_FACTOR not in arrays:
        return x
    return x * (arrays[_P_FACTOR] if name == "lse" else arrays[_P_FACTOR][..., None])


def _corrected(arrays: Arrays) -> Arrays:
    """The arguments of a gradient, which is the transpose of a tangent, with p_factor as part of the cotangents."""
    return arrays | {
        f"d{name}": _times_p_factor(arrays[f"d{name}"], name, arrays)
        for name in _RESULTS
        if f"d{name}" in arrays
    }


def _compute_backward(arrays: Arrays, options: AttentionOptions):
    dq, dk, dv = _primitives.backward(_corrected(arrays), options)
    return _with_scale_factor(dq, dk, dv, arrays)


def _with_scale_factor(dq: jax.Array, dk: jax.Array, dv: jax.Array, arrays: Arrays) -> tuple[jax.Array, ...]:
    """The gradients of `_names_of_backward` from those of the pass, which knows no scale_factor."""
    if "scale_factor" not in arrays:
        return dq, dk, dv
    factor = arrays["scale_factor"]
    dscale = _dot(_zero_beyond_lengths(arrays["q"], arrays), dq, factor.dtype)
    return _times_factor(dq, factor), _times_factor(dk, factor), dv, dscale


def _compute_backward_bias(arrays: Arrays, options: AttentionOptions):
    sums = _primitives.backward_bias(_corrected(arrays), options)
    return (_sum_to_bias(sums, arrays),)


def _compute_backward_with_bias(arrays: Arrays, options: AttentionOptions):
    *of_backward, sums = _primitives.backward_with_bias(arrays, options)  # of 16 bits: without p_factor
    return *_with_scale_factor(*of_backward, arrays), _sum_to_bias(sums, arrays)


def _compute_backward_tangent(arrays: Arrays, options: AttentionOptions):
    tdq, tdk, tdv = _primitives.backward_tangent(arrays, options)
    if "scale_factor" not in arrays:
        return tdq, tdk, tdv
    factor, tfactor = arrays["scale_factor"], arrays.get("tscale_factor")
    of_backward = {name: arrays[name] for name in _OF_BACKWARD if name in arrays}
    dq, dk, _ = _primitives.backward(of_backward, options)
    tdscale = _dot(_zero_beyond_lengths(arrays["q"], arrays), tdq, factor.dtype)
    if "tq" in arrays:
        tdscale += _dot(_zero_beyond_lengths(arrays["tq"], arrays), dq, factor.dtype)
    tdq, tdk = _times_factor(tdq, factor), _times_factor(tdk, factor)
    if tfactor is not None:
        tdq, tdk = tdq + _times_factor(dq, tfactor), tdk + _times_factor(dk, tfactor)
    return tdq, tdk, tdv, tdscale


def _compute_backward_bias_tangent(arrays: Arrays, options: AttentionOptions):
    sums = _primitives.backward_bias_tangent(arrays, options)
    return (_sum_to_bias(sums, arrays),)


def _compute_backward_with_bias_tangent(arrays: Arrays, options: AttentionOptions):
    return (
        *_compute_backward_tangent(arrays, options),
        *_compute_backward_bias_tangent(arrays, options),
    )


def _sum_to_bias(sums: jax.Array, arrays: Arrays) -> jax.Array:
    """`sums` [..., B, N, T, S], summed to the shape of the bias: its broadcast dimensions, and the axes slopes lack."""
    if "bias" not in arrays:
        return jnp.sum(sums, (-2, -1))
    bias = arrays["bias"]
    axes = [axis for axis in range(-4, 0) if sums.shape[axis] != bias.shape[axis]]
    return jnp.sum(sums, axes, keepdims=True).astype(bias.dtype)


def _times_factor(x: jax.Array, factor: jax.Array) -> jax.Array:
    """A gradient [..., T, N, H] times the factor [...] of the scale, in its dtype."""
    factor = _sharding.with_batch_like(factor, x)[..., None, None, None]
    return (factor * x.astype(factor.dtype)).astype(x.dtype)


def _dot(x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """The product [...] of arrays [..., T, N, H]."""
    return jnp.sum(x.astype(dtype) * y.astype(dtype), (-3, -2, -1))


def _zero_beyond_lengths(x: jax.Array, arrays: Arrays) -> jax.Array:
    """Sets the rows of x [..., T, N, H] beyond the lengths to 0: they may hold anything."""
    if "query_seq_lengths" not in arrays:
        return x
    exists = jnp.arange(x.shape[-3], dtype=jnp.int32) < arrays["query_seq_lengths"][..., None]
    return jnp.where(exists[..., None, None], x, 0)


# ---- Sinks ------------------------------------------------------------------------------------------------


def _sinks_share(arrays: Arrays) -> jax.Array:
    """The probabilities [..., T, N] of the sinks."""
    lse = arrays["lse"]
    # lse is -inf in a fully masked row whose sink is -inf. NaN and +inf come from a sink, and derivatives show them.
    return jnp.exp(jnp.where(lse == -jnp.inf, -jnp.inf, arrays["sinks"][..., None, :] - lse))


def _add_to_lse(
    tout: jax.Array, tlse: jax.Array, more: jax.Array, arrays: Arrays
) -> tuple[jax.Array, jax.Array]:
    """The derivatives of out and lse if that of lse is larger, while the logits of the keys move as they did."""
    out = arrays["out"].astype(tlse.dtype)
    return (tout.astype(tlse.dtype) - more[..., None] * out).astype(tout.dtype), tlse + more


def _sinks_gradient(arrays: Arrays) -> jax.Array:
    """The gradient [..., N] of the sinks: that of a logit, p (dp - delta), with dp = 0, since a sink has no value."""
    return _minus_sum_of_rows(_sinks_share(arrays) * _delta(arrays), arrays)


def _sinks_gradient_tangent(arrays: Arrays) -> jax.Array:
    """The derivative [D, ..., N] of the gradient of the sinks."""
    moved = (arrays["tsinks"][..., None, :] if "tsinks" in arrays else 0) - arrays["tlse"]
    moved = moved * _delta(arrays) + _delta_tangent(arrays)
    return _minus_sum_of_rows(_sinks_share(arrays) * moved, arrays)


def _minus_sum_of_rows(x: jax.Array, arrays: Arrays) -> jax.Array:
    return -jnp.sum(jnp.where(arrays["lse"] == -jnp.inf, 0, x), -2)


def _delta(arrays: Arrays) -> jax.Array:
    """The sum [..., T, N] of dout out over a row, minus dlse."""
    delta = _dot_of_rows("dout", "out", arrays)
    return delta - arrays["dlse"] if "dlse" in arrays else delta


def _delta_tangent(arrays: Arrays) -> jax.Array:
    tdelta = _dot_of_rows("dout", "tout", arrays)
    if "tdout" in arrays:
        tdelta += _dot_of_rows("tdout", "out", arrays)
    return tdelta - arrays["tdlse"] if "tdlse" in arrays else tdelta


def _dot_of_rows(cotangent: str, name: str, arrays: Arrays) -> jax.Array:
    dtype = arrays["lse"].dtype
    x = _zero_beyond_lengths(arrays[cotangent], arrays)
    return jnp.sum(x.astype(dtype) * arrays[name].astype(dtype), -1)


# ---- Types ------------------------------------------------------------------------------------------------


def _forward_avals(arrays):
    return _primitives.forward_avals(*(arrays[name] for name in "qkv"))


def _forward_with_factor_avals(arrays):
    return _primitives.forward_with_factor_avals(*(arrays[name] for name in "qkv"))


def _tangent_avals(arrays):
    return tuple(_primitives.with_directions(arrays[name], _directions(arrays)) for name in _RESULTS)


def _backward_avals(arrays):
    return tuple(arrays[name].update(weak_type=False) for name in _names_of_backward(arrays))


def _backward_bias_avals(arrays):
    name = _bias_of(arrays)
    x, q = arrays[name], arrays["q"]
    if name == "bias":  # its batch axes may be broadcast; only the last of them is summed over
        shape, spec = (*q.shape[:-4], *x.shape[-4:]), (*q.sharding.spec[:-4], *x.sharding.spec[-4:])
        x = x.update(shape=shape, sharding=x.sharding.update(spec=jax.sharding.PartitionSpec(*spec)))
    return (x.update(weak_type=False),)


def _backward_with_bias_avals(arrays):
    return *_backward_avals(arrays), *_backward_bias_avals(arrays)


def _with_directions(avals: Callable) -> Callable:
    def directed(arrays):
        return tuple(_primitives.with_directions(x, _directions(arrays)) for x in avals(arrays))

    return directed


def _directions(arrays: Any) -> Any:
    return next(x.shape[0] for name, x in arrays.items() if is_directed(name))


# ---- Forward mode -----------------------------------------------------------------------------------------


def _moving(names: Sequence[str], primals: Sequence, tangents: Sequence) -> tuple[Arrays, Arrays]:
    """The arguments, and the tangents of those that move."""
    differentiable = (*DIFFERENTIABLE, *_RESULTS, *_COTANGENTS)
    moving = {
        name: t
        for name, t in zip(names, tangents, strict=True)
        if type(t) is not ad.Zero and (name in differentiable or is_directed(name))
    }
    return dict(zip(names, primals, strict=True)), moving


def _named(prefix: str, arrays: Arrays, names: Sequence[str] = DIFFERENTIABLE) -> Arrays:
    """Those of the arrays, with a prefix to their names."""
    return {prefix + name: arrays[name] for name in names if name in arrays}


def _without(arrays: Arrays, is_dropped: Callable[[str], bool]) -> Arrays:
    return {name: x for name, x in arrays.items() if not is_dropped(name)}


def _as_directions(arrays: Arrays, directions: Any = 1) -> Arrays:
    """The arrays as so many equal directions."""
    return {
        name: jnp.expand_dims(x, 0) if directions == 1 else jax.lax.broadcast(x, (directions,))
        for name, x in arrays.items()
    }


def _forward_jvp(primals, tangents, *, names, options):
    found, moved = _linearized(names, primals, tangents, options)
    return [found[name] for name in _RESULTS], moved


def _forward_with_factor_jvp(primals, tangents, *, names, options):
    found, moved = _linearized(names, primals, tangents, options)
    return [*found.values()], [*moved, ad.Zero(jax.typeof(found[_P_FACTOR]))]


def _linearized(names, primals, tangents, options) -> tuple[Arrays, list[jax.Array]]:
    """The results of the forward pass, and the tangents of out and lse."""
    arrays, moving = _moving(names, primals, tangents)
    found = named_residuals(arrays, options)
    moved = _tangents(arrays | found | _as_directions(_named("t", moving)), options)
    return found, [x[0] for x in moved.values()]


def _result_tangents(arrays: Arrays, moving: Arrays, options: AttentionOptions) -> Arrays:
    """The tangents tout and tlse [1, ...] of the arguments out and lse, which move with the other arguments."""
    if all(name in moving for name in _RESULTS):
        return _as_directions(_named("t", moving, _RESULTS))
    return _tangents(arrays | _as_directions(_named("t", moving)), options)


def _tangent_jvp(primals, tangents, *, names, options):
    arrays, moving = _moving(names, primals, tangents)
    tout, tlse = results = _bind(_tangent_p, arrays, options)
    of_tangents = {name: x for name, x in moving.items() if is_directed(name)}
    if not set(moving) & set(DIFFERENTIABLE):
        return results, _bind(_tangent_p, _without(arrays, is_directed) | of_tangents, options)
    directions = tlse.shape[0]
    direction = _as_directions(_named("u", moving), directions)
    ulse = _result_tangents(_without(arrays, is_directed), moving, options)["tlse"]
    ulse = jnp.broadcast_to(ulse, tlse.shape)
    arrays |= direction | dict(tout=tout, tlse=tlse, ulse=ulse)
    arrays |= {f"tu{name[1:]}": x for name, x in of_tangents.items()}
    return results, _bind(_second_tangent_p, arrays, options)


def _backward_jvp(primitive, tangent_primitive, primals, tangents, *, names, options):
    arrays, moving = _moving(names, primals, tangents)
    results = _bind(primitive, arrays, options)
    of_cotangents = {name: moving[name] for name in _COTANGENTS if name in moving}
    if not set(moving) & set(DIFFERENTIABLE):
        arrays = _without(arrays, lambda name: name in _COTANGENTS) | of_cotangents
        arrays.setdefault("dout", jnp.zeros_like(arrays["out"]))
        return results, _bind(primitive, arrays, options)
    arrays, options = _not_in_planes(arrays, options)
    arrays |= _result_tangents(arrays, moving, options)
    arrays |= _as_directions(_named("t", moving) | _named("t", of_cotangents, _COTANGENTS))
    return results, [x[0] for x in _bind(tangent_primitive, arrays, options)]


def _second_jvp(primitive, is_linear, primals, tangents, *, names, options):
    """A derivative of second order is linear in its directions, and is not differentiated by the rest."""
    arrays, moving = _moving(names, primals, tangents)
    results = _bind(primitive, arrays, options)
    if not all(map(is_linear, moving)):
        _checks.refuse_third_derivative()
    zeros = {name: jnp.zeros_like(arrays[name]) for name in ("tout", "tlse", "ulse") if name in arrays}
    moved = _without(arrays, is_linear) | _without(zeros, lambda name: not is_linear(name)) | moving
    return results, _bind(primitive, moved, options)


# ---- Reverse mode: each rule transposes a primitive in its directions or cotangents ---------------------------


def _transposed(rule: Callable) -> Callable:
    """A rule of JAX's from one that gives cotangents by name, of the arguments that it is asked for."""

    def transpose(cotangents, *args, names, options):
        named = dict(zip(names, args, strict=True))
        wanted = {name: x.aval for name, x in named.items() if ad.is_undefined_primal(x)}
        known = _without(named, lambda name: name in wanted)
        is_zero = all(type(x) is ad.Zero for x in cotangents)
        found = {} if is_zero else rule(cotangents, known, wanted, options)
        return [
            None
            if name not in wanted
            else _sum_to(found[name], wanted[name])
            if name in found
            else ad.Zero(wanted[name])
            for name in names
        ]

    return transpose


def _sum_to(x: jax.Array, aval: Any) -> jax.Array:
    axes = [axis for axis, size in enumerate(aval.shape) if size != x.shape[axis]]
    return jnp.sum(x, axes, keepdims=True) if axes else x


def _cotangents(cotangents: Sequence, arrays: Arrays, directions: Any) -> Arrays:
    """Cotangents [D, ...] of out and lse by name, without a zero one of lse."""
    dout, dlse = cotangents
    if type(dout) is ad.Zero:
        dout = jax.lax.broadcast(jnp.zeros_like(arrays["out"]), (directions,))
    return {"dout": dout} | ({} if type(dlse) is ad.Zero else {"dlse": dlse})


def _for_each_direction(f: Callable[[Arrays], Arrays], arrays: Arrays) -> Arrays:
    """Maps f over the first axis."""
    if next(iter(arrays.values())).shape[0] != 1:
        return jax.vmap(f)(arrays)
    return _as_directions(f({name: x[0] for name, x in arrays.items()}))


def _starting_with(prefix: str, names: Iterable[str]) -> list[str]:
    """What is differentiable and has, with this prefix, one of the names."""
    return [name for name in DIFFERENTIABLE if prefix + name in names]


def _transpose_tangent(cotangents, known, wanted, options):
    names = _starting_with("t", wanted)
    c = _cotangents(cotangents, known, _directions(wanted))
    return _named("t", _for_each_direction(lambda c: gradients(known | c, names, options), c))


def _transpose_backward(names_of_results, cotangents, known, wanted, options):
    u = {
        f"t{name}": jnp.expand_dims(x, 0)
        for name, x in zip(names_of_results(known), cotangents, strict=True)
        if type(x) is not ad.Zero
    }
    found = _tangents(known | u, options)
    return {"dout": found["tout"][0], "dlse": found["tlse"][0]}


def _transpose_second_tangent(cotangents, known, wanted, options):
    by_u, by_tu = _starting_with("u", wanted), _starting_with("tu", wanted)
    point = _without(known, is_directed)
    c = _cotangents(cotangents, known, known["tlse"].shape[0])
    t = {name: x for name, x in known.items() if _is_of_t(name)}

    def transpose(arrays: Arrays) -> Arrays:
        at = point | _without(arrays, is_directed)
        t = _as_directions(_without(arrays, lambda name: not is_directed(name)))
        first, second = gradients(at, by_tu, options), _gradient_tangents(at | t, by_u, options)
        return _named("tu", first) | {f"u{name}": x[0] for name, x in second.items()}

    return _for_each_direction(transpose, c | t)


def _transpose_backward_tangent(names_of_results, cotangents, known, wanted, options):
    u = {
        f"t{name}": x
        for name, x in zip(names_of_results(known), cotangents, strict=True)
        if type(x) is not ad.Zero
    }
    point = _without(known, is_directed)
    moved = _tangents(point | u, options)
    second = _gradient_tangents(point | u | moved, _starting_with("t", wanted), options)
    return _named("t", second) | {"tdout": moved["tout"], "tdlse": moved["tlse"]}


# ---- Batching ---------------------------------------------------------------------------------------------


def _batch(primitive: Primitive, args: Sequence, dims: Sequence, *, names: tuple[str, ...], options: Any):
    """Adds an axis of directions if only tangents are mapped, and else a batch axis."""
    size = next(x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None)
    mapped = {name for name, dim in zip(names, dims, strict=True) if dim is not None}
    args = {
        name: x if dim is None else jnp.moveaxis(x, dim, 0)
        for name, x, dim in zip(names, args, dims, strict=True)
    }
    if all(map(is_directed, mapped)):
        directions = next(
            x.shape[1 if name in mapped else 0] for name, x in args.items() if is_directed(name)
        )

        def merged(name: str, x: jax.Array) -> jax.Array:
            if not is_directed(name):
                return x
            x = x if name in mapped else jax.lax.broadcast(x, (size,))
            return x.reshape(size * directions, *x.shape[2:])

        results = _bind(primitive, {name: merged(name, x) for name, x in args.items()}, options)
        return [x.reshape(size, directions, *x.shape[1:]) for x in results], [0] * len(results)

    def with_batch_axis(name: str, x: jax.Array) -> jax.Array:
        if name not in mapped:
            x = jax.lax.broadcast(x, (1 if is_broadcastable(name) else size,))
        return jnp.swapaxes(x, 0, 1) if is_directed(name) else x

    results = _bind(primitive, {name: with_batch_axis(name, x) for name, x in args.items()}, options)
    return results, [1 if any(map(is_directed, names)) else 0] * len(results)


# ---- Definition -------------------------------------------------------------------------------------------


def _define(name: str, arguments: Sequence[str], avals: Callable, compute: Callable) -> Primitive:
    def named(function: Callable) -> Callable:
        function = _of_any_ranks(function)
        return lambda *args, names, options: function(dict(zip(names, args, strict=True)), options)

    primitive = _primitives.define(f"jax_flash_{name}", named(lambda arrays, options: avals(arrays)))
    _ARGUMENTS[primitive] = tuple(arguments)
    _partitioning.register_program(primitive, named(compute))
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    return primitive


def _is_of_t(name: str) -> bool:
    """Whether an argument of `second_tangent` belongs to its first direction."""
    return name in ("tout", "tlse", *(f"t{x}" for x in DIFFERENTIABLE))


_ARGUMENTS: dict[Primitive, tuple[str, ...]] = {}
_T, _U, _TU = (tuple(f"{direction}{name}" for name in DIFFERENTIABLE) for direction in ("t", "u", "tu"))
_OF_TANGENT = (*_PRIMALS, *_RESULTS, _P_FACTOR, *_T)
_OF_SECOND_TANGENT = (*_PRIMALS, *_RESULTS, *_T, "tout", "tlse", *_U, "ulse", *_TU)
_OF_BACKWARD = (*_PRIMALS, *_RESULTS, _P_FACTOR, *_COTANGENTS)
_OF_BACKWARD_TANGENT = (*_PRIMALS, *_RESULTS, *_COTANGENTS, *_T, "tout", "tlse", "tdout", "tdlse")

_forward_p = _define("forward", _PRIMALS, _forward_avals, _compute_forward)
_forward_with_factor_p = _define(
    "forward", _PRIMALS, _forward_with_factor_avals, _compute_forward_with_factor
)
_tangent_p = _define("tangent", _OF_TANGENT, _tangent_avals, _compute_tangent)
_second_tangent_p = _define("second_tangent", _OF_SECOND_TANGENT, _tangent_avals, _compute_second_tangent)
ad.primitive_jvps[_forward_p] = _forward_jvp
ad.primitive_jvps[_forward_with_factor_p] = _forward_with_factor_jvp
ad.primitive_jvps[_tangent_p] = _tangent_jvp
ad.primitive_transposes[_tangent_p] = _transposed(_transpose_tangent)
ad.primitive_jvps[_second_tangent_p] = functools.partial(
    _second_jvp, _second_tangent_p, lambda name: is_directed(name) and not _is_of_t(name)
)
ad.primitive_transposes[_second_tangent_p] = _transposed(_transpose_second_tangent)


def _define_backward(
    name: str, results: Callable, avals: Callable, compute: Callable, compute_tangent: Callable
):
    """A gradient and its derivative; `results` says what it is the gradient of."""
    backward = _define(name, _OF_BACKWARD, avals, compute)
    tangent = _define(f"{name}_tangent", _OF_BACKWARD_TANGENT, _with_directions(avals), compute_tangent)
    ad.primitive_jvps[backward] = functools.partial(_backward_jvp, backward, tangent)
    ad.primitive_transposes[backward] = _transposed(functools.partial(_transpose_backward, results))
    ad.primitive_jvps[tangent] = functools.partial(_second_jvp, tangent, is_directed)
    ad.primitive_transposes[tangent] = _transposed(functools.partial(_transpose_backward_tangent, results))
    return backward, tangent


_backward_p, _backward_tangent_p = _define_backward(
    "backward", _names_of_backward, _backward_avals, _compute_backward, _compute_backward_tangent
)
_backward_bias_p, _backward_bias_tangent_p = _define_backward(
    "backward_bias",
    lambda names: (_bias_of(names),),
    _backward_bias_avals,
    _compute_backward_bias,
    _compute_backward_bias_tangent,
)
_backward_with_bias_p, _backward_with_bias_tangent_p = _define_backward(
    "backward_with_bias",
    _names_of_both,
    _backward_with_bias_avals,
    _compute_backward_with_bias,
    _compute_backward_with_bias_tangent,
)


def _drop_unused(both: Primitive, backward: Primitive, backward_bias: Primitive) -> None:
    """Lets JAX drop one of the two passes of `both`, as it would if each were an equation."""

    def rule(used: Sequence[bool], *more: Any):
        eqn = more[-1]  # before it, newer versions of JAX have which inputs are alive
        *of_backward, of_bias = used
        if any(of_backward) and of_bias:
            return [True] * len(eqn.invars), eqn
        if not any(used):
            return [False] * len(eqn.invars), None
        primitive, outvars = (backward_bias, eqn.outvars[-1:]) if of_bias else (backward, eqn.outvars[:-1])
        return [True] * len(eqn.invars), eqn.replace(primitive=primitive, outvars=outvars)

    partial_eval.dce_rules[both] = rule


_drop_unused(_backward_with_bias_p, _backward_p, _backward_bias_p)
_drop_unused(_backward_with_bias_tangent_p, _backward_tangent_p, _backward_bias_tangent_p)
