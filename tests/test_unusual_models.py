"""Models that leave the beaten track compile unharmed: equal to eager, on two gloo ranks.

One process pair runs all cases; every model is a few tiny layers, so that a compile is short.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sharded_training import full
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import inductor_overlap as io

pytestmark = [pytest.mark.gloo, pytest.mark.compile]

OPTIONS: dict[str, Any] = {"wrap": "auto", "cluster": "h100-ib", "memory_limit_gb": 1.0}
DIM = 8


@torch.library.custom_op("overlap_tests::swap_with_neighbour", mutates_args=())
def swap_with_neighbour(x: Tensor, group_name: str) -> Tensor:
    """A communication op of some other library: exchanges ``x`` between ranks 0 and 1."""
    received = torch.empty_like(x)
    peer = 1 - dist.get_rank()
    requests = [dist.isend(x.contiguous(), peer), dist.irecv(received, peer)]
    for request in requests:
        assert request is not None
        request.wait()
    return received


@swap_with_neighbour.register_fake
def _(x: Tensor, group_name: str) -> Tensor:
    return torch.empty_like(x)


class Layers(nn.Module):
    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class OneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(torch.relu(self.second(self.first(x))))


class Swaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x + swap_with_neighbour(x.detach(), "0"))


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


def _sharded(build: Callable[[], nn.Module], mode: str = "fully_shard") -> nn.Module:
    torch.manual_seed(3)
    return io.simple_fsdp(build(), _mesh(), mode=mode)


def frozen() -> nn.Module:
    def build() -> nn.Module:
        model = Layers()
        model.layers[0].requires_grad_(False)
        return model

    return _sharded(build)


def two_groups() -> nn.Module:
    torch.manual_seed(3)
    model = Layers()
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    other = DeviceMesh.from_group(group, "cpu")
    io.simple_fsdp(model.layers[0], _mesh())
    io.simple_fsdp(model.layers[1], other)
    return model


def plain() -> nn.Module:
    torch.manual_seed(3)
    return Layers()


CASES: dict[str, Callable[[], nn.Module]] = {
    "without collectives": plain,
    "one parameter": lambda: _sharded(OneParameter),
    "frozen parameter": frozen,
    "parameter used twice": lambda: _sharded(UsedTwice),
    "two process groups": two_groups,
    "unknown communication op": lambda: _sharded(Swaps),
    "replicated": lambda: _sharded(Layers, "replicate"),
}


def run_case(build: Callable[[], nn.Module]) -> dict[str, Any]:
    """Output and gradients, eager and compiled with the plugin, and the reports of the compile."""
    torch._dynamo.reset()
    torch.manual_seed(10 + dist.get_rank())
    x = torch.randn(4, DIM)
    found: dict[str, Any] = {}
    seen = len(io.reports())
    for way in ("eager", "compiled"):
        model = build()
        call = torch.compile(model, options=io.options(**OPTIONS)) if way == "compiled" else model
        output = call(x)
        output.square().sum().backward()
        gradients = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found[way] = (output.detach(), gradients)
    found["reports"] = [str(report) for report in io.reports()[seen:]]
    return found


def run_inference() -> dict[str, Any]:
    torch._dynamo.reset()
    model = _sharded(Layers).eval()
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    call = torch.compile(model, options=io.options(**OPTIONS))
    with torch.no_grad():
        return {"eager": (model(x), {}), "compiled": (call(x), {}), "reports": []}


def run_dynamic() -> dict[str, Any]:
    """Symbolic batch size: the sizes of activations are symbols, those of parameters are not."""
    torch._dynamo.reset()
    seen = len(io.reports())
    found: dict[str, Any] = {}
    for way in ("eager", "compiled"):
        model = _sharded(Layers)
        compiled = torch.compile(model, options=io.options(**OPTIONS), dynamic=True)
        call = compiled if way == "compiled" else model
        outputs: list[Tensor] = []
        for size in (3, 5):
            x = torch.randn(size, DIM, generator=torch.Generator().manual_seed(size))
            outputs.append(call(x))
            outputs[-1].square().sum().backward()
        gradients = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found[way] = (torch.cat(outputs).detach(), gradients)
    found["reports"] = [str(report) for report in io.reports()[seen:]]
    return found


def run_every_case() -> dict[str, dict[str, Any]]:
    found = {name: run_case(build) for name, build in CASES.items()}
    return {**found, "inference": run_inference(), "dynamic batch": run_dynamic()}


@pytest.fixture(scope="module")
def results() -> list[dict[str, dict[str, Any]]]:
    return run_ranks(run_every_case, 2, timeout_s=500)


@pytest.mark.parametrize("case", [*CASES, "inference", "dynamic batch"])
def test_values_are_those_of_eager(results: list[dict[str, Any]], case: str) -> None:
    for result in results:
        expected, gradients = result[case]["eager"]
        output, our_gradients = result[case]["compiled"]
        torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)
        assert our_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(our_gradients[name], gradient, atol=1e-5, rtol=1e-5)


def test_a_frozen_parameter_has_no_gradient(results: list[dict[str, Any]]) -> None:
    gradients = results[0]["frozen parameter"]["compiled"][1]
    assert set(gradients) == {"layers.1.weight", "layers.1.bias"}


def test_replicated_parameters_are_named(results: list[dict[str, Any]]) -> None:
    """All that such a parameter leaves in the forward is a view, which Inductor removes."""
    (report,) = results[0]["replicated"]["reports"]
    assert "parameters on the wire: all-reduce: 4 in float32" in report


def test_only_graphs_with_collectives_are_reported(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result["without collectives"]["reports"] == []
        assert len(result["two process groups"]["reports"]) == 2
        assert len(result["dynamic batch"]["reports"]) == 2
