"""The tables of ``profiles/*.toml``: constants of a device and of a network, by name.

Names are the same in any case: "H100" is "h100". Refused (``ValueError`` naming the near misses):
an unknown device or fabric, a network that is not spelled
``<fabric>-<Gbit/s per NIC>x<NICs per node>``.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from importlib import resources
from typing import Any

_NETWORK = re.compile(
    r"(?P<fabric>[a-z0-9]+(?:[-/][a-z0-9]+)*?)\??"
    r"-(?P<rate>\d+(?:\.\d+)?)x(?P<nics>\d+)(?:/node|\?|\(.*\))*"
)
"""As public logs are labelled: a question mark, "/node" or a remark in brackets may follow."""
_CROSS_DOMAIN = re.compile(r"(?<![a-z0-9])cross-domain(?![a-z0-9])")
"""In the fabric's part of a network: NVLink does not join its nodes, even those of one rack."""


@cache
def read_table(name: str) -> dict[str, Any]:
    """The tables of ``profiles/<name>.toml``."""
    text = resources.files("inductor_overlap.cost_model").joinpath("profiles", f"{name}.toml")
    return tomllib.loads(text.read_text(encoding="utf-8"))


def device_names() -> tuple[str, ...]:
    """Devices that have a table."""
    return tuple(sorted(set(read_table("gpus")) - {"families", "defaults"}))


@cache
def device_profiles() -> dict[str, str]:
    """What the CUDA runtime calls a device, without the brand -> its table."""
    table = read_table("gpus")
    return {name: gpu for gpu in device_names() for name in table[gpu]["device_names"]}


def device_constants(gpu: str) -> dict[str, float]:
    """Numbers of a device: the defaults, its family's, its own."""
    profile = read_table("gpus")
    gpu = known_name("gpu", gpu, device_names())
    merged = profile["defaults"] | profile["families"][profile[gpu]["family"]] | profile[gpu]
    return {name: float(value) for name, value in merged.items() if isinstance(value, int | float)}


def _match_network(network: str) -> re.Match[str]:
    match = _NETWORK.fullmatch(network)
    if match is None:
        raise ValueError(
            f"network {network!r} is not spelled <fabric>-<Gbit/s per NIC>x<NICs per node>, "
            'as in "ib-ndr-400x8"; use None for a single node'
        )
    return match


def fabric_name(network: str) -> str:
    """The longest name of a fabric that ``network`` begins with."""
    match = _match_network(network)
    spelled = match["fabric"].split("/")[0]
    whole = f"{spelled}-{match['rate']}x{match['nics']}-"
    spellings = _fabric_spellings()
    matches = [name for name in spellings if whole.startswith(f"{name}-")]
    if not matches:
        raise ValueError(unknown_name("fabric", spelled, spellings))
    return spellings[max(matches, key=len)]


@cache
def _fabric_spellings() -> dict[str, str]:
    """Every spelling of a fabric -> the name of its table."""
    tables = read_table("fabrics")
    others = {also: name for name, table in tables.items() for also in table.get("also", ())}
    return others | {name: name for name in tables}


@cache
def network_constants(network: str, pcie_generation: float) -> dict[str, float]:
    """Constants of the network's fabric, the number of NICs of a node and the GB/s of each.

    A network "<fabric>-cross-domain-..." has an ``nvlink_domain`` of 1, instead of the device's.
    ``pcie_generation``: of the GPUs' host links, which some fabrics depend on.
    """
    match = _match_network(network)
    table = read_table("fabrics")[fabric_name(network)]
    if pcie_generation < 5:
        table = table | table.get("pcie4", {})
    constants = {name: float(v) for name, v in table.items() if isinstance(v, int | float)}
    own = {"num_nics": float(match["nics"]), "nic_gb_per_s": float(match["rate"]) / 8}
    if min(own.values()) <= 0:
        raise ValueError(f"network {network!r} has no bandwidth: rate and NICs must be positive")
    if _CROSS_DOMAIN.search(match["fabric"]):
        own["nvlink_domain"] = 1.0
    return constants | own


def known_name(what: str, name: object, known: Iterable[str]) -> str:
    """The one of ``known``, which are in lower case, that ``name`` is in whatever case.

    Raises:
        ValueError: it is none of them; the message lists those that are spelled alike.
    """
    names = sorted(known)
    if not isinstance(name, str) or name.lower() not in names:
        raise ValueError(unknown_name(what, name, names))
    return name.lower()


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """The message for a name that is not among ``known``, with those that are spelled alike."""
    names = sorted(known)
    spelled = name.lower() if isinstance(name, str) else ""
    near = difflib.get_close_matches(spelled, names, n=4, cutoff=0.4)
    hint = f"did you mean {', '.join(near)}? " if near else ""
    return f"unknown {what} {name!r}; {hint}known: {', '.join(names)}"
