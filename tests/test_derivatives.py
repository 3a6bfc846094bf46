"""Forward mode and derivatives of second order, against exact ones in float64.

These are complex steps of dense attention and of the oracle's gradient, or JAX's derivatives of dense attention.
"""

import functools
import re
from typing import Any, NamedTuple

import dense
import harness
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import CASES, DTYPES, PAIRS, Case
from closeness import assert_close
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jax_flash
from jax_flash import _blocked, _kernel_choice, _primitives

_DIFFERENTIABLE = ("bias", "alibi", "sinks")
BY_NAME = {case.name: case for case in CASES}
QUICK = ["full", "sinks", "soft cap", "bias, one query", "tiles, mask", "dropout", *quick.IN_EVERY_DTYPE]


class Point(NamedTuple):
    """Where derivatives are taken: the inputs x of a row of the table, two directions, and cotangents c."""

    x: tuple
    t: tuple
    u: tuple
    c: tuple


@functools.lru_cache(maxsize=4)
def point_of(case: Case, dtype: str) -> Point:
    q, k, v, dout, dlse = case.inputs(DTYPES[dtype])
    operands = case.operands(DTYPES[dtype])
    x = (q, k, v, {name: operands[name] for name in _DIFFERENTIABLE if name in operands})
    rng = np.random.default_rng(len(str(case)))
    t, u = (jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), x) for _ in range(2))
    return Point(x, t, u, (dout, dlse))


def other_operands(case: Case, dtype: str) -> dict[str, Any]:
    return {name: x for name, x in case.operands(DTYPES[dtype]).items() if name not in _DIFFERENTIABLE}


def fused(case: Case, dtype: str, **options: Any):
    """Attention as the package computes it."""
    operands = other_operands(case, dtype)

    def f(q, k, v, differentiable):
        out, lse = harness.call(
            q, k, v, operands | differentiable, return_residual=True, **(case.static | options)
        )
        return out, jnp.where(jnp.isinf(lse), 0, lse)

    return f


def exact_options(case: Case) -> dict[str, Any]:
    """The options of a row as dense attention and the oracle take them: the same for inputs of any dtype."""
    options = case.static | other_operands(case, "float64")
    if "dropout_seed" in options:
        options["keep"] = harness.kept(case, int(options.pop("dropout_seed")))
    return options


def exact(case: Case, kind: str | None = None):
    """The same in float64; with `kind` in the naive arithmetic of that type."""
    rounding = dense.EXACT if kind is None else dense.rounding_of(kind)
    return functools.partial(dense.attention, rounding=rounding, **exact_options(case))


def exact_gradient(case: Case, c: tuple):
    """The gradient for the cotangents c, by the oracle."""
    options = exact_options(case)

    def gradient(q, k, v, differentiable):
        gradients: dict[str, np.ndarray] = {}
        result = oracle.attention(q, k, v, *c, **options, **differentiable, gradients=gradients)
        return result.dq, result.dk, result.dv, gradients

    return gradient


def tangent(f, point: Point):
    return jax.jvp(f, point.x, point.t)[1]


def gradient_tangent(f, point: Point):
    """The derivative of the gradient for fixed cotangents: a Hessian times a vector."""

    def gradient(*x):
        return jax.vjp(f, *x)[1](point.c)

    return jax.jvp(gradient, point.x, point.t)[1]


def tangent_gradient(f, point: Point):
    """The gradient of the tangent."""
    return jax.vjp(lambda *x: jax.jvp(f, x, point.t)[1], *point.x)[1](point.c)


def second_tangent(f, point: Point):
    return jax.jvp(lambda *x: jax.jvp(f, x, point.t)[1], point.x, point.u)[1]


def gradient_gradient(f, point: Point):
    """The gradient of the product of the gradient and t: by symmetry that of `gradient_tangent`."""

    def along_t(*x):
        gradients = jax.vjp(f, *x)[1](point.c)
        products = jax.tree.map(lambda a, b: jnp.sum(a.astype(b.dtype) * b), gradients, point.t)
        return sum(jax.tree.leaves(products))

    return jax.grad(along_t, (0, 1, 2, 3))(*point.x)


def evaluate(composition, f, point: Point, dtype: str):
    with harness.x64(dtype):
        return jax.tree.map(np.asarray, jax.jit(functools.partial(composition, f))(point))


