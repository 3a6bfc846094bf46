"""The backward pass against exact gradients, over the table of cases."""

import functools
import os

import emulated
import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import CASES, DTYPES, PAIRS, Case, Mask, Segments

import jax_flash
from jax_flash import _kernel_choice


@pytest.mark.parametrize(("case", "kind"), quick.cases_and_kinds(CASES))
def test_is_close_to_exact(case, kind, platform):
    dtype, precision, rule = harness.kind(platform, kind)
    got, gradients = harness.run_with_operands(case, dtype, precision=precision)
    assert {got.dq.dtype, got.dk.dtype, got.dv.dtype} == {np.dtype(DTYPES[dtype])}
    harness.check(got, case, dtype, rule)
    harness.check_operands(gradients, case, dtype, rule)


# Not TF32, whose errors are large beside these sums; the cases above test it.
@pytest.mark.parametrize(("case", "wanted"), quick.in_turn(PAIRS, ["bfloat16", "float32"]))
def test_pair_of_options_is_close_to_exact(case, wanted, platform):
    for dtype, precision, rule in harness.KINDS[platform]:
        if rule == wanted:
            got, gradients = harness.run_with_operands(case, dtype, precision=precision)
            harness.check(got, case, dtype, rule)
            harness.check_operands(gradients, case, dtype, rule)


@pytest.mark.parametrize("head_dim", [32, 64, 256])
@pytest.mark.parametrize("lengths", [(64, 61), (200, 190)], ids=["short", "long"])
def test_errors_of_float32_cancel(lengths, head_dim, platform):
    """An operand that is rounded to TF32 twice would be too large on average."""
    (t, s), rng = lengths, np.random.default_rng(0)
    arrays = [rng.standard_normal((2, n, 2, head_dim)).astype(np.float32) for n in (t, s, s, t)]
    out, vjp = jax.vjp(jax_flash.flash_attention, *arrays[:3])
    want = oracle.attention(*arrays)
    for name, x in zip(("out", "dq", "dk", "dv"), (out, *vjp(arrays[3])), strict=True):
        exact = getattr(want, name)
        assert abs(np.vdot(x - exact, exact)) < 5e-5 * np.vdot(exact, exact), name


GROUPED = [case for case in CASES if case.num_kv_heads < case.num_heads]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    ("case", "part_heads"),
    [(case, n) for case in GROUPED for n in (1, 2) if case.num_heads // case.num_kv_heads % (2 * n) == 0],
    ids=str,
)
def test_parts_of_the_query_heads_are_as_close(case, part_heads, deterministic, platform, monkeypatch):
    """The tables' cases are too small for Hopper's kernels to divide the query heads of a key head."""
    if platform == "cpu":
        pytest.skip("the CPU has no such parts")
    asked = []
    monkeypatch.setattr(
        _kernel_choice, "num_head_parts", lambda *call: asked.append(call) or case.num_heads // part_heads
    )
    jax.clear_caches()
    dtype, precision, rule = next(kind for kind in harness.KINDS[platform] if kind[0] == "bfloat16")
    got, gradients = harness.run_with_operands(case, dtype, precision=precision, deterministic=deterministic)
    assert asked
    harness.check(got, case, dtype, rule)
    harness.check_operands(gradients, case, dtype, rule)


DETERMINISTIC = [
    "bias",
    "causal blocks",
    "causal, negative offset",
    "dropout",
    "everything",
    "groups of 8",
    "head dim 24",
    "head dim 24, lengths",
    "head dim 72, window",
    "lengths",
    "lengths beyond both",
    "tiles, lengths",
    "tiles, mask",
    "tiles, window",
    "window of one",
    "window with no limit on the left",
    "window with no limit on the right",
]


@pytest.mark.parametrize(
    ("case", "kind"), quick.cases_and_kinds([case for case in CASES if case.name in DETERMINISTIC])
)
def test_deterministic_is_as_close(case, kind, platform):
    dtype, precision, rule = harness.kind(platform, kind)
    got, gradients = harness.run_with_operands(case, dtype, precision=precision, deterministic=True)
    harness.check(got, case, dtype, rule)
    harness.check_operands(gradients, case, dtype, rule)


# The head dim, options, whether the caller gives memory for sums of dq at any head dim, and whether the kernel adds to
# them in turns.
TURNS = {
    "64": (64, {}, False, True),
    "40, causal": (40, dict(is_causal=True), False, True),
    "24, window": (24, dict(local_window_size=(100, 20)), False, True),
    "96 with memory": (96, dict(is_causal=True), True, True),
    "128 with memory": (128, {}, True, True),
    "72": (72, {}, False, False),
    "64, any order": (64, dict(deterministic=False), False, False),
    "64, mask": (64, dict(mask=Mask("11TS", visible=0.5)), True, False),
    "64, segments": (64, dict(segment_ids=Segments((0, 1))), True, False),
    "192 with memory": (192, {}, True, False),
}


