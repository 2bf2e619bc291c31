"""The traced models of the planning benchmarks: published sizes, few blocks, fake ranks.

Sizes: Llama 3 from `inductor_overlap.models.llama3`; GPT-2 XL from Language Models are Unsupervised
Multitask Learners (Radford et al., 2019), table 2; Mixtral 8x7B from arXiv 2401.04088, table 1;
BERT large from arXiv 1810.04805, section 3. The last three are built by ``transformers`` from a
configuration alone: nothing is downloaded.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.passes.manual_wrap import WrapEntry
from inductor_overlap.planner import trace_graphs
from inductor_overlap.simple_fsdp import MixedPrecisionPolicy, simple_fsdp

POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class ModelCase:
    """One model to trace.

    Attributes:
        name: as tables name it.
        build: makes the unsharded model.
        num_blocks: repeated blocks it has.
        modules: its wrap list, a bucket for each entry, blocks listed one by one.
        batch, seq: token ids of one rank.
    """

    name: str
    build: Callable[[], nn.Module]
    num_blocks: int
    modules: Sequence[WrapEntry]
    batch: int
    seq: int


@dataclass(frozen=True)
class TracedCase:
    """Forward and backward graph of a model on a device mesh."""

    case: ModelCase
    mesh_shape: tuple[int, ...]
    graphs: tuple[fx.GraphModule, ...]


def llama(size: str, num_blocks: int, batch: int, seq: int) -> ModelCase:
    """Llama 3 in the dimensions of ``size`` with ``num_blocks`` blocks."""
    config = Llama3Config.named(size, num_layers=num_blocks, max_seq=seq)
    blocks = [f"layers.{block}" for block in range(num_blocks)]
    modules = ["tok_embeddings", *blocks, ["norm", "output"]]
    name = f"{size} {num_blocks} blocks, {batch} x {seq}"
    return ModelCase(name, lambda: Llama3(config), num_blocks, modules, batch, seq)


class _Logits(nn.Module):
    """A ``transformers`` model that takes token ids and returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens).logits


def gpt2(num_blocks: int = 4) -> ModelCase:
    """GPT-2 XL: 1,600 wide, 25 heads, its head tied to the embedding."""
    fields = {
        "n_embd": 1600,
        "n_head": 25,
        "n_layer": num_blocks,
        "n_positions": 1024,
        "vocab_size": 50_257,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    }
    blocks = [f"model.transformer.h.{block}" for block in range(num_blocks)]
    modules = ["model.transformer.wte", "model.transformer.wpe", *blocks, "model.transformer.ln_f"]
    return _hugging_face("GPT-2 XL", "GPT2Config", "GPT2LMHeadModel", fields, modules, num_blocks)


def mixtral(num_blocks: int = 2) -> ModelCase:
    """Mixtral 8x7B: 4,096 wide, 8 experts of 14,336, two of them active."""
    fields = {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "vocab_size": 32_000,
        "max_position_embeddings": 4096,
        "use_cache": False,
    }
    blocks = [f"model.model.layers.{block}" for block in range(num_blocks)]
    modules = ["model.model.embed_tokens", *blocks, ["model.model.norm", "model.lm_head"]]
    name = "Mixtral 8x7B"
    return _hugging_face(name, "MixtralConfig", "MixtralForCausalLM", fields, modules, num_blocks)


def bert(num_blocks: int = 4) -> ModelCase:
    """BERT large: 1,024 wide, 16 heads."""
    fields = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": 16,
        "vocab_size": 30_522,
        "max_position_embeddings": 1024,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    blocks = [f"model.bert.encoder.layer.{block}" for block in range(num_blocks)]
    modules = ["model.bert.embeddings", *blocks, "model.cls"]
    return _hugging_face("BERT large", "BertConfig", "BertForMaskedLM", fields, modules, num_blocks)


def _hugging_face(
    name: str,
    config: str,
    model: str,
    fields: dict[str, Any],
    modules: Sequence[WrapEntry],
    num_blocks: int,
) -> ModelCase:
    def build() -> nn.Module:
        os.environ["HF_HUB_OFFLINE"] = "1"
        library: Any = importlib.import_module("transformers")
        return _Logits(getattr(library, model)(getattr(library, config)(**fields)))

    title = f"{name} {num_blocks} blocks, 8 x 1024"
    return ModelCase(title, build, num_blocks, modules, batch=8, seq=1024)


def trace_case(case: ModelCase, mesh_shape: tuple[int, ...]) -> TracedCase:
    """Trace ``case`` on the fake group that is initialised; two mesh dimensions: HSDP."""
    mesh = init_device_mesh("cpu", mesh_shape)
    mode = "fully_shard" if len(mesh_shape) == 1 else "hybrid_shard"

    def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
        model = simple_fsdp(case.build(), mesh, mode=mode, mp_policy=POLICY)
        return model, (torch.zeros(case.batch, case.seq, dtype=torch.long),)

    return TracedCase(case, mesh_shape, tuple(trace_graphs(build)))


def copy_of(gm: fx.GraphModule) -> fx.GraphModule:
    """A module with a copy of the graph of ``gm``, under the same names."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)
