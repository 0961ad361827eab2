"""What the benchmarks share: the stamp of host and load, medians with their spread, the report.

A report is ``{"benchmark", "host", "options", "results", "notes"}``, written to out/bench/NAME.json (or --out).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emu import hostinfo

ROOT = Path(__file__).parents[2]
BUSY_LOAD = 2.0


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    made = argparse.ArgumentParser(
        prog=f"scripts/bench/{name}", description=(description or "").strip(), formatter_class=_Raw
    )
    made.add_argument("--quick", action="store_true", help="few and short runs: does it work at all")
    made.add_argument("--out", type=Path, default=ROOT / "out" / "bench" / f"{name}.json", help="the report")
    return made


class _Raw(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


@dataclass(frozen=True)
class Spread:
    """Of repeated measurements of one thing."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values), len(values))

    def to_dict(self, digits: int = 3) -> dict[str, float]:
        return {
            "median": round(self.median, digits),
            "min": round(self.low, digits),
            "max": round(self.high, digits),
            "count": self.count,
        }


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """As JSON."""
    return Spread.of(values).to_dict(digits)


def load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2)


class Report:
    """Collects results and writes them with the stamp of the host."""

    def __init__(self, name: str, arguments: argparse.Namespace, **stamp: Any) -> None:
        self.name = name
        self.out: Path = arguments.out
        self.options = {key: value for key, value in vars(arguments).items() if key != "out"}
        self.results: dict[str, Any] = {}
        self.notes: list[str] = []
        self._begun = time.time()
        self._host = hostinfo.collect(**stamp)

    def stamp(self, **stamp: Any) -> None:
        """What is known only later: accelerator, QEMU, image."""
        self._host = hostinfo.collect(**stamp)

    def save(self) -> None:
        """Write what there is, also on the way: an interrupted benchmark leaves its results."""
        document = {
            "benchmark": self.name,
            "when": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(self._begun)),
            "seconds": round(time.time() - self._begun, 1),
            "host": self._host.finished().to_dict(),
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in self.options.items()},
            "results": self.results,
            "notes": self.notes,
        }
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps(document, indent=1) + "\n")

    def write(self) -> Path:
        """Save, and say where and what to mind."""
        host = self._host.finished()
        assert host.load_end is not None
        if max(host.load_start[0], host.load_end[0]) > BUSY_LOAD:
            text = f"the host was busy: load {host.load_start[0]:.1f} at the start, {host.load_end[0]:.1f} at the end"
            self.notes.append(text)
        self.save()
        print(f"\n{self.out}")
        for note in self.notes:
            print(f"note: {note}")
        return self.out


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print rows in columns."""
    cells = [[str(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(headings))]
    for row in cells:
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
            )
        )
