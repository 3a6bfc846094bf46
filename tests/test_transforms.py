"""JAX's transformations: jit, grad, vmap, scan, checkpoint, sharding, export."""

import concurrent.futures
import functools
import itertools
import os
import re
import subprocess
import sys

import harness
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from closeness import assert_close
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from strategies import collectives

import jax_flash

attention = functools.partial(jax_flash.flash_attention, precision="highest", deterministic=True)
ALL = (0, 1, 2)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def qkv(*lead: int, t: int = 6, s: int = 9, n: int = 4, k: int = 2, h: int = 8) -> list[np.ndarray]:
    return [
        random(*lead, t, n, h, seed=1),
        random(*lead, s, k, h, seed=2),
        random(*lead, s, k, h, seed=3),
    ]


def loss(q, k, v, **options):
    """A scalar that depends on out and lse."""
    out, lse = attention(q, k, v, is_causal=True, return_residual=True, **options)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(lse))


def exact_loss(q, k, v, **options) -> tuple[float, list[np.ndarray]]:
    """The value of `loss` and its gradients, from the oracle."""
    out, lse = oracle.attention(q, k, v, is_causal=True, **options)[:2]
    result = oracle.attention(q, k, v, np.cos(out), -np.sin(lse), is_causal=True, **options)
    return np.sin(out).sum() + np.cos(lse).sum(), [result.dq, result.dk, result.dv]


def assert_gradients_close(got, want) -> None:
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        assert_close(a, b, "float32", num_keys=9, name=name)


# ---- jit, grad ------------------------------------------------------------------------------------------


def test_jit_gives_the_same_bits(platform):
    args = qkv(2)
    np.testing.assert_array_equal(jax.jit(attention)(*args), attention(*args))
    got, want = jax.jit(jax.grad(loss, ALL))(*args), jax.grad(loss, ALL)(*args)
    assert_gradients_close(got, want)


def test_value_and_grad(platform):
    args = qkv(2)
    value, gradients = jax.jit(jax.value_and_grad(loss, ALL))(*args)
    want_value, want = exact_loss(*args)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_gradients_close(gradients, want)


def test_python_and_numpy_ints_may_have_64_bits():
    """Loop counters and other ints that are traced, and NumPy's arrays: with jax_enable_x64 they have 64 bits."""
    q, k, v = qkv(2)

    def attend(offset, lengths):
        return jax_flash.flash_attention(
            q, k, v, is_causal=True, query_offset=offset, key_value_seq_lengths=lengths
        )

    def count(i, x):
        return x.at[i].set(attend(i, np.array([3, 5])))

    want = jnp.stack([attend(i, np.int32([3, 5])) for i in range(3)])
    with harness.x64("float64"):
        got = jax.lax.fori_loop(0, 3, count, jnp.zeros_like(want))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(attend(np.array([2, 2]), np.array([3, 5])), want[2])
        np.testing.assert_array_equal(jax.jit(lambda i: attend(i, np.array([3, 5])))(2), want[2])
        np.testing.assert_array_equal(
            jax.jit(lambda i: attend(i, np.array([3, 5])))(2**40), attend(9, np.int32([3, 5]))
        )
        with pytest.raises(TypeError, match="query_offset must be int32, got int64"):
            attend(jnp.array([2, 2]), np.array([3, 5]))
        with pytest.raises(ValueError, match="query_offset must fit in int32, got 4294967296"):
            attend(np.array([2, 2**32]), np.array([3, 5]))


@pytest.mark.parametrize("has_int64", [False, True], ids=["", "int64"])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_strict_promotion_of_dtypes(implementation, has_int64, platform):
    """JAX may be told to raise an error where it would promote a dtype."""
    names = ("query_seq_lengths", "key_value_seq_lengths", "query_offset")
    options = {name: np.int32([3, 6]) for name in names} | dict(sinks=random(4))

    def gradients(q, k, v, bias, scale):
        def f(q, k, v, bias, scale):
            call = functools.partial(jax_flash.flash_attention, is_causal=True, implementation=implementation)
            return call(q, k, v, bias, scale=scale, return_residual=True, **options)

        results, vjp = jax.vjp(f, q, k, v, bias, scale)
        return results, vjp(results)

    with harness.x64("float64" if has_int64 else "float32"):
        args = *(jnp.asarray(x, jnp.bfloat16) for x in qkv(2)), random(1, 4, 6, 9), np.float32(0.5)
        want = jax.jit(gradients)(*args)
        with jax.numpy_dtype_promotion("strict"):
            got = jax.jit(gradients)(*args)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("has_int64", [False, True], ids=["", "int64"])
@pytest.mark.parametrize("has_alibi", [False, True], ids=["bias", "alibi"])
def test_strict_promotion_of_dtypes_in_second_derivatives(has_alibi, has_int64, platform):
    names = ("query_seq_lengths", "key_value_seq_lengths", "query_offset")
    options = {name: np.int32([3, 6]) for name in names} | dict(local_window_size=3, forward_mode=True)

    def loss(q, k, v, bias):
        bias = jax_flash.Alibi(bias) if has_alibi else bias
        return jnp.sum(jnp.sin(attention(q, k, v, bias, **options)))

    def second(*args):
        gradient = jax.grad(loss, (*ALL, 3))
        along = jax.jvp(loss, args, args)[1]
        return jax.jvp(gradient, args, args), jax.jvp(lambda *x: jax.jvp(loss, x, args)[1], args, args), along

    with harness.x64("float64" if has_int64 else "float32"):
        args = *map(jnp.asarray, qkv(2)), random(4) if has_alibi else random(1, 4, 6, 9)
        want = jax.jit(second)(*args)
        with jax.numpy_dtype_promotion("strict"):
            got = jax.jit(second)(*args)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_ranks_are_not_promoted(implementation, platform):
    """JAX may be told to raise an error where it would add axes to an array."""
    names = ("query_seq_lengths", "key_value_seq_lengths", "query_offset")
    options = {name: np.int32([3, 6]) for name in names} | dict(
        dropout_rate=0.5, dropout_rng=jax.random.key(1)
    )

    def loss(q, bias, scale, sinks):
        k, v = qkv(2)[1:]
        call = functools.partial(jax_flash.flash_attention, is_causal=True, implementation=implementation)
        return jnp.sum(jnp.sin(call(q, k, v, bias, scale=scale, sinks=sinks, **options)))

    def hessian_vector_product(*args):
        return jax.jvp(jax.grad(loss, (0, 1, 2, 3)), args, args)

    slopes = random(4)
    for bias in (random(1, 1, 6, 1), jax_flash.Alibi(slopes)):
        args = qkv(2)[0], bias, jnp.float32(0.5), slopes
        with jax.numpy_rank_promotion("raise"):
            jax.jit(hessian_vector_product).lower(*args)


