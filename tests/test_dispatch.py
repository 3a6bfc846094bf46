"""Which CUDA kernels run, the settings that choose others, and the memory that they get."""

import dataclasses
import functools
import os
import shutil
import subprocess
import sys

import emulated
import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quick
from cases import CASES, DTYPES
from harness import set_local_gpus
from jax import export

import jax_flash
from jax_flash import _ffi, _kernel_choice, _passes
from jax_flash._options import AttentionOptions

F32 = jnp.float32
REFUSAL = "no CUDA kernel of this build for this head_dim"
SCRIPT = "import jax.numpy as jnp, jax_flash; x = jnp.ones((1, 8, 1, 8)); print(jax_flash.flash_attention(x, x, x))"


def attend() -> jax.Array:
    x = jnp.ones((1, 8, 1, 8))
    return jax.block_until_ready(jax_flash.flash_attention(x, x, x))


def test_settings_of_a_running_process(cuda, monkeypatch):
    monkeypatch.setenv("JAX_FLASH_KERNELS", "none")  # too late to have an effect
    np.testing.assert_array_equal(attend(), 1.0)
    with harness.cuda_settings(kernels="none"), pytest.raises(jax.errors.JaxRuntimeError, match=REFUSAL):
        attend()
    np.testing.assert_array_equal(attend(), 1.0)


def test_environment_of_a_new_process(cuda):
    environment = os.environ | {"JAX_FLASH_KERNELS": "none"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment)
    assert run.returncode != 0
    assert REFUSAL in run.stderr


def sums_dq(q, k, v, **options) -> bool:
    options = dict(num_head_parts=0, is_deterministic=False, hides_pairs=False) | options
    return _kernel_choice.sums_dq(q, k, v, **options)


@pytest.mark.parametrize(
    ("capabilities", "head_dim", "head_dim_v", "dtype", "sums"),
    [
        (["9.0"], 256, 256, "bfloat16", False),
        (["9.0", "9.0"], 136, 64, "float16", False),
        (["9.0"], 64, 136, "bfloat16", False),
        (["9.0"], 128, 128, "bfloat16", True),  # one kernel for all gradients
        (["9.0"], 96, 96, "bfloat16", True),
        (["9.0"], 32, 24, "bfloat16", True),
        (["9.0"], 96, 104, "bfloat16", True),
        (["9.0"], 192, 128, "bfloat16", False),
        (["9.0"], 192, 192, "float16", False),
        (["9.0"], 132, 256, "bfloat16", True),  # not supported by the Hopper kernels
        (["9.0"], 256, 132, "bfloat16", True),
        (["9.0"], 256, 256, "float32", True),  # no such kernel
        (["9.0", "8.0"], 256, 256, "bfloat16", True),  # the target GPU is unknown
        (["10.0"], 256, 256, "bfloat16", True),
        ([], 256, 256, "bfloat16", True),
    ],
)
def test_room_for_sums_of_dq(capabilities, head_dim, head_dim_v, dtype, sums, monkeypatch):
    """There is none if the kernels certain to run are Hopper's that leave dq to a separate kernel."""
    set_local_gpus(monkeypatch, *capabilities)
    kernels = [
        f"backward sm90 {x} {size}" for x in ("bfloat16", "float16") for size in (32, 64, 96, 128, 192, 256)
    ]
    kernels += ["forward sm90 bfloat16 256", "backward sm80 tf32 256", "backward_dq sm90 bfloat16 256"]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    q, v = (jax.core.ShapedArray((2, 100, 4, size), jnp.dtype(dtype)) for size in (head_dim, head_dim_v))
    assert sums_dq(q, q, v) == sums


@pytest.mark.parametrize(
    ("capability", "head_dim", "hides_pairs", "sums"),
    [
        ("9.0", 64, False, True),
        ("9.0", 24, False, True),
        ("9.0", 64, True, False),
        ("9.0", 72, False, False),
        ("9.0", 20, False, False),
        ("8.0", 64, False, False),
    ],
)
def test_room_for_ordered_sums_of_dq(capability, head_dim, hides_pairs, sums, monkeypatch):
    """There is some only where Hopper's kernels are certain to add in an order, and are faster for it."""
    set_local_gpus(monkeypatch, capability)
    kernels = [f"backward sm90 bfloat16 {size}" for size in (32, 64, 96)]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    q = jax.core.ShapedArray((2, 100, 4, head_dim), jnp.bfloat16)
    got = sums_dq(q, q, q, is_deterministic=True, hides_pairs=hides_pairs)
    assert got == sums


