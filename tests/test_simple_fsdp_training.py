"""Losses, gradients and weights of `simple_fsdp` equal those of eager FSDP2, on real gloo ranks.

Eager against eager; `test_overlap_on_ranks` compares what Inductor compiled, with and without the
plugin, with the same FSDP2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from support.sharded_training import Run, full
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.fsdp import fully_shard

from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.simple_fsdp import MixedPrecisionPolicy, simple_fsdp

pytestmark = pytest.mark.gloo

NUM_STEPS = 10
TOLERANCE = 1e-6
LEARNING_RATE = {"SGD": 0.1, "AdamW": 0.001}

# 67 and 91 divide by neither 2 nor 4: shards are padded.
TINY = Llama3Config(
    dim=40, num_layers=2, num_heads=5, num_kv_heads=1, vocab_size=67, ffn_dim=91, max_seq=16
)


def tiny_llama(frozen: tuple[str, ...] = ()) -> Llama3:
    torch.manual_seed(7)
    model = Llama3(TINY)
    model.init_weights()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    return model


def train(model: nn.Module, optimizer_name: str) -> Run:
    """Ten steps of language modelling, every rank on its own tokens."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, optimizer_name)(parameters, lr=LEARNING_RATE[optimizer_name])
    tokens = torch.Generator().manual_seed(100 + dist.get_rank())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for _ in range(NUM_STEPS):
        batch = torch.randint(0, TINY.vocab_size, (2, 9), generator=tokens)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        gradients = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        losses.append(loss.item())
    return Run(losses, gradients, {n: full(p) for n, p in model.named_parameters()})


def fsdp2(model: Llama3, **options: Any) -> nn.Module:
    for block in model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


@dataclass(frozen=True)
class Case:
    """One training run: its optimizer, what is frozen, the wire dtype."""

    optimizer_name: str = "SGD"
    frozen: tuple[str, ...] = ()
    dtype: torch.dtype | None = None


def compare(cases: Mapping[str, Case]) -> dict[str, tuple[Run, Run]]:
    """FSDP2's run and ours for each case; all cases share the cost of starting ranks."""
    return {name: compare_one(case) for name, case in cases.items()}


def compare_one(case: Case) -> tuple[Run, Run]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    reduce_dtype = torch.float32 if case.dtype else None
    theirs = Fsdp2Policy(case.dtype, reduce_dtype, cast_forward_inputs=False)
    model = fsdp2(tiny_llama(case.frozen), mesh=mesh, mp_policy=theirs)
    expected = train(model, case.optimizer_name)
    ours = MixedPrecisionPolicy(case.dtype, reduce_dtype)
    model = simple_fsdp(tiny_llama(case.frozen), mesh, mp_policy=ours)
    return expected, train(model, case.optimizer_name)


def assert_equal_runs(expected: Run, got: Run) -> None:
    assert got.gradients.keys() == expected.gradients.keys()
    assert got.losses == pytest.approx(expected.losses, abs=TOLERANCE)
    for wanted, found in (
        (expected.gradients, got.gradients),
        (expected.weights, got.weights),
    ):
        for name, value in wanted.items():
            torch.testing.assert_close(
                found[name], value, atol=TOLERANCE, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


FROZEN = ("tok_embeddings", "layers.0.attention.wq")
CASES = {
    "SGD": Case("SGD"),
    "AdamW": Case("AdamW"),
    "bfloat16": Case(dtype=torch.bfloat16),
    "frozen": Case(frozen=FROZEN),
}
ON_FOUR_RANKS = ("SGD", "AdamW")


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, tuple[Run, Run]]]:
    return run_ranks(compare, 2, CASES)


@pytest.mark.parametrize("name", list(CASES))
def test_ten_steps_equal_fsdp2(two_ranks: list[dict[str, tuple[Run, Run]]], name: str) -> None:
    for runs in two_ranks:
        assert_equal_runs(*runs[name])


def test_ten_steps_on_four_ranks_equal_fsdp2() -> None:
    for runs in run_ranks(compare, 4, {name: CASES[name] for name in ON_FOUR_RANKS}):
        for expected, got in runs.values():
            assert_equal_runs(expected, got)


def test_gradients_have_the_dtype_of_the_parameters(
    two_ranks: list[dict[str, tuple[Run, Run]]],
) -> None:
    for runs in two_ranks:
        _, got = runs["bfloat16"]
        assert {gradient.dtype for gradient in got.gradients.values()} == {torch.float32}


def test_frozen_parameters_have_no_gradient(two_ranks: list[dict[str, tuple[Run, Run]]]) -> None:
    for runs in two_ranks:
        _, got = runs["frozen"]
        assert got.gradients and not any(name.startswith(FROZEN) for name in got.gradients)
