"""MRC endpoints on a simulated fabric: data intact, and at what rate, under faults.

Two planes of 2 T0 and 2 T1, four hosts, 10 Gb/s; transfers are a few MiB in packets of 4 KiB, so that a run is short.
The paper's experiments go by their numbers in net.experiments.cases (C12, C22); here they are small.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from net.mrc.endpoint import Kind
from net.mrc.paths import EvState, PathSettings
from net.mrc.requestor import QpSettings, Status
from net.sim.mrc import MrcHost, connect
from net.sim.network import Network, Settings, Stage
from net.switch.model import Cause
from net.topology import Node, Tier, Topology

GBPS = 10**9
PS = 10**12
MIB = 1 << 20
CHUNK = 64 * 1024
FABRIC = Topology(2, 2, 2, 2, 10 * GBPS, 10 * GBPS)
QP = QpSettings(window_bytes=128 * 1024, mpr=4096, timeout_ns=2_000_000, retries=20)
PATHS = PathSettings(active=4, ev_min_active=1, probe_interval_ns=500_000)


class Lab:
    """Hosts that write a seeded stream of ``mib`` MiB to others, in chunks; afterwards every byte is compared."""

    def __init__(
        self,
        pairs: list[tuple[int, int]],
        *,
        fabric: Topology = FABRIC,
        mib: int = 2,
        seed: int = 1,
        settings: Settings | None = None,
        qp: QpSettings = QP,
        paths: PathSettings = PATHS,
        through_wire: bool = False,
    ) -> None:
        self.network = Network(fabric, settings or Settings(), seed)
        self.pairs = pairs
        self.data = {pair: random.Random(f"{seed} {pair}").randbytes(mib * MIB) for pair in pairs}
        inbound = Counter(dst for _, dst in pairs)
        used = sorted({host for pair in pairs for host in pair})
        self.hosts = {
            host: MrcHost(host, self.network, inbound[host] * mib * MIB, through_wire=through_wire) for host in used
        }
        self.places: dict[tuple[int, int], int] = {}
        for src, dst in pairs:
            connect(self.hosts[src], self.hosts[dst], qp, paths, psn=0xFFFF00)
            place = sum(other == dst for _, other in self.places) * mib * MIB
            self.places[src, dst] = place
            for start in range(0, mib * MIB, CHUNK):
                chunk = self.data[src, dst][start : start + CHUNK]
                self.hosts[src].write(self.hosts[dst], chunk, place + start, start // CHUNK)

    def run(self, until_s: float = 1.0) -> None:
        self.network.run(int(until_s * PS))
        for (src, dst), data in self.data.items():
            place = self.places[src, dst]
            assert self.hosts[dst].memory[place : place + len(data)] == data
            assert self.done_bytes(src) == sum(len(self.data[pair]) for pair in self.pairs if pair[0] == src)

    def done_bytes(self, host: int, since_ps: int = 0, until_ps: int = PS) -> int:
        """Bytes of completed chunks in a span of time."""
        times = [done.time_ps for done in self.hosts[host].completions if done.completion.kind is Kind.WRITE]
        assert all(done.completion.status is Status.OK for done in self.hosts[host].completions)
        return CHUNK * sum(since_ps <= time < until_ps for time in times)

    def finish_ps(self, host: int) -> int:
        return self.hosts[host].completions[-1].time_ps

    def share(self, host: int) -> float:
        """What a host's transfer took of its ports' rate, payload only, from start to end."""
        fabric = self.network.fabric
        rate = self.done_bytes(host) * 8 * PS / self.finish_ps(host)
        return rate / (fabric.host_rate_bps * fabric.planes)

    def counters(self, host: int) -> Counter[str]:
        """Of all queue pairs of a host."""
        total: Counter[str] = Counter()
        for pair in self.hosts[host].endpoint.pairs.values():
            total.update(pair.requestor.counters)
            total.update({f"responder {name}": count for name, count in pair.responder.counters.items()})
        return total

    def state(self, host: int, ev: int) -> EvState | None:
        (pair,) = self.hosts[host].endpoint.pairs.values()
        return pair.requestor.paths.state(ev)


def test_a_clear_fabric_is_filled() -> None:
    """4096 of 4242 bytes are payload: 0.966 of the line at best."""
    lab = Lab([(0, 2)])
    lab.run()
    counters = lab.counters(0)
    assert counters["retransmitted"] == counters["timeouts"] == counters["nacks"] == 0
    assert counters["sent"] == 2 * MIB // 4096
    assert 0.92 < lab.share(0) <= 4096 / 4242


def test_every_message_through_the_codec_is_the_same_run() -> None:
    """Frames, SRv6 addresses, ICRC and real trimming change nothing: the same completions at the same picosecond."""
    runs = []
    for through_wire in (False, True):
        lab = Lab(
            [(0, 3), (1, 3), (2, 3)], mib=1, through_wire=through_wire, settings=Settings(last_hop_trim_bytes=60_000)
        )
        lab.run()
        runs.append([lab.hosts[host].completions for host in (0, 1, 2)])
        assert lab.counters(0)["nacks"] > 0
    assert runs[0] == runs[1]


def test_a_run_repeats_by_its_seed() -> None:
    def finish(seed: int) -> list[int]:
        lab = Lab([(0, 2), (1, 3)], mib=1, seed=seed)
        lab.network.set_link(FABRIC.uplink(0, 0, 0), loss=0.02)
        lab.run()
        return [done.time_ps for host in (0, 1) for done in lab.hosts[host].completions]

    assert finish(1) == finish(1) != finish(2)


def test_incast_trims_are_nacks_are_retransmissions() -> None:
    lab = Lab([(0, 3), (1, 3), (2, 3)], settings=Settings(last_hop_trim_bytes=60_000))
    lab.run()
    total = sum((lab.counters(host) for host in (0, 1, 2)), Counter())
    trims = sum((lab.network.counters(stage) for stage in Stage), Counter())[Cause.TRIM]
    assert trims > 50
    assert trims == total["nacks"] == total["retransmitted"] and total["timeouts"] == total["inferred"] == 0
    assert lab.counters(3)["responder TRIMMED_LASTHOP"] == lab.network.counters(Stage.LAST)[Cause.TRIM]
    together = 3 * 2 * MIB * 8 * PS / max(lab.finish_ps(host) for host in (0, 1, 2)) / (20 * GBPS)
    assert together > 0.85


def test_without_trimming_an_incast_costs_timeouts_or_guesses() -> None:
    """The ablation: the same load, and no trim, no NACK; what is lost must be inferred."""
    settings = Settings(trim_bytes=None, last_hop_trim_bytes=None, limit_bytes=60_000)
    lab = Lab([(0, 3), (1, 3), (2, 3)], settings=settings)
    lab.run()
    total = sum((lab.counters(host) for host in (0, 1, 2)), Counter())
    assert total["nacks"] == 0 and total["inferred"] + total["timeouts"] > 50


@pytest.mark.parametrize("loss", [0.01, 0.05])
def test_loss_everywhere(loss: float) -> None:
    lab = Lab([(0, 2), (3, 1)])
    for link in FABRIC.links():
        lab.network.set_link(link, loss=loss)
    lab.run()
    total = lab.counters(0) + lab.counters(3)
    lost = sum((lab.network.counters(stage) for stage in Stage), Counter())[Cause.LOSS]
    assert lost > 0 and total["retransmitted"] > 0


def test_a_plane_is_cut_and_comes_back() -> None:
    """Cut at a third, healed at two thirds: half the rate between, all of it afterwards, nothing lost for good."""
    lab = Lab([(0, 2)], mib=8)
    cut_ps, heal_ps = 2 * PS // 1000, 7 * PS // 1000
    link = FABRIC.host_link(1, 2)
    lab.network.sim.at(cut_ps, lambda: lab.network.set_link(link, down=True))
    lab.network.sim.at(heal_ps, lambda: lab.network.set_link(link, down=False))
    lab.network.run(heal_ps)
    assert {lab.state(0, ev) for ev in (0x10000, 0x10001)} == {EvState.ASSUMED_BAD}
    assert lab.counters(0)["timeouts"] <= QP.window_bytes // 4242
    half = lab.done_bytes(0, cut_ps + 2 * PS // 1000, heal_ps) * 8 * PS / (heal_ps - cut_ps - 2 * PS // 1000)
    assert 0.9 * 10 * GBPS * 0.966 < half < 1.1 * 10 * GBPS
    lab.run()
    assert {lab.state(0, ev) for ev in FABRIC.evs(0, 2)} == {EvState.GOOD}


def test_a_t1_swallows_everything_and_stays_up() -> None:
    lab = Lab([(0, 2), (1, 3)], mib=4)
    dead = Node(Tier.T1, 0, 1)
    lab.network.sim.at(PS // 1000, lambda: lab.network.set_switch(dead, down=True))
    lab.run()
    for host in (0, 1):
        assert [lab.state(host, ev) for ev in (0, 1, 0x10000, 0x10001)].count(EvState.ASSUMED_BAD) == 1
        assert lab.state(host, 1) is EvState.ASSUMED_BAD
        counters = lab.counters(host)
        assert counters["inferred"] + counters["timeouts"] > 0
        # Packets on the dead path fill the window until their timeout; from then on the other plane and T1 do.
        clear_ps = 4 * MIB * 8 * PS // (20 * GBPS * 0.966)
        assert lab.finish_ps(host) < PS // 1000 + QP.timeout_ns * 1100 + clear_ps * 4 / 3


@pytest.mark.parametrize("loss", [0.2, 0.05])
def test_a_lossy_path_is_left_for_a_backup(loss: float) -> None:
    """C12, small: 16 paths, half of them active, one drops packets: out at once, a backup of its plane in."""
    fabric = Topology(2, 2, 8, 2, 10 * GBPS, 10 * GBPS)
    paths = PathSettings(active=8, ev_min_active=4, probe_interval_ns=50_000_000)
    lab = Lab([(0, 2)], fabric=fabric, mib=8, paths=paths)
    (pair,) = lab.hosts[0].endpoint.pairs.values()
    ev = pair.requestor.paths.active[0]
    lab.network.set_link(fabric.uplink(ev >> 16, 0, ev & 0xFFFF), loss=loss)
    lab.run(0.04)
    active = pair.requestor.paths.active
    assert pair.requestor.paths.state(ev) is EvState.ASSUMED_BAD and ev not in active
    assert Counter(one >> 16 for one in active) == {0: 4, 1: 4}
    assert lab.counters(0)["retransmitted"] <= 3 + QP.window_bytes // 4242 // 8
    assert lab.share(0) > 0.85


def test_a_permutation_shares_evenly() -> None:
    """C22, small: eight hosts to eight others, all uplinks full: no flow below 0.95 of the best one."""
    fabric = Topology(2, 2, 8, 8, 10 * GBPS, 10 * GBPS)
    lab = Lab([(n, 8 + n) for n in range(8)], fabric=fabric, mib=1, paths=PathSettings(active=16, ev_min_active=4))
    lab.run()
    shares = [lab.share(n) for n in range(8)]
    assert min(shares) > 0.95 * max(shares) and min(shares) > 0.75


def test_marks_turn_packets_away_from_a_slow_path() -> None:
    """One T0-T1 link at a fifth of its rate: ECN makes its EV lose turns, so that it carries less."""
    lab = Lab([(0, 2)], mib=8, settings=Settings(ecn_bytes=15_000))
    link = FABRIC.uplink(0, 0, 0)
    lab.network.port(link.lower).change_rate(0, 2 * GBPS)
    lab.run()
    counts = [lab.network.port(FABRIC.uplink(plane, 0, t1).lower).packets for plane in (0, 1) for t1 in (0, 1)]
    carried = [count[Cause.DATA] + count[Cause.ECN] for count in counts]
    assert carried[0] < 0.75 * sum(carried[1:]) / 3
    assert lab.counters(0)["marks"] > 10
