"""Runs rows of the table of cases and compares them with the exact results."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import math
import pathlib
import shutil
import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import oracle
import pytest
from cases import DTYPES, Case
from closeness import assert_close
from emulated import kernel_names
from jax.sharding import Mesh

import jax_flash
from jax_flash import _dropout, _ffi, _library

LIBRARY = pathlib.Path(importlib.metadata.distribution("jax_flash").locate_file("jax_flash/libjax_flash.so"))

# What each platform computes and how it is judged: dtype, precision, kind in the closeness rule.
KINDS = {
    "cpu": [
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "float16"),
        ("float32", None, "float32"),
        ("float64", None, "float64"),
    ],
    "cuda": [
        ("bfloat16", None, "bfloat16"),
        ("float16", None, "float16"),
        ("float32", "default", "tfloat32"),
        ("float32", "highest", "float32"),
        ("float64", None, "float64"),
    ],
}


def kind(platform: str, index: int) -> tuple[str, str | None, str]:
    """Skips the test where the platform has fewer kinds."""
    if index >= len(KINDS[platform]):
        pytest.skip(f"{platform} has {len(KINDS[platform])} kinds")
    return KINDS[platform][index]


def most_exact(platform: str, case: Case) -> tuple[str, str | None, str]:
    """The last kind that computes the case: on a GPU not float64 with head dims above 128."""
    is_wide = max(case.head_dim, case.head_dim_v or 0) > 128
    return KINDS[platform][-2 if is_wide and platform == "cuda" else -1]


# From most to least exact.
RULES = ["float64", "float32", "tfloat32", "float16", "bfloat16"]
_DIFFERENTIABLE = ("bias", "alibi", "sinks")


def exact(case: Case, dtype: str, naive: str | None = None) -> oracle.Result:
    """The exact result of a row with inputs in `dtype`, or with `naive` the result in that arithmetic."""
    return exact_with_operands(case, dtype, naive)[0]


@functools.cache
def exact_with_operands(
    case: Case, dtype: str, naive: str | None
) -> tuple[oracle.Result, dict[str, np.ndarray]]:
    """Like `exact`, with the gradients of the row's operands by name."""
    options = case.static | case.operands(DTYPES[dtype])
    if "dropout_seed" in options:
        options["keep"] = kept(case, int(options.pop("dropout_seed")))
    if naive is not None:
        options["arithmetic"] = oracle.arithmetic_of(naive)
    gradients: dict[str, np.ndarray] = {}
    return oracle.attention(*case.inputs(DTYPES[dtype]), **options, gradients=gradients), gradients


@functools.lru_cache(maxsize=100)
def kept(case: Case, seed: int) -> np.ndarray:
    """The pairs that dropout keeps: bool [B, N, T, S]."""
    seeds = _dropout.make_seeds(jax.random.key(seed), case.batch, case.num_heads)
    return oracle.keep(seeds, case.static["dropout_rate"], case.seqlen_q, case.seqlen_kv)


def call(q: Any, k: Any, v: Any, operands: dict[str, Any], **static: Any) -> Any:
    """Calls the function under test; the operands have their names in the table."""
    operands = dict(operands)
    if "alibi" in operands:
        operands["bias"] = jax_flash.Alibi(operands.pop("alibi"))
    if "dropout_seed" in operands:
        operands["dropout_rng"] = jax.random.key(operands.pop("dropout_seed"))
    return jax_flash.flash_attention(q, k, v, **static, **operands)


def run(case: Case, dtype: str, **more: Any) -> oracle.Result:
    """The out, lse and gradients of q, k and v of a row, computed under jit."""
    return run_with_operands(case, dtype, **more)[0]


