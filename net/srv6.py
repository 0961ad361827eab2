"""SRv6 micro-SIDs (uN, flavor next-csid): which 16 bits name which node, carriers, static routes.

A destination address is a 32-bit block and up to six 16-bit uSIDs. A switch whose own uSID stands first shifts the
rest left by 16 bits and looks up the new first 48 bits in a static table. There is no segment routing header.

    uSID   15:14 role (1 T0, 2 T1, 3 host)  |  13:11 plane  |  10:0 number
    carrier of a path   block:[T0]:[T1]:[T0']:[host]::      below one T0:   block:[T0]:[host]::

A host's number in its uSID is its downlink at the T0: only the last T0 looks it up, so every T0 uses the same ones.

Use: ``plan = Plan(fabric)``; ``plan.carrier(path)``; ``plan.routes()``; ``print(plan.text())``; ``plan.to_toml()``.
Limits: those of net.topology. Errors: PlanError.
Source: arXiv 2605.04333 section 2.2 and 2.3; RFC 9800 (NEXT-CSID). The bit layout inside a uSID is not public; this
one is ours and is written into every plan.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network
from typing import Any, NamedTuple

from net.errors import PlanError
from net.topology import Node, Path, Tier, Topology

BLOCK_BITS = 32
USID_BITS = 16
USIDS_MAX = (128 - BLOCK_BITS) // USID_BITS
PREFIX_BITS = BLOCK_BITS + USID_BITS

BLOCK = IPv6Network("fc00::/32")
HOSTS_BLOCK = IPv6Network("fd00::/32")

VM_NETWORK = 0xFFFF
"""Stands where the plane stands in a host's address."""

VM_USID = 1
"""Behind a host's uSID: for the machine there. No node has a uSID with role 0."""

ROLES = {Tier.T0: 1, Tier.T1: 2, Tier.HOST: 3}
_PLANE_BITS, _NUMBER_BITS = 3, 11
_ARGUMENT_BITS = 128 - BLOCK_BITS
_ARGUMENT_MASK = (1 << _ARGUMENT_BITS) - 1


def usid(role: int, plane: int, number: int) -> int:
    """The 16 bits of a node; PlanError when one of the parts does not fit."""
    for name, value, limit in (("role", role, 4), ("plane", plane, 8), ("number", number, 2048)):
        if not 0 <= value < limit:
            raise PlanError(f"{name} {value} fits no uSID", f"it must be below {limit}")
    return role << _PLANE_BITS + _NUMBER_BITS | plane << _NUMBER_BITS | number


def shift(address: IPv6Address) -> IPv6Address:
    """What End with next-csid does to a destination: the first uSID goes, the rest moves up, zeros follow."""
    value = int(address)
    block = value & ~_ARGUMENT_MASK
    return IPv6Address(block | (value << USID_BITS & _ARGUMENT_MASK))


def first_prefix(address: IPv6Address) -> IPv6Network:
    """Block and first uSID: what a switch looks up."""
    return IPv6Network((int(address) >> 128 - PREFIX_BITS << 128 - PREFIX_BITS, PREFIX_BITS))


class Action(enum.Enum):
    """What a route does."""

    END = "end"
    FORWARD = "forward"
    DELIVER = "deliver"


class Route(NamedTuple):
    """One static /48 of ``node``: END is its own uSID, FORWARD sends by ``port``, DELIVER takes the packet in."""

    node: Node
    prefix: IPv6Network
    action: Action
    port: int | None = None


class Hop(NamedTuple):
    """A packet at ``node``: the destination it goes on with, and by which port (None: delivered)."""

    node: Node
    address: IPv6Address
    port: int | None


Table = dict[IPv6Network, Route]


def decide(table: Table, address: IPv6Address) -> tuple[IPv6Address, Route | None]:
    """One node's verdict on a destination: the address it goes on with, and the route it takes or None to drop.

    As the kernel does it: END shifts and looks up once more; END with nothing behind it has no next hop.
    """
    route = table.get(first_prefix(address))
    if route is not None and route.action is Action.END:
        address = shift(address)
        route = table.get(first_prefix(address))
        if route is not None and route.action is Action.END:
            return address, None
    return address, route


