"""The contention relaxation: compute that must run slower because bytes move at the same time.

Take compute jobs with at least some head h and some tail q, C of work together. They run between h
and T - q. Collectives are in flight for at least F in all, outside that interval for h + q at most,
so for F - h - q inside it, when compute advances at rate 1/c only:

    T - h - q >= C + (1 - 1/c) max(0, F - h - q)

The bound is the largest over heads and tails; for c = 1 it is that of one machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_overlap.cost_model.precedence import Job, Precedence


@dataclass(frozen=True, slots=True)
class ContentionBound:
    """A bound and where it comes from.

    Attributes:
        step_us: no step is shorter.
        work_us: the compute jobs that prove it.
        idle_us: least head and least tail of those jobs.
        in_flight_us: least time that collectives are in flight.
    """

    step_us: float
    work_us: float
    idle_us: float
    in_flight_us: float


def contention_bound(precedence: Precedence, jobs: Sequence[Job]) -> ContentionBound:
    """The best bound over subsets of the compute ``jobs``."""
    in_flight_us = _in_flight_us(precedence)
    slowed = 1.0 - 1.0 / precedence.schedule.machine.contention
    by_tail = sorted(jobs, key=lambda job: job.tail_us)
    best = ContentionBound(0.0, 0.0, 0.0, in_flight_us)
    dropped = 0
    while dropped < len(by_tail):
        kept = sorted(by_tail[dropped:], key=lambda job: -job.head_us)
        work_us = 0.0
        for job in kept:
            work_us += job.work_us
            idle_us = job.head_us + by_tail[dropped].tail_us
            step_us = idle_us + work_us + slowed * max(0.0, in_flight_us - idle_us)
            if step_us > best.step_us:
                best = ContentionBound(step_us, work_us, idle_us, in_flight_us)
        dropped = 2 * dropped + 1
    return best


def _in_flight_us(precedence: Precedence) -> float:
    """Least time in which anything is in flight: the bytes of the busiest link, or its queue."""
    links_us = (sum(job.work_us for job in precedence.wire_jobs(link)) for link in precedence.links)
    busiest_us = max(links_us, default=0.0)
    if precedence.schedule.machine.queue_width > 1:
        return busiest_us
    return max([busiest_us, *_queues_us(precedence)])


def _queues_us(precedence: Precedence) -> list[float]:
    """For each queue of width 1, its bytes and one latency for each class of collectives."""
    wires_us: dict[str, float] = defaultdict(float)
    latencies_us: dict[tuple[str, tuple[str, ...]], float] = defaultdict(float)
    for start in precedence.wait_of:
        task = precedence.tasks[start]
        wires_us[task.queue] += task.wire_us
        key = (task.queue, task.bucket_key)
        latencies_us[key] = max(latencies_us[key], precedence.latency_us(start))
    for (queue, _), latency_us in latencies_us.items():
        wires_us[queue] += latency_us
    return list(wires_us.values())
