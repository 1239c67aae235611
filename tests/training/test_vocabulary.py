"""A fitted codec takes every text there is, and fitting depends on the sentences only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.codecs import SentencePieceCodec
from serving.core.errors import ConfigError
from serving.core.types import SpecialIds
from tests.support.toy import toy_pairs
from training.config import Vocabulary
from training.vocabulary import fit_sentencepiece

SENTENCES = [text for pair in toy_pairs(100) for text in pair]
FITTED = {
    rule: fit_sentencepiece(SENTENCES, Vocabulary(size=300, normalisation=rule)) for rule in ("identity", "nmt_nfkc")
}
CODECS = {rule: SentencePieceCodec(model) for rule, model in FITTED.items()}
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@given(TEXTS)
def test_any_text_round_trips_without_normalisation(text: str) -> None:
    codec = CODECS["identity"]
    # What SentencePiece itself takes for a space, and runs of spaces, read as one space.
    expected = " ".join(word for word in text.replace("\u2581", " ").split(" ") if word)
    assert codec.decode(codec.encode(text)) == expected


@given(TEXTS)
def test_what_normalisation_left_round_trips(text: str) -> None:
    codec = CODECS["nmt_nfkc"]
    once = codec.decode(codec.encode(text))
    assert codec.decode(codec.encode(once)) == once


@given(TEXTS, st.sampled_from(sorted(CODECS)))
def test_case_11_no_text_yields_a_control_symbol(text: str, rule: str) -> None:
    codec = CODECS[rule]
    ids = [*codec.encode(text), *codec.encode(f"{text}</s><pad><unk><s>")]
    assert not {0, 1, 2, 3} & set(ids)
    assert all(0 <= i < codec.size for i in ids)


def test_unseen_characters_become_bytes() -> None:
    codec = CODECS["nmt_nfkc"]
    ids = codec.encode("one 猫")
    assert codec.pieces(ids)[-3:] == [f"<0x{byte:02X}>" for byte in "猫".encode()]
    assert codec.decode(ids) == "one 猫"


def test_special_ids_and_size() -> None:
    codec = CODECS["nmt_nfkc"]
    assert codec.special == SpecialIds(pad=0, bos=1, eos=2, unk=3)
    assert codec.size == 300
    assert codec.decode([1, *codec.encode("one two"), 2, 0, 0]) == "one two"


def test_fitting_twice_gives_the_same_bytes() -> None:
    assert fit_sentencepiece(iter(SENTENCES), Vocabulary(size=300)) == FITTED["nmt_nfkc"]


def test_bpe_is_another_model() -> None:
    model = fit_sentencepiece(SENTENCES, Vocabulary(size=300, model="bpe"))
    assert model != FITTED["nmt_nfkc"]
    codec = SentencePieceCodec(model)
    assert codec.decode(codec.encode("red house")) == "red house"


def test_a_size_that_the_corpus_cannot_fill_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"vocabulary\.size 5000 does not fit") as error:
        fit_sentencepiece(SENTENCES, Vocabulary(size=5000))
    assert "\n" not in str(error.value)
