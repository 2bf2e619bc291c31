"""A sharded model from construction to checkpoint, on real gloo ranks.

Two ranks run all that needs two, and four what needs four: starting them costs the most.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from support.ranks import run_ranks
from support.sharded_training import batch, full, loss_of, shard_llama_2d, tiny_llama
from support.token_models import Uneven, token_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from inductor_overlap.models.llama3 import Llama3
from inductor_overlap.simple_fsdp import accumulate_gradients, initializing, simple_fsdp

pytestmark = pytest.mark.gloo

Answers = dict[str, list[Any]]
ModelT = TypeVar("ModelT", bound=nn.Module)


def distance(model: nn.Module, other: nn.Module, pick: Callable[[Tensor], Tensor]) -> float:
    """The largest difference between what `pick` takes from the parameters of two models."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    picked = [(full(pick(a)), full(pick(b))) for a, b in pairs]
    return max((a - b).abs().max().item() for a, b in picked)


def value(parameter: Tensor) -> Tensor:
    return parameter


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class EveryInit(nn.Module):
    """Modules with initialisations of their own; most do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 5)
        self.convolution = nn.Conv2d(3, 4, 3)
        self.embedding = nn.Embedding(7, 3, padding_idx=2)
        self.norm = nn.LayerNorm(4)
        self.bilinear = nn.Bilinear(3, 4, 5)
        self.recurrent = nn.LSTM(3, 5)
        self.truncated = nn.Linear(5, 5)
        self.wide = nn.Linear(8, 3)
        self.sparse = nn.Linear(5, 6)
        self.diagonal = nn.Linear(3, 5)
        self.by_hand = nn.Linear(3, 5)

    def init_weights(self) -> None:
        for module in self.children():
            cast(nn.Linear, module).reset_parameters()
        nn.init.trunc_normal_(self.truncated.weight, std=0.3)
        nn.init.orthogonal_(self.wide.weight)
        nn.init.sparse_(self.sparse.weight, 0.5)
        nn.init.eye_(self.diagonal.weight)
        weight = self.by_hand.weight
        with torch.no_grad():
            weight[1:3].normal_()
            weight.T[0] = torch.arange(5.0)
            weight.data.view(-1)[-2:] += 7
            weight.mul_(torch.arange(1.0, 4.0)).div_(weight.norm())
            first, last = weight[0], weight.data[4]
            first.fill_(2.0)
            weight.add_(0.5)
            last.mul_(first)
            self.by_hand.bias.copy_(weight.sum(1) * self.diagonal.bias)


def initialise() -> tuple[float, float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    distances: list[float] = []
    for build in (EveryInit, lambda: Llama3(tiny_llama().config)):
        with torch.device("meta"):
            model = simple_fsdp(build(), mesh)
        assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
        model.to_empty(device="cpu")
        reference = build()
        torch.manual_seed(3)
        reference.init_weights()
        torch.manual_seed(3)
        with initializing(model):
            model.init_weights()
        distances.append(distance(model, reference, value))
    return distances[0], distances[1]


def test_init_on_shards_gives_the_values_of_one_process(two_ranks: Answers) -> None:
    assert two_ranks["initialise"] == [(0.0, 0.0)] * 2


def accumulate(compiled: bool) -> tuple[float, int]:
    """Two optimizer steps of four micro-steps; the last reduces by itself in the second."""
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    shape = (2, num_ranks // 2) if num_ranks > 2 else (num_ranks,)
    mode = "hybrid_shard" if num_ranks > 2 else "fully_shard"
    model = simple_fsdp(tiny_llama(), init_device_mesh("cpu", shape), mode=mode)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, fullgraph=True, backend=counter) if compiled else model
    with accumulate_gradients(model):
        for step in range(4):
            loss_of(call, batch(step, rank)).backward()
            assert all(p.grad is None for p in model.parameters())
    with accumulate_gradients(model):
        for step in range(4, 7):
            loss_of(call, batch(step, rank)).backward()
    loss_of(call, batch(7, rank)).backward()
    reference = tiny_llama()
    for step in range(8):
        for other in range(num_ranks):
            (loss_of(reference, batch(step, other)) / num_ranks).backward()
    return distance(model, reference, gradient), counter.frame_count


def test_accumulated_gradients_are_reduced_once(two_ranks: Answers) -> None:
    for difference, num_compiles in two_ranks["accumulate compiled"]:
        assert difference < 1e-6
        assert num_compiles == 2, "one graph accumulates, one reduces"


def test_accumulated_gradients_are_reduced_once_over_replicas(four_ranks: Answers) -> None:
    for difference, _ in four_ranks["accumulate"]:
        assert difference < 1e-6


def clip() -> tuple[float, float, float]:
    num_ranks, rank = dist.get_world_size(), dist.get_rank()
    model = simple_fsdp(tiny_llama(), init_device_mesh("cpu", (num_ranks,)))
    reference = tiny_llama()
    loss_of(model, batch(0, rank)).backward()
    for other in range(num_ranks):
        (loss_of(reference, batch(0, other)) / num_ranks).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
    clipped = distance(model, reference, gradient)
    for parameters in zip(model.parameters(), reference.parameters(), strict=True):
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.copy_(parameter.grad.sign())  # AdamW's step is then free of rounding
    variants: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}]
    for options in variants:
        for m in (model, reference):
            torch.optim.AdamW(m.parameters(), **options).step()
    for m in (model, reference):
        torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, foreach=True).step()
    return abs(full(norms[0]) - norms[1]).item(), clipped, distance(model, reference, value)


def test_clipping_and_optimizer_variants_equal_one_process(two_ranks: Answers) -> None:
    for norm, clipped, stepped in two_ranks["clip"]:
        assert norm < 1e-6 and clipped < 1e-6 and stepped < 1e-6


def save_and_load(folder: str) -> tuple[float, ...]:
    """dp4 to dp2 x tp2 with AdamW's state, and the model back to dp4; then few rows."""
    mesh = init_device_mesh("cpu", (4,))
    mesh_2d = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first = simple_fsdp(tiny_llama(), mesh)
    first_optimizer = torch.optim.AdamW(first.parameters())
    loss_of(first, batch(0, dist.get_rank())).backward()
    first_optimizer.step()
    model_state, optimizer_state = get_state_dict(first, first_optimizer)
    save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/dp4")

    second = shard_llama_2d(emptied(tiny_llama()), mesh_2d)
    second_optimizer = torch.optim.AdamW(second.parameters())
    model_state, optimizer_state = get_state_dict(second, second_optimizer)
    load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{folder}/dp4")
    set_state_dict(
        second,
        second_optimizer,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    save({"model": second.state_dict()}, checkpoint_id=f"{folder}/dp2tp2")

    third = simple_fsdp(emptied(tiny_llama()), mesh)
    state = {"model": third.state_dict()}
    load(state, checkpoint_id=f"{folder}/dp2tp2")
    third.load_state_dict(state["model"])
    moments = zip(first_optimizer.state.values(), second_optimizer.state.values(), strict=True)
    return (
        distance(first, second, value),
        distance(first, third, value),
        max((full(a["exp_avg"]) - full(b["exp_avg"])).abs().max().item() for a, b in moments),
        save_and_load_fewer_rows_than_ranks(folder, mesh, mesh_2d),
    )


def save_and_load_fewer_rows_than_ranks(
    folder: str, mesh: DeviceMesh, mesh_2d: DeviceMesh
) -> float:
    """5, 3 and 1 rows, from four shards to two and back."""
    models = [token_model(Uneven) for _ in range(3)]
    first = simple_fsdp(models[0], mesh)
    others = [
        simple_fsdp(emptied(models[1]), mesh_2d, mode="hybrid_shard"),
        simple_fsdp(emptied(models[2]), mesh),
    ]
    source = first
    for index, other in enumerate(others):
        place, state = f"{folder}/few{index}", {"model": other.state_dict()}
        save({"model": source.state_dict()}, checkpoint_id=place)
        load(state, checkpoint_id=place)
        other.load_state_dict(state["model"])
        source = other
    return max(distance(first, other, value) for other in others)


def emptied(model: ModelT) -> ModelT:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def test_checkpoints_move_between_layouts(four_ranks: Answers) -> None:
    assert four_ranks["checkpoints"] == [(0.0, 0.0, 0.0, 0.0)] * 4


def infer() -> bool:
    model = simple_fsdp(tiny_llama(), init_device_mesh("cpu", (dist.get_world_size(),))).eval()
    reference = tiny_llama().eval()
    tokens = batch(0, 0)[:, :-1]
    expected = reference(tokens)
    with torch.no_grad():
        equal = [torch.equal(model(tokens), expected)]
        compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
        equal.append(torch.allclose(compiled(tokens), expected, atol=1e-6))
    with torch.inference_mode():
        equal.append(torch.equal(model(tokens), expected))
    return all(equal)


def test_inference_without_gradients(two_ranks: Answers) -> None:
    assert two_ranks["infer"] == [True, True]


def on_two_ranks() -> dict[str, Any]:
    return {
        "initialise": initialise(),
        "accumulate compiled": accumulate(compiled=True),
        "clip": clip(),
        "infer": infer(),
    }


def on_four_ranks(folder: str) -> dict[str, Any]:
    return {"accumulate": accumulate(compiled=False), "checkpoints": save_and_load(folder)}


@pytest.fixture(scope="module")
def two_ranks() -> Answers:
    return by_name(run_ranks(on_two_ranks, 2))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return by_name(run_ranks(on_four_ranks, 4, str(tmp_path_factory.mktemp("checkpoints"))))


def by_name(answers: list[dict[str, Any]]) -> Answers:
    """What each rank found, for each thing that was tried."""
    return {name: [answer[name] for answer in answers] for name in answers[0]}
