"""Entropy values: turns, skips, suspicion with backups of the plane, the least that stays, probes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.mrc.paths import EvProfile, EvState, PathSettings

EVS = [plane << 16 | uplink for plane in range(4) for uplink in range(4)]


def plane_of(ev: int) -> int:
    return ev >> 16


def profile(evs: list[int] = EVS, **options: int) -> EvProfile:
    return EvProfile(evs, plane_of, PathSettings(**options), random.Random(1))


def take(paths: EvProfile, count: int) -> list[int]:
    taken = [paths.next_ev() for _ in range(count)]
    assert None not in taken
    return [ev for ev in taken if ev is not None]


def test_planes_are_equally_active() -> None:
    assert Counter(map(plane_of, profile().active)) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert Counter(map(plane_of, profile(active=8).active)) == {0: 2, 1: 2, 2: 2, 3: 2}
    assert len(profile(active=16).active) == 16


def test_all_take_turns_and_the_order_changes() -> None:
    paths = profile(active=16, reshuffle_turns=2)
    circles = [tuple(take(paths, 16)) for _ in range(6)]
    assert all(sorted(circle) == EVS for circle in circles)
    assert 1 < len(set(circles)) < 6


@pytest.mark.parametrize("active", [8, 12, 16])
def test_planes_take_turns_so_that_no_port_gets_two_packets_at_once(active: int) -> None:
    """Two of one plane in a row would find its port full, and the second would lose its turn: an uneven spray."""
    taken = take(profile(active=active, reshuffle_turns=2), 6 * active)
    fours = [taken[n : n + 4] for n in range(0, len(taken), 4)]
    assert all(sorted(map(plane_of, four)) == [0, 1, 2, 3] for four in fours)


def test_a_skip_costs_one_turn_however_often_it_is_said() -> None:
    paths = profile(active=16)
    first = take(paths, 16)
    for _ in range(3):
        paths.skip(first[2])
    assert take(paths, 15) == first[:2] + first[3:]
    assert paths.state(first[2]) is EvState.GOOD
    assert take(paths, 16) == first


def test_one_skip_is_restored_per_packet() -> None:
    """Guidance of 11.2.2: further SKIPs before a GOOD one stay; a circle of SKIPs gives the restored one."""
    paths = profile([0, 1, 2, 3], active=4)
    order = take(paths, 4)
    for ev in order[:3]:
        paths.skip(ev)
    assert paths.next_ev() == order[3]
    assert [paths.state(ev) for ev in order] == [EvState.GOOD, EvState.SKIP, EvState.SKIP, EvState.GOOD]
    paths.skip(order[0])
    paths.skip(order[3])
    assert paths.next_ev() == order[0]
    assert [paths.state(ev) for ev in order] == [EvState.GOOD, *[EvState.SKIP] * 3]


def test_when_all_are_skipped_a_backup_comes_in() -> None:
    """One active EV and one backup, as in the paper's section 5.2.5; without SKIP the flow stays where it is."""
    paths = profile([0, 1], active=1)
    (first,) = paths.active
    paths.skip(first)
    assert paths.active == [1 - first] and paths.state(first) is EvState.GOOD
    assert set(take(paths, 5)) == {1 - first}
    stays = profile([0, 1], active=1, skip=False)
    (first,) = stays.active
    stays.skip(first)
    assert stays.active == [first]
    alone = profile([7], active=1)
    alone.skip(7)
    assert alone.state(7) is EvState.SKIP and take(alone, 2) == [7, 7]


def test_closed_planes_are_out_and_come_back_by_probes() -> None:
    paths = profile()
    denied = next(ev for ev in EVS if plane_of(ev) == 1)
    paths.deny(denied)
    paths.close(frozenset({1}), 0)
    assert {plane_of(ev) for ev in paths.active} == {0, 2, 3} and paths.probes_due(10**12) == []
    paths.close(frozenset({1}), 50)
    paths.close(frozenset(), 100)
    others = [ev for ev in EVS if plane_of(ev) == 1 and ev != denied]
    assert {paths.state(ev) for ev in others} == {EvState.ASSUMED_BAD} and paths.probes_due(100) == others
    assert paths.state(denied) is EvState.DENIED  # somebody else's order
    for round_number in range(4):
        for ev in others:
            paths.probed(ev)
        paths.probes_due(10**12 * (1 + round_number))
    assert {paths.state(ev) for ev in others} == {EvState.GOOD} and {plane_of(ev) for ev in paths.active} == {
        0,
        1,
        2,
        3,
    }


