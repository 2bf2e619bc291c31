"""The adapter between FX graphs and Schedules: ``read_graph`` and ``write_order``.

Every node that computes becomes one task, with two exceptions that keep plans equal on all ranks:
the chain that prepares a shard for its gather (cast, pad) is one task, and so is the chain that
finishes a reduced gradient (unpad, cast). Their nodes and local shapes may differ between ranks
when shards are uneven, so both are priced from the padded shapes of the collective; so are chain
nodes that several gathers share, and sums of reduced gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.fx as fx

from inductor_overlap.cost_model.fusion import (
    OpKind,
    is_fusible,
    is_virtual,
    op_kind,
    stored_inputs,
)
from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.cost_model.schedule import Schedule, Task
from inductor_overlap.cost_model.sizes import numel_hint
from inductor_overlap.cost_model.wire_time import BucketPrice
from inductor_overlap.passes.bucket_nodes import bucket_members
from inductor_overlap.passes.bucketing import why_not_bucketed
from inductor_overlap.passes.collectives import (
    BUCKET,
    Collective,
    find_collectives,
    is_slice,
    numel_of,
)
from inductor_overlap.passes.fx_ops import (
    is_barrier,
    is_wait,
    op_base_name,
    payload,
    written_inputs,
)
from inductor_overlap.passes.order_links import OrderLinks
from inductor_overlap.passes.program import FreeCollective, Program
from inductor_overlap.passes.storages import Storages, is_alias, viewed


@dataclass(frozen=True)
class GraphProgram:
    """A program and the graph it was read from."""

    program: Program
    collectives: tuple[Collective, ...]
    nodes: Mapping[str, tuple[fx.Node, ...]]
    """Task name -> its nodes, in graph order."""

    def in_copy(self, copies: Mapping[fx.Node, fx.Node]) -> GraphProgram:
        """The same for a copy of the graph, by a mapping from each node to its copy."""
        collectives = tuple(collective.in_copy(copies) for collective in self.collectives)
        nodes = {name: tuple(copies[n] for n in nodes) for name, nodes in self.nodes.items()}
        return GraphProgram(self.program, collectives, nodes)


def read_graph(graph: fx.Graph, prices: PricedCluster) -> GraphProgram:
    """The program of a post-grad ``graph``. Changes nothing and never raises on unknown ops."""
    return _Reader(graph, prices).read()


def write_order(
    graph: fx.Graph, nodes: Mapping[str, Sequence[fx.Node]], order: Iterable[str]
) -> int:
    """Put the nodes of ``graph`` into the task order; returns how many nodes changed place.

    Nodes that belong to no task (inputs, attributes) stay in front, the output stays last; nodes
    that have left the graph are passed over.
    """
    wanted = [node for name in order for node in nodes.get(name, ())]
    listed = set(wanted)
    current = [node for node in graph.nodes if node in listed]
    listed.intersection_update(current)
    wanted = [node for node in wanted if node in listed]
    front = [node for node in graph.nodes if node not in listed and node.op != "output"]
    moved = sum(a is not b for a, b in zip(current, wanted, strict=True))
    if moved == 0:
        return 0
    cursor = graph._root  # pyright: ignore[reportPrivateUsage]
    for node in [*front, *wanted]:
        if cursor.next is not node:
            cursor.append(node)
        cursor = node
    return moved


class _Reader:
    def __init__(self, graph: fx.Graph, prices: PricedCluster) -> None:
        self.graph = graph
        self.prices = prices
        self.storages = Storages(graph)
        self.collectives = tuple(find_collectives(graph))
        self.machine = prices.machine({c.group_name: c.ranks for c in self.collectives})
        self.by_start = {collective.start: collective for collective in self.collectives}
        self.task_of: dict[fx.Node, str] = {}
        self.nodes: dict[str, list[fx.Node]] = defaultdict(list)
        self.first_wait: dict[str, str] = {}
        self.barriers = frozenset(node for node in graph.nodes if is_barrier(node))
        self._assign_tasks()

    def read(self) -> GraphProgram:
        movable = self._movable()
        tasks = self._tasks(movable)
        schedule = Schedule(
            tasks=tuple(tasks),
            buffers=self.storages.buffers,
            machine=self.machine,
        )
        free = tuple(
            self._neutral(collective) for collective in self.collectives if collective.free
        )
        program = Program(
            schedule=schedule,
            collectives=free,
            movable=frozenset(movable),
            prices=self.prices,
            weight_gradients=self._weight_gradients(),
            bucket_prices={c.bucket_key: self._bucket_prices[c.bucket_key[:-1]] for c in free},
        )
        return GraphProgram(
            program, self.collectives, {name: tuple(nodes) for name, nodes in self.nodes.items()}
        )

    def _assign_tasks(self) -> None:
        for collective in self.collectives:
            for node in collective.head:
                self.task_of[node] = f"{collective.name}.prepare"
            for node in collective.pack:
                self.task_of[node] = f"{collective.name}.pack"
            for node in collective.items:
                self.task_of[node] = collective.name
            for node in collective.tail:
                self.task_of[node] = f"{collective.name}.finish"
        for node in self.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            self.nodes[self.task_of.setdefault(node, node.name)].append(node)

    def _writes(self, name: str, nodes: Sequence[fx.Node]) -> list[str]:
        if name in self.chains:
            return list(self.storages.add_chain(name, nodes, self.chains[name]))
        return [buffer for node in nodes for buffer in self.storages.add(node)]

    @cached_property
    def chains(self) -> Mapping[str, int]:
        """Tasks on uneven shards -> bytes they write: of a cast, sum, pack or all-reduce, else 0.

        Padding and unpadding are left out, since only some ranks do them; sizes are padded.
        """
        chains = self._shared_heads() | self._sums()
        for collective in self.collectives:
            if collective.pack and (collective.kind == "all_gather" or collective.items):
                chains[f"{collective.name}.pack"] = collective.input_bytes
            if collective.head:
                casts = _dtypes(collective.head) != {collective.dtype}
                chains[f"{collective.name}.prepare"] = collective.input_bytes if casts else 0
            if collective.tail:
                last = _dtypes(collective.tail[-1:])
                casts = last != {collective.dtype}
                itemsize = max(dtype.itemsize for dtype in last) if casts else 0
                chains[f"{collective.name}.finish"] = collective.numel * itemsize
            if collective.unpad:
                chains[collective.name] = collective.output_bytes
        return chains

    def _shared_heads(self) -> dict[str, int]:
        """Nodes that several gathers, or a gather and others, have in front of them."""
        written: dict[str, int] = {}
        for collective in self.collectives:
            for node, numel in collective.shared_head.items():
                casts = len(_dtypes([node])) > 1
                written[node.name] = numel * node.meta["val"].dtype.itemsize if casts else 0
        return written

    def _sums(self) -> dict[str, int]:
        """What follows the sum of several reduced gradients, up to the outputs."""
        numel: dict[fx.Node, int] = {}
        written: dict[str, int] = {}
        for collective in self.collectives:
            if collective.free and collective.kind != "all_gather":
                numel |= {wait: numel_hint(wait.meta["val"]) for wait in collective.waits}
                if collective.unpad:
                    numel[collective.waits[0]] = collective.numel
        for node in self.graph.nodes if numel else ():
            parts = [numel[arg] for arg in node.all_input_nodes if arg in numel]
            if not parts or node in numel or node in self.by_start or node.op == "output":
                continue
            if BUCKET in node.meta and not is_slice(node):
                # A member of a bucket, padded.
                numel[node] = numel_of(node) or max(parts)
                continue
            numel[node] = sum(parts) if op_base_name(node) == "cat" else max(parts)
            if self.task_of[node] == node.name:
                stored = not is_alias(node) and not is_virtual(node)
                written[node.name] = numel[node] * node.meta["val"].dtype.itemsize * stored
        return written

    def _movable(self) -> set[str]:
        """Starts, waits, preparing and finishing tasks, and all that only finishes gradients."""
        movable: set[str] = set()
        for collective in self.collectives:
            if not collective.free:
                continue
            movable |= {collective.name, *(wait.name for wait in collective.waits)}
            heads = (*collective.shared_head, *collective.head)
            parts = (*heads, *collective.pack, *collective.unpack, *collective.tail)
            movable |= {self.task_of[node] for node in parts}
            if collective.kind != "all_gather":
                reached = set[fx.Node]().union(*map(_reached, collective.waits))
                movable |= {self.task_of[node] for node in reached}
        return movable

    def _tasks(self, movable: set[str]) -> list[Task]:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self.storages.add_input(node)
        links = OrderLinks(movable)
        tasks: list[Task] = []
        done: set[str] = set()
        for node in self.graph.nodes:
            name = self.task_of.get(node)
            if name is None or name in done:
                continue
            done.add(name)
            tasks.append(self._task(name, self.nodes[name], links))
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                self.storages.mark_outputs(node)
        return tasks

    def _task(self, name: str, nodes: Sequence[fx.Node], links: OrderLinks) -> Task:
        inputs = [arg for node in nodes for arg in node.all_input_nodes]
        started = self.by_start.get(nodes[0])
        if started is not None and started.unpad and not started.casts:
            inputs.append(started.source)  # as on ranks that have no padding
        deps = [self.task_of[arg] for arg in inputs if arg in self.task_of]
        reads = list(dict.fromkeys(b for arg in inputs for b in self.storages.of(arg)))
        writes = self._writes(name, nodes)
        is_barrier = not self.barriers.isdisjoint(nodes)
        order_deps = links.deps(
            name, is_barrier, reads=self._touched(nodes), writes=self._written(nodes)
        )
        all_deps = tuple(dict.fromkeys(d for d in (*deps, *order_deps) if d != name))
        reads = [buffer for buffer in reads if buffer not in writes]
        return self._make(name, nodes, all_deps, tuple(reads), tuple(writes))

    def _touched(self, nodes: Sequence[fx.Node]) -> list[str]:
        """Memory that ``nodes`` read; a wait also what its collective read until then."""
        starts = [arg for node in nodes if is_wait(node) for arg in node.all_input_nodes]
        inputs = [arg for node in (*nodes, *starts) for arg in node.all_input_nodes]
        return list(dict.fromkeys(name for arg in inputs for name in self._memory(arg)))

    def _written(self, nodes: Sequence[fx.Node]) -> list[str]:
        targets = [target for node in nodes for target in written_inputs(node)]
        return list(dict.fromkeys(name for target in targets for name in self._memory(target)))

    def _memory(self, node: fx.Node) -> tuple[str, ...]:
        """Names of the memory that ``node`` shows: buffers, or a graph input that is none."""
        buffers = self.storages.of(node)
        if buffers:
            return buffers
        base = viewed(node)
        return (base.name,) if base.op == "placeholder" else ()

    def _make(
        self,
        name: str,
        nodes: Sequence[fx.Node],
        deps: tuple[str, ...],
        reads: tuple[str, ...],
        writes: tuple[str, ...],
    ) -> Task:
        collective = self.by_start.get(nodes[0])
        if collective is not None:
            return self._start(collective, deps, reads, writes)
        if is_wait(nodes[0]):
            return self._wait(nodes[0], deps, reads, writes)
        if name in self.chains:
            duration_us = self._chain_us(name)
        else:
            duration_us = sum(self.prices.compute_us(node) for node in nodes)
        return Task(name, duration_us=duration_us, deps=deps, reads=reads, writes=writes)

    def _chain_us(self, name: str) -> float:
        """Time (us) of a chain, launches between its kernels included."""
        size_bytes, kernels = self.chains[name], self._kernels.get(name, 1)
        if not size_bytes:
            return 0.0
        each_us = self.prices.copy_us(-(-size_bytes // kernels))
        return kernels * each_us + (kernels - 1) * self.machine.launch_us

    @cached_property
    def _kernels(self) -> Mapping[str, int]:
        """Chain of a bucket -> how many kernels it has, if each member has one of its own.

        Inductor does not fuse kernels of separate tensors; only what is packed is one.
        """
        kernels: dict[str, int] = {}
        for collective in self.collectives:
            members = max(1, len(bucket_members(collective.start)))
            alone = members if collective.items else 1
            kernels |= dict.fromkeys(
                (f"{collective.name}.prepare", f"{collective.name}.pack"), alone
            )
            kernels[f"{collective.name}.finish"] = members
        return kernels

    def _start(
        self,
        collective: Collective,
        deps: tuple[str, ...],
        reads: tuple[str, ...],
        writes: tuple[str, ...],
    ) -> Task:
        duration_us = collective.price_us(self.prices)
        if not collective.waits:
            return Task(
                collective.name, duration_us=duration_us, deps=deps, reads=reads, writes=writes
            )
        if collective.free:
            price = self._bucket_prices[collective.bucket_key]
            wire_us = price.us_per_byte * collective.size_bytes
            link_us = sum(map(price.link_us, collective.sizes_bytes))
            latency_us = max(price.latency_us(size) for size in collective.sizes_bytes)
        else:
            wire_us = link_us = collective.link_us(self.prices)
            latency_us = 0.0
        return Task(
            name=collective.name,
            kind="start",
            duration_us=duration_us,
            wire_us=wire_us,
            link_us=link_us,
            latency_us=latency_us,
            queue=collective.group_name,
            bucket_key=collective.bucket_key if collective.free else (),
            deps=deps,
            reads=reads,
            writes=writes,
        )

    @cached_property
    def _bucket_prices(self) -> Mapping[tuple[str, ...], BucketPrice]:
        """Bucket key -> price of any bucket of its collectives."""
        totals: dict[tuple[str, ...], int] = defaultdict(int)
        like: dict[tuple[str, ...], Collective] = {}
        for collective in self.collectives:
            if collective.free:
                totals[collective.bucket_key] += collective.size_bytes
                like[collective.bucket_key] = collective
        return {
            key: BucketPrice(
                partial(self.prices.collective_us, like[key].kind, ranks=like[key].ranks),
                total_bytes,
                partial(self.prices.link_us, like[key].kind, ranks=like[key].ranks),
            )
            for key, total_bytes in totals.items()
        }

    def _wait(
        self, node: fx.Node, deps: tuple[str, ...], reads: tuple[str, ...], writes: tuple[str, ...]
    ) -> Task:
        """A wait; further waits of one collective, behind it, and of unknown tensors are free."""
        source = node.all_input_nodes[0] if node.all_input_nodes else node
        while source not in self.by_start and source.all_input_nodes:
            source = source.all_input_nodes[0]
        collective = self.by_start.get(source)
        if collective is None:
            return Task(node.name, deps=deps, reads=reads, writes=writes)
        first = self.first_wait.setdefault(collective.name, node.name)
        if first != node.name:
            return Task(node.name, deps=(*deps, first), reads=reads, writes=writes)
        return Task(
            name=node.name,
            kind="wait",
            collective=collective.name,
            deps=deps,
            reads=reads,
            writes=writes,
        )

    @cached_property
    def _phase(self) -> Mapping[fx.Node, str]:
        """Start -> barriers before it and free reductions that feed it, most on one path.

        Collectives that differ in it depend on each other, or may through others: no bucket.
        """
        free = {c.start for c in self.collectives if c.free and c.kind != "all_gather"}
        depth: dict[fx.Node, int] = {}
        phases: dict[fx.Node, str] = {}
        barriers = 0
        for node in self.graph.nodes:
            barriers += node in self.barriers
            depth[node] = max((depth[arg] for arg in node.all_input_nodes), default=0)
            phases[node] = f"{barriers}.{depth[node]}"
            depth[node] += node in free
        return phases

    def _neutral(self, collective: Collective) -> FreeCollective:
        cast = self._absorbable(collective)
        read_bytes = 0 if cast is None else sum(stored_inputs(cast).values())
        return replace(
            neutral(collective, collective.name, collective.waits[0].name),
            absorbed="" if cast is None else cast.name,
            pack_saves_bytes=0 if cast is None else collective.input_bytes - read_bytes,
            bucket_key=(*collective.bucket_key, self._phase[collective.start]),
            unpack_is_fused=_only_fused_readers(collective.waits[0]),
            can_merge=not why_not_bucketed(collective),
        )

    def _weight_gradients(self) -> dict[str, tuple[str, ...]]:
        """Reduction -> the matmul that makes its input, and what stands between, in graph order.

        None before the last barrier: nothing may be moved across it.
        """
        behind: set[fx.Node] = set()
        for node in self.graph.nodes:
            if node in self.barriers:
                behind.clear()
            behind.add(node)
        found: dict[str, tuple[str, ...]] = {}
        for collective in self.collectives:
            if collective.free and collective.kind != "all_gather" and not collective.follows:
                chain = self._matmul_chain(collective)
                if chain and chain[0] in behind:
                    found[collective.name] = tuple(self.task_of[node] for node in chain)
        return found

    def _matmul_chain(self, collective: Collective) -> list[fx.Node]:
        sources = payload(collective.start)
        node, chain = sources[0], list[fx.Node]()
        while len(sources) == 1 and len(node.users) == 1 and self.task_of.get(node) == node.name:
            chain.insert(0, node)
            if op_kind(node) is OpKind.MATMUL:
                return chain
            if len(node.all_input_nodes) != 1:
                break
            node = node.all_input_nodes[0]
        return []

    def _absorbable(self, collective: Collective) -> fx.Node | None:
        """The pointwise node that makes the collective's input and nothing else reads."""
        if collective.kind == "all_gather" or why_not_bucketed(collective):
            return None
        node = payload(collective.start)[0]
        while is_alias(node) and len(node.users) == 1:
            node = node.all_input_nodes[0]
        is_own_task = self.task_of.get(node) == node.name and len(self.nodes[node.name]) == 1
        is_absorbed = op_kind(node) is OpKind.FUSIBLE and len(node.users) == 1 and is_own_task
        return node if is_absorbed and node.name not in self.chains else None


