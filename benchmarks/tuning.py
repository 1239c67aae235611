"""Every engine at its best: a peer's settings are tried one after the other, and the fastest one is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.contenders import ContenderFailed
from benchmarks.peers.base import Setting
from serving.core.errors import FuseqError

Try = Callable[[Setting, int, float], float]  # a setting, how often to run, seconds a run may take; the median seconds

FINALISTS = 3
HOPELESS = 4.0  # times the best so far: no run waits longer ...
LEAST_PATIENCE = 5.0  # ... but for so many seconds
LONGEST = 300.0  # for the first setting


@dataclass(frozen=True, slots=True)
class Best:
    """The fastest setting and what all of them took."""

    setting: Setting
    tried: tuple[tuple[Setting, float], ...]  # fastest first; seconds
    failed: tuple[str, ...] = ()  # settings that this machine cannot run, and why


def best(settings: Sequence[Setting], attempt: Try, *, rounds: int = 3) -> Best:
    """Try every setting once, and the fastest three again `rounds` times.

    Raises:
        FuseqError: none of them runs.
    """
    first: list[tuple[Setting, float]] = []
    failed: list[str] = []
    patience = LONGEST
    for setting in settings:
        try:
            first.append((setting, attempt(setting, 1, patience)))
        except ContenderFailed as error:  # a quantization or backend that this processor lacks, or far too slow
            failed.append(str(error))
            continue
        patience = min(patience, max(LEAST_PATIENCE, HOPELESS * first[-1][1]))
    if not first:
        raise FuseqError(failed[0] if failed else "there is no setting to try")
    first.sort(key=lambda pair: pair[1])
    if len(first) > 1 and rounds > 1:
        again = [(setting, attempt(setting, rounds, LONGEST)) for setting, _ in first[:FINALISTS]]
        first = sorted(again, key=lambda pair: pair[1]) + first[FINALISTS:]
    return Best(first[0][0], tuple(first), tuple(failed))
