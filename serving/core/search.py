"""Greedy and beam search as pure bookkeeping: candidates in, parents and next tokens out.

A search decodes one source and owns one group of rows. Each step the caller runs the model on every live row with
`tokens` at `position`, hands the best `candidates` continuations of each row to `advance`, and reorders its
recurrent and cache state by the parents that `advance` returns. Nothing here knows batches, graphs or models, so
a source's result cannot depend on its neighbours.

Stopping (beam): sums of log-probabilities only fall and length penalties only grow, so the best score a live row can
still reach is its sum divided by the penalty of the largest length. A row that cannot reach the `nbest`-th finished
score any more is dropped; the search ends when no row is left. Hence the best hypothesis is the same for every `nbest`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.core.errors import InvalidInput
from serving.core.types import (
    Hypothesis,
    LengthNormalisation,
    SearchOptions,
    SearchRules,
    SpecialIds,
    StopReason,
)

LONGEST_BLOCK = 8
LEAST_REPEATS = 4
LEAST_SPAN = 12
LARGEST_ALPHA = 10.0


def repeated_tail(tokens: Sequence[int]) -> int:
    """Length of the block whose repetition ends `tokens`, 0 if there is none.

    The rule: a block of 1 to 8 tokens stands at least 4 times in a row, over at least 12 tokens.
    """
    count = len(tokens)
    if count < LEAST_SPAN or tokens[-1] not in tokens[-1 - LONGEST_BLOCK : -1]:
        return 0
    for block in range(1, min(LONGEST_BLOCK, count // LEAST_REPEATS) + 1):
        span = max(LEAST_REPEATS * block, LEAST_SPAN)
        if span > count or tokens[-1] != tokens[-1 - block]:
            continue
        if all(tokens[-1 - i] == tokens[-1 - i - block] for i in range(span - block)):
            return block
    return 0


def has_repetition(tokens: Sequence[int]) -> bool:
    """Whether `repeated_tail` would fire anywhere in `tokens`: a source that repeats may be translated so."""
    if len(tokens) < LEAST_SPAN:
        return False
    return any(repeated_tail(tokens[:end]) for end in range(LEAST_SPAN, len(tokens) + 1))


def _cut_repetition(tokens: list[int], block: int) -> list[int]:
    """`tokens` with the repeated tail cut back to one occurrence of its block."""
    end = len(tokens)
    while end - 2 * block >= 0 and tokens[end - block : end] == tokens[end - 2 * block : end - block]:
        end -= block
    return tokens[:end]


def length_penalty(length: int, alpha: float, normalisation: LengthNormalisation = LengthNormalisation.GNMT) -> float:
    """What a sum of log-probabilities over `length` tokens is divided by. It never falls as the length grows."""
    if normalisation is LengthNormalisation.POWER:
        return float(length**alpha)
    return float(((5.0 + length) / 6.0) ** alpha)


@dataclass(frozen=True, slots=True)
class SearchTask:
    """What a search is started with. `source` holds the source's ids, end symbol included."""

    source: Sequence[int]
    options: SearchOptions
    special: SpecialIds
    position_limit: int  # decoder positions the model has; begin symbol and prefix take some of them
    prefix: tuple[int, ...] = ()
    rules: SearchRules = field(default_factory=SearchRules)  # of the model

    def length_limit(self) -> int:
        """Most tokens that may be generated after the prefix, the end symbol included."""
        room = self.position_limit - len(self.prefix)
        if room < 1:
            raise InvalidInput(f"the prefix has {len(self.prefix)} tokens; at most {self.position_limit - 1} fit")
        if self.options.forced_length is not None:
            if self.options.forced_length > room:
                raise InvalidInput(f"a forced length of {self.options.forced_length} is over the limit of {room}")
            return self.options.forced_length
        asked = self.options.max_length_ratio * len(self.source) + self.options.max_length_margin
        return max(1, int(min(asked, room)))


