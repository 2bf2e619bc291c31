"""Order dependences that data flow does not show: barriers and in-place writes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence


class OrderLinks:
    """Collects them task by task, in the order of the graph.

    ``movable``: names of the tasks that may move; nothing else needs to be held back by a barrier.
    """

    def __init__(self, movable: Collection[str]) -> None:
        self._movable = movable
        self._since_barrier: list[str] = []
        self._barrier = ""
        self._readers: dict[str, list[str]] = defaultdict(list)
        self._writer: dict[str, str] = {}

    def deps(
        self, name: str, is_barrier: bool, *, reads: Sequence[str] = (), writes: Sequence[str] = ()
    ) -> list[str]:
        """What ``name`` must come after; ``reads`` and ``writes`` name memory it works on."""
        deps = [self._writer[memory] for memory in reads if memory in self._writer]
        if is_barrier:
            deps += self._since_barrier
            self._barrier, self._since_barrier = name, []
        elif name in self._movable:
            deps += [self._barrier] if self._barrier else []
            self._since_barrier.append(name)
        for memory in writes:
            deps += self._readers.pop(memory, [])
            self._writer[memory] = name
        for memory in reads:
            self._readers[memory].append(name)
        return deps
