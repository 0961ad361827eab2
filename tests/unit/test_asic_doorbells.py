"""Doorbells of the asic stage: messages peeked from the client's socket, shadow buffers, and no lost wake-up."""

from __future__ import annotations

import random
import select
import struct
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import pytest

from dpu import layout
from dpu.fastpath.atomics import store_u64
from dpu.fastpath.jit import JIT
from tests.support import nvme_driver as nv
from tests.unit.asic_lab import (
    ENGINES,
    PLAIN,
    Cut,
    Cutter,
    GuestSq,
    Kept,
    Lab,
    doorbell_message,
    post_doorbell,
    store_doorbell,
)

TAIL_1, HEAD_1, TAIL_2 = 2, 3, 4  # doorbell numbers


# Plain integers wrap as compiled ones do.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.fixture(params=list(ENGINES))
def engine(request: pytest.FixtureRequest) -> Any:
    return ENGINES[request.param]


@pytest.fixture
def kept() -> Iterator[Kept]:
    with Kept() as kept:
        yield kept


@pytest.fixture
def lab(kept: Kept, engine: Any) -> Iterator[Lab]:
    with Lab(kept, engine) as lab:
        lab.open_pair(0, 8)  # as in an enabled controller
        yield lab.begin()


def waiting(kept: Kept) -> bytes:
    """What is unread in the device's end of the socket."""
    try:
        return kept.device.recv(1 << 20, 0x42)  # MSG_PEEK | MSG_DONTWAIT
    except BlockingIOError:
        return b""


# ----------------------------------------------------------------------------------------------------- messages


def test_doorbells_are_stored_and_consumed(kept: Kept, lab: Lab) -> None:
    lab.open_pair(1, 64)
    for value in (3, 5, 9):
        post_doorbell(kept, TAIL_1, value)
    post_doorbell(kept, HEAD_1, 7)
    assert lab.one_pass(look=True) >= 4
    assert (lab.plane.doorbells[TAIL_1], lab.plane.doorbells[HEAD_1]) == (9, 7)
    assert waiting(kept) == b"" and lab.plane.record.attention == layout.ATTENTION_NONE


def test_more_doorbells_than_one_look_holds(kept: Kept, lab: Lab) -> None:
    lab.open_pair(1, 1024)
    kept.guest.sendall(b"".join(doorbell_message(HEAD_1, i) for i in range(500)))
    lab.settle(look=True)
    assert lab.plane.doorbells[HEAD_1] == 499 and waiting(kept) == b""
    assert lab.plane.record.attention == layout.ATTENTION_NONE


def test_a_flood_of_doorbells_ends_a_look(kept: Kept, lab: Lab) -> None:
    """A client that writes as fast as it is read must not keep the poller from others: a bounded part at a time."""
    lab.open_pair(1, 64)
    flood = doorbell_message(TAIL_1, 0) * 1000
    kept.guest.send(flood)
    left = []
    while not left or left[-1]:
        lab.one_pass(look=True)
        left.append(len(waiting(kept)))
    assert [len(flood) - left[0], left[0] - left[1]] == [452 * 36] * 2 and len(left) == 3


def test_last_doorbell_register_and_the_one_behind(kept: Kept, lab: Lab) -> None:
    post_doorbell(kept, 1023, 0)
    lab.settle(look=True)
    assert waiting(kept) == b"" and lab.plane.record.bad_doorbell == layout.BAD_DOORBELL_REGISTER << 32 | 1023
    post_doorbell(kept, 1024, 0)  # beyond the BAR: for control to judge
    lab.settle(look=True)
    assert waiting(kept) and lab.plane.record.attention == layout.ATTENTION_WANTED


def other_messages() -> dict[str, bytes]:
    good = doorbell_message(HEAD_1, 1)

    def changed(at: int, size: int, value: int) -> bytes:
        return good[:at] + value.to_bytes(size, "little") + good[at + size :]

    return {
        "another command": changed(2, 2, 9),
        "another size": changed(4, 4, 40),
        "a smaller size": changed(4, 4, 16),
        "a reply is wanted": changed(8, 4, 0),
        "a reply": changed(8, 4, 0x11),
        "an error": changed(8, 4, 0x30),
        "a register below the doorbells": changed(16, 8, 0x14),
        "the last one below": changed(16, 8, 0xFFC),
        "beyond": changed(16, 8, 0x2000),
        "far beyond": changed(16, 8, 1 << 63),
        "negative": changed(16, 8, (1 << 64) - 4),
        "unaligned": changed(16, 8, 0x100E),
        "another region": changed(24, 4, 7),
        "two bytes": changed(28, 4, 2),
        "eight bytes": changed(28, 4, 8),
    }


