"""The search for what a server can take, on servers whose answer is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.capacity import CLOSE, Point, Search


def queue(load: float, service: float) -> Point:
    """A server that answers `service` calls a second at most; 95th percentile of M/M/1, ln 20 / (service - load)."""
    if load >= service:
        return Point(load, service, math.inf)
    return Point(load, load, 1000 * math.log(20) / (service - load))


def find(service: float, first: float, limits: tuple[float, ...] = (50.0, 200.0, 500.0), most: int = 60) -> Search:
    search = Search(first, limits, most)
    while (load := search.next_load()) is not None:
        search.add(queue(load, service))
    return search


@settings(deadline=None)
@given(st.floats(100, 5000), st.floats(0.02, 3))
def test_finds_what_a_queue_can_take(service: float, start: float) -> None:
    search = find(service, service * start)
    for limit in search.limits:
        best = service - 1000 * math.log(20) / limit
        assert best / CLOSE <= search.throughput(limit) <= best + 1e-6
    assert search.saturation() == pytest.approx(service, rel=0.15)


def test_a_limit_that_cannot_be_met_is_zero() -> None:
    search = find(40.0, 10.0)  # alone, a call takes longer than 50 ms in one of twenty cases
    assert search.throughput(50.0) == 0.0
    assert search.throughput(500.0) > 0


def test_it_ends_after_so_many_loads() -> None:
    assert len(find(1000.0, 1.0, most=5).points) == 5


def test_a_lucky_run_above_an_unlucky_one_counts_for_nothing() -> None:
    search = Search(100.0, (200.0,))
    for load, p95 in ((100.0, 10.0), (200.0, 900.0), (300.0, 150.0)):
        search.add(Point(load, load, p95))
    assert search.throughput(200.0) == 100.0


def test_a_server_that_answers_fast_but_not_all_has_not_kept_up() -> None:
    assert not Point(100.0, 90.0, 1.0).within(50.0)
    assert Point(100.0, 97.0, 1.0).within(50.0)
