"""Queues of the asic stage: room, turns, interrupts, counters, errors, and no guest that waits for another."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from dpu import layout
from dpu.nvme.interfaces import Completion as Result
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import AER, PAGE
from tests.unit.asic_lab import (
    ENGINES,
    NS_4K,
    NS_MEMORY,
    NS_NULL,
    PLAIN,
    UNIT,
    GuestCq,
    GuestSq,
    Kept,
    Lab,
    store_doorbell,
)

INTERNAL_ERROR, WRITE_PROTECTED = 0x006, 0x020  # Base figure 93
TICKS = ("read_ticks", "write_ticks", "unmap_ticks", "copy_ticks")


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]


@pytest.fixture
def kept() -> Iterator[Kept]:
    with Kept() as kept:
        yield kept
        kept.ram.check_canaries()


@pytest.fixture
def lab(kept: Kept, engine: Any) -> Iterator[Lab]:
    with Lab(kept, engine) as lab:
        yield lab.begin()


def handed_to_control(lab: Lab) -> tuple[GuestCq, int]:
    """An admin command that control has: its CQ and its slot."""
    queue = lab.open_pair(0, 8)
    queue.submit(nv.IDENTIFY)
    queue.ring()
    lab.settle()
    (slot,) = lab.misses()
    return queue.cq, slot


def flushes(queue: GuestSq, count: int) -> None:
    for _ in range(count):
        queue.submit(nv.FLUSH)
    queue.ring()


# ------------------------------------------------------------------------------------------------- room and turns


@pytest.mark.parametrize("entries", [2, 3, 8])
def test_completion_queue_never_overflows(kept: Kept, lab: Lab, entries: int) -> None:
    queue = lab.open_sq(1, 16, lab.open_cq(1, entries))
    seen = 0
    for _ in range(4):
        flushes(queue, 13)
        for _ in range(14):
            lab.settle()
            assert int(lab.plane.cqs[1].posted) - seen <= entries - 1
            seen += len(queue.cq.reap(limit=1))
        while more := queue.cq.reap():
            seen += len(more)
            lab.settle()
        assert seen == queue.submitted


def test_commands_with_control_hold_their_places(kept: Kept, lab: Lab) -> None:
    """Room is counted for what will complete later."""
    cq = lab.open_cq(0, 4)
    sq = lab.open_sq(0, 16, cq)
    for _ in range(6):
        sq.submit(nv.IDENTIFY)
    sq.ring()
    lab.settle()
    slots = lab.misses()
    assert len(slots) == 3
    for slot in slots:
        lab.plane.finish(slot, Result(0))
    lab.settle()
    assert not lab.misses(), "the CQ is full of unread completions"
    assert [one.cid for one in cq.reap()] == [0, 1, 2]
    lab.settle()
    assert len(lab.misses()) == 3


def test_parked_commands_hold_no_place_and_wait_for_one(kept: Kept, lab: Lab) -> None:
    cq = lab.open_cq(0, 3)
    sq = lab.open_sq(0, 16, cq)
    for opcode in (AER, AER, AER, nv.IDENTIFY, nv.IDENTIFY):
        sq.submit(opcode)
    sq.ring()
    lab.settle()
    slots = lab.misses()
    assert len(slots) == 5
    for slot in (slots[3], slots[4], slots[0]):
        lab.plane.finish(slot, Result(0))
    lab.settle()
    assert [one.cid for one in cq.reap(ring=False)] == [3, 4]
    store_doorbell(kept, 1, cq.head)
    lab.settle()
    lab.one_pass()
    assert [one.cid for one in cq.reap()] == [0]


def test_one_queue_does_not_starve_another(kept: Kept, lab: Lab) -> None:
    first, second = lab.open_pair(1, 200), lab.open_pair(2, 200)
    flushes(first, 150)
    flushes(second, 5)
    lab.one_pass()
    assert len(first.cq.reap()) == layout.BATCH and len(second.cq.reap()) == 5
    lab.settle()
    assert len(first.cq.reap()) == 150 - layout.BATCH


def test_more_commands_than_slots_wait(kept: Kept, lab: Lab) -> None:
    cq = lab.open_cq(0, 1024)
    sq = lab.open_sq(0, 1024, cq)
    other = lab.open_pair(1, 64)
    lab.plane.record.free_count = 5  # the others are taken
    for _ in range(9):
        sq.submit(nv.IDENTIFY)
    sq.ring()
    flushes(other, 3)
    lab.settle()
    slots = lab.misses()
    assert len(slots) == 5 == len(set(slots)) and not other.cq.reap()
    for slot in slots[:2]:
        lab.plane.finish(slot, Result(0))
    lab.settle()
    assert len(cq.reap()) == 2
    lab.settle()
    assert len(lab.misses()) == 2


def test_queues_wrap_at_their_own_lengths(kept: Kept, lab: Lab) -> None:
    cq = lab.open_cq(1, 5)
    queues = [lab.open_sq(1, 3, cq), lab.open_sq(2, 7, cq)]
    seen: dict[int, list[int]] = {1: [], 2: []}
    for _ in range(40):
        for queue in queues:
            queue.submit(nv.FLUSH)
            queue.ring()
        lab.settle()
        for one in cq.reap():
            seen[one.sqid].append(one.cid)
            assert one.sqhd == (one.cid + 1) % queues[one.sqid - 1].entries
    assert seen == {1: list(range(40)), 2: list(range(40))}


def test_sqe_is_read_once(kept: Kept) -> None:
    """What the guest changes after the fetch is not seen: here between the copy and the execution."""
    with Lab(kept, PLAIN) as lab:
        queue = lab.open_pair(1, 4)
        lab.begin()
        page = kept.ram.buffer(PAGE)
        queue.io(nv.READ, 0, 8, page.iova)
        queue.ring()
        real = PLAIN.begin

        def begin(p: Any, c: Any, slot: int, entry: Any) -> None:
            queue.area[:64] = b"\xff" * 64
            real(p, c, slot, entry)

        try:
            PLAIN.begin = begin
            lab.settle()
        finally:
            PLAIN.begin = real
        assert [(one.cid, one.status) for one in queue.cq.reap()] == [(0, nv.OK)]


# ------------------------------------------------------------------------------------------------- guest memory


@pytest.mark.parametrize("what", ["sq", "cq"])
def test_queues_rest_while_their_memory_is_unmapped(kept: Kept, lab: Lab, what: str) -> None:
    queue = lab.open_pair(1, 8)
    base, offset, size = kept.ram.windows[0]
    at = queue.iova if what == "sq" else queue.cq.iova
    flushes(queue, 2)
    lab.plane.memory.unmap(base, size)
    before, behind = at - base, at - base + PAGE
    lab.plane.memory.map(base, before, 3, offset, kept.ram.fd) if before else None
    lab.plane.memory.map(base + behind, size - behind, 3, offset + behind, kept.ram.fd)
    lab.plane._publish_dma()
    lab.settle()
    assert not int(lab.plane.sqs[1].fetched)
    lab.plane.memory.map(base + before, PAGE, 3, offset + before, kept.ram.fd)
    lab.plane._publish_dma()
    lab.settle()
    assert len(queue.cq.reap()) == 2


@pytest.mark.parametrize("rights,works", [(1, False), (2, False), (3, True)])
def test_queues_need_their_rights(kept: Kept, engine: Any, rights: int, works: bool) -> None:
    """An SQ is read, a CQ is written."""
    with Lab(kept, engine) as lab:
        queue = lab.open_pair(1, 8)
        lab.begin()
        base, offset, size = kept.ram.windows[0]
        lab.plane.memory.unmap(base, size)
        lab.plane.memory.map(base, size, rights, offset, kept.ram.fd)
        lab.plane._publish_dma()
        flushes(queue, 1)
        lab.settle()
        assert len(queue.cq.reap()) == int(works)


@pytest.mark.parametrize("rights,reads,writes", [(1, False, True), (2, True, False), (3, True, True)])
@pytest.mark.parametrize("nsid", [NS_MEMORY, NS_4K])
def test_data_needs_its_rights(kept: Kept, lab: Lab, rights: int, reads: bool, writes: bool, nsid: int) -> None:
    """A Read writes guest memory; Write, Compare and Dataset Management read it."""
    queue = lab.open_pair(1, 8)
    iova, offset, size = kept.ram.windows[1]
    lab.plane.memory.unmap(iova, size)
    lab.plane.memory.map(iova, size, rights, offset, kept.ram.fd)
    lab.plane._publish_dma()
    for opcode, works in ((nv.READ, reads), (nv.WRITE, writes), (nv.COMPARE, writes)):
        status = queue.do(lab, opcode, nsid=nsid, prp1=iova, cdw=[0, 0, 0]).status
        assert status == (nv.OK if works else nv.DATA_TRANSFER_ERROR), opcode
    status = queue.do(lab, nv.DSM, nsid=nsid, prp1=iova, cdw=[0, 4]).status
    assert status == (nv.OK if writes else nv.DATA_TRANSFER_ERROR)


@pytest.mark.parametrize(
    "nsid,status",
    [
        (0, nv.INVALID_NAMESPACE),
        (9, nv.INVALID_NAMESPACE),
        (0xFFFFFFFE, nv.INVALID_NAMESPACE),
        (0xFFFFFFFF, nv.INVALID_NAMESPACE),
        (5, nv.INVALID_FIELD),
        (8, nv.INVALID_FIELD),
    ],
)
def test_namespaces_that_are_not_there(kept: Kept, lab: Lab, nsid: int, status: int) -> None:
    """Invalid beyond NN (8), inactive below (Base figure 87)."""
    queue, page = lab.open_pair(1, 8), kept.ram.buffer(PAGE)
    for opcode in (nv.READ, nv.WRITE, nv.COMPARE, nv.WRITE_ZEROES, nv.DSM):
        assert queue.do(lab, opcode, nsid=nsid, prp1=page.iova, cdw=[0, 4, 0]).status == status
    everywhere = nsid == 0xFFFFFFFF
    assert queue.do(lab, nv.FLUSH, nsid=nsid).status == (nv.OK if everywhere else status)


BEYOND = [2048, 2047 + (1 << 32), 1 << 32, (1 << 54) + 5, (1 << 63) - 1, 1 << 63, (1 << 64) - 2048, (1 << 64) - 1]


@pytest.mark.parametrize("slba", [*BEYOND, 2041])
def test_blocks_outside_the_namespace(kept: Kept, lab: Lab, slba: int) -> None:
    queue, page = lab.open_pair(1, 8), kept.ram.buffer(PAGE)
    before = kept.disk()
    for opcode in (nv.READ, nv.WRITE, nv.COMPARE, nv.WRITE_ZEROES):
        done = queue.do(lab, opcode, prp1=page.iova, cdw=[slba & 0xFFFFFFFF, slba >> 32, 7])
        assert (done.status, done.dnr) == (nv.LBA_OUT_OF_RANGE, True)
    page.fill(struct.pack("<IIQIIQ", 0, 8, 0, 0, 8, slba))
    assert queue.do(lab, nv.DSM, prp1=page.iova, cdw=[1, 4]).status == nv.LBA_OUT_OF_RANGE
    assert kept.disk() == before


# ---------------------------------------------------------------------------------------- guest against guest


@pytest.mark.parametrize("trouble", ["full", "unmapped"])
def test_a_guest_that_takes_no_completions_stops_no_other(engine: Any, trouble: str) -> None:
    with Kept() as bad, Kept() as good, Lab(bad, engine) as first, Lab(good, engine, poller=first.poller) as second:
        cqs = [lab.open_cq(0, 2) for lab in (first, second)]
        sqs = [lab.open_sq(0, 8, cq) for lab, cq in zip((first, second), cqs)]
        io = [lab.open_pair(1, 8) for lab in (first, second)]
        first.begin()
        second.begin()
        for sq in sqs:
            sq.submit(AER)
            sq.submit(nv.IDENTIFY)
            sq.ring()
        first.settle()
        slots: dict[int, list[int]] = {first.plane.index: [], second.plane.index: []}
        for index, slot in first.poller.misses():
            slots[index].append(slot)
        aer, identify = slots[first.plane.index]
        if trouble == "unmapped":
            base, _, size = bad.ram.windows[0]
            first.plane.memory.unmap(base, size)
            first.plane._publish_dma()
        first.plane.finish(identify, Result(0))
        first.settle()
        first.plane.finish(aer, Result(0, 1))  # no room for it
        second.plane.finish(slots[second.plane.index][1], Result(0, 2))
        flushes(io[1], 3)
        first.settle()
        first.settle()
        assert [one.dw0 for one in cqs[1].reap()] == [2], "one guest's completion waits for another guest"
        assert len(io[1].cq.reap()) == 3
        if trouble == "full":  # and the full admin queue is no reason for its own I/O to rest
            flushes(io[0], 3)
            first.settle()
            assert len(io[0].cq.reap()) == 3
            assert [one.dw0 for one in cqs[0].reap()] == [0]
            first.settle()
            first.one_pass()
            assert [one.dw0 for one in cqs[0].reap()] == [1]


def test_an_aer_that_waits_for_room_after_an_idle_restart(kept: Kept) -> None:
    """Nothing was left to bring to its end: an AER that waits later holds no I/O queue."""
    lab = Lab(kept)
    cq = lab.open_cq(0, 2)
    sq, io = lab.open_sq(0, 8, cq), lab.open_pair(1, 8)
    lab.close()
    with Lab(kept) as last:
        last.recover()
        sq.submit(AER)
        sq.submit(nv.IDENTIFY)
        sq.ring()
        last.settle()
        aer, identify = last.misses()
        last.plane.finish(identify, Result(0))
        last.settle()
        last.plane.finish(aer, Result(0))
        last.settle()
        flushes(io, 2)
        last.settle()
        assert len(io.cq.reap()) == 2


def test_updates_of_commands_that_a_reset_has_dropped(kept: Kept, lab: Lab) -> None:
    """An answer that arrives after its slot was freed posts nothing and frees nothing twice."""
    cq, slot = handed_to_control(lab)
    lab.plane.finish(slot, Result(0))
    lab.plane.inflight.state[:] = layout.FREE
    lab.plane.record.free_count = layout.SLOTS
    lab.plane.record.hold = 1
    lab.settle()
    assert lab.plane.record.todo_end == lab.plane.record.todo_begin, "kept for later"
    lab.plane.record.hold = 0
    lab.settle()
    assert not cq.reap() and int(lab.plane.record.free_count) == layout.SLOTS


def test_updates_of_a_controller_that_is_gone(kept: Kept, lab: Lab) -> None:
    """Its records may belong to another client by then."""
    cq, slot = handed_to_control(lab)
    lab.plane.record.live = 0
    lab.plane.finish(slot, Result(0))
    lab.settle()
    lab.plane.record.live = 1
    lab.settle()
    assert not cq.reap() and lab.plane.record.todo_end == lab.plane.record.todo_begin


def test_dead_and_held_controllers_are_left_alone(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 8)
    flushes(queue, 1)
    lab.plane.record.hold = 1
    lab.settle()
    assert not queue.cq.reap()
    lab.plane.record.hold = 0
    lab.plane.record.live = 0
    lab.settle(look=True)
    assert not queue.cq.reap()
    lab.plane.record.live = 1
    lab.settle()
    assert len(queue.cq.reap()) == 1


def test_answers_to_a_held_controller_wait(kept: Kept, lab: Lab) -> None:
    """While control changes the DMA map nothing is written to guest memory (DESIGN rule 8)."""
    cq, slot = handed_to_control(lab)
    lab.plane.record.hold = 1
    lab.plane.finish(slot, Result(0))
    lab.settle()
    assert not cq.reap()
    lab.plane.record.hold = 0
    lab.settle()
    lab.one_pass()
    assert len(cq.reap()) == 1


# ---------------------------------------------------------------------------------------------------- interrupts


def test_one_interrupt_for_a_pass(kept: Kept, lab: Lab) -> None:
    first, second = lab.open_pair(1, 64), lab.open_pair(2, 64)
    flushes(first, 10)
    flushes(second, 1)
    lab.one_pass()
    assert (kept.interrupts(1), kept.interrupts(2), kept.interrupts(0)) == (1, 1, 0)
    lab.settle()
    assert (kept.interrupts(1), kept.interrupts(2)) == (0, 0)
    assert int(lab.plane.cqs[1].signals) == 1


def test_the_completion_is_there_before_its_interrupt(kept: Kept) -> None:
    with Lab(kept, PLAIN) as lab:
        queue = lab.open_pair(1, 64)
        lab.begin()
        flushes(queue, 3)
        real, seen = PLAIN.write, []

        def write(fd: int, address: int, count: int) -> int:
            seen.append(len(queue.cq.reap()))
            assert os.pread(kept.bar_fd, 4, 0) is not None and count == 8
            return int(real(fd, address, count))

        try:
            PLAIN.write = write
            lab.one_pass()
        finally:
            PLAIN.write = real
        assert seen == [3]


def test_no_interrupt_where_none_is_wanted(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 64)
    lab.plane.cqs[1].interrupts = 0
    flushes(queue, 1)
    lab.settle()
    assert kept.interrupts(1) == 0
    lab.plane.cqs[1].interrupts = 1
    lab.plane.set_vectors(1, [-1])  # not connected
    flushes(queue, 1)
    lab.settle()
    assert len(queue.cq.reap()) == 2 and kept.interrupts(1) == 0
    assert int(lab.plane.cqs[1].signals) == 0


# --------------------------------------------------------------------------------------------- counters and errors


def test_counters_are_those_of_the_commands(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 64)
    page, other = kept.ram.buffer(PAGE), kept.ram.buffer(PAGE)
    page.fill(b"\x5a" * PAGE)
    queue.io(nv.WRITE, 0, 8, page.iova)
    queue.io(nv.WRITE, 0, 1, page.iova)
    queue.io(nv.READ, 0, 2, other.iova)
    queue.io(nv.COMPARE, 0, 1, page.iova)
    queue.io(nv.WRITE_ZEROES, 9, 9, 0)
    queue.io(nv.READ, 1 << 40, 1, page.iova)
    queue.io(nv.READ, 0, 1, other.iova, nsid=NS_4K)
    queue.io(nv.COMPARE, 0, 1, page.iova, nsid=NS_4K)
    queue.io(nv.READ, 0, 1, other.iova, nsid=NS_NULL)
    queue.submit(nv.FLUSH, nsid=0xFFFFFFFF)
    ranges = kept.ram.buffer(PAGE)
    ranges.fill(struct.pack("<IIQIIQ", 0, 3, 100, 0, 4, 200))
    queue.submit(nv.DSM, nsid=NS_MEMORY, prp1=ranges.iova, cdw=[1, 1 << 2])
    queue.ring()
    lab.settle()
    statuses = [one.status for one in queue.cq.reap()]
    assert statuses.count(nv.OK) == 9 and statuses[5] == nv.LBA_OUT_OF_RANGE and statuses[7] == nv.COMPARE_FAILURE
    rows = {nsid: lab.plane.spaces[nsid - 1].tolist() for nsid in (NS_MEMORY, NS_NULL, NS_4K)}
    names = list(layout.SPACE.names or ())
    memory, four = (dict(zip(names, rows[nsid])) for nsid in (NS_MEMORY, NS_4K))
    assert {name: count for name, count in memory.items() if count} == {
        "reads": 1,
        "writes": 2,
        "bytes_read": 1024,
        "bytes_written": 9 * UNIT,
        "unmaps": 1,
        "bytes_unmapped": 7 * UNIT,
        "others": 2,
        "errors": 1,
    }
    assert (four["reads"], four["bytes_read"], four["errors"]) == (1, 4096, 1)
    assert (four["media_errors"], four["miscompares"]) == (0, 1)  # no data was lost: they were just not the same
    sq = lab.plane.sqs[1]
    assert (int(sq.commands), int(sq.errors)) == (11, 2)
    assert (int(sq.bytes_read), int(sq.bytes_written)) == (1024 + 4096 + 512, 9 * UNIT)


def test_nothing_is_counted_or_stamped_when_it_is_switched_off(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 64)
    lab.poller.record.counters = 0
    flushes(queue, 3)
    lab.settle()
    assert int(lab.plane.sqs[1].commands) == 0 and not lab.plane.histograms.any()


@pytest.mark.parametrize(("opcode", "name"), [(nv.READ, "read"), (nv.WRITE, "write"), (nv.DSM, "unmap")])
def test_latencies_of_a_namespace_add_up(kept: Kept, opcode: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a clock that stands still; each command was found as long ago as the test says."""
    ages = [700, 20, 5000]
    monkeypatch.setattr(PLAIN, "ticks", lambda: 1 << 40)
    with Lab(kept, PLAIN, stamps=True) as lab:
        queue = lab.open_pair(1, 64)
        begin, waiting = PLAIN.begin, iter(ages)

        def late(p: object, c: object, slot: int, entry: Any) -> None:
            entry.seen = (1 << 40) - next(waiting)
            begin(p, c, slot, entry)

        monkeypatch.setattr(PLAIN, "begin", late)
        lab.begin()
        page = kept.ram.buffer(PAGE)
        for _ in ages:
            queue.submit(opcode, nsid=NS_MEMORY, prp1=page.iova, cdw=[0, 1 << 2] if opcode == nv.DSM else [])
        queue.ring()
        lab.settle()
        row = lab.plane.spaces[NS_MEMORY - 1]
        found = [int(row[f"{name}_ticks{end}"]) for end in ("", "_max", "_min")]
        assert found == [sum(ages), max(ages), min(ages)]
        assert sum(int(lab.plane.spaces[field].sum()) for field in TICKS) == found[0]


