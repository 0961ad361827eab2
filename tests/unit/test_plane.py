"""What control changes under a poller: queues, resets, memory, doorbell buffers, namespaces."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpu import layout
from dpu.errors import DmaFault, VfioUserError
from dpu.nvme.interfaces import Completion as Result
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE
from tests.unit.asic_lab import NS_4K, NS_MEMORY, NS_NULL, GuestCq, GuestSq, Kept, Lab, store_doorbell

DEADLINE_S = 60.0
READ_ONLY, BOTH = 1, 3


@pytest.fixture
def kept() -> Iterator[Kept]:
    with Kept() as kept:
        yield kept


@pytest.fixture
def lab(kept: Kept) -> Iterator[Lab]:
    with Lab(kept) as lab:
        yield lab.begin()
        lab.poller.stop()


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, DEADLINE_S))


@contextlib.asynccontextmanager
async def polled(lab: Lab) -> AsyncIterator[None]:
    """The poller runs in its thread and control listens to it."""
    loop = asyncio.get_running_loop()
    loop.add_reader(lab.poller.control_fd, lab.poller.woken)
    lab.poller.start()
    try:
        yield
    finally:
        loop.remove_reader(lab.poller.control_fd)
        lab.poller.stop()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


# ------------------------------------------------------------------------------------------------------- queues


def test_queues_begin_at_zero_with_clean_entries(kept: Kept, lab: Lab) -> None:
    """What lay in the memory of a new CQ must not look like completions (Linux clears it too late)."""
    at = kept.ram.alloc(8 * 16)
    kept.ram.view(at, 128)[:] = b"\xff" * 128
    store_doorbell(kept, 3, 5)
    store_doorbell(kept, 2, 5)
    lab.plane.open_cq(1, 8, at, 1, True, 77)
    assert bytes(kept.ram.view(at, 128)) == bytes(128)
    assert lab.plane.doorbells[3] == 0
    sq_at = kept.ram.alloc(8 * 64)
    lab.plane.open_sq(1, 8, sq_at, 1, 78)
    assert lab.plane.doorbells[2] == 0
    cq, sq = lab.plane.cqs[1], lab.plane.sqs[1]
    assert (int(cq.posted), int(cq.entries), int(cq.vector), int(cq.interrupts)) == (0, 8, 1, 1)
    assert (int(sq.fetched), int(sq.entries), int(sq.cqid)) == (0, 8, 1)


def test_reopened_queues_go_on_and_made_anew_they_do_not(kept: Kept, lab: Lab) -> None:
    """The epoch tells a queue that another worker made from a new one in its place."""
    queue = lab.open_pair(1, 8)
    for _ in range(11):
        queue.do(lab, nv.FLUSH)
    cq, sq = kept.cqs[0], kept.sqs[0]
    kept.ram.view(cq.iova, 16)[:] = b"\xee" * 16
    lab.plane.open_cq(1, 8, cq.iova, 1, True, cq.epoch)
    lab.plane.open_sq(1, 8, sq.iova, 1, sq.epoch)
    local = lab.plane.locals[1]
    assert (int(local.cq_tail), int(local.cq_phase), int(local.sq_head)) == (3, 0, 3)
    assert int(lab.plane.sqs[1].commands) == 11 and bytes(kept.ram.view(cq.iova, 16)) == b"\xee" * 16
    lab.plane.open_cq(1, 4, cq.iova, 1, True, cq.epoch + 1)
    lab.plane.open_sq(1, 4, sq.iova, 1, sq.epoch + 1)
    assert (int(local.cq_tail), int(local.cq_phase), int(local.sq_head)) == (0, 1, 0)
    assert int(lab.plane.sqs[1].commands) == int(lab.plane.sqs[1].fetched) == 0
    assert not lab.plane.histograms[1].any()


def test_a_queue_made_anew_elsewhere_is_served_there(kept: Kept, lab: Lab) -> None:
    lab.open_pair(1, 8).do(lab, nv.FLUSH)
    lab.plane.sqs[1].live = lab.plane.cqs[1].live = 0
    cq = GuestCq(kept, 1, 8)
    lab.plane.open_cq(1, 8, cq.iova, 1, True, 71)
    sq = GuestSq(kept, 1, 8, cq)
    lab.plane.open_sq(1, 8, sq.iova, 1, 72)
    assert sq.do(lab, nv.FLUSH, cid=7).status == nv.OK  # the old queue holds another one


@pytest.mark.parametrize("doorbell", [2, 3])
def test_a_bad_doorbell_of_a_queue_made_anew_is_told_again(kept: Kept, lab: Lab, doorbell: int) -> None:
    lab.enable_shadow()
    for epoch in (81, 83):
        cq = GuestCq(kept, 1, 8)
        sq = GuestSq(kept, 1, 8, cq)
        lab.plane.open_cq(1, 8, cq.iova, 1, True, epoch)
        lab.plane.open_sq(1, 8, sq.iova, 1, epoch + 1)
        sq.submit(nv.FLUSH)
        sq.ring()
        store_doorbell(kept, doorbell, 9)
        lab.settle()
        assert lab.plane.record.bad_doorbell == layout.BAD_DOORBELL_VALUE << 32 | doorbell
        lab.plane.record.bad_doorbell = 0


@pytest.mark.parametrize("entries", [2, 3, 8])
def test_phase_after_any_number_of_rounds(kept: Kept, lab: Lab, entries: int) -> None:
    queue = lab.open_pair(1, entries)
    for number in range(1, 3 * entries + 1):
        queue.do(lab, nv.FLUSH)
        cq = kept.cqs[0]
        lab.plane.open_cq(1, entries, cq.iova, 1, True, cq.epoch)
        local = lab.plane.locals[1]
        assert int(local.cq_tail) == number % entries
        assert int(local.cq_phase) == (1 if number // entries % 2 == 0 else 0)


@pytest.mark.parametrize("beyond", [PAGE, 64 << 20])
def test_queues_outside_the_map_are_refused(kept: Kept, lab: Lab, beyond: int) -> None:
    base, _, size = kept.ram.windows[0]
    at = base + size - PAGE + beyond - 64
    with pytest.raises(DmaFault):
        lab.plane.open_cq(1, 8, at, 1, True, 5)
    with pytest.raises(DmaFault):
        lab.plane.open_sq(1, 8, at, 1, 5)
    assert not lab.plane.cqs[1].live and not lab.plane.sqs[1].live and lab.plane.entries_of(2) == 0


def test_queues_across_the_end_of_a_region_are_refused(kept: Kept, lab: Lab) -> None:
    base, _, size = kept.ram.windows[0]
    lab.plane.open_sq(1, 64, base + size - PAGE, 1, 5)
    lab.plane.open_cq(1, 256, base + size - PAGE, 1, True, 5)
    with pytest.raises(DmaFault):
        lab.plane.open_sq(2, 65, base + size - PAGE, 1, 5)
    with pytest.raises(DmaFault):
        lab.plane.open_cq(2, 257, base + size - PAGE, 1, True, 5)


def test_rights_of_queue_memory(kept: Kept) -> None:
    """An SQ is read; a CQ is written, and cleared when it is made: not in read-only memory."""
    with Lab(kept, rights=READ_ONLY) as lab:
        lab.plane.open_sq(1, 8, kept.ram.windows[0][0], 1, 5)
        with pytest.raises(DmaFault):
            lab.plane.open_cq(1, 8, kept.ram.windows[0][0], 1, True, 5)
    with Lab(kept, rights=2) as lab:
        lab.plane.open_cq(2, 8, kept.ram.windows[0][0], 1, True, 5)
        with pytest.raises(DmaFault):
            lab.plane.open_sq(2, 8, kept.ram.windows[0][0], 1, 5)


def test_entries_of_doorbells(lab: Lab) -> None:
    lab.open_sq(3, 16, lab.open_cq(2, 8))
    found = {index: lab.plane.entries_of(index) for index in range(2 * layout.QUEUES + 40)}
    assert {index: entries for index, entries in found.items() if entries} == {5: 8, 6: 16}


def test_live_queues_are_listed(kept: Kept, lab: Lab) -> None:
    cq = lab.open_cq(1, 8)
    for qid in (5, 2, 64):
        lab.open_sq(qid, 8, cq)
    record = lab.plane.record
    assert lab.plane._live_queues[: int(record.live_count)].tolist() == [2, 5, 64]
    run(lab.plane.close_sq(5))
    assert lab.plane._live_queues[: int(record.live_count)].tolist() == [2, 64]


def test_deleting_a_queue_waits_for_its_commands(kept: Kept, lab: Lab) -> None:
    cq = lab.open_cq(0, 8)
    sq = lab.open_sq(0, 8, cq)

    async def work() -> None:
        async with polled(lab):
            sq.submit(nv.IDENTIFY)
            sq.ring()
            lab.poller.wake()
            await until(lambda: int(lab.plane.locals[0].sq_outstanding) == 1)
            (slot,) = lab.misses()
            closing = asyncio.create_task(lab.plane.close_sq(0))
            await until(lambda: not lab.plane.sqs[0].live)
            await lab.poller.grace()
            assert not closing.done()
            sq.submit(nv.IDENTIFY)  # too late
            sq.ring()
            lab.plane.finish(slot, Result(0))
            await closing
            await lab.poller.grace()
            assert [one.cid for one in cq.reap()] == [0] and int(lab.plane.sqs[0].fetched) == 1

    run(work())


def test_deleting_a_queue_does_not_outlast_a_reset(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 8)
    lab.plane.locals[1].sq_outstanding = 1

    async def work() -> None:
        closing = asyncio.create_task(lab.plane.close_sq(1))
        await until(lambda: not lab.plane.sqs[1].live)
        await lab.plane.close_all()
        await closing

    run(work())
    assert queue.submitted == 0


# -------------------------------------------------------------------------------------------------------- reset


def test_reset_drops_everything(kept: Kept, lab: Lab) -> None:
    cq = lab.open_cq(0, 8)
    sq, io = lab.open_sq(0, 8, cq), lab.open_pair(1, 8)
    lab.enable_shadow()
    for opcode in (nv.AER, nv.IDENTIFY):
        sq.submit(opcode)
    sq.ring()
    lab.settle()
    aer, identify = lab.misses()
    lab.plane.complete(aer, Result(0))
    generation = lab.plane.generation
    io.submit(nv.FLUSH)
    io.ring()
    run(lab.plane.close_all())
    lab.settle()
    assert lab.plane.generation == generation + 1 and not lab.plane.pending
    assert not lab.plane.inflight.state.any() and int(lab.plane.record.free_count) == layout.SLOTS
    assert sorted(lab.plane._free.tolist()) == list(range(layout.SLOTS))
    assert not lab.plane.sqs.live.any() and not lab.plane.cqs.live.any() and int(lab.plane.record.live_count) == 0
    assert int(lab.plane.record.shadow) == int(lab.plane.record.events) == 0
    assert not cq.reap() and not io.cq.reap()
    lab.plane.poller.update(lab.plane.index, identify)  # an answer on its way
    lab.settle()
    assert not cq.reap() and int(lab.plane.record.free_count) == layout.SLOTS
    assert int(lab.plane.record.hold) == 0


@pytest.mark.parametrize("counted", ["outstanding", "with_control"])
def test_quiet_waits_for_commands_that_are_under_way(lab: Lab, counted: str) -> None:
    holder: Any = lab.plane.record if counted == "outstanding" else lab.plane
    setattr(holder, counted, 1)

    async def work() -> None:
        entered = asyncio.Event()

        async def inside() -> None:
            async with lab.plane.quiet():
                entered.set()

        task = asyncio.create_task(inside())
        await asyncio.sleep(0.02)
        assert not entered.is_set() and int(lab.plane.record.hold) == 1
        setattr(holder, counted, 0)
        await task
        assert entered.is_set() and int(lab.plane.record.hold) == 0

    run(work())


def test_nothing_is_fetched_while_it_is_quiet(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 64)

    async def work() -> None:
        async with polled(lab):
            async with lab.plane.quiet():
                async with lab.plane.quiet():
                    pass
                fetched = int(lab.plane.sqs[1].fetched)
                for _ in range(5):
                    queue.submit(nv.FLUSH)
                queue.ring()
                lab.poller.wake()
                await lab.poller.grace()
                await lab.poller.grace()
                assert int(lab.plane.sqs[1].fetched) == fetched == 0
            await until(lambda: int(lab.plane.cqs[1].posted) == 5)

    run(work())


def test_hold_ends_also_when_the_change_fails(lab: Lab, kept: Kept) -> None:
    base, offset, size = kept.ram.windows[0]
    with pytest.raises(VfioUserError):
        run(lab.plane.dma_map(base, size, READ_ONLY, offset, kept.ram.fd))
    assert int(lab.plane.record.hold) == 0


# ------------------------------------------------------------------------------------------------- guest memory


def test_unmapped_memory_is_gone_when_it_returns(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 64)
    second = kept.ram.windows[1]
    assert queue.do(lab, nv.READ, prp1=second[0], cdw=[0, 0, 0]).status == nv.OK
    run(lab.plane.dma_unmap(second[0], second[2]))
    assert queue.do(lab, nv.READ, prp1=second[0], cdw=[0, 0, 0]).status == nv.DATA_TRANSFER_ERROR
    run(lab.plane.dma_map(second[0], second[2], BOTH, second[1], kept.ram.fd))
    assert queue.do(lab, nv.READ, prp1=second[0], cdw=[0, 0, 0]).status == nv.OK


def test_a_file_that_no_region_uses_is_unmapped(kept: Kept, lab: Lab) -> None:
    fd = os.memfd_create("passing", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    run(lab.plane.dma_map(0x1000, PAGE, BOTH, 0, fd))
    maps = Path("/proc/self/maps")
    assert "memfd:passing" in maps.read_text()
    run(lab.plane.dma_unmap(0x1000, PAGE))
    assert "memfd:passing" not in maps.read_text()
    os.close(fd)


def test_every_address_is_made_anew_after_a_change(kept: Kept, lab: Lab) -> None:
    lab.enable_shadow()
    queue = lab.open_pair(1, 64)
    queue.do(lab, nv.FLUSH)
    local = lab.plane.locals[1]
    assert local.sq_host and local.cq_host and lab.plane.record.shadow
    table, shadow = int(lab.plane.record.dma), int(lab.plane.record.shadow)
    base, offset, size = kept.ram.windows[0]
    run(lab.plane.dma_unmap(base, size))
    assert not local.sq_host and not local.cq_host
    assert not int(lab.plane.record.shadow) and not int(lab.plane.record.events)
    assert int(lab.plane.record.hold) == 1, "without the doorbell buffers nothing can be known of the queues"
    assert int(lab.plane.record.dma_count) == 1 and int(lab.plane.record.dma) != table
    run(lab.plane.dma_map(base, size, BOTH, offset, kept.ram.fd))
    assert int(lab.plane.record.hold) == 0 and int(lab.plane.record.shadow) != 0 != shadow
    queue.do(lab, nv.FLUSH)


def test_doorbell_buffers_need_memory_that_may_be_written(kept: Kept, lab: Lab) -> None:
    """Values are put into both, so a read-only page is no place for either."""
    lab.open_pair(1, 8)
    fd = os.memfd_create("ro", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    run(lab.plane.dma_map(0x1000, PAGE, READ_ONLY, 0, fd))
    good = kept.ram.alloc(PAGE)
    end = kept.ram.windows[0][0] + kept.ram.windows[0][2] - 8
    pairs = [(0x1000, good), (good, 0x1000), (0x100000, good), (good, 0x100000), (end, good), (good, end)]
    for pair in pairs:
        with pytest.raises(DmaFault):
            lab.plane.set_dbbuf(*pair)
        assert not int(lab.plane.record.shadow) and not int(lab.plane.record.events)
        assert lab.plane._dbbuf is None and int(lab.plane.record.hold) == 0
    os.close(fd)


def test_doorbell_buffers_begin_where_the_queues_are(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 8)
    for _ in range(5):
        queue.do(lab, nv.FLUSH)
    lab.enable_shadow()
    assert kept.dbbuf
    for page in kept.dbbuf:
        words = kept.ram.view(page, PAGE).cast("I")
        assert words[2:4].tolist() == [5, 5] and not any(words[4:])
    queue.do(lab, nv.FLUSH)
    words = kept.ram.view(kept.dbbuf[0], PAGE).cast("I")
    words[4] = words[5] = 7
    lab.open_pair(2, 8)  # a new queue begins at 0
    assert words[4:6].tolist() == [0, 0]


def test_a_new_worker_keeps_what_the_guest_wrote_meanwhile(kept: Kept) -> None:
    lab = Lab(kept)
    lab.enable_shadow()
    queue = lab.open_pair(1, 8)
    lab.begin()
    queue.do(lab, nv.FLUSH)
    lab.close()
    queue.submit(nv.FLUSH)
    queue.ring()
    with Lab(kept) as last:
        last.recover()
        last.settle()
        assert len(queue.cq.reap()) == 1


# ---------------------------------------------------------------------------------------- namespaces, vectors, end


def test_namespaces_come_and_go(kept: Kept, lab: Lab) -> None:
    queue, page = lab.open_pair(1, 64), kept.ram.buffer(PAGE)
    run(lab.plane.clear_namespace(NS_4K))
    fields: dict[str, Any] = {"nsid": NS_4K, "prp1": page.iova, "cdw": [0, 0, 0]}
    assert queue.do(lab, nv.READ, **fields).status == nv.INVALID_FIELD
    lab.plane.set_namespace(NS_4K, kept.backends[NS_NULL])
    assert queue.do(lab, nv.READ, **fields).status == nv.OK
    rows = lab.plane.namespaces
    assert (int(rows[0].shift), int(rows[0].blocks)) == (9, 2048)
    assert int(rows[NS_4K - 1].kind) == layout.KIND_NULL and int(rows[NS_4K - 1].host) == 0


def test_vectors_are_live_when_a_queue_uses_them(lab: Lab) -> None:
    lab.open_cq(1, 8, vector=3)
    lab.plane.open_cq(2, 8, lab.kept.ram.alloc(PAGE), 2, False, 5)
    assert [lab.plane.live(vector) for vector in range(4)] == [False, False, False, True]
    run(lab.plane.close_cq(1))
    assert not lab.plane.live(3)


def test_counters_of_one_and_of_all_namespaces(kept: Kept, lab: Lab) -> None:
    queue, page = lab.open_pair(1, 64), kept.ram.buffer(PAGE)
    queue.do(lab, nv.WRITE, nsid=NS_MEMORY, prp1=page.iova, cdw=[0, 0, 3])
    queue.do(lab, nv.READ, nsid=NS_4K, prp1=page.iova, cdw=[0, 0, 0])
    one, all_ = lab.plane.counters(NS_MEMORY), lab.plane.counters(0xFFFFFFFF)
    assert (one.writes, one.bytes_written, one.reads) == (1, 2048, 0)
    assert (all_.writes, all_.reads, all_.bytes_read, all_.media_errors) == (1, 1, 4096, 0)


def test_after_close_the_record_is_free_and_not_looked_at(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 8)
    index = lab.plane.index
    run(lab.plane.close())
    queue.submit(nv.FLUSH)
    queue.ring()
    lab.settle(look=True)
    assert not queue.cq.reap() and lab.poller.free_index() == index
    assert not lab.plane.memory.regions


def test_attention_lets_the_poller_look_again(lab: Lab) -> None:
    os.eventfd_write(lab.poller.wake_fd, 1)
    os.eventfd_read(lab.poller.wake_fd)
    lab.plane.attend(layout.ATTENTION_TAKEN)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(lab.poller.wake_fd)
    lab.plane.attend(layout.ATTENTION_NONE)
    assert os.eventfd_read(lab.poller.wake_fd) == 1 and int(lab.plane.record.attention) == 0
    assert isinstance(lab.plane.doorbells, np.ndarray)
