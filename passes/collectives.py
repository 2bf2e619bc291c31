"""Find and describe every collective of an FX graph; say which are free to move.

A collective is *free* when moving its start and wait cannot change what is computed or block what
follows: a parameter gather whose ancestors are one unary chain from one graph input, or a gradient
reduction whose results only reach graph outputs (for HSDP the reduce-scatter and the all-reduce
that follows it are one chain). Everything else is described, with the reason, and stays where it
is: collectives on the critical path (tensor parallel, expert parallel), coalesced and in-place
forms, gathers of an input that the graph also writes.

Gathers and reductions of a bucket that `bucketing` has made are recognised as such, in both of its
forms, with the nodes that pack and unpack them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import GroupName

from inductor_overlap.cost_model.fusion import node_bytes
from inductor_overlap.cost_model.placement import groups_like, world_size
from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.cost_model.sizes import numel_hint, shape_hint, tensor_bytes
from inductor_overlap.passes.fx_ops import (
    arguments,
    collective_kind,
    is_coalesced_form,
    is_plain_form,
    is_pure_compute,
    is_start,
    is_wait,
    op_base_name,
    payload,
    written_inputs,
)
from inductor_overlap.passes.parameter_names import (
    descriptor_fqn,
    module_path,
    parameter_fqn,
    parameter_position,
)
from inductor_overlap.passes.storages import viewed

BUCKET = "inductor_overlap_bucket"
"""Key in ``meta`` of the nodes that make up a bucket (pack, start, wait, unpack): its name."""
BUCKETED_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True, eq=False)
class Collective:
    """One functional collective.

    Attributes:
        name: name of the start node.
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or, for another
            functional collective, its op name.
        size_bytes: nccl-tests size: total gathered output of an all-gather, total input of a
            reduce-scatter, the buffer of an all-reduce or all-to-all; padded shapes.
        sizes_bytes: the same of each of its tensors: one, but for coalesced forms.
        input_bytes, output_bytes: of its tensors on this rank, padded.
        group_name: name of the process group.
        group: the group argument as it stands in the graph: a string or an FX node.
        ranks: global ranks of the first of the groups like its own (`groups_like`), so that all
            ranks read the same; ``range(size)`` when the group is not registered here.
        fqn: the parameter it serves; ``module``: path of that parameter's module.
        free: it may move; ``why_fixed`` says why it may not.
        input_position: position of the parameter among the parameters, by first use; payload order
            inside a bucket.
        head: chain from the graph input (excluded) to the start (excluded), gathers only, without
            ``shared_head``, its first nodes, if others read them too: node -> elements of the
            padded shard that is gathered.
        pack: nodes that merge the inputs of a bucket, between head and start.
        items: nodes that take the result of a coalesced one apart, before the waits.
        unpack: nodes that take the result of a gathered bucket apart, behind its wait.
        tail: chain from the wait (excluded) to the graph output, reductions only.
        follows: name of the reduction whose result this one reduces further (HSDP).
        unpad: slices by which its input loses the padding of that result, which only some ranks
            have, with the casts and idle reshapes among them. Its sizes and shapes are those
            before, and its buckets reduce the padding too.
    """

    name: str
    kind: str
    start: fx.Node
    waits: tuple[fx.Node, ...]
    size_bytes: int
    sizes_bytes: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    dtype: torch.dtype
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    reduce_op: str
    group_name: str
    group: str | fx.Node
    ranks: tuple[int, ...]
    fqn: str | None
    module: str | None
    free: bool
    why_fixed: str
    input_position: int = 0
    pack: tuple[fx.Node, ...] = ()
    items: tuple[fx.Node, ...] = ()
    unpack: tuple[fx.Node, ...] = ()
    head: tuple[fx.Node, ...] = ()
    shared_head: Mapping[fx.Node, int] = field(default_factory=dict[fx.Node, int])
    tail: tuple[fx.Node, ...] = ()
    follows: str = ""
    unpad: tuple[fx.Node, ...] = ()

    @property
    def source(self) -> fx.Node:
        """The tensor that a collective of one tensor sends, or what it is unpadded from."""
        return self.unpad[0].all_input_nodes[0] if self.unpad else payload(self.start)[0]

    @property
    def casts(self) -> tuple[fx.Node, ...]:
        """The casts among ``unpad``, in order."""
        return tuple(node for node in self.unpad if is_cast(node))

    @property
    def numel(self) -> int:
        """Elements of its results."""
        return self.output_bytes // self.dtype.itemsize

    @property
    def is_bucket(self) -> bool:
        return BUCKET in self.start.meta

    @property
    def bucket_key(self) -> tuple[str, str, str, str]:
        """What members of one bucket share: kind, group, dtype, reduction."""
        return (self.kind, self.group_name, str(self.dtype), self.reduce_op)

    def price_us(self, prices: PricedCluster) -> float:
        """Time (us) of it on its link."""
        if len(self.sizes_bytes) < 2:
            return prices.collective_us(self.kind, self.size_bytes, self.ranks)
        return prices.coalesced_us(self.kind, self.sizes_bytes, self.ranks)

    def link_us(self, prices: PricedCluster) -> float:
        """For how long (us) it keeps its link busy; at most `price_us`."""
        each_us = (prices.link_us(self.kind, size, self.ranks) for size in self.sizes_bytes)
        return min(self.price_us(prices), sum(each_us))

    def in_copy(self, copies: Mapping[fx.Node, fx.Node]) -> Collective:
        """The same collective in a copy of its graph, by a mapping from each node to its copy."""
        return replace(
            self,
            start=copies[self.start],
            waits=tuple(copies[node] for node in self.waits),
            group=copies[self.group] if isinstance(self.group, fx.Node) else self.group,
            pack=tuple(copies[node] for node in self.pack),
            items=tuple(copies[node] for node in self.items),
            unpack=tuple(copies[node] for node in self.unpack),
            head=tuple(copies[node] for node in self.head),
            shared_head={copies[node]: numel for node, numel in self.shared_head.items()},
            tail=tuple(copies[node] for node in self.tail),
            unpad=tuple(copies[node] for node in self.unpad),
        )

    def __repr__(self) -> str:
        what = self.fqn or self.module or "?"
        state = "free" if self.free else f"fixed: {self.why_fixed}"
        return f"Collective({self.name}, {self.kind}, {self.size_bytes} B, {what}, {state})"


def find_collectives(graph: fx.Graph) -> list[Collective]:
    """Describe every functional collective of ``graph``, in graph order."""
    written = _written_graph_inputs(graph)
    sizes = _group_sizes(graph)
    position = {node: index for index, node in enumerate(graph.nodes)}
    found: dict[str, Collective] = {}
    for node in graph.nodes:
        if is_start(node):
            found[node.name] = _describe(node, written, found, sizes, position)
    return list(found.values())


def _describe(
    start: fx.Node,
    written: frozenset[fx.Node],
    found: dict[str, Collective],
    group_sizes: dict[str, int],
    position: Mapping[fx.Node, int],
) -> Collective:
    waits = tuple(_waits(start))
    given = arguments(start)
    group = cast("str | fx.Node", given.get("group_name", ""))
    name = group_name_of(group)
    kind = collective_kind(start)
    follows = _followed_reduction(start, found)
    unpad = _unpad(start) if kind == "all_reduce" and follows else ()
    sizes = _padded_sizes(start, unpad) if unpad else _sizes(start, kind)
    items = _items(start)
    pack = _pack(start)
    head, shared, root = _head(start, pack) if kind == "all_gather" else ((), {}, None)
    tail, ends_in_output = _tail(waits, position)
    why_fixed = _why_fixed(start, kind, waits, items, root, written, ends_in_output)
    fqn = parameter_fqn(start) or (descriptor_fqn(root) if root is not None else None)
    return Collective(
        name=start.name,
        kind=kind,
        start=start,
        waits=waits,
        size_bytes=sizes.output_bytes if kind == "all_gather" else sizes.input_bytes,
        sizes_bytes=sizes.each_bytes,
        input_bytes=sizes.input_bytes,
        output_bytes=sizes.output_bytes,
        dtype=sizes.dtype,
        input_shape=sizes.input_shape,
        output_shape=sizes.output_shape,
        reduce_op=str(given.get("reduce_op", "")),
        group_name=name,
        group=group,
        ranks=_group_ranks(name, group_sizes),
        fqn=fqn,
        module=_module_of(start, fqn),
        free=not why_fixed,
        why_fixed=why_fixed,
        input_position=_input_position(start, root, len(found)),
        pack=pack,
        items=items,
        unpack=_unpack(waits) if kind == "all_gather" else (),
        head=head if not why_fixed else (),
        shared_head=shared if not why_fixed else {},
        tail=tail if not why_fixed and kind != "all_gather" else (),
        follows=follows,
        unpad=unpad,
    )


class _Sizes(NamedTuple):
    """The sizes of a collective as `Collective` has them; ``each_bytes`` is its ``sizes_bytes``."""

    dtype: torch.dtype
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    input_bytes: int
    output_bytes: int
    each_bytes: tuple[int, ...]


def _sizes(start: fx.Node, kind: str) -> _Sizes:
    sources = payload(start)
    first = _single_tensor(sources[0] if sources else None)
    input_bytes, output_bytes = sum(map(node_bytes, sources)), node_bytes(start)
    size_bytes = output_bytes if kind == "all_gather" else input_bytes
    return _Sizes(
        dtype=first.dtype if first is not None else torch.float32,
        input_shape=_shape(first if len(sources) == 1 else None),
        output_shape=_shape(_single_tensor(start)),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        each_bytes=_sizes_bytes(start, kind) or (size_bytes,),
    )


def _padded_sizes(start: fx.Node, unpad: Sequence[fx.Node]) -> _Sizes:
    """Those of an all-reduce, and of its result, without the slices before it."""
    padded = unpad[0].all_input_nodes[0]
    shape, dtype = _shape(_single_tensor(padded)), payload(start)[0].meta["val"].dtype
    size_bytes = numel_of(padded) * dtype.itemsize
    return _Sizes(dtype, shape, shape, size_bytes, size_bytes, (size_bytes,))


def _why_fixed(
    start: fx.Node,
    kind: str,
    waits: Sequence[fx.Node],
    items: Sequence[fx.Node],
    root: fx.Node | None,
    written: frozenset[fx.Node],
    ends_in_output: bool,
) -> str:
    if kind not in BUCKETED_KINDS:
        return f"{kind} is on the critical path"
    if not items and (not is_plain_form(start) or _single_tensor(start) is None):
        return "coalesced or in-place form"
    if len(waits) != max(1, len(items)):
        expected = f"{len(items)} were" if items else "one was"
        return f"{len(waits)} waits where {expected} expected"
    if any(user not in waits for result in items or (start,) for user in result.users):
        return "its unfinished result is used before the wait"
    if kind == "all_gather":
        if root is None:
            return "it gathers a computed value, not a graph input"
        return "the graph writes the gathered input" if root in written else ""
    return "" if ends_in_output else "its result is used inside the graph"


def _items(start: fx.Node) -> tuple[fx.Node, ...]:
    """The items of a coalesced bucket's result; nothing for any other collective."""
    if BUCKET not in start.meta or not is_coalesced_form(start):
        return ()
    return tuple(user for user in start.users if op_base_name(user) == "getitem")


