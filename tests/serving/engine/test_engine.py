"""The engine as its callers meet it: joining, leaving, failing, waiting, ending."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from serving.core.errors import (
    BundleError,
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    FuseqError,
    InvalidInput,
    ModelFailure,
    Overloaded,
    Unavailable,
    Unsupported,
)
from serving.core.manifest import StateEntry
from serving.core.state_spec import Role
from serving.core.types import SearchOptions
from serving.engine.engine import Engine, EngineSettings
from serving.engine.jobs import Job, Outcome, Result
from serving.engine.observer import Silent, Snapshot
from tests.serving.engine.conftest import EngineMaker, Opened
from tests.serving.engine.reference import decode_alone
from tests.serving.engine.tiny import EOS, NAN, POISON, SOURCE_LIMIT, TARGET_LIMIT
from tests.serving.engine.work import WAIT, Answers, Ask, run_all, same

SHORT = Ask((20, 21, EOS), SearchOptions(max_length_margin=4, max_length_ratio=0.0))
LONG = Ask((30, 31, 32, EOS), SearchOptions(forced_length=TARGET_LIMIT - 1))


@dataclass
class Script(Silent):
    """Runs `actions[n]` in the engine's thread after step call n, and keeps what it saw."""

    actions: dict[int, Callable[[], object]] = field(default_factory=dict)
    always: Callable[[], object] | None = None
    rows: list[int] = field(default_factory=list)
    encodes: list[tuple[int, int]] = field(default_factory=list)
    started_jobs: list[Job] = field(default_factory=list)
    rejections: list[FuseqError] = field(default_factory=list)
    finishes: list[Outcome] = field(default_factory=list)

    def rejected(self, job: Job, error: FuseqError) -> None:
        self.rejections.append(error)

    def started(self, job: Job, queue_seconds: float) -> None:
        assert queue_seconds >= 0
        self.started_jobs.append(job)

    def encoded(self, rows: int, tokens: int, seconds: float) -> None:
        self.encodes.append((rows, tokens))

    def stepped(self, rows: int, seconds: float) -> None:
        self.rows.append(rows)
        if action := self.actions.get(len(self.rows) - 1):
            action()
        if self.always:
            self.always()

    def finished(self, job: Job, outcome: Outcome) -> None:
        self.finishes.append(outcome)


def balanced(snapshot: Snapshot) -> bool:
    ended = snapshot.ok + snapshot.failed + snapshot.cancelled + snapshot.expired + snapshot.rejected
    return snapshot.received == ended + snapshot.queued + snapshot.running + snapshot.aligning


def is_empty(snapshot: Snapshot) -> bool:
    return not (snapshot.rows or snapshot.queued or snapshot.running or snapshot.aligning) and balanced(snapshot)


def test_case_59_a_job_that_comes_during_a_step_is_in_the_next_one(model: Opened, make_engine: EngineMaker) -> None:
    answers, script = Answers(), Script()
    engine = make_engine(model, script)
    a, b = answers.job(LONG), answers.job(SHORT)
    script.actions[10] = lambda: engine.submit(b)
    engine.submit(a)
    long, short = answers.results([a, b])
    assert (long.first_step, short.first_step) == (0, 11)
    assert short.last_step < long.last_step == TARGET_LIMIT - 2
    assert answers.order == [b, a]
    assert script.rows == [1] * 11 + [2] * (short.last_step - 10) + [1] * (long.last_step - short.last_step)
    bundle, stages = model
    for ask, result in ((LONG, long), (SHORT, short)):
        assert not same(result.hypotheses, decode_alone(bundle, stages, ask.source, ask.options))


def test_case_59_from_another_thread(model: Opened, make_engine: EngineMaker) -> None:
    answers, running = Answers(), threading.Event()
    engine = make_engine(model, Script(always=lambda: (running.set(), time.sleep(0.002))))
    a, b = answers.job(LONG), answers.job(SHORT)
    engine.submit(a)
    assert running.wait(WAIT)
    before = engine.snapshot().steps
    engine.submit(b)
    after = engine.snapshot().steps
    _, short = answers.results([a, b])
    # The step that was running when b came is at most number `after`; b is in the one after it.
    assert before <= short.first_step <= after + 1
    assert answers.order == [b, a]


