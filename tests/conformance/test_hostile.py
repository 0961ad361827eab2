"""A hostile guest and a hostile client: every test ends with a living daemon and another guest without an error.

Nothing may be written outside the DMA mappings (canaries around them) or into memory that was unmapped.
Run with the compiled fast path, and (marked slow) with the same source without the JIT.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import nvme_driver as nv
from tests.support import vfio_user_client as vu
from tests.support.daemon import NS_512, NS_FILE, STANDARD_BYTES, Daemon, Target
from tests.support.nvme_driver import PAGE, GuestRam, Nvme, SubmissionQueue
from tests.support.vfio_user_client import VfioUserClient, VfioUserError
from tests.support.witness import Witness

Connect = Callable[..., Nvme]
BAD_ADDRESS = {nv.DATA_TRANSFER_ERROR, nv.INVALID_FIELD, nv.PRP_OFFSET_INVALID}


@pytest.fixture(scope="module", params=["jit", pytest.param("nojit", marks=pytest.mark.slow)])
def daemon(socket_dir: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    directory = socket_dir / request.param
    directory.mkdir()
    # A pass over a flood takes seconds in plain Python on a busy machine: that is no hung worker.
    env, args = ({"NUMBA_DISABLE_JIT": "1"}, ["--watchdog", "30"]) if request.param == "nojit" else ({}, [])
    with Daemon(directory, env=env, args=args) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def other_guest(daemon: Daemon) -> Iterator[Witness]:
    witness = Witness(daemon)
    yield witness
    witness.close()


@pytest.fixture(autouse=True)
def nobody_else_is_hurt(daemon: Daemon, target: Target, other_guest: Witness) -> Iterator[Witness]:
    """Before and after each test: same keeper, same worker, and the other guest verifies its data."""
    worker = daemon.worker_pid()
    yield other_guest
    other_guest.check()
    assert daemon.alive()
    assert daemon.worker_pid() == worker, "the worker died"


def recovers(nvme: Nvme) -> None:
    """Whatever state the controller is in, a reset makes it whole."""
    nvme.enable()
    queue = nvme.create_queue_pair(1, 16)
    data = os.urandom(3 * PAGE)
    nvme.write(queue, NS_512, 4, data)
    assert nvme.read(queue, NS_512, 4, len(data)) == data


def lba_cdw(slba: int, blocks: int) -> list[int]:
    return [slba & 0xFFFFFFFF, slba >> 32, blocks - 1]


# --- PRPs


def test_lists_that_loop_or_lead_nowhere(nvme: Nvme) -> None:
    """The walk is bounded by the transfer, so a list that points to itself ends as an error or a transfer."""
    nvme.enable_shadow_doorbells()
    queue = nvme.create_queue_pair(1, 64)
    hole = nvme.ram.windows[0][0] + nvme.ram.windows[0][2]
    base, table = nvme.ram.alloc(PAGE), nvme.ram.alloc(2 * PAGE)
    entries = nvme.ram.view(table, 2 * PAGE).cast("Q")
    count = 64  # pages: 256 KiB
    for opcode in (nv.READ, nv.WRITE, nv.COMPARE):
        for link in (table, table + PAGE, table + 4088, table + 4, hole, 0, 2**64 - 8, 2**64 - PAGE, base):
            for slot in range(1024):
                entries[slot] = base
            start = 512 - count // 2  # the list begins in the middle of a page and must be followed by its link
            entries[511] = link
            completion = nvme.execute(
                queue, opcode, nsid=NS_512, prp1=base, prp2=table + 8 * start, cdw=lba_cdw(0, count * 8)
            )
            assert completion.status in BAD_ADDRESS | {nv.OK, nv.COMPARE_FAILURE}, f"link {link:#x}"
            if link in (hole, 0, 2**64 - PAGE):
                assert completion.status in BAD_ADDRESS


def test_data_that_crosses_the_end_of_a_mapping(nvme: Nvme, queue: SubmissionQueue) -> None:
    """Both ends of both windows, by one byte's worth of a dword and by a block."""
    for iova, _, size in nvme.ram.windows:
        for prp1 in (iova - 4, iova - 512, iova - PAGE, iova + size, iova + size + 4):
            for opcode in (nv.READ, nv.WRITE, nv.COMPARE):
                completion = nvme.execute(queue, opcode, nsid=NS_512, prp1=prp1, prp2=iova, cdw=lba_cdw(0, 1))
                assert completion.status in BAD_ADDRESS, f"{opcode:#x} at {prp1:#x}"
        last = iova + size - 4
        completion = nvme.execute(queue, nv.READ, nsid=NS_512, prp1=last, prp2=iova + size, cdw=lba_cdw(0, 1))
        assert completion.status in BAD_ADDRESS