@pytest.mark.parametrize("name", other_messages())
@pytest.mark.parametrize("doorbells_before", [0, 2])
def test_what_is_no_doorbell_is_left_to_control(kept: Kept, lab: Lab, name: str, doorbells_before: int) -> None:
    lab.open_pair(1, 64)
    before = bytes(lab.plane.doorbells)
    message = other_messages()[name]
    behind = doorbell_message(HEAD_1, 33)
    kept.guest.sendall(b"".join(doorbell_message(TAIL_1, 0) for _ in range(doorbells_before)) + message + behind)
    lab.one_pass(look=True)
    assert waiting(kept) == message + behind, "consumed more or less than the doorbells"
    assert lab.plane.record.attention == layout.ATTENTION_WANTED
    assert bytes(lab.plane.doorbells) == before
    lab.one_pass(look=True)  # control has not answered: nobody looks
    assert waiting(kept) == message + behind
    kept.device.recv(len(message))  # the keeper takes it
    lab.plane.attend(layout.ATTENTION_NONE)
    lab.one_pass(look=True)
    assert lab.plane.doorbells[HEAD_1] == 33 and waiting(kept) == b""


@pytest.mark.parametrize("cut", [1, 15, 16, 17, 35])
def test_half_a_message(kept: Kept, lab: Lab, cut: int) -> None:
    """Control is told (the keeper waits for the rest); the whole doorbell before it is consumed."""
    lab.open_pair(1, 64)
    message = doorbell_message(HEAD_1, 5)
    kept.guest.sendall(message + doorbell_message(HEAD_1, 6)[:cut])
    lab.one_pass(look=True)
    assert lab.plane.doorbells[HEAD_1] == 5 and len(waiting(kept)) == cut
    assert lab.plane.record.attention == layout.ATTENTION_WANTED


def test_end_of_the_stream_is_told(kept: Kept, lab: Lab) -> None:
    kept.guest.close()
    lab.one_pass(look=True)
    assert lab.plane.record.attention == layout.ATTENTION_WANTED


def test_nothing_is_looked_at_without_look(kept: Kept, lab: Lab) -> None:
    post_doorbell(kept, HEAD_1, 1)
    assert lab.one_pass(look=False) == 0 and len(waiting(kept)) == 36


def test_a_death_at_any_store_repeats_doorbells_and_loses_none() -> None:
    at, alive = 0, False
    while not alive:
        with Kept() as kept:
            lab = Lab(kept, PLAIN)
            queue = lab.open_pair(1, 64)
            lab.begin()
            queue.submit(nv.FLUSH)
            queue.submit(nv.FLUSH)
            post_doorbell(kept, TAIL_1, 1)
            post_doorbell(kept, TAIL_1, 2)
            try:
                Cutter(at).one_pass(lab, look=True)
                alive = True
            except Cut:
                pass
            lab.close()
            done = queue.cq.reap()
            with Lab(kept, PLAIN) as last:
                last.recover()
                last.settle(look=True)
                assert [one.cid for one in done + queue.cq.reap()] == [0, 1]
                assert waiting(kept) == b""
        at += 1
    assert at > 10


