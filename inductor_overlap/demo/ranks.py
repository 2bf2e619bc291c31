"""Starts the ranks of the demo as fresh processes, hears from them, and ends them.

Each rank leads a process group of its own, and the compilers it runs belong to it: ending the demo
early (an error, Ctrl-C) kills whole groups. Ranks meet through a file, so no port is opened.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from inductor_overlap.demo.training import NUM_RANKS, DemoSettings, RankResult, train

_FAILURES_FOLLOW_WITHIN_S = 3.0
_FAREWELL_S = 10.0


class RankError(RuntimeError):
    """A rank raised or died; the message holds the tracebacks."""


@dataclass(frozen=True)
class Progress:
    """What rank 0 does now, and the share of the run that is done."""

    stage: str
    share: float


@dataclass(frozen=True)
class Failure:
    """Why a rank gave up: its traceback, or how its process ended."""

    reason: str


@dataclass(frozen=True)
class _Rank:
    number: int
    process: BaseProcess
    connection: Connection


def run_ranks(
    settings: DemoSettings, on_progress: Callable[[str, float], None]
) -> list[RankResult]:
    """Trains on `NUM_RANKS` ranks and returns what each saw, in rank order.

    Args:
        settings: What to train.
        on_progress: Called with rank 0's stage and the share of the run (0 to 1) that is done.

    Raises:
        RankError: A rank raised or died.
    """
    context = mp.get_context("spawn")
    ranks: list[_Rank] = []
    with tempfile.TemporaryDirectory(
        prefix="inductor-overlap-demo-", ignore_cleanup_errors=True
    ) as folder:
        try:
            for number in range(NUM_RANKS):
                ranks.append(_start(context, number, settings, Path(folder)))
            results = _listen(ranks, on_progress)
            for rank in ranks:
                rank.process.join(_FAREWELL_S)
            return results
        finally:
            for rank in ranks:
                _end(rank)


def _start(context: SpawnContext, number: int, settings: DemoSettings, folder: Path) -> _Rank:
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(sender, number, settings, folder))
    process.start()
    sender.close()  # the rank holds the only other end, so that its death is seen here
    return _Rank(number, process, receiver)


def _listen(ranks: Sequence[_Rank], on_progress: Callable[[str, float], None]) -> list[RankResult]:
    results: dict[int, RankResult] = {}
    while len(results) < len(ranks):
        waiting = [rank for rank in ranks if rank.number not in results]
        rank, message = _next_message(waiting)
        if isinstance(message, Failure):
            raise _rank_error(rank, message, [other for other in waiting if other is not rank])
        if isinstance(message, RankResult):
            results[rank.number] = message
        else:
            on_progress(message.stage, message.share)
    return [results[rank.number] for rank in ranks]


def _next_message(ranks: Sequence[_Rank]) -> tuple[_Rank, Progress | RankResult | Failure]:
    ready = wait([rank.connection for rank in ranks])
    rank = next(rank for rank in ranks if rank.connection in ready)
    return rank, _receive(rank)


def _receive(rank: _Rank) -> Progress | RankResult | Failure:
    try:
        return rank.connection.recv()
    except EOFError:
        rank.process.join()
        return Failure(f"the process ended with exit code {rank.process.exitcode}")


def _rank_error(rank: _Rank, failure: Failure, others: Sequence[_Rank]) -> RankError:
    """All failures: a rank that dies takes its peers along, and the cause may come second."""
    failures = {rank.number: failure.reason}
    deadline_s = time.monotonic() + _FAILURES_FOLLOW_WITHIN_S
    for other in others:
        while other.number not in failures:
            if not other.connection.poll(max(0.0, deadline_s - time.monotonic())):
                break
            message = _receive(other)
            if isinstance(message, Failure):
                failures[other.number] = message.reason
    parts = [f"rank {number} failed:\n{reason}" for number, reason in sorted(failures.items())]
    return RankError("\n".join(parts))


def _end(rank: _Rank) -> None:
    """Kills what is left of a rank."""
    rank.connection.close()
    with suppress(ProcessLookupError, PermissionError):
        assert rank.process.pid is not None
        os.killpg(rank.process.pid, signal.SIGKILL)
    rank.process.kill()  # it may have had no time to found its group
    rank.process.join()


def _rank_main(sender: Connection, number: int, settings: DemoSettings, folder: Path) -> None:
    os.setsid()
    # One thread a rank: two ranks share the machine's cores with gloo's threads.
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    try:
        sender.send(_train_on(number, settings, folder, sender))
    except BaseException:
        with suppress(BrokenPipeError):
            sender.send(Failure(traceback.format_exc()))
    finally:
        sender.close()


def _train_on(number: int, settings: DemoSettings, folder: Path, sender: Connection) -> RankResult:
    def tell(stage: str, share: float) -> None:
        if number == 0:
            sender.send(Progress(stage, share))

    store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
        str(folder / "store"), NUM_RANKS
    )
    dist.init_process_group("gloo", store=store, rank=number, world_size=NUM_RANKS)
    try:
        return train(settings, tell)
    finally:
        dist.destroy_process_group()
