"""System calls for the pollers, compiled or as plain Python.

The compiled form calls libc by symbol (an address baked in would not survive numba's cache). All return what libc
returns: a negative number is a failure. ``errno`` is not looked at: the callers treat every failure alike.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from dpu.fastpath.jit import JIT, compiled

_LIBC = ctypes.CDLL(None, use_errno=True)


def _symbol(name: str, arguments: int) -> Any:
    return types.ExternalFunction(name, types.int64(*([types.int64] * arguments)))


_write, _read, _recv = _symbol("write", 3), _symbol("read", 3), _symbol("recv", 4)
_ppoll, _syscall, _memset = _symbol("ppoll", 4), _symbol("syscall", 7), _symbol("memset", 3)
_fallocate = _symbol("fallocate", 4)
_memcmp, _memchr, _memmove = _symbol("memcmp", 3), _symbol("memchr", 3), _symbol("memmove", 3)
_kill = _symbol("kill", 2)


def _call(name: str, *arguments: int) -> int:
    function = getattr(_LIBC, name)
    function.restype = ctypes.c_long
    return int(function(*(ctypes.c_long(int(argument)) for argument in arguments)))


def write(fd: int, address: int, count: int) -> int:
    """write(2)."""
    return _call("write", fd, address, count)


def read(fd: int, address: int, count: int) -> int:
    """read(2)."""
    return _call("read", fd, address, count)


def recv(fd: int, address: int, count: int, flags: int) -> int:
    """recv(2); 0 is the end of the stream."""
    return _call("recv", fd, address, count, flags)


def ppoll(address: int, count: int, timeout: int) -> int:
    """ppoll(2) on ``count`` pollfd records at ``address``; ``timeout``: address of a struct timespec."""
    return _call("ppoll", address, count, timeout, 0)


def io_uring_enter(fd: int, submit: int, wait: int, flags: int) -> int:
    """io_uring_enter(2)."""
    return _call("syscall", 426, fd, submit, wait, flags, 0, 0)


def punch(fd: int, offset: int, size: int) -> int:
    """fallocate(2): give the pages back, they read as zeroes."""
    return ctypes.c_int(_call("fallocate", fd, 3, offset, size)).value


def fill(address: int, byte: int, count: int) -> None:
    """Set ``count`` bytes to ``byte``."""
    _call("memset", address, byte, count)


def differ(left: int, right: int, count: int) -> int:
    """0 when two areas are equal."""
    return ctypes.c_int(_call("memcmp", left, right, count)).value


def find(address: int, byte: int, count: int) -> int:
    """Address of the first ``byte`` of an area; 0 when there is none."""
    return _call("memchr", address, byte, count)


def move(target: int, source: int, count: int) -> None:
    """Copy ``count`` bytes between areas that may overlap."""
    _call("memmove", target, source, count)


def die(pid: int) -> None:
    """End this process as a crash would (SIGKILL); for the named kill points of the tests."""
    _call("kill", pid, 9)


@compiled
def _int(value: int) -> int:
    """C's ``int`` results leave the upper half of the register undefined."""
    return np.int64(np.int32(value))  # type: ignore[return-value]


@compiled
def _drop(value: int) -> None:
    """Give a call whose result does not matter the type of a plain statement."""


if JIT:
    overload(write)(lambda fd, address, count: lambda fd, address, count: _write(fd, address, count))
    overload(read)(lambda fd, address, count: lambda fd, address, count: _read(fd, address, count))
    overload(recv)(
        lambda fd, address, count, flags: lambda fd, address, count, flags: _recv(fd, address, count, flags)
    )
    overload(ppoll)(
        lambda address, count, timeout: lambda address, count, timeout: _int(_ppoll(address, count, timeout, 0))
    )
    overload(io_uring_enter)(
        lambda fd, submit, wait, flags: lambda fd, submit, wait, flags: _syscall(426, fd, submit, wait, flags, 0, 0)
    )
    overload(punch)(lambda fd, offset, size: lambda fd, offset, size: _int(_fallocate(fd, 3, offset, size)))
    overload(fill)(lambda address, byte, count: lambda address, byte, count: _drop(_memset(address, byte, count)))
    overload(differ)(lambda left, right, count: lambda left, right, count: _int(_memcmp(left, right, count)))
    overload(find)(lambda address, byte, count: lambda address, byte, count: _memchr(address, byte, count))
    overload(move)(lambda target, source, count: lambda target, source, count: _drop(_memmove(target, source, count)))
    overload(die)(lambda pid: lambda pid: _drop(_kill(pid, 9)))
