"""The queue model against closed forms of a fluid queue, and against a queue that really holds its packets."""

from __future__ import annotations

import random
from collections import deque
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from net.errors import SimError
from net.switch.model import Action, Cause, PortQueue, QueueConfig, Verdict

GBPS = 10**9
PS = 10**12
SIZE = 4224
HEADER = 128


def port(rate_bps: int = 100 * GBPS, **options: int) -> PortQueue:
    return PortQueue(QueueConfig(rate_bps, **options))


def stream(queue: PortQueue, arrival_bps: int, count: int, size: int = SIZE, *, ect: bool = False) -> list[Verdict]:
    """``count`` packets of equal spacing at ``arrival_bps``."""
    return [queue.offer(n * size * 8 * PS // arrival_bps, size, ect=ect) for n in range(count)]


def first(verdicts: list[Verdict], action: Action) -> int:
    return [verdict.action for verdict in verdicts].index(action)


# Closed forms.


@pytest.mark.parametrize("arrival_bps", [101 * GBPS, 150 * GBPS, 200 * GBPS, 700 * GBPS])
def test_first_mark_trim_and_drop_of_an_overload(arrival_bps: int) -> None:
    """A fluid queue grows by (1 - C/A) of each packet: it reaches B after B / (S (1 - C/A)) packets, +- 1."""
    growth = SIZE * (1 - Fraction(100 * GBPS, arrival_bps))
    verdicts = stream(port(ecn_bytes=40_000, trim_bytes=200_000), arrival_bps, int(210_000 / growth), ect=True)
    assert abs(first(verdicts, Action.MARK) - 40_000 / growth) <= 1 + SIZE / growth
    assert abs(first(verdicts, Action.TRIM) - 200_000 / growth) <= 1 + SIZE / growth
    dropping = stream(port(limit_bytes=200_000), arrival_bps, int(210_000 / growth))
    assert first(dropping, Action.DROP) == first(verdicts, Action.TRIM)


@pytest.mark.parametrize("burst", [10, 50, 100, 400])
def test_a_burst_at_once(burst: int) -> None:
    """Nothing leaves: packet n meets n packets. Pass up to ECN, mark up to trim, trim the rest."""
    queue = port(ecn_bytes=10 * SIZE, trim_bytes=48 * SIZE)
    for _ in range(burst):
        queue.offer(0, SIZE, ect=True)
    plain, marked = min(burst, 11), max(0, min(burst, 49) - 11)
    assert (queue.packets[Cause.DATA], queue.packets[Cause.ECN]) == (plain, marked)
    assert queue.packets[Cause.TRIM] == burst - plain - marked
    assert queue.backlog_bytes(0) == (plain + marked) * SIZE + queue.packets[Cause.TRIM] * HEADER


def test_limits_of_a_burst() -> None:
    """Headers fill the priority class up to its limit, then trims become drops; data stops at the common limit."""
    queue = port(trim_bytes=10 * SIZE, priority_limit_bytes=5 * HEADER)
    for _ in range(30):
        queue.offer(0, SIZE)
    assert queue.packets == {Cause.DATA: 11, Cause.TRIM: 6, Cause.TRIM_LIMIT: 13}
    queue = port(trim_bytes=10 * SIZE, limit_bytes=11 * SIZE + 3 * HEADER)
    for _ in range(30):
        queue.offer(0, SIZE)
    assert queue.packets == {Cause.DATA: 11, Cause.TRIM: 4, Cause.LIMIT: 15}


@pytest.mark.parametrize("load", [Fraction(3, 2), Fraction(2), Fraction(7)])
def test_steady_overload_fills_the_line(load: Fraction) -> None:
    """Accepted share a of packets: a S + (1 - a) h = C/A of S, so a = (C/A - h/S) / (1 - h/S)."""
    queue = port(trim_bytes=100_000)
    arrival_bps = int(load * 100 * GBPS)
    stream(queue, arrival_bps, 2000)
    queue.packets.clear()
    start = 2000 * SIZE * 8 * PS // arrival_bps
    for n in range(5000):
        queue.offer(start + n * SIZE * 8 * PS // arrival_bps, SIZE)
    share = (1 / load - Fraction(HEADER, SIZE)) / (1 - Fraction(HEADER, SIZE))
    assert abs(queue.packets[Cause.DATA] - 5000 * share) <= 1 + 5000 * 0.001
    assert queue.packets[Cause.DATA] + queue.packets[Cause.TRIM] == 5000


def test_below_capacity_nothing_waits() -> None:
    verdicts = stream(port(ecn_bytes=0, trim_bytes=0), 100 * GBPS, 100, ect=True)
    assert {verdict.action for verdict in verdicts} == {Action.PASS}
    assert [verdict.departure_ps for verdict in verdicts] == [(n + 1) * SIZE * 80 for n in range(100)]


def test_the_queue_drains_at_line_rate() -> None:
    queue = port()
    for _ in range(10):
        queue.offer(0, 1000)
    assert [queue.backlog_bytes(at * 80_000) for at in (0, 3, 10, 11)] == [10_000, 7_000, 0, 0]


def test_priority_overtakes_data_and_data_waits_for_it() -> None:
    queue = port(trim_bytes=2 * SIZE)
    for _ in range(3):
        queue.offer(0, SIZE)
    trimmed = queue.offer(0, SIZE)
    control = queue.offer(0, 200, priority=True)
    assert trimmed == Verdict(Action.TRIM, Cause.TRIM, HEADER, HEADER * 80)
    assert control.departure_ps == (HEADER + 200) * 80
    late = queue.offer(2 * SIZE * 80, SIZE)
    assert late.departure_ps == (4 * SIZE + HEADER + 200) * 80


def test_what_is_not_marked_or_trimmed() -> None:
    queue = port(ecn_bytes=0, trim_bytes=SIZE)
    queue.offer(0, SIZE)
    assert queue.offer(0, SIZE).action is Action.PASS  # not ECN-capable
    assert queue.offer(0, SIZE, ect=True).action is Action.TRIM
    assert queue.offer(0, HEADER, ect=True).action is Action.MARK  # too short to trim
    assert queue.offer(0, SIZE, ect=True, trimmable=False).action is Action.MARK  # its class is never trimmed
    last_hop = port(trim_bytes=10 * SIZE)
    assert {last_hop.offer(0, SIZE, ect=True).action for _ in range(11)} == {Action.PASS}


def test_faults() -> None:
    queue = port()
    queue.offer(0, SIZE)
    queue.down = True
    assert queue.offer(0, SIZE) == Verdict(Action.DROP, Cause.DOWN, SIZE, None)
    assert queue.offer(0, 200, priority=True).cause is Cause.DOWN
    queue.down = False
    assert queue.offer(0, SIZE).departure_ps == 2 * SIZE * 80
    assert queue.packets == {Cause.DATA: 2, Cause.DOWN: 2} and queue.sent_bytes == 2 * SIZE
    assert queue.bytes_in[Cause.DOWN] == SIZE + 200


@pytest.mark.parametrize("loss", [0.0, 0.01, 0.5, 1.0])
def test_loss_is_the_share_asked_for_and_repeats_by_seed(loss: float) -> None:
    counts = []
    for _ in range(2):
        queue = PortQueue(QueueConfig(100 * GBPS), random.Random(7))
        queue.loss = loss
        stream(queue, 50 * GBPS, 20_000)
        counts.append(queue.packets[Cause.LOSS])
    sigma = (20_000 * loss * (1 - loss)) ** 0.5
    assert counts[0] == counts[1] and abs(counts[0] - 20_000 * loss) <= 5 * sigma


def test_rate_change_keeps_the_bytes() -> None:
    queue = port(ecn_bytes=5_000)
    for _ in range(10):
        queue.offer(0, 1000)
    queue.change_rate(5 * 80_000, 25 * GBPS)
    assert queue.backlog_bytes(5 * 80_000) == 5000
    assert queue.offer(5 * 80_000, 1000).departure_ps == 5 * 80_000 + 6 * 320_000
    assert queue.offer(5 * 80_000, 1000, ect=True).action is Action.MARK  # 6000 > 5000, in bytes as before
    queue.change_rate(5 * 80_000, 100 * GBPS)
    assert queue.backlog_bytes(5 * 80_000) == 7000


def test_mistakes_name_the_fix() -> None:
    with pytest.raises(SimError, match="a dead link is down"):
        port(0)
    with pytest.raises(SimError, match="a dead link is down"):
        port().change_rate(0, 0)
    with pytest.raises(SimError, match="trim_bytes is -1"):
        port(trim_bytes=-1)


# A queue that holds its packets.


class NaiveQueue:
    """Two lists of packets, served byte by byte, the first list first. Exact fractions, nothing virtual."""

    def __init__(self, config: QueueConfig) -> None:
        self.config = config
        self.now = 0
        self.waiting: tuple[deque[Fraction], deque[Fraction]] = (deque(), deque())

    def serve_until(self, now: int) -> None:
        budget = Fraction(now - self.now) * self.config.rate_bps / (8 * PS)
        self.now = now
        for queue in self.waiting:
            while queue and budget:
                served = min(budget, queue[0])
                budget -= served
                queue[0] -= served
                if not queue[0]:
                    queue.popleft()

    def offer(self, now: int, size: int, ect: bool, priority: bool) -> Action:
        self.serve_until(now)
        config = self.config
        high, low = self.waiting
        if not priority:
            backlog = sum(high) + sum(low)
            if backlog > config.limit_bytes:
                return Action.DROP
            if config.trim_bytes is None or backlog <= config.trim_bytes or size <= config.trim_size_bytes:
                low.append(Fraction(size))
                marks = ect and config.ecn_bytes is not None and backlog > config.ecn_bytes
                return Action.MARK if marks else Action.PASS
            size = config.trim_size_bytes
        if sum(high) > config.priority_limit_bytes:
            return Action.DROP
        high.append(Fraction(size))
        return Action.PASS if priority else Action.TRIM


ARRIVALS = st.lists(
    st.tuples(st.integers(0, 600_000), st.sampled_from([100, 128, 1500, SIZE]), st.booleans(), st.booleans()),
    min_size=20,
    max_size=120,
)


@settings(deadline=None, max_examples=80)
@given(
    ARRIVALS,
    st.sampled_from([None, 0, 4_000, 9_000]),
    st.sampled_from([None, 10_000, 20_000]),
    st.sampled_from([15_000, 22_000]),
    st.sampled_from([256, 1000]),
    st.sampled_from([100 * GBPS, 40 * GBPS, 25 * GBPS]),
)
def test_verdicts_against_a_queue_that_holds_its_packets(
    arrivals: list[tuple[int, int, bool, bool]],
    ecn: int | None,
    trim: int | None,
    limit: int,
    priority_limit: int,
    rate: int,
) -> None:
    config = QueueConfig(rate, ecn, trim, HEADER, limit, priority_limit)
    queue, naive, now = PortQueue(config), NaiveQueue(config), 0
    for gap, size, ect, priority in arrivals:
        now += gap
        verdict = queue.offer(now, size, ect=ect, priority=priority)
        assert verdict.action is naive.offer(now, size, ect, priority)
        assert queue.backlog_bytes(now) == int(sum(naive.waiting[0]) + sum(naive.waiting[1]))


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 400_000), st.integers(64, 9000)), min_size=1, max_size=60))
def test_departures_are_those_of_a_first_in_first_out_server(arrivals: list[tuple[int, int]]) -> None:
    queue, now, free = port(), 0, 0
    for gap, size in arrivals:
        now += gap
        free = max(free, now) + size * 80
        assert queue.offer(now, size).departure_ps == free
