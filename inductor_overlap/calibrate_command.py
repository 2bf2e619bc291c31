"""``inductor-overlap calibrate``: fit a cluster profile to logs or to the running group.

Each source reads its measurements; fitting and writing are the same for all. Every mistake of the
user's (a missing file, a log without a table, no process group) is a ``ValueError``, which `cli`
prints.
"""

# torch.distributed is partially typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress, TaskID

from inductor_overlap.cost_model.calibrate import calibrate
from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.collective_time import COLLECTIVE_KINDS
from inductor_overlap.cost_model.measure import calibrate_live
from inductor_overlap.cost_model.measure_collectives import BUDGET_S
from inductor_overlap.cost_model.measurements import CollectiveMeasurement, Measurement
from inductor_overlap.cost_model.nccl_tests import read_device_name, read_nccl_tests
from inductor_overlap.cost_model.profile_file import write_profile
from inductor_overlap.cost_model.trace import Traces

_Command = Callable[[argparse.Namespace, Console], None]


def add_parser(commands: Any) -> None:
    """Adds the command and its three sources to ``commands``, an argparse subparsers object."""
    parser = cast(
        "argparse.ArgumentParser",
        commands.add_parser(
            "calibrate",
            help="fit a cluster profile to nccl-tests logs, a profiler trace, or the running group",
            description=(
                "Writes a cluster profile, a readable TOML file, for cluster='PROFILE.toml'."
            ),
        ),
    )
    sources = parser.add_subparsers(title="sources", dest="source", required=True)
    logs = sources.add_parser(
        "nccl-tests",
        help="logs of nccl-tests (all_gather_perf, all_reduce_perf, ...)",
        description=(
            "Fits a profile to nccl-tests logs: whole outputs, with their '# Rank' lines."
        ),
    )
    logs.add_argument("logs", nargs="+", type=Path, metavar="LOG")
    logs.add_argument(
        "--kind",
        choices=COLLECTIVE_KINDS,
        help="the collective of all logs, if they do not name it",
    )
    _add_common(logs, _from_nccl_tests)
    traces = sources.add_parser(
        "trace",
        help="traces of torch.profiler, with NCCL kernels and shapes",
        description=(
            "Fits a profile to the collectives and matmuls in traces of torch.profiler (.json or "
            ".json.gz), recorded on CPU and CUDA with record_shapes=True."
        ),
    )
    traces.add_argument("traces", nargs="+", type=Path, metavar="TRACE")
    _add_common(traces, _from_traces)
    live = sources.add_parser(
        "live",
        help="measure the running group: torchrun ... -m inductor_overlap calibrate live",
        description=(
            "Measures the group that torchrun started (gloo, or NCCL where there are GPUs), and on "
            "CPUs their kernels too. Takes about a minute."
        ),
    )
    live.add_argument(
        "--budget",
        type=_seconds,
        default=BUDGET_S,
        metavar="S",
        help="seconds for the collectives (default: %(default)g)",
    )
    _add_common(live, _live)


def _add_common(parser: argparse.ArgumentParser, command: _Command) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PROFILE", help="file to write (.toml)"
    )
    parser.add_argument(
        "--gpu", metavar="NAME", help=f"the device: {', '.join(Cluster.gpus())} (default: detected)"
    )
    parser.add_argument(
        "--network",
        metavar="NAME",
        help="between nodes, <fabric>-<Gbit/s per NIC>x<NICs per node>, as in ib-ndr-400x8",
    )
    parser.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="GPUs (ranks) of a node (default: detected)"
    )
    parser.set_defaults(command_of_source=command)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, at least 1, got {text!r}")
    return seconds


def run_calibrate(arguments: argparse.Namespace, console: Console) -> None:
    """Runs ``calibrate`` with parsed ``arguments``.

    Raises:
        ValueError: the output cannot be written, or the source says nothing that can be fitted.
    """
    folder = arguments.output.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"cannot write {arguments.output}: {folder} is no folder one can write to")
    arguments.command_of_source(arguments, console)


