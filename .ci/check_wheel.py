"""Checks a wheel against the source tree it was built from: ``check_wheel.py WHEEL SOURCE``.

Its only top-level names may be the package and its metadata (`passes` and `cost_model` must never
land in site-packages), and every module and profile of the source tree must be in it: a package
that is missing from `packages` in setup.cfg imports in editable mode only.
"""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

AREAS = {
    "inductor_overlap": "inductor_overlap",
    "passes": "inductor_overlap/passes",
    "cost_model": "inductor_overlap/cost_model",
}
SUFFIXES = {".py", ".toml", ".typed"}


def main(wheel: str, source: str) -> int:
    names = set(zipfile.ZipFile(wheel).namelist())
    faults = [*_foreign_names(names), *_missing_files(names, Path(source))]
    for fault in faults:
        print(f"{wheel}: {fault}", file=sys.stderr)
    print(f"{Path(wheel).name}: {len(names)} files, {len(faults)} faults")
    return 1 if faults else 0


def _foreign_names(names: set[str]) -> Iterator[str]:
    for top in sorted({name.split("/")[0] for name in names}):
        if top != "inductor_overlap" and not top.endswith(".dist-info"):
            yield f"expected only inductor_overlap at top level, found {top}"


def _missing_files(names: set[str], source: Path) -> Iterator[str]:
    for area, place in AREAS.items():
        for path in sorted((source / area).rglob("*")):
            # rglob does not follow the two links from inductor_overlap to the other areas.
            inside = f"{place}/{path.relative_to(source / area).as_posix()}"
            if path.suffix in SUFFIXES and inside not in names:
                yield f"{path.relative_to(source)} is missing; see packages in setup.cfg"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
