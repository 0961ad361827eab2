"""io_uring set up by raw system calls; the pollers drive it (dpu.fastpath.asic).

Limits: ENTRIES requests in flight per poller. Errors: EmuError where the kernel does not allow io_uring.
Source: io_uring_setup(2), include/uapi/linux/io_uring.h.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any

import numpy as np

from dpu.errors import EmuError
from dpu.layout import URING, URING_CQE, URING_SQE

ENTRIES = 4096
_SETUP = 425
_PARAMETERS_BYTES = 120
_SQ_OFFSETS, _CQ_OFFSETS = 40, 80  # in struct io_uring_params
_OFFSET_SQES = 0x10000000
_LIBC = ctypes.CDLL(None, use_errno=True)


class Ring:
    """A ring; ``Ring.create`` makes one."""

    def __init__(self, fd: int, parameters: bytes) -> None:
        entries, cq_entries = struct.unpack_from("<II", parameters, 0)
        sq = struct.unpack_from("<7I", parameters, _SQ_OFFSETS)  # head tail ring_mask entries flags dropped array
        cq = struct.unpack_from("<7I", parameters, _CQ_OFFSETS)  # head tail ring_mask entries overflow cqes flags
        self.fd = fd
        size = max(sq[6] + entries * 4, cq[5] + cq_entries * URING_CQE.itemsize)
        populate = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._rings = mmap.mmap(fd, size, populate)
        self._sqes = mmap.mmap(fd, entries * URING_SQE.itemsize, populate, offset=_OFFSET_SQES)
        self.record: Any = np.zeros(1, URING).view(np.recarray)
        r, base = self.record[0], _address(self._rings)
        r.fd, r.sqes = fd, _address(self._sqes)
        r.sq_head, r.sq_tail, r.sq_mask, r.sq_array = base + sq[0], base + sq[1], entries - 1, base + sq[6]
        r.cq_head, r.cq_tail, r.cq_mask, r.cqes = base + cq[0], base + cq[1], cq_entries - 1, base + cq[5]
        r.limit = entries

    @classmethod
    def create(cls, entries: int = ENTRIES) -> Ring:
        """A new ring."""
        parameters = ctypes.create_string_buffer(_PARAMETERS_BYTES)
        fd = _LIBC.syscall(_SETUP, entries, parameters)
        if fd < 0:
            reason = os.strerror(ctypes.get_errno())
            raise EmuError(
                f"the kernel does not let this process use io_uring: {reason}",
                "set kernel.io_uring_disabled=0, or allow io_uring_setup in the container's seccomp profile",
            )
        os.set_inheritable(fd, False)
        return cls(fd, parameters.raw)

    @property
    def address(self) -> int:
        """Of the URING record, for the poller."""
        return int(self.record.ctypes.data)

    def close(self) -> None:
        """Unmap and close."""
        self._rings.close()
        self._sqes.close()
        os.close(self.fd)


class NoRing:
    """Stands in where the kernel does not allow io_uring: the poller then gives files to control's threads."""

    fd = -1

    def __init__(self) -> None:
        self.record: Any = np.zeros(1, URING).view(np.recarray)
        self.record[0].fd = -1
        self.record[0].limit = 1 << 40

    @property
    def address(self) -> int:
        """Of the URING record."""
        return int(self.record.ctypes.data)


def _address(area: mmap.mmap) -> int:
    view = np.frombuffer(area, np.uint8)
    return int(view.ctypes.data)