@pytest.mark.parametrize(
    ("lengths", "head_dims", "dtype", "sums"),
    [
        ((64, 64), (64, 64), "bfloat16", False),
        ((49, 1), (8, 24), "float16", False),
        ((64, 64), (32, 32), "float32", False),
        ((64, 64), (32, 33), "float32", True),
        ((65, 64), (64, 64), "bfloat16", True),
        ((64, 65), (64, 64), "bfloat16", True),
        ((64, 64), (64, 72), "bfloat16", True),
        (("t", 64), (64, 64), "bfloat16", True),  # may be longer
    ],
)
def test_room_for_sums_of_dq_of_short_sequences(lengths, head_dims, dtype, sums, monkeypatch):
    """There is none where the kernel for them runs, on any GPU."""
    set_local_gpus(monkeypatch, "8.0")
    kernels = [f"short_backward sm80 {x} {size}" for x in ("bfloat16", "float16") for size in (32, 64)]
    kernels.append("short_backward sm80 tf32 32")
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    T, S = (export.symbolic_shape(x)[0] if isinstance(x, str) else x for x in lengths)
    sizes = zip((T, S, S), (head_dims[0], *head_dims), strict=True)
    q, k, v = (jax.core.ShapedArray((2, length, 4, size), jnp.dtype(dtype)) for length, size in sizes)
    assert sums_dq(q, k, v) == sums
    assert sums_dq(q, k, v, num_head_parts=8)


@pytest.mark.parametrize(
    ("q", "kv", "is_causal", "parts"),
    [
        ((1, 4096, 32, 128), (4096, 1), True, 8),  # 16 pairs of tiles a part: 128 for 132 multiprocessors
        ((1, 4096, 32, 128), (4096, 1), False, 4),  # 32 tiles a part
        ((1, 4096, 32, 128), (4000, 1), True, 4),  # not a triangle: tiles one by one
        ((1, 4096, 32, 32), (4096, 1), False, 4),
        ((1, 4096, 32, 256), (4096, 1), False, 2),  # tiles of 64 keys
        ((1, 4096, 32, 192), (4096, 1, 128), False, 4),  # tiles of 128 keys
        ((1, 4096, 32, 192), (4096, 1, 136), False, 2),  # values too wide for that kernel
        ((1, 8064, 64, 128), (8064, 8), True, 0),  # 256 pairs of tiles
        ((1, 16384, 64, 128), (16384, 8), True, 32),  # long tiles one by one, longest first
        ((2, 8192, 32, 128), (8192, 8), True, 16),
        ((2, 8192, 32, 128), (8192, 8), False, 0),
        ((1, 4096, 16, 128), (4096, 16), False, 0),  # nothing to divide
        ((1, 512, 32, 128), (4096, 1), False, 4),
        ((1, 64, 32, 128), (4096, 1), False, 2),  # a tile goes through at least 1,024 queries
        ((1, 1, 32, 128), (4096, 1), False, 0),
        ((3, 2048, 12, 128), (1024, 2), False, 4),  # 0.73 of a round, as with 12 parts
        ((1, 4096, 32, 132), (4096, 1), False, 0),  # not supported by the Hopper kernels
        ((0, 4096, 32, 128), (4096, 1), False, 0),
        ((1, 4096, 0, 128), (4096, 0), False, 0),
        ((1, 4096, 0, 128), (4096, 2), False, 0),
        ((1, 4096, 8, 512), (4096, 1), True, 2),  # 32 pairs of tiles for 66 clusters
        ((1, 8192, 8, 512), (8192, 4), True, 0),  # 256 pairs of tiles
    ],
)
def test_parts_of_the_query_heads(q, kv, is_causal, parts, monkeypatch):
    """With few key heads, tiles take parts of the query heads, so that all multiprocessors have some."""
    set_local_gpus(monkeypatch, "9.0")
    kernels = [f"backward sm90 bfloat16 {size}" for size in (32, 64, 96, 128, 192, 256, 512)]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    head_dim_v = (*q, *kv[2:])[-1]  # q's, if there is no other
    shapes = q, (q[0], *kv[:2], q[3]), (q[0], *kv[:2], head_dim_v)
    q, k, v = (jax.core.ShapedArray(shape, jnp.bfloat16) for shape in shapes)
    assert _kernel_choice.num_head_parts(q, k, v, is_causal) == parts
    (size,) = export.symbolic_shape("b")
    symbolic = [jax.core.ShapedArray((size, *x.shape[1:]), x.dtype) for x in (q, k, v)]
    assert _kernel_choice.num_head_parts(*symbolic, is_causal) == 0
    set_local_gpus(monkeypatch, "8.0")
    assert _kernel_choice.num_head_parts(q, k, v, is_causal) == 0


