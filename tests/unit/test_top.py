"""emu top: its arithmetic against sums done by hand, its looks against the kernel's own figures."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
from rich.console import Console

from dpu import layout
from emu import top
from emu.daemon import nqn
from emu.top import Look, as_table, view

LAB = {
    "dpus": {"card": {"rpc": "/no/such", "pid": 1, "controllers": {"a": "", "b": ""}}},
    "vms": {"web": {"pid": 2}},
}


def queue(sqid: int, latencies_ns: list[int], **more: int) -> dict[str, Any]:
    """A queue that has completed commands of these latencies, counted as the card does."""
    counts: dict[int, int] = {}
    for ns in latencies_ns:
        floor = max(one for one in map(layout.bucket_floor_ns, range(layout.HISTOGRAM_BUCKETS)) if one <= ns)
        counts[floor] = counts.get(floor, 0) + 1
    done = len(latencies_ns)
    row = {"sqid": sqid, "entries": 64, "epoch": 1, "fetched": done, "commands": done, "punts": 0, "errors": 0}
    row |= {
        "bytes_read": 4096 * done,
        "bytes_written": 0,
        "signals": done,
        "wait_ns": 0,
        "serve_ns": sum(latencies_ns),
    }
    return {**row, **more, "latency": [list(one) for one in sorted(counts.items())]}


def stats(*queues: dict[str, Any], generation: int = 1) -> dict[str, Any]:
    return {
        "pid": 3,
        "generation": generation,
        "threads": [["MainThread", 3], ["poller-0", 4]],
        "controllers": [{"nqn": nqn("card", "a"), "queues": list(queues)}],
    }


def test_rates_and_percentiles_of_all_queues_together() -> None:
    rng = random.Random(1)
    old = [[rng.randint(1000, 100_000) for _ in range(300)] for _ in range(2)]
    new = [[round(rng.lognormvariate(10, 1)) for _ in range(2000)] for _ in range(2)]
    admin = queue(0, [10**9] * 50)
    before = Look(10.0, {"card": stats(queue(0, []), *(queue(i + 1, old[i]) for i in range(2)))})
    after = Look(12.0, {"card": stats(admin, *(queue(i + 1, old[i] + new[i], punts=4) for i in range(2)))})
    row = view(LAB, before, after)["dpus"]["card"]["controllers"]["a"]
    ranked = sorted(new[0] + new[1])
    assert (row["commands"], row["iops"], row["read_bytes_per_s"]) == (4000, 2000, 2000 * 4096)
    assert (row["punts_per_s"], row["errors_per_s"], row["queues"]) == (4, 0, 2)
    assert row["serve_ns"] == round(sum(ranked) / 4000)
    for name, p in (("p50", 50), ("p99", 99), ("p99.9", 99.9)):
        exact = ranked[-(-round(len(ranked) * p * 10) // 1000) - 1]
        assert exact < row["latency_ns"][name] <= exact * 9 / 8 + 1, name


def test_a_queue_that_was_made_anew_counts_from_nothing() -> None:
    before = Look(0.0, {"card": stats(queue(1, [1000] * 900))})
    after = Look(1.0, {"card": stats(queue(1, [1000] * 100, epoch=2))})
    assert view(LAB, before, after)["dpus"]["card"]["controllers"]["a"]["commands"] == 100


def test_nothing_to_show_is_no_error() -> None:
    idle = view(LAB, Look(0.0, {"card": stats(queue(1, []))}), Look(1.0, {"card": stats(queue(1, []))}))
    assert idle["dpus"]["card"]["controllers"]["a"]["latency_ns"] == {"p50": None, "p99": None, "p99.9": None}
    dead = view(LAB, Look(0.0, {"card": None}), Look(1.0, {"card": None}))
    assert not dead["dpus"]["card"]["ok"]
    for shown in (idle, dead):
        console = Console(file=io.StringIO(), width=80)
        console.print(as_table("my", shown))
        assert isinstance(console.file, io.StringIO)
        assert max(map(len, console.file.getvalue().splitlines())) <= 80


def test_cpu_is_what_threads_used_and_a_new_thread_has_no_past() -> None:
    before = Look(0.0, {"card": stats()}, {("card", "asic"): {4: 10**9, 5: 0}, ("web", "QEMU"): {2: 0}})
    after = Look(
        2.0, {"card": stats()}, {("card", "asic"): {4: 2 * 10**9, 9: 10**12}, ("web", "QEMU"): {2: 3 * 10**9}}
    )
    shown = view(LAB, before, after)
    assert (shown["dpus"]["card"]["cpus"], shown["vms"]["web"]["cpus"]) == ({"asic": 0.5}, {"QEMU": 1.5})


def test_a_look_sorts_threads_into_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {**stats(), "threads": [["MainThread", 3], ["poller-0", 4], ["poller-1", 5], ["asyncio_0", 6]]}
    monkeypatch.setattr(top, "call", lambda path, method: answer)
    found = top.look(LAB).cpu_ns
    assert {stage: sorted(threads) for (owner, stage), threads in found.items() if owner == "card"} == {
        "keeper": [1],
        "control": [3],
        "asic": [4, 5],
        "threads": [6],
    }
