"""The entropy values of a queue pair: which may be used, which next, which are out and when they are tried again.

    GOOD         in turn, planes one after the other
    SKIP         passed over once, because of a mark or a trim: one episode costs one turn. When every EV in turn is
                 skipped, a backup of the plane takes the last one's place
    ASSUMED_BAD  out, a backup of the same plane in its place; probed until it answers often enough
    DENIED       out by order (a controller, or a port that is down, ours or the peer's); never probed

Use: ``paths = EvProfile(evs, plane_of, PathSettings(), rng)``; ``ev = paths.next_ev()``; ``paths.skip(ev)``;
``paths.suspect(ev, now_ns)``; ``paths.probes_due(now_ns)``; ``paths.probed(ev)``; ``paths.close({1}, now_ns)``.
Time: nanoseconds, passed in.
Source: arXiv 2605.04333 sections 2.1, 2.4, 4 and 5.2.5 (marked, a flow moves to an inactive EV); OCP-MRC-1.0 sections
9.1-9.4 and 11.2.2 through its readers. Probe intervals and counts, how many EVs are backups where nothing is said,
when a skip calls for a backup, and that planes alternate inside the random order, are ours.
"""

from __future__ import annotations

import enum
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass


class EvState(enum.Enum):
    """See the module."""

    GOOD = "good"
    SKIP = "skip"
    ASSUMED_BAD = "assumed bad"
    DENIED = "denied"


_GOOD = EvState.GOOD


@dataclass(frozen=True, slots=True)
class PathSettings:
    """active: how many EVs take turns, the others are backups; 0 for three quarters of each plane's.

    ev_min_active: fewer are never left by suspicion. probe_interval_ns: first wait of a suspected EV, doubled up to
    probe_interval_max_ns while it does not answer. probe_successes: answers in a row that bring it back.
    reshuffle_turns: circles after which the order changes, so that queue pairs do not march in step. skip: whether
    marks and trims make an EV lose its turn; off only to see what that is worth.
    """

    active: int = 0
    ev_min_active: int = 2
    probe_interval_ns: int = 1_000_000
    probe_interval_max_ns: int = 1_000_000_000
    probe_successes: int = 3
    reshuffle_turns: int = 16
    skip: bool = True


@dataclass(slots=True)
class _Probation:
    due_ns: int
    interval_ns: int
    successes: int = 0
    answered: bool = True