@pytest.mark.parametrize("seed", range(3))
def test_random_io_commands(nvme: Nvme, seed: int) -> None:
    """Random bytes as commands; addresses lean to the edges of mappings. Each completes exactly once."""
    nvme.enable_shadow_doorbells()
    queue = nvme.create_queue_pair(1, 128)
    rng = random.Random(seed)
    scratch = nvme.ram.alloc(1 << 20)
    nvme.ram.view(scratch, 1 << 20)[:] = rng.randbytes(1 << 20)
    edges = [edge for iova, _, size in nvme.ram.windows for edge in (iova, iova + size)]

    def address() -> int:
        kind = rng.randrange(6)
        if kind == 0:
            return rng.getrandbits(64)
        if kind == 1:
            return rng.choice(edges) - rng.choice((0, 4, 512, PAGE)) if rng.random() < 0.5 else rng.getrandbits(40)
        if kind == 2:
            return rng.choice((0, 4, 2**64 - 1, 2**64 - PAGE, 1 << 63, (1 << 63) - PAGE))
        return scratch + rng.randrange(0, (1 << 20) - PAGE) // 4 * 4

    def safe(value: int) -> int:
        # only scratch may be written: keep out of rings and shadow pages
        inside = any(base <= value < base + length for base, _, length in nvme.ram.windows)
        return scratch if inside and not scratch <= value < scratch + (1 << 20) - 2 * PAGE else value

    lists = nvme.ram.view(scratch, 1 << 20).cast("Q")
    for slot in range(0, len(lists), 3):
        lists[slot] = safe(address() & ~(PAGE - 1) & (2**64 - 1))
    for _ in range(600):
        opcode = rng.choice((nv.READ, nv.COMPARE, nv.WRITE_ZEROES, nv.FLUSH, nv.DSM, nv.WRITE, rng.randrange(256)))
        blocks = rng.choice((1, 8, 64, 512, 513, 65536))
        cdw = [rng.choice((0, 5, 131071, rng.getrandbits(32))), rng.choice((0, 0, rng.getrandbits(32)))]
        cdw += [blocks - 1 | rng.choice((0, rng.getrandbits(32) & 0xFFFF0000)), *(rng.getrandbits(32) for _ in "abc")]
        if opcode == nv.READ:  # list entries are random bytes too: what they reach is bounded by the canaries
            cdw[2] = cdw[2] & 0xFFFF0000
        nvme.submit(
            queue,
            opcode,
            nsid=rng.choice((1, 1, 1, 3, 4, 0, 99, 2**32 - 1)),
            prp1=safe(address()),
            prp2=safe(address() & ~(PAGE - 1) & (2**64 - 1)),
            cdw=cdw,
            flags=rng.choice((0, 0, 0, rng.randrange(256))),
        )
    nvme.wait_until(queue.cq, lambda: not queue.outstanding, "all commands")
    recovers(nvme)


@pytest.mark.parametrize("seed", range(3))
def test_random_admin_commands(connect: Connect, seed: int) -> None:
    nvme = connect(ram=GuestRam(8 << 20, second=0))
    nvme.enable()
    rng = random.Random(seed)
    scratch = nvme.ram.alloc(1 << 20)
    for _ in range(400):
        opcode = rng.choice((nv.IDENTIFY, nv.GET_LOG, nv.SET_FEATURES, nv.GET_FEATURES, rng.randrange(256)))
        if opcode in (nv.AER, nv.CREATE_CQ):  # one is parked for ever; the other's completions would be strangers
            continue
        small = [rng.choice((0, 1, 2, 3, 7, 0xFFFF, rng.getrandbits(16))) for _ in range(6)]
        nvme.execute(
            nvme.sqs[0],
            opcode,
            nsid=rng.choice((0, 1, 2, 2**32 - 1, rng.getrandbits(32))),
            prp1=rng.choice((scratch + rng.randrange(1 << 19), rng.getrandbits(64), 0, 2**64 - PAGE)),
            prp2=rng.choice((scratch + (1 << 19), scratch + (1 << 19) + 8, rng.getrandbits(64) | 1 << 60, 0)),
            cdw=[word | rng.choice((0, 0, rng.getrandbits(16) << 16)) for word in small],
            flags=rng.choice((0, 0, 0, rng.randrange(256))),
        )
    nvme.shadow = nvme.event_idx = None
    recovers(nvme)


# --- doorbells and registers


def test_doorbells_out_of_range_or_of_dead_queues(nvme: Nvme) -> None:
    queue = nvme.create_queue_pair(1, 8)
    dead = nvme.create_queue_pair(2, 8)
    nvme.delete_sq(dead)
    nvme.delete_cq(dead.cq)
    rng = random.Random(5)
    for index in (4, 5, 6, 7, 128, 129, 130, 500, 1023):
        for value in (0, 1, 7, 8, 0xFFFF, 0x10000, 0xFFFFFFFF):
            nvme.doorbell(index, value)
    for _ in range(300):
        offset = 0x1000 + rng.randrange(0x3000)
        if 0x1000 <= offset < 0x1010:
            continue
        nvme.client.post_region_write(vu.BAR0, offset, rng.randbytes(rng.choice((1, 2, 3, 4, 8, 64))))
    assert nvme.flush(queue, NS_512) == nv.OK, "a live queue is not disturbed"
    for value in (8, 9, 0xFFFF, 0xFFFFFFFF):
        nvme.doorbell(2, value)
        nvme.doorbell(3, value)
    recovers(nvme)


