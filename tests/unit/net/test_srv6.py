"""The uSID plan against addresses written by hand, Scapy's IPv6, and a shifting model that works on text."""

from __future__ import annotations

import json
import tomllib
from ipaddress import IPv6Address, IPv6Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scapy.layers.inet6 import IPv6

from net.errors import PlanError
from net.srv6 import Action, Plan, decide, neighbour, shift, usid, walk
from net.topology import Node, Path, Tier, Topology, clos

SMALL = Plan(Topology(planes=2, t0_per_plane=2, t1_per_plane=2, hosts_per_t0=2))


def shift_text(address: str) -> str:
    """The same on the eight groups of an address: the third goes, zeros come in at the end."""
    groups = IPv6Address(address).exploded.split(":")
    return ":".join([*groups[:2], *groups[3:], "0000"])


def test_usids_by_hand() -> None:
    assert usid(1, 0, 0) == 0x4000  # T0 0 of plane 0
    assert usid(2, 1, 3) == 0x8803  # T1 3 of plane 1
    assert usid(3, 7, 2047) == 0xFFFF  # the last host of plane 7
    assert SMALL.node_usid(Node(Tier.HOST, 0, 3), 1) == 0xC801  # host 3 is downlink 1 below its T0


def test_carriers_by_hand() -> None:
    assert SMALL.carrier(Path(0, 3, 1, 1)) == IPv6Address("fc00:0:4800:8801:4801:c801::")
    assert SMALL.carrier(Path(0, 1, 1, None)) == IPv6Address("fc00:0:4800:c801::")
    assert SMALL.host_address(3, 1) == IPv6Address("fd00:0:1::4")


def test_a_carrier_walks_its_path() -> None:
    """One switch at a time, as it was measured in the kernel: DA ends as block:host::."""
    hops = walk(SMALL, 0, 1, SMALL.carrier(Path(0, 3, 1, 1)))
    assert [(hop.node.name, str(hop.address), hop.port) for hop in hops] == [
        ("h0", "fc00:0:4800:8801:4801:c801::", 1),
        ("p1-t0-0", "fc00:0:8801:4801:c801::", 3),
        ("p1-t1-1", "fc00:0:4801:c801::", 1),
        ("p1-t0-1", "fc00:0:c801::", 1),
        ("h3", "fc00:0:c801::", None),
    ]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**128 - 1))
def test_shift_is_that_of_text_and_of_bytes(value: int) -> None:
    address = IPv6Address(value)
    assert shift(address) == IPv6Address(shift_text(str(address)))
    packed = address.packed
    assert shift(address).packed == packed[:4] + packed[6:] + bytes(2)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**128 - 1))
def test_addresses_are_scapys_bytes(value: int) -> None:
    address = IPv6Address(value)
    assert bytes(IPv6(dst=str(address)))[24:40] == address.packed
    assert IPv6Address(IPv6(bytes(IPv6(dst=str(shift(address))))).dst) == shift(address)


@st.composite
def walks(draw: st.DrawFn) -> tuple[Plan, Path]:
    fabric = draw(st.builds(Topology, *[st.integers(1, 4)] * 4))
    src, dst = draw(st.integers(0, fabric.hosts - 1)), draw(st.integers(0, fabric.hosts - 1))
    return Plan(fabric), fabric.path(src, dst, draw(st.sampled_from(fabric.evs(src, dst))))


@settings(deadline=None, max_examples=60)
@given(walks())
def test_every_carrier_reaches_its_host_by_its_path(case: tuple[Plan, Path]) -> None:
    plan, path = case
    hops = walk(plan, path.src, path.plane, plan.carrier(path))
    assert [hop.node for hop in hops] == plan.fabric.path_nodes(path)
    ports = plan.fabric.path_ports(path)
    assert [hop.port for hop in hops] == [*(port.number for port in ports), None]


@settings(deadline=None, max_examples=60)
@given(walks())
def test_tables_by_a_naive_lookup(case: tuple[Plan, Path]) -> None:
    """Textual: groups of the address against groups of every route of the node, no Table, no decide."""
    plan, path = case
    address, node = str(plan.carrier(path)), Node(Tier.HOST, 0, path.src)
    for port in plan.fabric.path_ports(path):
        groups = IPv6Address(address).exploded.split(":")[:3]
        hits = [
            r
            for r in plan.routes()
            if r.node == node and str(r.prefix.network_address.exploded).split(":")[:3] == groups
        ]
        if hits[0].action is Action.END:
            address = shift_text(address)
            groups = IPv6Address(address).exploded.split(":")[:3]
            hits = [
                r
                for r in plan.routes()
                if r.node == node and str(r.prefix.network_address.exploded).split(":")[:3] == groups
            ]
        assert [hit.port for hit in hits] == [port.number]
        node = neighbour(plan.fabric, node, port.number)


