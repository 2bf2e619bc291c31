"""Manual wrap: the user names modules, each becomes one bucket per kind of collective.

An entry is a module (or parameter) FQN pattern: ``*`` stands for any text within one level (none,
too: ``layers.1*`` is ``layers.1`` and ``layers.10``),
``[0-31]`` for a range of numbers. A pattern makes one bucket for each module it matches; a list of
patterns makes one bucket of everything they match. A parameter belongs to the bucket of the module
that holds it, at any depth. Collectives that no entry matches stay single.

Refused with `WrapError`: an entry that matches nothing (the message lists the nearest names), and
a parameter matched by two entries. A list is for a model, of which a graph may be a part: `absent`
asks the whole model.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from inductor_overlap.passes.plan import Bucket
from inductor_overlap.passes.program import FreeCollective, Program

WrapEntry = str | Sequence[str]


class WrapError(ValueError):
    """A wrap list that does not fit the model."""


@dataclass(frozen=True)
class ManualWrap:
    """The policy ``wrap=[...]``.

    Attributes:
        entries: patterns, or lists of patterns that share a bucket.
    """

    entries: tuple[str | tuple[str, ...], ...]

    @classmethod
    def parse(cls, entries: Iterable[WrapEntry]) -> ManualWrap:
        """Check the shape of a wrap list.

        Raises:
            WrapError: An entry is neither a non-empty string nor a non-empty list of them, or a
                pattern cannot be read.
        """
        parsed = tuple(_parse_entry(entry) for entry in entries)
        if not parsed:
            raise WrapError(
                'wrap is an empty list; name modules, or pass wrap="none" for no buckets'
            )
        for entry in parsed:
            for pattern in _patterns(entry):
                _compile(pattern)
        return cls(parsed)

    def absent(self, here: Collection[str], model: Collection[str]) -> tuple[str, ...]:
        """Patterns that name parameters of the model, but none of a graph that is a part of it.

        Args:
            here: FQNs of the parameters that the graph uses.
            model: those of all parameters of the model, as far as they are known.

        Raises:
            WrapError: A pattern names neither.
        """
        known = {*here, *model}
        patterns = [pattern for entry in self.entries for pattern in _patterns(entry)]
        for pattern in patterns:
            if not _matches(pattern, known):
                raise WrapError(
                    f"the wrap entry {pattern!r} matches no parameter of the compiled model; "
                    f"{_nearest(pattern, known)}. {_PER_GRAPH}"
                )
        return tuple(pattern for pattern in patterns if not _matches(pattern, here))

    def buckets(self, program: Program, *, require_match: bool = True) -> list[Bucket]:
        """The buckets of this wrap list for ``program``.

        Args:
            program: the program whose collectives are named.
            require_match: refuse entries without a match; False for graphs that need not have
                all: backward ones, without frozen parameters, and parts of a model.

        Raises:
            WrapError: An entry matches nothing, or two entries match one parameter.
        """
        named = [(name_of(c), c) for c in program.collectives if name_of(c) is not None]
        owners: dict[str, int] = {}
        keys: dict[str, str] = {}
        for index, entry in enumerate(self.entries):
            matches = _matches(entry, (name for name, _ in named if name is not None))
            if require_match:
                _require_matches(entry, [name for name, _ in named if name])
            for name, module in matches.items():
                if owners.setdefault(name, index) != index:
                    raise WrapError(_overlap(name, self.entries[owners[name]], entry))
                keys[name] = f"{index}:{module}"
        return make_buckets((keys[name], c) for name, c in named if name in keys)


def name_of(collective: FreeCollective) -> str | None:
    """What patterns are matched against: the parameter FQN, else its module's path."""
    return collective.fqn if collective.fqn is not None else collective.module


def make_buckets(keyed: Iterable[tuple[str, FreeCollective]]) -> list[Bucket]:
    """One bucket for each pair of key and bucket key with at least two members.

    Payload order is parameter order. Collectives that are buckets already, or whose sizes are
    symbolic, do not join.
    """
    groups: dict[tuple[str, ...], list[FreeCollective]] = {}
    for key, collective in keyed:
        if collective.can_merge:
            groups.setdefault((key, *collective.bucket_key), []).append(collective)
    buckets: list[Bucket] = []
    for members in groups.values():
        if len(members) > 1:
            members.sort(key=lambda member: member.input_position)
            name = f"{members[0].kind}_bucket_{len(buckets)}"
            buckets.append(Bucket(name, tuple(member.name for member in members)))
    return buckets


