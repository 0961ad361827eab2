"""What an MRC engine hands over and takes in: a message with its path, and how a fabric's addresses carry it.

Use: ``Datagram(peer=3, entropy=ev, message=write)`` from an engine; ``wire = Addressing(plan, host=0)``;
``wire.encode(datagram)``; ``wire.decode(data)``. Middle packets of a long write are many and nearly alike, so there
are short cuts for them: a Burst to send, a Follower for what arrives.
Errors: MrcError for a frame that no host of the plan has sent to this one.
Source: arXiv 2605.04333 section 2.3.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
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
    is_sealed,
    seal,
)
from net.mrc.wire import MESSAGE_CODECS, WRITES, Bth, Opcode, Reth, Tseth, place, psn_add
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


class Burst(NamedTuple):
    """Middle packets of one write, each ``size`` bytes of it: they differ in number, address, payload and way.

    entropies: of each. message: of the first, but with the payload of them all.
    """

    peer: int
    entropies: list[int]
    message: Message
    size: int

    def datagrams(self) -> Iterator[Datagram]:
        """One by one."""
        bth, (meth, stamp, reth), payload = self.message
        for n, entropy in enumerate(self.entropies):
            at = n * self.size
            headers = meth, stamp, reth._replace(va=reth.va + at)
            one = Message(bth._replace(psn=psn_add(bth.psn, n)), headers, payload[at : at + self.size])
            yield Datagram(self.peer, entropy, one)


# In a middle packet of a write, counted from BTH.
_PSN = place(Opcode.WRITE_MIDDLE, 1, Bth, "psn")
_STAMP = place(Opcode.WRITE_MIDDLE, 1, Tseth, "tx_timestamp")
_VA = place(Opcode.WRITE_MIDDLE, 1, Reth, "va")
_HEAD_END = _FRONT_BYTES + MESSAGE_CODECS[Opcode.WRITE_MIDDLE, 1].size
_PSN_BYTES, _VA_BYTES = _PSN.stop - _PSN.start, _VA.stop - _VA.start


def frame_bytes(opcode: int, ts: int, payload_bytes: int) -> int:
    """Length of a frame with Ethernet, two IPv6 headers and ICRC; the payload's padding counts."""
    return _ENDS_BYTES + MESSAGE_CODECS[opcode, ts].size + payload_bytes


class Addressing:
    """One host's way in and out of a fabric with SRv6 carriers.

    ``encode`` and ``decode`` give what ``encode_frame(frame(...))`` and ``datagram(decode_frame(...))`` do, but make
    what is in front of the messages once per way and length (DPU_EMU_MRC_FRONTS=0: each time).
    """

    def __init__(
        self, plan: Plan, host: int, dscp: Dscp = DSCP, *, ethernet: Mapping[int, bytes] | None = None
    ) -> None:
        self.plan = plan
        self.host = host
        self.dscp = dscp
        self.ethernet = ethernet or {}
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
        """The frame, with the plane's Ethernet header where ``ethernet`` has one."""
        if not self._keeps:
            return self._ethernet(datagram.entropy) + encode_frame(self.frame(datagram))
        content = datagram.message
        head = encode_headers(content)
        front = self._front(datagram, len(head) + len(content.payload) + content.bth.pad)
        return seal(front, head, content.payload, content.bth.pad)

    def encode_burst(self, burst: Burst) -> Iterator[bytes]:
        """As ``encode`` of each of its datagrams."""
        bth, (_, _, reth), payload = burst.message
        head, size = bytearray(encode_headers(burst.message)), burst.size
        length = len(head) + size + bth.pad
        fronts = {ev: self._front(Datagram(burst.peer, ev, burst.message), length) for ev in {*burst.entropies}}
        for n, entropy in enumerate(burst.entropies):
            at = n * size
            head[_PSN] = psn_add(bth.psn, n).to_bytes(_PSN_BYTES, "big")
            head[_VA] = (reth.va + at).to_bytes(_VA_BYTES, "big")
            yield seal(fronts[entropy], head, payload[at : at + size], bth.pad)

    def _front(self, datagram: Datagram, size: int) -> Front:
        """In front of ``size`` bytes."""
        peer, entropy, (bth, _, _), *_ = datagram
        key = (peer, entropy, bth.opcode << 1 | bth.rtx, size)
        front = self._fronts.get(key)
        if front is None:
            data, crc = encode_front(self.frame(datagram), size)
            front = _keep(self._fronts, key, Front(self._ethernet(entropy) + data, crc))
        return front

    def _ethernet(self, entropy: int) -> bytes:
        return self.ethernet.get(plane_of(entropy), b"")

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

    def follower(self, data: bytes | memoryview, datagram: Datagram) -> Follower | None:
        """For a datagram and the bytes that it was decoded from; None when it has no successors to be known by."""
        bth = datagram.message.bth
        if not self._keeps or bth.opcode != Opcode.WRITE_MIDDLE or not bth.ts:
            return None
        return Follower(self._arrived, data, datagram)


class Follower:
    """Knows the successors of a middle packet: each one higher in number and further on in address, else alike, whole
    and unmarked; by any way, at any time.

    It parses nothing, for it knows every byte but those of time stamp, payload and ICRC.
    """

    def __init__(
        self, arrived: dict[bytes, tuple[Arrived, Datagram]], data: bytes | memoryview, datagram: Datagram
    ) -> None:
        bth, _, payload = datagram.message
        self._arrived = arrived
        self._peer = datagram.peer
        self._psn = bth.psn
        self._va = datagram.message.need(Reth).va
        self._size = len(payload)
        self._end = _HEAD_END + len(payload) + bth.pad + ICRC_BYTES
        head = bytes(data[_FRONT_BYTES:_HEAD_END])
        self._parts = (
            head[: _PSN.start],
            head[_PSN.stop : _STAMP.start],
            head[_STAMP.stop : _VA.start],
            head[_VA.stop :],
        )

    def payload(self, data: bytes | memoryview) -> bytes | memoryview | None:
        """Of the next successor; None when the bytes behind an Ethernet header are something else."""
        head = bytes(data[:_HEAD_END])
        known = self._arrived.get(head[:_FRONT_BYTES])
        if known is None:
            return None
        arrived, (peer, _, _, ce, trimmed, _) = known
        psn, va = psn_add(self._psn, 1), self._va + self._size
        before, behind_psn, behind_stamp, behind_va = self._parts
        if (
            peer != self._peer
            or ce
            or trimmed
            or not self._end == arrived.end <= len(data)
            or head[_FRONT_BYTES : _FRONT_BYTES + _STAMP.start]
            != before + psn.to_bytes(_PSN_BYTES, "big") + behind_psn
            or head[_FRONT_BYTES + _STAMP.stop :] != behind_stamp + va.to_bytes(_VA_BYTES, "big") + behind_va
            or not is_sealed(data, arrived)
        ):
            return None
        self._psn, self._va = psn, va
        return data[_HEAD_END : _HEAD_END + self._size]
