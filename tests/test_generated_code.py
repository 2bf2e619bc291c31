"""What Inductor generates from a three-block Llama on eight ranks, with its default settings.

Orders are read from the generated code, because later phases undo orders of the FX graph. One
module, so that its compiles are shared.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.compile_llama import compile_llama

pytestmark = pytest.mark.compile

OPTIONS = {"wrap": "auto", "cluster": "h100-ib", "memory_limit_gb": 1.0}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor-cache")


@pytest.fixture(scope="module")
def overlapped(cache_dir: Path) -> dict[str, Any]:
    return compile_llama(cache_dir, options=OPTIONS)


@pytest.fixture(scope="module")
def only_resharded(cache_dir: Path, overlapped: dict[str, Any]) -> dict[str, Any]:
    """The same model without buckets and moves, for another cluster, after ``overlapped``."""
    options = {**OPTIONS, "wrap": "none", "cluster": "a100-ib"}
    return compile_llama(cache_dir, options=options, torch_logs="+inductor_overlap")


def calls(code: str) -> list[str]:
    """One word per call in the generated wrapper, in order."""
    words: list[str] = []
    for line in code[code.index("def call(") :].splitlines():
        statement = line.strip()
        if statement.startswith(("#", "assert_")):
            continue
        if match := re.search(r"_c10d_functional\.(\w+)\.default\(", statement):
            op = match.group(1).removesuffix("_coalesced")
            words.append(_SHORT.get(op, op))
        elif match := re.match(r"(cpp_fused\w*|graph_\w+)\(", statement):
            words.append(match.group(1))
        elif "extern_kernels." in statement or "torch.ops.aten" in statement:
            words.append("mm" if ".mm(" in statement or "addmm" in statement else "extern")
    return words


_SHORT = {
    "all_gather_into_tensor": "ag",
    "reduce_scatter_tensor": "rs",
    "wait_tensor": "wait",
}


BEFORE_AFTER = ("before", "after")


def is_kernel(word: str) -> bool:
    return word.startswith(("cpp_fused", "mm", "extern"))


def is_packing(word: str) -> bool:
    """Kernels of ours: concatenating shards or gradients, copying gathered parameters out."""
    return re.fullmatch(r"cpp_fused_(\w+_)?cat_\w+|cpp_fused_clone_\d+", word) is not None


def tensors(code: str, start: str) -> list[str]:
    """What is waited for after ``start``: itself, or the items of a coalesced one."""
    items = re.findall(rf"^\s*(\w+) = {start}\[\d+\]", code, re.MULTILINE)
    return items or [start]


def waited_at_once(code: str) -> list[bool]:
    """Per reduce-scatter: whether it is waited for before the next kernel runs."""
    lines = [
        line.strip()
        for line in code[code.index("def call(") :].splitlines()
        if "_c10d_functional" in line or re.match(r"\s*(cpp_fused|extern_kernels)", line)
    ]
    verdicts: list[bool] = []
    for index, line in enumerate(lines):
        match = re.match(r"(\w+) = torch\.ops\._c10d_functional\.reduce_scatter", line)
        if match is None:
            continue
        rest = lines[index + 1 :]
        first = tensors(code, match[1])[0]
        wait = next(i for i, later in enumerate(rest) if f"wait_tensor.default({first})" in later)
        verdicts.append(not any("_c10d_functional" not in later for later in rest[:wait]))
    return verdicts


def test_reduce_scatters_overlap_later_matmuls(overlapped: dict[str, Any]) -> None:
    backward = overlapped["codes"][1]
    words = calls(backward)
    starts = [index for index, word in enumerate(words) if word == "rs"]
    before_a_matmul = [index for index in starts if "mm" in words[index:]]
    at_once = waited_at_once(backward)
    assert len(starts) == len(at_once) > 0
    assert len(before_a_matmul) >= 0.5 * len(starts)
    assert sum(not verdict for verdict in at_once) >= 0.8 * len(starts)


def test_gathers_are_prefetched_in_both_graphs(overlapped: dict[str, Any]) -> None:
    for code in overlapped["codes"]:
        words = calls(code)
        gathers = [index for index, word in enumerate(words) if word == "ag"]
        hidden = [index for index in gathers[1:] if words[index + 1] != "wait"]
        assert len(hidden) >= 0.5 * len(gathers[1:])


def test_the_unscheduled_order_is_different(only_resharded: dict[str, Any]) -> None:
    """Without reordering every gather is waited for at once: the tests above can fail."""
    words = calls(only_resharded["codes"][0])
    assert all(later == "wait" for word, later in pairwise(words) if word == "ag")


def test_torch_logs_print_the_report_of_each_graph(
    overlapped: dict[str, Any], only_resharded: dict[str, Any]
) -> None:
    for name in ("forward", "backward"):
        assert f"inductor-overlap: {name}" in only_resharded["stderr"]
        assert f"inductor-overlap: {name}" not in overlapped["stderr"]


def test_collectives_are_merged(overlapped: dict[str, Any], only_resharded: dict[str, Any]) -> None:
    for merged, single in zip(overlapped["codes"], only_resharded["codes"], strict=True):
        assert calls(single).count("ag") > 0
        assert calls(merged).count("ag") <= calls(single).count("ag")
    before, after = (overlapped["reports"][1][when]["num_collectives"] for when in BEFORE_AFTER)
    assert after < before
    words = calls(overlapped["codes"][1])
    assert words.count("ag") + words.count("rs") == after


def test_fusion_is_not_hindered(overlapped: dict[str, Any], only_resharded: dict[str, Any]) -> None:
    """No more kernels than without, packing aside; there may be fewer.

    What makes the gradient of a norm's weight joins whatever kernel Inductor finds for it; when it
    is packed, it may become a kernel of its own: at most one a scatter bucket.
    """
    pairs = zip(overlapped["codes"], only_resharded["codes"], strict=True)
    for (ours, theirs), report in zip(pairs, overlapped["reports"], strict=True):
        scatters = [b for b in report["plan"]["buckets"] if b["name"].startswith("reduce_scatter")]
        counts = [
            sum(is_kernel(word) and not is_packing(word) for word in calls(code))
            for code in (ours, theirs)
        ]
        more = counts[0] - counts[1]
        assert more <= len(scatters)


def test_every_start_is_waited_for_once(overlapped: dict[str, Any]) -> None:
    for code in overlapped["codes"]:
        starts = re.findall(r"(\w+) = torch\.ops\._c10d_functional\.(?!wait)\w+\.default", code)
        started = [tensor for start in starts for tensor in tensors(code, start)]
        waited = re.findall(r"wait_tensor\.default\((\w+)\)", code)
        assert sorted(started) == sorted(waited)
        assert len(set(started)) == len(started) > 0


def test_buffers_are_not_reused_in_flight(overlapped: dict[str, Any]) -> None:
    """Between start and wait neither the input nor the output of a collective is given away."""
    for code in overlapped["codes"]:
        lines = code[code.index("def call(") :].splitlines()
        for index, line in enumerate(lines):
            match = re.search(
                r"(\w+) = torch\.ops\._c10d_functional\.(?!wait)\w+\.default\((.*)", line
            )
            if match is None:
                continue
            sources = re.findall(r"\b(?:buf|primals_|tangents_)\d+", match[2])
            for result, source in zip(tensors(code, match[1]), sources, strict=True):
                wait = next(
                    i
                    for i in range(index, len(lines))
                    if f"wait_tensor.default({result})" in lines[i]
                )
                between = "\n".join(lines[index + 1 : wait])
                for name in (result, source):
                    assert not re.search(rf"\bdel {name}\b", between), (name, line)


def test_a_second_process_hits_the_cache(cache_dir: Path, overlapped: dict[str, Any]) -> None:
    assert overlapped["aot_autograd"]["autograd_cache_miss"] == 1
    again = compile_llama(cache_dir, options=OPTIONS, hash_seed=7)
    assert again["aot_autograd"].get("autograd_cache_hit") == 1
    assert again["inductor"].get("fxgraph_cache_hit", 0) >= 1
    for counter in ("fxgraph_cache_miss", "fxgraph_cache_bypass"):
        assert again["inductor"].get(counter, 0) == 0
    for counter in ("autograd_cache_miss", "autograd_cache_bypass"):
        assert again["aot_autograd"].get(counter, 0) == 0


def test_other_settings_miss_the_cache(only_resharded: dict[str, Any]) -> None:
    assert only_resharded["aot_autograd"].get("autograd_cache_hit", 0) == 0
    assert only_resharded["inductor"].get("fxgraph_cache_hit", 0) == 0


def test_ranks_generate_the_same_code(cache_dir: Path, overlapped: dict[str, Any]) -> None:
    other = compile_llama(cache_dir, rank=3, options=OPTIONS, fx_cache=False, hash_seed=11)
    digests = [[report["plan"]["digest"] for report in r["reports"]] for r in (overlapped, other)]
    assert digests[0] == digests[1]
    assert other["codes"] == overlapped["codes"]


def test_fused_kernels_cost_what_the_graph_costs(overlapped: dict[str, Any]) -> None:
    """Both of Inductor's representations are priced alike, or one pass undoes the other's work.

    They are priced from different facts: origins and buffers of kernels, nodes and fusion rules.
    """
    for kernel_us, report in zip(overlapped["kernel_us"], overlapped["reports"], strict=True):
        assert kernel_us == pytest.approx(report["after"]["compute_us"], rel=0.15)
