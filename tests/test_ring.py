"""ring_attention: one sequence over several devices, compared with exact results and with one device."""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Collection
from typing import Any

import harness
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quick
from cases import CASES, DTYPES, Bias, Case
from harness import mesh_of
from jax.extend.core import Literal
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from strategies import LAYOUTS, OF_SEQUENCES, fitted, in_order, ring_call, run_ring

import jax_flash
from jax_flash import _ring
from jax_flash._options import AttentionOptions

QUICK = ("causal", "everything at once")


# ---- Every option -----------------------------------------------------------------------------------------------

# Indices of harness.KINDS. On a GPU the third is float32 at its default precision, the last at its highest.
_BFLOAT16, _FLOAT16, _FLOAT32, _MOST_EXACT = range(4)
# The cases take turns in the layouts, numbers of devices and dtypes.
_PLACES = [(number, layout) for layout in LAYOUTS for number in (2, 4, 8)]
_TURNS = (_FLOAT32, _MOST_EXACT, _BFLOAT16, _FLOAT16, _FLOAT32)
_ROWS = {
    f"{case}-{'-'.join(map(str, place))}": (case, *place, kind)
    for case, place, kind in zip(CASES, itertools.cycle(_PLACES), itertools.cycle(_TURNS), strict=False)
    if case in OF_SEQUENCES
}


@pytest.mark.parametrize(
    ("case", "number", "layout", "kind"),
    quick.rows(_ROWS, quick=[row for row in _ROWS if row.split("-")[0] in QUICK], unpack=True),
)
def test_every_option_is_close_to_exact(case, number, layout, kind, platform):
    mesh = mesh_of(number)
    case = fitted(case, number, layout)
    dtype, precision, rule = harness.kind(platform, kind)
    got, gradients = run_ring(
        case, dtype, mesh, layout, **({} if precision is None else {"precision": precision})
    )
    harness.check(got, case, dtype, rule, is_rounded=number > 1)
    harness.check_operands(gradients, case, dtype, rule)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0, 1, 2, 3)], ids=["fixed", "trained"])
def test_a_fixed_bias_takes_no_pass(wanted):
    rows = P(None, "sequence")
    ring = jax.shard_map(
        lambda *args: jax_flash.ring_attention(*args, axis_name="sequence"),
        mesh=mesh_of(2),
        in_specs=(*(rows,) * 3, P(None, None, "sequence")),
        out_specs=rows,
    )
    x, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 64, 2, 16), (1, 2, 64, 64)))
    gradient = jax.grad(lambda *args: jnp.sum(ring(*args).astype(jnp.float32) ** 2), wanted)
    text = jax.jit(gradient).lower(x, x, x, bias).compile().as_text()
    assert text.count('custom_call_target="jax_flash_backward"') == 2
    assert text.count('custom_call_target="jax_flash_backward_bias"') == (2 if 3 in wanted else 0)


@pytest.mark.parametrize(("layout", "axes"), quick.in_turn(LAYOUTS, ("T1", "S"), quick=("zigzag",)))
def test_the_gradient_of_a_bias_is_rounded_once(layout, axes, platform):
    case = Case("bias", batch=1, seqlen_q=256, seqlen_kv=256, head_dim=32, options=(("bias", Bias(axes)),))
    _, exact = harness.exact_with_operands(case, "bfloat16", None)
    ring, whole = (
        np.sqrt(np.mean(np.square(gradients["bias"].astype(np.float64) - exact["bias"])))
        for _, gradients in (
            run_ring(case, "bfloat16", mesh_of(8), layout),
            harness.run_with_operands(case, "bfloat16"),
        )
    )
    assert ring < 1.3 * whole  # as exact as on one device


@pytest.mark.parametrize("sink", [np.nan, np.inf])
def test_a_row_without_keys_shows_a_sink_that_is_not_finite_in_its_lse_alone(sink, platform):
    case = Case("sinks", batch=2, seqlen_q=16, seqlen_kv=16, head_dim=32)
    q, k, v = case.inputs(np.float32)[:3]
    options = dict(
        key_value_seq_lengths=np.array([0, 16], np.int32), sinks=np.full(q.shape[2], sink, np.float32)
    )

    def ring(q, k, v):
        call = functools.partial(jax_flash.ring_attention, axis_name="sequence", return_residual=True)
        return call(q, k, v, **options)

    rows = P(None, "sequence")
    shards = jax.shard_map(
        ring, mesh=mesh_of(2), in_specs=(rows,) * 3, out_specs=(rows,) * 2, check_vma=False
    )
    out, lse = jax.jit(shards)(q, k, v)
    np.testing.assert_array_equal(out[0], 0.0)
    np.testing.assert_array_equal(lse[0], sink)


