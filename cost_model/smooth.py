"""Take the noise out of times of rising sizes.

`average_neighbours` goes by how noisy each time is, `rising` by what no collective does: take less
time for more bytes. Both leave times without noise alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

TOLERANCE = 0.048
"""What noise may be left in, and how far `rising` may move a time: what repeated nccl-tests runs
differ by, 5 % whether told as a difference or as a ratio."""
_NEAR = TOLERANCE * (1 + 1e-6)
_FAR = 1e6
"""What a time outside costs beside its distance: more than distances come to."""
_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Of the rate of large sizes: what is tried to tell latencies from bytes."""
WIDEST = 8.0
"""Factor within which sizes are averaged: further off another algorithm may be at work."""


def average_neighbours(
    sizes: Sequence[int],
    times_us: Sequence[float],
    noises: Sequence[float],
    formula_us: Sequence[float],
) -> list[float]:
    """Times averaged with so many of their neighbours that `TOLERANCE` of noise is left.

    Args:
        sizes: bytes, rising.
        times_us: measured.
        noises: relative standard errors of ``times_us``; 0: not known, the time stays as it is.
        formula_us: times that say how sizes compare: it is ratios to them that are averaged, each
            weighted by its precision.
    """
    return [
        formula_us[at] * _average_ratio(at, sizes, times_us, noises, formula_us)
        if noises[at] > 0.0
        else time_us
        for at, time_us in enumerate(times_us)
    ]


def _average_ratio(
    at: int,
    sizes: Sequence[int],
    times_us: Sequence[float],
    noises: Sequence[float],
    formula_us: Sequence[float],
) -> float:
    """Time over formula of the sizes around one, as many on either side as its noise asks for."""
    weight = weighted = 0.0
    for distance in range(len(sizes)):
        for near in sorted({at - distance, at + distance}):
            if 0 <= near < len(sizes) and 1 / WIDEST <= sizes[near] / sizes[at] <= WIDEST:
                precision = max(noises[near], noises[at]) ** -2.0
                weight += precision
                weighted += precision * times_us[near] / formula_us[near]
        if weight >= TOLERANCE**-2.0:
            break
    return weighted / weight


def rising(sizes: Sequence[int], times_us: Sequence[float]) -> tuple[float, ...]:
    """Times of rising sizes that do not fall, nor do their latencies as far as the times allow.

    A latency is what is left of a time without its bytes at the rate of large sizes; that rate is
    lowered where it would cost a time its `TOLERANCE`: then a step in the times is no noise but
    the collective's own (another algorithm or protocol).
    """
    not_falling = _with_rising_latencies(sizes, times_us, 0.0)
    rate = _cheapest_us_per_byte(sizes, not_falling)
    most = _count_near(not_falling, times_us)
    for share in _SHARES:
        smooth = _with_rising_latencies(sizes, times_us, share * rate)
        if _count_near(smooth, times_us) >= most:
            return smooth
    return not_falling


def _count_near(curve: Sequence[float], times_us: Sequence[float]) -> int:
    return sum(_distance(a, b) <= _NEAR for a, b in zip(curve, times_us, strict=True))


def _with_rising_latencies(
    sizes: Sequence[int], times_us: Sequence[float], us_per_byte: float
) -> tuple[float, ...]:
    """Times whose excess over ``us_per_byte`` does not fall, as near as can be to ``times_us``.

    As near as can be: as many as possible within `TOLERANCE`, and the sum of all distances least.
    One time that is far off then moves none of those beside it, as it would a mean. Exact, by
    dynamic programming over the excesses that the times and the ends of their tolerance have.
    """
    bytes_us = [us_per_byte * size for size in sizes]
    measured = list(zip(bytes_us, times_us, strict=True))
    levels = sorted(
        {
            time_us * factor - own_us
            for own_us, time_us in measured
            for factor in (1 - TOLERANCE, 1.0, 1 + TOLERANCE)
        }
    )
    costs = [0.0] * len(levels)
    """Of the sizes so far, the last of them at each level."""
    chosen: list[list[int]] = []
    """Of each size, by the level of the next: the best level that is not above that."""
    for own_us, time_us in measured:
        best = 0
        lowest: list[int] = []
        for index, level in enumerate(levels):
            costs[index] += _cost(level + own_us, time_us)
            if costs[index] < costs[best]:
                best = index
            lowest.append(best)
        chosen.append(lowest)
        costs = [costs[index] for index in lowest]
    index = len(levels) - 1
    curve: list[float] = []
    for own_us, lowest in zip(reversed(bytes_us), reversed(chosen), strict=True):
        index = lowest[index]
        curve.append(levels[index] + own_us)
    return tuple(reversed(curve))


def _cost(found_us: float, time_us: float) -> float:
    distance = _distance(found_us, time_us)
    return distance if distance <= _NEAR else distance + _FAR


def _distance(found_us: float, time_us: float) -> float:
    return abs(found_us / time_us - 1)


def _cheapest_us_per_byte(sizes: Sequence[int], times_us: Sequence[float]) -> float:
    """The rate of large sizes: the least slope where bytes are most of the time.

    At most what any size takes with no latency at all; 0 if bytes are never most of the time.
    """
    points = pairwise(zip(sizes, times_us, strict=True))
    slopes = [((b_us - a_us) / (b - a), b, b_us) for (a, a_us), (b, b_us) in points]
    by_bytes = [slope for slope, b, b_us in slopes if slope * b > 0.5 * b_us]
    if not by_bytes:
        return 0.0
    return min(*by_bytes, *(t / size for size, t in zip(sizes, times_us, strict=True)))
