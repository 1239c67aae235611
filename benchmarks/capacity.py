"""How much a server can take: a search over the offered load, shared by several latency limits."""

from __future__ import annotations

import math
from dataclasses import dataclass

LIMITS_MS = (50.0, 200.0, 500.0)  # of the 95th percentile
CLOSE = 1.06  # loads that far apart count as the same
GROWTH = 1.6
MOST_POINTS = 14
KEEPS_UP = 0.95  # share of the load that is answered while it lasts


@dataclass(frozen=True, slots=True)
class Point:
    """One load and what came of it."""

    offered: float  # calls a second asked for
    answered: float  # calls a second answered
    p95_ms: float  # of all calls, infinite where a twentieth was not answered
    due: float = 0.0  # calls a second that chance made of it; 0: exactly as many as asked for

    def within(self, limit_ms: float) -> bool:
        """Whether the server kept up, and 95% of the callers had their answer within the limit."""
        return self.p95_ms <= limit_ms and self.answered >= KEEPS_UP * (self.due or self.offered)


class Search:
    """Decides which load to try next: it grows until the loosest limit breaks, then closes in on each limit.

    `next_load` gives a load or None when all is known; `add` takes what came of it.
    """

    def __init__(
        self, first: float, limits: tuple[float, ...] = LIMITS_MS, most: int = MOST_POINTS, answered: float = 0.0
    ) -> None:
        """No load tried yet.

        Args:
            first: load to begin with, calls a second.
            limits: of the 95th percentile, in ms.
            most: loads tried at most.
            answered: calls a second that the server is known to answer when it is never idle.
        """
        self.limits, self.points = limits, list[Point]()
        self._first, self._most, self._answered = first, most, answered

    def bounds(self, limit: float) -> tuple[float, float]:
        """The largest load known to be within the limit, and the smallest one above it that is not.

        One lucky run above an unlucky one counts for nothing: the first failure from below decides.
        """
        broken = min((p.offered for p in self.points if not p.within(limit)), default=math.inf)
        held = max((p.offered for p in self.points if p.within(limit) and p.offered < broken), default=0.0)
        return held, broken

    def next_load(self) -> float | None:
        """The load to try next."""
        if len(self.points) >= self._most:
            return None
        if not self.points:
            return self._first
        for limit in sorted(self.limits, reverse=True):
            held, broken = self.bounds(limit)
            if broken == math.inf:
                return held * GROWTH
            if held == 0.0:
                if broken > self._first / 64:
                    return broken / 4
            elif broken / held > CLOSE:
                return math.sqrt(held * broken)
        return None

    def add(self, point: Point) -> None:
        """Note what came of a load."""
        self.points.append(point)

    def throughput(self, limit: float) -> float:
        """Calls a second answered at the largest load within the limit; 0 where there is none."""
        held, _ = self.bounds(limit)
        return max((p.answered for p in self.points if p.offered == held and p.within(limit)), default=0.0)

    def saturation(self) -> float:
        """The most calls a second ever answered."""
        return max([self._answered, *(p.answered for p in self.points)])
