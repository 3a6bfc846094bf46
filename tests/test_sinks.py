"""Sinks: gradients and edge cases. The table of cases combines them with other options."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import CASES, DTYPES
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash

attention = functools.partial(jax_flash.flash_attention, precision="highest")
WITH_SINKS = [case for case in CASES if "sinks" in dict(case.options)]


def random(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def arrays(batch: int = 2, n: int = 4, k: int = 2) -> tuple[np.ndarray, ...]:
    """q, k, v, sinks."""
    shapes = (batch, 12, n, 16), (batch, 20, k, 16), (batch, 20, k, 16), (n,)
    return tuple(random(*shape, seed=i) for i, shape in enumerate(shapes))


def loss(q, k, v, sinks, **options):
    return jnp.sum(jnp.sin(attention(q, k, v, sinks=sinks, is_causal=True, **options)))


def exact_gradient(q, k, v, sinks) -> np.ndarray:
    options = dict(sinks=sinks, is_causal=True)
    result = oracle.attention(q, k, v, **options)
    return oracle.sinks_gradient(result, np.cos(result.out), 0, sinks)


@quick.KINDS
@pytest.mark.parametrize("case", WITH_SINKS, ids=str)
def test_gradient_is_close_to_exact(case, kind, platform):
    dtype, precision, rule = harness.kind(platform, kind)
    inputs = case.inputs(DTYPES[dtype])
    operands = case.operands(DTYPES[dtype])
    sinks = operands.pop("sinks")
    # Beyond the lengths the output does not depend on the sink, so its cotangent there may be anything.
    dout = inputs.dout.copy()
    for b, length in enumerate(operands.get("query_seq_lengths", ())):
        dout[b, length:] = np.nan

    @jax.jit
    def gradient(sinks, q, k, v, dout, dlse, operands):
        options = dict(return_residual=True, precision=precision, **case.static)
        _, vjp = jax.vjp(lambda sinks: harness.call(q, k, v, operands | {"sinks": sinks}, **options), sinks)
        return vjp((dout, dlse))[0]

    with harness.x64(dtype):
        got = gradient(sinks, *inputs[:3], dout, inputs.dlse, operands)
    assert got.dtype == sinks.dtype
    exact, naive = harness.exact(case, dtype), None
    if rule in ("bfloat16", "float16", "tfloat32"):
        naive = oracle.sinks_gradient(harness.exact(case, dtype, rule), inputs.dout, inputs.dlse, sinks)
    want = oracle.sinks_gradient(exact, inputs.dout, inputs.dlse, sinks)
    # The gradient is a float32 sum over all rows, whatever the sinks' share in each.
    harness.assert_close(
        got, want, "float32" if rule == "float64" else rule, num_keys=case.seqlen_q, naive=naive
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradient_has_the_dtype_of_the_sinks(dtype, platform):
    q, k, v, sinks = arrays()
    gradient = jax.grad(loss, argnums=3)(q, k, v, sinks.astype(DTYPES[dtype]))
    assert gradient.dtype == DTYPES[dtype]


def test_a_sink_of_minus_infinity_is_none(platform):
    q, k, v, _ = arrays()
    sinks = np.full(4, -np.inf, np.float32)
    lengths = np.array([0, 20], np.int32)
    options = dict(key_value_seq_lengths=lengths, return_residual=True)
    for got, want in zip(
        attention(q, k, v, sinks=sinks, **options), attention(q, k, v, **options), strict=True
    ):
        np.testing.assert_array_equal(got, want)
    gradient = jax.grad(lambda sinks: jnp.sum(attention(q, k, v, sinks=sinks, key_value_seq_lengths=lengths)))
    np.testing.assert_array_equal(gradient(sinks), 0.0)


@pytest.mark.parametrize("sink", [np.nan, np.inf])
def test_a_sink_that_is_not_finite_shows_in_its_gradient(sink, platform):
    q, k, v, sinks = arrays()
    sinks = np.array([sinks[0], sink, *sinks[2:]], np.float32)
    for options in (dict(), dict(implementation="xla")):
        gradient = np.asarray(jax.jit(jax.grad(functools.partial(loss, **options), 3))(q, k, v, sinks))
        np.testing.assert_array_equal(np.isnan(gradient), [False, True, False, False])


def test_a_row_without_keys_has_output_0_and_its_sink_as_lse(platform):
    q, k, v, sinks = arrays()
    k, v = np.full_like(k, np.nan), np.full_like(v, np.nan)
    lengths = np.zeros(2, np.int32)
    out, lse = attention(q, k, v, sinks=sinks, key_value_seq_lengths=lengths, return_residual=True)
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_allclose(lse, np.broadcast_to(sinks, lse.shape), rtol=1e-6)


@pytest.mark.parametrize("sink", [np.nan, np.inf])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_a_row_without_keys_shows_a_sink_that_is_not_finite_in_its_lse_alone(implementation, sink, platform):
    q, k, v, _ = arrays()
    options = dict(key_value_seq_lengths=np.array([0, 20], np.int32), implementation=implementation)
    sinks = np.full(4, sink, np.float32)
    out, lse = attention(q, k, v, sinks=sinks, return_residual=True, **options)
    np.testing.assert_array_equal(out[0], 0.0)
    np.testing.assert_array_equal(lse[0], np.full((12, 4), sink))
    dq = jax.grad(lambda q: jnp.sum(attention(q, k, v, sinks=sinks, **options)))(q)
    np.testing.assert_array_equal(dq[0], 0.0)


def test_what_other_rows_see_does_not_leak_into_a_row_without_keys(platform):
    """The row's sum is not 0 because of the sink, so a 0 * NaN from keys that others see would reach its output."""
    q, k, v, sinks = arrays()
    v = np.full_like(v, np.nan)
    out, lse = attention(q, k, v, sinks=sinks, is_causal=True, query_offset=-6, return_residual=True)
    np.testing.assert_array_equal(out[:, :6], 0.0)
    np.testing.assert_allclose(lse[:, :6], np.broadcast_to(sinks, lse[:, :6].shape), rtol=1e-6)
    assert np.isnan(out[:, 6:]).all()


