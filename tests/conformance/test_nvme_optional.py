"""Optional commands, driven without a VM: Write Uncorrectable, Verify, Copy, Get LBA Status, Keep Alive, write cache.

Section numbers are of the NVM Command Set Specification 1.0 unless another is named.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import nvme_driver as nv
from tests.support.daemon import NS_4K, NS_512, NS_FILE, NS_NULL, NULL_BYTES, STANDARD_BYTES, Daemon, RpcError
from tests.support.nvme_driver import PAGE, GuestRam, Nvme, SubmissionQueue

BLOCK = {NS_512: 512, NS_4K: 4096, NS_NULL: 512, NS_FILE: 512}
BLOCKS = {nsid: (NULL_BYTES if nsid == NS_NULL else STANDARD_BYTES) // block for nsid, block in BLOCK.items()}
STORING = [NS_512, NS_4K, NS_FILE]
EVERY = [NS_512, NS_4K, NS_NULL, NS_FILE]
LBA_STATUS_LOG, ERROR_LOG, SMART_LOG = 0x0E, 0x01, 0x02
KATO, WRITE_CACHE, ASYNC_EVENT = 0x0F, 0x06, 0x0B

Connect = Callable[..., Nvme]


def pattern(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def read_status(nvme: Nvme, queue: SubmissionQueue, nsid: int, slba: int, blocks: int) -> int:
    buffer = nvme.ram.buffer(blocks * BLOCK[nsid])
    status = nvme.io(queue, nv.READ, nsid, slba, buffer, block=BLOCK[nsid])
    nvme.ram.free_buffer(buffer)
    return status


def write_blocks(nvme: Nvme, queue: SubmissionQueue, nsid: int, slba: int, blocks: int) -> None:
    nvme.write(queue, nsid, slba, bytes(blocks * BLOCK[nsid]), block=BLOCK[nsid])


@pytest.fixture(scope="module")
def daemon(socket_dir: Path) -> Iterator[Daemon]:
    """Workers are killed faster than a crash loop is allowed to be."""
    with Daemon(socket_dir, args=["--crash-limit", "0"]) as daemon:
        yield daemon


@pytest.fixture
def queue(nvme: Nvme) -> SubmissionQueue:
    nvme.enable_shadow_doorbells()
    return nvme.create_queue_pair(1, 64)


@pytest.fixture
def clean(nvme: Nvme, queue: SubmissionQueue) -> Iterator[None]:
    """No block is marked afterwards."""
    yield
    for nsid in EVERY:
        for start, blocks, _ in nvme.lba_status(nsid, 0)[1]:
            for at in range(start, start + blocks, 65536):
                assert nvme.write_zeroes(queue, nsid, at, min(65536, start + blocks - at)) == nv.OK


# --- Write Uncorrectable (3.2.7)


@pytest.mark.parametrize("nsid", EVERY)
def test_write_uncorrectable(nvme: Nvme, queue: SubmissionQueue, clean: None, nsid: int) -> None:
    data = pattern(nsid, 16 * BLOCK[nsid])
    nvme.write(queue, nsid, 96, data, block=BLOCK[nsid])
    media = int.from_bytes(nvme.get_log(SMART_LOG, 512, nsid=nsid)[160:176], "little")
    assert nvme.blocks(queue, nv.WRITE_UNCORRECTABLE, nsid, 100, 3) == nv.OK
    for slba, blocks in ((100, 1), (102, 1), (96, 16), (99, 2), (102, 4)):
        assert read_status(nvme, queue, nsid, slba, blocks) == nv.UNRECOVERED_READ_ERROR
        assert nvme.compare(queue, nsid, slba, bytes(blocks * BLOCK[nsid]), block=BLOCK[nsid]) == 0x281
        assert nvme.blocks(queue, nv.VERIFY, nsid, slba, blocks) == nv.UNRECOVERED_READ_ERROR
        assert nvme.copy(queue, nsid, 1000, [(slba, blocks)]).status == nv.UNRECOVERED_READ_ERROR
    assert (read_status(nvme, queue, nsid, 96, 4), read_status(nvme, queue, nsid, 103, 9)) == (nv.OK, nv.OK)
    after = int.from_bytes(nvme.get_log(SMART_LOG, 512, nsid=nsid)[160:176], "little")
    assert after - media == 20, "Media and Data Integrity Errors"
    # A write, however it is made, brings them back one by one.
    write_blocks(nvme, queue, nsid, 101, 1)
    assert [read_status(nvme, queue, nsid, slba, 1) for slba in (100, 101, 102)] == [0x281, 0, 0x281]
    assert nvme.write_zeroes(queue, nsid, 100, 1) == nv.OK
    assert nvme.copy(queue, nsid, 102, [(96, 1)]).status == nv.OK
    assert read_status(nvme, queue, nsid, 96, 16) == nv.OK
    if nsid != NS_NULL:
        block = BLOCK[nsid]
        expected = data[: 4 * block] + bytes(2 * block) + data[:block] + data[7 * block :]
        assert nvme.read(queue, nsid, 96, 16 * block, block=block) == expected


def test_error_log_names_the_first_bad_block(nvme: Nvme, queue: SubmissionQueue, clean: None) -> None:
    """LBA of an error log entry: the first that experienced the error (Base figure 206)."""
    assert nvme.blocks(queue, nv.WRITE_UNCORRECTABLE, NS_512, 5005, 2) == nv.OK
    assert read_status(nvme, queue, NS_512, 5000, 16) == nv.UNRECOVERED_READ_ERROR
    entry = nvme.get_log(ERROR_LOG, 64)
    _, sqid, _, status, _, lba, nsid = struct.unpack_from("<QHHHHQI", entry)
    assert (sqid, status >> 1 & 0x7FF, lba, nsid) == (queue.qid, nv.UNRECOVERED_READ_ERROR, 5005, NS_512)


@pytest.mark.parametrize("nsid", EVERY)
def test_blocks_stay_uncorrectable(
    daemon: Daemon, nvme: Nvme, connect: Connect, queue: SubmissionQueue, clean: None, nsid: int
) -> None:
    """Over a worker's death, a reset, and another connection; and what was written again stays readable."""
    assert nvme.blocks(queue, nv.WRITE_UNCORRECTABLE, nsid, 7, 4) == nv.OK
    daemon.kill_worker()
    assert read_status(nvme, queue, nsid, 8, 1) == nv.UNRECOVERED_READ_ERROR
    write_blocks(nvme, queue, nsid, 8, 1)
    daemon.kill_worker()
    assert [read_status(nvme, queue, nsid, slba, 1) for slba in range(6, 12)] == [0, 0x281, 0, 0x281, 0x281, 0]
    nvme.enable()
    queue = nvme.create_queue_pair(1, 64)
    assert [read_status(nvme, queue, nsid, slba, 1) for slba in range(6, 12)] == [0, 0x281, 0, 0x281, 0x281, 0]
    for start, blocks in ((7, 1), (9, 2)):
        write_blocks(nvme, queue, nsid, start, blocks)
    assert read_status(nvme, queue, nsid, 0, 16) == nv.OK


