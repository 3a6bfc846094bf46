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


def changed(x: np.ndarray, where: tuple, value: float | np.ndarray) -> np.ndarray:
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


def query_gradient(dout: np.ndarray, **changes) -> np.ndarray:
    return oracle.attention(*changes.pop("inputs", (Q, K, V)), dout, **changes).dq


GRADIENT_FAULTS = {
    "a fifth too large": lambda dout: 1.2 * query_gradient(dout),
    "one key dropped": lambda dout: query_gradient(dout, mask=np.arange(96) != 40),
    "two keys swapped": lambda dout: query_gradient(dout, inputs=(Q, K[:, ::-1], V)),
    "one row zero": lambda dout: changed(query_gradient(dout), (0, 95), 0.0),
    "one row of another": lambda dout: changed(query_gradient(dout), (0, 95), query_gradient(dout)[0, 94]),
}


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "tfloat32", "float32", "float64"])
@pytest.mark.parametrize("fault", GRADIENT_FAULTS)
def test_planted_fault_is_caught_with_all_allowances(fault, kind):
    """With the allowances of the random cases."""
    dout = np.random.default_rng(1).standard_normal(Q.shape)
    largest = [np.linalg.norm(x, axis=-1).max() for x in (dout, V)]
    allowances = dict(cancelling=np.prod(largest) * 32**-0.5 * np.abs(K).max(), few=True, chance=2.0)
    want = query_gradient(dout)
    naive = (
        None
        if kind.startswith("float") and kind != "float16"
        else query_gradient(dout, arithmetic=oracle.arithmetic_of(kind))
    )
    assert faults(want, want, kind, num_keys=96, naive=naive, **allowances) == []
    assert faults(GRADIENT_FAULTS[fault](dout), want, kind, num_keys=96, naive=naive, **allowances)


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
