"""Several engines as one: the same answers, one queue, counters that add up, and no engine idle beside a busy one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from serving.core.errors import Cancelled, ConfigError, Overloaded, Unavailable
from serving.engine import processors
from serving.engine.observer import Silent, Snapshot
from serving.engine.pool import Pool, share_out
from serving.engine.settings import EngineSettings
from tests.serving.engine.conftest import EngineMaker, Opened
from tests.serving.engine.test_engine import SHORT, Held
from tests.serving.engine.work import Answers, random_ask, run_all, same


@pytest.fixture
def model(opened: dict[str, Opened]) -> Opened:
    return opened["attending"]


@pytest.fixture
def pool(model: Opened) -> Iterator[Pool]:
    with Pool(*model, EngineSettings(rows=16, memory_bytes=64 << 20), workers=3) as started:
        yield started


def adds_up(now: Snapshot) -> bool:
    ended = now.ok + now.failed + now.cancelled + now.expired + now.rejected
    return now.received == ended + now.queued + now.running + now.aligning


def test_answers_are_those_of_one_engine(model: Opened, pool: Pool, make_engine: EngineMaker) -> None:
    rng = np.random.default_rng(1)
    asks = [random_ask(rng, model[0].manifest.target_codec.size) for _ in range(120)]
    answers = Answers()
    jobs = [answers.job(ask) for ask in asks]
    for job in jobs:
        pool.submit(job)
    for ask, result, alone in zip(asks, answers.results(jobs), run_all(make_engine(model), asks), strict=True):
        assert not same(result.hypotheses, alone.hypotheses), ask
    assert all(engine.snapshot().ok > 10 for engine in pool.engines)
    assert pool.snapshot().ok == len(asks)
    assert adds_up(pool.snapshot())


def test_a_lone_caller_has_the_first_engine(pool: Pool) -> None:
    answers = Answers()
    for _ in range(5):
        job = answers.job(SHORT)
        pool.submit(job)
        answers.results([job])
    assert [engine.snapshot().ok for engine in pool.engines] == [5, 0, 0]


def test_the_queue_is_one_for_all(model: Opened) -> None:
    bundle, stages = model
    held = Held(stages.step)
    refused: list[object] = []

    class Watch(Silent):
        def rejected(self, job: object, error: object) -> None:
            refused.append(error)

    settings = EngineSettings(rows=1, queue=4, memory_bytes=64 << 20)
    pool = Pool(bundle, replace(stages, step=held), settings, Watch(), workers=2)
    held.let_go.set()
    pool.start()
    held.let_go.clear()
    answers, jobs = Answers(), []

    def submit_until_refused() -> None:
        for _ in range(50):
            jobs.append(answers.job(SHORT))
            pool.submit(jobs[-1])

    try:
        with pytest.raises(Overloaded):
            submit_until_refused()
        assert 4 <= len(jobs) - 1 <= 4 + 2  # as many as may wait, and one in the row of each engine
        assert len(refused) == 1
        pool.cancel(jobs[3])
        held.let_go.set()
        outcomes = answers.wait(jobs[:-1])
        assert [isinstance(outcome, Cancelled) for outcome in outcomes].count(True) <= 1
        now = pool.snapshot()
        assert (now.rejected, now.received) == (1, len(jobs))
        assert adds_up(now)
    finally:
        held.let_go.set()
        pool.stop()


def test_every_snapshot_adds_up_while_many_threads_submit(pool: Pool) -> None:
    answers = Answers()
    jobs = [answers.job(SHORT) for _ in range(300)]

    def submit(part: list[object]) -> None:
        for job in part:
            pool.submit(job)  # type: ignore[arg-type]

    threads = [threading.Thread(target=submit, args=(jobs[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert adds_up(pool.snapshot())
    answers.results(jobs)
    assert pool.snapshot().ok == 300
    assert all(engine.load == engine.waiting == 0 for engine in pool.engines)


def test_a_stopped_pool_refuses(pool: Pool) -> None:
    assert pool.stop()
    with pytest.raises(Unavailable):
        pool.submit(Answers().job(SHORT))
    assert adds_up(pool.snapshot())


def test_memory_is_shared_out(model: Opened) -> None:
    limits = EngineSettings(rows=4096, memory_bytes=8 << 20)
    one, four = (Pool(*model, limits, workers=workers) for workers in (1, 4))
    assert four.capacity <= one.capacity / 3
    with pytest.raises(ConfigError):
        Pool(*model, EngineSettings(memory_bytes=4096), workers=4)


def test_processors_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "usable", lambda: 8)
    assert share_out() == (8, 1)
    assert share_out(threads=3) == (2, 3)
    assert share_out(workers=3) == (3, 2)
    assert share_out(workers=20) == (20, 1)
    assert share_out(threads=20) == (1, 20)
    assert share_out(5, 7) == (5, 7)
