"""Keys and values in pages: attention to them is attention to the same keys in order."""

import contextlib
import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
import random_cases
from cases import CASES, DTYPES, Case
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from random_cases import RandomCase

import jax_flash

# Hopper's kernel takes multiples of 8 keys, and copies 16 to 64 of them at a time.
PAGE_SIZES = 16, 64, 7, 128, 256, 24, 192, 100


def with_whole_pages(case: Case, page_size: int) -> Case:
    """The case with keys for whole pages, and with lengths."""
    seqlen = max(-(-case.seqlen_kv // page_size), 1) * page_size
    options = dict(case.options)
    options.setdefault(
        "key_value_seq_lengths", tuple(case.seqlen_kv // (1 + b % 2) for b in range(case.batch))
    )
    segments = options.get("segment_ids")
    if segments is not None and not segments.pair:
        options["segment_ids"] = dataclasses.replace(segments, pair=True)
    return dataclasses.replace(case, seqlen_kv=seqlen, options=tuple(options.items()))


def arguments(
    case: Case, dtype: str, page_size: int, has_batch: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of a call with keys in order, and of the same with pages."""
    q, k, v, *_ = case.inputs(DTYPES[dtype])
    operands = case.operands(DTYPES[dtype])
    lengths = np.clip(np.reshape(operands["key_value_seq_lengths"], -1), 0, case.seqlen_kv)
    k_pages, v_pages, page_indices = harness.in_pages(k, v, lengths, page_size)
    if not has_batch:
        q, k, v, page_indices = (x[0] for x in (q, k, v, page_indices))
        operands |= {name: tuple(x[0] for x in operands[name]) for name in operands.keys() & {"segment_ids"}}
    in_order = operands | dict(q=q, k=k, v=v)
    return in_order, in_order | dict(k=k_pages, v=v_pages, page_indices=page_indices)


def check(
    case: Case,
    kind: int,
    page_size: int,
    platform: str,
    implementation: str | None = None,
    has_batch: bool = True,
    mapped: Collection[str] = (),
) -> None:
    """Compares pages with keys in order; in a vmap of two elements, where these differ in `mapped` arguments."""
    dtype, precision, rule = harness.kind(platform, kind)
    case = with_whole_pages(case, page_size)
    static = dict(case.static, precision=precision, implementation=implementation, return_residual=True)

    def attend(arguments: dict[str, Any]) -> Any:
        q, k, v = (arguments[name] for name in "qkv")
        operands = {name: x for name, x in arguments.items() if name not in ("q", "k", "v")}
        return harness.call(q, k, v, operands, **static)

    @jax.jit
    def f(arguments: dict[str, Any]) -> Any:
        if not mapped:
            return attend(arguments)
        return jax.vmap(attend, in_axes=({name: 0 if name in mapped else None for name in arguments},))(
            arguments
        )

    in_order, paged = arguments(case, dtype, page_size, has_batch)
    if mapped:
        others = arguments(dataclasses.replace(case, name=f"{case}, another"), dtype, page_size, has_batch)
        in_order, paged = (
            {
                name: jax.tree.map(lambda *pair: np.stack(pair), x, other[name]) if name in mapped else x
                for name, x in one.items()
            }
            for one, other in zip((in_order, paged), others, strict=True)
        )
    # Planes, which would compute float32 keys in order, are not made of pages.
    portable = harness.without_planes() if dtype == "float32" else contextlib.nullcontext()
    with harness.x64(dtype):
        with portable:
            want = jax.block_until_ready(f(in_order))
        want, got = ([np.asarray(x) for x in results] for results in (want, f(paged)))
    if implementation is None and has_same_kernel(platform, page_size):
        for x, y in zip(got, want, strict=True):
            assert x.tobytes() == y.tobytes()
    else:
        assert not mapped, "The exact results are those of one element."
        got = got if has_batch else [x[None] for x in got]
        harness.check(harness.oracle.Result(*got), case, dtype, rule, names=("out", "lse"))


def has_same_kernel(platform: str, page_size: int) -> bool:
    """Whether the kernel of keys in order takes such pages, too."""
    return platform == "cpu" or page_size % 8 == 0


SIZED = {case.name: (case, PAGE_SIZES[i % len(PAGE_SIZES)]) for i, case in enumerate(CASES) if case.batch}
QUICK = [
    "full",
    "groups of 3",
    "everything at once",
    "segments, causal",
    "decode in parts",
    "decode, odd sizes",
    "decode, head dim 256",
    "decode, everything at once",
]


@pytest.mark.parametrize(
    ("sized", "kind"),
    [
        pytest.param(sized, i % 4, id=f"{name}-{i % 4}", marks=() if name in QUICK else quick.EXHAUSTIVE)
        for i, (name, sized) in enumerate(SIZED.items())
    ],
)
def test_has_the_bits_of_keys_in_order(sized, kind, platform):
    case, page_size = sized
    check(case, kind, page_size, platform)


@pytest.mark.parametrize("page_size", quick.rows(PAGE_SIZES, quick=[7, 64]))
@pytest.mark.parametrize("queries", [1, 60])
@quick.KINDS
def test_every_page_size(kind, queries, page_size, platform):
    case = Case("pages", 3, queries, 300, 4, 2, 128, 64, options=(("key_value_seq_lengths", (300, 129, 0)),))
    check(case, kind, page_size, platform)


@pytest.mark.parametrize("page_size", [7, 16])
@pytest.mark.parametrize("name", ["full", "everything at once", "decode, everything at once"])
def test_in_plain_xla(name, page_size):
    check(SIZED[name][0], 2, page_size, "cpu", implementation="xla")


_OF_KEYS = {"k", "v", "page_indices", "key_value_seq_lengths"}  # where keys are NaN depends on the lengths


def random_case(seed: int, dtype: str, page_size: int, platform: str) -> RandomCase:
    """One that has something to compute, and kernels for it."""
    largest = random_cases.max_head_dim(platform, dtype)
    if not has_same_kernel(platform, page_size):
        largest = min(largest, 256)
    for draw in (random_cases.draw(100 * seed + i, platform) for i in range(100)):
        case = draw.case
        has_kernel = max(case.head_dim, case.head_dim_v) <= largest
        if has_kernel and case.batch and case.seqlen_q and case.num_heads:
            return draw
    raise AssertionError


@pytest.mark.parametrize("seed", quick.rows(range(60), quick=range(6)))
def test_random_case(seed, platform):
    kind, page_size = seed % 4, PAGE_SIZES[seed % len(PAGE_SIZES)]
    drawn = random_case(seed, harness.kind(platform, kind)[0], page_size, platform)
    case, mapped = drawn.case, set()
    if drawn.loops and has_same_kernel(platform, page_size):
        mapped = drawn.loops[0].axes.keys() & {"q", "k", "v", *dict(case.options)}
    if mapped & _OF_KEYS:
        mapped |= _OF_KEYS
    print(case, case.options, f"{drawn.has_batch=} {mapped=}", sep="\n")  # pytest shows it if the test fails
    check(case, kind, page_size, platform, has_batch=drawn.has_batch, mapped=mapped)


# ---- Transformations ----

B, T, N, K, H, SIZE, PAGES = 4, 2, 4, 2, 16, 8, 12
RNG = np.random.default_rng(0)
Q = RNG.standard_normal((B, T, N, H)).astype(np.float32)
POOL = [RNG.standard_normal((PAGES, SIZE, K, H)).astype(np.float32) for _ in range(2)]
INDICES = RNG.integers(0, PAGES, (B, 3)).astype(np.int32)  # sequences share pages
LENGTHS = np.array([24, 17, 1, 0], np.int32)
attention = functools.partial(jax_flash.flash_attention, return_residual=True)


def gathered(pool: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return pool[indices].reshape(B, -1, K, H)


def test_vmap(platform):
    """Over anything: mapped pages become more pages."""
    args = Q, *POOL, INDICES, LENGTHS
    others = -Q, *(2 * x for x in POOL), INDICES[::-1], LENGTHS[::-1].copy()

    def f(q, k, v, indices, lengths):
        return attention(q, k, v, page_indices=indices, key_value_seq_lengths=lengths)

    for mapped in (1, 2, 4, 8, 16, 9, 14, 25, 31):  # bits: which arguments
        axes = [0 if mapped >> i & 1 else None for i in range(len(args))]
        stacked = [
            x if axis is None else np.stack([x, y]) for x, y, axis in zip(args, others, axes, strict=True)
        ]
        got = jax.jit(jax.vmap(f, in_axes=axes))(*stacked)
        second = [x if axis is None else y for x, y, axis in zip(args, others, axes, strict=True)]
        for x, first, last in zip(got, f(*args), f(*second), strict=True):
            np.testing.assert_array_equal(x[0], first)
            np.testing.assert_array_equal(x[1], last)


def test_vmap_clamps_indices(platform):
    def f(k, indices):
        return attention(Q, k, POOL[1], page_indices=indices, key_value_seq_lengths=LENGTHS)[0]

    pools, wild = np.stack([POOL[0], 2 * POOL[0]]), np.full_like(INDICES, PAGES)
    for got, k in zip(jax.vmap(f, in_axes=(0, None))(pools, wild), pools, strict=True):
        np.testing.assert_array_equal(got, f(k, wild))


def test_vmap_of_vmap(platform):
    def f(q, k, indices):
        return attention(q, k, POOL[1], page_indices=indices, key_value_seq_lengths=LENGTHS)[0]

    k = np.stack([POOL[0], 2 * POOL[0], -POOL[0]])
    q, indices = np.stack([Q, -Q]), np.stack([INDICES, INDICES[::-1]])
    got = jax.vmap(jax.vmap(f, in_axes=(None, 0, None)), in_axes=(0, None, 0))(q, k, indices)
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(got[i, j], f(q[i], k[j], indices[i]))


def test_without_a_batch_axis(platform):
    whole = attention(Q, *POOL, page_indices=INDICES, key_value_seq_lengths=LENGTHS)
    for b in range(B):
        for indices in (INDICES[b], INDICES[b : b + 1]):
            got = attention(Q[b], *POOL, page_indices=indices, key_value_seq_lengths=int(LENGTHS[b]))
            for x, y in zip(got, whole, strict=True):
                np.testing.assert_array_equal(x, y[b])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("implementation", [None, "xla"], ids=["fused", "xla"])
@pytest.mark.parametrize("axes", ["batch", "heads", "both"])
def test_sharded_jit(axes, implementation, kind):
    """Pages are sharded over heads, and every device of the batch has all of them."""
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("b", "h"), axis_types=(kind, kind))
    b, h = "b" if axes != "heads" else None, "h" if axes != "batch" else None
    specs = P(b, None, h), P(None, None, h), P(None, None, h), P(b), P(b)
    args = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((Q, *POOL, INDICES, LENGTHS), specs, strict=True)
    ]

    def attend(q, k, v, indices, lengths):
        options = dict(page_indices=indices, key_value_seq_lengths=lengths, implementation=implementation)
        return attention(q, k, v, **options)

    f = jax.jit(attend)
    out, lse = f(*args)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(b, None, h)), 4)
    assert "all-gather" not in f.lower(*args).compile().as_text()
    for x, want in zip((out, lse), attend(Q, *POOL, INDICES, LENGTHS), strict=True):
        np.testing.assert_allclose(
            x, want, rtol=1e-6 if implementation else 0, atol=1e-6 if implementation else 0
        )


@pytest.mark.parametrize("implementation", [None, "xla"], ids=["fused", "xla"])
def test_vmap_on_explicit_axes(implementation):
    """The axes of the mesh are then in no spec."""
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("b",), axis_types=(AxisType.Explicit,))
    q, indices, lengths = (x[:, None] for x in (Q, INDICES, LENGTHS))

    def attend(q, indices, lengths):
        options = dict(page_indices=indices, key_value_seq_lengths=lengths, implementation=implementation)
        return attention(q, *POOL, **options)[0]

    sharded = [jax.device_put(x, NamedSharding(mesh, P("b"))) for x in (q, indices, lengths)]
    got = jax.jit(jax.vmap(attend))(*sharded)
    np.testing.assert_allclose(got, jax.vmap(attend)(q, indices, lengths), rtol=1e-6, atol=1e-6)


def test_a_cache_that_grows(platform):
    """One token after the other, each written into its page, as in decoding: the rows of causal attention."""
    seqlen, order = 40, RNG.permutation(PAGES)
    q, k, v = (RNG.standard_normal((seqlen, heads, H)).astype(np.float32) for heads in (N, K, K))
    indices = jnp.asarray(order[None, : seqlen // SIZE], jnp.int32)

    @jax.jit
    def decode(q, k, v):
        def step(pages, token):
            i, q, k, v = token
            at = indices[0, i // SIZE], i % SIZE
            pages = [x.at[at].set(row) for x, row in zip(pages, (k, v), strict=True)]
            lengths = jnp.full((1,), i + 1, jnp.int32)
            options = dict(page_indices=indices, key_value_seq_lengths=lengths, precision="highest")
            out = jax_flash.flash_attention(q[None, None], *pages, **options)
            return pages, out[0, 0]

        empty = [jnp.full((PAGES, SIZE, K, H), jnp.nan)] * 2
        return jax.lax.scan(step, empty, (jnp.arange(seqlen), q, k, v))[1]

    want = jax_flash.flash_attention(q, k, v, is_causal=True, precision="highest")
    np.testing.assert_allclose(decode(q, k, v), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", [None, "xla"], ids=["fused", "xla"])
@pytest.mark.parametrize("mode", [jax.jacrev, jax.jacfwd])
@pytest.mark.parametrize("argument", ["query", "key", "bias"])
def test_has_no_derivatives(argument, mode, implementation, platform):
    def f(x):
        args = dict(query=Q, key=POOL[0], value=POOL[1]) | {argument: x}
        return jax_flash.flash_attention(
            **args, page_indices=INDICES, key_value_seq_lengths=LENGTHS, implementation=implementation
        ).sum()

    x = dict(query=Q, key=POOL[0], bias=np.zeros((T, 24), np.float32))[argument]
    with pytest.raises(NotImplementedError, match="page_indices has no derivatives"):
        mode(f)(x)
    # Beside a call that is not differentiated, others are.
    mode(lambda x: f(jax.lax.stop_gradient(x)) * x.sum())(x)


def test_indices_are_clamped(platform):
    wild = np.array([[-5, 0, PAGES], [PAGES - 1, 2**31 - 1, -(2**31)]] * 2, np.int32)
    got = attention(Q, *POOL, page_indices=wild, key_value_seq_lengths=LENGTHS)
    want = attention(Q, *POOL, page_indices=np.clip(wild, 0, PAGES - 1), key_value_seq_lengths=LENGTHS)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)
