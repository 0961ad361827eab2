"""The server's side of one vfio-user connection: messages in, replies out, no I/O and no clock.

Use: ``session = Session(device)``; ``reply = await session.handle(message, fds)``. The device is behind the
``Device`` protocol, so an NVMe controller, a null device or a test's fake fit.
Limits: DATA_BYTES_MAX per region access; what does not have exactly the size that its command says is EINVAL.
Errors: none to the caller. A peer's mistake becomes an error reply with the errno named beside each check;
``VfioUserError`` and ``OSError`` of the device become the reply with their errno.
Source: vfio-user specification (QEMU docs/interop/vfio-user.rst), section names as in wire.py.
"""

from __future__ import annotations

import ctypes
import errno
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from dpu.channel import close_fds
from dpu.errors import VfioUserError
from dpu.vfio_user import wire
from dpu.vfio_user.wire import Command, DmaUnmapFlag, HeaderFlag, IrqSetFlag, RegionFlag

ADDRESS_END = 1 << 64

# A plain number: the complement of an IntFlag keeps to its named bits.
_DMA_FLAGS = int(wire.DmaFlag.READ | wire.DmaFlag.WRITE | wire.DmaFlag.MMAP | wire.DmaFlag.FILE_IO)
_IRQ_DATA = IrqSetFlag.DATA_NONE | IrqSetFlag.DATA_BOOL | IrqSetFlag.DATA_EVENTFD
_IRQ_ACTION = IrqSetFlag.ACTION_MASK | IrqSetFlag.ACTION_UNMASK | IrqSetFlag.ACTION_TRIGGER

_CAPABILITIES = {
    "max_data_xfer_size": wire.DATA_BYTES_MAX,
    "max_msg_fds": wire.MESSAGE_FDS_MAX,
    "max_dma_maps": 65535,
    "pgsizes": 4096,
}


@dataclass(frozen=True)
class Window:
    """A part of a region that the client may map: bytes from the start of the region."""

    offset: int
    size: int


@dataclass(frozen=True)
class RegionInfo:
    """One region: ``flags`` are RegionFlag bits; with ``windows`` the MMAP flag and ``fd`` are needed.

    ``fd_offset`` is where the region begins in ``fd``.
    """

    index: int
    size: int = 0
    flags: int = 0
    windows: tuple[Window, ...] = ()
    fd: int | None = None
    fd_offset: int = 0

    def __post_init__(self) -> None:
        assert bool(self.windows) == bool(self.flags & RegionFlag.MMAP) == (self.fd is not None)


@dataclass(frozen=True)
class IrqInfo:
    """One kind of interrupt: ``count`` vectors, ``flags`` are IrqFlag bits."""

    index: int
    count: int = 0
    flags: int = 0


