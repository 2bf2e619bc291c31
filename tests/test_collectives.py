"""Recognition: what each collective is, which parameter it serves, whether it may move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder, aten, c10d, getitem, peer_send, scale_
from support.ranks import fake_process_group

from inductor_overlap.passes.collectives import Collective, find_collectives, group_name_of
from inductor_overlap.passes.fx_ops import collective_kind, is_barrier, is_start, written_inputs

pytestmark = pytest.mark.quick


def only(graph: fx.Graph) -> Collective:
    (found,) = find_collectives(graph)
    return found


def test_a_gather_is_described_in_padded_sizes() -> None:
    """A shard of 3 rows is padded to 4: 4 x 8 bfloat16 = 64 bytes in, 4 ranks: 256 bytes out."""
    b = GraphBuilder()
    shard = b.parameter("layers.0.wq.weight", 3, 8)
    padded = b.pad_rows(b.cast(shard, torch.bfloat16), 4)
    weight = b.first_rows(b.gather(padded), 13)
    b.output(b.mm(b.input("x", 8, 13, dtype=torch.bfloat16), weight))
    gather = only(b.graph)
    assert (gather.kind, gather.free, gather.why_fixed) == ("all_gather", True, "")
    assert (gather.size_bytes, gather.input_bytes, gather.output_bytes) == (256, 64, 256)
    assert (gather.input_shape, gather.output_shape) == ((4, 8), (16, 8))
    assert gather.dtype == torch.bfloat16
    assert (gather.fqn, gather.module) == ("layers.0.wq.weight", "layers.0.wq")
    assert [node.name for node in gather.head] == [
        "convert_element_type_default",
        "constant_pad_nd_default",
    ]
    assert gather.ranks == (0, 1, 2, 3)
    assert not gather.is_bucket


def test_a_reduction_is_described_with_its_tail() -> None:
    """8 x 8 float32 = 256 bytes in, a quarter out; unpad and cast follow."""
    b = GraphBuilder()
    x = b.input("tangents_1", 8, 8)
    shard = b.parameter("w", 2, 8)
    start = b.stamp(b.scatter_start(b.mm(x, x), op="avg"), shard)
    b.output(b.cast(b.first_rows(b.wait(start), 1), torch.bfloat16))
    scatter = only(b.graph)
    assert (scatter.kind, scatter.reduce_op, scatter.free) == ("reduce_scatter", "avg", True)
    assert (scatter.size_bytes, scatter.input_bytes, scatter.output_bytes) == (256, 256, 64)
    assert [node.name for node in scatter.tail] == ["slice_tensor", "convert_element_type_default"]
    assert scatter.bucket_key == ("reduce_scatter", "pg0", "torch.float32", "avg")


def test_hsdp_is_one_chain() -> None:
    b = GraphBuilder(group_size=2)
    x = b.input("tangents_1", 8, 8)
    scattered = b.scatter(b.mm(x, x), "shard")
    b.output(b.all_reduce(scattered, "replicate"))
    scatter, reduce = find_collectives(b.graph)
    assert scatter.free and reduce.free
    assert (scatter.follows, reduce.follows) == ("", scatter.name)


def test_nodes_behind_a_sum_belong_to_no_single_reduction() -> None:
    b = GraphBuilder()
    x = b.input("tangents_1", 8, 8)
    parts = [b.call(aten.view.default, b.scatter(b.mm(x, x)), [16]) for _ in range(2)]
    b.output(b.cast(b.call(aten.add.Tensor, *parts), torch.bfloat16))
    first, second = find_collectives(b.graph)
    assert [node.name for node in first.tail] == ["view_default"]
    assert [node.name for node in second.tail] == ["view_default_1"]


def test_a_cast_that_two_gathers_share_is_of_neither_head() -> None:
    b = GraphBuilder(group_size=2)
    shard = b.parameter("w", 4, 8)
    cast = b.cast(shard, torch.bfloat16)
    b.output(b.gather(cast, "pg1"), b.gather(cast, "pg2"))
    for gather in find_collectives(b.graph):
        assert gather.free and gather.head == () and list(gather.shared_head) == [cast]


def gathers_computed_value(b: GraphBuilder) -> None:
    x = b.input("x", 2, 8)
    b.output(b.gather(b.call(aten.add.Tensor, x, b.call(aten.neg.default, x))))


def writes_input(b: GraphBuilder) -> None:
    shard = b.parameter("w", 2, 8)
    b.call(scale_, shard)
    b.output(b.gather(shard))


def writes_view_of_input(b: GraphBuilder) -> None:
    shard = b.parameter("w", 2, 8)
    b.call(scale_, b.call(aten.view.default, shard, [16]))
    b.output(b.gather(shard))


def is_all_to_all(b: GraphBuilder) -> None:
    b.output(b.exchange(b.input("x", 8, 8)))


def is_used_inside(b: GraphBuilder) -> None:
    x = b.input("x", 8, 8)
    b.output(b.mm(b.all_reduce(x), x))


def is_coalesced(b: GraphBuilder) -> None:
    start = b.call(c10d.all_reduce_coalesced.default, [b.input("x", 8, 8)], "sum", "pg0")
    b.output(b.wait(b.call(getitem, start, 0)))


def is_in_place(b: GraphBuilder) -> None:
    b.output(b.wait(b.call(c10d.all_reduce_.default, b.input("x", 8, 8), "sum", "pg0")))


def has_two_waits(b: GraphBuilder) -> None:
    start = b.gather_start(b.parameter("w", 2, 8))
    b.output(b.wait(start), b.wait(start))


def has_no_wait(b: GraphBuilder) -> None:
    b.gather_start(b.parameter("w", 2, 8))
    b.output(b.input("x", 8, 8))


def is_read_before_the_wait(b: GraphBuilder) -> None:
    start = b.gather_start(b.parameter("w", 2, 8))
    b.output(b.wait(start), b.call(aten.view.default, start, [64]))


REFUSED = {
    gathers_computed_value: "it gathers a computed value, not a graph input",
    writes_input: "the graph writes the gathered input",
    writes_view_of_input: "the graph writes the gathered input",
    is_all_to_all: "all_to_all is on the critical path",
    is_used_inside: "its result is used inside the graph",
    is_coalesced: "coalesced or in-place form",
    is_in_place: "coalesced or in-place form",
    has_two_waits: "2 waits where one was expected",
    has_no_wait: "0 waits where one was expected",
    is_read_before_the_wait: "its unfinished result is used before the wait",
}


@pytest.mark.parametrize("write", REFUSED, ids=lambda write: write.__name__)
def test_what_is_not_free_says_why(write: Any) -> None:
    b = GraphBuilder()
    write(b)
    (found,) = find_collectives(b.graph)
    assert not found.free and found.why_fixed == REFUSED[write]
    assert found.head == found.tail == ()
    assert f"fixed: {found.why_fixed}" in repr(found)


def test_group_may_be_a_node() -> None:
    class Group:
        group_name = "7"

    b = GraphBuilder()
    group = b.graph.placeholder("group")
    group.meta["val"] = Group()
    assert group_name_of(group) == "7"
    assert group_name_of("3") == "3"


def test_ranks_of_a_registered_group_are_read_from_it() -> None:
    with fake_process_group(8):
        b = GraphBuilder(group_size=8)
        b.output(b.gather(b.parameter("w", 2, 8), "0"), b.gather(b.parameter("v", 2, 8), "?"))
        known, unknown = find_collectives(b.graph)
    assert known.ranks == tuple(range(8)) == unknown.ranks


def test_payload_order_is_parameter_order() -> None:
    b = GraphBuilder()
    first, second = b.parameter("a", 2, 8), b.parameter("b", 2, 8)
    b.output(b.gather(second), b.gather(first))
    assert [c.input_position for c in find_collectives(b.graph)] == [1, 0]


# What an op is.


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (c10d.all_gather_into_tensor_coalesced.default, "all_gather"),
        (c10d.all_gather_into_tensor_out.default, "all_gather"),
        (c10d.reduce_scatter_tensor.default, "reduce_scatter"),
        (c10d.all_reduce_.default, "all_reduce"),
        (c10d.all_to_all_single.default, "all_to_all"),
        (c10d.broadcast_.default, "broadcast"),
    ],
)
def test_every_form_has_the_kind_of_its_collective(target: Any, kind: str) -> None:
    node = fx.Graph().call_function(target)
    assert is_start(node) and collective_kind(node) == kind and not is_barrier(node)


def test_barriers() -> None:
    b = GraphBuilder()
    x = b.input("x", 8, 8)
    functional = torch.ops.higher_order.auto_functionalized
    wrapped = b.graph.call_function(functional, (peer_send,), {"x": x, "group_name": "pg0"})
    assert is_barrier(b.call(peer_send, x, "pg0"))
    assert is_barrier(wrapped)
    assert is_barrier(b.graph.call_function(torch.ops.higher_order.with_effects, ()))
    assert not is_barrier(b.graph.call_function(functional, (scale_,), {"x": x}))
    assert not is_barrier(b.mm(x, x))
    assert not is_barrier(b.all_reduce(x))


def test_a_branch_that_communicates_makes_its_op_a_barrier() -> None:
    b = GraphBuilder()
    inner = GraphBuilder()
    quiet = GraphBuilder()
    root = torch.nn.Module()
    root.loud = inner.output(inner.all_reduce(inner.input("x", 8, 8)))
    root.quiet = quiet.output(quiet.call(aten.neg.default, quiet.input("x", 8, 8)))
    b.graph.owning_module = fx.GraphModule(root, fx.Graph())
    for name, expected in (("loud", True), ("quiet", False)):
        b.graph.owning_module.add_module(name, getattr(root, name))
        branch = b.graph.get_attr(name)
        call = b.graph.call_function(torch.ops.higher_order.cond, (True, branch, branch, ()))
        assert is_barrier(call) == expected


def test_written_inputs_come_from_the_schema() -> None:
    b = GraphBuilder()
    x, y = b.input("x", 8, 8), b.input("y", 8, 8)
    assert written_inputs(b.call(aten.copy_.default, x, y)) == [x]
    assert written_inputs(b.call(aten.add.Tensor, x, y)) == []
    opaque = b.graph.call_function(torch.ops.higher_order.cond, (x, y))
    assert written_inputs(opaque) == [x, y]