# ---- What travels -----------------------------------------------------------------------------------------------

# Options, the layout, and how often keys and values travel from device to device, of 4 devices with 16 rows each.
_TRAVELS = {
    "full": ({}, "contiguous", 3),
    "causal": (dict(is_causal=True), "contiguous", 3),
    "causal, zigzag": (dict(is_causal=True), "zigzag", 3),
    "window of one shard": (dict(local_window_size=(16, 0)), "contiguous", 1),
    "window of two shards": (dict(local_window_size=(17, 0)), "contiguous", 2),
    "window of both sides": (dict(local_window_size=5), "contiguous", 2),
    "window, causal": (dict(local_window_size=5, is_causal=True), "contiguous", 1),
    "window of one": (dict(local_window_size=0), "contiguous", 0),
    "offset": (dict(local_window_size=0, query_offset=-16), "contiguous", 1),
    "nothing is visible": (dict(is_causal=True, query_offset=-64), "contiguous", 0),
}


@pytest.mark.parametrize(("options", "layout", "times"), _TRAVELS.values(), ids=_TRAVELS.keys())
def test_only_keys_that_are_seen_travel(options, layout, times):
    mesh = mesh_of(4)
    shape = jax.ShapeDtypeStruct((2, 64, 2, 8), jnp.float32)
    f = ring_call(mesh, layout, {}, **options)
    text = jax.jit(lambda *args: f(*args, {})).lower(shape, shape, shape).as_text()
    assert text.count("stablehlo.collective_permute") == 2 * times
    others = set(re.findall(r"stablehlo\.(all_\w+|reduce_scatter|collective_\w+)", text))
    assert others <= {"collective_permute"}


@pytest.mark.parametrize(
    ("options", "layout"),
    quick.in_turn(
        {name: x[0] for name, x in _TRAVELS.items()}, LAYOUTS, quick=("window, causal", "nothing is visible")
    ),
)
def test_steps_that_are_skipped_had_nothing_to_add(options, layout, platform):
    mesh = mesh_of(4)
    *args, dout = (x.astype(np.float32) for x in jax.random.normal(jax.random.key(0), (4, 2, 64, 2, 8)))
    out, vjp = jax.vjp(functools.partial(jax_flash.flash_attention, **options), *args)
    want = out, *vjp(dout)
    order = functools.partial(in_order, layout, 4, "q")
    f = ring_call(mesh, layout, {}, **options)

    @jax.jit
    def results(dout, *args):
        out, vjp = jax.vjp(lambda *args: f(*args, {})[0], *args)
        return out, *vjp(dout)

    for got, exact in zip(results(*map(order, (dout, *args))), want, strict=True):
        np.testing.assert_allclose(order(np.asarray(got), inverse=True), exact, rtol=1e-4, atol=1e-5)


def test_keys_for_the_backward_pass_wait_for_it():
    """Nothing travels in the backward pass that does not depend on dout."""
    options = AttentionOptions.resolve(8)
    ring = _ring._Ring.of("sequence", 2, 1, (16, 16), (), options, 0)

    def gradients(dout, lse, arrays):
        return _ring._gradients.fun(arrays | dict(dout=dout, lse=lse, dlse=lse), options, ring)

    q, k, v, dout = inputs()
    args = dout, q[..., 0], dict(q=q, k=k, v=v, out=q)
    rows = P(None, "sequence")
    (outer,) = jax.make_jaxpr(jax.shard_map(gradients, mesh=mesh_of(2), in_specs=rows, out_specs=rows))(
        *args
    ).eqns
    jaxpr = outer.params["jaxpr"]
    # Constants come before the arguments.
    dependent, waits = {jaxpr.invars[-len(jax.tree.leaves(args))]}, []
    for equation in jaxpr.eqns:
        depends = any(x in dependent for x in equation.invars if not isinstance(x, Literal))
        dependent |= set(equation.outvars) if depends else set()
        waits += [depends] if equation.primitive.name == "ppermute" else []
    assert waits == 6 * [True]  # keys and values; their gradients in the second step; and home


