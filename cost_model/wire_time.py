"""What of a collective's time is its bytes, and what of it a bucket can save only in part.

The lower bound counts for every byte what it takes at the link's plateau; what is beside it,
latency, a bucket has once. That rate is that of the link: one collective alone may not reach it.
How long a collective of some size keeps the link from others the simulator takes from the price
model, if that tells it from the whole time; else what is beside the plateau counts as latency,
during which others may use the link. Measured prices are uneven: small sizes may pass in a
burst, and noise makes one size cheaper than its neighbours. `BucketPrice` asks for the price of the
largest bucket, a half of it, a quarter and so on, and promises for these: each takes at least the
plateau rate for its bytes, and beside that at least `latency_us` of each of its members. Only
prices are asked; no number originates here.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class BucketPrice:
    """The price of collectives that may be merged with each other.

    Attributes:
        us_per_byte: the plateau: the slope of the price beyond all that may be merged, but at no
            size more than the whole price; at least 0.
    """

    def __init__(
        self,
        price_us: Callable[[int], float],
        total_bytes: int,
        link_us: Callable[[int], float] | None = None,
    ) -> None:
        """
        Args:
            price_us: time (us) of one collective of a size in bytes.
            total_bytes: size of a bucket with all collectives that may be merged.
            link_us: for how long (us) it keeps its link busy, at most ``price_us``; None: that.
        """
        self._price_us = price_us
        self._busy_us = busy_us = link_us or price_us
        sizes = [total_bytes >> shift for shift in range(total_bytes.bit_length())]
        prices = [price_us(size) for size in sizes]
        busy = [busy_us(size) for size in sizes]
        self._tells_link = any(held < whole for held, whole in zip(busy, prices, strict=True))
        rates = [held / size for held, size in zip(busy, sizes, strict=True)]
        if sizes:
            rates.append((busy_us(2 * total_bytes) - busy_us(total_bytes)) / total_bytes)
        self.us_per_byte = max(0.0, min(rates, default=0.0))
        self._least: list[tuple[int, float]] = []
        least_us = math.inf
        for size, price in zip(sizes, prices, strict=True):
            least_us = min(least_us, price - self.us_per_byte * size)
            self._least.append((size, least_us))

    def link_us(self, size_bytes: int) -> float:
        """For how long (us) one collective of a size keeps its link from others."""
        plateau_us = self.us_per_byte * size_bytes
        return max(plateau_us, self._busy_us(size_bytes)) if self._tells_link else plateau_us

    def latency_us(self, size_bytes: int) -> float:
        """Least time (us), beside all bytes, of a bucket that holds ``size_bytes`` and more."""
        own_us = self._price_us(size_bytes) - self.us_per_byte * size_bytes
        larger = [least for size, least in self._least if size >= size_bytes]
        return max(0.0, min([own_us, *larger[-1:]]))
