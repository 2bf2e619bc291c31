"""What live measurement makes of its times, without a process group."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inductor_overlap.cost_model import measure_collectives
from inductor_overlap.cost_model.measure_collectives import Case, in_round, stream, trimmed_mean
from inductor_overlap.cost_model.measure_compute import Kernel
from inductor_overlap.cost_model.measure_contention import Contention, Loss, contention_of
from inductor_overlap.cost_model.measurements import MemoryMeasurement

pytestmark = pytest.mark.quick


def test_small_and_large_collectives_tell_launch_from_contention() -> None:
    # A quarter of the time in flight is lost, 10 ms more of it cost 2.5 ms more: 1 / (1 - 1/4).
    # Of the 600 us beside 1 ms, 250 are that quarter; the launch is the rest.
    found = contention_of([Loss(1000, 600)], [Loss(11000, 3100)])
    assert found.factor == pytest.approx(4 / 3)
    assert found.launch_us == pytest.approx(350)


def test_kinds_are_averaged() -> None:
    # Means: small 1 ms, 0.3 ms lost; large 5 ms, 2.3 ms lost: half of what is in flight.
    small = [Loss(500, 200), Loss(1500, 400)]
    found = contention_of(small, [Loss(4000, 1600), Loss(6000, 3000)])
    assert found.factor == pytest.approx(2)
    assert found.launch_us == pytest.approx(0)


@pytest.mark.parametrize(
    ("small", "large", "expected"),
    [
        # Compute beside it stands still, and more: the bound, which covers the launch too.
        (Loss(100, 120), Loss(1000, 1200), Contention(25.0, 20.0)),
        # Nothing is lost, or noise says that something is won.
        (Loss(100, 0), Loss(1000, 0), Contention(0.0, 1.0)),
        (Loss(100, 30), Loss(1000, -50), Contention(30.0, 1.0)),
    ],
)
def test_what_is_measured_is_kept_in_bounds(small: Loss, large: Loss, expected: Contention) -> None:
    found = contention_of([small], [large])
    assert found.factor == pytest.approx(expected.factor)
    assert found.launch_us == pytest.approx(expected.launch_us)


def test_a_sample_lasts_its_time_and_counts_for_each_in_flight() -> None:
    # 5 ms of 700 us each are 7.1, in pairs 8 (7.1 / 2 rounds to 4); as many come before.
    case = Case("all_gather", 1024, in_flight=2, first_us=700.0)
    assert (case.runs, case.lead) == (8, 8)
    # 200 at most, however short.
    case = Case("all_gather", 1024, in_flight=1, first_us=10.0)
    assert (case.runs, case.lead) == (200, 200)
    # Of long ones as many as are in flight, before and in the sample.
    case = Case("all_gather", 2**26, in_flight=2, first_us=1e6)
    assert (case.runs, case.lead) == (2, 2)
    assert case.takes_s == pytest.approx(4.0)


def test_the_budget_goes_to_short_samples_first() -> None:
    # Alone and with a lead of one they take 0.2, 0.8 and 2 s (two of 0.1, 0.4 and 1 s each).
    short, longer, longest = (Case("all_gather", 2**26, 1, us) for us in (1e5, 4e5, 1e6))
    cases = [longest, longer, short]
    # In 5 rounds each is sampled 3 times: 0.6 s, 2.4 s and 6 s.
    assert in_round(cases, 5, 9.1) == [short, longer, longest]
    # 2.1 s are left: one sample of the longest. 1.9 s: none.
    assert in_round(cases, 5, 5.1) == [short, longer, longest]
    assert in_round(cases, 5, 4.9) == [short, longer]
    # The longer one once, then 0.7 s are left.
    assert in_round(cases, 5, 2.1) == [short, longer]
    assert in_round(cases, 5, 1.3) == [short]
    assert in_round(cases, 5, 0.1) == []


def test_what_takes_longer_than_a_sample_is_sampled_every_other_round() -> None:
    short, long = Case("all_gather", 1024, 1, 1e3), Case("all_gather", 2**26, 1, 1e4)
    rounds = [in_round([short, long], rounds_left, 10.0) for rounds_left in (5, 4, 3, 2, 1)]
    assert rounds == [[short, long], [short], [short, long], [short], [short, long]]


def test_a_case_has_the_mean_of_its_samples_and_its_first_only_for_want_of_others() -> None:
    case = Case("all_gather", 1024, in_flight=1, first_us=9.0)
    assert (case.time_us, case.noise) == (9.0, 0.0)
    # A burst is no more to be believed than a disturbance: the least and the largest do not count.
    case.samples_us += [1.0, 4.0, 5.0, 4.5, 30.0]
    assert case.time_us == pytest.approx(4.5)
    # Winsorised 4, 4, 4.5, 5, 5: a variance of 1/4, of 5 samples of which 3 count.
    assert case.noise == pytest.approx(0.5 * 5**0.5 / 3 / 4.5)


def test_samples_at_two_levels_are_averaged() -> None:
    # Ten at 1 and six at 3 ms: a median says 1; two of each level go, and 8 of 1 and 4 of 3 stay.
    mean_us, error_us = trimmed_mean([1.0, 3.0] * 6 + [1.0] * 4)
    assert mean_us == pytest.approx(5 / 3)
    # Winsorised they are what they were, with a variance of (10 x 6 / 16) x 2^2 / 15 = 1.
    assert error_us == pytest.approx(16**0.5 / 12)


def test_few_samples_all_count() -> None:
    assert trimmed_mean([7.0]) == (7.0, 0.0)
    assert trimmed_mean([2.0, 4.0]) == (3.0, pytest.approx(1.0))


def test_gathers_in_flight_do_not_end_by_a_long_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Gloo's threads write the name of what ended last without a lock; see `_start_of_one`.
    called: list[str] = []

    class Ops:
        def __getattr__(self, name: str) -> object:
            return lambda *args, out=None: called.append(name) or out

    monkeypatch.setattr(measure_collectives, "_FUNCTIONAL", Ops())
    monkeypatch.setattr(measure_collectives, "dist", FakeRanks)
    result = measure_collectives.start_collective("all_gather", 8, torch.device("cpu"))()
    assert called == ["all_gather_into_tensor_out"]
    assert result.shape == (8,)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_stream_keeps_as_many_in_flight(monkeypatch: pytest.MonkeyPatch, in_flight: int) -> None:
    started: list[int] = []
    waited: list[int] = []
    most = 0

    def start() -> torch.Tensor:
        nonlocal most
        started.append(len(started))
        most = max(most, len(started) - len(waited))
        return torch.tensor(started[-1])

    def wait(result: torch.Tensor) -> None:
        waited.append(int(result))

    waiting: Callable[[torch.Tensor], None] = wait
    monkeypatch.setattr(measure_collectives, "wait_tensor", waiting)
    stream(start, 7, in_flight)
    assert waited == started == list(range(7))
    assert most == in_flight


def test_collectives_in_flight_write_to_tensors_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InPlace:
        """Of the ops only what an all-reduce does: it returns the tensor that it writes."""

        @staticmethod
        def all_reduce_(tensor: torch.Tensor, reduction: str, group: str) -> torch.Tensor:
            return tensor

    monkeypatch.setattr(measure_collectives, "_FUNCTIONAL", InPlace)
    monkeypatch.setattr(measure_collectives, "dist", FakeRanks)
    start = measure_collectives.start_collective("all_reduce", 8, torch.device("cpu"), 2)
    first, second, third = (start() for _ in range(3))
    assert first.data_ptr() != second.data_ptr()
    # A third begins when the first has ended.
    assert third is first


class FakeRanks:
    """Two ranks, as far as a collective's arguments ask."""

    class group:
        class WORLD:
            group_name = "0"

    @staticmethod
    def get_world_size() -> int:
        return 2


def test_a_kernel_that_is_longer_than_its_share_is_sampled_in_some_phases() -> None:
    def kernel(warm_us: float) -> Kernel:
        return Kernel(lambda: None, lambda time_us: MemoryMeasurement(8, time_us), warm_us)

    # A sample is 2 ms of runs: 200 of 10 us, 1 of 1.5 ms.
    assert (kernel(10.0).runs, kernel(1500.0).runs) == (200, 1)
    # 30 ms in each phase: 15 samples of 2 ms; of 40 ms one in two phases; of 420 one in 14.
    assert [kernel(10.0).samples_in(phase, 30e3) for phase in range(3)] == [15, 15, 15]
    assert [kernel(40e3).samples_in(phase, 30e3) for phase in range(4)] == [1, 0, 1, 0]
    assert sum(kernel(420e3).samples_in(phase, 30e3) for phase in range(13)) == 1
