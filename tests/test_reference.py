"""The reference (implementation="xla") against the oracle, and where meanings agree against jax.nn."""

import functools
import inspect

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import CASES, DTYPES, Case
from closeness import assert_close
from strategies import OF_SEQUENCES

import jax_flash

attention = functools.partial(jax_flash.flash_attention, implementation="xla", precision="highest")
ALL = (0, 1, 2)


def option_names(case: Case) -> set[str]:
    return {name for name, _ in case.options}


# Plain XLA has no tiles. Cases whose sizes are for the kernels run only if no other case has their options.
_EVERYTHING = [case for case in CASES if case.name in ("everything", "everything at once")]
_OTHERS = [case for case in CASES[::3] if case in OF_SEQUENCES or case.name == "decode"] + _EVERYTHING
_CASES = _OTHERS + [
    case
    for case in CASES[::3]
    if case not in _OTHERS and not any(option_names(case) <= option_names(other) for other in _OTHERS)
]
# The quick run has test_options, too.
QUICK = [
    "full",
    "everything",
    "bias, soft cap",
    "alibi, causal, offset",
    "segments, causal",
    "dropout, causal",
]


@pytest.mark.parametrize(
    ("case", "dtype"),
    quick.in_turn({case.name: case for case in _CASES}, ["float64", "bfloat16"], QUICK),
)
def test_is_close_to_exact(case, dtype):
    # The transpose of out = P v rounds dp to the dtype of v.
    is_rounded = dtype == "bfloat16"
    harness.check(harness.run(case, dtype, implementation="xla"), case, dtype, dtype, is_rounded=is_rounded)


CASE = Case("reference", 2, 6, 9, 4, 2, 8, 5)
RNG = np.random.default_rng(0)
IDS = RNG.integers(-1, 2, (2, 6)).astype(np.int32), RNG.integers(-1, 2, (2, 9)).astype(np.int32)
OPTIONS = {
    "bias": dict(bias=RNG.standard_normal((2, 4, 6, 9))),
    "bias of heads": dict(bias=RNG.standard_normal((1, 4, 1, 1)), is_causal=True),
    "bias of keys": dict(bias=RNG.standard_normal((9,))),
    "bias, soft cap": dict(bias=3 * RNG.standard_normal((4, 6, 9)), logits_soft_cap=2.0),
    "mask": dict(mask=RNG.random((2, 4, 6, 9)) < 0.5),
    "mask of keys": dict(mask=RNG.random((2, 1, 1, 9)) < 0.5, is_causal=True, query_offset=np.int32(3)),
    "segment ids": dict(segment_ids=IDS),
    "segment ids, window": dict(segment_ids=IDS, local_window_size=(3, 4)),
    "sinks": dict(sinks=RNG.standard_normal(4)),
    "sinks, no keys": dict(sinks=RNG.standard_normal(4), key_value_seq_lengths=np.array([0, 4], np.int32)),
    "sinks, lengths": dict(sinks=RNG.standard_normal(4), query_seq_lengths=np.array([2, 6], np.int32)),
    "everything": dict(
        bias=RNG.standard_normal((4, 6, 9)),
        mask=RNG.random((2, 1, 6, 9)) < 0.8,
        segment_ids=IDS,
        sinks=RNG.standard_normal(4),
        is_causal=True,
        query_offset=np.array([2, 4], np.int32),
        logits_soft_cap=3.0,
        scale=0.5,
    ),
}


@pytest.mark.parametrize("dtype", quick.rows(["float64", "float32"], quick=["float32"]))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options, dtype):
    q, k, v, dout, dlse = CASE.inputs(DTYPES[dtype])
    options = {
        name: x.astype(DTYPES[dtype]) if name in ("bias", "sinks") else x for name, x in options.items()
    }
    want = oracle.attention(q, k, v, dout, dlse, **options)
    static = {
        name: options.pop(name) for name in ("is_causal", "logits_soft_cap", "scale") if name in options
    }
    window = options.pop("local_window_size", None)

    @jax.jit
    def f(q, k, v, dout, dlse, options):
        def call(q, k, v):
            return attention(q, k, v, return_residual=True, local_window_size=window, **static, **options)

        (out, lse), vjp = jax.vjp(call, q, k, v)
        return oracle.Result(out, lse, *vjp((dout, dlse)))

    with harness.x64(dtype):
        got = f(q, k, v, dout, dlse, options)
        for name in want._fields:
            assert_close(getattr(got, name), getattr(want, name), dtype, num_keys=9, name=name)


def test_one_array_of_segment_ids():
    q, k, v, *_ = Case("square", 2, 6, 6, 2, 2, 8).inputs(np.float32)
    got = jax.jit(attention)(q, k, v, segment_ids=IDS[0])
    assert_close(got, oracle.attention(q, k, v, segment_ids=IDS[0]).out, "float32", num_keys=6)


