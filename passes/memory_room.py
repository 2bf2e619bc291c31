"""How much memory an order leaves while it is being written: what the list scheduler asks.

`LiveBytes` counts live bytes exactly, task by task, as `cost_model.memory` does for a whole order.
`MemoryRoom` compares them with the order without overlap (`put_on_demand`): what is live beyond
it is *held* by early gathers and late reductions, and must fit beside all that is yet to come.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from inductor_overlap.cost_model.memory import memory_profile
from inductor_overlap.cost_model.schedule import Schedule, Task
from inductor_overlap.passes.program import FreeCollective, Program
from inductor_overlap.passes.reorder import put_on_demand


class LiveBytes:
    """Live bytes after each task that has run, in whatever order they run."""

    def __init__(self, schedule: Schedule) -> None:
        self._buffers = schedule.buffers
        self._tasks = schedule.by_name
        self._holders: Counter[str] = Counter()
        for task in schedule.tasks:
            self._holders.update(task.reads)
            if task.kind == "start":
                self._holders.update(task.writes)
        self.now = sum(buffer.size_bytes for buffer in schedule.buffers.values() if buffer.is_input)

    def run(self, task: Task) -> None:
        """Allocate what ``task`` writes and free what it is the last to hold."""
        self.now += sum(self._buffers[name].size_bytes for name in task.writes)
        if task.kind == "start":  # holds what it reads and writes until its wait
            return
        self._release(task.reads)
        if task.kind == "wait":
            start = self._tasks[task.collective]
            self._release(start.reads)
            self._release(start.writes)
            return
        for name in task.writes:
            if not self._holders[name] and not self._buffers[name].is_output:
                self.now -= self._buffers[name].size_bytes

    def freed_by(self, tasks: Sequence[Task]) -> int:
        """Bytes that ``tasks``, none of them run yet, are the only ones left to hold."""
        held = Counter(name for task in tasks for name in task.reads)
        last = [
            self._buffers[name] for name, holders in held.items() if self._holders[name] == holders
        ]
        return sum(buffer.size_bytes for buffer in last if not buffer.is_output)

    def _release(self, names: tuple[str, ...]) -> None:
        for name in names:
            self._holders[name] -= 1
            buffer = self._buffers[name]
            if not self._holders[name] and not buffer.is_output:
                self.now -= buffer.size_bytes


class MemoryRoom:
    """Room for early gathers and late reductions around the fixed tasks of a program.

    Attributes:
        live: of the order written so far.
        limit_bytes: what no task may exceed.
    """

    def __init__(self, program: Program, limit_bytes: float) -> None:
        self.live = LiveBytes(program.schedule)
        self.limit_bytes = limit_bytes
        self._most: list[int] = []
        """Most live bytes from one fixed task to the end of the next, on demand."""
        self._reducing: list[int] = []
        """The same, only until the reductions between them have ended."""
        self._rest: list[int] = []
        """The same, only after the reductions between them have ended."""
        self._reduced: list[int] = []
        """Live bytes once the reductions before a fixed task have ended, on demand."""
        self._before: list[int] = []
        """Live bytes once all collectives before a fixed task have been waited for, on demand."""
        self._replay_on_demand(program)
        self._reserved = [0] * len(self._most)

    def _replay_on_demand(self, program: Program) -> None:
        ordered = put_on_demand(program).schedule
        live = LiveBytes(program.schedule)
        reducing, rest, reduced, before = 0, 0, live.now, live.now
        for task, live_bytes in zip(ordered.tasks, memory_profile(ordered), strict=True):
            rest = max(rest, live_bytes)
            live.run(task)
            before = live.now if task.kind == "wait" else before
            collective = program.by_wait.get(task.name)
            if collective is not None and not collective.is_gather:
                reducing, rest, reduced = max(reducing, rest), 0, live.now
            if task.name not in program.movable:
                self._add(reducing, rest, reduced, before)
                reducing, rest, reduced, before = 0, 0, live.now, live.now
        self._add(reducing, rest, reduced, live.now)

    def _add(self, reducing: int, rest: int, reduced: int, before: int) -> None:
        self._most.append(max(reducing, rest))
        self._reducing.append(reducing)
        self._rest.append(rest)
        self._reduced.append(reduced)
        self._before.append(before)

    def held_bytes(self, index: int, *, is_served: bool = True) -> int:
        """What late reductions hold now, before the fixed task of ``index``.

        ``is_served``: the gathers that the task needs have been waited for.
        """
        on_demand = self._before[index] if is_served else self._reduced[index]
        return max(0, self.live.now - on_demand - self._reserved[index])

    def is_full(self, index: int) -> bool:
        """True if the fixed task of ``index`` does not fit beside what is held."""
        needed = self._rest[index] + self._reserved[index]
        return needed + self.held_bytes(index, is_served=False) > self.limit_bytes

    def has_room(self, index: int, size_bytes: int, first: Sequence[Task] = ()) -> bool:
        """True if ``size_bytes`` more fit until the fixed task of ``index`` has run.

        ``first``: tasks that run before it (packing) and free what they are the last to read.
        """
        needed = self._rest[index] + self._reserved[index] + size_bytes + self.held_bytes(index)
        fits_now = self.live.now + size_bytes <= self.limit_bytes
        return fits_now and needed - self.live.freed_by(first) <= self.limit_bytes

    def admits(self, gather: FreeCollective, index: int, use: int) -> bool:
        """True if ``gather`` may start before the fixed task of ``index`` for that of ``use``."""
        reserved = self._reserved
        now = self._rest[index] + reserved[index] if index < use else 0
        later = max((self._most[at] + reserved[at] for at in range(index + 1, use)), default=0)
        last = self._reducing[use] + reserved[use] if index < use else 0
        needed = early_bytes(gather) + max(now, later, last)
        return needed + self.held_bytes(index) <= self.limit_bytes

    def reserve(self, gather: FreeCollective, index: int, use: int) -> None:
        """Keep in mind that ``gather`` is live from ``index`` up to its use."""
        size_bytes = early_bytes(gather)
        for at in range(index, use):
            self._reserved[at] += size_bytes


def early_bytes(gather: FreeCollective) -> int:
    """What a gather holds before its first use: its output, for a bucket its packed input too."""
    return gather.output_bytes + (gather.input_bytes if gather.members else 0)


def start_bytes(reduction: FreeCollective) -> int:
    """What starting a reduction allocates: its output, for a bucket its packed input too."""
    return reduction.output_bytes + (reduction.input_bytes if reduction.members else 0)
