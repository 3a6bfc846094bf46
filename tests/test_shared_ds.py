"""Above head dim 192, Hopper's kernel for dk and dv leaves ds in memory for dq: cuda/sm90/shared_dq.cuh."""

import functools

import cases
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from cases import Bias, Mask, Segments

import jax_flash
from jax_flash import _ffi, _kernel_choice

# Queries are a multiple of 8.
case = functools.partial(cases.case, batch=2, n=4, k=2, h=256)
CASES = [
    case("full", t=192, s=131),
    case("causal", t=328, s=328, is_causal=True),
    case("window, offset", t=152, s=310, is_causal=True, local_window_size=(70, 0), query_offset=(150, 50)),
    case("window on both sides", t=264, s=200, k=4, local_window_size=(30, 40)),
    case(
        "lengths", batch=3, t=200, s=190, query_seq_lengths=(200, 0, 65), key_value_seq_lengths=(80, 3, 190)
    ),
    case("rows that see nothing", t=200, s=140, query_offset=(-130, 0), is_causal=True),
    case("a row", t=8, s=300, n=8, k=1),
    case("head dim 200, values of 256", t=136, s=150, h=200, hv=256),
    case("head dim 512", batch=1, t=200, s=150, h=512, is_causal=True),
    case(
        "head dim 264, values of 384", batch=1, t=136, s=210, h=264, hv=384, mask=Mask("BNTS", visible=0.02)
    ),
    case("mask", t=200, s=140, mask=Mask("BNTS", visible=0.02)),
    case("heads that see nothing", t=152, s=140, mask=Mask("BNTS", hidden_heads=(0, 3))),
    case("segments", t=264, s=264, is_causal=True, segment_ids=Segments((0, 1, 2))),
    case(
        "everything",
        t=152,
        s=140,
        h=232,
        hv=208,
        scale=0.05,
        is_causal=True,
        local_window_size=(100, 3),
        logits_soft_cap=3.0,
        query_seq_lengths=(152, 101),
        key_value_seq_lengths=(131, 140),
        query_offset=(30, -20),
        bias=Bias("1NT1", dtype="float32"),
        mask=Mask("BNTS", visible=0.8),
        segment_ids=Segments((0, 1)),
        dropout_seed=1,
        dropout_rate=0.2,
    ),
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize("key_heads", [1, None], ids=["a key head at a time", "all heads"])
@pytest.mark.parametrize("dtype", quick.rows(["bfloat16", "float16"], quick=["bfloat16"]))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_close_to_exact(case, dtype, key_heads, deterministic, platform, monkeypatch):
    if platform == "cpu" or not harness.is_hopper():
        pytest.skip("needs Hopper")
    asked, count = [], key_heads or case.batch * case.num_kv_heads
    heads = count * (case.num_heads // case.num_kv_heads)
    monkeypatch.setattr(
        _kernel_choice, "num_shared_heads", lambda *call, **named: asked.append(call) or heads
    )
    jax.clear_caches()
    got, gradients = harness.run_with_operands(case, dtype, deterministic=deterministic)
    assert asked
    harness.check(got, case, dtype, dtype)
    harness.check_operands(gradients, case, dtype, dtype)


def test_slices_have_the_same_bits(platform, monkeypatch):
    if platform == "cpu" or not harness.is_hopper():
        pytest.skip("needs Hopper")
    keys = jax.random.split(jax.random.key(0), 4)
    q, dout = (jax.random.normal(key, (3, 200, 4, 256), jnp.bfloat16) for key in keys[:2])
    k, v = (jax.random.normal(key, (3, 210, 2, 256), jnp.bfloat16) for key in keys[2:])

    def gradients(heads: int):
        monkeypatch.setattr(_kernel_choice, "num_shared_heads", lambda *_, **__: heads)
        jax.clear_caches()
        attend = functools.partial(jax_flash.flash_attention, is_causal=True)
        return jax.jit(lambda *args: jax.vjp(attend, *args[:3])[1](args[3]))(q, k, v, dout)

    want = gradients(12)
    for heads in (2, 8):  # 8: the last slice is shorter
        for got, exact in zip(gradients(heads), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(exact, np.float32))


@pytest.mark.parametrize(
    ("q", "kv", "dtype", "is_causal", "heads"),
    [
        ((1, 4096, 8, 256), (4096, 8), "bfloat16", False, 8),  # 256 MiB
        ((4, 4096, 8, 256), (4096, 8), "float16", False, 8),  # four slices of 512 tiles
        (
            (2, 8192, 16, 256),
            (8192, 8),
            "bfloat16",
            True,
            4,
        ),  # 64 pairs of tiles leave half of a GPU idle, 128 do not
        ((2, 8192, 16, 256), (8192, 8), "bfloat16", False, 2),
        ((1, 8192, 8, 512), (8192, 4), "bfloat16", True, 2),  # 64 pairs for 66 clusters
        ((1, 16384, 8, 256), (16384, 4), "bfloat16", True, 2),  # 1 GiB
        ((1, 32768, 8, 256), (16384, 8), "bfloat16", False, 1),
        ((1, 32768, 8, 256), (32768, 8), "bfloat16", False, 0),  # 2 GiB of one head
        ((1, 16384, 8, 256), (16384, 1), "bfloat16", False, 0),
        ((2, 64, 8, 200), (4096, 8), "bfloat16", False, 16),
        ((2, 65, 8, 256), (4096, 8), "bfloat16", False, 0),  # rows of 130 bytes
        ((2, 64, 8, 192), (64, 8), "bfloat16", False, 16),  # with values of 192, too, the kernel for 256
        ((2, 64, 8, 128), (64, 8), "bfloat16", False, 0),
        ((2, 64, 8, 256), (64, 8), "float32", False, 0),
        ((0, 64, 8, 256), (64, 8), "bfloat16", False, 0),
        ((2, 64, 0, 256), (64, 0), "bfloat16", False, 0),
    ],
)
def test_how_many_heads_share_ds(q, kv, dtype, is_causal, heads, monkeypatch):
    monkeypatch.setattr(_kernel_choice, "has_hopper", lambda: True)
    kernels = [f"backward sm90 {name} {size}" for name in (dtype, "tf32") for size in (128, 192, 256, 512)]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    q, k = (jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape in (q, (q[0], *kv, q[3])))
    number = functools.partial(
        _kernel_choice.num_shared_heads, q, k, k, is_causal=is_causal, num_head_parts=0
    )
    assert number(keeps_ds=False) == heads
    assert number(keeps_ds=True) == 0
