"""Load as it comes from many users who know nothing of each other: calls are sent when they are due, answered or not.

A closed loop waits for a stalled server and so sends it nothing; the users who would have come meanwhile are missing
from its figures ("coordinated omission", Tene 2013). Here every call has a time at which it is due, drawn before
the run, and its latency counts from that time.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Call = Callable[[int], Awaitable[str]]  # number of the call -> "ok" or what became of it

OK = "ok"
PERCENTILES = (50, 95, 99)


@dataclass
class Outcome:
    """What became of the calls of one run; the warm-up apart."""

    offered: float  # calls a second that were due
    seconds: float  # over which they were
    latencies: list[float] = field(default_factory=list)  # of answered calls, in seconds from when they were due
    counts: Counter[str] = field(default_factory=Counter)  # by what became of them
    finished: float = 0.0  # seconds from the first due time to the last answer
    late: float = 0.0  # 95th percentile of how much too late calls were sent: the generator's own fault

    @property
    def calls(self) -> int:
        """All of them."""
        return sum(self.counts.values())

    @property
    def answered(self) -> float:
        """Answered calls a second."""
        return self.counts[OK] / max(self.finished, self.seconds) if self.counts[OK] else 0.0

    def percentile(self, share: float) -> float:
        """Latency that `share` percent of all calls stay under; infinite where more than the rest were not answered."""
        if not self.calls:
            return math.inf
        ranked = sorted(self.latencies)
        rank = math.ceil(self.calls * share / 100) - 1
        return ranked[rank] if rank < len(ranked) else math.inf

    def of_answered(self, share: float) -> float:
        """The same among answered calls alone: what a server promises to those it lets in."""
        return float(np.percentile(self.latencies, share)) if self.latencies else math.inf

    def to_json(self) -> dict[str, Any]:
        """For a record; latencies in ms, None where infinite."""
        found: dict[str, Any] = {
            "offered": round(self.offered, 2), "answered": round(self.answered, 2), "calls": self.calls,
            "counts": dict(self.counts), "late_p95_ms": round(1e3 * self.late, 2),
        }  # fmt: skip
        for share in PERCENTILES:
            found[f"p{share}_ms"] = _ms(self.percentile(share))
            found[f"answered_p{share}_ms"] = _ms(self.of_answered(share))
        return found


def _ms(seconds: float) -> float | None:
    return None if math.isinf(seconds) else round(1e3 * seconds, 2)


def arrivals(rate: float, seconds: float, seed: int) -> list[float]:
    """Due times of a Poisson process of `rate` calls a second, in seconds from the start."""
    draw = random.Random(seed)
    due, times = draw.expovariate(rate), []
    while due < seconds:
        times.append(due)
        due += draw.expovariate(rate)
    return times


async def run(call: Call, due: Sequence[float], *, warm_up: float = 0.0) -> Outcome:
    """Send every call when it is due and wait for all answers.

    Args:
        call: does one call; what it raises counts as the name of its class.
        due: seconds from the start, ascending.
        warm_up: calls due before this are made and not counted.
    """
    outcome = Outcome(0.0, max((due[-1] if due else 0.0) - warm_up, 1e-9))
    lateness: list[float] = []
    begin = time.perf_counter()
    ended = begin + warm_up
    tasks: set[asyncio.Task[None]] = set()

    async def one(number: int, at: float) -> None:
        nonlocal ended
        if at >= warm_up:
            lateness.append(time.perf_counter() - begin - at)
        try:
            what = await call(number)
        except Exception as error:
            what = type(error).__name__
        now = time.perf_counter()
        if at >= warm_up:
            outcome.counts[what] += 1
            ended = max(ended, now)
            if what == OK:
                outcome.latencies.append(now - begin - at)

    for number, at in enumerate(due):
        wait = at - (time.perf_counter() - begin)
        if wait > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(one(number, at))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    outcome.offered = outcome.calls / outcome.seconds
    outcome.finished = ended - begin - warm_up
    outcome.late = float(np.percentile(lateness, 95)) if lateness else 0.0
    return outcome


async def closed(call: Call, in_flight: int, seconds: float) -> Outcome:
    """Keep `in_flight` calls under way: what a server does when it is never idle. Latencies count from sending."""
    outcome = Outcome(0.0, seconds)
    begin = time.perf_counter()
    numbers = iter(range(1 << 62))

    async def user() -> None:
        while time.perf_counter() - begin < seconds:
            sent = time.perf_counter()
            try:
                what = await call(next(numbers))
            except Exception as error:
                what = type(error).__name__
            outcome.counts[what] += 1
            if what == OK:
                outcome.latencies.append(time.perf_counter() - sent)
            else:
                await asyncio.sleep(0.01)  # a refusing server is not hammered

    await asyncio.gather(*(user() for _ in range(in_flight)))
    outcome.finished = time.perf_counter() - begin
    outcome.offered = outcome.calls / outcome.finished
    return outcome
