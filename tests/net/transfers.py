"""Transfers between live MRC endpoints: what is written, what must be there afterwards, what was counted."""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from net.mrc.endpoint import Kind
from net.mrc.live import LIVE, LiveEndpoint, poll_all
from net.mrc.paths import EvState
from net.mrc.requestor import Identity, QpSettings, Status

MIB = 1 << 20
CHUNK = 256 * 1024
STALL_S = 60


def content(size: int, seed: int) -> bytes:
    rng, step = random.Random(seed), 16 * MIB  # randbytes needs its result twice
    return b"".join(rng.randbytes(min(step, size - start)) for start in range(0, size, step))


def qpn(peer: int) -> int:
    return 0x100 + peer


class Pump:
    """Endpoints driven by this thread; ``seen`` has the values of what completed at a host's queue pair."""

    def __init__(self, ends: Sequence[LiveEndpoint]) -> None:
        self.ends = ends
        self.seen: defaultdict[tuple[int, int, Kind], list[int]] = defaultdict(list)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STALL_S
        while not done():
            assert time.monotonic() < deadline, [
                (end.engine.counters, [pair.requestor.counters for pair in end.engine.pairs.values()])
                for end in self.ends
            ]
            for end, completion in poll_all(self.ends, 0.02):
                assert completion.status is Status.OK
                self.seen[end.host, completion.qpn, completion.kind].append(completion.value)
                deadline = time.monotonic() + STALL_S


class Transfer:
    """``src`` writes ``size`` bytes into the memory of ``dst``, in chunks, each with an immediate; see ``post``."""

    def __init__(
        self, pump: Pump, src: int, dst: int, size: int, settings: QpSettings = LIVE, share: float = 1
    ) -> None:
        self.pump = pump
        self.src, self.dst = pump.ends[src], pump.ends[dst]
        self.data = content(size, src)
        self.memory = bytearray(size)
        self.numbers = list(range(-(-size // CHUNK)))
        self.key = self.dst.register(self.memory, 0)
        self.posted = 0
        self.src.connect(Identity(qpn(dst), dst, qpn(src), 0xFFFF00, 5), settings)
        self.dst.connect(Identity(qpn(src), src, qpn(dst), 5, 0xFFFF00), settings)
        self.written = pump.seen[src, qpn(dst), Kind.WRITE]
        self.told = pump.seen[dst, qpn(src), Kind.IMMEDIATE]

        self.post(share)

    def post(self, share: float = 1) -> None:
        """Has the chunks up to this share of all written."""
        view, until = memoryview(self.data), int(share * len(self.numbers))
        for n in self.numbers[self.posted : until]:
            part = view[n * CHUNK : (n + 1) * CHUNK]
            self.src.write(qpn(self.dst.host), n, part, n * CHUNK, self.key, immediate=n)
        self.posted = until

    def done(self, share: float = 1) -> bool:
        return min(len(self.written), len(self.told)) >= share * len(self.numbers)

    def check(self) -> None:
        """Every byte is there; everything completed once, in order."""
        assert self.written == self.told == self.numbers
        assert self.memory == self.data

    @property
    def counters(self) -> Counter[str]:
        return self.src.engine.pairs[qpn(self.dst.host)].requestor.counters

    @property
    def placed(self) -> Counter[str]:
        return self.dst.engine.pairs[qpn(self.src.host)].responder.counters

    def states(self) -> dict[int, EvState | None]:
        paths = self.src.engine.pairs[qpn(self.dst.host)].requestor.paths
        return {ev: paths.state(ev) for ev in self.src.plan.fabric.evs(self.src.host, self.dst.host)}
