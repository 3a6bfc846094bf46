"""Biases and ALiBi slopes: gradients, dtypes, shapes. The table of cases combines them with other options."""

import contextlib
import functools
import itertools
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
import strategies
from cases import DTYPES, Bias, Case, Mask, Segments, case
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_flash
from jax_flash import _bias_sums, _derivatives, _kernel_choice, _primitives, _row_parts
from jax_flash._options import AttentionOptions

attention = functools.partial(jax_flash.flash_attention, precision="highest")
T, S = 37, 43
SIZES = dict(zip("BNTS1", (4, 8, T, S, 1), strict=True))


def random(*shape: int, seed: int, dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def arrays(dtype=np.float32) -> list[np.ndarray]:
    """q, k, v."""
    shapes = (4, T, 8, 16), (4, S, 4, 16), (4, S, 4, 16)
    return [random(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]


def bias_of(axes: str, dtype=np.float32) -> np.ndarray:
    return random(*(SIZES[letter] for letter in axes), seed=3, dtype=dtype)


def loss(q, k, v, bias, **options):
    out = attention(q, k, v, bias, is_causal=True, **options)
    return jnp.sum(jnp.sin(out.astype(jnp.promote_types(out.dtype, jnp.float32))))


def exact_gradients(q, k, v, bias, arithmetic=None, **options) -> list[np.ndarray]:
    """The gradients of `loss` with respect to q, k, v and bias (an array or Alibi)."""
    name, x = ("alibi", bias.slopes) if isinstance(bias, jax_flash.Alibi) else ("bias", bias)
    options |= dict(is_causal=True) | {name: x}
    out = oracle.attention(q, k, v, **options).out
    if arithmetic is not None:
        options["arithmetic"] = arithmetic
    gradients = {}
    result = oracle.attention(q, k, v, np.cos(out), **options, gradients=gradients)
    return [result.dq, result.dk, result.dv, gradients[name]]


def assert_close(got, want, kind="float32", naive=None) -> None:
    """The closeness rule for the gradient of a bias, which is summed over broadcast dimensions."""
    terms = 4 * 8 * T * S // np.size(want)
    want, naive = (None if x is None else np.reshape(x, np.size(x)) for x in (want, naive))
    harness.assert_close(np.reshape(got, np.size(got)), want, kind, num_keys=max(S, terms), naive=naive)


FORMS = ["".join(axes) for axes in itertools.product("B1", "N1", "T1", "S1")]


@pytest.mark.parametrize("axes", [*FORMS, "NTS", "N1S", "TS", "1S", "T1", "S", ""])
def test_gradient_is_summed_over_broadcast_axes(axes, platform):
    args, bias = arrays(), bias_of(axes)
    got = jax.jit(jax.grad(loss, argnums=3))(*args, bias)
    assert (got.shape, got.dtype) == (bias.shape, bias.dtype)
    assert_close(got, exact_gradients(*args, bias)[3])


@pytest.mark.parametrize("axes", quick.rows(["BNTS", "1NTS", "B11S"], quick=["1NTS"]))
@pytest.mark.parametrize("bias_dtype", ["bfloat16", "float16", "float32", "float64"])
@quick.KINDS
def test_gradient_has_the_dtype_of_the_bias(kind, bias_dtype, axes, platform):
    dtype, precision, rule = harness.kind(platform, kind)
    args, bias = arrays(DTYPES[dtype]), bias_of(axes, DTYPES[bias_dtype])
    with harness.x64(max(dtype, bias_dtype, key=["bfloat16", "float16", "float32", "float64"].index)):
        got = jax.jit(jax.grad(functools.partial(loss, precision=precision), argnums=3))(*args, bias)
    assert got.dtype == DTYPES[bias_dtype]
    kinds = ["float64", "float32", "tfloat32", "float16", "bfloat16"]
    rule = max(rule, bias_dtype, key=kinds.index)
    naive = None
    if rule in ("bfloat16", "float16", "tfloat32"):
        naive = exact_gradients(*args, bias, oracle.arithmetic_of(rule))[3]
    assert_close(got, exact_gradients(*args, bias)[3], rule, naive)


@pytest.mark.parametrize("spec", [P(), P("x"), P(None, "x")], ids=["one device", "batch", "sequence"])
@pytest.mark.parametrize("axes", quick.rows(["BNTS", "BN1S", "BNT1", "BN11"], quick=["BN1S", "BNT1"]))
@pytest.mark.parametrize(
    "sizes", quick.rows([(16, 40), (8, 40), (1, 40), (40, 1), (72, 128)], quick=[(16, 40), (8, 40)])
)
def test_gradient_in_16_bits_of_a_bias_of_each_head(sizes, axes, spec):
    """Only with both queries and keys does it leave the kernel in 16 bits."""
    if spec[1:] and any(size % 8 for size in sizes):
        pytest.skip("does not divide over the devices")
    lengths = dict(zip("BNTS1", (8, 2, *sizes, 1), strict=True))
    q, k, v = (random(8, length, 2, 16, seed=i) for i, length in enumerate((sizes[0], *sizes[1:] * 2)))
    bias = random(*(lengths[letter] for letter in axes), seed=3)

    def loss(bias, q, k, v):
        out, lse = attention(q, k, v, bias, return_residual=True)
        return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(lse)

    gradient = jax.grad(loss)

    args = [x.astype(DTYPES["bfloat16"]) for x in (bias, q, k, v)]
    want = jax.jit(gradient)(*(x.astype(np.float32) for x in args))
    placed = strategies.put(harness.mesh_of(8, names=("x",)), spec, *args[1:]) if spec else args[1:]
    got = jax.jit(gradient)(args[0], *placed)
    assert got.dtype == args[0].dtype
    limit = np.sqrt(np.mean(want**2)) * 2.0**-6 + 1e-6
    np.testing.assert_array_less(np.sqrt(np.mean((np.asarray(got, np.float32) - want) ** 2)), limit)


def test_parts_of_devices_are_added_in_float32():
    """Parts of a shared bias's gradient that nearly cancel."""
    q, k, v = (
        np.repeat(random(1, T, 2, 16, seed=seed), 8, 0).astype(DTYPES["bfloat16"]) for seed in range(3)
    )
    dout = random(8, T, 2, 16, seed=3)
    dout = (dout - 0.97 * dout.mean(0)).astype(DTYPES["bfloat16"])
    bias = random(1, 2, T, T, seed=4, dtype=DTYPES["bfloat16"])

    @jax.jit
    def gradient(bias, q, k, v, dout):
        return jax.vjp(functools.partial(attention, q, k, v), bias)[1](dout)[0]

    want = np.asarray(gradient(bias, q, k, v, dout), np.float32)
    got = gradient(bias, *strategies.put(harness.mesh_of(8, names=("x",)), P("x"), q, k, v, dout))
    assert np.linalg.norm(np.asarray(got, np.float32) - want) < 2.0**-8 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_gradient_has_the_dtype_of_the_slopes(dtype, platform):
    slopes = np.linspace(0.0, 0.5, 8).astype(DTYPES[dtype])
    gradient = jax.grad(lambda slopes: loss(*arrays(), jax_flash.Alibi(slopes)))(slopes)
    assert gradient.dtype == DTYPES[dtype]
    want = exact_gradients(*arrays(), jax_flash.Alibi(slopes))[3]
    np.testing.assert_allclose(
        np.asarray(gradient, np.float64), want, rtol=1e-2 if dtype == "bfloat16" else 1e-3
    )


@pytest.mark.parametrize(
    ("bias", "dtype"),
    [
        (bias_of("BNTS"), "float32"),
        (bias_of("BNTS", DTYPES["bfloat16"]), "bfloat16"),  # one primitive
        (bias_of("1N1S"), "float32"),
        (None, "float32"),
    ],
    ids=["pairs", "pairs in 16 bits", "keys", "slopes"],
)
@pytest.mark.parametrize("within", ["", "scan", "remat", "forward mode"])
def test_only_what_is_differentiated_takes_a_pass(bias, dtype, within, platform):
    """The other gradients have the same bits with and without this pass."""
    bias = jax_flash.Alibi(np.linspace(0.0, 0.5, 8, dtype=np.float32)) if bias is None else bias
    f = functools.partial(loss, deterministic=True, forward_mode=within == "forward mode")
    if within == "remat":
        f = jax.checkpoint(f)
    if within == "scan":
        once = f

        def f(*args):
            return jax.lax.scan(lambda total, _: (total + once(*args), None), 0.0, length=2)[0]

    def program(argnums):
        gradient = jax.jit(jax.grad(f, argnums))
        args = *arrays(DTYPES[dtype]), bias
        return gradient(*args), gradient.lower(*args).as_text()

    every, text = program((0, 1, 2, 3))
    assert text.count("@jax_flash_backward_bias(") == 1
    some, text = program((0, 1, 2))
    assert "@jax_flash_backward_bias(" not in text
    assert text.count("@jax_flash_backward(") == 1
    alone, text = program((3,))
    assert text.count("@jax_flash_backward_bias(") == 1
    for got, want in zip(jax.tree.leaves((*some, *alone)), jax.tree.leaves(every), strict=True):
        np.testing.assert_array_equal(got, want)


# T and S, what hides pairs in a call, and operands that do. Of a causal call, blocks of 128 rows are summed.
HIDING = {
    "none": ((T, S), {}, {}),
    "lengths": (
        (T, S),
        {},
        dict(
            query_seq_lengths=np.array([T, 3, 0, 20], np.int32),
            key_value_seq_lengths=np.array([40, S, 7, 0], np.int32),
        ),
    ),
    "causal": ((300, 170), dict(is_causal=True), {}),
    "causal, lengths": (
        (300, 310),
        dict(is_causal=True),
        dict(key_value_seq_lengths=np.array([310, 150, 7, 0], np.int32)),
    ),
    "window": ((300, 310), dict(local_window_size=(9, 3)), {}),
    "offset": ((300, 310), dict(is_causal=True), dict(query_offset=np.array([30, -2, 0, 10], np.int32))),
}


@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (4, 1), (1, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("hiding", HIDING)
def test_sums_of_gradients_of_logits(hiding, dtype, shape):
    """What a kernel wrote of hidden pairs does not count."""
    (num_rows, num_keys), static, operands = HIDING[hiding]
    ds = random(4, 6, num_rows, num_keys, seed=0, dtype=DTYPES["bfloat16"])
    options = AttentionOptions.resolve(8, **static)
    visible = np.broadcast_to(oracle.visible(4, num_rows, num_keys, **static, **operands), ds.shape)
    ds[~visible] = np.nan
    want = (
        np.where(visible, ds, 0)
        .astype(np.float64)
        .sum(tuple(axis for axis, size in enumerate(shape) if size == 1), keepdims=True)
    )
    q = jnp.zeros((4, num_rows, 6, 8), jnp.bfloat16)
    dbias = jax.core.ShapedArray((*shape, num_rows, num_keys), DTYPES[dtype])
    got = jax.jit(lambda ds: _bias_sums.of_ds(ds, dict(q=q) | operands, dbias, options))(ds.view(np.uint16))
    assert got.dtype == dbias.dtype
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float64), want, rtol=2**-8 if dtype == "bfloat16" else 1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("is_causal", "num_rows", "num_keys"),
    [(False, 200, 200), (True, 200, 200), (True, 136, 304), (True, 400, 136)],
)
@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("portable", [False, True])
def test_one_kernel_computes_all_gradients(
    portable, head_dim, is_causal, num_rows, num_keys, platform, monkeypatch
):
    """On Hopper it, or that for dq, keeps the gradients of the logits; other kernels compute them in a second pass."""
    q, k, v, dout = (
        random(2, length, 2, head_dim, seed=i, dtype=DTYPES["bfloat16"])
        for i, length in enumerate((num_rows, num_keys, num_keys, num_rows))
    )
    bias = random(2, 2, num_rows, num_keys, seed=4, dtype=DTYPES["bfloat16"])
    lengths = np.array([num_keys - 50, num_keys], np.int32)

    def gradients(q, k, v, bias):
        f = functools.partial(attention, key_value_seq_lengths=lengths, is_causal=is_causal)
        return jax.vjp(f, q, k, v, bias)[1](dout)

    kept, keeps_ds = [], _kernel_choice.keeps_ds

    def record(*args, **named):
        kept.append(keeps_ds(*args, **named))
        return kept[-1]

    monkeypatch.setattr(_kernel_choice, "keeps_ds", record)
    on_cpu = platform == "cpu"
    # Hopper's alone, so that no second pass takes over.
    kernels = "sm80" if portable else "sm90" if harness.is_hopper() else ""
    with contextlib.nullcontext() if on_cpu else harness.cuda_settings(kernels=kernels):
        got = jax.block_until_ready(jax.jit(gradients)(q, k, v, bias))
    assert kept == ([] if on_cpu else [harness.is_hopper()])
    monkeypatch.setattr(_kernel_choice, "keeps_ds", lambda *args, **named: False)
    want = jax.jit(lambda *args: gradients(*args))(q, k, v, bias)
    for x, y in zip(got, want, strict=True):
        x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
        assert np.linalg.norm(x - y) <= 2.0**-8 * np.linalg.norm(y)


def test_a_shared_bias_leaves_other_gradients_partitioned_beside_manual_axes():
    """There the gradient of a bias that devices share is not partitioned, in a pass of its own."""
    mesh = Mesh(np.array(jax.devices("cpu")).reshape(2, 2, 2), ("manual", "batch", "heads"))
    call = jax.shard_map(
        jax_flash.flash_attention,
        mesh=mesh,
        in_specs=(P("manual"),) * 4,
        out_specs=P("manual"),
        axis_names={"manual"},
        check_vma=False,
    )
    x, bias = (
        jax.ShapeDtypeStruct(shape, DTYPES["bfloat16"], sharding=NamedSharding(mesh, spec))
        for shape, spec in (
            ((8, 32, 4, 16), P(("manual", "batch"), None, "heads")),
            ((2, 4, 32, 32), P("manual")),
        )
    )
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(call(*args).astype(np.float32) ** 2), (0, 1, 2, 3)))
    text = gradient.lower(x, x, x, bias).compile().as_text()
    [backward] = re.findall(r'= \((.*?)\) custom-call\(.*custom_call_target="jax_flash_backward"', text)
    assert re.sub(r"\{[^}]*\}", "", backward) == ", ".join(3 * ["bf16[2,32,2,16]"])


