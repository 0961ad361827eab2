"""An MRC endpoint as a host of the simulator.

Use: ``host = MrcHost(0, network)``; ``connect(host, other)``; ``host.write(other, data, va=0)``;
``network.run(until_ps)``; ``host.completions``. Messages travel as they are; ``through_wire=True`` sends every one
through the codec, as bytes, and has trimmed ones cut by it.
Limits: see net.mrc.endpoint. Errors: MrcError, SimError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from net.mrc.datagram import Addressing, Datagram
from net.mrc.endpoint import Completion, Endpoint
from net.mrc.frame import Message, trim
from net.mrc.paths import PathSettings
from net.mrc.ports import Ports
from net.mrc.requestor import Identity, QpSettings
from net.mrc.wire import Meth, Tseth
from net.sim.network import Network, Packet, Step
from net.srv6 import Plan
from net.topology import Topology, plane_of

PS_PER_NS = 1000


@dataclass(frozen=True, slots=True)
class Done:
    """A completion and when it came."""

    time_ps: int
    completion: Completion


class MrcHost:
    """A host with one endpoint and one region of memory, of ``memory_bytes`` from address 0 on."""

    def __init__(
        self,
        host: int,
        network: Network,
        memory_bytes: int = 0,
        *,
        through_wire: bool = False,
        baseline: bool = False,
    ) -> None:
        self.host = host
        self.fabric = network.fabric
        self.network = network
        self.memory = bytearray(memory_bytes)
        ports = Ports(network.fabric.host_rate_bps, network.settings.packet_bytes)
        self.endpoint = Endpoint(network.rng(f"endpoint {host}"), baseline=baseline, ports=ports)
        self.key = self.endpoint.register(self.memory, 0)
        self.completions: list[Done] = []
        self.on_completion: Callable[[Completion], None] | None = None
        """Called for each completion as it comes; what it posts goes out at the same time."""
        self._wire = Addressing(Plan(network.fabric), host) if through_wire else None
        network.attach(host, self)

    def step(self, now_ps: int, received: Sequence[Packet]) -> Step:
        """See net.sim.network.Engine."""
        output = self.endpoint.step(now_ps // PS_PER_NS, map(self._arrived, received))
        self.completions += [Done(now_ps, completion) for completion in output.completions]
        if self.on_completion is not None:
            for completion in output.completions:
                self.on_completion(completion)
        wake_ps = None if output.wake_ns is None else output.wake_ns * PS_PER_NS
        return Step(list(map(self._leaving, output.send)), wake_ps)

    def _leaving(self, datagram: Datagram) -> Packet:
        content = datagram if self._wire is None else self._wire.encode(datagram)
        return Packet(
            self.host,
            datagram.peer,
            datagram.entropy,
            datagram.wire_bytes(),
            content,
            ect=not datagram.is_control,
            priority=datagram.is_control,
            trimmable=datagram.is_data and not self.endpoint.baseline,
        )

    def _arrived(self, packet: Packet) -> Datagram:
        if self._wire is not None:
            return self._from_wire(self._wire, packet)
        message = packet.content.message
        if packet.trimmed:
            message = Message(
                message.bth, tuple(header for header in message.headers if type(header) in (Meth, Tseth))
            )
        return Datagram(packet.src, packet.ev, message, packet.ce, packet.trimmed, packet.last_hop)

    @staticmethod
    def _from_wire(wire: Addressing, packet: Packet) -> Datagram:
        data: bytes = packet.content
        if packet.trimmed:
            data = trim(data, wire.dscp.trimmed_lasthop if packet.last_hop else wire.dscp.trimmed)
        return wire.decode(data)._replace(ce=packet.ce)

    def write(
        self,
        other: MrcHost,
        data: bytes,
        va: int,
        request_id: int = 0,
        immediate: int | None = None,
        *,
        lane: int = 0,
    ) -> None:
        """Posts a write into the other's memory; it goes out when the clock runs on."""
        self.endpoint.write(qpn(other.host, lane), request_id, data, va, other.key, immediate)
        self.network.nudge(self.host)


def qpn(peer: int, lane: int) -> int:
    """The number of a host's queue pair with ``peer``; ``lane`` counts those of the same two hosts."""
    return 0x100 + (lane << 16) + peer


class Connected(Protocol):
    """A host, simulated or live."""

    host: int
    fabric: Topology
    endpoint: Endpoint


def connect(
    one: Connected,
    other: Connected,
    settings: QpSettings | None = None,
    paths: PathSettings | None = None,
    psn: int = 0,
    *,
    evs: Sequence[int] | None = None,
    lane: int = 0,
) -> None:
    """A queue pair between two hosts, over all their paths or those that ``evs`` name."""
    for here, there in ((one, other), (other, one)):
        identity = Identity(qpn(there.host, lane), there.host, qpn(here.host, lane), psn, psn)
        mine = here.fabric.evs(here.host, there.host) if evs is None else evs
        here.endpoint.connect(identity, mine, plane_of, settings, paths)
