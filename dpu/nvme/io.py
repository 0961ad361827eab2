"""I/O commands that control carries out, on files in a thread.

The compiled stage does I/O through io_uring; what it hands over is Write Uncorrectable, for every back end; Compare,
Verify, Copy, Deallocate once there are marks, and what the file system does not do, on files; everything on files
where the kernel does not allow io_uring; and everything of clients that do not share their memory (dpu.dma). LBA
ranges and marks of source blocks were checked before, but for Copy's. On a volume the map is asked as the compiled
stage asks it, and control's store is asked for room and for copies of what is shared (dpu.volumes.interface).

Use: ``await execute(sqe, memory, subsystem, durable)``. Errors: none; what fails is a status.
Source: NVM Command Set Specification 1.0, section 3.2.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Callable, Mapping
from typing import Protocol, cast

from dpu.backends import Backend, Kind, NullBackend
from dpu.faults import Mishap
from dpu.journal import Blocks, Journaled
from dpu.layout import (
    BLOCK_ERASE,
    BLOCK_READ,
    BLOCK_WRITE,
    CONTROL_AREA,
    COPY_MAX,
    TRANSFER_MAX,
    WHY_COMMIT,
    WHY_SHARED,
)
from dpu.nvme import prp
from dpu.nvme.errors import CommandError
from dpu.nvme.interfaces import Completion, GuestMemory
from dpu.nvme.wire import (
    BROADCAST_NSID,
    CDW11_DSM_AD,
    CDW12_COPY_NR,
    CDW12_FUA,
    CDW12_NLB,
    CopyRange,
    DsmRange,
    NvmOpcode,
    Status,
    SubmissionEntry,
)
from dpu.volumes.area import Extent
from dpu.volumes.interface import VolumeNamespace, VolumeStore

_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_CHUNK_BYTES = 1 << 20
_ERASED_AT_ONCE = 256 << 20  # of a volume, between two turns of other tasks
_LIBC = ctypes.CDLL(None, use_errno=True)


class Subsystem(Protocol):
    """Where the back ends are found."""

    @property
    def by_nsid(self) -> Mapping[int, object]: ...

    def backend(self, nsid: int) -> Backend: ...

    def block_size(self, nsid: int) -> int: ...


async def execute(
    sqe: bytes, memory: GuestMemory, subsystem: Subsystem, durable: bool, mishap: Mishap | None = None
) -> Completion:
    """Do one command; guest memory is read before the thread begins and written after it has ended.

    :param durable: writes are to be durable also without Force Unit Access
    :param mishap: what happens to the data of a Read or Write
    """
    entry = SubmissionEntry.from_buffer_copy(sqe)
    durable = durable or bool(entry.cdw12 & CDW12_FUA)
    try:
        if entry.opcode == NvmOpcode.COPY:
            return await _copy(entry, memory, subsystem, durable)
        await _dispatch(entry, memory, subsystem, durable, mishap)
    except CommandError as error:
        return Completion(error.status.field(dnr=error.dnr))
    except KeyError:
        return Completion(Status.INVALID_NAMESPACE_OR_FORMAT.field(dnr=True))
    except OSError as error:
        if entry.opcode == NvmOpcode.WRITE_UNCORRECTABLE:  # no memory for marks
            return Completion(Status.INTERNAL_ERROR)
        reading = entry.opcode in (NvmOpcode.READ, NvmOpcode.COMPARE, NvmOpcode.VERIFY)
        return Completion(Status.UNRECOVERED_READ_ERROR if reading else _write_status(error))
    return Completion(mishap.status if mishap is not None else Status.SUCCESS)


async def _dispatch(
    entry: SubmissionEntry, memory: GuestMemory, subsystem: Subsystem, durable: bool, mishap: Mishap | None
) -> None:
    op = entry.opcode
    if op == NvmOpcode.FLUSH:
        nsids = list(subsystem.by_nsid) if entry.nsid == BROADCAST_NSID else [entry.nsid]
        for nsid in nsids:
            await _blocks(subsystem.backend(nsid)).sync()
        return
    backend, size = subsystem.backend(entry.nsid), subsystem.block_size(entry.nsid)
    if op == NvmOpcode.DATASET_MANAGEMENT:
        await _deallocate(entry, memory, backend, size)
        return
    lba, blocks = entry.cdw10 | entry.cdw11 << 32, (entry.cdw12 & CDW12_NLB) + 1  # NLB is 0's based
    offset, length = lba * size, blocks * size
    if op == NvmOpcode.WRITE_UNCORRECTABLE:
        if backend.marks is None:
            raise OSError(errno.ENOMEM, "no marks")
        backend.marks.mark(lba, blocks)
    elif isinstance(backend, NullBackend):  # nothing is stored and nothing is touched
        if op in (NvmOpcode.WRITE, NvmOpcode.WRITE_ZEROES):
            _unmark(backend, lba, blocks)
    elif op == NvmOpcode.VERIFY:
        for at in range(offset, offset + length, TRANSFER_MAX):
            await _blocks(backend).read(min(TRANSFER_MAX, offset + length - at), at)
    elif op in (NvmOpcode.READ, NvmOpcode.COMPARE):
        expected = prp.read(memory, entry, length) if op == NvmOpcode.COMPARE else b""
        found = await _blocks(backend).read(length, offset)
        if op == NvmOpcode.READ:
            prp.write(memory, entry, mishap.change(found) if mishap is not None else found)
        elif found != expected:
            raise CommandError(Status.COMPARE_FAILURE)
    elif op == NvmOpcode.WRITE:
        data = prp.read(memory, entry, length)
        if mishap is not None:
            data = mishap.change(data)
        if data:
            await _blocks(backend).write(data, offset, durable)
        _unmark(backend, lba, len(data) // size)
    else:
        assert op == NvmOpcode.WRITE_ZEROES, op
        await _blocks(backend).zero(length, offset, durable)
        _unmark(backend, lba, blocks)


async def erase(backend: Backend) -> None:
    """Make every block read as zeroes, durably; nothing is written meanwhile. OSError."""
    blocks = _blocks(backend)
    if backend.kind is Kind.VOLUME:
        for offset in range(0, backend.size_bytes, _ERASED_AT_ONCE):
            await blocks.deallocate(min(_ERASED_AT_ONCE, backend.size_bytes - offset), offset)
        await blocks.sync()
    elif backend.fd >= 0:
        await blocks.zero(backend.size_bytes, 0, True)


async def _copy(entry: SubmissionEntry, memory: GuestMemory, subsystem: Subsystem, durable: bool) -> Completion:
    """Copy (NVM 3.2.2), range by range; DW0 of a failure is the first range that was not copied."""
    backend = subsystem.backend(entry.nsid)
    count = (entry.cdw12 & CDW12_COPY_NR) + 1  # 0's based
    data = prp.read(memory, entry, 32 * count)
    ranges = [CopyRange.from_buffer_copy(data, 32 * i) for i in range(count)]
    lba, size = entry.cdw10 | entry.cdw11 << 32, subsystem.block_size(entry.nsid)
    lengths = [(one.nlb + 1) * size for one in ranges]  # 0's based
    # Of memory that is shared all was checked before, but the guest may have changed its ranges since.
    if max(lengths) > TRANSFER_MAX or sum(lengths) > COPY_MAX:
        raise CommandError(Status.COMMAND_SIZE_LIMIT_EXCEEDED)
    ends = [one.slba * size + length for one, length in zip(ranges, lengths)]
    if max(*ends, lba * size + sum(lengths)) > backend.size_bytes:
        raise CommandError(Status.LBA_OUT_OF_RANGE)
    if backend.readonly:
        raise CommandError(Status.NAMESPACE_WRITE_PROTECTED)
    marks = backend.marks
    if marks is not None and any(marks.ranges(one.slba, one.nlb + 1, 1) for one in ranges):
        return Completion(Status.UNRECOVERED_READ_ERROR)
    null = isinstance(backend, NullBackend)
    for i, (one, length) in enumerate(zip(ranges, lengths)):
        try:
            data = b"" if null else await _blocks(backend).read(length, one.slba * size)
        except OSError:
            return Completion(Status.UNRECOVERED_READ_ERROR, i)
        try:
            if not null:
                await _blocks(backend).write(data, lba * size, durable)
        except OSError as error:
            return Completion(_write_status(error), i)
        _unmark(backend, lba, length // size)
        lba += length // size
    return Completion(Status.SUCCESS)


async def see_to(volume: VolumeNamespace, poller: int, why: int, first: int, clusters: int) -> Completion | None:
    """What the compiled stage has asked of control for a command on a volume; None: the command is to begin anew.

    ``why`` is WHY_ROOM, WHY_SHARED or WHY_COMMIT.
    """
    try:
        if why == WHY_COMMIT:
            await volume.store.commit(volume.number)
            return Completion(Status.SUCCESS)
        await help_out(volume.store, why, poller, volume.number, first, clusters)
        return None
    except OSError as error:
        return Completion(_write_status(error))


def _write_status(error: OSError) -> int:
    return Status.CAPACITY_EXCEEDED.field(dnr=True) if error.errno in _NO_ROOM else Status.WRITE_FAULT


def _unmark(backend: Backend, lba: int, blocks: int) -> None:
    if backend.marks is not None:
        backend.marks.clear(lba, blocks)


async def _deallocate(entry: SubmissionEntry, memory: GuestMemory, backend: Backend, size: int) -> None:
    count = (entry.cdw10 & 0xFF) + 1  # 0's based
    data = prp.read(memory, entry, 16 * count)
    ranges = [DsmRange.from_buffer_copy(data, 16 * i) for i in range(count)]
    if any((one.slba + one.nlb) * size > backend.size_bytes for one in ranges):
        raise CommandError(Status.LBA_OUT_OF_RANGE)
    if entry.cdw11 & CDW11_DSM_AD and backend.readonly:
        raise CommandError(Status.NAMESPACE_WRITE_PROTECTED)
    if entry.cdw11 & CDW11_DSM_AD and backend.supports_discard:
        for one in ranges:
            if await _blocks(backend).deallocate(one.nlb * size, one.slba * size):
                _unmark(backend, one.slba, one.nlb)  # a deallocated block reads as DLFEAT says


class _File:
    """A back end's file, in threads. Lengths and offsets are in bytes; errors are OSError."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    async def sync(self) -> None:
        if self._fd >= 0:
            await asyncio.to_thread(os.fdatasync, self._fd)

    async def read(self, length: int, offset: int) -> bytes:
        return await asyncio.to_thread(_read, self._fd, length, offset)

    async def write(self, data: bytes, offset: int, durable: bool) -> None:
        await asyncio.to_thread(_write, self._fd, data, offset, durable)

    async def zero(self, length: int, offset: int, durable: bool) -> None:
        await asyncio.to_thread(_zero, self._fd, length, offset, durable)

    async def deallocate(self, length: int, offset: int) -> bool:
        return await asyncio.to_thread(_punch, self._fd, length, offset)


