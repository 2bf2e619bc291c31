"""Hand-built post-grad FX graphs, with shapes, and prices that are easy to add up in one's head."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from inductor_overlap.cost_model.fusion import OpKind, is_virtual, node_bytes, op_kind
from inductor_overlap.cost_model.schedule import Machine
from inductor_overlap.cost_model.sizes import numel_hint
from inductor_overlap.passes.fx_ops import op_base_name, overload
from inductor_overlap.passes.parameter_names import NAME, POSITION
from inductor_overlap.passes.post_grad import Outcome

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

# A communication op that no one has told the plugin about: it returns its input.
torch.library.define("overlap_tests::peer_send", "(Tensor x, str group_name) -> Tensor")
torch.library.impl("overlap_tests::peer_send", "CompositeExplicitAutograd")(
    lambda x, group_name: x.clone()
)
# A compute op that writes its input.
torch.library.define("overlap_tests::scale_", "(Tensor(a!) x) -> ()")


def _scale(x: torch.Tensor) -> None:
    x.mul_(2)


torch.library.impl("overlap_tests::scale_", "CompositeExplicitAutograd")(_scale)
peer_send = torch.ops.overlap_tests.peer_send.default
scale_ = torch.ops.overlap_tests.scale_.default


@dataclass
class TestPrices:
    """Prices by the dozen: a matmul costs ``matmul_us``, a stored pointwise op ``pointwise_us``.

    A collective costs ``latency_us`` and its nccl-tests size at ``bytes_per_us``; copies, cat and
    clone among them, are free unless ``copy_bytes_per_us`` is given. A grouped launch costs
    ``member_us`` for each collective but the first, by default another latency. Every other kernel
    costs as much as a matmul.
    """

    __test__ = False

    matmul_us: float = 10.0
    pointwise_us: float = 1.0
    latency_us: float = 2.0
    bytes_per_us: float = 64.0
    copy_bytes_per_us: float = float("inf")
    member_us: float | None = None
    shared_link: bool = False
    by_name: Mapping[str, float] = field(default_factory=dict[str, float])
    fallbacks: Counter[str] = field(default_factory=Counter[str])

    def compute_us(self, node: fx.Node) -> float:
        if node.name in self.by_name:
            return self.by_name[node.name]
        kind = op_kind(node)
        if kind is OpKind.FREE or is_virtual(node):
            return 0.0
        if op_base_name(node) in ("cat", "clone"):
            return self.copy_us(node_bytes(node))
        loops = (OpKind.FUSIBLE, OpKind.GENERATOR, OpKind.ABSORBING)
        return self.pointwise_us if kind in loops else self.matmul_us

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return self.latency_us + size_bytes / self.bytes_per_us

    def link_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return self.collective_us(kind, size_bytes, ranks)

    def coalesced_us(self, kind: str, sizes_bytes: Sequence[int], ranks: Sequence[int]) -> float:
        member_us = self.latency_us if self.member_us is None else self.member_us
        latencies_us = self.latency_us + member_us * (len(sizes_bytes) - 1)
        return latencies_us + sum(sizes_bytes) / self.bytes_per_us

    def copy_us(self, size_bytes: int) -> float:
        return size_bytes / self.copy_bytes_per_us

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        return Machine(links=dict.fromkeys(groups, "net") if self.shared_link else {})

    def uuid(self) -> str:
        return repr(self)


class GraphBuilder:
    """Writes a graph node by node; shapes come from running each op on fake tensors."""

    def __init__(self, group_size: int = 4) -> None:
        self.graph = fx.Graph()
        self.group_size = group_size
        self._mode = FakeTensorMode(shape_env=ShapeEnv())
        self._parameters = 0
        self._module = torch.nn.Module()

    def parameter(
        self, fqn: str, *shape: int, dtype: torch.dtype = torch.float32, name: str | None = None
    ) -> fx.Node:
        """A graph input that is this rank's shard of parameter ``fqn``."""
        node = self.input(name or f"primals_{self._parameters + 1}", *shape, dtype=dtype)
        node.meta["custom"] = {NAME: fqn, POSITION: self._parameters}
        self._parameters += 1
        return node

    def input(self, name: str, *shape: Any, dtype: torch.dtype = torch.float32) -> fx.Node:
        """A graph input; of a backward graph if a name of the graph starts with "tangents_"."""
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def dynamic_size(self, hint: int) -> Any:
        """A SymInt with a hint, for the shapes of inputs."""
        context = StatelessSymbolicContext([DimDynamic.DYNAMIC])  # pyright: ignore
        return self._mode.from_tensor(torch.empty(hint), symbolic_context=context).shape[0]

    def call(
        self, target: Callable[..., Any], *args: Any, name: str | None = None, **kwargs: Any
    ) -> fx.Node:
        """A call whose shape comes from running ``target``; it inherits the stamp of one input."""
        node = self.graph.create_node("call_function", target, args, kwargs, name=name)
        with self._mode:
            node.meta["val"] = target(*fx.map_arg(args, _val), **fx.map_arg(kwargs, _val))
        inputs = node.all_input_nodes
        if len(inputs) == 1 and "custom" in inputs[0].meta:
            node.meta["custom"] = inputs[0].meta["custom"]
        return node

    def stamp(self, node: fx.Node, parameter: fx.Node) -> fx.Node:
        """Say that ``node`` serves ``parameter``, as AOTAutograd does for gradients."""
        node.meta["custom"] = parameter.meta["custom"]
        return node

    # The collectives, start and wait.

    def gather_start(self, shard: fx.Node, group: Any = "pg0", **fields: Any) -> fx.Node:
        size = fields.pop("group_size", self.group_size)
        return self.call(c10d.all_gather_into_tensor.default, shard, size, group, **fields)

    def scatter_start(
        self, full: fx.Node, group: Any = "pg0", op: str = "sum", **fields: Any
    ) -> fx.Node:
        size = fields.pop("group_size", self.group_size)
        return self.call(c10d.reduce_scatter_tensor.default, full, op, size, group, **fields)

    def reduce_start(
        self, tensor: fx.Node, group: Any = "pg0", op: str = "sum", **fields: Any
    ) -> fx.Node:
        return self.call(c10d.all_reduce.default, tensor, op, group, **fields)

    def exchange_start(self, tensor: fx.Node, group: Any = "pg0", **fields: Any) -> fx.Node:
        size = fields.pop("group_size", self.group_size)
        rows = [tensor.meta["val"].shape[0] // size] * size
        return self.call(c10d.all_to_all_single.default, tensor, rows, rows, group, **fields)

    def wait(self, start: fx.Node, name: str | None = None) -> fx.Node:
        return self.call(c10d.wait_tensor.default, start, name=name)

    def gather(self, shard: fx.Node, group: Any = "pg0", **fields: Any) -> fx.Node:
        return self.wait(self.gather_start(shard, group, **fields))

    def scatter(self, full: fx.Node, group: Any = "pg0", **fields: Any) -> fx.Node:
        return self.wait(self.scatter_start(full, group, **fields))

    def all_reduce(self, tensor: fx.Node, group: Any = "pg0", **fields: Any) -> fx.Node:
        return self.wait(self.reduce_start(tensor, group, **fields))

    def exchange(self, tensor: fx.Node, group: Any = "pg0", **fields: Any) -> fx.Node:
        return self.wait(self.exchange_start(tensor, group, **fields))

    # The compute that most graphs need.

    def mm(self, a: fx.Node, b: fx.Node, name: str | None = None) -> fx.Node:
        return self.call(aten.mm.default, a, b, name=name)

    def transpose(self, a: fx.Node) -> fx.Node:
        return self.call(aten.permute.default, a, [1, 0])

    def cast(self, a: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.call(torch.ops.prims.convert_element_type.default, a, dtype)

    def pad_rows(self, a: fx.Node, rows: int) -> fx.Node:
        missing = rows - a.meta["val"].shape[0]
        return self.call(aten.constant_pad_nd.default, a, [0, 0, 0, missing]) if missing else a

    def first_rows(self, a: fx.Node, rows: int) -> fx.Node:
        if rows == a.meta["val"].shape[0]:
            return a
        return self.call(aten.slice.Tensor, a, 0, 0, rows)

    def output(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        return fx.GraphModule(self._module, self.graph)


def _val(node: fx.Node) -> Any:
    return node.meta["val"]


def copy_graph(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph(owning_module=graph.owning_module)
    copy.output(copy.graph_copy(graph, {}))
    return copy


def named(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.name == name)


def order(graph: fx.Graph) -> list[str]:
    """Names of what is called, in graph order."""
    return [node.name for node in graph.nodes if node.op == "call_function"]


def collective_names(graph: fx.Graph) -> list[str]:
    """Starts and waits, in graph order."""
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "wait_tensor")
    return [
        node.name
        for node in graph.nodes
        if node.op == "call_function" and op_base_name(node).startswith(names)
    ]


def fingerprint(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """All that a pass could have changed: order, targets and arguments of every node."""
    return [
        (node.op, node.name, str(node.target), str(node.args), str(node.kwargs))
        for node in graph.nodes
    ]


def decided(outcome: Outcome) -> tuple[object, ...]:
    """What must be the same on all ranks, to the last bit."""
    times = (timeline for timeline in (outcome.before, outcome.after))
    predicted = [(timeline.step_us, timeline.peak_bytes) for timeline in times]
    return outcome.plan.policy, outcome.plan.digest, *predicted, outcome.bound.step_us


def compute_calls(graph: fx.Graph) -> list[str]:
    """Kernels other than views, copies and collectives, sorted: what a pass must keep."""
    calls: list[str] = []
    for node in graph.nodes:
        op = overload(node)
        if op is not None and op.namespace != "_c10d_functional":
            calls.append(
                f"{op_base_name(node)} {numel_hint(node.meta['val'])}"
                if isinstance(node.meta.get("val"), torch.Tensor)
                else op_base_name(node)
            )
    return sorted(calls)


def two_linear_layers(builder: GraphBuilder) -> fx.GraphModule:
    """Forward of two layers whose weights are gathered on demand; the smallest real input.

    Weights are float32[8, 8], 64 bytes a shard and 256 bytes gathered: with `TestPrices` each
    gather takes 2 + 256 / 64 = 6 us and each matmul 10 us.
    """
    first = builder.parameter("layers.0.weight", 2, 8)
    second = builder.parameter("layers.1.weight", 2, 8)
    x = builder.input("x", 8, 8)
    for shard in (first, second):
        x = builder.mm(x, builder.gather(shard))
    return builder.output(x)


getitem = operator.getitem
