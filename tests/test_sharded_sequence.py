"""The sequence of the queries, sharded under jit: compared with exact results and with one device."""

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from harness import mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from strategies import OF_SEQUENCES, ROWS, collectives, put, run_jit

import jax_flash
from jax_flash import _head_exchange, _library, _on_shards
from jax_flash._options import AttentionOptions

WHOLE = P(None, None, None, None)

# ---- Every option -----------------------------------------------------------------------------------------------

# The cases take turns in the numbers of devices, the shardings of the keys and the dtypes.
_TURNS = (2, 0, 3, 1)  # of harness.KINDS
_EVERY_OPTION = {
    f"{case}-{number}-{'sharded' if spec == ROWS else 'whole'} keys": (case, number, spec, kind)
    for case, number, spec, kind in zip(
        OF_SEQUENCES,
        itertools.cycle((8, 4, 2)),
        itertools.cycle((ROWS, ROWS, ROWS, ROWS, WHOLE)),
        itertools.cycle(_TURNS),
        strict=False,
    )
}


@pytest.mark.parametrize(
    ("case", "number", "spec_kv", "kind"),
    quick.rows(
        _EVERY_OPTION,
        quick=[row for row in _EVERY_OPTION if row.split("-")[0] in ("causal", "everything at once")],
        unpack=True,
    ),
)
def test_every_option(case, number, spec_kv, kind, platform):
    case = harness.fitted(case, number)
    dtype, precision, rule = harness.kind(platform, kind)
    more = {} if precision is None else {"precision": precision}
    got, gradients = run_jit(case, dtype, mesh_of(number), spec_kv, **more)
    of_rows = ("out", "lse", "dq")
    if platform == "cpu":  # the same bits as on one device
        whole = harness.run(case, dtype, **more)
        for name in of_rows:
            np.testing.assert_array_equal(getattr(got, name), getattr(whole, name), err_msg=name)
    harness.check(got, case, dtype, rule, names=("dk", "dv") if platform == "cpu" else (*of_rows, "dk", "dv"))
    harness.check_operands(gradients, case, dtype, rule)


# ---- What moves -------------------------------------------------------------------------------------------------

# No other axis is as long as that of the queries or as a shard of it. The heads do not divide over the devices.
B, T, S, N, K, H, HV = 2, 64, 80, 6, 3, 8, 24
NUMBER = 4


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs() -> list[np.ndarray]:
    return [random(B, T, N, H, seed=1), random(B, S, K, H, seed=2), random(B, S, K, HV, seed=3)]


def assert_no_queries_move(moved: list[tuple[str, tuple[int, ...]]]) -> None:
    assert not [x for x in moved if {T, T // NUMBER} & {*x[1]}]


def assert_like_one_device(got: Any, want: Any, atol: float = 1e-4) -> None:
    """Out, lse and dq have the same bits; other gradients are sums in another order."""
    for name, x, y in zip(("out", "lse", "dq"), got, want, strict=False):
        np.testing.assert_array_equal(x, y, err_msg=name)
    for x, y in zip(jax.tree.leaves(got[3:]), jax.tree.leaves(want[3:]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol)


def attend(q, k, v, static, differentiable, **more):
    """Out and lse."""
    options = dict(precision="highest", deterministic=True, is_causal=True)
    return jax_flash.flash_attention(
        q, k, v, return_residual=True, **options | static | differentiable | more
    )


def with_gradients(static) -> Callable:
    """A function of q, k, v and what else is differentiated: out, lse and all gradients."""

    def results(*args):
        (out, lse), vjp = jax.vjp(lambda *args: attend(*args[:3], static, args[3]), *args)
        return out, lse, *vjp((jnp.cos(out), jnp.sin(jnp.where(lse == -jnp.inf, 0, lse))))

    return results


def loss(q, k, v, differentiable, static, **more):
    out, lse = attend(q, k, v, static, differentiable, **more)
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse == -jnp.inf, 0, lse)))


def mask(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).random(shape) < 0.7


def ids(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 2, (B, length)).astype(np.int32)


