"""Wrap lists: patterns, shared buckets, ranges, and the mistakes that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.programs import free, program
from support.schedules import schedule

from inductor_overlap.passes.manual_wrap import ManualWrap, WrapError, make_buckets, name_of
from inductor_overlap.passes.program import Program

pytestmark = pytest.mark.quick

NAMES = (
    "tok_embeddings.weight",
    "layers.0.attention.wq.weight",
    "layers.0.attention.wk.weight",
    "layers.0.norm.weight",
    "layers.1.attention.wq.weight",
    "layers.1.norm.weight",
    "layers.10.norm.weight",
    "norm.weight",
    "output.weight",
)


def gathers(names: Sequence[str] = NAMES) -> Program:
    found = [
        free(name, "all_gather", 100, fqn=name, module=name.rpartition(".")[0], input_position=i)
        for i, name in enumerate(names)
    ]
    return program(schedule(), found)


def buckets(entries: Any, given: Program | None = None, **fields: bool) -> list[tuple[str, ...]]:
    made = ManualWrap.parse(entries).buckets(given or gathers(), **fields)
    return [bucket.members for bucket in made]


def test_a_pattern_makes_one_bucket_for_each_module_it_matches() -> None:
    assert buckets(["layers.*"]) == [NAMES[1:4], NAMES[4:6]]  # layers.10 has one parameter


def test_a_list_makes_one_bucket_of_all_it_matches() -> None:
    assert buckets([["tok_embeddings", "norm", "output"]]) == [(NAMES[0], *NAMES[7:])]
    assert buckets([["layers.*"]]) == [NAMES[1:7]]


def test_a_range_and_a_star_stay_within_their_level() -> None:
    assert buckets(["layers.[0-1]"]) == [NAMES[1:4], NAMES[4:6]]
    assert buckets([["layers.[2-31].norm", "layers.*.norm"]]) == [(NAMES[3], NAMES[5], NAMES[6])]
    assert buckets(["layers.*.attention"]) == [NAMES[1:3]]
    assert buckets(["*"]) == [NAMES[1:7]]


def test_payload_is_in_parameter_order() -> None:
    shuffled = gathers((NAMES[3], NAMES[1], NAMES[2]))
    assert buckets(["layers.0"], shuffled) == [(NAMES[3], NAMES[1], NAMES[2])]
    reversed_found = program(schedule(), reversed(gathers().collectives))
    assert buckets(["layers.0"], reversed_found) == [NAMES[1:4]]


def test_different_kinds_and_collectives_that_cannot_merge_stay_apart() -> None:
    a, b, c = (free(f"g{i}", "all_gather", 1, input_position=i) for i in range(3))
    scatters = [free(f"s{i}", "reduce_scatter", 1, input_position=i) for i in range(2)]
    symbolic = free("d", "all_gather", 1, can_merge=False)
    keyed = [("k", one) for one in (a, scatters[0], b, scatters[1], symbolic)]
    made = make_buckets([*keyed, ("other", c)])
    assert [(x.name, x.members) for x in made] == [
        ("all_gather_bucket_0", ("g0", "g1")),
        ("reduce_scatter_bucket_1", ("s0", "s1")),
    ]


def test_a_collective_without_fqn_goes_by_its_module() -> None:
    assert name_of(free("g", "all_gather", 1, module="layers.0")) == "layers.0"
    assert name_of(free("g", "all_gather", 1)) is None
    found = [free(f"g{i}", "all_gather", 1, module="layers.0") for i in range(2)]
    found.append(free("unknown", "all_gather", 1))
    assert buckets(["layers.*"], program(schedule(), found)) == [("g0", "g1")]


@pytest.mark.parametrize("entries", [["blocks.*"], ["layers.*", ["norm", "outptu"]]])
def test_an_unmatched_pattern_names_the_nearest(entries: Any) -> None:
    with pytest.raises(WrapError, match="matches no sharded parameter") as error:
        buckets(entries)
    if entries != ["blocks.*"]:
        assert "'outptu'" in str(error.value) and "'output'" in str(error.value)
    assert buckets(entries, require_match=False) is not None


def test_a_list_for_a_model_may_name_what_a_part_of_it_lacks() -> None:
    wrap = ManualWrap.parse(["layers.*", ["norm", "output"]])
    assert wrap.absent(NAMES, ()) == ()
    assert wrap.absent(NAMES[:4], NAMES) == ("norm", "output")
    with pytest.raises(WrapError, match=r"'output' matches no parameter of the compiled model"):
        wrap.absent(NAMES[:4], NAMES[:-1])


def test_overlapping_entries_are_named() -> None:
    with pytest.raises(WrapError, match=r"'layers.0.*' is matched by two wrap entries, 'layers"):
        buckets(["layers.*", "layers.0"])
    with pytest.raises(WrapError, match="narrow one of them"):
        buckets([["layers.*", "norm"], ["output", "norm"]])


@pytest.mark.parametrize("entries", [[1], [""], [[]], [["norm", 3]], [None], [[["norm"]]]])
def test_entries_of_another_shape_are_refused(entries: Any) -> None:
    with pytest.raises(WrapError, match="a wrap entry is a module FQN pattern or a list"):
        ManualWrap.parse(entries)


@pytest.mark.parametrize("pattern", ["layers..0", ".norm", "layers.", "layers.[a-b]", "layers.[3"])
def test_patterns_that_cannot_be_read_are_refused(pattern: str) -> None:
    with pytest.raises(WrapError, match="cannot read the wrap pattern"):
        ManualWrap.parse([pattern])


def test_empty_lists_and_ranges_are_refused() -> None:
    with pytest.raises(WrapError, match='or pass wrap="none"'):
        ManualWrap.parse([])
    with pytest.raises(WrapError, match="write the smaller number first"):
        ManualWrap.parse(["layers.[3-1]"])