@pytest.mark.parametrize(
    ("q", "num_keys", "dbias", "parts"),
    [
        ((4096, 49, 6, 32), 49, (1, 6, 49, 49), 128),  # 6 tiles each: 5.8 for a multiprocessor
        ((384, 384, 4, 32), 384, (1, 4, 384, 384), 16),
        ((4096, 384, 4, 32), 384, (1, 4, 384, 384), 16),
        ((12, 33, 3, 32), 31, (1, 3, 33, 31), 12),
        ((12, 33, 3, 32), 31, (12, 3, 33, 31), 1),  # not summed over the batch
        ((12, 33, 3, 32), 31, (1, 3, 1, 31), 1),  # in blocks: not summed over the batch, either
        ((4, 2048, 16, 64), 2048, (1, 16, 2048, 2048), 1),  # enough tiles
        ((8, 512, 4, 64), 512, (1, 1, 512, 512), 4),  # all 8 would take more memory than q
        ((0, 33, 3, 32), 31, (1, 3, 33, 31), 1),
    ],
)
def test_parts_of_the_sum_over_the_batch(q, num_keys, dbias, parts):
    """A bias that a large batch shares has few tiles, each the sum of many products."""
    q, k, dbias = (
        jax.core.ShapedArray(shape, jnp.bfloat16) for shape in (q, (q[0], num_keys, *q[2:]), dbias)
    )
    assert _kernel_choice.num_bias_parts(q, k, dbias) == parts


@pytest.mark.parametrize(
    ("q", "num_keys", "dbias", "options", "keeps"),
    [
        ((4, 4096, 16, 128), 4096, (1, 16), {}, True),
        ((4, 4096, 16, 65), 4096, (1, 16), {}, False),  # not served by the Hopper kernels
        ((4, 4096, 16, 72), 4096, (1, 16), {}, True),
        ((4, 4096, 16, 64), 4096, (1, 16), {}, False),  # to sum takes as long as another pass
        ((4, 4096, 16, 64), 4096, (4, 16), {}, True),  # nothing to sum
        ((4, 4096, 16, 136), 4096, (1, 16), {}, True),
        ((4, 4096, 16, 136), 4096, (1, 16), dict(deterministic=True), True),
        ((4, 4096, 16, 256), 4096, (1, 16), dict(is_causal=True), True),
        ((4, 4096, 16, 264), 4096, (4, 16), {}, False),  # there is no room for it
        ((4, 300, 16, 128), 301, (1, 16), {}, False),  # rows of 602 bytes
        ((8, 512, 4, 128), 512, (1, 4), {}, True),
        ((9, 512, 4, 128), 512, (1, 4), {}, False),  # 9 times the bias's size
        ((2, 512, 8, 128), 512, (1, 1), {}, False),
        ((2, 512, 4, 128), 512, (1, 1), {}, True),
        ((8, 4096, 16, 128), 4096, (8, 16), {}, True),
        ((9, 4096, 16, 128), 4096, (9, 16), {}, False),  # more than 4 GiB
        ((4, 4096, 16, 128), 4096, (1, 16), dict(is_causal=True), True),
        ((4, 4096, 16, 128), 4096, (1, 16), dict(local_window_size=(None, 0)), True),  # the same
        ((4, 4096, 16, 64), 4096, (1, 16), dict(is_causal=True), False),
        ((4, 4096, 16, 64), 4096, (4, 16), dict(is_causal=True), True),
        ((4, 4096, 16, 128), 4096, (1, 16), dict(is_causal=True, local_window_size=(9, None)), False),
        ((4, 4096, 16, 128), 4096, (1, 16), dict(local_window_size=(None, 9)), False),
        ((4, 4096, 16, 128), 4096, (1, 16), dict(deterministic=True), False),  # dq has a kernel of its own
        ((4, 4096, 16, 64), 4096, (4, 16), dict(deterministic=True), True),
        ((0, 4096, 16, 128), 4096, (0, 16), {}, False),
    ],
)
def test_gradients_of_logits_are_kept(q, num_keys, dbias, options, keeps, monkeypatch):
    set_local_gpus(monkeypatch, "9.0")
    kernels = [f"backward sm90 bfloat16 {size}" for size in (64, 96, 128, 192, 256, 512)]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    q, k, dbias = (
        jax.core.ShapedArray(shape, jnp.bfloat16)
        for shape in (q, (q[0], num_keys, *q[2:]), (*dbias, q[1], num_keys))
    )
    options = AttentionOptions.resolve(q.shape[-1], **options)
    keeps_ds = functools.partial(_kernel_choice.keeps_ds, q, k, k, dbias, options)
    assert keeps_ds(hides_pairs=False, has_offset=False) == keeps
    assert not keeps_ds(hides_pairs=True, has_offset=False)
    keeps_with_offset = keeps_ds(hides_pairs=False, has_offset=True)
    assert keeps_with_offset == (keeps and options.reach == (-1, -1))


