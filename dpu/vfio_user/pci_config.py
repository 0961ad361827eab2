"""PCI configuration space of an NVMe function: write masks and three capabilities.

Use: ``config = PciConfig(vectors=65)``; ``config.read(0, 4)``; ``config.write(4, data)``; ``dump`` and
``load`` carry the writable bits to the next worker. What BARs and vectors do is elsewhere: the client (QEMU)
maps BARs and routes vectors by itself and mirrors its writes here.

Parameters: vector count, identifiers, BAR sizes in bytes.
Limits: CONFIG_BYTES; accesses of any size inside it. Every bit that the specification calls read-only stays.
Errors: none; ranges are checked by the session.
Source: PCI Local Bus Specification 3.0 (6.1 header, 6.8 MSI and MSI-X), PCI Bus Power Management Interface
1.2 (3.2), PCI Express Base 4.0 (7.5.3), NVM Express PCIe Transport 1.0 (3.8).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONFIG_BYTES = 4096
"""With the extended space of PCI Express, which is empty: zero at 0x100 (7.6.3)."""

BAR0_BYTES = 0x4000
"""NVMe registers, then doorbells from 0x1000."""

MSIX_TABLE_BAR = 4
MSIX_TABLE_BYTES = 0x2000
MSIX_PBA_BAR = 5
MSIX_PBA_BYTES = 0x1000

CLASS_NVME = 0x010802
"""Mass storage, non-volatile memory, NVM Express (NVMe PCIe Transport, 3.8.1.5)."""

# Header offsets (PCI 6.1)
COMMAND = 0x04
STATUS = 0x06
BAR0 = 0x10
CAPABILITIES_POINTER = 0x34

COMMAND_MEMORY = 1 << 1
COMMAND_BUS_MASTER = 1 << 2
COMMAND_INTX_DISABLE = 1 << 10

DEVICE_CONTROL_FLR = 1 << 15

_BAR_MEMORY_64 = 0b100  # memory, 64 bits wide, not prefetchable (PCI 6.2.5.1)


@dataclass(frozen=True)
class _Field:
    """One register: its reset value and the bits that a write may change."""

    offset: int
    width: int
    value: int = 0
    writable: int = 0


def _bar_pair(index: int, size: int) -> list[_Field]:
    """A 64-bit memory BAR in slots ``index`` and ``index`` + 1."""
    mask = ~(size - 1)
    return [
        _Field(BAR0 + 4 * index, 4, _BAR_MEMORY_64, mask & 0xFFFFFFFF),
        _Field(BAR0 + 4 * (index + 1), 4, 0, 0xFFFFFFFF),
    ]


def _bar(index: int, size: int) -> list[_Field]:
    """A 32-bit memory BAR."""
    return [_Field(BAR0 + 4 * index, 4, 0, ~(size - 1) & 0xFFFFFFFF)]


def _power_management(at: int, following: int) -> list[_Field]:
    return [
        _Field(at, 1, 0x01),  # PCI_CAP_ID_PM
        _Field(at + 1, 1, following),
        _Field(at + 2, 2, 0x0003),  # PMC: version 3, no PME
        _Field(at + 4, 2, 0x0008, 0x0003),  # PMCSR: No_Soft_Reset; PowerState
    ]


def _pci_express(at: int, following: int) -> list[_Field]:
    return [
        _Field(at, 1, 0x10),  # PCI_CAP_ID_EXP
        _Field(at + 1, 1, following),
        _Field(at + 2, 2, 0x0002),  # version 2, endpoint
        _Field(at + 4, 4, 0x10008001),  # Device Capabilities: FLR, role-based errors, payload 256 bytes
        _Field(at + 8, 2, 0x2810, 0x7FFF),  # Device Control; bit 15 (initiate FLR) reads zero
        _Field(at + 12, 4, 0x00000843),  # Link Capabilities: x4, 8 GT/s
        _Field(at + 16, 2, 0x0000, 0x01C3),  # Link Control
        _Field(at + 18, 2, 0x0043),  # Link Status: x4, 8 GT/s
        _Field(at + 36, 4, 0x0000001F),  # Device Capabilities 2: completion timeouts
        _Field(at + 40, 2, 0x0000, 0x041F),  # Device Control 2
        _Field(at + 44, 4, 0x0000000E),  # Link Capabilities 2: 2.5, 5, 8 GT/s
    ]


def _msix(at: int, following: int, vectors: int) -> list[_Field]:
    return [
        _Field(at, 1, 0x11),  # PCI_CAP_ID_MSIX
        _Field(at + 1, 1, following),
        _Field(at + 2, 2, vectors - 1, 0xC000),  # Message Control: Table Size is 0's based; enable, mask all
        _Field(at + 4, 4, MSIX_TABLE_BAR),  # table at offset 0 of its BAR
        _Field(at + 8, 4, MSIX_PBA_BAR),
    ]


def _msi(at: int, following: int) -> list[_Field]:
    return [
        _Field(at, 1, 0x05),  # PCI_CAP_ID_MSI
        _Field(at + 1, 1, following),
        _Field(at + 2, 2, 0x0080, 0x0001),  # Message Control: one vector, 64-bit address; enable
        _Field(at + 4, 4, 0, 0xFFFFFFFC),
        _Field(at + 8, 4, 0, 0xFFFFFFFF),
        _Field(at + 12, 2, 0, 0xFFFF),
    ]


_POWER_MANAGEMENT_AT = 0x40
_INTERRUPTS_AT = 0x50
_PCI_EXPRESS_AT = 0x70
_DEVICE_CONTROL = _PCI_EXPRESS_AT + 8


def _fields(vendor: int, device: int, vectors: int, msix: bool) -> list[_Field]:
    header = [
        _Field(0x00, 2, vendor),
        _Field(0x02, 2, device),
        _Field(COMMAND, 2, 0, COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_INTX_DISABLE | 0x0140),
        _Field(STATUS, 2, 0x0010),  # capabilities list
        _Field(0x08, 1, 0x01),  # revision
        _Field(0x09, 2, CLASS_NVME & 0xFFFF),
        _Field(0x0B, 1, CLASS_NVME >> 16),
        _Field(0x0C, 1, 0, 0xFF),  # cache line size
        *_bar_pair(0, BAR0_BYTES),
        _Field(0x2C, 2, vendor),  # subsystem
        _Field(0x2E, 2, device),
        _Field(CAPABILITIES_POINTER, 1, _POWER_MANAGEMENT_AT),
        _Field(0x3C, 1, 0, 0xFF),  # interrupt line; the pin at 0x3D is 0: no INTx
    ]
    capabilities = [
        *_power_management(_POWER_MANAGEMENT_AT, _INTERRUPTS_AT),
        *_pci_express(_PCI_EXPRESS_AT, 0),
    ]
    if msix:
        bars = [*_bar(MSIX_TABLE_BAR, MSIX_TABLE_BYTES), *_bar(MSIX_PBA_BAR, MSIX_PBA_BYTES)]
        return header + bars + capabilities + _msix(_INTERRUPTS_AT, _PCI_EXPRESS_AT, vectors)
    return header + capabilities + _msi(_INTERRUPTS_AT, _PCI_EXPRESS_AT)


class PciConfig:
    """The configuration space of one function.

    :param vectors: MSI-X vectors, 1 to 2048
    :param vendor: Vendor ID, also as Subsystem Vendor ID
    :param device: Device ID, also as Subsystem ID
    :param msix: True: MSI-X; False: one MSI vector (QEMU can unplug such a device)
    """

    def __init__(self, vectors: int, *, vendor: int = 0x1DE5, device: int = 0x0001, msix: bool = True) -> None:
        assert 1 <= vectors <= 2048 and vectors * 16 <= MSIX_TABLE_BYTES
        self._reset_value = bytearray(CONFIG_BYTES)
        self._writable = bytearray(CONFIG_BYTES)
        for row in _fields(vendor, device, vectors, msix):
            end = row.offset + row.width
            self._reset_value[row.offset : end] = row.value.to_bytes(row.width, "little")
            self._writable[row.offset : end] = row.writable.to_bytes(row.width, "little")
        self._bytes = bytearray(self._reset_value)

    @property
    def command(self) -> int:
        """The Command register (COMMAND_* bits)."""
        return int(struct.unpack_from("<H", self._bytes, COMMAND)[0])

    @property
    def bus_master(self) -> bool:
        """Whether the function may access memory and signal interrupts (PCI 6.2.2)."""
        return bool(self.command & COMMAND_BUS_MASTER)

    def read(self, offset: int, count: int) -> bytes:
        """``count`` bytes from ``offset``."""
        assert 0 <= offset <= offset + count <= CONFIG_BYTES
        return bytes(self._bytes[offset : offset + count])

    def write(self, offset: int, data: bytes) -> bool:
        """Store ``data`` where bits are writable.

        :return: whether it asks for a function-level reset (PCI Express 7.5.3.4), which is the caller's to do
        """
        assert 0 <= offset <= offset + len(data) <= CONFIG_BYTES
        for at, new in enumerate(data, offset):
            mask = self._writable[at]
            self._bytes[at] = (self._bytes[at] & ~mask & 0xFF) | (new & mask)
        flr = _DEVICE_CONTROL + 1 - offset
        return 0 <= flr < len(data) and bool(data[flr] & DEVICE_CONTROL_FLR >> 8)

    def reset(self) -> None:
        """Every register as after power on."""
        self._bytes[:] = self._reset_value

    def dump(self) -> dict[str, Any]:
        """The writable bits, as JSON."""
        size = len(self._writable.rstrip(b"\0"))
        # As two large numbers: this runs after every admin command, and byte by byte it takes most of its time.
        now, writable = (int.from_bytes(part[:size], "little") for part in (self._bytes, self._writable))
        return {"writable": (now & writable).to_bytes(size, "little").hex()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what ``dump`` of another instance returned."""
        self.write(0, bytes.fromhex(state["writable"]))
