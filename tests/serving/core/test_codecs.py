from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.codecs import SentencePieceCodec, open_codec
from serving.core.errors import BundleDamaged, BundleError, InvalidInput
from serving.core.manifest import Bundle, CodecEntry
from tests.serving.engine.tiny import codec_model, write_bundle

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
