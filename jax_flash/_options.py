"""The static options of the attention op: what each means, its default, its check and its normal form."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

import jax
import numpy as np

# Wider than any sequence, and still far from overflowing the kernels' 64-bit index arithmetic.
_WIDEST_WINDOW = 2**31 - 1
_NO_WINDOW = 2**32  # farther than any key is from a query, with any offset

# It makes all weights equal, as any smaller cap does, whose squares second derivatives could not divide by.
_SMALLEST_SOFT_CAP = 1e-20
# Such a cap c changes a logit x by x^3 / (3 c^2), less than rounding does; and x / c may be too small for float32.
_NO_SOFT_CAP = 1e30

# The precision of a float32 product by each dot algorithm, as a level of jax.lax.Precision (0, 1, 2).
# Unlisted algorithms round float32 operands once: level 0.
_ALGORITHM_LEVELS = {
    "BF16_BF16_F32_X3": 1,
    "TF32_TF32_F32_X3": 1,
    "BF16_BF16_F32_X6": 2,
    "BF16_BF16_F32_X9": 2,
    "F32_F32_F32": 2,
    "F64_F64_F64": 2,
}


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """The options as every kernel receives them: see `attributes`.

    The fields are plain `float`, `bool` and `int`: a NumPy scalar would hash like the Python number but lower
    to an attribute of another type, and JAX's caches would then serve the wrong program.
    """

    scale: float  # multiplies q . k
    is_causal: bool  # key j is visible to query i if j <= i + query_offset
    window_left: int  # keys further than this before i + query_offset are not visible; -1: no limit
    window_right: int  # keys further than this after i + query_offset are not visible; -1: no limit
    logits_soft_cap: float  # c > 0: logits become c * tanh(logit / c); 0: no cap
    dropout_rate: float  # share of the probabilities that becomes 0
    precision: int  # of float32 products: 0 default, 1 high, 2 highest
    deterministic: bool  # the backward pass sums in a fixed order
    # For _kernel_choice: may products be of two planes? Only some kernels recompute their scores to the bit.
    in_planes: bool = False
    # May the gradient of a bias leave its kernel in the bias's dtype? Not where devices add up parts of it.
    rounds_sums: bool = True

    @classmethod
    def resolve(
        cls,
        head_dim: int,
        *,
        scale: Any = None,
        is_causal: Any = False,
        local_window_size: Any = None,
        logits_soft_cap: Any = None,
        dropout_rate: Any = 0.0,
        precision: Any = None,
        deterministic: Any = False,
    ) -> AttentionOptions:
        """Checks and normalizes the options as the user gave them.

        Raises:
          TypeError: an option has the wrong type or is a traced value.
          ValueError: an option has a value out of its range.
        """
        window_left, window_right = _window(local_window_size)
        return cls(
            scale=1 / math.sqrt(head_dim) if scale is None else static_float("scale", scale),
            is_causal=static_bool("is_causal", is_causal),
            window_left=window_left,
            window_right=window_right,
            logits_soft_cap=0.0 if logits_soft_cap is None else _soft_cap(logits_soft_cap),
            dropout_rate=_dropout_rate(dropout_rate),
            precision=_precision_level(precision),
            deterministic=static_bool("deterministic", deterministic),
        )

    @property
    def reach(self) -> tuple[int, int]:
        """How far before and behind i + query_offset a query sees keys, by window and causal mask; -1: no limit."""
        return self.window_left, 0 if self.is_causal else self.window_right

    def attributes(self) -> dict[str, float | bool | int]:
        """The FFI attributes. Two calls that differ in nothing else are one to XLA."""
        options = dataclasses.asdict(self)
        del options["in_planes"], options["rounds_sums"]
        return options

    def without_reach(self) -> AttentionOptions:
        """The options of a call in which every query sees every key."""
        return dataclasses.replace(self, is_causal=False, window_left=-1, window_right=-1)


def static_bool(name: str, value: Any) -> bool:
    _refuse_traced(name, value, "bool")
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be a bool, got {describe(value)}.")
    return bool(value)


def static_int(name: str, value: Any) -> int:
    _refuse_traced(name, value, "int")
    if not _is_int(value):
        raise TypeError(f"{name} must be an int, got {describe(value)}.")
    return int(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def static_float(name: str, value: Any) -> float:
    _refuse_traced(name, value, "number")
    # Scalars of NumPy's extension types, such as bfloat16, are no Real.
    is_number = isinstance(value, numbers.Real) or (
        isinstance(value, np.generic) and jax.dtypes.issubdtype(value.dtype, np.floating)
    )
    if isinstance(value, bool) or not is_number:
        or_array = " or a scalar array" if name == "scale" else ""
        raise TypeError(f"{name} must be a Python or NumPy number{or_array}, got {describe(value)}.")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value}.")
    return number


def describe(value: Any) -> str:
    """Describes a wrong argument in a few words, for an error message."""
    if isinstance(value, jax.Array | np.ndarray):
        return f"an array of dtype {value.dtype} and shape {value.shape}"
    return f"{value!r} of type {type(value).__name__}"


def _refuse_traced(name: str, value: Any, expected: str) -> None:
    if isinstance(value, jax.core.Tracer):
        article = "an" if expected == "int" else "a"
        raise TypeError(
            f"{name} must be {article} {expected} that is known when the function is traced, got the traced value "
            f"{jax.typeof(value)}. Under jax.jit, pass it through static_argnames."
        )


def _window(window: Any) -> tuple[int, int]:
    if window is None:
        return -1, -1
    parts = window if isinstance(window, tuple | list) else (window, window)
    if len(parts) != 2:
        raise ValueError(
            f"local_window_size must be an int or a pair (left, right), got {len(parts)} parts: {window!r}."
        )
    for part in parts:
        _refuse_traced("local_window_size", part, "int")
        if part is not None and not _is_int(part):
            raise TypeError(
                "local_window_size must be an int or a pair (left, right) of ints or None, got "
                f"{describe(window)}."
            )
    if any(part is not None and part < 0 for part in parts):
        raise ValueError(f"local_window_size must have parts >= 0 (None means no limit), got {window!r}.")
    left, right = (
        -1 if part is None or part >= _NO_WINDOW else min(int(part), _WIDEST_WINDOW) for part in parts
    )
    return left, right


def _soft_cap(cap: Any) -> float:
    cap = static_float("logits_soft_cap", cap)
    if cap <= 0:
        raise ValueError(f"logits_soft_cap must be > 0 (None means no cap), got {cap}.")
    return 0.0 if cap >= _NO_SOFT_CAP else max(cap, _SMALLEST_SOFT_CAP)


def _dropout_rate(rate: Any) -> float:
    rate = static_float("dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be at least 0 and below 1, got {rate}.")
    return rate


def _precision_level(precision: Any) -> int:
    """The level, 0, 1 or 2, of any precision that jax.lax takes; the more exact one of a pair."""
    if precision is None:
        precision = jax.config.jax_default_matmul_precision
        if precision is None:
            return 0
    _refuse_traced("precision", precision, "jax.lax.Precision or str")
    if isinstance(precision, jax.lax.DotAlgorithm):
        if np.dtype(precision.lhs_precision_type) in (np.float32, np.float64):
            return 2
        products = precision.num_primitive_operations
        return 2 if products >= 6 else int(products >= 3)
    if isinstance(precision, tuple | list) and len(precision) == 2 and None not in precision:
        return max(_precision_level(part) for part in precision)
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        return _ALGORITHM_LEVELS.get(precision.name, 0)
    if not isinstance(precision, str | jax.lax.Precision):
        raise TypeError(
            "precision must be None, a jax.lax.Precision, a name of one, a pair of these, or a "
            f"jax.lax.DotAlgorithmPreset, got {describe(precision)}."
        )
    if isinstance(precision, str) and precision in jax.lax.DotAlgorithmPreset.__members__:
        return _ALGORITHM_LEVELS.get(precision, 0)
    try:
        return jax.lax.Precision(precision).value
    except ValueError:
        raise ValueError(
            'precision must be a name that jax.lax knows, such as "default", "high" or "highest", '
            f"got {precision!r}."
        ) from None
