"""The latency relaxation: how few collectives can meet all deadlines, and what they cost.

Bytes cannot be bucketed away, latencies can, but not all of them: a collective that is needed
early cannot share a bucket with many others, since the bucket ends late for all its members; one
that is ready late cannot share one with many that it would keep waiting. For a step of T, the
fewest batches that meet every deadline ``T - tail`` (or, mirrored, every head) are found greedily
in the order of deadlines, which is optimal for batches that end as a whole (S. Webster and K. R.
Baker, "Scheduling groups of jobs on a single machine", Operations Research 43, 1995). A T in which
that many latencies and all bytes do not fit the queue is impossible.

Only queues of width 1 are bounded: wider ones overlap latencies.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_overlap.cost_model.precedence import Precedence

_NUM_THRESHOLDS = 4
_NUM_BISECTIONS = 40


@dataclass(frozen=True, slots=True)
class Item:
    """A collective as its queue sees it: what precedes it, what it needs, what follows it."""

    head_us: float
    latency_us: float
    wire_us: float
    tail_us: float


@dataclass(frozen=True, slots=True)
class BatchBound:
    """A step that is too short, and what would have to fit it.

    Attributes:
        step_us: no step is shorter.
        num_batches: batches that are needed for it.
        latency_us: what they spend in latency.
        wire_us: what all collectives of the queue need on the wire.
    """

    step_us: float
    num_batches: int
    latency_us: float
    wire_us: float


def batch_bound(precedence: Precedence, queue: str, floor_us: float) -> BatchBound | None:
    """The least step in which the queue's batches can fit; None if that is ``floor_us`` or less.

    ``floor_us`` is a bound known already: the fewest batches for it are the most that count.
    """
    classes = _classes(precedence, queue)
    items = [item for members in classes for item in members]
    if not items:
        return None
    wire_us = sum(item.wire_us for item in items)
    margin_us = min(item.head_us for item in items) + min(item.tail_us for item in items)

    def fewest(step_us: float) -> BatchBound:
        counts = [_fewest_batches(members, step_us) for members in classes]
        latency_us = sum(latency for _, latency in counts)
        needed_us = margin_us + wire_us + latency_us
        return BatchBound(needed_us, sum(count for count, _ in counts), latency_us, wire_us)

    if fewest(floor_us).step_us <= floor_us:
        return None
    low_us = floor_us
    high_us = max(floor_us, _always_enough_us(items))
    for _ in range(_NUM_BISECTIONS):
        middle_us = (low_us + high_us) / 2
        if fewest(middle_us).step_us > middle_us:
            low_us = middle_us
        else:
            high_us = middle_us
    counted = fewest(high_us)
    return BatchBound(low_us, counted.num_batches, counted.latency_us, wire_us)


def _classes(precedence: Precedence, queue: str) -> list[list[Item]]:
    """The queue's collectives by bucket key: only members of one class can be merged."""
    classes: dict[tuple[str, ...], list[Item]] = defaultdict(list)
    for start, wait in precedence.wait_of.items():
        task = precedence.tasks[start]
        if task.queue == queue:
            item = Item(
                precedence.head_us[start],
                precedence.latency_us(start),
                task.wire_us,
                precedence.tail_us[wait],
            )
            classes[task.bucket_key].append(item)
    return list(classes.values())


def _always_enough_us(items: Sequence[Item]) -> float:
    """A step in which all collectives fit one by one."""
    return (
        max(item.head_us for item in items)
        + sum(item.latency_us + item.wire_us for item in items)
        + max(item.tail_us for item in items)
    )


def _fewest_batches(items: Sequence[Item], step_us: float) -> tuple[int, float]:
    """Number of batches one class needs and their latency, the worst of a few ways to count.

    A bucket has at least the latency of its slowest member. So the batches with a member of at
    least some latency are counted by those members alone, for a few such thresholds.
    """
    worst = (0, 0.0)
    latencies = sorted({item.latency_us for item in items if item.latency_us > 0.0})
    for latency_us in latencies[:: max(1, len(latencies) // _NUM_THRESHOLDS)]:
        slow = [item for item in items if item.latency_us >= latency_us]
        for count in (
            fewest_batches([(i.tail_us, i.wire_us, i.head_us) for i in slow], latency_us, step_us),
            fewest_batches([(i.head_us, i.wire_us, i.tail_us) for i in slow], latency_us, step_us),
        ):
            if math.isinf(count):
                return (len(items), math.inf)
            worst = max(worst, (int(count), count * latency_us), key=lambda pair: pair[1])
    return worst


def fewest_batches(
    items: Sequence[tuple[float, float, float]], latency_us: float, step_us: float
) -> float:
    """Fewest batches of (tail, wire, head) that end ``tail`` before the step; inf if none do."""
    used_us = min(head for _, _, head in items)
    num_batches = 0
    deadline_us = -math.inf
    for tail_us, wire_us, _ in sorted(items, key=lambda item: (-item[0], item[1])):
        used_us += wire_us
        if used_us > deadline_us:
            num_batches += 1
            used_us += latency_us
            deadline_us = step_us - tail_us
            if used_us > deadline_us:
                return math.inf
    return num_batches
