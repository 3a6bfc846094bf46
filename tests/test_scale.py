"""A scale that is an array, such as a learned temperature, and its gradient."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import CASES, DTYPES
from closeness import assert_close
from jax.test_util import check_grads

import jax_flash

NAMES = ["full", "causal blocks", "groups of 8", "lengths", "bias", "soft cap", "dropout", "head dim 40"]
SCALED = [case for case in CASES if case.name in NAMES]


def exact(case, dtype: str, scale: float, naive: str | None = None) -> tuple[oracle.Result, float]:
    """The exact result, and the gradient of the scale, derived from that of the queries."""
    options = case.static | case.operands(DTYPES[dtype]) | {"scale": scale}
    if "dropout_seed" in options:
        options["keep"] = harness.kept(case, int(options.pop("dropout_seed")))
    if naive is not None:
        options["arithmetic"] = oracle.arithmetic_of(naive)
    inputs = case.inputs(DTYPES[dtype])
    result = oracle.attention(*inputs, **options)
    return result, (result.dq * inputs.q.astype(np.float64)).sum() / scale


def run(case, dtype: str, scale, precision=None) -> tuple[oracle.Result, jax.Array]:
    @jax.jit
    def f(q, k, v, dout, dlse, operands, scale):
        def call(q, k, v, scale):
            options = dict(return_residual=True, precision=precision, scale=scale)
            return harness.call(q, k, v, operands, **case.static, **options)

        (out, lse), vjp = jax.vjp(call, q, k, v, scale)
        *gradients, dscale = vjp((dout, dlse))
        return oracle.Result(out, lse, *gradients), dscale

    with harness.x64(dtype):
        return jax.tree.map(np.asarray, f(*case.inputs(DTYPES[dtype]), case.operands(DTYPES[dtype]), scale))


@pytest.mark.parametrize("scale", quick.rows([0.1, -0.15], quick=[-0.15]))
@quick.KINDS
@pytest.mark.parametrize("case", SCALED, ids=str)
def test_is_close_to_exact(case, kind, scale, platform):
    dtype, precision, rule = harness.kind(platform, kind)
    got, dscale = run(case, dtype, np.float32(scale), precision)
    scale = float(np.float32(scale))
    want, want_dscale = exact(case, dtype, scale)
    naive, naive_dscale = None, None
    if rule in ("bfloat16", "float16", "tfloat32"):
        naive, naive_dscale = exact(case, dtype, scale, rule)
    for name in oracle.Result._fields:
        assert_close(
            getattr(got, name),
            getattr(want, name),
            "float32" if name == "lse" and rule in ("bfloat16", "float16") else rule,
            num_keys=case.seqlen_kv,
            naive=None if naive is None else getattr(naive, name),
            name=name,
        )
    assert dscale.dtype == np.float32
    size = np.abs(want.dq * case.inputs(DTYPES[dtype]).q.astype(np.float64)).sum() / abs(scale)
    limit = {"float64": 1e-12, "float32": 1e-6}.get(rule) or 2 * abs(naive_dscale - want_dscale) / size + 3e-4
    assert abs(dscale - want_dscale) <= limit * size + 1e-7 * abs(want_dscale)  # it is float32, as the scale


def test_gradient_check():
    q, k, v = (x[:, :24].astype(np.float64) for x in CASES[0].inputs(np.float64)[:3])
    with harness.x64("float64"):
        check_grads(
            lambda q, k, scale: jax_flash.flash_attention(q, k, v, scale=scale, is_causal=True),
            (q, k, np.float64(0.2)),
            order=1,
            modes=["rev"],
        )


def test_at_zero_all_keys_weigh_the_same_and_there_is_a_gradient(platform):
    case = next(case for case in CASES if case.name == "full")
    got, dscale = run(case, "float32", np.float32(0), "highest")
    assert_close(got.out, exact(case, "float32", 1e-30)[0].out, "float32", num_keys=80)
    want = exact(case, "float32", 1e-12)[1]
    np.testing.assert_allclose(dscale, want, rtol=1e-4)
    np.testing.assert_array_equal(got.dq, 0)


@pytest.mark.parametrize("scale", [10.0, 100.0])
def test_gradients_of_float16_keep_their_digits(scale, platform):
    """A temperature of unit vectors: gradients without the scale would be below float16's normal numbers."""
    rng = np.random.default_rng(0)
    q, k, v, dout = rng.standard_normal((4, 1, 128, 1, 64))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    q, k, v, dout = (x.astype(np.float16) for x in (q, k, v, 1e-4 * dout))
    call = functools.partial(jax_flash.flash_attention, value=v)
    vjp = jax.vjp(lambda q, k, scale: call(q, k, scale=scale), q, k, jnp.float32(scale))[1]
    dq, dk, _ = vjp(dout)
    want = oracle.attention(q, k, v, dout, scale=scale)
    for got, exact in ((dq, want.dq), (dk, want.dk)):
        assert np.linalg.norm(np.asarray(got, np.float64) - exact) <= 2e-3 * np.linalg.norm(exact)


def test_takes_the_largest_numbers(platform):
    tiny = np.full((1, 4, 1, 16), 1e-20, np.float32)
    one = np.ones_like(tiny)
    for implementation in (None, "xla"):
        call = functools.partial(
            jax_flash.flash_attention, tiny, 1e-8 * tiny, one, implementation=implementation
        )
        np.testing.assert_array_equal(call(scale=jnp.float32(3e38)), one)


def test_nan_beyond_the_lengths_does_not_reach_the_gradient(platform):
    case = next(case for case in CASES if case.name == "lengths")
    options = case.static | case.operands(np.float32)
    q, k, v, _, _ = case.inputs(np.float32)
    poisoned = q.copy()
    for b, length in enumerate(options["query_seq_lengths"]):
        poisoned[b, length:] = np.nan
    gradient = jax.jit(
        jax.grad(
            lambda scale, q: jnp.sum(jnp.sin(jax_flash.flash_attention(q, k, v, scale=scale, **options)))
        )
    )
    assert gradient(0.3, poisoned) == gradient(0.3, q)


@pytest.mark.parametrize("implementation", [None, "xla"], ids=["fused", "xla"])
@pytest.mark.parametrize(
    "scale", [jnp.float32(0.3), np.array(0.3, np.float32), jnp.bfloat16(0.5), jnp.int32(2)]
)
def test_takes_any_scalar_array(scale, implementation):
    q, k, v = CASES[0].inputs(np.float32)[:3]
    call = functools.partial(jax_flash.flash_attention, q, k, v, implementation=implementation)
    np.testing.assert_allclose(call(scale=scale), call(scale=float(scale)), rtol=1e-5, atol=1e-6)


def test_vmap_over_scales(platform):
    q, k, v = CASES[0].inputs(np.float32)[:3]
    scales = jnp.array([0.1, 0.2, 0.5])
    call = functools.partial(jax_flash.flash_attention, q, k, v, precision="highest")
    got = jax.vmap(lambda scale: call(scale=scale))(scales)
    np.testing.assert_allclose(got, [call(scale=float(x)) for x in scales], rtol=1e-5, atol=1e-6)


class Parameter:
    """An object with `__jax_array__`, like the parameters of some libraries."""

    def __jax_array__(self):
        return jnp.float32(0.3)


def test_takes_what_becomes_an_array():
    q, k, v = CASES[0].inputs(np.float32)[:3]
    got = jax_flash.flash_attention(q, k, v, scale=Parameter())
    np.testing.assert_array_equal(got, jax_flash.flash_attention(q, k, v, scale=jnp.float32(0.3)))
