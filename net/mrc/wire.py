"""The MRC headers, each declared once, and a fast codec made from the declarations.

**Reconstructed.** The specification itself (OCP-MRC-1.0) was not read; these tables come from public readers of it.
What only one of them says is marked with ``witness=`` at its field and listed by ``reconstructed()``. Nothing here is
called compliant.

A header is a NamedTuple whose annotations are its bits in wire order, big-endian; the codec here, the Scapy layers
(net.mrc.scapy_layers) and dissectors are made from it. net.mrc.frame puts headers together.

Use: ``data = encode(Meth(msn=3))``; ``decode(Meth, data)``; ``stack(opcode, ts)`` tells what follows a BTH.
Errors: MrcError with a Reason, whatever the bytes are.
Source: OCP-MRC-1.0 sections 6.2, 7.5 and Tables 6-3..6-9, 7-6, 7-10..7-23 through its readers, called EMU, FPGA, MAN,
CN1 and CN2; the official API header for modes and numbers of entropy values; IBTA for BTH, RETH and AETH.
"""

from __future__ import annotations

import enum
import struct
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, NoReturn, TypeVar

from net.errors import MrcError, Reason

UDP_PORT = 4791
"""RoCEv2's; a setting per deployment."""

PSN_BITS = 24

TIMESTAMP_NS = 128
"""Unit of every tx_timestamp."""

NEXT_UDP = 17


@dataclass(frozen=True, slots=True)
class Bits:
    """A field's width; ``witness`` says who alone vouches for it, empty where two independent readers agree."""

    size: int
    signed: bool = False
    witness: str = ""


U1 = Annotated[int, Bits(1)]
U2 = Annotated[int, Bits(2)]
U3 = Annotated[int, Bits(3)]
U4 = Annotated[int, Bits(4)]
U5 = Annotated[int, Bits(5)]
U7 = Annotated[int, Bits(7)]
U8 = Annotated[int, Bits(8)]
U11 = Annotated[int, Bits(11)]
U15 = Annotated[int, Bits(15)]
U16 = Annotated[int, Bits(16)]
U20 = Annotated[int, Bits(20)]
U24 = Annotated[int, Bits(24)]
U32 = Annotated[int, Bits(32)]
U64 = Annotated[int, Bits(64)]
S16 = Annotated[int, Bits(16, signed=True)]
Address = Annotated[bytes, Bits(128)]


class Opcode(enum.IntEnum):
    """BTH.opcode: the RC operation + 0xC0. Numbers: EMU; 0xD1, 0xDC and 0xDD also in the FPGA's comments, the writes
    also in CN2; 0xD8, 0xD9 and 0xDE have one witness."""

    WRITE_FIRST = 0xC6
    WRITE_MIDDLE = 0xC7
    WRITE_LAST = 0xC8
    WRITE_LAST_IMM = 0xC9
    WRITE_ONLY = 0xCA
    WRITE_ONLY_IMM = 0xCB
    ACKNOWLEDGE = 0xD1
    ENDPOINT_REQUEST = 0xD8
    ENDPOINT_RESPONSE = 0xD9
    SACK = 0xDC
    NACK = 0xDD
    PROBE = 0xDE


ENDPOINT_QP = 0x2
"""Destination QP of endpoint requests and responses; 0x0 to 0x2 are reserved."""


class EcnMark(enum.IntEnum):
    """SETH.m: what the responder thinks of the path that the trigger came by."""

    NONE = 0
    SKIP_ONCE = 1
    ALWAYS_SKIP = 2


class NackReason(enum.IntEnum):
    """NETH.nack_reason (Table 7-3; the numbers of UET Table 3-58)."""

    TRIMMED = 0x01
    TRIMMED_LASTHOP = 0x02
    NO_BITMAP = 0x06
    NO_PKT_BUFFER = 0x07
    NO_RESOURCE = 0x0A
    PSN_OOR_WINDOW = 0x0B
    UNEXP_EVENT = 0x19


class EndpointOp(enum.IntEnum):
    """ERTH.op and EETH.op."""

    PORT_STATUS_UPDATE = 0
    EV_PROBE = 1


