"""Golden graphs of the post-grad pass: what is merged and moved, and what is refused.

Beside each golden the invariants in code: same matmuls, each start waited for once, memory within
the limit, a second run changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.fx as fx
from support.goldens import assert_golden, golden_text, graph_lines, metric_lines
from support.graphs import (
    GraphBuilder,
    TestPrices,
    aten,
    c10d,
    compute_calls,
    fingerprint,
    getitem,
    peer_send,
    two_linear_layers,
)

from inductor_overlap.passes.auto_wrap import parse_wrap
from inductor_overlap.passes.post_grad import overlap_graph

pytestmark = pytest.mark.quick

SLOW_START = TestPrices(latency_us=8.0, bytes_per_us=256.0, copy_bytes_per_us=1024.0)
"""Latency dominates: 8 us and 1 us for each 256 bytes, so that buckets pay."""

SLOW_COPY = TestPrices(latency_us=8.0, bytes_per_us=256.0, copy_bytes_per_us=128.0, member_us=0.5)
"""The same, but copies are slow, and a second collective in one launch takes half a microsecond."""


@dataclass(frozen=True)
class Case:
    """A graph, how it is planned, and whether the pass must leave it alone."""

    build: Callable[[], fx.GraphModule]
    wrap: str | list[str | list[str]] = "auto"
    prices: TestPrices = field(default_factory=TestPrices)
    limit_bytes: float | None = float("inf")
    unchanged: bool = False


def prefetch() -> fx.GraphModule:
    """Bytes dominate: the second gather is hidden under the first matmul, nothing is merged."""
    return two_linear_layers(GraphBuilder())


def block_bucket() -> fx.GraphModule:
    """Latency dominates: the two weights of a block are gathered as one."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.{i}.w{j}", 2, 8) for i in range(2) for j in range(2)]
    x = b.input("x", 8, 8)
    for shard in shards:
        x = b.mm(x, b.gather(shard))
    return b.output(x)


def gradient_bucket() -> fx.GraphModule:
    """Backward: two reduce-scatters of a block become one, hidden under a later matmul."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.{i}.w", 2, 8) for i in (0, 0, 1)]
    x = b.input("tangents_1", 8, 8)
    grads: list[fx.Node] = []
    for shard in shards:
        x = b.mm(x, x)
        grads.append(b.wait(b.stamp(b.scatter_start(x), shard)))
    return b.output(b.mm(x, x), *grads)


def uneven_cast() -> fx.GraphModule:
    """Casts, pads and unpads of uneven shards stay outside the bucket."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.0.w{j}", 1, 8) for j in range(2)]
    x = b.input("x", 8, 8, dtype=torch.bfloat16)
    for shard in shards:
        padded = b.pad_rows(b.cast(shard, torch.bfloat16), 2)
        weight = b.first_rows(b.gather(padded), 7)
        x = b.mm(b.mm(x, b.transpose(weight)), weight)
    return b.output(x)


def hybrid_shard() -> fx.GraphModule:
    """HSDP: the bucket of the reduce-scatters feeds the bucket of the all-reduces, no repacking."""
    b = GraphBuilder(group_size=2)
    x = b.input("tangents_1", 8, 8)
    grads: list[fx.Node] = []
    for index in range(2):
        shard = b.parameter(f"layers.0.w{index}", 4, 8)
        x = b.mm(x, x)
        scattered = b.wait(b.stamp(b.scatter_start(x, "shard"), shard))
        grads.append(b.wait(b.stamp(b.reduce_start(scattered, "replicate"), shard)))
    return b.output(b.mm(x, x), *grads)


def coalesced_bucket() -> fx.GraphModule:
    """A grouped launch costs little, copies a lot: gathers are launched together, not packed."""
    return block_bucket()


def coalesced_hybrid_shard() -> fx.GraphModule:
    """HSDP of coalesced buckets: what was scattered together is all-reduced together."""
    return hybrid_shard()


def two_groups() -> fx.GraphModule:
    """Gathers of two process groups are not merged, in one module or not."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.0.w{j}", 2, 8) for j in range(2)]
    x = b.input("x", 8, 8)
    for shard, group in zip(shards, ("pg0", "pg1"), strict=True):
        x = b.mm(x, b.gather(shard, group))
    return b.output(x)


def two_dtypes() -> fx.GraphModule:
    """Nor are gathers of two dtypes."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.0.w{j}", 2, 8) for j in range(2)]
    x = b.input("x", 8, 8)
    low = b.gather(b.cast(shards[0], torch.bfloat16))
    x = b.mm(x, b.cast(low, torch.float32))
    return b.output(b.mm(x, b.gather(shards[1])))


def computed_value() -> fx.GraphModule:
    """Refused: what is gathered is computed from an activation."""
    b = GraphBuilder()
    x, y = b.input("x", 2, 8), b.input("y", 8, 8)
    both = b.call(aten.add.Tensor, x, b.mm(x, y))
    return b.output(b.mm(y, b.gather(both)))


def mutated_input() -> fx.GraphModule:
    """Refused: the graph writes the shard that it gathers, after a matmul."""
    b = GraphBuilder()
    shard = b.parameter("layers.0.w", 2, 8)
    x = b.mm(b.input("x", 8, 8), b.input("y", 8, 8))
    b.call(aten.copy_.default, shard, b.call(aten.neg.default, shard))
    return b.output(b.mm(x, b.gather(shard)))