def test_an_eager_gradient_is_one_program(monkeypatch):
    """So XLA drops the unused pass here, too."""

    def fail(*args, **params):
        raise AssertionError("A pass ran by itself.")

    for module in (_primitives, _derivatives):
        for primitive in (module._forward_p, module._backward_p, module._backward_bias_p):
            monkeypatch.setattr(primitive, "impl", fail)
    jax.grad(loss)(*arrays(), bias_of("1N1S"))


@pytest.mark.parametrize("hidden", [-np.inf, float(np.finfo(np.float32).min), -1e9], ids=str)
def test_a_bias_as_a_mask(hidden, platform):
    """A bias of -inf or of a large negative number, the traditional way to mask."""
    args = arrays()
    mask = np.random.default_rng(0).random((4, 8, T, S)) < 0.5
    mask[..., 0] = True  # at least one key in each row
    bias = np.where(mask, bias_of("BNTS"), hidden).astype(np.float32)
    got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*args, bias)
    want = exact_gradients(*args, np.where(mask, bias, 0), mask=mask)
    for a, b in zip(got, want, strict=True):
        harness.assert_close(a, b, "float32", num_keys=S)
    assert not np.asarray(got[3])[~mask].any()


@pytest.mark.parametrize("implementation", [None, "xla"], ids=["fused", "xla"])
def test_a_row_of_minus_infinities_sees_no_key(implementation, platform):
    args, bias = arrays(), bias_of("BNTS")
    bias[1, 2, 30] = -np.inf
    forward = functools.partial(attention, return_residual=True, implementation=implementation)
    out, lse = jax.jit(forward)(*args, bias)
    assert not out[1, 30, 2].any()
    assert np.isneginf(lse[1, 30, 2])
    assert np.isfinite(lse).sum() == lse.size - 1
    f = jax.grad(functools.partial(loss, implementation=implementation), (0, 1, 2, 3))
    for gradient in jax.jit(f)(*args, bias):
        assert np.isfinite(gradient).all()