@pytest.mark.parametrize(
    ("capabilities", "head_dims", "head_dim", "head_dim_v", "dtype", "fits"),
    [
        (["8.0", "9.0"], [64, 128, 256], 256, 256, "bfloat16", True),
        (["9.0", "8.6"], [64, 128, 256], 256, 256, "bfloat16", False),
        (["8.6"], [64, 128, 256], 129, 64, "bfloat16", False),
        (["8.6"], [64, 128, 256], 64, 129, "bfloat16", False),
        (["8.6"], [64, 128, 256], 128, 128, "float16", True),
        (["9.0"], [64, 128, 256], 128, 128, "float32", True),
        ([], [64, 128, 256], 65, 65, "float32", False),  # the target GPU is unknown
        ([], [64, 128, 256], 64, 64, "float32", True),
        (["9.0"], [64], 64, 64, "float64", True),
        (["9.0"], [64], 72, 64, "float64", False),
        (["8.9"], [64], 64, 64, "float64", False),
        ([], [128], 64, 64, "float32", False),  # the smallest kernel that serves it needs more memory
        (["9.0"], [64], 96, 96, "bfloat16", False),
        (["9.0"], [], 64, 64, "bfloat16", False),
    ],
)
def test_kernels_of_second_order(capabilities, head_dims, head_dim, head_dim_v, dtype, fits, monkeypatch):
    """Where none fits, blocks of JAX compute the derivative of the gradient."""
    set_local_gpus(monkeypatch, *capabilities)
    kernels = [
        f"backward_tangent sm80 {x} {size}"
        for x in ("bfloat16", "float16", "tf32", "float64")
        for size in head_dims
    ]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    q, v = (jax.core.ShapedArray((2, 100, 4, size), jnp.dtype(dtype)) for size in (head_dim, head_dim_v))
    assert _kernel_choice.backward_tangent_fits(q, q, v) == fits


@pytest.mark.skipif(not shutil.which("cmake"), reason="needs CMake, which writes the list of kernels")
def test_every_kernel_of_second_order_can_run(monkeypatch):
    set_local_gpus(monkeypatch, "9.0")
    kernels = [row for row in emulated.listed_kernels() if row[0] == "backward_tangent"]
    assert kernels
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": [" ".join(map(str, row)) for row in kernels]})
    for *_, arithmetic, head_dim in kernels:
        dtype = jnp.dtype("float32" if arithmetic.startswith("tf32") else arithmetic)
        q = jax.core.ShapedArray((2, 100, 4, head_dim), dtype)
        assert _kernel_choice.backward_tangent_fits(q, q, q), (arithmetic, head_dim)


@pytest.mark.parametrize(
    ("call", "planes"),
    [
        (dict(), (1, 1)),
        (dict(h=128, hv=96), (1, 1)),
        (dict(h=256), (1, 0)),  # this build has no such gradient
        (dict(h=36), (0, 0)),
        (dict(t=64), (0, 0)),
        (dict(s=64), (0, 0)),
        (dict(t=export.symbolic_shape("t")[0]), (0, 0)),  # may be short
        (dict(n=export.symbolic_shape("n")[0]), (0, 0)),
        (dict(precision="highest", in_planes=True), (2, 2)),
        (dict(precision="high", h=128, in_planes=True), (2, 2)),
        (dict(precision="highest", h=256, in_planes=True), (0, 0)),  # no such kernel
        (dict(precision="highest"), (0, 0)),
        (dict(dtype="bfloat16"), (0, 0)),
    ],
    ids=str,
)
def test_float32_as_planes(call, planes, monkeypatch):
    """Where Hopper's kernels for float32 are certain to run, forward and backward."""

    def num_planes(p, t=100, s=100, n=4, h=64, hv=64, dtype="float32", in_planes=False, **options):
        q, k, v = (
            jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape in ((t, n, h), (s, 2, h), (s, 2, hv))
        )
        options = AttentionOptions.resolve(h, **options)
        options = dataclasses.replace(options, in_planes=in_planes)
        return _kernel_choice.num_planes(p, q, k, v, options)

    passes = _passes.FORWARD, _passes.BACKWARD
    kernels = [f"{direction} sm90 tf32 {size}" for direction in ("forward", "backward") for size in (64, 128)]
    kernels += ["forward sm90 tf32 256", "forward sm90 bfloat16 128", "backward sm90 bfloat16 128"]
    kernels += [
        f"{direction} sm90 tf32x3 {size}" for direction in ("forward", "backward") for size in (64, 128)
    ]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    set_local_gpus(monkeypatch, "9.0")
    assert tuple(num_planes(p, **call) for p in passes) == planes
    assert num_planes(_passes.FORWARD_WITH_FACTOR, **call) == planes[0]
    assert num_planes(_passes.PAGED_FORWARD) == 0
    for capabilities in (["8.0"], ["9.0", "8.0"], []):
        set_local_gpus(monkeypatch, *capabilities)
        assert [num_planes(p) for p in passes] == [0, 0]


PLANES_PAY = _kernel_choice.planes_pay  # tests have another one