def test_ranks_are_not_promoted():
    """As of flash_attention: JAX may be told to raise an error where it would add axes to an array."""
    lengths = np.int32([9, 9])
    ring = on_the_ring(
        mesh_of(2),
        layout="zigzag",
        is_causal=True,
        query_seq_lengths=lengths,
        dropout_rate=0.5,
        dropout_rng=jax.random.key(1),
    )
    with jax.numpy_rank_promotion("raise"):
        jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(ring(*args))), (0, 1, 2))).lower(
            *inputs(length=64)[:3]
        )


# Options, and of each call of a kernel whether an offset is among its operands. On two devices, or as many as given.
_CALLS = {
    "contiguous, causal": (dict(layout="contiguous", is_causal=True), (False, True)),
    "zigzag, causal": (dict(layout="zigzag", is_causal=True), (False, False)),
    "zigzag, window": (
        dict(layout="zigzag", is_causal=True, local_window_size=(30, None)),
        (False, True, False, True, True),
    ),
    "zigzag, a window of one chunk": (
        dict(layout="zigzag", is_causal=True, local_window_size=(2, None), number=4),
        (False, True, False, True, True),
    ),
    "an offset": (dict(layout="contiguous", is_causal=True, query_offset=1), (True, True)),
    "an array": (dict(layout="contiguous", is_causal=True, query_offset=np.int32([0, 0])), (True, True)),
    "zigzag, full": (dict(layout="zigzag"), (False, False)),
    "zigzag, lengths": (
        dict(layout="zigzag", query_seq_lengths=np.int32([9, 9])),
        (False,) * 8,
    ),
}


@pytest.mark.parametrize(("options", "offsets"), _CALLS.values(), ids=_CALLS.keys())
def test_calls_of_kernels(options, offsets):
    """One for each pair of chunks, or for each step where positions do not matter."""
    options = dict(options)
    mesh = mesh_of(options.pop("number", 2))
    text = str(jax.make_jaxpr(on_the_ring(mesh, **options))(*inputs()[:3]))
    names = re.findall(r"names=\(([^)]*)\)", text)
    assert tuple("query_offset" in x for x in names) == offsets


_GROWING = {
    f"{layout}{', causal' * is_causal}{operand and ', '}{operand}": (layout, is_causal, operand)
    for layout, is_causal, operand in itertools.product(LAYOUTS, (False, True), ("", "bias", "mask"))
}


@pytest.mark.parametrize(
    ("layout", "is_causal", "operand"),
    quick.rows(_GROWING, quick=("contiguous", "zigzag, causal, bias"), unpack=True),
)
def test_memory_does_not_grow_with_the_number_of_devices(layout, is_causal, operand, platform):
    if platform == "cpu" and jax.__version_info__ < (0, 12):
        pytest.skip("seen with jax 0.7: XLA drops barriers on a CPU before it plans memory")

    def temporary_bytes(number):
        """Those of the forward pass and of a gradient on one device, which has 256 tokens."""
        length = 256 * number
        x = jax.ShapeDtypeStruct((1, length, 2, 64), jnp.float32)
        lse = jax.ShapeDtypeStruct((1, length, 2), jnp.float32)
        dtype = bool if operand == "mask" else jnp.float32
        operands = {operand: jax.ShapeDtypeStruct((1, 2, length, length), dtype)} if operand else {}
        forward = jax.jit(ring_call(mesh_of(number), layout, operands, is_causal=is_causal))
        differentiable = {name: x for name, x in operands.items() if name == "bias"}

        @jax.jit
        def gradient(cotangents, operands, *args):
            return jax.vjp(lambda *args: forward(*args[:3], operands | args[3]), *args)[1](cotangents)

        lowered = (
            forward.lower(x, x, x, operands),
            gradient.lower((x, lse), operands, x, x, x, differentiable),
        )
        return [x.compile().memory_analysis().temp_size_in_bytes for x in lowered]

    # A ring of fewer than 5 devices ends before the gradient needs most.
    for few, many in zip(temporary_bytes(5), temporary_bytes(8), strict=True):
        assert many < 1.2 * few


# ---- Transformations ----------------------------------------------------------------------------------------------


def inputs(seed: int = 0, *, batch: int = 2, length: int = 32, heads: int = 2) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(seed), 4)
    return tuple(jax.random.normal(key, (batch, length, heads, 8), jnp.float32) for key in keys)


def on_the_ring(mesh: Mesh, axis_names: Collection[str] = (), **options: Any) -> Callable:
    """ring_attention of whole arrays in the order of the layout; shard_map is over `axis_names`, or over all."""
    local = functools.partial(jax_flash.ring_attention, axis_name="sequence", **options)
    rows = P(None, "sequence")
    return jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, axis_names=set(axis_names))


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), got, want)


