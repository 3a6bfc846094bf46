"""The arrays of the attention op by name: operands, in the order in which the kernels take them, and derivatives."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that a call may have. The library has the same table, `cpp/operands.def`; import compares the two."""

    name: str
    # Behind the batch axes: t query rows, s keys, p pages of a sequence, n query heads, w words of a seed.
    axes: str
    # "lse" is the dtype of the log-sum-exp, "floating" any that query may have.
    dtype: str
    # Any axis, batch axes included, may have size 1 and is then broadcast.
    is_broadcastable: bool = False
    # Not compared: the library does not know. It has a kernel for the gradient of bias and alibi_slopes; those of
    # scale_factor and sinks are computed in Python from the kernels' results.
    is_differentiable: bool = dataclasses.field(default=False, compare=False)


OPERANDS = (
    Operand("page_indices", "p", "int32"),
    Operand("query_seq_lengths", "", "int32"),
    Operand("key_value_seq_lengths", "", "int32"),
    Operand("query_offset", "", "int32"),
    Operand("scale_factor", "", "lse", is_differentiable=True),
    Operand("sinks", "n", "lse", is_differentiable=True),
    Operand("query_segment_ids", "t", "int32"),
    Operand("key_value_segment_ids", "s", "int32"),
    Operand("mask", "nts", "bool", is_broadcastable=True),
    Operand("bias", "nts", "floating", is_broadcastable=True, is_differentiable=True),
    Operand("alibi_slopes", "n", "lse", is_differentiable=True),
    Operand("dropout_seeds", "nw", "uint32"),
)

# The backward kernels do not take these.
PART_OF_LSE = ("sinks",)

DIFFERENTIABLE = ("q", "k", "v", *(operand.name for operand in OPERANDS if operand.is_differentiable))

# Derivatives are named after what they are derivatives of. A cotangent is "d" and the name, a tangent "t" and the name;
# "u" is a second direction, and "tu" the derivative in direction u of a tangent.
DIRECTIONS = ("t", "u", "tu")
TANGENTS = tuple(f"{direction}{name}" for direction in DIRECTIONS for name in DIFFERENTIABLE)


def is_directed(name: str) -> bool:
    """Whether an array has an axis of directions D before its batch axes: several tangents beside one primal."""
    return name in _DIRECTED


def sum_dtype(dtype: Any) -> Any:
    """The dtype of logits, of the log-sum-exp and of sums, of a call whose query has this dtype."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


_DIRECTED = {
    *TANGENTS,
    *(f"{direction}{name}" for direction in DIRECTIONS for name in ("out", "lse")),
    *(f"t{cotangent}" for cotangent in ("dq", "dk", "dv", "dbias", "dout", "dlse")),
}

# Pages of keys and values, which any sequence may have: these arrays have no batch axes.
POOLED = ("k_pages", "v_pages")

# The axes of each array after those of directions and batch: t query rows, s keys, n query heads, k key heads, d head
# dim, e head dim of the values, p pages of a sequence, c pages of all sequences, r keys of a page, w words of a seed.
AXES = {
    "q": "tnd",
    "k": "skd",
    "v": "ske",
    "k_pages": "crkd",
    "v_pages": "crke",
    "out": "tne",
    "lse": "tn",
    "p_factor": "tn",
    "dq": "tnd",
    "dk": "skd",
    "dv": "ske",
    "dout": "tne",
    "dlse": "tn",
    "dbias": "nts",
    "ds": "nts",
} | {operand.name: operand.axes for operand in OPERANDS}
AXES |= {f"{direction}{name}": axes for direction in DIRECTIONS for name, axes in AXES.items()}

# Any axis of these, batch axes included, may have size 1 and is then broadcast.
_BROADCASTABLE = {
    f"{direction}{name}"
    for direction in ("", *DIRECTIONS)
    for name in ("dbias", *(operand.name for operand in OPERANDS if operand.is_broadcastable))
}


def is_broadcastable(name: str) -> bool:
    return name in _BROADCASTABLE


def first_batch_axis(name: str) -> int:
    return 1 if is_directed(name) else 0


def has_keys(name: str) -> bool:
    """Whether the array has rows for keys, like k, v and their derivatives."""
    return AXES[name].startswith("sk")
