"""The contenders: ways in which a user could train the same model on the same ranks.

All start from the same seed, shard every parameter over the same ranks, gather it again in backward
and step the same optimizer; what differs is who decides when communication happens. One of ours is
given a memory limit instead, and keeps gathered what the limit allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import loopback_in_tree as in_tree
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.plugin import options, reports
from inductor_overlap.report import Report
from inductor_overlap.simple_fsdp import simple_fsdp

_SEED = 0
_WRAP = ["tok_embeddings", "layers.*", ["norm", "output"]]


@dataclass(frozen=True)
class Setup:
    """What all contenders share: the model's sizes, the ranks, the calibrated prices.

    ``memory_limit_gb``: for the live bytes of each graph of the contender that keeps parameters
    gathered as far as memory allows (GiB).
    """

    config: Llama3Config
    mesh: DeviceMesh
    cluster: Cluster
    memory_limit_gb: float


@dataclass
class Contender:
    """One way of training, ready to step.

    Attributes:
        model: holds the parameters.
        forward: token ids to logits; `model`, or its compiled form.
        optimizer: over the model's parameters.
        reports: the plugin's, of the graphs compiled so far; empty for others.
    """

    model: nn.Module
    forward: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    reports: list[Report] = field(default_factory=list[Report])
    _reports_before: int = 0

    def collect_reports(self) -> None:
        """Takes the reports of the graphs that its first step compiled."""
        self.reports = reports()[self._reports_before :]


def build(name: str, setup: Setup) -> Contender:
    """The contender called `name`, before its first step.

    Raises:
        KeyError: No such contender.
    """
    return CONTENDERS[name](setup)


def compute_alone(setup: Setup) -> Contender:
    """The whole model on every rank, compiled: no communication, no packing. A floor."""
    model = _model(setup)
    return _contender(model, _compiled(model, {}))


def bucket_bytes(config: Llama3Config) -> tuple[list[int], list[int], list[int]]:
    """Bytes of the buckets of a step: gathers of forward, gathers and scatters of backward.

    One bucket for each entry of the wrap list. The backward graph of an embedding does not read its
    weight, so that gather is not repeated.
    """
    with torch.device("meta"):
        model = Llama3(config)
    embedding, *layers, head = (
        sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        for parameters in (
            model.tok_embeddings.parameters(),
            *(layer.parameters() for layer in model.layers),
            [*model.norm.parameters(), *model.output.parameters()],
        )
    )
    everything = [embedding, *layers, head]
    return everything, [head, *layers], everything[::-1]


def _fsdp2(setup: Setup) -> Contender:
    model = _model(setup)
    return _fully_sharded(model, setup)


def _fsdp2_compiled(setup: Setup) -> Contender:
    model = _model(setup)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    return _fully_sharded(model, setup)


def _compiled_alone(setup: Setup) -> Contender:
    return _simple_fsdp(setup, in_tree.gathered_again())


def _torch_auto(setup: Setup) -> Contender:
    return _simple_fsdp(setup, in_tree.automatic(setup.cluster, setup.mesh.size()))


def _torch_manual(setup: Setup) -> Contender:
    layers = [f"layers.{layer}" for layer in range(setup.config.num_layers)]
    return _simple_fsdp(setup, in_tree.manual([_WRAP[0], *layers, _WRAP[-1]]))


def _ours(wrap: str | Sequence[str | list[str]]) -> Callable[[Setup], Contender]:
    return lambda setup: _simple_fsdp(setup, options(wrap=wrap, cluster=setup.cluster))


def _ours_kept(setup: Setup) -> Contender:
    chosen = options(
        cluster=setup.cluster,
        reshard_after_forward="auto",
        memory_limit_gb=setup.memory_limit_gb,
    )
    return _simple_fsdp(setup, chosen)


CONTENDERS: dict[str, Callable[[Setup], Contender]] = {
    "fsdp2": _fsdp2,
    "fsdp2-compiled": _fsdp2_compiled,
    "compiled": _compiled_alone,
    "torch-auto": _torch_auto,
    "torch-manual": _torch_manual,
    "ours-manual": _ours(_WRAP),
    "ours-greedy": _ours("greedy"),
    "ours-auto": _ours("auto"),
    "ours-kept": _ours_kept,
}
TITLES = {
    "fsdp2": "FSDP2 eager",
    "fsdp2-compiled": "FSDP2, compiled blocks",
    "compiled": "compiled, no passes",
    "torch-auto": "torch auto overlap",
    "torch-manual": "torch manual buckets",
    "ours-manual": "ours, manual",
    "ours-greedy": "ours, greedy",
    "ours-auto": "ours, auto",
    "ours-kept": "ours, auto, memory limit used",
}
IN_TREE = ("torch-auto", "torch-manual")
OURS = ("ours-manual", "ours-greedy", "ours-auto", "ours-kept")


def _model(setup: Setup) -> Llama3:
    torch.manual_seed(_SEED)
    model = Llama3(setup.config)
    model.init_weights()
    return model


def _fully_sharded(model: Llama3, setup: Setup) -> Contender:
    for layer in model.layers:
        fully_shard(layer, mesh=setup.mesh)
    fully_shard(model, mesh=setup.mesh)
    return _contender(model, model)


def _simple_fsdp(setup: Setup, chosen: dict[str, Any]) -> Contender:
    model = simple_fsdp(_model(setup), setup.mesh)
    return _contender(model, _compiled(model, chosen))


def _compiled(model: nn.Module, chosen: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, fullgraph=True, dynamic=False, options=chosen)


def _contender(model: nn.Module, forward: Callable[[Tensor], Tensor]) -> Contender:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return Contender(model, forward, optimizer, _reports_before=len(reports()))
