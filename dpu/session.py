"""One client of the worker: its vfio-user device, its NVMe controller, and how both survive a worker.

A :class:`Client` is the ``Device`` that a vfio-user session serves. What the guest may rely on is committed to the
state area's store in one step before it is answered: the last message applied, PCI configuration, the controller,
and the results of admin commands that are about to be posted. A worker that is killed at any point leaves a state
from before or after that step, and the next one goes on from it (DESIGN rules 4 and 5).

Use: ``Client(worker, number, listener, socket_fd, subsystem)``; ``adopt`` for one that another worker served; then
``start``. Errors: none to the caller; a guest's mistakes are errnos and statuses.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dpu import layout
from dpu.channel import Health, Packet
from dpu.clock import RealClock
from dpu.dma import DmaMessages
from dpu.dma import View as MemoryView
from dpu.errors import DmaFault, VfioUserError
from dpu.faults import Mishap
from dpu.killpoint import killpoint
from dpu.namespaces import View
from dpu.nvme import io
from dpu.nvme.controller import Controller
from dpu.nvme.interfaces import Completion
from dpu.nvme.wire import NvmOpcode, Status
from dpu.plane import Plane
from dpu.remote import RemoteQueues
from dpu.vfio_user import wire
from dpu.vfio_user.pci_config import (
    BAR0_BYTES,
    CONFIG_BYTES,
    MSIX_PBA_BAR,
    MSIX_PBA_BYTES,
    MSIX_TABLE_BAR,
    MSIX_TABLE_BYTES,
    PciConfig,
)
from dpu.vfio_user.protocol import IrqInfo, RegionInfo, Session, Window
from dpu.vfio_user.wire import HeaderFlag, IrqFlag, RegionFlag

if TYPE_CHECKING:
    from dpu.target import Subsystem
    from dpu.worker import Worker

log = logging.getLogger(__name__)

_Completion = TypeVar("_Completion", Completion, Completion | None)

BAR0, CONFIG_REGION, REGIONS = 0, 7, 9
IRQ_MSI, IRQ_MSIX, IRQ_ERR, IRQ_REQ, IRQS = 1, 2, 3, 4, 5
BAD_DOORBELLS_LOGGED = 10  # per client: a guest must not fill the host's disk
FAULT = "fault"  # begins the reason of a failure that was asked for
_RW = RegionFlag.READ | RegionFlag.WRITE


def _check_eventfd(fd: int) -> None:
    """Take eventfds only, and never wait for one: a poller writes to it."""
    if os.readlink(f"/proc/self/fd/{fd}") != "anon_inode:[eventfd]":
        raise VfioUserError(errno.EINVAL, "an interrupt's descriptor is not an eventfd")
    os.set_blocking(fd, False)


class Client:
    """One connection, one controller."""

    def __init__(self, worker: Worker, number: int, listener: str, socket_fd: int, subsystem: Subsystem) -> None:
        self.worker = worker
        self.number = number
        self.listener = listener
        self.subsystem = subsystem
        self.socket_fd = socket_fd
        self._socket = socket.socket(fileno=socket_fd)
        self.vectors: dict[tuple[int, int], int] = {}
        self.applied = 0
        self.closed = False
        self._released = asyncio.Event()
        self._seq = 0
        self._bad_doorbells = 0
        self._changed = False
        self._dropped = False
        self._shadow = True
        self._messages: asyncio.Queue[Packet] = asyncio.Queue()
        self._admin: asyncio.Queue[int] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._io: set[asyncio.Task[None]] = set()

    def open(self, state_fd: int, bar_fd: int) -> None:
        """Make plane, controller and session; loads what an earlier worker committed."""
        self._fds = (state_fd, bar_fd)
        worker = self.worker
        self.plane = Plane(
            worker.poller_for(self.number),
            state_fd,
            bar_fd,
            self.socket_fd,
            worker.memory_of,
            self.subsystem.max_namespaces,
        )
        self.plane.record.client = self.number
        listener = self.subsystem.listeners[self.listener]
        self.view = View(worker.target, self.subsystem, listener.cntlid, self.number)
        self.plane.memory.allow_unsealed = listener.allow_unsealed_memory
        self.plane.maskable = listener.disable_msix
        self.irq, vectors = (IRQ_MSI, 1) if listener.disable_msix else (IRQ_MSIX, layout.VECTORS)
        self.pci = PciConfig(vectors, msix=not listener.disable_msix)
        self.controller = Controller(
            self.view, listener.cntlid, self.plane.memory, self.plane, RealClock(), vectors=vectors
        )
        self.session = Session(self)
        self.dma = DmaMessages(
            lambda raw: self.worker.channel.send("send", raw=raw, client=self.number), self.worker.generation
        )
        self.plane.refuse_dma, self.plane.late_writes = self.dma.refuse, self.dma.late_writes
        self.remote = RemoteQueues(self.plane, MemoryView(self.plane.memory, self.dma), self._fatal)
        self.regions = self._regions(mapped=False)
        eventfd = IrqFlag.EVENTFD
        counts = {self.irq: vectors, IRQ_ERR: 1, IRQ_REQ: 1}
        self.irqs: Sequence[IrqInfo] = [
            IrqInfo(i, counts.get(i, 0), eventfd if i in counts else 0) for i in range(IRQS)
        ]
        self.plane.leave_gate = worker.gates.leave
        for nsid, namespace in self.subsystem.by_nsid.items():
            if namespace.attached(listener.cntlid):
                self.serve(nsid)

    def serve(self, nsid: int) -> None:
        """Have the poller serve a namespace that it did not."""
        namespace = self.subsystem.by_nsid[nsid]
        self.plane.set_namespace(nsid, namespace.backend, namespace.block_size)
        self.open_gates()

    def open_gates(self) -> None:
        """Have commands pass the gates that their back ends have."""
        for nsid, namespace in self.subsystem.by_nsid.items():
            if not self.plane.serves(nsid):
                continue
            passed = {address for address, _ in self.plane.gates_of(nsid)}
            for backend in namespace.backend.stack():
                number = self.worker.target.gates.get(backend.name)
                if number is None or self.worker.gates.address(number) in passed:
                    continue
                if len(self.plane.gates_of(nsid)) == layout.FLOW_GATES_MAX:
                    log.warning("bdev %s: its limits and faults do not reach namespace %d", backend.name, nsid)
                else:
                    self.plane.add_gate(nsid, *self.worker.gates.enter(number))

    def _regions(self, *, mapped: bool) -> Sequence[RegionInfo]:
        bar0 = RegionInfo(BAR0, BAR0_BYTES, _RW)
        if mapped:
            doorbells = Window(layout.DOORBELLS_OFFSET, layout.BAR_BYTES)
            bar0 = RegionInfo(BAR0, BAR0_BYTES, _RW | RegionFlag.MMAP, (doorbells,), self._fds[1])
        rows = {
            BAR0: bar0,
            CONFIG_REGION: RegionInfo(CONFIG_REGION, CONFIG_BYTES, _RW),
        }
        if self.irq == IRQ_MSIX:
            rows[MSIX_TABLE_BAR] = RegionInfo(MSIX_TABLE_BAR, MSIX_TABLE_BYTES, _RW)
            rows[MSIX_PBA_BAR] = RegionInfo(MSIX_PBA_BAR, MSIX_PBA_BYTES, _RW)
        return [rows.get(i) or RegionInfo(i) for i in range(REGIONS)]

    def restore(self, version: bytes) -> None:
        """Take over from another worker, with guest memory and vectors in place already; before ``start``."""
        with self._served():
            self._restore(version)

    def _restore(self, version: bytes) -> None:
        if version:
            self.session.restore(version)
        data = self.plane.store.load()
        if not data:
            return
        saved = json.loads(data)
        self.applied = saved["applied"]
        self.pci.load(saved["pci"])
        if saved["remote"]:
            self.plane.set_remote(True)
        self.controller.load(saved["controller"])
        self.controller.reopen()
        if self.controller.fatal_reason.startswith(FAULT):
            self.plane.freeze()
        self._offer_shadow()
        self.controller.catch_up()
        done = {sequence: Completion(status, dw0) for sequence, status, dw0 in saved["done"]}
        for slot in self.plane.recover(done):
            self._admin.put_nowait(slot)

    def start(self, *, taking: bool) -> None:
        """Serve. ``taking``: the keeper has the next message, so the socket is not looked at before it came."""
        self.plane.attend(layout.ATTENTION_TAKEN if taking else layout.ATTENTION_NONE)
        self.plane.begin()
        for index, vector in self.vectors:
            if index == self.irq and self.plane.live(vector):  # the last worker may have died just before it did
                self.plane.signal(vector)
        self._tasks = [
            asyncio.create_task(self._guard(self._serve_messages())),
            asyncio.create_task(self._guard(self._serve_admin())),
            asyncio.create_task(self._guard(self.remote.serve())),
        ]
        self.remote.look()

    async def _guard(self, work: Any) -> None:
        """A fault of ours in one client's task ends the worker: the keeper and the next worker take it from there."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException:
            log.exception("client %d: fault", self.number)
            self.worker.health.words[Health.FAULT] = self.number
            os._exit(70)

    @contextlib.contextmanager
    def _served(self) -> Iterator[None]:
        """Whatever ends the worker inside is probably about this client (dpu.keeper)."""
        self.worker.health.words[Health.SERVING] = self.number
        try:
            yield
        finally:
            self.worker.health.words[Health.SERVING] = 0

    async def close(self) -> None:
        """Take the controller away from its poller and release everything that is the client's.

        Called again it returns when that is done.
        """
        if self.closed:
            await self._released.wait()
            return
        self.closed = True
        try:
            await self._close()
        finally:
            self._released.set()

    async def _close(self) -> None:
        await self.plane.settled()
        for task in self._tasks:  # not I/O: its threads use descriptors that must stay until they have ended
            task.cancel()
        self.dma.refuse(True)
        await asyncio.gather(*self._tasks, *self._io, return_exceptions=True)
        await self.plane.close()
        self._socket.close()
        for fd in [*self.vectors.values(), *self._fds]:
            os.close(fd)
        while not self._messages.empty():
            self._messages.get_nowait().close()

    # -------------------------------------------------------------------------------------------------- committing

    def commit(self, done: Sequence[tuple[int, Completion]] = ()) -> None:
        """Save everything, with the results of ``done`` (slot, completion) and of parked commands, then post."""
        finished = [*done, *self.plane.pending]
        self.plane.pending.clear()
        rows = [(int(self.plane.inflight[slot].sequence), c.status, c.dw0) for slot, c in finished]
        killpoint("admin_before_save")
        document = {
            "applied": self.applied,
            "nqn": self.subsystem.nqn,
            "remote": self.plane.remote,
            "pci": self.pci.dump(),
            "controller": self.controller.dump(),
            "done": rows,
        }
        self.plane.store.commit(json.dumps(document, separators=(",", ":")).encode())
        killpoint("admin_after_save")
        for slot, completion in finished:
            self.plane.finish(slot, completion)
        if finished:
            killpoint("admin_after_post")

    # -------------------------------------------------------------------------------------------------- vfio-user

    def message(self, packet: Packet) -> None:
        """A message that the keeper has taken."""
        if wire.Header.from_buffer_copy(packet.raw).flags & HeaderFlag.TYPE_MASK == HeaderFlag.REPLY:
            packet.close()
            self.dma.reply(packet.raw)
            self._answer(packet.fields["seq"], b"")
        else:
            self._messages.put_nowait(packet)

    def _answer(self, seq: int, reply: bytes, fds: Sequence[int] = ()) -> None:
        """Have the keeper send a reply (b"": only be done with the message), and look at the socket again."""
        self.worker.channel.send("reply", raw=reply, fds=fds, client=self.number, seq=seq)
        self.plane.attend(layout.ATTENTION_NONE)

    async def _serve_messages(self) -> None:
        await self.plane.settled()
        while True:
            packet = await self._messages.get()
            self._seq = packet.fields["seq"]
            self._changed = False
            replayed = self._seq <= self.applied
            with self._served():
                reply = await self.session.handle(packet.raw, packet.fds, replayed=replayed)
            if self._changed:
                self.applied = self._seq
                self.commit()
            killpoint("before_reply")
            self._answer(self._seq, reply, self.session.reply_fds)

    def negotiated(self, *, has_json: bool) -> None:
        """Choose how doorbells come: see dpu.target.Transport."""
        transport = self.worker.target.transport
        assert transport is not None, "a listener needs a transport"
        mapped = transport.maps_doorbells(has_json=has_json)
        self.regions = self._regions(mapped=mapped)
        self.plane.set_mapped(mapped)
        self._shadow = not (mapped or transport.disable_shadow_doorbells)
        self._offer_shadow()
        limit = (self.session.capabilities or {}).get("max_data_xfer_size")
        if isinstance(limit, int) and limit > 0:
            self.dma.size_max = min(limit, wire.DATA_BYTES_MAX)

    def _offer_shadow(self) -> None:
        """Not beside a doorbell page that is memory already, nor in memory that is not shared."""
        self.controller.shadow_doorbells = self._shadow and not self.plane.remote

    async def region_read(self, region: int, offset: int, count: int) -> bytes:
        if region == CONFIG_REGION:
            return self.pci.read(offset, count)
        if region == BAR0 and offset < layout.DOORBELLS_OFFSET:
            return self.controller.register_read(offset, count)
        # Doorbells read as zero; QEMU keeps the MSI-X table and the pending bits by itself.
        return bytes(count)

    async def region_write(self, region: int, offset: int, data: bytes, replayed: bool) -> None:
        if region == BAR0 and offset >= layout.DOORBELLS_OFFSET:
            self._write_doorbells(offset - layout.DOORBELLS_OFFSET, data)
            return
        if replayed:
            return
        if region == CONFIG_REGION:
            self._changed = True
            if self.pci.write(offset, data):
                await self.reset(False)
        elif region == BAR0:
            self._changed = True
            await self.controller.register_write(offset, data)
            self._offer_shadow()

    def _write_doorbells(self, offset: int, data: bytes) -> None:
        """A doorbell that came as a message with a reply; its store may be repeated."""
        if offset % 4 or len(data) % 4 or offset + len(data) > layout.BAR_BYTES:
            return
        for i, (value,) in enumerate(struct.iter_unpack("<I", data)):
            at = offset // 4 + i
            self.plane.doorbells[at] = value
            entries = self.plane.entries_of(at)
            if value >= entries and self.plane.sqs[0].live:
                self._bad_doorbell(layout.BAD_DOORBELL_VALUE if entries else layout.BAD_DOORBELL_REGISTER, at)
        self.plane.poller.wake()
        self.remote.look()

    def _bad_doorbell(self, kind: int, index: int) -> None:
        self._bad_doorbells += 1
        if self._bad_doorbells <= BAD_DOORBELLS_LOGGED:
            log.warning("client %d: invalid write of doorbell %d", self.number, index)
        self.controller.doorbell_error(index // 2, no_queue=kind == layout.BAD_DOORBELL_REGISTER)
        self._changed = True

    async def dma_map(self, iova: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        await self.plane.dma_map(iova, size, flags, offset, fd)
        self.remote.look()
        killpoint("mid_dma_map")

    async def dma_unmap(self, iova: int, size: int) -> None:
        await self.plane.dma_unmap(iova, size)

    async def set_irqs(self, index: int, start: int, count: int, fds: Sequence[int] | None) -> None:
        if fds is None and count == 0:
            changed = {key: -1 for key in self.vectors if key[0] == index}
        else:
            for fd in fds or ():
                _check_eventfd(fd)
            given = [-1] * count if fds is None else [os.dup(fd) for fd in fds]
            changed = {(index, start + i): fd for i, fd in enumerate(given)}
        old = [self.vectors.pop(key) for key in changed if key in self.vectors]
        for (_, vector), fd in changed.items():
            if fd >= 0:
                self.vectors[index, vector] = fd
            if index == self.irq:
                self.plane.set_vectors(vector, [fd])
        # It may be about to write to one of them; and a completion that came while its vector was not connected
        # (QEMU disconnects all of them to add one) is told now.
        await self.plane.poller.grace()
        for (_, vector), fd in changed.items():
            if index == self.irq and fd >= 0 and self.plane.live(vector):
                self.plane.signal(vector)
        for fd in old:
            os.close(fd)

    def adopt_vector(self, index: int, vector: int, fd: int) -> None:
        """A vector that was connected before this worker; takes ``fd``."""
        os.set_blocking(fd, False)
        self.vectors[index, vector] = fd
        if index == self.irq:
            self.plane.set_vectors(vector, [fd])

    async def reset(self, replayed: bool) -> None:
        if not replayed:
            self._changed = True
            self.pci.reset()
            await self.controller.reset()

    # ------------------------------------------------------------------------------------------------------- NVMe

    def look(self) -> None:
        """What the poller wants of control, apart from commands: called whenever it has woken control."""
        record = self.plane.record
        if record.attention == layout.ATTENTION_WANTED:
            self.plane.attend(layout.ATTENTION_TAKEN)
            if self.plane.remote and self._take_replies():
                self.plane.attend(layout.ATTENTION_NONE)
            else:
                self.worker.channel.send("take", client=self.number)
        if self.plane.memory.lost and not self._dropped:
            self._drop("its memory was taken away: the file behind it was truncated, or has no room")
        bad = int(record.bad_doorbell)
        if bad:
            record.bad_doorbell = 0
            self._bad_doorbell(bad >> 32, bad & 0xFFFFFFFF)
            self.commit()
        self.remote.look()

    def _take_replies(self) -> bool:
        """Take replies to DMA messages at the head of the stream; whether there is nothing else for now.

        As with doorbells, what was peeked at is consumed when it has been used. A worker that dies in between leaves
        it to the next one, which knows it for an old one. A message in parts is left to the keeper.
        """
        peek = socket.MSG_PEEK | socket.MSG_DONTWAIT
        while True:
            try:
                header = wire.Header.from_buffer_copy(self._socket.recv(wire.HEADER_BYTES, peek))
                if (
                    header.flags & HeaderFlag.TYPE_MASK != HeaderFlag.REPLY
                    or header.msg_size > wire.MESSAGE_BYTES_MAX
                ):
                    return False
                raw = self._socket.recv(header.msg_size, peek)
            except BlockingIOError:
                return True
            except (OSError, ValueError):  # its end, or less than a header
                return False
            if len(raw) < header.msg_size or header.msg_size < wire.HEADER_BYTES:
                return False
            self.dma.reply(raw)
            self._socket.recv(header.msg_size, socket.MSG_DONTWAIT)

    def _drop(self, reason: str) -> None:
        """End the connection; "gone" follows."""
        self._dropped = True
        log.error("client %d is dropped: %s", self.number, reason)
        self.worker.channel.send("drop", client=self.number, reason=reason)

    def missed(self, slot: int) -> None:
        """A command that the poller handed over."""
        if self.plane.inflight[slot].sqid == 0:
            self._admin.put_nowait(slot)
            return
        # Counted from here on, so that no reset passes between this and the task's first step.
        self.plane.with_control += 1
        task = asyncio.create_task(self._guard(self._serve_io(slot, self.plane.generation)))
        self._io.add(task)
        task.add_done_callback(self._served_io)

    def _served_io(self, task: asyncio.Task[None]) -> None:
        self.plane.with_control -= 1
        self._io.discard(task)

    async def _serve_admin(self) -> None:
        while True:
            slot = await self._admin.get()
            entry = self.plane.inflight[slot]
            if entry.state != layout.FETCHED or entry.sqid != 0:
                continue  # a controller reset has dropped it
            self.plane.stamp(slot, "taken")
            generation, sequence = self.plane.generation, int(entry.sequence)
            with self._served():
                completion = await self._execute_admin(slot)
            if self.plane.generation != generation or entry.sequence != sequence:
                continue
            self.commit([] if completion is None else [(slot, completion)])

    async def _execute_admin(self, slot: int) -> Completion | None:
        sqe = self.plane.sqe(slot)
        self.view.sequence = int(self.plane.inflight[slot].sequence)
        if not self.plane.remote:
            self.controller.memory = self.plane.memory
            return await self.controller.execute(slot, sqe)
        self.controller.memory = view = MemoryView(self.plane.memory, self.dma)
        return await self._flushed(view, await view.run(lambda: self.controller.execute(slot, sqe)))

    async def _serve_io(self, slot: int, generation: int) -> None:
        """An I/O command that the poller does not do, or cannot."""
        self.plane.stamp(slot, "taken")
        sqe = self.plane.sqe(slot)
        if sqe[0] == NvmOpcode.WRITE_UNCORRECTABLE:
            self.worker.prepare_marks(self.subsystem, int(self.plane.inflight[slot].sqe.nsid))
        mishap = self._mishap(slot)
        if self.controller.fatal_reason.startswith(FAULT):
            return
        durable = bool(self.plane.record.write_through)
        completion: Completion | None
        with self._served():
            if (volume := self.plane.asks_for(slot)) is not None:
                completion = await io.see_to(volume, self.plane.poller.number, *self.plane.wants(slot))
            elif self.plane.remote:
                view = MemoryView(self.plane.memory, self.dma)
                work = partial(io.execute, sqe, view, self.subsystem, durable, mishap)
                completion = await self._flushed(view, await view.run(work))
            else:
                completion = await io.execute(sqe, self.plane.memory, self.subsystem, durable, mishap)
        if self.plane.generation != generation:
            return
        if completion is None:
            self.plane.again(slot)
            return
        self.plane.finish(slot, completion)
        if sqe[0] == NvmOpcode.WRITE_UNCORRECTABLE:
            self.controller.unrecoverable_found()
            self.commit()

    @staticmethod
    async def _flushed(view: MemoryView, completion: _Completion) -> _Completion | Completion:
        """The completion when the guest has the data."""
        try:
            await view.flush()
            killpoint("data_stored")
        except DmaFault:
            return Completion(Status.DATA_TRANSFER_ERROR.field())
        return completion

    def _mishap(self, slot: int) -> Mishap | None:
        """What a fault does to the data of a command; the end of the controller takes place here."""
        entry = self.plane.inflight[slot]
        verdict, nsid = int(entry.verdict), int(entry.sqe.nsid)
        if not verdict & layout.VERDICT_CONTROL:
            return None
        fault = self.worker.target.fault_of_rule(verdict & layout.VERDICT_RULE)
        if fault is None or nsid not in self.subsystem.by_nsid:
            return None
        if fault.action == "fatal":
            self.fail(fault.name)
            return None
        return fault.mishap(verdict >> layout.VERDICT_MATCH_SHIFT, self.subsystem.block_size(nsid))

    def fail(self, why: str) -> None:
        """As was asked for: the controller does nothing any more until it is reset."""
        self.plane.freeze()
        self.controller.internal_error(persistent=True)
        self._fatal(f"{FAULT} {why}")

    def _fatal(self, reason: str) -> None:
        """The controller cannot go on without a reset (CSTS.CFS)."""
        if self.controller.fatal_reason:  # said already: a client must not fill the host's disk
            return
        log.error("client %d: controller failed: %s", self.number, reason)
        self.controller.fatal(reason)
        self.commit()

    def failed(self, record: Any) -> None:
        """An I/O command that ended with an error, for the error log."""
        self.controller.record_error(
            int(record.sqid), int(record.cid), int(record.status), int(record.nsid), int(record.lba)
        )
        if int(record.status) & 0x7FF == Status.INTERNAL_ERROR:
            self.controller.internal_error(persistent=False)
            self.commit()

    @property
    def hung_up(self) -> bool:
        """Whether the peer has closed the connection, though its last messages may not have been read yet."""
        poll = select.poll()
        poll.register(self.socket_fd, select.POLLRDHUP)
        return self.closed or bool(poll.poll(0))

    def describe(self) -> dict[str, Any]:
        """The row of nvmf_subsystem_get_controllers."""
        pairs = sum(1 for qid in range(1, layout.QUEUES) if self.plane.sqs[qid].live)
        return {
            "subnqn": self.subsystem.nqn,
            "cntlid": self.controller.cntlid,
            "hostnqn": "",
            "hostid": "00000000-0000-0000-0000-000000000000",
            "num_io_qpairs": pairs,
        }

    def stats(self) -> dict[str, Any]:
        """Counters, stage times and latency histogram of each live queue, for dpu_get_stats."""
        queues = []
        for qid in range(layout.QUEUES):
            sq, cq = self.plane.sqs[qid], self.plane.cqs[qid]
            if not sq.live:
                continue
            histogram = self.plane.histograms[qid]
            used = np.nonzero(histogram)[0]
            names = ("commands", "punts", "errors", "bytes_read", "bytes_written")
            row: dict[str, Any] = {name: int(sq[name]) for name in names}
            row |= {"sqid": qid, "entries": int(sq.entries), "epoch": int(sq.epoch), "fetched": int(sq.fetched)}
            row["signals"] = int(cq.signals)
            row["wait_ns"] = self.plane.poller.to_ns(int(sq.ticks_wait))
            row["serve_ns"] = self.plane.poller.to_ns(int(sq.ticks_serve))
            row["latency"] = [[layout.bucket_floor_ns(int(i)), int(histogram[i])] for i in used]
            queues.append(row)
        return {
            "nqn": self.subsystem.nqn,
            "cntlid": self.controller.cntlid,
            "state": self.controller.state.value,
            "shadow_doorbells": bool(self.plane.record.shadow),
            "mapped_doorbells": bool(self.plane.record.mapped),
            "shared_memory": not self.plane.remote,
            "queues": queues,
        }
