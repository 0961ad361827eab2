"""MRC packets: messages behind UDP, entropy values, ICRC, encapsulation, trimmed frames.

    Ethernet | [outer IPv6] | IPv6 | UDP | BTH | headers by opcode | payload, padded to 4 | ICRC

A frame starts at its first IPv6 header. With an outer one, its destination is an SRv6 carrier (net.srv6) and no
routing header follows.

Use: ``write = message(Bth(Opcode.WRITE_ONLY, dqp=5), Meth(), Reth(va, r_key, len(data)), payload=data)``;
``encode_frame(Frame(src, dst, entropy, write, outer_dst=carrier.packed))``; ``decode_frame(data)``. What stands in
front of BTH is the same for all packets of a way and a length, so it has functions of its own, whose results
net.mrc.datagram keeps: ``seal(encode_front(frame, size), head, payload, pad)``;
``decode_inside(data, decode_front(data))``.
Errors: MrcError with a Reason, whatever the bytes are; the decoders raise nothing else.
Limits: IPv6 only (the specification's IPv4 form carries 16 bits of entropy). Reconstructed: see net.mrc.wire.
Source: as net.mrc.wire; IBTA annex A17 for the ICRC; RFC 8200, RFC 9800; packet trimming as SONiC and UET have it.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from net.errors import MrcError, Reason
from net.mrc.wire import (
    CODECS,
    MESSAGE_CODECS,
    NEXT_UDP,
    UDP_PORT,
    Bth,
    H,
    Ipv6,
    Meth,
    Tseth,
    Udp,
    decode,
    encode,
    message_codec,
    stack,
)

IPV6_BYTES, UDP_BYTES, ICRC_BYTES = 40, 8, 4
ETHERNET_BYTES = 14
_BTH_BYTES = CODECS[Bth].size
NEXT_IPV6 = 41

TRIM_BYTES = 128
"""Length of a trimmed frame, from its Ethernet header: what SONiC cuts to by default."""

TRIM_BYTES_MIN = 122
"""Up to and with TSETH behind two IPv6 headers: what a responder needs to answer with a NACK."""


class EntropyOrder(enum.Enum):
    """Which half of an EV goes where. MAN, API and CN2 agree on the first; EMU alone has the second."""

    FLOW_LABEL_HIGH = "flow label high"
    SOURCE_PORT_HIGH = "source port high"


def entropy_fields(entropy: int, order: EntropyOrder = EntropyOrder.FLOW_LABEL_HIGH) -> tuple[int, int]:
    """EV -> (flow label, UDP source port); the flow label's top 4 bits stay 0."""
    high, low = entropy >> 16, entropy & 0xFFFF
    return (high, low) if order is EntropyOrder.FLOW_LABEL_HIGH else (low, high)


def entropy_of(flow_label: int, source_port: int, order: EntropyOrder = EntropyOrder.FLOW_LABEL_HIGH) -> int:
    """(flow label, UDP source port) -> EV."""
    low_label = flow_label & 0xFFFF
    if order is EntropyOrder.FLOW_LABEL_HIGH:
        return low_label << 16 | source_port
    return source_port << 16 | low_label


# Messages: what UDP carries.


class Message(NamedTuple):
    """BTH, the headers behind it, and the payload; of a trimmed packet, the headers that are left of it.

    A payload may be a view: of what is written when it is sent, of a buffer when it arrives.
    """

    bth: Bth
    headers: tuple[Any, ...] = ()
    payload: bytes | memoryview = b""

    def get(self, kind: type[H]) -> H | None:
        """The header of ``kind``, if it is there."""
        for header in self.headers:
            if type(header) is kind:
                found: H = header
                return found
        return None

    def need(self, kind: type[H]) -> H:
        """The header of ``kind``; MrcError when it is not there."""
        found = self.get(kind)
        if found is None:
            raise MrcError(Reason.TRUNCATED, f"no {kind.__name__.upper()} in opcode {self.bth.opcode:#x}")
        return found


