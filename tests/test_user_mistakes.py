"""What users get wrong in options, clusters, cost models and plans, and what they are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch.fx as fx
from support.graphs import GraphBuilder, TestPrices, two_linear_layers
from torch import nn

import inductor_overlap as io
from inductor_overlap.cost_model.pricing import CostModelError
from inductor_overlap.settings import Settings

pytestmark = pytest.mark.quick


class Prices:
    """A cost model of the user's that answers ``answer`` for every op, 5 us for a collective."""

    def __init__(self, answer: Any, identity: Any = None) -> None:
        self.answer = answer
        self.identity = identity

    def compute_us(self, node: fx.Node) -> float:
        return self.answer

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return 5.0


class IdentifiedPrices(Prices):
    def uuid(self) -> str:
        if isinstance(self.identity, Exception):
            raise self.identity
        return self.identity


@pytest.mark.parametrize("answer", [3, 3.0, np.float32(3.0), np.int64(3)])
def test_any_real_number_is_a_time(answer: Any) -> None:
    # Two matmuls of 3 us, two gathers of 5 us, and 3 us to launch each on H100.
    launch_us = io.Cluster.preset("h100-ib").launch_us
    step_us = io.simulate(two_linear_layers(GraphBuilder()), cost_model=Prices(answer)).step_us
    assert step_us == pytest.approx(2 * 3 + 2 * 5 + 4 * launch_us, rel=0.1)


@pytest.mark.parametrize("answer", [-1, float("nan"), float("inf"), 1e308, 10**400, "3", None])
def test_what_is_no_time_is_refused(answer: Any) -> None:
    with pytest.raises(CostModelError, match=r"Prices\.compute_us for aten\.mm .* expected"):
        io.simulate(two_linear_layers(GraphBuilder()), cost_model=Prices(answer))