# XLA takes longer to optimize dense attention than the program runs.
_WITHOUT_OPTIMIZATIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@functools.lru_cache(maxsize=6)
def exact_program(composition, case: Case, kind: str | None):
    """`exact` in a composition, for inputs of any dtype: what is not an input is the same in each."""
    f = functools.partial(composition, exact(case, kind))
    return jax.jit(f, compiler_options=_WITHOUT_OPTIMIZATIONS)


def evaluate_by_jax(composition, case: Case, point: Point, kind: str | None = None):
    with harness.x64("float64"):
        return jax.tree.map(np.asarray, exact_program(composition, case, kind)(point))


def evaluate_exactly(composition, case: Case, point: Point, kind: str | None = None):
    """A composition of dense attention, by complex steps where they give it: programs take long to compile.

    With `kind` in the naive arithmetic of that type.
    """
    point = jax.tree.map(lambda x: x.astype(np.float64), point)
    with np.errstate(all="ignore"):
        if composition is tangent:
            return dense.complex_step(exact(case, kind), point.x, point.t)
        # Second derivatives do not depend on the order: this one serves all that differentiate a gradient.
        if composition in (gradient_tangent, tangent_gradient, gradient_gradient) and kind is None:
            return dense.complex_step(exact_gradient(case, point.c), point.x, point.t)
    return evaluate_by_jax(composition, case, point, kind)