# ----------------------------------------------------------------------------------------------- invalid values


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("value", [8, 9, 0xFFFF, 0x10000, 0xFFFFFFFF])
def test_tail_beyond_the_queue_fetches_nothing(kept: Kept, lab: Lab, shadow: bool, value: int) -> None:
    if shadow:
        lab.enable_shadow()
    queue = lab.open_pair(1, 8)
    if shadow:
        store_doorbell(kept, TAIL_1, value)
    else:
        post_doorbell(kept, TAIL_1, value)
    lab.settle(look=True)
    assert lab.plane.record.bad_doorbell == layout.BAD_DOORBELL_VALUE << 32 | TAIL_1
    assert not lab.plane.sqs[1].fetched
    lab.plane.record.bad_doorbell = 0
    lab.settle(look=True)
    assert lab.plane.record.bad_doorbell == 0, "one report for one write"
    assert queue.do(lab, nv.FLUSH).status == nv.OK


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("value", [8, 0xFFFF, 0xFFFFFFFF])
def test_head_beyond_the_queue_holds_commands_back(kept: Kept, lab: Lab, shadow: bool, value: int) -> None:
    if shadow:
        lab.enable_shadow()
    queue = lab.open_pair(1, 8)
    if shadow:
        store_doorbell(kept, HEAD_1, value)
    else:
        post_doorbell(kept, HEAD_1, value)
    queue.submit(nv.FLUSH)
    queue.ring()
    lab.settle(look=True)
    assert lab.plane.record.bad_doorbell == layout.BAD_DOORBELL_VALUE << 32 | HEAD_1
    assert not lab.plane.sqs[1].fetched
    store_doorbell(kept, HEAD_1, 0)
    lab.settle()
    assert len(queue.cq.reap()) == 1


@pytest.mark.parametrize("qid", [1, 2, 64, 65, 500])
def test_doorbells_of_queues_that_are_not_there(kept: Kept, lab: Lab, qid: int) -> None:
    post_doorbell(kept, 2 * qid + 1, 0)
    lab.settle(look=True)
    assert lab.plane.record.bad_doorbell == layout.BAD_DOORBELL_REGISTER << 32 | 2 * qid + 1


def test_doorbells_of_queues_that_were_deleted(kept: Kept, lab: Lab) -> None:
    lab.open_pair(1, 8)
    lab.plane.sqs[1].live = lab.plane.cqs[1].live = 0
    for index in (TAIL_1, HEAD_1):
        post_doorbell(kept, index, 3)
        lab.settle(look=True)
        assert lab.plane.record.bad_doorbell == layout.BAD_DOORBELL_REGISTER << 32 | index
        lab.plane.record.bad_doorbell = 0


def test_a_disabled_controller_has_nobody_to_tell(kept: Kept, lab: Lab) -> None:
    """Linux still rings the admin doorbells of a controller that it has just disabled."""
    lab.plane.sqs[0].live = 0
    post_doorbell(kept, 0, 3)
    post_doorbell(kept, TAIL_2, 3)
    lab.settle(look=True)
    assert not int(lab.plane.record.bad_doorbell) and waiting(kept) == b""


def test_shadow_doorbells_do_not_serve_the_admin_queue(kept: Kept, lab: Lab) -> None:
    """Base 5.8: the buffers begin with the I/O queues."""
    sq = lab.open_pair(0, 8)
    lab.enable_shadow()
    sq.submit(nv.IDENTIFY)
    sq.ring()
    lab.settle()
    assert len(lab.misses()) == 1


# ------------------------------------------------------------------------------------------- no lost wake-up


def need_event(event: int, new: int, old: int) -> bool:
    """Base 5.8 and Linux's nvme_dbbuf_need_event: whether the guest rings."""
    return (new - event - 1) & 0xFFFF < (new - old) & 0xFFFF


class Ringer:
    """The guest's side of one doorbell: store the shadow, then look at the event index and perhaps ring."""

    def __init__(self, kept: Kept, index: int) -> None:
        self.kept, self.index, self.old = kept, index, 0

    def store(self, new: int) -> None:
        self.previous, self.old = self.old, new
        store_doorbell(self.kept, self.index, new)

    def look(self) -> bool:
        assert self.kept.dbbuf
        (event,) = struct.unpack("<I", self.kept.ram.view(self.kept.dbbuf[1] + 4 * self.index, 4))
        if need_event(event, self.old, self.previous):
            post_doorbell(self.kept, self.index, self.old)
            return True
        return False

    def store_and_look(self, new: int) -> bool:
        self.store(new)
        return self.look()


