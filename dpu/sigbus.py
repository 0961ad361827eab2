"""Outlive clients that take away the file behind their memory.

A load or store beyond the end of a mapped file, or in a page that the file system has no room for, ends a process by
SIGBUS. A client can cause that at any moment with a file that is not sealed: it calls ftruncate. So every mapping of
guest memory is registered here, and when one faults, all of it is replaced by anonymous memory, which has zeroes: the
instruction runs again and finds those, and the mapping is ``lost``, for control to end the connection. Nobody
else sees anything. (Compositors do the same with the buffers of Wayland clients.) System calls that meet such a page
fail with EFAULT by themselves.

The handler is Python: SIGBUS is raised by an instruction of the thread itself, never between two of the interpreter,
and a thread that runs compiled code takes the interpreter's lock for the handler as for any callback.

Use: ``guard(area)`` after mapping, ``release(area)`` before unmapping.
Errors: none; a SIGBUS anywhere else ends the process, as ever.
Source: sigaction(2), mmap(2) (MAP_FIXED replaces in one step).
"""

from __future__ import annotations

import ctypes
import mmap
import signal
from collections.abc import Callable
from typing import Any, Final

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_SA_SIGINFO = 4
_SI_ADDR = 16  # offset in siginfo_t

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _SigAction(ctypes.Structure):
    """struct sigaction of the C library."""

    _fields_ = [
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ulong * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    ]


class Area:
    """``size`` bytes at ``host``; ``on_lost`` is called once, in the handler: it may write to a descriptor."""

    def __init__(self, host: int, size: int, on_lost: Callable[[], None]) -> None:
        self.host = host
        self.size = size
        self.lost = False
        self.on_lost = on_lost


_areas: list[Area] = []


def guard(area: Area) -> None:
    """Have the handler look after ``area``."""
    if not _areas:
        _set(_ADDRESS, _SA_SIGINFO)
    _areas.append(area)


def release(area: Area) -> None:
    """Forget ``area``."""
    _areas.remove(area)


def _set(handler: int, flags: int) -> None:
    action = _SigAction(handler=handler, flags=flags)
    if _LIBC.sigaction(signal.SIGBUS, ctypes.byref(action), None):
        raise OSError(ctypes.get_errno(), "sigaction")


def _on_fault(_number: int, info: int, _context: Any) -> None:
    address = ctypes.c_uint64.from_address(info + _SI_ADDR).value
    for area in _areas.copy():  # a copy: control may release another one while this thread waits for the lock
        if area.host <= address < area.host + area.size:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
            _LIBC.mmap(area.host, area.size, protection, flags, -1, 0)
            area.lost = True
            area.on_lost()
            return
    _set(0, 0)  # not ours: the instruction runs again and ends the process


_CALLBACK: Final = _HANDLER(_on_fault)
_ADDRESS: Final = int(ctypes.cast(_CALLBACK, ctypes.c_void_p).value or 0)