def test_stamps_add_up(kept: Kept, engine: Any) -> None:
    with Lab(kept, engine, stamps=True) as lab:
        queue = lab.open_pair(1, 64)
        lab.begin()
        flushes(queue, 7)
        lab.settle()
        sq = lab.plane.sqs[1]
        assert int(lab.plane.histograms[1].sum()) == 7 == int(lab.plane.histograms.sum())
        assert sq.ticks_wait >= 0 and sq.ticks_serve > 0


def test_errors_are_told_to_control_as_long_as_it_listens(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 128)
    count = layout.ERROR_ENTRIES + 3
    for i in range(count):
        queue.io(nv.READ, (5 << 32) + (1 << 41) + i, 1, 0, nsid=NS_NULL)
    queue.ring()
    lab.settle()
    done = queue.cq.reap()
    assert [one.more for one in done] == [True] * layout.ERROR_ENTRIES + [False] * 3
    records = lab.poller.errors()
    assert len(records) == layout.ERROR_ENTRIES and not lab.poller.errors()
    for i, record in enumerate(records):
        assert (int(record.sqid), int(record.cid), int(record.nsid)) == (1, i, NS_NULL)
        assert int(record.status) & 0x7FF == nv.LBA_OUT_OF_RANGE and int(record.lba) == (5 << 32) + (1 << 41) + i
        assert int(record.controller) == lab.plane.index
    queue.io(nv.READ, 1 << 41, 1, 0, nsid=NS_NULL)
    queue.ring()
    lab.settle()
    assert [one.more for one in queue.cq.reap()] == [True] and len(lab.poller.errors()) == 1