def run_with_operands(case: Case, dtype: str, **more: Any) -> tuple[oracle.Result, dict[str, np.ndarray]]:
    """Like `run`, with the gradients of the row's operands by name."""
    static = case.static | more

    @jax.jit
    def forward_and_backward(q, k, v, dout, dlse, operands):
        differentiable = {name: operands[name] for name in _DIFFERENTIABLE if name in operands}

        def f(q, k, v, differentiable):
            return call(q, k, v, operands | differentiable, return_residual=True, **static)

        (out, lse), vjp = jax.vjp(f, q, k, v, differentiable)
        dq, dk, dv, gradients = vjp((dout, dlse))
        return oracle.Result(out, lse, dq, dk, dv), gradients

    with x64(dtype):
        results = forward_and_backward(*case.inputs(DTYPES[dtype]), case.operands(DTYPES[dtype]))
        return jax.tree.map(np.asarray, results)


def set_local_gpus(monkeypatch: pytest.MonkeyPatch, *capabilities: str, kind: str = "a GPU") -> None:
    """Lets this process have such GPUs, and a library with all kernels, as far as the choice of kernels goes."""
    gpus = [types.SimpleNamespace(device_kind=kind, compute_capability=x) for x in capabilities]
    monkeypatch.setattr(_ffi, "local_gpus", lambda: gpus)
    info = _library.build_info()
    if info["archs"]:
        if not shutil.which("cmake"):
            pytest.skip("needs CMake, which reads the list of kernels")
        info |= {"archs": "80;90", "kernels": kernel_names()}
        monkeypatch.setattr(_library, "build_info", lambda: info)


def mesh_of(*sizes: int, names: tuple[str, ...] = ("sequence",), **axis_types: Any) -> Mesh:
    """A mesh of devices of the test's platform."""
    devices = jax.devices(jax.config.jax_default_device.platform)
    if len(devices) < math.prod(sizes):
        pytest.skip(f"needs {math.prod(sizes)} devices")
    return Mesh(np.array(devices[: math.prod(sizes)]).reshape(sizes), names, **axis_types)


