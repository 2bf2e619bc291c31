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
from typing import Any, cast

import pytest
import torch
from support.parallel_models import (
    Attention,
    Chain,
    MixtureOfExperts,
    sequence_loss,
    shard_experts_apart,
    shard_over_sequence_too,
    train_stage,
)
from support.ranks import run_ranks
from support.sharded_training import (
    Run,
    deviation,
    parallelize_llama,
    tiny_llama,
    train_sharded,
    train_whole,
)
from support.token_models import (
    CalledThroughClosures,
    HeldByContainers,
    PartlyUnused,
    Recomputed,
    TokenModel,
    TwoTowers,
    Uneven,
    adapted_model,
    token_model,
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
        build: The plain model, the same at every call.
        shard: From the plain model and the whole mesh to the sharded model.
        part: From the plain model to what this rank keeps of it (a pipeline stage).
        train: From the sharded model, what runs it, and the whole mesh to ten steps.
        data_parallel: The dimensions of `mesh` whose ranks have batches of their own.
        tolerance: For losses, gradients and weights: absolute, relative for low precision.
    """

    name: str
    mesh: dict[str, int]
    build: Callable[[], Any]
    shard: Callable[[Any, DeviceMesh], nn.Module] = simple_fsdp
    part: Callable[[Any, DeviceMesh], nn.Module] | None = None
    train: Callable[[nn.Module, Any, DeviceMesh, int], Run] | None = None
    data_parallel: tuple[str, ...] = ("dp",)
    tolerance: float = FP32_TOLERANCE


def llama() -> Llama3:
    return tiny_llama(num_layers=1)


def tied_llama() -> Llama3:
    model = llama()
    model.output.weight = model.tok_embeddings.weight
    return model


def half_frozen_llama() -> Llama3:
    model = llama().requires_grad_(False)
    model.output.requires_grad_(True)
    model.norm.requires_grad_(True)
    return model


def save_attention_only(*args: object, **kwargs: object) -> CheckpointPolicy:
    del kwargs
    is_attention = "scaled_dot_product" in str(args[1])
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE


def recomputing_llama() -> Llama3:
    model = llama()
    contexts = partial(create_selective_checkpoint_contexts, save_attention_only)
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block, context_fn=contexts)
    return model


def with_tensor_parallel(model: Llama3, mesh: DeviceMesh, mode: str) -> Llama3:
    return simple_fsdp(parallelize_llama(model, mesh["tp"]), mesh["dp"], mode=mode)


def towers_apart(model: TokenModel, mesh: DeviceMesh) -> TokenModel:
    """One of two blocks of a class over all ranks, the other with replicas."""
    simple_fsdp(cast(TwoTowers, model.body).right, mesh._flatten("all"))
    return simple_fsdp(model, mesh, mode="hybrid_shard")


def train_parts_of_a_sequence(model: nn.Module, call: Any, mesh: DeviceMesh, num_steps: int) -> Run:
    loss = partial(sequence_loss, mesh=mesh)
    return train_sharded(model, call, mesh, num_steps, ranks_per_batch=2, loss=loss)


def stage_of(model: Chain, mesh: DeviceMesh) -> Chain:
    return model.stage(mesh["pp"].get_local_rank())


def shard_stage(model: Chain, mesh: DeviceMesh) -> Chain:
    return simple_fsdp(model, mesh["dp"])


LOW_PRECISION = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
HYBRID = partial(simple_fsdp, mode="hybrid_shard")
REPLICAS = ("replicas", "shards")

COMBINATIONS = (
    Combination("fully_shard", MESH_4, llama),
    Combination("fully_shard, shard_dim=1", MESH_2, llama, partial(simple_fsdp, shard_dim=1)),
    Combination("hybrid_shard", MESH_2D, llama, HYBRID, data_parallel=REPLICAS),
    Combination("replicate", MESH_2, llama, partial(simple_fsdp, mode="replicate")),
    Combination(
        "fully_shard + tensor and sequence parallel",
        MESH_TP,
        llama,
        partial(with_tensor_parallel, mode="fully_shard"),
    ),
    Combination(
        "replicate + tensor and sequence parallel",
        MESH_TP,
        llama,
        partial(with_tensor_parallel, mode="replicate"),
    ),
    Combination(
        "experts cut by expert, their replicas fully_shard; the rest fully_shard over all",
        {"edp": 2, "ep": 2},
        partial(token_model, MixtureOfExperts),
        shard_experts_apart,
        data_parallel=("edp", "ep"),
    ),
    Combination(
        "fully_shard over all + context parallel, keys and values gathered",
        {"dp": 2, "cp": 2},
        partial(token_model, Attention),
        shard_over_sequence_too,
        train=train_parts_of_a_sequence,
    ),
    Combination(
        "fully_shard in each of two pipeline stages, GPipe with one reduction",
        {"pp": 2, "dp": 2},
        Chain,
        shard_stage,
        part=stage_of,
        train=train_stage,
    ),
    Combination(
        "hybrid_shard + one of two blocks of a class fully_shard over all",
        MESH_2D,
        partial(token_model, TwoTowers),
        towers_apart,
        data_parallel=REPLICAS,
    ),
    Combination("fully_shard + 5, 3 and 1 rows, a scalar", MESH_4, partial(token_model, Uneven)),
    Combination("fully_shard + tied weights", MESH_2, tied_llama),
    Combination("fully_shard + frozen parameters", MESH_2, half_frozen_llama),
    Combination("fully_shard + low-rank adapters (LoRA)", MESH_2, adapted_model),
    Combination("fully_shard + selective activation checkpointing", MESH_2, recomputing_llama),
    Combination(
        "fully_shard + full activation checkpointing in the forward",
        MESH_2,
        partial(token_model, Recomputed),
    ),
    Combination(
        "fully_shard + ParameterList and ParameterDict",
        MESH_2,
        partial(token_model, HeldByContainers),
    ),
    Combination(
        "fully_shard + modules called through closures",
        MESH_2,
        partial(token_model, CalledThroughClosures),
    ),
    Combination("fully_shard + unused parameters", MESH_2, partial(token_model, PartlyUnused)),
    Combination(
        "fully_shard + bfloat16 parameters, float32 reduction",
        MESH_2,
        llama,
        partial(simple_fsdp, mp_policy=LOW_PRECISION),
        tolerance=BF16_TOLERANCE,
    ),
    Combination(
        "hybrid_shard + bfloat16 parameters, float32 reduction",
        MESH_2D,
        llama,
        partial(HYBRID, mp_policy=LOW_PRECISION),
        data_parallel=REPLICAS,
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
    reference = train_whole(combination.build(), batches.size(), NUM_STEPS)
    deviations: list[float] = []
    names_stayed = True
    for traced in (False, True):
        plain = combination.build()
        if combination.part is not None:
            plain = combination.part(plain, mesh)
        names = list(plain.state_dict())
        expected = reference.of(name for name, _ in plain.named_parameters())
        model = combination.shard(plain, mesh)
        names_stayed &= list(model.state_dict()) == names
        found = train(combination, model, mesh, traced)
        off = deviation(expected, found, relative=combination.tolerance == BF16_TOLERANCE)
        deviations.append(max(off.loss, off.gradient, off.weight))
    return deviations[0], deviations[1], names_stayed


def train(combination: Combination, model: nn.Module, mesh: DeviceMesh, traced: bool) -> Run:
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if traced else model
    if combination.train is not None:
        return combination.train(model, call, mesh, NUM_STEPS)
    return train_sharded(model, call, mesh[combination.data_parallel], NUM_STEPS)


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
    kind = " of its size" if combination.tolerance == BF16_TOLERANCE else ""
    equal = f"equal to {combination.tolerance:.0e}{kind}"
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