class Ipv6(NamedTuple):
    """RFC 8200 section 3."""

    version: U4 = 6
    traffic_class: U8 = 0
    flow_label: U20 = 0
    length: U16 = 0
    next_header: U8 = NEXT_UDP
    hop_limit: U8 = 64
    src: Address = bytes(16)
    dst: Address = bytes(16)


class Udp(NamedTuple):
    """RFC 768; the checksum is sent as 0, as RoCEv2 does."""

    source_port: U16 = 0
    port: U16 = UDP_PORT
    length: U16 = 0
    checksum: U16 = 0


class Bth(NamedTuple):
    """Base transport header, 12 bytes, IBTA's with some bits used otherwise.

    In control packets (Table 7-6): SACK: requestor's QP, psn = cack_psn. NACK: requestor's QP, psn that caused it.
    PROBE: peer's QP, psn 0. Endpoint packets: dqp 0x2, psn[15:0] = request id.
    """

    opcode: U8 = 0
    m: U1 = 0  # both readers put m before se, IBTA the other way round: sent as 0
    se: U1 = 0
    pad: U2 = 0
    tver: U4 = 0
    p_key: U16 = 0xFFFF
    var_res: U8 = 0
    dqp: U24 = 0
    a: U1 = 0
    r: U1 = 0
    rtx: U1 = 0
    ts: U1 = 0
    inv_res: U4 = 0
    psn: U24 = 0


class Meth(NamedTuple):
    """Message header, 4 bytes, in every write packet; rqmsn counts WriteIMM messages, msn all messages."""

    rqmsn: U16 = 0
    msn: U16 = 0


class Tseth(NamedTuple):
    """Time stamp, 4 bytes, when BTH.ts = 1; units of 128 ns."""

    tx_timestamp: U16 = 0
    tsr: Annotated[int, Bits(1, witness="CN1: selects 128 ns or 1 us")] = 0
    reserved: U11 = 0
    ftype: U4 = 1


class Reth(NamedTuple):
    """RDMA header, 16 bytes, in every write packet: va advances by the PMTU, dma_length is the whole message's."""

    va: U64 = 0
    r_key: U32 = 0
    dma_length: U32 = 0


class Immdt(NamedTuple):
    """Immediate data, 4 bytes."""

    value: U32 = 0


class Aeth(NamedTuple):
    """Transport acknowledge, 4 bytes; the credit bits of the syndrome are always 0x1F."""

    syndrome: U8 = 0x1F
    msn: U24 = 0


class Seth(NamedTuple):
    """Selective acknowledgement, 28 bytes (Tables 7-12, 7-13); CC_STATE follows."""

    type: U4 = 0
    nh: U5 = 0
    m: U2 = 0
    reserved1: U3 = 0
    pr: U1 = 0
    reserved2: U1 = 0
    ack_psn_offset: Annotated[int, Bits(16, signed=True, witness="FPGA: probe_id when pr = 1")] = 0
    entropy: U32 = 0
    spdcid: U16 = 0
    dpdcid: U16 = 0
    reserved3: U8 = 0
    cack_psn: U24 = 0
    cc_type: U4 = 0
    cc_fl: U4 = 0
    mpr: U8 = 0
    sack_offset: S16 = 0
    bitmap: Annotated[int, Bits(64, witness="EMU: bit i, counted from the lowest, is PSN base + i")] = 0

    @property
    def probe_id(self) -> int:
        """What stands in ack_psn_offset when pr = 1."""
        return self.ack_psn_offset & 0xFFFF

    def acked(self) -> list[int]:
        """PSNs that the bitmap reports as received; a clear bit says nothing."""
        base = self.cack_psn + self.sack_offset
        return [psn_add(base, bit) for bit in range(64) if self.bitmap >> bit & 1]


class CcState(NamedTuple):
    """Congestion control state, 8 bytes behind SETH; rcvd_bytes in units of 256 B, rounded up."""

    tx_timestamp: U16 = 0
    reserved: U1 = 0
    ooo_count: U15 = 0
    restore_cwnd: U1 = 0
    rcv_cwnd_pen: U7 = 0
    rcvd_bytes: U24 = 0