def test_same_array_three_times(platform):
    (x,) = qkv(2, n=2)[:1]
    got = jax.grad(lambda x: loss(x, x, x))(x)
    want = sum(exact_loss(x, x, x)[1])
    assert_close(got, want, "float32", num_keys=6)


def test_jacobian(platform):
    """One backward pass under a vmap over the cotangents only."""
    args = qkv(1, t=2, s=3, n=1, k=1, h=2)
    jacobian = jax.jacrev(attention, argnums=2)(*args)
    p = oracle.attention(*args[:2], np.eye(3)[None, :, None, :]).out[0, :, 0]  # probabilities [T, S]
    want = np.einsum("ts,hg->thsg", p, np.eye(2)).reshape(jacobian.shape)
    np.testing.assert_allclose(jacobian, want, atol=1e-6)


# ---- vmap -----------------------------------------------------------------------------------------------

SUBSETS = [subset for size in (1, 2, 3) for subset in itertools.combinations(range(3), size)]


def is_mapped(subset) -> list[bool]:
    return [i in subset for i in range(3)]


@pytest.mark.parametrize("n", quick.rows([1, 2, 3], quick=[2]))
@pytest.mark.parametrize("subset", SUBSETS, ids=lambda subset: "".join("qkv"[i] for i in subset))
def test_vmap_of_grad_and_grad_of_vmap(subset, n, platform):
    """With every subset of q, k, v mapped; the gradient of an unmapped operand is summed over the map."""
    mapped = is_mapped(subset)
    args = [a if m else b[0] for m, a, b in zip(mapped, qkv(n, 2), qkv(1, 2), strict=True)]
    in_axes = tuple(0 if m else None for m in mapped)
    rows = [exact_loss(*(x[i] if m else x for x, m in zip(args, mapped, strict=True))) for i in range(n)]

    values, each = jax.jit(jax.vmap(jax.value_and_grad(loss, ALL), in_axes))(*args)
    np.testing.assert_allclose(values, [value for value, _ in rows], rtol=1e-5)
    assert_gradients_close(each, [np.stack(x) for x in zip(*(g for _, g in rows), strict=True)])

    total = jax.jit(jax.grad(lambda *args: jax.vmap(loss, in_axes)(*args).sum(), ALL))(*args)
    want = [x if m else x.sum(0) for x, m in zip(map(np.asarray, each), mapped, strict=True)]
    assert_gradients_close(total, want)


@pytest.mark.parametrize("in_axes", [(0, 1, 2), (4, 3, 0), (2, None, -1), (None, 4, None)], ids=str)
@pytest.mark.parametrize("out_axes", quick.rows([0, 2, -1], quick=[0]))
def test_vmap_over_any_axis(in_axes, out_axes, platform):
    args = qkv(3, 2)
    moved = [x[0] if axis is None else np.moveaxis(x, 0, axis) for x, axis in zip(args, in_axes, strict=True)]
    got = jax.vmap(attention, in_axes, out_axes)(*moved)
    rows = [
        oracle.attention(*(x[0 if axis is None else i] for x, axis in zip(args, in_axes, strict=True))).out
        for i in range(3)
    ]
    assert_close(np.moveaxis(got, out_axes, 0), np.stack(rows), "float32", num_keys=9)


OPERANDS = {
    "query_seq_lengths": np.array([[6, 3], [0, 5], [2, 6]], np.int32),
    "key_value_seq_lengths": np.array([[9, 4], [7, 0], [1, 8]], np.int32),
    "query_offset": np.array([[0, 3], [-2, 1], [5, -1]], np.int32),
    "sinks": random(3, 4, seed=4),
    "mask": np.random.default_rng(5).random((3, 2, 4, 6, 9)) < 0.6,
    "segment_ids": tuple(
        np.random.default_rng(size).integers(-1, 2, (3, 2, size)).astype(np.int32) for size in (6, 9)
    ),
}


@pytest.mark.parametrize(
    "arrays_too", quick.rows({"operands": False, "operands and arrays": True}, quick=["operands and arrays"])
)
@pytest.mark.parametrize("names", [(name,) for name in OPERANDS] + [tuple(OPERANDS)], ids="+".join)
def test_vmap_over_operands(names, arrays_too, platform):
    operands = {name: OPERANDS[name] for name in names}
    args = qkv(3, 2) if arrays_too else [x[0] for x in qkv(3, 2)]
    axis = 0 if arrays_too else None

    def gradients(q, k, v, operands):
        return jax.value_and_grad(lambda *args: loss_of_rows(*args, **operands), ALL)(q, k, v)

    values, got = jax.jit(jax.vmap(gradients, (axis, axis, axis, 0)))(*args, operands)
    for i in range(3):
        row = [x[i] for x in args] if arrays_too else args
        options = jax.tree.map(lambda x, i=i: x[i], operands) | {"is_causal": True}
        out = oracle.attention(*row, **options).out
        want = oracle.attention(*row, np.cos(out), None, **options)
        np.testing.assert_allclose(values[i], np.sin(out).sum(), rtol=1e-5, atol=1e-5)
        assert_gradients_close([x[i] for x in got], want[2:])


@pytest.mark.parametrize(
    "shape",
    quick.rows(
        [(2, 4, 6, 9), (1, 4, 6, 9), (2, 1, 1, 9), (4, 6, 1), (6, 9), (9,)], quick=[(2, 1, 1, 9), (6, 9)]
    ),
)
@pytest.mark.parametrize("is_mapped", [False, True], ids=["one mask", "masks"])
def test_vmap_over_masks(is_mapped, shape, platform):
    """Masks of every form, beside mapped arrays."""
    args = qkv(3, 2)
    masks = np.random.default_rng(6).random((3, *shape)) < 0.6
    mask, axis = (masks, 0) if is_mapped else (masks[0], None)

    def gradients(q, k, v, mask):
        return jax.grad(lambda *args: loss_of_rows(*args, mask=mask), ALL)(q, k, v)

    got = jax.jit(jax.vmap(gradients, (0, 0, 0, axis)))(*args, mask)
    for i in range(3):
        _, want = exact_rows(*(x[i] for x in args), {"mask": masks[i if is_mapped else 0]})
        assert_gradients_close([x[i] for x in got], want)


