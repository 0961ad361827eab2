"""The trace of commands: what the poller writes down, and the two files.

The JSON is judged by the rules of "Trace Event Format" (Google, 2016), written out here: required keys of each phase,
"b" and "e" of one id and category as brackets, in order of time.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpu import layout, trace
from dpu.backends import FileBackend
from dpu.nvme.interfaces import Completion as Result
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE
from tests.unit.asic_lab import ENGINES, NS_FILE, NS_MEMORY, PLAIN, UNIT, FakeRing, Kept, Lab


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    path = tmp_path / "disk"
    path.write_bytes(bytes(1 << 20))
    backend = FileBackend.create("file", str(path), UNIT, fallocate=True, cache_mode="buffered")
    with Kept(files={NS_FILE: backend}) as kept:
        yield kept


def traced(lab: Lab, names: dict[int, str] | None = None) -> tuple[list[trace.Command], int]:
    part = trace.Part(*trace.records(lab.poller.trace), names or {lab.plane.index: "nqn"}, lab.poller.to_ns)
    return trace.commands([part]), part.lost


def shown(commands: list[trace.Command]) -> list[tuple[int, str, list[str], str]]:
    return [(one.cid, one.name, [name for name, _, _ in one.stages], one.why) for one in commands]


@pytest.mark.parametrize("engine", ["product", "plain"])
def test_commands_of_the_asic_and_of_control(kept: Kept, engine: str) -> None:
    with Lab(kept, ENGINES[engine], stamps=True) as lab:
        lab.poller.make_trace(16)
        lab.begin()
        admin, queue = lab.open_pair(0, 16), lab.open_pair(1, 16)
        memory = kept.ram.alloc(PAGE)
        queue.io(nv.WRITE, 7, 8, memory)
        queue.ring()
        lab.settle()
        queue.cq.reap()
        assert traced(lab) == ([], 0), "nothing before it is switched on"
        lab.plane.set_trace(True)
        queue.io(nv.READ, 0x1_0000_0007 & 0x7F, 8, memory)
        queue.io(nv.READ, 1 << 40, 1, memory)
        queue.io(nv.READ, 0, 1, memory, nsid=NS_FILE)
        queue.ring()
        admin.submit(nv.AER)
        admin.submit(nv.IDENTIFY)
        admin.ring()
        lab.settle()
        for slot in lab.misses():
            lab.plane.stamp(slot, "taken")
            lab.plane.finish(slot, Result(0))
            lab.settle()
        found, lost = traced(lab)
        assert lost == 0
        handed = ["wait", "asic", "to control", "control", "from control"]
        assert sorted(shown(found)) == sorted(
            [
                (1, "Read", ["wait", "asic"], ""),
                (2, "Read", ["wait", "asic"], ""),
                (3, "Read", handed, "file without io_uring"),
                (0, "Async event request", ["parked"], "admin command"),
                (1, "Identify", handed, "admin command"),
            ]
        )
        by_cid = {(one.sqid, one.cid): one for one in found}
        read = by_cid[1, 1]
        assert (read.lba, read.bytes, read.nsid, read.status, read.controller) == (7, 4096, NS_MEMORY, 0, "nqn")
        assert by_cid[1, 2].status & 0x7FF == nv.LBA_OUT_OF_RANGE and by_cid[0, 1].lba is None
        for one in found:
            times = [one.begin_ns, *(time for _, *pair in one.stages for time in pair), one.end_ns]
            assert times == sorted(times) and times[0] > 0
        lab.plane.set_trace(False)
        queue.cq.reap()
        queue.do(lab, nv.FLUSH)
        assert len(traced(lab)[0]) == 5


def test_commands_of_io_uring(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = FakeRing()
    monkeypatch.setattr(PLAIN, "io_uring_enter", ring.enter)
    with Lab(kept, PLAIN, ring=ring, stamps=True) as lab:
        lab.poller.make_trace(16)
        lab.begin()
        lab.plane.set_trace(True)
        queue = lab.open_pair(1, 16)
        memory = kept.ram.alloc(PAGE)
        for opcode in (nv.WRITE, nv.COMPARE, nv.WRITE_ZEROES):
            queue.io(opcode, 3, 1, memory, nsid=NS_FILE)
        queue.ring()
        lab.settle()
        write, punch = ring.take()
        ring.answer(write, UNIT)
        ring.answer(punch, -95)  # EOPNOTSUPP
        lab.settle()
        for slot in lab.misses():
            lab.plane.stamp(slot, "taken")
            lab.plane.finish(slot, Result(0))
        lab.settle()
        handed = ["wait", "asic", "to control", "control", "from control"]
        assert sorted(shown(traced(lab)[0])) == [
            (0, "Write", ["wait", "asic", "io_uring"], "the data is in a file"),
            (1, "Compare", handed, "needs a buffer for a file's data"),
            (2, "Write zeroes", handed, "the file system does not do it"),
        ]


def test_the_newest_stay(kept: Kept) -> None:
    with Lab(kept, stamps=True) as lab:
        lab.poller.make_trace(8)
        lab.begin()
        lab.plane.set_trace(True)
        queue = lab.open_pair(1, 64)
        for _ in range(20):
            queue.do(lab, nv.FLUSH)
        found, lost = traced(lab)
        # The poller may be about to write over the oldest one.
        assert ([one.cid for one in found], lost) == (list(range(13, 20)), 13)


def test_a_reset_leaves_nothing_to_later_commands(kept: Kept) -> None:
    """What was handed over and dropped is no stage of the next command in that slot."""
    with Lab(kept, stamps=True) as lab:
        lab.poller.make_trace(8)
        lab.begin()
        lab.plane.set_trace(True)
        admin = lab.open_pair(0, 8)
        admin.submit(nv.IDENTIFY)
        admin.ring()
        lab.settle()
        assert len(lab.misses()) == 1
        asyncio.run(lab.plane.close_all())
        lab.kept.cqs.clear()
        lab.open_pair(1, 8).do(lab, nv.FLUSH)
        assert shown(traced(lab)[0]) == [(0, "Flush", ["wait", "asic"], "")]


# ------------------------------------------------------------------------------------------------------- files


def record(**fields: int) -> Any:
    row = np.zeros(1, layout.TRACE)
    for name, value in ({"seen": 1000, "begun": 1500, "done": 4000, "sqid": 1, "opcode": 2} | fields).items():
        row[name] = value
    return row[0]


@pytest.fixture
def commands() -> list[trace.Command]:
    rows = [
        record(cid=3, lba=77, bytes=4096, nsid=1),
        record(seen=1200, begun=1600, handed=2000, done=5000, where=1, why=2, cid=4, client=1, opcode=1),
        record(seen=1300, handed=1600, taken=1900, answered=1800, done=2500, where=2, why=1, sqid=0, opcode=6),
        record(seen=2000, begun=1900, done=1950, cid=9, status=0x4281),  # clocks that differ
    ]
    part = trace.Part(rows, 5, {0: "nqn.a", 1: "nqn.b"}, lambda ticks: ticks * 10)
    return trace.commands([part])


def check_trace_events(document: Any) -> dict[int, list[str]]:
    """The rules that Perfetto's and Chrome's importers have; names of the slices of each id."""
    assert set(document) <= {"traceEvents", "displayTimeUnit", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    opened: dict[tuple[str, int, int], list[str]] = {}
    slices: dict[int, list[str]] = {}
    last = 0.0
    named = set()
    for event in document["traceEvents"]:
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name") and isinstance(event["args"]["name"], str)
            named.add((event["pid"], event["tid"]))
            continue
        assert event["ph"] in "be" and event["cat"] and event["ts"] >= last >= 0
        assert (event["pid"], event["tid"]) in named
        last = event["ts"]
        stack = opened.setdefault((event["cat"], event["id"], event["pid"]), [])
        if event["ph"] == "b":
            stack.append(event["name"])
            slices.setdefault(event["id"], []).append(event["name"])
        else:
            assert stack.pop() == event["name"], "slices are not nested"
    assert not any(opened.values()), "a slice has no end"
    return slices


def test_json_for_perfetto(commands: list[trace.Command]) -> None:
    document = json.loads("".join(trace.perfetto(commands, 5)))
    assert document["otherData"] == {"lost": 5}
    assert check_trace_events(document) == {
        1: ["Read", "wait", "asic"],
        2: ["Write", "wait", "asic", "io_uring"],
        3: ["Identify", "wait", "asic", "to control", "control", "from control"],
        4: ["Read", "wait", "asic"],
    }
    (first,) = (
        event
        for event in document["traceEvents"]
        if event.get("id") == 1 and event["name"] == "Read" and event["ph"] == "b"
    )
    assert first["ts"] == 0 and first["args"] == {"cid": 3, "nsid": 1, "bytes": 4096, "status": "000h", "lba": 77}
    names = [event["args"]["name"] for event in document["traceEvents"] if event["ph"] == "M"]
    assert names == ["nqn.a", "nqn.b", "queue 1", "queue 1", "admin queue"]
    assert check_trace_events(json.loads("".join(trace.perfetto([], 0)))) == {}


def test_text_for_a_person(commands: list[trace.Command]) -> None:
    lines = "".join(trace.text(commands, 5)).splitlines()
    assert lines[0].startswith("# 4 commands, 5 older ones lost; ")
    rows = [line for line in lines if not line.startswith("#")]
    assert len(rows) == 4
    assert re.fullmatch(
        r" +0\.00 +30\.00 +1 +3 +1 +77 +4096 ok     Read; wait 5\.00, asic 25\.00; -; nqn\.a", rows[0]
    ), rows[0]
    assert rows[1].endswith("Write; wait 4.00, asic 4.00, io_uring 30.00; the data is in a file; nqn.b")
    assert "to control 3.00, control 0.00, from control 6.00; admin command" in rows[2]
    assert " 281h " in rows[3]
