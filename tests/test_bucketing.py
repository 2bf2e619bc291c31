"""The rewrite: what nodes a bucket is made of, that values stay, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import pytest
import torch
import torch.fx as fx
from hypothesis import given, settings
from hypothesis import strategies as st
from support.graphs import GraphBuilder
from support.interpreter import run_on_ranks
from support.random_graphs import make_inputs

from inductor_overlap.passes.bucket_nodes import MergedBucket, bucket_members
from inductor_overlap.passes.bucketing import merge_bucket, why_not_bucketed
from inductor_overlap.passes.collectives import BUCKET, find_collectives
from inductor_overlap.passes.fx_ops import overload
from inductor_overlap.passes.plan import BucketForm

pytestmark = pytest.mark.quick

SHAPES = st.lists(
    st.sampled_from([(4, 3), (1, 5), (0, 2), (7,), (2, 3, 5)]), min_size=2, max_size=5
)
WORLD = 2
GROUPS = {"pg0": [[0, 1]]}


FORMS = st.sampled_from(get_args(BucketForm))


def merge_and_sort(gm: fx.GraphModule, form: BucketForm = "packed") -> MergedBucket:
    merged = merge_bucket("bucket", find_collectives(gm.graph), form=form)
    _sort(gm.graph)
    gm.graph.lint()
    return merged


def _sort(graph: fx.Graph) -> None:
    """Every node directly behind its last input: `merge_bucket` leaves the order to its caller."""
    placed: set[fx.Node] = set()
    nodes = list(graph.nodes)
    cursor = graph._root  # pyright: ignore[reportPrivateUsage]
    while nodes:
        node = next(n for n in nodes if placed.issuperset(n.all_input_nodes))
        cursor.append(node)
        cursor = node
        placed.add(node)
        nodes.remove(node)


def assert_same_values(gm: fx.GraphModule, run: Callable[[], object]) -> None:
    inputs = [make_inputs(gm, rank) for rank in range(WORLD)]
    expected = run_on_ranks([gm] * WORLD, inputs, GROUPS)
    run()
    got = run_on_ranks([gm] * WORLD, inputs, GROUPS)
    for theirs, ours in zip(expected, got, strict=True):
        assert all(torch.equal(want, have) for want, have in zip(theirs, ours, strict=True))


def gathers(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> fx.GraphModule:
    b = GraphBuilder(WORLD)
    shards = [b.parameter(f"w{i}", *s, dtype=dtype) for i, s in enumerate(shapes)]
    return b.output(*[b.gather(shard) for shard in shards])


def reductions(shapes: Sequence[tuple[int, ...]], kind: str, dtype: torch.dtype) -> fx.GraphModule:
    b = GraphBuilder(WORLD)
    grads = [
        b.input(f"tangents_{i}", WORLD * s[0], *s[1:], dtype=dtype) for i, s in enumerate(shapes)
    ]
    reduce = b.scatter if kind == "reduce_scatter" else b.all_reduce
    return b.output(*[reduce(grad) for grad in grads])


@settings(max_examples=15)
@given(SHAPES, st.sampled_from([torch.float32, torch.bfloat16]), FORMS)
def test_gathers_of_any_shapes_keep_their_values(
    shapes: list[tuple[int, ...]], dtype: torch.dtype, form: BucketForm
) -> None:
    gm = gathers(shapes, dtype)
    assert_same_values(gm, lambda: merge_and_sort(gm, form))
    assert len(find_collectives(gm.graph)) == 1


@settings(max_examples=15)
@given(
    SHAPES,
    st.sampled_from(["reduce_scatter", "all_reduce"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    FORMS,
)
def test_reductions_of_any_shapes_keep_their_values(
    shapes: list[tuple[int, ...]], kind: str, dtype: torch.dtype, form: BucketForm
) -> None:
    gm = reductions(shapes, kind, dtype)
    assert_same_values(gm, lambda: merge_and_sort(gm, form))
    assert len(find_collectives(gm.graph)) == 1


def test_a_bucket_of_gathers_is_plain_nodes_with_shapes() -> None:
    """Shards of 12 and 5 elements: 17 packed, 34 gathered by two ranks."""
    gm = gathers([(4, 3), (1, 5)], torch.float32)
    merged = merge_and_sort(gm)
    assert [node.meta["val"].numel() for node in merged.pack] == [12, 5, 17]
    assert tuple(merged.start.meta["val"].shape) == (34,)
    assert bucket_members(merged.start) == (
        "all_gather_into_tensor_default",
        "all_gather_into_tensor_default_1",
    )
    assert set(merged.unpack) == {"wait_tensor_default", "wait_tensor_default_1"}
    results = [nodes[-1] for nodes in merged.unpack.values()]
    assert [tuple(node.meta["val"].shape) for node in results] == [(8, 3), (2, 5)]
    called = [op for node in gm.graph.nodes if (op := overload(node)) is not None]
    assert {op.namespace for op in called} == {"aten", "_c10d_functional"}


def test_gathered_rows_stay_rows() -> None:
    """Shards of 4 x 3 and of 7 elements, from two ranks."""
    merged = merge_and_sort(gathers([(4, 3), (7,)], torch.float32))
    shapes = [[tuple(n.meta["val"].shape) for n in nodes] for nodes in merged.unpack.values()]
    assert shapes == [[(2, 12), (2, 4, 3), (8, 3)], [(2, 7), (14,)]]


def test_a_bucket_is_recognised_and_not_merged_again() -> None:
    gm = gathers([(4, 3), (1, 5)], torch.float32)
    merge_and_sort(gm)
    (bucket,) = find_collectives(gm.graph)
    assert bucket.is_bucket and bucket.free
    assert why_not_bucketed(bucket) == "it is a bucket already"
    assert len(bucket.pack) == 3 and len(bucket.unpack) > 4


def test_a_coalesced_bucket_is_recognised_by_its_mark() -> None:
    """Two shards of 48 and 20 bytes, gathered from two ranks; without the mark it is another's."""
    gm = gathers([(4, 3), (1, 5)], torch.float32)
    merged = merge_and_sort(gm, "coalesced")
    assert merged.pack == () and len(merged.items) == len(merged.wait) == 2
    (bucket,) = find_collectives(gm.graph)
    assert bucket.is_bucket and bucket.free
    assert bucket.sizes_bytes == (96, 40) and bucket.size_bytes == 136
    assert bucket.waits == merged.wait and bucket.items == merged.items
    assert bucket.dtype is torch.float32 and len(bucket.bucket_key) == 4
    for node in (merged.start, *merged.items, *merged.wait):
        del node.meta[BUCKET]
    (foreign,) = find_collectives(gm.graph)
    assert foreign.why_fixed == "coalesced or in-place form"


