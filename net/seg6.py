"""What pyroute2 lacks of Linux's SRv6: flavors and counters of seg6local routes, and encap.red.

pyroute2 0.9.7 drops ``flavors`` silently and makes ``encap.red`` an encap. ``Route`` is its route message with the
two encapsulations declared anew, to encode and to decode.

Use: ``Route`` in place of pyroute2's rtmsg; ``end(flavors=("next-csid",))``, ``end_dt6(255)``, ``encap(carrier)``
make the value of RTA_ENCAP.
Errors: none of its own; what a kernel does not know it refuses when the route is added (net.netlink).
Source: Linux include/uapi/linux/seg6_local.h and seg6_iptunnel.h; RFC 9800 section 4.1.1 (block and function bits).
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Iterable
from typing import Any

from pyroute2.netlink import NLA_F_NESTED, nla
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from net.srv6 import BLOCK_BITS, USID_BITS

ENCAP_SEG6, ENCAP_SEG6_LOCAL = 5, 7  # LWTUNNEL_ENCAP_
ACTIONS = {"End": 1, "End.DT6": 7}
FLAVORS = {"psp": 1, "usp": 2, "usd": 3, "next-csid": 4}
MODES = {"inline": 0, "encap": 1, "l2encap": 2, "encap.red": 3, "l2encap.red": 4}
_ROUTING_TYPE_SRH = 4


class Seg6Local(nla):
    """RTA_ENCAP of kind seg6local."""

    nla_map = (
        ("SEG6_LOCAL_UNSPEC", "none"),
        ("SEG6_LOCAL_ACTION", "uint32"),
        ("SEG6_LOCAL_SRH", "hex"),
        ("SEG6_LOCAL_TABLE", "uint32"),
        ("SEG6_LOCAL_NH4", "ip4addr"),
        ("SEG6_LOCAL_NH6", "ip6addr"),
        ("SEG6_LOCAL_IIF", "uint32"),
        ("SEG6_LOCAL_OIF", "uint32"),
        ("SEG6_LOCAL_BPF", "hex"),
        ("SEG6_LOCAL_VRFTABLE", "uint32"),
        ("SEG6_LOCAL_COUNTERS", "counters"),
        ("SEG6_LOCAL_FLAVORS", "flavors"),
    )

    class counters(nla):
        """Packets, bytes and errors of one route; asked for with zeros when it is added."""

        nla_flags = NLA_F_NESTED
        nla_map = (
            ("SEG6_LOCAL_CNT_UNSPEC", "none"),
            ("SEG6_LOCAL_CNT_PAD", "hex"),
            ("SEG6_LOCAL_CNT_PACKETS", "uint64"),
            ("SEG6_LOCAL_CNT_BYTES", "uint64"),
            ("SEG6_LOCAL_CNT_ERRORS", "uint64"),
        )

    class flavors(nla):
        """Which flavors, and how a carrier is divided."""

        nla_flags = NLA_F_NESTED
        nla_map = (
            ("SEG6_LOCAL_FLV_UNSPEC", "none"),
            ("SEG6_LOCAL_FLV_OPERATION", "uint32"),
            ("SEG6_LOCAL_FLV_LCBLOCK_BITS", "uint8"),
            ("SEG6_LOCAL_FLV_LCNODE_FN_BITS", "uint8"),
        )


class Seg6(nla):
    """RTA_ENCAP of kind seg6: mode and segment routing header."""

    nla_map = (("SEG6_IPTUNNEL_UNSPEC", "none"), ("SEG6_IPTUNNEL_SRH", "cdata"))


class Route(rtmsg):
    """rtmsg that knows the above."""

    nla_map = rtmsg.nla_map

    @staticmethod
    def encap_info(message: Any, *positional: Any, **named: Any) -> Any:
        kind = rtmsg.encap_info(message, *positional, **named)
        name = getattr(kind, "__name__", "")
        return {"seg6local_encap_info": Seg6Local, "seg6_encap_info": Seg6}.get(name, kind)


def _seg6local(action: str, *more: tuple[str, Any]) -> list[tuple[str, Any]]:
    encap = {"attrs": [("SEG6_LOCAL_ACTION", ACTIONS[action]), *more]}
    return [("RTA_ENCAP_TYPE", ENCAP_SEG6_LOCAL), ("RTA_ENCAP", encap)]


def end(flavors: Iterable[str] = (), *, counters: bool = True) -> list[tuple[str, Any]]:
    """Attributes of an End route, with this project's division of carriers for next-csid."""
    more: list[tuple[str, Any]] = []
    if counters:
        zeros = [(f"SEG6_LOCAL_CNT_{name}", 0) for name in ("PACKETS", "BYTES", "ERRORS")]
        more.append(("SEG6_LOCAL_COUNTERS", {"attrs": zeros}))
    if names := list(flavors):
        operations = sum(1 << FLAVORS[name] for name in names)
        attributes = [("SEG6_LOCAL_FLV_OPERATION", operations)]
        if "next-csid" in names:
            attributes += [("SEG6_LOCAL_FLV_LCBLOCK_BITS", BLOCK_BITS), ("SEG6_LOCAL_FLV_LCNODE_FN_BITS", USID_BITS)]
        more.append(("SEG6_LOCAL_FLAVORS", {"attrs": attributes}))
    return _seg6local("End", *more)


def end_dt6(table: int) -> list[tuple[str, Any]]:
    """Attributes of an End.DT6 route: strip the outer header, look the inner one up in ``table``."""
    return _seg6local("End.DT6", ("SEG6_LOCAL_TABLE", table))


def encap(*segments: ipaddress.IPv6Address, mode: str = "encap.red") -> list[tuple[str, Any]]:
    """Attributes of a route that wraps packets; reduced and with one segment, no header but IPv6 is added."""
    last = len(segments) - 1
    header = struct.pack("=I8B", MODES[mode], 0, 2 * len(segments), _ROUTING_TYPE_SRH, last, last, 0, 0, 0)
    header += b"".join(segment.packed for segment in reversed(segments))
    return [
        ("RTA_ENCAP_TYPE", ENCAP_SEG6),
        ("RTA_ENCAP", {"attrs": [("SEG6_IPTUNNEL_SRH", header)]}),
    ]
