"""The post-grad pass on Llama 3 8B dimensions (4 blocks, 64 fake ranks) and on odd graphs."""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
from support.graphs import (
    GraphBuilder,
    TestPrices,
    aten,
    collective_names,
    copy_graph,
    fingerprint,
    order,
    peer_send,
    two_linear_layers,
)
from support.ranks import fake_process_group
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.pricing import resolve_cost_model
from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.passes import post_grad
from inductor_overlap.passes.auto_wrap import MemoryLimitError, parse_wrap
from inductor_overlap.passes.collectives import find_collectives
from inductor_overlap.passes.manual_wrap import WrapError
from inductor_overlap.passes.post_grad import Outcome, overlap_graph
from inductor_overlap.planner import trace_graphs
from inductor_overlap.simple_fsdp import MixedPrecisionPolicy, simple_fsdp

BLOCKS = ["tok_embeddings", "layers.*", ["norm", "output"]]
NUM_RANKS = 64


@pytest.fixture(scope="module")
def llama() -> list[fx.GraphModule]:
    """Forward and backward graph of four 8B blocks, batch 1, sequence 4096, bf16 compute."""
    with fake_process_group(NUM_RANKS):
        mesh = init_device_mesh("cpu", (NUM_RANKS,))

        def build() -> tuple[nn.Module, tuple[Any, ...]]:
            model = Llama3(Llama3Config.named("8B", num_layers=4))
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            tokens = torch.zeros(1, 4096, dtype=torch.long)
            return simple_fsdp(model, mesh, mp_policy=policy), (tokens,)

        return trace_graphs(build)


def overlap(graph: fx.Graph, wrap: Any, prices: Any, limit: float | None = None) -> Outcome:
    return overlap_graph(graph, prices, parse_wrap(wrap), memory_limit_bytes=limit)


def overlap_copy(gm: fx.GraphModule, wrap: Any, preset: str) -> tuple[fx.Graph, Outcome]:
    graph = copy_graph(gm.graph)
    outcome = overlap(graph, wrap, resolve_cost_model(preset, None))
    graph.lint()
    return graph, outcome


def assert_not_worse(outcome: Outcome) -> None:
    assert outcome.bound.step_us * (1 - 1e-9) <= outcome.after.step_us
    assert outcome.after.step_us <= outcome.before.step_us
    assert outcome.memory_limit_bytes == pytest.approx(1.05 * outcome.before.peak_bytes)
    assert outcome.after.peak_bytes <= outcome.memory_limit_bytes


@pytest.mark.parametrize("wrap", ["auto", "greedy", BLOCKS], ids=["auto", "greedy", "manual"])
def test_llama_is_planned_well_and_once(llama: list[fx.GraphModule], wrap: Any) -> None:
    for gm in llama:
        graph, outcome = overlap_copy(gm, wrap, "h100-ib")
        assert_not_worse(outcome)
        assert outcome.after.step_us < 0.9 * outcome.before.step_us
        after = fingerprint(graph)
        second = overlap(graph, wrap, resolve_cost_model("h100-ib", None))
        assert second.moved_nodes == 0 and fingerprint(graph) == after