@pytest.mark.parametrize("mapped", [(0, None), (None, 0), (None, None)], ids=["queries", "keys", "neither"])
def test_vmap_over_segments_of_one_side(mapped, platform):
    args = qkv(3, 2)
    ids = tuple(x if axis == 0 else x[0] for x, axis in zip(OPERANDS["segment_ids"], mapped, strict=True))

    def gradients(q, k, v, ids):
        return jax.grad(lambda *args: loss_of_rows(*args, segment_ids=ids), ALL)(q, k, v)

    got = jax.jit(jax.vmap(gradients, (0, 0, 0, mapped)))(*args, ids)
    for i in range(3):
        row = tuple(x[i] if axis == 0 else x for x, axis in zip(ids, mapped, strict=True))
        _, want = exact_rows(*(x[i] for x in args), {"segment_ids": row})
        assert_gradients_close([x[i] for x in got], want)


def loss_of_rows(q, k, v, **operands):
    return jnp.sum(jnp.sin(attention(q, k, v, is_causal=True, **operands)))


def test_vmap_over_a_scalar_offset(platform):
    args = qkv(2)
    offsets = jnp.arange(-2, 3, dtype=jnp.int32)
    got = jax.vmap(lambda offset: attention(*args, is_causal=True, query_offset=offset))(offsets)
    want = [oracle.attention(*args, is_causal=True, query_offset=int(offset)).out for offset in offsets]
    assert_close(got, np.stack(want), "float32", num_keys=9)


def test_nested_vmap(platform):
    q, k, v = qkv(2, 3, 2)
    k = k[:, 0]  # mapped by the outer vmap only
    inner = jax.vmap(jax.grad(loss, ALL), (0, None, 0))
    got = jax.jit(jax.vmap(inner))(q, k, v)
    want = [
        np.stack([np.stack([exact_loss(q[i, j], k[i], v[i, j])[1][x] for j in range(3)]) for i in range(2)])
        for x in range(3)
    ]
    assert_gradients_close(got, want)


def test_vmap_without_a_batch_axis(platform):
    """The mapped axis is the batch."""
    args = qkv(3)
    lengths = np.array([9, 2, 5], np.int32)
    got = jax.vmap(lambda q, k, v, s: attention(q, k, v, key_value_seq_lengths=s))(*args, lengths)
    want = attention(*args, key_value_seq_lengths=lengths)
    np.testing.assert_array_equal(got, want)


def test_vmap_over_nothing(platform):
    args = qkv(0, 2)
    assert jax.vmap(attention)(*args).shape == args[0].shape
    got = jax.vmap(jax.grad(loss, ALL))(*args)
    assert [x.shape for x in got] == [x.shape for x in args]


# ---- scan, checkpoint -----------------------------------------------------------------------------------


def test_scan_over_layers(platform):
    weights, x = 0.3 * random(3, 8, 8), random(2, 6, 4, 8, seed=1)

    def layer(x, w):
        return x + attention(x @ w, x, x, is_causal=True), None

    def scanned(weights, x):
        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0]))

    def unrolled(weights, x):
        for w in weights:
            x = layer(x, w)[0]
        return jnp.sum(jnp.sin(x))

    with jax.default_matmul_precision("highest"):
        got = jax.jit(jax.value_and_grad(scanned, (0, 1)))(weights, x)
        want = jax.jit(jax.value_and_grad(unrolled, (0, 1)))(weights, x)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


def test_scan_runs_a_kernel_once_a_layer(platform):
    """With arrays so large that XLA might let the kernel write into the stack of residuals."""
    weights, x = random(3, 64, 64), random(2, 128, 4, 64, seed=1)

    def layer(x, w):
        return x + attention(x @ w, x, x, is_causal=True), None

    gradient = jax.grad(lambda weights: jnp.sum(jax.lax.scan(layer, x, weights)[0]))
    text = jax.jit(gradient).lower(weights).compile().as_text()
    for call in ("jax_flash_forward", "jax_flash_backward"):
        assert text.count(f'custom_call_target="{call}"') == 1


def count_calls(f, *args, name: str) -> int:
    """The number of kernel calls in a function's program."""

    def count(jaxpr) -> int:
        return sum((eqn.primitive.name == name) + sum(map(count, inner(eqn))) for eqn in jaxpr.eqns)

    def inner(eqn):
        return [x for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=has_eqns) if has_eqns(x)]

    def has_eqns(x) -> bool:
        return hasattr(x, "eqns")

    return count(jax.make_jaxpr(f)(*args))


POLICIES = {
    "nothing": (jax.checkpoint_policies.nothing_saveable, 2),
    "out": (jax.checkpoint_policies.save_only_these_names("flash_attention_out"), 2),
    "out and lse": (
        jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse"),
        1,
    ),
    "everything": (jax.checkpoint_policies.everything_saveable, 1),
}


@pytest.mark.parametrize(("policy", "calls"), POLICIES.values(), ids=POLICIES.keys())
def test_checkpoint(policy, calls, platform):
    """If out and lse are saved by name, there is no second forward pass."""
    args = qkv(2)
    f = jax.value_and_grad(jax.checkpoint(lambda *args: loss(*(2 * x for x in args)), policy=policy), ALL)
    value, gradients = jax.jit(f)(*args)
    want_value, want = exact_loss(*(2 * x for x in args))
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    assert_gradients_close(gradients, [2 * x for x in want])
    assert count_calls(f, *args, name="jax_flash_forward") == calls
    assert count_calls(f, *args, name="jax_flash_backward") == 1


def test_gradient_of_nothing_runs_no_backward(platform):
    """An unused output costs no kernel."""
    args = qkv(2)
    f = jax.grad(lambda *args: jnp.sum(args[0]) + 0.0 * jnp.sum(jax.lax.stop_gradient(attention(*args))), ALL)
    text = jax.jit(f).lower(*args).compile().as_text()
    assert "jax_flash_backward" not in text


# ---- sharding -------------------------------------------------------------------------------------------

