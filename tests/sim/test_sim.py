"""The simulator: its clock, queues against closed forms and naive models, spray, incast, faults, repeatability."""

from __future__ import annotations

import functools
import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from net.errors import SimError
from net.sim.core import Simulator
from net.sim.network import Network, Packet, Settings, Stage, Step, percentile
from net.sim.traffic import SPRAYS, Blaster, blast, incast, permutation
from net.switch.model import Cause
from net.topology import Node, Port, Tier, Topology

SIXTY_FOUR = Topology(planes=1, t0_per_plane=8, t1_per_plane=8, hosts_per_t0=8)


@functools.cache
def permuted(spray: str, seed: int = 1) -> tuple[Network, dict[int, Blaster]]:
    """64 hosts, each 200 packets to another at load 0.9, run to the end; tests only look at it."""
    network = Network(SIXTY_FOUR, seed=seed)
    pairs = permutation(64, network.rng("pattern"))
    engines = blast(network, pairs, spray=spray, load=0.9, packets=200)
    network.run()
    return network, engines


# The clock.


def test_events_run_in_time_and_in_the_order_asked_for() -> None:
    sim, seen = Simulator(), list[tuple[int, str]]()

    def note(name: str) -> None:
        seen.append((sim.now_ps, name))
        if name == "b":
            sim.at(sim.now_ps, note, "now")

    for time_ps, name in ((5, "b"), (3, "a"), (5, "c"), (9, "late")):
        sim.at(time_ps, note, name)
    sim.run(until_ps=7)
    assert seen == [(3, "a"), (5, "b"), (5, "c"), (5, "now")] and sim.now_ps == 7
    with pytest.raises(SimError, match="events lie ahead"):
        sim.at(6, note, "past")
    sim.run()
    assert seen[-1] == (9, "late") and sim.events == 5


# Delay.


@dataclass
class Echo:
    """Sends one full packet at 0 if it has a peer; answers every full packet with a header; notes arrivals."""

    host: int
    peer: int | None = None
    arrivals: list[int] = field(default_factory=list)

    def step(self, now_ps: int, received: Sequence[Packet]) -> Step:
        self.arrivals += [now_ps] * len(received)
        send = [Packet(self.host, p.src, p.ev, 128, priority=True) for p in received if not p.priority]
        if self.peer is not None:
            send.append(Packet(self.host, self.peer, 0, 4242))
            self.peer = None
        return Step(send)


@pytest.mark.parametrize("dst", [63, 1])
def test_round_trip_of_an_empty_fabric(dst: int) -> None:
    """Per link: 1 us + 80 ps per byte. Four links each way, two below one T0."""
    network = Network(SIXTY_FOUR)
    here, there = Echo(0, dst), Echo(dst)
    network.attach(0, here)
    network.attach(dst, there)
    network.run()
    links = 4 if dst == 63 else 2
    assert there.arrivals == [links * (1_000_000 + 4242 * 80)]
    assert here.arrivals == [links * (2_000_000 + (4242 + 128) * 80)]
    if dst == 63:
        assert here.arrivals == [network.base_rtt_ps()]


@dataclass
class Sleeper:
    """Asks for the next of some times on every step; notes when it was called."""

    wishes: list[int]
    calls: list[int] = field(default_factory=list)

    def step(self, now_ps: int, received: Sequence[Packet]) -> Step:
        self.calls.append(now_ps)
        return Step((), self.wishes.pop(0) if self.wishes else None)


def test_an_engine_is_woken_once_at_the_time_it_asked_for_last() -> None:
    network = Network(SIXTY_FOUR)
    sleeper = Sleeper([50_000_000, 9_000_000, 10_000_000, 3])
    network.attach(63, sleeper)
    network.attach(0, Echo(0, 63))  # its packet changes the first wish
    network.run()
    arrival = 4 * (1_000_000 + 4242 * 80)
    assert sleeper.calls == [0, arrival, 9_000_000, 10_000_000, 10_000_000]  # a wish in the past is now


# Spray.


