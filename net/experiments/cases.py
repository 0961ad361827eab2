"""The paper's experiments that a transport can be asked about, one function each, and the rule by which each passes.

A case gets a seed and a Variant and returns what it saw. CASES has them by number, with the paper's statement beside
ours, so that a table can be made of them. Sizes are small (net.experiments.lab says how they scale): where the paper
counts in seconds, ours are milliseconds or base round trips.

To add one: a function and a row in CASES.
Source: arXiv 2605.04333, figures and sections as given in each row; C-numbers and rules are this project's.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from net.experiments.lab import FRAME_BYTES, PORT_BPS, TIMEOUT_NS, Lab, Stream, Variant, jain, together
from net.mrc.paths import EvState
from net.sim.collectives import AllToAll, Collective, RingAllReduce
from net.sim.network import Stage, percentile
from net.switch.model import Cause
from net.topology import Node, Tier, Topology, plane_of


@dataclass(slots=True)
class Outcome:
    """What a run of a case showed: in words, as figures, and whether its rule holds."""

    ours: str
    passed: bool
    figures: dict[str, float] = field(default_factory=dict)


Case = Callable[[int, Variant], Outcome]


class Row(NamedTuple):
    """A case: where it is in the paper, what that says, our rule; whether a run is quick."""

    title: str
    source: str
    paper: str
    rule: str
    run: Case
    quick: bool = False


def two_racks(planes: int = 4, hosts: int = 4, uplinks: int = 4, **rates: int) -> Topology:
    """Two T0s per plane; the first half of the hosts below the one, the second below the other."""
    rates = {"host_rate_bps": PORT_BPS, "uplink_rate_bps": PORT_BPS, **rates}
    return Topology(planes, 2, uplinks, hosts, **rates)


def percent(share: float) -> str:
    """A share for a sentence."""
    return f"{100 * share:.1f} %"


def lows(streams: Sequence[Stream], since_ms: float, until_ms: float, bin_ms: float, floor: float) -> float:
    """Milliseconds in bins in which all streams together have less than ``floor`` of the line."""
    count = int((until_ms - since_ms) / bin_ms)
    starts = [since_ms + n * bin_ms for n in range(count)]
    return bin_ms * sum(together(streams, start, start + bin_ms) < floor for start in starts)


# Faults.


def c4_t1_blackhole(seed: int, variant: Variant) -> Outcome:
    """Three hosts to three others over 2 planes x 4 T1s; one T1 swallows everything from 3 ms to 9 ms."""
    lab = Lab(two_racks(planes=2), variant, seed)
    streams = [stream for n in range(3) for stream in lab.stream(n, 4 + n)]
    dead = Node(Tier.T1, 0, random.Random(seed).randrange(4))
    lab.at(3, lambda: lab.switch(dead, up=False))
    lab.at(9, lambda: lab.switch(dead, up=True))
    lab.run_to(8.9)
    bad = all(lab.states(stream)[dead.number] is EvState.ASSUMED_BAD for stream in streams)
    lab.run_to(14)
    lab.check()
    back = not any(lab.states(stream)[dead.number] is EvState.ASSUMED_BAD for stream in streams)
    before = together(streams, 1, 3)
    dip = lows(streams, 3, 5, 0.1, 0.9 * before)
    after = together(streams, 11, 14) / before
    failed = sum(stream.failed is not None for stream in streams)
    passed = bad and back and failed == 0 and dip <= 8 * TIMEOUT_NS / 1e6 and after >= 0.98
    return Outcome(
        f"dip of {dip:.1f} ms ({dip / lab.base_rtt_ms:.0f} base RTT), afterwards {percent(after)} of before; its EVs "
        f"{'bad' if bad else 'NOT all bad'}, then {'good again' if back else 'NOT back'}; {failed} QPs failed",
        passed,
        {"dip_ms": dip, "after": after, "failed": failed},
    )


def c5_local_and_cross(seed: int, variant: Variant) -> Outcome:
    """4 queue pairs of 64 KiB writes, below one T0 and across T1s."""
    shares = []
    for dst in (1, 4):
        lab = Lab(two_racks(), variant, seed)
        streams = lab.stream(0, dst, lanes=4)
        lab.run_to(5)
        lab.check()
        shares.append(together(streams, 1, 5))
    local, cross = shares
    return Outcome(
        f"{percent(local)} below one T0, {percent(cross)} across T1 (of the payload rate)",
        abs(cross / local - 1) <= 0.03 and cross >= 0.95,
        {"local": local, "cross": cross},
    )


def c6_ports_one_by_one(seed: int, variant: Variant) -> Outcome:
    """T0-local, both ways, 4 queue pairs each; NIC-T0 links of one host go down every 3 ms."""
    lab = variant.lab(two_racks(), seed)
    here, there = lab.stream(0, 1, lanes=4), lab.stream(1, 0, lanes=4)
    order = random.Random(seed).sample(range(4), 3)
    for step, plane in enumerate(order):
        lab.at(3 * (step + 1), lambda plane=plane: lab.port(0, plane, up=False))  # type: ignore[misc]
    lab.run_to(12)
    lab.check()
    shares = [[together(streams, 3 * step + 1, 3 * step + 3) for step in range(4)] for streams in (here, there)]
    expected = [1, 0.75, 0.5, 0.25]
    off = max(abs(share - want) for row in shares for share, want in zip(row, expected))
    gap = max(lows(streams, 3, 12, 0.2, 0.02) for streams in (here, there))
    return Outcome(
        "steps " + ", ".join(percent(share) for share in shares[0]) + f"; {gap:.1f} ms without any progress",
        off <= 0.05 and gap <= 0.4,
        {"off": off, "gap_ms": gap},
    )


def c7_half_of_the_ports(seed: int, variant: Variant) -> Outcome:
    """4 of 8 NIC links down at 3 ms, up at 6 ms."""
    lab = variant.lab(two_racks(planes=8, hosts=2, uplinks=2), seed)
    streams = lab.stream(0, 1, lanes=4)
    planes = random.Random(seed).sample(range(8), 4)

    def turn(up: bool) -> None:
        for plane in planes:
            lab.port(0, plane, up=up)

    lab.at(3, lambda: turn(False))
    lab.at(6, lambda: turn(True))
    lab.run_to(9)
    lab.check()
    before, half, after = (together(streams, start, start + 2) for start in (1, 4, 7))
    return Outcome(
        f"{percent(before)}, then {percent(half)}, a millisecond after the return {percent(after)}",
        before >= 0.95 and abs(half - 0.5) <= 0.05 and after >= 0.95,
        {"before": before, "half": half, "after": after},
    )


def c8_uplinks_off(seed: int, variant: Variant) -> Outcome:
    """4 of the sender's 16 T0-T1 links go, one each 2 ms; sampled every 0.2 ms."""
    lab = Lab(two_racks(hosts=2), variant, seed)
    streams = lab.stream(0, 2, lanes=4)
    links = [(plane, t1) for plane in range(4) for t1 in range(4)]
    for step, (plane, t1) in enumerate(random.Random(seed).sample(links, 4)):
        link = lab.fabric.uplink(plane, 0, t1)
        lab.at(2 + 2 * step, lambda link=link: lab.link(link, up=False))  # type: ignore[misc]
    lab.run_to(10)
    lab.check()
    before, during = together(streams, 1, 2), together(streams, 2, 10)
    worst = min(together(streams, 2 + n / 5, 2.2 + n / 5) for n in range(40))
    return Outcome(
        f"{percent(during / before)} of before in the mean, {percent(worst / before)} in the worst 0.2 ms",
        during / before >= 0.95,
        {"mean": during / before, "worst": worst / before},
    )


