"""Live MRC endpoints: over cables between two namespaces, then over fabrics with faults. Counts, never times."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from net.errors import NetError
from net.fabric import Fabric
from net.mrc.endpoint import Kind
from net.mrc.live import LIVE, HostPort, LiveEndpoint, host_ports
from net.mrc.paths import EvState
from net.mrc.requestor import Identity, QpSettings, Status
from net.namespaces import Namespace
from net.srv6 import Plan
from net.switch.model import Cause
from net.switch.settings import FabricSettings
from net.topology import Topology

MIB = 1 << 20
CHUNK = 256 * 1024
DEADLINE_S = 60


def payload(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def qpn(peer: int) -> int:
    return 0x100 + peer


def pump(endpoints: Sequence[LiveEndpoint], done: Callable[[], bool]) -> None:
    """All of them in turn, in one thread, until a condition holds."""
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, [endpoint.engine.counters for endpoint in endpoints]
        for endpoint in endpoints:
            for completion in endpoint.poll():
                COMPLETED.setdefault(id(endpoint), []).append(completion)


COMPLETED: dict[int, list[object]] = {}


class Transfer:
    """``src`` writes ``size`` bytes into the memory of ``dst``, in chunks, each with an immediate."""

    def __init__(
        self,
        src: LiveEndpoint,
        dst: LiveEndpoint,
        size: int,
        settings: QpSettings = LIVE,
    ) -> None:
        self.src, self.dst = src, dst
        self.data = payload(size, src.host)
        self.memory = bytearray(size)
        self.chunks = -(-size // CHUNK)
        key = dst.register(self.memory, 0)
        src.connect(Identity(qpn(dst.host), dst.host, qpn(src.host), 0xFFFF00, 5), settings)
        dst.connect(Identity(qpn(src.host), src.host, qpn(dst.host), 5, 0xFFFF00), settings)
        for n in range(self.chunks):
            part = self.data[n * CHUNK : (n + 1) * CHUNK]
            src.write(qpn(dst.host), n, part, n * CHUNK, key, immediate=n)

    def seen(self) -> tuple[list[int], list[int]]:
        """Request ids that completed at the source, immediates that arrived at the destination."""
        here, there = (COMPLETED.get(id(end), []) for end in (self.src, self.dst))
        assert all(completion.status is Status.OK for completion in here)  # type: ignore[attr-defined]
        return (
            [c.value for c in here if c.kind is Kind.WRITE and c.qpn == qpn(self.dst.host)],  # type: ignore[attr-defined]
            [c.value for c in there if c.kind is Kind.IMMEDIATE and c.qpn == qpn(self.src.host)],  # type: ignore[attr-defined]
        )

    def done(self) -> bool:
        return [len(values) for values in self.seen()] == [self.chunks, self.chunks]

    def check(self) -> None:
        """Every byte is there; everything completed once, in order."""
        assert self.seen() == (list(range(self.chunks)), list(range(self.chunks)))
        assert self.memory == self.data

    def counters(self) -> dict[str, int]:
        return dict(self.src.engine.pairs[qpn(self.dst.host)].requestor.counters)

    def state(self, ev: int) -> EvState | None:
        return self.src.engine.pairs[qpn(self.dst.host)].requestor.paths.state(ev)


# Cables between two namespaces of the test's own.


@pytest.fixture
def cables() -> Iterator[tuple[Namespace, Namespace, list[LiveEndpoint]]]:
    """Two hosts, two planes, a cable in each in place of the fabric."""
    if os.geteuid():
        pytest.skip("network namespaces need root")
    with contextlib.ExitStack() as stack:
        spaces = [stack.enter_context(contextlib.closing(Namespace(name, ipv6=False))) for name in ("a", "b")]
        plan = Plan(Topology(2, 1, 1, 2))
        ports: list[dict[int, HostPort]] = [{}, {}]
        for plane in range(2):
            macs = [bytes([2, 0, 0, 0, plane, end]) for end in range(2)]
            index = 50 + plane
            spaces[0].netlink.veth([(f"c{plane}", index, spaces[n].fd, macs[n]) for n in range(2)], 9000, 1000)
            spaces[0].netlink.flush()
            for n in range(2):
                spaces[n].netlink.set_up(index)
                spaces[n].netlink.flush()
                ports[n][plane] = HostPort(f"c{plane}", macs[1 - n] + macs[n] + b"\x86\xdd")
        endpoints = []
        for n in range(2):
            with spaces[n].entered():
                endpoints.append(stack.enter_context(LiveEndpoint(plan, n, ports[n], seed=n)))
        COMPLETED.clear()
        yield spaces[0], spaces[1], endpoints


def test_writes_arrive_over_cables(cables: tuple[Namespace, Namespace, list[LiveEndpoint]]) -> None:
    _, _, (one, other) = cables
    both = [Transfer(one, other, MIB)]
    pump([one, other], both[0].done)
    both[0].check()
    assert both[0].counters()["sent"] == MIB // 4096 and one.refused == other.refused == {}
    responder = other.engine.pairs[qpn(0)].responder
    assert responder.counters["placed"] == MIB // 4096


def test_a_cable_without_carrier_is_a_port_down(
    cables: tuple[Namespace, Namespace, list[LiveEndpoint]],
) -> None:
    """The one end is set down in the middle, the other sees its carrier go; both leave the plane and say so."""
    one_space, _, (one, other) = cables
    transfer = Transfer(one, other, 4 * MIB)
    pump([one, other], lambda: len(transfer.seen()[0]) >= 2)
    one_space.netlink.set_up(51, False)
    one_space.netlink.flush()
    pump([one, other], transfer.done)
    transfer.check()
    pump([one, other], lambda: transfer.state(0x10000) is EvState.DENIED)
    assert transfer.state(0) is EvState.GOOD
    one_space.netlink.set_up(51, True)
    one_space.netlink.flush()
    pump([one, other], lambda: transfer.state(0x10000) is EvState.GOOD)


def test_who_was_stopped_blames_no_path(cables: tuple[Namespace, Namespace, list[LiveEndpoint]]) -> None:
    """Half a second without a poll, twice the timeout, with everything in flight; then the peer is silent as long."""
    _, _, (one, other) = cables
    quick = QpSettings(window_bytes=64 * 1024, mpr=4096, timeout_ns=100_000_000, retries=25)
    transfer = Transfer(one, other, 2 * MIB, quick)
    one.poll()
    time.sleep(0.3)  # descheduled
    one.poll()
    pump([one, other], lambda: len(transfer.seen()[0]) >= 1)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:  # the peer is descheduled, and packets time out
        one.poll(0.01)
    pump([one, other], transfer.done)
    transfer.check()
    requestor = one.engine.pairs[qpn(1)].requestor
    assert requestor.counters["forgiven"] >= 1
    assert not any(after is EvState.ASSUMED_BAD for _, after in requestor.paths.changes)


def test_without_the_right_or_the_interface_the_fix_is_named() -> None:
    if os.geteuid():
        pytest.skip("packet sockets need root")
    with pytest.raises(NetError, match="nowhere"):
        LiveEndpoint(Plan(Topology(1, 1, 1, 2)), 0, {0: HostPort("nowhere", bytes(14))})


# Fabrics.


class Hosts:
    """Live endpoints in the hosts of a fabric."""

    def __init__(self, fabric: Fabric, stack: contextlib.ExitStack) -> None:
        self.fabric = fabric
        self.ends: list[LiveEndpoint] = []
        for host in range(fabric.topology.hosts):
            with fabric.wiring.namespace(f"h{host}").entered():
                ports = host_ports(fabric.wiring, host)
                rate = fabric.topology.host_rate_bps
                self.ends.append(
                    stack.enter_context(LiveEndpoint(fabric.plan, host, ports, seed=host, rate_bps=rate))
                )

    def run(self, pairs: Sequence[tuple[int, int]], size: int) -> list[Transfer]:
        """Transfers side by side, to the end, checked."""
        transfers = [Transfer(self.ends[src], self.ends[dst], size) for src, dst in pairs]
        pump(self.ends, lambda: all(transfer.done() for transfer in transfers))
        for transfer in transfers:
            transfer.check()
        return transfers


@pytest.fixture(params=[100_000_000])
def hosts(live: None, request: pytest.FixtureRequest) -> Iterator[Hosts]:
    """2 planes of 2 T0 and 2 T1, 4 hosts, 100 Mb/s."""
    rate = request.param
    settings = FabricSettings(ecn_bytes=20_000, trim_bytes=40_000, last_hop_trim_bytes=40_000)
    COMPLETED.clear()
    with contextlib.ExitStack() as stack:
        fabric = stack.enter_context(Fabric(Topology(2, 2, 2, 2, rate, rate), settings))
        yield Hosts(fabric, stack)


def test_a_clear_fabric(hosts: Hosts) -> None:
    (transfer,) = hosts.run([(0, 2)], 4 * MIB)
    assert transfer.counters()["sent"] == 1024 and transfer.counters().get("timeouts", 0) == 0
    assert hosts.ends[2].engine.pairs[qpn(0)].responder.counters["placed"] == 1024


def test_loss_everywhere(hosts: Hosts) -> None:
    for link in hosts.fabric.wiring.links:
        hosts.fabric.fault(link, loss=0.01)
    (transfer,) = hosts.run([(0, 3)], 2 * MIB)
    assert transfer.counters()["retransmitted"] > 0


def test_damaged_doubled_and_overtaken_packets(hosts: Hosts) -> None:
    for link in hosts.fabric.wiring.links:
        hosts.fabric.fault(link, corrupt=0.01, duplicate=0.02, reorder=0.02)
    (transfer,) = hosts.run([(1, 2)], 2 * MIB)
    assert sum(end.refused["icrc"] for end in hosts.ends) > 0
    assert hosts.ends[2].engine.pairs[qpn(1)].responder.counters["duplicates"] > 0
    assert transfer.counters()["retransmitted"] > 0


@pytest.mark.parametrize("hosts", [5_000_000], indirect=True)
def test_an_incast_is_trimmed_asked_for_and_sent_again(hosts: Hosts) -> None:
    """3:1 at 5 Mb/s, which one thread can overload: every trim is a NACK is sent again, and nothing times out."""
    transfers = hosts.run([(0, 3), (1, 3), (2, 3)], MIB // 2)
    fabric = hosts.fabric
    trims = sum(
        fabric.counters(link.name, by).packets.get(Cause.TRIM, 0)
        for link in fabric.wiring.links.values()
        for by in (link.lower.node.name, link.upper.node.name)
    )
    counters = [transfer.counters() for transfer in transfers]
    assert trims > 0 and trims == sum(each["nacks"] for each in counters)
    assert trims == sum(each["retransmitted"] for each in counters)
    assert sum(each.get("timeouts", 0) for each in counters) == 0


def test_a_t1_that_swallows_everything_is_left(hosts: Hosts) -> None:
    hosts.fabric.blackhole("p0-t1-1")
    (transfer,) = hosts.run([(0, 2)], 4 * MIB)
    assert transfer.state(1) is EvState.ASSUMED_BAD
    assert [transfer.state(ev) for ev in (0, 0x10000, 0x10001)].count(EvState.ASSUMED_BAD) == 0
    hosts.fabric.blackhole("p0-t1-1", False)
    pump(hosts.ends, lambda: transfer.state(1) is not EvState.ASSUMED_BAD)
