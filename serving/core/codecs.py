"""Codecs: text to ids and back, the same in training, export and serving."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import sentencepiece

from serving.core.errors import BundleDamaged, BundleError, InvalidInput
from serving.core.manifest import Bundle, CodecEntry
from serving.core.types import SpecialIds


class Codec(Protocol):
    """Text to ids and back. Control symbols never come out of `encode`, whatever the text says."""

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


class SentencePieceCodec:
    """A SentencePiece model with byte fallback, so every text has ids.

    The literal texts of control symbols ("</s>", "<pad>") are plain text: SentencePiece never parses control
    symbols out of its input. A text that holds a lone surrogate is refused, since it is not Unicode text.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise BundleDamaged(f"the SentencePiece model cannot be read: {error}") from error
        p = self._processor
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
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidInput(f"the text is not valid Unicode at character {error.start}") from error
        # A NUL ends the text for SentencePiece; it means nothing in running text, so it reads as a space.
        ids: list[int] = self._processor.encode(text.replace("\0", " "))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._processor.decode([i for i in ids if i not in self._control]))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [str(self._processor.id_to_piece(int(i))) for i in ids]


CODECS: dict[str, Callable[[Path], Codec]] = {SentencePieceCodec.kind: SentencePieceCodec.load}


def open_codec(bundle: Bundle, entry: CodecEntry) -> Codec:
    """The codec that the manifest describes.

    Raises:
        BundleError: this fuseq does not know the kind, or the file does not fit the manifest.
    """
    if entry.kind not in CODECS:
        raise BundleError(f"codec kind {entry.kind!r} is unknown; this fuseq knows {', '.join(sorted(CODECS))}")
    codec = CODECS[entry.kind](bundle.file(entry.file))
    if codec.size != entry.size:
        raise BundleError(f"codec {entry.file} has {codec.size} ids, the manifest says {entry.size}")
    return codec
