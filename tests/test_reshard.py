"""Tags of the joint-graph pass on hand-built chains; `test_post_grad` reads what they did."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder, aten
from torch.utils.checkpoint import CheckpointPolicy

from inductor_overlap.passes.collectives import find_collectives
from inductor_overlap.passes.reshard import gather_chain, reshard_after_forward

pytestmark = pytest.mark.quick


def gathered_layer() -> tuple[fx.Graph, list[str]]:
    """cast, pad, gather, wait, unpad, transpose -> mm; returns the chain up to the mm."""
    b = GraphBuilder()
    shard = b.pad_rows(b.cast(b.parameter("w", 1, 8), torch.bfloat16), 2)
    weight = b.transpose(b.first_rows(b.gather(shard), 7))
    b.output(b.mm(b.input("x", 8, 8, dtype=torch.bfloat16), weight))
    return b.graph, [
        "convert_element_type_default",
        "constant_pad_nd_default",
        "all_gather_into_tensor_default",
        "wait_tensor_default",
        "slice_tensor",
        "permute_default",
    ]


def tagged(graph: fx.Graph) -> dict[str, CheckpointPolicy]:
    return {node.name: node.meta["recompute"] for node in graph.nodes if "recompute" in node.meta}


def test_the_chain_ends_before_the_first_kernel_with_several_inputs() -> None:
    graph, chain = gathered_layer()
    assert [node.name for node in gather_chain(find_collectives(graph)[0])] == chain


def test_the_chain_ends_before_a_unary_kernel_that_is_no_layout() -> None:
    b = GraphBuilder()
    weight = b.gather(b.parameter("w", 2, 8))
    b.output(b.call(aten.tanh.default, weight))
    names = [node.name for node in gather_chain(find_collectives(b.graph)[0])]
    assert names == ["all_gather_into_tensor_default", "wait_tensor_default"]


def test_resharding_recomputes_all_of_the_chain() -> None:
    graph, chain = gathered_layer()
    assert reshard_after_forward(graph, reshard=True) == 1
    assert tagged(graph) == dict.fromkeys(chain, CheckpointPolicy.MUST_RECOMPUTE)


def test_keeping_saves_the_last_stored_value() -> None:
    """The wait's result: unpad and transpose behind it are views."""
    graph, _ = gathered_layer()
    assert reshard_after_forward(graph, reshard=False) == 1
    assert tagged(graph) == {"wait_tensor_default": CheckpointPolicy.MUST_SAVE}


def test_keeping_saves_the_cast_behind_a_gather() -> None:
    b = GraphBuilder()
    weight = b.cast(b.gather(b.parameter("w", 2, 8)), torch.bfloat16)
    b.output(b.mm(b.input("x", 8, 8, dtype=torch.bfloat16), weight))
    reshard_after_forward(b.graph, reshard=False)
    assert list(tagged(b.graph)) == ["convert_element_type_default"]


def test_gathers_of_computed_values_are_not_tagged() -> None:
    b = GraphBuilder()
    x = b.input("x", 2, 8)
    b.output(b.gather(b.mm(x, b.input("y", 8, 8))))
    for reshard in (True, False):
        assert reshard_after_forward(b.graph, reshard=reshard) == 0
    assert tagged(b.graph) == {}
