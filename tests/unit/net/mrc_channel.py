"""Two MRC endpoints and a channel between them that does with each packet what a test says, under a virtual clock.

Every packet crosses as bytes: frame, SRv6 addresses, ICRC, trimming and all.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator

from net.mrc.datagram import Addressing, Datagram
from net.mrc.endpoint import Completion, Endpoint, Kind
from net.mrc.frame import DSCP, encode_frame, trim
from net.mrc.paths import PathSettings
from net.mrc.requestor import Identity, QpSettings
from net.srv6 import Plan
from net.topology import Topology, plane_of

FABRIC = Topology(planes=2, t0_per_plane=2, t1_per_plane=2, hosts_per_t0=2)
HOSTS = (0, 3)
QPNS = {0: 0x000111, 3: 0xABCDEF}
DELAY_NS = 10_000
LATE_NS = 170_000
CANARY = b"\xc5" * 64
ACTIONS = ("pass", "lose", "late", "twice", "trim", "trim last hop", "mark")

Fate = Callable[[Datagram], str]


class Channel:
    """``fate`` says for each datagram what happens to it; ``sent`` keeps them all, ``completions`` by host."""

    def __init__(
        self,
        fate: Fate,
        settings: QpSettings,
        *,
        psn: int = 0,
        memory_bytes: int = 4096,
        baseline: bool = False,
        **paths: int,
    ) -> None:
        self.fate = fate
        self.now_ns = 0
        self.sent: list[Datagram] = []
        self.fates: Counter[str] = Counter()
        self.completions: dict[int, list[Completion]] = {host: [] for host in HOSTS}
        self.endpoints: dict[int, Endpoint] = {}
        self.memory = {host: bytearray(CANARY + bytes(memory_bytes) + CANARY) for host in HOSTS}
        self.keys: dict[int, int] = {}
        self.ports_down: frozenset[int] = frozenset()
        self._wires = {host: Addressing(Plan(FABRIC), host) for host in HOSTS}
        self._wakes: dict[int, int | None] = dict.fromkeys(HOSTS, 0)
        self._flying: list[tuple[int, int, int, bytes]] = []
        for host, peer in (HOSTS, HOSTS[::-1]):
            endpoint = self.endpoints[host] = Endpoint(random.Random(host), baseline=baseline)
            inside = memoryview(self.memory[host])[len(CANARY) : -len(CANARY)]
            self.keys[host] = endpoint.register(inside, va=0x10000)
            identity = Identity(QPNS[host], peer, QPNS[peer], psn, psn)
            endpoint.connect(identity, FABRIC.evs(host, peer), plane_of, settings, PathSettings(**paths))

    def write(self, host: int, request_id: int, data: bytes, offset: int, immediate: int | None = None) -> None:
        """``host`` writes at ``offset`` of its peer's memory."""
        peer = HOSTS[host == HOSTS[0]]
        self.endpoints[host].write(QPNS[host], request_id, data, 0x10000 + offset, self.keys[peer], immediate)
        self._wakes[host] = self.now_ns

    def turn_port(self, host: int, plane: int, *, up: bool) -> None:
        """``host`` sees its port in ``plane`` go down or up; what flies there is for the fate to say."""
        self.ports_down = self.ports_down - {host} if up else self.ports_down | {host}
        self.endpoints[host].set_port(plane, up=up)
        self._wakes[host] = self.now_ns

    def inside(self, host: int) -> bytes:
        """The registered part of a host's memory, once the canaries around it were seen alive."""
        memory = bytes(self.memory[host])
        assert memory[:64] == CANARY == memory[-64:]
        return memory[64:-64]

    def deliver(self, host: int, datagrams: list[Datagram]) -> None:
        """A step of ``host``, now."""
        output = self.endpoints[host].step(self.now_ns, datagrams)
        self._wakes[host] = output.wake_ns
        self.completions[host] += output.completions
        for datagram in output.send:
            self.sent.append(datagram)
            for delay_ns, data in self._copies(host, datagram):
                heapq.heappush(self._flying, (self.now_ns + delay_ns, len(self.sent), datagram.peer, data))

    def _copies(self, host: int, datagram: Datagram) -> Iterator[tuple[int, bytes]]:
        fate = self.fate(datagram)
        wire = self._wires[host]
        if (fate.startswith("trim") and not datagram.is_data) or (fate == "mark" and datagram.is_control):
            fate = "pass"
        self.fates[fate] += 1
        data = encode_frame(wire.frame(datagram)._replace(ecn=3)) if fate == "mark" else wire.encode(datagram)
        if fate.startswith("trim"):
            yield DELAY_NS // 2, trim(data, DSCP.trimmed if fate == "trim" else DSCP.trimmed_lasthop)
        elif fate == "late":
            yield LATE_NS, data
        elif fate != "lose":
            yield DELAY_NS, data
        if fate == "twice":
            yield LATE_NS, data

    def run(self, until_ns: int = 60_000_000_000) -> None:
        """Until nothing flies and nobody waits, or until the time."""
        while True:
            wakes = [(wake, host) for host, wake in self._wakes.items() if wake is not None]
            at_ns = min([*(wake for wake, _ in wakes), *(entry[0] for entry in self._flying[:1])], default=None)
            if at_ns is None or at_ns > until_ns:
                return
            self.now_ns = max(self.now_ns, at_ns)
            if self._flying and self._flying[0][0] <= self.now_ns:
                _, _, host, data = heapq.heappop(self._flying)
                self.deliver(host, [self._wires[host].decode(memoryview(data))])
            else:
                for wake, host in wakes:
                    if wake <= self.now_ns:
                        self.deliver(host, [])

    def done(self, host: int, kind: Kind = Kind.WRITE) -> list[int]:
        """Values of the completions of a kind, in order."""
        return [completion.value for completion in self.completions[host] if completion.kind is kind]

    def counters(self, host: int) -> tuple[Counter[str], Counter[str]]:
        """Of its requestor and its responder."""
        pair = self.endpoints[host].pairs[QPNS[host]]
        return pair.requestor.counters, pair.responder.counters


def always(_datagram: Datagram) -> str:
    return "pass"


def fates(actions: list[str]) -> Fate:
    """The listed actions one by one, then everything passes."""
    left = iter(actions)
    return lambda _datagram: next(left, "pass")