# Shardings of [batch, length, heads, dim] over eight devices.
MESHES = {
    "batch": ((8, 1), P("batch"), P("batch")),
    "heads": ((1, 8), P(None, None, "heads"), P(None, None, "heads")),
    "batch and heads": ((2, 4), P("batch", None, "heads"), P("batch", None, "heads")),
    "batch over both": ((2, 4), P(("batch", "heads")), P(("batch", "heads"))),
}


def mesh_of(shape: tuple[int, int]) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")).reshape(shape), ("batch", "heads"))


def lengths_of(batch: int) -> dict[str, np.ndarray]:
    return {
        "query_seq_lengths": np.arange(batch, dtype=np.int32),
        "key_value_seq_lengths": 1 + np.arange(batch, dtype=np.int32),
        "query_offset": np.arange(batch, dtype=np.int32) - 2,
    }


def value_and_gradients(q, k, v, operands):
    return jax.value_and_grad(lambda *args: loss_of_rows(*args, **operands), ALL)(q, k, v)


def exact_rows(q, k, v, operands):
    out = oracle.attention(q, k, v, is_causal=True, **operands).out
    return out, oracle.attention(q, k, v, np.cos(out), is_causal=True, **operands)[2:]


@pytest.mark.parametrize("operands", [False, True], ids=["", "lengths"])
@pytest.mark.parametrize(
    ("shape", "spec", "spec_kv"), quick.rows(MESHES, quick=["heads", "batch and heads"], unpack=True)
)
def test_sharded_jit_gathers_nothing(shape, spec, spec_kv, operands):
    mesh = mesh_of(shape)
    args = qkv(8, n=16, k=8)
    operands = lengths_of(8) if operands else {}
    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, (spec, spec_kv, spec_kv), strict=True)
    ]
    placed_operands = jax.device_put(operands, NamedSharding(mesh, P(*spec[:1])))
    out, want = exact_rows(*args, operands)

    forward = jax.jit(lambda q, k, v, operands: attention(q, k, v, is_causal=True, **operands))
    got = forward(*placed, placed_operands)
    assert_close(got, out, "float32", num_keys=9)
    assert got.sharding.is_equivalent_to(placed[0].sharding, 4)

    backward = jax.jit(value_and_gradients)
    value, gradients = backward(*placed, placed_operands)
    np.testing.assert_allclose(value, np.sin(out).sum(), rtol=1e-4, atol=1e-3)
    assert_gradients_close(gradients, want)
    for got, x in zip(gradients, placed, strict=True):
        assert got.sharding.is_equivalent_to(x.sharding, 4)

    for f in (forward, backward):
        text = f.lower(*placed, placed_operands).compile().as_text()
        assert "jax_flash_forward" in text
        for collective in ("all-gather", "all-to-all", "collective-permute"):
            assert collective not in text


# Axes of a mask.
MASKS = ["BNTS", "1NTS", "B1TS", "TS", "B11S", "NT1", "N11"]


@pytest.mark.parametrize("replicated", [False, True], ids=["sharded mask", "replicated mask"])
@pytest.mark.parametrize("axes", quick.rows(MASKS, quick=["BNTS", "B11S", "N11"]))
@pytest.mark.parametrize(
    ("shape", "spec", "spec_kv"), quick.rows(MESHES, quick=["batch and heads"], unpack=True)
)
def test_sharded_masks_and_segments_gather_nothing(shape, spec, spec_kv, axes, replicated):
    """Every device takes its part of a replicated mask or replicated ids."""
    mesh = mesh_of(shape)
    args = qkv(8, n=16, k=8)
    rng = np.random.default_rng(7)
    sizes = dict(zip("BNTS1", (8, 16, 6, 9, 1), strict=True))
    batch, heads = spec[0], spec[2] if len(spec) > 2 else None
    spec_mask = P(*({"B": batch, "N": heads}.get(axis) for axis in axes))
    operands = dict(
        mask=rng.random([sizes[axis] for axis in axes]) < 0.7,
        segment_ids=tuple(rng.integers(0, 2, (8, size)).astype(np.int32) for size in (6, 9)),
    )
    specs = dict(mask=spec_mask, segment_ids=P(batch))
    placed_operands = {
        name: jax.device_put(x, NamedSharding(mesh, P() if replicated else specs[name]))
        for name, x in operands.items()
    }
    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, (spec, spec_kv, spec_kv), strict=True)
    ]
    out, want = exact_rows(*args, operands)
    f = jax.jit(value_and_gradients)
    value, gradients = f(*placed, placed_operands)
    np.testing.assert_allclose(value, np.sin(out).sum(), rtol=1e-4, atol=1e-3)
    assert_gradients_close(gradients, want)
    for got, x in zip(gradients, placed, strict=True):
        assert got.sharding.is_equivalent_to(x.sharding, 4)
    text = f.lower(*placed, placed_operands).compile().as_text()
    assert "jax_flash_backward" in text
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@pytest.mark.parametrize(
    ("spec", "spec_kv"),
    [
        (P(None, None, "heads"), P()),
        (P("batch"), P()),
        (P(None, "batch"), P(None, "heads")),
        (P(None, None, None, "heads"), P(None, None, None, "heads")),
        (P("batch", None, "heads"), P(None, "heads")),
        (P(None, "batch"), P(None, None, "batch")),
    ],
    ids=["heads of q", "batch of q", "lengths", "head dim", "mixed", "rows and heads"],
)
def test_other_shardings_give_the_same(spec, spec_kv):
    mesh = mesh_of((2, 4))
    args = qkv(4, t=8, s=8, n=8, k=4)
    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, (spec, spec_kv, spec_kv), strict=True)
    ]
    out, want = exact_rows(*args, {})
    value, gradients = jax.jit(value_and_gradients)(*placed, {})
    np.testing.assert_allclose(value, np.sin(out).sum(), rtol=1e-4, atol=1e-3)
    assert_gradients_close(gradients, want)