@pytest.mark.parametrize(
    ("call", "pay"),
    [
        (dict(t=4096, s=4096), (True, True)),
        (dict(t=4096, s=4096, is_causal=True), (True, True)),
        (dict(t=384, s=384), (False, True)),
        (dict(t=384, s=384, h=32), (True, True)),  # portable kernels fill 64 columns
        (dict(t=256, s=256), (False, False)),
        (dict(t=256, s=256, precision="highest"), (True, True)),
        (dict(t=128, s=128, precision="highest"), (False, False)),
        (dict(t=768, s=768, is_causal=True), (False, True)),
        (dict(t=4096, s=4096, local_window_size=(100, 27)), (False, False)),
        (dict(t=65, s=32768), (False, False)),  # as many keys to convert
        (dict(t=512, s=32768, n=8), (True, True)),
    ],
    ids=str,
)
def test_when_planes_pay(call, pay):
    def planes_pay(direction, t, s, n=2, h=64, **options):
        q, k = (jax.core.ShapedArray(shape, jnp.float32) for shape in ((1, t, n, h), (1, s, 2, h)))
        return PLANES_PAY(direction, q, k, AttentionOptions.resolve(h, **options))

    assert tuple(planes_pay(direction, **call) for direction in ("forward", "backward")) == pay


DECODE = [
    "decode sm80 bfloat16 64",
    "decode sm80 bfloat16 128",
    "decode sm80 bfloat16 256",
    "decode sm80 tf32 64",
    "forward sm80 bfloat16 256",
    "forward sm90 bfloat16 128",
]


def num_parts(
    t=1, s=8192, n=32, k=8, h=128, hv=128, dtype="bfloat16", operands=(), page_size=None, **options
) -> int:
    q, k, v = (jax.core.ShapedArray(shape, jnp.dtype(dtype)) for shape in ((t, n, h), (s, k, h), (s, k, hv)))
    options = AttentionOptions.resolve(h, **options)
    return _kernel_choice.num_key_parts(q, k, v, operands, options, page_size)


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (dict(s=1024), 4),
        (dict(s=4096), 16),
        (dict(t=3, n=24, s=4096), 16),  # 9 rows of a key head
        (dict(t=3, n=24, s=4097), 9),
        (dict(s=4097), 17),
        (dict(s=8191), 32),
        (dict(s=8192), 16),
        (dict(s=16383), 32),
        (dict(s=16384), 16),
        (dict(s=32768), 32),
        (dict(s=32769), 49),  # a round of 396 thread blocks
        (dict(s=65536), 49),
        (dict(s=100_000), 99),
        (dict(s=131072), 99),
        (dict(t=2, n=32, s=8192), 16),  # 8 rows of a key head
        (dict(t=3, n=24, s=8192), 8),
        (dict(s=256), 1),
        (dict(s=257), 2),
        (dict(s=1), 1),
        (dict(t=16), 8),
        (dict(t=17), 0),
        (dict(t=16, n=128), 8),  # 256 rows of a key head: four tiles
        (dict(t=16, n=136), 0),
        (dict(t=16, n=33, k=11), 8),
        (dict(s=131072, local_window_size=(500, 0)), 3),
        (dict(s=131072, local_window_size=(500, None), is_causal=True), 3),
        (dict(s=131072, local_window_size=(500, None)), 99),
        (dict(s=300, local_window_size=500), 2),
        (dict(h=256), 16),
        (dict(h=256, s=8193), 9),
        (dict(h=256, s=65536), 64),  # two thread blocks a multiprocessor
        (dict(t=5, s=65536), 64),
        (dict(hv=257), 0),
        (dict(h=64, hv=64, dtype="float32"), 16),
        (dict(dtype="float32"), 0),  # no such kernel
        (dict(operands=("dropout_seeds",)), 0),
        (dict(operands=("bias", "mask")), 16),
        (dict(s=0), 0),
        (dict(t=0), 0),
        (dict(n=0, k=0), 0),
    ],
)
def test_number_of_parts(call, parts, monkeypatch):
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": DECODE})
    set_local_gpus(monkeypatch)
    assert num_parts(**call) == parts