def flows_per_link(network: Network) -> Counter[Port]:
    """How many flows cross each port on their one path, counted from the paths alone."""
    fabric, pairs = network.fabric, permutation(64, network.rng("pattern"))
    evs = [next(SPRAYS["single path"](fabric.evs(*pair), network.rng(f"flow {n}"))) for n, pair in enumerate(pairs)]
    return Counter(port for pair, ev in zip(pairs, evs) for port in fabric.path_ports(fabric.path(*pair, ev)))


def test_balanced_spray_against_one_path() -> None:
    """64 hosts at load 0.9: in turn over all paths no queue builds, at random short ones do, one path collides."""
    turn, engines = permuted("round robin")
    assert sum(engine.received for engine in engines.values()) == 64 * 200
    assert turn.counters(Stage.UP)[Cause.TRIM] == turn.counters(Stage.DOWN)[Cause.TRIM] == 0
    assert percentile(turn.depths[Stage.UP], 0.99) <= 6
    chance, engines = permuted("random")
    assert sum(engine.received for engine in engines.values()) == 64 * 200
    assert percentile(turn.depths[Stage.UP], 0.99) < percentile(chance.depths[Stage.UP], 0.99) <= 25
    _, engines = permuted("single path")
    received = sum(engine.received for engine in engines.values())
    assert received < 0.85 * 64 * 200
    assert received + sum(engine.trimmed for engine in engines.values()) == 64 * 200


@pytest.mark.parametrize("seed", [1, 2])
def test_collisions_of_single_paths_are_those_of_the_paths(seed: int) -> None:
    """Ports that trim are those with two flows or more: 48 packets at 0.8 of a packet each are full after 60."""
    network, engines = permuted("single path", seed)
    crossing = flows_per_link(network)
    fabric = network.fabric
    ups = [(fabric.uplink(0, t0, t1).lower) for t0 in range(8) for t1 in range(8)]
    trimming = {port for port in ups if network.port(port).packets[Cause.TRIM]}
    assert trimming == {port for port in ups if crossing[port] >= 2} != set()
    alone = [
        dst
        for n, (src, dst) in enumerate(permutation(64, network.rng("pattern")))
        if all(
            crossing[port] == 1
            for port in fabric.path_ports(
                fabric.path(src, dst, next(SPRAYS["single path"](fabric.evs(src, dst), network.rng(f"flow {n}"))))
            )
        )
    ]
    assert alone and all(engines[dst].received == 200 for dst in alone)


def test_every_offer_is_counted_once() -> None:
    network, engines = permuted("single path")
    for stage in Stage:
        data = sum(network.counters(stage)[cause] for cause in (Cause.DATA, Cause.ECN, Cause.TRIM, Cause.LIMIT))
        assert data == network.depths[stage].total()
    assert network.counters(Stage.HOST).total() == 64 * 200
    assert network.counters(Stage.LAST)[Cause.ECN] == 0  # never marked by the port to a host
    assert sum(engine.marked for engine in engines.values()) > 0


# Incast.


def incast_by_hand(senders: int, packets: int, trim_bytes: int) -> tuple[int, int]:
    """(accepted, trimmed) by one port that in each packet time serves one full packet and hears all senders."""
    size, backlog, accepted, trimmed = 4242, 0, 0, 0
    for _ in range(packets):
        backlog = max(0, backlog - size)
        for _ in range(senders):
            if backlog > trim_bytes:
                trimmed, backlog = trimmed + 1, backlog + 128
            else:
                accepted, backlog = accepted + 1, backlog + size
    return accepted, trimmed


@pytest.mark.parametrize(("senders", "packets"), [(2, 300), (3, 200), (7, 100)])
def test_incast_trims_what_overflows(senders: int, packets: int) -> None:
    """Senders below different T0s, each by a T1 of its own, so that only the last hop overflows."""
    network = Network(SIXTY_FOUR, seed=3)
    sources = [8 * (n + 1) for n in range(senders)]
    engines = blast(network, incast(sources, 0), spray="round robin", load=1, packets=packets)
    for n, source in enumerate(sources):
        for flow in engines[source].flows:
            flow.evs, flow.start_ps = iter([n] * packets), 0
    network.run()
    accepted, trimmed = incast_by_hand(senders, packets, 300_000)
    assert abs(engines[0].received - accepted) <= 1 and abs(engines[0].trimmed - trimmed) <= 1
    assert engines[0].received + engines[0].trimmed == senders * packets
    last = network.counters(Stage.LAST)
    assert last[Cause.TRIM] == engines[0].trimmed and last[Cause.ECN] == 0
    assert network.counters(Stage.DOWN)[Cause.TRIM] == network.counters(Stage.UP)[Cause.TRIM] == 0