# JAX's rounding to float16 makes subnormal numbers 0, and NumPy's to bfloat16 rounds to float32 first.
@pytest.mark.parametrize(
    ("kind", "tolerance"), [(None, 1e-12), ("tfloat32", 1e-12), ("bfloat16", 2**-8), ("float16", 2**-11)]
)
def test_complex_step_is_the_tangent(kind, tolerance):
    case = BY_NAME["everything"]
    point = jax.tree.map(lambda x: x.astype(np.float64), point_of(case, "float32"))
    want = evaluate_by_jax(tangent, case, point, kind)
    for a, b in zip(evaluate_exactly(tangent, case, point, kind), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# Together they have every operand that has a gradient, every other option, and rows that see no key.
@pytest.mark.parametrize("name", [*quick.IN_EVERY_DTYPE, "alibi, causal, offset"])
def test_complex_step_of_the_gradient_is_its_tangent(name):
    case = BY_NAME[name]
    point = jax.tree.map(lambda x: x.astype(np.float64), point_of(case, "float64"))  # operands, too
    got, want = (evaluate(gradient_tangent, case, point) for evaluate in (evaluate_exactly, evaluate_by_jax))
    assert got[3].keys() == point.x[3].keys()
    assert_trees_close(got, want, rtol=1e-12, atol=1e-12)


# Pairs of options in bfloat16 and in the most exact type.
CASES_AND_KINDS = quick.cases_and_kinds(CASES, quick=QUICK) + [
    pytest.param(case, kind, id=f"{case}-{kind}", marks=quick.EXHAUSTIVE) for case in PAIRS for kind in (0, 3)
]


@pytest.mark.parametrize(("case", "kind"), CASES_AND_KINDS)
def test_tangent_is_close_to_exact(case, kind, platform):
    dtype, precision, rule = harness.kind(platform, kind)
    point = point_of(case, dtype)
    got = evaluate(tangent, fused(case, dtype, forward_mode=True, precision=precision), point, dtype)
    want, naive = evaluate_exactly(tangent, case, point), (None, None)
    if rule not in ("float32", "float64"):
        naive = evaluate_exactly(tangent, case, point, rule)
    # A tangent consists of differences of terms as large as the largest of its elements.
    size = max(np.abs(x).max(initial=0.0) for x in want)
    for name, a, b, c in zip(("tout", "tlse"), got, want, naive, strict=True):
        # Derivatives of lse are float32 for 16-bit inputs, too, and their products are exact in float32.
        own_rule = "float32" if name == "tlse" and rule in ("bfloat16", "float16") else rule
        name = f"{name} of {case}, {dtype}"
        assert_close(a, b, own_rule, num_keys=case.seqlen_kv, naive=c, cancelling=size, name=name)


def assert_all_close(got, want, case: Case, kind: str) -> None:
    """Compares results that are sums of terms as large as the largest of their elements."""
    size = max(np.abs(x).max(initial=0.0) for x in jax.tree.leaves(want))
    pairs = case.batch * case.num_heads * case.seqlen_q * case.seqlen_kv

    def compare(a, b):
        # An operand's derivative has its dtype, which may be less exact, and is a sum over what it is broadcast to.
        rule = max(kind, a.dtype.name, key=harness.RULES.index)
        terms = max(case.seqlen_kv, pairs // max(a.size, 1))
        assert_close(a, b, rule, num_keys=terms, cancelling=size, name=str(case))

    jax.tree.map(compare, got, want)


# Rows of the table for derivatives of second order, which are expensive to compile: every option, alone and together.
SECOND_ORDER = [
    "full",
    "causal",
    "everything",
    "everything at once",
    "bias of heads and rows",
    "bias of batch and pairs",
    "bias, soft cap",
    "alibi, causal, offset",
    "mask, sinks",
    "segments, lengths, sinks",
    "dropout, lengths, sinks",
    "values wider",
    "tiles, bias",
    "tiles, mask",
    "bias, one query",
    "bias, one key",
    "alibi",
]
QUICK_SECOND_ORDER = [
    "full",
    "everything",
    "everything at once",
    "bias, soft cap",
    "alibi, causal, offset",
    "segments, lengths, sinks",
    "dropout, lengths, sinks",
    "values wider",
    "tiles, mask",
]
COMPOSITIONS = {
    "gradient of tangent": (tangent_gradient, True),
    "tangent of tangent": (second_tangent, True),
    "tangent of gradient": (gradient_tangent, True),
    "tangent of gradient, custom_vjp": (gradient_tangent, False),
    "gradient of gradient": (gradient_gradient, True),
    "gradient of gradient, custom_vjp": (gradient_gradient, False),
}


@pytest.mark.parametrize(("name", "how"), quick.in_turn(SECOND_ORDER, COMPOSITIONS, QUICK_SECOND_ORDER))
def test_second_order_is_close_to_exact(name, how, platform):
    case, (composition, forward_mode) = BY_NAME[name], how
    dtype, precision, kind = harness.most_exact(platform, case)
    point = point_of(case, dtype)
    f = fused(case, dtype, forward_mode=forward_mode, precision=precision)
    got = evaluate(composition, f, point, dtype)
    assert_all_close(got, evaluate_exactly(composition, case, point), case, kind)


@pytest.fixture
def blocks(monkeypatch) -> list:
    """Has the derivative of the gradient computed in plain JAX, as on a GPU, and counts how often."""
    calls = []

    def backward_tangent(*args):
        calls.append(args)
        return _blocked.backward_tangent(*args)

    monkeypatch.setattr(_primitives, "backward_tangent", backward_tangent)
    return calls


@pytest.mark.parametrize("name", quick.rows(SECOND_ORDER, quick=["everything at once"]))
def test_second_order_in_blocks(name, blocks):
    case = BY_NAME[name]
    dtype, precision, kind = harness.KINDS["cpu"][-1]
    point = point_of(case, dtype)
    got = evaluate(gradient_tangent, fused(case, dtype, precision=precision), point, dtype)
    assert blocks
    assert_all_close(got, evaluate_exactly(gradient_tangent, case, point), case, kind)


@pytest.mark.parametrize(("name", "how"), quick.in_turn(["full", "everything"], COMPOSITIONS))
@pytest.mark.parametrize("kind", quick.rows(range(2), quick=[0]))
def test_second_order_in_16_bits(kind, name, how, platform):
    case, (composition, forward_mode) = BY_NAME[name], how
    dtype, precision, rule = harness.kind(platform, kind)
    point = point_of(case, dtype)
    got = evaluate(
        composition, fused(case, dtype, forward_mode=forward_mode, precision=precision), point, dtype
    )
    want, naive = (evaluate_exactly(composition, case, point, x) for x in (None, rule))
    size = max(np.abs(x).max(initial=0.0) for x in jax.tree.leaves(want))
    for a, b, c in zip(*map(jax.tree.leaves, (got, want, naive)), strict=True):
        if a.dtype == DTYPES[dtype]:  # not a sum in float32
            assert_close(a, b, rule, num_keys=case.seqlen_kv, naive=c, cancelling=size, chance=2.0, name=name)


# ---- Compositions of a user's --------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
QKV = [RNG.standard_normal(shape).astype(np.float32) for shape in [(2, 5, 4, 3), (2, 7, 2, 3), (2, 7, 2, 6)]]
LENGTHS = dict(query_seq_lengths=np.array([3, 5], np.int32), key_value_seq_lengths=np.array([7, 0], np.int32))
BIAS = RNG.standard_normal((4, 5, 1)).astype(np.float32)


def attention(*args, **options):
    return jax_flash.flash_attention(*args, precision="highest", **({"forward_mode": True} | options))


def reference(*args, **options):
    options.pop("forward_mode", None)
    return jax_flash.flash_attention(*args, precision="highest", implementation="xla", **options)


def assert_trees_close(got, want, **tolerance) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    tolerance = dict(rtol=1e-4, atol=1e-4) | tolerance
    jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance), got, want)