class _Volume:
    """The same of a volume."""

    def __init__(self, volume: VolumeNamespace) -> None:
        self._area, self._number, self._store = volume.area, volume.number, volume.store

    async def sync(self) -> None:
        if self._area.local[0].durable:
            await self._store.commit(self._number)

    async def read(self, length: int, offset: int) -> bytes:
        async with self._area.gate.passing():
            extents = self._area.ask(self._number, BLOCK_READ, offset, length).extents
            return await asyncio.to_thread(self._read, extents)

    async def write(self, data: bytes, offset: int, durable: bool) -> None:
        await self._change(lambda extents: self._write(extents, data), BLOCK_WRITE, offset, len(data))
        if durable:
            await self.sync()

    async def zero(self, length: int, offset: int, durable: bool) -> None:
        await self._erase(length, offset, free=False)
        if durable:
            await self.sync()

    async def deallocate(self, length: int, offset: int) -> bool:
        await self._erase(length, offset, free=True)
        return True

    async def _erase(self, length: int, offset: int, *, free: bool) -> None:
        while length:
            done = await self._change(self._zero, BLOCK_ERASE, offset, length, free=free)
            offset, length = offset + done, length - done

    async def _change(
        self, work: Callable[[list[Extent]], None], action: int, offset: int, length: int, *, free: bool = False
    ) -> int:
        """Have ``work`` done on the extents in a thread, when they are the volume's own; ``Answer.done``."""
        while True:
            async with self._area.gate.passing():
                answer = self._area.ask(self._number, action, offset, length, free=free)
                if not answer.why:
                    await asyncio.to_thread(work, answer.extents)
                    return answer.done
            await help_out(self._store, answer.why, CONTROL_AREA, self._number, answer.first, answer.clusters)

    def _fd(self, extent: Extent) -> int:
        return int(self._area.local_backings[extent.backing].fd)

    def _read(self, extents: list[Extent]) -> bytes:
        parts = [bytes(e.length) if e.backing < 0 else _read(self._fd(e), e.length, e.offset) for e in extents]
        return b"".join(parts)

    def _write(self, extents: list[Extent], data: bytes) -> None:
        at = 0
        for extent in extents:
            _write(self._fd(extent), data[at : at + extent.length], extent.offset, False)
            at += extent.length

    def _zero(self, extents: list[Extent]) -> None:
        for extent in extents:
            _zero(self._fd(extent), extent.length, extent.offset, False)


