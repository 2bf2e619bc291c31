"""Noise is averaged out of measured times; times that are not noisy stay."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inductor_overlap.cost_model.calibrate import calibrate
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.measurements import CollectiveMeasurement
from inductor_overlap.cost_model.smooth import TOLERANCE, average_neighbours, rising

pytestmark = pytest.mark.quick

KB = 1000
FORMULA = [10.0, 20.0, 30.0, 40.0, 50.0]
NEAR = TOLERANCE + 1e-6
SIZES = [KB, 2 * KB, 4 * KB, 8 * KB, 16 * KB]


def test_times_of_unknown_noise_stay() -> None:
    times = [3.0, 99.0, 1.0, 7.0, 5.0]
    assert average_neighbours(SIZES, times, [0.0] * 5, FORMULA) == times


def test_a_time_is_averaged_with_as_many_as_its_noise_asks_for() -> None:
    # 1.2, 0.9, 0.6, 1.3 and 0.8 times the formula.
    times = [12.0, 18.0, 18.0, 52.0, 40.0]
    # 8 %: of three 8 / sqrt(3) = 4.6 % is left, of two at the ends 5.7 %, so those take a third.
    found = average_neighbours(SIZES, times, [0.08] * 5, FORMULA)
    ratios = [0.9, 0.9, 2.8 / 3, 0.9, 0.9]
    assert found == pytest.approx([f * r for f, r in zip(FORMULA, ratios, strict=True)])


def test_a_noisy_neighbour_counts_less() -> None:
    # Weights of 1 / 0.1^2 and 1 / 0.2^2: four to one.
    found = average_neighbours([KB, 2 * KB], [12.0, 16.0], [0.1, 0.2], [10.0, 20.0])
    assert found[0] == pytest.approx(10 * (4 * 1.2 + 0.8) / 5)
    # A neighbour is no more precise than the time itself: it is of another size.
    assert found[1] == pytest.approx(20 * (1.2 + 0.8) / 2)


def test_sizes_far_away_do_not_count() -> None:
    times = [30.0, 20.0]
    assert average_neighbours([KB, 9 * KB], times, [0.5, 0.5], [10.0, 20.0]) == pytest.approx(times)


def test_noise_at_two_levels_is_no_bias_of_a_calibration() -> None:
    """Samples of a size lie at 0.5 or at 1.5 ms: means of a few are noisy, their curve is not."""
    few = [0.7, 1.3, 1.1, 0.6, 1.2, 0.9, 1.4, 0.8, 1.0, 0.7, 1.3, 1.0]
    measured = [
        CollectiveMeasurement("all_reduce", 1024 << i, 1, 2, 1000 * time, noise=0.15)
        for i, time in enumerate(few)
    ]
    (curve,) = calibrate(Cluster.preset("cpu-gloo"), measured).curves
    assert curve.times_us == pytest.approx([1000.0] * len(few), rel=0.08)
    # Without knowing of the noise the least size had the least time of those beside it.
    unknown = [CollectiveMeasurement("all_reduce", m.size_bytes, 1, 2, m.time_us) for m in measured]
    (curve,) = calibrate(Cluster.preset("cpu-gloo"), unknown).curves
    assert curve.times_us[0] == pytest.approx(700.0)


def test_one_time_that_is_far_off_moves_none_beside_it() -> None:
    # Twice 20 us in place of 10: a mean with those behind it would move two of them by a third.
    times = [10.0, 40.0, 21.0, 22.0, 23.0]
    assert rising(SIZES, times) == pytest.approx([10.0, 21.0, 21.0, 22.0, 23.0])
    # One that is too low, likewise: it takes from the others what their tolerance leaves.
    times = [20.0, 21.0, 10.0, 22.0, 23.0]
    assert rising(SIZES, times) == pytest.approx([20.0, 21.0, 21.0, 22.0, 23.0], rel=NEAR)


def test_a_rate_of_bytes_costs_no_time_its_tolerance() -> None:
    # 1 us a kB at the end, where bytes are most of the time: latencies of 10, 10, 7, 10 and 10 us.
    # They cannot rise within 4.8 % of 11 and 12 us; at a lower rate, or none, they do.
    times = [11.0, 12.0, 11.2, 18.0, 26.0]
    found = rising(SIZES, times)
    assert found == pytest.approx(times, rel=NEAR)
    assert list(found) == sorted(found)


@given(st.lists(st.floats(1.0, 4.0), min_size=1, max_size=7))
def test_as_many_times_as_can_be_stay_near(times: list[float]) -> None:
    """Of all sets of times those count that a rising sequence comes near, tried one by one."""
    sizes = [KB << number for number in range(len(times))]
    found = rising(sizes, times)
    assert found[0] > 0.0
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(found))
    near = sum(abs(f / t - 1) <= NEAR for f, t in zip(found, times, strict=True))
    assert near >= next(
        count
        for count in range(len(times), 0, -1)
        if any(map(_can_rise, combinations(times, count)))
    )


def _can_rise(times: Sequence[float]) -> bool:
    """Whether a rising sequence comes within `TOLERANCE` of every one of ``times``."""
    return all(
        before * (1 - TOLERANCE) <= after * (1 + TOLERANCE)
        for before, after in combinations(times, 2)
    )
