"""The difference of two looks at the card's statistics."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, cast

from dpu.errors import EmuError
from emu.daemon import Dpu
from emu.report.card import Look, look, process_cpu_ns, since


def row(sqid: int, fetched: int, epoch: int = 1, **more: Any) -> dict[str, Any]:
    counts = {"commands": fetched, "bytes_read": 4096 * fetched, "serve_ns": 50 * fetched, "latency": [[48, fetched]]}
    return {"sqid": sqid, "entries": 64, "epoch": epoch, "fetched": fetched, **counts, **more}


def test_queues_are_summed_and_what_was_before_is_taken_off() -> None:
    before = Look({1: row(1, 10), 2: row(2, 5)}, pid=7, cpu_ns=100)
    after = Look({1: row(1, 110), 2: row(2, 6, latency=[[48, 5], [96, 1]]), 3: row(3, 4)}, pid=7, cpu_ns=350)
    assert since(before, after) == {
        "commands": 105,
        "bytes_read": 105 * 4096,
        "serve_ns": 105 * 50,
        "latency": [[48, 104], [96, 1]],
        "complete": True,
        "cpu_ns": 250,
    }


def test_counters_by_reason() -> None:
    before = Look({1: row(1, 0, punts={"flush": 1})})
    after = Look({1: row(1, 0, punts={"flush": 3, "fault": 1})})
    found = since(before, after)
    assert (found["punts.flush"], found["punts.fault"]) == (2, 1)


def test_a_queue_made_anew_begins_at_nothing() -> None:
    before = Look({1: row(1, 10), 2: row(2, 8)})
    anew = since(before, Look({1: row(1, 12, epoch=2), 2: row(2, 9)}))
    assert (anew["commands"], anew["complete"]) == (13, False)
    assert since(before, Look({1: row(1, 10)}))["complete"] is False


def test_another_worker_or_none() -> None:
    assert "cpu_ns" not in since(Look(pid=1, cpu_ns=5), Look(pid=2, cpu_ns=9))
    assert since(None, Look()) == since(Look(), None) == {}


class FakeDpu:
    name = "card"

    def __init__(self, answer: dict[str, Any] | EmuError) -> None:
        self.answer = answer

    async def rpc(self, method: str) -> dict[str, Any]:
        assert method == "dpu_get_stats"
        if isinstance(self.answer, EmuError):
            raise self.answer
        return self.answer


def test_a_look_takes_the_io_queues_of_its_controller() -> None:
    mine, other = "nqn.2026-11.internal.dpu-emu:card:fast", "nqn.2026-11.internal.dpu-emu:card:other"
    stats = {
        "pid": os.getpid(),
        "controllers": [{"nqn": other, "queues": [row(1, 1)]}, {"nqn": mine, "queues": [row(0, 3), row(1, 2)]}],
    }
    found = asyncio.run(look(cast(Dpu, FakeDpu(stats)), "fast"))
    assert found is not None and found.queues == {1: row(1, 2)} and found.pid == os.getpid()
    assert asyncio.run(look(cast(Dpu, FakeDpu(EmuError("method not found"))), "fast")) is None


def test_cpu_time_is_that_of_all_threads() -> None:
    begun, end = threading.Event(), threading.Event()

    def busy() -> None:
        sum(range(2_000_000))
        begun.set()
        end.wait()

    before = process_cpu_ns(os.getpid())
    thread = threading.Thread(target=busy)
    thread.start()
    begun.wait()
    try:
        assert process_cpu_ns(os.getpid()) - before > 5_000_000
    finally:
        end.set()
        thread.join()
    assert process_cpu_ns(1 << 30) == 0
