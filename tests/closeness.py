"""The rule that says whether a result is close enough to the exact one.

For 16-bit types and for float32 computed in TF32 the errors are held against those of a baseline, the same
arithmetic done naively in that type: a bound neither loose where the arithmetic is exact nor tight where
it cannot be. With e = |got - want|, eb the baseline's and u the unit roundoff, all of these must hold:

    NaN and Inf stand in the same places
    max e       <= max(2 max eb, 2u max|want|) + 1e-6
    rms e       <= max(1.5 rms eb, 2u rms want) + 1e-6
    worst row's ||e|| / ||want||  <= max(twice the baseline's, 4u)
    max e       <= 16u max(1, max|want|), but for TF32, which rounds the inputs: large logits enlarge that

float32 and float64 have one bound: max e <= c sqrt(S) max(1, max|want|), with c = 2e-6 and 1e-14.

A gradient through ds = p (dp - delta) has what rounding leaves where dp and delta cancel: small beside these, and not
beside a result that is small or 0, as where a query sees one key. A test that meets such rows says how large the
terms were; u/4 (float32 and float64: c) of that are then added to the last two limits and to the one bound, and to all
where the terms are so few that the baseline's errors may all be small by chance.

The baseline's largest error is one draw, and so is ours: among 10,000 results the one is sometimes more than twice the
other, most often in rows of one number. A test of so many results says by how much more they may differ; the rms error,
an average, stays as it is.
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
    """The parts of the rule that `got` breaks, as sentences; empty if it is close.

    Args:
        got: the result to judge.
        want: the exact result.
        kind: "bfloat16", "float16", "tfloat32", "float32" or "float64".
        num_keys: S, the number of keys.
        naive: the baseline; needed for the kinds in UNIT_ROUNDOFF.
        cancelling: of a gradient through ds, the largest |dout_i| |v_j|, times what ds is multiplied by.
        few: whether that gradient has few numbers, or is made of few rows of ds.
        chance: multiplies what is allowed beside the baseline's largest error and worst row.
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

    As in the other parts, an error of 1e-6 is none; a row that is zero beside the others (the gradient of a
    query that sees one key) is measured with the size at which cancellation leaves it.
    """
    width = np.sqrt(max(error.shape[-1], 1))
    errors = np.maximum(np.linalg.norm(error, axis=-1) - (_ABSOLUTE + allowed) * width, 0.0)
    norms = np.linalg.norm(want, axis=-1)
    norms = np.maximum(norms, u * norms.max())
    return float(np.max(np.divide(errors, norms, out=np.zeros_like(errors), where=norms > 0)))
