"""Head dims above 256: on a GPU two thread blocks of a cluster compute them together.

Forward in cuda/sm90/head_halves.cuh, gradients in wide_backward.cuh and wide_backward_dq.cuh.
"""

import dataclasses
import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from cases import DTYPES, Bias, Mask, Segments
from test_derivatives import evaluate, evaluate_exactly, fused, gradient_tangent, point_of, tangent
from test_edges import EMPTY

import jax_flash
from jax_flash import _checks

case = functools.partial(cases.case, batch=1, k=1, h=512)
CASES = [
    case("full", t=150, s=131),
    case("causal", t=200, s=200, is_causal=True),
    case("window, offset", t=150, s=210, is_causal=True, local_window_size=(70, 0), query_offset=(50,)),
    case("lengths", batch=3, query_seq_lengths=(80, 0, 65), key_value_seq_lengths=(80, 3, 64)),
    case("a short sequence", t=40, s=50),
    case("a row of tiles that see nothing", t=140, s=140, query_offset=(-70,), is_causal=True),
    case("head dim 264", h=264),
    case("head dim 320, values of 512", h=320, hv=512, s=70),
    case("head dim 384, values of 8", h=384, hv=8, is_causal=True),
    case("values wider", h=64, hv=448, s=131),
    case("soft cap, sinks", n=4, k=2, logits_soft_cap=3.0, sinks=(0.5, -1.0, 2.0, 0.0)),
    case("bias", t=90, s=131, bias=Bias("1NTS")),
    case("mask", t=150, s=140, mask=Mask("B1TS")),
    case("deterministic", t=150, s=140, is_causal=True, deterministic=True),
    case(
        "everything",
        batch=2,
        t=150,
        s=140,
        n=4,
        k=2,
        h=328,
        hv=272,
        scale=0.05,
        is_causal=True,
        local_window_size=(100, 3),
        logits_soft_cap=3.0,
        query_seq_lengths=(150, 101),
        key_value_seq_lengths=(131, 140),
        query_offset=(30, -20),
        sinks=(0.3, 1.0, -1.0, 2.5),
        bias=Bias("1NTS", dtype="float32"),
        mask=Mask("BNTS", visible=0.8),
        segment_ids=Segments((0, 1)),
        dropout_seed=1,
        dropout_rate=0.2,
    ),
    # Enough pairs of tiles for 66 clusters; in the second pair the first tile has an odd number of blocks.
    case("pairs of tiles", batch=8, t=200, s=200, n=4, k=4, is_causal=True),
    case("heads that see nothing", t=150, s=140, n=4, k=2, mask=Mask("BNTS", hidden_heads=(0, 3))),
]
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _needs_hopper(request) -> None:
    if request.node.callspec.params.get("platform") == "cuda" and not harness.is_hopper():
        pytest.skip("needs Hopper")


DTYPE = pytest.mark.parametrize("dtype", quick.rows(["bfloat16", "float16"], quick=["bfloat16"]))


@DTYPE
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_close_to_exact(case, dtype, platform):
    got, gradients = harness.run_with_operands(case, dtype)
    harness.check(got, case, dtype, dtype)
    harness.check_operands(gradients, case, dtype, dtype)


@pytest.mark.parametrize("case", [BY_NAME["causal"], BY_NAME["everything"]], ids=str)
def test_parts_of_the_query_heads(case, platform, monkeypatch):
    if platform == "cpu":
        pytest.skip("the CPU has no such parts")
    asked = []
    choice = jax_flash._kernel_choice
    monkeypatch.setattr(choice, "num_head_parts", lambda *call: asked.append(call) or case.num_heads)
    jax.clear_caches()
    got, gradients = harness.run_with_operands(case, "bfloat16")
    assert asked
    harness.check(got, case, "bfloat16", "bfloat16")
    harness.check_operands(gradients, case, "bfloat16", "bfloat16")


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("queries", [1, 70])
def test_parts_of_the_keys(queries, parts, platform, monkeypatch):
    if platform == "cpu":
        pytest.skip("the CPU has no such parts")
    row = case("parts", t=queries, s=700, h=320, hv=384, is_causal=True, query_offset=(640,))
    asked = []
    choice = jax_flash._kernel_choice
    monkeypatch.setattr(choice, "num_key_parts", lambda *call: asked.append(call) or parts)
    jax.clear_caches()
    got = harness.run(row, "bfloat16")
    assert asked
    harness.check(got, row, "bfloat16", "bfloat16", names=("out", "lse"))


@pytest.mark.parametrize("sinks", [None, (0.5, -1.0)], ids=["", "sinks"])
@pytest.mark.parametrize("sizes", EMPTY.values(), ids=EMPTY.keys())
def test_empty(sizes, sinks, platform):
    b, t, s, n, k = sizes
    row = case(
        "empty", batch=b, t=t, s=s, n=n, k=k, hv=264, **({} if sinks is None else {"sinks": sinks[:n]})
    )
    got = harness.run(row, "bfloat16")
    lse = -np.inf if sinks is None else np.broadcast_to(np.float32(sinks[:n]), (b, t, n))
    for name, x in got._asdict().items():
        np.testing.assert_array_equal(x, lse if name == "lse" else 0.0)


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages(page_size, platform):
    row = case("pages", batch=2, t=3, s=320, n=4, k=2, h=512, is_causal=True, query_offset=(200, 309))
    q, k, v, *_ = row.inputs(DTYPES["bfloat16"])
    lengths = np.array([203, 312], np.int32)
    keys, values, indices = harness.in_pages(k, v, lengths, page_size)
    options = row.static | row.operands(DTYPES["bfloat16"])
    attention = functools.partial(jax_flash.flash_attention, key_value_seq_lengths=lengths, **options)
    want = jax.jit(attention)(q, k, v)
    got = jax.jit(attention)(q, keys, values, page_indices=indices)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("composition", [tangent, gradient_tangent])
