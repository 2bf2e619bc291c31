"""What `simple_fsdp` changes in a module and what it leaves as it was; on a fake group."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from inductor_overlap.models.llama3 import Llama3, Llama3Config
from inductor_overlap.simple_fsdp import (
    MixedPrecisionPolicy,
    initializing,
    simple_fsdp,
)

pytestmark = pytest.mark.quick


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def shard_of(module: nn.Module, name: str = "weight") -> DTensor:
    parameter = dict(module.named_parameters(recurse=False))[name]
    assert isinstance(parameter, DTensor)
    return parameter


def test_names_classes_and_repr_stay(mesh: DeviceMesh) -> None:
    config = Llama3Config(num_layers=1)
    plain, sharded = Llama3(config), simple_fsdp(Llama3(config), mesh)
    assert list(sharded.state_dict()) == list(plain.state_dict())
    assert repr(sharded) == repr(plain)
    assert isinstance(sharded.output, nn.Linear)
    assert type(sharded.output).__qualname__ == "Linear"
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    assert all(isinstance(v, DTensor) for v in sharded.state_dict().values())


def test_reading_gives_a_full_plain_tensor_and_parameters_stay_shards(mesh: DeviceMesh) -> None:
    linear = simple_fsdp(nn.Linear(3, 8), mesh)
    assert type(linear.weight) is Tensor and linear.weight.shape == (8, 3)
    assert shard_of(linear).to_local().shape == (2, 3)
    assert shard_of(linear).placements == (Shard(0),)


def test_buffers_attributes_and_requires_grad_stay(mesh: DeviceMesh) -> None:
    norm = nn.BatchNorm1d(8)
    norm.weight.requires_grad_(False)
    norm.bias.is_norm = True  # pyright: ignore[reportAttributeAccessIssue]
    simple_fsdp(norm, mesh)
    assert not isinstance(norm.running_mean, DTensor)
    assert not shard_of(norm).requires_grad and shard_of(norm, "bias").requires_grad
    assert shard_of(norm, "bias").is_norm  # pyright: ignore[reportAttributeAccessIssue]
    assert not norm.weight.requires_grad and norm.bias.requires_grad


@pytest.mark.parametrize(
    ("shape", "shard_dim", "placement"),
    [
        ((8, 4), 0, Shard(0)),
        ((8, 4), 1, Shard(1)),
        ((8, 4), -1, Shard(1)),
        ((8,), 1, Shard(0)),
        ((8, 4, 2), -3, Shard(0)),
        ((8,), -2, Shard(0)),
        ((), 0, Replicate()),
    ],
)
def test_which_dimension_is_cut(
    mesh: DeviceMesh, shape: tuple[int, ...], shard_dim: int, placement: Shard
) -> None:
    module = nn.ParameterDict({"p": torch.zeros(shape), "large": torch.zeros(4, 4, 4)})
    simple_fsdp(module, mesh, shard_dim=shard_dim)
    assert shard_of(module, "p").placements == (placement,)
    assert module["p"].shape == shape


@pytest.mark.parametrize(
    ("mode", "placements"),
    [("hybrid_shard", (Replicate(), Shard(0))), ("replicate", (Replicate(), Replicate()))],
)
def test_modes_on_two_dimensions(
    mesh_2d: DeviceMesh, mode: str, placements: tuple[Shard, ...]
) -> None:
    assert shard_of(simple_fsdp(nn.Linear(3, 8), mesh_2d, mode=mode)).placements == placements


def test_existing_cuts_stay_inner_most(mesh_2d: DeviceMesh) -> None:
    module = nn.ParameterDict(
        {
            "rows": distribute_tensor(torch.zeros(8, 8), mesh_2d["tp"], [Shard(0)]),
            "columns": distribute_tensor(torch.zeros(8, 8), mesh_2d["tp"], [Shard(1)]),
            "plain": torch.zeros(8, 8),
        }
    )
    simple_fsdp(module, mesh_2d["dp"])
    rows = shard_of(module, "rows")
    assert rows.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert rows.shape == (8, 8) and rows.to_local().shape == (2, 8)
    assert shard_of(module, "columns").placements == (Shard(0), Shard(1))
    assert shard_of(module, "plain").placements == (Shard(0),)
    assert module["rows"].device_mesh == mesh_2d["tp"] and module["rows"].placements == (Shard(0),)


def test_parameters_held_by_containers_are_read_full(mesh: DeviceMesh) -> None:
    parameters = nn.ParameterList([torch.zeros(8), torch.zeros(6)])
    simple_fsdp(parameters, mesh)
    assert [tuple(p.shape) for p in parameters] == [(8,), (6,)]
    assert shard_of(parameters, "1").to_local().shape == (2,)


def test_tied_parameters_stay_tied(mesh: DeviceMesh) -> None:
    model = simple_fsdp(Tied(), mesh)
    assert shard_of(model.head) is shard_of(model.embedding)
    assert len(list(model.parameters())) == 1
    model(torch.tensor([1])).sum().backward()
    assert shard_of(model.head).grad is not None


def test_a_tied_parameter_is_not_held_full_after_a_forward_that_raises(mesh: DeviceMesh) -> None:
    model = simple_fsdp(Tied(), mesh)
    with pytest.raises(IndexError):
        model(torch.tensor([99]))
    assert all(place.full is None for _, _, place in vars(model)["_shared_places"])


def test_models_of_one_class_keep_their_own_meshes_and_modes(mesh_2d: DeviceMesh) -> None:
    first = simple_fsdp(nn.Linear(3, 8), mesh_2d["dp"])
    second = simple_fsdp(nn.Linear(3, 8), mesh_2d["tp"], mode="replicate")
    untouched = nn.Linear(3, 8)
    assert shard_of(first).to_local().shape == (4, 3)
    assert shard_of(second).to_local().shape == (8, 3)
    assert first.weight.shape == second.weight.shape == (8, 3)
    assert type(untouched) is nn.Linear and type(untouched.weight) is nn.Parameter


def test_blocks_sharded_alike_share_one_class(mesh: DeviceMesh) -> None:
    model = simple_fsdp(Llama3(Llama3Config(num_layers=2)), mesh)
    first, second = model.layers
    for a, b in zip(first.modules(), second.modules(), strict=True):
        assert type(a) is type(b)


def test_copies_and_pickles_are_sharded_models_of_their_own(mesh: DeviceMesh) -> None:
    model = simple_fsdp(Tied(), mesh)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert type(other) is type(model)
        assert shard_of(other.head) is shard_of(other.embedding) is not shard_of(model.head)
        assert torch.equal(shard_of(other.head).to_local(), shard_of(model.head).to_local())
        assert shard_of(other.head).device_mesh == mesh
        other(torch.tensor([1])).sum().backward()
        assert shard_of(model.head).grad is None


def test_a_replaced_parameter_is_read_as_it_is(mesh: DeviceMesh) -> None:
    linear = simple_fsdp(nn.Linear(3, 8, bias=False), mesh)
    linear.weight = nn.Parameter(torch.ones(2, 3))
    assert torch.equal(linear.weight, torch.ones(2, 3))
    del linear.weight
    assert not hasattr(linear, "weight")


def test_the_wire_dtype_and_its_overrides(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(
        torch.bfloat16,
        overrides={
            "*norm*": MixedPrecisionPolicy(),
            "layers.0.attention": MixedPrecisionPolicy(torch.float16),
        },
    )
    model = simple_fsdp(Llama3(Llama3Config(num_layers=1)), mesh, mp_policy=policy)
    dtypes = {
        name: read.weight.dtype for name, read in model.named_modules() if "weight" in dir(read)
    }
    assert dtypes["output"] == torch.bfloat16
    assert dtypes["layers.0.attention_norm"] == dtypes["norm"] == torch.float32
    assert dtypes["layers.0.attention.wq"] == torch.float16
    assert shard_of(model.output).dtype == torch.float32


def test_initialising_reads_the_shards(mesh: DeviceMesh) -> None:
    linear = simple_fsdp(nn.Linear(3, 8), mesh)
    with initializing(linear):
        nn.init.constant_(linear.weight, 5.0)
    assert torch.equal(shard_of(linear).to_local(), torch.full((2, 3), 5.0))
    assert type(linear.weight) is Tensor


def test_submodules_on_another_mesh_stay_as_they_are(mesh_2d: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8))
    simple_fsdp(model[1], mesh_2d["tp"], mode="replicate")
    simple_fsdp(model, mesh_2d["dp"])
    first, second = model
    assert shard_of(first).device_mesh == mesh_2d["dp"]
    assert shard_of(second).device_mesh == mesh_2d["tp"]
    assert shard_of(second).placements == (Replicate(),)


def test_integers_are_not_cast(mesh: DeviceMesh) -> None:
    weights = nn.Parameter(torch.ones(8, 4, dtype=torch.int8), requires_grad=False)
    module = nn.ParameterDict({"quantized": weights, "scale": torch.ones(8)})
    simple_fsdp(module, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    assert module["quantized"].dtype == torch.int8
    assert module["scale"].dtype == torch.bfloat16


class KeepsParametersTwice(nn.Module):
    """Beside the registered parameters it keeps a list, a tuple and a dict of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 4))
        self.bias = nn.Parameter(torch.zeros(8))
        self.listed = [self.weight, None, self.bias]
        self.paired = (self.weight, self.bias)
        self.by_name = {"w": self.weight}


