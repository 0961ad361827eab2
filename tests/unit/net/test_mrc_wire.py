"""MRC headers and packets against vectors packed by hand from the published byte tables, a codec on strings of bits,
Scapy, and hostile bytes."""

from __future__ import annotations

from ipaddress import IPv6Address
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scapy.contrib import roce
from scapy.layers.inet import UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet, Raw

from net.errors import MrcError, Reason
from net.mrc import scapy_layers as sl
from net.mrc.frame import (
    DSCP,
    EntropyOrder,
    Frame,
    Message,
    decode_frame,
    decode_message,
    encode_frame,
    encode_message,
    entropy_fields,
    entropy_of,
    message,
    trim,
)
from net.mrc.wire import (
    CODECS,
    HEADERS,
    Aeth,
    Bth,
    CcState,
    EcnMark,
    Eeth,
    EndpointOp,
    Erth,
    Immdt,
    Ipv6,
    Meth,
    NackReason,
    Neth,
    Opcode,
    Peth,
    Reth,
    Seth,
    Tseth,
    decode,
    encode,
    fields,
    psn_add,
    psn_distance,
    reconstructed,
)
from tests.unit.net.mrc_cases import frames, headers, messages

FAST = settings(deadline=None, max_examples=60)
SRC, DST = IPv6Address("fd00::1").packed, IPv6Address("fd00::2").packed
CARRIER = IPv6Address("fc00:0:4000:8001:4001:c001::").packed


# Vectors. Every field has a value of its own, so none can stand in another's place.

VECTORS: list[tuple[tuple[Any, ...], str]] = [
    (
        Bth(Opcode.WRITE_ONLY, pad=3, p_key=0x1234, dqp=0xABCDEF, a=1, rtx=1, psn=0xFFFFFE),
        "ca 30 1234 00 abcdef a0 fffffe",
    ),
    (Bth(Opcode.WRITE_LAST, r=1, ts=1, psn=1), "c8 00 ffff 00 000000 50 000001"),
    (Bth(0, m=1, tver=0xF, inv_res=0xF), "00 8f ffff 00 000000 0f 000000"),
    (Meth(0x1122, 0x3344), "1122 3344"),
    (Tseth(0xBEEF, 1), "beef 8001"),
    (Reth(0x0102030405060708, 0x0A0B0C0D, 0x00100000), "0102030405060708 0a0b0c0d 00100000"),
    (Immdt(0xDEADBEEF), "deadbeef"),
    (Aeth(msn=0x010203), "1f 010203"),
    (
        Seth(
            m=EcnMark.SKIP_ONCE,
            pr=1,
            ack_psn_offset=3,
            entropy=0xDEADBEEF,
            spdcid=1,
            dpdcid=2,
            cack_psn=0x10,
            mpr=2,
            sack_offset=5,
            bitmap=0x8000000000000001,
        ),
        "0022 0003 deadbeef 0001 0002 00 000010 00 02 0005 8000000000000001",
    ),
    (
        Seth(m=EcnMark.ALWAYS_SKIP, ack_psn_offset=-1, cack_psn=0xFFFFFF, cc_type=0xA, cc_fl=0x5, sack_offset=-32768),
        "0040 ffff 00000000 0000 0000 00 ffffff a5 00 8000 0000000000000000",
    ),
    (
        CcState(0xBEEF, ooo_count=0x1234, restore_cwnd=1, rcv_cwnd_pen=0x15, rcvd_bytes=0xABCDEF),
        "beef 1234 95 abcdef",
    ),
    (
        Neth(
            nack_reason=NackReason.PSN_OOR_WINDOW,
            vendor_info=0x77,
            entropy=0x01020304,
            spdcid=0x1111,
            dpdcid=0x2222,
            nack_psn=0xFFFFFE,
            cc_fl=0x9,
            tx_timestamp=0xBEEF,
        ),
        "0000 0b 77 01020304 1111 2222 00 fffffe 29 00 beef",
    ),
    (
        Peth(vendor_info=0x77, probe_id=0x4321, spdcid=0x1111, dpdcid=0x2222, tx_timestamp=0xBEEF, tsr=1),
        "0000 00 77 4321 0000 1111 2222 beef 8001",
    ),
    (
        Erth(op=EndpointOp.EV_PROBE, vendor_info=0x77, port_status_mask=0xF0F0F0F1, tx_timestamp=0xBEEF),
        "0001 00 77 f0f0f0f1 00000000 beef 0001",
    ),
    (Eeth(op=EndpointOp.EV_PROBE, tx_timestamp=0xBEEF), "0004 0000" + "00" * 24 + "beef 0000 00000000"),
    (
        Ipv6(6, 0x13, 0xABCDE, 0x1234, 41, 64, SRC, DST),
        "613abcde 1234 29 40 fd000000000000000000000000000001 fd000000000000000000000000000002",
    ),
]