def test_the_identity_of_a_cost_model_is_a_string_or_none() -> None:
    assert Settings(cost_model=IdentifiedPrices(1, None)).uuid() is None
    assert "v1" in str(Settings(cost_model=IdentifiedPrices(1, "v1")).uuid())
    for identity in (3, RuntimeError("no")):
        with pytest.raises(CostModelError, match=r"IdentifiedPrices\.uuid (returned|raised)"):
            Settings(cost_model=IdentifiedPrices(1, identity)).uuid()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": 42}, "cluster must be a preset's name"),
        ({"cluster": Prices(1)}, "prices of your own go into cost_model="),
        ({"cluster": io.Cluster}, "cluster must be a preset's name"),
        ({"cost_model": Prices}, "Prices is a class; pass an instance"),
        ({"wrap": ["layers.**"]}, "holds for everything below"),
        ({"wrap": ["layers.[0-99999999]"]}, "more than 10000 numbers"),
        ({"memory_limit_gb": True}, "positive number of GiB.* got True"),
        ({"cost_model": IdentifiedPrices(1, 5)}, "uuid returned 5; expected a string"),
    ],
)
def test_options_of_the_wrong_kind_are_refused_at_once(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        io.options(**options)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gpu": 3}, "gpu must be a name"),
        ({"network": 5}, "network a name or None"),
        ({"gpus_per_node": 2.5}, "at least 1, got 2.5; expected an int"),
        ({"gpus_per_node": "8"}, "expected an int"),
        ({"contention": float("inf")}, "finite number >= 1"),
        ({"contention": "2"}, "finite number >= 1"),
        ({"overrides": {"launch_us": 3}}, "pairs"),
        ({"overrides": (("hbm_gb_per_s", 0),)}, "is a rate and must be > 0"),
        ({"overrides": (("queue_width", 0),)}, "at least 1"),
        ({"curves": (3,)}, "Curve objects"),
        ({"share_links": "no"}, "share_links must be True or False, got 'no'"),
        ({"network": "ib-ndr-400x8.5"}, "is not spelled"),
        ({"network": "ib-ndr--400x8"}, "is not spelled"),
        ({"gpu": "H100x"}, "unknown gpu 'H100x'; did you mean h100,"),
        ({"gpus_per_node": True}, "expected an int"),
        ({"contention": True}, "finite number >= 1"),
        ({"overrides": 3}, "overrides are .* pairs.* got 3"),
        ({"overrides": [("launch_us", 3)]}, "overrides are .* pairs"),
        ({"overrides": (("launch_us", True),)}, "launch_us must be finite and >= 0, got True"),
        ({"curves": 3}, "Curve objects"),
        ({"errors": {"collective": 0.1}}, "errors are .* pairs"),
        ({"errors": (("matmuls", 0.1),)}, "unknown error 'matmuls'; did you mean matmul,"),
        ({"errors": (("collective", "0.1"),)}, "error collective must be finite and >= 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        io.Cluster(**fields)


H100 = io.Cluster.preset("h100-ib")


def collective(size_bytes: Any, num_nodes: Any = 1, ranks_per_node: Any = 8) -> float:
    return H100.collective_us(
        "all_gather", size_bytes, num_nodes=num_nodes, ranks_per_node=ranks_per_node
    )


def matmul(m: Any, dtype: Any = "bf16") -> float:
    return H100.matmul_us(m, 1, 1, dtype)


@pytest.mark.parametrize(
    ("call", "arguments", "message"),
    [
        (matmul, (1, None), "no FLOP rate is known for dtype None; expected one of"),
        (matmul, ("8",), "sizes of a matmul must be >= 0, in whole numbers; got .*m='8'"),
        (matmul, (1.5,), "in whole numbers; got .*m=1.5"),
        (matmul, (True,), "in whole numbers; got .*m=True"),
        (H100.attention_us, (1, 1, 1, 0.5, 8, 8), "in whole numbers; got .*seq_q=0.5"),
        (H100.memory_us, ("8",), "of a memory kernel must be finite and >= 0, got '8'"),
        (collective, ("8",), "size_bytes of all_gather must be finite and >= 0, got '8'"),
        (collective, (True,), "must be finite and >= 0, got True"),
        (collective, (10**400,), "must be finite and >= 0"),
        (collective, (8, "1"), "in whole numbers; got num_nodes='1'"),
        (collective, (8, 1, True), "in whole numbers; got .*ranks_per_node=True"),
        (io.Cluster.preset, (None,), "unknown cluster preset None; known: .*h100-ib"),
        (io.optimize, (fx.Graph(),), "gm must be a torch.fx.GraphModule.* got Graph; pass the"),
        (io.simulate, (fx.Graph(),), "gm must be a torch.fx.GraphModule.* got Graph; pass the"),
        (io.optimize, (nn.Linear(2, 2),), "got Linear; trace the module"),
    ],
)
def test_an_argument_of_the_wrong_kind_is_refused(
    call: Callable[..., object], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(*arguments)


@pytest.mark.parametrize("model_fn", [nn.Linear(2, 2), "Llama3"])
def test_a_model_is_planned_from_the_function_that_makes_it(model_fn: Any) -> None:
    with pytest.raises(ValueError, match="model_fn must be a function that makes the model"):
        io.plan(model_fn, 2, batch=1, seq=4)


def test_the_machine_of_a_cost_model_is_a_machine() -> None:
    class Machineless(Prices):
        def machine(self, groups: object) -> None:
            return None

    with pytest.raises(CostModelError, match=r"Machineless\.machine returned None; expected"):
        io.simulate(two_linear_layers(GraphBuilder()), cost_model=Machineless(1))


@pytest.mark.parametrize(
    "change",
    [
        {"policy": 1},
        {"order": "abc"},
        {"starts": [1]},
        {"buckets": {}},
        {"buckets": [{"name": "b", "members": "ab"}]},
    ],
)
def test_a_plan_of_the_wrong_shape_is_refused(change: dict[str, Any]) -> None:
    fields = {"policy": "x", "buckets": [], "order": [], "starts": []}
    assert io.Plan.from_json(json.dumps(fields)) == io.Plan("x")
    with pytest.raises(ValueError, match="expected the JSON text of a plan"):
        io.Plan.from_json(json.dumps(fields | change))


def test_a_star_also_stands_for_nothing() -> None:
    b = GraphBuilder()
    x = b.input("x", 8, 8)
    for index in (1, 2, 10):
        x = b.mm(x, b.gather(b.parameter(f"layers.{index}.weight", 2, 8)))
    report = io.optimize(
        b.output(x),
        wrap=[["layers.1*"]],
        cost_model=TestPrices(latency_us=100.0, matmul_us=1000.0),
        memory_limit_gb=1.0,
    )
    assert [len(bucket.members) for bucket in report.plan.buckets] == [2]


def test_patterns_for_a_graph_without_names_are_refused_for_that_reason() -> None:
    b = GraphBuilder()
    x = b.input("x", 8, 8)
    gm = b.output(b.mm(x, b.gather(b.input("shard", 2, 8))))
    with pytest.raises(io.WrapError, match=r"no collective .* says which parameter it serves"):
        io.optimize(gm, wrap=["layers.*"], cost_model=Prices(1.0))
