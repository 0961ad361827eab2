"""Packets take the switches that the plan says; fabrics are apart from each other and gone with their process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections import Counter
from functools import partial

import pytest
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet

from net.fabric import Fabric
from net.namespaces import Namespace
from net.srv6 import first_prefix, shift
from net.topology import Port
from tests.net.conftest import SMALL
from tests.net.frames import first_link, last_link, write

HOSTS = range(SMALL.hosts)
PAIRS = [(src, dst) for src in HOSTS for dst in HOSTS if src != dst]


def has_psn(psn: int, packet: Packet) -> bool:
    return bytes(packet)[111:114] == psn.to_bytes(3, "big")  # Ethernet 14, IPv6 2 x 40, UDP 8, then 9 bytes into BTH


def sent(fabric: Fabric) -> Counter[Port]:
    return Counter(
        {
            port: fabric.counters(link.name, port.node.name).sent_packets
            for link in fabric.wiring.links.values()
            for port in (link.lower, link.upper)
        }
    )


@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_ev_takes_its_path(fabric: Fabric, src: int, dst: int) -> None:
    topology = fabric.topology
    for psn, ev in enumerate(topology.evs(src, dst)):
        path = topology.path(src, dst, ev)
        before = sent(fabric)
        link = last_link(fabric, path)

        send = partial(fabric.send, first_link(fabric, path), write(fabric, path, psn))
        [packet] = fabric.expect(link, partial(has_psn, psn), after=send)
        assert sent(fabric) - before == Counter(dict.fromkeys(topology.path_ports(path), 1))
        switches = len(topology.path_nodes(path)) - 2
        address = fabric.plan.carrier(path)
        for _ in range(switches):
            address = shift(address)
        assert packet[IPv6].dst == str(address)
        assert first_prefix(address) == fabric.plan.node_prefix(topology.path_nodes(path)[-1], path.plane)
        assert packet[IPv6].hlim == 64 - switches


def test_ends_are_counted_by_the_kernel(live: None) -> None:
    """seg6local's own counters (which stock pyroute2 cannot ask for) see each packet at each switch of the path."""
    with Fabric(SMALL) as fabric:
        path = SMALL.path(0, 3, 1)
        fabric.expect(
            last_link(fabric, path),
            lambda _: True,
            after=lambda: fabric.send(first_link(fabric, path), write(fabric, path, 1)),
        )
        for node in SMALL.nodes():
            if node.name.startswith("h"):
                continue
            [packets] = [
                encap.get_nested("SEG6_LOCAL_COUNTERS", "SEG6_LOCAL_CNT_PACKETS")
                for route in fabric.wiring.nodes[node.name].netlink.routes()
                if (encap := route.get_attr("RTA_ENCAP")) is not None
            ]
            assert packets == (node in SMALL.path_nodes(path)), node.name


@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is the witness")
def test_iproute2_reads_the_routes_as_they_are_meant(live: None) -> None:
    with Fabric(SMALL) as fabric:

        def routes(node: str) -> list[str]:
            with fabric.inside(node):
                shown = subprocess.run(["ip", "-6", "route"], capture_output=True, text=True, check=True).stdout
            return [" ".join(line.split()) for line in shown.splitlines()]

        own = "fc00:0:4000::/48 encap seg6local action End flavors next-csid lblen 32 nflen 16 dev h0"
        assert any(line.startswith(own) for line in routes("p0-t0-0"))
        assert any(line.startswith("fc00:0:8001::/48 via fe80::1 dev p0-t1-1") for line in routes("p0-t0-0"))
        host = routes("h0")
        assert any(line.startswith("fc00:0:c000::/48 encap seg6local action End.DT6 table local") for line in host)
        wrapped = "fd00::4 encap seg6 mode encap.red segs 1 [ fc00:0:4000:8001:4001:c001:: ] via fe80::1 dev p0-t0-0"
        assert any(line.startswith(wrapped) for line in host)


def test_ordinary_programs_reach_each_other(fabric: Fabric) -> None:
    for plane in range(SMALL.planes):
        with (
            fabric.inside("h3"),
            socket.create_server((fabric.address("h3", plane), 0), family=socket.AF_INET6) as server,
        ):
            port = server.getsockname()[1]
            with fabric.start(
                "h0",
                [
                    sys.executable,
                    "-c",
                    "import socket, sys; s = socket.create_connection(sys.argv[1:]); s.sendall(b'x' * 10**5)",
                    fabric.address("h3", plane),
                    str(port),
                ],
            ) as client:
                server.settimeout(20)
                connection, (peer, *_) = server.accept()
                with connection:
                    received = 0
                    while data := connection.recv(1 << 16):
                        received += len(data)
            assert (received, peer, client.returncode) == (10**5, fabric.address("h0", plane), 0)


def test_two_fabrics_do_not_meet(live: None) -> None:
    with Fabric(SMALL) as one, Fabric(SMALL) as other:
        path = SMALL.path(0, 3, 0)
        one.expect(
            last_link(one, path), lambda _: True, after=lambda: one.send(first_link(one, path), write(one, path, 1))
        )
        assert sent(one).total() == 4
        assert sent(other).total() == 0


CHILD = """
import signal
from net.fabric import Fabric
from tests.net.conftest import SMALL
fabric = Fabric(SMALL)
print(fabric.wiring.nodes["p1-t1-0"].fd, flush=True)
signal.pause()
"""


def test_nothing_is_left_of_a_killed_process(live: None) -> None:
    """A cable from one of its switches to a namespace of ours disappears with the switch."""
    ours = Namespace("test")
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        number = int(child.stdout.readline())
        theirs = os.open(f"/proc/{child.pid}/fd/{number}", os.O_RDONLY)
        ends = [("ours", 2, ours.fd, b"\x02\0\0\1\0\1"), ("theirs", 99, theirs, b"\x02\0\0\1\0\2")]
        ours.netlink.veth(ends, 1500, 10)
        ours.netlink.flush()
        os.close(theirs)
        with ours.entered():
            events = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
            events.bind((0, 1))  # RTMGRP_LINK
        events.settimeout(20)
        child.send_signal(signal.SIGKILL)
    with events:
        while struct.unpack_from("=IH", events.recv(1 << 16))[1] != 17:  # RTM_DELLINK
            pass
    ours.close()
