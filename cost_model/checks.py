"""What counts as a number, a count and a size in what users pass."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite real number, numpy's included; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Whether ``value`` is a whole number from ``least`` on; True and False are none."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def check_size(what: str, size_bytes: object) -> None:
    """Raise ``ValueError`` for bytes of ``what`` that are negative or no finite number.

    A fraction is a size: of bytes that are an average, or a share of others.
    """
    if not is_number(size_bytes) or size_bytes < 0:
        raise ValueError(f"size_bytes of {what} must be finite and >= 0, got {size_bytes!r}")


def check_counts(what: str, **counts: object) -> None:
    """Raise ``ValueError`` for sizes of ``what`` that are negative or no whole numbers."""
    if not all(is_count(count, 0) for count in counts.values()):
        named = ", ".join(f"{name}={count!r}" for name, count in counts.items())
        raise ValueError(f"sizes of {what} must be >= 0, in whole numbers; got {named}")
