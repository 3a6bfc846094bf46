"""Bad calls raise the right exception while tracing, naming the argument, what was expected and what came."""

import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import Alibi

Q, K, V = (jnp.zeros((2, 4, 6, 8)), jnp.zeros((2, 5, 3, 8)), jnp.zeros((2, 5, 3, 8)))


def f32(*shape):
    return jnp.zeros(shape)


def i32(*shape):
    return jnp.zeros(shape, jnp.int32)


def boolean(*shape):
    return jnp.zeros(shape, bool)


RNG = jax.random.key(0)
PAGED = dict(key=f32(7, 8, 3, 8), value=f32(7, 8, 3, 8), page_indices=i32(2, 4), key_value_seq_lengths=i32(2))

# The change to a good call, the exception, and its message: argument, expected, got.
CALLS = {
    # Types
    "query is a list": (dict(query=[[1.0]]), TypeError, "query", "array", "list"),
    "key is None": (dict(key=None), TypeError, "key", "array", "None"),
    "value is a string": (dict(value="v"), TypeError, "value", "array", "str"),
    "query is a number": (dict(query=1.0), TypeError, "query", "array", "float"),
    # Dtypes
    "integer query": (dict(query=i32(2, 4, 6, 8)), TypeError, "query", "float16", "int32"),
    "bool value": (dict(value=boolean(2, 5, 3, 8)), TypeError, "value", "float", "bool"),
    "complex query": (dict(query=Q.astype(jnp.complex64)), TypeError, "query", "float16", "complex64"),
    "8-bit query": (
        dict(query=Q.astype(jnp.float8_e4m3fn)), TypeError, "query", "float16", "float8_e4m3fn",
    ),
    "key of another dtype": (dict(key=K.astype(jnp.bfloat16)), TypeError, "key", "float32", "bfloat16"),
    "value of another dtype": (dict(value=V.astype(jnp.float16)), TypeError, "value", "float32", "float16"),
    # Ranks and shapes
    "query of rank 2": (dict(query=f32(4, 8)), ValueError, "query", "[B, T, N, H]", "[4, 8]"),
    "query of rank 5": (
        dict(query=f32(1, 2, 4, 6, 8)), ValueError, "query", "[B, T, N, H]", "[1, 2, 4, 6, 8]",
    ),
    "query without batch": (dict(query=f32(4, 6, 8)), ValueError, "key", "(3)", "[2, 5, 3, 8]"),
    "key of rank 2": (dict(key=f32(5, 8)), ValueError, "key", "(4)", "[5, 8]"),
    "scalar value": (dict(value=f32()), ValueError, "value", "(4)", "[]"),
    "other batch in key": (dict(key=f32(3, 5, 3, 8)), ValueError, "key", "batch size 2", "[3, 5, 3, 8]"),
    "other batch in value": (
        dict(value=f32(1, 5, 3, 8)), ValueError, "value", "batch size 2", "[1, 5, 3, 8]",
    ),
    "other length in value": (dict(value=f32(2, 6, 3, 8)), ValueError, "value", "length 5", "[2, 6, 3, 8]"),
    "other head dim in key": (dict(key=f32(2, 5, 3, 16)), ValueError, "key", "head dim 8", "[2, 5, 3, 16]"),
    "head dim 0": (dict(query=f32(2, 4, 6, 0)), ValueError, "query", "at least 1", "[2, 4, 6, 0]"),
    "head dim 0 of values": (
        dict(value=f32(2, 5, 3, 0)), ValueError, "value", "at least 1", "[2, 5, 3, 0]",
    ),
    # Heads
    "other heads in value": (dict(value=f32(2, 5, 6, 8)), ValueError, "value", "heads 3", "[2, 5, 6, 8]"),
    "heads not a multiple": (dict(query=f32(2, 4, 7, 8)), ValueError, "key", "divides query's 7", "3 heads"),
    "more key heads": (dict(query=f32(2, 4, 1, 8)), ValueError, "key", "divides query's 1", "3 heads"),
    "no key heads": (
        dict(key=f32(2, 5, 0, 8), value=f32(2, 5, 0, 8)), ValueError, "key", "divides query's 6", "0 heads",
    ),
    # Lengths and offsets
    "float lengths": (dict(query_seq_lengths=f32(2)), TypeError, "query_seq_lengths", "int32", "float32"),
    "bool lengths": (
        dict(key_value_seq_lengths=boolean(2)), TypeError, "key_value_seq_lengths", "int32", "bool",
    ),
    "list of lengths": (dict(query_seq_lengths=[1, 2]), TypeError, "query_seq_lengths", "array", "list"),
    "lengths of another batch": (dict(query_seq_lengths=i32(3)), ValueError, "query_seq_lengths", "[2]", "[3]"),
    "scalar length": (dict(key_value_seq_lengths=i32()), ValueError, "key_value_seq_lengths", "[2]", "[]"),
    "lengths of rank 2": (
        dict(key_value_seq_lengths=i32(2, 1)), ValueError, "key_value_seq_lengths", "[2]", "[2, 1]",
    ),
    "float offset": (dict(query_offset=1.5), TypeError, "query_offset", "int", "1.5"),
    "float array as offset": (dict(query_offset=f32(2)), TypeError, "query_offset", "int32", "float32"),
    "offsets of another batch": (dict(query_offset=i32(3)), ValueError, "query_offset", "[2]", "[3]"),
    "string as offset": (dict(query_offset="end"), TypeError, "query_offset", "int", "'end'"),
    "offset beyond int32": (dict(query_offset=2**31), ValueError, "query_offset", "int32", "2147483648"),
    "offsets beyond int32": (
        dict(query_offset=np.array([2**32, 0])), ValueError, "query_offset", "int32", "4294967296",
    ),
    "lengths beyond int32": (
        dict(query_seq_lengths=np.array([2**32 + 3, 1])), ValueError, "query_seq_lengths", "int32", "4294967299",
    ),
    # Options
    "scale is a string": (dict(scale="1"), TypeError, "scale", "number", "str"),
    "scale is NaN": (dict(scale=float("nan")), ValueError, "scale", "finite", "nan"),
    "scale is infinite": (dict(scale=float("inf")), ValueError, "scale", "finite", "inf"),
    "scale is an array": (dict(scale=f32(2)), ValueError, "scale", "scalar", "(2,)"),
    "scale beyond float": (dict(scale=10**400), ValueError, "scale", "finite", "1000"),
    "scale beyond float32": (dict(scale=-1e39), ValueError, "scale", "3.4028e+38 in magnitude for float32", "-1e+39"),
    "scale is a bool array": (dict(scale=boolean()), TypeError, "scale", "number", "bool"),
    "query_offset is a list": (dict(query_offset=[1, 2]), TypeError, "query_offset", "int32", "[B]", "[1, 2]"),
    "is_causal is an int": (dict(is_causal=1), TypeError, "is_causal", "bool", "1"),
    "is_causal is None": (dict(is_causal=None), TypeError, "is_causal", "bool", "None"),
    "window negative": (dict(local_window_size=-1), ValueError, "local_window_size", ">= 0", "-1"),
    "window part negative": (dict(local_window_size=(3, -2)), ValueError, "local_window_size", ">= 0", "-2"),
    "window of three": (
        dict(local_window_size=(1, 2, 3)), ValueError, "local_window_size", "pair", "(1, 2, 3)",
    ),
    "window is a float": (dict(local_window_size=2.0), TypeError, "local_window_size", "int", "2.0"),
    "window is a string": (dict(local_window_size="ab"), TypeError, "local_window_size", "int", "'ab'"),
    "window is an array": (dict(local_window_size=i32(2)), TypeError, "local_window_size", "pair", "(2,)"),
    "window of bools": (dict(local_window_size=(True, 1)), TypeError, "local_window_size", "int", "True"),
    "cap 0": (dict(logits_soft_cap=0.0), ValueError, "logits_soft_cap", "> 0", "0.0"),
    "cap negative": (dict(logits_soft_cap=-5), ValueError, "logits_soft_cap", "> 0", "-5"),
    "cap is NaN": (dict(logits_soft_cap=float("nan")), ValueError, "logits_soft_cap", "finite", "nan"),
    "cap is infinite": (dict(logits_soft_cap=float("inf")), ValueError, "logits_soft_cap", "finite", "inf"),
    "precision unknown": (dict(precision="exact"), ValueError, "precision", "highest", "'exact'"),
    "precision is a number": (dict(precision=3.5), TypeError, "precision", "Precision", "3.5"),
    "deterministic is an int": (dict(deterministic=0), TypeError, "deterministic", "bool", "0"),
    "forward_mode is an int": (dict(forward_mode=1), TypeError, "forward_mode", "bool", "1"),
    "return_residual is a string": (dict(return_residual="y"), TypeError, "return_residual", "bool", "'y'"),
    "implementation cudnn": (dict(implementation="cudnn"), ValueError, "implementation", '"xla"', "'cudnn'"),
    "implementation is a bool": (dict(implementation=True), TypeError, "implementation", "str", "True"),
    # Bias, mask, segments, sinks, dropout: wrong for every implementation
    "bias of rank 5": (
        dict(bias=f32(1, 2, 6, 4, 5)), ValueError, "bias", "[2, 6, 4, 5]", "[1, 2, 6, 4, 5]",
    ),
    "bias of another shape": (dict(bias=f32(4, 6)), ValueError, "bias", "[2, 6, 4, 5]", "[4, 6]"),
    "integer bias": (dict(bias=i32(4, 5)), TypeError, "bias", "float", "int32"),
    "bias is a number": (dict(bias=1.0), TypeError, "bias", "array", "float"),
    "bool bias": (dict(bias=boolean(4, 5)), TypeError, "bias", "float", "bool"),
    "bias of key heads": (
        dict(bias=f32(1, 3, 4, 5)), ValueError, "bias", "[2, 6, 4, 5]", "[1, 3, 4, 5]",
    ),
    "bias of another batch": (
        dict(bias=f32(3, 1, 4, 5)), ValueError, "bias", "[2, 6, 4, 5]", "[3, 1, 4, 5]",
    ),
    "list of biases": (dict(bias=[1.0]), TypeError, "bias", "array", "list"),
    "slopes of key heads": (dict(bias=Alibi(f32(3))), ValueError, "slopes", "[6]", "[3]"),
    "slopes of rank 2": (dict(bias=Alibi(f32(2, 6))), ValueError, "slopes", "[6]", "[2, 6]"),
    "one slope": (dict(bias=Alibi(f32())), ValueError, "slopes", "[6]", "[]"),
    "integer slopes": (dict(bias=Alibi(i32(6))), TypeError, "slopes", "float", "int32"),
    "list of slopes": (dict(bias=Alibi([1.0] * 6)), TypeError, "slopes", "array", "list"),
    "integer mask": (dict(mask=i32(4, 5)), TypeError, "mask", "bool", "int32"),
    "mask of strings": (dict(mask=np.array(["a"])), TypeError, "mask", "a dtype that JAX has", "<U1"),
    "bias of objects": (dict(bias=np.array([None])), TypeError, "bias", "a dtype that JAX has", "object"),
    "mask is a bool": (dict(mask=True), TypeError, "mask", "array", "bool"),
    "mask of rank 5": (
        dict(mask=boolean(1, 2, 6, 4, 5)), ValueError, "mask", "[2, 6, 4, 5]", "[1, 2, 6, 4, 5]",
    ),
    "float mask": (dict(mask=f32(4, 5)), TypeError, "mask", "bool", "float32"),
    "mask of another shape": (
        dict(mask=boolean(2, 3, 4, 5)), ValueError, "mask", "[2, 6, 4, 5]", "[2, 3, 4, 5]",
    ),
    "segments of one for T != S": (dict(segment_ids=i32(2, 4)), ValueError, "segment_ids", "pair", "4"),
    "float segments": (dict(segment_ids=(f32(2, 4), f32(2, 5))), TypeError, "segment_ids", "int32", "float32"),
    "segments of rank 1": (
        dict(segment_ids=(i32(2), i32(2))), ValueError, "segment_ids of the queries", "[2, 4]", "[2]",
    ),
    "segments beyond int32": (
        dict(segment_ids=(i32(2, 4), np.full((2, 5), 2**32))), ValueError, "segment_ids", "int32", "4294967296",
    ),
    "segments of three": (dict(segment_ids=(i32(2, 4),) * 3), ValueError, "segment_ids", "pair", "3"),
    "segments of another batch": (
        dict(segment_ids=(i32(2, 4), i32(1, 5))), ValueError, "segment_ids of the keys", "[2, 5]", "[1, 5]",
    ),
    # Pages
    "float page indices": (PAGED | dict(page_indices=f32(2, 4)), TypeError, "page_indices", "int32", "float32"),
    "list of page indices": (PAGED | dict(page_indices=[[0]]), TypeError, "page_indices", "array", "list"),
    "page indices of another batch": (
        PAGED | dict(page_indices=i32(3, 4)), ValueError, "page_indices", "[2, P]", "[3, 4]",
    ),
    "page indices of rank 1": (PAGED | dict(page_indices=i32(4)), ValueError, "page_indices", "[2, P]", "[4]"),
    "pages without lengths": (
        PAGED | dict(key_value_seq_lengths=None), ValueError, "key_value_seq_lengths", "page_indices", "None",
    ),
    "pages of rank 3": (PAGED | dict(key=f32(56, 3, 8)), ValueError, "key", "[pages, ", "[56, 3, 8]"),
    "no pages": (
        PAGED | dict(key=f32(0, 8, 3, 8), value=f32(0, 8, 3, 8)), ValueError, "key", "[pages, ", "[0, 8, 3, 8]",
    ),
    "pages of no keys": (
        PAGED | dict(key=f32(7, 0, 3, 8), value=f32(7, 0, 3, 8)), ValueError, "key", "[pages, ", "[7, 0, 3, 8]",
    ),
    "fewer pages of values": (PAGED | dict(value=f32(6, 8, 3, 8)), ValueError, "value", "[7, 8", "[6, 8, 3, 8]"),
    "other page size of values": (
        PAGED | dict(value=f32(7, 4, 3, 8)), ValueError, "value", "[7, 8", "[7, 4, 3, 8]",
    ),
    "other heads in pages of values": (
        PAGED | dict(value=f32(7, 8, 6, 8)), ValueError, "value", "heads 3", "[7, 8, 6, 8]",
    ),
    "other head dim in pages": (
        PAGED | dict(key=f32(7, 8, 3, 16)), ValueError, "key", "head dim 8", "[7, 8, 3, 16]",
    ),
    "pages beyond int32": (
        PAGED | dict(page_indices=np.full((2, 4), -(2**32))), ValueError, "page_indices", "int32", "-4294967296",
    ),
    "mask for one page": (PAGED | dict(mask=boolean(4, 8)), ValueError, "mask", "[2, 6, 4, 32]", "[4, 8]"),
    "segments of pages": (
        PAGED | dict(segment_ids=(i32(2, 4), i32(7, 8))), ValueError, "segment_ids", "[2, 32]", "[7, 8]",
    ),
    "segments of heads": (
        dict(segment_ids=(i32(2, 4, 6), i32(2, 5, 3))), ValueError, "segment_ids", "[2, 4]", "[2, 4, 6]",
    ),
    "segments are a list of numbers": (dict(segment_ids=[1, 1]), TypeError, "segment_ids", "array", "int"),
    "sinks of key heads": (dict(sinks=f32(3)), ValueError, "sinks", "[6]", "[3]"),
    "integer sinks": (dict(sinks=i32(6)), TypeError, "sinks", "float", "int32"),
    "dropout without a key": (dict(dropout_rate=0.1), ValueError, "dropout_rng", "dropout_rate", "None"),
    "dropout of all": (dict(dropout_rate=1.0, dropout_rng=RNG), ValueError, "dropout_rate", "below 1", "1.0"),
    "dropout negative": (dict(dropout_rate=-0.1, dropout_rng=RNG), ValueError, "dropout_rate", "at least 0", "-0.1"),
    "dropout is NaN": (
        dict(dropout_rate=float("nan"), dropout_rng=RNG), ValueError, "dropout_rate", "finite", "nan",
    ),
    "dropout is a bool": (dict(dropout_rate=True, dropout_rng=RNG), TypeError, "dropout_rate", "number", "True"),
    "key is an int": (dict(dropout_rate=0.1, dropout_rng=3), TypeError, "dropout_rng", "array", "int"),
    "key of floats": (
        dict(dropout_rate=0.1, dropout_rng=f32(2)), TypeError, "dropout_rng", "PRNG key", "float32",
    ),
    "several keys": (
        dict(dropout_rate=0.1, dropout_rng=jax.random.split(RNG, 3)), ValueError, "dropout_rng", "single", "[3]",
    ),
    "several raw keys": (
        dict(dropout_rate=0.1, dropout_rng=jnp.zeros((3, 2), jnp.uint32)),
        ValueError, "dropout_rng", "single", "[3, 2]",
    ),
    "raw key of three words": (
        dict(dropout_rate=0.1, dropout_rng=jnp.zeros(3, jnp.uint32)), ValueError, "dropout_rng", "2 words", "[3]",
    ),
    "dropout is a string": (dict(dropout_rate="0.1"), TypeError, "dropout_rate", "number", "'0.1'"),
}  # fmt: skip


