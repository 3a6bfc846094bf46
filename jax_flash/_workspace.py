"""The workspace of the CUDA kernels, from the library's own table: `cpp/workspace.def`, which explains it.

C++ compiles the table's conditions and shapes to check a call. Python evaluates their text to make one, because its
sizes may be symbolic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from . import _library

_DTYPES = {"S32": jnp.int32, "F32": jnp.float32, "U8": jnp.uint8, "U16": jnp.uint16, "U32": jnp.uint32}


class Call(NamedTuple):
    """What the table may depend on. Sizes are ints or symbolic."""

    is_forward: bool
    is_gradient: bool
    is_backward: bool
    is_backward_tangent: bool
    is_16_bit: bool
    sum_words: int
    may_have_planes: bool
    is_deterministic: bool
    has_mask: bool
    has_segments: bool
    D: Any
    B: Any
    N: Any
    K: Any
    T: Any
    S: Any
    H: Any
    Hv: Any
    B_mask: Any
    N_mask: Any
    T_mask: Any
    S_mask: Any
    num_planes: Callable[[], int]
    num_key_parts: Callable[[], int]
    keeps_ds: Callable[[], bool]
    num_shared_heads: Callable[[], int]
    sums_dq: Callable[[], bool]
    num_head_parts: Callable[[], int]


class _Row(NamedTuple):
    dtype: Any
    condition: CodeType
    shape: CodeType


def _ceil_div(size: Any, unit: int) -> Any:
    return -(-size // unit)


def _round_up(size: Any, unit: int) -> Any:
    return _ceil_div(size, unit) * unit


def blocks(size: Any) -> Any:
    """How many blocks of the mask, segments or sums of dbias so many rows or keys have."""
    return _ceil_div(size, _library.constants()["kVisibilityBlock"])


def _names() -> dict[str, Any]:
    """What is not part of a call."""
    functions = dict(ceil_div=_ceil_div, round_up=_round_up, blocks=blocks)
    return {"__builtins__": {}, **functions, **_library.constants()}


def compile_table() -> list[_Row]:
    """The library's table, ready to evaluate.

    Raises:
      KeyError, SyntaxError, TypeError, ValueError: it is not one that this code can evaluate.
    """
    known = {*_names(), *Call._fields}
    rows = []
    for row in _library.workspace():
        condition, shape = (
            compile(text, row["name"], "eval")
            for text in (row["condition"], f"({row['shape'].strip('{}')},)")  # {B, N}, as in workspace.def
        )
        if unknown := {*condition.co_names, *shape.co_names} - known:
            raise ValueError(f"{row['name']} depends on unknown names: {unknown}.")
        rows.append(_Row(_DTYPES[row["dtype"]], condition, shape))
    return rows


_table = functools.cache(compile_table)


def arrays(call: Call) -> Iterator[jax.core.ShapedArray]:
    """The types of the workspace of a call, in order."""
    names = _names() | call._asdict()
    for row in _table():
        if eval(row.condition, names):
            yield jax.core.ShapedArray(eval(row.shape, names), jnp.dtype(row.dtype))