@pytest.mark.parametrize(("head_dim", "options", "has_memory", "in_turns"), TURNS.values(), ids=TURNS.keys())
def test_dq_is_added_in_turns(head_dim, options, has_memory, in_turns, platform, monkeypatch):
    """Results do not show whether Hopper's kernel adds dq, when deterministic, or another one computes it."""
    if platform == "cpu" or os.environ.get("JAX_FLASH_EMULATE") != "90":
        pytest.skip("only the emulator of Hopper counts turns")
    if has_memory:
        monkeypatch.setattr(_kernel_choice, "sums_dq", lambda *_, **__: True)
        monkeypatch.setattr(_kernel_choice, "num_shared_heads", lambda *_, **__: 0)
        jax.clear_caches()
    options = dict(deterministic=True) | options
    case = Case("turns", 1, 150, 300, 2, 1, head_dim, head_dim, tuple(options.items()))
    arrivals = emulated.library().num_arrivals
    before = arrivals()
    harness.check(harness.run(case, "bfloat16"), case, "bfloat16", "bfloat16")
    assert (arrivals() > before) == in_turns


def test_without_the_gradient_of_lse(platform):
    case = CASES[0]
    q, k, v, dout, _ = case.inputs(np.float32)
    f = jax.jit(lambda q, k, v: jax_flash.flash_attention(q, k, v, precision="highest"))
    out, vjp = jax.vjp(f, q, k, v)
    want = harness.oracle.attention(q, k, v, dout)
    got = harness.oracle.Result(out, want.lse, *vjp(jnp.asarray(dout)))
    for name in ("out", "dq", "dk", "dv"):
        harness.assert_close(getattr(got, name), getattr(want, name), "float32", num_keys=80, name=name)


def test_with_the_gradient_of_lse_alone(platform):
    q, k, v, dout, dlse = CASES[0].inputs(np.float32)

    def f(q, k, v):
        lse = jax_flash.flash_attention(q, k, v, precision="highest", return_residual=True)[1]
        return (lse * dlse).sum()

    want = harness.oracle.attention(q, k, v, 0 * dout, dlse)
    dq, dk, dv = jax.grad(f, argnums=(0, 1, 2))(q, k, v)
    harness.assert_close(dq, want.dq, "float32", num_keys=80, name="dq")
    harness.assert_close(dk, want.dk, "float32", num_keys=80, name="dk")
    np.testing.assert_array_equal(dv, 0.0)


@pytest.mark.parametrize("cotangent", [np.nan, np.inf, 1e30])
def test_cotangent_of_an_infinite_lse_is_ignored(cotangent, platform):
    q, k, v, dout, dlse = CASES[0].inputs(np.float32)
    lengths = np.array([50, 80], np.int32)
    dlse = np.where(np.arange(80)[:, None] >= lengths[:, None, None], cotangent, dlse).astype(np.float32)
    f = jax.jit(
        lambda q, k, v: jax_flash.flash_attention(
            q, k, v, precision="highest", return_residual=True, query_seq_lengths=lengths
        )
    )
    (out, lse), vjp = jax.vjp(f, q, k, v)
    want = harness.oracle.attention(q, k, v, dout, dlse, query_seq_lengths=lengths)
    got = harness.oracle.Result(out, lse, *vjp((jnp.asarray(dout), jnp.asarray(dlse))))
    for name in want._fields:
        harness.assert_close(getattr(got, name), getattr(want, name), "float32", num_keys=80, name=name)


@pytest.mark.parametrize("argnums", [0, 1, 2, (0, 2), (1, 2)], ids=str)
def test_gradients_of_some_inputs(argnums, platform):
    q, k, v, *_ = CASES[0].inputs(np.float32)

    def loss(q, k, v):
        return jnp.sin(jax_flash.flash_attention(q, k, v, deterministic=True)).sum()

    every = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    some = jax.grad(loss, argnums=argnums)(q, k, v)
    pairs = [(some, argnums)] if isinstance(argnums, int) else zip(some, argnums, strict=True)
    for got, i in pairs:
        np.testing.assert_array_equal(got, every[i])


