"""What `simple_fsdp` refuses: each error says what was expected, what came, and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy as Fsdp2Policy
from torch.distributed.tensor import Shard, distribute_tensor

from inductor_overlap.simple_fsdp import MixedPrecisionPolicy, accumulate_gradients, simple_fsdp

pytestmark = pytest.mark.quick


def refused(message: str, module: nn.Module, mesh: Any, **options: Any) -> None:
    """The call raises a `ValueError` that `message` matches, and changes nothing."""
    parameters = list(module.parameters())
    with pytest.raises(ValueError, match=message):
        simple_fsdp(module, mesh, **options)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))


def test_arguments_of_another_kind(mesh: DeviceMesh) -> None:
    linear: Any = nn.Linear(3, 8)
    fsdp2 = Fsdp2Policy()
    with pytest.raises(ValueError, match="expects model to be Module, got <class 'function'>"):
        simple_fsdp(linear.forward.__func__, mesh)
    refused("mesh to be DeviceMesh, got <class 'int'>: build one with init_device", linear, 4)
    refused(r"got .*\.fsdp\..*: write io\.MixedPrecisionPolicy", linear, mesh, mp_policy=fsdp2)
    policies: Any = {"norm": torch.float32}
    with pytest.raises(ValueError, match=r"overrides\['norm'\] must be a .*, got torch.float32"):
        MixedPrecisionPolicy(overrides=policies)


def test_an_unknown_mode(mesh: DeviceMesh) -> None:
    message = "unknown mode 'zero3': choose one of 'fully_shard', 'hybrid_shard', 'replicate'"
    refused(message, nn.Linear(3, 8), mesh, mode="zero3")


def test_hybrid_shard_on_one_dimension(mesh: DeviceMesh) -> None:
    message = (
        r"'hybrid_shard' needs a mesh of 2 dimensions, got one of 1 with shape \(4,\): build one "
        r"with init_device_mesh\(device, \(replicas, shards\)\), or use mode=\"fully_shard\""
    )
    refused(message, nn.Linear(3, 8), mesh, mode="hybrid_shard")


def test_fully_shard_on_two_dimensions(mesh_2d: DeviceMesh) -> None:
    message = (
        r"'fully_shard' needs a mesh of 1 dimension, got one of 2 .*: pass one of its dimensions, "
        r"as in mesh\[\"dp\"\]"
    )
    refused(message, nn.Linear(2, 2), mesh_2d)


def test_a_mesh_on_another_device(mesh: DeviceMesh) -> None:
    cuda = DeviceMesh("cuda", torch.arange(4), _init_backend=False)
    message = (
        r"'weight' is on 'cpu', the mesh on 'cuda': move the model with \.to\('cuda'\), or build "
        r"the mesh with init_device_mesh\('cpu', \.\.\.\)"
    )
    refused(message, nn.Linear(2, 2), cuda)


@pytest.mark.parametrize("shard_dim", [2, -3])
def test_a_shard_dim_out_of_range(mesh: DeviceMesh, shard_dim: int) -> None:
    message = rf"shard_dim must lie in \[-2, 1\], the dimensions of .*, got {shard_dim}"
    refused(message, nn.Linear(3, 8), mesh, shard_dim=shard_dim)


def test_applying_it_twice(mesh: DeviceMesh) -> None:
    linear = simple_fsdp(nn.Linear(3, 8), mesh)
    refused("applied to 'this model' before: apply it once, to the outermost", linear, mesh)
    refused("applied to '0' before: apply it once", nn.Sequential(linear), mesh)


def test_a_parameter_tied_to_one_on_another_mesh(mesh_2d: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    simple_fsdp(model[0], mesh_2d["tp"])
    vars(model[1])["_parameters"]["weight"] = dict(model[0].named_parameters())["weight"]
    message = r"'1\.weight' is tied to '0\.weight', whose .*: shard both with one call, or untie"
    refused(message, model, mesh_2d["dp"])


def test_a_dtensor_on_the_data_parallel_mesh(mesh_2d: DeviceMesh) -> None:
    sharded = nn.ParameterDict({"p": distribute_tensor(torch.zeros(4), mesh_2d["dp"], [Shard(0)])})
    message = r"'p' is a DTensor on mesh .* which cannot be joined .*: take both from one named"
    refused(message, sharded, mesh_2d["dp"])


def test_an_override_that_matches_nothing(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(overrides={"nrom": MixedPrecisionPolicy()})
    message = r"overrides\['nrom'\] matches no parameter: use a pattern .*; the nearest are \['"
    refused(message, nn.Linear(3, 8), mesh, mp_policy=policy)


def test_parameters_without_a_shape(mesh: DeviceMesh) -> None:
    message = r"'0\.weight' has no shape yet: call the model once on an example batch"
    refused(message, nn.Sequential(nn.LazyLinear(3)), mesh)


def test_scripted_modules(mesh: DeviceMesh) -> None:
    scripted = torch.jit.script(nn.Linear(2, 2))
    message = r"module '0' \(.*\) is a scripted module, .*; shard the module it was made from"
    refused(message, nn.Sequential(scripted), mesh)


def test_sparse_gradients(mesh: DeviceMesh) -> None:
    message = r"module '0' \(Embedding\) has sparse gradients, .*: expected sparse=False"
    refused(message, nn.Sequential(nn.Embedding(4, 2, sparse=True)), mesh)


def test_plain_references_that_cannot_follow(mesh: DeviceMesh) -> None:
    mixed, foreign, alone = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2)
    vars(mixed)["cache"] = [mixed.weight, 3]
    vars(foreign)["weights"] = {"w": foreign[0].weight}
    vars(alone)["same"] = alone.weight
    for module, attribute, got in (
        (mixed, "cache", "list"),
        (foreign, "weights", "dict"),
        (alone, "same", "Parameter"),
    ):
        message = (
            rf"keeps parameters in the plain attribute '{attribute}' as well, .*: expected a list, "
            rf"tuple or dict of its own parameters and nothing else, got a {got}; register them"
        )
        refused(message, module, mesh)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype"])
@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (
            torch.float8_e4m3fn,
            r"=torch\.float8_e4m3fn: float8 needs scales, .*; use torch.bfloat16",
        ),
        (torch.int32, "must be None or one of torch.float64, .*; got torch.int32"),
        ("bf16", "must be None or one of torch.float64, .*; got 'bf16'"),
    ],
)
def test_dtypes_a_cast_does_not_serve(field: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(ValueError, match=rf"MixedPrecisionPolicy\.{field}.*{message}"):
        MixedPrecisionPolicy(**{field: dtype})  # pyright: ignore[reportArgumentType]


def test_accumulation_needs_a_sharded_model_and_does_not_nest(mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match="call simple_fsdp"), accumulate_gradients(nn.Linear(2, 2)):
        pass
    model = simple_fsdp(nn.Linear(3, 8), mesh)
    with accumulate_gradients(model):
        with pytest.raises(ValueError, match="do not nest"), accumulate_gradients(model):
            pass
        model(torch.ones(1, 3)).sum().backward()
        assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in model.parameters())
