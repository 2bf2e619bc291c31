"""Training steps on a real, rate-limited network: the plugin beside what a user would pick instead.

``sudo $(which python) benchmarks/loopback.py`` makes a network of namespaces on this machine
(`loopback_network`), starts one gloo rank in each (`loopback_rank`), and trains the same Llama 3
from the same seed under each contender (`loopback_contenders`) at each rate. The prices that the
plugin and torch's passes plan with are calibrated by the product, live, at each rate. It prints
tables and writes them with all figures beside ``--out``: ``.txt``, ``.json`` and, if matplotlib is
there, ``.png``. Whatever ends it, nothing that it made stays.

Exit codes: 0 something was measured, 1 nothing was, 2 wrong usage or a machine that cannot run it,
130 Ctrl-C, 143 terminated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import torch
from loopback_contenders import CONTENDERS
from loopback_memory import build_allocator
from loopback_network import LoopbackNetwork, NetworkError, check_rights
from loopback_results import Measured, RankResult, RankSpec, merge
from loopback_table import draw, rate_table, summary

from inductor_overlap.cli import unwind_when_terminated

_RANK_SCRIPT = Path(__file__).with_name("loopback_rank.py")
_PORT = 29500
_POLL_S = 0.2
_LINES_OF_ERROR = 15
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(2 * 10**9),
    "MALLOC_TRIM_THRESHOLD_": str(16 * 10**9),
    "MALLOC_TOP_PAD_": str(2**28),
}
"""Keeps freed memory in the ranks, as a caching allocator does on GPUs: by default glibc returns
large blocks to the kernel, and touching them anew took 15 % of compute here."""


class RankDied(RuntimeError):
    """A rank ended without a result; the message holds the end of what it said."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        check_rights()
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    # Ctrl-C too: a shell starts background jobs with it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    unwind_when_terminated()
    try:
        measured = run(arguments)
    except NetworkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0 if any(not one.error for one in measured) else 1


def run(arguments: argparse.Namespace) -> list[Measured]:
    """Measures every rate; results are written after each, so that an early end keeps the rest."""
    heading = describe(arguments)
    print(heading, flush=True)
    measured: list[Measured] = []
    with (
        tempfile.TemporaryDirectory(prefix="loopback-") as folder,
        LoopbackNetwork(arguments.ranks) as network,
    ):
        allocator = build_allocator(Path(folder))
        for rate_mbit in arguments.rates:
            network.limit(rate_mbit)
            place = Path(folder) / str(rate_mbit)
            place.mkdir()
            spec = _spec(arguments, rate_mbit, allocator, place)
            measured.append(measure(spec, network))
            print(f"\n{rate_table(measured[-1])}\n", flush=True)
            _write(arguments.out, heading, measured)
            _keep_profile(place, arguments.out)
    print(summary(measured), flush=True)
    return measured


def measure(spec: RankSpec, network: LoopbackNetwork) -> Measured:
    """What the ranks saw at one rate; a rank that dies ends this rate only."""
    folder = Path(spec.folder)
    try:
        with _ranks(spec, network) as processes:
            _wait_for(processes, folder)
    except RankDied as error:
        return Measured(spec.rate_mbit, error=str(error))
    results = [RankResult.read(folder / f"rank{rank}.json") for rank in range(spec.num_ranks)]
    return merge(spec.rate_mbit, results)


def describe(arguments: argparse.Namespace) -> str:
    """What was run, when and where, as a comment."""
    facts = (
        f"{datetime.now():%Y-%m-%d %H:%M}, commit {_commit()}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {_processor()}, {os.cpu_count()} cores, Linux "
        f"{platform.release()}",
        f"{arguments.ranks} gloo ranks, one thread and one core each; Llama 3: {arguments.layers} "
        f"blocks, dim {arguments.dim}, float32; {arguments.batch} x {arguments.seq} tokens a rank; "
        f"{arguments.rounds} rounds of {arguments.steps} steps; load before: {os.getloadavg()[0]}",
        shlex.join(["python", "benchmarks/loopback.py", *sys.argv[1:]]),
    )
    return "\n".join(f"# {fact}" for fact in facts)