class Interleaving:
    """PLAIN.run with the guest's `actions` put in at given steps; `delayed`: the poller's stores to the event
    indices are seen as late as x86 allows, at the next fence or system call."""

    def __init__(self, lab: Lab, actions: list[Callable[[], Any]], at: tuple[int, ...], delayed: bool) -> None:
        self.lab, self.actions, self.at, self.delayed = lab, list(actions), list(at), delayed
        self.buffer: list[tuple[int, int]] = []
        self.step = 0
        self.slept = False

    def run(self) -> bool:
        """Until the poller sleeps and nothing is left to happen. False when the steps ended before `at` did."""
        plain, lab = PLAIN, self.lab
        load, store, fence = plain.load_u32, plain.store_u32, plain.fence
        events = int(lab.plane.record.events)

        def load_u32(address: int) -> int:
            self.advance()
            return int(load(address))

        def store_u32(address: int, value: int) -> None:
            self.advance()
            if self.delayed and events <= address < events + 4096:
                self.buffer.append((address, value))
            else:
                store(address, value)

        def flush() -> None:
            for address, value in self.buffer:
                store(address, value)
            self.buffer.clear()

        def full_fence() -> None:
            self.advance()
            flush()
            fence()
            self.advance()

        def ppoll(address: int, count: int, timeout: int) -> int:
            self.advance()  # between the last look and the system call
            flush()
            self.slept = True
            while True:
                if select.select([lab.kept.device], [], [], 0)[0]:
                    return 1
                if not self.actions:
                    store_u64(lab.poller.address + layout.STOP, 1)  # it would sleep its time out
                    return 0
                self.actions.pop(0)()

        patches: dict[str, Any] = {"load_u32": load_u32, "store_u32": store_u32, "fence": full_fence, "ppoll": ppoll}
        with mock.patch.multiple(plain, **patches):
            plain.run(lab.poller.address)
        return not any(at >= self.step for at in self.at)

    def advance(self) -> None:
        while self.at and self.at[0] <= self.step and self.actions:
            self.at.pop(0)
            self.actions.pop(0)()
        self.step += 1


def shadow_lab(kept: Kept, entries: int) -> tuple[Lab, GuestSq]:
    lab = Lab(kept, PLAIN)
    lab.enable_shadow()
    queue = lab.open_pair(1, entries)
    lab.begin()
    lab.poller.record.spin = 1
    return lab, queue


def never_look(lab: Lab) -> None:
    """From now on every controller of the poller is quiet, and the time to look at it never comes."""
    record = lab.poller.record
    record.quiet_ticks, record.look_ticks, record.looked = 0, 1 << 62, 0


