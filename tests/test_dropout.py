"""Dropout: every kernel keeps the same pairs, and scales them right."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import DTYPES
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _dropout

attention = functools.partial(jax_flash.flash_attention, precision="highest")
ALL = (0, 1, 2)
KEY = jax.random.key(17)
# The quick run has two more tests of the reference.
IMPLEMENTATIONS = pytest.mark.parametrize(
    "implementation", quick.rows({"fused": None, "xla": "xla"}, quick=["fused"])
)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def qkv(batch: int = 2, t: int = 37, s: int = 43, n: int = 4, k: int = 2) -> list[np.ndarray]:
    shapes = (batch, t, n, 16), (batch, s, k, 16), (batch, s, k, 16)
    return [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]


def loss(q, k, v, key, rate=0.3, **options):
    return jnp.sum(jnp.sin(attention(q, k, v, dropout_rate=rate, dropout_rng=key, **options)))


def keep_of(key, rate: float, batch: int, num_heads: int, seqlen_q: int, seqlen_kv: int) -> np.ndarray:
    return oracle.keep(_dropout.make_seeds(key, batch, num_heads), rate, seqlen_q, seqlen_kv)


# ---- Kept pairs -----------------------------------------------------------------------------------------

# Known answers of Random123's philox4x32-10: counter, key, words.
KNOWN_ANSWERS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_the_oracles_philox_gives_the_known_answers(counter, key, words):
    np.testing.assert_array_equal(oracle.philox(counter, key), np.array(words, np.uint32))


@pytest.mark.parametrize(
    "sizes", quick.rows([(1, 1), (16, 16), (37, 43), (129, 300), (520, 7)], quick=[(37, 43), (129, 300)])
)
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.97])
def test_keep_is_philox(rate, sizes):
    seeds = np.random.default_rng(0).integers(0, 2**32, (2, 3, 5), np.uint32)
    seeds[0, 0], seeds[1, 2] = 0, 2**32 - 1
    seeds[..., 3:] = 0
    np.testing.assert_array_equal(_dropout.keep(seeds, rate, *sizes), oracle.keep(seeds, rate, *sizes))


def test_a_part_of_the_sequence_keeps_what_the_whole_does():
    seeds = _dropout.make_seeds(KEY, 2, 3)
    part = _dropout.keep(_dropout.of_part(seeds, jnp.int32(32), jnp.int32(48)), 0.5, 40, 60)
    np.testing.assert_array_equal(part, _dropout.keep(seeds, 0.5, 80, 120)[..., 32:72, 48:108])


def test_every_head_of_every_batch_element_has_seeds_of_its_own():
    seeds = np.asarray(_dropout.make_seeds(KEY, 5, 7))
    assert (seeds.shape, seeds.dtype) == ((5, 7, 5), np.uint32)
    assert len(np.unique(seeds.reshape(-1, 5), axis=0)) == 35


def probe(batch, t, s, heads, head_dim, dtype, rate, key, **options) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities after dropout, [B, N, T, S], of the forward and of the backward pass.

    With queries and keys of 0 all keys have the same weight; one-hot values and cotangents show the weights.
    """
    q, k = (np.zeros((batch, length, heads, head_dim), dtype) for length in (t, s))
    f = functools.partial(attention, dropout_rate=rate, **options)

    @jax.jit
    def forward(v, key):
        return f(q, k, v, dropout_rng=key)

    @jax.jit
    def backward(dout, key):
        return jax.vjp(lambda v: f(q, k, v, dropout_rng=key), jnp.zeros(k.shape, dtype))[1](dout)[0]

    def columns(g, length):
        parts = []
        for start in range(0, length, head_dim):
            one_hot = np.eye(length, head_dim, -start, dtype=np.float32).astype(dtype)[None, :, None]
            parts.append(g(np.broadcast_to(one_hot, (batch, length, heads, head_dim)), key))
        return np.concatenate([np.asarray(x, np.float64) for x in parts], -1)[..., :length]

    return columns(forward, s).transpose(0, 2, 1, 3), columns(backward, t).transpose(0, 2, 3, 1)


