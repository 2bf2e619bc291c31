"""setup.cfg, pyproject.toml, the README and the folders agree. Needs the checkout.

`.ci/run` checks the built wheel itself.
"""

from __future__ import annotations

import configparser
import os
import re
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import inductor_overlap.plugin

ROOT = Path(__file__).parents[1]
AREAS = {
    "inductor_overlap": "inductor_overlap",
    "passes": "inductor_overlap.passes",
    "cost_model": "inductor_overlap.cost_model",
}


@pytest.fixture(scope="module")
def config() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(config: configparser.ConfigParser, section: str, option: str) -> list[str]:
    return config.get(section, option).split("\n")[1:]


def test_every_folder_of_modules_is_a_package(config: configparser.ConfigParser) -> None:
    """One that is not listed imports from the checkout and is missing from the wheel."""
    folders = {
        ".".join([package, *folder.relative_to(ROOT / area).parts])
        for area, package in AREAS.items()
        for folder in {module.parent for module in (ROOT / area).rglob("*.py")}
    }
    assert folders == set(lines(config, "options", "packages"))


def test_every_package_has_an_init() -> None:
    for area in AREAS:
        for module in (ROOT / area).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), module.parent


def test_areas_are_mapped_into_the_package(config: configparser.ConfigParser) -> None:
    mapped = dict(line.split(" = ") for line in lines(config, "options", "package_dir"))
    assert mapped == {package: area for area, package in AREAS.items()}


@pytest.mark.parametrize("area", ["passes", "cost_model"])
def test_links_are_relative(area: str) -> None:
    assert os.readlink(ROOT / "inductor_overlap" / area) == f"../{area}"


def test_every_profile_is_package_data(config: configparser.ConfigParser) -> None:
    data = config["options.package_data"]
    assert data["inductor_overlap.cost_model"] == "profiles/*.toml"
    others = [
        path
        for area in AREAS
        for path in (ROOT / area).rglob("*")
        if path.is_file() and path.suffix not in {".py", ".pyc"}
    ]
    expected = [ROOT / "inductor_overlap" / "py.typed", *(ROOT / "cost_model/profiles").glob("*")]
    assert sorted(others) == sorted(expected)


def test_bare_names_are_banned() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    assert set(ruff["flake8-tidy-imports"]["banned-api"]) == {"passes", "cost_model"}
    assert "TID251" in ruff["select"]


def test_the_backend_is_registered_by_name() -> None:
    (backend,) = entry_points(group="torch_dynamo_backends", name="inductor_overlap")
    assert backend.load() is inductor_overlap.plugin.inductor_overlap_backend


def test_the_readme_has_both_commands() -> None:
    """`.ci/run` runs the second as it stands there."""
    readme = (ROOT / "README.md").read_text()
    assert "python -m pip install torch==2.13.0 -e . && inductor-overlap demo\n" in readme
    assert re.findall(r".*python -m pytest.*", readme) == [
        "python -m pip install torch==2.13.0 -e '.[test]' && python -m pytest"
    ]


def test_the_readme_shows_code_early() -> None:
    head = (ROOT / "README.md").read_text().splitlines()[:30]
    assert "import inductor_overlap as io" in head


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if not target.startswith("http"):
                assert (document.parent / target).exists(), f"{document.name}: {target}"
