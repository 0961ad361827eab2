"""The paper's experiments on live fabrics: net.experiments.cases over the kernel's switches and real endpoints.

Everything is as in simulation (net.experiments.lab) but for two things. Packets are frames, which namespaces forward
and eBPF queues mark, cut and drop. And time is dilated: with a dilation of 4000, a port of 10 Gb/s is one of
2.5 Mb/s, a millisecond takes four seconds, and rates, thresholds, timeouts and windows keep their proportions. A
host's receiver delays what it takes, as the cables of the simulation do. Results are shares and counts; nothing here
is a latency.

Use: ``run(["C6"], [1])`` for the table; ``with Stage(4000) as stage: CASES["C6"].run(1, Variant(labs=stage.lab))``.
A case that does not pass where this process came too late to keep ports busy is run again, twice as slowly.
Limits: as net.fabric; one thread runs all endpoints, so some thousands of packets a second are what it can do.
Errors: NetError; SimError for a case that does not run live.
Source: Gupta et al., To Infinity and Beyond: Time-Warped Network Emulation (NSDI 2006), for dilation.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any

from net.errors import SimError
from net.experiments import table
from net.experiments.cases import Outcome
from net.experiments.lab import ALL, PORT_BPS, Lab, Variant
from net.fabric import Fabric
from net.mrc.endpoint import Completion
from net.mrc.live import LiveEndpoint, poll_all
from net.sim.mrc import qpn
from net.sim.network import Settings
from net.switch.model import Cause
from net.switch.settings import FabricSettings
from net.topology import Link, Node, Tier, Topology

LIVE = {"C6": 4000, "C7": 4000, "C12": 4000, "C13": 1000, "C17": 4000, "C21": 2000, "C22": 8000}
"""Cases that run live, and their dilation: such that some 1000 packets a second are to be sent."""

NOTE = (
    f"{table.SHARES}; live: frames over network namespaces, in time dilated as each line says. Base RTT 94 us of the "
    f"dilated time, mostly the receivers' delay. Functional results, no latencies. {table.RECONSTRUCTED}"
)

DELAY_NS = 30_000
"""Of the 47 us that a way takes in simulation; the frames' own time and this process's come to the rest."""

STARVED_MAX = 0.01
AHEAD = 4
_NS_PER_MS = 10**6
_DOUBLINGS = 3


class LiveHost:
    """See net.experiments.lab.Host."""

    def __init__(self, live: LiveEndpoint, memory_bytes: int) -> None:
        self.host = live.host
        self.fabric = live.plan.fabric
        self.live = live
        self.endpoint = live.engine
        self.memory = bytearray(memory_bytes)
        self.key = live.register(self.memory, 0)
        self.on_completion: Callable[[Completion], None] | None = None

    def write(
        self, other: Any, data: bytes, va: int, request_id: int = 0, immediate: int | None = None, *, lane: int = 0
    ) -> None:
        """Posts a write into the other's memory."""
        self.live.write(qpn(other.host, lane), request_id, data, va, other.key, immediate)


