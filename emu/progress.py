"""What a person sees while something takes longer than a second.

    progress = make()
    progress.step("Fetching 90 packages", total=38_000_000)   # the former step is over
    progress.advance(65536)
    progress.note("KVM is not usable: ...; taking TCG")        # kept in progress.notes for the report
    progress.close()

A bar on a terminal, a line per step elsewhere. Everything goes to standard error, so that standard output stays the
command's own (``output()``). Call it from one thread. Work in another process has ``Told``, and ``retell`` shows what
it tells: objects {"step", "total"}, {"advance"} and {"note"}.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

_LOG_COLUMNS = 120  # a log has no width of its own


def output() -> Console:
    """Standard output, for tables."""
    return Console(width=None if sys.stdout.isatty() else _LOG_COLUMNS)


class Progress(Protocol):
    """The way that long work reports itself."""

    notes: list[str]

    def step(self, text: str, total: int | None = None) -> None:
        """Begin the next step; ``total`` is its size in whatever unit ``advance`` counts, if known."""

    def advance(self, count: int) -> None:
        """``count`` more of the current step's total are done."""

    def note(self, text: str) -> None:
        """Say ``text`` once, and keep it for the report."""

    def close(self) -> None:
        """The last step is over."""


class Silent:
    """Says nothing; keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def step(self, text: str, total: int | None = None) -> None:
        pass

    def advance(self, count: int) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        pass


class Told(Silent):
    """Tells all of it to another process, by ``tell``."""

    def __init__(self, tell: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self._tell = tell

    def step(self, text: str, total: int | None = None) -> None:
        self._tell({"step": text, "total": total})

    def advance(self, count: int) -> None:
        self._tell({"advance": count})

    def note(self, text: str) -> None:
        super().note(text)
        self._tell({"note": text})


def retell(told: dict[str, Any], progress: Progress) -> None:
    """Show what a ``Told`` has told."""
    match told:
        case {"step": text, "total": total}:
            progress.step(text, total)
        case {"advance": count}:
            progress.advance(count)
        case {"note": text}:
            progress.note(text)


class Lines(Silent):
    """A line per step and per note, and every few seconds how far a long step is."""

    def __init__(self, stream: TextIO, interval_s: float = 5.0) -> None:
        super().__init__()
        self._stream = stream
        self._interval_s = interval_s
        self._text = ""
        self._total = 0
        self._done = 0
        self._said_at = 0.0

    def step(self, text: str, total: int | None = None) -> None:
        self._text, self._total, self._done = text, total or 0, 0
        self._said_at = time.monotonic()
        print(text, file=self._stream, flush=True)

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._total and now - self._said_at >= self._interval_s:
            self._said_at = now
            print(f"{self._text}: {min(100, 100 * self._done // self._total)}%", file=self._stream, flush=True)

    def note(self, text: str) -> None:
        super().note(text)
        print(text, file=self._stream, flush=True)


class Bar(Silent):
    """A spinner, a bar and the time on a terminal; a finished step stays as a line."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._bars = RichProgress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bars.add_task("", visible=False)
        self._bars.start()

    def step(self, text: str, total: int | None = None) -> None:
        self._finish()
        self._task = self._bars.add_task(text, total=total)

    def advance(self, count: int) -> None:
        self._bars.advance(self._task, count)

    def note(self, text: str) -> None:
        super().note(text)
        self._bars.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._finish()
        self._bars.stop()

    def _finish(self) -> None:
        self._bars.update(self._task, total=1, completed=1)
        self._bars.stop_task(self._task)


class Late(Silent):
    """Another progress, of which nothing is made or said for work that is done within ``delay_s``."""

    def __init__(self, make: Callable[[], Progress], delay_s: float = 1.0) -> None:
        super().__init__()
        self._make = make
        self._from = time.monotonic() + delay_s
        self._step: tuple[str, int | None] = "", None
        self._done = 0
        self._shown: Progress | None = None

    def step(self, text: str, total: int | None = None) -> None:
        self._step, self._done = (text, total), 0
        if self._shown is not None:
            self._shown.step(text, total)

    def advance(self, count: int) -> None:
        self._done += count
        if self._shown is not None:
            self._shown.advance(count)
        elif time.monotonic() >= self._from:
            self._shown = self._make()
            self._shown.step(*self._step)
            self._shown.advance(self._done)

    def close(self) -> None:
        if self._shown is not None:
            self._shown.close()


def make() -> Progress:
    """The progress that fits standard error."""
    if sys.stderr.isatty():
        return Bar(Console(stderr=True))
    return Lines(sys.stderr)
