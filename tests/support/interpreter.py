"""Runs one FX graph on N ranks in lock-step, in one process: what the collectives really compute.

Each rank has its own graph (they may differ in pads) and its own inputs. A rank runs until it
waits for a collective that not all members of its group have started; then the next rank runs.
The k-th collective that a rank starts on a group meets the k-th of the group's other ranks, as in
NCCL; a coalesced one counts as one for each tensor. Reductions add in rank order, so results do not
depend on how collectives are merged.

Refused (`CollectiveError`): ranks whose collectives do not match, a deadlock, a second or a
missing wait, and an input that was written while its collective was in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from inductor_overlap.passes.fx_ops import arguments, collective_kind, is_start, is_wait

Groups = Mapping[str, Sequence[Sequence[int]]]
"""Group name -> the groups of that name, each a list of global ranks."""


class CollectiveError(AssertionError):
    """The ranks' collectives do not fit together."""


@dataclass(eq=False)
class _Posted:
    """One collective as one rank started it."""

    node: fx.Node
    signature: tuple[Any, ...]
    value: Tensor
    snapshot: Tensor
    result: Tensor | None = None
    waited: bool = False


@dataclass
class _Rank:
    steps: Iterator[bool]
    outputs: Any = None
    done: bool = False
    posted: dict[str, list[_Posted]] = field(default_factory=dict[str, list[_Posted]])


def run_on_ranks(
    graphs: Sequence[fx.GraphModule], inputs: Sequence[Sequence[Tensor]], groups: Groups
) -> list[Any]:
    """The outputs of every rank, in rank order.

    Args:
        graphs: one per rank.
        inputs: per rank, what its placeholders receive, in order; copied first.
        groups: the process groups that the graphs name.

    Raises:
        CollectiveError: see the module's docstring.
    """
    ranks: list[_Rank] = []
    for index, (gm, values) in enumerate(zip(graphs, inputs, strict=True)):
        rank = _Rank(steps=iter(()))
        rank.steps = _execute(gm, [v.clone() for v in values], index, rank, ranks, groups)
        ranks.append(rank)
    while not all(rank.done for rank in ranks):
        progress = [_advance(rank) for rank in ranks if not rank.done]
        if not any(progress):
            stuck = [index for index, rank in enumerate(ranks) if not rank.done]
            raise CollectiveError(f"deadlock: ranks {stuck} wait for collectives nobody starts")
    _check_waits(ranks)
    return [rank.outputs for rank in ranks]


def _advance(rank: _Rank) -> bool:
    """Run a rank until it can go no further; False if it did not move."""
    moved = False
    for blocked in rank.steps:
        if blocked:
            return moved
        moved = True
    rank.done = True
    return True


def _execute(
    gm: fx.GraphModule,
    inputs: list[Tensor],
    index: int,
    rank: _Rank,
    ranks: list[_Rank],
    groups: Groups,
) -> Iterator[bool]:
    """One rank; yields False after every node, True while it is blocked in a wait."""
    env: dict[fx.Node, Any] = {}
    values = iter(inputs)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
        elif node.op == "output":
            rank.outputs = fx.map_arg(node.args[0], env.__getitem__)
        elif is_start(node):
            sent = fx.map_arg(node.args[0], env.__getitem__)
            is_list = isinstance(sent, list | tuple)
            posted = [_post(node, tensor, rank) for tensor in (sent if is_list else [sent])]
            env[node] = posted if is_list else posted[0]
        elif is_wait(node):
            posted = env[node.args[0]]
            while (result := _result(posted, index, ranks, groups)) is None:
                yield True
            env[node] = result
        else:
            env[node] = _call(node, env)
        yield False


def _call(node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    target: Callable[..., Any] = node.target  # pyright: ignore[reportAssignmentType]
    args = fx.map_arg(node.args, env.__getitem__)
    kwargs = fx.map_arg(node.kwargs, env.__getitem__)
    if any(isinstance(arg, _Posted) for arg in args):
        raise CollectiveError(f"{node.name} reads a collective's result before its wait")
    return target(*args, **kwargs)


def _post(node: fx.Node, value: Tensor, rank: _Rank) -> _Posted:
    given = arguments(node)
    group = str(given["group_name"])
    kind = collective_kind(node)
    rest = tuple(str(given.get(name, "")) for name in ("reduce_op", "output_split_sizes"))
    signature = (kind, value.numel(), value.dtype, *rest)
    posted = _Posted(node, signature, value, value.clone())
    rank.posted.setdefault(group, []).append(posted)
    return posted


def _result(posted: _Posted, index: int, ranks: list[_Rank], groups: Groups) -> Tensor | None:
    """What this rank gets, or None while a member has not started its part."""
    group = str(arguments(posted.node)["group_name"])
    members = next(ranks_ for ranks_ in groups[group] if index in ranks_)
    serial = ranks[index].posted[group].index(posted)
    parts: list[_Posted] = []
    for member in members:
        theirs = ranks[member].posted.get(group, [])
        if len(theirs) <= serial:
            return None
        parts.append(theirs[serial])
    signatures = {part.signature for part in parts}
    if len(signatures) > 1:
        raise CollectiveError(f"collective {serial} of {group} differs among ranks: {signatures}")
    if posted.waited:
        raise CollectiveError(f"{posted.node.name} is waited for twice")
    if not torch.equal(posted.value, posted.snapshot):
        raise CollectiveError(f"the input of {posted.node.name} was written while in flight")
    posted.waited = True
    return _combine(posted, [part.snapshot for part in parts], list(members).index(index))


def _combine(posted: _Posted, parts: list[Tensor], position: int) -> Tensor:
    kind = posted.signature[0]
    if kind == "all_gather":
        return torch.cat(parts)
    if kind == "all_to_all":
        return torch.cat([part.chunk(len(parts))[position] for part in parts])
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    if posted.signature[3] == "avg":
        total /= len(parts)
    if kind == "all_reduce":
        return total
    return total.chunk(len(parts))[position].clone()


def _check_waits(ranks: list[_Rank]) -> None:
    for index, rank in enumerate(ranks):
        for group, posted in rank.posted.items():
            missing = [item.node.name for item in posted if not item.waited]
            if missing:
                raise CollectiveError(f"rank {index}, {group}: no wait for {missing}")
