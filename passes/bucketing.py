"""Merge the collectives of one bucket: pack, one collective, one wait, unpack.

That is the packed form; `coalescing` writes the other one. In both, only plain functional ATen and
c10d nodes are written: no custom op, no rank constant, so that saved code needs nothing of this
package and is the same on every rank. What is merged is the collective proper: casts, pads and
unpads of the members stay as they are, so any shard dimension and uneven shards work unchanged. New
nodes get ``meta["val"]``, module stacks and stack traces (`bucket_nodes`).

The caller decides what to merge; this module refuses (``ValueError``) members that differ in
kind, group, dtype or reduction, depend on each other, or have symbolic sizes. Node order is the
caller's too (`graph_schedule.write_order`): new nodes are written before the graph's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from operator import getitem
from typing import Any

import torch
import torch.fx as fx

from inductor_overlap.passes.bucket_nodes import BucketNodes, MergedBucket
from inductor_overlap.passes.coalescing import coalesce
from inductor_overlap.passes.collectives import BUCKET, Collective
from inductor_overlap.passes.plan import BucketForm

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def why_not_bucketed(collective: Collective) -> str:
    """Why a free collective cannot join a bucket; empty if it can."""
    if collective.is_bucket:
        return "it is a bucket already"
    tensors: list[torch.Tensor] = [collective.source.meta["val"], collective.start.meta["val"]]
    sizes: list[object] = [size for tensor in tensors for size in tensor.shape]
    if any(not isinstance(size, int) for size in sizes):
        return "symbolic sizes"
    return ""


def merge_bucket(
    name: str,
    members: Sequence[Collective],
    like: MergedBucket | None = None,
    *,
    form: BucketForm = "packed",
) -> MergedBucket:
    """Replace ``members`` (at least two, in payload order) by one collective called ``name``.

    Args:
        name: of the new collective's start.
        members: of one graph.
        like: the same bucket in a copy of that graph, if it has been merged there: its values
            are used again, since making fake tensors is most of the work.
        form: whether the members' tensors are packed into one, or stay what they are.

    Raises:
        ValueError: The members cannot share a bucket.
    """
    _check(name, members)
    output = next(node for node in reversed(members[0].start.graph.nodes) if node.op == "output")
    with members[0].start.graph.inserting_before(output):
        if form == "coalesced":
            merged = coalesce(name, members)
        else:
            merged = _Packer(name, members, like.written if like else ()).merge()
    for member in members:
        member.start.graph.erase_node(member.waits[0])
        member.start.graph.erase_node(member.start)
        for cut in reversed(member.unpad):
            if not cut.users:
                cut.graph.erase_node(cut)
    return merged


def _check(name: str, members: Sequence[Collective]) -> None:
    if len(members) < 2:
        raise ValueError(f"bucket {name!r} has {len(members)} member; a bucket merges at least two")
    keys = sorted({member.bucket_key for member in members})
    if len(keys) > 1:
        raise ValueError(
            f"bucket {name!r}: members must share kind, group, dtype and reduction, got {keys}"
        )
    needed = _needed_members(members)
    if needed:
        raise ValueError(f"bucket {name!r}: other members need the results of {needed}")
    for member in members:
        reason = why_not_bucketed(member) if member.free else member.why_fixed
        if reason:
            raise ValueError(f"bucket {name!r}: {member.name} cannot join it: {reason}")


def _needed_members(members: Sequence[Collective]) -> list[str]:
    """Members whose results others need; of free collectives only all-reduces read reductions."""
    if members[0].kind != "all_reduce":
        return []
    pending = [member.start for member in members]
    seen: set[fx.Node] = set()
    while pending:
        inputs = set(pending.pop().all_input_nodes) - seen
        seen |= inputs
        pending += inputs
    return [member.name for member in members if member.waits[0] in seen]


class _Packer(BucketNodes):
    """Writes a packed bucket."""

    def merge(self) -> MergedBucket:
        kind = self.members[0].kind
        if kind == "all_gather":
            return self._all_gather()
        if kind == "reduce_scatter":
            return self._reduce_scatter()
        return self._all_reduce()

    def _all_gather(self) -> MergedBucket:
        shards = [prod(member.input_shape) for member in self.members]
        world = self.group_size
        packed = self._cat([self._reshape(source, [-1]) for source in self.sources], dim=0)
        pack = self.take()
        start = self._start(packed, world * sum(shards))
        waited = self._call(c10d.wait_tensor.default, (start,), shape=[world * sum(shards)])
        rows = self._reshape(waited, [world, sum(shards)])
        chunks = self._split(rows, [[world, shard] for shard in shards], dim=1)
        wait = self.take()[1:]
        unpack: dict[str, tuple[fx.Node, ...]] = {}
        for member, chunk in zip(self.members, chunks, strict=True):
            contiguous = {"memory_format": torch.contiguous_format}
            copy = self._call(aten.clone.default, (chunk,), contiguous, shape=_shape(chunk))
            # By rows: else a read of rows by an index (an embedding) is not contiguous, so that
            # Inductor's C++ kernel for it is not vectorised, and what it sums is in another order.
            rows = self._reshape(copy, [world, *member.input_shape])
            self._replace(member, self._reshape(rows, list(member.output_shape)))
            unpack[member.waits[0].name] = self.take()
        return MergedBucket(pack, start, wait, unpack)

    def _reduce_scatter(self) -> MergedBucket:
        shards = [prod(member.output_shape) for member in self.members]
        world = self.group_size
        rows = [
            self._reshape(source, [world, shard])
            for source, shard in zip(self.sources, shards, strict=True)
        ]
        packed = self._reshape(self._cat(rows, dim=1), [world * sum(shards)])
        pack = self.take()
        start = self._start(packed, sum(shards))
        return self._finish_reduction(pack, start, shards)

    def _all_reduce(self) -> MergedBucket:
        sizes = [prod(member.input_shape) for member in self.members]
        packed = _common_payload(self.sources)
        if packed is None:
            packed = self._cat([self._reshape(source, [-1]) for source in self.sources], dim=0)
        pack = self.take()
        start = self._start(packed, sum(sizes))
        return self._finish_reduction(pack, start, sizes)

    def _finish_reduction(
        self, pack: tuple[fx.Node, ...], start: fx.Node, sizes: Sequence[int]
    ) -> MergedBucket:
        waited = self._call(c10d.wait_tensor.default, (start,), shape=[sum(sizes)])
        chunks = self._split(waited, [[size] for size in sizes], dim=0)
        wait = self.take()[1:]
        unpack: dict[str, tuple[fx.Node, ...]] = {}
        for member, chunk in zip(self.members, chunks, strict=True):
            result = self._reshape(chunk, list(member.output_shape))
            self._replace(member, self.unpad(member, result))
            unpack[member.waits[0].name] = self.take()
        return MergedBucket(pack, start, wait, unpack)

    def _start(self, packed: fx.Node, numel: int) -> fx.Node:
        return self.start(self.members[0].start.target, packed, self._empty([numel]))

    def _cat(self, parts: Sequence[fx.Node], dim: int) -> fx.Node:
        shape = _shape(parts[0])
        shape[dim] = sum(_shape(part)[dim] for part in parts)
        return self._call(aten.cat.default, (list(parts), dim), shape=shape)

    def _split(self, node: fx.Node, shapes: Sequence[list[int]], dim: int) -> list[fx.Node]:
        sizes = [shape[dim] for shape in shapes]
        split = self.add(
            aten.split_with_sizes.default,
            (node, sizes, dim),
            lambda: list(node.meta["val"].split(sizes, dim)),
        )
        parts = split.meta["val"]
        return [
            self.add(getitem, (split, index), partial(getitem, parts, index))
            for index in range(len(sizes))
        ]

    def _reshape(self, node: fx.Node, shape: list[int]) -> fx.Node:
        sizes = [prod(_shape(node))] if shape == [-1] else shape
        if _shape(node) == sizes:
            return node
        return self.add(
            aten.reshape.default, (node, sizes), lambda: node.meta["val"].reshape(sizes)
        )

    def _call(
        self,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        *,
        shape: Sequence[int],
    ) -> fx.Node:
        """A node that writes a new contiguous tensor of ``shape``."""
        return self.add(target, args, self._empty(shape), kwargs=kwargs)

    def _empty(self, shape: Sequence[int]) -> Callable[[], torch.Tensor]:
        return partial(self.sources[0].meta["val"].new_empty, list(shape))

    def _replace(self, member: Collective, result: fx.Node) -> None:
        member.waits[0].replace_all_uses_with(result)


def _common_payload(sources: Sequence[fx.Node]) -> fx.Node | None:
    """The one waited tensor that ``sources`` are all parts of, in order and complete (HSDP)."""
    parts = [_part(source) for source in sources]
    if any(part is None for part in parts):
        return None
    splits = [part.args[0] for part in parts if part is not None]
    split = splits[0]
    if not isinstance(split, fx.Node) or any(other is not split for other in splits):
        return None
    indices = [part.args[1] for part in parts if part is not None]
    if indices != list(range(len(split.meta["val"]))):
        return None
    return split.all_input_nodes[0]


def _part(node: fx.Node) -> fx.Node | None:
    if node.target is aten.reshape.default:
        node = node.all_input_nodes[0]
    is_part = node.target is getitem and isinstance(node.args[0], fx.Node)
    from_bucket = is_part and node.args[0].target is aten.split_with_sizes.default  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess, reportUnknownMemberType]
    return node if from_bucket and BUCKET in node.meta else None


def _shape(node: fx.Node) -> list[int]:
    return list(node.meta["val"].shape)
