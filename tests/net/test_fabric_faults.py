"""Every fault does what its name says and nothing else, is counted, and ends; lifted packets obey their callback."""

from __future__ import annotations

import fcntl
import itertools
import socket
import struct
from collections.abc import Iterator
from functools import partial

import pytest
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet

from net.errors import NetError
from net.fabric import Fabric
from net.mrc.frame import DSCP
from net.switch.model import Cause
from net.switch.ports import Fault
from net.topology import Node, Path, Tier
from tests.net.frames import first_link, last_link, settle, until, write

UPLINK = "p0-t0-0:p0-t1-1"
ACROSS = Path(0, 3, 0, 1)
OTHER_T1 = Path(0, 3, 0, 0)


@pytest.fixture(autouse=True)
def healed(fabric: Fabric) -> Iterator[None]:
    yield
    fabric.heal()


DQP = itertools.count(16)
"""A destination QP for each use of ``through``: what is still on its way from before is told by its own."""


def dqp(packet: Packet) -> int:
    return int.from_bytes(packet.original[107:110], "big")


def psns(packets: list[Packet]) -> list[int]:
    return [int.from_bytes(packet.original[111:114], "big") for packet in packets]


def through(fabric: Fabric, path: Path, count: int, arrive: int, **more: int) -> list[Packet]:
    """Sends PSNs 0 to ``count`` - 1 along ``path`` and takes what is to arrive."""
    own = next(DQP)
    frames = [write(fabric, path, psn, dqp=own, **more) for psn in range(count)]
    send = partial(fabric.send, first_link(fabric, path), frames)
    return fabric.expect(
        last_link(fabric, path), lambda packet: dqp(packet) == own, after=send, count=arrive, timeout_s=10
    )


def test_loss_of_all_and_of_half(fabric: Fabric) -> None:
    def lost() -> int:
        return fabric.counters(UPLINK).packets[Cause.LOSS]

    offered = sum(fabric.counters(UPLINK).packets.values())
    before = lost()
    fabric.fault(UPLINK, by="p0-t0-0", loss=1)
    fabric.send(first_link(fabric, ACROSS), [write(fabric, ACROSS, psn) for psn in range(20)])
    settle(fabric, UPLINK, "p0-t0-0", offered + 20)
    assert lost() == before + 20
    fabric.fault(UPLINK, by="p0-t0-0", loss=0.5)
    for sent in range(100, 500, 100):
        fabric.send(first_link(fabric, ACROSS), [write(fabric, ACROSS, psn) for psn in range(100)])
        settle(fabric, UPLINK, "p0-t0-0", offered + 20 + sent)
    assert 120 < lost() - before - 20 < 280  # 8 standard deviations
    fabric.fault(UPLINK, loss=0)
    assert psns(through(fabric, ACROSS, 5, 5)) == [0, 1, 2, 3, 4]


def test_a_cut_link_between_switches_carries_nothing_and_heals(fabric: Fabric) -> None:
    before = fabric.counters(UPLINK).packets[Cause.DOWN]
    fabric.fault(UPLINK, down=True)
    fabric.send(first_link(fabric, ACROSS), write(fabric, ACROSS, 1))
    until(lambda: fabric.counters(UPLINK).packets[Cause.DOWN] == before + 1, "the drop")
    assert psns(through(fabric, OTHER_T1, 3, 3)) == [0, 1, 2]
    fabric.fault(UPLINK, down=False)
    assert psns(through(fabric, ACROSS, 3, 3)) == [0, 1, 2]


def carrier(fabric: Fabric, host: str, interface: str) -> bool:
    with fabric.inside(host), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        answer = fcntl.ioctl(handle, 0x8913, struct.pack("=16sH14x8x", interface.encode(), 0))  # SIOCGIFFLAGS
    return bool(struct.unpack_from("=H", answer, 16)[0] & 0x40)  # IFF_RUNNING


def test_a_host_sees_its_carrier_go_and_routes_are_whole_afterwards(fabric: Fabric) -> None:
    assert carrier(fabric, "h3", "p0-t0-1")
    fabric.fault("h3:p0-t0-1", down=True)
    until(lambda: not carrier(fabric, "h3", "p0-t0-1"), "the carrier's end")  # Linux tells it a moment later
    assert carrier(fabric, "h3", "p1-t0-1")
    fabric.fault("h3:p0-t0-1", down=False)
    until(lambda: carrier(fabric, "h3", "p0-t0-1"), "the carrier's return")
    assert psns(through(fabric, ACROSS, 3, 3)) == [0, 1, 2]
    back = Path(3, 0, 0, 1)
    assert psns(through(fabric, back, 3, 3)) == [0, 1, 2]


def test_a_dead_switch_stays_up_and_forwards_nothing(fabric: Fabric) -> None:
    def dropped() -> int:
        return fabric.counters("p0-t0-1:p0-t1-1", "p0-t1-1").packets[Cause.DOWN]

    before = dropped()
    fabric.blackhole("p0-t1-1")
    fabric.send(first_link(fabric, ACROSS), [write(fabric, ACROSS, psn) for psn in range(4)])
    until(lambda: dropped() == before + 4, "four drops in the switch")
    assert psns(through(fabric, OTHER_T1, 2, 2)) == [0, 1]
    fabric.blackhole("p0-t1-1", on=False)
    assert psns(through(fabric, ACROSS, 2, 2)) == [0, 1]


