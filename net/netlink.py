"""rtnetlink in batches: many messages in one system call, each answered, errors told by what was wanted.

Messages are pyroute2's (and net.seg6's); the socket is a plain one of the namespace that it was opened in.

Use: ``link = Netlink()`` inside the namespace; ``link.add(message, "add route ...")`` many times; ``link.flush()``.
Limits: one thread. Errors: NetError with what was wanted and what the kernel says, in its own words where it has any.
Source: netlink(7), rtnetlink(7); RFC 3549.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv6Address, IPv6Network
from typing import Any

from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.tcmsg import sched_htb, tcmsg

from net.errors import NetError
from net.seg6 import Route

_REQUEST, _ACK, _CREATE, _REPLACE, _DUMP = 1, 4, 0x400, 0x100, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_NEWLINK, _NEWADDR, _NEWROUTE, _NEWNEIGH, _NEWQDISC, _NEWTCLASS, _NEWTFILTER = 16, 20, 24, 28, 36, 40, 44
_GETROUTE = 26
_SOL_NETLINK, _EXT_ACK = 270, 11
_ACK_TLVS, _ACK_TEXT = 0x200, 1
_CHUNK_BYTES = 32 << 10
_UP = 1
_PERMANENT = 0x80
_MAIN_TABLE, _STATIC, _UNICAST = 254, 4, 1
_HTB_PRIORITIES = (0, 1)
_PFIFO_PACKETS = 10_000
CLSACT, INGRESS, EGRESS = 0xFFFFFFF1, 0xFFFFFFF2, 0xFFFFFFF3
_CLSACT_HANDLE, _ROOT = 0xFFFF0000, 0xFFFFFFFF
_ETH_P_ALL = 0x0300  # in network order, as tc wants it


class Netlink:
    """A socket of the namespace that the calling thread is in."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.setsockopt(_SOL_NETLINK, _EXT_ACK, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self._pending: list[tuple[bytes, str]] = []
        self._sequence = 0

    def add(self, message: Any, kind: int, what: str, *, replace: bool = False) -> None:
        """Remembers one request; ``what`` is for the error."""
        self._sequence += 1
        header = message["header"]
        header["type"] = kind
        header["flags"] = _REQUEST | _ACK | _CREATE | (_REPLACE if replace else 0)
        header["sequence_number"] = self._sequence
        message.encode()
        self._pending.append((bytes(message.data), what))

    def flush(self) -> None:
        """Sends what is remembered; NetError for the first that the kernel refuses, after all were tried."""
        first: NetError | None = None
        pending, self._pending = self._pending, []
        sequence = self._sequence - len(pending)
        while pending:
            size = count = 0
            for data, _ in pending:
                if count and size + len(data) > _CHUNK_BYTES:
                    break
                size, count = size + len(data), count + 1
            chunk, pending = pending[:count], pending[count:]
            self._socket.send(b"".join(data for data, _ in chunk))
            for number, code, text in self._answers(count):
                if code and first is None:
                    what = chunk[number - sequence - 1][1]
                    first = NetError(f"{what}: {text or os.strerror(code)}", _HINTS.get(code, "see `emu doctor`"))
            sequence += count
        if first is not None:
            raise first

    def _answers(self, count: int) -> Iterator[tuple[int, int, str]]:
        while count:
            for kind, flags, number, body in _messages(self._socket.recv(1 << 16)):
                if kind == _NLMSG_ERROR:
                    count -= 1
                    code = -struct.unpack_from("=i", body)[0]
                    yield number, code, _text(body, flags) if code else ""

    def routes(self) -> list[Any]:
        """Every IPv6 route of the namespace, as ``Route`` messages."""
        self._sequence += 1
        self._socket.send(struct.pack("=IHHII12B", 28, _GETROUTE, _REQUEST | _DUMP, self._sequence, 0, 10, *[0] * 11))
        found: list[Any] = []
        while True:
            data = self._socket.recv(1 << 17)
            for kind, _, _, body in _messages(data):
                if kind == _NLMSG_DONE:
                    return found
                if kind == _NEWROUTE:
                    message = Route(struct.pack("=IHHII", len(body) + 16, kind, 0, 0, 0) + body)
                    message.decode()
                    found.append(message)

    def close(self) -> None:
        self._socket.close()

    # What the fabric asks for.

    def veth(self, ends: list[tuple[str, int, int, bytes]], mtu: int, queue_packets: int) -> None:
        """Two ports (name, interface index, namespace, MAC) and the cable between them; both are down.

        One packet per buffer (no segmentation offload), so that a queue meets what the wire would.
        """
        near, far = (_end(*end, mtu, queue_packets) for end in ends)
        data = {"attrs": [("VETH_INFO_PEER", far)]}
        info = {"attrs": [("IFLA_INFO_KIND", "veth"), ("IFLA_INFO_DATA", data)]}
        message = ifinfmsg()
        message.setvalue({**near, "attrs": [*near["attrs"], ("IFLA_LINKINFO", info)]})
        self.add(message, _NEWLINK, f"link {ends[0][0]} to {ends[1][0]}")

    def set_up(self, index: int, up: bool = True, *, mtu: int | None = None, mac: bytes | None = None) -> None:
        attributes: list[tuple[str, Any]] = [] if mtu is None else [("IFLA_MTU", mtu)]
        if mac is not None:
            attributes.append(("IFLA_ADDRESS", mac.hex(":")))
        message = ifinfmsg()
        message.setvalue({"index": index, "flags": _UP if up else 0, "change": _UP, "attrs": attributes})
        self.add(message, _NEWLINK, f"set interface {index} {'up' if up else 'down'}")

    def address(self, index: int, address: IPv6Address) -> None:
        """A /128 that needs no duplicate detection."""
        message = ifaddrmsg()
        flags = 0x02  # IFA_F_NODAD
        attributes = [("IFA_LOCAL", str(address)), ("IFA_ADDRESS", str(address))]
        message.setvalue({"family": 10, "prefixlen": 128, "index": index, "flags": flags, "attrs": attributes})
        self.add(message, _NEWADDR, f"address {address}")

    def neighbour(self, index: int, address: IPv6Address, mac: bytes) -> None:
        message = ndmsg()
        attributes = [("NDA_DST", str(address)), ("NDA_LLADDR", mac.hex(":"))]
        message.setvalue({"family": 10, "ifindex": index, "state": _PERMANENT, "attrs": attributes})
        self.add(message, _NEWNEIGH, f"neighbour {address} of interface {index}", replace=True)

    def route(
        self,
        prefix: IPv6Network,
        index: int,
        encap: list[tuple[str, Any]] | None = None,
        via: IPv6Address | None = None,
    ) -> None:
        """To ``prefix`` by interface ``index``, to the neighbour ``via``, encapsulated as net.seg6 says."""
        attributes: list[tuple[str, Any]] = [("RTA_DST", str(prefix.network_address)), ("RTA_OIF", index)]
        if via is not None:
            attributes.append(("RTA_GATEWAY", str(via)))
        message = Route()
        message.setvalue(
            {
                "family": 10,
                "dst_len": prefix.prefixlen,
                "table": _MAIN_TABLE,
                "proto": _STATIC,
                "type": _UNICAST,
                "attrs": [*attributes, *(encap or ())],
            }
        )
        self.add(message, _NEWROUTE, f"route to {prefix}", replace=True)

    def clsact(self, index: int) -> None:
        """Where BPF filters hang."""
        self._tc(_NEWQDISC, "clsact", index, _CLSACT_HANDLE, CLSACT, "clsact")

    def bpf(self, index: int, place: int, program: int, name: str) -> None:
        """A BPF filter that decides by itself; ``place``: INGRESS or EGRESS."""
        options = [("TCA_BPF_FD", program), ("TCA_BPF_NAME", name), ("TCA_BPF_FLAGS", 1)]
        self._tc(_NEWTFILTER, "bpf", index, 1, place, f"BPF filter {name}", options, info=1 << 16 | _ETH_P_ALL)

    def htb(self, index: int, major: int, classes: tuple[int, int], rate_bps: int, burst_bytes: int) -> None:
        """A port of ``rate_bps`` with two classes; the first of them is always served first."""
        init = {"debug": 0, "defcls": classes[1], "direct_pkts": 0, "rate2quantum": 10, "version": 3}
        self._tc(_NEWQDISC, "htb", index, major << 16, _ROOT, "HTB", [("TCA_HTB_INIT", init)])
        self.htb_rates(index, major, classes, rate_bps, burst_bytes)
        for minor in classes:
            handle = (0x10 + minor) << 16
            queue = {"limit": _PFIFO_PACKETS}
            self._tc(_NEWQDISC, "pfifo", index, handle, major << 16 | minor, "pfifo", queue)

    def htb_rates(self, index: int, major: int, classes: tuple[int, int], rate_bps: int, burst_bytes: int) -> None:
        """Another rate; what waits stays."""
        rate = max(1, rate_bps // 8)
        parent, top = major << 16 | 0xFF, major << 16
        self._htb_class(index, parent, top, rate, rate, 0, burst_bytes)
        for minor, own, priority in zip(classes, (rate, max(1, rate // 100)), _HTB_PRIORITIES):
            self._htb_class(index, top | minor, parent, own, rate, priority, burst_bytes)

    def _htb_class(
        self, index: int, handle: int, parent: int, rate: int, ceil: int, priority: int, burst: int
    ) -> None:
        wanted = {"rate": rate, "ceil": ceil, "prio": priority, "burst": burst, "cburst": burst, "quantum": burst}
        options = sched_htb.get_class_parameters(wanted)["attrs"]
        tables = ("TCA_HTB_RTAB", "TCA_HTB_CTAB")  # 1 KiB each, and kernels since 3.9 do without
        wanted_options = [pair for pair in options if pair[0] not in tables]
        self._tc(_NEWTCLASS, "htb", index, handle, parent, "HTB class", wanted_options)

    def _tc(
        self,
        kind: int,
        name: str,
        index: int,
        handle: int,
        parent: int,
        what: str,
        options: Any = None,
        info: int = 0,
    ) -> None:
        attributes: list[tuple[str, Any]] = [("TCA_KIND", name)]
        if options is not None:
            attributes.append(("TCA_OPTIONS", options if isinstance(options, dict) else {"attrs": options}))
        message = tcmsg()
        message.setvalue({"index": index, "handle": handle, "parent": parent, "info": info, "attrs": attributes})
        self.add(message, kind, f"{what} on interface {index}")


_HINTS = {errno.EPERM: "run as root", errno.ENOENT: "the kernel lacks it: see `emu doctor`"}


def _end(name: str, index: int, namespace: int, mac: bytes, mtu: int, queue_packets: int) -> dict[str, Any]:
    return {
        "index": index,
        "attrs": [
            ("IFLA_IFNAME", name),
            ("IFLA_NET_NS_FD", namespace),
            ("IFLA_ADDRESS", mac.hex(":")),
            ("IFLA_MTU", mtu),
            ("IFLA_TXQLEN", queue_packets),
            ("IFLA_GSO_MAX_SEGS", 1),
        ],
    }


def _messages(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """(type, flags, sequence number, body) of each."""
    offset = 0
    while offset < len(data):
        length, kind, flags, number, _ = struct.unpack_from("=IHHII", data, offset)
        yield kind, flags, number, data[offset + 16 : offset + length]
        offset += length + 3 & ~3


def _text(body: bytes, flags: int) -> str:
    """The kernel's own words behind an error, which it adds to some."""
    if not flags & _ACK_TLVS:
        return ""
    quoted = struct.unpack_from("=I", body, 4)[0]
    offset = 4 + (16 if flags & 0x100 else quoted + 3 & ~3)  # NLM_F_CAPPED: only the header comes back
    while offset + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, offset)
        if kind & 0x3FFF == _ACK_TEXT:
            return body[offset + 4 : offset + length].rstrip(b"\0").decode()
        offset += max(4, length + 3 & ~3)
    return ""
