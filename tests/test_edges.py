"""Shapes, values and circumstances in which attention implementations have been known to fail."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import DTYPES
from closeness import assert_close

import jax_flash

ALL = (0, 1, 2)


def random(*shape: int, seed: int = 0, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def forward_and_backward(**options):
    """A jitted function from q, k, v, dout to out, lse, dq, dk, dv."""

    @jax.jit
    def f(q, k, v, dout):
        (out, lse), vjp = jax.vjp(
            lambda *args: jax_flash.flash_attention(*args, return_residual=True, **options), q, k, v
        )
        return oracle.Result(out, lse, *vjp((dout, jnp.zeros_like(lse))))

    return f


# ---- Sizes ------------------------------------------------------------------------------------------------

# B, T, S, N, K
EMPTY = {
    "no batch": (0, 3, 4, 2, 1),
    "no queries": (2, 0, 4, 2, 1),
    "no keys": (2, 3, 0, 2, 1),
    "no heads": (2, 3, 4, 0, 0),
    "no query heads": (2, 3, 4, 0, 2),
    "neither queries nor keys": (2, 0, 0, 2, 2),
}


@pytest.mark.parametrize("implementation", [None, "xla"], ids=["fused", "xla"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY.keys())
def test_empty(sizes, dtype, implementation, platform):
    b, t, s, n, k = sizes
    dtype = DTYPES[dtype]
    args = random(b, t, n, 8, dtype=dtype), random(b, s, k, 8, dtype=dtype), random(b, s, k, 5, dtype=dtype)
    got = forward_and_backward(implementation=implementation)(*args, random(b, t, n, 5, dtype=dtype))
    assert [x.shape for x in got] == [(b, t, n, 5), (b, t, n), *(x.shape for x in args)]
    for name, x in got._asdict().items():
        np.testing.assert_array_equal(x, -np.inf if name == "lse" else 0.0)


@pytest.mark.parametrize("slopes", [False, True], ids=["bias", "slopes"])
@pytest.mark.parametrize("implementation", quick.rows({"fused": None, "xla": "xla"}, quick=["fused"]))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sizes", quick.rows(EMPTY, quick=["no queries", "no keys"]))
def test_empty_with_arrays(sizes, dtype, implementation, slopes, platform):
    b, t, s, n, k = sizes
    dtype = DTYPES[dtype]
    args = random(b, t, n, 8, dtype=dtype), random(b, s, k, 8, dtype=dtype), random(b, s, k, 5, dtype=dtype)
    options = dict(
        mask=np.ones((b, 1, t, s), bool),
        segment_ids=(np.zeros((b, t), np.int32), np.zeros((b, s), np.int32)),
        dropout_rate=0.5,
        dropout_rng=jax.random.key(0),
    )

    shapes = [(n,)] if slopes else [(b, n, t, s), (1, n, t, s), (b, 1, 1, s), (n, t, 1), (1, 1, 1, 1)]
    biases = [jax_flash.Alibi(random(*shape)) if slopes else random(*shape) for shape in shapes]

    def results(q, k, v, bias):
        def call(q, k, v, bias):
            return jax_flash.flash_attention(
                q, k, v, bias, return_residual=True, implementation=implementation, **options
            )

        (out, lse), vjp = jax.vjp(call, q, k, v, bias)
        return out, lse, *vjp((jnp.ones_like(out), jnp.zeros_like(lse)))

    of_each = jax.jit(lambda args, biases: [results(*args, bias) for bias in biases])(args, biases)
    for shape, (out, lse, *gradients) in zip(shapes, of_each, strict=True):
        assert (out.shape, lse.shape) == ((b, t, n, 5), (b, t, n))
        np.testing.assert_array_equal(out, 0.0)
        np.testing.assert_array_equal(lse, -np.inf)
        gradients = jax.tree.leaves(gradients)
        assert [x.shape for x in gradients] == [*(x.shape for x in args), shape]
        for gradient in gradients:
            np.testing.assert_array_equal(gradient, 0.0)


@pytest.mark.parametrize(
    "sizes", [(70_000, 1, 2, 1, 1), (1, 1, 2, 70_000, 70_000), (1, 2, 2, 70_000, 1)], ids=str
)
def test_more_than_65535(sizes, platform):
    """More batch elements or heads than a CUDA grid has blocks in y and z."""
    b, t, s, n, k = sizes
    args = (
        random(b, t, n, 4),
        random(b, s, k, 4, seed=1),
        random(b, s, k, 4, seed=2),
        random(b, t, n, 4, seed=3),
    )
    got = forward_and_backward(precision="highest")(*args)
    want = oracle.attention(*args)
    for name in want._fields:
        # The gradients of the single key head sum over all 70,000 query heads.
        terms = t * n // max(k, 1) if name in ("dk", "dv") else s
        assert_close(getattr(got, name), getattr(want, name), "float32", num_keys=terms, name=name)


@pytest.mark.parametrize(
    "sizes", [(70_000, 1, 2, 1, 1), (1, 1, 2, 70_000, 70_000), (1, 2, 2, 70_000, 1)], ids=str
)
def test_more_than_65535_with_arrays(sizes, platform):
    """Like the test above, with a bias, a mask and segments, whose kernels have their own grids."""
    b, t, s, n, k = sizes
    q, k, v, dout = (
        0.5 * random(*shape, seed=seed)
        for seed, shape in enumerate([(b, t, n, 4), (b, s, k, 4), (b, s, k, 4), (b, t, n, 4)])
    )
    bias, rng = random(b, n, t, s, seed=4), np.random.default_rng(5)
    ids = tuple(rng.integers(0, 2, (b, length)).astype(np.int32) for length in (t, s))
    options = dict(mask=rng.random((b, n, t, s)) < 0.7, segment_ids=ids)

    @jax.jit
    def gradients(q, k, v, bias, options):
        attention = functools.partial(jax_flash.flash_attention, precision="highest", **options)
        return jax.vjp(attention, q, k, v, bias)[1](jnp.asarray(dout))

    got, of_bias = gradients(q, k, v, bias, options), {}
    want = oracle.attention(q, k, v, dout, bias=bias, gradients=of_bias, **options)
    for name, a, b in zip(("dq", "dk", "dv", "dbias"), got, (*want[2:], of_bias["bias"]), strict=True):
        assert_close(a, b, "float32", num_keys=max(s, t * n // k.shape[2]), name=name)


def test_head_dims_without_a_limit_on_the_cpu():
    args = [random(1, 5, 1, h, seed=i) for i, h in enumerate((300, 300, 515, 515))]
    got, want = forward_and_backward()(*args), oracle.attention(*args)
    for name in want._fields:
        assert_close(getattr(got, name), getattr(want, name), "float32", num_keys=5, name=name)


def test_head_dims_over_256_are_refused_on_the_gpu(cuda):
    args = [random(1, 5, 1, h, seed=i) for i, h in enumerate((300, 300, 300, 300))]
    with pytest.raises(NotImplementedError, match=r'256.*300.*implementation="xla"'):
        forward_and_backward()(*args)
    with harness.x64("float64"), pytest.raises(NotImplementedError, match=r"128 in float64, got 136"):
        forward_and_backward()(*4 * [random(1, 5, 1, 136, dtype=np.float64)])


# ---- Values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sign", [1, -1])
@quick.KINDS
def test_logits_of_10000(kind, sign, platform):
    """All logits of a row are large and differ little."""
    dtype, precision, _ = harness.kind(platform, kind)
    q = np.full((1, 70, 2, 16), 25 * sign)
    k = np.full((1, 90, 2, 16), 25.0)
    k[0, ::3, :, 0] += 0.125  # representable in every dtype
    v, dout = random(1, 90, 2, 16, seed=1), random(1, 70, 2, 16, seed=2)
    args = [x.astype(DTYPES[dtype]) for x in (q, k, v, dout)]
    with harness.x64(dtype):
        got = forward_and_backward(scale=1.0, precision=precision, is_causal=True)(*args)
    want = oracle.attention(*args, scale=1.0, is_causal=True)
    assert np.abs(want.lse).min() > 9900
    for x in got:
        assert np.isfinite(np.asarray(x, np.float64)).all()
    # Logits of this size have a resolution of 1e-3 in float32, and so have the weights.
    is_double = dtype == "float64"
    np.testing.assert_allclose(np.asarray(got.lse), want.lse, rtol=1e-14 if is_double else 5e-7)
    np.testing.assert_allclose(
        np.asarray(got.out, np.float64), want.out, rtol=0, atol=1e-10 if is_double else 2e-2
    )


def test_one_logit_far_above_the_others(platform):
    q, k, v = random(1, 80, 1, 8), random(1, 100, 1, 8, seed=1), random(1, 100, 1, 8, seed=2)
    k[0, 37] = 1e4 * q[0, 5]
    out = jax_flash.flash_attention(q, k, v, precision="highest")
    np.testing.assert_allclose(out[0, 5], v[0, 37], rtol=1e-6)


# The largest distance of a logit from 0, and the relative error of its exponential. TF32 loses small parts of a weight
# before the whole weight.
EXPONENTIALS = {
    "cpu": [("float32", 87.0, 1e-6), ("float64", 708.0, 1e-14)],
    "cuda": [("float32", 50.0, 1e-4), ("float64", 708.0, 1e-13)],  # exp2 of a rounded product with log2(e)
}


@pytest.mark.parametrize("kind", range(2))
def test_exponential_over_its_whole_range(kind, platform):
    """With logits 0 and -x the second key has the weight exp(-x) / (1 + exp(-x)): small, but not 0."""
    dtype, largest, tolerance = EXPONENTIALS[platform][kind]
    with harness.x64(dtype):
        x = np.linspace(0, largest, 4001).astype(dtype)
        q = x.reshape(1, -1, 1, 1)
        k, v = (np.array(pair, dtype).reshape(1, 2, 1, 1) for pair in ((0, -1), (0, 1)))
        out, lse = jax_flash.flash_attention(q, k, v, scale=1.0, precision="highest", return_residual=True)
    weight = np.exp(-x.astype(np.float64))
    np.testing.assert_allclose(out[0, :, 0, 0], weight / (1 + weight), rtol=tolerance)
    np.testing.assert_allclose(lse[0, :, 0], np.log1p(weight), atol=tolerance)


@pytest.mark.parametrize(
    ("dtype", "cap", "tolerance"), [("float32", 8.0, 2e-6), ("float64", 8.0, 1e-14), ("float64", 1e6, 1e-14)]
)
def test_hyperbolic_tangent_over_its_whole_range(dtype, cap, tolerance, platform):
    """The log-sum-exp of a single key is its capped logit."""
    x = np.concatenate([np.linspace(-25, 25, 2001), [-1e4, 0, 1e-3, 1e4]]).astype(dtype)
    k = np.ones((1, 1, 1, 1), dtype)
    with harness.x64(dtype):
        lse = jax_flash.flash_attention(
            x.reshape(1, -1, 1, 1),
            k,
            k,
            scale=1.0,
            logits_soft_cap=cap,
            precision="highest",
            return_residual=True,
        )[1]
    want = cap * np.tanh(x.astype(np.float64) / cap)
    np.testing.assert_allclose(lse[0, :, 0], want, rtol=tolerance, atol=tolerance)


def test_a_weight_below_all_numbers_is_0(platform):
    q, k, v = (np.array(x, np.float32).reshape(1, -1, 1, 1) for x in (1, (0, -200), (0, 1)))
    out, lse = jax_flash.flash_attention(q, k, v, scale=1.0, return_residual=True)
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_array_equal(lse, 0.0)


def patterns(dtype: str, first: int, end: int) -> np.ndarray:
    """The numbers of a 16-bit type with bits first, first + 1, ... as unsigned integers."""
    return np.arange(first, end, dtype=np.uint16).view(DTYPES[dtype])


# Bits of the smallest and largest numbers for which sums of neighbors are normal and finite in float32.
SUMMED = {"bfloat16": (0x0100, 0x7E00), "float16": (0x0000, 0x7BFF)}


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", SUMMED)
def test_every_tie_is_rounded_to_even(dtype, sign):
    """On the CPU, which converts with integer arithmetic: means of all neighbors, exact in float32, and beside them.

    With keys of 0 the output is the mean of four values: 3 times the lower and once the upper neighbor, each twice, or
    once and 3 times.
    """
    first, end = SUMMED[dtype]
    lower, upper = patterns(dtype, first, end), patterns(dtype, first + 1, end + 1)
    even = np.where(lower.view(np.uint16) % 2 == 0, lower, upper)
    means = {(3, 1): lower, (2, 2): even, (1, 3): upper}
    v = np.stack([np.stack([lower] * low + [upper] * up) for low, up in means])  # [3, 4 keys, numbers]
    zeros = np.zeros((3, 4, 1, 1), v.dtype)
    out = jax_flash.flash_attention(zeros[:, :1], zeros, (sign * v)[:, :, None].astype(v.dtype))
    for got, want in zip(np.asarray(out)[:, 0, 0], means.values(), strict=True):
        np.testing.assert_array_equal(got, (sign * want).astype(v.dtype))


@pytest.mark.parametrize(
    ("dtype", "largest", "half_a_step"),
    [("float16", 65504.0, 16.0), ("bfloat16", (2 - 2.0**-7) * 2.0**127, 2.0**119)],
)
def test_what_is_rounded_to_infinity(dtype, largest, half_a_step):
    """All numbers from half a step above the largest. One key's dv is the sum of dout over two queries."""
    zeros = np.zeros((2, 2, 1, 1), DTYPES[dtype])
    dout = np.array([[largest, half_a_step * (1 - 2.0**-7)], [largest, half_a_step]]).astype(zeros.dtype)
    for sign in (1, -1):
        _, vjp = jax.vjp(lambda v: jax_flash.flash_attention(zeros, zeros[:, :1], v), zeros[:, :1])
        (dv,) = vjp(jnp.asarray((sign * dout).astype(zeros.dtype).reshape(2, 2, 1, 1)))
        np.testing.assert_array_equal(
            np.asarray(dv, np.float32).ravel(), np.float32([sign * largest, sign * np.inf])
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nan_of_every_kind_stays_one(dtype):
    """Even one whose rounding would carry into the sign or give infinity."""
    first = {"bfloat16": 0x7F81, "float16": 0x7C01}[dtype]
    v = np.concatenate([patterns(dtype, first, 0x8000), patterns(dtype, first + 0x8000, 0x10000)])
    zeros = np.zeros((1, 1, 1, 1), v.dtype)
    assert np.isnan(np.asarray(jax_flash.flash_attention(zeros, zeros, v[None, None, None]))).all()


@pytest.mark.parametrize("scale", [0.0, -0.0])
def test_scale_0_is_the_mean(scale, platform):
    q, k, v = (random(1, 33, 1, 8, seed=seed) for seed in range(3))
    out, lse = jax_flash.flash_attention(q, k, v, scale=scale, precision="highest", return_residual=True)
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(1, keepdims=True), out.shape), atol=1e-6)
    np.testing.assert_allclose(lse, np.log(33), rtol=1e-6)


