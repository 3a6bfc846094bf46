"""The adapter inside real flax layers: what flax's own attention computes, faster."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax", reason="flax is an optional dependency")

from flax import linen, nnx

import jax_flash.flax

attention_fn = jax_flash.flax.attention_fn
X = np.random.default_rng(0).standard_normal((2, 7, 12)).astype(np.float32)
MEMORY = np.random.default_rng(1).standard_normal((2, 9, 12)).astype(np.float32)
CAUSAL = np.tril(np.ones((1, 1, 7, 7), bool))


def assert_trees_close(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.fixture(autouse=True)
def exact_products():
    """Layers multiply by their weights, too: at full precision on a GPU as well."""
    with jax.default_matmul_precision("highest"):
        yield


# ---- linen ------------------------------------------------------------------------------------------------


def linen_layer(fn=None, **options) -> linen.Module:
    if fn is not None:
        options["attention_fn"] = fn
    return linen.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, **options)


def linen_results(layer: linen.Module, *inputs, **call):
    """Output, and gradients with respect to parameters and inputs."""
    params = linen_layer().init(jax.random.key(0), *inputs)

    def loss(params, inputs):
        y = layer.apply(params, *inputs, **call)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, inputs)


@pytest.mark.parametrize("inputs", [(X,), (X, MEMORY)], ids=["self", "cross"])
def test_linen(inputs, platform):
    assert_trees_close(
        linen_results(linen_layer(attention_fn), *inputs), linen_results(linen_layer(), *inputs)
    )


def test_linen_causal(platform):
    layer = linen_layer(functools.partial(attention_fn, is_causal=True))
    assert_trees_close(linen_results(layer, X), linen_results(linen_layer(), X, mask=CAUSAL))


def test_linen_bfloat16(platform):
    got = linen_results(linen_layer(attention_fn, dtype=jnp.bfloat16), X)
    want = linen_results(linen_layer(dtype=jnp.bfloat16), X)
    assert got[0][1].dtype == jnp.bfloat16
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 16 * 2.0**-8 * max(1.0, np.abs(b).max())


def test_linen_deterministic_dropout(platform):
    """A layer with dropout that is off for inference."""
    layer = linen_layer(attention_fn, dropout_rate=0.5)
    assert_trees_close(linen_results(layer, X, deterministic=True), linen_results(linen_layer(), X))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_linen_refuses_a_mask(jit, platform):
    params = linen_layer().init(jax.random.key(0), X)
    layer = linen_layer(attention_fn)
    apply = jax.jit(layer.apply) if jit else layer.apply
    with pytest.raises(NotImplementedError, match="mask"):
        apply(params, X, mask=linen.make_causal_mask(X[..., 0]))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_linen_refuses_dropout(jit, platform):
    params = linen_layer().init(jax.random.key(0), X)
    layer = linen_layer(attention_fn, dropout_rate=0.5)
    apply = functools.partial(layer.apply, deterministic=False, rngs={"dropout": jax.random.key(1)})
    with pytest.raises(NotImplementedError, match="dropout"):
        (jax.jit(apply) if jit else apply)(params, X)


# ---- nnx --------------------------------------------------------------------------------------------------


def nnx_layer(fn=None, **options) -> nnx.Module:
    if fn is not None:
        options["attention_fn"] = fn
    return nnx.MultiHeadAttention(
        num_heads=4, in_features=12, qkv_features=32, decode=False, rngs=nnx.Rngs(0), **options
    )


def nnx_results(layer: nnx.Module, *inputs, **call):
    """Output, and gradients with respect to parameters and inputs."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params, inputs):
        y = nnx.merge(graph, params, rest)(*inputs, **call)
        return jnp.sum(jnp.sin(y)), y

    (value, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, inputs)
    return value, y, nnx.to_pure_dict(gradients[0]), gradients[1]


@pytest.mark.parametrize("inputs", [(X,), (X, MEMORY)], ids=["self", "cross"])
def test_nnx(inputs, platform):
    assert_trees_close(nnx_results(nnx_layer(attention_fn), *inputs), nnx_results(nnx_layer(), *inputs))


PASSES_IS_CAUSAL = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters


@pytest.mark.skipif(
    PASSES_IS_CAUSAL, reason="this flax's nnx layers pass is_causal themselves, over a partial's"
)
def test_nnx_causal_by_partial(platform):
    layer = nnx_layer(functools.partial(attention_fn, is_causal=True))
    assert_trees_close(nnx_results(layer, X), nnx_results(nnx_layer(), X, mask=CAUSAL))


@pytest.mark.skipif(not PASSES_IS_CAUSAL, reason="this flax's nnx layers have no is_causal")
def test_nnx_is_causal(platform):
    got = nnx_results(nnx_layer(attention_fn), X, is_causal=True)
    assert_trees_close(got, nnx_results(nnx_layer(), X, mask=CAUSAL))


def test_nnx_under_nnx_jit_and_grad(platform):
    layer = nnx_layer(attention_fn)

    @nnx.jit
    def gradients(layer, x):
        return nnx.grad(lambda layer, x: jnp.sum(jnp.sin(layer(x))))(layer, x)

    want = nnx_results(nnx_layer(), X)[2]
    assert_trees_close(nnx.to_pure_dict(gradients(layer, X)), want)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_nnx_refuses_a_mask(jit, platform):
    """A mask from flax's helper (float32) as well as a bool one."""
    layer = nnx_layer(attention_fn)

    def call(layer, mask):
        return layer(X, mask=mask)

    for mask in (nnx.make_causal_mask(X[..., 0]), jnp.asarray(CAUSAL)):
        with pytest.raises(NotImplementedError, match="mask"):
            (nnx.jit(call) if jit else call)(layer, mask)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_nnx_refuses_dropout(jit, platform):
    layer = nnx_layer(attention_fn, dropout_rate=0.5)

    def call(layer):
        return layer(X, deterministic=False)

    with pytest.raises(NotImplementedError, match="dropout"):
        (nnx.jit(call) if jit else call)(layer)


def test_nnx_refuses_decoding(platform):
    """The cache needs a mask: refused with the reason, not computed without it."""
    layer = nnx_layer(attention_fn)
    layer.init_cache((2, 7, 12))
    with pytest.raises(NotImplementedError, match="mask"):
        layer(X[:, :1], decode=True)


# ---- The signature ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [linen.dot_product_attention, nnx.dot_product_attention])
def test_names_every_parameter_that_flax_may_pass(fn):
    """Linen drops what the signature does not name, the mask too."""
    ours = inspect.signature(attention_fn).parameters
    assert all(p.kind is not p.VAR_KEYWORD for p in ours.values())
    needed = {"query", "key", "value", "bias", "mask", "dropout_rng", "dropout_rate", "broadcast_dropout"}
    needed |= {"deterministic", "dtype", "precision", "module", "is_causal"}
    assert needed <= ours.keys()


def test_refuses_what_would_change_the_weights():
    """sow_weights asks for the probabilities, which are never written."""
    with pytest.raises(NotImplementedError, match=r"module|sow"):
        nnx_layer(attention_fn)(X, sow_weights=True)
