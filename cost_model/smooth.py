"""Take the noise out of times of rising sizes.

`average_neighbours` goes by how noisy each time is, `rising` by what no collective does: take less
time for more bytes. Both leave times without noise alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

TOLERANCE = 0.05
"""What noise may be left in, and how far `rising` may move a time: what repeated nccl-tests runs
differ by."""
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
    lowered where it would move times further than `TOLERANCE`: then a step in the times is no
    noise but the collective's own (another algorithm or protocol).
    """
    not_falling = _with_rising_latencies(sizes, times_us, 0.0)
    rate = _cheapest_us_per_byte(sizes, not_falling)
    for share in (1.0, 0.75, 0.5, 0.25):
        smooth = _with_rising_latencies(sizes, not_falling, share * rate)
        if all(abs(a / b - 1) <= TOLERANCE for a, b in zip(smooth, not_falling, strict=True)):
            return smooth
    return not_falling


def _with_rising_latencies(
    sizes: Sequence[int], times_us: Sequence[float], us_per_byte: float
) -> tuple[float, ...]:
    """Times whose excess over ``us_per_byte`` does not fall, as near as can be to ``times_us``.

    Neighbours that fall are given their mean, each weighted by its relative precision (pool
    adjacent violators: the least-squares answer for a rising sequence).
    """
    pools: list[tuple[float, float, int]] = []
    for size, time_us in zip(sizes, times_us, strict=True):
        pool = (time_us - us_per_byte * size, time_us**-2.0, 1)
        while pools and pools[-1][0] > pool[0]:
            pool = _merged(pools.pop(), pool)
        pools.append(pool)
    excess = [excess_us for excess_us, _, count in pools for _ in range(count)]
    return tuple(e + us_per_byte * size for e, size in zip(excess, sizes, strict=True))


def _merged(
    left: tuple[float, float, int], right: tuple[float, float, int]
) -> tuple[float, float, int]:
    weight = left[1] + right[1]
    return (left[0] * left[1] + right[0] * right[1]) / weight, weight, left[2] + right[2]


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
