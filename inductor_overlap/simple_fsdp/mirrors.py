"""Plain attributes in which a module keeps its parameters a second time.

`nn.LSTM` and its relatives hand the list `_flat_weights` to their kernel; other modules keep a
dict of their weights for a loop. Such a list, tuple or dict would go on holding the unsharded
parameters, so a sharded module makes it afresh at every read, from its parameters as they are read,
and ignores what is written to it. As its readers go through it many times, the forward of such a
module gathers its parameters once, first (`nn.LSTM` asks the list for a dtype, say).

Refuses what it cannot make afresh: a container that holds something else too, or parameters of
another module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

_CONTAINERS = (list, tuple, dict)


class MirrorError(ValueError):
    """A plain attribute holds parameters in a way that cannot follow the sharding."""


@dataclass(frozen=True)
class Mirror:
    """One such attribute.

    Attributes:
        attribute: Its name.
        container: `list`, `tuple` or `dict`.
        keys: Of a dict, in order; else empty.
        names: The parameter in each place; None where the container holds None.
    """

    attribute: str
    container: type
    keys: tuple[Any, ...]
    names: tuple[str | None, ...]

    def read(self, module: nn.Module) -> Any:
        """The container with the module's parameters as they are read now."""
        values = [None if name is None else getattr(module, name) for name in self.names]
        if self.container is dict:
            return dict(zip(self.keys, values, strict=True))
        return self.container(values)


def find_mirrors(module: nn.Module) -> tuple[Mirror, ...]:
    """The attributes of `module` that hold its parameters beside the table of parameters.

    Raises:
        MirrorError: One of them cannot be made afresh.
    """
    attributes = dict(vars(module))
    table = cast("dict[str, nn.Parameter | None]", attributes.pop("_parameters"))
    names = {parameter: name for name, parameter in table.items() if parameter is not None}
    found = (_mirror(attribute, value, names) for attribute, value in attributes.items())
    return tuple(mirror for mirror in found if mirror is not None)


def _mirror(attribute: str, value: object, names: dict[nn.Parameter, str]) -> Mirror | None:
    keys, items = _contents(value)
    if not any(isinstance(item, nn.Parameter) for item in items):
        return None
    others = [item for item in items if item is not None]
    are_own = all(isinstance(item, nn.Parameter) and item in names for item in others)
    if type(value) not in _CONTAINERS or not are_own:
        raise MirrorError(
            f"keeps parameters in the plain attribute {attribute!r} as well, and would go on "
            "reading the unsharded ones there: expected a list, tuple or dict of its own "
            f"parameters and nothing else, got a {type(value).__name__}; register them as "
            "parameters only"
        )
    places = (names[item] if item is not None else None for item in items)
    return Mirror(attribute, cast(type, type(value)), keys, tuple(places))


def _contents(value: object) -> tuple[tuple[Any, ...], list[Any]]:
    """Keys (of a mapping) and items of what may be a container; a parameter is its own item."""
    if isinstance(value, nn.Parameter):
        return (), [value]
    if isinstance(value, Mapping):
        mapping = cast("Mapping[Any, Any]", value)
        return tuple(mapping), list(mapping.values())
    return (), list(cast("Iterable[Any]", value)) if isinstance(value, list | tuple) else []
