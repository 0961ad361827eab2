"""Scapy on the wires: an endpoint as an automaton, sr, sniff, sockets, captures that are wire bytes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from scapy.automaton import ATMT, Automaton
from scapy.layers.inet import UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet, Raw
from scapy.utils import rdpcap

from net.fabric import Fabric
from net.mrc.frame import DSCP
from net.mrc.scapy_layers import BTH, CCSTATE, METH, RETH, SETH, bind
from net.mrc.wire import Opcode
from net.topology import Path as FabricPath
from tests.net.frames import first_link, last_link, write

THERE = FabricPath(0, 3, 0, 1)


@pytest.fixture(autouse=True, scope="module")
def mrc_layers() -> None:
    bind()


class Responder(Automaton):
    """Answers every write with a SACK for its PSN."""

    def parse_args(self, fabric: Fabric, **more: Any) -> None:
        self.fabric = fabric
        super().parse_args(**more)

    def master_filter(self, packet: Packet) -> bool:
        return BTH in packet and packet[BTH].opcode == Opcode.WRITE_ONLY and packet.sniffed_on == "p0-t0-1>h3"

    @ATMT.state(initial=True)
    def WAITING(self) -> None:
        pass

    @ATMT.receive_condition(WAITING)
    def got(self, packet: Packet) -> None:
        psn = packet[BTH].psn
        sack = BTH(opcode=Opcode.SACK, dqp=9, psn=psn) / SETH(cack_psn=psn) / CCSTATE()
        self.send(self.fabric.packet("h3", "h0", 1, dscp=DSCP.control) / UDP(sport=1, dport=4791, chksum=0) / sack)
        raise self.WAITING()


def test_an_endpoint_as_an_automaton(fabric: Fabric) -> None:
    """sr pairs each write with the SACK that comes back through three switches."""
    responder = Responder(fabric, sock=fabric.socket(last_link(fabric, THERE), "h3"))
    responder.runbg()
    try:
        writes = [
            fabric.packet("h0", "h3", 1, dscp=DSCP.trimmable)
            / UDP(sport=1, dport=4791, chksum=0)
            / BTH(opcode=Opcode.WRITE_ONLY, dqp=5, psn=psn)
            / METH()
            / RETH(dma_length=4)
            / Raw(b"data")
            for psn in (3, 4, 5)
        ]
        pairs, unanswered = fabric.sr(
            first_link(fabric, THERE),
            writes,
            answers=lambda sent, got: SETH in got and got[SETH].cack_psn == sent[BTH].psn,
            timeout_s=10,
        )
    finally:
        responder.stop()
    assert not unanswered
    assert sorted(answer[SETH].cack_psn for _, answer in pairs) == [3, 4, 5]
    for _, answer in pairs:
        assert answer.sniffed_on == "p0-t0-0>h0"
        assert answer[IPv6].tc >> 2 == DSCP.control


def test_a_packet_by_names_takes_its_path(fabric: Fabric) -> None:
    packet = fabric.packet("h1", "h2", 0x10000, dscp=DSCP.trimmable) / UDP(sport=7, dport=9) / b"hello"
    send = partial(fabric.send, "h1:p1-t0-0", packet)
    [seen] = fabric.expect("p1-t0-0:p1-t1-0", lambda got: UDP in got and got[UDP].sport == 7, after=send)
    assert (seen[IPv6].tc, seen[IPv6].payload.fl, seen[Raw].load) == (DSCP.trimmable << 2 | 2, 1, b"hello")
    assert seen[IPv6].dst == "fc00:0:8800:4801:c800::"


def test_sniff_is_scapys(fabric: Fabric) -> None:
    send = partial(fabric.send, first_link(fabric, THERE), [write(fabric, THERE, psn) for psn in range(4)])
    found = fabric.sniff(
        last_link(fabric, THERE),
        started_callback=send,
        lfilter=lambda packet: BTH in packet and packet[BTH].psn % 2 == 1,
        count=2,
        timeout=10,
    )
    assert [packet[BTH].psn for packet in found] == [1, 3]


def test_expect_shows_what_was_there_instead(fabric: Fabric) -> None:
    send = partial(fabric.send, first_link(fabric, THERE), write(fabric, THERE, 1))
    with pytest.raises(AssertionError, match=r"0 of 1 packets in 0\.3 s; seen 1:\n  p0-t0-1>h3: .*BTH"):
        fabric.expect(last_link(fabric, THERE), lambda _: False, after=send, timeout_s=0.3)


def test_a_capture_has_wire_bytes(fabric: Fabric, tmp_path: Path) -> None:
    """Between the switches, the destination as it is there: shifted once, whatever the next switch makes of it."""
    link, file = "p0-t0-0:p0-t1-1", tmp_path / "uplink.pcap"
    capture = fabric.capture(link, file)
    send = partial(fabric.send, first_link(fabric, THERE), [write(fabric, THERE, psn) for psn in range(5)])
    fabric.expect(last_link(fabric, THERE), lambda _: True, after=send, count=5, timeout_s=10)
    capture.close()
    frames = rdpcap(str(file))
    assert (len(frames), capture.frames, capture.lost) == (5, 5, 0)
    for psn, frame in enumerate(frames):
        sent = write(fabric, THERE, psn)
        assert bytes(frame)[54:] == sent[54:]
        assert (frame[IPv6].dst, frame[IPv6].hlim) == ("fc00:0:8001:4001:c001::", 63)