@pytest.fixture
def highest():
    with jax.default_matmul_precision("highest"):
        yield


def test_a_mesh_that_also_shards_batch_and_heads(platform, highest):
    mesh = mesh_of(2, 2, 2, names=("batch", "sequence", "heads"))
    *args, dout = inputs(batch=4, heads=4)
    local = functools.partial(jax_flash.ring_attention, axis_name="sequence", is_causal=True)
    spec = P("batch", "sequence", "heads")
    f = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    whole = functools.partial(jax_flash.flash_attention, is_causal=True)
    for run in (f, whole):
        out, vjp = jax.vjp(run, *args)
        results = out, vjp(dout)
        if run is f:
            got = results
    assert_close(got, results)


# By halves, and in pairs of chunks.
_WINDOWS = {"": None, ", window": (20, None)}
_WAYS = {"kernel": {}, "forward mode": dict(forward_mode=True), "xla": dict(implementation="xla")}


@pytest.mark.parametrize(
    ("window", "options"),
    quick.rows(
        {f"{way}{name}": (_WINDOWS[name], _WAYS[way]) for name in _WINDOWS for way in _WAYS},
        quick=("kernel",),
        unpack=True,
    ),
)
def test_a_mesh_whose_other_axes_are_explicit(window, options, platform, highest):
    mesh = mesh_of(2, 2, 2, names=("batch", "sequence", "heads"))
    types = (AxisType.Explicit, AxisType.Auto, AxisType.Explicit)
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    args = inputs(batch=4, heads=4)

    def results(attention, q, k, v, dout):
        out, vjp = jax.vjp(attention, q, k, v)
        return out, *vjp(dout)

    seen = dict(is_causal=True, local_window_size=window)
    ring = on_the_ring(mesh, axis_names={"sequence"}, layout="zigzag", **seen, **options)
    whole = functools.partial(jax_flash.flash_attention, **seen)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, P("batch", None, "heads"))) for x in args]
        placed = [jax_flash.to_zigzag(x, 2) for x in placed]
        got = jax.jit(functools.partial(results, ring))(*placed)
        assert jax.typeof(got[0]).sharding.spec[0] == "batch"
        got = [jax_flash.from_zigzag(x, 2) for x in got]
    assert_close(got, list(results(whole, *args)))


@pytest.mark.parametrize(
    "options", [dict(check_vma=False), dict(check_vma=True)], ids=["unchecked", "checked"]
)
def test_eager_shard_map(options, platform, highest):
    """shard_map without jit, with and without JAX's check of what is replicated."""
    mesh = mesh_of(2)
    *args, dout = inputs()
    local = functools.partial(jax_flash.ring_attention, axis_name="sequence", is_causal=True)
    rows = P(None, "sequence")
    f = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=rows, **options)
    (got, vjp), (want, whole_vjp) = (
        jax.vjp(g, *args) for g in (f, functools.partial(jax_flash.flash_attention, is_causal=True))
    )
    assert_close((got, vjp(dout)), (want, whole_vjp(dout)))


@pytest.mark.exhaustive
def test_a_sequence_over_two_axes_of_the_mesh(platform, highest):
    mesh = mesh_of(2, 2, names=("hosts", "devices"))
    *args, dout = inputs()
    axes = ("hosts", "devices")
    local = functools.partial(jax_flash.ring_attention, axis_name=axes, is_causal=True)
    f = jax.shard_map(local, mesh=mesh, in_specs=P(None, axes), out_specs=P(None, axes))
    (got, vjp), (want, whole_vjp) = (
        jax.vjp(g, *args) for g in (f, functools.partial(jax_flash.flash_attention, is_causal=True))
    )
    assert_close((got, vjp(dout)), (want, whole_vjp(dout)))


def test_an_axis_of_vmap(platform, highest):
    *args, dout = inputs()
    split = functools.partial(jnp.split, indices_or_sections=2, axis=1)
    ring = functools.partial(jax_flash.ring_attention, axis_name="sequence", is_causal=True)
    whole = functools.partial(jax_flash.flash_attention, is_causal=True)
    shards = [jnp.stack(split(x)) for x in (*args, dout)]
    out, vjp = jax.vjp(jax.vmap(ring, axis_name="sequence"), *shards[:3])
    want, whole_vjp = jax.vjp(whole, *args)
    want = jax.tree.map(lambda x: jnp.stack(split(x)), (want, whole_vjp(dout)))
    assert_close((out, vjp(shards[3])), want)


