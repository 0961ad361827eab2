"""``emu compare``: whether NEW differs from BASE, by runs in pairs and tests that are fit for few and noisy runs.

    emu compare my.toml new.toml --pairs 12
    emu compare my.toml --set workload.0.iodepth=64
    emu compare my.toml --env DPU_EMU_STAMPS=0          # what a switch is worth
    emu compare out/last-week out/today                 # reports that were saved
    emu compare my.toml --aa --trials 20                # how often it cries wolf on this machine

Pairs run next to each other, BASE first in half of them, in an order that ``--seed`` draws. Deterministic counts are
compared first and without tolerance; what has noise by an exact paired rank test, saved reports by Mann and Whitney's
test; p-values are adjusted by Benjamini and Hochberg's method, and below 0.005 it is a difference. See
:mod:`emu.compare.judge` for what is measured and :mod:`emu.compare.stats` for the tests.

In ``--out``: compare.json, compare.html, and the report of every run in base/NN and new/NN. Keys of compare.json:
schema, command, pairs, seed, alpha, trials [{outcome, findings, unshared, other_work}], false_positives, upper_bound
(--aa: the rate of trials with a finding that this many trials do not exclude, 95 %), notes, outcome.

Outcomes and exit codes: 0 "same", no difference; 1 "worse", NEW is worse in something; 4 "different", NEW differs
and is worse in nothing, or its workloads do something else; 5 "undecided", nothing was found, but the runs are too
few for some measures to show a difference; 2 and 3 as everywhere. With --aa: 0 no trial found a difference, 1 some
did, 5 none did but some could not have.

Limits: what has noise needs 9 pairs (6 saved runs of each side), and more the more is measured. With fewer only
deterministic counts are decided; that is said before the first run, and afterwards how many are needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dpu.errors import EmuError
from emu.compare import stats
from emu.compare.judge import ALPHA, Finding, judge, measures, operations, unshared
from emu.compare.runs import Document, OneRun, Side, run_pairs, same_accelerator
from emu.paths import write_whole
from emu.units import plural

SCHEMA = 1
COMPARE, PAGE = "compare.json", "compare.html"
Outcome = Literal["worse", "different", "undecided", "same"]
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)  # of several trials the first of these counts

_HOST = ("cpu_model", "cores", "kernel", "python", "project_version", "qemu_version", "image_digest")


@dataclass
class Trial:
    """One comparison of all its runs.

    ``unshared``: measures that some runs lack. ``other_work``: workloads and their operations that some runs lack;
    ``is_other_work``: and the runs of one side have all of one of them, those of the other side none.
    """

    findings: list[Finding]
    unshared: list[str] = field(default_factory=list)
    other_work: list[str] = field(default_factory=list)
    is_other_work: bool = False

    @property
    def outcome(self) -> Outcome:
        verdicts = {finding.verdict for finding in self.findings}
        if "worse" in verdicts:
            return "worse"
        if verdicts & {"better", "changed"} or self.is_other_work:
            return "different"
        return "undecided" if "undecided" in verdicts or self.other_work else "same"

    def to_json(self) -> dict[str, Any]:
        findings = [finding.to_json() for finding in self.findings]
        return {
            "outcome": self.outcome,
            "findings": findings,
            "unshared": self.unshared,
            "other_work": self.other_work,
        }


@dataclass
class Comparison:
    """See the module's docstring."""

    base: str
    new: str
    pairs: int | None = None  # None: of saved reports
    seed: int = 0
    aa: bool = False
    trials: list[Trial] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def outcome(self) -> Outcome:
        return min((trial.outcome for trial in self.trials), key=_OUTCOMES.index, default="same")

    @property
    def false_positives(self) -> int:
        """Trials that found a difference; of --aa they are false."""
        return sum(trial.outcome in ("worse", "different") for trial in self.trials)

    @property
    def undecided(self) -> int:
        """Trials that could not find some differences."""
        return sum(trial.outcome == "undecided" for trial in self.trials)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "ok": self.outcome == "same",
            "outcome": self.outcome,
            "base": self.base,
            "new": self.new,
            "pairs": self.pairs,
            "seed": self.seed,
            "alpha": ALPHA,
            "aa": self.aa,
            "trials": [trial.to_json() for trial in self.trials],
            "notes": self.notes,
        }
        if self.aa:
            document["false_positives"] = self.false_positives
            document["upper_bound"] = stats.upper_bound(self.false_positives, len(self.trials) - self.undecided)
        return document


