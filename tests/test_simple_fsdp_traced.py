"""What a sharded model looks like once traced: how often it communicates, and what nodes tell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.ranks import fake_process_group
from support.sharded_training import SEQ, parallelize_llama, tiny_llama
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from inductor_overlap.passes.collectives import find_collectives
from inductor_overlap.passes.parameter_names import (
    stamp_collectives,
    stamp_parameter_names,
)
from inductor_overlap.simple_fsdp import MixedPrecisionPolicy, simple_fsdp
from inductor_overlap.wire_dtypes import wire_dtypes

C10D = torch.ops._c10d_functional
GATHER = C10D.all_gather_into_tensor.default
SCATTER = C10D.reduce_scatter_tensor.default
ALL_REDUCE = C10D.all_reduce.default


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(4):
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))


def trace(model: nn.Module, *inputs: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graphs of one training step, cut as Inductor cuts them."""
    graphs: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, example_inputs: object) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        stamp_collectives(joint.graph)
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def backend(graph: fx.GraphModule, example_inputs: Any) -> Any:
        stamp_parameter_names(graph.graph)
        compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition)
        return compiler(graph, example_inputs)

    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend=backend)(*inputs).sum().backward()
    forward, backward = graphs
    return forward, backward


def count(graph: fx.GraphModule) -> Counter[object]:
    return Counter(node.target for node in graph.graph.nodes if node.target in COLLECTIVES)


