"""Numerical gradient checks over the options, and planted faults that the checks must find."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from jax.test_util import check_grads

import jax_flash
from jax_flash import _primitives

OPTIONS = {
    "full": {},
    "causal": dict(is_causal=True),
    "scale": dict(scale=0.7),
    "scale negative": dict(scale=-0.4, is_causal=True),
    "window": dict(local_window_size=(2, 1)),
    "window, causal": dict(local_window_size=3, is_causal=True),
    "soft cap": dict(logits_soft_cap=1.5),
    "lengths of queries": dict(query_seq_lengths=np.array([3, 5], np.int32)),
    "lengths of keys": dict(key_value_seq_lengths=np.array([7, 2], np.int32)),
    "no keys": dict(key_value_seq_lengths=np.array([0, 4], np.int32)),
    "offset": dict(query_offset=2, is_causal=True),
    "offset per batch": dict(query_offset=np.array([-2, 4], np.int32), is_causal=True),
    "deterministic": dict(deterministic=True, is_causal=True),
    "everything": dict(
        scale=0.5,
        is_causal=True,
        local_window_size=(4, 2),
        logits_soft_cap=2.0,
        query_seq_lengths=np.array([5, 4], np.int32),
        key_value_seq_lengths=np.array([7, 6], np.int32),
        query_offset=np.array([1, 3], np.int32),
    ),
}  # fmt: skip
HEADS = {"one head": (1, 1, 4, 4), "groups": (4, 2, 5, 5), "values wider": (2, 1, 3, 6)}  # N, K, H, Hv


def arrays(dtype, heads=(4, 2, 4, 3)) -> tuple[np.ndarray, ...]:
    n, k, h, hv = heads
    rng = np.random.default_rng(0)
    return tuple(
        rng.standard_normal(shape).astype(dtype) for shape in [(2, 5, n, h), (2, 7, k, h), (2, 7, k, hv)]
    )


def attention_and_lse(q, k, v, **options):
    """Both results, with 0 for -inf, which has no gradient."""
    out, lse = jax_flash.flash_attention(q, k, v, return_residual=True, precision="highest", **options)
    return out, jnp.where(jnp.isinf(lse), 0.0, lse)


def check(f, dtype: str, *args) -> None:
    with harness.x64(dtype):
        # In float32 a smaller step suffers from rounding, a larger one from the third derivative.
        eps = 2e-3 if dtype == "float32" else None
        check_grads(jax.jit(f), args, order=1, modes=["rev"], eps=eps)


DTYPES = ("float32", "float64")


@pytest.mark.parametrize("options", quick.rows(OPTIONS, quick=["full", "everything"]))
def test_out_and_lse(options, platform):
    for dtype in DTYPES:
        check(functools.partial(attention_and_lse, **options), dtype, *arrays(dtype))


@pytest.mark.parametrize("part", [0, 1], ids=["out", "lse"])
@pytest.mark.parametrize("heads", quick.rows(HEADS, quick=["groups"]))
def test_heads(heads, part, platform):
    for dtype in DTYPES:
        check(lambda *args: attention_and_lse(*args, is_causal=True)[part], dtype, *arrays(dtype, heads))


def test_without_a_batch_axis(platform):
    for dtype in DTYPES:
        check(attention_and_lse, dtype, *(x[0] for x in arrays(dtype)))


def test_under_vmap(platform):
    for dtype in DTYPES:
        q, k, v = arrays(dtype, (2, 2, 3, 3))
        check(jax.vmap(attention_and_lse, (0, None, 1)), dtype, q, k[0], np.moveaxis(v, 0, 1))


RNG = np.random.default_rng(1)
MASK = np.arange(35).reshape(5, 7) % 3 > 0
IDS = (
    np.arange(10, dtype=np.int32).reshape(2, 5) // 3,
    np.arange(14, dtype=np.int32).reshape(2, 7) // 4,
)
DROPOUT = dict(dropout_rate=0.3, dropout_rng=jax.random.key(5))
SINKS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
SLOPES = np.array([0.5, 0.25, 0.0, -0.1], np.float32)
BIASES = {
    "bias": RNG.standard_normal((2, 4, 5, 7)),
    "bias of heads and pairs": RNG.standard_normal((1, 4, 5, 7)),
    "bias of heads and rows": RNG.standard_normal((4, 5, 1)),
    "bias of batch and keys": RNG.standard_normal((2, 1, 1, 7)),
    "bias of pairs": RNG.standard_normal((5, 7)),
    "bias of keys": RNG.standard_normal(7),
    "bias of heads": RNG.standard_normal((4, 1, 1)),
    "bias of one": RNG.standard_normal((1, 1, 1, 1)),
}
ARRAYS = {
    "mask": dict(mask=MASK),
    "mask of heads": dict(mask=RNG.random((2, 4, 5, 7)) < 0.6),
    "segment ids": dict(segment_ids=IDS),
    "dropout": DROPOUT,
    "mask, causal": dict(mask=MASK, is_causal=True),
    "segment ids, dropout": dict(segment_ids=IDS, **DROPOUT),
    "mask, soft cap, sinks": dict(mask=MASK, logits_soft_cap=1.5, sinks=SINKS),
}
# Options to combine with a bias.
WITH_BIAS = {
    "alone": {},
    "soft cap": dict(logits_soft_cap=1.5),
    "causal, offset": dict(is_causal=True, query_offset=np.array([2, -1], np.int32)),
    "lengths": dict(OPTIONS["lengths of queries"], **OPTIONS["no keys"]),
    "mask": dict(mask=MASK),
    "dropout": DROPOUT,
    "all": dict(OPTIONS["everything"], mask=MASK, segment_ids=IDS, sinks=SINKS, **DROPOUT),
}

# JAX differentiates the reference, so a few cases suffice for it.
BESIDE_BIAS = {
    **{f"fused-{name}": (name, None) for name in WITH_BIAS},
    **{f"xla-{name}": (name, "xla") for name in ("alone", "all")},
}
BESIDE_BIAS = quick.rows(BESIDE_BIAS, quick=["fused-all"], unpack=True)
ARRAYS_OF_BOTH = {
    **{f"fused-{name}": (name, None) for name in ARRAYS},
    **{f"xla-{name}": (name, "xla") for name in ("mask", "segment ids", "dropout")},
}
ARRAYS_OF_BOTH = quick.rows(
    ARRAYS_OF_BOTH, quick=["fused-segment ids, dropout", "fused-mask, soft cap, sinks"], unpack=True
)


@pytest.mark.parametrize(("name", "implementation"), ARRAYS_OF_BOTH)
def test_arrays(name, implementation, platform):
    options = dict(implementation=implementation, **ARRAYS[name])
    for dtype in DTYPES:
        check(functools.partial(attention_and_lse, **options), dtype, *arrays(dtype))


def check_bias(bias, make, platform, **options) -> None:
    """The gradients of a bias or its slopes, and of the other arrays."""
    for dtype in DTYPES:
        check(
            lambda x, *args: attention_and_lse(*args, bias=make(x), **options),
            dtype,
            bias.astype(dtype),
            *arrays(dtype),
        )


@pytest.mark.parametrize("bias", quick.rows(BIASES, quick=["bias of heads and rows", "bias of keys"]))
def test_gradient_of_bias(bias, platform):
    check_bias(bias, jnp.asarray, platform)


@pytest.mark.parametrize(("name", "implementation"), BESIDE_BIAS)
def test_gradient_of_bias_beside(name, implementation, platform):
    options = dict(implementation=implementation, **WITH_BIAS[name])
    check_bias(BIASES["bias of heads and pairs"], jnp.asarray, platform, **options)


@pytest.mark.parametrize(("name", "implementation"), BESIDE_BIAS)
def test_gradient_of_slopes_beside(name, implementation, platform):
    check_bias(SLOPES, jax_flash.Alibi, platform, implementation=implementation, **WITH_BIAS[name])


@pytest.mark.parametrize("name", quick.rows(["full", "no keys", "everything"], quick=["everything"]))
@pytest.mark.parametrize("implementation", quick.rows({"fused": None, "xla": "xla"}, quick=["fused"]))
def test_gradient_of_sinks(implementation, name, platform):
    options = dict(implementation=implementation, **OPTIONS[name])
    for dtype in DTYPES:
        check(
            lambda sinks, *args: attention_and_lse(*args, sinks=sinks, **options),
            dtype,
            SINKS.astype(dtype),
            *arrays(dtype),
        )


# ---- Planted faults ---------------------------------------------------------------------------------------


@pytest.fixture
def plant(monkeypatch):
    """Replaces a function of the primitives for programs traced within the context, and no others."""
    jax.clear_caches()
    yield functools.partial(monkeypatch.setattr, _primitives)
    jax.clear_caches()


FAULTS = {
    "sign of dq": lambda dq, dk, dv: (-dq, dk, dv),
    "sign of dk": lambda dq, dk, dv: (dq, -dk, dv),
    "sign of dv": lambda dq, dk, dv: (dq, dk, -dv),
    "dq a part in 10 too large": lambda dq, dk, dv: (1.1 * dq, dk, dv),
    "dk and dv of one head": lambda dq, dk, dv: (dq, dk.at[:, :, 0].set(0), dv.at[:, :, 0].set(0)),
}


@pytest.mark.parametrize("fault", quick.rows(FAULTS, quick=["dk and dv of one head"]))
def test_planted_fault_is_caught(fault, platform, plant):
    """With a fault in the backward pass, the checks above fail."""
    backward = _primitives.backward
    plant("backward", lambda *args: fault(*backward(*args)))
    for dtype in DTYPES:
        with pytest.raises(AssertionError, match="Not equal to tolerance"):
            check(attention_and_lse, dtype, *arrays(dtype))


BIAS_FAULTS = {
    "sign": lambda sums: -sums,
    "a part in 10 too large": lambda sums: 1.1 * sums,
    "one head": lambda sums: sums.at[:, 1].set(0),
}


@pytest.mark.parametrize("make", [jnp.asarray, jax_flash.Alibi], ids=["bias", "slopes"])
@pytest.mark.parametrize("fault", quick.rows(BIAS_FAULTS, quick=["one head"]))
def test_planted_fault_in_the_gradient_of_a_bias_is_caught(fault, make, platform, plant):
    backward_bias = _primitives.backward_bias
    plant("backward_bias", lambda *args: fault(backward_bias(*args)))
    x = SLOPES if make is jax_flash.Alibi else BIASES["bias of heads and pairs"]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_bias(x, make, platform)