@pytest.mark.parametrize("constant", [-1e9, 1e9, 2e38, -2e38], ids=str)
def test_a_large_constant_changes_nothing(constant, platform):
    """It shifts a whole row. The logits here are 0, so rounding changes nothing."""
    q, k, v = arrays()
    bias = np.full((1, 1, T, 1), constant, np.float32)
    out, lse = attention(0 * q, k, v, bias, return_residual=True)
    want = np.broadcast_to(v.mean(1).repeat(2, 1)[:, None], out.shape)
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, constant, rtol=1e-6)


@pytest.mark.parametrize("axes", ["BNTS", "1NTS", "B11S", "1N11"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradient_repeats_its_bits(dtype, axes, platform):
    """Even if the other gradients are summed in any order."""
    shapes = (2, 300, 4, 64), (2, 333, 2, 64), (2, 333, 2, 64)
    args = [jnp.asarray(random(*x, seed=seed, dtype=DTYPES[dtype])) for seed, x in enumerate(shapes)]
    sizes = dict(zip("BNTS1", (2, 4, 300, 333, 1), strict=True))
    bias = jnp.asarray(random(*(sizes[x] for x in axes), seed=3))
    f = jax.jit(jax.grad(loss, argnums=3))
    want = f(*args, bias)
    for _ in range(300 if platform == "cuda" else 5):
        np.testing.assert_array_equal(f(*args, bias), want)


# ---- Slopes -----------------------------------------------------------------------------------------------

SLOPES = np.array([0.5, 0.25, 0.125, 0.0625, 0.0, -0.05, 1.0, 0.01], np.float32)
BESIDE_SLOPES = {
    "alone": {},
    "offset": dict(query_offset=6),
    "offsets": dict(query_offset=np.array([0, 6, -9, 1000], np.int32)),
    "causal": dict(is_causal=True),
    "window": dict(local_window_size=(9, 4), query_offset=np.array([0, 6, 3, -2], np.int32)),
    "soft cap": dict(logits_soft_cap=2.0),
    "sinks": dict(sinks=np.linspace(-1, 1, 8, dtype=np.float32)),
    "lengths": dict(key_value_seq_lengths=np.array([0, 43, 5, 20], np.int32)),
}


@pytest.mark.parametrize("options", BESIDE_SLOPES.values(), ids=BESIDE_SLOPES.keys())
def test_slopes_are_the_dense_bias(options, platform):
    """Out, lse and gradients, including that of the slopes, equal those of the dense bias."""
    offset = jnp.reshape(options.get("query_offset", 0), (-1, 1, 1, 1))
    distance = jnp.abs(jnp.arange(T)[:, None] + offset - jnp.arange(S))

    def dense(slopes):
        return -slopes[:, None, None] * distance

    @functools.partial(jax.jit, static_argnums=0)
    def results(make, q, k, v, slopes):
        def f(q, k, v, slopes):
            return attention(q, k, v, make(slopes), return_residual=True, **options)

        (out, lse), vjp = jax.vjp(f, q, k, v, slopes)
        return out, lse, *vjp((jnp.cos(out), jnp.where(jnp.isfinite(lse), jnp.sin(lse), 0)))

    got, want = results(jax_flash.Alibi, *arrays(), SLOPES), results(dense, *arrays(), SLOPES)
    for a, b in zip(got[:5], want[:5], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    # The slopes' gradient sums products with distances, up to 1000 with the largest offset.
    largest = float(jnp.abs(distance).max())
    np.testing.assert_allclose(got[5], want[5], rtol=1e-4, atol=1e-5 * largest)


def arrays_of(text: str) -> set[tuple[int, ...]]:
    """The shapes of all arrays in a program's text: jaxpr, StableHLO or HLO."""
    shapes = re.findall(r"(?:tensor<|\b(?:[fsu]\d+|bf16|pred|bool|i1)\[)([\dx,]+)", text)
    return {tuple(int(size) for size in re.split("[x,]", shape.strip("x,")) if size) for shape in shapes}


def programs(f, *args) -> list[str]:
    """The function's program before and after XLA's compilation."""
    lowered = jax.jit(f).lower(*args)
    return [str(jax.make_jaxpr(f)(*args)), lowered.as_text(), lowered.compile().as_text()]


# They are read in place. The gradient of a bias without queries or without keys needs smaller sums.
WITHOUT_PAIRS = {
    "slopes": jax_flash.Alibi(SLOPES),
    "bias of keys": bias_of("B11S"),
    "bias of heads and rows": bias_of("NT1"),
    "bias of heads": bias_of("N11"),
}


@pytest.mark.parametrize("bias", WITHOUT_PAIRS.values(), ids=WITHOUT_PAIRS.keys())
def test_no_array_of_pairs_is_written(bias, platform):
    f = jax.value_and_grad(
        functools.partial(loss, key_value_seq_lengths=np.full(4, 9, np.int32)), (0, 1, 2, 3)
    )
    for text in programs(f, *arrays(), bias):
        shapes = arrays_of(text)
        assert (4, T, 8, 16) in shapes
        assert not [shape for shape in shapes if T in shape and S in shape]


def test_the_search_finds_an_array_of_pairs():
    """Shows that the test above can fail."""
    f = functools.partial(loss, implementation="xla")
    for text in programs(f, *arrays(), jax_flash.Alibi(SLOPES)):
        assert [shape for shape in arrays_of(text) if T in shape and S in shape]


@pytest.mark.parametrize("axes", ["B11S", "1NT1", "alibi"])
def test_memory_is_linear(axes, platform):
    def temporary_bytes(length: int) -> int:
        q = jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32)
        sizes = dict(zip("BNTS1", (1, 1, length, length, 1), strict=True))
        bias = jax.ShapeDtypeStruct(
            tuple(sizes[letter] for letter in axes if letter in sizes) or (1,), jnp.float32
        )
        bias = jax_flash.Alibi(bias) if axes == "alibi" else bias
        compiled = jax.jit(jax.grad(loss, 3)).lower(q, q, q, bias).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary_bytes(524_288) < 4.1 * temporary_bytes(131_072)


# Calls whose gradient of the bias is computed from parts of the rows.
IN_PARTS = [
    case("parts: keys, causal", t=201, s=150, k=1, bias=Bias("B11S"), is_causal=True, query_offset=(9, -70)),
    case("parts: rows, mask", t=202, s=150, bias=Bias("NT1"), mask=Mask("BNTS"), query_seq_lengths=(200, 70)),
    case("parts: keys, segments, dropout", t=203, s=203, k=1, bias=Bias("N1S"), segment_ids=Segments((0, 1, 2)),
         dropout_rate=0.3, dropout_seed=3),
    case("parts: heads, window", t=204, s=150, bias=Bias("N11"), local_window_size=(40, 9), mask=Mask("T1")),
    case("parts: alibi, sinks", t=205, s=150, n=4, k=2, alibi=(0.25, 0.06, 0.0, -0.1), sinks=(1.0, 0, 0, 0)),
    case("parts: rows, causal", batch=1, t=128, s=150, bias=Bias("T1"), is_causal=True),
    case("parts: one row more", t=129, s=151, bias=Bias("B11S"), is_causal=True),
]  # fmt: skip


def take_parts_of_64_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_row_parts, "_part_length", lambda *_: 64)


@pytest.mark.parametrize("row", quick.rows({str(x): x for x in IN_PARTS}, quick=["parts: rows, mask"]))
def test_gradient_from_parts_of_the_rows(row, platform, monkeypatch):
    take_parts_of_64_rows(monkeypatch)
    dtype, precision, rule = harness.most_exact(platform, row)
    _, gradients = harness.run_with_operands(row, dtype, precision=precision)
    harness.check_operands(gradients, row, dtype, rule)


@pytest.mark.parametrize("axes", quick.rows(["B11S", "NT1", "alibi"], quick=["B11S"]))
@pytest.mark.parametrize("kind", ["explicit", "shard_map", "ring"])
def test_parts_have_the_types_of_shards(kind, axes, monkeypatch):
    """On explicit axes of a mesh, and where shard_map knows over which axes an array varies."""
    take_parts_of_64_rows(monkeypatch)
    length = dict(explicit=131, shard_map=132, ring=264)[kind]
    args = [random(2, length, 4, 8, seed=seed) for seed in range(3)]
    sizes = dict(zip("BNTS1", (2, 4, length, length, 1), strict=True))
    bias = random(*(sizes[letter] for letter in ("N" if axes == "alibi" else axes)), seed=3)
    bias = jax_flash.Alibi(np.abs(bias)) if axes == "alibi" else bias
    mesh = harness.mesh_of(2, axis_types=(AxisType.Explicit if kind == "explicit" else AxisType.Auto,))
    rows = P(None, "sequence") if kind == "ring" else P("sequence")
    call = functools.partial(jax_flash.flash_attention, is_causal=True)
    sharded = call
    if kind == "ring":
        sharded = functools.partial(jax_flash.ring_attention, is_causal=True, axis_name="sequence")
    of_bias = {
        "alibi": P(),
        "B11S": P("sequence") if kind == "shard_map" else P(),
        "NT1": P(None, "sequence") if kind == "ring" else P(),
    }[axes]
    if kind != "explicit":
        sharded = jax.shard_map(sharded, mesh=mesh, in_specs=(rows, rows, rows, of_bias), out_specs=rows)
    f = jax.jit(jax.grad(lambda bias, *args: jnp.sum(jnp.sin(sharded(*args, bias)))))
    want = jax.jit(jax.grad(lambda bias, *args: jnp.sum(jnp.sin(call(*args, bias, implementation="xla")))))
    placed = strategies.put(mesh, rows, *args)
    with jax.set_mesh(mesh):
        got = f(bias, *placed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, want(bias, *args))


@pytest.mark.parametrize("axes", quick.rows(["B11S", "1NT1"], quick=["B11S"]))
def test_gradient_from_parts_of_sharded_rows(axes, platform, monkeypatch):
    take_parts_of_64_rows(monkeypatch)
    row = Case(
        f"parts of shards: {axes}",
        batch=1,
        seqlen_q=600,
        seqlen_kv=600,
        head_dim=16,
        options=(("bias", Bias(axes)), ("is_causal", True)),
    )
    dtype, precision, rule = harness.most_exact(platform, row)
    mesh = harness.mesh_of(2)
    _, gradients = strategies.run_jit(
        row, dtype, mesh, **({} if precision is None else {"precision": precision})
    )
    harness.check_operands(gradients, row, dtype, rule)


def test_slopes_are_a_pytree():
    alibi = jax_flash.Alibi(SLOPES)
    assert len(jax.tree.leaves(alibi)) == 1
    doubled = jax.tree.map(lambda x: 2 * x, alibi)
    assert isinstance(doubled, jax_flash.Alibi)
    np.testing.assert_array_equal(doubled.slopes, 2 * SLOPES)


# ---- Transformations --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arrays_too", [False, True], ids=["bias", "bias and arrays"])
@pytest.mark.parametrize(
    "axes", quick.rows(["BNTS", "1NTS", "B1TS", "N1S", "TS", "1111", "alibi"], quick=["1NTS", "alibi"])
)
def test_vmap_over_biases(axes, arrays_too, platform):
    """Each bias has its gradient; that of an unmapped bias is summed over the map."""
    if axes == "alibi":
        biases = jax_flash.Alibi(np.stack([SLOPES, 2 * SLOPES, -SLOPES]))
    else:
        biases = np.stack([bias_of(axes), 2 * bias_of(axes), -bias_of(axes)])
    args = [np.stack([x, 0.5 * x, -x]) if arrays_too else x for x in arrays()]
    axis = 0 if arrays_too else None
    got = jax.jit(jax.vmap(jax.grad(loss, (0, 1, 2, 3)), (axis, axis, axis, 0)))(*args, biases)
    of_vmap = jax.grad(lambda *args: jax.vmap(loss, (axis, axis, axis, 0))(*args).sum(), 3)(*args, biases)

    def element(x, i):
        return jax.tree.map(lambda x: x[i], x)

    def row(i):
        return element(args, i) if arrays_too else args

    for i in range(3):
        want = exact_gradients(*row(i), element(biases, i))
        for a, b in zip(element(got[:3], i), want[:3], strict=True):
            harness.assert_close(a, b, "float32", num_keys=S)
        for dbias in (got[3], of_vmap):
            (dbias,) = jax.tree.leaves(element(dbias, i))
            assert_close(dbias, want[3])
    if arrays_too:
        one = element(biases, 0)
        each = jax.vmap(jax.grad(loss, 3), (0, 0, 0, None))(*args, one)
        total = jax.grad(lambda bias: jax.vmap(loss, (0, 0, 0, None))(*args, bias).sum())(one)
        want = [exact_gradients(*row(i), one)[3] for i in range(3)]
        for i in range(3):
            assert_close(jax.tree.leaves(element(each, i))[0], want[i])
        assert_close(jax.tree.leaves(total)[0], sum(want))


def test_vmap_of_heads(platform):
    """Over an inner axis of the bias, and nested."""
    args = [x[:, :, :4] for x in arrays()]
    biases = random(4, T, 3, S, 2, seed=5)
    got = jax.vmap(jax.vmap(lambda bias: loss(*args, bias), 2), 4)(biases)
    assert got.shape == (2, 3)
    for i, j in np.ndindex(2, 3):
        out = oracle.attention(*args, bias=biases[:, :, j, :, i], is_causal=True).out
        np.testing.assert_allclose(got[i, j], np.sin(out).sum(), rtol=1e-5, atol=1e-4)


def test_scan_over_layers_that_share_a_bias(platform):
    """Its gradient sums over the layers."""
    q, k, v = arrays()
    bias, weights = bias_of("NTS"), np.array([0.5, 1.0, 2.0], np.float32)

    def layer(q, w, bias):
        return q + attention(w * q, k, v, bias)

    def scanned(bias):
        return jnp.sum(jnp.sin(jax.lax.scan(lambda q, w: (layer(q, w, bias), None), q, weights)[0]))

    def unrolled(biases):
        x = q
        for w, bias in zip(weights, biases, strict=True):
            x = layer(x, w, bias)
        return jnp.sum(jnp.sin(x))

    got = jax.jit(jax.grad(scanned))(bias)
    want = jax.jit(jax.grad(unrolled))([bias] * 3)
    np.testing.assert_allclose(got, sum(want), rtol=1e-4, atol=1e-4)


def test_checkpoint(platform):
    args = *arrays(), bias_of("1NTS")
    names = jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse")
    for policy in (names, jax.checkpoint_policies.nothing_saveable):
        got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), 3))(*args)
        assert_close(got, exact_gradients(*args)[3])


