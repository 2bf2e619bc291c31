"""Hugging Face models as they come, from tiny configurations: sharded, compiled, overlapped."""

from __future__ import annotations

import importlib
import os
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_overlap.plugin import options
from inductor_overlap.simple_fsdp import simple_fsdp

pytest.importorskip("transformers")

pytestmark = [pytest.mark.gloo, pytest.mark.compile]

VOCAB_SIZE = 64
NUM_STEPS = 3

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "use_cache": False}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", GROUPED),
    # Its embedding is tied, its layers are Conv1D.
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB_SIZE,
            "n_embd": 32,
            "n_layer": 1,
            "n_head": 4,
            "n_positions": 16,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
            "use_cache": False,
        },
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "bert": (
        "BertConfig",
        "BertForMaskedLM",
        {**SIZES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
}


def build(name: str) -> nn.Module:
    """One tiny layer, without dropout, of the model called `name` in `MODELS`."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    hf: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    config, model, fields = MODELS[name]
    return getattr(hf, model)(getattr(hf, config)(**fields))


def batch(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, VOCAB_SIZE, (2, 8), generator=generator)


def loss_of(call: Any, tokens: Tensor) -> Tensor:
    logits = call(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def compare(names: list[str]) -> dict[str, list[tuple[float, float]]]:
    return {name: compare_one(name) for name in names}


def compare_one(name: str) -> list[tuple[float, float]]:
    """This rank's losses, whole in one process and sharded under `wrap="auto"`."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = build(name)
    model = simple_fsdp(build(name), init_device_mesh("cpu", (num_ranks,)))
    call = torch.compile(model, fullgraph=True, options=cast(Any, options(wrap="auto")))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    losses: list[tuple[float, float]] = []
    for _ in range(NUM_STEPS):
        expected = [loss_of(whole, batch(other)) for other in range(num_ranks)]
        torch.stack(expected).mean().backward()
        got = loss_of(call, batch(rank))
        got.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append((expected[rank].item(), got.item()))
    return losses


def test_losses_equal_one_process() -> None:
    for per_model in run_ranks(compare, 2, list(MODELS), timeout_s=500):
        assert list(per_model) == list(MODELS)
        for name, losses in per_model.items():
            for expected, got in losses:
                assert got == pytest.approx(expected, abs=1e-5), name
