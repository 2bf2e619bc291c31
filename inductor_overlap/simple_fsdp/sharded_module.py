"""Makes reading a parameter of a module gather it, without changing anything else about the module.

The module's class is exchanged for a subclass with one property per sharded parameter. The DTensor
stays in `module._parameters`, so names, `state_dict`, `parameters()`, `_apply` and optimizers see
the shards, and `module.weight` (what `forward` reads) is the full tensor. `isinstance`, `repr` and
the class name stay those of the original, and pickle and deepcopy work, which
`torch.nn.utils.parametrize` gives up (it moves parameters to `parametrizations.weight.original`).

A subclass is made once per (class, recipe of every parameter, way of reading): blocks of one class
sharded alike stay of one class, and share one compiled graph when they are compiled one by one.
Another way of reading is another class, so that compiled code checks no flag but the class, and
switching back and forth compiles each way once.

A parameter held by several modules (tied weights) is gathered once: the forward of the model that
was sharded gathers it first and drops it at the end, so that its gradient is reduced once too.

`load_state_dict` takes full tensors as well as shards: every rank cuts its part out of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from inductor_overlap.simple_fsdp.gather import Gather, cut_like
from inductor_overlap.simple_fsdp.mirrors import Mirror

Reading = Callable[[nn.Module, str, DTensor, Gather], Tensor]

_PLAN = "_sharded_read_plan"
_BASE = "_sharded_base"
_SHARED_GATHERS = "_shared_gathers"
_SHARED_PLACES = "_shared_places"


@dataclass(frozen=True)
class ReadPlan:
    """How the parameters of one module are read.

    Attributes:
        recipes: Name and recipe of each sharded parameter the module holds directly, sorted.
        shared: Those of them that are gathered once per scope, for all who read them in it.
        opens_scope: Whether this module's forward is such a scope; see `share_gathers`.
        mirrors: Plain attributes made afresh from the parameters at every read.
    """

    recipes: tuple[tuple[str, Gather], ...]
    shared: frozenset[str] = frozenset()
    opens_scope: bool = False
    mirrors: tuple[Mirror, ...] = ()


class SharedGather:
    """The full tensor of one shared parameter while a forward runs; None outside."""

    def __init__(self) -> None:
        self.full: Tensor | None = None


_Place = tuple[tuple[str, ...], str, SharedGather]
"""Path from the scope to a module that holds a shared parameter, its name there, and its gather."""


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """The live table of the parameters that `module` holds directly, read without gathering."""
    return cast("dict[str, nn.Parameter | None]", vars(module)["_parameters"])


def read_by_gathering(module: nn.Module, name: str, parameter: DTensor, gather: Gather) -> Tensor:
    """The usual way of reading: gather, and reduce the gradient in backward."""
    return gather(parameter)


def gather_on_read(module: nn.Module, plan: ReadPlan) -> None:
    """Exchanges the class of `module` so that its parameters are read as `plan` says.

    Args:
        module: Holds the planned parameters directly, as DTensors.
        plan: What to read how.
    """
    module.__class__ = _sharded_class(type(module), plan, read_by_gathering)


def share_gathers(scope: nn.Module, shared: list[list[tuple[nn.Module, str]]]) -> None:
    """Lets all who read a parameter share one gather per forward of `scope`.

    Args:
        scope: The module whose forward gathers; its plan has `opens_scope`.
        shared: For each shared parameter the modules that hold it, with its name there; their
            plans have it in `shared`.
    """
    named = cast("Iterable[tuple[str, nn.Module]]", scope.named_modules())
    paths = {module: path for path, module in named}
    places: list[_Place] = []
    for holders in shared:
        gather = SharedGather()
        for module, name in holders:
            vars(module).setdefault(_SHARED_GATHERS, {})[name] = gather
        holder, name = holders[0]
        places.append((tuple(filter(None, paths[holder].split("."))), name, gather))
    vars(scope)[_SHARED_PLACES] = places


def read_plan(module: nn.Module) -> ReadPlan | None:
    """How the parameters of `module` are read; None if it is as the user made it."""
    return cast("ReadPlan | None", getattr(type(module), _PLAN, None))


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules within `model` whose class was exchanged, itself included."""
    return [module for module in model.modules() if read_plan(module) is not None]


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class `module` had before it was sharded."""
    return cast("type[nn.Module]", getattr(type(module), _BASE, type(module)))


def read_with(module: nn.Module, reading: Reading) -> None:
    """Switches a sharded module to another way of reading its parameters."""
    plan = read_plan(module)
    assert plan is not None, f"{module} was never sharded"
    module.__class__ = _sharded_class(original_class(module), plan, reading)


@functools.cache
def _sharded_class(base: type[nn.Module], plan: ReadPlan, reading: Reading) -> type[nn.Module]:
    body: dict[str, object] = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__reduce_ex__": _reduce_to_ingredients(base, plan, reading),
        "_load_from_state_dict": _load_cutting_full_tensors(base),
        _PLAN: plan,
        _BASE: base,
    }
    for name, gather in plan.recipes:
        body[name] = property(_reader(name, gather, name in plan.shared, reading))
    for mirror in plan.mirrors:
        body[mirror.attribute] = property(mirror.read, _ignore_write)
    if plan.opens_scope:
        body["forward"] = _forward_in_scope(base.forward)
    return cast("type[nn.Module]", type(base.__name__, (base,), body))


def _reader(
    name: str, gather: Gather, is_shared: bool, reading: Reading
) -> Callable[[nn.Module], Tensor | None]:
    def read(self: nn.Module) -> Tensor | None:
        table = own_parameters(self)
        if name not in table:
            raise AttributeError(name)
        parameter = table[name]
        if not isinstance(parameter, DTensor):
            return parameter
        return reading(self, name, parameter, gather)

    def read_shared(self: nn.Module) -> Tensor | None:
        full = cast(SharedGather, vars(self)[_SHARED_GATHERS][name]).full
        return read(self) if full is None else full

    return read_shared if is_shared else read


def _ignore_write(module: nn.Module, value: object) -> None:
    """What a module writes into a mirror (`nn.LSTM` does after `.to()`) is what it would read."""


def _load_cutting_full_tensors(base: type[nn.Module]) -> Callable[..., None]:
    # nn.Module's own extension point for loading; it has no public name.
    inherited = cast("Callable[..., None]", base._load_from_state_dict)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]

    def load(self: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # load_state_dict has made this dict for itself, and hooks may change it too.
        for name, parameter in own_parameters(self).items():
            key = prefix + name
            if key in state_dict and isinstance(parameter, DTensor):
                state_dict[key] = _cut_if_full(state_dict[key], parameter)
        inherited(self, state_dict, prefix, *rest)

    return load


def _cut_if_full(value: object, parameter: DTensor) -> object:
    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    return cut_like(value.detach(), parameter) if value.shape == parameter.shape else value


def _forward_in_scope(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def gather_then_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        places = cast("list[_Place]", vars(self)[_SHARED_PLACES])
        try:
            for path, name, gather in places:
                gather.full = getattr(_submodule(self, path), name)
            return forward(self, *args, **kwargs)
        finally:
            for _, _, gather in places:
                gather.full = None

    return gather_then_forward


def _submodule(module: nn.Module, path: tuple[str, ...]) -> nn.Module:
    """What `get_submodule` returns, in a way that leaves its path to whoever traces the access."""
    for step in path:
        module = getattr(module, step)
    return module


def _reduce_to_ingredients(
    base: type[nn.Module], plan: ReadPlan, reading: Reading
) -> Callable[[nn.Module, int], tuple[Any, ...]]:
    """The class has no importable name, so a pickle holds what it was made of instead."""

    def reduce_ex(self: nn.Module, protocol: int) -> tuple[Any, ...]:
        return _empty_instance, (_Ingredients(base, plan, reading),), self.__getstate__()

    return reduce_ex


@dataclass(frozen=True)
class _Ingredients:
    base: type[nn.Module]
    plan: ReadPlan
    reading: Reading

    def __deepcopy__(self, memo: dict[int, object]) -> _Ingredients:
        # A copied model lives on the same meshes; copies of them would be other meshes.
        return self


def _empty_instance(ingredients: _Ingredients) -> nn.Module:
    cls = _sharded_class(ingredients.base, ingredients.plan, ingredients.reading)
    return cls.__new__(cls)