@pytest.mark.parametrize(
    "dtype", quick.rows({"bfloat16": "bfloat16", "float16": "float16"}, quick=["bfloat16"])
)
def test_chunks_of_short_sequences(dtype, platform):
    """Out and lse, which are of all keys, go to kernels that see every key of their call at once."""
    case = Case("chunks", seqlen_q=128, seqlen_kv=100, options=(("bias", Bias("BNTS")), ("is_causal", True)))
    q, k, v, *cotangents = case.inputs(DTYPES[dtype])
    bias = case.operands(DTYPES[dtype])["bias"]

    def halves(x, axis=1):
        return jnp.stack(jnp.split(x, 2, axis))

    def whole(x, axis=1):
        return jnp.concatenate([*x], axis)

    def ring(q, k, v, bias):
        options = dict(axis_name="sequence", is_causal=True, return_residual=True)
        return jax_flash.ring_attention(q, k, v, bias, **options)

    f = jax.vmap(ring, axis_name="sequence")
    (out, lse), vjp = jax.vjp(f, *map(halves, (q, k, v)), halves(bias, axis=2))
    dq, dk, dv, dbias = vjp(tuple(map(halves, cotangents)))
    got = oracle.Result(*map(np.asarray, map(whole, (out, lse, dq, dk, dv))))
    harness.check(got, case, dtype, dtype, is_rounded=True)
    harness.check_operands({"bias": np.asarray(whole(dbias, axis=2))}, case, dtype, dtype)


@pytest.mark.exhaustive
def test_scan_checkpoint_and_vmap(platform, highest):
    mesh = mesh_of(2)

    def model(attention):
        def layer(x, _):
            return x + attention(x, jnp.sin(x), x), None

        @jax.jit
        def loss(x):
            x, _ = jax.lax.scan(jax.checkpoint(layer), x, length=2)
            return jnp.sum(x**2)

        return jax.grad(loss)

    x = inputs()[0]
    ring, whole = (
        on_the_ring(mesh, is_causal=True),
        functools.partial(jax_flash.flash_attention, is_causal=True),
    )
    assert_close(model(ring)(x), model(whole)(x))
    many = jnp.stack([inputs(seed)[0] for seed in range(3)])
    assert_close(jax.vmap(ring)(many, many, many), jax.vmap(whole)(many, many, many))


def test_without_a_batch_axis(platform, highest):
    mesh = mesh_of(2)
    q, k, v, _ = (x[0] for x in inputs())
    local = functools.partial(jax_flash.ring_attention, axis_name="sequence", return_residual=True)
    f = jax.shard_map(local, mesh=mesh, in_specs=P("sequence"), out_specs=P("sequence"))
    assert_close(f(q, k, v), jax_flash.flash_attention(q, k, v, return_residual=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(is_causal=True), "is_causal must be False in decoding, got True for one query and 8 keys"),
        (
            dict(bias=jax_flash.Alibi(np.array([0.1, 0.5], np.float32))),
            "bias must not be Alibi in decoding, got it for one query and 8 keys",
        ),
    ],
    ids=["causal", "alibi"],
)
def test_one_query_on_each_device_is_no_decoding_in_flax(options, message, platform, highest):
    pytest.importorskip("flax", reason="flax is an optional dependency")
    from jax_flash.flax import attention_fn

    key, query = inputs(length=8)[:2]
    query, mask = query[:, :2], jnp.ones((1, 1, 2, 8), bool)

    def attend(query, key, mask):
        return attention_fn(query, key, key, mask=mask, axis_name="sequence", **options)

    specs = P(None, "sequence"), P(None, "sequence"), P(None, None, "sequence")
    sharded = jax.shard_map(attend, mesh=mesh_of(2), in_specs=specs, out_specs=specs[0])
    assert_close(sharded(query, key, mask), jax_flash.flash_attention(query, key, key, **options))
    alone = jax.shard_map(attend, mesh=mesh_of(1), in_specs=specs, out_specs=specs[0])
    with pytest.raises(ValueError, match=message):
        alone(query[:, :1], key, mask[:, :, :1])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("library", "layout"), quick.in_turn(("linen", "nnx"), LAYOUTS))