OPTIONS = {"full": {}, "soft cap": dict(logits_soft_cap=1.5, is_causal=True), "lengths": LENGTHS}
LINKS = {"both modes": True, "custom_vjp": False}
BOTH_LINKS = pytest.mark.parametrize("forward_mode", quick.rows(LINKS, quick=LINKS))


@pytest.mark.parametrize("dtype", quick.rows(["float32", "float64"], quick=["float64"]))
@pytest.mark.parametrize("options", quick.rows(OPTIONS, quick=["soft cap"]))
@BOTH_LINKS
def test_check_grads_of_order_2(forward_mode, options, dtype):
    def f(q, k, v, bias, scale):
        out, lse = attention(
            q, k, v, bias, scale=scale, return_residual=True, forward_mode=forward_mode, **options
        )
        return out, jnp.where(jnp.isinf(lse), 0, lse)

    with harness.x64(dtype):
        args = [x.astype(dtype) for x in (*QKV, BIAS, np.array(0.7))]
        modes = ["fwd", "rev"] if forward_mode else ["rev"]
        check_grads(jax.jit(f), args, order=2, modes=modes, eps=2e-3 if dtype == "float32" else None)


def loss(attend, q, k, v, **options):
    return jnp.sum(jnp.sin(attend(q, k, v, **options)))


def test_negative_lengths_see_no_key():
    """A sink keeps lse finite, so a block of keys before the first would count."""
    x = jnp.ones((1, 8, 1, 4))
    options = dict(local_window_size=(7, 0), key_value_seq_lengths=np.array([-1], np.int32))

    def f(bias):
        return loss(attention, x, x, x, bias=bias, sinks=jnp.zeros(1), **options)

    assert not np.any(jax.jit(jax.hessian(f))(jnp.zeros((1, 1, 1, 8))))


