"""The data plane of one controller: what control changes in the tables that a poller reads.

Use: ``plane = Plane(poller, state_fd, bar_fd, socket_fd)``, then the methods that dpu.nvme's ``DataPlane`` names, the
vfio-user side (``dma_map``, ``set_vectors``) and ``set_namespace``. ``recover()`` and ``begin()`` put the controller
in front of its poller; ``close()`` takes it away.

A change that could pull something away under a poller is made inside ``async with plane.quiet()``: no new command is
fetched, the pass that was under way is over, and what is with io_uring has come back (DESIGN rule 8). Adding what
nobody can point to yet needs no such care.

Limits: the constants of dpu.layout. Errors: DmaFault, and those of dpu.guestmap.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import os
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import numpy as np

from dpu import layout
from dpu.backends import Backend, FileBackend, Kind, MemoryBackend
from dpu.channel import ConfigStore
from dpu.errors import DmaFault
from dpu.fastpath.atomics import store_u32, store_u64
from dpu.fastpath.poller import Poller, now
from dpu.guestmap import GuestMap
from dpu.layout import DMA_READ, DMA_WRITE
from dpu.nvme.interfaces import Completion, Counters
from dpu.nvme.wire import BROADCAST_NSID, NvmOpcode, Status
from dpu.volumes.interface import VolumeNamespace

log = logging.getLogger(__name__)

DRAIN_POLL_S = 0.001
_ENTRIES = layout.QUEUES * layout.QUEUE_ENTRIES_MAX
_LIVE = layout.offset_of(layout.CONTROLLER, "live")
_LIVE_COUNT = layout.offset_of(layout.CONTROLLER, "live_count")
_HOLD = layout.offset_of(layout.CONTROLLER, "hold")
_TRACE = layout.offset_of(layout.CONTROLLER, "tracing")
_FLOWS = layout.offset_of(layout.CONTROLLER, "flows")
_ATTENTION = layout.offset_of(layout.CONTROLLER, "attention")


class Plane:
    """``state_fd``, ``bar_fd``: the kept areas (layout.STATE_BYTES, layout.BAR_FILE_BYTES), which stay the caller's.

    ``memory_of``: maps a memory back end once per worker and gives its address. ``namespaces_max``: NN.
    """

    def __init__(
        self,
        poller: Poller,
        state_fd: int,
        bar_fd: int,
        socket_fd: int,
        memory_of: Callable[[MemoryBackend], int],
        namespaces_max: int = layout.NAMESPACES,
    ) -> None:
        self.poller = poller
        self.index = poller.free_index()
        assert self.index >= 0, "more controllers than records"
        self.memory = GuestMap(poller.call_control)
        self.pending: list[tuple[int, Completion]] = []  # of parked commands, to be saved and then posted
        self.with_control = 0  # I/O commands that a thread of control is doing
        self.generation = 0  # grows with every close_all: answers to commands of before are dropped
        self.leave_gate: Callable[[int, int], None] = lambda address, place: None
        self.refuse_dma: Callable[[bool], None] = lambda refusing: None  # as those of dpu.dma
        self.late_writes: Callable[[], bool] = lambda: False
        self._memory_of = memory_of
        self._backends: dict[int, Backend] = {}
        self._state = mmap.mmap(state_fd, layout.STATE_BYTES)
        self._bar = mmap.mmap(bar_fd, layout.BAR_BYTES, offset=layout.DOORBELLS_OFFSET)
        self.store = ConfigStore(state_fd, layout.BLOB_BYTES, layout.BLOB_OFFSET)
        self.sqs = self._part(layout.SQ_OFFSET, layout.SQ, layout.QUEUES)
        self.cqs = self._part(layout.CQ_OFFSET, layout.CQ, layout.QUEUES)
        self.spaces = self._part(layout.SPACE_OFFSET, layout.SPACE, layout.NAMESPACES)
        self.inflight = self._part(layout.INFLIGHT_OFFSET, layout.INFLIGHT, layout.SLOTS)
        self.histograms = np.frombuffer(
            self._state, np.int64, layout.QUEUES * layout.HISTOGRAM_BUCKETS, layout.HISTOGRAM_OFFSET
        ).reshape(layout.QUEUES, layout.HISTOGRAM_BUCKETS)
        self.doorbells = np.frombuffer(self._bar, np.uint32)
        self.namespaces: Any = np.zeros(layout.NAMESPACES, layout.NAMESPACE).view(np.recarray)
        self.locals: Any = np.zeros(layout.QUEUES, layout.QUEUE_LOCAL).view(np.recarray)
        self.maskable = False  # INTMS masks vectors
        self._connected = [-1] * layout.VECTORS
        self._masked: set[int] = set()
        self._vectors = np.full(layout.VECTORS, -1, np.int64)
        self._segments = np.zeros(layout.SLOTS * layout.SEGMENTS, layout.SEGMENT)
        self._free = np.arange(layout.SLOTS, dtype=np.int64)
        self._live_queues = np.zeros(layout.QUEUES, np.int64)
        self._todo = np.zeros(layout.SLOTS, np.int64)
        self._trace_slots = np.zeros(layout.SLOTS, layout.TRACE_SLOT)
        self._blocks = np.zeros(layout.SLOTS * layout.BLOCK_BYTES, np.uint8)
        self._flows: Any = np.zeros(layout.NAMESPACES, layout.FLOW).view(np.recarray)
        self._links = np.zeros(layout.SLOTS, np.int64)
        self._table = self.memory.table()
        # For guest memory that is not shared, see dpu.remote.
        self.remote = False
        self.closing = False
        self.delivered = np.frombuffer(self._state, np.int64, layout.QUEUES, layout.DELIVERED_OFFSET)
        self.seen = np.zeros(layout.BAR_BYTES // 4, np.uint32)
        self._cq_copies = np.frombuffer(self._state, np.uint8, 16 * _ENTRIES, layout.CQ_COPIES_OFFSET)
        self._sq_copies = np.zeros(0, np.uint8)
        self._interrupts: dict[int, int] = {}  # CQ -> vector, as the guest has it
        self._dbbuf: tuple[int, int] | None = None
        self._holds = 0
        self._frozen = False
        c = self.record = poller.controllers[self.index]
        c.index, c.socket = self.index, socket_fd
        c.bar, c.namespaces, c.queues = _at(self.doorbells), _at(self.namespaces), _at(self.locals)
        c.seen = c.bar
        c.vectors, c.segments, c.free, c.free_count = (
            _at(self._vectors),
            _at(self._segments),
            _at(self._free),
            layout.SLOTS,
        )
        c.live_queues, c.todo, c.blocks = _at(self._live_queues), _at(self._todo), _at(self._blocks)
        c.namespaces_max, c.links, c.flows = namespaces_max, _at(self._links), 0
        c.hold = c.attention = c.outstanding = c.live_count = 0
        c.todo_begin = c.todo_end = c.recovering = c.write_through = c.tracing = 0
        c.dma, c.dma_count, c.shadow, c.events, c.bad_doorbell, c.mapped = 0, 0, 0, 0, 0, 0
        c.sequence = 1
        c.state = _at(self.sqs) - layout.SQ_OFFSET
        header = self._part(0, layout.HEADER, 1)[0]
        if header.magic == 0:
            header.version, header.bytes, header.magic = layout.VERSION, layout.STATE_BYTES, layout.MAGIC
        assert (header.magic, header.version, header.bytes) == (layout.MAGIC, layout.VERSION, layout.STATE_BYTES)

    def _part(self, offset: int, dtype: np.dtype[Any], count: int) -> Any:
        return np.frombuffer(self._state, dtype, count, offset).view(np.recarray)

    # --------------------------------------------------------------------------------------------------- changes

    def _poke(self, offset: int, value: int) -> None:
        base = self.poller.controllers.ctypes.data
        store_u64(base + self.index * layout.CONTROLLER.itemsize + offset, value)

    @contextlib.asynccontextmanager
    async def quiet(self, *, control: bool = True) -> AsyncIterator[None]:
        """No command of this controller is being executed inside; with ``control`` False, none but by control."""
        self._holds += 1
        self._poke(_HOLD, 1)
        try:
            await self.poller.grace()
            while self.record.live and (self.record.outstanding or (control and self.with_control)):
                await asyncio.sleep(DRAIN_POLL_S)
                await self.poller.grace()
            yield
        finally:
            self._holds -= 1
            self._release()

    def _release(self) -> None:
        lost = self._dbbuf is not None and self.record.shadow == 0
        self._poke(_HOLD, int(self._holds > 0 or lost or self._frozen))
        self.poller.wake()

    def begin(self) -> None:
        """Let the poller look at this controller."""
        if self.remote:
            for qid in np.nonzero(self.sqs["live"])[0]:
                self.seen[2 * qid] = self.locals[qid].sq_head
            self.show_heads()
        self._release()
        self._poke(_LIVE, 1)
        self.poller.controllers_end(self.index)
        self.poller.wake()

    async def close(self) -> None:
        """Take the controller from its poller and unmap everything."""
        async with self.quiet():
            self._poke(_LIVE, 0)
            await self.poller.grace()
            for nsid in range(1, layout.NAMESPACES + 1):
                self._leave_gates(nsid)
        self.record.state = 0
        self.memory.close()

    def attend(self, value: int) -> None:
        """Set the attention word: 0 lets the poller peek at the client's socket again."""
        self._poke(_ATTENTION, value)
        if value == layout.ATTENTION_NONE:
            self.poller.wake()

    # ---------------------------------------------------------------------------------------------- guest memory

    async def dma_map(self, iova: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        """As GuestMap.map."""
        async with self.quiet(control=not self.remote):
            self.memory.map(iova, size, flags, offset, fd)
            self._publish_dma()

    async def dma_unmap(self, iova: int, size: int) -> None:
        """As GuestMap.unmap; when it returns, nothing touches the memory any more."""
        async with self.quiet(control=not self.remote):  # control's commands look it up each time
            self.memory.unmap(iova, size)
            self._publish_dma()
            self.memory.trim()

    def adopt_dma(self, iova: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        """As ``dma_map`` before the poller looks."""
        self.memory.map(iova, size, flags, offset, fd)
        self._publish_dma()

    def _publish_dma(self) -> None:
        """Give the poller the new table; every address made from the old one is looked up again."""
        self._table = self.memory.table()
        self.record.dma, self.record.dma_count = _at(self._table), len(self._table)
        self.locals["sq_host"] = self.locals["cq_host"] = 0
        if self.remote:
            for qid in range(layout.QUEUES):
                self._place_copies(qid)
        self._resolve_dbbuf()

    def set_vectors(self, start: int, fds: list[int]) -> None:
        """eventfds of the vectors from ``start``; -1 for none. They stay the caller's."""
        for i, fd in enumerate(fds):
            self._connected[start + i] = fd
        self._publish_vectors()

    def _publish_vectors(self) -> None:
        for vector, fd in enumerate(self._connected):
            self._vectors[vector] = -1 if vector in self._masked or self.remote else fd
        if self.remote:  # completions are control's to bring to the guest
            self._vectors[0] = self.poller.control_fd

    def live(self, vector: int) -> bool:
        """Whether completions are signalled by this vector."""
        if self.remote:
            return any(self.cqs[qid].live and one == vector for qid, one in self._interrupts.items())
        return bool(np.any((self.cqs.live != 0) & (self.cqs.interrupts != 0) & (self.cqs.vector == vector)))

    # -------------------------------------------------------------------------- guest memory that is not shared

    def set_remote(self, remote: bool) -> None:
        """Whether the controller's queues are served on copies (dpu.remote); none is live."""
        self.remote = remote
        if remote and not len(self._sq_copies):
            self._sq_copies = np.zeros(64 * _ENTRIES, np.uint8)
        self.record.seen = _at(self.seen) if remote else self.record.bar
        for nsid, row in enumerate(self.namespaces, 1):
            row.threads = self._threads(nsid, int(row.kind))
        self._publish_vectors()

    def _place_copies(self, qid: int) -> None:
        self.locals[qid].sq_host, self.locals[qid].cq_host = self.sq_copy(qid), self.cq_copy(qid)

    def sq_copy(self, qid: int) -> int:
        """Address of the copy of an SQ; any room for any number of entries."""
        return _at(self._sq_copies) + 64 * layout.QUEUE_ENTRIES_MAX * qid

    def cq_copy(self, qid: int) -> int:
        """Address of the copy of a CQ."""
        return _at(self._cq_copies) + 16 * layout.QUEUE_ENTRIES_MAX * qid

    def show(self, index: int, value: int) -> None:
        """Let the poller see a doorbell."""
        store_u32(_at(self.seen) + 4 * index, value)

    def show_heads(self) -> bool:
        """Let the poller see what the guest has taken from its CQs; whether that is news."""
        heads, seen = self.doorbells[1::2].copy(), self.seen[1::2]
        news = bool((seen != heads).any())
        seen[:] = heads
        return news

    def interrupt(self, qid: int) -> None:
        """Fire the vector of a CQ, if it has one."""
        vector = self._interrupts.get(qid, -1)
        if vector >= 0:
            self.cqs[qid].signals += 1
            self.signal(vector)

    # ---------------------------------------------------------------------------------------------------- queues

    def open_cq(self, qid: int, entries: int, iova: int, vector: int, interrupts: bool, epoch: int) -> None:
        cq, local = self.cqs[qid], self.locals[qid]
        if cq.epoch != epoch:
            if qid == 0:
                self.set_remote(not any(host for host, _, _ in self.memory.places(iova, 1, DMA_WRITE)))
            if self.remote:
                self.memory.places(iova, entries * 16, DMA_WRITE)
                host = self.cq_copy(qid)
            else:
                host = self.memory.find(iova, entries * 16, DMA_WRITE)
            # Linux clears its queue only after Create CQ: what lies there must not look like completions.
            ctypes.memset(host, 0, entries * 16)
            self._zero_doorbell(2 * qid + 1)
            cq.posted = cq.signals = self.delivered[qid] = 0
            cq.entries, cq.iova = entries, iova
            cq.vector, cq.interrupts = (0, 1) if self.remote else (vector, int(interrupts))
            cq.epoch = epoch
        self._interrupts[qid] = vector if interrupts else -1
        local.cq_host = 0
        local.cq_tail, local.cq_phase = cq.posted % entries, 1 ^ (cq.posted // entries & 1)
        local.bad_head = -1
        if self.remote:
            self._place_copies(qid)
        cq.live = 1

    def open_sq(self, qid: int, entries: int, iova: int, cqid: int, epoch: int) -> None:
        sq, local = self.sqs[qid], self.locals[qid]
        if sq.epoch != epoch:
            if self.remote:
                self.memory.places(iova, entries * 64, DMA_READ)
            else:
                self.memory.find(iova, entries * 64, DMA_READ)
            self._zero_doorbell(2 * qid)
            for name in layout.SQ.names or ():
                sq[name] = 0
            self.histograms[qid] = 0
            sq.entries, sq.iova, sq.cqid = entries, iova, cqid
            sq.epoch = epoch
        local.sq_host = 0
        local.sq_head = sq.fetched % entries
        local.bad_tail = -1
        if self.remote:
            self._place_copies(qid)
        sq.live = 1
        self._list_queues()

    def entries_of(self, doorbell: int) -> int:
        """Entries of the live queue that a doorbell belongs to; 0 when there is none."""
        qid = doorbell // 2
        if qid >= layout.QUEUES:
            return 0
        queue = (self.cqs if doorbell % 2 else self.sqs)[qid]
        return int(queue.entries) if queue.live else 0

    def _zero_doorbell(self, index: int) -> None:
        self.doorbells[index] = self.seen[index] = 0
        if self.record.shadow and index > 1:
            store_u32(int(self.record.shadow) + 4 * index, 0)
            store_u32(int(self.record.events) + 4 * index, 0)

    def _list_queues(self) -> None:
        """Publish the live SQs: each store leaves a list that is safe to walk (an SQ is served if it is live)."""
        live = np.nonzero(self.sqs["live"])[0]
        self._live_queues[: len(live)] = live
        self._poke(_LIVE_COUNT, len(live))

    async def close_sq(self, qid: int) -> None:
        async with self.quiet():
            self.sqs[qid].live = 0
            self._list_queues()
            for slot in self._take_waiting(self.inflight["sqid"] == qid):
                self._end(slot, Status.ABORTED_SQ_DELETION)
        while self.locals[qid].sq_outstanding:  # a reset ends it too
            await asyncio.sleep(DRAIN_POLL_S)

    async def close_cq(self, qid: int) -> None:
        async with self.quiet():
            self.cqs[qid].live = 0

    async def close_all(self) -> None:
        async with self._refusing_dma(), self.quiet():
            self.generation += 1
            self._frozen = False
            self.pending.clear()
            for qid in range(layout.QUEUES):
                self.sqs[qid].live = self.cqs[qid].live = 0
                self.locals[qid].sq_outstanding = self.locals[qid].cq_outstanding = 0
            self._list_queues()
            self._take_waiting(self.inflight["state"] != layout.FREE)
            self.inflight.state[:] = layout.FREE
            self._trace_slots[:] = 0
            self._free[:] = np.arange(layout.SLOTS)
            self.record.free_count = layout.SLOTS
            self.record.todo_begin = self.record.todo_end = self.record.recovering = 0
            self._dbbuf = None
            self.record.shadow = self.record.events = 0
            self.record.write_through = 0

    @contextlib.asynccontextmanager
    async def _refusing_dma(self) -> AsyncIterator[None]:
        """The client may wait for us inside, and then it answers no DMA message (dpu.dma)."""
        self.closing = True
        self.refuse_dma(True)
        try:
            yield
        finally:
            self.closing = False
            self.refuse_dma(False)

    def set_dbbuf(self, shadow_iova: int, event_idx_iova: int, reopened: bool = False) -> None:
        self._dbbuf = (shadow_iova, event_idx_iova)
        self._resolve_dbbuf()
        if reopened:  # what the guest wrote to the shadows while no worker looked is newer than the registers
            return
        if self.record.shadow == 0:
            self._dbbuf = None
            raise DmaFault(shadow_iova, layout.PAGE)
        # A queue that is in use already goes on from where it is.
        for index in range(2, 2 * layout.QUEUES):
            if self.entries_of(index):
                store_u32(int(self.record.shadow) + 4 * index, int(self.doorbells[index]))
                store_u32(int(self.record.events) + 4 * index, int(self.doorbells[index]))

    def _resolve_dbbuf(self) -> None:
        """Host addresses of the two buffers; while they are unmapped the queues rest."""
        shadow = events = 0
        if self._dbbuf is not None:
            with contextlib.suppress(DmaFault):
                shadow = self.memory.find(self._dbbuf[0], layout.PAGE, DMA_READ | DMA_WRITE)
                events = self.memory.find(self._dbbuf[1], layout.PAGE, DMA_WRITE)
        self.record.shadow, self.record.events = (shadow, events) if events else (0, 0)

    def set_mapped(self, mapped: bool) -> None:
        """Whether the client writes to the doorbell page by itself."""
        self.record.mapped = int(mapped)
        self.poller.wake()

    def set_mask(self, intms: int) -> None:
        """INTMS is for pin and MSI interrupts; with MSI-X the host does not use it (Base 3.1.3.3).

        What came while a vector was masked is told when it no longer is.
        """
        if not self.maskable:
            return
        before, self._masked = self._masked, {vector for vector in range(32) if intms >> vector & 1}
        self._publish_vectors()
        for vector in before - self._masked:
            if self.live(vector):
                self.signal(vector)

    def signal(self, vector: int) -> None:
        """Fire a vector, if it is connected and not masked."""
        fd = self._connected[vector]
        if fd >= 0 and vector not in self._masked:
            with contextlib.suppress(BlockingIOError):  # it holds more events than can be counted: it is signalled
                os.eventfd_write(fd, 1)

    def set_write_through(self, on: bool) -> None:
        """As DataPlane's; writes that were fetched before are not waited for."""
        self.record.write_through = int(on)

    async def flush(self) -> None:
        """Every write that has completed is durable when this returns."""
        async with self.quiet(control=not self.remote):
            pass
        fds = {int(row.fd) for row in self.namespaces if row.kind == layout.KIND_FILE}
        for fd in fds:
            await asyncio.to_thread(_sync, fd)
        for volume in self.volumes():
            with contextlib.suppress(OSError):
                await volume.store.commit(volume.number)

    def complete(self, token: int, completion: Completion) -> None:
        self.pending.append((token, completion))

    def counters(self, nsid: int) -> Counters:
        rows = self.spaces if nsid == BROADCAST_NSID else self.spaces[nsid - 1 : nsid]
        return Counters(
            reads=int(rows.reads.sum()),
            writes=int(rows.writes.sum()),
            bytes_read=int(rows.bytes_read.sum()),
            bytes_written=int(rows.bytes_written.sum()),
            media_errors=int(rows.media_errors.sum()),
        )

    # ------------------------------------------------------------------------------------------------ namespaces

    def set_namespace(self, nsid: int, backend: Backend, block_size: int = 0) -> None:
        """Serve ``backend`` as ``nsid``, which was absent, in blocks of so many bytes (0: its own).

        The kind is stored last.
        """
        block_size = block_size or backend.block_size
        row = self.namespaces[nsid - 1]
        row.shift, row.blocks = block_size.bit_length() - 1, backend.size_bytes // block_size
        row.readonly, row.discard = int(backend.readonly), int(backend.supports_discard)
        row.fd, row.direct_fd, row.host = backend.fd, -1, 0
        self._backends[nsid] = backend
        self.set_marks(nsid)
        kind = layout.KIND_NULL
        if isinstance(backend, MemoryBackend):
            kind, row.host = layout.KIND_MEMORY, self._memory_of(backend)
        elif isinstance(backend, FileBackend):
            kind, row.align = layout.KIND_FILE, backend.dio_align_bytes - 1
            # Without the right to write there is no lock to fence requests of a killed worker with (dpu.worker).
            row.direct_fd = -1 if backend.readonly else backend.direct_fd
        elif backend.kind is Kind.VOLUME:
            volume = cast(VolumeNamespace, backend)
            if volume.area.newcomers is not None:
                self.hold(True)
                volume.area.newcomers.append(self)
            kind, row.group = layout.KIND_VOLUME, volume.area.address
            row.volume = volume.area.volume_address(volume.number)
        row.threads = self._threads(nsid, kind)
        row.kind = kind

    def _threads(self, nsid: int, kind: int) -> int:
        if self.remote:
            return layout.WHY_UNSHARED
        files = kind == layout.KIND_FILE
        if kind == layout.KIND_VOLUME:
            files = bool(self.volume(nsid).area.local[0].durable)
        return layout.WHY_NO_URING if files and self.poller.ring.fd < 0 else 0

    def nsids_of(self, backend: Backend) -> list[int]:
        """The namespaces that are on a back end now."""
        live = np.nonzero(self.namespaces["kind"])[0] + 1
        return [int(nsid) for nsid in live if self._backends[int(nsid)] is backend]

    def set_size(self, nsid: int) -> None:
        """The back end has another size, or is read-only now; inside ``quiet``."""
        row, backend = self.namespaces[nsid - 1], self._backends[nsid]
        row.blocks, row.readonly = backend.size_bytes >> int(row.shift), int(backend.readonly)

    def volume(self, nsid: int) -> VolumeNamespace:
        """The back end of a namespace that is a volume."""
        return cast(VolumeNamespace, self._backends[nsid])

    def volumes(self) -> list[VolumeNamespace]:
        """Those of all namespaces that are served now."""
        live = np.nonzero(self.namespaces["kind"] == layout.KIND_VOLUME)[0]
        return [self.volume(int(index) + 1) for index in live]

    def set_trace(self, on: bool) -> None:
        """Trace this controller's commands, or no longer. The poller has a trace area."""
        if on:
            self._trace_slots[:] = 0
        self._poke(_TRACE, _at(self._trace_slots) if on else 0)

    def stamp(self, slot: int, name: str) -> None:
        """Note for the trace when control has taken or answered a command."""
        if self.record.tracing:
            self._trace_slots[slot][name] = now()

    def set_marks(self, nsid: int) -> None:
        """Tell the poller where the marks of a namespace's back end are, once it has some."""
        row, marks = self.namespaces[nsid - 1], self._backends[nsid].marks
        row.mark_pages, row.marks = (marks.pages, marks.blocks) if marks is not None else (0, 0)

    def unrecoverable(self, nsid: int, lba: int, count: int, limit: int) -> list[tuple[int, int]]:
        marks = self._backends[nsid].marks
        return marks.ranges(lba, count, limit) if marks is not None else []

    def serves(self, nsid: int) -> tuple[int, int] | None:
        """Blocks, and bytes of a block, of an active namespace."""
        row = self.namespaces[nsid - 1]
        return None if row.kind == layout.KIND_ABSENT else (int(row.blocks), 1 << int(row.shift))

    async def clear_namespace(self, nsid: int) -> None:
        """Stop serving ``nsid``; when this returns nothing uses its back end.

        Commands that wait at its gates then find that it is gone.
        """
        async with self.quiet():
            self.namespaces[nsid - 1].kind = layout.KIND_ABSENT
            waiting = self._take_waiting(self.inflight["sqe"]["nsid"] == nsid)
            self._leave_gates(nsid)
            for slot in waiting:
                self.poller.update(self.index, slot)

    # ----------------------------------------------------------------------------- commands that wait at their gates

    def add_gate(self, nsid: int, address: int, place: int) -> None:
        """Have commands of a namespace pass one more gate (dpu.fastpath.gate); ``place``: -1 takes no turns."""
        flow = self._flows[nsid - 1]
        count = int(flow.gates)
        assert count < layout.FLOW_GATES_MAX, nsid
        flow[f"gate{count}"], flow[f"place{count}"] = address, place
        flow.gates = count + 1
        self._poke(_FLOWS, _at(self._flows))

    def gates_of(self, nsid: int) -> list[tuple[int, int]]:
        """(address, place) of the gates of a namespace."""
        flow = self._flows[nsid - 1]
        return [(int(flow[f"gate{i}"]), int(flow[f"place{i}"])) for i in range(int(flow.gates))]

    def _leave_gates(self, nsid: int) -> None:
        passed = self.gates_of(nsid)
        self._flows[nsid - 1].gates = 0
        for address, place in passed:
            self.leave_gate(address, place)

    def _take_waiting(self, wanted: Any) -> list[int]:
        """Inside ``quiet``: slots of commands that wait, of those that are ``wanted``; they do no longer."""
        table = self.inflight
        waiting = (table["state"] == layout.FETCHED) & (table["where"] == layout.WHERE_HEAP)
        slots = [int(slot) for slot in np.nonzero(waiting & wanted)[0]]
        for slot in slots:
            table[slot].where = layout.WHERE_ASIC
        for nsid in {int(table[slot].sqe.nsid) for slot in slots}:
            flow = self._flows[nsid - 1]
            for line in ("read", "write"):
                self._relink(flow, line)
            if not flow.read_head and not flow.write_head:
                flow.due = 0
                for address, place in self.gates_of(nsid):
                    if place >= 0:
                        store_u64(address + layout.GATE_WAITING + 8 * place, 0)
        return slots

    def _relink(self, flow: Any, line: str) -> None:
        """Leave out of a line who no longer waits."""
        link, kept = int(flow[f"{line}_head"]), []
        while link:
            if self.inflight[link - 1].where == layout.WHERE_HEAP:
                kept.append(link)
            link = int(self._links[link - 1])
        for one, following in zip(kept, [*kept[1:], 0]):
            self._links[one - 1] = following
        flow[f"{line}_head"], flow[f"{line}_tail"] = (kept[0], kept[-1]) if kept else (0, 0)

    async def release(self, rule: int) -> int:
        """Let go what a rule of the gates holds or delays; how many commands."""
        table = self.inflight
        verdicts = table["verdict"]
        mine = (verdicts & layout.VERDICT_RULE == rule) & (verdicts & layout.VERDICT_ADMITTED != 0)
        if not np.any(mine & (table["where"] == layout.WHERE_HEAP)):
            return 0
        async with self.quiet():
            slots = self._take_waiting(
                (table["verdict"] & layout.VERDICT_RULE == rule) & (table["verdict"] & layout.VERDICT_ADMITTED != 0)
            )
            for slot in slots:
                table[slot].verdict &= ~(layout.VERDICT_RULE | layout.VERDICT_CONTROL)
                self.poller.update(self.index, slot)
        return len(slots)

    def freeze(self) -> None:
        """Do nothing any more until a reset: the controller has failed."""
        self._frozen = True
        self._poke(_HOLD, 1)

    def _end(self, slot: int, status: Status) -> None:
        """Complete a command that control has taken from where it waited."""
        entry = self.inflight[slot]
        entry.status, entry.dw0 = status.field(), 0
        entry.state = layout.EXECUTED
        self.poller.update(self.index, slot)

    async def abort(self, sqid: int, cid: int) -> bool:
        """Complete an I/O command that waits at a gate with Command Abort Requested; whether there was one."""
        table = self.inflight
        if not np.any((table["where"] == layout.WHERE_HEAP) & (table["sqid"] == sqid) & (table["sqe"]["cid"] == cid)):
            return False
        async with self.quiet():
            slots = self._take_waiting((table["sqid"] == sqid) & (table["sqe"]["cid"] == cid))
            for slot in slots:
                self._end(slot, Status.ABORT_REQUESTED)
        return bool(slots)

    # -------------------------------------------------------------------------------------------------- commands

    def sqe(self, slot: int) -> bytes:
        """The command in a slot."""
        return bytes(self.inflight[slot].sqe.tobytes())

    def finish(self, slot: int, completion: Completion) -> None:
        """Post the completion of a command that control had."""
        self.stamp(slot, "answered")
        entry = self.inflight[slot]
        entry.status, entry.dw0 = completion.status, completion.dw0
        entry.state = layout.EXECUTED
        self.poller.update(self.index, slot)

    def wants(self, slot: int) -> tuple[int, int, int]:
        """Why a command on a volume was handed over (WHY_*), and with WHY_SHARED which clusters, how many."""
        block = self._blocks[slot * layout.BLOCK_BYTES :][: layout.BLOCK.itemsize].view(layout.BLOCK)[0]
        return int(block["why"]), int(block["first"]), int(block["clusters"])

    def asks_for(self, slot: int) -> VolumeNamespace | None:
        """The volume of a command that is not control's to carry out: see dpu.nvme.io.see_to."""
        entry = self.inflight[slot]
        asked = (layout.WHY_ROOM, layout.WHY_SHARED, layout.WHY_COMMIT)
        if self.wants(slot)[0] not in asked or entry.sqe.opcode == NvmOpcode.FLUSH:
            return None
        if entry.verdict & layout.VERDICT_CONTROL:
            return None
        return self.volume(int(entry.sqe.nsid))

    def again(self, slot: int) -> None:
        """Have a command that control had executed from its beginning."""
        self.stamp(slot, "answered")
        self.poller.update(self.index, slot)

    def hold(self, on: bool) -> None:
        """As inside of ``quiet``, without waiting for it: for one that comes while others are quiet."""
        self._holds += 1 if on else -1
        self._release()

    def recover(self, done: dict[int, Completion]) -> list[int]:
        """Before ``begin``, on state that another worker left: prepare its commands for asic.finish_todo.

        ``done``: results that were saved and may not have been posted, by ``sequence``. Returns the slots of admin
        commands that control must execute again, in their order. The queues are open already.
        """
        busy = [int(slot) for slot in np.nonzero(self.inflight["state"] != layout.FREE)[0]]
        # A POSTING entry's completion may have been seen already: nothing else may take its place in the CQ.
        busy.sort(key=lambda s: (self.inflight[s].state != layout.POSTING, int(self.inflight[s].sequence)))
        todo, again = [], []
        for slot in busy:
            entry = self.inflight[slot]
            sq = self.sqs[entry.sqid]
            cq = self.cqs[sq.cqid]
            sq.fetched = max(sq.fetched, entry.sq_count + 1)
            posted = entry.state == layout.POSTING and cq.posted > entry.cq_count
            if posted or not sq.live:
                entry.state = layout.FREE
                continue
            local = self.locals[entry.sqid]
            local.sq_outstanding += 1
            local.sq_head = sq.fetched % sq.entries
            if entry.where != layout.WHERE_PARKED:
                self.locals[sq.cqid].cq_outstanding += 1
            if entry.sqid == 0 and entry.state == layout.FETCHED:
                saved = done.get(int(entry.sequence))
                if saved is None:
                    again.append(slot)
                    continue
                entry.status, entry.dw0 = saved.status, saved.dw0
                entry.state = layout.EXECUTED
            todo.append(slot)
        self.record.sequence = max([int(self.inflight[s].sequence) for s in busy] + [*done, 0]) + 1
        self._todo[: len(todo)] = todo
        self.record.todo_begin, self.record.todo_end, self.record.recovering = 0, len(todo), int(bool(todo))
        free = np.nonzero(self.inflight["state"] == layout.FREE)[0]
        self._free[: len(free)] = free
        self.record.free_count = len(free)
        return again

    async def settled(self) -> None:
        """After ``begin``: no command of the last worker is half done any more.

        What comes next may drop its commands (a reset, the end of the client), and a write that the last worker was
        cut in would stay so. Commands whose CQ is unmapped, and with it their data, had not been begun.
        """
        while self.record.recovering and not self.record.hold and self._unfinished():
            await asyncio.sleep(DRAIN_POLL_S)

    def _unfinished(self) -> bool:
        table = self.inflight
        mine = (table["state"] == layout.FETCHED) & (table["where"] == layout.WHERE_ASIC) & (table["sqid"] != 0)
        for slot in np.nonzero(mine)[0]:
            cq = self.cqs[self.sqs[table[slot].sqid].cqid]
            with contextlib.suppress(DmaFault):
                self.memory.find(cq.iova, cq.entries * 16, DMA_WRITE)
                return True
        return False


def _at(array: Any) -> int:
    return int(array.ctypes.data)


def _sync(fd: int) -> None:
    with contextlib.suppress(OSError):
        os.fdatasync(fd)
