"""Greedy wrap: SimpleFSDP's auto-wrapping (arXiv 2411.00284, section on auto wrapping).

Walk the gathers in order of first use and grow a bucket while its communication still fits the
compute of the bucket before it (in backward gather and scatter together), its buffers fit the
memory that step leaves, and it stays below a share of all gathered bytes. Reductions grow along
the same compute, and close early near the end of the graph so that the tail is hidden.
Linear in the tasks, order-preserving, not optimal: the reference that better policies are compared
with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from inductor_overlap.cost_model.memory import memory_profile
from inductor_overlap.passes.manual_wrap import make_buckets
from inductor_overlap.passes.plan import Bucket
from inductor_overlap.passes.program import FreeCollective, Program, Windows, mergeable_by_key
from inductor_overlap.passes.reorder import put_on_demand

_TAIL_FACTOR = 5.0
"""A scatter bucket closes when the remaining compute is less than this many times its duration."""


@dataclass(frozen=True)
class GreedyWrap:
    """The policy ``wrap="greedy"``.

    Attributes:
        max_share: largest share of all bytes of a bucket key in one bucket; the published
            calibration puts it between 0.2 and 0.3.
    """

    max_share: float = 0.3

    def buckets(self, program: Program, *, memory_limit_bytes: float = math.inf) -> list[Bucket]:
        """The buckets greedy wrapping makes of ``program``."""
        walk = _Walk(program, self.max_share, memory_limit_bytes)
        keyed: list[tuple[str, FreeCollective]] = []
        for key, gathers in mergeable_by_key(program.gathers).items():
            keyed += _labelled(f"gather {key}", walk.wrap_gathers(gathers))
        for key, reductions in mergeable_by_key(program.reductions).items():
            keyed += _labelled(f"reduction {key}", walk.wrap_reductions(reductions))
        return make_buckets(keyed)


def _labelled(
    label: str, buckets: Iterable[Sequence[FreeCollective]]
) -> Iterator[tuple[str, FreeCollective]]:
    for index, members in enumerate(buckets):
        yield from ((f"{label} {index}", member) for member in members)


class _Walk:
    def __init__(self, program: Program, max_share: float, limit_bytes: float) -> None:
        self.program = program
        self.max_share = max_share
        self.limit_bytes = limit_bytes
        self.windows: Windows = program.windows
        self.clock_us = program.compute_clock_us
        self.live_bytes = _live_at_fixed(program)
        self.scatter_us = self._scatter_us_by_parameter()

    def wrap_gathers(self, gathers: Sequence[FreeCollective]) -> list[list[FreeCollective]]:
        ordered = sorted(gathers, key=lambda gather: self.windows.first_use[gather.name])
        most_bytes = self.max_share * sum(gather.size_bytes for gather in ordered)

        def fits(grown: Sequence[FreeCollective], window_us: float) -> bool:
            return (
                self._gather_us(grown) <= window_us
                and sum(member.size_bytes for member in grown) <= most_bytes
                and self._fits_memory(grown)
            )

        return _grow(ordered, self._compute_between, fits)

    def wrap_reductions(self, reductions: Sequence[FreeCollective]) -> list[list[FreeCollective]]:
        ordered = sorted(reductions, key=lambda r: self.windows.ready_at[r.name])
        most_bytes = self.max_share * sum(reduction.size_bytes for reduction in ordered)

        def fits(grown: Sequence[FreeCollective], window_us: float) -> bool:
            bucket_us = self._merged_us(grown)
            return (
                bucket_us <= window_us
                and sum(member.size_bytes for member in grown) <= most_bytes
                and self.clock_us[-1] - self._ready_us(grown[-1]) >= _TAIL_FACTOR * bucket_us
            )

        return _grow(ordered, lambda first, r: self._ready_us(r) - self._ready_us(first), fits)

    def _compute_between(self, first: FreeCollective, second: FreeCollective) -> float:
        use = self.windows.first_use
        return self.clock_us[use[second.name]] - self.clock_us[use[first.name]]

    def _ready_us(self, reduction: FreeCollective) -> float:
        return self.clock_us[self.windows.ready_at[reduction.name]]

    def _gather_us(self, members: Sequence[FreeCollective]) -> float:
        """Communication of a gather bucket's step: its gather, in backward also its scatters."""
        scatters = sum(self.scatter_us.get(member.fqn or "", 0.0) for member in members)
        return self._merged_us(members) + scatters

    def _merged_us(self, members: Sequence[FreeCollective]) -> float:
        size_bytes = sum(member.size_bytes for member in members)
        return self.program.prices.collective_us(members[0].kind, size_bytes, members[0].ranks)

    def _fits_memory(self, members: Sequence[FreeCollective]) -> bool:
        """The step before the bucket's first use holds twice its inputs and outputs (arXiv)."""
        use = self.windows.first_use[members[0].name]
        before = self.live_bytes[max(0, use - 1)] if self.live_bytes else 0
        bucket_bytes = sum(member.input_bytes + member.output_bytes for member in members)
        return before + 2 * bucket_bytes <= self.limit_bytes

    def _scatter_us_by_parameter(self) -> dict[str, float]:
        tasks = self.program.schedule.by_name
        return {r.fqn: tasks[r.name].wire_us for r in self.program.reductions if r.fqn is not None}


def _grow(
    ordered: Sequence[FreeCollective],
    compute_us: Callable[[FreeCollective, FreeCollective], float],
    fits: Callable[[Sequence[FreeCollective], float], bool],
) -> list[list[FreeCollective]]:
    """Buckets of consecutive collectives, each grown while it ``fits`` the window before it.

    The window is the compute between the first members of the two buckets before. Without compute
    of its own a bucket cannot hide the next one: it may not close.
    """
    buckets: list[list[FreeCollective]] = []
    window_us = 0.0
    for collective in ordered:
        own_us = compute_us(buckets[-1][0], collective) if buckets else 0.0
        if buckets and (own_us <= 0.0 or fits([*buckets[-1], collective], window_us)):
            buckets[-1].append(collective)
        else:
            window_us = own_us
            buckets.append([collective])
    return buckets


def _live_at_fixed(program: Program) -> list[int]:
    ordered = put_on_demand(program).schedule
    profile = memory_profile(ordered)
    return [
        live
        for task, live in zip(ordered.tasks, profile, strict=True)
        if task.name not in program.movable
    ]
