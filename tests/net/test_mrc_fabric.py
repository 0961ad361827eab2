"""A gibibyte over a live fabric of 2 planes x (2 T0 + 2 T1), whatever happens to it: counts and memory, never times.

Each case runs twice: small, and with the whole gibibyte (marked slow).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.utils import PcapReader

from net.capture import Capture
from net.fabric import Counters, Fabric
from net.mrc.frame import DSCP
from net.mrc.paths import EvState
from net.switch.model import Cause
from net.switch.settings import FabricSettings
from net.topology import Port, Tier, Topology
from tests.net.transfers import CHUNK, MIB, Pump, Transfer

RATE = 100_000_000
GIB = 1 << 30
SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))
SIZES = [pytest.param(4 * MIB, id="small"), pytest.param(GIB, id="GiB", marks=SLOW)]
EACH_SIZE = pytest.mark.parametrize("size", SIZES)
SETTINGS = FabricSettings(ecn_bytes=20_000, trim_bytes=40_000, last_hop_trim_bytes=40_000)


class Hosts(Pump):
    """A fabric with a live endpoint in each host."""

    def __init__(
        self, stack: contextlib.ExitStack, rate_bps: int = RATE, settings: FabricSettings = SETTINGS
    ) -> None:
        self.fabric = fabric = stack.enter_context(Fabric(Topology(2, 2, 2, 2, rate_bps, rate_bps), settings))
        ends = [fabric.endpoint(f"h{host}", seed=host) for host in range(fabric.topology.hosts)]
        super().__init__(ends)

    def run(self, pairs: Sequence[tuple[int, int]], size: int) -> list[Transfer]:
        """Transfers side by side, to the end, checked."""
        transfers = [Transfer(self, src, dst, size) for src, dst in pairs]
        self.until(lambda: all(transfer.done() for transfer in transfers))
        for transfer in transfers:
            transfer.check()
        return transfers

    def counters(self) -> Iterator[tuple[Port, Port, Counters]]:
        """Of each port, with the one at the other end of its link."""
        for link in self.fabric.wiring.links.values():
            for port, peer in ((link.lower, link.upper), (link.upper, link.lower)):
                yield port, peer, self.fabric.counters(link.name, port.node.name)

    def count(self, cause: Cause) -> int:
        """Packets that met it, anywhere."""
        return sum(counters.packets[cause] for _, _, counters in self.counters())

    def in_switches(self) -> int:
        """Packets that were sent to a switch and have not come to one of its ports yet."""
        sent = sum(each.sent_packets for _, peer, each in self.counters() if peer.node.tier is not Tier.HOST)
        come = sum(sum(each.packets.values()) for port, _, each in self.counters() if port.node.tier is not Tier.HOST)
        return sent - come

    def is_on_disk(self, capture: Capture, link: str) -> bool:
        """Whether all that was sent into a link has passed."""
        return capture.frames == sum(self.fabric.counters(link, by).sent_packets for by in link.split(":"))


@pytest.fixture
def hosts(live: None) -> Iterator[Hosts]:
    """100 Mb/s."""
    with contextlib.ExitStack() as stack:
        yield Hosts(stack)


@EACH_SIZE
def test_no_fault(hosts: Hosts, size: int) -> None:
    (transfer,) = hosts.run([(0, 2)], size)
    assert transfer.counters["sent"] == transfer.placed["placed"] == size // 4096
    assert transfer.counters["timeouts"] == 0
    sent = [hosts.fabric.counters(f"h0:p{plane}-t0-0").packets[Cause.DATA] for plane in range(2)]
    assert min(sent) >= 0.9 * size / 4096 / 2  # both planes are used alike


@EACH_SIZE
def test_one_percent_lost_everywhere(hosts: Hosts, size: int) -> None:
    for link in hosts.fabric.wiring.links:
        hosts.fabric.fault(link, loss=0.01)
    (transfer,) = hosts.run([(0, 3)], size)
    assert transfer.counters["sent"] == transfer.placed["placed"] == size // 4096
    # 1 - 0.99^4 of the writes are lost on the way, and as many of those sent again: 4 % more, in the mean
    assert 0.01 <= transfer.counters["retransmitted"] / transfer.counters["sent"] <= 0.1


@EACH_SIZE
def test_a_plane_is_cut_and_restored_meanwhile(hosts: Hosts, size: int) -> None:
    """The receiver's port in plane 1 loses its carrier: both ends leave the plane, and come back to it."""
    transfer = Transfer(hosts, 0, 2, size, share=0.5)
    fabric, mine = hosts.fabric, "h0:p1-t0-0"
    hosts.until(lambda: transfer.done(0.25))
    fabric.fault("h2:p1-t0-1", down=True)
    hosts.until(lambda: all((state is EvState.DENIED) == (ev >> 16 == 1) for ev, state in transfer.states().items()))
    before = fabric.counters(mine).packets[Cause.DATA]
    transfer.post(0.75)
    hosts.until(lambda: transfer.done(0.75))
    assert fabric.counters(mine).packets[Cause.DATA] == before  # nothing more by this plane
    fabric.fault("h2:p1-t0-1", down=False)
    transfer.post()
    hosts.until(lambda: set(transfer.states().values()) == {EvState.GOOD})
    hosts.until(transfer.done)
    transfer.check()
    again = hosts.run([(1, 2)], MIB)[0]
    assert again.counters["sent"] == 256 and fabric.counters("h1:p1-t0-0").packets[Cause.DATA] >= 100


