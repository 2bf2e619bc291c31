"""The demo: its arithmetic by hand, its failures and its whole run on real ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from inductor_overlap.cost_model.simulate import Timeline
from inductor_overlap.demo import DemoSettings, RankError
from inductor_overlap.demo.ranks import run_ranks
from inductor_overlap.demo.summary import (
    CompileProgress,
    is_equal,
    median_step_us,
    print_summary,
)
from inductor_overlap.demo.training import OVERLAPPED, PLAIN, RankResult
from inductor_overlap.passes.plan import Plan
from inductor_overlap.report import Report

MARK = "INDUCTOR_OVERLAP_TEST_MARK"


def report(before_us: float, after_us: float, bound_us: float) -> Report:
    return Report(
        before=Timeline(before_us, 3e3, 4e3, 2e3, 3 * 2**20),
        after=Timeline(after_us, 3e3, 4e3, 5e2, 2 * 2**20),
        lower_bound_us=bound_us,
        plan=Plan("greedy"),
        exposed=(),
        num_collectives_before=30,
        num_collectives_after=6,
        policy_chosen="greedy",
        warnings=("a [bracket] in a warning",),
    )


def rank_result(step_s: dict[str, list[float]], **overrides: Any) -> RankResult:
    fields: dict[str, Any] = {
        "losses": {PLAIN: [5.5, 3.0], OVERLAPPED: [5.5, 3.0]},
        "step_s": step_s,
        "weights_equal": True,
        "reports": {
            "forward": report(10e3, 8e3, 5e3),
            "backward": report(20e3, 12e3, 12e3),
        },
    }
    return RankResult(**{**fields, **overrides})


RESULTS = [
    rank_result({PLAIN: [0.010, 0.030, 0.011], OVERLAPPED: [0.004, 0.005, 0.006]}),
    rank_result({PLAIN: [0.012, 0.020, 0.020], OVERLAPPED: [0.005, 0.004, 0.009]}),
]


@pytest.mark.quick
def test_a_step_is_as_long_as_that_of_the_slower_rank() -> None:
    # Slower ranks: 12, 30, 20 ms; median 20. And 5, 5, 9 ms; median 5.
    assert median_step_us(RESULTS, PLAIN) == pytest.approx(20e3)
    assert median_step_us(RESULTS, OVERLAPPED) == pytest.approx(5e3)


@pytest.mark.quick
def test_equal_means_losses_and_weights_of_every_rank() -> None:
    steps = RESULTS[0].step_s
    other_loss = {PLAIN: [5.5, 3.0], OVERLAPPED: [5.5, 3.0000000000000004]}
    assert is_equal(RESULTS)
    assert not is_equal([RESULTS[0], rank_result(steps, losses=other_loss)])
    assert not is_equal([RESULTS[0], rank_result(steps, weights_equal=False)])


def printed(results: list[RankResult]) -> str:
    console = Console(width=80, record=True, quiet=False, file=open(os.devnull, "w"))  # noqa: SIM115
    print_summary(console, DemoSettings(), results)
    return console.export_text()


@pytest.mark.quick
def test_the_summary_has_every_figure() -> None:
    text = printed(RESULTS)
    rows = {cells[0]: cells[1:] for cells in map(cells_of, text.splitlines()) if cells}
    assert rows["collectives"] == ["30", "6", "30", "6"]
    assert rows["step"] == ["10.000 ms", "8.000 ms", "20.000 ms", "12.000 ms"]
    assert rows["exposed communication"] == ["2.000 ms", "500.0 us"] * 2
    assert rows["peak memory"] == ["3.0 MiB", "2.0 MiB"] * 2
    assert rows["lower bound of the step"] == ["5.000 ms", "12.000 ms"]
    assert rows["gap to the bound"] == ["60.0 %", "0.0 %"]
    # 10 + 20 = 30 ms before, 8 + 12 = 20 ms after.
    assert rows["simulated (cpu-gloo)"] == ["30.000 ms", "20.000 ms", "-33.3 %"]
    assert rows["measured here (median of 3)"] == ["20.000 ms", "5.000 ms", "-75.0 %"]
    assert rows["loss of the last step"] == ["3.000000", "3.000000"]
    assert "forward: a [bracket] in a warning" in text
    assert "equal: 4 losses" in text
    assert max(map(len, text.splitlines())) <= 80


def cells_of(line: str) -> list[str]:
    """The cells of a table's row that are not empty; nothing for other lines."""
    return [cell.strip() for cell in re.split("[│┃]", line)[1:-1] if cell.strip()]


@pytest.mark.quick
def test_the_summary_says_how_far_losses_are_apart() -> None:
    losses = {PLAIN: [5.5, 3.0], OVERLAPPED: [5.5, 3.25]}
    text = printed([RESULTS[0], rank_result(RESULTS[0].step_s, losses=losses)])
    assert "NOT equal: losses differ by up to 0.25" in text