@pytest.mark.parametrize(("header", "text"), VECTORS)
def test_vectors(header: tuple[Any, ...], text: str) -> None:
    data = bytes.fromhex(text)
    assert encode(header).hex() == data.hex()
    assert decode(type(header), data) == header


def test_sizes() -> None:
    """Header bytes of the tables."""
    sizes = [
        CODECS[kind].size for kind in (Bth, Meth, Tseth, Reth, Immdt, Aeth, Seth, CcState, Neth, Peth, Erth, Eeth)
    ]
    assert sizes == [12, 4, 4, 16, 4, 4, 28, 8, 20, 16, 16, 36]


def test_enumerations() -> None:
    assert [int(opcode) for opcode in Opcode] == [
        *(0xC6, 0xC7, 0xC8, 0xC9, 0xCA, 0xCB, 0xD1, 0xD8, 0xD9, 0xDC, 0xDD, 0xDE)
    ]
    assert all(opcode >> 5 == 0b110 for opcode in Opcode)
    assert [int(reason) for reason in NackReason] == [0x01, 0x02, 0x06, 0x07, 0x0A, 0x0B, 0x19]


def test_endpoint_operation_is_read_where_either_reader_puts_it() -> None:
    assert decode(Eeth, bytes.fromhex("0004") + bytes(34)).operation == EndpointOp.EV_PROBE  # FPGA
    assert decode(Eeth, bytes.fromhex("0010") + bytes(34)).operation == EndpointOp.EV_PROBE  # EMU
    assert decode(Eeth, bytes(36)).operation == EndpointOp.PORT_STATUS_UPDATE


def test_single_witnesses_are_listed() -> None:
    flagged = {(header, field) for header, field, _ in reconstructed()}
    assert {("EETH", "op"), ("SETH", "bitmap"), ("SETH", "ack_psn_offset")} <= flagged
    assert ("BTH", "psn") not in flagged


def test_sack_bitmap_wraps() -> None:
    seth = Seth(cack_psn=0xFFFFFE, sack_offset=1, bitmap=0b1011)
    assert seth.acked() == [0xFFFFFF, 0, 2]
    assert Seth(ack_psn_offset=-1).probe_id == 0xFFFF


def test_psn_arithmetic() -> None:
    assert psn_add(0xFFFFFE, 3) == 1 and psn_add(0, -1) == 0xFFFFFF
    assert psn_distance(1, 0xFFFFFE) == 3 and psn_distance(0xFFFFFE, 1) == -3
    assert psn_distance(0x800000, 0) == -0x800000 and psn_distance(0x7FFFFF, 0) == 0x7FFFFF


# A codec on strings of bits.


