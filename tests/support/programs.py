"""Hand-built programs: tiny schedules in which some collectives are free to move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch.fx as fx

from inductor_overlap.cost_model.schedule import Machine, Schedule
from inductor_overlap.passes.program import FreeCollective, Program

GROUP = "0"


class LinearPrices:
    """A collective takes one microsecond and one per 100 bytes; a copy one per 1,000 bytes.

    A grouped launch takes half a microsecond for each collective but the first.
    """

    def __init__(self) -> None:
        self.fallbacks: Counter[str] = Counter()

    def compute_us(self, node: fx.Node) -> float:
        return 1.0

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return 1.0 + size_bytes / 100

    def link_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return self.collective_us(kind, size_bytes, ranks)

    def coalesced_us(self, kind: str, sizes_bytes: Sequence[int], ranks: Sequence[int]) -> float:
        return 1.0 + 0.5 * (len(sizes_bytes) - 1) + sum(sizes_bytes) / 100

    def copy_us(self, size_bytes: int) -> float:
        return size_bytes / 1000

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        return Machine()

    def uuid(self) -> str:
        return "linear"


def free(name: str, kind: str, size_bytes: int, **fields: object) -> FreeCollective:
    """A free collective of two ranks whose wait is called ``wait_<name>``."""
    shard_bytes = size_bytes // 2
    is_gather = kind == "all_gather"
    return FreeCollective(
        name=name,
        wait=f"wait_{name}",
        kind=kind,
        bucket_key=(kind, GROUP, "torch.float32", "" if is_gather else "avg"),
        size_bytes=size_bytes,
        input_bytes=shard_bytes if is_gather else size_bytes,
        output_bytes=size_bytes if is_gather else shard_bytes,
        ranks=(0, 1),
        **fields,  # type: ignore[arg-type]
    )


def program(schedule: Schedule, collectives: Iterable[FreeCollective]) -> Program:
    """``schedule`` with ``collectives`` free to move, and with nothing else that moves."""
    chosen = tuple(collectives)
    return Program(
        schedule=schedule,
        collectives=chosen,
        movable=frozenset(name for c in chosen for name in (c.name, c.wait)),
        prices=LinearPrices(),
    )
