"""The tests of emu compare against naive enumeration, printed tables, and examples worked out elsewhere."""

from __future__ import annotations

import math
import random
from itertools import combinations, product
from statistics import mean, median

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from emu.compare import stats

values = st.integers(-8, 8).map(float)  # few different ones, so that there are ties and zeros


def mid_ranks(numbers: list[float]) -> list[float]:
    """1 + how many are smaller + half of the others that are equal."""
    return [
        1 + sum(other < one for other in numbers) + (sum(other == one for other in numbers) - 1) / 2
        for one in numbers
    ]


@settings(deadline=None, max_examples=60)
@given(st.lists(values, min_size=1, max_size=8), st.sampled_from([0.5, 1.0]))
def test_signed_rank_is_the_enumeration_of_all_flips(differences: list[float], cap: float) -> None:
    used = [one for one in differences if one]
    ranks = [min(rank, len(used) * cap) for rank in mid_ranks([abs(one) for one in used])]
    middle = sum(ranks) / 2
    seen = abs(sum(rank for rank, one in zip(ranks, used) if one > 0) - middle)
    flips = list(product((0, 1), repeat=len(used)))
    far = sum(abs(sum(rank * up for rank, up in zip(ranks, flip)) - middle) >= seen for flip in flips)
    assert stats.signed_rank(differences, cap) == pytest.approx(far / len(flips))


@settings(deadline=None, max_examples=60)
@given(st.lists(values, min_size=1, max_size=5), st.lists(values, min_size=1, max_size=5))
def test_rank_sum_is_the_enumeration_of_all_labels(base: list[float], new: list[float]) -> None:
    ranks = mid_ranks([*base, *new])
    sums = [sum(ranks[index] for index in chosen) for chosen in combinations(range(len(ranks)), len(new))]
    seen = abs(sum(ranks[len(base) :]) - mean(sums))
    assert stats.rank_sum(base, new) == pytest.approx(mean(abs(one - mean(sums)) >= seen - 1e-9 for one in sums))


def test_published_values() -> None:
    # Hollander, Wolfe and Chicken, Nonparametric Statistical Methods, example 3.1 (Hamilton depression scale,
    # nine patients before and after): one-sided p = .0195, estimate -0.46.
    before = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
    after = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]
    differences = [b - a for a, b in zip(before, after)]
    assert stats.signed_rank(differences, cap=1) == pytest.approx(2 * 0.0195, abs=1e-4)
    low, estimate, high = stats.paired_shift(differences, 0.95)
    assert estimate == pytest.approx(-0.46, abs=0.005)
    assert (low, high) == (pytest.approx(-0.786, abs=0.001), pytest.approx(-0.010, abs=0.001))
    # The same book, example 4.1 (permeability of membranes): one-sided p = .1272, estimate -0.305.
    term = [0.80, 0.83, 1.89, 1.04, 1.45, 1.38, 1.91, 1.64, 0.73, 1.46]
    earlier = [1.15, 0.88, 0.90, 0.74, 1.21]
    assert stats.rank_sum(term, earlier) == pytest.approx(2 * 0.1272, abs=1e-4)
    low, estimate, high = stats.shift(term, earlier, 0.96)
    assert estimate == pytest.approx(-0.305, abs=0.001)
    assert (low, high) == (pytest.approx(-0.76), pytest.approx(0.15))


def test_benjamini_hochberg() -> None:
    # The 15 p-values of Benjamini and Hochberg's paper (section 3): at q = 0.05 the first four are rejected.
    p_values = [
        0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.3240, 0.4262, 0.5719, 0.6528,
        0.7590, 1.0000,
    ]  # fmt: skip
    adjusted = stats.benjamini_hochberg(p_values)
    assert [one <= 0.05 for one in adjusted] == [True] * 4 + [False] * 11
    assert adjusted[3] == pytest.approx(0.0095 * 15 / 4) and adjusted[-1] == 1
    shuffled = list(range(15))
    random.Random(3).shuffle(shuffled)
    assert stats.benjamini_hochberg([p_values[i] for i in shuffled]) == [adjusted[i] for i in shuffled]
    assert stats.benjamini_hochberg([]) == []


@example(p_values=[0.0, 0.1875, 0.19675148087878086], q=0.19675148087878086)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.2))
def test_benjamini_hochberg_by_its_definition(p_values: list[float], q: float) -> None:
    """Reject the k smallest, with the greatest k whose p(k) <= k q / m."""
    ordered = sorted(p_values)

    def rejected(limit: float) -> int:
        return max((k for k in range(1, len(ordered) + 1) if ordered[k - 1] <= k * limit / len(ordered)), default=0)

    below = sum(one <= q for one in stats.benjamini_hochberg(p_values))
    assert rejected(q * (1 - 1e-12)) <= below <= rejected(q * (1 + 1e-12))


@given(st.lists(values, min_size=1, max_size=6), st.lists(values, min_size=1, max_size=6))
def test_effects(base: list[float], new: list[float]) -> None:
    pairs = list(product(base, new))
    assert stats.shift(base, new)[1] == median(b - a for a, b in pairs)
    delta = stats.cliffs_delta(base, new)
    assert delta == pytest.approx((sum(b > a for a, b in pairs) - sum(b < a for a, b in pairs)) / len(pairs))
    assert stats.cliffs_delta(new, base) == -delta
    assert stats.rank_biserial([-one for one in base]) == -stats.rank_biserial(base)
    assert -1 <= stats.rank_biserial(base) <= 1


def test_extremes() -> None:
    assert stats.signed_rank([1.0] * 9) == stats.smallest_p(9) == 2 / 2**9 < 0.005 < stats.smallest_p(8)
    assert stats.rank_sum([1, 2, 3], [4, 5, 6]) == stats.smallest_p_unpaired(3, 3) == 0.1
    assert stats.signed_rank([]) == stats.signed_rank([0.0, 0.0]) == 1
    assert stats.rank_biserial([3.0, 1.0]) == 1 and stats.rank_biserial([0.0]) == 0
    assert stats.paired_shift([1.0, 2.0])[::2] == (-math.inf, math.inf)
    for call in (lambda: stats.rank_sum([], [1]), lambda: stats.shift([1], []), lambda: stats.paired_shift([])):
        with pytest.raises(ValueError):
            call()


def test_pairs_that_are_far_off_do_not_decide() -> None:
    differences = [*(0.04 + 0.001 * index for index in range(22)), -0.3, -0.2]
    assert stats.signed_rank(differences) < 0.0005 < 0.001 < stats.signed_rank(differences, cap=1)
    assert stats.rank_biserial(differences) > stats.rank_biserial(differences, cap=1) > 0


def test_an_interval_keeps_its_confidence() -> None:
    generator = random.Random(1)
    inside = 0
    for _ in range(400):
        low, _, high = stats.paired_shift([generator.gauss(0.5, 1) for _ in range(10)])
        inside += low <= 0.5 <= high
    assert inside / 400 == pytest.approx(0.95, abs=0.03)


def test_upper_bound() -> None:
    assert stats.upper_bound(0, 20) == pytest.approx(1 - 0.05 ** (1 / 20))  # the exact "rule of three"
    assert stats.upper_bound(20, 20) == 1.0
    bound = stats.upper_bound(1, 20)
    assert (1 - bound) ** 20 + 20 * bound * (1 - bound) ** 19 == pytest.approx(0.05)
