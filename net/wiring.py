"""A topology as Linux namespaces: one per node, a veth pair per link, addresses, neighbours, static /48 routes.

Ports are numbered through the fabric, link by link, the lower end first; port n has interface index
FIRST_IFINDEX + n and a MAC made of n, in whatever namespace it is. A switch's routes are those of net.srv6's plan and
are made once. A host can also be used by ordinary programs: it has one address per plane, and routes that wrap what
goes to another host's address and unwrap what comes.

Use: ``wiring = Wiring(Plan(fabric))``; ``wiring.nodes["h0"]``; ``wiring.close()``.
Limits: MTU 9000. Setting a port down in its own namespace takes its routes away for good; ``set_carrier`` does not.
Errors: NetError, RequestError; nothing is left then.
Source: net.srv6; the kernel's ways with static routes were measured on 6.18.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from ipaddress import IPv6Address, IPv6Network

from net.errors import RequestError
from net.namespaces import Namespace
from net.netlink import Netlink
from net.seg6 import encap, end, end_dt6
from net.srv6 import Action, Plan
from net.switch.settings import MTU_BYTES
from net.topology import Link, Node, Path, Port, Tier, Topology, plane_of

FIRST_IFINDEX = 10
NEIGHBOUR = IPv6Address("fe80::1")
"""What is at the other end of every link, by a static neighbour entry."""

_LOCAL_TABLE = 255
_QUEUE_PACKETS = 10_000
_LOOPBACK = 1


class Cabling:
    """Which port is which: numbers, interfaces and MACs, from the topology alone.

    links: by name. ports: (node, number there) to number in the fabric; port_links: link, by that number.
    """

    def __init__(self, fabric: Topology) -> None:
        self.fabric = fabric
        self.links: dict[str, Link] = {link.name: link for link in fabric.links()}
        self.ports: dict[Port, int] = {}
        self.port_links: list[Link] = []
        for link in self.links.values():
            for port in (link.lower, link.upper):
                self.ports[port] = len(self.port_links)
                self.port_links.append(link)

    def ifindex(self, port: Port) -> int:
        """The interface of a port."""
        return FIRST_IFINDEX + self.ports[port]

    def peer(self, port: Port) -> Port:
        """The port at the other end."""
        link = self.port_links[self.ports[port]]
        return link.upper if port == link.lower else link.lower

    def interface(self, port: Port) -> str:
        """An interface is named after the node at its other end."""
        return self.peer(port).node.name

    def mac(self, port: Port) -> bytes:
        """Locally administered."""
        return b"\x02\0\0" + self.ports[port].to_bytes(3, "big")

    def ethernet(self, port: Port) -> bytes:
        """The Ethernet header of an IPv6 packet that ``port`` sends."""
        return self.mac(self.peer(port)) + self.mac(port) + b"\x86\xdd"

    def node_ports(self, node: Node) -> list[Port]:
        """The ports of a node by their numbers."""
        return sorted((port for port in self.ports if port.node == node), key=lambda port: port.number)


class Wiring(Cabling):
    """A fabric's namespaces. nodes: by name."""

    def __init__(self, plan: Plan, *, forwards: bool = True) -> None:
        """``forwards``: the kernel of a switch forwards; else its frames are for whoever reads them."""
        super().__init__(plan.fabric)
        self.plan = plan
        self.nodes: dict[str, Namespace] = {}
        self._forwards = forwards
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Everything goes with the descriptors."""
        for namespace in self.nodes.values():
            namespace.close()
        self.nodes.clear()

    def pair_path(self, src: int, dst: int, plane: int) -> Path:
        """The path of programs that know no entropy values: one in each plane, spread by pairs of hosts."""
        evs = [ev for ev in self.fabric.evs(src, dst) if plane_of(ev) == plane]
        return self.fabric.path(src, dst, evs[(src + dst) % len(evs)])

    def namespace(self, name: str) -> Namespace:
        """The namespace of a node."""
        if name not in self.nodes:
            raise RequestError(f"there is no node {name}", f"nodes are {', '.join(list(self.nodes)[:6])} ...")
        return self.nodes[name]

    def set_carrier(self, link: Link, up: bool) -> None:
        """What the lower end of ``link`` sees of its cable. The upper end's routes by it are made anew."""
        node = link.upper.node
        netlink = self.nodes[node.name].netlink
        netlink.set_up(self.ifindex(link.upper), up)
        if up and self._forwards:
            self._neighbour(netlink, link.upper)
            self._routes(netlink, node, only=link.upper.number)
        netlink.flush()

    # Making it.

    def _build(self) -> None:
        for node in self.fabric.nodes():
            self.nodes[node.name] = Namespace(node.name, ipv6=self._uses_ipv6(node))
        # From where none of these indices is in use: the kernel looks there first, and would change what it finds.
        with contextlib.closing(Namespace("cables")) as cables:
            for link in self.links.values():
                ends = [
                    (self.interface(port), self.ifindex(port), self.nodes[port.node.name].fd, self.mac(port))
                    for port in (link.lower, link.upper)
                ]
                cables.netlink.veth(ends, MTU_BYTES, _QUEUE_PACKETS)
            cables.netlink.flush()
        by_node: dict[Node, list[Port]] = {}
        for port in self.ports:
            by_node.setdefault(port.node, []).append(port)
        for node in self.fabric.nodes():
            netlink = self.nodes[node.name].netlink
            netlink.set_up(_LOOPBACK)
            for port in by_node[node]:
                netlink.set_up(self.ifindex(port))
                if self._uses_ipv6(node):
                    self._neighbour(netlink, port)
            if node.tier is Tier.HOST:
                self._host(netlink, node)
            elif self._forwards:
                self._routes(netlink, node)
            netlink.flush()
            if node.tier is Tier.HOST:
                for port in by_node[node]:
                    self.nodes[node.name].whole_checksums(self.interface(port))

    def _uses_ipv6(self, node: Node) -> bool:
        return self._forwards or node.tier is Tier.HOST

    def _neighbour(self, netlink: Netlink, port: Port) -> None:
        netlink.neighbour(self.ifindex(port), NEIGHBOUR, self.mac(self.peer(port)))

    def _routes(self, netlink: Netlink, node: Node, only: int | None = None) -> None:
        """The plan's rows; ``only``: those by one port, and its own uSID where that hangs on it."""
        own = self.ifindex(Port(node, 0))  # an End route needs some interface
        for route in self.plan.node_routes(node):
            if route.action is Action.END:
                if only in (None, 0):
                    netlink.route(route.prefix, own, end(("next-csid",)))
            elif only is None or route.port == only:
                assert route.port is not None
                netlink.route(route.prefix, self.ifindex(Port(node, route.port)), via=NEIGHBOUR)

    def _host(self, netlink: Netlink, node: Node) -> None:
        for plane in range(self.fabric.planes):
            index = self.ifindex(Port(node, plane))
            netlink.address(index, self.plan.host_address(node.number, plane))
            for route in self._host_routes(node, plane):
                netlink.route(*route)

    def _host_routes(
        self, node: Node, plane: int
    ) -> Iterator[tuple[IPv6Network, int, list[tuple[str, object]] | None, IPv6Address | None]]:
        fabric, index = self.fabric, self.ifindex(Port(node, plane))
        yield self.plan.node_prefix(node, plane), index, end_dt6(_LOCAL_TABLE), None
        t0 = Node(Tier.T0, plane, fabric.place(node.number)[0])
        yield self.plan.node_prefix(t0), index, None, NEIGHBOUR
        for peer in range(fabric.hosts):
            if peer != node.number:
                carrier = self.plan.carrier(self.pair_path(node.number, peer, plane))
                yield IPv6Network(self.plan.host_address(peer, plane)), index, encap(carrier), NEIGHBOUR