def test_plain_containers_of_parameters_follow_the_sharding(mesh: DeviceMesh) -> None:
    module = simple_fsdp(KeepsParametersTwice(), mesh)
    weight, nothing, bias = module.listed
    assert nothing is None and isinstance(weight, Tensor) and isinstance(bias, Tensor)
    assert type(weight) is Tensor and weight.shape == (8, 4) and bias.shape == (8,)
    assert [tuple(p.shape) for p in module.paired] == [(8, 4), (8,)]
    module.by_name["w"].sum().backward()
    assert shard_of(module).grad is not None


def test_recurrent_modules_gather_once_per_forward(mesh: DeviceMesh) -> None:
    lstm = simple_fsdp(nn.LSTM(4, 8), mesh)
    with CommDebugMode() as counted:
        output, _ = lstm(torch.ones(2, 1, 4))
    gathers = counted.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor]
    assert gathers == 4, "weights and biases of input and state"
    output.sum().backward()
    assert all(p.grad is not None for p in lstm.parameters())
    copy.deepcopy(lstm)(torch.ones(2, 1, 4))


def test_full_tensors_and_shards_can_be_loaded(mesh: DeviceMesh) -> None:
    values = {"weight": torch.rand(8, 3), "bias": torch.rand(8)}
    for assign in (False, True):
        linear = simple_fsdp(nn.Linear(3, 8), mesh)
        linear.load_state_dict(values, assign=assign)
        assert torch.equal(shard_of(linear).to_local(), values["weight"][:2])
        assert shard_of(linear, "bias").placements == (Shard(0),)
        linear.load_state_dict(linear.state_dict(), assign=assign)
    with pytest.raises(RuntimeError, match="size mismatch for weight"):
        linear.load_state_dict({**values, "weight": torch.rand(8, 2)})
