"""NaN and infinity in inputs and memory: what must not be read, and what must not be lost."""

import contextlib
import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import DTYPES

import jax_flash
from jax_flash import _kernel_choice

QUERIES, KEYS = 150, 140
LENGTHS = dict(query_seq_lengths=(65, 0, 150, 127), key_value_seq_lengths=(99, 140, 0, 64))
FLOATS = quick.rows([np.nan, np.inf, -np.inf], quick=[np.nan])


def arrays(
    dtype: str, seed: int = 0, h: int = 40, hv: int = 24, t: int = QUERIES, s: int = KEYS
) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(4, t, 4, h), (4, s, 2, h), (4, s, 2, hv), (4, t, 4, hv), (4, t, 4)]
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


def forward_and_backward_with_bias(static: dict):
    """Like `forward_and_backward`, with the gradient of the operand `bias`."""

    @jax.jit
    def f(q, k, v, dout, dlse, operands):
        def attention(q, k, v, bias):
            return jax_flash.flash_attention(
                q, k, v, return_residual=True, **static, **operands | {"bias": bias}
            )

        (out, lse), vjp = jax.vjp(attention, q, k, v, operands["bias"])
        return dict(zip(RESULTS, (out, lse, *vjp((dout, dlse))), strict=True))

    return lambda *inputs: {name: np.asarray(x) for name, x in f(*inputs).items()}


RESULTS = (*oracle.Result._fields[:5], "dbias")


def assert_same_bits(got: oracle.Result, want: oracle.Result) -> None:
    for name in want._fields:
        a, b = getattr(got, name), getattr(want, name)
        assert a.tobytes() == b.tobytes(), f"{name} differs in {(a != b).sum()} places"