def compare_scenarios(
    comparison: Comparison,
    base: Side,
    new: Side,
    one_run: OneRun,
    out: Path,
    trials: int = 1,
    told: Callable[[Trial], None] = lambda trial: None,
) -> None:
    """Runs ``trials`` times ``comparison.pairs`` pairs and judges each trial; ``told`` is called after each."""
    assert comparison.pairs is not None
    for number in range(trials):
        folder = out if trials == 1 else out / f"trial-{number + 1:02}"
        documents = run_pairs(one_run, base, new, comparison.pairs, comparison.seed + number, folder)
        comparison.trials.append(_trial(comparison, *documents, paired=True))
        told(comparison.trials[-1])


def compare_saved(comparison: Comparison, base: Sequence[Document], new: Sequence[Document]) -> None:
    """Judges reports that were made earlier. EmuError when their accelerators differ."""
    same_accelerator([*base, *new])
    comparison.trials.append(_trial(comparison, base, new, paired=False))


def _trial(comparison: Comparison, base: Sequence[Document], new: Sequence[Document], paired: bool) -> Trial:
    sides = [measures(document) for document in base], [measures(document) for document in new]
    other, is_other = _other_work([operations(one) for one in base], [operations(one) for one in new])
    trial = Trial(judge(*sides, paired), unshared(*sides), other, is_other)
    if any(finding.verdict == "undecided" for finding in trial.findings):
        noisy = sum(finding.verdict == "undecided" or finding.p is not None for finding in trial.findings)
        runs = "pairs" if paired else "runs of each side"
        needed = stats.runs_needed(noisy, ALPHA, paired)
        _note(comparison, f"too few {runs} to judge {plural(noisy, 'noisy measure')}: take {needed} at least")
    for key in _HOST:
        found = sorted({str(document["host"].get(key)) for document in (*base, *new)})
        if len(found) > 1:
            _note(comparison, f"the runs differ in {key.replace('_', ' ')}: {', '.join(found)}")
    loads = [document["host"]["load_start"][0] for document in (*base, *new) if document["host"].get("load_start")]
    cores = max(document["host"].get("cores") or 1 for document in (*base, *new))
    if loads and max(loads) > cores:
        _note(comparison, f"the host was busy: load up to {max(loads):.1f} on {plural(cores, 'core')}")
    if other:
        _note(comparison, f"not every run did: {', '.join(other)}")
    if trial.unshared:
        _note(comparison, f"not in every run, so not compared: {', '.join(trial.unshared)}")
    return trial


def _other_work(base: Sequence[set[str]], new: Sequence[set[str]]) -> tuple[list[str], bool]:
    """What some runs did and others did not, and whether some of that is all of one side and none of the other."""
    runs = [*base, *new]
    other = sorted({name for run in runs for name in run if not all(name in one for one in runs)})
    in_base, in_new = ({name: sum(name in run for run in side) / len(side) for name in other} for side in (base, new))
    return other, any(abs(in_base[name] - in_new[name]) == 1 for name in other)


def _note(comparison: Comparison, text: str) -> None:
    if text not in comparison.notes:
        comparison.notes.append(text)


def write(comparison: Comparison, out: Path) -> Path:
    """Writes compare.json and compare.html into ``out``, each whole or not at all; the path of the page."""
    from emu.compare.page import page

    document = comparison.to_json()
    links = sorted(str(path.relative_to(out)) for path in out.rglob("report.html"))
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in ((COMPARE, json.dumps(document, indent=2) + "\n"), (PAGE, page(document, links))):
            write_whole(out / name, text)
    except OSError as error:
        raise EmuError(f"cannot write below {out}: {error.strerror}", "choose another --out") from error
    return out / PAGE
