"""Says no, before anything is changed, to what `simple_fsdp` cannot shard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from inductor_overlap.simple_fsdp.mirrors import MirrorError, find_mirrors
from inductor_overlap.simple_fsdp.policy import MixedPrecisionPolicy
from inductor_overlap.simple_fsdp.sharded_module import own_parameters, read_plan

# Mesh dimensions each mode needs; None: any number.
MESH_DIMS: dict[str, int | None] = {"fully_shard": 1, "hybrid_shard": 2, "replicate": None}

_REMEDY = {
    "fully_shard": 'pass one of its dimensions, as in mesh["dp"], or use mode="hybrid_shard" on a '
    "(replicate, shard) mesh",
    "hybrid_shard": 'build one with init_device_mesh(device, (replicas, shards)), or use mode="'
    'fully_shard"',
}


def check_model(model: nn.Module, mesh: DeviceMesh, mode: str, shard_dim: int) -> None:
    """Raises a `ValueError` that names the first thing that does not fit; see `simple_fsdp`."""
    check_mesh(mesh, mode)
    sharded = _parameters_sharded_elsewhere(model, mesh)
    for path, module in unsharded_modules(model):
        _check_reads(path, module)
        _check_mirrors(path, module)
    parameters = dict(_named_parameters(model))
    for name, parameter in parameters.items():
        if parameter in sharded:
            raise ValueError(
                f"parameter {name!r} is tied to {sharded[parameter]!r}, whose module is sharded "
                "over another mesh already: shard both with one call, or untie them"
            )
        _check_parameter(name, parameter, mesh)
    _check_shard_dim(shard_dim, max((p.ndim for p in parameters.values()), default=0))


def check_kinds(model: object, mesh: object, mp_policy: object) -> None:
    """Raises a `ValueError` unless these are a module, a mesh, and our policy or None."""
    for name, value, kind, remedy in (
        ("model", model, nn.Module, "shard the module before you wrap or trace it"),
        ("mesh", mesh, DeviceMesh, 'build one with init_device_mesh("cuda", (num_ranks,))'),
        (
            "mp_policy",
            mp_policy,
            MixedPrecisionPolicy | None,
            "write io.MixedPrecisionPolicy(param_dtype, reduce_dtype); FSDP2's own has fields that "
            "mean nothing here",
        ),
    ):
        if not isinstance(value, kind):
            expected = getattr(kind, "__name__", str(kind))
            raise ValueError(
                f"simple_fsdp expects {name} to be {expected}, got {type(value)}: {remedy}"
            )


def check_mesh(mesh: DeviceMesh, mode: str) -> None:
    """Raises a `ValueError` unless `mode` exists and `mesh` has the dimensions it needs."""
    if mode not in MESH_DIMS:
        raise ValueError(f"unknown mode {mode!r}: choose one of {', '.join(map(repr, MESH_DIMS))}")
    num_dims = MESH_DIMS[mode]
    if num_dims not in (None, mesh.ndim):
        raise ValueError(
            f"mode={mode!r} needs a mesh of {num_dims} dimension{'s' * (num_dims != 1)}, got one "
            f"of {mesh.ndim} with shape {tuple(mesh.shape)}: {_REMEDY[mode]}"
        )


def unsharded_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of `model` and every module in it that was not sharded yet."""
    named = cast("Iterator[tuple[str, nn.Module]]", model.named_modules())
    return ((path, module) for path, module in named if read_plan(module) is None)


def _named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter of a module that was not sharded yet, under each of its names."""
    for path, module in unsharded_modules(model):
        own = own_parameters(module).items()
        yield from ((f"{path}.{name}" if path else name, p) for name, p in own if p is not None)


def _parameters_sharded_elsewhere(model: nn.Module, mesh: DeviceMesh) -> dict[nn.Parameter, str]:
    """The parameters of submodules sharded over other meshes, with their names.

    Raises:
        ValueError: `model` was sharded before, or a submodule was over `mesh`.
    """
    found: dict[nn.Parameter, str] = {}
    for path, module in cast("Iterator[tuple[str, nn.Module]]", model.named_modules()):
        plan = read_plan(module)
        if plan is None:
            continue
        if module is model or any(gather.mesh == mesh for _, gather in plan.recipes):
            raise ValueError(
                f"simple_fsdp was applied to {path or 'this model'!r} before: apply it once, to "
                "the outermost module; only submodules on another mesh are sharded first"
            )
        own = own_parameters(module).items()
        found.update({p: f"{path}.{name}" for name, p in own if p is not None})
    return found


def _check_reads(path: str, module: nn.Module) -> None:
    """Refuses modules whose parameters are read, or whose gradients come, in ways of their own."""
    where = f"module {path!r} ({type(module).__name__})"
    if isinstance(module, torch.jit.ScriptModule):
        raise ValueError(
            f"{where} is a scripted module, whose code reads its parameters itself: expected a "
            "Python module; shard the module it was made from, and use torch.compile"
        )
    if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
        raise ValueError(
            f"{where} has sparse gradients, which cannot be reduced into shards: expected "
            "sparse=False"
        )


def _check_mirrors(path: str, module: nn.Module) -> None:
    try:
        find_mirrors(module)
    except MirrorError as error:
        raise ValueError(f"module {path!r} ({type(module).__name__}) {error}") from None


def _check_parameter(name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    if is_lazy(parameter):
        raise ValueError(
            f"parameter {name!r} has no shape yet: call the model once on an example batch, so "
            "that its lazy modules make their parameters, and shard it then"
        )
    device_type = parameter.device.type
    if device_type not in (mesh.device_type, "meta"):
        raise ValueError(
            f"parameter {name!r} is on {device_type!r}, the mesh on {mesh.device_type!r}: move the "
            f"model with .to({mesh.device_type!r}), or build the mesh with "
            f"init_device_mesh({device_type!r}, ...)"
        )
    if isinstance(parameter, DTensor):
        _check_meshes(name, parameter.device_mesh, mesh)


def _check_meshes(name: str, own: DeviceMesh, mesh: DeviceMesh) -> None:
    own_names, names = own.mesh_dim_names, mesh.mesh_dim_names
    if own_names and names and not set(own_names) & set(names):
        return
    raise ValueError(
        f"parameter {name!r} is a DTensor on mesh {own}, which cannot be joined with the "
        f"data-parallel mesh {mesh}: take both from one named mesh, as in "
        'mesh = init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")), mesh["tp"] for '
        'tensor parallelism and mesh["dp"] here'
    )


def _check_shard_dim(shard_dim: int, most_dims: int) -> None:
    if most_dims and not -most_dims <= shard_dim < most_dims:
        raise ValueError(
            f"shard_dim must lie in [{-most_dims}, {most_dims - 1}], the dimensions of this "
            f"model's parameters, got {shard_dim}"
        )
