"""NSCC against the table of its four cases, worked out by hand for one set of numbers.

Base round trip 20 us at 200 Gb/s: BDP 500 000 B, a = 10/3; with trimming the target is 15 us, b = 1.25.
"""

from __future__ import annotations

import pytest

from net.mrc.congestion import Nscc, NsccSettings, Window

MTU = 4000
BASE_NS = 20_000
SETTINGS = NsccSettings(BASE_NS, 200 * 10**9, MTU)
MAX = 750_000
TARGET_NS = 15_000
A, B = 500_000 / 150_000, 15_000 / 12_000


def window(size: float, settings: NsccSettings = SETTINGS) -> Nscc:
    made = Nscc(settings)
    made.bytes = size
    return made


def acks(nscc: Nscc, count: int, delay_ns: int, *, marked: bool = False, start_ns: int = 0, step_ns: int = 1) -> None:
    for n in range(count):
        nscc.on_ack(start_ns + n * step_ns, MTU, BASE_NS + delay_ns, marked, 0)


def test_it_starts_at_one_and_a_half_bdp_and_stays_within() -> None:
    assert SETTINGS.bdp_bytes == 500_000 and SETTINGS.target_ns == TARGET_NS
    nscc = Nscc(SETTINGS)
    assert nscc.bytes == MAX
    acks(nscc, 500, 0)
    assert nscc.bytes == MAX
    for _ in range(500):
        nscc.on_trim(0, MTU, 0)
    assert nscc.bytes == MTU


@pytest.mark.parametrize(("delay_ns", "per_window"), [(3_000, 4 * A * B * MTU * 0.8), (15_000, 5 * A * MTU)])
def test_increase_of_a_window_without_marks(delay_ns: int, per_window: float) -> None:
    """Below the target by what is missing (4/5 of 15 us), at it the fair share; a window of 80 packets of 4000 B."""
    nscc = window(320_000)
    acks(nscc, 80, delay_ns)
    grown = nscc.bytes - 320_000
    assert grown == pytest.approx(per_window, rel=0.1)  # less, as the window grows on the way


def test_no_delay_for_a_whole_window_increases_fast() -> None:
    nscc = window(40_000)
    acks(nscc, 60, 0)
    before = nscc.bytes
    acks(nscc, 1, 0, start_ns=100)
    assert before < MAX and nscc.bytes == pytest.approx(before + 0.25 * A * MTU)


def test_marks_below_the_target_change_nothing() -> None:
    nscc = window(300_000)
    acks(nscc, 7, 10_000, marked=True)
    assert nscc.bytes == 300_000 and nscc.decreases == 0


def test_marks_above_the_target_decrease_once_per_round_trip() -> None:
    nscc = window(400_000)
    acks(nscc, 200, 40_000, start_ns=0)  # the average is up, no marks
    nscc.bytes = 400_000
    acks(nscc, 50, 40_000, marked=True, start_ns=1000)
    share = 1 - 0.8 * (40_000 - TARGET_NS) / 40_000
    assert share == 0.5 and nscc.decreases == 1
    assert nscc.bytes == pytest.approx(400_000 * share, rel=0.1)
    acks(nscc, 1, 40_000, marked=True, start_ns=1000 + BASE_NS)
    assert nscc.decreases == 2


def test_a_trim_takes_its_size_off() -> None:
    nscc = window(300_000)
    nscc.on_trim(0, MTU, 0)
    assert nscc.bytes == 296_000
    nscc.on_loss(1, 128, 0)
    assert nscc.bytes == 295_872


def test_quick_adapt_takes_what_got_through_and_ignores_the_marks_in_flight() -> None:
    """A period (35 us) in which 10 packets of 4000 B got through, an eighth of the largest window being 93 750."""
    nscc = window(MAX)
    acks(nscc, 1, 20_000)  # a period begins
    acks(nscc, 10, 20_000, start_ns=100)
    nscc.on_trim(200, MTU, 600_000)
    assert nscc.quick_adapts == 0
    nscc.on_trim(35_000, MTU, 600_000)
    assert nscc.quick_adapts == 1 and nscc.bytes == 40_000
    acks(nscc, 100, 60_000, marked=True, start_ns=36_000)
    eta = 0.15 * MTU * A  # of the one period that ends meanwhile
    assert nscc.decreases == 0 and nscc.bytes == 40_000 + eta  # 100 of the 150 packets that were in flight


def test_without_trimming_a_long_delay_is_a_reason_to_adapt() -> None:
    settings = NsccSettings(BASE_NS, 200 * 10**9, MTU, trimming=False)
    assert settings.target_ns == BASE_NS
    nscc = window(MAX, settings)
    acks(nscc, 1, 20_000)
    acks(nscc, 3, 81_000, start_ns=100, step_ns=20_000)
    assert nscc.quick_adapts == 1 and nscc.bytes == 3 * MTU


def test_the_receivers_penalty_and_restore() -> None:
    """64 of 128 for a window's worth of bytes halves the window; restore brings back what was before."""
    nscc = window(400_000)
    for _ in range(100):
        nscc.on_receiver(64, False, MTU)
    assert nscc.bytes == 200_000
    nscc.on_receiver(0, True, 0)
    assert nscc.bytes == 400_000


def test_a_fixed_window_stays() -> None:
    fixed = Window(5000)
    fixed.on_ack(0, 4000, 10**6, True, 0)
    fixed.on_trim(0, 4000, 0)
    fixed.on_loss(0, 4000, 0)
    fixed.on_receiver(127, True, 4000)
    assert fixed.bytes == 5000
