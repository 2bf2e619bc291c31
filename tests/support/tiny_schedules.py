"""Seeded random schedules small enough to try every order and bucketing of."""

from __future__ import annotations

from random import Random

from inductor_overlap.cost_model.schedule import Machine, Schedule, Task
from support.schedules import compute, start, wait

MOST_COLLECTIVES = 3


def tiny_schedule(seed: int, num_items: int = 6) -> Schedule:
    """Up to ``num_items`` compute tasks and collectives with few, small, often equal times."""
    random = Random(seed)
    builder = _Builder(random)
    for index in range(random.randint(2, num_items)):
        builder.add(index)
    return Schedule(tuple(builder.tasks), machine=_machine(random))


def _machine(random: Random) -> Machine:
    return Machine(
        launch_us=random.choice([0, 0, 1, 0.5]),
        contention=random.choice([1, 1, 1.3, 2]),
        queue_width=random.choice([1, 1, 1, 2]),
        links=random.choice([{}, dict.fromkeys("pq", "net")]),
    )


class _Builder:
    def __init__(self, random: Random) -> None:
        self.tasks: list[Task] = []
        self._random = random
        self._results: list[str] = []
        self._is_chain = random.random() < 0.25
        self._fan_in = random.choice([(0, 1, 1, 2), (1,)])
        self._queues = random.choice(["p", "p", "pq"])
        self._keys: list[tuple[str, ...]] = random.choice([[()], [()], [("a",), ("b",)]])
        self._times = random.choice([[0, 1, 2, 3, 4, 5], [1, 2], [0.5, 1.7, 3.3, 0]])
        self._latencies = [0, *[random.choice([0, 1, 2, 4])] * 2, random.choice([0, 1, 3])]

    def add(self, index: int) -> None:
        deps = self._deps()
        num_collectives = sum(task.kind == "start" for task in self.tasks)
        if num_collectives < MOST_COLLECTIVES and self._random.random() < 0.5:
            self._add_collective(f"s{index}", deps)
        else:
            self.tasks.append(compute(f"c{index}", self._random.choice(self._times), *deps))
            self._results.append(f"c{index}")

    def _deps(self) -> list[str]:
        if self._is_chain and self._random.random() < 0.6:
            return self._results[-1:]
        count = min(self._random.choice(self._fan_in), len(self._results))
        return self._random.sample(self._results, count)

    def _add_collective(self, name: str, deps: list[str]) -> None:
        wire_us = self._random.choice(self._times)
        duration_us = wire_us + self._random.choice(self._latencies)
        link_us = self._random.choice((wire_us, duration_us))
        queue = self._random.choice(self._queues)
        key = self._random.choice(self._keys)
        self.tasks.append(
            start(
                name,
                duration_us,
                *deps,
                queue=queue,
                wire_us=wire_us,
                link_us=link_us,
                bucket_key=key,
            )
        )
        self.tasks.append(wait(name))
        self._results.append(f"wait_{name}")
        if self._random.random() < 0.1:  # a task that must follow the start, not its end
            self._results.append(name)
