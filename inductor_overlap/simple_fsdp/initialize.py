"""Lets a model's own initialisation run on shards, with the values one process would get.

Initialisation code writes into `module.weight`; on a sharded model that is a gathered copy, and
the writes would be lost. Inside `initializing` it is the sharded parameter itself, and what is done
to it is done as one process would: elementwise writes on the shards, everything else on the full
tensor, one at a time, of which each rank keeps its part. So random numbers are drawn for the full
tensor and the generator advances as in one process: equal seeds give equal weights for any number
of ranks, which DTensor alone does not promise on CPUs (torch/distributed/tensor/_random.py). A
view, `weight[padding_idx]` say, is a view of the full tensor, and what is written into it goes back
to the shards.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from inductor_overlap.simple_fsdp.gather import cut_like
from inductor_overlap.simple_fsdp.sharded_module import original_class, sharded_modules


@contextmanager
def initializing(model: nn.Module) -> Generator[None]:
    """Within it, parameters of `model` read as their shards, to be filled in place.

    Run it on every rank, with the same random seed.

    Args:
        model: A model sharded by `simple_fsdp`, after `to_empty` if it was built on meta.
    """
    modules = sharded_modules(model)
    classes = [type(module) for module in modules]
    for module in modules:
        module.__class__ = original_class(module)
    try:
        with _AsOneProcess():
            yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls


class _AsOneProcess(TorchDispatchMode):
    """Runs operations on DTensors as one process would, and keeps each rank's part of what changed.

    Full tensors live as long as views of them do.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._viewed: dict[StorageWeakRef, tuple[DTensor, tuple[int, ...]]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target, out = args[0] if args else None, kwargs.get("out")
        if isinstance(out, DTensor):
            return self._call_into(out, func, args, kwargs)
        if not isinstance(target, DTensor):
            return self._call_on_full(func, args, kwargs)
        if target.is_meta or _works_on_shards(func, args, kwargs):
            return func(*args, **kwargs)
        full = _empty_full(target) if _overwrites(func) else target.full_tensor()
        result = func(full, *tree_map(_full, args[1:]), **tree_map(_full, kwargs))
        if func._schema.is_mutable:
            _keep_part(full, target)
            return target
        self._remember_views(result, full, target)
        return result

    def _call_into(
        self, out: DTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> DTensor:
        full = _empty_full(out)
        func(*tree_map(_full, args), **{**kwargs, "out": full})
        _keep_part(full, out)
        return out

    def _call_on_full(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call whose first argument is a plain tensor, which may be a view of a parameter."""
        if not func._schema.is_mutable:
            return func(*tree_map(_full, args), **tree_map(_full, kwargs))
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)  # a list of parameters, written one by one
        result = func(args[0], *tree_map(_full, args[1:]), **tree_map(_full, kwargs))
        self._write_back(args[0])
        return result

    def _remember_views(self, result: object, full: Tensor, target: DTensor) -> None:
        self._viewed = {ref: t for ref, t in self._viewed.items() if not ref.expired()}
        storage = _storage(full)
        if storage in map(_storage, _tensors(result)):
            self._viewed[storage] = target, full.stride()

    def _write_back(self, written: Tensor) -> None:
        """Keep this rank's part of the parameter that `written` is a view of, if it is one."""
        if _storage(written) in self._viewed:
            parameter, stride = self._viewed[_storage(written)]
            _keep_part(written.as_strided(parameter.shape, stride, 0), parameter)


_ON_SHARDS = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.fill_.Scalar,
    torch.ops.aten.zero_.default,
)


def _works_on_shards(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether each rank can do its part alone: other names, elementwise writes without a draw."""
    if func in _ON_SHARDS:
        return True
    is_elementwise = torch.Tag.pointwise in func.tags and not _draws(func)
    return is_elementwise and func._schema.is_mutable and not _tensors((args[1:], kwargs))


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _overwrites(func: Any) -> bool:
    """Whether nothing is read of the first argument: draws in place, and copies into it."""
    return func._schema.is_mutable and (_draws(func) or func is torch.ops.aten.copy_.default)


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _empty_full(target: DTensor) -> Tensor:
    return torch.empty(target.shape, dtype=target.dtype, device=target.to_local().device)


def _keep_part(full: Tensor, target: DTensor) -> None:
    with torch.no_grad():
        target.to_local().copy_(cut_like(full, target).to_local())


def _tensors(values: object) -> list[Tensor]:
    leaves = cast("list[object]", tree_leaves(values))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())
