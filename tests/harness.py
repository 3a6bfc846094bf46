"""What runs a row of the table and holds it against the exact result."""

import functools
import importlib.metadata
import pathlib
from typing import Any

import jax
import numpy as np
import oracle
from cases import DTYPES, Case
from closeness import assert_close

import jax_flash

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


@functools.cache
def exact(case: Case, dtype: str, naive: str | None = None) -> oracle.Result:
    """The exact result of a row (of its inputs in `dtype`), or with `naive` what that arithmetic makes of it."""
    options = case.static | case.operands
    if naive is not None:
        options["arithmetic"] = oracle.arithmetic_of(naive)
    return oracle.attention(*case.inputs(DTYPES[dtype]), **options)


def run(case: Case, dtype: str, attention=jax_flash.flash_attention, **more: Any) -> oracle.Result:
    """out, lse and the gradients of a row, computed by `attention` under jit."""
    static = case.static | more

    @jax.jit
    def forward_and_backward(q, k, v, dout, dlse, operands):
        def f(q, k, v):
            return attention(q, k, v, return_residual=True, **static, **operands)

        (out, lse), vjp = jax.vjp(f, q, k, v)
        return oracle.Result(out, lse, *vjp((dout, dlse)))

    with x64(dtype):
        result = forward_and_backward(*case.inputs(DTYPES[dtype]), case.operands)
        return oracle.Result(*(np.asarray(x) for x in result))


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
