"""`emu top`: what the cards of a lab do at this moment, from their own counters and histograms.

    for shown in views(status, interval_s=1.0): console.print(as_table("my", shown))

A view is the difference of two looks. Of each controller: iops, read and written bytes per second, latency
percentiles, punts and errors per second, mean times in the queue and in service. Of each daemon the CPU of its
stages, of each VM that of QEMU, in CPUs (1.0 is one CPU busy).

Parameters: ``interval_s`` seconds between looks.
Limits: latencies are those that the card sees, from the command in its queue to its completion; a percentile is the
upper end of its bucket, an eighth of an octave. A controller reset within the interval loses the counts before it.
Source: dpu_get_stats; proc(5), schedstat.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpu.layout import HISTOGRAM_STEP_BITS
from emu.daemon import nqn
from emu.metrics import call
from emu.process import process_cpu_ns, thread_cpu_ns
from emu.report.card import io_queues, queues_since
from emu.units import format_duration, format_size, plural
from emu.workloads.measures import Histogram, percentile_name

PERCENTILES = (50.0, 99.0, 99.9)
_STAGES = {"MainThread": "control", "poller": "asic"}  # by the beginning of a thread's name; all others: "threads"


@dataclass(frozen=True)
class Look:
    """What was seen at one time. ``cpu_ns``: by owner (a DPU's or VM's name) and stage."""

    at_s: float
    stats: dict[str, Mapping[str, Any] | None]
    cpu_ns: dict[tuple[str, str], dict[int, int]] = field(default_factory=dict)


def views(lab: Mapping[str, Any], interval_s: float) -> Iterator[dict[str, Any]]:
    """One view after the other, for ever; ``lab`` is a lab's status."""
    before = look(lab)
    while True:
        time.sleep(interval_s)
        after = look(lab)
        yield view(lab, before, after)
        before = after


def look(lab: Mapping[str, Any]) -> Look:
    stats = {name: call(dpu["rpc"], "dpu_get_stats") for name, dpu in lab["dpus"].items()}
    cpu: dict[tuple[str, str], dict[int, int]] = {}
    for name, answer in stats.items():
        keeper = lab["dpus"][name]["pid"]
        cpu[name, "keeper"] = {keeper: process_cpu_ns(keeper)}
        for thread, tid in answer["threads"] if answer else ():
            stage = next((stage for start, stage in _STAGES.items() if thread.startswith(start)), "threads")
            assert answer is not None
            cpu.setdefault((name, stage), {})[tid] = thread_cpu_ns(answer["pid"], tid)
    for name, vm in lab["vms"].items():
        cpu[name, "QEMU"] = {vm["pid"]: process_cpu_ns(vm["pid"])}
    return Look(time.monotonic(), stats, cpu)


def view(lab: Mapping[str, Any], before: Look, after: Look) -> dict[str, Any]:
    """What has happened between two looks, as `emu top --json` prints it."""
    seconds = after.at_s - before.at_s
    used = {name: _cpus(name, before, after, seconds) for name in (*lab["dpus"], *lab["vms"])}
    return {
        "seconds": round(seconds, 3),
        "dpus": {
            name: {
                "ok": after.stats[name] is not None,
                "worker_restarts": (after.stats[name] or {"generation": 1})["generation"] - 1,
                "cpus": used[name],
                "controllers": {
                    controller: _controller(nqn(name, controller), before.stats[name], after.stats[name], seconds)
                    for controller in dpu["controllers"]
                },
            }
            for name, dpu in lab["dpus"].items()
        },
        "vms": {name: {"cpus": used[name]} for name in lab["vms"]},
    }


def _cpus(owner: str, before: Look, after: Look, seconds: float) -> dict[str, float]:
    """By stage. A thread that was not there before has no past to compare with."""
    found: dict[str, float] = {}
    for (name, stage), threads in after.cpu_ns.items():
        if name == owner:
            past = before.cpu_ns.get((name, stage), {})
            used_ns = sum(max(0, cpu_ns - past[tid]) for tid, cpu_ns in threads.items() if tid in past)
            found[stage] = round(used_ns / 1e9 / seconds, 3)
    return found


def _controller(
    name: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, seconds: float
) -> dict[str, Any]:
    past, now = (io_queues(stats, name) if stats else {} for stats in (before, after))
    counted = queues_since(past, now)
    commands = counted.get("commands", 0)
    reasons = {key: count for key, count in counted.items() if key == "punts" or key.startswith("punts.")}
    latency = Histogram.of("latency", "ns", "", {_upper_ns(floor): count for floor, count in counted["latency"]})
    return {
        "commands": commands,
        "iops": round(commands / seconds, 1),
        "read_bytes_per_s": round(counted.get("bytes_read", 0) / seconds, 1),
        "write_bytes_per_s": round(counted.get("bytes_written", 0) / seconds, 1),
        "latency_ns": {percentile_name(p): int(latency.percentile(p)) if latency.bins else None for p in PERCENTILES},
        "wait_ns": round(counted.get("wait_ns", 0) / commands) if commands else None,
        "serve_ns": round(counted.get("serve_ns", 0) / commands) if commands else None,
        "punts_per_s": round(sum(reasons.values()) / seconds, 1),
        "errors_per_s": round(counted.get("errors", 0) / seconds, 1),
        "queues": len(now),
    }


def _upper_ns(floor_ns: int) -> int:
    """The upper end of the histogram's bucket that begins at ``floor_ns``."""
    return floor_ns + max(1, 1 << max(0, floor_ns.bit_length() - 1 - HISTOGRAM_STEP_BITS))


# ---- for a person

_TIMES = (*map(percentile_name, PERCENTILES), "queue", "service")


def as_table(name: str, shown: Mapping[str, Any]) -> Group:
    """The view of lab ``name`` as rich shows it: two tables, which fit 80 columns."""
    rates = _table(f"{name}, the last {shown['seconds']:.1f} s", ("IOPS", "read", "write", "punts/s", "errors/s"))
    times = _table("latency of a command; of that, on average, in the queue and in service", _TIMES)
    for dpu_name, dpu in shown["dpus"].items():
        if not dpu["ok"]:
            rates.add_row(escape(dpu_name), "[red]no answer[/]")
            continue
        for controller, row in dpu["controllers"].items():
            rates.add_row(
                escape(f"{dpu_name}.{controller}"),
                f"{row['iops']:,.0f}",
                *(f"{format_size(row[key])}/s" for key in ("read_bytes_per_s", "write_bytes_per_s")),
                *(f"{row[key]:,.0f}" for key in ("punts_per_s", "errors_per_s")),
            )
            ns_values = [*row["latency_ns"].values(), row["wait_ns"], row["serve_ns"]]
            shown_times = ["-" if ns is None else format_duration(ns / 1e9) for ns in ns_values]
            times.add_row(escape(f"{dpu_name}.{controller}"), *shown_times)
    lines = [f"{owner}: {_used(one['cpus'])}" for part in ("dpus", "vms") for owner, one in shown[part].items()]
    restarts = [
        f"{dpu_name}: its worker was restarted {plural(dpu['worker_restarts'], 'time')}"
        for dpu_name, dpu in shown["dpus"].items()
        if dpu["worker_restarts"]
    ]
    return Group(rates, times, Text("\n".join([f"CPU, of {os.cpu_count()}", *lines, *restarts])))


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD)
    table.add_column("controller", overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _used(cpus: Mapping[str, float]) -> str:
    return ", ".join(f"{stage} {100 * used:.1f} %" for stage, used in cpus.items())
