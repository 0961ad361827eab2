"""Whether NEW differs from BASE, from the reports of their runs.

Use::

    base, new = [measures(document) for document in base_reports], ...
    findings = judge(base, new, paired=True)

A measure is one of three kinds:

* ``exact``: known to be the same in every run (bytes of a bounded workload, errors, restarts). One run that differs
  is a difference; there is no tolerance.
* ``count``: a count of bounded work (commands, punts, interrupts) that may or may not depend on timing. Where it was
  the same in all runs of each side (three at least) it is treated as exact, otherwise as measured.
* ``measured``: anything with noise. A rank test of all runs, adjusted for the number of measures; below ``ALPHA`` it
  is a difference. Where even the clearest difference could not have got there, because the runs are too few, the
  verdict is "undecided".

Source: the tests are in :mod:`emu.compare.stats`; 0.005 as the threshold of a claim: D. J. Benjamin and others,
"Redefine statistical significance" (2018).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal

from dpu.errors import EmuError
from emu.compare import stats

ALPHA = 0.005
_RUNS_FOR_EXACT = 3  # of each side, to take a count that did not vary for one that cannot

Kind = Literal["exact", "count", "measured"]
Better = Literal["more", "less", ""]
Verdict = Literal["same", "better", "worse", "changed", "undecided"]

_LATENCIES = ("clat_p50", "clat_p99")
_BETTER: dict[str, Better] = {"1/s": "more", "B/s": "more", "ns": "less", "s": "less"}
_NOT_COMPARED = ("io", "latency", "complete", "wait_ns")  # how long a command waits says more of the guest
_BOUNDED = ("verify", "fs")  # workloads that always do the same work


@dataclass(frozen=True)
class Measure:
    """One number of one run; ``better`` is what one wants of it, "" where that cannot be said."""

    value: float
    unit: str
    kind: Kind
    better: Better


@dataclass(frozen=True)
class Finding:
    """One measure of both sides.

    ``base``, ``new``: medians. ``ratio`` new : base with its 95 % interval ``low`` to ``high``, None where a value is
    not above 0. ``p`` of this measure alone, ``adjusted`` for all that were tested; None where nothing was tested.
    ``effect``: rank-biserial correlation of the pairs, or Cliff's delta without pairs; positive when NEW is greater.
    """

    name: str
    unit: str
    kind: Kind
    better: Better
    base: float
    new: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    adjusted: float | None = None
    effect: float | None = None
    verdict: Verdict = "same"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


# ---- what of a report is compared


def measures(document: Mapping[str, Any]) -> dict[str, Measure]:
    """The measures of one run's report (``report.json``) by name."""
    found: dict[str, Measure] = {}
    for name, one in document["dpus"].items():
        if one["worker_restarts"] is not None:
            found[f"{name} restarts"] = Measure(one["worker_restarts"], "1", "exact", "less")
    for number, result in enumerate(document["workloads"]):
        name = f"{number + 1}. {result['name']}"
        found[f"{name} failed"] = Measure(int(not result["ok"]), "1", "exact", "less")
        if result["ok"]:
            bounded = _is_bounded(document["scenario"]["workload"][number])
            for text, measure in (*_samples(result, bounded), *_card(result.get("card", {}), bounded)):
                found[f"{name} {text}"] = measure
    return found


def operations(document: Mapping[str, Any]) -> set[str]:
    """What one run did: its workloads by name, and the operations of those that did not fail."""
    found: set[str] = set()
    for number, result in enumerate(document["workloads"]):
        name = f"{number + 1}. {result['name']}"
        found.add(name)
        if result["ok"]:
            found |= {f"{name} {sample['op']}" for sample in result["samples"] if sample["op"]}
    return found


def _is_bounded(params: Mapping[str, Any]) -> bool:
    """Whether the workload ends after an amount of work, not of time."""
    if params["type"] == "fio":
        return params["job"] is None and params["size"] is not None and params["runtime"] is None
    return params["type"] in _BOUNDED


def _samples(result: Mapping[str, Any], bounded: bool) -> Iterator[tuple[str, Measure]]:
    has_iops = {sample["op"] for sample in result["samples"] if sample["metric"] == "iops"}
    for sample in result["samples"]:
        metric, unit, op, value = sample["metric"], sample["unit"], sample["op"], sample["value"]
        name = f"{op} {metric}".strip()
        if metric == "errors":
            yield name, Measure(value, unit, "exact", "less")
        elif unit in ("1", "B"):
            if bounded:
                yield name, Measure(value, unit, "exact", "")
        elif metric == "bw_bytes" and op in has_iops:
            continue  # says the same
        elif unit in _BETTER and (not metric.startswith("clat_") or metric in _LATENCIES):
            yield name, Measure(value, unit, "measured", _BETTER[unit])


