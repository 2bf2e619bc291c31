"""What Dynamo knows of the model beside the graph that it hands on.

A graph break cuts a model into graphs that are compiled one by one, each with the parameters it
uses. The frame that Dynamo traces still holds the modules whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, cast

import torch.fx as fx
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.distributed.tensor import DTensor

from inductor_overlap.passes.fx_ops import is_start
from inductor_overlap.passes.parameter_names import dynamo_parameters, plain_fqn, source_name


def model_parameters(graph: fx.Graph) -> frozenset[str]:
    """FQNs of all parameters of the modules behind a Dynamo graph, while Dynamo traces it.

    Those are the modules that its frame holds or reaches its parameters from. None outside a trace,
    or if another version of torch keeps them elsewhere.
    """
    try:
        output = cast("Any", InstructionTranslator.current_tx()).output
        scopes = {"L": dict(output.local_scope), "G": dict(output.global_scope)}
    except AttributeError:
        return frozenset()
    values: list[object] = list(scopes["L"].values())
    for source in map(source_name, graph.find_nodes(op="placeholder")):
        root = _ROOT.match(source)
        if root is not None:
            values.append(scopes[root[1]].get(root[2]))
    modules = {id(value): value for value in values if isinstance(value, nn.Module)}
    return frozenset(
        plain_fqn(name.split("."))
        for module in modules.values()
        for name, _ in module.named_parameters(remove_duplicate=False)
    )


_ROOT = re.compile(r"([LG])\['(\w+)'\]")


def is_sharded(graph: fx.Graph) -> bool:
    """True for a Dynamo graph with parameters, if one is a DTensor or anything is sent."""
    parameters = [node.meta.get("example_value") for node in dynamo_parameters(graph)]
    has_shards = any(isinstance(value, DTensor) for value in parameters)
    return bool(parameters) and (has_shards or any(map(is_start, _all_nodes(graph))))


def _all_nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of ``graph`` and of the graphs that it calls: checkpointed regions, say."""
    yield from graph.nodes
    owner = graph.owning_module
    for module in owner.modules() if owner is not None else ():
        if isinstance(module, fx.GraphModule) and module.graph is not graph:
            yield from module.graph.nodes
