"""Above head dim 128, Hopper's kernel for dk and dv leaves ds in memory for dq: cuda/sm90/shared_dq.cuh."""

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

case = functools.partial(cases.case, batch=2, n=4, k=2, h=256)
mla = functools.partial(cases.case, batch=2, n=4, k=2, h=192, hv=128)
EVERYTHING = dict(
    t=152,
    s=140,
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
)
EVERYTHING_BUT_BIAS = {name: x for name, x in EVERYTHING.items() if name != "bias"} | dict(
    t=151, s=141, query_seq_lengths=(151, 101), key_value_seq_lengths=(131, 141)
)
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
    case("everything", h=232, hv=208, **EVERYTHING),
    case("everything, head dim 512", h=512, hv=264, **EVERYTHING_BUT_BIAS),
    case("half of a tile", t=64, s=1000, k=4),
    case("more tiles than multiprocessors", t=8, s=64 * 140, n=1, k=1),
    # Of 192 columns, with values of 128: blocks of 48 queries, or 32, may end amid the 64 that dq's kernel takes.
    mla("192: full", t=192, s=131),
    mla("192: causal", t=328, s=328, is_causal=True),
    mla(
        "192: window, offset", t=152, s=310, is_causal=True, local_window_size=(70, 0), query_offset=(150, 50)
    ),
    mla("192: window on both sides", t=264, s=520, k=4, local_window_size=(30, 40)),
    mla("192: window and bias", t=488, s=450, local_window_size=(20, 9), bias=Bias("1NT1")),
    mla(
        "192: lengths",
        batch=3,
        t=200,
        s=190,
        query_seq_lengths=(200, 0, 65),
        key_value_seq_lengths=(80, 3, 190),
    ),
    mla("192: rows that see nothing", t=200, s=300, query_offset=(-130, 10), is_causal=True),
    mla("192: a row", t=1, s=300, n=8, k=1),
    mla("192: odd lengths, window", t=301, s=333, local_window_size=(5, 70)),
    mla("192: head dim 136, values of 64", t=136, s=150, h=136, hv=64),
    mla("192: mask", t=200, s=300, mask=Mask("BNTS", visible=0.02)),
    mla("192: segments", t=264, s=264, is_causal=True, segment_ids=Segments((0, 1, 2))),
    mla("192: everything", **EVERYTHING | dict(h=168, hv=104)),
]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
@pytest.mark.parametrize(
    "key_heads", [1, None, 0], ids=["a key head at a time", "all heads", "computed again"]
)
@pytest.mark.parametrize("dtype", quick.rows(["bfloat16", "float16"], quick=["bfloat16"]))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_is_close_to_exact(case, dtype, key_heads, deterministic, platform, monkeypatch):
    if platform == "cpu" or not harness.is_hopper():
        pytest.skip("needs Hopper")
    count = case.batch * case.num_kv_heads if key_heads is None else key_heads
    asked, heads = [], count * (case.num_heads // case.num_kv_heads)
    monkeypatch.setattr(
        _kernel_choice, "num_shared_heads", lambda *call, **named: asked.append(call) or heads
    )
    jax.clear_caches()
    got, gradients = harness.run_with_operands(case, dtype, deterministic=deterministic)
    assert asked
    harness.check(got, case, dtype, dtype)
    harness.check_operands(gradients, case, dtype, dtype)


@pytest.mark.parametrize("parts", [0, 4], ids=["", "query heads in parts"])
@pytest.mark.parametrize(("h", "hv"), [(192, 128), (256, 256), (512, 512)])
def test_slices_have_the_same_bits(h, hv, parts, platform, monkeypatch):
    if platform == "cpu" or not harness.is_hopper():
        pytest.skip("needs Hopper")
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, dout = (
        jax.random.normal(key, (3, *shape), jnp.bfloat16)
        for key, shape in zip(keys, [(200, 4, h), (210, 2, h), (210, 2, hv), (200, 4, hv)], strict=True)
    )
    monkeypatch.setattr(_kernel_choice, "num_head_parts", lambda *_: parts)

    def gradients(heads: int) -> list[np.ndarray]:
        monkeypatch.setattr(_kernel_choice, "num_shared_heads", lambda *_, **__: heads)
        jax.clear_caches()
        attend = functools.partial(jax_flash.flash_attention, is_causal=True)
        results = jax.jit(lambda *args: jax.vjp(attend, *args[:3])[1](args[3]))(q, k, v, dout)
        return [np.asarray(x, np.float32) for x in results]

    want = gradients(12)
    for heads in (2, 8):  # 8: the last slice is shorter
        for got, exact in zip(gradients(heads), want, strict=True):
            np.testing.assert_array_equal(got, exact)
    dq, dk, dv = gradients(0)
    np.testing.assert_array_equal(dk, want[1])
    np.testing.assert_array_equal(dv, want[2])
    # By another kernel.
    assert 0 < np.abs(dq - want[0]).max() < 0.01


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
        ((2, 65, 8, 256), (4096, 8), "bfloat16", False, 16),
        ((2, 4096, 16, 256), (8192, 8), "bfloat16", True, 4),  # not in pairs: 128 tiles of a key head
        ((2, 64, 8, 192), (64, 8), "bfloat16", False, 16),  # with values of 192, too, the kernel for 256
        ((1, 1 << 23, 8, 256), (1, 8), "bfloat16", False, 0),  # of 1 key, but 2 GiB in tiles
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


def test_how_many_heads_of_192_columns_share_ds(monkeypatch):
    monkeypatch.setattr(_kernel_choice, "hopper_head_dim", lambda *_: 192)
    monkeypatch.setattr(_kernel_choice, "has_hopper", lambda: True)
    q, v = (jax.core.ShapedArray((1, 6144, 16, size), jnp.dtype("bfloat16")) for size in (192, 128))
    got = _kernel_choice.num_shared_heads(q, q, v, is_causal=False, keeps_ds=False, num_head_parts=0)
    # Two times 384 tiles of 128 keys: six rounds, where three heads at a time would take eleven.
    assert got == 8
