"""Wire structures and numbers of vfio-user, each declared once.

Use: ``Header.from_buffer_copy(message)``; ``bytes(RegionAccess(offset=0, region=0, count=4))``. The same
classes make the dtypes of compiled code: ``np.dtype(Header)``.
Source: vfio-user specification (QEMU docs/interop/vfio-user.rst) for messages, section names beside each
structure; <linux/vfio.h> for what it borrows: region, irq and capability structures.
"""

from __future__ import annotations

import ctypes
import enum
from ctypes import c_uint16, c_uint32, c_uint64

VERSION_MAJOR = 0
VERSION_MINOR = 0

DATA_BYTES_MAX = 65536
"""Our "max_data_xfer_size": bytes of data in one region access."""

MESSAGE_BYTES_MAX = 16 + DATA_BYTES_MAX + 4096
"""Largest message taken from a client: header, data, and room for the structure before the data."""

MESSAGE_FDS_MAX = 16
"""Our "max_msg_fds", also QEMU's upper limit."""


class Command(enum.IntEnum):
    """Section "Commands" table; the sender of 11 and 12 is the server."""

    VERSION = 1
    DMA_MAP = 2
    DMA_UNMAP = 3
    DEVICE_GET_INFO = 4
    DEVICE_GET_REGION_INFO = 5
    DEVICE_GET_REGION_IO_FDS = 6
    DEVICE_GET_IRQ_INFO = 7
    DEVICE_SET_IRQS = 8
    REGION_READ = 9
    REGION_WRITE = 10
    DMA_READ = 11
    DMA_WRITE = 12
    DEVICE_RESET = 13
    REGION_WRITE_MULTI = 15
    DEVICE_FEATURE = 16
    MIG_DATA_READ = 17
    MIG_DATA_WRITE = 18


class HeaderFlag(enum.IntFlag):
    """Section "Header", Flags: bits 0-3 are the type (0 command, 1 reply)."""

    TYPE_MASK = 0xF
    REPLY = 0x1
    NO_REPLY = 0x10
    ERROR = 0x20


class DeviceFlag(enum.IntFlag):
    """VFIO_DEVICE_FLAGS_*."""

    RESET = 1
    PCI = 2


class RegionFlag(enum.IntFlag):
    """VFIO_REGION_INFO_FLAG_*."""

    READ = 1
    WRITE = 2
    MMAP = 4
    CAPS = 8


class IrqFlag(enum.IntFlag):
    """VFIO_IRQ_INFO_*."""

    EVENTFD = 1
    MASKABLE = 2
    AUTOMASKED = 4
    NORESIZE = 8


class IrqSetFlag(enum.IntFlag):
    """VFIO_IRQ_SET_*: exactly one DATA bit and exactly one ACTION bit."""

    DATA_NONE = 1
    DATA_BOOL = 2
    DATA_EVENTFD = 4
    ACTION_MASK = 8
    ACTION_UNMASK = 16
    ACTION_TRIGGER = 32


class DmaFlag(enum.IntFlag):
    """VFIO_USER_F_DMA_REGION_*; MMAP and FILE_IO say how the descriptor may be used."""

    READ = 1
    WRITE = 2
    MMAP = 4
    FILE_IO = 8


class DmaUnmapFlag(enum.IntFlag):
    """VFIO_DMA_UNMAP_FLAG_*."""

    GET_DIRTY_BITMAP = 1
    ALL = 2


class PciRegion(enum.IntEnum):
    """VFIO_PCI_*_REGION_INDEX."""

    BAR0 = 0
    BAR1 = 1
    BAR2 = 2
    BAR3 = 3
    BAR4 = 4
    BAR5 = 5
    ROM = 6
    CONFIG = 7
    VGA = 8


class PciIrq(enum.IntEnum):
    """VFIO_PCI_*_IRQ_INDEX."""

    INTX = 0
    MSI = 1
    MSIX = 2
    ERR = 3
    REQ = 4


PCI_REGIONS = len(PciRegion)
PCI_IRQS = len(PciIrq)

REGION_INFO_CAP_SPARSE_MMAP = 1


