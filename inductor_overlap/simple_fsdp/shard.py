"""Shards a model: lays each parameter out on the mesh and gives its holders a recipe to read it.

Decides placements only; `checks` refuses what does not fit, `gather` moves the data.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TypeVar, cast

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import (
    _StridedShard,  # pyright: ignore[reportPrivateUsage]
)

from inductor_overlap.simple_fsdp.checks import check_kinds, check_model, unsharded_modules
from inductor_overlap.simple_fsdp.gather import Gather, ModelParallel, Placements
from inductor_overlap.simple_fsdp.mirrors import Mirror, find_mirrors
from inductor_overlap.simple_fsdp.policy import MixedPrecisionPolicy
from inductor_overlap.simple_fsdp.sharded_module import (
    ReadPlan,
    gather_on_read,
    own_parameters,
    share_gathers,
)

_ModuleT = TypeVar("_ModuleT", bound=nn.Module)
_Holder = tuple[nn.Module, str]


def simple_fsdp(
    model: _ModuleT,
    mesh: DeviceMesh,
    *,
    mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    shard_dim: int = 0,
) -> _ModuleT:
    """Shards every parameter of `model` over `mesh`, in place, and returns `model`.

    The values of the first rank of each group are the ones kept: they are sent to the others.
    Parameters on the meta device stay there. State-dict names, `isinstance`, `requires_grad` and
    buffers are unchanged; tied parameters stay tied. Parameters that are DTensors already (after
    `parallelize_module`, say) are cut further on `mesh`, the existing cuts staying inner-most.
    Submodules that were sharded over another mesh (experts, say) stay as they are. Gradients are
    averaged over the ranks of `mesh`.

    Args:
        model: Any module; its parameters are on the mesh's device or on meta.
        mesh: The data-parallel mesh: one dimension, or (replicate, shard) for "hybrid_shard".
        mode: "fully_shard": parameters, gradients and optimizer state are sharded (ZeRO-3).
            "hybrid_shard": sharded within the second mesh dimension, replicated over the first.
            "replicate": whole on every rank, gradients all-reduced.
        mp_policy: Number formats of gathers and reductions; None keeps the parameters' own.
        shard_dim: The tensor dimension that is cut; may be negative. Parameters with fewer
            dimensions (biases, norms) are cut along their last one, scalars are kept whole.
            Sizes that do not divide are padded on the wire only.

    Raises:
        ValueError: An argument of another kind, an unknown mode, a mesh with other dimensions than
            the mode needs, a parameter on another device than the mesh's or on a mesh that cannot
            be joined with it, a `shard_dim` no parameter has, an override that matches nothing, a
            parameter without a shape yet, scripted modules, sparse gradients, a plain attribute
            with parameters that cannot follow, a parameter shared with a module sharded over
            another mesh, or a model sharded over `mesh` before.
    """
    check_kinds(model, mesh, mp_policy)
    policy = mp_policy or MixedPrecisionPolicy()
    check_model(model, mesh, mode, shard_dim)
    holders = _holders(model)
    policy.check_matches(holders)
    mirrors = _mirrors(model)
    recipes: dict[nn.Module, dict[str, Gather]] = defaultdict(dict)
    for fqn, places in holders.items():
        parameter = _parameter_of(places[0])
        placements = _placements(mode, mesh.ndim, parameter.ndim, shard_dim)
        gather = _recipe(parameter, mesh, placements, policy.policy_for(fqn))
        sharded = _shard(parameter, gather)
        for module, name in places:
            own_parameters(module)[name] = sharded
            recipes[module][name] = gather
    tied = [places for places in holders.values() if len(places) > 1]
    _install(model, recipes, mirrors, tied)
    return model


def _holders(model: nn.Module) -> dict[str, list[_Holder]]:
    """For each distinct parameter, by its first full name, the modules that hold it."""
    first_name: dict[nn.Parameter, str] = {}
    holders: dict[str, list[_Holder]] = {}
    for path, module in unsharded_modules(model):
        for name, parameter in own_parameters(module).items():
            if parameter is None:
                continue
            fqn = first_name.setdefault(parameter, f"{path}.{name}" if path else name)
            holders.setdefault(fqn, []).append((module, name))
    return holders


def _mirrors(model: nn.Module) -> dict[nn.Module, tuple[Mirror, ...]]:
    """The modules that keep parameters in plain attributes too, which are taken from them."""
    found = {module: find_mirrors(module) for _, module in unsharded_modules(model)}
    for module, mirrors in found.items():
        for mirror in mirrors:
            del vars(module)[mirror.attribute]
    return {module: mirrors for module, mirrors in found.items() if mirrors}


def _parameter_of(holder: _Holder) -> nn.Parameter:
    module, name = holder
    return cast(nn.Parameter, own_parameters(module)[name])


def _placements(mode: str, num_mesh_dims: int, num_dims: int, shard_dim: int) -> Placements:
    """How a parameter of `num_dims` dimensions is laid out; see `shard_dim` of `simple_fsdp`."""
    if num_dims == 0 or mode == "replicate":
        return (Replicate(),) * num_mesh_dims
    dim = shard_dim + num_dims if shard_dim < 0 else shard_dim
    return (Replicate(),) * (num_mesh_dims - 1) + (Shard(min(max(dim, 0), num_dims - 1)),)


def _recipe(
    parameter: nn.Parameter, mesh: DeviceMesh, placements: Placements, policy: MixedPrecisionPolicy
) -> Gather:
    layout = _model_parallel(parameter)
    if not parameter.is_floating_point():  # quantised weights, say: a cast would lose them
        return Gather(mesh, placements, model_parallel=layout)
    return Gather(mesh, placements, policy.param_dtype, policy.reduce_dtype, layout)


def _model_parallel(parameter: nn.Parameter) -> ModelParallel | None:
    if not isinstance(parameter, DTensor):
        return None
    local = parameter.to_local()
    return ModelParallel(
        parameter.device_mesh, parameter.placements, tuple(local.shape), local.stride()
    )


def _shard(parameter: nn.Parameter, gather: Gather) -> nn.Parameter:
    """A DTensor parameter with the first rank's values, and the attributes of `parameter`."""
    tensor = parameter.detach()
    if isinstance(tensor, DTensor):
        shard = _join_meshes(tensor, gather)
    else:
        shard = distribute_tensor(tensor.contiguous(), gather.mesh, gather.placements)
    sharded = nn.Parameter(shard, requires_grad=parameter.requires_grad)
    vars(sharded).update(vars(parameter))
    return sharded