def test_a_full_miss_ring_is_an_error_of_the_command(kept: Kept, lab: Lab) -> None:
    cq = lab.open_cq(0, 8)
    sq = lab.open_sq(0, 8, cq)
    ring = lab.poller._areas["misses"]
    ring[layout.RING_TAIL : layout.RING_TAIL + 8] = list(struct.pack("<q", layout.RING_ENTRIES))
    sq.submit(nv.IDENTIFY)
    sq.ring()
    lab.settle()
    assert [one.status for one in cq.reap()] == [INTERNAL_ERROR]


def test_control_is_woken_once(kept: Kept, lab: Lab) -> None:
    cq = lab.open_cq(0, 16)
    sq = lab.open_sq(0, 16, cq)
    for _ in range(4):
        sq.submit(nv.IDENTIFY)
    sq.ring()
    lab.settle()
    assert os.eventfd_read(lab.poller.control_fd) == 1
    with pytest.raises(BlockingIOError):
        os.eventfd_read(lab.poller.control_fd)


@pytest.mark.parametrize("opcode", [nv.WRITE, nv.WRITE_ZEROES, nv.DSM])
def test_read_only_namespaces_are_not_changed(kept: Kept, lab: Lab, opcode: int) -> None:
    queue = lab.open_pair(1, 16)
    page = kept.ram.buffer(PAGE)
    page.fill(struct.pack("<IIQ", 0, 8, 0) * 256)
    before = kept.disk()
    lab.plane.namespaces[NS_MEMORY - 1].readonly = 1
    cdw = [0, 4, 0] if opcode == nv.DSM else [0, 0, 7]
    assert queue.do(lab, opcode, prp1=page.iova, cdw=cdw).status == WRITE_PROTECTED
    assert queue.do(lab, nv.READ, prp1=page.iova, cdw=[0, 0, 7]).status == nv.OK
    assert kept.disk() == before


def test_large_zeroing_gives_memory_back(kept: Kept, lab: Lab) -> None:
    """Write Zeroes of 64 KiB and more punches holes; what is beside it stays."""
    queue = lab.open_pair(1, 16)
    fd, size = kept.backends[NS_MEMORY].fd, kept.backends[NS_MEMORY].size_bytes
    os.pwrite(fd, b"\x5a" * size, 0)
    full = os.fstat(fd).st_blocks
    assert queue.do(lab, nv.WRITE_ZEROES, cdw=[3, 0, 1023]).status == nv.OK
    assert kept.disk() == b"\x5a" * 3 * UNIT + bytes(1024 * UNIT) + b"\x5a" * (size - 1027 * UNIT)
    assert os.fstat(fd).st_blocks < full
    assert queue.do(lab, nv.WRITE_ZEROES, cdw=[0, 0, 0]).status == nv.OK
    assert kept.disk()[: 3 * UNIT] == bytes(UNIT) + b"\x5a" * 2 * UNIT