def test_1000_concurrent_jobs_get_their_own_answers(model: Opened, make_engine: EngineMaker) -> None:
    bundle, stages = model
    options = SearchOptions(max_length_margin=3, max_length_ratio=0.0)
    sources = [(10 + i % 40, 50 + i // 40 % 25, *((90 + i % 7,) * (i % 3)), EOS) for i in range(1000)]
    assert len(set(sources)) == 1000
    answers = Answers()
    jobs = [answers.job(Ask(source, options)) for source in sources]
    engine = make_engine(model, rows=32)

    def submit(part: Sequence[Job]) -> None:
        for job in part:
            engine.submit(job)

    threads = [threading.Thread(target=submit, args=(jobs[i::20],)) for i in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results = answers.results(jobs)
    for source, result in zip(sources, results, strict=True):
        assert not same(result.hypotheses, decode_alone(bundle, stages, source, options))
    snapshot = engine.snapshot()
    assert (snapshot.received, snapshot.ok) == (1000, 1000)
    assert is_empty(snapshot)


def test_case_80_cancels_missed_deadlines_and_errors_leave_nothing_behind(
    model: Opened, make_engine: EngineMaker
) -> None:
    answers = Answers()
    engine = make_engine(model, Script(always=lambda: time.sleep(0.0005)), queue=500)
    cancelled, late, broken, fine = [], [], [], []
    for i in range(100):
        cancelled.append(answers.job(replace(LONG, source=(30 + i, EOS))))
        late.append(answers.job(LONG, deadline=time.monotonic() + 0.0005 * i))
        broken.append(
            answers.job(replace(SHORT, source=(20, POISON, EOS)) if i % 2 else replace(SHORT, prefix=(POISON,)))
        )
        fine.append(answers.job(replace(SHORT, options=SearchOptions(beam=1 + i % 4))))
        for job in (cancelled[-1], late[-1], broken[-1], fine[-1]):
            engine.submit(job)
        if i % 3 == 0:
            time.sleep(0.001)
        engine.cancel(cancelled[i // 2])  # some running, some waiting, some twice
    for job in cancelled:
        engine.cancel(job)
    for jobs, kind in ((cancelled, Cancelled), (late, DeadlineExceeded), (broken, ModelFailure), (fine, Result)):
        outcomes = answers.wait(jobs)
        assert all(isinstance(outcome, kind) for outcome in outcomes), outcomes
    snapshot = engine.snapshot()
    assert is_empty(snapshot)
    counts = (snapshot.received, snapshot.ok, snapshot.cancelled, snapshot.expired, snapshot.failed, snapshot.rejected)
    assert counts == (400, 100, 100, 100, 100, 0)
    assert not answers.twice


def test_case_62_a_source_that_breaks_the_encoder_fails_alone(model: Opened, make_engine: EngineMaker) -> None:
    asks = [replace(SHORT, source=(20 + i, 21, EOS)) for i in range(6)]
    alone = [run_all(make_engine(model), [ask])[0] for ask in asks]
    answers = Answers()
    engine = make_engine(model, start=False)
    jobs = [answers.job(ask) for ask in [*asks[:3], replace(SHORT, source=(POISON, 21, EOS)), *asks[3:]]]
    gate = answers.job(SHORT)
    submit_together(engine, gate, jobs, answers)
    failed = answers.wait(jobs)[3]
    assert isinstance(failed, ModelFailure)
    assert "encode graph failed" in str(failed)
    assert "\n" not in str(failed)
    for job, wanted in zip(jobs[:3] + jobs[4:], alone, strict=True):
        assert not same(answers.results([job])[0].hypotheses, wanted.hypotheses)
    assert is_empty(engine.snapshot())


def submit_together(engine: Engine, first: Job, jobs: Sequence[Job], answers: Answers) -> None:
    """Submit `jobs` within one step of `first`, so that one plan admits them."""
    plain = first.on_done

    def on_done(outcome: Outcome) -> None:
        plain(outcome)
        for job in jobs:
            engine.submit(job)

    first.on_done = on_done
    engine.start()
    engine.submit(first)
    answers.wait([first])


@pytest.mark.parametrize("beam", [1, 4])
def test_case_62_a_row_that_breaks_the_step_fails_alone(model: Opened, make_engine: EngineMaker, beam: int) -> None:
    bundle, stages = model
    options = SearchOptions(beam=beam, nbest=beam, max_length_margin=20)
    asks = [Ask((20 + i, 21, EOS), options, prefix=(40 + i,) * 3) for i in range(3)]
    poisoned = Ask((25, 21, EOS), options, prefix=(40, POISON, 41))
    answers = Answers()
    engine = make_engine(model, start=False)
    jobs = [answers.job(ask) for ask in (asks[0], poisoned, asks[1], asks[2])]
    submit_together(engine, answers.job(SHORT), jobs, answers)
    failed = answers.wait(jobs)[1]
    assert isinstance(failed, ModelFailure)
    assert "step graph failed" in str(failed)
    for job, ask in zip((jobs[0], *jobs[2:]), asks, strict=True):
        wanted = decode_alone(bundle, stages, ask.source, ask.options, ask.prefix)
        assert not same(answers.results([job])[0].hypotheses, wanted)
    assert is_empty(engine.snapshot())


def test_scores_that_are_no_numbers_fail_their_job_alone(model: Opened, make_engine: EngineMaker) -> None:
    bundle, stages = model
    answers = Answers()
    engine = make_engine(model, start=False)
    jobs = [answers.job(replace(SHORT, prefix=(NAN,))), answers.job(SHORT)]
    submit_together(engine, answers.job(SHORT), jobs, answers)
    failed, fine = answers.wait(jobs)
    assert isinstance(failed, ModelFailure)
    assert isinstance(fine, Result)
    assert not same(fine.hypotheses, decode_alone(bundle, stages, SHORT.source, SHORT.options))


def test_case_64_a_cancelled_job_is_out_of_the_next_step(model: Opened, make_engine: EngineMaker) -> None:
    answers, script = Answers(), Script()
    engine = make_engine(model, script, start=False)
    a, b = answers.job(LONG), answers.job(replace(LONG, source=(40, 41, EOS)))
    script.actions[9] = lambda: engine.cancel(a)
    submit_together(engine, answers.job(replace(SHORT, options=SearchOptions(forced_length=1))), [a, b], answers)
    cancelled, other = answers.wait([a, b])
    assert isinstance(cancelled, Cancelled)
    assert isinstance(other, Result)
    assert script.rows[1:10] == [2] * 9
    assert set(script.rows[10:]) == {1}
    assert answers.order[-2:] == [a, b]


def test_case_65_a_deadline_that_passes_while_decoding(model: Opened, make_engine: EngineMaker) -> None:
    answers, script = Answers(), Script()
    engine = make_engine(model, script)
    deadline = time.monotonic() + 0.3
    script.actions[5] = lambda: time.sleep(max(0.0, deadline - time.monotonic()) + 0.001)
    job = answers.job(LONG, deadline=deadline)
    engine.submit(job)
    (outcome,) = answers.wait([job])
    assert isinstance(outcome, DeadlineExceeded)
    assert len(script.rows) <= 6  # it passed during step 5, so there was no step 6
    assert is_empty(engine.snapshot())


def test_case_65_a_queued_job_is_told_within_100_ms_and_never_starts(model: Opened, make_engine: EngineMaker) -> None:
    answers, script = Answers(), Script(always=lambda: time.sleep(0.01))
    engine = make_engine(model, script, rows=1)
    lateness = []
    blocker = answers.job(LONG)
    engine.submit(blocker)
    for _ in range(5):
        deadline = time.monotonic() + 0.03
        waiting = answers.job(SHORT, deadline=deadline)
        engine.submit(waiting)
        (outcome,) = answers.wait([waiting])
        lateness.append(time.monotonic() - deadline)
        assert isinstance(outcome, DeadlineExceeded)
        assert waiting not in script.started_jobs
    assert blocker not in answers.outcomes
    assert 0 <= statistics.median(lateness) < 0.1
    answers.wait([blocker])


def test_case_65_a_job_that_comes_too_late_never_starts(model: Opened, make_engine: EngineMaker) -> None:
    answers, script = Answers(), Script()
    engine = make_engine(model, script)
    job = answers.job(SHORT, deadline=time.monotonic() - 1)
    engine.submit(job)
    (outcome,) = answers.wait([job])
    assert isinstance(outcome, DeadlineExceeded)
    assert (script.started_jobs, script.encodes, script.rows) == ([], [], [])


class Held:
    """A graph that answers only once it is let go."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.entered, self.let_go = threading.Event(), threading.Event()

    def run(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.let_go.wait(WAIT)
        return self.graph.run(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)


@pytest.mark.parametrize("how", ["expired", "cancelled"])
def test_case_65_given_up_while_its_alignment_is_drawn_and_nothing_else_happens(
    opened: dict[str, Opened], make_engine: EngineMaker, how: str
) -> None:
    bundle, stages = opened["attending"]
    held = Held(stages.align)
    engine = make_engine((bundle, replace(stages, align=held)))
    answers = Answers()
    deadline = time.monotonic() + 0.2 if how == "expired" else None
    job = answers.job(SHORT, align=True, deadline=deadline)
    engine.submit(job)
    assert held.entered.wait(WAIT)
    assert engine.snapshot().aligning == 1
    if how == "cancelled":
        engine.cancel(job)
    (outcome,) = answers.wait([job])
    assert isinstance(outcome, DeadlineExceeded if how == "expired" else Cancelled)
    assert is_empty(engine.snapshot())
    held.let_go.set()
    other = answers.job(SHORT, align=True)
    engine.submit(other)
    assert answers.results([other])[0].hypotheses[0].alignment is not None
    assert not answers.twice


def test_waves_into_a_full_queue_are_refused_exactly(model: Opened, make_engine: EngineMaker) -> None:
    """Whatever has been served before, `queue` jobs wait and no more."""
    let_go, holding = threading.Event(), threading.Event()
    script = Script(always=lambda: (holding.set(), let_go.wait(WAIT)))
    engine = make_engine(model, script, rows=2, queue=10)
    for _ in range(5):
        answers = Answers()
        let_go.clear()
        holding.clear()
        running = [answers.job(LONG), answers.job(LONG)]
        engine.submit(running[0])
        assert holding.wait(WAIT)
        waiting = [answers.job(SHORT) for _ in range(10)]
        for job in waiting:
            engine.submit(job)
        for _ in range(3):
            with pytest.raises(Overloaded, match="10 jobs are waiting"):
                engine.submit(answers.job(SHORT))
        assert engine.snapshot().queued == 10
        let_go.set()
        answers.results([running[0], *waiting])
    snapshot = engine.snapshot()
    assert (snapshot.received, snapshot.ok, snapshot.rejected) == (70, 55, 15)
    assert is_empty(snapshot)
    assert len(script.rejections) == 15
    assert len(script.finishes) == 55


def test_a_full_queue_has_room_again_as_soon_as_a_row_is_free(model: Opened, make_engine: EngineMaker) -> None:
    answers = Answers()
    engine = make_engine(model, rows=1, queue=1)
    for _ in range(20):
        job = answers.job(SHORT)
        engine.submit(job)
        answers.results([job])


def test_large_groups_and_small_ones_both_get_through(model: Opened, make_engine: EngineMaker) -> None:
    answers = Answers()
    engine = make_engine(model, rows=8, bypass=4)
    jobs = [
        answers.job(replace(SHORT, options=SearchOptions(beam=8 if i % 5 == 0 else 1, max_length_margin=8)))
        for i in range(60)
    ]
    for job in jobs:
        engine.submit(job)
    answers.results(jobs)
    order = {job: place for place, job in enumerate(answers.order)}
    assert all(abs(order[job] - i) < 45 for i, job in enumerate(jobs))


def test_sources_of_one_length_share_encoder_calls_within_the_token_budget(
    model: Opened, make_engine: EngineMaker
) -> None:
    answers, script = Answers(), Script()
    engine = make_engine(model, script, start=False, rows=64, encode_tokens=40)
    asks = [replace(SHORT, source=(*range(20, 23 + i % 2), EOS)) for i in range(30)]
    jobs = [answers.job(ask) for ask in asks]
    submit_together(engine, answers.job(SHORT), jobs, answers)
    answers.results(jobs)
    assert sum(rows for rows, _ in script.encodes) == 31
    assert max(tokens for _, tokens in script.encodes) <= 40
    assert len(script.encodes) <= 8  # 30 sources, 105 tokens and 25 left over, two lengths


def test_a_result_tells_where_its_time_went(model: Opened, make_engine: EngineMaker) -> None:
    (result,) = run_all(make_engine(model), [LONG])
    parts = (result.queue_seconds, result.encode_seconds, result.decode_seconds, result.align_seconds)
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(result.total_seconds)
    assert result.decode_seconds > 0
    assert result.align_seconds == 0


def test_stop_finishes_what_there_is(model: Opened, make_engine: EngineMaker) -> None:
    answers = Answers()
    engine = make_engine(model, rows=4)
    jobs = [answers.job(LONG) for _ in range(12)]
    for job in jobs:
        engine.submit(job)
    assert engine.stop(WAIT)
    assert all(isinstance(outcome, Result) for outcome in answers.wait(jobs, seconds=0))
    with pytest.raises(Unavailable):
        engine.submit(answers.job(SHORT))
    assert is_empty(engine.snapshot())
    assert not engine.snapshot().accepting
    assert engine.stop()


def test_case_71_stop_gives_up_after_the_grace(model: Opened, make_engine: EngineMaker) -> None:
    answers = Answers()
    engine = make_engine(model, Script(always=lambda: time.sleep(0.02)), rows=2)
    jobs = [answers.job(LONG) for _ in range(6)]
    for job in jobs:
        engine.submit(job)
    begin = time.monotonic()
    assert not engine.stop(0.2)
    assert time.monotonic() - begin >= 0.2
    outcomes = answers.wait(jobs, seconds=0)
    assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
    assert is_empty(engine.snapshot())


def test_a_second_stop_can_shorten_the_grace(model: Opened, make_engine: EngineMaker) -> None:
    answers = Answers()
    engine = make_engine(model, Script(always=lambda: time.sleep(0.02)), rows=1)
    job = answers.job(LONG)
    engine.submit(job)
    stopping = threading.Thread(target=engine.stop, args=(WAIT,))
    stopping.start()
    while engine.snapshot().accepting:
        time.sleep(0.001)
    engine.stop(0)
    stopping.join()
    assert isinstance(answers.wait([job], seconds=0)[0], Unavailable)


def test_jobs_need_an_engine_that_runs(model: Opened, make_engine: EngineMaker) -> None:
    engine = make_engine(model, start=False)
    with pytest.raises(Unavailable):
        engine.submit(Answers().job(SHORT))
    assert engine.stop()
    engine = make_engine(model)
    with pytest.raises(Unavailable, match="started once"):
        engine.start()


@pytest.mark.parametrize(
    ("ask", "match"),
    [
        (replace(SHORT, source=()), "0 tokens; 1 to 96"),
        (replace(SHORT, source=(20,) * SOURCE_LIMIT + (EOS,)), "97 tokens; 1 to 96"),
        (replace(SHORT, source=(20, 100_000, EOS)), "source ids"),
        (replace(SHORT, source=(-1, EOS)), "source ids"),
        (replace(SHORT, prefix=(100_000,)), "prefix ids"),
        (replace(SHORT, prefix=(-1,)), "prefix ids"),
        (replace(SHORT, prefix=(20, EOS)), "control symbol"),
        (replace(SHORT, prefix=(20,) * TARGET_LIMIT), "the prefix has 64 tokens"),
        (replace(SHORT, options=SearchOptions(beam=17)), "beam of 17 is over the limit of 16"),
        (replace(SHORT, options=SearchOptions(nbest=2)), "n-best"),
        (replace(SHORT, options=SearchOptions(forced_length=TARGET_LIMIT + 1)), "forced length"),
    ],
)
def test_bad_jobs_are_refused_at_once(model: Opened, make_engine: EngineMaker, ask: Ask, match: str) -> None:
    script = Script()
    engine = make_engine(model, script)
    with pytest.raises(InvalidInput, match=match):
        engine.submit(Answers().job(ask))
    assert [type(error) for error in script.rejections] == [InvalidInput]
    assert engine.snapshot().rejected == 1
    assert is_empty(engine.snapshot())


def test_a_job_is_submitted_once(model: Opened, make_engine: EngineMaker) -> None:
    answers = Answers()
    engine = make_engine(model)
    job = answers.job(LONG)
    engine.submit(job)
    with pytest.raises(InvalidInput, match="before"):
        engine.submit(job)
    answers.results([job])


def test_lengths_at_the_limits_are_served(model: Opened, make_engine: EngineMaker) -> None:
    full = SearchOptions(forced_length=TARGET_LIMIT)
    asks = [
        Ask((*(20 + i % 50 for i in range(SOURCE_LIMIT - 1)), EOS), full),
        Ask((EOS,), full),
        Ask((20, EOS), SearchOptions(forced_length=1), prefix=(20,) * (TARGET_LIMIT - 1)),
    ]
    results = run_all(make_engine(model), asks)
    assert [len(result.hypotheses[0].tokens) for result in results] == [TARGET_LIMIT] * 3


def test_a_beam_wider_than_the_vocabulary_is_served(model: Opened, make_engine: EngineMaker) -> None:
    bundle, _ = model
    wide = bundle.manifest.target_codec.size // 2 + 5
    options = SearchOptions(beam=wide, nbest=wide, max_length_margin=1, max_length_ratio=0.0)
    (result,) = run_all(make_engine(model, rows=wide), [Ask((20, EOS), options)])
    assert len(result.hypotheses) == wide


def test_callbacks_and_observers_that_fail_hurt_nobody(
    model: Opened, make_engine: EngineMaker, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*values: object) -> None:
        raise ZeroDivisionError("on purpose")

    class Failing:
        rejected = started = encoded = stepped = finished = staticmethod(fail)

    engine = make_engine(model, Failing())
    answers = Answers()
    with caplog.at_level(logging.CRITICAL):
        engine.submit(Job(SHORT.source, SHORT.options, fail))
        job = answers.job(SHORT)
        engine.submit(job)
        answers.results([job])
        engine.stop(WAIT)
    assert engine.snapshot().ok == 2


def test_a_fault_of_the_engine_itself_answers_everyone_and_passes(
    model: Opened, make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(model, rows=2)
    plain, calls = engine._runner.run, []

    def run(plan: Any) -> Any:
        calls.append(plan)
        if len(calls) == 5:
            raise MemoryError
        return plain(plan)

    monkeypatch.setattr(engine._runner, "run", run)
    answers = Answers()
    jobs = [answers.job(LONG) for _ in range(5)]
    with caplog.at_level(logging.CRITICAL):
        for job in jobs:
            engine.submit(job)
        outcomes = answers.wait(jobs)
    assert any(isinstance(outcome, ModelFailure) for outcome in outcomes)
    (result,) = run_all(engine, [LONG])
    assert len(result.hypotheses[0].tokens) == TARGET_LIMIT - 1
    assert is_empty(engine.snapshot())


def test_alignments_are_those_of_each_hypothesis_alone(opened: dict[str, Opened], make_engine: EngineMaker) -> None:
    bundle, stages = opened["attending"]
    assert stages.align is not None
    options = SearchOptions(beam=4, nbest=4, max_length_margin=9, max_length_ratio=0.0)
    asks = [Ask((20 + i, 21, 22, EOS), options) for i in range(4)]
    answers = Answers()
    engine = make_engine((bundle, stages))
    jobs = [answers.job(ask, align=True) for ask in asks]
    for job in jobs:
        engine.submit(job)
    for ask, result in zip(asks, answers.results(jobs), strict=True):
        assert len(result.hypotheses) == 4
        assert not same(result.hypotheses, decode_alone(bundle, stages, ask.source, ask.options))
        for hypothesis in result.hypotheses:
            target = np.array([[bundle.manifest.special.bos, *hypothesis.tokens]])
            feed = {"source": np.array([ask.source]), "lengths": np.array([4], np.int32), "target": target}
            (wanted,) = stages.align.run(["alignment"], feed)
            assert hypothesis.alignment is not None
            assert hypothesis.alignment.shape == (len(hypothesis.tokens) + 1, 4)
            np.testing.assert_allclose(hypothesis.alignment, wanted[0], rtol=1e-5)
            np.testing.assert_allclose(hypothesis.alignment.sum(-1), 1.0, rtol=1e-5)


def test_an_alignment_takes_no_more_positions_than_the_decoder_has(
    opened: dict[str, Opened], make_engine: EngineMaker
) -> None:
    answers = Answers()
    engine = make_engine(opened["attending"])
    job = answers.job(Ask((20, EOS), SearchOptions(forced_length=TARGET_LIMIT)), align=True)
    engine.submit(job)
    (result,) = answers.results([job])
    assert result.hypotheses[0].alignment is not None
    assert result.hypotheses[0].alignment.shape == (TARGET_LIMIT, 2)
    assert result.align_seconds > 0


def test_alignments_of_a_model_without_them_are_refused(opened: dict[str, Opened], make_engine: EngineMaker) -> None:
    engine = make_engine(opened["recurrent"])
    with pytest.raises(Unsupported, match="tiny-recurrent"):
        engine.submit(Answers().job(SHORT, align=True))


class Failing:
    """A graph that fails whenever it is run."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph

    def run(self, *arguments: Any) -> Any:
        raise RuntimeError("no\nsuch luck")

    run_with_iobinding = run

    def __getattr__(self, name: str) -> Any:
        return getattr(self.graph, name)


def test_an_alignment_that_fails_fails_its_job(opened: dict[str, Opened], make_engine: EngineMaker) -> None:
    bundle, stages = opened["attending"]
    engine = make_engine((bundle, replace(stages, align=Failing(stages.align))))
    answers = Answers()
    jobs = [answers.job(SHORT, align=True), answers.job(SHORT)]
    for job in jobs:
        engine.submit(job)
    failed, fine = answers.wait(jobs)
    assert str(failed) == "the align graph failed: no such luck"
    assert isinstance(fine, Result)


@pytest.mark.parametrize("stage", ["encode", "step"])
def test_an_engine_does_not_start_with_a_graph_that_fails(model: Opened, make_engine: EngineMaker, stage: str) -> None:
    bundle, stages = model
    engine = make_engine((bundle, replace(stages, **{stage: Failing(getattr(stages, stage))})), start=False)
    with pytest.raises(BundleError, match=f"the {stage} graph failed: no such luck"):
        engine.start()
    with pytest.raises(Unavailable):
        engine.submit(Answers().job(SHORT))


def test_an_engine_does_not_start_with_arrays_of_another_shape(opened: dict[str, Opened]) -> None:
    bundle, stages = opened["summing"]
    first, *others = bundle.manifest.state
    wider = first.model_copy(update={"axes": ("row", 17)})
    manifest = bundle.manifest.model_copy(update={"state": (wider, *others)})
    with pytest.raises(BundleError, match="do not fit its state"):
        Engine(replace(bundle, manifest=manifest), stages).start()


def test_graphs_that_do_not_fit_the_state_are_refused(opened: dict[str, Opened]) -> None:
    bundle, stages = opened["recurrent"]

    def engine(state: tuple[StateEntry, ...]) -> Engine:
        manifest = bundle.manifest.model_copy(update={"state": state})
        return Engine(replace(bundle, manifest=manifest), stages)

    state = bundle.manifest.state
    with pytest.raises(BundleError, match=r"inputs that the state does not name: \['memory'\]"):
        engine(state[1:])
    with pytest.raises(BundleError, match=r"step graph lacks the outputs \['next.extra'\]"):
        engine((*state, StateEntry(name="extra", dtype="float32", axes=("row", 3), role=Role.RECURRENT)))
    with pytest.raises(BundleError, match=r"encode graph lacks the outputs \['extra'\]"):
        engine((*state, StateEntry(name="extra", dtype="float32", axes=("row", 3), role=Role.MEMORY)))


def test_settings_out_of_range_are_refused(model: Opened) -> None:
    with pytest.raises(ConfigError, match="rows is 0"):
        EngineSettings(rows=0)
    with pytest.raises(ConfigError, match="MiB"):
        Engine(*model, EngineSettings(memory_bytes=16))


def test_an_idle_engine_uses_no_processor(model: Opened, make_engine: EngineMaker) -> None:
    engine = make_engine(model)
    run_all(engine, [SHORT])
    time.sleep(0.1)
    begin = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begin < 0.05


def test_snapshots_add_up_at_any_moment(model: Opened, make_engine: EngineMaker) -> None:
    engine = make_engine(model, rows=4, queue=20)
    answers, jobs = Answers(), []
    for i in range(200):
        job = answers.job(SHORT, deadline=time.monotonic() + 0.01 if i % 7 == 0 else None)
        try:
            engine.submit(job)
            jobs.append(job)
        except Overloaded:
            time.sleep(0.001)
        if i % 5 == 0:
            engine.cancel(job)
        assert balanced(engine.snapshot())
    answers.wait(jobs)
    assert is_empty(engine.snapshot())
