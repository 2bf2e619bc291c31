"""Trains a sharded model on every rank and the same model whole, for tests to compare.

The whole model sees the batches of all data-parallel ranks and averages their losses, which is
what sharding by FSDP2's rules must reproduce.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.simple_fsdp import simple_fsdp

VOCAB_SIZE = 66
SEQ = 8

Call = Callable[[Tensor], Tensor]


@dataclass
class Run:
    """What a training run leaves behind: full tensors, so that layouts do not matter."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    def of(self, names: Iterable[str]) -> Run:
        """The same run, seen by a rank that holds only the parameters called `names`."""
        kept = set(names)
        gradients = {n: g for n, g in self.gradients.items() if n in kept}
        return Run(self.losses, gradients, {n: w for n, w in self.weights.items() if n in kept})


@dataclass(frozen=True)
class Deviation:
    """How far a run is from its reference, at most."""

    loss: float
    gradient: float
    weight: float


def tiny_llama(num_layers: int = 2, ffn_dim: int = 90) -> Llama3:
    """A model whose vocabulary and feed-forward width do not divide by 4."""
    torch.manual_seed(7)
    config = Llama3Config(
        dim=32,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB_SIZE,
        ffn_dim=ffn_dim,
        max_seq=SEQ,
    )
    model = Llama3(config)
    model.init_weights()
    return model


def parallelize_llama(model: Llama3, tp_mesh: DeviceMesh) -> Llama3:
    """Tensor and sequence parallelism, the plan torchtitan uses for Llama 3."""
    whole, cut = Replicate(), Shard(1)
    parallelize_module(
        model,
        tp_mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=whole, output_layouts=cut),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=cut, output_layouts=whole),
            "layers.*.attention_norm": SequenceParallel(),
            "layers.*.ffn_norm": SequenceParallel(),
            "layers.*.attention": PrepareModuleInput(
                input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)
            ),
            "layers.*.attention.w[qkv]": ColwiseParallel(),
            "layers.*.attention.wo": RowwiseParallel(output_layouts=cut),
            "layers.*.feed_forward": PrepareModuleInput(
                input_layouts=(cut,), desired_input_layouts=(whole,)
            ),
            "layers.*.feed_forward.w[13]": ColwiseParallel(),
            "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=cut),
        },
    )
    return model


def shard_llama_2d(model: Llama3, mesh: DeviceMesh, mode: str = "fully_shard") -> Llama3:
    """Tensor parallelism on dimension "tp" of `mesh`, ours on "dp"."""
    return simple_fsdp(parallelize_llama(model, mesh["tp"]), mesh["dp"], mode=mode)


def full(tensor: Tensor) -> Tensor:
    """`tensor` gathered from all ranks, copied."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def batch(step: int, rank: int) -> Tensor:
    """Token ids of shape `[2, SEQ + 1]`, different for every step and data-parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCAB_SIZE, (2, SEQ + 1), generator=generator)


def loss_of(call: Call, tokens: Tensor) -> Tensor:
    """Next-token cross-entropy, in float32."""
    logits = call(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def train_whole(model: nn.Module, num_ranks: int, num_steps: int, lr: float = 0.1) -> Run:
    """The reference: one process, the batches of `num_ranks` ranks, their average loss."""

    def step(index: int) -> float:
        losses = [loss_of(model, batch(index, rank)) for rank in range(num_ranks)]
        torch.stack(losses).mean().backward()
        return torch.stack(losses).double().mean().item()

    return _train(model, step, num_steps, lr)


def train_sharded(
    model: nn.Module,
    call: Call,
    mesh: DeviceMesh,
    num_steps: int,
    lr: float = 0.1,
    *,
    ranks_per_batch: int = 1,
    loss: Callable[[Call, Tensor], Tensor] = loss_of,
) -> Run:
    """Ranks of the data-parallel `mesh` on their own batches; the losses are averaged over it.

    Args:
        model: Holds the parameters.
        call: Runs it.
        mesh: The ranks whose losses are averaged.
        num_steps: Of SGD.
        lr: Its learning rate.
        ranks_per_batch: Neighbours in `mesh` that share a batch, each with a part of it.
        loss: Of a rank, from `call` and the batch.
    """
    batch_index = _rank_in(mesh) // ranks_per_batch

    def step(index: int) -> float:
        own = loss(call, batch(index, batch_index))
        own.backward()
        return average_over(mesh, own.detach())

    return _train(model, step, num_steps, lr)


def average_over(mesh: DeviceMesh, loss: Tensor) -> float:
    """The mean of the ranks' losses, in float64: it adds no rounding of its own."""
    mean = loss.double()
    for group in mesh.get_all_groups():
        dist.all_reduce(mean, op=dist.ReduceOp.AVG, group=group)
    return mean.item()


def deviation(expected: Run, got: Run, *, relative: bool = False) -> Deviation:
    """The largest differences; other gradients or weights than expected are an error.

    Args:
        expected: The reference.
        got: What is compared with it.
        relative: To each loss, and to the largest entry of each tensor.
    """
    assert got.gradients.keys() == expected.gradients.keys()
    assert got.weights.keys() == expected.weights.keys()
    losses = zip(expected.losses, got.losses, strict=True)
    return Deviation(
        max(_difference(torch.tensor(a), torch.tensor(b), relative) for a, b in losses),
        _largest_difference(expected.gradients, got.gradients, relative),
        _largest_difference(expected.weights, got.weights, relative),
    )


def _train(model: nn.Module, step: Callable[[int], float], num_steps: int, lr: float) -> Run:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for index in range(num_steps):
        optimizer.zero_grad()
        losses.append(step(index))
        gradients = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Run(losses, gradients, {n: full(p) for n, p in model.named_parameters()})


def _rank_in(mesh: DeviceMesh) -> int:
    """This rank's number among the ranks of `mesh`, first dimension slowest."""
    rank = 0
    for dim in range(mesh.ndim):
        rank = rank * mesh.size(dim) + mesh.get_local_rank(dim)
    return rank


def _largest_difference(
    expected: dict[str, Tensor], got: dict[str, Tensor], relative: bool
) -> float:
    return max(_difference(expected[n], got[n], relative) for n in expected)


def _difference(expected: Tensor, got: Tensor, relative: bool) -> float:
    largest = (expected - got).abs().max().item()
    return largest / expected.abs().max().item() if relative else largest
