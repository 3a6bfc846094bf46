"""Runs a case with our attention, in float64 and with XLA's attention, and checks ours."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np

from . import check
from .case import ATTENTIONS, PASSES, TENSORS, Case
from .measure import Measurement, Status, measure
from .progress import Progress

STEPS = 2 + len(PASSES) * (1 + len(ATTENTIONS))  # of the progress of one comparison
_SHOWN_GRADIENTS = 10


class CaseError(Exception):
    """Our attention could not be run."""


class Comparison:
    """A case, run in the stages of `STAGES`; each yields a row of text for each pass as soon as it has it."""

    def __init__(self, case: Case, device: jax.Device, progress: Progress):
        self._case = case
        self._device = device
        self._progress = progress
        self._operands: tuple[jax.Array, ...] = ()
        self._ours: dict[str, Measurement] = {}  # by the name of the pass
        self._exact: tuple[jax.Array, ...] = ()  # TENSORS in float64
        self._changes: tuple[jax.Array, ...] = ()
        self._errors: dict[str, list[float]] = {}  # of ours, by the name of the pass
        self.notes: list[str] = []  # why XLA's attention has no figures
        self.failures: list[str] = []  # known after the last stage

    def time_ours(self) -> Iterator[str]:
        """Measures our attention.

        Raises:
          CaseError: it could not be run.
        """
        self._progress(f"{self._case.mask}: inputs")
        self._operands = jax.block_until_ready(self._case.operands())
        for name in PASSES:
            self._ours[name] = self._measure_ours(name)
            yield self._row(name, str(self._ours[name]))

    def find_errors(self) -> Iterator[str]:
        """Computes the exact results and the errors of ours."""
        self._progress(f"{self._case.mask}: reference in float64")
        self._exact, self._changes = check.exact(*self._operands, is_causal=self._case.is_causal)
        for name, ours in self._ours.items():
            self._errors[name] = self._errors_of(ours)
            errors = zip(TENSORS, self._errors[name], strict=False)  # a forward pass has only the first
            yield self._row(name, ", ".join(f"{tensor} {error:.1e}" for tensor, error in errors))

    def compare_with_xla(self) -> Iterator[str]:
        """Measures both attentions in turn, and checks ours, as the limit can depend on XLA's error.

        Ours is measured again, because the speed of a machine drifts: times to be compared are taken together.

        Raises:
          CaseError: our attention could not be run.
        """
        for name in PASSES:
            ours, xla = self._measure_ours(name), self._measure(name, "XLA")
            if xla.reason:
                self.notes.append(f"XLA's attention, {self._case.mask} {name}: {xla.reason}")
            self._check(name, xla)
            yield self._row(name, f"{ours} {xla}")

    def show(self) -> str:
        """Returns Q, K, V and the output as text, and the first values of each gradient beside the exact ones."""
        *_, ours = self._ours.values()
        options = np.get_printoptions() | {"precision": 4, "suppress": True, "linewidth": 100}
        arrays = zip(("Q", "K", "V", "out"), (*self._operands[:3], ours.results[0]), strict=True)
        arrays = [(name, np.asarray(x).astype(np.float64)) for name, x in arrays]
        parts = []
        batch, _, heads, _ = shape = self._case.shape
        if math.prod(shape) <= options["threshold"]:
            shown = np.ndindex(batch, heads)
        else:
            shown = [(0, 0)]
            parts.append(f"The first of {batch * heads} heads:\n")
        with np.printoptions(**options):
            for element, head in shown:
                for name, x in arrays:
                    parts.append(f"{name}[{element}, :, {head}, :] =\n{x[element, :, head]}\n")
        gradients = zip(("dQ", "dK", "dV"), ours.results[1:], self._exact[1:], strict=True)
        for name, got, exact in gradients:
            parts.append(f"{f'{name}, first values':28} {'jax_flash':>16} {'float64':>16} {'difference':>12}")
            for index in itertools.islice(np.ndindex(shape), _SHOWN_GRADIENTS):
                x, right = float(got[index]), float(exact[index])
                parts.append(f"{f'  {list(index)}':28} {x:16.8f} {right:16.8f} {x - right:12.1e}")
            parts.append("")
        return "\n".join(parts)

    def _measure(self, name: str, attention: str) -> Measurement:
        self._progress(f"{self._case.mask}: {name}, {attention}")
        return measure(self._case.program(name, attention), lambda: self._operands, self._device)

    def _measure_ours(self, name: str) -> Measurement:
        ours = self._measure(name, "jax_flash")
        if ours.status is not Status.MEASURED:
            raise CaseError(f"{self._case.mask} {name}: {ours.reason or str(ours).strip()}")
        return ours

    def _row(self, name: str, text: str) -> str:
        return f"{self._case.mask:7} {name:19} {text}"

    def _errors_of(self, measured: Measurement) -> list[float]:
        return [
            check.max_error(got, right) for got, right in zip(measured.results, self._exact, strict=False)
        ]

    def _check(self, name: str, xla: Measurement) -> None:
        """Appends to the failures."""
        ours = self._ours[name]
        xla_errors = self._errors_of(xla) or [0.0] * len(ours.results)
        for i, (error, xla_error) in enumerate(zip(self._errors[name], xla_errors, strict=True)):
            dtype = ours.results[i].dtype
            limit = check.limit(self._exact[i], self._changes[i], dtype, xla_error, self._device.platform)
            ok = error <= limit  # False for NaN
            if not ok:
                failure = f"{TENSORS[i]} {error:.1e} (limit {limit:.1e})"
                self.failures.append(f"{self._case.mask} {name}: {failure}")


_FIGURES = f"{'ms':>9} {'MiB':>9}"  # as wide as a `Measurement`
_BOTH = f"{'Compared with XLA':27} {'jax_flash':>19} {'XLA':>19}\n{'':27} {_FIGURES} {_FIGURES}"
# The head of each table and what yields its rows. Ours comes first, as XLA compiles no matrix product for it:
# on a GPU it tries several kernels for each, which takes long.
STAGES = {
    f"{'jax_flash':27} {_FIGURES}": Comparison.time_ours,
    "Largest error against float64": Comparison.find_errors,
    _BOTH: Comparison.compare_with_xla,
}