# Partitions of the queries and of the keys.
QUERIES_OF_FEWER_AXES = {
    "heads of keys": (P(), P(None, None, ("batch", "heads"))),
    "batch of keys": (P(), P(("batch", "heads"))),
    "batch and heads of keys": (P(), P("batch", None, "heads")),
    "heads of keys beside a batch": (P("batch"), P("batch", None, "heads")),
    "heads of keys beside rows": (P(None, "batch"), P(None, None, "heads")),
}


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
@pytest.mark.parametrize(
    ("spec", "spec_kv"), QUERIES_OF_FEWER_AXES.values(), ids=QUERIES_OF_FEWER_AXES.keys()
)
def test_keys_are_not_gathered_for_whole_queries(spec, spec_kv, kind):
    """As in decoding with a cache that is sharded: each device takes its part of the queries."""
    devices = np.array(jax.devices("cpu")).reshape(2, 4)
    mesh = Mesh(devices, ("batch", "heads"), axis_types=(kind, kind))
    args = qkv(8, s=16, n=16, k=8)
    placed = [
        jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(args, (spec, spec_kv, spec_kv), strict=True)
    ]
    out, want = exact_rows(*args, {})
    f = jax.jit(value_and_gradients)
    value, gradients = f(*placed, {})
    np.testing.assert_allclose(value, np.sin(out).sum(), rtol=1e-4, atol=1e-3)
    assert_gradients_close(gradients, want)
    moved = collectives(f.lower(*placed, {}).compile().as_text())
    of_keys = {kind for kind, shape in moved if shape[-3:-2] == (16,)}
    assert of_keys <= {"all-reduce"}, moved  # of parts of gradients, where rows are sharded


def test_one_key_head_with_sharded_query_heads():
    mesh = mesh_of((1, 8))
    args = qkv(2, n=16, k=1)
    placed = [
        jax.device_put(x, NamedSharding(mesh, s))
        for x, s in zip(args, (P(None, None, "heads"), P(), P()), strict=True)
    ]
    out, want = exact_rows(*args, {})
    value, gradients = jax.jit(value_and_gradients)(*placed, {})
    np.testing.assert_allclose(value, np.sin(out).sum(), rtol=1e-4, atol=1e-3)
    assert_gradients_close(gradients, want)


def test_sharded_vmap_gathers_nothing():
    mesh = mesh_of((2, 4))
    args = qkv(2, 4, n=4, k=4)
    sharding = NamedSharding(mesh, P("batch", None, None, "heads"))
    placed = [jax.device_put(x, sharding) for x in args]
    f = jax.jit(jax.vmap(jax.grad(loss, ALL)))
    want = [exact_loss(*(x[i] for x in args))[1] for i in range(2)]
    assert_gradients_close(f(*placed), [np.stack(x) for x in zip(*want, strict=True)])
    assert "all-gather" not in f.lower(*placed).compile().as_text()


def explicit_mesh() -> Mesh:
    explicit = (jax.sharding.AxisType.Explicit,) * 2
    return Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("batch", "heads"), axis_types=explicit)


def test_explicit_sharding():
    """Shardings that are part of the arrays' types."""
    mesh = explicit_mesh()
    spec = P("batch", None, "heads", None)
    args = qkv(4, n=8, k=4)
    out, want = exact_rows(*args, {})
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
        got = jax.jit(functools.partial(attention, is_causal=True))(*placed)
        assert jax.typeof(got).sharding.spec == spec
        gradients = jax.jit(lambda *args: value_and_gradients(*args, {})[1])(*placed)
    assert_close(got, out, "float32", num_keys=9)
    assert_gradients_close(gradients, want)


@pytest.mark.parametrize(
    "spec", [P("batch"), P("batch", None, "heads"), P(("batch", "heads")), P(None, None, "heads")], ids=str
)
def test_shards_of_different_sizes(spec):
    """A sharding constraint inside jit may ask for them. XLA's padding must not reach any sum."""
    mesh = mesh_of((2, 4))
    args, bias = qkv(3, t=9, n=6, k=3), random(6, 9, 9, seed=4)
    shift = [random(*x.shape[1:], seed=5) for x in args]  # so that the padding is not 0

    def gradients(place, *args):
        def f(q, k, v, bias):
            q, k, v = (place(x) + more for x, more in zip((q, k, v), shift, strict=True))
            return loss(q, k, v, bias=bias)

        return jax.jit(jax.grad(f, (*ALL, 3)))(*args)

    got = gradients(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec)), *args, bias)
    for a, b in zip(got, gradients(lambda x: x, *args, bias), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "spec", "spec_kv"), quick.rows(MESHES, quick=["batch and heads"], unpack=True)
)
def test_shard_map(shape, spec, spec_kv):
    mesh = mesh_of(shape)
    args = qkv(8, n=16, k=8)
    operands = lengths_of(8)
    f = jax.shard_map(
        lambda q, k, v, operands: attention(q, k, v, is_causal=True, **operands),
        mesh=mesh,
        in_specs=(spec, spec_kv, spec_kv, P(*spec[:1])),
        out_specs=spec,
    )
    out, want = exact_rows(*args, operands)
    assert_close(jax.jit(f)(*args, operands), out, "float32", num_keys=9)
    gradients = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args, operands))), ALL))(*args)
    assert_gradients_close(gradients, want)


def test_shard_map_with_replicated_keys():
    """The gradient of a key that all devices read is summed over the devices."""
    mesh = mesh_of((8, 1))
    q, k, v = qkv(8)
    k, v = k[:1], v[:1]

    def local(q, k, v):
        return attention(q, jnp.broadcast_to(k, (q.shape[0], *k.shape[1:])), jnp.repeat(v, q.shape[0], 0))

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("batch"), P(), P()), out_specs=P("batch"))
    got = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), ALL))(q, k, v)
    args = q, np.repeat(k, 8, 0), np.repeat(v, 8, 0)
    want = oracle.attention(*args, np.cos(oracle.attention(*args).out))
    assert_gradients_close(got, [want.dq, want.dk.sum(0, keepdims=True), want.dv.sum(0, keepdims=True)])


@pytest.mark.parametrize("operands", quick.rows({"": False, "lengths, bias": True}, quick=[""]))
def test_eager_shard_map(operands):
    """shard_map without jit."""
    mesh = mesh_of((2, 4))
    args = qkv(2, n=8, k=4)
    bias = random(1, 8, 6, 9, seed=11) if operands else None
    spec = P("batch", None, "heads")

    def local(q, k, v, bias, lengths):
        return attention(q, k, v, bias, is_causal=True, **lengths)

    lengths = lengths_of(2) if operands else {}
    f = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, spec, spec, P(None, "heads"), P("batch")), out_specs=spec
    )
    out, want = exact_rows(*args, lengths | ({"bias": bias} if operands else {}))
    assert_close(f(*args, bias, lengths), out, "float32", num_keys=9)
    gradients = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args, bias, lengths))), ALL)(*args)
    assert_gradients_close(gradients, want)


