"""Scores are sacreBLEU's, and outputs that are no translations are seen."""

from __future__ import annotations

import pytest
import sacrebleu

from serving.core.errors import InvalidInput
from training.metrics import DegenerateOutputs, Faults, find_faults, score

HYPOTHESES = ["the cat sits on the mat", "a dog runs in the park today", "we eat bread"]
REFERENCES = [
    ["the cat is on the mat", "the cat sits on a mat"],
    ["a dog is running in the park today"],
    ["we are eating bread", "we eat some bread", "we have bread"],
]


def test_one_reference_is_sacrebleu() -> None:
    singles = [references[0] for references in REFERENCES]
    scores = score(HYPOTHESES, [[reference] for reference in singles])
    assert scores.bleu == sacrebleu.corpus_bleu(HYPOTHESES, [singles]).score
    assert scores.chrf == sacrebleu.corpus_chrf(HYPOTHESES, [singles]).score
    assert scores.bleu_signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:")
    assert scores.chrf_signature.startswith("nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:")


def test_uneven_references_equal_those_filled_up_with_repetitions() -> None:
    # A reference that stands twice changes neither BLEU (clipping by the largest count) nor chrF (the best one).
    filled = [(references * 3)[:3] for references in REFERENCES]
    streams = [list(stream) for stream in zip(*filled, strict=True)]
    scores = score(HYPOTHESES, REFERENCES)
    assert scores.bleu == pytest.approx(sacrebleu.corpus_bleu(HYPOTHESES, streams).score)
    assert scores.chrf == pytest.approx(sacrebleu.corpus_chrf(HYPOTHESES, streams).score)
    assert scores.bleu > score(HYPOTHESES, [references[:1] for references in REFERENCES]).bleu
    assert scores.bleu_signature.startswith("nrefs:var|")


def test_perfect_and_hopeless() -> None:
    perfect = score(HYPOTHESES, [[text] for text in HYPOTHESES])
    assert (perfect.bleu, perfect.chrf) == pytest.approx((100.0, 100.0))
    assert score(["", "", ""], REFERENCES).bleu == 0.0


@pytest.mark.parametrize(("hypotheses", "references"), [([], []), (["a"], [["a"], ["b"]]), (["a"], [[]])])
def test_what_cannot_be_scored_is_said(hypotheses: list[str], references: list[list[str]]) -> None:
    with pytest.raises(InvalidInput, match="cannot be scored"):
        score(hypotheses, references)


SOURCES = [
    "the first of ten sentences",
    "Tom!",
    "我不知道他们明天会不会来这里参加这个会议",
    *(f"sentence number {n} of ten" for n in range(7)),
]


def test_healthy_outputs_have_no_faults() -> None:
    texts = [f"Satz {n}" for n in range(10)]
    assert find_faults(SOURCES, texts) == Faults(0.0, 0.0, 0.0)
    find_faults(SOURCES, texts).check()


def test_each_fault_is_a_share() -> None:
    assert find_faults(SOURCES, [*[" "] * 3, *map(str, range(7))]).empty == pytest.approx(0.3)
    # A name may stay as it is; sentences, and texts without spaces, may not.
    assert find_faults(SOURCES, [*SOURCES[:5], *map(str, range(5))]).copied == pytest.approx(4 / 9)
    assert find_faults(SOURCES, [*["gleich"] * 4, *map(str, range(6))]).most_common == pytest.approx(0.4)


def test_the_same_source_may_have_the_same_output() -> None:
    faults = find_faults([*["Hello."] * 5, *SOURCES[:5]], [*["Hallo."] * 5, *map(str, range(5))])
    assert faults.most_common == 0.0


@pytest.mark.parametrize(
    ("faults", "word"),
    [(Faults(0.21, 0, 0), "empty"), (Faults(0, 0.31, 0), "copy"), (Faults(0, 0, 0.31), "same")],
)
def test_degenerate_outputs_are_refused_with_a_reason(faults: Faults, word: str) -> None:
    with pytest.raises(DegenerateOutputs, match=word) as error:
        faults.check()
    assert "\n" not in str(error.value)


def test_the_thresholds_themselves_pass() -> None:
    Faults(0.2, 0.3, 0.3).check()
