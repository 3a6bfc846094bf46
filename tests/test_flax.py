"""The adapter in real flax layers gives the same results as flax's own attention."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick

pytest.importorskip("flax", reason="flax is an optional dependency")

from flax import linen, nnx
from jax.test_util import check_grads

import jax_flash

attention_fn = jax_flash.flax.attention_fn
X = np.random.default_rng(0).standard_normal((2, 7, 12)).astype(np.float32)
MEMORY = np.random.default_rng(1).standard_normal((2, 9, 12)).astype(np.float32)
CAUSAL = np.tril(np.ones((1, 1, 7, 7), bool))
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 0, 0, 0, 0]])  # 0 is padding
RANDOM = np.random.default_rng(2).random((2, 4, 7, 7)) < 0.5

# Masks for X as layers take them, made by linen's or nnx's helpers. Each query sees some key.
MASKS = {
    "causal": lambda flax: flax.make_causal_mask(TOKENS),
    "padding": lambda flax: flax.make_attention_mask(np.ones_like(TOKENS), TOKENS > 0, dtype=jnp.bfloat16),
    "causal and padding": lambda flax: flax.combine_masks(
        flax.make_causal_mask(TOKENS), flax.make_attention_mask(np.ones_like(TOKENS), TOKENS > 0), dtype=bool
    ),
    "one for each head": lambda flax: jnp.asarray(RANDOM | np.eye(7, dtype=bool), jnp.int32),
    "one for all": lambda flax: jnp.asarray(CAUSAL),
    "of keys": lambda flax: jnp.asarray(TOKENS[:, None, None] > 0, jnp.float32),
}


def assert_trees_close(got, want) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


def with_bias(fn, bias):
    """Flax's layers pass no bias; a partial does."""
    return functools.partial(fn, bias=bias)


@pytest.fixture(autouse=True)
def exact_products():
    """Runs the layers' own products in full precision, on a GPU, too."""
    with jax.default_matmul_precision("highest"):
        yield


# ---- linen ------------------------------------------------------------------------------------------------


def linen_layer(fn=None, **options) -> linen.Module:
    if fn is not None:
        options["attention_fn"] = fn
    return linen.MultiHeadDotProductAttention(num_heads=4, qkv_features=32, **options)


@functools.cache
def linen_params(*shapes: tuple[int, ...]):
    """The parameters for inputs of these shapes."""
    return linen_layer().init(jax.random.key(0), *(np.ones(shape, np.float32) for shape in shapes))


def linen_results(layer: linen.Module, *inputs, rows=1, **call):
    """The output of the rows that count, and gradients with respect to parameters and inputs."""
    params = linen_params(*(x.shape for x in inputs))

    def loss(params, inputs):
        y = layer.apply(params, *inputs, **call) * rows
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, inputs)


@pytest.mark.parametrize("inputs", quick.rows({"self": (X,), "cross": (X, MEMORY)}, quick=["self"]))
def test_linen(inputs, platform):
    assert_trees_close(
        linen_results(linen_layer(attention_fn), *inputs), linen_results(linen_layer(), *inputs)
    )


@pytest.mark.exhaustive
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
    """A layer whose dropout is off for inference."""
    layer = linen_layer(attention_fn, dropout_rate=0.5)
    assert_trees_close(linen_results(layer, X, deterministic=True), linen_results(linen_layer(), X))


@pytest.mark.parametrize("mask", quick.rows(MASKS, quick=["one for each head"]))
def test_linen_mask(mask, platform):
    mask = mask(linen)
    assert_trees_close(
        linen_results(linen_layer(attention_fn), X, mask=mask), linen_results(linen_layer(), X, mask=mask)
    )


@pytest.mark.exhaustive
def test_linen_mask_of_other_lengths(platform):
    mask = linen.make_attention_mask(np.ones((2, 7)), np.arange(9) < np.array([[9], [4]]))
    got = linen_results(linen_layer(attention_fn), X, MEMORY, mask=mask)
    assert_trees_close(got, linen_results(linen_layer(), X, MEMORY, mask=mask))


