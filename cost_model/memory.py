"""Live bytes of a schedule: which buffers exist while each task runs.

The order is replayed exactly as the allocator sees it: a task's outputs are allocated before its
inputs are freed, and what a collective reads and writes stays allocated until its wait, because
the communicator's stream may touch it until then. Sizes come from `Buffer` alone; nothing here
knows of parameters or of the allocator's rounding. Refuses (``ValueError``) an order that reads a
buffer before it exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate

from inductor_overlap.cost_model.schedule import Schedule, Task


def memory_profile(schedule: Schedule) -> list[int]:
    """Live bytes during each task, in program order: its outputs and its inputs included.

    Raises:
        ValueError: A task reads a buffer that is no input and that no earlier task wrote, or
            writes one that is unknown or already written.
    """
    if not schedule.tasks:
        return []
    change_bytes = [0] * (len(schedule.tasks) + 1)
    for name, (first, last) in buffer_lifetimes(schedule).items():
        size_bytes = schedule.buffers[name].size_bytes
        change_bytes[first] += size_bytes
        change_bytes[last + 1] -= size_bytes
    return list(accumulate(change_bytes[:-1]))


def buffer_lifetimes(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """First and last program position at which each buffer is allocated, both inclusive.

    Inputs live from position 0, outputs to the last one; an input that nothing reads lives to
    the end (no kernel of this graph frees it). Buffers that nothing writes are absent.

    Raises:
        ValueError: As `memory_profile`.
    """
    last_position = len(schedule.tasks) - 1
    buffers = schedule.buffers
    first = {name: 0 for name, buffer in buffers.items() if buffer.is_input}
    last = dict.fromkeys(first, -1)
    release_at = {
        task.collective: at for at, task in enumerate(schedule.tasks) if task.kind == "wait"
    }
    for position, task in enumerate(schedule.tasks):
        held_until = release_at.get(task.name, position)
        for name in task.writes:
            if name in first or name not in buffers:
                raise ValueError(f"task {task.name!r} writes unknown or written buffer {name!r}")
            first[name] = position
            last[name] = held_until
        for name in task.reads:
            if name not in first:
                raise ValueError(f"task {task.name!r} reads buffer {name!r} before it is written")
            if held_until > last[name]:
                last[name] = held_until
    for name in first:
        if buffers[name].is_output or last[name] < 0:
            last[name] = last_position
    return {name: (start, last[name]) for name, start in first.items()}


class LiveBytes:
    """Live bytes after each task that has run, in whatever order they run.

    Attributes:
        now: live bytes between the task that ran last and the next.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._buffers = schedule.buffers
        self._tasks = schedule.by_name
        self._holders = schedule.holders.copy()
        self.now = sum(buffer.size_bytes for buffer in schedule.buffers.values() if buffer.is_input)

    def run(self, task: Task) -> int:
        """Allocate what ``task`` writes and free what it is the last to hold.

        Returns the live bytes while it runs.
        """
        for name in task.writes:
            self.now += self._buffers[name].size_bytes
        during = self.now
        if task.kind == "start":  # holds what it reads and writes until its wait
            return during
        self._release(task.reads)
        if task.kind == "wait":
            start = self._tasks[task.collective]
            self._release(start.reads)
            self._release(start.writes)
            return during
        for name in task.writes:
            if name not in self._holders and not self._buffers[name].is_output:
                self.now -= self._buffers[name].size_bytes
        return during

    def freed_by(self, tasks: Sequence[Task]) -> int:
        """Bytes that ``tasks``, none of them run yet, are the only ones left to hold."""
        held = Counter(name for task in tasks for name in task.reads)
        last = [
            self._buffers[name] for name, holders in held.items() if self._holders[name] == holders
        ]
        return sum(buffer.size_bytes for buffer in last if not buffer.is_output)

    def _release(self, names: tuple[str, ...]) -> None:
        holders = self._holders
        for name in names:
            holders[name] -= 1
            if not holders[name]:
                buffer = self._buffers[name]
                if not buffer.is_output:
                    self.now -= buffer.size_bytes