# T, S, H: tiles differ with the head dim.
PROBES = [(300, 261, 64), (200, 333, 128), (129, 131, 256), (77, 50, 24), (1, 300, 64), (300, 1, 64)]


@pytest.mark.parametrize("rate", quick.rows([0.1, 0.5], quick=[0.5]))
@pytest.mark.parametrize(
    "dtype", quick.rows(["bfloat16", "float16", "float32"], quick=["bfloat16", "float32"])
)
@pytest.mark.parametrize("sizes", PROBES, ids=str)
def test_kernels_keep_what_they_should(sizes, dtype, rate, platform):
    """Exactly the expected pairs, forward and backward, scaled by 1 / (1 - rate)."""
    t, s, head_dim = sizes
    keep = keep_of(KEY, rate, 2, 2, t, s)
    want = keep / (1 - rate) / s
    for got in probe(2, t, s, 2, head_dim, DTYPES[dtype], rate, KEY):
        assert not ((got != 0) != keep).any()
        np.testing.assert_allclose(got, want, rtol=2.0**-7 if dtype == "bfloat16" else 2.0**-10)


@pytest.mark.parametrize(
    "sizes", quick.rows([(77, 50, 24), (129, 131, 64), (70, 90, 128), (60, 70, 256)], quick=[(77, 50, 24)])
)
@pytest.mark.parametrize("dtype", quick.rows(["bfloat16", "float32"], quick=["float32"]))
def test_kernels_keep_of_a_part_what_the_whole_does(sizes, dtype, platform, monkeypatch):
    t, s, head_dim = sizes
    make_seeds, part = _dropout.make_seeds, (jnp.int32(32), jnp.int32(48))
    keep = oracle.keep(make_seeds(KEY, 2, 2), 0.5, 32 + t, 48 + s)[..., 32:, 48:]
    monkeypatch.setattr(_dropout, "make_seeds", lambda *args: _dropout.of_part(make_seeds(*args), *part))
    for got in probe(2, t, s, 2, head_dim, DTYPES[dtype], 0.5, KEY):
        np.testing.assert_array_equal(got != 0, keep)


@pytest.mark.parametrize("rate", quick.rows([0.1, 0.5], quick=[0.5]))
def test_the_reference_keeps_what_it_should(rate):
    keep = keep_of(KEY, rate, 2, 2, 77, 50)
    for got in probe(2, 77, 50, 2, 24, np.float32, rate, KEY, implementation="xla"):
        np.testing.assert_allclose(got, keep / (1 - rate) / 50, rtol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "options", [dict(is_causal=True), dict(local_window_size=(70, 10))], ids=["causal", "window"]
)
def test_masks_do_not_change_what_is_kept(options, deterministic, platform):
    t, s = 200, 261
    keep = keep_of(KEY, 0.4, 2, 2, t, s) & oracle.visible(2, t, s, **options)
    for got in probe(2, t, s, 2, 64, np.float32, 0.4, KEY, deterministic=deterministic, **options):
        assert not ((got != 0) != keep).any()


def test_cut_outs_agree(platform):
    """Whether a pair is kept does not depend on the numbers of rows and keys."""
    whole = probe(2, 200, 261, 2, 64, np.float32, 0.5, KEY)
    for sizes in [(64, 64), (33, 200), (200, 1), (1, 77)]:
        part = probe(2, *sizes, 2, 64, np.float32, 0.5, KEY)
        for a, b in zip(whole, part, strict=True):
            np.testing.assert_array_equal(a[:, :, : sizes[0], : sizes[1]] != 0, b != 0, err_msg=str(sizes))


