"""Peers at their best: which setting is chosen."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.contenders import ContenderFailed
from benchmarks.peers import PEERS, find_peer
from benchmarks.tuning import best
from serving.core.errors import FuseqError

SETTINGS: list[dict[str, Any]] = [{"threads": n} for n in (1, 2, 4, 8)]


def test_the_fastest_wins_and_the_first_try_does_not_decide_alone() -> None:
    asked: list[tuple[int, int]] = []
    first = {1: 4.0, 2: 2.0, 4: 1.9, 8: 9.0}  # 4 was lucky once
    again = {1: 4.0, 2: 2.0, 4: 2.5}

    def attempt(setting: dict[str, Any], rounds: int, patience: float) -> float:
        asked.append((setting["threads"], rounds))
        return (first if rounds == 1 else again)[setting["threads"]]

    found = best(SETTINGS, attempt, rounds=3)
    assert found.setting == {"threads": 2}
    assert asked == [(1, 1), (2, 1), (4, 1), (8, 1), (4, 3), (2, 3), (1, 3)]
    assert [setting["threads"] for setting, _ in found.tried] == [2, 4, 1, 8]


def test_settings_that_cannot_run_here_are_left_out() -> None:
    def attempt(setting: dict[str, Any], rounds: int, patience: float) -> float:
        if setting["threads"] < 8:
            raise ContenderFailed("this processor has no such instruction")
        return 1.0

    found = best(SETTINGS, attempt)
    assert found.setting == {"threads": 8}
    assert len(found.failed) == 3


def test_nobody_waits_for_what_is_hopeless() -> None:
    waited: list[float] = []

    def attempt(setting: dict[str, Any], rounds: int, patience: float) -> float:
        waited.append(patience)
        return {1: 10.0, 2: 3.0, 4: 50.0, 8: 0.1}[setting["threads"]]

    best(SETTINGS, attempt, rounds=1)
    assert waited == [300.0, 40.0, 12.0, 12.0]


def test_nothing_runs() -> None:
    def attempt(setting: dict[str, Any], rounds: int, patience: float) -> float:
        raise ContenderFailed("out of memory")

    with pytest.raises(FuseqError, match="out of memory"):
        best(SETTINGS, attempt)
    with pytest.raises(FuseqError, match="no setting"):
        best([], attempt)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("cores", [1, 2, 6])
def test_every_peer_offers_distinct_settings_that_use_one_thread_and_all(peer: str, cores: int) -> None:
    for batch in (1, 32):
        settings = find_peer(peer).settings(cores, batch)
        assert settings
        assert len({repr(setting) for setting in settings}) == len(settings)
        threads = [s["threads"] for s in settings if "threads" in s]
        threads += [s["inter"] * s["intra"] for s in settings if "inter" in s]
        if threads:
            assert {1, cores} <= set(threads)
            assert max(threads) <= cores
