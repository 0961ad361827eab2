"""Two-tier multi-plane Clos fabrics from a few numbers.

Every plane is a network of its own: T0 switches with hosts below, T1 switches above, one link from each T0 to each
T1 of the plane. A host (one NIC) has one port per plane and sits at the same place in each, so a path between two
hosts is chosen by (plane, T0 uplink), which is what an entropy value (EV) names. Planes share nothing.

Use: ``fabric = Topology(planes=2, t0_per_plane=2, t1_per_plane=2, hosts_per_t0=2)``, or ``clos(planes=8,
radix=512)``; ``fabric.path(src, dst, ev)`` and ``fabric.ev(path)`` are each other's inverse.

Numbers count from 0. Ports: host: its plane; T0: hosts first, then uplinks; T1: its T0s.
Limits: 8 planes, 2048 switches of a tier in a plane, 2048 hosts below a T0 (what a uSID of net.srv6 can name).
Errors: TopologyError.
Source: arXiv 2605.04333 sections 2 and 2.3 (EV = NIC port and T0 uplink); the sizes of section 2
are closed forms here.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from net.errors import TopologyError

PLANES_MAX = 8
INDEX_MAX = 2048
UPLINK_BITS = 16
"""An EV is plane << 16 | uplink: on the wire the flow label then shows the plane, the UDP source port the uplink."""


def plane_of(ev: int) -> int:
    """The plane that an EV names."""
    return ev >> UPLINK_BITS


def uplink_of(ev: int) -> int:
    """The T0 uplink that an EV names."""
    return ev & (1 << UPLINK_BITS) - 1


class Tier(enum.Enum):
    """What a node is."""

    HOST = "host"
    T0 = "t0"
    T1 = "t1"


class Node(NamedTuple):
    """A host (plane 0: hosts belong to all planes) or a switch, by number."""

    tier: Tier
    plane: int
    number: int

    @property
    def name(self) -> str:
        """``h5``, ``p1-t0-3``, ``p1-t1-0``; at most 11 characters, so a prefix and a port fit an interface name."""
        return f"h{self.number}" if self.tier is Tier.HOST else f"p{self.plane}-{self.tier.value}-{self.number}"


class Port(NamedTuple):
    """One end of a link."""

    node: Node
    number: int


class Link(NamedTuple):
    """Two ports and the rate of each direction in bits per second; ``lower`` is the end nearer to the hosts."""

    plane: int
    lower: Port
    upper: Port
    rate_bps: int

    @property
    def name(self) -> str:
        """``h5:p0-t0-1``, ``p0-t0-1:p0-t1-0``: unique in the fabric."""
        above = self.upper.node.name
        return f"{self.lower.node.name}:{above}"


class Path(NamedTuple):
    """The way from ``src`` to ``dst``: its plane and, unless both are below one T0, its T1."""

    src: int
    dst: int
    plane: int
    t1: int | None


@dataclass(frozen=True, slots=True)
class Topology:
    """A fabric.

    planes, t0_per_plane, t1_per_plane, hosts_per_t0: counts, at least 1.
    host_rate_bps, uplink_rate_bps: line rate of a host port and of a T0-T1 link, bits per second.
    """

    planes: int
    t0_per_plane: int
    t1_per_plane: int
    hosts_per_t0: int
    host_rate_bps: int = 100_000_000_000
    uplink_rate_bps: int = 100_000_000_000

    def __post_init__(self) -> None:
        for name, limit in (
            ("planes", PLANES_MAX),
            ("t0_per_plane", INDEX_MAX),
            ("t1_per_plane", INDEX_MAX),
            ("hosts_per_t0", INDEX_MAX),
        ):
            if not 1 <= getattr(self, name) <= limit:
                raise TopologyError(f"{name} is {getattr(self, name)}", f"give 1 to {limit}")
        for name in ("host_rate_bps", "uplink_rate_bps"):
            if getattr(self, name) <= 0:
                raise TopologyError(f"{name} is {getattr(self, name)}", "give bits per second, above 0")

    # What there is.

    @property
    def hosts(self) -> int:
        """Hosts (NICs)."""
        return self.t0_per_plane * self.hosts_per_t0

    @property
    def switches(self) -> int:
        """Switches of all planes."""
        return self.planes * (self.t0_per_plane + self.t1_per_plane)

    @property
    def link_count(self) -> int:
        """Links of all planes, host links included."""
        return self.planes * (self.hosts + self.t0_per_plane * self.t1_per_plane)

    @property
    def size(self) -> str:
        """For a reader: ``2 planes x (2 T0 + 2 T1), 4 hosts``."""
        planes, hosts = f"plane{'s' * (self.planes != 1)}", f"host{'s' * (self.hosts != 1)}"
        return f"{self.planes} {planes} x ({self.t0_per_plane} T0 + {self.t1_per_plane} T1), {self.hosts} {hosts}"

    def nodes(self) -> Iterator[Node]:
        """Hosts, then plane by plane T0 and T1."""
        yield from (Node(Tier.HOST, 0, index) for index in range(self.hosts))
        for plane in range(self.planes):
            yield from (Node(Tier.T0, plane, index) for index in range(self.t0_per_plane))
            yield from (Node(Tier.T1, plane, index) for index in range(self.t1_per_plane))

    def links(self) -> Iterator[Link]:
        """Plane by plane: host links by host, then T0-T1 links by T0."""
        for plane in range(self.planes):
            yield from (self.host_link(plane, host) for host in range(self.hosts))
            for t0 in range(self.t0_per_plane):
                yield from (self.uplink(plane, t0, t1) for t1 in range(self.t1_per_plane))

    def host_link(self, plane: int, host: int) -> Link:
        """The link of ``host`` in ``plane``."""
        t0, downlink = self.place(host)
        lower = Port(Node(Tier.HOST, 0, host), plane)
        return Link(plane, lower, Port(Node(Tier.T0, plane, t0), downlink), self.host_rate_bps)

    def uplink(self, plane: int, t0: int, t1: int) -> Link:
        """The link between two switches of ``plane``."""
        lower = Port(Node(Tier.T0, plane, t0), self.hosts_per_t0 + t1)
        return Link(plane, lower, Port(Node(Tier.T1, plane, t1), t0), self.uplink_rate_bps)

    def place(self, host: int) -> tuple[int, int]:
        """``host`` -> (its T0's index in every plane, downlink number there)."""
        if not 0 <= host < self.hosts:
            raise TopologyError(f"there is no host {host}", f"hosts are 0 to {self.hosts - 1}")
        return divmod(host, self.hosts_per_t0)

    # Entropy values and paths.

    def evs(self, src: int, dst: int) -> list[int]:
        """The EVs that name distinct paths from ``src`` to ``dst``: planes x uplinks, or planes below one T0."""
        local = self.place(src)[0] == self.place(dst)[0]
        uplinks = 1 if local else self.t1_per_plane
        return [plane << UPLINK_BITS | uplink for plane in range(self.planes) for uplink in range(uplinks)]

    def path(self, src: int, dst: int, ev: int) -> Path:
        """The path that ``ev`` names. Below one T0 the uplink bits are ignored."""
        plane, uplink = plane_of(ev), uplink_of(ev)
        if not (0 <= plane < self.planes and uplink < self.t1_per_plane):
            raise TopologyError(
                f"entropy value {ev:#x} names plane {plane}, uplink {uplink}",
                f"there are {self.planes} planes with {self.t1_per_plane} uplinks",
            )
        local = self.place(src)[0] == self.place(dst)[0]
        return Path(src, dst, plane, None if local else uplink)

    def ev(self, path: Path) -> int:
        """The EV of a path; the lowest where several name it."""
        ev = path.plane << UPLINK_BITS | (path.t1 or 0)
        if self.path(path.src, path.dst, ev) != path:
            raise TopologyError(f"{path} is no path here", "take paths from Topology.path")
        return ev

    def path_nodes(self, path: Path) -> list[Node]:
        """Every node from host to host."""
        t0_src, t0_dst = self.place(path.src)[0], self.place(path.dst)[0]
        switches = [Node(Tier.T0, path.plane, t0_src)]
        if path.t1 is not None:
            switches += [Node(Tier.T1, path.plane, path.t1), Node(Tier.T0, path.plane, t0_dst)]
        return [Node(Tier.HOST, 0, path.src), *switches, Node(Tier.HOST, 0, path.dst)]

    def path_ports(self, path: Path) -> list[Port]:
        """The port by which each node but the last sends: where a packet queues, in order."""
        (t0_src, _), (t0_dst, downlink) = self.place(path.src), self.place(path.dst)
        ports = [Port(Node(Tier.HOST, 0, path.src), path.plane)]
        if path.t1 is not None:
            ports.append(Port(Node(Tier.T0, path.plane, t0_src), self.hosts_per_t0 + path.t1))
            ports.append(Port(Node(Tier.T1, path.plane, path.t1), t0_dst))
        return [*ports, Port(Node(Tier.T0, path.plane, t0_dst), downlink)]


def clos(
    planes: int, radix: int, *, host_rate_bps: int = 100_000_000_000, uplink_rate_bps: int = 100_000_000_000
) -> Topology:
    """The largest non-blocking fabric of switches with ``radix`` ports: half of a T0's ports face hosts."""
    if radix < 2 or radix % 2:
        raise TopologyError(f"radix is {radix}", "give an even number of ports")
    return Topology(planes, radix, radix // 2, radix // 2, host_rate_bps, uplink_rate_bps)


class Arithmetic(NamedTuple):
    """The closed forms that a fabric design is compared by.

    links_per_host: links per unit of host bandwidth, which is what optics cost; switches_per_host: switches of equal
    capacity; path_switches_max: switches on the longest shortest path; one_switch_hosts: hosts below one switch.
    uplink_share, port_share: the part of a T0's and of a host's capacity that one lost link takes away.
    """

    hosts: int
    switches: int
    switches_per_host: Fraction
    links_per_host: int
    path_switches_max: int
    paths: int
    one_switch_hosts: int
    uplink_share: Fraction
    port_share: Fraction


def multi_plane(planes: int, radix: int) -> Arithmetic:
    """Two tiers, ``planes`` times, of switches with ``radix`` ports (arXiv 2605.04333 section 2)."""
    half = radix // 2
    hosts, switches = half * radix, planes * (radix + half)
    return Arithmetic(
        hosts, switches, Fraction(switches, hosts), 2, 3, planes * half, half, Fraction(1, half), Fraction(1, planes)
    )


def single_plane_three_tier(radix: int, host_ports: int = 1) -> Arithmetic:
    """The fabric that it replaces: one plane, three tiers, pods of radix / 2 T0 and T1 switches, radix pods."""
    half = radix // 2
    hosts = half * half * radix
    switches = radix * (half + half) + half * half
    return Arithmetic(
        hosts,
        switches,
        Fraction(switches, hosts),
        3,
        5,
        half * half,
        half,
        Fraction(1, half),
        Fraction(1, host_ports),
    )
