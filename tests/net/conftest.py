"""Tests on live fabrics: they need root and a kernel with SRv6, BPF and HTB, and say what is missing otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from net.fabric import Fabric
from net.probe import missing
from net.switch.settings import ENGINES, FabricSettings
from net.topology import Topology

SMALL = Topology(planes=2, t0_per_plane=2, t1_per_plane=2, hosts_per_t0=2, host_rate_bps=10**9, uplink_rate_bps=10**9)


@pytest.fixture(scope="session")
def live() -> None:
    """Skips where no fabric can be made."""
    if lacking := missing():
        pytest.skip("no live fabric here: " + "; ".join(lacking))


@pytest.fixture(scope="module", params=ENGINES)
def fabric(live: None, request: pytest.FixtureRequest) -> Iterator[Fabric]:
    """A small fabric of each engine, whole again after each module."""
    with Fabric(SMALL, FabricSettings(engine=request.param)) as one:
        yield one
