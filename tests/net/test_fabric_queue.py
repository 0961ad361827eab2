"""The queue of live ports: same verdicts as the plain model, bytes as net.mrc.frame trims them, order as served."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import partial
from ipaddress import IPv6Address

import pytest
from scapy.layers.inet6 import IPv6
from scapy.packet import Packet

from net.fabric import Fabric
from net.mrc.frame import DSCP, ECN_CE, trim
from net.srv6 import shift
from net.switch.model import Cause, PortQueue
from net.switch.settings import ENGINES, FabricSettings
from net.topology import Path, Topology
from tests.net.frames import first_link, settle, until, write


def slow_bps(fabric: Fabric) -> int:
    """A full-size frame takes 340 ms, a trimmed one 10: while a burst is sent, hardly one leaves (Scapy is slow)."""
    return 10**4 if fabric.settings.engine == "scapy" else 10**5


TOPOLOGY = Topology(
    planes=1, t0_per_plane=2, t1_per_plane=1, hosts_per_t0=2, host_rate_bps=10**10, uplink_rate_bps=10**10
)
SETTINGS = FabricSettings(ecn_bytes=20_000, trim_bytes=60_000, last_hop_trim_bytes=70_000, limit_bytes=85_000)
UPLINK, LAST = "p0-t0-0:p0-t1-0", "h2:p0-t0-1"
ACROSS, FROM_OTHER = Path(0, 2, 0, 0), Path(3, 2, 0, None)
PAYLOAD, FRAME = 4096, 4234


@pytest.fixture(params=ENGINES)
def fabric(live: None, request: pytest.FixtureRequest) -> Iterator[Fabric]:
    settings = FabricSettings(
        **{name: getattr(SETTINGS, name) for name in SETTINGS.__slots__} | {"engine": request.param}
    )
    with Fabric(TOPOLOGY, settings) as one:
        yield one


def burst(fabric: Fabric, path: Path = ACROSS, **more: int) -> list[bytes]:
    """Data of two kinds and control, mixed: 60 frames."""
    kinds = [{"dscp": DSCP.trimmable, "payload": PAYLOAD}] * 4 + [
        {"dscp": DSCP.no_trim, "payload": PAYLOAD},
        {"dscp": DSCP.control, "payload": 64, "ecn": 0},
    ]
    return [write(fabric, path, psn, **kinds[psn % len(kinds)] | more) for psn in range(60)]


def expected(fabric: Fabric, link: str, by: str, frames: list[bytes]) -> Counter[Cause]:
    """What the plain model makes of the burst when it comes all at once."""
    port = fabric.port(link, by)
    queue = PortQueue(fabric.settings.queue(fabric.link(link), port))
    queue.change_rate(0, slow_bps(fabric))
    for frame in frames:
        traffic_class = frame[14] << 4 & 0xF0 | frame[15] >> 4
        queue.offer(
            0,
            len(frame),
            ect=bool(traffic_class & 3),
            priority=traffic_class >> 2 in fabric.settings.priority,
            trimmable=traffic_class >> 2 in fabric.settings.trimmable,
        )
    return queue.packets


@pytest.mark.parametrize(("link", "by"), [(UPLINK, "p0-t0-0"), (LAST, "p0-t0-1")])
def test_a_burst_meets_the_models_verdicts(fabric: Fabric, link: str, by: str) -> None:
    frames = burst(fabric)
    fabric.set_rate(link, slow_bps(fabric), by)
    fabric.send(first_link(fabric, ACROSS), frames)
    settle(fabric, link, by, len(frames))
    found, wanted = fabric.counters(link, by).packets, expected(fabric, link, by, frames)
    for cause in Cause:
        assert abs(found[cause] - wanted[cause]) <= 1, (cause, found, wanted)
    assert sum(found.values()) == len(frames)
    causes = {Cause.DATA, Cause.PRIORITY, Cause.TRIM, Cause.LIMIT} | ({Cause.ECN} if link == UPLINK else set())
    assert {cause for cause in Cause if found[cause] > 1} == causes, "the burst is to meet every verdict"


def ip(frame: bytes) -> bytes:
    return frame[14:]


@pytest.mark.parametrize(
    ("link", "by", "shifts", "dscp"),
    [(UPLINK, "p0-t0-0", 1, DSCP.trimmed), (LAST, "p0-t0-1", 3, DSCP.trimmed_lasthop)],
)
def test_trimmed_frames_are_cut_as_the_reference_cuts(
    fabric: Fabric, link: str, by: str, shifts: int, dscp: int
) -> None:
    """On the wire: 128 bytes, code point, outer length right, the rest as sent; only last hops use their own."""
    fabric.set_rate(link, slow_bps(fabric), by)
    frames = [write(fabric, ACROSS, psn, payload=PAYLOAD) for psn in range(40)]
    wanted = set()
    for frame in frames:
        packet = IPv6(ip(frame))
        packet.hlim -= shifts
        for _ in range(shifts):
            packet.dst = str(shift(IPv6Address(packet.dst)))
        wanted.add(trim(bytes(packet), dscp))

    def is_trimmed(packet: Packet) -> bool:
        return bool(packet.sniffed_on.startswith(by) and packet[IPv6].tc >> 2 == dscp)

    found = fabric.expect(
        link, is_trimmed, after=partial(fabric.send, first_link(fabric, ACROSS), frames), count=15, timeout_s=10
    )
    assert {ip(bytes(packet)) for packet in found} <= wanted
    assert all(len(packet) == fabric.settings.trim_size_bytes for packet in found)


def test_trimmed_headers_overtake_data(fabric: Fabric) -> None:
    """All of them leave before the data that was there first: 14 frames of 34 ms each."""
    fabric.set_rate(UPLINK, 10**6, "p0-t0-0")
    frames = [write(fabric, ACROSS, psn, payload=PAYLOAD) for psn in range(30)]
    found = fabric.expect(
        UPLINK, lambda _: True, after=partial(fabric.send, first_link(fabric, ACROSS), frames), count=28, timeout_s=20
    )
    sizes = [len(packet) for packet in found]
    assert sum(size < FRAME for size in sizes) > 5
    assert sizes[-5:] == [FRAME] * 5, sizes


def test_last_hops_never_mark(fabric: Fabric) -> None:
    """Marks come from between switches alone, so a mark says: choose another path."""
    fabric.set_rate(LAST, slow_bps(fabric), "p0-t0-1")
    fabric.send(
        first_link(fabric, FROM_OTHER), [write(fabric, FROM_OTHER, psn, payload=PAYLOAD) for psn in range(16)]
    )
    settle(fabric, LAST, "p0-t0-1", 16)
    assert fabric.counters(LAST, "p0-t0-1").packets[Cause.ECN] == 0
    fabric.set_rate(UPLINK, 10**6, "p0-t0-0")
    send = partial(
        fabric.send, first_link(fabric, ACROSS), [write(fabric, ACROSS, psn, payload=PAYLOAD) for psn in range(9)]
    )
    found = fabric.expect(UPLINK, lambda _: True, after=send, count=9, timeout_s=10)
    marks = [packet[IPv6].tc & 3 == ECN_CE for packet in found]
    assert marks == sorted(marks)
    assert abs(sum(marks) - fabric.counters(UPLINK, "p0-t0-0").packets[Cause.ECN]) == 0
    assert 1 < sum(marks) < 9


@pytest.mark.skipif(shutil.which("tc") is None, reason="iproute2's tc is the witness")
def test_the_line_charges_trimmed_headers_for_what_they_are(fabric: Fabric) -> None:
    """Trimming behind the kernel's back would have HTB serve each header like the frame that it was."""
    if fabric.settings.engine == "scapy":
        pytest.skip("has no HTB")
    fabric.set_rate(UPLINK, 10**6, "p0-t0-0")
    frames = [write(fabric, ACROSS, psn, payload=PAYLOAD) for psn in range(30)]
    fabric.expect(
        UPLINK,
        lambda packet: len(packet) < FRAME,
        after=partial(fabric.send, first_link(fabric, ACROSS), frames),
        count=12,
        timeout_s=20,
    )
    trims = fabric.counters(UPLINK, "p0-t0-0").packets[Cause.TRIM]

    def served() -> tuple[int, int]:
        with fabric.inside("p0-t0-0"):
            shown = subprocess.run(
                ["tc", "-s", "class", "show", "dev", "p0-t1-0"], capture_output=True, text=True, check=True
            )
        [(size, packets)] = re.findall(r"class htb 1:1 .*?Sent (\d+) bytes (\d+) pkt", shown.stdout, re.S)
        return int(size), int(packets)

    until(lambda: served()[1] == trims, "all headers")
    assert served() == (trims * fabric.settings.trim_size_bytes, trims)
