"""Guest memory that the client does not share: DMA by messages of vfio-user, from the server to the client.

Use: ``messages = DmaMessages(send, generation)``; ``await messages.read(iova, length)``, ``await messages.write(iova,
data)``; what the client answers goes to ``messages.reply(raw)``. ``View`` is one command's view of memory that is
partly or wholly unshared, behind the synchronous interface that commands have.

What a command reads has to be fetched first. A view raises ``Missing`` for it; ``View.run`` fetches and has the
command done again from its beginning, which is what a restart of the worker does to commands too: none changes
anything before it has read all that it reads. What it writes is kept until ``flush``, before its completion.

Nobody may wait for these messages while the client waits for a reply of ours: QEMU answers neither then.

A client that has stopped for a while (a debugger, a suspended host) goes on with what it finds in its socket. A read
that it carries out late hurts nobody, so it fails after TIMEOUT_S. A late write would go into memory that the guest
has put to other use when it was told that the command has failed. So a write is over when it is answered and not
before; a reset does not wait for that, but CSTS.RDY does (``late_writes``).

Limits: REQUESTS_MAX requests under way, ``size_max`` bytes each.
Errors: DmaFault for what the client refuses or answers wrongly, and for what it was to read and has not within
TIMEOUT_S.
Source: vfio-user specification, VFIO_USER_DMA_READ and VFIO_USER_DMA_WRITE.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

from dpu.errors import DmaFault
from dpu.guestmap import GuestMap
from dpu.layout import DMA_READ, DMA_WRITE
from dpu.vfio_user import wire
from dpu.vfio_user.wire import Command, HeaderFlag

log = logging.getLogger(__name__)

REQUESTS_MAX = 16
TIMEOUT_S = 5.0
_ACCESS_BYTES = ctypes.sizeof(wire.DmaAccess)
_ID_BITS = 12  # the rest of a message's 16 bits is of the worker's generation

T = TypeVar("T")


class DmaMessages:
    """The requests of one client.

    :param send: sends a whole message to it, in order
    :param generation: of the worker: late answers to one that has died are not taken for ours
    """

    def __init__(self, send: Callable[[bytes], None], generation: int) -> None:
        self.size_max = wire.DATA_BYTES_MAX
        self._send = send
        self._number = generation << _ID_BITS & 0xFFFF
        self._waiting: dict[int, tuple[int, int, int, asyncio.Future[bytes]]] = {}
        self._late: set[int] = set()  # of writes that nobody waits for any more
        self._places = asyncio.Semaphore(REQUESTS_MAX)
        self._refusing = 0

    async def read(self, iova: int, length: int) -> bytes:
        """Fetch guest memory.

        A client's limit may be a single byte, so what takes several messages takes one after the other.
        """
        return b"".join([await self._ask(Command.DMA_READ, at, size) for at, size in self._split(iova, length)])

    async def write(self, iova: int, data: bytes) -> None:
        """Store guest memory; when it returns the client has it."""
        for at, size in self._split(iova, len(data)):
            await self._ask(Command.DMA_WRITE, at, size, data[at - iova : at - iova + size])

    def _split(self, iova: int, length: int) -> Iterator[tuple[int, int]]:
        return ((at, min(self.size_max, iova + length - at)) for at in range(iova, iova + length, self.size_max))

    async def _ask(self, command: Command, iova: int, count: int, data: bytes = b"") -> bytes:
        async with self._places:
            if self._refusing:
                raise DmaFault(iova, count)
            number = self._free_number()
            future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            self._waiting[number] = command, iova, count, future
            self._send(wire.message(number, command, bytes(wire.DmaAccess(iova, count)) + data))
            try:
                done, _ = await asyncio.wait([future], timeout=TIMEOUT_S)
                if not done:
                    log.warning("a client has not answered %s of %d bytes at %#x", command.name, count, iova)
                    if command == Command.DMA_READ:
                        raise DmaFault(iova, count)
                return await future
            finally:
                if number not in self._late:
                    self._waiting.pop(number, None)

    def _free_number(self) -> int:
        """The next number that no request has: one that waits for its answer may have waited for a whole round."""
        while True:
            number = self._number
            self._number = number >> _ID_BITS << _ID_BITS | (number + 1) & (1 << _ID_BITS) - 1
            if number not in self._waiting:
                return number

    def reply(self, raw: bytes) -> None:
        """What the client has answered; an answer to nothing is ignored."""
        header = wire.Header.from_buffer_copy(raw)
        command, iova, count, future = self._waiting.get(header.msg_id, (0, 0, 0, None))
        if header.msg_id in self._late and header.cmd == command:
            self._late.discard(header.msg_id)
            del self._waiting[header.msg_id]
        if future is None or future.done() or header.cmd != command:
            return
        payload = raw[wire.HEADER_BYTES :]
        right = not header.flags & HeaderFlag.ERROR
        if command == Command.DMA_READ:
            right = right and payload[:_ACCESS_BYTES] == bytes(wire.DmaAccess(iova, count))
            right = right and len(payload) == _ACCESS_BYTES + count
        if right:
            future.set_result(payload[_ACCESS_BYTES:])
        else:
            future.set_exception(DmaFault(iova, count))

    def refuse(self, refusing: bool) -> None:
        """Fail everything that is asked for, until it is taken back; calls nest."""
        self._refusing += 1 if refusing else -1
        if refusing:
            for number, (command, iova, count, future) in self._waiting.items():
                if not future.done():
                    future.set_exception(DmaFault(iova, count))
                    if command == Command.DMA_WRITE:
                        self._late.add(number)

    def late_writes(self) -> bool:
        """Whether the client may still carry out a write of before a reset."""
        return bool(self._late)


async def _together(work: Iterable[Awaitable[T]]) -> list[T]:
    """All results, or the first error when all have ended: none is left under way."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results  # type: ignore[return-value]