@pytest.mark.exhaustive
def test_linen_padding_of_queries(platform):
    """Fully masked padding gives 0 here and the mean of the values in flax, so a loss must ignore it."""
    mask = linen.combine_masks(
        linen.make_attention_mask(TOKENS > 0, TOKENS > 0), linen.make_causal_mask(TOKENS)
    )
    rows = (TOKENS > 0)[..., None]
    got = linen_results(linen_layer(attention_fn), X, mask=mask, rows=rows)
    assert_trees_close(got, linen_results(linen_layer(), X, mask=mask, rows=rows))


@pytest.mark.exhaustive
def test_linen_causal_with_a_mask(platform):
    padding = MASKS["padding"](linen)
    layer = linen_layer(functools.partial(attention_fn, is_causal=True))
    want = linen_results(linen_layer(), X, mask=linen.combine_masks(padding, linen.make_causal_mask(TOKENS)))
    assert_trees_close(linen_results(layer, X, mask=padding), want)


@pytest.mark.exhaustive
def test_linen_batch_axes(platform):
    x = np.random.default_rng(3).standard_normal((2, 3, 7, 12)).astype(np.float32)
    mask = linen.make_causal_mask(TOKENS[0], extra_batch_dims=2)  # [1, 1, 1, 7, 7]
    got = linen_results(linen_layer(attention_fn), x, mask=mask)
    assert_trees_close(got, linen_results(linen_layer(), x, mask=mask))


@pytest.mark.exhaustive
def test_linen_without_batch(platform):
    mask = linen.make_causal_mask(TOKENS[0])  # [1, 7, 7]
    got = linen_results(linen_layer(attention_fn), X[0], mask=mask)
    assert_trees_close(got, linen_results(linen_layer(), X[0], mask=mask))


@pytest.mark.parametrize(
    "mask", quick.rows({"no mask": None, "mask": MASKS["of keys"](linen)}, quick=["mask"])
)
def test_linen_decoding(mask, platform):
    """One position at a time, with a cache: the outputs of flax, which equal those of a causal layer."""

    def outputs(fn=None):
        layer = linen_layer(fn, decode=True)
        variables = linen_layer(decode=True).init(jax.random.key(0), X)

        @jax.jit
        def step(variables, x):
            y, changed = layer.apply(variables, x, mask=mask, mutable=["cache"])
            return variables | changed, y

        ys = []
        for t in range(X.shape[1]):
            variables, y = step(variables, X[:, t : t + 1])
            ys.append(y)
        return jnp.concatenate(ys, axis=1)

    got = outputs(attention_fn)
    assert_trees_close(got, outputs())
    causal = linen.combine_masks(linen.make_causal_mask(TOKENS), mask)
    assert_trees_close(got, linen_results(linen_layer(), X, mask=causal)[0][1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(is_causal=True), r"is_causal .*decoding"),
        (
            dict(bias=jax_flash.Alibi(np.ones(4, np.float32))),
            r"bias must not be Alibi in decoding.*one query",
        ),
    ],
    ids=["causal", "alibi"],
)
def test_linen_decoding_refuses_what_counts_from_position_0(options, message, platform):
    layer = linen_layer(functools.partial(attention_fn, **options), decode=True)
    variables = linen_layer(decode=True).init(jax.random.key(0), X)
    with pytest.raises(ValueError, match=message):
        layer.apply(variables, X[:, :1], mutable=["cache"])


def test_linen_in_plain_jax():
    """implementation="xla", which errors of unsupported calls advise: it has third derivatives."""
    layer = linen_layer(functools.partial(attention_fn, implementation="xla"))
    variables = linen_layer().init(jax.random.key(0), X)
    assert_trees_close(layer.apply(variables, X), linen_layer().apply(variables, X))
    third = jax.grad(jax.grad(jax.grad(lambda t: layer.apply(variables, t * X).sum())))
    assert np.isfinite(third(1.0))


def test_linen_dropout(platform):
    """Dropout is on and off as in flax, and flax's key decides which pairs are dropped."""
    params = linen_params(X.shape)
    layer = linen_layer(attention_fn, dropout_rate=0.5)

    @functools.partial(jax.jit, static_argnames="deterministic")
    def apply(seed, deterministic=False):
        return layer.apply(params, X, deterministic=deterministic, rngs={"dropout": jax.random.key(seed)})

    off = linen_layer().apply(params, X)
    assert_trees_close(apply(0, deterministic=True), off)
    np.testing.assert_array_equal(apply(1), apply(1))
    assert np.abs(apply(1) - apply(2)).max() > 1e-2
    assert np.abs(apply(1) - off).max() > 1e-2


