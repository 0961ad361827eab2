"""NVMe wire structures: what host and controller exchange, declared once.

Use: ``SubmissionEntry.from_buffer_copy(sqe)`` here, ``np.dtype(SubmissionEntry)`` in the compiled stage:
one declaration serves both. Field names are the specification's, in lower case.

Limits: little-endian machines; queue entries of 64 and 16 bytes (SQES 6, CQES 4); no metadata, no SGL.

Source: NVM Express Base Specification 2.0 ("Base"), NVM Command Set Specification 1.0 ("NVM").
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import LittleEndianStructure, c_char, c_uint8, c_uint16, c_uint32, c_uint64
from typing import Final

BROADCAST_NSID: Final = 0xFFFFFFFF
PAGE_BYTES: Final = 4096  # CC.MPS 0 is the only page size (CAP.MPSMIN = MPSMAX = 0)


class SubmissionEntry(LittleEndianStructure):
    """Submission Queue Entry, 64 bytes (Base figure 87, "Common Command Format")."""

    opcode: int
    flags: int
    cid: int
    nsid: int
    cdw2: int
    cdw3: int
    mptr: int
    prp1: int
    prp2: int
    cdw10: int
    cdw11: int
    cdw12: int
    cdw13: int
    cdw14: int
    cdw15: int
    _fields_ = [
        ("opcode", c_uint8),  # CDW0 07:00
        ("flags", c_uint8),  # CDW0 09:08 FUSE, 15:14 PSDT
        ("cid", c_uint16),  # CDW0 31:16
        ("nsid", c_uint32),
        ("cdw2", c_uint32),
        ("cdw3", c_uint32),
        ("mptr", c_uint64),
        ("prp1", c_uint64),
        ("prp2", c_uint64),
        ("cdw10", c_uint32),
        ("cdw11", c_uint32),
        ("cdw12", c_uint32),
        ("cdw13", c_uint32),
        ("cdw14", c_uint32),
        ("cdw15", c_uint32),
    ]


# Parameter Error Location of the error log (Base figure 206): byte of the SQE, first bit << 8.
NO_LOCATION: Final = 0xFFFF
FLAGS_LOCATION: Final = 1
NSID_LOCATION: Final = 4
PRP1_LOCATION: Final = 24
PRP2_LOCATION: Final = 32
CDW10_LOCATION: Final = 40
CDW11_LOCATION: Final = 44
CDW12_LOCATION: Final = 48
CDW13_LOCATION: Final = 52
CDW14_LOCATION: Final = 56

FLAGS_FUSE: Final = 0x03  # SubmissionEntry.flags: CDW0 09:08
FLAGS_PSDT: Final = 0xC0  # SubmissionEntry.flags: CDW0 15:14


class CompletionEntry(LittleEndianStructure):
    """Completion Queue Entry, 16 bytes (Base 3.3.3.2). ``status``: bit 0 the phase, 15:1 the Status Field."""

    dw0: int
    dw1: int
    sqhd: int
    sqid: int
    cid: int
    status: int
    _fields_ = [
        ("dw0", c_uint32),
        ("dw1", c_uint32),
        ("sqhd", c_uint16),
        ("sqid", c_uint16),
        ("cid", c_uint16),
        ("status", c_uint16),
    ]


class DsmRange(LittleEndianStructure):
    """One range of Dataset Management, 16 bytes (NVM 3.2.3). ``nlb`` is 1's based, unlike elsewhere."""

    cattr: int
    nlb: int
    slba: int
    _fields_ = [("cattr", c_uint32), ("nlb", c_uint32), ("slba", c_uint64)]


DSM_RANGES_MAX: Final = 256  # CDW10 NR is 8 bits, 0's based


class CopyRange(LittleEndianStructure):
    """Source Range Entry of Copy, Descriptor Format 0h, 32 bytes (NVM figure 33). ``nlb`` is 0's based."""

    rsvd0: int
    slba: int
    nlb: int
    rsvd18: int
    rsvd20: int
    eilbrt: int
    elbat: int
    elbatm: int
    _fields_ = [
        ("rsvd0", c_uint64),
        ("slba", c_uint64),
        ("nlb", c_uint16),
        ("rsvd18", c_uint16),
        ("rsvd20", c_uint32),
        ("eilbrt", c_uint32),
        ("elbat", c_uint16),
        ("elbatm", c_uint16),
    ]


