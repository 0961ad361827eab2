"""Traffic without a transport: patterns, ways to spray over entropy values, and an engine that sends and counts.

Nothing is acknowledged or sent again here; what a queue drops or trims is counted and gone. A new way to spray is one
function and one row in SPRAYS.

Use: ``pairs = permutation(fabric.hosts, rng)``; ``engines = blast(network, pairs, spray="round robin", load=0.9,
packets=100)``; ``network.run()``; ``engines[dst].received``.
Source: arXiv 2605.04333 sections 2.4 and 5 (patterns).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import cycle, repeat

from net.errors import SimError
from net.sim.network import Network, Packet, Step

Pairs = list[tuple[int, int]]


def permutation(hosts: int, rng: random.Random) -> Pairs:
    """Every host sends to one other and hears from one other: a random cycle."""
    if hosts < 2:
        raise SimError(f"a permutation of {hosts} hosts", "give at least 2")
    order = list(range(hosts))
    rng.shuffle(order)
    return [(src, order[(place + 1) % hosts]) for place, src in enumerate(order)]


def incast(sources: Sequence[int], target: int) -> Pairs:
    """All of them send to one."""
    if target in sources:
        raise SimError(f"host {target} sends to itself", "leave the target out of the sources")
    return [(src, target) for src in sources]


def single_path(evs: Sequence[int], rng: random.Random) -> Iterator[int]:
    """One path, picked once: what a hash of the flow's addresses does."""
    return repeat(rng.choice(evs))


def round_robin(evs: Sequence[int], rng: random.Random) -> Iterator[int]:
    """All of them in turn, in an order of the flow's own, so that flows do not march in step."""
    order = list(evs)
    rng.shuffle(order)
    return cycle(order)


def random_spray(evs: Sequence[int], rng: random.Random) -> Iterator[int]:
    """Each packet anew."""
    while True:
        yield rng.choice(evs)


SPRAYS: dict[str, Callable[[Sequence[int], random.Random], Iterator[int]]] = {
    "single path": single_path,
    "round robin": round_robin,
    "random": random_spray,
}


@dataclass(slots=True)
class Flow:
    """``packets`` of ``size_bytes`` to ``dst``, one each ``interval_ps`` from ``start_ps`` on."""

    dst: int
    packets: int
    size_bytes: int
    interval_ps: Fraction
    evs: Iterator[int]
    start_ps: int = 0
    sent: int = 0

    def due_ps(self) -> int | None:
        """When the next packet goes; None when all have gone. Rounded per packet, so no error adds up."""
        return None if self.sent == self.packets else self.start_ps + int(self.sent * self.interval_ps)


@dataclass(slots=True)
class Blaster:
    """An engine that sends its flows on time, whatever happens, and counts what arrives."""

    host: int
    flows: list[Flow] = field(default_factory=list)
    received: int = 0
    received_bytes: int = 0
    trimmed: int = 0
    marked: int = 0
    last_arrival_ps: int = 0

    def step(self, now_ps: int, received: Sequence[Packet]) -> Step:
        """See net.sim.network.Engine."""
        for packet in received:
            self._count(now_ps, packet)
        send = [packet for flow in self.flows for packet in self._due(flow, now_ps)]
        times = [due for flow in self.flows if (due := flow.due_ps()) is not None]
        return Step(send, min(times, default=None))

    def _count(self, now_ps: int, packet: Packet) -> None:
        if packet.trimmed:
            self.trimmed += 1
        else:
            self.received += 1
            self.received_bytes += packet.size_bytes
            self.last_arrival_ps = now_ps
        self.marked += packet.ce

    def _due(self, flow: Flow, now_ps: int) -> Iterator[Packet]:
        while (due := flow.due_ps()) is not None and due <= now_ps:
            yield Packet(self.host, flow.dst, next(flow.evs), flow.size_bytes, flow.sent)
            flow.sent += 1


def blast(network: Network, pairs: Pairs, *, spray: str, load: float, packets: int) -> dict[int, Blaster]:
    """Attaches a Blaster to every host named in ``pairs``.

    load: share of what all ports of a host carry together, per pair. packets: per pair, of the settings' full size.
    Starts are spread at random over one interval. Returns the engines by host.
    """
    if spray not in SPRAYS:
        raise SimError(f"there is no spray {spray!r}", f"give one of {', '.join(SPRAYS)}")
    if load <= 0:
        raise SimError(f"load is {load}", "give a share of the line rate, above 0")
    fabric, size = network.fabric, network.settings.packet_bytes
    rate_bps = Fraction(load).limit_denominator(10_000) * fabric.host_rate_bps * fabric.planes
    interval_ps = size * 8 * 10**12 / rate_bps
    engines: dict[int, Blaster] = {}
    for number, (src, dst) in enumerate(pairs):
        rng = network.rng(f"flow {number}")
        flow = Flow(dst, packets, size, interval_ps, SPRAYS[spray](fabric.evs(src, dst), rng))
        flow.start_ps = rng.randrange(int(interval_ps) + 1)
        engines.setdefault(src, Blaster(src)).flows.append(flow)
        engines.setdefault(dst, Blaster(dst))
    for host, engine in sorted(engines.items()):
        network.attach(host, engine)
    return engines