@pytest.mark.parametrize("nsid", EVERY)
def test_largest_write_uncorrectable(nvme: Nvme, queue: SubmissionQueue, clean: None, nsid: int) -> None:
    """No limit is reported (WUSL 0): 65536 blocks, or as many as there are."""
    assert nvme.identify(6)[2] == 0
    count = min(65536, BLOCKS[nsid])
    assert nvme.blocks(queue, nv.WRITE_UNCORRECTABLE, nsid, BLOCKS[nsid] - count, count) == nv.OK
    assert nvme.lba_status(nsid, 0) == (2, [(BLOCKS[nsid] - count, count, 3)])
    assert nvme.blocks(queue, nv.VERIFY, nsid, BLOCKS[nsid] - count, count) == nv.UNRECOVERED_READ_ERROR


@pytest.mark.parametrize("opcode", [nv.WRITE_UNCORRECTABLE, nv.VERIFY])
@pytest.mark.parametrize("nsid", EVERY)
def test_blocks_out_of_range(nvme: Nvme, queue: SubmissionQueue, opcode: int, nsid: int) -> None:
    last = BLOCKS[nsid] - 1
    for slba, blocks in ((last + 1, 1), (last, 2), (1 << 63, 1), (2**64 - 1, 1), (2**64 - 1, 2)):
        assert nvme.blocks(queue, opcode, nsid, slba, blocks) == nv.LBA_OUT_OF_RANGE
    assert nvme.blocks(queue, opcode, 0, 0, 1) == nv.INVALID_NAMESPACE
    assert nvme.blocks(queue, opcode, 8, 0, 1) == nv.INVALID_FIELD, "inactive"
    assert nvme.blocks(queue, opcode, 9, 0, 1) == nv.INVALID_NAMESPACE
    assert nvme.execute(queue, opcode, nsid=nsid, flags=1).status == nv.INVALID_FIELD, "fused"
    assert nvme.lba_status(nsid, 0)[1] == []