class _WatchingPrices(TestPrices):
    """Notes whether the garbage collector runs while it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.collected = False

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        self.collected |= gc.isenabled()
        return super().collective_us(kind, size_bytes, ranks)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_garbage_collector_rests_while_planning(was_enabled: bool) -> None:
    prices = _WatchingPrices()
    try:
        (gc.enable if was_enabled else gc.disable)()
        overlap(two_linear_layers(GraphBuilder()).graph, "auto", prices)
        assert gc.isenabled() == was_enabled
        with pytest.raises(MemoryLimitError):
            overlap(two_linear_layers(GraphBuilder()).graph, "auto", prices, limit=1.0)
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
    assert not prices.collected


@pytest.mark.parametrize("preset", Cluster.presets())
def test_no_preset_makes_llama_worse(llama: list[fx.GraphModule], preset: str) -> None:
    """Each preset with one of the wraps in turn; h100-ib has all of them above."""
    wraps = ("auto", "greedy", BLOCKS)
    wrap = wraps[Cluster.presets().index(preset) % len(wraps)]
    assert_not_worse(overlap_copy(llama[1], wrap, preset)[1])


def test_the_default_limit_is_used_up_only_for_speed(llama: list[fx.GraphModule]) -> None:
    """The same limit, given, is used for what it saves, however little."""
    default = overlap_copy(llama[1], "auto", "a100-ib")[1]
    prices = resolve_cost_model("a100-ib", None)
    given = overlap(copy_graph(llama[1].graph), "auto", prices, default.memory_limit_bytes)
    assert given.memory_limit_bytes == default.memory_limit_bytes
    assert default.after.peak_bytes < given.after.peak_bytes
    assert default.after.step_us <= 1.01 * given.after.step_us


def test_each_parameter_is_gathered_once_forward_and_once_backward(
    llama: list[fx.GraphModule],
) -> None:
    """39 parameters: 9 in each of 4 blocks, embedding, norm, output."""
    forward, backward = (find_collectives(gm.graph) for gm in llama)
    gathered = Counter(c.fqn for c in forward if c.kind == "all_gather")
    again = Counter(c.fqn for c in backward if c.kind == "all_gather")
    reduced = Counter(c.fqn for c in backward if c.kind == "reduce_scatter")
    assert len(gathered) == 39 and set(gathered.values()) == {1}
    assert set(again) <= set(gathered) and set(again.values()) == {1}
    assert reduced == gathered
    assert gathered.keys() - again.keys() == {"tok_embeddings.weight"}
    assert all(c.free for c in (*forward, *backward))


def test_no_gathered_weight_is_saved_for_backward(llama: list[fx.GraphModule]) -> None:
    forward = llama[0].graph
    results = next(node for node in forward.nodes if node.op == "output").all_input_nodes
    waits = {wait for c in find_collectives(forward) for wait in c.waits}
    for result in results:
        while len(result.all_input_nodes) == 1:
            assert result not in waits, f"{result} is a gathered weight"
            result = result.all_input_nodes[0]


# Graphs that must come out unharmed.

CHEAP = TestPrices(latency_us=20.0, bytes_per_us=1e4, copy_bytes_per_us=1e4)


@pytest.mark.quick
def test_a_graph_without_collectives_is_not_touched() -> None:
    b = GraphBuilder()
    gm = b.output(b.mm(b.input("x", 8, 8), b.input("y", 8, 8)))
    before = fingerprint(gm.graph)
    for wrap in ("auto", "greedy", "none", BLOCKS):
        outcome = overlap(gm.graph, wrap, TestPrices())
        assert outcome.plan.changes_nothing and outcome.num_collectives_before == 0
    assert fingerprint(gm.graph) == before


@pytest.mark.quick
def test_wrap_none_reports_and_changes_nothing() -> None:
    """Two gathers of 6 us, each exposed in front of a matmul of 10 us."""
    gm = two_linear_layers(GraphBuilder())
    before = fingerprint(gm.graph)
    outcome = overlap(gm.graph, "none", TestPrices())
    assert fingerprint(gm.graph) == before
    assert (outcome.before.step_us, outcome.after.step_us) == (32.0, 32.0)
    assert outcome.after.exposed_us == 12.0


@pytest.mark.quick
def test_a_search_that_ended_early_is_followed_by_a_full_one_if_no_plan_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """26 us is the bound: two matmuls of 10 us behind a gather of 6, which the first plan takes."""
    bounds: list[float] = []
    rank_choices = post_grad.rank_choices

    def watched(*args: Any, bound_us: float, **others: Any) -> Any:
        bounds.append(bound_us)
        return rank_choices(*args, bound_us=bound_us, **others)

    def refused(*args: Any) -> str:
        return "refused"

    monkeypatch.setattr(post_grad, "rank_choices", watched)
    gm = two_linear_layers(GraphBuilder())
    outcome = overlap(copy_graph(gm.graph), "auto", TestPrices(), limit=math.inf)
    assert outcome.after.step_us == 26.0 and bounds == [26.0]
    monkeypatch.setattr(post_grad, "_why_refused", refused)
    assert overlap(gm.graph, "auto", TestPrices(), limit=math.inf).plan.changes_nothing
    assert bounds == [26.0, 26.0, 0.0]


@pytest.mark.quick
def test_one_parameter_has_nothing_to_overlap_with() -> None:
    b = GraphBuilder()
    gm = b.output(b.mm(b.input("x", 8, 8), b.gather(b.parameter("w", 2, 8))))
    before = fingerprint(gm.graph)
    assert overlap(gm.graph, "auto", TestPrices()).plan.changes_nothing
    assert fingerprint(gm.graph) == before


@pytest.mark.quick
def test_a_parameter_used_twice_is_waited_for_once() -> None:
    b = GraphBuilder()
    first, second = b.parameter("layers.0.w", 2, 8), b.parameter("layers.1.w", 2, 8)
    weight = b.gather(first)
    x = b.mm(b.input("x", 8, 8), weight)
    x = b.mm(x, b.gather(second))
    gm = b.output(b.mm(x, weight))
    overlap(gm.graph, "auto", TestPrices())
    gm.graph.lint()
    assert len(collective_names(gm.graph)) == 4


@pytest.mark.quick
def test_gradients_of_a_parameter_used_twice_are_added_after_both_waits() -> None:
    """The cast behind the sum belongs to neither reduction."""
    b = GraphBuilder()
    x = b.input("tangents_1", 8, 8)
    shard = b.parameter("w", 2, 8)
    parts: list[fx.Node] = []
    for _ in range(2):
        x = b.mm(x, x)
        reduced = b.wait(b.stamp(b.scatter_start(x), shard))
        parts.append(b.call(aten.view.default, reduced, [16]))
    total = b.cast(b.call(aten.add.Tensor, *parts), torch.bfloat16)
    gm = b.output(b.mm(x, x), total)
    outcome = overlap(gm.graph, "auto", TestPrices(), math.inf)
    gm.graph.lint()
    # 3 matmuls of 10 us; both reductions of 6 us end before the last matmul does.
    assert outcome.after.step_us == 30.0


@pytest.mark.quick
def test_a_frozen_parameter_is_gathered_with_the_others() -> None:
    """It has no gradient: buckets of gathers mix frozen and trained, reductions have only these."""
    b = GraphBuilder()
    frozen, trained = b.parameter("layers.0.a", 2, 8), b.parameter("layers.0.b", 2, 8)
    x = b.input("tangents_1", 8, 8)
    for shard in (frozen, trained):
        x = b.mm(x, b.gather(shard))
    grad = b.wait(b.stamp(b.scatter_start(x), trained))
    gm = b.output(b.mm(x, x), grad)
    outcome = overlap(gm.graph, ["layers.*"], CHEAP, math.inf)
    assert [bucket.members for bucket in outcome.plan.buckets] == [
        ("all_gather_into_tensor_default", "all_gather_into_tensor_default_1")
    ]
    assert outcome.num_collectives_after == 2


@pytest.mark.quick
def test_two_process_groups_are_not_merged_and_run_side_by_side() -> None:
    """Gathers of 6 us on two communicators with links of their own: both hidden or shared."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.0.w{j}", 2, 8) for j in range(2)]
    x = b.input("x", 8, 8)
    for shard, group in zip(shards, ("pg0", "pg1"), strict=True):
        x = b.mm(x, b.gather(shard, group))
    gm = b.output(x)
    outcome = overlap(gm.graph, ["layers.*"], TestPrices(), math.inf)
    assert not outcome.plan.buckets
    assert outcome.after.step_us == 26.0


