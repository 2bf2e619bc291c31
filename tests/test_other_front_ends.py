"""Sharded models that did not come from `simple_fsdp` are recognised and overlapped the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sharded_training import full
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.utils.parametrize import register_parametrization

import inductor_overlap as io

pytestmark = [pytest.mark.gloo, pytest.mark.compile]

DIM = 16
NUM_LAYERS = 3


class Layers(nn.Module):
    """The plain model; its matrices are all that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


class GatherWeight(nn.Module):
    """A parametrisation by hand, as torchtitan's SimpleFSDP experiment has one."""

    def forward(self, sharded: DTensor) -> Tensor:
        gathered = sharded.redistribute(placements=[Replicate()])
        return gathered.to_local(grad_placements=[Partial("avg")])


class ShardedLayers(Layers):
    """DTensors through and through: a sharded batch meets weights gathered in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            weight = cast(DTensor, layer.weight).redistribute(placements=[Replicate()])
            x = (x @ weight.t()).relu()
        return x.square().mean()


def shard_weights(model: Layers, mesh: DeviceMesh) -> Layers:
    for layer in model.layers:
        weight = cast(nn.Linear, layer).weight.detach()
        layer.weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    return model


def parametrized(mesh: DeviceMesh, x: Tensor) -> tuple[nn.Module, Tensor]:
    model = shard_weights(Layers(), mesh)
    for layer in model.layers:
        register_parametrization(layer, "weight", GatherWeight(), unsafe=True)
    return model, x


def plain_dtensors(mesh: DeviceMesh, x: Tensor) -> tuple[nn.Module, Tensor]:
    return shard_weights(ShardedLayers(), mesh), DTensor.from_local(x, mesh, [Shard(0)])


MODELS: dict[str, Callable[[DeviceMesh, Tensor], tuple[nn.Module, Tensor]]] = {
    "parametrized": parametrized,
    "plain DTensors": plain_dtensors,
}


def run(wrap: Any) -> dict[str, Any]:
    """For each model its loss over all ranks, full gradients, and the reports of its compile."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = batch_of(dist.get_rank())
    found: dict[str, Any] = {}
    for name, build in MODELS.items():
        seen = len(io.reports())
        model, inputs = build(mesh, x)
        options: Any = io.options(wrap=wrap, cluster="h100-ib", memory_limit_gb=1.0)
        loss = torch.compile(model, options=options, fullgraph=True)(inputs)
        loss.backward()
        gradients = [full(p.grad) for p in model.parameters() if p.grad is not None]
        reports = io.reports()[seen:]
        found[name] = (gradients, [(r.name, summary(r)) for r in reports])
    return found


def batch_of(rank: int) -> Tensor:
    return torch.randn(4, DIM, generator=torch.Generator().manual_seed(rank))


def summary(report: io.Report) -> dict[str, Any]:
    return {
        "collectives": (report.num_collectives_before, report.num_collectives_after),
        "exposed_us": (report.before.exposed_us, report.after.exposed_us),
        "parameters": report.wire_dtypes,
    }


WEIGHTS = [f"layers.{index}.weight" for index in range(NUM_LAYERS)]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(run, 2, [["layers.0", "layers.1"], "layers.2"], timeout_s=400)


@pytest.mark.parametrize("name", list(MODELS))
def test_gradients_are_those_of_one_process(results: list[dict[str, Any]], name: str) -> None:
    whole = Layers()
    torch.stack([whole(batch_of(rank)) for rank in range(2)]).mean().backward()
    for result in results:
        for parameter, gradient in zip(whole.parameters(), result[name][0], strict=True):
            torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", list(MODELS))
def test_collectives_are_named_bucketed_and_hidden(
    results: list[dict[str, Any]], name: str
) -> None:
    """The patterns are the user's module names: the first two layers make a bucket."""
    _, reports = results[0][name]
    (forward, gathers), (backward, scatters) = reports
    assert (forward, backward) == ("forward", "backward")
    assert list(gathers["parameters"]["all_gather"]) == WEIGHTS
    assert sorted(scatters["parameters"]["reduce_scatter"]) == WEIGHTS
    for report in (gathers, scatters):
        before, after = report["collectives"]
        assert after < before
        assert report["exposed_us"][1] < report["exposed_us"][0]