@IMPLEMENTATIONS
@pytest.mark.parametrize("rate", quick.rows([0.01, 0.1, 0.5, 0.9, 0.999], quick=[0.1]))
def test_keeps_a_value_or_drops_it(rate, implementation, platform):
    """The expected fraction is kept, and the log-sum-exp counts all pairs."""
    q, k, _ = (0.3 * x for x in qkv(4, 200, 61, n=4, k=4))
    v = np.broadcast_to(np.eye(61, dtype=np.float32)[None, :, None], (4, 61, 4, 61))
    f = jax.jit(
        functools.partial(attention, return_residual=True, implementation=implementation),
        static_argnames="dropout_rate",
    )
    p, lse = f(q, k, v, dropout_rate=rate, dropout_rng=KEY)
    p0, lse0 = f(q, k, v)
    kept = np.asarray(p) != 0
    np.testing.assert_allclose(np.asarray(p)[kept], np.asarray(p0)[kept] / (1 - rate), rtol=1e-4)
    np.testing.assert_allclose(lse, lse0, rtol=1e-6)
    part = 1 - round(rate * 2**16) / 2**16
    assert abs(kept.mean() - part) < 5 * np.sqrt(part * (1 - part) / kept.size)


@pytest.mark.parametrize("rate", quick.rows([0.1, 0.5, 0.9], quick=[0.1]))
def test_pairs_are_independent(rate):
    """Pairs do not correlate with neighbors, pairs of the same Philox call, other heads or other keys."""
    keep = np.stack(
        [_dropout.keep(_dropout.make_seeds(key, 2, 3), rate, 320, 320) for key in jax.random.split(KEY)]
    )
    x = (keep - (1 - rate)) / np.sqrt(rate * (1 - rate))  # [keys, B, N, T, S], variance 1
    shifts = [(0, 0, 0, i, j) for i in (0, 1, 8, 16) for j in (0, 1, 2, 8, 16) if (i, j) != (0, 0)]
    shifts += [(1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 1, 1, 0, 0)]
    for shift in shifts:
        later = x[tuple(slice(n, None) for n in shift)]
        earlier = x[tuple(slice(None, size - n) for size, n in zip(x.shape, shift, strict=True))]
        assert abs((later * earlier).mean()) < 5 / np.sqrt(later.size), shift
    for axis in (3, 4):  # whole rows and columns
        means = x.mean(axis) * np.sqrt(320)
        assert np.abs(means).max() < 6
        assert abs(means.std() - 1) < 0.05


@IMPLEMENTATIONS
def test_the_key_decides(implementation, platform):
    args = qkv()
    f = jax.jit(functools.partial(attention, dropout_rate=0.5, implementation=implementation))
    want = f(*args, dropout_rng=KEY)
    np.testing.assert_array_equal(f(*args, dropout_rng=KEY), want)
    np.testing.assert_array_equal(f(*args, dropout_rng=jax.random.key_data(KEY)), want)
    assert (np.asarray(f(*args, dropout_rng=jax.random.key(18))) != np.asarray(want)).mean() > 0.9


def test_raw_keys_of_any_implementation(platform):
    attend = functools.partial(attention, *qkv(), dropout_rate=0.5)
    for implementation in ("threefry2x32", "rbg"):
        with jax.default_prng_impl(implementation):
            key = jax.random.key(1)
            want = attend(dropout_rng=key)
            np.testing.assert_array_equal(attend(dropout_rng=jax.random.key_data(key)), want)


@IMPLEMENTATIONS
def test_rate_0_is_no_dropout(implementation, platform):
    args = qkv()
    f = functools.partial(attention, implementation=implementation)
    want = f(*args)
    for options in (dict(dropout_rate=0.0), dict(dropout_rate=0, dropout_rng=KEY), dict(dropout_rng=KEY)):
        np.testing.assert_array_equal(f(*args, **options), want)


@IMPLEMENTATIONS
@pytest.mark.parametrize("rate", quick.rows([1e-6, 1 - 2**-16, 1 - 1e-6], quick=[1 - 2**-16]))
def test_rates_next_to_0_and_1_make_no_nan(rate, implementation, platform):
    args = qkv()
    keep = keep_of(KEY, rate, 2, 4, 37, 43)
    f = functools.partial(attention, dropout_rate=rate, dropout_rng=KEY, implementation=implementation)
    out, vjp = jax.vjp(jax.jit(f), *args)
    want = oracle.attention(*args, np.ones(out.shape), dropout_rate=rate, keep=keep)
    for got, exact in zip((out, *vjp(jnp.ones_like(out))), (want.out, *want[2:]), strict=True):
        harness.assert_close(got, exact, "float32", num_keys=43)