def call(changes: dict, **more):
    arguments = dict(query=Q, key=K, value=V) | changes | more
    return jax_flash.flash_attention(**arguments)


def assert_says(error: BaseException, parts: tuple[str, ...]) -> None:
    message = str(error)
    assert "got" in message
    for part in parts:
        assert part in message
    assert re.match(r"[A-Za-z`].*[.)]$", message, re.DOTALL), f"not a sentence: {message}"


@pytest.mark.parametrize("row", CALLS.values(), ids=CALLS.keys())
def test_bad_call(row):
    changes, exception, *parts = row
    for implementation in (None, "xla"):
        if implementation and "implementation" in changes:
            continue
        more = {"implementation": implementation} if implementation else {}
        with pytest.raises(exception) as traced:
            jax.eval_shape(lambda more=more: call(changes, **more))
        assert_says(traced.value, parts)
        with pytest.raises(exception) as eager:
            call(changes, **more)
        assert str(eager.value) == str(traced.value)


def test_the_table_is_long_enough():
    assert len(CALLS) + len(TRACED) >= 40


# Static options as traced values, which are unknown while the program is built.
TRACED = {
    "is_causal": True,
    "local_window_size": 3,
    "logits_soft_cap": 2.0,
    "deterministic": True,
    "forward_mode": True,
    "return_residual": True,
    "dropout_rate": 0.5,
}


