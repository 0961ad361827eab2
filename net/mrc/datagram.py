"""What an MRC engine hands over and takes in: a message with its path, and how a fabric's addresses carry it.

Use: ``Datagram(peer=3, entropy=ev, message=write)`` from an engine; ``wire = Addressing(plan, host=0)``;
``wire.encode(datagram)``; ``wire.decode(data)``.
Errors: MrcError for a frame that no host of the plan has sent to this one.
Source: arXiv 2605.04333 section 2.3.
"""

from __future__ import annotations

import os
from typing import NamedTuple, TypeVar

from net.errors import MrcError, Reason
from net.mrc.frame import (
    DSCP,
    ECN_CE,
    ECN_ECT,
    ETHERNET_BYTES,
    ICRC_BYTES,
    IPV6_BYTES,
    UDP_BYTES,
    Arrived,
    Dscp,
    Frame,
    Front,
    Message,
    decode_front,
    decode_inside,
    encode_frame,
    encode_front,
    encode_headers,
    seal,
)
from net.mrc.wire import MESSAGE_CODECS, WRITES, Opcode
from net.srv6 import Plan
from net.topology import plane_of, uplink_of

_ENDS_BYTES = ETHERNET_BYTES + 2 * IPV6_BYTES + UDP_BYTES + ICRC_BYTES
_FRONT_BYTES = 2 * IPV6_BYTES + UDP_BYTES
_KEPT_MAX = 1 << 12
K = TypeVar("K")
V = TypeVar("V")


def _keep(kept: dict[K, V], key: K, value: V) -> V:
    """Remembers a value; what strangers send must not fill the memory."""
    if len(kept) >= _KEPT_MAX:
        kept.clear()
    kept[key] = value
    return value


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
        """Length of the whole frame with Ethernet, two IPv6 headers and ICRC."""
        bth, _, payload = self.message
        return frame_bytes(bth.opcode, bth.ts, len(payload) + bth.pad)


def frame_bytes(opcode: int, ts: int, payload_bytes: int) -> int:
    """Length of a frame with Ethernet, two IPv6 headers and ICRC; the payload's padding counts."""
    return _ENDS_BYTES + MESSAGE_CODECS[opcode, ts].size + payload_bytes


class Addressing:
    """One host's way in and out of a fabric with SRv6 carriers.

    ``encode`` and ``decode`` give what ``encode_frame(frame(...))`` and ``datagram(decode_frame(...))`` do, but make
    what is in front of the messages once per way and length (DPU_EMU_MRC_FRONTS=0: each time).
    """

    def __init__(self, plan: Plan, host: int, dscp: Dscp = DSCP) -> None:
        self.plan = plan
        self.host = host
        self.dscp = dscp
        fabric = plan.fabric
        self._peers = {
            plan.host_address(peer, plane).packed: (peer, plane)
            for peer in range(fabric.hosts)
            for plane in range(fabric.planes)
        }
        self._own = {plan.host_address(host, plane).packed for plane in range(fabric.planes)}
        self._keeps = os.environ.get("DPU_EMU_MRC_FRONTS") != "0"
        self._fronts: dict[tuple[int, int, int, int], Front] = {}
        self._arrived: dict[bytes, tuple[Arrived, Datagram]] = {}

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
        """What an engine takes in. Its EV is one that an answer can take, though no ICRC covers the flow label."""
        peer, plane = self._peers.get(frame.src, (None, None))
        if peer is None or frame.dst not in self._own:
            raise MrcError(Reason.ENCAPSULATION, "not from a host of this plan to this one")
        if plane_of(frame.entropy) != plane or uplink_of(frame.entropy) >= self.plan.fabric.t1_per_plane:
            raise MrcError(Reason.ENCAPSULATION, f"{frame.entropy:#x} is no way from there to here")
        return Datagram(
            peer,
            frame.entropy,
            frame.message,
            frame.ecn == ECN_CE,
            frame.trimmed,
            frame.trimmed and frame.dscp == self.dscp.trimmed_lasthop,
        )

    def encode(self, datagram: Datagram) -> bytes:
        """The bytes behind an Ethernet header."""
        if not self._keeps:
            return encode_frame(self.frame(datagram))
        content = datagram.message
        bth, _, payload = content
        head = encode_headers(content)
        size = len(head) + len(payload) + bth.pad
        key = (datagram.peer, datagram.entropy, bth.opcode << 1 | bth.rtx, size)
        front = self._fronts.get(key)
        if front is None:
            front = _keep(self._fronts, key, encode_front(self.frame(datagram), size))
        return seal(front, head, content)

    def decode(self, data: bytes | memoryview) -> Datagram:
        """What an engine takes in, from the bytes behind an Ethernet header; a payload is a part of ``data``."""
        key = bytes(data[:_FRONT_BYTES])
        known = self._arrived.get(key)
        if known is None:
            arrived = decode_front(data, dscp=self.dscp)
            known = arrived, self.datagram(arrived.frame)
            if self._keeps and arrived.start == _FRONT_BYTES:
                _keep(self._arrived, key, known)
        arrived, (peer, entropy, _, *marks) = known
        return Datagram(peer, entropy, decode_inside(data, arrived), *marks)