@pytest.mark.parametrize("poison", FLOATS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@quick.KINDS
def test_beyond_the_lengths_nothing_leaks(kind, is_causal, poison, platform):
    dtype, precision, _ = harness.kind(platform, kind)
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


@pytest.mark.parametrize("queries", [1, 3])
@quick.KINDS
def test_beyond_the_end_of_a_cache_nothing_leaks(kind, queries, platform):
    """With few queries the keys are split into parts, some of them beyond the length."""
    dtype, precision, _ = harness.kind(platform, kind)
    lengths = np.array([0, 1, 255, 256, 257, 700], np.int32)
    rng = np.random.default_rng(queries)
    shapes = [(len(lengths), queries, 8, 64), *2 * [(len(lengths), 900, 2, 64)]]
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    beyond = np.arange(900) >= lengths[:, None]
    nans = [np.where(beyond[..., None, None], DTYPES[dtype](np.nan), x) for x in (k, v)]
    f = jax.jit(
        functools.partial(
            jax_flash.flash_attention,
            is_causal=True,
            query_offset=jnp.asarray(lengths - queries),
            key_value_seq_lengths=jnp.asarray(lengths),
            return_residual=True,
            precision=precision,
        )
    )
    with harness.x64(dtype):
        want, got = f(q, k, v), f(q, *nans)
    for a, b in zip(got, want, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert not np.asarray(got[0])[0].any()
    assert np.isneginf(got[1][0]).all()


@pytest.mark.parametrize(
    ("h", "hv", "shares_ds"),
    quick.rows(
        [
            (40, 24, True),
            (96, 96, True),
            *((h, hv, shares) for h, hv in ((192, 128), (256, 256), (512, 264)) for shares in (True, False)),
        ],
        quick=[(40, 24, True)],
        unpack=True,
    ),
)
@pytest.mark.parametrize("has_segments", [False, True], ids=["blocks in order", "blocks from a list"])
@pytest.mark.parametrize("poison", FLOATS)
def test_beyond_the_lengths_nothing_leaks_into_unordered_sums(
    poison, has_segments, h, hv, shares_ds, platform, monkeypatch
):
    """Sums in any order cannot be compared by bits, but must be as close as without the NaN."""
    if h > 256 and platform == "cuda" and not harness.is_hopper():
        pytest.skip("needs Hopper")
    if not shares_ds:
        monkeypatch.setattr(_kernel_choice, "num_shared_heads", lambda *_, **__: 0)
        jax.clear_caches()
    operands = {name: np.array(x, np.int32) for name, x in LENGTHS.items()}
    if has_segments:
        operands["segment_ids"] = tuple(
            np.arange(4 * x, dtype=np.int32).reshape(4, x) // 80 for x in (QUERIES, KEYS)
        )
    inputs = arrays("bfloat16", h=h, hv=hv)
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


WINDOW = dict(local_window_size=(5, 70))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize(
    ("dtype", "sizes", "static"),
    [
        ("bfloat16", {}, dict(is_causal=True)),
        ("float32", {}, dict(is_causal=True)),
        # Tiles of keys and of queries have blocks in common that are seen in part: ds beside them is cleared.
        ("bfloat16", dict(h=192, hv=128, t=200, s=200), WINDOW),
        ("bfloat16", dict(h=192, hv=128, t=200, s=200), WINDOW | dict(logits_soft_cap=5.0)),
        ("bfloat16", dict(h=256, hv=256, t=200, s=200), WINDOW),
    ],
)
def test_memory_is_not_read_before_it_is_written(dtype, sizes, static, deterministic, platform):
    """Results and workspace get memory that held NaN."""
    f = forward_and_backward(dict(deterministic=deterministic) | static)
    inputs = arrays(dtype, **sizes)
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


@quick.KINDS
def test_nan_is_not_swallowed(kind, platform):
    """NaN in a query, or in a key or value that it sees, makes the row NaN; the lse of other rows stays."""
    dtype, precision, _ = harness.kind(platform, kind)
    f = forward_and_backward(dict(deterministic=True, precision=precision, is_causal=True))
    clean = arrays(dtype)
    portable = harness.without_planes() if dtype == "float32" else contextlib.nullcontext()
    with harness.x64(dtype), portable:  # they compute the heads with NaN in any case
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


@pytest.mark.parametrize("value", FLOATS)
@pytest.mark.parametrize(("operand", "row"), [("q", 1), ("k", 3), ("v", 3), ("k", 698), ("v", 698)])
@quick.KINDS
def test_parts_of_the_keys_swallow_nothing(kind, operand, row, value, platform):
    """With few queries: the same places are NaN, infinite and finite; `row` is in the first or the last part."""
    dtype, precision, _ = harness.kind(platform, kind)
    rng = np.random.default_rng(0)
    shapes = [(2, 3, 4, 64), *2 * [(2, 700, 2, 64)]]
    inputs = [rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes]
    inputs["qkv".index(operand)][1, row, 1, 3] = value
    options = dict(is_causal=True, query_offset=697)  # the first query does not see row 698
    f = jax.jit(
        functools.partial(jax_flash.flash_attention, precision=precision, return_residual=True, **options)
    )
    with harness.x64(dtype):
        got = [np.asarray(x).astype(np.float64) for x in f(*inputs)]
    want = oracle.attention(*inputs, **options)[:2]
    for a, b in zip(got, want, strict=True):
        # A row that does not see the key may get 0 * NaN from it.
        seen = np.ones(b.shape, bool)
        if row == 698 and operand == "v":
            seen[1, 0, 2:] = False
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(a)[seen], test(b)[seen])


@pytest.mark.parametrize("value", quick.rows([np.inf, -np.inf], quick=[np.inf]))
@pytest.mark.parametrize("operand", ["q", "k", "v"])
@quick.KINDS
def test_inf_follows_the_reference(kind, operand, value, platform):
    """In full attention the same places are NaN, infinite and finite."""
    dtype, precision, _ = harness.kind(platform, kind)
    inputs = arrays(dtype)
    inputs["qkv".index(operand)][1, 70, 1, 3] = value
    f = jax.jit(lambda q, k, v: jax_flash.flash_attention(q, k, v, precision=precision, return_residual=True))
    with harness.x64(dtype):
        got = [np.asarray(x).astype(np.float64) for x in f(*inputs[:3])]
    for a, b in zip(got, oracle.attention(*inputs[:3])[:2], strict=True):
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(a), test(b))


