"""What the keeper knows of vfio-user: framing, and the tables that a new worker needs. No I/O.

Use: ``reader = MessageReader()``; receive at most ``reader.want`` bytes and ``reader.feed(data, fds)`` them.
``Tables.commit(message, fds)`` after a reply without error; ``dead_reply(message)`` when no worker serves.
Limits: MESSAGE_BYTES_MAX per message (more is discarded as it streams in, and answered EMSGSIZE), FDS_MAX
descriptors per message, REGIONS_MAX and FILES_MAX per client.
Errors: StreamError when the stream cannot go on.
Source: vfio-user specification (QEMU docs/interop/vfio-user.rst).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from dpu.channel import FDS_MAX, close_fds
from dpu.vfio_user import wire
from dpu.vfio_user.wire import Command, DmaUnmapFlag, HeaderFlag, IrqSetFlag

REGIONS_MAX = 65535
"""Our "max_dma_maps"."""

FILES_MAX = 256
"""Different files behind the DMA regions of one client."""

_DISCARD_BYTES = 65536
_UNANSWERED = int(HeaderFlag.NO_REPLY | HeaderFlag.REPLY)

_FileKey = tuple[int, int, int]


class StreamError(Exception):
    """The connection cannot go on: where the next message begins is not known."""


@dataclass(frozen=True)
class Message:
    """A whole message; whoever takes it owns ``fds``."""

    raw: bytes
    fds: list[int]


class MessageReader:
    """Puts one message after the other together from pieces of a stream.

    Descriptors belong to the message with the last byte of the piece that they came with, so a piece must
    never reach beyond a message: receive at most ``want`` bytes.
    """

    def __init__(self) -> None:
        self._data = bytearray()
        self._fds: list[int] = []
        self._discard = 0

    @property
    def want(self) -> int:
        """How many bytes to receive at most."""
        if self._discard:
            return min(self._discard, _DISCARD_BYTES)
        return self._size() - len(self._data)

    @property
    def partial(self) -> bool:
        """Whether a message has begun."""
        return bool(self._data)

    def _size(self) -> int:
        if len(self._data) < wire.HEADER_BYTES:
            return wire.HEADER_BYTES
        return int(wire.Header.from_buffer_copy(self._data).msg_size)

    def feed(self, data: bytes, fds: list[int]) -> Message | None:
        """Take a piece; return the message that it completes.

        An oversize message comes out as its header alone, which ``refusal`` answers.

        :raises StreamError: a size below the header's, or too many descriptors
        """
        assert 0 < len(data) <= self.want
        self._fds += fds
        if len(self._fds) > FDS_MAX:
            raise StreamError(f"more than {FDS_MAX} descriptors in one message")
        if self._discard:
            self._discard -= len(data)
            return None if self._discard else self._complete()
        self._data += data
        size = self._size()
        if size < wire.HEADER_BYTES:
            raise StreamError(f"message size {size}")
        if len(self._data) < size and size > wire.MESSAGE_BYTES_MAX:
            self._discard = size - len(self._data)
        return self._complete() if len(self._data) == size else None

    def _complete(self) -> Message:
        message = Message(bytes(self._data), self._fds)
        self._data, self._fds = bytearray(), []
        return message

    def close(self) -> None:
        """Close the descriptors of a message that never became whole."""
        close_fds(self._fds)
        self._fds = []


def refusal(message: Message) -> int:
    """The errno that the keeper itself answers ``message`` with, 0 when a worker shall have it."""
    size = wire.Header.from_buffer_copy(message.raw).msg_size
    return errno.EMSGSIZE if size > wire.MESSAGE_BYTES_MAX else 0


def error_reply(raw: bytes, error_no: int) -> bytes:
    """An error reply to the message ``raw``, b"" when it asked for none or is a reply itself."""
    header = wire.Header.from_buffer_copy(raw)
    return b"" if header.flags & _UNANSWERED else wire.error_reply(header, error_no)


def failed(reply: bytes) -> bool:
    """Whether ``reply`` is an error; b"" (a posted message) is none."""
    return bool(reply) and bool(wire.Header.from_buffer_copy(reply).flags & HeaderFlag.ERROR)


def dead_reply(raw: bytes) -> bytes:
    """The answer of a dead device: reads give all ones, what changes something is acknowledged, else EIO."""
    header = wire.Header.from_buffer_copy(raw)
    if header.flags & _UNANSWERED:
        return b""
    payload = raw[wire.HEADER_BYTES :]
    if header.cmd in (Command.REGION_READ, Command.REGION_WRITE):
        size = ctypes.sizeof(wire.RegionAccess)
        if len(payload) < size:
            return error_reply(raw, errno.EINVAL)
        access = wire.RegionAccess.from_buffer_copy(payload)
        if access.count > wire.DATA_BYTES_MAX:
            return error_reply(raw, errno.EINVAL)
        payload = bytes(access) + b"\xff" * (access.count if header.cmd == Command.REGION_READ else 0)
    elif header.cmd not in (Command.DMA_MAP, Command.DMA_UNMAP, Command.DEVICE_SET_IRQS, Command.DEVICE_RESET):
        return error_reply(raw, errno.EIO)
    elif header.cmd != Command.DMA_UNMAP:
        payload = b""
    return wire.message(header.msg_id, header.cmd, payload, HeaderFlag.REPLY)


@dataclass(frozen=True)
class DmaRegion:
    """A committed region of guest memory; ``fd`` is the table's."""

    flags: int
    offset: int
    iova: int
    size: int
    fd: int | None

    def numbers(self) -> dict[str, Any]:
        """Everything but the descriptor."""
        return {"flags": self.flags, "offset": self.offset, "iova": self.iova, "size": self.size}


