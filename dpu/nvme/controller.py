"""One NVMe I/O controller: registers, state, queues, admin commands (NVMe 2.0), without I/O.

Use::

    controller = Controller(subsystem, cntlid, memory, plane, clock)
    await controller.register_write(0x14, cc)          # what the host writes below 1000h
    completion = await controller.execute(token, sqe)  # what it submits on the admin queue; None = parked
    state = controller.dump()                          # JSON-able; another worker: load(state), reopen()

State (CC.EN, CSTS.RDY, .CFS and .SHST are views of it)::

    DISABLED --EN=1, registers good--> READY --SHN--> SHUT_DOWN
       ^        \\--registers bad----> FAILED <--fatal()-- (any enabled state)
       \\------------- EN=0 or reset() ------- (any)

A worker that is killed
    Every method changes state only after its last ``await``, up to its return: a dump taken at any moment is
    from before or from after a command, never from the middle. So the caller commits ``dump()`` together with
    the completions of that call (the returned one and those given to ``plane.complete``) in one step, then
    posts. Killed before that commit, the next worker loads the state from before the command and executes it
    again, which gives the same answer, because ``execute`` depends on nothing but state and guest memory:

    * Create: the plane may have opened the queue already; the repeated open carries the same epoch and so finds
      the queue as it was. After a reset in between, the admin queue takes that epoch, so no I/O queue can.
    * Delete: the plane may have closed the queue already; ``reopen`` opens it with its old epoch, so its head
      and phase are kept and nothing is fetched twice; the repeated command closes it again.
    * CC.EN = 0: as Delete, for all queues.
    * Get Log Page (RAE 0), Set Features, Abort, Asynchronous Event Request: state only; a request that was
      saved as parked and is executed again stays parked once.

Limits: IO_QUEUES I/O queue pairs, MQES, MDTS and vectors from ``dpu.layout``; 4 KiB pages; no SGL, no metadata.
Errors: a guest's mistake is a status (``CommandError`` inside) or CSTS.CFS; nothing a guest does raises.
Source: Base 3.1.3 (registers), 3.5 (initialisation), 3.6 (shutdown), 3.7 (resets).
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final

from dpu.clock import Clock
from dpu.errors import DmaFault
from dpu.layout import VECTORS
from dpu.nvme import admin, registers
from dpu.nvme.errorlog import NO_CID, ErrorLog
from dpu.nvme.errors import CommandError
from dpu.nvme.events import AsyncEvents, Event
from dpu.nvme.features import (
    CRITICAL_WARNING_TEMPERATURE,
    FeatureValues,
    critical_warning,
    temperature_event_wanted,
)
from dpu.nvme.interfaces import (
    Completion,
    DataPlane,
    GuestMemory,
    Life,
    NamespaceInfo,
    SubsystemView,
)
from dpu.nvme.lbastatus import LbaStatusLog
from dpu.nvme.wire import (
    FLAGS_FUSE,
    FLAGS_LOCATION,
    FLAGS_PSDT,
    NO_LOCATION,
    NSID_LOCATION,
    PAGE_BYTES,
    Status,
    SubmissionEntry,
)

_DUMP_VERSION: Final = 1


class State(enum.Enum):
    """See the module's docstring."""

    DISABLED = "disabled"
    READY = "ready"
    SHUT_DOWN = "shut down"
    FAILED = "failed"


@dataclass(frozen=True)
class CompletionQueue:
    """A live completion queue; ``entries`` is 1's based."""

    qid: int
    entries: int
    iova: int
    vector: int
    interrupts: bool
    epoch: int


@dataclass(frozen=True)
class SubmissionQueue:
    """A live submission queue; ``entries`` is 1's based."""

    qid: int
    entries: int
    iova: int
    cqid: int
    epoch: int


