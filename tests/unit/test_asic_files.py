"""Files in the asic stage: what is asked of io_uring, what its answers become, and what is left to control.

Requests and answers go through a `FakeRing`, so each result that a kernel can give is given; the last tests use a
real ring. Request numbers are written out from include/uapi/linux/io_uring.h and fs.h.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpu import layout
from dpu.backends import FileBackend, Marks
from dpu.errors import EmuError
from dpu.fastpath.uring import Ring
from dpu.nvme.interfaces import Completion as Result
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE
from tests.unit.asic_lab import ENGINES, NS_FILE, PLAIN, UNIT, Cut, Cutter, FakeRing, GuestSq, Kept, Lab, Request

READV, WRITEV, FSYNC, FALLOCATE = 1, 2, 3, 17
LINK, FSYNC_DATASYNC, RWF_DSYNC, PUNCH_KEEP_SIZE = 4, 1, 2, 3
FUA = 1 << 14  # in bits 31:16 of CDW12
WRITE_FAULT, UNRECOVERED_READ, CAPACITY_EXCEEDED, INTERNAL_ERROR = 0x280, 0x281, 0x081, 0x006
FILE_BYTES = 1 << 20
DIRECT_ALIGN = 512


@pytest.fixture
def backend(tmp_path: Path) -> FileBackend:
    path = tmp_path / "disk"
    path.write_bytes(bytes(FILE_BYTES))
    return FileBackend.create("file", str(path), UNIT, fallocate=True, cache_mode="buffered")


@pytest.fixture
def kept(backend: FileBackend) -> Iterator[Kept]:
    with Kept(files={NS_FILE: backend}) as kept:
        yield kept
        kept.ram.check_canaries()


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> FakeRing:
    ring = FakeRing()
    monkeypatch.setattr(PLAIN, "io_uring_enter", ring.enter)
    return ring


@pytest.fixture
def lab(kept: Kept, ring: FakeRing) -> Iterator[Lab]:
    with Lab(kept, PLAIN, ring=ring) as lab:
        lab.plane.namespaces[NS_FILE - 1].direct_fd = 12345
        lab.plane.namespaces[NS_FILE - 1].align = DIRECT_ALIGN - 1
        yield lab.begin()


@pytest.fixture
def queue(lab: Lab) -> GuestSq:
    return lab.open_pair(1, 64)


def asked(lab: Lab, ring: FakeRing) -> list[Request]:
    lab.settle()
    return ring.take()


def iovecs(request: Request) -> list[tuple[int, int]]:
    raw = PLAIN.view(request.addr, request.length, layout.SEGMENT)
    return [(int(host), int(size)) for host, size in raw.tolist()]


def finish(lab: Lab, ring: FakeRing, queue: GuestSq, *answers: tuple[Request, int]) -> list[tuple[int, int, bool]]:
    for request, result in answers:
        ring.answer(request, result)
    lab.settle()
    return [(one.cid, one.status, one.dnr) for one in queue.cq.reap()]


# ---------------------------------------------------------------------------------------------------- requests


@pytest.mark.parametrize("opcode,wanted", [(nv.READ, READV), (nv.WRITE, WRITEV)])
@pytest.mark.parametrize("fua", [False, True])
def test_transfer_is_one_vectored_request(
    lab: Lab, ring: FakeRing, queue: GuestSq, opcode: int, wanted: int, fua: bool
) -> None:
    first, second = lab.kept.ram.buffer(PAGE), lab.kept.ram.buffer(3 * PAGE)
    slba, last = 100, second.iova + 2 * PAGE
    queue.io(opcode, slba, 16, first.iova, last, nsid=NS_FILE, control=FUA if fua else 0)
    queue.ring()
    (request,) = asked(lab, ring)
    assert (request.opcode, request.flags, request.fd, request.offset) == (wanted, 0, 12345, slba * UNIT)
    assert request.op_flags == (RWF_DSYNC if fua and opcode == nv.WRITE else 0)
    find = lab.plane.memory.find
    assert iovecs(request) == [(find(first.iova, PAGE, 3), PAGE), (find(last, PAGE, 3), PAGE)]
    assert not queue.cq.reap()
    assert finish(lab, ring, queue, (request, 2 * PAGE)) == [(0, nv.OK, False)]


def test_without_a_write_cache_every_write_is_durable(lab: Lab, ring: FakeRing, queue: GuestSq) -> None:
    """Set Features, Volatile Write Cache off: as if FUA were set in each command (Base 5.27.1.4)."""
    lab.plane.set_write_through(True)
    memory = lab.kept.ram.buffer(PAGE)
    for opcode in (nv.WRITE, nv.READ, nv.WRITE_ZEROES):
        queue.io(opcode, 0, 8, memory.iova, nsid=NS_FILE)
    queue.ring()
    write, read, punch, sync = asked(lab, ring)
    assert (write.opcode, write.op_flags, read.op_flags) == (WRITEV, RWF_DSYNC, 0)
    assert (punch.opcode, punch.flags, sync.opcode, sync.op_flags) == (FALLOCATE, LINK, FSYNC, FSYNC_DATASYNC)
    finish(lab, ring, queue, (write, PAGE), (read, PAGE), (punch, 0), (sync, 0))
    lab.plane.set_write_through(False)
    queue.io(nv.WRITE, 0, 8, memory.iova, nsid=NS_FILE)
    queue.ring()
    assert [request.op_flags for request in asked(lab, ring)] == [0]


def test_marks_go_when_the_write_has_succeeded(
    lab: Lab, ring: FakeRing, queue: GuestSq, backend: FileBackend
) -> None:
    backend.marks = Marks.create(backend.num_blocks)
    backend.marks.mark(3, 4)
    lab.plane.set_marks(NS_FILE)
    memory = lab.kept.ram.buffer(PAGE)
    for result, left in ((-errno.EIO, [(3, 4)]), (512, [(3, 4)]), (1024, [(5, 2)])):
        queue.io(nv.WRITE, 3, 2, memory.iova, nsid=NS_FILE)
        queue.ring()
        (request,) = asked(lab, ring)
        assert backend.marks.ranges(0, backend.num_blocks) == [(3, 4)], "not before"
        finish(lab, ring, queue, (request, result))
        assert backend.marks.ranges(0, backend.num_blocks) == left
    queue.io(nv.READ, 4, 2, memory.iova, nsid=NS_FILE)
    queue.io(nv.READ, 3, 2, memory.iova, nsid=NS_FILE)
    queue.ring()
    (request,) = asked(lab, ring)
    assert request.offset == 3 * UNIT
    assert finish(lab, ring, queue, (request, 1024))[-1][1:] == (nv.OK, False)


@pytest.mark.parametrize(
    "offset,blocks,direct", [(0, 8, True), (512, 1, True), (4, 1, False), (256, 8, False), (PAGE - 512, 1, True)]
)
def test_what_is_not_aligned_goes_through_the_page_cache(
    lab: Lab, ring: FakeRing, queue: GuestSq, backend: FileBackend, offset: int, blocks: int, direct: bool
) -> None:
    memory = lab.kept.ram.buffer(2 * PAGE)
    queue.io(nv.READ, 8, blocks, memory.iova + offset, memory.iova + PAGE, nsid=NS_FILE)
    queue.ring()
    (request,) = asked(lab, ring)
    assert request.fd == (12345 if direct else backend.fd)


def test_alignment_of_the_place_in_the_file_counts_too(
    lab: Lab, ring: FakeRing, queue: GuestSq, backend: FileBackend
) -> None:
    lab.plane.namespaces[NS_FILE - 1].align = 4095
    memory = lab.kept.ram.buffer(2 * PAGE)
    for slba, blocks in ((0, 8), (8, 16), (1, 8), (0, 1)):
        queue.io(nv.READ, slba, blocks, memory.iova, memory.iova + PAGE, nsid=NS_FILE)
    queue.ring()
    assert [request.fd for request in asked(lab, ring)] == [12345, 12345, backend.fd, backend.fd]


def test_without_direct_io_everything_goes_through_the_page_cache(
    lab: Lab, ring: FakeRing, queue: GuestSq, backend: FileBackend
) -> None:
    lab.plane.namespaces[NS_FILE - 1].direct_fd = -1
    queue.io(nv.READ, 0, 8, lab.kept.ram.buffer(PAGE).iova, nsid=NS_FILE)
    queue.ring()
    assert [request.fd for request in asked(lab, ring)] == [backend.fd]


@pytest.mark.parametrize("nsid", [NS_FILE, 0xFFFFFFFF])
def test_flush_is_fdatasync(lab: Lab, ring: FakeRing, queue: GuestSq, backend: FileBackend, nsid: int) -> None:
    queue.submit(nv.FLUSH, nsid=nsid)
    queue.ring()
    (request,) = asked(lab, ring)
    assert (request.opcode, request.fd, request.op_flags) == (FSYNC, backend.fd, FSYNC_DATASYNC)
    assert (request.offset, request.length) == (0, 0)
    assert not queue.cq.reap(), "a flush that has not come back has not happened"
    assert finish(lab, ring, queue, (request, 0)) == [(0, nv.OK, False)]


@pytest.mark.parametrize("fua", [False, True])
def test_write_zeroes_punches_and_then_syncs(
    lab: Lab, ring: FakeRing, queue: GuestSq, backend: FileBackend, fua: bool
) -> None:
    queue.io(nv.WRITE_ZEROES, 5, 700, 0, nsid=NS_FILE, control=FUA if fua else 0)
    queue.ring()
    requests = asked(lab, ring)
    punch = requests[0]
    assert (punch.opcode, punch.fd, punch.offset, punch.addr) == (FALLOCATE, backend.fd, 5 * UNIT, 700 * UNIT)
    assert punch.length == PUNCH_KEEP_SIZE and punch.op_flags == 0
    assert punch.flags == (LINK if fua else 0)
    assert [(one.opcode, one.op_flags) for one in requests[1:]] == [(FSYNC, FSYNC_DATASYNC)] * fua
    assert finish(lab, ring, queue, *[(one, 0) for one in requests]) == [(0, nv.OK, False)]


def test_deallocate_punches_each_range(lab: Lab, ring: FakeRing, queue: GuestSq) -> None:
    page = lab.kept.ram.buffer(PAGE)
    page.fill(b"".join(struct.pack("<IIQ", 0, size, slba) for slba, size in ((0, 3), (9, 0), (100, 8))))
    queue.submit(nv.DSM, nsid=NS_FILE, prp1=page.iova, cdw=[2, 4])
    queue.ring()
    requests = asked(lab, ring)
    assert [(one.opcode, one.offset, one.addr) for one in requests] == [
        (FALLOCATE, 0, 3 * UNIT),
        (FALLOCATE, 100 * UNIT, 8 * UNIT),
    ]
    assert not finish(lab, ring, queue, (requests[1], 0)), "one of two ranges is not all"
    assert finish(lab, ring, queue, (requests[0], 0)) == [(0, nv.OK, False)]


def test_deallocate_with_marks_is_controls(lab: Lab, ring: FakeRing, queue: GuestSq, backend: FileBackend) -> None:
    """A range that the file system fails, or does not take, still cannot be read: marks go with what was punched."""
    backend.marks = Marks.create(backend.num_blocks)
    backend.marks.mark(4, 2)
    lab.plane.set_marks(NS_FILE)
    page = lab.kept.ram.buffer(PAGE)
    page.fill(struct.pack("<IIQ", 0, 8, 0))
    queue.submit(nv.DSM, nsid=NS_FILE, prp1=page.iova, cdw=[0, 4])
    queue.ring()
    assert not asked(lab, ring) and not queue.cq.reap()
    (slot,) = lab.misses()
    assert lab.plane.sqe(slot)[0] == nv.DSM and backend.marks.ranges(0, 100) == [(4, 2)]
    lab.plane.finish(slot, Result(0))
    lab.settle()
    counts = lab.plane.spaces[NS_FILE - 1]
    assert (int(counts.unmaps), int(counts.bytes_unmapped)) == (1, 8 * UNIT)


def test_deallocate_that_is_not_taken_asks_nothing(lab: Lab, ring: FakeRing, queue: GuestSq) -> None:
    lab.plane.namespaces[NS_FILE - 1].discard = 0
    page = lab.kept.ram.buffer(PAGE)
    page.fill(struct.pack("<IIQ", 0, 8, 0))
    queue.submit(nv.DSM, nsid=NS_FILE, prp1=page.iova, cdw=[0, 4])
    queue.ring()
    assert not asked(lab, ring) and [one.status for one in queue.cq.reap()] == [nv.OK]


# ------------------------------------------------------------------------------------------------------ answers


@pytest.mark.parametrize(
    "opcode,result,status,dnr",
    [
        (nv.READ, 4096, nv.OK, False),
        (nv.READ, 4095, UNRECOVERED_READ, False),
        (nv.READ, 0, UNRECOVERED_READ, False),
        (nv.READ, -errno.EIO, UNRECOVERED_READ, False),
        (nv.READ, -errno.EINVAL, UNRECOVERED_READ, False),
        (nv.READ, -errno.EFAULT, nv.DATA_TRANSFER_ERROR, True),
        (nv.WRITE, 4096, nv.OK, False),
        (nv.WRITE, 512, CAPACITY_EXCEEDED, True),
        (nv.WRITE, -errno.ENOSPC, CAPACITY_EXCEEDED, True),
        (nv.WRITE, -errno.EDQUOT, CAPACITY_EXCEEDED, True),
        (nv.WRITE, -errno.EFBIG, CAPACITY_EXCEEDED, True),
        (nv.WRITE, -errno.EIO, WRITE_FAULT, False),
        (nv.WRITE, -errno.EOPNOTSUPP, WRITE_FAULT, False),
        (nv.WRITE, -errno.EFAULT, nv.DATA_TRANSFER_ERROR, True),
        (nv.FLUSH, -errno.EIO, WRITE_FAULT, False),
        (nv.FLUSH, -errno.ENOSPC, CAPACITY_EXCEEDED, True),
        (nv.FLUSH, -errno.EOPNOTSUPP, WRITE_FAULT, False),
        (nv.WRITE_ZEROES, 0, nv.OK, False),
        (nv.WRITE_ZEROES, -errno.EIO, WRITE_FAULT, False),
        (nv.WRITE_ZEROES, -errno.ENOSPC, CAPACITY_EXCEEDED, True),
    ],
)
def test_answers_become_statuses(
    lab: Lab, ring: FakeRing, queue: GuestSq, opcode: int, result: int, status: int, dnr: bool
) -> None:
    queue.io(opcode, 0, 8, lab.kept.ram.buffer(PAGE).iova, nsid=NS_FILE)
    queue.ring()
    (request,) = asked(lab, ring)
    assert finish(lab, ring, queue, (request, result)) == [(0, status, dnr)]
    media = int(lab.plane.spaces[NS_FILE - 1].media_errors)
    assert media == int(status in (UNRECOVERED_READ, WRITE_FAULT))
    assert int(ring.record[0].inflight) == 0 and int(lab.plane.record.outstanding) == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_first_error_of_several_answers_stays(
    lab: Lab, ring: FakeRing, queue: GuestSq, order: tuple[int, int]
) -> None:
    queue.io(nv.WRITE_ZEROES, 0, 8, 0, nsid=NS_FILE, control=FUA)
    queue.ring()
    requests = asked(lab, ring)
    results = [-errno.EIO, -errno.ECANCELED]
    answers = [(requests[i], results[i]) for i in order]
    assert finish(lab, ring, queue, *answers) == [(0, WRITE_FAULT, False)]


def test_deallocate_of_a_file_system_that_cannot_is_advice(lab: Lab, ring: FakeRing, queue: GuestSq) -> None:
    page = lab.kept.ram.buffer(PAGE)
    page.fill(struct.pack("<IIQIIQ", 0, 8, 0, 0, 8, 16))
    queue.submit(nv.DSM, nsid=NS_FILE, prp1=page.iova, cdw=[1, 4])
    queue.ring()
    first, second = asked(lab, ring)
    assert finish(lab, ring, queue, (first, -errno.EOPNOTSUPP), (second, -errno.EOPNOTSUPP)) == [(0, nv.OK, False)]


@pytest.mark.parametrize("fua", [False, True])
def test_zeroes_that_a_file_system_cannot_punch_are_written_by_control(
    lab: Lab, ring: FakeRing, queue: GuestSq, fua: bool
) -> None:
    queue.io(nv.WRITE_ZEROES, 0, 8, 0, nsid=NS_FILE, control=FUA if fua else 0)
    queue.ring()
    requests = asked(lab, ring)
    answers = [(requests[0], -errno.EOPNOTSUPP), *((one, -errno.ECANCELED) for one in requests[1:])]
    assert not finish(lab, ring, queue, *answers)
    (slot,) = lab.misses()
    assert lab.plane.sqe(slot)[0] == nv.WRITE_ZEROES and int(lab.plane.inflight[slot].status) == 0


def test_compare_is_controls(lab: Lab, ring: FakeRing, queue: GuestSq) -> None:
    queue.io(nv.COMPARE, 0, 8, lab.kept.ram.buffer(PAGE).iova, nsid=NS_FILE)
    queue.io(nv.COMPARE, 0, 1024, lab.kept.ram.buffer(PAGE).iova, nsid=NS_FILE)
    queue.io(nv.COMPARE, 0, 8, 0, nsid=NS_FILE)
    queue.ring()
    assert not asked(lab, ring) and len(lab.misses()) == 1
    assert [one.status for one in queue.cq.reap()] == [nv.INVALID_FIELD, nv.DATA_TRANSFER_ERROR]


def test_without_io_uring_everything_on_files_is_controls(kept: Kept) -> None:
    with Lab(kept) as lab:
        queue, page = lab.open_pair(1, 64), kept.ram.buffer(PAGE)
        lab.begin()
        for opcode in (nv.READ, nv.WRITE, nv.COMPARE, nv.WRITE_ZEROES):
            queue.io(opcode, 0, 8, page.iova, nsid=NS_FILE)
        queue.submit(nv.FLUSH, nsid=NS_FILE)
        queue.submit(nv.FLUSH, nsid=0xFFFFFFFF)
        queue.submit(nv.DSM, nsid=NS_FILE, prp1=page.iova, cdw=[0, 4])
        queue.ring()
        lab.settle()
        assert len(lab.misses()) == 7 and not queue.cq.reap()
        queue.io(nv.READ, FILE_BYTES // UNIT, 1, page.iova, nsid=NS_FILE)
        queue.io(nv.READ, 0, 513, page.iova, nsid=NS_FILE)
        queue.io(nv.WRITE_ZEROES, FILE_BYTES // UNIT - 1, 2, page.iova, nsid=NS_FILE)
        queue.ring()
        lab.settle()
        wanted = [nv.LBA_OUT_OF_RANGE, nv.INVALID_FIELD, nv.LBA_OUT_OF_RANGE]
        assert [one.status for one in queue.cq.reap()] == wanted and not lab.misses()


# ----------------------------------------------------------------------------------------------- room and order


def deallocate_256(lab: Lab, queue: GuestSq) -> None:
    page = lab.kept.ram.buffer(PAGE)
    page.fill(b"".join(struct.pack("<IIQ", 0, 1, 2 * i) for i in range(256)))
    queue.submit(nv.DSM, nsid=NS_FILE, prp1=page.iova, cdw=[255, 4])


def test_the_ring_is_never_overfilled(lab: Lab, ring: FakeRing, queue: GuestSq) -> None:
    for _ in range(20):
        deallocate_256(lab, queue)
    queue.ring()
    done = 0
    while done < 20:
        requests = asked(lab, ring)
        assert 0 < len(requests) <= ring.entries
        done += len(finish(lab, ring, queue, *[(one, 0) for one in requests]))


def test_replay_does_not_overfill_the_ring_either(kept: Kept, ring: FakeRing) -> None:
    """Many commands, of each all answers but one have come: all their requests are made again."""
    lab = Lab(kept, PLAIN, ring=ring)
    queue = lab.open_pair(1, 64)
    lab.begin()
    left = []
    for _ in range(20):
        deallocate_256(lab, queue)
        queue.ring()
        lab.settle()
        requests = ring.take()
        left.append(requests.pop())
        assert not finish(lab, ring, queue, *[(one, 0) for one in requests])
    lab.close()
    fresh = FakeRing()
    PLAIN.io_uring_enter = fresh.enter
    with Lab(kept, PLAIN, ring=fresh) as last:
        last.recover()
        done = 0
        for _ in range(40):
            requests = asked(last, fresh)
            done += len(finish(last, fresh, queue, *[(one, 0) for one in requests]))
        assert done == 20


def test_requests_that_the_kernel_did_not_take_are_offered_again(lab: Lab, ring: FakeRing, queue: GuestSq) -> None:
    for _ in range(3):
        queue.submit(nv.FLUSH, nsid=NS_FILE)
    queue.ring()
    ring.accept = 1
    lab.one_pass()
    assert int(ring.record[0].pending) == 2
    ring.accept = -errno.EAGAIN
    lab.one_pass()
    assert int(ring.record[0].pending) == 2
    ring.accept = 10
    lab.one_pass()
    assert int(ring.record[0].pending) == 0


def test_a_death_with_requests_under_way_makes_them_again(kept: Kept, ring: FakeRing) -> None:
    """At every store: each write is asked for until it is answered, and completes once."""
    at, alive = 0, False
    while not alive:
        ring = FakeRing()
        PLAIN.io_uring_enter = ring.enter
        kept.cqs.clear()
        kept.sqs.clear()
        os.pwrite(kept.state_fd, bytes(layout.BLOB_OFFSET), 0)
        os.pwrite(kept.bar_fd, bytes(64), layout.DOORBELLS_OFFSET)
        lab = Lab(kept, PLAIN, ring=ring)
        queue, page = lab.open_pair(1, 8), kept.ram.buffer(PAGE)
        lab.begin()
        queue.io(nv.WRITE, 0, 8, page.iova, nsid=NS_FILE)
        queue.io(nv.WRITE, 8, 8, page.iova, nsid=NS_FILE)
        queue.ring()
        cutter = Cutter(at)
        try:
            for _ in range(3):
                cutter.one_pass(lab)
                for request in reversed(ring.take()):
                    ring.answer(request, PAGE)
            alive = True
        except Cut:
            pass
        lab.close()
        fresh = FakeRing()
        PLAIN.io_uring_enter = fresh.enter
        with Lab(kept, PLAIN, ring=fresh) as last:
            last.recover()
            for _ in range(4):
                last.settle()
                for request in fresh.take():
                    assert request.opcode == WRITEV
                    fresh.answer(request, PAGE)
            assert sorted(one.cid for one in queue.cq.reap()) == [0, 1]
            assert not last.plane.inflight.state.any()
        kept.ram.free_buffer(page)
        kept.ram.free(queue.iova, 8 * 64)
        kept.ram.free(queue.cq.iova, 8 * 16)
        at += 4
    assert at > 80


# --------------------------------------------------------------------------------------------------- a real ring


@pytest.fixture(params=list(ENGINES))
def real(request: pytest.FixtureRequest, kept: Kept) -> Iterator[Lab]:
    try:
        ring = Ring.create(1024)
    except EmuError as error:
        pytest.skip(str(error))
    with Lab(kept, ENGINES[request.param], ring=ring) as lab:
        yield lab.begin()
    ring.close()


def test_data_goes_to_the_file_and_back(real: Lab) -> None:
    queue = real.open_pair(1, 64)
    data, back = real.kept.ram.buffer(40 * PAGE, 512), real.kept.ram.buffer(40 * PAGE, 4)
    data.fill(os.urandom(40 * PAGE))
    wanted = bytearray(FILE_BYTES)
    for slba, blocks in ((0, 1), (7, 320), (FILE_BYTES // UNIT - 8, 8)):
        for opcode, buffer in ((nv.WRITE, data), (nv.READ, back)):
            first = PAGE - buffer.iova % PAGE
            pages = [buffer.iova + first + PAGE * i for i in range(40)]
            at = real.kept.ram.alloc(PAGE)
            real.kept.ram.view(at, 8 * 40)[:] = struct.pack("<40Q", *pages)
            rest = blocks * UNIT - first
            prp2 = at if rest > PAGE else pages[0]
            queue.io(opcode, slba, blocks, buffer.iova, prp2, nsid=NS_FILE, control=FUA)
            queue.ring()
            real.settle_files()
            assert [one.status for one in queue.cq.reap()] == [nv.OK]
            real.kept.ram.free(at, PAGE)
        wanted[slba * UNIT : (slba + blocks) * UNIT] = data.bytes()[: blocks * UNIT]
        assert back.bytes()[: blocks * UNIT] == data.bytes()[: blocks * UNIT]
    assert real.kept.disk(NS_FILE) == wanted
    queue.io(nv.WRITE_ZEROES, 3, 100, 0, nsid=NS_FILE, control=FUA)
    queue.submit(nv.FLUSH, nsid=0xFFFFFFFF)
    queue.ring()
    real.settle_files()
    assert [one.status for one in queue.cq.reap()] == [nv.OK, nv.OK]
    wanted[3 * UNIT : 103 * UNIT] = bytes(100 * UNIT)
    assert real.kept.disk(NS_FILE) == wanted


def test_a_file_that_has_been_cut_short(real: Lab) -> None:
    queue, page = real.open_pair(1, 64), real.kept.ram.buffer(PAGE)
    os.ftruncate(real.kept.backends[NS_FILE].fd, 6 * UNIT)
    for slba in (0, 4, 8):
        queue.io(nv.READ, slba, 4, page.iova, nsid=NS_FILE)
    queue.ring()
    real.settle_files()
    assert sorted(one.status for one in queue.cq.reap()) == [nv.OK, UNRECOVERED_READ, UNRECOVERED_READ]
