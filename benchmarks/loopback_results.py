"""What the loopback benchmark measures, and the figures that follow from it.

Ranks write `RankResult`s as JSON; `merge` makes one `Measured` per rate of them: a step is as long
as that of its slowest rank, memory is that of the rank that needs most.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RankSpec:
    """What one rank is told to do.

    Attributes:
        address, port: where rank 0 keeps the store in which ranks meet.
        rate_mbit: the limit of the network, for the record; 0 is none.
        compiles: how often every contender is built and compiled; the first fills the C++ cache.
        rounds, steps: rounds of all contenders in turn; timed steps of each in a round.
        batch, seq: sequences of a rank and step, and tokens of a sequence.
        dim, layers: of the Llama 3.
        memory_limit_gb: of the contender that is given one.
        allocator: library of the counting allocator.
        folder: where the result and the profile are written.
    """

    rank: int
    num_ranks: int
    address: str
    port: int
    rate_mbit: int
    compiles: int
    rounds: int
    steps: int
    contenders: tuple[str, ...]
    batch: int
    seq: int
    dim: int
    layers: int
    memory_limit_gb: float
    allocator: str
    folder: str


@dataclass
class Prediction:
    """What the plugin's reports say of one step, in us, forward and backward together.

    Attributes:
        step_us: simulated, as the plugin left the graphs.
        unchanged_us: simulated, as the plugin found them: the step of "compiled, no passes".
        bound_us: the lower bounds of both graphs.
        ends_us: stalls that no order avoids: in the first wait of each graph, before which there is
            nothing to compute, and in the last wait of backward.
        policies: the policy chosen for each graph.
    """

    step_us: float
    unchanged_us: float
    bound_us: float
    ends_us: float
    policies: list[str]


@dataclass
class Trained:
    """One contender on one rank.

    Attributes:
        error: why it did not run; empty if it did.
        first_steps_s: its first step, which compiles, of every time it was built.
        steps_s: forward, backward and optimizer of every timed step.
        losses: of every step, the first included.
        peak_bytes: parameters, gradients and optimizer state that it keeps, plus the most that any
            of its steps held beyond them.
        sent_bytes: what the network card of the rank sent in a step, headers included.
        prediction: from the plugin's reports; None for others.
    """

    error: str = ""
    first_steps_s: list[float] = field(default_factory=list[float])
    steps_s: list[tuple[float, float, float]] = field(
        default_factory=list[tuple[float, float, float]]
    )
    losses: list[float] = field(default_factory=list[float])
    peak_bytes: int = 0
    sent_bytes: int = 0
    prediction: Prediction | None = None


@dataclass
class RankResult:
    """What one rank saw.

    Attributes:
        trained: by name of the contender.
        compute_s: forward plus backward of the compiled model without any communication.
        communication_s: the collectives of a step in block buckets, back to back.
        communication_cpu_s: the CPU time that they took, of all threads.
    """

    trained: dict[str, Trained]
    compute_s: list[float] = field(default_factory=list[float])
    communication_s: list[float] = field(default_factory=list[float])
    communication_cpu_s: list[float] = field(default_factory=list[float])

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def read(cls, path: Path) -> RankResult:
        content = json.loads(path.read_text())
        trained = {name: _trained(fields) for name, fields in content.pop("trained").items()}
        return cls(trained, **content)


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One contender at one rate, over all ranks; times in s.

    ``first_step_s`` is the median of its first steps that found their C++ code in the cache; None
    if it was built once only.
    """

    error: str
    step: Spread | None = None
    optimizer_s: float = 0.0
    first_step_s: float | None = None
    peak_bytes: int = 0
    sent_bytes: int = 0
    losses: tuple[float, ...] = ()
    prediction: Prediction | None = None

    @property
    def predicted_s(self) -> float | None:
        """The simulated step of both graphs plus the measured optimizer."""
        if self.prediction is None:
            return None
        return self.prediction.step_us / 1e6 + self.optimizer_s


