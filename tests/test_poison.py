"""What must not be read, and what must not be swallowed: NaN and Inf in the inputs and in memory."""

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import DTYPES

import jax_flash

QUERIES, KEYS = 150, 140
LENGTHS = dict(query_seq_lengths=(65, 0, 150, 127), key_value_seq_lengths=(99, 140, 0, 64))
FLOATS = [np.nan, np.inf, -np.inf]


def arrays(dtype: str, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(4, QUERIES, 4, 40), (4, KEYS, 2, 40), (4, KEYS, 2, 24), (4, QUERIES, 4, 24), (4, QUERIES, 4)]
    q, k, v, dout, dlse = (rng.standard_normal(shape) for shape in shapes)
    lse_dtype = np.float64 if dtype == "float64" else np.float32
    return [x.astype(DTYPES[dtype]) for x in (q, k, v, dout)] + [dlse.astype(lse_dtype)]


def forward_and_backward(static: dict):
    @jax.jit
    def f(q, k, v, dout, dlse, operands):
        def attention(q, k, v):
            return jax_flash.flash_attention(q, k, v, return_residual=True, **static, **operands)

        (out, lse), vjp = jax.vjp(attention, q, k, v)
        return oracle.Result(out, lse, *vjp((dout, dlse)))

    return lambda *inputs: oracle.Result(*(np.asarray(x) for x in f(*inputs)))


def assert_same_bits(got: oracle.Result, want: oracle.Result) -> None:
    for name in want._fields:
        a, b = getattr(got, name), getattr(want, name)
        assert a.tobytes() == b.tobytes(), f"{name} differs in {(a != b).sum()} places"


@pytest.mark.parametrize("poison", FLOATS, ids=str)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kind", range(4))
def test_beyond_the_lengths_nothing_leaks(kind, is_causal, poison, platform):
    dtype, precision, _ = harness.KINDS[platform][kind]
    f = forward_and_backward(dict(deterministic=True, precision=precision, is_causal=is_causal))
    operands = {name: np.array(x, np.int32) for name, x in LENGTHS.items()}
    clean = arrays(dtype)
    poisoned = [x.copy() for x in clean]
    for b in range(4):
        for x in (poisoned[0], poisoned[3], poisoned[4]):
            x[b, LENGTHS["query_seq_lengths"][b] :] = poison
        for x in poisoned[1:3]:
            x[b, LENGTHS["key_value_seq_lengths"][b] :] = poison
    with harness.x64(dtype):
        want, got = f(*clean, operands), f(*poisoned, operands)
    assert_same_bits(got, want)
    for x in got[2:]:
        assert np.isfinite(x.astype(np.float64)).all()
    for b in range(4):
        queries, keys = (LENGTHS[name][b] for name in ("query_seq_lengths", "key_value_seq_lengths"))
        assert not got.out[b, queries:].any()
        assert np.isneginf(got.lse[b, queries:]).all()
        assert not got.dq[b, queries:].any()
        assert not got.dk[b, keys:].any()
        assert not got.dv[b, keys:].any()


