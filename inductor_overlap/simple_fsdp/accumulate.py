"""Gradient accumulation: several backward passes, one reduction.

Inside the context a parameter's read sends its full local gradient to a leaf tensor instead of
reducing it; leaving the context reduces what has gathered, once per parameter, into `.grad`. The
full gradients live in memory meanwhile, in the dtype they are reduced in, as they do with FSDP2's
`set_requires_gradient_sync(False)` and DDP's `no_sync`.

Compiled models compile once more for the accumulating way of reading, not once per micro-step.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inductor_overlap.simple_fsdp.gather import Gather
from inductor_overlap.simple_fsdp.sharded_module import (
    own_parameters,
    read_by_gathering,
    read_plan,
    read_with,
    sharded_modules,
)

_LOCAL_GRADIENTS = "_local_gradients"

_Leaves = dict[nn.Parameter, tuple[Tensor, Gather]]


@contextmanager
def accumulate_gradients(model: nn.Module) -> Generator[None]:
    """Within it, backward adds up gradients on each rank; on leaving they are reduced once.

    All micro-steps may run inside, or all but the last one outside, whose own reduction then adds
    to the same `.grad`. Nothing is reduced if the block raises.

    Args:
        model: A model sharded by `simple_fsdp`, or one that contains such models.

    Raises:
        ValueError: No module of `model` is sharded, or it accumulates already.
    """
    modules = sharded_modules(model)
    if not modules:
        raise ValueError(
            f"accumulate_gradients expects a model sharded by simple_fsdp, got {type(model)} "
            "without any: call simple_fsdp(model, mesh) first"
        )
    if any(_LOCAL_GRADIENTS in vars(module) for module in modules):
        raise ValueError("accumulate_gradients is active on this model already: do not nest it")
    leaves: _Leaves = {}
    for module in modules:
        _start_keeping(module, leaves)
    try:
        yield
    finally:
        for module in modules:
            del vars(module)[_LOCAL_GRADIENTS]
            read_with(module, read_by_gathering)
    for parameter, (leaf, gather) in leaves.items():
        _reduce_into_grad(parameter, leaf, gather)


def _start_keeping(module: nn.Module, leaves: _Leaves) -> None:
    plan = read_plan(module)
    assert plan is not None
    kept: dict[str, Tensor] = {}
    for name, gather in plan.recipes:
        parameter = own_parameters(module).get(name)
        if parameter is None or not parameter.requires_grad:
            continue
        if parameter not in leaves:
            leaves[parameter] = _leaf(cast(DTensor, parameter), gather), gather
        kept[name] = leaves[parameter][0]
    vars(module)[_LOCAL_GRADIENTS] = kept
    read_with(module, _read_keeping_gradient)


def _leaf(parameter: DTensor, gather: Gather) -> Tensor:
    """A leaf with the shape of one rank's full gradient; it takes no memory until it has one."""
    layout = gather.model_parallel
    shape = parameter.shape if layout is None else layout.local_shape
    dtype = gather.reduce_dtype or gather.param_dtype or parameter.dtype
    return torch.empty((), dtype=dtype, device=parameter.device).expand(shape).requires_grad_()


def _read_keeping_gradient(
    module: nn.Module, name: str, parameter: DTensor, gather: Gather
) -> Tensor:
    kept = cast("dict[str, Tensor]", vars(module)[_LOCAL_GRADIENTS])
    if name not in kept:
        return read_by_gathering(module, name, parameter, gather)
    local = gather.gather(cast(DTensor, parameter.detach()))
    return gather.restore_layout(_send_gradient(local, kept[name]), parameter)


class _SendGradient(torch.autograd.Function):
    """Returns its first argument; the gradient of that goes to the second."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, leaf: Tensor) -> Tensor:
        ctx.dtype = leaf.dtype
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0].to(ctx.dtype)


def _send_gradient(value: Tensor, leaf: Tensor) -> Tensor:
    return cast(Tensor, _SendGradient.apply(value, leaf))  # pyright: ignore[reportUnknownMemberType]


@torch.no_grad()
def _reduce_into_grad(parameter: nn.Parameter, leaf: Tensor, gather: Gather) -> None:
    if leaf.grad is None:
        return
    reduced = gather.reduce(leaf.grad, cast(DTensor, parameter))
    parameter.grad = reduced if parameter.grad is None else parameter.grad + reduced
