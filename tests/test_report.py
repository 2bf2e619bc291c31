"""The report: its text, its JSON, its pictures, and the reasons for what is exposed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.errors import PriceErrors
from inductor_overlap.cost_model.lower_bound import lower_bound
from inductor_overlap.cost_model.schedule import Buffer, Schedule
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.display import format_bytes, format_change, format_error, format_us
from inductor_overlap.passes.plan import Bucket, Plan
from inductor_overlap.report import Exposed, Report, explain_exposed

pytestmark = pytest.mark.quick


def two_gathers() -> Schedule:
    """Each gather is waited for at once, then computed with."""
    return schedule(
        start("ag0", 2000, wire_us=1500, writes=("w0",)),
        wait("ag0"),
        compute("mm0", 3000, "wait_ag0", reads=("w0",)),
        start("ag1", 2000, wire_us=1500, writes=("w1",)),
        wait("ag1"),
        compute("mm1", 3000, "mm0", "wait_ag1", reads=("w1",)),
        buffers=(Buffer("w0", 2**30), Buffer("w1", 2**29)),
    )


def report_of(before: Schedule, after: Schedule, **fields: Any) -> Report:
    bound = lower_bound(before)
    timeline = simulate(after)
    return Report(
        **{
            "before": simulate(before),
            "after": timeline,
            "lower_bound_us": bound.step_us,
            "plan": Plan("greedy", (Bucket("b", ("ag0", "ag1")),), ("b",), ("b",)),
            "exposed": explain_exposed(after, timeline),
            "num_collectives_before": 2,
            "num_collectives_after": 1,
            "policy_chosen": "greedy",
            "bound_certificate": bound.certificate,
            **fields,
        }
    )


@pytest.fixture
def report() -> Report:
    before = two_gathers()
    after = before.reordered(["ag0", "ag1", "wait_ag0", "mm0", "wait_ag1", "mm1"])
    return report_of(
        before,
        after,
        name="backward 0",
        memory_limit_bytes=1.6 * 2**30,
        warnings=("group '0' is shared with eager code",),
        fallbacks={"aten.foo": 3, "aten.bar": 1},
    )


def test_text(report: Report) -> None:
    # before: 2 + 3 + 2 + 3 = 10 ms; after: ag0 0-2, mm0 2-5, ag1 2-4 hidden, mm1 5-8
    assert str(report).splitlines() == [
        "inductor-overlap: backward 0",
        "                             before        after",
        "  collectives                     2            1   -50.0 %",
        "  step (simulated)        10.000 ms     8.000 ms   -20.0 %",
        "  compute                  6.000 ms     6.000 ms      same",
        "  communication            4.000 ms     4.000 ms      same",
        "  exposed                  4.000 ms     2.000 ms   -50.0 %",
        "  peak memory              1.00 GiB     1.50 GiB   +50.0 %",
        "  lower bound 8.000 ms, gap 0.0 %",
        "    since 2 of 2 jobs of compute need 6000 us, none can begin before 2000 us, "
        "and at least 0 us follow each",
        "  policy greedy: 2 collectives in 1 bucket",
        "  memory limit 1.60 GiB",
        "  exposed, longest first:",
        "      2.000 ms  ag0: first of the graph: no compute comes before its wait "
        "to hide its 2.000 ms of communication",
        "  costs unknown, so estimated from bytes: aten.bar (1), aten.foo (3)",
        "  warning: group '0' is shared with eager code",
    ]


def test_gap_is_relative_to_the_bound(report: Report) -> None:
    assert report.lower_bound_us == 8000
    assert report.gap == 0.0
    before = two_gathers()
    assert report_of(before, before).gap == pytest.approx(0.25)
    assert report_of(schedule(), schedule()).gap == 0.0


def test_repr(report: Report) -> None:
    assert repr(report) == (
        "Report('backward 0': step 10.000 ms -> 8.000 ms, 2 -> 1 collectives, gap 0.0 %)"
    )


def test_doing_nothing_is_said_aloud() -> None:
    text = str(report_of(schedule(), schedule(), plan=Plan("input order"), policy_chosen="none"))
    assert "policy none: nothing was changed" in text
    assert "nothing is exposed" in text


def test_many_exposed_pieces_are_summed_up() -> None:
    exposed = [Exposed(f"ag{i}", 100.0 - i, "why") for i in range(10)]
    lines = str(report_of(schedule(), schedule(), exposed=exposed)).splitlines()
    assert [line for line in lines if "ag" in line][-1].endswith("ag7: why")
    assert lines[-1].split() == ["183.0", "us", "in", "2", "more"]  # 92 + 91


def test_contention_has_a_row_where_it_costs() -> None:
    case = schedule(start("s", 4), compute("a", 10), wait("s"), contention=2)
    assert re.search(r"slowed by contention +2\.0 us", str(report_of(case, case)))


def test_json_has_every_figure(report: Report) -> None:
    content = json.loads(report.to_json())
    assert content["before"]["step_us"] == 10_000
    assert content["after"]["step_us"] == 8000
    assert content["after"]["num_collectives"] == 1
    assert content["after"]["peak_bytes"] == 2**30 + 2**29
    assert content["gap"] == 0.0
    assert content["memory_limit_bytes"] == 1.6 * 2**30
    assert content["exposed"][0]["collective"] == "ag0"
    assert Plan.from_json(json.dumps(content["plan"])) == report.plan
    assert list(content["fallbacks"]) == ["aten.bar", "aten.foo"]


def test_json_without_a_limit_is_standard() -> None:
    assert json.loads(report_of(schedule(), schedule()).to_json())["memory_limit_bytes"] is None


def test_perfetto_trace(report: Report, tmp_path: Path) -> None:
    report.to_perfetto(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "before: 10.000 ms", 2: "after: 8.000 ms"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {(1, 1): "compute", (1, 2): "pg", (2, 1): "compute", (2, 2): "pg"}
    after = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert [(e["name"], e["cat"], e["tid"], e["ts"], e["dur"]) for e in after] == [
        ("ag0", "communication", 2, 0, 2000),
        ("ag1", "communication", 2, 2000, 2000),
        ("wait_ag0", "stall", 1, 0, 2000),
        ("mm0", "compute", 1, 2000, 3000),
        ("mm1", "compute", 1, 5000, 3000),
    ]


def test_png(report: Report, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.to_png(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'inductor-overlap\[plot\]'"):
        report.to_png("never.png")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0 us"), (999.94, "999.9 us"), (1234.5, "1.234 ms"), (2.5e6, "2.500 s")],
)
def test_times_for_people(value: float, text: str) -> None:
    assert format_us(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3.0 MiB"), (2**30, "1.00 GiB")],
)
def test_sizes_for_people(value: float, text: str) -> None:
    assert format_bytes(value) == text


def test_changes_for_people() -> None:
    assert format_change(200.0, 150.0) == "-25.0 %"
    assert format_change(1e6, 1e6 - 1.0) == "same"
    assert format_change(0.0, 5.0) == format_change(1.0, 50.0) == ""


def test_prices_are_stated_with_their_errors() -> None:
    prices = PriceErrors("h100-ib", 0.257, 0.04, 3, ("links are shared",))
    report = report_of(two_gathers(), two_gathers(), prices=prices)
    lines = [line.strip() for line in str(report).splitlines()]
    assert "prices: h100-ib, collectives +-26 %, compute +-4 %" in lines
    assert "assumed: links are shared" in lines
    assert (
        "rough: 3 collectives are below 1 MB, and no calibration of this cluster covers them"
    ) in lines
    assert json.loads(report.to_json())["prices"]["collectives"] == 0.257


def test_prices_of_ones_own_have_no_known_error() -> None:
    text = str(report_of(two_gathers(), two_gathers(), prices=PriceErrors("Mine")))
    assert "prices: Mine, collectives of unknown error, compute of unknown error" in text
    assert "rough" not in text
    assert format_error(0.0) == "+-0 %"
