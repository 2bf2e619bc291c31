"""Measured times of one collective on one placement, by size.

Between two measured sizes time is a power law (a straight line in logarithms); below the least and
above the largest the formula follows on, scaled to meet the curve's end. Refused (``ValueError``):
sizes that do not rise, times that fall.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from inductor_overlap.cost_model.collective_time import check_collective

Formula = Callable[[str, float, int, int], float]
"""Time (us) of (kind, size in bytes, nodes, ranks per node)."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Times (us) of ``kind`` on ``num_nodes`` x ``ranks_per_node`` ranks at some sizes (bytes)."""

    kind: str
    num_nodes: int
    ranks_per_node: int
    sizes_bytes: tuple[int, ...]
    times_us: tuple[float, ...]

    def __post_init__(self) -> None:
        check_collective(self.kind, self.num_nodes, self.ranks_per_node)
        sizes, times = self.sizes_bytes, self.times_us
        if not sizes or len(sizes) != len(times):
            raise ValueError(
                f"a curve needs one time for each size; got {len(sizes)} sizes, {len(times)} times"
            )
        rising = sizes[0] > 0 and all(a < b for a, b in pairwise(sizes))
        if not rising or not times[0] > 0 or not all(a <= b < math.inf for a, b in pairwise(times)):
            raise ValueError(
                f"curve of {self.kind} on {self.num_nodes} x {self.ranks_per_node} ranks: sizes "
                f"must be positive and rise, times must be positive and not fall; got {sizes}, "
                f"{times}"
            )

    def time_us(self, size_bytes: float, formula: Formula) -> float:
        """Time (us) at any size; never falls as ``size_bytes`` grows."""
        sizes, times = self.sizes_bytes, self.times_us
        if size_bytes <= sizes[0]:
            return self._follow(size_bytes, formula, end=0)
        if size_bytes >= sizes[-1]:
            return self._follow(size_bytes, formula, end=-1)
        right = bisect_left(sizes, size_bytes)
        low, high = sizes[right - 1], sizes[right]
        share = math.log(size_bytes / low) / math.log(high / low)
        ratio = times[right] / times[right - 1]
        return min(times[right], times[right - 1] * ratio**share)

    def _follow(self, size_bytes: float, formula: Formula, end: int) -> float:
        """The formula beyond an end of the curve, scaled to meet it there."""
        placement = self.num_nodes, self.ranks_per_node
        at_end = formula(self.kind, self.sizes_bytes[end], *placement)
        if at_end == 0.0:
            return self.times_us[end]
        return self.times_us[end] * formula(self.kind, size_bytes, *placement) / at_end
