"""An in-process lab for the compiled stage: a poller's records, a plane, guest RAM, and no thread.

Use:
    with Kept() as kept, Lab(kept, PRODUCT) as lab:
        queue = lab.open_pair(1, 16); queue.submit(nv.READ, nsid=1, prp1=...); queue.ring(); lab.one_pass()
        done = queue.reap()
`Kept` is what a keeper holds (memfds, guest RAM, the client's socket, eventfds), so a second `Lab` on it stands for
the next worker. `PRODUCT` is dpu.fastpath.asic as imported (compiled unless NUMBA_DISABLE_JIT=1), `PLAIN` the same
source as plain Python, whose functions can be patched. `Cutter` ends a plain run between any two stores.
Constants of the guest's side come from tests.support.nvme_driver, not from the product.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import socket
import struct
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest import mock

import numpy as np

import dpu.fastpath
from dpu import layout
from dpu.backends import Backend, MemoryBackend
from dpu.backends.null import NullBackend
from dpu.fastpath import asic, gate, rings, soc
from dpu.fastpath.poller import Poller
from dpu.fastpath.uring import NoRing, Ring
from dpu.guestmap import Mapping
from dpu.nvme.interfaces import Completion as Result
from dpu.plane import Plane
from tests.support.nvme_driver import CQE, SQE, Completion, GuestRam

UNIT = 512
NS_MEMORY, NS_NULL, NS_4K, NS_FILE = 1, 2, 3, 4
MEMORY_BYTES = 1 << 20
NAMESPACES_MAX = 8
POLLIN = select.POLLIN


def load_plain(*products: ModuleType) -> list[Any]:
    """The sources of compiled modules once more, with nothing compiled; each sees those before it."""
    modules: dict[str, Any] = {}
    for product in products:
        assert product.__file__
        spec = importlib.util.spec_from_file_location("tests.plain_" + Path(product.__file__).stem, product.__file__)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        parts = {name.rpartition(".")[2]: plain for name, plain in modules.items()}
        with (
            mock.patch("dpu.fastpath.jit.compiled", lambda function, **options: function),
            mock.patch.dict(sys.modules, modules),
            mock.patch.multiple(dpu.fastpath, **parts) if parts else contextlib.nullcontext(),
        ):
            spec.loader.exec_module(module)
        modules[product.__name__] = module
    return list(modules.values())


PRODUCT: Any = asic
PLAIN: Any
PLAIN_GATE, PLAIN_RINGS, PLAIN_SOC, PLAIN = load_plain(gate, rings, soc, asic)
ENGINES = {"product": PRODUCT, "plain": PLAIN}


@dataclass(frozen=True)
class Opened:
    """A queue as control has opened it."""

    qid: int
    entries: int
    iova: int
    other: int  # CQ: vector; SQ: its CQ
    epoch: int


class Kept:
    """What outlives a worker. `files`: back ends by nsid beside the standard ones."""

    def __init__(self, *, ram_bytes: int = 1 << 20, files: dict[int, Backend] | None = None) -> None:
        self.state_fd = os.memfd_create("state", os.MFD_CLOEXEC)
        os.ftruncate(self.state_fd, layout.STATE_BYTES)
        self.bar_fd = os.memfd_create("bar", os.MFD_CLOEXEC)
        os.ftruncate(self.bar_fd, layout.BAR_FILE_BYTES)
        self.ram = GuestRam(ram_bytes, second=64 << 10)
        self.guest, self.device = socket.socketpair()
        self.eventfds = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(4)]
        memory = MemoryBackend.create("memory", UNIT, MEMORY_BYTES // UNIT, uuid.UUID(int=1))
        big = MemoryBackend.create("4k", 4096, MEMORY_BYTES // 4096, uuid.UUID(int=2))
        null = NullBackend.create("null", UNIT, 1 << 40, uuid.UUID(int=3))
        self.backends: dict[int, Backend] = {NS_MEMORY: memory, NS_NULL: null, NS_4K: big, **(files or {})}
        self.mappings = {b.uuid: Mapping(b.fd, b.size_bytes) for b in (memory, big)}
        self.cqs: list[Opened] = []
        self.sqs: list[Opened] = []
        self.dbbuf: tuple[int, int] | None = None

    def __enter__(self) -> Kept:
        return self

    def __exit__(self, *_: object) -> None:
        for mapping in self.mappings.values():
            mapping.close()
        for backend in self.backends.values():
            backend.close()
        for fd in [self.state_fd, self.bar_fd, *self.eventfds]:
            os.close(fd)
        self.guest.close()
        self.device.close()
        self.ram.close()

    def disk(self, nsid: int = NS_MEMORY) -> bytes:
        """The bytes of a memory or file namespace."""
        backend = self.backends[nsid]
        return os.pread(backend.fd, backend.size_bytes, 0)

    def interrupts(self, vector: int) -> int:
        """What a vector has counted since the last call."""
        try:
            return os.eventfd_read(self.eventfds[vector])
        except BlockingIOError:
            return 0


class Lab:
    """One worker's life, step by step. `poller`: share one between labs for two controllers on it."""

    def __init__(
        self,
        kept: Kept,
        engine: Any = PRODUCT,
        *,
        poller: Poller | None = None,
        ring: Ring | FakeRing | None = None,
        stamps: bool = False,
        windows: Sequence[tuple[int, int, int]] | None = None,
        rights: int = 3,
    ) -> None:
        self.kept, self.engine, self.own_poller = kept, engine, poller is None
        self.health = np.zeros(1, np.int64)
        # Every pass looks at every controller: tests of quiet ones say so.
        self.poller = poller or Poller(
            None, int(self.health.ctypes.data), cast(Any, ring) or NoRing(), stamps=stamps, quiet_us=0
        )
        self.plane = Plane(
            self.poller,
            kept.state_fd,
            kept.bar_fd,
            kept.device.fileno(),
            lambda backend: kept.mappings[backend.uuid].host,
            NAMESPACES_MAX,
        )
        for iova, offset, size in kept.ram.windows if windows is None else windows:
            self.plane.adopt_dma(iova, size, rights, offset, kept.ram.fd)
        self.plane.set_vectors(0, kept.eventfds)
        for nsid, backend in kept.backends.items():
            self.plane.set_namespace(nsid, backend)
        for cq in kept.cqs:
            self.plane.open_cq(cq.qid, cq.entries, cq.iova, cq.other, True, cq.epoch)
        for sq in kept.sqs:
            self.plane.open_sq(sq.qid, sq.entries, sq.iova, sq.other, sq.epoch)
        if kept.dbbuf:
            self.plane.set_dbbuf(*kept.dbbuf, reopened=True)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The worker is gone; what is kept stays."""
        self.plane.record.live = self.plane.record.state = 0
        self.plane.memory.close()
        if self.own_poller:
            os.close(self.poller.control_fd)
            os.close(self.poller.wake_fd)

    # --- control's side
    def begin(self) -> Lab:
        self.plane.begin()
        return self

    def recover(self, done: dict[int, Result] | None = None) -> list[int]:
        """What control does before `begin` in a new worker; the admin commands to execute again."""
        again = self.plane.recover(done or {})
        self.begin()
        return again

    def open_cq(self, qid: int, entries: int, *, vector: int | None = None) -> GuestCq:
        kept = self.kept
        cq = GuestCq(kept, qid, entries)
        opened = Opened(qid, entries, cq.iova, qid if vector is None else vector, 1000 + qid)
        kept.cqs.append(opened)
        self.plane.open_cq(qid, entries, cq.iova, opened.other, True, opened.epoch)
        return cq

    def open_sq(self, qid: int, entries: int, cq: GuestCq) -> GuestSq:
        sq = GuestSq(self.kept, qid, entries, cq)
        opened = Opened(qid, entries, sq.iova, cq.qid, 2000 + qid)
        self.kept.sqs.append(opened)
        self.plane.open_sq(qid, entries, sq.iova, cq.qid, opened.epoch)
        return sq

    def open_pair(self, qid: int, entries: int) -> GuestSq:
        return self.open_sq(qid, entries, self.open_cq(qid, entries))

    def enable_shadow(self) -> None:
        """What control does for Doorbell Buffer Config."""
        kept = self.kept
        kept.dbbuf = (kept.ram.alloc(4096), kept.ram.alloc(4096))
        self.plane.set_dbbuf(*kept.dbbuf)

    def misses(self) -> list[int]:
        """Slots of this controller's commands that control was handed."""
        return [slot for index, slot in self.poller.misses() if index == self.plane.index]

    # --- the poller's side
    def one_pass(self, look: bool = False) -> int:
        return int(self.engine.one_pass(self.poller.record, look))

    def settle(self, look: bool = False, passes: int = 64) -> None:
        """Passes until one finds nothing to do."""
        for _ in range(passes):
            if not self.one_pass(look):
                return
        raise AssertionError("the poller finds work for ever")

    def settle_files(self, deadline_ms: int = 30_000) -> None:
        """As `settle`, waiting for what io_uring has."""
        uring = self.poller.ring
        ready = select.poll()
        ready.register(uring.fd, POLLIN)
        self.settle()
        while int(uring.record[0].inflight):
            assert ready.poll(deadline_ms), "io_uring does not answer"
            self.settle()