def with_equal_infinities(got, want, name: str, operand: str) -> tuple[np.ndarray, np.ndarray]:
    """Two gradients in float64, after checking that the same places are NaN, infinite and finite.

    The infinity is in batch element 1, head 1, column 3 of `operand`.
    """
    a, b = (getattr(x, name).astype(np.float64) for x in (got, want))
    if (operand, name) == ("k", "dq"):  # the oracle leaves out 0 * inf
        a[1, :, 2:, 3] = b[1, :, 2:, 3] = 0
    for test in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(test(a), test(b), err_msg=f"{name}: {test.__name__}")
    return a, b


@pytest.mark.parametrize("value", quick.rows([np.inf, -np.inf], quick=[np.inf]))
@pytest.mark.parametrize("operand", ["q", "k", "v", "dout"])
@quick.KINDS
def test_inf_follows_the_reference_in_gradients(kind, operand, value, platform):
    """In full attention the same places are NaN, infinite and finite."""
    dtype, precision, _ = harness.kind(platform, kind)
    inputs = arrays(dtype)
    inputs[("q", "k", "v", "dout").index(operand)][1, 70, 1, 3] = value
    f = forward_and_backward(dict(precision=precision))
    with harness.x64(dtype):
        got = f(*inputs, {})
    want = oracle.attention(*inputs)
    for name in ("dq", "dk", "dv"):
        with_equal_infinities(got, want, name, operand)


WITHOUT_PLANES = {
    "128 columns": (128, 24),  # which planes could hold, but for the bias
    "wide heads": (136, 24),
    "wide values": (40, 256),
}


@pytest.mark.parametrize("sizes", quick.rows(WITHOUT_PLANES, quick=["wide heads"]))
@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("value", quick.rows([np.inf, -np.inf], quick=[np.inf]))
@pytest.mark.parametrize("operand", ["q", "k", "v", "dout"])
def test_inf_follows_the_reference_where_there_are_no_planes(operand, value, deterministic, sizes, platform):
    """Gradients at "highest" by kernels that run behind others; other heads keep their bits."""
    rng = np.random.default_rng(0)
    h, hv = sizes
    shapes = [(2, 40, 4, h), (2, 70, 2, h), (2, 70, 2, hv), (2, 40, 4, hv), (2, 40, 4)]
    clean = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    inputs = [x.copy() for x in clean]
    inputs[("q", "k", "v", "dout").index(operand)][1, 35, 1, 3] = value
    operands = {"bias": rng.standard_normal((40, 70)).astype(np.float32)}
    f = forward_and_backward(dict(precision="highest", deterministic=deterministic))
    got = f(*inputs, operands)
    want = oracle.attention(*inputs, **operands)
    unchanged = f(*clean, operands) if deterministic else got
    if platform == "cuda" and not deterministic:  # sums of dq in any order: no kernel has computed them again
        in_order = forward_and_backward(dict(precision="highest", deterministic=True))(*clean, operands)
        assert (f(*clean, operands).dq != in_order.dq).any()
    kv_head = 1 if operand in "kv" else 0
    for name in ("dq", "dk", "dv"):
        a, b = with_equal_infinities(got, want, name, operand)
        finite = np.isfinite(b)
        np.testing.assert_allclose(a[finite], b[finite], rtol=1e-4, atol=1e-5, err_msg=name)
        heads = np.arange(a.shape[2]) // (2 if name == "dq" else 1)
        got_bits, bits = getattr(got, name), getattr(unchanged, name)
        np.testing.assert_array_equal(got_bits[0], bits[0])
        np.testing.assert_array_equal(got_bits[1, :, heads != kv_head], bits[1, :, heads != kv_head])


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_inf_follows_the_reference_in_other_derivatives(operand, precision, platform):
    """The same places are NaN, infinite and finite in the gradient of a bias, tangents and second derivatives.

    But at "high" and "highest" a GPU may have NaN in tangents and second derivatives.
    """
    rng = np.random.default_rng(0)
    q_shape, kv_shape = (2, 40, 4, 64), (2, 70, 2, 64)
    inputs, tangents = (
        [rng.standard_normal(shape).astype(np.float32) for shape in (q_shape, kv_shape, kv_shape)]
        for _ in range(2)
    )
    dout = rng.standard_normal(q_shape).astype(np.float32)
    bias = rng.standard_normal((1, 4, 40, 70)).astype(np.float32)
    inputs["qkv".index(operand)][1, 30, 1, 3] = np.inf

    @functools.partial(jax.jit, static_argnames=("implementation", "precision", "forward_mode"))
    def derivatives(inputs, tangents, **options):
        attention = functools.partial(jax_flash.flash_attention, **options)

        def gradients(*inputs):
            return jax.vjp(attention, *inputs)[1](dout)

        out, of_out = jax.jvp(attention, inputs, tangents)
        # The plain tangent of an infinite output is infinite.
        of_out = jnp.where(jnp.isfinite(out), of_out, 0)
        _, of_gradients = jax.jvp(gradients, inputs, tangents)
        [of_bias] = jax.vjp(lambda bias: attention(*inputs, bias), bias)[1](dout)
        return of_bias, of_out, *of_gradients

    arrays = tuple(inputs), tuple(tangents)
    got = derivatives(*arrays, forward_mode=True, precision=precision)
    want = derivatives(*arrays, implementation="xla", precision="highest")
    tolerance = 1e-2 if precision is None and platform == "cuda" else 1e-4
    for name, a, b in zip(("dbias", "tout", "tdq", "tdk", "tdv"), got, want, strict=True):
        may_be_nan = platform == "cuda" and precision == "highest" and name != "dbias"
        counts = ~np.isnan(a) if may_be_nan else np.ones(a.shape, bool)
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(
                test(a)[counts], test(b)[counts], err_msg=f"{name}: {test.__name__}"
            )
        finite = counts & np.isfinite(b)
        np.testing.assert_allclose(a[finite], b[finite], rtol=tolerance, atol=tolerance, err_msg=name)


