"""What a plan promises, what its graph turns out to take, and the bound, on small graphs.

Kernels and launches are most of the time of these graphs: what counts them twice, or not at all,
shows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder, TestPrices, aten

import inductor_overlap as io
from inductor_overlap.cost_model.cluster_prices import ClusterCostModel
from inductor_overlap.cost_model.schedule import Machine
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.auto_wrap import parse_wrap
from inductor_overlap.passes.bucket_schedule import bucket_program
from inductor_overlap.passes.collectives import find_collectives
from inductor_overlap.passes.graph_schedule import read_graph
from inductor_overlap.passes.post_grad import overlap_graph

pytestmark = pytest.mark.quick

ONE_BUCKET = [["layers.*"]]


def cast_and_gathered(count: int) -> fx.GraphModule:
    b = GraphBuilder(group_size=8)
    shards = [b.parameter(f"layers.{i}.w", 64, 512) for i in range(count)]
    x = b.input("x", 4096, 512, dtype=torch.bfloat16)
    for shard in shards:
        x = b.mm(x, b.gather(b.cast(shard, torch.bfloat16)))
    return b.output(x)


def reduced_and_cast(count: int) -> fx.GraphModule:
    b = GraphBuilder(group_size=8)
    shards = [b.parameter(f"layers.{i}.w", 64, 512) for i in range(count)]
    x = tangents = b.input("tangents_1", 512, 512, dtype=torch.bfloat16)
    outputs: list[fx.Node] = []
    for shard in shards:
        x = b.mm(x, tangents)
        outputs.append(b.cast(b.wait(b.stamp(b.scatter_start(x), shard)), torch.float32))
    return b.output(*outputs)


def cast_and_reduced(count: int) -> fx.GraphModule:
    """Gradients that the kernel which packs their bucket can cast."""
    b = GraphBuilder(group_size=4)
    shards = [b.parameter(f"layers.{i}.w", 16, 64) for i in range(count)]
    tangents, x = b.input("tangents_1", 64, 64), b.input("big", 2048, 2048)
    big = x
    outputs: list[fx.Node] = []
    for shard in shards:
        x = b.mm(x, big)
        corner = b.call(aten.slice.Tensor, b.call(aten.slice.Tensor, x, 0, 0, 64), 1, 0, 64)
        gradient = b.cast(b.mm(tangents, corner), torch.bfloat16)
        outputs.append(b.wait(b.stamp(b.scatter_start(gradient), shard)))
    return b.output(x, *outputs)


def gathered(count: int) -> fx.GraphModule:
    b = GraphBuilder(group_size=4)
    shards = [b.parameter(f"layers.{i}.w", 16, 64) for i in range(count)]
    x = b.input("x", 64, 64)
    for shard in shards:
        x = b.mm(x, b.gather(shard))
    return b.output(x)


class Roofline:
    """Bytes over a bandwidth: a link without latency."""

    def compute_us(self, node: fx.Node) -> float:
        return 20.0 if "mm" in node.name else 0.0

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return size_bytes / 50e3


@pytest.mark.parametrize("build", [cast_and_gathered, reduced_and_cast])
def test_a_coalesced_bucket_takes_what_was_planned(build: Callable[[int], fx.GraphModule]) -> None:
    """Casts of tensors that are not packed stay kernels of their own."""
    gm = build(8)
    prices = ClusterCostModel(io.Cluster.preset("h100-ib"))
    program = read_graph(gm.graph, prices).program
    outcome = overlap_graph(
        gm.graph, prices, parse_wrap(ONE_BUCKET), memory_limit_bytes=float(2**33)
    )
    assert [bucket.form for bucket in outcome.plan.buckets] == ["coalesced"]
    planned = bucket_program(program, outcome.plan.buckets).with_order(outcome.plan.order)
    assert outcome.after.compute_us == pytest.approx(simulate(planned.schedule).compute_us)
    assert outcome.after.step_us == pytest.approx(simulate(planned.schedule).step_us)


@dataclass
class RampingLink(TestPrices):
    """The link is kept for all but the latency, small sizes longer for their bytes."""

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return 40 + self.link_us(kind, size_bytes, ranks)

    def link_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return size_bytes / (1e3 if size_bytes >= 2**16 else 500)

    def machine(self, groups: Mapping[str, Sequence[int]]) -> Machine:
        return Machine(queue_width=2)


@pytest.mark.parametrize("copy_bytes_per_us", [1e6, 1.0])
def test_a_bucket_keeps_its_link_as_planned(copy_bytes_per_us: float) -> None:
    """16 KiB: 32.8 us alone and in a grouped launch, 16.4 us in a packed bucket of 16."""
    gm = gathered(16)
    prices = RampingLink(
        latency_us=40, bytes_per_us=500, copy_bytes_per_us=copy_bytes_per_us, member_us=0
    )
    program = read_graph(gm.graph, prices).program
    singles = [program.schedule.by_name[gather.name].link_us for gather in program.gathers]
    assert singles == pytest.approx([4 * 64 * 64 / 500] * 16)
    outcome = overlap_graph(
        gm.graph, prices, parse_wrap(ONE_BUCKET), memory_limit_bytes=float(2**30)
    )
    (bucket,) = outcome.plan.buckets
    planned = bucket_program(program, outcome.plan.buckets).schedule.by_name[bucket.name]
    read = outcome.schedule_after.by_name[bucket.name]
    assert planned.link_us == pytest.approx(read.link_us)
    is_packed = bucket.form == "packed"
    assert is_packed == (copy_bytes_per_us == 1e6)
    expected_us = 16 * 4 * 64 * 64 / 1e3 if is_packed else min(read.duration_us, sum(singles))
    assert read.link_us == pytest.approx(expected_us)
    (collective,) = find_collectives(gm.graph)
    assert collective.link_us(prices) == pytest.approx(expected_us)


@pytest.mark.parametrize("wrap", ["auto", ONE_BUCKET])
@pytest.mark.parametrize("count", [4, 16])
def test_the_bound_leaves_out_casts_that_packing_does(wrap: str | list[str], count: int) -> None:
    report = io.optimize(
        cast_and_reduced(count),
        wrap=wrap,  # pyright: ignore[reportArgumentType]
        cluster=io.Cluster.preset("h100-ib"),
        memory_limit_gb=4,
    )
    assert report.lower_bound_us <= report.after.step_us * (1 + 1e-9)


def test_the_bound_lets_a_link_without_latency_save_launches() -> None:
    report = io.optimize(
        gathered(12),
        wrap=ONE_BUCKET,  # pyright: ignore[reportArgumentType]
        cost_model=Roofline(),
        memory_limit_gb=1,
    )
    assert len(report.plan.buckets) == 1
    assert report.lower_bound_us <= report.after.step_us * (1 + 1e-9)


def test_what_was_left_out_is_said_of_coalesced_buckets_too() -> None:
    prices = TestPrices(latency_us=50, bytes_per_us=1e4, copy_bytes_per_us=5e3, member_us=0.1)
    peak_bytes = simulate(read_graph(gathered(6).graph, prices).program.schedule).peak_bytes
    outcome = overlap_graph(
        gathered(6).graph, prices, parse_wrap(ONE_BUCKET), memory_limit_bytes=2.0 * peak_bytes
    )
    (bucket,) = outcome.plan.buckets
    left_out = 6 - len(bucket.members)
    assert (bucket.form, left_out > 0) == ("coalesced", True)
    (note,) = (warning for warning in outcome.warnings if "left out of their buckets" in warning)
    assert note.count("the gather of layers.") == left_out
    assert note.endswith("a larger memory_limit_gb merges more")


def test_packing_takes_the_same_on_ranks_that_pad_and_as_planned() -> None:
    prices = ClusterCostModel(io.Cluster.preset("cpu-gloo"))
    packing_us: list[float] = []
    for rows in (64, 40):
        b = GraphBuilder(group_size=2)
        low = torch.bfloat16
        shards = [b.parameter(f"layers.{i}.w", rows, 512) for i in range(4)]
        x, back = b.input("x", 512, 128, dtype=low), b.input("back", 512, 128, dtype=low)
        for shard in shards:
            x = b.mm(b.mm(x, b.gather(b.pad_rows(b.cast(shard, low), 64))), back)
        gm = b.output(x)
        program = read_graph(gm.graph, prices).program
        outcome = overlap_graph(
            gm.graph, prices, parse_wrap(ONE_BUCKET), memory_limit_bytes=float(2**30)
        )
        (bucket,) = outcome.plan.buckets
        planned = bucket_program(program, outcome.plan.buckets).schedule.by_name
        read = outcome.schedule_after.by_name
        packing_us += [s[f"{bucket.name}.pack"].duration_us for s in (planned, read)]
    assert packing_us[0] > 0
    assert packing_us[1:] == pytest.approx([packing_us[0]] * 3)


@pytest.mark.parametrize("count", [8, 80])
def test_a_large_packed_bucket_takes_what_was_planned(count: int) -> None:
    """Each part of a concatenation has a kernel of its own, however many there are."""
    b = GraphBuilder(group_size=8)
    shards = [b.parameter(f"layers.{i}.w", 64, 512) for i in range(count)]
    tangents = b.input("tangents_1", 512, 512)
    outputs: list[fx.Node] = []
    for shard in shards:
        gradient = b.cast(b.mm(tangents, tangents), torch.bfloat16)
        outputs.append(b.wait(b.stamp(b.scatter_start(gradient), shard)))
    gm = b.output(*outputs)
    prices = ClusterCostModel(io.Cluster.preset("cpu-gloo"))
    program = read_graph(gm.graph, prices).program
    outcome = overlap_graph(
        gm.graph, prices, parse_wrap(ONE_BUCKET), memory_limit_bytes=float(2**33)
    )
    (bucket,) = outcome.plan.buckets
    assert (bucket.form, len(bucket.members)) == ("packed", count)
    planned = bucket_program(program, outcome.plan.buckets).with_order(outcome.plan.order)
    assert outcome.after.compute_us == pytest.approx(simulate(planned.schedule).compute_us)
