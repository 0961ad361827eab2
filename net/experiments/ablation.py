"""What each part of MRC is worth: the same traffic with one part off at a time.

Use: ``ABLATION["incast"](seed, VARIANTS["no trimming"])``. To add traffic: a function and a row in ABLATION.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from net.experiments.lab import PORT_BPS, Lab, Stream, Variant
from net.topology import Topology

VARIANTS = {
    "everything on": Variant(),
    "no trimming": Variant(trimming=False),
    "no selective repeat": Variant(selective=False),
    "no spray": Variant(spray=False),
    "no ECN": Variant(ecn=False),
    "no SKIP": Variant(skip=False),
}


class Measure(NamedTuple):
    """goodput: of what could be had. least: the worst flow against its fair share. again: share of packets sent
    again. timeouts: count."""

    goodput: float
    least: float
    again: float
    timeouts: float


def _measure(lab: Lab, streams: Sequence[Stream], fair: float, since_ms: float, until_ms: float) -> Measure:
    lab.run_to(until_ms)
    lab.check()
    counters = lab.counters()
    shares = [stream.share(since_ms, until_ms) / fair for stream in streams]
    return Measure(
        sum(shares) / len(shares), min(shares), counters["retransmitted"] / counters["sent"], counters["timeouts"]
    )


def incast(seed: int, variant: Variant) -> Measure:
    """Seven to one."""
    lab = Lab(Topology(2, 4, 4, 4, PORT_BPS, PORT_BPS), variant, seed)
    sources = random.Random(seed).sample(range(1, 16), 7)
    streams = [stream for source in sources for stream in lab.stream(source, 0)]
    return _measure(lab, streams, 1 / 7, 1, 16)


def permutation(seed: int, variant: Variant) -> Measure:
    """Eight hosts to eight others, uplinks full."""
    order = random.Random(seed).sample(range(8), 8)
    lab = Lab(Topology(2, 2, 8, 8, PORT_BPS, PORT_BPS), variant, seed)
    streams = [stream for n in range(8) for stream in lab.stream(n, 8 + order[n])]
    return _measure(lab, streams, 1, 1, 5)


def lossy(seed: int, variant: Variant) -> Measure:
    """Four hosts to four others; every link loses 0.2 %."""
    lab = Lab(Topology(2, 2, 4, 4, PORT_BPS, PORT_BPS), variant, seed)
    for link in lab.fabric.links():
        lab.network.set_link(link, loss=0.002)
    streams = [stream for n in range(4) for stream in lab.stream(n, 4 + n)]
    return _measure(lab, streams, 1, 1, 6)


ABLATION: dict[str, Callable[[int, Variant], Measure]] = {
    "incast 7:1": incast,
    "permutation 8 to 8": permutation,
    "0.2 % loss on every link": lossy,
}
