"""Collectives over MRC and over the baseline: results right to the last word, also with loss."""

from __future__ import annotations

import numpy as np
import pytest

from net.errors import SimError
from net.mrc.paths import PathSettings
from net.mrc.requestor import QpSettings
from net.sim.collectives import AllToAll, Collective, RingAllReduce
from net.sim.network import Network, Settings
from net.topology import Topology

FABRIC = Topology(2, 2, 2, 2, 10**10, 10**10)
QP = QpSettings(window_bytes=128 * 1024, mpr=4096, timeout_ns=2_000_000, retries=20)
PATHS = PathSettings(active=4, ev_min_active=1, probe_interval_ns=500_000)


def run(kind: str, hosts: int, lanes: int, baseline: bool, loss: float) -> Collective:
    network = Network(FABRIC, Settings(), 5)
    for link in FABRIC.links():
        network.set_link(link, loss=loss)
    order = [0, 2, 1, 3][:hosts]
    made: Collective
    if kind == "ring":
        made = RingAllReduce(network, order, 12 * 4 * 4096, QP, PATHS, lanes, pieces=4, baseline=baseline)
    else:
        made = AllToAll(network, order, 64 * 1024, QP, PATHS, lanes, baseline=baseline)
    network.run(10**12)
    return made


@pytest.mark.parametrize("kind", ["ring", "all to all"])
@pytest.mark.parametrize(("hosts", "lanes", "loss"), [(2, 1, 0.0), (3, 2, 0.0), (4, 1, 0.01)])
@pytest.mark.parametrize("baseline", [False, True])
def test_results_are_right(kind: str, hosts: int, lanes: int, loss: float, baseline: bool) -> None:
    made = run(kind, hosts, lanes, baseline, loss)
    assert made.done_ps is not None
    made.check()
    size = 12 * 4 * 4096 if kind == "ring" else 64 * 1024
    assert made.bytes_per_host == (2 * (hosts - 1) * size // hosts if kind == "ring" else (hosts - 1) * size)
    sent = [sum(pair.requestor.counters["sent"] for pair in host.endpoint.pairs.values()) for host in made.hosts]
    assert len(set(sent)) == 1 and sent[0] * 4096 >= made.bytes_per_host


def test_a_wrong_result_is_seen() -> None:
    ring = run("ring", 3, 1, False, 0)
    assert isinstance(ring, RingAllReduce)
    ring.vectors[1, 0, 2, 5] += np.uint32(1)
    with pytest.raises(AssertionError):
        ring.check()
    blocks = run("all to all", 3, 1, False, 0)
    blocks.hosts[1].memory[7] ^= 1
    with pytest.raises(AssertionError):
        blocks.check()


def test_mistakes_name_the_fix() -> None:
    network = Network(FABRIC)
    with pytest.raises(SimError, match="a multiple of 96"):
        RingAllReduce(network, [0, 1, 2], 100, QP, PATHS)
    with pytest.raises(SimError, match="at least 2 hosts"):
        AllToAll(network, [0], 64, QP, PATHS)
    with pytest.raises(SimError, match="a multiple of 3"):
        AllToAll(network, [0, 1], 64, QP, PATHS, 3)
