"""Runs a case with our attention and XLA's, checks ours, and prints the results."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import numpy as np

from . import check
from .case import ATTENTIONS, PASSES, TENSORS, Case
from .measure import Status, measure
from .progress import Progress

STEPS = 1 + len(PASSES) * len(ATTENTIONS)  # of the progress of one comparison
TABLE_HEAD = (
    f"{'':27} {'jax_flash':>19} {'XLA':>19}\n"
    f"{'':27} {'ms':>9} {'MiB':>9} {'ms':>9} {'MiB':>9}   largest error against float64"
)
_SHOWN_GRADIENTS = 10


class CaseError(Exception):
    """Our attention could not be run."""


@dataclasses.dataclass
class Comparison:
    """What came of a case."""

    lines: list[str]  # rows below TABLE_HEAD
    notes: list[str]  # sentences below the table
    passed: bool
    results: tuple[jax.Array, ...]  # TENSORS as our attention computed them
    exact: tuple[jax.Array, ...]  # TENSORS in float64


def compare(case: Case, device: jax.Device, progress: Progress) -> Comparison:
    """Runs a case forward and backward with both attentions, and checks ours.

    Raises:
      CaseError: our attention could not be run.
    """
    progress(f"{case.mask}: reference in float64")
    operands = case.operands()
    exact, changes = jax.block_until_ready(check.exact(*operands, is_causal=case.is_causal))
    lines, notes, passed = [], [], True
    for name in PASSES:
        progress(f"{case.mask}: {name}, jax_flash")
        ours = measure(case.program(name, "jax_flash"), lambda: operands, device)
        if ours.status is not Status.MEASURED:
            raise CaseError(f"{case.mask} {name}: {ours.reason or str(ours).strip()}")
        progress(f"{case.mask}: {name}, XLA")
        xla = measure(case.program(name, "XLA"), lambda: operands, device)
        if xla.reason:
            notes.append(f"XLA's attention, {case.mask} {name}: {xla.reason}")
        errors = []
        for i, got in enumerate(ours.results):
            error = check.max_error(got, exact[i])
            xla_error = check.max_error(xla.results[i], exact[i]) if xla.results else 0.0
            limit = check.limit(exact[i], changes[i], got.dtype, xla_error, device.platform)
            ok = error <= limit  # False for NaN
            passed = passed and ok
            errors.append(f"{TENSORS[i]} {error:.1e}" + ("" if ok else f" FAILED (limit {limit:.1e})"))
        lines.append(f"{case.mask:7} {name:19} {ours} {xla}   {', '.join(errors)}")
    return Comparison(lines, notes, passed, ours.results, exact)


def show(case: Case, comparison: Comparison) -> str:
    """Returns Q, K, V and the output as text, and the first values of each gradient beside the exact ones."""
    options = np.get_printoptions() | {"precision": 4, "suppress": True, "linewidth": 100}
    arrays = zip(("Q", "K", "V", "out"), (*case.operands()[:3], comparison.results[0]), strict=True)
    arrays = [(name, np.asarray(x).astype(np.float64)) for name, x in arrays]
    parts = []
    if math.prod(case.shape) <= options["threshold"]:
        heads = np.ndindex(case.batch, case.heads)
    else:
        heads = [(0, 0)]
        parts.append(f"The first of {case.batch * case.heads} heads:\n")
    with np.printoptions(**options):
        for batch, head in heads:
            for name, x in arrays:
                parts.append(f"{name}[{batch}, :, {head}, :] =\n{x[batch, :, head]}\n")
    gradients = zip(("dQ", "dK", "dV"), comparison.results[1:], comparison.exact[1:], strict=True)
    for name, got, exact in gradients:
        parts.append(f"{f'{name}, first values':28} {'jax_flash':>16} {'float64':>16} {'difference':>12}")
        for index in itertools.islice(np.ndindex(case.shape), _SHOWN_GRADIENTS):
            ours, right = float(got[index]), float(exact[index])
            parts.append(f"{f'  {list(index)}':28} {ours:16.8f} {right:16.8f} {ours - right:12.1e}")
        parts.append("")
    return "\n".join(parts)
