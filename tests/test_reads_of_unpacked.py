"""What Inductor generates for a fused read of a parameter that was gathered in a packed bucket.

Graphs are lowered without compiling what was generated.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.fx as fx
from support.graphs import GraphBuilder, named
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from inductor_overlap.passes.bucketing import merge_bucket
from inductor_overlap.passes.collectives import find_collectives

pytestmark = pytest.mark.compile

aten = torch.ops.aten


def summed_rows() -> fx.GraphModule:
    """Rows of a gathered table, by index, each summed up; and another gathered parameter."""
    b = GraphBuilder(2)
    table = b.gather(b.parameter("table", 9, 32))
    other = b.gather(b.parameter("other", 16))
    tokens = b.input("tokens", 16, dtype=torch.int64)
    rows = b.call(aten.embedding.default, table, tokens, name="rows")
    return b.output(b.call(aten.sum.dim_IntList, rows, [-1]), other)


def merged(gm: fx.GraphModule) -> fx.GraphModule:
    bucket = merge_bucket("bucket", find_collectives(gm.graph))
    reader = named(gm.graph, "rows")
    for node in bucket.written:
        reader.prepend(node)
    gm.recompile()
    return gm


def generated(gm: fx.GraphModule) -> str:
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = inputs[0].fake_mode
    lowering = GraphLowering(gm, example_inputs=inputs, shape_env=mode.shape_env)
    with V.set_fake_mode(mode), V.set_graph_handler(lowering), DebugContext():
        lowering.run(*inputs)
        wrapper, _ = lowering.codegen()
    return wrapper.value


@pytest.mark.skipif(not pick_vec_isa(), reason="Inductor vectorises nothing for this CPU")
def test_a_sum_over_rows_keeps_its_order() -> None:
    """In vector lanes, as without the bucket: one by one, its last bit would be another."""
    single, bucketed = (
        len(re.findall("vec_reduce_all", generated(gm)))
        for gm in (summed_rows(), merged(summed_rows()))
    )
    assert bucketed == single == 1
