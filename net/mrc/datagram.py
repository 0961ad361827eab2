"""What an MRC engine hands over and takes in: a message with its path, and how a fabric's addresses carry it.

Use: ``Datagram(peer=3, entropy=ev, message=write)`` from an engine; ``wire = Addressing(plan, host=0)``;
``encode_frame(wire.frame(datagram))``; ``wire.datagram(decode_frame(data))``.
Errors: MrcError for a frame that no host of the plan has sent to this one.
Source: arXiv 2605.04333 section 2.3.
"""

from __future__ import annotations

from typing import NamedTuple

from net.errors import MrcError, Reason
from net.mrc.frame import (
    DSCP,
    ECN_CE,
    ECN_ECT,
    ETHERNET_BYTES,
    ICRC_BYTES,
    IPV6_BYTES,
    UDP_BYTES,
    Dscp,
    Frame,
    Message,
)
from net.mrc.wire import CODECS, WRITES, Bth, Opcode
from net.srv6 import Plan
from net.topology import plane_of


class Datagram(NamedTuple):
    """To ``peer`` when an engine sends it, from ``peer`` when it arrives.

    ce: the outer header was marked. trimmed: only headers are left; last_hop: cut by the port to this host.
    """

    peer: int
    entropy: int
    message: Message
    ce: bool = False
    trimmed: bool = False
    last_hop: bool = False

    @property
    def is_data(self) -> bool:
        """A write: may be trimmed."""
        return self.message.bth.opcode in WRITES

    @property
    def is_control(self) -> bool:
        """Served first. Probes are not: they are to meet what data meets, but untrimmed."""
        return not self.is_data and self.message.bth.opcode != Opcode.PROBE

    def wire_bytes(self) -> int:
        """Length of the frame with Ethernet, two IPv6 headers and ICRC."""
        message = self.message
        headers = sum(CODECS[type(header)].size for header in message.headers)
        ends = ETHERNET_BYTES + 2 * IPV6_BYTES + UDP_BYTES + CODECS[Bth].size + ICRC_BYTES
        return ends + headers + len(message.payload) + message.bth.pad


class Addressing:
    """One host's way in and out of a fabric with SRv6 carriers."""

    def __init__(self, plan: Plan, host: int, dscp: Dscp = DSCP) -> None:
        self.plan = plan
        self.host = host
        self.dscp = dscp
        fabric = plan.fabric
        self._peers = {
            plan.host_address(peer, plane).packed: peer
            for peer in range(fabric.hosts)
            for plane in range(fabric.planes)
        }
        self._own = {plan.host_address(host, plane).packed for plane in range(fabric.planes)}

    def frame(self, datagram: Datagram) -> Frame:
        """The frame that carries a datagram along the path of its EV."""
        plan, plane = self.plan, plane_of(datagram.entropy)
        path = plan.fabric.path(self.host, datagram.peer, datagram.entropy)
        source = plan.host_address(self.host, plane).packed
        return Frame(
            source,
            plan.host_address(datagram.peer, plane).packed,
            datagram.entropy,
            datagram.message,
            dscp=self._code_point(datagram),
            ecn=0 if datagram.is_control else ECN_ECT,
            outer_src=source,
            outer_dst=plan.carrier(path).packed,
        )

    def _code_point(self, datagram: Datagram) -> int:
        if datagram.is_data:
            return self.dscp.trimmable_retx if datagram.message.bth.rtx else self.dscp.trimmable
        return self.dscp.control if datagram.is_control else self.dscp.no_trim

    def datagram(self, frame: Frame) -> Datagram:
        """What an engine takes in."""
        peer = self._peers.get(frame.src)
        if peer is None or frame.dst not in self._own:
            raise MrcError(Reason.ENCAPSULATION, "not from a host of this plan to this one")
        return Datagram(
            peer,
            frame.entropy,
            frame.message,
            frame.ecn == ECN_CE,
            frame.trimmed,
            frame.trimmed and frame.dscp == self.dscp.trimmed_lasthop,
        )
