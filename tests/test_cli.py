"""The command line: arguments, exit codes, messages. The demo itself is replaced."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from inductor_overlap import cli
from inductor_overlap.demo import DemoError, RankError

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def old_signal_handlers() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command line called the demo with; the demo reports equal numbers."""
    seen: list[Any] = []

    def run_demo(settings: Any, console: Any, save_to: Any) -> bool:
        seen.append((settings.num_steps, save_to))
        return True

    monkeypatch.setattr(cli, "run_demo", run_demo)
    return seen


def demo_that(monkeypatch: pytest.MonkeyPatch, outcome: bool | BaseException) -> None:
    def run_demo(*_: object) -> bool:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(cli, "run_demo", run_demo)


def test_demo_has_defaults(calls: list[Any]) -> None:
    assert cli.main(["demo"]) == 0
    assert calls == [(40, None)]


def test_demo_passes_its_options_on(calls: list[Any]) -> None:
    assert cli.main(["demo", "--steps", "7", "--save", "some/folder"]) == 0
    assert calls == [(7, Path("some/folder"))]


def test_different_numbers_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    demo_that(monkeypatch, False)
    assert cli.main(["demo"]) == 1


@pytest.mark.parametrize("error", [DemoError("no [compiler]"), RankError("no [compiler]")])
def test_errors_are_printed_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    demo_that(monkeypatch, error)
    assert cli.main(["demo"]) == 1
    assert "error: no [compiler]" in capsys.readouterr().err


def test_ctrl_c_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    demo_that(monkeypatch, KeyboardInterrupt())
    assert cli.main(["demo"]) == 130


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_termination_unwinds_the_demo(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    unwound: list[bool] = []
    before = signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup

    def run_demo(*_: object) -> bool:
        try:
            signal.raise_signal(number)
        finally:
            unwound.append(True)
        return True

    monkeypatch.setattr(cli, "run_demo", run_demo)
    try:
        with pytest.raises(SystemExit) as ended:
            cli.main(["demo"])
    finally:
        signal.signal(number, before)
    assert (ended.value.code, unwound) == (128 + number, [True])


@pytest.mark.parametrize("steps", ["0", "-3", "many", "1.5"])
def test_steps_must_be_a_count(
    calls: list[Any], capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", f"--steps={steps}"])
    assert ended.value.code == 2
    assert f"expected a whole number of at least 1, got '{steps}'" in capsys.readouterr().err
    assert calls == []


def test_a_command_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 2
    assert "required: command" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == "0.1.0"


def test_the_console_script_is_main() -> None:
    (script,) = entry_points(group="console_scripts", name="inductor-overlap")
    assert script.load() is cli.main
