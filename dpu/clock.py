"""Clocks: time is passed in, never read.

Use: take a ``Clock`` in the constructor and call ``now_ns()``. Code under a ``VirtualClock`` runs in tests
and in simulations at any speed; ``advance_ns()`` moves it.

Units: nanoseconds since an arbitrary start; never goes back. Not wall-clock time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary fixed start."""


class RealClock:
    """CLOCK_MONOTONIC: the same for every process of the machine, so it survives a worker."""

    def now_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


class VirtualClock:
    """A clock that moves when it is told to."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance_ns(self, delta_ns: int) -> None:
        """Move ``delta_ns`` (not negative) forward."""
        assert delta_ns >= 0, delta_ns
        self._now_ns += delta_ns
