"""Jobs for tests: random ones, and the collecting of their answers."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from serving.core.types import Hypothesis, SearchOptions
from serving.engine.engine import Engine
from serving.engine.jobs import Job, Outcome, Result
from tests.serving.engine.tiny import EOS, SOURCE_LIMIT

WAIT = 60.0  # seconds until a test gives up waiting


@dataclass(frozen=True)
class Ask:
    """What one job asks for."""

    source: tuple[int, ...]
    options: SearchOptions
    prefix: tuple[int, ...] = ()


def random_ask(rng: np.random.Generator, vocabulary: int) -> Ask:
    """Greedy, beams, n-best, prefixes and forced lengths; sources of 1 token to the limit, mostly short."""
    length = int(rng.integers(1, SOURCE_LIMIT + 1)) if rng.random() < 0.3 else int(rng.integers(1, 12))
    source = (*(int(i) for i in rng.integers(10, vocabulary, length - 1)), EOS)
    beam = int(rng.choice([1, 1, 1, 2, 4, 5]))
    options = SearchOptions(
        beam=beam,
        nbest=int(rng.integers(1, beam + 1)),
        length_penalty=float(rng.choice([0.0, 0.6, 1.0])),
        max_length_ratio=float(rng.choice([0.5, 1.0, 2.0])),
        max_length_margin=int(rng.integers(0, 13)),
        forced_length=int(rng.integers(1, 20)) if rng.random() < 0.1 else None,
    )
    prefix = tuple(int(i) for i in rng.integers(10, vocabulary, rng.integers(1, 6))) if rng.random() < 0.2 else ()
    return Ask(source, options, prefix)


@dataclass
class Answers:
    """Collects the answers of jobs; every job must be answered exactly once."""

    outcomes: dict[Job, Outcome] = field(default_factory=dict)
    order: list[Job] = field(default_factory=list)
    twice: list[Job] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def job(self, ask: Ask, align: bool = False, deadline: float | None = None) -> Job:
        def on_done(outcome: Outcome) -> None:
            with self.changed:
                if job in self.outcomes:
                    self.twice.append(job)
                self.outcomes[job] = outcome
                self.order.append(job)
                self.changed.notify_all()

        job = Job(ask.source, ask.options, on_done, ask.prefix, align, deadline)
        return job

    def wait(self, jobs: Iterable[Job], seconds: float = WAIT) -> list[Outcome]:
        """The answers of `jobs`, in their order."""
        jobs = list(jobs)
        with self.changed:
            assert self.changed.wait_for(lambda: all(job in self.outcomes for job in jobs), seconds), "no answer"
            assert not self.twice
            return [self.outcomes[job] for job in jobs]

    def results(self, jobs: Iterable[Job]) -> list[Result]:
        """As `wait`, for jobs that must end well."""
        outcomes = self.wait(jobs)
        assert all(isinstance(outcome, Result) for outcome in outcomes), outcomes
        return [outcome for outcome in outcomes if isinstance(outcome, Result)]


def run_all(engine: Engine, asks: Sequence[Ask]) -> list[Result]:
    """Submit everything at once and wait."""
    answers = Answers()
    jobs = [answers.job(ask) for ask in asks]
    for job in jobs:
        engine.submit(job)
    return answers.results(jobs)


def same(found: Sequence[Hypothesis], wanted: Sequence[Hypothesis], tolerance: float = 1e-5) -> str:
    """Why two lists of hypotheses differ; empty where they agree. Large scores are compared relatively."""
    if [(h.tokens, h.stop_reason) for h in found] != [(h.tokens, h.stop_reason) for h in wanted]:
        return f"{[(h.tokens, h.score) for h in found]} is not {[(h.tokens, h.score) for h in wanted]}"
    pairs = zip(found, wanted, strict=True)
    worst = max((abs(a.score - b.score) / max(1.0, abs(b.score)) for a, b in pairs), default=0.0)
    return "" if worst <= tolerance else f"scores differ by {worst}"