@pytest.mark.quick
def test_progress_prints_each_stage_once_without_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with CompileProgress(Console(force_terminal=False)) as progress:
        progress.show("compile", 0.1)
        progress.show("train", 0.9)
        progress.show("train", 0.95)
    assert capsys.readouterr().out == "compile ...\ntrain ...\n"


@pytest.mark.quick
def test_settings_need_a_step() -> None:
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        DemoSettings(num_steps=0)


@pytest.mark.gloo
def test_the_traceback_of_a_rank_is_in_the_error() -> None:
    settings = DemoSettings(cluster="abacus")
    with pytest.raises(RankError, match=r"rank 0 failed:\nTraceback[\s\S]*abacus"):
        run_ranks(settings, lambda stage, share: None)


def start_demo(
    folder: Path, *arguments: str, on_hangup: signal.Handlers = signal.SIG_DFL, **environment: str
) -> subprocess.Popen[str]:
    """The command in a process of its own; `processes_of` finds what it starts."""

    def set_signals() -> None:
        signal.signal(signal.SIGHUP, on_hangup)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it

    return subprocess.Popen(
        [sys.executable, "-u", "-m", "inductor_overlap.cli", "demo", *arguments],
        env={**os.environ, "TMPDIR": str(folder), MARK: folder.name, **environment},
        cwd=folder,
        preexec_fn=set_signals,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def processes_of(folder: Path) -> Iterator[tuple[int, str]]:
    """Id and command line of every live process that has the mark of `folder`."""
    wanted = f"{MARK}={folder.name}".encode()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            marked = wanted in (place / "environ").read_bytes().split(b"\0")
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if marked and command:
            yield int(place.name), command


def ranks_of(folder: Path) -> list[int]:
    return sorted(pid for pid, command in processes_of(folder) if "spawn_main" in command)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    unique = tmp_path / uuid.uuid4().hex
    unique.mkdir()
    return unique


def wait_for_ranks(demo: subprocess.Popen[str]) -> None:
    assert demo.stdout is not None
    assert demo.stdout.readline().startswith("compile forward")


def assert_nothing_left(folder: Path) -> None:
    deadline_s = time.monotonic() + 10
    while list(processes_of(folder)) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert list(processes_of(folder)) == []
    assert list(folder.glob("inductor-overlap-demo-*")) == []


@pytest.mark.quick
def test_a_missing_compiler_is_named(folder: Path) -> None:
    demo = start_demo(folder, CXX="/no/such/compiler")
    _, errors = demo.communicate(timeout=120)
    assert demo.returncode == 1
    assert "needs a C++ compiler" in errors
    assert "Traceback" not in errors


@pytest.mark.gloo
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_behind(
    folder: Path, number: signal.Signals, exit_code: int
) -> None:
    demo = start_demo(folder)
    wait_for_ranks(demo)
    assert len(ranks_of(folder)) == 2
    demo.send_signal(number)
    demo.communicate(timeout=60)
    assert demo.returncode == exit_code
    assert_nothing_left(folder)


@pytest.mark.gloo
def test_nohup_is_respected(folder: Path) -> None:
    demo = start_demo(folder, on_hangup=signal.SIG_IGN)
    wait_for_ranks(demo)
    demo.send_signal(signal.SIGHUP)
    demo.terminate()
    demo.communicate(timeout=60)
    assert demo.returncode == 128 + signal.SIGTERM
    assert_nothing_left(folder)


@pytest.mark.gloo
def test_a_killed_rank_ends_the_demo(folder: Path) -> None:
    demo = start_demo(folder)
    wait_for_ranks(demo)
    os.kill(ranks_of(folder)[1], signal.SIGKILL)
    _, errors = demo.communicate(timeout=60)
    assert demo.returncode == 1
    assert "rank 1 failed:\nthe process ended with exit code -9" in errors
    assert_nothing_left(folder)


@pytest.mark.gloo
@pytest.mark.compile
def test_the_whole_demo(folder: Path) -> None:
    demo = start_demo(folder, "--steps", "2", "--save", "saved")
    output, errors = demo.communicate(timeout=580)
    assert demo.returncode == 0, errors
    assert "equal: 6 losses and the weights" in output  # two ranks, first step and two more
    assert_nothing_left(folder)
    for direction in ("forward", "backward"):
        saved = json.loads((folder / "saved" / f"{direction}.json").read_text())
        assert saved["after"]["num_collectives"] < saved["before"]["num_collectives"]
        assert saved["after"]["step_us"] < saved["before"]["step_us"]
        for ending in ("perfetto.json", "png"):
            assert (folder / "saved" / f"{direction}.{ending}").stat().st_size > 0
    measured = json.loads((folder / "saved" / "measured.json").read_text())
    assert {len(steps) for steps in measured["step_s"].values()} == {2}