def test_derivatives(composition, platform):
    """On a GPU in blocks of plain JAX."""
    row = dataclasses.replace(BY_NAME["soft cap, sinks"], head_dim=320)
    point = point_of(row, "bfloat16")
    got = evaluate(
        composition, fused(row, "bfloat16", forward_mode=composition is tangent), point, "bfloat16"
    )
    want = evaluate_exactly(composition, row, point)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a.astype(np.float64) - b) <= 2e-2 * np.linalg.norm(b)


# What a build has: by default, but for float16 without 512, and for float32 without 256; and gradients up to 384.
BUILD = [
    *(f"{direction} sm80 {dtype} 256" for direction in ("forward", "backward") for dtype in ("bfloat16", "float16")),
    *(f"{direction} sm80 {dtype} 128" for direction in ("forward", "backward") for dtype in ("tf32", "float64")),
    *("forward sm90 bfloat16 512", "backward sm90 bfloat16 384", "forward sm90 float16 256"),
    "forward sm90 tf32 256",  # for some calls only
]  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "head_dims", "page_size", "capability", "message"),
    [
        ("bfloat16", (512, 512), None, "9.0", None),
        ("bfloat16", (512, 512), 16, "9.0", None),
        ("bfloat16", (8, 264), None, "9.0", None),
        ("bfloat16", (515, 8), None, "8.0", "head dims up to 512 in bfloat16, got 515"),
        ("bfloat16", (300, 300), None, "9.0", "must be multiples of 8 on a GPU, got 300"),
        ("bfloat16", (512, 500), None, "9.0", "must be multiples of 8 on a GPU, got 500"),
        ("bfloat16", (512, 512), 12, "9.0", "a page's size must be a multiple of 8 on a GPU, got 12"),
        ("bfloat16", (512, 512), None, "8.0", r"9.0 \(H100, H200\), got 512 on a GPU \(8.0\)"),
        ("float16", (512, 512), None, "9.0", "no forward kernel for head dim 512 in float16.* 512 in"),
        ("float32", (192, 8), None, "9.0", "no forward kernel for head dim 192 in float32.* 256 in"),
        ("float32", (512, 512), None, "9.0", "head dims up to 256 in float32, got 512"),
        ("float64", (136, 136), None, "9.0", "head dims up to 128 in float64, got 136"),
    ],
)
def test_what_is_refused(dtype, head_dims, page_size, capability, message, monkeypatch):
    check = check_of_build(BUILD, capability, monkeypatch)
    assert_refuses(message, check, jnp.dtype(dtype), head_dims, is_gradient=False, page_size=page_size)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "message"),
    [
        ("bfloat16", 320, None),
        ("bfloat16", 512, "no backward kernel for head dim 512 in bfloat16"),
        ("float16", 320, "no backward kernel for head dim 320 in float16"),
        ("float32", 136, "no backward kernel for head dim 136 in float32"),
    ],
)
def test_what_gradients_are_refused(dtype, head_dim, message, monkeypatch):
    check = check_of_build(BUILD, "9.0", monkeypatch)
    assert_refuses(message, check, jnp.dtype(dtype), (head_dim, head_dim), is_gradient=True)


@pytest.mark.parametrize(
    ("head_dims", "capability", "message"),
    [
        ((192, 192), "9.0", None),
        ((192, 192), None, None),
        ((192, 192), "8.0", "no forward kernel for head dim 192"),
        ((190, 192), "9.0", "no forward kernel for head dim 192"),
    ],
)
def test_hopper_kernels_serve_what_portable_ones_do_not(head_dims, capability, message, monkeypatch):
    """If it is Hopper that a program is lowered for, as it may be without a GPU."""
    kernels = ["forward sm80 bfloat16 128", "forward sm90 bfloat16 512"]
    check = check_of_build(kernels, capability, monkeypatch)
    assert_refuses(message, check, jnp.dtype("bfloat16"), head_dims, is_gradient=False)


@pytest.mark.parametrize(
    ("head_dims", "message"), [((192, 128), None), ((192, 192), "no backward kernel for head dim 192")]
)
def test_the_gradient_for_192_takes_values_of_128(head_dims, message, monkeypatch):
    check = check_of_build(["backward sm80 bfloat16 128", "backward sm90 bfloat16 192"], "9.0", monkeypatch)
    assert_refuses(message, check, jnp.dtype("bfloat16"), head_dims, is_gradient=True)


def check_of_build(kernels, capability, monkeypatch):
    harness.set_local_gpus(monkeypatch, *([capability] if capability else []))
    monkeypatch.setattr(_checks._ffi, "check_gpu_kernels", lambda: None)
    monkeypatch.setattr(_checks._ffi, "build_info", lambda: {"kernels": kernels})
    return _checks.check_cuda


def assert_refuses(message, check, *args, **kwargs):
    if message is None:
        check(*args, **kwargs)
        return
    with pytest.raises(NotImplementedError, match=message):
        check(*args, **kwargs)
