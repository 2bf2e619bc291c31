"""The adapter between Inductor's scheduler nodes (after fusion) and Schedules: ``read_snodes``.

Each scheduler node is one task. Only the start of a coalesced bucket and the items of its result
are one together, and so are its waits: Inductor may have put other nodes between them. A task's
collective, if it is one, is found through the FX node it was lowered from, so what is free to move
and what it costs are decided once, on the FX graph. A kernel may move with a collective only if all
it computes packs or unpacks for that collective; kernels fused with other work are fixed. Library
kernels cost what their FX nodes cost, generated kernels the bytes that they read and write after
fusion. Memory follows Inductor's own sizes.

Reads ``torch._inductor.scheduler``, ``.memory`` and ``.utils``; never changes a scheduler node.
"""

# torch does not type Inductor's scheduler for users.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.fx as fx

from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.cost_model.schedule import Buffer, Schedule, Task
from inductor_overlap.passes.collectives import Collective, find_collectives
from inductor_overlap.passes.fx_ops import is_barrier
from inductor_overlap.passes.graph_schedule import neutral
from inductor_overlap.passes.order_links import OrderLinks
from inductor_overlap.passes.program import FreeCollective, Program
from inductor_overlap.passes.storages import is_backward

if TYPE_CHECKING:
    from torch._inductor.scheduler import BaseSchedulerNode


@dataclass(frozen=True)
class SnodeProgram:
    """A program and the scheduler nodes it was read from."""

    program: Program
    snodes: Mapping[str, tuple[BaseSchedulerNode, ...]]
    """Task name -> its nodes: one, but for the start and the waits of a coalesced bucket."""
    barriers: frozenset[str]
    """Tasks that no collective may cross: what may communicate in a way of its own."""


def read_snodes(
    snodes: Sequence[BaseSchedulerNode], graph: fx.Graph, prices: PricedCluster
) -> SnodeProgram:
    """The program of fused scheduler nodes, in their order.

    Args:
        snodes: as given to ``_post_fusion_custom_pass``.
        graph: the post-grad FX graph they were lowered from.
        prices: what ops and collectives cost.
    """
    return _Reader(snodes, graph, prices).read()


