"""A step time that no schedule of a graph on its machine can beat, and the reason why.

"No schedule" means: any order of the tasks that respects their dependences, compute included, and
any bucketing of collectives that share queue and bucket key and have latency to save (``wire_us <
duration_us``). A bucket takes at least the sum of its members' ``wire_us`` plus the largest of
their latencies, ``duration_us - wire_us``; packing only adds compute (casts that it absorbs the
caller leaves out). Prices must honour that: a collective's latency may not fall as it grows.

The bound is the largest of several relaxations, each of which forgets all but a few constraints:

* ``compute``, ``link``: one machine with heads and tails (`precedence`): its work, begun and
  followed no sooner than possible, in Jackson's preemptive order, which is optimal for one machine
  (J. R. Jackson, "Scheduling a production line to minimize maximum tardiness", 1955; W. A. Horn,
  "Some simple scheduling algorithms", Naval Research Logistics Quarterly 21, 1974). A link counts
  only bytes on the wire, so that sharing it or queues of several collectives cannot beat it.
* ``flow shop``: compute before or after the collectives of a link (`flow_shop`).
* ``latency``: the fewest batches that meet their deadlines must fit their queue (`batches`).
* ``contention``: compute slows down while collectives are in flight (`contention`).

Launch overhead counts for every compute task, for every collective that cannot be merged, and once
for each class of those that can.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

from inductor_overlap.cost_model.batches import batch_bound
from inductor_overlap.cost_model.contention import contention_bound
from inductor_overlap.cost_model.flow_shop import flow_shop
from inductor_overlap.cost_model.precedence import Job, Precedence
from inductor_overlap.cost_model.schedule import Schedule


@dataclass(frozen=True)
class LowerBound:
    """The bound and its certificate.

    Attributes:
        step_us: no schedule takes less.
        kind: the relaxation that gives it.
        certificate: in words, the work that cannot be done in less.
        relaxations: what each relaxation gives by itself.
    """

    step_us: float
    kind: str
    certificate: str
    relaxations: Mapping[str, float] = field(default_factory=dict[str, float])

    def __repr__(self) -> str:
        return f"LowerBound(step_us={self.step_us:.6g}, kind={self.kind!r})"


def lower_bound(schedule: Schedule) -> LowerBound:
    """The largest relaxation; near-linear in the tasks.

    Raises:
        ValueError: The schedule's order is not executable.
    """
    if not schedule.tasks:
        return LowerBound(0.0, "empty", "nothing to do")
    precedence = Precedence(schedule)
    bounds = list(_relaxations(precedence))
    floor_us = max(bound.step_us for bound in bounds)
    bounds += _latency_bounds(precedence, floor_us)
    best = max(bounds, key=lambda bound: bound.step_us)
    values: dict[str, float] = {}
    for bound in bounds:
        values[bound.kind] = max(bound.step_us, values.get(bound.kind, 0.0))
    return LowerBound(best.step_us, best.kind, best.certificate, values)


def jackson(jobs: Sequence[Job]) -> tuple[float, Job]:
    """Least max(end + tail) over preemptive one-machine orders, and the job that attains it."""
    order = sorted(jobs, key=lambda job: job.head_us)
    arrivals_us = [*(job.head_us for job in order[1:]), math.inf]
    left_us = [job.work_us for job in order]
    waiting: list[tuple[float, int]] = []
    worst_us, worst, now_us = -math.inf, order[0], 0.0
    for index, (job, next_us) in enumerate(zip(order, arrivals_us, strict=True)):
        now_us = max(now_us, job.head_us)
        heappush(waiting, (-job.tail_us, index))
        while waiting and now_us + left_us[waiting[0][1]] <= next_us:
            done = heappop(waiting)[1]
            now_us += left_us[done]
            if now_us + order[done].tail_us >= worst_us:
                worst_us, worst = now_us + order[done].tail_us, order[done]
        if waiting:
            left_us[waiting[0][1]] -= next_us - now_us
            now_us = next_us
    return worst_us, worst


def _relaxations(precedence: Precedence) -> Iterator[LowerBound]:
    compute = [*precedence.compute_jobs(), *_launches(precedence)]
    yield _one_machine("compute", "compute", compute)
    for link in precedence.links:
        yield _one_machine("link", f"link {link}", precedence.wire_jobs(link))
        for forward in (True, False):
            yield _flow_shop(precedence, link, forward)
    if precedence.schedule.machine.contention > 1.0:
        yield _contention(precedence, compute)


def _launches(precedence: Precedence) -> Iterator[Job]:
    """Launching starts on the compute queue: as few as bucketing can leave."""
    launch_us = precedence.schedule.machine.start_us
    if launch_us == 0.0:
        return
    classes: dict[tuple[str, tuple[str, ...]], list[int]] = defaultdict(list)
    for start in precedence.wait_of:
        task = precedence.tasks[start]
        if task.wire_us == task.duration_us and not task.bucket_key:
            yield Job(start, precedence.head_us[start], launch_us, precedence.tail_us[start])
        else:
            classes[task.queue, task.bucket_key].append(start)
    for starts in classes.values():
        head_us = min(precedence.head_us[start] for start in starts)
        tail_us = min(precedence.tail_us[start] for start in starts)
        yield Job(starts[0], head_us, launch_us, tail_us)


def _one_machine(kind: str, machine: str, jobs: Sequence[Job]) -> LowerBound:
    if not jobs:
        return LowerBound(0.0, kind, "no work")
    step_us, critical = jackson(jobs)
    return LowerBound(step_us, kind, _one_machine_certificate(machine, jobs, critical))


def _one_machine_certificate(machine: str, jobs: Sequence[Job], critical: Job) -> str:
    """The jobs that prove Jackson's value: those with at least some head and the critical tail."""
    late = sorted(
        (job for job in jobs if job.tail_us >= critical.tail_us),
        key=lambda job: job.head_us,
        reverse=True,
    )
    sums_us = list(accumulate(job.work_us for job in late))
    last = max(range(len(late)), key=lambda index: (late[index].head_us + sums_us[index], index))
    return (
        f"{last + 1} of {len(jobs)} jobs of {machine} need {sums_us[last]:.6g} us, none can begin "
        f"before {late[last].head_us:.6g} us, and at least {critical.tail_us:.6g} us follow each"
    )


