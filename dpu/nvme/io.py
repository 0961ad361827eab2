"""I/O commands on a file, carried out by control in a thread.

The compiled stage does I/O through io_uring; what it hands over is Compare, and, where the kernel does not allow
io_uring, everything on files. The LBA range was checked before.

Use: ``await execute(sqe, memory, subsystem)``. Errors: none; what fails is a status.
Source: NVM Command Set Specification 1.0, section 3.2.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Mapping
from typing import Protocol

from dpu.backends import Backend
from dpu.nvme import prp
from dpu.nvme.errors import CommandError
from dpu.nvme.interfaces import Completion, GuestMemory
from dpu.nvme.wire import BROADCAST_NSID, DsmRange, NvmOpcode, Status, SubmissionEntry

_FUA = 1 << 30  # CDW12
_DEALLOCATE = 1 << 2  # CDW11
_PUNCH_HOLE = 3  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_ZEROES_BYTES = 1 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


class Subsystem(Protocol):
    """Where the back ends are found."""

    @property
    def by_nsid(self) -> Mapping[int, object]: ...

    def backend(self, nsid: int) -> Backend: ...


async def execute(sqe: bytes, memory: GuestMemory, subsystem: Subsystem) -> Completion:
    """Do one command; guest memory is read before the thread begins and written after it has ended."""
    entry = SubmissionEntry.from_buffer_copy(sqe)
    try:
        await _dispatch(entry, memory, subsystem)
    except CommandError as error:
        return Completion(error.status.field(dnr=error.dnr))
    except KeyError:
        return Completion(Status.INVALID_NAMESPACE_OR_FORMAT.field(dnr=True))
    except OSError as error:
        if error.errno in _NO_ROOM:
            return Completion(Status.CAPACITY_EXCEEDED.field(dnr=True))
        reading = entry.opcode in (NvmOpcode.READ, NvmOpcode.COMPARE)
        return Completion(Status.UNRECOVERED_READ_ERROR if reading else Status.WRITE_FAULT)
    return Completion(Status.SUCCESS)


async def _dispatch(entry: SubmissionEntry, memory: GuestMemory, subsystem: Subsystem) -> None:
    op = entry.opcode
    if op == NvmOpcode.FLUSH:
        nsids = list(subsystem.by_nsid) if entry.nsid == BROADCAST_NSID else [entry.nsid]
        for fd in [subsystem.backend(nsid).fd for nsid in nsids]:
            if fd >= 0:
                await asyncio.to_thread(os.fdatasync, fd)
        return
    backend = subsystem.backend(entry.nsid)
    if op == NvmOpcode.DATASET_MANAGEMENT:
        await _deallocate(entry, memory, backend)
        return
    lba = entry.cdw10 | entry.cdw11 << 32
    offset, length = lba * backend.block_size, ((entry.cdw12 & 0xFFFF) + 1) * backend.block_size  # NLB is 0's based
    if op in (NvmOpcode.READ, NvmOpcode.COMPARE):
        expected = prp.read(memory, entry, length) if op == NvmOpcode.COMPARE else b""
        found = await asyncio.to_thread(_read, backend.fd, length, offset)
        if op == NvmOpcode.READ:
            prp.write(memory, entry, found)
        elif found != expected:
            raise CommandError(Status.COMPARE_FAILURE)
    elif op == NvmOpcode.WRITE:
        data = prp.read(memory, entry, length)
        await asyncio.to_thread(_write, backend.fd, data, offset, bool(entry.cdw12 & _FUA))
    else:
        assert op == NvmOpcode.WRITE_ZEROES, op
        await asyncio.to_thread(_zero, backend.fd, length, offset, bool(entry.cdw12 & _FUA))


async def _deallocate(entry: SubmissionEntry, memory: GuestMemory, backend: Backend) -> None:
    count = (entry.cdw10 & 0xFF) + 1  # 0's based
    data = prp.read(memory, entry, 16 * count)
    ranges = [DsmRange.from_buffer_copy(data, 16 * i) for i in range(count)]
    if any(one.slba + one.nlb > backend.num_blocks for one in ranges):
        raise CommandError(Status.LBA_OUT_OF_RANGE)
    if entry.cdw11 & _DEALLOCATE and backend.readonly:
        raise CommandError(Status.NAMESPACE_WRITE_PROTECTED)
    if entry.cdw11 & _DEALLOCATE and backend.supports_discard:
        for one in ranges:
            size = backend.block_size
            await asyncio.to_thread(_punch, backend.fd, one.nlb * size, one.slba * size)


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
        for at in range(offset, offset + length, _ZEROES_BYTES):
            _write(fd, bytes(min(_ZEROES_BYTES, offset + length - at)), at, False)
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