def test_a_suspect_is_replaced_by_a_backup_of_its_plane() -> None:
    paths = profile()
    suspect = paths.active[0]
    assert paths.suspect(suspect, 0)
    assert suspect not in paths.active and len(paths.active) == 12
    assert Counter(map(plane_of, paths.active)) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert suspect not in take(paths, 40)
    assert not paths.suspect(suspect, 0)


def test_a_plane_that_has_no_backup_shrinks_and_grows_back() -> None:
    paths = profile(probe_interval_ns=10, probe_successes=1)
    plane = [ev for ev in EVS if plane_of(ev) == 2]
    for ev in plane:
        assert paths.suspect(ev, 0)
    assert Counter(map(plane_of, paths.active)) == {0: 3, 1: 3, 3: 3}
    assert sorted(paths.probes_due(10)) == plane
    for ev in plane:
        paths.probed(ev)
    assert Counter(map(plane_of, paths.active)) == {0: 3, 1: 3, 2: 3, 3: 3}


@pytest.mark.parametrize("least", [1, 2, 5])
def test_suspicion_leaves_the_least_and_an_order_does_not(least: int) -> None:
    paths = profile(ev_min_active=least)
    done = [paths.suspect(ev, 0) for ev in EVS]
    assert len(paths.active) == least and done.count(True) == 16 - least
    for ev in EVS:
        paths.deny(ev)
    assert paths.active == [] and paths.next_ev() is None and paths.next_probe_ns() is None
    paths.allow(EVS[5])
    assert paths.next_ev() == EVS[5] and paths.state(EVS[5]) is EvState.GOOD


def test_an_avoided_one_is_used_only_when_it_is_the_last() -> None:
    paths = profile([7, 8], active=2)
    assert {paths.next_ev(avoid=7) for _ in range(6)} == {8}
    assert profile([7]).next_ev(avoid=7) == 7
    paths.skip(8)
    assert paths.next_ev(avoid=7) == 8


def test_probes_back_off_and_need_answers_in_a_row() -> None:
    paths = profile(probe_interval_ns=10, probe_interval_max_ns=40, probe_successes=3)
    ev = paths.active[0]
    paths.suspect(ev, 100)
    times = []
    for now in range(100, 300):
        if paths.probes_due(now):
            times.append(now)
        assert paths.next_probe_ns() is not None
    assert times == [110, 120, 140, 180, 220, 260]  # 10, then doubled while nothing answers, up to 40
    for now, answered in ((300, True), (340, True), (380, False), (420, True), (460, True)):
        assert paths.probes_due(now) == [ev]
        if answered:
            paths.probed(ev)
            paths.probed(ev)  # a duplicate counts once
        assert paths.state(ev) is EvState.ASSUMED_BAD
    assert paths.probes_due(500) == [ev]
    paths.probed(ev, marked=False)
    assert paths.state(ev) is EvState.GOOD and paths.next_probe_ns() is None


def test_what_is_not_of_the_profile_changes_nothing() -> None:
    paths = profile()
    before = paths.active
    for call in (paths.skip, paths.deny, paths.allow, paths.probed):
        call(0xDEAD)
    assert not paths.suspect(0xDEAD, 0)
    assert paths.active == before and paths.state(0xDEAD) is None and not paths.changes


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(["next", "skip", "suspect", "deny", "allow", "probe"]), st.sampled_from(EVS)))
)
def test_invariants(calls: list[tuple[str, int]]) -> None:
    """Whatever happens: only GOOD and SKIP take turns, no plane takes more than its share, none is there twice."""
    paths, now = profile(probe_interval_ns=5, probe_successes=1), 0
    for name, ev in calls:
        now += 3
        if name == "next":
            given_ev = paths.next_ev()
            assert (given_ev is None) == (not paths.active)
            assert given_ev is None or paths.state(given_ev) is EvState.GOOD
        elif name == "probe":
            for due in paths.probes_due(now):
                paths.probed(due, marked=ev % 2 == 0)
        elif name == "suspect":
            paths.suspect(ev, now)
        else:
            getattr(paths, name)(ev)
        active = paths.active
        assert len(set(active)) == len(active)
        assert {paths.state(one) for one in active} <= {EvState.GOOD, EvState.SKIP}
        assert all(count <= 3 for count in Counter(map(plane_of, active)).values())
