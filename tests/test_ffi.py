"""The custom calls: a program that calls them wrongly gets an error, and the process survives."""

import functools

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash
from jax_flash import _ffi, _library, _operands

F32, BF16, I32, U32, BOOL = jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32, jnp.bool_
OPTIONS = dict(
    scale=np.float64(0.5),
    is_causal=np.bool_(False),
    window_left=np.int64(-1),
    window_right=np.int64(-1),
    logits_soft_cap=np.float64(0.0),
    dropout_rate=np.float64(0.0),
    precision=np.int64(2),
    deterministic=np.bool_(True),
    operands="",
)
FORWARD = ["q", "k", "v"], ["out", "lse"]
BACKWARD = ["q", "k", "v", "out", "lse", "dout"], ["dq", "dk", "dv"]
BACKWARD_BIAS = BACKWARD[0], ["dbias"]
SHAPES = {
    **dict.fromkeys(["q", "dq"], (2, 4, 6, 8)),
    **dict.fromkeys(["k", "dk"], (2, 5, 3, 8)),
    **dict.fromkeys(["v", "dv"], (2, 5, 3, 16)),
    **dict.fromkeys(["out", "dout"], (2, 4, 6, 16)),
    **dict.fromkeys(["lse", "dlse"], (2, 4, 6)),
    **dict.fromkeys(["delta", "lse_log2"], (2, 6, 128)),
    **dict.fromkeys(["lengths"], (2,)),
    **dict.fromkeys(["bias", "mask", "dbias"], (2, 6, 4, 5)),
    "slopes": (2, 6),
    "query_ids": (2, 4),
    "key_ids": (2, 5),
    "seeds": (2, 6, 5),
    "pages": (2, 4),
}
DTYPES = {"query_ids": I32, "key_ids": I32, "mask": BOOL, "seeds": U32, "pages": I32}


def call(target: str, platform: str, **changes):
    """Call a target with arrays of zeros."""
    f, args = program(target, platform, **changes)
    return jax.block_until_ready(f(*args))


def program(
    target: str,
    platform: str,
    *,
    replace=None,
    extra=(),
    more_results=None,
    drop=0,
    drop_results=0,
    **options,
):
    """A jitted call and its arguments; `replace` changes shapes or dtypes by name."""
    args, results = {
        "jax_flash_forward": FORWARD,
        "jax_flash_backward": BACKWARD,
        "jax_flash_backward_bias": BACKWARD_BIAS,
    }[target]
    types = {name: (SHAPES[name], DTYPES.get(name, F32)) for name in [*args, *results, *extra]} | (
        replace or {}
    )
    args = [*args, *extra]
    args = [jnp.zeros(*types[name]) for name in args[: len(args) - drop]]
    results = [jax.ShapeDtypeStruct(*types[name]) for name in results[: len(results) - drop_results]]
    results += [jax.ShapeDtypeStruct(*x) for x in (more_results or {}).values()]
    if platform == "cuda" and drop_results == 0:
        results += workspace(target, *(types[name][0] for name in "qkv"), has_planes=types["q"][1] == F32)
    attributes = {name: x for name, x in (OPTIONS | options).items() if x is not None}
    return jax.jit(lambda *args: jax.ffi.ffi_call(target, results)(*args, **attributes)), args