# The relative error of a mean of so many values. A tensor core rounds each sum towards zero.
OF_MANY_KEYS = {
    "bfloat16": 2.0**-7,
    "float16": 2.0**-10,
    "tfloat32": 2.0**-10,
    "float32": 4e-5,
    "float64": 1e-13,
}


@pytest.mark.parametrize("queries", [3, 40])
@quick.KINDS
def test_131072_equal_keys_give_the_mean(kind, queries, platform):
    """All scores of a row are equal. On a GPU kernels that split keys have few queries."""
    dtype, precision, rule = harness.kind(platform, kind)
    keys = 131_072
    q, k, v = (random(1, length, 1, 8, seed=seed) for seed, length in enumerate((queries, 1, keys)))
    q, k, v = (x.astype(DTYPES[dtype]) for x in (q, np.repeat(k, keys, 1), 1 + v))
    with harness.x64(dtype):
        attention = functools.partial(jax_flash.flash_attention, precision=precision, return_residual=True)
        out, lse = jax.jit(attention)(q, k, v)
    mean = v.astype(np.float64).mean(1, keepdims=True)
    out = np.asarray(out, np.float64)
    np.testing.assert_allclose(out, np.broadcast_to(mean, out.shape), rtol=OF_MANY_KEYS[rule])
    scores = np.einsum("qh,h->q", *(x.astype(np.float64) for x in (q[0, :, 0], k[0, 0, 0]))) / np.sqrt(8)
    rtol = 1e-12 if dtype == "float64" else 1e-3 if rule == "tfloat32" else 1e-6
    np.testing.assert_allclose(lse[0, :, 0], scores + np.log(keys), rtol=rtol)


