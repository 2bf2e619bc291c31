"""Arrows between the areas, read from the imports; packages, read from setup.cfg."""

from __future__ import annotations

import ast
import configparser
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
AREAS = ("inductor_overlap", "passes", "cost_model")
"""From the top downwards: an area imports itself and those after it."""


def sources(area: str) -> Iterator[Path]:
    """Modules of ``area``; the links inside inductor_overlap lead to other areas."""
    linked = {ROOT / "inductor_overlap" / name for name in ("passes", "cost_model")}
    for path in sorted((ROOT / area).rglob("*.py")):
        if linked.isdisjoint(path.parents):
            yield path


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def area_of(module: str) -> str | None:
    """The area an imported name is in; None for other packages."""
    parts = module.split(".")
    if parts[0] != "inductor_overlap":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in AREAS else "inductor_overlap"


@pytest.mark.parametrize("area", AREAS)
def test_arrows_point_downwards(area: str) -> None:
    allowed = AREAS[AREAS.index(area) :]
    for path in sources(area):
        wrong = [m for m in imported(path) if area_of(m) not in (None, *allowed)]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}; {area} may import {allowed}"


@pytest.mark.parametrize("area", (*AREAS, "tests"))
def test_no_bare_names_and_no_triton(area: str) -> None:
    """A bare name makes a second module object; Triton is missing on a machine without a GPU."""
    for path in sources(area):
        tops = {module.split(".")[0] for module in imported(path)}
        assert tops.isdisjoint({"passes", "cost_model", "triton"}), path


def test_areas_are_there() -> None:
    for area in AREAS:
        assert len(list(sources(area))) > 5, area
    assert area_of("inductor_overlap.passes.plan") == "passes"
    assert area_of("inductor_overlap.settings.Settings") == "inductor_overlap"
    assert area_of("torch.fx") is None


def test_every_package_folder_is_in_the_wheel() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    folders: set[str] = set()
    for area in AREAS:
        for path in sources(area):
            inside = path.parent.relative_to(ROOT).parts
            folders.add(".".join(inside if area == AREAS[0] else (AREAS[0], *inside)))
            assert (path.parent / "__init__.py").exists(), path.parent
    assert folders == listed
