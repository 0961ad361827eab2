"""A host for the NVMe control part: guest memory, a data plane that only keeps books, SQEs built by hand.

Nothing here uses ``dpu.nvme.wire``: offsets and codes are the specification's, written out, so that a wrong
declaration cannot agree with itself.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dpu.clock import VirtualClock
from dpu.errors import DmaFault
from dpu.nvme.controller import Controller
from dpu.nvme.interfaces import Completion, Counters, Life, NamespaceInfo

T = TypeVar("T")

PAGE = 4096
RAM_BYTES = 0x100000
ASQ, ACQ = 0x1000, 0x2000
BUFFER = 0x10000  # data of admin commands, pages on end
UNMAPPED = 0x40000000

CC_ENABLE = 1 | 6 << 16 | 4 << 20  # EN, IOSQES 6, IOCQES 4

DNR, MORE = 1 << 14, 1 << 13


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never suspends (the fakes do not)."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("the coroutine waits for something")


def runs(blocks: set[int]) -> list[tuple[int, int]]:
    """(first, length) of the runs in a set of blocks, in order."""
    found: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if found and sum(found[-1]) == block:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((block, 1))
    return found


class Memory:
    """RAM at 0 .. RAM_BYTES; everything else is not mapped."""

    def __init__(self) -> None:
        self.data = bytearray(RAM_BYTES)

    def _check(self, iova: int, length: int) -> None:
        if iova + length > len(self.data):
            raise DmaFault(iova, length)

    def read(self, iova: int, length: int) -> bytes:
        self._check(iova, length)
        return bytes(self.data[iova : iova + length])

    def gather(self, pieces: list[tuple[int, int]]) -> bytes:
        return b"".join(self.read(iova, length) for iova, length in pieces)

    def write(self, iova: int, data: bytes) -> None:
        self._check(iova, len(data))
        self.data[iova : iova + len(data)] = data


class Plane:
    """Books of what is open; refuses what no controller may ask for.

    :param records: what a real plane keeps in shared memory, and so over its worker's death: per queue its
        epoch and how many entries have passed
    """

    def __init__(self, records: dict[tuple[str, int], list[int]] | None = None) -> None:
        self.records = {} if records is None else records
        self.cqs: dict[int, tuple[Any, ...]] = {}
        self.sqs: dict[int, tuple[Any, ...]] = {}
        self.epochs: list[int] = []
        self.dbbuf: tuple[int, int] | None = None
        self.mask = 0
        self.flushes = 0
        self.late = False  # writes of before a reset
        self.closings = 0
        self.completed: list[tuple[int, Completion]] = []
        self.counts: dict[int, Counters] = {}
        self.write_through: list[bool] = []
        self.bad: dict[int, set[int]] = {}  # nsid -> blocks

    def _mapped(self, iova: int, length: int) -> None:
        if iova + length > RAM_BYTES:
            raise DmaFault(iova, length)

    def _record(self, kind: str, qid: int, epoch: int) -> None:
        self.epochs.append(epoch)
        if self.records.get((kind, qid), [None])[0] != epoch:
            self.records[kind, qid] = [epoch, 0]

    def open_cq(self, qid: int, entries: int, iova: int, vector: int, interrupts: bool, epoch: int) -> None:
        assert qid not in self.cqs
        self._mapped(iova, entries * 16)
        self.cqs[qid] = (entries, iova, vector, interrupts)
        self._record("cq", qid, epoch)

    def open_sq(self, qid: int, entries: int, iova: int, cqid: int, epoch: int) -> None:
        assert qid not in self.sqs
        assert cqid in self.cqs
        self._mapped(iova, entries * 64)
        self.sqs[qid] = (entries, iova, cqid)
        self._record("sq", qid, epoch)

    async def close_sq(self, qid: int) -> None:
        del self.sqs[qid]

    async def abort(self, sqid: int, cid: int) -> bool:
        return False

    async def close_cq(self, qid: int) -> None:
        assert all(cqid != qid for _, _, cqid in self.sqs.values())
        del self.cqs[qid]

    async def close_all(self) -> None:
        self.closings += 1
        self.sqs.clear()
        self.cqs.clear()
        self.dbbuf = None
        self.mask = 0

    def late_writes(self) -> bool:
        return self.late

    async def flush(self) -> None:
        self.flushes += 1

    def set_dbbuf(self, shadow_iova: int, event_idx_iova: int, reopened: bool = False) -> None:
        self._mapped(shadow_iova, PAGE)
        self._mapped(event_idx_iova, PAGE)
        self.dbbuf = (shadow_iova, event_idx_iova)

    def set_mask(self, intms: int) -> None:
        self.mask = intms

    def complete(self, token: int, completion: Completion) -> None:
        self.completed.append((token, completion))

    def set_write_through(self, on: bool) -> None:
        self.write_through.append(on)

    def unrecoverable(self, nsid: int, lba: int, count: int, limit: int) -> list[tuple[int, int]]:
        return runs({block for block in self.bad.get(nsid, ()) if lba <= block < lba + count})[:limit]

    def counters(self, nsid: int) -> Counters:
        return self.counts.get(nsid, Counters())


class Subsystem:
    """Namespaces 1 (512 byte blocks) and 3 (4096 byte blocks) of NN 8."""

    def __init__(self) -> None:
        self.nqn = "nqn.2026-01.org.example:unit"
        self.serial = "SER-1"
        self.model = "Unit test model"
        self.max_namespaces = 8
        self.controllers = [5]
        self.detached: set[int] = set()
        self.calls: list[tuple[Any, ...]] = []
        self.lived = Life()
        self.infos = [
            NamespaceInfo(
                nsid=1,
                num_blocks=0x12345678,
                block_size=512,
                nguid=bytes(range(1, 17)),
                eui64=bytes(range(0x21, 0x29)),
                uuid=bytes(range(0x41, 0x51)),
                supports_discard=True,
                atomic_bytes=256 << 10,
            ),
            NamespaceInfo(
                nsid=3,
                num_blocks=77,
                block_size=4096,
                nguid=bytes(16),
                eui64=bytes(8),
                uuid=bytes(range(0x61, 0x71)),
                readonly=True,
            ),
        ]

    def namespaces(self) -> list[NamespaceInfo]:
        return [info for info in self.infos if info.nsid not in self.detached]

    def allocated(self) -> list[NamespaceInfo]:
        return self.infos

    def cntlids(self, nsid: int | None = None) -> list[int]:
        return self.controllers if nsid not in self.detached else []

    def life(self) -> Life:
        return self.lived

    def capacity(self) -> tuple[int, int]:
        return 1 << 70, 1 << 69

    async def create(self, blocks: int, block_size: int, *, private: bool) -> int:
        self.calls.append(("create", blocks, block_size, private))
        return 7

    async def delete(self, nsids: Sequence[int]) -> None:
        self.calls.append(("delete", *nsids))

    async def attach(self, nsid: int, cntlids: Sequence[int], attached: bool) -> None:
        self.calls.append(("attach" if attached else "detach", nsid, *cntlids))

    async def format(self, nsid: int, block_size: int) -> None:
        self.calls.append(("format", nsid, block_size))


@dataclass
class Result:
    """A completion taken apart: ``code`` is sct << 8 | sc."""

    code: int
    dnr: bool
    more: bool
    dw0: int


class Host:
    """Drives one controller as a driver does."""

    def __init__(self, *, enable: bool = True, vectors: int = 65) -> None:
        self.memory = Memory()
        self.plane = Plane()
        self.subsystem = Subsystem()
        self.clock = VirtualClock(1_000_000_000)
        self.vectors = vectors
        self.controller = self.new_controller()
        self.tokens = 0
        self.cid = 0
        if enable:
            self.enable()

    def new_controller(self) -> Controller:
        return Controller(self.subsystem, 5, self.memory, self.plane, self.clock, vectors=self.vectors)

    def next_worker(self, state: dict[str, Any] | None = None) -> None:
        """The worker dies; another one loads ``state``, by default what it would dump now."""
        saved = json.dumps(self.controller.dump() if state is None else state)
        self.plane = Plane(self.plane.records)
        self.controller = self.new_controller()
        self.controller.load(json.loads(saved))
        self.controller.reopen()

    def read32(self, offset: int) -> int:
        return int.from_bytes(self.controller.register_read(offset, 4), "little")

    def read64(self, offset: int) -> int:
        return int.from_bytes(self.controller.register_read(offset, 8), "little")

    def write32(self, offset: int, value: int) -> None:
        run(self.controller.register_write(offset, struct.pack("<I", value)))

    def write64(self, offset: int, value: int) -> None:
        run(self.controller.register_write(offset, struct.pack("<Q", value)))

    def enable(self, cc: int = CC_ENABLE, aqa: int = 31 << 16 | 31) -> None:
        self.write32(0x24, aqa)
        self.write64(0x28, ASQ)
        self.write64(0x30, ACQ)
        self.write32(0x14, cc)

    def submit(
        self,
        opcode: int,
        *,
        flags: int = 0,
        nsid: int = 0,
        prp1: int = BUFFER,
        prp2: int = BUFFER + PAGE,
        cdw: dict[int, int] | None = None,
        cid: int | None = None,
    ) -> Result | None:
        """One admin command; ``cdw``: {10: ..., 11: ...}. None when it is parked."""
        self.tokens += 1
        self.cid = self.tokens & 0xFFFF if cid is None else cid
        words = [(cdw or {}).get(index, 0) for index in range(10, 16)]
        sqe = struct.pack("<BBHIQQQQ6I", opcode, flags, self.cid, nsid, 0, 0, prp1, prp2, *words)
        completion = run(self.controller.execute(self.tokens, sqe))
        return None if completion is None else self.result(completion)

    @staticmethod
    def result(completion: Completion) -> Result:
        status = completion.status
        assert 0 <= status < 1 << 15
        assert 0 <= completion.dw0 < 1 << 32
        return Result(status & 0x7FF, bool(status & DNR), bool(status & MORE), completion.dw0)

    def code(self, opcode: int, **fields: Any) -> int:
        """Status (sct << 8 | sc) of a command that is not parked."""
        result = self.submit(opcode, **fields)
        assert result is not None
        return result.code

    def buffer(self, length: int = PAGE) -> bytes:
        return self.memory.read(BUFFER, length)

    def identify(self, cns: int, nsid: int = 0, cdw11: int = 0, cntid: int = 0) -> bytes:
        self.memory.data[BUFFER : BUFFER + PAGE] = b"\xee" * PAGE
        assert self.code(0x06, nsid=nsid, cdw={10: cns | cntid << 16, 11: cdw11}) == 0
        return self.buffer()

    def log(self, lid: int, length: int, *, offset: int = 0, nsid: int = 0xFFFFFFFF, rae: bool = False) -> bytes:
        self.memory.data[BUFFER : BUFFER + 2 * PAGE] = b"\xee" * (2 * PAGE)
        numd = length // 4 - 1
        cdw10 = lid | rae << 15 | (numd & 0xFFFF) << 16
        cdw = {10: cdw10, 11: numd >> 16, 12: offset & 0xFFFFFFFF, 13: offset >> 32}
        assert self.code(0x02, nsid=nsid, cdw=cdw) == 0
        return self.buffer(length)

    def create_cq(self, qid: int, entries: int = 16, iova: int = 0x4000, cdw11: int = 0b11, vector: int = 1) -> int:
        return self.code(0x05, prp1=iova, cdw={10: qid | (entries - 1) << 16, 11: cdw11 | vector << 16})

    def create_sq(self, qid: int, cqid: int, entries: int = 16, iova: int = 0x6000, cdw11: int = 1) -> int:
        return self.code(0x01, prp1=iova, cdw={10: qid | (entries - 1) << 16, 11: cdw11 | cqid << 16})

    def delete_sq(self, qid: int) -> int:
        return self.code(0x00, cdw={10: qid})

    def delete_cq(self, qid: int) -> int:
        return self.code(0x04, cdw={10: qid})
