"""A contender in a process of its own, on a tiny bundle."""

from __future__ import annotations

import pytest

from benchmarks.contenders import Contender, ContenderFailed, installed, version_of
from benchmarks.machine import parse_cpus
from benchmarks.models import Subject
from benchmarks.offline import Plan, cell, check
from benchmarks.peers.base import Search, Weights
from benchmarks.records import Recorder
from tests.benchmarks.test_report import MACHINE
from tests.serving.engine.tiny import write_bundle

CPUS = parse_cpus("")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """A subject of which only our own formats exist."""
    folder = tmp_path_factory.mktemp("subject")
    bundle = write_bundle(folder / "bundle", "attending")
    (folder / "bundle-fp32").symlink_to("bundle")
    special = bundle.manifest.special
    return Weights(str(folder), "fuseq", bundle.manifest.target_codec.size, special.pad, special.eos, special.bos)


def test_a_contender_translates_and_tells_its_memory(weights: Weights) -> None:
    sources = [[5, 6, 7, weights.eos], [8, weights.eos]]
    with Contender("fuseq", weights, {}, CPUS) as ours:
        ours.load(sources)
        outputs = ours.outputs(Search(forced=6))
        assert [len(output) for output in outputs] == [6, 6]
        assert 0 < ours.run(Search(forced=6)) < 60
        assert ours.tokens_per_sentence == 6
        rss, peak = ours.memory()
        assert 10_000 < rss <= peak
        assert ours.disk_bytes == sum(file.stat().st_size for file in weights.path("bundle").iterdir())
        steps = ours.call("step_times", batch=sources, search=Search(forced=6).to_json())["steps"]
        assert len(steps) >= 6
        found = ours.call("in_flight", batch=sources, search=Search(forced=3).to_json(), concurrency=3, seconds=0.2)
        assert found["tokens"] == 3 * found["sentences"] > 0


def test_batches_are_translated_in_turn(weights: Weights) -> None:
    short, long = [5, weights.eos], [5, 6, 7, 5, 6, weights.eos]
    with Contender("fuseq", weights, {}, CPUS) as ours:
        ours.load([short], [long, short])
        assert len(ours.outputs(Search(forced=2))) == 3
        for _ in range(3):
            ours.run(Search(forced=2))
        assert ours.tokens_per_sentence == 2
        assert ours._sentences == 1 + 2 + 1


def test_a_contender_that_cannot_be_opened_says_why_in_one_line(weights: Weights) -> None:
    with pytest.raises(ContenderFailed, match=r"fuseq .*no-such") as raised:
        Contender("fuseq", weights, {"bundle": "no-such"}, CPUS)
    assert "\n" not in str(raised.value)


def test_a_contender_that_fails_lives_on(weights: Weights) -> None:
    with Contender("fuseq", weights, {}, CPUS) as ours:
        ours.load([[weights.vocabulary + 5, weights.eos]])
        with pytest.raises(ContenderFailed, match="InvalidInput"):
            ours.run(Search())
        ours.load([[5, weights.eos]])
        assert len(ours.outputs(Search(forced=2))[0]) == 2


def test_a_process_that_ends_is_noticed(weights: Weights) -> None:
    ours = Contender("fuseq", weights, {}, CPUS)
    ours._process.kill()
    with pytest.raises(ContenderFailed, match="ended"):
        ours.memory()
    ours.close()


def test_a_cell_without_peers_has_one_record_and_agreement_is_checked_first(weights: Weights) -> None:
    subject = Subject("tiny", weights, [[5, 6, weights.eos]], forced=4, peers=())
    plan = Plan(CPUS, (1,), (2,), rounds=3, seconds=1.0)
    recorder = Recorder(None, MACHINE)
    check(subject, 1, plan, recorder)
    assert recorder.records[-1]["identical"] == 1.0
    [record] = cell(subject, 1, 2, plan)
    assert record["ours_faster"] == 1.0
    assert record["tokens_per_s"] == pytest.approx(4 * record["sentences_per_s"], rel=1e-3)
    assert record["p50_ms"] <= record["p95_ms"]


def test_who_is_installed() -> None:
    assert installed("fuseq")
    assert version_of("fuseq")