class GuestCq:
    """A completion queue as the guest sees it."""

    def __init__(self, kept: Kept, qid: int, entries: int) -> None:
        self.kept, self.qid, self.entries = kept, qid, entries
        self.iova = kept.ram.alloc(entries * CQE.size)
        self.words = kept.ram.view(self.iova, entries * CQE.size).cast("Q")
        self.head, self.phase = 0, 1

    def reap(self, *, ring: bool = True, limit: int = 1 << 30) -> list[Completion]:
        """Consume what is there: 64-bit words, the one with the phase first, as a cautious driver would."""
        done: list[Completion] = []
        while len(done) < limit:
            high = self.words[2 * self.head + 1]
            if high >> 48 & 1 != self.phase:
                break
            low, status = self.words[2 * self.head], high >> 49
            done.append(
                Completion(
                    dw0=low & 0xFFFFFFFF,
                    sqhd=high & 0xFFFF,
                    sqid=high >> 16 & 0xFFFF,
                    cid=high >> 32 & 0xFFFF,
                    status=status & 0x7FF,
                    more=bool(status & 0x2000),
                    dnr=bool(status & 0x4000),
                )
            )
            self.head += 1
            if self.head == self.entries:
                self.head, self.phase = 0, self.phase ^ 1
        if done and ring:
            store_doorbell(self.kept, 2 * self.qid + 1, self.head)
        return done


