"""Log pages: one row each (Base 5.16).

Use: ``get_log_page`` is the command's handler; ``LOG_PAGES`` the rows, of which the Supported Log Pages page and
the effects pages are made.

Limits: at most MDTS bytes per command (Invalid Field in Command beyond); what lies behind the end of a page
reads as zeroes, an offset behind it is Invalid Field in Command.
Errors: Invalid Log Page; Invalid Field in Command (offset, length, NSID of a page that has none, CSI).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpu.layout import TRANSFER_MAX
from dpu.nvme import prp
from dpu.nvme.bits import Bits
from dpu.nvme.commands import IO_EFFECTS, SCOPE_CONTROLLER, SCOPE_NAMESPACE, SUCCESS
from dpu.nvme.errors import CommandError
from dpu.nvme.features import FEATURES, TEMPERATURE_K, critical_warning
from dpu.nvme.identify import FIRMWARE_REVISION
from dpu.nvme.interfaces import Completion
from dpu.nvme.wire import (
    BROADCAST_NSID,
    CDW10_LOCATION,
    CDW12_LOCATION,
    CDW14_LOCATION,
    NSID_LOCATION,
    AdminOpcode,
    FirmwareLog,
    SmartLog,
    Status,
    SubmissionEntry,
)

if TYPE_CHECKING:
    from dpu.nvme.controller import Controller

CDW10: Final = Bits(LID=(0, 7), LSP=(8, 14), RAE=(15, 15), NUMDL=(16, 31))
CDW11: Final = Bits(NUMDU=(0, 15), LSI=(16, 31))
CDW14: Final = Bits(UUID=(0, 6), OT=(23, 23), CSI=(24, 31))

CHANGED_NAMESPACES: Final = 0x04
LBA_STATUS: Final = 0x0E
_CHANGED_MAX: Final = 1024
_SUPPORTED: Final = Bits(LSUPP=(0, 0), IOS=(1, 1))  # Base figure 204
_FEATURE: Final = Bits(FSUPP=(0, 0), UDCC=(1, 1), FSP=(20, 31))  # Base figure 256
_HOUR_NS: Final = 3_600_000_000_000


@dataclass(frozen=True)
class LogPage:
    """One log page.

    :param build: (controller, nsid) -> the whole page; nsid FFFFFFFFh is the controller's own
    :param namespace: an active NSID selects a namespace's page
    :param csi: CDW14.CSI selects a command set's page
    """

    build: Callable[[Controller, int], bytes]
    namespace: bool = False
    csi: bool = False


def _supported(controller: Controller, nsid: int) -> bytes:
    return _table({lid: _SUPPORTED.encode(LSUPP=1) for lid in LOG_PAGES}, 256)


def _errors(controller: Controller, nsid: int) -> bytes:
    return controller.errors.page()


def _smart(controller: Controller, nsid: int) -> bytes:
    life = controller.subsystem.life()
    counters = life.of(nsid) + controller.plane.counters(nsid)
    hours = (life.powered_ns + controller.clock.now_ns() - controller.started_ns) // _HOUR_NS
    return bytes(
        SmartLog(
            critical_warning=critical_warning(controller),
            composite_temperature=tuple(TEMPERATURE_K.to_bytes(2, "little")),
            available_spare=100,
            available_spare_threshold=10,
            data_units_read=_pair(-(-counters.bytes_read // 512_000)),
            data_units_written=_pair(-(-counters.bytes_written // 512_000)),
            host_read_commands=_pair(counters.reads),
            host_write_commands=_pair(counters.writes),
            power_cycles=_pair(life.power_cycles + 1),  # a connection is a time with power
            power_on_hours=_pair(hours),
            unsafe_shutdowns=_pair(life.unsafe_shutdowns),
            media_errors=_pair(counters.media_errors),
            num_err_log_entries=_pair(controller.errors.count),
        )
    )


def _firmware(controller: Controller, nsid: int) -> bytes:
    page = FirmwareLog(afi=1)  # slot 1 is the only one
    page.frs[0].value = FIRMWARE_REVISION.encode().ljust(8)
    return bytes(page)


def _changed(controller: Controller, nsid: int) -> bytes:
    changed = sorted(controller.changed_namespaces)
    if len(changed) > _CHANGED_MAX:
        changed = [BROADCAST_NSID]  # too many to name
    return struct.pack(f"<{len(changed)}I", *changed).ljust(4096, b"\0")


def _lba_status(controller: Controller, nsid: int) -> bytes:
    return controller.lba_status.page(controller)


def _effects(controller: Controller, nsid: int) -> bytes:
    admin = {opcode: row.effects for opcode, row in controller.commands.items()}
    if not controller.shadow_doorbells:
        del admin[AdminOpcode.DOORBELL_BUFFER_CONFIG]
    return (_table(admin, 256) + _table(IO_EFFECTS, 256)).ljust(4096, b"\0")


def _feature_effects(controller: Controller, nsid: int) -> bytes:
    rows = {}
    for fid, row in FEATURES.items():
        scope = SCOPE_NAMESPACE if row.namespace else SCOPE_CONTROLLER
        rows[fid] = _FEATURE.encode(FSUPP=1, FSP=scope)
    return _table(rows, 256)


def _mi_effects(controller: Controller, nsid: int) -> bytes:
    return bytes(4096)  # no NVMe-MI command is supported


LOG_PAGES: Final[dict[int, LogPage]] = {
    0x00: LogPage(_supported),  # Supported Log Pages
    0x01: LogPage(_errors),  # Error Information
    0x02: LogPage(_smart, namespace=True),  # SMART / Health Information
    0x03: LogPage(_firmware),  # Firmware Slot Information
    CHANGED_NAMESPACES: LogPage(_changed),  # Changed Namespace List
    0x05: LogPage(_effects, csi=True),  # Commands Supported and Effects
    LBA_STATUS: LogPage(_lba_status),  # LBA Status Information
    0x12: LogPage(_feature_effects),  # Feature Identifiers Supported and Effects
    0x13: LogPage(_mi_effects),  # NVMe-MI Commands Supported and Effects
}


async def get_log_page(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Get Log Page (Base 5.16)."""
    lid = CDW10.get(sqe.cdw10, "LID")
    row = LOG_PAGES.get(lid)
    if row is None:
        raise CommandError(Status.INVALID_LOG_PAGE, location=CDW10_LOCATION)
    nsid = _nsid(controller, row, sqe.nsid)
    if CDW14.get(sqe.cdw14, "OT") or (row.csi and CDW14.get(sqe.cdw14, "CSI")):
        raise CommandError(Status.INVALID_FIELD, location=CDW14_LOCATION)
    numd = CDW11.get(sqe.cdw11, "NUMDU") << 16 | CDW10.get(sqe.cdw10, "NUMDL")
    length = 4 * (numd + 1)  # 0's based dwords
    if length > TRANSFER_MAX:
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION + 2)
    page = row.build(controller, nsid)
    offset = sqe.cdw13 << 32 | sqe.cdw12  # LPOU, LPOL
    if offset % 4 or offset > len(page):
        raise CommandError(Status.INVALID_FIELD, location=CDW12_LOCATION)
    prp.write(controller.memory, sqe, page[offset : offset + length].ljust(length, b"\0"))
    if not CDW10.get(sqe.cdw10, "RAE"):
        if lid == CHANGED_NAMESPACES:
            controller.changed_namespaces.clear()
        if lid == LBA_STATUS:
            controller.lba_status.release()
        controller.events.retire(lid)
    return SUCCESS


def _nsid(controller: Controller, row: LogPage, nsid: int) -> int:
    """Whose page it is: a namespace's, or FFFFFFFFh for the controller's (Base 5.16.1)."""
    if nsid in (0, BROADCAST_NSID):
        return BROADCAST_NSID
    controller.active_namespace(nsid)
    if not row.namespace:
        raise CommandError(Status.INVALID_FIELD, location=NSID_LOCATION)
    return nsid


def _table(rows: Mapping[int, int], entries: int) -> bytes:
    return struct.pack(f"<{entries}I", *(rows.get(index, 0) for index in range(entries)))


def _pair(value: int) -> tuple[int, int]:
    """A 128-bit value as the wire structure's two words."""
    return value & (1 << 64) - 1, value >> 64
