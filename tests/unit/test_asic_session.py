"""A client of the worker between its poller and control: what a reset may not let through, and bad doorbells."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpu import layout
from dpu.channel import Health
from dpu.errors import VfioUserError
from dpu.fastpath.poller import Poller
from dpu.fastpath.uring import NoRing
from dpu.nvme import io
from dpu.nvme.interfaces import Completion
from dpu.session import IRQ_MSIX, Client
from dpu.target import Listener, Subsystem
from tests.support import nvme_driver as nv
from tests.unit.asic_lab import PRODUCT, GuestCq, GuestSq, Kept, store_doorbell

DEADLINE_S = 60.0


def board() -> Subsystem:
    """A subsystem without namespaces."""
    return Subsystem("nqn", "serial", "model", listeners={"listener": Listener("nqn", "/nowhere", "0")})


class Channel:
    """Remembers what was sent to the keeper."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []

    def send(self, op: str, **fields: Any) -> None:
        self.sent.append((op, fields))


class Worker:
    """What a client asks of its worker."""

    generation = 1
    channel = Channel()
    target: Any = None
    gates = SimpleNamespace(leave=lambda address, place: None)

    def __init__(self, poller: Any) -> None:
        self.poller = poller
        fd = Health.create()
        self.health = Health(fd)
        os.close(fd)

    def poller_for(self, number: int) -> Any:
        return self.poller

    def memory_of(self, backend: Any) -> int:
        raise AssertionError("no memory back ends here")


class Bench:
    """A client on kept areas, its poller stepped by hand."""

    def __init__(self, kept: Kept) -> None:
        self.kept = kept
        self.word = np.zeros(1, np.int64)
        self.poller = Poller(None, int(self.word.ctypes.data), NoRing())
        worker: Any = Worker(self.poller)
        self.client = Client(worker, 1, "listener", os.dup(kept.device.fileno()), board())
        self.client.open(os.dup(kept.state_fd), os.dup(kept.bar_fd))
        self.plane = self.client.plane
        for iova, offset, size in kept.ram.windows:
            self.plane.adopt_dma(iova, size, 3, offset, kept.ram.fd)
        self.queues: dict[int, GuestSq] = {}
        for qid in (0, 1):
            cq = GuestCq(kept, qid, 16)
            sq = GuestSq(kept, qid, 16, cq)
            self.plane.open_cq(qid, 16, cq.iova, qid, True, 10 + qid)
            self.plane.open_sq(qid, 16, sq.iova, qid, 20 + qid)
            self.queues[qid] = sq
        self.plane.begin()

    def step(self) -> None:
        for _ in range(20):
            PRODUCT.one_pass(self.poller.record, False)

    def hand_over(self, qid: int, opcode: int) -> int:
        """A command that control has to do; its slot."""
        self.queues[qid].submit(opcode)
        self.queues[qid].ring()
        self.step()
        ((_, slot),) = self.poller.misses()
        return slot


@pytest.fixture
def bench() -> Iterator[Bench]:
    with Kept() as kept:
        bench = Bench(kept)
        bench.plane.namespaces[0].kind = layout.KIND_FILE  # without a ring: all of it is control's
        bench.plane.namespaces[0].blocks, bench.plane.namespaces[0].shift = 100, 9
        yield bench
        os.close(bench.poller.control_fd)
        os.close(bench.poller.wake_fd)


def run(work: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(work(), DEADLINE_S))


@pytest.fixture
def slow_io(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Event]:
    """I/O in threads that lasts until its event is set."""
    events: list[asyncio.Event] = []

    async def execute(sqe: bytes, memory: Any, subsystem: Any, durable: bool, mishap: Any = None) -> Completion:
        events.append(asyncio.Event())
        await events[-1].wait()
        return Completion(0)

    monkeypatch.setattr(io, "execute", execute)
    return events


def test_a_reset_waits_for_commands_that_control_was_just_handed(bench: Bench, slow_io: list[asyncio.Event]) -> None:
    """Also when the task that does one has not taken its first step."""

    async def work() -> None:
        slot = bench.hand_over(1, nv.FLUSH)
        bench.client.missed(slot)
        reset = asyncio.create_task(bench.plane.close_all())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not reset.done() and len(slow_io) == 1
        assert bench.plane.inflight[slot].state == layout.FETCHED
        slow_io[0].set()
        await reset
        bench.step()
        assert not bench.plane.inflight.state.any() and int(bench.plane.record.free_count) == layout.SLOTS
        assert bench.plane.with_control == 0

    run(work)


def test_an_answer_from_before_a_reset_posts_nothing(bench: Bench, slow_io: list[asyncio.Event]) -> None:
    async def work() -> None:
        slot = bench.hand_over(1, nv.FLUSH)
        bench.client.missed(slot)
        await asyncio.sleep(0)
        bench.plane.generation += 1  # the reset, without its wait
        bench.plane.inflight.state[:] = layout.FREE
        slow_io[0].set()
        await asyncio.gather(*bench.client._io)
        assert bench.plane.inflight[slot].state == layout.FREE

    run(work)


