"""I/O commands on files in threads of control: data, statuses, durability; no daemon, no poller."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpu.backends import Backend, FileBackend, Marks
from dpu.backends.null import NullBackend
from dpu.errors import DmaFault
from dpu.nvme import io
from dpu.nvme.interfaces import Completion
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE, SQE

UNIT, BLOCKS = 512, 2048
FUA, DNR = 1 << 30, 0x4000
WRITE_FAULT, UNRECOVERED_READ, CAPACITY_EXCEEDED, WRITE_PROTECTED = 0x280, 0x281, 0x081, 0x020


class Memory:
    """Guest memory of 64 KiB at 0; everything else is not mapped."""

    def __init__(self) -> None:
        self.bytes = bytearray(64 << 10)

    def read(self, iova: int, length: int) -> bytes:
        if iova + length > len(self.bytes):
            raise DmaFault(iova, length)
        return bytes(self.bytes[iova : iova + length])

    def gather(self, pieces: list[tuple[int, int]]) -> bytes:
        return b"".join(self.read(iova, length) for iova, length in pieces)

    def write(self, iova: int, data: bytes) -> None:
        if iova + len(data) > len(self.bytes):
            raise DmaFault(iova, len(data))
        self.bytes[iova : iova + len(data)] = data


class Subsystem:
    def __init__(self, backends: dict[int, Backend]) -> None:
        self.by_nsid = backends

    def backend(self, nsid: int) -> Backend:
        return self.by_nsid[nsid]

    def block_size(self, nsid: int) -> int:
        return self.by_nsid[nsid].block_size


@pytest.fixture
def memory() -> Memory:
    return Memory()


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[FileBackend]:
    (tmp_path / "disk").write_bytes(bytes(UNIT * BLOCKS))
    backend = FileBackend.create("file", str(tmp_path / "disk"), UNIT, fallocate=True)
    yield backend
    backend.close()


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    real = os.fdatasync

    def fdatasync(fd: int) -> None:
        calls.append(fd)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    return calls


def run(memory: Memory, backends: dict[int, Backend], opcode: int, **fields: Any) -> Completion:
    cdw = [*fields.get("cdw", ()), 0, 0, 0, 0, 0, 0][:6]
    raw = SQE.pack(
        opcode, 0, 9, fields.get("nsid", 1), 0, 0, 0, fields.get("prp1", PAGE), fields.get("prp2", 0), *cdw
    )
    return asyncio.run(io.execute(raw, memory, Subsystem(backends), fields.get("durable", False)))


def test_write_and_read(memory: Memory, backend: FileBackend, synced: list[int]) -> None:
    data = os.urandom(2 * PAGE)
    memory.bytes[PAGE + 4 : 2 * PAGE] = data[: PAGE - 4]
    memory.bytes[4 * PAGE : 5 * PAGE] = data[PAGE - 4 : 2 * PAGE - 4]
    prps = {"prp1": PAGE + 4, "prp2": 4 * PAGE}
    assert run(memory, {1: backend}, nv.WRITE, cdw=[5, 0, 14], **prps) == Completion(0)
    assert os.pread(backend.fd, 15 * UNIT, 5 * UNIT) == data[: 15 * UNIT]
    memory.bytes[:] = bytes(len(memory.bytes))
    assert run(memory, {1: backend}, nv.READ, cdw=[5, 0, 14], **prps) == Completion(0)
    found = bytes(memory.bytes[PAGE + 4 : 2 * PAGE] + memory.bytes[4 * PAGE :])
    assert found[: 15 * UNIT] == data[: 15 * UNIT] and not any(found[15 * UNIT :])
    assert not any(memory.bytes[: PAGE + 4])
    assert not synced


@pytest.mark.parametrize("opcode", [nv.WRITE, nv.WRITE_ZEROES])
def test_fua_is_durable_before_the_completion(
    memory: Memory, backend: FileBackend, synced: list[int], opcode: int
) -> None:
    assert run(memory, {1: backend}, opcode, cdw=[0, 0, 7 | FUA]) == Completion(0)
    assert synced == [backend.fd]
    assert run(memory, {1: backend}, opcode, cdw=[0, 0, 7], durable=True) == Completion(0)
    assert synced == [backend.fd] * 2, "without a volatile write cache"


def test_flush_of_one_and_of_all(memory: Memory, backend: FileBackend, synced: list[int], tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(PAGE))
    other = FileBackend.create("other", str(tmp_path / "other"), UNIT)
    null = NullBackend.create("null", UNIT, 10, other.uuid)
    backends: dict[int, Backend] = {1: backend, 2: null, 5: other}
    assert run(memory, backends, nv.FLUSH) == Completion(0) and synced == [backend.fd]
    assert run(memory, backends, nv.FLUSH, nsid=0xFFFFFFFF) == Completion(0)
    assert synced == [backend.fd, backend.fd, other.fd]
    other.close()


def test_compare(memory: Memory, backend: FileBackend) -> None:
    os.pwrite(backend.fd, b"\x5a" * PAGE, 0)
    memory.bytes[PAGE : 2 * PAGE] = b"\x5a" * PAGE
    assert run(memory, {1: backend}, nv.COMPARE, cdw=[0, 0, 7]) == Completion(0)
    for at in (0, 511, PAGE - 1):
        memory.bytes[PAGE + at] ^= 1
        assert run(memory, {1: backend}, nv.COMPARE, cdw=[0, 0, 7]).status == nv.COMPARE_FAILURE | DNR
        memory.bytes[PAGE + at] ^= 1
    assert bytes(memory.bytes[PAGE : 2 * PAGE]) == b"\x5a" * PAGE


@pytest.mark.parametrize("punch", [True, False])
def test_write_zeroes(memory: Memory, backend: FileBackend, monkeypatch: pytest.MonkeyPatch, punch: bool) -> None:
    """Also where the file system cannot punch holes: then zeroes are written, in pieces."""
    if not punch:
        monkeypatch.setattr(io, "_punch", lambda fd, length, offset: False)
        monkeypatch.setattr(io, "_CHUNK_BYTES", 1000)
    os.pwrite(backend.fd, b"\x5a" * UNIT * BLOCKS, 0)
    assert run(memory, {1: backend}, nv.WRITE_ZEROES, cdw=[3, 0, 1023]) == Completion(0)
    wanted = b"\x5a" * 3 * UNIT + bytes(1024 * UNIT) + b"\x5a" * (BLOCKS - 1027) * UNIT
    assert os.pread(backend.fd, UNIT * BLOCKS, 0) == wanted


def ranges(memory: Memory, *parts: tuple[int, int]) -> dict[str, Any]:
    memory.bytes[PAGE : PAGE + 16 * len(parts)] = b"".join(struct.pack("<IIQ", 0, n, slba) for slba, n in parts)
    return {"cdw": [len(parts) - 1, 4]}


def test_deallocate(memory: Memory, backend: FileBackend) -> None:
    os.pwrite(backend.fd, b"\x5a" * UNIT * BLOCKS, 0)
    fields = ranges(memory, (1, 2), (9, 0), (100, 1))
    assert run(memory, {1: backend}, nv.DSM, **fields) == Completion(0)
    wanted = bytearray(b"\x5a" * UNIT * BLOCKS)
    wanted[UNIT : 3 * UNIT] = bytes(2 * UNIT)
    wanted[100 * UNIT : 101 * UNIT] = bytes(UNIT)
    assert os.pread(backend.fd, UNIT * BLOCKS, 0) == wanted


@pytest.mark.parametrize("bad", [(BLOCKS, 1), (BLOCKS - 1, 2), ((1 << 64) - 1, 1), (0, BLOCKS + 1)])
def test_deallocate_outside_changes_nothing(memory: Memory, backend: FileBackend, bad: tuple[int, int]) -> None:
    os.pwrite(backend.fd, b"\x5a" * UNIT * BLOCKS, 0)
    fields = ranges(memory, (0, 8), bad)
    assert run(memory, {1: backend}, nv.DSM, **fields).status == nv.LBA_OUT_OF_RANGE | DNR
    assert os.pread(backend.fd, UNIT * BLOCKS, 0) == b"\x5a" * UNIT * BLOCKS


@pytest.mark.parametrize("attributes,discard", [(0, True), (3, True), (4, False)])
def test_deallocate_that_is_not_taken(memory: Memory, backend: FileBackend, attributes: int, discard: bool) -> None:
    backend.supports_discard = discard
    os.pwrite(backend.fd, b"\x5a" * PAGE, 0)
    fields = ranges(memory, (0, 8)) | {"cdw": [0, attributes]}
    assert run(memory, {1: backend}, nv.DSM, **fields) == Completion(0)
    assert os.pread(backend.fd, PAGE, 0) == b"\x5a" * PAGE


@pytest.mark.parametrize("result,kept", [(0, False), (errno.EOPNOTSUPP, True), (errno.EIO, True)])
def test_deallocate_takes_marks_away_where_it_takes_the_blocks(
    memory: Memory, backend: FileBackend, monkeypatch: pytest.MonkeyPatch, result: int, kept: bool
) -> None:
    """What Write Uncorrectable has marked is not read as its old data (NVM 3.2.7); zeroes are as DLFEAT says."""
    backend.marks = Marks.create(BLOCKS)
    backend.marks.mark(4, 2)
    if result:
        libc = SimpleNamespace(fallocate=lambda *arguments: ctypes.set_errno(result) or -1)
        monkeypatch.setattr(io, "_LIBC", libc)
    fields = ranges(memory, (0, 8))
    status = run(memory, {1: backend}, nv.DSM, **fields).status
    assert status == (WRITE_FAULT if result == errno.EIO else nv.OK)
    assert backend.marks.ranges(0, BLOCKS) == ([(4, 2)] if kept else [])


def test_deallocate_of_a_read_only_namespace(memory: Memory, backend: FileBackend) -> None:
    """The same status as the compiled stage gives."""
    backend.readonly = True
    fields = ranges(memory, (0, 8))
    assert run(memory, {1: backend}, nv.DSM, **fields).status == WRITE_PROTECTED | DNR
    assert run(memory, {1: backend}, nv.DSM, cdw=[0, 0]) == Completion(0)


@pytest.mark.parametrize("opcode", [nv.READ, nv.WRITE, nv.COMPARE, nv.DSM])
@pytest.mark.parametrize(
    "prp1,prp2,status",
    [(3, 0, nv.PRP_OFFSET_INVALID), (1 << 40, 0, nv.DATA_TRANSFER_ERROR), (0, 1 << 40, nv.DATA_TRANSFER_ERROR)],
)
def test_bad_addresses(memory: Memory, backend: FileBackend, opcode: int, prp1: int, prp2: int, status: int) -> None:
    if opcode == nv.DSM and prp2:
        prp1 = PAGE - 4
    cdw = [255, 4] if opcode == nv.DSM else [0, 0, 15]
    assert run(memory, {1: backend}, opcode, prp1=prp1, prp2=prp2, cdw=cdw).status & 0x7FF == status


@pytest.mark.parametrize(
    "code,opcode,status",
    [
        (errno.ENOSPC, nv.WRITE, CAPACITY_EXCEEDED | DNR),
        (errno.EDQUOT, nv.WRITE, CAPACITY_EXCEEDED | DNR),
        (errno.EFBIG, nv.WRITE, CAPACITY_EXCEEDED | DNR),
        (errno.EIO, nv.WRITE, WRITE_FAULT),
        (errno.EIO, nv.READ, UNRECOVERED_READ),
        (errno.EIO, nv.COMPARE, UNRECOVERED_READ),
        (errno.EIO, nv.FLUSH, WRITE_FAULT),
        (errno.ENOSPC, nv.FLUSH, CAPACITY_EXCEEDED | DNR),
        (errno.EIO, nv.WRITE_ZEROES, WRITE_FAULT),
    ],
)
def test_failures_become_statuses(
    memory: Memory, backend: FileBackend, monkeypatch: pytest.MonkeyPatch, code: int, opcode: int, status: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(code, "test")

    for name in ("pread", "pwrite", "fdatasync"):
        monkeypatch.setattr(os, name, fail)
    monkeypatch.setattr(io, "_punch", fail)
    assert run(memory, {1: backend}, opcode, cdw=[0, 0, 7]).status == status


def test_short_file_and_short_write(memory: Memory, backend: FileBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    os.ftruncate(backend.fd, 100)
    for opcode in (nv.READ, nv.COMPARE):
        assert run(memory, {1: backend}, opcode, cdw=[0, 0, 0]).status == UNRECOVERED_READ
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: len(data) - 1)
    assert run(memory, {1: backend}, nv.WRITE, cdw=[0, 0, 0]).status == CAPACITY_EXCEEDED | DNR


def test_a_namespace_that_has_gone(memory: Memory, backend: FileBackend) -> None:
    assert run(memory, {1: backend}, nv.READ, nsid=2).status == nv.INVALID_NAMESPACE | DNR


def test_punch_tells_what_the_file_system_cannot(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    with pytest.raises(OSError) as caught:
        io._punch(writer, 10, 0)
    assert caught.value.errno in (errno.ESPIPE, errno.ENODEV, errno.EBADF)
    assert io._punch(writer, 0, 0), "nothing to do is done"
    os.close(reader)
    os.close(writer)