def _sizes_bytes(start: fx.Node, kind: str) -> tuple[int, ...]:
    """Size of each tensor of a collective that has a coalesced form; nothing for others."""
    if kind == "all_gather":
        outputs: object = start.meta.get("val")
        values = cast("list[object]", outputs) if isinstance(outputs, list | tuple) else [outputs]
        return tuple(tensor_bytes(value) for value in values if isinstance(value, torch.Tensor))
    return tuple(map(node_bytes, payload(start))) if kind in BUCKETED_KINDS else ()


def _waits(start: fx.Node) -> Iterator[fx.Node]:
    for user in start.users:
        if is_wait(user):
            yield user
        elif op_base_name(user) == "getitem":
            yield from (leaf for leaf in user.users if is_wait(leaf))


def _pack(start: fx.Node) -> tuple[fx.Node, ...]:
    """The pack nodes of a bucket, in execution order; nothing for a single collective."""
    if BUCKET not in start.meta:
        return ()
    pack: list[fx.Node] = []
    pending = list(start.all_input_nodes)
    while pending:
        node = pending.pop()
        if node.meta.get(BUCKET) == start.meta[BUCKET] and not is_wait(node) and node not in pack:
            pack.append(node)
            pending += node.all_input_nodes
    return tuple(reversed(pack))