def test_layers_of_flax(library, layout, platform, highest):
    """Causal and with a mask; also the gradients of the parameters, which all devices have."""
    pytest.importorskip("flax", reason="flax is an optional dependency")
    from flax import linen, nnx

    from jax_flash.flax import attention_fn

    rng = np.random.default_rng(0)
    x, weights = rng.standard_normal((2, 2, 32, 16)).astype(np.float32)
    mask = rng.random((1, 1, 32, 32)) < 0.8

    def layer(**sharded):
        causal = functools.partial(attention_fn, is_causal=True, **sharded)
        if library == "linen":
            module = linen.MultiHeadDotProductAttention(2, attention_fn=causal)
            params = module.init(jax.random.key(0), x) if not sharded else None
            return params, lambda params, x, mask: module.apply(params, x, mask=mask)
        graph, params = nnx.split(
            nnx.MultiHeadAttention(2, 16, attention_fn=causal, decode=False, rngs=nnx.Rngs(0))
        )
        # A layer that takes is_causal passes it on, over a partial's.
        takes_it = "is_causal" in inspect.signature(nnx.MultiHeadAttention.__call__).parameters
        own = dict(is_causal=True) if takes_it else {}
        return params, lambda params, x, mask: nnx.merge(graph, params)(x, mask=mask, **own)

    def results(f, params, x, mask, weights):
        def loss(params):
            out = f(params, x, mask)
            return jnp.sum(jnp.sin(out) * weights), out

        (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return out, gradients

    params, whole = layer()
    _, local = layer(axis_name="sequence", layout=layout)
    specs = P(), P(None, "sequence"), P(None, None, "sequence")
    ring = jax.shard_map(local, mesh=mesh_of(4), in_specs=specs, out_specs=specs[1])
    order = functools.partial(in_order, layout, 4)
    tokens = functools.partial(order, "lse")  # their axis is the last but one
    out, gradients = results(ring, params, tokens(x), order("mask", mask), tokens(weights))
    assert_close((tokens(np.asarray(out), inverse=True), gradients), results(whole, params, x, mask, weights))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_xla(layout, platform, highest):
    case = fitted(next(case for case in CASES if case.name == "sinks, soft cap, window"), 2, layout)
    got, gradients = run_ring(case, "float32", mesh_of(2), layout, implementation="xla")
    harness.check(got, case, "float32", "float32")
    harness.check_operands(gradients, case, "float32", "float32")


# ---- Derivatives --------------------------------------------------------------------------------------------------


def test_a_learned_scale(platform, highest):
    mesh = mesh_of(2)
    *args, dout = inputs()
    rows = P(None, "sequence")

    def ring(scale, *args):
        def local(scale, q, k, v):
            return jax_flash.ring_attention(q, k, v, axis_name="sequence", scale=scale)

        return jax.shard_map(local, mesh=mesh, in_specs=(P(), rows, rows, rows), out_specs=rows)(scale, *args)

    def whole(scale, *args):
        return jax_flash.flash_attention(*args, scale=scale)

    got, want = (
        jax.jit(jax.grad(lambda scale, f=f: jnp.sum(f(scale, *args) * dout)))(0.7 + jnp.zeros(()))
        for f in (ring, whole)
    )
    assert_close(got, want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_mode_has_every_derivative(layout, platform, highest):
    mesh = mesh_of(2)
    *args, dout = inputs()
    directions = inputs(1)[:3]
    options = dict(is_causal=True, forward_mode=True)

    def derivatives(f, args, directions, dout):
        def loss(*args):
            return jnp.sum(f(*args) * dout)

        def along(*args):
            return jax.jvp(f, args, directions)[1]

        return (
            along(*args),
            jax.jvp(jax.grad(loss, (0, 1, 2)), tuple(args), directions)[1],  # a Hessian times a vector
            jax.grad(lambda *args: jnp.sum(along(*args) ** 2), (0, 1, 2))(*args),
        )

    order = functools.partial(in_order, layout, 2, "q")
    placed = ([order(x) for x in args], tuple(map(order, directions)), order(dout))
    got = jax.jit(functools.partial(derivatives, on_the_ring(mesh, layout=layout, **options)))(*placed)
    want = derivatives(functools.partial(jax_flash.flash_attention, **options), args, directions, dout)
    assert_close(jax.tree.map(lambda x: order(np.asarray(x), inverse=True), got), want)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("causal", "zigzag"),
        pytest.param("everything at once", "contiguous", marks=quick.EXHAUSTIVE),  # compiles for 15 s
    ],
)
def test_second_derivatives_without_forward_mode(name, layout, platform, highest):
    """The gradient, its derivative in a direction, and its own gradients."""
    case = fitted(next(case for case in CASES if case.name == name), 2, layout)
    q, k, v, dout, dlse = case.inputs(np.float32)
    cotangents = dict(out=dout, lse=dlse)
    operands = case.operands(np.float32)
    inputs = dict(q=q, k=k, v=v) | {name: operands[name] for name in ("bias", "sinks") if name in operands}
    direction = jax.tree.map(lambda x: np.flip(x).copy(), inputs)

    def derivatives(f, inputs, direction, cotangents):
        def gradient(inputs, cotangents):
            def results(inputs):
                own = operands | {name: x for name, x in inputs.items() if name in operands}
                return dict(zip(("out", "lse"), f(*(inputs[x] for x in "qkv"), own), strict=True))

            return jax.vjp(results, inputs)[1](cotangents)[0]

        along = jax.jvp(gradient, (inputs, cotangents), (direction, cotangents))
        return *along, *jax.vjp(gradient, inputs, cotangents)[1](direction)

    whole = functools.partial(harness.call, return_residual=True, **case.static)
    want = derivatives(whole, inputs, direction, cotangents)

    def order(arrays, inverse=False):
        return {name: in_order(layout, 2, name, x, inverse) for name, x in arrays.items()}

    def ring(q, k, v, operands):
        return ring_call(mesh_of(2), layout, operands, **case.static)(q, k, v, operands)

    operands = order(operands)
    got = jax.jit(functools.partial(derivatives, ring))(*map(order, (inputs, direction, cotangents)))
    assert_close(tuple(order(x, inverse=True) for x in got), want)