# --- Verify (3.2.5)


@pytest.mark.parametrize("nsid", EVERY)
def test_verify(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    for slba, blocks in ((0, 1), (3, 100), (BLOCKS[nsid] - 8192, 8192)):
        assert nvme.blocks(queue, nv.VERIFY, nsid, slba, blocks) == nv.OK
    cdw = [0, 0, 1 << 29]
    assert nvme.execute(queue, nv.VERIFY, nsid=nsid, cdw=cdw).status == nv.INVALID_FIELD, "PRACT"


def test_verify_reads_the_file(daemon: Daemon, connect: Connect) -> None:
    """A file that has lost its end: the blocks that are gone cannot be verified, the others can."""
    path = daemon.directory / "short.img"
    path.write_bytes(bytes(1 << 20))
    daemon.rpc("bdev_aio_create", {"filename": str(path), "name": "short", "block_size": 512})
    target = daemon.add_subsystem("nqn.2026-11.internal.test:short", ["short"])
    nvme = connect(target.path)
    nvme.enable()
    queue = nvme.create_queue_pair(1, 8)
    assert nvme.blocks(queue, nv.VERIFY, 1, 0, 2048) == nv.OK
    os.truncate(path, 512 << 10)
    assert nvme.blocks(queue, nv.VERIFY, 1, 0, 1024) == nv.OK
    assert nvme.blocks(queue, nv.VERIFY, 1, 1000, 25) == nv.UNRECOVERED_READ_ERROR
    completion = nvme.copy(queue, 1, 0, [(10, 2), (1020, 8), (4, 1)])
    assert (completion.status, completion.dw0) == (nv.UNRECOVERED_READ_ERROR, 1), "the range that was not copied"


# --- Copy (3.2.2)


def limits(nvme: Nvme, nsid: int) -> tuple[int, int, int]:
    """MSSRL, MCL, MSRC as numbers of blocks, blocks, ranges (figure 97)."""
    data = nvme.identify(0, nsid)
    return *struct.unpack_from("<HI", data, 74), data[80] + 1  # type: ignore[return-value]


@pytest.mark.parametrize("fua", [False, True])
@pytest.mark.parametrize("nsid", STORING)
def test_copy(nvme: Nvme, queue: SubmissionQueue, nsid: int, fua: bool) -> None:
    block = BLOCK[nsid]
    data = pattern(nsid, 32 * block)
    nvme.write(queue, nsid, 200, data, block=block)
    write_blocks(nvme, queue, nsid, 3000, 16)
    assert nvme.copy(queue, nsid, 3001, [(203, 2), (231, 1), (200, 7)], fua=fua).status == nv.OK
    wanted = [203, 204, 231, *range(200, 207)]
    copied = b"".join(data[(n - 200) * block : (n - 199) * block] for n in wanted)
    found = nvme.read(queue, nsid, 3000, 16 * block, block=block)
    assert found == bytes(block) + copied + bytes(5 * block)
    assert nvme.read(queue, nsid, 200, 32 * block, block=block) == data


@pytest.mark.parametrize("nsid", EVERY)
def test_copy_up_to_its_limits(nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    longest, most, ranges = limits(nvme, nsid)
    assert nvme.identify(1)[534] == 1, "OCFS: format 0h only"
    parts = most // longest
    assert nvme.copy(queue, nsid, 4096, [(0, longest)] * parts).status == nv.OK
    assert nvme.copy(queue, nsid, 4096, [(n, 1) for n in range(ranges)]).status == nv.OK
    for bad in ([(0, longest + 1)], [(0, longest)] * parts + [(0, 1)], [(0, 1)] * (ranges + 1)):
        assert nvme.copy(queue, nsid, 4096, bad).status == nv.SIZE_LIMIT_EXCEEDED
    for descriptor_format in range(1, 16):
        completion = nvme.copy(queue, nsid, 4096, [(0, 1)], descriptor_format=descriptor_format)
        assert (completion.status, completion.dnr) == (nv.INVALID_FIELD, True)
    last = BLOCKS[nsid] - 1
    for target, source in (
        (last + 1, (0, 1)),
        (last, (0, 2)),
        (0, (last, 2)),
        (2**64 - 1, (0, 1)),
        (0, (1 << 63, 1)),
    ):
        completion = nvme.copy(queue, nsid, target, [source])
        assert (completion.status, completion.dw0) == (nv.LBA_OUT_OF_RANGE, 0)
    hole = nvme.ram.windows[0][0] + nvme.ram.windows[0][2]
    assert nvme.execute(queue, nv.COPY, nsid=nsid, prp1=hole, cdw=[0, 0, 0]).status == nv.DATA_TRANSFER_ERROR
    assert nvme.execute(queue, nv.COPY, nsid=nsid, prp1=hole + 2, cdw=[0, 0, 0]).status == nv.PRP_OFFSET_INVALID


@pytest.mark.parametrize("nsid", STORING)
def test_copies_are_whole_over_deaths(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue, nsid: int) -> None:
    """Each of many copies in flight is made once or again, with the same result."""
    block = BLOCK[nsid]
    data = pattern(17, 64 * block)
    nvme.write(queue, nsid, 0, data, block=block)
    buffer = nvme.ram.buffer(32)
    buffer.fill(struct.pack("<8xQH14x", 0, 63))
    for turn in range(3):
        commands = []
        for n in range(20):
            cdw = [1000 + 64 * n, 0, 0]
            commands.append(nvme.submit(queue, nv.COPY, nsid=nsid, prp1=buffer.iova, cdw=cdw))
        daemon.kill_worker()
        nvme.wait(*commands)
        assert all(one.status == nv.OK for one in commands), turn
        for n in range(20):
            assert nvme.read(queue, nsid, 1000 + 64 * n, 64 * block, block=block) == data


# --- atomic writes (2.1.4)


@pytest.mark.parametrize("then", ["reset", "nothing"])
def test_writes_are_whole_over_deaths(then: str) -> None:
    """NAWUPF of the memory namespace: 256 KiB. The worker dies in such a write, which is then dropped, or not."""
    directory = Path(tempfile.mkdtemp(prefix="dpu-k-"))
    ram, pages = GuestRam(8 << 20), 64
    try:
        with Daemon(directory, env={"DPU_EMU_KILL_AT": "segment_written:30"}) as daemon:
            path, first = daemon.standard_target().path, daemon.worker_pid()
            nvme = Nvme(path, ram, vectors=4)
            nvme.enable()
            identity = nvme.identify(0, NS_512)
            assert (
                identity[24] & 2 and int.from_bytes(identity[36:38], "little") + 1 == pages * PAGE // 512
            )  # 0's based
            queue = nvme.create_queue_pair(1, 8)
            base = ram.alloc(2 * pages * PAGE)  # every other page, so that there is a segment for each
            places = [base + 2 * PAGE * n for n in range(pages)]
            for n, place in enumerate(places):
                ram.view(place, PAGE)[:] = bytes([n + 1]) * PAGE
            prp1, prp2, lists = nvme.prps_of_pages(places[0], places[1:])
            cdw = [0, 0, pages * PAGE // 512 - 1]
            command = nvme.submit(queue, nv.WRITE, nsid=NS_512, prp1=prp1, prp2=prp2, cdw=cdw, pages=lists)
            if then == "nothing":
                nvme.wait(command)
                assert command.status == nv.OK
            else:
                nvme.enable()
            assert daemon.worker_pid() != first, "the worker has not died"
            if then != "nothing":
                queue = nvme.create_queue_pair(1, 8)
            found = nvme.read(queue, NS_512, 0, pages * PAGE)
            assert found in (bytes(pages * PAGE), b"".join(bytes([n + 1]) * PAGE for n in range(pages)))
            nvme.close()
    finally:
        ram.close()
        shutil.rmtree(directory, ignore_errors=True)


# --- Get LBA Status, LBA Status Information (4.2.1, 4.1.4.5)


def test_lba_status_in_pieces(nvme: Nvme, queue: SubmissionQueue, clean: None) -> None:
    for lba in range(0, 40, 4):
        assert nvme.blocks(queue, nv.WRITE_UNCORRECTABLE, NS_4K, lba, 2) == nv.OK
    found, at, turns = [], 0, 0
    while True:
        condition, some = nvme.lba_status(NS_4K, at, action=0x10, room=3)
        found += some
        turns += 1
        if condition == 2:
            break
        assert condition == 1 and len(some) == 3
        at = some[-1][0] + some[-1][1]
    assert found == [(lba, 2, 3) for lba in range(0, 40, 4)] and turns == 4
    write_blocks(nvme, queue, NS_4K, 0, 20)
    assert nvme.lba_status(NS_4K, 0, 25) == (2, [(20, 2, 3), (24, 1, 3)]), "a written block is no longer listed"
    assert nvme.lba_status(NS_512, 0) == (2, [])


def test_alert_and_log(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue, clean: None) -> None:
    nvme.set_feature(ASYNC_EVENT, 1 << 13)
    event = nvme.aer()
    assert nvme.blocks(queue, nv.WRITE_UNCORRECTABLE, NS_FILE, 64, 8) == nv.OK
    nvme.wait(event)
    assert (event.status, event.completion and event.completion.dw0) == (nv.OK, 0x0E0502)
    log = nvme.get_log(LBA_STATUS_LOG, 48, rae=1)
    assert struct.unpack_from("<III", log) == (48, 1, 8)
    assert struct.unpack_from("<IIB7xQI", log, 16) == (NS_FILE, 1, 0x11, 64, 7)
    daemon.kill_worker()
    assert nvme.get_log(LBA_STATUS_LOG, 48) == log


# --- Keep Alive (Base 5.18: optional on PCIe, KAS 0: not supported)


def test_keep_alive_is_not_supported(nvme: Nvme) -> None:
    assert nvme.identify(1)[320:322] == bytes(2)
    completion = nvme.try_admin(nv.KEEP_ALIVE)
    assert (completion.status, completion.dnr) == (nv.INVALID_OPCODE, True)
    for opcode in (nv.GET_FEATURES, nv.SET_FEATURES):
        assert nvme.try_admin(opcode, cdw=[KATO, 5000]).status == nv.INVALID_FIELD


# --- Volatile Write Cache (Base 5.27.1.4)


def test_write_cache_off(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue) -> None:
    """It stays off over a worker's death, until a reset. test_asic_files looks at what is asked of a file."""
    assert nvme.identify(1)[525] & 1, "there is one"
    assert nvme.get_feature(WRITE_CACHE) == 1
    nvme.set_feature(WRITE_CACHE, 0)
    daemon.kill_worker()
    assert nvme.get_feature(WRITE_CACHE) == 0
    for nsid in STORING:
        nvme.write(queue, nsid, 11, pattern(nsid, PAGE), block=BLOCK[nsid])
        assert nvme.read(queue, nsid, 11, PAGE, block=BLOCK[nsid]) == pattern(nsid, PAGE)
        assert nvme.write_zeroes(queue, nsid, 11, 1) == nv.OK
        assert nvme.flush(queue, nsid) == nv.OK
    nvme.enable()
    assert nvme.get_feature(WRITE_CACHE) == 1


# --- the trace (ours: dpu_trace_start, dpu_trace_stop, dpu_trace_save)


def test_trace_of_a_load(daemon: Daemon, nvme: Nvme, queue: SubmissionQueue, tmp_path: Path) -> None:
    """Every command of a known load, with the reason for each that left the asic, in both files."""
    daemon.rpc("dpu_trace_start", {"entries": 1000})
    for nsid in EVERY:
        nvme.write(queue, nsid, 5, bytes(PAGE), block=BLOCK[nsid])
        read_status(nvme, queue, nsid, 5, 1)
    nvme.identify(1)
    assert nvme.compare(queue, NS_FILE, 5, bytes(512)) == nv.OK
    daemon.rpc("dpu_trace_stop")
    nvme.flush(queue, NS_512)
    assert daemon.rpc("dpu_trace_save", {"filename": str(tmp_path / "t.txt")}) == {"commands": 10, "lost": 0}
    lines = [line for line in (tmp_path / "t.txt").read_text().splitlines() if not line.startswith("#")]
    told = [(parts[0].rsplit(" ", 1)[1], parts[2]) for parts in (line.split("; ") for line in lines)]
    in_file = "the data is in a file"
    assert told == [
        *[("Write", "-"), ("Read", "-")] * 3,
        ("Write", in_file),
        ("Read", in_file),
        ("Identify", "admin command"),
        ("Compare", "needs a buffer for a file's data"),
    ]
    daemon.rpc("dpu_trace_save", {"filename": str(tmp_path / "t.json"), "format": "perfetto"})
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert next(event["args"]["name"] for event in events if event["ph"] == "M").startswith("nqn.")
    assert sum(event["ph"] == "b" and "args" in event for event in events) == 10
    assert (tmp_path / "t.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(RpcError, match="-2"):
        daemon.rpc("dpu_trace_save", {"filename": str(tmp_path / "no" / "t.json")})
    with pytest.raises(RpcError):
        daemon.rpc("dpu_trace_start", {"entries": 0})