class GuestSq:
    """A submission queue as the guest sees it; commands are named by CID."""

    def __init__(self, kept: Kept, qid: int, entries: int, cq: GuestCq) -> None:
        self.kept, self.qid, self.entries, self.cq = kept, qid, entries, cq
        self.iova = kept.ram.alloc(entries * SQE.size)
        self.area = kept.ram.view(self.iova, entries * SQE.size)
        self.tail = 0
        self.submitted = 0

    def submit(
        self,
        opcode: int,
        *,
        cid: int | None = None,
        nsid: int = NS_MEMORY,
        prp1: int = 0,
        prp2: int = 0,
        cdw: Sequence[int] = (),
        flags: int = 0,
    ) -> int:
        """Put a command in the queue, without the doorbell; its CID."""
        cid = self.submitted & 0xFFFF if cid is None else cid
        dwords = [*cdw, 0, 0, 0, 0, 0, 0][:6]
        raw = SQE.pack(opcode, flags, cid, nsid, 0, 0, 0, prp1, prp2, *dwords)
        self.area[64 * self.tail : 64 * self.tail + 64] = raw
        self.tail = (self.tail + 1) % self.entries
        self.submitted += 1
        return cid

    def ring(self) -> None:
        store_doorbell(self.kept, 2 * self.qid, self.tail)

    def io(
        self,
        opcode: int,
        slba: int,
        blocks: int,
        prp1: int,
        prp2: int = 0,
        *,
        nsid: int = NS_MEMORY,
        control: int = 0,
    ) -> int:
        """Submit Read, Write, Compare or Write Zeroes; `control`: bits 31:16 of CDW12."""
        cdw = [slba & 0xFFFFFFFF, slba >> 32, (blocks - 1) | control << 16]
        return self.submit(opcode, nsid=nsid, prp1=prp1, prp2=prp2, cdw=cdw)

    def do(self, lab: Lab, opcode: int, **fields: Any) -> Completion:
        """One command to its end."""
        cid = self.submit(opcode, **fields)
        self.ring()
        lab.settle()
        done = self.cq.reap()
        assert [one.cid for one in done] == [cid], done
        return done[0]


