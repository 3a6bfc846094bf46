"""The closeness rule itself: it accepts honest rounding and catches planted faults."""

import numpy as np
import oracle
import pytest
from closeness import faults

rng = np.random.default_rng(0)
Q, K, V = (rng.standard_normal((1, 96, 2, 32)) for _ in range(3))


def attention(kind: str, **changes) -> dict[str, np.ndarray]:
    arithmetic = oracle.arithmetic_of(kind)
    q, k, v = (arithmetic.operand(arithmetic.result(x)) for x in (Q, K, V))
    options = dict(want={}, naive=dict(arithmetic=arithmetic))
    results = {name: oracle.attention(q, k, v, **more).out for name, more in options.items()}
    inputs = changes.pop("inputs", (q, k, v))
    return results | {"got": arithmetic.result(oracle.attention(*inputs, **changes).out)}


def changed(x: np.ndarray, where: tuple, value: float) -> np.ndarray:
    y = x.copy()
    y[where] = value
    return y


FAULTS = {
    "scale off by a part in 50": lambda kind: attention(kind, scale=32**-0.5 * 1.02),
    "one key dropped": lambda kind: attention(kind, mask=np.arange(96) != 40),
    "causal mask off by one": lambda kind: attention(kind, is_causal=True, query_offset=94),
    "two keys swapped": lambda kind: attention(kind, inputs=(Q, K[:, ::-1], V)),
    "one NaN": lambda kind: (r := attention(kind)) | {"got": changed(r["got"], (0, 3, 1, 4), np.nan)},
    "one row zero": lambda kind: (r := attention(kind)) | {"got": changed(r["got"], (0, 95), 0.0)},
    "wrong shape": lambda kind: (r := attention(kind)) | {"got": r["got"][:, :-1]},
}
KINDS = pytest.mark.parametrize("kind", ["bfloat16", "float16", "tfloat32"])


@KINDS
def test_exact_arithmetic_rounded_once_is_close(kind):
    r = attention(kind)
    assert faults(r["got"], r["want"], kind, num_keys=96, naive=r["naive"]) == []


@KINDS
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_caught(fault, kind):
    r = FAULTS[fault](kind)
    assert faults(r["got"], r["want"], kind, num_keys=96, naive=r["naive"])


@pytest.mark.parametrize(("kind", "bound"), [("float32", 2e-5), ("float64", 1e-13)])
def test_full_precision_has_one_bound(kind, bound):
    want = np.full((4, 4), 0.5)
    assert faults(want + 0.9 * bound, want, kind, num_keys=100) == []
    assert faults(want + 1.1 * bound, want, kind, num_keys=100)


def test_infinities_must_agree():
    want = np.array([[-np.inf, 1.0]])
    assert faults(want, want, "float32", num_keys=1) == []
    assert faults(-want, want, "float32", num_keys=1)
    assert faults(np.nan_to_num(want), want, "float32", num_keys=1)