@dataclass(frozen=True, slots=True)
class Plan:
    """Addresses of a fabric.

    block: the /32 that uSIDs live in. hosts_block: the /32 of host addresses, one /48 per plane.
    """

    fabric: Topology
    block: IPv6Network = BLOCK
    hosts_block: IPv6Network = HOSTS_BLOCK

    def __post_init__(self) -> None:
        for name in ("block", "hosts_block"):
            network = getattr(self, name)
            if network.prefixlen != BLOCK_BITS:
                raise PlanError(f"{name} is {network}", "give a /32")
        if self.block == self.hosts_block:
            raise PlanError(f"uSIDs and hosts share {self.block}", "give two different /32")

    def node_usid(self, node: Node, plane: int | None = None) -> int:
        """The uSID of a switch, or of a host in ``plane``."""
        if node.tier is not Tier.HOST:
            return usid(ROLES[node.tier], node.plane, node.number)
        if plane is None or not 0 <= plane < self.fabric.planes:
            raise PlanError(f"{node.name} has one uSID per plane", f"give a plane below {self.fabric.planes}")
        return usid(ROLES[Tier.HOST], plane, self.fabric.place(node.number)[1])

    def prefix(self, number: int) -> IPv6Network:
        """The /48 of a uSID."""
        return first_prefix(self.pack([number]))

    def pack(self, usids: list[int]) -> IPv6Address:
        """The carrier of these uSIDs."""
        if not 1 <= len(usids) <= USIDS_MAX or not all(0 < number < 1 << USID_BITS for number in usids):
            raise PlanError(f"{len(usids)} uSIDs {usids} are no carrier", f"give 1 to {USIDS_MAX}, none of them 0")
        value = int(self.block.network_address)
        for position, number in enumerate(usids):
            value |= number << _ARGUMENT_BITS - USID_BITS * (position + 1)
        return IPv6Address(value)

    def unpack(self, address: IPv6Address) -> list[int]:
        """The uSIDs of a carrier."""
        if address not in self.block:
            raise PlanError(f"{address} is not in {self.block}", "take addresses from Plan.carrier")
        words = [int(address) >> 16 * position & 0xFFFF for position in reversed(range(USIDS_MAX))]
        while words and not words[-1]:
            words.pop()
        if not words or 0 in words:
            raise PlanError(f"{address} is no carrier", "uSIDs stand side by side behind the block")
        return words

    def carrier(self, path: Path) -> IPv6Address:
        """The destination address that sends a packet along ``path``."""
        _, *switches, last = self.fabric.path_nodes(path)
        return self.pack([*map(self.node_usid, switches), self.node_usid(last, path.plane)])

    def host_address(self, host: int, plane: int) -> IPv6Address:
        """The address of a host's port in ``plane``: source of outer headers, both ends of inner ones."""
        self.fabric.place(host)
        if not 0 <= plane < self.fabric.planes:
            raise PlanError(f"there is no plane {plane}", f"planes are 0 to {self.fabric.planes - 1}")
        return IPv6Address(int(self.hosts_block.network_address) | plane << 128 - PREFIX_BITS | host + 1)

    def vm_address(self, host: int) -> IPv6Address:
        """The address of a virtual machine in a host's place."""
        self.fabric.place(host)
        return IPv6Address(int(self.hosts_block.network_address) | VM_NETWORK << 128 - PREFIX_BITS | host + 1)

    def vm_carrier(self, path: Path) -> IPv6Address:
        """As ``carrier``, to the machine in the place of ``path``'s last host."""
        return self.pack([*self.unpack(self.carrier(path)), VM_USID])

    def vm_prefix(self, host: int, plane: int) -> IPv6Network:
        """What a host looks up to hand a packet on to its machine: its uSID and the machine's."""
        address = self.pack([self.node_usid(Node(Tier.HOST, 0, host), plane), VM_USID])
        return IPv6Network((address, PREFIX_BITS + USID_BITS))

    def routes(self) -> Iterator[Route]:
        """Every static route of the fabric, node by node; made once, never changed when links fail."""
        for node in self.fabric.nodes():
            yield from self.node_routes(node)

    def node_routes(self, node: Node) -> Iterator[Route]:
        """Host: its uSID and its T0 per plane. T0: itself, its hosts, its T1s. T1: itself, its T0s."""
        fabric = self.fabric
        if node.tier is Tier.HOST:
            t0 = fabric.place(node.number)[0]
            for plane in range(fabric.planes):
                yield Route(node, self.prefix(self.node_usid(node, plane)), Action.DELIVER)
                yield self._towards(node, Node(Tier.T0, plane, t0), plane)
            return
        yield Route(node, self.prefix(self.node_usid(node)), Action.END)
        if node.tier is Tier.T1:
            for number in range(fabric.t0_per_plane):
                yield self._towards(node, Node(Tier.T0, node.plane, number), number)
            return
        for downlink in range(fabric.hosts_per_t0):
            host_usid = usid(ROLES[Tier.HOST], node.plane, downlink)
            yield Route(node, self.prefix(host_usid), Action.FORWARD, downlink)
        for number in range(fabric.t1_per_plane):
            yield self._towards(node, Node(Tier.T1, node.plane, number), fabric.hosts_per_t0 + number)

    def _towards(self, node: Node, neighbour: Node, port: int) -> Route:
        return Route(node, self.prefix(self.node_usid(neighbour)), Action.FORWARD, port)

    def table(self, node: Node) -> Table:
        """The routes of one node by prefix."""
        return {route.prefix: route for route in self.node_routes(node)}

    # Written down.

    def to_dict(self) -> dict[str, Any]:
        """The whole plan: numbers, strings and lists only."""
        fabric = self.fabric
        nodes = list(fabric.nodes())
        return {
            "block": str(self.block),
            "hosts_block": str(self.hosts_block),
            "usid": {"role_bits": 2, "plane_bits": _PLANE_BITS, "number_bits": _NUMBER_BITS}
            | {f"role_{tier.value}": role for tier, role in ROLES.items()},
            "fabric": {
                "planes": fabric.planes,
                "t0_per_plane": fabric.t0_per_plane,
                "t1_per_plane": fabric.t1_per_plane,
                "hosts_per_t0": fabric.hosts_per_t0,
                "host_rate_bps": fabric.host_rate_bps,
                "uplink_rate_bps": fabric.uplink_rate_bps,
            },
            "switch": [
                {"name": node.name, "usid": f"{self.node_usid(node):04x}", "prefix": str(self.node_prefix(node))}
                for node in nodes
                if node.tier is not Tier.HOST
            ],
            "host": [self._host_dict(node) for node in nodes if node.tier is Tier.HOST],
            "route": [self._route_dict(route) for route in self.routes()],
        }

    def node_prefix(self, node: Node, plane: int | None = None) -> IPv6Network:
        """The /48 of a node's uSID."""
        return self.prefix(self.node_usid(node, plane))

    def _host_dict(self, node: Node) -> dict[str, Any]:
        planes = range(self.fabric.planes)
        return {
            "name": node.name,
            "usids": [f"{self.node_usid(node, plane):04x}" for plane in planes],
            "addresses": [str(self.host_address(node.number, plane)) for plane in planes],
        }

    @staticmethod
    def _route_dict(route: Route) -> dict[str, Any]:
        row: dict[str, Any] = {"node": route.node.name, "prefix": str(route.prefix), "action": route.action.value}
        return row if route.port is None else row | {"port": route.port}

    def to_json(self) -> str:
        """The plan as JSON."""
        return json.dumps(self.to_dict(), indent=1) + "\n"

    def to_toml(self) -> str:
        """The plan as TOML. JSON's scalars and arrays of ASCII strings are TOML's too."""
        plain: list[str] = []
        tables: list[str] = []
        for key, value in self.to_dict().items():
            if isinstance(value, dict):
                tables += ["", f"[{key}]", *_pairs(value)]
            elif isinstance(value, list):
                for row in value:
                    tables += ["", f"[[{key}]]", *_pairs(row)]
            else:
                plain += _pairs({key: value})
        return "\n".join([*plain, *tables]) + "\n"

    def text(self) -> str:
        """The plan for a reader: sizes, uSIDs, and for the first and last host a carrier per plane."""
        fabric, plan = self.fabric, self.to_dict()
        lines = [
            fabric.size,
            f"uSIDs in {self.block}: role 2 bits (T0 1, T1 2, host 3), plane {_PLANE_BITS}, number {_NUMBER_BITS}",
        ]
        lines += [f"{row['name']:12} {row['usid']}  {row['prefix']}" for row in plan["switch"]]
        for row in plan["host"]:
            lines += [
                f"{row['name']:12} {number}  {address}" for number, address in zip(row["usids"], row["addresses"])
            ]
        src, dst = 0, fabric.hosts - 1
        for ev in fabric.evs(src, dst):
            lines.append(f"h{src} -> h{dst}, EV {ev:#010x}: {self.carrier(fabric.path(src, dst, ev))}")
        return "\n".join(lines) + "\n"


def _pairs(row: dict[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in row.items()]


def walk(plan: Plan, src: int, plane: int, address: IPv6Address, hops_max: int = 16) -> list[Hop]:
    """Where a packet of ``src`` goes by the static tables alone: a reference for switches, and for ``show``.

    The last hop has port None: delivered there, or dropped there when ``node`` is no host.
    """
    fabric = plan.fabric
    node = Node(Tier.HOST, 0, src)
    hops = [Hop(node, address, plane)]
    while len(hops) < hops_max and hops[-1].port is not None:
        node = neighbour(fabric, node, hops[-1].port)
        address, route = decide(plan.table(node), address)
        hops.append(Hop(node, address, None if route is None else route.port))
    return hops


def neighbour(fabric: Topology, node: Node, port: int) -> Node:
    """The node at the other end of a port."""
    if node.tier is Tier.HOST:
        return Node(Tier.T0, port, fabric.place(node.number)[0])
    if node.tier is Tier.T1:
        return Node(Tier.T0, node.plane, port)
    if port < fabric.hosts_per_t0:
        return Node(Tier.HOST, 0, node.number * fabric.hosts_per_t0 + port)
    return Node(Tier.T1, node.plane, port - fabric.hosts_per_t0)
