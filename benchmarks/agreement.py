"""Whether two contenders say the same: nobody is timed before that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.errors import FuseqError

Outputs = Sequence[Sequence[int]]


class Disagreement(FuseqError):
    """Two engines that hold the same weights in the same precision gave different tokens."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How far two contenders' outputs agree."""

    identical: float  # share of sentences that are the same token by token
    prefix: float  # share of the first one's tokens before the two part


def compare(ours: Outputs, theirs: Outputs) -> Agreement:
    """Compare outputs sentence by sentence."""
    if len(ours) != len(theirs):
        raise Disagreement(f"{len(ours)} outputs and {len(theirs)}: one of the engines lost sentences")
    same = common = total = 0
    for one, other in zip(ours, theirs, strict=True):
        one, other = list(one), list(other)
        same += one == other
        total += len(one)
        common += next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
    return Agreement(same / len(ours) if ours else 1.0, common / total if total else 1.0)


def require_equal(who: str, ours: Outputs, theirs: Outputs) -> Agreement:
    """Refuse to go on unless all outputs are the same.

    Raises:
        Disagreement: they are not; names the first sentence that differs.
    """
    found = compare(ours, theirs)
    if found.identical < 1.0:
        pairs = enumerate(zip(ours, theirs, strict=True))
        index, (one, other) = next((i, pair) for i, pair in pairs if list(pair[0]) != list(pair[1]))
        raise Disagreement(
            f"{who}: {found.identical:.1%} of the outputs equal ours; sentence {index}: {list(other)[:12]}, "
            f"ours {list(one)[:12]}; nothing is timed until they agree"
        )
    return found
