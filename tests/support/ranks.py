"""Runs a function on several gloo ranks, or plans on a fake group, from inside one test.

`run_ranks` starts processes of which each has nothing but torch imported, so the function and its
arguments must be picklable and the function importable from its module. Ranks meet through a file
store in a temporary folder: no port is opened, so tests may run side by side.
"""

from __future__ import annotations

import faulthandler
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

DEFAULT_TIMEOUT_S = 300.0
_PRELOADED = ["torch._inductor.compile_fx", "torch.distributed.tensor"]
"""Imported once for all ranks, which takes five seconds. Nothing of this package: a server that is
told to import something does not look where the tests do."""
_GRACE_S = 5.0


class RankFailure(AssertionError):
    """One or more ranks raised, died or hung; the message holds every rank's traceback."""


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """Returns `fn(*args)` of every rank, in rank order, run under an initialised gloo group.

    Args:
        fn: A module-level function; it finds its rank with `dist.get_rank()`.
        world_size: Number of processes to start.
        *args: Picklable arguments, the same for every rank.
        timeout_s: Wall time after which ranks that have not answered are killed.

    Raises:
        RankFailure: A rank raised (its traceback is in the message), died or hung.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store_path = os.path.join(folder, "store")
        ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(sender, fn, rank, world_size, store_path, args)
            )
            process.start()
            sender.close()
            ranks.append((process, receiver))
        try:
            answers = _collect(ranks, timeout_s)
        finally:
            for process, _ in ranks:
                _stop(process)
    return _results_or_raise(answers, world_size, timeout_s)


def _rank_main(
    sender: Connection,
    fn: Callable[..., Any],
    rank: int,
    world_size: int,
    store_path: str,
    args: Sequence[Any],
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    faulthandler.enable()  # says where a rank was that a signal ends
    try:
        store = dist.FileStore(  # pyright: ignore[reportPrivateImportUsage]
            store_path, world_size
        )
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        torch.manual_seed(0)
        answer = _pack("ok", fn(*args))
    except BaseException:
        answer = _pack("error", traceback.format_exc())
    sender.send_bytes(answer)
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _pack(kind: str, payload: Any) -> bytes:
    # Plain pickle copies tensors by value; Connection.send would share their memory with a process
    # that is about to end.
    return pickle.dumps((kind, payload))


def _collect(
    ranks: Sequence[tuple[BaseProcess, Connection]], timeout_s: float
) -> dict[int, tuple[str, Any]]:
    """Answers by rank; stops early, after a grace period, once one rank has failed."""
    receivers = [receiver for _, receiver in ranks]
    deadline_s = time.monotonic() + timeout_s
    answers: dict[int, tuple[str, Any]] = {}
    while len(answers) < len(receivers):
        pending = [r for i, r in enumerate(receivers) if i not in answers]
        ready = wait(pending, timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = receivers.index(receiver)  # pyright: ignore[reportArgumentType]
            answers[rank] = _receive(*ranks[rank])
        if any(kind != "ok" for kind, _ in answers.values()):
            deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return answers


def _receive(process: BaseProcess, receiver: Connection) -> tuple[str, Any]:
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join(timeout=_GRACE_S)
        code = process.exitcode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        return "error", f"the process ended without an answer: {how}"


def _stop(process: BaseProcess) -> None:
    process.join(timeout=_GRACE_S if process.exitcode is None else 0)
    if process.is_alive():
        process.kill()
        process.join()


def _results_or_raise(
    answers: dict[int, tuple[str, Any]], world_size: int, timeout_s: float
) -> list[Any]:
    failures = [
        f"rank {rank} failed:\n{payload}"
        for rank, (kind, payload) in sorted(answers.items())
        if kind != "ok"
    ]
    missing = [rank for rank in range(world_size) if rank not in answers]
    if missing and not failures:
        failures.append(f"ranks {missing} gave no answer within {timeout_s:g} s and were killed")
    if failures:
        raise RankFailure("\n".join(failures))
    return [answers[rank][1] for rank in range(world_size)]


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """A default group of `world_size` ranks in this process alone; collectives move no data."""
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; destroy it before faking another")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
