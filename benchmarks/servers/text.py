"""Text to CTranslate2's tokens and back, for the servers around it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sentencepiece

from benchmarks.formats import ctranslate2 as models
from benchmarks.peers.base import Weights


class Tokenizer:
    """SentencePiece as the model was trained with."""

    def __init__(self, weights: Weights, quantization: str) -> None:
        folder = models.folder_of(weights, quantization)
        self.folder = str(folder)
        tokens = json.loads((folder / models.VOCABULARY).read_text(encoding="utf-8"))
        self._end = tokens[weights.eos]
        marian = weights.form == "marian"
        path = weights.path("marian", "source.spm") if marian else weights.path("bundle", "codec.model")
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        pieces = [self._processor.id_to_piece(index) for index in range(self._processor.get_piece_size())]
        self._tokens = pieces if marian else tokens  # SentencePiece's id -> CTranslate2's token
        self._pieces = dict(zip(self._tokens, pieces, strict=False))

    def encode(self, text: str) -> list[str]:
        """Tokens of a text, end symbol included."""
        return [*(self._tokens[index] for index in self._processor.encode(text)), self._end]

    def decode(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        return str(self._processor.decode_pieces([self._pieces.get(token, token) for token in tokens]))


def open_translator(spec: dict[str, Any]) -> tuple[Any, Tokenizer]:
    """CTranslate2 and its tokenizer, as a server's settings say."""
    import ctranslate2

    tokenizer = Tokenizer(Weights(**spec["weights"]), spec["quantization"])
    translator = ctranslate2.Translator(
        tokenizer.folder,
        device="cpu",
        compute_type=spec["quantization"],
        inter_threads=spec["inter"],
        intra_threads=spec["intra"],
    )
    return translator, tokenizer


def translate(translator: Any, sources: list[list[str]], beam: int, spec: dict[str, Any]) -> list[list[str]]:
    """Translate a batch; the same search as everywhere in these benchmarks."""
    results = translator.translate_batch(
        sources,
        beam_size=beam,
        length_penalty=0.0,
        max_decoding_length=spec["forced"] or spec["limit"],
        min_decoding_length=spec["forced"] or 1,
    )
    return [result.hypotheses[0] for result in results]
