"""The demo: two gloo ranks on this machine train a small Llama 3 with and without the plugin.

`training` is what each rank does, `ranks` starts the processes and hears from them, `summary`
prints what came out. Compiled code goes to a temporary folder, in which the ranks also meet; folder
and ranks end with the demo, however it ends. What stays is PyTorch's own store of precompiled C++
headers, which it keeps for all programs of a user.

Refuses to start without a C++ compiler, which Inductor needs on CPUs.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from inductor_overlap.demo.ranks import RankError, run_ranks
from inductor_overlap.demo.summary import CompileProgress, is_equal, print_summary
from inductor_overlap.demo.training import DemoSettings, RankResult

__all__ = ["DemoError", "DemoSettings", "RankError", "run_demo"]


class DemoError(RuntimeError):
    """The demo cannot run on this machine."""


def run_demo(settings: DemoSettings, console: Console, save_to: Path | None = None) -> bool:
    """Trains both ways, prints the comparison, and returns whether losses and weights are equal.

    Args:
        settings: Sizes of the model, the batch and the run.
        console: Where progress and the comparison are printed.
        save_to: A folder for the reports of both graphs: JSON, traces for ui.perfetto.dev and, if
            matplotlib is installed, pictures.

    Raises:
        DemoError: There is no C++ compiler.
        RankError: A rank failed; the message holds its traceback.
    """
    _check_compiler()
    with CompileProgress(console) as progress:
        results = run_ranks(settings, progress.show)
    print_summary(console, settings, results)
    if save_to is not None:
        _save(results[0], save_to)
        console.print(f"reports written to {save_to}")
    return is_equal(results)


def _check_compiler() -> None:
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise DemoError(
            "the demo needs a C++ compiler, because Inductor generates C++ on CPUs, and none was "
            "found; install one (Debian, Ubuntu: apt-get install g++) or name yours in the "
            "environment variable CXX"
        ) from error


def _save(result: RankResult, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for direction, report in result.reports.items():
        report.to_perfetto(folder / f"{direction}.perfetto.json")
        (folder / f"{direction}.json").write_text(report.to_json() + "\n")
        with suppress(ImportError):  # matplotlib is an extra
            report.to_png(folder / f"{direction}.png")
    measured = {"losses": result.losses, "step_s": result.step_s}
    (folder / "measured.json").write_text(json.dumps(measured, indent=1) + "\n")