@pytest.mark.parametrize("shadow", [False, True])
def test_invalid_doorbell_values_start_nothing(nvme: Nvme, shadow: bool) -> None:
    """An invalid tail fetches no entry, an invalid head makes no room in a full completion queue."""
    if shadow:
        nvme.enable_shadow_doorbells()
    cq = nvme.create_cq(1, 4)
    queue = nvme.create_sq(1, 64, cq)
    other = nvme.create_queue_pair(2, 16)

    def ring(index: int, value: int) -> bytes:
        """What the completion queue holds when the device has seen the value."""
        if nvme.shadow is not None:
            nvme.shadow[index] = value
        nvme.doorbell(index, value)
        for _ in range(10):
            assert nvme.flush(other, NS_512) == nv.OK
        return bytes(nvme.ram.view(cq.iova, 4 * 16))

    for value in (64, 65, 0xFFFF, 0x10000, 0xFFFFFFFF):
        assert ring(2, value) == bytes(64), f"tail {value:#x} was taken"
    commands = [nvme.submit(queue, nv.FLUSH, nsid=NS_512, ring=False) for _ in range(20)]
    full = ring(2, 20)
    assert sum(full[16 * slot + 14] & 1 for slot in range(4)) == 3
    for value in (4, 5, 0xFFFF, 0x10000, 0xFFFFFFFF):
        assert ring(3, value) == full, f"head {value:#x} made room"
    ring(3, 0)
    queue.tail_rung = 20
    nvme.wait(*commands)
    assert {command.status for command in commands} == {nv.OK}


def test_posted_writes_that_are_no_doorbells(nvme: Nvme) -> None:
    """Messages of a doorbell's size and shape but of another region, count or offset do what they say, or nothing."""
    queue = nvme.create_queue_pair(1, 8)
    other = nvme.create_queue_pair(2, 8)
    command = nvme.submit(queue, nv.FLUSH, nsid=NS_512, ring=False)
    value = struct.pack("<I", 1)
    for region, offset, count in ((4, 0x1008, 4), (7, 0x1008, 4), (9, 0x1008, 4), (0, 0x1008, 8), (0, 0x1008, 0)):
        body = vu.REGION_ACCESS.pack(offset, region, count) + value
        nvme.client.send(vu.REGION_WRITE, body, flags=vu.FLAG_NO_REPLY)
    for offset in (2**64 - 8, 2**63 + 0x1008, 0x1008 - 2**32 + 2**64):
        nvme.client.post_region_write(vu.BAR0, offset, value)
    assert nvme.read32(nv.INTMS) == 0
    nvme.client.post_region_write(vu.BAR0, nv.INTMS, value)
    assert nvme.read32(nv.INTMS) == 1, "a posted write of a register"
    nvme.client.post_region_write(vu.BAR0, nv.INTMC, value)
    assert nvme.read32(nv.INTMS) == 0
    for _ in range(10):
        assert nvme.flush(other, NS_512) == nv.OK
    assert not nvme.reap(queue.cq), "a message that is no doorbell of the queue rang it"
    nvme.ring_sq(queue)
    nvme.wait(command)


def test_tail_ahead_of_what_was_written(nvme: Nvme) -> None:
    """The device executes stale entries; it answers each and neither crashes nor runs beyond the tail."""
    queue = nvme.create_queue_pair(1, 64)
    nvme.doorbell(2, 63)
    for _ in range(63):
        completion = None
        deadline = 1000
        while completion is None and deadline:
            completion = queue.cq.poll()
            nvme.read32(nv.CSTS)
            deadline -= 1
        assert completion is not None
        assert completion.status == nv.INVALID_NAMESPACE, "a zeroed entry is Flush of namespace 0"
    assert queue.cq.poll() is None
    recovers(nvme)


def test_head_ahead_of_what_was_posted(nvme: Nvme) -> None:
    queue = nvme.create_queue_pair(1, 8)
    assert nvme.flush(queue, NS_512) == nv.OK
    for value in (5, 7, 0, 3):
        nvme.doorbell(3, value)
    with contextlib.suppress(AssertionError):
        nvme.deadline_s = 1
        nvme.flush(queue, NS_512)
    nvme.deadline_s = nv.DEADLINE_S
    recovers(nvme)


def test_shadow_doorbells_with_garbage(nvme: Nvme) -> None:
    nvme.enable_shadow_doorbells()
    nvme.create_queue_pair(1, 8)
    assert nvme.shadow is not None and nvme.event_idx is not None
    rng = random.Random(3)
    for _ in range(50):
        for index in range(1024):
            nvme.shadow[index] = rng.choice((0, 7, 8, 0xFFFF, 0xFFFFFFFF, rng.getrandbits(32)))
            nvme.event_idx[index] = rng.getrandbits(32)
        nvme.doorbell(2, rng.randrange(8))
        nvme.doorbell(3, rng.randrange(8))
        nvme.read32(nv.CSTS)
    recovers(nvme)


