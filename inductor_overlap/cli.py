"""The command ``inductor-overlap``: parses arguments, sets exit codes, prints errors.

Exit codes: 0 a profile was written or the demo's numbers are equal, 1 they differ or it failed, 2
wrong usage, 130 Ctrl-C, 143 terminated.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

from inductor_overlap.calibrate_command import add_parser as add_calibrate_parser
from inductor_overlap.calibrate_command import run_calibrate
from inductor_overlap.demo import DemoError, DemoSettings, RankError, run_demo

_INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: Arguments after the program's name; None: those of this process.
    """
    arguments = _parser().parse_args(argv)
    unwind_when_terminated()
    run = _demo if arguments.command == "demo" else _calibrate
    console = Console()
    try:
        return run(arguments, console)
    except KeyboardInterrupt:
        console.print("interrupted")
        return _INTERRUPTED


def unwind_when_terminated() -> None:
    """Has SIGTERM and SIGHUP raise ``SystemExit``, so that what was started is ended first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, _exit)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="inductor-overlap",
        description="Buckets and reorders the collectives of sharded models under torch.compile.",
    )
    parser.add_argument("--version", action="version", version=version("inductor-overlap"))
    commands = parser.add_subparsers(title="commands", dest="command", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a small Llama 3 on two gloo ranks, with and without the plugin",
        description=(
            "Trains a small Llama 3 on two gloo ranks of this machine, with and without the "
            "plugin, checks that losses and weights are equal, and compares. Needs no GPU; needs "
            "a C++ compiler. Exit code 0 only if the numbers are equal."
        ),
    )
    demo.add_argument(
        "--steps",
        type=_count,
        default=DemoSettings.num_steps,
        metavar="N",
        help="timed steps of each variant (default: %(default)s)",
    )
    demo.add_argument(
        "--save",
        type=Path,
        metavar="FOLDER",
        help="write the reports there: JSON, traces for ui.perfetto.dev, pictures (matplotlib)",
    )
    add_calibrate_parser(commands)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _demo(arguments: argparse.Namespace, console: Console) -> int:
    try:
        settings = DemoSettings(num_steps=arguments.steps)
        return 0 if run_demo(settings, console, arguments.save) else 1
    except (DemoError, RankError) as error:
        return _failed(error)


def _calibrate(arguments: argparse.Namespace, console: Console) -> int:
    try:
        run_calibrate(arguments, console)
    except ValueError as error:
        return _failed(error)
    return 0


def _failed(error: Exception) -> int:
    # Tracebacks have brackets, which rich would read as markup.
    Console(stderr=True).print(f"error: {error}", markup=False, style="red")
    return 1


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
