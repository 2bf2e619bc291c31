"""Fill the communicators' queues against compute, within a memory limit.

One walk over the fixed tasks with a clock for compute and one per link (`link_clock`). Before each
fixed task, and before compute stalls for what that needs, collectives are started on every link
that would run dry sooner than the task or the stall ends, or, if the next one must be packed first,
than it could be packed behind them. It is the next gather in order of first use, or the oldest
pending reduction, whichever the *slack rule* says. A gather has slack until its latest safe start,
found by one sweep backward over all gathers of the link (prototyped list schedulers lose most when
a reduction delays a gather that compute is about to need). A gather starts early only if the memory
over its whole wait fits the limit; a reduction's wait comes as late as memory allows, because until
then it holds its input.

Near-linear in the number of tasks. The clocks count packing, unpacking and launches but not
contention, and memory is tracked per fixed task: the result is a proposal that callers simulate and
replay.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from inductor_overlap.cost_model.schedule import Task
from inductor_overlap.passes.link_clock import Flight, LinkClock
from inductor_overlap.passes.memory_room import MemoryRoom
from inductor_overlap.passes.program import FreeCollective, Program
from inductor_overlap.passes.reorder import Emitter, finish_order, put_on_demand


def list_schedule(
    program: Program,
    *,
    memory_limit_bytes: float = math.inf,
    prefetch_us: float = math.inf,
    reductions_first: bool = False,
    issue_order: Sequence[str] = (),
) -> list[str]:
    """Task names in an order that keeps the queues busy.

    Args:
        program: what to order; its fixed tasks keep their order.
        memory_limit_bytes: live bytes that no early start or late wait may exceed.
        prefetch_us: a gather starts at most this long before its latest safe start; smaller
            values cost less memory and absorb less error in the costs.
        reductions_first: a pending reduction goes before a gather whatever the slack. Where
            communication is the bottleneck every gather is late, and gathers that start first take
            the memory in which reductions could overlap.
        issue_order: names of all starts, fixed ones included, in the order to keep; empty: free.
    """
    return _ListScheduler(
        program,
        memory_limit_bytes,
        prefetch_us=prefetch_us,
        reductions_first=reductions_first,
        issue_order=issue_order,
    ).run()


def reductions_together(
    program: Program, *, longest_us: Mapping[str, float], memory_limit_bytes: float = math.inf
) -> list[list[FreeCollective]]:
    """Which reductions wait together when their link becomes free: buckets that save latency.

    The same walk as `list_schedule`, in which whatever is pending on a link starts as one. For
    HSDP, all-reduces of several reduce-scatters join where their network is the slower one.

    Args:
        program: its gathers as they will be, its reductions single.
        longest_us: kind of reduction -> a bucket closes before it takes longer than this.
        memory_limit_bytes: as in `list_schedule`.
    """
    scheduler = _ListScheduler(program, memory_limit_bytes, merge_us=longest_us)
    scheduler.run()
    return scheduler.together


class _ListScheduler:
    def __init__(
        self,
        program: Program,
        limit_bytes: float,
        *,
        prefetch_us: float = math.inf,
        reductions_first: bool = False,
        issue_order: Sequence[str] = (),
        merge_us: Mapping[str, float] | None = None,
    ) -> None:
        self.program = program
        self.on_demand = put_on_demand(program)
        self.prefetch_us = prefetch_us
        self.reductions_first = reductions_first
        self.issue_order = deque(issue_order)
        self.merge_us = merge_us or {}
        self.together: list[list[FreeCollective]] = []
        self.joined: dict[str, str] = {}
        self.bucket_bytes: dict[str, int] = {}
        self.tasks = program.schedule.by_name
        self.machine = program.schedule.machine
        self.windows = program.windows
        self.prepare_us = program.prepare_us
        self.longest_prepare_us = max(self.prepare_us.values(), default=0.0)
        self.emitter = Emitter(program.schedule)
        self.clock_us = 0.0
        self.stalled_us = 0.0
        self.stall_us = 0.0
        self.flights: dict[str, Flight] = {}
        self.in_flight: dict[str, FreeCollective] = {}
        self.room = MemoryRoom(self.on_demand, limit_bytes)
        self.gathers = self._gather_queues()
        self.pending: dict[str, dict[str, FreeCollective]] = {link: {} for link in self._links()}
        width = self.machine.queue_width
        self.clocks = defaultdict[str, LinkClock](lambda: LinkClock(width))
        self.ready = self._ready_reductions()
        self.latest_us = self._latest_starts()

    def run(self) -> list[str]:
        for index, task in enumerate(self.program.fixed):
            self._accept(index)
            self._retire_for_memory(index)
            self._serve(index)
            self._fill_beside(index, task)
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

    def _latest_starts(self) -> dict[str, float]:
        """Latest start of each gather that delays no compute, on a clock without stalls."""
        clock = self.on_demand.clock_on_demand_us
        latest: dict[str, float] = {}
        for queue in self.gathers.values():
            deadline = math.inf
            for gather in reversed(queue):
                use = clock[self.windows.first_use[gather.name]]
                task = self.tasks[gather.name]
                occupied_us = self.machine.occupied_us(task.duration_us, task.link_us)
                deadline = min(deadline - occupied_us, use - task.duration_us)
                latest[gather.name] = deadline
        return latest

    # The walk.

    def _accept(self, index: int) -> None:
        for reduction in self.ready.get(index, ()):
            if reduction.name in self.emitter:  # something needed it before its turn
                continue
            self.pending[self._link(reduction)][reduction.name] = reduction

    def _serve(self, index: int) -> None:
        """Start and wait for what the fixed task needs now, the links busy until it is there."""
        needed = self.windows.needed[index]
        for name in needed:
            self._emit(name)
        for name in needed:
            self._fill(index, self.flights[name].end_us, is_stall=True)
            self._emit(self.program.by_name[name].wait)

    def _fill_beside(self, index: int, task: Task) -> None:
        """Keep the links busy while compute does the fixed ``task``."""
        if task.kind == "wait":
            self._fill(index, self.flights[task.collective].end_us, is_stall=True)
        else:
            self._fill(index, self.clock_us + self._busy_us(index, task))

    def _busy_us(self, index: int, task: Task) -> float:
        """How long compute is busy with the fixed ``task`` and what it still needs: unpacking."""
        if not self.windows.needed[index]:
            return self.machine.busy_us(task)
        missing = self.emitter.missing(task.name)
        return sum(self.machine.busy_us(self.tasks[name]) for name in missing)

    def _fill(self, index: int, horizon_us: float, *, is_stall: bool = False) -> None:
        """Start collectives before the fixed task of ``index`` until no link is free sooner.

        Sooner than it takes compute to pack the next, too: links do not wait for that.
        ``is_stall``: compute stalls until ``horizon_us``.
        """
        self.stall_us = max(0.0, horizon_us - self.clock_us) if is_stall else 0.0
        for link in self.pending:
            while (early_us := self.clocks[link].free_us - horizon_us) < self.longest_prepare_us:
                collective = self._choose(link, index)
                if collective is None or early_us >= self.prepare_us[collective.name]:
                    break
                for member in self._merge(collective, self.clock_us, self._slack_us(link)):
                    self._emit(member.name, index)
        self.stall_us = 0.0

    def _choose(self, link: str, index: int) -> FreeCollective | None:
        if self.issue_order:
            return self._next_issued(link, index)
        gather = self._next_gather(link)
        if gather is not None:
            gather = self._admissible(gather, link, index)
        reduction = _oldest(self.pending[link])
        if reduction is not None and not self._can_start(reduction, index):
            reduction = None
        if gather is None or reduction is None:
            return reduction if gather is None else gather
        has_slack = self.tasks[reduction.name].duration_us <= self._slack_us(link)
        return reduction if has_slack or self.reductions_first else gather

    def _slack_us(self, link: str) -> float:
        """How long the link may do other things before the next gather must start."""
        gather = self._next_gather(link)
        return math.inf if gather is None else self._early_us(gather, link)

    def _early_us(self, gather: FreeCollective, link: str) -> float:
        """How long before its latest safe start the gather would start now."""
        stalled_us = self.stalled_us + self.stall_us
        return self.latest_us[gather.name] + stalled_us - self._begin_us(link)

    def _begin_us(self, link: str) -> float:
        """When a collective that starts now begins."""
        return max(self.clock_us, self.clocks[link].free_us)

    def _next_gather(self, link: str) -> FreeCollective | None:
        queue = self.gathers[link]
        while queue and queue[0].name in self.emitter:
            queue.popleft()
        return queue[0] if queue else None

    def _merge(
        self, first: FreeCollective, now_us: float, slack_us: float = math.inf
    ) -> list[FreeCollective]:
        """``first`` and what is pending beside it by ``now_us``, as far as a bucket may hold it."""
        members = [first]
        longest_us = min(self.merge_us.get(first.kind, 0.0), slack_us)
        if longest_us <= 0.0 or not first.can_merge:
            return members
        size_bytes = first.size_bytes
        too_large = math.inf
        for other in self.pending[self._link(first)].values():
            same = other.bucket_key == first.bucket_key and other.can_merge
            grown = size_bytes + other.size_bytes
            if other is first or not same or grown >= too_large:
                continue
            if not self._is_reducible(other, now_us):
                continue
            if self._collective_us(first, grown) <= longest_us:
                members.append(other)
                size_bytes = grown
            else:
                too_large = grown
        self.together.append(members)
        self.joined |= {member.name: first.name for member in members[1:]}
        self.bucket_bytes[first.name] = size_bytes
        return members

    def _takes_us(self, start: Task) -> tuple[float, float]:
        """Time of a collective, with what has joined it, and for how long it keeps its link."""
        size_bytes = self.bucket_bytes.get(start.name)
        if size_bytes is None:
            return start.duration_us, start.link_us
        first = self.program.by_name[start.name]
        link_us = self.program.bucket_link_us(first, size_bytes)
        return self._collective_us(first, size_bytes), link_us

    def _collective_us(self, like: FreeCollective, size_bytes: int) -> float:
        return self.program.prices.collective_us(like.kind, size_bytes, like.ranks)

    def _next_issued(self, link: str, index: int) -> FreeCollective | None:
        while self.issue_order and self.issue_order[0] in self.emitter:
            self.issue_order.popleft()
        collective = self.program.by_name.get(self.issue_order[0]) if self.issue_order else None
        if collective is None or self._link(collective) != link:
            return None
        if collective.is_gather:
            return self._admissible(collective, link, index)
        is_pending = collective.name in self.pending[link]
        can_start = is_pending and self._is_reducible(collective, self.clock_us)
        return collective if can_start else None

    def _can_start(self, reduction: FreeCollective, index: int) -> bool:
        """Whether a pending reduction has its input, and room for what its start allocates."""
        if not self._is_reducible(reduction, self.clock_us):
            return False
        while not self._has_room(reduction, index):
            if not self._retire_finished():
                return False
        return True

    def _has_room(self, reduction: FreeCollective, index: int) -> bool:
        size_bytes = reduction.output_bytes + self.program.prepared_bytes[reduction.name]
        if self.room.has_room(index, size_bytes):
            return True
        before = [self.tasks[name] for name in self.emitter.missing(reduction.name)[:-1]]
        return self.room.has_room(index, size_bytes, before)

    def _is_reducible(self, reduction: FreeCollective, now_us: float) -> bool:
        """False if the reduction that this one continues (HSDP) is on the wire at ``now_us``."""
        if not reduction.follows:
            return True
        feeding = self._feeding(reduction)
        return all(name in self.flights and self.flights[name].end_us <= now_us for name in feeding)

    def _feeding(self, reduction: FreeCollective) -> list[str]:
        missing = self.emitter.missing(reduction.name)
        return [self.program.by_wait[name].name for name in missing if name in self.program.by_wait]

    def _admissible(self, gather: FreeCollective, link: str, index: int) -> FreeCollective | None:
        if self.windows.ready_at[gather.name] > index:
            return None  # behind a barrier
        if self._early_us(gather, link) > self.prefetch_us:
            return None
        return gather if self._fits(gather, index) else None

    def _fits(self, gather: FreeCollective, index: int) -> bool:
        """Whether the gather's buffers fit from here to its first use."""
        use = self.windows.first_use[gather.name]
        while not self.room.admits(gather, index, use):
            if not self._retire_finished():
                return False
        return True

    def _emit(self, name: str, index: int | None = None) -> None:
        """Write ``name`` and whatever it needs, and keep the clocks and counts of all of it.

        ``index`` is given for a start before the fixed task of that index that is not due yet.
        """
        for written in self.emitter.emit(name):
            task = self.tasks[written]
            self.room.live.run(task)
            if task.kind == "start":
                self._started(task, index)
            elif task.kind == "wait":
                self._waited(task)
            self.clock_us += self.machine.busy_us(task)

    def _started(self, task: Task, index: int | None) -> None:
        link = self.machine.link(task.queue)
        if task.name in self.joined:
            self.flights[task.name] = self.flights[self.joined[task.name]]
        else:
            duration_us, link_us = self._takes_us(task)
            self.flights[task.name] = self.clocks[link].start(self.clock_us, duration_us, link_us)
        collective = self.program.by_name.get(task.name)
        if collective is None:
            return
        if self.pending[link].pop(task.name, None) is not None:
            self.in_flight[task.name] = collective
        elif collective.is_gather and index is not None:
            self.room.reserve(collective, index, self.windows.first_use[collective.name])

    def _waited(self, task: Task) -> None:
        end_us = self.flights[task.collective].end_us
        self.stalled_us += max(0.0, end_us - self.clock_us)
        self.clock_us = max(self.clock_us, end_us)
        self.in_flight.pop(task.collective, None)

    def _retire_for_memory(self, index: int) -> None:
        """Wait for the oldest reductions until the task and those still pending fit."""
        while self.room.is_full(index):
            if not self.in_flight and not self._start_oldest_pending():
                return
            self._retire_oldest()

    def _start_oldest_pending(self) -> bool:
        oldest = [reduction for queue in self.pending.values() if (reduction := _oldest(queue))]
        if not oldest:
            return False
        reduction = min(oldest, key=lambda reduction: self.windows.ready_at[reduction.name])
        self._emit(reduction.name)
        return True

    def _retire_finished(self) -> bool:
        oldest = _oldest(self.in_flight)
        if oldest is None or self.flights[oldest.name].end_us > self.clock_us:
            return False
        self._emit(oldest.wait)
        return True

    def _retire_oldest(self) -> None:
        self._emit(next(iter(self.in_flight.values())).wait)

    def _drain(self) -> None:
        end = len(self.program.fixed)
        for queue in self.pending.values():
            while (oldest := _oldest(queue)) is not None:
                while self.in_flight and not self._has_room(oldest, end):
                    self._retire_oldest()
                for member in self._merge(oldest, self._begin_us(self._link(oldest))):
                    self._emit(member.name)


def _oldest(queue: dict[str, FreeCollective]) -> FreeCollective | None:
    return next(iter(queue.values()), None)
