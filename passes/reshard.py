"""The joint-graph pass: gather parameters again in backward, or keep them.

Runs where forward and backward are one graph, before the partitioner, which by default saves what
a gather returned for backward. Every parameter gather is a unary chain from a graph input (cast,
pad, all-gather, wait, unpad, views). To reshard after forward, the whole chain up to the first
node with several inputs is tagged for recomputation, so that nothing of it is saved; to keep it
gathered, its last stored value is tagged to be saved, also inside checkpointed regions.

Tags are those of selective activation checkpointing (``torch.utils.checkpoint.CheckpointPolicy``),
which both partitioners of ``torch/_functorch/partitioners.py`` obey.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_overlap.cost_model.fusion import is_view
from inductor_overlap.passes.collectives import Collective, find_collectives

_AC_GRAPH_ID = 1_000_000
"""Above every id a checkpointed region of the user gets, else the partitioner would take a chain
that feeds such a region for its input and save it (``cleanup_recompute_tags``)."""


def reshard_after_forward(
    graph: fx.Graph, *, reshard: bool, kept: Collection[str] = frozenset()
) -> int:
    """Tag every parameter gather of a joint ``graph``; returns how many were tagged.

    Args:
        graph: joint forward and backward graph; only tags change, and tags of an earlier call.
        reshard: True: gather again in backward; False: keep gathered from forward to backward.
        kept: graph inputs (parameters) to keep gathered all the same.
    """
    tagged = 0
    for collective in find_collectives(graph):
        parameter = gathered_parameter(collective)
        if parameter is None:
            continue
        tagged += 1
        chain = gather_chain(collective)
        if reshard and parameter not in kept:
            _recompute(chain)
        else:
            _save(chain)
    return tagged


def gathered_parameter(collective: Collective) -> str | None:
    """Name of the graph input that a free all-gather gathers; None for other collectives."""
    if collective.kind != "all_gather" or not collective.free:
        return None
    first = (*collective.shared_head, *collective.head, collective.start)[0]
    return first.all_input_nodes[0].name


def gather_chain(collective: Collective) -> list[fx.Node]:
    """All nodes from the parameter's input to the last before a node with several inputs."""
    chain = [*collective.shared_head, *collective.head, collective.start]
    pending = [*collective.waits]
    while pending:
        node = pending.pop(0)
        chain.append(node)
        pending += [
            user
            for user in node.users
            if user.op == "call_function" and user.all_input_nodes == [node] and not _leaves(user)
        ]
    return chain


def _leaves(node: fx.Node) -> bool:
    """A unary node that starts computing with the weight rather than reshaping it."""
    return not is_view(node) and not _restores_layout(node)


def _restores_layout(node: fx.Node) -> bool:
    name = str(getattr(node.target, "_opname", ""))
    return name in (
        "cat",
        "clone",
        "slice",
        "split",
        "split_with_sizes",
        "_to_copy",
        "contiguous",
    ) or (
        name in ("convert_element_type", "constant_pad_nd", "getitem", "reshape", "view", "narrow")
    )


def _recompute(chain: list[fx.Node]) -> None:
    for node in chain:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        node.meta["ac_graph_id"] = _AC_GRAPH_ID


def _save(chain: list[fx.Node]) -> None:
    for node in chain:
        if node.meta.get("ac_graph_id") == _AC_GRAPH_ID:
            del node.meta["recompute"], node.meta["ac_graph_id"]
    stored = [node for node in chain if not is_view(node)]
    stored[-1].meta["recompute"] = CheckpointPolicy.MUST_SAVE
