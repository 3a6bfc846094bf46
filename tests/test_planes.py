"""float32 as scaled float16 on Hopper (cuda/planes.cuh): as exact as TF32 whatever the magnitudes."""

import dataclasses
import functools

import harness
import jax
import numpy as np
import oracle
import pytest
import quick
from closeness import assert_close

import jax_flash
from jax_flash import _primitives
from jax_flash._options import AttentionOptions

T, S, N, K = 200, 260, 4, 2  # more than one tile of either


@pytest.fixture(autouse=True)
def planes(platform):
    if platform == "cpu":
        pytest.skip("the CPU has no planes")
    if not harness.has_planes():
        pytest.skip("needs a Hopper GPU")


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
    v[:, 5] *= 2.0**15
    return q, k, v, dout


def of_a_large_key(rng, q, k, v, dout):
    k[:, 5] *= 2.0**15
    return q * 2.0**-15, k, v, dout  # scores of thousands would leave nothing but rounding errors of dq


def of_blocks(rng, q, k, v, dout):
    """Large and small magnitudes far from each other: rows of a query may all be small."""
    v[:, S // 2 :] *= 2.0**12
    dout[:, : T // 2] *= 2.0**20
    return q, k, v, dout


INPUTS = {
    "normal": lambda rng, *arrays: arrays,
    "uniform": lambda rng, *arrays: [rng.random(x.shape) for x in arrays],
    "sharp": lambda rng, q, *others: (8 * q, *others),
    "equal keys": lambda rng, q, k, v, dout: (q, np.repeat(k[:, :1], S, 1), v, dout),
    "far from 1": lambda rng, q, k, v, dout: (1e-8 * q, 1e8 * k, 1e-10 * v, 1e9 * dout),
    "rows": of_rows,
    "keys and queries": of_keys_and_queries,
    "columns": of_columns,
    "opposite columns": of_opposite_columns,
    "a large value": of_a_large_value,
    "a large key": of_a_large_key,
    "blocks": of_blocks,
    "huge values": lambda rng, q, k, v, dout: (q, k, 1e33 * v, 1e-30 * dout),
    "zeros": lambda rng, q, k, v, dout: (0 * q, k, v, dout),
}


def of_other_segment(binades, rng, q, k, v, dout):
    v[:, S // 2 :] *= 2.0**binades
    return q, k, v, dout


def of_other_segment_of_queries(rng, q, k, v, dout):
    dout[:, T // 2 :] *= 2.0**30
    return q, k, v, dout


def of_a_huge_value(rng, q, k, v, dout):
    v[:, 5] *= 2.0**20
    return q, k, v, dout


def of_a_tiny_row(rng, q, k, v, dout):
    dout[:, 70] *= 2.0**-40
    return q, k, v, dout


def of_a_tiny_query_head(rng, q, k, v, dout):
    dout[:, :, 1] *= 2.0**-34
    return q, k, v, dout


# What planes do not hold, backward or also forward: the portable kernels compute it.
BEYOND = {
    "another segment": (functools.partial(of_other_segment, 26), True),
    "another segment, backward": (functools.partial(of_other_segment, 20), False),
    "queries of another segment": (of_other_segment_of_queries, False),
    "a huge value": (of_a_huge_value, False),
    "farther from 1": (lambda rng, q, k, v, dout: (1e-20 * q, 1e20 * k, 1e-15 * v, 1e12 * dout), False),
    "a tiny row": (of_a_tiny_row, False),
    "a tiny query head": (of_a_tiny_query_head, False),
    "tiny values": (lambda rng, q, k, v, dout: (q, k, 1e-33 * v, dout), True),
    "tiny gradients": (lambda rng, q, k, v, dout: (1e-6 * q, 1e6 * k, v, 1e-26 * dout), False),
}


# Head dim, and whether dq is computed by a kernel of its own, as it is above head dim 128 in any case.
FORMS = {
    "64": (64, False),
    "64-deterministic": (64, True),
    "192": (192, False),
    "256-deterministic": (256, True),
}


def run(q, k, v, dout, **options):
    @jax.jit
    def call(*args):
        out, vjp = jax.vjp(functools.partial(jax_flash.flash_attention, **options), *args)
        return out, *vjp(dout)

    return dict(zip(("out", "dq", "dk", "dv"), call(q, k, v), strict=True))


def run_portable(*arrays, **options):
    with harness.cuda_settings(kernels="sm80"):
        return jax.block_until_ready(run(*arrays, **options))


def make(name, inputs, head_dim):
    rng = np.random.default_rng(0)
    shapes = [(1, length, heads, head_dim) for length, heads in ((T, N), (S, K), (S, K), (T, N))]
    arrays = inputs(rng, *(rng.standard_normal(shape) for shape in shapes))
    return [x.astype(np.float32) for x in arrays]


def check(got, arrays, name, **options):
    dlse = np.zeros((1, T, N), np.float32)
    want = oracle.attention(*arrays, dlse, **options)
    naive = oracle.attention(*arrays, dlse, arithmetic=oracle.arithmetic_of("tfloat32"), **options)
    for field, value in got.items():
        exact, baseline = getattr(want, field), getattr(naive, field)
        unit = np.abs(exact).max() or 1  # the rule has absolute terms
        assert_close(
            np.asarray(value, np.float64) / unit,
            exact / unit,
            "tfloat32",
            num_keys=S,
            naive=baseline / unit,
            name=f"{field} of {name}",
        )


def are_equal(a, b, names) -> bool:
    return all(np.array_equal(a[name], b[name]) for name in names)


@pytest.mark.parametrize(("name", "form"), quick.in_turn(list(INPUTS), FORMS, with_all=["rows"]))
def test_is_as_exact_as_tf32(name, form, platform):
    head_dim, deterministic = form
    arrays = make(name, INPUTS[name], head_dim)
    got = run(*arrays, deterministic=deterministic)
    check(got, arrays, name)
    if name not in ("zeros", "equal keys"):
        portable = run_portable(*arrays, deterministic=deterministic)
        assert not any(
            are_equal(got, portable, [field]) for field in got
        )  # these were not the kernels that ran


@pytest.mark.parametrize(("name", "form"), quick.in_turn(list(BEYOND), FORMS))
def test_portable_kernels_compute_what_planes_do_not_hold(name, form, platform):
    head_dim, deterministic = form
    inputs, is_forward = BEYOND[name]
    arrays = make(name, inputs, head_dim)
    ids = np.arange(T)[None] // (T // 2), np.arange(S)[None] // (S // 2)
    options = dict(segment_ids=ids, deterministic=deterministic)
    got = run(*arrays, **options)
    check(got, arrays, name, segment_ids=ids)
    portable = run_portable(*arrays, **options)
    assert are_equal(got, portable, ["out"]) == is_forward
    if is_forward:  # else they begin with another out
        assert are_equal(got, portable, ["dk", "dv"] + ["dq"] * deterministic)


def test_calls_that_planes_hold_take_turns_with_others(platform):
    """What one call leaves in workspace does not matter to the next."""
    held = make("normal", INPUTS["normal"], 64)
    q, k, v, dout = make("normal", INPUTS["normal"], 64)
    k[:, 5, 1] *= 2.0**30
    others = q, k, v, dout
    first, second = (run(*arrays, deterministic=True) for arrays in (held, others))
    assert are_equal(run(*held, deterministic=True), first, first)
    assert are_equal(run(*others, deterministic=True), second, second)
    for name in first:  # of the other key head
        heads = np.s_[:, :, :1] if name in ("dk", "dv") else np.s_[:, :, : N // K]
        np.testing.assert_array_equal(first[name][heads], second[name][heads])


@pytest.mark.parametrize("head_dim", [64, 192])
def test_portable_kernels_recompute_the_scores_of_planes(head_dim, platform):
    """Numbers of 12 bits, half of which are ties: the rows of p that the gradient recomputes have the sum 1."""

    def round_to_12_bits(x):
        fraction, exponent = np.frexp(x)
        return np.ldexp(np.round(fraction * 2**12), exponent - 12).astype(np.float32)

    rng = np.random.default_rng(0)
    q, k, v = (round_to_12_bits(rng.standard_normal((1, length, 1, head_dim))) for length in (T, S, S))
    dout = np.zeros_like(q)
    rows = np.arange(head_dim)
    dout[0, rows, 0, rows] = 1  # so dv[j, i] is p[i, j]
    dv = run(1024 * q, k, v, dout)["dv"]  # planes do not hold the gradients of such large logits
    np.testing.assert_allclose(dv[0, :, 0].sum(0), 1, rtol=1e-2)


# What two planes hold, at "highest": numbers that differ by some powers of two less.
OF_TWO_PLANES = {
    **{
        name: INPUTS[name]
        for name in ("normal", "uniform", "sharp", "equal keys", "far from 1", "huge values", "zeros")
    },
    "rows": lambda rng, q, k, v, dout: (
        q * powers(rng, T, 9),
        k * powers(rng, S, 9),
        v * powers(rng, S, 9),
        dout,
    ),
    "columns": lambda rng, q, k, v, dout: [
        x * powers(rng, q.shape[-1], 12).reshape(1, 1, 1, -1) for x in (q, k, v, dout)
    ],
    "opposite columns": lambda rng, q, k, v, dout: (
        q * (factor := powers(rng, q.shape[-1], 11).reshape(1, 1, 1, -1)),
        k / factor,
        v,
        dout,
    ),
}


def times(array: int, index: tuple, factor: float):
    """Inputs of which a part is multiplied."""

    def inputs(rng, *arrays):
        arrays[array][index] *= factor
        return arrays

    return inputs


BEYOND_TWO_PLANES = {
    "rows": INPUTS["rows"],
    "queries and keys": INPUTS["keys and queries"],
    "opposite columns": INPUTS["opposite columns"],
    "a large value": INPUTS["a large value"],
    "a segment": times(2, np.s_[:, S // 2 :], 2.0**16),
    "a column of v": times(2, np.s_[..., 3], 2.0**20),
    "small rows of v": times(2, np.s_[:, 40:44], 2.0**-20),
    "a small query": times(0, np.s_[:, 7], 2.0**-20),
}


def at_highest(*arrays, **options):
    return np.asarray(
        jax.jit(functools.partial(jax_flash.flash_attention, precision="highest", **options))(*arrays)
    )


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("name", OF_TWO_PLANES)
def test_two_planes_are_as_exact_as_float32(name, head_dim, platform):
    """Beside the largest value of each column, and the largest result of each row."""
    q, k, v, dout = make(name, OF_TWO_PLANES[name], head_dim)
    got = at_highest(q, k, v)
    want = oracle.attention(q, k, v, dout, np.zeros((1, T, N), np.float32)).out
    of_columns = np.repeat(np.abs(v).max(1, keepdims=True), N // K, axis=2)
    for unit in (of_columns, np.abs(want).max(3, keepdims=True)):
        assert_close(got / unit, want / unit, "float32", num_keys=S, name=name)
    with harness.cuda_settings(kernels="sm80"):
        assert name == "zeros" or not np.array_equal(got, at_highest(q, k, v))  # these were not the kernels


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", BEYOND_TWO_PLANES)
def test_portable_kernels_compute_what_two_planes_do_not_hold(name, head_dim, platform):
    q, k, v, _ = make(name, BEYOND_TWO_PLANES[name], head_dim)
    got = at_highest(q, k, v, is_causal=True)
    with harness.cuda_settings(kernels="sm80"):
        np.testing.assert_array_equal(got, at_highest(q, k, v, is_causal=True))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_padding_of_two_planes(head_dim, platform):
    """NaN beyond the lengths influences nothing."""
    q, k, v, dout = make("normal", INPUTS["normal"], head_dim)
    lengths = dict(
        query_seq_lengths=np.array([150], np.int32), key_value_seq_lengths=np.array([201], np.int32)
    )
    options = lengths | dict(precision="highest", deterministic=True)
    clean = run(q, k, v, dout, **options)
    q[:, 150:] = dout[:, 150:] = k[:, 201:] = v[:, 201:] = np.nan
    got = run(q, k, v, dout, **options)
    assert are_equal(got, clean, got)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(72, 128), (128, 72), (64, 40)])
def test_gradients_of_two_planes_where_few_pairs_are_visible(head_dim, head_dim_v, platform):
    """Lengths, a window and offsets; what lies beyond the lengths is not read."""
    rng = np.random.default_rng(0)
    shapes = [(3, T, N, head_dim), (3, S, K, head_dim), (3, S, K, head_dim_v), (3, T, N, head_dim_v)]
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    queries, keys = (np.array(lengths, np.int32) for lengths in ((T, 150, 0), (S - 1, 201, 70)))
    options = dict(
        query_seq_lengths=queries,
        key_value_seq_lengths=keys,
        query_offset=np.array([-20, 40, 0], np.int32),
        is_causal=True,
        local_window_size=(90, 0),
    )
    want = oracle.attention(q, k, v, dout, np.zeros((3, T, N), np.float32), **options)
    for b in range(3):
        q[b, queries[b] :] = dout[b, queries[b] :] = k[b, keys[b] :] = v[b, keys[b] :] = np.nan
    got = run(q, k, v, dout, precision="highest", **options)
    for name, x in got.items():
        exact = getattr(want, name)
        assert np.abs(x - exact).max() <= 5e-6 * np.abs(exact).max(), name


# Head dim, and whether dq is computed by a kernel of its own.
FORMS_OF_TWO_PLANES = {
    "64": (64, False),
    "72-deterministic": (72, True),
    "128": (128, False),
    "128-deterministic": (128, True),
}


@pytest.mark.parametrize(("name", "form"), quick.in_turn(list(OF_TWO_PLANES), FORMS_OF_TWO_PLANES))
def test_gradients_by_two_planes_are_as_exact_as_float32(name, form, platform):
    """Beside the largest of a query head or key head."""
    head_dim, deterministic = form
    arrays = make(name, OF_TWO_PLANES[name], head_dim)
    got = run(*arrays, precision="highest", deterministic=deterministic)
    want = oracle.attention(*arrays, np.zeros((1, T, N), np.float32))
    for field, x in got.items():
        exact = getattr(want, field)
        unit = np.abs(exact).max((1, 3), keepdims=True)
        if name in ("zeros", "equal keys"):  # where gradients are 0
            unit = np.ones_like(unit)
        scaled = np.asarray(x, np.float64) / unit
        # Where all numbers are positive, dp and delta are alike. XLA's error of dq is then 3.4e-5 on a GPU; this allows
        # twice as much.
        cancelling = 18 if (name, field) == ("uniform", "dq") else 0
        assert_close(
            scaled, exact / unit, "float32", num_keys=S, cancelling=cancelling, name=f"{field} of {name}"
        )
    portable = run_portable(*arrays, precision="highest", deterministic=deterministic)
    for field in ("dk", "dv"):
        assert name == "zeros" or not are_equal(got, portable, [field])  # these were not the kernels


def backward_at_highest(arrays, out, lse, dlse=None, **options):
    """The backward pass alone, for results of any forward pass."""
    q, k, v, dout = arrays
    options = AttentionOptions.resolve(q.shape[-1], precision="highest", **options)
    options = dataclasses.replace(options, in_planes=True)
    arrays = dict(q=q, k=k, v=v, out=out, lse=lse, dout=dout) | ({} if dlse is None else dict(dlse=dlse))
    return jax.jit(lambda arrays: _primitives.backward(arrays, options))(arrays)


# Of dout and the gradient of lse.
BEYOND_TWO_PLANES_BACKWARD = {
    **{name: (inputs, None) for name, inputs in BEYOND_TWO_PLANES.items()},
    "a tiny row": (times(3, np.s_[:, 70], 2.0**-20), None),
    "a tiny query head": (times(3, np.s_[:, :, 1], 2.0**-20), None),
    "a large row of dlse": (INPUTS["normal"], 2.0**34),
    "a row of dlse beside smaller ones": (INPUTS["normal"], 2.0**24),
    "huge logits": (times(0, np.s_[:], 2.0**17), None),
}


@pytest.mark.parametrize(
    ("name", "head_dim"), quick.in_turn(list(BEYOND_TWO_PLANES_BACKWARD), {"64": 64, "128": 128})
)
def test_portable_kernels_compute_gradients_beyond_two_planes(name, head_dim, platform):
    inputs, largest_dlse = BEYOND_TWO_PLANES_BACKWARD[name]
    arrays = make(name, inputs, head_dim)
    attention = functools.partial(jax_flash.flash_attention, precision="highest", return_residual=True)
    out, lse = attention(*arrays[:3])
    dlse = np.ones((1, T, N), np.float32)
    dlse[:, 3] = largest_dlse or 1

    def backward():
        return jax.block_until_ready(backward_at_highest(arrays, out, lse, dlse, deterministic=True))

    got = backward()
    with harness.cuda_settings(kernels="sm80"):
        portable = backward()
    heads = np.s_[:, :, :1] if name == "a tiny query head" else np.s_[:]  # key heads
    for x, y in zip(got[1:], portable[1:], strict=True):
        np.testing.assert_array_equal(x[heads], y[heads])


@pytest.mark.parametrize(("head_dim", "deterministic"), [(64, True), (128, False)])
def test_gradients_by_two_planes_where_rows_grow(head_dim, deterministic, platform):
    """By 2^12 over all queries, but by little among those that share a scale of ds."""
    num_keys = 2048  # with so many, rows that share a scale may differ by 2^11
    rng = np.random.default_rng(0)
    shapes = [(1, length, 1, head_dim) for length in (T, num_keys, num_keys, T)]
    q, k, v, dout = arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    growth = 2.0 ** np.linspace(-12, 0, T, dtype=np.float32).reshape(1, T, 1, 1)
    dout *= growth
    attention = functools.partial(jax_flash.flash_attention, precision="highest", return_residual=True)
    out, lse = attention(q, k, v)
    got = backward_at_highest(arrays, out, lse, deterministic=deterministic)
    want = oracle.attention(*arrays, np.zeros((1, T, 1), np.float32))
    for name, x, unit in zip(("dq", "dk", "dv"), got, (growth, 1, 1), strict=True):
        exact = getattr(want, name) / unit
        error = np.linalg.norm(np.asarray(x, np.float64) / unit - exact) / np.linalg.norm(exact)
        assert error <= 2e-6, name
    with harness.cuda_settings(kernels="sm80"):
        portable = jax.block_until_ready(backward_at_highest(arrays, out, lse, deterministic=deterministic))
    for x, y in zip(got[1:3], portable[1:3], strict=True):
        assert not np.array_equal(x, y)  # these were not the kernels that ran


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_gradients_recompute_scores_to_the_bit(head_dim, deterministic, platform):
    """One key takes all of a row, with a logit of 350: p is 1 up to the roundings of lse and lse log2(e)."""
    rng = np.random.default_rng(0)
    q, k, v, dout = make("normal", INPUTS["normal"], head_dim)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    key = rng.integers(S, size=(T, N))
    for head in range(N):
        q[0, :, head] = 350 * np.sqrt(head_dim) * k[0, key[:, head], head // (N // K)]
    dout[:] = 1
    got = run(q, k, v, dout, precision="highest", deterministic=deterministic)
    counts = np.zeros((S, K))
    for head in range(N):
        np.add.at(counts[:, head // (N // K)], key[:, head], 1)
    ulp = 2.0**-15  # of 256 to 512
    error = np.abs(np.asarray(got["dv"], np.float64)[0] - counts[..., None])
    assert (error <= counts[..., None] * ulp + 1e-6).all(), (error / np.maximum(counts, 1)[..., None]).max()


@pytest.mark.parametrize("largest", [1000, 5000])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_exact_gradients_of_large_logits(head_dim, largest, platform):
    """Up to the roundings of a logit and of the log-sum-exp."""
    q, k, v, dout = make("normal", INPUTS["normal"], head_dim)
    q *= largest / np.abs(np.einsum("btnh,bskh->bntsk", q, k)).max() * np.sqrt(head_dim)
    got = run(q, k, v, dout, precision="highest")
    want = oracle.attention(q, k, v, dout, np.zeros((1, T, N), np.float32))
    for name in ("out", "dv"):
        exact = getattr(want, name)
        error = np.linalg.norm(np.asarray(got[name], np.float64) - exact) / np.linalg.norm(exact)
        assert error <= 2.0**-24 * largest, name


@pytest.mark.parametrize("precision", [None, "highest"])
def test_values_of_zero_beside_large_logits(precision, platform):
    """There is a dv, though no ds."""
    q, k, v, dout = make("normal", INPUTS["normal"], 64)
    q *= 700 / np.abs(np.einsum("btnh,bskh->bntsk", q, k)).max() * 8
    v *= 0
    got = run(q, k, v, dout, precision=precision)["dv"]
    want = oracle.attention(q, k, v, dout, np.zeros((1, T, N), np.float32)).dv
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 0.6 * np.linalg.norm(want)


@pytest.mark.parametrize("name", ["bias", "forward_mode"])
def test_exact_scores_of_other_kernels(name, platform):
    """The gradient of a bias, and tangents: the forward pass is by the kernels that recompute its scores, too."""
    q, k, v, _ = make("normal", INPUTS["normal"], 64)
    options = dict(bias=np.zeros((1, 1, T, S), np.float32)) if name == "bias" else dict(forward_mode=True)
    attention = functools.partial(jax_flash.flash_attention, precision="highest")
    got = jax.jit(lambda *x: jax.vjp(functools.partial(attention, **options), *x)[0])(q, k, v)
    with harness.cuda_settings(kernels="sm80"):
        portable = np.asarray(attention(q, k, v, **options))
    np.testing.assert_array_equal(got, portable)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("size", [1e3, 1e6, 1e7, 1e12])
def test_exact_gradients_of_lse_that_differ(size, rows, platform):
    """Small ds must not be lost beside large ones."""
    q, k, v, dout = make("dlse", INPUTS["normal"], 64)
    dlse = np.ones((1, T, N), np.float32)
    dlse[0, :rows] = size

    @jax.jit
    def gradients(*args):
        options = dict(is_causal=True, return_residual=True, precision="highest")
        return jax.vjp(functools.partial(jax_flash.flash_attention, **options), *args)[1]((dout, dlse))

    want = oracle.attention(q, k, v, dout, dlse, is_causal=True)
    for name, x in zip(("dq", "dk", "dv"), gradients(q, k, v), strict=True):
        exact = getattr(want, name)[:, rows:]
        error = np.asarray(x, np.float64)[:, rows:] - exact
        assert np.linalg.norm(error) <= 2e-6 * np.linalg.norm(exact), name


@pytest.mark.parametrize("head_dim", [40, 128])
def test_many_query_heads(head_dim, platform):
    """Whose planes are made in two launches, because not all of them fit on a GPU at once."""
    rng = np.random.default_rng(0)
    t, n = 300, 120
    shapes = [(1, t, n, head_dim), (1, 70, 1, head_dim), (1, 70, 1, head_dim), (1, t, n, head_dim)]
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    got = run(q, k, v, dout, deterministic=True)
    few = run(q[:, :, :2], k, v, dout[:, :, :2], deterministic=True)
    # Powers of two change no bits.
    for name in ("out", "dq"):
        np.testing.assert_array_equal(got[name][:, :, :2], few[name])


def test_only_the_key_head_that_planes_do_not_hold(platform):
    """Of two key heads and two sequences."""
    rng = np.random.default_rng(0)
    shapes = [(2, length, heads, 64) for length, heads in ((T, N), (S, K), (S, K), (T, N))]
    q, k, v, dout = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    clean = run(q, k, v, dout, deterministic=True)
    v[1, : S // 2, 0] *= 2.0**26
    got, portable = (f(q, k, v, dout, deterministic=True) for f in (run, run_portable))
    group = N // K
    for name, heads in (("out", group), ("dq", group), ("dk", 1), ("dv", 1)):
        others = clean[name].at[1, :, :heads].set(portable[name][1, :, :heads])
        np.testing.assert_array_equal(got[name], others)


@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite(name, value, precision, platform):
    """As the portable kernels have it."""
    rng = np.random.default_rng(0)
    shapes = dict(q=(1, T, 2, 64), k=(1, S, 2, 64), v=(1, S, 2, 64), dout=(1, T, 2, 64))
    arrays = {key: rng.standard_normal(shape).astype(np.float32) for key, shape in shapes.items()}
    arrays[name][0, 70, 1, 7] = value
    options = dict(is_causal=True, deterministic=True, precision=precision)
    got, portable = (f(**arrays, **options) for f in (run, run_portable))
    for field in got:
        # Of this head; the forward pass does not see dout.
        if field != "out" or name != "dout":
            own, want = np.asarray(got[field])[:, :, 1], np.asarray(portable[field])[:, :, 1]
            if name == "dout":  # the portable backward pass begins with another out
                np.testing.assert_allclose(own, want, rtol=0.1, atol=0.01)
            else:
                np.testing.assert_array_equal(own, want)
        assert np.isfinite(got[field][:, :, 0]).all()


@pytest.mark.parametrize("shift", [-1.5e8, -1e9, 3e9])
def test_logits_that_lse_cannot_hold(shift, platform):
    """A bias moves all logits of a row by so much that lse is not exact: as the portable kernels."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (rng.standard_normal((1, length, 1, 64)).astype(np.float32) for length in (T, S, S, T))
    bias = np.zeros((1, 1, T, S), np.float32)
    bias[0, 0, 3] = shift
    got, portable = (f(q, k, v, dout, bias=bias, deterministic=True) for f in (run, run_portable))
    assert all(np.isfinite(x).all() for x in got.values())
    np.testing.assert_allclose(got["dv"], portable["dv"], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("binades", [18, -18])
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_sums_of_dk_change_their_scale(is_causal, binades, platform):
    def inputs(rng, q, k, v, dout):
        return q, k, v, dout * 2.0 ** (binades * np.arange(T) / T)[:, None, None]

    arrays = make("growing", inputs, 64)
    check(run(*arrays, is_causal=is_causal), arrays, "growing", is_causal=is_causal)


@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("size", [1e3, 1e12, 1e-34])
def test_gradients_of_lse_that_differ(size, rows, platform):
    """Those of the first rows and the others, whose ds must not be lost. Small ones are not beside those of out."""
    q, k, v, dout = make("dlse", INPUTS["normal"], 64)
    dout *= size > 1
    dlse = np.ones((1, T, N), np.float32)
    dlse[0, :rows] = size

    @jax.jit
    def gradients(*args):
        f = functools.partial(jax_flash.flash_attention, is_causal=True, return_residual=True)
        return jax.vjp(f, *args)[1]((dout, dlse))

    want = oracle.attention(q, k, v, dout, dlse, is_causal=True)
    got = gradients(q, k, v)
    for name, x in zip(("dq", "dk", "dv"), got, strict=True):
        exact = getattr(want, name)[:, rows:]
        error = np.asarray(x, np.float64)[:, rows:] - exact
        assert np.linalg.norm(error) <= 2e-3 * np.linalg.norm(exact), name


def test_a_row_of_biases_instead_of_a_mask_stays_in_planes(platform):
    """A bias of -1e9 for all keys of a row without a gradient, such as one of padding."""
    q, k, v, dout = make("bias", INPUTS["normal"], 64)
    bias = np.zeros((1, 1, T, S), np.float32)
    bias[0, 0, 150:] = -1e9
    dout[:, 150:] = 0
    got, portable = (f(q, k, v, dout, bias=bias, deterministic=True) for f in (run, run_portable))
    assert not any(are_equal(got, portable, [name]) for name in ("out", "dq", "dk", "dv"))
    for name in ("dq", "dk", "dv"):
        np.testing.assert_allclose(got[name], portable[name], rtol=0, atol=0.01)
    assert not got["dq"][:, 150:].any()


# Under which rows see some of the keys, or have other weights than those of all keys.
WITH_CENTERS = {
    "": {},
    "deterministic": dict(deterministic=True),
    "rows without keys": dict(is_causal=True, query_offset=-20),
    "lengths": dict(
        query_seq_lengths=np.array([150], np.int32), key_value_seq_lengths=np.array([201], np.int32)
    ),
    "sinks": dict(sinks=np.linspace(-1, 7, N, dtype=np.float32)),
    "cap, bias": dict(
        logits_soft_cap=3.0, bias=np.random.default_rng(1).standard_normal((1, N, T, S), np.float32)
    ),
}
_FORMS_WITH_CENTERS = {
    f"{head_dim}-{precision}": (head_dim, precision)
    for head_dim, precision in ((64, "default"), (128, "highest"), (192, "default"), (64, "highest"))
}


@pytest.mark.parametrize(("name", "form"), quick.in_turn(list(WITH_CENTERS), _FORMS_WITH_CENTERS))
def test_a_mean_of_values_costs_no_digits(name, form, platform):
    """Only differences of values matter to dq and dk; TF32 would leave few bits of them, and float32 leaves some."""
    head_dim, precision = form
    options = WITH_CENTERS[name]
    q, k, v, dout = make("normal", INPUTS["normal"], head_dim)
    v += np.float32(2**11 if precision == "default" else 2**7)
    if "key_value_seq_lengths" in options:
        v[:, 201:] = np.nan
    want = oracle.attention(q, k, v, dout, np.zeros((1, T, N), np.float32), **options)
    got = run(q, k, v, dout, precision=precision, **options)
    for field, x in got.items():
        exact = getattr(want, field)
        error = np.linalg.norm(np.asarray(x, np.float64) - exact) / np.linalg.norm(exact)
        assert error <= (1e-3 if precision == "default" else 5e-5), field
    if "bias" not in options or precision == "default":  # its gradient may follow
        portable = run_portable(q, k, v, dout, precision=precision, **options)
        assert not any(are_equal(got, portable, [field]) for field in got)


@pytest.mark.parametrize("head_dim", [64, 192])
def test_with_dropout_values_keep_their_mean(head_dim, platform):
    """Weights of kept pairs do not add up to 1."""
    q, k, v, dout = make("normal", INPUTS["normal"], head_dim)
    options = dict(dropout_rate=0.5, dropout_rng=jax.random.key(0))
    got, portable = (f(q, k, v + 8, dout, **options) for f in (run, run_portable))
    for field, x in got.items():
        difference = np.linalg.norm(np.asarray(x) - portable[field])
        assert 0 < difference <= 2e-2 * np.linalg.norm(portable[field]), field


@pytest.mark.parametrize("values", ["small", "zeros"])
def test_a_mean_costs_no_digits_of_smaller_values(values, platform):
    """A segment has its own: with the mean of all its values it would keep none."""
    q, k, v, dout = make("normal", INPUTS["normal"], 64)
    ids = np.arange(T)[None] // (T // 2), np.arange(S)[None] // (S // 2)
    v += np.float32(4)
    v[:, S // 2 :] *= 2.0**-15 if values == "small" else 0
    got = run(q, k, v, dout, segment_ids=ids)
    want = oracle.attention(q, k, v, dout, np.zeros((1, T, N), np.float32), segment_ids=ids)
    out, exact = (np.asarray(x, np.float64)[:, T // 2 :] for x in (got["out"], want.out))
    assert np.linalg.norm(out - exact) <= 1e-3 * np.linalg.norm(exact)


@pytest.mark.parametrize("factor", [0, 2.0**-10])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mean_costs_no_digits_of_a_small_value(head_dim, factor, platform):
    """The first of a causal call, which the first query sees alone."""
    q, k, v, dout = make("normal", INPUTS["normal"], head_dim)
    v += np.float32(4)
    v[:, 0] *= factor
    v[:, 1] *= factor  # at head dim 64 rows are looked at by twos
    out = np.asarray(run(q, k, v, dout, is_causal=True)["out"], np.float64)[:, 0]
    exact = np.repeat(v[:, 0], N // K, axis=1)
    assert np.linalg.norm(out - exact) <= 1e-3 * np.linalg.norm(exact)
