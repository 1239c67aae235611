"""Tiny checkpoints as OPUS-MT's are: SentencePiece models and vocabularies, and the files around them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece

from tests.support.toy import toy_pairs

SOURCES, TARGETS = zip(*toy_pairs(300, seed=5), strict=True)
ENGLISH = [
    "The cat sat on the mat, and the dog looked at it.",
    "How much is a ticket to the old town?",
    "They don't know what 3 + 4 is; we do!",
    "I'd like two coffees, please.",
    "Where is the nearest station? It's over there.",
]
GERMAN = [
    "Die Katze saß auf der Matte, und der Hund sah sie an.",
    "Wie viel kostet eine Fahrkarte in die Altstadt?",
    "Sie wissen nicht, was 3 + 4 ist; wir schon!",
    "Ich hätte gern zwei Kaffee, bitte.",
    "Wo ist der nächste Bahnhof? Er ist da drüben.",
]
LANGUAGES = (">>deu<<", ">>nld<<")


def sentencepiece_model(sentences: Iterable[str], size: int, **options: Any) -> bytes:
    """A unigram model with SentencePiece's own control symbols, as OPUS-MT trains it."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=model,
        vocab_size=size,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


def source_model() -> bytes:
    return sentencepiece_model([*SOURCES, *ENGLISH * 4], 120)


def target_model() -> bytes:
    return sentencepiece_model([*TARGETS, *GERMAN * 4], 120)


def vocabulary(*models: bytes, extra: Iterable[str] = ()) -> dict[str, int]:
    """Ids of the pieces of all models: end and unknown first, pad last, as Marian's are."""
    pieces = ["</s>", "<unk>"]
    for model in models:
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces += [processor.id_to_piece(i) for i in range(len(processor)) if not processor.is_control(i)]
    return {piece: index for index, piece in enumerate(dict.fromkeys([*pieces, *extra, "<pad>"]))}


def write_tokenizer(folder: Path, separate: bool = False, extra: int = 0) -> tuple[int, int]:
    """Write the files of a tokenizer; the sizes of the source's and the target's vocabulary.

    With `extra` a joint vocabulary has so many pieces more, which no text is cut into.
    """
    folder.mkdir(parents=True, exist_ok=True)
    models = {"source": source_model(), "target": target_model()}
    for side, model in models.items():
        (folder / f"{side}.spm").write_bytes(model)
    spare = [f"\u2581spare{number}" for number in range(extra)]
    if separate:
        # A configuration names one pad for both sides: pieces that nothing is cut into bring it to one place.
        sizes = {side: len(vocabulary(model)) for side, model in models.items()}
        fill = {side: [f"\u2581fill{n}" for n in range(max(sizes.values()) - size)] for side, size in sizes.items()}
        found = {
            name: vocabulary(models[side], extra=fill[side])
            for side, name in (("source", "vocab.json"), ("target", "target_vocab.json"))
        }
    else:
        found = {"vocab.json": vocabulary(*models.values(), extra=(*LANGUAGES, *spare))}
    for name, ids in found.items():
        (folder / name).write_text(json.dumps(ids, ensure_ascii=False), encoding="utf-8")
    settings = {"source_lang": "en", "target_lang": "de", "separate_vocabs": separate}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    sizes = [len(ids) for ids in found.values()]
    return sizes[0], sizes[-1]