# ---- Masks, segments and biases ---------------------------------------------------------------------------


def array_operands(dtype: str) -> dict:
    """Bias, mask and segments for `arrays`."""
    rng = np.random.default_rng(1)
    return dict(
        bias=rng.standard_normal((4, 4, QUERIES, KEYS)).astype(DTYPES[dtype]),
        mask=rng.random((4, 1, QUERIES, KEYS)) < 0.8,
        segment_ids=tuple(
            np.sort(rng.integers(0, 3, (4, size))).astype(np.int32) for size in (QUERIES, KEYS)
        ),
    )


@pytest.mark.parametrize("poison", FLOATS)
@quick.KINDS
def test_arrays_beyond_the_lengths_change_nothing(kind, poison, platform):
    """Whatever bias, mask and segments hold there; the gradient of the bias is 0 there."""
    dtype, precision, _ = harness.kind(platform, kind)
    static = dict(deterministic=True, precision=precision, dropout_rate=0.1, dropout_rng=jax.random.key(0))
    f = forward_and_backward_with_bias(static)
    lengths = {name: np.array(x, np.int32) for name, x in LENGTHS.items()}
    clean = arrays(dtype)
    operands = array_operands(dtype)
    changed = jax.tree.map(np.copy, operands)
    poisoned = [x.copy() for x in clean]
    for b, (queries, keys) in enumerate(zip(*LENGTHS.values(), strict=True)):
        for x in (poisoned[0], poisoned[3], poisoned[4]):
            x[b, queries:] = poison
        for x in poisoned[1:3]:
            x[b, keys:] = poison
        of_queries, of_keys = changed["segment_ids"]
        of_queries[b, queries:] = of_keys[b, keys:] = of_keys[b, 0]
        for there in ((..., slice(queries, None), slice(None)), (..., slice(keys, None))):
            changed["bias"][b][there] = poison
            changed["mask"][b][there] ^= True
    with harness.x64(dtype):
        want, got = f(*clean, operands | lengths), f(*poisoned, changed | lengths)
    for name, x in want.items():
        assert got[name].tobytes() == x.tobytes(), name
        assert name == "lse" or np.isfinite(x.astype(np.float64)).all()
    for b, (queries, keys) in enumerate(zip(*LENGTHS.values(), strict=True)):
        assert not got["dbias"][b, :, queries:].any()
        assert not got["dbias"][b, :, :, keys:].any()
    assert got["dbias"].any()


HIDING = {
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(20, 3)),
    "mask": dict(mask=np.random.default_rng(2).random((4, 4, QUERIES, KEYS)) < 0.5),
    "segments": {"segment_ids": array_operands("float32")["segment_ids"]},
}


