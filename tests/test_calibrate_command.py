"""The command ``calibrate``: logs and traces to a profile, and what it tells a user who errs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.graphs import GraphBuilder, two_linear_layers
from support.ranks import fake_process_group

import inductor_overlap as io
from inductor_overlap import cli
from inductor_overlap.cost_model.profile_file import read_profile

pytestmark = pytest.mark.quick

RANKS = "".join(
    f"#  Rank {rank:2d} Group  0 Pid  {rank} on node-{rank // 4} device  {rank % 4} [0x18] "
    "NVIDIA GB200\n"
    for rank in range(8)
)
ROWS = "".join(
    f"  {2**e}  {2 ** (e - 2)}  float  sum  -1  {100 + 2**e / 4e5:.1f}  1.00  1.75  0\n"
    for e in range(10, 31, 4)
)
LOG = f"# all_reduce_perf\n{RANKS}{ROWS}"
KERNEL = {
    "ph": "X",
    "cat": "kernel",
    "name": "ncclDevKernel_AllGather",
    "dur": 250.0,
    "args": {
        "Collective name": "_allgather_base",
        "In msg nelems": 2**20,
        "Out msg nelems": 2**23,
        "Group size": 8,
        "dtype": "Float",
        "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
    },
}


def test_a_log_becomes_a_profile_that_prices_compiles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, profile = tmp_path / "all_reduce.log", tmp_path / "site.toml"
    log.write_text(LOG)
    assert cli.main(["calibrate", "nccl-tests", str(log), "-o", str(profile)]) == 0
    assert "fitted to 6 times of collective; median distance" in capsys.readouterr().out
    cluster = read_profile(profile)
    # The log names the GPUs; four of them are on each of two nodes.
    assert (cluster.gpu, cluster.gpus_per_node, cluster.network) == ("gb200", 4, "ib-ndr-400x4")
    found = cluster.collective_us("all_reduce", 2**18, num_nodes=2, ranks_per_node=4)
    assert found == pytest.approx(100 + 2**18 / 4e5, rel=1e-3)
    assert io.options(cluster=str(profile))
    with fake_process_group(4):
        report = io.optimize(two_linear_layers(GraphBuilder()), cluster=str(profile))
    assert f"prices: {profile}, collectives" in str(report)
    assert 'source = "nccl-tests: all_reduce.log"' in profile.read_text()


def test_what_the_command_line_says_comes_first(tmp_path: Path) -> None:
    log, profile = tmp_path / "log", tmp_path / "site.toml"
    log.write_text(LOG)
    said = ["--gpu=h100", "--network=roce-400x8", "--gpus-per-node=8"]
    assert cli.main(["calibrate", "nccl-tests", str(log), "-o", str(profile), *said]) == 0
    cluster = read_profile(profile)
    assert (cluster.gpu, cluster.network, cluster.gpus_per_node) == ("h100", "roce-400x8", 8)


def test_a_trace_becomes_a_profile(tmp_path: Path) -> None:
    trace, profile = tmp_path / "rank0.json", tmp_path / "site.toml"
    content = {"traceEvents": [KERNEL], "deviceProperties": [{"name": "NVIDIA H200"}]}
    trace.write_text(json.dumps(content))
    assert cli.main(["calibrate", "trace", str(trace), "-o", str(profile)]) == 0
    cluster = read_profile(profile)
    assert cluster.gpu == "h200"
    found = cluster.collective_us("all_gather", 2**25, num_nodes=1, ranks_per_node=8)
    assert found == pytest.approx(250, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nccl-tests", "none.log", "-o", "p.toml"], "none.log cannot be read"),
        (["nccl-tests", "bad.log", "-o", "p.toml"], 'bad.log: the log has no "# Rank'),
        (
            ["nccl-tests", "odd.log", "-o", "p.toml"],
            "no profile is for the device 'Imaginary 9000'",
        ),
        (["trace", "none.json", "-o", "p.toml"], "a trace cannot be read"),
        (["trace", "bad.log", "-o", "p.toml"], "bad.log is no trace"),
        (["live", "-o", "p.toml"], "start it with torchrun"),
        (["live", "-o", "nowhere/p.toml"], "is no folder one can write to"),
    ],
)
def test_mistakes_are_named_and_nothing_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    Path("bad.log").write_text("hello")
    Path("odd.log").write_text(LOG.replace("NVIDIA GB200", "Imaginary 9000"))
    assert cli.main(["calibrate", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("p.toml").exists()


@pytest.mark.parametrize("budget", ["0", "-1", "soon", "inf"])
def test_the_budget_must_be_seconds(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["calibrate", "live", "-o", "p.toml", f"--budget={budget}"])
    assert ended.value.code == 2
    assert f"expected seconds, at least 1, got '{budget}'" in capsys.readouterr().err


def test_a_source_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["calibrate"])
    assert ended.value.code == 2
    assert "required: source" in capsys.readouterr().err