def test_random_register_writes(connect: Connect) -> None:
    nvme = connect()
    rng = random.Random(9)
    for _ in range(300):
        offset = rng.choice((nv.CC, nv.AQA, nv.ASQ, nv.ACQ, nv.ASQ + 4, nv.NSSR, rng.randrange(0, 0x1000, 4)))
        data = rng.choice((bytes(4), b"\xff" * 4, rng.randbytes(4), struct.pack("<I", nv.CC_ENABLE)))
        nvme.client.region_write(vu.BAR0, offset, data)
        nvme.read32(nv.CSTS)
    nvme.device_reset()
    recovers(nvme)


# --- memory that changes

FLIPPER = """
import mmap, struct, sys
fd, size, at = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
values = [int(word, 16) for word in sys.argv[4:]]
words = memoryview(mmap.mmap(fd, size)).cast("Q")
print("ready", flush=True)
while True:
    for value in values:
        words[at // 8] = value
"""


@contextlib.contextmanager
def flipping(ram: GuestRam, iova: int, values: list[int]) -> Iterator[None]:
    """Another process stores `values` in turn into the 8 bytes at `iova`, as fast as it can."""
    command = [sys.executable, "-c", FLIPPER, str(ram.fd), str(ram.total), str(ram.offset_of(iova))]
    process = subprocess.Popen(
        [*command, *(f"{value:x}" for value in values)], pass_fds=[ram.fd], stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("field", ["prp1", "prp2", "length", "entry"])
def test_commands_that_change_while_they_are_fetched(nvme: Nvme, field: str) -> None:
    """Double fetch: a checked value must be the one that is used."""
    queue = nvme.create_queue_pair(1, 2)
    hole = nvme.ram.windows[0][0] + nvme.ram.windows[0][2]
    top = 2**64 - PAGE
    base, table = nvme.ram.alloc(4 * PAGE), nvme.ram.alloc(PAGE)
    entries = nvme.ram.view(table, PAGE).cast("Q")
    for slot in range(512):
        entries[slot] = base + PAGE
    where, values = {
        "prp1": (queue.iova + 24, [base, hole, top, base + 3]),
        "prp2": (queue.iova + 32, [table, hole, top, table + 4]),
        "length": (queue.iova + 48, [7, 0xFFFF, 0, 511]),
        "entry": (table + 8, [base, hole, top, base + 9]),
    }[field]
    # The flipped word is in both slots' place alternately; slot 0 is used by every second command.
    with flipping(nvme.ram, where, values):
        for _ in range(1500):
            completion = nvme.execute(queue, nv.READ, nsid=NS_512, prp1=base, prp2=table, cdw=lba_cdw(0, 24), cid=1)
            assert completion.status in BAD_ADDRESS | {nv.OK}
    nvme.ram.check_canaries()
    recovers(nvme)


@pytest.mark.parametrize("nsid", [NS_512, NS_FILE])
def test_memory_unmapped_under_commands(nvme: Nvme, nsid: int) -> None:
    """When DMA_UNMAP is answered, the device has let go of that memory for good."""
    nvme.enable_shadow_doorbells()
    queue = nvme.create_queue_pair(1, 64)
    iova, offset, size = nvme.ram.windows[1]
    pages = size // PAGE
    for turn in range(12):
        commands = [
            nvme.submit(
                queue,
                nv.READ if turn % 3 else nv.WRITE,
                nsid=nsid,
                prp1=iova + (n * 3 % (pages - 2)) * PAGE,
                prp2=iova + (n * 3 % (pages - 2) + 1) * PAGE,
                cdw=lba_cdw(n * 16, 16),
                ring=False,
            )
            for n in range(63)
        ]
        nvme.ring_sq(queue)
        nvme.client.dma_unmap(iova, size)
        window = nvme.ram.memory[offset : offset + size]
        window[:] = b"\x77" * size
        nvme.wait(*commands)
        assert {command.status for command in commands} <= BAD_ADDRESS | {nv.OK}
        completion = nvme.execute(queue, nv.READ, nsid=nsid, prp1=iova, cdw=lba_cdw(0, 1))
        assert completion.status in BAD_ADDRESS
        assert bytes(window) == b"\x77" * size, "unmapped memory was written"
        nvme.client.dma_map(iova, size, nvme.ram.fd, offset=offset)
        assert nvme.execute(queue, nv.READ, nsid=nsid, prp1=iova, cdw=lba_cdw(0, 1)).status == nv.OK


def test_all_memory_unmapped_and_mapped_while_queues_live(nvme: Nvme) -> None:
    """SeaBIOS does this; queues work on afterwards."""
    nvme.enable_shadow_doorbells()
    queue = nvme.create_queue_pair(1, 16)
    for turn in range(40):
        data = os.urandom(PAGE)
        nvme.write(queue, NS_512, turn * 8, data)
        for iova, _, size in nvme.ram.windows:
            nvme.client.dma_unmap(iova, size)
        for iova, offset, size in nvme.ram.windows:
            nvme.client.dma_map(iova, size, nvme.ram.fd, offset=offset)
        assert nvme.read(queue, NS_512, turn * 8, PAGE) == data
        assert nvme.identify(1)


def test_doorbell_while_the_queue_memory_is_unmapped(nvme: Nvme) -> None:
    queue = nvme.create_queue_pair(1, 16)
    iova, offset, size = nvme.ram.windows[0]
    nvme.submit(queue, nv.FLUSH, nsid=NS_512, ring=False)
    nvme.client.dma_unmap(iova, size)
    nvme.ring_sq(queue)
    nvme.doorbell(0, (nvme.sqs[0].tail + 1) % 32)
    nvme.read32(nv.CSTS)
    nvme.client.dma_map(iova, size, nvme.ram.fd, offset=offset)
    recovers(nvme)


def test_mapping_that_ends_within_a_page(nvme: Nvme) -> None:
    """What lies behind the end of a mapping in the same page of the file stays untouched and unread."""
    queue = nvme.create_queue_pair(1, 16)
    first, second = nvme.ram.windows
    iova, offset, _ = second
    length = 8 * PAGE - 2048
    nvme.client.dma_unmap(iova, second[2])
    try:
        nvme.client.dma_map(iova, length, nvme.ram.fd, offset=offset)
    except VfioUserError:
        return  # whole pages only: fine too
    behind = nvme.ram.memory[offset + length : offset + length + PAGE]
    behind[:] = b"\x99" * PAGE
    last = iova + 7 * PAGE
    elsewhere = nvme.ram.alloc(PAGE)

    def status(opcode: int, prp1: int, prp2: int, blocks: int) -> int:
        cdw = lba_cdw(0, blocks)
        return nvme.execute(queue, opcode, nsid=NS_512, prp1=prp1, prp2=prp2, cdw=cdw).status

    for before in (first[0], iova):  # the look-up remembers where it was last
        for opcode in (nv.READ, nv.WRITE, nv.COMPARE):
            assert status(nv.READ, elsewhere if before == first[0] else iova, 0, 8) == nv.OK
            assert status(opcode, last, 0, 8) in BAD_ADDRESS, "a page of data"
            assert status(opcode, elsewhere, last, 16) in BAD_ADDRESS, "the second page of data"
            assert status(opcode, elsewhere, last, 24) in BAD_ADDRESS, "a list"
            assert status(opcode, last + 2048, 0, 1) in BAD_ADDRESS, "a block behind the end"
        assert status(nv.READ, last, 0, 4) == nv.OK
    for create, entries in ((nv.CREATE_SQ, 64), (nv.CREATE_CQ, 256)):
        completion = nvme.try_admin(create, prp1=last, cdw=[2 | (entries - 1) << 16, 1 | 1 << 16])
        assert completion.status in BAD_ADDRESS, "a queue that ends outside"
    assert bytes(behind) == b"\x99" * PAGE


def test_memory_moved_to_another_place_in_the_file(nvme: Nvme) -> None:
    """After a new map of the same address the old pages are not touched."""
    queue = nvme.create_queue_pair(1, 16)
    iova, offset, size = nvme.ram.windows[1]
    half = size // 2
    nvme.write(queue, NS_512, 0, os.urandom(PAGE))
    nvme.client.dma_unmap(iova, size)
    nvme.client.dma_map(iova, half, nvme.ram.fd, offset=offset + half)
    nvme.ram.memory[offset : offset + size] = b"\x33" * size
    assert nvme.execute(queue, nv.READ, nsid=NS_512, prp1=iova, cdw=lba_cdw(0, 8)).status == nv.OK
    assert bytes(nvme.ram.memory[offset : offset + half]) == b"\x33" * half
    assert bytes(nvme.ram.memory[offset + half : offset + half + PAGE]) == nvme.read(queue, NS_512, 0, PAGE)
    status = nvme.execute(queue, nv.READ, nsid=NS_512, prp1=iova + half, cdw=lba_cdw(0, 1)).status
    assert status in BAD_ADDRESS


def test_read_only_and_write_only_mappings(nvme: Nvme) -> None:
    """DMA_MAP flags: 1 the device may read, 2 it may write."""
    queue = nvme.create_queue_pair(1, 16)
    iova, offset, size = nvme.ram.windows[1]
    nvme.client.dma_unmap(iova, size)
    for flags, allowed in ((1, nv.WRITE), (2, nv.READ)):
        nvme.client.dma_map(iova, size, nvme.ram.fd, offset=offset, flags=flags)
        for opcode in (nv.READ, nv.WRITE):
            status = nvme.execute(queue, opcode, nsid=NS_512, prp1=iova, cdw=lba_cdw(0, 1)).status
            assert (status == nv.OK) == (opcode == allowed), f"flags {flags} opcode {opcode}: {status:#x}"
        nvme.client.dma_unmap(iova, size)


def small_memory(size: int) -> int:
    fd = os.memfd_create("more-ram", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def test_memory_that_is_mapped_for_reading_first(nvme: Nvme) -> None:
    """One file behind a read-only mapping and then behind a writable one."""
    queue = nvme.create_queue_pair(1, 16)
    fd = small_memory(1 << 20)
    try:
        nvme.client.dma_map(0x9000_0000, 1 << 19, fd, flags=1)
        nvme.client.dma_map(0xA000_0000, 1 << 19, fd, offset=1 << 19, flags=3)
        for iova, expected in ((0xA000_0000, {nv.OK}), (0x9000_0000, BAD_ADDRESS)):
            assert nvme.execute(queue, nv.READ, nsid=NS_512, prp1=iova, cdw=lba_cdw(0, 8)).status in expected
    finally:
        os.close(fd)


def test_memory_that_grows(nvme: Nvme) -> None:
    """A file that was mapped grows, and what is new is mapped too."""
    queue = nvme.create_queue_pair(1, 16)
    fd = small_memory(1 << 20)
    try:
        nvme.client.dma_map(0x9000_0000, 1 << 20, fd)
        os.ftruncate(fd, 64 << 20)
        nvme.write(queue, NS_512, 0, b"\x42" * PAGE)
        with contextlib.suppress(VfioUserError):
            nvme.client.dma_map(0xA000_0000, 32 << 20, fd, offset=32 << 20)
            for iova in (0xA000_0000, 0xA000_0000 + (32 << 20) - PAGE):
                assert nvme.execute(queue, nv.READ, nsid=NS_512, prp1=iova, cdw=lba_cdw(0, 8)).status == nv.OK
            assert os.pread(fd, PAGE, 32 << 20) == b"\x42" * PAGE == os.pread(fd, PAGE, (64 << 20) - PAGE)
    finally:
        os.close(fd)


def test_unsealed_memory_that_is_truncated(target: Target) -> None:
    """Memory that can shrink must be refused, or not be touched directly: a SIGBUS would end the worker."""
    ram = GuestRam(1 << 20, sealed=False)
    with VfioUserClient(target.path) as client:
        client.negotiate()
        iova, offset, size = ram.windows[0]
        try:
            client.dma_map(iova, size, ram.fd, offset=offset)
        except VfioUserError as error:
            assert error.errno in (errno.EINVAL, errno.EPERM, errno.ENOTSUP, errno.EACCES)
            return
        finally:
            os.ftruncate(ram.fd, 0)
        asq, acq = iova, iova + PAGE
        writes: list[tuple[int, int]] = [(nv.AQA, 0x000F000F), (nv.ASQ, asq & 0xFFFFFFFF), (nv.ASQ + 4, asq >> 32)]
        writes += [(nv.ACQ, acq & 0xFFFFFFFF), (nv.ACQ + 4, acq >> 32), (nv.CC, nv.CC_ENABLE), (0x1000, 3)]
        for register, value in writes:
            client.send(vu.REGION_WRITE, vu.REGION_ACCESS.pack(register, 0, 4) + struct.pack("<I", value))


def test_descriptors_that_are_no_memory(target: Target) -> None:
    """Each is refused or never touched; a pipe, a socket, a device, a directory, a file, sealed memory."""
    with contextlib.ExitStack() as stack:
        read_end, write_end = os.pipe()
        ours, theirs = socket.socketpair()
        sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(sealed, 1 << 20)
        fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE)
        file = stack.enter_context(tempfile.TemporaryFile())
        file.truncate(1 << 20)
        fds = [read_end, write_end, ours.fileno(), theirs.fileno(), sealed, file.fileno()]
        fds += [os.open(path, os.O_RDONLY) for path in ("/dev/null", "/dev/zero", "/")]
        fds += [os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY), os.eventfd(0)]
        client = stack.enter_context(VfioUserClient(target.path))
        client.negotiate()
        for number, fd in enumerate(fds):
            try:
                client.dma_map(0x10_0000 * (number + 1), 1 << 20, fd)
            except VfioUserError:
                continue
            assert fd in (sealed, file.fileno()), f"descriptor {number} was taken as memory"
        file.truncate(0)
        assert client.alive()
        for fd in set(fds) - {ours.fileno(), theirs.fileno(), file.fileno()}:
            os.close(fd)
        ours.close()
        theirs.close()