COPY_RANGES_MAX: Final = 128  # MSRC is 127, 0's based: the descriptors fill one page


class AdminOpcode(enum.IntEnum):
    """Admin commands (Base figure 138); without a row in ``admin.COMMANDS``: Invalid Opcode."""

    DELETE_SQ = 0x00
    CREATE_SQ = 0x01
    GET_LOG_PAGE = 0x02
    DELETE_CQ = 0x04
    CREATE_CQ = 0x05
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT_REQUEST = 0x0C
    NAMESPACE_MANAGEMENT = 0x0D
    FIRMWARE_COMMIT = 0x10
    FIRMWARE_DOWNLOAD = 0x11
    DEVICE_SELF_TEST = 0x14
    NAMESPACE_ATTACHMENT = 0x15
    KEEP_ALIVE = 0x18
    DIRECTIVE_SEND = 0x19
    DIRECTIVE_RECEIVE = 0x1A
    VIRTUALIZATION_MANAGEMENT = 0x1C
    DOORBELL_BUFFER_CONFIG = 0x7C
    FORMAT_NVM = 0x80
    SECURITY_SEND = 0x81
    SECURITY_RECEIVE = 0x82
    SANITIZE = 0x84
    GET_LBA_STATUS = 0x86


class NvmOpcode(enum.IntEnum):
    """I/O commands of the NVM Command Set (NVM figure 12)."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    WRITE_UNCORRECTABLE = 0x04
    COMPARE = 0x05
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09
    VERIFY = 0x0C
    COPY = 0x19


# CDW12 of Read, Write, Compare, Write Zeroes (NVM 3.2); NLB (15:0) is 0's based.
CDW12_NLB: Final = 0x0000FFFF
CDW12_PRACT: Final = 1 << 29  # of PRINFO (29:26)
CDW12_FUA: Final = 1 << 30
# CDW12 of Copy (NVM figure 31).
CDW12_COPY_NR: Final = 0xFF  # 0's based
CDW12_COPY_FORMAT: Final = 0xF00
# CDW11 of Dataset Management (NVM figure 39).
CDW11_DSM_AD: Final = 1 << 2

STATUS_DNR: Final = 1 << 14  # Do Not Retry, bit 31 of DW3
STATUS_MORE: Final = 1 << 13  # More information in the error log, bit 30 of DW3


class Status(enum.IntEnum):
    """Status Code Type << 8 | Status Code (Base 3.3.3.2.1, NVM 3.1.2.2 from 80h on)."""

    # Generic Command Status (SCT 0h)
    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    CID_CONFLICT = 0x003
    DATA_TRANSFER_ERROR = 0x004
    ABORTED_POWER_LOSS = 0x005
    INTERNAL_ERROR = 0x006
    ABORT_REQUESTED = 0x007
    ABORTED_SQ_DELETION = 0x008
    ABORTED_FAILED_FUSED = 0x009
    ABORTED_MISSING_FUSED = 0x00A
    INVALID_NAMESPACE_OR_FORMAT = 0x00B
    COMMAND_SEQUENCE_ERROR = 0x00C
    INVALID_SGL_SEGMENT = 0x00D
    INVALID_SGL_COUNT = 0x00E
    DATA_SGL_LENGTH_INVALID = 0x00F
    METADATA_SGL_LENGTH_INVALID = 0x010
    SGL_TYPE_INVALID = 0x011
    INVALID_CMB_USE = 0x012
    PRP_OFFSET_INVALID = 0x013
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014
    OPERATION_DENIED = 0x015
    SGL_OFFSET_INVALID = 0x016
    HOST_ID_INCONSISTENT = 0x018
    KEEP_ALIVE_EXPIRED = 0x019
    KEEP_ALIVE_INVALID = 0x01A
    ABORTED_PREEMPT = 0x01B
    SANITIZE_FAILED = 0x01C
    SANITIZE_IN_PROGRESS = 0x01D
    NAMESPACE_WRITE_PROTECTED = 0x020
    COMMAND_INTERRUPTED = 0x021
    TRANSIENT_TRANSPORT_ERROR = 0x022
    LBA_OUT_OF_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    NAMESPACE_NOT_READY = 0x082
    RESERVATION_CONFLICT = 0x083
    FORMAT_IN_PROGRESS = 0x084
    # Command Specific Status (SCT 1h)
    COMPLETION_QUEUE_INVALID = 0x100
    INVALID_QUEUE_IDENTIFIER = 0x101
    INVALID_QUEUE_SIZE = 0x102
    ABORT_LIMIT_EXCEEDED = 0x103
    ASYNC_EVENT_LIMIT_EXCEEDED = 0x105
    INVALID_FIRMWARE_SLOT = 0x106
    INVALID_FIRMWARE_IMAGE = 0x107
    INVALID_INTERRUPT_VECTOR = 0x108
    INVALID_LOG_PAGE = 0x109
    INVALID_FORMAT = 0x10A
    FIRMWARE_NEEDS_RESET = 0x10B
    INVALID_QUEUE_DELETION = 0x10C
    FEATURE_NOT_SAVEABLE = 0x10D
    FEATURE_NOT_CHANGEABLE = 0x10E
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10F
    OVERLAPPING_RANGE = 0x114
    NAMESPACE_INSUFFICIENT_CAPACITY = 0x115
    NAMESPACE_ID_UNAVAILABLE = 0x116
    NAMESPACE_ALREADY_ATTACHED = 0x118
    NAMESPACE_IS_PRIVATE = 0x119
    NAMESPACE_NOT_ATTACHED = 0x11A
    THIN_PROVISIONING_NOT_SUPPORTED = 0x11B
    CONTROLLER_LIST_INVALID = 0x11C
    INVALID_CONTROLLER_IDENTIFIER = 0x11F
    IO_COMMAND_SET_NOT_SUPPORTED = 0x129
    IO_COMMAND_SET_NOT_ENABLED = 0x12A
    IO_COMMAND_SET_REJECTED = 0x12B
    INVALID_IO_COMMAND_SET = 0x12C
    CONFLICTING_ATTRIBUTES = 0x180
    INVALID_PROTECTION_INFORMATION = 0x181
    WRITE_TO_READ_ONLY_RANGE = 0x182
    COMMAND_SIZE_LIMIT_EXCEEDED = 0x183
    # Media and Data Integrity Errors (SCT 2h)
    WRITE_FAULT = 0x280
    UNRECOVERED_READ_ERROR = 0x281
    GUARD_CHECK_ERROR = 0x282
    APPLICATION_TAG_CHECK_ERROR = 0x283
    REFERENCE_TAG_CHECK_ERROR = 0x284
    COMPARE_FAILURE = 0x285
    ACCESS_DENIED = 0x286
    DEALLOCATED_BLOCK = 0x287

    def field(self, *, dnr: bool = False, more: bool = False) -> int:
        """The 15-bit Status Field (CQE DW3 31:17, without the phase bit)."""
        return self | (STATUS_DNR if dnr else 0) | (STATUS_MORE if more else 0)


assert ctypes.sizeof(SubmissionEntry) == 64
assert ctypes.sizeof(CompletionEntry) == 16
assert ctypes.sizeof(DsmRange) == 16
assert ctypes.sizeof(CopyRange) == 32


class PowerState(LittleEndianStructure):
    """Power State Descriptor, 32 bytes (Base figure 276). All zero: nothing reported."""

    _fields_ = [("mp", c_uint16), ("_rsvd2", c_uint8 * 30)]


class IdentifyController(LittleEndianStructure):
    """Identify Controller data structure, CNS 01h, 4096 bytes (Base figure 275)."""

    _fields_ = [
        ("vid", c_uint16),
        ("ssvid", c_uint16),
        ("sn", c_char * 20),
        ("mn", c_char * 40),
        ("fr", c_char * 8),
        ("rab", c_uint8),
        ("ieee", c_uint8 * 3),
        ("cmic", c_uint8),
        ("mdts", c_uint8),
        ("cntlid", c_uint16),
        ("ver", c_uint32),
        ("rtd3r", c_uint32),
        ("rtd3e", c_uint32),
        ("oaes", c_uint32),
        ("ctratt", c_uint32),
        ("rrls", c_uint16),
        ("_rsvd102", c_uint8 * 9),
        ("cntrltype", c_uint8),
        ("fguid", c_uint8 * 16),
        ("crdt1", c_uint16),
        ("crdt2", c_uint16),
        ("crdt3", c_uint16),
        ("_rsvd134", c_uint8 * 119),
        ("nvmsr", c_uint8),
        ("vwci", c_uint8),
        ("mec", c_uint8),
        ("oacs", c_uint16),
        ("acl", c_uint8),  # 0's based
        ("aerl", c_uint8),  # 0's based
        ("frmw", c_uint8),
        ("lpa", c_uint8),
        ("elpe", c_uint8),  # 0's based
        ("npss", c_uint8),  # 0's based
        ("avscc", c_uint8),
        ("apsta", c_uint8),
        ("wctemp", c_uint16),
        ("cctemp", c_uint16),
        ("mtfa", c_uint16),
        ("hmpre", c_uint32),
        ("hmmin", c_uint32),
        ("tnvmcap", c_uint8 * 16),
        ("unvmcap", c_uint8 * 16),
        ("rpmbs", c_uint32),
        ("edstt", c_uint16),
        ("dsto", c_uint8),
        ("fwug", c_uint8),
        ("kas", c_uint16),
        ("hctma", c_uint16),
        ("mntmt", c_uint16),
        ("mxtmt", c_uint16),
        ("sanicap", c_uint32),
        ("hmminds", c_uint32),
        ("hmmaxd", c_uint16),
        ("nsetidmax", c_uint16),
        ("endgidmax", c_uint16),
        ("anatt", c_uint8),
        ("anacap", c_uint8),
        ("anagrpmax", c_uint32),
        ("nanagrpid", c_uint32),
        ("pels", c_uint32),
        ("domainid", c_uint16),
        ("_rsvd358", c_uint8 * 10),
        ("megcap", c_uint8 * 16),
        ("_rsvd384", c_uint8 * 128),
        ("sqes", c_uint8),
        ("cqes", c_uint8),
        ("maxcmd", c_uint16),
        ("nn", c_uint32),
        ("oncs", c_uint16),
        ("fuses", c_uint16),
        ("fna", c_uint8),
        ("vwc", c_uint8),
        ("awun", c_uint16),  # 0's based
        ("awupf", c_uint16),  # 0's based
        ("icsvscc", c_uint8),
        ("nwpc", c_uint8),
        ("acwu", c_uint16),
        ("ocfs", c_uint16),
        ("sgls", c_uint32),
        ("mnan", c_uint32),
        ("maxdna", c_uint8 * 16),
        ("maxcna", c_uint32),
        ("_rsvd564", c_uint8 * 204),
        ("subnqn", c_char * 256),
        ("_rsvd1024", c_uint8 * 1024),
        ("psd", PowerState * 32),
        ("_vs3072", c_uint8 * 1024),
    ]


class LbaFormat(LittleEndianStructure):
    """LBA Format, 4 bytes (NVM figure 98): ``lbads`` is the block size's power of two."""

    _fields_ = [("ms", c_uint16), ("lbads", c_uint8), ("rp", c_uint8)]


