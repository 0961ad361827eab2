"""The gate under a virtual clock: limits, turns, and what becomes of commands that wait.

What a limit lets pass is compared with a model of a few lines that keeps no queue: GCRA's own definition, command by
command, to the tick. The fair shares are counts.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dpu import layout
from dpu.fastpath import gate
from dpu.fastpath.poller import Poller
from dpu.fastpath.uring import NoRing
from dpu.gates import Gates
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE
from tests.unit.asic_lab import ENGINES, NS_MEMORY, NS_NULL, PLAIN, PRODUCT, Cut, Cutter, GuestSq, Kept, Lab

STEP = 1000  # ticks that one I/O costs in most tests


class Clock:
    """A word of time."""

    def __init__(self) -> None:
        self.word = np.zeros(1, np.int64)
        self.word[0] = 1 << 30

    @property
    def now(self) -> int:
        return int(self.word[0])

    def attach(self, lab: Lab, gates: Gates) -> Lab:
        lab.poller.record.clock, lab.poller.record.gates = int(self.word.ctypes.data), gates.base
        lab.poller.record.ns_mult = 1 << 20  # a tick is a nanosecond
        return lab


def next_due(lab: Lab) -> int | None:
    p = lab.poller.record
    return int(lab.poller._areas["heap"][0]["due"]) if int(p.heap_count) else None


def set_bucket(gates: Gates, number: int, bucket: str, per_unit: int, tolerance: int, now: int) -> None:
    at = gates.address(number) + layout.GATE_BUCKETS + layout.BUCKETS.index(bucket) * layout.BUCKET_BYTES
    gate.set_bucket(at, per_unit << layout.PER_UNIT_SHIFT, tolerance, now)


@pytest.fixture
def gates() -> Iterator[Gates]:
    made = Gates.create()
    yield made
    made.close()


@pytest.fixture(params=["product", "plain"])
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]


def limited(kept: Kept, engine: Any, gates: Gates, clock: Clock, nsids: tuple[int, ...] = (NS_MEMORY,)) -> Lab:
    lab = clock.attach(Lab(kept, engine), gates)
    for place, nsid in enumerate(nsids):
        lab.plane.add_gate(nsid, gates.address(0), place)
    return lab


def read(queue: GuestSq, iova: int, nsid: int = NS_MEMORY, blocks: int = 1) -> int:
    return queue.io(nv.READ, 0, blocks, iova, nsid=nsid)


def test_every_command_goes_when_gcra_says(engine: Any, gates: Gates) -> None:
    """Random arrivals of reads and writes of all sizes at limits of I/Os and bytes, one for each and both."""
    dice = random.Random(4)
    with Kept() as kept:
        clock = Clock()
        lab = limited(kept, engine, gates, clock)
        queue = lab.open_pair(1, 64)
        lab.begin()
        limits = {"rw_ios": (STEP, 3 * STEP), "r_bytes": (2, 4096), "w_ios": (3 * STEP, 0), "w_bytes": (1, 512)}
        for name, (per_unit, tolerance) in limits.items():
            set_bucket(gates, 0, name, per_unit, tolerance, clock.now)
        page = kept.ram.buffer(PAGE)
        # The model: when each command goes, in order of arrival of its kind; both kinds share rw_ios, so only the
        # order in which they meet it is taken from what happened.
        asked: dict[int, tuple[int, str, int]] = {}
        went: dict[int, int] = {}
        at = clock.now
        for _ in range(40):
            at += dice.choice([0, 0, 50, 700, 4000, 20000])
            while (due := next_due(lab)) is not None and due <= at:
                clock.word[0] = due
                lab.settle()
                went |= {one.cid: clock.now for one in queue.cq.reap()}
            clock.word[0] = at
            kind, blocks = dice.choice("rw"), dice.randint(1, 8)
            cid = queue.io(nv.READ if kind == "r" else nv.WRITE, 0, blocks, page.iova)
            asked[cid] = at, kind, blocks * 512
            queue.ring()
            lab.settle()
            went |= {one.cid: clock.now for one in queue.cq.reap()}
        while (due := next_due(lab)) is not None:
            clock.word[0] = max(due, clock.now)
            lab.settle()
            went |= {one.cid: clock.now for one in queue.cq.reap()}
        assert sorted(went) == sorted(asked), "a command is lost"
        for kind in "rw":
            order = [cid for cid in went if asked[cid][1] == kind]
            assert order == sorted(order), "overtaken"
        tats = dict.fromkeys(limits, 1 << 30)
        before: dict[str, int] = {}
        for cid, when in went.items():  # in the order of going
            arrived, kind, size = asked[cid]
            mine = [name for name in limits if name.split("_")[0] in ("rw", kind)]
            earliest = max(arrived, before.get(kind, 0), *(tats[name] - limits[name][1] for name in mine))
            assert when == earliest, (cid, when - earliest)
            for name in mine:
                tats[name] = max(tats[name], when) + limits[name][0] * (size if name.endswith("bytes") else 1)
            before[kind] = when
        assert len(set(went.values())) > 10, "nothing was limited"
        lab.close()


class Busy:
    """A guest that keeps `depth` reads in flight and counts."""

    def __init__(self, lab: Lab, queue: GuestSq, nsid: int, depth: int, iova: int) -> None:
        self.lab, self.queue, self.nsid, self.depth, self.iova = lab, queue, nsid, depth, iova
        self.done = self.flying = 0

    def step(self) -> None:
        done = len(self.queue.cq.reap())
        self.done += done
        self.flying -= done
        while self.flying < self.depth:
            read(self.queue, self.iova, self.nsid)
            self.flying += 1
        self.queue.ring()


def run(clock: Clock, labs: list[Lab], guests: list[Busy], ticks: int, dice: random.Random | None = None) -> None:
    """Until `ticks` have passed; pollers take their passes in turn, or as the dice say."""
    end = clock.now + ticks
    while True:
        for guest in guests:
            guest.step()
        order = list(labs)
        if dice is not None:
            dice.shuffle(order)
        for lab in order:
            lab.settle()
        if any(
            guest.queue.cq.words[2 * guest.queue.cq.head + 1] >> 48 & 1 == guest.queue.cq.phase for guest in guests
        ):
            continue  # some have completed
        due = min(one for lab in labs if (one := next_due(lab)) is not None)
        if due > end:
            clock.word[0] = end
            return
        clock.word[0] = max(due, clock.now)


@pytest.mark.parametrize("depths", [(1, 1), (32, 32), (60, 2)])
def test_two_busy_namespaces_get_half_each(gates: Gates, depths: tuple[int, int]) -> None:
    with Kept() as kept:
        clock = Clock()
        lab = limited(kept, PRODUCT, gates, clock, (NS_MEMORY, NS_NULL))
        queues = [lab.open_pair(1 + i, 64) for i in range(2)]
        lab.begin()
        set_bucket(gates, 0, "rw_ios", 100_000, 0, clock.now)  # 10,000 I/Os per second
        page = kept.ram.buffer(PAGE)
        guests = [Busy(lab, q, n, d, page.iova) for q, n, d in zip(queues, (NS_MEMORY, NS_NULL), depths)]
        run(clock, [lab], guests, 100_000_000)
        counts = [guest.done for guest in guests]
        assert abs(sum(counts) - 1000) <= 2, counts
        assert abs(counts[0] - counts[1]) <= 22, counts  # a QUANTUM of 1 ms is 10 I/Os ahead, at each end
        lab.close()


def test_two_controllers_on_two_pollers_get_half_each(gates: Gates) -> None:
    clock = Clock()
    with Kept() as one, Kept() as other:
        labs = [clock.attach(Lab(kept, PRODUCT), gates) for kept in (one, other)]
        guests = []
        for place, lab in enumerate(labs):
            lab.plane.add_gate(NS_MEMORY, gates.address(0), place)
            queue = lab.open_pair(1, 64)
            lab.begin()
            guests.append(Busy(lab, queue, NS_MEMORY, (60, 20)[place], lab.kept.ram.buffer(PAGE).iova))
        set_bucket(gates, 0, "rw_bytes", 200, 0, clock.now)
        run(clock, labs, guests, 200_000_000, random.Random(7))
        counts = [guest.done for guest in guests]
        assert sum(counts) == pytest.approx(200_000_000 / (200 * 512), abs=3)
        assert abs(counts[0] - counts[1]) <= 0.03 * sum(counts), counts
        for lab in labs:
            lab.close()


def test_one_that_pauses_takes_nothing_from_the_other_afterwards(gates: Gates) -> None:
    """Service that a flow has not asked for is not owed to it, and what the other had meanwhile is not held against
    it."""
    with Kept() as kept:
        clock = Clock()
        lab = limited(kept, PRODUCT, gates, clock, (NS_MEMORY, NS_NULL))
        queues = [lab.open_pair(1 + i, 64) for i in range(2)]
        lab.begin()
        set_bucket(gates, 0, "rw_ios", 100_000, 0, clock.now)
        page = kept.ram.buffer(PAGE)
        first = Busy(lab, queues[0], NS_MEMORY, 8, page.iova)
        run(clock, [lab], [first], 100_000_000)
        assert first.done == pytest.approx(1000, abs=2), "alone it has all"
        second = Busy(lab, queues[1], NS_NULL, 8, page.iova)
        before = first.done
        run(clock, [lab], [first, second], 100_000_000)
        assert abs((first.done - before) - second.done) <= 32, (first.done - before, second.done)
        lab.close()


def test_limits_change_under_load(gates: Gates) -> None:
    """50 changes: what passes follows the rate of the time, nothing is lost, nothing waits for a limit of before."""
    dice = random.Random(50)
    with Kept() as kept:
        clock = Clock()
        lab = limited(kept, PRODUCT, gates, clock)
        queue = lab.open_pair(1, 64)
        lab.begin()
        guest = Busy(lab, queue, NS_MEMORY, 32, kept.ram.buffer(PAGE).iova)
        for _ in range(50):
            per_unit = dice.choice([1_000, 10_000, 100_000, 10_000_000, 1_000_000_000])
            set_bucket(gates, 0, "rw_ios", per_unit, 0, clock.now)
            lab.poller.record.heap_stale = 1
            before = guest.done
            span = dice.choice([20, 200]) * per_unit
            run(clock, [lab], [guest], span)
            assert abs(guest.done - before - span / per_unit) <= 2, (per_unit, guest.done - before)
        set_bucket(gates, 0, "rw_ios", 0, 0, clock.now)
        lab.poller.record.heap_stale = 1
        lab.settle()
        assert len(queue.cq.reap()) == guest.flying, "the limit is gone and some still wait"
        assert not lab.plane.inflight.state.any()
        lab.close()


def test_burst_credit_is_spent_and_saved_again(gates: Gates) -> None:
    with Kept() as kept:
        clock = Clock()
        lab = limited(kept, PRODUCT, gates, clock)
        queue = lab.open_pair(1, 64)
        lab.begin()
        set_bucket(gates, 0, "rw_ios", 1_000_000, 500 * 1_000_000, clock.now)  # 1,000 a second, 500 more at once
        guest = Busy(lab, queue, NS_MEMORY, 32, kept.ram.buffer(PAGE).iova)
        run(clock, [lab], [guest], 0)
        assert guest.done == 501
        run(clock, [lab], [guest], 100_000_000)
        assert guest.done == pytest.approx(601, abs=1), "after that, the rate"
        while guest.flying:
            clock.word[0] = next_due(lab) or 0
            lab.settle()
            guest.flying -= len(queue.cq.reap())
        clock.word[0] += 10_000_000_000
        before = guest.done
        run(clock, [lab], [guest], 0)
        assert guest.done - before == 501, "saved again, and no more than that"
        lab.close()


def test_what_waits_is_done_once_whatever_the_store_of_death(gates: Gates) -> None:
    """A worker dies between any two stores with commands in line; the next does each once and pays for it once."""
    at, alive = 0, False
    while not alive:
        with Kept() as kept:
            clock = Clock()
            gates.clear(0)
            lab = limited(kept, PLAIN, gates, clock)
            queue = lab.open_pair(1, 8)
            lab.begin()
            set_bucket(gates, 0, "rw_ios", STEP, 0, clock.now)
            begin = clock.now
            page = kept.ram.buffer(PAGE)
            page.fill(b"w" * PAGE)
            for i in range(3):
                queue.io(nv.WRITE, 8 * i, 8, page.iova)
            queue.ring()
            cutter, alive = Cutter(at), False
            try:
                for _ in range(3):
                    cutter.settle(lab)
                    clock.word[0] += STEP
                alive = True
            except Cut:
                pass
            lab.close()
            gates.record(0).waiting = 0  # as dpu.worker does it
            last = limited(kept, PLAIN, gates, clock)
            last.recover()
            done = []
            for _ in range(6):
                last.settle()
                done += queue.cq.reap()
                if (due := next_due(last)) is not None:
                    clock.word[0] = max(due, clock.now)
            assert sorted(one.cid for one in done) == [0, 1, 2] and all(one.status == nv.OK for one in done), at
            assert kept.disk()[: 24 * 512] == b"w" * PAGE * 3
            tat = int(gates.record(0).buckets[0]["tat"])
            assert begin + 3 * STEP <= tat <= max(begin, clock.now) + 4 * STEP, (at, tat - begin)
            last.close()
        at += 1
    assert at > 100


def waiting_lab(kept: Kept, gates: Gates, count: int = 6) -> tuple[Lab, GuestSq, Clock]:
    """A controller with `count` reads and writes in line, the first of which has just gone."""
    clock = Clock()
    lab = limited(kept, PRODUCT, gates, clock)
    queue = lab.open_pair(1, 64)
    lab.begin()
    set_bucket(gates, 0, "rw_ios", 1_000_000_000, 0, clock.now)
    page = kept.ram.buffer(PAGE)
    for i in range(count + 1):
        queue.io(nv.READ if i % 2 else nv.WRITE, i, 1, page.iova)
    queue.ring()
    lab.settle()
    assert [one.cid for one in queue.cq.reap()] == [0]
    return lab, queue, clock


def statuses(lab: Lab, queue: GuestSq) -> dict[int, int]:
    lab.settle()
    return {one.cid: one.status for one in queue.cq.reap()}


def test_deleting_a_queue_aborts_what_waits(gates: Gates) -> None:
    with Kept() as kept:
        lab, queue, _ = waiting_lab(kept, gates)
        other = lab.open_pair(2, 64)
        read(other, kept.ram.buffer(PAGE).iova)
        other.ring()
        lab.settle()

        async def close() -> None:
            closing = asyncio.create_task(lab.plane.close_sq(1))
            while not closing.done():
                await asyncio.sleep(0)
                lab.one_pass()

        asyncio.run(close())
        assert set(statuses(lab, queue).values()) == {0x08}  # Command Aborted due to SQ Deletion
        assert int(lab.plane._flows[NS_MEMORY - 1].read_head) != 0, "another queue's command waits on"
        lab.close()


def test_a_reset_drops_what_waits(gates: Gates) -> None:
    with Kept() as kept:
        lab, queue, clock = waiting_lab(kept, gates)
        asyncio.run(lab.plane.close_all())
        assert not gates.record(0).waiting.any()
        clock.word[0] += 1 << 40
        assert statuses(lab, queue) == {}
        assert int(lab.plane.record.free_count) == layout.SLOTS
        lab.close()


def test_a_namespace_that_goes_ends_what_waits_for_it(gates: Gates) -> None:
    with Kept() as kept:
        lab, queue, _ = waiting_lab(kept, gates)
        asyncio.run(lab.plane.clear_namespace(NS_MEMORY))
        assert statuses(lab, queue) == dict.fromkeys(range(1, 7), nv.INVALID_FIELD)
        assert not gates.record(0).waiting.any()
        lab.close()


def test_abort_takes_one_out_of_the_middle_of_its_line(gates: Gates) -> None:
    with Kept() as kept:
        lab, queue, clock = waiting_lab(kept, gates)
        assert asyncio.run(lab.plane.abort(1, 3)) is True
        assert statuses(lab, queue) == {3: 0x07}  # Command Abort Requested
        assert asyncio.run(lab.plane.abort(1, 3)) is False
        order = []
        while (due := next_due(lab)) is not None:
            clock.word[0] = max(due, clock.now)
            order += list(statuses(lab, queue))
        assert order == [1, 2, 4, 5, 6]
        lab.close()


def test_a_controller_on_hold_keeps_nobody_from_its_turn(gates: Gates) -> None:
    clock = Clock()
    poller = Poller(None, int(np.zeros(1, np.int64).ctypes.data), NoRing(), stamps=False)
    with Kept() as one, Kept() as other:
        labs = [clock.attach(Lab(kept, PRODUCT, poller=poller), gates) for kept in (one, other)]
        guests = []
        for place, lab in enumerate(labs):
            lab.plane.add_gate(NS_MEMORY, gates.address(0), place)
            queue = lab.open_pair(1, 64)
            lab.begin()
            guests.append(Busy(lab, queue, NS_MEMORY, 8, lab.kept.ram.buffer(PAGE).iova))
        set_bucket(gates, 0, "rw_ios", 100_000, 0, clock.now)
        run(clock, labs[:1], guests, 10_000_000)
        labs[0].plane.record.hold = 1
        before = guests[1].done
        run(clock, labs[:1], guests[1:], 100_000_000)
        assert guests[1].done - before == pytest.approx(1000, abs=15)
        labs[0].plane.record.hold = 0
        before = guests[0].done
        run(clock, labs[:1], guests, 100_000_000)
        assert guests[0].done - before == pytest.approx(500, abs=40)
        for lab in labs:
            lab.close()


def test_the_heap_keeps_order_and_sweeps_what_has_gone() -> None:
    """Against sorting: random times, then far more items than commands, most of them stale."""
    dice = random.Random(1)
    with Kept() as kept, Lab(kept, PRODUCT) as lab:
        p = lab.poller.record
        times = [dice.randrange(1 << 50) for _ in range(500)]
        for i, due in enumerate(times):
            gate.heap_push(p, due, i)
        popped = []
        while int(p.heap_count):
            popped.append((next_due(lab), gate.heap_pop(p)))
        assert [due for due, _ in popped] == sorted(times)
        assert sorted(what for _, what in popped) == list(range(500))
        lab.plane.record.live = 1
        lab.plane.add_gate(NS_MEMORY, 0, -1)
        entry = lab.plane.inflight[5]
        entry.state, entry.where, entry.due = layout.FETCHED, layout.WHERE_HEAP, 77
        for i in range(layout.HEAP_ITEMS + 1):
            gate.heap_push(p, 77 if i == 9 else 1_000 + i, lab.plane.index << 32 | 5)
        assert int(p.heap_count) == 2, "the one that counts, and the last one"
        assert next_due(lab) == 77
        entry.state = layout.FREE