def test_an_answer_is_posted(bench: Bench, slow_io: list[asyncio.Event]) -> None:
    async def work() -> None:
        slot = bench.hand_over(1, nv.FLUSH)
        bench.client.missed(slot)
        await asyncio.sleep(0)
        slow_io[0].set()
        await asyncio.gather(*bench.client._io)
        bench.step()
        assert [one.cid for one in bench.queues[1].cq.reap()] == [0]

    run(work)


@pytest.mark.parametrize("when", ["before", "during"])
def test_admin_commands_from_before_a_reset_change_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Dropped in the queue of control they are not executed; dropped under way they are not posted."""
    executed: list[int] = []
    slot = bench.hand_over(0, nv.IDENTIFY)

    async def execute(token: int, sqe: bytes) -> Completion:
        executed.append(token)
        bench.plane.generation += 1
        bench.plane.inflight.state[:] = layout.FREE
        return Completion(0)

    monkeypatch.setattr(bench.client.controller, "execute", execute)

    async def work() -> None:
        serving = asyncio.create_task(bench.client._serve_admin())
        if when == "before":
            bench.plane.inflight[slot].state = layout.FREE
        bench.client.missed(slot)
        for _ in range(10):
            await asyncio.sleep(0)
        assert executed == ([] if when == "before" else [slot])
        assert bench.plane.inflight[slot].state == layout.FREE
        serving.cancel()

    run(work)


@pytest.mark.parametrize("offset,length", [(2, 4), (0, 2), (0, 6), (0x1000, 4), (0xFFC, 8), (0x2FFC, 4), (0, 0)])
def test_doorbell_messages_that_are_none_store_nothing(bench: Bench, offset: int, length: int) -> None:
    before = bytes(bench.plane.doorbells)
    run(lambda: bench.client.region_write(0, 0x1000 + offset, b"\x01" * length, False))
    assert bytes(bench.plane.doorbells) == before


@pytest.mark.parametrize("index,value,told", [(2, 15, 0), (2, 16, 1), (3, 16, 1), (4, 0, 1), (1023, 0, 1), (0, 3, 0)])
def test_doorbells_that_came_as_messages(bench: Bench, index: int, value: int, told: int) -> None:
    reports: list[tuple[int, bool]] = []
    bench.client.controller.doorbell_error = (  # type: ignore[method-assign]
        lambda qid, *, no_queue: reports.append((qid, no_queue))
    )
    store_doorbell(bench.kept, 2, 0)
    run(lambda: bench.client.region_write(0, 0x1000 + 4 * index, value.to_bytes(4, "little"), False))
    assert int(bench.plane.doorbells[index]) == value
    assert reports == ([(index // 2, index >= 4)] if told else [])


def test_doorbell_messages_to_a_disabled_controller_tell_nobody(bench: Bench) -> None:
    """As the poller has it: Linux still rings the doorbells of a controller that it has just disabled."""
    bench.client.controller.doorbell_error = None  # type: ignore[method-assign, assignment]
    bench.plane.sqs[0].live = 0
    run(lambda: bench.client.region_write(0, 0x1000, (3).to_bytes(4, "little"), False))
    run(lambda: bench.client.region_write(0, 0x1000 + 16, (3).to_bytes(4, "little"), False))
    assert not bench.client._changed


@pytest.mark.parametrize("kind", ["pipe", "file", "socket"])
def test_interrupts_are_eventfds(bench: Bench, kind: str) -> None:
    if kind == "pipe":
        fds = list(os.pipe())
    elif kind == "file":
        fds = [os.open("/dev/null", os.O_RDWR)]
    else:
        fds = [os.dup(bench.kept.guest.fileno())]
    with pytest.raises(VfioUserError) as caught:
        run(lambda: bench.client.set_irqs(IRQ_MSIX, 0, len(fds), fds))
    assert caught.value.errno == errno.EINVAL and not bench.client.vectors
    for fd in fds:
        os.close(fd)
    good = os.eventfd(0)
    run(lambda: bench.client.set_irqs(IRQ_MSIX, 0, 1, [good]))
    assert not os.get_blocking(good) and (IRQ_MSIX, 0) in bench.client.vectors
    os.close(good)


def test_a_failed_controller_is_said_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Each look at its queues may find again what has made it fail."""
    for reason in ("a queue cannot be reached", "and again"):
        bench.client._fatal(reason)
    assert [record.message for record in caplog.records] == ["client 1: controller failed: a queue cannot be reached"]
    assert bench.client.controller.register_read(0x1C, 4)[0] & 2  # CSTS.CFS


def test_whoever_closes_a_client_waits_until_it_is_closed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two do when a listener is removed: the one who removed it, and the end of the connection."""

    async def work() -> None:
        drained = asyncio.Event()
        monkeypatch.setattr(bench.plane, "settled", drained.wait)
        closing = [asyncio.create_task(bench.client.close()) for _ in range(2)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in closing)
        drained.set()
        await asyncio.gather(*closing)
        assert bench.plane.record.state == 0

    run(work)
