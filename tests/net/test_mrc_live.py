"""Live MRC endpoints over cables between two namespaces. Counts, never times. Over fabrics: test_mrc_fabric."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from net.errors import NetError
from net.mrc.congestion import Window
from net.mrc.live import LIVE, HostPort, LiveEndpoint
from net.mrc.paths import EvState
from net.mrc.requestor import QpSettings
from net.mrc.wire import TIMESTAMP_NS
from net.namespaces import Namespace
from net.srv6 import Plan
from net.topology import Topology
from tests.net.transfers import CHUNK, MIB, Pump, Transfer, qpn


@pytest.fixture(params=[{}])
def cables(request: pytest.FixtureRequest) -> Iterator[tuple[Namespace, Pump]]:
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
                endpoints.append(stack.enter_context(LiveEndpoint(plan, n, ports[n], seed=n, **request.param)))
        yield spaces[0], Pump(endpoints)


def test_writes_arrive_over_cables(cables: tuple[Namespace, Pump]) -> None:
    _, pump = cables
    transfer = Transfer(pump, 0, 1, MIB)
    pump.until(transfer.done)
    transfer.check()
    assert transfer.counters["sent"] == MIB // 4096
    assert [end.refused for end in pump.ends] == [{}, {}]
    assert transfer.placed["placed"] == MIB // 4096


def test_a_cable_without_carrier_is_a_port_down(cables: tuple[Namespace, Pump]) -> None:
    """The one end is set down in the middle, the other sees its carrier go; both leave the plane and say so."""
    space, pump = cables
    transfer = Transfer(pump, 0, 1, 4 * MIB)
    pump.until(lambda: len(transfer.written) >= 2)
    space.netlink.set_up(51, False)
    space.netlink.flush()
    pump.until(transfer.done)
    transfer.check()
    pump.until(lambda: transfer.states() == {0: EvState.GOOD, 0x10000: EvState.DENIED})
    space.netlink.set_up(51, True)
    space.netlink.flush()
    pump.until(lambda: transfer.states() == {0: EvState.GOOD, 0x10000: EvState.GOOD})


def test_who_was_stopped_blames_no_path(cables: tuple[Namespace, Pump]) -> None:
    """Half a second without a poll, twice the timeout, with everything in flight; then the peer is silent as long."""
    _, pump = cables
    one = pump.ends[0]
    quick = QpSettings(window_bytes=64 * 1024, mpr=4096, timeout_ns=100_000_000, retries=25)
    transfer = Transfer(pump, 0, 1, 2 * MIB, quick)
    one.poll()
    time.sleep(0.3)  # descheduled
    one.poll()
    pump.until(lambda: len(transfer.written) >= 1)
    until = time.monotonic() + 0.3
    while time.monotonic() < until:  # the peer is descheduled, and packets time out
        one.poll(0.01)
    pump.until(transfer.done)
    transfer.check()
    requestor = one.engine.pairs[qpn(1)].requestor
    assert requestor.counters["forgiven"] >= 1
    assert not any(after is EvState.ASSUMED_BAD for _, after in requestor.paths.changes)


class Listening(Window):
    """A fixed window that notes round trips."""

    rtts_ns: list[int]

    def on_ack(self, now_ns: int, newly_bytes: int, rtt_ns: int | None, marked: bool, inflight_bytes: int) -> None:
        self.rtts_ns += [] if rtt_ns is None else [rtt_ns]


@pytest.mark.parametrize(
    "cables", [{"rate_bps": 10**7, "dilation": 1000, "delay_ns": 20_000}], indirect=True, ids=["dilated"]
)
def test_time_can_be_dilated_and_cables_be_long(cables: tuple[Namespace, Pump]) -> None:
    """A thousand of our nanoseconds are one: a round trip of two delays of 20 ms is read as one of 40 us."""
    _, pump = cables
    transfer = Transfer(pump, 0, 1, 2 * CHUNK, replace(LIVE, timeout_ns=524_288))
    requestor = pump.ends[0].engine.pairs[qpn(1)].requestor
    requestor.window = window = Listening(LIVE.window_bytes)
    window.rtts_ns = []
    pump.until(transfer.done)
    transfer.check()
    assert transfer.counters["sent"] == 2 * CHUNK // 4096
    assert 40_000 - TIMESTAMP_NS <= min(window.rtts_ns) < 80_000


def test_without_the_right_or_the_interface_the_fix_is_named() -> None:
    if os.geteuid():
        pytest.skip("packet sockets need root")
    with pytest.raises(NetError, match="nowhere"):
        LiveEndpoint(Plan(Topology(1, 1, 1, 2)), 0, {0: HostPort("nowhere", bytes(14))})
