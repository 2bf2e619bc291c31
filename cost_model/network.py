"""Collectives on their queues and links: when each begins and when it ends.

One FIFO per communicator, `Machine.queue_width` collectives of it in flight at once. A collective
first spends its latency, ``duration_us - link_us``, which nothing slows down, and then puts
``link_us`` of bytes on its link. All parts on one link at a moment share its bandwidth equally
(processor sharing): with n of them each proceeds at rate 1/n. Events at the same time are handled
in program order of their collectives, so every result is deterministic.

This decides nothing about compute; `simulate` drives it and asks for the next event.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush

from inductor_overlap.cost_model.schedule import Machine, Task


@dataclass(slots=True, eq=False)
class Transfer:
    """One enqueued collective; ``begin_us`` and ``end_us`` are inf until they are known."""

    task: Task
    position: int
    begin_us: float = math.inf
    end_us: float = math.inf

    @property
    def ended(self) -> bool:
        return self.end_us < math.inf


@dataclass(slots=True)
class _Queue:
    waiting: deque[Transfer] = field(default_factory=deque[Transfer])
    running: int = 0


@dataclass(slots=True)
class _Link:
    """Parts on one link, served by processor sharing.

    ``served_us`` is what each part present since the link was last idle has received. A part that
    enters at ``served_us`` ends when it has reached ``served_us + link_us``: the heap key.
    """

    parts: list[tuple[float, int, Transfer]] = field(
        default_factory=list[tuple[float, int, Transfer]]
    )
    served_us: float = 0.0
    updated_us: float = 0.0

    def add(self, transfer: Transfer, now_us: float) -> None:
        if self.parts:
            self.served_us += (now_us - self.updated_us) / len(self.parts)
        else:
            self.served_us = 0.0
        self.updated_us = now_us
        heappush(self.parts, (self.served_us + transfer.task.link_us, transfer.position, transfer))

    def next_end(self) -> tuple[float, int]:
        """When, by the present load, the first part ends; and its program position."""
        target_us, position, _ = self.parts[0]
        left_us = max(0.0, target_us - self.served_us)
        return self.updated_us + left_us * len(self.parts), position

    def pop(self, now_us: float) -> Transfer:
        target_us, _, transfer = heappop(self.parts)
        self.served_us = max(self.served_us, target_us)
        self.updated_us = now_us
        return transfer


class Network:
    """The queues and links of one machine, advanced event by event.

    Attributes:
        in_flight: collectives that have begun and not ended.
        next_event_us: when the next of them changes phase or ends; inf if none is in flight.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._queues: dict[str, _Queue] = {}
        self._links: dict[str, _Link] = {}
        self._latencies: list[tuple[float, int, Transfer]] = []
        self._next_link: _Link | None = None
        self.in_flight = 0
        self.next_event_us = math.inf

    def enqueue(self, task: Task, position: int, now_us: float) -> Transfer:
        """Hand over a collective at ``now_us``, up to which the network must be advanced."""
        transfer = Transfer(task, position)
        queue = self._queues.setdefault(task.queue, _Queue())
        queue.waiting.append(transfer)
        self._fill(queue, now_us)
        self._find_next_event()
        return transfer

    def advance_to(self, time_us: float) -> None:
        """Handle every event up to and at ``time_us``."""
        while self.next_event_us <= time_us:
            self.step()

    def step(self) -> None:
        """Handle the next event: a latency that has passed, or a collective that ends."""
        now_us = self.next_event_us
        if self._next_link is None:
            self._put_on_wire(heappop(self._latencies)[2], now_us)
        else:
            self._end(self._next_link.pop(now_us), now_us)
        self._find_next_event()

    def _fill(self, queue: _Queue, now_us: float) -> None:
        while queue.waiting and queue.running < self._machine.queue_width:
            queue.running += 1
            self._begin(queue.waiting.popleft(), now_us)

    def _begin(self, transfer: Transfer, now_us: float) -> None:
        transfer.begin_us = now_us
        self.in_flight += 1
        latency_us = transfer.task.duration_us - transfer.task.link_us
        if latency_us > 0.0:
            heappush(self._latencies, (now_us + latency_us, transfer.position, transfer))
        else:
            self._put_on_wire(transfer, now_us)

    def _put_on_wire(self, transfer: Transfer, now_us: float) -> None:
        link = self._links.setdefault(self._machine.link(transfer.task.queue), _Link())
        link.add(transfer, now_us)

    def _end(self, transfer: Transfer, now_us: float) -> None:
        transfer.end_us = now_us
        self.in_flight -= 1
        queue = self._queues[transfer.task.queue]
        queue.running -= 1
        self._fill(queue, now_us)

    def _find_next_event(self) -> None:
        best = self._latencies[0][:2] if self._latencies else (math.inf, -1)
        self._next_link = None
        for link in self._links.values():
            if link.parts and (end := link.next_end()) < best:
                best = end
                self._next_link = link
        self.next_event_us = best[0]
