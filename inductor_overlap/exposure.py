"""Why communication is exposed: for each stalled wait, a reason read off the timeline.

Reasons are facts about one schedule, not advice: what ran between the start and the wait, what the
communicator was busy with, what was left to compute. Nothing is guessed. The place in the program
explains a stall first; a late begin or a shared link is added where it played a part.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from inductor_overlap.cost_model.schedule import Schedule
from inductor_overlap.cost_model.simulate import COMPUTE_QUEUE, Span, Timeline
from inductor_overlap.display import format_us

_ROUNDING_US = 1e-6
"""Times closer than this are the same."""


@dataclass(frozen=True)
class Exposed:
    """A collective (name of its start), the stall of its wait, and why it stalled."""

    collective: str
    us: float
    reason: str


def explain_exposed(schedule: Schedule, timeline: Timeline) -> list[Exposed]:
    """The stalled waits of ``timeline`` with reasons, longest first.

    Args:
        schedule: the schedule that ``timeline`` was simulated from.
    """
    trace = _read_trace(schedule, timeline)
    exposed = [
        Exposed(name, us, _explain(schedule, trace, trace.transfers[name]))
        for name, us in timeline.exposed_by.items()
    ]
    return sorted(exposed, key=lambda item: -item.us)


@dataclass
class _Transfer:
    """One collective in a timeline.

    Attributes:
        span: on its communicator.
        enqueued_us: when the compute queue reached its start.
        producer: the compute task that ran last before its start.
        waited_us: when the compute queue reached its wait; set if that stalled.
        consumer: the compute task that runs first after its wait, likewise.
    """

    span: Span
    enqueued_us: float
    producer: Span | None
    waited_us: float = 0.0
    consumer: Span | None = None

    @property
    def queued_us(self) -> float:
        return self.span.start_us - self.enqueued_us


@dataclass
class _Trace:
    """A timeline by collective and by communicator, and its compute in program order."""

    transfers: dict[str, _Transfer] = field(default_factory=dict[str, _Transfer])
    queues: dict[str, list[_Transfer]] = field(
        default_factory=lambda: defaultdict[str, list[_Transfer]](list)
    )
    compute: list[Span] = field(default_factory=list[Span])

    @cached_property
    def _computed_us(self) -> list[float]:
        """Compute time before each task of ``compute``, and all of it at the end."""
        return list(accumulate((s.end_us - s.start_us for s in self.compute), initial=0.0))

    def computed_before(self, time_us: float) -> float:
        """Compute time of the tasks that begin before ``time_us``."""
        count = bisect_left(self.compute, time_us - _ROUNDING_US, key=lambda span: span.start_us)
        return self._computed_us[count]

    def computed_after(self, time_us: float) -> float:
        return self._computed_us[-1] - self.computed_before(time_us)


def _read_trace(schedule: Schedule, timeline: Timeline) -> _Trace:
    trace = _Trace()
    stalled: list[_Transfer] = []
    now_us = 0.0
    for span in timeline.spans:
        if span.queue != COMPUTE_QUEUE:
            transfer = _Transfer(span, now_us, trace.compute[-1] if trace.compute else None)
            trace.transfers[span.name] = transfer
            trace.queues[span.queue].append(transfer)
            continue
        now_us = span.end_us
        if span.kind == "wait":
            transfer = trace.transfers[schedule.by_name[span.name].collective]
            transfer.waited_us = span.start_us
            stalled.append(transfer)
        elif span.kind == "compute":
            trace.compute.append(span)
            for transfer in stalled:
                transfer.consumer = span
            stalled.clear()
    return trace


def _explain(schedule: Schedule, trace: _Trace, transfer: _Transfer) -> str:
    """The main reason, then what made the collective begin late or take long."""
    duration_us = schedule.by_name[transfer.span.name].duration_us
    main = _main_reason(schedule, trace, transfer, duration_us)
    parts = [main, *_aggravations(trace, transfer, duration_us)]
    return "; ".join(part for part in parts if part)


def _main_reason(schedule: Schedule, trace: _Trace, transfer: _Transfer, duration_us: float) -> str:
    """What its place in the program says; empty if only its queue or its link delayed it."""
    needed = f"its {format_us(duration_us)} of communication"
    window_us = transfer.waited_us - transfer.enqueued_us
    before_us = trace.computed_before(transfer.waited_us)
    after_us = trace.computed_after(transfer.enqueued_us)
    if window_us >= duration_us - _ROUNDING_US:
        return ""
    if window_us <= _ROUNDING_US and (neighbours := _critical_neighbours(schedule, transfer)):
        return f"on the critical path: it needs {neighbours[0]}, and {neighbours[1]} needs it"
    if after_us < duration_us:
        return f"last of the graph: {_amount(after_us)} is left after its start to hide {needed}"
    if before_us < duration_us:
        return f"first of the graph: {_amount(before_us)} comes before its wait to hide {needed}"
    if window_us <= _ROUNDING_US:
        return f"nothing runs between its start and its wait to hide {needed}"
    return f"only {format_us(window_us)} between its start and its wait to hide {needed}"


def _amount(compute_us: float) -> str:
    return (
        "no compute" if compute_us <= _ROUNDING_US else f"only {format_us(compute_us)} of compute"
    )


def _critical_neighbours(schedule: Schedule, transfer: _Transfer) -> tuple[str, str] | None:
    """The compute tasks around it in the program, if they depend on each other through it."""
    producer, consumer, name = transfer.producer, transfer.consumer, transfer.span.name
    if producer is None or consumer is None:
        return None
    if producer.name not in _timed_sources(schedule, name):
        return None
    if name not in _timed_sources(schedule, consumer.name):
        return None
    return producer.name, consumer.name


def _timed_sources(schedule: Schedule, name: str) -> set[str]:
    """Collectives and compute tasks of some duration that a task needs, views looked through."""
    found: set[str] = set()
    seen: set[str] = set()
    pending = list(schedule.by_name[name].deps)
    while pending:
        task = schedule.by_name[pending.pop()]
        if task.name in seen:
            continue
        seen.add(task.name)
        if task.kind == "wait":
            found.add(task.collective)
        elif task.duration_us > 0.0:
            found.add(task.name)
        else:
            pending += task.deps
    return found


def _aggravations(trace: _Trace, transfer: _Transfer, duration_us: float) -> Iterator[str]:
    span = transfer.span
    if transfer.queued_us > _ROUNDING_US:
        ahead = _ahead(trace.queues[span.queue], transfer)
        yield (
            f"it began {format_us(transfer.queued_us)} after its start, "
            f"behind {_names(ahead)} on {span.queue}"
        )
    shared_us = span.end_us - span.start_us - duration_us
    if shared_us > _ROUNDING_US:
        yield f"sharing its link cost it {format_us(shared_us)}"


def _ahead(queue: Sequence[_Transfer], transfer: _Transfer) -> list[str]:
    """Collectives that the communicator still had to finish when ``transfer`` was enqueued."""
    earlier = queue[: queue.index(transfer)]
    return [t.span.name for t in earlier if t.span.end_us > transfer.enqueued_us + _ROUNDING_US]


def _names(names: Sequence[str]) -> str:
    if len(names) <= 2:
        return " and ".join(names)
    return f"{names[0]} and {len(names) - 1} others"
