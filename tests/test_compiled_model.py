"""A wrap list and the graphs that Dynamo cuts a model into; no Inductor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh

import inductor_overlap as io
from inductor_overlap.inductor_passes import NameParameters
from inductor_overlap.passes.compiled_model import model_parameters
from inductor_overlap.settings import Settings

pytestmark = pytest.mark.quick


class Block(nn.Linear):
    """A layer that Dynamo may not be able to trace through."""

    def __init__(self, breaks: bool) -> None:
        super().__init__(8, 8)
        self.breaks = breaks

    def forward(self, input: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return super().forward(input)


class Model(nn.Module):
    def __init__(self, *, breaks_between: bool = False, breaks_inside: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(breaks_inside) for _ in range(3))
        self.breaks_between = breaks_between

    def forward(self, x: Tensor) -> Tensor:
        # No loop: a break in one makes Dynamo give up the whole frame.
        x = self.layers[0](x)
        if self.breaks_between:
            torch._dynamo.graph_break()
        x = self.layers[1](x)
        if self.breaks_between:
            torch._dynamo.graph_break()
        return self.layers[2](x)


def compile_with(wrap: Any, model: Any) -> list[frozenset[str]]:
    """Runs the Dynamo pass on each graph; what it knew of the model at each."""
    known: list[frozenset[str]] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        known.append(model_parameters(gm.graph))
        NameParameters(Settings(wrap=wrap, cluster="h100-ib"))(gm.graph)
        return gm.forward

    torch.compile(model, backend=backend)(torch.ones(2, 8))
    return known


NAMES = {f"layers.{index}.{name}" for index in range(3) for name in ("weight", "bias")}


def test_a_graph_break_is_told_and_all_graphs_are_compiled(
    mesh: DeviceMesh, caplog: pytest.LogCaptureFixture
) -> None:
    model = io.simple_fsdp(Model(breaks_between=True), mesh)
    assert compile_with(["layers.0", ["layers.1", "layers.2"]], model) == [NAMES] * 3
    first, *others = [
        record.getMessage() for record in caplog.records if record.name == "inductor_overlap"
    ]
    assert "'layers.1', 'layers.2' name nothing that this graph uses" in first
    assert "a graph break may have cut the model" in first and "fullgraph=True" in first
    assert len(others) == 2


@pytest.mark.parametrize("breaks", [False, True])
def test_a_name_that_is_nowhere_is_an_error(mesh: DeviceMesh, breaks: bool) -> None:
    model = io.simple_fsdp(Model(breaks_between=breaks), mesh)
    with pytest.raises(BackendCompilerFailed, match=r"'layer.1' matches no parameter") as error:
        compile_with(["layers.0", "layer.1"], model)
    assert isinstance(error.value.inner_exception, io.WrapError)
    assert "'layers.1'" in str(error.value)


def test_a_module_that_is_compiled_on_its_own_is_told_of_breaks(mesh: DeviceMesh) -> None:
    """Names are then relative to it, so those of the model fit nothing."""
    model = io.simple_fsdp(Model(breaks_inside=True), mesh)
    with pytest.raises(BackendCompilerFailed, match=r"compiled on their own.*fullgraph=True"):
        compile_with(["layers.*"], model)


def test_names_are_looked_up_in_sharded_models_only() -> None:
    assert compile_with(["blocks.*"], Model()) == [NAMES]


def test_outside_a_trace_nothing_is_known() -> None:
    assert model_parameters(fx.Graph()) == frozenset()


held: nn.Module = Model()


def test_a_model_that_a_global_holds_is_known() -> None:
    def step(x: Tensor) -> Tensor:
        return held(x) + 1.0

    assert compile_with(["layers.*"], step) == [NAMES]
