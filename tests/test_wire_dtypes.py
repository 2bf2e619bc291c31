"""The dtype in which every parameter travels, as reports state it."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.graphs import GraphBuilder, TestPrices

import inductor_overlap as io

pytestmark = pytest.mark.quick


def mixed_precision_graph() -> torch.fx.GraphModule:
    """Two matrices gathered in bfloat16, a norm in float32, one gradient reduced in float32."""
    b = GraphBuilder()
    x = b.input("x", 8, 8, dtype=torch.bfloat16)
    for index in (0, 1):
        shard = b.cast(b.parameter(f"layers.{index}.weight", 2, 8), torch.bfloat16)
        x = b.mm(x, b.gather(shard))
    scale = b.parameter("norm.weight", 2, 8)
    norm = b.gather(scale)
    gradient = b.wait(b.stamp(b.scatter_start(b.cast(x, torch.float32)), scale))
    fixed = b.gather(b.mm(x, x))
    return b.output(x, norm, gradient, fixed)


def test_the_report_states_the_wire_dtype_of_every_parameter() -> None:
    report = io.optimize(mixed_precision_graph(), wrap="none", cost_model=TestPrices())
    expected = {
        "all_gather": {
            "layers.0.weight": "bfloat16",
            "layers.1.weight": "bfloat16",
            "norm.weight": "float32",
        },
        "reduce_scatter": {"norm.weight": "float32"},
    }
    assert report.wire_dtypes == expected
    assert json.loads(report.to_json())["wire_dtypes"] == expected
    (line,) = re.findall(r"parameters on the wire: (.*)", str(report))
    assert line == "all-gather: 2 in bfloat16, 1 in float32; reduce-scatter: 1 in float32"
