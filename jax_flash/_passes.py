"""The passes over the score matrix: the arguments and results of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import jax
from jax.extend.core import Primitive

from ._operands import DIRECTIONS, OPERANDS, PART_OF_LSE, POOLED, TANGENTS
from ._options import AttentionOptions

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Pass:
    target: str  # of the FFI call
    inputs: tuple[str, ...]  # the arguments of every call; optional operands follow
    results: tuple[str, ...]

    def by_name(self, args: Iterable[_T], operands: Iterable[str]) -> dict[str, _T]:
        """Names the arguments of a call, in order; `operands` names those that follow the inputs."""
        return dict(zip((*self.inputs, *operands), args, strict=True))


FORWARD = Pass("jax_flash_forward", ("q", "k", "v"), ("out", "lse"))
FORWARD_WITH_FACTOR = Pass(FORWARD.target, FORWARD.inputs, (*FORWARD.results, "p_factor"))
PAGED_FORWARD = Pass(FORWARD.target, ("q", *POOLED), FORWARD.results)
BACKWARD = Pass("jax_flash_backward", ("q", "k", "v", "out", "lse", "dout"), ("dq", "dk", "dv"))
BACKWARD_BIAS = Pass("jax_flash_backward_bias", BACKWARD.inputs, ("dbias",))
# Both, which a kernel may compute at once: it then has ds, the gradients of the logits, as a result.
BACKWARD_WITH_BIAS = Pass(BACKWARD.target, BACKWARD.inputs, (*BACKWARD.results, *BACKWARD_BIAS.results))
BACKWARD_WITH_DS = Pass(BACKWARD.target, BACKWARD.inputs, (*BACKWARD.results, "ds"))
TANGENT = Pass("jax_flash_tangent", ("q", "k", "v", "out", "lse"), ("tout", "tlse"))
SECOND_TANGENT = Pass("jax_flash_second_tangent", (*TANGENT.inputs, "tlse", "ulse"), ("tuout", "tulse"))
BACKWARD_TANGENT = Pass(
    "jax_flash_backward_tangent", (*BACKWARD.inputs, "tout", "tlse"), ("tdq", "tdk", "tdv")
)
BACKWARD_BIAS_TANGENT = Pass("jax_flash_backward_bias_tangent", BACKWARD_TANGENT.inputs, ("tdbias",))
FORWARDS = (FORWARD, FORWARD_WITH_FACTOR, PAGED_FORWARD)
BACKWARDS = (BACKWARD, BACKWARD_WITH_DS)

# The arrays that a call may have beside its inputs, in the order in which the kernels take them.
_OPTIONAL = ("dlse", "tdout", "tdlse", *TANGENTS, *(operand.name for operand in OPERANDS))

_PART_OF_LSE = tuple(f"{direction}{name}" for direction in ("", *DIRECTIONS) for name in PART_OF_LSE)


def bind(
    call: Pass, primitive: Primitive, arrays: dict[str, jax.Array], options: AttentionOptions
) -> list[jax.Array]:
    """The results of the pass for arrays by name, without those that it does not take."""
    unknown = () if call in FORWARDS else _PART_OF_LSE
    operands = tuple(name for name in _OPTIONAL if name in arrays and name not in (*unknown, *call.inputs))
    args = (arrays[name] for name in (*call.inputs, *operands))
    return primitive.bind(*args, operands=operands, options=options)


def whole_keys(named: dict[str, Any]) -> tuple[jax.core.ShapedArray, jax.core.ShapedArray]:
    """The types of the keys [..., S, K, H] and values of all sequences, also where they are in pages."""
    if "k_pages" not in named:
        return named["k"], named["v"]
    *batch, pages_per_sequence = named["page_indices"].shape
    return tuple(
        jax.core.ShapedArray((*batch, pages_per_sequence * x.shape[1], *x.shape[2:]), x.dtype)
        for x in (named[name] for name in POOLED)
    )