@pytest.mark.parametrize("poison", FLOATS)
@pytest.mark.parametrize("hiding", HIDING.values(), ids=HIDING.keys())
@quick.KINDS
def test_bias_of_hidden_pairs_changes_nothing(kind, hiding, poison, platform):
    """A hidden pair's logit is -inf, whatever its bias; its gradient is 0."""
    dtype, precision, _ = harness.kind(platform, kind)
    static = {name: x for name, x in hiding.items() if name in ("is_causal", "local_window_size")}
    operands = {name: x for name, x in hiding.items() if name not in static}
    f = forward_and_backward_with_bias(dict(deterministic=True, precision=precision, **static))
    bias = array_operands(dtype)["bias"]
    seen = np.broadcast_to(oracle.visible(4, QUERIES, KEYS, **hiding), bias.shape)
    poisoned = np.where(seen, bias, poison).astype(bias.dtype)
    inputs = arrays(dtype)
    with harness.x64(dtype):
        want = f(*inputs, operands | {"bias": bias})
        got = f(*inputs, operands | {"bias": poisoned})
    for name, x in want.items():
        assert got[name].tobytes() == x.tobytes(), name
    assert np.isfinite(got["dbias"].astype(np.float64)).all()
    assert not got["dbias"][~seen].any()
    assert got["dbias"].any()


@quick.KINDS
def test_nan_in_the_bias_is_not_swallowed(kind, platform):
    """It makes its row NaN; the lse of other rows and the results of other heads stay."""
    dtype, precision, _ = harness.kind(platform, kind)
    f = forward_and_backward_with_bias(dict(deterministic=True, precision=precision))
    inputs, bias = arrays(dtype), array_operands(dtype)["bias"]
    with harness.x64(dtype):
        want = f(*inputs, {"bias": bias})
        bias[1, 2, 70, 131] = np.nan
        got = f(*inputs, {"bias": bias})
    assert np.isnan(got["out"][1, 70, 2]).all()
    assert np.isnan(got["lse"][1, 70, 2])
    assert np.isnan(got["dq"][1, 70, 2]).all()
    assert np.isnan(got["dbias"][1, 2, 70]).all()
    assert np.isnan(got["dk"][1, :, 1]).all()
    others = np.ones(got["lse"].shape, bool)
    others[1, 70, 2] = False
    np.testing.assert_array_equal(got["lse"][others], want["lse"][others])
    for name in ("out", "dq", "dbias"):
        np.testing.assert_array_equal(got[name][[0, 2, 3]], want[name][[0, 2, 3]])
    np.testing.assert_array_equal(got["out"][1, :, [0, 1, 3]], want["out"][1, :, [0, 1, 3]])
    np.testing.assert_array_equal(got["dbias"][1, [0, 1, 3]], want["dbias"][1, [0, 1, 3]])


@pytest.mark.parametrize("value", quick.rows([np.inf, -np.inf], quick=[np.inf]))
@quick.KINDS
def test_inf_in_the_bias_follows_the_reference(kind, value, platform):
    dtype, precision, _ = harness.kind(platform, kind)
    inputs, bias = arrays(dtype), array_operands(dtype)["bias"]
    bias[1, 2, 70, ::2] = value
    f = jax.jit(
        lambda q, k, v, bias: jax_flash.flash_attention(
            q, k, v, bias, precision=precision, return_residual=True
        )
    )
    with harness.x64(dtype):
        got = [np.asarray(x).astype(np.float64) for x in f(*inputs[:3], bias)]
    for a, b in zip(got, oracle.attention(*inputs[:3], bias=bias)[:2], strict=True):
        for test in (np.isnan, np.isposinf, np.isneginf):
            np.testing.assert_array_equal(test(a), test(b))


