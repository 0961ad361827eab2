"""Potentially unrecoverable blocks: Get LBA Status and the LBA Status Information log (NVM 4.2.1, 4.1.4.5, 5.8).

Use: ``get_lba_status`` is the command's handler, ``LbaStatusLog`` the log's state in one controller. The blocks that
Write Uncorrectable has marked, and no others, are known; all of them are Tracked LBAs, so Action Types 10h (scan) and
11h (what is tracked) answer alike.

Limits: ``LOG_RANGES_MAX`` ranges in the log; a namespace with more is one to be examined wholly. As many descriptors
as MNDW and one transfer hold: the host goes on behind the last one.
Errors: Invalid Namespace or Format, Invalid Field in Command (inactive NSID, Action Type), LBA Out of Range.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

from dpu.layout import TRANSFER_MAX
from dpu.nvme import prp
from dpu.nvme.bits import Bits
from dpu.nvme.commands import SUCCESS
from dpu.nvme.errors import CommandError
from dpu.nvme.interfaces import Completion
from dpu.nvme.wire import CDW10_LOCATION, CDW13_LOCATION, Status, SubmissionEntry

if TYPE_CHECKING:
    from dpu.nvme.controller import Controller

CDW13: Final = Bits(RL=(0, 15), ATYPE=(24, 31))
ATYPE_SCAN, ATYPE_TRACKED = 0x10, 0x11
_HEADER, _DESCRIPTOR = struct.Struct("<IB3x"), struct.Struct("<QIxB2x")  # NLSD, CMPC; DSLBA, NLB, status
_CMPC_MORE, _CMPC_ALL = 1, 2
_WRITTEN_UNCORRECTABLE: Final = 0b11  # each block may fail to be read; Write Uncorrectable has written it
_NLB_MAX: Final = 1 << 32

_LOG_HEADER = struct.Struct("<III2xH")  # LSLPLEN, NLSLNE, ESTULB, LSGC
_LOG_ELEMENT, _LOG_RANGE = struct.Struct("<IIB7x"), struct.Struct("<QI4x")  # NEID, NLRD, RATYPE; RSLBA, RNLB
LOG_RANGES_MAX: Final = 64
_EXAMINE_ALL: Final = 0xFFFFFFFF


async def get_lba_status(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Get LBA Status."""
    info = controller.active_namespace(sqe.nsid)
    if CDW13.get(sqe.cdw13, "ATYPE") not in (ATYPE_SCAN, ATYPE_TRACKED):
        raise CommandError(Status.INVALID_FIELD, location=CDW13_LOCATION + 3)
    lba = sqe.cdw11 << 32 | sqe.cdw10
    count = CDW13.get(sqe.cdw13, "RL") or info.num_blocks - lba  # 0: to the end
    if lba >= info.num_blocks or count > info.num_blocks - lba:
        raise CommandError(Status.LBA_OUT_OF_RANGE, location=CDW10_LOCATION)
    length = min(4 * (sqe.cdw12 + 1), TRANSFER_MAX)  # MNDW, 0's based dwords
    room = max(length - _HEADER.size, 0) // _DESCRIPTOR.size
    found = controller.plane.unrecoverable(sqe.nsid, lba, count, room + 1)
    parts = [(start + at, min(run - at, _NLB_MAX)) for start, run in found for at in range(0, run, _NLB_MAX)]
    data = _HEADER.pack(min(len(parts), room), _CMPC_MORE if len(parts) > room else _CMPC_ALL)
    for start, run in parts[:room]:
        data += _DESCRIPTOR.pack(start, run - 1, _WRITTEN_UNCORRECTABLE)  # 0's based
    prp.write(controller.memory, sqe, data[:length])
    return SUCCESS


class LbaStatusLog:
    """What the log said when the host began to read it, until it has read it with RAE 0; its generation."""

    def __init__(self) -> None:
        self._page = b""
        self._generation = 0
        self._told: list[list[int]] = []  # (nsid, block, length) of the last page

    def page(self, controller: Controller) -> bytes:
        """The whole log page."""
        if not self._page:
            self._page = self._build(controller)
        return self._page

    def release(self) -> None:
        """The host has read it all, or will not go on: the next page is made anew."""
        self._page = b""

    def _build(self, controller: Controller) -> bytes:
        told: list[list[int]] = []
        elements, count, total = b"", 0, 0
        for info in controller.subsystem.namespaces():
            room = LOG_RANGES_MAX - len(told)
            found = controller.plane.unrecoverable(info.nsid, 0, info.num_blocks, room + 1)
            if not found:
                continue
            count += 1
            named = found if len(found) <= room else []
            elements += _LOG_ELEMENT.pack(info.nsid, len(named) if named else _EXAMINE_ALL, ATYPE_TRACKED)
            for start, run in named:
                elements += _LOG_RANGE.pack(start, min(run, _NLB_MAX) - 1)  # 0's based
            told += [[info.nsid, start, run] for start, run in named] or [[info.nsid, 0, info.num_blocks]]
            total += sum(run for _, run in found)
        if any(not self._was_told(*one) for one in told):
            self._generation = (self._generation + 1) & 0xFFFF
        self._told = told
        length = _LOG_HEADER.size + len(elements)
        return _LOG_HEADER.pack(length, count, min(total, 0xFFFFFFFE), self._generation) + elements

    def _was_told(self, nsid: int, start: int, run: int) -> bool:
        return any(nsid == n and s <= start and start + run <= s + r for n, s, r in self._told)

    def dump(self) -> dict[str, Any]:
        return {"page": self._page.hex(), "generation": self._generation, "told": self._told}

    def load(self, state: dict[str, Any]) -> None:
        self._page = bytes.fromhex(state["page"])
        self._generation = state["generation"]
        self._told = state["told"]