@dataclass(frozen=True)
class Measured:
    """One rate: the rows, and what alone took how long (s).

    Attributes:
        error: why nothing could be measured at this rate; empty if something was.
    """

    rate_mbit: int
    rows: Mapping[str, Row] = field(default_factory=dict[str, Row])
    compute_s: float = 0.0
    communication_s: float = 0.0
    communication_cpu_s: float = 0.0
    error: str = ""

    @property
    def optimizer_s(self) -> float:
        """The median over contenders: all step the same shards."""
        times = [row.optimizer_s for row in self.rows.values() if not row.error]
        return statistics.median(times) if times else 0.0

    @property
    def floor_s(self) -> float:
        """Compute or communication alone, whichever is longer, and then the optimizer."""
        return max(self.compute_s, self.communication_s) + self.optimizer_s

    @property
    def cpu_s(self) -> float:
        """What a rank's one core has to do: compute, its part of communication, the optimizer."""
        return self.compute_s + self.communication_cpu_s + self.optimizer_s

    @property
    def ends_s(self) -> float:
        """The unavoidable stalls at the ends of the graphs: the least of any of our plans."""
        ends = [row.prediction.ends_us for row in self.rows.values() if row.prediction]
        return min(ends, default=0.0) / 1e6

    def best(self, names: Iterable[str]) -> tuple[str, float] | None:
        """The fastest of `names` and its median step; None if none of them ran."""
        steps = {
            name: row.step.median for name in names if (row := self.rows.get(name)) and row.step
        }
        if not steps:
            return None
        fastest = min(steps, key=lambda name: steps[name])
        return fastest, steps[fastest]

    def step_s(self, name: str) -> float | None:
        found = self.best([name])
        return None if found is None else found[1]


def merge(rate_mbit: int, ranks: Sequence[RankResult]) -> Measured:
    """The figures of a rate from what its ranks saw."""
    names = ranks[0].trained
    return Measured(
        rate_mbit,
        {name: _row([rank.trained[name] for rank in ranks]) for name in names},
        _slowest_median([rank.compute_s for rank in ranks]),
        _slowest_median([rank.communication_s for rank in ranks]),
        _slowest_median([rank.communication_cpu_s for rank in ranks]),
    )


def spread(values: Sequence[float]) -> Spread:
    """Median and quartiles (the inclusive method); one value is all three."""
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(middle, low, high)


def loss_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference of two loss curves."""
    pairs = zip(losses, reference, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def _trained(fields: dict[str, Any]) -> Trained:
    prediction = fields.pop("prediction")
    steps_s = [tuple(parts) for parts in fields.pop("steps_s")]
    return Trained(**fields, steps_s=steps_s, prediction=prediction and Prediction(**prediction))


def _row(ranks: Sequence[Trained]) -> Row:
    error = next((rank.error for rank in ranks if rank.error), "")
    if error or not ranks[0].steps_s:
        return Row(error or "it was not measured")
    mean_losses = [statistics.fmean(each) for each in zip(*(r.losses for r in ranks), strict=True)]
    warm_s = [max(each) for each in zip(*(r.first_steps_s[1:] for r in ranks), strict=True)]
    return Row(
        error="",
        step=spread(_slowest(ranks, sum)),
        optimizer_s=statistics.median(_slowest(ranks, lambda parts: parts[2])),
        first_step_s=statistics.median(warm_s) if warm_s else None,
        peak_bytes=max(rank.peak_bytes for rank in ranks),
        sent_bytes=max(rank.sent_bytes for rank in ranks),
        losses=tuple(mean_losses),
        prediction=ranks[0].prediction,
    )


def _slowest(
    ranks: Sequence[Trained], part: Callable[[tuple[float, float, float]], float]
) -> list[float]:
    """`part` of every step, of the rank that took longest in it."""
    steps = zip(*(rank.steps_s for rank in ranks), strict=True)
    return [max(map(part, step)) for step in steps]


def _slowest_median(ranks: Sequence[Sequence[float]]) -> float:
    slowest = [max(each) for each in zip(*ranks, strict=True)]
    return statistics.median(slowest) if slowest else 0.0