class Device(Protocol):
    """What a session serves. A method may raise VfioUserError (or OSError) to fail the request."""

    def negotiated(self, *, has_json: bool) -> None:
        """VERSION has come, with JSON capabilities (QEMU) or without (SPDK's initiator); before anything else."""

    @property
    def regions(self) -> Sequence[RegionInfo]:
        """All regions, in the order of their index."""

    @property
    def irqs(self) -> Sequence[IrqInfo]:
        """All kinds of interrupt, in the order of their index."""

    async def region_read(self, region: int, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes; the range is inside the region."""

    async def region_write(self, region: int, offset: int, data: bytes, replayed: bool) -> None:
        """Store ``data``; ``replayed`` says that an earlier worker may have done it already."""

    async def dma_map(self, iova: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        """Add a region of guest memory; dup ``fd`` to keep it. ``flags`` are DmaFlag bits."""

    async def dma_unmap(self, iova: int, size: int) -> None:
        """Remove every region inside ``iova`` .. ``iova + size``; (0, 2**64) removes all."""

    async def set_irqs(self, index: int, start: int, count: int, fds: Sequence[int] | None) -> None:
        """Connect ``count`` vectors from ``start`` to eventfds; None disconnects them.

        ``count`` 0 with None disables the whole kind. Dup ``fds`` to keep them.
        """

    async def reset(self, replayed: bool) -> None:
        """PCI function reset."""


@dataclass
class _Request:
    """One message, header checked."""

    command: int
    payload: bytes
    fds: list[int]
    replayed: bool
    reply_fds: tuple[int, ...] = field(default=())


_Structure = TypeVar("_Structure", bound=ctypes.LittleEndianStructure)


class Session:
    """One connection; call ``handle`` for one message at a time.

    ``capabilities`` is None before VERSION, {} after its 4-byte form (SPDK's initiator), else what the
    client proposed in JSON (QEMU). ``reply_fds`` are the descriptors that go with the reply that ``handle``
    returned last; they stay the device's.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.capabilities: dict[str, Any] | None = None
        self.has_json = False
        self.reply_fds: tuple[int, ...] = ()
        self._handlers: dict[int, Callable[[_Request], Awaitable[bytes]]] = {
            Command.VERSION: self._version,
            Command.DMA_MAP: self._dma_map,
            Command.DMA_UNMAP: self._dma_unmap,
            Command.DEVICE_GET_INFO: self._device_info,
            Command.DEVICE_GET_REGION_INFO: self._region_info,
            Command.DEVICE_GET_IRQ_INFO: self._irq_info,
            Command.DEVICE_SET_IRQS: self._set_irqs,
            Command.REGION_READ: self._region_read,
            Command.REGION_WRITE: self._region_write,
            Command.DEVICE_RESET: self._reset,
        }

    def restore(self, version: bytes) -> None:
        """Take up a connection that an earlier worker negotiated; ``version`` is that VERSION message."""
        self._negotiate(version[wire.HEADER_BYTES :])

    async def handle(self, message: bytes, fds: Sequence[int] = (), *, replayed: bool = False) -> bytes:
        """Carry out one message and return its whole reply, b"" when it asked for none.

        :param message: header and payload
        :param fds: descriptors that came with it; all are closed when this returns
        :param replayed: an earlier worker may have carried it out already
        """
        header = wire.Header.from_buffer_copy(message[: wire.HEADER_BYTES].ljust(wire.HEADER_BYTES, b"\0"))
        request = _Request(header.cmd, message[wire.HEADER_BYTES :], list(fds), replayed)
        try:
            payload = await self._dispatch(header, message, request)
            reply = wire.message(header.msg_id, header.cmd, payload, HeaderFlag.REPLY)
        except VfioUserError as error:
            reply = wire.error_reply(header, error.errno)
        except OSError as error:
            reply = wire.error_reply(header, error.errno or errno.EIO)
        finally:
            close_fds(request.fds)
        self.reply_fds = request.reply_fds
        return b"" if header.flags & HeaderFlag.NO_REPLY else reply

    async def _dispatch(self, header: wire.Header, message: bytes, request: _Request) -> bytes:
        if header.msg_size != len(message) or header.flags & (HeaderFlag.TYPE_MASK | HeaderFlag.ERROR):
            raise VfioUserError(errno.EINVAL, "not a whole command message")
        handler = self._handlers.get(header.cmd)
        if handler is None:
            known = header.cmd in Command.__members__.values()
            raise VfioUserError(errno.EOPNOTSUPP if known else errno.ENOSYS, f"command {header.cmd}")
        if (self.capabilities is None) != (header.cmd == Command.VERSION):
            raise VfioUserError(errno.EINVAL, "VERSION comes first, and once")
        if request.fds and header.cmd not in (Command.DMA_MAP, Command.DEVICE_SET_IRQS):
            raise VfioUserError(errno.EINVAL, "descriptors that the command does not take")
        return await handler(request)

    # --- negotiation ---

    async def _version(self, request: _Request) -> bytes:
        minor = self._negotiate(request.payload)
        reply = bytes(wire.Version(wire.VERSION_MAJOR, min(minor, wire.VERSION_MINOR)))
        if not self.has_json:
            return reply
        # QEMU reads the reply into the buffer of its request: never be longer when there is a way.
        data = _json_z({"capabilities": _CAPABILITIES})
        if len(reply) + len(data) > len(request.payload):
            # Without this one the client may send the specified default of 1 MiB.
            data = _json_z({"capabilities": {"max_data_xfer_size": wire.DATA_BYTES_MAX}})
        return reply + data

    def _negotiate(self, payload: bytes) -> int:
        """Record what the client proposed; return its minor version."""
        version, data = _split(wire.Version, payload)
        if version.major != wire.VERSION_MAJOR:
            raise VfioUserError(errno.EINVAL, f"major version {version.major}")
        self.capabilities = _capabilities(data) if data else {}
        self.has_json = bool(data)
        self._device.negotiated(has_json=self.has_json)
        return int(version.minor)

    # --- memory ---

    async def _dma_map(self, request: _Request) -> bytes:
        dma = _exact(wire.DmaMap, request.payload)
        _check(dma.argsz >= ctypes.sizeof(dma), "argsz")
        _check(dma.flags & ~_DMA_FLAGS == 0, "DMA flags")
        _check(dma.size > 0 and dma.addr + dma.size <= ADDRESS_END, "DMA range")
        _check(dma.offset + dma.size <= ADDRESS_END, "file range")
        _check(len(request.fds) <= 1, "one descriptor per region")
        fd = request.fds[0] if request.fds else None
        await self._device.dma_map(dma.addr, dma.size, dma.flags, dma.offset, fd)
        return b""

    async def _dma_unmap(self, request: _Request) -> bytes:
        dma = _exact(wire.DmaUnmap, request.payload)
        _check(dma.argsz >= ctypes.sizeof(dma), "argsz")
        if dma.flags & DmaUnmapFlag.GET_DIRTY_BITMAP:
            raise VfioUserError(errno.EOPNOTSUPP, "dirty bitmap")
        if dma.flags == DmaUnmapFlag.ALL:
            _check(dma.addr == 0 and dma.size == 0, "range of an unmap of all")
            await self._device.dma_unmap(0, ADDRESS_END)
        else:
            _check(dma.flags == 0, "unmap flags")
            _check(dma.size > 0 and dma.addr + dma.size <= ADDRESS_END, "DMA range")
            await self._device.dma_unmap(dma.addr, dma.size)
        return bytes(dma)

    # --- what the device is ---

    async def _device_info(self, request: _Request) -> bytes:
        asked, _ = _split(wire.DeviceInfo, request.payload)
        _check(asked.argsz >= ctypes.sizeof(asked), "argsz")
        flags = wire.DeviceFlag.RESET | wire.DeviceFlag.PCI
        regions, irqs = len(self._device.regions), len(self._device.irqs)
        return bytes(wire.DeviceInfo(ctypes.sizeof(asked), flags, regions, irqs))

    async def _region_info(self, request: _Request) -> bytes:
        asked, _ = _split(wire.RegionInfo, request.payload)
        fixed = ctypes.sizeof(asked)
        _check(asked.argsz >= fixed, "argsz")
        region = self._region(asked.index)
        caps = _sparse_mmap_cap(region.windows)
        info = wire.RegionInfo(fixed + len(caps), region.flags, region.index, 0, region.size, region.fd_offset)
        if region.fd is not None:
            # Asked twice, and QEMU keeps the descriptor of the second answer only.
            request.reply_fds = (region.fd,)
        if caps:
            info.flags |= RegionFlag.CAPS
            info.cap_offset = fixed  # also where there is no room for them: QEMU takes nothing less than the size
            if asked.argsz < fixed + len(caps):
                return bytes(info)  # argsz says how much to ask for
        return bytes(info) + caps

    async def _irq_info(self, request: _Request) -> bytes:
        asked, _ = _split(wire.IrqInfo, request.payload)
        _check(asked.argsz >= ctypes.sizeof(asked), "argsz")
        irq = self._irq(asked.index)
        return bytes(wire.IrqInfo(ctypes.sizeof(asked), irq.flags, irq.index, irq.count))

    # --- interrupts ---

    async def _set_irqs(self, request: _Request) -> bytes:
        irq_set, data = _split(wire.IrqSet, request.payload)
        index, start, count, flags = irq_set.index, irq_set.start, irq_set.count, irq_set.flags
        _check(irq_set.argsz >= ctypes.sizeof(irq_set), "argsz")
        irq = self._irq(index)
        _check(start + count <= irq.count, "vectors")
        kind, action = flags & _IRQ_DATA, flags & _IRQ_ACTION
        _check(flags == kind | action and kind.bit_count() == action.bit_count() == 1, "irq set flags")
        _check(len(data) == (count if kind == IrqSetFlag.DATA_BOOL else 0), "data")
        if kind == IrqSetFlag.DATA_EVENTFD:
            _check(count > 0 and len(request.fds) in (0, count), "one descriptor per vector")
        else:
            _check(not request.fds, "descriptors without DATA_EVENTFD")
        if action != IrqSetFlag.ACTION_TRIGGER:
            raise VfioUserError(errno.EOPNOTSUPP, "mask and unmask are for level interrupts")
        if kind == IrqSetFlag.DATA_EVENTFD:
            await self._device.set_irqs(index, start, count, request.fds or None)
        elif kind == IrqSetFlag.DATA_NONE and count == 0:
            _check(start == 0, "vectors")
            await self._device.set_irqs(index, 0, 0, None)
        else:
            raise VfioUserError(errno.EOPNOTSUPP, "interrupts by command are a loopback test")
        return b""

    # --- accesses ---

    async def _region_read(self, request: _Request) -> bytes:
        access = _exact(wire.RegionAccess, request.payload)
        self._check_access(access, RegionFlag.READ)
        data = await self._device.region_read(access.region, access.offset, access.count)
        assert len(data) == access.count
        return bytes(access) + data

    async def _region_write(self, request: _Request) -> bytes:
        access, data = _split(wire.RegionAccess, request.payload)
        self._check_access(access, RegionFlag.WRITE)
        _check(len(data) == access.count, "count")
        await self._device.region_write(access.region, access.offset, data, request.replayed)
        return bytes(access)

    def _check_access(self, access: wire.RegionAccess, right: RegionFlag) -> None:
        region = self._region(access.region)
        _check(bool(region.flags & right), "region rights")
        _check(0 < access.count <= wire.DATA_BYTES_MAX, "count")
        _check(access.offset + access.count <= region.size, "region range")

    async def _reset(self, request: _Request) -> bytes:
        _check(not request.payload, "payload")
        await self._device.reset(request.replayed)
        return b""

    def _region(self, index: int) -> RegionInfo:
        _check(index < len(self._device.regions), "region index")
        return self._device.regions[index]

    def _irq(self, index: int) -> IrqInfo:
        _check(index < len(self._device.irqs), "irq index")
        return self._device.irqs[index]


def _check(condition: bool, what: str) -> None:
    if not condition:
        raise VfioUserError(errno.EINVAL, what)


def _split(kind: type[_Structure], payload: bytes) -> tuple[_Structure, bytes]:
    """The structure that ``payload`` begins with, and the rest."""
    size = ctypes.sizeof(kind)
    _check(len(payload) >= size, "size")
    return kind.from_buffer_copy(payload), payload[size:]


def _exact(kind: type[_Structure], payload: bytes) -> _Structure:
    structure, rest = _split(kind, payload)
    _check(not rest, "size")
    return structure


def _capabilities(data: bytes) -> dict[str, Any]:
    """The "capabilities" of the JSON in a VERSION message."""
    _check(data.endswith(b"\0"), "version data without NUL")
    try:
        document = json.loads(data[:-1])
    except (ValueError, RecursionError) as error:
        raise VfioUserError(errno.EINVAL, "version data is not JSON") from error
    _check(isinstance(document, dict), "version data is not an object")
    capabilities = document.get("capabilities", {})
    _check(isinstance(capabilities, dict), "capabilities")
    return dict(capabilities)


def _json_z(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\0"


def _sparse_mmap_cap(windows: Sequence[Window]) -> bytes:
    if not windows:
        return b""
    cap = wire.SparseMmapCap(id=wire.REGION_INFO_CAP_SPARSE_MMAP, version=1, next=0, nr_areas=len(windows))
    return bytes(cap) + b"".join(bytes(wire.SparseMmapArea(w.offset, w.size)) for w in windows)