# For each manual mesh axis: the specs of q, k and v in shard_map, and the sharding left to the compiler.
PARTLY_MANUAL = {
    "batch": (P("batch"), P(None, None, "heads")),
    "heads": (P(None, None, "heads"), P("batch")),
}


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("manual", PARTLY_MANUAL)
def test_shard_map_over_some_axes_gathers_nothing(manual, with_bias):
    """The compiler shards over the other mesh axes, as under jit."""
    mesh = mesh_of((2, 4))
    args = qkv(4, n=8, k=4)
    bias = random(1, 1, 6, 9, seed=12) if with_bias else None
    spec = P("batch", None, "heads")
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
    specs = PARTLY_MANUAL[manual][0]
    f = jax.shard_map(
        lambda q, k, v, bias: attention(q, k, v, bias, is_causal=True),
        mesh=mesh,
        in_specs=(specs, specs, specs, P()),
        out_specs=specs,
        axis_names={manual},
    )
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (*ALL, 3) if with_bias else ALL))
    options = dict(is_causal=True) | ({"bias": bias} if with_bias else {})
    forward = jax.jit(f)
    out = oracle.attention(*args, **options).out
    of_bias = {}
    want = oracle.attention(*args, np.cos(out), **options, gradients=of_bias)
    assert_close(forward(*placed, bias), out, "float32", num_keys=9)
    got = gradient(*placed, bias)
    assert_gradients_close(got[:3], want[2:])
    for x, like in zip(got, placed, strict=False):
        assert x.sharding.is_equivalent_to(like.sharding, 4)
    if with_bias:
        assert_close(got[3], of_bias["bias"], "float32", num_keys=4 * 8)
    for g in (forward, gradient):
        text = g.lower(*placed, bias).compile().as_text()
        assert "jax_flash_forward" in text
        for collective in ("all-gather", "all-to-all", "collective-permute"):
            assert collective not in text


REPLICATED = {
    "sinks": dict(sinks=random(8, seed=13)),
    "slopes": dict(bias=jax_flash.Alibi(np.abs(random(8, seed=14)))),
    "bias 1NTS": dict(bias=random(1, 8, 6, 9, seed=15)),
    "bias B11S": dict(bias=random(4, 1, 1, 9, seed=16)),
    "bias TS": dict(bias=random(6, 9, seed=17)),
    "bias NT1": dict(bias=random(8, 6, 1, seed=18)),
    "bias of all": dict(bias=random(4, 8, 6, 9, seed=19)),
    "scale": dict(scale=np.float32(0.3)),
}


@pytest.mark.parametrize(
    "spec",
    quick.rows(
        [P("batch"), P(None, None, "heads"), P("batch", None, "heads")], quick=[P("batch", None, "heads")]
    ),
)
@pytest.mark.parametrize("operands", REPLICATED.values(), ids=REPLICATED.keys())
def test_explicit_sharding_beside_replicated_operands(operands, spec):
    """Gradients have the types of their operands."""
    mesh = explicit_mesh()
    args = qkv(4, n=8, k=4)

    def gradients(operands, *args):
        return jax.grad(lambda operands: jnp.sum(jnp.sin(attention(*args, is_causal=True, **operands))))(
            operands
        )

    want = jax.jit(gradients)(operands, *args)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P(*spec, *(None,) * (4 - len(spec))))) for x in args]
        got = jax.jit(gradients)(jax.tree.map(jnp.asarray, operands), *placed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # Before 0.10, JAX does not require the gradient of a resharded array to have its type.
        assert not any(jax.typeof(x).sharding.spec) or jax.__version_info__ < (0, 10)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", quick.rows([None, "xla"], quick=[None]))
@pytest.mark.parametrize("operands", quick.rows(REPLICATED, quick=["slopes", "bias B11S", "scale"]))
def test_explicit_sharding_without_a_current_mesh(operands, implementation):
    """The arrays know their mesh."""
    args = qkv(4, n=8, k=4)

    def gradients(operands, *args):
        def total(operands, *args):
            call = functools.partial(attention, is_causal=True, implementation=implementation)
            return jnp.sum(jnp.sin(call(*args, **operands)))

        return jax.grad(total, (0, 1, 2, 3))(operands, *args)

    want = jax.jit(gradients)(operands, *args)
    sharding = NamedSharding(explicit_mesh(), P("batch", None, "heads", None))
    placed = [jax.device_put(x, sharding) for x in args]
    got = jax.jit(gradients)(operands, *placed)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    closed_over = jax.tree.map(jnp.asarray, operands)  # not traced beside the others
    compiled = jax.jit(lambda *args: attention(*args, implementation=implementation, **closed_over))(*placed)
    np.testing.assert_allclose(compiled, attention(*args, **operands), rtol=1e-5, atol=1e-5)
    eager = attention(*placed, implementation=implementation, **jax.tree.map(jnp.asarray, operands))
    np.testing.assert_allclose(eager, attention(*args, **operands), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "spec_kv", quick.rows([P(), P("batch"), P(None, None, "heads")], quick=[P(None, None, "heads")])
)
@pytest.mark.parametrize("operands", quick.rows(REPLICATED, quick=["sinks", "bias 1NTS", "scale"]))
def test_explicit_sharding_of_queries_and_keys_apart(operands, spec_kv):
    mesh = explicit_mesh()
    args = qkv(4, n=8, k=4)

    def gradients(operands, *args):
        def total(operands, *args):
            return jnp.sum(jnp.sin(attention(*args, is_causal=True, **operands)))

        return jax.grad(total, (0, 1, 2, 3))(operands, *args)

    want = jax.jit(gradients)(operands, *args)
    with jax.set_mesh(mesh):
        specs = P("batch"), spec_kv, spec_kv
        placed = [
            jax.device_put(x, NamedSharding(mesh, P(*spec, *(None,) * (4 - len(spec)))))
            for x, spec in zip(args, specs, strict=True)
        ]
        got = jax.jit(gradients)(jax.tree.map(jnp.asarray, operands), *placed)
        for x, y in zip(got[1:], placed, strict=True):
            assert jax.typeof(x) == jax.typeof(y) or jax.__version_info__ < (0, 10)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_sharded_programs_can_be_lowered_at_the_same_time():
    mesh = mesh_of((2, 4))
    x = jax.device_put(random(4, 6, 8, 8), NamedSharding(mesh, P("batch", None, "heads")))

    def lower(seed):
        def f(x):
            for i in range(3):
                x = attention(x, x, x, scale=0.1 + i + 0.001 * seed)
            return x

        return jax.jit(f).lower(x).as_text()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            texts = list(pool.map(lower, range(24)))
    finally:
        sys.setswitchinterval(interval)
    names = [set(re.findall(r'backend_config = "([^"]*)"', text)) for text in texts]
    assert len(set.union(*names)) == 3 * 24
    assert all(name.startswith("jax_flash ") for name in set.union(*names))


CACHED = """
import sys, jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jax_flash
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("b", "h"))
x = np.random.default_rng(0).standard_normal((4, 16, 8, 8)).astype(np.float32)
x = jax.device_put(x, NamedSharding(mesh, P("b", None, "h")))
for is_causal in (False, True):
    @jax.jit
    def train(q):
        return jax.grad(lambda q: jax_flash.flash_attention(q, q, q, is_causal=is_causal).sum())(q)
    events.clear()
    result = np.asarray(train(x))
    print("hit" if "/jax/compilation_cache/cache_hits" in events else "miss", float(np.abs(result).sum()))
"""


def test_the_persistent_cache_knows_sharded_programs(tmp_path):
    """Across processes; the key includes what a program computes, not only its shapes."""

    def run():
        command = [sys.executable, "-c", CACHED, str(tmp_path)]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        lines = subprocess.check_output(command, env=environment, text=True).splitlines()
        return [line.split() for line in lines]

    (full, full_sum), (causal, causal_sum) = run()
    assert (full, causal) == ("miss", "miss")
    assert full_sum != causal_sum
    assert run() == [["hit", full_sum], ["hit", causal_sum]]


# ---- export ---------------------------------------------------------------------------------------------


EXPORTED = {
    "": {},
    "arrays": dict(
        mask=OPERANDS["mask"][0],
        segment_ids=jax.tree.map(lambda x: x[0], OPERANDS["segment_ids"]),
        bias=random(4, 6, 9, seed=8),
        sinks=OPERANDS["sinks"][0],
        dropout_rate=0.3,
        dropout_rng=jax.random.key(9),
    ),
    "slopes": dict(bias=jax_flash.Alibi(OPERANDS["sinks"][0])),
}


@pytest.mark.parametrize("operands", EXPORTED.values(), ids=EXPORTED.keys())
def test_export_round_trip(operands, platform):
    pytest.importorskip("flatbuffers", reason="jax.export writes flatbuffers, an optional dependency of jax")
    args = qkv(2)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_flash.ffi_targets()]
    f = jax.jit(lambda *args: attention(*args, is_causal=True, return_residual=True, **operands))
    exported = jax.export.export(f, platforms=[platform], disabled_checks=checks)(*args)
    restored = jax.export.deserialize(exported.serialize(vjp_order=1))
    for got, want in zip(restored.call(*args), f(*args), strict=True):
        np.testing.assert_array_equal(got, want)

    def loss_of(f):
        return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in f(*args))

    assert_gradients_close(jax.grad(loss_of(restored.call), ALL)(*args), jax.grad(loss_of(f), ALL)(*args))


