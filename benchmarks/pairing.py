"""Side by side: contenders run in turn, A B A B, so that whatever the machine does, it does to all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Run = Callable[[], float]  # does the work once, returns the seconds it took

RESAMPLES = 2000
LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Summary:
    """The times of one contender, in seconds."""

    median: float
    p95: float
    spread: float  # interquartile range over median
    rounds: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times faster one contender is than another, with a 95% interval."""

    value: float
    low: float
    high: float


def interleave(
    runs: Mapping[str, Run],
    *,
    rounds: int,
    seconds: float = float("inf"),
    warm_up: int = 1,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Run every contender once a round; returns each one's times, one a round.

    Each round begins with another contender, so that none always runs first or after the same other one.

    Args:
        rounds: how many are counted at most, the warm-up apart.
        seconds: no round begins after so many, once there are three.
        warm_up: rounds that are run and not counted.
    """
    names = list(runs)
    for _ in range(warm_up):
        for name in names:
            runs[name]()
    times: dict[str, list[float]] = {name: [] for name in names}
    begin = time.monotonic()
    for number in range(rounds):
        if number >= LEAST_ROUNDS and time.monotonic() - begin > seconds:
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name].append(runs[name]())
        on_round()
    return times


def summarize(times: Sequence[float]) -> Summary:
    """Median, 95th percentile and spread of a contender's times."""
    low, middle, high, p95 = np.percentile(times, [25, 50, 75, 95])
    return Summary(float(middle), float(p95), float((high - low) / middle) if middle else 0.0, len(times))


def ratio(ours: Sequence[float], theirs: Sequence[float], *, seed: int = 0) -> Ratio:
    """Median of `theirs` over median of `ours`: above 1 we are faster.

    The interval is the percentile bootstrap over rounds (Efron 1979): a round is drawn as a whole, since what
    disturbs the machine disturbs all who ran in that round.

    Raises:
        ValueError: the two did not run in the same rounds.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} rounds: contenders must have run in the same ones")
    mine, other = np.asarray(ours), np.asarray(theirs)
    draws = np.random.default_rng(seed).integers(0, len(mine), (RESAMPLES, len(mine)))  # (resample, round)
    sampled = np.median(other[draws], axis=1) / np.median(mine[draws], axis=1)
    low, high = np.percentile(sampled, [2.5, 97.5])
    return Ratio(float(np.median(other) / np.median(mine)), float(low), float(high))
