"""Runs cases as jobs of a sweep and writes the table: JSON, text for a reader, and a picture.

Use: ``rows = run(["C5", "C13"], seeds=[1, 2])``; ``text(rows)``; ``write(rows, folder)``.
Errors: SimError for a case that does not exist.
"""

from __future__ import annotations

import json
import random
import statistics
import traceback
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from html import escape
from pathlib import Path
from typing import Any

from net.errors import SimError
from net.experiments.ablation import ABLATION, VARIANTS, Measure
from net.experiments.cases import CASES, Outcome
from net.experiments.lab import Variant
from net.sim.sweep import sweep

SHARES = "Shares are of the payload rate of all ports of a host"
RECONSTRUCTED = (
    "The transport is reconstructed from public readers of the MRC specification; nothing here is called compliant."
)
NOTE = f"{SHARES}, times in virtual time: 10 Gb/s ports, base RTT 94 us. {RECONSTRUCTED}"


@dataclass(slots=True)
class Result:
    """A case over its seeds. ``passed`` only if it passed on each; ``ours`` is what the first seed showed."""

    case: str
    title: str
    source: str
    paper: str
    rule: str
    ours: str
    passed: bool
    seeds: list[int]
    passes: int
    figures: dict[str, list[float]] = field(default_factory=dict)


def fresh_seeds(count: int) -> list[int]:
    """Seeds that nobody has tuned for."""
    return [random.SystemRandom().randrange(1, 1 << 31) for _ in range(count)]


def chosen(names: Sequence[str], known: Collection[str] = tuple(CASES), kind: str = "experiment") -> list[str]:
    """Names of cases, checked; all of those ``known`` when none is given."""
    for name in names:
        if name not in known:
            near = get_close_matches(name.upper(), known, 1)
            raise SimError(f"there is no {kind} {name}", f"{near[0]}?" if near else f"give {', '.join(known)}")
    return list(names) or list(known)


def one(job: tuple[str, int, Variant]) -> Outcome:
    """A case with a seed; it fails, too, where what it takes for granted does not hold."""
    name, seed, variant = job
    try:
        return CASES[name].run(seed, variant)
    except AssertionError as error:
        return Outcome(f"broke: {traceback.extract_tb(error.__traceback__)[-1].line}", False)


def run(
    names: Sequence[str],
    seeds: Sequence[int],
    variant: Variant | None = None,
    **place: Any,
) -> list[Result]:
    """Every case with every seed. place: workers, dask, progress, as for net.sim.sweep."""
    names, variant = chosen(names), variant or Variant()
    jobs = [(name, seed, variant) for name in names for seed in seeds]
    outcomes = dict(zip(((name, seed) for name, seed, _ in jobs), sweep(one, jobs, **place)))
    return [result(name, seeds, [outcomes[name, seed] for seed in seeds]) for name in names]


def result(name: str, seeds: Sequence[int], outcomes: Sequence[Outcome]) -> Result:
    """A case's row, from its outcome with each seed."""
    row = CASES[name]
    passes = sum(outcome.passed for outcome in outcomes)
    shown = next((outcome for outcome in outcomes if not outcome.passed), outcomes[0])
    figures = {key: [outcome.figures.get(key, 0.0) for outcome in outcomes] for key in outcomes[0].figures}
    return Result(
        name,
        row.title,
        row.source,
        row.paper,
        row.rule,
        shown.ours,
        passes == len(seeds),
        list(seeds),
        passes,
        figures,
    )


def ablate(seeds: Sequence[int], **place: Any) -> dict[str, dict[str, Measure]]:
    """Traffic -> variant -> what it came to, medians over the seeds. place: as for ``run``."""
    jobs = [(traffic, name, seed) for traffic in ABLATION for name in VARIANTS for seed in seeds]
    found: dict[tuple[str, str], list[Measure]] = {}
    for (traffic, name, _), measure in zip(jobs, sweep(_ablate, jobs, **place)):
        found.setdefault((traffic, name), []).append(measure)
    return {
        traffic: {
            name: Measure(*(statistics.median(values) for values in zip(*found[traffic, name]))) for name in VARIANTS
        }
        for traffic in ABLATION
    }


def _ablate(job: tuple[str, str, int]) -> Measure:
    traffic, name, seed = job
    return ABLATION[traffic](seed, VARIANTS[name])


# Written down.


def text(rows: Sequence[Result], note: str = NOTE) -> str:
    """The table for a reader, below a ``note``."""
    lines = [note, ""]
    for row in rows:
        lines += [
            f"{row.case:4} {'pass' if row.passed else 'FAIL'} ({row.passes} of {len(row.seeds)})  {row.title}",
            f"       paper ({row.source}): {row.paper}",
            f"       rule: {row.rule}",
            f"       ours: {row.ours}",
        ]
    return "\n".join(lines) + "\n"


def ablation_text(found: dict[str, dict[str, Measure]]) -> str:
    """The ablation for a reader."""
    lines = []
    for traffic, variants in found.items():
        lines += ["", traffic, f"  {'':22}{'goodput':>9}{'least flow':>12}{'sent again':>12}{'timeouts':>10}"]
        for name, measure in variants.items():
            lines.append(
                f"  {name:22}{100 * measure.goodput:>7.1f} %{100 * measure.least:>10.1f} %"
                f"{100 * measure.again:>10.2f} %{measure.timeouts:>10.0f}"
            )
    return "\n".join(lines) + "\n"


def svg(rows: Sequence[Result]) -> str:
    """The table as a picture: a line per case, green or red, with both statements."""
    height, width = 44, 1180
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height * len(rows) + 10}" '
        'font-family="sans-serif" font-size="12">'
    ]
    for number, row in enumerate(rows):
        top = number * height + 8
        colour = "#2a7" if row.passed else "#c33"
        parts += [
            f'<rect x="4" y="{top}" width="46" height="{height - 8}" rx="4" fill="{colour}"/>',
            f'<text x="27" y="{top + 22}" fill="#fff" text-anchor="middle">{row.case}</text>',
            f'<text x="60" y="{top + 14}"><tspan font-weight="bold">{escape(row.title)}</tspan> '
            f'<tspan fill="#666">paper: {escape(row.paper)}</tspan></text>',
            f'<text x="60" y="{top + 31}">{escape(row.ours)}</text>',
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def document(rows: Sequence[Result], found: dict[str, dict[str, Measure]] | None, note: str = NOTE) -> dict[str, Any]:
    """Everything, for JSON."""
    written: dict[str, Any] = {
        "ok": all(row.passed for row in rows),
        "note": note,
        "experiments": [asdict(row) for row in rows],
    }
    if found is not None:
        written["ablation"] = {
            traffic: {name: measure._asdict() for name, measure in variants.items()}
            for traffic, variants in found.items()
        }
    return written


def write(
    rows: Sequence[Result], found: dict[str, dict[str, Measure]] | None, folder: Path, note: str = NOTE
) -> None:
    """``experiments.json``, ``.txt`` and ``.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "experiments.json").write_text(json.dumps(document(rows, found, note), indent=1) + "\n")
    (folder / "experiments.txt").write_text(text(rows, note) + (ablation_text(found) if found else ""))
    (folder / "experiments.svg").write_text(svg(rows))
