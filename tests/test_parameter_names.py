"""Names of parameters, from Dynamo's sources to the nodes of the post-grad graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder

from inductor_overlap.passes.parameter_names import (
    descriptor_fqn,
    fqn_of_source,
    module_path,
    parameter_fqn,
    parameter_position,
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
    assert parameter_position(chain) == 1
    assert parameter_fqn(product) is None and parameter_position(product) is None
    assert parameter_fqn(weights[1]) is None  # placeholders carry no meta through AOTAutograd


def test_a_stamp_keeps_what_others_have_put_into_custom() -> None:
    graph = fx.Graph()
    weight = graph.placeholder("w")
    weight._dynamo_source = SimpleNamespace(name="L['self']._parameters['w']")  # pyright: ignore
    use = graph.call_method("t", (weight,))
    use.meta["custom"] = {"other": 1}
    stamp_parameter_names(graph)
    assert use.meta["custom"]["other"] == 1 and parameter_fqn(use) == "w"


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
