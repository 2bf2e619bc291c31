"""The flow-shop relaxation: compute that must precede (or follow) each collective of a link.

Two machines, compute and one link. Each compute task is charged to one collective that cannot
begin before it (forward: gradients and their reductions) or that must have ended before it
(backward: gathers and what reads them, on the reversed schedule). The collective j then needs
``a_j`` of compute and after it ``b_j`` of the link, and no order of such jobs ends before the one
of Johnson's rule, interrupted work included (S. M. Johnson, "Optimal two- and three-stage
production schedules with setup times included", Naval Research Logistics Quarterly 1, 1954).

Any way of charging gives a valid bound; which one is tight depends on the graph. With one limit
per try, a task goes to the deepest collective that is no deeper than the limit, so that a chain of
gradients is charged to its end, and beyond the limit to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inductor_overlap.cost_model.precedence import Job, Precedence

NUM_LIMITS = 6


@dataclass(frozen=True, slots=True)
class FlowShop:
    """A bound and where it comes from; times as in `johnson_us`."""

    step_us: float
    num_collectives: int
    compute_us: float
    wire_us: float


def flow_shop(precedence: Precedence, link: str, *, forward: bool) -> FlowShop:
    """The best flow-shop bound of one link over several ways of charging compute."""
    view = _View(precedence, link, forward)
    best = FlowShop(0.0, 0, 0.0, 0.0)
    for limit_us in view.limits():
        candidate = view.bound(limit_us)
        if candidate.step_us > best.step_us:
            best = candidate
    return best


def johnson_us(pairs: Sequence[tuple[float, float]]) -> float:
    """Least makespan of jobs (a, b): a on the first machine, then b on the second."""
    rising = sorted((a, b) for a, b in pairs if a <= b)
    falling = sorted(((a, b) for a, b in pairs if a > b), key=lambda pair: -pair[1])
    first_us = second_us = 0.0
    for a, b in (*rising, *falling):
        first_us += a
        second_us = max(second_us, first_us) + b
    return second_us


class _View:
    """A link's collectives with compute before them; against the arrows if not ``forward``."""

    def __init__(self, precedence: Precedence, link: str, forward: bool) -> None:
        self._precedence = precedence
        self._forward = forward
        self._jobs: dict[int, Job] = {}
        for job in precedence.wire_jobs(link):
            at = job.position if forward else precedence.wait_of[job.position]
            self._jobs[at] = job
        self._depth_us = precedence.head_us if forward else precedence.tail_us
        self._next = precedence.succs if forward else precedence.preds

    def limits(self) -> Iterator[float]:
        """Depths to try, evenly spaced over the collectives; the last admits all of them."""
        depths = sorted({self._depth_us[at] for at in self._jobs})
        step = max(1, len(depths) // NUM_LIMITS)
        return iter(depths[::-1][::step])

    def bound(self, limit_us: float) -> FlowShop:
        """Head of the charged compute, Johnson's makespan, one latency, and the least tail."""
        target = self._charge(limit_us)
        work_us: dict[int, float] = {}
        head_us = float("inf")
        for at, charged in enumerate(target):
            work = self._precedence.work_us(at)
            if charged is None or work == 0.0:
                continue
            work_us[charged] = work_us.get(charged, 0.0) + work
            head_us = min(head_us, self._before(at))
        if not work_us:
            return FlowShop(0.0, 0, 0.0, 0.0)
        pairs = [(work, self._jobs[at].work_us) for at, work in work_us.items()]
        lag_us = min(self._lag(at) for at in work_us)
        tail_us = min(self._after(at) for at in work_us)
        return FlowShop(
            head_us + johnson_us(pairs) + lag_us + tail_us,
            len(pairs),
            sum(a for a, _ in pairs),
            sum(b for _, b in pairs),
        )

    def _charge(self, limit_us: float) -> list[int | None]:
        """For each task, the collective among those behind it that its work is charged to."""
        target: list[int | None] = [None] * len(self._next)
        positions = range(len(self._next))
        for at in reversed(positions) if self._forward else positions:
            for following in self._next[at]:
                for candidate in (
                    following if following in self._jobs else None,
                    target[following],
                ):
                    if candidate is not None and self._prefers(candidate, target[at], limit_us):
                        target[at] = candidate
        return target

    def _prefers(self, new: int, old: int | None, limit_us: float) -> bool:
        if old is None:
            return True
        new_us, old_us = self._depth_us[new], self._depth_us[old]
        if new_us <= limit_us:
            return old_us > limit_us or new_us > old_us
        return new_us < old_us

    def _before(self, at: int) -> float:
        return (self._precedence.head_us if self._forward else self._precedence.tail_us)[at]

    def _lag(self, at: int) -> float:
        """Latency between the compute and the wire: forward only."""
        return self._precedence.latency_us(at) if self._forward else 0.0

    def _after(self, at: int) -> float:
        """What follows the wire; against the arrows: what precedes it, latency included."""
        return self._jobs[at].tail_us if self._forward else self._jobs[at].head_us