def test_without_trimming_an_incast_drops_instead() -> None:
    settings = Settings(last_hop_trim_bytes=None, trim_bytes=None, limit_bytes=300_000)
    network = Network(SIXTY_FOUR, settings, seed=3)
    engines = blast(network, incast([8, 16, 24], 0), spray="round robin", load=1, packets=200)
    network.run()
    assert engines[0].trimmed == 0
    assert engines[0].received + network.counters(Stage.LAST)[Cause.LIMIT] == 600 > engines[0].received


def test_sprayed_incast_overflows_at_the_last_hop_only() -> None:
    """7:1 over 8 T1s. Headers take their part: goodput (1 - 7 h/S) / (1 - h/S), which is 0.81 of the line."""
    network = Network(SIXTY_FOUR, seed=4)
    engines = blast(network, incast([8 * n for n in range(1, 8)], 0), spray="round robin", load=1, packets=250)
    network.run()
    assert network.counters(Stage.UP)[Cause.TRIM] == network.counters(Stage.DOWN)[Cause.TRIM] == 0
    assert network.counters(Stage.LAST)[Cause.TRIM] == engines[0].trimmed
    assert engines[0].received + engines[0].trimmed == 7 * 250
    steady = 300_000 / 4242  # what is in the queue at the end was let in on top of what left
    assert abs(engines[0].received - steady - 250 * (1 - 7 * 128 / 4242) / (1 - 128 / 4242)) <= 5


# Faults: the shares of net.topology's arithmetic, seen.


def test_share_that_one_lost_uplink_takes() -> None:
    network = Network(SIXTY_FOUR, seed=5)
    network.set_link(SIXTY_FOUR.uplink(0, 0, 3), down=True)
    engines = blast(network, [(n, 8 + n) for n in range(8)], spray="round robin", load=0.5, packets=160)
    network.run()
    assert sum(engine.received for engine in engines.values()) == 8 * 160 * 7 // 8
    assert network.counters(Stage.UP)[Cause.DOWN] == 8 * 160 // 8


def test_share_that_one_lost_host_port_takes() -> None:
    fabric = Topology(planes=4, t0_per_plane=2, t1_per_plane=2, hosts_per_t0=2)
    network = Network(fabric, seed=5)
    network.set_link(fabric.host_link(2, 3), down=True)
    engines = blast(network, [(0, 3)], spray="round robin", load=0.5, packets=80)
    network.run()
    assert engines[3].received == 60 and network.counters(Stage.LAST)[Cause.DOWN] == 20


def test_a_switch_that_forwards_nothing_and_comes_back() -> None:
    network = Network(SIXTY_FOUR, seed=6)
    dead = Node(Tier.T1, 0, 2)
    network.set_switch(dead, down=True)
    engines = blast(network, [(0, 8)], spray="round robin", load=0.5, packets=160)
    half_ps = 80 * engines[0].flows[0].interval_ps
    network.sim.at(int(half_ps), lambda: network.set_switch(dead, down=False))
    network.run()
    assert abs(engines[8].received - (160 - 10)) <= 1
    assert network.counters(Stage.DOWN)[Cause.DOWN] == 160 - engines[8].received


def test_lossy_link() -> None:
    network = Network(SIXTY_FOUR, seed=7)
    network.set_link(SIXTY_FOUR.host_link(0, 8), loss=0.2)
    engines = blast(network, [(0, 8)], spray="random", load=0.5, packets=2000)
    network.run()
    assert abs(engines[8].received - 1600) <= 5 * (2000 * 0.2 * 0.8) ** 0.5
    assert network.counters(Stage.LAST)[Cause.LOSS] == 2000 - engines[8].received


