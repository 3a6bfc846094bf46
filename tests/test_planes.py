"""float32 as scaled float16 on Hopper (cuda/planes.cuh): as exact as TF32 whatever the magnitudes.

In the build of a GPU these kernels are an option, JAX_FLASH_PLANES; the emulator has them.
"""

import functools

import harness
import jax
import numpy as np
import oracle
import pytest
from closeness import assert_close

import jax_flash

T, S, N, K = 200, 260, 4, 2  # more than one tile of either


@pytest.fixture(autouse=True)
def planes(platform):
    if platform == "cpu":
        pytest.skip("the CPU has no planes")
    if not harness.has_planes():
        pytest.skip("needs a Hopper GPU and a build with JAX_FLASH_PLANES")


def powers(rng, length: int, binades: float) -> np.ndarray:
    """A factor for each row, between 2^-binades and 1."""
    return 2.0 ** rng.uniform(-binades, 0, (1, length, 1, 1))


def of_rows(rng, q, k, v, dout):
    return q, k, v * powers(rng, S, 20), dout * powers(rng, T, 20)


def of_keys_and_queries(rng, q, k, v, dout):
    return 30 * q * powers(rng, T, 20), k * powers(rng, S, 20), v, dout


def of_columns(rng, q, k, v, dout):
    factor = powers(rng, q.shape[-1], 20).reshape(1, 1, 1, -1)
    return q * factor, k * factor, v * factor, dout * factor


def of_opposite_columns(rng, q, k, v, dout):
    factor = powers(rng, q.shape[-1], 20).reshape(1, 1, 1, -1)
    return q * factor, k / factor * 2.0**-10, v * factor, dout / factor * 2.0**-10


def of_a_large_value(rng, q, k, v, dout):
    v[:, 5] *= 2.0**20
    return q, k, v, dout


INPUTS = {
    "normal": lambda rng, *arrays: arrays,
    "sharp": lambda rng, q, *others: (8 * q, *others),
    "equal keys": lambda rng, q, k, v, dout: (q, np.repeat(k[:, :1], S, 1), v, dout),
    "far from 1": lambda rng, q, k, v, dout: (1e-20 * q, 1e20 * k, 1e-15 * v, 1e12 * dout),
    "rows": of_rows,
    "keys and queries": of_keys_and_queries,
    "columns": of_columns,
    "opposite columns": of_opposite_columns,
    "a large value": of_a_large_value,
    "zeros": lambda rng, q, k, v, dout: (0 * q, k, v, dout),
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("name", INPUTS)
def test_is_as_exact_as_tf32(name, head_dim, deterministic, platform):
    rng = np.random.default_rng(0)
    shapes = [(1, length, heads, head_dim) for length, heads in ((T, N), (S, K), (S, K), (T, N))]
    q, k, v, dout = (
        x.astype(np.float32) for x in INPUTS[name](rng, *(rng.standard_normal(shape) for shape in shapes))
    )
    dlse = np.zeros((1, T, N), np.float32)
    call = functools.partial(jax_flash.flash_attention, precision="default", deterministic=deterministic)

    @jax.jit
    def run(*args):
        out, vjp = jax.vjp(call, *args)
        return out, *vjp(dout)

    want = oracle.attention(q, k, v, dout, dlse)
    naive = oracle.attention(q, k, v, dout, dlse, arithmetic=oracle.arithmetic_of("tfloat32"))
    for field, got in zip(("out", "dq", "dk", "dv"), run(q, k, v), strict=True):
        exact, baseline = getattr(want, field), getattr(naive, field)
        unit = np.abs(exact).max() or 1  # the rule has absolute terms
        assert_close(
            np.asarray(got, np.float64) / unit,
            exact / unit,
            "tfloat32",
            num_keys=S,
            naive=baseline / unit,
            name=f"{field} of {name}",
        )


@pytest.mark.parametrize(("position", "value"), [(3, np.nan), (70, np.inf)])
def test_what_is_not_finite_shows(position, value, platform):
    """In the rows that have it, and there only: the scale is that of the finite numbers."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, length, 1, 64)).astype(np.float32) for length in (T, S, S))
    clean = np.asarray(jax_flash.flash_attention(q, k, v))
    q[0, position, 0, 7] = value
    got = np.asarray(jax_flash.flash_attention(q, k, v))
    assert not np.isfinite(got[0, position]).all()
    np.testing.assert_array_equal(np.delete(got, position, 1), np.delete(clean, position, 1))