@contextmanager
def _ranks(spec: RankSpec, network: LoopbackNetwork) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The ranks as processes, each the leader of its group; all are killed at the end."""
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(spec.num_ranks):
            processes.append(_start(replace(spec, rank=rank), network))
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start(spec: RankSpec, network: LoopbackNetwork) -> subprocess.Popen[bytes]:
    path = Path(spec.folder) / f"spec{spec.rank}.json"
    path.write_text(json.dumps(asdict(spec)))
    command = network.inside(spec.rank, [sys.executable, str(_RANK_SCRIPT), str(path)])
    with _errors(path.parent, spec.rank).open("wb") as errors:
        return subprocess.Popen(
            command,
            env={**os.environ, **_MALLOC},
            stdin=subprocess.PIPE,  # a rank ends when this does
            stdout=None if spec.rank == 0 else subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def _wait_for(processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    while True:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            said = "\n".join(_last_words(folder, rank) for rank in failed)
            raise RankDied(f"{said}\nexit codes {codes}")
        if None not in codes:
            return
        time.sleep(_POLL_S)


def _last_words(folder: Path, rank: int) -> str:
    lines = _errors(folder, rank).read_text(errors="replace").splitlines()
    return "\n".join([f"rank {rank}:", *lines[-_LINES_OF_ERROR:]])


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.err"


def _write(out: Path, heading: str, measured: Sequence[Measured]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    tables = [rate_table(one) for one in measured]
    out.with_suffix(".txt").write_text("\n\n".join([heading, summary(measured), *tables]) + "\n")
    content = {"heading": heading.splitlines(), "rates": [asdict(one) for one in measured]}
    out.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    try:
        draw(measured, out.with_suffix(".png"))
    except ImportError:
        print("no picture: matplotlib is not installed (pip install -e '.[plot]')")


def _keep_profile(folder: Path, out: Path) -> None:
    """The calibrated profile of a rate, beside the results: other runs can plan with it."""
    profile = folder / "profile.toml"
    if profile.exists():
        shutil.copy(profile, out.with_name(f"{out.name}-{folder.name}.toml"))


def _spec(arguments: argparse.Namespace, rate_mbit: int, allocator: Path, folder: Path) -> RankSpec:
    return RankSpec(
        rank=0,
        num_ranks=arguments.ranks,
        address=LoopbackNetwork.address(0),
        port=_PORT,
        rate_mbit=rate_mbit,
        compiles=arguments.compiles if rate_mbit == arguments.rates[0] else 1,
        rounds=arguments.rounds,
        steps=arguments.steps,
        contenders=tuple(arguments.contenders),
        batch=arguments.batch,
        seq=arguments.seq,
        dim=arguments.dim,
        layers=arguments.layers,
        memory_limit_gb=arguments.memory_limit_mib / 1024,
        allocator=str(allocator),
        folder=str(folder),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Measures training steps on a rate-limited network of namespaces (needs root)",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    rates = [100, 200, 400, 800, 1600, 0]
    add("--rates", type=_rate, nargs="+", default=rates, help="Mbit/s each way; 0: no limit")
    add("--ranks", type=_ranks_count, default=2, help="gloo ranks, each on a core if there are any")
    compiles = "compiles at the first rate: the first fills the C++ cache, the others are timed"
    add("--compiles", type=_count, default=2, help=compiles)
    add("--rounds", type=_count, default=5, help="rounds of all contenders in turn")
    add("--steps", type=_count, default=1, help="timed steps of a contender in a round")
    names = list(CONTENDERS)
    add("--contenders", choices=names, nargs="+", default=names, metavar="NAME", help="who runs")
    add("--dim", type=_width, default=512, help="width of the model, a multiple of 16")
    add("--layers", type=_count, default=4, help="blocks of the model")
    add("--batch", type=_count, default=4, help="sequences of a rank and step")
    add("--seq", type=_count, default=512, help="tokens of a sequence")
    limit = "live bytes of a graph, MiB, for the contender that is given a limit"
    add("--memory-limit-mib", type=_count, default=306, help=limit)
    out = Path("benchmarks/results/loopback")
    add("--out", type=Path, default=out, help="where to write, without the ending")
    return parser


def _rate(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number of Mbit/s or 0, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def _ranks_count(text: str) -> int:
    if not text.isdecimal() or not 2 <= int(text) <= 200:
        raise argparse.ArgumentTypeError(f"expected 2 to 200 ranks, got {text!r}")
    return int(text)


def _width(text: str) -> int:
    if not text.isdecimal() or int(text) < 1 or int(text) % 16:
        raise argparse.ArgumentTypeError(f"expected a multiple of 16 (eight heads), got {text!r}")
    return int(text)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=_RANK_SCRIPT.parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
