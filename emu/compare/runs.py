"""The runs of a comparison: pairs in a random order, or reports that were saved earlier.

Use::

    base, new = run_pairs(one_run, Side("base", scenario), Side("new", other), pairs=12, seed=1, out=out)
    base = saved(Path("out/before"))

Source: balanced random order of pairs against drift: T. Kalibera and R. Jones, "Rigorous benchmarking in reasonable
time" (2013).
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpu.errors import EmuError
from emu.report.document import REPORT, SCHEMA
from emu.scenario import Scenario

Document = dict[str, Any]
"""A run's report as JSON."""


@dataclass(frozen=True)
class Side:
    """What is compared: a scenario, with variables that are added to the environment of its daemons."""

    name: str
    scenario: Scenario
    environment: Mapping[str, str] = field(default_factory=dict)


OneRun = Callable[[Side, Path], Document]


def order(pairs: int, seed: int) -> list[bool]:
    """For each pair whether BASE runs first: half of them (or one more), at random places."""
    firsts = [index % 2 == 0 for index in range(pairs)]
    random.Random(seed).shuffle(firsts)
    return firsts


def run_pairs(
    one_run: OneRun, base: Side, new: Side, pairs: int, seed: int, out: Path
) -> tuple[list[Document], list[Document]]:
    """The reports of both sides, pair by pair; each run leaves its folder ``out``/SIDE/NN.

    EmuError as soon as two runs had different accelerators.
    """
    found: dict[str, list[Document]] = {base.name: [], new.name: []}
    for number, base_first in enumerate(order(pairs, seed), 1):
        for side in (base, new) if base_first else (new, base):
            found[side.name].append(one_run(side, out / side.name / f"{number:02}"))
            same_accelerator(document for documents in found.values() for document in documents)
    return found[base.name], found[new.name]


def run_once(side: Side, out: Path, **config: Any) -> Document:
    """One run of a side in a lab of its own; ``config``: fields of :class:`emu.lab.LabConfig`."""
    from emu.progress import Silent
    from emu.run import run_to_report

    with environment(side.environment):
        return run_to_report(
            side.scenario, side.scenario.lab_config(out=out / "lab", **config), Silent(), out
        ).to_json()


@contextmanager
def environment(more: Mapping[str, str]) -> Iterator[None]:
    """Daemons inherit ours."""
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def saved(path: Path) -> list[Document]:
    """The reports in ``path``: a report.json, a folder with one, or a folder of such folders. EmuError otherwise."""
    if not path.exists():
        raise EmuError(
            f"there is no {path}", "give a folder that `emu run --out` has left, or one with several of them"
        )
    files = [path if path.is_file() else path / REPORT]
    if not files[0].is_file():
        files = sorted(path.glob(f"*/{REPORT}"))
    if not files and (below := [*path.glob(f"*/*/{REPORT}"), *path.glob(f"*/*/*/{REPORT}")]):
        sides = sorted({str(file.parents[1]) for file in below})
        raise EmuError(f"{path} holds runs of several sides", f"give one of them: {' or '.join(sides[:2])}")
    if not files:
        raise EmuError(f"{path} has no {REPORT}", "give a folder that `emu run --out` has left, or one with several")
    return [_load(file) for file in files]


def _load(file: Path) -> Document:
    try:
        document = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EmuError(f"{file} cannot be read: {error}", "give a report.json of this project") from error
    if not isinstance(document, dict) or document.get("schema") != SCHEMA or "workloads" not in document:
        raise EmuError(f"{file} is no report of schema {SCHEMA}", "give a report.json of this release")
    if document["error"]:
        first = document["error"].splitlines()[0]
        raise EmuError(f"{file} is of a run that did not come to its end: {first}", "take it away, or run it again")
    return document


def is_saved(text: str) -> bool:
    """Whether an operand of the command names reports, and not a scenario."""
    path = Path(text)
    return path.is_dir() or path.suffix == ".json"


def same_accelerator(documents: Iterable[Document]) -> None:
    """EmuError when two runs had different accelerators: their figures are of different machines."""
    found = sorted({str(document["host"].get("accelerator")) for document in documents})
    if len(found) > 1:
        raise EmuError(
            f"these runs had different accelerators: {' and '.join(found)}",
            "compare runs of one accelerator; --accel tcg or --accel kvm insists on it",
        )