class EvProfile:
    """``changes`` counts transitions by (from, to)."""

    def __init__(
        self, evs: Sequence[int], plane_of: Callable[[int], int], settings: PathSettings, rng: random.Random
    ) -> None:
        assert evs and len(set(evs)) == len(evs)
        self.settings = settings
        self.changes: Counter[tuple[EvState, EvState]] = Counter()
        self._plane_of = plane_of
        self._rng = rng
        self._states = dict.fromkeys(evs, EvState.GOOD)
        self._probation: dict[int, _Probation] = {}
        self._closed: frozenset[int] = frozenset()
        self._closed_evs: set[int] = set()
        planes = Counter(map(plane_of, evs))
        wanted = settings.active or len(planes) * -(-3 * max(planes.values()) // 4)
        self._active = self._interleaved(evs)[:wanted]
        self._share = Counter(map(plane_of, self._active))
        self._cursor = 0
        self._turns = 0

    def _interleaved(self, evs: Sequence[int]) -> list[int]:
        """All EVs, one of each plane in turn, so that no port gets two packets at once; at random otherwise."""
        planes: dict[int, list[int]] = {}
        for ev in evs:
            planes.setdefault(self._plane_of(ev), []).append(ev)
        for group in planes.values():
            self._rng.shuffle(group)
        groups = list(planes.values())
        self._rng.shuffle(groups)
        return [group[n] for n in range(max(map(len, groups))) for group in groups if n < len(group)]

    # What there is.

    def state(self, ev: int) -> EvState | None:
        """None for an EV that is not of this profile."""
        return self._states.get(ev)

    @property
    def states(self) -> dict[int, EvState]:
        """Of all EVs."""
        return dict(self._states)

    def plane(self, ev: int) -> int:
        """The plane of an EV."""
        return self._plane_of(ev)

    @property
    def active(self) -> list[int]:
        """EVs that take turns, in their order: GOOD or SKIP."""
        return list(self._active)

    # Turns.

    def next_ev(self, avoid: int | None = None, has_room: Callable[[int], bool] | None = None) -> int | None:
        """The EV for a packet, of a plane that has room, not ``avoid`` where there is another; None when all are out.

        At most one SKIP turns GOOD per packet, and is itself used only when the whole circle has nothing better.
        """
        restored: int | None = None
        avoided: int | None = None
        for _ in range(len(self._active)):
            ev = self._advance()
            if has_room is not None and not has_room(self._plane_of(ev)):
                continue
            if self._states[ev] is EvState.SKIP:
                if restored is None:
                    restored = ev
                    self._set(ev, EvState.GOOD)
            elif ev == avoid:
                avoided = ev
            else:
                return ev
        if restored is not None and restored != avoid:
            return restored
        return avoided if avoided is not None else restored

    def next_evs(self, count: int) -> list[int]:
        """What ``next_ev`` gives so many times."""
        evs: list[int] = []
        while len(evs) < count:
            these = self._active[self._cursor : self._cursor + count - len(evs)]
            if these and all(self._states[ev] is _GOOD for ev in these):
                self._cursor += len(these)
                evs += these
                continue
            ev = self.next_ev()
            if ev is None:
                break
            evs.append(ev)
        return evs

    def _advance(self) -> int:
        if self._cursor >= len(self._active):
            self._cursor = 0
            self._turns += 1
            if self._turns % self.settings.reshuffle_turns == 0:
                self._active = self._interleaved(self._active)
        ev = self._active[self._cursor]
        self._cursor += 1
        return ev

    def _set(self, ev: int, state: EvState) -> None:
        self.changes[self._states[ev], state] += 1
        self._states[ev] = state

    # What happens to EVs.

    def skip(self, ev: int) -> None:
        """A mark or a trim came back for ``ev``; repeated ones do not stack."""
        if not self.settings.skip or self._states.get(ev) is not EvState.GOOD or ev not in self._active:
            return
        others = any(self._states[other] is EvState.GOOD for other in self._active if other != ev)
        if others or not self._swap(ev):
            self._set(ev, EvState.SKIP)

    def suspect(self, ev: int, now_ns: int) -> bool:
        """A packet on ``ev`` is lost: it goes out, unless too few would be left. Says whether it did."""
        if self._states.get(ev) not in (EvState.GOOD, EvState.SKIP):
            return False
        if ev in self._active and not self._replace(ev, self.settings.ev_min_active):
            return False
        self._set(ev, EvState.ASSUMED_BAD)
        interval_ns = self.settings.probe_interval_ns
        self._probation[ev] = _Probation(now_ns + interval_ns, interval_ns)
        return True

    def deny(self, ev: int) -> None:
        """Out by order, however few are left."""
        state = self._states.get(ev)
        if state is None or state is EvState.DENIED:
            return
        if ev in self._active:
            self._replace(ev, 0)
        self._probation.pop(ev, None)
        self._set(ev, EvState.DENIED)

    def allow(self, ev: int) -> None:
        """The order is lifted."""
        if self._states.get(ev) is EvState.DENIED:
            self._restore(ev)

    def close(self, planes: frozenset[int], now_ns: int) -> None:
        """Ports of these planes are down, all others up: their EVs are out. EVs of a plane that opens are probed
        first."""
        for ev in self._states:
            if self._plane_of(ev) in planes - self._closed and self._states[ev] is not EvState.DENIED:
                self.deny(ev)
                self._closed_evs.add(ev)
        for ev in [ev for ev in self._closed_evs if self._plane_of(ev) not in planes]:
            self._closed_evs.remove(ev)
            self._set(ev, EvState.ASSUMED_BAD)
            self._probation[ev] = _Probation(now_ns, self.settings.probe_interval_ns)
        self._closed = planes

    def _swap(self, ev: int) -> bool:
        """Puts a backup of its plane in the place of ``ev``, which stays as it is; False when there is none."""
        plane = self._plane_of(ev)
        backups = [
            other
            for other, state in self._states.items()
            if state is EvState.GOOD and other not in self._active and self._plane_of(other) == plane
        ]
        if backups:
            self._active[self._active.index(ev)] = self._rng.choice(backups)
        return bool(backups)

    def _replace(self, ev: int, least: int) -> bool:
        """Takes ``ev`` out of turn, a backup of its plane in its place; False when fewer than ``least`` were left."""
        if self._swap(ev):
            return True
        if len(self._active) <= least:
            return False
        place = self._active.index(ev)
        del self._active[place]
        if place < self._cursor:
            self._cursor -= 1
        return True

    def _restore(self, ev: int) -> None:
        """GOOD again: in turn while its plane is short of its share, a backup otherwise."""
        self._set(ev, EvState.GOOD)
        plane = self._plane_of(ev)
        if sum(self._plane_of(other) == plane for other in self._active) < self._share[plane]:
            self._active.insert(self._rng.randrange(len(self._active) + 1), ev)

    # Probes.

    def probes_due(self, now_ns: int) -> list[int]:
        """Suspected EVs to probe now; one that has not answered its last probe starts over, later."""
        due = [ev for ev, probation in self._probation.items() if probation.due_ns <= now_ns]
        for ev in due:
            probation = self._probation[ev]
            if not probation.answered:
                probation.successes = 0
                probation.interval_ns = min(2 * probation.interval_ns, self.settings.probe_interval_max_ns)
            probation.answered = False
            probation.due_ns = now_ns + probation.interval_ns
        return due

    def next_probe_ns(self) -> int | None:
        """When probes_due has something next."""
        return min((probation.due_ns for probation in self._probation.values()), default=None)

    def probed(self, ev: int, *, marked: bool = False) -> None:
        """The answer to a probe of ``ev`` came; ``marked``: by a congested path."""
        probation = self._probation.get(ev)
        if probation is None or probation.answered:
            return
        probation.answered = True
        probation.successes += 1
        probation.due_ns -= probation.interval_ns - self.settings.probe_interval_ns  # it answers: no more waiting
        probation.interval_ns = self.settings.probe_interval_ns
        if probation.successes >= self.settings.probe_successes:
            del self._probation[ev]
            self._restore(ev)
            if marked:
                self.skip(ev)
