"""Scheduler nodes as Inductor makes them: read as they are, up to where code would be generated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from support.ranks import fake_process_group
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import inductor_overlap as io
from inductor_overlap import inductor_passes
from inductor_overlap.cost_model.pricing import PricedCluster
from inductor_overlap.passes.program import Program
from inductor_overlap.passes.scheduler import pinned_tasks, retime
from inductor_overlap.passes.snode_schedule import SnodeProgram, read_snodes

pytestmark = pytest.mark.compile

DIM = 512


class Read(BaseException):
    """Ends a compile: no ``Exception``, which the passes would log and go on from."""

    def __init__(self, program: SnodeProgram) -> None:
        super().__init__("read")
        self.program = program


@torch.library.custom_op("overlap_tests::tell_peer", mutates_args=())
def tell_peer(x: Tensor, group_name: str) -> Tensor:
    """A communication op of some other library."""
    return x.clone()


@tell_peer.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x)


tell_peer.register_autograd(lambda ctx, grad: (tell_peer(grad, "ring"), None))


class TellsPeer(nn.Module):
    """In its backward an op communicates between layers, and gathers would gain by crossing it."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(DIM, 16 * DIM), (16 * DIM, DIM), (DIM, DIM), (DIM, DIM)]
        self.layers = nn.ModuleList(nn.Linear(*size, bias=False) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        wide, narrow, *rest = self.layers
        x = tell_peer(narrow(torch.tanh(wide(x))), "ring")
        for _ in range(3):
            x = torch.tanh((x @ x.T) @ x)
        for layer in rest:
            x = torch.tanh(layer(x))
        return torch.tanh(x.reshape(-1, 1) @ x.new_ones(1, DIM)).sum(-1)


class SelectsRows(nn.Module):
    """How many rows there are is known at run time only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x[x[:, 0] > 0.0]
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_process_group(2):
        yield init_device_mesh("cpu", (2,))


def read(model: nn.Module, mesh: DeviceMesh, monkeypatch: Any, graph: int) -> SnodeProgram:
    """The forward (0) or backward (1) graph of ``model`` as the scheduler pass reads it."""
    left = graph

    def overlap_snodes(snodes: Sequence[Any], graph: fx.Graph, prices: PricedCluster) -> list[Any]:
        nonlocal left
        if left == 0:
            raise Read(read_snodes(snodes, graph, prices))
        left -= 1
        return list(snodes)

    monkeypatch.setattr(inductor_passes, "overlap_snodes", overlap_snodes)
    torch._dynamo.reset()
    slow = io.Cluster(gpu="h100", network="ib-ndr-400x1", gpus_per_node=1)
    options = io.options(cluster=slow, memory_limit_gb=1.0)
    compiled = torch.compile(io.simple_fsdp(model, mesh), options=options, fullgraph=True)
    with pytest.raises(Read) as caught:
        compiled(torch.ones(64, DIM)).sum().backward()
    return caught.value.program


def test_no_collective_crosses_an_op_that_may_communicate(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks may be waiting in it: what starts before it on one must do so on all."""
    source = read(TellsPeer(), mesh, monkeypatch, graph=1)
    (barrier,) = source.barriers

    def behind(program: Program) -> set[str]:
        names = [task.name for task in program.schedule.tasks]
        moved = {name for c in program.collectives for name in (c.name, c.wait)}
        return moved.intersection(names[names.index(barrier) :])

    assert 0 < len(behind(source.program)) < 2 * len(source.program.collectives)
    assert behind(retime(source.program)) == behind(source.program)
    pinned = [task.name for task in pinned_tasks(source.program.schedule, source.barriers)]
    assert barrier in pinned


def test_buffers_of_unknown_size_are_read_and_written_by_nobody(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        source = read(SelectsRows(), mesh, monkeypatch, graph=0)
    schedule = source.program.schedule
    schedule.validate()
    assert source.program.collectives
    made = {b for snodes in source.snodes.values() for s in snodes for b in s.get_buffer_names()}
    counted = {name for task in schedule.tasks for name in (*task.reads, *task.writes)}
    assert made - counted and all(schedule.buffers[name].size_bytes > 0 for name in counted)
    retime(source.program).schedule.validate()