@pytest.mark.parametrize(
    ("batch", "shape"),
    [
        (2, (1, 2, 7, 9)),
        (2, (1, 1, 7, 9)),
        (2, (2, 2, 7, 9)),
        (2, (1, 2, 1, 9)),
        (2, (1, 1, 1, 1)),
        (1, (1, 2, 7, 9)),
    ],
    ids=str,
)
def test_vmap_of_second_derivatives_by_a_bias(batch, shape, platform):
    """The bias is not mapped, and each mapped element has a sum over its own batch."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((3, batch, 7, 2, 8)).astype(np.float32)
    k, v, bias = (rng.standard_normal(x).astype(np.float32) for x in (*[(batch, 9, 2, 8)] * 2, shape))

    def second(q):
        f = functools.partial(jax_flash.flash_attention, forward_mode=True)
        gradient = jax.grad(lambda q, bias: jnp.sum(f(q, k, v, bias) ** 2), 1)
        return jax.jvp(lambda q: gradient(q, bias), (q,), (q,))[1]

    each = np.stack([jax.jit(second)(x) for x in q])
    np.testing.assert_allclose(jax.jit(jax.vmap(second))(q), each, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("forward_mode", [True, False])
def test_vmap_over_no_directions(forward_mode):
    x = jnp.ones((1, 8, 1, 4))
    f = functools.partial(loss, attention, forward_mode=forward_mode)
    tangent_of_gradient = jax.vmap(lambda t: jax.jvp(lambda q: jax.grad(f)(q, x, x), (x,), (t,))[1])
    assert tangent_of_gradient(jnp.zeros((0, *x.shape))).shape == (0, *x.shape)
    assert jax.hessian(f)(x[:, :0], x, x).shape == 2 * (1, 0, 1, 4)


@BOTH_LINKS
def test_hessian(forward_mode, platform):
    args = [x[:1, :3, :2, :2] for x in QKV]
    hessian = jax.jit(jax.hessian(functools.partial(loss, attention, forward_mode=forward_mode), (0, 1, 2)))
    want = jax.jit(jax.hessian(functools.partial(loss, reference), (0, 1, 2)))(*args)
    assert_trees_close(hessian(*args), want)


@pytest.mark.parametrize(
    "composition",
    [
        lambda f: jax.jacfwd(f, (0, 1)),
        lambda f: jax.jacfwd(jax.jacfwd(f), 1),
        lambda f: jax.jacrev(jax.jacfwd(f, 1)),
        lambda f: jax.jacfwd(jax.jacrev(f, 1)),
        lambda f: jax.jacrev(jax.jacrev(f), 1),
    ],
    ids=["forward", "forward twice", "reverse of forward", "forward of reverse", "reverse twice"],
)
def test_jacobians(composition, platform):
    """Every rule of vmap: many directions, many cotangents."""
    args = [x[:1, :2, :2, :2] for x in QKV]
    options = dict(sinks=np.array([0.5, -1.0], np.float32), bias=BIAS[:2, :2])
    f, g = (functools.partial(attend, **options) for attend in (attention, reference))
    assert_trees_close(jax.jit(composition(f))(*args), jax.jit(composition(g))(*args))


def equations(jaxpr, name: str) -> list:
    found = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == name]
    for eqn in jaxpr.eqns:
        for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(x, "eqns"):
                found += equations(x, name)
    return found


def second_gradient(f):
    return jax.grad(lambda *x: jnp.sum(jax.grad(f)(*x) ** 2))


@pytest.mark.parametrize(
    ("derivative", "options", "in_planes"),
    [
        (jax.grad, {}, dict(forward=[True], backward=[True])),
        (jax.grad, dict(bias=BIAS), dict(forward=[False], backward=[False], backward_bias=[False])),
        (jax.grad, dict(forward_mode=True), dict(forward=[False], backward=[False])),
        (jax.grad, dict(precision="default"), dict(forward=[False], backward=[False])),
        # Second derivatives have a forward pass of their own.
        (second_gradient, {}, dict(forward=[True, False], backward=[True], backward_tangent=[False])),
    ],
    ids=["gradient", "bias", "forward mode", "default", "second derivative"],
)
def test_who_recomputes_scores_of_planes(derivative, options, in_planes, monkeypatch):
    """At "highest" only kernels that do so to the bit follow a forward pass that may be of planes."""
    monkeypatch.setattr(_kernel_choice, "has_hopper", lambda: True)

    def f(q, k, v):
        return jnp.sum(jax_flash.flash_attention(q, k, v, **dict(precision="highest") | options))

    jax.clear_caches()  # which do not depend on the GPUs
    jaxpr = jax.make_jaxpr(derivative(f))(*QKV)
    jax.clear_caches()
    for name, expected in in_planes.items():
        found = [eqn.params["options"].in_planes for eqn in equations(jaxpr, f"jax_flash_{name}")]
        assert set(found) == set(expected), name


def test_directions_share_the_primal():
    """With fixed primals, vmap over tangents gives the kernel one primal and an axis of directions."""
    tangents = [np.stack([x] * 6) for x in QKV]

    def f(*t):
        return jax.jvp(attention, tuple(QKV), t)[1]

    (eqn,) = equations(jax.make_jaxpr(jax.vmap(f))(*tangents), "jax_flash_tangent")
    shapes = {name: x.aval.shape for name, x in zip(eqn.params["names"], eqn.invars, strict=True)}
    assert shapes["q"] == QKV[0].shape
    assert shapes["tq"] == (6, *QKV[0].shape)


def test_only_what_moves_has_a_tangent():
    q, k, v = QKV
    jaxpr = jax.make_jaxpr(lambda t: jax.jvp(lambda v: attention(q, k, v), (v,), (t,)))(v)
    (eqn,) = equations(jaxpr, "jax_flash_tangent")
    assert [name for name in eqn.params["names"] if name.startswith("t")] == ["tv"]


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)], ids=["both", "primals", "tangents"])
def test_vmap_of_jvp_of_vmap(in_axes, platform):
    args = [np.stack([x, 2 * x, -x]) for x in QKV]
    primals, tangents = ([x if axis == 0 else x[0] for x in args] for axis in in_axes)

    def composed(attend):
        def jvp(primals, tangents):
            return jax.jvp(lambda *x: jax.vmap(lambda *x: attend(*x, bias=BIAS))(*x), primals, tangents)

        def doubled(x):
            return [jnp.stack([x, x]) for x in x]

        return jax.jit(jax.vmap(lambda p, t: jvp(doubled(p), doubled(t)), in_axes))(primals, tangents)

    assert_trees_close(composed(attention), composed(reference))


# ---- Uses --------------------------------------------------------------------------------------------------


def test_meanflow_step(platform):
    """A step of MeanFlow (https://arxiv.org/abs/2505.13447): the gradient of a loss with a stopped jvp."""
    weights = RNG.standard_normal((12, 12)).astype(np.float32) / 3
    z, velocity = (RNG.standard_normal((2, 8, 12)).astype(np.float32) for _ in range(2))
    r, t = np.array([0.1, 0.4], np.float32), np.array([0.7, 0.9], np.float32)

    def step(attend):
        def net(weights, z, r, t):
            x = jnp.tanh(z @ weights + r[:, None, None] - t[:, None, None]).reshape(2, 8, 3, 4)
            return attend(x, x, x).reshape(z.shape)

        def objective(weights):
            u, du = jax.jvp(
                functools.partial(net, weights), (z, r, t), (velocity, jnp.zeros_like(r), jnp.ones_like(t))
            )
            target = velocity - (t - r)[:, None, None] * du
            return jnp.mean((u - jax.lax.stop_gradient(target)) ** 2)

        return jax.jit(jax.value_and_grad(objective))(weights)

    assert_trees_close(step(attention), step(reference))


@pytest.mark.parametrize("composition", ["tangent of gradient", "tangent of tangent"])
def test_laplacian_by_vmapped_tangents(composition, platform):
    x = RNG.standard_normal((6, 4)).astype(np.float32)
    directions = np.eye(x.size, dtype=np.float32).reshape(x.size, *x.shape)

    def laplacian(attend):
        def f(x):
            h = x[:, None, :]
            return jnp.sum(jnp.sin(attend(h, h, h)))

        def second(e):
            if composition == "tangent of gradient":
                return jnp.sum(e * jax.jvp(jax.grad(f), (x,), (e,))[1])
            return jax.jvp(lambda x: jax.jvp(f, (x,), (e,))[1], (x,), (e,))[1]

        return jax.jit(lambda: jnp.sum(jax.vmap(second)(directions)))()

    assert_trees_close(laplacian(attention), laplacian(reference))


@BOTH_LINKS
def test_hessian_times_vector_in_a_checkpointed_scan(forward_mode, platform):
    weights = RNG.standard_normal((2, 12, 12)).astype(np.float32) / 3
    x = RNG.standard_normal((2, 8, 3, 4)).astype(np.float32)
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")

    def product(attend):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, w):
            h = (x.reshape(2, 8, 12) @ w).reshape(x.shape)
            return x + attend(h, x, x, is_causal=True), None

        def f(weights):
            return jnp.sum(jnp.cos(jax.lax.scan(layer, x, weights)[0]))

        return jax.jit(lambda w: jax.jvp(jax.grad(f), (w,), (jnp.ones_like(w),)))(weights)

    with jax.default_matmul_precision("highest"):
        got = product(functools.partial(attention, forward_mode=forward_mode))
        assert_trees_close(got, product(reference), atol=1e-3)