class Header(ctypes.LittleEndianStructure):
    """Section "Header"."""

    _pack_ = 1
    _fields_ = [
        ("msg_id", c_uint16),
        ("cmd", c_uint16),
        ("msg_size", c_uint32),  # bytes, this header included
        ("flags", c_uint32),
        ("error_no", c_uint32),  # positive errno
    ]


class Version(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_VERSION"; JSON and a NUL may follow."""

    _pack_ = 1
    _fields_ = [("major", c_uint16), ("minor", c_uint16)]


class DmaMap(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_DMA_MAP"."""

    _pack_ = 1
    _fields_ = [
        ("argsz", c_uint32),
        ("flags", c_uint32),
        ("offset", c_uint64),  # in the file
        ("addr", c_uint64),
        ("size", c_uint64),
    ]


class DmaUnmap(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_DMA_UNMAP"."""

    _pack_ = 1
    _fields_ = [("argsz", c_uint32), ("flags", c_uint32), ("addr", c_uint64), ("size", c_uint64)]


class DeviceInfo(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_DEVICE_GET_INFO"."""

    _pack_ = 1
    _fields_ = [
        ("argsz", c_uint32),
        ("flags", c_uint32),
        ("num_regions", c_uint32),
        ("num_irqs", c_uint32),
    ]


class RegionInfo(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_DEVICE_GET_REGION_INFO" (struct vfio_region_info)."""

    _pack_ = 1
    _fields_ = [
        ("argsz", c_uint32),
        ("flags", c_uint32),
        ("index", c_uint32),
        ("cap_offset", c_uint32),
        ("size", c_uint64),
        ("offset", c_uint64),  # for mmap of the descriptor that comes along
    ]


class SparseMmapCap(ctypes.LittleEndianStructure):
    """struct vfio_region_info_cap_sparse_mmap; ``nr_areas`` SparseMmapArea follow."""

    _pack_ = 1
    _fields_ = [
        ("id", c_uint16),
        ("version", c_uint16),
        ("next", c_uint32),
        ("nr_areas", c_uint32),
        ("reserved", c_uint32),
    ]


class SparseMmapArea(ctypes.LittleEndianStructure):
    """struct vfio_region_sparse_mmap_area."""

    _pack_ = 1
    _fields_ = [("offset", c_uint64), ("size", c_uint64)]


class IrqInfo(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_DEVICE_GET_IRQ_INFO" (struct vfio_irq_info)."""

    _pack_ = 1
    _fields_ = [("argsz", c_uint32), ("flags", c_uint32), ("index", c_uint32), ("count", c_uint32)]


class IrqSet(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_DEVICE_SET_IRQS" (struct vfio_irq_set)."""

    _pack_ = 1
    _fields_ = [
        ("argsz", c_uint32),
        ("flags", c_uint32),
        ("index", c_uint32),
        ("start", c_uint32),
        ("count", c_uint32),
    ]


class RegionAccess(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_REGION_READ" and "VFIO_USER_REGION_WRITE"; the data follows."""

    _pack_ = 1
    _fields_ = [("offset", c_uint64), ("region", c_uint32), ("count", c_uint32)]


class DmaAccess(ctypes.LittleEndianStructure):
    """Section "VFIO_USER_DMA_READ" and "VFIO_USER_DMA_WRITE" (server to client); the data follows."""

    _pack_ = 1
    _fields_ = [("addr", c_uint64), ("count", c_uint64)]


HEADER_BYTES = ctypes.sizeof(Header)


def message(msg_id: int, cmd: int, payload: bytes = b"", flags: int = 0, error_no: int = 0) -> bytes:
    """A whole message: header and ``payload``."""
    header = Header(msg_id, cmd, HEADER_BYTES + len(payload), flags, error_no)
    return bytes(header) + payload


def error_reply(header: Header, error_no: int) -> bytes:
    """The reply, header only, that fails the command of ``header`` with a positive errno."""
    return message(header.msg_id, header.cmd, b"", HeaderFlag.REPLY | HeaderFlag.ERROR, error_no)
