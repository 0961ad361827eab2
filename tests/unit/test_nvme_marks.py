"""Write Uncorrectable's marks: the bookkeeping against a set of blocks, and what each command makes of them.

Source: NVM Command Set 1.0, 3.2.7 (until the blocks are written, reading them is Unrecovered Read Error), and 3.2.1,
3.2.2, 3.2.3, 3.2.5, 3.2.8.
"""

from __future__ import annotations

import asyncio
import os
import random
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dpu.backends import Marks
from dpu.nvme import io
from tests.support import nvme_driver as nv
from tests.support.nvme_driver import PAGE
from tests.support.nvme_host import runs
from tests.unit.asic_lab import ENGINES, NS_4K, NS_MEMORY, NS_NULL, PLAIN, Cut, GuestSq, Kept, Lab

BLOCKS = 9000  # more than two pages of marks
WRITE_PROTECTED, INTERNAL_ERROR = 0x020, 0x006


@pytest.fixture
def marks() -> Iterator[Marks]:
    marks = Marks.create(BLOCKS)
    yield marks
    marks.close()


def test_marks_are_a_set_of_blocks(marks: Marks) -> None:
    """Random marking and clearing, by control and by the poller's code; an heir sees the same."""
    chance, model = random.Random(4), set[int]()
    row: Any = type("Row", (), {"marks": marks.blocks, "mark_pages": marks.pages})()
    for _ in range(400):
        lba = chance.choice([0, 4095, 4096, 8191, 8999, chance.randrange(BLOCKS)])
        count = min(chance.choice([1, 2, 500, 5000]), BLOCKS - lba)
        part = set(range(lba, lba + count))
        action = chance.choice(["mark", "mark", "clear", "unmark"])
        if action == "mark":
            marks.mark(lba, count)
            model |= part
        else:
            marks.clear(lba, count) if action == "clear" else PLAIN.unmark(row, lba, count)
            model -= part
        lba = chance.randrange(BLOCKS)
        count = chance.randrange(1, BLOCKS - lba + 1)
        wanted = runs({block for block in model if lba <= block < lba + count})
        assert marks.ranges(lba, count) == wanted
        assert marks.ranges(lba, count, 2) == wanted[:2]
        assert PLAIN.find_mark(row, lba, count) == (wanted[0][0] if wanted else -1)
    heir = Marks(os.dup(marks.fd))
    assert heir.ranges(0, BLOCKS) == runs(model) != []
    heir.close()
    for blocks in (5000, 20_000):
        new = marks.resized(blocks)
        left = runs({block for block in model if block < blocks})
        assert new.ranges(0, blocks) == left
        row = type("Row", (), {"marks": new.blocks, "mark_pages": new.pages})()
        assert PLAIN.find_mark(row, 0, blocks) == left[0][0]
        new.close()


def test_memory_is_taken_for_marks_only() -> None:
    """Looking for marks in a terabyte of blocks takes none; too much of it is refused."""
    marks = Marks.create(1 << 31)
    taken = os.fstat(marks.fd).st_blocks
    assert taken == 0
    marks.mark(5 << 20, 3)
    assert marks.ranges(0, 1 << 31) == [(5 << 20, 3)]
    row: Any = type("Row", (), {"marks": marks.blocks, "mark_pages": marks.pages})()
    assert PLAIN.find_mark(row, 0, 1 << 31) == 5 << 20
    assert PLAIN.find_mark(row, 0, 5 << 20) == -1
    PLAIN.unmark(row, 0, 1 << 31)
    assert os.fstat(marks.fd).st_blocks * 512 <= 1 << 20
    marks.clear(0, 1 << 31)
    assert PLAIN.find_mark(row, 0, 1 << 31) == -1
    assert os.fstat(marks.fd).st_blocks * 512 <= 1 << 20
    with pytest.raises(OSError, match="space"):
        marks.mark(0, (256 << 20) + 1)
    marks.close()
    with pytest.raises(OSError, match="large"):
        Marks.create((1 << 40) + 1)


