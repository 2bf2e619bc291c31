"""Which allocation each node of an FX graph reads and writes.

Views share the buffer of what they view, by storage and not by op name: ``reshape`` of a strided
slice is a copy. A pointwise node that Inductor fuses into its readers (*virtual*) has no buffer:
reading it is reading its inputs. Graph inputs that outlive the graph (parameters, user inputs) are
no buffers; saved activations and tangents of a backward graph are, because a compiled call frees
them after their last use.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.fx as fx

from inductor_overlap.cost_model.fusion import is_virtual
from inductor_overlap.cost_model.schedule import Buffer
from inductor_overlap.cost_model.sizes import shape_hint, size_hint, tensor_bytes
from inductor_overlap.passes.fx_ops import is_wait, op_base_name, returns_alias

_RESHAPES = (torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default)


def is_alias(node: fx.Node) -> bool:
    """True if ``node`` returns memory of its first tensor input: views, waits, list items."""
    if node.op != "call_function":
        return False
    if node.target in _RESHAPES:
        return _reshapes_without_copy(node)
    return is_wait(node) or op_base_name(node) == "getitem" or returns_alias(node)


def viewed(node: fx.Node) -> fx.Node:
    """The node whose memory ``node`` shows: itself if it is no view."""
    while is_alias(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _reshapes_without_copy(node: fx.Node) -> bool:
    source, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(source, torch.Tensor) or not isinstance(result, torch.Tensor):
        return True
    if source.is_contiguous():
        return True
    stride = tuple(_hint_strides(source))
    try:
        probe = torch.empty_strided(shape_hint(source), stride, device="meta")
        probe.view(shape_hint(result))
    except RuntimeError:
        return False
    return True


def _hint_strides(tensor: torch.Tensor) -> Iterable[int]:
    return (size_hint(stride) for stride in tensor.stride())


def is_backward(graph: fx.Graph) -> bool:
    """True for a backward graph of AOTAutograd: it has tangents among its inputs."""
    return any(
        node.op == "placeholder" and str(node.target).startswith("tangents_")
        for node in graph.nodes
    )


class Storages:
    """Buffers of a graph, collected node by node in graph order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.buffers: dict[str, Buffer] = {}
        self._of: dict[fx.Node, tuple[str, ...]] = {}
        self._parts: dict[fx.Node, tuple[tuple[str, ...], ...]] = {}
        self._frees_inputs = is_backward(graph)

    def of(self, node: fx.Node) -> tuple[str, ...]:
        """Names of the buffers that reading ``node`` reads."""
        return self._of.get(node, ())

    def read_by(self, node: fx.Node) -> tuple[str, ...]:
        """Names of the buffers that ``node`` reads, without repetition."""
        return tuple(dict.fromkeys(name for arg in node.all_input_nodes for name in self.of(arg)))

    def add_input(self, node: fx.Node) -> None:
        dies_here = self._frees_inputs and not str(node.target).startswith("primals_")
        value = node.meta.get("val")
        if dies_here and isinstance(value, torch.Tensor):
            self.buffers[node.name] = Buffer(node.name, tensor_bytes(value), is_input=True)
            self._of[node] = (node.name,)

    def add(self, node: fx.Node) -> tuple[str, ...]:
        """Record what ``node`` allocates; returns the names of the buffers it writes."""
        if op_base_name(node) == "getitem":
            self._of[node] = self._element(node)
            return ()
        if is_alias(node):
            source = node.all_input_nodes[0] if node.all_input_nodes else node
            self._of[node] = self.of(source)
            self._parts[node] = tuple((self.of(source),) * _num_outputs(node))
            return ()
        if is_virtual(node):
            self._of[node] = self.read_by(node)
            return ()
        return self._allocate(node)

    def add_chain(self, name: str, nodes: Iterable[fx.Node], size_bytes: int) -> tuple[str, ...]:
        """Record a chain as one buffer of ``size_bytes``; as a view of its input if that is 0."""
        links = list(nodes)
        if size_bytes > 0:
            self.buffers[name] = Buffer(name, size_bytes)
        for node in links:
            self._of[node] = (name,) if size_bytes > 0 else self.read_by(node)
        return (name,) if size_bytes > 0 else ()

    def mark_outputs(self, output: fx.Node) -> None:
        for name in self.read_by(output):
            buffer = self.buffers[name]
            self.buffers[name] = Buffer(name, buffer.size_bytes, buffer.is_input, is_output=True)

    def _element(self, node: fx.Node) -> tuple[str, ...]:
        source, index = node.args[0], node.args[1]
        parts = self._parts.get(cast("fx.Node", source))
        if parts is None or not isinstance(index, int) or index >= len(parts):
            return self.of(cast("fx.Node", source))
        return parts[index]

    def _allocate(self, node: fx.Node) -> tuple[str, ...]:
        values = _outputs(node)
        names: list[tuple[str, ...]] = []
        for index, value in enumerate(values):
            if not isinstance(value, torch.Tensor) or tensor_bytes(value) == 0:
                names.append(())
                continue
            name = node.name if len(values) == 1 else f"{node.name}.{index}"
            self.buffers[name] = Buffer(name, tensor_bytes(value))
            names.append((name,))
        self._parts[node] = tuple(names)
        self._of[node] = tuple(name for part in names for name in part)
        return self._of[node]


def _outputs(node: fx.Node) -> tuple[Any, ...]:
    value = node.meta.get("val")
    return tuple(cast("Iterable[Any]", value)) if isinstance(value, (tuple, list)) else (value,)


def _num_outputs(node: fx.Node) -> int:
    return len(_outputs(node))
