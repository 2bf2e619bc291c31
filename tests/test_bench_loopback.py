"""The loopback benchmark without a network: arguments, clean-up, arithmetic, tables.

What it measures is real and slow, so it runs by hand; here is what can go wrong without ranks.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.benchmarks import BENCHMARKS, import_benchmark

loopback: Any = import_benchmark("loopback")
contenders: Any = import_benchmark("loopback_contenders")
memory: Any = import_benchmark("loopback_memory")
network: Any = import_benchmark("loopback_network")
results: Any = import_benchmark("loopback_results")
table: Any = import_benchmark("loopback_table")

pytestmark = pytest.mark.quick


class Recorder:
    """A `Run` that keeps the commands, answers the list of namespaces, and fails on demand."""

    def __init__(self, namespaces: str = "", failing: str = "") -> None:
        self.commands: list[str] = []
        self.namespaces = namespaces
        self.failing = failing

    def __call__(self, command: Sequence[str]) -> str:
        line = " ".join(command)
        self.commands.append(line)
        if self.failing and self.failing in line:
            raise network.NetworkError(f"no {self.failing}")
        return self.namespaces if line == "ip netns list" else ""

    def arguments_of(self, command: str) -> list[str]:
        return [line.removeprefix(command) for line in self.commands if line.startswith(command)]


def test_a_network_removes_what_it_made() -> None:
    run = Recorder()
    with network.LoopbackNetwork(3, run) as made:
        assert made.inside(1, ["true"])[:3] == ["ip", "netns", "exec"]
    assert len(run.arguments_of("ip netns add ")) == 4  # three ranks and the switch
    assert set(run.arguments_of("ip netns add ")) == set(run.arguments_of("ip netns delete "))


def test_an_error_in_the_benchmark_removes_the_network() -> None:
    run = Recorder()
    with pytest.raises(KeyboardInterrupt), network.LoopbackNetwork(2, run):
        raise KeyboardInterrupt
    assert set(run.arguments_of("ip netns add ")) == set(run.arguments_of("ip netns delete "))


def test_a_network_that_cannot_be_made_is_removed() -> None:
    run = Recorder(failing="addr add")
    with pytest.raises(network.NetworkError, match="no addr add"), network.LoopbackNetwork(2, run):
        pytest.fail("there is no network")
    assert set(run.arguments_of("ip netns add ")) <= set(run.arguments_of("ip netns delete "))


def test_what_a_killed_run_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    alive = "overlap-bench-1-rank0 (id: 3)\nmine\noverlap-bench-1-switch\n"
    run = Recorder(
        f"{alive}overlap-bench-{dead.pid}-rank1\noverlap-bench-{dead.pid}-switch (id: 1)"
    )
    removed = [f"overlap-bench-{dead.pid}-rank1", f"overlap-bench-{dead.pid}-switch"]
    assert network.remove_stale(run) == removed
    assert run.arguments_of("ip netns delete ") == removed


def test_both_ends_of_every_link_are_limited() -> None:
    run = Recorder()
    with network.LoopbackNetwork(2, run) as made:
        made.limit(400)
        shaped = run.arguments_of("tc -n ")
        made.limit(network.UNLIMITED)
    assert len(shaped) == 4
    assert all("tbf rate 400mbit" in line for line in shaped)
    lifted = run.arguments_of("tc -n ")[4:]
    assert len(lifted) == 4
    assert all(" qdisc del dev " in line for line in lifted)


def test_without_root_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    with pytest.raises(network.NetworkError, match=r"need root, and this is user 1000; .* sudo"):
        network.check_rights()


def test_without_root_the_command_ends_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 1000)
    assert loopback.main([]) == 2
    assert "error: network namespaces need root" in capsys.readouterr().err


def test_without_iproute2_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda name: None if name == "tc" else name)
    with pytest.raises(network.NetworkError, match=r"no command tc on .* apt-get install iproute2"):
        network.check_rights()


def test_a_failing_command_says_what_it_said() -> None:
    with pytest.raises(network.NetworkError, match=r"failed: .*No such file.* root with"):
        network.run_command(["ls", "/no/such/file"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rates", "4.5"], "expected a whole number of Mbit/s or 0, got '4.5'"),
        (["--rounds", "0"], "expected a whole number of at least 1, got '0'"),
        (["--ranks", "1"], "expected 2 to 200 ranks, got '1'"),
        (["--dim", "100"], "expected a multiple of 16 (eight heads), got '100'"),
        (["--contenders", "fsdp3"], "invalid choice: 'fsdp3'"),
    ],
)
def test_a_wrong_argument_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        loopback.main(arguments)
    assert message in capsys.readouterr().err


def test_buckets_hold_every_parameter() -> None:
    config = contenders.Llama3Config(
        dim=16, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=32, ffn_dim=24
    )
    gathers, again, scatters = contenders.bucket_bytes(config)
    # float32: embedding 32 x 16; block: q and o 16 x 16, k and v 8 x 16, three of 16 x 24, two
    # norms of 16; head: norm 16 and output 32 x 16.
    embedding, block, head = 2048, 4 * (2 * 256 + 2 * 128 + 3 * 384 + 32), 4 * (16 + 512)
    assert gathers == [embedding, block, block, head]
    assert again == [head, block, block]
    assert scatters == gathers[::-1]


def test_the_allocator_counts_live_bytes(tmp_path: Path) -> None:
    # In a process of its own: the allocator stays.
    code = (
        "import sys; from pathlib import Path; import torch; from loopback_memory import *\n"
        "count = LiveBytes(build_allocator(Path(sys.argv[1])))\n"
        "kept = torch.ones(1 << 20); gone = kept + 1; del gone\n"
        "buffer = torch._C._dynamo.guards._empty_strided_cpu((1 << 18,), (1,), torch.float32)\n"
        "print(count.now_bytes, count.peak_bytes); count.restart(); print(count.peak_bytes)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, check=True)
    now_bytes, peak_bytes, restarted_bytes = map(int, done.stdout.split())
    mib, malloc_rounding = 2**20, 2**14
    assert 5 * mib <= now_bytes <= 5 * mib + malloc_rounding  # 4 MiB kept, 1 MiB of a buffer
    assert 8 * mib <= peak_bytes <= 8 * mib + malloc_rounding
    assert restarted_bytes == now_bytes


def trained(steps_s: list[tuple[float, float, float]], **fields: Any) -> Any:
    return results.Trained(
        **{
            "first_steps_s": [30.0, 9.0],
            "steps_s": steps_s,
            "losses": [2.0, 1.0],
            "peak_bytes": 2**20,
        }
        | fields
    )


PREDICTION = results.Prediction(1.8e6, 3.0e6, 1.5e6, 0.2e6, ["manual", "blocks"])
RANKS = [
    results.RankResult(
        {
            "fsdp2": trained([(1.0, 2.0, 1.0), (1.0, 3.0, 1.0), (1.0, 1.0, 1.0)]),
            "torch-auto": trained([(1.0, 1.0, 0.5)] * 3),
            "ours-auto": trained([(0.5, 0.5, 1.0)] * 3, prediction=PREDICTION, peak_bytes=2**19),
            "compiled": results.Trained(error="Traceback\nValueError: no"),
        },
        compute_s=[0.5, 0.6, 0.7],
        communication_s=[0.8, 0.8, 0.8],
        communication_cpu_s=[0.1, 0.2, 0.3],
    ),
    results.RankResult(
        {
            "fsdp2": trained(
                [(1.0, 1.0, 1.0), (1.0, 3.5, 1.5), (1.0, 1.0, 2.0)], losses=[2.2, 1.0]
            ),
            "torch-auto": trained([(1.0, 1.0, 1.0)] * 3),
            "ours-auto": trained([(0.5, 0.5, 1.0)] * 3, prediction=PREDICTION),
            "compiled": results.Trained(),
        },
        compute_s=[0.4, 0.9, 0.7],
        communication_s=[0.8, 0.7, 0.8],
        communication_cpu_s=[0.3, 0.1, 0.1],
    ),
]
MEASURED = results.merge(400, RANKS)


def test_a_step_is_that_of_the_slowest_rank() -> None:
    # Slowest of fsdp2: 4, 6, 4 s; quartiles of 4, 4, 6: 4 and 5. Of compute: 0.5, 0.9, 0.7 s.
    assert MEASURED.rows["fsdp2"].step == results.Spread(4.0, 4.0, 5.0)
    assert MEASURED.rows["fsdp2"].losses == pytest.approx((2.1, 1.0))
    assert MEASURED.rows["ours-auto"].peak_bytes == 2**20
    assert MEASURED.compute_s == 0.7
    # The first compile, 30 s, filled the cache.
    assert MEASURED.rows["ours-auto"].first_step_s == 9.0


def test_the_floor_is_the_longer_and_the_optimizer() -> None:
    # Optimizers take 1.5, 1 and 1 s (slowest ranks, medians): 1. The longer is communication, 0.8.
    assert MEASURED.optimizer_s == 1.0
    assert MEASURED.floor_s == pytest.approx(1.8)
    assert MEASURED.ends_s == pytest.approx(0.2)
    # CPU time of communication: 0.3, 0.2 and 0.3 s; compute 0.7, optimizer 1.
    assert MEASURED.cpu_s == pytest.approx(2.0)
    assert MEASURED.rows["ours-auto"].predicted_s == pytest.approx(2.8)


def test_the_table_of_a_rate_has_every_figure() -> None:
    lines = table.rate_table(MEASURED).splitlines()
    rows = {cells[0]: cells[1:] for line in lines if (cells := cells_of(line))}
    assert rows["FSDP2 eager"][:3] == ["4.000", "4.000-5.000", "1.00"]
    # 4 s against 2 s; predicted 2.8 s, 40 % above; memory of the rank that needs more.
    assert rows["ours, auto"][:7] == [
        "2.000",
        "2.000-2.000",
        "2.00",
        "2.800",
        "+40.0 %",
        "1.0",
        "+0.0 %",
    ]
    assert rows["compiled, no passes"][0] == "failed"
    assert "compiled, no passes failed: ValueError: no" in lines
    assert "ours, auto: manual / blocks." in lines


def test_losses_are_compared_with_those_of_fsdp2() -> None:
    assert results.loss_difference([2.2, 1.0], [2.0, 1.0]) == pytest.approx(0.1)


def test_the_summary_compares_ours_with_the_rest() -> None:
    failed = results.Measured(100, error="rank 0:\nno")
    lines = table.summary([failed, MEASURED]).splitlines()
    rows = {cells[0]: cells[1:] for line in lines if (cells := cells_of(line))}
    assert rows["step, s"] == ["400 Mbit/s"]
    assert rows["FSDP2 eager / ours"] == ["2.00"]
    assert rows["better torch pass / ours"] == ["1.50"]
    assert rows["ours / (floor + ends)"] == ["1.00"]
    assert rows["ours / CPU time of a step"] == ["1.00"]
    assert rows["predicted / measured, ours auto"] == ["1.40"]
    assert "rank 0:\nno" in table.rate_table(failed)


def test_results_survive_their_file(tmp_path: Path) -> None:
    RANKS[0].write(tmp_path / "rank0.json")
    assert results.RankResult.read(tmp_path / "rank0.json") == RANKS[0]


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    table.draw([MEASURED], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 0


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]] if line.startswith("|") else []
