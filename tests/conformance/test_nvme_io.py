"""I/O commands, queues and interrupts against the NVM Command Set 1.0 and Base 2.0, driven without a VM.

Section numbers are of NVM Express Base 2.0 unless another is named.
"""

from __future__ import annotations

import itertools
import random
import select
import struct
from collections.abc import Callable

import pytest

from tests.support import front_ends
from tests.support import nvme_driver as nv
from tests.support.daemon import (
    MAX_NAMESPACES,
    NS_4K,
    NS_512,
    NS_FILE,
    NS_NULL,
    NULL_BYTES,
    STANDARD_BYTES,
    Daemon,
)
from tests.support.front_ends import FrontEnd
from tests.support.nvme_driver import PAGE, Buffer, Nvme, SubmissionQueue

STORING = [NS_512, NS_4K, NS_FILE]
BLOCK = {NS_512: 512, NS_4K: 4096, NS_NULL: 512, NS_FILE: 512}
BLOCKS = {nsid: STANDARD_BYTES // BLOCK[nsid] for nsid in STORING} | {NS_NULL: NULL_BYTES // 512}
FILLER = 0x5A

Connect = Callable[..., Nvme]


@pytest.fixture(scope="module", params=front_ends.rows())
def front_end(request: pytest.FixtureRequest) -> FrontEnd:
    """Every test here runs with every front end."""
    row: FrontEnd = request.param
    return row


def pattern(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def mdts_bytes(nvme: Nvme) -> int:
    """The largest transfer (Identify Controller byte 77, in units of CAP.MPSMIN pages)."""
    mdts = nvme.identify(1)[77]
    assert mdts != 0
    return PAGE << mdts


def guarded(nvme: Nvme, length: int, offset: int = 0) -> tuple[Buffer, memoryview]:
    """A buffer with a page of filler before and behind it, and the view of all of it."""
    size = 2 * PAGE + offset + length
    base = nvme.ram.alloc(size)
    everything = nvme.ram.view(base, size)
    everything[:] = bytes([FILLER]) * size
    start = PAGE + offset
    return Buffer(base + start, everything[start : start + length]), everything


def assert_filler_kept(everything: memoryview, buffer: Buffer, offset: int = 0) -> None:
    start = PAGE + offset
    around = bytes(everything[:start]) + bytes(everything[start + len(buffer) :])
    assert around == bytes([FILLER]) * len(around), "bytes beside the buffer were written"


def status_of(nvme: Nvme, queue: SubmissionQueue, opcode: int, **fields: object) -> int:
    return nvme.execute(queue, opcode, **fields).status


def lba_cdw(slba: int, blocks: int) -> list[int]:
    return [slba & 0xFFFFFFFF, slba >> 32, blocks - 1]  # NLB is 0's based


# --- transfers


@pytest.mark.parametrize("nsid", STORING)
def test_write_then_read_of_every_size(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    block, limit = BLOCK[nsid], mdts_bytes(nvme)
    sizes = sorted({block, 2 * block, 3 * block, PAGE, 2 * PAGE, 3 * PAGE, 17 * PAGE, limit - block, limit})
    for number, size in enumerate(sizes):
        slba, data = number * (limit // block) + number, pattern(number, size)
        nvme.write(queue, nsid, slba, data, block=block)
        buffer, everything = guarded(nvme, size)
        assert nvme.io(queue, nv.READ, nsid, slba, buffer, block=block) == nv.OK
        assert buffer.bytes() == data
        assert_filler_kept(everything, buffer)
        nvme.ram.free(buffer.iova - PAGE, len(everything))


@pytest.mark.parametrize("nsid", STORING)
def test_every_prp_offset(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    """PRP1 may begin at any dword of a page (4.1.1); nothing beside the buffer changes."""
    block = BLOCK[nsid]
    for offset in range(0, PAGE, 4):
        size = block * (1 + offset // 4 % 3)
        data = pattern(offset, size)
        source = nvme.ram.buffer(size, offset)
        source.fill(data)
        assert nvme.io(queue, nv.WRITE, nsid, offset, source, block=block) == nv.OK
        target, everything = guarded(nvme, size, offset)
        assert nvme.io(queue, nv.READ, nsid, offset, target, block=block) == nv.OK
        assert target.bytes() == data, f"PRP1 offset {offset}"
        assert_filler_kept(everything, target, offset)
        nvme.ram.free_buffer(source)
        nvme.ram.free(target.iova - PAGE - offset, len(everything))


@pytest.mark.parametrize("nsid", [NS_512, NS_4K])
@pytest.mark.parametrize("offset", [0, 4, 512, 2048, 4092])
def test_largest_transfer_at_an_offset(nvme: Nvme, queue: SubmissionQueue, nsid: int, offset: int) -> None:
    size, block = mdts_bytes(nvme), BLOCK[nsid]
    data = pattern(offset, size)
    source = nvme.ram.buffer(size, offset)
    source.fill(data)
    assert nvme.io(queue, nv.WRITE, nsid, 7, source, block=block) == nv.OK
    target, everything = guarded(nvme, size, offset)
    assert nvme.io(queue, nv.READ, nsid, 7, target, block=block) == nv.OK
    assert target.bytes() == data
    assert_filler_kept(everything, target, offset)


@pytest.mark.parametrize("list_offset", [0, 8, 2048, 4080, 4088])
def test_scattered_pages_and_list_that_crosses_pages(nvme: Nvme, queue: SubmissionQueue, list_offset: int) -> None:
    """The first list may begin anywhere in a page at a qword; its last entry then points to the next list."""
    pages_count = mdts_bytes(nvme) // PAGE
    base = nvme.ram.alloc(2 * pages_count * PAGE)
    pages = [base + 2 * PAGE * index for index in range(pages_count)]
    random.Random(list_offset).shuffle(pages)
    data = pattern(list_offset, pages_count * PAGE)
    for opcode in (nv.WRITE, nv.READ):
        for index, page in enumerate(pages):
            chunk = data[index * PAGE : (index + 1) * PAGE] if opcode == nv.WRITE else bytes(PAGE)
            nvme.ram.view(page, PAGE)[:] = chunk
        prp1, prp2, lists = nvme.prps_of_pages(pages[0], pages[1:], list_offset)
        cdw = lba_cdw(1000, len(data) // 512)
        status = status_of(nvme, queue, opcode, nsid=NS_512, prp1=prp1, prp2=prp2, cdw=cdw, pages=lists)
        assert status == nv.OK
    assert b"".join(bytes(nvme.ram.view(page, PAGE)) for page in pages) == data
    gaps = b"".join(bytes(nvme.ram.view(base + (2 * n + 1) * PAGE, PAGE)) for n in range(pages_count - 1))
    assert gaps == bytes(len(gaps)), "pages between the scattered ones were written"


def test_transfer_in_the_second_mapped_window(nvme: Nvme, queue: SubmissionQueue) -> None:
    """Two DMA mappings: data in the first and the last page of the second window."""
    iova, _, size = nvme.ram.windows[1]
    for at in (iova, iova + size - PAGE):
        buffer = Buffer(at, nvme.ram.view(at, PAGE))
        buffer.fill(pattern(at, PAGE))
        assert nvme.io(queue, nv.WRITE, NS_512, 64, buffer) == nv.OK
        assert nvme.read(queue, NS_512, 64, PAGE) == pattern(at, PAGE)


@pytest.mark.parametrize("nsid", STORING)
def test_first_and_last_block(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    block = BLOCK[nsid]
    for slba in (0, BLOCKS[nsid] - 1):
        nvme.write(queue, nsid, slba, pattern(slba, block), block=block)
    for slba in (0, BLOCKS[nsid] - 1):
        assert nvme.read(queue, nsid, slba, block, block=block) == pattern(slba, block)


def test_namespaces_do_not_share_blocks(nvme: Nvme, queue: SubmissionQueue) -> None:
    for nsid in STORING:
        nvme.write(queue, nsid, 0, pattern(nsid, PAGE), block=BLOCK[nsid])
    for nsid in STORING:
        assert nvme.read(queue, nsid, 0, PAGE, block=BLOCK[nsid]) == pattern(nsid, PAGE)


def test_null_namespace_succeeds_and_stays_in_the_buffer(nvme: Nvme, queue: SubmissionQueue) -> None:
    buffer, everything = guarded(nvme, 3 * PAGE, 12)
    for opcode in (nv.WRITE, nv.READ):
        assert nvme.io(queue, opcode, NS_NULL, BLOCKS[NS_NULL] - 24, buffer) == nv.OK
    assert nvme.flush(queue, NS_NULL) == nv.OK
    assert nvme.write_zeroes(queue, NS_NULL, 0, 65536) == nv.OK
    assert_filler_kept(everything, buffer, 12)


def test_write_with_fua_is_in_the_file(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue) -> None:
    """FUA (NVM 3.2.6) and Flush on the file namespace, looked at from outside."""
    image = daemon.directory / "disk.img"
    nvme.write(queue, NS_FILE, 2048, pattern(1, 8 * PAGE), fua=True)
    assert image.read_bytes()[2048 * 512 :][: 8 * PAGE] == pattern(1, 8 * PAGE)
    nvme.write(queue, NS_FILE, 2049, pattern(2, 512))
    assert nvme.flush(queue, NS_FILE) == nv.OK
    with image.open("rb") as file:
        file.seek(2049 * 512)
        assert file.read(512) == pattern(2, 512)


def test_read_with_fua(nvme: Nvme, queue: SubmissionQueue) -> None:
    for nsid in STORING:
        buffer = nvme.ram.buffer(PAGE)
        assert nvme.io(queue, nv.READ, nsid, 0, buffer, block=BLOCK[nsid], fua=True) == nv.OK


# --- other commands


@pytest.mark.parametrize("nsid", STORING)
def test_compare(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    """Compare Failure (NVM 3.2.1) for a difference in the first, a middle and the last byte."""
    block, size = BLOCK[nsid], 5 * PAGE
    data = bytearray(pattern(3, size))
    nvme.write(queue, nsid, 40, bytes(data), block=block)
    assert nvme.compare(queue, nsid, 40, bytes(data), block=block) == nv.OK
    for at in (0, 1, size // 2, size - 1):
        data[at] ^= 0x40
        assert nvme.compare(queue, nsid, 40, bytes(data), block=block) == nv.COMPARE_FAILURE
        data[at] ^= 0x40
    assert nvme.compare(queue, nsid, 40, bytes(data), block=block) == nv.OK
    assert nvme.read(queue, nsid, 40, size, block=block) == bytes(data), "Compare changed the medium"


def test_compare_does_not_write_host_memory(nvme: Nvme, queue: SubmissionQueue) -> None:
    nvme.write(queue, NS_512, 0, pattern(5, PAGE))
    buffer, everything = guarded(nvme, PAGE)
    assert nvme.io(queue, nv.COMPARE, NS_512, 0, buffer) == nv.COMPARE_FAILURE
    assert bytes(everything) == bytes([FILLER]) * len(everything)


@pytest.mark.parametrize("nsid", STORING)
@pytest.mark.parametrize("deallocate", [False, True])
def test_write_zeroes(nvme: Nvme, queue: SubmissionQueue, nsid: int, deallocate: bool) -> None:
    block = BLOCK[nsid]
    for start, count in ((100, 1), (101, 7), (90, 40)):
        nvme.write(queue, nsid, 80, b"\xff" * (60 * block), block=block)
        assert nvme.write_zeroes(queue, nsid, start, count, deallocate=deallocate) == nv.OK
        expected = bytearray(b"\xff" * (60 * block))
        expected[(start - 80) * block : (start - 80 + count) * block] = bytes(count * block)
        assert nvme.read(queue, nsid, 80, 60 * block, block=block) == expected


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_write_zeroes_beyond_mdts(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    """MDTS does not limit Write Zeroes: it moves no data (WZSL of the NVM command set does, if not zero)."""
    last = 65536 - 1
    nvme.write(queue, nsid, 0, b"\xff" * 512)
    nvme.write(queue, nsid, last, b"\xff" * 1024)
    assert nvme.write_zeroes(queue, nsid, 0, 65536) == nv.OK
    assert nvme.read(queue, nsid, 0, 512) == bytes(512)
    assert nvme.read(queue, nsid, last, 1024) == bytes(512) + b"\xff" * 512


@pytest.mark.parametrize("nsid", STORING)
def test_deallocated_blocks_read_as_zeroes(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    """DSM deallocate (NVM 3.2.3). Where DLFEAT promises zeroes, zeroes are read; neighbours stay."""
    block = BLOCK[nsid]
    dlfeat = nvme.identify(0, nsid)[33] & 7
    data = pattern(9, 64 * block)
    nvme.write(queue, nsid, 0, data, block=block)
    ranges = [(0, 1), (10, 5), (30, 1), (40, 16)]
    assert nvme.dsm(queue, nsid, ranges) == nv.OK
    got = nvme.read(queue, nsid, 0, 64 * block, block=block)
    trimmed = {lba for start, count in ranges for lba in range(start, start + count)}
    for lba in range(64):
        part = slice(lba * block, (lba + 1) * block)
        if lba not in trimmed:
            assert got[part] == data[part], f"LBA {lba} was not deallocated and changed"
        elif dlfeat == 1:
            assert got[part] == bytes(block), f"LBA {lba} was deallocated"
    again = nvme.read(queue, nsid, 0, 64 * block, block=block)
    assert again == got, "a deallocated block must read the same until written"


def test_dsm_of_256_ranges(nvme: Nvme, queue: SubmissionQueue) -> None:
    """NR is 0's based: 256 ranges fill the page exactly."""
    data = pattern(10, 512 * 512)
    half = len(data) // 2
    nvme.write(queue, NS_512, 0, data[:half])
    nvme.write(queue, NS_512, 256, data[half:])
    assert nvme.dsm(queue, NS_512, [(2 * n, 1) for n in range(256)]) == nv.OK
    got = nvme.read(queue, NS_512, 0, half) + nvme.read(queue, NS_512, 256, half)
    for lba in range(1, 512, 2):
        assert got[lba * 512 : lba * 512 + 512] == data[lba * 512 : lba * 512 + 512]
    assert got[:512] == bytes(512)


def test_dsm_without_deallocate_changes_nothing(nvme: Nvme, queue: SubmissionQueue) -> None:
    nvme.write(queue, NS_512, 0, pattern(11, PAGE))
    assert nvme.dsm(queue, NS_512, [(0, 8)], attributes=0) == nv.OK
    assert nvme.dsm(queue, NS_512, [(0, 8)], attributes=3) == nv.OK  # integral read and write hints
    assert nvme.read(queue, NS_512, 0, PAGE) == pattern(11, PAGE)


def test_dsm_of_zero_blocks(nvme: Nvme, queue: SubmissionQueue) -> None:
    nvme.write(queue, NS_512, 0, pattern(12, PAGE))
    assert nvme.dsm(queue, NS_512, [(0, 0)]) == nv.OK
    assert nvme.read(queue, NS_512, 0, PAGE) == pattern(12, PAGE)


def test_flush(nvme: Nvme, queue: SubmissionQueue) -> None:
    for nsid in (*STORING, NS_NULL):
        assert nvme.flush(queue, nsid) == nv.OK


def test_flush_of_all_namespaces(nvme: Nvme, queue: SubmissionQueue) -> None:
    """VWC bits 2:1 (Identify Controller byte 525) say whether FFFFFFFFh is supported."""
    behaviour = nvme.identify(1)[525] >> 1 & 3
    status = nvme.flush(queue, 0xFFFFFFFF)
    if behaviour == 3:
        assert status == nv.OK
    else:
        assert behaviour == 2 and status in (nv.INVALID_NAMESPACE, nv.INVALID_FIELD)


# --- errors a driver can provoke


@pytest.mark.parametrize("opcode", [nv.READ, nv.WRITE, nv.COMPARE, nv.WRITE_ZEROES])
@pytest.mark.parametrize("nsid", [NS_512, NS_4K, NS_NULL, NS_FILE])
def test_lba_out_of_range(nvme: Nvme, queue: SubmissionQueue, opcode: int, nsid: int) -> None:
    buffer = nvme.ram.buffer(2 * BLOCK[nsid])
    prp1, prp2, _ = nvme.prps(buffer.iova, len(buffer))
    last = BLOCKS[nsid] - 1
    for slba, blocks in (
        (last + 1, 1),
        (last, 2),
        (1 << 63, 1),
        (2**64 - 1, 1),
        (2**64 - 1, 2),
        (1 << 32, 1),
    ):
        cdw = lba_cdw(slba, blocks)
        status = status_of(nvme, queue, opcode, nsid=nsid, prp1=prp1, prp2=prp2, cdw=cdw)
        assert status == nv.LBA_OUT_OF_RANGE, f"SLBA {slba:#x}, {blocks} blocks"
    if opcode != nv.COMPARE:
        cdw = lba_cdw(last, 1)
        assert status_of(nvme, queue, opcode, nsid=nsid, prp1=prp1, prp2=prp2, cdw=cdw) == nv.OK


@pytest.mark.parametrize("nsid", STORING)
def test_dsm_range_out_of_range(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    blocks = BLOCKS[nsid]
    for ranges in ([(blocks, 1)], [(blocks - 1, 2)], [(0, 1), (2**64 - 1, 2)], [(0, 0xFFFFFFFF)]):
        assert nvme.dsm(queue, nsid, ranges) == nv.LBA_OUT_OF_RANGE, ranges


@pytest.mark.parametrize("opcode", [nv.READ, nv.WRITE, nv.COMPARE, nv.WRITE_ZEROES, nv.DSM, nv.FLUSH])
def test_invalid_namespace(nvme: Nvme, queue: SubmissionQueue, opcode: int) -> None:
    """Invalid NSIDs: Invalid Namespace or Format; inactive ones: Invalid Field in Command (3.2.1)."""
    page = nvme.ram.alloc(PAGE)
    count = struct.unpack_from("<I", nvme.identify(1), 516)[0]
    for nsid in (0, count + 1, 0x7FFFFFFF, 0xFFFFFFFE):
        assert status_of(nvme, queue, opcode, nsid=nsid, prp1=page) == nv.INVALID_NAMESPACE, f"NSID {nsid:#x}"
    if count > NS_FILE:
        assert status_of(nvme, queue, opcode, nsid=count, prp1=page) in (
            nv.INVALID_FIELD,
            nv.INVALID_NAMESPACE,
        )
    if opcode != nv.FLUSH:
        status = status_of(nvme, queue, opcode, nsid=0xFFFFFFFF, prp1=page)
        assert status in (nv.INVALID_NAMESPACE, nv.INVALID_FIELD)
    assert count <= MAX_NAMESPACES


@pytest.mark.parametrize("opcode", [0x03, 0x06, 0x07, 0x0A, 0x0D, 0x7F, 0x80, 0xC0, 0xFF])
def test_invalid_opcode(nvme: Nvme, queue: SubmissionQueue, opcode: int) -> None:
    completion = nvme.execute(queue, opcode, nsid=NS_512, prp1=nvme.ram.alloc(PAGE))
    assert completion.status == nv.INVALID_OPCODE
    assert completion.dnr


@pytest.mark.parametrize("flags", [0x01, 0x02, 0x40, 0x80, 0xC0])
@pytest.mark.parametrize("opcode", [nv.READ, nv.WRITE])
def test_fused_and_sgl_are_refused(nvme: Nvme, queue: SubmissionQueue, opcode: int, flags: int) -> None:
    """FUSE and PSDT of CDW0 (3.3.3.1): neither fused operations nor SGLs are supported."""
    page = nvme.ram.alloc(PAGE)
    status = status_of(nvme, queue, opcode, nsid=NS_512, prp1=page, cdw=lba_cdw(0, 1), flags=flags)
    assert status == nv.INVALID_FIELD


@pytest.mark.parametrize("opcode", [nv.READ, nv.WRITE, nv.COMPARE])
def test_transfer_larger_than_mdts(nvme: Nvme, queue: SubmissionQueue, opcode: int) -> None:
    size = mdts_bytes(nvme) + 512
    buffer = nvme.ram.buffer(size)
    assert nvme.io(queue, opcode, NS_512, 0, buffer) == nv.INVALID_FIELD
    assert nvme.io(queue, opcode, NS_512, 0, nvme.ram.buffer(65536 * 512)) == nv.INVALID_FIELD


DATA_OPCODES = [nv.READ, nv.WRITE, nv.COMPARE]


@pytest.mark.parametrize("opcode", DATA_OPCODES)
@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_prp_offset_invalid(nvme: Nvme, queue: SubmissionQueue, opcode: int, nsid: int) -> None:
    """Offsets that 4.1.1 forbids, in PRP2 as a page, in a list, in the list's address."""
    base = nvme.ram.alloc(8 * PAGE)
    entries = nvme.ram.view(base + 7 * PAGE, PAGE).cast("Q")

    def status(prp1: int, prp2: int, size: int) -> int:
        return status_of(nvme, queue, opcode, nsid=nsid, prp1=prp1, prp2=prp2, cdw=lba_cdw(0, size // 512))

    assert status(base, base + PAGE + 512, 2 * PAGE) == nv.PRP_OFFSET_INVALID
    assert status(base + 4, base + PAGE + 4, PAGE) == nv.PRP_OFFSET_INVALID
    entries[0], entries[1] = base + PAGE, base + 2 * PAGE + 8
    assert status(base, base + 7 * PAGE, 3 * PAGE) == nv.PRP_OFFSET_INVALID
    entries[0], entries[1] = base + PAGE + 4, base + 2 * PAGE
    assert status(base, base + 7 * PAGE, 3 * PAGE) == nv.PRP_OFFSET_INVALID
    nvme.ram.view(base + 7 * PAGE + 4, 16)[:] = struct.pack("<QQ", base + PAGE, base + 2 * PAGE)
    assert status(base, base + 7 * PAGE + 4, 3 * PAGE) == nv.PRP_OFFSET_INVALID, "a list that is not at a qword"


def test_prp1_not_at_a_dword(nvme: Nvme, queue: SubmissionQueue) -> None:
    """Bits 1:0 of PRP1 are reserved as zero (4.1.1): refused or ignored, never a shifted transfer."""
    buffer, everything = guarded(nvme, PAGE)
    nvme.write(queue, NS_512, 0, pattern(20, 512))
    for low in (1, 2, 3):
        completion = nvme.execute(queue, nv.READ, nsid=NS_512, prp1=buffer.iova + low, cdw=lba_cdw(0, 1))
        assert completion.status == nv.PRP_OFFSET_INVALID or buffer.bytes()[:512] == pattern(20, 512)
    assert_filler_kept(everything, buffer)


@pytest.mark.parametrize("opcode", [nv.READ, nv.WRITE, nv.COMPARE, nv.DSM])
@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_unmapped_data_address(nvme: Nvme, queue: SubmissionQueue, opcode: int, nsid: int) -> None:
    """Addresses outside every DMA mapping: Data Transfer Error (or Invalid Field), in each PRP position."""
    hole = nvme.ram.windows[0][0] + nvme.ram.windows[0][2]
    base = nvme.ram.alloc(4 * PAGE)
    entries = nvme.ram.view(base + 3 * PAGE, PAGE).cast("Q")
    cases = [(hole, 0, 1), (0, 0, 1), (2**64 - PAGE, 0, 1), (1 << 63, 0, 1), (hole - 512, hole, 8)]
    if opcode != nv.DSM:
        cases += [(base, hole, 16), (base, hole, 24), (base, 2**64 - PAGE, 16), (base, 0, 16), (base, 0, 24)]
        cases += [(base, base + 3 * PAGE, 24)]
        entries[0], entries[1] = base + PAGE, hole
    else:
        cases = cases[:4]
    for prp1, prp2, blocks in cases:
        cdw = [0, 4] if opcode == nv.DSM else lba_cdw(0, blocks)
        status = status_of(nvme, queue, opcode, nsid=nsid, prp1=prp1, prp2=prp2, cdw=cdw)
        assert status in (nv.DATA_TRANSFER_ERROR, nv.INVALID_FIELD), f"{prp1:#x} {prp2:#x} {blocks}"
    assert nvme.flush(queue, nsid) == nv.OK


def test_write_protected_namespace(daemon: Daemon, connect: Connect) -> None:
    """A read-only file: Namespace is Write Protected (Base figure 94), NSATTR bit 0, and it stays as it is."""
    path = daemon.directory / "read-only.img"
    path.write_bytes(pattern(30, 1 << 20))
    daemon.rpc(
        "bdev_aio_create",
        {"name": "fixed", "filename": str(path), "block_size": 512, "readonly": True, "fallocate": True},
    )
    nvme = connect(daemon.add_subsystem("nqn.2026-01.io.test:fixed", ["fixed"]).path)
    nvme.enable()
    queue = nvme.create_queue_pair(1, 16)
    assert nvme.identify(0, 1)[99] & 1, "NSATTR: currently write protected"
    assert nvme.io(queue, nv.WRITE, 1, 0, nvme.ram.buffer(PAGE)) == nv.WRITE_PROTECTED
    assert nvme.write_zeroes(queue, 1, 0, 8) == nv.WRITE_PROTECTED
    assert nvme.dsm(queue, 1, [(0, 8)]) == nv.WRITE_PROTECTED
    assert nvme.flush(queue, 1) == nv.OK
    assert nvme.read(queue, 1, 0, PAGE) == pattern(30, PAGE)
    assert path.read_bytes() == pattern(30, 1 << 20)


# --- queues


@pytest.mark.parametrize("entries", [2, 3, 7, 64, 255, 1024])
@pytest.mark.parametrize("shadow", [False, True])
def test_full_queue_of_any_depth_wraps(connect: Connect, entries: int, shadow: bool) -> None:
    """A queue holds entries - 1 commands (3.3.1.4); it wraps several times under a verifying load."""
    nvme = connect()
    nvme.enable()
    if shadow:
        nvme.enable_shadow_doorbells_if_offered()
    queue = nvme.create_queue_pair(1, entries)
    buffers = [nvme.ram.buffer(512) for _ in range(entries - 1)]
    for turn in range(3 if entries > 100 else 8):
        for opcode in (nv.WRITE, nv.READ):
            for lba, buffer in enumerate(buffers):
                buffer.fill(pattern(lba + turn * 10_000, 512) if opcode == nv.WRITE else bytes(512))
            commands = [
                nvme.submit_io(queue, opcode, NS_512, lba, buffer, ring=False) for lba, buffer in enumerate(buffers)
            ]
            assert queue.space() == 0
            nvme.ring_sq(queue)
            assert {completion.status for completion in nvme.wait(*commands)} == {nv.OK}
        for lba, buffer in enumerate(buffers):
            assert buffer.bytes() == pattern(lba + turn * 10_000, 512)


@pytest.mark.parametrize("depth", [1, 2, 32, 1023])
@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_random_load_at_depth(nvme: Nvme, depth: int, nsid: int) -> None:
    """Depth commands in flight, a new one for each completed, every read checked against a model."""
    nvme.enable_shadow_doorbells_if_offered()
    queue = nvme.create_queue_pair(1, 1024)
    rng = random.Random(depth)
    blocks = 4096
    for start in range(0, blocks, 128):
        assert nvme.write_zeroes(queue, nsid, start, 128) == nv.OK
    model = [bytes(512)] * blocks
    busy: set[int] = set()
    running: dict[int, tuple[nv.Command, Buffer, int, int]] = {}
    spare = [nvme.ram.buffer(512) for _ in range(depth)]
    budget = 300 + 4 * depth

    def start_one() -> None:
        nonlocal budget
        budget -= 1
        lba = rng.choice([lba for lba in rng.sample(range(blocks), 64) if lba not in busy] or [0])
        if lba in busy:
            return
        opcode, buffer = rng.choice((nv.READ, nv.WRITE)), spare.pop()
        if opcode == nv.WRITE:
            model[lba] = rng.randbytes(512)
            buffer.fill(model[lba])
        command = nvme.submit_io(queue, opcode, nsid, lba, buffer)
        busy.add(lba)
        running[command.cid] = (command, buffer, lba, opcode)

    while budget > 0 or running:
        while budget > 0 and spare and len(running) < depth:
            start_one()
        before = queue.completed
        nvme.wait_until(queue.cq, lambda before=before: queue.completed > before, "any completion")  # type: ignore[misc]
        for cid, (command, buffer, lba, opcode) in list(running.items()):
            if command.completion is None:
                continue
            assert command.status == nv.OK
            if opcode == nv.READ:
                assert buffer.bytes() == model[lba], f"LBA {lba}"
            busy.discard(lba)
            spare.append(buffer)
            del running[cid]


def test_sixty_four_queue_pairs(connect: Connect) -> None:
    nvme = connect()
    nvme.enable()
    nvme.enable_shadow_doorbells_if_offered()
    granted = nvme.set_feature(0x07, 63 << 16 | 63)
    assert granted & 0xFFFF >= 63 and granted >> 16 >= 63, "64 I/O queue pairs (0's based)"
    queues = [nvme.create_queue_pair(qid, 32) for qid in range(1, 65)]
    buffers = {queue.qid: [nvme.ram.buffer(PAGE) for _ in range(8)] for queue in queues}
    for opcode in (nv.WRITE, nv.READ):
        commands = []
        for queue in queues:
            for index, buffer in enumerate(buffers[queue.qid]):
                seed = queue.qid * 8 + index
                buffer.fill(pattern(seed, PAGE) if opcode == nv.WRITE else bytes(PAGE))
                commands.append(nvme.submit_io(queue, opcode, NS_512, seed * 8, buffer, ring=False))
            nvme.ring_sq(queue)
        assert {completion.status for completion in nvme.wait(*commands)} == {nv.OK}
    for queue in queues:
        for index, buffer in enumerate(buffers[queue.qid]):
            assert buffer.bytes() == pattern(queue.qid * 8 + index, PAGE)
    for queue in queues:
        nvme.delete_sq(queue)
        nvme.delete_cq(queue.cq)


@pytest.mark.parametrize("shadow", [False, True])
def test_submission_queues_that_share_a_completion_queue(nvme: Nvme, shadow: bool) -> None:
    if shadow:
        nvme.enable_shadow_doorbells_if_offered()
    cq = nvme.create_cq(1, 16)
    queues = [nvme.create_sq(qid, entries, cq) for qid, entries in ((1, 8), (2, 64), (5, 3), (9, 16))]
    assert nvme.try_admin(nv.DELETE_CQ, cdw=[1]).status == nv.INVALID_QUEUE_DELETION
    buffers = [nvme.ram.buffer(512) for _ in queues]
    for turn in range(60):
        opcode = nv.READ if turn % 2 else nv.WRITE
        commands = []
        for lba, (queue, buffer) in enumerate(zip(queues, buffers)):
            buffer.fill(pattern(turn * 4 + lba, 512) if opcode == nv.WRITE else bytes(512))
            commands.append(nvme.submit_io(queue, opcode, NS_512, lba, buffer))
        assert {completion.status for completion in nvme.wait(*commands)} == {nv.OK}
        if opcode == nv.READ:
            for lba, buffer in enumerate(buffers):
                assert buffer.bytes() == pattern((turn - 1) * 4 + lba, 512)
    for queue in queues:
        nvme.delete_sq(queue)
    nvme.delete_cq(cq)


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_full_completion_queue_holds_commands_back(nvme: Nvme, nsid: int) -> None:
    """With no head doorbell at most entries - 1 completions are posted (3.3.1.4); none is lost afterwards."""
    cq = nvme.create_cq(1, 4)
    queue = nvme.create_sq(1, 64, cq)
    other = nvme.create_queue_pair(2, 64)
    buffers = [nvme.ram.buffer(512) for _ in range(63)]
    commands = [nvme.submit_io(queue, nv.READ, nsid, lba, buffer, ring=False) for lba, buffer in enumerate(buffers)]
    nvme.ring_sq(queue)
    for turn in range(20):  # each step gives the device time and shows that others are served
        nvme.write(other, nsid, 1000 + turn, pattern(turn, 512))
        posted = sum((cq.words[index * 4 + 3] >> 16) & 1 for index in range(4))
        assert posted <= 3, "the completion queue was overfilled"
    while queue.outstanding:
        before = queue.completed
        nvme.wait_until(cq, lambda before=before: queue.completed > before, "a completion")  # type: ignore[misc]
        assert nvme.flush(other, nsid) == nv.OK
    assert {command.status for command in commands} == {nv.OK}


def test_completions_name_queue_and_head(nvme: Nvme, queue: SubmissionQueue) -> None:
    heads = []
    for _ in range(70):
        completion = nvme.execute(queue, nv.FLUSH, nsid=NS_512)
        assert (completion.sqid, completion.status) == (1, nv.OK)
        heads.append(completion.sqhd)
    assert heads == [(n + 1) % 64 for n in range(70)], "SQHD follows commands run one at a time"


def test_any_command_identifier(nvme: Nvme, queue: SubmissionQueue) -> None:
    for cid in (0, 1, 0x7FFF, 0x8000, 0xFFFE, 0xFFFF):
        assert nvme.execute(queue, nv.FLUSH, nsid=NS_512, cid=cid).cid == cid


def test_queue_memory_survives_its_delete(nvme: Nvme) -> None:
    """Create, use and delete the same identifier with other sizes and places."""
    for turn, entries in enumerate((2, 64, 9, 1024, 3)):
        queue = nvme.create_queue_pair(1, entries)
        nvme.write(queue, NS_512, turn, pattern(turn, 512))
        assert nvme.read(queue, NS_512, turn, 512) == pattern(turn, 512)
        nvme.delete_sq(queue)
        nvme.delete_cq(queue.cq)


def test_delete_of_a_busy_queue_completes_its_commands(nvme: Nvme) -> None:
    """Delete I/O Submission Queue (5.6): every command is completed or aborted before it completes."""
    for turn in range(10):
        queue = nvme.create_queue_pair(1, 64)
        buffers = [nvme.ram.buffer(16 * PAGE) for _ in range(40)]
        commands = [
            nvme.submit_io(queue, nv.READ, NS_FILE if turn % 2 else NS_512, 0, buffer, ring=False)
            for buffer in buffers
        ]
        nvme.ring_sq(queue)
        delete = nvme.submit(nvme.sqs[0], nv.DELETE_SQ, cdw=[1])
        nvme.wait(delete)
        assert delete.status == nv.OK
        nvme.reap(queue.cq)
        finished = [command for command in commands if command.completion]
        assert all(command.status in (nv.OK, nv.ABORTED_SQ_DELETION) for command in finished)
        del nvme.sqs[1], queue.cq.sqs[1]
        nvme.delete_cq(queue.cq)
        for buffer in buffers:
            nvme.ram.free_buffer(buffer)


# --- interrupts


def test_queue_without_interrupts(nvme: Nvme) -> None:
    queue = nvme.create_queue_pair(1, 16, vector=-1)
    for turn in range(40):
        nvme.write(queue, NS_512, turn, pattern(turn, 512))
    for vector in range(1, len(nvme.eventfds)):
        assert not nvme.drain(vector), f"vector {vector} fired"


def test_completion_queues_that_share_a_vector(nvme: Nvme) -> None:
    if len(nvme.eventfds) == 1:
        pytest.skip("there is one vector")
    first, second = nvme.create_queue_pair(1, 16, vector=3), nvme.create_queue_pair(2, 16, vector=3)
    for _ in range(20):
        for queue in (first, second):
            assert nvme.flush(queue, NS_512) == nv.OK
    if not nvme.interrupts[3]:  # every completion was seen first
        assert select.select([nvme.eventfds[3]], [], [], nv.DEADLINE_S)[0]
        nvme.drain(3)
    assert nvme.interrupts[3] > 0
    for vector in (1, 2, 4):
        assert not nvme.drain(vector)


def test_every_queue_uses_its_vector(nvme: Nvme) -> None:
    if len(nvme.eventfds) == 1:
        pytest.skip("there is one vector")
    vectors = [(1, 7), (2, 1), (3, 64), (4, 2)]
    queues = [nvme.create_queue_pair(qid, 8, vector=vector) for qid, vector in vectors]
    for queue, (_, vector) in zip(queues, vectors):
        before = nvme.interrupts[vector]
        assert nvme.flush(queue, NS_512) == nv.OK
        if nvme.interrupts[vector] == before:  # its completion was seen first
            assert select.select([nvme.eventfds[vector]], [], [], nv.DEADLINE_S)[0]
        nvme.drain(vector)
        assert nvme.interrupts[vector] > before
    fired = {vector for vector, count in enumerate(nvme.interrupts) if count}
    assert fired <= {0, 7, 1, 64, 2}


# --- resets


@pytest.mark.parametrize("how", ["enable", "device"])
@pytest.mark.parametrize("shadow", [False, True])
def test_reset_in_the_middle_of_io(connect: Connect, how: str, shadow: bool) -> None:
    """After RDY = 0 no buffer of a dropped command changes; each block of the medium is old or new."""
    nvme = connect()
    nvme.enable()
    for turn, nsid in itertools.product(range(4), (NS_512, NS_FILE)):
        if shadow:
            nvme.enable_shadow_doorbells_if_offered()
        queue = nvme.create_queue_pair(1, 64)
        old = pattern(turn, 512)
        for lba in range(31):
            nvme.write(queue, nsid, lba, old)
        reads = [nvme.ram.buffer(32 * PAGE) for _ in range(31)]
        new = nvme.ram.buffer(512)
        new.fill(pattern(turn + 1000, 512))
        for lba, buffer in enumerate(reads):
            nvme.submit_io(queue, nv.WRITE, nsid, lba, new, ring=False)
            nvme.submit_io(queue, nv.READ, nsid, 0, buffer, ring=False)
        nvme.ring_sq(queue)
        if how == "device":
            nvme.device_reset()
        else:
            nvme.disable()
        for buffer in reads:
            buffer.fill(bytes([FILLER]) * len(buffer))
        nvme.enable()
        queue = nvme.create_queue_pair(1, 64)
        for lba in range(31):
            assert nvme.read(queue, nsid, lba, 512) in (old, pattern(turn + 1000, 512))
        for buffer in reads:
            assert buffer.bytes() == bytes([FILLER]) * len(buffer), "a dropped command wrote host memory"
            nvme.ram.free_buffer(buffer)
        nvme.disable()
        nvme.enable()


def test_shutdown_in_the_middle_of_io(connect: Connect) -> None:
    for kind in (1, 2):
        nvme = connect()
        nvme.enable()
        queue = nvme.create_queue_pair(1, 64)
        buffers = [nvme.ram.buffer(PAGE) for _ in range(40)]
        for lba, buffer in enumerate(buffers):
            nvme.submit_io(queue, nv.WRITE, NS_512, lba * 8, buffer, ring=False)
        nvme.ring_sq(queue)
        nvme.shutdown(kind)
        nvme.enable()
        queue = nvme.create_queue_pair(1, 64)
        nvme.write(queue, NS_512, 0, pattern(kind, PAGE))
        assert nvme.read(queue, NS_512, 0, PAGE) == pattern(kind, PAGE)
        nvme.close()


def test_data_survives_reconnection(connect: Connect) -> None:
    for turn in range(3):
        nvme = connect()
        nvme.enable()
        queue = nvme.create_queue_pair(1, 8)
        for nsid in STORING:
            block = BLOCK[nsid]
            if turn:
                assert nvme.read(queue, nsid, 77, block, block=block) == pattern(turn - 1, block)
            nvme.write(queue, nsid, 77, pattern(turn, block), block=block)
        nvme.close()
