"""When the collectives on one link begin and end, while an order is being written.

What the list scheduler knows of a link: as many collectives are in flight as one queue runs at
once, the next begins when one of them ends, and those that have bytes on the link at the same time
slow each other down. `simulate` is exact; this is exact for two of one queue, takes the queues of a
link for one, and a time that does not grow with what has been started.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Flight:
    """A collective that has been started; its bytes are on the link from ``on_wire_us`` on.

    ``end_us``: moves when others join it later.
    """

    on_wire_us: float
    end_us: float


class LinkClock:
    """A link that carries ``width`` collectives at once."""

    def __init__(self, width: int) -> None:
        self._lanes = [Flight(0.0, 0.0) for _ in range(width)]

    @property
    def free_us(self) -> float:
        """From when on the link could carry one more than it does."""
        return min(flight.end_us for flight in self._lanes)

    def start(self, now_us: float, duration_us: float, link_us: float) -> Flight:
        """Put a collective on the link at ``now_us``, or when it is free.

        Of ``duration_us``, the last ``link_us`` are bytes on the link, if it has the link alone.
        """
        lane = min(range(len(self._lanes)), key=lambda index: self._lanes[index].end_us)
        alone_us = max(now_us, self._lanes[lane].end_us) + duration_us
        started = Flight(alone_us - link_us, alone_us)
        for other in self._lanes:
            joined_us = max(other.on_wire_us, started.on_wire_us)
            both_us = max(0.0, min(other.end_us, started.end_us) - joined_us)
            started.end_us += both_us
            other.end_us += both_us
        self._lanes[lane] = started
        return started
