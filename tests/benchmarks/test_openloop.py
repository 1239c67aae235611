"""The load generator: what it sends when, and that a stalled server cannot hide from it."""

from __future__ import annotations

import asyncio
import math
import time

import numpy as np
import pytest

from benchmarks.openloop import Outcome, arrivals, closed, run


def test_arrivals_are_a_poisson_process() -> None:
    due = arrivals(200.0, 50.0, seed=3)
    gaps = np.diff(due)
    assert due == sorted(due)
    assert due[-1] < 50.0
    assert len(due) == pytest.approx(10_000, rel=0.04)  # four standard deviations of the count
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.06)  # of an exponential distribution
    assert due == arrivals(200.0, 50.0, seed=3)
    assert due != arrivals(200.0, 50.0, seed=4)


def test_latency_counts_from_the_due_time_though_the_server_stalls() -> None:
    """A server that stands still for 0.4 s: a closed loop would see one slow call, its users are forty."""
    stalled_from, stalled_to = 0.1, 0.5
    begin = 0.0

    async def call(number: int) -> str:
        now = time.perf_counter() - begin
        if stalled_from <= now < stalled_to:
            await asyncio.sleep(stalled_to - now)
        return "ok"

    async def main() -> Outcome:
        nonlocal begin
        begin = time.perf_counter()
        return await run(call, [n / 100 for n in range(60)])

    found = asyncio.run(main())
    assert found.counts == {"ok": 60}
    assert sum(latency > 0.1 for latency in found.latencies) >= 25  # all that were due in the first 0.3 s of the stall
    assert max(found.latencies) == pytest.approx(0.4, abs=0.1)
    assert found.percentile(95) > 0.3


def test_a_generator_that_is_held_up_charges_the_delay_to_the_latency() -> None:
    """The event loop itself is blocked: calls are sent late, and late they are."""

    async def call(number: int) -> str:
        if number == 0:
            time.sleep(0.3)  # blocks everything, as a collection of garbage would
        return "ok"

    found = asyncio.run(run(call, [0.0, 0.01, 0.02, 0.4]))
    late = sorted(found.latencies)
    assert late[-3] > 0.25  # the three that were due before the loop was free again
    assert late[0] < 0.2
    assert found.late > 0.2


def test_warm_up_is_sent_but_not_counted() -> None:
    sent: list[int] = []

    async def call(number: int) -> str:
        sent.append(number)
        return "ok"

    found = asyncio.run(run(call, [0.0, 0.01, 0.06, 0.07], warm_up=0.05))
    assert sent == [0, 1, 2, 3]
    assert found.calls == 2
    assert found.offered == pytest.approx(2 / 0.02)


def test_calls_that_are_refused_or_fail_are_worse_than_any_latency() -> None:
    async def call(number: int) -> str:
        if number % 10 == 0:
            return "RESOURCE_EXHAUSTED"
        if number % 10 == 1:
            raise TimeoutError
        return "ok"

    found = asyncio.run(run(call, [n / 10_000 for n in range(100)]))
    assert found.counts == {"ok": 80, "RESOURCE_EXHAUSTED": 10, "TimeoutError": 10}
    assert math.isinf(found.percentile(95))
    assert not math.isinf(found.percentile(50))
    assert not math.isinf(found.of_answered(99))
    record = found.to_json()
    assert record["p95_ms"] is None
    assert record["answered_p95_ms"] is not None


def test_answered_rate_is_over_the_time_that_it_took() -> None:
    """A server that answers everything, but only long after the load ended, has not kept up."""

    async def call(number: int) -> str:
        await asyncio.sleep(0.5)
        return "ok"

    found = asyncio.run(run(call, [n / 500 for n in range(50)]))
    assert found.offered == pytest.approx(50 / (49 / 500), rel=0.01)
    assert found.answered < 50 / 0.5


def test_closed_loop_keeps_so_many_in_flight() -> None:
    running, most = 0, 0

    async def call(number: int) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return "ok"

    found = asyncio.run(closed(call, 7, 0.1))
    assert most == 7
    assert found.counts["ok"] == found.calls >= 7
