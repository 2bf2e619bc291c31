"""Which parameter and which module a collective serves.

Dynamo lifts parameters to anonymous graph inputs, and AOTAutograd renames those again, so by the
time of the post-grad graph a collective no longer knows its parameter. Two passes carry it over.

`stamp_parameter_names` runs on the Dynamo graph (``pre_grad_custom_pass``): it reads the source
each input came from, and writes the parameter's fully qualified name into ``meta["custom"]`` of the
nodes that use it alone, which AOTAutograd hands on to the nodes it traces for them.

`stamp_collectives` runs on AOTAutograd's graph (``joint_custom_pre_pass``), where the input, its
gradient and all that is between are one graph. It writes name and payload position of each input
to the collectives that gather it, and to those that reduce its gradient. Reductions need it: an
all-reduce has no node of the forward from which it could inherit a name. It comes before Inductor
removes what does nothing, such as the view that is all a replicated parameter leaves in the graph.

Names are relative to the module that was compiled. Where no stamp is found (graphs not traced by
Dynamo) the AOT input descriptor names the parameter, else ``nn_module_stack`` names the module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

from inductor_overlap.passes.fx_ops import (
    fetched,
    is_pure_compute,
    is_start,
    is_wait,
    op_base_name,
    overload,
)

NAME = "inductor_overlap_parameter"
POSITION = "inductor_overlap_position"
_BY_DYNAMO = "inductor_overlap_by_dynamo"

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

    None when the source is not a parameter of a module, but something of one (its device mesh).
    """
    steps = _steps(source_name)
    if steps[-2:-1] != ["_parameters"]:
        return None
    return plain_fqn(steps)


def plain_fqn(steps: Sequence[str]) -> str:
    """FQN of a parameter as the user knows it: without wrappers and what parametrising adds."""
    if "parametrizations" in steps and steps[-1] == "original":
        steps = steps[:-1]
    return _joined(steps)


def _joined(steps: Iterable[str]) -> str:
    return ".".join(step for step in steps if step not in (*_CONTAINERS, *_WRAPPERS))


def stamp_parameter_names(graph: fx.Graph) -> None:
    """Write parameter FQNs into ``meta["custom"]`` of a Dynamo graph. Changes no node otherwise."""
    _stamp_users(graph, dynamo_parameters(graph))


def dynamo_parameters(graph: fx.Graph) -> dict[fx.Node, str]:
    """The inputs of a Dynamo graph that are parameters, and their FQNs."""
    inputs = ((node, _source_fqn(node)) for node in graph.find_nodes(op="placeholder"))
    return {node: name for node, name in inputs if name is not None}


def source_name(placeholder: fx.Node) -> str:
    """Where Dynamo found an input, such as ``L['self']._modules['a']``; "" if it does not say."""
    return str(getattr(getattr(placeholder, "_dynamo_source", None), "name", ""))


def _source_fqn(placeholder: fx.Node) -> str | None:
    return fqn_of_source(source_name(placeholder))


def _stamp_users(graph: fx.Graph, named: dict[fx.Node, str]) -> None:
    """Stamp what follows the ``named`` inputs of ``graph``, in checkpointed regions too."""
    for node in graph.nodes:
        if node.target is _CHECKPOINT:
            _stamp_region(node, named)
        inputs = _tensor_inputs(node)
        name = named.get(inputs[0]) if len(inputs) == 1 else None
        if name is not None and node.op != "output":
            named[node] = name
            _write(node, NAME, name)


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint


def _stamp_region(call: fx.Node, named: Mapping[fx.Node, str]) -> None:
    """Stamp the graph that ``call`` runs: its first argument, with the others as its inputs."""
    region, *given = call.args
    body = fetched(region) if isinstance(region, fx.Node) else None
    if not isinstance(body, fx.GraphModule):
        return
    inputs = body.graph.find_nodes(op="placeholder")
    pairs = zip(inputs, given, strict=False)
    _stamp_users(
        body.graph,
        {
            inner: named[outer]
            for inner, outer in pairs
            if isinstance(outer, fx.Node) and outer in named
        },
    )


