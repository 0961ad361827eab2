"""A virtual clock and its events.

Use: ``sim = Simulator()``; ``sim.at(sim.now_ps + 1000, function, argument)``; ``sim.run(until_ps=10**9)``.
Events of the same time run in the order in which they were asked for, so a run repeats exactly.
Time: picoseconds. Errors: SimError for an event in the past.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from net.errors import SimError


class Simulator:
    """``now_ps`` is the time of the event that runs; ``events`` counts them."""

    def __init__(self) -> None:
        self.now_ps = 0
        self.events = 0
        self._order = 0
        self._heap: list[tuple[int, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, time_ps: int, function: Callable[..., None], *arguments: Any) -> None:
        """Calls ``function(*arguments)`` when the clock gets to ``time_ps``."""
        if time_ps < self.now_ps:
            raise SimError(f"an event at {time_ps} ps, and it is {self.now_ps} ps", "events lie ahead")
        self._order += 1
        heapq.heappush(self._heap, (time_ps, self._order, function, arguments))

    def run(self, until_ps: int | None = None) -> None:
        """Runs what is due until and at ``until_ps`` and leaves the clock there; None: until nothing is left."""
        heap = self._heap
        while heap and (until_ps is None or heap[0][0] <= until_ps):
            self.now_ps, _, function, arguments = heapq.heappop(heap)
            self.events += 1
            function(*arguments)
        if until_ps is not None:
            self.now_ps = max(self.now_ps, until_ps)
