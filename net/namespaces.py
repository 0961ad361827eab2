"""Network namespaces that live as long as their descriptor: nothing is left when the process ends, however it ends.

Use: ``node = Namespace("h0")``; ``with node.entered(): ...`` (sockets and children made inside belong to it);
``node.close()``. `nsenter --net=/proc/PID/fd/N` gets in from outside.
Limits: a child process that still runs inside keeps a namespace alive. ``entered`` moves the calling thread only.
Errors: NetError without the right to make one.
Source: unshare(2), setns(2), network_namespaces(7); Linux Documentation/networking/ip-sysctl.rst.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from net.errors import NetError
from net.netlink import Netlink

_CLONE_NEWNET = 0x40000000
_SELF = "/proc/thread-self/ns/net"
_SIOCETHTOOL, _STXCSUM = 0x8946, 0x17
_libc = ctypes.CDLL(None, use_errno=True)

_SYSCTLS = {
    "all/forwarding": "1",
    "all/accept_ra": "0",
    "default/accept_ra": "0",
    "default/accept_dad": "0",
    "default/addr_gen_mode": "1",  # no link-local address, so no neighbour and multicast chatter on the wires
    "default/router_solicitations": "0",
}
_NO_IPV6 = {"all/disable_ipv6": "1", "default/disable_ipv6": "1"}


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        hint = "run as root" if code == errno.EPERM else "see `emu doctor`"
        raise NetError(f"cannot {what}: {os.strerror(code)}", hint)


def enter(fd: int) -> None:
    """Moves the calling thread, and what it starts, into a namespace for good."""
    _check(_libc.setns(fd, _CLONE_NEWNET), "enter a network namespace")


@contextlib.contextmanager
def inside(fd: int) -> Iterator[None]:
    """The calling thread is in a namespace for a while; what it opens or starts belongs there."""
    home = os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, _CLONE_NEWNET), "enter a network namespace")
        try:
            yield
        finally:
            _check(_libc.setns(home, _CLONE_NEWNET), "leave a network namespace")
    finally:
        os.close(home)


class Namespace:
    """One node's network. ``fd`` is its descriptor; ``netlink`` its socket; ``name`` for messages."""

    def __init__(self, name: str, *, ipv6: bool = True) -> None:
        """``ipv6``: whether the kernel has any business with the frames that come."""
        self.name = name
        self.fd = -1
        home = os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _check(_libc.unshare(_CLONE_NEWNET), "make a network namespace")
            try:
                self.fd = os.open(_SELF, os.O_RDONLY | os.O_CLOEXEC)
                for key, value in (_SYSCTLS if ipv6 else _NO_IPV6).items():
                    Path("/proc/sys/net/ipv6/conf", key).write_text(value)
                self.netlink = Netlink()
            finally:
                _check(_libc.setns(home, _CLONE_NEWNET), "leave a network namespace")
        finally:
            os.close(home)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """The calling thread is inside; what it opens or starts belongs to the namespace."""
        return inside(self.fd)

    def whole_checksums(self, interface: str) -> None:
        """The kernel computes checksums of its own packets before the wire: there is no hardware to do it."""
        with self.entered(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
            value = ctypes.create_string_buffer(struct.pack("=II", _STXCSUM, 0))
            request = struct.pack("=16sQ", interface.encode(), ctypes.addressof(value)).ljust(40, b"\0")
            fcntl.ioctl(handle, _SIOCETHTOOL, request)

    def close(self) -> None:
        if self.fd >= 0:
            self.netlink.close()
            os.close(self.fd)
            self.fd = -1
