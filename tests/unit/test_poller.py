"""A poller's life and what control and it say to each other; with a real thread where one is needed."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import struct
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest

from dpu import layout
from dpu.fastpath.atomics import store_u64
from dpu.fastpath.poller import Poller, compile_all, ns_multiplier
from dpu.fastpath.uring import NoRing
from tests.support import nvme_driver as nv
from tests.unit.asic_lab import PLAIN, Kept, Lab

DEADLINE_S = 60.0


@pytest.fixture
def kept() -> Iterator[Kept]:
    with Kept() as kept:
        yield kept


@pytest.fixture
def lab(kept: Kept) -> Iterator[Lab]:
    with Lab(kept) as lab:
        yield lab.begin()
        lab.poller.stop()


def wait_for_control(poller: Poller) -> None:
    assert select.select([poller.control_fd], [], [], DEADLINE_S)[0], "control is not woken"


def test_it_runs_and_stops_and_runs_again(kept: Kept, lab: Lab) -> None:
    compile_all()
    queue = lab.open_pair(1, 8)
    for _ in range(3):
        lab.poller.start()
        assert lab.poller.running
        queue.submit(nv.FLUSH)
        queue.ring()
        lab.poller.wake()
        assert select.select([kept.eventfds[1]], [], [], DEADLINE_S)[0]
        assert kept.interrupts(1) == 1 and len(queue.cq.reap()) == 1
        lab.poller.stop()
        assert not lab.poller.running
    before = int(lab.poller.record.passes)
    queue.submit(nv.FLUSH)
    queue.ring()
    lab.poller.wake()
    assert int(lab.poller.record.passes) == before and not queue.cq.reap()


def test_its_heart_beats(lab: Lab) -> None:
    lab.poller.record.idle_ms = 1
    lab.poller.start()

    async def beats() -> None:
        seen: set[int] = set()
        while len(seen) < 5:
            seen.add(int(lab.health[0]))
            await asyncio.sleep(0.002)

    asyncio.run(asyncio.wait_for(beats(), DEADLINE_S))


def test_grace_returns_after_a_pass_that_began_later(lab: Lab) -> None:
    async def graces() -> None:
        poller = lab.poller
        loop = asyncio.get_running_loop()
        loop.add_reader(poller.control_fd, poller.woken)
        poller.record.idle_ms = 60_000  # only wake-ups help
        poller.start()
        for _ in range(20):
            before = int(poller.record.passes)
            await asyncio.gather(poller.grace(), poller.grace(), poller.grace())
            assert int(poller.record.passes) > before
        loop.remove_reader(poller.control_fd)

    asyncio.run(asyncio.wait_for(graces(), DEADLINE_S))


def test_grace_of_a_poller_that_does_not_run_is_at_once(lab: Lab) -> None:
    asyncio.run(asyncio.wait_for(lab.poller.grace(), DEADLINE_S))


def test_grace_is_not_over_before_the_pass_is(lab: Lab) -> None:
    """The word that it was seen is what ends it, not being woken."""

    async def grace() -> None:
        poller = lab.poller
        poller._thread = type("Alive", (), {"is_alive": lambda self: True})()
        waiting = asyncio.create_task(poller.grace())
        await asyncio.sleep(0)
        poller.woken()
        await asyncio.sleep(0)
        assert not waiting.done()
        seen = poller.record
        seen.grace_seen = int(seen.grace_wanted)
        poller.woken()
        await waiting
        poller._thread = None

    asyncio.run(asyncio.wait_for(grace(), DEADLINE_S))


def test_a_busy_poller_sees_a_grace(kept: Kept, lab: Lab) -> None:
    """It does not have to sleep first."""
    lab.poller.record.spin = 1 << 40
    lab.poller.start()

    async def grace() -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(lab.poller.control_fd, lab.poller.woken)
        await lab.poller.grace()
        loop.remove_reader(lab.poller.control_fd)

    asyncio.run(asyncio.wait_for(grace(), DEADLINE_S))
    lab.poller.stop()


def test_misses_wake_control(lab: Lab) -> None:
    cq = lab.open_cq(0, 8)
    sq = lab.open_sq(0, 8, cq)
    lab.poller.start()
    sq.submit(nv.IDENTIFY)
    sq.ring()
    lab.poller.wake()
    wait_for_control(lab.poller)
    assert len(lab.misses()) == 1


def test_it_sleeps_when_it_has_nothing_to_do_and_a_message_wakes_it(kept: Kept, lab: Lab) -> None:
    lab.open_pair(1, 8)
    lab.poller.record.spin, lab.poller.record.idle_ms = 2, 60_000
    lab.poller.start()

    async def asleep() -> None:
        while not int(lab.poller.record.sleeps):
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(asleep(), DEADLINE_S))
    kept.guest.sendall(bytes(16))  # no doorbell: control's
    wait_for_control(lab.poller)
    assert lab.plane.record.attention == layout.ATTENTION_WANTED


def test_a_client_that_control_has_is_no_reason_to_wake(kept: Kept, lab: Lab) -> None:
    """While control has the head of a socket, unread bytes there do not make the poller spin."""
    lab.plane.attend(layout.ATTENTION_TAKEN)
    kept.guest.sendall(bytes(16))
    lab.poller.record.spin, lab.poller.record.idle_ms = 1, 20
    lab.poller.start()

    async def slept() -> tuple[int, int]:
        first = int(lab.poller.record.sleeps)
        while int(lab.poller.record.sleeps) < first + 6:
            await asyncio.sleep(0.005)
        return int(lab.poller.record.passes), int(lab.poller.record.sleeps)

    passes, sleeps = asyncio.run(asyncio.wait_for(slept(), DEADLINE_S))
    assert passes < 8 * sleeps + 16


def test_records_of_controllers_are_given_once(kept: Kept) -> None:
    poller = Poller(None, int(np.zeros(1, np.int64).ctypes.data), NoRing())
    assert poller.free_index() == 0
    poller.controllers[0].state = 1
    poller.controllers[1].state = 1
    assert poller.free_index() == 2
    poller.controllers.state[:] = 1
    assert poller.free_index() == -1
    poller.controllers_end(3)
    poller.controllers_end(1)
    assert int(poller.record.controller_count) == 4
    os.close(poller.control_fd)
    os.close(poller.wake_fd)


def test_ticks_are_nanoseconds_after_the_multiplier(lab: Lab) -> None:
    multiplier = ns_multiplier()
    assert 0 < multiplier < 1 << 24
    lab.poller.record.ns_mult = 3 << 20
    assert lab.poller.to_ns(5) == 15


def test_description(lab: Lab) -> None:
    described = lab.poller.describe()
    assert described["cpu"] is None and described["io_uring"] == 0 and described["sleeps"] == 0


# --- naps: doorbells that a client writes into memory wake nobody


def test_mapped_doorbells_are_found_without_a_wake_up(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 8)
    lab.plane.set_mapped(True)
    lab.poller.record.idle_ms = 10 * 60_000
    lab.poller.start()
    for _ in range(20):
        queue.submit(nv.FLUSH)
        queue.ring()
        assert select.select([kept.eventfds[1]], [], [], DEADLINE_S)[0]
        kept.interrupts(1)
        queue.cq.reap()


def test_who_traps_its_doorbells_does_not_make_it_nap(kept: Kept, lab: Lab) -> None:
    """Nor does a controller without queues, whose registers are messages."""
    lab.poller.record.idle_ms = 10 * 60_000

    async def sleeps_in_ten_graces() -> int:
        loop = asyncio.get_running_loop()
        loop.add_reader(lab.poller.control_fd, lab.poller.woken)
        before = int(lab.poller.record.sleeps)
        for _ in range(10):
            await lab.poller.grace()
            await asyncio.sleep(0.02)
        loop.remove_reader(lab.poller.control_fd)
        return int(lab.poller.record.sleeps) - before

    lab.plane.set_mapped(True)
    lab.poller.start()
    assert asyncio.run(sleeps_in_ten_graces()) <= 11
    lab.plane.set_mapped(False)
    lab.open_pair(1, 8)
    assert asyncio.run(sleeps_in_ten_graces()) <= 12
    lab.plane.set_mapped(True)
    assert asyncio.run(sleeps_in_ten_graces()) > 20


def test_naps_grow_to_their_bound_and_begin_anew_after_work(kept: Kept) -> None:
    """Spinning, then sleeps of 50 us, twice as long each time; the plain engine, so that no time passes."""
    with Lab(kept, PLAIN) as lab:
        queue = lab.open_pair(1, 8)
        lab.begin()
        lab.plane.set_mapped(True)
        lab.poller.record.nap_ns = 300_000
        naps: list[int] = []

        def ppoll(address: int, count: int, timeout: int) -> int:
            seconds, nanoseconds = struct.unpack("<qq", ctypes.string_at(int(timeout), 16))
            naps.append(seconds * 1_000_000_000 + nanoseconds)
            if len(naps) == 5:
                queue.submit(nv.FLUSH)
                queue.ring()
            elif len(naps) == 8:
                store_u64(lab.poller.address + layout.STOP, 1)
            return 0

        with mock.patch.multiple(PLAIN, ppoll=ppoll):
            PLAIN.run(lab.poller.address)
        assert naps == [50_000, 100_000, 200_000, 300_000, 300_000, 50_000, 100_000, 200_000]
        assert len(queue.cq.reap()) == 1


def test_control_can_give_back_every_command_at_once(lab: Lab) -> None:
    """It may have executed all that a poller's controllers can have in flight before the poller takes one."""
    with mock.patch.object(lab.poller, "wake"):
        for index in range(layout.CONTROLLERS):
            for slot in range(layout.SLOTS):
                lab.poller.update(index, slot)
    assert PLAIN.ring_peek(int(lab.poller.record.updates)) == 0
