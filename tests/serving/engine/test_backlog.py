"""A slow stage must not let work pile up behind the bounded queue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.core.errors import Overloaded
from serving.engine.jobs import Result
from tests.serving.engine.conftest import EngineMaker, Opened
from tests.serving.engine.test_engine import SHORT, Held, is_empty
from tests.serving.engine.work import Answers


def test_alignments_that_are_drawn_slowly_fill_the_queue_and_not_the_memory(
    opened: dict[str, Opened], make_engine: EngineMaker
) -> None:
    bundle, stages = opened["attending"]
    held = Held(stages.align)
    rows, queue = 2, 3
    engine = make_engine((bundle, replace(stages, align=held)), rows=rows, queue=queue)
    answers = Answers()
    jobs = []

    def ask_until_refused() -> None:
        for _ in range(50):
            jobs.append(answers.job(SHORT, align=True))
            engine.submit(jobs[-1])
            # A job that needs no alignment comes and goes: whatever can be decoded has been decoded by then.
            plain = answers.job(SHORT)
            engine.submit(plain)
            answers.results([plain])

    with pytest.raises(Overloaded):
        ask_until_refused()
    assert len(jobs) <= 2 * rows + queue
    assert engine.snapshot().queued == queue
    held.let_go.set()
    assert all(isinstance(outcome, Result) for outcome in answers.wait(jobs))
    assert is_empty(engine.snapshot())