def _from_nccl_tests(arguments: argparse.Namespace, console: Console) -> None:
    measured: list[CollectiveMeasurement] = []
    device_name: str | None = None
    for path in arguments.logs:
        text = _read(path)
        try:
            measured += read_nccl_tests(text, arguments.kind)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        device_name = device_name or read_device_name(text)
    known = _described(arguments, device_name)
    ranks = max(m.ranks_per_node for m in measured)
    if arguments.gpus_per_node is None:
        known = replace(known, gpus_per_node=max(known.gpus_per_node, ranks))
    names = ", ".join(path.name for path in arguments.logs)
    _fit_and_write(arguments, console, known, measured, f"nccl-tests: {names}")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _from_traces(arguments: argparse.Namespace, console: Console) -> None:
    try:
        traces = Traces(arguments.traces)
    except OSError as error:
        raise ValueError(f"a trace cannot be read: {error}") from error
    known = _described(arguments, traces.device_name)
    measured = traces.measurements(known.gpus_per_node)
    names = ", ".join(path.name for path in arguments.traces)
    _fit_and_write(arguments, console, known, measured, f"torch.profiler: {names}")


def _described(arguments: argparse.Namespace, device_name: str | None) -> Cluster:
    """What the command line says of the cluster; else the usual one of the device that was found.

    Raises:
        ValueError: no profile is for that device.
    """
    gpu = arguments.gpu
    if gpu is None and device_name is not None:
        gpu = Cluster.gpu_named(device_name)
        if gpu is None:
            raise ValueError(
                f"no profile is for the device {device_name!r} of these measurements; name the "
                f"nearest with --gpu: {', '.join(Cluster.gpus())}"
            )
    return _instead(arguments, Cluster.usual(gpu))


def _instead(arguments: argparse.Namespace, known: Cluster) -> Cluster:
    """``known`` with what the command line says instead."""
    said = {
        "gpu": arguments.gpu,
        "network": arguments.network,
        "gpus_per_node": arguments.gpus_per_node,
    }
    return replace(known, **{name: value for name, value in said.items() if value is not None})


def _fit_and_write(
    arguments: argparse.Namespace,
    console: Console,
    known: Cluster,
    measured: Sequence[Measurement],
    source: str,
) -> None:
    fitted = calibrate(known, measured)
    origin = {"source": source, "date": date.today().isoformat()}
    write_profile(fitted, arguments.output, origin)
    counts = Counter(m.what for m in measured)
    _say(console, f"{arguments.output}: fitted to {_listed(counts)}; {_errors(fitted)}")


def _say(console: Console, text: str) -> None:
    # Paths may have brackets, which rich would read as markup.
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} times of {what}" for what, count in sorted(counts.items()))


def _errors(fitted: Cluster) -> str:
    errors = ", ".join(f"{what} {100 * error:.1f} %" for what, error in fitted.errors)
    return f"median distance {errors}"


def _live(arguments: argparse.Namespace, console: Console) -> None:
    with ExitStack() as stack:
        _start_group(stack)
        fitted = _measure(arguments, console)
        origin = [
            {
                "source": f"measured on {dist.get_world_size()} ranks, {dist.get_backend()}, "
                f"torch {torch.__version__}",
                "date": date.today().isoformat(),
            }
        ]
        dist.broadcast_object_list(origin)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            write_profile(fitted, arguments.output, origin[0])
        if dist.get_rank() == 0:
            _say(console, f"{arguments.output}: {_errors(fitted)}")
        dist.barrier()


def _start_group(stack: ExitStack) -> None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(os.environ):
        raise ValueError(
            "calibrate live measures a group of ranks; start it with torchrun, as in "
            "torchrun --nproc-per-node 2 -m inductor_overlap calibrate live -o profile.toml"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    stack.callback(dist.destroy_process_group)


def _measure(arguments: argparse.Namespace, console: Console) -> Cluster:
    known = _instead(arguments, Cluster.detect())
    with Progress(console=console, disable=dist.get_rank() != 0) as bar:
        tasks: dict[str, TaskID] = {}

        def show(what: str, share: float) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=1.0)
            bar.update(tasks[what], completed=share)

        return calibrate_live(known, budget_s=arguments.budget, progress=show)
