"""The best step by trying everything: every order and every bucketing of a tiny schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from inductor_overlap.cost_model.schedule import Schedule, Task
from inductor_overlap.cost_model.simulate import simulate


def least_step_us(case: Schedule) -> float:
    """The least simulated step over all orders of all bucketings of ``case``."""
    bare = replace(case, tasks=tuple(_without_buffers(task) for task in case.tasks), buffers={})
    return min(
        simulate(replace(bare, tasks=order)).step_us
        for tasks in bucketings(bare.tasks)
        for order in orders(tasks)
    )


def _without_buffers(task: Task) -> Task:
    return replace(task, reads=(), writes=())


def orders(tasks: Sequence[Task]) -> Iterator[tuple[Task, ...]]:
    """Every order of ``tasks`` that respects their dependences."""

    def extend(done: tuple[Task, ...], left: tuple[Task, ...]) -> Iterator[tuple[Task, ...]]:
        if not left:
            yield done
        names = {task.name for task in done}
        for task in left:
            if set(task.deps) | ({task.collective} - {""}) <= names:
                yield from extend((*done, task), tuple(t for t in left if t is not task))

    return extend((), tuple(tasks))


def bucketings(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Every way of merging collectives; some have no order (a cycle)."""
    starts = [task for task in tasks if task.kind == "start" and task.wire_us < task.duration_us]
    for groups in _partitions(starts):
        merged = list(tasks)
        for group in groups:
            if len(group) > 1:
                merged = _merge(merged, group)
        yield merged


def _partitions(starts: Sequence[Task]) -> Iterator[list[list[Task]]]:
    if not starts:
        yield []
        return
    first, *rest = starts
    for groups in _partitions(rest):
        yield [[first], *groups]
        for index, group in enumerate(groups):
            if (group[0].queue, group[0].bucket_key) == (first.queue, first.bucket_key):
                yield [*groups[:index], [first, *group], *groups[index + 1 :]]


def _merge(tasks: Sequence[Task], group: Sequence[Task]) -> list[Task]:
    """One collective of all bytes and the largest latency; members' names mean the bucket's."""
    wire_us = sum(task.wire_us for task in group)
    latency_us = max(task.duration_us - task.wire_us for task in group)
    members = {task.name for task in group}
    waits = [task for task in tasks if task.kind == "wait" and task.collective in members]
    start = replace(
        group[0],
        duration_us=latency_us + wire_us,
        wire_us=wire_us,
        link_us=wire_us,  # the least that the bound allows a bucket
        deps=tuple({dep for task in group for dep in task.deps}),
    )
    wait = replace(
        waits[0],
        collective=start.name,
        deps=tuple({dep for task in waits for dep in task.deps}),
    )
    renamed = {task.name: start.name for task in group} | {task.name: wait.name for task in waits}
    kept = [task for task in tasks if task.name not in renamed]
    return [
        replace(task, deps=tuple({renamed.get(dep, dep) for dep in task.deps}))
        for task in (*kept, start, wait)
    ]
