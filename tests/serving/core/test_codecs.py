from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.codecs import SentencePieceCodec, VocabularyCodec, make_codec, open_codec
from serving.core.errors import BundleDamaged, BundleError, InvalidInput
from serving.core.manifest import Bundle, CodecEntry
from tests.serving.engine.tiny import codec_model, write_bundle
from tests.support.marian import LANGUAGES, source_model, target_model, vocabulary

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PROBES = [
    "the cat",
    "</s>",
    "<pad><unk><s>",
    "a </s> b",
    "<0x41>",
    "▁▁",
    "日本語",
    "👩‍👩‍👧 ok",
    "\0",
    "a\0b",
    "\ufeffx",
]


@pytest.fixture(scope="module")
def codec() -> SentencePieceCodec:
    return SentencePieceCodec(codec_model())


@settings(max_examples=200, deadline=None)
@given(st.one_of(TEXTS, st.sampled_from(PROBES)))
def test_case_11_no_text_yields_a_control_symbol_or_an_id_out_of_range(codec: SentencePieceCodec, text: str) -> None:
    ids = codec.encode(text)
    special = codec.special
    assert all(0 <= i < codec.size for i in ids)
    assert not {special.pad, special.bos, special.eos, special.unk} & set(ids)  # byte fallback knows every character
    assert isinstance(codec.decode(ids), str)
    assert len(codec.pieces(ids)) == len(ids)


@pytest.mark.parametrize("text", ["</s>", "<pad>", "<unk>", "<s>", "a </s> b"])
def test_case_11_the_names_of_control_symbols_are_plain_text(codec: SentencePieceCodec, text: str) -> None:
    assert codec.decode(codec.encode(text)) == text


def test_plain_text_comes_back(codec: SentencePieceCodec) -> None:
    for text in ("the cat sat on the mat", "日本語", "naïve café", "x 👩‍👩‍👧 y", "1 + 1 = 2"):
        assert codec.decode(codec.encode(text)) == text


def test_nothing_has_no_ids(codec: SentencePieceCodec) -> None:
    for text in ("", " ", "\t\n ", "\u3000"):
        assert codec.encode(text) == []
    assert codec.decode([]) == ""
    special = codec.special
    assert codec.decode([special.bos, special.eos, special.pad, special.unk]) == ""


@pytest.mark.parametrize("text", ["\ud800", "fine until \udfff here"])
def test_a_lone_surrogate_is_refused_with_its_place(codec: SentencePieceCodec, text: str) -> None:
    at = next(i for i, character in enumerate(text) if 0xD800 <= ord(character) < 0xE000)
    with pytest.raises(InvalidInput, match=f"not valid Unicode at character {at}"):
        codec.encode(text)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    path = tmp_path / "text.model"
    path.write_bytes(b"not a model")
    with pytest.raises(BundleDamaged):
        SentencePieceCodec.load(path)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("bundles") / "summing", "summing")


def test_a_codec_must_fit_the_manifest(bundle: Bundle) -> None:
    entry = bundle.manifest.source_codec
    assert open_codec(bundle, entry).size == entry.size
    with pytest.raises(BundleError, match="ids, the manifest says"):
        open_codec(bundle, entry.model_copy(update={"size": entry.size + 1}))
    with pytest.raises(BundleError, match="'runes' is unknown; this fuseq knows sentencepiece"):
        open_codec(bundle, CodecEntry(kind="runes", file=entry.file, size=entry.size))


# The codec of Marian's models: one SentencePiece model cuts, a vocabulary of both languages numbers.

VOCABULARY = vocabulary(source_model(), target_model(), extra=LANGUAGES)


def vocabulary_file(**changed: object) -> bytes:
    last = len(VOCABULARY) - 1
    return json.dumps({"pad": last, "bos": last, "eos": 0, "unk": 1, "pieces": list(VOCABULARY), **changed}).encode()


@pytest.fixture(scope="module")
def marian() -> VocabularyCodec:
    return VocabularyCodec(source_model(), vocabulary_file())


@settings(max_examples=200, deadline=None)
@given(st.one_of(TEXTS, st.sampled_from(PROBES), st.text("<>/spadunk \u2581", max_size=12)))
def test_case_11_no_text_yields_pad_begin_or_end_through_a_vocabulary(marian: VocabularyCodec, text: str) -> None:
    ids = marian.encode(text)
    assert all(0 < i < marian.size - 1 for i in ids)  # 0 is the end, the last one is pad
    assert isinstance(marian.decode(ids), str)
    assert len(marian.pieces(ids)) == len(ids)


def test_case_11_a_control_symbol_spelt_out_is_unknown_text_at_most() -> None:
    """SentencePiece gives characters that it does not know as one piece, here "</>" which the vocabulary has as pad."""
    codec = VocabularyCodec(source_model(), vocabulary_file(pieces=[*list(VOCABULARY)[:-1], "</>"]))
    assert codec.pieces(codec.encode("cat </>")) == [*codec.pieces(codec.encode("cat")), "\u2581", "<unk>"]


def test_pieces_have_the_numbers_of_the_vocabulary(marian: VocabularyCodec) -> None:
    ids = marian.encode("one red dog")
    assert ids == [VOCABULARY[piece] for piece in marian.pieces(ids)]
    assert marian.decode(ids) == "one red dog"
    assert marian.encode("\u2622") == [VOCABULARY["\u2581"], 1]  # a character that nobody knows
    assert marian.encode("\u00e4") == [VOCABULARY["\u2581"], VOCABULARY["\u00e4"]]  # one that only the vocabulary knows


def test_a_language_token_in_front_is_one_piece(marian: VocabularyCodec) -> None:
    assert set(marian.language_tokens) == set(LANGUAGES)
    assert marian.encode(">>deu<< one dog") == [VOCABULARY[">>deu<<"], *marian.encode("one dog")]
    assert marian.encode(">>nld<<") == [VOCABULARY[">>nld<<"]]
    assert marian.encode(">>xyz<< dog") == [1, *marian.encode("dog")]
    assert VOCABULARY[">>deu<<"] not in marian.encode("dog >>deu<< dog")
    assert marian.decode(marian.encode(">>deu<< dog")) == ">>deu<< dog"


def test_control_symbols_are_dropped_from_outputs(marian: VocabularyCodec) -> None:
    ids = marian.encode("red cat")
    assert marian.decode([marian.special.bos, *ids, 1, 0, marian.special.pad]) == "red cat"
    assert marian.encode("") == marian.encode(" \n") == []
    with pytest.raises(InvalidInput, match="not valid Unicode"):
        marian.encode("\ud800")


@pytest.mark.parametrize("content", [b"[]", b"{", b"{}", b"\xff", vocabulary_file(eos=-1), vocabulary_file(pad=9999)])
def test_a_damaged_vocabulary_is_refused(content: bytes) -> None:
    with pytest.raises(BundleDamaged, match="vocabulary of the codec"):
        VocabularyCodec(source_model(), content)


def test_the_kind_and_the_files_of_a_codec_must_go_together() -> None:
    contents = {"m": source_model(), "v": vocabulary_file()}
    entry = CodecEntry(kind="sentencepiece-vocabulary", file="m", vocabulary="v", size=len(VOCABULARY))
    assert make_codec(entry, contents).size == len(VOCABULARY)
    for changed in ({"vocabulary": ""}, {"kind": "sentencepiece"}):
        with pytest.raises(BundleError, match="do not go together"):
            make_codec(entry.model_copy(update=changed), contents)
    with pytest.raises(BundleError, match="ids, the manifest says 7"):
        make_codec(entry.model_copy(update={"size": 7}), contents)
