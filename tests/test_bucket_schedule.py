"""What buckets make of a program, in numbers that can be added up by hand.

`LinearPrices`: a collective takes 1 us and 1 us per 100 bytes, a copy 1 us per 1,000 bytes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.programs import free, program
from support.schedules import compute, schedule, start, wait

from inductor_overlap.cost_model.schedule import Buffer
from inductor_overlap.cost_model.simulate import simulate
from inductor_overlap.passes.bucket_form import with_forms
from inductor_overlap.passes.bucket_schedule import bucket_program, copies_us
from inductor_overlap.passes.plan import Bucket
from inductor_overlap.passes.program import Program

pytestmark = pytest.mark.quick


def two_layers(fused: bool = False) -> Program:
    """Two gathers of 100 bytes, each for a kernel of 10 us."""
    buffers = (Buffer("w1", 100), Buffer("w2", 100), Buffer("x", 50, is_output=True))
    tasks = (
        start("g1", 2, writes=("w1",)),
        wait("g1", reads=("w1",)),
        compute("c1", 10, "wait_g1", reads=("w1",)),
        start("g2", 2, writes=("w2",)),
        wait("g2", reads=("w2",)),
        compute("c2", 10, "c1", "wait_g2", reads=("w2",), writes=("x",)),
    )
    gathers = [free(name, "all_gather", 100, unpack_is_fused=fused) for name in ("g1", "g2")]
    return program(schedule(*tasks, buffers=buffers), gathers)


def names(given: Program) -> list[str]:
    given.schedule.validate()
    return [task.name for task in given.schedule.tasks]


def test_no_bucket_changes_nothing() -> None:
    given = two_layers()
    assert bucket_program(given, []) is given


def test_a_bucket_of_gathers_packs_gathers_and_copies_out() -> None:
    bucketed = bucket_program(two_layers(), [Bucket("b", ("g1", "g2"))])
    assert names(bucketed) == ["b.pack", "b", "b.wait", "wait_g1", "c1", "wait_g2", "c2"]
    # Pack of 2 x 50 bytes 0.1, gather of 200 bytes 3, two copies of 100 bytes 0.1 each, 2 x 10.
    assert simulate(bucketed.schedule).step_us == pytest.approx(23.3)
    # In flight: 100 packed and 200 gathered; unpacking: 200 gathered and one member of 100.
    assert simulate(bucketed.schedule).peak_bytes == 300
    (merged,) = bucketed.collectives
    assert (merged.size_bytes, merged.input_bytes, merged.output_bytes) == (200, 100, 200)
    assert merged.members == ("g1", "g2") and not merged.can_merge
    assert {"b.pack", "b", "b.wait", "wait_g1", "wait_g2"} == bucketed.movable


def test_members_that_are_fused_into_their_readers_are_not_copied() -> None:
    bucketed = bucket_program(two_layers(fused=True), [Bucket("b", ("g1", "g2"))])
    assert simulate(bucketed.schedule).step_us == pytest.approx(23.1)
    tasks = bucketed.schedule.by_name
    assert tasks["wait_g1"].writes == () and tasks["c1"].reads == ("b.output",)
    assert "w1" not in bucketed.schedule.buffers


def reductions() -> Program:
    """Two gradients of 100 bytes, each made by a kernel of 10 us, and a kernel behind them."""
    buffers = [Buffer(f"d{i}", 100) for i in (1, 2)]
    buffers += [Buffer(f"r{i}", 50, is_output=True) for i in (1, 2)]
    tasks = (
        compute("c1", 10, writes=("d1",)),
        start("s1", 2, "c1", reads=("d1",), writes=("r1",)),
        wait("s1", reads=("r1",)),
        compute("c2", 10, writes=("d2",)),
        start("s2", 2, "c2", reads=("d2",), writes=("r2",)),
        wait("s2", reads=("r2",)),
        compute("c3", 10),
    )
    scatters = [free(name, "reduce_scatter", 100) for name in ("s1", "s2")]
    return program(schedule(*tasks, buffers=tuple(buffers)), scatters)


def test_a_bucket_of_reductions_starts_when_its_last_input_is_there() -> None:
    bucketed = bucket_program(reductions(), [Bucket("b", ("s1", "s2"))])
    assert names(bucketed)[:4] == ["c1", "c2", "b.pack", "b"]
    # 2 x 10, pack of 200 bytes 0.2, reduction of 200 bytes 3, the last kernel 10.
    assert simulate(bucketed.schedule).step_us == pytest.approx(33.2)
    assert bucketed.schedule.buffers["b.output"].is_output
    assert bucketed.schedule.by_name["wait_s1"].duration_us == 0.0


def hybrid(cast: bool) -> Program:
    """Reduce-scatters whose results are all-reduced, through a cast or directly."""
    tasks = []
    for i in (1, 2):
        behind = f"cast{i}" if cast else f"wait_s{i}"
        tasks += [start(f"s{i}", 2), wait(f"s{i}")]
        tasks += [compute(f"cast{i}", 0, f"wait_s{i}")] if cast else []
        tasks += [start(f"a{i}", 2, behind, queue="replicas"), wait(f"a{i}")]
    found = [free(f"s{i}", "reduce_scatter", 100) for i in (1, 2)]
    found += [free(f"a{i}", "all_reduce", 50, follows=f"s{i}") for i in (1, 2)]
    given = program(schedule(*tasks), found)
    casts = {task.name for task in tasks if task.name.startswith("cast")}
    return Program(**{**vars(given), "movable": given.movable | casts})


@pytest.mark.parametrize(("cast", "packs"), [(False, False), (True, True)])
def test_an_all_reduce_takes_the_bucket_before_it_as_it_is(cast: bool, packs: bool) -> None:
    """Unless a cast stands between: its results lie in tensors of their own."""
    buckets = [Bucket("s", ("s1", "s2")), Bucket("a", ("a1", "a2"))]
    bucketed = bucket_program(hybrid(cast), buckets)
    assert ("a.pack" in names(bucketed)) == packs


def test_a_task_that_needed_a_member_needs_the_bucket() -> None:
    given = two_layers()
    tasks = [*given.schedule.tasks, compute("barrier", 1, "g1", "wait_g1")]
    with_barrier = program(
        schedule(*tasks, buffers=tuple(given.schedule.buffers.values())), given.collectives
    )
    bucketed = bucket_program(with_barrier, [Bucket("b", ("g1", "g2"))])
    assert bucketed.schedule.by_name["barrier"].deps == ("b", "wait_g1")
    names(bucketed)


@pytest.mark.parametrize(
    "buckets",
    [
        [Bucket("b", ("g1", "nobody"))],
        [Bucket("b", ("g1",))],
        [Bucket("b", ("g1", "g2")), Bucket("c", ("g1", "g2"))],
    ],
)
def test_buckets_that_do_not_fit_are_refused(buckets: list[Bucket]) -> None:
    with pytest.raises(ValueError, match="needs at least two free collectives of one bucket key"):
        bucket_program(two_layers(), buckets)


def cast_gradients() -> Program:
    """Two matmuls of 10 us, each cast (1 us, 50 -> 100 bytes), viewed and scattered."""
    buffers = list[Buffer]()
    tasks = []
    for i in (1, 2):
        buffers += [Buffer(f"grad{i}", 50), Buffer(f"cast{i}", 100)]
        buffers.append(Buffer(f"shard{i}", 50, is_output=True))
        tasks += [
            compute(f"mm{i}", 10, writes=(f"grad{i}",)),
            compute(f"cast{i}", 1, f"mm{i}", reads=(f"grad{i}",), writes=(f"cast{i}",)),
            compute(f"view{i}", 0, f"cast{i}", reads=(f"cast{i}",)),
            start(f"r{i}", 2, f"view{i}", reads=(f"cast{i}",), writes=(f"shard{i}",)),
            wait(f"r{i}", reads=(f"cast{i}", f"shard{i}")),
        ]
    scatters = [
        free(f"r{i}", "reduce_scatter", 100, absorbed=f"cast{i}", pack_saves_bytes=50)
        for i in (1, 2)
    ]
    return program(schedule(*tasks, buffers=tuple(buffers)), scatters)


def test_a_cast_becomes_part_of_the_packing_kernel() -> None:
    bucketed = bucket_program(cast_gradients(), [Bucket("b", ("r1", "r2"))])
    bucketed.schedule.validate()
    # Two matmuls; packing reads 2 x 50 and writes 200: a copy of 150 bytes, 0.15; the scatter of
    # 200 bytes takes 3. The casts take no time of their own.
    assert simulate(bucketed.schedule).step_us == pytest.approx(23.15)
    # Packing: both gradients and the packed 200; scattering: 200 and two shards in one of 100.
    assert simulate(bucketed.schedule).peak_bytes == 300
    assert "cast1" not in bucketed.schedule.buffers


# Coalesced.

COALESCED = Bucket("b", ("g1", "g2"), "coalesced")


def test_a_coalesced_bucket_neither_packs_nor_copies() -> None:
    bucketed = bucket_program(two_layers(), [COALESCED])
    assert names(bucketed) == ["b", "b.wait", "wait_g1", "c1", "wait_g2", "c2"]
    # One launch of two gathers of 100 bytes, 1 + 0.5 + 2, and 2 x 10.
    assert simulate(bucketed.schedule).step_us == pytest.approx(23.5)
    # Both outputs; no packed inputs, no copies.
    assert simulate(bucketed.schedule).peak_bytes == 200
    tasks = bucketed.schedule.by_name
    assert tasks["b"].writes == ("w1", "w2") and tasks["c2"].reads == ("w2",)
    assert tasks["wait_g2"].kind == "compute" and tasks["wait_g2"].deps == ("b.wait",)
    (merged,) = bucketed.collectives
    assert (merged.name, merged.wait, merged.output_bytes) == ("b", "b.wait", 200)
    assert bucketed.movable == {"b", "b.wait", "wait_g1", "wait_g2"}


def test_a_coalesced_bucket_leaves_casts_where_they_are() -> None:
    bucketed = bucket_program(cast_gradients(), [Bucket("b", ("r1", "r2"), "coalesced")])
    bucketed.schedule.validate()
    # Two matmuls and two casts, 22, and one launch of two scatters, 3.5.
    assert simulate(bucketed.schedule).step_us == pytest.approx(25.5)
    # Two casts of 100 bytes and two shards of 50 while the scatters are in flight.
    assert simulate(bucketed.schedule).peak_bytes == 300


def test_what_a_coalesced_bucket_reduced_must_be_packed_for_the_next() -> None:
    scatters, reduces = ("s1", "s2"), ("a1", "a2")
    buckets = [Bucket("s", scatters, "coalesced"), Bucket("a", reduces)]
    assert "a.pack" in names(bucket_program(hybrid(cast=False), buckets))
    both = [Bucket("s", scatters, "coalesced"), Bucket("a", reduces, "coalesced")]
    merged = names(bucket_program(hybrid(cast=False), both))
    assert merged[:4] == ["s", "s.wait", "wait_s1", "wait_s2"] and "a.pack" not in merged
    after_packed = [Bucket("s", scatters), Bucket("a", reduces, "coalesced")]
    assert "a.pack" not in names(bucket_program(hybrid(cast=False), after_packed))


def test_the_form_that_takes_less_of_link_and_copies_is_chosen() -> None:
    """Packing takes 0.1 and two copies out 0.2, a second collective in a launch 0.5."""
    given, packed = two_layers(), [Bucket("b", ("g1", "g2"))]
    assert with_forms(given, packed, "packed") == (packed[0],)
    assert with_forms(given, packed, "cheaper") == (packed[0],)
    assert with_forms(given, packed, "fewer copies") == (COALESCED,)
    larger = [replace(c, input_bytes=1000, output_bytes=1000) for c in given.collectives]
    dearer = replace(given, collectives=tuple(larger))  # copies of 2 and 2 x 1
    assert with_forms(dearer, packed, "cheaper") == (COALESCED,)


def test_a_packed_bucket_that_saves_casts_stays_packed() -> None:
    """Packing takes 0.15, the casts that it absorbs 2."""
    packed = Bucket("b", ("r1", "r2"))
    assert with_forms(cast_gradients(), [packed], "fewer copies") == (packed,)


def test_an_all_reduce_behind_a_packed_bucket_costs_no_copies() -> None:
    """Unless the bucket before it is coalesced: then it is, too, or it would have to be packed."""
    buckets = [Bucket("s", ("s1", "s2")), Bucket("a", ("a1", "a2"))]
    forms = [b.form for b in with_forms(hybrid(cast=False), buckets, "fewer copies")]
    assert forms == ["coalesced", "coalesced"]
    alone = with_forms(hybrid(cast=False), buckets[1:], "fewer copies")
    assert alone[0].form == "coalesced"
    fed = copies_us(hybrid(cast=False), buckets[1], fed_by_bucket=True)
    assert fed == 0.0