def test_negative_scale_is_the_scale_of_negative_queries(platform):
    q, k, v = (random(1, 40, 2, 8, seed=seed) for seed in range(3))
    attention = functools.partial(jax_flash.flash_attention, is_causal=True, precision="highest")
    np.testing.assert_allclose(attention(q, k, v, scale=-0.3), attention(-q, k, v, scale=0.3), atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_largest_and_smallest_numbers(dtype, platform):
    """Neither overflow in a product with a small scale nor denormal numbers give NaN."""
    info = jnp.finfo(dtype)
    large = np.full((1, 20, 1, 8), np.sqrt(float(info.max)) / 4).astype(DTYPES[dtype])
    small = np.full((1, 20, 1, 8), float(info.smallest_subnormal)).astype(DTYPES[dtype])
    v = random(1, 20, 1, 8, dtype=DTYPES[dtype])
    for q, k, scale in (
        (large, large, 1e-30 if dtype != "float16" else 1e-5),
        (small, small, 1.0),
        (large, small, 1.0),
    ):
        got = forward_and_backward(scale=scale, precision="highest")(q, k, v, v)
        for x in got:
            assert np.isfinite(np.asarray(x, np.float32)).all()


# ---- Size on a GPU ----------------------------------------------------------------------------------------


def test_131072_tokens_in_float32(cuda):
    """One head, forward and backward, in memory linear in T; a few rows are compared with the exact result."""
    length, scale = 131_072, 128**-0.5
    q, k, v, dout = (random(1, length, 1, 128, seed=seed) for seed in range(4))
    got = forward_and_backward(precision="highest")(q, k, v, dout)
    got = oracle.Result(*(np.asarray(x, np.float64)[0, :, 0] for x in got))
    for x in got:
        assert np.isfinite(x).all()
    q, k, v, dout = (x[0, :, 0].astype(np.float64) for x in (q, k, v, dout))
    rows = [0, 1, 77_777, length - 1]
    close = functools.partial(assert_close, kind="float32", num_keys=length)
    s = scale * q[rows] @ k.T
    p = np.exp(s - got.lse[rows, None])
    np.testing.assert_allclose(p.sum(-1), 1.0, rtol=1e-5)
    close(got.out[rows], p @ v, name="out")
    ds = p * (dout[rows] @ v.T - (dout[rows] * got.out[rows]).sum(-1, keepdims=True))
    close(got.dq[rows], scale * ds @ k, name="dq")
    # A key's gradient sums over the queries, with the lse and delta just checked.
    p = np.exp(scale * q @ k[rows].T - got.lse[:, None])
    close(got.dv[rows], p.T @ dout, name="dv")
    ds = p * (dout @ v[rows].T - (dout * got.out).sum(-1, keepdims=True))
    close(got.dk[rows], scale * ds.T @ q, name="dk")


def memory_of_the_gpu() -> int:
    return jax.devices("cuda")[0].memory_stats()["bytes_limit"]


def test_tensors_past_2_to_the_31_elements(cuda):
    """Indices that do not fit in 32 bits: very many short sequences."""
    batch, length, heads, head_dim = 2**18 + 8, 4, 16, 128
    assert batch * length * heads * head_dim > 2**31
    needed = 9 * 2 * batch * length * heads * head_dim
    if memory_of_the_gpu() < 1.2 * needed:
        pytest.skip(f"needs {needed / 2**30:.0f} GiB of GPU memory")

    @jax.jit
    def make(seed):
        """One small array repeated, so that every batch element has the same result."""
        x = jax.random.normal(jax.random.key(seed), (8, length, heads, head_dim), jnp.bfloat16)
        return jnp.tile(x, (batch // 8, 1, 1, 1))

    arrays = [make(seed) for seed in range(4)]
    got = forward_and_backward(deterministic=True)(*arrays)
    small = forward_and_backward(deterministic=True)(*(x[:8] for x in arrays))
    for name, x, want in zip(got._fields, got, small, strict=True):
        same = jax.jit(lambda x, want: jnp.all(x.reshape(-1, *want.shape) == want))(x, want)
        assert same, f"{name} differs between batch elements"


# ---- Repeated calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_repeats_give_the_same_bits(dtype, platform):
    repeats = 1000 if platform == "cuda" else 100
    # On a GPU, enough tiles that free multiprocessors take over remaining ones.
    batch = 80 if platform == "cuda" else 2
    args = [random(batch, 200, n, 64, seed=seed, dtype=DTYPES[dtype]) for seed, n in enumerate((4, 2, 2, 4))]
    args = [jnp.asarray(x) for x in args]
    f = forward_and_backward(is_causal=True, deterministic=True)
    want = f(*args)
    differs = jax.jit(lambda a, b: sum(jnp.any(x != y).astype(jnp.int32) for x, y in zip(a, b, strict=True)))
    assert sum(differs(f(*args), want) for _ in range(repeats)) == 0


@pytest.mark.parametrize(
    "hidden_by", quick.rows(["mask", "segments", "global tokens"], quick=["mask", "segments"])
)
def test_hidden_tiles_do_not_change_the_order(hidden_by, platform):
    """With hidden tiles of keys between visible ones, the order of summation is still fixed."""
    tile, tiles, length = 192, 32, 48
    if hidden_by == "global tokens":  # a shared prefix and packed documents, causal
        tile, tiles, length = 384, 4, 1536
    of_key = np.arange(tile * tiles) // tile
    hidden = {
        "mask": dict(mask=np.broadcast_to(of_key % 2 == 0, (1, 1, length, tile * tiles))),
        "segments": dict(
            segment_ids=(np.zeros((1, length), np.int32), (of_key % 2)[None].astype(np.int32)),
        ),
        "global tokens": dict(
            mask=((of_key[:, None] == of_key) | (np.arange(len(of_key)) < 64))[None, None], is_causal=True
        ),
    }[hidden_by]
    sizes = [(1, length, 1, 8), (1, tile * tiles, 1, 8), (1, tile * tiles, 1, 8), (1, length, 1, 8)]
    args = [jnp.asarray(random(*size, seed=seed)) for seed, size in enumerate(sizes)]
    f = forward_and_backward(deterministic=True, **hidden)
    want = f(*args)
    for _ in range(200):
        for name, x, y in zip(want._fields, f(*args), want, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=name)


def test_second_derivatives_have_one_order_of_summation(platform):
    tile, tiles, length = 96, 64, 48
    mask = np.broadcast_to(np.arange(tile * tiles) // tile % 2 == 0, (1, 1, length, tile * tiles))
    sizes = [(1, length, 1, 8), (1, tile * tiles, 1, 8), (1, tile * tiles, 1, 8)]
    args = [jnp.asarray(random(*size, seed=seed), jnp.float32) for seed, size in enumerate(sizes)]
    gradient = jax.grad(lambda *x: jnp.sum(jax_flash.flash_attention(*x, mask=mask) ** 2), (0, 1, 2))
    f = jax.jit(lambda *x: jax.jvp(gradient, x, x)[1])
    want = f(*args)
    for _ in range(200):
        jax.tree.map(np.testing.assert_array_equal, f(*args), want)


# T, S, N, K, H, Hv and options
REPEATED = [
    (300, 300, 16, 16, 64, 64, dict(is_causal=True)),
    (1024, 1024, 8, 8, 64, 64, dict()),
    (200, 700, 12, 3, 40, 64, dict(local_window_size=(100, 30), logits_soft_cap=5.0)),
    (300, 300, 16, 4, 128, 128, dict(is_causal=True)),
    (1024, 1024, 8, 8, 128, 128, dict()),
    (2048, 2048, 8, 8, 128, 128, dict(is_causal=True)),
    (2048, 2048, 8, 8, 64, 64, dict(local_window_size=(900, None))),
    (600, 600, 4, 4, 40, 24, dict(is_causal=True)),
    (333, 500, 4, 1, 96, 80, dict(is_causal=True, query_offset=167)),
    (300, 300, 8, 2, 256, 256, dict(is_causal=True)),
    (130, 400, 16, 16, 192, 128, dict()),
    (300, 300, 16, 16, 64, 64, dict(segment_ids=np.sort(random(2, 300), 1).astype(np.int32))),
    (
        200,
        700,
        12,
        3,
        128,
        128,
        dict(bias=random(1, 12, 200, 700), dropout_rate=0.1, dropout_rng=jax.random.key(0)),
    ),
    (333, 500, 4, 1, 128, 128, dict(mask=random(2, 1, 333, 500) > 0)),
]
REPEATED = {f"{shape[:6]} {'+'.join(shape[6])}": shape for shape in REPEATED}
_QUICK_REPEATED = [
    f"{sizes} is_causal"
    for sizes in ((300, 300, 16, 16, 64, 64), (600, 600, 4, 4, 40, 24), (2048, 2048, 8, 8, 128, 128))
]


@pytest.mark.parametrize("shape", quick.rows(REPEATED, quick=_QUICK_REPEATED))
def test_deterministic_gradients_repeat_under_load(shape, platform):
    """A large product before each call lowers the clock and clears the caches."""
    t, s, n, k, h, hv, options = shape
    on_gpu = platform == "cuda"
    sizes = [(2, t, n, h), (2, s, k, h), (2, s, k, hv), (2, t, n, hv)]
    args = [jnp.asarray(random(*size, seed=i, dtype=DTYPES["bfloat16"])) for i, size in enumerate(sizes)]
    f = forward_and_backward(deterministic=True, **options)
    load = jnp.ones((4096, 4096) if on_gpu else (8, 8), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    count = jax.jit(
        lambda total, a, b: total + sum(jnp.sum(x != y, dtype=jnp.int32) for x, y in zip(a, b, strict=True))
    )
    want, differences = f(*args), jnp.int32(0)
    for _ in range(1000 if on_gpu else 5):
        product(load, load)
        differences = count(differences, f(*args), want)
    assert differences == 0


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "any order"])
def test_replays_follow_changed_inputs(deterministic, platform):
    """XLA captures a program of several kernels in a CUDA graph and replays it."""
    attention = functools.partial(
        jax_flash.flash_attention, is_causal=True, deterministic=deterministic, precision="highest"
    )

    def loss(q, k, v):
        for _ in range(3):
            q = q + attention(q, k, v)
        return jnp.sum(jnp.sin(q.astype(jnp.float32)))

    compiled = jax.jit(jax.value_and_grad(loss, ALL))
    make = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (3, 1, 130, 2, 64), jnp.float32))
    for seed in range(100 if platform == "cuda" else 10):
        args = tuple(make(seed))
        got = compiled(*args)
        want = jax.value_and_grad(loss, ALL)(*args)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_a_head_does_not_depend_on_the_others(head_dim, platform):
    """The assignment of tiles to multiprocessors changes nothing: a head gives the same bits alone and among many."""
    heads = 150 if platform == "cuda" else 6
    q = random(2, 333, heads, head_dim, dtype=DTYPES["bfloat16"])
    k, v = (random(2, 300, heads // 2, head_dim, seed=seed, dtype=DTYPES["bfloat16"]) for seed in (1, 2))
    lengths = jnp.asarray([300, 123], jnp.int32)
    f = jax.jit(
        functools.partial(
            jax_flash.flash_attention,
            is_causal=True,
            key_value_seq_lengths=lengths,
            query_offset=20,
            return_residual=True,
        )
    )
    out, lse = f(q, k, v)
    for head in (0, 1, heads // 2, heads - 1):
        one = f(q[:, :, head : head + 1], *(x[:, :, head // 2 : head // 2 + 1] for x in (k, v)))
        np.testing.assert_array_equal(out[:, :, head], one[0][:, :, 0])
        np.testing.assert_array_equal(lse[:, :, head], one[1][:, :, 0])


@pytest.mark.parametrize("options", ["lengths", "all"])
@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_cached_sequence_does_not_depend_on_the_others(head_dim, queries, options, platform):
    """Into which parts the keys are split, and in which order they are merged, depends on a sequence's shape alone.

    On a GPU, the batch is large enough that thread blocks merge parts (of up to 8 rows).
    """
    batch, heads, keys = 20 if platform == "cuda" and queries == 1 else 3, 16, 2200
    q = random(batch, queries, heads, head_dim, dtype=DTYPES["bfloat16"])
    k, v = (random(batch, keys, 2, head_dim, seed=seed, dtype=DTYPES["bfloat16"]) for seed in (1, 2))
    lengths = np.resize(np.array([2200, 333, 16], np.int32), batch)
    operands = dict(key_value_seq_lengths=lengths, query_offset=lengths - queries)
    if options == "all":
        operands |= dict(
            bias=random(batch, heads, 1, keys, seed=3),
            mask=random(batch, heads, queries, keys, seed=4) < 1,
            sinks=random(heads, seed=5),
        )
    f = jax.jit(functools.partial(jax_flash.flash_attention, is_causal=True, return_residual=True))
    out, lse = f(q, k, v, **operands)
    for b in range(3):
        for head in range(2):
            own = slice(b, b + 1), slice(8 * head, 8 * head + 8)
            alone = {name: x[own[0]] for name, x in operands.items() if name != "sinks"}
            alone |= {name: alone[name][:, own[1]] for name in ("bias", "mask") if name in alone}
            alone |= {"sinks": operands["sinks"][own[1]]} if "sinks" in operands else {}
            cache = (x[b : b + 1, :, head : head + 1] for x in (k, v))
            one = f(q[own[0], :, own[1]], *cache, **alone)
            np.testing.assert_array_equal(out[own[0], :, own[1]], one[0])
            np.testing.assert_array_equal(lse[own[0], :, own[1]], one[1])


MERGED = {
    "lengths": {},
    "two queries": dict(queries=2, heads=8, is_causal=True),
    "twelve rows": dict(queries=3, heads=8, is_causal=True),
    "window": dict(queries=2, heads=8, is_causal=True, local_window_size=(3000, 0)),
    "pairs": {},
    "infinite values": {},
    "equal lengths": {},
    "equal lengths, window": dict(queries=2, heads=8, is_causal=True, local_window_size=(700, 0)),
    "equal lengths, infinite values": {},
    "equal lengths, small shared memory": {},
}


@pytest.mark.parametrize("options", MERGED)
@pytest.mark.parametrize(
    ("dtype", "head_dim", "precision"),
    [
        ("bfloat16", 64, None),
        ("float16", 128, None),
        ("bfloat16", 256, None),
        ("bfloat16", 33, None),  # copies of 2 bytes
        ("float32", 40, "default"),
        ("float32", 128, "highest"),
    ],
)
@pytest.mark.parametrize("keys", [900, 2200, 8100])
def test_thread_blocks_that_merge_parts_of_keys(keys, dtype, head_dim, precision, options, platform):
    """The bits are those of blocks with a part each; a group may be whole, cut off, or empty.

    Where sequences are about equally long, a block merges all parts.
    """
    if platform == "cpu":
        pytest.skip("of CUDA kernels")
    settings = dict(queries=1, heads=8) | MERGED[options]
    queries, heads, batch = settings.pop("queries"), settings.pop("heads"), 4
    q = random(batch, queries, heads, head_dim, dtype=DTYPES[dtype])
    k, v = (random(batch, keys, 2, head_dim, seed=seed, dtype=DTYPES[dtype]) for seed in (1, 2))
    lengths = np.array([keys, keys // 2, 1, 0], np.int32)
    if "equal lengths" in options:
        lengths = keys - np.array([0, 1, 30, 64], np.int32)
    operands = dict(key_value_seq_lengths=lengths, query_offset=lengths - queries)
    if options in ("pairs", "equal lengths, window"):
        operands |= dict(sinks=random(heads, seed=6))
    if options == "pairs":
        blocks = np.repeat(
            np.random.default_rng(3).random((batch, 1, 1, -(-keys // 128))) < 0.3, 128, axis=-1
        )
        operands |= dict(
            bias=random(batch, heads, 1, keys, seed=4),
            mask=np.asarray(random(batch, heads, 1, keys, seed=5) < 1) & blocks[..., :keys],
        )
    if "infinite values" in options:
        v[0, [3, keys - 1], 0, 0], v[1, 0, 1] = np.inf, np.nan
    results = []
    shared_memory = str(99 * 1024) if "small shared memory" in options else None
    for tile in ("short", "long"):
        with harness.cuda_settings(tile=tile, shared_memory_per_block=shared_memory):
            call = functools.partial(
                jax_flash.flash_attention, return_residual=True, precision=precision, **settings
            )
            results.append(
                jax.device_get(jax.jit(lambda *x, call=call, **y: call(*x, **y))(q, k, v, **operands))
            )
    for one, merged in zip(*results, strict=True):
        number = np.dtype(f"uint{8 * one.itemsize}")
        np.testing.assert_array_equal(merged.view(number), one.view(number))
    if "infinite values" not in options:
        exact = dict(return_residual=True, implementation="xla", precision="highest")
        args = (x.astype(jnp.float32) for x in (q, k, v))
        out, lse = jax_flash.flash_attention(*args, **operands, **settings, **exact)
        tolerance = 1e-3 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(results[0][0].astype(np.float32), out, atol=tolerance)
        np.testing.assert_allclose(results[0][1], lse, rtol=1e-3, atol=1e-3)


def test_a_thread_block_that_merges_a_long_sequence(platform):
    """So long that its parts are not in groups."""
    if platform == "cpu":
        pytest.skip("of CUDA kernels")
    q = random(1, 1, 1, 128, dtype=DTYPES["bfloat16"])
    k, v = (random(1, 33_000, 1, 128, seed=seed, dtype=DTYPES["bfloat16"]) for seed in (1, 2))
    results = []
    for tile in ("short", "long"):
        with harness.cuda_settings(tile=tile):
            call = jax.jit(lambda *x: jax_flash.flash_attention(*x, return_residual=True))
            results.append(jax.device_get(call(q, k, v)))
    for one, merged in zip(*results, strict=True):
        np.testing.assert_array_equal(merged, one)


def test_a_batch_beyond_whole_rounds_of_thread_blocks(platform):
    """Thread blocks take the first sequences whole, and parts of the others. The bits are the same."""
    if platform == "cpu":
        pytest.skip("of CUDA kernels")
    heads, keys = 8, 2100
    # Two thread blocks for each multiprocessor; the emulator has few.
    round_tiles = 2 * getattr(jax.config.jax_default_device, "core_count", 132)
    batch = -(-round_tiles // heads) + 4
    q = random(batch, 1, heads, 128, dtype=DTYPES["bfloat16"])
    k, v = (random(batch, keys, heads, 128, seed=seed, dtype=DTYPES["bfloat16"]) for seed in (1, 2))
    lengths = keys - np.arange(batch, dtype=np.int32)
    attention = functools.partial(jax_flash.flash_attention, return_residual=True)
    results = []
    for tile in (None, "short"):  # short: parts alone
        with harness.cuda_settings(tile=tile):
            call = jax.jit(lambda *x, n: attention(*x, key_value_seq_lengths=n))
            results.append(jax.device_get(call(q, k, v, n=lengths)))
    for one, parts in zip(*results, strict=True):
        np.testing.assert_array_equal(one, parts)


TWO_HEADS = {
    "plain": {},
    "head dim 32": dict(head_dim=32),
    "odd number of heads": dict(heads=3, kv_heads=3),
    "one head": dict(heads=1, kv_heads=1),
    "grouped": dict(heads=6, kv_heads=2),  # the second pair has heads of two groups
    "more rows than a tile": dict(queries=270, keys=300),
    "causal": dict(queries=200, keys=230, is_causal=True),
    "window": dict(queries=150, keys=400, local_window_size=(90, 5)),
    "lengths": dict(lengths=True),
    "sinks, odd number of heads": dict(heads=3, kv_heads=1, sinks=True),
    "few keys that count": dict(keys=197),
    "pages": dict(keys=144, lengths=True, page_size=16),
    "values of 40 columns": dict(head_dim_v=40),
    "32 columns, odd number of heads": dict(head_dim=32, heads=5, kv_heads=5, head_dim_v=24),
    "more tiles than multiprocessors": dict(batch=60, queries=70, keys=90, heads=5, kv_heads=5, lengths=True),
    "infinite values": dict(heads=3, kv_heads=3, infinite=True),
}


@pytest.mark.parametrize("settings", TWO_HEADS.values(), ids=TWO_HEADS.keys())
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_of_two_heads(settings, dtype, platform):
    """The bits are those of tiles with one head."""
    if platform == "cpu":
        pytest.skip("of CUDA kernels")
    sizes = dict(batch=3, queries=100, keys=130, heads=4, kv_heads=4, head_dim=64)
    extras = dict(head_dim_v=None, sinks=False, lengths=False, infinite=False, page_size=None)
    options = sizes | extras | settings
    batch, queries, keys, heads, kv_heads, head_dim = map(options.pop, sizes)
    head_dim_v, has_sinks, has_lengths, is_infinite, page_size = map(options.pop, extras)
    q = random(batch, queries, heads, head_dim, dtype=DTYPES[dtype])
    k = random(batch, keys, kv_heads, head_dim, seed=1, dtype=DTYPES[dtype])
    v = random(batch, keys, kv_heads, head_dim_v or head_dim, seed=2, dtype=DTYPES[dtype])
    operands = dict(sinks=random(heads, seed=3)) if has_sinks else {}
    if has_lengths:
        operands |= dict(
            query_seq_lengths=np.resize(np.array([queries, 70, 0], np.int32), batch),
            key_value_seq_lengths=np.resize(np.array([keys - 1, 64, keys], np.int32), batch),
        )
    if page_size:
        k, v, page_indices = harness.in_pages(k, v, operands["key_value_seq_lengths"], page_size)
        operands |= dict(page_indices=page_indices)
    if is_infinite:
        v[0, 3, 0, 0], v[1, 0, 1], k[2, 5, 2] = np.inf, np.nan, np.inf
    attention = functools.partial(jax_flash.flash_attention, return_residual=True, **options)
    results = []
    for tile in ("short", "two_heads"):
        with harness.cuda_settings(tile=tile):
            call = jax.jit(lambda *x, **y: attention(*x, **y))
            results.append(jax.device_get(call(q, k, v, **operands)))
    for one, two in zip(*results, strict=True):
        number = np.dtype(f"uint{8 * one.itemsize}")
        np.testing.assert_array_equal(two.view(number), one.view(number))
    if not is_infinite:
        exact = (x.astype(np.float32) for x in (q, k, v))
        out, lse = attention(*exact, **operands, implementation="xla", precision="highest")
        np.testing.assert_allclose(results[1][0].astype(np.float32), out, atol=2e-2)
        np.testing.assert_allclose(results[1][1], lse, rtol=1e-3, atol=1e-3)


def test_an_unknown_tile_is_refused(platform):
    if platform == "cpu":
        pytest.skip("of CUDA kernels")
    q = random(1, 8, 1, 16)
    message = "JAX_FLASH_TILE must be short, long or two_heads, got wide"
    with harness.cuda_settings(tile="wide"), pytest.raises(jax.errors.JaxRuntimeError, match=message):
        jax.block_until_ready(jax.jit(jax_flash.flash_attention)(q, q, q))


@pytest.mark.parametrize("queries", [260, 1])
def test_replays_in_16_bits_give_the_eager_bits(queries, platform):
    """The bfloat16 forward pass draws tiles from a counter in memory, which each call must reset.

    For few queries, the kernel that merges the parts of the keys starts before the one that makes them has ended.
    """
    attention = functools.partial(jax_flash.flash_attention, is_causal=True, query_offset=260 - queries)

    def six_times(q, k, v):  # XLA makes no graph of fewer than five
        for _ in range(6):
            q = attention(q, k, v)
        return q

    compiled = jax.jit(six_times)
    heads = 100 if platform == "cuda" else 2
    make = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), (3, 2, 260, heads, 64), jnp.bfloat16))
    for seed in range(100 if platform == "cuda" else 5):
        q, k, v = make(seed)
        args = q[:, :queries], k, v
        np.testing.assert_array_equal(compiled(*args), six_times(*args))


@pytest.mark.parametrize("head_dim", quick.rows([32, 64, 128, 256], quick=[64]))
@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "any order"])
def test_replays_of_gradients_in_16_bits(deterministic, head_dim, platform):
    """They give the same bits as eager calls, except a dq that is summed in any order."""

    def gradients(q, k, v):
        call = functools.partial(jax_flash.flash_attention, is_causal=True, deterministic=deterministic)
        out, pullback = jax.vjp(call, q, k, v)
        return [pullback(dout) for dout in (out, q, k, v)]

    @jax.jit
    def count_differences(got, want):
        """Counts on the device, because copies to the host would take longer than the kernels."""

        def differs(x, y, step):
            x, y = x.astype(jnp.float32), y.astype(jnp.float32)
            return jnp.sum(~(jnp.abs(x - y) <= step * jnp.abs(y) + 1e-5 * (step > 0)), dtype=jnp.int32)

        dq_step = 0 if deterministic else 2**-7  # of bfloat16
        return sum(
            differs(x, y, step)
            for a, b in zip(got, want, strict=True)
            for x, y, step in zip(a, b, (dq_step, 0, 0), strict=True)
        )

    compiled = jax.jit(gradients)
    heads = 50 if platform == "cuda" else 2
    make = jax.jit(
        lambda seed: jax.random.normal(jax.random.key(seed), (3, 2, 260, heads, head_dim), jnp.bfloat16)
    )
    for seed in range(100 if platform == "cuda" else 3):
        args = tuple(make(seed))
        assert count_differences(compiled(*args), gradients(*args)) == 0


def test_second_device_while_the_first_is_current(platform):
    devices = jax.devices(platform)
    if len(devices) < 2:
        pytest.skip(f"needs 2 devices of {platform}, there is 1")
    args = [random(2, 130, 2, 64, seed=seed, dtype=DTYPES["bfloat16"]) for seed in range(4)]
    f = forward_and_backward(is_causal=True, deterministic=True)
    results = [
        f(*(jax.device_put(x, device) for x in args)) for device in (devices[0], devices[-1], devices[0])
    ]
    assert results[1].out.devices() == {devices[-1]}
    for a, b, c in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_from_many_threads(dtype, platform):
    """Calls from several Python threads at once. In 16 bits, Hopper's blocks add dq in turns."""
    from concurrent.futures import ThreadPoolExecutor

    f = forward_and_backward(is_causal=True, deterministic=True)
    inputs = [
        [jnp.asarray(random(1, 600, 2, 64, seed=4 * i + j), DTYPES[dtype]) for j in range(4)]
        for i in range(8)
    ]
    want = [f(*args) for args in inputs]
    device = jax.devices(platform)[0]

    def again(args):
        with jax.default_device(device):
            return f(*args)

    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(again, inputs * 4))
    for a, b in zip(got, want * 4, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