# The same seed, the same run.


@dataclass
class Recorder:
    """Wraps an engine and digests everything it sees."""

    inner: Blaster
    digest: str = ""

    def step(self, now_ps: int, received: Sequence[Packet]) -> Step:
        seen = [(now_ps, p.src, p.ev, p.content, p.ce, p.trimmed, p.size_bytes) for p in received]
        self.digest = hashlib.sha256(f"{self.digest} {now_ps} {seen}".encode()).hexdigest()
        return self.inner.step(now_ps, received)


def digest(seed: int, extra: bool = False) -> list[str]:
    network = Network(SIXTY_FOUR, seed=seed)
    network.set_link(SIXTY_FOUR.uplink(0, 0, 0), loss=0.1)
    sources: list[tuple[int, int]] = permutation(64, network.rng("pattern"))
    engines = blast(network, sources + [(0, 63)] * extra, spray="random", load=0.8, packets=30)
    recorders = [Recorder(engine) for engine in engines.values()]
    for recorder in recorders:
        network._engines[recorder.inner.host] = recorder
    network.run()
    return [recorder.digest for recorder in recorders]


def test_a_run_repeats_by_its_seed() -> None:
    assert digest(11) == digest(11)
    assert digest(11) != digest(12)


def test_one_more_flow_leaves_the_choices_of_the_others_alone() -> None:
    def evs(pairs: list[tuple[int, int]]) -> list[list[int]]:
        engines = blast(Network(SIXTY_FOUR, seed=1), pairs, spray="random", load=1, packets=20)
        return [[next(flow.evs) for _ in range(20)] for flow in engines[0].flows]

    assert evs([(0, 8)]) == evs([(0, 8), (0, 16)])[:1]


# Patterns and mistakes.


def test_permutation_is_one_cycle() -> None:
    for hosts in (2, 3, 64):
        pairs = permutation(hosts, random.Random(hosts))
        following, seen = dict(pairs), [0]
        while (after := following[seen[-1]]) != 0:
            seen.append(after)
        assert sorted(seen) == list(range(hosts)) == sorted(following)


def test_sprays() -> None:
    evs, rng = list(range(8)), random.Random(1)
    counts = {name: Counter(next(it) for _ in range(800)) for name in SPRAYS if (it := SPRAYS[name](evs, rng))}
    assert len(counts["single path"]) == 1
    assert set(counts["round robin"].values()) == {100}
    assert len(counts["random"]) == 8 and len(set(counts["random"].values())) > 1


def test_round_robin_is_fair_to_planes() -> None:
    """A walk per port once put 99 % on one plane: every window of all EVs holds each plane equally often."""
    fabric = Topology(planes=4, t0_per_plane=2, t1_per_plane=3, hosts_per_t0=2)
    it = SPRAYS["round robin"](fabric.evs(0, 3), random.Random(2))
    for _ in range(5):
        window = Counter(fabric.path(0, 3, next(it)).plane for _ in range(12))
        assert set(window.values()) == {3}


def test_percentile() -> None:
    histogram = Counter({0: 90, 5: 9, 7: 1})
    assert [percentile(histogram, share) for share in (0.5, 0.9, 0.91, 0.99, 1.0)] == [0, 0, 5, 5, 7]
    with pytest.raises(SimError, match="run some traffic"):
        percentile(Counter(), 0.5)


def test_mistakes_name_the_fix() -> None:
    network = Network(SIXTY_FOUR)
    with pytest.raises(SimError, match="give one of single path"):
        blast(network, [(0, 1)], spray="none", load=1, packets=1)
    with pytest.raises(SimError, match="above 0"):
        blast(network, [(0, 1)], spray="random", load=0, packets=1)
    with pytest.raises(SimError, match="leave the target out"):
        incast([0, 1], 0)
    with pytest.raises(SimError, match="at least 2"):
        permutation(1, random.Random(0))
    with pytest.raises(SimError, match="no port 99"):
        network.port(Port(Node(Tier.T0, 0, 0), 99))
    network.attach(0, Echo(0))
    with pytest.raises(SimError, match="one per host"):
        network.attach(0, Echo(0))
