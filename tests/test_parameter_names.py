"""Names of parameters, from Dynamo's sources to the nodes of the post-grad graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder, aten

from inductor_overlap.passes.fx_ops import is_start
from inductor_overlap.passes.parameter_names import (
    NAME,
    descriptor_fqn,
    fqn_of_source,
    module_path,
    parameter_fqn,
    parameter_position,
    stamp_collectives,
    stamp_parameter_names,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("source", "fqn"),
    [
        ("L['self']._modules['layers']._modules['0']._parameters['weight']", "layers.0.weight"),
        ("L['self']._parameters['scale']", "scale"),
        ("L['model'].layers._modules['3']._parameters['w']", "layers.3.w"),
        ("L['self'].__dict__['_modules']['norm']._parameters['weight']", "norm.weight"),
        ("L['self']._modules['a']._modules['_orig_mod']._parameters['w']", "a.w"),
        ("L['self']._modules['a'].parametrizations.w._parameters['original']", "a.w"),
        ("L['self']._modules['a'].parametrizations.w._parameters['original1']", "a.w.original1"),
        ("L['self']._modules['a']._buffers['mean']", None),
        ("L['self']._modules['a']._parameters['w'].device_mesh", None),
        ("L['x']", None),
        ("", None),
    ],
)
def test_fqn_of_source(source: str, fqn: str | None) -> None:
    assert fqn_of_source(source) == fqn


def test_stamps_follow_unary_chains_and_stop_where_values_meet() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    weights: list[fx.Node] = []
    for name in ("a", "b"):
        weight = graph.placeholder(name)
        source = SimpleNamespace(name=f"L['self']._modules['m']._parameters['{name}']")
        weight._dynamo_source = source  # pyright: ignore[reportAttributeAccessIssue]
        weights.append(weight)
    chain = graph.call_method("to", (weights[1], torch.bfloat16))
    further = graph.call_method("t", (chain,))
    product = graph.call_function(torch.mm, (x, further))
    graph.output(product)
    stamp_parameter_names(graph)
    assert parameter_fqn(chain) == parameter_fqn(further) == "m.b"
    assert parameter_fqn(product) is None
    assert parameter_fqn(weights[1]) is None  # placeholders carry no meta through AOTAutograd


def test_a_stamp_keeps_what_others_have_put_into_custom() -> None:
    graph = fx.Graph()
    weight = graph.placeholder("w")
    weight._dynamo_source = SimpleNamespace(name="L['self']._parameters['w']")  # pyright: ignore
    use = graph.call_method("t", (weight,))
    use.meta["custom"] = {"other": 1}
    stamp_parameter_names(graph)
    assert use.meta["custom"]["other"] == 1 and parameter_fqn(use) == "w"


def sourced(graph: fx.Graph, name: str) -> fx.Node:
    weight = graph.placeholder(name)
    weight._dynamo_source = SimpleNamespace(name=f"L['self']._parameters['{name}']")  # pyright: ignore
    return weight


def test_stamps_go_past_meshes_and_sizes() -> None:
    """As in ``DTensor.from_local(local, mesh)`` and ``weight.view(size, -1)``."""
    graph = fx.Graph()
    weight, mesh, size = sourced(graph, "w"), graph.placeholder("mesh"), graph.placeholder("s0")
    mesh.meta["example_value"] = object()
    size.meta["example_value"] = torch.SymInt(3)  # pyright: ignore[reportCallIssue]
    sharded = graph.call_function(torch.ops.aten.alias, (weight, mesh))
    viewed = graph.call_method("view", (sharded, size, -1))
    graph.output(viewed)
    stamp_parameter_names(graph)
    assert parameter_fqn(sharded) == parameter_fqn(viewed) == "w"


def test_stamps_go_into_checkpointed_regions() -> None:
    inner = fx.Graph()
    inner_weight, inner_x = inner.placeholder("a"), inner.placeholder("b")
    use = inner.call_method("t", (inner_weight,))
    inner.output(inner.call_function(torch.mm, (inner_x, use)))
    root = fx.GraphModule(torch.nn.Module(), fx.Graph())
    root.body = fx.GraphModule(torch.nn.Module(), inner)
    graph = fx.Graph(root)
    x, weight = graph.placeholder("x"), sourced(graph, "w")
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    region = graph.call_function(checkpoint, (graph.get_attr("body"), weight, x))
    graph.output(region)
    stamp_parameter_names(graph)
    (use,) = root.body.graph.find_nodes(op="call_method")
    assert parameter_fqn(use) == "w"


def joint_graph(b: GraphBuilder, gradient: fx.Node, weight: fx.Node) -> fx.Graph:
    """The graph with an output that is the gradient of ``weight``, described as by AOTAutograd."""
    weight.meta["desc"] = SimpleNamespace(base="input 3", attr="_local_tensor")
    of = SimpleNamespace(base=SimpleNamespace(grad_of="input 3"), attr="_local_tensor")
    graph = b.output(gradient).graph
    graph.output_node().meta["desc"] = [of]
    return graph


def test_gathers_and_reductions_are_told_name_and_position() -> None:
    """Of two reductions and their sum, too, as of a parameter that is read twice."""
    b = GraphBuilder()
    x = b.input("x", 8, 8)
    weight = b.input("w", 2, 8)
    view = b.call(aten.view.default, weight, [2, 8])
    view.meta["custom"] = {NAME: "m.w"}
    product = b.mm(x, b.gather(view))
    scattered = b.scatter_start(b.mm(product, x))
    reduced = b.reduce_start(b.wait(scattered))
    again = b.scatter_start(b.mm(product, product))
    total = b.call(aten.add.Tensor, b.wait(reduced), b.wait(again))
    graph = joint_graph(b, total, weight)
    stamp_collectives(graph)
    starts = [node for node in graph.nodes if is_start(node)]
    assert len(starts) == 4
    assert {(parameter_fqn(node), parameter_position(node)) for node in starts} == {("m.w", 1)}


def test_what_reduces_an_activation_is_not_told_a_parameter() -> None:
    """The gradient of ``x + position`` is that of ``position``, and is passed on; that of a bias
    is a sum over it."""
    for is_summed in (False, True):
        b = GraphBuilder()
        x, y, weight = (b.input(name, 8, 8) for name in "xyw")
        activation = b.all_reduce(b.mm(x, y))
        own = b.call(aten.sum.dim_IntList, activation, [0]) if is_summed else activation
        reduced = b.scatter(own)
        if not is_summed:
            b.mm(activation, x)
        graph = joint_graph(b, reduced, weight)
        stamp_collectives(graph)
        positions = [parameter_position(node) for node in graph.nodes if is_start(node)]
        assert positions == [None, 2]


def test_descriptor_fqn_looks_through_wrappers() -> None:
    b = GraphBuilder()
    node = b.input("x", 8, 8)
    assert descriptor_fqn(node) is None
    node.meta["desc"] = SimpleNamespace(base=SimpleNamespace(target="layers.0.w"))
    assert descriptor_fqn(node) == "layers.0.w"


def test_module_path_of_forward_and_backward_nodes() -> None:
    b = GraphBuilder()
    forward, backward, neither = (b.input(name, 1) for name in "abc")
    stack = {
        "1": ("L['self']", object),
        "2": ("L['self']._modules['layers']._modules['0']", object),
    }
    forward.meta["nn_module_stack"] = stack
    backward.meta["fwd_nn_module_stack"] = {"1": ("L['self']", object)}
    assert module_path(forward) == "layers.0"
    assert module_path(backward) == ""
    assert module_path(neither) is None