async def help_out(store: VolumeStore, why: int, area: int, volume: int, first: int, clusters: int) -> None:
    """Do what a change of a map waits for, so that it can be tried again; OSError when that is not possible."""
    if why == WHY_SHARED:
        await store.make_writable(volume, first, clusters)
    elif not await store.room(area):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def blocks_of(backend: Backend) -> Blocks:
    """What a back end's blocks are read and written by, past its journal."""
    return _Volume(cast(VolumeNamespace, backend)) if backend.kind is Kind.VOLUME else _File(backend.fd)


def _blocks(backend: Backend) -> Blocks:
    inner = blocks_of(backend)
    return inner if backend.journal is None else Journaled(inner, backend.journal)


def _read(fd: int, length: int, offset: int) -> bytes:
    data = os.pread(fd, length, offset)
    if len(data) != length:
        raise OSError(errno.EIO, "file is shorter than its back end")
    return data


def _write(fd: int, data: bytes, offset: int, durable: bool) -> None:
    if os.pwrite(fd, data, offset) != len(data):
        raise OSError(errno.ENOSPC, "short write")
    if durable:
        os.fdatasync(fd)


def _zero(fd: int, length: int, offset: int, durable: bool) -> None:
    if not _punch(fd, length, offset):
        for at in range(offset, offset + length, _CHUNK_BYTES):
            _write(fd, bytes(min(_CHUNK_BYTES, offset + length - at)), at, False)
    if durable:
        os.fdatasync(fd)


def _punch(fd: int, length: int, offset: int) -> bool:
    """Whether the file system could take the blocks back; they read as zeroes then."""
    arguments = fd, _PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(length)
    if length == 0 or _LIBC.fallocate(*arguments) == 0:
        return True
    code = ctypes.get_errno()
    if code == errno.EOPNOTSUPP:
        return False
    raise OSError(code, os.strerror(code))