HALF = 768  # a multiple of every kernel's tiles
TILES = {
    "segments": dict(segment_ids=np.arange(2 * HALF, dtype=np.int32)[None] // HALF),
    "segments, unsorted": dict(segment_ids=5 - 9 * (np.arange(2 * HALF, dtype=np.int32)[None] // HALF)),
    "mask": dict(mask=np.arange(2 * HALF)[:, None] // HALF == np.arange(2 * HALF) // HALF),
}


@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("operands", TILES.values(), ids=TILES.keys())
def test_nothing_leaks_out_of_hidden_tiles(operands, dtype, head_dim, platform):
    """With two halves that do not see each other, NaN in all of one changes no bit of the other.

    Planes do not hold a key head that has it, so there the portable kernels are compared.
    """
    rng = np.random.default_rng(0)
    shapes = [*4 * [(1, 2 * HALF, 1, head_dim)], (1, 2 * HALF, 1)]
    clean = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    clean = [x.astype(DTYPES[dtype]) for x in clean[:4]] + clean[4:]
    f = forward_and_backward(dict(deterministic=True))
    with harness.without_planes() if dtype == "float32" else contextlib.nullcontext():
        want = f(*clean, operands)
    for half in (slice(HALF), slice(HALF, None)):
        poisoned = [x.copy() for x in clean]
        for x in poisoned:
            x[:, half] = np.nan
        got = f(*poisoned, operands)
        for name, x in want._asdict().items():
            other = np.delete(x, np.arange(2 * HALF)[half], axis=1)
            assert np.isfinite(other.astype(np.float32)).all()
            here = np.delete(getattr(got, name), np.arange(2 * HALF)[half], axis=1)
            np.testing.assert_array_equal(here, other)
            assert np.isnan(getattr(got, name)[:, half]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("by", ["mask", "segments"])
def test_keys_that_no_row_sees_change_nothing(by, dtype, platform):
    """Including whole tiles of them; their gradients are 0."""
    rng = np.random.default_rng(0)
    shapes = [(1, 150, 2, 64), (1, 2 * HALF, 2, 64), (1, 2 * HALF, 2, 64), (1, 150, 2, 64), (1, 150, 2)]
    clean = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    clean = [x.astype(DTYPES[dtype]) for x in clean[:4]] + clean[4:]
    is_seen = np.arange(2 * HALF) < HALF
    operands = {
        "mask": dict(mask=is_seen),
        "segments": dict(segment_ids=(np.ones((1, 150), np.int32), is_seen[None].astype(np.int32))),
    }[by]
    f = forward_and_backward(dict(deterministic=True))
    poisoned = [x.copy() for x in clean]
    for x in poisoned[1:3]:
        x[:, HALF:] = np.nan
    got = f(*poisoned, operands)
    with harness.without_planes() if dtype == "float32" else contextlib.nullcontext():  # as where NaN is
        assert_same_bits(got, f(*clean, operands))
    for x in (got.dk, got.dv):
        assert x[:, :HALF].any()
        assert not x[:, HALF:].any()


@pytest.mark.parametrize("poison", FLOATS)
@quick.KINDS
def test_rows_that_see_no_key_do_not_leak(kind, poison):
    """On the CPU: their queries and cotangents contribute to no gradient."""
    dtype, precision, _ = harness.kind("cpu", kind)
    f = forward_and_backward(dict(deterministic=True, precision=precision, is_causal=True, query_offset=-30))
    clean = arrays(dtype)
    poisoned = [x.copy() for x in clean]
    for i in (0, 3, 4):
        poisoned[i][:, :30] = poison
    with harness.x64(dtype):
        assert_same_bits(f(*poisoned, {}), f(*clean, {}))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("axes", ["BNTS", "1NTS", "B11S", "1N11"])
def test_memory_of_the_gradient_of_a_bias_is_not_read_before_it_is_written(axes, dtype, platform):
    """Also with hidden tiles. Its order of summation is fixed, `deterministic` or not."""
    sizes = dict(zip("BNTS1", (4, 4, QUERIES, KEYS, 1), strict=True))
    rng = np.random.default_rng(3)
    operands = dict(
        bias=rng.standard_normal([sizes[axis] for axis in axes]).astype(DTYPES[dtype]),
        mask=np.arange(QUERIES)[:, None] // 70 == np.arange(KEYS) // 70,
    )
    f = forward_and_backward_with_bias({})
    inputs = arrays(dtype)
    want = f(*inputs, operands)["dbias"]
    assert np.isfinite(want.astype(np.float32)).all()
    for megabytes in (1, 4, 64):
        poison = [jnp.full((megabytes * 2**18 // 16,), jnp.nan) for _ in range(16)]
        jax.block_until_ready(poison)
        del poison
        np.testing.assert_array_equal(f(*inputs, operands)["dbias"], want)
