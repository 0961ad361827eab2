"""Admin commands: one row each in ``COMMANDS`` (Base 5); queue management, Abort, events, doorbell buffers.

Use: ``await COMMANDS[opcode].handler(controller, entry, token)``; the controller does, after the checks that
all commands share. To add a command: a handler and a row; its place in the effects log follows.

Errors: ``CommandError`` with the status that the specification names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from dpu.errors import DmaFault
from dpu.layout import IO_QUEUES, QUEUE_ENTRIES_MAX
from dpu.nvme import registers
from dpu.nvme.bits import Bits
from dpu.nvme.commands import CHANGES_NAMESPACES, CONTROLLER, FORMATS, READS, SUCCESS, Command
from dpu.nvme.errors import CommandError
from dpu.nvme.features import get_features, set_features
from dpu.nvme.identify import identify
from dpu.nvme.interfaces import Completion
from dpu.nvme.lbastatus import get_lba_status
from dpu.nvme.logpages import get_log_page
from dpu.nvme.namespaces import format_nvm, namespace_attachment, namespace_management
from dpu.nvme.wire import (
    CDW10_LOCATION,
    CDW11_LOCATION,
    PAGE_BYTES,
    PRP1_LOCATION,
    PRP2_LOCATION,
    AdminOpcode,
    Status,
    SubmissionEntry,
)

if TYPE_CHECKING:
    from dpu.nvme.controller import Controller

QUEUE_CDW10: Final = Bits(QID=(0, 15), QSIZE=(16, 31))  # QSIZE 0's based
CREATE_CQ_CDW11: Final = Bits(PC=(0, 0), IEN=(1, 1), IV=(16, 31))
CREATE_SQ_CDW11: Final = Bits(PC=(0, 0), QPRIO=(1, 2), CQID=(16, 31))
ABORT_CDW10: Final = Bits(SQID=(0, 15), CID=(16, 31))
ABORT_DW0_NOT_ABORTED: Final = 1


async def create_cq(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Create I/O Completion Queue."""
    qid = QUEUE_CDW10.get(sqe.cdw10, "QID")
    vector = CREATE_CQ_CDW11.get(sqe.cdw11, "IV")
    if qid in controller.cqs:
        raise CommandError(Status.INVALID_QUEUE_IDENTIFIER, location=CDW10_LOCATION)
    entries = _new_queue_entries(controller, sqe, qid, "IOCQES", registers.IOCQES)
    if vector >= controller.vectors:
        raise CommandError(Status.INVALID_INTERRUPT_VECTOR, location=CDW11_LOCATION + 2)
    interrupts = bool(CREATE_CQ_CDW11.get(sqe.cdw11, "IEN"))
    try:
        controller.open_cq(qid, entries, sqe.prp1, vector, interrupts)
    except DmaFault as fault:
        raise CommandError(Status.DATA_TRANSFER_ERROR, dnr=False, location=PRP1_LOCATION) from fault
    controller.io_queues_created = True
    return SUCCESS