def _card(card: Mapping[str, Any], bounded: bool) -> Iterator[tuple[str, Measure]]:
    """Sums where the work is bounded, and what a command took. No queue's counts where some were lost."""
    if bounded:
        for key, value in card.get("io", {}).items():
            is_bytes = key.startswith("bytes_")
            yield f"card {key}", Measure(value, "B" if is_bytes else "1", "exact" if is_bytes else "count", "")
    commands = card.get("commands", 0)
    if not commands or not card["complete"]:
        return
    for key, value in card.items():
        if key in _NOT_COMPARED or key.startswith("bytes_"):
            continue
        if key.endswith("_ns"):
            yield f"card {key} per command", Measure(value / commands, "ns", "measured", "less")
        elif key == "errors":
            yield "card errors", Measure(value, "1", "exact", "less")
        elif key != "commands":
            yield f"card {key} per command", Measure(value / commands, "1", "count", "less")
        elif bounded:
            yield "card commands", Measure(commands, "1", "count", "")


# ---- the judgement


def judge(base: Sequence[Mapping[str, Measure]], new: Sequence[Mapping[str, Measure]], paired: bool) -> list[Finding]:
    """What can be said of every measure that both sides have in every run.

    ``paired``: run i of BASE and run i of NEW ran next to each other. EmuError when nothing can be compared.
    """
    assert base and new and (not paired or len(base) == len(new))
    names = [name for name in base[0] if all(name in run for run in (*base, *new))]
    if not names:
        raise EmuError("BASE and NEW measure nothing in common", "give both the same workloads")
    findings = [_compare(name, [r[name] for r in base], [r[name] for r in new], paired) for name in names]
    tested = [index for index, finding in enumerate(findings) if finding.p is not None]
    p_values = [findings[index].p or 0.0 for index in tested]
    least = stats.smallest_p(len(base)) if paired else stats.smallest_p_unpaired(len(base), len(new))
    for place, (index, value) in enumerate(zip(tested, stats.benjamini_hochberg(p_values))):
        best_case = stats.benjamini_hochberg([*p_values[:place], least, *p_values[place + 1 :]])[place]
        findings[index] = _decided(findings[index], value, best_case)
    return findings


def unshared(base: Sequence[Mapping[str, Measure]], new: Sequence[Mapping[str, Measure]]) -> list[str]:
    """Names that some runs have and others lack."""
    runs = [*base, *new]
    return sorted({name for run in runs for name in run if not all(name in other for other in runs)})


def _compare(name: str, base: Sequence[Measure], new: Sequence[Measure], paired: bool) -> Finding:
    old, late = [one.value for one in base], [one.value for one in new]
    first = base[0]
    finding = Finding(name, first.unit, first.kind, first.better, median(old), median(late))
    if first.kind == "exact" or (first.kind == "count" and _constant(old) and _constant(late)):
        worst = max if first.better == "less" else min
        shown = (finding.base, finding.new) if _constant(old) and _constant(late) else (worst(old), worst(late))
        verdict = _direction(shown[0], shown[1], first.better) if sorted(set(old)) != sorted(set(late)) else "same"
        return replace(finding, kind="exact", base=shown[0], new=shown[1], verdict=verdict)
    if min(len(old), len(late)) < 2:
        return replace(finding, verdict="undecided")
    positive = min(*old, *late) > 0
    a, b = ([math.log(v) for v in old], [math.log(v) for v in late]) if positive else (old, late)
    if paired:
        differences = [y - x for x, y in zip(a, b)]
        p, effect = stats.signed_rank(differences), stats.rank_biserial(differences)
        low, middle, high = stats.paired_shift(differences)
    else:
        p, effect = stats.rank_sum(a, b), stats.cliffs_delta(a, b)
        low, middle, high = stats.shift(a, b)
    finding = replace(finding, kind="measured", p=p, effect=effect)
    if not positive:
        return finding
    ends = [math.exp(end) if math.isfinite(end) else None for end in (low, high)]
    return replace(finding, ratio=math.exp(middle), low=ends[0], high=ends[1])


def _decided(finding: Finding, adjusted: float, best_case: float) -> Finding:
    """The verdict on something tested; ``best_case``: its adjusted p, differed it as clearly as so many runs can."""
    if adjusted >= ALPHA:
        return replace(finding, adjusted=adjusted, verdict="same" if best_case < ALPHA else "undecided")
    assert finding.effect is not None
    return replace(finding, adjusted=adjusted, verdict=_direction(0.0, finding.effect, finding.better))


def _direction(base: float, new: float, better: Better) -> Verdict:
    if not better or base == new:
        return "changed"
    return "better" if (new > base) == (better == "more") else "worse"


def _constant(values: Sequence[float]) -> bool:
    return len(set(values)) == 1 and len(values) >= _RUNS_FOR_EXACT