def c9_uplinks_flap(seed: int, variant: Variant) -> Outcome:
    """8 of 32 T0-T1 links go down together for 1 ms, at 2 ms and at 7 ms."""
    lab = Lab(two_racks(hosts=2, uplinks=8), variant, seed)
    streams = lab.stream(0, 2, lanes=4)
    chosen = random.Random(seed).sample([(plane, t1) for plane in range(4) for t1 in range(8)], 8)

    def turn(up: bool) -> None:
        for plane, t1 in chosen:
            lab.link(lab.fabric.uplink(plane, 0, t1), up=up)

    for flap in range(2):
        lab.at(2 + 5 * flap, lambda: turn(False))
        lab.at(3 + 5 * flap, lambda: turn(True))
    lab.run_to(12)
    lab.check()
    before, during = together(streams, 1, 2), together(streams, 2, 12)
    return Outcome(f"{percent(during / before)} of before", during / before >= 0.95, {"mean": during / before})


def c10_t0_down(seed: int, variant: Variant) -> Outcome:
    """T0-local; the T0 of one plane of four goes, which the NICs see."""
    lab = Lab(two_racks(), variant, seed)
    streams = lab.stream(0, 1, lanes=4)
    plane = random.Random(seed).randrange(4)

    def die() -> None:
        lab.switch(Node(Tier.T0, plane, 0), up=False)
        for host in (0, 1):
            lab.port(host, plane, up=False)

    lab.at(2, die)
    lab.run_to(6)
    lab.check()
    share = together(streams, 3, 6)
    return Outcome(f"{percent(share)} afterwards", abs(share - 0.75) <= 0.05, {"share": share})