class _Reader:
    def __init__(
        self, snodes: Sequence[BaseSchedulerNode], graph: fx.Graph, prices: PricedCluster
    ) -> None:
        self.snodes = {snode.get_name(): snode for snode in snodes}
        self.prices = prices
        self.frees_inputs = is_backward(graph)
        self.scheduler = snodes[0].scheduler
        self.collectives = {c.start: c for c in find_collectives(graph)}
        self.waits: dict[fx.Node, Collective] = {}
        for c in self.collectives.values():  # further waits of one that is not ours are compute
            self.waits |= dict.fromkeys(c.waits if c.is_bucket else c.waits[:1], c)
        self.producer = {
            buffer: name
            for name, snode in self.snodes.items()
            for buffer in snode.get_buffer_names()
        }
        self.parts: dict[str, list[BaseSchedulerNode]] = {
            name: [snode] for name, snode in self.snodes.items()
        }
        self.starts: dict[str, Collective] = {}
        self.wait_of: dict[str, Collective] = {}
        self.start_names: dict[str, str] = {}
        self.first_wait: dict[str, str] = {}
        self._find_collectives()
        self.barriers = self._barriers(graph)
        self.sizes = self._sizes()
        self.roots = self._storage_roots()

    def read(self) -> SnodeProgram:
        free = [
            neutral(c, self.start_names[c.name], self.first_wait[c.name])
            for c in self.collectives.values()
            if c.free and c.name in self.start_names and c.name in self.first_wait
        ]
        movable = self._movable(free)
        links = OrderLinks(movable)
        tasks = [
            self._task(name, parts, links.deps(name, name in self.barriers))
            for name, parts in self.parts.items()
        ]
        program = Program(
            schedule=Schedule(
                tasks=tuple(tasks),
                buffers=self._buffers(tasks),
                machine=self.prices.machine(
                    {c.group_name: c.ranks for c in self.collectives.values()}
                ),
            ),
            collectives=tuple(free),
            movable=movable,
            prices=self.prices,
        )
        snodes = {name: tuple(parts) for name, parts in self.parts.items()}
        return SnodeProgram(program, snodes, self.barriers)

    def _find_collectives(self) -> None:
        from torch._inductor.ir import MultiOutput
        from torch._inductor.utils import contains_collective, contains_wait

        for name, snode in self.snodes.items():
            origins = _origins(snode)
            if contains_wait(snode):
                found = [self.waits[node] for node in origins if node in self.waits]
                if found:
                    self._found_wait(name, found[0])
            elif contains_collective(snode):
                found = [self.collectives[node] for node in origins if node in self.collectives]
                if found:
                    self.starts[name] = found[0]
                    self.start_names[found[0].name] = name
            elif isinstance(snode.node, MultiOutput):
                found = [self.collectives[node] for node in origins if node in self.collectives]
                if found and found[0].is_bucket:
                    self._join(name, self.start_names[found[0].name])

    def _barriers(self, graph: fx.Graph) -> frozenset[str]:
        from torch._inductor.ir import MultiOutput

        barriers = {node for node in graph.nodes if is_barrier(node)}
        return frozenset(
            name
            for name, snode in self.snodes.items()
            if snode.is_extern() and not isinstance(snode.node, MultiOutput)
            if not barriers.isdisjoint(_origins(snode))
        )

    def _found_wait(self, name: str, collective: Collective) -> None:
        self.wait_of[name] = collective
        first = self.first_wait.setdefault(collective.name, name)
        if first != name:
            self._join(name, first)

    def _join(self, name: str, leader: str) -> None:
        """Make the node called ``name`` a part of the task ``leader``, which comes before it."""
        parts = self.parts.pop(name)
        self.parts[leader] += parts
        self.producer |= {b: leader for part in parts for b in part.get_buffer_names()}

    def _sizes(self) -> dict[str, int]:
        from torch._inductor.memory import compute_size_for_scheduler_buffer

        sizes = compute_size_for_scheduler_buffer(self.scheduler.name_to_buf)
        return {name: max(pair) for name, pair in sizes.items()}

    def _storage_roots(self) -> dict[str, str]:
        """Buffer -> the buffer whose memory it is: mutations rename, aliases share."""
        roots: dict[str, str] = dict(self.scheduler.mutation_real_name)
        for snode in self.snodes.values():
            for buffer in snode.get_outputs():
                aliases = [*buffer.get_aliases(), *buffer.get_mutations()]
                if aliases:
                    roots.setdefault(buffer.get_name(), aliases[0])
        return roots

    def _root(self, buffer: str) -> str:
        seen: set[str] = set()
        while buffer in self.roots and buffer not in seen:
            seen.add(buffer)
            buffer = self.roots[buffer]
        return buffer

    def _task(
        self, name: str, parts: Sequence[BaseSchedulerNode], order_deps: Sequence[str]
    ) -> Task:
        names = [dep.name for snode in parts for dep in snode.unmet_dependencies]
        deps = [self.producer[buffer] for buffer in names if buffer in self.producer]
        deps = list(dict.fromkeys(dep for dep in (*deps, *order_deps) if dep != name))
        accesses = [dep for snode in parts for dep in snode.read_writes.reads]
        data = [dep.name for dep in accesses if not getattr(dep, "is_fake", False)]
        reads = list(dict.fromkeys(self._root(buffer) for buffer in data))
        is_joined = len(parts) > 1 and name in self.starts
        writers = parts[1:] if is_joined else parts  # a launch allocates its items, not a list
        written = [buffer for snode in writers for buffer in snode.get_buffer_names()]
        writes = [b for b in written if self._root(b) == b and self.sizes.get(b)]
        own = {buffer for snode in parts for buffer in snode.get_buffer_names()}
        reads = [b for b in reads if b not in own and self._is_counted(b)]
        common: dict[str, Any] = {
            "deps": tuple(deps),
            "reads": tuple(reads),
            "writes": tuple(writes),
        }
        start, wait = self.starts.get(name), self.wait_of.get(name)
        if start is not None:
            return self._start(name, start, common)
        if wait is not None and wait.name in self.start_names:
            return Task(name, "wait", collective=self.start_names[wait.name], **common)
        return Task(name, duration_us=self._compute_us(self.snodes[name]), **common)

    def _start(self, name: str, collective: Collective, common: dict[str, Any]) -> Task:
        duration_us = collective.price_us(self.prices)
        if collective.name not in self.first_wait:
            return Task(name, duration_us=duration_us, **common)
        wire_us, queue = collective.link_us(self.prices), collective.group_name
        return Task(name, "start", duration_us=duration_us, wire_us=wire_us, queue=queue, **common)

    def _compute_us(self, snode: BaseSchedulerNode) -> float:
        kernels = [part for part in snode.get_nodes() if part.is_extern() or part.is_template()]
        if kernels:
            return sum(self._kernel_us(part) for part in kernels)
        return self.prices.copy_us(int(snode.get_read_write_buffers_sizes()) // 2)

    def _kernel_us(self, snode: BaseSchedulerNode) -> float:
        """Time of one library or template kernel, by the FX node it was lowered from.

        The origins are more than that: nodes whose results it reads without storing them, and for
        each output of a kernel with several, the whole kernel again.
        """
        from torch._inductor.ir import MultiOutput

        if snode.node is None or isinstance(snode.node, MultiOutput):
            return 0.0
        own = snode.node.get_origin_node()
        nodes = snode.node.get_origins() if own is None else [own]
        return max((self.prices.compute_us(node) for node in nodes), default=0.0)

    def _is_counted(self, buffer: str) -> bool:
        """Whether ``buffer`` takes memory of the graph's own; one without a size takes none."""
        return self._dies(buffer) if buffer not in self.producer else bool(self.sizes.get(buffer))

    def _dies(self, buffer: str) -> bool:
        """True for graph inputs that a compiled backward frees: all but parameters."""
        return self.frees_inputs and not buffer.startswith("primals_")

    def _buffers(self, tasks: Iterable[Task]) -> dict[str, Buffer]:
        from torch._inductor.virtualized import V

        outputs = {self._root(name) for name in V.graph.get_output_names()}
        buffers: dict[str, Buffer] = {}
        for task in tasks:
            for name in task.writes:
                buffers[name] = Buffer(name, self.sizes[name], is_output=name in outputs)
            for name in task.reads:
                if name not in self.producer and name not in buffers:
                    buffers[name] = Buffer(name, _input_bytes(name), is_input=True)
        return buffers

    def _movable(self, free: Iterable[FreeCollective]) -> frozenset[str]:
        movable = {name for c in free for name in (c.name, c.wait)}
        serving: set[fx.Node] = set()
        for c in self.collectives.values():
            if c.free:
                serving |= {c.start, *c.items, *c.waits, *c.head, *c.pack, *c.unpack, *c.tail}
        for name, snode in self.snodes.items():
            origins = _origins(snode)
            if origins and origins <= serving and name in self.parts:
                movable.add(name)
        return frozenset(movable)


def _origins(snode: BaseSchedulerNode) -> set[fx.Node]:
    """The FX nodes that a scheduler node was lowered from."""
    found: set[fx.Node] = set()
    for part in snode.get_nodes():
        if part.node is not None:
            found |= set(part.node.get_origins())
    return found


def _input_bytes(name: str) -> int:
    """Bytes of a graph input; 0 for one that is no tensor."""
    from torch._inductor.virtualized import V

    value: Any = V.graph.graph_inputs.get(name)
    if not hasattr(value, "get_numel"):
        return 0
    numel = V.graph.sizevars.optimization_hint(value.get_numel(), fallback=0)
    return int(numel) * value.get_dtype().itemsize
