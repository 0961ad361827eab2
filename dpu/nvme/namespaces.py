"""Namespace Management, Namespace Attachment and Format NVM (Base 5.21, 5.20, 5.14; NVM 4.1.6).

Use: the handlers are rows of ``admin.COMMANDS``. What they ask for is done by the subsystem (``SubsystemView``),
which stores it before it answers and does it once, however often a killed worker's command is executed again.

Limits: two formats, ``BLOCK_SIZES``; no metadata, no protection; NSZE and NCAP are equal; one ANA group, no NVM
sets and endurance groups. Format always erases; a cryptographic erase is not offered, nor FFFFFFFFh (Identify FNA).
Errors: those of the commands in the specification.
"""

from __future__ import annotations

import itertools
import struct
from typing import TYPE_CHECKING, Final

from dpu.nvme import prp
from dpu.nvme.bits import Bits
from dpu.nvme.commands import SUCCESS
from dpu.nvme.errors import CommandError
from dpu.nvme.interfaces import Completion
from dpu.nvme.wire import (
    BROADCAST_NSID,
    CDW10_LOCATION,
    CDW11_LOCATION,
    NSID_LOCATION,
    IdentifyNamespace,
    Status,
    SubmissionEntry,
)

if TYPE_CHECKING:
    from dpu.nvme.controller import Controller

BLOCK_SIZES: Final = (512, 4096)  # the LBA formats, by their index
SELECT: Final = Bits(SEL=(0, 3))
CREATE, DELETE = 0, 1
ATTACH, DETACH = 0, 1
CSI: Final = Bits(CSI=(24, 31))
FLBAS: Final = Bits(LOW=(0, 3), MSET=(4, 4), HIGH=(5, 6))
FORMAT_CDW10: Final = Bits(LBAFL=(0, 3), MSET=(4, 4), PI=(5, 7), PIL=(8, 8), SES=(9, 11), LBAFU=(12, 13))
NMIC_SHARED: Final = 1 << 0
_ERASE_NONE, _ERASE_DATA = 0, 1
_LIST_BYTES: Final = 4096
_CNTLIDS_MAX: Final = 2047


async def namespace_management(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Namespace Management: create or delete."""
    select = SELECT.get(sqe.cdw10, "SEL")
    if select == CREATE:
        return await _create(controller, sqe)
    if select != DELETE:
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION)
    if sqe.nsid == BROADCAST_NSID:
        await controller.subsystem.delete([info.nsid for info in controller.subsystem.allocated()])
    else:
        controller.namespace(sqe.nsid)  # the subsystem says whether it is allocated
        await controller.subsystem.delete([sqe.nsid])
    return SUCCESS


async def _create(controller: Controller, sqe: SubmissionEntry) -> Completion:
    """DW0 of the completion is the new NSID."""
    if sqe.nsid:
        raise CommandError(Status.INVALID_FIELD, location=NSID_LOCATION)
    if CSI.get(sqe.cdw11, "CSI"):
        raise CommandError(Status.INVALID_FIELD, location=CDW11_LOCATION + 3)
    wanted = IdentifyNamespace.from_buffer_copy(prp.read(controller.memory, sqe, _LIST_BYTES))
    flbas = FLBAS.decode(wanted.flbas)
    block_size = _block_size(flbas["HIGH"] << 4 | flbas["LOW"])
    if wanted.dps or flbas["MSET"]:
        raise CommandError(Status.INVALID_FORMAT)
    if wanted.ncap != wanted.nsze:
        raise CommandError(Status.THIN_PROVISIONING_NOT_SUPPORTED)
    if wanted.nsze == 0 or wanted.nmic & ~NMIC_SHARED or wanted.anagrpid or wanted.nvmsetid or wanted.endgid:
        raise CommandError(Status.INVALID_FIELD)
    nsid = await controller.subsystem.create(wanted.nsze, block_size, private=not wanted.nmic & NMIC_SHARED)
    return Completion(Status.SUCCESS.field(), nsid)


async def namespace_attachment(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Namespace Attachment: attach to, or detach from, the controllers of a list."""
    select = SELECT.get(sqe.cdw10, "SEL")
    if select not in (ATTACH, DETACH):
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION)
    controller.namespace(sqe.nsid)  # the subsystem says whether it is allocated
    words = struct.unpack(f"<{_LIST_BYTES // 2}H", prp.read(controller.memory, sqe, _LIST_BYTES))
    count = words[0]
    cntlids = words[1 : 1 + count]
    if not 1 <= count <= _CNTLIDS_MAX or any(a >= b for a, b in itertools.pairwise(cntlids)):
        raise CommandError(Status.CONTROLLER_LIST_INVALID)
    await controller.subsystem.attach(sqe.nsid, cntlids, select == ATTACH)
    return SUCCESS


async def format_nvm(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Format NVM: all blocks read as zeroes afterwards, in the LBA format asked for."""
    fields = FORMAT_CDW10.decode(sqe.cdw10)
    if sqe.nsid == BROADCAST_NSID:
        raise CommandError(Status.INVALID_FIELD, location=NSID_LOCATION)
    controller.namespace(sqe.nsid)  # the subsystem says whether it is allocated
    if fields["SES"] not in (_ERASE_NONE, _ERASE_DATA):
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION + 1)
    if fields["MSET"] or fields["PI"]:
        raise CommandError(Status.INVALID_FORMAT, location=CDW10_LOCATION)
    await controller.subsystem.format(sqe.nsid, _block_size(fields["LBAFU"] << 4 | fields["LBAFL"]))
    return SUCCESS


def controller_list(cntlids: list[int]) -> bytes:
    """A Controller List (Base 4.5.1)."""
    found = cntlids[:_CNTLIDS_MAX]
    return struct.pack(f"<{len(found) + 1}H", len(found), *found)


def _block_size(index: int) -> int:
    if index >= len(BLOCK_SIZES):
        raise CommandError(Status.INVALID_FORMAT)
    return BLOCK_SIZES[index]
