"""A calibrated cluster as a TOML file that people can read, edit and share.

```toml
[cluster]                 # what Cluster(...) takes
gpu = "h100"
network = "ib-ndr-400x8"
gpus_per_node = 8

[origin]                  # where the numbers come from; not used
source = "all_reduce.log"
date = "2026-11-29"

[constants]               # replace those of the shipped profiles; units are in the names
base_us = 5.1

[errors]                  # relative errors to expect of predictions: the residuals of the fit
collective = 0.03

[[curve]]                 # measured times of one kind on one placement
kind = "all_reduce"
num_nodes = 2
ranks_per_node = 8
sizes_bytes = [1024, 1048576]
times_us = [31.0, 90.2]
link_us = [31.0, 70.5]    # may be left out: for how long each keeps the link from others
```

Refused (``ValueError`` naming the file and the key): a file that is no TOML, unknown keys, values
of the wrong type, whatever `Cluster` and `Curve` refuse.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.curve import Curve
from inductor_overlap.cost_model.profile_tables import unknown_name

_SECTIONS = ("cluster", "origin", "constants", "errors", "curve")
_CLUSTER_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "gpu": str,
    "network": str,
    "gpus_per_node": int,
    "share_links": bool,
    "contention": (int, float),
}
_CURVE_KEYS = ("kind", "num_nodes", "ranks_per_node", "sizes_bytes", "times_us", "link_us")
_OPTIONAL_CURVE_KEYS = ("link_us",)


def write_profile(cluster: Cluster, path: str | Path, origin: Mapping[str, str]) -> None:
    """Write ``cluster`` to ``path``; ``origin`` names source, date and what else a reader asks."""
    lines = ["[cluster]"]
    lines += [
        f"{key} = {_toml(value)}"
        for key in _CLUSTER_TYPES
        if (value := getattr(cluster, key)) is not None
    ]
    lines += ["", "[origin]", *(f"{key} = {_toml(value)}" for key, value in origin.items())]
    lines += ["", "[constants]", *(f"{key} = {value:.6g}" for key, value in cluster.overrides)]
    lines += ["", "[errors]", *(f"{what} = {error:.3g}" for what, error in cluster.errors)]
    for curve in cluster.curves:
        lines += ["", "[[curve]]"]
        lines += [
            f"{key} = {_toml(getattr(curve, key))}"
            for key in _CURVE_KEYS
            if getattr(curve, key) != ()
        ]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_profile(path: str | Path) -> Cluster:
    """The cluster that ``path`` describes.

    Raises:
        ValueError: the file is missing or says something that is not understood.
    """
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        return _cluster(tables)
    except OSError as error:
        raise ValueError(f"cluster profile {path} cannot be read: {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"cluster profile {path}: {error}") from error


def _cluster(tables: Mapping[str, Any]) -> Cluster:
    _check_keys("section", tables, _SECTIONS)
    described = cast("dict[str, Any]", tables.get("cluster", {}))
    _check_keys("key of [cluster]", described, _CLUSTER_TYPES)
    for key, value in described.items():
        if not isinstance(value, _CLUSTER_TYPES[key]):
            raise ValueError(f"[cluster] {key} has the wrong type: {value!r}")
    curves = tuple(_curve(table) for table in tables.get("curve", []))
    return Cluster(
        **described,
        overrides=_numbers(tables, "constants"),
        curves=curves,
        errors=_numbers(tables, "errors"),
    )


def _numbers(tables: Mapping[str, Any], section: str) -> tuple[tuple[str, float], ...]:
    named = cast("dict[str, float]", tables.get(section, {}))
    return tuple((name, float(value)) for name, value in sorted(named.items()))


def _curve(table: Mapping[str, Any]) -> Curve:
    _check_keys("key of [[curve]]", table, _CURVE_KEYS)
    needed = [key for key in _CURVE_KEYS if key not in _OPTIONAL_CURVE_KEYS]
    missing = [key for key in needed if key not in table]
    if missing:
        raise ValueError(f"[[curve]] has no {', '.join(missing)}")
    return Curve(
        kind=table["kind"],
        num_nodes=int(table["num_nodes"]),
        ranks_per_node=int(table["ranks_per_node"]),
        sizes_bytes=tuple(int(size) for size in table["sizes_bytes"]),
        times_us=tuple(float(time) for time in table["times_us"]),
        link_us=tuple(float(time) for time in table.get("link_us", ())),
    )


def _check_keys(
    what: str, table: Mapping[str, Any], known: Mapping[str, Any] | tuple[str, ...]
) -> None:
    for key in table:
        if key not in known:
            raise ValueError(unknown_name(what, key, known))


def _toml(value: object) -> str:
    """A string, flag, number or list of numbers as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in cast('tuple[object, ...]', value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