class LiveLab(Lab):
    """A lab whose fabric is live, for as long as ``stage`` is. Its clock starts with the first ``run_to``."""

    def __init__(self, stage: Stage, fabric: Topology, variant: Variant, seed: int, *, active: int = ALL) -> None:
        self.stage = stage
        self.dilation = stage.dilation
        self._live: dict[int, LiveHost] = {}
        self._actions: list[tuple[float, int, Callable[[], None]]] = []
        self._began_ns: int | None = None
        super().__init__(fabric, variant, seed, active=active)

    def _bring_up(self, settings: Settings, seed: int) -> None:
        self._seed = seed
        rates = (self.fabric.host_rate_bps // self.dilation, self.fabric.uplink_rate_bps // self.dilation)
        real = replace(self.fabric, host_rate_bps=rates[0], uplink_rate_bps=rates[1])
        queues = FabricSettings(
            ecn_bytes=settings.ecn_bytes,
            trim_bytes=None if self.variant.baseline else settings.trim_bytes,
            last_hop_trim_bytes=None if self.variant.baseline else settings.last_hop_trim_bytes,
            limit_bytes=settings.limit_bytes,
        )
        self.live = self.stage.stack.enter_context(Fabric(real, queues))

    def _make_host(self, number: int, memory_bytes: int) -> LiveHost:
        end = self.live.endpoint(
            f"h{number}",
            seed=self._seed << 8 | number,
            dilation=self.dilation,
            delay_ns=DELAY_NS,
            ahead=AHEAD * self.fabric.host_rate_bps // PORT_BPS,
            baseline=self.variant.baseline,
        )
        self._live[number] = LiveHost(end, memory_bytes)
        return self._live[number]

    # Time.

    @property
    def now_ms(self) -> float:
        """Of the experiment: so many times slower than the machine's."""
        elapsed_ns = 0 if self._began_ns is None else time.monotonic_ns() - self._began_ns
        return elapsed_ns / self.dilation / _NS_PER_MS

    def at(self, time_ms: float, action: Callable[[], None]) -> None:
        """See Lab.at."""
        heapq.heappush(self._actions, (time_ms, len(self._actions), action))

    def _pass(self, until_ms: float) -> None:
        if self._began_ns is None:
            self._began_ns = time.monotonic_ns()
        ends = [host.live for host in self._live.values()]
        while True:
            while self._actions and self._actions[0][0] <= self.now_ms:
                heapq.heappop(self._actions)[2]()
            left_ms = min([until_ms, *(action[0] for action in self._actions[:1])]) - self.now_ms
            if left_ms <= 0 and self.now_ms >= until_ms:
                return
            for end, completion in poll_all(ends, max(0.0, left_ms) * self.dilation / 1000):
                done = self._live[end.host].on_completion
                assert done is not None
                done(completion)

    @property
    def starved(self) -> float:
        """The greatest share of time that a host's ports had nothing to send because this process was late."""
        assert self._began_ns is not None
        most = max(host.live.starved_ns for host in self._live.values())
        return most / (time.monotonic_ns() - self._began_ns)

    # Faults.

    def port(self, host: int, plane: int, *, up: bool) -> None:
        """The NIC sees its carrier go, and come back."""
        self.live.fault(self.fabric.host_link(plane, host).name, down=not up)

    def link(self, link: Link, *, up: bool) -> None:
        """See Lab.link."""
        self.live.fault(link.name, down=not up)

    def lossy(self, link: Link, share: float) -> None:
        """See Lab.lossy."""
        self.live.fault(link.name, loss=share)

    def switch(self, node: Node, *, up: bool) -> None:
        """See Lab.switch."""
        self.live.blackhole(node.name, not up)

    def causes(self) -> Counter[Cause]:
        """See Lab.causes."""
        counted: Counter[Cause] = Counter()
        for link in self.live.wiring.links.values():
            for port in (link.lower, link.upper):
                if port.node.tier is not Tier.HOST:
                    counted.update(self.live.counters(link.name, port.node.name).packets)
        return counted


class Stage:
    """Makes live labs and takes them down at its end."""

    def __init__(self, dilation: int) -> None:
        self.dilation = dilation
        self.labs: list[LiveLab] = []
        self.stack = ExitStack()

    def lab(self, fabric: Topology, variant: Variant, seed: int, *, active: int = ALL) -> LiveLab:
        """For Variant.labs."""
        self.labs.append(LiveLab(self, fabric, variant, seed, active=active))
        return self.labs[-1]

    @property
    def starved(self) -> float:
        """Of its labs, the greatest."""
        return max((lab.starved for lab in self.labs), default=0.0)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.close()


def one(name: str, seed: int, variant: Variant, dilation: int | None = None) -> Outcome:
    """A case, in time that is slow enough for this machine; the outcome says how slow that was.

    dilation: to begin with (None: the case's own).
    """
    for attempt in range(_DOUBLINGS + 1):
        with Stage((dilation or LIVE[name]) << attempt) as stage:
            outcome = table.one((name, seed, replace(variant, labs=stage.lab)))
            starved = stage.starved
        if outcome.passed or starved <= STARVED_MAX:
            break
    outcome.ours += f" (dilated {stage.dilation} times: ports of {PORT_BPS / stage.dilation / 10**6:g} Mb/s)"
    outcome.figures |= {"dilation": stage.dilation, "starved": starved}
    if not outcome.passed and starved > STARVED_MAX:
        outcome.ours += f"; this machine did not keep pace: ports stood idle for {100 * starved:.0f} % of the time"
    return outcome


def run(
    names: Sequence[str],
    seeds: Sequence[int],
    variant: Variant | None = None,
    dilation: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[table.Result]:
    """Every case with every seed, one after the other; the rows of the table."""
    names, variant = table.chosen(names, LIVE, "live experiment"), variant or Variant()
    if dilation is not None and dilation < 1:
        raise SimError(f"a dilation of {dilation}", "give 1 or more; 1000 makes a port of 10 Gb/s one of 10 Mb/s")
    rows: list[table.Result] = []
    for name in names:
        outcomes = []
        for seed in seeds:
            outcomes.append(one(name, seed, variant, dilation))
            progress(len(rows) * len(seeds) + len(outcomes), len(names) * len(seeds))
        rows.append(table.result(name, seeds, outcomes))
    return rows
