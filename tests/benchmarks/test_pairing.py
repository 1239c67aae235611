"""Side by side: the order of the runs and what is made of their times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pairing import interleave, ratio, summarize


def runs(log: list[str], *names: str) -> dict[str, object]:
    def run(name: str) -> float:
        log.append(name)
        return float(len(log))

    return {name: (lambda name=name: run(name)) for name in names}


def test_contenders_run_in_turn_and_none_always_first() -> None:
    log: list[str] = []
    times = interleave(runs(log, "a", "b", "c"), rounds=3, warm_up=1)  # type: ignore[arg-type]
    assert log == list("abc" + "abc" + "bca" + "cab")
    assert times == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


def test_warm_up_is_not_counted_and_three_rounds_always_are() -> None:
    log: list[str] = []
    times = interleave(runs(log, "a", "b"), rounds=50, seconds=0.0, warm_up=2)  # type: ignore[arg-type]
    assert {name: len(found) for name, found in times.items()} == {"a": 3, "b": 3}
    assert len(log) == 2 * (2 + 3)


def test_summary_of_known_times() -> None:
    found = summarize([0.1, 0.2, 0.3, 0.4, 10.0])
    assert found.median == pytest.approx(0.3)
    assert found.spread == pytest.approx((0.4 - 0.2) / 0.3)
    assert found.p95 == pytest.approx(0.4 + 0.8 * 9.6)
    assert found.rounds == 5


def test_ratio_is_of_medians_and_lies_in_its_interval() -> None:
    draw = np.random.default_rng(1)
    ours, theirs = draw.normal(1.0, 0.05, 40), draw.normal(2.5, 0.1, 40)
    found = ratio(ours.tolist(), theirs.tolist())
    assert found.value == pytest.approx(np.median(theirs) / np.median(ours))
    assert found.low < found.value < found.high
    assert found.low < 2.5 < found.high
    assert found.high - found.low < 0.2


def test_a_disturbance_of_the_machine_cancels_since_rounds_are_drawn_whole() -> None:
    slow = np.random.default_rng(2).choice([1.0, 5.0], 30)  # rounds in which everything took five times as long
    found = ratio((0.01 * slow).tolist(), (0.02 * slow).tolist())
    assert (found.low, found.value, found.high) == pytest.approx((2.0, 2.0, 2.0))


def test_rounds_must_be_the_same() -> None:
    with pytest.raises(ValueError, match="same ones"):
        ratio([1.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="same ones"):
        ratio([], [])


@given(st.lists(st.floats(1e-4, 1e2), min_size=1, max_size=20), st.floats(0.1, 10))
def test_scaling_one_side_scales_the_ratio(times: list[float], factor: float) -> None:
    found = ratio(times, [factor * time for time in times])
    assert found.value == pytest.approx(factor)
    assert found.low == pytest.approx(factor)