@pytest.mark.parametrize("poison", FLOATS, ids=str)
def test_beyond_the_lengths_nothing_leaks_into_unordered_sums(poison, cuda):
    """The backward that sums in any order cannot be compared by bits: it must be as close as ever."""
    operands = {name: np.array(x, np.int32) for name, x in LENGTHS.items()}
    inputs = arrays("bfloat16")
    want = oracle.attention(*inputs, **operands)
    naive = oracle.attention(*inputs, **operands, arithmetic=oracle.arithmetic_of("bfloat16"))
    for b in range(4):
        for x in (inputs[0], inputs[3], inputs[4]):
            x[b, LENGTHS["query_seq_lengths"][b] :] = poison
        for x in inputs[1:3]:
            x[b, LENGTHS["key_value_seq_lengths"][b] :] = poison
    got = forward_and_backward({})(*inputs, operands)
    for name in ("dq", "dk", "dv"):
        harness.assert_close(
            getattr(got, name), getattr(want, name), "bfloat16", num_keys=KEYS, naive=getattr(naive, name)
        )


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_is_not_read_before_it_is_written(dtype, deterministic, platform):
    """Results and workspace lie where NaN was."""
    f = forward_and_backward(dict(deterministic=deterministic, is_causal=True))
    inputs = arrays(dtype)
    want = f(*inputs, {})
    for megabytes in (1, 4, 64):
        poison = [jnp.full((megabytes * 2**18 // 16,), jnp.nan) for _ in range(16)]
        jax.block_until_ready(poison)
        del poison
        got = f(*inputs, {})
        if deterministic or platform == "cpu":
            assert_same_bits(got, want)
        else:
            assert_same_bits(got._replace(dq=want.dq, dk=want.dk, dv=want.dv), want)
            for a, b in zip(got[2:], want[2:], strict=True):
                np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), atol=0.05)


@pytest.mark.parametrize("kind", range(4))
def test_nan_is_not_swallowed(kind, platform):
    """NaN in a query, or in a key or value it sees, makes the row NaN and leaves the lse of other rows."""
    dtype, precision, _ = harness.KINDS[platform][kind]
    f = forward_and_backward(dict(deterministic=True, precision=precision, is_causal=True))
    clean = arrays(dtype)
    with harness.x64(dtype):
        want = f(*clean, {})

        q, k, v, *_ = (x.copy() for x in clean)
        q[1, 70, 2, 3] = np.nan
        got = f(q, *clean[1:], {})
        assert np.isnan(got.out[1, 70, 2]).all()
        assert np.isnan(got.lse[1, 70, 2])
        assert np.isnan(got.dq[1, 70, 2]).all()
        assert np.isnan(got.dk[1, :71, 1]).all()
        others = np.isfinite(got.lse)
        assert others.sum() == others.size - 1
        np.testing.assert_array_equal(got.lse[others], want.lse[others])

        k[1, 70, 1, 3] = np.nan
        got = f(clean[0], k, *clean[2:], {})
        assert np.isnan(got.out[1, 70:, 2:]).all()
        assert np.isnan(got.lse[1, 70:, 2:]).all()
        assert np.isnan(got.dq[1, 70:, 2:]).all()
        np.testing.assert_array_equal(got.lse[1, :70], want.lse[1, :70])
        np.testing.assert_array_equal(got.lse[1, :, :2], want.lse[1, :, :2])
        np.testing.assert_array_equal(got.out[[0, 2, 3]], want.out[[0, 2, 3]])

        v[1, 70, 1, 3] = np.nan
        got = f(*clean[:2], v, *clean[3:], {})
        assert np.isnan(got.out[1, 70:, 2:, 3]).all()
        assert np.isnan(got.dq[1, 70:, 2:]).all()
        np.testing.assert_array_equal(got.lse, want.lse)
        np.testing.assert_array_equal(got.out[[0, 2, 3]], want.out[[0, 2, 3]])

        dout = clean[3].copy()
        dout[1, 70, 2, 3] = np.nan
        got = f(*clean[:3], dout, clean[4], {})
        assert np.isnan(got.dq[1, 70, 2]).all()
        assert np.isnan(got.dv[1, :71, 1, 3]).all()
        assert np.isnan(got.dk[1, :71, 1]).all()
        np.testing.assert_array_equal(got.out, want.out)


@pytest.mark.parametrize("value", [np.inf, -np.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@pytest.mark.parametrize("kind", range(4))
def test_inf_follows_the_reference(kind, operand, value, platform):
    """Full attention, where every row sees every key: the same places are NaN, Inf and finite."""
    dtype, precision, _ = harness.KINDS[platform][kind]
    inputs = arrays(dtype)
    inputs["qkv".index(operand)][1, 70, 1, 3] = value
    f = jax.jit(lambda q, k, v: jax_flash.flash_attention(q, k, v, precision=precision, return_residual=True))
    with harness.x64(dtype):
        got = [np.asarray(x).astype(np.float64) for x in f(*inputs[:3])]
    for a, b in zip(got, oracle.attention(*inputs[:3])[:2], strict=True):
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(a), test(b))
