"""A fabric of queue models, links with delay, and hosts with engines, under a virtual clock.

Every port on a packet's way is a net.switch.model.PortQueue; behind it the packet spends the link's delay. A host
runs an engine without I/O and clock: ``step(now, received) -> what to send, when to be called again``.

Use: ``network = Network(fabric, Settings(), seed=1)``; ``network.attach(host, engine)``; ``network.run()``;
``network.counters(Stage.LAST)``; ``network.depths[Stage.UP]``.
Limits: packets are forwarded whole (no cut-through); what net.switch.model says of departures.
Errors: SimError, TopologyError. Source: queue settings as in net.switch.model.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

from net.errors import SimError
from net.sim.core import Simulator
from net.switch.model import Action, Cause, PortQueue, QueueConfig
from net.topology import Link, Node, Port, Tier, Topology


class Stage(enum.Enum):
    """Where on its way a packet queues."""

    HOST = "host"
    UP = "T0 to T1"
    DOWN = "T1 to T0"
    LAST = "T0 to host"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a fabric's ports have in common.

    delay_ps: of a link and the switch behind it. packet_bytes: the full-size packet, for base_rtt_ps and histograms.
    ecn_bytes, trim_bytes, last_hop_trim_bytes, limit_bytes, trim_size_bytes: see QueueConfig; never ECN on last hops.
    host_limit_bytes: of a host's own port, which neither marks nor trims.
    jitter_ps: up to so long, at random, a host takes to answer (what it sends in the priority class). Without it,
    hosts whose packets keep the same order at a full queue lose again and again, or never (Floyd and Jacobson, On
    Traffic Phase Effects in Packet-Switched Gateways, 1992).
    """

    delay_ps: int = 1_000_000
    packet_bytes: int = 4242
    ecn_bytes: int | None = 50_000
    trim_bytes: int | None = 200_000
    last_hop_trim_bytes: int | None = 300_000
    limit_bytes: int = 2_000_000
    trim_size_bytes: int = 128
    host_limit_bytes: int = 1 << 40
    jitter_ps: int = 0


class Packet:
    """A packet on its way. ``content`` is the engine's and is not looked at; a trimmed packet keeps it."""

    __slots__ = (
        "ce",
        "content",
        "dst",
        "ect",
        "ev",
        "hop",
        "last_hop",
        "priority",
        "size_bytes",
        "src",
        "trimmable",
        "trimmed",
    )

    def __init__(
        self,
        src: int,
        dst: int,
        ev: int,
        size_bytes: int,
        content: Any = None,
        *,
        ect: bool = True,
        priority: bool = False,
        trimmable: bool = True,
    ) -> None:
        self.src = src
        self.dst = dst
        self.ev = ev
        self.size_bytes = size_bytes
        self.content = content
        self.ect = ect
        self.priority = priority
        self.trimmable = trimmable
        self.ce = False
        self.trimmed = False
        self.last_hop = False  # trimmed by the port to the host
        self.hop = 0


class Step(NamedTuple):
    """What an engine wants: packets to send now, and when to be called even if nothing arrives (None: not)."""

    send: Sequence[Packet] = ()
    wake_ps: int | None = None


class Engine(Protocol):
    """A host's protocol or traffic, without I/O and clock."""

    def step(self, now_ps: int, received: Sequence[Packet]) -> Step:
        """Called at the start, on every arrival, and at the time asked for."""
        ...


