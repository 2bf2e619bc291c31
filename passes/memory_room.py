"""How much memory an order leaves while it is being written: what the list scheduler asks.

`MemoryRoom` compares the live bytes of what has been written with the order without overlap
(`put_on_demand`): what is live beyond it is *held* by early gathers and late reductions, and must
fit beside all that is yet to come.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add

from inductor_overlap.cost_model.memory import LiveBytes
from inductor_overlap.cost_model.schedule import Task
from inductor_overlap.passes.program import FreeCollective, Program


class MemoryRoom:
    """Room for early gathers and late reductions around the fixed tasks of a program.

    Attributes:
        live: of the order written so far.
        limit_bytes: what no task may exceed.
    """

    def __init__(self, program: Program, limit_bytes: float) -> None:
        self.live = LiveBytes(program.schedule)
        self.limit_bytes = limit_bytes
        self._on_demand = program.memory_on_demand
        self._prepared = program.prepared_bytes
        self._reserved = [0] * len(self._on_demand.most)

    def held_bytes(self, index: int, *, is_served: bool = True) -> int:
        """What late reductions hold now, before the fixed task of ``index``.

        ``is_served``: the gathers that the task needs have been waited for.
        """
        known = self._on_demand
        on_demand = known.before[index] if is_served else known.reduced[index]
        return max(0, self.live.now - on_demand - self._reserved[index])

    def is_full(self, index: int) -> bool:
        """True if the fixed task of ``index`` does not fit beside what is held."""
        needed = self._on_demand.rest[index] + self._reserved[index]
        return needed + self.held_bytes(index, is_served=False) > self.limit_bytes

    def has_room(self, index: int, size_bytes: int, first: Sequence[Task] = ()) -> bool:
        """True if ``size_bytes`` more fit until the fixed task of ``index`` has run.

        ``first``: tasks that run before it (packing) and free what they are the last to read.
        """
        reserved = self._on_demand.own[index] + self._reserved[index]
        needed = reserved + size_bytes + self.held_bytes(index)
        fits_now = self.live.now + size_bytes <= self.limit_bytes
        return fits_now and needed - self.live.freed_by(first) <= self.limit_bytes

    def admits(self, gather: FreeCollective, index: int, use: int) -> bool:
        """True if ``gather`` may start before the fixed task of ``index`` for that of ``use``."""
        reserved, known = self._reserved, self._on_demand
        now = known.own[index] + reserved[index] if index < use else 0
        between = slice(index + 1, use)
        later = max(map(add, known.most[between], reserved[between]), default=0)
        last = known.reducing[use] + reserved[use] if index < use else 0
        early_bytes = self._early_bytes(gather)
        fits_now = self.live.now + early_bytes <= self.limit_bytes
        needed = early_bytes + max(now, later, last)
        return fits_now and needed + self.held_bytes(index) <= self.limit_bytes

    def reserve(self, gather: FreeCollective, index: int, use: int) -> None:
        """Keep in mind that ``gather`` is live from ``index`` up to its use."""
        size_bytes = self._early_bytes(gather)
        for at in range(index, use):
            self._reserved[at] += size_bytes

    def _early_bytes(self, gather: FreeCollective) -> int:
        """What a gather holds before its first use: its output, and what was packed or cast."""
        return gather.output_bytes + self._prepared[gather.name]
