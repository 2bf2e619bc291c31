"""Models that are cut in other ways than by data: experts, sequence, pipeline stages.

They are what a user brings to `simple_fsdp`, written with DTensor and functional collectives; each
runs whole too, as the reference.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from inductor_overlap.simple_fsdp import accumulate_gradients, simple_fsdp
from support.sharded_training import VOCAB_SIZE, Call, Run, average_over, batch, full
from support.token_models import DIM, Feed, TokenModel

NUM_EXPERTS = 4


class Experts(nn.Module):
    """Feed-forward experts, every one weighed by its gate, on all ranks or over a mesh.

    Over a mesh each rank holds some of the experts; it is sent the tokens of the others by one
    all-to-all, and sends back what its experts made of them by another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(NUM_EXPERTS, DIM, DIM))
        self.mesh: DeviceMesh | None = None

    def distribute(self, mesh: DeviceMesh) -> None:
        """Expert parallelism: the experts become a DTensor, cut by expert."""
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(0)]))
        self.mesh = mesh

    def forward(self, tokens: Tensor, gates: Tensor) -> Tensor:
        """Tokens `[n, DIM]` and gates `[n, NUM_EXPERTS]` to `[n, DIM]`."""
        if self.mesh is None:
            return _mix(tokens, gates, self.weight)
        num_ranks, group = self.mesh.size(), self.mesh.get_group()
        weight = cast(DTensor, self.weight).to_local()
        for_rank = torch.cat(
            (tokens.expand(num_ranks, -1, -1), torch.stack(gates.chunk(num_ranks, dim=1))), dim=2
        )
        received = all_to_all_single_autograd(for_rank.flatten(0, 1), None, None, group)
        mixed = _mix(received[:, :DIM], received[:, DIM:], weight)
        returned = all_to_all_single_autograd(mixed, None, None, group)
        return returned.unflatten(0, (num_ranks, -1)).sum(0)


def _mix(tokens: Tensor, gates: Tensor, weight: Tensor) -> Tensor:
    return torch.einsum("nd,edf,ne->nf", tokens, weight, gates)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, NUM_EXPERTS)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        mixed = self.experts(tokens, self.router(tokens).softmax(dim=-1))
        return x + mixed.unflatten(0, x.shape[:2])


def shard_experts_apart(model: TokenModel, mesh: DeviceMesh) -> TokenModel:
    """Experts over "ep", their replicas over "edp"; everything else over all ranks.

    An expert sees the tokens of all "ep" ranks, so that its gradient is their sum; it is divided,
    as gradients are averages over the ranks that have tokens.
    """
    body = cast(MixtureOfExperts, model.body)
    body.experts.distribute(mesh["ep"])
    simple_fsdp(body.experts, mesh["edp"])
    for parameter in body.experts.parameters():
        parameter.register_hook(lambda gradient: gradient / mesh["ep"].size())
    return simple_fsdp(model, mesh._flatten("dp"))


class Attention(nn.Module):
    """Causal attention of one head; over a mesh, every rank has its part of the sequence.

    Keys and values are gathered from all ranks, in order (Llama 3, arXiv 2407.21783, section
    3.3.2); their gradients are summed on the way back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        key, value = self._whole_sequence(key), self._whole_sequence(value)
        first = 0 if self.mesh is None else self.mesh.get_local_rank() * x.shape[1]
        position = torch.arange(x.shape[1])[:, None] + first
        may_see = position >= torch.arange(key.shape[1])[None]
        scores = (query @ key.transpose(1, 2) / DIM**0.5).masked_fill(~may_see, -torch.inf)
        return x + scores.softmax(dim=-1) @ value

    def _whole_sequence(self, part: Tensor) -> Tensor:
        if self.mesh is None:
            return part
        cut = DTensor.from_local(part, self.mesh, [Shard(1)], run_check=False)
        return cut.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def shard_over_sequence_too(model: TokenModel, mesh: DeviceMesh) -> TokenModel:
    """Context parallelism over "cp"; parameters are sharded over all ranks."""
    cast(Attention, model.body).mesh = mesh["cp"]
    return simple_fsdp(model, mesh._flatten("dp_cp"))


def sequence_loss(call: Call, tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """The loss of this rank's part of the sequence."""
    rank, num_ranks = mesh["cp"].get_local_rank(), mesh["cp"].size()
    inputs, targets = (part.chunk(num_ranks, 1)[rank] for part in (tokens[:, :-1], tokens[:, 1:]))
    return F.cross_entropy(call(inputs).flatten(0, 1), targets.flatten())


class Chain(nn.Module):
    """A model that runs with any of its parts left out, so that a stage keeps its names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.embedding: nn.Module | None = nn.Embedding(VOCAB_SIZE, DIM)
        self.layers = nn.ModuleDict({"0": Feed(), "1": Feed()})
        self.output: nn.Module | None = nn.Linear(DIM, VOCAB_SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.embedding is not None else x
        for layer in self.layers.values():
            x = layer(x)
        return self.output(x) if self.output is not None else x

    def stage(self, index: int) -> Chain:
        """Only the first half, or only the second."""
        del self.layers[str(1 - index)]
        if index == 0:
            self.output = None
        else:
            self.embedding = None
        return self


def train_stage(model: nn.Module, call: nn.Module, mesh: DeviceMesh, num_steps: int) -> Run:
    """Steps of GPipe with two micro-batches; stages over "pp", batches over "dp".

    Gradients of the micro-batches are added up on each rank and reduced once.
    """
    index, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    stage = PipelineStage(call, index, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 2, loss_fn=_share_of_loss, scale_grads=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(num_steps):
        optimizer.zero_grad()
        tokens = batch(step, mesh["dp"].get_local_rank())
        found: list[Tensor] = []
        with accumulate_gradients(model):
            if index == 0:
                schedule.step(tokens[:, :-1])
            else:
                schedule.step(target=tokens[:, 1:], losses=found)
        loss = torch.stack(found).sum().detach() if found else torch.zeros(())
        dist.broadcast(loss, group=group, group_src=1)
        losses.append(average_over(mesh["dp"], loss))
        gradients = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return Run(losses, gradients, {n: full(p) for n, p in model.named_parameters()})


def _share_of_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / 2