def _unpack(waits: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    name = waits[0].meta.get(BUCKET) if waits else None
    if name is None:
        return ()
    unpack: list[fx.Node] = []
    pending = list(waits)
    while pending:
        users = [user for user in pending.pop().users if user.meta.get(BUCKET) == name]
        unpack += users
        pending += users
    return tuple(unpack)


def _head(
    start: fx.Node, pack: Sequence[fx.Node]
) -> tuple[tuple[fx.Node, ...], dict[fx.Node, int], fx.Node | None]:
    """The unary chains that feed ``start``: own nodes, shared nodes, and a graph input or None.

    One chain for a single gather, one per member for a bucket. A chain node with other users is
    shared, and so is what comes before it: the chain is still unary.
    """
    ends = [arg for node in pack for arg in _tensor_inputs(node) if arg not in pack]
    head: dict[fx.Node, None] = {}
    shared: dict[fx.Node, int] = {}
    root: fx.Node | None = None
    for node in ends if pack else _tensor_inputs(start):
        chain, num_shared, root = _chain(node)
        if root is None:
            return (), {}, None
        shared.update(dict.fromkeys(chain[:num_shared], numel_of(node)))
        head.update(dict.fromkeys(chain[num_shared:]))
    return tuple(head), shared, root


def _chain(node: fx.Node) -> tuple[list[fx.Node], int, fx.Node | None]:
    """The chain that ends in ``node``, in order, how many of it are shared, and its input."""
    links: list[fx.Node] = []
    while node.op != "placeholder":
        inputs = node.all_input_nodes
        if len(inputs) != 1 or not is_pure_compute(node):
            return [], 0, None
        links.append(node)
        node = inputs[0]
    own = next((i for i, link in enumerate(links) if len(link.users) > 1), len(links))
    return links[::-1], len(links) - own, node


def _tensor_inputs(node: fx.Node) -> list[fx.Node]:
    return [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]


def _tail(
    waits: Sequence[fx.Node], position: Mapping[fx.Node, int]
) -> tuple[tuple[fx.Node, ...], bool]:
    """Unary chain of nodes after the wait, and whether everything it reaches is a graph output.

    Another reduction of the result (HSDP's all-reduce) is followed, not counted as use. The chain
    ends where it meets another gradient's: what follows a sum belongs to no single reduction.
    """
    tail: list[fx.Node] = []
    seen: set[fx.Node] = set()
    pending = [user for wait in waits for user in wait.users]
    while pending:
        node = pending.pop()
        if node in seen or node.op == "output":
            continue
        seen.add(node)
        if not _may_follow_reduction(node):
            return (), False
        if len(node.all_input_nodes) == 1 and not is_start(node) and not is_wait(node):
            tail.append(node)
        pending.extend(node.users)
    tail.sort(key=position.__getitem__)
    joins = [node for node in seen if is_start(node) or len(node.all_input_nodes) > 1]
    shared = {user for node in joins for user in _reached(node)}
    return tuple(node for node in tail if node not in shared), True


def _reached(start: fx.Node) -> set[fx.Node]:
    reached: set[fx.Node] = set()
    pending = list(start.users)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending.extend(node.users)
    return reached


def _may_follow_reduction(node: fx.Node) -> bool:
    """Ops that finish a gradient: unary chains, sums of two gradients, a further all-reduce."""
    if is_start(node):
        return collective_kind(node) == "all_reduce"
    if is_wait(node) or op_base_name(node) == "getitem":
        return True
    sums = node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.cat.default)
    return is_pure_compute(node) and (len(node.all_input_nodes) == 1 or sums)