SYMBOLIC = {
    "": dict(),
    "mask and bias": dict(mask=("b", "1", "t", "s"), bias=("4", "t", "s")),
    "row of a mask": dict(mask=("s",), bias=("1", "1", "t", "1")),
}


@pytest.mark.parametrize("is_mapped", quick.rows({"": False, "vmap": True}, quick=["vmap"]))
@pytest.mark.parametrize("operands", quick.rows(SYMBOLIC, quick=["mask and bias"]))
def test_export_of_symbolic_sizes(operands, is_mapped, platform):
    pytest.importorskip("flatbuffers", reason="jax.export writes flatbuffers, an optional dependency of jax")
    sizes = {"b": 2, "t": 6, "s": 9, "m": 3}
    scope = jax.export.SymbolicScope()
    symbols = dict(zip(sizes, jax.export.symbolic_shape("b, t, s, m", scope=scope), strict=True))
    names = {"q": ("b", "t", "4", "8"), "k": ("b", "s", "2", "8"), "v": ("b", "s", "2", "8")} | operands
    if is_mapped:
        names = {name: ("m", *shape) for name, shape in names.items()}
    platforms = [platform, "cuda"] if jax_flash.build_info()["cuda"] and platform == "cpu" else [platform]
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_flash.ffi_targets()]

    def dtype(name):
        return bool if name == "mask" else np.float32

    def f(arrays):
        def call(arrays):
            out = attention(
                *(arrays[name] for name in "qkv"), arrays.get("bias"), arrays.get("mask"), is_causal=True
            )
            return jnp.sum(jnp.sin(out))

        diff = {name: x for name, x in arrays.items() if name != "mask"}
        value = jax.value_and_grad(lambda diff: call(arrays | diff))
        return value(diff)

    f = jax.jit(jax.vmap(f) if is_mapped else f)
    shapes = {
        name: jax.ShapeDtypeStruct([symbols.get(x) or int(x) for x in shape], dtype(name))
        for name, shape in names.items()
    }
    exported = jax.export.export(f, platforms=platforms, disabled_checks=checks)(shapes)
    arrays = {
        name: (
            random(*(sizes.get(x) or int(x) for x in shape), seed=i) + 1 * (name == "mask") > 0
            if name == "mask"
            else random(*(sizes.get(x) or int(x) for x in shape), seed=i)
        )
        for i, (name, shape) in enumerate(names.items())
    }
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), exported.call(arrays), f(arrays)
    )


def test_a_symbolic_head_dim_is_refused():
    x = jax.ShapeDtypeStruct((1, 4, 2, *jax.export.symbolic_shape("h")), np.float32)
    with pytest.raises(ValueError, match=r"query must have a head dim that is a number"):
        jax.export.export(jax.jit(attention))(x, x, x)