class Neth(NamedTuple):
    """Negative acknowledgement, 20 bytes."""

    type: U4 = 0
    nh: U5 = 0
    reserved1: U7 = 0
    nack_reason: U8 = 0
    vendor_info: U8 = 0
    entropy: U32 = 0
    spdcid: U16 = 0
    dpdcid: U16 = 0
    reserved2: U8 = 0
    nack_psn: U24 = 0
    cc_type: U4 = 2
    cc_fl: U4 = 0
    reserved3: U8 = 0
    tx_timestamp: U16 = 0


class Peth(NamedTuple):
    """Reliability probe, 16 bytes; the answer is a SACK with pr = 1."""

    type: U4 = 0
    nh: U5 = 0
    reserved1: U7 = 0
    reserved2: U8 = 0
    vendor_info: U8 = 0
    probe_id: U16 = 0
    reserved3: U16 = 0
    spdcid: U16 = 0
    dpdcid: U16 = 0
    tx_timestamp: U16 = 0
    tsr: U1 = 0
    reserved4: U11 = 0
    ftype: U4 = 1


class Erth(NamedTuple):
    """Endpoint request, 16 bytes; port_status_mask has a bit per port, 1 = usable, the lowest is port 1."""

    type: U4 = 0
    nh: U5 = 0
    reserved1: U5 = 0
    op: U2 = 0
    reserved2: U8 = 0
    vendor_info: U8 = 0
    port_status_mask: U32 = 0
    reserved3: U32 = 0
    tx_timestamp: U16 = 0
    tsr: U1 = 0
    reserved4: U11 = 0
    ftype: U4 = 1


class Eeth(NamedTuple):
    """Endpoint response, 36 bytes. The two readers disagree about op: FPGA's is sent, both are read."""

    type: U4 = 0
    nh: U5 = 0
    reserved1: U1 = 0
    op_emu: Annotated[int, Bits(2, witness="EMU: op is bits 5:4")] = 0
    op: Annotated[int, Bits(2, witness="FPGA: op is bits 3:2")] = 0
    reserved2: U2 = 0
    reserved3: U16 = 0
    reserved4: U64 = 0
    reserved5: U64 = 0
    reserved6: U64 = 0
    tx_timestamp: U16 = 0
    reserved7: U16 = 0
    reserved8: U32 = 0

    @property
    def operation(self) -> int:
        """op, wherever the sender put it."""
        return self.op or self.op_emu


HEADERS: tuple[type[tuple[Any, ...]], ...] = (
    *(Ipv6, Udp, Bth, Meth, Tseth, Reth, Immdt, Aeth),
    *(Seth, CcState, Neth, Peth, Erth, Eeth),
)

STACKS: dict[int, tuple[type[tuple[Any, ...]], ...]] = {
    Opcode.WRITE_FIRST: (Meth, Reth),
    Opcode.WRITE_MIDDLE: (Meth, Reth),
    Opcode.WRITE_LAST: (Meth, Reth),
    Opcode.WRITE_LAST_IMM: (Meth, Reth, Immdt),
    Opcode.WRITE_ONLY: (Meth, Reth),
    Opcode.WRITE_ONLY_IMM: (Meth, Reth, Immdt),
    Opcode.ACKNOWLEDGE: (Aeth,),
    Opcode.ENDPOINT_REQUEST: (Erth,),
    Opcode.ENDPOINT_RESPONSE: (Eeth,),
    Opcode.SACK: (Seth, CcState),
    Opcode.NACK: (Neth,),
    Opcode.PROBE: (Peth,),
}
"""What follows BTH, by opcode; TSETH stands behind METH where BTH.ts is set."""

WRITES = frozenset(opcode for opcode, kinds in STACKS.items() if kinds[0] is Meth)

ENDS = frozenset({Opcode.WRITE_LAST, Opcode.WRITE_LAST_IMM, Opcode.WRITE_ONLY, Opcode.WRITE_ONLY_IMM})
"""The last packet of a message."""

IMMEDIATES = frozenset(opcode for opcode, kinds in STACKS.items() if Immdt in kinds)


def stack(bth_opcode: int, ts: int) -> tuple[type[tuple[Any, ...]], ...] | None:
    """The headers behind a BTH; None for an opcode that is not MRC's."""
    kinds = STACKS.get(bth_opcode)
    if kinds is not None and ts and kinds[0] is Meth:
        return (Meth, Tseth, *kinds[1:])
    return kinds


