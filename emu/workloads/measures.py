"""What a workload measures beside single numbers: distributions and time series.

Use::

    both = Histogram.merge([first, second])
    both.percentile(99.9)

Limits: a percentile of several runs exists only in the merged histogram; percentiles themselves are never averaged.

Source: fio's ``stat.c`` for the rule of percentiles (the first bin whose cumulative count reaches p % of all).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import Any

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True)
class Histogram:
    """How often each value of ``metric`` was met: ``bins`` are (value in ``unit``, count), values ascending."""

    metric: str
    unit: str
    op: str
    bins: tuple[tuple[float, int], ...]

    @classmethod
    def of(cls, metric: str, unit: str, op: str, counts: Mapping[float, int]) -> Histogram:
        """From counts by value; values that never came are left out."""
        return cls(metric, unit, op, tuple(sorted((value, count) for value, count in counts.items() if count)))

    @classmethod
    def merge(cls, parts: Sequence[Histogram]) -> Histogram:
        """All that ``parts`` (at least one) have counted; of the first one's metric and operation."""
        counts: Counter[float] = Counter()
        for part in parts:
            for value, count in part.bins:
                counts[value] += count
        first = parts[0]
        return cls.of(first.metric, first.unit, first.op, counts)

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Histogram:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        bins = tuple((value, count) for value, count in document["bins"])
        return cls(document["metric"], document["unit"], document["op"], bins)

    @property
    def count(self) -> int:
        return sum(count for _, count in self.bins)

    def percentile(self, p: float) -> float:
        """The smallest value that at least ``p`` % of all do not exceed. ValueError for an empty histogram."""
        if not self.bins:
            raise ValueError("an empty histogram has no percentiles")
        cumulative = list(accumulate(count for _, count in self.bins))
        return self.bins[bisect_left(cumulative, Fraction(p) * cumulative[-1] / 100)][0]


@dataclass(frozen=True)
class Series:
    """``metric`` over time: ``points`` are (seconds since the start, value in ``unit``)."""

    metric: str
    unit: str
    op: str
    points: tuple[tuple[float, float], ...]

    @classmethod
    def load(cls, document: Mapping[str, Any]) -> Series:
        """The inverse of ``dataclasses.asdict`` and JSON."""
        points = tuple((at_s, value) for at_s, value in document["points"])
        return cls(document["metric"], document["unit"], document["op"], points)


def percentile_name(p: float) -> str:
    """p99, p99.9"""
    return f"p{p:g}"


def merge_all(histograms: Iterable[Histogram]) -> list[Histogram]:
    """One for each metric and operation that there is."""
    parts: dict[tuple[str, str], list[Histogram]] = {}
    for one in histograms:
        parts.setdefault((one.metric, one.op), []).append(one)
    return [Histogram.merge(group) for group in parts.values()]
