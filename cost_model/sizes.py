"""Sizes of tensors as plain integers, the same on every rank.

Symbolic sizes are read from their hints and never guarded on: pricing a graph must not specialise
it. A size without a hint counts as `UNKNOWN_SIZE`.
"""

from __future__ import annotations

from typing import Any, SupportsIndex, cast

import torch

UNKNOWN_SIZE = 4096
"""Stand-in for an unbacked symbolic size, the fallback Inductor uses for its own estimates."""


def size_hint(size: object) -> int:
    """``size`` as an int: itself, the hint of a SymInt, or `UNKNOWN_SIZE`. Adds no guard."""
    if isinstance(size, torch.SymInt):
        node = cast("Any", size.node)  # pyright: ignore[reportUnknownMemberType]
        hint = node.hint if getattr(node, "has_hint", lambda: False)() else None
        return hint if isinstance(hint, int) else UNKNOWN_SIZE
    return int(cast("SupportsIndex", size))


def shape_hint(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(size_hint(size) for size in tensor.shape)


def numel_hint(tensor: torch.Tensor) -> int:
    numel = 1
    for size in tensor.shape:
        numel *= size_hint(size)
    return numel


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements of ``tensor`` (not of its storage)."""
    return numel_hint(tensor) * tensor.dtype.itemsize
