"""MRC as Scapy layers, made from the tables of net.mrc.wire: for crafting, looking at and checking packets.

Use: ``bind()`` once, then ``IPv6() / UDP(sport=1) / BTH(opcode=0xCA, psn=7) / METH() / RETH(va=4096) / b"data"``;
``IPv6(data)`` dissects. BTH.icrc is computed when it is None. Fields keep the names of net.mrc.wire.
Reconstructed: see net.mrc.wire, whose ``reconstructed()`` lists what a single reader vouches for.
Limits: two to three milliseconds per packet; never on a data path. BTH.ts and BTH.pad are not set for you.
Source: as net.mrc.wire.
"""

from __future__ import annotations

from ipaddress import IPv6Address
from typing import Any

from scapy.fields import BitEnumField, BitField, FCSField, SignedShortField
from scapy.layers.inet import UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet, Raw, bind_top_down

from net.mrc import frame, wire

_ENUMS = {("BTH", "opcode"): wire.Opcode, ("SETH", "m"): wire.EcnMark, ("NETH", "nack_reason"): wire.NackReason}


def _scapy_field(layer: str, spec: wire.FieldSpec) -> Any:
    names = _ENUMS.get((layer, spec.name))
    assert isinstance(spec.default, int)
    if spec.bits.signed:
        assert spec.bits.size == 16
        return SignedShortField(spec.name, spec.default)
    if names is not None:
        return BitEnumField(spec.name, spec.default, spec.bits.size, {int(value): value.name for value in names})
    return BitField(spec.name, spec.default, spec.bits.size)


class MrcLayer(Packet):
    """A header behind BTH; what comes next is told by the BTH below."""

    def guess_payload_class(self, payload: bytes) -> type[Packet]:
        below: Packet | None = self
        depth = -1
        while below is not None and not isinstance(below, BTH):
            below = below.underlayer
            depth += 1
        kinds = () if below is None else wire.stack(below.opcode, below.ts) or ()
        return LAYERS[kinds[depth + 1]] if depth + 1 < len(kinds) else Raw


class BTH(MrcLayer):
    """Base transport header; owns the ICRC at the packet's end."""

    name = "MRC BTH"
    fields_desc = [
        *(_scapy_field("BTH", spec) for spec in wire.fields(wire.Bth)),
        FCSField("icrc", None, fmt="!I"),
    ]

    def post_build(self, pkt: bytes, pay: bytes) -> bytes:
        """Puts the ICRC where Scapy reserved four bytes for it."""
        built = pkt + pay
        udp = self.underlayer
        if self.icrc is not None or not isinstance(udp, UDP) or not isinstance(udp.underlayer, IPv6):
            return built
        length = frame.UDP_BYTES + len(built)
        ip = wire.Ipv6(
            length=length,
            src=IPv6Address(udp.underlayer.src).packed,
            dst=IPv6Address(udp.underlayer.dst).packed,
        )
        ports = wire.Udp(udp.sport, udp.dport, length)
        transport = built[: -frame.ICRC_BYTES]
        return transport + frame.icrc(ip, ports, transport)


def _layer(kind: type[tuple[Any, ...]]) -> type[MrcLayer]:
    name = kind.__name__.upper()
    desc = [_scapy_field(name, spec) for spec in wire.fields(kind)]
    return type(name, (MrcLayer,), {"name": f"MRC {name}", "fields_desc": desc, "__doc__": kind.__doc__})


METH = _layer(wire.Meth)
TSETH = _layer(wire.Tseth)
RETH = _layer(wire.Reth)
IMMDT = _layer(wire.Immdt)
AETH = _layer(wire.Aeth)
SETH = _layer(wire.Seth)
CCSTATE = _layer(wire.CcState)
NETH = _layer(wire.Neth)
PETH = _layer(wire.Peth)
ERTH = _layer(wire.Erth)
EETH = _layer(wire.Eeth)

LAYERS: dict[type[tuple[Any, ...]], type[Packet]] = {
    wire.Bth: BTH,
    wire.Meth: METH,
    wire.Tseth: TSETH,
    wire.Reth: RETH,
    wire.Immdt: IMMDT,
    wire.Aeth: AETH,
    wire.Seth: SETH,
    wire.CcState: CCSTATE,
    wire.Neth: NETH,
    wire.Peth: PETH,
    wire.Erth: ERTH,
    wire.Eeth: EETH,
}


def bind(port: int = wire.UDP_PORT) -> None:
    """From now on Scapy takes UDP ``port`` as MRC, before whatever else claims it (scapy.contrib.roce does)."""
    guess = ({"dport": port}, BTH)
    UDP.payload_guess = [guess, *(other for other in UDP.payload_guess if other != guess)]
    bind_top_down(UDP, BTH, dport=port)


def from_wire(message: frame.Message) -> Packet:
    """A decoded message as layers."""
    packet: Packet = BTH(**message.bth._asdict())
    for header in message.headers:
        packet = packet / LAYERS[type(header)](**header._asdict())
    body = bytes(message.payload) + bytes(message.bth.pad)
    return packet / Raw(body) if body else packet