def test_no_keys_at_all(platform):
    q, _, _, sinks = arrays()
    empty = np.zeros((2, 0, 2, 16), np.float32)
    out, lse = attention(q, empty, empty, sinks=sinks, return_residual=True)
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_allclose(lse, np.broadcast_to(sinks, lse.shape), rtol=1e-6)


def test_vmap_over_sinks(platform):
    q, k, v, _ = arrays()
    sinks = random(3, 4, seed=9)
    got = jax.jit(jax.vmap(jax.grad(loss, argnums=3), (None, None, None, 0)))(q, k, v, sinks)
    want = np.stack([exact_gradient(q, k, v, x) for x in sinks])
    harness.assert_close(got, want, "float32", num_keys=20)
    # The gradient of unmapped sinks is summed over the map.
    queries = random(3, 2, 12, 4, 16, seed=10)
    total = jax.grad(lambda sinks: jax.vmap(lambda q: loss(q, k, v, sinks))(queries).sum())(sinks[0])
    want = sum(exact_gradient(x, k, v, sinks[0]) for x in queries)
    harness.assert_close(total, want, "float32", num_keys=20)


@pytest.mark.parametrize("spec", [P("batch"), P(None, None, "heads"), P("batch", None, "heads")], ids=str)
def test_sharded_gradient(spec):
    """It is summed over the devices that hold parts of the batch; nothing is gathered."""
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("batch", "heads"))
    *args, sinks = arrays(batch=4, n=8, k=4)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
    heads = spec[2] if len(spec) > 2 else None
    placed_sinks = jax.device_put(sinks, NamedSharding(mesh, P(heads)))
    f = jax.jit(jax.grad(loss, argnums=3))
    harness.assert_close(f(*placed, placed_sinks), exact_gradient(*args, sinks), "float32", num_keys=20)
    assert "all-gather" not in f.lower(*placed, placed_sinks).compile().as_text()


def test_shard_map_sums_the_gradient_of_replicated_sinks():
    mesh = Mesh(np.array(jax.devices("cpu")), ("batch",))
    *args, sinks = arrays(batch=8)

    def local(q, k, v, sinks):
        return attention(q, k, v, sinks=sinks, is_causal=True)

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(*(P("batch"),) * 3, P()), out_specs=P("batch"))
    got = jax.jit(jax.grad(lambda sinks: jnp.sum(jnp.sin(mapped(*args, sinks)))))(sinks)
    harness.assert_close(got, exact_gradient(*args, sinks), "float32", num_keys=20)
