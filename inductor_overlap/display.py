"""Numbers for people: the only place where microseconds and bytes change unit."""

from __future__ import annotations


def format_us(time_us: float) -> str:
    """A time in the unit that suits it: ``"12.3 us"``, ``"4.560 ms"``, ``"1.200 s"``."""
    if abs(time_us) < 1e3:
        return f"{time_us:.1f} us"
    if abs(time_us) < 1e6:
        return f"{time_us / 1e3:.3f} ms"
    return f"{time_us / 1e6:.3f} s"


def format_bytes(size_bytes: float) -> str:
    """A size in binary units: ``"512 B"``, ``"3.0 MiB"``, ``"12.50 GiB"``."""
    for limit, unit, digits in ((2**30, "GiB", 2), (2**20, "MiB", 1), (2**10, "KiB", 1)):
        if size_bytes >= limit:
            return f"{size_bytes / limit:.{digits}f} {unit}"
    return f"{size_bytes:.0f} B"


def format_change(before: float, after: float) -> str:
    """Relative change: ``"-12.5 %"``, ``"same"``; empty if more than tenfold or from nothing."""
    if before == 0.0 or after > 10.0 * before:
        return ""
    percent = round((after / before - 1.0) * 100.0, 1)
    return f"{percent:+.1f} %" if percent else "same"


def format_error(error: float | None) -> str:
    """A relative error: ``"+-6 %"``; ``"of unknown error"`` for None."""
    return "of unknown error" if error is None else f"+-{100.0 * error:.0f} %"
