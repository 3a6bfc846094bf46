"""A progress report on stderr, which keeps stdout clean."""

from __future__ import annotations

import sys


class Progress:
    """A bar on a terminal; elsewhere one line for each step."""

    def __init__(self, total: int):
        self._total = total
        self._done = 0

    def __call__(self, step: str) -> None:
        """Reports the step that begins."""
        if sys.stderr.isatty():
            bar = "#" * (30 * self._done // self._total)
            print(f"\r[{bar:30}] {self._done}/{self._total} {step:40}", end="", file=sys.stderr, flush=True)
        else:
            print(f"{self._done}/{self._total} {step}", file=sys.stderr, flush=True)
        self._done += 1

    def clear(self) -> None:
        """Erases the bar."""
        if sys.stderr.isatty():
            print(f"\r{'':80}\r", end="", file=sys.stderr, flush=True)