class Tables:
    """What a client has set up: the VERSION message, DMA regions, interrupt vectors."""

    def __init__(self) -> None:
        self.version = b""
        self._regions: dict[int, DmaRegion] = {}
        self._irqs: dict[tuple[int, int], int] = {}
        self._files: dict[_FileKey, int] = {}
        self._uses: Counter[int] = Counter()

    @property
    def regions(self) -> list[DmaRegion]:
        """The DMA regions, in the order in which they were mapped."""
        return list(self._regions.values())

    def irq_ranges(self) -> Iterator[tuple[int, int, list[int]]]:
        """(index, first vector, descriptors) of each run of connected vectors, at most FDS_MAX in one."""
        run: tuple[int, int, list[int]] | None = None
        for (index, vector), fd in sorted(self._irqs.items()):
            if run and index == run[0] and vector == run[1] + len(run[2]) and len(run[2]) < FDS_MAX:
                run[2].append(fd)
                continue
            if run:
                yield run
            run = (index, vector, [fd])
        if run:
            yield run

    def full(self, message: Message) -> bool:
        """Whether ``message`` would exceed what is kept for one client."""
        if wire.Header.from_buffer_copy(message.raw).cmd != Command.DMA_MAP:
            return False
        if len(self._regions) >= REGIONS_MAX:
            return True
        keys = {_file_key(fd) for fd in message.fds}
        return len(self._files.keys() | keys) > FILES_MAX

    def commit(self, message: Message) -> None:
        """Record what a message that was answered without error has changed, and take its descriptors."""
        header = wire.Header.from_buffer_copy(message.raw)
        payload = message.raw[wire.HEADER_BYTES :]
        left = list(message.fds)
        if header.cmd == Command.VERSION:
            self.version = message.raw
        elif header.cmd == Command.DMA_MAP and len(payload) >= ctypes.sizeof(wire.DmaMap):
            self._map(wire.DmaMap.from_buffer_copy(payload), left)
        elif header.cmd == Command.DMA_UNMAP and len(payload) >= ctypes.sizeof(wire.DmaUnmap):
            self._unmap(wire.DmaUnmap.from_buffer_copy(payload))
        elif header.cmd == Command.DEVICE_SET_IRQS and len(payload) >= ctypes.sizeof(wire.IrqSet):
            self._set_irqs(wire.IrqSet.from_buffer_copy(payload), left)
        close_fds(left)

    def _map(self, dma: wire.DmaMap, fds: list[int]) -> None:
        self._drop(dma.addr)
        fd = self._keep(fds) if fds else None
        self._regions[dma.addr] = DmaRegion(dma.flags, dma.offset, dma.addr, dma.size, fd)

    def _unmap(self, dma: wire.DmaUnmap) -> None:
        exact = self._regions.get(dma.addr)
        if exact is not None and exact.size == dma.size:
            self._drop(exact.iova)  # the usual case, without a look at all of them
            return
        everything = bool(dma.flags & DmaUnmapFlag.ALL)
        end = dma.addr + dma.size
        for region in self.regions:
            if everything or (dma.addr <= region.iova and region.iova + region.size <= end):
                self._drop(region.iova)

    def _drop(self, iova: int) -> None:
        region = self._regions.pop(iova, None)
        if region is not None and region.fd is not None:
            self._release(region.fd)

    def _keep(self, fds: list[int]) -> int:
        """One descriptor per file: QEMU sends a new one of the same memfd for every region of it."""
        key = _file_key(fds[0])
        fd = self._files.get(key)
        if fd is None:
            fd = self._files[key] = fds.pop(0)
        self._uses[fd] += 1
        return fd

    def _release(self, fd: int) -> None:
        self._uses[fd] -= 1
        if not self._uses[fd]:
            del self._uses[fd]
            self._files = {key: kept for key, kept in self._files.items() if kept != fd}
            close_fds([fd])

    def _set_irqs(self, irq_set: wire.IrqSet, fds: list[int]) -> None:
        index, start, count = irq_set.index, irq_set.start, irq_set.count
        if irq_set.flags == IrqSetFlag.DATA_EVENTFD | IrqSetFlag.ACTION_TRIGGER:
            self._disconnect(lambda i, vector: i == index and start <= vector < start + count)
            for vector in range(start, start + len(fds)):
                self._irqs[index, vector] = fds.pop(0)
        elif irq_set.flags == IrqSetFlag.DATA_NONE | IrqSetFlag.ACTION_TRIGGER and not count:
            self._disconnect(lambda i, _vector: i == index)

    def _disconnect(self, chosen: Callable[[int, int], bool]) -> None:
        for key in [key for key in self._irqs if chosen(*key)]:
            close_fds([self._irqs.pop(key)])

    def close(self) -> None:
        """Close every descriptor that is kept."""
        close_fds([*self._files.values(), *self._irqs.values()])
        self._regions.clear()
        self._irqs.clear()
        self._files.clear()
        self._uses.clear()


def _file_key(fd: int) -> _FileKey:
    """Equal for descriptors of the same file with the same rights; what is no file is like nothing else."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return (-1, fd, 0)
    return (status.st_dev, status.st_ino, fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE)
