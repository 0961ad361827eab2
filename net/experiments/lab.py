"""Streams of writes between hosts of a simulated fabric, and what an experiment reads off them.

Everything is scaled: a port carries 10 Gb/s, a plane's bandwidth-delay product is some 28 packets of 4 KiB, and the
paper's seconds are milliseconds here. What carries over are shares of line rate, counts, and times in base round
trips. Switch thresholds follow the UET advice: trim at 1 BDP of a plane, on the last hop at 1.5, mark at 0.8, the
upper end of its range: with a mark at 0.5, a permutation that fills every uplink loses a tenth to skipped turns.
Hosts take up to a packet's time to answer, at random, as Floyd and Jacobson advise (net.sim.network).

Use: ``lab = Lab(fabric, Variant(), seed=1)``; ``stream = lab.stream(0, 4)``; ``lab.run_to(10)``;
``stream.share(2, 10)``; ``lab.check()``.
Time: milliseconds of virtual time in this package, where not said otherwise.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from net.mrc.congestion import NsccSettings
from net.mrc.endpoint import Completion, Endpoint, Kind
from net.mrc.paths import EvState, PathSettings
from net.mrc.requestor import QpSettings, Requestor, Status
from net.sim.mrc import MrcHost, connect, qpn
from net.sim.network import Network, Settings, Stage
from net.switch.model import Cause
from net.topology import Link, Node, Topology

GBPS = 10**9
PORT_BPS = 10 * GBPS
PS_PER_MS = 10**9
DELAY_PS = 10_000_000
PMTU_BYTES = 4096
FRAME_BYTES = 4242
CHUNK_BYTES = 64 * 1024
SAMPLE_MS = 0.1
REGION_CHUNKS = 8
ALL = 1 << 16
TIMEOUT_NS = 524_288
"""1.024 us x 2^9: the first of MRC's steps above four base round trips."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What is switched on. baseline: RC-like queue pairs (net.mrc.rc) instead of MRC's, and queues that hold all."""

    trimming: bool = True
    selective: bool = True
    spray: bool = True
    ecn: bool = True
    skip: bool = True
    baseline: bool = False
    labs: Callable[..., Lab] | None = None
    """What makes labs in place of Lab: net.experiments.live."""

    def lab(self, fabric: Topology, seed: int, *, active: int = ALL) -> Lab:
        """A lab with what is switched on."""
        return (self.labs or Lab)(fabric, self, seed, active=active)


class Host(Protocol):
    """What streams need of a host: net.sim.mrc.MrcHost, or a live one."""

    host: int
    fabric: Topology
    endpoint: Endpoint
    memory: bytearray
    key: int
    on_completion: Callable[[Completion], None] | None

    def write(
        self, other: Any, data: bytes, va: int, request_id: int = 0, immediate: int | None = None, *, lane: int = 0
    ) -> None:
        """See MrcHost.write."""


@dataclass(slots=True)
class Stream:
    """One queue pair kept busy. ``placed`` has, per sample, how many packets were in place at the other end."""

    lab: Lab
    src: int
    dst: int
    lane: int
    placed: list[int]
    posted: int = 0
    completed: int = 0
    failed: Status | None = None
    limit_chunks: int | None = None
    stopped: bool = False

    def rate_bps(self, since_ms: float, until_ms: float) -> float:
        """Payload placed per second of virtual time in a span, whose ends are rounded to samples."""
        first, last = round(since_ms / SAMPLE_MS), round(until_ms / SAMPLE_MS)
        count = self.placed[min(last, len(self.placed) - 1)] - self.placed[min(first, len(self.placed) - 1)]
        return count * PMTU_BYTES * 8 / (until_ms - since_ms) * 1000

    def share(self, since_ms: float, until_ms: float) -> float:
        """Of what all ports of a host carry together, headers taken off."""
        return self.rate_bps(since_ms, until_ms) / self.lab.line_bps


class Lab:
    """A fabric with hosts. active: EVs in turn per stream, the rest are backups."""

    def __init__(
        self,
        fabric: Topology,
        variant: Variant | None = None,
        seed: int = 0,
        *,
        active: int = ALL,
    ) -> None:
        self.fabric = fabric
        self.variant = variant or Variant()
        self.line_bps = fabric.host_rate_bps * fabric.planes * PMTU_BYTES / FRAME_BYTES
        packet_ps = FRAME_BYTES * 8 * 10**12 // fabric.host_rate_bps
        bare = Settings(delay_ps=DELAY_PS, packet_bytes=FRAME_BYTES, jitter_ps=packet_ps)
        rtt_ps = Network(replace(fabric, planes=1), bare).base_rtt_ps()
        self.base_rtt_ms = rtt_ps / PS_PER_MS
        self.plane_bdp_bytes = fabric.host_rate_bps * rtt_ps // (8 * 10**12)
        self.qp = self._qp_settings(rtt_ps // 1000)
        self.posted_chunks = 2 + 10 * self.plane_bdp_bytes * fabric.planes // CHUNK_BYTES
        self.paths = PathSettings(
            active=1 if not self.variant.spray else active,
            ev_min_active=1,
            probe_interval_ns=TIMEOUT_NS,
            probe_interval_max_ns=4 * TIMEOUT_NS,
            skip=self.variant.skip,
        )
        self.hosts: dict[int, Host] = {}
        self.streams: list[Stream] = []
        self._data = random.Random(f"data {seed}").randbytes(REGION_CHUNKS * CHUNK_BYTES)
        self._places: dict[tuple[int, int, int], int] = {}
        self._samples = 0
        self._bring_up(self._switch_settings(bare), seed)

    def _bring_up(self, settings: Settings, seed: int) -> None:
        self.network = Network(self.fabric, settings, seed)

    def _switch_settings(self, bare: Settings) -> Settings:
        bdp, variant = self.plane_bdp_bytes, self.variant
        return replace(
            bare,
            ecn_bytes=bdp * 4 // 5 if variant.ecn else None,
            trim_bytes=bdp if variant.trimming else None,
            last_hop_trim_bytes=bdp * 3 // 2 if variant.trimming else None,
            limit_bytes=bare.host_limit_bytes if variant.baseline else (4 if variant.trimming else 2) * bdp,
        )

    def _qp_settings(self, rtt_ns: int) -> QpSettings:
        fabric, variant = self.fabric, self.variant
        nscc = NsccSettings(rtt_ns, fabric.host_rate_bps * fabric.planes, FRAME_BYTES, variant.trimming)
        return QpSettings(
            PMTU_BYTES,
            int(1.5 * nscc.bdp_bytes),
            mpr=4096,
            timeout_ns=TIMEOUT_NS * (4 if variant.baseline else 1),
            retries=25,
            nscc=None if variant.baseline else nscc,
            selective=variant.selective,
        )

    # Hosts, streams, faults.

    def host(self, number: int) -> Host:
        """The host of a number, made when first asked for."""
        if number not in self.hosts:
            host = self.hosts[number] = self._make_host(number, REGION_CHUNKS * CHUNK_BYTES * 16)
            host.on_completion = self._completed(number)
        return self.hosts[number]

    def _make_host(self, number: int, memory_bytes: int) -> Host:
        return MrcHost(number, self.network, memory_bytes, baseline=self.variant.baseline)

    def stream(
        self,
        src: int,
        dst: int,
        *,
        lanes: int = 1,
        chunks: int | None = None,
        start_ms: float = 0,
        evs: Sequence[int] | None = None,
        active: int | None = None,
    ) -> list[Stream]:
        """``lanes`` queue pairs from ``src`` to ``dst``, each kept busy until stopped or for so many ``chunks``."""
        made: list[Stream] = []
        for _ in range(lanes):
            lane = sum({stream.src, stream.dst} == {src, dst} for stream in self.streams)
            paths = self.paths if active is None else replace(self.paths, active=active)
            connect(self.host(src), self.host(dst), self.qp, paths, psn=0xFFFF00, evs=evs, lane=lane)
            stream = Stream(self, src, dst, lane, [0] * self._samples, limit_chunks=chunks)
            self._places[src, dst, lane] = sum(place[1] == dst for place in self._places)
            self.streams.append(stream)
            made.append(stream)
            self.at(start_ms, partial(self._fill, stream))
        return made

    def _fill(self, stream: Stream) -> None:
        outstanding = stream.posted - stream.completed
        while outstanding < self.posted_chunks and not stream.stopped and stream.posted != stream.limit_chunks:
            place = stream.posted % REGION_CHUNKS * CHUNK_BYTES
            base = self._places[stream.src, stream.dst, stream.lane] * REGION_CHUNKS * CHUNK_BYTES
            self.host(stream.src).write(
                self.host(stream.dst),
                self._data[place : place + CHUNK_BYTES],
                base + place,
                stream.posted,
                lane=stream.lane,
            )
            stream.posted += 1
            outstanding += 1

    def _completed(self, host: int) -> Callable[[Completion], None]:
        def note(completion: Completion) -> None:
            for stream in self.streams:
                if stream.src == host and qpn(stream.dst, stream.lane) == completion.qpn:
                    if completion.kind is Kind.WRITE and completion.status is Status.OK:
                        stream.completed += 1
                        self._fill(stream)
                    elif completion.kind is Kind.WRITE:
                        stream.failed, stream.stopped = completion.status, True

        return note

    @property
    def now_ms(self) -> float:
        """Virtual time."""
        return self.network.sim.now_ps / PS_PER_MS

    def at(self, time_ms: float, action: Callable[[], None]) -> None:
        """Has something happen at a time."""
        self.network.sim.at(round(time_ms * PS_PER_MS), action)

    def run_to(self, time_ms: float) -> None:
        """Lets virtual time pass; what streams have placed is noted on the way."""
        while (sample_ms := self._samples * SAMPLE_MS) <= time_ms:
            self._pass(sample_ms)
            for stream in self.streams:
                pair = self.hosts[stream.dst].endpoint.pairs[qpn(stream.src, stream.lane)]
                stream.placed.append(pair.responder.counters["placed"])
            self._samples += 1
        self._pass(time_ms)

    def _pass(self, until_ms: float) -> None:
        self.network.run(round(until_ms * PS_PER_MS))

    def port(self, host: int, plane: int, *, up: bool) -> None:
        """The link between a NIC and its T0: the NIC sees it."""
        self.network.set_link(self.fabric.host_link(plane, host), down=not up)
        if host in self.hosts:
            self.hosts[host].endpoint.set_port(plane, up=up)
            self.network.nudge(host)

    def link(self, link: Link, *, up: bool) -> None:
        """A link between switches: nobody is told."""
        self.network.set_link(link, down=not up)

    def lossy(self, link: Link, share: float) -> None:
        """A link loses a share of its packets."""
        self.network.set_link(link, loss=share)

    def switch(self, node: Node, *, up: bool) -> None:
        """A switch that forwards nothing while its links stay up."""
        self.network.set_switch(node, down=not up)

    # What was seen.

    def check(self) -> None:
        """Every byte that was completed is in place at the other end; ours if not."""
        for stream in self.streams:
            base = self._places[stream.src, stream.dst, stream.lane] * REGION_CHUNKS * CHUNK_BYTES
            done = min(stream.completed, REGION_CHUNKS) * CHUNK_BYTES
            assert self.hosts[stream.dst].memory[base : base + done] == self._data[:done], stream

    def requestor(self, stream: Stream) -> Requestor:
        """The sending half of a stream."""
        return self.hosts[stream.src].endpoint.pairs[qpn(stream.dst, stream.lane)].requestor

    def states(self, stream: Stream) -> dict[int, EvState | None]:
        """Of all EVs of a stream."""
        paths = self.requestor(stream).paths
        return {ev: paths.state(ev) for ev in self.fabric.evs(stream.src, stream.dst)}

    def counters(self) -> Counter[str]:
        """Of all requestors together."""
        return sum((self.requestor(stream).counters for stream in self.streams), Counter())

    def causes(self) -> Counter[Cause]:
        """What all switch ports did with packets."""
        stages = [Stage.UP, Stage.DOWN, Stage.LAST]
        return sum((self.network.counters(stage) for stage in stages), Counter())


def jain(rates: Sequence[float]) -> float:
    """Jain's fairness index: 1 when all are equal, 1/n when one has everything."""
    total = sum(rates)
    return total * total / (len(rates) * sum(rate * rate for rate in rates)) if total else 0.0


def together(streams: Sequence[Stream], since_ms: float, until_ms: float) -> float:
    """Share of a host's line rate that several streams have together."""
    return sum(stream.share(since_ms, until_ms) for stream in streams)