def neutral(collective: Collective, start: str, wait: str) -> FreeCollective:
    """What policies see of ``collective``, by the names of its tasks; it may not be merged."""
    return FreeCollective(
        name=start,
        wait=wait,
        kind=collective.kind,
        bucket_key=collective.bucket_key,
        size_bytes=collective.size_bytes,
        input_bytes=collective.input_bytes,
        output_bytes=collective.output_bytes,
        ranks=collective.ranks,
        fqn=collective.fqn,
        module=collective.module,
        input_position=collective.input_position,
        can_merge=False,
        follows=collective.follows,
        members=bucket_members(collective.start),
    )


def _reached(node: fx.Node) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    pending = [user for user in node.users if user.op != "output"]
    while pending:
        current = pending.pop()
        if current not in reached:
            reached.add(current)
            pending += [user for user in current.users if user.op != "output"]
    return reached


def _only_fused_readers(wait: fx.Node) -> bool:
    pending = list(wait.users)
    while pending:
        user = pending.pop()
        if is_alias(user):
            pending += list(user.users)
        elif not is_fusible(user):
            return False
    return bool(wait.users)


def _dtypes(nodes: Iterable[fx.Node]) -> set[torch.dtype]:
    """The dtypes that ``nodes`` read and write."""
    values = [arg.meta.get("val") for node in nodes for arg in (node, *node.all_input_nodes)]
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}