@pytest.mark.parametrize(
    ("call", "parts", "others"),
    [
        (dict(t=16, n=64), 4, 8),  # 128 rows of a key head, a tile of Hopper's kernel
        (dict(t=16, n=56), 8, 8),  # a tile would have a row of each query
        (dict(t=16, n=48), 8, 8),
        (dict(t=16, n=128), 4, 8),
        (dict(t=8, n=16, k=1), 4, 8),
        (dict(t=16, n=64, s=131072), 16, 128),
        (dict(t=16, n=64, s=2048), 2, 8),
        (dict(t=16, n=64, s=2047), 8, 8),  # few keys
        (dict(t=16, n=64, page_size=16), 4, 8),
        (dict(t=16, n=64, page_size=12), 8, 8),  # which TMA does not take
        (dict(t=16, n=64, s=131072, is_causal=True, local_window_size=(5000, 0)), 2, 10),
        (dict(t=16, n=64, operands=("key_value_seq_lengths", "query_offset", "sinks")), 4, 8),
        (dict(t=16, n=64, operands=("mask",)), 8, 8),
        (dict(t=16, n=64, h=256), 8, 8),
        (dict(t=16, n=64, logits_soft_cap=3.0), 8, 8),
    ],
)
def test_number_of_parts_of_few_queries_of_many_heads(call, parts, others, monkeypatch):
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": DECODE})
    for capability, expected in (("9.0", parts), ("8.0", others)):
        set_local_gpus(monkeypatch, capability)
        assert num_parts(**call) == expected


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (dict(t=512, s=32768), 1),  # 128 tiles for 132 multiprocessors
        (dict(t=512, s=131072), 1),
        (dict(t=512, s=8192), 1),
        (dict(t=384, s=8191), 0),  # 96 tiles of 128 rows, or 64 of 192
        (dict(t=384, s=32768), 4),
        (dict(t=17, s=1000, n=256), 1),
        (dict(t=16, s=1000, n=256), 0),  # the kernel for few queries would take it
        (dict(t=512, s=8191), 0),  # few keys for so many queries
        (dict(t=512, s=32768, n=8), 4),  # 32 tiles
        (dict(t=512, s=32768, n=24), 4),  # one row of a query, not three
        (dict(t=300, s=32768), 3),  # 80 tiles
        (dict(t=300, s=8192), 1),
        (dict(t=100, s=8191), 1),
        (dict(t=100, s=8191, n=8), 0),  # in whole tiles: no head shares a key head
        (dict(t=100, s=8192), 2),
        (dict(t=1024, s=16384), 1),
        (dict(t=1025, s=131072), 0),
        (dict(t=256, s=131072), 2),
        (dict(t=128, s=131072), 4),
        (dict(t=64, s=131072), 8),
        (dict(t=24, s=131072), 16),
        (dict(t=17, s=8192, n=40), 3),
        (dict(t=16, s=8192, n=136), 3),  # more rows than the kernel for few queries takes
        (dict(t=512, s=32768, is_causal=True), 1),
        (dict(t=512, s=32768, is_causal=True, local_window_size=(1000, 0)), 0),
        (dict(t=512, s=32768, is_causal=True, local_window_size=(20000, 0)), 0),
        (dict(t=512, s=32768, page_size=64), 1),
        (dict(t=512, s=32768, page_size=12), 0),
        (dict(t=128, s=32768, n=64, h=64, hv=64), 4),  # tiles of 256 rows
        (dict(t=1024, s=131072, n=128), 0),
        (dict(t=512, s=32768, local_window_size=(None, 0)), 1),
        (dict(t=512, s=32768, operands=("key_value_seq_lengths", "sinks", "query_offset")), 1),
        (dict(t=512, s=32768, operands=("mask",)), 0),
        (dict(t=512, s=32768, operands=("scale_factor",)), 0),
        (dict(t=512, s=32768, logits_soft_cap=3.0), 0),
        (dict(t=512, s=32768, scale=-1.0), 0),
        (dict(t=512, s=32768, h=100), 0),  # which TMA does not take
        (dict(t=512, s=32768, h=192, hv=192), 0),  # no such kernel
        (dict(t=512, s=32768, dtype="float32"), 0),
    ],
)
def test_number_of_parts_of_a_chunk(call, parts, monkeypatch):
    """On Hopper; elsewhere keys are split for few queries only."""
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": DECODE})
    for capability, expected in (("9.0", parts), ("8.0", 0)):
        set_local_gpus(monkeypatch, capability)
        assert num_parts(**call) == expected


@pytest.mark.parametrize(
    "name",
    [case.name for case in CASES if case.name.startswith(("chunk", "few queries of many", "one part"))],
)
def test_cases_of_chunks_are_split_on_hopper(name, monkeypatch):
    case = next(case for case in CASES if case.name == name)
    kernels = [f"{kind} bfloat16 128" for kind in ("decode sm80", "forward sm90")]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    set_local_gpus(monkeypatch, "9.0")
    sizes = case.seqlen_q, case.seqlen_kv, case.num_heads, case.num_kv_heads
    head_dims = dict(h=case.head_dim, hv=case.head_dim_v or case.head_dim)
    parts = num_parts(*sizes, **head_dims, operands=tuple(case.operands(np.float32)), **case.static)
    assert parts == 1 if name.startswith("one part") else parts > 1


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (dict(s=512), 1),
        (dict(s=513), 2),
        (dict(s=8192), 16),
        (dict(s=16383), 32),
        (dict(s=16384), 16),
        (dict(s=32768), 32),
        (dict(s=32769), 33),  # with 8 key heads 264 thread blocks
        (dict(s=65536), 66),
        (dict(s=100_000), 66),
        (dict(s=131072), 99),
        (dict(t=3, n=24, s=4096), 8),  # 9 rows of a key head
        (dict(t=4, s=4096), 8),  # 16
        (dict(s=4096, logits_soft_cap=20.0), 8),
        (dict(s=4096, page_size=12), 8),
        (dict(h=64, hv=64, s=4096), 8),
        (dict(s=131072, local_window_size=(500, 0)), 2),
        # The portable kernel
        (dict(t=5, s=4096), 16),
        (dict(s=4096, operands=("bias",)), 16),
        (dict(h=100, hv=100, s=4096), 16),
        (dict(h=256, hv=256, s=4096), 16),
    ],
)
def test_number_of_parts_on_hopper(call, parts, monkeypatch):
    kernels = [*DECODE, "decode sm90 bfloat16 64", "decode sm90 bfloat16 128"]
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": kernels})
    set_local_gpus(monkeypatch, "9.0")
    assert num_parts(**call) == parts