# ---- Links -------------------------------------------------------------------------------------------------


def test_both_links_run_the_same_kernels(platform):
    def program(forward_mode):
        f = jax.jit(
            jax.value_and_grad(
                lambda *args: loss(
                    attention, *args, bias=BIAS, deterministic=True, forward_mode=forward_mode
                ),
                (0, 1, 2),
            )
        )
        calls = re.findall(r"custom_call @(jax_flash_\w+?)(?:_emulated)?\(", f.lower(*QKV).as_text())
        return f(*QKV), sorted(calls)

    (got, calls), (want, other_calls) = program(True), program(False)
    assert calls == other_calls == ["jax_flash_backward", "jax_flash_forward"]
    jax.tree.map(np.testing.assert_array_equal, got, want)


@BOTH_LINKS
def test_checkpoint_names_spare_the_second_forward_pass(forward_mode, platform):
    policy = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")

    def f(*args):
        return loss(functools.partial(attention, forward_mode=forward_mode), *(2 * x for x in args))

    jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(f, policy=policy)))(*QKV)
    assert len(equations(jaxpr, "jax_flash_forward")) == 1


def test_only_sinks_move(platform):
    def along_sinks(attend):
        @jax.jit
        def f(q, sinks):
            return loss(functools.partial(attend, sinks=sinks), q, *QKV[1:])

        sinks, q = jnp.arange(4.0), QKV[0]
        return (
            jax.jvp(functools.partial(f, q), (sinks,), (sinks + 1,)),
            jax.hessian(functools.partial(f, q))(sinks),
            jax.jvp(lambda s: jax.grad(f)(q, s), (sinks,), (sinks + 1,)),
        )

    with jax.default_matmul_precision("highest"):
        got = along_sinks(functools.partial(attention, forward_mode=True))
        assert_trees_close(got, along_sinks(reference), atol=1e-4)


