"""The optional operands of the attention op, in the order in which the kernels take them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that a call may have. The library has the same table, `cpp/operands.def`; import compares the two."""

    name: str
    # Behind the batch axes: t query rows, s keys, n query heads, w words of a seed.
    axes: str
    # "lse" is the dtype of the log-sum-exp, "floating" any that query may have.
    dtype: str
    # Any axis, batch axes included, may have size 1 and is then broadcast.
    is_broadcastable: bool = False
    # Not compared: the library does not know. It has a kernel for the gradient of bias and alibi_slopes; those of
    # scale_factor and sinks are computed in Python from the kernels' results.
    is_differentiable: bool = dataclasses.field(default=False, compare=False)


OPERANDS = (
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