def _join_meshes(tensor: DTensor, gather: Gather) -> DTensor:
    """`tensor` cut further along the data-parallel mesh, whose dimensions come first."""
    local = distribute_tensor(tensor.to_local(), gather.mesh, gather.placements).to_local()
    # There is no public call that joins meshes; FSDP2 uses this one (_fsdp_param.py).
    mesh = DeviceMesh._concatenate(  # pyright: ignore[reportPrivateUsage]
        [gather.mesh, tensor.device_mesh]
    )
    outer = tuple(_cut_outside(placement, tensor) for placement in gather.placements)
    return DTensor.from_local(
        local,
        mesh,
        outer + tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _cut_outside(placement: Placement, tensor: DTensor) -> Placement:
    """How DTensor writes that `placement` cuts what the placements of `tensor` have cut already."""
    if not isinstance(placement, Shard):
        return placement
    dim = cast(int, placement.dim)  # pyright: ignore[reportUnknownMemberType]
    sizes = [
        tensor.device_mesh.size(mesh_dim)
        for mesh_dim, inner in enumerate(tensor.placements)
        if inner.is_shard(dim)
    ]
    if not sizes:
        return placement
    return _StridedShard(dim, split_factor=math.prod(sizes))


def _install(
    model: nn.Module,
    recipes: dict[nn.Module, dict[str, Gather]],
    mirrors: dict[nn.Module, tuple[Mirror, ...]],
    tied: list[list[_Holder]],
) -> None:
    scopes = _scopes(model, mirrors, tied)
    shared: dict[nn.Module, set[str]] = defaultdict(set)
    for module, name in (holder for scope in scopes.values() for each in scope for holder in each):
        shared[module].add(name)
    for module in dict.fromkeys([*scopes, *recipes]):
        plan = ReadPlan(
            tuple(sorted(recipes.get(module, {}).items())),
            frozenset(shared.get(module, ())),
            opens_scope=module in scopes,
            mirrors=mirrors.get(module, ()),
        )
        gather_on_read(module, plan)
    for module, parameters in scopes.items():
        share_gathers(module, parameters)


def _scopes(
    model: nn.Module, mirrors: dict[nn.Module, tuple[Mirror, ...]], tied: list[list[_Holder]]
) -> dict[nn.Module, list[list[_Holder]]]:
    """The modules whose forward gathers parameters for all who read them in it, and which.

    The model does so for tied parameters, a module with mirrors for its other ones.
    """
    scopes: dict[nn.Module, list[list[_Holder]]] = {model: [*tied]} if tied else {}
    is_tied = {holder for places in tied for holder in places}
    for module in mirrors:
        own = [(module, name) for name, p in own_parameters(module).items() if p is not None]
        scopes.setdefault(module, []).extend([h] for h in own if h not in is_tied)
    return scopes