# The codec: a header is a few machine words, a field is one of them or a shift and a mask in one.

H = TypeVar("H", bound=tuple[Any, ...])

_WORDS = {8: "B", 16: "H", 32: "I", 64: "Q", 128: "16s"}


class FieldSpec(NamedTuple):
    """A field by name, as declared."""

    name: str
    bits: Bits
    default: int | bytes


def fields(kind: type[tuple[Any, ...]]) -> list[FieldSpec]:
    """The fields of a header in wire order."""
    hints = typing.get_type_hints(kind, include_extras=True)
    defaults: Mapping[str, int | bytes] = getattr(kind, "_field_defaults")  # noqa: B009 (NamedTuple's, seen as tuple)
    return [FieldSpec(name, hints[name].__metadata__[0], default) for name, default in defaults.items()]


def reconstructed() -> Iterator[tuple[str, str, str]]:
    """(header, field, witness) of what a single reader vouches for."""
    for kind in HEADERS:
        for spec in fields(kind):
            if spec.bits.witness:
                yield kind.__name__.upper(), spec.name, spec.bits.witness


def _words(parts: list[Bits]) -> list[int]:
    """How many fields go into each word, with the fewest words of 8 to 128 bits; a signed field has its own."""
    best: list[list[int] | None] = [None] * len(parts) + [[]]
    for first in reversed(range(len(parts))):
        for last in range(first + 1, len(parts) + 1):
            rest, word = best[last], parts[first:last]
            alone = last == first + 1
            sizes = _WORDS if alone else (8, 16, 32, 64)
            fits = sum(bits.size for bits in word) in sizes and (alone or not any(bits.signed for bits in word))
            if fits and rest is not None and (best[first] is None or len(rest) + 1 < len(best[first] or ())):
                best[first] = [last - first, *rest]
    assert best[0] is not None, f"{parts} make no words"
    return best[0]


_SOURCE = """
def encode(headers):
    try:
        {targets} = headers
        if {misfits}:
            refuse(headers)
        return pack({words})
    except error:
        refuse(headers)

def decode(data, offset=0):
    try:
        {names} = unpack(data, offset)
    except error:
        too_short(len(data) - offset)
    return {headers}
"""


class Codec:
    """Headers that stand one behind the other: one struct, and straight-line Python made from the declarations.

    ``encode(headers)`` gives their bytes, MrcError when a value does not fit its field. ``decode(data, offset=0)`` is
    its inverse, MrcError when the bytes are too few. ``size`` counts all their bytes.
    """

    encode: Callable[[tuple[Any, ...]], bytes]
    decode: Callable[..., tuple[Any, ...]]

    def __init__(self, *kinds: type[tuple[Any, ...]]) -> None:
        self._name = " ".join(kind.__name__.upper() for kind in kinds)
        code, targets, headers = ">", "", ""
        words: list[str] = []
        parts: dict[int, list[str]] = {}  # by size: fields that share a word with others
        misfits = ["False"]
        for index, kind in enumerate(kinds):
            specs = [(f"f{index}_{n}", spec.bits) for n, spec in enumerate(fields(kind))]
            targets += f"({''.join(f'{name}, ' for name, _ in specs)}), "
            headers += f"new(kinds[{index}], ("
            for count in _words([bits for _, bits in specs]):
                group, specs = specs[:count], specs[count:]
                name, left = f"w{len(words)}", sum(bits.size for _, bits in group)
                code += _WORDS[left].lower() if group[0][1].signed else _WORDS[left]
                terms = []
                for field, bits in group:
                    left -= bits.size
                    if count == 1:
                        terms.append(field)
                        headers += f"{name}, "
                    else:
                        terms.append(f"{field} << {left}")
                        headers += f"{name} >> {left} & {(1 << bits.size) - 1}, "
                        parts.setdefault(bits.size, []).append(field)
                    if bits.size == 128:
                        misfits.append(f"len({field}) != 16")
                words.append(" | ".join(terms))
            headers += ")), "
        misfits += [f"({' | '.join(of_size)}) >> {size}" for size, of_size in parts.items()]
        layout = struct.Struct(code)
        self.size = layout.size
        scope: dict[str, Any] = {
            "kinds": kinds,
            "new": tuple.__new__,
            "pack": layout.pack,
            "unpack": layout.unpack_from,
            "error": struct.error,
            "refuse": self._refuse,
            "too_short": self._too_short,
        }
        source = _SOURCE.format(
            targets=targets,
            misfits=" or ".join(misfits),
            words=", ".join(words),
            names="".join(f"w{n}, " for n in range(len(words))),
            headers=headers,
        )
        exec(source, scope)
        self.encode, self.decode = scope["encode"], scope["decode"]

    @staticmethod
    def _refuse(headers: tuple[tuple[Any, ...], ...]) -> NoReturn:
        for header in headers:
            for spec, value in zip(fields(type(header)), header):
                name, size = f"{type(header).__name__.upper()}.{spec.name}", spec.bits.size
                if size == 128:
                    if len(value) != 16:
                        raise MrcError(Reason.VALUE, f"{name} has {len(value)} bytes", "give 16")
                    continue
                most = (1 << size - spec.bits.signed) - 1
                if not (-most - 1 if spec.bits.signed else 0) <= value <= most:
                    raise MrcError(Reason.VALUE, f"{name} = {value} does not fit", f"at most {most}")
        raise AssertionError(f"{headers} fit")

    def _too_short(self, size: int) -> NoReturn:
        raise MrcError(Reason.TRUNCATED, f"{size} bytes where {self._name} needs {self.size}")


