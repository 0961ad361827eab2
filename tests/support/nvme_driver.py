"""A user-space NVMe driver over vfio-user for tests: an oracle that shares no code with the controller.

Use:
    ram = GuestRam(); nvme = Nvme(socket_path, ram); nvme.enable(); queue = nvme.create_queue_pair(1, 64)
    buffer = ram.buffer(4096); nvme.write(queue, 1, lba, buffer); nvme.close()
Guest RAM is a sealed memfd with canary bytes before, between and behind the mapped windows;
`GuestRam.check_canaries` fails when the device wrote where it was never allowed to.
Every wait is for an interrupt, with a deadline.
A completion for a command that is not outstanding fails at once, so "exactly once" holds in every test.
Source: NVM Express Base 2.0, NVM Command Set 1.0, PCIe transport 1.0; section numbers beside the fields.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import mmap
import os
import select
import struct
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.vfio_user_client import BAR0, CONFIG_REGION, MSI_INDEX, MSIX_INDEX, VfioUserClient

PAGE = 4096
DEADLINE_S = 60.0
CANARY = bytes([0xC5])

# Controller registers (PCIe transport 3.1)
CAP, VS, INTMS, INTMC, CC, CSTS, NSSR, AQA, ASQ, ACQ = (
    0x00,
    0x08,
    0x0C,
    0x10,
    0x14,
    0x1C,
    0x20,
    0x24,
    0x28,
    0x30,
)
DOORBELLS = 0x1000
CC_ENABLE = 1 | 6 << 16 | 4 << 20  # EN, IOSQES 64 bytes, IOCQES 16 bytes
CSTS_RDY, CSTS_CFS = 0x1, 0x2

# Opcodes (Base 5, NVM command set 3)
DELETE_SQ, CREATE_SQ, GET_LOG, DELETE_CQ, CREATE_CQ, IDENTIFY, ABORT = (
    0x00,
    0x01,
    0x02,
    0x04,
    0x05,
    0x06,
    0x08,
)
SET_FEATURES, GET_FEATURES, AER, DBBUF_CONFIG = 0x09, 0x0A, 0x0C, 0x7C
FLUSH, WRITE, READ, COMPARE, WRITE_ZEROES, DSM = 0x00, 0x01, 0x02, 0x05, 0x08, 0x09
WRITE_UNCORRECTABLE, VERIFY, COPY = 0x04, 0x0C, 0x19
KEEP_ALIVE, GET_LBA_STATUS = 0x18, 0x86

# Status: (SCT << 8) | SC (Base 3.3.3.2)
OK, INVALID_OPCODE, INVALID_FIELD, CID_CONFLICT, DATA_TRANSFER_ERROR = 0x000, 0x001, 0x002, 0x003, 0x004
ABORTED_BY_REQUEST, ABORTED_SQ_DELETION, INVALID_NAMESPACE, SEQUENCE_ERROR = 0x007, 0x008, 0x00B, 0x00C
PRP_OFFSET_INVALID, WRITE_PROTECTED, LBA_OUT_OF_RANGE = 0x013, 0x020, 0x080
CQ_INVALID, INVALID_QID, INVALID_QSIZE, AER_LIMIT, INVALID_VECTOR = 0x100, 0x101, 0x102, 0x105, 0x108
INVALID_LOG_PAGE, INVALID_QUEUE_DELETION, NOT_SAVEABLE, NOT_CHANGEABLE = 0x109, 0x10C, 0x10D, 0x10E
SIZE_LIMIT_EXCEEDED, UNRECOVERED_READ_ERROR, COMPARE_FAILURE = 0x183, 0x281, 0x285

SQE = struct.Struct("<BBHIIIQQQIIIIII")  # opcode, flags, CID, NSID, CDW2, CDW3, MPTR, PRP1, PRP2, CDW10..CDW15
CQE = struct.Struct("<IIHHHH")  # DW0, DW1, SQHD, SQID, CID, phase and status

_fence_lock = threading.Lock()


def fence() -> None:
    """A full memory barrier: taking a lock is a locked instruction on x86."""
    with _fence_lock:
        pass


class NvmeError(Exception):
    """A completion with a status other than success."""

    def __init__(self, completion: Completion, what: str) -> None:
        super().__init__(f"{what}: status {completion.status:#05x}")
        self.completion = completion
        self.status = completion.status


@dataclass(frozen=True)
class Completion:
    dw0: int
    sqhd: int
    sqid: int
    cid: int
    status: int  # (SCT << 8) | SC
    more: bool
    dnr: bool


@dataclass(frozen=True)
class Buffer:
    """Contiguous guest memory: `iova` for the device, `view` for us."""

    iova: int
    view: memoryview

    def __len__(self) -> int:
        return len(self.view)

    def fill(self, data: bytes) -> None:
        self.view[: len(data)] = data

    def bytes(self) -> bytes:
        return bytes(self.view)


class GuestRam:
    """A memfd with two mapped windows of `size` and `second` bytes; canaries surround them."""

    GUARD = 512 << 10  # larger than the largest transfer, so that an overrun lands in it

    def __init__(
        self, size: int = 48 << 20, *, iova: int = 0x1_0000_0000, second: int = 1 << 20, sealed: bool = True
    ) -> None:
        self.windows = [(iova, self.GUARD, size)]  # (iova, file offset, bytes)
        if second:
            self.windows.append((iova + size + self.GUARD, size + 2 * self.GUARD, second))
        self.total = size + second + 3 * self.GUARD
        self.fd = os.memfd_create("guest-ram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.total)
        if sealed:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self.map = mmap.mmap(self.fd, self.total)
        self.memory = memoryview(self.map)
        self._guards = self._find_guards()
        for start, end in self._guards:
            self.memory[start:end] = CANARY * (end - start)
        self._free = [(iova, size)]  # sorted extents of the first window

    def _find_guards(self) -> list[tuple[int, int]]:
        at, guards = 0, []
        for _, offset, size in self.windows:
            guards.append((at, offset))
            at = offset + size
        return [*guards, (at, self.total)]

    def check_canaries(self) -> None:
        for start, end in self._guards:
            assert bytes(self.memory[start:end]) == CANARY * (end - start), (
                f"the device wrote outside the mapped windows, in file range {start:#x}-{end:#x}"
            )

    def offset_of(self, iova: int) -> int:
        """File offset of a mapped address. Raises IndexError."""
        for base, offset, size in self.windows:
            if base <= iova < base + size:
                return offset + iova - base
        raise IndexError(f"{iova:#x} is not mapped")

    def view(self, iova: int, length: int) -> memoryview:
        start = self.offset_of(iova)
        self.offset_of(iova + max(length, 1) - 1)
        return self.memory[start : start + length]

    def alloc(self, size: int) -> int:
        """First fit of whole pages; the iova. The pages are zero."""
        size = -(-size // PAGE) * PAGE
        for index, (start, length) in enumerate(self._free):
            if length >= size:
                rest = [(start + size, length - size)] if length > size else []
                self._free[index : index + 1] = rest
                self.view(start, size)[:] = bytes(size)
                return start
        raise MemoryError("guest RAM is used up")

    def free(self, iova: int, size: int) -> None:
        size = -(-size // PAGE) * PAGE
        merged: list[tuple[int, int]] = []
        for start, length in sorted([*self._free, (iova, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def buffer(self, length: int, offset: int = 0) -> Buffer:
        """A buffer of whole pages, or one that begins `offset` bytes into its first page."""
        iova = self.alloc(offset + length) + offset
        return Buffer(iova, self.view(iova, length))

    def free_buffer(self, buffer: Buffer) -> None:
        start = buffer.iova - buffer.iova % PAGE
        self.free(start, buffer.iova + len(buffer) - start)

    def dma_access(self, iova: int, count: int, data: bytes | None) -> bytes:
        """Serve a DMA_READ (data None) or DMA_WRITE message. Raises IndexError."""
        view = self.view(iova, count)
        if data is None:
            return bytes(view)
        view[:] = data
        return b""

    def close(self) -> None:
        os.close(self.fd)


@dataclass
class Command:
    """One submitted command; `completion` is filled in when it is reaped, exactly once."""

    queue: SubmissionQueue
    cid: int
    sqe: bytes
    pages: list[int] = field(default_factory=list)  # PRP list pages to give back
    completion: Completion | None = None

    @property
    def status(self) -> int:
        assert self.completion is not None, "command is outstanding"
        return self.completion.status


def _is_done(command: Command) -> bool:
    return command.completion is not None


class CompletionQueue:
    """A completion queue in guest RAM; `eventfd` is -1 for a polled one."""

    def __init__(self, ram: GuestRam, qid: int, entries: int, vector: int, eventfd: int) -> None:
        self.ram, self.qid, self.entries, self.vector, self.eventfd = ram, qid, entries, vector, eventfd
        self.iova = ram.alloc(entries * CQE.size)
        self.words = ram.view(self.iova, entries * CQE.size).cast("I")
        self.head, self.phase = 0, 1
        self.head_rung = 0
        self.sqs: dict[int, SubmissionQueue] = {}

    def poll(self) -> Completion | None:
        """Consume the entry at the head if it is new. Its phase word is loaded first."""
        at = self.head * 4
        last = self.words[at + 3]
        if (last >> 16) & 1 != self.phase:
            return None
        word2 = self.words[at + 2]
        status = last >> 17
        completion = Completion(
            dw0=self.words[at],
            sqhd=word2 & 0xFFFF,
            sqid=word2 >> 16,
            cid=last & 0xFFFF,
            status=status & 0x7FF,
            more=bool(status & 0x2000),
            dnr=bool(status & 0x4000),
        )
        self.head += 1
        if self.head == self.entries:
            self.head, self.phase = 0, self.phase ^ 1
        return completion


class SubmissionQueue:
    def __init__(self, ram: GuestRam, qid: int, entries: int, cq: CompletionQueue) -> None:
        self.ram, self.qid, self.entries, self.cq = ram, qid, entries, cq
        self.iova = ram.alloc(entries * SQE.size)
        self.ring = ram.view(self.iova, entries * SQE.size)
        self.tail = self.head = 0  # head as last told by SQHD
        self.tail_rung = 0
        self.outstanding: dict[int, Command] = {}
        self._next_cid = 0
        self.completed = 0

    def space(self) -> int:
        return (self.head - self.tail - 1) % self.entries

    def next_cid(self) -> int:
        while self._next_cid in self.outstanding:
            self._next_cid = (self._next_cid + 1) & 0xFFFF
        cid = self._next_cid
        self._next_cid = (self._next_cid + 1) & 0xFFFF
        if self._next_cid == 0xFFFF:  # reserved: "not for a particular command" in the error log
            self._next_cid = 0
        return cid


class Nvme:
    """One controller: connection, registers, admin queue, I/O queues.

    `register_bytes` is 4 (QEMU splits 64-bit registers) or 8; `vectors`: how many (MSI-X, else MSI) are armed.
    `capabilities`: None for QEMU's VERSION message, {} for the bare one of SPDK's initiator. A doorbell page that the
    server lets us map is mapped and used. Without `shared` the server does not get our memory, and asks for parts
    of it by messages.
    """

    def __init__(
        self,
        path: str,
        ram: GuestRam,
        *,
        vectors: int = 65,
        register_bytes: int = 4,
        capabilities: dict[str, object] | None = None,
        shared: bool = True,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self.ram, self.register_bytes, self.deadline_s = ram, register_bytes, deadline_s
        self.client = VfioUserClient(path, deadline_s=deadline_s)
        self.client.dma_access = ram.dma_access
        self.client.negotiate(capabilities)
        self.client.device_info()
        self.regions = [self.client.region_info(index) for index in range(9)]
        self.doorbells = self._map_doorbells()
        for window in ram.windows:
            self.client.dma_map(window[0], window[2], ram.fd if shared else None, offset=window[1])
        available = self.client.irq_info(MSIX_INDEX)[1]
        self.irq_index = MSIX_INDEX if available else MSI_INDEX
        if not available:
            available = self.client.irq_info(MSI_INDEX)[1]
        self.eventfds = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(min(vectors, available))]
        self.interrupts = [0] * len(self.eventfds)
        if self.eventfds:
            self.client.set_irqs(self.irq_index, 0, self.eventfds)
        self._enable_bus_master()
        self.sqs: dict[int, SubmissionQueue] = {}
        self.cqs: dict[int, CompletionQueue] = {}
        self.shadow: memoryview | None = None
        self.event_idx: memoryview | None = None
        self.doorbell_writes = 0
        self.stale = 0  # commands given up by a controller reset

    # --- PCI and registers
    def _map_doorbells(self) -> memoryview | None:
        """The doorbells as words of shared memory, where BAR0 can be mapped (sparse-mmap capability)."""
        bar0 = self.regions[BAR0]
        for offset, size in bar0.windows:
            if offset <= DOORBELLS < offset + size:
                page = mmap.mmap(bar0.fds[0], size, offset=bar0.offset + offset)
                return memoryview(page)[DOORBELLS - offset :].cast("I")
        return None

    def _enable_bus_master(self) -> None:
        command = struct.unpack("<H", self.client.region_read(CONFIG_REGION, 4, 2))[0]
        self.client.region_write(CONFIG_REGION, 4, struct.pack("<H", command | 0x406))
        position = self.find_capability(0x11)
        if position and self.eventfds:
            control = struct.unpack("<H", self.client.region_read(CONFIG_REGION, position + 2, 2))[0]
            control = (control | 0x8000) & ~0x4000
            self.client.region_write(CONFIG_REGION, position + 2, struct.pack("<H", control))
        position = self.find_capability(0x05)
        if position and self.eventfds:
            self.client.region_write(CONFIG_REGION, position + 2, struct.pack("<H", 1))  # MSI Enable, one vector

    def find_capability(self, wanted: int) -> int:
        """Offset of a PCI capability, 0 if absent."""
        position = self.client.region_read(CONFIG_REGION, 0x34, 1)[0]
        for _ in range(48):
            if position < 0x40:
                return 0
            kind, following = self.client.region_read(CONFIG_REGION, position, 2)
            if kind == wanted:
                return position
            position = following
        raise AssertionError("the capability list does not end")

    def read32(self, offset: int) -> int:
        return int.from_bytes(self.client.region_read(BAR0, offset, 4), "little")

    def write32(self, offset: int, value: int) -> None:
        self.client.region_write(BAR0, offset, value.to_bytes(4, "little"))

    def read64(self, offset: int) -> int:
        if self.register_bytes == 8:
            return int.from_bytes(self.client.region_read(BAR0, offset, 8), "little")
        return self.read32(offset) | self.read32(offset + 4) << 32

    def write64(self, offset: int, value: int) -> None:
        if self.register_bytes == 8:
            self.client.region_write(BAR0, offset, value.to_bytes(8, "little"))
        else:
            self.write32(offset, value & 0xFFFFFFFF)
            self.write32(offset + 4, value >> 32)

    def wait_csts(self, mask: int, value: int) -> int:
        """Read CSTS until `CSTS & mask == value`; each read is a round trip to the server."""
        deadline = time.monotonic() + self.deadline_s
        while True:
            csts = self.read32(CSTS)
            if csts & mask == value:
                return csts
            assert time.monotonic() < deadline, f"CSTS is {csts:#x}, wanted {value:#x} under mask {mask:#x}"

    # --- life cycle
    def enable(self, entries: int = 32) -> None:
        """Disable, set up the admin queue and enable (Base 3.5.1)."""
        self.disable()
        cq = CompletionQueue(self.ram, 0, entries, 0, self.eventfds[0] if self.eventfds else -1)
        sq = SubmissionQueue(self.ram, 0, entries, cq)
        cq.sqs[0] = sq
        self.write32(AQA, (entries - 1) << 16 | (entries - 1))
        self.write64(ASQ, sq.iova)
        self.write64(ACQ, cq.iova)
        self.cqs, self.sqs = {0: cq}, {0: sq}
        self.write32(CC, CC_ENABLE)
        self.wait_csts(CSTS_RDY | CSTS_CFS, CSTS_RDY)

    def disable(self) -> None:
        """CC.EN = 0 and wait for RDY = 0; whatever was outstanding is given up."""
        self.write32(CC, self.read32(CC) & ~0xC001)  # EN and SHN
        self.wait_csts(CSTS_RDY, 0)
        self.drop_queues()

    def device_reset(self) -> None:
        """vfio-user DEVICE_RESET, then what a driver sets up again in PCI space."""
        self.client.reset()
        self.wait_csts(CSTS_RDY, 0)
        self.drop_queues()
        if self.eventfds:
            self.client.set_irqs(self.irq_index, 0, self.eventfds)
        self._enable_bus_master()

    def drop_queues(self) -> None:
        """Forget every queue after a reset; commands outstanding will never be completed."""
        for sq in self.sqs.values():
            self.stale += len(sq.outstanding)
            for command in sq.outstanding.values():
                self._free_pages(command)
            self.ram.free(sq.iova, sq.entries * SQE.size)
        for cq in self.cqs.values():
            self.ram.free(cq.iova, cq.entries * CQE.size)
        self.sqs, self.cqs = {}, {}
        self.shadow = self.event_idx = None
        for vector in range(len(self.eventfds)):
            self.drain(vector)

    def shutdown(self, kind: int = 1) -> None:
        """CC.SHN normal (1) or abrupt (2), until CSTS.SHST says complete (Base 3.6.1)."""
        self.write32(CC, self.read32(CC) & ~0xC000 | kind << 14)
        self.wait_csts(0xC, 0x8)

    def close(self) -> None:
        self.client.close()
        for fd in self.eventfds:
            os.close(fd)
        self.eventfds = []
        for region in self.regions:
            for fd in region.fds:
                os.close(fd)
        self.regions = []

    # --- doorbells
    def doorbell(self, index: int, value: int) -> None:
        """Write doorbell number `index` (2 y: SQ y tail, 2 y + 1: CQ y head): mapped, or a posted 4-byte write."""
        self.doorbell_writes += 1
        if self.doorbells is not None:
            fence()  # queue entries before the doorbell
            self.doorbells[index] = value
            return
        self.client.post_region_write(BAR0, DOORBELLS + 4 * index, value.to_bytes(4, "little"))

    def _ring(self, index: int, old: int, new: int) -> None:
        """Shadow doorbell with event index (Base 5.8, annex B.5), or the register where shadow is off."""
        if self.shadow is not None and self.event_idx is not None and index >= 2:
            fence()  # queue entries before the shadow value
            self.shadow[index] = new
            fence()  # the shadow value before the event index is looked at
            event = self.event_idx[index]
            if (new - event - 1) & 0xFFFF >= (new - old) & 0xFFFF:
                return
        self.doorbell(index, new)

    def ring_sq(self, sq: SubmissionQueue) -> None:
        if sq.tail != sq.tail_rung:
            old, sq.tail_rung = sq.tail_rung, sq.tail
            self._ring(2 * sq.qid, old, sq.tail)

    def ring_cq(self, cq: CompletionQueue) -> None:
        if cq.head != cq.head_rung:
            old, cq.head_rung = cq.head_rung, cq.head
            self._ring(2 * cq.qid + 1, old, cq.head)

    def enable_shadow_doorbells(self) -> None:
        """Doorbell Buffer Config; must come before the I/O queues are used."""
        shadow, event_idx = self.ram.alloc(PAGE), self.ram.alloc(PAGE)
        self.admin(DBBUF_CONFIG, prp1=shadow, prp2=event_idx)
        self.shadow = self.ram.view(shadow, PAGE).cast("I")
        self.event_idx = self.ram.view(event_idx, PAGE).cast("I")

    def enable_shadow_doorbells_if_offered(self) -> None:
        """As Linux does: OACS bit 8 of Identify Controller."""
        if self.identify(1)[257] & 1:
            self.enable_shadow_doorbells()

    # --- commands
    def submit(
        self,
        sq: SubmissionQueue,
        opcode: int,
        *,
        nsid: int = 0,
        prp1: int = 0,
        prp2: int = 0,
        cdw: Sequence[int] = (),
        flags: int = 0,
        cid: int | None = None,
        pages: Iterable[int] = (),
        ring: bool = True,
    ) -> Command:
        """Put one command (`cdw` begins at CDW10) on a queue; waits for room while the queue is full."""
        self.wait_until(sq.cq, lambda: sq.space() > 0, "room in the submission queue")
        cid = sq.next_cid() if cid is None else cid
        dwords = [*cdw, 0, 0, 0, 0, 0, 0][:6]
        raw = SQE.pack(opcode, flags, cid, nsid, 0, 0, 0, prp1, prp2, *dwords)
        command = Command(sq, cid, raw, list(pages))
        sq.outstanding[cid] = command
        sq.ring[sq.tail * 64 : sq.tail * 64 + 64] = raw
        sq.tail = (sq.tail + 1) % sq.entries
        if ring:
            self.ring_sq(sq)
        return command

    def reap(self, cq: CompletionQueue, limit: int = 1 << 30) -> list[Command]:
        """Take every completion there is, give its slot back and return the commands completed."""
        done: list[Command] = []
        while len(done) < limit:
            completion = cq.poll()
            if completion is None:
                break
            sq = cq.sqs.get(completion.sqid)
            assert sq is not None, f"completion names submission queue {completion.sqid}: {completion}"
            command = sq.outstanding.pop(completion.cid, None)
            assert command is not None, f"completion of a command that is not outstanding: {completion}"
            assert completion.sqhd < sq.entries, f"SQHD beyond the queue: {completion}"
            consumed = (completion.sqhd - sq.head) % sq.entries
            assert consumed <= (sq.tail_rung - sq.head) % sq.entries, f"SQHD passed the tail: {completion}"
            sq.head = completion.sqhd
            sq.completed += 1
            command.completion = completion
            self._free_pages(command)
            done.append(command)
        if done:
            self.ring_cq(cq)
        return done

    def _free_pages(self, command: Command) -> None:
        for page in command.pages:
            self.ram.free(page, PAGE)
        command.pages = []

    def drain(self, vector: int) -> bool:
        """Take what an interrupt vector has counted; whether it had fired."""
        with contextlib.suppress(BlockingIOError):
            self.interrupts[vector] += os.eventfd_read(self.eventfds[vector])
            return True
        return False

    def wait_until(self, cq: CompletionQueue, done: Callable[[], bool], what: str) -> None:
        """Reap `cq` until `done()` holds, sleeping on its eventfd. AssertionError at the deadline."""
        deadline = time.monotonic() + self.deadline_s
        while not done():
            if self.reap(cq):
                continue
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"no progress on completion queue {cq.qid} while waiting for {what}"
            if cq.eventfd < 0:
                self.read32(CSTS)  # a round trip to the server instead of spinning
                continue
            poll = select.poll()
            poll.register(cq.eventfd, select.POLLIN)
            poll.register(self.client.sock, select.POLLIN)
            fired = [fd for fd, _ in poll.poll(min(remaining, 10) * 1000)]
            if self.client.sock.fileno() in fired:
                self.client.serve_one()
            if cq.eventfd in fired:
                self.drain(cq.vector)
            elif not fired:
                poll.unregister(self.client.sock)
                lost = (cq.words[cq.head * 4 + 3] >> 16) & 1 == cq.phase and not poll.poll(10_000)
                assert not lost, f"completion on queue {cq.qid} without an interrupt on vector {cq.vector}"

    def wait(self, *commands: Command) -> list[Completion]:
        """Wait for these commands; their completions in the order given."""
        for command in commands:
            self.wait_until(
                command.queue.cq,
                functools.partial(_is_done, command),
                f"command {command.cid} of queue {command.queue.qid}, opcode {command.sqe[0]:#x}",
            )
        return [command.completion for command in commands if command.completion is not None]

    def execute(self, sq: SubmissionQueue, opcode: int, **fields: Any) -> Completion:
        """Submit one command and wait; the completion whatever its status."""
        return self.wait(self.submit(sq, opcode, **fields))[0]

    def try_admin(self, opcode: int, **fields: Any) -> Completion:
        return self.execute(self.sqs[0], opcode, **fields)

    def admin(self, opcode: int, **fields: Any) -> Completion:
        """An admin command that must succeed. Raises NvmeError."""
        completion = self.try_admin(opcode, **fields)
        if completion.status != OK:
            raise NvmeError(completion, f"admin command {opcode:#x}")
        return completion

    # --- PRPs (Base 4.1.1)
    def prps(self, iova: int, length: int) -> tuple[int, int, list[int]]:
        """PRP1, PRP2 and the list pages allocated, for contiguous memory."""
        first = PAGE - iova % PAGE
        pages = range(iova + first, iova + length, PAGE) if length > first else range(0)
        return self.prps_of_pages(iova, list(pages))

    def prps_of_pages(self, prp1: int, pages: Sequence[int], list_offset: int = 0) -> tuple[int, int, list[int]]:
        """PRP1, PRP2 for data in `prp1`, then `pages`; the first list begins `list_offset` into its page."""
        if not pages:
            return prp1, 0, []
        if len(pages) == 1:
            return prp1, pages[0], []
        lists: list[int] = []
        prp2 = 0
        rest, at, link = list(pages), list_offset, None
        while rest:
            page = self.ram.alloc(PAGE)
            lists.append(page)
            entries = self.ram.view(page, PAGE).cast("Q")
            if link is None:
                prp2 = page + at
            else:
                link[511] = page
            slots = 512 - at // 8
            count = len(rest) if len(rest) <= slots else slots - 1
            for index in range(count):
                entries[at // 8 + index] = rest[index]
            rest, at, link = rest[count:], 0, entries
        return prp1, prp2, lists

    # --- admin helpers
    def identify(self, cns: int, nsid: int = 0, *, cntid: int = 0, csi: int = 0) -> bytes:
        page = self.ram.alloc(PAGE)
        try:
            self.admin(IDENTIFY, nsid=nsid, prp1=page, cdw=[cns | cntid << 16, csi << 24])
            return bytes(self.ram.view(page, PAGE))
        finally:
            self.ram.free(page, PAGE)

    def get_log(self, lid: int, length: int, *, nsid: int = 0xFFFFFFFF, offset: int = 0, rae: int = 0) -> bytes:
        buffer = self.ram.buffer(length)
        try:
            prp1, prp2, pages = self.prps(buffer.iova, length)
            dwords = length // 4 - 1  # NUMD is 0's based
            cdw = [lid | rae << 15 | (dwords & 0xFFFF) << 16, dwords >> 16, offset & 0xFFFFFFFF, offset >> 32]
            self.admin(GET_LOG, nsid=nsid, prp1=prp1, prp2=prp2, cdw=cdw, pages=pages)
            return buffer.bytes()
        finally:
            self.ram.free_buffer(buffer)

    def get_feature(self, fid: int, *, select_: int = 0, nsid: int = 0, cdw11: int = 0) -> int:
        return self.admin(GET_FEATURES, nsid=nsid, cdw=[fid | select_ << 8, cdw11]).dw0

    def set_feature(self, fid: int, value: int, *, nsid: int = 0) -> int:
        return self.admin(SET_FEATURES, nsid=nsid, cdw=[fid, value]).dw0

    def create_cq(self, qid: int, entries: int, *, vector: int | None = None) -> CompletionQueue:
        """Create I/O Completion Queue; vector None takes `qid`, -1 makes a queue without interrupts."""
        vector = min(qid, len(self.eventfds) - 1) if vector is None else vector
        cq = CompletionQueue(self.ram, qid, entries, max(vector, 0), self.eventfds[vector] if vector >= 0 else -1)
        flags = 1 | (2 | vector << 16 if vector >= 0 else 0)  # PC, IEN, IV
        self.admin(CREATE_CQ, prp1=cq.iova, cdw=[qid | (entries - 1) << 16, flags])
        self.cqs[qid] = cq
        return cq

    def create_sq(self, qid: int, entries: int, cq: CompletionQueue) -> SubmissionQueue:
        sq = SubmissionQueue(self.ram, qid, entries, cq)
        cq.sqs[qid] = sq
        self.admin(CREATE_SQ, prp1=sq.iova, cdw=[qid | (entries - 1) << 16, 1 | cq.qid << 16])
        self.sqs[qid] = sq
        return sq

    def create_queue_pair(self, qid: int, entries: int, *, vector: int | None = None) -> SubmissionQueue:
        return self.create_sq(qid, entries, self.create_cq(qid, entries, vector=vector))

    def delete_sq(self, sq: SubmissionQueue) -> None:
        """Delete a queue; what was outstanding must have been completed by then (Base 3.3.1.3)."""
        self.admin(DELETE_SQ, cdw=[sq.qid])
        self.reap(sq.cq)
        assert not sq.outstanding, f"{len(sq.outstanding)} commands of a deleted queue were never completed"
        del self.sqs[sq.qid], sq.cq.sqs[sq.qid]
        self.ram.free(sq.iova, sq.entries * SQE.size)

    def delete_cq(self, cq: CompletionQueue) -> None:
        self.admin(DELETE_CQ, cdw=[cq.qid])
        del self.cqs[cq.qid]
        self.ram.free(cq.iova, cq.entries * CQE.size)

    # --- I/O helpers; lengths in bytes, `block` in bytes
    def submit_io(
        self,
        sq: SubmissionQueue,
        opcode: int,
        nsid: int,
        slba: int,
        buffer: Buffer,
        *,
        block: int = 512,
        fua: bool = False,
        ring: bool = True,
    ) -> Command:
        """Read, Write or Compare of a whole buffer."""
        prp1, prp2, pages = self.prps(buffer.iova, len(buffer))
        nlb = len(buffer) // block - 1  # 0's based
        cdw = [slba & 0xFFFFFFFF, slba >> 32, nlb | (1 << 30 if fua else 0)]
        return self.submit(sq, opcode, nsid=nsid, prp1=prp1, prp2=prp2, cdw=cdw, pages=pages, ring=ring)

    def io(
        self,
        sq: SubmissionQueue,
        opcode: int,
        nsid: int,
        slba: int,
        buffer: Buffer,
        *,
        block: int = 512,
        fua: bool = False,
    ) -> int:
        """One transfer to its end; the status."""
        return self.wait(self.submit_io(sq, opcode, nsid, slba, buffer, block=block, fua=fua))[0].status

    def read(self, sq: SubmissionQueue, nsid: int, slba: int, length: int, *, block: int = 512) -> bytes:
        """Read bytes; NvmeError on any other status than success."""
        buffer = self.ram.buffer(length)
        try:
            completion = self.wait(self.submit_io(sq, READ, nsid, slba, buffer, block=block))[0]
            if completion.status:
                raise NvmeError(completion, f"read of {length} bytes at LBA {slba}")
            return buffer.bytes()
        finally:
            self.ram.free_buffer(buffer)

    def write(
        self, sq: SubmissionQueue, nsid: int, slba: int, data: bytes, *, block: int = 512, fua: bool = False
    ) -> None:
        buffer = self.ram.buffer(len(data))
        buffer.fill(data)
        try:
            completion = self.wait(self.submit_io(sq, WRITE, nsid, slba, buffer, block=block, fua=fua))[0]
            if completion.status:
                raise NvmeError(completion, f"write of {len(data)} bytes at LBA {slba}")
        finally:
            self.ram.free_buffer(buffer)

    def compare(self, sq: SubmissionQueue, nsid: int, slba: int, data: bytes, *, block: int = 512) -> int:
        buffer = self.ram.buffer(len(data))
        buffer.fill(data)
        try:
            return self.io(sq, COMPARE, nsid, slba, buffer, block=block)
        finally:
            self.ram.free_buffer(buffer)

    def submit_write_zeroes(
        self, sq: SubmissionQueue, nsid: int, slba: int, blocks: int, *, deallocate: bool = False
    ) -> Command:
        cdw12 = (blocks - 1) | (1 << 25 if deallocate else 0)  # NLB is 0's based; DEAC
        return self.submit(sq, WRITE_ZEROES, nsid=nsid, cdw=[slba & 0xFFFFFFFF, slba >> 32, cdw12])

    def write_zeroes(self, sq: SubmissionQueue, nsid: int, slba: int, blocks: int, **kw: bool) -> int:
        return self.wait(self.submit_write_zeroes(sq, nsid, slba, blocks, **kw))[0].status

    def submit_dsm(
        self, sq: SubmissionQueue, nsid: int, ranges: Sequence[tuple[int, int]], *, attributes: int = 4
    ) -> Command:
        """Dataset Management over (slba, blocks) ranges; attributes 4 = deallocate."""
        page = self.ram.alloc(PAGE)
        raw = b"".join(struct.pack("<IIQ", 0, blocks, slba) for slba, blocks in ranges)
        self.ram.view(page, len(raw))[:] = raw
        return self.submit(sq, DSM, nsid=nsid, prp1=page, cdw=[len(ranges) - 1, attributes], pages=[page])

    def dsm(self, sq: SubmissionQueue, nsid: int, ranges: Sequence[tuple[int, int]], attributes: int = 4) -> int:
        return self.wait(self.submit_dsm(sq, nsid, ranges, attributes=attributes))[0].status

    def blocks(self, sq: SubmissionQueue, opcode: int, nsid: int, slba: int, blocks: int) -> int:
        """A command that names blocks and has no data: Verify, Write Uncorrectable. Its status."""
        cdw = [slba & 0xFFFFFFFF, slba >> 32, blocks - 1]  # NLB is 0's based
        return self.execute(sq, opcode, nsid=nsid, cdw=cdw).status

    def copy(
        self,
        sq: SubmissionQueue,
        nsid: int,
        target: int,
        ranges: Sequence[tuple[int, int]],
        *,
        descriptor_format: int = 0,
        fua: bool = False,
    ) -> Completion:
        """Copy (NVM 3.2.2) of (slba, blocks) ranges."""
        data = b"".join(struct.pack("<8xQH14x", slba, blocks - 1) for slba, blocks in ranges)  # NLB is 0's based
        buffer = self.ram.buffer(len(data))
        buffer.fill(data)
        prp1, prp2, pages = self.prps(buffer.iova, len(data))
        cdw = [target & 0xFFFFFFFF, target >> 32, len(ranges) - 1 | descriptor_format << 8 | fua << 30]
        completion = self.execute(sq, COPY, nsid=nsid, prp1=prp1, prp2=prp2, cdw=cdw, pages=pages)
        self.ram.free_buffer(buffer)
        return completion

    def lba_status(
        self, nsid: int, slba: int, length: int = 0, *, action: int = 0x11, room: int = 64
    ) -> tuple[int, list[tuple[int, int, int]]]:
        """Get LBA Status (NVM 4.2.1): the completion condition and (block, blocks, status) of each descriptor."""
        size = 8 + 16 * room
        buffer = self.ram.buffer(size)
        prp1, prp2, pages = self.prps(buffer.iova, size)
        cdw = [slba & 0xFFFFFFFF, slba >> 32, size // 4 - 1, length | action << 24]
        self.admin(GET_LBA_STATUS, nsid=nsid, prp1=prp1, prp2=prp2, cdw=cdw, pages=pages)
        count, condition = struct.unpack_from("<IB", buffer.view)
        found = [struct.unpack_from("<QIxB", buffer.view, 8 + 16 * i) for i in range(count)]
        self.ram.free_buffer(buffer)
        return condition, [(lba, run + 1, status) for lba, run, status in found]  # NLB is 0's based

    def flush(self, sq: SubmissionQueue, nsid: int) -> int:
        return self.execute(sq, FLUSH, nsid=nsid).status

    def abort(self, sqid: int, cid: int) -> Completion:
        return self.try_admin(ABORT, cdw=[sqid | cid << 16])

    def aer(self) -> Command:
        """Arm an Asynchronous Event Request."""
        return self.submit(self.sqs[0], AER)