@pytest.mark.quick
def test_an_unknown_communication_op_stays_where_it_is() -> None:
    b = GraphBuilder()
    shards = [b.parameter(f"layers.0.w{j}", 2, 8) for j in range(3)]
    x, y = b.input("x", 8, 8), b.input("y", 8, 8)
    x = b.mm(b.mm(x, b.gather(shards[0])), b.gather(shards[1]))
    sent = b.call(peer_send, y, "pg0", name="sent")
    x = b.mm(b.mm(x, y), b.gather(shards[2]))
    gm = b.output(x, sent)
    outcome = overlap(gm.graph, ["layers.*"], CHEAP, math.inf)
    names = order(gm.graph)
    # The bucket of the two before it, the third gather after it.
    assert [len(bucket.members) for bucket in outcome.plan.buckets] == [2]
    assert names.index("all_gather_bucket_0") < names.index("sent")
    assert names.index("sent") < names.index("all_gather_into_tensor_default_2")


@pytest.mark.quick
def test_an_entry_that_matches_nothing_is_an_error_in_forward_only() -> None:
    gm = two_linear_layers(GraphBuilder())
    with pytest.raises(WrapError, match=r"'blocks\.\*' matches no sharded parameter"):
        overlap(gm.graph, ["blocks.*"], TestPrices())
    b = GraphBuilder()
    x = b.input("tangents_1", 8, 8)
    backward = b.output(b.mm(x, b.gather(b.parameter("layers.0.w", 2, 8))))
    overlap(backward.graph, ["blocks.*"], TestPrices())