MESH = (2, 4), ("batch", "heads")
Q_SPECS = {
    "batch and heads": P("batch", None, "heads"),
    "batch": P("batch"),
    "heads": P(None, None, "heads"),
    "batch over both": P(("batch", "heads")),
}
# Axes of a bias, and the mesh axes over which its B and N are sharded, like q's.
BIASES = ["BNTS", "1NTS", "B1TS", "TS", "NT1", "B11S", "N11", "1111"]


def mesh_of(**options) -> Mesh:
    return Mesh(np.array(jax.devices("cpu")).reshape(MESH[0]), MESH[1], **options)


def bias_spec(axes: str, spec) -> P:
    batch, heads = spec[0], spec[2] if len(spec) > 2 else None
    return P(*({"B": batch, "N": heads}.get(letter) for letter in axes))


def sharded_arrays(mesh, spec):
    shapes = (8, T, 8, 16), (8, S, 4, 16), (8, S, 4, 16)
    args = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    return args, [jax.device_put(x, NamedSharding(mesh, spec)) for x in args]


def sharded_bias(axes: str) -> np.ndarray:
    return random(*((SIZES | {"B": 8})[letter] for letter in axes), seed=3)


def assert_sharded_gradients(got, args, bias) -> None:
    want = exact_gradients(*args, bias)
    for a, b in zip(got[:3], want[:3], strict=True):
        harness.assert_close(a, b, "float32", num_keys=S)
    (dbias,) = jax.tree.leaves(got[3])
    assert dbias.shape == np.shape(jax.tree.leaves(bias)[0])
    assert_close(dbias, want[3])