def naive(header: tuple[Any, ...]) -> bytes:
    bits = ""
    for spec, value in zip(fields(type(header)), header):
        number = int.from_bytes(value, "big") if isinstance(value, bytes) else value
        bits += format(number % (1 << spec.bits.size), f"0{spec.bits.size}b")
    return int(bits, 2).to_bytes(len(bits) // 8, "big")


@pytest.mark.parametrize("kind", HEADERS)
def test_codec_against_strings_of_bits(kind: type[tuple[Any, ...]]) -> None:
    @settings(deadline=None, max_examples=15)
    @given(headers(kind), st.binary(max_size=3))
    def check(header: tuple[Any, ...], before: bytes) -> None:
        data = encode(header)
        assert data == naive(header)
        assert decode(kind, before + data + b"behind", len(before)) == header

    check()


@pytest.mark.parametrize("kind", HEADERS)
def test_every_header_refuses_what_does_not_fit(kind: type[tuple[Any, ...]]) -> None:
    for spec in fields(kind):
        bad = (b"short",) if spec.bits.size == 128 else (1 << spec.bits.size, -(1 << spec.bits.size - 1) - 1)
        for value in bad:
            with pytest.raises(MrcError, match=spec.name) as caught:
                encode(kind(**{spec.name: value}))
            assert caught.value.reason is Reason.VALUE
    with pytest.raises(MrcError) as caught:
        decode(kind, bytes(CODECS[kind].size - 1))
    assert caught.value.reason is Reason.TRUNCATED


# Scapy.


def layers_of(frame: Frame) -> Packet:
    """The frame by Scapy alone: its IPv6 and UDP, our layers made from the tables, lengths and ICRC computed."""
    flow_label, source_port = frame.entropy >> 16, frame.entropy & 0xFFFF
    inner_class = frame.dscp << 2 | frame.ecn if frame.outer_dst is None else frame.inner_traffic_class
    inner_hops = frame.hop_limit if frame.outer_dst is None else frame.inner_hop_limit
    packet = IPv6(
        src=str(IPv6Address(frame.src)),
        dst=str(IPv6Address(frame.dst)),
        tc=inner_class,
        fl=flow_label,
        hlim=inner_hops,
    )
    packet = packet / UDP(sport=source_port, dport=4791, chksum=0) / sl.from_wire(frame.message)
    if frame.outer_dst is not None:
        src, dst = str(IPv6Address(frame.outer_src)), str(IPv6Address(frame.outer_dst))
        packet = IPv6(src=src, dst=dst, tc=frame.dscp << 2 | frame.ecn, hlim=frame.hop_limit, nh=41) / packet
    return packet


@FAST
@given(frames())
def test_scapy_gives_the_same_bytes_and_fields(frame: Frame) -> None:
    sl.bind()
    data = encode_frame(frame)
    built = layers_of(frame)
    assert bytes(built).hex() == data.hex()
    layer: Any = IPv6(data)[sl.BTH]
    for header in (frame.message.bth, *frame.message.headers):
        assert type(layer) is sl.LAYERS[type(header)]
        assert {spec.name: getattr(layer, spec.name) for spec in fields(type(header))} == header._asdict()
        layer = layer.payload
    body = frame.message.payload + bytes(frame.message.bth.pad)
    assert bytes(layer) == body
    assert IPv6(data)[sl.BTH].icrc == int.from_bytes(data[-4:], "big")


@FAST
@given(frames())
def test_icrc_is_that_of_scapys_roce_on_the_inner_packet(frame: Frame) -> None:
    data = encode_frame(frame)
    inner = data[40:] if frame.outer_dst is not None else data
    bth = frame.message.bth
    transport = inner[48:-4]
    # roce names bits 7:6 of byte 1 and the seven below AckReq otherwise; the bytes are what counts.
    other = roce.BTH(
        opcode=bth.opcode,
        solicited=bth.m,
        migreq=bth.se,
        padcount=bth.pad,
        version=bth.tver,
        pkey=bth.p_key,
        fecn=bth.var_res >> 7,
        becn=bth.var_res >> 6 & 1,
        resv6=bth.var_res & 0x3F,
        dqpn=bth.dqp,
        ackreq=bth.a,
        resv7=transport[8] & 0x7F,
        psn=bth.psn,
    )
    packet = (
        IPv6(
            src=str(IPv6Address(frame.src)),
            dst=str(IPv6Address(frame.dst)),
            tc=inner[1] >> 4 | (inner[0] & 15) << 4,
            fl=frame.entropy >> 16,
            hlim=inner[7],
        )
        / UDP(sport=frame.entropy & 0xFFFF, dport=4791, chksum=0)
        / other
        / Raw(transport[12:])
    )
    assert bytes(packet).hex() == inner.hex()


def test_icrc_survives_what_changes_on_the_way() -> None:
    data = bytearray(encode_frame(Frame(SRC, DST, 5, message(Bth(Opcode.ACKNOWLEDGE), Aeth()), dscp=46)))
    data[7] -= 3  # hop limit
    data[1] |= 0x30  # CE
    data[40 + 6 : 40 + 8] = b"\x12\x34"  # UDP checksum
    data[48 + 4] = 0xC0  # FECN, BECN
    assert decode_frame(bytes(data)).ecn == 3
    data[-5] ^= 1
    with pytest.raises(MrcError) as caught:
        decode_frame(bytes(data))
    assert caught.value.reason is Reason.ICRC


# Whole frames.


def write(**changes: Any) -> Frame:
    """A WRITE_ONLY with time stamp behind an SRv6 carrier."""
    content = message(
        Bth(Opcode.WRITE_ONLY, dqp=0x123456, psn=77), Meth(msn=1), Tseth(9), Reth(4096, 3, 1024), payload=bytes(1024)
    )
    return Frame(
        SRC, DST, 0x00010002, content, dscp=DSCP.trimmable, ecn=2, outer_src=SRC, outer_dst=CARRIER
    )._replace(**changes)


@FAST
@given(messages())
def test_messages_round_trip(content: Message) -> None:
    assert decode_message(encode_message(content)) == content


@FAST
@given(frames(), st.sampled_from(EntropyOrder), st.binary(max_size=6))
def test_frames_round_trip_with_ethernet_padding(frame: Frame, order: EntropyOrder, padding: bytes) -> None:
    assert decode_frame(encode_frame(frame, order) + padding, order=order) == frame


@pytest.mark.parametrize(
    ("content", "size"),
    [
        (message(Bth(Opcode.WRITE_ONLY), Meth(), Tseth(), Reth(), payload=bytes(4096)), 128 + 4096),
        (message(Bth(Opcode.WRITE_ONLY_IMM), Meth(), Tseth(), Reth(), Immdt(), payload=bytes(4096)), 132 + 4096),
        (message(Bth(Opcode.SACK), Seth(), CcState()), 140),
        (message(Bth(Opcode.NACK), Neth()), 124),
        (message(Bth(Opcode.PROBE), Peth()), 120),
        (message(Bth(Opcode.ENDPOINT_REQUEST), Erth()), 120),
        (message(Bth(Opcode.ENDPOINT_RESPONSE), Eeth()), 140),
        (message(Bth(Opcode.WRITE_LAST), Meth(), Reth(), payload=bytes(45)), 124 + 48),
    ],
)
def test_bytes_at_layer_3(content: Message, size: int) -> None:
    assert len(encode_frame(write(message=content))) == size


def test_offsets_behind_ethernet() -> None:
    """Outer IPv6 ends at 54, inner at 94, UDP 102, BTH 114, METH 118, TSETH 122, RETH 138."""
    data = bytes(14) + encode_frame(write())
    assert data[20] == 41 and data[54 + 6] == 17
    assert data[96:98] == (4791).to_bytes(2, "big")
    assert data[102] == Opcode.WRITE_ONLY and data[111:114] == bytes([0, 0, 77])
    assert data[118:120] == bytes([0, 9]) and data[122:130] == (4096).to_bytes(8, "big")
    assert data[134:138] == (1024).to_bytes(4, "big")


def test_where_the_entropy_value_is() -> None:
    data = encode_frame(write(entropy=0xAAAABBBB))
    assert data[40:44].hex() == "6000aaaa" and data[80:82].hex() == "bbbb"
    data = encode_frame(write(entropy=0xAAAABBBB), EntropyOrder.SOURCE_PORT_HIGH)
    assert data[40:44].hex() == "6000bbbb" and data[80:82].hex() == "aaaa"


@given(st.integers(0, 2**32 - 1), st.sampled_from(EntropyOrder))
def test_entropy_fields_are_inverse(entropy: int, order: EntropyOrder) -> None:
    assert entropy_of(*entropy_fields(entropy, order), order) == entropy


@pytest.mark.parametrize("size", [0, 1, 44, 45, 48, 49])
@pytest.mark.parametrize("stamp", [(), (Tseth(7),)])
def test_payloads_are_padded_to_four(size: int, stamp: tuple[Tseth, ...]) -> None:
    content = message(Bth(Opcode.WRITE_ONLY), Meth(), *stamp, Reth(), payload=b"\xaa" * size)
    assert content.bth.pad == (4 - size % 4) % 4 and content.bth.ts == len(stamp)
    assert decode_frame(encode_frame(write(message=content))).message.payload == b"\xaa" * size


# Trimming.


@pytest.mark.parametrize("size", [122, 128, 138, 200])
def test_trimmed_frame(size: int) -> None:
    whole = encode_frame(write())
    cut = trim(whole, DSCP.trimmed, size)
    seen = IPv6(cut)
    assert len(cut) + 14 == size and seen.tc == 12 << 2 | 2 and seen.plen == size - 54
    assert cut[8:] == whole[8 : size - 14]  # nothing else changed, the inner length neither
    frame = decode_frame(cut)
    assert frame.trimmed and frame.entropy == 0x00010002 and frame.ecn == 2
    assert (frame.message.bth.dqp, frame.message.bth.psn) == (0x123456, 77)
    assert frame.message.need(Tseth) == Tseth(9)
    assert frame.message.get(Reth) == (Reth(4096, 3, 1024) if size >= 138 else None)
    assert frame.message.payload == b""
    if size < 138:
        with pytest.raises(MrcError, match="no RETH"):
            frame.message.need(Reth)


def test_short_frames_stay_whole_when_trimmed() -> None:
    small = encode_frame(write(message=message(Bth(Opcode.ACKNOWLEDGE), Aeth())))
    assert trim(small, DSCP.trimmed)[8:] == small[8:]
    with pytest.raises(MrcError, match="at least 122"):
        trim(small, DSCP.trimmed, 100)
    with pytest.raises(MrcError, match="encode the whole"):
        encode_frame(write(trimmed=True))


# Hostile bytes.


def survives(data: bytes) -> None:
    try:
        frame = decode_frame(data)
    except MrcError as error:
        assert isinstance(error.reason, Reason) and str(error)
    else:
        assert frame.trimmed or decode_frame(encode_frame(frame)) == frame


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=220))
@example(b"")
@example(b"\x60" + bytes(39))
def test_any_bytes_give_a_frame_or_an_mrc_error(data: bytes) -> None:
    survives(data)
    try:
        decode_message(data)
    except MrcError:
        pass