def _followed_reduction(start: fx.Node, found: dict[str, Collective]) -> str:
    """The free reduction whose result is all that ``start`` reduces; "" if there is none."""
    followed = {_reduction_of(node, found) for node in payload(start)}
    return followed.pop() if len(followed) == 1 else ""


def _reduction_of(node: fx.Node, found: dict[str, Collective]) -> str:
    is_waited = False
    while len(node.all_input_nodes) == 1:
        is_waited = is_waited or is_wait(node)
        node = node.all_input_nodes[0]
        if is_waited and node.name in found:
            break
    previous = found.get(node.name) if is_waited else None
    return previous.name if previous is not None and previous.free else ""


def _unpad(start: fx.Node) -> tuple[fx.Node, ...]:
    """The slices, casts and idle reshapes right before ``start``, in order; of a bucket none."""
    found: list[fx.Node] = []
    if BUCKET in start.meta or not is_plain_form(start):
        return ()
    node = payload(start)[0]
    while is_slice(node) or is_cast(node) or _is_idle(node):
        found.insert(0, node)
        node = node.all_input_nodes[0]
    return tuple(found)


def is_slice(node: fx.Node) -> bool:
    return node.target is torch.ops.aten.slice.Tensor


def is_cast(node: fx.Node) -> bool:
    """True for what changes the dtype of its one input."""
    return op_base_name(node) in ("convert_element_type", "_to_copy")