def test_hsdp_reduces_what_was_scattered_together_together() -> None:
    b = GraphBuilder(WORLD)
    scattered = [b.scatter(b.input(f"tangents_{i}", 4, 2)) for i in range(2)]
    gm = b.output(*[b.all_reduce(part, "pg1") for part in scattered])
    found = find_collectives(gm.graph)
    merge_bucket("scatter", [c for c in found if c.kind == "reduce_scatter"], form="coalesced")
    merge_bucket("reduce", [c for c in found if c.kind == "all_reduce"], form="coalesced")
    _sort(gm.graph)
    scatter, reduce = find_collectives(gm.graph)
    assert scatter.free and reduce.free and reduce.follows == scatter.name
    assert reduce.start.args[0] == list(scatter.waits)


def test_hsdp_reduces_the_bucket_as_it_is() -> None:
    b = GraphBuilder(WORLD)
    scattered = [b.scatter(b.input(f"tangents_{i}", 4, 2)) for i in range(2)]
    gm = b.output(*[b.all_reduce(part, "pg1") for part in scattered])
    scatters = [c for c in find_collectives(gm.graph) if c.kind == "reduce_scatter"]
    reduces = [c for c in find_collectives(gm.graph) if c.kind == "all_reduce"]
    merge_bucket("scatter", scatters)
    merged = merge_bucket("reduce", reduces)
    assert merged.pack == ()
    assert merged.start.args[0].target is torch.ops._c10d_functional.wait_tensor.default  # pyright: ignore


def test_new_nodes_inherit_module_and_stack_trace() -> None:
    gm = gathers([(4, 3), (1, 5)], torch.float32)
    first = find_collectives(gm.graph)[0].start
    first.meta |= {"stack_trace": "File model.py", "nn_module_stack": {"0": ("L['self']", object)}}
    merged = merge_and_sort(gm)
    for node in (*merged.pack, merged.start, *merged.wait):
        assert node.meta["stack_trace"] == "File model.py" and "nn_module_stack" in node.meta


def test_symbolic_sizes_are_not_merged() -> None:
    b = GraphBuilder(WORLD)
    rows = b.dynamic_size(6)
    gm = b.output(*[b.gather(b.input(f"primals_{i}", rows, 8)) for i in range(2)])
    found = find_collectives(gm.graph)
    assert all(c.free for c in found)
    assert [why_not_bucketed(c) for c in found] == ["symbolic sizes"] * 2
    with pytest.raises(ValueError, match="cannot join it: symbolic sizes"):
        merge_bucket("bucket", found)


def test_what_does_not_belong_together_is_refused() -> None:
    b = GraphBuilder(WORLD)
    shards = [b.parameter(f"w{i}", 2, 2) for i in range(3)]
    x = b.input("x", 4, 2)
    gm = b.output(
        b.gather(shards[0]),
        b.gather(shards[1], "pg1"),
        b.gather(b.cast(shards[2], torch.bfloat16)),
        b.mm(b.transpose(b.all_reduce(x)), x),
    )
    first, other_group, other_dtype, fixed = find_collectives(gm.graph)
    with pytest.raises(ValueError, match="merges at least two"):
        merge_bucket("bucket", [first])
    for other in (other_group, other_dtype):
        with pytest.raises(ValueError, match="must share kind, group, dtype and reduction"):
            merge_bucket("bucket", [first, other])
    with pytest.raises(ValueError, match="used inside the graph"):
        merge_bucket("bucket", [fixed, fixed])


def test_members_that_need_each_other_are_refused() -> None:
    b = GraphBuilder(WORLD)
    once = b.all_reduce(b.input("tangents_1", 4, 2))
    gm = b.output(b.all_reduce(once))
    with pytest.raises(ValueError, match=r"need the results of \['all_reduce_default'\]"):
        merge_bucket("bucket", find_collectives(gm.graph))
