"""Write the nodes of one bucket: what both of its forms share.

New nodes stand at the graph's insertion point, with ``meta["val"]``, the bucket's name, and the
module stacks and stack traces of a member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.fx as fx

from inductor_overlap.passes.collectives import BUCKET, Collective, is_slice
from inductor_overlap.passes.fx_ops import arguments, payload_name

aten = torch.ops.aten

_MEMBERS = "inductor_overlap_members"
_INHERITED = ("nn_module_stack", "fwd_nn_module_stack", "stack_trace", "partitioner_tag", "seq_nr")


@dataclass(frozen=True)
class MergedBucket:
    """The nodes of one bucket.

    Attributes:
        pack: before the start; empty if the members' inputs already are one tensor. Of a coalesced
            bucket, casts of the members' inputs.
        wait: the wait and the views that all members share; of a coalesced bucket, all waits.
        unpack: by name of the member's wait, the nodes that stand for it; of a coalesced bucket
            only the slices that cut off padding.
        items: of a coalesced bucket, those of the start's result.
    """

    pack: tuple[fx.Node, ...]
    start: fx.Node
    wait: tuple[fx.Node, ...]
    unpack: dict[str, tuple[fx.Node, ...]]
    items: tuple[fx.Node, ...] = ()

    @property
    def written(self) -> tuple[fx.Node, ...]:
        """All of its nodes, in the order in which they were written."""
        unpack = chain.from_iterable(self.unpack.values())
        return (*self.pack, self.start, *self.items, *self.wait, *unpack)


def bucket_members(start: fx.Node) -> tuple[str, ...]:
    """Names of the collectives that were merged into ``start``; empty if it is no bucket."""
    return start.meta.get(_MEMBERS, ())


class BucketNodes:
    """Writes nodes of a bucket called ``name``.

    ``twins``: the same nodes in a copy of the graph, as far as they are known: ``meta["val"]`` is
    theirs.
    """

    def __init__(
        self, name: str, members: Sequence[Collective], twins: Sequence[fx.Node] = ()
    ) -> None:
        self.name = name
        self.members = members
        self._graph = members[0].start.graph
        self._twins = iter(twins)
        self._written: list[fx.Node] = []
        self.sources = [self._source(member) for member in members]

    @property
    def group_size(self) -> int:
        return int(arguments(self.members[0].start)["group_size"])

    def start(self, target: Any, payload: Any, value_of: Callable[[], object]) -> fx.Node:
        """The collective, with the arguments of the first member's but for its payload."""
        like = self.members[0].start
        args, kwargs = (payload, *like.args[1:]), dict(like.kwargs)
        if not like.args:
            del kwargs[payload_name(like.target)]
            args, kwargs = (), {**kwargs, payload_name(target): payload}
        start = self.add(target, args, value_of, kwargs=kwargs, name=self.name)
        start.meta[_MEMBERS] = tuple(member.name for member in self.members)
        return start

    def add(
        self,
        target: Any,
        args: tuple[Any, ...],
        value_of: Callable[[], object],
        *,
        kwargs: dict[str, Any] | None = None,
        name: str | None = None,
        like: fx.Node | None = None,
    ) -> fx.Node:
        """A node with the value ``value_of()``; ``like``: where it is said to come from."""
        node = self._graph.create_node("call_function", target, args, kwargs, name=name)
        origin = (like or self.members[0].start).meta
        node.meta.update({key: origin[key] for key in _INHERITED if key in origin})
        twin = next(self._twins, None)
        value = value_of() if twin is None else twin.meta["val"]
        node.meta.update({"val": value, BUCKET: self.name})
        if target in (aten.cat.default, aten.clone.default):
            node.meta["original_aten"] = target  # generated kernels are named after it
        self._written.append(node)
        return node

    def unpad(self, member: Collective, result: fx.Node) -> fx.Node:
        """``result`` of ``member`` without the padding that its input had lost."""
        for cut in filter(is_slice, member.unpad):
            result = self._again(cut, result)
        return result

    def _source(self, member: Collective) -> fx.Node:
        """What ``member`` adds to the bucket, padding included."""
        source = member.source
        for cast in member.casts:
            source = self._again(cast, source)
        return source

    def _again(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """Another ``node``, applied to ``source``."""
        target: Any = node.target
        args, kwargs = node.args[1:], dict(node.kwargs)
        value_of = partial(target, source.meta["val"], *args, **kwargs)
        return self.add(target, (source, *args), value_of, kwargs=kwargs, like=node)

    def take(self) -> tuple[fx.Node, ...]:
        """What was written since the last call."""
        written, self._written = tuple(self._written), []
        return written