@pytest.mark.quick
def test_a_limit_that_nothing_fits_is_an_error_and_leaves_the_graph_alone() -> None:
    """A weight of 256 bytes and two activations of 256 are live at once: 512 cannot fit."""
    gm = two_linear_layers(GraphBuilder())
    before = fingerprint(gm.graph)
    with pytest.raises(MemoryLimitError, match="raise memory_limit_gb to at least"):
        overlap(gm.graph, "auto", TestPrices(), limit=512)
    assert fingerprint(gm.graph) == before


@pytest.mark.quick
def test_a_limit_below_the_inputs_peak_is_obeyed_by_a_slower_plan() -> None:
    """Gathers of 18 us (1,024 bytes), both hidden under five matmuls but for 8 us: 58 us.

    The limit leaves room for one weight: the second gather is exposed whole, 58 - 8 + 18 + 8.
    """
    b = GraphBuilder()
    shards = [b.parameter(f"layers.{j}.w", 8, 8) for j in range(2)]
    starts = [b.gather_start(shard) for shard in shards]
    x = b.mm(b.input("x", 8, 32), b.input("y", 32, 32))
    for start in starts:
        weight = b.wait(start)
        x = b.mm(b.mm(x, weight), b.transpose(weight))
    gm = b.output(x)
    before = overlap(copy_graph(gm.graph), "none", TestPrices()).before
    limit = before.peak_bytes - 1024
    outcome = overlap(gm.graph, "auto", TestPrices(), limit=limit)
    assert outcome.after.peak_bytes <= limit < outcome.before.peak_bytes
    assert (outcome.before.step_us, outcome.after.step_us) == (58.0, 76.0)


@pytest.mark.quick
def test_moved_nodes_counts_what_changed_place() -> None:
    """The second gather moves in front of the first matmul: two nodes have changed place."""
    gm = two_linear_layers(GraphBuilder())
    outcome = overlap(gm.graph, "auto", TestPrices())
    assert outcome.after.step_us == 26.0  # 6 exposed + 2 matmuls of 10
    assert outcome.moved_nodes == 2
    assert collective_names(gm.graph) == [
        "all_gather_into_tensor_default",
        "wait_tensor_default",
        "all_gather_into_tensor_default_1",
        "wait_tensor_default_1",
    ]
    names = order(gm.graph)
    assert names.index("all_gather_into_tensor_default_1") < names.index("mm_default")