@pytest.mark.parametrize("replicated", [False, True], ids=["sharded bias", "replicated bias"])
@pytest.mark.parametrize("axes", [*BIASES, "alibi"])
@pytest.mark.parametrize("spec", quick.rows(Q_SPECS, quick=["batch and heads"]))
def test_sharded_jit_sums_the_gradient_and_gathers_no_arrays(spec, axes, replicated):
    """The gradient is summed over devices that share a bias; q, k, v and their gradients are not moved."""
    mesh = mesh_of()
    args, placed = sharded_arrays(mesh, spec)
    if axes == "alibi":
        bias, bias_axes = jax_flash.Alibi(SLOPES), "N"
    else:
        bias, bias_axes = sharded_bias(axes), axes
    placed_bias = jax.device_put(bias, NamedSharding(mesh, P() if replicated else bias_spec(bias_axes, spec)))
    f = jax.jit(jax.grad(loss, (0, 1, 2, 3)))
    got = f(*placed, placed_bias)
    assert_sharded_gradients(got, args, bias)
    for x, like in zip(got[:3], placed, strict=True):
        assert x.sharding.is_equivalent_to(like.sharding, 4)
    text = f.lower(*placed, placed_bias).compile().as_text()
    assert "jax_flash_backward_bias" in text
    for line in text.splitlines():
        if re.search("all-gather|all-to-all|collective-permute", line):
            assert not [shape for shape in arrays_of(line) if 16 in shape], line  # the head dim
            assert replicated, line


