"""What a live fabric needs of the kernel, tried one by one in a namespace of its own.

Use: ``missing()`` is a line for each need that is not met, with what to do; an empty list: a fabric can be made.
Errors: none. Source: the names of options are Linux's Kconfig.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from ipaddress import IPv6Address, IPv6Network

from net.ebpf.kernel import Ring, load
from net.ebpf.program import Program
from net.errors import NetError
from net.namespaces import Namespace
from net.netlink import EGRESS
from net.seg6 import encap, end, end_dt6

_PREFIX = IPv6Network("fc00:0:1::/48")
_INDEX = 2


def missing() -> list[str]:
    """Every need that is not met: ``what: why``."""
    if os.geteuid() != 0:
        return ["the right to make namespaces: run as root"]
    try:
        with contextlib.closing(Namespace("probe")) as node, contextlib.closing(Namespace("probe peer")) as peer:
            return [line for line in (_try(node, peer, need) for need in _NEEDS) if line]
    except NetError as error:
        return [str(error)]


def _try(node: Namespace, peer: Namespace, need: tuple[str, Callable[[Namespace, Namespace], None]]) -> str:
    name, attempt = need
    try:
        attempt(node, peer)
    except (NetError, OSError) as error:
        reason = (
            error.message.rpartition(": ")[2]
            if isinstance(error, NetError)
            else os.strerror(error.errno or errno.EIO)
        )
        return f"{name} ({reason})"
    return ""


def _link(node: Namespace, peer: Namespace) -> None:
    mac = bytes([2, 0, 0, 0, 0, 1])
    node.netlink.veth([("a", _INDEX, node.fd, mac), ("b", _INDEX, peer.fd, mac)], 9000, 100)
    node.netlink.flush()
    node.netlink.set_up(_INDEX)
    node.netlink.address(_INDEX, IPv6Address("fd00::1"))
    node.netlink.flush()


def _route(attributes: list[tuple[str, object]]) -> Callable[[Namespace, Namespace], None]:
    def attempt(node: Namespace, peer: Namespace) -> None:
        node.netlink.route(_PREFIX, _INDEX, attributes)
        node.netlink.flush()

    return attempt


def _htb(node: Namespace, peer: Namespace) -> None:
    node.netlink.htb(_INDEX, 1, (1, 2), 10**8, 20_000)
    node.netlink.flush()


def _clsact(node: Namespace, peer: Namespace) -> None:
    node.netlink.clsact(_INDEX)
    node.netlink.flush()


def _program() -> int:
    program = Program("probe")
    program.ret(0)
    return load(program.compile(), "probe")


def _bpf(node: Namespace, peer: Namespace) -> None:
    fd = _program()
    try:
        node.netlink.bpf(_INDEX, EGRESS, fd, "probe")
        node.netlink.flush()
    finally:
        os.close(fd)


def _ring(node: Namespace, peer: Namespace) -> None:
    Ring(4096).close()


def _packets(node: Namespace, peer: Namespace) -> None:
    import socket

    with node.entered():
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()


_NEEDS: list[tuple[str, Callable[[Namespace, Namespace], None]]] = [
    ("CONFIG_VETH: virtual Ethernet pairs", _link),
    ("CONFIG_IPV6_SEG6_LWTUNNEL, Linux 6.1: End with next-csid", _route(end(("next-csid",)))),
    ("CONFIG_IPV6_SEG6_LWTUNNEL: End.DT6", _route(end_dt6(255))),
    ("CONFIG_IPV6_SEG6_LWTUNNEL, Linux 5.19: encap.red", _route(encap(IPv6Address("fc00:0:1::")))),
    ("CONFIG_NET_SCH_HTB: line rates and classes", _htb),
    ("CONFIG_NET_SCH_INGRESS: clsact", _clsact),
    ("CONFIG_BPF_SYSCALL, CONFIG_NET_CLS_BPF: programs on ports", _bpf),
    ("CONFIG_BPF_SYSCALL, Linux 5.8: ring buffers", _ring),
    ("CONFIG_PACKET: packet sockets", _packets),
]
