"""The part of a collective's time that no bucket can save: its bytes at the rate of large sizes.

The lower bound counts ``wire_us`` for every byte and the rest of a collective's time, its latency,
once per bucket. That is sound only if latency does not fall as a collective grows, so the rate is
the smallest slope of the price up to the size of all that could ever be merged: for prices that
flatten towards a plateau (latency plus size over bandwidth, a pipeline's ramp, the better of two
algorithms) this is the slope at that size. Only prices are asked; no number originates here.
"""

from __future__ import annotations

from collections.abc import Callable


def least_us_per_byte(price_us: Callable[[int], float], total_bytes: int) -> float:
    """The smallest slope of ``price_us`` between sizes x and 2 x, up to x = ``total_bytes``.

    Args:
        price_us: time of one collective of a size in bytes.
        total_bytes: size of a bucket with all collectives that may be merged with each other.

    Returns:
        Microseconds per byte, at least 0. A collective's ``wire_us`` is its size times this.
    """
    sizes = [total_bytes >> shift for shift in range(total_bytes.bit_length())]
    slopes = ((price_us(2 * size) - price_us(size)) / size for size in sizes)
    return max(0.0, min(slopes, default=0.0))
