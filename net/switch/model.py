"""The queue of a switch port, in plain Python: what every switch engine must decide, packet by packet.

A port is a server of a line rate. Its state is one virtual finish time: when everything accepted so far will have
left. The backlog is finish - now; nothing is taken out of a queue, so a packet costs a few operations. In order:

    down or lost at random       dropped
    priority class               accepted while that class's own backlog is within its limit
    backlog > limit              dropped
    backlog > trim threshold     cut to the trim size and sent in the priority class (trimmable, and longer than that)
    backlog > ECN threshold      marked, if ECN-capable; accepted
    else                         accepted

Thresholds are compared with what stands in the queue before the packet. The priority class (control, trimmed headers)
is served first: its packets wait for that class only; data waits for both.

Use: ``port = PortQueue(QueueConfig(rate_bps=10**11, ecn_bytes=80_000, trim_bytes=400_000))``;
``verdict = port.offer(now_ps, 4198, ect=True)``.
Time: picoseconds, passed in and never going back; at 100 Gb/s a byte takes 80, so nothing is rounded.
Limits: a data packet's departure is fixed on arrival, so priority packets that come while it waits do not delay it,
only data after it; a priority packet does not wait for the rest of a data packet in transmission.
Source: thresholds in arXiv 2605.04333 section 2.1 (ECN everywhere but on the last hop) and the UET advice of 0.2, 1.0
and 1.5 BDP for ECN, trimming, and trimming on the last hop.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from net.errors import SimError

PS_PER_S = 10**12
BITS = 8


class Action(enum.Enum):
    """What becomes of a packet."""

    PASS = "pass"
    MARK = "mark"
    TRIM = "trim"
    DROP = "drop"


class Cause(enum.Enum):
    """Why: the key of a port's counters."""

    DATA = "data"
    PRIORITY = "priority"
    ECN = "ecn"
    TRIM = "trim"
    DOWN = "down"
    LOSS = "loss"
    LIMIT = "limit"
    PRIORITY_LIMIT = "priority limit"
    TRIM_LIMIT = "trim limit"


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """A port. Thresholds in bytes of backlog; None: never.

    rate_bps: line rate, bits per second. ecn_bytes: None on a port to a host. trim_size_bytes: what is left of a
    trimmed packet. limit_bytes: of data and priority together. priority_limit_bytes: of the priority class.
    """

    rate_bps: int
    ecn_bytes: int | None = None
    trim_bytes: int | None = None
    trim_size_bytes: int = 128
    limit_bytes: int = 1 << 24
    priority_limit_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if self.rate_bps <= 0:
            raise SimError(f"rate_bps is {self.rate_bps}", "give bits per second, above 0; a dead link is down")
        for name in ("ecn_bytes", "trim_bytes", "limit_bytes", "priority_limit_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise SimError(f"{name} is {value}", "give bytes, 0 or more")


class Verdict(NamedTuple):
    """What to do with a packet: its size from now on, and when its last bit has left (None: dropped)."""

    action: Action
    cause: Cause
    size_bytes: int
    departure_ps: int | None


class PortQueue:
    """One direction of one port. ``packets`` and ``bytes_in`` count offers by cause."""

    def __init__(self, config: QueueConfig, rng: random.Random | None = None) -> None:
        self.config = config
        self.down = False
        self.loss = 0.0
        """Share of packets lost at random; needs an ``rng``."""
        self.packets: Counter[Cause] = Counter()
        self.bytes_in: Counter[Cause] = Counter()
        self.sent_bytes = 0
        self._rng = rng
        self._finish_ps = 0
        self._priority_finish_ps = 0
        self._set_rate(config.rate_bps)

    def _set_rate(self, rate_bps: int) -> None:
        config = self.config
        self.rate_bps = rate_bps
        self._ps_per_bit = PS_PER_S // rate_bps if PS_PER_S % rate_bps == 0 else 0
        self._ecn_ps = None if config.ecn_bytes is None else self.transmit_ps(config.ecn_bytes)
        self._trim_ps = None if config.trim_bytes is None else self.transmit_ps(config.trim_bytes)
        self._limit_ps = self.transmit_ps(config.limit_bytes)
        self._priority_limit_ps = self.transmit_ps(config.priority_limit_bytes)

    def transmit_ps(self, size_bytes: int) -> int:
        """How long so many bytes take."""
        if self._ps_per_bit:
            return size_bytes * BITS * self._ps_per_bit
        return size_bytes * BITS * PS_PER_S // self.rate_bps

    def backlog_bytes(self, now_ps: int) -> int:
        """What stands in the queue, both classes."""
        return max(0, self._finish_ps - now_ps) * self.rate_bps // (BITS * PS_PER_S)

    def change_rate(self, now_ps: int, rate_bps: int) -> None:
        """A new line rate from now on; what stands in the queue stays, in bytes."""
        if rate_bps <= 0:
            raise SimError(f"rate_bps is {rate_bps}", "give bits per second, above 0; a dead link is down")
        waiting = [max(0, finish - now_ps) for finish in (self._finish_ps, self._priority_finish_ps)]
        scaled = [now_ps + wait * self.rate_bps // rate_bps for wait in waiting]
        self._finish_ps, self._priority_finish_ps = scaled
        self._set_rate(rate_bps)

    def offer(
        self, now_ps: int, size_bytes: int, *, ect: bool = False, priority: bool = False, trimmable: bool = True
    ) -> Verdict:
        """A packet of ``size_bytes`` (as the wire counts it) arrives; see the table above."""
        verdict = self._decide(now_ps, size_bytes, ect, priority, trimmable)
        self.packets[verdict.cause] += 1
        self.bytes_in[verdict.cause] += size_bytes
        if verdict.departure_ps is not None:
            self.sent_bytes += verdict.size_bytes
        return verdict

    def _decide(self, now_ps: int, size_bytes: int, ect: bool, priority: bool, trimmable: bool) -> Verdict:
        if self.down:
            return Verdict(Action.DROP, Cause.DOWN, size_bytes, None)
        if self.loss and self._random() < self.loss:
            return Verdict(Action.DROP, Cause.LOSS, size_bytes, None)
        if priority:
            return self._accept_priority(now_ps, size_bytes, Action.PASS, Cause.PRIORITY, Cause.PRIORITY_LIMIT)
        backlog_ps = self._finish_ps - now_ps
        if backlog_ps > self._limit_ps:
            return Verdict(Action.DROP, Cause.LIMIT, size_bytes, None)
        trim_size = self.config.trim_size_bytes
        if trimmable and self._trim_ps is not None and backlog_ps > self._trim_ps and size_bytes > trim_size:
            return self._accept_priority(now_ps, trim_size, Action.TRIM, Cause.TRIM, Cause.TRIM_LIMIT)
        self._finish_ps = max(now_ps, self._finish_ps) + self.transmit_ps(size_bytes)
        if ect and self._ecn_ps is not None and backlog_ps > self._ecn_ps:
            return Verdict(Action.MARK, Cause.ECN, size_bytes, self._finish_ps)
        return Verdict(Action.PASS, Cause.DATA, size_bytes, self._finish_ps)

    def _accept_priority(self, now_ps: int, size_bytes: int, action: Action, cause: Cause, full: Cause) -> Verdict:
        if self._priority_finish_ps - now_ps > self._priority_limit_ps:
            return Verdict(Action.DROP, full, size_bytes, None)
        transmit_ps = self.transmit_ps(size_bytes)
        self._priority_finish_ps = max(now_ps, self._priority_finish_ps) + transmit_ps
        self._finish_ps = max(now_ps, self._finish_ps) + transmit_ps
        return Verdict(action, cause, size_bytes, self._priority_finish_ps)

    def _random(self) -> float:
        assert self._rng is not None, "a port with loss needs a random number generator"
        return self._rng.random()