class Controller:
    """The control half of one controller; ``plane`` is the other half.

    :param subsystem: where it belongs to and what namespaces there are
    :param cntlid: its CNTLID, unique in the subsystem
    :param memory: guest memory, for data of admin commands
    :param plane: the compiled stage that serves the queues
    :param clock: for Timestamp and power on hours
    :param vectors: interrupt vectors that the PCI function offers
    """

    commands: ClassVar = admin.COMMANDS

    _ready: bool
    _shut_down: bool

    def __init__(
        self,
        subsystem: SubsystemView,
        cntlid: int,
        memory: GuestMemory,
        plane: DataPlane,
        clock: Clock,
        vectors: int = VECTORS,
    ) -> None:
        self.subsystem = subsystem
        self.cntlid = cntlid
        self.memory = memory
        self.plane = plane
        self.clock = clock
        self.vectors = vectors
        self.shadow_doorbells = True  # whether they are offered: chosen with the connection, before its first command
        self.events = AsyncEvents(plane.complete)
        self.errors = ErrorLog(subsystem.life().errors)
        self.lba_status = LbaStatusLog()
        self.told = self._attributes()
        self.started_ns = clock.now_ns()
        self.fatal_reason = ""
        self._epoch = 0
        self._clear()
        self._aqa = self._asq = self._acq = self._cc = 0

    # Registers

    def register_read(self, offset: int, count: int) -> bytes:
        """``count`` bytes of BAR0 at ``offset`` (below 1000h). What is no register reads as zero."""
        image = bytearray(registers.REGISTERS_BYTES)
        values = {
            registers.CAP: registers.CAPABILITIES,
            registers.VS: registers.VERSION,
            registers.INTMS: self._intms,
            registers.INTMC: self._intms,
            registers.CC: self._cc,
            registers.CSTS: self._csts(),
            registers.AQA: self._aqa,
            registers.ASQ: self._asq,
            registers.ACQ: self._acq,
            registers.CRTO: registers.READY_TIMEOUTS,
        }
        for register, value in values.items():
            image[register.offset : register.offset + register.width] = value.to_bytes(register.width, "little")
        return bytes(image[offset : offset + count]).ljust(count, b"\0")

    async def register_write(self, offset: int, data: bytes) -> None:
        """Write 4 or 8 bytes at a multiple of 4; anything else is ignored, as are read-only registers.

        Base 3.1.3 leaves other accesses undefined. Returns when what was asked for has happened: CSTS is
        current with the next read.
        """
        if len(data) not in (4, 8):
            return
        for at in range(0, len(data), 4):
            writer = self._WRITERS.get(offset + at)
            if writer is not None:
                await writer(self, int.from_bytes(data[at : at + 4], "little"))

    def _csts(self) -> int:
        # Base 3.7.2: a reset is over, and memory is the host's again, when RDY is 0.
        return registers.CSTS.fields.encode(
            RDY=self._ready or self.plane.late_writes(),
            CFS=self.state is State.FAILED,
            SHST=registers.SHST_COMPLETE if self._shut_down else registers.SHST_NORMAL,
        )

    async def _write_cc(self, word: int) -> None:
        fields = registers.CC.fields
        word &= fields.mask()
        was_enabled = fields.get(self._cc, "EN")
        enabled = fields.get(word, "EN")
        if was_enabled and enabled:
            locked = fields.mask("CSS", "MPS", "AMS")  # change only while EN is 0
            word = word & ~locked | self._cc & locked
        disable = was_enabled and not enabled
        shut_down = fields.get(word, "SHN") in (registers.SHN_NORMAL, registers.SHN_ABRUPT)
        if disable:
            await self.plane.close_all()
        if shut_down and not self._shut_down:
            await self.plane.flush()
        # No await from here on: see "A worker that is killed".
        if disable:
            self._clear()
        if enabled and not was_enabled:
            self._enable(word)
        self._shut_down = self._shut_down or shut_down
        self._cc = word

    async def _write_intms(self, word: int) -> None:
        self._intms |= word
        self.plane.set_mask(self._intms)

    async def _write_intmc(self, word: int) -> None:
        self._intms &= ~word
        self.plane.set_mask(self._intms)

    # AQA, ASQ and ACQ "shall not be modified" while CC.EN is 1: ignored, so that they tell what is in use.

    async def _write_aqa(self, word: int) -> None:
        if not self._enabled:
            self._aqa = word & registers.AQA.fields.mask()

    async def _write_asq_low(self, word: int) -> None:
        if not self._enabled:
            self._asq = self._asq >> 32 << 32 | word

    async def _write_asq_high(self, word: int) -> None:
        if not self._enabled:
            self._asq = self._asq & 0xFFFFFFFF | word << 32

    async def _write_acq_low(self, word: int) -> None:
        if not self._enabled:
            self._acq = self._acq >> 32 << 32 | word

    async def _write_acq_high(self, word: int) -> None:
        if not self._enabled:
            self._acq = self._acq & 0xFFFFFFFF | word << 32

    _WRITERS: ClassVar[dict[int, Callable[[Controller, int], Awaitable[None]]]] = {
        registers.INTMS.offset: _write_intms,
        registers.INTMC.offset: _write_intmc,
        registers.CC.offset: _write_cc,
        registers.AQA.offset: _write_aqa,
        registers.ASQ.offset: _write_asq_low,
        registers.ASQ.offset + 4: _write_asq_high,
        registers.ACQ.offset: _write_acq_low,
        registers.ACQ.offset + 4: _write_acq_high,
    }

    # State

    @property
    def state(self) -> State:
        if self.fatal_reason:
            return State.FAILED
        if self._shut_down:
            return State.SHUT_DOWN
        return State.READY if self._ready else State.DISABLED

    @property
    def _enabled(self) -> bool:
        return bool(self.cc_field("EN"))

    def _enable(self, cc: int) -> None:
        """CC.EN from 0 to 1: open the admin queue, or set CFS when the registers do not allow it.

        A queue that was opened before the other one failed is closed with CC.EN = 0, which must follow.
        """
        self._shut_down = False
        self.fatal_reason = self._enable_obstacle(cc)
        if self.fatal_reason:
            return
        aqa = registers.AQA.fields
        try:
            self.open_cq(0, aqa.get(self._aqa, "ACQS") + 1, self._acq, 0, True)  # 0's based
            self.open_sq(0, aqa.get(self._aqa, "ASQS") + 1, self._asq, 0)  # 0's based
        except DmaFault as fault:
            self.fatal_reason = f"admin queue: {fault}"
            return
        self._ready = True

    def _enable_obstacle(self, cc: int) -> str:
        """Why the controller cannot be enabled with these registers ("" = it can)."""
        fields = registers.CC.fields
        checks = {
            "CC.EN was set before CSTS.RDY was 0": not self.plane.late_writes(),
            "CC.CSS is not supported": fields.get(cc, "CSS") == registers.CC_CSS_NVM,
            "CC.MPS is not within CAP.MPSMIN and CAP.MPSMAX": fields.get(cc, "MPS") == 0,
            "CC.AMS is not supported": fields.get(cc, "AMS") == 0,
            "AQA.ASQS is below 1": registers.AQA.fields.get(self._aqa, "ASQS") >= 1,
            "AQA.ACQS is below 1": registers.AQA.fields.get(self._aqa, "ACQS") >= 1,
            "ASQ is not page aligned": self._asq % PAGE_BYTES == 0,
            "ACQ is not page aligned": self._acq % PAGE_BYTES == 0,
        }
        return next((reason for reason, good in checks.items() if not good), "")

    def fatal(self, reason: str) -> None:
        """Set CSTS.CFS: the controller needs a reset. ``reason`` is for the operator's log."""
        assert reason
        self.fatal_reason = self.fatal_reason or reason

    async def reset(self) -> None:
        """PCI function or device reset: everything, the admin queue registers included (Base 3.7.2)."""
        await self.plane.close_all()
        self._clear()
        self._aqa = self._asq = self._acq = self._cc = 0

    def _clear(self) -> None:
        """Controller Level Reset (Base 3.7.2): AQA, ASQ, ACQ and the error log stay."""
        self.cqs: dict[int, CompletionQueue] = {}
        self.sqs: dict[int, SubmissionQueue] = {}
        self.features = FeatureValues(self.clock.now_ns())
        self.events.clear()
        self.lba_status.release()
        self.changed_namespaces: list[int] = []
        self.dbbuf: tuple[int, int] | None = None
        self.io_queues_created = False
        self.fatal_reason = ""
        self._ready = False
        self._shut_down = False
        self._intms = 0

    # Queues

    def cc_field(self, name: str) -> int:
        """A field of CC as the host wrote it."""
        return registers.CC.fields.get(self._cc, name)

    def open_cq(self, qid: int, entries: int, iova: int, vector: int, interrupts: bool) -> None:
        """Create a completion queue of ``entries`` (1's based). ``DmaFault`` if it is not mapped."""
        queue = CompletionQueue(qid, entries, iova, vector, interrupts, self._next_epoch())
        self.plane.open_cq(**asdict(queue))
        self.cqs[qid] = queue

    def open_sq(self, qid: int, entries: int, iova: int, cqid: int) -> None:
        """Create a submission queue of ``entries`` (1's based). ``DmaFault`` if it is not mapped."""
        queue = SubmissionQueue(qid, entries, iova, cqid, self._next_epoch())
        self.plane.open_sq(**asdict(queue))
        self.sqs[qid] = queue

    def set_dbbuf(self, shadow_iova: int, event_idx_iova: int) -> None:
        """Use shadow doorbells until the next reset. ``DmaFault`` if they are not mapped."""
        self.plane.set_dbbuf(shadow_iova, event_idx_iova)
        self.dbbuf = (shadow_iova, event_idx_iova)

    def _next_epoch(self) -> int:
        """A number for one creation of a queue. It never repeats in the life of the controller."""
        self._epoch += 1
        return self._epoch

    def reopen(self) -> None:
        """After ``load``: open every live queue on a new worker's plane, with the epochs that it knows them by.

        The plane must not refuse a queue that it knows because its memory is unmapped just now (firmware
        remaps RAM while queues live); if it does, the controller fails.
        """
        try:
            for cq in self.cqs.values():
                self.plane.open_cq(**asdict(cq))
            for sq in self.sqs.values():
                self.plane.open_sq(**asdict(sq))
            if self.dbbuf is not None:
                self.plane.set_dbbuf(*self.dbbuf, reopened=True)
        except DmaFault as fault:
            self.fatal(f"queue lost with the worker: {fault}")
        self.plane.set_mask(self._intms)
        self.plane.set_write_through(self.features.write_through)

    # Commands

    async def execute(self, token: int, sqe: bytes) -> Completion | None:
        """One admin command (64 bytes). One at a time.

        :param token: names the command in ``plane.complete`` if it is parked
        :returns: its completion, or None for a parked Asynchronous Event Request
        """
        entry = SubmissionEntry.from_buffer_copy(sqe)
        try:
            return await self._dispatch(token, entry)
        except CommandError as error:
            status = error.status.field(dnr=error.dnr, more=True)  # more: in the error log
            self.record_error(0, entry.cid, status, entry.nsid, 0, error.location)
            return Completion(status)

    async def _dispatch(self, token: int, sqe: SubmissionEntry) -> Completion | None:
        if not self._ready or self.fatal_reason:
            raise CommandError(Status.INTERNAL_ERROR, dnr=False)
        command = self.commands.get(sqe.opcode)
        if command is None:
            raise CommandError(Status.INVALID_OPCODE, location=0)
        if sqe.flags & (FLAGS_FUSE | FLAGS_PSDT):
            raise CommandError(Status.INVALID_FIELD, location=FLAGS_LOCATION)
        if sqe.nsid and not command.uses_nsid:
            raise CommandError(Status.INVALID_FIELD, location=NSID_LOCATION)
        return await command.handler(self, sqe, token)

    @property
    def parked_tokens(self) -> list[int]:
        """The tokens of the parked Asynchronous Event Requests."""
        return self.events.parked_tokens

    # Namespaces, events, errors

    def namespace(self, nsid: int) -> NamespaceInfo | None:
        """The active namespace ``nsid``, or None when it is valid but inactive.

        Invalid Namespace or Format for 0, FFFFFFFFh and everything above NN (Base 3.2.1.2).
        """
        if not 1 <= nsid <= self.subsystem.max_namespaces:
            raise CommandError(Status.INVALID_NAMESPACE_OR_FORMAT, location=NSID_LOCATION)
        return next((info for info in self.subsystem.namespaces() if info.nsid == nsid), None)

    def active_namespace(self, nsid: int) -> NamespaceInfo:
        """The active namespace ``nsid``; Invalid Field in Command when it is inactive (Base figure 87)."""
        info = self.namespace(nsid)
        if info is None:
            raise CommandError(Status.INVALID_FIELD, location=NSID_LOCATION)
        return info

    def _attributes(self) -> dict[int, tuple[int, int]]:
        """Of each active namespace what the host is told about when it changes."""
        return {info.nsid: (info.num_blocks, info.block_size) for info in self.subsystem.namespaces()}

    def namespace_changed(self, nsid: int) -> None:
        """Namespace ``nsid`` was attached, detached, resized or otherwise changed (Base figure 150)."""
        now = self._attributes()
        self.told.pop(nsid, None)
        if nsid in now:
            self.told[nsid] = now[nsid]
        if nsid not in self.changed_namespaces:
            self.changed_namespaces.append(nsid)
        if self.features.namespace_notices:
            self.events.raise_event(Event.NAMESPACE_ATTRIBUTE_CHANGED)

    def unrecoverable_found(self) -> None:
        """Blocks of a namespace have become unrecoverable: a Write Uncorrectable has succeeded."""
        if self.features.lba_status_notices:
            self.events.raise_event(Event.LBA_STATUS_INFORMATION_ALERT)

    def doorbell_error(self, qid: int, *, no_queue: bool) -> None:
        """The host wrote a doorbell of a queue that is not there, or a value that the queue cannot have."""
        self.record_error(qid, NO_CID, Status.INVALID_FIELD.field())
        self.events.raise_event(Event.INVALID_DOORBELL_REGISTER if no_queue else Event.INVALID_DOORBELL_VALUE)

    def check_temperature(self) -> None:
        """Report a temperature beyond its threshold when the host wants to know."""
        if temperature_event_wanted(self) and critical_warning(self) & CRITICAL_WARNING_TEMPERATURE:
            self.events.raise_event(Event.TEMPERATURE_THRESHOLD)

    def check_health(self) -> None:
        """Report warnings of the NVM subsystem's health when the host wants to know."""
        if critical_warning(self) & self.features.smart_warnings & ~CRITICAL_WARNING_TEMPERATURE:
            self.events.raise_event(Event.RELIABILITY)

    def internal_error(self, *, persistent: bool) -> None:
        """A command has ended with Internal Error, whose details are an event's (Base 4.6.1.2.1), or all will."""
        self.events.raise_event(Event.PERSISTENT_INTERNAL_ERROR if persistent else Event.TRANSIENT_INTERNAL_ERROR)

    def record_error(
        self,
        sqid: int,
        cid: int,
        status: int,
        nsid: int = 0,
        lba: int = 0,
        parameter_error_location: int = NO_LOCATION,
    ) -> None:
        """Add a failed command to the error log; ``status`` is the 15-bit Status Field.

        The data plane's owner calls it for failed I/O commands.
        """
        self.errors.record(sqid, cid, status, nsid, lba, parameter_error_location)

    # Persistence

    def dump(self) -> dict[str, Any]:
        """Everything that the host may rely on, as JSON-able values."""
        return {
            "version": _DUMP_VERSION,
            "cntlid": self.cntlid,
            "cc": self._cc,
            "aqa": self._aqa,
            "asq": self._asq,
            "acq": self._acq,
            "intms": self._intms,
            "ready": self._ready,
            "shut_down": self._shut_down,
            "fatal_reason": self.fatal_reason,
            "epoch": self._epoch,
            "io_queues_created": self.io_queues_created,
            "dbbuf": self.dbbuf,
            "cqs": [asdict(queue) for queue in self.cqs.values()],
            "sqs": [asdict(queue) for queue in self.sqs.values()],
            "changed_namespaces": list(self.changed_namespaces),
            "told": [[nsid, *attributes] for nsid, attributes in self.told.items()],
            "events": self.events.dump(),
            "features": self.features.dump(),
            "errors": self.errors.dump(),
            "lba_status": self.lba_status.dump(),
            "started_ns": self.started_ns,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the controller that ``dump`` described. Opens nothing: see ``reopen``."""
        assert state["version"] == _DUMP_VERSION, state["version"]
        self.cntlid = state["cntlid"]
        self._cc = state["cc"]
        self._aqa = state["aqa"]
        self._asq = state["asq"]
        self._acq = state["acq"]
        self._intms = state["intms"]
        self._ready = state["ready"]
        self._shut_down = state["shut_down"]
        self.fatal_reason = state["fatal_reason"]
        self._epoch = state["epoch"]
        self.io_queues_created = state["io_queues_created"]
        self.dbbuf = None if state["dbbuf"] is None else (state["dbbuf"][0], state["dbbuf"][1])
        self.cqs = {row["qid"]: CompletionQueue(**row) for row in state["cqs"]}
        self.sqs = {row["qid"]: SubmissionQueue(**row) for row in state["sqs"]}
        self.changed_namespaces = list(state["changed_namespaces"])
        self.events.load(state["events"])
        self.features.load(state["features"])
        self.errors.load(state["errors"])
        self.lba_status.load(state["lba_status"])
        self.started_ns = state["started_ns"]
        self.told = {nsid: (blocks, size) for nsid, blocks, size in state["told"]}

    def life(self) -> Life:
        """What it has lived through when its connection ends now."""
        before = self.subsystem.life()
        counters = {
            info.nsid: before.of(info.nsid) + self.plane.counters(info.nsid) for info in self.subsystem.allocated()
        }
        return Life(
            before.power_cycles + 1,
            before.powered_ns + self.clock.now_ns() - self.started_ns,
            before.unsafe_shutdowns + (self.state in (State.READY, State.FAILED)),
            self.errors.count,
            counters,
        )

    def catch_up(self) -> None:
        """After ``reopen``: tell of namespaces that have changed when the last worker died before it could."""
        now = self._attributes()
        for nsid in sorted(now.keys() | self.told.keys()):
            if now.get(nsid) != self.told.get(nsid):
                self.namespace_changed(nsid)
