"""dpu.dma against clients that answer late, out of order, or change their DMA map while they are asked."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator

import pytest

from dpu.dma import DmaMessages, View
from dpu.errors import DmaFault
from dpu.guestmap import GuestMap
from dpu.vfio_user import wire
from dpu.vfio_user.wire import Command, HeaderFlag

PAGE = 4096
UNSHARED, SHARED = 0x10000, 0x11000  # two pages, one after the other
BOTH = 3  # the device may read and write


class SilentClient:
    """Keeps what it is sent; answers what and when a test says."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.on_message: Callable[[], None] = lambda: None
        self.messages = DmaMessages(self._receive, generation=1)

    def _receive(self, raw: bytes) -> None:
        self.asked.append(raw)
        asyncio.get_running_loop().call_soon(self.on_message)

    def answer(self, number: int) -> None:
        """Answer a message as the specification says; what is read is 0xDA everywhere."""
        raw = self.asked[number]
        header = wire.Header.from_buffer_copy(raw)
        access = wire.DmaAccess.from_buffer_copy(raw, wire.HEADER_BYTES)
        data = b"\xda" * access.count if header.cmd == Command.DMA_READ else b""
        self.messages.reply(wire.message(header.msg_id, header.cmd, bytes(access) + data, HeaderFlag.REPLY))


@pytest.fixture
def memory() -> Iterator[GuestMap]:
    """A page that is not shared, then one that is."""
    fd = os.memfd_create("guest", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    memory = GuestMap()
    memory.map(UNSHARED, PAGE, BOTH, 0, None)
    memory.map(SHARED, PAGE, BOTH, 0, fd)
    os.close(fd)
    yield memory
    memory.close()


@pytest.mark.parametrize("write", [False, True], ids=["load", "store"])
def test_memory_that_is_unmapped_while_a_message_is_under_way(memory: GuestMap, write: bool) -> None:
    # The specification lets a client unmap at any time; what is unmapped may be anything's memory by then.
    client = SilentClient()

    def unmap_and_answer() -> None:
        memory.unmap(SHARED, PAGE)
        memory.trim()
        client.answer(0)

    client.on_message = unmap_and_answer
    view = View(memory, client.messages)
    with pytest.raises(DmaFault):
        asyncio.run(view.store(UNSHARED, bytes(2 * PAGE)) if write else view.load(UNSHARED, 2 * PAGE))


def test_load_and_store_span_both_kinds(memory: GuestMap) -> None:
    client = SilentClient()
    client.on_message = lambda: client.answer(-1)
    view = View(memory, client.messages)

    async def run() -> bytes:
        await view.store(UNSHARED, b"u" * PAGE + b"s" * PAGE)
        return await view.load(UNSHARED, 2 * PAGE)

    assert asyncio.run(run()) == b"\xda" * PAGE + b"s" * PAGE
    assert client.asked[0].endswith(b"u" * PAGE)
    assert len(client.asked) == 2, "shared memory needs no message"


def test_an_answer_that_is_late_when_numbers_come_round() -> None:
    """A message that waits keeps its number, whatever others have used up meanwhile."""
    client = SilentClient()

    async def run() -> bytes:
        late = asyncio.create_task(client.messages.read(0x1000, 8))
        await asyncio.sleep(0)
        client.on_message = lambda: client.answer(-1)
        for _ in range(4100):  # numbers of messages have 16 bits, of which some are of the generation
            await client.messages.read(0x2000, 4)
        assert not late.done()
        client.answer(0)
        return await late

    assert asyncio.run(run()) == b"\xda" * 8


def test_a_write_is_over_when_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stops for a while finds the message in its socket and carries it out: the guest must not have the
    memory back by then. A read hurts nobody, so it fails."""
    monkeypatch.setattr("dpu.dma.TIMEOUT_S", 0.01)
    client = SilentClient()

    async def run() -> None:
        write = asyncio.create_task(client.messages.write(0x1000, b"late"))
        await asyncio.sleep(0)
        with pytest.raises(DmaFault):
            await client.messages.read(0x2000, 4)
        assert not write.done()
        client.answer(0)
        await write

    asyncio.run(run())


def test_writes_of_before_a_reset_may_still_come() -> None:
    client = SilentClient()
    messages = client.messages

    async def run() -> None:
        work = [asyncio.create_task(messages.write(0x1000 * i, b"late")) for i in range(1, 3)]
        work.append(asyncio.create_task(messages.read(0x9000, 4)))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not messages.late_writes(), "there was no reset"
        messages.refuse(True)
        assert all(isinstance(one, DmaFault) for one in await asyncio.gather(*work, return_exceptions=True))
        messages.refuse(False)
        client.answer(2)
        client.answer(1)
        assert messages.late_writes()
        client.answer(1)  # twice
        assert messages.late_writes()
        client.answer(0)
        assert not messages.late_writes()

    asyncio.run(run())


@pytest.mark.parametrize("write", [False, True], ids=["read", "write"])
def test_a_client_that_takes_a_byte_at_a_time(write: bool) -> None:
    """Its limit costs itself time, not the worker: what is under way for it has a bound."""
    client = SilentClient()
    client.messages.size_max = 1

    async def run() -> None:
        transfer = client.messages.write if write else client.messages.read
        task: asyncio.Task[object] = asyncio.create_task(transfer(0x1000, bytes(300) if write else 300))  # type: ignore
        for _ in range(10):
            await asyncio.sleep(0)
        assert 1 <= len(client.asked) <= 16
        assert len(asyncio.all_tasks()) <= 2 + 16
        client.on_message = lambda: client.answer(-1)
        client.answer(0)
        assert await task == (None if write else b"\xda" * 300)
        assert len(client.asked) == 300

    asyncio.run(run())
