"""Timelines as pictures: a trace for ui.perfetto.dev, and a PNG.

Both show the schedule before and after, one track per queue. The trace is Chrome's JSON format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), whose times are
microseconds, as ours are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from inductor_overlap.cost_model.simulate import COMPUTE_QUEUE, Span, Timeline
from inductor_overlap.display import format_bytes, format_us

COLOURS = {
    "compute": "#4c78a8",
    "communication": "#f58518",
    "stall": "#e45756",
    "launch": "#bab0ac",
}


def perfetto_trace(timelines: Mapping[str, Timeline]) -> dict[str, Any]:
    """Trace events: a process for each timeline, a thread for each of its queues."""
    events: list[dict[str, Any]] = []
    for process, (title, timeline) in enumerate(timelines.items(), start=1):
        events += _process_events(process, title, timeline)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def queues_of(timeline: Timeline) -> list[str]:
    """The compute queue, then the communicators in the order of their first use."""
    return list(dict.fromkeys([COMPUTE_QUEUE, *(span.queue for span in timeline.spans)]))


def category(span: Span) -> str:
    """``compute``, ``communication``, ``stall`` or ``launch``."""
    if span.queue != COMPUTE_QUEUE:
        return "communication"
    return {"compute": "compute", "wait": "stall", "start": "launch"}[span.kind]


def _process_events(process: int, title: str, timeline: Timeline) -> Iterator[dict[str, Any]]:
    name = f"{title}: {format_us(timeline.step_us)}"
    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    threads = {queue: number for number, queue in enumerate(queues_of(timeline), start=1)}
    for queue, thread in threads.items():
        track: dict[str, Any] = {"ph": "M", "pid": process, "tid": thread}
        yield {**track, "name": "thread_name", "args": {"name": queue}}
        yield {**track, "name": "thread_sort_index", "args": {"sort_index": thread}}
    for span in timeline.spans:
        yield {
            "ph": "X",
            "pid": process,
            "tid": threads[span.queue],
            "name": span.name,
            "cat": category(span),
            "ts": span.start_us,
            "dur": span.end_us - span.start_us,
        }


def draw_timelines(timelines: Mapping[str, Timeline]) -> Any:
    """A matplotlib figure with one panel for each timeline, all on the same time axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = _matplotlib("figure").Figure(
        figsize=(12.0, 2.6 * len(timelines)), layout="constrained"
    )
    panels = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _draw(axes, title, timeline)
    panels[-1].set_xlabel("ms")
    patch = _matplotlib("patches").Patch
    handles = [patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _matplotlib(module: str) -> Any:
    """Imported on demand: an optional dependency, and slow to load."""
    try:
        return import_module(f"matplotlib.{module}")
    except ImportError as error:
        raise ImportError(
            "drawing a timeline needs matplotlib, which is not installed; "
            "run: pip install 'inductor-overlap[plot]'"
        ) from error


def _draw(axes: Any, title: str, timeline: Timeline) -> None:
    queues = queues_of(timeline)
    for row, queue in enumerate(queues):
        for name, colour in COLOURS.items():
            bars = [
                (span.start_us / 1e3, (span.end_us - span.start_us) / 1e3)
                for span in timeline.spans
                if span.queue == queue and category(span) == name
            ]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour)
    axes.set_yticks(range(len(queues)), labels=queues)
    axes.invert_yaxis()
    axes.set_title(
        f"{title}: step {format_us(timeline.step_us)}, exposed {format_us(timeline.exposed_us)}, "
        f"peak {format_bytes(timeline.peak_bytes)}",
        loc="left",
        fontsize="medium",
    )
