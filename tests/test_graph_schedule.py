"""Reading a graph as a program and writing an order back: tasks, dependences, prices, memory."""

from __future__ import annotations

import pytest
import torch
from support.graphs import (
    GraphBuilder,
    TestPrices,
    aten,
    named,
    order,
    peer_send,
    scale_,
    two_linear_layers,
)

from inductor_overlap.cost_model.schedule import Task
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.bucketing import merge_bucket
from inductor_overlap.passes.collectives import find_collectives
from inductor_overlap.passes.graph_schedule import read_graph, write_order

pytestmark = pytest.mark.quick


def read(b: GraphBuilder, prices: TestPrices | None = None) -> dict[str, Task]:
    program = read_graph(b.graph, prices or TestPrices()).program
    program.schedule.validate()
    return program.schedule.by_name


def test_two_layers_take_what_one_adds_up() -> None:
    """Two gathers of 2 + 256 / 64 = 6 us, each exposed before a matmul of 10 us: 32 us."""
    gm = two_linear_layers(GraphBuilder())
    read_in = read_graph(gm.graph, TestPrices())
    program = read_in.program
    assert [task.kind for task in program.schedule.tasks] == ["start", "wait", "compute"] * 2
    assert len(program.gathers) == 2 and program.reductions == []
    timeline = simulate(program.schedule)
    assert (timeline.step_us, timeline.exposed_us) == (32.0, 12.0)
    # First matmul: weight and result; second: result before, weight, result. 256 bytes each.
    assert timeline.peak_bytes == 768


def test_the_wire_time_is_the_share_of_all_bytes_of_the_key() -> None:
    """Latency 2 is left out: 256 bytes at 64 bytes a us are 4 us; a floor, so at most that plus."""
    gm = two_linear_layers(GraphBuilder())
    tasks = read_graph(gm.graph, TestPrices()).program.schedule.by_name
    start = tasks["all_gather_into_tensor_default"]
    assert start.duration_us == 6.0
    assert 4.0 <= start.wire_us <= 5.0


def test_a_coalesced_bucket_is_one_start_and_one_wait() -> None:
    """Two gathers of 256 bytes in one launch: 2 + 0.5 + 512 / 64; its second wait takes no time."""
    gm = two_linear_layers(GraphBuilder())
    merged = merge_bucket("b", find_collectives(gm.graph), form="coalesced")
    for node in (merged.start, *merged.items, *merged.wait):
        named(gm.graph, "mm_default").prepend(node)
    source = read_graph(gm.graph, TestPrices(member_us=0.5))
    assert source.nodes["b"][0].name == "b" and len(source.nodes["b"]) == 3  # and its items
    (bucket,) = source.program.collectives
    tasks = source.program.schedule.by_name
    start, first = tasks["b"], tasks[bucket.wait]
    assert (start.kind, start.duration_us, start.writes) == ("start", 10.5, ("b.0", "b.1"))
    assert start.wire_us == pytest.approx(8.0) and start.latency_us == pytest.approx(2.0)
    assert first.kind == "wait" and first.collective == "b"
    (second,) = [t for t in tasks.values() if t.name.startswith("wait") and t is not first]
    assert (second.kind, second.duration_us, second.reads) == ("compute", 0.0, ("b.1",))
    assert second.deps == ("b", first.name) and second.name in source.program.movable


def test_a_shard_is_prepared_by_one_task_priced_by_padded_shape() -> None:
    """Whether the rank pads or not: 4 x 8 bfloat16 are 64 bytes, 1 us at 64 bytes a us."""
    prices = TestPrices(copy_bytes_per_us=64.0)
    for rows in (4, 3):
        b = GraphBuilder()
        shard = b.pad_rows(b.cast(b.parameter("w", rows, 8), torch.bfloat16), 4)
        b.output(b.gather(shard))
        task = read(b, prices)["all_gather_into_tensor_default.prepare"]
        assert task.duration_us == 1.0
        assert task.writes == (task.name,)


