"""The closeness rule: whether a result is close enough to the exact one. docs/testing.md gives the reasons.

For 16-bit types and for float32 computed in TF32, the errors are compared with those of a baseline, the same
computation done naively in that type. With e = |got - want|, eb the baseline's error and u the unit roundoff, all of
these must hold:

    NaN and infinities are in the same places
    max e       <= max(2 max eb, 2u max|want|) + 1e-6
    rms e       <= max(1.5 rms eb, 2u rms want) + 1e-6
    worst row's ||e|| / ||want||  <= max(twice the baseline's, 4u)
    max e       <= 16u max(1, max|want|), except for TF32, which rounds the inputs: large logits enlarge that error

float32 and float64 have a single bound: max e <= c sqrt(S) max(1, max|want|), with c = 2e-6 and 1e-14.

Where dp and delta cancel, a gradient through ds = p (dp - delta) consists of rounding errors. They are small beside
these limits, unless the gradient itself is small or 0, as for a query that sees one key. A test with such rows passes
the size of the terms (`cancelling`). Then u/4 of it (c for float32 and float64) is added to the last two limits and to
the single bound; with few terms (`few`), whose baseline errors may all be small by chance, it is added to all limits.

The largest errors of the baseline and of the result are single draws. Among 10,000 results one is sometimes more than
twice the other, mostly in rows of one number. A test of so many results allows a larger ratio (`chance`). The limit of
the rms error, an average, stays.
"""

from typing import Any

import numpy as np

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "tfloat32": 2.0**-11}
FULL_PRECISION = {"float32": 2e-6, "float64": 1e-14}
_ABSOLUTE = 1e-6


def faults(
    got: Any,
    want: Any,
    kind: str,
    *,
    num_keys: int,
    naive: Any = None,
    cancelling: float = 0.0,
    few: bool = False,
    chance: float = 1.0,
) -> list[str]:
    """The parts of the rule that `got` breaks, as sentences; empty if `got` is close.

    Args:
        got: the result to judge.
        want: the exact result.
        kind: "bfloat16", "float16", "tfloat32", "float32" or "float64".
        num_keys: S, the number of keys.
        naive: the baseline; needed for the kinds in UNIT_ROUNDOFF.
        cancelling: for a gradient through ds, the largest |dout_i| |v_j| times the factors of ds.
        few: whether that gradient has few numbers, or comes from few rows of ds.
        chance: multiplies the ratio allowed to the baseline's largest error and worst row.
    """
    got, want = np.atleast_1d(np.asarray(got).astype(np.float64)), np.atleast_1d(np.asarray(want, np.float64))
    if got.shape != want.shape:
        return [f"shape is {got.shape}, expected {want.shape}"]
    for name, test in (("NaN", np.isnan), ("+Inf", np.isposinf), ("-Inf", np.isneginf)):
        if (wrong := test(got) != test(want)).any():
            where = tuple(int(x) for x in np.argwhere(wrong)[0])
            return [
                f"{name} differs in {wrong.sum()} places: at {where} got {got[where]}, expected {want[where]}"
            ]
    finite = np.isfinite(want)
    if not finite.any():
        return []
    got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
    error = np.abs(got - want)
    largest = max(1.0, np.abs(want).max())

    if kind in FULL_PRECISION:
        limit = FULL_PRECISION[kind] * (np.sqrt(max(num_keys, 1)) * largest + cancelling)
        limits = {"max error": (error.max(), limit)}
    else:
        u = UNIT_ROUNDOFF[kind]
        naive = np.atleast_1d(naive)
        naive = np.where(finite & np.isfinite(naive), naive, want)
        error_naive = np.abs(naive - want)
        absolute = _ABSOLUTE + (u / 4 * cancelling if few else 0.0)
        limits = {
            "max error": (
                error.max(),
                max(2 * chance * error_naive.max(), 2 * u * np.abs(want).max()) + absolute,
            ),
            "rms error": (_rms(error), max(1.5 * _rms(error_naive), 2 * u * _rms(want)) + absolute),
            "worst row": (
                _worst_row(error, want, u, u / 4 * cancelling),
                max(2 * chance * _worst_row(error_naive, want, u), 4 * u),
            ),
        }
        if kind != "tfloat32":
            limits["max error, absolute"] = (error.max(), 16 * u * largest + u / 4 * cancelling)
    where = tuple(int(x) for x in np.unravel_index(error.argmax(), error.shape))
    return [
        f"{name} is {value:.3g}, limit {limit:.3g} (largest error at {where}: got {got[where]:.8g}, "
        f"expected {want[where]:.8g})"
        for name, (value, limit) in limits.items()
        if not value <= limit
    ]


def assert_close(
    got: Any,
    want: Any,
    kind: str,
    *,
    num_keys: int,
    naive: Any = None,
    cancelling: float = 0.0,
    few: bool = False,
    chance: float = 1.0,
    name: str = "result",
) -> None:
    """Fail with every part of the rule that `got` breaks."""
    broken = faults(
        got, want, kind, num_keys=num_keys, naive=naive, cancelling=cancelling, few=few, chance=chance
    )
    assert not broken, f"{name} is not close in {kind}:\n  " + "\n  ".join(broken)


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _worst_row(error: np.ndarray, want: np.ndarray, u: float, allowed: float = 0.0) -> float:
    """The largest ||error|| / ||want|| of a row (a vector of the last axis).

    As in the other parts, errors up to 1e-6 do not count. A row that is zero beside the others (the gradient of a
    query that sees one key) is measured relative to the size that cancellation leaves.
    """
    width = np.sqrt(max(error.shape[-1], 1))
    errors = np.maximum(np.linalg.norm(error, axis=-1) - (_ABSOLUTE + allowed) * width, 0.0)
    norms = np.linalg.norm(want, axis=-1)
    norms = np.maximum(norms, u * norms.max())
    return float(np.max(np.divide(errors, norms, out=np.zeros_like(errors), where=norms > 0)))
