"""A report of progress on the last line of a terminal."""

from __future__ import annotations

import shutil
import sys

_BAR_WIDTH = 30


class Progress:
    """A line that says which step runs, below what is printed; nothing if stdout is not a terminal."""

    def __init__(self, total: int):
        self._total = total
        self._done = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_) -> None:
        self._erase()

    def __call__(self, step: str) -> None:
        """Reports the step that begins."""
        bar = "#" * (_BAR_WIDTH * self._done // self._total)
        self._write(f"[{bar:{_BAR_WIDTH}}] {self._done}/{self._total} {step}")
        self._done += 1

    def print(self, text: str) -> None:
        """Prints text in the place of the line."""
        self._erase()
        print(text, flush=True)

    def _erase(self) -> None:
        self._write("")

    def _write(self, line: str) -> None:
        if sys.stdout.isatty():
            width = shutil.get_terminal_size().columns - 1  # one more would move the cursor to the next line
            print(f"\r{line[:width]:{width}}\r", end="", flush=True)
