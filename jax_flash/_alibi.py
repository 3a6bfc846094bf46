"""Attention with linear biases: one number for each head."""

from __future__ import annotations

import dataclasses

import jax
from jax.typing import ArrayLike


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Alibi:
    """A bias that falls with the distance, for the `bias` of `flash_attention` (https://arxiv.org/abs/2108.12409).

    Adds -slopes[n] * abs(i + query_offset - j) to the scaled logit of query i and key j in head n. The kernels
    compute it on the fly, without an array of T x S.

    Args:
      slopes: floating-point array [N]. Differentiable. The paper's, for N a power of two, are 2^(-8 (n + 1) / N).
    """

    slopes: ArrayLike