def c11_t1_down(seed: int, variant: Variant) -> Outcome:
    """Cross-T1; one T1 of 8 in one plane of four goes, silently, and comes back."""
    lab = Lab(two_racks(hosts=2, uplinks=8), variant, seed)
    streams = lab.stream(0, 2, lanes=4)
    dead = Node(Tier.T1, random.Random(seed).randrange(4), 3)
    lab.at(2, lambda: lab.switch(dead, up=False))
    lab.at(5, lambda: lab.switch(dead, up=True))
    lab.run_to(8)
    lab.check()
    before, during, after = together(streams, 1, 2), together(streams, 3, 5), together(streams, 6, 8)
    return Outcome(
        f"{percent(during / before)} of before while it is down, {percent(after / before)} when it is back",
        min(during, after) / before >= 0.98,
        {"during": during / before, "after": after / before},
    )


def c12_lossy_ev(seed: int, variant: Variant) -> Outcome:
    """16 paths, two per plane of eight, one of each active; an active one drops 20, 5, 1 % from 2 ms on."""
    words, figures, passed = [], {}, True
    for loss in (0.2, 0.05, 0.01):
        lab = variant.lab(two_racks(planes=8, hosts=2, uplinks=2), seed, active=8)
        (stream,) = lab.stream(0, 2)
        lab.run_to(2)
        paths = lab.requestor(stream).paths
        ev = random.Random(seed).choice(paths.active)
        plane, t1 = plane_of(ev), ev & 1
        lab.lossy(lab.fabric.uplink(plane, 0, t1), loss)
        lab.run_to(6)
        lab.check()
        out = ev not in paths.active and (ev ^ 1) in paths.active
        kept = stream.share(3, 6) / stream.share(1, 2)
        passed = passed and out and kept >= 0.95
        figures[f"kept_{loss}"] = kept
        words.append(f"at {100 * loss:.0f} %: EV-A {'out, EV-B in' if out else 'STAYS'}, {percent(kept)} of before")
    return Outcome("; ".join(words), passed, figures)


def c13_two_flows_two_evs(seed: int, variant: Variant) -> Outcome:
    """One plane, EV-A active and EV-B in reserve for flow 1; at 2 ms flow 2 comes, on EV-A only."""
    lab = variant.lab(two_racks(planes=1, hosts=2, uplinks=2), seed)
    (first,) = lab.stream(0, 2, active=1)
    (ev_a,) = lab.requestor(first).paths.active
    (second,) = lab.stream(1, 3, start_ms=2, evs=[ev_a])
    lab.run_to(8)
    lab.check()
    moved = ev_a not in lab.requestor(first).paths.active
    shares = [first.share(3, 8), second.share(3, 8)]
    return Outcome(
        f"flow 1 {'moves to EV-B' if moved else 'STAYS on EV-A'}; then {percent(shares[0])} and {percent(shares[1])}",
        moved and min(shares) >= 0.95,
        {"first": shares[0], "second": shares[1], "alone": first.share(1, 2)},
    )


