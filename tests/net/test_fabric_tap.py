"""A machine on a tap descriptor: Scapy plays the guest, the kernels of other hosts and another machine answer."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest
from scapy.layers.inet6 import ICMPv6EchoReply, ICMPv6EchoRequest, ICMPv6ND_NA, ICMPv6ND_NS, IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet

from emu.fabric.holder import Holder
from net.errors import NetError
from net.fabric import Fabric
from net.tap import HostTap


def next_frame(tap: HostTap, layer: type[Packet]) -> Packet:
    """The next frame of this kind that the machine gets."""
    while select.select([tap.fd], [], [], 10)[0]:
        frame = Ether(os.read(tap.fd, 1 << 14))
        if layer in frame:
            return frame
    raise AssertionError(f"no {layer.__name__} comes")


def ping(tap: HostTap, dst: str, sequence: int) -> None:
    request = IPv6(src=str(tap.address), dst=dst) / ICMPv6EchoRequest(id=7, seq=sequence, data=b"x" * 1400)
    os.write(tap.fd, bytes(Ether(src=tap.mac, dst=tap.gateway_mac) / request))


@pytest.fixture(scope="module")
def machine(fabric: Fabric) -> HostTap:
    return fabric.tap("h1")


def test_a_machine_reaches_every_host_by_its_plane(fabric: Fabric, machine: HostTap) -> None:
    for sequence, (host, plane) in enumerate([("h0", 0), ("h1", 0), ("h2", 1), ("h3", 0)]):
        ping(machine, fabric.address(host, plane), sequence)
        reply = next_frame(machine, ICMPv6EchoReply)
        assert (reply.dst, reply[IPv6].src, reply[IPv6].dst) == (
            machine.mac,
            fabric.address(host, plane),
            str(machine.address),
        )
        assert (reply[ICMPv6EchoReply].seq, reply[ICMPv6EchoReply].data) == (sequence, b"x" * 1400)


def test_its_gateway_answers(fabric: Fabric, machine: HostTap) -> None:
    """Neighbour discovery, which a guest begins with."""
    solicit = IPv6(src=str(machine.address), dst="ff02::1:ff00:1", hlim=255) / ICMPv6ND_NS(tgt="fe80::1")
    os.write(machine.fd, bytes(Ether(src=machine.mac, dst="33:33:ff:00:00:01") / solicit))
    advertised = next_frame(machine, ICMPv6ND_NA)
    assert advertised[ICMPv6ND_NA].tgt == "fe80::1"
    assert advertised.src == machine.gateway_mac


def test_two_machines_reach_each_other(fabric: Fabric, machine: HostTap) -> None:
    other = fabric.tap("h3")
    ping(machine, str(other.address), 9)
    request = next_frame(other, ICMPv6EchoRequest)
    assert (request[IPv6].src, request[ICMPv6EchoRequest].seq) == (str(machine.address), 9)
    assert request.dst == other.mac


def test_flows_name_machines_by_the_host_whose_place_they_have(
    fabric: Fabric, machine: HostTap, tmp_path: Path
) -> None:
    ping(machine, fabric.address("h2", 1), 20)
    next_frame(machine, ICMPv6EchoReply)
    rows = Holder("x", fabric, tmp_path).flows({})["flows"]
    assert {("h1 (vm)", "h2"), ("h2", "h1 (vm)")} <= {(row["src"], row["dst"]) for row in rows}
    assert {row["plane"] for row in rows if row["src"] == "h1 (vm)"} == {None}


def test_a_host_has_one(fabric: Fabric, machine: HostTap) -> None:
    with pytest.raises(NetError, match="has a machine already"):
        fabric.tap("h1")