def store_doorbell(kept: Kept, index: int, value: int) -> None:
    """Where the guest writes it: its shadow buffer, or (as the poller does for it) the doorbell page."""
    if kept.dbbuf and index >= 2:
        kept.ram.view(kept.dbbuf[0] + 4 * index, 4)[:] = struct.pack("<I", value)
    else:
        os.pwrite(kept.bar_fd, struct.pack("<I", value), layout.DOORBELLS_OFFSET + 4 * index)


def post_doorbell(kept: Kept, index: int, value: int, message_id: int = 1) -> None:
    """The vfio-user message: a posted REGION_WRITE of 4 bytes to region 0 (written out by the specification)."""
    kept.guest.sendall(doorbell_message(index, value, message_id))


def doorbell_message(index: int, value: int, message_id: int = 1) -> bytes:
    header = struct.pack("<HHIII", message_id, 10, 36, 0x10, 0)
    return header + struct.pack("<QIII", 0x1000 + 4 * index, 0, 4, value)


# ----------------------------------------------------------------------------------------------- files


@dataclass(frozen=True)
class Request:
    """An io_uring request as the kernel would read it (struct io_uring_sqe)."""

    opcode: int
    flags: int
    fd: int
    offset: int
    addr: int
    length: int
    op_flags: int
    tag: int


class FakeRing:
    """An io_uring without a kernel: the test reads the requests and answers them. For the plain engine."""

    fd = 1 << 20  # no descriptor

    def __init__(self, entries: int = 1024) -> None:
        self.words = np.zeros(64, np.uint32)  # SQ head, tail, CQ head, tail; each in its own 64 bytes
        self.array = np.zeros(entries, np.uint32)
        self.sqes = np.zeros((entries, 64), np.uint8)
        self.cqes = np.zeros(2 * entries, [("user_data", "<i8"), ("res", "<i4"), ("flags", "<u4")])
        self.record: Any = np.zeros(1, layout.URING).view(np.recarray)
        self.entries = entries
        r, words = self.record[0], int(self.words.ctypes.data)
        r.fd, r.limit, r.sq_mask, r.cq_mask = self.fd, entries, entries - 1, 2 * entries - 1
        r.sq_head, r.sq_tail, r.cq_head, r.cq_tail = words, words + 64, words + 128, words + 192
        r.sq_array, r.sqes, r.cqes = (int(a.ctypes.data) for a in (self.array, self.sqes, self.cqes))
        self.accept = 1 << 30  # how many requests the next io_uring_enter takes

    @property
    def address(self) -> int:
        return int(self.record.ctypes.data)

    def enter(self, fd: int, submit: int, wait: int, flags: int) -> int:
        """io_uring_enter: the number of requests taken; they are then in `requests`."""
        assert (fd, wait, flags) == (self.fd, 0, 0)
        return min(submit, self.accept)

    def take(self) -> list[Request]:
        """The requests that were prepared since the last call."""
        taken, head, tail = [], int(self.words[0]), int(self.words[16])
        assert tail - head <= self.entries, "requests were overwritten before the kernel saw them"
        while head != tail:
            raw = self.sqes[self.array[head % self.entries]].tobytes()
            opcode, flags, _, fd, offset, addr, length, op_flags, tag = struct.unpack_from("<BBHiqqIIq", raw)
            assert raw[40:] == bytes(24)
            taken.append(Request(opcode, flags, fd, offset, addr, length, op_flags, tag))
            head += 1
        self.words[0] = head
        return taken

    def answer(self, request: Request, result: int) -> None:
        tail = int(self.words[48])
        self.cqes[tail % len(self.cqes)] = (request.tag, result, 0)
        self.words[48] = tail + 1


