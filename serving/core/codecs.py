"""Codecs: text to ids and back, the same in training, export and serving."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from serving.core.errors import BundleDamaged, BundleError, InvalidInput
from serving.core.manifest import Bundle, CodecEntry
from serving.core.types import SpecialIds


class Codec(Protocol):
    """Text to ids and back. Pad, begin and end symbols never come out of `encode`, whatever the text says."""

    @property
    def size(self) -> int:
        """Number of ids."""

    @property
    def special(self) -> SpecialIds:
        """The control symbols."""

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, without begin and end symbols; empty for text with nothing in it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control symbols yield nothing."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """A printable piece of text for each id."""


def _running_text(text: str) -> str:
    """What SentencePiece is given.

    Raises:
        InvalidInput: the text holds a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInput(f"the text is not valid Unicode at character {error.start}") from error
    # A NUL ends the text for SentencePiece; it means nothing in running text, so it reads as a space.
    return text.replace("\0", " ")


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise BundleDamaged(f"the SentencePiece model cannot be read: {error}") from error


class SentencePieceCodec:
    """A SentencePiece model with byte fallback, so every text has ids.

    The literal texts of control symbols ("</s>", "<pad>") are plain text: SentencePiece never parses control
    symbols out of its input. A text that holds a lone surrogate is refused, since it is not Unicode text.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        p = self._processor = _processor(model)
        self._special = SpecialIds(p.pad_id(), p.bos_id(), p.eos_id(), p.unk_id())
        if min(p.pad_id(), p.bos_id(), p.eos_id(), p.unk_id()) < 0:
            raise BundleError(
                "the SentencePiece model lacks a pad, begin, end or unknown symbol; train it with all four"
            )
        self._control = {i for i in range(p.get_piece_size()) if p.is_control(i) or p.is_unknown(i)}

    @classmethod
    def load(cls, path: Path) -> SentencePieceCodec:
        """Read the model file."""
        return cls(path.read_bytes())

    @property
    def size(self) -> int:
        return int(self._processor.get_piece_size())

    @property
    def special(self) -> SpecialIds:
        return self._special

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(_running_text(text))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([i for i in ids if i not in self._control]))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(self._processor.id_to_piece(int(i))) for i in ids]


class VocabularyCodec:
    """A SentencePiece model that cuts, and a vocabulary that numbers the pieces: the codec of Marian's models.

    The vocabulary may know pieces that the model does not, and the reverse: a piece without a number is the unknown
    symbol. A text that begins with a language token such as ">>deu<<" keeps it as one piece. Apart from that, and as
    in `SentencePieceCodec`, the names of control symbols are plain text.
    """

    kind = "sentencepiece-vocabulary"

    def __init__(self, model: bytes, vocabulary: bytes) -> None:
        """From a SentencePiece model and a JSON object with `pieces`, a piece or null for each id, and the ids `pad`,
        `bos`, `eos` and `unk`.

        Raises:
            BundleDamaged: one of them cannot be read.
        """
        self._processor = _processor(model)
        try:
            read = json.loads(vocabulary)
            self._pieces: list[str | None] = [None if piece is None else str(piece) for piece in read["pieces"]]
            self._special = SpecialIds(*(int(read[name]) for name in ("pad", "bos", "eos", "unk")))
        except (ValueError, TypeError, KeyError) as error:
            raise BundleDamaged(f"the vocabulary of the codec cannot be read: {error!r}") from error
        special = self._special
        self._control = {special.pad, special.bos, special.eos, special.unk}
        if not 0 <= min(self._control) <= max(self._control) < len(self._pieces):
            raise BundleDamaged(f"the vocabulary of the codec has no ids {special}, only {len(self._pieces)} pieces")
        self._ids = {
            piece: index for index, piece in enumerate(self._pieces) if piece is not None and index not in self._control
        }

    @property
    def size(self) -> int:
        return len(self._pieces)

    @property
    def special(self) -> SpecialIds:
        return self._special

    @property
    def language_tokens(self) -> list[str]:
        """Pieces such as ">>deu<<" that a text may begin with."""
        return [piece for piece in self._ids if piece.startswith(">>") and piece.endswith("<<")]

    def encode(self, text: str) -> list[int]:
        text = _running_text(text)
        cut = text.find("<<") + 2 if text.startswith(">>") and "<<" in text else 0
        pieces = [text[:cut]] * bool(cut) + self._processor.encode(text[cut:], out_type=str)
        return [self._ids.get(piece, self._special.unk) for piece in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = [self._pieces[i] for i in ids if i not in self._control]
        text = str(self._processor.decode_pieces([piece for piece in pieces if piece is not None]))
        return text.replace("\u2581", " ").strip()  # pieces that the model does not know keep their mark of a space

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._pieces[i] or "" for i in ids]


CODECS: dict[str, Callable[..., Codec]] = {one.kind: one for one in (SentencePieceCodec, VocabularyCodec)}


def make_codec(entry: CodecEntry, contents: Mapping[str, bytes]) -> Codec:
    """The codec that a manifest describes, from the contents of its files.

    Raises:
        BundleError: this fuseq does not know the kind, or the files do not fit the manifest.
    """
    if entry.kind not in CODECS:
        raise BundleError(f"codec kind {entry.kind!r} is unknown; this fuseq knows {', '.join(sorted(CODECS))}")
    if bool(entry.vocabulary) != (CODECS[entry.kind] is VocabularyCodec):
        raise BundleError(f"codec {entry.file}: kind {entry.kind!r} and the files {entry.files()} do not go together")
    codec = CODECS[entry.kind](*(contents[name] for name in entry.files()))
    if codec.size != entry.size:
        raise BundleError(f"codec {entry.file} has {codec.size} ids, the manifest says {entry.size}")
    return codec


def open_codec(bundle: Bundle, entry: CodecEntry) -> Codec:
    """The codec of a bundle on disk that the manifest describes.

    Raises:
        BundleError: as `make_codec`.
    """
    return make_codec(entry, {name: bundle.file(name).read_bytes() for name in entry.files()})
