"""Texts become the ids that MarianTokenizer makes of them, and ids the texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MarianTokenizer

from export.huggingface.reader import Checkpoint
from serving.core.codecs import Codec
from tests.export.huggingface.reference import TINY, sentences, write_random

TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40),
    st.text("acdeghinorst<>/ \u2581\u00df\u00fc\u3000\u200b", max_size=30),
    st.lists(st.sampled_from([">>deu<<", ">>nld<<", ">>xyz<<", " ", "dog", ">>", "<<"]), max_size=5).map("".join),
)


class Both:
    """A checkpoint's tokenizer in `transformers`, and our codecs."""

    def __init__(self, folder: Path, separate: bool) -> None:
        write_random(folder, TINY, separate=separate)
        # Unless told so, MarianTokenizer finds control symbols in a text: "</s>" ends it. Ours never does.
        self.theirs = MarianTokenizer.from_pretrained(folder, split_special_tokens=True)
        codecs = Checkpoint.open(folder).codecs()
        self.source: Codec = codecs.source.codec()
        self.target: Codec = codecs.target.codec()


@pytest.fixture(scope="module", params=[False, True], ids=["joint", "separate"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(tmp_path_factory.mktemp("checkpoint"), request.param)


@settings(max_examples=150, deadline=None)
@given(TEXTS)
def test_any_text_has_the_same_ids(both: Both, text: str) -> None:
    for ours, theirs in ((both.source, both.theirs(text)), (both.target, both.theirs(text_target=text))):
        assert [*ours.encode(text), ours.special.eos] == theirs["input_ids"]


def test_sentences_have_the_same_ids_and_come_back(both: Both) -> None:
    texts = sentences(100)
    for text, theirs in zip(texts, both.theirs(texts)["input_ids"], strict=True):
        assert [*both.source.encode(text), both.source.special.eos] == theirs
        assert both.source.pieces(theirs) == both.theirs.convert_ids_to_tokens(theirs) or both.theirs.separate_vocabs


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 10**6), max_size=15))
def test_any_ids_are_the_same_text(both: Both, numbers: list[int]) -> None:
    ids = [number % both.target.size for number in numbers]
    # Tiny vocabularies of two sizes have pad at two places, and the configuration can name only one.
    pads = {both.target.special.pad, both.theirs.pad_token_id}
    ids = [i for i in ids if i not in pads and both.target.pieces([i]) != ["<pad>"]]
    assert both.target.decode(ids) == both.theirs.decode(ids, skip_special_tokens=True)


def test_where_it_differs_on_purpose(both: Both) -> None:
    """A control symbol that is spelt out in a text is text, and a NUL does not end it."""
    both.theirs.split_special_tokens = False
    try:
        assert both.theirs("a </s> b")["input_ids"].count(0) == 2
    finally:
        both.theirs.split_special_tokens = True
    assert 0 not in both.source.encode("a </s> b")
    assert both.source.encode("dog\0cat") == both.source.encode("dog cat")