def test_second_derivatives_by_some_of_the_inputs(platform, highest):
    """What does not move has no tangents."""
    mesh = mesh_of(2)
    *args, _ = inputs()
    bias = jnp.einsum("bthd,bshd->bhts", *args[:2])
    rows = P(None, "sequence")

    def ring(bias, *args):
        def local(bias, q, k, v):
            return jax_flash.ring_attention(q, k, v, bias, axis_name="sequence")

        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(None, None, "sequence"), rows, rows, rows), out_specs=rows
        )(bias, *args)

    def whole(bias, *args):
        return jax_flash.flash_attention(*args, bias)

    def second_derivatives(f, moving):
        def norm(*moved):
            own = dict(enumerate(args)) | dict(zip(moving, moved, strict=True))
            gradients = jax.grad(lambda *args: jnp.sum(f(bias, *args) ** 2), moving)(*own.values())
            return sum(jnp.sum(x**2) for x in gradients)

        return jax.grad(norm, tuple(range(len(moving))))(*(args[i] for i in moving))

    for moving in ((0,), (1, 2)):
        got, want = (jax.jit(functools.partial(second_derivatives, f, moving))() for f in (ring, whole))
        assert_close(got, want)
    gradient = jax.grad(lambda q: jnp.sum(ring(bias, q, *args[1:]) ** 2))
    third = jax.grad(lambda q: jnp.sum(jax.grad(lambda q: jnp.sum(gradient(q) ** 2))(q) ** 2))
    with pytest.raises(NotImplementedError, match="not third"):
        jax.jit(third).lower(args[0])


# ---- Order and errors -----------------------------------------------------------------------------------------------


def test_zigzag_gives_each_device_a_chunk_of_both_ends():
    positions = jnp.arange(16)[None]
    shards = jax_flash.to_zigzag(positions, 4).reshape(4, 4)
    assert shards.tolist() == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    x = jax.random.normal(jax.random.key(0), (3, 5, 24))
    for axis in (2, -1):
        np.testing.assert_array_equal(jax_flash.from_zigzag(jax_flash.to_zigzag(x, 3, axis), 3, axis), x)


@pytest.mark.parametrize("number", [2, 3, 8])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_zigzag_of_a_sharded_sequence_is_sharded_alike(kind, number):
    mesh = Mesh(np.array(jax.devices("cpu")[:number]), ("sequence",), axis_types=(kind,))
    # For the inverse XLA gathers a chunk whose length does not divide by the number of devices.
    x = jax.random.normal(jax.random.key(0), (3, 48 * number, 5))
    placed = jax.device_put(x, NamedSharding(mesh, P(None, "sequence")))
    for order in (jax_flash.to_zigzag, jax_flash.from_zigzag):
        reorder = functools.partial(order, num_devices=number)
        gradient = jax.grad(lambda x, reorder=reorder: jnp.sum(reorder(x) ** 3))
        for f in (reorder, gradient):
            compiled = jax.jit(f).lower(placed).compile()
            got = compiled(placed)
            assert got.sharding.is_equivalent_to(placed.sharding, 3)
            assert "all-gather" not in compiled.as_text()
            np.testing.assert_array_equal(got, f(x))


