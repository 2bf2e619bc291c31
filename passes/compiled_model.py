"""What Dynamo knows of the model beside the graph that it hands on.

A graph break cuts a model into graphs that are compiled one by one, each with the parameters it
uses. The frame that Dynamo traces still holds the modules whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch.fx as fx
from torch import nn
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch.distributed.tensor import DTensor

from inductor_overlap.passes.fx_ops import is_start
from inductor_overlap.passes.parameter_names import dynamo_parameters, plain_fqn


def frame_parameters() -> frozenset[str]:
    """FQNs of all parameters of the modules in the frame that Dynamo traces; of none outside it."""
    try:
        tracer = InstructionTranslator.current_tx()
    except AttributeError:  # nothing is being traced
        return frozenset()
    scope = cast("Mapping[str, object]", tracer.output.local_scope)
    modules = [value for value in scope.values() if isinstance(value, nn.Module)]
    return frozenset(
        plain_fqn(name.split("."))
        for module in modules
        for name, _ in module.named_parameters(remove_duplicate=False)
    )


def is_sharded(graph: fx.Graph) -> bool:
    """True for a Dynamo graph with parameters, if one is a DTensor or anything is sent."""
    parameters = [node.meta.get("example_value") for node in dynamo_parameters(graph)]
    has_shards = any(isinstance(value, DTensor) for value in parameters)
    return bool(parameters) and (has_shards or any(map(is_start, graph.nodes)))