# ------------------------------------------------------------------------------------------------- cutting


class Cut(Exception):
    """The worker is gone here."""


class _Record:
    """A record whose every store is a step."""

    __slots__ = ("_record", "_step")

    def __init__(self, record: Any, step: Callable[[], None]) -> None:
        object.__setattr__(self, "_record", record)
        object.__setattr__(self, "_step", step)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._record, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._step()
        setattr(self._record, name, value)


class _Array:
    __slots__ = ("_array", "_step")

    def __init__(self, array: Any, step: Callable[[], None]) -> None:
        self._array, self._step = array, step

    def __getitem__(self, index: int) -> _Record:
        return _Record(self._array[index], self._step)


class Cutter:
    """Runs the plain engine and raises Cut before its store number `at`, or before the first one that finds `when`
    true; `steps` counts them.

    A store is anything that another process can see after this one: a word, a record's field, a copy, a system
    call. `executed` lists the sequence numbers of the commands that the engine has begun to execute.
    """

    STORES = ("store_u32", "store_u64", "copy", "fill", "punch", "write", "read", "recv", "io_uring_enter")

    def __init__(self, at: int = 1 << 60, when: Callable[[], bool] = lambda: False) -> None:
        self.at, self.when, self.steps = at, when, 0
        self.executed: list[int] = []

    def _step(self) -> None:
        self.steps += 1
        if self.steps > self.at or self.when():
            raise Cut

    def one_pass(self, lab: Lab, look: bool = False) -> int:
        """A pass of the plain engine; Cut at the step."""
        view, execute = PLAIN.view, PLAIN.execute

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                self._step()
                return function(*arguments)

            return call

        def recording(p: Any, c: Any, slot: int, entry: Any) -> Any:
            self.executed.append(int(entry.sequence))
            return execute(p, c, slot, entry)

        patches: dict[str, Any] = {name: counted(getattr(PLAIN, name)) for name in self.STORES}
        patches |= {name: counted(getattr(PLAIN_SOC, name)) for name in ("add_u64", "swap_u64")}
        patches["view"] = lambda address, count, dtype: _Array(view(address, count, dtype), self._step)
        with contextlib.ExitStack() as stack:
            for module in (PLAIN_GATE, PLAIN_RINGS, PLAIN_SOC, PLAIN):
                has = {name: patch for name, patch in patches.items() if hasattr(module, name)}
                stack.enter_context(mock.patch.multiple(module, **has))
            stack.enter_context(mock.patch.object(PLAIN, "execute", recording))
            return int(PLAIN.one_pass(_Record(lab.poller.record, self._step), look))

    def settle(self, lab: Lab, passes: int = 64) -> None:
        for _ in range(passes):
            if not self.one_pass(lab):
                return
        raise AssertionError("the poller finds work for ever")
