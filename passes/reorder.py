"""Write orders for a program: on demand, or one gather ahead.

Both keep the order of the fixed tasks and move only starts, waits and what serves them.
`order_on_demand` is the order without overlap, `order_one_ahead` the prefetch distance of one that
SimpleFSDP describes (arXiv 2411.00284, section on reordering). `list_schedule`, in a module of its
own, fills the queues within a memory limit. None is trusted: callers simulate the result and
replay its memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from inductor_overlap.cost_model.schedule import Schedule
from inductor_overlap.passes.program import FreeCollective, Program


class Emitter:
    """Writes an order task by task; what a task needs and has not been written comes first."""

    def __init__(self, schedule: Schedule) -> None:
        self._needs = schedule.needs
        self._emitted: set[str] = set()
        self.order: list[str] = []

    def __contains__(self, name: str) -> bool:
        return name in self._emitted

    def missing(self, name: str) -> list[str]:
        """What must still be written up to and including ``name``, in executable order."""
        if name in self._emitted:
            return []
        found: list[str] = []
        state: dict[str, bool] = {}
        stack = [name]
        while stack:
            current = stack[-1]
            if state.get(current) or current in self._emitted:
                stack.pop()
            elif current in state:
                state[current] = True
                found.append(current)
                stack.pop()
            else:
                state[current] = False
                stack.extend(reversed(self._needs[current]))
        return found

    def emit(self, name: str) -> Sequence[str]:
        """Write ``name`` after everything it needs; returns what was written."""
        emitted = self._emitted
        if name in emitted:
            return []
        if emitted.issuperset(self._needs[name]):  # most tasks: nothing else is missing
            emitted.add(name)
            self.order.append(name)
            return [name]
        written = self.missing(name)
        self.order.extend(written)
        emitted.update(written)
        return written


def put_on_demand(program: Program) -> Program:
    """``program`` in the order of `order_on_demand`."""
    if program.is_on_demand:
        return program
    return replace(program.with_order(order_on_demand(program)), is_on_demand=True)


def order_on_demand(program: Program) -> list[str]:
    """Gathers start just before their first reader; reductions start and end at once."""
    windows = program.windows
    emitter = Emitter(program.schedule)
    ready = _by_index(program.reductions, windows.ready_at)
    for index, task in enumerate(program.fixed):
        for collective in ready.get(index, ()):
            emitter.emit(collective.wait)
        emitter.emit(task.name)
    for collective in ready.get(len(program.fixed), ()):
        emitter.emit(collective.wait)
    return finish_order(program, emitter)


def order_one_ahead(program: Program) -> list[str]:
    """The next gather starts around the wait of this one; a reduction ends as the next starts.

    Forward: the next gather starts before this one's wait. Backward (the program has reductions):
    after it, so that it does not delay the pending reduction.
    """
    windows = program.windows
    emitter = Emitter(program.schedule)
    gathers = sorted(program.gathers, key=lambda gather: windows.first_use[gather.name])
    following = dict(zip([g.name for g in gathers], gathers[1:], strict=False))
    ready = _by_index(program.reductions, windows.ready_at)
    in_flight: dict[str, FreeCollective] = {}
    backward = bool(program.reductions)
    for index, task in enumerate(program.fixed):
        _start_reductions(ready.get(index, ()), in_flight, emitter)
        for name in windows.needed[index]:
            ahead = following.get(name)
            if ahead is not None and windows.ready_at[ahead.name] > index:
                ahead = None  # a barrier stands between
            if ahead is not None and not backward:
                emitter.emit(name)
                emitter.emit(ahead.name)
            emitter.emit(program.by_name[name].wait)
            if ahead is not None and backward:
                emitter.emit(ahead.name)
        emitter.emit(task.name)
    _start_reductions(ready.get(len(program.fixed), ()), in_flight, emitter)
    return finish_order(program, emitter)


def _start_reductions(
    ready: Iterable[FreeCollective], in_flight: dict[str, FreeCollective], emitter: Emitter
) -> None:
    for collective in ready:
        queue = collective.bucket_key[1]
        if queue in in_flight:
            emitter.emit(in_flight[queue].wait)
        emitter.emit(collective.name)
        in_flight[queue] = collective


def _by_index(
    collectives: Iterable[FreeCollective], index_of: dict[str, int]
) -> dict[int, list[FreeCollective]]:
    grouped: dict[int, list[FreeCollective]] = {}
    for collective in collectives:
        grouped.setdefault(index_of[collective.name], []).append(collective)
    return grouped


def finish_order(program: Program, emitter: Emitter) -> list[str]:
    """Whatever is left: starts before waits, so that the last reductions run together."""
    for collective in program.collectives:
        emitter.emit(collective.name)
    for task in program.schedule.tasks:
        if task.name not in emitter:
            emitter.emit(task.name)
    return emitter.order