class Network:
    """A fabric that runs. ``depths`` counts, per stage, the packets that a data packet found before it."""

    def __init__(self, fabric: Topology, settings: Settings | None = None, seed: int = 0) -> None:
        self.fabric = fabric
        self.settings = settings or Settings()
        self.seed = seed
        self.sim = Simulator()
        self.depths: dict[Stage, Counter[int]] = {stage: Counter() for stage in Stage}
        self._ports: dict[Port, PortQueue] = {}
        self._stages: dict[PortQueue, Stage] = {}
        self._routes: dict[tuple[int, int, int], tuple[PortQueue, ...]] = {}
        self._engines: dict[int, Engine] = {}
        self._wakes: dict[int, int] = {}
        self._jitter = self.rng("jitter")
        for link in fabric.links():
            for port in (link.lower, link.upper):
                self._add_port(port, link)

    def rng(self, name: str) -> random.Random:
        """A generator of its own for whoever has a name: one more user changes nobody else's numbers."""
        return random.Random(f"{self.seed} {name}")

    def _add_port(self, port: Port, link: Link) -> None:
        node, settings = port.node, self.settings
        config = QueueConfig(
            link.rate_bps,
            settings.ecn_bytes,
            settings.trim_bytes,
            settings.trim_size_bytes,
            settings.limit_bytes,
        )
        if node.tier is Tier.HOST:
            stage, limit = Stage.HOST, settings.host_limit_bytes
            config = QueueConfig(link.rate_bps, limit_bytes=limit, priority_limit_bytes=limit)
        elif node.tier is Tier.T1:
            stage = Stage.DOWN
        elif port == link.lower:
            stage = Stage.UP
        else:
            stage = Stage.LAST
            config = replace(config, ecn_bytes=None, trim_bytes=settings.last_hop_trim_bytes)
        queue = PortQueue(config, self.rng(f"{node.name} {port.number}"))
        self._ports[port] = queue
        self._stages[queue] = stage

    # What there is.

    def port(self, port: Port) -> PortQueue:
        """The queue of a port."""
        if port not in self._ports:
            raise SimError(f"{port.node.name} has no port {port.number}", "take ports from the fabric's links")
        return self._ports[port]

    def queues(self, stage: Stage) -> Iterator[PortQueue]:
        """Every queue of a stage."""
        return (queue for queue, place in self._stages.items() if place is stage)

    def counters(self, stage: Stage) -> Counter[Cause]:
        """Packets by cause over all ports of a stage."""
        total: Counter[Cause] = Counter()
        for queue in self.queues(stage):
            total.update(queue.packets)
        return total

    def set_link(self, link: Link, *, down: bool | None = None, loss: float | None = None) -> None:
        """Cuts a link or heals it, or loses a share of what it carries; both directions, tables unchanged."""
        for queue in (self.port(link.lower), self.port(link.upper)):
            queue.down = queue.down if down is None else down
            queue.loss = queue.loss if loss is None else loss

    def set_switch(self, node: Node, *, down: bool) -> None:
        """A switch that forwards nothing while its links stay up: everything it would send is lost."""
        for port, queue in self._ports.items():
            if port.node == node:
                queue.down = down

    def base_rtt_ps(self) -> int:
        """The longest path there with a full packet and back with a trimmed one, all queues empty."""
        route = self._route(0, self.fabric.hosts - 1, 0)
        sizes = (self.settings.packet_bytes, self.settings.trim_size_bytes)
        return sum(queue.transmit_ps(size) + self.settings.delay_ps for queue in route for size in sizes)

    # Running.

    def attach(self, host: int, engine: Engine) -> None:
        """Gives a host its engine; its first step comes when the clock runs."""
        self.fabric.place(host)
        if host in self._engines:
            raise SimError(f"host {host} has an engine", "attach one per host")
        self._engines[host] = engine
        self.sim.at(self.sim.now_ps, self._step, host, ())

    def nudge(self, host: int) -> None:
        """Has a host's engine stepped now, because it was given something to do."""
        if host not in self._engines:
            raise SimError(f"host {host} has no engine", "attach one")
        self.sim.at(self.sim.now_ps, self._step, host, ())

    def run(self, until_ps: int | None = None) -> None:
        """See Simulator.run."""
        self.sim.run(until_ps)

    def _step(self, host: int, received: Sequence[Packet]) -> None:
        step = self._engines[host].step(self.sim.now_ps, received)
        for packet in step.send:
            if packet.priority and self.settings.jitter_ps:
                at_ps = self.sim.now_ps + self._jitter.randrange(self.settings.jitter_ps)
                self.sim.at(at_ps, self._forward, packet)
            else:
                self._forward(packet)
        if step.wake_ps is None:
            self._wakes.pop(host, None)
        elif self._wakes.get(host) != step.wake_ps:
            wake_ps = max(step.wake_ps, self.sim.now_ps)
            self._wakes[host] = wake_ps
            self.sim.at(wake_ps, self._wake, host, wake_ps)

    def _wake(self, host: int, wake_ps: int) -> None:
        if self._wakes.get(host) == wake_ps:  # else the engine has changed its mind since
            del self._wakes[host]
            self._step(host, ())

    def _route(self, src: int, dst: int, ev: int) -> tuple[PortQueue, ...]:
        key = (src, dst, ev)
        route = self._routes.get(key)
        if route is None:
            ports = self.fabric.path_ports(self.fabric.path(src, dst, ev))
            route = self._routes[key] = tuple(self._ports[port] for port in ports)
        return route

    def _forward(self, packet: Packet) -> None:
        """The packet is at the port of its hop; after the last one, at its host."""
        route = self._route(packet.src, packet.dst, packet.ev)
        if packet.hop == len(route):
            if packet.dst in self._engines:
                self._step(packet.dst, (packet,))
            return
        queue, now_ps = route[packet.hop], self.sim.now_ps
        if not packet.priority:
            depth = -(-queue.backlog_bytes(now_ps) // self.settings.packet_bytes)
            self.depths[self._stages[queue]][depth] += 1
        verdict = queue.offer(
            now_ps, packet.size_bytes, ect=packet.ect, priority=packet.priority, trimmable=packet.trimmable
        )
        if verdict.departure_ps is None:
            return
        packet.hop += 1
        if verdict.action is Action.MARK:
            packet.ce = True
        elif verdict.action is Action.TRIM:
            packet.trimmed = packet.priority = True
            packet.last_hop = packet.hop == len(route)
            packet.size_bytes = verdict.size_bytes
        self.sim.at(verdict.departure_ps + self.settings.delay_ps, self._forward, packet)


def percentile(histogram: Counter[int], share: float) -> int:
    """The smallest value that at least ``share`` of the counted are at or below."""
    left = share * histogram.total()
    for value in sorted(histogram):
        left -= histogram[value]
        if left <= 0:
            return value
    raise SimError("an empty histogram has no percentile", "run some traffic first")