def test_on_average_it_is_attention_without_dropout(platform):
    args = qkv(1, 9, 21)
    f = jax.jit(jax.vmap(lambda key: attention(*args, dropout_rate=0.25, dropout_rng=key)))
    samples = np.asarray(f(jax.random.split(KEY, 2000)), np.float64)
    error = samples.mean(0) - oracle.attention(*args).out
    assert np.abs(error / (samples.std(0) / np.sqrt(2000))).max() < 5


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys_of_every_generator(impl, platform):
    args, key = qkv(), jax.random.key(3, impl=impl)
    got = attention(*args, dropout_rate=0.5, dropout_rng=key)
    want = oracle.attention(*args, dropout_rate=0.5, keep=keep_of(key, 0.5, 2, 4, 37, 43)).out
    harness.assert_close(got, want, "float32", num_keys=43)


def test_without_a_batch_axis_it_is_a_batch_of_one(platform):
    args = qkv(1)
    want = attention(*args, dropout_rate=0.5, dropout_rng=KEY)
    np.testing.assert_array_equal(
        attention(*(x[0] for x in args), dropout_rate=0.5, dropout_rng=KEY), want[0]
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_repeats_give_the_same_bits(dtype, platform):
    args = [jnp.asarray(x.astype(DTYPES[dtype])) for x in qkv(2, 300, 333)]
    f = jax.jit(jax.value_and_grad(lambda *args: loss(*args, KEY, deterministic=True), ALL))
    want = f(*args)
    for _ in range(100 if platform == "cuda" else 5):
        jax.tree.map(np.testing.assert_array_equal, f(*args), want)


# ---- Transformations --------------------------------------------------------------------------------------


def exact_gradients(q, k, v, key, rate: float = 0.3) -> list[np.ndarray]:
    """The gradients of `loss`."""
    options = dict(dropout_rate=rate, keep=keep_of(key, rate, q.shape[0], q.shape[2], q.shape[1], k.shape[1]))
    out = oracle.attention(q, k, v, **options).out
    return list(oracle.attention(q, k, v, np.cos(out), **options)[2:])


def assert_gradients_close(got, want) -> None:
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        harness.assert_close(a, b, "float32", num_keys=43, name=name)


@pytest.mark.parametrize("arrays_too", [False, True], ids=["keys", "keys and arrays"])
def test_vmap_over_keys_is_a_loop(arrays_too, platform):
    keys = jax.random.split(KEY, 3)
    args = [np.stack([x, 0.5 * x, -x]) if arrays_too else x for x in qkv()]
    in_axes = (*(0 if arrays_too else None for _ in args), 0)
    out = jax.vmap(functools.partial(loss, rate=0.5), in_axes)(*args, keys)
    f = jax.grad(functools.partial(loss, rate=0.5), ALL)
    each = jax.jit(jax.vmap(f, in_axes))(*args, keys)
    total = jax.grad(
        lambda *args: jax.vmap(functools.partial(loss, rate=0.5), in_axes)(*args, keys).sum(), ALL
    )(*args)
    rows = [[x[i] for x in args] if arrays_too else args for i in range(3)]
    want = [exact_gradients(*row, key, 0.5) for row, key in zip(rows, keys, strict=True)]
    for i in range(3):
        np.testing.assert_allclose(out[i], loss(*rows[i], keys[i], rate=0.5), rtol=1e-5)
        assert_gradients_close([x[i] for x in each], want[i])
    summed = [np.stack(x) if arrays_too else sum(x) for x in zip(*want, strict=True)]
    assert_gradients_close(total, summed)


def test_vmap_with_one_key_is_a_loop(platform):
    """All elements of the map drop the same pairs, as in a loop with one key."""
    args = [np.stack([x, 0.5 * x]) for x in qkv()]
    got = jax.vmap(jax.grad(loss, ALL), (0, 0, 0, None))(*args, KEY)
    for i in range(2):
        assert_gradients_close([x[i] for x in got], exact_gradients(*(x[i] for x in args), KEY))


def test_another_key_takes_no_other_program(platform):
    traces = []

    @jax.jit
    def f(key):
        traces.append(key)
        return attention(*qkv(), dropout_rate=0.5, dropout_rng=key)

    a, b = f(KEY), f(jax.random.key(18))
    assert (np.asarray(a) != np.asarray(b)).any()
    assert len(traces) == 1


@pytest.mark.parametrize("policy", ["nothing_saveable", "everything_saveable"])
def test_checkpoint_drops_the_same_again(policy, platform):
    f = jax.checkpoint(loss, policy=getattr(jax.checkpoint_policies, policy))
    args = qkv()
    assert_gradients_close(jax.jit(jax.grad(f, ALL))(*args, KEY), exact_gradients(*args, KEY))


def test_scan_over_keys(platform):
    q, k, v = qkv()
    keys = jax.random.split(KEY, 3)

    def layer(x, key):
        return x + attention(x, k, v, dropout_rate=0.3, dropout_rng=key), None

    def unrolled(x):
        for i in range(3):
            x = layer(x, keys[i])[0]
        return x

    got = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(jax.lax.scan(layer, x, keys)[0]))))(q)
    want = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(unrolled(x)))))(q)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


