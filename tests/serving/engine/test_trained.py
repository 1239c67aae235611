"""The promises of the engine on trained models: the bundled one, a tiny recurrent one, and those --bundle names."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuseq import bundled_model
from serving.core.codecs import open_codec
from serving.core.manifest import Bundle, open_bundle
from serving.core.types import SearchOptions, StopReason
from serving.engine.sessions import open_stages
from tests.serving.engine.conftest import EngineMaker
from tests.serving.engine.test_invariance import neighbour_sets_agree
from tests.serving.engine.work import Ask, run_all, same

ROOT = Path(__file__).parents[3]
SENTENCES = (ROOT / "docs" / "sentences.en.txt").read_text(encoding="utf-8").splitlines()
TINY = ROOT / "tests" / "data" / "bahdanau-tiny"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every precision of every bundle."""
    if "trained" not in metafunc.fixturenames:
        return
    paths = [bundled_model(), TINY, *metafunc.config.getoption("--bundle")]
    found = [(open_bundle(path), precision) for path in paths for precision in open_bundle(path).manifest.precisions]
    metafunc.parametrize("trained", found, ids=[f"{bundle.path.name}-{precision}" for bundle, precision in found])


def encoded(bundle: Bundle) -> list[list[int]]:
    codec = open_codec(bundle, bundle.manifest.source_codec)
    return [[*codec.encode(sentence), codec.special.eos] for sentence in SENTENCES]


def check_neighbours(trained: tuple[Bundle, str], make_engine: EngineMaker, sets: int) -> None:
    bundle, precision = trained
    opened = bundle, open_stages(bundle, precision, "cpu", threads=1)
    neighbour_sets_agree(opened, make_engine, sets, encoded(bundle))


def test_case_40_case_57_neighbours_change_nothing(trained: tuple[Bundle, str], make_engine: EngineMaker) -> None:
    check_neighbours(trained, make_engine, sets=6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_case_40_case_57_500_neighbour_sets_change_nothing(
    trained: tuple[Bundle, str], make_engine: EngineMaker
) -> None:
    check_neighbours(trained, make_engine, sets=500)


def test_case_47_the_best_hypothesis_is_the_same_for_every_nbest(
    trained: tuple[Bundle, str], make_engine: EngineMaker
) -> None:
    bundle, precision = trained
    engine = make_engine((bundle, open_stages(bundle, precision, "cpu", threads=1)))
    sources = [tuple(ids) for ids in encoded(bundle)]
    best = [
        [result.hypotheses[:1] for result in run_all(engine, [Ask(s, SearchOptions(beam=4, nbest=n)) for s in sources])]
        for n in (1, 2, 4)
    ]
    for one, two, four in zip(*best, strict=True):
        assert not same(one, two, tolerance=1e-5)
        assert not same(one, four, tolerance=1e-5)


def test_ordinary_sentences_end_by_themselves(trained: tuple[Bundle, str], make_engine: EngineMaker) -> None:
    bundle, precision = trained
    engine = make_engine((bundle, open_stages(bundle, precision, "cpu", threads=1)))
    results = run_all(engine, [Ask(tuple(ids), SearchOptions(beam=4)) for ids in encoded(bundle)])
    ended = [result.hypotheses[0].stop_reason is StopReason.EOS for result in results]
    assert sum(ended) >= len(ended) - 1
