"""What each rank does: calibrate, compile every contender once, then train them in turns.

Runs as ``python loopback_rank.py spec.json``, in the rank's network namespace. It prints what it is
doing, writes ``rank<N>.json`` beside the spec, and ends when its standard input does, so that it
never outlives the process that started it. All contenders live in one process and take turns in
short rounds: a machine that slows down slows all of them.

A contender that raises is struck off on all ranks and its traceback kept; the others go on.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

# Read by torch when it is imported: one thread a rank, compiled in this process, never from
# Inductor's graph cache (its C++ cache stays), so that first steps can be compared.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"

import torch
import torch.distributed as dist
import torch.nn.functional as F
from loopback_contenders import Contender, Setup, bucket_bytes, build, compute_alone
from loopback_memory import LiveBytes
from loopback_network import INTERFACE
from loopback_results import Prediction, RankResult, RankSpec, Trained
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from inductor_overlap.cost_model.cluster import Cluster
from inductor_overlap.cost_model.measure import calibrate_live
from inductor_overlap.cost_model.profile_file import write_profile
from inductor_overlap.models.llama3 import Llama3Config
from inductor_overlap.report import Report

_TIMEOUT = timedelta(minutes=10)
"""Longer than one rank may wait for the other to compile."""


def main() -> None:
    spec = RankSpec(**json.loads(Path(sys.argv[1]).read_text()))
    _end_with_parent()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[spec.rank % len(cores)]})
    torch.set_num_threads(1)
    # Every contender compiles the same `forward`.
    torch._dynamo.config.recompile_limit = 64
    memory = LiveBytes(Path(spec.allocator))
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        spec.address, spec.port, spec.num_ranks, spec.rank == 0, _TIMEOUT
    )
    dist.init_process_group(
        "gloo", store=store, rank=spec.rank, world_size=spec.num_ranks, timeout=_TIMEOUT
    )
    try:
        result = _Rank(spec, memory).run()
        result.write(Path(spec.folder) / f"rank{spec.rank}.json")
    finally:
        dist.destroy_process_group()


@dataclass
class _Entry:
    """A contender on its way; `contender` is None before it is built and after it failed."""

    trained: Trained = field(default_factory=Trained)
    contender: Contender | None = None
    kept_bytes: int = 0


class _Rank:
    """The course of the benchmark on one rank."""

    def __init__(self, spec: RankSpec, memory: LiveBytes) -> None:
        self.spec = spec
        self.memory = memory
        self.config = Llama3Config(
            dim=spec.dim,
            num_layers=spec.layers,
            ffn_dim=-(-8 * spec.dim // 96) * 32,  # 8/3 of dim, as Llama has it, in whole lines
            vocab_size=spec.dim,
            max_seq=spec.seq,
        )
        self.entries = {name: _Entry() for name in spec.contenders}

    def run(self) -> RankResult:
        mesh = init_device_mesh("cpu", (self.spec.num_ranks,))
        self.tell("calibrates")
        setup = Setup(self.config, mesh, self.calibrated(), self.spec.memory_limit_gb)
        for turn in range(self.spec.compiles):
            self.discard_all()
            for name in self.entries:
                self.tell(f"compiles {name}, {turn + 1} of {self.spec.compiles}")
                self.attempt(name, lambda entry, name=name: self.first_step(entry, name, setup))
        self.tell("compiles the floor")
        alone = compute_alone(setup)
        step(alone, self.tokens(0))
        result = RankResult({name: entry.trained for name, entry in self.entries.items()})
        for done in range(self.spec.rounds):
            for name in self.entries:
                self.tell(f"round {done + 1} of {self.spec.rounds}: {name}")
                self.attempt(name, self.timed_steps)
            for _ in range(self.spec.steps):
                dist.barrier()
                forward_s, backward_s, _optimizer_s, _loss = step(alone, self.tokens(0))
                result.compute_s.append(forward_s + backward_s)
                communication_s, cpu_s = self.communicate()
                result.communication_s.append(communication_s)
                result.communication_cpu_s.append(cpu_s)
        return result

    def calibrated(self) -> Cluster:
        """The product's own live calibration, of the collectives that a step has."""
        cluster = calibrate_live(kinds=("all_gather", "reduce_scatter"))
        if self.spec.rank == 0:
            origin = {"source": "benchmarks/loopback.py", "rate_mbit": str(self.spec.rate_mbit)}
            write_profile(cluster, Path(self.spec.folder) / "profile.toml", origin)
        return cluster

    def tell(self, what: str) -> None:
        if self.spec.rank == 0:
            print(what, flush=True)

    def attempt(self, name: str, act: Callable[[_Entry], None]) -> None:
        """Runs `act`; if it raises on any rank, the contender is struck off on all of them."""
        entry = self.entries[name]
        if entry.trained.error:
            return
        error = ""
        try:
            act(entry)
        except Exception:
            error = traceback.format_exc()
        errors: list[str] = [""] * self.spec.num_ranks
        dist.all_gather_object(errors, error)
        entry.trained.error = next(filter(None, errors), "")
        if entry.trained.error:
            entry.contender = None
            self.tell(f"{name} failed:\n{entry.trained.error}")

    def discard_all(self) -> None:
        """Forgets every contender and what was compiled for it."""
        for entry in self.entries.values():
            entry.contender = None
            entry.trained.losses.clear()
        torch._dynamo.reset()

    def first_step(self, entry: _Entry, name: str, setup: Setup) -> None:
        """Builds and compiles; a second step, untimed, brings memory into its steady state."""
        before_bytes = self.live_bytes()
        entry.contender = contender = build(name, setup)
        dist.barrier()
        begin_s = time.perf_counter()
        self.train(entry)
        entry.trained.first_steps_s.append(time.perf_counter() - begin_s)
        contender.collect_reports()
        if contender.reports:
            entry.trained.prediction = predict(contender.reports)
        self.train(entry)
        entry.kept_bytes = self.live_bytes() - before_bytes

    def timed_steps(self, entry: _Entry) -> None:
        for _ in range(self.spec.steps):
            self.memory.restart()
            before_bytes, sent_bytes = self.memory.now_bytes, _sent_bytes()
            dist.barrier()
            entry.trained.steps_s.append(self.train(entry))
            dist.barrier()
            trained = entry.trained
            trained.sent_bytes = _sent_bytes() - sent_bytes
            used_bytes = self.memory.peak_bytes - before_bytes
            trained.peak_bytes = max(trained.peak_bytes, entry.kept_bytes + used_bytes)

    def train(self, entry: _Entry) -> tuple[float, float, float]:
        """One step; returns the times of forward, backward and optimizer."""
        assert entry.contender is not None
        *times_s, loss = step(entry.contender, self.tokens(len(entry.trained.losses)))
        entry.trained.losses.append(loss)
        return times_s[0], times_s[1], times_s[2]

    def tokens(self, number: int) -> Tensor:
        """Token ids `[batch, seq + 1]` of a step, different on each rank: a rule to be learnt."""
        generator = torch.Generator().manual_seed(number * self.spec.num_ranks + self.spec.rank)
        vocab_size = self.config.vocab_size
        columns = [torch.randint(0, vocab_size, (self.spec.batch,), generator=generator)]
        for _ in range(self.spec.seq):
            columns.append((5 * columns[-1] + 3) % vocab_size)
        return torch.stack(columns, dim=1)

    def communicate(self) -> tuple[float, float]:
        """Seconds of a step's collectives, block by block, with nothing to compute; CPU time."""
        gathers, again, scatters = bucket_bytes(self.config)
        moves = [("gather", size) for size in (*gathers, *again)]
        moves += [("scatter", size) for size in scatters]
        buffers = [_buffers(size, self.spec.num_ranks) for _, size in moves]
        dist.barrier()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        works: list[dist.Work | None] = []
        for (kind, _), (whole, part) in zip(moves, buffers, strict=True):
            if kind == "gather":
                works.append(dist.all_gather_single(whole, part, async_op=True))
            else:
                works.append(dist.reduce_scatter_single(part, whole, async_op=True))
        for work in filter(None, works):
            work.wait()
        return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s

    def live_bytes(self) -> int:
        gc.collect()
        return self.memory.now_bytes