async def create_sq(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Create I/O Submission Queue. The priority is ignored: arbitration is round robin."""
    qid = QUEUE_CDW10.get(sqe.cdw10, "QID")
    cqid = CREATE_SQ_CDW11.get(sqe.cdw11, "CQID")
    if qid in controller.sqs:
        raise CommandError(Status.INVALID_QUEUE_IDENTIFIER, location=CDW10_LOCATION)
    if not 1 <= cqid <= IO_QUEUES:
        raise CommandError(Status.INVALID_QUEUE_IDENTIFIER, location=CDW11_LOCATION + 2)
    if cqid not in controller.cqs:
        raise CommandError(Status.COMPLETION_QUEUE_INVALID, location=CDW11_LOCATION + 2)
    entries = _new_queue_entries(controller, sqe, qid, "IOSQES", registers.IOSQES)
    try:
        controller.open_sq(qid, entries, sqe.prp1, cqid)
    except DmaFault as fault:
        raise CommandError(Status.DATA_TRANSFER_ERROR, dnr=False, location=PRP1_LOCATION) from fault
    controller.io_queues_created = True
    return SUCCESS


def _new_queue_entries(
    controller: Controller, sqe: SubmissionEntry, qid: int, size_field: str, entry_size: int
) -> int:
    """What both Create commands check; the queue's entries, 1's based."""
    if not 1 <= qid <= IO_QUEUES:
        raise CommandError(Status.INVALID_QUEUE_IDENTIFIER, location=CDW10_LOCATION)
    entries = QUEUE_CDW10.get(sqe.cdw10, "QSIZE") + 1  # 0's based
    if not 2 <= entries <= QUEUE_ENTRIES_MAX or controller.cc_field(size_field) != entry_size:
        raise CommandError(Status.INVALID_QUEUE_SIZE, location=CDW10_LOCATION + 2)
    if not CREATE_CQ_CDW11.get(sqe.cdw11, "PC"):  # CAP.CQR is 1
        raise CommandError(Status.INVALID_FIELD, location=CDW11_LOCATION)
    if sqe.prp1 % PAGE_BYTES:
        raise CommandError(Status.PRP_OFFSET_INVALID, location=PRP1_LOCATION)
    return entries


async def delete_sq(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Delete I/O Submission Queue: completes when its commands have."""
    qid = QUEUE_CDW10.get(sqe.cdw10, "QID")
    queue = controller.sqs.get(qid)
    if qid == 0 or queue is None:
        raise CommandError(Status.INVALID_QUEUE_IDENTIFIER, location=CDW10_LOCATION)
    await controller.plane.close_sq(qid)
    if controller.sqs.get(qid) is queue:  # no reset meanwhile
        del controller.sqs[qid]
    return SUCCESS


async def delete_cq(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Delete I/O Completion Queue: its submission queues must be gone."""
    qid = QUEUE_CDW10.get(sqe.cdw10, "QID")
    queue = controller.cqs.get(qid)
    if qid == 0 or queue is None:
        raise CommandError(Status.INVALID_QUEUE_IDENTIFIER, location=CDW10_LOCATION)
    if any(sq.cqid == qid for sq in controller.sqs.values()):
        raise CommandError(Status.INVALID_QUEUE_DELETION, location=CDW10_LOCATION)
    await controller.plane.close_cq(qid)
    if controller.cqs.get(qid) is queue:  # no reset meanwhile
        del controller.cqs[qid]
    return SUCCESS


async def abort(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Abort: best effort. Parked event requests and I/O that waits at a gate are aborted; other I/O soon completes.

    ACL cannot be exceeded: commands are executed one at a time.
    """
    sqid = ABORT_CDW10.get(sqe.cdw10, "SQID")
    if sqid not in controller.sqs:
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION)
    cid = ABORT_CDW10.get(sqe.cdw10, "CID")
    if controller.events.abort(cid) if sqid == 0 else await controller.plane.abort(sqid, cid):
        return SUCCESS
    return Completion(Status.SUCCESS.field(), ABORT_DW0_NOT_ABORTED)


async def asynchronous_event_request(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion | None:
    """Asynchronous Event Request: parked until there is an event; never times out."""
    return controller.events.park(token, sqe.cid)


async def doorbell_buffer_config(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Doorbell Buffer Config: PRP1 the shadow doorbells, PRP2 the EventIdx values, one page each."""
    if not controller.shadow_doorbells:
        raise CommandError(Status.INVALID_OPCODE, location=0)
    for address, location in ((sqe.prp1, PRP1_LOCATION), (sqe.prp2, PRP2_LOCATION)):
        if address % PAGE_BYTES:
            raise CommandError(Status.INVALID_FIELD, location=location)
    try:
        controller.set_dbbuf(sqe.prp1, sqe.prp2)
    except DmaFault as fault:
        raise CommandError(Status.INVALID_FIELD, location=PRP1_LOCATION) from fault
    return SUCCESS


COMMANDS: Final[dict[int, Command]] = {
    AdminOpcode.DELETE_SQ: Command(delete_sq, CONTROLLER, "5.7"),
    AdminOpcode.CREATE_SQ: Command(create_sq, CONTROLLER, "5.5"),
    AdminOpcode.GET_LOG_PAGE: Command(get_log_page, CONTROLLER, "5.16", uses_nsid=True),
    AdminOpcode.DELETE_CQ: Command(delete_cq, CONTROLLER, "5.6"),
    AdminOpcode.CREATE_CQ: Command(create_cq, CONTROLLER, "5.4"),
    AdminOpcode.IDENTIFY: Command(identify, CONTROLLER, "5.17", uses_nsid=True),
    AdminOpcode.ABORT: Command(abort, CONTROLLER, "5.1"),
    AdminOpcode.SET_FEATURES: Command(set_features, CONTROLLER, "5.27", uses_nsid=True),
    AdminOpcode.GET_FEATURES: Command(get_features, CONTROLLER, "5.15", uses_nsid=True),
    AdminOpcode.ASYNC_EVENT_REQUEST: Command(asynchronous_event_request, CONTROLLER, "5.2"),
    AdminOpcode.NAMESPACE_MANAGEMENT: Command(namespace_management, CHANGES_NAMESPACES, "5.21", uses_nsid=True),
    AdminOpcode.NAMESPACE_ATTACHMENT: Command(namespace_attachment, CHANGES_NAMESPACES, "5.20", uses_nsid=True),
    AdminOpcode.DOORBELL_BUFFER_CONFIG: Command(doorbell_buffer_config, CONTROLLER, "5.8"),
    AdminOpcode.FORMAT_NVM: Command(format_nvm, FORMATS, "5.14", uses_nsid=True),
    AdminOpcode.GET_LBA_STATUS: Command(get_lba_status, READS, "NVM 4.2.1", uses_nsid=True),
}
