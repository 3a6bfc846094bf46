"""Parameters of tests, of which the quick run keeps some. The others are `exhaustive`: `--all` runs them, too."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from cases import Case

EXHAUSTIVE = pytest.mark.exhaustive
NUM_KINDS = 5  # of harness.KINDS, on the platform that has most
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


def cases_and_kinds(cases: Collection[Case], quick: Collection[str] | None = None) -> list[Any]:
    """Each case with each index of harness.KINDS, in turn; `quick` are names of cases.

    The last kind is float64 on a GPU, whose kernels have head dims up to 128.
    """
    pairs = in_turn({case.name: case for case in cases}, range(NUM_KINDS - 1), quick, with_all=IN_EVERY_DTYPE)
    last = (case for case in cases if max(case.head_dim, case.head_dim_v or 0) <= 128)
    return pairs + [
        _parameter((case, NUM_KINDS - 1), f"{case}-{NUM_KINDS - 1}", case.name in IN_EVERY_DTYPE)
        for case in last
    ]


def _mapping(table: Table) -> Mapping[Any, Any]:
    return table if isinstance(table, Mapping) else {x: x for x in table}


def _parameter(values: tuple[Any, ...], name: str, is_quick: bool) -> Any:
    return pytest.param(*values, id=name, marks=() if is_quick else EXHAUSTIVE)


# Indices of harness.KINDS. The quick run keeps bfloat16, and float32 at JAX's default precision.
KINDS = pytest.mark.parametrize("kind", rows(range(NUM_KINDS), quick=(0, 2)))