@pytest.mark.parametrize("name", TRACED)
def test_traced_static_option(name):
    more = {"dropout_rng": RNG} if name == "dropout_rate" else {}
    with pytest.raises(TypeError) as error:
        jax.jit(lambda x: call({name: x}, **more))(TRACED[name])
    assert_says(error.value, (name, "traced"))


def test_traced_part_of_a_window():
    with pytest.raises(TypeError) as error:
        jax.jit(lambda x: call(dict(local_window_size=(x, 1))))(3)
    assert_says(error.value, ("local_window_size", "traced"))


def test_the_good_call_is_good():
    """Shows that each row above fails for its own reason."""
    assert call({}).shape == (2, 4, 6, 8)
    assert call(dict(implementation="xla")).shape == (2, 4, 6, 8)


def test_unknown_argument():
    with pytest.raises(TypeError, match="causal"):
        call(dict(causal=True))


@pytest.mark.parametrize("shape", [(0,), (2, 1), (3,)])
def test_lengths_without_a_batch_axis(shape):
    with pytest.raises(ValueError, match="query_seq_lengths") as error:
        call(dict(query=Q[0], key=K[0], value=V[0], query_seq_lengths=i32(*shape)))
    assert_says(error.value, ("query_seq_lengths", "scalar", str(list(shape))))


