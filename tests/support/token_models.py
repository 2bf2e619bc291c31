"""Small language models, each with one habit that sharding must survive.

All map token ids of shape `[batch, seq]` to logits `[batch, seq, VOCAB_SIZE]`, so that they train
like the Llama of `sharded_training`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.sharded_training import VOCAB_SIZE

DIM = 8


class TokenModel(nn.Module):
    """Embedding, a body that maps `[batch, seq, DIM]` to the same shape, and a head."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB_SIZE, DIM)
        self.body = body
        self.output = nn.Linear(DIM, VOCAB_SIZE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.body(self.embedding(tokens)))


def token_model(body: Callable[[], nn.Module]) -> TokenModel:
    """The model around `body()`, the same at every call."""
    torch.manual_seed(7)
    return TokenModel(body())


class Feed(nn.Module):
    """A residual feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Recomputed(nn.Module):
    """All of a block is recomputed in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Feed()

    def forward(self, x: Tensor) -> Tensor:
        recomputed = checkpoint(self.block, x, use_reentrant=False)
        assert isinstance(recomputed, Tensor)
        return recomputed


class Uneven(nn.Module):
    """Five rows, three, one, and a scalar: fewer than ranks, or not a multiple."""

    def __init__(self) -> None:
        super().__init__()
        self.narrowing = nn.Sequential(nn.Linear(DIM, 5), nn.Linear(5, 3), nn.Linear(3, 1))
        self.widening = nn.Linear(1, DIM)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.widening(self.narrowing(x).tanh())


class HeldByContainers(nn.Module):
    """No submodule but containers that hold parameters directly."""

    def __init__(self) -> None:
        super().__init__()
        listed = [0.3 * torch.randn(DIM, DIM) for _ in range(2)]
        self.listed = nn.ParameterList(listed)
        named = nn.ParameterDict({"shift": torch.randn(DIM), "gain": torch.ones(DIM)})
        self.nested = nn.ModuleDict({"named": named})

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.listed:
            x = (x @ weight).tanh()
        named = self.nested["named"]
        assert isinstance(named, nn.ParameterDict)
        return x * named["gain"] + named["shift"]


class CalledThroughClosures(nn.Module):
    """The forward knows functions only, which have caught modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Feed(), Feed()
        second = self.second
        self.steps: tuple[Callable[[Tensor], Tensor], ...] = (
            lambda x: self.first(x),
            lambda x: second(x) * 0.5,
        )

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class PartlyUnused(nn.Module):
    """A module and a parameter that the forward never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = Feed(), Feed()
        self.alone = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


class Adapted(nn.Module):
    """A frozen matrix with a trainable low-rank adapter (LoRA, arXiv 2106.09685)."""

    def __init__(self, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM).requires_grad_(False)
        self.down = nn.Linear(DIM, rank, bias=False)
        self.up = nn.Linear(rank, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(x))


def adapted_model() -> TokenModel:
    """Only the adapters train."""
    model = token_model(lambda: nn.Sequential(Adapted(), Adapted()))
    model.embedding.requires_grad_(False)
    model.output.requires_grad_(False)
    return model


class TwoTowers(nn.Module):
    """Two blocks of one class, to be sharded differently."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Feed(), Feed()

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) + self.right(x)
