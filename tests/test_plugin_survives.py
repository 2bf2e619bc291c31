"""A compile never fails for a mistake of ours, nor for a device in whose graphs nothing is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder, fingerprint, two_linear_layers
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode

from inductor_overlap import inductor_passes
from inductor_overlap.inductor_passes import OverlapGraph, OverlapScheduler
from inductor_overlap.passes.manual_wrap import WrapError
from inductor_overlap.settings import Settings

pytestmark = pytest.mark.quick


def failing_with(error: Exception) -> Any:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def graph_pass() -> OverlapGraph:
    settings = Settings()
    return OverlapGraph(settings, OverlapScheduler(settings, None))


def test_a_fault_in_planning_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = two_linear_layers(GraphBuilder()).graph
    before = fingerprint(graph)
    monkeypatch.setattr(
        inductor_passes, "overlap_and_report", failing_with(ValueError("a fault of ours"))
    )
    graph_pass()(graph)
    assert fingerprint(graph) == before
    monkeypatch.setattr(inductor_passes, "overlap_and_report", failing_with(WrapError("yours")))
    with pytest.raises(WrapError, match="yours"):
        graph_pass()(graph)


def test_a_fault_in_ordering_kernels_keeps_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = two_linear_layers(GraphBuilder()).graph
    monkeypatch.setattr(inductor_passes, "overlap_snodes", failing_with(KeyError("buf0")))
    snodes: list[Any] = [object(), object()]
    with V.set_graph_handler(cast("Any", SimpleNamespace(graph=graph))):
        assert OverlapScheduler(Settings(), None)(snodes) is snodes


def test_a_device_without_a_profile_matters_only_where_something_is_sent() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(x)
    with FakeTensorMode():
        x.meta["val"] = torch.empty(8, device="xpu")
    graph_pass()(graph)
    sharded = two_linear_layers(GraphBuilder()).graph
    next(iter(sharded.nodes)).meta["val"] = x.meta["val"]
    with pytest.raises(ValueError, match=r"no cluster profile is for device type .*xpu"):
        graph_pass()(sharded)