def fitted(case: Case, num_parts: int) -> Case:
    """The case with lengths that can be divided into so many parts, also where it has dropout."""
    unit = num_parts * (16 if "dropout_rate" in case.static else 1)
    lengths = (-(-length // unit) * unit for length in (case.seqlen_q, case.seqlen_kv))
    return dataclasses.replace(case, **dict(zip(("seqlen_q", "seqlen_kv"), lengths, strict=True)))


@contextlib.contextmanager
def cuda_settings(
    *, kernels: str | None = None, tile: str | None = None, shared_memory_per_block: str | None = None
) -> Iterator[None]:
    """A context in which other CUDA kernels run, as with the environment variables in docs/testing.md.

    The library reads those when it is loaded. They apply to settings that are None, and to all after the context.
    """
    settings = (kernels, tile, shared_memory_per_block)
    jax_flash._library.set_test_settings(*settings)
    try:
        yield
    finally:
        jax_flash._library.set_test_settings()


def is_hopper() -> bool:
    """Whether there are GPUs, all of them Hopper's."""
    gpus = _ffi.local_gpus()
    return bool(gpus and all(gpu.compute_capability == "9.0" for gpu in gpus))


def has_planes() -> bool:
    """Whether float32 at the default precision runs as planes (cuda/planes.cuh) on a GPU."""
    return is_hopper() and any(" sm90 tf32 " in name for name in _ffi.build_info()["kernels"])


def without_planes():
    """A context in which the portable kernels compute all of float32, for tests that compare bits."""
    return cuda_settings(kernels="sm80") if has_planes() else contextlib.nullcontext()


def x64(dtype: str):
    """A context in which arrays of `dtype` exist."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(dtype == "float64")
    from jax.experimental import enable_x64

    return enable_x64(dtype == "float64")


def check(
    got: oracle.Result,
    case: Case,
    dtype: str,
    kind: str,
    names: tuple[str, ...] = oracle.Result._fields,
    is_rounded: bool = False,
):
    """Compare the results of a row with the exact ones.

    If `is_rounded`, dp or delta carries a rounding to `dtype` that the baseline's do not: out was merged from rounded
    parts, or dp came out of a product in `dtype`. Where the two cancel, this adds to the errors of dq and dk.
    """
    want, naive = exact(case, dtype), None
    terms = largest_dp(case, dtype) if is_rounded else 0.0
    if kind in ("bfloat16", "float16", "tfloat32"):
        naive = exact(case, dtype, kind)
    for name in names:
        # lse is float32 for 16-bit inputs, too, and their products are exact in float32.
        rule = "float32" if name == "lse" and kind in ("bfloat16", "float16") else kind
        assert_close(
            getattr(got, name),
            getattr(want, name),
            rule,
            num_keys=case.seqlen_kv,
            naive=None if naive is None else getattr(naive, name),
            cancelling=terms if name in ("dq", "dk") else 0.0,
            name=f"{name} of {case}",
        )


def largest_dp(case: Case, dtype: str) -> float:
    """The largest |dout_i| |v_j|."""
    _, _, v, dout, _ = case.inputs(DTYPES[dtype])
    return math.prod(np.linalg.norm(x.astype(np.float64), axis=-1).max(initial=0) for x in (dout, v))


def check_operands(
    got: dict[str, np.ndarray], case: Case, dtype: str, kind: str, is_rounded: bool = False
) -> None:
    """Compare the gradients of a row's operands with the exact ones.

    If `is_rounded`, the rounding that `check` describes adds to the errors of a bias's gradient, too.
    """
    operands = case.operands(DTYPES[dtype])
    assert got.keys() == operands.keys() & set(_DIFFERENTIABLE)
    for name, x in got.items():
        like = operands[name]
        assert (x.dtype, x.shape) == (like.dtype, like.shape)
        # The sum is rounded to the operand's dtype, which may be less exact.
        rule = max(kind, like.dtype.name, key=RULES.index)
        want, naive = exact_with_operands(case, dtype, None)[1][name], None
        if rule in ("bfloat16", "float16", "tfloat32"):
            naive = exact_with_operands(case, dtype, rule)[1][name]
        pairs = case.batch * case.num_heads * case.seqlen_q * case.seqlen_kv
        assert_close(
            rows(x),
            rows(want),
            rule,
            num_keys=max(case.seqlen_kv, pairs // x.size),  # or the number of terms of the sum
            naive=None if naive is None else rows(naive),
            cancelling=largest_dp(case, dtype) if is_rounded and name == "bias" else 0.0,
            name=f"gradient of {name} of {case}",
        )


def rows(x: np.ndarray) -> np.ndarray:
    """Without trailing axes of size 1, so that the axis before them is a row."""
    while x.ndim > 1 and x.shape[-1] == 1:
        x = x[..., 0]
    return x


# Elements of page_indices that are not to be read.
_WILD = np.array([2**31 - 1, -1, -(2**31), 10**6], np.int32)


def in_pages(k: np.ndarray, v: np.ndarray, lengths: np.ndarray, page_size: int):
    """Pages with the first keys of each sequence and NaN elsewhere, and the indices of these pages."""
    batch, seqlen = k.shape[:2]
    per_sequence = seqlen // page_size
    rng = np.random.default_rng(page_size)
    indices = rng.permutation(batch * per_sequence + 3)[: batch * per_sequence].reshape(batch, per_sequence)
    counts = np.arange(seqlen) < lengths[:, None]
    pages = []
    for x in (k, v):
        x = np.where(counts[..., None, None], x, x.dtype.type(np.nan))
        pool = np.full((batch * per_sequence + 3, page_size, *x.shape[2:]), np.nan, x.dtype)
        pool[indices] = x.reshape(batch, per_sequence, page_size, *x.shape[2:])
        pages.append(pool)
    is_read = page_size * np.arange(per_sequence) < lengths[:, None]
    wild = np.resize(_WILD, indices.shape)
    return *pages, np.where(is_read, indices, wild).astype(np.int32)
