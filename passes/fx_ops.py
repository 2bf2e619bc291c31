"""What an FX node calls, as far as moving collectives is concerned.

Functional collectives (``_c10d_functional``), their waits, ops that may communicate without being
one (*barriers*), and ops that write their inputs. Facts come from op schemas; an op that says
nothing about itself is taken for compute.
"""

# torch declares its operator classes and their schemas in private modules only.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.fx as fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_aggregate

_COLLECTIVES = "_c10d_functional"
_KINDS = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
_FORMS = ("_coalesced_", "_coalesced", "_out", "_")
"""Endings of the other forms of a collective: several tensors at once, in place, into a buffer."""
_COMPUTE = frozenset({"aten", "prims", "inductor", "inductor_prims", "quantized", "rngprims"})
_GROUP_ARGUMENTS = frozenset({"group_name", "group", "process_group", "pg", "comm", "communicator"})
_COMMUNICATION_WORDS = re.compile(
    r"(^|_)(all_?(gather|reduce|to_?all)\w*|reduce_?scatter\w*|broadcast|i?send|i?recv|p2p|a2a"
    r"|barrier|dispatch|combine|comm)(_|$)"
)


def overload(node: fx.Node) -> OpOverload[..., Any] | None:
    """The op that ``node`` calls, if it is one with a schema."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return None
    return cast("OpOverload[..., Any]", target)


def op_base_name(node: fx.Node) -> str:
    """Name of the op without namespace and overload; of the function for other calls."""
    op = overload(node)
    return op._opname if op is not None else str(getattr(node.target, "__name__", node.target))


def is_start(node: fx.Node) -> bool:
    """True for every functional collective, coalesced and in-place forms included."""
    op = overload(node)
    return op is not None and op.namespace == _COLLECTIVES and not is_wait(node)


_WAIT = torch.ops._c10d_functional.wait_tensor.default


def is_wait(node: fx.Node) -> bool:
    return node.target is _WAIT


def is_plain_form(start: fx.Node) -> bool:
    """True if a collective is out of place and of one tensor."""
    return op_base_name(start) in _KINDS


def is_coalesced_form(start: fx.Node) -> bool:
    """True if a collective is out of place and of several tensors at once."""
    name = op_base_name(start)
    return name.endswith("_coalesced") and name.removesuffix("_coalesced") in _KINDS


def collective_kind(start: fx.Node) -> str:
    """``all_gather``, ``reduce_scatter``, ...; the op's own name for a kind without a name here."""
    name = op_base_name(start)
    ending = next((form for form in _FORMS if name.removesuffix(form) in _KINDS), "")
    return _KINDS.get(name.removesuffix(ending), name)


def arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by the names of its op's schema."""
    op = overload(node)
    names = [argument.name for argument in op._schema.arguments] if op is not None else []
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def payload(start: fx.Node) -> list[fx.Node]:
    """The nodes whose tensors a collective sends, given by position or by name.

    They are the first argument of its schema: one tensor, or a list in the coalesced forms.
    """
    if overload(start) is None:
        return []
    value = arguments(start).get(payload_name(start.target))
    values = cast("Sequence[object]", value if isinstance(value, (list, tuple)) else (value,))
    return [item for item in values if isinstance(item, fx.Node)]


def payload_name(collective: Any) -> str:
    """Name of the argument of an op that a collective sends: "input", "inputs"."""
    return collective._schema.arguments[0].name


def is_barrier(node: fx.Node) -> bool:
    """True for an op that may communicate but is no functional collective of a known kind.

    Custom ops count when their schema takes a group or their name says that they communicate;
    effectful ops (``with_effects``) always do, since what they do is unknown. Other higher-order
    ops count when they call such an op, or one of the graphs they run holds any collective.
    """
    if is_start(node):
        return collective_kind(node) not in _KINDS.values()
    op = overload(node)
    if op is None:
        return op_base_name(node) == "with_effects" or any(map(_communicates, _called(node)))
    return not is_wait(node) and _may_communicate(op)


def _called(node: fx.Node) -> list[object]:
    """Ops and graphs among the arguments of a call, in lists too: what a higher-order op runs."""
    called: list[object] = []

    def look_up(value: object) -> None:
        is_attribute = isinstance(value, fx.Node) and value.op == "get_attr"
        called.append(fetched(cast("fx.Node", value)) if is_attribute else value)

    map_aggregate(cast("Any", (node.args, node.kwargs)), look_up)
    return called


def fetched(node: fx.Node) -> object:
    """What a ``get_attr`` node fetches; None if the graph's module lacks it."""
    value: object = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    return value


def _communicates(called: object) -> bool:
    if isinstance(called, fx.GraphModule):
        return any(is_start(node) or is_barrier(node) for node in called.graph.nodes)
    if not isinstance(called, OpOverload):
        return False
    return _may_communicate(cast("OpOverload[..., Any]", called))


@cache
def _may_communicate(op: OpOverload[..., Any]) -> bool:
    if op.namespace in _COMPUTE:
        return False
    takes_group = any(argument.name in _GROUP_ARGUMENTS for argument in op._schema.arguments)
    return takes_group or _COMMUNICATION_WORDS.search(op._opname) is not None


def is_pure_compute(node: fx.Node) -> bool:
    """True for a known compute op that writes nothing but its result."""
    op = overload(node)
    return op is not None and op.namespace in _COMPUTE and not _is_mutable(op)


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory ``node`` may write: by its schema, or all it reads if it has none."""
    op = overload(node)
    if op is None:
        is_opaque = isinstance(node.target, HigherOrderOperator)
        return list(node.all_input_nodes) if is_opaque else []
    if not _is_mutable(op):
        return []
    given = arguments(node)
    written: list[fx.Node] = []
    for argument in op._schema.arguments:
        value = given.get(argument.name)
        values = cast("Sequence[object]", value if isinstance(value, (list, tuple)) else (value,))
        if argument.is_write:
            written += [item for item in values if isinstance(item, fx.Node)]
    return written


@cache
def _is_mutable(op: OpOverload[..., Any]) -> bool:
    return op._schema.is_mutable


def returns_alias(node: fx.Node) -> bool:
    """True if the schema says that the first result shares memory with an input."""
    op = overload(node)
    return op is not None and _aliases_input(op)


@cache
def _aliases_input(op: OpOverload[..., Any]) -> bool:
    returns = op._schema.returns
    return bool(returns) and returns[0].alias_info is not None