def _parse_entry(entry: object) -> str | tuple[str, ...]:
    if isinstance(entry, str) and entry:
        return entry
    if isinstance(entry, (list, tuple)):
        patterns = cast("Sequence[object]", entry)
        strings = tuple(pattern for pattern in patterns if isinstance(pattern, str) and pattern)
        if strings and len(strings) == len(patterns):
            return strings
    raise WrapError(
        f"a wrap entry is a module FQN pattern or a list of them that share a bucket, such as "
        f'"layers.*" or ["norm", "output"]; got {entry!r}'
    )


def _patterns(entry: str | tuple[str, ...]) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry


_MAX_RANGE = 10_000
_TOKEN = re.compile(r"\*|\[(\d+)-(\d+)\]|[^*\[\]]+")


def _compile(pattern: str) -> re.Pattern[str]:
    """A regex whose group 1 is the matched module; it also accepts anything below the module."""
    tokens = list(_TOKEN.finditer(pattern))
    is_read = "".join(token.group() for token in tokens) == pattern
    if not is_read or ".." in f".{pattern}." or "**" in pattern:
        raise WrapError(
            f"cannot read the wrap pattern {pattern!r}; a pattern is dotted names in which * "
            f'stands for any text within a level and [0-31] for a range, such as "layers.[0-15]"; '
            f"it holds for everything below what it names"
        )
    return re.compile(f"(?=.)({''.join(_regex(token) for token in tokens)})(?:\\..*)?")


def _regex(token: re.Match[str]) -> str:
    if token.group() == "*":
        return r"[^.]*"
    if token.group(1) is not None:
        first, last = int(token.group(1)), int(token.group(2))
        if first > last:
            raise WrapError(f"the range {token.group()} is empty; write the smaller number first")
        if last - first >= _MAX_RANGE:
            raise WrapError(
                f"the range {token.group()} has more than {_MAX_RANGE} numbers; write * for any"
            )
        return f"(?:{'|'.join(str(number) for number in range(first, last + 1))})"
    return re.escape(token.group())


def _matches(entry: str | tuple[str, ...], names: Iterable[str]) -> dict[str, str]:
    """Matched name -> what tells its bucket from others of the entry."""
    patterns = [_compile(pattern) for pattern in _patterns(entry)]
    found: dict[str, str] = {}
    for name in names:
        for pattern in patterns:
            match = pattern.fullmatch(name)
            if match is not None:
                found[name] = match.group(1) if isinstance(entry, str) else ""
                break
    return found


def _require_matches(entry: str | tuple[str, ...], names: Sequence[str]) -> None:
    for pattern in _patterns(entry):
        if not _matches(pattern, names):
            raise WrapError(_no_match(pattern, names))


def _no_match(pattern: str, names: Sequence[str]) -> str:
    if not names:
        return (
            f"the wrap entry {pattern!r} matches nothing: no collective of this graph says which "
            f"parameter it serves; compile with torch.compile, which keeps the names, or pass "
            f'wrap="auto"'
        )
    return (
        f"the wrap entry {pattern!r} matches no sharded parameter of this graph; "
        f"{_nearest(pattern, names)}"
    )


def _nearest(pattern: str, names: Collection[str]) -> str:
    modules = {name.rpartition(".")[0] for name in names} | set(names)
    modules |= {".".join(name.split(".")[:depth]) for name in names for depth in (1, 2)}
    known = sorted(modules - {""})
    near = difflib.get_close_matches(pattern, known, n=5, cutoff=0.3)
    return (
        f"the nearest of its {len(known)} names are {near or known[:5]}; names are relative to the "
        f"compiled module"
    )


_PER_GRAPH = (
    "A wrap list is matched against each graph that is compiled, and a graph break cuts a model: "
    "modules around it may be compiled on their own, with names relative to themselves. "
    'torch.compile(fullgraph=True) says where the model breaks; wrap="auto" needs no names and '
    "plans each graph"
)


def absent_note(patterns: Sequence[str]) -> str:
    """What to tell the user of patterns that `ManualWrap.absent` found."""
    listed = ", ".join(map(repr, patterns))
    return (
        f"of the wrap list, {listed} name nothing that this graph uses: a graph break may have "
        f"cut the model, and no bucket reaches over it. {_PER_GRAPH}"
    )


def _overlap(name: str, first: object, second: object) -> str:
    return (
        f"parameter {name!r} is matched by two wrap entries, {first!r} and {second!r}; each "
        f"parameter belongs to one bucket, so narrow one of them"
    )