@pytest.mark.parametrize("kind", ["pipe", "saturated", "null"])
def test_interrupt_descriptors_that_block(connect: Connect, nobody_else_is_hurt: Witness, kind: str) -> None:
    """Firing an interrupt must never stop the device: a full pipe, an eventfd at its limit."""
    nvme = connect(vectors=2)
    nvme.enable()
    keep: list[int] = []
    if kind == "pipe":
        keep = list(os.pipe())
        os.set_blocking(keep[1], False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(keep[1], bytes(4096))
        os.set_blocking(keep[1], True)
        fd = keep[1]
    elif kind == "saturated":
        keep = [os.eventfd(0, os.EFD_CLOEXEC)]
        fd = keep[0]
        os.eventfd_write(fd, 0xFFFFFFFFFFFFFFFE)
    else:
        keep = [os.open("/dev/null", os.O_RDWR)]
        fd = keep[0]
    with contextlib.suppress(VfioUserError):
        nvme.client.set_irqs(vu.MSIX_INDEX, 1, [fd])
    queue = nvme.create_queue_pair(1, 16, vector=1)
    queue.cq.eventfd = -1
    for _ in range(20):
        nvme.flush(queue, NS_512)
    nobody_else_is_hurt.check()
    for fd in keep:
        os.close(fd)


# --- messages


def some_messages() -> dict[str, bytes]:
    """Valid messages of each kind, without descriptors."""

    def message(command: int, payload: bytes, flags: int = 0) -> bytes:
        return vu.HEADER.pack(7, command, vu.HEADER.size + len(payload), flags, 0) + payload

    return {
        "dma_map": message(vu.DMA_MAP, vu.DMA_MAP_BODY.pack(32, 3, 0, 0x1000, 0x1000)),
        "dma_unmap": message(vu.DMA_UNMAP, vu.DMA_UNMAP_BODY.pack(24, 0, 0x1000, 0x1000)),
        "region_info": message(vu.REGION_INFO, vu.REGION_INFO_BODY.pack(32, 0, 0, 0, 0, 0)),
        "set_irqs": message(vu.SET_IRQS, vu.SET_IRQS_BODY.pack(20, 0x21, 2, 0, 0)),
        "region_read": message(vu.REGION_READ, vu.REGION_ACCESS.pack(0, 0, 8)),
        "region_write": message(vu.REGION_WRITE, vu.REGION_ACCESS.pack(0x24, 0, 4) + bytes(4)),
        "doorbell": message(vu.REGION_WRITE, vu.REGION_ACCESS.pack(0x1000, 0, 4) + bytes(4), vu.FLAG_NO_REPLY),
        "reset": message(vu.DEVICE_RESET, b""),
    }


@pytest.mark.parametrize("name", some_messages())
def test_messages_cut_off_at_every_length(target: Target, name: str) -> None:
    """The client dies in the middle of a message."""
    message = some_messages()[name]
    for length in range(len(message) + 1):
        with VfioUserClient(target.path) as client:
            client.negotiate()
            client.send_raw(message[:length]) if length else None


@pytest.mark.parametrize("name", some_messages())
def test_messages_of_every_wrong_size(target: Target, name: str) -> None:
    """A payload shorter or longer than the command wants, the header saying so truthfully."""
    message = some_messages()[name]
    _, command, _, flags, _ = vu.HEADER.unpack_from(message)
    payload = message[vu.HEADER.size :]
    with VfioUserClient(target.path) as client:
        client.negotiate()
        for length in range(len(payload) + 20):
            client.send(command, (payload + bytes(20))[:length], flags=flags)
            if not flags & vu.FLAG_NO_REPLY:
                client.receive()
        assert client.alive(), "the connection survives messages of the wrong size"


def test_half_messages_and_silence(daemon: Daemon, nobody_else_is_hurt: Witness) -> None:
    """Clients that stop in the middle cost nothing and hold nobody up."""
    with contextlib.ExitStack() as stack:
        for number, message in enumerate(some_messages().values()):
            nqn = f"nqn.2026-01.io.test:silent-{number}"
            target = daemon.add_subsystem(nqn, [])
            stack.callback(daemon.rpc, "nvmf_delete_subsystem", {"nqn": nqn})
            client = stack.enter_context(VfioUserClient(target.path))
            client.negotiate()
            client.send_raw(message[: (1, 4, 15, 16, 17, 19)[number % 6] if number < 7 else 10])
        nobody_else_is_hurt.check()


def test_a_message_byte_by_byte(target: Target) -> None:
    with VfioUserClient(target.path) as client:
        client.negotiate()
        for message in (some_messages()["doorbell"], some_messages()["region_read"]):
            for byte in message:
                client.send_raw(bytes([byte]))
        assert client.receive().command == vu.REGION_READ


@pytest.mark.parametrize("size", [0, 1, 15, 16, 1 << 20, (1 << 31) - 1, 1 << 31, 0xFFFFFFFF])
@pytest.mark.parametrize("command", [vu.VERSION, vu.DMA_MAP, vu.REGION_WRITE, 0xFFFF])
def test_sizes_that_lie(target: Target, daemon: Daemon, command: int, size: int) -> None:
    """An errno or the end of the connection; no memory is taken for what is only announced."""

    def memory_kib() -> int:
        assert daemon.process is not None
        total = 0
        for pid in (daemon.process.pid, daemon.worker_pid()):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS"):
                    total += int(line.split()[1])
        return total

    before = memory_kib()
    with VfioUserClient(target.path) as client:
        client.negotiate()
        with contextlib.suppress(ConnectionError, BrokenPipeError):
            client.send(command, bytes(4096), size=size)
            client.sock.settimeout(5)
            for _ in range(500):
                client.sock.sendall(bytes(65536))
    assert memory_kib() < before + 65536, "memory grew with an announced size"


@pytest.mark.parametrize("seed", range(4))
def test_garbage(target: Target, seed: int) -> None:
    """Random bytes, and valid messages with random bytes changed, before and after VERSION."""
    rng = random.Random(seed)
    samples = list(some_messages().values())
    for turn in range(60):
        with VfioUserClient(target.path) as client:
            with contextlib.suppress(ConnectionError, BrokenPipeError):
                if turn % 3:
                    client.negotiate()
                for _ in range(rng.randrange(1, 20)):
                    data = (
                        bytearray(rng.choice(samples))
                        if turn % 2
                        else bytearray(rng.randbytes(rng.randrange(1, 200)))
                    )
                    for _ in range(rng.randrange(4)):
                        data[rng.randrange(len(data))] = rng.randrange(256)
                    client.send_raw(bytes(data))


def test_descriptors_with_everything(target: Target, daemon: Daemon) -> None:
    """Descriptors attached where none belong are closed."""
    assert daemon.process is not None
    spare = os.open("/dev/null", os.O_RDONLY)
    with VfioUserClient(target.path) as client:
        client.negotiate()
        for message in some_messages().values():
            for count in (1, 16, 100, 253):
                with contextlib.suppress(ConnectionError, BrokenPipeError):
                    client.send_raw(message, [spare] * count)
                    if not vu.HEADER.unpack_from(message)[3] & vu.FLAG_NO_REPLY:
                        client.receive()
    os.close(spare)
    with VfioUserClient(target.path) as client:
        client.negotiate()
    for pid in (daemon.process.pid, daemon.worker_pid()):
        links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in listed(pid)]
        assert links.count("/dev/null") < 10, "descriptors of a peer are left open"