def test_a_gradient_is_finished_by_one_task_priced_by_padded_shape() -> None:
    """Cast to bfloat16 or not: without a cast the unpadded gradient is a view and free."""
    prices = TestPrices(copy_bytes_per_us=64.0)
    for cast, expected_us in ((True, 2 * 64 / 64), (False, 0.0)):
        b = GraphBuilder()
        x = b.input("tangents_1", 8, 16, dtype=torch.bfloat16)
        grad = b.first_rows(b.scatter(x, group_size=2), 3)
        b.output(b.cast(grad, torch.float32) if cast else grad)
        task = read(b, prices)["reduce_scatter_tensor_default.finish"]
        # 4 x 16 elements; as float32 256 bytes, 4 us.
        assert task.duration_us == (4.0 if cast else expected_us)


def test_sums_of_gradients_cost_the_same_on_every_rank() -> None:
    """4 x 8 float32 are 128 bytes, 2 us, whether the rank holds 4 rows of them or 3."""
    prices = TestPrices(copy_bytes_per_us=64.0)
    for rows in (4, 3):
        b = GraphBuilder(group_size=2)
        x = b.input("tangents_1", 8, 8)
        parts = [b.first_rows(b.scatter(b.mm(x, x)), rows) for _ in range(2)]
        b.output(b.call(aten.add.Tensor, *parts))
        assert read(b, prices)["add_tensor"].duration_us == 2.0


def test_a_barrier_holds_what_moves_on_both_sides() -> None:
    b = GraphBuilder()
    first, second = b.parameter("a", 2, 8), b.parameter("b", 2, 8)
    x = b.mm(b.input("x", 8, 8), b.gather(first))
    sent = b.call(peer_send, b.input("y", 8, 8), "pg0", name="sent")
    b.output(b.mm(x, b.gather(second)), sent)
    tasks = read(b)
    assert "wait_tensor_default" in tasks["sent"].deps
    assert "sent" in tasks["all_gather_into_tensor_default_1"].deps
    program = read_graph(b.graph, TestPrices()).program
    keys = {collective.bucket_key for collective in program.gathers}
    assert len(keys) == 2, "collectives on two sides of a barrier share no bucket"
    windows = program.windows
    assert windows.ready_at == {
        "all_gather_into_tensor_default": 0,
        "all_gather_into_tensor_default_1": 2,  # behind the matmul and the barrier
    }


def test_reads_stay_behind_writes_and_writes_behind_waits() -> None:
    b = GraphBuilder()
    x = b.input("tangents_1", 8, 8)
    grad = b.mm(x, x)
    b.call(scale_, grad, name="before")
    reduced = b.scatter(grad)
    b.call(scale_, grad, name="after")
    b.output(reduced)
    tasks = read(b)
    assert "before" in tasks["reduce_scatter_tensor_default"].deps
    assert "wait_tensor_default" in tasks["after"].deps


def test_reductions_in_a_chain_differ_in_bucket_key() -> None:
    b = GraphBuilder()
    x = b.input("tangents_1", 8, 8)
    once = b.all_reduce(b.mm(x, x))
    b.output(b.all_reduce(once))
    program = read_graph(b.graph, TestPrices()).program
    first, second = program.reductions
    assert first.bucket_key[:4] == second.bucket_key[:4]
    assert first.bucket_key != second.bucket_key


def test_write_order_counts_what_moves() -> None:
    gm = two_linear_layers(GraphBuilder())
    nodes = read_graph(gm.graph, TestPrices()).nodes
    names = order(gm.graph)
    assert write_order(gm.graph, nodes, names) == 0
    start = "all_gather_into_tensor_default_1"
    moved = [start, *(name for name in names if name != start)]
    # The start goes from place 4 to 1: it and the three it passes have another place.
    assert write_order(gm.graph, nodes, moved) == 4
    gm.graph.lint()
    assert order(gm.graph) == moved