COLLECTIVES = (GATHER, SCATTER, ALL_REDUCE)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 10)
        self.down = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    """Two blocks, each recomputed in backward if asked for."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x


class ReadTwice(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        if tied:
            self.second.weight = self.first.weight
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        return (self.second if self.tied else self.first)(self.first(x).relu())


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


@pytest.mark.parametrize(
    ("mode", "forward_counts", "backward_counts"),
    [
        ("fully_shard", {GATHER: 8}, {SCATTER: 8}),
        ("hybrid_shard", {GATHER: 8}, {SCATTER: 8, ALL_REDUCE: 8}),
        ("replicate", {}, {ALL_REDUCE: 8}),
    ],
)
def test_one_collective_each_way_for_every_parameter(
    mesh: DeviceMesh,
    mode: str,
    forward_counts: dict[object, int],
    backward_counts: dict[object, int],
) -> None:
    used = mesh if mode == "hybrid_shard" else mesh["shards"]
    forward, backward = trace(simple_fsdp(Stack(), used, mode=mode), torch.ones(2, 8))
    assert count(forward) == forward_counts
    assert count(backward) == backward_counts


def test_with_activation_checkpointing_at_most_two_gathers(mesh: DeviceMesh) -> None:
    model = simple_fsdp(Stack(recompute=True), mesh["shards"])
    forward, backward = trace(model, torch.ones(2, 8))
    assert count(forward) == {GATHER: 8}
    assert count(backward)[SCATTER] == 8
    assert count(backward)[GATHER] <= 8


def test_a_gather_is_a_unary_chain_from_its_placeholder(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16)
    model = simple_fsdp(nn.Linear(8, 5, bias=False), mesh["shards"], mp_policy=policy)
    forward, _ = trace(model, torch.ones(2, 8, dtype=torch.bfloat16))
    (gather,) = (node for node in forward.graph.nodes if node.target is GATHER)
    node = gather
    while node.op != "placeholder":
        (node,) = node.all_input_nodes
    assert "_local_tensor" in str(node.meta["desc"])
    assert gather.meta["val"].dtype == torch.bfloat16


STACK = [
    f"blocks.{block}.{layer}.{name}"
    for block in (0, 1)
    for layer in ("up", "down")
    for name in ("weight", "bias")
]


@pytest.mark.parametrize(
    ("mode", "recompute", "collectives"),
    [
        ("fully_shard", False, (GATHER, SCATTER)),
        ("fully_shard", True, (GATHER, SCATTER)),
        ("hybrid_shard", False, (GATHER, SCATTER, ALL_REDUCE)),
        ("hybrid_shard", True, (GATHER, SCATTER, ALL_REDUCE)),
        ("replicate", False, (ALL_REDUCE,)),
    ],
)
def test_collectives_tell_which_parameter_they_serve(
    mesh: DeviceMesh, mode: str, recompute: bool, collectives: tuple[object, ...]
) -> None:
    used = mesh["shards"] if mode == "fully_shard" else mesh
    forward, backward = trace(simple_fsdp(Stack(recompute), used, mode=mode), torch.ones(2, 8))
    for target in collectives:
        if target is GATHER:
            assert served(forward, target) == STACK
        else:
            assert served(backward, target) == STACK
    assert set(served(backward, GATHER)) <= set(STACK)
    assert_positions_agree(forward, backward)


def test_replicas_of_one_mesh_dimension_tell_their_parameters(mesh: DeviceMesh) -> None:
    model = simple_fsdp(Stack(), mesh["shards"], mode="replicate")
    _, backward = trace(model, torch.ones(2, 8))
    assert served(backward, ALL_REDUCE) == STACK


@pytest.mark.parametrize("mode", ["fully_shard", "replicate"])
def test_with_tensor_parallelism_all_parameters_are_told(mesh: DeviceMesh, mode: str) -> None:
    model = simple_fsdp(
        parallelize_llama(tiny_llama(), mesh["shards"]), mesh["replicas"], mode=mode
    )
    names = {name for name, _ in model.named_parameters()}
    graphs = trace(model, torch.zeros(1, SEQ, dtype=torch.long))
    group = mesh["replicas"].get_group().group_name
    reduced = SCATTER if mode == "fully_shard" else ALL_REDUCE
    forward, backward = (
        [one for one in find_collectives(graph.graph) if one.group_name == group]
        for graph in graphs
    )
    assert {one.fqn for one in forward} == (names if mode == "fully_shard" else set())
    assert {one.fqn for one in backward if one.start.target is reduced} == names
    assert_positions_agree(*graphs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_cuts_of_other_dimensions_and_uneven_ones_hide_no_name(
    mesh: DeviceMesh, dtype: torch.dtype
) -> None:
    policy = MixedPrecisionPolicy(dtype, torch.float32)
    model = simple_fsdp(
        nn.Linear(8, 5, bias=False), mesh, mode="hybrid_shard", shard_dim=1, mp_policy=policy
    )
    forward, backward = trace(model, torch.ones(2, 8, dtype=dtype))
    assert served(forward, GATHER) == served(backward, SCATTER) == ["weight"]
    assert served(backward, ALL_REDUCE) == ["weight"]


def served(graph: fx.GraphModule, target: object) -> list[str | None]:
    """Parameters of the collectives of one kind, each once, by payload position."""
    found = [one for one in find_collectives(graph.graph) if one.start.target is target]
    in_order = sorted(found, key=lambda one: one.input_position)
    return list(dict.fromkeys(one.fqn for one in in_order))


def assert_positions_agree(*graphs: fx.GraphModule) -> None:
    found = [one for graph in graphs for one in find_collectives(graph.graph) if one.fqn]
    assert len({(one.fqn, one.input_position) for one in found}) == len({one.fqn for one in found})


def test_graphs_tell_the_wire_dtype_of_every_parameter(mesh: DeviceMesh) -> None:
    override = {"scale": MixedPrecisionPolicy()}
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, overrides=override)
    model = simple_fsdp(Scaled(), mesh["shards"], mp_policy=policy)
    gathered, reduced = (
        wire_dtypes(find_collectives(graph.graph))
        for graph in trace(model, torch.ones(2, 8, dtype=torch.bfloat16))
    )
    assert gathered == {"all_gather": {"linear.weight": "bfloat16", "scale": "float32"}}
    assert reduced["reduce_scatter"] == {"linear.weight": "float32", "scale": "float32"}


@pytest.mark.parametrize(("tied", "num_scatters"), [(False, 2), (True, 1)])
def test_a_parameter_read_twice_is_gathered_once(
    mesh: DeviceMesh, tied: bool, num_scatters: int
) -> None:
    model = simple_fsdp(ReadTwice(tied), mesh["shards"])
    forward, backward = trace(model, torch.ones(2, 8))
    assert count(forward)[GATHER] == 1
    assert count(backward)[SCATTER] == num_scatters


def test_frozen_parameters_are_gathered_and_not_reduced(mesh: DeviceMesh) -> None:
    model = Stack()
    model.blocks[0].requires_grad_(False)
    forward, backward = trace(simple_fsdp(model, mesh["shards"]), torch.ones(2, 8))
    assert count(forward)[GATHER] == 8
    assert count(backward)[SCATTER] == 4


def test_blocks_compiled_one_by_one_share_one_graph(mesh: DeviceMesh) -> None:
    model = simple_fsdp(tiny_llama(), mesh["shards"])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.layers:
        block.compile(fullgraph=True, backend=counter)
    model(torch.zeros(1, SEQ, dtype=torch.long)).sum().backward()
    assert counter.frame_count == 1
