"""The optional operands of the attention op, in the order in which the kernels take them."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that a call may have. The library has the same list, `cpp/operands.def`, and import compares the two."""

    name: str
    # Behind the batch axes: t query rows, s keys, n query heads, w words of a seed.
    axes: str
    # "lse" is that of the log-sum-exp, "floating" any that query may have.
    dtype: str
    # Any axis may have size 1 and then stands for all; batch axes, too.
    is_broadcastable: bool = False


OPERANDS = (
    Operand("query_seq_lengths", "", "int32"),
    Operand("key_value_seq_lengths", "", "int32"),
    Operand("query_offset", "", "int32"),
    Operand("scale_factor", "", "lse"),
    Operand("sinks", "n", "lse"),
    Operand("query_segment_ids", "t", "int32"),
    Operand("key_value_segment_ids", "s", "int32"),
    Operand("mask", "nts", "bool", is_broadcastable=True),
    Operand("bias", "nts", "floating", is_broadcastable=True),
    Operand("alibi_slopes", "n", "lse"),
    Operand("dropout_seeds", "nw", "uint32"),
)