def test_explicit_sharding():
    mesh = mesh_of(axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = P("batch", None, "heads", None)
    for axes in ("BNTS", "1NTS", "B11S"):
        with jax.set_mesh(mesh):
            args, placed = sharded_arrays(mesh, spec)
            bias = sharded_bias(axes)
            placed_bias = jax.device_put(bias, NamedSharding(mesh, bias_spec(axes, spec)))
            got = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*placed, placed_bias)
            assert jax.typeof(got[3]).sharding.spec == bias_spec(axes, spec)
        assert_sharded_gradients(jax.tree.map(np.asarray, got), args, bias)


@pytest.mark.parametrize("axes", ["BNTS", "1NTS", "B11S", "TS", "alibi"])
@pytest.mark.parametrize("spec", quick.rows(Q_SPECS, quick=["batch and heads"]))
def test_shard_map_sums_the_gradient_of_a_replicated_bias(spec, axes):
    mesh = mesh_of()
    args, _ = sharded_arrays(mesh, spec)
    if axes == "alibi":
        bias, of_bias = jax_flash.Alibi(SLOPES), bias_spec("N", spec)
    else:
        bias, of_bias = sharded_bias(axes), bias_spec(axes, spec)
    f = jax.shard_map(
        functools.partial(attention, is_causal=True),
        mesh=mesh,
        in_specs=(spec, spec, spec, of_bias),
        out_specs=spec,
    )
    got = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3)))(*args, bias)
    assert_sharded_gradients(got, args, bias)