@BOTH_LINKS
def test_third_derivatives_are_refused(forward_mode, platform):
    f = functools.partial(loss, attention, forward_mode=forward_mode)
    with pytest.raises(NotImplementedError, match=r'third.*implementation="xla"'):
        jax.grad(lambda *x: jnp.sum(jax.grad(lambda *x: jnp.sum(jax.grad(f)(*x)))(*x)))(*QKV)
    if forward_mode:
        with pytest.raises(NotImplementedError, match=r'third.*implementation="xla"'):
            jax.jacfwd(jax.jacfwd(jax.jacfwd(f)))(*QKV)


# ---- Rows beyond the lengths, nothing at all, memory ---------------------------------------------------------


def gradient_and_tangents(attend, **options):
    """The tangent, and the gradient with its derivative."""

    def f(*args):
        return attend(*args, **options)

    def both(primals, tangents):
        _, tout = jax.jvp(f, primals, tangents)
        gradient = jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2))
        return tout, jax.jvp(gradient, primals, tangents)

    return jax.jit(both)


def test_nothing_leaks_from_beyond_the_lengths(platform):
    check_that_nothing_leaks()


def test_nothing_leaks_from_beyond_the_lengths_in_blocks(blocks):
    check_that_nothing_leaks()
    assert blocks


def check_that_nothing_leaks():
    options = LENGTHS | dict(scale=jnp.float32(0.5))
    primals = [x.copy() for x in QKV]
    want = gradient_and_tangents(attention, **options)(primals, primals)
    primals[0][0, 3:] = np.nan
    primals[1][1], primals[2][1] = np.inf, np.nan
    got = gradient_and_tangents(attention, **options)(primals, primals)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_nothing_leaks_from_beyond_the_lengths_of_queries_with_sinks(platform):
    """Their log-sum-exp is the sink, which is finite."""
    lengths = dict(query_seq_lengths=np.array([3, 5], np.int32), sinks=jnp.ones(4))

    def tangent_of_gradient(dlse):
        def gradient(*args):
            f = functools.partial(attention, return_residual=True, **lengths)
            (out, _), pullback = jax.vjp(f, *args)
            return pullback((jnp.cos(out), dlse))

        return jax.jit(lambda *x: jax.jvp(gradient, x, x)[1])(*QKV)

    dlse = jnp.ones(QKV[0].shape[:-1])
    got = tangent_of_gradient(dlse.at[0, 3:].set(jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, got, tangent_of_gradient(dlse))


@pytest.mark.parametrize("shape", [(0, 5, 7, 4), (2, 0, 7, 4), (2, 5, 0, 4), (2, 5, 7, 0)], ids=str)
def test_nothing_to_do(shape, platform):
    batch, t, s, n = shape
    args = [np.ones(x, np.float32) for x in [(batch, t, n, 3), (batch, s, n // 2, 3), (batch, s, n // 2, 6)]]
    got = gradient_and_tangents(attention)(args, args)
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, 0.0), got)


def test_no_array_of_all_scores(platform):
    args = [np.ones((1, 2100, 1, 4), np.float32)] * 3
    text = gradient_and_tangents(attention, is_causal=True).lower(args, args).compile().as_text()
    sizes = [np.prod([int(n) for n in shape.split(",")]) for shape in re.findall(r"f32\[([\d,]+)\]", text)]
    assert 2100 * 4 <= max(sizes) < 2100 * 2100 / 4


def test_export_with_symbolic_sizes():
    """One program for lengths below and above those of a block."""
    batch, t, s = jax.export.symbolic_shape("B, T, S")
    types = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in [(batch, t, 2, 4), (batch, s, 2, 4), (batch, s, 2, 4)]
    ]
    known = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jax_flash.ffi_targets()]
    f = gradient_and_tangents(attention, is_causal=True)
    exported = jax.export.export(f, platforms=["cpu"], disabled_checks=known)(types, types)
    for batch, t, s in ((2, 5, 7), (1, 130, 70)):
        args = [
            RNG.standard_normal(shape).astype(np.float32)
            for shape in [(batch, t, 2, 4), *2 * [(batch, s, 2, 4)]]
        ]
        want = gradient_and_tangents(reference, is_causal=True)(args, args)
        assert_trees_close(exported.call(args, args), want, atol=1e-3)


