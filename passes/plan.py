"""The Plan: what a policy decided, as plain data.

A plan names collectives and tasks by the names of the graph it was made for. It prints, and
round-trips through JSON. Its digest covers what all ranks must agree on: the buckets with their
form and payload order, and the order in which collectives start. Local details (how many pad nodes
a rank has) stay out of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, cast, get_args

BucketForm = Literal["packed", "coalesced"]


@dataclass(frozen=True)
class Bucket:
    """Collectives merged into one; ``members`` are start names in payload order.

    ``form``: "packed" copies its inputs into one tensor, and gathers out of it; "coalesced" is one
    launch of all members, each with tensors of its own.
    """

    name: str
    members: tuple[str, ...]
    form: BucketForm = "packed"

    def __repr__(self) -> str:
        return f"Bucket({self.name}, {self.form}: {', '.join(self.members)})"


@dataclass(frozen=True)
class Plan:
    """Buckets and an order of tasks.

    Attributes:
        policy: the policy that made it, as the report names it.
        buckets: what is merged; collectives in no bucket stay single.
        order: task names of the bucketed program in execution order; empty: keep the input's.
        starts: names of the collectives in the order in which they start.
    """

    policy: str
    buckets: tuple[Bucket, ...] = ()
    order: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()

    def __str__(self) -> str:
        merged = sum(len(bucket.members) for bucket in self.buckets)
        return f"{self.policy}: {merged} collectives in {self.counted_buckets}"

    @property
    def counted_buckets(self) -> str:
        """How many buckets there are, in words: "3 buckets, 1 coalesced"."""
        plural = "" if len(self.buckets) == 1 else "s"
        coalesced = sum(bucket.form == "coalesced" for bucket in self.buckets)
        return f"{len(self.buckets)} bucket{plural}" + f", {coalesced} coalesced" * (coalesced > 0)

    @property
    def changes_nothing(self) -> bool:
        return not self.buckets and not self.order

    @property
    def digest(self) -> str:
        """SHA-256 of what must be equal on all ranks: buckets and issue order."""
        agreed: Sequence[Any] = (
            [[bucket.name, bucket.form, list(bucket.members)] for bucket in self.buckets],
            list(self.starts),
        )
        return hashlib.sha256(json.dumps(agreed).encode()).hexdigest()

    def to_json_dict(self) -> dict[str, Any]:
        return {**asdict(self), "digest": self.digest}

    def to_json(self) -> str:
        return json.dumps(self.to_json_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            ValueError: The text is no plan, or its digest does not match its content.
        """
        try:
            fields = json.loads(text)
            buckets = tuple(
                Bucket(_name(b["name"]), _names(b["members"]), _form(b["form"]))
                for b in _list(fields["buckets"])
            )
            order, starts = _names(fields["order"]), _names(fields["starts"])
            plan = cls(_name(fields["policy"]), buckets, order, starts)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(
                f"expected the JSON text of a plan (policy, buckets, order, starts), got "
                f"{str(text)[:80]!r}; write one with Plan.to_json()"
            ) from error
        if fields.get("digest", plan.digest) != plan.digest:
            raise ValueError(
                f"the plan's digest is {fields['digest']}, its content's is {plan.digest}; "
                f"delete the digest line after editing a plan"
            )
        return plan


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a name, got {value!r}")
    return value


def _form(value: object) -> BucketForm:
    for form in get_args(BucketForm):
        if value == form:
            return form
    raise TypeError(f"expected one of {get_args(BucketForm)}, got {value!r}")


def _names(value: object) -> tuple[str, ...]:
    return tuple(_name(item) for item in _list(value))


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r}")
    return cast("list[Any]", value)
