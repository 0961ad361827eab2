"""Gates of back ends as control sees them: rate limits, and the kept area that pollers read (dpu.fastpath.gate).

Use: ``Gates.create()`` once per daemon (the keeper holds the memfd under ``STASH_KEY``), ``Gates(fd)`` in the next
worker; ``set_limits(number, limits)`` for the gate ``number``, which dpu.target gives out; ``address(number)`` for
flows.

Without a burst a limit lets pass at once what it grants in BURST_NS, SPDK's time slice; with one, so many I/Os or
MiB.
Limits: layout.GATES gates.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpu import layout
from dpu.fastpath import gate
from dpu.fastpath.poller import now, tick_rate
from dpu.faults import Fault
from dpu.qos import Limits

STASH_KEY = "gates"
BURST_NS = 1_000_000
_TOLERANCE_MAX = 1 << 60  # ticks: years


class Gates:
    """:param fd: the memfd, owned from now on; the keeper holds a duplicate."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._area = np.frombuffer(mmap.mmap(fd, layout.GATES_BYTES), np.uint8)
        self.base: int = self._area.ctypes.data
        self._places: dict[int, set[int]] = {}

    @classmethod
    def create(cls) -> Gates:
        fd = os.memfd_create("gates", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, layout.GATES_BYTES)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        os.close(self.fd)

    def address(self, number: int) -> int:
        """Of the gate ``number``."""
        return int(self.base + layout.GATE_BYTES * number)

    def record(self, number: int) -> Any:
        """The gate ``number`` as a layout.GATE."""
        return np.frombuffer(self._area, layout.GATE, 1, layout.GATE_BYTES * number).view(np.recarray)[0]

    def rule(self, number: int) -> Any:
        """The rule ``number`` (from 1) as a layout.RULE."""
        at = layout.RULES_OFFSET + layout.RULE_BYTES * (number - 1)
        return np.frombuffer(self._area, layout.RULE, 1, at).view(np.recarray)[0]

    def set_rules(self, number: int, faults: Sequence[Fault]) -> None:
        """Make the rules of a gate these faults', in this order; those that are there already go on counting.

        Pollers may walk the chain meanwhile: its order never changes, rules only come at its end and go.
        """
        wanted = [fault.number for fault in faults]
        chain = self._chain(number)
        for fault in faults:
            if fault.number not in chain or self.rule(fault.number).serial != fault.serial:
                self._write_rule(fault)
        for old in chain:
            if old not in wanted:
                self.rule(old).live = 0
        for one, following in zip(wanted, [*wanted[1:], 0]):
            self.rule(one).following = following
        self.record(number).rules = wanted[0] if wanted else 0

    def _chain(self, number: int) -> list[int]:
        found, at = [], int(self.record(number).rules)
        while at:
            found.append(at)
            at = int(self.rule(at).following)
        return found

    def _write_rule(self, fault: Fault) -> None:
        row = self.rule(fault.number)
        row.live = 0
        for name, value in fault.rule().items():
            row[name] = value
        delay = np.frombuffer(
            self._area, layout.DELAY, 1, layout.DELAYS_OFFSET + layout.DELAY_BYTES * (fault.number - 1)
        )
        delay[0][:] = [ns * tick_rate() // 1_000_000_000 for ns in fault.quantiles_ns()]
        row.following, row.live = 0, 1

    def enter(self, number: int) -> tuple[int, int]:
        """The gate for one more flow: its address, and a place that takes turns, or -1 when all are taken."""
        taken = self._places.setdefault(number, set())
        place = next((one for one in range(layout.PLACES) if one not in taken), -1)
        taken.add(place)
        return self.address(number), place

    def leave(self, address: int, place: int) -> None:
        """A flow has gone, and none of its commands waits."""
        number = (address - self.base) // layout.GATE_BYTES
        if place >= 0:
            self.record(number).waiting[place] = 0
            self._places[number].discard(place)

    def adopt(self, number: int) -> None:
        """Take a gate over from a dead worker: nobody waits at it yet."""
        self.record(number).waiting = 0

    def clear(self, number: int) -> None:
        """Make the gate ``number`` one without limits and rules; nothing uses it."""
        row = self.record(number)
        for name in layout.GATE.names or ():
            row[name] = 0

    def set_limits(self, number: int, limits: Limits) -> None:
        """Change limits; pollers are told by the caller, for commands that wait."""
        per_second, begin = tick_rate(), now()
        for index, name in enumerate(layout.BUCKETS):
            rate, burst = limits.bucket(name)
            per_unit = max((per_second << layout.PER_UNIT_SHIFT) // rate, 1) if rate else 0
            tolerance = per_second * BURST_NS // 1_000_000_000
            if rate and burst:
                tolerance = min(burst * per_second // rate, _TOLERANCE_MAX)
            gate.set_bucket(
                self.address(number) + layout.GATE_BUCKETS + index * layout.BUCKET_BYTES, per_unit, tolerance, begin
            )
