"""The ports of an endpoint, so that what is sent waits here and not in a queue behind.

Each port is one virtual time at which all that was given to it will have left. It has room while less than
``ahead`` full frames wait; a queue pair then draws an EV of a plane with room, and a packet's timer starts when it
really goes.

Use: ``ports = Ports(rate_bps=10**10)``; ``ports.has_room(plane, now_ns)``; ``ports.take(plane, now_ns, size)``;
``ports.room_ns(now_ns)``. Without a rate there is always room.
Time: nanoseconds, passed in.
Source: OCP-MRC-1.0 through its readers (an EV is chosen among those whose port is free); how much waits is ours.
"""

from __future__ import annotations


class Ports:
    """``rate_bps``: of each port; None for no limit. ``frame_bytes``: a full one.

    ahead: more where who asks may come late; it delays what comes after, as any queue does.
    """

    def __init__(self, rate_bps: int | None = None, frame_bytes: int = 4242, ahead: int = 2) -> None:
        self._ps_per_byte = 8 * 10**12 / rate_bps if rate_bps else 0.0
        self._room_ps = ahead * frame_bytes * self._ps_per_byte
        self._finish_ps: dict[int, float] = {}
        self.limited = rate_bps is not None
        """Whether there are times without room."""

    def has_room(self, plane: int, now_ns: int) -> bool:
        """Whether a packet may go by this port now."""
        return not self.limited or self._finish_ps.get(plane, 0) - now_ns * 1000 < self._room_ps

    def take(self, plane: int, now_ns: int, size_bytes: int) -> None:
        """A packet goes by this port."""
        if self.limited:
            now_ps = now_ns * 1000
            self._finish_ps[plane] = max(now_ps, self._finish_ps.get(plane, 0)) + size_bytes * self._ps_per_byte

    @property
    def slack_ns(self) -> int:
        """How much later than ``room_ns`` says one may come before a port has nothing left to send."""
        return int(self._room_ps / 2 / 1000)

    def room_ns(self, now_ns: int) -> int | None:
        """When the next of the ports that are full now is half empty; None when none is full."""
        full = [finish for finish in self._finish_ps.values() if finish - now_ns * 1000 >= self._room_ps]
        return int((min(full) - self._room_ps / 2) / 1000) + 1 if full else None
