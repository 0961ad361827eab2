"""io_uring by raw system calls: the ring's words are the kernel's, requests are done, and it can be refused."""

from __future__ import annotations

import ctypes
import errno
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpu import layout
from dpu.errors import EmuError
from dpu.fastpath import asic, uring
from dpu.fastpath.atomics import load_u32, store_u32
from dpu.fastpath.uring import NoRing, Ring

NOP, FSYNC, WRITEV = 0, 3, 2


@pytest.fixture
def ring() -> Iterator[Ring]:
    try:
        ring = Ring.create(8)
    except EmuError as error:
        pytest.skip(str(error))
    yield ring
    ring.close()


def do(ring: Ring, opcode: int, fd: int, *, address: int = 0, size: int = 0, tag: int = 1) -> int:
    """One request to its end; its result."""
    record = ring.record[0]
    asic.uring_prepare(record, opcode, fd, 0, address, size, 0, tag)
    assert uring._LIBC.syscall(426, ring.fd, 1, 1, 1, 0, 0) == 1  # io_uring_enter, GETEVENTS
    head = load_u32(int(record.cq_head))
    assert load_u32(int(record.cq_tail)) == (head + 1) % (1 << 32)
    area = (ctypes.c_byte * 16).from_address(int(record.cqes) + 16 * (head & int(record.cq_mask)))
    raw = bytes(area)
    assert int.from_bytes(raw[:8], "little") == tag
    store_u32(int(record.cq_head), head + 1)
    return int.from_bytes(raw[8:12], "little", signed=True)


def test_requests_are_done_and_tagged(ring: Ring, tmp_path: Path) -> None:
    for tag in range(40):  # round the ring several times
        assert do(ring, NOP, -1, tag=tag << 32 | 7) == 0
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    data = ctypes.create_string_buffer(b"hello", 5)
    vector = (ctypes.c_uint64 * 2)(ctypes.addressof(data), 5)
    assert do(ring, WRITEV, fd, address=ctypes.addressof(vector), size=1) == 5
    assert do(ring, FSYNC, fd) == 0
    assert os.pread(fd, 9, 0) == b"hello"
    os.close(fd)
    assert do(ring, FSYNC, fd) == -errno.EBADF


def test_words_are_where_the_kernel_says(ring: Ring) -> None:
    record = ring.record[0]
    assert int(record.limit) == 8 and int(record.sq_mask) == 7 and int(record.cq_mask) == 15
    for name in ("sq_head", "sq_tail", "cq_head", "cq_tail"):
        assert load_u32(int(record[name])) == 0
    assert int(record.fd) == ring.fd >= 0 and ring.address == int(ring.record.ctypes.data)


def test_its_descriptor_polls_and_is_not_inherited(ring: Ring) -> None:
    poll = select.poll()
    poll.register(ring.fd, select.POLLIN)
    assert not poll.poll(0)
    asic.uring_prepare(ring.record[0], NOP, -1, 0, 0, 0, 0, 1)
    uring._LIBC.syscall(426, ring.fd, 1, 1, 1, 0, 0)
    assert poll.poll(1000)
    assert not os.get_inheritable(ring.fd)


def test_entries_carry_nothing_of_those_before(ring: Ring) -> None:
    record = ring.record[0]
    size = layout.URING_SQE.itemsize
    ctypes.memset(int(record.sqes), 0xFF, 8 * size)
    asic.uring_prepare(record, NOP, 5, 6, 7, 8, 9, 10)
    raw = bytes((ctypes.c_byte * size).from_address(int(record.sqes)))
    assert raw[1:4] == bytes(3) and raw[40:48] == bytes(8)  # flags, ioprio; buffer, personality, splice
    assert (int(record.pending), int(record.inflight)) == (1, 1)
    assert raw[48:] in (bytes(16), b"\xff" * 16)


def test_a_kernel_that_refuses_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EPERM)
        return -1

    monkeypatch.setattr(uring, "_LIBC", type("Libc", (), {"syscall": staticmethod(refuse)}))
    with pytest.raises(EmuError) as caught:
        Ring.create()
    assert "io_uring" in str(caught.value) and "io_uring_disabled" in caught.value.hint


def test_a_ring_that_cannot_be_made_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(EmuError):
        Ring.create(1 << 30)
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_ring_has_room_and_no_descriptor() -> None:
    ring = NoRing()
    assert ring.fd == -1 and int(ring.record[0].fd) == -1 and int(ring.record[0].limit) > 1 << 20
    assert ring.address == int(ring.record.ctypes.data)
