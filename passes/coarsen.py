"""A smaller program to search on: runs of fixed compute as one task each.

Policies try many plans, and most tasks never matter to any of them: no gather is first needed and
no reduction becomes ready between two neighbours. `coarsen` joins such neighbours, and the matmul
of a weight gradient with the views of its result; an order of the coarse program expands to one of
the whole program. Times add up exactly. Memory is exact between tasks and never too low inside
one; near the program's peak only views are joined to what comes before them, so that a limit binds
where it would.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from inductor_overlap.cost_model.memory import memory_profile
from inductor_overlap.cost_model.schedule import Buffer, Schedule, Task
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.reorder import put_on_demand

_NEAR_PEAK = 0.6
"""Tasks with more live bytes than this share of the peak, without overlap, stay as they are."""


@dataclass(frozen=True)
class CoarseProgram:
    """A coarse program, and what its joined tasks stand for."""

    program: Program
    parts: dict[str, tuple[str, ...]]

    def expand(self, order: Iterable[str]) -> list[str]:
        """Names of the whole program's tasks, in the order of the coarse ones."""
        return [part for name in order for part in self.parts.get(name, (name,))]


def coarsen(program: Program) -> CoarseProgram:
    """``program`` with runs of fixed compute joined, in the order without overlap."""
    groups = [*_runs(program), *_with_views(program).values()]
    groups = [group for group in groups if len(group) > 1]
    coarse = _joined_program(program, groups)
    most_bytes = _NEAR_PEAK * max(_live_bytes(program).values(), default=0)
    # A joined task holds what it frees inside beside what it writes later.
    live_bytes = _live_bytes(coarse.program)
    split: list[list[Task]] = []
    for group in groups:
        split += _one_by_one(group) if live_bytes[group[0].name] > most_bytes else [group]
    return coarse if len(split) == len(groups) else _joined_program(program, split)


def _one_by_one(group: Sequence[Task]) -> list[list[Task]]:
    """``group`` split so that each part has one task that takes time or memory, and views."""
    parts: list[list[Task]] = [[]]
    for task in group:
        if not _is_view(task) and not all(map(_is_view, parts[-1])):
            parts.append([])
        parts[-1].append(task)
    return parts


def _is_view(task: Task) -> bool:
    return task.kind == "compute" and task.duration_us == 0.0 and not task.writes


def _joined_program(program: Program, groups: Sequence[Sequence[Task]]) -> CoarseProgram:
    groups = [group for group in groups if len(group) > 1]
    if not groups:
        return CoarseProgram(program, {})
    parts = {group[0].name: tuple(task.name for task in group) for group in groups}
    gone = {name for names in parts.values() for name in names[1:]}
    gradients = {
        reduction: tuple(name for name in names if name not in gone)
        for reduction, names in program.weight_gradients.items()
    }
    coarse = replace(
        program,
        schedule=_join(program.schedule, groups),
        weight_gradients=gradients,
        is_on_demand=False,
    )
    return CoarseProgram(put_on_demand(coarse), parts)


def _with_views(program: Program) -> dict[str, list[Task]]:
    """The matmul of each weight gradient and the views of its result: they move together."""
    tasks, needs = program.schedule.by_name, program.schedule.needs
    groups: dict[str, list[Task]] = {}
    for reduction, names in program.weight_gradients.items():
        group = [tasks[names[0]]]
        inside = {names[0]}
        for name in names[1:]:
            view = tasks[name]
            if _is_view(view) and inside.issuperset(needs[name]):
                group.append(view)
                inside.add(name)
        groups[reduction] = group
    return groups


def _runs(program: Program) -> Iterator[list[Task]]:
    windows = program.windows
    becomes_ready = set(windows.ready_at.values())
    moved = {name for names in program.weight_gradients.values() for name in names}
    moved |= {c.absorbed for c in program.collectives}
    run: list[Task] = []
    for index, task in enumerate(program.fixed):
        alone = task.kind != "compute" or task.name in moved
        needs_others = bool(windows.needed[index]) or any(d in program.movable for d in task.deps)
        if run and (alone or needs_others or index in becomes_ready):
            yield run
            run = []
        if alone:
            yield [task]
        else:
            run.append(task)
    if run:
        yield run


def _live_bytes(program: Program) -> dict[str, int]:
    """Live bytes during each task, without overlap."""
    ordered = put_on_demand(program).schedule
    names = (task.name for task in ordered.tasks)
    return dict(zip(names, memory_profile(ordered), strict=True))


def _join(schedule: Schedule, groups: Sequence[Sequence[Task]]) -> Schedule:
    readers = Counter(name for task in schedule.tasks for name in task.reads)
    leader = {task.name: group[0].name for group in groups for task in group}
    buffers = dict(schedule.buffers)
    joined = {
        group[0].name: _joined(group, buffers, readers, schedule.machine.launch_us)
        for group in groups
    }
    tasks: list[Task] = []
    for task in schedule.tasks:
        if leader.get(task.name, task.name) == task.name:
            task = joined.get(task.name, task)
            deps = dict.fromkeys(leader.get(dep, dep) for dep in task.deps)
            deps.pop(task.name, None)
            tasks.append(replace(task, deps=tuple(deps)))
    return replace(schedule, tasks=tuple(tasks), buffers=buffers)


def _joined(
    group: Sequence[Task], buffers: dict[str, Buffer], readers: Counter[str], launch_us: float
) -> Task:
    """One task for ``group``; drops from ``buffers`` what lives inside it only."""
    inside = Counter(name for task in group for name in task.reads)
    written = {name for task in group for name in task.writes}
    kept = [n for n in written if buffers[n].is_output or readers[n] > inside[n]]
    reads = tuple(n for n in inside if n not in written)
    ends = {n for n in reads if readers[n] == inside[n] and not buffers[n].is_output}
    extra = _most_extra_bytes(group, buffers, written - set(kept), ends, Counter(inside))
    extra -= sum(buffers[name].size_bytes for name in kept)
    for name in written - set(kept):
        del buffers[name]
    name = group[0].name
    writes = sorted(kept)
    if extra > 0:
        buffers[f"{name}.inside"] = Buffer(f"{name}.inside", extra)
        writes.append(f"{name}.inside")
    timed = [task for task in group if task.duration_us > 0.0]
    busy_us = sum(task.duration_us for task in timed) + launch_us * max(0, len(timed) - 1)
    deps = tuple(dict.fromkeys(dep for task in group for dep in task.deps))
    return Task(name, duration_us=busy_us, deps=deps, reads=reads, writes=tuple(writes))


def _most_extra_bytes(
    group: Sequence[Task],
    buffers: dict[str, Buffer],
    internal: set[str],
    ends: set[str],
    left: Counter[str],
) -> int:
    """The most that is live inside the group beyond what was live before it."""
    now, most = 0, 0
    for task in group:
        now += sum(buffers[name].size_bytes for name in task.writes)
        most = max(most, now)
        now -= sum(buffers[n].size_bytes for n in task.writes if n in internal and not left[n])
        for name in task.reads:
            left[name] -= 1
            if not left[name] and (name in internal or name in ends):
                now -= buffers[name].size_bytes
    return most