def test_looking_at_alternating_marks_reads_each_byte_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest may mark every other block; what that costs is what it has marked, not its square."""
    marks, read, pread = Marks.create(1 << 22), [], os.pread
    every_other = b"\1\0" * (1 << 15)
    for at in (0, 1 << 21):
        os.pwrite(marks.fd, every_other, (marks.blocks - marks.pages) + at)

    def count(fd: int, size: int, offset: int) -> bytes:
        read.append(pread(fd, size, offset))
        return read[-1]

    monkeypatch.setattr(os, "pread", count)
    wanted = [(at + block, 1) for at in (0, 1 << 21) for block in range(0, 1 << 16, 2)]
    assert marks.ranges(0, 1 << 22) == wanted
    assert sum(map(len, read)) <= 3 << 20
    marks.close()


# ------------------------------------------------------------------------------------------------------ commands


@pytest.fixture
def kept() -> Iterator[Kept]:
    with Kept() as kept:
        for nsid, backend in kept.backends.items():
            backend.marks = Marks.create(backend.num_blocks)
            backend.marks.mark(9, 2)
            if nsid != NS_NULL:
                os.pwrite(backend.fd, bytes([nsid]) * 64 * backend.block_size, 0)
        yield kept


@pytest.fixture(params=["product", "plain"])
def lab(kept: Kept, request: pytest.FixtureRequest) -> Iterator[Lab]:
    with Lab(kept, ENGINES[request.param]) as lab:
        yield lab.begin()


def do(lab: Lab, queue: GuestSq, opcode: int, nsid: int, slba: int, blocks: int, iova: int = 0) -> int:
    cdw = [slba, 0, blocks - 1]
    return queue.do(lab, opcode, nsid=nsid, prp1=iova, prp2=iova + PAGE, cdw=cdw).status


def by_control(kept: Kept, lab: Lab, queue: GuestSq) -> int:
    """Status of the command that was submitted, which the poller must hand over."""
    lab.settle()
    (slot,) = lab.misses()
    board: Any = SimpleNamespace(
        backend=kept.backends.__getitem__, block_size=lambda nsid: kept.backends[nsid].block_size
    )
    lab.plane.finish(slot, asyncio.run(io.execute(lab.plane.sqe(slot), lab.plane.memory, board, False)))
    lab.settle()
    (done,) = queue.cq.reap()
    return done.status


STORES = [NS_MEMORY, NS_NULL, NS_4K]


@pytest.mark.parametrize("nsid", STORES)
@pytest.mark.parametrize("opcode", [nv.READ, nv.COMPARE, nv.VERIFY])
def test_marked_blocks_cannot_be_read(kept: Kept, lab: Lab, opcode: int, nsid: int) -> None:
    queue, iova = lab.open_pair(1, 64), kept.ram.alloc(2 * PAGE)
    blocks = 2 * PAGE // kept.backends[nsid].block_size
    kept.ram.view(iova, 2 * PAGE)[:] = bytes([nsid]) * 2 * PAGE
    before = bytes(kept.ram.view(iova, 2 * PAGE))
    for slba, count in ((9, 1), (10, 1), (9, 2), (10 - blocks + 1, blocks), (10, blocks)):
        slba = max(slba, 0)
        assert do(lab, queue, opcode, nsid, slba, count, iova) == nv.UNRECOVERED_READ_ERROR, (slba, count)
        (error,) = list(lab.poller.errors())
        assert error.lba == max(slba, 9), "the first block that failed"
    assert bytes(kept.ram.view(iova, 2 * PAGE)) == before, "data of a block that cannot be read"
    for slba, count in ((8, 1), (11, 1), (11, blocks), (0, min(9, blocks))):
        assert do(lab, queue, opcode, nsid, slba, count, iova) == nv.OK, (slba, count)


@pytest.mark.parametrize("nsid", STORES)
@pytest.mark.parametrize("opcode", [nv.WRITE, nv.WRITE_ZEROES])
def test_written_blocks_can_be_read_again(kept: Kept, lab: Lab, opcode: int, nsid: int) -> None:
    queue, iova = lab.open_pair(1, 64), kept.ram.alloc(2 * PAGE)
    assert do(lab, queue, opcode, nsid, 9, 1, iova) == nv.OK
    assert do(lab, queue, nv.READ, nsid, 9, 1, iova) == nv.OK
    assert do(lab, queue, nv.READ, nsid, 10, 1, iova) == nv.UNRECOVERED_READ_ERROR
    assert do(lab, queue, opcode, nsid, 10, 2, iova) == nv.OK
    assert do(lab, queue, nv.READ, nsid, 9, 2, iova) == nv.OK


def test_a_write_that_fails_leaves_the_marks(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 64)
    assert do(lab, queue, nv.WRITE, NS_MEMORY, 9, 1, iova=0x40) == nv.DATA_TRANSFER_ERROR
    assert do(lab, queue, nv.READ, NS_MEMORY, 9, 1, kept.ram.alloc(PAGE)) == nv.UNRECOVERED_READ_ERROR


def test_deallocated_blocks_read_as_they_are_promised_to(kept: Kept, lab: Lab) -> None:
    """DLFEAT: zeroes. Where Deallocate is not taken nothing changes."""
    queue, iova = lab.open_pair(1, 64), kept.ram.alloc(PAGE)
    kept.ram.view(iova, 16)[:] = struct.pack("<IIQ", 0, 2, 9)
    assert queue.do(lab, nv.DSM, nsid=NS_NULL, prp1=iova, cdw=[0, 4]).status == nv.OK
    assert do(lab, queue, nv.READ, NS_NULL, 10, 1, kept.ram.alloc(PAGE)) == nv.UNRECOVERED_READ_ERROR
    queue.submit(nv.DSM, nsid=NS_4K, prp1=iova, cdw=[0, 4])
    queue.ring()
    assert by_control(kept, lab, queue) == nv.OK
    page = kept.ram.alloc(PAGE)
    assert do(lab, queue, nv.READ, NS_4K, 10, 1, page) == nv.OK
    assert bytes(kept.ram.view(page, PAGE)) == bytes(PAGE)


@pytest.mark.parametrize("nsid", STORES)
def test_marking_is_left_to_control(kept: Kept, lab: Lab, nsid: int) -> None:
    queue = lab.open_pair(1, 64)
    backend = kept.backends[nsid]
    last = backend.num_blocks - 1
    for slba, count, wanted in ((last, 2, nv.LBA_OUT_OF_RANGE), (last + 1, 1, nv.LBA_OUT_OF_RANGE)):
        cdw = [slba & 0xFFFFFFFF, slba >> 32, count - 1]
        assert queue.do(lab, nv.WRITE_UNCORRECTABLE, nsid=nsid, cdw=cdw).status == wanted
    queue.submit(nv.WRITE_UNCORRECTABLE, nsid=nsid, cdw=[last & 0xFFFFFFFF, last >> 32, 0])
    queue.ring()
    assert by_control(kept, lab, queue) == nv.OK
    cdw = [last & 0xFFFFFFFF, last >> 32, 0]
    iova = kept.ram.alloc(PAGE)
    assert queue.do(lab, nv.READ, nsid=nsid, prp1=iova, cdw=cdw).status == nv.UNRECOVERED_READ_ERROR
    assert lab.plane.unrecoverable(nsid, 0, last + 1, 9) == [(9, 2), (last, 1)]
    backend.marks, old = None, backend.marks  # no memory for them
    queue.submit(nv.WRITE_UNCORRECTABLE, nsid=nsid, cdw=cdw)
    queue.ring()
    assert by_control(kept, lab, queue) == INTERNAL_ERROR
    backend.marks = old


def test_read_only_namespaces_are_not_marked_and_not_copied_to(kept: Kept, lab: Lab) -> None:
    queue, iova = lab.open_pair(1, 64), kept.ram.alloc(PAGE)
    lab.plane.namespaces[NS_MEMORY - 1].readonly = 1
    assert do(lab, queue, nv.WRITE_UNCORRECTABLE, NS_MEMORY, 0, 1) == WRITE_PROTECTED
    kept.ram.view(iova, 32)[:] = copy_range(0, 1)
    assert queue.do(lab, nv.COPY, prp1=iova, cdw=[20, 0, 0]).status == WRITE_PROTECTED
    assert do(lab, queue, nv.VERIFY, NS_MEMORY, 0, 1) == nv.OK


def test_verify_with_protection_information(kept: Kept, lab: Lab) -> None:
    """PRACT is for Verify an Invalid Field (NVM 3.2.5)."""
    queue = lab.open_pair(1, 64)
    assert queue.do(lab, nv.VERIFY, cdw=[0, 0, 1 << 29]).status == nv.INVALID_FIELD
    assert queue.do(lab, nv.VERIFY, cdw=[2048 - 1, 0, 1]).status == nv.LBA_OUT_OF_RANGE


# ---------------------------------------------------------------------------------------------------------- Copy


def copy_range(slba: int, blocks: int) -> bytes:
    return struct.pack("<8xQH14x", slba, blocks - 1)


def copy(kept: Kept, lab: Lab, queue: GuestSq, target: int, *ranges: tuple[int, int], cdw12: int = 0) -> int:
    data = b"".join(copy_range(*one) for one in ranges)
    iova = kept.ram.alloc(len(data))
    kept.ram.view(iova, len(data))[:] = data
    cdw = [target & 0xFFFFFFFF, target >> 32, len(ranges) - 1 | cdw12]
    completion = queue.do(lab, nv.COPY, prp1=iova, prp2=iova + PAGE, cdw=cdw)
    assert completion.dw0 == 0
    return completion.status


def test_copy_in_order(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 64)
    disk = os.urandom(2048 * 512)
    os.pwrite(kept.backends[NS_MEMORY].fd, disk, 0)
    kept.backends[NS_MEMORY].marks.mark(1001, 1)  # type: ignore[union-attr]
    assert copy(kept, lab, queue, 1000, (300, 2), (50, 1), (2047, 1), (100, 512)) == nv.OK
    wanted = [*range(300, 302), 50, 2047, *range(100, 612)]
    expected = bytearray(disk)
    expected[1000 * 512 : 1000 * 512 + 512 * len(wanted)] = b"".join(disk[512 * n : 512 * n + 512] for n in wanted)
    assert kept.disk() == expected
    assert do(lab, queue, nv.READ, NS_MEMORY, 1001, 1, kept.ram.alloc(PAGE)) == nv.OK, "written by the Copy"


def test_copy_within_a_range_that_overlaps(kept: Kept, lab: Lab) -> None:
    """A host should not; one range is moved as a whole."""
    queue, disk = lab.open_pair(1, 64), os.urandom(64 * 512)
    os.pwrite(kept.backends[NS_MEMORY].fd, disk, 1000 * 512)
    assert copy(kept, lab, queue, 1001, (1000, 63)) == nv.OK
    assert kept.disk()[1000 * 512 : 1064 * 512] == disk[:512] + disk[: 63 * 512]


@pytest.mark.parametrize(
    ("target", "ranges", "cdw12", "status"),
    [
        (0, [(100, 1)], 1 << 8, nv.INVALID_FIELD),  # Descriptor Format 1h
        (0, [(100, 1)], 15 << 8, nv.INVALID_FIELD),
        (0, [(100, 513)], 0, nv.SIZE_LIMIT_EXCEEDED),  # MSSRL
        (0, [(100, 512)] * 4 + [(100, 1)], 0, nv.SIZE_LIMIT_EXCEEDED),  # MCL
        (0, [(100, 1)] * 129, 0, nv.SIZE_LIMIT_EXCEEDED),  # MSRC
        (2048, [(0, 1)], 0, nv.LBA_OUT_OF_RANGE),
        (2047, [(0, 1), (5, 1)], 0, nv.LBA_OUT_OF_RANGE),
        ((1 << 64) - 1, [(0, 1)], 0, nv.LBA_OUT_OF_RANGE),
        (0, [(100, 1), (2048, 1)], 0, nv.LBA_OUT_OF_RANGE),
        (0, [(100, 1), (2047, 2)], 0, nv.LBA_OUT_OF_RANGE),
        (0, [((1 << 64) - 1, 1)], 0, nv.LBA_OUT_OF_RANGE),
        (0, [(100, 1), (10, 1)], 0, nv.UNRECOVERED_READ_ERROR),
    ],
)
def test_copies_that_fail_change_nothing(
    kept: Kept, lab: Lab, target: int, ranges: list[tuple[int, int]], cdw12: int, status: int
) -> None:
    queue, before = lab.open_pair(1, 64), kept.disk()
    assert copy(kept, lab, queue, target, *ranges, cdw12=cdw12) == status
    assert kept.disk() == before


def test_largest_copy(kept: Kept, lab: Lab) -> None:
    queue = lab.open_pair(1, 64)
    assert copy(kept, lab, queue, 0, (512, 512), (512, 512), (1024, 512), (1536, 512)) == nv.OK
    assert copy(kept, lab, queue, 0, *[(1000 + n, 1) for n in range(128)]) == nv.OK
    assert queue.do(lab, nv.COPY, prp1=1 << 40, cdw=[0, 0, 0]).status == nv.DATA_TRANSFER_ERROR
    assert queue.do(lab, nv.COPY, prp1=kept.ram.alloc(PAGE), nsid=7, cdw=[0, 0, 0]).status == nv.INVALID_FIELD


# ------------------------------------------------------------------------- a worker's death in the middle of a write


@pytest.mark.parametrize("then", ["reset", "end"])
@pytest.mark.parametrize("nsid", [NS_MEMORY, NS_4K])
def test_a_write_that_was_cut_is_done_before_it_can_be_dropped(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, nsid: int, then: str
) -> None:
    """NAWUPF: all of a write or nothing, also when the next worker first sees a reset or the end of the client."""
    plain, lab = PLAIN, Lab(kept, PLAIN)
    lab.begin()
    queue, size = lab.open_pair(1, 64), 4 * PAGE
    iova, new = kept.ram.alloc(size), os.urandom(size)
    kept.ram.view(iova, size)[:] = new
    table = kept.ram.alloc(PAGE)
    struct.pack_into("<3Q", kept.ram.view(table, PAGE), 0, *(iova + PAGE * n for n in (1, 2, 3)))
    queue.submit(nv.WRITE, nsid=nsid, prp1=iova, prp2=table, cdw=[16, 0, size // kept.backends[nsid].block_size - 1])
    queue.ring()
    real = plain.copy

    def cut(target: int, source: int, count: int) -> None:
        real(target, source, count if count == 64 else count // 2 + 100)
        if count != 64:  # not an SQE
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(plain, "copy", cut)
        with pytest.raises(Cut):
            lab.one_pass()
    lab.close()
    start = 16 * kept.backends[nsid].block_size
    assert kept.disk(nsid)[start : start + size] != new
    with Lab(kept) as last:
        asyncio.run(asyncio.wait_for(next_worker(last, then), 240))  # it may have to compile
    assert kept.disk(nsid)[start : start + size] == new


async def next_worker(lab: Lab, then: str) -> None:
    loop = asyncio.get_running_loop()
    lab.recover()
    loop.add_reader(lab.poller.control_fd, lab.poller.woken)
    lab.poller.start()
    await lab.plane.settled()
    await (lab.plane.close_all() if then == "reset" else lab.plane.close())
    loop.remove_reader(lab.poller.control_fd)
    lab.poller.stop()