def step(contender: Contender, tokens: Tensor) -> tuple[float, float, float, float]:
    """One step of training; returns seconds of forward, backward and optimizer, and the loss."""
    begin_s = time.perf_counter()
    logits = contender.forward(tokens[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    del logits
    forward_s = time.perf_counter()
    loss.backward()
    backward_s = time.perf_counter()
    contender.optimizer.step()
    contender.optimizer.zero_grad()
    end_s = time.perf_counter()
    return forward_s - begin_s, backward_s - forward_s, end_s - backward_s, loss.item()


def predict(reports: list[Report]) -> Prediction:
    """The step as the plugin's reports have it, forward and backward together."""
    return Prediction(
        step_us=sum(report.after.step_us for report in reports),
        unchanged_us=sum(report.before.step_us for report in reports),
        bound_us=sum(report.lower_bound_us for report in reports),
        ends_us=sum(_ends_us(report) for report in reports),
        policies=[report.policy_chosen for report in reports],
    )


def _ends_us(report: Report) -> float:
    """Stall in the graph's first wait and, of a backward graph, in its last."""
    stalls = [span for span in report.after.spans if span.kind == "wait"]
    ends = {*stalls[:1], *(stalls[-1:] if report.name == "backward" else ())}
    return sum(span.end_us - span.start_us for span in ends)


def _buffers(size_bytes: int, num_ranks: int) -> tuple[Tensor, Tensor]:
    """A whole of at least `size_bytes`, and one rank's part of it."""
    items = -(-size_bytes // (4 * num_ranks))
    return torch.ones(items * num_ranks), torch.ones(items)


def _sent_bytes() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes").read_text())


def _end_with_parent() -> None:
    """Ends this process, and the compilers that it runs, when standard input is closed."""

    def watch() -> None:
        while os.read(0, 1):  # not sys.stdin, whose lock outlives a daemon thread
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main()