def test_number_of_routes() -> None:
    """T0: itself, hosts, T1s; T1: itself, T0s; host: two per plane. 2 planes, 2 + 2 switches, 4 hosts."""
    routes = list(SMALL.routes())
    assert len(routes) == 2 * (2 * (1 + 2 + 2) + 2 * (1 + 2)) + 4 * 2 * 2
    assert len({(route.node, route.prefix) for route in routes}) == len(routes)


def test_what_a_switch_drops() -> None:
    table = SMALL.table(Node(Tier.T0, 0, 0))
    assert decide(table, IPv6Address("fc00:0:4000::"))[1] is None  # itself and nothing behind
    assert decide(table, IPv6Address("fc00:0:4000:4000:c000::"))[1] is None  # itself twice
    assert decide(table, IPv6Address("fc00:0:4000:8800::"))[1] is None  # a T1 of the other plane
    assert decide(table, IPv6Address("fd00:0:4000:8000::"))[1] is None  # another block
    lost = walk(SMALL, 0, 0, IPv6Address("fc00:0:4000:8000:4001:c7ff::"))
    assert lost[-1].node.name == "p0-t0-1" and lost[-1].port is None


def test_uniqueness_at_full_size() -> None:
    """8 planes of 512-port switches: 6,144 switch uSIDs and 8 x 256 host uSIDs, all different, none zero."""
    fabric = clos(8, 512)
    plan = Plan(fabric)
    numbers = [
        usid(role, plane, n)
        for role, count in ((1, 512), (2, 256), (3, 256))
        for plane in range(8)
        for n in range(count)
    ]
    assert len(set(numbers)) == 6_144 + 2_048 and 0 not in numbers
    path = fabric.path(0, fabric.hosts - 1, 7 << 16 | 255)
    assert plan.unpack(plan.carrier(path)) == [0x7800, 0xB8FF, 0x79FF, 0xF8FF]


def test_written_plan_reads_back() -> None:
    want = SMALL.to_dict()
    assert tomllib.loads(SMALL.to_toml()) == want == json.loads(SMALL.to_json())
    assert want["switch"][0] == {"name": "p0-t0-0", "usid": "4000", "prefix": "fc00:0:4000::/48"}
    assert want["host"][3] == {"name": "h3", "usids": ["c001", "c801"], "addresses": ["fd00::4", "fd00:0:1::4"]}
    assert {"node": "p0-t0-0", "prefix": "fc00:0:8001::/48", "action": "forward", "port": 3} in want["route"]


def test_printed_plan() -> None:
    lines = SMALL.text().splitlines()
    assert lines[0] == "2 planes x (2 T0 + 2 T1), 4 hosts"
    assert "p1-t1-1      8801  fc00:0:8801::/48" in lines
    assert lines[-1] == "h0 -> h3, EV 0x00010001: fc00:0:4800:8801:4801:c801::"


def test_mistakes_name_the_fix() -> None:
    with pytest.raises(PlanError, match="below 2048"):
        usid(1, 0, 2048)
    with pytest.raises(PlanError, match="give a /32"):
        Plan(SMALL.fabric, block=IPv6Network("fc00::/48"))
    with pytest.raises(PlanError, match="two different"):
        Plan(SMALL.fabric, hosts_block=IPv6Network("fc00::/32"))
    with pytest.raises(PlanError, match="one uSID per plane"):
        SMALL.node_usid(Node(Tier.HOST, 0, 0))
    with pytest.raises(PlanError, match="planes are 0 to 1"):
        SMALL.host_address(0, 2)
    for usids in ([], [1] * 7, [0], [0x10000]):
        with pytest.raises(PlanError, match="give 1 to 6"):
            SMALL.pack(usids)
    for address in ("fc00:1:4000::", "fc00::", "fc00:0:0:4000::"):
        with pytest.raises(PlanError):
            SMALL.unpack(IPv6Address(address))
    assert SMALL.unpack(SMALL.pack([1, 2, 3, 4, 5, 6])) == [1, 2, 3, 4, 5, 6]