@pytest.mark.parametrize(
    ("name", "x"),
    [("bias", f32(1, 6, 4, 5)), ("mask", boolean(2, 6, 4, 5)), ("segment_ids", (i32(1, 4), i32(1, 5)))],
    ids=["bias", "mask", "segment_ids"],
)
def test_arrays_without_a_batch_axis(name, x):
    with pytest.raises(ValueError, match=name) as error:
        call(dict(query=Q[0], key=K[0], value=V[0]) | {name: x})
    assert_says(error.value, (name, "[4]" if name == "segment_ids" else "[N, T, S] = [6, 4, 5]"))


def test_float64_without_x64_is_float32():
    """NumPy's float64 becomes float32, as everywhere in JAX."""
    q = np.zeros((1, 2, 1, 4))
    assert call(dict(query=q, key=q, value=q)).dtype == jnp.float32
    with harness.x64("float64"):
        assert call(dict(query=q, key=q, value=q)).dtype == jnp.float64


@pytest.mark.parametrize("forward_mode", [False, True])
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_debug_nans_names_the_pass(jit, forward_mode, platform):
    x = np.ones((1, 4, 1, 8), np.float32)
    x[0, 0] = np.inf
    call = jit(lambda x: jax_flash.flash_attention(x, x, x, forward_mode=forward_mode))
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match=r"nan.* in jax_flash_forward"):
        call(x)
