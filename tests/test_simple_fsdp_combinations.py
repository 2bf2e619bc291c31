"""Every combination the front end promises, against one process; writes the table in docs.

`EXPECTTEST_ACCEPT=1` rewrites the table in docs/front-end.md from what was measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from support.ranks import run_ranks
from support.sharded_training import (
    Run,
    deviation,
    parallelize_llama,
    tiny_llama,
    train_sharded,
    train_whole,
)
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from inductor_overlap.models.llama3 import Llama3
from inductor_overlap.simple_fsdp import MixedPrecisionPolicy, simple_fsdp

pytestmark = pytest.mark.gloo

NUM_STEPS = 10
FP32_TOLERANCE = 1e-6
BF16_TOLERANCE = 2e-2
DOCUMENT = Path(__file__).parent.parent / "docs" / "front-end.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

MESH_2 = {"dp": 2}
MESH_4 = {"dp": 4}
MESH_2D = {"replicas": 2, "shards": 2}
MESH_TP = {"dp": 2, "tp": 2}


@dataclass(frozen=True)
class Combination:
    """One row of the table.

    Attributes:
        name: What is combined.
        mesh: Dimension names and sizes.
        shard: From the plain model and the whole mesh to the sharded model.
        prepare: What is done to the reference too, before sharding.
        data_parallel: The dimensions of `mesh` whose ranks have batches of their own.
        tolerance: For losses, gradients and weights, absolute.
    """

    name: str
    mesh: dict[str, int]
    shard: Callable[[Llama3, DeviceMesh], Llama3]
    prepare: Callable[[Llama3], None] | None = None
    data_parallel: tuple[str, ...] = ("dp",)
    tolerance: float = FP32_TOLERANCE


def tie(model: Llama3) -> None:
    model.output.weight = model.tok_embeddings.weight


def freeze_all_but_the_head(model: Llama3) -> None:
    model.requires_grad_(False)
    model.output.requires_grad_(True)
    model.norm.requires_grad_(True)


def save_attention_only(*args: object, **kwargs: object) -> CheckpointPolicy:
    del kwargs
    is_attention = "scaled_dot_product" in str(args[1])
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_blocks(model: Llama3) -> None:
    contexts = partial(create_selective_checkpoint_contexts, save_attention_only)
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block, context_fn=contexts)


def with_tensor_parallel(model: Llama3, mesh: DeviceMesh, mode: str) -> Llama3:
    return simple_fsdp(parallelize_llama(model, mesh["tp"]), mesh["dp"], mode=mode)


LOW_PRECISION = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

COMBINATIONS = (
    Combination("fully_shard", MESH_4, simple_fsdp),
    Combination("fully_shard, shard_dim=1", MESH_2, partial(simple_fsdp, shard_dim=1)),
    Combination(
        "hybrid_shard",
        MESH_2D,
        partial(simple_fsdp, mode="hybrid_shard"),
        data_parallel=("replicas", "shards"),
    ),
    Combination("replicate", MESH_2, partial(simple_fsdp, mode="replicate")),
    Combination(
        "fully_shard + tensor and sequence parallel",
        MESH_TP,
        partial(with_tensor_parallel, mode="fully_shard"),
    ),
    Combination(
        "replicate + tensor and sequence parallel",
        MESH_TP,
        partial(with_tensor_parallel, mode="replicate"),
    ),
    Combination("fully_shard + tied weights", MESH_2, simple_fsdp, tie),
    Combination("fully_shard + frozen parameters", MESH_2, simple_fsdp, freeze_all_but_the_head),
    Combination(
        "fully_shard + selective activation checkpointing", MESH_2, simple_fsdp, recompute_blocks
    ),
    Combination(
        "fully_shard + bfloat16 parameters, float32 reduction",
        MESH_2,
        partial(simple_fsdp, mp_policy=LOW_PRECISION),
        tolerance=BF16_TOLERANCE,
    ),
    Combination(
        "hybrid_shard + bfloat16 parameters, float32 reduction",
        MESH_2D,
        partial(simple_fsdp, mode="hybrid_shard", mp_policy=LOW_PRECISION),
        data_parallel=("replicas", "shards"),
        tolerance=BF16_TOLERANCE,
    ),
)

Measured = list[tuple[float, float, bool]]


def measure(indices: Sequence[int]) -> Measured:
    """For each combination the largest deviation in eager and traced, and whether names stayed."""
    return [measure_one(COMBINATIONS[index]) for index in indices]


def measure_one(combination: Combination) -> tuple[float, float, bool]:
    mesh = init_device_mesh(
        "cpu", tuple(combination.mesh.values()), mesh_dim_names=tuple(combination.mesh)
    )
    batches = mesh[combination.data_parallel]
    expected = train_whole(build(combination), batches.size(), NUM_STEPS)
    deviations: list[float] = []
    names_stayed = True
    for traced in (False, True):
        plain = build(combination)
        names = list(plain.state_dict())
        model = combination.shard(plain, mesh)
        names_stayed &= list(model.state_dict()) == names
        deviations.append(largest(expected, train(model, batches, traced)))
    return deviations[0], deviations[1], names_stayed


def build(combination: Combination) -> Llama3:
    model = tiny_llama(num_layers=1)
    if combination.prepare is not None:
        combination.prepare(model)
    return model


def train(model: nn.Module, batches: DeviceMesh, traced: bool) -> Run:
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if traced else model
    return train_sharded(model, call, batches, NUM_STEPS)


def largest(expected: Run, got: Run) -> float:
    found = deviation(expected, got)
    return max(found.loss, found.gradient, found.weight)


def num_ranks(combination: Combination) -> int:
    return math.prod(combination.mesh.values())


def test_every_combination_equals_one_process() -> None:
    for ranks in (2, 4):
        indices = [i for i, row in enumerate(COMBINATIONS) if num_ranks(row) == ranks]
        for results in run_ranks(measure, ranks, indices, timeout_s=400):
            for index, found in zip(indices, results, strict=True):
                assert_promised(COMBINATIONS[index], *found)
    assert documented([row(combination) for combination in COMBINATIONS]) == DOCUMENT.read_text()


def assert_promised(
    combination: Combination, eager: float, traced: float, names_stayed: bool
) -> None:
    assert eager <= combination.tolerance, combination.name
    assert traced <= combination.tolerance, combination.name
    assert names_stayed, combination.name


def row(combination: Combination) -> str:
    mesh = " x ".join(f"{name} {size}" for name, size in combination.mesh.items())
    equal = f"equal to {combination.tolerance:.0e}"
    return f"| {combination.name} | {mesh} | {equal} | {equal} | unchanged |\n"


def documented(rows: Sequence[str]) -> str:
    """The document with its table made of `rows`; written back when asked to accept."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    head = (
        "| combination | mesh | eager, 10 steps | traced whole, 10 steps | state-dict names |\n"
        "|---|---|---|---|---|\n"
    )
    wanted = before + BEGIN + head + "".join(rows) + END + after
    if os.environ.get("EXPECTTEST_ACCEPT"):
        DOCUMENT.write_text(wanted)
    return wanted