def test_heal_gives_a_link_its_first_rate_back(fabric: Fabric) -> None:
    first, other = fabric.rate(UPLINK), first_link(fabric, ACROSS)
    assert other != UPLINK
    for link in (UPLINK, other):
        fabric.set_rate(link, first // 10)
        fabric.fault(link, loss=1)
    fabric.heal(UPLINK)
    for by in UPLINK.split(":"):
        assert (fabric.rate(UPLINK, by), fabric.state(UPLINK, by)) == (first, {})
    assert (fabric.rate(other), fabric.state(other)) == (first // 10, {"loss": 1.0})
    fabric.heal()
    assert (fabric.rate(other), fabric.state(other)) == (first, {})
    assert psns(through(fabric, ACROSS, 2, 2)) == [0, 1]


def test_corruption_flips_one_bit_behind_the_outer_header(fabric: Fabric) -> None:
    path, link = ACROSS, last_link(fabric, ACROSS)
    frame = write(fabric, path, 1, payload=200)

    def of_ours(packet: Packet) -> bool:  # by its length, which no bit can change
        return len(packet.original) == len(frame)

    [clean] = fabric.expect(link, of_ours, after=partial(fabric.send, first_link(fabric, path), frame))
    fabric.fault(UPLINK, by="p0-t0-0", corrupt=1)
    send = partial(fabric.send, first_link(fabric, path), [frame] * 30)
    for packet in fabric.expect(link, of_ours, after=send, count=30, timeout_s=10):
        pairs = list(zip(packet.original, clean.original, strict=True))
        [place] = [place for place, (found, sent) in enumerate(pairs) if found != sent]
        assert place >= 54
        assert (pairs[place][0] ^ pairs[place][1]).bit_count() == 1


def test_duplicates_are_equal_and_arrive(fabric: Fabric) -> None:
    before = fabric.counters(UPLINK).faults[Fault.DUPLICATE]
    fabric.fault(UPLINK, by="p0-t0-0", duplicate=1)
    found = through(fabric, ACROSS, 10, 20)
    assert sorted(psns(found)) == sorted([*range(10)] * 2)
    assert len({packet.original for packet in found}) == 10
    assert fabric.counters(UPLINK).faults[Fault.DUPLICATE] == before + 10


def test_reordered_packets_all_arrive_later_than_others(fabric: Fabric) -> None:
    fabric.fault(UPLINK, by="p0-t0-0", reorder=0.3)
    found = psns(through(fabric, ACROSS, 60, 60))
    assert sorted(found) == [*range(60)]
    assert found != sorted(found)


def test_a_fault_has_a_share(fabric: Fabric) -> None:
    with pytest.raises(NetError, match="0 to 1"):
        fabric.fault(UPLINK, loss=1.5)
    with pytest.raises(NetError, match="did you mean p0-t0-0:p0-t1-1"):
        fabric.fault("p0-t0-0:p0-t1-11", loss=1)


def test_a_lifted_packet_is_dropped_edited_doubled_or_sent_on(fabric: Fabric) -> None:
    seen: list[Packet] = []

    def decide(packet: Packet) -> Packet | list[Packet] | None:
        seen.append(packet)
        packet[IPv6].payload.fl = 0x12345
        return {0: None, 1: packet, 2: [packet, packet], 3: packet}[len(seen) - 1]

    fabric.lift(UPLINK, {"bth.psn": 7, "outer.traffic_class": DSCP.trimmable << 2 | 2}, decide)
    try:
        frames = [write(fabric, ACROSS, 7) for _ in range(4)] + [write(fabric, ACROSS, psn) for psn in (8, 9)]
        send = partial(fabric.send, first_link(fabric, ACROSS), frames)
        found = fabric.expect(last_link(fabric, ACROSS), lambda _: True, after=send, count=6, timeout_s=10)
    finally:
        fabric.unlift(UPLINK)
    assert sorted(psns(found)) == [7, 7, 7, 7, 8, 9]
    for packet in found:
        assert (packet[IPv6].payload.fl == 0x12345) == (psns([packet]) == [7])
    assert psns(seen) == [7] * 4
    assert psns(through(fabric, ACROSS, 2, 2)) == [0, 1]


def test_what_a_callback_raises_comes_out(fabric: Fabric) -> None:
    called = []

    def wrong(packet: Packet) -> None:
        called.append(packet)
        raise ValueError("no such thing")

    fabric.lift(UPLINK, {}, wrong)
    fabric.send(first_link(fabric, ACROSS), write(fabric, ACROSS, 1))
    until(lambda: bool(called), "the call")
    with pytest.raises(ValueError, match="no such thing"):
        fabric.unlift(UPLINK)


def test_a_match_needs_known_fields(fabric: Fabric) -> None:
    with pytest.raises(NetError, match=r"did you mean bth\.psn"):
        fabric.lift(UPLINK, {"bth.psm": 1}, lambda _: None)
    with pytest.raises(NetError, match="24 bits"):
        fabric.lift(UPLINK, {"bth.psn": 1 << 24}, lambda _: None)


def test_flows_are_counted_where_they_arrive(fabric: Fabric) -> None:
    through(fabric, ACROSS, 3, 3, ev=0xABCD0001)
    source, target = fabric.plan.host_address(0, 0), fabric.plan.host_address(3, 0)
    found = [flow for flow in fabric.flows() if (flow.src, flow.dst, flow.entropy) == (source, target, 0xABCD0001)]
    assert [(flow.packets, flow.marked, flow.trimmed) for flow in found] == [(3, 0, 0)]


def test_names_lead_to_nodes(fabric: Fabric) -> None:
    assert [port.node for port in fabric.node_ports("p0-t1-1")] == [Node(Tier.T1, 0, 1)] * 2
    with pytest.raises(NetError, match="no node"):
        fabric.node_ports("p9-t1-1")