def test_long_sums_stay_exact_in_float32():
    """Over 16 heads times 2,048 rows, the error of a sequential sum would grow with their number."""
    sizes = [(1, 2048, 16, 64), (1, 2048, 1, 64), (1, 2048, 1, 64), (1, 2048, 16, 64)]
    arrays = [np.random.default_rng(seed).standard_normal(size) for seed, size in enumerate(sizes)]

    def gradients(dtype):
        with harness.x64(dtype):
            *args, dout = (jnp.asarray(x.astype(np.float32), dtype) for x in arrays)
            return jax.jit(lambda args, dout: jax.vjp(jax_flash.flash_attention, *args)[1](dout))(args, dout)

    for name, got, want in zip(("dq", "dk", "dv"), gradients("float32"), gradients("float64"), strict=True):
        error = np.asarray(got, np.float64) - np.asarray(want)
        assert np.sqrt(np.mean(error**2) / np.mean(np.asarray(want) ** 2)) < 1e-6, name


def test_highest_is_as_exact_as_xla(platform):
    """Beside the exact results, by the norm of the error."""
    shape = (1, 256, 1, 64) if os.environ.get("JAX_FLASH_EMULATE") else (2, 1024, 4, 64)
    rng = np.random.default_rng(0)
    *inputs, dout = (rng.standard_normal(shape).astype(np.float32) for _ in range(4))
    want = harness.oracle.attention(*inputs, dout)

    def errors(attention) -> dict[str, float]:
        @jax.jit
        def forward_and_backward(q, k, v, dout):
            out, vjp = jax.vjp(attention, q, k, v)
            return out, *vjp(dout)

        with jax.default_matmul_precision("highest"):
            results = forward_and_backward(*inputs, dout)
        return {
            name: np.linalg.norm(np.asarray(x, np.float64) - getattr(want, name))
            / np.linalg.norm(getattr(want, name))
            for name, x in zip(("out", "dq", "dk", "dv"), results, strict=True)
        }

    of_xla = errors(jax.nn.dot_product_attention)
    ratios = {name: error / of_xla[name] for name, error in errors(jax_flash.flash_attention).items()}
    assert max(ratios.values()) < 2, ratios


@pytest.mark.parametrize("num_queries", [300, 1])
@pytest.mark.parametrize("forward_mode", [False, True], ids=["", "both modes"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("head_dim", [64, 72])
def test_rounding_of_lse_does_not_show(head_dim, dtype, forward_mode, num_queries, platform):
    """Two equal keys share rows whose logits are about a thousand: a last bit of lse is 6e-5 there.

    With 72 columns the scale is no power of two, and a last bit of a logit that is rounded is as much.
    """
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((1, n, 1, head_dim)).astype(dtype) for n in (num_queries, 300, 300, num_queries)
    )
    dlse = rng.standard_normal((1, num_queries, 1)).astype(dtype)
    bias, tbias = np.zeros((2, 1, 1, num_queries, 300), dtype)
    tbias[:] = rng.standard_normal(tbias.shape)
    # Their logits are plus or minus about a thousand: where one is close to the others of its row, its own rounding
    # shows.
    direction = k[:, 100:101] / np.linalg.norm(k[:, 100])
    along = np.sum(q * direction, -1, keepdims=True)
    q += (np.sign(along) - along) * direction
    k[:, 100] *= 1024 * np.sign(along[:, 0])
    k[:, 101] = k[:, 100]
    logits = (
        q[0, :, 0].astype(np.longdouble)
        @ k[0, :, 0].T.astype(np.longdouble)
        / np.sqrt(np.longdouble(head_dim))
    )
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    # Derivatives that are linear in p. Others are differences, of which errors of another kind remain.
    exact = {"dv": p.T @ dout[0, :, 0], "dbias": p * dlse[0]}
    if forward_mode:
        exact |= {"tout": p @ v[0, :, 0], "tlse": np.sum(p * tbias[0, 0], 1)}

    def errors(**options):
        attention = functools.partial(jax_flash.flash_attention, precision="highest", **options)

        def out(v):
            return attention(q, k, v)

        def lse(bias):
            return attention(q, k, v, bias, return_residual=True)[1]

        found = {
            "dv": jax.jit(lambda v: jax.vjp(out, v)[1](dout)[0][0, :, 0])(v),
            "dbias": jax.jit(lambda bias: jax.vjp(lse, bias)[1](dlse)[0][0, 0])(bias),
        }
        if forward_mode:
            found |= {
                "tout": jax.jit(lambda v: jax.jvp(out, [v], [v])[1][0, :, 0])(v),
                "tlse": jax.jit(lambda bias: jax.jvp(lse, [bias], [tbias])[1][0, :, 0])(bias),
            }
        return {
            name: np.linalg.norm((np.asarray(x) - exact[name]).astype(float))
            / np.linalg.norm(exact[name].astype(float))
            for name, x in found.items()
        }

    with harness.x64(dtype):
        ours, of_xla = errors(forward_mode=forward_mode), errors(implementation="xla")
    limits = {name: 2 * (error + np.finfo(dtype).eps) for name, error in of_xla.items()}
    assert all(ours[name] < limit for name, limit in limits.items()), (ours, of_xla)
