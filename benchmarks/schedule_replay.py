"""Checks of a finished schedule that share nothing with what planned it.

`replay_peak` is a live set that grows and shrinks task by task, where ``cost_model.memory`` adds
up intervals. `Perturbation` makes costs wrong after planning: each op of the original graph gets
one random factor, the same for every contender, and a merged collective the mean of its members'
factors, weighted by bytes. Who is in a merged collective is read from the graph alone: the inputs
a gather comes from, the outputs a reduction goes to.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch.fx as fx

from inductor_overlap.cost_model.schedule import Schedule, Task
from inductor_overlap.passes.collectives import Collective, find_collectives

SPREAD = 0.3


def replay_peak(schedule: Schedule) -> int:
    """The most bytes that are live at once: before a task's inputs go, its outputs are there.

    What a collective touches is in use from its start to its wait. Inputs of the graph go with
    their last reader, its outputs never; an input that nobody reads stays.
    """
    held = {task.name: {*task.reads, *task.writes} for task in schedule.tasks}
    holders = Counter(name for names in held.values() for name in names)
    sizes = {name: buffer.size_bytes for name, buffer in schedule.buffers.items()}
    kept = {name for name, buffer in schedule.buffers.items() if buffer.is_output}
    now = sum(sizes[name] for name, buffer in schedule.buffers.items() if buffer.is_input)
    peak = now
    for task in schedule.tasks:
        now += sum(sizes[name] for name in task.writes)
        peak = max(peak, now)
        if task.kind == "start":
            continue
        ended = [task.name, task.collective] if task.kind == "wait" else [task.name]
        for name in (name for holder in ended for name in held[holder]):
            holders[name] -= 1
            if holders[name] == 0 and name not in kept:
                now -= sizes[name]
    return peak


@dataclass(frozen=True)
class Perturbation:
    """Factors of the ops of one original graph.

    Attributes:
        seed: of the draw.
        source: collective of the original graph -> (kind, what it serves, bytes).
    """

    seed: int
    source: Mapping[str, tuple[str, frozenset[str], int]]

    @classmethod
    def of(cls, gm: fx.GraphModule, num_draws: int) -> list[Perturbation]:
        """``num_draws`` perturbations of ``gm``, seeded by their positions."""
        found = find_collectives(gm.graph)
        source = {c.name: (c.kind, served(c), c.size_bytes) for c in found}
        return [cls(seed, source) for seed in range(num_draws)]

    def applied(self, schedule: Schedule, collectives: Iterable[Collective]) -> Schedule:
        """``schedule`` of a contender with wrong costs; ``collectives`` are those of its graph."""
        factors = {c.name: self._of_collective(c) for c in collectives}
        tasks: list[Task] = []
        for task in schedule.tasks:
            factor = factors.get(task.name) or self._factor(task.name)
            tasks.append(task.scaled(communication=factor, compute=factor))
        return replace(schedule, tasks=tuple(tasks))

    def _of_collective(self, collective: Collective) -> float:
        if collective.name in self.source:
            return self._factor(collective.name)
        target = served(collective)
        members = [
            (size_bytes, self._factor(name))
            for name, (kind, serves, size_bytes) in self.source.items()
            if kind == collective.kind and serves and serves <= target
        ]
        if not members:
            return self._factor(collective.name)
        total_bytes = sum(size_bytes for size_bytes, _ in members)
        return sum(size_bytes * factor for size_bytes, factor in members) / total_bytes

    def _factor(self, name: str) -> float:
        # Seeded by text: the same in every process.
        return 1.0 + SPREAD * random.Random(f"{self.seed} {name}").uniform(-1.0, 1.0)


def served(collective: Collective) -> frozenset[str]:
    """Graph inputs that a gather comes from, positions of outputs that a reduction goes to."""
    if collective.kind == "all_gather":
        return frozenset(_inputs_above(collective.start))
    return frozenset(_outputs_below(collective.waits))


def _inputs_above(node: fx.Node) -> Iterable[str]:
    seen = {node}
    pending = [node]
    while pending:
        current = pending.pop()
        if current.op == "placeholder":
            yield current.name
        fresh = [above for above in current.all_input_nodes if above not in seen]
        seen.update(fresh)
        pending += fresh


def _outputs_below(nodes: Iterable[fx.Node]) -> Iterable[str]:
    pending = list(nodes)
    seen = set(pending)
    while pending:
        for user in pending.pop().users:
            if user.op == "output":
                continue
            if user not in seen:
                seen.add(user)
                pending.append(user)
    output = next(iter(seen)).graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple | list)
    return [str(position) for position, result in enumerate(results) if result in seen]