CODECS: dict[type[tuple[Any, ...]], Codec] = {kind: Codec(kind) for kind in HEADERS}


def encode(header: tuple[Any, ...]) -> bytes:
    """Bytes of any header."""
    return CODECS[type(header)].encode((header,))


def decode(kind: type[H], data: bytes | memoryview, offset: int = 0) -> H:
    """A header of ``kind`` from the bytes at ``offset``."""
    header: H = CODECS[kind].decode(data, offset)[0]
    return header


MESSAGE_CODECS: dict[tuple[int, int], Codec] = {
    (opcode, ts): Codec(Bth, *(stack(opcode, ts) or ())) for opcode in STACKS for ts in (0, 1)
}
"""Of a BTH and all that follows it, by its opcode and ts."""

_FLAGS = next(n for n, byte in enumerate(encode(Bth(ts=1))) if byte != encode(Bth())[n])
_TS = encode(Bth(ts=1))[_FLAGS]


def place(opcode: int, ts: int, kind: type[tuple[Any, ...]], name: str) -> slice:
    """Where a field of whole bytes stands in a message, counted from BTH."""
    bit = 0
    kinds: list[type[tuple[Any, ...]]] = [Bth, *(stack(opcode, ts) or ())]
    for each in kinds:
        for spec in fields(each):
            if each is kind and spec.name == name:
                assert not (bit % 8 or spec.bits.size % 8), f"{name} is no whole bytes"
                return slice(bit // 8, (bit + spec.bits.size) // 8)
            bit += spec.bits.size
    raise AssertionError(f"opcode {opcode:#x} has no {kind.__name__}.{name}")


def message_codec(data: bytes | memoryview) -> Codec:
    """The one for a whole message; MrcError when its opcode is not MRC's."""
    if len(data) <= _FLAGS:
        raise MrcError(Reason.TRUNCATED, f"{len(data)} bytes where BTH needs {CODECS[Bth].size}")
    codec = MESSAGE_CODECS.get((data[0], 1 if data[_FLAGS] & _TS else 0))
    if codec is None:
        raise MrcError(Reason.OPCODE, f"opcode {data[0]:#x} is not MRC's")
    return codec


# Packet sequence numbers: 24 bits that wrap.


def psn_add(psn: int, count: int) -> int:
    """``psn`` + ``count`` modulo 2^24."""
    return psn + count & (1 << PSN_BITS) - 1


def psn_distance(psn: int, since: int) -> int:
    """How far ``psn`` is past ``since``: -2^23 to 2^23 - 1."""
    half = 1 << PSN_BITS - 1
    return (psn - since + half & 2 * half - 1) - half
