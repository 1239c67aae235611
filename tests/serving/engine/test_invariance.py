"""What a job gets does not depend on its neighbours, on when it joined, or on there being an engine at all."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from serving.core.manifest import Bundle
from serving.core.state_spec import Role
from serving.engine.observer import Silent
from serving.engine.sessions import open_stages
from tests.serving.engine.conftest import EngineMaker, Opened
from tests.serving.engine.reference import decode_alone
from tests.serving.engine.work import Answers, Ask, random_ask, run_all, same

POOL = 60  # different jobs, of which the neighbour sets are drawn


class Joiner(Silent):
    """Submits the next job after a random number of steps, so that jobs join while others run."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.released = threading.Semaphore(0)

    def stepped(self, rows: int, seconds: float) -> None:
        for _ in range(int(self.rng.choice([0, 0, 1, 1, 2, 4]))):
            self.released.release()


def neighbour_sets_agree(
    model: Opened, make_engine: EngineMaker, sets: int, sources: Sequence[Sequence[int]] = ()
) -> None:
    """Random sets of jobs with random join times, each job compared with the same job run alone.

    Half of the jobs take their source from `sources`, where there are any.

    Tokens must be identical and fp32 scores equal to 1e-5; the tokens of other precisions must be identical, too.
    """
    bundle, _ = model
    rng = np.random.default_rng(57)
    vocabulary = bundle.manifest.target_codec.size
    pool = [random_ask(rng, vocabulary) for _ in range(POOL)]
    for index in range(0, POOL if sources else 0, 2):
        pool[index] = replace(pool[index], source=tuple(sources[int(rng.integers(len(sources)))]))
    lone = make_engine(model)
    alone = [run_all(lone, [ask])[0].hypotheses for ask in pool]
    joiner = Joiner(seed=1)
    engine = make_engine(model, joiner, rows=24)
    differences = []
    mixed = 0
    for number in range(sets):
        chosen = rng.integers(0, POOL, rng.integers(2, 25))
        answers = Answers()
        jobs = [answers.job(pool[i]) for i in chosen]
        for position, job in enumerate(jobs):
            if position > len(jobs) // 3:  # the first third joins at once, the others while it runs
                joiner.released.acquire(timeout=0.02)
            engine.submit(job)
        results = answers.results(jobs)
        mixed += len({result.first_step for result in results}) > 1
        for i, result in zip(chosen, results, strict=True):
            if difference := same(result.hypotheses, alone[i], tolerance=1e-5):
                differences.append((number, int(i), difference))
    assert not differences, differences[:3]
    assert mixed > sets // 2  # else nothing joined a running batch
    assert engine.snapshot().rows == 0


def test_case_57_neighbours_and_join_times_change_nothing(model: Opened, make_engine: EngineMaker) -> None:
    neighbour_sets_agree(model, make_engine, sets=20)


@pytest.mark.slow
def test_case_57_500_neighbour_sets_change_nothing(model: Opened, make_engine: EngineMaker) -> None:
    neighbour_sets_agree(model, make_engine, sets=500)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("architecture", ["transformer", "bahdanau"])
def test_case_40_case_57_500_neighbour_sets_of_exported_models(
    exported: dict[str, Bundle], make_engine: EngineMaker, architecture: str, precision: str
) -> None:
    bundle = exported[architecture]
    neighbour_sets_agree((bundle, open_stages(bundle, precision, "cpu", threads=1)), make_engine, sets=500)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("architecture", ["transformer", "bahdanau"])
def test_case_53_exported_models_decode_as_in_a_plain_loop(
    exported: dict[str, Bundle], make_engine: EngineMaker, architecture: str, precision: str
) -> None:
    bundle = exported[architecture]
    stages = open_stages(bundle, precision, "cpu", threads=1)
    rng = np.random.default_rng(53)
    asks = [random_ask(rng, bundle.manifest.target_codec.size) for _ in range(100)]
    for ask, result in zip(asks, run_all(make_engine((bundle, stages)), asks), strict=True):
        assert not same(result.hypotheses, decode_alone(bundle, stages, ask.source, ask.options, ask.prefix), 1e-4), ask


def test_case_53_the_engine_decodes_what_a_plain_loop_decodes(model: Opened, make_engine: EngineMaker) -> None:
    bundle, stages = model
    rng = np.random.default_rng(53)
    asks = [random_ask(rng, bundle.manifest.target_codec.size) for _ in range(50)]
    found = run_all(make_engine(model), asks)
    reasons = set()
    for ask, result in zip(asks, found, strict=True):
        wanted = decode_alone(bundle, stages, ask.source, ask.options, ask.prefix)
        assert not same(result.hypotheses, wanted), ask
        reasons |= {hypothesis.stop_reason for hypothesis in wanted}
    assert len(reasons) > 1


@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_case_48_beams_of_any_number_of_neighbours_agree(model: Opened, make_engine: EngineMaker, rows: int) -> None:
    bundle, stages = model
    rng = np.random.default_rng(48)
    asks = []
    for _ in range(rows):
        ask = random_ask(rng, bundle.manifest.target_codec.size)
        options = type(ask.options)(beam=4, nbest=4, max_length_margin=20)
        asks.append(Ask(ask.source, options))
    for ask, result in zip(asks, run_all(make_engine(model, rows=4 * rows), asks), strict=True):
        assert not same(result.hypotheses, decode_alone(bundle, stages, ask.source, ask.options))


def test_case_55_a_short_source_next_to_a_long_one(model: Opened, make_engine: EngineMaker) -> None:
    bundle, _ = model
    rng = np.random.default_rng(55)
    size = bundle.manifest.target_codec.size
    short = Ask((20, 2), random_ask(rng, size).options)
    long = Ask((*(int(i) for i in rng.integers(10, size, 90)), 2), short.options)
    engine = make_engine(model)
    (alone,) = run_all(engine, [short])
    together = run_all(engine, [short, long])
    assert not same(together[0].hypotheses, alone.hypotheses)


def test_case_35_whatever_lies_in_unused_memory_reaches_nobody(model: Opened, make_engine: EngineMaker) -> None:
    """Huge values in every row that is not in use, and in the unused part of those that are read by length."""
    bundle, stages = model
    engine = make_engine(model, start=False)
    slots = engine._runner.slots
    for buffer in (
        *slots.memory,
        *slots.caches,
        *(d.current for d in slots.recurrent),
        *(d.other for d in slots.recurrent),
    ):
        buffer.array[...] = 1_000_000
    engine.start()
    rng = np.random.default_rng(35)
    asks = [random_ask(rng, bundle.manifest.target_codec.size) for _ in range(12)]
    for ask, result in zip(asks, run_all(engine, asks), strict=True):
        assert not same(result.hypotheses, decode_alone(bundle, stages, ask.source, ask.options, ask.prefix))


def test_the_models_between_them_have_every_kind_of_state(opened: dict[str, Opened]) -> None:
    kinds = {
        (tensor.role, tensor.axis("source") is not None, f"next.{tensor.name}" in outputs)
        for bundle, stages in opened.values()
        for outputs in [{port.name for port in stages.step.get_outputs()}]
        for tensor in bundle.manifest.state_spec()
    }
    assert kinds == {
        (Role.MEMORY, True, True),  # read by length, written in place
        (Role.MEMORY, True, False),  # read over the whole extent
        (Role.MEMORY, False, False),
        (Role.RECURRENT, False, True),
        (Role.RECURRENT, True, True),
        (Role.CACHE, False, True),
    }
