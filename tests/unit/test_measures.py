"""Distributions and time series of fio's: against fio's own percentiles, and against naive lists."""

from __future__ import annotations

import json
from dataclasses import asdict
from fractions import Fraction
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu.workloads import fio
from emu.workloads.measures import Histogram, Series, merge_all

# fio 3.39, json+: job "one" with two threads of random reads and writes, then (stonewall) "two" with reads;
# keys that nobody here reads are taken out.
REPORT: dict[str, Any] = json.loads((Path(__file__).parent / "data/fio-three-jobs.json").read_text())

# Its IOPS log by --log_avg_msec=250 --log_unix_epoch=1 --per_job_logs=0, the first columns.
LOG = """\
1796069570205, 152, 0, 0, 0
1796069570205, 152, 1, 0, 0
1796069570455, 148, 0, 0, 0
1796069570455, 148, 1, 0, 0
1796069570204, 152, 0, 0, 0
1796069570204, 152, 1, 0, 0
1796069570455, 148, 0, 0, 0
1796069570455, 148, 1, 0, 0
1796069571315, 152, 0, 0, 0
1796069571566, 147, 0, 0, 0
"""


def of_counts(counts: dict[float, int], op: str = "read") -> Histogram:
    return Histogram.of("clat", "ns", op, counts)


@pytest.mark.parametrize(("number", "op"), [(0, "read"), (0, "write"), (1, "read"), (1, "write"), (2, "read")])
def test_percentiles_of_one_job_are_those_that_fio_prints(number: int, op: str) -> None:
    latency = REPORT["jobs"][number][op]["clat_ns"]
    histogram = of_counts({int(ns): count for ns, count in latency["bins"].items()}, op)
    assert histogram.count == latency["N"]
    assert len(latency["percentile"]) > 10
    for name, value in latency["percentile"].items():
        assert histogram.percentile(float(name)) == value, name


counts = st.dictionaries(st.integers(0, 30), st.integers(0, 20), max_size=20)


@given(st.lists(counts, min_size=1, max_size=4), st.floats(0.1, 100))
def test_a_merge_is_the_distribution_of_all_values(parts: list[dict[float, int]], p: float) -> None:
    values = sorted(value for part in parts for value, count in part.items() for _ in range(count))
    merged = Histogram.merge([of_counts(part) for part in parts])
    assert merged.count == len(values)
    if not values:
        with pytest.raises(ValueError, match="empty"):
            merged.percentile(p)
        return
    assert merged.percentile(p) == values[ceil(Fraction(p) * len(values) / 100) - 1]


def test_merged_percentiles_are_not_averages() -> None:
    fast, slow = of_counts({10: 99, 20: 1}), of_counts({1000: 100})
    merged = Histogram.merge([fast, slow])
    assert (fast.percentile(50), slow.percentile(50)) == (10, 1000)
    assert merged.percentile(50) == 20 and merged.percentile(50.5) == 1000
    assert [one.bins for one in merge_all([fast, of_counts({5: 1}, "write"), slow])] == [merged.bins, ((5, 1),)]


def test_jobs_and_threads_are_merged() -> None:
    found = {histogram.op: histogram for histogram in fio.histograms_of(REPORT)}
    assert set(found) == {"one:read", "one:write", "two:read", "read", "write"}
    values = {
        op: sorted(
            int(ns)
            for job in REPORT["jobs"]
            for ns, count in job[op]["clat_ns"].get("bins", {}).items()
            for _ in range(count)
        )
        for op in ("read", "write")
    }
    samples = {(sample.op, sample.metric): sample.value for sample in fio.samples_of(REPORT)}
    for op, all_values in values.items():
        assert samples[op, "ios"] == found[op].count == len(all_values)
        for p in (50, 90, 99):
            assert samples[op, f"clat_p{p}"] == all_values[ceil(p * len(all_values) / 100) - 1]
        assert samples[op, "clat_max"] == max(job[op]["clat_ns"]["max"] for job in REPORT["jobs"])
    threads = [job["read"] for job in REPORT["jobs"][:2]]
    assert samples["one:read", "iops"] == pytest.approx(sum(thread["iops"] for thread in threads), rel=0.01)
    assert samples["one:read", "bw_bytes"] == pytest.approx(sum(thread["bw_bytes"] for thread in threads), rel=0.01)
    assert ("read", "iops") not in samples  # one ran after the other
    weighted = sum(thread["clat_ns"]["mean"] * thread["total_ios"] for thread in threads)
    assert samples["one:read", "clat_mean"] == pytest.approx(weighted / sum(t["total_ios"] for t in threads))


def test_no_percentile_of_a_part() -> None:
    report = json.loads(json.dumps(REPORT))
    del report["jobs"][0]["read"]["clat_ns"]["bins"]
    ops = {histogram.op for histogram in fio.histograms_of(report)}
    assert ops == {"one:write", "two:read", "write"}
    assert "clat_p99" not in {sample.metric for sample in fio.samples_of(report) if sample.op == "read"}


def test_a_log_is_summed_over_jobs() -> None:
    reads, writes = fio.series_of(LOG, "iops", "1/s", 250)
    assert (reads.op, writes.op) == ("read", "write")
    assert reads.points == ((0.25, 304), (0.5, 296), (1.25, 152), (1.5, 147))  # nothing in between: stonewall
    assert writes.points == ((0.25, 304), (0.5, 296))
    (bandwidth,) = fio.series_of("500, 3, 1, 0, 0\n", "bw_bytes", "B/s", 500, factor=1024)
    assert bandwidth == Series("bw_bytes", "B/s", "write", ((0.5, 3072),))
    assert fio.series_of("", "iops", "1/s", 500) == []


def test_json_and_back() -> None:
    histogram = of_counts({10: 99, 20: 1})
    assert Histogram.load(json.loads(json.dumps(asdict(histogram)))) == histogram
    series = Series("iops", "1/s", "read", ((0.5, 100.0),))
    assert Series.load(json.loads(json.dumps(asdict(series)))) == series
