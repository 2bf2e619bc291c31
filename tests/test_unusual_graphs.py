"""Graphs that are legal but unusual: other spellings of a collective, subgraphs, taken names."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.fx as fx
from support.graphs import (
    GraphBuilder,
    TestPrices,
    aten,
    c10d,
    fingerprint,
    order,
    scale_,
)
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import inductor_overlap as io
from inductor_overlap.optimize import device_type
from inductor_overlap.passes.bucketing import merge_bucket
from inductor_overlap.passes.collectives import find_collectives
from inductor_overlap.passes.fx_ops import is_barrier

pytestmark = pytest.mark.quick

LATENCY = TestPrices(latency_us=100.0, matmul_us=1000.0)


def layers_gathered_by(b: GraphBuilder, **fields: Any) -> fx.GraphModule:
    """Three weights gathered on demand; ``fields`` are given to the gathers by name."""
    x = b.input("x", 8, 8)
    for index in range(3):
        shard = b.parameter(f"layers.{index}.weight", 2, 8)
        start = b.call(c10d.all_gather_into_tensor.default, input=shard, **fields)
        x = b.mm(x, b.wait(start))
    return b.output(x)


def test_collectives_by_keyword_are_recognised_and_merged() -> None:
    gm = layers_gathered_by(GraphBuilder(), group_name="pg0", group_size=4)
    assert all(c.free and c.size_bytes == 256 for c in find_collectives(gm.graph))
    report = io.optimize(gm, wrap=[["layers.*"]], cost_model=LATENCY, memory_limit_gb=1.0)
    gm.graph.lint()
    assert (report.num_collectives_before, report.num_collectives_after) == (3, 1)
    start = next(node for node in gm.graph.nodes if node.name == "all_gather_bucket_0")
    assert start.args == ()
    assert start.kwargs["input"].name == "cat_default"


def test_coalesced_buckets_of_collectives_by_keyword_are_called_by_keyword() -> None:
    gm = layers_gathered_by(GraphBuilder(), group_name="pg0", group_size=4)
    merged = merge_bucket("b", find_collectives(gm.graph), form="coalesced")
    assert merged.start.args == ()
    assert merged.start.kwargs.keys() == {"inputs", "group_name", "group_size"}


def test_a_scatter_by_keyword_has_the_size_of_its_input() -> None:
    b = GraphBuilder()
    fields = {"group_name": "pg0", "group_size": 4, "reduce_op": "sum"}
    grad = b.mm(b.input("tangents_1", 8, 8), b.input("x", 8, 8))
    start = b.call(c10d.reduce_scatter_tensor.default, **fields, input=grad)
    gm = b.output(b.wait(start))
    (scatter,) = find_collectives(gm.graph)
    assert (scatter.size_bytes, scatter.output_bytes, scatter.free) == (256, 64, True)


def test_a_coalesced_collective_is_as_large_as_all_its_tensors() -> None:
    b = GraphBuilder()
    shards = [b.input("a", 2, 8), b.input("b", 4, 8)]
    start = b.call(c10d.all_gather_into_tensor_coalesced.default, shards, 4, "pg0")
    gm = b.output(*(b.wait(b.call(operator.getitem, start, i)) for i in range(2)))
    (gather,) = find_collectives(gm.graph)
    assert not gather.free
    assert (gather.input_bytes, gather.size_bytes) == (64 + 128, 4 * (64 + 128))


class Group:
    """Stands for a process group that is a value of the graph (``compile_on_one_rank``)."""

    def __init__(self, group_name: str) -> None:
        self.group_name = group_name


def test_reductions_over_groups_that_are_nodes_form_a_chain() -> None:
    b = GraphBuilder()
    groups = [b.graph.placeholder(name) for name in ("shard_group", "replica_group")]
    for node, name in zip(groups, ("pg0", "pg1"), strict=True):
        node.meta["val"] = Group(name)
    scatter = b.scatter_start(b.input("tangents_1", 8, 8))
    reduction = b.reduce_start(b.wait(scatter), "pg1")
    gm = b.output(b.wait(reduction))
    scatter.args = (*scatter.args[:-1], groups[0])
    reduction.args = (*reduction.args[:-1], groups[1])
    first, second = find_collectives(gm.graph)
    assert (first.group_name, second.group_name) == ("pg0", "pg1")
    assert second.follows == first.name


def subgraph_that_reduces() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    start = graph.call_function(c10d.all_reduce.default, (x, "sum", "pg0"))
    graph.output(graph.call_function(c10d.wait_tensor.default, (start,)))
    return fx.GraphModule(nn.Module(), graph)


@pytest.mark.parametrize("place", ["nested", "list", "keyword"])
def test_a_subgraph_that_communicates_is_a_barrier_wherever_it_is_named(place: str) -> None:
    root = nn.Module()
    root.branches = nn.Module()
    root.branches.body = subgraph_that_reduces()
    graph = fx.Graph()
    x = graph.placeholder("x")
    body = graph.get_attr("branches.body")
    operator_ = torch.ops.higher_order.invoke_subgraph
    args, kwargs = {
        "nested": ((body, "name", x), {}),
        "list": (([body], x), {}),
        "keyword": ((x,), {"body": body}),
    }[place]
    call = graph.call_function(operator_, args, kwargs)
    graph.output(call)
    fx.GraphModule(root, graph)
    assert is_barrier(call)


def test_subgraphs_and_calls_without_a_result_need_no_shapes() -> None:
    root = nn.Module()
    root.body = fx.GraphModule(nn.Module(), fx.Graph())
    b = GraphBuilder()
    x = b.mm(b.input("x", 8, 8), b.input("y", 8, 8))
    body = b.graph.get_attr("body")
    write = b.call(scale_, x)
    del write.meta["val"]
    result = b.graph.call_function(torch.ops.higher_order.invoke_subgraph, (body, "name", x))
    result.meta["val"] = x.meta["val"]
    b.graph.output((result,))
    gm = fx.GraphModule(root, b.graph)
    assert io.optimize(gm).num_collectives_before == 0
    assert io.simulate(gm).step_us > 0


def test_an_input_without_a_shape_is_refused_and_example_inputs_are_checked() -> None:
    gm = layers_gathered_by(GraphBuilder(), group_name="pg0", group_size=4)
    inputs = [torch.zeros(n.meta["val"].shape) for n in gm.graph.nodes if n.op == "placeholder"]
    for node in gm.graph.nodes:
        node.meta.clear()
    with pytest.raises(ValueError, match=r"no shapes: .* pass example_inputs="):
        io.optimize(gm)
    with pytest.raises(ValueError, match=r"has 1 values, the graph 4 inputs \(x, "):
        io.optimize(gm, example_inputs=inputs[:1])
    with pytest.raises(ValueError, match="does not run on example_inputs"):
        io.optimize(gm, example_inputs=[torch.zeros(3, 5)] * 4)
    assert io.optimize(gm, example_inputs=inputs).num_collectives_before == 3


def gathers_beside(b: GraphBuilder, name: str) -> fx.GraphModule:
    """Three gathers, then a matmul called ``name``."""
    weights = [b.gather(b.parameter(f"layers.{i}.weight", 2, 8)) for i in range(3)]
    x = b.input("x", 8, 8)
    x = b.call(aten.mm.default, x, x, name=name)
    for weight in weights:
        x = b.mm(x, weight)
    return b.output(x)


def test_a_bucket_takes_no_name_of_the_graph() -> None:
    gm = gathers_beside(GraphBuilder(), "all_gather_bucket_0")
    options: dict[str, Any] = {"wrap": [["layers.*"]], "cost_model": LATENCY}
    report = io.optimize(gm, **options, memory_limit_gb=1.0)
    gm.graph.lint()
    assert [bucket.name for bucket in report.plan.buckets] == ["all_gather_bucket_0_1"]
    assert order(gm.graph).index("all_gather_bucket_0_1") < order(gm.graph).index("mm_default")
    once = fingerprint(gm.graph)
    io.optimize(gm, **options, memory_limit_gb=1.0)
    assert fingerprint(gm.graph) == once


def test_an_input_called_like_a_bucket_does_not_make_it_planned_twice() -> None:
    b = GraphBuilder()
    x = b.input("all_gather_bucket_0", 8, 8)
    for index in range(3):
        x = b.mm(x, b.gather(b.parameter(f"layers.{index}.weight", 2, 8)))
    gm = b.output(x)
    options: dict[str, Any] = {"wrap": [["layers.*"]], "cost_model": LATENCY}
    assert io.optimize(gm, **options, memory_limit_gb=1.0).num_collectives_after == 1
    once = fingerprint(gm.graph)
    io.optimize(gm, **options, memory_limit_gb=1.0)
    assert fingerprint(gm.graph) == once


def test_the_device_is_that_of_the_accelerator_not_of_a_cpu_scalar() -> None:
    graph = fx.Graph()
    scalar, tensor = graph.placeholder("scalar"), graph.placeholder("tensor")
    graph.output(tensor)
    with FakeTensorMode():
        scalar.meta["val"] = torch.empty((), device="cpu")
        tensor.meta["val"] = torch.empty(8, device="cuda")
    assert device_type(graph) == "cuda"


def test_a_graph_in_which_nothing_can_move_is_warned_of_above_the_limit() -> None:
    b = GraphBuilder()
    x = b.input("x", 8, 8)
    gm = b.output(b.mm(b.all_reduce(x), x))
    report = io.optimize(gm, cost_model=LATENCY, memory_limit_gb=1e-9)
    assert report.warnings == (
        "the graph peaks at 512 bytes, the limit is 1, and none of its collectives is free to move",
    )


def test_a_planned_graph_above_a_smaller_limit_is_an_error() -> None:
    gm = layers_gathered_by(GraphBuilder(), group_name="pg0", group_size=4)
    io.optimize(gm, cost_model=LATENCY, memory_limit_gb=1.0)
    with pytest.raises(ValueError, match="planned already"):
        io.optimize(gm, cost_model=LATENCY, memory_limit_gb=1e-9)