def listed(pid: int) -> list[str]:
    return [fd for fd in os.listdir(f"/proc/{pid}/fd") if os.path.lexists(f"/proc/{pid}/fd/{fd}")]


def test_connection_storm(target: Target, nobody_else_is_hurt: Witness) -> None:
    for _ in range(10):
        sockets = []
        for _ in range(50):
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(30)
            with contextlib.suppress(ConnectionError, TimeoutError, BlockingIOError):
                sock.connect(target.path)
            sockets.append(sock)
        for sock in sockets:
            sock.close()
    nobody_else_is_hurt.check()
    served_again(target)


def served_again(target: Target) -> None:
    """A new client is served as soon as the dead ones are gone; until then it may be refused."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with VfioUserClient(target.path) as client:
                client.negotiate()
                assert client.alive()
                return
        except ConnectionError:
            assert time.monotonic() < deadline, "clients are refused for ever"


@pytest.mark.parametrize("name", ["doorbell", "region_read"])
def test_flood_by_a_client_that_never_reads(target: Target, nobody_else_is_hurt: Witness, name: str) -> None:
    """The other guest makes progress while this one fills its socket, its replies unread."""
    message = some_messages()[name] * 64
    with VfioUserClient(target.path) as client:
        client.negotiate()
        stop = threading.Event()

        def flood() -> None:
            client.sock.settimeout(0.05)
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    try:
                        client.sock.send(message)
                    except (ConnectionError, BrokenPipeError, OSError):
                        return

        thread = threading.Thread(target=flood)
        thread.start()
        try:
            nobody_else_is_hurt.check(10)
        finally:
            stop.set()
            thread.join()


def test_client_that_disappears_with_commands_in_flight(connect: Connect) -> None:
    """Its memory is let go: what it writes there afterwards stays."""
    for turn in range(15):
        nvme = connect(ram=GuestRam(8 << 20))
        nvme.enable()
        if turn % 2:
            nvme.enable_shadow_doorbells()
        queue = nvme.create_queue_pair(1, 64)
        buffers = [nvme.ram.buffer(16 * PAGE) for _ in range(63)]
        for lba, buffer in enumerate(buffers):
            nvme.submit_io(queue, nv.READ, NS_FILE if turn % 3 else NS_512, lba * 128, buffer, ring=False)
        nvme.ring_sq(queue)
        nvme.close()


# --- the medium


def test_file_truncated_under_the_daemon(daemon: Daemon, nvme: Nvme) -> None:
    """Reads and writes behind the new end succeed or fail with a status; never SIGBUS."""
    queue = nvme.create_queue_pair(1, 16)
    image = daemon.directory / "disk.img"
    nvme.write(queue, NS_FILE, 0, os.urandom(64 * PAGE))
    os.truncate(image, 10 * PAGE)
    try:
        for lba in (0, 79, 80, 1000, STANDARD_BYTES // 512 - 8):
            for opcode in (nv.READ, nv.WRITE, nv.COMPARE):
                nvme.io(queue, opcode, NS_FILE, lba, nvme.ram.buffer(PAGE))
            nvme.write_zeroes(queue, NS_FILE, lba, 8)
            nvme.dsm(queue, NS_FILE, [(lba, 8)])
        assert nvme.flush(queue, NS_FILE) == nv.OK
    finally:
        os.truncate(image, STANDARD_BYTES)
    data = os.urandom(PAGE)
    nvme.write(queue, NS_FILE, 5000, data)
    assert nvme.read(queue, NS_FILE, 5000, PAGE) == data


def test_guest_memory_with_holes(nvme: Nvme) -> None:
    """A sparse page punched out under the device reads as zeroes (F_SEAL_SHRINK does not forbid it)."""
    queue = nvme.create_queue_pair(1, 16)
    buffer = nvme.ram.buffer(4 * PAGE)
    buffer.fill(os.urandom(4 * PAGE))
    nvme.ram.map.madvise(mmap.MADV_REMOVE, nvme.ram.offset_of(buffer.iova), 4 * PAGE)
    assert nvme.io(queue, nv.WRITE, NS_512, 0, buffer) == nv.OK
    assert nvme.read(queue, NS_512, 0, 4 * PAGE) == bytes(4 * PAGE)
