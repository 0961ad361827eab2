"""The difference of two looks at the card's statistics."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any, cast

from dpu.errors import EmuError
from emu.daemon import Dpu
from emu.process import process_cpu_ns
from emu.report.card import Look, look, since


def row(sqid: int, fetched: int, epoch: int = 1, **more: Any) -> dict[str, Any]:
    counts = {"commands": fetched, "bytes_read": 4096 * fetched, "serve_ns": 50 * fetched, "latency": [[48, fetched]]}
    return {"sqid": sqid, "entries": 64, "epoch": epoch, "fetched": fetched, **counts, **more}


def seen(*rows: dict[str, Any], reads: int = 1, pid: int = 7, cpu_ns: int = 0) -> Look:
    return Look({row["sqid"]: row for row in rows}, {"num_read_ops": reads}, pid, cpu_ns)


def test_queues_are_summed_and_what_was_before_is_taken_off() -> None:
    before = seen(row(1, 10), row(2, 5), reads=20, cpu_ns=100)
    after = seen(row(1, 110), row(2, 6, latency=[[48, 5], [96, 1]]), row(3, 4), reads=125, cpu_ns=350)
    assert since(before, after) == {
        "io": {"num_read_ops": 105},
        "commands": 105,
        "bytes_read": 105 * 4096,
        "serve_ns": 105 * 50,
        "latency": [[48, 104], [96, 1]],
        "complete": True,
        "cpu_ns": 250,
    }


def test_counters_by_reason() -> None:
    found = since(seen(row(1, 0, punts={"flush": 1})), seen(row(1, 0, punts={"flush": 3, "fault": 1})))
    assert (found["punts.flush"], found["punts.fault"]) == (2, 1)


def test_a_queue_made_anew_begins_at_nothing() -> None:
    before = seen(row(1, 10), row(2, 8))
    anew = since(before, seen(row(1, 12, epoch=2), row(2, 9)))
    assert (anew["commands"], anew["complete"]) == (13, False)
    assert since(before, seen(row(1, 10)))["complete"] is False


def test_another_worker_or_target_or_none() -> None:
    assert "cpu_ns" not in since(seen(pid=1, cpu_ns=5), seen(pid=2, cpu_ns=9))
    assert since(Look(io={"num_read_ops": 3}), Look(io={"num_read_ops": 5})) == {"io": {"num_read_ops": 2}}
    assert since(Look(), seen()) == since(seen(), Look()) == {}


class FakeDpu:
    """Answers by method; an error for those that it has not."""

    name = "card"

    def __init__(self, **answers: dict[str, Any]) -> None:
        self.answers = answers

    async def rpc(self, method: str, **parameters: Any) -> dict[str, Any]:
        if method not in self.answers:
            raise EmuError("Method not found")
        assert parameters == ({"names": ["fast.2"]} if method == "bdev_get_iostat" else {})
        return self.answers[method]


def looked(**answers: dict[str, Any]) -> Look:
    return asyncio.run(look(cast(Dpu, FakeDpu(**answers)), "fast", 2))


def test_a_look_takes_the_io_queues_of_its_controller() -> None:
    mine, other = "nqn.2026-11.internal.dpu-emu:card:fast", "nqn.2026-11.internal.dpu-emu:card:other"
    stats = {
        "pid": os.getpid(),
        "controllers": [{"nqn": other, "queues": [row(1, 1)]}, {"nqn": mine, "queues": [row(0, 3), row(1, 2)]}],
    }
    bdev = {"name": "fast.2", "bytes_read": 5, "num_read_ops": 1, "max_read_latency_ticks": 9, "io_error": {}}
    iostat = {"tick_rate": 1, "bdevs": [bdev]}
    found = looked(dpu_get_stats=stats, bdev_get_iostat=iostat)
    assert (found.queues, found.io, found.pid) == ({1: row(1, 2)}, {"bytes_read": 5, "num_read_ops": 1}, os.getpid())
    assert looked(bdev_get_iostat=iostat) == Look(io=found.io)
    assert looked() == Look()


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