@settings(deadline=None, max_examples=150)
@given(frames(), st.data())
def test_damaged_frames_give_a_frame_or_an_mrc_error(frame: Frame, data: st.DataObject) -> None:
    raw = bytearray(encode_frame(frame))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    survives(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


def test_every_truncation() -> None:
    for frame in (write(), write(outer_dst=None, outer_src=bytes(16))):
        data = encode_frame(frame)
        for size in range(len(data)):
            with pytest.raises(MrcError) as caught:
                decode_frame(data[:size])
            assert caught.value.reason in (Reason.TRUNCATED, Reason.LENGTH)
    cut = trim(encode_frame(write()), DSCP.trimmed)
    for size in range(len(cut)):
        with pytest.raises(MrcError):
            decode_frame(cut[:size])


@pytest.mark.parametrize(
    ("transport", "reason"),
    [
        (encode(Bth(0x06)) + bytes(20), Reason.OPCODE),  # IBTA's RC write
        (encode(Bth(Opcode.WRITE_ONLY, tver=1)) + bytes(20), Reason.OPCODE),
        (encode(Bth(Opcode.WRITE_ONLY)) + bytes(19), Reason.TRUNCATED),
        (encode(Bth(Opcode.WRITE_ONLY, ts=1)) + bytes(20), Reason.TRUNCATED),
        (encode(Bth(Opcode.WRITE_ONLY)) + bytes(21), Reason.LENGTH),  # not a multiple of 4
        (encode(Bth(Opcode.WRITE_ONLY, pad=1)) + bytes(20), Reason.LENGTH),  # padding of nothing
        (encode(Bth(Opcode.SACK)) + bytes(40), Reason.LENGTH),  # payload where none belongs
        (encode(Bth(Opcode.SACK)) + bytes(32), Reason.TRUNCATED),
    ],
)
def test_reasons(transport: bytes, reason: Reason) -> None:
    with pytest.raises(MrcError) as caught:
        decode_message(transport)
    assert caught.value.reason is reason


def test_reasons_of_encapsulation() -> None:
    good = encode_frame(write())
    for position, value in ((0, 0x40), (6, 6), (40, 0x40), (46, 6), (82, 0)):
        data = bytearray(good)
        data[position] = value
        with pytest.raises(MrcError) as caught:
            decode_frame(bytes(data))
        assert caught.value.reason is Reason.ENCAPSULATION
    assert decode_frame(encode_frame(write(port=4971)), port=4971).port == 4971
    for position in (45, 85):  # inner IPv6 length, UDP length
        data = bytearray(good)
        data[position] ^= 4
        with pytest.raises(MrcError) as caught:
            decode_frame(bytes(data))
        assert caught.value.reason is Reason.LENGTH


def test_messages_that_cannot_be_made() -> None:
    for make in (
        lambda: message(Bth(0x06), Meth(), Reth()),
        lambda: message(Bth(Opcode.WRITE_ONLY), Reth()),
        lambda: message(Bth(Opcode.SACK), Seth(), CcState(), payload=b"x"),
        lambda: message(Bth(Opcode.ACKNOWLEDGE), Tseth(), Aeth()),
        lambda: encode_frame(write(entropy=1 << 32)),
    ):
        with pytest.raises(MrcError) as caught:
            make()
        assert caught.value.reason in (Reason.OPCODE, Reason.VALUE)
