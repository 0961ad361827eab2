"""MRC packets: messages behind UDP, entropy values, ICRC, encapsulation, trimmed frames.

    Ethernet | [outer IPv6] | IPv6 | UDP | BTH | headers by opcode | payload, padded to 4 | ICRC

A frame starts at its first IPv6 header. With an outer one, its destination is an SRv6 carrier (net.srv6) and no
routing header follows.

Use: ``write = message(Bth(Opcode.WRITE_ONLY, dqp=5), Meth(), Reth(va, r_key, len(data)), payload=data)``;
``encode_frame(Frame(src, dst, entropy, write, outer_dst=carrier.packed))``; ``decode_frame(data)``.
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
from net.mrc.wire import CODECS, NEXT_UDP, UDP_PORT, Bth, H, Ipv6, Meth, Tseth, Udp, decode, encode, stack

IPV6_BYTES, UDP_BYTES, ICRC_BYTES = 40, 8, 4
ETHERNET_BYTES = 14
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
    """BTH, the headers behind it, and the payload; of a trimmed packet, the headers that are left of it."""

    bth: Bth
    headers: tuple[Any, ...] = ()
    payload: bytes = b""

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


def message(bth: Bth, *headers: tuple[Any, ...], payload: bytes = b"") -> Message:
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


def encode_message(message: Message) -> bytes:
    """BTH to padding; ICRC not included, as it covers the headers below."""
    parts = [encode(message.bth), *map(encode, message.headers), message.payload, bytes(message.bth.pad)]
    return b"".join(parts)


def decode_message(data: bytes | memoryview) -> Message:
    """The inverse of ``encode_message``."""
    bth, headers, offset = _decode_headers(data)
    if len(headers) < len(stack(bth.opcode, bth.ts) or ()):
        raise MrcError(Reason.TRUNCATED, f"opcode {bth.opcode:#x} with only {len(headers)} of its headers")
    payload = bytes(data[offset:])
    if payload and not isinstance(headers[0], Meth):
        raise MrcError(Reason.LENGTH, f"{len(payload)} bytes behind opcode {bth.opcode:#x}")
    if bth.pad > len(payload) or len(payload) % 4:
        raise MrcError(Reason.LENGTH, f"{bth.pad} bytes of padding in {len(payload)}")
    return Message(bth, headers, payload[: len(payload) - bth.pad])


def _decode_headers(data: bytes | memoryview) -> tuple[Bth, tuple[Any, ...], int]:
    """BTH, as many of its headers as are whole, and where they end."""
    bth = decode(Bth, data)
    kinds = stack(bth.opcode, bth.ts)
    if kinds is None:
        raise MrcError(Reason.OPCODE, f"opcode {bth.opcode:#x} is not MRC's")
    if bth.tver:
        raise MrcError(Reason.OPCODE, f"transport version {bth.tver}")
    headers: list[Any] = []
    offset = CODECS[Bth].size
    for kind in kinds:
        codec = CODECS[kind]
        if len(data) - offset < codec.size:
            break
        headers.append(codec.decode(data, offset))
        offset += codec.size
    return bth, tuple(headers), offset


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
    masked = (
        _ICRC_PREFIX
        + _IPV6_INVARIANT.pack(0x6FFFFFFF, ip.length, ip.next_header, 0xFF, ip.src, ip.dst)
        + _UDP_INVARIANT.pack(udp.source_port, udp.port, udp.length, 0xFFFF)
        + bytes(transport[:4])
        + b"\xff"
    )
    return zlib.crc32(transport[5:], zlib.crc32(masked)).to_bytes(4, "little")


def encode_frame(frame: Frame, order: EntropyOrder = EntropyOrder.FLOW_LABEL_HIGH) -> bytes:
    """Bytes of a whole (not trimmed) frame with its ICRC; MrcError when a value fits no field."""
    if frame.trimmed:
        raise MrcError(Reason.VALUE, "a trimmed frame cannot be made anew", "encode the whole one and trim() it")
    if not 0 <= frame.entropy < 1 << 32:
        raise MrcError(Reason.VALUE, f"entropy {frame.entropy} does not fit", "give 32 bits")
    flow_label, source_port = entropy_fields(frame.entropy, order)
    transport = encode_message(frame.message)
    length = UDP_BYTES + len(transport) + ICRC_BYTES
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
    return b"".join((outer, encode(ip), encode(udp), transport, icrc(ip, udp, transport)))


def decode_frame(
    data: bytes,
    *,
    port: int = UDP_PORT,
    order: EntropyOrder = EntropyOrder.FLOW_LABEL_HIGH,
    dscp: Dscp = DSCP,
) -> Frame:
    """A frame from the bytes behind its Ethernet header; what Ethernet padded it with is left off.

    A trimmed frame is told by its DSCP, never by its length; its inner lengths and ICRC are not looked at.
    """
    first = _decode_ip(data, 0)
    trimmed = first.traffic_class >> 2 in (dscp.trimmed, dscp.trimmed_lasthop)
    end = IPV6_BYTES + first.length
    if end > len(data):
        raise MrcError(Reason.LENGTH, f"IPv6 length {first.length} in {len(data)} bytes")
    offset, ip = IPV6_BYTES, first
    if first.next_header == NEXT_IPV6:
        ip = _decode_ip(data[:end], IPV6_BYTES)
        offset += IPV6_BYTES
    if ip.next_header != NEXT_UDP:
        raise MrcError(Reason.ENCAPSULATION, f"next header {ip.next_header} where UDP is expected")
    udp = decode(Udp, data[:end], offset)
    if udp.port != port:
        raise MrcError(Reason.ENCAPSULATION, f"UDP port {udp.port} is not {port}")
    body = memoryview(data)[offset + UDP_BYTES : end]
    if trimmed:
        bth, headers, _ = _decode_headers(body)
        content = Message(bth, headers)
    else:
        if not end - offset == ip.length == udp.length:
            raise MrcError(Reason.LENGTH, f"{end - offset} bytes with IPv6 {ip.length} and UDP {udp.length}")
        if len(body) < CODECS[Bth].size + ICRC_BYTES:
            raise MrcError(Reason.TRUNCATED, f"{len(body)} bytes in UDP")
        transport = body[:-ICRC_BYTES]
        if icrc(ip, udp, transport) != body[-ICRC_BYTES:]:
            raise MrcError(Reason.ICRC, "invariant CRC does not match")
        content = decode_message(transport)
    outer = first is not ip
    return Frame(
        ip.src,
        ip.dst,
        entropy_of(ip.flow_label, udp.source_port, order),
        content,
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


def _decode_ip(data: bytes, offset: int) -> Ipv6:
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
