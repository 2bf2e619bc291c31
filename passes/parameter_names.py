"""Which parameter and which module a node serves.

Dynamo lifts parameters to anonymous graph inputs, and AOTAutograd renames those again, so by the
time of the post-grad graph a gather no longer knows its parameter. `stamp_parameter_names` runs on
the Dynamo graph (``pre_grad_custom_pass``), reads the source each input came from, and writes the
fully qualified name into ``meta["custom"]`` of the nodes that use the parameter alone. AOTAutograd
carries ``custom`` into the forward graph and, by sequence number, into the backward graph.

Names are relative to the module that was compiled. Where no stamp is found (graphs not traced by
Dynamo) the AOT input descriptor names the parameter, else ``nn_module_stack`` names the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch.fx as fx

STAMP = "inductor_overlap_parameter"

_STEP = re.compile(r"\.(\w+)|\['?([^'\]]+)'?\]")
_CONTAINERS = ("__dict__", "_modules", "_parameters", "_buffers")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "parametrizations")
"""Modules that ``torch.compile``, ``checkpoint_wrapper`` and ``torch.nn.utils.parametrize`` put
between a user's modules; names leave them out, as the state dicts of wrapped models do."""


def _steps(source_name: str) -> list[str]:
    """Attributes and subscripts in a Dynamo source, without the local variable it starts from."""
    return [attribute or key for attribute, key in _STEP.findall(source_name)][1:]


def fqn_of_source(source_name: str) -> str | None:
    """The parameter FQN in a Dynamo source such as ``L['self']._modules['a']._parameters['w']``.

    None when the source is not a parameter of a module.
    """
    steps = _steps(source_name)
    if "_parameters" not in steps[:-1]:
        return None
    if "parametrizations" in steps and steps[-1] == "original":
        steps = steps[:-1]
    return _joined(steps)


def _joined(steps: Iterable[str]) -> str:
    return ".".join(step for step in steps if step not in (*_CONTAINERS, *_WRAPPERS))


def stamp_parameter_names(graph: fx.Graph) -> None:
    """Write parameter FQNs into ``meta["custom"]`` of a Dynamo graph. Changes no node otherwise."""
    stamps: dict[fx.Node, tuple[str, int]] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            source = getattr(node, "_dynamo_source", None)
            name = fqn_of_source(str(getattr(source, "name", "")))
            stamp = (name, len(stamps)) if name is not None else None
        else:
            inputs = node.all_input_nodes
            stamp = stamps.get(inputs[0]) if len(inputs) == 1 else None
        if stamp is None:
            continue
        stamps[node] = stamp
        if node.op != "placeholder":
            node.meta["custom"] = {**_custom(node), STAMP: stamp}


def parameter_fqn(node: fx.Node) -> str | None:
    """FQN of the parameter that a gather or a gradient reduction serves, where it is known."""
    stamp = _custom(node).get(STAMP)
    return stamp[0] if stamp is not None else None


def parameter_position(node: fx.Node) -> int | None:
    """Rank of that parameter among the parameters of the traced graph, by first use."""
    stamp = _custom(node).get(STAMP)
    return stamp[1] if stamp is not None else None


def _custom(node: fx.Node) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", node.meta.get("custom") or {})


def descriptor_fqn(placeholder: fx.Node) -> str | None:
    """FQN in the AOT input descriptor of a placeholder (graphs exported with named parameters)."""
    desc = placeholder.meta.get("desc")
    while desc is not None:
        target = getattr(desc, "target", None)
        if isinstance(target, str):
            return target
        desc = getattr(desc, "base", None)
    return None


def module_path(node: fx.Node) -> str | None:
    """Dotted path of the module a node comes from, forward or backward, "" for the root."""
    stack = cast(
        "Mapping[str, tuple[str, Any]]",
        node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {},
    )
    if not stack:
        return None
    return _joined(_steps(list(stack.values())[-1][0]))