# ---- Sharding ----------------------------------------------------------------------------------------------

SHARDINGS = {"batch": P("x"), "heads": P(None, None, "x")}


def mesh() -> Mesh:
    return Mesh(np.array(jax.devices("cpu")), ("x",))


def arrays_to_shard() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [
        rng.standard_normal(shape).astype(np.float32) for shape in [(8, 6, 16, 4), (8, 9, 8, 4), (8, 9, 8, 4)]
    ]


@pytest.mark.parametrize("biased", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("spec", SHARDINGS.values(), ids=SHARDINGS.keys())
def test_sharded_jit_gathers_nothing(spec, biased):
    args = arrays_to_shard()
    options = dict(bias=np.ones((1, 16, 6, 9), np.float32)) if biased else {}
    f = gradient_and_tangents(attention, **options)
    placed = jax.device_put(args, NamedSharding(mesh(), spec))
    got = f(placed, placed)
    assert_trees_close(got, gradient_and_tangents(reference, **options)(args, args))
    for x in jax.tree.leaves(got):
        assert x.sharding.is_equivalent_to(placed[0].sharding, 4)
    text = f.lower(placed, placed).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@pytest.mark.parametrize("spec", SHARDINGS.values(), ids=SHARDINGS.keys())
def test_sharded_directions_gather_nothing(spec):
    args = arrays_to_shard()
    placed = jax.device_put(args, NamedSharding(mesh(), spec))

    def many(attend):
        f = gradient_and_tangents(attend)
        return jax.jit(lambda x: jax.vmap(lambda c: f(x, [c * y for y in x]))(jnp.arange(1.0, 3.0)))

    assert_trees_close(many(attention)(placed), many(reference)(args), atol=1e-3)
    text = many(attention).lower(placed).compile().as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text


@BOTH_LINKS
def test_shard_map(forward_mode):
    args = arrays_to_shard()
    bias = np.ones((6, 9), np.float32)  # replicated

    def composed(attend, wrap, primals):
        def f(*args):
            return wrap(lambda *args: attend(*args))(*args)

        def gradient(*args):
            return jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 3))(*args)

        tangent = jax.jvp(f, primals, primals)[1] if forward_mode else None
        return tangent, jax.jvp(gradient, primals, primals)

    def mapped(f):
        return jax.shard_map(f, mesh=mesh(), in_specs=(P("x"), P("x"), P("x"), P()), out_specs=P("x"))

    attend = functools.partial(attention, forward_mode=forward_mode)
    got = jax.jit(functools.partial(composed, attend, mapped))((*args, bias))
    want = jax.jit(functools.partial(composed, reference, lambda f: f))((*args, bias))
    assert_trees_close(got, want, atol=1e-3)


@pytest.mark.parametrize("is_jitted", quick.rows({"jit": True, "eager": False}, quick=["jit"]))
@BOTH_LINKS
def test_explicit_sharding(forward_mode, is_jitted):
    devices = jax.devices("cpu")
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2, devices=devices)
    operands = dict(
        bias=np.ones((1, 16, 6, 9), np.float32), sinks=np.ones(16, np.float32), scale=np.float32(0.6)
    )

    def composed(attend, args):
        def f(q, k, v, operands):
            return attend(q, k, v, forward_mode=forward_mode, **operands)

        def gradient(*args):
            return jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1, 2, 3))(*args)

        def norm(*args):
            return sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient(*args)))

        tangent = jax.jvp(f, args, args)[1] if forward_mode else None
        return tangent, jax.jvp(gradient, args, args), jax.grad(norm, (0, 3))(*args)

    args = arrays_to_shard()
    want = jax.jit(functools.partial(composed, reference))((*args, operands))
    f = functools.partial(composed, attention)
    with jax.set_mesh(mesh):
        placed = jax.device_put(args, NamedSharding(mesh, P("x", None, "y")))
        got = (jax.jit(f) if is_jitted else f)((*placed, jax.tree.map(jnp.asarray, operands)))
    assert jax.typeof(got[1][0][0]).sharding.spec == P("x", None, "y", None)
    assert_trees_close(got, want, rtol=1e-3, atol=2e-2)
