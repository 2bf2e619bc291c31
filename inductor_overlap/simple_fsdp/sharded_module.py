"""Makes reading a parameter of a module gather it, without changing anything else about the module.

The module's class is exchanged for a subclass with one property per sharded parameter. The DTensor
stays in `module._parameters`, so names, `state_dict`, `parameters()`, `_apply` and optimizers see
the shards, and `module.weight` (what `forward` reads) is the full tensor. `isinstance`, `repr` and
the class name stay those of the original, and pickle and deepcopy work, which
`torch.nn.utils.parametrize` gives up (it moves parameters to `parametrizations.weight.original`).

A subclass is made once per (class, recipe of every parameter): blocks of one class sharded alike
stay of one class, and share one compiled graph when they are compiled one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inductor_overlap.simple_fsdp.gather import Gather

Recipes = tuple[tuple[str, Gather], ...]

_RECIPES_ATTRIBUTE = "_gather_recipes"


def gather_on_read(module: nn.Module, recipes: Mapping[str, Gather]) -> None:
    """Exchanges the class of `module` so that each parameter named in `recipes` gathers itself.

    Args:
        module: Holds the parameters directly, as DTensors, under the names in `recipes`.
        recipes: Parameter name in this module to its recipe.
    """
    module.__class__ = _sharded_class(type(module), tuple(sorted(recipes.items())))


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The live table of the parameters that `module` holds directly, read without gathering."""
    return cast("dict[str, nn.Parameter | None]", vars(module)["_parameters"])


def recipes_of(module: nn.Module) -> dict[str, Gather]:
    """The recipe of each sharded parameter that `module` holds directly; empty if none."""
    return dict(cast(Recipes, getattr(type(module), _RECIPES_ATTRIBUTE, ())))


@functools.cache
def _sharded_class(base: type[nn.Module], recipes: Recipes) -> type[nn.Module]:
    body: dict[str, object] = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": _reduce_to_base(base, recipes),
        _RECIPES_ATTRIBUTE: recipes,
    }
    for name, gather in recipes:
        body[name] = property(_reader(name, gather))
    return cast("type[nn.Module]", type(base.__name__, (base,), body))


def _reader(name: str, gather: Gather) -> Callable[[nn.Module], Tensor | None]:
    def read(self: nn.Module) -> Tensor | None:
        parameter = own_parameters(self)[name]
        if not isinstance(parameter, DTensor):
            return parameter
        return gather(parameter)

    return read


def _reduce_to_base(
    base: type[nn.Module], recipes: Recipes
) -> Callable[[nn.Module, int], tuple[Any, ...]]:
    """The class has no importable name, so a pickle holds its ingredients instead."""

    def reduce_ex(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _empty_instance, (base, recipes), self.__getstate__()

    return reduce_ex


def _empty_instance(base: type[nn.Module], recipes: Recipes) -> nn.Module:
    cls = _sharded_class(base, recipes)
    return cls.__new__(cls)