@pytest.mark.parametrize(
    ("option", "shape"), [("bias", (2, 4, 6, 9)), ("bias", (4, 1, 9)), ("bias", (9,)), ("sinks", (4,))]
)
def test_gradients_of_bias_and_sinks_are_summed_over_broadcast_axes(option, shape):
    q, k, v, dout, _ = CASE.inputs(np.float32)
    x = RNG.standard_normal(shape).astype(np.float32)

    def f(x):
        return jnp.sum(attention(q, k, v, is_causal=True, **{option: x}) * dout)

    got = jax.jit(jax.grad(f))(x)
    assert got.shape == shape

    def exact(x):
        return (oracle.attention(q, k, v, is_causal=True, **{option: x}).out * dout).sum()

    for index in np.ndindex(shape) if np.prod(shape) < 40 else [(0, 0, 0, 0), (1, 3, 5, 8), (1, 2, 4, 3)]:
        step = np.zeros(shape)
        step[index] = 1e-5
        want = (exact(x + step) - exact(x - step)) / 2e-5
        np.testing.assert_allclose(got[index], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_bias_on_16_bit_inputs(dtype):
    q, k, v, dout, _ = CASE.inputs(DTYPES[dtype])
    bias = RNG.standard_normal((4, 6, 9)).astype(np.float32)
    out, vjp = jax.vjp(jax.jit(lambda bias: attention(q, k, v, bias)), bias)
    (dbias,) = vjp(jnp.asarray(dout))
    assert out.dtype == DTYPES[dtype]
    assert dbias.dtype == np.float32
    want, naive = (
        oracle.attention(q, k, v, bias=bias, **more).out
        for more in ({}, {"arithmetic": oracle.arithmetic_of(dtype)})
    )
    assert_close(out, want, dtype, num_keys=9, naive=naive)


def test_nan_in_the_bias_of_a_hidden_pair_changes_nothing():
    q, k, v, dout, _ = CASE.inputs(np.float32)
    mask = RNG.random((6, 9)) < 0.5

    @jax.jit
    def gradients(bias):
        f = functools.partial(attention, mask=mask, logits_soft_cap=2.0)
        return jax.vjp(f, q, k, v, bias)[1](jnp.asarray(dout))

    want, got = (gradients(np.where(mask, 1.0, x).astype(np.float32)) for x in (1.0, np.nan))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


# ---- jax.nn -----------------------------------------------------------------------------------------------

LENGTHS = np.array([3, 6], np.int32)
JAX_NN = {
    "full": {},
    "causal": dict(is_causal=True),
    "scale": dict(scale=0.3),
    "bias": dict(bias=np.linspace(-1, 1, 54, dtype=np.float32).reshape(6, 9)[None, None]),
    "mask": dict(mask=np.arange(54).reshape(1, 1, 6, 9) % 4 > 0),
    "lengths of keys": dict(key_value_seq_lengths=LENGTHS),
    # Alone, jax.nn ignores a window before jax 0.8.
    "window, causal": dict(local_window_size=(2, 3), is_causal=True),
    "window of one number": dict(local_window_size=2, key_value_seq_lengths=np.array([9, 9], np.int32)),
}


@pytest.mark.parametrize("options", JAX_NN.values(), ids=JAX_NN.keys())
def test_swapping_the_import_changes_nothing(options):
    q, k, v, dout, _ = CASE.inputs(np.float32)
    v, dout = np.repeat(v, 2, -1)[..., :8], np.repeat(dout, 2, -1)[..., :8]

    @functools.partial(jax.jit, static_argnums=0)
    def results(f):
        out, vjp = jax.vjp(lambda *args: f(*args, **options), q, k, v)
        return out, *vjp(jnp.asarray(dout))

    with jax.default_matmul_precision("highest"):
        for got, want in zip(results(attention), results(jax.nn.dot_product_attention), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(
    "return_residual" not in inspect.signature(jax.nn.dot_product_attention).parameters,
    reason="this version of jax.nn has no return_residual",
)
def test_residual_of_jax_nn_is_the_same():
    q, k, v, *_ = CASE.inputs(np.float32)
    v = np.repeat(v, 2, -1)[..., :8]
    got, want = (
        jax.jit(functools.partial(f, return_residual=True))(q, k, v)
        for f in (attention, jax.nn.dot_product_attention)
    )
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# ---- The oracle -------------------------------------------------------------------------------------------


def test_oracle_agrees_with_a_loop():
    """One row at a time, as a textbook has it."""
    q, k, v, *_ = CASE.inputs(np.float64)
    lengths, offset = np.array([7, 9]), np.array([1, 3])
    got = oracle.attention(
        q, k, v, scale=0.4, is_causal=True, query_offset=offset, key_value_seq_lengths=lengths,
        local_window_size=(3, 1), logits_soft_cap=1.5,
    )  # fmt: skip
    for b, i, n in np.ndindex(2, 6, 4):
        position = i + offset[b]
        keys = list(range(max(position - 3, 0), min(position, lengths[b] - 1) + 1))
        s = np.array([1.5 * np.tanh(0.4 * (q[b, i, n] @ k[b, j, n // 2]) / 1.5) for j in keys])
        weights = np.exp(s) / np.exp(s).sum()
        np.testing.assert_allclose(got.out[b, i, n], weights @ v[b, keys, n // 2], rtol=1e-12)
        np.testing.assert_allclose(got.lse[b, i, n], np.log(np.exp(s).sum()), rtol=1e-12)


def test_oracle_gradients_agree_with_differences():
    q, k, v, dout, dlse = CASE.inputs(np.float64)
    options = dict(is_causal=True, query_offset=2, logits_soft_cap=1.5, local_window_size=(4, 1))
    options |= dict(sinks=np.array([0.5, -0.5, 1.0, 0.0]))
    result = oracle.attention(q, k, v, dout, dlse, **options)

    def loss(*args):
        out, lse = oracle.attention(*args, **options)[:2]
        return (out * dout).sum() + (lse * dlse).sum()

    for i in range(3):
        for _ in range(3):
            direction = RNG.standard_normal((q, k, v)[i].shape)
            plus, minus = (
                loss(
                    *(
                        x + sign * 1e-5 * direction * (i == a) if a == i else x
                        for a, x in enumerate((q, k, v))
                    )
                )
                for sign in (1, -1)
            )
            np.testing.assert_allclose(
                (result.dq, result.dk, result.dv)[i].ravel() @ direction.ravel(),
                (plus - minus) / 2e-5,
                rtol=1e-6,
            )