def message(bth: Bth, *headers: tuple[Any, ...], payload: bytes | memoryview = b"") -> Message:
    """A message with BTH.ts and BTH.pad set from what follows; MrcError when that does not suit the opcode."""
    bth = bth._replace(ts=int(any(type(header) is Tseth for header in headers)), pad=-len(payload) % 4)
    kinds = stack(bth.opcode, bth.ts)
    if kinds is None:
        raise MrcError(Reason.OPCODE, f"opcode {bth.opcode:#x} is not MRC's", "see net.mrc.wire.Opcode")
    if tuple(map(type, headers)) != kinds:
        names = " ".join(kind.__name__.upper() for kind in kinds)
        raise MrcError(Reason.VALUE, f"wrong headers for opcode {bth.opcode:#x}", f"give {names}")
    if payload and kinds[0] is not Meth:
        raise MrcError(Reason.VALUE, f"opcode {bth.opcode:#x} carries no payload", "leave it out")
    return Message(bth, headers, payload)


def encode_headers(message: Message) -> bytes:
    """BTH and the headers behind it."""
    bth = message.bth
    return MESSAGE_CODECS[bth.opcode, bth.ts].encode((bth, *message.headers))


def encode_message(message: Message) -> bytes:
    """BTH to padding; ICRC not included, as it covers the headers below."""
    return b"".join((encode_headers(message), message.payload, bytes(message.bth.pad)))


def decode_message(data: bytes | memoryview) -> Message:
    """The inverse of ``encode_message``; the payload is a part of ``data``, a view where that is one."""
    codec = message_codec(data)
    bth, *headers = codec.decode(data)
    _check_version(bth)
    end = len(data) - bth.pad
    size = end - codec.size
    if size + bth.pad and type(headers[0]) is not Meth:
        raise MrcError(Reason.LENGTH, f"{size + bth.pad} bytes behind opcode {bth.opcode:#x}")
    if size < 0 or (size + bth.pad) % 4:
        raise MrcError(Reason.LENGTH, f"{bth.pad} bytes of padding in {size + bth.pad}")
    return Message(bth, tuple(headers), data[codec.size : end])


def _check_version(bth: Bth) -> None:
    if bth.tver:
        raise MrcError(Reason.OPCODE, f"transport version {bth.tver}")


def _decode_cut(data: bytes | memoryview) -> Message:
    """What is left of a trimmed message: BTH and those of its headers that are whole."""
    message_codec(data)
    bth = decode(Bth, data)
    _check_version(bth)
    headers: list[Any] = []
    offset = _BTH_BYTES
    for kind in stack(bth.opcode, bth.ts) or ():
        if len(data) - offset < CODECS[kind].size:
            break
        headers.append(decode(kind, data, offset))
        offset += CODECS[kind].size
    return Message(bth, tuple(headers))


# Frames.


@dataclass(frozen=True, slots=True)
class Dscp:
    """Code points by use. None of the numbers is official; these are those of the one public tool (EMU).

    control: SACK, NACK, acknowledge. no_trim: never trimmed. trimmable, trimmable_retx: data that may be trimmed.
    trimmed, trimmed_lasthop: what trimming makes of it.
    """

    control: int = 46
    no_trim: int = 0
    trimmable: int = 4
    trimmable_retx: int = 8
    trimmed: int = 12
    trimmed_lasthop: int = 16


DSCP = Dscp()
ECN_MASK, ECN_ECT, ECN_CE = 3, 2, 3


class Frame(NamedTuple):
    """A packet from its first IPv6 header on.

    outer_dst: destination of the outer header, None for no outer header. dscp and ecn, traffic class of the outermost
    header; inner_traffic_class, that of the inner one when there are two. trimmed: cut by a switch; then ``message``
    has only what is left and no check value was verified.
    """

    src: bytes
    dst: bytes
    entropy: int
    message: Message
    dscp: int = 0
    ecn: int = 0
    hop_limit: int = 64
    port: int = UDP_PORT
    outer_src: bytes = bytes(16)
    outer_dst: bytes | None = None
    inner_traffic_class: int = 0
    inner_hop_limit: int = 64
    trimmed: bool = False


_ICRC_PREFIX = b"\xff" * 8  # stands for the local route header, which is not there
_IPV6_INVARIANT = struct.Struct(">IHBB16s16s")
_UDP_INVARIANT = struct.Struct(">HHHH")


