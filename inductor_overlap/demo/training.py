"""What each rank of the demo does: trains one model twice, side by side, and times the steps.

Both variants start from the same seed, see the same batches and gather the same parameters the
same number of times; one is compiled by `torch.compile` alone, the other with the plugin. They take
turns in short rounds, so that a machine that slows down slows both. A step is a forward and a
backward pass; the optimizer is not timed.

Tokens follow a rule (`next = 5 * token + 3` modulo the vocabulary), so that there is something to
learn and the loss falls.
"""

# torch's autograd, optimizers and DeviceMesh are partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.plugin import options, reports
from inductor_overlap.report import Report
from inductor_overlap.simple_fsdp import simple_fsdp

PLAIN, OVERLAPPED = "plain", "overlapped"
VARIANTS = (PLAIN, OVERLAPPED)
DIRECTIONS = ("forward", "backward")
NUM_RANKS = 2

Tell = Callable[[str, float], None]
"""Takes what is being done now, and the share of the whole run (0 to 1) that is done."""


_MODEL = Llama3Config(
    dim=128, num_layers=3, num_heads=8, num_kv_heads=4, vocab_size=256, ffn_dim=384
)


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the demo.

    The defaults make communication cost more than compute under the "cpu-gloo" profile, so that
    buckets matter. In a model this small, weights are most of the memory, and a bucket holds its
    weights twice while it unpacks them: the default limit, the peak of the unscheduled graph
    plus 5 %, would forbid the larger ones. So the demo has a limit of its own.

    Attributes:
        num_steps: Timed steps of each variant.
        batch: Sequences of a rank and step.
        seq: Tokens of a sequence.
        model: Dimensions of the Llama 3.
        cluster: The preset that prices the graphs.
        memory_limit_gb: GiB that the live bytes of a graph may take.
    """

    num_steps: int = 40
    batch: int = 2
    seq: int = 64
    model: Llama3Config = _MODEL
    cluster: str = "cpu-gloo"
    memory_limit_gb: float = 8 / 1024

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, got {self.num_steps}")


@dataclass
class RankResult:
    """What one rank saw; the first step of each variant, which compiles, is not timed.

    Attributes:
        losses: Variant -> this rank's loss of every step, the first included.
        step_s: Variant -> seconds of every timed step.
        weights_equal: Whether the weights of both variants are the same bits in the end.
        reports: "forward" and "backward" -> what the plugin did to that graph.
    """

    losses: dict[str, list[float]]
    step_s: dict[str, list[float]]
    weights_equal: bool
    reports: dict[str, Report]


@dataclass
class _Run:
    """One variant on its way."""

    model: nn.Module
    compiled: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    losses: list[float] = field(default_factory=list[float])
    step_s: list[float] = field(default_factory=list[float])


def train(settings: DemoSettings, tell: Tell) -> RankResult:
    """Trains both variants on this rank, inside an initialised process group."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    runs = {variant: _start(variant, settings, mesh) for variant in VARIANTS}
    for variant, run in runs.items():
        _compile(run, variant, settings, tell)
    for done, order in _rounds(settings.num_steps):
        tell("train in turns", 0.9 + 0.1 * done / settings.num_steps)
        for variant in order:
            _timed_step(runs[variant], settings)
    return RankResult(
        losses={variant: run.losses for variant, run in runs.items()},
        step_s={variant: run.step_s for variant, run in runs.items()},
        weights_equal=_same_weights(runs[PLAIN].model, runs[OVERLAPPED].model),
        reports=dict(zip(DIRECTIONS, reports(), strict=True)),
    )


def _start(variant: str, settings: DemoSettings, mesh: DeviceMesh) -> _Run:
    torch.manual_seed(0)
    model = Llama3(settings.model)
    model.init_weights()
    model = simple_fsdp(model, mesh)
    compiled = torch.compile(
        model, fullgraph=True, dynamic=False, options=_inductor_options(variant, settings)
    )
    return _Run(model, compiled, torch.optim.AdamW(model.parameters(), lr=3e-3))


def _inductor_options(variant: str, settings: DemoSettings) -> dict[str, Any]:
    # A graph that comes from the cache, because the other rank was first, would have no report.
    chosen: dict[str, Any] = {"fx_graph_cache": False}
    if variant == PLAIN:
        return chosen
    # Inductor alone keeps gathered parameters for backward. So does the plugin here, so that both
    # variants move the same bytes.
    ours = options(
        cluster=settings.cluster,
        memory_limit_gb=settings.memory_limit_gb,
        reshard_after_forward=False,
    )
    return {**chosen, **ours}


# Shares of the run's time: where the compiles begin, measured on two idle cores.
_COMPILE_BEGINS = {
    (PLAIN, "forward"): 0.05,
    (PLAIN, "backward"): 0.35,
    (OVERLAPPED, "forward"): 0.5,
    (OVERLAPPED, "backward"): 0.75,
}


def _compile(run: _Run, variant: str, settings: DemoSettings, tell: Tell) -> None:
    """The first step, untimed: Inductor compiles each graph when it is first needed."""
    how = "with the plugin" if variant == OVERLAPPED else "without the plugin"
    tell(f"compile forward {how}", _COMPILE_BEGINS[variant, "forward"])
    loss = _loss(run, settings)
    tell(f"compile backward {how}", _COMPILE_BEGINS[variant, "backward"])
    loss.backward()
    _finish_step(run, loss)


def _rounds(num_steps: int) -> list[tuple[int, tuple[str, ...]]]:
    """For each step its number and the order of the variants: who goes first alternates."""
    return [(step, VARIANTS if step % 2 else VARIANTS[::-1]) for step in range(num_steps)]


def _timed_step(run: _Run, settings: DemoSettings) -> None:
    dist.barrier()
    begin_s = time.perf_counter()
    loss = _loss(run, settings)
    loss.backward()
    run.step_s.append(time.perf_counter() - begin_s)
    _finish_step(run, loss)


def _loss(run: _Run, settings: DemoSettings) -> Tensor:
    tokens = _tokens(settings, step=len(run.losses))
    logits = run.compiled(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _finish_step(run: _Run, loss: Tensor) -> None:
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.losses.append(loss.item())


def _tokens(settings: DemoSettings, step: int) -> Tensor:
    """Token ids of shape `[batch, seq + 1]`, different for every step and rank."""
    generator = torch.Generator().manual_seed(NUM_RANKS * step + dist.get_rank())
    vocab_size = settings.model.vocab_size
    columns = [torch.randint(0, vocab_size, (settings.batch,), generator=generator)]
    for _ in range(settings.seq):
        columns.append((5 * columns[-1] + 3) % vocab_size)
    return torch.stack(columns, dim=1)


def _same_weights(expected: nn.Module, got: nn.Module) -> bool:
    pairs = zip(expected.parameters(), got.parameters(), strict=True)
    return all(torch.equal(_local(a), _local(b)) for a, b in pairs)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