@pytest.mark.exhaustive
def test_linen_dropout_gradients(platform):
    """With one key the same pairs are dropped, so the output is smooth and its gradients can be checked."""
    params = linen_params(X.shape)
    layer = linen_layer(attention_fn, dropout_rate=0.3, deterministic=False)

    @jax.jit
    def f(params, x):
        return layer.apply(params, x, mask=CAUSAL, rngs={"dropout": jax.random.key(1)})

    check_grads(f, (params, X), order=1, modes=["rev"], eps=2e-3)


# ---- nnx --------------------------------------------------------------------------------------------------


def nnx_layer(fn=None, **options) -> nnx.Module:
    if fn is not None:
        options["attention_fn"] = fn
    return nnx.MultiHeadAttention(
        num_heads=4, in_features=12, qkv_features=32, decode=False, rngs=nnx.Rngs(0), **options
    )


def nnx_results(layer: nnx.Module, *inputs, rows=1, **call):
    """The output of the rows that count, and gradients with respect to parameters and inputs."""
    graph, params, rest = nnx.split(layer, nnx.Param, ...)

    def loss(params, inputs):
        y = nnx.merge(graph, params, rest)(*inputs, **call) * rows
        return jnp.sum(jnp.sin(y)), y

    (value, y), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(params, inputs)
    return value, y, nnx.to_pure_dict(gradients[0]), gradients[1]


@pytest.mark.parametrize("inputs", quick.rows({"self": (X,), "cross": (X, MEMORY)}, quick=["cross"]))
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


@pytest.mark.exhaustive
def test_nnx_under_nnx_jit_and_grad(platform):
    layer = nnx_layer(attention_fn)

    @nnx.jit
    def gradients(layer, x):
        return nnx.grad(lambda layer, x: jnp.sum(jnp.sin(layer(x))))(layer, x)

    want = nnx_results(nnx_layer(), X)[2]
    assert_trees_close(nnx.to_pure_dict(gradients(layer, X)), want)


@pytest.mark.parametrize("name", quick.rows(["causal", "one for each head", "of keys"], quick=["of keys"]))
def test_nnx_mask(name, platform):
    mask = MASKS[name](nnx)
    assert_trees_close(
        nnx_results(nnx_layer(attention_fn), X, mask=mask), nnx_results(nnx_layer(), X, mask=mask)
    )


@pytest.mark.exhaustive
def test_nnx_mask_of_other_lengths(platform):
    mask = nnx.make_attention_mask(np.ones((2, 7)), np.arange(9) < np.array([[9], [4]]))
    got = nnx_results(nnx_layer(attention_fn), X, MEMORY, mask=mask)
    assert_trees_close(got, nnx_results(nnx_layer(), X, MEMORY, mask=mask))


@pytest.mark.exhaustive
def test_nnx_padding_of_queries(platform):
    mask = nnx.combine_masks(nnx.make_attention_mask(TOKENS > 0, TOKENS > 0), nnx.make_causal_mask(TOKENS))
    rows = (TOKENS > 0)[..., None]
    got = nnx_results(nnx_layer(attention_fn), X, mask=mask, rows=rows)
    assert_trees_close(got, nnx_results(nnx_layer(), X, mask=mask, rows=rows))


@pytest.mark.exhaustive
@pytest.mark.skipif(not PASSES_IS_CAUSAL, reason="this flax's nnx layers have no is_causal")
def test_nnx_is_causal_with_a_mask(platform):
    got, want = (
        nnx_results(layer, X, mask=MASKS["padding"](nnx), is_causal=True)
        for layer in (nnx_layer(attention_fn), nnx_layer())
    )
    assert_trees_close(got, want)


