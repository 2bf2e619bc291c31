"""Which parameters stay gathered between forward and backward: ``reshard_after_forward="auto"``.

A parameter that is kept is not gathered again in backward, and holds memory from its last use in
forward to its first in backward. `keep_gathered` reads the two graphs that resharding everything
leads to, and keeps the parameters that save most time per byte while both graphs stay within the
limit; of equals, those that backward needs first (the last blocks). Some memory is left for what
the scheduler does with it. Nothing is changed here: `reshard` tags, the partitioner cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.fx as fx

from inductor_overlap.cost_model.memory import memory_profile
from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.cost_model.schedule import Schedule
from inductor_overlap.passes.auto_wrap import DEFAULT_HEADROOM
from inductor_overlap.passes.collectives import Collective
from inductor_overlap.passes.graph_schedule import read_graph
from inductor_overlap.passes.reshard import gather_chain, gathered_parameter

_SCHEDULED_SHARE = 0.04
"""Share of a graph's peak that is left for prefetched gathers, packing and late reductions."""


@dataclass(frozen=True)
class _Gather:
    """What keeping one parameter saves and costs in one graph.

    ``start`` and ``last_use`` are positions of tasks: of the gather, and of the last reader.
    """

    saved_us: float
    size_bytes: int
    start: int
    last_use: int


def keep_gathered(
    forward: fx.Graph,
    backward: fx.Graph,
    prices: PricedCluster,
    memory_limit_bytes: float | None,
) -> frozenset[str]:
    """Names of the graph inputs (parameters) whose gathered form is kept for backward.

    Args:
        forward, backward: the graphs with every parameter gathered in both; not changed.
        prices: what collectives cost.
        memory_limit_bytes: for the live bytes of each graph; None: its peak plus 5 %.
    """
    rooms = [_Room(graph, prices, memory_limit_bytes) for graph in (forward, backward)]
    before, after = (room.gathers for room in rooms)
    kept: list[str] = []
    for name in sorted(before.keys() & after.keys(), key=lambda name: _merit(after[name], name)):
        size_bytes = before[name].size_bytes
        spans = [
            (before[name].last_use + 1, len(rooms[0].live_bytes)),
            (0, after[name].start),
        ]
        if all(room.fits(span, size_bytes) for room, span in zip(rooms, spans, strict=True)):
            for room, span in zip(rooms, spans, strict=True):
                room.take(span, size_bytes)
            kept.append(name)
    return frozenset(kept)


def _merit(gather: _Gather, name: str) -> tuple[float, int, str]:
    return (-gather.saved_us / gather.size_bytes, gather.start, name)


class _Room:
    """Live bytes of one graph as it stands, and what is kept on top."""

    def __init__(self, graph: fx.Graph, prices: PricedCluster, limit_bytes: float | None) -> None:
        source = read_graph(graph, prices)
        schedule = source.program.schedule
        task_of = {node: name for name, nodes in source.nodes.items() for node in nodes}
        self.live_bytes = memory_profile(schedule)
        peak_bytes = max(self.live_bytes, default=0)
        limit_bytes = peak_bytes * DEFAULT_HEADROOM if limit_bytes is None else limit_bytes
        self.allowed_bytes = limit_bytes - _SCHEDULED_SHARE * peak_bytes
        self.gathers = _gathers(source.collectives, schedule, task_of)

    def fits(self, span: tuple[int, int], size_bytes: int) -> bool:
        most = max(self.live_bytes[slice(*span)], default=0)
        return most + size_bytes <= self.allowed_bytes

    def take(self, span: tuple[int, int], size_bytes: int) -> None:
        for position in range(*span):
            self.live_bytes[position] += size_bytes


def _gathers(
    collectives: Sequence[Collective], schedule: Schedule, task_of: Mapping[fx.Node, str]
) -> dict[str, _Gather]:
    position = {task.name: index for index, task in enumerate(schedule.tasks)}
    last_use = {name: position[task.name] for task in schedule.tasks for name in task.reads}
    found: dict[str, _Gather] = {}
    for collective in collectives:
        parameter = gathered_parameter(collective)
        if parameter is None:
            continue
        chain = gather_chain(collective)
        stored = [task_of[node] for node in chain[chain.index(collective.start) :]]
        written = [name for task in stored for name in schedule.by_name[task].writes]
        size_bytes = schedule.buffers[written[-1]].size_bytes if written else 0
        if size_bytes and written[-1] in last_use:
            saved_us = schedule.by_name[collective.name].duration_us
            start, last = position[collective.name], last_use[written[-1]]
            found[parameter] = _Gather(saved_us, size_bytes, start, last)
    return found
