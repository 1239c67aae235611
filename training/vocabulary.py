"""Fitting codecs to a corpus."""

from __future__ import annotations

import io
from collections.abc import Iterable

import sentencepiece

from serving.core.codecs import SentencePieceCodec
from serving.core.errors import ConfigError
from training.config import Vocabulary


def fit_sentencepiece(sentences: Iterable[str], settings: Vocabulary) -> bytes:
    """Fit one SentencePiece model with byte fallback on `sentences` (both languages for a joint one).

    Raises:
        ConfigError: the corpus is too small for the size asked for.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            model_writer=model,
            vocab_size=settings.size,
            model_type=settings.model,
            character_coverage=0.9999,
            byte_fallback=True,
            normalization_rule_name=settings.normalisation,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            num_threads=1,  # the result must not depend on the machine
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise ConfigError(f"vocabulary.size {settings.size} does not fit the corpus: {reason}") from error
    SentencePieceCodec(model.getvalue())
    return model.getvalue()