class IdentifyNamespace(LittleEndianStructure):
    """Identify Namespace data structure of the NVM Command Set, CNS 00h, 4096 bytes (NVM figure 97)."""

    _fields_ = [
        ("nsze", c_uint64),
        ("ncap", c_uint64),
        ("nuse", c_uint64),
        ("nsfeat", c_uint8),
        ("nlbaf", c_uint8),  # 0's based
        ("flbas", c_uint8),
        ("mc", c_uint8),
        ("dpc", c_uint8),
        ("dps", c_uint8),
        ("nmic", c_uint8),
        ("rescap", c_uint8),
        ("fpi", c_uint8),
        ("dlfeat", c_uint8),
        ("nawun", c_uint16),
        ("nawupf", c_uint16),
        ("nacwu", c_uint16),
        ("nabsn", c_uint16),
        ("nabo", c_uint16),
        ("nabspf", c_uint16),
        ("noiob", c_uint16),
        ("nvmcap", c_uint8 * 16),
        ("npwg", c_uint16),
        ("npwa", c_uint16),
        ("npdg", c_uint16),
        ("npda", c_uint16),
        ("nows", c_uint16),
        ("mssrl", c_uint16),
        ("mcl", c_uint32),
        ("msrc", c_uint8),
        ("_rsvd81", c_uint8 * 11),
        ("anagrpid", c_uint32),
        ("_rsvd96", c_uint8 * 3),
        ("nsattr", c_uint8),
        ("nvmsetid", c_uint16),
        ("endgid", c_uint16),
        ("nguid", c_uint8 * 16),
        ("eui64", c_uint8 * 8),
        ("lbaf", LbaFormat * 64),
        ("_vs384", c_uint8 * 3712),
    ]


