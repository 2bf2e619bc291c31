"""Fill the communicators' queues against compute, within a memory limit.

One walk over the fixed tasks with a clock for compute and one per link. Before each fixed task,
while a link would run dry before the task ends, the next collective is started on it: the next
gather in order of first use, or the oldest pending reduction, whichever the *slack rule* says. A
gather has slack until its latest safe start, found by one sweep backward over all gathers of the
link (prototyped list schedulers lose most when a reduction delays a gather that compute is about
to need). A gather starts early only if the memory over its whole wait fits the limit; a
reduction's wait comes as late as memory allows, because until then it holds its input.

Near-linear in the number of tasks. The clock ignores contention and queue width, and memory is
tracked per fixed task: the result is a proposal that callers simulate and replay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate

from inductor_overlap.cost_model.memory import memory_profile
from inductor_overlap.cost_model.schedule import Task
from inductor_overlap.passes.program import FreeCollective, Program, find_windows
from inductor_overlap.passes.reorder import Emitter, finish_order, order_on_demand


def list_schedule(
    program: Program,
    *,
    memory_limit_bytes: float = math.inf,
    prefetch_us: float = math.inf,
    issue_order: Sequence[str] = (),
) -> list[str]:
    """Task names in an order that keeps the queues busy.

    Args:
        program: what to order; its fixed tasks keep their order.
        memory_limit_bytes: live bytes that no early start or late wait may exceed.
        prefetch_us: a gather starts at most this long before its latest safe start; smaller
            values cost less memory and absorb less error in the costs.
        issue_order: names of all starts, fixed ones included, in the order to keep; empty: free.
    """
    return _ListScheduler(program, memory_limit_bytes, prefetch_us, issue_order).run()


class _ListScheduler:
    def __init__(
        self,
        program: Program,
        limit_bytes: float,
        prefetch_us: float,
        issue_order: Sequence[str],
    ) -> None:
        self.program = program
        self.issue_order = deque(issue_order)
        self.limit_bytes = limit_bytes
        self.prefetch_us = prefetch_us
        self.tasks = program.schedule.by_name
        self.machine = program.schedule.machine
        self.windows = find_windows(program)
        self.emitter = Emitter(program.schedule.tasks)
        self.clock_us = 0.0
        self.stalled_us = 0.0
        self.free_us: dict[str, float] = {}
        self.end_us: dict[str, float] = {}
        self.in_flight: deque[FreeCollective] = deque()
        self.held_bytes = 0
        self.profile, self.spikes, self.rest = self._on_demand_profile()
        self.gathers = self._gather_queues()
        self.pending: dict[str, deque[FreeCollective]] = {link: deque() for link in self._links()}
        self.ready = self._ready_reductions()
        self.latest_us = self._latest_starts()

    def run(self) -> list[str]:
        for index, task in enumerate(self.program.fixed):
            self._accept(index)
            self._retire_for_memory(index)
            self._serve(index)
            self._fill(index, task)
            self._emit(task.name)
        self._accept(len(self.program.fixed))
        self._drain()
        return finish_order(self.program, self.emitter)

    # What is fixed before the walk.

    def _links(self) -> list[str]:
        return list(
            dict.fromkeys(self._link(collective) for collective in self.program.collectives)
        )

    def _link(self, collective: FreeCollective) -> str:
        return self.machine.link(self.tasks[collective.name].queue)

    def _gather_queues(self) -> dict[str, deque[FreeCollective]]:
        by_use = sorted(self.program.gathers, key=lambda g: self.windows.first_use[g.name])
        queues: dict[str, deque[FreeCollective]] = {link: deque() for link in self._links()}
        for gather in by_use:
            queues[self._link(gather)].append(gather)
        return queues

    def _ready_reductions(self) -> dict[int, list[FreeCollective]]:
        ready: dict[int, list[FreeCollective]] = {}
        for reduction in self.program.reductions:
            ready.setdefault(self.windows.ready_at[reduction.name], []).append(reduction)
        return ready

    def _on_demand_profile(self) -> tuple[list[int], list[int], list[int]]:
        """Most live bytes before and in each fixed task when nothing is early and nothing late.

        The second list counts only the reductions that end before the task: a gather that starts
        early is live beside them too, though its first use comes after. The third leaves them
        out: what they hold is counted by ``held_bytes`` once they are ready.
        """
        ordered = self.program.schedule.reordered(order_on_demand(self.program))
        profile: list[int] = []
        spikes: list[int] = []
        rest: list[int] = []
        spike, after = 0, 0
        for task, live_bytes in zip(ordered.tasks, memory_profile(ordered), strict=True):
            after = max(after, live_bytes)
            collective = self.program.by_wait.get(task.name)
            if collective is not None and not collective.is_gather:
                spike, after = max(spike, after), 0
            if task.name not in self.program.movable:
                profile.append(max(spike, after))
                spikes.append(spike)
                rest.append(after)
                spike, after = 0, 0
        return [*profile, max(spike, after)], [*spikes, spike], [*rest, after]

    def _latest_starts(self) -> dict[str, float]:
        """Latest start of each gather that delays no compute, on a clock without stalls."""
        launch_us = self.machine.launch_us
        costs = [
            task.duration_us + launch_us if task.kind == "compute" and task.duration_us else 0.0
            for task in self.program.fixed
        ]
        clock = list(accumulate(costs, initial=0.0))
        latest: dict[str, float] = {}
        for queue in self.gathers.values():
            deadline = math.inf
            for gather in reversed(queue):
                use = clock[min(self.windows.first_use[gather.name], len(clock) - 1)]
                deadline = min(deadline, use) - self.tasks[gather.name].duration_us
                latest[gather.name] = deadline
        return latest

    # The walk.

    def _accept(self, index: int) -> None:
        for reduction in self.ready.get(index, ()):
            if reduction.name in self.emitter:  # something needed it before its turn
                continue
            self.pending[self._link(reduction)].append(reduction)
            self.held_bytes += reduction.input_bytes

    def _serve(self, index: int) -> None:
        """Start and wait for what the fixed task needs now."""
        for name in self.windows.needed[index]:
            self._emit(self.program.by_name[name].wait)

    def _fill(self, index: int, task: Task) -> None:
        horizon_us = self.clock_us + task.duration_us
        for link in self.pending:
            while self.free_us.get(link, 0.0) < horizon_us:
                collective = self._choose(link, index)
                if collective is None:
                    break
                self._emit(collective.name, index)

    def _choose(self, link: str, index: int) -> FreeCollective | None:
        if self.issue_order:
            return self._next_issued(link, index)
        gather = self._admissible_gather(link, index)
        pending = self.pending[link]
        reduction = pending[0] if pending and self._is_reducible(pending[0]) else None
        if gather is None or reduction is None:
            return reduction if gather is None else gather
        begin_us = max(self.clock_us, self.free_us.get(link, 0.0))
        slack_us = self.latest_us[gather.name] + self.stalled_us - begin_us
        return reduction if self.tasks[reduction.name].duration_us <= slack_us else gather

    def _next_issued(self, link: str, index: int) -> FreeCollective | None:
        while self.issue_order and self.issue_order[0] in self.emitter:
            self.issue_order.popleft()
        collective = self.program.by_name.get(self.issue_order[0]) if self.issue_order else None
        if collective is None or self._link(collective) != link:
            return None
        if collective.is_gather:
            return self._admissible(collective, link, index)
        can_start = collective in self.pending[link] and self._is_reducible(collective)
        return collective if can_start else None

    def _is_reducible(self, reduction: FreeCollective) -> bool:
        """False while the reduction that this one continues (HSDP) is still on the wire."""
        if not reduction.follows:
            return True
        return all(
            self.end_us.get(name, math.inf) <= self.clock_us for name in self._feeding(reduction)
        )

    def _feeding(self, reduction: FreeCollective) -> list[str]:
        missing = self.emitter.missing(reduction.name)
        return [self.program.by_wait[name].name for name in missing if name in self.program.by_wait]

    def _admissible_gather(self, link: str, index: int) -> FreeCollective | None:
        queue = self.gathers[link]
        while queue and queue[0].name in self.emitter:
            queue.popleft()
        return self._admissible(queue[0], link, index) if queue else None

    def _admissible(self, gather: FreeCollective, link: str, index: int) -> FreeCollective | None:
        if self.windows.ready_at[gather.name] > index:
            return None  # behind a barrier
        begin_us = max(self.clock_us, self.free_us.get(link, 0.0))
        if self.latest_us[gather.name] + self.stalled_us - begin_us > self.prefetch_us:
            return None
        return gather if self._fits(gather, index) else None

    def _fits(self, gather: FreeCollective, index: int) -> bool:
        """Whether the gather's buffers fit from here to its first use, pending reductions kept."""
        use = self.windows.first_use[gather.name]
        now = self.rest[index] if index < use else 0
        needed = _early_bytes(gather) + max(
            [now, *self.profile[index + 1 : use], self.spikes[use] if index < use else 0]
        )
        while needed + self.held_bytes > self.limit_bytes and self._retire_finished():
            pass
        return needed + self.held_bytes <= self.limit_bytes

    def _emit(self, name: str, index: int | None = None) -> None:
        """Write ``name`` and whatever it needs, and keep the clocks and counts of all of it.

        ``index`` is given for a start before the fixed task of that index that is not due yet.
        """
        for written in self.emitter.emit(name):
            task = self.tasks[written]
            if task.kind == "start":
                self._started(task, index)
            elif task.kind == "wait":
                self._waited(task)
            elif written not in self.program.movable and task.duration_us > 0.0:
                self.clock_us += task.duration_us + self.machine.launch_us

    def _started(self, task: Task, index: int | None) -> None:
        link = self.machine.link(task.queue)
        begin_us = max(self.clock_us, self.free_us.get(link, 0.0))
        self.free_us[link] = self.end_us[task.name] = begin_us + task.duration_us
        collective = self.program.by_name.get(task.name)
        if collective is None:
            return
        if collective in self.pending[link]:
            self.pending[link].remove(collective)
            self.in_flight.append(collective)
        elif collective.is_gather and index is not None:
            self._reserve(index, self.windows.first_use[collective.name], _early_bytes(collective))

    def _waited(self, task: Task) -> None:
        end_us = self.end_us[task.collective]
        self.stalled_us += max(0.0, end_us - self.clock_us)
        self.clock_us = max(self.clock_us, end_us)
        collective = self.program.by_name.get(task.collective)
        if collective is not None and collective in self.in_flight:
            self.in_flight.remove(collective)
            self.held_bytes -= collective.input_bytes

    def _reserve(self, begin: int, end: int, size_bytes: int) -> None:
        self.profile[begin:end] = [live + size_bytes for live in self.profile[begin:end]]
        self.rest[begin:end] = [live + size_bytes for live in self.rest[begin:end]]

    def _retire_for_memory(self, index: int) -> None:
        """Wait for the oldest reductions until the task and those still pending fit."""
        while self.rest[index] + self.held_bytes > self.limit_bytes:
            if not self.in_flight and not self._start_oldest_pending():
                return
            self._emit(self.in_flight[0].wait)

    def _start_oldest_pending(self) -> bool:
        oldest = [queue[0] for queue in self.pending.values() if queue]
        if not oldest:
            return False
        reduction = min(oldest, key=lambda reduction: self.windows.ready_at[reduction.name])
        self._emit(reduction.name)
        return True

    def _retire_finished(self) -> bool:
        if not self.in_flight or self.end_us[self.in_flight[0].name] > self.clock_us:
            return False
        self._emit(self.in_flight[0].wait)
        return True

    def _drain(self) -> None:
        for queue in self.pending.values():
            while queue:
                self._emit(queue[0].name)


def _early_bytes(gather: FreeCollective) -> int:
    """What a gather holds before its first use: its output, for a bucket its packed input too."""
    return gather.output_bytes + (gather.input_bytes if gather.members else 0)
