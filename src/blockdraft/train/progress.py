"""One progress bar for everything that takes minutes: units a second and time left.

On a terminal it is a live bar; elsewhere (a log file) it is a plain line now and then.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PLAIN_SECONDS = 30.0


def say(console: Console, line: str) -> None:
    """One line, neither wrapped nor coloured."""
    console.print(line, highlight=False, soft_wrap=True, markup=False)


class Meterbar:
    """`with Meterbar(console, "features", total, "tokens") as bar: bar.advance(count, "loss 3.1")`."""

    def __init__(self, console: Console, name: str, total: int, unit: str, done: int = 0) -> None:
        self.console, self.name, self.total, self.unit, self.done = console, name, total, unit, done
        self._started = self._said = time.perf_counter()
        self._counted, self._before = 0, done
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(name, total=max(total, 1), completed=done, text="")

    def __enter__(self) -> Meterbar:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._progress.stop()

    def advance(self, count: int, text: str = "", units: int | None = None) -> None:
        """So much of the total more is done; `units` is what the rate counts, if not the same."""
        self.done += count
        self._counted += count if units is None else units
        now = time.perf_counter()
        rate = self._counted / max(now - self._started, 1e-9)
        line = f"{rate:,.0f} {self.unit}/s {text}".rstrip()
        self._progress.update(self._task, completed=self.done, text=line)
        if not self.console.is_terminal and (now - self._said > PLAIN_SECONDS or self.done == self.total):
            self._said = now
            left = (self.total - self.done) * (now - self._started) / max(self.done - self._before, 1)
            say(self.console, f"{self.name}: {self.done}/{self.total}, {line}, {left / 60:.0f} min left")