@pytest.mark.exhaustive
@pytest.mark.skipif(
    "num_kv_heads" not in inspect.signature(nnx.MultiHeadAttention.__init__).parameters,
    reason="this flax's nnx layers have no groups of heads",
)
def test_nnx_groups_of_heads(platform):
    mask = MASKS["one for each head"](nnx)
    got, want = (
        nnx_results(layer, X, mask=mask)
        for layer in (nnx_layer(attention_fn, num_kv_heads=2), nnx_layer(num_kv_heads=2))
    )
    assert_trees_close(got, want)


@pytest.mark.exhaustive
def test_nnx_batch_axes(platform):
    """Flax's own attention requires a mask with all batch axes."""
    x = np.random.default_rng(3).standard_normal((2, 3, 7, 12)).astype(np.float32)
    mask = np.random.default_rng(4).random((1, 3, 1, 7, 7)) < 0.5
    mask[..., 0] = True
    got = nnx_results(nnx_layer(attention_fn), x, mask=mask)
    want = nnx_results(nnx_layer(), x, mask=np.broadcast_to(mask, (2, 3, 1, 7, 7)))
    assert_trees_close(got, want)


@pytest.mark.parametrize("mask", quick.rows({"no mask": None, "mask": MASKS["of keys"](nnx)}, quick=["mask"]))
def test_nnx_decoding(mask, platform):
    def outputs(fn=None):
        layer = nnx_layer(fn)
        layer.init_cache(X.shape)
        step = nnx.jit(lambda layer, x: layer(x, mask=mask, decode=True))
        return jnp.concatenate([step(layer, X[:, t : t + 1]) for t in range(X.shape[1])], axis=1)

    got = outputs(attention_fn)
    assert_trees_close(got, outputs())
    causal = nnx.combine_masks(nnx.make_causal_mask(TOKENS), mask)
    assert_trees_close(got, nnx_results(nnx_layer(), X, mask=causal)[1])


def test_nnx_dropout(platform):
    """Dropout is on and off as in flax, and the layer's own stream of keys decides."""

    def layer(fn=attention_fn, **options):
        return nnx_layer(fn, dropout_rate=0.5, **options)

    @functools.partial(nnx.jit, static_argnames="deterministic")
    def apply(layer, seed, deterministic=False):
        return layer(X, deterministic=deterministic, rngs=nnx.Rngs(dropout=jax.random.key(seed)))

    off = nnx_layer()(X)
    assert_trees_close(apply(layer(), 0, deterministic=True), off)
    assert_trees_close(layer(deterministic=True)(X), off)
    np.testing.assert_array_equal(apply(layer(), 1), apply(layer(), 1))
    assert np.abs(apply(layer(), 1) - apply(layer(), 2)).max() > 1e-2
    one = layer(deterministic=False)
    assert np.abs(one(X) - one(X)).max() > 1e-2, "the stream goes on from call to call"


@pytest.mark.exhaustive
def test_nnx_dropout_gradients(platform):
    graph, params, rest = nnx.split(nnx_layer(attention_fn, dropout_rate=0.3), nnx.Param, ...)

    @jax.jit
    def f(params, x):
        return nnx.merge(graph, params, rest)(x, mask=CAUSAL, deterministic=False, rngs=nnx.Rngs(dropout=1))

    check_grads(f, (params, X), order=1, modes=["rev"], eps=2e-3)


# ---- The function itself ------------------------------------------------------------------------------------