_BAD_ORDERS = {
    "length": (np.ones((1, 20)), 4, 1, ValueError, "that is a multiple of 2 n = 8, got 20"),
    "no device": (np.ones((1, 8)), 0, 1, ValueError, "num_devices must be at least 1, got 0"),
    "no int": (np.ones((1, 8)), 2.0, 1, TypeError, "num_devices must be an int, got 2.0 of type float"),
    "axis": (np.ones((1, 8)), 4, 2, ValueError, "axis must be an axis of x, which has 2, got 2"),
    "list": ([[1.0] * 8], 4, 1, TypeError, "x must be a JAX or NumPy array, got a value of type list"),
}


@pytest.mark.parametrize(
    ("x", "number", "axis", "error", "message"), _BAD_ORDERS.values(), ids=_BAD_ORDERS.keys()
)
def test_zigzag_refuses(x, number, axis, error, message):
    for order in (jax_flash.to_zigzag, jax_flash.from_zigzag):
        with pytest.raises(error, match=re.escape(message)):
            order(x, number, axis)


_BAD_CALLS = {
    "unknown layout": (
        dict(layout="striped"),
        ValueError,
        'layout must be "contiguous" or "zigzag", got \'striped\'',
    ),
    "layout is no str": (dict(layout=2), TypeError, "layout must be a str, got 2 of type int"),
    "odd shards": (
        dict(layout="zigzag"),
        ValueError,
        "query must have a length on each device that is a multiple of 2",
    ),
    "dropout": (
        dict(dropout_rate=0.5, dropout_rng=jax.random.key(0)),
        ValueError,
        "query must have a length on each device that is a multiple of 16",
    ),
    "mask of the device's keys": (
        dict(mask=np.ones((5, 5), bool)),
        ValueError,
        r"mask must be broadcastable to \[B, N, T, S\] = \[2, 2, 5, 10\]",
    ),
    "a traced option": (dict(is_causal=1), TypeError, "is_causal must be a bool"),
    "implementation": (dict(implementation="cudnn"), ValueError, "implementation must be None"),
    "pages": (
        dict(page_indices=np.zeros((2, 1), np.int32)),
        NotImplementedError,
        "does not support page_indices",
    ),
}


@pytest.mark.parametrize(("options", "error", "message"), _BAD_CALLS.values(), ids=_BAD_CALLS.keys())
def test_bad_call(options, error, message):
    q, k, v, _ = inputs(length=10)
    with pytest.raises(error, match=message):
        on_the_ring(mesh_of(2), **options)(q, k, v)


def test_axis_name():
    q, k, v, _ = inputs()
    ring = functools.partial(jax_flash.ring_attention, axis_name="sequence")
    of_batch = jax.shard_map(
        ring, mesh=mesh_of(2, names=("batch",)), in_specs=P("batch"), out_specs=P("batch")
    )
    for call in (ring, of_batch):
        message = "axis_name must be a mesh axis of the surrounding shard_map, got 'sequence'"
        with pytest.raises(ValueError, match=message):
            call(q, k, v)
    reversed_axes = jax.shard_map(
        functools.partial(jax_flash.ring_attention, axis_name=("b", "a")),
        mesh=mesh_of(2, 2, names=("a", "b")),
        in_specs=P(None, ("b", "a")),
        out_specs=P(None, ("b", "a")),
    )
    with pytest.raises(ValueError, match=re.escape("in its order, ('a', 'b'), got ('b', 'a')")):
        reversed_axes(q, k, v)
    with pytest.raises(ValueError, match=r"axis_name must name a mesh axis, got \(\)"):
        jax_flash.ring_attention(q, k, v, axis_name=())
    with pytest.raises(TypeError, match=r"axis_name must be a str or a tuple of them, got .* of type list"):
        jax_flash.ring_attention(q, k, v, axis_name=["sequence"])


def test_every_parameter_of_flash_attention():
    one, ring = (
        inspect.signature(f).parameters for f in (jax_flash.flash_attention, jax_flash.ring_attention)
    )
    assert list(one) == [name for name in ring if name not in ("axis_name", "layout")]
    for name, parameter in one.items():
        assert (ring[name].kind, ring[name].default) == (parameter.kind, parameter.default)
