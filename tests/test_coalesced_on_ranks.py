"""Training with coalesced buckets on gloo ranks: same values, and code in the order of the plan."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx as fx
from support.ranks import run_ranks
from support.sharded_training import batch, full, loss_of, tiny_llama
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import init_device_mesh

import inductor_overlap as io
from inductor_overlap.passes.plan import Plan

pytestmark = [pytest.mark.gloo, pytest.mark.compile]

REPLICAS, SHARDS = 2, 2


class LaunchesPay:
    """Latencies and copies are long; another collective in one launch costs next to nothing."""

    def compute_us(self, node: fx.Node) -> float:
        return 10.0 if "mm" in node.name or "attention" in node.name else 0.0

    def collective_us(self, kind: str, size_bytes: int, ranks: Sequence[int]) -> float:
        return 20.0 + size_bytes / 1e3

    def copy_us(self, size_bytes: int) -> float:
        return 5.0 + size_bytes / 500

    def coalesced_us(self, kind: str, sizes_bytes: Sequence[int], ranks: Sequence[int]) -> float:
        return 20.0 + 0.1 * len(sizes_bytes) + sum(sizes_bytes) / 1e3

    def uuid(self) -> str:
        return "launches pay"


def train(options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], list[str]]:
    """Full gradients of two steps, and the generated code of forward and backward.

    The odd width shards unevenly: one rank pads.
    """
    mesh = init_device_mesh("cpu", (REPLICAS, SHARDS), mesh_dim_names=("dp", "shard"))
    model = io.simple_fsdp(tiny_llama(num_layers=1, ffn_dim=91), mesh, mode="hybrid_shard")
    call = torch.compile(model, options=options, fullgraph=True)

    def steps() -> list[dict[str, Tensor]]:
        gradients: list[dict[str, Tensor]] = []
        for index in range(2):
            model.zero_grad()
            loss_of(call, batch(index, dist.get_rank())).backward()
            named = model.named_parameters()
            gradients.append({n: full(p.grad) for n, p in named if p.grad is not None})
        return gradients

    return run_and_get_code(steps)


def run_both() -> dict[str, Any]:
    plain, _ = train({})
    torch._dynamo.reset()
    options = io.options(wrap="auto", cost_model=LaunchesPay(), memory_limit_gb=1.0)
    ours, codes = train(options)
    plans = [report.plan for report in io.reports()]
    return {"plain": plain, "ours": ours, "codes": codes, "plans": plans}


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """Hybrid sharding: it has gathers, reduce-scatters and all-reduces."""
    return run_ranks(run_both, REPLICAS * SHARDS, timeout_s=500)


def started(code: str) -> list[str]:
    """Ops of the collectives in generated code, in order."""
    ops = re.findall(r"torch\.ops\._c10d_functional\.(\w+)\.default\(", code)
    return [op.rstrip("_") for op in ops if op != "wait_tensor"]


def planned(plan: Plan) -> list[str]:
    """The same, as the plan has it."""
    coalesced = {bucket.name for bucket in plan.buckets if bucket.form == "coalesced"}
    ops: list[str] = []
    for name in plan.starts:
        op = next(op for kind, op in _OPS.items() if name.startswith(kind))
        ops.append(f"{op}_coalesced" if name in coalesced else op)
    return ops


_OPS = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
}


def test_gradients_are_those_of_the_same_compile(results: list[dict[str, Any]]) -> None:
    """Bit for bit: with two of a kind there is one order in which to add."""
    for result in results:
        for theirs, ours in zip(result["plain"], result["ours"], strict=True):
            assert theirs.keys() == ours.keys()
            for name, gradient in theirs.items():
                torch.testing.assert_close(ours[name], gradient, atol=0, rtol=0)


def test_generated_code_keeps_the_planned_order(results: list[dict[str, Any]]) -> None:
    for result in results:
        assert [p.digest for p in result["plans"]] == [p.digest for p in results[0]["plans"]]
        for code, plan in zip(result["codes"], result["plans"], strict=True):
            assert started(code) == planned(plan)
            assert any(op.endswith("_coalesced") for op in started(code))


def test_the_waits_of_a_launch_stand_together(results: list[dict[str, Any]]) -> None:
    """Inductor keeps each input until its own wait: a late one would hold more than was planned.

    HSDP waits twice for each tensor, scattered and reduced further in place.
    """
    for result in results:
        for code in result["codes"]:
            launch_of = dict(re.findall(r"^\s*(\w+) = (\w+)\[\d+\]$", code, re.MULTILINE))
            pattern = r"wait_tensor\.default\((\w+)\)|extern_kernels\.\w+\(|cpp_fused\w*\("
            calls = re.findall(pattern, code)  # "" for a kernel
            runs = [launch for launch, _ in groupby(launch_of.get(call, "") for call in calls)]
            times = Counter(launch for launch in runs if launch)
            assert 0 < max(times.values()) <= 1 + ("all_reduce_coalesced" in code)
