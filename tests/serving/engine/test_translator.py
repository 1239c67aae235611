"""Text in, translations out."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serving.core.errors import (
    Cancelled,
    DeadlineExceeded,
    FuseqError,
    InvalidInput,
    ModelFailure,
    Overloaded,
    Unavailable,
    Unsupported,
)
from serving.core.types import SearchOptions, StopReason
from serving.engine.engine import Engine, EngineSettings
from serving.engine.observer import Silent
from serving.engine.translator import Translation, Translator
from tests.serving.engine.conftest import EngineMaker, Opened
from tests.serving.engine.reference import decode_alone
from tests.serving.engine.tiny import SOURCE_LIMIT, TARGET_LIMIT
from tests.serving.engine.work import WAIT

FEW = SearchOptions(max_length_margin=6, max_length_ratio=0.0)
NOTHING = ["", " ", "\t", "\n", " \r\n ", "\u3000\u00a0"]


@pytest.fixture(scope="module")
def translator(opened: dict[str, Opened]) -> Iterator[Translator]:
    bundle, stages = opened["attending"]
    with Engine(bundle, stages, EngineSettings(rows=16, queue=16)) as engine:
        yield Translator(bundle, engine)


def text_of(answer: Translation | FuseqError) -> str:
    assert isinstance(answer, Translation), answer
    return answer.text


@pytest.mark.parametrize("text", NOTHING)
def test_case_1_nothing_translates_to_nothing_without_a_graph(translator: Translator, text: str) -> None:
    before = translator.engine.snapshot()
    (answer,) = translator.translate([text], SearchOptions(beam=4, nbest=2), prefix_text="so", align=True)
    assert isinstance(answer, Translation)
    assert (answer.text, answer.score, answer.tokens, answer.truncated) == ("", 0.0, (), False)
    assert (answer.stop_reason, answer.steps, answer.total_seconds) == (StopReason.EOS, 0, 0.0)
    assert [candidate.text for candidate in answer.hypotheses] == [""]
    after = translator.engine.snapshot()
    assert (after.received, after.encodes, after.steps) == (before.received, before.encodes, before.steps)


def test_case_3_nothings_among_texts_keep_count_and_order(translator: Translator) -> None:
    texts = ["", "the cat sat", " ", "a dog ran", "\n"]
    together = [text_of(answer) for answer in translator.translate(texts, FEW)]
    alone = [text_of(translator.translate([text], FEW)[0]) for text in texts]
    assert together == alone
    assert [bool(text) for text in together] == [False, True, False, True, False]


def test_a_translation_says_what_the_engine_found(translator: Translator, opened: dict[str, Opened]) -> None:
    bundle, stages = opened["attending"]
    options = SearchOptions(beam=4, nbest=3, max_length_margin=8, max_length_ratio=0.0)
    (answer,) = translator.translate(["we eat bread"], options, align=True)
    assert isinstance(answer, Translation)
    codec = translator.source_codec
    source = [*codec.encode("we eat bread"), codec.special.eos]
    wanted = decode_alone(bundle, stages, source, options)
    assert [c.tokens for c in answer.hypotheses] == [tuple(codec.pieces(h.tokens)) for h in wanted]
    assert [c.text for c in answer.hypotheses] == [codec.decode(h.tokens) for h in wanted]
    assert [c.score for c in answer.hypotheses] == pytest.approx([h.score for h in wanted], abs=1e-5)
    best = answer.hypotheses[0]
    assert (answer.text, answer.score, answer.tokens) == (best.text, best.score, best.tokens)
    assert answer.stop_reason is best.stop_reason
    assert answer.source_tokens == tuple(codec.pieces(source))
    assert answer.alignment is not None
    assert answer.alignment.shape == (len(answer.tokens) + 1, len(answer.source_tokens))
    assert answer.steps > 0
    assert answer.total_seconds > 0


def test_a_forced_prefix_begins_the_translation(translator: Translator) -> None:
    for beam in (1, 4):
        options = SearchOptions(beam=beam, nbest=beam, max_length_margin=8)
        (answer,) = translator.translate(["rain falls"], options, prefix_text="the green hill")
        assert isinstance(answer, Translation)
        assert all(candidate.text.startswith("the green hill") for candidate in answer.hypotheses)
    (free,) = translator.translate(["rain falls"], SearchOptions(max_length_margin=8))
    assert not text_of(free).startswith("the green hill")


def text_with(translator: Translator, tokens: int) -> str:
    """A text of exactly so many tokens, the end symbol not counted."""
    texts = ("日" * 20 + "q" * count for count in itertools.count())  # an unknown letter is a token a byte
    text = next(text for text in texts if len(translator.source_codec.encode(text)) >= tokens)
    assert len(translator.source_codec.encode(text)) == tokens
    return text


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_case_23_the_limit_counts_the_end_symbol(translator: Translator, over: int) -> None:
    text = text_with(translator, SOURCE_LIMIT - 1 + over)
    ids = translator.source_codec.encode(text)
    assert len(ids) + 1 == SOURCE_LIMIT + over
    (answer,) = translator.translate([text], FEW)
    if over <= 0:
        assert isinstance(answer, Translation)
        assert not answer.truncated
        assert len(answer.source_tokens) == SOURCE_LIMIT + over
    else:
        assert isinstance(answer, InvalidInput)
        assert f"{SOURCE_LIMIT + 1} tokens" in str(answer)
    (cut,) = translator.translate([text], FEW, truncate=True)
    assert isinstance(cut, Translation)
    assert cut.truncated == (over > 0)
    assert len(cut.source_tokens) == min(SOURCE_LIMIT, SOURCE_LIMIT + over)
    prepared = translator.prepare(text, truncate=True)
    assert prepared.source == (*ids[: SOURCE_LIMIT - 1], translator.source_codec.special.eos)


def test_one_bad_text_leaves_the_others_alone(translator: Translator) -> None:
    texts = ["the cat sat", "broken \ud800 text", "x" * 1000, "a dog ran"]
    answers = translator.translate(texts, FEW)
    assert [isinstance(answer, InvalidInput) for answer in answers] == [False, True, True, False]
    assert text_of(answers[3]) == text_of(translator.translate(["a dog ran"], FEW)[0])


def test_many_more_texts_than_the_queue_holds(translator: Translator) -> None:
    texts = [f"a dog ran {i % 30}" for i in range(200)]
    answers = translator.translate(texts, FEW)
    assert [text_of(answer) for answer in answers[30:60]] == [text_of(answer) for answer in answers[:30]]
    assert len(answers) == 200


def test_two_callers_share_a_queue_too_small_for_both(translator: Translator) -> None:
    counts: list[int] = []

    def call() -> None:
        answers = translator.translate(["the cat sat on the mat"] * 60, FEW)
        counts.append(sum(isinstance(answer, Translation) for answer in answers))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert counts == [60] * 4


def test_no_texts_at_all(translator: Translator) -> None:
    assert translator.translate([]) == []


def test_the_bundles_search_is_the_default(translator: Translator) -> None:
    assert translator.default_options == SearchOptions(beam=1, length_penalty=0.6)
    explicit = translator.translate(["rain"], SearchOptions())
    assert text_of(translator.translate(["rain"])[0]) == text_of(explicit[0])


def test_submitting_without_waiting(translator: Translator) -> None:
    done = threading.Event()
    answers: list[Translation | FuseqError] = []
    job = translator.submit_text("the cat", FEW, on_done=lambda answer: (answers.append(answer), done.set()))
    assert job is not None
    assert done.wait(WAIT)
    assert text_of(answers[0]) == text_of(translator.translate(["the cat"], FEW)[0])
    assert translator.submit_text("  ", on_done=answers.append) is None
    assert text_of(answers[1]) == ""
    with pytest.raises(InvalidInput):
        translator.submit_text("x" * 1000, on_done=answers.append)
    with pytest.raises(InvalidInput, match="beam"):
        translator.submit_text("x", SearchOptions(beam=1000), on_done=answers.append)
    assert len(answers) == 2


def test_a_codec_that_fails_is_heard_of(
    opened: dict[str, Opened], make_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(ids: object) -> str:
        raise ZeroDivisionError("on purpose")

    broken = Translator(opened["attending"][0], make_engine(opened["attending"]))
    monkeypatch.setattr(broken.target_codec, "decode", fail)
    (answer,) = broken.translate(["the cat"], FEW)
    assert isinstance(answer, ModelFailure)
    assert "on purpose" in str(answer)


def test_cancelling_and_deadlines_reach_the_engine(opened: dict[str, Opened], make_engine: EngineMaker) -> None:
    class Slow(Silent):
        def stepped(self, rows: int, seconds: float) -> None:
            time.sleep(0.005)

    engine = make_engine(opened["attending"], Slow())
    translator = Translator(opened["attending"][0], engine)
    long = SearchOptions(forced_length=TARGET_LIMIT)
    done = threading.Event()
    answers: list[Translation | FuseqError] = []
    job = translator.submit_text("the cat", long, on_done=lambda answer: (answers.append(answer), done.set()))
    assert job is not None
    engine.cancel(job)
    assert done.wait(WAIT)
    assert isinstance(answers[0], Cancelled)
    (late,) = translator.translate(["the cat"], long, deadline=time.monotonic() + 0.03)
    assert isinstance(late, DeadlineExceeded)
    engine.stop()
    (gone,) = translator.translate(["the cat"])
    assert isinstance(gone, Unavailable)


def test_a_queue_full_of_others_jobs_is_waited_for_until_the_deadline(
    opened: dict[str, Opened], make_engine: EngineMaker
) -> None:
    let_go = threading.Event()

    class Held(Silent):
        def stepped(self, rows: int, seconds: float) -> None:
            let_go.wait(WAIT)

    engine = make_engine(opened["attending"], Held(), rows=1, queue=1)
    translator = Translator(opened["attending"][0], engine)
    submitted = 0
    while submitted < 2:  # one that runs and one that waits
        try:
            translator.submit_text("a", FEW, on_done=lambda answer: None)
            submitted += 1
        except Overloaded:
            time.sleep(0.001)
    (late,) = translator.translate(["b"], FEW, deadline=time.monotonic() + 0.1)
    assert isinstance(late, DeadlineExceeded)
    let_go.set()
    assert text_of(translator.translate(["b"], FEW)[0])


def test_alignments_of_a_model_without_them(opened: dict[str, Opened], make_engine: EngineMaker) -> None:
    bundle, _ = opened["recurrent"]
    translator = Translator(bundle, make_engine(opened["recurrent"]))
    (answer,) = translator.translate(["the cat"], align=True)
    assert isinstance(answer, Unsupported)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=6))
def test_any_text_has_an_answer_in_its_place(translator: Translator, texts: list[str]) -> None:
    answers = translator.translate(texts, FEW, truncate=True)
    assert len(answers) == len(texts)
    for text, answer in zip(texts, answers, strict=True):
        assert isinstance(answer, Translation)
        assert (answer.steps > 0) == bool(text.strip() and translator.source_codec.encode(text))
