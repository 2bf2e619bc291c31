"""Decides which parameters of a model are sharded, how, and checks that they can be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from inductor_overlap.simple_fsdp.gather import Gather
from inductor_overlap.simple_fsdp.policy import MixedPrecisionPolicy
from inductor_overlap.simple_fsdp.sharded_module import gather_on_read, own_parameters, recipes_of

MODES = ("fully_shard",)

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)


def simple_fsdp(
    model: _ModuleT,
    mesh: DeviceMesh,
    *,
    mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    shard_dim: int = 0,
) -> _ModuleT:
    """Shards every parameter of `model` over `mesh`, in place, and returns `model`.

    Rank 0's values are the ones kept: they are scattered to the other ranks. Parameters on the
    meta device stay there. State-dict names, module classes (by `isinstance`) and buffers are
    unchanged. Gradients are averaged over the ranks of `mesh`.

    Args:
        model: Any module; its parameters are on the mesh's device or on meta.
        mesh: One-dimensional.
        mode: "fully_shard": parameters, gradients and optimizer state are sharded (ZeRO-3).
        mp_policy: Number formats of gathers and reductions; None keeps the parameters' own.
        shard_dim: The tensor dimension that is cut; may be negative. Parameters with fewer
            dimensions (biases, norms) are cut along their last one, scalars are kept whole.
            Sizes that do not divide are padded on the wire only.

    Raises:
        ValueError: An unknown mode, a mesh that is not one-dimensional, a parameter on another
            device than the mesh's, a `shard_dim` no parameter has, or a model sharded before.
    """
    policy = mp_policy or MixedPrecisionPolicy()
    _check(model, mesh, mode, shard_dim)
    gather = Gather(policy.param_dtype, policy.reduce_dtype)
    sharded: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        table = own_parameters(module)
        names = [name for name, parameter in table.items() if parameter is not None]
        for name in names:
            parameter = cast(nn.Parameter, table[name])
            if parameter not in sharded:
                sharded[parameter] = _shard(parameter, mesh, shard_dim)
            table[name] = sharded[parameter]
        if names:
            gather_on_read(module, dict.fromkeys(names, gather))
    return model


def _check(model: nn.Module, mesh: DeviceMesh, mode: str, shard_dim: int) -> None:
    if mode not in MODES:
        raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(map(repr, MODES))}")
    if mesh.ndim != 1:
        raise ValueError(
            f"mode {mode!r} needs a one-dimensional mesh, got {_describe(mesh)}: pass one of its "
            'dimensions, as in mesh["dp"]'
        )
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        if recipes_of(module):
            raise ValueError(
                f"simple_fsdp was applied to {path or 'this model'!r} before: apply it once, to "
                "the outermost module"
            )
    most_dims = 0
    for name, parameter in model.named_parameters():
        _check_parameter(name, parameter, mesh)
        most_dims = max(most_dims, parameter.ndim)
    if most_dims and not -most_dims <= shard_dim < most_dims:
        raise ValueError(
            f"shard_dim must lie in [{-most_dims}, {most_dims - 1}], the dimensions of this "
            f"model's parameters, got {shard_dim}"
        )


def _check_parameter(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    if isinstance(parameter, DTensor):
        raise ValueError(
            f"parameter {name!r} is a DTensor already ({parameter.placements}): simple_fsdp "
            "shards plain parameters"
        )
    device_type = parameter.device.type
    if device_type not in (mesh.device_type, "meta"):
        raise ValueError(
            f"parameter {name!r} is on {device_type!r}, the mesh on {mesh.device_type!r}: move the "
            f"model with .to({mesh.device_type!r}), or build the mesh with "
            f"init_device_mesh({device_type!r}, ...)"
        )


def _describe(mesh: DeviceMesh) -> str:
    return f"a mesh of shape {tuple(mesh.shape)}"


def _shard(parameter: nn.Parameter, mesh: DeviceMesh, shard_dim: int) -> nn.Parameter:
    """A DTensor parameter with the values of rank 0, and the attributes of `parameter`."""
    placement = _placement(parameter.ndim, shard_dim)
    sharded = nn.Parameter(
        distribute_tensor(parameter.detach(), mesh, [placement]),
        requires_grad=parameter.requires_grad,
    )
    vars(sharded).update(vars(parameter))
    return sharded


def _placement(num_dims: int, shard_dim: int) -> Placement:
    """How a parameter of `num_dims` dimensions is cut; see `shard_dim` of `simple_fsdp`."""
    if num_dims == 0:
        return Replicate()
    dim = shard_dim + num_dims if shard_dim < 0 else shard_dim
    return Shard(min(max(dim, 0), num_dims - 1))