class Missing(Exception):
    """Guest memory that has to be fetched: (iova, bytes) each."""

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        super().__init__(pieces)
        self.pieces = pieces


class View:
    """Guest memory (GuestMemory of dpu.nvme) for one command, or for the queues of a controller."""

    def __init__(self, memory: GuestMap, messages: DmaMessages) -> None:
        self._memory = memory
        self._messages = messages
        self._fetched: dict[tuple[int, int], bytes | None] = {}  # None: it could not be
        self._written: list[tuple[int, bytes]] = []

    async def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of ``work``, begun again until all that it reads is here."""
        while True:
            self._written.clear()
            try:
                return await work()
            except Missing as missing:
                await asyncio.gather(*(self._fetch(iova, size) for iova, size in missing.pieces))

    async def _fetch(self, iova: int, size: int) -> None:
        try:
            self._fetched[iova, size] = await self._messages.read(iova, size)
        except DmaFault:
            self._fetched[iova, size] = None

    def read(self, iova: int, length: int) -> bytes:
        """As GuestMap.read; ``Missing`` for what has to be fetched."""
        return self.gather([(iova, length)])

    def gather(self, pieces: list[tuple[int, int]]) -> bytes:
        """As GuestMap.gather; ``Missing`` for all that has to be fetched."""
        parts, missing = [], []
        places = [place for iova, length in pieces for place in self._memory.places(iova, length, DMA_READ)]
        for host, iova, size in places:
            if host:
                parts.append(ctypes.string_at(host, size))
            elif (iova, size) not in self._fetched:
                missing.append((iova, size))
            elif (data := self._fetched[iova, size]) is None:
                raise DmaFault(iova, size)
            else:
                parts.append(data)
        if missing:
            raise Missing(missing)
        return b"".join(parts)

    def write(self, iova: int, data: bytes) -> None:
        """As GuestMap.write, done by ``flush``."""
        self._memory.places(iova, len(data), DMA_WRITE)
        self._written.append((iova, data))

    async def flush(self) -> None:
        """Carry out what was written; DmaFault when it cannot be."""
        written, self._written = self._written, []
        await _together(self.store(iova, data) for iova, data in written)

    async def load(self, iova: int, length: int) -> bytes:
        """Read now. Each part is looked up in its turn: the client may unmap it while an answer is awaited."""
        parts, end = [], iova + length
        while iova < end:
            host, _, size = self._memory.places(iova, end - iova, DMA_READ)[0]
            parts.append(ctypes.string_at(host, size) if host else await self._messages.read(iova, size))
            iova += size
        return b"".join(parts)

    async def store(self, iova: int, data: bytes) -> None:
        """Write now, as ``load``."""
        while data:
            host, _, size = self._memory.places(iova, len(data), DMA_WRITE)[0]
            if host:
                ctypes.memmove(host, data[:size], size)
            else:
                await self._messages.write(iova, data[:size])
            iova, data = iova + size, data[size:]