SPECS = {
    "batch": P("batch"),
    "heads": P(None, None, "heads"),
    "batch and heads": P("batch", None, "heads"),
    "batch over both": P(("batch", "heads")),
    "lengths": P(None, "batch"),
}


@pytest.mark.parametrize("spec", quick.rows(SPECS, quick=["batch and heads", "lengths"]))
def test_sharding_changes_nothing(spec):
    """Dropout counts batch elements and heads of the whole array, not of the shard."""
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("batch", "heads"))
    t, s = (40, 48) if spec == SPECS["lengths"] else (37, 43)
    args = qkv(8, t, s, n=8, k=4)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]
    f = jax.jit(jax.value_and_grad(loss, ALL))
    value, gradients = f(*placed, KEY)
    want_value, want = f(*args, KEY)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    for got, x in zip(gradients, want, strict=True):
        np.testing.assert_array_equal(got, x)
    assert_gradients_close(gradients, exact_gradients(*args, KEY))
    if spec != SPECS["lengths"]:
        text = f.lower(*placed, KEY).compile().as_text()
        for collective in ("all-gather", "all-to-all", "collective-permute"):
            assert collective not in text


def test_shard_map_drops_as_each_device_would():
    """With a shared key each device counts batch elements and heads from 0; a sharded key differs by device."""
    mesh = Mesh(np.array(jax.devices("cpu")), ("batch",))
    args = qkv(8)

    def local(q, k, v, keys):
        return attention(q, k, v, dropout_rate=0.5, dropout_rng=keys[0])

    f = jax.shard_map(local, mesh=mesh, in_specs=(P("batch"),) * 4, out_specs=P("batch"))
    keys = jax.random.split(KEY, 8)
    got = jax.jit(f)(*args, keys)
    rows = [attention(*(x[i : i + 1] for x in args), dropout_rate=0.5, dropout_rng=keys[i]) for i in range(8)]
    np.testing.assert_allclose(got, np.concatenate(rows), rtol=1e-5, atol=1e-6)
    shared = jax.shard_map(
        lambda q, k, v, key: attention(q, k, v, dropout_rate=0.5, dropout_rng=key),
        mesh=mesh,
        in_specs=(*(P("batch"),) * 3, P()),
        out_specs=P("batch"),
    )
    got = jax.jit(shared)(*args, KEY)
    rows = [attention(*(x[i : i + 1] for x in args), dropout_rate=0.5, dropout_rng=KEY) for i in range(8)]
    np.testing.assert_allclose(got, np.concatenate(rows), rtol=1e-5, atol=1e-6)
    gradients = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(shared(*args, KEY))), ALL))(*args)
    want = [exact_gradients(*(x[i : i + 1] for x in args), KEY, 0.5) for i in range(8)]
    assert_gradients_close(gradients, [np.concatenate(x) for x in zip(*want, strict=True)])
