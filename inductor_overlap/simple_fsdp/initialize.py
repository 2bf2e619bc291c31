"""Lets a model's own initialisation run on shards, with the values one process would get.

Initialisation code writes into `module.weight`; on a sharded model that is a gathered copy, and
the writes would be lost. Inside `initializing` it is the sharded parameter itself. Random numbers
are drawn for the full tensor on every rank, one tensor at a time, and each rank keeps its part: the
generator advances as in one process, so equal seeds give equal weights for any number of ranks.
DTensor alone does not promise that on CPUs (torch/distributed/tensor/_random.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
        with _DrawFullTensors():
            yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            module.__class__ = cls


class _DrawFullTensors(TorchDispatchMode):
    """Runs in-place random operations and copies on DTensors as one process would."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else None
        if not isinstance(target, DTensor):
            return func(*args, **kwargs)
        if _is_random_in_place(func):
            return _fill(target, lambda full: func(full, *args[1:], **kwargs))
        if func is torch.ops.aten.copy_.default and not isinstance(args[1], DTensor):
            return _fill(target, lambda full: func(full, *args[1:], **kwargs))
        return func(*args, **kwargs)


def _is_random_in_place(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable


@torch.no_grad()
def _fill(target: DTensor, write: Callable[[Tensor], object]) -> DTensor:
    local = target.to_local()
    full = torch.empty(target.shape, dtype=target.dtype, device=local.device)
    write(full)
    part = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
    local.copy_(part.to_local())
    return target
