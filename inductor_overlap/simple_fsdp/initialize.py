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
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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


@dataclass(frozen=True)
class _View:
    """A parameter (or an alias of it) and its full tensor, of which there are views."""

    parameter: DTensor
    full: Tensor


class _AsOneProcess(TorchDispatchMode):
    """Runs operations on DTensors as one process would, and keeps each rank's part of what changed.

    While there are views of a full tensor it is what is operated on; it goes with the last of them.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._views: list[_View] = []

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
            view = self._view_of(out)
            full = _empty_full(out) if view is None else view.full
            func(*tree_map(_full, args), **{**kwargs, "out": full})
            return _keep_part(full, out)
        if isinstance(target, DTensor):
            return self._call_on_parameter(target, func, args, kwargs)
        return self._call_on_plain(func, args, kwargs)

    def _call_on_parameter(
        self, target: DTensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        view = self._view_of(target)
        on_shards = func in _ALIASES or (view is None and _works_on_shards(func, args, kwargs))
        if target.is_meta or on_shards:
            return func(*args, **kwargs)
        if view is not None:
            full = view.full
        else:
            # A copy, because the communication thread owns the gathered tensor for a while, and
            # every rank must find the same owners when it looks for views.
            full = _empty_full(target) if _overwrites(func) else target.full_tensor().clone()
        result = func(full, *tree_map(_full, args[1:]), **tree_map(_full, kwargs))
        if func._schema.is_mutable:
            return _keep_part(full, target)
        if view is None and _storage(full) in map(_storage, _tensors(result)):
            self._views.append(_View(target, full))
        return result

    def _call_on_plain(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call whose first argument is a plain tensor, which may be a view of a parameter."""
        if not func._schema.is_mutable:
            return func(*tree_map(_full, args), **tree_map(_full, kwargs))
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)  # a list of parameters, written one by one
        result = func(args[0], *tree_map(_full, args[1:]), **tree_map(_full, kwargs))
        for view in self._alive():
            if _storage(view.full) == _storage(args[0]):
                _keep_part(view.full, view.parameter)
        return result

    def _view_of(self, parameter: DTensor) -> _View | None:
        shard = _storage(parameter.to_local())
        views = (v for v in self._alive() if _storage(v.parameter.to_local()) == shard)
        return next(views, None)

    def _alive(self) -> list[_View]:
        self._views = [view for view in self._views if _num_owners(view.full) > _NUM_OWNERS_ALONE]
        return self._views


_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


def _works_on_shards(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether each rank can do its part alone: elementwise writes without a draw."""
    if func in _FILLS:
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


def _keep_part(full: Tensor, target: DTensor) -> DTensor:
    """Writes this rank's part of `full` into `target`, and returns that."""
    with torch.no_grad():
        target.to_local().copy_(cut_like(full, target).to_local())
    return target


def _tensors(values: object) -> list[Tensor]:
    leaves = cast("list[object]", tree_leaves(values))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    """Address of the memory that `tensor` lives in."""
    return tensor.untyped_storage().data_ptr()


def _num_owners(tensor: Tensor) -> int:
    """How many tensors and other objects keep the memory of `tensor` alive."""
    # There is no public count; torch/_inductor/cudagraph_trees.py uses this one.
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportPrivateUsage]


_NUM_OWNERS_ALONE = _num_owners(torch.empty(0))