def icrc(ip: Ipv6, udp: Udp, transport: bytes | memoryview) -> bytes:
    """The invariant CRC of a packet as it stands on the wire.

    transport: BTH to the end of the padding. Covered with ones in place of what changes on the way: traffic class,
    flow label, hop limit, UDP checksum, BTH byte 4.
    Source: IBTA volume 1, annex A17 (RoCEv2); over the inner packet, as outer headers are gone by then.
    """
    return _icrc(_front_crc(ip, udp), transport).to_bytes(ICRC_BYTES, "little")


def _front_crc(ip: Ipv6, udp: Udp) -> int:
    """The ICRC up to BTH."""
    return zlib.crc32(
        _ICRC_PREFIX
        + _IPV6_INVARIANT.pack(0x6FFFFFFF, ip.length, ip.next_header, 0xFF, ip.src, ip.dst)
        + _UDP_INVARIANT.pack(udp.source_port, udp.port, udp.length, 0xFFFF)
    )


def _icrc(crc: int, head: bytes | bytearray | memoryview, *more: bytes | memoryview) -> int:
    """From BTH on."""
    crc = zlib.crc32(head[5:], zlib.crc32(b"\xff", zlib.crc32(head[:4], crc)))
    for part in more:
        crc = zlib.crc32(part, crc)
    return crc


class Front(NamedTuple):
    """What stands in front of a BTH, and the ICRC up to there."""

    data: bytes
    crc: int


def encode_front(frame: Frame, size: int, order: EntropyOrder = EntropyOrder.FLOW_LABEL_HIGH) -> Front:
    """The headers in front of ``size`` bytes of message (BTH to padding); its content does not matter here."""
    if frame.trimmed:
        raise MrcError(Reason.VALUE, "a trimmed frame cannot be made anew", "encode the whole one and trim() it")
    if not 0 <= frame.entropy < 1 << 32:
        raise MrcError(Reason.VALUE, f"entropy {frame.entropy} does not fit", "give 32 bits")
    flow_label, source_port = entropy_fields(frame.entropy, order)
    length = UDP_BYTES + size + ICRC_BYTES
    traffic_class = frame.dscp << 2 | frame.ecn
    inner_class, inner_hops = traffic_class, frame.hop_limit
    outer = b""
    if frame.outer_dst is not None:
        inner_class, inner_hops = frame.inner_traffic_class, frame.inner_hop_limit
        outer = encode(
            Ipv6(
                traffic_class=traffic_class,
                length=IPV6_BYTES + length,
                next_header=NEXT_IPV6,
                hop_limit=frame.hop_limit,
                src=frame.outer_src,
                dst=frame.outer_dst,
            )
        )
    ip = Ipv6(6, inner_class, flow_label, length, NEXT_UDP, inner_hops, frame.src, frame.dst)
    udp = Udp(source_port, frame.port, length)
    return Front(outer + encode(ip) + encode(udp), _front_crc(ip, udp))


def seal(front: Front, head: bytes | bytearray, payload: bytes | memoryview, pad: int) -> bytes:
    """The frame: ``front``, a message (``head``: ``encode_headers`` of it), ICRC."""
    padding = bytes(pad)
    crc = _icrc(front.crc, head, payload, padding)
    return b"".join((front.data, head, payload, padding, crc.to_bytes(ICRC_BYTES, "little")))


def encode_frame(frame: Frame, order: EntropyOrder = EntropyOrder.FLOW_LABEL_HIGH) -> bytes:
    """Bytes of a whole (not trimmed) frame with its ICRC; MrcError when a value fits no field."""
    content = frame.message
    head = encode_headers(content)
    pad = content.bth.pad
    return seal(encode_front(frame, len(head) + len(content.payload) + pad, order), head, content.payload, pad)


class Arrived(NamedTuple):
    """``frame`` without its message, which is to stand from ``start`` to ``end``, ICRC included; ``crc``: that of
    its front."""

    frame: Frame
    start: int
    end: int
    crc: int


_NOTHING = Message(Bth())