def critical_all_reduce() -> fx.GraphModule:
    """Refused: tensor parallelism's all-reduce is needed at once."""
    b = GraphBuilder()
    x = b.mm(b.input("x", 8, 8), b.input("y", 8, 8))
    return b.output(b.mm(b.all_reduce(x), x))


def barrier() -> fx.GraphModule:
    """An unknown communication op: the gather behind it is not started before it."""
    b = GraphBuilder()
    shard = b.parameter("layers.0.w", 2, 8)
    x, y = b.input("x", 8, 8), b.input("y", 8, 8)
    x = b.mm(x, y)
    sent = b.call(peer_send, y, "pg1")
    x = b.mm(x, y)
    return b.output(b.mm(x, b.gather(shard)), sent)


def symbolic_sizes() -> fx.GraphModule:
    """A gather of symbolic size moves but is not merged."""
    b = GraphBuilder()
    rows = b.dynamic_size(6)
    shards = [b.input(f"primals_{j}", rows, 8) for j in range(2)]
    x, y = b.input("x", 8, rows * 4), b.input("y", rows, 8)
    small = b.mm(b.mm(x, b.gather(shards[0])), b.transpose(y))
    return b.output(small, b.gather(shards[1]))


def coalesced() -> fx.GraphModule:
    """Refused: one collective of several tensors."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.0.w{j}", 2, 8) for j in range(2)]
    x = b.mm(b.input("x", 8, 8), b.input("y", 8, 8))
    start = b.call(c10d.all_gather_into_tensor_coalesced.default, shards, 4, "pg0")
    for index in range(2):
        x = b.mm(x, b.wait(b.call(getitem, start, index)))
    return b.output(x)


def over_the_limit() -> fx.GraphModule:
    """The bucket of three does not fit the limit; what is largest at its peak is left out."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.0.w{j}", rows, 8) for j, rows in enumerate((2, 2, 8))]
    x = b.input("x", 8, 8)
    for shard in shards:
        weight = b.gather(shard)
        x = b.mm(b.mm(x, b.transpose(weight)), weight)
    return b.output(x)


def nothing_to_gain() -> fx.GraphModule:
    """One gather, needed by the first kernel: there is nothing to hide it under."""
    b = GraphBuilder()
    shard = b.parameter("layers.0.w", 2, 8)
    return b.output(b.mm(b.input("x", 8, 8), b.gather(shard)))


def shared_gather() -> fx.GraphModule:
    """A gather with two readers and an early second gather: it waits at its first reader."""
    b = GraphBuilder()
    shards = [b.parameter(f"layers.{j}.w", 2, 8) for j in range(2)]
    x = b.input("x", 8, 8)
    weights = [b.gather(shard) for shard in shards]
    x = b.mm(x, weights[0])
    x = b.mm(x, b.transpose(weights[0]))
    return b.output(b.mm(x, weights[1]))


CASES = {
    "post_grad/prefetch": Case(prefetch),
    "post_grad/shared_gather": Case(shared_gather),
    "bucketing/block_bucket": Case(block_bucket, ["layers.*"], SLOW_START),
    "bucketing/gradient_bucket": Case(gradient_bucket, ["layers.*"], SLOW_START),
    "bucketing/uneven_cast": Case(uneven_cast, ["layers.*"], SLOW_START),
    "bucketing/hybrid_shard": Case(hybrid_shard, ["layers.*"], SLOW_START),
    "bucketing/coalesced_bucket": Case(coalesced_bucket, ["layers.*"], SLOW_COPY),
    "bucketing/coalesced_hybrid_shard": Case(coalesced_hybrid_shard, ["layers.*"], SLOW_COPY),
    "bucketing/two_groups": Case(two_groups, ["layers.*"], SLOW_START),
    "bucketing/two_dtypes": Case(two_dtypes, ["layers.*"], SLOW_START),
    "bucketing/symbolic_sizes": Case(symbolic_sizes, "auto", SLOW_START),
    "bucketing/over_the_limit": Case(over_the_limit, ["layers.*"], SLOW_START, 2600.0),
    "collectives/computed_value": Case(computed_value, unchanged=True),
    "collectives/mutated_input": Case(mutated_input, unchanged=True),
    "collectives/critical_all_reduce": Case(critical_all_reduce, unchanged=True),
    "collectives/coalesced": Case(coalesced, unchanged=True),
    "collectives/barrier": Case(barrier),
    "post_grad/nothing_to_gain": Case(nothing_to_gain, unchanged=True),
}


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    case = CASES[name]
    gm = case.build()
    before, kernels = graph_lines(gm.graph), matmuls(gm.graph)
    outcome = overlap_graph(
        gm.graph, case.prices, parse_wrap(case.wrap), memory_limit_bytes=case.limit_bytes
    )
    gm.graph.lint()
    after = graph_lines(gm.graph)
    text = golden_text(str(case.build.__doc__), before, after, metric_lines(outcome))
    assert_golden(name, text)
    assert matmuls(gm.graph) == kernels
    assert (after == before) == case.unchanged
    assert outcome.after.peak_bytes <= outcome.memory_limit_bytes
    assert outcome.after.step_us <= outcome.before.step_us
    first = fingerprint(gm.graph)
    overlap_graph(gm.graph, case.prices, parse_wrap(case.wrap), memory_limit_bytes=case.limit_bytes)
    assert fingerprint(gm.graph) == first


def matmuls(graph: fx.Graph) -> list[str]:
    return [call for call in compute_calls(graph) if call.startswith("mm ")]