def _is_idle(node: fx.Node) -> bool:
    """True for a reshape to the shape that is there already."""
    is_reshape = op_base_name(node) in ("reshape", "view", "_unsafe_view")
    return is_reshape and _shape(_single_tensor(node)) == _shape(
        _single_tensor(node.all_input_nodes[0])
    )


def _written_graph_inputs(graph: fx.Graph) -> frozenset[fx.Node]:
    written = {viewed(target) for node in graph.nodes for target in written_inputs(node)}
    return frozenset(node for node in written if node.op == "placeholder")


def group_name_of(group: str | fx.Node) -> str:
    """Name of a process group argument: the string, or what the group node's value says."""
    if isinstance(group, fx.Node):
        return str(getattr(group.meta.get("val"), "group_name", group.name))
    return str(group)


def _group_sizes(graph: fx.Graph) -> dict[str, int]:
    """Group name -> number of ranks, as far as the collectives of the graph state it."""
    sizes: dict[str, int] = {}
    for node in graph.nodes:
        given = arguments(node) if is_start(node) else {}
        if "group_size" in given and "group_name" in given:
            sizes[group_name_of(given["group_name"])] = int(given["group_size"])
    return sizes


def _group_ranks(group_name: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """Ranks of the first group like a registered one, the same for all ranks of a mesh.

    For any other name a contiguous group of the stated size, at least a pair.
    """
    if dist.is_available() and dist.is_initialized():
        try:
            ranks = dist.get_process_group_ranks(_resolve_group(group_name))
            return tuple(groups_like(tuple(ranks), world_size())[0])
        except (RuntimeError, ValueError, KeyError):
            pass  # the graph was traced elsewhere: plan with what it says itself
    return tuple(range(sizes.get(group_name, 2)))


def _resolve_group(group_name: str) -> dist.ProcessGroup:
    resolve = distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    return resolve(GroupName(group_name))


def _input_position(start: fx.Node, root: fx.Node | None, default: int) -> int:
    position = parameter_position(start)
    if position is not None or root is None:
        return default if position is None else position
    inputs = [node for node in start.graph.nodes if node.op == "placeholder"]
    return inputs.index(root)


def _module_of(node: fx.Node, fqn: str | None) -> str | None:
    if fqn is not None:
        return fqn.rpartition(".")[0]
    return module_path(node)


def _single_tensor(argument: object) -> torch.Tensor | None:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def numel_of(node: fx.Node) -> int:
    """Elements of the tensor that ``node`` returns; 0 if it is none, or several."""
    tensor = _single_tensor(node)
    return numel_hint(tensor) if tensor is not None else 0


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...]:
    return shape_hint(tensor) if tensor is not None else ()