class Search(ABC):
    """One group of rows. `rows` live rows take `tokens` at `position` next; it ends when `rows` is 0."""

    def __init__(self, task: SearchTask) -> None:
        self.options, self.rules = task.options, task.rules
        self.eos = task.special.eos
        self.limit = task.length_limit()
        ends = task.rules.end_at_limit and task.options.forced_length is None
        self.room = max(1, self.limit - 1) if ends else self.limit  # tokens without the end symbol
        self.prefix = task.prefix
        self.position = 0  # of the tokens to be fed next
        self.tokens: list[int] = [task.special.bos]  # one a live row
        self.watch = task.options.stop_repetition and task.options.forced_length is None
        self.watch = self.watch and not has_repetition(task.source)

    @property
    def rows(self) -> int:
        """Live rows."""
        return len(self.tokens)

    @property
    def done(self) -> bool:
        """Whether nothing is left to run."""
        return not self.tokens

    @property
    @abstractmethod
    def candidates(self) -> int:
        """How many continuations of each row `advance` wants."""

    @property
    @abstractmethod
    def most_rows(self) -> int:
        """Rows the group can grow to."""

    def advance(
        self, tokens: Sequence[Sequence[int]] | NDArray[np.integer], scores: Sequence[Sequence[float]] | NDArray[Any]
    ) -> list[int]:
        """Take one step's candidates; return, for each row that lives on, the row its state comes from.

        Args:
            tokens: (rows, at least `candidates`) ids, best first; fewer only where the vocabulary has no more.
            scores: (rows, as many) their log-probabilities.
        """
        fed = self.position
        self.position += 1
        if fed < len(self.prefix):  # the prefix is forced: what the model would have chosen does not matter
            self.tokens = [self.prefix[fed]]
            return [0]
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else tokens
        logs = scores.tolist() if isinstance(scores, np.ndarray) else scores
        return self._advance(ids, logs)

    @abstractmethod
    def _advance(self, tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> list[int]: ...

    @abstractmethod
    def hypotheses(self) -> list[Hypothesis]:
        """The finished hypotheses, best first, at most `nbest`."""

    def _hypothesis(self, generated: list[int], total: float, reason: StopReason, length: int) -> Hypothesis:
        return Hypothesis((*self.prefix, *generated), total / self._penalty(length), total, reason)

    def _cut(self, generated: list[int], total: float) -> Hypothesis:
        """What is left of an output that reached the limit; an end symbol that the model forces is counted."""
        return self._hypothesis(generated, total, StopReason.LENGTH, len(generated) + self.limit - self.room)

    def _penalty(self, length: int) -> float:
        return length_penalty(length, self.options.length_penalty, self.rules.length_normalisation)


class GreedySearch(Search):
    """The likeliest token at every step."""

    def __init__(self, task: SearchTask) -> None:
        super().__init__(task)
        self.generated: list[int] = []
        self.total = 0.0
        self.result: Hypothesis | None = None
        self.excluded = self.rules.banned if self.options.forced_length is None else self.rules.banned | {self.eos}

    @property
    def candidates(self) -> int:
        return 1 + len(self.excluded)

    @property
    def most_rows(self) -> int:
        return 1

    def _advance(self, tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> list[int]:
        best = 0
        if self.excluded:
            best = next(place for place, token in enumerate(tokens[0]) if token not in self.excluded)
        token = tokens[0][best]
        self.total += scores[0][best]
        if token == self.eos:
            return self._finish(self._hypothesis(self.generated, self.total, StopReason.EOS, len(self.generated) + 1))
        self.generated.append(token)
        if self.watch and (block := repeated_tail(self.generated)):
            cut = _cut_repetition(self.generated, block)
            return self._finish(self._hypothesis(cut, self.total, StopReason.REPETITION, len(self.generated)))
        if len(self.generated) >= self.room:
            return self._finish(self._cut(self.generated, self.total))
        self.tokens = [token]
        return [0]

    def _finish(self, result: Hypothesis) -> list[int]:
        self.result = result
        self.tokens = []
        return []

    def hypotheses(self) -> list[Hypothesis]:
        return [self.result] if self.result is not None else []


def _rank(hypothesis: Hypothesis) -> tuple[bool, float]:
    """Sort key, best first: a loop that was cut loses against whatever ended by itself."""
    return hypothesis.stop_reason is StopReason.REPETITION, -hypothesis.score


class BeamSearch(Search):
    """The `beam` likeliest partial outputs at every step, as in Sutskever et al. 2014, section 3.2."""

    def __init__(self, task: SearchTask) -> None:
        super().__init__(task)
        self.beam = task.options.beam
        self.largest_penalty = self._penalty(self.limit)
        self.live: list[tuple[float, list[int]]] = [(0.0, [])]  # (sum of log-probabilities, generated) a row
        self.finished: list[Hypothesis] = []  # best first

    @property
    def candidates(self) -> int:
        # Each row can lose a candidate to the end symbol, and the banned ones, and still fill the beam.
        return 2 * self.beam + len(self.rules.banned)

    @property
    def most_rows(self) -> int:
        return self.beam

    def _advance(self, tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]) -> list[int]:
        parents, live = self._select(tokens, scores)
        if live and len(live[0][1]) >= self.room:
            self.finished += [self._cut(generated, total) for total, generated in live]
            parents, live = [], []
        if len(self.finished) >= self.options.nbest:
            self.finished.sort(key=_rank)
            del self.finished[self.options.nbest :]
            keep = [index for index, (total, _) in enumerate(live) if self._can_win(total)]
            live = [live[index] for index in keep]
            parents = [parents[index] for index in keep]
        self.live = live
        self.tokens = [generated[-1] for _, generated in live]
        return parents

    def _select(
        self, tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]]
    ) -> tuple[list[int], list[tuple[float, list[int]]]]:
        """Walk the extensions from the best: ends go to `finished`, the first `beam` others live on.

        The rows' candidates are sorted, so this merges them and looks at little more than `beam` of them; the
        better row comes first where they tie. It sees none beyond `candidates`: those are a neighbour's wish.
        """
        old, width = self.live, min(self.candidates, len(scores[0]))
        heads = [(-old[row][0] - logs[0], row, 0) for row, logs in enumerate(scores)]  # (-sum, row, place in the row)
        heapify(heads)
        parents: list[int] = []
        live: list[tuple[float, list[int]]] = []
        rank = 0
        while heads and len(live) < self.beam:
            negative, row, place = heads[0]
            if place + 1 < width:
                heapreplace(heads, (-old[row][0] - scores[row][place + 1], row, place + 1))
            else:
                heappop(heads)
            token, past = tokens[row][place], old[row][1]
            if token in self.rules.banned:
                continue
            if token != self.eos:
                generated = [*past, token]
                if self.watch and (block := repeated_tail(generated)):
                    self._finish(_cut_repetition(generated, block), -negative, StopReason.REPETITION, len(generated))
                else:
                    parents.append(row)
                    live.append((-negative, generated))
            elif rank < self.beam and self.options.forced_length is None:
                # Only an end inside the beam counts; a worse one would not have been expanded either.
                self._finish(past, -negative, StopReason.EOS, len(past) + 1)
            rank += 1
        return parents, live

    def _finish(self, generated: list[int], total: float, reason: StopReason, length: int) -> None:
        self.finished.append(self._hypothesis(generated, total, reason, length))

    def _can_win(self, total: float) -> bool:
        """Whether a row with this sum may still enter the finished hypotheses, `nbest` of which there are."""
        last = self.finished[-1]
        return last.stop_reason is StopReason.REPETITION or total / self.largest_penalty > last.score

    def hypotheses(self) -> list[Hypothesis]:
        return sorted(self.finished, key=_rank)


def start_search(task: SearchTask) -> Search:
    """The search that the task's options ask for.

    Raises:
        InvalidInput: an option is out of range.
    """
    options = task.options
    if options.beam < 1 or not 1 <= options.nbest <= options.beam:
        raise InvalidInput(f"beam {options.beam} and n-best {options.nbest}: need 1 <= n-best <= beam")
    if not 0 <= options.length_penalty <= LARGEST_ALPHA:
        raise InvalidInput(f"length penalty {options.length_penalty}: must be 0 to {LARGEST_ALPHA:g}")
    if not 0 <= options.max_length_ratio < math.inf or options.max_length_margin < 0:
        asked = f"ratio {options.max_length_ratio}, margin {options.max_length_margin}"
        raise InvalidInput(f"maximum length by {asked}: both must be finite and not negative")
    if options.forced_length is not None and options.forced_length < 1:
        raise InvalidInput(f"forced length {options.forced_length}: must be at least 1")
    return GreedySearch(task) if options.beam == 1 else BeamSearch(task)
