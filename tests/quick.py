"""Parameters of tests, of which the quick run keeps some. The others are `exhaustive`: `--all` runs them, too.

A CPU skips those that are `gpu_only`.
"""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from cases import Case

EXHAUSTIVE = pytest.mark.exhaustive
GPU_ONLY = pytest.mark.gpu_only
NUM_KINDS, FLOAT64_ON_CPU = 5, 3  # of harness.KINDS, on the platform that has most
# Cases that the quick run computes in every dtype. Together they have every option.
IN_EVERY_DTYPE = ("everything at once", "alibi")

Table = Mapping[Any, Any] | Collection[Any]  # the keys of a collection are its elements


def rows(table: Table, quick: Collection[Any], unpack: bool = False) -> list[Any]:
    """The values of a table as parameters with its keys as ids; the quick run keeps the keys in `quick`.

    With `unpack`, a value is a tuple of several parameters.
    """
    table = _mapping(table)
    missing = [key for key in quick if key not in table]
    assert quick, "The quick run must keep a row."
    assert not missing, f"The table lacks {missing}."
    return [_parameter(x if unpack else (x,), str(key), key in quick) for key, x in table.items()]


def in_turn(
    first: Table, second: Table, quick: Collection[Any] | None = None, with_all: Collection[Any] = ()
) -> list[Any]:
    """All pairs of values of two tables, as two parameters.

    The quick run keeps one pair for each row of the first table, with the rows of the second taking turns, and all
    pairs for the rows in `with_all`. With `quick`, it keeps these rows of the first table only.
    """
    pairs = []
    for i, (a, x) in enumerate(_mapping(first).items()):
        for j, (b, y) in enumerate(_mapping(second).items()):
            is_its_turn = a in with_all or i % len(second) == j
            pairs.append(_parameter((x, y), f"{a}-{b}", is_its_turn and (quick is None or a in quick)))
    return pairs


def cases_and_kinds(
    cases: Collection[Case], quick: Collection[str] | None = None, exhaustive_on_cpu: bool = True
) -> list[Any]:
    """Each case with each index of harness.KINDS. The quick run keeps one of each case, in turn; `quick` names cases.

    The last kind is float64 on a GPU, whose kernels have head dims up to 128. A CPU's kernels for other dtypes are one
    template, and differ in how they load and store. So there, a case runs in turn and in float64; without
    `exhaustive_on_cpu`, as in the quick run.
    """
    parameters = []
    for i, case in enumerate(cases):
        is_wide = max(case.head_dim, case.head_dim_v or 0) > 128
        for kind in range(NUM_KINDS - is_wide):
            is_turn = i % (NUM_KINDS - 1) == kind or case.name in IN_EVERY_DTYPE
            is_quick = is_turn and (quick is None or case.name in quick)
            on_cpu = is_quick or (exhaustive_on_cpu and (is_turn or kind == FLOAT64_ON_CPU))
            marks = [EXHAUSTIVE] * (not is_quick) + [GPU_ONLY] * (not on_cpu)
            parameters.append(pytest.param(case, kind, id=f"{case}-{kind}", marks=marks))
    return parameters


def _mapping(table: Table) -> Mapping[Any, Any]:
    return table if isinstance(table, Mapping) else {x: x for x in table}


def _parameter(values: tuple[Any, ...], name: str, is_quick: bool) -> Any:
    return pytest.param(*values, id=name, marks=() if is_quick else EXHAUSTIVE)


# Indices of harness.KINDS. The quick run keeps bfloat16, and float32 at JAX's default precision.
KINDS = pytest.mark.parametrize("kind", rows(range(NUM_KINDS), quick=(0, 2)))