def qkv(batch=(2,), seqlen_q=7, seqlen_kv=9, dtype=np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    shapes = [(*batch, length, 4, 8) for length in (seqlen_q, seqlen_kv, seqlen_kv)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


SHAPES = [  # of the batch axes, and of a mask or bias
    ((2,), (2, 4, 7, 9)),
    ((2,), (1, 4, 7, 9)),
    ((2,), (2, 1, 1, 9)),
    ((2,), (4, 1, 9)),
    ((2,), (7, 1)),
    ((), (4, 7, 9)),
    ((2, 3), (2, 3, 4, 7, 9)),
    ((2, 3), (2, 3, 1, 1, 9)),
    ((2, 3), (1, 3, 1, 7, 9)),
    ((2, 3), (2, 1, 1, 7, 9)),
    ((2, 3), (1, 1, 4, 7, 9)),
    ((2, 3), (3, 1, 7, 9)),
    ((2, 3), (9,)),
]


@pytest.mark.parametrize(
    ("batch", "shape"),
    quick.rows(
        {f"{batch}-{shape}": (batch, shape) for batch, shape in SHAPES},
        ["(2,)-(7, 1)", "()-(4, 7, 9)", "(2, 3)-(2, 1, 1, 7, 9)"],
        unpack=True,
    ),
)
def test_mask_and_bias_of_any_shape(batch, shape, platform):
    """They may have broadcast dimensions or fewer axes; the gradient of the bias has the bias's shape."""
    rng = np.random.default_rng(6)
    mask, bias = rng.random(shape) < 0.7, rng.standard_normal(shape).astype(np.float32)
    mask[..., 0] = True

    def results(fn):
        def loss(*args):
            out = fn(*args, mask=mask)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*qkv(batch), bias)

    assert_trees_close(results(attention_fn), results(linen.dot_product_attention))


def test_alibi(platform):
    slopes = jnp.array([0.5, 0.25, 0.125, 0.0625])
    bias = -slopes[:, None, None] * jnp.abs(jnp.arange(7)[:, None] - jnp.arange(7))
    got = linen_results(linen_layer(with_bias(attention_fn, jax_flash.Alibi(slopes))), X, mask=CAUSAL)
    assert_trees_close(
        got, linen_results(linen_layer(with_bias(linen.dot_product_attention, bias)), X, mask=CAUSAL)
    )


def test_a_row_that_sees_nothing_is_0(platform):
    mask = np.ones((2, 1, 7, 9), np.float32)
    mask[1, :, 2] = 0

    def f(*args):
        return attention_fn(*args, mask=mask)

    out, vjp = jax.vjp(jax.jit(f), *qkv())
    dq, _, _ = vjp(jnp.ones_like(out))
    assert np.all(out[1, 2] == 0)
    assert np.all(dq[1, 2] == 0)
    want = linen.dot_product_attention(*qkv(), mask=mask)
    others = np.ones((2, 7), bool)
    others[1, 2] = False
    np.testing.assert_allclose(out[others], want[others], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("broadcast_dropout", [True, False])
def test_dropout_keeps_the_right_fraction(broadcast_dropout, platform):
    """With logits of 0 and one-hot values, the output shows which weights were kept and their scale."""
    size, rate = 64, 0.25
    zeros = jnp.zeros((2, size, 4, 8))
    one_hot = jnp.broadcast_to(jnp.eye(size)[:, None], (2, size, 4, size))

    @jax.jit
    def weights(key):
        return attention_fn(
            zeros, zeros, one_hot, dropout_rng=key, dropout_rate=rate, broadcast_dropout=broadcast_dropout
        )

    got = weights(jax.random.key(7))
    kept = np.asarray(got) > 0
    np.testing.assert_allclose(np.asarray(got)[kept], 1 / size / (1 - rate), rtol=1e-4)
    deviation = np.sqrt(rate * (1 - rate))
    assert abs(kept.mean() - (1 - rate)) < 5 * deviation / np.sqrt(kept.size)
    # Every batch element and head has its own pattern, whatever broadcast_dropout is.
    patterns = np.moveaxis(kept, 2, 1).reshape(8, -1)
    agreement = np.mean(patterns[:, None] == patterns, axis=-1)[np.triu_indices(8, 1)]
    np.testing.assert_allclose(agreement, (1 - rate) ** 2 + rate**2, atol=0.05)
    raw = weights(jax.random.PRNGKey(7))  # a raw key, as older code passes it
    np.testing.assert_array_equal(raw, got)


def test_dropout_has_the_right_mean(platform):
    q, k, v = qkv()
    keys = jax.random.split(jax.random.key(8), 500)
    outs = jax.lax.map(lambda key: attention_fn(q, k, v, dropout_rng=key, dropout_rate=0.2), keys)
    error = np.asarray(outs.mean(0) - attention_fn(q, k, v))
    assert np.all(np.abs(error) < 6 * np.asarray(outs.std(0)) / np.sqrt(len(keys)) + 1e-5)


def test_dropout_without_a_key_is_refused(platform):
    with pytest.raises(ValueError, match="dropout_rng"):
        attention_fn(*qkv(), dropout_rate=0.5)
    attention_fn(*qkv(), dropout_rate=0.5, deterministic=True)


@pytest.mark.parametrize("name", ["mask", "bias"])
@pytest.mark.parametrize("shape", [(2, 3, 1, 7, 8), (2, 1, 7, 9), (1, 2, 3, 1, 7, 9)], ids=str)
def test_names_the_shape_that_was_passed(name, shape):
    with pytest.raises(ValueError, match=rf"{name} must be .*\[2, 3, 4, 7, 9\], got shape .*{shape[-1]}\]"):
        attention_fn(*qkv(batch=(2, 3)), **{name: np.ones(shape, np.float32)})


# ---- The signature ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [linen.dot_product_attention, nnx.dot_product_attention])
def test_names_every_parameter_that_flax_may_pass(fn):
    """Linen silently drops arguments that the signature does not name, even the mask."""
    ours = inspect.signature(attention_fn).parameters
    assert all(p.kind is not p.VAR_KEYWORD for p in ours.values())
    needed = {"query", "key", "value", "bias", "mask", "dropout_rng", "dropout_rate", "broadcast_dropout"}
    needed |= {"deterministic", "dtype", "precision", "module", "is_causal"}
    assert needed <= ours.keys()


def test_forward_mode_reaches_the_kernels():
    layer = nnx_layer(functools.partial(attention_fn, forward_mode=True))
    plain = nnx_layer(nnx.dot_product_attention)
    got, want = (jax.jvp(f, (X,), (X,)) for f in (layer, plain))
    assert_trees_close(got, want)


def test_names_what_is_no_array_and_no_dtype():
    q, k, v = qkv()
    with pytest.raises(TypeError, match=r"key must be a JAX or NumPy array, got .* list"):
        attention_fn(q, [[1.0]], v)
    for name in ("bias", "mask"):
        with pytest.raises(TypeError, match=rf"{name} must be a JAX or NumPy array, got .* float"):
            attention_fn(q, k, v, **{name: 1.0})
    for dtype in ("foo", "int32"):
        with pytest.raises(TypeError, match=f"dtype must be None or a floating-point dtype, got '{dtype}'"):
            attention_fn(q, k, v, dtype=dtype)


def test_refuses_to_record_the_weights():
    """sow_weights needs the probabilities, which are never materialized."""
    with pytest.raises(NotImplementedError, match=r"module|sow"):
        nnx_layer(attention_fn)(X, sow_weights=True)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_refuses_other_products(name):
    params = linen_params(X.shape)
    with pytest.raises(NotImplementedError, match=name):
        linen_layer(attention_fn, **{f"{name}_cls": lambda: jnp.einsum}).apply(params, X)


def test_refuses_positions():
    """Newer nnx layers may pass positions for a position embedding."""
    with pytest.raises(NotImplementedError, match="input_positions"):
        attention_fn(*qkv(), input_positions=np.arange(7))


@pytest.mark.parametrize(
    ("query", "key"),
    [
        ((2, 3, 5, 4, 8), (3, 2, 7, 4, 8)),
        ((1, 5, 4, 8), (7, 4, 8)),
        ((6, 5, 4, 8), (2, 3, 7, 4, 8)),
        ((2, 5, 4, 8), (1, 7, 4, 8)),
    ],
    ids=str,
)
def test_batch_axes_that_differ_are_refused(query, key):
    """Even if their product is the same, since batch elements would then see keys of others."""
    q, k = np.zeros(query, np.float32), np.zeros(key, np.float32)
    with pytest.raises(ValueError, match="key must have query's batch axes") as error:
        attention_fn(q, k, k)
    assert str(list(query)) in str(error.value)
    assert str(list(key)) in str(error.value)
    value = np.zeros((*query[:-3], *key[-3:]), np.float32)
    with pytest.raises(ValueError, match="value must have query's batch axes"):
        attention_fn(q, value, k)
    assert attention_fn(q, value, value).shape == query


def test_too_few_axes_are_refused():
    with pytest.raises(ValueError, match=r"query must have shape \[\.\.\., T, N, H\], got shape \[4, 8\]"):
        attention_fn(*(np.zeros((4, 8), np.float32),) * 3)
