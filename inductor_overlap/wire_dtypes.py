"""In which dtype each parameter travels, read off the collectives of a graph.

A parameter's gather carries the dtype it was cast to before, its reduction the dtype the gradient
was cast to; both stand in the graph, whatever front end made it. Collectives that serve no known
parameter (those of tensor parallel activations, say) are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from inductor_overlap.passes.collectives import Collective

WireDtypes = Mapping[str, Mapping[str, str]]
"""Kind of collective -> parameter -> dtype, as in ``{"all_gather": {"norm.weight": "bfloat16"}}``.
"""


def wire_dtypes(collectives: Iterable[Collective]) -> WireDtypes:
    """The dtype of every named parameter's collectives, in graph order."""
    found: dict[str, dict[str, str]] = {}
    for collective in collectives:
        if collective.fqn is not None:
            dtype = str(collective.dtype).removeprefix("torch.")
            found.setdefault(collective.kind, {})[collective.fqn] = dtype
    return found


def summarize_wire(dtypes: WireDtypes) -> Iterator[str]:
    """For each kind, how many parameters travel in which dtype: ``all-gather: 3 in bfloat16``."""
    for kind, parameters in dtypes.items():
        counts = Counter(parameters.values())
        listed = ", ".join(f"{count} in {dtype}" for dtype, count in counts.items())
        yield f"{kind.replace('_', '-')}: {listed}"