# Collectives of 8 hosts: MRC on four planes against RC-like queue pairs on one plane of four times the rate, as the
# paper compares them (5.2.7). It has PFC and DCQCN for RoCE. Here the baseline's queues are never full, which is PFC
# without its pauses, and nothing slows it down, which is less than DCQCN costs: a baseline better than the paper's.


def _collective(
    make: Callable[[Lab, int], Collective], racks: int, seed: int, variant: Variant, loss: float, lanes: int
) -> float:
    """Share of the line rate that a collective has, with as many uplinks as hosts; 0 when it took over a second."""
    planes, rate = (1, 4 * PORT_BPS) if variant.baseline else (4, PORT_BPS)
    fabric = Topology(planes, racks, 8 // racks, 8 // racks, rate, rate)
    lab = Lab(fabric, variant, seed)
    for link in fabric.links():
        if link.lower.node.tier is Tier.HOST:
            lab.network.port(link.upper).loss = loss  # on what NICs receive, as the paper has it
    collective = make(lab, lanes)
    lab.run_to(1000)
    if collective.done_ps is None:
        return 0.0
    collective.check()
    return collective.bytes_per_host * 8e12 / collective.done_ps / lab.line_bps


def _ring(lab: Lab, lanes: int) -> Collective:
    half = lab.fabric.hosts // 2
    order = [host for pair in zip(range(half), range(half, 2 * half)) for host in pair]  # every step crosses T1s
    return RingAllReduce(lab.network, order, 8 * 128 * 4096, lab.qp, lab.paths, lanes, baseline=lab.variant.baseline)


def _all_to_all(lab: Lab, lanes: int) -> Collective:
    hosts = list(range(lab.fabric.hosts))
    return AllToAll(lab.network, hosts, 384 * 4096, lab.qp, lab.paths, lanes, baseline=lab.variant.baseline)


def _shape(
    make: Callable[[Lab, int], Collective], racks: int, seed: int, variant: Variant, lanes: int
) -> dict[str, float]:
    """The baseline's figures are medians of three draws of paths: of so few, one in a hundred has no collision."""

    def share(who: Variant, loss: float, lanes: int = 1, draws: int = 1) -> float:
        return statistics.median(_collective(make, racks, seed + draw, who, loss, lanes) for draw in range(draws))

    baseline = replace(variant, baseline=True)
    figures = {}
    for loss in (0, 0.001, 0.01):
        figures[f"MRC, {100 * loss:g} %"] = share(variant, loss)
        figures[f"RC-like, {100 * loss:g} %"] = share(baseline, loss, draws=3)
    figures[f"RC-like, {lanes} QPs, 0 %"] = share(baseline, 0, lanes, draws=3)
    return figures


def c15_ring(seed: int, variant: Variant) -> Outcome:
    """8-way ring all-reduce of 4 MiB per host, the paper's smallest, results added up and compared."""
    seen = _shape(_ring, 2, seed, variant, 8)
    clear = seen["MRC, 0 %"] > seen["RC-like, 8 QPs, 0 %"] > seen["RC-like, 0 %"] <= 0.6
    little = seen["MRC, 0.1 %"] >= 0.7 * seen["MRC, 0 %"]
    at_one_percent = seen["MRC, 1 %"] >= 0.33 and seen["RC-like, 1 %"] <= 0.5 * seen["MRC, 1 %"]
    return Outcome(_listed(seen), clear and little and at_one_percent, seen)


def c16_all_to_all(seed: int, variant: Variant) -> Outcome:
    """8-way all-to-all of 1.5 MiB per pair, in four racks: 6 of 7 pairs cross T1s, where with two racks only 4 would,
    and of the paper's 64 hosts nearly all do.

    Not as in the paper: 4 queue pairs per peer help the baseline, up to MRC's rate and above: 7 peers, unlike 63, do
    not even out a hash's choices by themselves, and here nothing makes queue pairs dear (no DCQCN, no pauses).
    """
    seen = _shape(_all_to_all, 4, seed, variant, 4)
    better = all(seen[f"MRC, {loss} %"] > seen[f"RC-like, {loss} %"] for loss in ("0", "0.1", "1"))
    return Outcome(_listed(seen), better, seen)


def _listed(figures: dict[str, float]) -> str:
    return "; ".join(f"{name}: {percent(share)}" for name, share in figures.items())


# Congestion.


def c17_incast_and_victim(seed: int, variant: Variant) -> Outcome:
    """7:1 across T1s; the victim goes to another host of the target's rack.

    Shares are those of 250 base round trips, as the paper's are those of a minute: in 10, a flow may have twice
    another's.
    """
    fabric = Topology(2, 4, 4, 4, PORT_BPS, PORT_BPS)
    lab = variant.lab(fabric, seed)
    sources = random.Random(seed).sample(range(4, 16), 8)
    alone = variant.lab(fabric, seed)
    (reference,) = alone.stream(sources[7], 1)
    alone.run_to(3)
    (victim,) = lab.stream(sources[7], 1)
    incast = [stream for source in sources[:7] for stream in lab.stream(source, 0, start_ms=0.5)]
    lab.run_to(26)
    lab.check()
    shares = [stream.share(3, 26) for stream in incast]
    kept = victim.share(3, 26) / reference.share(1, 3)
    return Outcome(
        f"the seven share {percent(sum(shares))} of the line, Jain {jain(shares):.3f}; victim at {percent(kept)} of "
        "what it has alone",
        jain(shares) >= 0.98 and kept >= 0.97 and sum(shares) >= 0.9,
        {"jain": jain(shares), "victim": kept, "total": sum(shares)},
    )


def c19_fifteen_to_one(seed: int, variant: Variant) -> Outcome:
    """A flow every half millisecond, up to 15 to one host; counts of trims against NACKs and retransmissions."""
    lab = Lab(Topology(2, 4, 4, 4, PORT_BPS, PORT_BPS), variant, seed)
    lab.posted_chunks = 4  # so that it soon ends
    sources = random.Random(seed).sample(range(1, 16), 15)
    streams = [stream for n, source in enumerate(sources) for stream in lab.stream(source, 0, start_ms=n / 2)]
    lab.run_to(10)
    lab.check()
    for stream in streams:
        stream.stopped = True
    lab.run_to(20)
    counters, trims = lab.counters(), lab.causes()[Cause.TRIM]
    total = together(streams, 1, 10)
    depth = percentile(lab.network.depths[Stage.LAST], 0.99) * FRAME_BYTES / lab.plane_bdp_bytes
    late = counters["timeouts"] + counters["inferred"]
    equal = trims == counters["nacks"] == counters["retransmitted"]
    return Outcome(
        f"goodput {percent(total)}; {trims} trims, {counters['nacks']} NACKs, {counters['retransmitted']} sent "
        f"again, {counters['timeouts']} timeouts; p99 queue of the last hop {depth:.1f} BDP",
        equal and trims > 0 and not late and total >= 0.9,
        {"goodput": total, "trims": trims, "timeouts": counters["timeouts"], "p99_bdp": depth},
    )


# Capacity.


def c20_fast_uplinks(seed: int, variant: Variant) -> Outcome:
    """One plane, uplinks as fast as the NIC; three of four fail, one by one."""
    lab = Lab(two_racks(planes=1, hosts=2), variant, seed)
    (stream,) = lab.stream(0, 2)
    order = random.Random(seed).sample(range(4), 3)
    for step, t1 in enumerate(order):
        lab.at(2 + 6 * step, lambda t1=t1: lab.link(lab.fabric.uplink(0, 0, t1), up=False))  # type: ignore[misc]
    lab.run_to(20)
    lab.check()
    before = stream.share(1, 2)
    steps = [stream.share(6 * step + 5, 6 * step + 8) / before for step in range(3)]
    return Outcome("steps " + ", ".join(map(percent, steps)), min(steps) >= 0.95, {"least": min(steps)})


def c21_slow_uplinks(seed: int, variant: Variant) -> Outcome:
    """One plane, four uplinks of a quarter of the NIC's rate each: 4, 3, 2, 1, 4 of them."""
    lab = variant.lab(two_racks(planes=1, hosts=2, host_rate_bps=4 * PORT_BPS), seed)
    (stream,) = lab.stream(0, 2)
    order = random.Random(seed).sample(range(4), 3)
    for step, t1 in enumerate(order):
        lab.at(4 * (step + 1), lambda t1=t1: lab.link(lab.fabric.uplink(0, 0, t1), up=False))  # type: ignore[misc]

    def restore() -> None:
        for t1 in order:
            lab.link(lab.fabric.uplink(0, 0, t1), up=True)

    lab.at(16, restore)
    lab.run_to(24)
    lab.check()
    steps = [stream.share(start, start + 2) for start in (2, 6, 10, 14, 22)]
    off = max(abs(share - want) for share, want in zip(steps, (1, 0.75, 0.5, 0.25, 1)))
    return Outcome("steps " + ", ".join(map(percent, steps)), off <= 0.05, {"off": off})


def c22_permutation(seed: int, variant: Variant) -> Outcome:
    """8 hosts to 8 hosts, all uplinks full; RC-like queue pairs on one plane of four times the rate beside it."""
    order = random.Random(seed).sample(range(8), 8)
    lab = variant.lab(two_racks(hosts=8, uplinks=8), seed)
    streams = [stream for n in range(8) for stream in lab.stream(n, 8 + order[n])]
    lab.run_to(5)
    lab.check()
    mrc = [stream.share(2, 5) for stream in streams]
    single = Topology(1, 2, 8, 8, 4 * PORT_BPS, 4 * PORT_BPS)
    other = replace(variant, baseline=True).lab(single, seed)
    flows = [stream for n in range(8) for stream in other.stream(n, 8 + order[n])]
    other.run_to(4)
    other.check()
    baseline = [stream.share(1, 4) for stream in flows]
    return Outcome(
        f"the least flow {percent(min(mrc))}, median {percent(statistics.median(mrc))}; RC-like: "
        f"least {percent(min(baseline))}, median {percent(statistics.median(baseline))}",
        min(mrc) >= 0.95 and min(baseline) < 0.6,
        {"least": min(mrc), "baseline_least": min(baseline)},
    )


def c23_recovery(seed: int, variant: Variant) -> Outcome:
    """A T0-T1 link dies under a flow on 32 paths: when its EV is left, and what was lost by then."""
    lab = Lab(two_racks(hosts=2, uplinks=8), variant, seed)
    (stream,) = lab.stream(0, 2)
    lab.run_to(2)
    paths = lab.requestor(stream).paths
    ev = random.Random(seed).choice(paths.active)
    lab.link(lab.fabric.uplink(plane_of(ev), 0, ev & 0xFFFF), up=False)
    while paths.state(ev) is not EvState.ASSUMED_BAD and lab.now_ms < 6:
        lab.run_to(lab.now_ms + 0.01)
    found = lab.now_ms - 2
    lost = sum(lab.network.counters(stage)[Cause.DOWN] for stage in (Stage.UP, Stage.DOWN))
    lab.run_to(6)
    lab.check()
    limit = TIMEOUT_NS / 1e6 + lab.base_rtt_ms / 2  # until the EV has its turn, then a timeout
    return Outcome(
        f"left after {found / lab.base_rtt_ms:.1f} base RTT (timeout: {TIMEOUT_NS / 1e6 / lab.base_rtt_ms:.1f}), "
        f"{lost} packets lost, {percent(stream.share(2, 6) / stream.share(1, 2))} of before",
        found <= limit and paths.state(ev) is EvState.ASSUMED_BAD and stream.share(2, 6) / stream.share(1, 2) >= 0.9,
        {"rtts": found / lab.base_rtt_ms, "lost": lost},
    )


CASES: dict[str, Row] = {
    "C4": Row(
        "a T1 swallows everything and comes back",
        "Fig. 8",
        "a quarter of QPs hit, a short dip; the reboot itself has no effect",
        "dip <= 8 timeouts; its EVs bad, then good; >= 98 % afterwards; no QP fails",
        c4_t1_blackhole,
    ),
    "C5": Row(
        "T0-local and cross-T1 bandwidth",
        "5.2.1",
        "about 96 % of the line both",
        "within 3 % of each other, >= 95 %",
        c5_local_and_cross,
        quick=True,
    ),
    "C6": Row(
        "NIC-T0 links down one by one",
        "Fig. 9a",
        "graceful steps, gaps below 1 s",
        "(k-j)/k within 5 % of the line",
        c6_ports_one_by_one,
    ),
    "C7": Row(
        "half of the NIC's links down and up",
        "Fig. 9b",
        "about half, quick return",
        "50 % within 5, >= 95 % after 1 ms",
        c7_half_of_the_ports,
    ),
    "C8": Row(
        "a quarter of the uplinks off, one by one",
        "Fig. 9c",
        "minimal effect",
        "goodput >= 95 %",
        c8_uplinks_off,
    ),
    "C9": Row("uplinks flap together", "Fig. 9d", "negligible effect", "goodput >= 95 %", c9_uplinks_flap),
    "C10": Row(
        "a T0 is down",
        "Fig. 10",
        "one plane's share lost, steadily",
        "1 - 1/k within 5 % of the line",
        c10_t0_down,
        quick=True,
    ),
    "C11": Row("a T1 is down", "Fig. 11", "no steady loss", ">= 98 % while down and after", c11_t1_down),
    "C12": Row(
        "one EV drops packets",
        "Figs. 12, 13",
        "EV-A inactive at once, EV-B in, line rate kept; at other rates too",
        "so, at 20, 5, 1 %; >= 95 %",
        c12_lossy_ev,
    ),
    "C13": Row(
        "two flows, two EVs",
        "Fig. 14",
        "ECN moves flow 1 to EV-B; both near line rate",
        "so; both >= 95 %",
        c13_two_flows_two_evs,
        quick=True,
    ),
    "C15": Row(
        "ring all-reduce under loss",
        "Fig. 16",
        "MRC with 1 QP above RoCE with 1 and 16; 0.1 %: little effect; 1 %: a third, RoCE unusable",
        "shape only: RC-like 1 QP <= 60 % < 8 QPs < MRC; 0.1 %: >= 70 % of clear; 1 %: >= 33 %, twice RC-like",
        c15_ring,
    ),
    "C16": Row(
        "all-to-all under loss",
        "Fig. 17",
        "MRC better at all losses; 16 QPs do RoCE no good",
        "shape only: above the baseline with 1 QP at each loss",
        c16_all_to_all,
    ),
    "C17": Row(
        "7:1 incast and a victim",
        "Fig. 18",
        "even sharing, victim untouched",
        "Jain >= 0.98, victim >= 97 %",
        c17_incast_and_victim,
    ),
    "C19": Row(
        "15:1, a flow at a time",
        "Fig. 22 (the paper shows DCQCN only)",
        "DCQCN: line rate with PFC, or -10 to -20 %",
        "goodput >= 90 %; trims = NACKs = sent again > 0; no timeout, nothing inferred",
        c19_fifteen_to_one,
    ),
    "C20": Row(
        "three of four fast uplinks fail",
        "Fig. 19a",
        "no visible effect",
        ">= 95 % at each step",
        c20_fast_uplinks,
        quick=True,
    ),
    "C21": Row(
        "four slow uplinks: 4, 3, 2, 1, 4",
        "Fig. 19b, c",
        "tracks what is left",
        "within 5 % of the line",
        c21_slow_uplinks,
    ),
    "C22": Row(
        "8 to 8, uplinks full",
        "Fig. 20",
        "MRC 390 of 400 Gb/s for all; RoCE: some 1/2 or 1/3",
        "least flow >= 95 %; some RC-like flow < 60 %",
        c22_permutation,
    ),
    "C23": Row(
        "recovery from a dead link",
        "2.1",
        "a few tens of microseconds",
        "left within a timeout (+ 1/2 RTT), >= 90 % of before",
        c23_recovery,
        quick=True,
    ),
}
