"""Which buffer each node reads and writes: views, copies, fused values, inputs that die here."""

from __future__ import annotations

import pytest
import torch.fx as fx
from support.graphs import GraphBuilder, aten, c10d, getitem

from inductor_overlap.passes.storages import Storages, is_alias, is_backward, viewed

pytestmark = pytest.mark.quick


def read(graph: fx.Graph) -> Storages:
    storages = Storages(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            storages.add_input(node)
        elif node.op == "output":
            storages.mark_outputs(node)
        else:
            storages.add(node)
    return storages


def test_views_share_and_kernels_allocate() -> None:
    b = GraphBuilder()
    x = b.input("x", 8, 8)
    product = b.mm(x, x)
    view = b.transpose(product)
    second = b.mm(view, x)
    b.output(second)
    storages = read(b.graph)
    assert storages.of(product) == storages.of(view) == (product.name,)
    assert {name: buffer.size_bytes for name, buffer in storages.buffers.items()} == {
        product.name: 256,
        second.name: 256,
    }
    assert storages.buffers[second.name].is_output
    assert not storages.buffers[product.name].is_output


def test_reshape_of_a_strided_tensor_is_a_copy() -> None:
    b = GraphBuilder()
    product = b.mm(b.input("x", 8, 8), b.input("y", 8, 8))
    contiguous = b.call(aten.reshape.default, product, [64])
    copied = b.call(aten.reshape.default, b.transpose(product), [64])
    column = b.call(aten.slice.Tensor, product, 1, 0, 4)
    split = b.call(aten.reshape.default, column, [8, 2, 2])
    assert is_alias(contiguous) and is_alias(split)
    assert not is_alias(copied)
    assert viewed(split) is product


def test_a_fused_value_has_no_buffer() -> None:
    """tanh is read by one pointwise op: it never reaches memory, reading it is reading mm."""
    b = GraphBuilder()
    product = b.mm(b.input("x", 8, 8), b.input("y", 8, 8))
    inner = b.call(aten.tanh.default, product)
    outer = b.call(aten.neg.default, inner)
    b.output(outer)
    storages = read(b.graph)
    assert storages.of(inner) == (product.name,)
    assert storages.of(outer) == (outer.name,)


def test_elements_of_a_list_have_buffers_of_their_own() -> None:
    b = GraphBuilder()
    shards = [b.parameter("a", 2, 8), b.parameter("b", 4, 8)]
    start = b.call(c10d.all_gather_into_tensor_coalesced.default, shards, 4, "pg0")
    second = b.wait(b.call(getitem, start, 1))
    b.output(second)
    storages = read(b.graph)
    assert storages.of(second) == (f"{start.name}.1",)
    assert storages.buffers[f"{start.name}.1"].size_bytes == 4 * 4 * 8 * 4
    assert len(storages.of(start)) == 2


def test_backward_inputs_die_parameters_do_not() -> None:
    b = GraphBuilder()
    shard = b.parameter("w", 2, 8)
    saved, tangent = b.input("mm_3", 8, 8), b.input("tangents_1", 8, 8)
    b.output(b.mm(saved, tangent))
    assert is_backward(b.graph)
    storages = read(b.graph)
    assert storages.of(shard) == ()
    assert storages.buffers["mm_3"].is_input and storages.buffers["tangents_1"].is_input


def test_forward_inputs_are_the_callers() -> None:
    b = GraphBuilder()
    x = b.input("x", 8, 8)
    b.output(b.mm(x, x))
    assert not is_backward(b.graph)
    assert read(b.graph).of(x) == ()


def test_a_chain_is_one_buffer_or_a_view() -> None:
    b = GraphBuilder()
    product = b.mm(b.input("x", 8, 8), b.input("y", 8, 8))
    view = b.call(aten.view.default, product, [64])
    storages = Storages(b.graph)
    storages.add(product)
    assert storages.add_chain("chain", [view], 0) == ()
    assert storages.of(view) == (product.name,)
    assert storages.add_chain("chain", [view], 128) == ("chain",)
    assert storages.of(view) == ("chain",) and storages.buffers["chain"].size_bytes == 128
