"""The replay rule: a worker that dies between any two stores, and the next one on the same memory.

The plain engine runs under a `Cutter`, which ends it before its store number n, for every n. Then a new lab on what
is kept goes on. Towards the guest each command completes exactly once, in order, with its data.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from dpu import layout
from dpu.nvme.interfaces import Completion as Result
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import AER, PAGE, Completion
from tests.unit.asic_lab import PLAIN, PRODUCT, UNIT, Cut, Cutter, GuestCq, GuestSq, Kept, Lab


@dataclass
class Guest:
    """One guest's queues and what it has seen; the same before and after the death."""

    kept: Kept
    cqs: list[GuestCq] = field(default_factory=list)
    sqs: list[GuestSq] = field(default_factory=list)
    seen: dict[int, list[Completion]] = field(default_factory=dict)  # by CQ
    interrupts: int = 0

    def reap(self) -> None:
        for cq in self.cqs:
            self.seen.setdefault(cq.qid, []).extend(cq.reap())

    def completions(self, cq: int = 1) -> list[Completion]:
        return self.seen.get(cq, [])


def next_worker(kept: Kept, engine: Any = PRODUCT) -> Lab:
    lab = Lab(kept, engine)
    lab.recover()
    return lab


def check_positions(lab: Lab, guest: Guest) -> None:
    """Queue positions, in-flight table and free slots are those of a controller that has nothing to do."""
    plane = lab.plane
    for sq in guest.sqs:
        assert int(plane.sqs[sq.qid].fetched) == sq.submitted
        local = plane.locals[sq.qid]
        assert (int(local.sq_head), int(local.sq_outstanding)) == (sq.tail, 0)
    for cq in guest.cqs:
        posted = sum(sq.submitted for sq in guest.sqs if sq.cq is cq)
        assert int(plane.cqs[cq.qid].posted) == posted
        local = plane.locals[cq.qid]
        assert int(local.cq_tail) == posted % cq.entries == cq.head
        assert int(local.cq_phase) == 1 ^ (posted // cq.entries & 1)
        assert int(local.cq_outstanding) == 0
    assert not plane.inflight.state.any()
    free = plane._free[: int(plane.record.free_count)]
    assert sorted(free.tolist()) == list(range(layout.SLOTS))


# -------------------------------------------------------------------------------------------- one queue, memory


class Writes:
    """Overlapping writes, a read and a compare, so that order and repetition show; two rounds of a small queue.

    `prepare(guest, lab)` has some commands done in peace, then `submit` puts those that meet the death.
    """

    ENTRIES = 4

    def __init__(self, kept: Kept, before: int) -> None:
        self.kept, self.before = kept, before
        dice = random.Random(before)
        self.pages = [kept.ram.buffer(PAGE) for _ in range(3)]
        for page in self.pages[:2]:
            page.fill(dice.randbytes(PAGE))
        self.read = self.pages[2]

    def open(self, lab: Lab) -> Guest:
        cq = lab.open_cq(1, self.ENTRIES)
        sq = lab.open_sq(1, self.ENTRIES, cq)
        lab.begin()
        guest = Guest(self.kept, [cq], [sq])
        for _ in range(self.before):
            sq.submit(nv.FLUSH)
            sq.ring()
            lab.settle()
            guest.reap()
        return guest

    def submit(self, guest: Guest) -> None:
        sq, (first, second, read) = guest.sqs[0], self.pages
        sq.io(nv.WRITE, 0, 8, first.iova)
        sq.io(nv.WRITE, 4, 4, second.iova)
        sq.io(nv.READ, 2, 4, read.iova)
        sq.ring()

    def check(self, guest: Guest) -> None:
        disk = self.pages[0].bytes()[: 4 * UNIT] + self.pages[1].bytes()[: 4 * UNIT]
        assert self.kept.disk()[: 8 * UNIT] == disk
        assert self.read.bytes()[: 4 * UNIT] == disk[2 * UNIT : 6 * UNIT]
        done = guest.completions()
        assert [one.cid for one in done] == list(range(guest.sqs[0].submitted)), "not each once, in order"
        assert all(one.status == nv.OK for one in done)


def being_posted(lab: Lab) -> set[int]:
    """Commands that are POSTING, by their sequence numbers."""
    table = lab.plane.inflight
    return {int(sequence) for sequence in table.sequence[table.state == layout.POSTING]}


def dies_at(at: int, before: int, look_first: bool, again_at: int | None = None) -> bool:
    """Whether the worker lived to the end instead."""
    with Kept() as kept:
        work = Writes(kept, before)
        lab = Lab(kept, PLAIN)
        guest = work.open(lab)
        work.submit(guest)
        cutter, alive = Cutter(at), False
        try:
            cutter.settle(lab)
            alive = True
        except Cut:
            pass
        lab.close()
        if look_first:  # what has been posted may be consumed while no worker lives
            guest.reap()
        posting = being_posted(lab)
        if again_at is not None:
            middle = Lab(kept, PLAIN)
            middle.recover()
            second = Cutter(again_at)
            try:
                second.settle(middle)
            except Cut:
                pass
            middle.close()
            assert not posting & set(second.executed), "executed after POSTING"
            if look_first:
                guest.reap()
            posting = being_posted(middle)
        last = Lab(kept, PLAIN)
        last.recover()
        watch = Cutter()
        for _ in range(8):
            watch.settle(last)
            guest.reap()
        if not alive:
            assert not posting & set(watch.executed), "executed after POSTING"
        work.check(guest)
        check_positions(last, guest)
        last.close()
        kept.ram.check_canaries()
    return alive


@pytest.mark.parametrize("look_first", [False, True])
@pytest.mark.parametrize("before", [0, 2, 3])  # the commands lie before, across and behind the end of the queues
def test_every_command_once_whatever_the_store_of_death(before: int, look_first: bool) -> None:
    at = 0
    while not dies_at(at, before, look_first):
        at += 1
    assert at > 100, "the cutter has not seen the stores"


def test_a_second_death_while_the_first_is_mended() -> None:
    for at in range(0, 140, 9):
        for again_at in range(0, 120, 11):
            dies_at(at, 3, look_first=(at + again_at) % 2 == 0, again_at=again_at)


# --------------------------------------------------------------------------------- admin queue and parked AERs


class Admin:
    """An AER, a command that fires it, and control's part with its store of results (dpu.session.commit)."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.done: dict[int, Result] = {}
        self.event_due = False
        self.aer = -1

    def control(self, lab: Lab, slots: list[int]) -> None:
        """Execute admin commands: the AER is parked, others end and fire it; saved first, then posted."""
        for slot in slots:
            if lab.plane.inflight[slot].sqe.opcode == AER:
                self.aer = slot
                continue
            finished = [(slot, Result(0, 7))]
            if self.aer >= 0:
                finished.append((self.aer, Result(0, 9)))
                self.aer = -1
            self.done = {int(lab.plane.inflight[s].sequence): result for s, result in finished}
            for s, result in finished:
                lab.plane.finish(s, result)


def test_a_completion_that_was_begun_keeps_its_place() -> None:
    """The guest may have seen it already: an older command of the same CQ, done meanwhile, comes behind it."""
    with Kept() as kept:
        lab = Lab(kept, PLAIN)
        cq = lab.open_cq(0, 8)
        sq = lab.open_sq(0, 8, cq)
        lab.begin()
        for _ in range(2):
            sq.submit(nv.IDENTIFY)
        sq.ring()
        lab.settle()
        older, younger = lab.misses()
        lab.plane.finish(younger, Result(0, 2))
        with pytest.raises(Cut):
            Cutter(when=lambda: lab.plane.inflight[younger].state == layout.POSTING).settle(lab)
        lab.plane.inflight[older].state, lab.plane.inflight[older].dw0 = layout.EXECUTED, 1
        lab.close()
        with Lab(kept, PLAIN) as last:
            last.recover()
            last.settle()
            assert [(one.cid, one.dw0) for one in cq.reap()] == [(1, 2), (0, 1)]


def test_slots_that_are_in_use_are_not_given_away() -> None:
    """Whichever they are: commands need not end in the order in which they began."""
    with Kept() as kept:
        lab = Lab(kept, PLAIN)
        lab.open_pair(0, 16)
        lab.begin()
        for slot in (0, 5):
            entry = lab.plane.inflight[slot]
            entry.state, entry.where, entry.sqid = layout.FETCHED, layout.WHERE_PARKED, 0
            entry.sequence = slot + 1
        lab.close()
        with Lab(kept, PLAIN) as last:
            last.recover({1: Result(0), 6: Result(0)})
            free = last.plane._free[: int(last.plane.record.free_count)].tolist()
            assert sorted(free) == [slot for slot in range(layout.SLOTS) if slot not in (0, 5)]


@pytest.mark.parametrize("look_first", [False, True])
def test_aer_and_the_command_that_fires_it(look_first: bool) -> None:
    """The younger command is posted first. Dead anywhere after that, its place in the CQ stays its own."""
    at, alive = 0, False
    while not alive:
        with Kept() as kept:
            lab = Lab(kept, PLAIN)
            cq = lab.open_cq(0, 3)
            sq = lab.open_sq(0, 16, cq)
            guest = Guest(kept, [cq], [sq])
            lab.begin()
            control = Admin(kept)
            sq.submit(AER)
            sq.submit(nv.IDENTIFY)
            sq.ring()
            lab.settle()
            control.control(lab, lab.misses())
            cutter = Cutter(at)
            try:
                cutter.settle(lab)
                alive = True
            except Cut:
                pass
            lab.close()
            if look_first:
                guest.reap()
            with Lab(kept, PLAIN) as last:
                again = last.recover(control.done)
                assert not again, "a command whose result was saved is executed again"
                for _ in range(4):
                    last.settle()
                    guest.reap()
                done = guest.completions(0)
                assert sorted((one.cid, one.dw0, one.status) for one in done) == [(0, 9, 0), (1, 7, 0)]
                assert [one.sqhd for one in done] == [2, 2]
                check_positions(last, guest)
        at += 1
    assert at > 40


def test_admin_commands_without_a_saved_result_are_executed_again() -> None:
    """In their order, and only those that were not answered."""
    with Kept() as kept:
        lab = Lab(kept)
        cq = lab.open_cq(0, 16)
        sq = lab.open_sq(0, 16, cq)
        lab.begin()
        for opcode in (AER, nv.IDENTIFY, nv.GET_LOG, nv.IDENTIFY):
            sq.submit(opcode)
        sq.ring()
        lab.settle()
        slots = lab.misses()
        sequences = [int(lab.plane.inflight[slot].sequence) for slot in slots]
        assert sequences == sorted(sequences)
        lab.plane.finish(slots[1], Result(0))
        lab.settle()
        assert [one.cid for one in cq.reap()] == [1]
        lab.close()
        with Lab(kept) as last:
            again = last.recover({sequences[2]: Result(0, 5)})
            assert [int(last.plane.inflight[slot].sequence) for slot in again] == [sequences[0], sequences[3]]
            assert int(last.plane.record.sequence) > max(sequences)
            last.settle()
            assert [(one.cid, one.dw0) for one in cq.reap()] == [(2, 5)]


def test_a_full_admin_queue_after_a_death_keeps_its_room() -> None:
    """An AER that was being posted held no place: the accounting of the CQ does not go below zero."""
    with Kept() as kept:
        lab = Lab(kept, PLAIN)
        cq = lab.open_cq(0, 4)
        sq = lab.open_sq(0, 16, cq)
        lab.begin()
        sq.submit(AER)
        sq.ring()
        lab.settle()
        (slot,) = lab.misses()
        lab.plane.finish(slot, Result(0, 1))
        with pytest.raises(Cut):
            Cutter(when=lambda: bool(lab.plane.inflight[slot].state == layout.POSTING)).settle(lab)
        lab.close()
        with Lab(kept) as last:
            last.recover({1: Result(0, 1)})
            last.settle()
            assert int(last.plane.locals[0].cq_outstanding) == 0
            for _ in range(6):
                sq.submit(nv.IDENTIFY)
            sq.ring()
            last.settle()
            # Three entries can be used; the AER's is unread.
            assert len(last.misses()) == 2
            assert int(last.plane.locals[0].cq_outstanding) == 2


# ------------------------------------------------------------------------------------------- what recover does


def test_queues_that_were_deleted_complete_nothing() -> None:
    with Kept() as kept:
        lab = Lab(kept)
        queue = lab.open_pair(1, 8)
        lab.begin()
        page = kept.ram.buffer(PAGE)
        queue.io(nv.WRITE, 0, 8, page.iova)
        queue.ring()
        lab.close()
        lab.plane.inflight[7].state = layout.FETCHED
        lab.plane.inflight[7].sqid = 3  # never live
        lab.plane.inflight[7].sequence = 1
        with Lab(kept) as last:
            last.recover()
            last.settle()
            assert [one.status for one in queue.cq.reap()] == [nv.OK]
            assert not last.plane.inflight.state.any()
            assert int(last.plane.record.free_count) == layout.SLOTS


def test_new_commands_wait_for_those_of_the_last_worker() -> None:
    """While an old command cannot end (its CQ is unmapped), nothing new is fetched."""
    with Kept() as kept:
        lab = Lab(kept, PLAIN)
        first, second = lab.open_pair(1, 8), lab.open_pair(2, 8)
        lab.begin()
        page = kept.ram.buffer(PAGE)
        first.io(nv.WRITE, 0, 8, page.iova)
        first.ring()
        with pytest.raises(Cut):
            Cutter(when=lambda: bool(lab.plane.sqs[1].fetched)).settle(lab)
        lab.close()
        assert not first.cq.reap()
        second.io(nv.WRITE, 0, 8, page.iova)
        second.ring()
        base, offset, size = kept.ram.windows[0]
        cut = first.cq.iova - base
        windows = [(base, offset, cut), (base + cut + PAGE, offset + cut + PAGE, size - cut - PAGE)]
        with Lab(kept, windows=windows) as last:
            last.recover()
            last.settle()
            assert not second.cq.reap() and not int(last.plane.sqs[2].fetched)
            last.plane.memory.map(base + cut, PAGE, 3, offset + cut, kept.ram.fd)
            last.plane._publish_dma()
            last.settle()
            assert len(first.cq.reap()) == len(second.cq.reap()) == 1


def test_state_of_another_version_is_not_touched() -> None:
    with Kept() as kept:
        Lab(kept).close()
        lab = Lab(kept)
        lab.plane._part(0, layout.HEADER, 1)[0].version += 1
        lab.close()
        with pytest.raises(AssertionError):
            Lab(kept)