class IdentifyNamespaceIndependent(LittleEndianStructure):
    """I/O Command Set Independent Identify Namespace, CNS 08h, 4096 bytes (Base figure 280)."""

    _fields_ = [
        ("nsfeat", c_uint8),
        ("nmic", c_uint8),
        ("rescap", c_uint8),
        ("fpi", c_uint8),
        ("anagrpid", c_uint32),
        ("nsattr", c_uint8),
        ("_rsvd9", c_uint8),
        ("nvmsetid", c_uint16),
        ("endgid", c_uint16),
        ("nstat", c_uint8),
        ("_rsvd15", c_uint8 * 4081),
    ]


class ErrorLogEntry(LittleEndianStructure):
    """Error Information Log Entry, 64 bytes (Base figure 206)."""

    _fields_ = [
        ("error_count", c_uint64),
        ("sqid", c_uint16),
        ("cid", c_uint16),
        ("status", c_uint16),  # 15:1 the Status Field
        ("location", c_uint16),
        ("lba", c_uint64),
        ("nsid", c_uint32),
        ("vs", c_uint8),
        ("trtype", c_uint8),
        ("_rsvd30", c_uint16),
        ("csi", c_uint64),
        ("ttsi", c_uint16),
        ("_rsvd42", c_uint8 * 22),
    ]