@EACH_SIZE
def test_a_t1_swallows_everything_and_comes_back(hosts: Hosts, size: int) -> None:
    """It stays up, so nobody is told: its EVs are left, all others stay, and it is used again when it answers."""
    transfer = Transfer(hosts, 0, 2, size, share=0.5)
    hosts.until(lambda: transfer.done(0.25))
    hosts.fabric.blackhole("p0-t1-1")
    hosts.until(lambda: transfer.states()[1] is EvState.ASSUMED_BAD)
    transfer.post()
    hosts.until(transfer.done)
    transfer.check()
    bad = [ev for ev, state in transfer.states().items() if state is EvState.ASSUMED_BAD]
    assert bad == [1]
    assert 0 < hosts.count(Cause.DOWN) < 0.1 * transfer.counters["sent"]
    hosts.fabric.blackhole("p0-t1-1", False)
    hosts.until(lambda: transfer.states()[1] is EvState.GOOD)


@EACH_SIZE
def test_damaged_doubled_and_overtaken_packets(hosts: Hosts, size: int) -> None:
    for link in hosts.fabric.wiring.links:
        hosts.fabric.fault(link, corrupt=0.01, duplicate=0.02, reorder=0.02)
    (transfer,) = hosts.run([(1, 2)], size)
    assert sum(end.refused["icrc"] for end in hosts.ends) > 0
    assert transfer.placed["duplicates"] > 0 and transfer.counters["retransmitted"] > 0
    assert transfer.placed["placed"] == size // 4096


@pytest.mark.parametrize(
    ("size", "rate_bps"),
    [pytest.param(3 * MIB // 2, 5_000_000, id="small"), pytest.param(GIB, 20_000_000, id="GiB", marks=SLOW)],
)
def test_an_incast_is_trimmed_asked_for_and_sent_again(live: None, size: int, rate_bps: int) -> None:
    """3:1 at a rate that one thread can overload: every trim is a NACK is sent again, and nothing times out.

    (A SACK by the one plane may overtake a NACK by the other, and says first what is missing.)
    """
    with contextlib.ExitStack() as stack:
        hosts = Hosts(stack, rate_bps)
        transfers = hosts.run([(src, 3) for src in range(3)], size // 3 // CHUNK * CHUNK)
        trims, counters = hosts.count(Cause.TRIM), sum((transfer.counters for transfer in transfers), Counter())
        assert trims > 0
        assert counters["nacks"] == counters["retransmitted"] == trims
        assert counters["timeouts"] == 0
        assert counters["inferred"] == counters["stale nacks"] <= 1 + trims / 100


@pytest.mark.parametrize("engine", ["kernel", "ebpf"])  # in Scapy a packet takes milliseconds
def test_what_the_wire_shows_of_cut_frames_and_marks(live: None, tmp_path: Path, engine: str) -> None:
    """A 3:1 incast, one link before the last hop slower: what is cut where, as any reader of pcap files sees it."""
    with contextlib.ExitStack() as stack:
        hosts = Hosts(stack, 5_000_000, replace(SETTINGS, engine=engine))
        fabric = hosts.fabric
        fabric.set_rate("p0-t0-1:p0-t1-0", 1_000_000, by="p0-t1-0")
        lasts = ["h3:p0-t0-1", "h3:p1-t0-1"]
        captures = [fabric.capture(link, tmp_path / f"{link}.pcap") for link in lasts]
        hosts.run([(src, 3) for src in range(3)], MIB // 2)
        # What was sent twice may still stand in a queue.
        hosts.until(lambda: hosts.in_switches() == 0 and all(map(hosts.is_on_disk, captures, lasts)))
        for capture in captures:
            capture.close()
        assert [capture.lost for capture in captures] == [0, 0]
        marks, trims, last_trims = hosts.count(Cause.ECN), hosts.count(Cause.TRIM), 0
        for link in lasts:
            packets = fabric.counters(link, by=link.partition(":")[2]).packets
            assert packets[Cause.ECN] == 0
            last_trims += packets[Cause.TRIM]
    frames = [frame for link in lasts for frame in PcapReader(str(tmp_path / f"{link}.pcap")) if to_h3(frame)]
    assert sum(frame[IPv6].tc & 3 == 3 for frame in frames) == marks > 0  # each was marked before the last hop
    cut = {
        dscp: [frame for frame in frames if frame[IPv6].tc >> 2 == dscp]
        for dscp in (DSCP.trimmed, DSCP.trimmed_lasthop)
    }
    assert [len(some) for some in cut.values()] == [trims - last_trims, last_trims]
    assert min(trims - last_trims, last_trims) > 0
    for frame in [*cut[DSCP.trimmed], *cut[DSCP.trimmed_lasthop]]:
        assert len(frame) == frame.wirelen == 128
        assert frame[IPv6].plen == 128 - 14 - 40 and frame[IPv6].nh == 41
        assert frame[IPv6].payload.plen > 4096  # the inner header says how long it was
    whole = [frame for frame in frames if len(frame) > 4096]
    assert {frame[IPv6].tc >> 2 for frame in whole} == {DSCP.trimmable, DSCP.trimmable_retx}
    assert all(frame[IPv6].plen == len(frame) - 14 - 40 for frame in whole)


def to_h3(frame: Ether) -> bool:
    return bool(frame[IPv6].payload.dst.startswith("fd00:") and frame[IPv6].payload.dst.endswith("::4"))
