"""Write a coalesced bucket: one launch of several collectives, each with tensors of its own.

Nothing is packed or copied: the start takes the inputs of all members, the items of its result are
waited for one by one, and each wait takes the place of a member's. The first wait ends the launch;
the others find it ended and stand right behind it, since Inductor keeps a member's input until its
own wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
import torch.fx as fx

from inductor_overlap.passes.bucket_nodes import BucketNodes, MergedBucket
from inductor_overlap.passes.collectives import Collective

c10d = torch.ops._c10d_functional

_COALESCED: dict[str, Any] = {
    "all_gather": c10d.all_gather_into_tensor_coalesced.default,
    "reduce_scatter": c10d.reduce_scatter_tensor_coalesced.default,
    "all_reduce": c10d.all_reduce_coalesced.default,
}


def coalesce(name: str, members: Sequence[Collective]) -> MergedBucket:
    """Write the collective called ``name``; the users of the members' waits use the new ones."""
    nodes = BucketNodes(name, members)
    outputs = [
        _output(member, source) for member, source in zip(members, nodes.sources, strict=True)
    ]
    pack = nodes.take()
    start = nodes.start(_COALESCED[members[0].kind], list(nodes.sources), lambda: outputs)
    items = [
        nodes.add(getitem, (start, index), lambda value=value: value, like=member.start)
        for index, (member, value) in enumerate(zip(members, outputs, strict=True))
    ]
    waits: list[fx.Node] = []
    unpack: dict[str, tuple[fx.Node, ...]] = {}
    nodes.take()
    for member, item in zip(members, items, strict=True):
        old, value = member.waits[0], item.meta["val"]
        wait = nodes.add(c10d.wait_tensor.default, (item,), lambda value=value: value, like=old)
        waits += nodes.take()
        old.replace_all_uses_with(nodes.unpad(member, wait))
        unpack[old.name] = nodes.take()
    return MergedBucket(pack, start, tuple(waits), unpack, tuple(items))


def _output(member: Collective, source: fx.Node) -> torch.Tensor:
    """What the collective of ``member`` writes, padding included."""
    return torch.empty_like(source.meta["val"]) if member.unpad else member.start.meta["val"]