def test_number_of_parts_of_symbolic_sizes(monkeypatch):
    monkeypatch.setattr(_ffi, "build_info", lambda: {"kernels": DECODE})
    t, s = export.symbolic_shape("t, s")
    assert num_parts(t=t) == num_parts(s=s) == 0


@pytest.mark.parametrize(
    ("parts", "size", "head_dim", "head_dim_v"),
    [
        (4, 256, 24, 30),
        (2, 640, 24, 30),
        (20, 64, 24, 30),
        (3, 704, 250, 30),
        (66, 32, 250, 30),
        (4, 256, 24, 32),  # where 8 divides both, Hopper's kernel for up to 16 rows
        (3, 704, 128, 72),
        (20, 64, 64, 128),
    ],
)
@pytest.mark.parametrize("queries", [1, 8])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_in_workspace(dtype, queries, parts, size, head_dim, head_dim_v, platform):
    """Each part has the sums of its own keys: a sequence's keys are divided evenly, into no less than 256."""
    if platform == "cpu":
        pytest.skip("has no workspace")
    keys = parts * size - 7
    lengths = keys, size + 5, 0
    rng = np.random.default_rng(0)
    shapes = (3, queries, 4, head_dim), (3, keys, 1, head_dim), (3, keys, 1, head_dim_v)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)
    types = [
        jax.ShapeDtypeStruct((3, queries, 4, head_dim_v), q.dtype),
        jax.ShapeDtypeStruct(shapes[0][:-1], F32),
    ]
    if dtype == "float32":  # no planes
        types.append(jax.ShapeDtypeStruct((0, 3, 1, 20 + 4 * head_dim_v + 2 * head_dim), jnp.int32))
        types += [jax.ShapeDtypeStruct((0, *x.shape[1:]), jnp.uint16) for x in (q, k, v)]
    else:
        types.append(jax.ShapeDtypeStruct((1,), jnp.int32))
    columns = -(-head_dim_v // 4) * 4
    types += [jax.ShapeDtypeStruct((parts, 3, queries, 4, columns + 4), F32)]
    options = AttentionOptions.resolve(head_dim, precision="highest")
    f = jax.ffi.ffi_call("jax_flash_forward" + "_emulated" * ("JAX_FLASH_EMULATE" in os.environ), types)
    call = jax.jit(lambda *args: f(*args, operands="key_value_seq_lengths", **options.attributes()))
    with harness.cuda_settings(tile="short"):  # no thread block takes all parts of a sequence
        out, lse, *_, got = jax.block_until_ready(call(q, k, v, jnp.asarray(lengths, jnp.int32)))

    sums, maxima, totals = (
        np.asarray(x) for x in (got[..., :head_dim_v], got[..., columns], got[..., columns + 1])
    )
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = options.scale * np.einsum("btnh,bskh->btns", q, k)
    tolerance = 2.0**-6 if dtype == "bfloat16" else 2e-6 * np.sqrt(max(256, size))  # as harness.assert_close
    is_on_hopper = harness.is_hopper() and dtype == "bfloat16" and queries == 1 and head_dim_v % 8 == 0
    kernel_columns = next(x for x in (64, 128, 256) if x >= max(head_dim, head_dim_v))
    block = 128 if is_on_hopper else 64 if kernel_columns * jnp.dtype(dtype).itemsize <= 256 else 32
    for b, length in enumerate(lengths):
        part_size = max(256, -(-length // (block * parts)) * block)
        for part in range(parts):
            own = slice(part_size * part, min(part_size * (part + 1), length))
            if own.start >= length:
                assert not totals[part, b].any()
                continue
            p = np.exp(scores[b, :, :, own] - np.log(2.0) * maxima[part, b, ..., None])
            np.testing.assert_allclose(totals[part, b], p.sum(-1), rtol=1e-5)
            want = np.einsum("tns,se->tne", p, v[b, own, 0])
            largest = np.sqrt((p**2).sum(-1).max()) if dtype == "bfloat16" else max(1, np.abs(want).max())
            np.testing.assert_allclose(sums[part, b], want, rtol=0, atol=tolerance * largest)
        if length:
            p = np.exp(scores[b, :, :, :length])
            want = np.einsum("tns,se->tne", p, v[b, :length, 0]) / p.sum(-1)[..., None]
            np.testing.assert_allclose(np.asarray(out[b], np.float64), want, atol=tolerance, rtol=tolerance)
            np.testing.assert_allclose(lse[b], np.log(p.sum(-1)), rtol=1e-5, atol=1e-5)
    assert not out[2].any()
    assert np.isneginf(lse[2]).all()


CHUNK_OPTIONS = {
    "none": {},
    "causal": dict(is_causal=True),
    "causal, window": dict(is_causal=True, window_left=60),
    "window": dict(window_left=30, window_right=20),
}


@pytest.mark.parametrize("page_size", quick.rows([0, 16, 24], quick=[0, 16]))
@pytest.mark.parametrize("options", quick.rows(CHUNK_OPTIONS, quick=["causal"]))
@pytest.mark.parametrize("parts", quick.rows([1, 2, 3, 7, 40], quick=[1, 3]))
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "heads", "key_heads"),
    quick.rows(
        {
            f"{head_dim}, {head_dim_v}, {heads} heads on {key_heads}": (
                head_dim,
                head_dim_v,
                heads,
                key_heads,
            )
            for head_dim, head_dim_v, heads, key_heads in (
                (32, 24, 2, 1),
                (64, 64, 3, 3),
                (64, 64, 8, 1),
                (128, 40, 12, 2),
                (128, 128, 3, 1),
                (192, 128, 4, 1),
                (256, 256, 2, 1),
            )
        },
        quick=["128, 40, 12 heads on 2"],
        unpack=True,
    ),
)
def test_any_number_of_parts_of_a_chunk(
    head_dim, head_dim_v, heads, key_heads, parts, options, page_size, platform
):
    """Hopper's kernel splits the keys as it is told, into more parts than there are blocks, too.

    Its tiles have the rows of as many heads of a key head as divide 64: all, 2 of 6, 1 of 3.
    """
    if platform == "cpu":
        pytest.skip("has no workspace")
    batch, queries, keys, lengths = 4, 330, 768, np.array([768, 333, 0, 700], np.int32)
    rng = np.random.default_rng(0)
    q, sinks = rng.standard_normal((batch, queries, heads, head_dim)), rng.standard_normal((batch, heads))
    k, v = (
        rng.standard_normal((batch, keys, key_heads, size)).astype(DTYPES["bfloat16"])
        for size in (head_dim, head_dim_v)
    )
    operands = dict(
        query_seq_lengths=np.array([330, 200, 330, 330], np.int32),
        key_value_seq_lengths=lengths,
        query_offset=np.array([438, -100, 5, 2**30], np.int32),
        sinks=sinks.astype(np.float32),
    )
    if page_size:
        k, v, page_indices = harness.in_pages(k, v, lengths, page_size)
        operands = dict(page_indices=page_indices) | operands
    args = q.astype(DTYPES["bfloat16"]), k, v, *operands.values()
    attributes = AttentionOptions.resolve(head_dim).attributes() | options

    def run(number):
        out, lse = (batch, queries, heads, head_dim_v), (batch, queries, heads)
        # A single part leaves nothing.
        of_parts = (number, 0 if number == 1 else batch, *lse[1:], -(-head_dim_v // 4) * 4 + 4)
        types = (out, jnp.bfloat16), (lse, F32), ((1,), jnp.int32), (of_parts, F32)
        f = jax.ffi.ffi_call(
            "jax_flash_forward" + "_emulated" * ("JAX_FLASH_EMULATE" in os.environ),
            [jax.ShapeDtypeStruct(*x) for x in types],
        )
        call = jax.jit(lambda *args: f(*args, operands=",".join(operands), **attributes))
        out, lse, _, in_parts = (np.asarray(x) for x in call(*args))
        return out.astype(np.float64), lse, in_parts[..., -4], in_parts[..., -3]

    (want, want_lse, *_), (out, lse, maxima, sums) = run(0), run(parts)
    np.testing.assert_allclose(out, want, atol=2.0**-7, rtol=2.0**-6)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=1e-5)
    if parts > 1 and _ffi.local_gpus()[0].compute_capability == "9.0":
        exponents = np.where(sums == 0, -np.inf, np.log(2.0) * maxima + np.log(np.where(sums == 0, 1, sums)))
        total = np.logaddexp.reduce([*exponents, np.broadcast_to(sinks[:, None], lse.shape)])
        np.testing.assert_allclose(lse, total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernels", ["all", "sm80"])
@pytest.mark.parametrize("capabilities", [["9.0"], []], ids=["without room", "with room"])
@pytest.mark.parametrize("name", ["head dim 256", "tiles, mask, head dim 256"])
def test_gradients_with_and_without_room_for_sums_of_dq(name, capabilities, kernels, cuda, monkeypatch):
    """Gradients are right, whatever the program was lowered for."""
    set_local_gpus(monkeypatch, *capabilities)
    case = next(case for case in CASES if case.name == name)
    with harness.cuda_settings(kernels="" if kernels == "all" else kernels):
        harness.check(harness.run(case, "bfloat16"), case, "bfloat16", "bfloat16")