class SmartLog(LittleEndianStructure):
    """SMART / Health Information, 512 bytes (Base figure 207). Pairs of u64 are 128-bit, low half first."""

    _fields_ = [
        ("critical_warning", c_uint8),
        ("composite_temperature", c_uint8 * 2),  # kelvin, at an odd offset
        ("available_spare", c_uint8),
        ("available_spare_threshold", c_uint8),
        ("percentage_used", c_uint8),
        ("endurance_group_warning", c_uint8),
        ("_rsvd7", c_uint8 * 25),
        ("data_units_read", c_uint64 * 2),  # thousands of 512 bytes, rounded up
        ("data_units_written", c_uint64 * 2),
        ("host_read_commands", c_uint64 * 2),
        ("host_write_commands", c_uint64 * 2),
        ("controller_busy_time", c_uint64 * 2),  # minutes
        ("power_cycles", c_uint64 * 2),
        ("power_on_hours", c_uint64 * 2),
        ("unsafe_shutdowns", c_uint64 * 2),
        ("media_errors", c_uint64 * 2),
        ("num_err_log_entries", c_uint64 * 2),
        ("warning_temperature_time", c_uint32),
        ("critical_temperature_time", c_uint32),
        ("_rsvd200", c_uint8 * 312),
    ]


class FirmwareLog(LittleEndianStructure):
    """Firmware Slot Information, 512 bytes (Base figure 209)."""

    _fields_ = [
        ("afi", c_uint8),
        ("_rsvd1", c_uint8 * 7),
        ("frs", (c_char * 8) * 7),
        ("_rsvd64", c_uint8 * 448),
    ]


assert ctypes.sizeof(IdentifyController) == 4096
assert ctypes.sizeof(IdentifyNamespace) == 4096
assert ctypes.sizeof(IdentifyNamespaceIndependent) == 4096
assert ctypes.sizeof(ErrorLogEntry) == 64
assert ctypes.sizeof(SmartLog) == 512
assert ctypes.sizeof(FirmwareLog) == 512