def schedules(actions: int, steps: int) -> Iterator[tuple[int, ...]]:
    def extend(done: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if len(done) == actions:
            yield done
            return
        for step in range(done[-1] if done else 0, steps):
            yield from extend((*done, step))

    return extend(())


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
@pytest.mark.parametrize("start", [0, 3])  # the entry is the first one, or the one at which the queue wraps
def test_no_submission_is_slept_through(delayed: bool, start: int, quiet: bool) -> None:
    """Every place of 'store the shadow' and of 'look at the event index' among the poller's steps.

    ``quiet``: of a controller beside another that is looked at only because the poller is going to sleep.
    """
    for at in schedules(2, 11):
        with Kept() as kept, Kept() as beside:
            lab, queue = shadow_lab(kept, 4)
            for _ in range(start):
                queue.do(lab, nv.FLUSH)
            if quiet:
                Lab(beside, PLAIN, poller=lab.poller).begin()
                never_look(lab)
            ringer = Ringer(kept, TAIL_1)
            ringer.old = queue.tail
            queue.submit(nv.FLUSH)
            new = queue.tail
            both: list[Callable[[], Any]] = [partial(ringer.store, new), ringer.look]
            run = Interleaving(lab, both, at, delayed)
            run.run()
            assert run.slept
            assert len(queue.cq.reap()) == 1, f"lost with the guest's steps at {at}"
            lab.close()


def test_no_room_in_the_completion_queue_is_slept_through() -> None:
    """The CQ is full; a command comes, and the guest consumes: its steps at every place, also while it is asleep."""
    for at in schedules(3, 12):
        with Kept() as kept:
            lab, queue = shadow_lab(kept, 8)
            cq = queue.cq
            for _ in range(3):  # so far that the first event index does not make the guest ring by itself
                queue.do(lab, nv.FLUSH)
            for _ in range(7):
                queue.submit(nv.FLUSH)
                queue.ring()
                lab.settle()
            assert len(cq.reap(ring=False, limit=2)) == 2  # consumed, but the head is not told yet
            tail, head = Ringer(kept, TAIL_1), Ringer(kept, HEAD_1)
            tail.old, head.old = queue.tail, 3
            queue.submit(nv.FLUSH)
            new = queue.tail
            steps: list[Callable[[], Any]] = [
                partial(tail.store_and_look, new),
                partial(head.store, cq.head),
                head.look,
            ]
            Interleaving(lab, steps, at, delayed=True).run()
            assert len(cq.reap()) == 6, f"lost with the guest's steps at {at}"
            lab.close()


def test_quiet_controllers_are_looked_at_seldom(engine: Any) -> None:
    """A doorbell in memory and one at the socket: seen when the time has come and when the poller is armed.

    A controller that is not quiet is looked at by each pass.
    """
    with Kept() as kept, Kept() as beside, Lab(kept, engine) as lab, Lab(beside, engine, poller=lab.poller) as other:
        queues = [one.open_pair(1, 64) for one in (lab, other)]
        lab.begin()
        other.begin()
        record = lab.poller.record
        never_look(lab)
        for name, value in (("armed", 1), ("look_ticks", 0)):
            for queue in queues:
                queue.submit(nv.FLUSH)
            queues[0].ring()
            post_doorbell(beside, TAIL_1, queues[1].tail)
            assert lab.one_pass() == 0
            usual = int(record[name])
            record[name] = value
            assert lab.one_pass() == 3
            record[name] = usual
            assert all(len(queue.cq.reap()) == 1 for queue in queues)
        record.quiet_ticks = 1 << 60
        queues[0].submit(nv.FLUSH)
        queues[0].ring()
        assert lab.one_pass() == 1


def test_sockets_beside_doorbells_in_memory_are_looked_at_seldom(kept: Kept, lab: Lab) -> None:
    """Each 64th time, and before sleeping."""
    lab.plane.set_mapped(True)
    post_doorbell(kept, HEAD_1, 1)
    assert [lab.one_pass(look=True) for _ in range(64)] == [0] * 63 + [1]
    post_doorbell(kept, HEAD_1, 2)
    lab.poller.record.armed = 1
    assert lab.one_pass(look=True) == 1


def test_a_poller_that_is_awake_is_not_rung(kept: Kept, lab: Lab) -> None:
    """While entries are found by looking, a busy guest never rings."""
    lab.enable_shadow()
    queue = lab.open_pair(1, 5)
    ringer = Ringer(kept, TAIL_1)
    rings = 0
    for number in range(23):
        queue.submit(nv.FLUSH)
        ringer.store(queue.tail)
        rings += ringer.look() if number else 0  # before its first entry the poller has said nothing
        lab.settle()
        assert len(queue.cq.reap()) == 1
    assert rings == 0


@pytest.mark.skipif(not JIT, reason="the interpreter lock makes a race of threads pointless")
@pytest.mark.parametrize("entries", [2, 8])
def test_two_threads_and_no_timeout_to_help(kept: Kept, entries: int) -> None:
    """A real poller that sleeps at once and would sleep for a minute: every command ends by the guest's rings."""
    with Lab(kept) as lab:
        lab.enable_shadow()
        queue = lab.open_pair(1, entries)
        lab.begin()
        record = lab.poller.record
        record.spin, record.idle_ms = 0, 60_000
        tail, head = Ringer(kept, TAIL_1), Ringer(kept, HEAD_1)
        dice, ready = random.Random(entries), select.poll()
        ready.register(kept.eventfds[1], select.POLLIN)
        lab.poller.start()
        try:
            done = rings = 0
            while done < 3000:
                batch = dice.randint(1, entries - 1)
                for _ in range(batch):
                    queue.submit(nv.FLUSH)
                tail.store(queue.tail)
                rings += tail.look()
                left = batch
                while left:
                    found = len(queue.cq.reap(ring=False, limit=dice.randint(1, 4)))
                    if found:
                        left -= found
                        head.store(queue.cq.head)
                        rings += head.look()
                        continue
                    assert ready.poll(20_000), f"asleep with {left} of {batch} commands, after {done}"
                    kept.interrupts(1)
                done += batch
            assert int(lab.plane.sqs[1].fetched) == done == int(lab.plane.cqs[1].posted)
            assert rings > 100, "the poller has not slept"
        finally:
            lab.poller.stop()