# Options without and with a gradient.
OPTIONS = {
    "": ({}, {}),
    "window, offsets": (dict(local_window_size=(9, 30), query_offset=np.int32([-5, 30])), {}),
    "lengths": (
        dict(query_seq_lengths=np.int32([50, 17]), key_value_seq_lengths=np.int32([33, 80]), is_causal=False),
        {},
    ),
    "segments": (dict(segment_ids=(ids(T), ids(S)), is_causal=False), {}),
    "mask BNTS": (dict(mask=mask(B, N, T, S)), {}),
    "mask T1": (dict(mask=mask(T, 1)), {}),
    "mask B11S": (dict(mask=mask(B, 1, 1, S)), {}),
    "bias 1NTS": ({}, dict(bias=random(1, N, T, S, seed=5))),
    "bias TS": ({}, dict(bias=random(T, S, seed=5))),
    "bias B1T1": ({}, dict(bias=random(B, 1, T, 1, seed=5))),
    "bias N1S": ({}, dict(bias=random(N, 1, S, seed=5))),
    "bias N11": ({}, dict(bias=random(N, 1, 1, seed=5))),
    "alibi": (dict(is_causal=False), dict(bias=jax_flash.Alibi(np.abs(random(N, seed=5))))),
    "sinks": ({}, dict(sinks=random(N, seed=5))),
    "scale": ({}, dict(scale=np.float32(0.3))),
    "dropout": (dict(dropout_rate=0.3, dropout_rng=np.uint32([1, 2])), {}),
}
AXIS_TYPES = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.mark.parametrize(
    ("options", "axis_type"),
    quick.in_turn(
        OPTIONS, AXIS_TYPES, quick=("", "lengths", "mask BNTS", "bias 1NTS", "bias N1S", "dropout")
    ),
)
@pytest.mark.parametrize("spec_kv", quick.rows({"sharded keys": ROWS, "whole keys": WHOLE}, ["sharded keys"]))
def test_no_queries_move(options, axis_type, spec_kv):
    """Keys and values are gathered once, and their gradients summed, or summed and scattered."""
    static, differentiable = options
    args = inputs()

    def results(q, k, v, differentiable):
        out, lse = attend(q, k, v, static, differentiable)
        return out, lse, *jax.grad(loss, (0, 1, 2, 3))(q, k, v, differentiable, static)

    want = jax.jit(results)(*args, differentiable)
    mesh = mesh_of(NUMBER, axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        placed = *put(mesh, ROWS, args[0]), *put(mesh, spec_kv, *args[1:])
        placed_differentiable = jax.tree.map(
            lambda x: put(mesh, P(*("sequence" if size == T else None for size in x.shape)), x)[0],
            differentiable,
        )
        compiled = jax.jit(results).lower(*placed, placed_differentiable).compile()
        got = compiled(*placed, placed_differentiable)

    assert_like_one_device(got, want, atol=1e-5)
    for x, like in zip(got, (placed[0], placed[0][..., 0], *placed), strict=False):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)

    moved = collectives(compiled.as_text())
    assert_no_queries_move(moved)
    of_keys = [x for x in moved if x[1][-2:] in ((K, H), (K, HV))]
    if spec_kv == WHOLE:
        assert sorted(of_keys) == [("all-reduce", (B, S, K, H)), ("all-reduce", (B, S, K, HV))]
    else:
        assert sorted(of_keys) == [
            ("all-gather", (B, S, K, H)),
            ("all-gather", (B, S, K, HV)),
            ("reduce-scatter", (B, S // NUMBER, K, H)),
            ("reduce-scatter", (B, S // NUMBER, K, HV)),
        ]


def of_forward_mode(f, *args):
    return jax.jvp(f, args, jax.tree.map(jnp.cos, args))


def of_a_gradient(f, *args):
    return jax.jvp(jax.grad(f, (0, 1, 2, 3)), args, jax.tree.map(jnp.cos, args))


def of_a_tangent(f, *args):
    def tangent(*args):
        return jax.jvp(f, args, jax.tree.map(jnp.cos, args))[1]

    return jax.grad(tangent, (0, 1, 2, 3))(*args)


DERIVATIVES = {"forward mode": of_forward_mode, "of a gradient": of_a_gradient, "of a tangent": of_a_tangent}
OF_DERIVATIVES = {
    "": OPTIONS[""],
    "everything": (
        OPTIONS["lengths"][0] | OPTIONS["mask T1"][0] | dict(is_causal=True),
        OPTIONS["bias B1T1"][1] | OPTIONS["sinks"][1] | OPTIONS["scale"][1],
    ),
    "bias N1S": OPTIONS["bias N1S"],
}


def moved_by(derivative: Callable, args: list[np.ndarray], static: dict, differentiable: dict) -> list:
    """What moves where the sequence is sharded in a derivative, which is compared with that of one device."""
    args = (*args, jax.tree.map(jnp.asarray, differentiable))
    f = jax.jit(functools.partial(derivative, functools.partial(loss, static=static, forward_mode=True)))
    placed = *put(mesh_of(NUMBER), ROWS, *args[:3]), args[3]
    compiled = f.lower(*placed).compile()
    for x, y in zip(jax.tree.leaves(compiled(*placed)), jax.tree.leaves(f(*args)), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    return collectives(compiled.as_text())


@pytest.mark.parametrize(
    ("options", "derivative"),
    quick.in_turn(OF_DERIVATIVES, DERIVATIVES, quick=("", "bias N1S")),
)
def test_no_queries_move_for_other_derivatives(options, derivative):
    assert_no_queries_move(moved_by(derivative, inputs(), *options))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["scan", "scan of checkpoint"])
def test_no_queries_move_in_layers(wrap):
    q, k, v = inputs()
    k, v = (np.stack([x, x + 1]) for x in (k, v[..., :H]))

    @jax.jit
    def f(q, k, v):
        def layer(x, keys):
            return x + attend(x, *keys, {}, {})[0], None

        return jnp.sum(jnp.sin(jax.lax.scan(wrap(layer), q, (k, v))[0]))

    gradient = jax.jit(jax.grad(f, (0, 1, 2)))
    mesh = mesh_of(NUMBER)
    placed = *put(mesh, ROWS, q), *put(mesh, P(None, *ROWS), k, v)
    compiled = gradient.lower(*placed).compile()
    for x, y in zip(compiled(*placed), gradient(q, k, v), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    assert_no_queries_move(collectives(compiled.as_text()))


def test_no_queries_move_beside_pages():
    q, pages = random(B, T, N, H, seed=1), random(2, 10, 16, K, H, seed=2)
    options = dict(
        page_indices=np.random.default_rng(3).permutation(10).astype(np.int32).reshape(B, 5),
        key_value_seq_lengths=np.int32([80, 61]),
        query_offset=np.int32([16, 9]),
    )
    f = jax.jit(functools.partial(jax_flash.flash_attention, is_causal=True, return_residual=True))
    (placed,) = put(mesh_of(NUMBER), ROWS, q)
    for x, y in zip(f(placed, *pages, **options), f(q, *pages, **options), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.sharding.is_equivalent_to(NamedSharding(placed.sharding.mesh, P(*ROWS[: x.ndim])), x.ndim)
    assert_no_queries_move(collectives(f.lower(placed, *pages, **options).compile().as_text()))


# ---- Divided by heads -------------------------------------------------------------------------------------------

# The heads of queries and of keys.
HEADS = {"two each": (8, 8), "one": (8, 4), "one for two devices": (8, 2), "one for all": (4, 1)}
HEAD_OPTIONS = {
    "": OPTIONS[""],
    "window, offsets": OPTIONS["window, offsets"],
    "lengths, segments": (OPTIONS["lengths"][0] | OPTIONS["segments"][0], {}),
    "mask B11S, bias N1S": (OPTIONS["mask B11S"][0], dict(bias=random(8, 1, S, seed=5))),
    "bias B111": ({}, dict(bias=random(B, 1, 1, 1, seed=5))),
    "alibi, sinks, scale": (
        {},
        dict(bias=jax_flash.Alibi(np.abs(random(8, seed=5))), sinks=random(8, seed=6), scale=np.float32(0.3)),
    ),
    "dropout": OPTIONS["dropout"],
}


def kinds_of_wide(moved: list[tuple[str, tuple[int, ...]]]) -> set[str]:
    """How queries, keys and arrays like them move."""
    return {kind for kind, shape in moved if len(shape) >= 4 and shape[-1] in (H, HV)}


def of_heads(num_heads: int, num_kv_heads: int) -> list[np.ndarray]:
    shapes = ((B, T, num_heads, H), (B, S, num_kv_heads, H), (B, S, num_kv_heads, HV))
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]


@pytest.mark.parametrize(
    ("heads", "options", "axis_type"),
    quick.rows(
        {
            f"{heads}-{options}-{axis_type}": (HEADS[heads], HEAD_OPTIONS[options], AXIS_TYPES[axis_type])
            for (heads, options), axis_type in zip(
                [
                    ("two each", ""),
                    ("one for all", ""),
                    *itertools.product(("one", "one for two devices"), HEAD_OPTIONS),
                ],
                itertools.cycle(AXIS_TYPES),
                strict=False,
            )
        },
        quick=["two each--auto", "one for two devices-alibi, sinks, scale-auto"],
        unpack=True,
    ),
)
def test_heads_are_exchanged(heads, options, axis_type, free_exchange):
    """During a call a device has all rows of some heads, so dk and dv are sums only where devices share a key head."""
    static, differentiable = options
    args = of_heads(*heads)

    results = with_gradients(static)
    want = jax.jit(results)(*args, differentiable)
    mesh = mesh_of(NUMBER, axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        placed = put(mesh, ROWS, *args)
        compiled = jax.jit(results).lower(*placed, differentiable).compile()
        got = compiled(*placed, differentiable)
    assert_like_one_device(got, want, atol=1e-5)
    if heads[1] >= NUMBER:
        for x, y in zip(got[3:5], want[3:5], strict=True):
            np.testing.assert_array_equal(x, y)
    for x, like in zip(got, (placed[0], placed[0][..., 0], *placed), strict=False):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)
    assert kinds_of_wide(collectives(compiled.as_text())) == {"all-to-all"}


# Where XLA would gather whole arrays: an axis of the mesh, and what it shards of the keys.
_BESIDE = {"unused axis": ("other", ROWS), "heads of keys": ("heads", P(None, "sequence", "heads"))}


@pytest.mark.parametrize(
    ("beside", "options"),
    [
        pytest.param(
            *row, id="-".join(row), marks=[] if row[1] == "alibi, sinks, scale" else pytest.mark.exhaustive
        )
        for row in itertools.product(_BESIDE, ("", "alibi, sinks, scale", "dropout"))
    ],
)
def test_heads_are_exchanged_beside_another_axis(beside, options, free_exchange):
    axis, keys = _BESIDE[beside]
    static, differentiable = HEAD_OPTIONS[options]
    q, k, v = of_heads(8, 4)
    results = with_gradients(static | dict(is_causal=True))
    want = jax.jit(results)(q, k, v, differentiable)
    mesh = mesh_of(2, 4, names=(axis, "sequence"))
    placed = *put(mesh, ROWS, q), *put(mesh, keys, k, v)
    compiled = jax.jit(results).lower(*placed, differentiable).compile()
    assert_like_one_device(compiled(*placed, differentiable), want, atol=1e-5)
    moved = collectives(compiled.as_text())
    assert "all-to-all" in kinds_of_wide(moved)
    for kind, shape in moved:
        whole = kind == "all-gather" and kinds_of_wide([(kind, shape)]) and shape[1] in (T, S)
        assert not whole, shape


def test_arguments_are_exchanged_once(free_exchange):
    """The backward pass has the queries, keys and values that the forward pass exchanged."""
    q, k, v = (random(B, T, 8, H, seed=seed) for seed in range(3))
    placed = put(mesh_of(NUMBER), ROWS, q, k, v)
    moved = collectives(jax.jit(with_gradients({})).lower(*placed, {}).compile().as_text())
    elements = sum(
        math.prod(shape) for kind, shape in moved if kinds_of_wide([(kind, shape)]) == {"all-to-all"}
    )
    # q, k, v and out; out, its cotangent and the gradients.
    assert elements == 9 * q.size / NUMBER


# Which calls may be divided by heads: arguments, and the heads of queries and of keys.
_MAY_BE_DIVIDED = {
    "causal": (dict(is_causal=True), (8, 2), True),
    "segments": (dict(segment_ids=(ids(T), ids(S))), (8, 2), True),
    "heads that do not divide": (dict(is_causal=True), (6, 3), False),
    "mask of rows": (dict(is_causal=True, mask=mask(T, S)), (8, 4), False),
    "bias of rows": (dict(is_causal=True, bias=random(T, 1)), (8, 4), False),
    "mask of keys": (dict(is_causal=True, mask=mask(B, 1, 1, S)), (8, 4), True),
}


@pytest.mark.parametrize(
    ("static", "heads", "is_divided"), _MAY_BE_DIVIDED.values(), ids=_MAY_BE_DIVIDED.keys()
)
def test_which_calls_are_divided_by_heads(static, heads, is_divided, free_exchange):
    f = jax.jit(functools.partial(jax_flash.flash_attention, **static))
    moved = collectives(f.lower(*put(mesh_of(NUMBER), ROWS, *of_heads(*heads))).compile().as_text())
    assert kinds_of_wide(moved) == ({"all-to-all"} if is_divided else {"all-gather"})


# The number of devices, lengths, heads, options, whether there are segments, and whether heads are exchanged.
_PAYS = {
    "causal": (8, (131072, 131072), (32, 8), dict(is_causal=True), False, True),
    "causal, from some thousand tokens on": (2, (4096, 4096), (32, 8), dict(is_causal=True), False, True),
    "causal, short": (2, (2048, 2048), (32, 8), dict(is_causal=True), False, False),
    "causal, short, a key head for each query head": (
        2,
        (128, 128),
        (8, 8),
        dict(is_causal=True),
        False,
        True,
    ),
    "causal, one key head": (16, (2048, 2048), (32, 1), dict(is_causal=True), False, False),
    "a window without a limit on one side": (
        2,
        (8192, 8192),
        (32, 8),
        dict(local_window_size=(None, 5)),
        False,
        True,
    ),
    "long segments": (2, (131072, 131072), (48, 6), {}, True, True),
    "short segments": (2, (8192, 8192), (32, 8), dict(is_causal=True), True, False),
    "as much moves": (4, (64, 64), (12, 4), {}, False, True),
    "more moves": (4, (64, 64), (8, 2), {}, False, False),
    "few keys": (8, (4096, 64), (8, 8), {}, False, False),
    "few keys, causal": (8, (4096, 64), (8, 1), dict(is_causal=True), False, False),
    "few queries": (8, (8, 4096), (8, 8), {}, False, True),
    "heads do not divide": (4, (8192, 8192), (6, 3), dict(is_causal=True), False, False),
    "key heads do not divide": (4, (8192, 8192), (12, 6), dict(is_causal=True), False, False),
}


@pytest.mark.parametrize(
    ("number", "lengths", "heads", "options", "has_segments", "pays"), _PAYS.values(), ids=_PAYS.keys()
)
def test_when_an_exchange_of_heads_pays(number, lengths, heads, options, has_segments, pays):
    options = AttentionOptions.resolve(64, **options)
    uneven_keys = _head_exchange.uneven_keys(lengths[1], options, has_segments)
    assert _head_exchange.pays(number, lengths, heads, uneven_keys) == pays


def test_sums_of_a_bias_are_added_up_before_they_move():
    """The kernels sum its gradient over blocks of 64 rows."""
    q, k, v = (random(B, 256, 8, H, seed=i) for i in range(3))
    bias = random(8, 1, 256)
    gradients = jax.grad(lambda *args: jnp.sum(attend(*args[:3], {}, dict(bias=args[3]))[0]), (0, 3))
    mesh = mesh_of(NUMBER)
    placed = *put(mesh, ROWS, q, k, v), bias
    shardings = placed[0].sharding, NamedSharding(mesh, P())
    compiled = jax.jit(gradients, out_shardings=shardings).lower(*placed).compile()
    (dq, dbias), (want_dq, want_dbias) = compiled(*placed), jax.jit(gradients)(q, k, v, bias)
    np.testing.assert_array_equal(dq, want_dq)
    np.testing.assert_allclose(dbias, want_dbias, rtol=1e-5, atol=1e-4)
    moved = collectives(compiled.as_text())
    assert {shape[-2:] for kind, shape in moved if kind == "all-gather"} == {(1, 256)}


def test_dropout_by_heads_takes_shards_of_any_length(free_exchange):
    q, k, v = random(B, 72, 8, H), *of_heads(8, 8)[1:]
    f = jax.jit(lambda *args: attend(*args, OPTIONS["dropout"][0], {}))
    placed = put(mesh_of(NUMBER), ROWS, q, k, v)
    compiled = f.lower(*placed).compile()
    assert_like_one_device(compiled(*placed), f(q, k, v))
    assert kinds_of_wide(collectives(compiled.as_text())) == {"all-to-all"}


@pytest.mark.parametrize("derivative", quick.rows(DERIVATIVES, ["of a tangent"]))
def test_heads_are_exchanged_for_other_derivatives(derivative, free_exchange):
    static = OPTIONS["lengths"][0] | dict(is_causal=True)
    differentiable = dict(bias=random(4, 1, S, seed=5), sinks=random(4, seed=6), scale=np.float32(0.3))
    assert kinds_of_wide(moved_by(derivative, of_heads(4, 2), static, differentiable)) == {"all-to-all"}


# ---- Windows ----------------------------------------------------------------------------------------------------

# The window, and how many keys a device gets from others in each transfer: none where it gets them all at once.
WINDOWS = {
    "inside": ((9, 5), (9, 5)),
    "causal": ((20, 0), (16, 4)),
    "before": ((16, 0), (16,)),
    "behind": ((0, 17), (16, 1)),
    "itself": ((0, 0), ()),
    "most": ((30, 17), (16, 14, 16, 1)),
    "all": ((30, 18), None),
    "no limit": ((9, None), None),
}
WINDOW_OPTIONS = {
    "lengths": (
        dict(query_seq_lengths=np.int32([50, 17]), key_value_seq_lengths=np.int32([33, 60])),
        {},
    ),
    "segments": (dict(segment_ids=ids(T)), {}),
    "mask": (dict(mask=mask(B, N, T, T)), {}),
    "bias": ({}, dict(bias=random(1, N, T, T, seed=5))),
    "alibi, sinks": ({}, OPTIONS["alibi"][1] | OPTIONS["sinks"][1]),
    "dropout": OPTIONS["dropout"],
    "offsets": (dict(query_offset=np.int32([0, 20])), {}),
}


_WINDOWS = {  # every window without, every option with a window
    f"{window}-{options}": (*WINDOWS[window], *WINDOW_OPTIONS.get(options, ({}, {})), axis_type)
    for (window, options), axis_type in zip(
        [*((window, "") for window in WINDOWS), *zip(itertools.cycle(("most", "causal")), WINDOW_OPTIONS)],
        itertools.cycle(("auto", "auto", "explicit")),
        strict=False,
    )
}


def aligned() -> list[np.ndarray]:
    """Queries beside as many keys."""
    return [random(B, T, N, H, seed=1), random(B, T, K, H, seed=2), random(B, T, K, HV, seed=3)]


@pytest.mark.parametrize(
    ("window", "counts", "static", "differentiable", "axis_type"),
    quick.rows(_WINDOWS, ["most-", "causal-dropout"], unpack=True),
)
def test_only_keys_in_the_window_move(window, counts, static, differentiable, axis_type):
    static = static | dict(local_window_size=window, is_causal=False)
    args = aligned()

    results = with_gradients(static)
    want = jax.jit(results)(*args, differentiable)
    mesh = mesh_of(NUMBER, axis_types=(AXIS_TYPES[axis_type],))
    with jax.set_mesh(mesh):
        placed = put(mesh, ROWS, *args)
        compiled = jax.jit(results).lower(*placed, differentiable).compile()
        got = compiled(*placed, differentiable)
    assert_like_one_device(got, want, atol=1e-5)
    for x, like in zip(got[3:5], placed[1:], strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, x.ndim)

    of_keys = [x for x in collectives(compiled.as_text()) if len(x[1]) == 4 and x[1][-2] == K]
    if counts is None or "query_offset" in static:
        assert {kind for kind, _ in of_keys} == {"all-gather", "reduce-scatter"}
    else:  # keys and values for each pass, and their gradients
        times = 4 if "bias" in differentiable else 3
        moved = [("collective-permute", (B, count, K, width)) for count in counts for width in (H, HV)]
        assert sorted(of_keys) == sorted(moved * times)


@pytest.mark.parametrize("derivative", quick.rows(DERIVATIVES, ["of a gradient"]))
def test_only_keys_in_the_window_move_for_other_derivatives(derivative):
    static, differentiable = OF_DERIVATIVES["everything"]
    static = static | dict(local_window_size=(20, 0), key_value_seq_lengths=np.int32([33, 60]))
    moved = moved_by(derivative, aligned(), static, differentiable)
    moved = [x for x in moved if x[1][-2:] in ((K, H), (K, HV))]
    assert {(kind, shape[-3]) for kind, shape in moved} == {
        ("collective-permute", 16),
        ("collective-permute", 4),
    }


@pytest.mark.parametrize("window", [(3, 0), (11, 2), (20, 33)])
@pytest.mark.parametrize("number", quick.rows([2, 4, 8], quick=[8]))
def test_every_device_gets_its_window(number, window):
    """The gradients of keys and values are sums of what several devices have."""
    args = random(2, 64, 4, 8, seed=1), random(2, 64, 2, 8, seed=2), random(2, 64, 2, 8, seed=3)
    f = jax.jit(functools.partial(results, is_causal=False, local_window_size=window))
    bias = np.zeros((1, 1, 1, 1), np.float32)
    got = f(*put(mesh_of(number), ROWS, *args), bias)
    assert_like_one_device(got[:5], f(*args, bias)[:5])


LONG = {
    "causal": ((100, 0), {}, {}),
    "behind": ((0, 70), {}, {}),
    "further than a neighbor": ((1000, 10), {}, {}),
    "lengths": (
        (100, 20),
        dict(query_seq_lengths=np.int32([5000]), key_value_seq_lengths=np.int32([4801])),
        {},
    ),
    "negative lengths": ((100, 20), dict(key_value_seq_lengths=np.int32([-3])), {}),
    "segments": ((100, 0), dict(segment_ids=np.arange(7680, dtype=np.int32)[None] // 150), {}),
    "alibi, sinks": (
        (100, 20),
        {},
        dict(bias=jax_flash.Alibi(np.float32([0.3, 0.02])), sinks=np.float32([0.5, -1.0])),
    ),
    "dropout": ((100, 20), OPTIONS["dropout"][0], {}),
    "row of a bias": ((100, 20), {}, dict(bias=random(1, 2, 7680, 1, seed=5))),
    "bias": ((100, 20), {}, dict(bias=random(1, 2, 1, 7680, seed=5))),
}


@pytest.mark.parametrize(
    ("window", "static", "differentiable"),
    quick.rows(LONG, quick=["lengths", "segments", "dropout", "bias"], unpack=True),
)
@pytest.mark.parametrize("number", quick.rows([2, 4, 8], quick=[8]))
def test_a_device_stores_a_part_of_the_keys(number, window, static, differentiable):
    """It begins at a multiple of kKeyUnit, so that results have the bits of one device. A bias has all keys."""
    static = static | dict(local_window_size=window, is_causal=False)
    length, size, unit = 7680, 7680 // number, _library.constants()["kKeyUnit"]
    args = [
        random(1, length, 2, H, seed=1),
        random(1, length, 1, H, seed=2),
        random(1, length, 1, HV, seed=3),
    ]

    results = with_gradients(static)
    want = jax.jit(results)(*args, differentiable)
    placed = put(mesh_of(number), ROWS, *args)
    compiled = jax.jit(results).lower(*placed, differentiable).compile()
    assert_like_one_device(compiled(*placed, differentiable), want)
    calls = "".join(line for line in compiled.as_text().splitlines() if "custom-call(" in line)
    lengths = {int(x) for x in re.findall(rf"f32\[1,(\d+),1,(?:{H}|{HV})\]", calls)}
    has_keys = np.shape(differentiable.get("bias", 0))[-1:] == (length,)
    assert len(lengths) == 1
    assert size < max(lengths) <= (length if has_keys else min(length, size + sum(window) + 2 * unit))


# ---- Meshes -----------------------------------------------------------------------------------------------------

_AXES = ("a", "b")
# The sizes of the mesh and the partitions of queries and keys.
MESHES = {
    "batch and sequence": ((2, 4), P("a", "b"), P("a", "b")),
    "sequence and heads": ((2, 2), P(None, "a", "b"), P(None, "a", "b")),
    "sequence over both": ((2, 4), P(None, _AXES), P(None, _AXES)),
    "the other way round": ((2, 4), P(None, ("b", "a")), P(None, _AXES)),
    "both the other way round": ((2, 4), P(None, ("b", "a")), P(None, ("b", "a"))),
    "keys over one": ((2, 4), P(None, _AXES), P(None, "b")),
    "keys over the other": ((2, 4), P(None, "b"), P(None, "a")),
    "heads of keys": ((2, 2), P(None, "a"), P(None, None, "b")),
}


def results(q, k, v, bias, **static):
    (out, lse), vjp = jax.vjp(lambda q, k, v, bias: attend(q, k, v, static, dict(bias=bias)), q, k, v, bias)
    return out, lse, *vjp((jnp.cos(out), jnp.sin(lse)))


@pytest.mark.parametrize("window", quick.rows({"all keys": None, "window": (9, 5)}, ["window"]))
@pytest.mark.parametrize(("sizes", "spec", "spec_kv"), MESHES.values(), ids=MESHES.keys())
def test_meshes(sizes, spec, spec_kv, window):
    q, k, v = random(2, 64, 4, 8, seed=1), random(2, 64, 2, 8, seed=2), random(2, 64, 2, 8, seed=3)
    bias = random(1, 4, 1, 64, seed=4)  # its gradient is a sum over batch and rows
    mesh = mesh_of(*sizes, names=_AXES)
    placed = *put(mesh, spec, q), *put(mesh, spec_kv, k, v)
    f = jax.jit(functools.partial(results, is_causal=window is None, local_window_size=window))
    got = f(*placed, bias)
    assert_like_one_device(got, f(q, k, v, bias))
    assert got[0].sharding.is_equivalent_to(placed[0].sharding, 4)


@pytest.mark.parametrize("dropout_rate", quick.rows([0.0, 0.3], quick=[0.3]))
@pytest.mark.parametrize("window", quick.rows({"all keys": None, "window": (20, 0)}, ["window"]))
@pytest.mark.parametrize("is_ring", [False, True], ids=["batch", "ring"])
def test_the_other_axis_of_shard_map(is_ring, dropout_rate, window):
    """The compiler shards the sequence beside a manual axis: of the batch, or of the sequence itself."""
    args = random(2, 128, 4, 8, seed=1), random(2, 128, 2, 8, seed=2), random(2, 128, 2, 8, seed=3)
    options = dict(is_causal=True, local_window_size=window)
    if dropout_rate:
        options |= dict(dropout_rate=dropout_rate, dropout_rng=np.uint32([1, 2]))
    mesh = mesh_of(2, 4, names=_AXES)
    manual, spec = (P(None, "a"), P(None, _AXES)) if is_ring else (P("a"), P("a", "b"))
    call = (
        functools.partial(jax_flash.ring_attention, axis_name="a") if is_ring else jax_flash.flash_attention
    )

    def gradients(axis_names, *args):
        f = jax.shard_map(
            functools.partial(call, **options),
            mesh=mesh,
            in_specs=manual,
            out_specs=manual,
            axis_names=axis_names,
        )
        return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2))(*args)

    placed = put(mesh, spec, *args)
    compiled = jax.jit(functools.partial(gradients, {"a"})).lower(*placed).compile()
    want = jax.jit(functools.partial(gradients, {*_AXES}))(*args)
    for x, y in zip(compiled(*placed), want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
    moved = collectives(compiled.as_text())
    assert not [shape for _, shape in moved if shape[-2:] == (4, 8)]  # of queries
    if window and not is_ring:  # a ring's steps have offsets
        assert {kind for kind, _ in moved} == {"collective-permute"}


# Partitions over the other axes of a mesh, in a shard_map over some.
PARTLY_MANUAL = {
    "both": ("b", P("b", "a", "c")),
    "both, with the batch": ("b", P(("b", "a"), "c")),
    "batch": ("b", P(("b", "a", "c"))),
    "the first": ("b", P("b", "a")),
    "the last": ("b", P("b", "c")),
    "the other way round": ("b", P("b", "c", "a")),
    "the other way round, with the batch": ("b", P(("b", "c"), "a")),
    "sequence over both": ("b", P("b", ("a", "c"))),
    "sequence over both, the other way round": ("b", P("b", ("c", "a"))),
    "behind the first": ("a", P("a", "c")),
    "before the last": ("c", P("c", "b")),
}


@pytest.mark.parametrize("window", quick.rows({"all keys": None, "window": (20, 0)}, ["all keys"]))
@pytest.mark.parametrize(
    ("axis", "spec"),
    quick.rows(PARTLY_MANUAL, ["both", "the last", "the other way round"], unpack=True),
)
def test_two_other_axes_of_shard_map(axis, spec, window):
    """The compiler does not say which of the two it means. The bias's gradient is a sum over all."""
    args = random(8, 64, 4, 8, seed=1), random(8, 64, 4, 8, seed=2), random(8, 64, 4, 8, seed=3)
    bias = random(1, 4, 1, 64, seed=4)
    call = functools.partial(
        jax_flash.flash_attention, is_causal=True, local_window_size=window, deterministic=True
    )
    mesh = mesh_of(2, 2, 2, names=("a", "b", "c"))
    manual = jax.shard_map(
        lambda *args: call(*args[:3], bias=args[3]),
        mesh=mesh,
        in_specs=(P(axis), P(axis), P(axis), P()),
        out_specs=P(axis),
        axis_names={axis},
    )

    def gradients(f, *args):
        out, vjp = jax.vjp(f, *args)
        return out, *vjp(jnp.cos(out))

    got = jax.jit(functools.partial(gradients, manual))(*put(mesh, spec, *args), bias)
    want = jax.jit(functools.partial(gradients, lambda *args: call(*args[:3], bias=args[3])))(*args, bias)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)


# ---- Edges ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", quick.rows(["TS", "1S", "T1", "11", "N1S", "BN1S"], quick=["1S", "T1"]))
@pytest.mark.parametrize("seqlen_q", quick.rows([0, 8, 16, 520, 1024], quick=[8, 1024]))
def test_few_and_many_rows(seqlen_q, axes):
    """Sums of the gradient of a bias are in blocks of 64 rows. In a shard of one row, a bias of one row is a whole."""
    sizes = dict(zip("BNTS1", (2, 4, seqlen_q, 9, 1), strict=True))
    q, k, v = random(2, seqlen_q, 4, 8, seed=1), random(2, 9, 2, 8, seed=2), random(2, 9, 2, 8, seed=3)
    bias = random(*(sizes[axis] for axis in axes), seed=4)
    f = jax.jit(results)
    got = f(*put(mesh_of(8), ROWS, q), k, v, bias)
    assert_like_one_device(got, f(q, k, v, bias))


@pytest.mark.parametrize("dropout_rate", [0.0, 0.3])
def test_rows_that_are_gathered(dropout_rate):
    """Lengths that do not divide evenly, and with dropout shards that are no multiple of 16, are gathered."""
    q, k, v = inputs()
    rows = 56 if dropout_rate else 61
    q, bias = q[:, :rows], random(rows, 1, seed=4)
    static = dict(dropout_rate=dropout_rate, dropout_rng=np.uint32([1, 2])) if dropout_rate else {}
    sharding = NamedSharding(mesh_of(NUMBER), ROWS)

    @functools.partial(jax.jit, static_argnums=0)
    def f(is_sharded, q, k, v, bias):
        if is_sharded:
            q, k, v = (jax.lax.with_sharding_constraint(x, sharding) for x in (q, k, v))
        return results(q, k, v, bias, **static)

    assert_like_one_device(f(True, q, k, v, bias), f(False, q, k, v, bias))


@pytest.mark.parametrize("scattered", [(), ("sequence",)], ids=["everywhere", "scattered"])
def test_sums_of_16_bits_are_rounded_once(scattered):
    """As the program says. What XLA makes of sums in 16 bits depends on the platform."""
    add = functools.partial(_on_shards.sum_over_devices, axes=["sequence"], scattered=scattered, axis=0)
    spec = P(*scattered)
    f = jax.shard_map(add, mesh=mesh_of(8), in_specs=P(), out_specs=spec, check_vma=False)
    text = jax.jit(f).lower(jnp.ones(16, jnp.bfloat16)).as_text()
    (dtype,) = re.findall(r"stablehlo\.(?:all_reduce|reduce_scatter).*?\(tensor<16x(\w+)>\)", text, re.DOTALL)
    assert dtype == "f32"
    np.testing.assert_array_equal(f(jnp.ones(16, jnp.bfloat16)), jnp.full(16, 8, jnp.bfloat16))
