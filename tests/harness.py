"""What runs a row of the table and holds it against the exact result."""

import contextlib
import ctypes
import functools
import importlib.metadata
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import oracle
from cases import DTYPES, Case
from closeness import assert_close

import jax_flash
from jax_flash import _dropout

LIBRARY = pathlib.Path(importlib.metadata.distribution("jax_flash").locate_file("jax_flash/libjax_flash.so"))

# What each platform computes, and how it is judged: dtype, precision, kind in the closeness rule.
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
    ],
}


# From the most to the least exact.
RULES = ["float64", "float32", "tfloat32", "float16", "bfloat16"]
_DIFFERENTIABLE = ("bias", "alibi", "sinks")


def exact(case: Case, dtype: str, naive: str | None = None) -> oracle.Result:
    """The exact result of a row (of its inputs in `dtype`), or with `naive` what that arithmetic makes of it."""
    return _exact(case, dtype, naive)[0]


@functools.cache
def _exact(case: Case, dtype: str, naive: str | None) -> tuple[oracle.Result, dict[str, np.ndarray]]:
    """The result, and the gradients of the row's operands by their names."""
    options = case.static | case.operands(DTYPES[dtype])
    if "dropout_seed" in options:
        options["keep"] = kept(case, int(options.pop("dropout_seed")))
    if naive is not None:
        options["arithmetic"] = oracle.arithmetic_of(naive)
    gradients: dict[str, np.ndarray] = {}
    return oracle.attention(*case.inputs(DTYPES[dtype]), **options, gradients=gradients), gradients


@functools.lru_cache(maxsize=100)
def kept(case: Case, seed: int) -> np.ndarray:
    """What dropout keeps: bool [B, N, T, S]."""
    seeds = _dropout.make_seeds(jax.random.key(seed), case.batch, case.num_heads)
    return oracle.keep(seeds, case.static["dropout_rate"], case.seqlen_q, case.seqlen_kv)


def call(q: Any, k: Any, v: Any, operands: dict[str, Any], **static: Any) -> Any:
    """The function under test, of a row's operands under the names that the table has for them."""
    operands = dict(operands)
    if "alibi" in operands:
        operands["bias"] = jax_flash.Alibi(operands.pop("alibi"))
    if "dropout_seed" in operands:
        operands["dropout_rng"] = jax.random.key(operands.pop("dropout_seed"))
    return jax_flash.flash_attention(q, k, v, **static, **operands)


def run(case: Case, dtype: str, **more: Any) -> oracle.Result:
    """out, lse and the gradients of q, k and v of a row, computed under jit."""
    return run_with_operands(case, dtype, **more)[0]


def run_with_operands(case: Case, dtype: str, **more: Any) -> tuple[oracle.Result, dict[str, np.ndarray]]:
    """The same, and the gradients of the row's operands by their names."""
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


@contextlib.contextmanager
def cuda_settings(
    *, kernels: str | None = None, tile: str | None = None, shared_memory_per_block: str | None = None
) -> Iterator[None]:
    """A context in which other CUDA kernels run, as with the environment variables of docs/testing.md.

    Those count only when the library is loaded. What is None, and all after the context, is as they said.
    """
    settings = (kernels, tile, shared_memory_per_block)
    set_settings = jax_flash._library._dll.JaxFlashSetTestSettings
    set_settings.argtypes = [ctypes.c_char_p] * len(settings)
    set_settings.restype = None
    set_settings(*(setting if setting is None else setting.encode() for setting in settings))
    try:
        yield
    finally:
        set_settings(None, None, None)


def x64(dtype: str):
    """A context in which arrays of `dtype` exist."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(dtype == "float64")
    from jax.experimental import enable_x64

    return enable_x64(dtype == "float64")


def check(
    got: oracle.Result, case: Case, dtype: str, kind: str, names: tuple[str, ...] = oracle.Result._fields
):
    """Hold results of a row against the exact ones."""
    want, naive = exact(case, dtype), None
    if kind in ("bfloat16", "float16", "tfloat32"):
        naive = exact(case, dtype, kind)
    for name in names:
        # lse is float32 whatever the inputs are; 16-bit products are exact in it.
        rule = "float32" if name == "lse" and kind in ("bfloat16", "float16") else kind
        assert_close(
            getattr(got, name),
            getattr(want, name),
            rule,
            num_keys=case.seqlen_kv,
            naive=None if naive is None else getattr(naive, name),
            name=f"{name} of {case}",
        )


def check_operands(got: dict[str, np.ndarray], case: Case, dtype: str, kind: str):
    """Hold the gradients of a row's operands against the exact ones."""
    operands = case.operands(DTYPES[dtype])
    assert got.keys() == operands.keys() & set(_DIFFERENTIABLE)
    for name, x in got.items():
        like = operands[name]
        assert (x.dtype, x.shape) == (like.dtype, like.shape)
        # A sum is rounded to the operand's dtype, where that is the less exact one.
        rule = max(kind, like.dtype.name, key=RULES.index)
        want, naive = _exact(case, dtype, None)[1][name], None
        if rule in ("bfloat16", "float16", "tfloat32"):
            naive = _exact(case, dtype, rule)[1][name]
        pairs = case.batch * case.num_heads * case.seqlen_q * case.seqlen_kv
        assert_close(
            rows(x),
            rows(want),
            rule,
            num_keys=max(case.seqlen_kv, pairs // x.size),  # or of whatever else it sums over
            naive=None if naive is None else rows(naive),
            name=f"gradient of {name} of {case}",
        )


def rows(x: np.ndarray) -> np.ndarray:
    """Without the last axes that have one element: what lies before them is a row."""
    while x.ndim > 1 and x.shape[-1] == 1:
        x = x[..., 0]
    return x
