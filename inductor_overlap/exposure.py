"""Why communication is exposed: for each stalled wait, a reason read off the timeline.

Reasons are facts about one schedule, not advice: what ran between the start and the wait, what the
communicator was busy with, what was left to compute. Nothing is guessed; a stall is explained by
the first of these that holds, and a late begin or a shared link is added where it played a part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

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
    def window_us(self) -> float:
        return self.waited_us - self.enqueued_us

    @property
    def queued_us(self) -> float:
        return self.span.start_us - self.enqueued_us


@dataclass
class _Trace:
    """A timeline by collective and by communicator, and the extent of its compute."""

    transfers: dict[str, _Transfer] = field(default_factory=dict[str, _Transfer])
    queues: dict[str, list[_Transfer]] = field(
        default_factory=lambda: defaultdict[str, list[_Transfer]](list)
    )
    compute: list[Span] = field(default_factory=list[Span])


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
    needed = f"{format_us(duration_us)} of communication"
    if not trace.compute or transfer.waited_us <= trace.compute[0].start_us + _ROUNDING_US:
        return f"no compute comes before its wait that could hide its {needed}"
    if transfer.enqueued_us >= trace.compute[-1].end_us - _ROUNDING_US:
        return f"no compute is left after its start that could hide its {needed}"
    window = format_us(transfer.window_us)
    if transfer.window_us <= _ROUNDING_US:
        return _nothing_between(schedule, transfer)
    if transfer.window_us >= duration_us - _ROUNDING_US:
        return ""
    if transfer.consumer is None:
        return f"only {window} of the graph are left after its start for its {needed}"
    return f"only {window} between its start and its wait for its {needed}"


def _nothing_between(schedule: Schedule, transfer: _Transfer) -> str:
    """On the critical path if its neighbours in the program depend on each other through it."""
    name, producer, consumer = transfer.span.name, transfer.producer, transfer.consumer
    if (
        producer is not None
        and consumer is not None
        and producer.name in _timed_sources(schedule, name)
        and name in _timed_sources(schedule, consumer.name)
    ):
        return f"on the critical path: it needs {producer.name}, and {consumer.name} needs it"
    return "nothing runs between its start and its wait"


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