@pytest.mark.parametrize("precision", ["default", "highest"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equal_calls_are_merged(dtype, precision, platform):
    """Also one whose result is differentiated with one whose is not: the same kernel computes both."""

    def f(x):
        out = jax_flash.flash_attention(x, x, x, precision=precision)
        return jnp.sum(out.astype(jnp.float32))

    x = jnp.ones((2, 70, 2, 64), dtype)
    text = jax.jit(lambda x: (jax.lax.stop_gradient(f(x)), jax.grad(f)(x))).lower(x).compile().as_text()
    assert len(re.findall('custom_call_target="jax_flash_forward(?:_emulated)?"', text)) == 1


BUILT_FOR_CUDA = pytest.mark.skipif(
    not jax_flash.build_info()["cuda"], reason="the library was built without CUDA"
)


@BUILT_FOR_CUDA
def test_export_for_both_platforms():
    """A program can be lowered for a GPU on a machine without one."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_flash.ffi_targets()]
    f = jax.jit(jax.grad(lambda q, k, v, bias: loss(q, k, v, bias=bias), (*ALL, 3)))
    args = (*qkv(2), random(1, 4, 6, 9))
    exported = jax.export.export(f, platforms=["cpu", "cuda"], disabled_checks=checks)(*args)
    text = exported.mlir_module()
    assert exported.platforms == ("cpu", "cuda")
    assert all(name in text for name in jax_flash.ffi_targets() if not name.endswith("tangent"))


def lower_for_cuda(f, head_dim, dtype=jnp.float32):
    x = jnp.zeros((1, 4, 1, head_dim), dtype)
    return jax.jit(f).trace(x, x, x).lower(lowering_platforms=("cuda",))


@BUILT_FOR_CUDA
def test_lowering_for_cuda_refuses_what_it_cannot_do(monkeypatch):
    """Lowering for a platform raises errors for its limits."""
    harness.set_local_gpus(monkeypatch)
    lower_for_cuda(attention, 256)
    with pytest.raises(NotImplementedError, match=r'257.*implementation="xla"'):
        lower_for_cuda(attention, 257)
    with harness.x64("float64"):
        lower_for_cuda(attention, 128, jnp.float64)
        with pytest.raises(NotImplementedError, match=r'128 in float64, got 129.*implementation="xla"'):
            lower_for_cuda(attention, 129, jnp.float64)


@BUILT_FOR_CUDA
def test_results_on_cuda_stand_behind_a_barrier():
    """Without the barrier XLA may run a kernel twice, once writing straight into the stack of a scan."""
    x, bias = jnp.zeros((1, 4, 1, 64), jnp.bfloat16), jnp.zeros((1, 4, 4))
    gradient = jax.grad(lambda q, k, v, bias: attention(q, k, v, bias).astype(jnp.float32).sum(), (*ALL, 3))
    text = jax.jit(gradient).trace(x, x, x, bias).lower(lowering_platforms=("cuda",)).as_text()
    targets = []
    for function in text.split("func.func"):  # each function has its own names
        for result, target in re.findall(
            r"(%\w+)(?::\d+)? = stablehlo.custom_call @jax_flash_(\w+)\(", function
        ):
            targets.append(target)
            users = [line for line in function.splitlines() if re.search(rf"= .*{result}\b", line)]
            assert users
            assert all("stablehlo.optimization_barrier" in line for line in users), users
    assert sorted(targets) == ["backward", "backward_bias", "forward"]


@BUILT_FOR_CUDA
@pytest.mark.parametrize(
    ("capability", "head_dim", "options", "rows"),
    [
        ("9.0", 64, {}, 112),
        ("9.0", 128, {}, 112),
        ("9.0", 64, dict(deterministic=True), 112),
        ("9.0", 64, dict(deterministic=True, mask=np.ones((100, 100), bool)), 0),
        ("9.0", 64, dict(deterministic=True, segment_ids=np.zeros((2, 100), np.int32)), 0),
        ("9.0", 128, dict(deterministic=True), 0),
        ("8.0", 64, {}, 112),
        ("8.0", 64, dict(deterministic=True), 0),
    ],
)
def test_workspace_of_gradients(capability, head_dim, options, rows, monkeypatch):
    """In 16 bits: two floats a row, rounded up to 128 rows, and a float32 copy of dq, rounded up to 16, or none.

    With as many key heads as query heads, none of dk and dv.
    """
    harness.set_local_gpus(monkeypatch, capability)
    gradient = jax.grad(lambda *x: attention(*x, **dict(deterministic=False) | options).sum())
    x = jnp.zeros((2, 100, 4, head_dim), jnp.bfloat16)
    text = jax.jit(gradient).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    (call,) = re.findall(r"custom_call @jax_flash_backward\(.*-> \((.*)\)", text)
    assert re.findall(r"tensor<([^>]*f32)>", call) == [
        "2x4x128xf32",
        "2x4x128xf32",
        f"2x{rows}x4x{head_dim}xf32",
        *[f"2x0x112x{head_dim}xf32"] * 2,
    ]


@BUILT_FOR_CUDA
def test_lowering_for_a_small_gpu_refuses_gradients_that_do_not_fit(monkeypatch):
    gradient = jax.grad(lambda *x: attention(*x).sum())
    harness.set_local_gpus(monkeypatch, "9.0", kind="a large GPU")
    lower_for_cuda(gradient, 256)
    harness.set_local_gpus(monkeypatch, "12.0", kind="a small GPU")
    lower_for_cuda(attention, 256)
    lower_for_cuda(gradient, 128)
    lower_for_cuda(gradient, 256, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=r'a small GPU.*up to 128, got 136.*implementation="xla"'):
        lower_for_cuda(gradient, 136)
    with harness.x64("float64"):
        lower_for_cuda(gradient, 64, jnp.float64)
        with pytest.raises(
            NotImplementedError, match=r"a small GPU.*float64 supports head dims up to 64, got 72"
        ):
            lower_for_cuda(gradient, 72, jnp.float64)


@BUILT_FOR_CUDA
def test_lowering_without_kernels_for_float64_names_the_option(monkeypatch):
    info = jax_flash.build_info()
    info["kernels"] = [name for name in info["kernels"] if " float64 " not in name]
    monkeypatch.setattr(jax_flash._ffi, "build_info", lambda: info)
    lower_for_cuda(attention, 64)
    with harness.x64("float64"), pytest.raises(NotImplementedError, match=r"JAX_FLASH_FLOAT64=ON.*\"xla\""):
        lower_for_cuda(attention, 64, jnp.float64)