def _flow_shop(precedence: Precedence, link: str, forward: bool) -> LowerBound:
    shop = flow_shop(precedence, link, forward=forward)
    relation = "before" if forward else "after"
    return LowerBound(
        shop.step_us,
        "flow shop",
        f"{shop.compute_us:.6g} us of compute {relation} {shop.num_collectives} collectives that "
        f"hold link {link} for {shop.wire_us:.6g} us, in Johnson's order",
    )


def _contention(precedence: Precedence, jobs: Sequence[Job]) -> LowerBound:
    contention = precedence.schedule.machine.contention
    bound = contention_bound(precedence, jobs)
    return LowerBound(
        bound.step_us,
        "contention",
        f"{bound.work_us:.6g} us of compute that lies {bound.idle_us:.6g} us inside the step, "
        f"slowed by a factor of {contention:.4g} by {bound.in_flight_us:.6g} us of communication",
    )


def _latency_bounds(precedence: Precedence, floor_us: float) -> Iterator[LowerBound]:
    if precedence.schedule.machine.queue_width > 1:
        return
    for queue in sorted({precedence.tasks[start].queue for start in precedence.wait_of}):
        bound = batch_bound(precedence, queue, floor_us)
        if bound is not None:
            yield LowerBound(
                bound.step_us,
                "latency",
                f"queue {queue} needs {bound.num_batches} batches to meet its deadlines: "
                f"{bound.latency_us:.6g} us of latency beside {bound.wire_us:.6g} us of bytes",
            )