def decode_front(
    data: bytes | memoryview,
    *,
    port: int = UDP_PORT,
    order: EntropyOrder = EntropyOrder.FLOW_LABEL_HIGH,
    dscp: Dscp = DSCP,
) -> Arrived:
    """What stands in front of the message in the bytes behind an Ethernet header.

    A trimmed frame is told by its DSCP, never by its length; its inner lengths and ICRC are not looked at.
    """
    first = _decode_ip(data, 0)
    trimmed = first.traffic_class >> 2 in (dscp.trimmed, dscp.trimmed_lasthop)
    end = IPV6_BYTES + first.length
    offset, ip = IPV6_BYTES, first
    if first.next_header == NEXT_IPV6:
        ip = _decode_ip(data[:end], IPV6_BYTES)
        offset += IPV6_BYTES
    if ip.next_header != NEXT_UDP:
        raise MrcError(Reason.ENCAPSULATION, f"next header {ip.next_header} where UDP is expected")
    udp = decode(Udp, data[:end], offset)
    if udp.port != port:
        raise MrcError(Reason.ENCAPSULATION, f"UDP port {udp.port} is not {port}")
    if not trimmed and not end - offset == ip.length == udp.length:
        raise MrcError(Reason.LENGTH, f"{end - offset} bytes with IPv6 {ip.length} and UDP {udp.length}")
    outer = first is not ip
    frame = Frame(
        ip.src,
        ip.dst,
        entropy_of(ip.flow_label, udp.source_port, order),
        _NOTHING,
        first.traffic_class >> 2,
        first.traffic_class & ECN_MASK,
        first.hop_limit,
        udp.port,
        first.src if outer else bytes(16),
        first.dst if outer else None,
        ip.traffic_class if outer else 0,
        ip.hop_limit if outer else 64,
        trimmed,
    )
    return Arrived(frame, offset + UDP_BYTES, end, _front_crc(ip, udp))


def decode_inside(data: bytes | memoryview, arrived: Arrived) -> Message:
    """The message behind a front; what Ethernet padded the frame with is left off."""
    _, start, end, _ = arrived
    if end > len(data):
        raise MrcError(Reason.LENGTH, f"{end} bytes by IPv6's length in {len(data)}")
    if arrived.frame.trimmed:
        return _decode_cut(data[start:end])
    if end - start < _BTH_BYTES + ICRC_BYTES:
        raise MrcError(Reason.TRUNCATED, f"{end - start} bytes in UDP")
    transport = data[start : end - ICRC_BYTES]
    if not is_sealed(data, arrived):
        raise MrcError(Reason.ICRC, "invariant CRC does not match")
    return decode_message(transport)


def is_sealed(data: bytes | memoryview, arrived: Arrived) -> bool:
    """Whether the ICRC is that of the frame."""
    stop = arrived.end - ICRC_BYTES
    return _icrc(arrived.crc, data[arrived.start : stop]) == int.from_bytes(data[stop : arrived.end], "little")


def decode_frame(
    data: bytes,
    *,
    port: int = UDP_PORT,
    order: EntropyOrder = EntropyOrder.FLOW_LABEL_HIGH,
    dscp: Dscp = DSCP,
) -> Frame:
    """A frame from the bytes behind its Ethernet header."""
    arrived = decode_front(data, port=port, order=order, dscp=dscp)
    return arrived.frame._replace(message=decode_inside(data, arrived))


def _decode_ip(data: bytes | memoryview, offset: int) -> Ipv6:
    ip = decode(Ipv6, data, offset)
    if ip.version != 6:
        raise MrcError(Reason.ENCAPSULATION, f"IP version {ip.version}")
    return ip


def trim(data: bytes, dscp: int, size_bytes: int = TRIM_BYTES) -> bytes:
    """What a trimming switch makes of a frame (bytes behind Ethernet): cut, marked by ``dscp``, outer length right.

    size_bytes: length of the result with its Ethernet header; a shorter frame stays whole. ECN stays as it is.
    """
    if size_bytes < TRIM_BYTES_MIN:
        raise MrcError(Reason.VALUE, f"trimming to {size_bytes} bytes", f"give at least {TRIM_BYTES_MIN}")
    cut = data[: size_bytes - ETHERNET_BYTES]
    ip = decode(Ipv6, cut)
    traffic_class = dscp << 2 | ip.traffic_class & ECN_MASK
    return encode(ip._replace(traffic_class=traffic_class, length=len(cut) - IPV6_BYTES)) + cut[IPV6_BYTES:]