def stamp_collectives(graph: fx.Graph) -> None:
    """Write names and positions into ``meta["custom"]`` of the collectives of AOTAutograd's graph.

    Args:
        graph: joint forward and backward graph, or that of an inference; without input
            descriptors, only its gathers are found.
    """
    gradients = _gradients(graph)
    for position, placeholder in enumerate(graph.find_nodes(op="placeholder")):
        origin = _origin(placeholder.meta.get("desc"))
        if _is_tangent(origin[0]):
            continue  # what uses it alone may be a gradient's
        used = list(_unary_users(placeholder))
        names = [name for node in used if (name := parameter_fqn(node)) is not None]
        name = names[0] if names else descriptor_fqn(placeholder)
        told = {POSITION: position, NAME: name, _BY_DYNAMO: bool(names)}
        _tell(used, told)
        if origin in gradients:
            _tell(_finishing(gradients[origin]), told)


def _tell(nodes: Iterable[fx.Node], told: Mapping[str, object]) -> None:
    """Write what is known of a parameter to the collectives among ``nodes``."""
    for node in nodes:
        if is_start(node):
            for key, value in told.items():
                if value is not None:
                    _write(node, key, value)


def _gradients(graph: fx.Graph) -> dict[object, fx.Node]:
    """Origin of each input that has a gradient -> the output that is it."""
    output = graph.output_node()
    results = cast("list[object]", tree_leaves(output.args[0]))
    found: dict[object, fx.Node] = {}
    for result, desc in zip(results, output.meta.get("desc") or (), strict=False):
        gradient, attributes = _origin(desc)
        of = getattr(gradient, "grad_of", None)
        if of is not None and isinstance(result, fx.Node):
            found[of, attributes] = result
    return found


def _origin(desc: object) -> tuple[object, tuple[str, ...]]:
    """What an AOT descriptor is a part of, and which part: attributes of tensor subclasses."""
    attributes: list[str] = []
    while (base := getattr(desc, "base", None)) is not None:
        attributes.append(str(getattr(desc, "attr", "")))
        desc = base
    return desc, tuple(attributes)


def _is_tangent(desc: object) -> bool:
    return hasattr(desc, "output")


def _unary_users(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that use ``node`` alone, and nodes that use those alone."""
    pending = [node]
    while pending:
        for user in pending.pop().users:
            if user.op != "output" and len(_tensor_inputs(user)) == 1:
                yield user
                pending.append(user)


def _finishing(gradient: fx.Node) -> Iterator[fx.Node]:
    """Nodes that finish a gradient, from the last to the first that nothing else uses.

    They end where the gradient itself is computed. What else uses belongs to others too: the
    gradient of an activation, say, that is passed on and of which the parameter's is a view.
    """
    found: set[fx.Node] = set()
    pending = [gradient]
    while pending:
        node = pending.pop()
        is_own = all(user in found or user.op == "output" for user in node.users)
        if node not in found and is_own and _may_finish_gradient(node):
            found.add(node)
            yield node
            pending += _tensor_inputs(node)


def _may_finish_gradient(node: fx.Node) -> bool:
    """Collectives, and compute that keeps the elements: casts, padding, sums of two gradients."""
    if is_start(node) or is_wait(node) or op_base_name(node) == "getitem":
        return True
    op = overload(node)
    if op is None or torch.Tag.reduction in op.tags or not is_pure_compute(node):
        return False
    return len(_tensor_inputs(node)) == 1 or op_base_name(node) in ("add", "cat")


def _tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Inputs without those known to be no tensor: device meshes, symbolic sizes."""
    return [source for source in node.all_input_nodes if _may_be_tensor(source)]


def _may_be_tensor(node: fx.Node) -> bool:
    value: object = node.meta.get("val", node.meta.get("example_value"))
    return value is None or isinstance(value, torch.Tensor | list | tuple)


def parameter_fqn(node: fx.Node) -> str | None:
    """FQN of the parameter that a gather or a gradient reduction serves, where it is known."""
    return _custom(node).get(NAME)


def is_named_by_dynamo(node: fx.Node) -> bool:
    """Whether that name is of the module that Dynamo traced, not of an exported graph's inputs."""
    return bool(_custom(node).get(_BY_DYNAMO))


def parameter_position(node: fx.Node) -> int | None:
    """Place of that parameter among the inputs of the traced graph, which is that of first uses."""
    return _custom(node).get(POSITION)


def _write(node: fx.Node, key: str, value: object) -> None:
    # A dict of its own: AOTAutograd lets nodes share one.
    node.meta["custom"] = {**_custom(node), key: value}


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
