"""What the NVMe control part needs from the rest of the card, and what it hands back.

Everything here is a Protocol or a value: the controller does no I/O and reads no clock of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Protocol

from dpu.nvme.wire import BROADCAST_NSID


@dataclass(frozen=True)
class Completion:
    """The controller's answer to one command.

    :param status: the 15-bit Status Field without the phase (``Status.field``), CQE DW3 31:17
    :param dw0: command specific result, CQE DW0
    """

    status: int
    dw0: int = 0


@dataclass(frozen=True)
class Counters:
    """What SMART reports of the I/O done on a namespace, or on all of them, since it was made."""

    reads: int = 0
    writes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    media_errors: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(a + b for a, b in zip(astuple(self), astuple(other))))


@dataclass(frozen=True)
class Life:
    """What a controller has lived through in earlier connections, each of which is a time that it had power.

    :param powered_ns: nanoseconds
    :param unsafe_shutdowns: connections that ended without a shutdown (CC.SHN) while the controller was enabled
    :param errors: entries ever made in the error log
    :param counters: by NSID
    """

    power_cycles: int = 0
    powered_ns: int = 0
    unsafe_shutdowns: int = 0
    errors: int = 0
    counters: Mapping[int, Counters] = field(default_factory=dict)

    def of(self, nsid: int) -> Counters:
        """Of a namespace, or of all with ``BROADCAST_NSID``."""
        rows = self.counters.values() if nsid == BROADCAST_NSID else [self.counters.get(nsid, Counters())]
        return sum(rows, Counters())


@dataclass(frozen=True)
class NamespaceInfo:
    """One active namespace, as Identify reports it.

    :param num_blocks: size in logical blocks of ``block_size`` bytes (512 or 4096)
    :param nguid: 16 bytes, big-endian as on the wire; ``eui64`` 8 bytes; ``uuid`` 16 bytes, RFC 4122 order.
        All zero means "none"
    :param supports_discard: deallocated blocks read as zeroes afterwards
    :param readonly: writes are refused with Namespace is Write Protected
    :param atomic_bytes: a Write of so many bytes is wholly done or not at all, also when a worker dies; 0: of one
        block
    :param shared: may be attached to more than one controller, and there is more than one
    :param warning: Critical Warning bits of the SMART log
    """

    nsid: int
    num_blocks: int
    block_size: int
    nguid: bytes
    eui64: bytes
    uuid: bytes
    product: str = ""
    supports_discard: bool = False
    readonly: bool = False
    atomic_bytes: int = 0
    shared: bool = False
    warning: int = 0


class SubsystemView(Protocol):
    """The NVM subsystem as one of its controllers sees it. Properties may change; the controller never caches."""

    @property
    def nqn(self) -> str: ...
    @property
    def serial(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def max_namespaces(self) -> int:
        """NN: the largest NSID that may ever exist."""

    def namespaces(self) -> Sequence[NamespaceInfo]:
        """The active namespaces, those attached to this controller, in order of NSID."""

    def allocated(self) -> Sequence[NamespaceInfo]:
        """All namespaces of the subsystem in order of NSID."""

    def cntlids(self, nsid: int | None = None) -> Sequence[int]:
        """The controllers of the subsystem in order, or those that an allocated namespace is attached to."""

    def life(self) -> Life:
        """Of this controller before this connection."""

    def capacity(self) -> tuple[int, int]:
        """Bytes that namespaces can be made of, and of these the bytes that are not in use."""

    # The changes below return when the change is stored and every controller serves it. Asked again by the next
    # worker, with the same command, they change nothing more. CommandError.

    async def create(self, blocks: int, block_size: int, *, private: bool) -> int:
        """Make a namespace that is attached to nobody; its NSID."""

    async def delete(self, nsids: Sequence[int]) -> None:
        """Delete allocated namespaces."""

    async def attach(self, nsid: int, cntlids: Sequence[int], attached: bool) -> None:
        """Attach an allocated namespace to controllers, or detach it."""

    async def format(self, nsid: int, block_size: int) -> None:
        """Give an allocated namespace logical blocks of this size, which read as zeroes."""


class GuestMemory(Protocol):
    """Guest RAM through the DMA map; all raise ``DmaFault`` for what is not mapped with the rights needed."""

    def read(self, iova: int, length: int) -> bytes: ...
    def gather(self, pieces: list[tuple[int, int]]) -> bytes:
        """Several parts, (iova, bytes) each, as one."""

    def write(self, iova: int, data: bytes) -> None: ...


class DataPlane(Protocol):
    """The compiled stage as the controller sees it.

    ``epoch`` names one creation of a queue: an open with the epoch that the plane's own (shared) record of the
    queue holds is a re-open after a worker died and keeps head, tail and phase; any other epoch is a new
    queue, which starts with zeroed doorbells and heads. Closing a queue only ends its service: the record
    keeps its epoch, head, tail and phase, because the worker may die before the close is saved, and the next
    one then opens that queue again and repeats the close.
    """

    def open_cq(self, qid: int, entries: int, iova: int, vector: int, interrupts: bool, epoch: int) -> None:
        """Serve a completion queue of ``entries`` (1's based) at ``iova``. ``DmaFault`` if it is not mapped."""

    def open_sq(self, qid: int, entries: int, iova: int, cqid: int, epoch: int) -> None:
        """Serve a submission queue of ``entries`` (1's based) at ``iova``. ``DmaFault`` if it is not mapped."""

    async def close_sq(self, qid: int) -> None:
        """Stop fetching, and return when every command of the queue has completed."""

    async def close_cq(self, qid: int) -> None: ...

    async def abort(self, sqid: int, cid: int) -> bool:
        """Complete an I/O command that waits for a limit or a fault with Command Abort Requested, if there is one."""

    async def close_all(self) -> None:
        """Stop every queue and drop what is in flight, parked commands included. Forgets dbbuf and mask.

        A ``close_sq`` that still waits returns. Memory that is not shared may be written later: ``late_writes``.
        """

    def late_writes(self) -> bool:
        """Whether a command of before ``close_all`` may still write guest memory."""

    async def flush(self) -> None:
        """Make every write that has completed durable (normal shutdown)."""

    def set_dbbuf(self, shadow_iova: int, event_idx_iova: int, reopened: bool = False) -> None:
        """Use shadow doorbells for every I/O queue, open or to be opened. ``DmaFault`` if not mapped.

        ``reopened``: an earlier worker has done it, so what the guest's buffers hold stays, mapped just now or not.
        """

    def set_mask(self, intms: int) -> None: ...

    def set_write_through(self, on: bool) -> None:
        """Whether every write is durable when it completes. Off after ``close_all``."""

    def unrecoverable(self, nsid: int, lba: int, count: int, limit: int) -> list[tuple[int, int]]:
        """The first ``limit`` runs (block, length) in a range of an active namespace that Read will fail on."""

    def complete(self, token: int, completion: Completion) -> None:
        """Complete a parked command.

        May be called inside ``Controller.execute``, so it only queues: the caller of the controller's method
        saves ``dump()`` and every completion of that call in one step, and posts afterwards.
        """

    def counters(self, nsid: int) -> Counters:
        """Since the namespace was attached; ``BROADCAST_NSID`` for all of them together."""