def workspace(target: str, q, k, v, key_parts: int = 0, has_planes=True) -> list[jax.ShapeDtypeStruct]:
    """The workspace of a float32 call with arrays of these shapes, with no planes, for OPTIONS.

    In float64 there are not even arrays for them, and statistics have twice the size.
    """
    if any(len(shape) != 4 for shape in (q, k, v)):
        return []  # such a call ends before it is looked at
    (B, T, N, H), (S, K), Hv = q, k[1:3], v[-1]
    statistics = 2 * [((B, N, (1 if has_planes else 2) * (-(-T // 128) * 128)), F32)]
    counter, has_nan = [((1,), I32)], [((1,), I32)]
    planes = [((0, B, K, 20 + 4 * Hv + 2 * H), I32)]
    planes += [((0, *shape), jnp.uint16) for shape in ((T, N, H), (S, K, H), (S, K, Hv))]
    rows = -(-S // 16) * 16
    of_gradient = [((0, T, N, Hv), jnp.uint16), ((0, B, N, -(-T // 128) * 128), F32)]
    parts = [((B, 0, rows, columns), F32) for columns in (H, Hv)]
    types = {
        "jax_flash_forward": planes * has_planes,
        "jax_flash_backward": [
            *(planes + of_gradient + counter + has_nan) * has_planes,
            *statistics,
            *parts * has_planes,
        ],
        "jax_flash_backward_bias": statistics,
    }[target]
    arrays = [jax.ShapeDtypeStruct(*x) for x in types]
    if target == "jax_flash_forward":
        arrays.append(parts_of((B, T, N, Hv), key_parts))
    return arrays


def parts_of(out: tuple[int, ...], number: int) -> jax.ShapeDtypeStruct:
    """The workspace of a forward call for parts of the keys; `out` is the shape of the output."""
    batch = 0 if number == 1 else out[0]  # a single part leaves nothing
    return jax.ShapeDtypeStruct((number, batch, *out[1:-1], -(-out[-1] // 4) * 4 + 4), F32)


def operand(name: str, names: str, shape=None, dtype=None) -> dict:
    """A call with one operand of a wrong type."""
    return dict(
        extra=[name],
        operands=names,
        replace={name: (shape or SHAPES[name], dtype or DTYPES.get(name, F32))},
    )


LENGTHS = dict(extra=["lengths"], operands="key_value_seq_lengths")
# k and v are then two pages of 5 keys.
PAGES = dict(extra=["pages"], operands="page_indices")
# Bad calls of the forward target and their error messages.
BAD_FORWARD = {
    "q of rank 3": (dict(replace={"q": ((4, 6, 8), F32)}), "q must have 4 axes"),
    "k of rank 5": (dict(replace={"k": ((1, 2, 5, 3, 8), F32)}), "k must have 4 axes"),
    "scalar v": (dict(replace={"v": ((), F32)}), "v must have 4 axes"),
    "k of another batch": (dict(replace={"k": ((3, 5, 3, 8), F32)}), "k must be float32 of shape"),
    "k of another head dim": (dict(replace={"k": ((2, 5, 3, 9), F32)}), "k must be float32 of shape"),
    "k of another dtype": (dict(replace={"k": ((2, 5, 3, 8), BF16)}), "k must be float32 .* got bfloat16"),
    "v of another length": (dict(replace={"v": ((2, 6, 3, 16), F32)}), "v must be float32 of shape"),
    "v of other heads": (dict(replace={"v": ((2, 5, 2, 16), F32)}), "v must be float32 of shape"),
    "integer q": (dict(replace={"q": ((2, 4, 6, 8), I32)}), "q must be float16, bfloat16, float32"),
    "heads not a multiple": (dict(replace={"q": ((2, 4, 7, 8), F32)}), "multiple"),
    "out of another shape": (dict(replace={"out": ((2, 4, 6, 8), F32)}), "out must be float32 of shape"),
    "out of another dtype": (dict(replace={"out": ((2, 4, 6, 16), BF16)}), "out must be float32"),
    "lse of another shape": (dict(replace={"lse": ((2, 6, 4), F32)}), "lse must be float32 of shape"),
    "lse of another dtype": (dict(replace={"lse": ((2, 4, 6), BF16)}), "lse must be float32"),
    "p_factor of another dtype": (
        dict(more_results={"p_factor": ((2, 4, 6), BF16)}), "p_factor must be float32 of shape",
    ),
    "p_factor of another shape": (
        dict(more_results={"p_factor": ((2, 6, 4), F32)}), "p_factor must be float32 of shape",
    ),
    "p_factor where the rounding of lse does not show": (
        dict(more_results={"p_factor": ((2, 4, 6), F32)}, precision=np.int64(0)),
        "expected 3 arguments and 2 results|plane_scales must be int32",
    ),
    "v is missing": (dict(drop=1), "no argument for v"),
    "lse is missing": (dict(drop_results=1), "no result for lse"),
    "one argument too many": (dict(extra=["lengths"]), "expected 3 arguments"),
    "lengths are missing": (dict(operands="query_seq_lengths"), "no argument for query_seq_lengths"),
    "lengths of another shape": (
        LENGTHS | dict(replace={"lengths": ((3,), I32)}), "key_value_seq_lengths must be int32",
    ),
    "float lengths": (LENGTHS, "key_value_seq_lengths must be int32 .* got float32"),
    "unknown operand": (dict(extra=["lengths"], operands="biases"), "biases"),
    "bias of another shape": (operand("bias", "bias", (2, 6, 5, 4)), "bias must be broadcastable to"),
    "bias of key heads": (operand("bias", "bias", (2, 3, 4, 5)), "bias must be broadcastable to"),
    "bias of rank 3": (operand("bias", "bias", (6, 4, 5)), "bias must be broadcastable to"),
    "integer bias": (operand("bias", "bias", dtype=I32), "bias must .* got int32"),
    "bias is missing": (dict(operands="bias"), "no argument for bias"),
    "mask of another shape": (operand("mask", "mask", (2, 6, 4, 4)), "mask must be broadcastable to"),
    "float mask": (operand("mask", "mask", dtype=F32), "mask must .* got float32"),
    "slopes of key heads": (operand("slopes", "alibi_slopes", (2, 3)), "alibi_slopes must be float32 of shape"),
    "slopes of bfloat16": (operand("slopes", "alibi_slopes", dtype=BF16), "alibi_slopes must be float32"),
    "ids of queries alone": (operand("query_ids", "query_segment_ids"), "must come together"),
    "ids of keys alone": (operand("key_ids", "key_value_segment_ids"), "must come together"),
    "ids of another length": (
        operand("query_ids", "query_segment_ids", (2, 5)), "query_segment_ids must be int32 of shape",
    ),
    "float ids": (operand("key_ids", "key_value_segment_ids", dtype=F32), "key_value_segment_ids must be int32"),
    "no pages": (
        PAGES | dict(replace={"k": ((0, 5, 3, 8), F32), "v": ((0, 5, 3, 16), F32)}), "pages must be at least one",
    ),
    "pages of no keys": (
        PAGES | dict(replace={"k": ((2, 0, 3, 8), F32), "v": ((2, 0, 3, 16), F32)}), "pages must be at least one",
    ),
    "more pages of values": (PAGES | dict(replace={"v": ((3, 5, 3, 16), F32)}), "v must be float32 of shape"),
    "page indices of another batch": (
        PAGES | dict(replace={"pages": ((3, 4), I32)}), "page_indices must be int32 of shape",
    ),
    "page indices of rank 1": (PAGES | dict(replace={"pages": ((2,), I32)}), "page_indices must be int32 of shape"),
    "float page indices": (PAGES | dict(replace={"pages": ((2, 4), F32)}), "page_indices must be int32"),
    "too many pages": (
        PAGES | dict(replace={"pages": ((0, 2**29), I32), "q": ((0, 4, 6, 8), F32)}),
        "page_indices must be of less than 2",
    ),
    "page indices are missing": (dict(operands="page_indices"), "no argument for page_indices"),
    "two words of seeds": (operand("seeds", "dropout_seeds", (2, 6, 2)), "dropout_seeds must be uint32 of shape"),
    "signed seeds": (operand("seeds", "dropout_seeds", dtype=I32), "dropout_seeds must be uint32"),
    "dropout without seeds": (dict(dropout_rate=np.float64(0.5)), "dropout_rate needs dropout_seeds"),
    "dropout of all": (dict(dropout_rate=np.float64(1.0)), "dropout_rate must be"),
    "dropout is NaN": (dict(dropout_rate=np.float64("nan")), "dropout_rate must be"),
    "scale is NaN": (dict(scale=np.float64("nan")), "scale"),
    "scale is an integer": (dict(scale=np.int64(1)), "scale"),
    "window -2": (dict(window_left=np.int64(-2)), "window_left"),
    "cap negative": (dict(logits_soft_cap=np.float64(-1.0)), "logits_soft_cap"),
    "precision 3": (dict(precision=np.int64(3)), "precision"),
    "is_causal is missing": (dict(is_causal=None), "is_causal"),
    "deterministic is a number": (dict(deterministic=np.float64(1.0)), "deterministic"),
}  # fmt: skip
BAD_BACKWARD = {
    "page indices": (PAGES, "forward pass only"),
    "dout of another shape": (dict(replace={"dout": ((2, 4, 6, 8), F32)}), "dout must be float32 of shape"),
    "dout of another dtype": (dict(replace={"dout": ((2, 4, 6, 16), BF16)}), "dout must be float32"),
    "out of another length": (dict(replace={"out": ((2, 5, 6, 16), F32)}), "out must be float32 of shape"),
    "lse of bfloat16": (dict(replace={"lse": ((2, 4, 6), BF16)}), "lse must be float32"),
    "dlse of another shape": (
        dict(extra=["dlse"], operands="dlse", replace={"dlse": ((2, 6, 4), F32)}), "dlse must be float32",
    ),
    "dlse is missing": (dict(operands="dlse"), "no argument for dlse"),
    "dq of another shape": (dict(replace={"dq": ((2, 4, 6, 16), F32)}), "dq must be float32 of shape"),
    "dk of query heads": (dict(replace={"dk": ((2, 5, 6, 8), F32)}), "dk must be float32 of shape"),
    "dv of another dtype": (dict(replace={"dv": ((2, 5, 3, 16), BF16)}), "dv must be float32"),
    "one result is missing": (dict(drop_results=1), "no result"),
    "scale is infinite": (dict(scale=np.float64("inf")), "scale"),
}  # fmt: skip


BIAS = dict(extra=["bias"], operands="bias")
BAD_BACKWARD_BIAS = {
    "dbias of another length": (BIAS | dict(replace={"dbias": ((2, 6, 4, 4), F32)}), "dbias"),
    "dbias of key heads": (BIAS | dict(replace={"dbias": ((2, 3, 4, 5), F32)}), "dbias"),
    "dbias of 3 batch elements": (BIAS | dict(replace={"dbias": ((3, 6, 4, 5), F32)}), "dbias"),
    "dbias of rank 3": (BIAS | dict(replace={"dbias": ((6, 4, 5), F32)}), "dbias"),
    "dbias of another dtype": (BIAS | dict(replace={"dbias": ((2, 6, 4, 5), BF16)}), "dbias"),
    "dbias of blocks in 16 bits": (
        BIAS
        | dict(
            replace={name: (SHAPES[name], BF16) for name in ("q", "k", "v", "out", "dout")}
            | {"bias": ((2, 6, 1, 5), F32), "dbias": ((2, 6, 1, 5), BF16)}
        ),
        "dbias must be float32 of shape",
    ),
    "dout of another shape": (
        BIAS | dict(replace={"dout": ((2, 4, 6, 8), F32)}),
        "dout must be float32 of shape",
    ),
    "bias is missing": (dict(operands="bias"), "no argument for bias"),
}


@functools.cache
def good_programs(platform: str) -> list:
    """One for each target, compiled once."""
    changes = {"jax_flash_forward": {}, "jax_flash_backward": {}, "jax_flash_backward_bias": BIAS}
    return [program(target, platform, **more) for target, more in changes.items()]


def assert_alive(platform: str) -> None:
    """Good calls still work."""
    (out, lse, *_), gradients, of_bias = [f(*args) for f, args in good_programs(platform)]
    np.testing.assert_array_equal(out, 0.0)
    np.testing.assert_allclose(lse, np.log(5), rtol=1e-6)
    for x in (*gradients[:3], of_bias[0]):
        np.testing.assert_array_equal(x, 0.0)


@pytest.mark.parametrize("row", BAD_FORWARD.values(), ids=BAD_FORWARD.keys())
def test_bad_forward_call(row, platform):
    changes, message = row
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call("jax_flash_forward", platform, **changes)
    assert_alive(platform)


@pytest.mark.parametrize("row", BAD_BACKWARD.values(), ids=BAD_BACKWARD.keys())
def test_bad_backward_call(row, platform):
    changes, message = row
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call("jax_flash_backward", platform, **changes)
    assert_alive(platform)


@pytest.mark.parametrize("row", BAD_BACKWARD_BIAS.values(), ids=BAD_BACKWARD_BIAS.keys())
def test_bad_call_for_the_gradient_of_a_bias(row, platform):
    changes, message = row
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call("jax_flash_backward_bias", platform, **changes)
    assert_alive(platform)


D = 3  # directions
TANGENT_SHAPES = SHAPES | {
    "tq": (D, 2, 4, 6, 8),
    "tk": (D, 2, 5, 3, 8),
    "tv": (D, 2, 5, 3, 16),
    "tbias": (D, 1, 6, 1, 5),
    "tout": (D, 2, 4, 6, 16),
    "tlse": (D, 2, 4, 6),
}
TANGENT_SHAPES |= {f"td{name}": TANGENT_SHAPES[f"t{name}"] for name in ("q", "k", "v", "out", "lse")}
# By target: required arguments, operands, results.
DIRECTED = {
    "tangent": ("q k v out lse", "tq tk tv tbias", "tout tlse"),
    "backward_tangent": ("q k v out lse dout tout tlse", "tdout tdlse tq tk tv tbias", "tdq tdk tdv"),
}


def call_tangent(target, *, rename=("", ""), replace=None, drop=0, drop_results=0):
    """Calls the target with zeros; `replace` changes shapes by name, `rename` the attribute `operands`."""
    required, optional, results = map(str.split, DIRECTED[target])
    shapes = TANGENT_SHAPES | (replace or {})
    args = [jnp.zeros(shapes[name], F32) for name in [*required, *optional]]
    types = [jax.ShapeDtypeStruct(shapes[name], F32) for name in results]
    f = jax.ffi.ffi_call(f"jax_flash_{target}", types[: len(types) - drop_results])
    attributes = OPTIONS | dict(operands=",".join(optional).replace(*rename))
    return jax.block_until_ready(jax.jit(lambda *args: f(*args, **attributes))(*args[: len(args) - drop]))


BAD_TANGENT = {
    "a tangent of another shape": (dict(replace={"tk": (3, 2, 5, 6, 8)}), "tk must be float32 of shape"),
    "a direction less": (dict(replace={"tv": (2, 2, 5, 3, 16)}), "tv must be float32 of shape"),
    "a bias for one direction": (
        dict(replace={"tbias": (1, 1, 6, 1, 5)}),
        r"tbias must be broadcastable to \[3, 2, 6, 4, 5\]",
    ),
    "a bias without directions": (dict(replace={"tbias": (1, 6, 1, 5)}), "tbias must be broadcastable"),
    "lse of other directions": (dict(replace={"tlse": (2, 2, 4, 6)}), "tlse must be float32 of shape"),
    "a tangent is missing": (dict(drop=1), "no argument for tbias"),
    "a result is missing": (dict(drop_results=1), "no result for (tlse|tdv)"),
    "an unknown tangent": (dict(rename=("tbias", "tmask")), "unknown or misplaced name"),
    "tangents in another order": (dict(rename=("tq,tk", "tk,tq")), "tk must be float32 of shape"),
}
BAD_GRADIENT_TANGENT = {
    "the output without directions": (dict(replace={"tout": (2, 4, 6, 16)}), "tout must be float32 of shape"),
    "a cotangent for one direction": (dict(replace={"tdout": (1, 2, 4, 6, 16)}), "tdout must be float32 of"),
    "heads first": (dict(replace={"tdlse": (D, 2, 6, 4)}), "tdlse must be float32 of shape"),
    "a result of other directions": (dict(replace={"tdk": (2, 2, 5, 3, 8)}), "tdk must be float32 of shape"),
}
BAD_DIRECTED = [
    pytest.param(target, *row, id=f"{target}, {name}")
    for target, rows in (("tangent", BAD_TANGENT), ("backward_tangent", BAD_TANGENT | BAD_GRADIENT_TANGENT))
    for name, row in rows.items()
]


@pytest.mark.parametrize(("target", "changes", "message"), BAD_DIRECTED)
def test_bad_tangent_call(target, changes, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call_tangent(target, **changes)
    for x in call_tangent(target):
        np.testing.assert_array_equal(x, 0.0)


@pytest.mark.parametrize("parts", [0, 1, 2, 1000])
def test_raw_call_is_what_the_function_does(parts, platform):
    """With any number of parts of the keys: where it suits no kernel for parts, another one runs."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(SHAPES[name]).astype(np.float32) for name in "qkv")
    lengths = np.array([3, 5], np.int32)
    types = [jax.ShapeDtypeStruct(SHAPES["out"], F32), jax.ShapeDtypeStruct(SHAPES["lse"], F32)]
    if platform == "cuda":
        types += workspace("jax_flash_forward", *(SHAPES[name] for name in "qkv"), parts)
    raw = jax.jit(
        lambda *args: jax.ffi.ffi_call("jax_flash_forward", types)(
            *args, **OPTIONS | dict(operands="key_value_seq_lengths")
        )
    )
    want = jax_flash.flash_attention(
        q, k, v, scale=0.5, precision="highest", key_value_seq_lengths=lengths, return_residual=True
    )
    for a, b in zip(raw(q, k, v, lengths)[:2], want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [0, 1, 2])
@pytest.mark.parametrize("size", ["batch", "seqlen_q", "seqlen_kv", "num_heads"])
def test_nothing_to_do(size, parts, platform):
    sizes = dict(batch=2, seqlen_q=4, seqlen_kv=5, num_heads=6) | {size: 0}
    b, t, s, n = sizes.values()
    args = [jnp.ones(shape, BF16) for shape in ((b, t, n, 8), (b, s, n // 2, 8), (b, s, n // 2, 16))]
    types = [jax.ShapeDtypeStruct((b, t, n, 16), BF16), jax.ShapeDtypeStruct((b, t, n), F32)]
    if platform == "cuda":
        types += [jax.ShapeDtypeStruct((1,), I32), parts_of((b, t, n, 16), parts)]
    f = jax.ffi.ffi_call("jax_flash_forward", types)
    out, lse, *_ = jax.jit(lambda *args: f(*args, **OPTIONS))(*args)
    np.testing.assert_array_equal(out, jnp.zeros_like(out))
    np.testing.assert_array_equal(lse, jnp.full_like(lse, -np.inf))


def test_workspace_of_16_bits(cuda):
    types = {name: (SHAPES[name], BF16) for name in ("q", "k", "v", "out")}
    for message, results in (
        ("no result for tile_counter", ["out", "lse"]),
        ("tile_counter must be int32", ["out", "lse", "tile_counter"]),
    ):
        shapes = types | {"lse": (SHAPES["lse"], F32), "tile_counter": ((2,), I32)}
        f = jax.ffi.ffi_call("jax_flash_forward", [jax.ShapeDtypeStruct(*shapes[name]) for name in results])
        args = [jnp.zeros(*types[name]) for name in "qkv"]
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            jax.block_until_ready(jax.jit(lambda *args, f=f: f(*args, **OPTIONS))(*args))
    assert_alive(cuda)


@pytest.mark.parametrize("rows", [16, 0, 4])
def test_room_for_sums_of_dq_is_for_all_or_none(rows, cuda):
    tensors = {name: (SHAPES[name], BF16) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    counter, sums = ((1,), I32), ((2, rows, 6, 8), F32)
    types = [tensors[name] for name in BACKWARD[1]]
    no_parts = [((2, 0, 16, SHAPES[name][-1]), F32) for name in "kv"]
    types += [
        ((2, 0, 4, 5), jnp.uint16),
        counter,
        (SHAPES["delta"], F32),
        (SHAPES["lse_log2"], F32),
        sums,
        *no_parts,
    ]
    args = [jnp.zeros(*(tensors | {"lse": (SHAPES["lse"], F32)})[name]) for name in BACKWARD[0]]
    f = jax.ffi.ffi_call("jax_flash_backward", [jax.ShapeDtypeStruct(*x) for x in types])

    def run():
        attributes = OPTIONS | dict(deterministic=np.bool_(False))
        return jax.block_until_ready(jax.jit(lambda *args: f(*args, **attributes))(*args))

    if rows == 4:
        with pytest.raises(
            jax.errors.JaxRuntimeError, match=r"dq_accum must be float32 of shape \[2, 16, 6, 8\]"
        ):
            run()
    else:
        for x in run()[:3]:
            np.testing.assert_array_equal(x.astype(F32), 0.0)
    assert_alive(cuda)


@pytest.mark.parametrize("target", ["jax_flash_forward", "jax_flash_backward", "jax_flash_backward_bias"])
def test_more_than_the_cuda_kernels_do(target, cuda):
    tensors = ("q", "k", "v", "out", "dout", "dq", "dk", "dv")
    shapes = {name: (*SHAPES[name][:3], 264) for name in tensors}
    with pytest.raises(jax.errors.JaxRuntimeError, match="256"):
        call(target, cuda, replace={name: (shape, F32) for name, shape in shapes.items()})
    shapes = {name: (*SHAPES[name][:3], 136) for name in tensors}
    with harness.x64("float64"), pytest.raises(jax.errors.JaxRuntimeError, match="128"):
        call(
            target,
            cuda,
            replace={name: (shapes.get(name, shape), jnp.float64) for name, shape in SHAPES.items()},
        )
    assert_alive(cuda)


def test_names_of_the_targets():
    passes = ("backward", "backward_bias", "backward_tangent", "forward", "tangent")
    assert jax_flash.ffi_targets() == tuple(f"jax_flash_{name}" for name in passes)


OTHER_WORKSPACES = {
    "an unknown size": dict(shape="{B, M}"),
    "an unknown condition": dict(condition="is_causal"),
    "an unknown dtype": dict(dtype="F16"),
    "another language": dict(condition="is_gradient && is_16_bit"),
}


@pytest.mark.parametrize("fields", OTHER_WORKSPACES.values(), ids=OTHER_WORKSPACES.keys())
def test_a_library_with_another_workspace_is_refused(fields, monkeypatch):
    rows = [row | fields for row in _library.workspace()]
    monkeypatch.setattr(_library, "workspace", lambda: rows)
    with pytest.raises(ImportError, match=r"not built from the sources.*Install the package again"):
        _ffi._check_interface()


def test_differentiable_operands_have_floats():
    differentiable = [operand for operand in _operands.OPERANDS if operand.is_differentiable]
    assert {operand.dtype for operand in differentiable} == {"lse", "floating"}
    assert {operand.name for operand in differentiable} == {"scale_factor", "sinks", "bias", "alibi_slopes"}
