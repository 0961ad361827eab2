"""Guest memory of one client: which addresses are mapped, and where they are in this process.

Use: ``gm.map(iova, size, flags, offset, fd)``; ``gm.read`` / ``gm.write`` for control (GuestMemory of dpu.nvme);
``gm.table()`` for the compiled stage. Each file is mapped once, whole, between two guard pages; QEMU sends a new
descriptor of the same memfd for every region of it, and firmware unmaps and maps all RAM while queues are live.

A file that its owner could shrink under us raises SIGBUS where we touch it. Memfds sealed against shrinking cannot do
that; others are taken only with ``allow_unsealed`` (SPDK's initiator has its memory in hugetlbfs files), and
dpu.sigbus sees to it that their owner alone is hurt (``lost``). A region without a descriptor is not
reachable for the compiled stage: a command that points there (ROM, another device's BAR) fails with Data Transfer
Error, unless all of a client's RAM is like that (dpu.dma).

Limits: REGIONS_MAX regions. Errors: VfioUserError (EINVAL, EEXIST, ENOENT, ENOSPC), DmaFault.
Source: vfio-user specification, VFIO_USER_DMA_MAP; memfd_create(2), fcntl(2) F_GET_SEALS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpu import sigbus
from dpu.errors import DmaFault, VfioUserError
from dpu.layout import DMA_READ, DMA_WRITE, PAGE, REGION

log = logging.getLogger(__name__)

REGIONS_MAX = 4096
ADDRESS_MAX = 1 << 63  # addresses are signed in the compiled stage; higher ones are never reachable

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED, _MAP_NORESERVE, _PROT_NONE = 0x10, 0x4000, 0
_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """A whole file in memory with a guard page on either side. ``host`` is the address of its first byte.

    ``page``: size of the pages it is made of (those of hugetlbfs are large). ``on_lost``: for a file that may be
    taken away from under us, see dpu.sigbus.
    """

    def __init__(
        self,
        fd: int,
        size: int,
        *,
        writable: bool = True,
        page: int = PAGE,
        on_lost: Callable[[], None] | None = None,
    ) -> None:
        rounded = -(-size // page) * page
        self._span = rounded + 3 * page
        base = _mmap(None, self._span, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
        self._base = base
        self.host = (base // page + 2) * page
        self._area = sigbus.Area(self.host, rounded, on_lost) if on_lost is not None else None
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        try:
            _mmap(self.host, rounded, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
        except OSError:
            _LIBC.munmap(base, self._span)
            raise
        if self._area is not None:
            sigbus.guard(self._area)

    @property
    def lost(self) -> bool:
        """Whether the file was taken away, and there are zeroes instead."""
        return self._area is not None and self._area.lost

    def close(self) -> None:
        """Unmap; the caller has seen to it that nobody looks there any more."""
        if self._area is not None:
            sigbus.release(self._area)
        _LIBC.munmap(self._base, self._span)


def _mmap(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    result = _LIBC.mmap(address, size, protection, flags, fd, 0)
    if result == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(result)


FileKey = tuple[int, int, int, bool]  # device, inode, size when it was mapped, writable


@dataclass(frozen=True)
class Region:
    """One DMA region; ``host`` is 0 when it is not reachable."""

    iova: int
    size: int
    rights: int
    host: int
    key: FileKey | None


class GuestMap:
    """The DMA map of one client.

    ``allow_unsealed``: take files that their owner may shrink. ``on_lost``: called when that has happened, from any
    thread and at any instruction that touches guest memory.
    """

    def __init__(self, on_lost: Callable[[], None] = lambda: None, *, allow_unsealed: bool = False) -> None:
        self.regions: list[Region] = []  # sorted by iova
        self.allow_unsealed = allow_unsealed
        self._on_lost = on_lost
        self._files: dict[FileKey, Mapping] = {}

    @property
    def lost(self) -> bool:
        """Whether memory that a region has is no longer the client's."""
        return any(mapping.lost for mapping in self._files.values())

    # ------------------------------------------------------------------------------------------------ changes

    def map(self, iova: int, size: int, flags: int, offset: int, fd: int | None) -> None:
        """Add a region. ``flags``: 1 the device may read it, 2 write it. The descriptor stays the caller's.

        Mapping the same region again is no error: a worker may see a message that the last one has answered.
        """
        rights = flags & (DMA_READ | DMA_WRITE)
        if len(self.regions) >= REGIONS_MAX:
            raise VfioUserError(errno.ENOSPC, f"more than {REGIONS_MAX} DMA regions")
        reachable = fd is not None and iova + size <= ADDRESS_MAX
        host, key = self._open(fd, offset, size, rights) if fd is not None and reachable else (0, None)
        region = Region(iova, size, rights, host, key)
        for other in self.regions:
            if iova < other.iova + other.size and other.iova < iova + size and region != other:
                raise VfioUserError(errno.EEXIST, f"{iova:#x}+{size:#x} overlaps {other.iova:#x}+{other.size:#x}")
        if region not in self.regions:
            self.regions.append(region)
            self.regions.sort(key=lambda one: one.iova)

    def _open(self, fd: int, offset: int, size: int, rights: int) -> tuple[int, FileKey]:
        """Host address of a part of a file, mapped whole unless it is; a file that has grown is mapped anew."""
        status = os.fstat(fd)
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if not seals & fcntl.F_SEAL_SHRINK and not (self.allow_unsealed and stat.S_ISREG(status.st_mode)):
            log.error(
                "guest RAM is not sealed against shrinking: use QEMU's memory-backend-memfd, which seals it, or, for "
                "SPDK's initiator, the listener's option allow_unsealed_memory"
            )
            raise VfioUserError(errno.EINVAL, "guest RAM is not sealed against shrinking")
        if offset + size > status.st_size:
            raise VfioUserError(errno.EINVAL, f"region ends at {offset + size:#x} of a file of {status.st_size:#x}")
        key = (status.st_dev, status.st_ino, status.st_size, bool(rights & DMA_WRITE))
        if key not in self._files:
            page = max(PAGE, status.st_blksize)
            self._files[key] = Mapping(fd, status.st_size, writable=key[3], page=page, on_lost=self._on_lost)
        return self._files[key].host + offset, key

    def unmap(self, iova: int, size: int) -> None:
        """Forget the regions in ``iova`` .. ``iova + size``; ENOENT if one is cut. Mappings stay until ``trim``."""
        kept = []
        for region in self.regions:
            inside = iova <= region.iova and region.iova + region.size <= iova + size
            if not inside and iova < region.iova + region.size and region.iova < iova + size:
                raise VfioUserError(errno.ENOENT, f"{iova:#x}+{size:#x} cuts {region.iova:#x}+{region.size:#x}")
            if not inside:
                kept.append(region)
        self.regions = kept

    def trim(self) -> None:
        """Unmap files that no region uses, when the compiled stage no longer has their addresses."""
        used = {region.key for region in self.regions}
        for key in [key for key in self._files if key not in used]:
            self._files.pop(key).close()

    def close(self) -> None:
        """Unmap everything."""
        self.regions = []
        self.trim()

    # ------------------------------------------------------------------------------------------------ look-ups

    def table(self) -> Any:
        """REGION records of what is reachable, sorted by address."""
        rows = [(r.iova, r.size, r.host, r.rights) for r in self.regions if r.host]
        table = np.zeros(max(len(rows), 1), REGION)
        for i, row in enumerate(rows):
            table[i] = row
        return table[: len(rows)]

    def find(self, iova: int, length: int, rights: int) -> int:
        """Host address of ``length`` bytes that lie in one region; DmaFault."""
        host, _, size = self.places(iova, length, rights)[0]
        if not host or size < length:
            raise DmaFault(iova, length)
        return host

    def read(self, iova: int, length: int) -> bytes:
        """Copy guest memory; it may span regions that follow each other."""
        return b"".join(ctypes.string_at(host, size) for host, size in self._pieces(iova, length, DMA_READ))

    def gather(self, pieces: list[tuple[int, int]]) -> bytes:
        """Copy several parts of guest memory: (iova, bytes) each."""
        return b"".join(self.read(iova, length) for iova, length in pieces)

    def write(self, iova: int, data: bytes) -> None:
        """Copy to guest memory; nothing is written unless all of it is mapped."""
        at = 0
        for host, size in self._pieces(iova, len(data), DMA_WRITE):
            ctypes.memmove(host, data[at : at + size], size)
            at += size

    def _pieces(self, iova: int, length: int, rights: int) -> list[tuple[int, int]]:
        pieces = self.places(iova, length, rights)
        if not all(host for host, _, _ in pieces):
            raise DmaFault(iova, length)
        return [(host, size) for host, _, size in pieces]

    def places(self, iova: int, length: int, rights: int) -> list[tuple[int, int, int]]:
        """(host address, iova, bytes) of the parts of a range, by region; the address is 0 where it is not shared.

        DmaFault when it is not all mapped with these rights.
        """
        pieces = []
        while length > 0:
            at = bisect_right(self.regions, iova, key=lambda region: region.iova) - 1
            region = self.regions[at] if at >= 0 else None
            if region is None or iova >= region.iova + region.size or region.rights & rights != rights:
                raise DmaFault(iova, length)
            size = min(length, region.iova + region.size - iova)
            pieces.append((region.host + iova - region.iova if region.host else 0, iova, size))
            iova, length = iova + size, length - size
        return pieces
