"""Identify: one row per CNS value (Base 5.17, NVM 4.1.5).

Use: ``identify`` is the command's handler; ``STRUCTURES`` the rows. Every structure is 4096 bytes.

What Identify says here is what the rest of the card does: change it together with the code it is about.
Errors: Invalid Field in Command for a CNS without a row; Invalid Namespace or Format, or Invalid Field in
Command, for the NSID.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dpu.layout import COPY_MAX, MDTS, QUEUE_ENTRIES_MAX, TRANSFER_MAX
from dpu.nvme import errorlog, events, prp, registers
from dpu.nvme.bits import Bits
from dpu.nvme.commands import SUCCESS
from dpu.nvme.errors import CommandError
from dpu.nvme.features import CRITICAL_TEMPERATURE_K, WARNING_TEMPERATURE_K
from dpu.nvme.interfaces import Completion, NamespaceInfo
from dpu.nvme.namespaces import BLOCK_SIZES, NMIC_SHARED, controller_list
from dpu.nvme.wire import (
    BROADCAST_NSID,
    CDW10_LOCATION,
    CDW11_LOCATION,
    COPY_RANGES_MAX,
    NSID_LOCATION,
    IdentifyController,
    IdentifyNamespace,
    IdentifyNamespaceIndependent,
    LbaFormat,
    Status,
    SubmissionEntry,
)

if TYPE_CHECKING:
    from dpu.nvme.controller import Controller

VENDOR_ID: Final = 0x1DE5  # as the PCI configuration space
FIRMWARE_REVISION: Final = "1.0"
_IEEE: Final = (0x00, 0x00, 0x02)  # little-endian 02-00-00: locally administered, we have no OUI
_RTD3_US: Final = 1_000_000

STRUCTURE_BYTES: Final = 4096
CDW10: Final = Bits(CNS=(0, 7), CNTID=(16, 31))
CDW11: Final = Bits(CNSSPECIFIC=(0, 15), CSI=(24, 31))
CSI_NVM: Final = 0
_THIS_CONTROLLER: Final = 0xFFFF
_NSID_LIST_MAX: Final = 1024
_FORMATS: Final = tuple(LbaFormat(lbads=size.bit_length() - 1) for size in BLOCK_SIZES)

OAES: Final = Bits(NAN=(8, 8), LSIAN=(13, 13))
OACS: Final = Bits(FMT=(1, 1), NMS=(3, 3), DBCS=(8, 8), GLSS=(9, 9))
CMIC: Final = Bits(MCTRS=(1, 1))
FNA: Final = Bits(FNS=(0, 0), SENS=(1, 1), CRYES=(2, 2), FBNS=(3, 3))
FRMW: Final = Bits(FFSRO=(0, 0), NOFS=(1, 3))
LPA: Final = Bits(SMARTS=(0, 0), CSES=(1, 1), LPEDS=(2, 2), MLPS=(5, 5))
SIZES: Final = Bits(REQUIRED=(0, 3), MAXIMUM=(4, 7))
ONCS: Final = Bits(
    NVMCMPS=(0, 0),
    NVMWUSV=(1, 1),
    NVMDSMSV=(2, 2),
    NVMWZSV=(3, 3),
    NVMSFS=(4, 4),
    TSS=(6, 6),
    NVMVFYS=(7, 7),
    NVMCPYS=(8, 8),
)
OCFS_FORMAT_0: Final = 1 << 0
NSFEAT: Final = Bits(NSABP=(1, 1))  # the namespace's atomic sizes are its own
VWC: Final = Bits(VWCP=(0, 0), FB=(1, 2))
_FLUSH_BROADCAST: Final = 0b11  # Flush with NSID FFFFFFFFh flushes every namespace
_DLFEAT_ZEROES: Final = 0b001
_NSATTR_WRITE_PROTECTED: Final = 1


@dataclass(frozen=True)
class Structure:
    """One CNS value.

    :param build: (controller, entry) -> at most 4096 bytes, padded with zeroes
    :param csi: CDW11.CSI must name the NVM Command Set
    :param uses_nsid: False: any NSID but 0 is Invalid Field in Command
    """

    build: Callable[[Controller, SubmissionEntry], bytes]
    csi: bool = False
    uses_nsid: bool = True


def _controller(controller: Controller, sqe: SubmissionEntry) -> bytes:
    subsystem = controller.subsystem
    total, free = subsystem.capacity()
    return bytes(
        IdentifyController(
            vid=VENDOR_ID,
            ssvid=VENDOR_ID,
            sn=_text(subsystem.serial, 20),
            mn=_text(subsystem.model, 40),
            fr=_text(FIRMWARE_REVISION, 8),
            ieee=_IEEE,
            cmic=CMIC.encode(MCTRS=int(len(subsystem.cntlids()) > 1)),
            mdts=MDTS,
            cntlid=controller.cntlid,
            ver=registers.VERSION,
            rtd3r=_RTD3_US,
            rtd3e=_RTD3_US,
            oaes=OAES.encode(NAN=1, LSIAN=1),
            cntrltype=1,  # I/O controller
            nvmsr=1,  # a storage device
            oacs=OACS.encode(FMT=1, NMS=1, DBCS=int(controller.shadow_doorbells), GLSS=1),
            acl=3,  # 0's based
            aerl=events.LIMIT - 1,  # 0's based
            frmw=FRMW.encode(FFSRO=1, NOFS=1),
            lpa=LPA.encode(SMARTS=1, CSES=1, LPEDS=1, MLPS=1),
            elpe=errorlog.ENTRIES - 1,  # 0's based
            npss=0,  # 0's based: one power state
            avscc=1,  # vendor commands, had we any, would use the standard format
            wctemp=WARNING_TEMPERATURE_K,
            cctemp=CRITICAL_TEMPERATURE_K,
            tnvmcap=tuple(total.to_bytes(16, "little")),
            unvmcap=tuple(free.to_bytes(16, "little")),
            sqes=SIZES.encode(REQUIRED=registers.IOSQES, MAXIMUM=registers.IOSQES),
            cqes=SIZES.encode(REQUIRED=registers.IOCQES, MAXIMUM=registers.IOCQES),
            maxcmd=QUEUE_ENTRIES_MAX,
            nn=subsystem.max_namespaces,
            oncs=ONCS.mask(),
            fna=FNA.encode(FBNS=1),  # Format NVM is of one namespace
            vwc=VWC.encode(VWCP=1, FB=_FLUSH_BROADCAST),
            awun=0,  # 0's based: one block, as little as can be said; a namespace may say more
            awupf=0,  # 0's based
            ocfs=OCFS_FORMAT_0,
            icsvscc=1,
            subnqn=subsystem.nqn.encode(),
        )
    )


def _namespace(controller: Controller, sqe: SubmissionEntry) -> bytes:
    if sqe.nsid == BROADCAST_NSID:  # what all namespaces have in common
        return bytes(IdentifyNamespace(nlbaf=len(BLOCK_SIZES) - 1, lbaf=_FORMATS))  # 0's based
    info = controller.namespace(sqe.nsid)
    return b"" if info is None else _described(info)  # inactive: all zeroes


def _allocated_namespace(controller: Controller, sqe: SubmissionEntry) -> bytes:
    controller.namespace(sqe.nsid)
    return next((_described(info) for info in controller.subsystem.allocated() if info.nsid == sqe.nsid), b"")


def _described(info: NamespaceInfo) -> bytes:
    return bytes(
        IdentifyNamespace(
            nsze=info.num_blocks,
            ncap=info.num_blocks,
            nuse=info.num_blocks,
            nlbaf=len(BLOCK_SIZES) - 1,  # 0's based
            flbas=BLOCK_SIZES.index(info.block_size),
            nmic=NMIC_SHARED if info.shared else 0,
            dlfeat=_DLFEAT_ZEROES if info.supports_discard else 0,
            nsfeat=NSFEAT.encode(NSABP=info.atomic_bytes > 0),
            nawun=max(info.atomic_bytes // info.block_size - 1, 0),  # 0's based
            nawupf=max(info.atomic_bytes // info.block_size - 1, 0),  # 0's based
            mssrl=TRANSFER_MAX // info.block_size,
            mcl=COPY_MAX // info.block_size,
            msrc=COPY_RANGES_MAX - 1,  # 0's based
            nsattr=_attributes(info),
            nguid=tuple(info.nguid),
            eui64=tuple(info.eui64),
            lbaf=_FORMATS,
            nvmcap=tuple((info.num_blocks * info.block_size).to_bytes(16, "little")),
        )
    )


def _independent(controller: Controller, sqe: SubmissionEntry) -> bytes:
    info = controller.namespace(sqe.nsid)
    if info is None:
        return b""
    nmic = NMIC_SHARED if info.shared else 0
    return bytes(IdentifyNamespaceIndependent(nmic=nmic, nsattr=_attributes(info), nstat=1))


def _active_list(controller: Controller, sqe: SubmissionEntry) -> bytes:
    return _nsid_list(controller.subsystem.namespaces(), sqe)


def _allocated_list(controller: Controller, sqe: SubmissionEntry) -> bytes:
    return _nsid_list(controller.subsystem.allocated(), sqe)


def _nsid_list(infos: Sequence[NamespaceInfo], sqe: SubmissionEntry) -> bytes:
    if sqe.nsid >= 0xFFFFFFFE:
        raise CommandError(Status.INVALID_NAMESPACE_OR_FORMAT, location=NSID_LOCATION)
    nsids = [info.nsid for info in infos if info.nsid > sqe.nsid]
    nsids = nsids[:_NSID_LIST_MAX]
    return struct.pack(f"<{len(nsids)}I", *nsids)


def _controllers_of_namespace(controller: Controller, sqe: SubmissionEntry) -> bytes:
    controller.namespace(sqe.nsid)
    if all(info.nsid != sqe.nsid for info in controller.subsystem.allocated()):
        raise CommandError(Status.INVALID_FIELD, location=NSID_LOCATION)
    return _controllers_from(controller.subsystem.cntlids(sqe.nsid), sqe)


def _controllers(controller: Controller, sqe: SubmissionEntry) -> bytes:
    return _controllers_from(controller.subsystem.cntlids(), sqe)


def _controllers_from(cntlids: Sequence[int], sqe: SubmissionEntry) -> bytes:
    """Those from CNTID on."""
    return controller_list([one for one in cntlids if one >= CDW10.get(sqe.cdw10, "CNTID")])


def _descriptors(controller: Controller, sqe: SubmissionEntry) -> bytes:
    info = controller.namespace(sqe.nsid)
    if info is None:
        raise CommandError(Status.INVALID_NAMESPACE_OR_FORMAT, location=NSID_LOCATION)
    # Namespace Identifier Type (Base figure 277) and its value; the CSI is there in any case.
    identifiers = {1: info.eui64, 2: info.nguid, 3: info.uuid}
    found = {nidt: value for nidt, value in identifiers.items() if any(value)}
    found[4] = bytes([CSI_NVM])
    return b"".join(bytes([nidt, len(value), 0, 0]) + value for nidt, value in found.items())


def _nvm_namespace(controller: Controller, sqe: SubmissionEntry) -> bytes:
    controller.namespace(sqe.nsid)
    return b""  # no storage tags, no extended LBA formats


def _nvm_controller(controller: Controller, sqe: SubmissionEntry) -> bytes:
    return b""  # no limits of Verify, Write Zeroes, Write Uncorrectable and Dataset Management are reported


def _command_sets(controller: Controller, sqe: SubmissionEntry) -> bytes:
    if CDW10.get(sqe.cdw10, "CNTID") not in (_THIS_CONTROLLER, controller.cntlid):
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION + 2)
    return struct.pack("<Q", 1 << CSI_NVM)  # combination 0


STRUCTURES: Final[dict[int, Structure]] = {
    0x00: Structure(_namespace),
    0x01: Structure(_controller, uses_nsid=False),
    0x02: Structure(_active_list),
    0x03: Structure(_descriptors),
    0x05: Structure(_nvm_namespace, csi=True),
    0x06: Structure(_nvm_controller, csi=True, uses_nsid=False),
    0x07: Structure(_active_list, csi=True),
    0x08: Structure(_independent),
    0x10: Structure(_allocated_list),
    0x11: Structure(_allocated_namespace),
    0x12: Structure(_controllers_of_namespace),
    0x13: Structure(_controllers, uses_nsid=False),
    0x1C: Structure(_command_sets, uses_nsid=False),
}


async def identify(controller: Controller, sqe: SubmissionEntry, token: int) -> Completion:
    """Identify (Base 5.17)."""
    row = STRUCTURES.get(CDW10.get(sqe.cdw10, "CNS"))
    if row is None:
        raise CommandError(Status.INVALID_FIELD, location=CDW10_LOCATION)
    if sqe.nsid and not row.uses_nsid:
        raise CommandError(Status.INVALID_FIELD, location=NSID_LOCATION)
    if row.csi and CDW11.get(sqe.cdw11, "CSI") != CSI_NVM:
        raise CommandError(Status.INVALID_FIELD, location=CDW11_LOCATION + 3)
    prp.write(controller.memory, sqe, row.build(controller, sqe).ljust(STRUCTURE_BYTES, b"\0"))
    return SUCCESS


def _attributes(info: NamespaceInfo) -> int:
    return _NSATTR_WRITE_PROTECTED if info.readonly else 0


def _text(text: str, width: int) -> bytes:
    """ASCII, padded with spaces (Base 1.5)."""
    return text.encode("ascii", "replace")[:width].ljust(width)
