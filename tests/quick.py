"""Parameters of tests, of which the quick run keeps some. The others are `exhaustive`: `--all` runs them, too."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from cases import Case

EXHAUSTIVE = pytest.mark.exhaustive
# Cases that the quick run computes in every dtype. Together they have every option.
IN_EVERY_DTYPE = ("everything at once", "alibi")


def rows(
    table: Mapping[Any, Any] | Collection[Any], quick: Collection[Any], unpack: bool = False
) -> list[Any]:
    """The values of a table as parameters with its keys as ids; the quick run keeps the keys in `quick`.

    The keys of a collection are its elements. With `unpack`, a value is a tuple of several parameters.
    """
    if not isinstance(table, Mapping):
        table = {x: x for x in table}
    missing = [key for key in quick if key not in table]
    assert quick, "The quick run must keep a row."
    assert not missing, f"The table lacks {missing}."
    return [
        pytest.param(*(x if unpack else [x]), id=str(key), marks=() if key in quick else EXHAUSTIVE)
        for key, x in table.items()
    ]


def in_turn(
    first: Mapping[Any, Any],
    second: Mapping[Any, Any],
    quick: Collection[Any] | None = None,
    with_all: Collection[Any] = (),
) -> list[Any]:
    """All pairs of values of two tables, as two parameters.

    The quick run keeps one pair for each row of the first table, with the rows of the second taking turns, and all
    pairs for the rows in `with_all`. With `quick`, it keeps these rows of the first table only.
    """
    return [
        pytest.param(x, y, id=f"{a}-{b}", marks=() if is_quick else EXHAUSTIVE)
        for i, (a, x) in enumerate(first.items())
        for j, (b, y) in enumerate(second.items())
        for is_quick in [(quick is None or a in quick) and (a in with_all or i % len(second) == j)]
    ]


def cases_and_kinds(cases: Collection[Case], quick: Collection[str] | None = None) -> list[Any]:
    """Each case with each index of harness.KINDS, in turn; `quick` are names of cases."""
    table = {case.name: case for case in cases}
    return in_turn(table, {kind: kind for kind in range(4)}, quick, with_all=IN_EVERY_DTYPE)


# Indices of harness.KINDS. The quick run keeps bfloat16, and float32 at JAX's default precision.
KINDS = pytest.mark.parametrize("kind", rows(range(4), quick=(0, 2)))
